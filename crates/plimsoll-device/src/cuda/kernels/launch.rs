//! How each kernel is launched: grid, block, shared memory and arguments, as pure functions of shapes
//! and addresses. A few kernels make up an op; they run in the order in which they are returned.
//!
//! Legend as in `plimsoll_program::op`. Sizes are in elements unless a name says otherwise.

use super::{Family, HEAD_DIM_MAX, Real, Unit};
use plimsoll_core::DType;
use plimsoll_program::formats::NF4_PIECE;
use plimsoll_program::op::{Heads, RopeScaling};
use plimsoll_program::workspace;
use plimsoll_program::workspace::cuda::{NORM_PARTIALS, portions, rows_per_portion};
use std::ffi::c_void;
use std::ptr;

/// A place in the memory of the device.
pub type Address = u64;

/// Tensors that one launch of the optimizer's kernels takes.
pub const TABLE_TENSORS: usize = 56;
/// Elements that a block of the optimizer updates.
const UPDATE_CHUNK: u64 = 8192;

/// One argument of a kernel.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "named after the types in the kernel's signature")]
pub enum Argument {
    Address(Address),
    U32(u32),
    U64(u64),
    F32(f32),
    F64(f64),
    Table(Box<Table>),
}

impl Argument {
    /// Where the value lies, as a launch takes it. Good as long as the argument stays where it is.
    pub fn pointer(&self) -> *const c_void {
        match self {
            Argument::Address(value) | Argument::U64(value) => ptr::from_ref(value).cast(),
            Argument::U32(value) => ptr::from_ref(value).cast(),
            Argument::F32(value) => ptr::from_ref(value).cast(),
            Argument::F64(value) => ptr::from_ref(value).cast(),
            Argument::Table(value) => ptr::from_ref(&**value).cast(),
        }
    }
}

/// `Tensor` in optimizer.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Entry {
    weight: Address,
    gradient: Address,
    first: Address,
    second: Address,
    first_scale: Address,
    second_scale: Address,
    elements: u64,
    decay: f32,
    first_block: u32,
}

/// `Table` in optimizer.cu, which is passed by value.
#[repr(C)]
#[derive(Clone, Debug, PartialEq)]
pub struct Table([Entry; TABLE_TENSORS]);

/// A kernel, ready to be launched.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The module that holds the kernel.
    pub unit: Unit,
    /// Its name in the module.
    pub kernel: &'static str,
    /// Blocks along x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block, along x.
    pub block: u32,
    /// Dynamic shared memory. Above 48 KiB the kernel must be told once that it may have as much.
    pub shared_bytes: u32,
    /// In the order of the kernel's signature.
    pub arguments: Vec<Argument>,
}

/// Begins a launch with a grid along x.
fn launch(unit: Unit, kernel: &'static str, blocks: u64, block: u32, arguments: Vec<Argument>) -> Launch {
    debug_assert!(unit.family().kernels().contains(&kernel));
    Launch { unit, kernel, grid: [u32_of(blocks), 1, 1], block, shared_bytes: 0, arguments }
}

impl Launch {
    /// The same with a grid of y × z as well.
    fn by(mut self, y: u64, z: u64) -> Launch {
        self.grid[1..].copy_from_slice(&[u32_of(y), u32_of(z)]);
        self
    }

    /// The same with so many floats of shared memory.
    fn sharing(mut self, floats: u64) -> Launch {
        self.shared_bytes = u32_of(4 * floats);
        self
    }
}

/// Sizes of single dimensions are far below 2^32: the planner's memory is.
fn u32_of(size: u64) -> u32 {
    u32::try_from(size).expect("a dimension below 2^32")
}

fn at(address: Address) -> Argument {
    Argument::Address(address)
}

fn n(size: u64) -> Argument {
    Argument::U32(u32_of(size))
}

fn real(value: f64) -> Argument {
    Argument::F32(value as f32)
}

/// A family whose kernels do not depend on heads.
fn unit(family: Family, real: Real) -> Unit {
    Unit::new(family, real, 0)
}

/// Blocks of a kernel that goes over elements.
fn over(elements: u64) -> u64 {
    elements.div_ceil(1024).clamp(1, 65_536)
}

// ---- norms ----

/// `out[N,D]`, `rstd[N]` of `x[N,D]` and `weight[D]`.
pub fn rms_norm(
    of: Real,
    x: Address,
    weight: Address,
    out: Address,
    rstd: Address,
    rows: u64,
    dim: u64,
    eps: f64,
) -> [Launch; 1] {
    let arguments = vec![at(x), at(weight), at(out), at(rstd), n(dim), real(eps)];
    [launch(unit(Family::Norm, of), "rms_norm", rows, 256, arguments)]
}

/// `dx[N,D]` = or +=, `dweight[D]` +=.
pub fn rms_norm_grad(
    of: Real,
    [x, weight, rstd, dout]: [Address; 4],
    dx: Address,
    dweight: Address,
    scratch: Address,
    rows: u64,
    dim: u64,
    accumulate: bool,
) -> [Launch; 2] {
    let arguments = vec![
        at(x),
        at(weight),
        at(rstd),
        at(dout),
        at(dx),
        at(scratch),
        n(rows),
        n(dim),
        n(rows_per_portion(rows)),
        n(u64::from(accumulate)),
    ];
    [
        launch(unit(Family::Norm, of), "rms_norm_grad", portions(rows), 256, arguments).sharing(dim),
        add_partials(of, scratch, dweight, portions(rows), dim, dim),
    ]
}

/// `out[N,C]`, `rstd[N, H+K]` of `x[N,C]` and the weights `[E]` of queries and keys.
pub fn head_norm(
    of: Real,
    [x, q_weight, k_weight]: [Address; 3],
    out: Address,
    rstd: Address,
    rows: u64,
    shape: Heads,
    eps: f64,
) -> [Launch; 1] {
    let all = rows * (shape.heads + 2 * shape.kv_heads);
    let mut arguments = vec![at(x), at(q_weight), at(k_weight), at(out), at(rstd), n(rows)];
    arguments.extend([n(shape.heads), n(shape.kv_heads), n(shape.head_dim), real(eps)]);
    [launch(unit(Family::HeadNorm, of), "head_norm", all.div_ceil(8), 256, arguments)]
}

/// Turns `dx[N,C]` from the output's gradient into the input's; `dq_weight[E]`, `dk_weight[E]` +=.
pub fn head_norm_grad(
    of: Real,
    [x, q_weight, k_weight, rstd]: [Address; 4],
    dx: Address,
    [dq_weight, dk_weight]: [Address; 2],
    scratch: Address,
    rows: u64,
    shape: Heads,
) -> [Launch; 3] {
    let head = shape.head_dim;
    let mut arguments = vec![at(x), at(q_weight), at(k_weight), at(rstd), at(dx), at(scratch), n(rows)];
    arguments.extend([n(shape.heads), n(shape.kv_heads), n(head), n(rows_per_portion(rows))]);
    let count = portions(rows);
    [
        launch(unit(Family::HeadNorm, of), "head_norm_grad", count, 256, arguments).sharing(8 * 2 * head),
        add_partials(of, scratch, dq_weight, count, head, 2 * head),
        add_partials(of, scratch + 4 * head, dk_weight, count, head, 2 * head),
    ]
}

// ---- positions ----

/// Rotates the query and key heads of `qkv[N,C]` in place.
pub fn rope(
    of: Real,
    qkv: Address,
    table: Address,
    positions: Address,
    rows: u64,
    shape: Heads,
    inverse: bool,
) -> [Launch; 1] {
    let sign = if inverse { -1.0 } else { 1.0 };
    let mut arguments = vec![at(qkv), at(table), at(positions), n(shape.rotated())];
    arguments.extend([n(shape.columns()), n(shape.head_dim), real(sign)]);
    let pairs = shape.rotated() * (shape.head_dim / 2);
    [launch(unit(Family::Rope, of), "rope", rows, 256, arguments).by(pairs.div_ceil(2048), 1)]
}

/// Fills `table[P,E]`.
pub fn rope_table(
    of: Real,
    table: Address,
    table_rows: u64,
    head_dim: u64,
    theta: f64,
    scaling: RopeScaling,
) -> [Launch; 1] {
    let (kind, [factor, low, high, context]) = match scaling {
        RopeScaling::None => (0, [1.0; 4]),
        RopeScaling::Linear { factor } => (1, [factor, 1.0, 1.0, 1.0]),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            (2, [factor, low_freq_factor, high_freq_factor, original_max_position_embeddings as f64])
        }
    };
    let mut arguments = vec![at(table), n(table_rows), n(head_dim), real(theta), n(kind)];
    arguments.extend([real(factor), real(low), real(high), real(context)]);
    let blocks = (table_rows * (head_dim / 2)).div_ceil(256);
    [launch(unit(Family::Rope, of), "rope_table", blocks, 256, arguments)]
}

// ---- attention ----

/// Floats from one row of a tile to the next.
fn tile_row(head_dim: u64) -> u64 {
    assert!(head_dim <= HEAD_DIM_MAX, "heads of {head_dim} elements: at most {HEAD_DIM_MAX}");
    head_dim.next_multiple_of(16) + 4
}

/// Shared floats of a block of 64 queries that meets 64 keys.
fn forward_tiles(head_dim: u64) -> u64 {
    (64 + 64) * tile_row(head_dim) + 64 * 68
}

/// Shared floats of a block that owns 32 rows, twice, and meets 64.
fn backward_tiles(head_dim: u64) -> u64 {
    (32 + 32 + 64) * tile_row(head_dim) + 32 * 68
}

/// Whether attention goes over tensor cores: they take bf16, whole matrices, and addresses of whole packs.
fn on_tensor_cores(of: Real, shape: Heads, addresses: &[Address]) -> bool {
    let packs = addresses.iter().all(|address| address.is_multiple_of(16));
    of == Real::Bf16 && Family::TensorAttention.takes(shape.head_dim) && packs
}

/// Threads of a block on tensor cores.
const TENSOR_THREADS: u32 = 128;

/// Queries that a block of the forward pass owns on tensor cores.
const TENSOR_QUERIES: u64 = 128;

/// Queries or keys that a block of the backward pass owns on tensor cores.
fn tensor_owned(head_dim: u64) -> u64 {
    if head_dim <= 64 { 128 } else { 64 }
}

/// Shared floats of so many rows of tiles on tensor cores.
fn tensor_tiles(rows: u64, head_dim: u64) -> u64 {
    rows * (head_dim + 8) / 2
}

/// `out[N, H·E]` and `stats[B,H,T]` of `qkv[N,C]`.
pub fn attention(
    of: Real,
    qkv: Address,
    document_start: Address,
    out: Address,
    stats: Address,
    batch: u64,
    sequence: u64,
    shape: Heads,
) -> [Launch; 1] {
    let mut arguments = vec![at(qkv), at(document_start), at(out), at(stats)];
    arguments.extend([n(sequence), n(shape.heads), n(shape.kv_heads)]);
    if on_tensor_cores(of, shape, &[qkv, out]) {
        let unit = Unit::new(Family::TensorAttention, of, shape.head_dim);
        let blocks = sequence.div_ceil(TENSOR_QUERIES);
        let grid = launch(unit, "tensor_attention", blocks, TENSOR_THREADS, arguments).by(shape.heads, batch);
        return [grid.sharing(tensor_tiles(TENSOR_QUERIES + 2 * 64, shape.head_dim))];
    }
    let unit = Unit::new(Family::Attention, of, shape.head_dim);
    let grid = launch(unit, "attention", sequence.div_ceil(64), 256, arguments).by(shape.heads, batch);
    [grid.sharing(forward_tiles(shape.head_dim))]
}

/// `dqkv[N,C]`, written whole.
pub fn attention_grad(
    of: Real,
    [qkv, out, dout, stats, document_start]: [Address; 5],
    dqkv: Address,
    scratch: Address,
    batch: u64,
    sequence: u64,
    shape: Heads,
) -> Vec<Launch> {
    let rows = batch * sequence;
    let sizes = [n(sequence), n(shape.heads), n(shape.kv_heads)];
    let gradient =
        |inputs: &[Address]| -> Vec<Argument> { inputs.iter().copied().map(at).chain(sizes.clone()).collect() };
    let keys = gradient(&[qkv, dout, stats, scratch, document_start, dqkv]);
    if on_tensor_cores(of, shape, &[qkv, out, dout, dqkv]) {
        let unit = Unit::new(Family::TensorAttention, of, shape.head_dim);
        let owned = tensor_owned(shape.head_dim);
        let (blocks, held) = (sequence.div_ceil(owned), tensor_tiles(2 * owned, shape.head_dim));
        let met = tensor_tiles(4 * 32, shape.head_dim) + 6 * 32;
        let queries = gradient(&[qkv, out, dout, stats, scratch, document_start, dqkv]);
        let queries = launch(unit, "tensor_attention_grad_queries", blocks, TENSOR_THREADS, queries);
        let keys = launch(unit, "tensor_attention_grad_keys", shape.kv_heads, TENSOR_THREADS, keys);
        return vec![queries.by(shape.heads, batch).sharing(held), keys.by(batch, blocks).sharing(held + met)];
    }
    let unit = Unit::new(Family::Attention, of, shape.head_dim);
    let delta = vec![at(out), at(dout), at(scratch), n(rows), n(sequence), n(shape.heads)];
    let tiled = |kernel, heads: u64| {
        let grid = launch(unit, kernel, sequence.div_ceil(32), 128, keys.clone()).by(heads, batch);
        grid.sharing(backward_tiles(shape.head_dim))
    };
    vec![
        launch(unit, "attention_delta", (rows * shape.heads).div_ceil(8), 256, delta),
        tiled("attention_grad_queries", shape.heads),
        tiled("attention_grad_keys", shape.kv_heads),
    ]
}

/// `out[n, H·E]` of n new tokens over caches of `capacity` tokens, which hold them already. `scratch` is needed for
/// few tokens only ([`workspace::cuda::cached_attention`]).
pub fn cached_attention(
    of: Real,
    [qkv, keys, values, scalars]: [Address; 4],
    out: Address,
    scratch: Address,
    rows: u64,
    capacity: u64,
    shape: Heads,
) -> Vec<Launch> {
    let unit = Unit::new(Family::Attention, of, shape.head_dim);
    let sizes = [n(shape.heads), n(shape.kv_heads)];
    if rows <= workspace::cuda::FEW_ROWS {
        let (part, parts) = workspace::cuda::key_parts(capacity);
        let mut arguments = vec![at(qkv), at(keys), at(values), at(scalars), at(scratch), n(part)];
        arguments.extend(sizes);
        let join = vec![at(scratch), at(out), n(parts), n(shape.heads)];
        return vec![
            launch(unit, "cached_attention_part", parts, 128, arguments).by(shape.heads, rows).sharing(part + 1024),
            launch(unit, "cached_attention_join", shape.heads, 128, join).by(rows, 1),
        ];
    }
    let mut arguments = vec![at(qkv), at(keys), at(values), at(scalars), at(out), n(rows)];
    arguments.extend(sizes);
    if on_tensor_cores(of, shape, &[qkv, keys, values, out]) {
        let unit = Unit::new(Family::TensorAttention, of, shape.head_dim);
        let blocks = rows.div_ceil(TENSOR_QUERIES);
        let grid = launch(unit, "tensor_cached_attention", blocks, TENSOR_THREADS, arguments).by(shape.heads, 1);
        return vec![grid.sharing(tensor_tiles(TENSOR_QUERIES + 2 * 64, shape.head_dim))];
    }
    let grid = launch(unit, "cached_attention", rows.div_ceil(64), 256, arguments).by(shape.heads, 1);
    vec![grid.sharing(forward_tiles(shape.head_dim))]
}

/// Keys and values of n tokens into the caches.
pub fn append_cache(
    of: Real,
    qkv: Address,
    scalars: Address,
    keys: Address,
    values: Address,
    rows: u64,
    shape: Heads,
) -> [Launch; 1] {
    let unit = Unit::new(Family::Attention, of, shape.head_dim);
    let arguments = vec![at(qkv), at(scalars), at(keys), at(values), n(shape.heads), n(shape.kv_heads)];
    let columns = shape.kv_heads * shape.head_dim;
    [launch(unit, "append_cache", rows, 256, arguments).by(columns.div_ceil(256), 1)]
}

// ---- feed-forward ----

/// `out[N,F]` of `gate_up[N,2F]`.
pub fn swiglu(of: Real, gate_up: Address, out: Address, rows: u64, ffn: u64) -> [Launch; 1] {
    let arguments = vec![at(gate_up), at(out), n(ffn)];
    [launch(unit(Family::SwiGlu, of), "swiglu", rows, 256, arguments).by(ffn.div_ceil(2048), 1)]
}

/// `dgate_up[N,2F]`, which may stand where gate_up stands.
pub fn swiglu_grad(of: Real, gate_up: Address, dout: Address, dgate_up: Address, rows: u64, ffn: u64) -> [Launch; 1] {
    let arguments = vec![at(gate_up), at(dout), at(dgate_up), n(ffn)];
    [launch(unit(Family::SwiGlu, of), "swiglu_grad", rows, 256, arguments).by(ffn.div_ceil(2048), 1)]
}

// ---- loss ----

/// `stats[R,4]` of `logits[R,columns]`, from column `first` of the vocabulary on.
pub fn softmax_stats(
    of: Real,
    [logits, labels, weights, stats]: [Address; 4],
    rows: u64,
    first: u64,
    columns: u64,
    begin: bool,
) -> [Launch; 1] {
    let mut arguments = vec![at(logits), at(labels), at(weights), at(stats)];
    arguments.extend([n(first), n(columns), n(u64::from(begin))]);
    [launch(unit(Family::CrossEntropy, of), "softmax_stats", rows, 512, arguments)]
}

/// metrics += Σ weight · nll; `correct[R]`, where there is one, tells hits.
pub fn cross_entropy(
    of: Real,
    [stats, labels, weights]: [Address; 3],
    metrics: Address,
    correct: Option<Address>,
    rows: u64,
) -> [Launch; 1] {
    let arguments = vec![at(stats), at(labels), at(weights), at(metrics), at(correct.unwrap_or(0)), n(rows)];
    [launch(unit(Family::CrossEntropy, of), "cross_entropy", 1, 256, arguments)]
}

/// `logits[R,columns]`, from column `first` of the vocabulary on, become their gradient.
pub fn softmax_grad(
    of: Real,
    [logits, labels, weights, stats, scalars]: [Address; 5],
    rows: u64,
    first: u64,
    columns: u64,
) -> [Launch; 1] {
    let mut arguments = vec![at(logits), at(labels), at(weights), at(stats), at(scalars)];
    arguments.extend([n(first), n(columns)]);
    [launch(unit(Family::CrossEntropy, of), "softmax_grad", rows, 512, arguments)]
}

// ---- embedding ----

/// `out[N,D]` = rows of `table[V,D]`.
pub fn embed(
    of: Real,
    tokens: Address,
    table: Address,
    out: Address,
    rows: u64,
    hidden: u64,
    vocab: u64,
) -> [Launch; 1] {
    let arguments = vec![at(tokens), at(table), at(out), n(hidden), n(vocab)];
    [launch(unit(Family::Embed, of), "embed", rows, 256, arguments)]
}

/// `dtable[V,D]` += rows of `dout[N,D]`.
pub fn embed_grad(
    of: Real,
    tokens: Address,
    dout: Address,
    dtable: Address,
    scratch: Address,
    rows: u64,
    hidden: u64,
    vocab: u64,
) -> [Launch; 3] {
    const SORTERS: u32 = 1024;
    const DIGIT_BITS: u32 = 4;
    let unit = unit(Family::Embed, of);
    // What is sorted, twice (`workspace::cuda::embed_grad`).
    let (sorted, heads) = (at(scratch), at(scratch + 16 * rows));
    let passes = (u64::BITS - vocab.leading_zeros()).div_ceil(DIGIT_BITS);
    let order = vec![at(tokens), sorted.clone(), n(rows), n(vocab), n(passes.into())];
    let sizes = [n(rows), n(hidden), n(vocab), n(rows_per_portion(rows))];
    let over = |kernel, first: Vec<Argument>, columns: u64| {
        let arguments = first.into_iter().chain(sizes.clone()).collect();
        launch(unit, kernel, portions(rows), 256, arguments).by(hidden.div_ceil(columns), 1)
    };
    [
        launch(unit, "embed_order", 1, SORTERS, order).sharing(u64::from(SORTERS << DIGIT_BITS)),
        over("embed_grad", vec![sorted.clone(), at(dout), at(dtable), heads.clone()], 1024),
        over("embed_grad_join", vec![sorted, heads, at(dtable)], 256),
    ]
}

// ---- between ranks ----

/// A part of a tensor on one rank, and those that the others have brought of it.
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    /// This rank's.
    pub own: Address,
    /// Those of the others, in the order of ranks.
    pub others: Address,
    /// Elements from one of them to the next.
    pub stride: u64,
    /// Which rank this is, and how many there are.
    pub rank: u32,
    /// See `rank`.
    pub ranks: u32,
}

/// `into` = the sum of the parts of all ranks, in their order, or that is added to it; none of a type that is not summed up.
pub fn sum_ranks(dtype: DType, parts: Parts, into: Address, elements: u64, adds: bool) -> Option<[Launch; 1]> {
    let kernel = match dtype {
        DType::F32 => "sum_ranks_f32",
        DType::F64 => "sum_ranks_f64",
        _ => return None,
    };
    let Parts { own, others, stride, rank, ranks } = parts;
    let sizes = [Argument::U64(elements), Argument::U64(stride)];
    let numbers = [rank, ranks, u32::from(adds)].map(Argument::U32);
    let arguments = [at(own), at(others), at(into)].into_iter().chain(sizes).chain(numbers).collect();
    Some([launch(unit(Family::Collective, Real::F32), kernel, over(elements), 256, arguments)])
}

// ---- element by element ----

/// into += x, both activations.
pub fn add(of: Real, x: Address, into: Address, elements: u64) -> [Launch; 1] {
    let arguments = vec![at(x), at(into), Argument::U64(elements)];
    [launch(unit(Family::Elementwise, of), "add", over(elements), 256, arguments)]
}

/// `into[N,C]` += `x[N,C]`, rows of which lie `x_stride` and `stride` elements apart; with an `x_stride` of 0 the same
/// row each time. What a product took along neither as bias nor as residual.
pub fn add_rows(
    of: Real,
    x: Address,
    x_stride: u64,
    into: Address,
    stride: u64,
    rows: u64,
    columns: u64,
) -> [Launch; 1] {
    let arguments = vec![at(x), at(into), n(columns), n(x_stride), n(stride)];
    [launch(unit(Family::Elementwise, of), "add_rows", rows, 256, arguments).by(columns.div_ceil(2048), 1)]
}

/// `into[C]` += Σ rows of `x[N,C]`.
pub fn sum_rows(of: Real, x: Address, into: Address, scratch: Address, rows: u64, columns: u64) -> [Launch; 2] {
    let arguments = vec![at(x), at(scratch), n(rows), n(columns), n(rows_per_portion(rows))];
    let grid = launch(unit(Family::Elementwise, of), "sum_rows", columns.div_ceil(2048), 256, arguments);
    [grid.by(portions(rows), 1), add_partials(of, scratch, into, portions(rows), columns, columns)]
}

fn add_partials(of: Real, partials: Address, into: Address, count: u64, columns: u64, stride: u64) -> Launch {
    let arguments = vec![at(partials), at(into), n(count), n(columns), n(stride)];
    launch(unit(Family::Elementwise, of), "add_partials", columns.div_ceil(32), 256, arguments)
}

/// `out[C]` = the row of `x[N,C]` that the scalars name.
pub fn pick_row(of: Real, x: Address, scalars: Address, out: Address, columns: u64) -> [Launch; 1] {
    let arguments = vec![at(x), at(scalars), at(out), n(columns)];
    [launch(unit(Family::Elementwise, of), "pick_row", columns.div_ceil(256), 256, arguments)]
}

/// to = from in another type; none for types that hold no floats, and for equal ones, which are a copy.
pub fn cast(from_type: DType, from: Address, to_type: DType, to: Address, elements: u64) -> Option<[Launch; 1]> {
    let kernel = match (from_type, to_type) {
        (DType::F32, DType::Bf16) => "cast_f32_bf16",
        (DType::Bf16, DType::F32) => "cast_bf16_f32",
        (DType::F32, DType::F16) => "cast_f32_f16",
        (DType::F16, DType::F32) => "cast_f16_f32",
        (DType::F32, DType::F64) => "cast_f32_f64",
        (DType::F64, DType::F32) => "cast_f64_f32",
        (DType::Bf16, DType::F16) => "cast_bf16_f16",
        (DType::F16, DType::Bf16) => "cast_f16_bf16",
        (DType::Bf16, DType::F64) => "cast_bf16_f64",
        (DType::F64, DType::Bf16) => "cast_f64_bf16",
        _ => return None,
    };
    let arguments = vec![at(from), at(to), Argument::U64(elements)];
    Some([launch(unit(Family::Cast, Real::F32), kernel, over(elements), 256, arguments)])
}

/// All elements = value; none for types that are never filled.
pub fn fill(dtype: DType, into: Address, value: f64, elements: u64) -> Option<[Launch; 1]> {
    let kernel = match dtype {
        DType::F32 => "fill_f32",
        DType::F64 => "fill_f64",
        DType::Bf16 => "fill_bf16",
        DType::U8 => "fill_u8",
        _ => return None,
    };
    let arguments = vec![at(into), Argument::F64(value), Argument::U64(elements)];
    Some([launch(unit(Family::Cast, Real::F32), kernel, over(elements), 256, arguments)])
}

/// Normal numbers into f32: element i is number `first + i` of tensor `number` under `seed`.
pub fn init_normal(into: Address, seed: u64, number: u64, first: u64, std: f64, elements: u64) -> [Launch; 1] {
    [init("init_normal", into, seed, number, first, std, elements)]
}

/// The same of numbers that are equally likely from −bound to bound.
pub fn init_uniform(into: Address, seed: u64, number: u64, first: u64, bound: f64, elements: u64) -> [Launch; 1] {
    [init("init_uniform", into, seed, number, first, bound, elements)]
}

fn init(kernel: &'static str, into: Address, seed: u64, number: u64, first: u64, size: f64, elements: u64) -> Launch {
    let mut arguments = vec![at(into), Argument::U64(elements), Argument::U64(seed), Argument::U64(number)];
    arguments.extend([Argument::U64(first), Argument::F64(size)]);
    let blocks = (first % 4 + elements).div_ceil(4).div_ceil(256);
    launch(unit(Family::Init, Real::F32), kernel, blocks, 256, arguments)
}

/// Where the rows of a `Dropout` stand in the run; the step is a scalar.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// Of the run.
    pub seed: u64,
    /// The sample of row 0 within the step.
    pub first_sample: u64,
    /// Rows of a sample.
    pub sequence: u64,
    /// The layer.
    pub layer: u64,
    /// Which of the layer's.
    pub site: u8,
    /// Of being left out.
    pub probability: f64,
}

/// `out[N,D]` = (or +=, with `accumulate`) x with elements left out, the others divided by 1 − probability.
pub fn dropout(
    of: Real,
    place: Dropout,
    [x, out, scalars]: [Address; 3],
    rows: u64,
    columns: u64,
    accumulate: bool,
) -> [Launch; 1] {
    let (each, samples) = (place.sequence * columns, rows.div_ceil(place.sequence));
    let mut arguments = vec![at(x), at(out), at(scalars), Argument::U64(place.seed), n(place.first_sample)];
    arguments.extend([n(place.layer * 256 + u64::from(place.site))]);
    // ⌊probability · 2³²⌋: a probability of 1 leaves nothing.
    arguments.extend([Argument::U64((place.probability * 4_294_967_296.0) as u64)]);
    arguments.extend([real(1.0 / (1.0 - place.probability)), Argument::U64(each), Argument::U64(rows * columns)]);
    arguments.push(n(u64::from(accumulate)));
    let grid = launch(unit(Family::Dropout, of), "dropout", each.div_ceil(1024), 256, arguments);
    [grid.by(samples.min(65_535), 1)]
}

// ---- coarse formats ----

/// A matrix in a coarse format, or whole blocks of one.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "as `plimsoll_program::op::Quantised`")]
pub enum Coarse {
    Int8 { codes: Address, scales: Address },
    Nf4 { codes: Address, scales: Address, groups: Address },
}

/// `into` = f32 elements of a matrix with rows of `columns`.
pub fn quantise(from: Address, into: Coarse, elements: u64, columns: u64) -> [Launch; 1] {
    let unit = unit(Family::Coarse, Real::F32);
    [match into {
        Coarse::Int8 { codes, scales } => {
            let arguments = vec![at(from), at(codes), at(scales), n(columns)];
            launch(unit, "quantise_int8", elements / columns, 256, arguments)
        }
        Coarse::Nf4 { codes, scales, groups } => {
            let arguments = vec![at(from), at(codes), at(scales), at(groups), Argument::U64(elements)];
            launch(unit, "quantise_nf4", elements.div_ceil(NF4_PIECE), 256, arguments)
        }
    }]
}

/// Elements that a block of threads makes whole.
const SPREAD: u64 = 8192;

/// `into` = the elements of `from`, each rounded once.
pub fn dequantise(of: Real, from: Coarse, into: Address, elements: u64, columns: u64) -> [Launch; 1] {
    let (unit, blocks) = (unit(Family::Coarse, of), elements.div_ceil(SPREAD));
    [match from {
        Coarse::Int8 { codes, scales } => {
            let arguments = vec![at(codes), at(scales), at(into), Argument::U64(elements), n(columns)];
            launch(unit, "dequantise_int8", blocks, 256, arguments)
        }
        Coarse::Nf4 { codes, scales, groups } => {
            let arguments = vec![at(codes), at(scales), at(groups), at(into), Argument::U64(elements)];
            launch(unit, "dequantise_nf4", blocks, 256, arguments)
        }
    }]
}

// ---- the update ----

/// A tensor that an optimizer updates. What it does not have is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Updated {
    /// The f32 weight.
    pub weight: Address,
    /// Its f32 gradient.
    pub gradient: Address,
    /// AdamW's first moment, f32 or codes; SGD's momentum buffer.
    pub first: Address,
    /// AdamW's second moment.
    pub second: Address,
    /// The scales of codes of the first moment.
    pub first_scale: Address,
    /// Those of the second.
    pub second_scale: Address,
    /// How many.
    pub elements: u64,
    /// Weight decay.
    pub decay: f64,
}

/// Groups of tensors that fit into a table: the table, how many tensors, how many blocks of `chunk`
/// elements.
fn tables(tensors: &[Updated], chunk: u64) -> impl Iterator<Item = (Box<Table>, u64, u64)> {
    tensors.chunks(TABLE_TENSORS).map(move |group| {
        let mut table = Box::new(Table([Entry::default(); TABLE_TENSORS]));
        let mut blocks = 0;
        for (entry, tensor) in table.0.iter_mut().zip(group) {
            let Updated { weight, gradient, first, second, first_scale, second_scale, elements, decay } = *tensor;
            let (decay, first_block) = (decay as f32, u32_of(blocks));
            *entry = Entry { weight, gradient, first, second, first_scale, second_scale, elements, decay, first_block };
            blocks += elements.div_ceil(chunk).max(1);
        }
        (table, group.len() as u64, blocks)
    })
}

/// One step of AdamW on all tensors.
pub fn adamw(tensors: &[Updated], scalars: Address, betas: [f64; 2], eps: f64) -> Vec<Launch> {
    adamw_by("adamw", tensors, scalars, betas, eps)
}

/// The same on tensors whose moments are codes.
pub fn adamw8(tensors: &[Updated], scalars: Address, betas: [f64; 2], eps: f64) -> Vec<Launch> {
    adamw_by("adamw8", tensors, scalars, betas, eps)
}

fn adamw_by(kernel: &'static str, tensors: &[Updated], scalars: Address, betas: [f64; 2], eps: f64) -> Vec<Launch> {
    let unit = unit(Family::Optimizer, Real::F32);
    let of = |(table, count, blocks)| {
        let mut arguments = vec![Argument::Table(table), at(scalars), n(count), n(UPDATE_CHUNK)];
        arguments.extend([real(1.0 - betas[0]), real(betas[1]), real(1.0 - betas[1]), real(eps)]);
        launch(unit, kernel, blocks, 256, arguments)
    };
    tables(tensors, UPDATE_CHUNK).map(of).collect()
}

/// One step of stochastic gradient descent on all tensors.
pub fn sgd(tensors: &[Updated], scalars: Address, momentum: f64) -> Vec<Launch> {
    let unit = unit(Family::Optimizer, Real::F32);
    let of = |(table, count, blocks)| {
        let arguments = vec![Argument::Table(table), at(scalars), n(count), n(UPDATE_CHUNK), real(momentum)];
        launch(unit, "sgd", blocks, 256, arguments)
    };
    tables(tensors, UPDATE_CHUNK).map(of).collect()
}

/// metrics += Σ x² of f32 tensors (address, elements). `partials` has [`NORM_PARTIALS`] f64 elements.
pub fn squared_norm(tensors: &[(Address, u64)], partials: Address, metrics: Address) -> Vec<Launch> {
    let unit = unit(Family::Optimizer, Real::F32);
    let squared = |&(gradient, elements)| Updated { gradient, elements, ..Updated::default() };
    let mut launches = Vec::new();
    for group in tensors.chunks(TABLE_TENSORS) {
        // Each tensor may have one block that is not full.
        let total: u64 = group.iter().map(|(_, elements)| elements).sum();
        let full = NORM_PARTIALS - TABLE_TENSORS as u64;
        let chunk = total.div_ceil(full).next_multiple_of(1024).max(16_384);
        let updated: Vec<Updated> = group.iter().map(squared).collect();
        for (table, count, blocks) in tables(&updated, chunk) {
            let arguments = vec![Argument::Table(table), at(partials), n(count), Argument::U64(chunk)];
            launches.push(launch(unit, "squared_norm", blocks, 256, arguments));
            let sum = vec![at(partials), at(metrics), n(blocks)];
            launches.push(launch(unit, "squared_norm_sum", 1, 256, sum));
        }
    }
    launches
}

/// The scalar that gradients are multiplied with.
pub fn clip_factor(metrics: Address, scalars: Address) -> [Launch; 1] {
    [launch(unit(Family::Optimizer, Real::F32), "clip_factor", 1, 32, vec![at(metrics), at(scalars)])]
}
