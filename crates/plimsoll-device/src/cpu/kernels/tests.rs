//! The CPU's kernels against plain loops in f64 and against central differences, on shapes that
//! are divisible by nothing; in bf16 within the rounding of the one store of each result; the same bits
//! for any number of threads; the same promises with every width of vectors.

use half::bf16;

use super::*;
use crate::cpu::pool::Pool;
use plimsoll_program::formats::{self, dynamic_map, int8_row, int8_value, nf4_block, nf4_group, nf4_scale, nf4_value};
use plimsoll_program::op::RopeScaling;
use plimsoll_program::workspace::{self, Kernels};
use proptest::prelude::*;

/// A small generator (an LCG of 64 bits, the upper half): tests must not need the kernels' own.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as f64 / 2f64.powi(31) - 1.0
    }

    fn many<T: Real>(&mut self, n: usize) -> Vec<T> {
        (0..n).map(|_| T::of(self.next())).collect()
    }

    fn below(&mut self, n: usize) -> usize {
        ((self.next() + 1.0) / 2.0 * n as f64) as usize % n
    }
}

fn pool(threads: usize) -> Pool {
    Pool::new(threads).unwrap()
}

/// Scratch that shows when it is read before it is written, of the size that the planner plans.
fn scratch<T: Real>(elements: u64) -> Vec<T> {
    vec![T::of(f64::NAN); elements as usize]
}

fn wide<T: Real>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.wide()).collect()
}

/// How far a sum of `terms` products of numbers around 1 may be off.
fn tolerance<T: Real>(terms: usize) -> f64 {
    let unit = if size_of::<T::Wide>() == 4 { f64::from(f32::EPSILON) } else { f64::EPSILON };
    4.0 * unit * (terms as f64 + 4.0)
}

#[track_caller]
fn close<T: Real>(got: &[T], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let off = (got.wide() - want).abs();
        // A bf16 has 8 bits: to the nearest of them is at most 2^-9 of the number. 2^-8 leaves room for what the sum in
        // f32 moves across a tie, and for nothing else.
        let stored = if T::IS_WIDE { 0.0 } else { want.abs() / 256.0 };
        assert!(off <= stored + tolerance * (1.0 + want.abs()), "{what}[{i}]: {got:?} for {want}");
    }
}

/// Central differences of `loss` at some elements of x, against `gradient`.
#[track_caller]
fn differences(x: &mut [f64], gradient: &[f64], what: &str, mut loss: impl FnMut(&[f64]) -> f64) {
    let h = 1e-5;
    let step = (x.len() / 50).max(1);
    for i in (0..x.len()).step_by(step) {
        let kept = x[i];
        x[i] = kept + h;
        let up = loss(x);
        x[i] = kept - h;
        let down = loss(x);
        x[i] = kept;
        let slope = (up - down) / (2.0 * h);
        assert!((slope - gradient[i]).abs() <= 1e-6 * (1.0 + slope.abs()), "{what}[{i}]: {} for {slope}", gradient[i]);
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

// Products

#[derive(Clone, Copy, Debug)]
struct ProductCase {
    m: usize,
    n: usize,
    k: usize,
    a_transposed: bool,
    b_transposed: bool,
    bias: bool,
    residual: bool,
    accumulate: bool,
    apart: bool,
}

/// Operands, and what stands where the product goes.
struct Numbers<T, O> {
    a: Vec<T>,
    b: Vec<T>,
    bias: Vec<T>,
    residual: Vec<T>,
    out: Vec<O>,
}

impl ProductCase {
    /// Of parts of wider matrices, or of whole ones.
    fn row(&self, columns: usize, by: usize) -> usize {
        if self.apart { columns + by } else { columns }
    }

    fn a_row(&self) -> usize {
        if self.a_transposed { self.row(self.m, 3) } else { self.row(self.k, 3) }
    }

    fn out_row(&self) -> usize {
        self.row(self.n, 5)
    }

    fn scale(&self) -> f64 {
        if self.apart { -0.75 } else { 1.0 }
    }

    fn draw<T: Real, O: Real>(&self, draw: &mut Draw) -> Numbers<T, O> {
        let ProductCase { m, n, k, .. } = *self;
        let a_rows = if self.a_transposed { k } else { m };
        let (a, b) = (draw.many(a_rows * self.a_row()), draw.many(k * n));
        let (bias, residual) = (draw.many(n), draw.many(m * n));
        Numbers { a, b, bias, residual, out: draw.many(m * self.out_row()) }
    }

    fn has_residual(&self) -> bool {
        self.residual && !self.apart
    }

    /// What it is, summed up one by one.
    fn want<T: Real, O: Real>(&self, numbers: &Numbers<T, O>) -> Vec<f64> {
        let ProductCase { m, n, k, .. } = *self;
        let (a, b, a_row, out_row) = (wide(&numbers.a), wide(&numbers.b), self.a_row(), self.out_row());
        let columns: Vec<f64> = match self.b_transposed {
            true => b,
            false => (0..n).flat_map(|j| (0..k).map(move |p| p * n + j)).map(|at| b[at]).collect(),
        };
        // What lies between the rows stays.
        let mut want = wide(&numbers.out);
        for i in 0..m {
            let row: Vec<f64> =
                (0..k).map(|p| a[if self.a_transposed { p * a_row + i } else { i * a_row + p }]).collect();
            for j in 0..n {
                let mut sum = dot(&row, &columns[j * k..(j + 1) * k]);
                sum *= self.scale();
                sum += if self.bias { numbers.bias[j].wide() } else { 0.0 };
                sum += if self.has_residual() { numbers.residual[i * n + j].wide() } else { 0.0 };
                sum += if self.accumulate { want[i * out_row + j] } else { 0.0 };
                want[i * out_row + j] = sum;
            }
        }
        want
    }

    /// What the kernel makes of it.
    fn got<T: Real, O: Real<Wide = T::Wide>>(&self, threads: usize, numbers: Numbers<T, O>) -> Vec<O> {
        let ProductCase { m, n, k, .. } = *self;
        let Numbers { a, b, bias, residual, mut out } = numbers;
        let product_of = Product {
            a_transposed: self.a_transposed,
            b_transposed: self.b_transposed,
            bias: self.bias.then_some(&bias[..]),
            residual: self.has_residual().then_some(&residual[..]),
            accumulate: self.accumulate,
            a_row: self.a_row(),
            out_row: self.out_row(),
            scale: T::Wide::of(self.scale()),
            ..Product::new(m, n, k, &a, &b)
        };
        let size = Kernels::Cpu { threads: threads as u64 }.product(T::DTYPE, m as u64, n as u64, k as u64);
        product(&pool(threads), product_of, &mut out, &mut scratch(size));
        out
    }
}

/// The result in O, and what it should be.
fn run_product<T: Real, O: Real<Wide = T::Wide>>(
    threads: usize,
    case: ProductCase,
    draw: &mut Draw,
) -> (Vec<O>, Vec<f64>) {
    let numbers = case.draw::<T, O>(draw);
    let want = case.want(&numbers);
    (case.got(threads, numbers), want)
}

fn flags(m: usize, n: usize, k: usize, bits: usize) -> ProductCase {
    let bit = |i: usize| bits >> i & 1 == 1;
    ProductCase {
        m,
        n,
        k,
        a_transposed: bit(0),
        b_transposed: bit(1),
        bias: bit(2),
        residual: bit(3),
        accumulate: bit(4),
        apart: bit(5),
    }
}

#[test]
fn products_are_right_in_every_form() {
    let mut draw = Draw(1);
    for (m, n, k) in [(1, 1, 1), (1, 70, 33), (3, 65, 17), (4, 9, 130), (5, 131, 40), (13, 64, 8), (98, 67, 23)] {
        for bits in 0..64 {
            let case = flags(m, n, k, bits);
            let (got, want) = run_product::<f32, f32>(2, case, &mut draw);
            close(&got, &want, tolerance::<f32>(k), &format!("{case:?}"));
            let (got, want) = run_product::<f64, f64>(2, case, &mut draw);
            close(&got, &want, tolerance::<f64>(k), &format!("{case:?}"));
            let (got, want) = run_product::<bf16, bf16>(2, case, &mut draw);
            close(&got, &want, tolerance::<bf16>(k), &format!("{case:?}"));
            let (got, want) = run_product::<bf16, f32>(2, case, &mut draw);
            close(&got, &want, tolerance::<f32>(k), &format!("{case:?}"));
        }
    }
    // More than one slice of k, more than one pass of columns, nothing to sum over.
    for (m, n, k) in [(7, 33, 1100), (9, 2100, 3), (100, 70, 513), (6, 5, 0), (105, 70, 2049), (490, 2050, 1025)] {
        for bits in [0, 3, 30, 31, 63] {
            let case = flags(m, n, k, bits);
            if m * n * k < 1 << 25 {
                let (got, want) = run_product::<f32, f32>(3, case, &mut draw);
                close(&got, &want, tolerance::<f32>(k), &format!("{case:?}"));
                let (got, want) = run_product::<bf16, f32>(3, case, &mut draw);
                close(&got, &want, tolerance::<f32>(k), &format!("{case:?}"));
            } else if bits != 30 {
                continue;
            }
            // The last shape has more rows than have sums at once.
            let (got, want) = run_product::<bf16, bf16>(3, case, &mut draw);
            close(&got, &want, tolerance::<bf16>(k), &format!("{case:?}"));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn products_of_any_shape_are_right(
        m in 1usize..40, n in 1usize..150, k in 1usize..90, bits in 0usize..64, threads in 1usize..4, seed: u64,
    ) {
        let case = flags(m, n, k, bits);
        let (got, want) = run_product::<f32, f32>(threads, case, &mut Draw(seed));
        close(&got, &want, tolerance::<f32>(k), &format!("{case:?}"));
        let (got, want) = run_product::<bf16, bf16>(threads, case, &mut Draw(seed));
        close(&got, &want, tolerance::<bf16>(k), &format!("{case:?}"));
    }
}

#[test]
fn products_of_bf16_take_nan_and_infinity_as_they_are() {
    // A pair whose halves look like a signalling NaN of f32, beside ordinary ones.
    let mut b = vec![bf16::ONE; 64 * 64];
    b[1] = bf16::INFINITY;
    b[0] = bf16::from_bits(1);
    let a = vec![bf16::ONE; 5 * 64];
    for b_transposed in [false, true] {
        let p = Product { b_transposed, ..Product::new(5, 64, 64, &a, &b) };
        let mut out = vec![bf16::NAN; 5 * 64];
        product(&pool(1), p, &mut out, &mut scratch(workspace::cpu::pairs_product(1, 5, 64, 64)));
        let infinite = if b_transposed { 0 } else { 1 };
        for row in out.chunks(64) {
            for (j, x) in row.iter().enumerate() {
                // The subnormal adds nothing that a bf16 of this size could show.
                let finite = if !b_transposed && j == 0 { 63.0 } else { 64.0 };
                assert!(*x == if j == infinite { bf16::INFINITY } else { bf16::from_f32(finite) }, "{j}: {x}");
            }
        }
    }
    // What does not belong to a row never touches it, also where k is odd.
    let a: Vec<bf16> = (0..5 * 33).map(|i| if i / 33 == 2 { bf16::NAN } else { bf16::ONE }).collect();
    let p = Product::new(5, 3, 33, &a, &b[64..64 + 99]).b_transposed();
    let mut out = vec![bf16::ZERO; 15];
    product(&pool(1), p, &mut out, &mut scratch(workspace::cpu::pairs_product(1, 5, 3, 33)));
    for (i, x) in out.iter().enumerate() {
        assert!(if i / 3 == 2 { x.is_nan() } else { *x == bf16::from_f32(33.0) }, "{i}: {x}");
    }
}

// Embedding

#[test]
fn embedding_takes_rows_and_gives_gradients_back() {
    fn check<T: Real>() {
        let mut draw = Draw(2);
        let (vocab, hidden) = (11, 70);
        let tokens: Vec<i32> = (0..37).map(|_| draw.below(vocab) as i32).collect();
        let table: Vec<T> = draw.many(vocab * hidden);
        let mut out = vec![T::of(f64::NAN); tokens.len() * hidden];
        embed(&pool(2), &tokens, &table, hidden, &mut out);
        let rows: Vec<T> =
            tokens.iter().flat_map(|&t| table[t as usize * hidden..][..hidden].iter().copied()).collect();
        assert_eq!(out, rows);
        let mut dtable: Vec<T::Wide> = draw.many(vocab * hidden);
        let mut want = wide(&dtable);
        for (row, &token) in tokens.iter().enumerate() {
            for d in 0..hidden {
                want[token as usize * hidden + d] += out[row * hidden + d].wide();
            }
        }
        embed_grad(&pool(2), &tokens, &out, hidden, &mut dtable);
        close(&dtable, &want, tolerance::<T>(tokens.len()), "dtable");
    }
    check::<f32>();
    check::<f64>();
    check::<bf16>();
}

// Norms

fn naive_norm(x: &[f64], weight: &[f64], eps: f64) -> (Vec<f64>, f64) {
    let r = 1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt();
    (x.iter().zip(weight).map(|(x, w)| x * r * w).collect(), r)
}

#[test]
fn rms_norm_is_right() {
    fn check<T: Real>() {
        let mut draw = Draw(3);
        for (rows, dim) in [(1, 1), (3, 16), (70, 37), (5, 384)] {
            let (x, weight): (Vec<T>, Vec<T>) = (draw.many(rows * dim), draw.many(dim));
            let (mut out, mut rstd) = (vec![T::ZERO; rows * dim], vec![T::Wide::ZERO; rows]);
            rms_norm(&pool(2), &x, &weight, 1e-5, &mut out, &mut rstd);
            for row in 0..rows {
                let (want, r) = naive_norm(&wide(&x[row * dim..(row + 1) * dim]), &wide(&weight), 1e-5);
                close(&out[row * dim..(row + 1) * dim], &want, tolerance::<T>(8), "norm");
                close(&[rstd[row]], &[r], tolerance::<T>(8), "rstd");
            }
        }
    }
    check::<f32>();
    check::<f64>();
    check::<bf16>();
}

#[test]
fn rms_norm_grad_is_the_slope() {
    let mut draw = Draw(4);
    for (rows, dim) in [(1, 1), (70, 5), (3, 37)] {
        let (mut x, mut weight): (Vec<f64>, Vec<f64>) = (draw.many(rows * dim), draw.many(dim));
        let dout: Vec<f64> = draw.many(rows * dim);
        let loss = |x: &[f64], weight: &[f64]| {
            let (mut out, mut rstd) = (vec![0.0; rows * dim], vec![0.0; rows]);
            rms_norm(&pool(1), x, weight, 1e-3, &mut out, &mut rstd);
            (dot(&out, &dout), rstd)
        };
        let rstd = loss(&x, &weight).1;
        let before: Vec<f64> = draw.many(rows * dim);
        for accumulate in [false, true] {
            let (mut dx, mut dweight) = (before.clone(), vec![1.0; dim]);
            let mut scratch = scratch(workspace::cpu::sum_rows(rows as u64, dim as u64));
            rms_norm_grad(&pool(2), &x, &weight, &rstd, &dout, &mut dx, Some(&mut dweight), accumulate, &mut scratch);
            if accumulate {
                dx.iter_mut().zip(&before).for_each(|(dx, before)| *dx -= before);
            }
            dweight.iter_mut().for_each(|d| *d -= 1.0);
            let kept = weight.clone();
            differences(&mut x, &dx, "dx", |x| loss(x, &kept).0);
            let kept = x.clone();
            differences(&mut weight, &dweight, "dweight", |weight| loss(&kept, weight).0);
        }
    }
}

const SHAPES: [Heads; 4] = [
    Heads { heads: 1, kv_heads: 1, head_dim: 2 },
    Heads { heads: 3, kv_heads: 1, head_dim: 18 },
    Heads { heads: 4, kv_heads: 2, head_dim: 64 },
    Heads { heads: 2, kv_heads: 2, head_dim: 70 },
];

#[test]
fn head_norm_norms_queries_and_keys_and_copies_values() {
    fn check<T: Real>() {
        let mut draw = Draw(5);
        for shape in SHAPES {
            let (rows, all, e) = (5, shape.columns() as usize, shape.head_dim as usize);
            let x: Vec<T> = draw.many(rows * all);
            let (wq, wk): (Vec<T>, Vec<T>) = (draw.many(e), draw.many(e));
            let normed = shape.rotated() as usize;
            let (mut out, mut rstd) = (vec![T::of(f64::NAN); rows * all], vec![T::Wide::ZERO; rows * normed]);
            head_norm(&pool(2), shape, &x, &wq, &wk, 1e-6, &mut out, &mut rstd);
            for row in 0..rows {
                for head in 0..all / e {
                    let part = row * all + head * e..row * all + (head + 1) * e;
                    if head < normed {
                        let weight = if head < shape.heads as usize { &wq } else { &wk };
                        let (want, r) = naive_norm(&wide(&x[part.clone()]), &wide(weight), 1e-6);
                        close(&out[part], &want, tolerance::<T>(8), "head norm");
                        close(&[rstd[row * normed + head]], &[r], tolerance::<T>(8), "rstd");
                    } else {
                        assert_eq!(out[part.clone()], x[part]);
                    }
                }
            }
        }
    }
    check::<f32>();
    check::<f64>();
    check::<bf16>();
}

#[test]
fn head_norm_grad_is_the_slope() {
    let mut draw = Draw(6);
    for shape in SHAPES {
        let (rows, all, e) = (35, shape.columns() as usize, shape.head_dim as usize);
        let mut x: Vec<f64> = draw.many(rows * all);
        let (mut wq, mut wk): (Vec<f64>, Vec<f64>) = (draw.many(e), draw.many(e));
        let dout: Vec<f64> = draw.many(rows * all);
        let loss = |x: &[f64], wq: &[f64], wk: &[f64]| {
            let (mut out, mut rstd) = (vec![0.0; x.len()], vec![0.0; rows * shape.rotated() as usize]);
            head_norm(&pool(1), shape, x, wq, wk, 1e-3, &mut out, &mut rstd);
            (dot(&out, &dout), rstd)
        };
        let rstd = loss(&x, &wq, &wk).1;
        let (mut dx, mut dwq, mut dwk) = (dout.clone(), vec![0.0; e], vec![0.0; e]);
        let elements = workspace::cpu::sum_rows(rows as u64, 2 * shape.head_dim);
        head_norm_grad(
            &pool(2),
            shape,
            &x,
            &wq,
            &wk,
            &rstd,
            &mut dx,
            Some([&mut dwq, &mut dwk]),
            &mut scratch(elements),
        );
        let (q, k, y) = (wq.clone(), wk.clone(), x.clone());
        differences(&mut x, &dx, "dx", |x| loss(x, &q, &k).0);
        differences(&mut wq, &dwq, "dwq", |wq| loss(&y, wq, &k).0);
        differences(&mut wk, &dwk, "dwk", |wk| loss(&y, &q, wk).0);
    }
}

// Positions

#[test]
fn rope_turns_pairs_and_back() {
    fn check<T: Real>() {
        let mut draw = Draw(7);
        for shape in SHAPES {
            let (rows, all, e) = (9, shape.columns() as usize, shape.head_dim as usize);
            let positions: Vec<i32> = (0..rows).map(|_| draw.below(20) as i32).collect();
            let mut table = vec![T::Wide::of(f64::NAN); 20 * e];
            rope_table(&pool(2), e, 10_000.0, &RopeScaling::None, &mut table);
            let x: Vec<T> = draw.many(rows * all);
            let mut want = wide(&x);
            for (row, &position) in positions.iter().enumerate() {
                for head in 0..shape.rotated() as usize {
                    for i in 0..e / 2 {
                        let angle = f64::from(position) / 10_000f64.powf(2.0 * i as f64 / e as f64);
                        let (low, high) = (row * all + head * e + i, row * all + head * e + e / 2 + i);
                        let (a, b) = (want[low], want[high]);
                        want[low] = a * angle.cos() - b * angle.sin();
                        want[high] = b * angle.cos() + a * angle.sin();
                    }
                }
            }
            let mut qkv = x.clone();
            rope(&pool(2), shape, &table, &positions, false, &mut qkv);
            close(&qkv, &want, tolerance::<T>(40), "rope");
            if T::IS_WIDE {
                rope(&pool(2), shape, &table, &positions, true, &mut qkv);
                close(&qkv, &wide(&x), tolerance::<T>(40), "there and back");
            }
        }
    }
    check::<f32>();
    check::<f64>();
    check::<bf16>();
}

#[test]
fn rope_scaling_stretches_waves() {
    let e = 64;
    let table = |scaling: RopeScaling| {
        let mut table = vec![0.0f64; 8 * e];
        rope_table(&pool(1), e, 500_000.0, &scaling, &mut table);
        // The angle of position 1: none is above π/2 here but the first, which is 1.
        table[e + e / 2..2 * e].iter().map(|sin| sin.asin()).collect::<Vec<f64>>()
    };
    let plain = table(RopeScaling::None);
    let linear = table(RopeScaling::Linear { factor: 4.0 });
    let llama3 = table(RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    });
    let (mut kept, mut blended, mut slow) = (0, 0, 0);
    for i in 0..e / 2 {
        let frequency = 500_000f64.powf(-2.0 * i as f64 / e as f64);
        assert!((plain[i] - frequency).abs() < 1e-12);
        assert!((linear[i] - frequency / 4.0).abs() < 1e-12);
        let turns = 8192.0 * frequency / std::f64::consts::TAU;
        let want = if turns > 4.0 {
            kept += 1;
            frequency
        } else if turns < 1.0 {
            slow += 1;
            frequency / 8.0
        } else {
            blended += 1;
            let smooth = (turns - 1.0) / 3.0;
            frequency * ((1.0 - smooth) / 8.0 + smooth)
        };
        assert!((llama3[i] - want).abs() < 1e-12, "{i}");
    }
    assert!(kept > 0 && blended > 0 && slow > 0);
}

// Attention

/// Sequences of documents of odd lengths: the first visible key of every token.
fn documents(draw: &mut Draw, batch: usize, sequence: usize, longest: usize) -> Vec<i32> {
    let mut starts = Vec::new();
    for _ in 0..batch {
        let (mut start, mut end) = (0, 1 + draw.below(longest));
        for token in 0..sequence {
            if token == end {
                (start, end) = (token, token + 1 + draw.below(longest));
            }
            starts.push(start as i32);
        }
    }
    starts
}

fn naive_attention(shape: Heads, sequence: usize, qkv: &[f64], starts: &[i32]) -> (Vec<f64>, Vec<f64>) {
    let (h, kv, e) = (shape.heads as usize, shape.kv_heads as usize, shape.head_dim as usize);
    let (all, rows) = (shape.columns() as usize, starts.len());
    let (mut out, mut stats) = (vec![0.0; rows * h * e], vec![0.0; rows * h]);
    for row in 0..rows {
        let (b, i) = (row / sequence, row % sequence);
        for head in 0..h {
            let key = |j: usize, part: usize| {
                let at = (b * sequence + j) * all + (h + part * kv + head / (h / kv)) * e;
                &qkv[at..at + e]
            };
            let query = &qkv[row * all + head * e..][..e];
            let seen = starts[row] as usize..=i;
            let scores: Vec<f64> = seen.clone().map(|j| dot(query, key(j, 0)) / (e as f64).sqrt()).collect();
            let sum: f64 = scores.iter().map(|s| s.exp()).sum();
            stats[(b * h + head) * sequence + i] = sum.ln();
            for (j, score) in seen.zip(&scores) {
                for (d, value) in key(j, 1).iter().enumerate() {
                    out[row * h * e + head * e + d] += score.exp() / sum * value;
                }
            }
        }
    }
    (out, stats)
}

fn run_attention<T: Real>(
    threads: usize,
    shape: Heads,
    sequence: usize,
    qkv: &[T],
    starts: &[i32],
) -> (Vec<T>, Vec<T::Wide>) {
    let rows = starts.len();
    let mut out = vec![T::of(f64::NAN); rows * shape.query_columns() as usize];
    let mut stats = vec![T::Wide::of(f64::NAN); rows * shape.heads as usize];
    let kernels = Kernels::Cpu { threads: threads as u64 };
    let mut scratch = scratch(kernels.attention(T::DTYPE, sequence as u64, shape));
    attention(&pool(threads), shape, sequence, qkv, starts, &mut out, &mut stats, &mut scratch);
    (out, stats)
}

fn run_attention_grad<T: Real>(
    threads: usize,
    shape: Heads,
    sequence: usize,
    qkv: &[T],
    dout: &[T],
    starts: &[i32],
) -> Vec<T> {
    let (out, stats) = run_attention(threads, shape, sequence, qkv, starts);
    attention_grad_of(threads, shape, sequence, qkv, &out, dout, &stats, starts)
}

fn attention_grad_of<T: Real>(
    threads: usize,
    shape: Heads,
    sequence: usize,
    qkv: &[T],
    out: &[T],
    dout: &[T],
    stats: &[T::Wide],
    starts: &[i32],
) -> Vec<T> {
    let mut dqkv = vec![T::of(f64::NAN); qkv.len()];
    let kernels = Kernels::Cpu { threads: threads as u64 };
    let mut scratch = scratch(kernels.attention_grad(T::DTYPE, 1, sequence as u64, shape));
    attention_grad(&pool(threads), shape, sequence, qkv, out, dout, stats, starts, &mut dqkv, &mut scratch);
    dqkv
}

/// (batch, sequence, longest document): one token, less than a block, several blocks of queries
/// and of keys, with and without boundaries inside.
const SEQUENCES: [(usize, usize, usize); 5] = [(3, 1, 1), (2, 23, 9), (1, 130, 1000), (2, 130, 50), (1, 600, 300)];

#[test]
fn attention_sees_its_document_and_nothing_else() {
    fn check<T: Real>() {
        let mut draw = Draw(8);
        for shape in SHAPES {
            for (batch, sequence, longest) in SEQUENCES {
                let starts = documents(&mut draw, batch, sequence, longest);
                let qkv: Vec<T> = draw.many(batch * sequence * shape.columns() as usize);
                let (out, stats) = run_attention(2, shape, sequence, &qkv, &starts);
                let (want, want_stats) = naive_attention(shape, sequence, &wide(&qkv), &starts);
                close(&out, &want, tolerance::<T>(40), &format!("{shape:?} {sequence}"));
                close(&stats, &want_stats, tolerance::<T>(40), &format!("stats {shape:?} {sequence}"));
            }
        }
    }
    check::<f32>();
    check::<f64>();
    check::<bf16>();
}

#[test]
fn attention_grad_is_the_slope() {
    let mut draw = Draw(9);
    for shape in SHAPES {
        for (batch, sequence, longest) in [(3, 1, 1), (2, 23, 9), (1, 130, 1000), (1, 150, 60)] {
            let starts = documents(&mut draw, batch, sequence, longest);
            let mut qkv: Vec<f64> = draw.many(batch * sequence * shape.columns() as usize);
            let dout: Vec<f64> = draw.many(batch * sequence * shape.query_columns() as usize);
            let dqkv = run_attention_grad(2, shape, sequence, &qkv, &dout, &starts);
            differences(&mut qkv, &dqkv, "dqkv", |qkv| dot(&run_attention(1, shape, sequence, qkv, &starts).0, &dout));
        }
    }
}

#[test]
fn attention_grad_in_f32_is_that_in_f64() {
    let mut draw = Draw(10);
    for shape in SHAPES {
        for (batch, sequence, longest) in SEQUENCES {
            let starts = documents(&mut draw, batch, sequence, longest);
            let qkv: Vec<f32> = draw.many(batch * sequence * shape.columns() as usize);
            let dout: Vec<f32> = draw.many(batch * sequence * shape.query_columns() as usize);
            let got = run_attention_grad(2, shape, sequence, &qkv, &dout, &starts);
            let want = run_attention_grad(1, shape, sequence, &wide(&qkv), &wide(&dout), &starts);
            close(&got, &want, 1e-4, &format!("{shape:?} {sequence}"));
        }
    }
}

#[test]
fn huge_scores_do_not_overflow() {
    let shape = Heads { heads: 1, kv_heads: 1, head_dim: 2 };
    let qkv: Vec<f32> = (0..100 * 6).map(|i| if i % 6 < 4 { 1e4 + i as f32 } else { i as f32 }).collect();
    let (out, stats) = run_attention(1, shape, 100, &qkv, &[0; 100]);
    assert!(out.iter().chain(&stats).all(|x| x.is_finite()));
}

#[test]
fn cached_attention_continues_what_attention_began() {
    fn check<T: Real>() {
        let mut draw = Draw(11);
        for shape in SHAPES {
            let (total, all) = (300, shape.columns() as usize);
            let width = (shape.kv_heads * shape.head_dim) as usize;
            let qkv: Vec<T> = draw.many(total * all);
            let (want, _) = naive_attention(shape, total, &wide(&qkv), &vec![0; total]);
            let capacity = total + 7;
            let (mut keys, mut values) =
                (vec![T::of(f64::NAN); capacity * width], vec![T::of(f64::NAN); capacity * width]);
            let mut start = 0;
            // A prompt, single tokens, a few, and a long rest.
            for rows in [70, 1, 1, 5, 8, 215] {
                let new = &qkv[start * all..(start + rows) * all];
                append_cache(shape, new, start, &mut keys, &mut values);
                let mut out = vec![T::of(f64::NAN); rows * shape.query_columns() as usize];
                let kernels = Kernels::Cpu { threads: 2 };
                let size = kernels.cached_attention(T::DTYPE, rows as u64, capacity as u64, shape);
                let mut scratch = scratch(size);
                cached_attention(&pool(2), shape, new, &keys, &values, start, &mut out, &mut scratch);
                let columns = shape.query_columns() as usize;
                close(
                    &out,
                    &want[start * columns..(start + rows) * columns],
                    tolerance::<T>(40),
                    &format!("{shape:?} {start}"),
                );
                start += rows;
            }
            assert_eq!(start, total);
        }
    }
    check::<f32>();
    check::<f64>();
    check::<bf16>();
}

// In bf16: the kernel in f64 on the same numbers is the reference, and each result is rounded once

#[test]
fn gradients_of_attention_in_bf16_are_rounded_once() {
    let mut draw = Draw(20);
    for shape in SHAPES {
        for (batch, sequence, longest) in SEQUENCES {
            let starts = documents(&mut draw, batch, sequence, longest);
            let qkv: Vec<bf16> = draw.many(batch * sequence * shape.columns() as usize);
            let dout: Vec<bf16> = draw.many(batch * sequence * shape.query_columns() as usize);
            let (out, stats) = run_attention(2, shape, sequence, &qkv, &starts);
            let got = attention_grad_of(2, shape, sequence, &qkv, &out, &dout, &stats, &starts);
            let [wide_qkv, wide_out, wide_dout] = [&qkv, &out, &dout].map(|x| wide(x));
            let want = attention_grad_of(1, shape, sequence, &wide_qkv, &wide_out, &wide_dout, &wide(&stats), &starts);
            close(&got, &want, 2e-5, &format!("{shape:?} {sequence}"));
        }
    }
}

#[test]
fn gradients_of_norms_in_bf16_are_rounded_once() {
    let mut draw = Draw(21);
    for (rows, dim) in [(1, 1), (70, 37), (40, 384)] {
        let (x, dout): (Vec<bf16>, Vec<bf16>) = (draw.many(rows * dim), draw.many(rows * dim));
        let (weight, before): (Vec<bf16>, Vec<bf16>) = (draw.many(dim), draw.many(rows * dim));
        let (mut out, mut rstd) = (vec![bf16::ZERO; rows * dim], vec![0.0f32; rows]);
        rms_norm(&pool(2), &x, &weight, 1e-3, &mut out, &mut rstd);
        for accumulate in [false, true] {
            let size = workspace::cpu::sum_rows(rows as u64, dim as u64);
            let (mut dx, mut dweight) = (before.clone(), vec![1.0f32; dim]);
            let space = &mut scratch(size);
            rms_norm_grad(&pool(2), &x, &weight, &rstd, &dout, &mut dx, Some(&mut dweight), accumulate, space);
            let (mut want, mut want_weight) = (wide(&before), vec![1.0; dim]);
            rms_norm_grad(
                &pool(1),
                &wide(&x),
                &wide(&weight),
                &wide(&rstd),
                &wide(&dout),
                &mut want,
                Some(&mut want_weight),
                accumulate,
                &mut scratch(size),
            );
            close(&dx, &want, tolerance::<bf16>(40), "dx");
            close(&dweight, &want_weight, tolerance::<f32>(rows), "dweight");
        }
    }
    for shape in SHAPES {
        let (rows, e) = (35, shape.head_dim as usize);
        let x: Vec<bf16> = draw.many(rows * shape.columns() as usize);
        let dout: Vec<bf16> = draw.many(x.len());
        let (wq, wk): (Vec<bf16>, Vec<bf16>) = (draw.many(e), draw.many(e));
        let (mut out, mut rstd) = (vec![bf16::ZERO; x.len()], vec![0.0f32; rows * shape.rotated() as usize]);
        head_norm(&pool(2), shape, &x, &wq, &wk, 1e-3, &mut out, &mut rstd);
        let size = workspace::cpu::sum_rows(rows as u64, 2 * shape.head_dim);
        let (mut dx, mut dq, mut dk) = (dout.clone(), vec![0.0f32; e], vec![0.0f32; e]);
        head_norm_grad(&pool(2), shape, &x, &wq, &wk, &rstd, &mut dx, Some([&mut dq, &mut dk]), &mut scratch(size));
        let (mut want, mut want_q, mut want_k) = (wide(&dout), vec![0.0; e], vec![0.0; e]);
        let [x, wq, wk] = [&x, &wq, &wk].map(|x| wide(x));
        let space = &mut scratch(size);
        head_norm_grad(&pool(1), shape, &x, &wq, &wk, &wide(&rstd), &mut want, Some([&mut want_q, &mut want_k]), space);
        close(&dx, &want, tolerance::<bf16>(40), "dx");
        close(&dq, &want_q, tolerance::<f32>(rows * 4), "dq");
        close(&dk, &want_k, tolerance::<f32>(rows * 4), "dk");
    }
}

#[test]
fn the_feed_forward_part_in_bf16_is_rounded_once() {
    let mut draw = Draw(22);
    for (rows, ffn) in [(1, 1), (3, 37), (40, 130)] {
        let gate_up: Vec<bf16> = draw.many::<f64>(rows * 2 * ffn).iter().map(|x| bf16::from_f64(x * 6.0)).collect();
        let dout: Vec<bf16> = draw.many(rows * ffn);
        let (mut out, mut want) = (vec![bf16::NAN; rows * ffn], vec![f64::NAN; rows * ffn]);
        swiglu(&pool(2), ffn, &gate_up, &mut out);
        swiglu(&pool(1), ffn, &wide(&gate_up), &mut want);
        close(&out, &want, 2e-6, "swiglu");
        let (mut got, mut want) = (vec![bf16::NAN; gate_up.len()], vec![f64::NAN; gate_up.len()]);
        swiglu_grad(&pool(2), ffn, &gate_up, &dout, &mut got);
        swiglu_grad(&pool(1), ffn, &wide(&gate_up), &wide(&dout), &mut want);
        close(&got, &want, 2e-6, "dgate_up");
        let mut in_place = gate_up.clone();
        swiglu_grad_in_place(&pool(2), ffn, &mut in_place, &dout);
        assert_eq!(in_place, got);
    }
}

#[test]
fn the_loss_in_bf16_is_rounded_once() {
    let mut draw = Draw(23);
    for (rows, vocab) in [(1, 1), (33, 101), (3, 1000)] {
        let logits: Vec<bf16> = draw.many::<f64>(rows * vocab).iter().map(|x| bf16::from_f64(x * 4.0)).collect();
        let labels: Vec<i32> =
            (0..rows).map(|row| if row % 5 == 2 { IGNORED } else { draw.below(vocab) as i32 }).collect();
        let weights: Vec<f32> = draw.many(rows);
        for block in [vocab.div_ceil(3), vocab] {
            let (loss, hit, got) = loss_in_blocks(2, (vocab, block), &logits, &labels, &weights, 0.25);
            let (want_loss, want_hit, want) =
                loss_in_blocks(1, (vocab, block), &wide(&logits), &labels, &wide(&weights), 0.25);
            assert!((loss - want_loss).abs() <= 1e-5 * (1.0 + want_loss.abs()));
            assert_eq!(hit, want_hit);
            close(&got, &want, 2e-6, "dlogits");
        }
    }
}

#[test]
fn sums_and_casts_take_either_type() {
    let mut draw = Draw(24);
    let (x, y): (Vec<bf16>, Vec<f32>) = (draw.many(70_001), draw.many(70_001));
    let (mut narrow, mut full) = (x.clone(), y.clone());
    add(&pool(2), &y, &mut narrow);
    add(&pool(2), &x, &mut full);
    for i in 0..x.len() {
        assert_eq!(full[i], y[i] + x[i].to_f32());
        assert_eq!(narrow[i], bf16::from_f32(full[i]));
    }
    let mut rounded = vec![bf16::NAN; y.len()];
    round(&pool(2), &y, &mut rounded);
    assert!(y.iter().zip(&rounded).all(|(y, rounded)| bf16::from_f32(*y) == *rounded));
}

// Feed-forward

#[test]
fn swiglu_is_right_and_its_gradient_is_the_slope() {
    let mut draw = Draw(12);
    for (rows, ffn) in [(1, 1), (3, 37), (40, 130)] {
        let mut gate_up: Vec<f64> = draw.many::<f64>(rows * 2 * ffn).iter().map(|x| x * 6.0).collect();
        let dout: Vec<f64> = draw.many(rows * ffn);
        let forward = |gate_up: &[f64]| {
            let mut out = vec![f64::NAN; rows * ffn];
            swiglu(&pool(2), ffn, gate_up, &mut out);
            out
        };
        let want: Vec<f64> = (0..rows * ffn)
            .map(|i| {
                let at = i / ffn * 2 * ffn + i % ffn;
                gate_up[at] / (1.0 + (-gate_up[at]).exp()) * gate_up[at + ffn]
            })
            .collect();
        close(&forward(&gate_up), &want, 1e-14, "swiglu");
        let narrow: Vec<f32> = gate_up.iter().map(|&x| x as f32).collect();
        let mut out = vec![0.0f32; rows * ffn];
        swiglu(&pool(2), ffn, &narrow, &mut out);
        close(&out, &want, 2e-6, "swiglu f32");

        let mut dgate_up = vec![f64::NAN; rows * 2 * ffn];
        swiglu_grad(&pool(2), ffn, &gate_up, &dout, &mut dgate_up);
        let mut in_place = gate_up.clone();
        swiglu_grad_in_place(&pool(2), ffn, &mut in_place, &dout);
        assert_eq!(in_place, dgate_up);
        differences(&mut gate_up, &dgate_up, "dgate_up", |x| dot(&forward(x), &dout));
        let (dout, mut got) = (dout.iter().map(|&x| x as f32).collect::<Vec<f32>>(), vec![f32::NAN; rows * 2 * ffn]);
        swiglu_grad(&pool(2), ffn, &narrow, &dout, &mut got);
        close(&got, &dgate_up, 2e-6, "dgate_up f32");
    }
    // Far out, the gate is open or shut, and nothing becomes NaN.
    let mut out = [f32::NAN; 2];
    swiglu(&pool(1), 2, &[200.0, -200.0, 3.0, 3.0], &mut out);
    assert_eq!(out, [600.0, 0.0]);
}

// Loss

fn naive_loss(vocab: usize, logits: &[f64], labels: &[i32], weights: &[f64]) -> f64 {
    let mut total = 0.0;
    for (row, (&label, &weight)) in labels.iter().zip(weights).enumerate() {
        if label >= 0 && weight != 0.0 {
            let x = &logits[row * vocab..(row + 1) * vocab];
            total += weight * (x.iter().map(|x| x.exp()).sum::<f64>().ln() - x[label as usize]);
        }
    }
    total
}

/// The loss of rows of logits in blocks of so many columns, and what they become: their gradient, times `scale`.
fn loss_in_blocks<T: Real>(
    threads: usize,
    (vocab, block): (usize, usize),
    logits: &[T],
    labels: &[i32],
    weights: &[T::Wide],
    scale: T::Wide,
) -> (f64, Vec<i32>, Vec<T>) {
    let (pool, rows) = (pool(threads), labels.len());
    let mut stats = scratch::<T::Wide>(4 * rows as u64);
    let blocks: Vec<(usize, usize)> =
        (0..vocab).step_by(block).map(|first| (first, block.min(vocab - first))).collect();
    let part = |first: usize, columns: usize| -> Vec<T> {
        logits.chunks(vocab).flat_map(|row| &row[first..first + columns]).copied().collect()
    };
    for &(first, columns) in &blocks {
        let of = Labelled { labels, weights, first, columns };
        softmax_stats(&pool, of, &part(first, columns), &mut stats, first == 0);
    }
    let mut correct = vec![-1; rows];
    let loss = cross_entropy(&stats, labels, weights, Some(&mut correct));
    assert_eq!(loss.to_bits(), cross_entropy(&stats, labels, weights, None).to_bits());
    let mut gradient = logits.to_vec();
    for &(first, columns) in &blocks {
        let mut block = part(first, columns);
        softmax_grad(&pool, Labelled { labels, weights, first, columns }, &mut block, &stats, scale);
        for (row, block) in block.chunks(columns).enumerate() {
            gradient[row * vocab + first..][..columns].copy_from_slice(block);
        }
    }
    (loss, correct, gradient)
}

#[test]
fn the_loss_counts_what_it_should_and_its_gradient_is_the_slope() {
    let mut draw = Draw(13);
    for (rows, vocab) in [(1, 1), (7, 5), (33, 101), (3, 1000)] {
        let mut logits: Vec<f64> = draw.many::<f64>(rows * vocab).iter().map(|x| x * 4.0).collect();
        let labels: Vec<i32> =
            (0..rows).map(|row| if row % 5 == 2 { IGNORED } else { draw.below(vocab) as i32 }).collect();
        let weights: Vec<f64> = (0..rows).map(|row| if row % 7 == 3 { 0.0 } else { draw.next() + 1.5 }).collect();
        let want = naive_loss(vocab, &logits, &labels, &weights);
        for block in [1, 3, vocab.div_ceil(3), vocab] {
            let (got, correct, gradient) = loss_in_blocks(2, (vocab, block), &logits, &labels, &weights, 0.25);
            assert!((got - want).abs() <= 1e-12 * (1.0 + want.abs()));
            for row in 0..rows {
                let x = &logits[row * vocab..(row + 1) * vocab];
                let counts = labels[row] >= 0 && weights[row] != 0.0;
                let best = (0..vocab).rev().max_by(|&a, &b| x[a].total_cmp(&x[b])).unwrap();
                assert_eq!(correct[row], i32::from(counts && best as i32 == labels[row]));
                if !counts {
                    assert!(gradient[row * vocab..(row + 1) * vocab].iter().all(|&g| g.to_bits() == 0));
                }
            }
            let narrow: Vec<f32> = logits.iter().map(|&x| x as f32).collect();
            let narrow_weights: Vec<f32> = weights.iter().map(|&x| x as f32).collect();
            let (got, _, narrow) = loss_in_blocks(2, (vocab, block), &narrow, &labels, &narrow_weights, 0.25);
            assert!((got - want).abs() <= 1e-5 * (1.0 + want.abs()));
            close(&narrow, &gradient, 2e-6, "dlogits f32");
            if block > 3 || block == vocab {
                let loss = |x: &[f64]| 0.25 * loss_in_blocks(2, (vocab, block), x, &labels, &weights, 0.25).0;
                differences(&mut logits, &gradient, "dlogits", loss);
            }
        }
    }
}

#[test]
fn the_first_of_equal_logits_is_the_answer() {
    let logits = [1.0f32, 3.0, 3.0, 2.0, 1.0, 3.0, 3.0, 2.0, 3.0, 3.0, 3.0, 3.0];
    for block in 1..=4 {
        let (_, correct, _) = loss_in_blocks(1, (4, block), &logits, &[1, 2, 0], &[1.0; 3], 1.0);
        assert_eq!(correct, [1, 0, 1], "{block}");
    }
}

#[test]
fn huge_logits_do_not_overflow_and_nan_is_not_hidden() {
    for block in 1..=3 {
        let (loss, _, logits) = loss_in_blocks(1, (3, block), &[1e30f32, -1e30, 0.0], &[0], &[1.0], 1.0);
        assert_eq!((loss, &logits[..]), (0.0, &[0.0, 0.0, 0.0][..]));
        assert!(loss_in_blocks(1, (3, block), &[0.0, f32::NAN, 1.0], &[0], &[1.0], 1.0).0.is_nan());
        // A label that no column has.
        assert!(loss_in_blocks(1, (3, block), &[0.0f32, 2.0, 1.0], &[3], &[1.0], 1.0).0.is_nan());
    }
}

// Element by element

#[test]
fn sums_copies_and_fills() {
    fn check<T: Float>() {
        let mut draw = Draw(14);
        let pool = pool(3);
        for n in [0, 1, 33, 70_001] {
            let (x, y): (Vec<T>, Vec<T>) = (draw.many(n), draw.many(n));
            let mut sum = y.clone();
            add(&pool, &x, &mut sum);
            assert!((0..n).all(|i| sum[i] == x[i] + y[i]));
            copy(&pool, &x, &mut sum);
            assert_eq!(sum, x);
            fill(&pool, T::of(0.5), &mut sum);
            assert!(sum.iter().all(|&x| x == T::of(0.5)));
        }
        for (rows, columns) in [(1, 1), (77, 70), (1000, 3)] {
            let x: Vec<T> = draw.many(rows * columns);
            let mut into: Vec<T::Wide> = draw.many(columns);
            let mut want = wide(&into);
            for i in 0..rows * columns {
                want[i % columns] += x[i].wide();
            }
            let size = workspace::cpu::sum_rows(rows as u64, columns as u64);
            sum_rows(&pool, rows, columns, &x, &mut into, &mut scratch(size));
            close(&into, &want, tolerance::<T>(rows), "sum of rows");
        }
    }
    check::<f32>();
    check::<f64>();
}

// Update

#[test]
fn squared_norm_is_right_and_lets_nan_through() {
    let mut draw = Draw(15);
    for n in [0, 1, 100, 300_001] {
        let x: Vec<f32> = draw.many(n);
        let want: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
        assert!((squared_norm(&pool(2), &x) - want).abs() <= 1e-6 * want);
    }
    let mut x = vec![1.0f32; 50_000];
    x[49_999] = f32::INFINITY;
    assert_eq!(squared_norm(&pool(2), &x), f64::INFINITY);
    x[3] = f32::NAN;
    assert!(squared_norm(&pool(2), &x).is_nan());
}

#[test]
fn adamw_follows_its_formula() {
    fn check<T: Float>() {
        let mut draw = Draw(16);
        let n = 50_003;
        let mut weight: Vec<T> = draw.many(n);
        let (mut first, mut second) = (vec![T::ZERO; n], vec![T::ZERO; n]);
        let (mut w, mut m, mut v) = (wide(&weight), vec![0.0; n], vec![0.0; n]);
        for t in 1..=3 {
            let gradient: Vec<T> = draw.many(n);
            let (c1, c2) = (1.0 - 0.9f64.powi(t), 1.0 - 0.95f64.powi(t));
            let step = AdamW {
                rate: T::of(1e-2),
                betas: [0.9, 0.95],
                eps: T::of(1e-8),
                decay: T::of(0.1),
                bias_corrections: [T::of(c1), T::of(c2)],
                clip: T::of(0.5),
            };
            adamw(&pool(2), step, &mut weight, &gradient, &mut first, &mut second);
            for i in 0..n {
                let g = gradient[i].wide() * 0.5;
                w[i] -= 1e-2 * 0.1 * w[i];
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.95 * v[i] + 0.05 * g * g;
                w[i] -= 1e-2 / c1 * m[i] / (v[i].sqrt() / c2.sqrt() + 1e-8);
            }
        }
        close(&weight, &w, tolerance::<T>(16), "weights");
        close(&first, &m, tolerance::<T>(16), "first moments");
        close(&second, &v, tolerance::<T>(16), "second moments");
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn sgd_follows_its_formula() {
    let mut draw = Draw(17);
    let n = 20_003;
    for momentum in [None, Some(0.9)] {
        let mut weight: Vec<f64> = draw.many(n);
        let mut buffer = vec![0.0; n];
        let (mut w, mut b) = (weight.clone(), vec![0.0; n]);
        for _ in 0..3 {
            let gradient: Vec<f64> = draw.many(n);
            let step = Sgd { rate: 1e-2, momentum: momentum.unwrap_or(0.0), decay: 0.1, clip: 0.5 };
            sgd(&pool(2), step, &mut weight, &gradient, momentum.map(|_| &mut buffer[..]));
            for i in 0..n {
                b[i] = momentum.unwrap_or(0.0) * b[i] + gradient[i] * 0.5 + 0.1 * w[i];
                w[i] -= 1e-2 * b[i];
            }
        }
        close(&weight, &w, 1e-14, "weights");
    }
}

// Coarse formats

/// Numbers of very different sizes, with zeros and a whole block of them.
fn weights<T: Real>(draw: &mut Draw, n: usize) -> Vec<T> {
    (0..n).map(|i| T::of(if i % 97 == 5 || (640..704).contains(&i) { 0.0 } else { draw.next().powi(3) })).collect()
}

#[test]
fn quantised_matrices_are_those_of_the_definition() {
    fn check<T: Real>(draw: &mut Draw) {
        // Several groups of 256 blocks, whose last block is not whole; less than a block.
        for (rows, columns) in [(3, 11), (1, 64), (70, 501)] {
            let from: Vec<T> = weights(draw, rows * columns);
            let exact: Vec<f32> = from.iter().map(|x| x.wide() as f32).collect();
            let n = from.len();
            let blocks = n.div_ceil(64);
            let (mut codes, mut scales) = (vec![1; n.div_ceil(2)], vec![1; blocks]);
            let mut groups = vec![f32::NAN; 2 * blocks.div_ceil(256)];
            let into = Coarse::Nf4 { codes: &mut codes[..], scales: &mut scales[..], groups: &mut groups[..] };
            quantise(&pool(2), &from, columns, into);
            let (mut want_codes, mut want_scales, mut want_groups) = (vec![0; codes.len()], vec![0; blocks], vec![]);
            let whole: Vec<f32> =
                exact.chunks(64).zip(want_codes.chunks_mut(32)).map(|(x, codes)| nf4_block(x, codes)).collect();
            for (whole, scales) in whole.chunks(256).zip(want_scales.chunks_mut(256)) {
                want_groups.extend(nf4_group(whole, scales));
            }
            assert_eq!((&codes, &scales, &groups), (&want_codes, &want_scales, &want_groups));
            let mut back = vec![T::of(f64::NAN); n];
            let stored = Coarse::Nf4 { codes: &codes[..], scales: &scales[..], groups: &groups[..] };
            dequantise(&pool(3), stored, columns, &mut back);
            for (i, back) in back.iter().enumerate() {
                let group = i / 64 / 256 * 2;
                let scale = nf4_scale(scales[i / 64], [groups[group], groups[group + 1]]);
                assert_eq!(*back, T::of(nf4_value(codes[i / 2], i % 2 == 0, scale).into()), "nf4[{i}]");
            }

            let (mut codes, mut scales) = (vec![1; n], vec![f32::NAN; rows]);
            quantise(&pool(2), &from, columns, Coarse::Int8 { codes: &mut codes[..], scales: &mut scales[..] });
            let mut want = vec![0; columns];
            for (row, x) in exact.chunks(columns).enumerate() {
                assert_eq!(int8_row(x, &mut want), scales[row]);
                assert_eq!(want, codes[row * columns..(row + 1) * columns]);
            }
            dequantise(&pool(3), Coarse::Int8 { codes: &codes[..], scales: &scales[..] }, columns, &mut back);
            for (i, back) in back.iter().enumerate() {
                assert_eq!(*back, T::of(int8_value(codes[i], scales[i / columns]).into()), "int8[{i}]");
            }
        }
    }
    let mut draw = Draw(30);
    check::<f32>(&mut draw);
    check::<f64>(&mut draw);
    check::<bf16>(&mut draw);
}

/// The 16 values of QLoRA (appendix E) as the paper prints them.
const PUBLISHED: [f64; 16] = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
];

#[test]
fn values_of_nf4_come_back_as_they_were() {
    // Every block has its largest magnitude, so that its scale is 2; all scales are the same, so that they are exact.
    let from: Vec<f32> = (0..64 * 20).map(|i| PUBLISHED[(i * 5 + i / 64) % 16] as f32 * 2.0).collect();
    let (mut codes, mut scales, mut groups) = (vec![0; from.len() / 2], vec![0; 20], vec![0.0; 2]);
    let into = Coarse::Nf4 { codes: &mut codes[..], scales: &mut scales[..], groups: &mut groups[..] };
    quantise(&pool(2), &from, 64, into);
    for (i, byte) in codes.iter().enumerate() {
        let code = |i: usize| ((i * 5 + i / 64) % 16) as u8;
        assert_eq!(*byte, code(2 * i) << 4 | code(2 * i + 1), "the first of a pair is in the upper half");
    }
    let mut back = vec![f32::NAN; from.len()];
    let stored = Coarse::Nf4 { codes: &codes[..], scales: &scales[..], groups: &groups[..] };
    dequantise(&pool(2), stored, 64, &mut back);
    assert_eq!(back, from);
}

/// bitsandbytes 0.50.2 on the CPU:
/// `i = torch.arange(256.); x = (i * 37 % 101 - 50) / 64 * (1 + i // 64)`
/// `quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=False)[0]`
#[test]
fn codes_of_nf4_are_those_of_bitsandbytes() {
    const THEIRS: &str = "04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c1\
                          6d18e3b04c17e29f3b05d17e2af4c06d18e2a04c16e29f3b05d17e29f3c05d18\
                          e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f3b05d17e2af\
                          4c06d18e2a04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05";
    let from: Vec<f32> = (0..256).map(|i| ((i * 37 % 101) as f32 - 50.0) / 64.0 * (1 + i / 64) as f32).collect();
    let (mut codes, mut scales, mut groups) = (vec![0; 128], vec![0; 4], vec![0.0; 2]);
    let into = Coarse::Nf4 { codes: &mut codes[..], scales: &mut scales[..], groups: &mut groups[..] };
    quantise(&pool(2), &from, 256, into);
    assert_eq!(codes.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), THEIRS);
}

#[test]
fn adamw_with_state_of_8_bit_is_adamw_on_what_the_codes_say() {
    let mut draw = Draw(31);
    let n = 256usize * 70 + 37;
    let blocks = n.div_ceil(256);
    let mut weight: Vec<f32> = draw.many(n);
    let (mut first, mut second) = (vec![127; n], vec![0; n]);
    let (mut first_scale, mut second_scale) = (vec![0.0; blocks], vec![0.0; blocks]);
    let (mut plain, mut plain_first, mut plain_second) = (weight.clone(), vec![0.0; n], vec![0.0; n]);
    for t in 1..=4 {
        // Blocks without any gradient, too.
        let mut gradient: Vec<f32> = draw.many(n);
        gradient[3 * 256..4 * 256].fill(0.0);
        let step = AdamW {
            rate: 1e-2,
            betas: [0.9, 0.95],
            eps: 1e-8,
            decay: 0.1,
            bias_corrections: [1.0 - 0.9f32.powi(t), 1.0 - 0.95f32.powi(t)],
            clip: 0.5,
        };
        let whole = |codes: &[u8], scales: &[f32], signed: bool| -> Vec<f32> {
            codes.iter().enumerate().map(|(i, &code)| dynamic_map(signed)[code as usize] * scales[i / 256]).collect()
        };
        let (mut m, mut v) = (whole(&first, &first_scale, true), whole(&second, &second_scale, false));
        let mut want = weight.clone();
        adamw(&pool(1), step, &mut want, &gradient, &mut m, &mut v);
        let state = State8 {
            first: &mut first,
            first_scale: &mut first_scale,
            second: &mut second,
            second_scale: &mut second_scale,
        };
        adamw8(&pool(3), step, &mut weight, &gradient, state);
        assert_eq!(weight, want);
        for (codes, scales, values, signed) in [(&first, &first_scale, &m, true), (&second, &second_scale, &v, false)] {
            for (block, values) in values.chunks(256).enumerate() {
                let most = values.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                assert_eq!(scales[block], most);
                for (x, code) in values.iter().zip(&codes[block * 256..]) {
                    assert_eq!(*code, formats::code(formats::dynamic_thresholds(signed), x * formats::inverse(most)));
                }
            }
        }
        adamw(&pool(1), step, &mut plain, &gradient, &mut plain_first, &mut plain_second);
    }
    // Not the same as with whole state, and not far from it: all of the 4 steps together are about 4e-2.
    let far = weight.iter().zip(&plain).map(|(a, b)| f64::from((a - b).abs())).sum::<f64>() / n as f64;
    assert!(far > 0.0 && far < 4e-3, "{far}");
}

// Chance

/// Philox-4x32-10 (Salmon and others, 2011), written a second time.
fn philox(mut c: [u32; 4], mut k: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let (a, b) = (u64::from(c[0]) * 0xD251_1F53, u64::from(c[2]) * 0xCD9E_8D57);
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

#[test]
fn dropout_leaves_out_what_its_place_says() {
    fn check<T: Real>(columns: usize) {
        let mut draw = Draw(32);
        let (sequence, samples, probability) = (7, 5, 0.3);
        let at =
            Dropout { seed: 0x1234_5678_9abc_def0, step: 9, first_sample: 3, sequence, layer: 2, site: 4, probability };
        let n = sequence * samples * columns;
        let mut x: Vec<T> = draw.many(n);
        let before: Vec<T> = draw.many(n);
        x[1] = T::of(f64::INFINITY);
        let mut out = before.clone();
        dropout(&pool(3), at, columns, &x, &mut out, true);
        let mut fresh = vec![T::of(f64::NAN); n];
        dropout(&pool(2), at, columns, &x, &mut fresh, false);
        let factor = T::Wide::of(1.0 / 0.7);
        let mut kept = 0;
        for i in 0..n {
            let (row, column) = (i / columns, i % columns);
            let element = row % sequence * columns + column;
            let counter = [(element / 4) as u32, 2 * 256 + 4, (3 + row / sequence) as u32, 9];
            let word = philox(counter, [0x9abc_def0, 0x1234_5678 ^ 0x4452_4F50])[element % 4];
            let stays = f64::from(word) >= (probability * 4_294_967_296.0).floor();
            let value = if stays { x[i].widen() * factor } else { T::Wide::ZERO };
            assert_eq!(fresh[i], T::narrow(value), "{i} of {columns}");
            assert_eq!(out[i], T::narrow(before[i].widen() + value), "{i} of {columns}");
            kept += usize::from(stays);
        }
        // Five standard deviations.
        let spread = 5.0 * (0.3f64 * 0.7 / n as f64).sqrt();
        assert!((kept as f64 / n as f64 - 0.7).abs() < spread, "{kept} of {n}");
        // The last samples by themselves are those of the whole.
        let rest = 3 * sequence * columns;
        let mut part = vec![T::ZERO; n - rest];
        dropout(&pool(2), Dropout { first_sample: 6, ..at }, columns, &x[rest..], &mut part, false);
        assert_eq!(part, fresh[rest..]);
    }
    for columns in [1, 30, 64, 131] {
        check::<f32>(columns);
        check::<f64>(columns);
        check::<bf16>(columns);
    }
}

#[test]
fn uniform_numbers_are_within_their_bound_and_any_portion_is_the_same() {
    let mut whole = vec![0.0f64; 100_003];
    uniform(&pool(2), 7, 3, 0, 0.25, &mut whole);
    assert!(whole.iter().all(|x| x.abs() < 0.25));
    let n = whole.len() as f64;
    assert!((whole.iter().sum::<f64>() / n).abs() < 5.0 * 0.25 / (3.0 * n).sqrt());
    let square = whole.iter().map(|x| x * x).sum::<f64>() / n;
    assert!((square / (0.0625 / 3.0) - 1.0).abs() < 5.0 * (0.8 / n).sqrt());
    let word = philox([1, 0, 3, 0], [7, 0])[2];
    assert_eq!(whole[6], ((f64::from(word) + 0.5) / 4_294_967_296.0 * 2.0 - 1.0) * 0.25);
    let mut part = vec![bf16::ZERO; 50];
    uniform(&pool(1), 7, 3, 4097, 0.25, &mut part);
    assert!(part.iter().zip(&whole[4097..]).all(|(a, b)| *a == bf16::of(*b)));
}

// Promises over all of them

/// The bits of every op's results, on shapes that make several tasks.
fn everything(threads: usize) -> Vec<(&'static str, Vec<u32>)> {
    let pool = &pool(threads);
    let lanes = threads as u64;
    let mut draw = Draw(18);
    let mut results = Vec::new();
    let mut keep = |name, x: &[f32]| results.push((name, x.iter().map(|x| x.to_bits()).collect()));

    for bits in [0, 1, 2, 3, 31] {
        let case = flags(200, 150, 700, bits);
        keep("product", &case.got(threads, case.draw::<f32, f32>(&mut Draw(bits as u64))));
    }
    let case = flags(2, 3000, 100, 2);
    keep("few rows", &case.got(threads, case.draw::<f32, f32>(&mut draw)));

    let tokens: Vec<i32> = (0..500).map(|_| draw.below(90) as i32).collect();
    let (x, weight, dout): (Vec<f32>, Vec<f32>, Vec<f32>) =
        (draw.many(500 * 130), draw.many(130), draw.many(500 * 130));
    let mut dtable = vec![0.0; 90 * 130];
    embed_grad(pool, &tokens, &x, 130, &mut dtable);
    keep("embed_grad", &dtable);
    let (mut out, mut rstd) = (vec![0.0; 500 * 130], vec![0.0; 500]);
    rms_norm(pool, &x, &weight, 1e-5, &mut out, &mut rstd);
    keep("rms_norm", &out);
    let (mut dx, mut dweight) = (vec![0.0; 500 * 130], vec![0.0; 130]);
    let mut space = scratch(workspace::cpu::sum_rows(500, 130));
    rms_norm_grad(pool, &x, &weight, &rstd, &dout, &mut dx, Some(&mut dweight), false, &mut space);
    keep("rms_norm_grad", &dx);
    keep("rms_norm_grad weight", &dweight);
    let mut sums = vec![0.0; 130];
    sum_rows(pool, 500, 130, &x, &mut sums, &mut scratch(workspace::cpu::sum_rows(500, 130)));
    keep("sum_rows", &sums);

    let shape = Heads { heads: 6, kv_heads: 2, head_dim: 20 };
    let starts = documents(&mut draw, 2, 300, 150);
    let qkv: Vec<f32> = draw.many(600 * shape.columns() as usize);
    let (out, stats) = run_attention(threads, shape, 300, &qkv, &starts);
    let dqkv = run_attention_grad(threads, shape, 300, &qkv, &out, &starts);
    keep("attention", &out);
    keep("attention stats", &stats);
    keep("attention_grad", &dqkv);
    let (wq, wk): (Vec<f32>, Vec<f32>) = (draw.many(20), draw.many(20));
    let (mut normed, mut rstd) = (vec![0.0; qkv.len()], vec![0.0; 600 * 8]);
    head_norm(pool, shape, &qkv, &wq, &wk, 1e-5, &mut normed, &mut rstd);
    let (mut dx, mut dq, mut dk) = (dqkv.clone(), vec![0.0; 20], vec![0.0; 20]);
    let mut space = scratch(workspace::cpu::sum_rows(600, 2 * 20));
    head_norm_grad(pool, shape, &qkv, &wq, &wk, &rstd, &mut dx, Some([&mut dq, &mut dk]), &mut space);
    for x in [&normed, &dx, &dq, &dk] {
        keep("head_norm", x);
    }
    for rows in [3, 100] {
        let (keys, values): (Vec<f32>, Vec<f32>) = (draw.many(400 * 40), draw.many(400 * 40));
        let mut out = vec![0.0; rows * 120];
        let mut space = scratch(workspace::cpu::cached_attention(lanes, rows as u64, 400, 20));
        cached_attention(pool, shape, &qkv[..rows * 200], &keys, &values, 300, &mut out, &mut space);
        keep("cached_attention", &out);
    }

    let (gate_up, dout): (Vec<f32>, Vec<f32>) = (draw.many(600 * 200), draw.many(600 * 100));
    let (mut out, mut dgate_up) = (vec![0.0; 600 * 100], vec![0.0; 600 * 200]);
    swiglu(pool, 100, &gate_up, &mut out);
    swiglu_grad(pool, 100, &gate_up, &dout, &mut dgate_up);
    keep("swiglu", &out);
    keep("swiglu_grad", &dgate_up);

    let logits: Vec<f32> = draw.many(200 * 501);
    let labels: Vec<i32> = (0..200).map(|_| draw.below(501) as i32).collect();
    let weights: Vec<f32> = draw.many(200);
    let (loss, _, gradient) = loss_in_blocks(threads, (501, 200), &logits, &labels, &weights, 0.1);
    keep("softmax_grad", &gradient);
    keep("loss", &[loss as f32, (loss - f64::from(loss as f32)) as f32]);
    let norm = squared_norm(pool, &qkv);
    keep("norm", &[norm as f32, (norm - f64::from(norm as f32)) as f32]);

    let widened = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
    for bits in [0, 1, 2, 3, 31] {
        let case = flags(200, 150, 2100, bits);
        let draw = || Draw(bits as u64);
        keep("product in bf16", &widened(&case.got(threads, case.draw::<bf16, bf16>(&mut draw()))));
        keep("product of bf16", &case.got(threads, case.draw::<bf16, f32>(&mut draw())));
    }
    let qkv: Vec<bf16> = draw.many(qkv.len());
    let (out, stats) = run_attention(threads, shape, 300, &qkv, &starts);
    keep("attention in bf16", &widened(&out));
    keep(
        "attention_grad in bf16",
        &widened(&attention_grad_of(threads, shape, 300, &qkv, &out, &out, &stats, &starts)),
    );
    results
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let one = everything(1);
    for threads in [2, 3] {
        for ((name, a), (_, b)) in one.iter().zip(everything(threads)) {
            assert!(*a == b, "{name} with {threads} threads");
        }
    }
}

/// Runs the tests of this file again with narrower vectors, each in a process of its own.
#[test]
fn every_width_of_vectors_keeps_the_promises() {
    if std::env::var_os("PLIMSOLL_VECTORS").is_some() {
        return;
    }
    for width in ["portable", "avx2", "avx512"] {
        let run = std::process::Command::new(std::env::current_exe().unwrap())
            .arg("cpu::kernels::")
            .env("PLIMSOLL_VECTORS", width)
            .output()
            .unwrap();
        assert!(run.status.success(), "{width}:\n{}", String::from_utf8_lossy(&run.stdout));
    }
}
