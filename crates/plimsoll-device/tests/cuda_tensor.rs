//! The arithmetic of tensor-core attention, run on the CPU as in `cuda_kernels.rs`, against plain loops in f64; and the
//! emulated instructions against the PTX ISA.

mod cuda_shim;

use cuda_shim::{Gpu, Kind, compile_text};
use plimsoll_device::cuda::architecture::Architecture;
use plimsoll_device::cuda::kernels::launch::*;
use plimsoll_device::cuda::kernels::{Family, Real, Target, Tiles, Unit};
use plimsoll_program::op::Heads;

/// An A100: tiles of 32 met queries, and of 64 keys for heads of 128.
const LARGE: Target = target(8, 0);
/// A consumer Ada GPU: tiles of 16 met queries for heads of 64, 96 and 112.
const SMALL: Target = target(8, 9);
/// A consumer Blackwell GPU: also tiles of 32 keys for heads of 128.
const NARROW: Target = target(12, 0);

const fn target(major: u32, minor: u32) -> Target {
    Target { architecture: Architecture { major, minor }, compiler: 1305 }
}

/// A small random generator (upper half of a 64-bit LCG).
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as f64 / 2f64.powi(31) - 1.0
    }

    /// Draws numbers up to `most` that bf16 represents.
    fn many(&mut self, n: usize, most: f64) -> Vec<f64> {
        (0..n).map(|_| Kind::Bf16.rounded(most * self.next())).collect()
    }

    /// Draws documents of random lengths, about 1 / `often` each, back to back in each sequence. The second begins at
    /// `edge` at the latest.
    fn documents(&mut self, batch: usize, sequence: usize, often: f64, edge: usize) -> Vec<i32> {
        let mut starts = Vec::new();
        for _ in 0..batch {
            let mut start = 0;
            for at in 0..sequence {
                if self.next().abs() < often || at == edge {
                    start = at;
                }
                starts.push(start as i32);
            }
        }
        starts
    }
}

/// Compares results up to bf16 rounding of the result itself, and of the weights and gradients in its sum.
#[track_caller]
fn close(got: &[f64], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let square = |all: &mut dyn Iterator<Item = f64>| all.map(|x| x * x).sum::<f64>().sqrt();
    let size = square(&mut want.iter().copied());
    let off = square(&mut got.iter().zip(want).map(|(got, want)| got - want));
    assert!(off <= size / 256.0, "{what}: {off} off of {size}");
    let mean = size / (want.len() as f64).sqrt();
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= (want.abs() + 4.0 * mean) / 128.0, "{what}[{i}]: {got} for {want}, of {mean}");
    }
}

/// Compares statistics, which are never rounded to bf16.
#[track_caller]
fn equal(got: &[f64], want: &[f64], what: &str) {
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= 2e-6 * (want.abs() + 10.0), "{what}[{i}]: {got} for {want}");
    }
}

/// Returns the weights of keys `start ..= query` for one head of one query, and their log-sum-exp.
fn weights(q: &[f64], start: usize, query: usize, key: impl Fn(usize) -> Vec<f64>) -> (Vec<f64>, f64) {
    let dot = |k: &[f64]| q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() / (q.len() as f64).sqrt();
    let scores: Vec<f64> = (start..=query).map(|at| dot(&key(at))).collect();
    let most = scores.iter().fold(f64::NEG_INFINITY, |most, s| most.max(*s));
    let sum: f64 = scores.iter().map(|s| (s - most).exp()).sum();
    (scores.iter().map(|s| (s - most).exp() / sum).collect(), most + sum.ln())
}

/// Reference attention of qkv[N,C]: out[N, H·E] and stats[B,H,T]; with dout[N, H·E] also dqkv[N,C].
struct ReferenceAttention<'a> {
    shape: Heads,
    sequence: usize,
    qkv: &'a [f64],
    starts: &'a [i32],
}

impl ReferenceAttention<'_> {
    fn rows(&self) -> usize {
        self.starts.len()
    }

    /// Returns the start of a head's part in a row of qkv; `head` counts queries, keys, values.
    fn at(&self, row: usize, head: usize) -> usize {
        row * self.shape.columns() as usize + head * self.shape.head_dim as usize
    }

    fn part(&self, row: usize, head: usize) -> Vec<f64> {
        let at = self.at(row, head);
        self.qkv[at..at + self.shape.head_dim as usize].to_vec()
    }

    /// Calls `visit` with (row, head, key head, value head, first visible row, weights, log-sum-exp) of each query.
    fn each(&self, mut visit: impl FnMut(usize, usize, usize, usize, usize, Vec<f64>, f64)) {
        let Heads { heads, kv_heads, .. } = self.shape;
        let (heads, kv_heads) = (heads as usize, kv_heads as usize);
        for row in 0..self.rows() {
            let first = row / self.sequence * self.sequence;
            for head in 0..heads {
                let key_head = heads + head / (heads / kv_heads);
                let start = self.starts[row] as usize;
                let key = |at| self.part(first + at, key_head);
                let (weights, stat) = weights(&self.part(row, head), start, row - first, key);
                visit(row, head, key_head, key_head + kv_heads, first + start, weights, stat);
            }
        }
    }

    fn forward(&self) -> (Vec<f64>, Vec<f64>) {
        let (e, heads) = (self.shape.head_dim as usize, self.shape.heads as usize);
        let mut out = vec![0.0; self.rows() * heads * e];
        let mut stats = vec![0.0; self.rows() * heads];
        self.each(|row, head, _, value_head, first, weights, stat| {
            stats[(row / self.sequence * heads + head) * self.sequence + row % self.sequence] = stat;
            for (i, weight) in weights.iter().enumerate() {
                for (c, value) in self.part(first + i, value_head).iter().enumerate() {
                    out[(row * heads + head) * e + c] += weight * value;
                }
            }
        });
        (out, stats)
    }

    /// Returns `dqkv`; `out` is the rounded output.
    fn backward(&self, out: &[f64], dout: &[f64]) -> Vec<f64> {
        let (e, heads) = (self.shape.head_dim as usize, self.shape.heads as usize);
        let mut dqkv = vec![0.0; self.qkv.len()];
        self.each(|row, head, key_head, value_head, first, weights, _| {
            let d = &dout[(row * heads + head) * e..][..e];
            let dot = |value: Vec<f64>| value.iter().zip(d).map(|(a, b)| a * b).sum::<f64>();
            let dweights: Vec<f64> = (0..weights.len()).map(|i| dot(self.part(first + i, value_head))).collect();
            let mean: f64 = out[(row * heads + head) * e..][..e].iter().zip(d).map(|(a, b)| a * b).sum();
            let (query, q) = (self.part(row, head), self.at(row, head));
            for (i, weight) in weights.iter().enumerate() {
                let dscore = weight * (dweights[i] - mean) / (e as f64).sqrt();
                let (key, k, v) =
                    (self.part(first + i, key_head), self.at(first + i, key_head), self.at(first + i, value_head));
                for c in 0..e {
                    dqkv[q + c] += dscore * key[c];
                    dqkv[k + c] += dscore * query[c];
                    dqkv[v + c] += weight * d[c];
                }
            }
        });
        dqkv
    }
}

/// Covers every ratio of query to key heads, every head dimension of `cargo xtask cuda-check`, sequences that end
/// within tiles and after several blocks, and documents of at least one token.
#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn tensor_core_attention_and_gradient_match_reference() {
    for (target, batch, sequence, heads, kv_heads, head_dim, often, edge) in [
        (LARGE, 1, 1, 1, 1, 16, 0.0, 0),
        (LARGE, 2, 33, 2, 1, 16, 0.1, 7),
        (LARGE, 1, 300, 1, 1, 16, 0.01, 0),
        (LARGE, 1, 150, 4, 1, 32, 0.05, 2),
        (LARGE, 2, 70, 4, 2, 64, 0.0, 69),
        (LARGE, 1, 200, 8, 1, 64, 0.02, 0),
        (LARGE, 1, 131, 3, 3, 80, 0.03, 0),
        (LARGE, 2, 50, 4, 1, 96, 0.2, 1),
        (LARGE, 1, 130, 2, 1, 128, 0.0, 0),
        (LARGE, 1, 97, 8, 4, 128, 0.04, 64),
        (LARGE, 1, 150, 1, 1, 64, 0.0, 2),
        (LARGE, 1, 150, 2, 1, 80, 0.0, 33),
        (LARGE, 1, 260, 1, 1, 32, 0.0, 130),
        (LARGE, 1, 200, 1, 1, 32, 0.0, 129),
        (SMALL, 2, 70, 4, 2, 64, 0.0, 69),
        (SMALL, 1, 200, 8, 1, 64, 0.02, 0),
        (SMALL, 2, 50, 4, 1, 96, 0.2, 1),
        (SMALL, 1, 83, 3, 1, 112, 0.05, 17),
        (NARROW, 1, 97, 8, 4, 128, 0.04, 64),
    ] {
        let what = format!("{batch} × {sequence}, {heads}/{kv_heads} heads of {head_dim} on {}", target.architecture);
        let (mut gpu, mut draw) = (Gpu::new(0), Draw(sequence));
        let shape = Heads { heads, kv_heads, head_dim };
        let rows = (batch * sequence) as usize;
        let wide = rows * shape.query_columns() as usize;
        let qkv = draw.many(rows * shape.columns() as usize, 3.0);
        let starts = draw.documents(batch as usize, sequence as usize, often, edge);
        let plain = ReferenceAttention { shape, sequence: sequence as usize, qkv: &qkv, starts: &starts };
        let (want, want_stats) = plain.forward();
        let (gqkv, gstarts) = (gpu.put(Kind::Bf16, &qkv), gpu.put_integers(&starts));
        let (out, stats) = (gpu.allocate(Kind::Bf16, wide), gpu.allocate(Kind::F32, rows * heads as usize));
        let launches = attention(Real::Bf16, target, [gqkv, gstarts, out, stats], batch, sequence, shape, None);
        assert_eq!(launches[0].unit.family(), Family::TensorAttention);
        gpu.run(&launches);
        equal(&gpu.get(stats), &want_stats, &format!("stats of {what}"));
        close(&gpu.get(out), &want, &format!("out of {what}"));

        let dout = draw.many(wide, 1.0);
        let want = plain.backward(&gpu.get(out), &dout);
        let (gdout, dqkv) = (gpu.put(Kind::Bf16, &dout), gpu.allocate(Kind::Bf16, qkv.len()));
        let scratch = gpu.allocate(Kind::F32, rows * heads as usize);
        let inputs = [gqkv, out, gdout, stats, gstarts];
        gpu.run(&attention_grad(Real::Bf16, target, inputs, [dqkv, scratch], batch, sequence, shape, None));
        let got = gpu.get(dqkv);
        // Gradients of keys and values sum more rows than those of queries, so each has its own scale.
        let ends = [0, shape.heads, shape.heads + shape.kv_heads, shape.heads + 2 * shape.kv_heads];
        for (name, ends) in ["dq", "dk", "dv"].iter().zip(ends.windows(2)) {
            let columns = (ends[0] * head_dim) as usize..(ends[1] * head_dim) as usize;
            let of = |all: &[f64]| -> Vec<f64> {
                all.chunks(shape.columns() as usize).flat_map(|row| row[columns.clone()].to_vec()).collect()
            };
            close(&of(&got), &of(&want), &format!("{name} of {what}"));
        }
    }
}

/// A prompt's chunk over a cache that already contains tokens.
#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn tensor_core_cached_attention_matches_reference() {
    for (before, rows, heads, kv_heads, head_dim) in [(0, 9, 2, 1, 16), (70, 40, 4, 2, 64), (3, 140, 2, 1, 128)] {
        let shape = Heads { heads, kv_heads, head_dim };
        check_cached_attention(shape, before, rows, None, LARGE);
        // Windows that hide whole tiles of keys, and all keys but the newest.
        for (window, target) in [(40, LARGE), (1, LARGE), (40, NARROW)] {
            check_cached_attention(shape, before, rows, Some(window), target);
        }
    }
}

/// Compares attention of `rows` new tokens over a cache of `before` tokens with the reference. The cache is the second of
/// two; the first one must not be read.
fn check_cached_attention(shape: Heads, before: u64, rows: u64, window: Option<usize>, target: Target) {
    let (mut gpu, mut draw) = (Gpu::new(0), Draw(before));
    let (length, width) = ((before + rows) as usize, (shape.kv_heads * shape.head_dim) as usize);
    let (capacity, columns) = (length + 7, shape.columns() as usize);
    let qkv = draw.many(length * columns, 2.0);
    let starts: Vec<i32> =
        (0..length).map(|at| window.map_or(0, |window| (at + 1).saturating_sub(window) as i32)).collect();
    let (want, _) = ReferenceAttention { shape, sequence: length, qkv: &qkv, starts: &starts }.forward();
    let row = |at: usize| &qkv[at * columns..][..columns];
    let cache = |from: usize| -> Vec<f64> {
        let held = (0..length).flat_map(|at| row(at)[from..from + width].to_vec());
        vec![f64::NAN; capacity * width].into_iter().chain(held).chain(vec![f64::NAN; 7 * width]).collect()
    };
    let query_columns = shape.query_columns() as usize;
    let (keys, values) = (cache(query_columns), cache(query_columns + width));
    let places: Vec<i32> = (before as usize..length).map(|at| (capacity + at) as i32).collect();
    let new = &qkv[before as usize * columns..];
    let [qkv, keys, values] = [new, &keys, &values].map(|data| gpu.put(Kind::Bf16, data));
    let places = gpu.put_integers(&places);
    let first_keys = window.map_or(0, |_| gpu.put_integers(&starts[before as usize..]));
    let out = gpu.allocate(Kind::Bf16, rows as usize * query_columns);
    let inputs = [qkv, keys, values, places, first_keys];
    let tokens = NewTokens { sequences: 1, rows, capacity: capacity as u64 };
    let launches = cached_attention(Real::Bf16, target, inputs, out, 0, tokens, shape, None);
    assert_eq!(launches[0].unit.family(), Family::TensorAttention);
    gpu.run(&launches);
    close(&gpu.get(out), &want[before as usize * query_columns..], "out");
}

/// Runs `body` in a kernel of one warp, after the types and instructions.
fn warp(name: &str, body: &str, arguments: &str, values: &[Argument], gpu: &mut Gpu) -> Result<(), String> {
    let source = Unit::tensor_attention(16, Tiles::new(16, LARGE)).source();
    let (before, _) = source.split_once("#line 1 \"attention_tensor.cu\"").expect("the family's file comes last");
    let source = format!("{before}\nextern \"C\" __global__ void probe({arguments}) {{ {body} }}");
    let library = compile_text(&format!("tensor-{name}"), &source, &["probe"]);
    gpu.try_run(&library, "probe", [1, 1, 1], 32, 1024, values)
}

/// A lane's fragments as the PTX ISA lists them (mma.m16n8k16, .bf16), element by element.
#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn emulated_mma_has_documented_layout() {
    let (mut gpu, mut draw) = (Gpu::new(0), Draw(4));
    let [a, b, c] = [16 * 16, 16 * 8, 16 * 8].map(|n| draw.many(n, 1.0));
    // Element i of a lane's fragment: rows and columns of a, then of b, then of c.
    let a_at = |lane: usize, i: usize| {
        let row = lane / 4 + if matches!(i, 0 | 1 | 4 | 5) { 0 } else { 8 };
        row * 16 + lane % 4 * 2 + i % 2 + if i < 4 { 0 } else { 8 }
    };
    let b_at = |lane: usize, i: usize| (lane % 4 * 2 + i % 2 + if i < 2 { 0 } else { 8 }) * 8 + lane / 4;
    let c_at = |lane: usize, i: usize| (lane / 4 + if i < 2 { 0 } else { 8 }) * 8 + lane % 4 * 2 + i % 2;
    let by_lane = |count: usize, of: &dyn Fn(usize, usize) -> f64| -> Vec<f64> {
        (0..32 * count).map(|at| of(at / count, at % count)).collect()
    };
    let left = gpu.put(Kind::Bf16, &by_lane(8, &|lane, i| a[a_at(lane, i)]));
    let right = gpu.put(Kind::Bf16, &by_lane(4, &|lane, i| b[b_at(lane, i)]));
    let sums = gpu.put(Kind::F32, &by_lane(4, &|lane, i| c[c_at(lane, i)]));
    let body = "u32 a[4]; float c[4]; for (int i = 0; i < 4; i++) { a[i] = left[threadIdx.x * 4 + i]; \
                c[i] = sums[threadIdx.x * 4 + i]; } \
                mma(c, a, right[threadIdx.x * 2], right[threadIdx.x * 2 + 1]); \
                for (int i = 0; i < 4; i++) sums[threadIdx.x * 4 + i] = c[i];";
    let values = [Argument::Address(left), Argument::Address(right), Argument::Address(sums)];
    warp("mma", body, "const u32* left, const u32* right, float* sums", &values, &mut gpu).unwrap();
    for (at, got) in gpu.get(sums).iter().enumerate() {
        let place = c_at(at / 4, at % 4);
        let (row, column) = (place / 8, place % 8);
        let want = c[place] + (0..16).map(|k| a[row * 16 + k] * b[k * 8 + column]).sum::<f64>();
        assert!((got - want).abs() <= 1e-6, "lane {}, element {}: {got} for {want}", at / 4, at % 4);
    }
}

/// Matrix i has elements 64·i + 8·row + column; a lane gets two neighbours of a row, or of a column.
#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn emulated_ldmatrix_has_documented_layout() {
    let mut gpu = Gpu::new(0);
    let elements: Vec<f64> = (0..256).map(f64::from).collect();
    let body = "bf16* tile = reinterpret_cast<bf16*>(shared); \
                for (int i = 0; i < 8; i++) tile[threadIdx.x * 8 + i] = from[threadIdx.x * 8 + i]; \
                __syncthreads(); u32 words[4]; LOAD(tile + threadIdx.x * 8, words); \
                for (int i = 0; i < 4; i++) to[threadIdx.x * 4 + i] = words[i];";
    for (load, transposed) in [("load_matrices", false), ("load_transposed", true)] {
        let (from, to) = (gpu.put(Kind::Bf16, &elements), gpu.allocate(Kind::Bf16, 256));
        let values = [Argument::Address(from), Argument::Address(to)];
        warp(load, &body.replace("LOAD", load), "const bf16* from, u32* to", &values, &mut gpu).unwrap();
        for (at, got) in gpu.get(to).iter().enumerate() {
            let (lane, matrix, half) = (at / 8, at / 2 % 4, at % 2);
            let (line, place) = (lane / 4, lane % 4 * 2 + half);
            let (row, column) = if transposed { (place, line) } else { (line, place) };
            assert_eq!(*got, (matrix * 64 + row * 8 + column) as f64, "{load}, lane {lane}");
        }
    }
}

/// Asynchronous copies may complete at any time before they are waited for, and not earlier than issued.
#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn unawaited_copies_are_detected() {
    let copy = "float* mine = shared + threadIdx.x * 4; copy_pack(mine, from + threadIdx.x * 4, threadIdx.x % 2); ";
    let (wait, give) = ("copies_landed(); ", "to[threadIdx.x] = shared[(31 - threadIdx.x) * 4]; ");
    let run = |name: &str, body: String| {
        let mut gpu = Gpu::new(0);
        let values: Vec<f64> = (0..128).map(f64::from).collect();
        let (from, to) = (gpu.put(Kind::F32, &values), gpu.allocate(Kind::F32, 32));
        let values = [Argument::Address(from), Argument::Address(to)];
        warp(name, &body, "const float* from, float* to", &values, &mut gpu).map(|()| gpu.get(to))
    };
    let right = run("copies", format!("{copy}{wait}__syncthreads(); {give}")).unwrap();
    let want: Vec<f64> = (0..32).map(|i| if i % 2 == 0 { f64::from(31 - i) * 4.0 } else { 0.0 }).collect();
    assert_eq!(right, want);
    let zeros =
        copy.replace("float* mine", "float* again").replace("mine, ", "again, ").replace("threadIdx.x % 2", "0");
    for (name, body, what) in [
        ("copies-late", format!("{copy}__syncthreads(); {give}{wait}"), "still comes"),
        ("copies-apart", format!("{copy}{wait}{give}"), "just read"),
        ("copies-over", format!("{copy}{wait}__syncthreads(); {zeros}{give}{wait}"), "just read"),
        ("copies-left", format!("{copy}__syncthreads();"), "ends before its copies"),
    ] {
        let found = run(name, body).expect_err(name);
        assert!(found.contains(what), "{name}: {found}");
    }
}
