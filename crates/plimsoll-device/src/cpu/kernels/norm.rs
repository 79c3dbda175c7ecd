//! Root-mean-square norms of rows, and of each query and key head, with their gradients.
//!
//! y = x · r · w with r = 1 / sqrt(mean(x²) + eps). For the gradient, with g = dy · w:
//! dx = r · (g − x · r² · mean(g · x)), dw = Σ over rows of dy · x · r.

use super::elementwise::partial_sums;
use super::embed::add_to;
use super::simd::{Float, Real, get, put, strips, vectorized};
use super::{Heads, attention::Columns};
use crate::cpu::pool::{Pool, Shared};

/// Smallest number of elements that one task of the thread pool processes.
const MIN_TASK_ELEMENTS: usize = 8192;

vectorized! {
    /// Normalizes a row: computes out = x · r · weight with r = 1 / sqrt(mean(x²) + eps), and returns r.
    fn norm_row<T, V>(x: &[T], weight: &[T], eps: T::Wide, out: &mut [T]) -> T::Wide {
        let mut squares = V::splat(T::Wide::ZERO);
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let value: V = get(x, at, count);
            squares = value.mul_add(value, squares);
        });
        let r = T::Wide::ONE / (squares.sum() / T::Wide::from_f64(x.len() as f64) + eps).sqrt();
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            put(out, at, count, get::<T, V>(x, at, count) * V::splat(r) * get::<T, V>(weight, at, count));
        });
        r
    }
}

vectorized! {
    /// Computes the gradient of one normalized row: `dx` (= or, with `accumulate`, +=), and `dweight` +=. `r` is the
    /// number that [`norm_row`] returned.
    fn norm_row_grad<T, V>(x: &[T], weight: &[T], r: T::Wide, dout: &[T], dx: &mut [T], dweight: &mut [T::Wide], accumulate: bool) {
        let mut products = V::splat(T::Wide::ZERO);
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let g = get::<T, V>(dout, at, count) * get::<T, V>(weight, at, count);
            products = g.mul_add(get::<T, V>(x, at, count), products);
        });
        let rate = V::splat(-(r * r * r * (products.sum() / T::Wide::from_f64(x.len() as f64))));
        let r = V::splat(r);
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let (x, dy): (V, V) = (get::<T, V>(x, at, count), get::<T, V>(dout, at, count));
            put(dweight, at, count, (dy * x).mul_add(r, get::<T::Wide, V>(dweight, at, count)));
            let mut d = x.mul_add(rate, dy * get::<T, V>(weight, at, count) * r);
            if accumulate {
                d = d + get::<T, V>(dx, at, count);
            }
            put(dx, at, count, d);
        });
    }
}

vectorized! {
    /// Replaces `d`, the gradient of the output of one normalized row, by that of the input, and adds to `dweight`. `r`
    /// is the number that [`norm_row`] returned.
    fn norm_row_grad_in_place<T, V>(x: &[T], weight: &[T], r: T::Wide, d: &mut [T], dweight: &mut [T::Wide]) {
        let mut products = V::splat(T::Wide::ZERO);
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let g = get::<T, V>(d, at, count) * get::<T, V>(weight, at, count);
            products = g.mul_add(get::<T, V>(x, at, count), products);
        });
        let rate = V::splat(-(r * r * r * (products.sum() / T::Wide::from_f64(x.len() as f64))));
        let r = V::splat(r);
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let (x, dy): (V, V) = (get::<T, V>(x, at, count), get::<T, V>(d, at, count));
            put(dweight, at, count, (dy * x).mul_add(r, get::<T::Wide, V>(dweight, at, count)));
            put(d, at, count, x.mul_add(rate, dy * get::<T, V>(weight, at, count) * r));
        });
    }
}

/// Normalizes the R rows of x: computes `out[R, D]` = x / rms · weight, and `rstd[R]` = 1 / rms, where rms =
/// sqrt(mean(x²) + eps) of the row.
pub fn rms_norm<T: Real>(pool: &Pool, x: &[T], weight: &[T], eps: f64, out: &mut [T], rstd: &mut [T::Wide]) {
    let (rows, dim) = (rstd.len(), weight.len());
    assert!(x.len() == rows * dim && out.len() == rows * dim);
    let (out, rstd) = (Shared::new(out), Shared::new(rstd));
    pool.split(rows, MIN_TASK_ELEMENTS.div_ceil(dim.max(1)), |range, _| {
        for row in range {
            let part = row * dim..(row + 1) * dim;
            // SAFETY: rows of one split are disjoint.
            let (out, rstd) = unsafe { (out.part(part.clone()), rstd.part(row..row + 1)) };
            rstd[0] = norm_row(&x[part], weight, T::Wide::from_f64(eps), out);
        }
    });
}

/// Computes the gradient of `rms_norm`: `dx[R, D]` (= or, with `accumulate`, +=), and `dweight[D]` += (`None` for a
/// frozen weight). `scratch` has `workspace::cpu::sum_rows(rows, dim)` elements.
pub fn rms_norm_grad<T: Real>(
    pool: &Pool,
    x: &[T],
    weight: &[T],
    rstd: &[T::Wide],
    dout: &[T],
    dx: &mut [T],
    dweight: Option<&mut [T::Wide]>,
    accumulate: bool,
    scratch: &mut [T::Wide],
) {
    let (rows, dim) = (rstd.len(), weight.len());
    assert!(x.len() == rows * dim && dout.len() == rows * dim && dx.len() == rows * dim);
    let dx = Shared::new(dx);
    let sums = partial_sums(pool, rows, dim, scratch, |range, sum| {
        for row in range {
            let part = row * dim..(row + 1) * dim;
            // SAFETY: portions have disjoint rows.
            let dx = unsafe { dx.part(part.clone()) };
            norm_row_grad(&x[part.clone()], weight, rstd[row], &dout[part], dx, sum, accumulate);
        }
    });
    if let Some(dweight) = dweight {
        assert_eq!(dweight.len(), dim);
        for sum in scratch[..sums * dim].chunks_exact(dim.max(1)) {
            add_to(dweight, sum);
        }
    }
}

/// Normalizes each query head of `x[N, C]` with `q_weight[E]` and each key head with `k_weight[E]`, copies the values,
/// and writes the result to `out[N, C]`. `rstd[N, H + K]` gets 1 / rms of each head.
pub fn head_norm<T: Real>(
    pool: &Pool,
    shape: Heads,
    x: &[T],
    q_weight: &[T],
    k_weight: &[T],
    eps: f64,
    out: &mut [T],
    rstd: &mut [T::Wide],
) {
    let c = Columns::from_heads(shape);
    let normed = c.heads + c.kv_heads;
    let rows = rstd.len() / normed;
    assert!(x.len() == rows * c.all && out.len() == rows * c.all);
    assert!(q_weight.len() == c.head && k_weight.len() == c.head);
    let (out, rstd) = (Shared::new(out), Shared::new(rstd));
    pool.split(rows, MIN_TASK_ELEMENTS.div_ceil(c.all), |range, _| {
        for row in range {
            // SAFETY: rows of one split are disjoint.
            let (out, rstd) =
                unsafe { (out.part(row * c.all..(row + 1) * c.all), rstd.part(row * normed..(row + 1) * normed)) };
            let x = &x[row * c.all..(row + 1) * c.all];
            for (head, r) in rstd.iter_mut().enumerate() {
                let weight = if head < c.heads { q_weight } else { k_weight };
                let part = head * c.head..(head + 1) * c.head;
                *r = norm_row(&x[part.clone()], weight, T::Wide::from_f64(eps), &mut out[part]);
            }
            out[c.values..].copy_from_slice(&x[c.values..]);
        }
    });
}

/// Replaces `dx[N, C]`, the gradient of the output of `head_norm`, by that of its input. Adds to `dweights` (`[E]` of
/// queries and `[E]` of keys; `None` for frozen weights). `scratch` has `workspace::cpu::sum_rows(rows, 2 E)` elements.
pub fn head_norm_grad<T: Real>(
    pool: &Pool,
    shape: Heads,
    x: &[T],
    q_weight: &[T],
    k_weight: &[T],
    rstd: &[T::Wide],
    dx: &mut [T],
    dweights: Option<[&mut [T::Wide]; 2]>,
    scratch: &mut [T::Wide],
) {
    let c = Columns::from_heads(shape);
    let normed = c.heads + c.kv_heads;
    let rows = rstd.len() / normed;
    assert!(x.len() == rows * c.all && dx.len() == rows * c.all);
    assert!(q_weight.len() == c.head && k_weight.len() == c.head);
    let dx = Shared::new(dx);
    let each = 2 * c.head;
    let sums = partial_sums(pool, rows, each, scratch, |range, sum| {
        let (dq, dk) = sum.split_at_mut(c.head);
        for row in range {
            // SAFETY: portions have disjoint rows.
            let dx = unsafe { dx.part(row * c.all..(row + 1) * c.all) };
            for head in 0..normed {
                let part = head * c.head..(head + 1) * c.head;
                let (weight, dweight) = if head < c.heads { (q_weight, &mut *dq) } else { (k_weight, &mut *dk) };
                let x = &x[row * c.all..][part.clone()];
                norm_row_grad_in_place(x, weight, rstd[row * normed + head], &mut dx[part], dweight);
            }
        }
    });
    if let Some([dq_weight, dk_weight]) = dweights {
        for sum in scratch[..sums * each].chunks_exact(each) {
            add_to(dq_weight, &sum[..c.head]);
            add_to(dk_weight, &sum[c.head..]);
        }
    }
}
