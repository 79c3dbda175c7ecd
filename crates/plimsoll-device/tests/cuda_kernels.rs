//! The arithmetic of the CUDA kernels, shown on the CPU: the same sources and the same launches,
//! through `cuda_shim/shim.h`, against the CPU's kernels in f64. `cuda_shim/README.md` says what this
//! cannot show. Needs g++, so `cargo xtask cuda-check` runs it and a plain `cargo test` does not.

mod cuda_shim;

use cuda_shim::{Gpu, Kind, compile_text};
use plimsoll_core::DType;
use plimsoll_device::cpu::kernels as cpu;
use plimsoll_device::cpu::kernels::Heads;
use plimsoll_device::cpu::pool::Pool;
use plimsoll_device::cuda::kernels::launch::*;
use plimsoll_device::cuda::kernels::{Family, Real};
use plimsoll_program::op::RopeScaling;
use plimsoll_program::scalars::{METRIC_COUNT, Metric, SCALAR_COUNT, Scalar};
use plimsoll_program::workspace::cuda::NORM_PARTIALS;
use plimsoll_program::workspace::{self, Kernels};

/// A small generator (an LCG of 64 bits, the upper half): tests must not need the kernels' own.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as f64 / 2f64.powi(31) - 1.0
    }

    fn below(&mut self, n: usize) -> usize {
        ((self.next() + 1.0) / 2.0 * n as f64) as usize % n
    }

    /// Numbers around 1 that `kind` holds exactly.
    fn many(&mut self, kind: Kind, n: usize) -> Vec<f64> {
        (0..n).map(|_| kind.rounded(self.next())).collect()
    }

    fn integers(&mut self, n: usize, below: usize) -> Vec<i32> {
        (0..n).map(|_| self.below(below) as i32).collect()
    }
}

const REALS: [Real; 2] = [Real::F32, Real::Bf16];

fn pool() -> Pool {
    Pool::new(1).unwrap()
}

fn scratch(elements: u64) -> Vec<f64> {
    vec![f64::NAN; elements as usize]
}

/// f32 results are within 1e-5 of the largest; bf16 ones are in addition rounded once.
#[track_caller]
fn close(got: &[f64], want: &[f64], kind: Kind, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let rounding = if kind == Kind::Bf16 { 1.0 / 256.0 } else { 0.0 };
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let off = (got - want).abs();
        assert!(off <= 1e-5 * largest + rounding * want.abs(), "{what}[{i}] ({kind:?}): {got} for {want}");
    }
}

fn sum(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// Runs a check for both types of activations, on addresses that allow packs and on ones that do not.
fn everywhere(check: impl Fn(Gpu, Real, Kind, &mut Draw)) {
    for of in REALS {
        for shift in [0, 1] {
            check(Gpu::new(shift), of, Kind::of(of), &mut Draw(7 + shift as u64));
        }
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn rms_norm_and_its_gradient() {
    everywhere(|mut gpu, of, kind, draw| {
        for (rows, dim) in [(1, 3), (3, 7), (5, 1024), (70, 36), (1100, 33)] {
            let (n, eps) = (rows * dim, 1e-5);
            let (x, weight) = (draw.many(kind, n), draw.many(kind, dim));
            let (mut want, mut want_rstd) = (vec![0.0; n], vec![0.0; rows]);
            cpu::rms_norm(&pool(), &x, &weight, eps, &mut want, &mut want_rstd);
            let (gx, gweight) = (gpu.put(kind, &x), gpu.put(kind, &weight));
            let (out, rstd) = (gpu.room(kind, n), gpu.room(Kind::F32, rows));
            gpu.run(&rms_norm(of, gx, gweight, out, rstd, rows as u64, dim as u64, eps));
            close(&gpu.get(out), &want, kind, "normed");
            close(&gpu.get(rstd), &want_rstd, Kind::F32, "rstd");

            let rstd_values = gpu.get(rstd);
            let dout = draw.many(kind, n);
            let (before, dweight_before) = (draw.many(kind, n), draw.many(Kind::F32, dim));
            for accumulate in [false, true] {
                let (mut want, mut want_dweight) = (before.clone(), dweight_before.clone());
                let scratch = &mut scratch(workspace::cpu::sum_rows(rows as u64, dim as u64));
                let dweight = &mut want_dweight;
                cpu::rms_norm_grad(
                    &pool(),
                    &x,
                    &weight,
                    &rstd_values,
                    &dout,
                    &mut want,
                    Some(dweight),
                    accumulate,
                    scratch,
                );
                let (gdout, gdx) = (gpu.put(kind, &dout), gpu.put(kind, &before));
                let gdweight = gpu.put(Kind::F32, &dweight_before);
                let room = gpu.room(Kind::F32, workspace::cuda::sum_rows(rows as u64, dim as u64) as usize);
                let inputs = [gx, gweight, rstd, gdout];
                gpu.run(&rms_norm_grad(of, inputs, gdx, gdweight, room, rows as u64, dim as u64, accumulate));
                close(&gpu.get(gdx), &want, kind, "dx");
                close(&gpu.get(gdweight), &want_dweight, Kind::F32, "dweight");
            }
        }
    });
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn head_norm_and_its_gradient() {
    everywhere(|mut gpu, of, kind, draw| {
        for (rows, heads, kv_heads, head_dim) in
            [(1, 1, 1, 6), (3, 4, 2, 64), (41, 3, 1, 33), (1030, 1, 1, 8), (2, 2, 1, 256)]
        {
            let shape = Heads { heads, kv_heads, head_dim };
            let (n, e) = (rows * shape.columns() as usize, head_dim as usize);
            let normed = rows * shape.rotated() as usize;
            let x = draw.many(kind, n);
            let (q, k) = (draw.many(kind, e), draw.many(kind, e));
            let (mut want, mut want_rstd) = (vec![0.0; n], vec![0.0; normed]);
            cpu::head_norm(&pool(), shape, &x, &q, &k, 1e-6, &mut want, &mut want_rstd);
            let inputs = [gpu.put(kind, &x), gpu.put(kind, &q), gpu.put(kind, &k)];
            let (out, rstd) = (gpu.room(kind, n), gpu.room(Kind::F32, normed));
            gpu.run(&head_norm(of, inputs, out, rstd, rows as u64, shape, 1e-6));
            close(&gpu.get(out), &want, kind, "normed");
            close(&gpu.get(rstd), &want_rstd, Kind::F32, "rstd");

            let rstd_values = gpu.get(rstd);
            let (dout, dq, dk) = (draw.many(kind, n), draw.many(Kind::F32, e), draw.many(Kind::F32, e));
            let (mut want, mut want_dq, mut want_dk) = (dout.clone(), dq.clone(), dk.clone());
            let elements = workspace::cpu::sum_rows(rows as u64, 2 * head_dim);
            let room = &mut scratch(elements);
            cpu::head_norm_grad(
                &pool(),
                shape,
                &x,
                &q,
                &k,
                &rstd_values,
                &mut want,
                Some([&mut want_dq, &mut want_dk]),
                room,
            );
            let (gdx, gdq, gdk) = (gpu.put(kind, &dout), gpu.put(Kind::F32, &dq), gpu.put(Kind::F32, &dk));
            let room = gpu.room(Kind::F32, workspace::cuda::sum_rows(rows as u64, 2 * head_dim) as usize);
            let [x, q, k] = inputs;
            gpu.run(&head_norm_grad(of, [x, q, k, rstd], gdx, [gdq, gdk], room, rows as u64, shape));
            close(&gpu.get(gdx), &want, kind, "dx");
            close(&gpu.get(gdq), &want_dq, Kind::F32, "dq_weight");
            close(&gpu.get(gdk), &want_dk, Kind::F32, "dk_weight");
        }
    });
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn rope_turns_there_and_back() {
    everywhere(|mut gpu, of, kind, draw| {
        for (rows, heads, kv_heads, head_dim) in [(1, 1, 1, 2), (5, 3, 1, 6), (9, 8, 2, 64)] {
            let shape = Heads { heads, kv_heads, head_dim };
            let n = rows * shape.columns() as usize;
            let table = draw.many(Kind::F32, 50 * head_dim as usize);
            let (qkv, positions) = (draw.many(kind, n), draw.integers(rows, 50));
            let (gtable, gpositions) = (gpu.put(Kind::F32, &table), gpu.put_integers(&positions));
            for inverse in [false, true] {
                let mut want = qkv.clone();
                cpu::rope(&pool(), shape, &table, &positions, inverse, &mut want);
                let gqkv = gpu.put(kind, &qkv);
                gpu.run(&rope(of, gqkv, gtable, gpositions, rows as u64, shape, inverse));
                close(&gpu.get(gqkv), &want, kind, "turned");
            }
        }
    });
}

/// The frequencies are those of the CPU in f32 to the bit; only cosines and sines are rounded by
/// others.
#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn rope_tables_are_those_of_the_cpu_in_f32() {
    let llama3 = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    for scaling in [RopeScaling::None, RopeScaling::Linear { factor: 4.0 }, llama3] {
        for (head_dim, theta) in [(6, 1e4), (64, 5e5), (128, 1e6)] {
            let rows = 3000;
            let mut want = vec![0.0f32; rows * head_dim];
            cpu::rope_table(&pool(), head_dim, theta, &scaling, &mut want);
            let mut gpu = Gpu::new(0);
            let table = gpu.room(Kind::F32, rows * head_dim);
            gpu.run(&rope_table(Real::F32, table, rows as u64, head_dim as u64, theta, scaling));
            for (i, (got, want)) in gpu.get(table).iter().zip(&want).enumerate() {
                assert!((got - f64::from(*want)).abs() <= 1.3e-7, "{scaling:?} {head_dim} [{i}]: {got} for {want}");
            }
        }
    }
}

/// Documents of random lengths, back to back in each sequence.
fn documents(draw: &mut Draw, batch: usize, sequence: usize) -> Vec<i32> {
    let mut starts = Vec::new();
    for _ in 0..batch {
        let mut start = 0;
        for at in 0..sequence {
            if draw.below(23) == 0 {
                start = at;
            }
            starts.push(start as i32);
        }
    }
    starts
}

/// Whether heads at these addresses have kernels of their own, whose tests are in `cuda_tensor.rs`.
fn on_tensor_cores(launches: &[Launch], gpu: &Gpu) -> bool {
    launches[0].unit.family() == Family::TensorAttention && gpu.shift == 0
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn attention_and_its_gradient() {
    everywhere(|mut gpu, of, kind, draw| {
        for (batch, sequence, heads, kv_heads, head_dim) in
            [(1, 1, 1, 1, 6), (2, 33, 2, 1, 36), (2, 70, 4, 2, 64), (1, 150, 3, 1, 64), (1, 130, 2, 2, 128)]
        {
            let shape = Heads { heads, kv_heads, head_dim };
            if on_tensor_cores(&attention(of, 0, 0, 0, 0, 1, 1, shape), &gpu) {
                continue;
            }
            let rows = batch * sequence;
            let (n, wide) = (rows * shape.columns() as usize, rows * shape.query_columns() as usize);
            let qkv: Vec<f64> = draw.many(kind, n).iter().map(|x| kind.rounded(3.0 * x)).collect();
            let starts = if sequence == 150 { vec![0; rows] } else { documents(draw, batch, sequence) };
            let (mut want, mut want_stats) = (vec![0.0; wide], vec![0.0; rows * heads as usize]);
            let room = &mut scratch(workspace::cpu::attention(1, sequence as u64, head_dim));
            cpu::attention(&pool(), shape, sequence, &qkv, &starts, &mut want, &mut want_stats, room);
            let (gqkv, gstarts) = (gpu.put(kind, &qkv), gpu.put_integers(&starts));
            let (out, stats) = (gpu.room(kind, wide), gpu.room(Kind::F32, rows * heads as usize));
            let (b, t) = (batch as u64, sequence as u64);
            gpu.run(&attention(of, gqkv, gstarts, out, stats, b, t, shape));
            close(&gpu.get(out), &want, kind, "out");
            close(&gpu.get(stats), &want_stats, Kind::F32, "stats");

            let (out_values, stats_values, dout) = (gpu.get(out), gpu.get(stats), draw.many(kind, wide));
            let mut want = vec![0.0; n];
            let room = &mut scratch(workspace::cpu::attention_grad(1, t, head_dim));
            cpu::attention_grad(
                &pool(),
                shape,
                sequence,
                &qkv,
                &out_values,
                &dout,
                &stats_values,
                &starts,
                &mut want,
                room,
            );
            let (gdout, dqkv) = (gpu.put(kind, &dout), gpu.room(kind, n));
            let room = gpu.room(Kind::F32, workspace::cuda::attention_grad(b, t, heads) as usize);
            gpu.run(&attention_grad(of, [gqkv, out, gdout, stats, gstarts], dqkv, room, b, t, shape));
            close(&gpu.get(dqkv), &want, kind, "dqkv");
        }
    });
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn attention_over_a_cache() {
    everywhere(|mut gpu, of, kind, draw| {
        for (before, rows, capacity, heads, kv_heads, head_dim) in [
            (0, 1, 1, 1, 1, 6),
            (70, 1, 90, 4, 2, 64),
            (3, 70, 80, 2, 1, 64),
            (64, 2, 66, 6, 3, 6),
            // Several parts of the keys: the last is not full, begins, or is empty.
            (290, 1, 300, 2, 1, 80),
            (127, 2, 400, 2, 1, 6),
            (128, 1, 400, 2, 2, 128),
        ] {
            let shape = Heads { heads, kv_heads, head_dim };
            if rows > 4 && on_tensor_cores(&attention(of, 0, 0, 0, 0, 1, 1, shape), &gpu) {
                continue;
            }
            let width = (kv_heads * head_dim) as usize;
            let qkv = draw.many(kind, rows * shape.columns() as usize);
            let (mut keys, mut values) = (draw.many(kind, capacity * width), draw.many(kind, capacity * width));
            let mut scalars = vec![0.0; SCALAR_COUNT as usize];
            scalars[Scalar::CacheLength as usize] = before as f64;
            let (gqkv, gscalars) = (gpu.put(kind, &qkv), gpu.put(Kind::F32, &scalars));
            let (gkeys, gvalues) = (gpu.put(kind, &keys), gpu.put(kind, &values));
            gpu.run(&append_cache(of, gqkv, gscalars, gkeys, gvalues, rows as u64, shape));
            cpu::append_cache(shape, &qkv, before, &mut keys, &mut values);
            assert_eq!((gpu.get(gkeys), gpu.get(gvalues)), (keys.clone(), values.clone()));

            let mut want = vec![0.0; rows * shape.query_columns() as usize];
            let room = &mut scratch(workspace::cpu::cached_attention(1, rows as u64, capacity as u64, head_dim));
            cpu::cached_attention(&pool(), shape, &qkv, &keys, &values, before, &mut want, room);
            let out = gpu.room(kind, want.len());
            let room = workspace::cuda::cached_attention(rows as u64, capacity as u64, shape);
            let room = gpu.room(Kind::F32, room as usize);
            let inputs = [gqkv, gkeys, gvalues, gscalars];
            gpu.run(&cached_attention(of, inputs, out, room, rows as u64, capacity as u64, shape));
            close(&gpu.get(out), &want, kind, "out");
        }
    });
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn swiglu_and_its_gradient_in_place_or_not() {
    everywhere(|mut gpu, of, kind, draw| {
        for (rows, ffn) in [(1, 1), (3, 29), (2, 1028), (5, 2056)] {
            let gate_up: Vec<f64> = draw.many(kind, 2 * rows * ffn).iter().map(|x| kind.rounded(8.0 * x)).collect();
            let dout = draw.many(kind, rows * ffn);
            let mut want = vec![0.0; rows * ffn];
            cpu::swiglu(&pool(), ffn, &gate_up, &mut want);
            let (ggate_up, gdout, out) = (gpu.put(kind, &gate_up), gpu.put(kind, &dout), gpu.room(kind, rows * ffn));
            gpu.run(&swiglu(of, ggate_up, out, rows as u64, ffn as u64));
            close(&gpu.get(out), &want, kind, "out");

            let mut want = vec![0.0; 2 * rows * ffn];
            cpu::swiglu_grad(&pool(), ffn, &gate_up, &dout, &mut want);
            let apart = gpu.room(kind, 2 * rows * ffn);
            for into in [apart, ggate_up] {
                gpu.run(&swiglu_grad(of, ggate_up, gdout, into, rows as u64, ffn as u64));
                close(&gpu.get(into), &want, kind, "dgate_up");
            }
        }
    });
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn the_loss_in_blocks_its_gradient_and_its_hits() {
    everywhere(|mut gpu, of, kind, draw| {
        for (rows, vocab) in [(1, 3), (5, 33), (3, 1000), (2, 5003)] {
            let mut logits: Vec<f64> = draw.many(kind, rows * vocab).iter().map(|x| kind.rounded(4.0 * x)).collect();
            let mut labels = draw.integers(rows, vocab);
            let mut weights = draw.many(Kind::F32, rows);
            if rows > 2 {
                // The label's is the largest logit, and it is not alone: it may come first or last.
                logits[labels[0] as usize] = 8.0;
                logits[0] = 8.0;
                labels[1] = -100;
                logits[2 * vocab + labels[2] as usize] = 8.0;
                logits[3 * vocab - 1] = 8.0;
            }
            if rows > 3 {
                weights[3] = 0.0;
            }
            let mut scalars = vec![0.0; SCALAR_COUNT as usize];
            scalars[Scalar::InverseTokens as usize] = 0.125;
            for block in [vocab, vocab.div_ceil(3), vocab.div_ceil(2).next_multiple_of(64)] {
                let (glabels, gweights) = (gpu.put_integers(&labels), gpu.put(Kind::F32, &weights));
                let gscalars = gpu.put(Kind::F32, &scalars);
                let (mut stats, gstats) = (scratch(4 * rows as u64), gpu.room(Kind::F32, 4 * rows));
                let blocks: Vec<(usize, usize)> =
                    (0..vocab).step_by(block).map(|first| (first, block.min(vocab - first))).collect();
                let part = |first: usize, columns: usize| -> Vec<f64> {
                    logits.chunks(vocab).flat_map(|row| &row[first..first + columns]).copied().collect()
                };
                for &(first, columns) in &blocks {
                    let part = part(first, columns);
                    let of_cpu = cpu::Labelled { labels: &labels, weights: &weights, first, columns };
                    cpu::softmax_stats(&pool(), of_cpu, &part, &mut stats, first == 0);
                    let places = [gpu.put(kind, &part), glabels, gweights, gstats];
                    gpu.run(&softmax_stats(of, places, rows as u64, first as u64, columns as u64, first == 0));
                }
                let mut want_correct = vec![7; rows];
                let loss = cpu::cross_entropy(&stats, &labels, &weights, Some(&mut want_correct));
                let metrics = gpu.put(Kind::F64, &vec![1.5; METRIC_COUNT as usize]);
                let correct = gpu.room(Kind::I32, rows);
                let inputs = [gstats, glabels, gweights];
                gpu.run(&cross_entropy(of, inputs, metrics, Some(correct), rows as u64));
                let got = gpu.get(metrics)[Metric::LossSum as usize] - 1.5;
                assert!((got - loss).abs() <= 1e-5 * loss.abs().max(1.0), "{got} for {loss}");
                assert_eq!(gpu.get_integers(correct), want_correct);
                // Hits are not always asked for.
                gpu.run(&cross_entropy(of, inputs, metrics, None, rows as u64));
                for &(first, columns) in &blocks {
                    let mut want = part(first, columns);
                    let glogits = gpu.put(kind, &want);
                    let of_cpu = cpu::Labelled { labels: &labels, weights: &weights, first, columns };
                    cpu::softmax_grad(&pool(), of_cpu, &mut want, &stats, 0.125);
                    let places = [glogits, glabels, gweights, gstats, gscalars];
                    gpu.run(&softmax_grad(of, places, rows as u64, first as u64, columns as u64));
                    close(&gpu.get(glogits), &want, kind, "gradient");
                }
            }
        }
    });
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn embed_and_its_gradient() {
    everywhere(|mut gpu, of, kind, draw| {
        for (rows, hidden, vocab) in [
            (1, 1, 1),
            (40, 12, 9),
            (600, 5, 7),
            (9, 1100, 4),
            (300, 8, 200),
            // Runs of several rows for each that sorts, portions of several rows, sums over many portions.
            (2600, 4, 3),
            (1100, 3, 70_000),
            (1030, 1, 1),
        ] {
            let mut tokens = draw.integers(rows, vocab);
            if rows == 2600 {
                // Most are padding.
                (0..rows).filter(|row| row % 5 > 0).for_each(|row| tokens[row] = 1);
            }
            let (table, dout) = (draw.many(kind, vocab * hidden), draw.many(kind, rows * hidden));
            let mut want = vec![0.0; rows * hidden];
            cpu::embed(&pool(), &tokens, &table, hidden, &mut want);
            let (gtokens, gtable) = (gpu.put_integers(&tokens), gpu.put(kind, &table));
            let out = gpu.room(kind, rows * hidden);
            let (n, d, v) = (rows as u64, hidden as u64, vocab as u64);
            gpu.run(&embed(of, gtokens, gtable, out, n, d, v));
            close(&gpu.get(out), &want, kind, "out");

            let (gdout, gdtable) = (gpu.put(kind, &dout), gpu.put(Kind::F32, &table));
            let mut want = table;
            cpu::embed_grad(&pool(), &tokens, &dout, hidden, &mut want);
            let room = gpu.room(Kind::F32, workspace::cuda::embed_grad(n, d) as usize);
            gpu.run(&embed_grad(of, gtokens, gdout, gdtable, room, n, d, v));
            close(&gpu.get(gdtable), &want, Kind::F32, "dtable");
        }
    });
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn tokens_outside_the_vocabulary_have_no_gradient() {
    let mut gpu = Gpu::new(0);
    let tokens: Vec<i32> = (0..40).map(|row| [2, -1, 16, 0][row % 4]).collect();
    let (gtokens, dout) = (gpu.put_integers(&tokens), gpu.put(Kind::F32, &[1.0; 40]));
    let (dtable, room) =
        (gpu.put(Kind::F32, &[0.0; 16]), gpu.room(Kind::F32, workspace::cuda::embed_grad(40, 1) as usize));
    gpu.run(&embed_grad(Real::F32, gtokens, dout, dtable, room, 40, 1, 16));
    let want: Vec<f64> = (0..16).map(|token| if token == 0 || token == 2 { 10.0 } else { 0.0 }).collect();
    assert_eq!(gpu.get(dtable), want);
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn sums_element_by_element_and_over_rows() {
    everywhere(|mut gpu, of, kind, draw| {
        for (rows, columns) in [(1, 1), (3, 7), (40, 1030), (1100, 12), (600, 260), (9, 2056)] {
            let n = rows * columns;
            let (x, y, bias) = (draw.many(kind, n), draw.many(kind, n), draw.many(kind, columns));
            let (gx, gy, gbias) = (gpu.put(kind, &x), gpu.put(kind, &y), gpu.put(kind, &bias));
            gpu.run(&add(of, gx, gy, n as u64));
            close(&gpu.get(gy), &sum(&x, &y), kind, "sum");

            let (gy, r, c) = (gpu.put(kind, &y), rows as u64, columns as u64);
            gpu.run(&add_rows(of, gbias, 0, gy, c, r, c));
            let repeated: Vec<f64> = bias.iter().cycle().take(n).copied().collect();
            close(&gpu.get(gy), &sum(&y, &repeated), kind, "with bias");

            // Into some columns of a wider matrix; those beside them stay.
            for beside in [3, 16] {
                let stride = columns + beside;
                let wide = draw.many(kind, rows * stride);
                let gwide = gpu.put(kind, &wide);
                gpu.run(&add_rows(of, gx, c, gwide, stride as u64, r, c));
                let added = |(at, y): (usize, &f64)| match at % stride {
                    column if column < columns => y + x[at / stride * columns + column],
                    _ => *y,
                };
                let want: Vec<f64> = wide.iter().enumerate().map(added).collect();
                close(&gpu.get(gwide), &want, kind, "with residual");
            }

            let (sums, mut want) = (gpu.put(Kind::F32, &bias), bias);
            let room = &mut scratch(workspace::cpu::sum_rows(rows as u64, columns as u64));
            cpu::sum_rows(&pool(), rows, columns, &x, &mut want, room);
            let room = gpu.room(Kind::F32, workspace::cuda::sum_rows(rows as u64, columns as u64) as usize);
            gpu.run(&sum_rows(of, gx, sums, room, rows as u64, columns as u64));
            close(&gpu.get(sums), &want, Kind::F32, "sum of rows");

            let row = rows - 1;
            let mut scalars = vec![0.0; SCALAR_COUNT as usize];
            scalars[Scalar::LastRow as usize] = row as f64;
            let (gscalars, out) = (gpu.put(Kind::F32, &scalars), gpu.room(kind, columns));
            gpu.run(&pick_row(of, gx, gscalars, out, columns as u64));
            assert_eq!(gpu.get(out), x[row * columns..]);
        }
    });
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn sums_over_ranks_are_taken_in_their_order() {
    let mut draw = Draw(3);
    let mut gpu = Gpu::new(0);
    for (kind, dtype) in [(Kind::F32, DType::F32), (Kind::F64, DType::F64)] {
        for (ranks, elements, stride) in [(2, 1, 64), (3, 1025, 1088), (5, 300, 320)] {
            // Numbers whose sums round, so that another order has other bits.
            let of = |draw: &mut Draw| draw.many(kind, elements).iter().map(|x| kind.rounded(x * 1e6 + x)).collect();
            let parts: Vec<Vec<f64>> = (0..ranks).map(|_| of(&mut draw)).collect();
            let before = draw.many(kind, elements);
            for (rank, adds) in (0..ranks).flat_map(|rank| [(rank, false), (rank, true)]) {
                let sum = |at: usize| (1..ranks).fold(parts[0][at], |sum, other| kind.rounded(sum + parts[other][at]));
                let added = |at: usize| if adds { kind.rounded(before[at] + sum(at)) } else { sum(at) };
                let mut others = vec![0.0; stride * (ranks - 1)];
                for (number, other) in (0..ranks).filter(|other| *other != rank).enumerate() {
                    others[number * stride..][..elements].copy_from_slice(&parts[other]);
                }
                let (own, others, into) = (gpu.put(kind, &parts[rank]), gpu.put(kind, &others), gpu.put(kind, &before));
                let at = |into: u64| if adds { into } else { own };
                let stands = Parts { own, others, stride: stride as u64, rank: rank as u32, ranks: ranks as u32 };
                // What is not added stands in the own part's place.
                gpu.run(&sum_ranks(dtype, stands, at(into), elements as u64, adds).unwrap());
                let want: Vec<f64> = (0..elements).map(added).collect();
                assert_eq!(gpu.get(at(into)), want, "rank {rank} of {ranks}, {kind:?}, added: {adds}");
            }
        }
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn casts_round_once_to_nearest_even() {
    let mut draw = Draw(3);
    let types = [(DType::F64, Kind::F64), (DType::F32, Kind::F32), (DType::Bf16, Kind::Bf16), (DType::F16, Kind::F16)];
    // Around the edges of each type: ties, the last normal numbers, subnormals, overflow.
    let mut values = vec![0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 65_504.0, 65_519.9, 65_520.0, 1e-45];
    for scale in [1.0, 2f64.powi(-14), 2f64.powi(-24), 2f64.powi(-25), 2f64.powi(-126), 65_504.0, 3.4e38] {
        values.extend((0..400).map(|_| scale * (1.0 + draw.next())));
        values.extend((0..64).map(|i| scale * (1.0 + f64::from(i) / 512.0)));
        values.extend((0..64).map(|i| scale * (1.0 + f64::from(i) / 4096.0 + 1e-12)));
    }
    // Every number that 16 bits can be.
    for bits in 0..=u16::MAX {
        values.push(half::f16::from_bits(bits).to_f64());
        values.push(half::bf16::from_bits(bits).to_f64());
    }
    for (from_type, from) in types {
        let given: Vec<f64> = values.iter().map(|x| from.rounded(*x)).collect();
        for (to_type, to) in types {
            let mut gpu = Gpu::new(1);
            let (source, target) = (gpu.put(from, &given), gpu.room(to, given.len()));
            let Some(launches) = cast(from_type, source, to_type, target, given.len() as u64) else { continue };
            gpu.run(&launches);
            for (given, got) in given.iter().zip(gpu.get(target)) {
                let want = to.rounded(*given);
                let equal = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                assert!(equal, "{given:e} from {from_type} to {to_type}: {got:e}, not {want:e}");
            }
        }
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn fills_reach_every_element() {
    let kinds = [(DType::F32, Kind::F32), (DType::F64, Kind::F64), (DType::Bf16, Kind::Bf16), (DType::U8, Kind::U8)];
    for (dtype, kind) in kinds {
        for (elements, shift) in [1, 255, 5000, 20_001].into_iter().flat_map(|n| [(n, 0), (n, 1)]) {
            let mut gpu = Gpu::new(shift);
            let (into, value) = (gpu.room(kind, elements), if kind == Kind::U8 { 127.0 } else { 0.3 });
            gpu.run(&fill(dtype, into, value, elements as u64).unwrap());
            assert_eq!(gpu.get(into), vec![kind.rounded(value); elements]);
        }
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|x| *x as f32).collect()
}

/// Equal to the bit, but for what NaN it is.
#[track_caller]
fn same(got: &[f64], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{what}[{i}]: {got:e} for {want:e}");
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn random_numbers_are_those_of_the_cpu() {
    for (first, elements) in [(0, 1), (0, 5000), (3, 2), (5, 1031), (1 << 40, 17)] {
        let mut gpu = Gpu::new(1);
        let (mut want, into) = (vec![0.0f32; elements], gpu.room(Kind::F32, elements));
        cpu::normal(&pool(), 11, 5, first, 0.02, &mut want);
        gpu.run(&init_normal(into, 11, 5, first, 0.02, elements as u64));
        same(&gpu.get(into), &wide(&want), "normal");
        cpu::uniform(&pool(), 11, 5, first, 0.3, &mut want);
        gpu.run(&init_uniform(into, 11, 5, first, 0.3, elements as u64));
        same(&gpu.get(into), &wide(&want), "uniform");
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn dropout_leaves_out_what_the_cpu_leaves_out() {
    everywhere(|mut gpu, of, kind, draw| {
        for (rows, columns, sequence, probability) in
            [(1, 1, 1, 0.5), (6, 8, 3, 0.1), (10, 7, 5, 0.3), (7, 1030, 3, 0.05), (3, 12, 3, 1.0), (4, 5, 1, 0.0)]
        {
            let n = rows * columns;
            let (mut x, before) = (draw.many(kind, n), draw.many(kind, n));
            x[n / 2] = f64::INFINITY;
            let mut scalars = vec![0.0; SCALAR_COUNT as usize];
            scalars[Scalar::Step as usize] = 17.0;
            let at = cpu::Dropout {
                seed: 0x1234_5678_9abc_def0,
                step: 17,
                first_sample: 5,
                sequence,
                layer: 3,
                site: 2,
                probability,
            };
            let place =
                Dropout { seed: at.seed, first_sample: 5, sequence: sequence as u64, layer: 3, site: 2, probability };
            for accumulate in [false, true] {
                let want = match of {
                    Real::F32 => {
                        let mut out = narrow(&before);
                        cpu::dropout(&pool(), at, columns, &narrow(&x), &mut out, accumulate);
                        wide(&out)
                    }
                    Real::Bf16 => {
                        let bf16 = |x: &[f64]| x.iter().map(|x| half::bf16::from_f64(*x)).collect::<Vec<_>>();
                        let mut out = bf16(&before);
                        cpu::dropout(&pool(), at, columns, &bf16(&x), &mut out, accumulate);
                        out.iter().map(|x| x.to_f64()).collect()
                    }
                };
                let (gx, out, gscalars) = (gpu.put(kind, &x), gpu.put(kind, &before), gpu.put(Kind::F32, &scalars));
                let addresses = [gx, out, gscalars];
                gpu.run(&dropout(of, place, addresses, rows as u64, columns as u64, accumulate));
                same(&gpu.get(out), &want, "out");
            }
        }
    });
}

fn bytes(x: &[u8]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

/// A matrix with what formats stumble over: rows and blocks of zeros, NaN, infinity.
fn matrix(draw: &mut Draw, elements: usize) -> Vec<f32> {
    let mut x: Vec<f32> = (0..elements).map(|i| (draw.next() * [1.0, 3e-5, 40.0][i / 64 % 3]) as f32).collect();
    x[..elements.min(64)].fill(0.0);
    for (at, value) in [(elements / 2, f32::NAN), (elements / 3, f32::INFINITY), (elements / 5, -1e-39)] {
        if at > 64 {
            x[at] = value;
        }
    }
    x
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn coarse_matrices_have_the_bits_of_the_cpu_there_and_back() {
    everywhere(|mut gpu, of, kind, draw| {
        let back = |coarse: cpu::Coarse<&[u8], &[f32]>, columns: usize, elements: usize| match of {
            Real::F32 => {
                let mut to = vec![0.0f32; elements];
                cpu::dequantise(&pool(), coarse, columns, &mut to);
                wide(&to)
            }
            Real::Bf16 => {
                let mut to = vec![half::bf16::ZERO; elements];
                cpu::dequantise(&pool(), coarse, columns, &mut to);
                to.iter().map(|x| x.to_f64()).collect()
            }
        };
        for (rows, columns) in [(1, 1), (1, 129), (3, 40), (7, 5), (70, 264), (300, 65), (2, 9000)] {
            let n = rows * columns;
            let x = matrix(draw, n);
            let from = gpu.put(Kind::F32, &wide(&x));
            let (e, c) = (n as u64, columns as u64);

            let (mut codes, mut scales) = (vec![0; n], vec![0.0; rows]);
            let into = cpu::Coarse::Int8 { codes: &mut codes[..], scales: &mut scales[..] };
            cpu::quantise(&pool(), &x, columns, into);
            let int8 = (gpu.room(Kind::U8, n), gpu.room(Kind::F32, rows));
            let coarse = Coarse::Int8 { codes: int8.0, scales: int8.1 };
            gpu.run(&quantise(from, coarse, e, c));
            same(&gpu.get(int8.0), &bytes(&codes), "int8 codes");
            same(&gpu.get(int8.1), &wide(&scales), "int8 scales");
            let to = gpu.room(kind, n);
            gpu.run(&dequantise(of, coarse, to, e, c));
            let want = back(cpu::Coarse::Int8 { codes: &codes[..], scales: &scales[..] }, columns, n);
            same(&gpu.get(to), &want, "of int8");

            let blocks = n.div_ceil(64);
            let (mut codes, mut scales) = (vec![0; n.div_ceil(2)], vec![0; blocks]);
            let mut groups = vec![0.0; 2 * blocks.div_ceil(256)];
            let into = cpu::Coarse::Nf4 { codes: &mut codes[..], scales: &mut scales[..], groups: &mut groups[..] };
            cpu::quantise(&pool(), &x, columns, into);
            let nf4 = [(Kind::U8, codes.len()), (Kind::U8, blocks), (Kind::F32, groups.len())];
            let nf4 = nf4.map(|(kind, n)| gpu.room(kind, n));
            let coarse = Coarse::Nf4 { codes: nf4[0], scales: nf4[1], groups: nf4[2] };
            gpu.run(&quantise(from, coarse, e, c));
            for (at, (want, what)) in
                [(bytes(&codes), "nf4 codes"), (bytes(&scales), "nf4 scales"), (wide(&groups), "groups")]
                    .into_iter()
                    .enumerate()
            {
                same(&gpu.get(nf4[at]), &want, what);
            }
            let to = gpu.room(kind, n);
            gpu.run(&dequantise(of, coarse, to, e, c));
            let coarse = cpu::Coarse::Nf4 { codes: &codes[..], scales: &scales[..], groups: &groups[..] };
            same(&gpu.get(to), &back(coarse, columns, n), "of nf4");
        }
    });
}

fn update_scalars() -> Vec<f64> {
    let mut scalars = vec![0.0; SCALAR_COUNT as usize];
    for (place, value) in [
        (Scalar::LearningRate, 1e-2),
        (Scalar::BiasCorrection1, 0.271),
        (Scalar::BiasCorrection2, 0.1426),
        (Scalar::ClipFactor, 0.37),
        (Scalar::ClipNorm, 0.8),
    ] {
        scalars[place as usize] = Kind::F32.rounded(value);
    }
    scalars
}

/// As many as fill a table and begin another, of odd sizes; one of more than a chunk.
fn sizes() -> Vec<usize> {
    let mut sizes: Vec<usize> = (1..=66).collect();
    sizes[40] = 8192 + 1025;
    sizes[65] = 2 * 8192;
    sizes
}

/// The numbers of `update_scalars` as the CPU's kernels take them.
fn adamw_step(betas: [f64; 2], eps: f64, decay: f64) -> cpu::AdamW<f32> {
    let scalars = update_scalars();
    let of = |which: Scalar| scalars[which as usize] as f32;
    cpu::AdamW {
        rate: of(Scalar::LearningRate),
        betas,
        eps: eps as f32,
        decay: decay as f32,
        bias_corrections: [of(Scalar::BiasCorrection1), of(Scalar::BiasCorrection2)],
        clip: of(Scalar::ClipFactor),
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn adamw_updates_every_tensor_with_the_bits_of_the_cpu() {
    for shift in [0, 1] {
        let (mut gpu, mut draw) = (Gpu::new(shift), Draw(5));
        let (betas, eps) = ([0.9, 0.95], 1e-8);
        let (mut tensors, mut wants) = (Vec::new(), Vec::new());
        for (i, n) in sizes().into_iter().enumerate() {
            let [mut weight, gradient, mut first] = [(); 3].map(|()| narrow(&draw.many(Kind::F32, n)));
            let mut second: Vec<f32> = draw.many(Kind::F32, n).iter().map(|x| (x * x) as f32).collect();
            let decay = if i % 2 == 0 { 0.1 } else { 0.0 };
            let [w, g, m, v] = [&weight, &gradient, &first, &second].map(|x| gpu.put(Kind::F32, &wide(x)));
            let elements = n as u64;
            let tensor = Updated { weight: w, gradient: g, first: m, second: v, ..Updated::default() };
            tensors.push(Updated { elements, decay, ..tensor });
            let step = adamw_step(betas, eps, decay);
            cpu::adamw(&pool(), step, &mut weight, &gradient, &mut first, &mut second);
            wants.push([weight, first, second]);
        }
        let gscalars = gpu.put(Kind::F32, &update_scalars());
        gpu.run(&adamw(&tensors, gscalars, betas, eps));
        for (tensor, want) in tensors.iter().zip(&wants) {
            same(&gpu.get(tensor.weight), &wide(&want[0]), "weight");
            same(&gpu.get(tensor.first), &wide(&want[1]), "first");
            same(&gpu.get(tensor.second), &wide(&want[2]), "second");
        }
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn adamw_with_moments_of_a_byte_has_the_bits_of_the_cpu() {
    for shift in [0, 1] {
        let (mut gpu, mut draw) = (Gpu::new(shift), Draw(9));
        let (betas, eps) = ([0.9, 0.95], 1e-8);
        let (mut tensors, mut wants) = (Vec::new(), Vec::new());
        for (i, n) in sizes().into_iter().step_by(5).chain([255, 256, 257, 3000]).enumerate() {
            let blocks = n.div_ceil(256);
            let (mut weight, mut gradient) = (narrow(&draw.many(Kind::F32, n)), narrow(&draw.many(Kind::F32, n)));
            let codes = |draw: &mut Draw| (0..n).map(|_| draw.below(256) as u8).collect::<Vec<u8>>();
            let (mut first, mut second) = (codes(&mut draw), codes(&mut draw));
            let mut scales = || narrow(&draw.many(Kind::F32, blocks)).iter().map(|x| x.abs()).collect::<Vec<f32>>();
            let (mut first_scale, mut second_scale) = (scales(), scales());
            match i {
                // The first step: no moments yet, and no gradient in a block.
                0 => {
                    (first, second) = (vec![127; n], vec![0; n]);
                    (first_scale, second_scale) = (vec![0.0; blocks], vec![0.0; blocks]);
                    gradient.fill(0.0);
                }
                1 => gradient[n / 2] = f32::NAN,
                2 => gradient[n / 2] = f32::INFINITY,
                _ => {}
            }
            let decay = if i % 2 == 0 { 0.1 } else { 0.0 };
            let [w, g] = [&weight, &gradient].map(|x| gpu.put(Kind::F32, &wide(x)));
            let [m, v] = [&first, &second].map(|x| gpu.put(Kind::U8, &bytes(x)));
            let [ms, vs] = [&first_scale, &second_scale].map(|x| gpu.put(Kind::F32, &wide(x)));
            let (elements, step) = (n as u64, adamw_step(betas, eps, decay));
            let (first_at, second_at) = (m, v);
            tensors.push(Updated {
                weight: w,
                gradient: g,
                first: first_at,
                second: second_at,
                first_scale: ms,
                second_scale: vs,
                elements,
                decay,
            });
            let state = cpu::State8 {
                first: &mut first,
                first_scale: &mut first_scale,
                second: &mut second,
                second_scale: &mut second_scale,
            };
            cpu::adamw8(&pool(), step, &mut weight, &gradient, state);
            wants.push((weight, first, first_scale, second, second_scale));
        }
        let gscalars = gpu.put(Kind::F32, &update_scalars());
        gpu.run(&adamw8(&tensors, gscalars, betas, eps));
        for (tensor, (weight, first, first_scale, second, second_scale)) in tensors.iter().zip(&wants) {
            same(&gpu.get(tensor.weight), &wide(weight), "weight");
            same(&gpu.get(tensor.first_scale), &wide(first_scale), "first scale");
            same(&gpu.get(tensor.second_scale), &wide(second_scale), "second scale");
            same(&gpu.get(tensor.first), &bytes(first), "first");
            same(&gpu.get(tensor.second), &bytes(second), "second");
        }
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn sgd_updates_every_tensor_with_momentum_or_without() {
    for (shift, momentum) in [(0, 0.0), (1, 0.9), (0, 0.9)] {
        let (mut gpu, mut draw) = (Gpu::new(shift), Draw(6));
        let scalars = update_scalars();
        let (mut tensors, mut wants) = (Vec::new(), Vec::new());
        for n in sizes() {
            let [mut weight, gradient, mut buffer] = [(); 3].map(|()| draw.many(Kind::F32, n));
            let [w, g, m] = [&weight, &gradient, &buffer].map(|x| gpu.put(Kind::F32, x));
            let first = if momentum > 0.0 { m } else { 0 };
            let tensor = Updated { weight: w, gradient: g, first, ..Updated::default() };
            tensors.push(Updated { elements: n as u64, decay: 0.1, ..tensor });
            let step = cpu::Sgd {
                rate: scalars[Scalar::LearningRate as usize],
                momentum,
                decay: 0.1,
                clip: scalars[Scalar::ClipFactor as usize],
            };
            cpu::sgd(&pool(), step, &mut weight, &gradient, (momentum > 0.0).then_some(&mut buffer[..]));
            wants.push((weight, m, buffer));
        }
        let gscalars = gpu.put(Kind::F32, &scalars);
        gpu.run(&sgd(&tensors, gscalars, momentum));
        for (tensor, (weight, buffer_at, buffer)) in tensors.iter().zip(&wants) {
            close(&gpu.get(tensor.weight), weight, Kind::F32, "weight");
            close(&gpu.get(*buffer_at), buffer, Kind::F32, "buffer");
        }
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn the_norm_of_all_tensors_and_its_clip_factor() {
    for shift in [0, 1] {
        let (mut gpu, mut draw) = (Gpu::new(shift), Draw(8));
        let (mut tensors, mut want) = (Vec::new(), 0.25);
        let mut sizes = sizes();
        sizes[3] = 70_003;
        for n in sizes {
            let x = draw.many(Kind::F32, n);
            want += x.iter().map(|x| x * x).sum::<f64>();
            tensors.push((gpu.put(Kind::F32, &x), n as u64));
        }
        let mut before = vec![9.0; METRIC_COUNT as usize];
        before[Metric::NormSquared as usize] = 0.25;
        let (partials, metrics) = (gpu.room(Kind::F64, NORM_PARTIALS as usize), gpu.put(Kind::F64, &before));
        gpu.run(&squared_norm(&tensors, partials, metrics));
        let got = gpu.get(metrics);
        assert!((got[Metric::NormSquared as usize] / want - 1.0).abs() < 1e-6, "{got:?} for {want}");
        assert_eq!(got[Metric::LossSum as usize], 9.0);

        for (clip, norm, factor) in [(0.8, 4.0, 0.8 / (2.0 + 1e-6)), (3.0, 4.0, 1.0), (0.0, 4.0, 1.0)] {
            let mut scalars = update_scalars();
            scalars[Scalar::ClipNorm as usize] = Kind::F32.rounded(clip);
            before[Metric::NormSquared as usize] = norm;
            let (gscalars, metrics) = (gpu.put(Kind::F32, &scalars), gpu.put(Kind::F64, &before));
            gpu.run(&clip_factor(metrics, gscalars));
            let got = gpu.get(gscalars)[Scalar::ClipFactor as usize];
            assert!((got - factor).abs() < 1e-6, "{got} for {factor}");
        }
    }
}

/// Whole Programs, op by op through `ops::launches`, against the CPU's executor in f64: every operand in
/// its place and every layout the same.
mod programs {
    use super::*;
    use plimsoll_core::{RecomputeLevel, Space};
    use plimsoll_device::cpu::executor;
    use plimsoll_device::cuda::kernels::ops::{self, Places};
    use plimsoll_device::device::Device;
    use plimsoll_program::models::config::{ModelConfig, ModelType};
    use plimsoll_program::models::decoder::{
        AdamState, Base, Build, Generation, Method, Optimizer, Source, Training, build,
    };
    use plimsoll_program::{OpKind, Operand, Placement, ProgramSet, TensorId};

    const BATCH: u64 = 2;
    const SEQUENCE: u64 = 37;
    const CHUNK: u64 = 5;
    /// More than any op of so small a model needs.
    const SCRATCH: usize = 1 << 16;

    /// A model with everything: grouped heads, biases, norms of heads, a tied head, stretched positions.
    fn model() -> ModelConfig {
        ModelConfig {
            model_type: ModelType::Qwen3,
            hidden: 20,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 6,
            ffn: 27,
            vocab: 61,
            tied: true,
            norm_eps: 1e-5,
            rope_theta: 1e4,
            rope_scaling: RopeScaling::Linear { factor: 2.0 },
            qkv_bias: true,
            qk_norm: true,
            max_positions: 64,
            bos: None,
            eos: vec![],
            init_std: 0.3,
        }
    }

    fn programs(precision: DType) -> ProgramSet {
        build(&Build {
            config: &model(),
            layers: 0..model().layers,
            precision,
            kernels: Kernels::Cpu { threads: 1 },
            sequence: SEQUENCE,
            micro_batch: BATCH,
            source: Source::Random { seed: 4 },
            method: Method::Full,
            base: Base::Plain,
            streamed_head: false,
            training: Some(Training {
                // An epsilon above the rounding of gradients: else a step magnifies it where they are nearly 0.
                optimizer: Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-3, decay: 0.1, state: AdamState::Full },
                recompute: vec![RecomputeLevel::Nothing, RecomputeLevel::Block],
            }),
            evaluate: true,
            generation: Some(Generation { capacity: 16, chunk: CHUNK }),
            files: true,
        })
    }

    /// The kernels as a device: each slot of each tensor in a buffer of its own.
    struct OnShim {
        gpu: Gpu,
        set: ProgramSet,
        slots: Vec<Vec<Address>>,
        scratch: Address,
    }

    /// The places of an op's operands in one iteration of its block.
    struct Here<'a>(&'a OnShim, i64);

    impl Here<'_> {
        fn slot(&self, operand: &Operand) -> (Address, usize) {
            let slots = &self.0.slots[operand.tensor.0 as usize];
            let slot = operand.slot.at(self.1, 0).rem_euclid(slots.len() as i64);
            (slots[slot as usize], operand.offset.at(self.1, 0) as usize)
        }
    }

    impl Places for Here<'_> {
        fn real(&self) -> Real {
            Real::F32
        }

        fn at(&self, operand: &Operand) -> Address {
            let tensor = self.0.set.tensor(operand.tensor);
            // Programs for the CPU have scratch of the CPU's sizes.
            if tensor.category == plimsoll_core::Category::Workspace {
                return self.0.scratch;
            }
            let (slot, offset) = self.slot(operand);
            slot + offset as u64 * tensor.dtype.bytes()
        }

        fn dtype(&self, operand: &Operand) -> DType {
            self.0.set.tensor(operand.tensor).dtype
        }

        fn index(&self, index: plimsoll_program::Index) -> i64 {
            index.at(self.1, 0)
        }
    }

    impl OnShim {
        fn new(set: ProgramSet) -> OnShim {
            let mut gpu = Gpu::new(0);
            let mut slots = Vec::new();
            for tensor in &set.tensors {
                let kind = match tensor.dtype {
                    DType::F64 => Kind::F64,
                    DType::I32 => Kind::I32,
                    _ => Kind::F32,
                };
                let held = tensor.space != Space::File && tensor.category != plimsoll_core::Category::Workspace;
                let elements = if held { tensor.elements() as usize } else { 0 };
                slots.push((0..tensor.slots).map(|_| gpu.room(kind, elements)).collect());
            }
            let scratch = gpu.room(Kind::F32, SCRATCH);
            OnShim { gpu, set, slots, scratch }
        }

        fn run(&mut self, program: &str) {
            let trace: Vec<(OpKind, i64)> =
                self.set.program(program).unwrap().trace().map(|(op, at)| (op.kind.clone(), at)).collect();
            for (kind, variable) in trace {
                if let OpKind::Product { .. } = kind {
                    self.product(&kind, variable);
                } else {
                    let launches = ops::launches(&kind, &Here(self, variable)).expect("an op of kernels");
                    self.gpu.run(&launches);
                }
            }
        }

        /// What a library does on a GPU; a bias is added by our kernel, as where the library takes none.
        fn product(&mut self, kind: &OpKind, variable: i64) {
            let OpKind::Product { a, b, out, bias, residual, m, n, k, a_transposed, b_transposed, accumulate, .. } =
                kind
            else {
                unreachable!()
            };
            let here = Here(self, variable);
            let part = |operand: &Operand, elements: u64| {
                let (slot, offset) = here.slot(operand);
                self.gpu.get(slot)[offset..offset + elements as usize].to_vec()
            };
            let (a, b, (slot, offset)) = (part(a, m * k), part(b, k * n), here.slot(out));
            let residual = residual.map(|residual| part(&residual, m * n));
            let mut whole = self.gpu.get(slot);
            let mut scratch = scratch(workspace::cpu::product(1, *m, *n, *k));
            let whole_ones = cpu::Product::new(*m as usize, *n as usize, *k as usize, &a, &b);
            let product = cpu::Product {
                b_transposed: *b_transposed,
                residual: residual.as_deref(),
                accumulate: *accumulate,
                ..if *a_transposed { whole_ones.a_transposed() } else { whole_ones }
            };
            cpu::product(&pool(), product, &mut whole[offset..offset + (m * n) as usize], &mut scratch);
            let launches = bias.map(|bias| add_rows(Real::F32, here.at(&bias), 0, here.at(out), *n, *m, *n));
            self.gpu.set(slot, &whole);
            self.gpu.run(launches.as_ref().map_or(&[], |launches| launches));
        }

        fn get(&self, tensor: TensorId, slot: u32) -> Vec<f64> {
            self.gpu.get(self.slots[tensor.0 as usize][slot as usize])
        }

        fn set(&mut self, tensor: TensorId, values: &[f64]) {
            self.gpu.set(self.slots[tensor.0 as usize][0], values);
        }
    }

    /// A placement in which everything has bytes of its own.
    fn side_by_side(set: &ProgramSet) -> Placement {
        let mut next = 0;
        let mut offsets = Vec::new();
        for tensor in &set.tensors {
            let held = tensor.space != Space::File;
            let places = (0..tensor.slots)
                .map(|slot| held.then_some(next + u64::from(slot) * tensor.bytes().next_multiple_of(256)));
            offsets.push(places.collect());
            next += if held { u64::from(tensor.slots) * tensor.bytes().next_multiple_of(256) } else { 0 };
        }
        Placement { offsets, arena_bytes: next, ..Placement::default() }
    }

    /// Both devices, with the same weights.
    struct Both {
        shim: OnShim,
        cpu: Box<dyn Device>,
    }

    impl Both {
        fn new() -> Both {
            let set = programs(DType::F64);
            let placement = side_by_side(&set);
            let cpu = executor::open(set, placement, DType::F64, 1, None).unwrap();
            let mut both = Both { shim: OnShim::new(programs(DType::F32)), cpu };
            both.shim.run("load");
            for id in both.tensors(|tensor| tensor.category == plimsoll_core::Category::Weight) {
                for slot in 0..both.shim.set.tensor(id).slots {
                    let bytes: Vec<u8> = both.shim.get(id, slot).iter().flat_map(|x| x.to_le_bytes()).collect();
                    both.cpu.write(id, slot, &bytes);
                }
            }
            let scalars = both.shim.set.find("scalars").unwrap();
            let mut values = update_scalars();
            values[Scalar::InverseTokens as usize] = 1.0 / 64.0;
            both.put(scalars, &values);
            both
        }

        fn tensors(&self, which: impl Fn(&plimsoll_program::Tensor) -> bool) -> Vec<TensorId> {
            let all = self.shim.set.tensors.iter().enumerate();
            all.filter(|(_, tensor)| which(tensor)).map(|(id, _)| TensorId(id as u32)).collect()
        }

        fn put(&mut self, tensor: TensorId, values: &[f64]) {
            self.shim.set(tensor, values);
            let bytes: Vec<u8> = match self.shim.set.tensor(tensor).dtype {
                DType::I32 => values.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect(),
                _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            };
            self.cpu.write(tensor, 0, &bytes);
        }

        fn put_named(&mut self, name: &str, values: &[f64]) {
            let tensor = self.shim.set.find(name).unwrap();
            self.put(tensor, values);
        }

        fn run(&mut self, program: &str) {
            self.shim.run(program);
            self.cpu.run(program).unwrap();
        }

        /// The largest difference, of the root of the mean square.
        fn compare(&mut self, tensor: TensorId, tolerance: f64) {
            let Tensor { name, slots, .. } = &self.shim.set.tensor(tensor).clone();
            let integers = self.shim.set.tensor(tensor).dtype == DType::I32;
            for slot in 0..*slots {
                let got = self.shim.get(tensor, slot);
                let mut bytes = vec![0; got.len() * if integers { 4 } else { 8 }];
                self.cpu.read(tensor, slot, &mut bytes);
                let want: Vec<f64> = if integers {
                    bytes.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap()).into()).collect()
                } else {
                    bytes.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect()
                };
                let size = (want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    assert!((got - want).abs() <= tolerance * size, "{name}.{slot}[{i}]: {got} for {want}, of {size}");
                }
            }
        }

        fn batch(&mut self, prefix: &str) {
            let (mut draw, rows) = (Draw(12), (BATCH * SEQUENCE) as usize);
            let integers = |x: Vec<i32>| x.into_iter().map(f64::from).collect::<Vec<_>>();
            let starts = documents(&mut draw, BATCH as usize, SEQUENCE as usize);
            let positions = starts.iter().enumerate().map(|(i, start)| (i % SEQUENCE as usize) as i32 - start);
            let mut labels = draw.integers(rows, 61);
            labels[3] = -100;
            self.put_named(&format!("{prefix}tokens"), &integers(draw.integers(rows, 61)));
            self.put_named(&format!("{prefix}positions"), &integers(positions.collect()));
            self.put_named(&format!("{prefix}document_start"), &integers(starts));
            self.put_named(&format!("{prefix}labels"), &integers(labels));
            self.put_named(&format!("{prefix}token_weights"), &vec![1.0; rows]);
        }
    }

    use plimsoll_program::Tensor;

    #[test]
    #[ignore = "needs g++: cargo xtask cuda-check"]
    fn a_training_step_is_that_of_the_cpu() {
        let mut both = Both::new();
        both.batch("train.");
        for program in ["fresh", "begin", "forward", "backward", "norm"] {
            both.run(program);
        }
        for id in both.tensors(|tensor| tensor.category == plimsoll_core::Category::Gradient) {
            both.compare(id, 2e-5);
        }
        for name in ["metrics", "scalars"] {
            both.compare(both.shim.set.find(name).unwrap(), 1e-5);
        }
        both.run("update");
        for id in both.tensors(|tensor| tensor.category == plimsoll_core::Category::Optimizer) {
            both.compare(id, 1e-4);
        }
        for id in both.tensors(|tensor| tensor.category == plimsoll_core::Category::Weight) {
            both.compare(id, 1e-4);
        }
    }

    #[test]
    #[ignore = "needs g++: cargo xtask cuda-check"]
    fn an_evaluation_is_that_of_the_cpu() {
        let mut both = Both::new();
        both.batch("evaluate.");
        both.put_named("metrics", &vec![0.0; METRIC_COUNT as usize]);
        both.run("evaluate");
        both.compare(both.shim.set.find("metrics").unwrap(), 1e-5);
        both.compare(both.shim.set.find("evaluate.correct").unwrap(), 0.0);
    }

    #[test]
    #[ignore = "needs g++: cargo xtask cuda-check"]
    fn a_prompt_and_a_token_are_continued_as_on_the_cpu() {
        let mut both = Both::new();
        for (program, first, rows) in [("prefill", 0, CHUNK), ("decode", CHUNK, 1)] {
            let mut scalars = update_scalars();
            scalars[Scalar::CacheLength as usize] = first as f64;
            scalars[Scalar::LastRow as usize] = (rows - 1) as f64;
            both.put_named("scalars", &scalars);
            let positions: Vec<f64> = (first..first + rows).map(|at| at as f64).collect();
            both.put_named(&format!("{program}.positions"), &positions);
            both.put_named(&format!("{program}.tokens"), &positions.iter().map(|at| 7.0 * at).collect::<Vec<_>>());
            both.run(program);
            both.compare(both.shim.set.find(&format!("{program}.logits")).unwrap(), 2e-5);
        }
    }
}

/// What the shim is there to find, it finds.
mod faults {
    use super::*;

    /// Runs `body` as a kernel on `blocks` of 64 threads with 64 floats of shared memory; says what went wrong.
    fn run(name: &str, blocks: u32, body: &str) -> Result<(), String> {
        let source = format!(
            "extern __shared__ __align__(16) float shared[];\nstruct alignas(16) Four {{ float at[4]; }};\n\
             extern \"C\" __global__ void broken(float* out) {{ {body} }}"
        );
        let library = compile_text(&format!("fault-{name}"), &source, &["broken"]);
        let mut gpu = Gpu::new(0);
        let out = gpu.room(Kind::F32, 64);
        gpu.try_run(&library, "broken", [blocks, 1, 1], 64, 256, &[Argument::Address(out)])?;
        assert!(gpu.get(out).iter().all(|x| x.is_finite()));
        Ok(())
    }

    #[test]
    #[ignore = "needs g++: cargo xtask cuda-check"]
    fn faults_are_found() {
        let turned = "shared[threadIdx.x] = threadIdx.x; __syncthreads(); out[threadIdx.x] = shared[63 - threadIdx.x];";
        let packs = "if (threadIdx.x < 8) *(Four*)(shared + 8 * threadIdx.x + 4) = Four(); __syncthreads();";
        let packs =
            format!("shared[threadIdx.x] = 0; __syncthreads(); {packs} out[threadIdx.x] = shared[threadIdx.x];");
        let copy = "copy_word(shared + threadIdx.x, out + threadIdx.x, false); copies_landed(); __syncthreads();";
        let copy = format!("{copy} out[threadIdx.x] = shared[63 - threadIdx.x];");
        let neighbour = "shared[threadIdx.x] = threadIdx.x; __shfl_xor_sync(0xffffffffu, 1, 1); \
                         out[threadIdx.x] = shared[threadIdx.x ^ 1];";
        let within = neighbour.replace("__shfl_xor_sync(0xffffffffu, 1, 1)", "__syncwarp()");
        for right in [turned, &packs, &copy, &within] {
            assert_eq!(run("none", 1, right), Ok(()), "{right}");
        }
        let twice = turned.replace("out[", "shared[threadIdx.x] = 1; out[");
        for (name, blocks, body, what) in [
            ("no-barrier", 1, turned.replace("__syncthreads();", ""), "just read"),
            ("late-barrier", 1, "if (threadIdx.x < 32) __syncthreads(); out[threadIdx.x] = 0;".into(), "never come"),
            (
                "beyond-shared",
                1,
                turned.replace("shared[threadIdx.x]", "shared[threadIdx.x + 1]"),
                "beyond its shared memory",
            ),
            ("beside", 1, turned.replace("out[threadIdx.x]", "out[threadIdx.x + 1]"), "beside a tensor"),
            (
                "half-a-warp",
                1,
                format!("if (threadIdx.x % 2) __shfl_xor_sync(0xffffffffu, 1, 1); {turned}"),
                "never come",
            ),
            // The order of threads shows none of these.
            ("within-a-warp", 1, neighbour.into(), "no barrier between"),
            (
                "the-same",
                1,
                turned.replace("shared[threadIdx.x] = threadIdx.x", "shared[threadIdx.x / 2] = 0"),
                "no barrier between",
            ),
            ("still-read", 1, twice, "just read"),
            ("between-blocks", 2, turned.into(), "no barrier between"),
            ("no-pack", 1, packs.replace("+ 4) =", "+ 2) ="), "not aligned"),
            (
                "no-wait",
                1,
                copy.replace("copies_landed(); __syncthreads();", "__syncthreads(); copies_landed();"),
                "still comes",
            ),
            (
                "still-comes",
                1,
                copy.replace("copies_landed();", "").replace("out[", "copies_landed(); out["),
                "still comes",
            ),
        ] {
            let found = run(name, blocks, &body).expect_err(name);
            assert!(found.contains(what), "{name}: {found}");
        }
    }
}
