//! Products with few rows, as one dot product per element. The right operand is read once, in place.

use super::{FEW_ROWS, Product};
use crate::cpu::kernels::simd::{Float, Real, Vector, get, prefetch, vectorized};
use crate::cpu::pool::{Pool, Shared};

/// Number of rows of a whose dot products are in registers at once. AVX2 has 16 registers: 12 sums, three parts of rows
/// of a, and one of b.
const TILE_ROWS: usize = 3;
/// Number of rows of b whose dot products are in registers at once.
const COLUMNS: usize = 4;
/// Number of columns of the result that are computed from one copy of a part of a; a multiple of [`COLUMNS`].
const CHUNK: usize = 64;
/// Number of elements of a that are copied at once. They fit into a cache of the core.
const LEFT: usize = 10240;
/// Distance between the ends and the beginnings of copied rows of a. Rows a power of two apart would displace each other
/// in a cache.
const GAP: usize = 16;

/// Sums of products: a row for each row of a, a column for each of a chunk.
type Sums<T> = [[T; CHUNK]; FEW_ROWS];

/// Computes a product with at most [`FEW_ROWS`] rows, as one dot product per element.
pub fn few_rows<T: Real, O: Real<Wide = T::Wide>>(pool: &Pool, p: Product<T>, out: &mut [O]) {
    let Product { m, n, k, .. } = p;
    let shared = Shared::new(out);
    let depth = left_depth(m, k);
    // At least 64 Ki multiplications per task.
    pool.split(n, (65536 / (m * k).max(1)).max(COLUMNS), |range, _| {
        let mut left = [T::Wide::ZERO; LEFT];
        let mut sums: Sums<T::Wide> = [[T::Wide::ZERO; CHUNK]; FEW_ROWS];
        for j in range.clone().step_by(CHUNK) {
            let columns = CHUNK.min(range.end - j);
            sums[..m].fill([T::Wide::ZERO; CHUNK]);
            if m == 1 {
                dot_rows(&p.a[..k], &p.b[j * k..(j + columns) * k], k, &mut sums[0][..columns]);
            } else {
                for from in (0..k).step_by(depth) {
                    let part = depth.min(k - from);
                    let left = copy_left(&p.a[from..], p.a_row, (m, part), &mut left);
                    let b = &p.b[j * k + from..][..(columns - 1) * k + part];
                    add_products(m, part, left, b, k, columns, &mut sums);
                }
            }
            for (i, sums) in sums[..m].iter().enumerate() {
                // SAFETY: columns of one split are disjoint.
                let to = unsafe { shared.part(i * p.out_row + j..i * p.out_row + j + columns) };
                finish(&p, i, j, sums, to);
            }
        }
    });
}

/// Writes the elements from (i, j) on of a product to `to`, with the terms that are added to it.
fn finish<T: Real, O: Real<Wide = T::Wide>>(p: &Product<T>, i: usize, j: usize, sums: &[T::Wide], to: &mut [O]) {
    for (column, to) in to.iter_mut().enumerate() {
        let mut sum = sums[column] * p.scale;
        if let Some(bias) = p.bias {
            sum += bias[j + column].widen();
        }
        if let Some(residual) = p.residual {
            sum += residual[i * p.n + j + column].widen();
        }
        *to = O::narrow(if p.accumulate { to.widen() + sum } else { sum });
    }
}

/// Returns the part of k that is multiplied at once with `m` rows: a multiple of [`GAP`].
fn left_depth(m: usize, k: usize) -> usize {
    let most = (LEFT / m - GAP) / GAP * GAP;
    k.div_ceil(k.div_ceil(most).max(1)).next_multiple_of(GAP).max(GAP)
}

/// Returns the number of elements between the beginnings of copied rows of `depth` elements.
fn left_row(depth: usize) -> usize {
    depth.next_multiple_of(GAP) + GAP
}

/// Copies the first `depth` elements of `m` rows of a (stride `a_row`) to rows of [`left_row`] elements, with zeros behind
/// them. Returns the rows.
fn copy_left<'l, T: Real>(a: &[T], a_row: usize, (m, depth): (usize, usize), to: &'l mut [T::Wide]) -> &'l [T::Wide] {
    let row = left_row(depth);
    for (i, to) in to.chunks_exact_mut(row).take(m).enumerate() {
        for (to, from) in to.iter_mut().zip(&a[i * a_row..][..depth]) {
            *to = from.widen();
        }
        to[depth..].fill(T::Wide::ZERO);
    }
    &to[..m * row]
}

vectorized! {
    /// Adds to `sums[i][j]` the product of row i of `left` (zero from `depth` on) and of row j of b (stride `b_row`), over `depth` elements.
    fn add_products<T, V>(m: usize, depth: usize, left: &[T::Wide], b: &[T], b_row: usize, columns: usize, sums: &mut Sums<T::Wide>) {
        for j in (0..columns).step_by(COLUMNS) {
            let (mut first, mut tiles) = (0, m.div_ceil(TILE_ROWS));
            while tiles > 0 {
                // Two or three: tiles of nearly equal size.
                let rows = (m - first).div_ceil(tiles);
                let (left, b, sums) = (&left[first * left_row(depth)..], &b[j * b_row..], &mut sums[first..]);
                // The rows of b that follow are read next. The hardware does not prefetch across pages. With many tiles,
                // which take longer to compute than to read, the first one prefetches them all.
                let ahead = |row: usize| b.as_ptr().wrapping_add((COLUMNS + row % COLUMNS) * b_row);
                let (none, some, all) = ([], [ahead(tiles), ahead(tiles + 2)], [0, 1, 2, 3].map(ahead));
                match (rows, (columns - j).min(COLUMNS)) {
                    (2, COLUMNS) if m <= 9 => tile::<T, V, 2, COLUMNS, 2>(depth, left, b, b_row, j, some, sums),
                    (_, COLUMNS) if m <= 9 => tile::<T, V, 3, COLUMNS, 2>(depth, left, b, b_row, j, some, sums),
                    (_, COLUMNS) if first == 0 => tile::<T, V, 3, COLUMNS, 4>(depth, left, b, b_row, j, all, sums),
                    (2, COLUMNS) => tile::<T, V, 2, COLUMNS, 0>(depth, left, b, b_row, j, none, sums),
                    (_, COLUMNS) => tile::<T, V, 3, COLUMNS, 0>(depth, left, b, b_row, j, none, sums),
                    (rows, columns) => {
                        for i in 0..rows {
                            for c in 0..columns {
                                let (left, b) = (&left[i * left_row(depth)..], &b[c * b_row..]);
                                tile::<T, V, 1, 1, 0>(depth, left, b, b_row, j + c, [], &mut sums[i..]);
                            }
                        }
                    }
                }
                (first, tiles) = (first + rows, tiles - 1);
            }
        }
    }
}

/// Adds to `sums[i][j + c]` the products of M rows of `left` and N rows of b, which are the columns from j on.
#[inline(always)]
fn tile<T: Real, V: Vector<T::Wide>, const M: usize, const N: usize, const P: usize>(
    depth: usize,
    left: &[T::Wide],
    b: &[T],
    b_row: usize,
    j: usize,
    ahead: [*const T; P],
    sums: &mut [[T::Wide; CHUNK]],
) {
    let row = left_row(depth);
    assert!(left.len() >= M * row && b.len() >= (N - 1) * b_row + depth);
    let mut totals = [[V::splat(T::Wide::ZERO); N]; M];
    let mut right = [b.as_ptr(); N];
    for c in 1..N {
        right[c] = b[c * b_row..].as_ptr();
    }
    let mut at = 0;
    while at + V::LANES <= depth {
        // SAFETY: inside both by the assertion.
        unsafe {
            add_strip(
                (left, row),
                at,
                &mut totals,
                #[inline(always)]
                |c| T::load(right[c].add(at)),
            )
        };
        for row in ahead {
            prefetch(row.wrapping_add(at));
        }
        at += V::LANES;
    }
    if at < depth {
        // SAFETY: rows of `left` have whole vectors.
        unsafe {
            add_strip(
                (left, row),
                at,
                &mut totals,
                #[inline(always)]
                |c| get::<T, V>(b, c * b_row + at, depth - at),
            )
        };
    }
    for i in 0..M {
        for c in 0..N {
            sums[i][j + c] += totals[i][c].sum();
        }
    }
}

/// Adds the products of a vector of each row of `left`, at `at`, and of each row of b.
///
/// # Safety
/// M rows of `left` must have a vector at `at`.
#[inline(always)]
unsafe fn add_strip<T: Float, V: Vector<T>, const M: usize, const N: usize>(
    (left, row): (&[T], usize),
    at: usize,
    totals: &mut [[V; N]; M],
    right: impl Fn(usize) -> V,
) {
    let mut vectors = [totals[0][0]; M];
    for i in 0..M {
        // SAFETY: the caller's promise.
        vectors[i] = unsafe { V::load(left.as_ptr().add(i * row + at)) };
    }
    for c in 0..N {
        let right = right(c);
        for i in 0..M {
            totals[i][c] = vectors[i].mul_add(right, totals[i][c]);
        }
    }
}

vectorized! {
    /// Adds to each element of `sums` the dot product of a and the row of b (stride `b_row`) of the same number.
    pub fn dot_rows<T, V>(a: &[T], b: &[T], b_row: usize, sums: &mut [T::Wide]) {
        let k = a.len();
        let zero = V::splat(T::Wide::ZERO);
        for (number, four) in sums.chunks_mut(COLUMNS).enumerate() {
            let b = &b[number * COLUMNS * b_row..];
            let mut totals = [zero; COLUMNS];
            let mut at = 0;
            if four.len() == COLUMNS {
                assert!(b.len() >= (COLUMNS - 1) * b_row + k);
                while at + V::LANES <= k {
                    // SAFETY: inside a, and inside b by the assertion.
                    unsafe {
                        let left: V = T::load(a.as_ptr().add(at));
                        for c in 0..COLUMNS {
                            let from = b.as_ptr().add(c * b_row + at);
                            prefetch(from.wrapping_add(COLUMNS * b_row));
                            totals[c] = left.mul_add(T::load(from), totals[c]);
                        }
                    }
                    at += V::LANES;
                }
            }
            for (c, sum) in four.iter_mut().enumerate() {
                for at in (at..k).step_by(V::LANES) {
                    let count = V::LANES.min(k - at);
                    totals[c] = get::<T, V>(a, at, count).mul_add(get::<T, V>(b, c * b_row + at, count), totals[c]);
                }
                *sum += totals[c].sum();
            }
        }
    }
}
