//! Matrix products: `out[m, n]` (=|+=) scale · a · b (+ bias) (+ residual), with either operand transposed, and
//! with strided rows of a and of the result.
//!
//! - `tiles`: register tiles of f32 and f64, which keep GROUP_ROWS × PANEL_VECTORS vectors of the result in registers over
//!   a whole slice of k, and the unpacked product on one thread, which attention uses as well.
//! - `packed`: products of f32 and f64 over packed panels. `pairs`: those of bf16, with tiles of their own. [`Multiply`]
//!   chooses between them. The sizes of tiles and slices are in `plimsoll_program::workspace::cpu`, the vectors of a panel
//!   in `simd` (`PANEL_VECTORS`).
//! - `few_rows`: products with up to [`FEW_ROWS`] rows.
//!
//! Every element is summed over k in one order, whatever the tasks, so the result does not depend on the number of
//! threads.

mod few_rows;
mod packed;
mod pairs;
mod tiles;

pub(super) use few_rows::add_row_dots;
pub(super) use tiles::{Depth, Left, Target, small_product};

use super::simd::{Float, Real};
use crate::cpu::pool::Pool;
use few_rows::few_rows;
use half::bf16;
use plimsoll_program::workspace::cpu::{ATTENTION_QUERIES, PRODUCT_GROUP};

/// Largest number of rows of a product that reads its right operand in place, and sums other terms together than products
/// with more rows.
const FEW_ROWS: usize = 4;
/// Number of rows of a register tile, the part of a result that is summed in registers.
const GROUP_ROWS: usize = PRODUCT_GROUP as usize;
/// Number of columns of an operand that [`Multiply::pack_right_operand`] packs: the queries in a block of attention.
pub(super) const QUERIES: usize = ATTENTION_QUERIES as usize;

/// A matrix product: `out[m, n]` = scale · a · b (+ bias) (+ residual), or out += scale · a · b (…).
#[derive(Clone, Copy)]
pub struct Product<'a, T: Real> {
    /// Rows m of the result.
    pub m: usize,
    /// Columns n of the result.
    pub n: usize,
    /// Inner size k.
    pub k: usize,
    /// Left operand [m, k], or [k, m] if transposed.
    pub a: &'a [T],
    /// Whether `a` is stored as [k, m].
    pub a_transposed: bool,
    /// Right operand [k, n], or [n, k] if transposed (as weights are).
    pub b: &'a [T],
    /// Whether `b` is stored as [n, k].
    pub b_transposed: bool,
    /// Bias `[n]`, added to every row; `None` adds nothing.
    pub bias: Option<&'a [T]>,
    /// Residual [m, n], added to the result; `None` adds nothing. If it is the output itself, use `accumulate` instead.
    pub residual: Option<&'a [T]>,
    /// Whether to add to the output instead of overwriting it.
    pub accumulate: bool,
    /// Row stride of the stored `a`, in elements; at least the length of a row.
    pub a_row: usize,
    /// Row stride of the result, in elements; must be n if there is a residual.
    pub out_row: usize,
    /// Factor of a · b.
    pub scale: T::Wide,
}

impl<'a, T: Real> Product<'a, T> {
    /// Returns the plain product a · b of contiguous matrices.
    pub fn new(m: usize, n: usize, k: usize, a: &'a [T], b: &'a [T]) -> Product<'a, T> {
        Product {
            m,
            n,
            k,
            a,
            a_transposed: false,
            b,
            b_transposed: false,
            bias: None,
            residual: None,
            accumulate: false,
            a_row: k,
            out_row: n,
            scale: T::Wide::ONE,
        }
    }

    /// Returns the product with `a` stored as [k, m].
    pub fn a_transposed(self) -> Product<'a, T> {
        Product { a_transposed: true, a_row: self.m, ..self }
    }

    /// Returns the product with `b` stored as [n, k].
    pub fn b_transposed(self) -> Product<'a, T> {
        Product { b_transposed: true, ..self }
    }
}

/// A type whose matrices the CPU multiplies: f32, f64 or bf16.
pub trait Multiply: Real {
    /// Computes the product `p` into `out`, like [`product`], and packs the right operand for it. The result has the
    /// type of the operands or the wide type.
    fn packed_product<O: Real<Wide = Self::Wide>>(
        pool: &Pool,
        p: Product<Self>,
        out: &mut [O],
        scratch: &mut [Self::Wide],
    );
    /// Packs the right operand of a product of attention: `to[E, Q]` = the first `count` rows of `from` (stride `row`,
    /// E = `head` elements), transposed and times `scale`. bf16 packs pairs of neighbours instead and does not scale.
    /// Columns from `count` on are zero.
    fn pack_right_operand(
        from: &[Self],
        row: usize,
        count: usize,
        head: usize,
        scale: Self::Wide,
        to: &mut [Self::Wide],
    );
    /// Returns the factor that scores still need after `pack_right_operand` with `scale`: `scale` for bf16, which does
    /// not scale while it packs, else 1.
    fn remaining_scale(scale: Self::Wide) -> Self::Wide;
    /// Computes `target[m, n]` = `a[m, k]` · the operand that `pack_right_operand` has packed at `right`. Rows of a are
    /// `row` elements apart.
    fn score(
        m: usize,
        n: usize,
        k: usize,
        a: *const Self,
        row: usize,
        right: *const Self::Wide,
        target: Target<Self::Wide>,
    );
}

macro_rules! multiply {
    ($T:ident) => {
        impl Multiply for $T {
            fn packed_product<O: Real<Wide = Self>>(
                pool: &Pool,
                p: Product<Self>,
                out: &mut [O],
                scratch: &mut [Self],
            ) {
                packed::packed_product(pool, p, out, scratch);
            }
            fn pack_right_operand(from: &[Self], row: usize, count: usize, head: usize, scale: Self, to: &mut [Self]) {
                packed::pack_right_operand(from, row, count, head, scale, to);
            }
            fn remaining_scale(_: Self) -> Self {
                1.0
            }
            fn score(m: usize, n: usize, k: usize, a: *const Self, row: usize, right: *const Self, to: Target<Self>) {
                packed::score(m, n, k, a, row, right, to);
            }
        }
    };
}
multiply!(f32);
multiply!(f64);

impl Multiply for bf16 {
    fn packed_product<O: Real<Wide = f32>>(pool: &Pool, p: Product<Self>, out: &mut [O], scratch: &mut [f32]) {
        pairs::packed_product(pool, p, out, scratch);
    }
    fn pack_right_operand(from: &[Self], row: usize, count: usize, head: usize, _: f32, to: &mut [f32]) {
        pairs::pack_right_operand(from, row, count, head, to);
    }
    fn remaining_scale(scale: f32) -> f32 {
        scale
    }
    fn score(m: usize, n: usize, k: usize, a: *const Self, row: usize, right: *const f32, to: Target<f32>) {
        pairs::score(m, n, k, a, row, right, to);
    }
}

/// Computes the product `p` into `out`. Sums are in the wide type and rounded once to the type of the result. That is
/// the type of the operands, or the wide one, as for weight gradients. `scratch` has `workspace::cpu::product`
/// elements.
pub fn product<T: Multiply, O: Real<Wide = T::Wide>>(
    pool: &Pool,
    p: Product<T>,
    out: &mut [O],
    scratch: &mut [T::Wide],
) {
    let Product { m, n, k, .. } = p;
    if m == 0 || n == 0 {
        return;
    }
    let (a_rows, a_columns) = if p.a_transposed { (k, m) } else { (m, k) };
    assert!(
        p.a_row >= a_columns && p.a.len() >= a_rows.saturating_sub(1) * p.a_row + a_columns.min(a_rows * a_columns)
    );
    assert!(p.out_row >= n && out.len() >= (m - 1) * p.out_row + n, "result of a {m} x {n} x {k} product");
    assert!(p.b.len() >= k * n && p.bias.is_none_or(|bias| bias.len() >= n));
    assert!(p.residual.is_none_or(|residual| residual.len() >= m * n && p.out_row == n));
    if m <= FEW_ROWS && p.b_transposed && !p.a_transposed {
        return few_rows(pool, p, out);
    }
    T::packed_product(pool, p, out, scratch);
}
