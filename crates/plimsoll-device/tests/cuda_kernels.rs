//! The arithmetic of the CUDA kernels, run on the CPU: the same sources and launches, through `cuda_shim/shim.h`,
//! against the CPU kernels in f64. `cuda_shim/README.md` lists what this cannot show. Needs g++, so `cargo xtask
//! cuda-check` runs these tests, and a plain `cargo test` does not.

mod cuda_shim;
#[path = "cuda_kernels/faults.rs"]
mod faults;
#[path = "cuda_kernels/norms.rs"]
mod norms;
#[path = "cuda_kernels/optimizer.rs"]
mod optimizer;
#[path = "cuda_kernels/programs.rs"]
mod programs;

use cuda_shim::{Gpu, Kind, compile_text};
use plimsoll_core::DType;
use plimsoll_device::cpu::kernels as cpu;
use plimsoll_device::cpu::kernels::Heads;
use plimsoll_device::cpu::pool::Pool;
use plimsoll_device::cuda::architecture::Architecture;
use plimsoll_device::cuda::kernels::launch::*;
use plimsoll_device::cuda::kernels::{Family, Real, Target};
use plimsoll_program::op::{Activation, QkNorm, QueryGrowth, RopeScaling};
use plimsoll_program::scalars::{METRIC_COUNT, Metric, SCALAR_COUNT, Scalar};
use plimsoll_program::workspace::cuda::NORM_PARTIALS;
use plimsoll_program::workspace::{self, Kernels};

/// The GPU and the compiler for which launches are made.
const TARGET: Target = Target { architecture: Architecture { major: 8, minor: 0 }, compiler: 1305 };

/// A small random generator (upper half of a 64-bit LCG), independent of the kernels' own.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as f64 / 2f64.powi(31) - 1.0
    }

    fn below(&mut self, n: usize) -> usize {
        ((self.next() + 1.0) / 2.0 * n as f64) as usize % n
    }

    /// Draws numbers around 1 that `kind` represents.
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

/// Compares results: f32 within 1e-5 of the largest; bf16 with one more rounding.
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

/// Runs a check for both activation types, at addresses with and without 16-byte alignment.
fn for_types_and_alignments(check: impl Fn(Gpu, Real, Kind, &mut Draw)) {
    for real in REALS {
        for shift in [0, 1] {
            check(Gpu::new(shift), real, Kind::of(real), &mut Draw(7 + shift as u64));
        }
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn rope_and_inverse_match_cpu() {
    for_types_and_alignments(|mut gpu, real, kind, draw| {
        for (rows, heads, kv_heads, head_dim) in [(1, 1, 1, 2), (5, 3, 1, 6), (9, 8, 2, 64)] {
            let shape = Heads { heads, kv_heads, head_dim };
            let n = rows * shape.columns() as usize;
            let table = draw.many(Kind::F32, 50 * head_dim as usize);
            let (qkv, positions) = (draw.many(kind, n), draw.integers(rows, 40));
            let (gtable, gpositions) = (gpu.put(Kind::F32, &table), gpu.put_integers(&positions));
            for (inverse, key_shift) in [(false, 0), (true, 0), (false, 10), (true, 10)] {
                let mut want = qkv.clone();
                cpu::rope(&pool(), shape, &table, &positions, key_shift, inverse, &mut want);
                let gqkv = gpu.put(kind, &qkv);
                let operands = [gqkv, gtable, gpositions];
                gpu.run(&rope(real, operands, rows as u64, key_shift, shape, inverse));
                close(&gpu.get(gqkv), &want, kind, "turned");
            }
        }
    });
}

/// The frequencies agree with the CPU in every f32 bit. Cosines and sines are rounded differently, and so is the growth of
/// queries, which the kernels compute in f32.
#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn rope_tables_match_cpu_in_f32() {
    let llama3 = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position_embeddings: 8192,
        truncate: true,
        attention_factor: 1.5,
    };
    let growth = Some(QueryGrowth { beta: 0.5, period: 700 });
    let linear = RopeScaling::Linear { factor: 4.0 };
    for (scaling, growth) in [(RopeScaling::None, None), (linear, growth), (llama3, None), (yarn, growth)] {
        let amplitude = scaling.attention_factor();
        let largest = amplitude * growth.map_or(1.0, |growth| growth.factor(2999));
        let tolerance = if growth.is_some() { 3e-7 } else { 1.3e-7 };
        for (head_dim, theta) in [(6, 1e4), (64, 5e5), (128, 1e6)] {
            let rows = 3000;
            let mut want = vec![0.0f32; rows * head_dim];
            cpu::rope_table(&pool(), head_dim, theta, &scaling, amplitude, growth, &mut want);
            let mut gpu = Gpu::new(0);
            let table = gpu.allocate(Kind::F32, rows * head_dim);
            let size = [rows as u64, head_dim as u64];
            gpu.run(&rope_table(Real::F32, table, size, theta, scaling, amplitude, growth));
            for (i, (got, want)) in gpu.get(table).iter().zip(&want).enumerate() {
                assert!(
                    (got - f64::from(*want)).abs() <= tolerance * largest,
                    "{scaling:?} {head_dim} [{i}]: {got} for {want}"
                );
            }
        }
    }
}

/// Returns documents of random lengths, back to back in each sequence.
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

/// Returns whether these launches use tensor-core kernels, which `cuda_tensor.rs` tests.
fn on_tensor_cores(launches: &[Launch], gpu: &Gpu) -> bool {
    launches[0].unit.family() == Family::TensorAttention && gpu.shift == 0
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn attention_and_gradient_match_cpu() {
    for_types_and_alignments(|mut gpu, real, kind, draw| {
        for (batch, sequence, heads, kv_heads, head_dim) in
            [(1, 1, 1, 1, 6), (2, 33, 2, 1, 36), (1, 70, 4, 2, 64), (1, 150, 2, 1, 64), (1, 130, 1, 1, 128)]
        {
            let shape = Heads { heads, kv_heads, head_dim };
            // One of the shapes also with a cap that many scores exceed.
            let softcap = (sequence == 70).then_some(1.5);
            if on_tensor_cores(&attention(real, TARGET, [0; 4], 1, 1, shape, softcap), &gpu) {
                continue;
            }
            let rows = batch * sequence;
            let (n, wide) = (rows * shape.columns() as usize, rows * shape.query_columns() as usize);
            let qkv: Vec<f64> = draw.many(kind, n).iter().map(|x| kind.rounded(3.0 * x)).collect();
            let starts = if sequence == 150 { vec![0; rows] } else { documents(draw, batch, sequence) };
            let (mut want, mut want_stats) = (vec![0.0; wide], vec![0.0; rows * heads as usize]);
            let room = &mut scratch(workspace::cpu::attention(1, sequence as u64, head_dim));
            cpu::attention(&pool(), shape, softcap, sequence, &qkv, &starts, &mut want, &mut want_stats, room);
            let (gqkv, gstarts) = (gpu.put(kind, &qkv), gpu.put_integers(&starts));
            let (out, stats) = (gpu.allocate(kind, wide), gpu.allocate(Kind::F32, rows * heads as usize));
            let (b, t) = (batch as u64, sequence as u64);
            gpu.run(&attention(real, TARGET, [gqkv, gstarts, out, stats], b, t, shape, softcap));
            close(&gpu.get(out), &want, kind, "out");
            close(&gpu.get(stats), &want_stats, Kind::F32, "stats");

            let (out_values, stats_values, dout) = (gpu.get(out), gpu.get(stats), draw.many(kind, wide));
            let mut want = vec![0.0; n];
            let room = &mut scratch(workspace::cpu::attention_grad(1, t, head_dim));
            cpu::attention_grad(
                &pool(),
                shape,
                softcap,
                sequence,
                &qkv,
                &out_values,
                &dout,
                &stats_values,
                &starts,
                &mut want,
                room,
            );
            let (gdout, dqkv) = (gpu.put(kind, &dout), gpu.allocate(kind, n));
            let room = gpu.allocate(Kind::F32, workspace::cuda::attention_grad(b, t, heads) as usize);
            let inputs = [gqkv, out, gdout, stats, gstarts];
            gpu.run(&attention_grad(real, TARGET, inputs, [dqkv, room], b, t, shape, softcap));
            close(&gpu.get(dqkv), &want, kind, "dqkv");
        }
    });
}

/// Checks copies of the row `first` of caches to the two rows after it.
fn check_copied_rows(gpu: &mut Gpu, real: Real, kind: Kind, first: i32, [keys, values]: [&[f64]; 2], shape: Heads) {
    let (from, to) = ([first, first, 0], [first + 1, first + 2, -1]);
    let (gfrom, gto) = (gpu.put_integers(&from), gpu.put_integers(&to));
    let (gkeys, gvalues) = (gpu.put(kind, keys), gpu.put(kind, values));
    gpu.run(&copy_cache(real, [gfrom, gto], gkeys, gvalues, 3, shape));
    let (mut copied_keys, mut copied_values) = (keys.to_vec(), values.to_vec());
    cpu::copy_cache(shape, &from, &to, &mut copied_keys, &mut copied_values);
    assert!(copied_keys != keys && copied_values != values);
    assert_eq!((gpu.get(gkeys), gpu.get(gvalues)), (copied_keys, copied_values));
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn cached_attention_matches_cpu() {
    for_types_and_alignments(|mut gpu, real, kind, draw| {
        for (slots, before, rows, capacity, heads, kv_heads, head_dim) in [
            (&[0][..], 0, 1, 1, 1, 1, 6),
            (&[0], 70, 1, 90, 4, 2, 64),
            (&[1], 3, 70, 80, 2, 1, 64),
            (&[0], 64, 2, 66, 6, 3, 6),
            // Several parts of the keys: the last is partly filled, begins, or is empty.
            (&[0], 290, 1, 300, 2, 1, 80),
            (&[1], 127, 2, 400, 2, 1, 6),
            (&[0], 128, 1, 400, 2, 2, 128),
            // Several sequences, of unequal lengths.
            (&[2, 0, 1], 126, 1, 300, 2, 1, 64),
            (&[0, 1, 2], 5, 2, 12, 4, 2, 6),
            (&[1, 0], 3, 70, 90, 2, 1, 64),
        ] {
            let shape = Heads { heads, kv_heads, head_dim };
            // Heads of 64 with one and with many new tokens also with a cap.
            let softcap = (before == 3 || before == 126).then_some(0.5);
            if rows > 4 && on_tensor_cores(&attention(real, TARGET, [0; 4], 1, 1, shape, softcap), &gpu) {
                continue;
            }
            let (sequences, width) = (slots.len(), (kv_heads * head_dim) as usize);
            let first = |number: usize| slots[number] * capacity + before + number;
            let places = (0..sequences).flat_map(|number| (0..rows).map(move |row| (first(number) + row) as i32));
            let places: Vec<i32> = places.collect();
            let qkv = draw.many(kind, places.len() * shape.columns() as usize);
            let cache = slots.iter().max().map_or(0, |slot| slot + 1) * capacity * width;
            let (mut keys, mut values) = (draw.many(kind, cache), draw.many(kind, cache));
            let gplaces = gpu.put_integers(&places);
            let gqkv = gpu.put(kind, &qkv);
            let (gkeys, gvalues) = (gpu.put(kind, &keys), gpu.put(kind, &values));
            gpu.run(&append_cache(real, gqkv, gplaces, gkeys, gvalues, places.len() as u64, shape));
            cpu::append_cache(shape, &qkv, &places, &mut keys, &mut values);
            assert_eq!((gpu.get(gkeys), gpu.get(gvalues)), (keys.clone(), values.clone()));

            if capacity > 2 {
                check_copied_rows(&mut gpu, real, kind, (slots[0] * capacity) as i32, [&keys, &values], shape);
            }

            // Without a window, and with windows that hide some parts of the keys, or all but the newest.
            for window in [None, Some(40), Some(1)] {
                let positions: Vec<i32> = places.iter().map(|place| place % capacity as i32).collect();
                let mut first_keys = vec![0; places.len()];
                cpu::shift_positions(&positions, None, window.map_or(-i32::MAX, |window| 1 - window), &mut first_keys);
                let mut want = vec![0.0; places.len() * shape.query_columns() as usize];
                let room = &mut scratch(workspace::cpu::cached_attention(1, capacity as u64, head_dim));
                let (caches, sizes) = ([&keys[..], &values[..]], (sequences, capacity));
                cpu::cached_attention(
                    &pool(),
                    shape,
                    softcap,
                    &qkv,
                    caches,
                    &places,
                    sizes,
                    &first_keys,
                    &mut want,
                    room,
                );
                let out = gpu.allocate(kind, want.len());
                let tokens = NewTokens { sequences: sequences as u64, rows: rows as u64, capacity: capacity as u64 };
                let room = workspace::cuda::cached_attention(tokens.sequences, tokens.rows, tokens.capacity, shape);
                let room = gpu.allocate(Kind::F32, room as usize);
                let first_keys = window.map_or(0, |_| gpu.put_integers(&first_keys));
                let inputs = [gqkv, gkeys, gvalues, gplaces, first_keys];
                gpu.run(&cached_attention(real, TARGET, inputs, out, room, tokens, shape, softcap));
                close(&gpu.get(out), &want, kind, "out");
            }
        }
    });
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn shifted_positions_match_cpu() {
    let positions: Vec<i32> = (0..700).map(|row| row % 300).collect();
    let starts: Vec<i32> = (0..700).map(|row| row / 300 * 300).collect();
    for (documents, shift) in [(Some(&starts), -63), (None, 0), (Some(&starts), -i32::MAX), (None, 300)] {
        let mut want = vec![0; positions.len()];
        cpu::shift_positions(&positions, documents.map(Vec::as_slice), shift, &mut want);
        let mut gpu = Gpu::new(0);
        let (gpositions, out) = (gpu.put_integers(&positions), gpu.put_integers(&vec![-1; positions.len()]));
        let documents = documents.map_or(0, |starts| gpu.put_integers(starts));
        gpu.run(&shift_positions(Real::F32, gpositions, documents, out, positions.len() as u64, shift));
        assert_eq!(gpu.get_integers(out), want, "{shift}");
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn glu_and_gradient_match_cpu() {
    for_types_and_alignments(|mut gpu, real, kind, draw| {
        for (rows, ffn, activation) in [
            (1, 1, Activation::Silu),
            (3, 29, Activation::GeluTanh),
            (2, 1028, Activation::GeluTanh),
            (5, 2056, Activation::Silu),
        ] {
            let gate_up: Vec<f64> = draw.many(kind, 2 * rows * ffn).iter().map(|x| kind.rounded(8.0 * x)).collect();
            let dout = draw.many(kind, rows * ffn);
            let mut want = vec![0.0; rows * ffn];
            cpu::glu(&pool(), activation, ffn, &gate_up, &mut want);
            let (ggate_up, gdout, out) =
                (gpu.put(kind, &gate_up), gpu.put(kind, &dout), gpu.allocate(kind, rows * ffn));
            gpu.run(&glu(real, activation, ggate_up, out, rows as u64, ffn as u64));
            close(&gpu.get(out), &want, kind, "out");

            let mut want = vec![0.0; 2 * rows * ffn];
            cpu::glu_grad(&pool(), activation, ffn, &gate_up, &dout, &mut want);
            let apart = gpu.allocate(kind, 2 * rows * ffn);
            for into in [apart, ggate_up] {
                gpu.run(&glu_grad(real, activation, [ggate_up, gdout, into], rows as u64, ffn as u64));
                close(&gpu.get(into), &want, kind, "dgate_up");
            }
        }
    });
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn blockwise_loss_gradient_and_hits_match_cpu() {
    for_types_and_alignments(|mut gpu, real, kind, draw| {
        for (rows, vocab) in [(1, 3), (5, 33), (3, 1000), (2, 5003)] {
            let mut logits: Vec<f64> = draw.many(kind, rows * vocab).iter().map(|x| kind.rounded(4.0 * x)).collect();
            let mut labels = draw.integers(rows, vocab);
            let mut weights = draw.many(Kind::F32, rows);
            if rows > 2 {
                // The label's logit is one of several largest logits, and may come first or last.
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
                let (mut stats, gstats) = (scratch(4 * rows as u64), gpu.allocate(Kind::F32, 4 * rows));
                let blocks: Vec<(usize, usize)> =
                    (0..vocab).step_by(block).map(|first| (first, block.min(vocab - first))).collect();
                let part = |first: usize, columns: usize| -> Vec<f64> {
                    logits.chunks(vocab).flat_map(|row| &row[first..first + columns]).copied().collect()
                };
                for &(first, columns) in &blocks {
                    let part = part(first, columns);
                    let of_cpu = cpu::LabelledRows { labels: &labels, weights: &weights, first, columns };
                    cpu::softmax_stats(&pool(), of_cpu, &part, &mut stats, first == 0);
                    let places = [gpu.put(kind, &part), glabels, gweights, gstats];
                    gpu.run(&softmax_stats(real, places, rows as u64, first as u64, columns as u64, first == 0));
                }
                let (mut want_correct, mut want_each) = (vec![7; rows], vec![7.0; rows]);
                let outputs = (Some(&mut want_correct[..]), Some(&mut want_each[..]));
                let loss = cpu::cross_entropy(&stats, &labels, &weights, outputs.0, outputs.1);
                let metrics = gpu.put(Kind::F64, &vec![1.5; METRIC_COUNT as usize]);
                let (correct, each) = (gpu.allocate(Kind::I32, rows), gpu.allocate(Kind::F32, rows));
                let inputs = [gstats, glabels, gweights];
                gpu.run(&cross_entropy(real, inputs, metrics, Some(correct), Some(each), rows as u64));
                let got = gpu.get(metrics)[Metric::LossSum as usize] - 1.5;
                assert!((got - loss).abs() <= 1e-5 * loss.abs().max(1.0), "{got} for {loss}");
                assert_eq!(gpu.get_integers(correct), want_correct);
                close(&gpu.get(each), &want_each, Kind::F32, "log-probabilities");
                // Both outputs are optional.
                gpu.run(&cross_entropy(real, inputs, metrics, None, None, rows as u64));
                for &(first, columns) in &blocks {
                    let mut want = part(first, columns);
                    let glogits = gpu.put(kind, &want);
                    let of_cpu = cpu::LabelledRows { labels: &labels, weights: &weights, first, columns };
                    // The largest logits reach this cap.
                    let softcap = (vocab == 1000).then_some(8.0);
                    cpu::softmax_grad(&pool(), of_cpu, &mut want, &stats, 0.125, softcap);
                    let places = [glogits, glabels, gweights, gstats, gscalars];
                    gpu.run(&softmax_grad(real, places, rows as u64, first as u64, columns as u64, softcap));
                    close(&gpu.get(glogits), &want, kind, "gradient");
                }
            }
        }
    });
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn embedding_and_gradient_match_cpu() {
    for_types_and_alignments(|mut gpu, real, kind, draw| {
        for (rows, hidden, vocab) in [
            (1, 1, 1),
            (40, 12, 9),
            (300, 5, 7),
            (9, 1100, 4),
            (300, 8, 200),
            // Several rows per sorting thread, several rows per portion, and sums over many portions.
            (1300, 4, 3),
            (270, 3, 70_000),
            (70, 1, 1),
        ] {
            let mut tokens = draw.integers(rows, vocab);
            if rows == 1300 {
                // Most tokens are padding.
                (0..rows).filter(|row| row % 5 > 0).for_each(|row| tokens[row] = 1);
            }
            let (table, dout) = (draw.many(kind, vocab * hidden), draw.many(kind, rows * hidden));
            let mut want = vec![0.0; rows * hidden];
            // A factor as of Gemma, and none.
            let scale = if rows > 100 { 1.0 } else { 1.5 };
            cpu::embed(&pool(), &tokens, &table, hidden, scale, &mut want);
            let (gtokens, gtable) = (gpu.put_integers(&tokens), gpu.put(kind, &table));
            let out = gpu.allocate(kind, rows * hidden);
            let (n, d, v) = (rows as u64, hidden as u64, vocab as u64);
            gpu.run(&embed(real, [gtokens, gtable, out], n, d, v, scale));
            close(&gpu.get(out), &want, kind, "out");

            let (gdout, gdtable) = (gpu.put(kind, &dout), gpu.put(Kind::F32, &table));
            let mut want = table;
            cpu::embed_grad(&pool(), &tokens, &dout, hidden, scale, &mut want);
            let room = gpu.allocate(Kind::F32, workspace::cuda::embed_grad(n, d) as usize);
            gpu.run(&embed_grad(real, [gtokens, gdout, gdtable, room], n, d, v, scale));
            close(&gpu.get(gdtable), &want, Kind::F32, "dtable");
        }
    });
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn tokens_outside_vocabulary_get_no_gradient() {
    let mut gpu = Gpu::new(0);
    let tokens: Vec<i32> = (0..40).map(|row| [2, -1, 16, 0][row % 4]).collect();
    let (gtokens, dout) = (gpu.put_integers(&tokens), gpu.put(Kind::F32, &[1.0; 40]));
    let (dtable, room) =
        (gpu.put(Kind::F32, &[0.0; 16]), gpu.allocate(Kind::F32, workspace::cuda::embed_grad(40, 1) as usize));
    gpu.run(&embed_grad(Real::F32, [gtokens, dout, dtable, room], 40, 1, 16, 1.0));
    let want: Vec<f64> = (0..16).map(|token| if token == 0 || token == 2 { 10.0 } else { 0.0 }).collect();
    assert_eq!(gpu.get(dtable), want);
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn elementwise_and_row_sums_match_cpu() {
    for_types_and_alignments(|mut gpu, real, kind, draw| {
        for (rows, columns) in [(1, 1), (3, 7), (9, 1030), (1100, 12), (24, 260), (5, 2056)] {
            let n = rows * columns;
            let (x, y, bias) = (draw.many(kind, n), draw.many(kind, n), draw.many(kind, columns));
            let (gx, gy, gbias) = (gpu.put(kind, &x), gpu.put(kind, &y), gpu.put(kind, &bias));
            gpu.run(&add(real, gx, gy, n as u64));
            close(&gpu.get(gy), &sum(&x, &y), kind, "sum");

            let (gcapped, mut want) = (gpu.put(kind, &x), x.clone());
            gpu.run(&soft_cap(real, gcapped, n as u64, 0.7));
            cpu::soft_cap(&pool(), 0.7, &mut want);
            close(&gpu.get(gcapped), &want, kind, "capped");

            let (gy, r, c) = (gpu.put(kind, &y), rows as u64, columns as u64);
            gpu.run(&add_rows(real, gbias, 0, gy, c, r, c));
            let repeated: Vec<f64> = bias.iter().cycle().take(n).copied().collect();
            close(&gpu.get(gy), &sum(&y, &repeated), kind, "with bias");

            // Adds into some columns of a wider matrix; the other columns must not change.
            for beside in [3, 16] {
                let stride = columns + beside;
                let wide = draw.many(kind, rows * stride);
                let gwide = gpu.put(kind, &wide);
                gpu.run(&add_rows(real, gx, c, gwide, stride as u64, r, c));
                let sum_at = |(at, y): (usize, &f64)| match at % stride {
                    column if column < columns => y + x[at / stride * columns + column],
                    _ => *y,
                };
                let want: Vec<f64> = wide.iter().enumerate().map(sum_at).collect();
                close(&gpu.get(gwide), &want, kind, "with residual");
            }

            let (sums, mut want) = (gpu.put(Kind::F32, &bias), bias);
            let room = &mut scratch(workspace::cpu::sum_rows(rows as u64, columns as u64));
            cpu::sum_rows(&pool(), rows, columns, &x, &mut want, room);
            let room = gpu.allocate(Kind::F32, workspace::cuda::sum_rows(rows as u64, columns as u64) as usize);
            gpu.run(&sum_rows(real, gx, sums, room, rows as u64, columns as u64));
            close(&gpu.get(sums), &want, Kind::F32, "sum of rows");

            let row = rows - 1;
            let mut scalars = vec![0.0; SCALAR_COUNT as usize];
            scalars[Scalar::LastRow as usize] = row as f64;
            let (gscalars, out) = (gpu.put(Kind::F32, &scalars), gpu.allocate(kind, columns));
            gpu.run(&pick_row(real, gx, gscalars, out, columns as u64));
            assert_eq!(gpu.get(out), x[row * columns..]);
        }
    });
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn rank_sums_follow_rank_order() {
    let mut draw = Draw(3);
    let mut gpu = Gpu::new(0);
    for (kind, dtype) in [(Kind::F32, DType::F32), (Kind::F64, DType::F64)] {
        for (ranks, elements, stride) in [(2, 1, 64), (3, 1025, 1088), (5, 300, 320)] {
            // Sums need rounding, so that another order gives other bits.
            let of = |draw: &mut Draw| draw.many(kind, elements).iter().map(|x| kind.rounded(x * 1e6 + x)).collect();
            let parts: Vec<Vec<f64>> = (0..ranks).map(|_| of(&mut draw)).collect();
            let before = draw.many(kind, elements);
            for (rank, adds) in (0..ranks).flat_map(|rank| [(rank, false), (rank, true)]) {
                let sum = |at: usize| (1..ranks).fold(parts[0][at], |sum, other| kind.rounded(sum + parts[other][at]));
                let sum_at = |at: usize| if adds { kind.rounded(before[at] + sum(at)) } else { sum(at) };
                let mut others = vec![0.0; stride * (ranks - 1)];
                for (number, other) in (0..ranks).filter(|other| *other != rank).enumerate() {
                    others[number * stride..][..elements].copy_from_slice(&parts[other]);
                }
                let (own, others, into) = (gpu.put(kind, &parts[rank]), gpu.put(kind, &others), gpu.put(kind, &before));
                let at = |into: u64| if adds { into } else { own };
                let stands = RankParts { own, others, stride: stride as u64, rank: rank as u32, ranks: ranks as u32 };
                // Without accumulation, the own part already lies in the output.
                gpu.run(&sum_ranks(dtype, stands, at(into), elements as u64, adds).unwrap());
                let want: Vec<f64> = (0..elements).map(sum_at).collect();
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
    // Edges of each type: ties, the last normal numbers, subnormals, overflow.
    let mut values = vec![0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 65_504.0, 65_519.9, 65_520.0, 1e-45];
    for scale in [1.0, 2f64.powi(-14), 2f64.powi(-24), 2f64.powi(-25), 2f64.powi(-126), 65_504.0, 3.4e38] {
        values.extend((0..400).map(|_| scale * (1.0 + draw.next())));
        values.extend((0..64).map(|i| scale * (1.0 + f64::from(i) / 512.0)));
        values.extend((0..64).map(|i| scale * (1.0 + f64::from(i) / 4096.0 + 1e-12)));
    }
    // Every 16-bit pattern.
    for bits in 0..=u16::MAX {
        values.push(half::f16::from_bits(bits).to_f64());
        values.push(half::bf16::from_bits(bits).to_f64());
    }
    for (from_type, from) in types {
        let given: Vec<f64> = values.iter().map(|x| from.rounded(*x)).collect();
        for (to_type, to) in types {
            let mut gpu = Gpu::new(1);
            let (source, target) = (gpu.put(from, &given), gpu.allocate(to, given.len()));
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
fn fills_write_every_element() {
    let kinds = [(DType::F32, Kind::F32), (DType::F64, Kind::F64), (DType::Bf16, Kind::Bf16), (DType::U8, Kind::U8)];
    for (dtype, kind) in kinds {
        for (elements, shift) in [1, 255, 5000, 20_001].into_iter().flat_map(|n| [(n, 0), (n, 1)]) {
            let mut gpu = Gpu::new(shift);
            let (into, value) = (gpu.allocate(kind, elements), if kind == Kind::U8 { 127.0 } else { 0.3 });
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

/// Compares bits; any NaN equals any other.
#[track_caller]
fn same(got: &[f64], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{what}[{i}]: {got:e} for {want:e}");
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn random_numbers_match_cpu() {
    for (first, elements) in [(0, 1), (0, 5000), (3, 2), (5, 1031), (1 << 40, 17)] {
        let mut gpu = Gpu::new(1);
        let (mut want, into) = (vec![0.0f32; elements], gpu.allocate(Kind::F32, elements));
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
fn dropout_matches_cpu() {
    for_types_and_alignments(|mut gpu, real, kind, draw| {
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
                let want = match real {
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
                gpu.run(&dropout(real, place, addresses, rows as u64, columns as u64, accumulate));
                same(&gpu.get(out), &want, "out");
            }
        }
    });
}

fn bytes(x: &[u8]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

/// Returns a matrix with difficult values for quantized formats: rows and blocks of zeros, NaN, infinity.
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
fn quantization_round_trip_matches_cpu_bits() {
    for_types_and_alignments(|mut gpu, real, kind, draw| {
        let back = |quantized: cpu::QuantizedData<&[u8], &[f32]>, columns: usize, elements: usize| match real {
            Real::F32 => {
                let mut to = vec![0.0f32; elements];
                cpu::dequantize(&pool(), quantized, columns, &mut to);
                wide(&to)
            }
            Real::Bf16 => {
                let mut to = vec![half::bf16::ZERO; elements];
                cpu::dequantize(&pool(), quantized, columns, &mut to);
                to.iter().map(|x| x.to_f64()).collect()
            }
        };
        for (rows, columns) in [(1, 1), (1, 129), (3, 40), (7, 5), (70, 264), (300, 65), (2, 9000)] {
            let n = rows * columns;
            let x = matrix(draw, n);
            let from = gpu.put(Kind::F32, &wide(&x));
            let (e, c) = (n as u64, columns as u64);

            let (mut codes, mut scales) = (vec![0; n], vec![0.0; rows]);
            let into = cpu::QuantizedData::Int8 { codes: &mut codes[..], scales: &mut scales[..] };
            cpu::quantize(&pool(), &x, columns, into);
            let int8 = (gpu.allocate(Kind::U8, n), gpu.allocate(Kind::F32, rows));
            let quantized = QuantizedAddresses::Int8 { codes: int8.0, scales: int8.1 };
            gpu.run(&quantize(from, quantized, e, c));
            same(&gpu.get(int8.0), &bytes(&codes), "int8 codes");
            same(&gpu.get(int8.1), &wide(&scales), "int8 scales");
            let to = gpu.allocate(kind, n);
            gpu.run(&dequantize(real, quantized, to, e, c));
            let want = back(cpu::QuantizedData::Int8 { codes: &codes[..], scales: &scales[..] }, columns, n);
            same(&gpu.get(to), &want, "of int8");

            let blocks = n.div_ceil(64);
            let (mut codes, mut scales) = (vec![0; n.div_ceil(2)], vec![0; blocks]);
            let mut groups = vec![0.0; 2 * blocks.div_ceil(256)];
            let into =
                cpu::QuantizedData::Nf4 { codes: &mut codes[..], scales: &mut scales[..], groups: &mut groups[..] };
            cpu::quantize(&pool(), &x, columns, into);
            let nf4 = [(Kind::U8, codes.len()), (Kind::U8, blocks), (Kind::F32, groups.len())];
            let nf4 = nf4.map(|(kind, n)| gpu.allocate(kind, n));
            let quantized = QuantizedAddresses::Nf4 { codes: nf4[0], scales: nf4[1], groups: nf4[2] };
            gpu.run(&quantize(from, quantized, e, c));
            for (at, (want, what)) in
                [(bytes(&codes), "nf4 codes"), (bytes(&scales), "nf4 scales"), (wide(&groups), "groups")]
                    .into_iter()
                    .enumerate()
            {
                same(&gpu.get(nf4[at]), &want, what);
            }
            let to = gpu.allocate(kind, n);
            gpu.run(&dequantize(real, quantized, to, e, c));
            let quantized = cpu::QuantizedData::Nf4 { codes: &codes[..], scales: &scales[..], groups: &groups[..] };
            same(&gpu.get(to), &back(quantized, columns, n), "of nf4");
        }
    });
}
