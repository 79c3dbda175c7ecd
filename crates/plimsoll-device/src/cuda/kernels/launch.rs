//! Launch parameters of every kernel: grid, block, shared memory and arguments, as pure functions of shapes and
//! addresses. An op needs a few kernels, which run in the returned order.
//!
//! Shapes are written as in `plimsoll_program::op`. Sizes are in elements unless a name states otherwise.

mod attention;
mod optimizer;

pub use attention::*;
pub use optimizer::*;

use super::{Family, Real, Unit};
use plimsoll_core::DType;
use plimsoll_program::formats::NF4_PIECE;
use plimsoll_program::op::{Activation, Heads, QkNorm, QueryGrowth, RopeScaling};
use plimsoll_program::workspace::cuda::{NORM_PARTIALS, portions, rows_per_portion};
use std::ffi::c_void;
use std::ptr;

/// An address in device memory.
pub type Address = u64;

/// One argument of a kernel, with its value.
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
    /// Returns a pointer to the value, as the driver takes it for a launch. The pointer is valid until the argument
    /// moves.
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

/// A kernel with its launch parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The unit that contains the kernel.
    pub unit: Unit,
    /// Name of the kernel in the unit's source.
    pub kernel: &'static str,
    /// Number of thread blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads per block, along x.
    pub block: u32,
    /// Dynamic shared memory per block. Above 40 KiB, the kernel's limit must be raised once, when it is loaded.
    pub shared_bytes: u32,
    /// Arguments in the order of the kernel's signature.
    pub arguments: Vec<Argument>,
}

/// Creates a launch of `blocks` blocks of `block` threads, along x, without dynamic shared memory.
fn launch(unit: Unit, kernel: &'static str, blocks: u64, block: u32, arguments: Vec<Argument>) -> Launch {
    assert!(unit.family().kernels().contains(&kernel));
    Launch { unit, kernel, grid: [u32_of(blocks), 1, 1], block, shared_bytes: 0, arguments }
}

impl Launch {
    /// Sets the y and z dimensions of the grid.
    fn with_grid_yz(mut self, y: u64, z: u64) -> Launch {
        self.grid[1..].copy_from_slice(&[u32_of(y), u32_of(z)]);
        self
    }

    /// Sets the dynamic shared memory per block to `floats` f32 numbers.
    fn with_shared_floats(mut self, floats: u64) -> Launch {
        self.shared_bytes = u32_of(4 * floats);
        self
    }
}

/// Converts a size to u32. Each single dimension of a tensor is far below 2^32, because memory limits it.
///
/// # Panics
/// Panics if the size is 2^32 or more.
fn u32_of(size: u64) -> u32 {
    u32::try_from(size).expect("a dimension below 2^32")
}

fn at(address: Address) -> Argument {
    Argument::Address(address)
}

fn n(size: u64) -> Argument {
    Argument::U32(u32_of(size))
}

fn float(value: f64) -> Argument {
    Argument::F32(value as f32)
}

/// Returns the unit of a family whose kernels do not depend on the head dimension.
fn unit(family: Family, real: Real) -> Unit {
    Unit::new(family, real, 0)
}

/// Returns the number of thread blocks of an element-wise kernel; each block loops if there are more elements.
fn elementwise_blocks(elements: u64) -> u64 {
    elements.div_ceil(1024).clamp(1, 65_536)
}

// ---- norms ----

/// Returns the launch of an RMS norm over the `dim` elements of each of `rows` rows: `out` = x · rstd · (weight + offset)
/// (+ `residual`, unless its address is 0). It also writes `rstd`, one f32 (1 / rms) per row.
pub fn rms_norm(
    real: Real,
    [x, weight, residual]: [Address; 3],
    out: Address,
    rstd: Address,
    rows: u64,
    dim: u64,
    [eps, offset]: [f64; 2],
) -> [Launch; 1] {
    let arguments = vec![at(x), at(weight), at(residual), at(out), at(rstd), n(dim), float(eps), float(offset)];
    [launch(unit(Family::Norm, real), "rms_norm", rows, 256, arguments)]
}

/// Returns the launches of the gradient of an RMS norm. The first writes `dx` or, with `accumulate`, adds to it, and
/// writes partial sums to `scratch`. The second adds their sum to `dweight`; callers drop it if the weight is frozen.
pub fn rms_norm_grad(
    real: Real,
    [x, weight, rstd, dout]: [Address; 4],
    [dx, dweight, scratch]: [Address; 3],
    rows: u64,
    dim: u64,
    offset: f64,
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
        float(offset),
        n(u64::from(accumulate)),
    ];
    [
        launch(unit(Family::Norm, real), "rms_norm_grad", portions(rows), 256, arguments).with_shared_floats(dim),
        add_partials(real, scratch, dweight, portions(rows), dim, dim),
    ]
}

/// Returns the launch of the RMS norms `norm` of the queries and keys of `x`, whose rows hold queries, keys and values.
/// It copies values to `out`, and writes `rstd`, one f32 (1 / rms) for each norm of each row.
pub fn head_norm(
    real: Real,
    [x, q_weight, k_weight]: [Address; 3],
    out: Address,
    rstd: Address,
    rows: u64,
    shape: Heads,
    norm: QkNorm,
    [eps, offset]: [f64; 2],
) -> [Launch; 1] {
    let mut arguments = vec![at(x), at(q_weight), at(k_weight), at(out), at(rstd)];
    if norm == QkNorm::AllHeads {
        let [queries, keys] = shape.norm_widths(norm);
        arguments.extend([n(queries), n(keys), float(eps), float(offset)]);
        return [launch(unit(Family::Norm, real), "all_heads_norm", 3 * rows, 256, arguments)];
    }
    let all = rows * (shape.heads + 2 * shape.kv_heads);
    arguments.extend([n(rows), n(shape.heads), n(shape.kv_heads), n(shape.head_dim), float(eps), float(offset)]);
    [launch(unit(Family::HeadNorm, real), "head_norm", all.div_ceil(8), 256, arguments)]
}

/// Returns the launches of the gradient of [`head_norm`]. The first converts `dx` in place from the gradient of the
/// output to that of the input. The others add the weights' gradients to `dq_weight` and `dk_weight`.
pub fn head_norm_grad(
    real: Real,
    [x, q_weight, k_weight, rstd]: [Address; 4],
    [dx, scratch]: [Address; 2],
    [dq_weight, dk_weight]: [Address; 2],
    rows: u64,
    shape: Heads,
    norm: QkNorm,
    offset: f64,
) -> [Launch; 3] {
    let [queries, keys] = shape.norm_widths(norm);
    let (count, both) = (portions(rows), queries + keys);
    let mut arguments = vec![at(x), at(q_weight), at(k_weight), at(rstd), at(dx), at(scratch), n(rows)];
    let first = if norm == QkNorm::AllHeads {
        arguments.extend([n(queries), n(keys), n(rows_per_portion(rows)), float(offset)]);
        let launch = launch(unit(Family::Norm, real), "all_heads_norm_grad", 2 * count, 256, arguments);
        launch.with_shared_floats(queries.max(keys))
    } else {
        arguments.extend([n(shape.heads), n(shape.kv_heads), n(shape.head_dim)]);
        arguments.extend([n(rows_per_portion(rows)), float(offset)]);
        let launch = launch(unit(Family::HeadNorm, real), "head_norm_grad", count, 256, arguments);
        launch.with_shared_floats(8 * both)
    };
    [
        first,
        add_partials(real, scratch, dq_weight, count, queries, both),
        add_partials(real, scratch + 4 * queries, dk_weight, count, keys, both),
    ]
}

// ---- positions ----

/// Returns the launch that rotates the query and key heads of `qkv` in place, by the angles in `table` for `positions`.
/// With `inverse` it rotates back, by which a gradient of the output becomes that of the input.
pub fn rope(
    real: Real,
    [qkv, table, positions]: [Address; 3],
    rows: u64,
    key_shift: u64,
    shape: Heads,
    inverse: bool,
) -> [Launch; 1] {
    let sign = if inverse { -1.0 } else { 1.0 };
    let mut arguments = vec![at(qkv), at(table), at(positions), n(shape.heads), n(shape.kv_heads)];
    arguments.extend([n(shape.columns()), n(shape.head_dim), n(key_shift), float(sign)]);
    let pairs = shape.rotated_heads() * (shape.head_dim / 2);
    [launch(unit(Family::Rope, real), "rope", rows, 256, arguments).with_grid_yz(pairs.div_ceil(2048), 1)]
}

/// Returns the launch that moves positions by `shift`, but not below 0, and adds the starts of documents. The address
/// `document_start` is 0 if all documents start at 0.
pub fn shift_positions(
    real: Real,
    positions: Address,
    document_start: Address,
    out: Address,
    rows: u64,
    shift: i32,
) -> [Launch; 1] {
    let shift = Argument::U32(shift.cast_unsigned());
    let arguments = vec![at(positions), at(document_start), at(out), n(rows), shift];
    [launch(unit(Family::Rope, real), "shift_positions", rows.div_ceil(256), 256, arguments)]
}

/// Returns the launch that fills the f32 table of rotary positions. Row p holds the cosines of the `head_dim` / 2
/// angles of position p, then their sines, all times `amplitude` and the factor of `growth`.
pub fn rope_table(
    real: Real,
    table: Address,
    [table_rows, head_dim]: [u64; 2],
    theta: f64,
    scaling: RopeScaling,
    amplitude: f64,
    growth: Option<QueryGrowth>,
) -> [Launch; 1] {
    let (kind, [factor, low, high, context]) = match scaling {
        RopeScaling::None | RopeScaling::Dynamic { .. } => (0, [1.0; 4]),
        RopeScaling::Linear { factor } => (1, [factor, 1.0, 1.0, 1.0]),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            (2, [factor, low_freq_factor, high_freq_factor, original_max_position_embeddings as f64])
        }
        RopeScaling::Yarn { factor, .. } => {
            let [low, high] = scaling.yarn_range(head_dim, theta);
            (3, [factor, low, high - low, 1.0])
        }
    };
    let mut arguments = vec![at(table), n(table_rows), n(head_dim), float(theta), n(kind)];
    arguments.extend([float(factor), float(low), float(high), float(context), float(amplitude)]);
    let QueryGrowth { beta, period } = growth.unwrap_or(QueryGrowth { beta: 0.0, period: 1 });
    // A period beyond the table has no effect.
    arguments.extend([float(beta), n(period.min(table_rows))]);
    let blocks = (table_rows * (head_dim / 2)).div_ceil(256);
    [launch(unit(Family::Rope, real), "rope_table", blocks, 256, arguments)]
}

// ---- feed-forward ----

/// Returns the launch of a gated unit: `out` = activation(gate) · up. A row of `gate_up` holds `ffn` values of gate, then
/// of up.
pub fn glu(real: Real, activation: Activation, gate_up: Address, out: Address, rows: u64, ffn: u64) -> [Launch; 1] {
    let [a, b] = activation.coefficients().map(float);
    let arguments = vec![at(gate_up), at(out), n(ffn), a, b];
    [launch(unit(Family::Glu, real), "glu", rows, 256, arguments).with_grid_yz(ffn.div_ceil(2048), 1)]
}

/// Returns the launch that computes `dgate_up`, the gradient of the input of [`glu`]. The addresses `dgate_up` and
/// `gate_up` may be equal.
pub fn glu_grad(
    real: Real,
    activation: Activation,
    [gate_up, dout, dgate_up]: [Address; 3],
    rows: u64,
    ffn: u64,
) -> [Launch; 1] {
    let [a, b] = activation.coefficients().map(float);
    let arguments = vec![at(gate_up), at(dout), at(dgate_up), n(ffn), a, b];
    [launch(unit(Family::Glu, real), "glu_grad", rows, 256, arguments).with_grid_yz(ffn.div_ceil(2048), 1)]
}

// ---- loss ----

/// Returns the launch that updates the softmax statistics of each row, four f32 numbers in `stats`, by a block of
/// logits: those of `columns` tokens from token `first` on. `begin` is true for the first block.
pub fn softmax_stats(
    real: Real,
    [logits, labels, weights, stats]: [Address; 4],
    rows: u64,
    first: u64,
    columns: u64,
    begin: bool,
) -> [Launch; 1] {
    let mut arguments = vec![at(logits), at(labels), at(weights), at(stats)];
    arguments.extend([n(first), n(columns), n(u64::from(begin))]);
    [launch(unit(Family::CrossEntropy, real), "softmax_stats", rows, 512, arguments)]
}

/// Returns the launch that adds the loss of `rows` rows, Σ weight · negative log-likelihood, to `metrics`. For each row
/// it writes 1 to `correct` if the label has the largest logit, else 0, and to `log_probabilities` the f32
/// log-probability of the label; `None` omits an output.
pub fn cross_entropy(
    real: Real,
    [stats, labels, weights]: [Address; 3],
    metrics: Address,
    correct: Option<Address>,
    log_probabilities: Option<Address>,
    rows: u64,
) -> [Launch; 1] {
    let outputs = [correct, log_probabilities].map(|output| at(output.unwrap_or(0)));
    let mut arguments = vec![at(stats), at(labels), at(weights), at(metrics)];
    arguments.extend(outputs.into_iter().chain([n(rows)]));
    [launch(unit(Family::CrossEntropy, real), "cross_entropy", 1, 256, arguments)]
}

/// Returns the launch that replaces the block `logits` by its gradient. The block is that of `columns` tokens of the
/// vocabulary, from token `first` on. Logits that [`soft_cap`] limited to ±`softcap` are replaced by the gradient of what
/// it read.
pub fn softmax_grad(
    real: Real,
    [logits, labels, weights, stats, scalars]: [Address; 5],
    rows: u64,
    first: u64,
    columns: u64,
    softcap: Option<f64>,
) -> [Launch; 1] {
    let mut arguments = vec![at(logits), at(labels), at(weights), at(stats), at(scalars)];
    arguments.extend([n(first), n(columns), float(softcap.map_or(0.0, f64::recip))]);
    [launch(unit(Family::CrossEntropy, real), "softmax_grad", rows, 512, arguments)]
}

// ---- embedding ----

/// Returns the launch of an embedding lookup, which writes `scale` · the row of `table` that each token selects to `out`.
pub fn embed(
    real: Real,
    [tokens, table, out]: [Address; 3],
    rows: u64,
    hidden: u64,
    vocab: u64,
    scale: f64,
) -> [Launch; 1] {
    let arguments = vec![at(tokens), at(table), at(out), n(hidden), n(vocab), float(scale)];
    [launch(unit(Family::Embed, real), "embed", rows, 256, arguments)]
}

/// Returns the launches of the gradient of [`embed`], which add `scale` · each row of `dout` to the row of `dtable` that its
/// token selects. They first sort the tokens in `scratch`, so that the order of sums is fixed.
pub fn embed_grad(
    real: Real,
    [tokens, dout, dtable, scratch]: [Address; 4],
    rows: u64,
    hidden: u64,
    vocab: u64,
    scale: f64,
) -> [Launch; 3] {
    const SORT_THREADS: u32 = 1024;
    const DIGIT_BITS: u32 = 4;
    let unit = unit(Family::Embed, real);
    // Two buffers for sorting (`workspace::cuda::embed_grad`).
    let (sorted, heads) = (at(scratch), at(scratch + 16 * rows));
    let passes = (u64::BITS - vocab.leading_zeros()).div_ceil(DIGIT_BITS);
    let order = vec![at(tokens), sorted.clone(), n(rows), n(vocab), n(passes.into())];
    let sizes = [n(rows), n(hidden), n(vocab), n(rows_per_portion(rows)), float(scale)];
    let launch_portions = |kernel, first: Vec<Argument>, columns: u64| {
        let arguments = first.into_iter().chain(sizes.clone()).collect();
        launch(unit, kernel, portions(rows), 256, arguments).with_grid_yz(hidden.div_ceil(columns), 1)
    };
    [
        launch(unit, "embed_order", 1, SORT_THREADS, order).with_shared_floats(u64::from(SORT_THREADS << DIGIT_BITS)),
        launch_portions("embed_grad", vec![sorted.clone(), at(dout), at(dtable), heads.clone()], 1024),
        launch_portions("embed_grad_join", vec![sorted, heads, at(dtable)], 256),
    ]
}

// ---- between ranks ----

/// The addends of a sum over ranks: this rank's values, and the values received from each other rank.
#[derive(Clone, Copy, Debug)]
pub struct RankParts {
    /// Address of this rank's values.
    pub own: Address,
    /// Address of the first of the other ranks' values, which lie in rank order.
    pub others: Address,
    /// Elements between the starts of the values of two consecutive other ranks.
    pub stride: u64,
    /// Number of this rank, from 0.
    pub rank: u32,
    /// Number of ranks, including this one.
    pub ranks: u32,
}

/// Returns the launch that sums the values of all ranks in rank order. It writes the sum to `into` or, with `adds`,
/// adds it there. `None` for data types other than f32 and f64.
pub fn sum_ranks(dtype: DType, parts: RankParts, into: Address, elements: u64, adds: bool) -> Option<[Launch; 1]> {
    let kernel = match dtype {
        DType::F32 => "sum_ranks_f32",
        DType::F64 => "sum_ranks_f64",
        _ => return None,
    };
    let RankParts { own, others, stride, rank, ranks } = parts;
    let sizes = [Argument::U64(elements), Argument::U64(stride)];
    let numbers = [rank, ranks, u32::from(adds)].map(Argument::U32);
    let arguments = [at(own), at(others), at(into)].into_iter().chain(sizes).chain(numbers).collect();
    Some([launch(unit(Family::Collective, Real::F32), kernel, elementwise_blocks(elements), 256, arguments)])
}

// ---- element-wise ----

/// Returns the launch that adds activations: `into` += `x`.
pub fn add(real: Real, x: Address, into: Address, elements: u64) -> [Launch; 1] {
    let arguments = vec![at(x), at(into), Argument::U64(elements)];
    [launch(unit(Family::Elementwise, real), "add", elementwise_blocks(elements), 256, arguments)]
}

/// Returns the launch that limits elements of `x` to ±`cap`: x = cap · tanh(x / cap).
pub fn soft_cap(real: Real, x: Address, elements: u64, cap: f64) -> [Launch; 1] {
    let arguments = vec![at(x), Argument::U64(elements), float(cap)];
    [launch(unit(Family::Elementwise, real), "soft_cap", elementwise_blocks(elements), 256, arguments)]
}

/// Returns the launch that adds a matrix `x` of `rows` × `columns` elements to `into`. Rows of `x` are `x_stride`
/// elements apart, rows of `into` `stride`; an `x_stride` of 0 adds one row, such as a bias, to all rows.
pub fn add_rows(
    real: Real,
    x: Address,
    x_stride: u64,
    into: Address,
    stride: u64,
    rows: u64,
    columns: u64,
) -> [Launch; 1] {
    let arguments = vec![at(x), at(into), n(columns), n(x_stride), n(stride)];
    [launch(unit(Family::Elementwise, real), "add_rows", rows, 256, arguments).with_grid_yz(columns.div_ceil(2048), 1)]
}

/// Returns the launches that add the sum of the rows of `x` to the row `into`. `scratch` is a workspace for partial
/// sums.
pub fn sum_rows(real: Real, x: Address, into: Address, scratch: Address, rows: u64, columns: u64) -> [Launch; 2] {
    let arguments = vec![at(x), at(scratch), n(rows), n(columns), n(rows_per_portion(rows))];
    let grid = launch(unit(Family::Elementwise, real), "sum_rows", columns.div_ceil(2048), 256, arguments);
    [grid.with_grid_yz(portions(rows), 1), add_partials(real, scratch, into, portions(rows), columns, columns)]
}

fn add_partials(real: Real, partials: Address, into: Address, count: u64, columns: u64, stride: u64) -> Launch {
    let arguments = vec![at(partials), at(into), n(count), n(columns), n(stride)];
    launch(unit(Family::Elementwise, real), "add_partials", columns.div_ceil(32), 256, arguments)
}

/// Returns the launch that copies one row of `x` to `out`. Its row number is `Scalar::LastRow` in the tensor `scalars`.
pub fn pick_row(real: Real, x: Address, scalars: Address, out: Address, columns: u64) -> [Launch; 1] {
    let arguments = vec![at(x), at(scalars), at(out), n(columns)];
    [launch(unit(Family::Elementwise, real), "pick_row", columns.div_ceil(256), 256, arguments)]
}

/// Returns the launch that converts elements from one float type to another. `None` for equal types, for types that are
/// no floats, and for f16 with f64.
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
    Some([launch(unit(Family::Cast, Real::F32), kernel, elementwise_blocks(elements), 256, arguments)])
}

/// Returns the launch that sets all elements to `value`. `None` for data types other than f32, f64, bf16 and u8.
pub fn fill(dtype: DType, into: Address, value: f64, elements: u64) -> Option<[Launch; 1]> {
    let kernel = match dtype {
        DType::F32 => "fill_f32",
        DType::F64 => "fill_f64",
        DType::Bf16 => "fill_bf16",
        DType::U8 => "fill_u8",
        _ => return None,
    };
    let arguments = vec![at(into), Argument::F64(value), Argument::U64(elements)];
    Some([launch(unit(Family::Cast, Real::F32), kernel, elementwise_blocks(elements), 256, arguments)])
}

/// Returns the launch that fills `into` with normal random f32 numbers of standard deviation `std`. Element i is a
/// function of `seed`, the tensor's `number` and `first` + i.
pub fn init_normal(into: Address, seed: u64, number: u64, first: u64, std: f64, elements: u64) -> [Launch; 1] {
    [init("init_normal", into, seed, number, first, std, elements)]
}

/// Returns the launch that fills `into` with uniform random f32 numbers from −`bound` to `bound`. Element i is a
/// function of `seed`, the tensor's `number` and `first` + i.
pub fn init_uniform(into: Address, seed: u64, number: u64, first: u64, bound: f64, elements: u64) -> [Launch; 1] {
    [init("init_uniform", into, seed, number, first, bound, elements)]
}

fn init(kernel: &'static str, into: Address, seed: u64, number: u64, first: u64, size: f64, elements: u64) -> Launch {
    let mut arguments = vec![at(into), Argument::U64(elements), Argument::U64(seed), Argument::U64(number)];
    arguments.extend([Argument::U64(first), Argument::F64(size)]);
    let blocks = (first % 4 + elements).div_ceil(4).div_ceil(256);
    launch(unit(Family::Init, Real::F32), kernel, blocks, 256, arguments)
}

/// The probability of a dropout op, and numbers that select its random bits. The step number also selects them; kernels
/// read it from the `scalars` tensor.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// Seed of the run.
    pub seed: u64,
    /// Number of the sample (sequence) that row 0 belongs to, counted within the step.
    pub first_sample: u64,
    /// Rows per sample.
    pub sequence: u64,
    /// Layer index.
    pub layer: u64,
    /// Index of the dropout op within the layer.
    pub site: u8,
    /// Probability that an element is dropped.
    pub probability: f64,
}

/// Returns the launch of dropout, which zeroes random elements of `x` and divides the others by 1 − probability. It
/// writes the result to `out` or, with `accumulate`, adds it there.
pub fn dropout(
    real: Real,
    site: Dropout,
    [x, out, scalars]: [Address; 3],
    rows: u64,
    columns: u64,
    accumulate: bool,
) -> [Launch; 1] {
    let (each, samples) = (site.sequence * columns, rows.div_ceil(site.sequence));
    let mut arguments = vec![at(x), at(out), at(scalars), Argument::U64(site.seed), n(site.first_sample)];
    arguments.extend([n(site.layer * 256 + u64::from(site.site))]);
    // ⌊probability · 2³²⌋: a probability of 1 drops everything.
    arguments.extend([Argument::U64((site.probability * 4_294_967_296.0) as u64)]);
    arguments.extend([float(1.0 / (1.0 - site.probability)), Argument::U64(each), Argument::U64(rows * columns)]);
    arguments.push(n(u64::from(accumulate)));
    let grid = launch(unit(Family::Dropout, real), "dropout", each.div_ceil(1024), 256, arguments);
    [grid.with_grid_yz(samples.min(65_535), 1)]
}

// ---- quantized formats ----

/// Device addresses of the parts of a quantized matrix: codes, scales, and for NF4 the scales of each group of scales.
/// They may also begin at a quantization block inside the matrix.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "as `plimsoll_program::op::Quantized`")]
pub enum QuantizedAddresses {
    Int8 { codes: Address, scales: Address },
    Nf4 { codes: Address, scales: Address, groups: Address },
}

/// Returns the launch that quantizes `elements` f32 elements at `from`, part of a matrix with rows of `columns`
/// elements.
pub fn quantize(from: Address, into: QuantizedAddresses, elements: u64, columns: u64) -> [Launch; 1] {
    let unit = unit(Family::Quantized, Real::F32);
    [match into {
        QuantizedAddresses::Int8 { codes, scales } => {
            let arguments = vec![at(from), at(codes), at(scales), n(columns)];
            launch(unit, "quantize_int8", elements / columns, 256, arguments)
        }
        QuantizedAddresses::Nf4 { codes, scales, groups } => {
            let arguments = vec![at(from), at(codes), at(scales), at(groups), Argument::U64(elements)];
            launch(unit, "quantize_nf4", elements.div_ceil(NF4_PIECE), 256, arguments)
        }
    }]
}

/// Elements that one thread block of a dequantization kernel converts.
const DEQUANTIZE_ELEMENTS_PER_BLOCK: u64 = 8192;

/// Returns the launch that dequantizes `elements` elements of `from`, in rows of `columns`, to `into`. Rounds each
/// element once, to the type `real`.
pub fn dequantize(real: Real, from: QuantizedAddresses, into: Address, elements: u64, columns: u64) -> [Launch; 1] {
    let (unit, blocks) = (unit(Family::Quantized, real), elements.div_ceil(DEQUANTIZE_ELEMENTS_PER_BLOCK));
    [match from {
        QuantizedAddresses::Int8 { codes, scales } => {
            let arguments = vec![at(codes), at(scales), at(into), Argument::U64(elements), n(columns)];
            launch(unit, "dequantize_int8", blocks, 256, arguments)
        }
        QuantizedAddresses::Nf4 { codes, scales, groups } => {
            let arguments = vec![at(codes), at(scales), at(groups), at(into), Argument::U64(elements)];
            launch(unit, "dequantize_nf4", blocks, 256, arguments)
        }
    }]
}
