//! Tests of the CPU kernels.
//!
//! References are plain loops in f64 and central differences, on shapes without convenient divisors. Results in bf16 may differ
//! by the rounding of their single store. Bits do not depend on the number of threads, and all tests also run with every
//! width of vectors.

use half::bf16;

use super::*;
use crate::cpu::pool::Pool;
use plimsoll_program::formats::{self, dynamic_map, int8_row, int8_value, nf4_block, nf4_group, nf4_scale, nf4_value};
use plimsoll_program::op::{QkNorm, RopeScaling};
use plimsoll_program::workspace::{self, Kernels};
use proptest::prelude::*;

mod attention;
mod loss;
mod norms;
mod optimizer;
mod products;
mod quantized;
mod random;
mod rounding;

use attention::{SEQUENCES, attention_grad_of, documents, run_attention, run_attention_grad, softcap_of};
use loss::loss_in_blocks;
use norms::{NORMS, SHAPES};
use products::case_from_flags;

/// A small random generator (upper half of a 64-bit LCG), independent of the kernels.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as f64 / 2f64.powi(31) - 1.0
    }

    fn many<T: Real>(&mut self, n: usize) -> Vec<T> {
        (0..n).map(|_| T::from_f64(self.next())).collect()
    }

    fn below(&mut self, n: usize) -> usize {
        ((self.next() + 1.0) / 2.0 * n as f64) as usize % n
    }
}

fn pool(threads: usize) -> Pool {
    Pool::new(threads).unwrap()
}

/// Returns a workspace of planned size, filled with NaN to reveal reads before writes.
fn scratch<T: Real>(elements: u64) -> Vec<T> {
    vec![T::from_f64(f64::NAN); elements as usize]
}

fn to_f64s<T: Real>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.to_f64()).collect()
}

/// Returns the permitted error of a sum of `terms` products of numbers around 1.
fn tolerance<T: Real>(terms: usize) -> f64 {
    let unit = if size_of::<T::Wide>() == 4 { f64::from(f32::EPSILON) } else { f64::EPSILON };
    4.0 * unit * (terms as f64 + 4.0)
}

#[track_caller]
fn assert_close<T: Real>(got: &[T], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let off = (got.to_f64() - want).abs();
        // bf16 has 8 significant bits, so rounding changes a number by at most 2^-9 of it. 2^-8 also permits f32 sums
        // that cross a tie, and nothing else.
        let stored = if T::IS_WIDE { 0.0 } else { want.abs() / 256.0 };
        assert!(off <= stored + tolerance * (1.0 + want.abs()), "{what}[{i}]: {got:?} for {want}");
    }
}

/// Checks `gradient` against central differences of `loss` at some elements of x.
#[track_caller]
fn check_differences(x: &mut [f64], gradient: &[f64], what: &str, mut loss: impl FnMut(&[f64]) -> f64) {
    let h = 1e-5;
    let step = (x.len() / 50).max(1);
    for i in (0..x.len()).step_by(step) {
        let original = x[i];
        x[i] = original + h;
        let up = loss(x);
        x[i] = original - h;
        let down = loss(x);
        x[i] = original;
        let slope = (up - down) / (2.0 * h);
        assert!((slope - gradient[i]).abs() <= 1e-6 * (1.0 + slope.abs()), "{what}[{i}]: {} for {slope}", gradient[i]);
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The results of several ops as bits, each result with the name of its op.
#[derive(Default)]
struct ResultBits(Vec<(&'static str, Vec<u32>)>);

impl ResultBits {
    /// Adds the bits of one result.
    fn keep(&mut self, name: &'static str, x: &[f32]) {
        self.0.push((name, x.iter().map(|x| x.to_bits()).collect()));
    }
}

/// Heads of the attention in [`bits_of_all_ops`].
const HEADS: Heads = Heads { heads: 6, kv_heads: 2, head_dim: 20 };

/// Returns the bits of every op's results, on shapes that need several tasks.
fn bits_of_all_ops(threads: usize) -> ResultBits {
    let pool = &pool(threads);
    let (mut draw, mut bits) = (Draw(18), ResultBits::default());
    keep_products(threads, &mut draw, &mut bits);
    keep_row_ops(pool, &mut draw, &mut bits);
    keep_attention(pool, threads, &mut draw, &mut bits);
    keep_glu_and_loss(pool, threads, &mut draw, &mut bits);
    keep_bf16_ops(threads, &mut draw, &mut bits);
    bits
}

/// Computes products of f32, and adds their bits to `bits`.
fn keep_products(threads: usize, draw: &mut Draw, bits: &mut ResultBits) {
    for flags in [0, 1, 2, 3, 31] {
        let case = case_from_flags(200, 150, 700, flags);
        bits.keep("product", &case.got(threads, case.draw::<f32, f32>(&mut Draw(flags as u64))));
    }
    let case = case_from_flags(2, 3000, 100, 2);
    bits.keep("few rows", &case.got(threads, case.draw::<f32, f32>(draw)));
}

/// Computes gradients of embeddings, RMS norms and sums of rows, and adds their bits to `bits`.
fn keep_row_ops(pool: &Pool, draw: &mut Draw, bits: &mut ResultBits) {
    let tokens: Vec<i32> = (0..500).map(|_| draw.below(90) as i32).collect();
    let (x, weight, dout): (Vec<f32>, Vec<f32>, Vec<f32>) =
        (draw.many(500 * 130), draw.many(130), draw.many(500 * 130));
    let mut dtable = vec![0.0; 90 * 130];
    embed_grad(pool, &tokens, &x, 130, 1.0, &mut dtable);
    bits.keep("embed_grad", &dtable);
    let (mut out, mut rstd) = (vec![0.0; 500 * 130], vec![0.0; 500]);
    let factor = NormWeight { values: &weight[..], offset: 0.0 };
    rms_norm(pool, &x, factor, None, 1e-5, &mut out, &mut rstd);
    bits.keep("rms_norm", &out);
    let (mut dx, mut dweight) = (vec![0.0; 500 * 130], vec![0.0; 130]);
    let mut space = scratch(workspace::cpu::sum_rows(500, 130));
    rms_norm_grad(pool, &x, factor, &rstd, &dout, &mut dx, Some(&mut dweight), false, &mut space);
    bits.keep("rms_norm_grad", &dx);
    bits.keep("rms_norm_grad weight", &dweight);
    let mut sums = vec![0.0; 130];
    sum_rows(pool, 500, 130, &x, &mut sums, &mut scratch(workspace::cpu::sum_rows(500, 130)));
    bits.keep("sum_rows", &sums);
}

/// Computes attention, norms of heads and attention over a cache, and adds their bits to `bits`.
fn keep_attention(pool: &Pool, threads: usize, draw: &mut Draw, bits: &mut ResultBits) {
    let starts = documents(draw, 2, 300, 150);
    let qkv: Vec<f32> = draw.many(600 * HEADS.columns() as usize);
    let (out, stats) = run_attention(threads, HEADS, None, 300, &qkv, &starts);
    let dqkv = run_attention_grad(threads, HEADS, None, 300, &qkv, &out, &starts);
    bits.keep("attention", &out);
    bits.keep("attention stats", &stats);
    bits.keep("attention_grad", &dqkv);
    let (wq, wk): (Vec<f32>, Vec<f32>) = (draw.many(20), draw.many(20));
    let (mut normed, mut rstd) = (vec![0.0; qkv.len()], vec![0.0; 600 * 8]);
    let weights = [&wq, &wk].map(|values| NormWeight { values: &values[..], offset: 0.0 });
    head_norm(pool, HEADS, &qkv, weights, 1e-5, &mut normed, &mut rstd);
    let (mut dx, mut dq, mut dk) = (dqkv.clone(), vec![0.0; 20], vec![0.0; 20]);
    let mut space = scratch(workspace::cpu::sum_rows(600, 2 * 20));
    head_norm_grad(pool, HEADS, &qkv, weights, &rstd, &mut dx, Some([&mut dq, &mut dk]), &mut space);
    for x in [&normed, &dx, &dq, &dk] {
        bits.keep("head_norm", x);
    }
    for rows in [3, 100] {
        let (keys, values): (Vec<f32>, Vec<f32>) = (draw.many(400 * 40), draw.many(400 * 40));
        let mut out = vec![0.0; rows * 120];
        let mut space = scratch(workspace::cpu::cached_attention(threads as u64, 400, 20));
        let places: Vec<i32> = (300..300 + rows as i32).collect();
        let caches = [&keys[..], &values[..]];
        cached_attention(pool, HEADS, None, &qkv[..rows * 200], caches, &places, (1, 400), &[], &mut out, &mut space);
        bits.keep("cached_attention", &out);
    }
}

/// Computes SwiGLU, the loss and the norm of a tensor, and adds their bits to `bits`.
fn keep_glu_and_loss(pool: &Pool, threads: usize, draw: &mut Draw, bits: &mut ResultBits) {
    let (gate_up, dout): (Vec<f32>, Vec<f32>) = (draw.many(600 * 200), draw.many(600 * 100));
    let (mut out, mut dgate_up) = (vec![0.0; 600 * 100], vec![0.0; 600 * 200]);
    glu(pool, Activation::Silu, 100, &gate_up, &mut out);
    glu_grad(pool, Activation::Silu, 100, &gate_up, &dout, &mut dgate_up);
    bits.keep("glu", &out);
    bits.keep("glu_grad", &dgate_up);

    let logits: Vec<f32> = draw.many(200 * 501);
    let labels: Vec<i32> = (0..200).map(|_| draw.below(501) as i32).collect();
    let weights: Vec<f32> = draw.many(200);
    let (loss, _, gradient) = loss_in_blocks(threads, (501, 200), None, &logits, &labels, &weights, 0.1);
    bits.keep("softmax_grad", &gradient);
    bits.keep("loss", &[loss as f32, (loss - f64::from(loss as f32)) as f32]);
    let norm = squared_norm(pool, &gate_up);
    bits.keep("norm", &[norm as f32, (norm - f64::from(norm as f32)) as f32]);
}

/// Computes products and attention of bf16, and adds their bits to `bits`.
fn keep_bf16_ops(threads: usize, draw: &mut Draw, bits: &mut ResultBits) {
    let widened = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
    for flags in [0, 1, 2, 3, 31] {
        let case = case_from_flags(200, 150, 2100, flags);
        let draw = || Draw(flags as u64);
        bits.keep("product in bf16", &widened(&case.got(threads, case.draw::<bf16, bf16>(&mut draw()))));
        bits.keep("product of bf16", &case.got(threads, case.draw::<bf16, f32>(&mut draw())));
    }
    let starts = documents(draw, 2, 300, 150);
    let qkv: Vec<bf16> = draw.many(600 * HEADS.columns() as usize);
    let (out, stats) = run_attention(threads, HEADS, None, 300, &qkv, &starts);
    bits.keep("attention in bf16", &widened(&out));
    bits.keep(
        "attention_grad in bf16",
        &widened(&attention_grad_of(threads, HEADS, None, 300, &qkv, &out, &out, &stats, &starts)),
    );
}

#[test]
fn results_do_not_depend_on_thread_count() {
    let one = bits_of_all_ops(1);
    for threads in [2, 3] {
        for ((name, a), (_, b)) in one.0.iter().zip(bits_of_all_ops(threads).0) {
            assert!(*a == b, "{name} with {threads} threads");
        }
    }
}

/// Runs the kernel tests again with narrower vectors, each width in a process of its own.
#[test]
#[ignore = "slow: .ci/slow-tests"]
fn kernel_tests_pass_with_every_vector_width() {
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
