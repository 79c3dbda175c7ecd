//! Benchmark of the CPU kernels on the shapes of one training step of a small decoder: 8 × 256 tokens, 6 layers, hidden 384,
//! 6 heads of 64, ffn 1024, vocabulary 8192. Prints milliseconds per call and per step, and GFLOP/s or GB/s.
//!
//! With one thread it measures CPU time, which other work on the machine disturbs less than wall time.
//!
//! cargo bench -p plimsoll-device --bench kernels -- [THREADS] [f32 or bf16] [NAME PREFIX]

use half::bf16;

use plimsoll_device::cpu::kernels::*;
use plimsoll_device::cpu::pool::Pool;
use plimsoll_program::op::RopeScaling;
use plimsoll_program::workspace::{self, Kernels};
use std::time::{Duration, Instant};

const BATCH: usize = 8;
const SEQUENCE: usize = 256;
const ROWS: usize = BATCH * SEQUENCE;
const LAYERS: usize = 6;
const HIDDEN: usize = 384;
const FFN: usize = 1024;
const VOCAB: usize = 8192;
const SHAPE: Heads = Heads { heads: 6, kv_heads: 6, head_dim: 64 };
const QKV: usize = 3 * HIDDEN;
const PARAMETERS: usize = 2 * VOCAB * HIDDEN + LAYERS * HIDDEN * (QKV + HIDDEN + 3 * FFN);

/// Work of an op in one call, for its rate.
enum Work {
    Flops(usize),
    Bytes(usize),
}

struct Bench {
    pool: Pool,
    only: Option<String>,
    products: f64,
    others: f64,
}

impl Bench {
    /// Returns the elapsed time: CPU time of this process with one thread, otherwise wall time.
    fn clock(threads: usize, begin: Instant) -> Duration {
        if threads > 1 {
            return begin.elapsed();
        }
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call fills `time`, a valid timespec.
        unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    /// Times `op`, called `per_step` times in a step. The fastest call within a third of a second counts, because other work on the
    /// machine only adds time.
    fn time(&mut self, name: &str, per_step: usize, work: Work, mut op: impl FnMut(&Pool) + Send) {
        if self.only.as_ref().is_some_and(|only| !name.starts_with(only)) {
            return;
        }
        let pool = &self.pool;
        let seconds = pool.enter(move || {
            op(pool);
            let (begin, mut best, mut calls) = (Instant::now(), f64::INFINITY, 0);
            while calls < 5 || begin.elapsed().as_secs_f64() < 0.3 {
                let start = Bench::clock(pool.threads(), begin);
                op(pool);
                best = best.min((Bench::clock(pool.threads(), begin) - start).as_secs_f64());
                calls += 1;
            }
            best
        });
        let step = seconds * per_step as f64 * 1e3;
        let rate = match work {
            Work::Flops(flops) => format!("{:7.1} GFLOP/s", flops as f64 / seconds / 1e9),
            Work::Bytes(bytes) => format!("{:7.1} GB/s", bytes as f64 / seconds / 1e9),
        };
        println!("{name:<34} {:9.3} ms x {per_step:<2} = {step:8.2} ms   {rate}", seconds * 1e3);
        *(if name.starts_with("product") { &mut self.products } else { &mut self.others }) += step;
    }
}

/// Returns numbers between -1 and 1.
fn numbers<T: Real>(n: usize) -> Vec<T> {
    (0..n).map(|i| T::from_f64(f64::from((i as u32).wrapping_mul(2_654_435_769) as i32) / 2f64.powi(31))).collect()
}

fn zeros<T: Real>(n: usize) -> Vec<T> {
    vec![T::ZERO; n]
}

fn main() {
    let arguments: Vec<String> = std::env::args().filter(|argument| argument != "--bench").collect();
    let argument = |at: usize| arguments.get(at).cloned();
    let threads = argument(1).and_then(|text| text.parse().ok()).unwrap_or(2);
    println!("{threads} threads, {:?} vectors", simd_level());
    let mut bench = Bench { pool: Pool::new(threads).unwrap(), only: argument(3), products: 0.0, others: 0.0 };
    match argument(2).as_deref() {
        None | Some("f32") => run_all::<f32>(&mut bench, threads as u64),
        Some("bf16") => run_all::<bf16>(&mut bench, threads as u64),
        Some(other) => panic!("unknown type {other}: expected f32 or bf16"),
    }
    println!("products {:.0} ms, others {:.0} ms a step", bench.products, bench.others);
}

fn run_all<T: Multiply<Wide = f32>>(bench: &mut Bench, lanes: u64) {
    products::<T>(bench, lanes);
    decode::<T>(bench, lanes);
    embedding_and_norms::<T>(bench);
    attention_ops::<T>(bench, lanes);
    long_attention::<T>(bench, lanes);
    glu_and_loss::<T>(bench);
    update::<T>(bench);
    quantized::<T>(bench);
}

fn products<T: Multiply<Wide = f32>>(bench: &mut Bench, lanes: u64) {
    let forward = |name, n, k| (name, ROWS, n, k, false, true);
    let weights = |name, m, n| (name, m, n, ROWS, true, false);
    let inputs = |name, n, k| (name, ROWS, n, k, false, false);
    for (name, per_step, (pass, m, n, k, a_transposed, b_transposed)) in [
        ("qkv", LAYERS, forward("forward", QKV, HIDDEN)),
        ("qkv", LAYERS, inputs("inputs", HIDDEN, QKV)),
        ("qkv", LAYERS, weights("weights", QKV, HIDDEN)),
        ("output", LAYERS, forward("forward", HIDDEN, HIDDEN)),
        ("output", LAYERS, inputs("inputs", HIDDEN, HIDDEN)),
        ("output", LAYERS, weights("weights", HIDDEN, HIDDEN)),
        ("gate_up", LAYERS, forward("forward", 2 * FFN, HIDDEN)),
        ("gate_up", LAYERS, inputs("inputs", HIDDEN, 2 * FFN)),
        ("gate_up", LAYERS, weights("weights", 2 * FFN, HIDDEN)),
        ("down", LAYERS, forward("forward", HIDDEN, FFN)),
        ("down", LAYERS, inputs("inputs", FFN, HIDDEN)),
        ("down", LAYERS, weights("weights", HIDDEN, FFN)),
        ("head", 1, forward("forward", VOCAB, HIDDEN)),
        ("head", 1, inputs("inputs", HIDDEN, VOCAB)),
        ("head", 1, weights("weights", VOCAB, HIDDEN)),
    ] {
        let (a, b) = (numbers::<T>(m * k), numbers::<T>(k * n));
        let (mut out, mut gradient) = (zeros::<T>(m * n), zeros::<f32>(m * n));
        let size = Kernels::Cpu { threads: lanes }.product_workspace(T::DTYPE, m as u64, n as u64, k as u64);
        let mut scratch = vec![0.0; size as usize];
        let label = format!("product {name} {pass} {m}x{n}x{k}");
        bench.time(&label, per_step, Work::Flops(2 * m * n * k), |pool| {
            // Weight gradients accumulate over micro-batches.
            let accumulate = a_transposed;
            let mut p = Product { accumulate, ..Product::new(m, n, k, &a, &b) };
            p = if a_transposed { p.a_transposed() } else { p };
            p = if b_transposed { p.b_transposed() } else { p };
            if accumulate {
                product(pool, p, &mut gradient, &mut scratch);
            } else {
                product(pool, p, &mut out, &mut scratch);
            }
        });
    }
}

fn decode<T: Multiply<Wide = f32>>(bench: &mut Bench, lanes: u64) {
    for (m, n, k) in [
        (1, VOCAB, HIDDEN),
        (1, 4096, 4096),
        (4, 4096, 4096),
        (8, 4096, 4096),
        (16, 4096, 4096),
        (64, 4096, 4096),
        (64, 4096, 768),
        (64, 768, 2048),
        (8, 768, 2048),
        (16, 768, 2048),
        (16, 2048, 384),
        (16, 384, 1024),
        (16, 8192, 384),
    ] {
        let (a, b) = (numbers::<T>(m * k), numbers::<T>(k * n));
        let mut out = zeros::<T>(m * n);
        let size = Kernels::Cpu { threads: lanes }.product_workspace(T::DTYPE, m as u64, n as u64, k as u64);
        let mut scratch = vec![0.0; size as usize];
        bench.time(&format!("decode {m}x{n}x{k}"), 0, Work::Bytes(size_of::<T>() * n * k), |pool| {
            product(pool, Product::new(m, n, k, &a, &b).b_transposed(), &mut out, &mut scratch);
        });
    }
}

/// Returns a token of the vocabulary for each row.
fn row_tokens() -> Vec<i32> {
    (0..ROWS).map(|i| (i * 37 % VOCAB) as i32).collect()
}

fn embedding_and_norms<T: Real<Wide = f32>>(bench: &mut Bench) {
    let tokens = row_tokens();
    let weight = numbers::<T>(HIDDEN);
    let (x, dout) = (numbers::<T>(ROWS * HIDDEN), numbers::<T>(ROWS * HIDDEN));
    let (mut out, mut rstd) = (zeros::<T>(ROWS * HIDDEN), vec![0.0; ROWS]);
    let row_bytes = ROWS * HIDDEN * size_of::<T>();
    let table = numbers::<T>(VOCAB * HIDDEN);
    bench.time("embed", 1, Work::Bytes(2 * row_bytes), |pool| embed(pool, &tokens, &table, HIDDEN, 1.0, &mut out));
    let mut dtable = zeros::<f32>(VOCAB * HIDDEN);
    bench.time("embed_grad", 1, Work::Bytes(row_bytes + 8 * ROWS * HIDDEN), |pool| {
        embed_grad(pool, &tokens, &dout, HIDDEN, 1.0, &mut dtable)
    });
    let factor = NormWeight { values: &weight[..], offset: 0.0 };
    bench.time("rms_norm", 2 * LAYERS + 1, Work::Bytes(2 * row_bytes), |pool| {
        rms_norm(pool, &x, factor, None, 1e-5, &mut out, &mut rstd)
    });
    let mut dweight = vec![0.0; HIDDEN];
    let mut scratch = vec![0.0; workspace::cpu::sum_rows(ROWS as u64, HIDDEN as u64) as usize];
    bench.time("rms_norm_grad", 2 * LAYERS + 1, Work::Bytes(4 * row_bytes), |pool| {
        rms_norm_grad(pool, &x, factor, &rstd, &dout, &mut out, Some(&mut dweight), true, &mut scratch)
    });
    bench.time("add", 0, Work::Bytes(3 * row_bytes), |pool| add(pool, &x, &mut out));
}

fn attention_ops<T: Multiply<Wide = f32>>(bench: &mut Bench, lanes: u64) {
    let positions: Vec<i32> = (0..ROWS).map(|i| (i % SEQUENCE) as i32).collect();
    let starts = vec![0; ROWS];
    let kernels = Kernels::Cpu { threads: lanes };
    let row_bytes = ROWS * HIDDEN * size_of::<T>();
    let (mut out, dout) = (zeros::<T>(ROWS * HIDDEN), numbers::<T>(ROWS * HIDDEN));
    let mut qkv = numbers::<T>(ROWS * QKV);
    let mut dqkv = zeros::<T>(ROWS * QKV);
    let (wq, wk) = (numbers::<T>(64), numbers::<T>(64));
    let mut heads = vec![0.0; ROWS * 12];
    let weights = [&wq, &wk].map(|values| NormWeight { values: &values[..], offset: 0.0 });
    bench.time("head_norm", 0, Work::Bytes(6 * row_bytes), |pool| {
        head_norm(pool, SHAPE, &qkv, weights, 1e-5, &mut dqkv, &mut heads)
    });
    let (mut dwq, mut dwk) = (vec![0.0; 64], vec![0.0; 64]);
    let mut scratch = vec![0.0; workspace::cpu::sum_rows(ROWS as u64, 2 * 64) as usize];
    bench.time("head_norm_grad", 0, Work::Bytes(6 * row_bytes), |pool| {
        head_norm_grad(pool, SHAPE, &qkv, weights, &heads, &mut dqkv, Some([&mut dwq, &mut dwk]), &mut scratch)
    });
    let mut table = vec![0.0; SEQUENCE * 64];
    rope_table(&bench.pool, 64, 1e4, &RopeScaling::None, 1.0, None, &mut table);
    bench.time("rope", 2 * LAYERS, Work::Bytes(4 * row_bytes), |pool| {
        rope(pool, SHAPE, &table, &positions, 0, false, &mut qkv)
    });
    let mut stats = vec![0.0; ROWS * 6];
    let mut scratch = vec![0.0; kernels.attention_grad_workspace(T::DTYPE, 1, SEQUENCE as u64, SHAPE) as usize];
    let scores = BATCH * 6 * SEQUENCE * (SEQUENCE + 1) / 2;
    bench.time("attention", LAYERS, Work::Flops(4 * 64 * scores), |pool| {
        attention(pool, SHAPE, None, SEQUENCE, &qkv, &starts, &mut out, &mut stats, &mut scratch)
    });
    bench.time("attention_grad", LAYERS, Work::Flops(10 * 64 * scores), |pool| {
        attention_grad(pool, SHAPE, None, SEQUENCE, &qkv, &out, &dout, &stats, &starts, &mut dqkv, &mut scratch)
    });
}

/// Times attention over 2048 positions with wide heads, and one query on a cache of 2047.
fn long_attention<T: Multiply<Wide = f32>>(bench: &mut Bench, lanes: u64) {
    let (long, shape) = (2048, Heads { heads: 8, kv_heads: 2, head_dim: 128 });
    let qkv = numbers::<T>(long * 12 * 128);
    let (mut out, mut stats) = (zeros::<T>(long * 1024), vec![0.0; long * 8]);
    let mut dqkv = zeros::<T>(qkv.len());
    let kernels = Kernels::Cpu { threads: lanes };
    let mut scratch = vec![0.0; kernels.attention_grad_workspace(T::DTYPE, 1, long as u64, shape) as usize];
    let starts = vec![0; long];
    let scores = 8 * long * (long + 1) / 2;
    bench.time("long attention 2048 of 128, 8 on 2", 0, Work::Flops(4 * 128 * scores), |pool| {
        attention(pool, shape, None, long, &qkv, &starts, &mut out, &mut stats, &mut scratch)
    });
    let dout = numbers::<T>(out.len());
    bench.time("long attention_grad", 0, Work::Flops(10 * 128 * scores), |pool| {
        attention_grad(pool, shape, None, long, &qkv, &out, &dout, &stats, &starts, &mut dqkv, &mut scratch)
    });
    let (keys, values) = (numbers::<T>(long * 256), numbers::<T>(long * 256));
    bench.time("long cached_attention 1 on 2047", 0, Work::Bytes(2 * size_of::<T>() * long * 256), |pool| {
        cached_attention(
            pool,
            shape,
            None,
            &qkv[..1536],
            [&keys, &values],
            &[2047],
            (1, long),
            &[],
            &mut out[..1024],
            &mut scratch,
        )
    });
}

fn glu_and_loss<T: Real<Wide = f32>>(bench: &mut Bench) {
    let (tokens, ones) = (row_tokens(), vec![1.0; ROWS]);
    let size = size_of::<T>();
    let (gate_up, dffn) = (numbers::<T>(ROWS * 2 * FFN), numbers::<T>(ROWS * FFN));
    let mut gated = zeros::<T>(ROWS * FFN);
    bench.time("glu", LAYERS, Work::Bytes(3 * size * ROWS * FFN), |pool| {
        glu(pool, Activation::Silu, FFN, &gate_up, &mut gated)
    });
    let mut dgate_up = gate_up.clone();
    bench.time("glu_grad", LAYERS, Work::Bytes(5 * size * ROWS * FFN), |pool| {
        glu_grad(pool, Activation::Silu, FFN, &gate_up, &dffn, &mut dgate_up)
    });

    let original = numbers::<T>(ROWS * VOCAB);
    let mut logits = original.clone();
    let mut stats = vec![0.0; 4 * ROWS];
    let labelled = LabelledRows { labels: &tokens, weights: &ones, first: 0, columns: VOCAB };
    bench.time("softmax_stats", 1, Work::Bytes(size * ROWS * VOCAB), |pool| {
        softmax_stats(pool, labelled, &logits, &mut stats, true);
    });
    bench.time("softmax_grad", 1, Work::Bytes(2 * size * ROWS * VOCAB), |pool| {
        softmax_grad(pool, labelled, &mut logits, &stats, 1.0, None);
    });
}

fn update<T: Real<Wide = f32>>(bench: &mut Bench) {
    let mut weight = numbers::<f32>(PARAMETERS);
    let gradient = numbers::<f32>(PARAMETERS);
    let (mut first, mut second) = (vec![0.0; PARAMETERS], vec![0.0; PARAMETERS]);
    bench.time("squared_norm", 1, Work::Bytes(4 * PARAMETERS), |pool| {
        std::hint::black_box(squared_norm(pool, &gradient));
    });
    let step = AdamW { rate: 1e-4, betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, bias_corrections: [0.5, 0.5], clip: 0.9 };
    bench.time("adamw", 1, Work::Bytes(28 * PARAMETERS), |pool| {
        adamw(pool, step, &mut weight, &gradient, &mut first, &mut second)
    });
    let mut narrow = zeros::<T>(PARAMETERS);
    let masters = usize::from(!T::IS_WIDE);
    bench.time("round (masters)", masters, Work::Bytes((4 + size_of::<T>()) * PARAMETERS), |pool| {
        round(pool, &weight, &mut narrow)
    });
    bench.time("fill (gradients)", 1, Work::Bytes(4 * PARAMETERS), |pool| fill(pool, 0.0, &mut first));
    bench.time("copy", 0, Work::Bytes(8 * PARAMETERS), |pool| copy(pool, &gradient, &mut first));
    bench.time("normal", 0, Work::Bytes(4 * PARAMETERS), |pool| normal(pool, 1, 1, 0, 0.02, &mut first));
    let mut bytes = vec![0u8; PARAMETERS * 2];
    for (name, dtype) in [("bf16", plimsoll_core::DType::Bf16), ("f16", plimsoll_core::DType::F16)] {
        bench.time(&format!("to {name}"), 0, Work::Bytes(6 * PARAMETERS), |pool| {
            to_bytes(pool, dtype, &gradient, &mut bytes).unwrap()
        });
        bench.time(&format!("from {name}"), 0, Work::Bytes(6 * PARAMETERS), |pool| {
            from_bytes(pool, dtype, &bytes, &mut first).unwrap()
        });
    }
}

/// Times quantized matrices in 8 and 4 bits, 8-bit optimizer state, and dropout. Bytes are those read and written.
fn quantized<T: Real<Wide = f32>>(bench: &mut Bench) {
    let (rows, columns) = (4096, 4096);
    let n = rows * columns;
    let size = size_of::<T>();
    let matrix = numbers::<T>(n);
    let mut whole = zeros::<T>(n);
    let (mut codes, mut row_scales) = (vec![0u8; n], vec![0f32; rows]);
    bench.time("quantize int8", 0, Work::Bytes((2 * size + 1) * n), |pool| {
        quantize(pool, &matrix, columns, QuantizedData::Int8 { codes: &mut codes[..], scales: &mut row_scales[..] })
    });
    bench.time("dequantize int8", 0, Work::Bytes((size + 1) * n), |pool| {
        dequantize(pool, QuantizedData::Int8 { codes: &codes[..], scales: &row_scales[..] }, columns, &mut whole)
    });
    let (mut halves, mut scales, mut groups) = (vec![0u8; n / 2], vec![0u8; n / 64], vec![0f32; n / 64 / 128]);
    bench.time("quantize nf4", 0, Work::Bytes(size * n + n / 2), |pool| {
        let into = QuantizedData::Nf4 { codes: &mut halves[..], scales: &mut scales[..], groups: &mut groups[..] };
        quantize(pool, &matrix, columns, into)
    });
    bench.time("dequantize nf4", 0, Work::Bytes(size * n + n / 2), |pool| {
        let from = QuantizedData::Nf4 { codes: &halves[..], scales: &scales[..], groups: &groups[..] };
        dequantize(pool, from, columns, &mut whole)
    });
    bench.time("copy, same size", 0, Work::Bytes(2 * size * n), |pool| copy(pool, &matrix, &mut whole));
    let (mut weight, gradient) = (numbers::<f32>(PARAMETERS), numbers::<f32>(PARAMETERS));
    let (mut first, mut second) = (vec![0u8; PARAMETERS], vec![0u8; PARAMETERS]);
    let blocks = PARAMETERS.div_ceil(256);
    let (mut first_scale, mut second_scale) = (vec![0f32; blocks], vec![0f32; blocks]);
    let step = AdamW { rate: 1e-4, betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, bias_corrections: [0.5, 0.5], clip: 0.9 };
    bench.time("adamw8", 0, Work::Bytes(16 * PARAMETERS), |pool| {
        let state = State8 {
            first: &mut first,
            first_scale: &mut first_scale,
            second: &mut second,
            second_scale: &mut second_scale,
        };
        adamw8(pool, step, &mut weight, &gradient, state)
    });
    let at = Dropout { seed: 1, step: 1, first_sample: 0, sequence: SEQUENCE, layer: 0, site: 0, probability: 0.1 };
    let (x, mut out) = (numbers::<T>(ROWS * HIDDEN), zeros::<T>(ROWS * HIDDEN));
    bench.time("dropout", 0, Work::Bytes(2 * size * ROWS * HIDDEN), |pool| {
        dropout(pool, at, HIDDEN, &x, &mut out, false)
    });
}
