//! Root-mean-square norms of rows, and of queries and keys, with their gradients.
//!
//! y = x · r · w with r = 1 / sqrt(mean(x²) + eps), where w = weight + offset. For the gradient, with g = dy · w:
//! dx = r · (g − x · r² · mean(g · x)), dw = Σ over rows of dy · x · r.

use super::elementwise::partial_sums;
use super::embed::add_to;
use super::simd::{Float, Real, get, put, strips, vectorized};
use super::{Heads, attention::Columns};
use crate::cpu::pool::{Pool, Shared};
use std::ops::Range;

/// Smallest number of elements that one task of the thread pool processes.
const MIN_TASK_ELEMENTS: usize = 8192;

/// The weight of a norm: `values` + `offset`.
#[derive(Clone, Copy)]
pub struct NormWeight<'a, T> {
    /// The stored weight, as many elements as the norm covers.
    pub values: &'a [T],
    /// Number that is added to each element.
    pub offset: f64,
}

vectorized! {
    /// Normalizes a row: computes out = x · r · w (+ residual) with r = 1 / sqrt(mean(x²) + eps), and returns r.
    fn norm_row<T, V>(x: &[T], w: NormWeight<T>, residual: Option<&[T]>, eps: T::Wide, out: &mut [T]) -> T::Wide {
        let offset = V::splat(T::Wide::from_f64(w.offset));
        let mut squares = V::splat(T::Wide::ZERO);
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let value: V = get(x, at, count);
            squares = value.mul_add(value, squares);
        });
        let r = T::Wide::ONE / (squares.sum() / T::Wide::from_f64(x.len() as f64) + eps).sqrt();
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let w = get::<T, V>(w.values, at, count) + offset;
            let mut normed = get::<T, V>(x, at, count) * V::splat(r) * w;
            if let Some(residual) = residual {
                normed = normed + get::<T, V>(residual, at, count);
            }
            put(out, at, count, normed);
        });
        r
    }
}

vectorized! {
    /// Computes the gradient of one normalized row: `dx` (= or, with `accumulate`, +=), and `dweight` +=. `r` is the
    /// number that [`norm_row`] returned.
    fn norm_row_grad<T, V>(x: &[T], w: NormWeight<T>, r: T::Wide, dout: &[T], dx: &mut [T], dweight: &mut [T::Wide], accumulate: bool) {
        let offset = V::splat(T::Wide::from_f64(w.offset));
        let mut products = V::splat(T::Wide::ZERO);
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let g = get::<T, V>(dout, at, count) * (get::<T, V>(w.values, at, count) + offset);
            products = g.mul_add(get::<T, V>(x, at, count), products);
        });
        let rate = V::splat(-(r * r * r * (products.sum() / T::Wide::from_f64(x.len() as f64))));
        let r = V::splat(r);
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let (x, dy): (V, V) = (get::<T, V>(x, at, count), get::<T, V>(dout, at, count));
            put(dweight, at, count, (dy * x).mul_add(r, get::<T::Wide, V>(dweight, at, count)));
            let mut d = x.mul_add(rate, dy * (get::<T, V>(w.values, at, count) + offset) * r);
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
    fn norm_row_grad_in_place<T, V>(x: &[T], w: NormWeight<T>, r: T::Wide, d: &mut [T], dweight: &mut [T::Wide]) {
        let offset = V::splat(T::Wide::from_f64(w.offset));
        let mut products = V::splat(T::Wide::ZERO);
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let g = get::<T, V>(d, at, count) * (get::<T, V>(w.values, at, count) + offset);
            products = g.mul_add(get::<T, V>(x, at, count), products);
        });
        let rate = V::splat(-(r * r * r * (products.sum() / T::Wide::from_f64(x.len() as f64))));
        let r = V::splat(r);
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let (x, dy): (V, V) = (get::<T, V>(x, at, count), get::<T, V>(d, at, count));
            put(dweight, at, count, (dy * x).mul_add(r, get::<T::Wide, V>(dweight, at, count)));
            put(d, at, count, x.mul_add(rate, dy * (get::<T, V>(w.values, at, count) + offset) * r));
        });
    }
}

/// Normalizes the R rows of x: computes `out[R, D]` = x / rms · weight (+ `residual[R, D]`), and `rstd[R]` = 1 / rms,
/// where rms = sqrt(mean(x²) + eps) of the row.
pub fn rms_norm<T: Real>(
    pool: &Pool,
    x: &[T],
    weight: NormWeight<T>,
    residual: Option<&[T]>,
    eps: f64,
    out: &mut [T],
    rstd: &mut [T::Wide],
) {
    let (rows, dim) = (rstd.len(), weight.values.len());
    assert!(x.len() == rows * dim && out.len() == rows * dim);
    assert!(residual.is_none_or(|residual| residual.len() == rows * dim));
    let (out, rstd) = (Shared::new(out), Shared::new(rstd));
    pool.split(rows, MIN_TASK_ELEMENTS.div_ceil(dim.max(1)), |range, _| {
        for row in range {
            let part = row * dim..(row + 1) * dim;
            // SAFETY: rows of one split are disjoint.
            let (out, rstd) = unsafe { (out.part(part.clone()), rstd.part(row..row + 1)) };
            let residual = residual.map(|residual| &residual[part.clone()]);
            rstd[0] = norm_row(&x[part], weight, residual, T::Wide::from_f64(eps), out);
        }
    });
}

/// Computes the gradient of `rms_norm`: `dx[R, D]` (= or, with `accumulate`, +=), and `dweight[D]` += (`None` for a
/// frozen weight). `scratch` has `workspace::cpu::sum_rows(rows, dim)` elements.
pub fn rms_norm_grad<T: Real>(
    pool: &Pool,
    x: &[T],
    weight: NormWeight<T>,
    rstd: &[T::Wide],
    dout: &[T],
    dx: &mut [T],
    dweight: Option<&mut [T::Wide]>,
    accumulate: bool,
    scratch: &mut [T::Wide],
) {
    let (rows, dim) = (rstd.len(), weight.values.len());
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

/// The norms of a row of queries, keys and values: of each head, or of all heads together.
struct Norms {
    columns: Columns,
    /// Elements that a norm of queries covers, and a norm of keys.
    widths: [usize; 2],
    /// Number of norms of queries.
    of_queries: usize,
    /// Number of all norms.
    count: usize,
}

impl Norms {
    /// Returns the norms whose weights have `widths` elements, of queries and of keys.
    fn new(shape: Heads, widths: [usize; 2]) -> Norms {
        let columns = Columns::from_heads(shape);
        let [queries, keys] = [columns.keys, columns.values - columns.keys];
        assert!(queries.is_multiple_of(widths[0]) && keys.is_multiple_of(widths[1]), "weights have the sizes of norms");
        let of_queries = queries / widths[0];
        Norms { columns, widths, of_queries, count: of_queries + keys / widths[1] }
    }

    /// Returns the columns of a row that a norm covers, and 0 for queries or 1 for keys.
    fn part(&self, norm: usize) -> (Range<usize>, usize) {
        let (kind, number, first) =
            if norm < self.of_queries { (0, norm, 0) } else { (1, norm - self.of_queries, self.columns.keys) };
        let start = first + number * self.widths[kind];
        (start..start + self.widths[kind], kind)
    }
}

/// Normalizes the queries of `x[N, C]` with the first of `weights` and the keys with the second, copies the values, and
/// writes the result to `out[N, C]`. Each norm covers as many elements as its weight has: one head, or all heads. `rstd`
/// gets 1 / rms of each norm, `[N, H + K]` for norms of single heads and `[N, 2]` for norms of all heads.
pub fn head_norm<T: Real>(
    pool: &Pool,
    shape: Heads,
    x: &[T],
    weights: [NormWeight<T>; 2],
    eps: f64,
    out: &mut [T],
    rstd: &mut [T::Wide],
) {
    let norms = Norms::new(shape, weights.map(|weight| weight.values.len()));
    let (c, count) = (norms.columns, norms.count);
    let rows = rstd.len() / count;
    assert!(x.len() == rows * c.all && out.len() == rows * c.all);
    let (out, rstd) = (Shared::new(out), Shared::new(rstd));
    pool.split(rows, MIN_TASK_ELEMENTS.div_ceil(c.all), |range, _| {
        for row in range {
            // SAFETY: rows of one split are disjoint.
            let (out, rstd) =
                unsafe { (out.part(row * c.all..(row + 1) * c.all), rstd.part(row * count..(row + 1) * count)) };
            let x = &x[row * c.all..(row + 1) * c.all];
            for (norm, r) in rstd.iter_mut().enumerate() {
                let (part, kind) = norms.part(norm);
                *r = norm_row(&x[part.clone()], weights[kind], None, T::Wide::from_f64(eps), &mut out[part]);
            }
            out[c.values..].copy_from_slice(&x[c.values..]);
        }
    });
}

/// Replaces `dx[N, C]`, the gradient of the output of `head_norm`, by that of its input. Adds to `dweights` (of queries
/// and of keys; `None` for frozen weights). `scratch` has `workspace::cpu::sum_rows(rows, elements)` elements for
/// weights with `elements` elements together.
pub fn head_norm_grad<T: Real>(
    pool: &Pool,
    shape: Heads,
    x: &[T],
    weights: [NormWeight<T>; 2],
    rstd: &[T::Wide],
    dx: &mut [T],
    dweights: Option<[&mut [T::Wide]; 2]>,
    scratch: &mut [T::Wide],
) {
    let norms = Norms::new(shape, weights.map(|weight| weight.values.len()));
    let (c, count, [queries, keys]) = (norms.columns, norms.count, norms.widths);
    let rows = rstd.len() / count;
    assert!(x.len() == rows * c.all && dx.len() == rows * c.all);
    let dx = Shared::new(dx);
    let each = queries + keys;
    let sums = partial_sums(pool, rows, each, scratch, |range, sum| {
        let (dq, dk) = sum.split_at_mut(queries);
        for row in range {
            // SAFETY: portions have disjoint rows.
            let dx = unsafe { dx.part(row * c.all..(row + 1) * c.all) };
            for norm in 0..count {
                let (part, kind) = norms.part(norm);
                let dweight = if kind == 0 { &mut *dq } else { &mut *dk };
                let x = &x[row * c.all..][part.clone()];
                norm_row_grad_in_place(x, weights[kind], rstd[row * count + norm], &mut dx[part], dweight);
            }
        }
    });
    if let Some([dq_weight, dk_weight]) = dweights {
        for sum in scratch[..sums * each].chunks_exact(each) {
            add_to(dq_weight, &sum[..queries]);
            add_to(dk_weight, &sum[queries..]);
        }
    }
}
