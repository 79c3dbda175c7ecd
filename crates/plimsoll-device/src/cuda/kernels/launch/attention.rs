//! Launches of attention, of its gradient, and of attention over key-value caches.

use super::{Address, Argument, Launch, at, launch, n};
use crate::cuda::kernels::{Family, HEAD_DIM_MAX, Real, Target, Tiles, Unit};
use plimsoll_program::op::Heads;
use plimsoll_program::workspace;

/// Returns the number of floats between the starts of two rows of an attention tile in shared memory.
fn tile_row(head_dim: u64) -> u64 {
    assert!(head_dim <= HEAD_DIM_MAX, "heads of {head_dim} elements: at most {HEAD_DIM_MAX}");
    head_dim.next_multiple_of(16) + 4
}

/// Returns the shared memory, in floats, of a block of the attention kernel: 64 queries, and tiles of 64 keys.
fn forward_tiles(head_dim: u64) -> u64 {
    (64 + 64) * tile_row(head_dim) + 64 * 68
}

/// Returns the shared memory, in floats, of a block of attention gradient kernels without tensor cores. Such a block
/// keeps two tiles of 32 rows, loads a tile of 64 rows, and stores a 32 × 64 tile of intermediate results.
fn backward_tiles(head_dim: u64) -> u64 {
    (32 + 32 + 64) * tile_row(head_dim) + 32 * 68
}

/// Returns whether attention runs on tensor cores. It does for bf16 without a soft cap, a head dimension that those
/// kernels support, and `addresses` that are all aligned to 16 bytes.
fn on_tensor_cores(real: Real, shape: Heads, softcap: Option<f64>, addresses: &[Address]) -> bool {
    let packs = addresses.iter().all(|address| address.is_multiple_of(16));
    real == Real::Bf16 && softcap.is_none() && Family::TensorAttention.supports_head_dim(shape.head_dim) && packs
}

/// Threads per block of the attention kernels for tensor cores.
const TENSOR_THREADS: u32 = 128;

/// Queries per block of the forward attention kernels for tensor cores.
const TENSOR_QUERIES: u64 = 128;

/// Returns the number of queries (or of keys) that a block of the attention gradient kernels for tensor cores handles.
fn tensor_owned(head_dim: u64) -> u64 {
    if head_dim <= 64 { 128 } else { 64 }
}

/// Returns the shared memory, in floats, for `rows` bf16 rows of tiles in the attention kernels for tensor cores.
fn tensor_tiles(rows: u64, head_dim: u64) -> u64 {
    rows * (head_dim + 8) / 2
}

/// Returns the launch of causal attention of each row of `qkv` over keys of its own document, which starts at the row's
/// entry in `document_start`. It writes `out`, and the log-sum-exp of the scores for each sequence, head and query to
/// `stats`. Scores are limited to ±`softcap`. On tensor cores, tile sizes depend on `target`.
pub fn attention(
    real: Real,
    target: Target,
    [qkv, document_start, out, stats]: [Address; 4],
    batch: u64,
    sequence: u64,
    shape: Heads,
    softcap: Option<f64>,
) -> [Launch; 1] {
    let mut arguments = vec![at(qkv), at(document_start), at(out), at(stats)];
    arguments.extend([n(sequence), n(shape.heads), n(shape.kv_heads)]);
    if on_tensor_cores(real, shape, softcap, &[qkv, out]) {
        let tiles = Tiles::new(shape.head_dim, target);
        let unit = Unit::tensor_attention(shape.head_dim, tiles);
        let blocks = sequence.div_ceil(TENSOR_QUERIES);
        let grid = launch(unit, "tensor_attention", blocks, TENSOR_THREADS, arguments).with_grid_yz(shape.heads, batch);
        return [grid.with_shared_floats(tensor_tiles(TENSOR_QUERIES + 2 * tiles.keys, shape.head_dim))];
    }
    let unit = Unit::attention(real, shape.head_dim, softcap);
    let grid = launch(unit, "attention", sequence.div_ceil(64), 256, arguments).with_grid_yz(shape.heads, batch);
    [grid.with_shared_floats(forward_tiles(shape.head_dim))]
}

/// Returns the launches of the gradient of [`attention`], which overwrite all of `dqkv`. `scratch` is the address of a
/// workspace, and tile sizes depend on `target`.
pub fn attention_grad(
    real: Real,
    target: Target,
    [qkv, out, dout, stats, document_start]: [Address; 5],
    [dqkv, scratch]: [Address; 2],
    batch: u64,
    sequence: u64,
    shape: Heads,
    softcap: Option<f64>,
) -> Vec<Launch> {
    let rows = batch * sequence;
    let sizes = [n(sequence), n(shape.heads), n(shape.kv_heads)];
    let gradient =
        |inputs: &[Address]| -> Vec<Argument> { inputs.iter().copied().map(at).chain(sizes.clone()).collect() };
    let keys = gradient(&[qkv, dout, stats, scratch, document_start, dqkv]);
    if on_tensor_cores(real, shape, softcap, &[qkv, out, dout, dqkv]) {
        let tiles = Tiles::new(shape.head_dim, target);
        let unit = Unit::tensor_attention(shape.head_dim, tiles);
        let owned = tensor_owned(shape.head_dim);
        let (blocks, held) = (sequence.div_ceil(owned), tensor_tiles(2 * owned, shape.head_dim));
        let met = tensor_tiles(4 * tiles.met_queries, shape.head_dim) + 6 * tiles.met_queries;
        let queries = gradient(&[qkv, out, dout, stats, scratch, document_start, dqkv]);
        let queries = launch(unit, "tensor_attention_grad_queries", blocks, TENSOR_THREADS, queries);
        let keys = launch(unit, "tensor_attention_grad_keys", shape.kv_heads, TENSOR_THREADS, keys);
        return vec![
            queries.with_grid_yz(shape.heads, batch).with_shared_floats(held),
            keys.with_grid_yz(batch, blocks).with_shared_floats(held + met),
        ];
    }
    let unit = Unit::attention(real, shape.head_dim, softcap);
    let delta = vec![at(out), at(dout), at(scratch), n(rows), n(sequence), n(shape.heads)];
    let tiled = |kernel, heads: u64| {
        let grid = launch(unit, kernel, sequence.div_ceil(32), 128, keys.clone()).with_grid_yz(heads, batch);
        grid.with_shared_floats(backward_tiles(shape.head_dim))
    };
    vec![
        launch(unit, "attention_delta", (rows * shape.heads).div_ceil(8), 256, delta),
        tiled("attention_grad_queries", shape.heads),
        tiled("attention_grad_keys", shape.kv_heads),
    ]
}

/// The new tokens of an attention over key-value caches.
#[derive(Clone, Copy, Debug)]
pub struct NewTokens {
    /// Number of sequences.
    pub sequences: u64,
    /// New tokens of each sequence.
    pub rows: u64,
    /// Tokens that the cache of a sequence can hold.
    pub capacity: u64,
}

/// Returns the launches of attention of new tokens over caches, which already contain the new keys and values at
/// `places`. `first_keys` has the position of the first key that each row sees; the address 0 stands for zeros. Uses the
/// workspace `scratch` if a sequence has at most [`workspace::cuda::FEW_ROWS`] new tokens. On tensor cores, tile sizes
/// depend on `target`.
pub fn cached_attention(
    real: Real,
    target: Target,
    [qkv, keys, values, places, first_keys]: [Address; 5],
    out: Address,
    scratch: Address,
    NewTokens { sequences, rows, capacity }: NewTokens,
    shape: Heads,
    softcap: Option<f64>,
) -> Vec<Launch> {
    let unit = Unit::attention(real, shape.head_dim, softcap);
    let sizes = [n(capacity), n(shape.heads), n(shape.kv_heads)];
    if rows <= workspace::cuda::FEW_ROWS {
        let (part, parts) = workspace::cuda::key_parts(capacity);
        let mut arguments = vec![at(qkv), at(keys), at(values), at(places), at(first_keys), at(scratch), n(part)];
        arguments.extend(sizes);
        let join = vec![at(scratch), at(out), n(parts), n(shape.heads)];
        return vec![
            launch(unit, "cached_attention_part", parts, 128, arguments)
                .with_grid_yz(shape.heads, sequences * rows)
                .with_shared_floats(part + 1024),
            launch(unit, "cached_attention_join", shape.heads, 128, join).with_grid_yz(sequences * rows, 1),
        ];
    }
    let mut arguments = vec![at(qkv), at(keys), at(values), at(places), at(first_keys), at(out), n(rows)];
    arguments.extend(sizes);
    if on_tensor_cores(real, shape, softcap, &[qkv, keys, values, out]) {
        let tiles = Tiles::new(shape.head_dim, target);
        let unit = Unit::tensor_attention(shape.head_dim, tiles);
        let blocks = rows.div_ceil(TENSOR_QUERIES);
        let grid = launch(unit, "tensor_cached_attention", blocks, TENSOR_THREADS, arguments);
        let grid = grid.with_grid_yz(shape.heads, sequences);
        return vec![grid.with_shared_floats(tensor_tiles(TENSOR_QUERIES + 2 * tiles.cached_keys, shape.head_dim))];
    }
    let grid = launch(unit, "cached_attention", rows.div_ceil(64), 256, arguments).with_grid_yz(shape.heads, sequences);
    vec![grid.with_shared_floats(forward_tiles(shape.head_dim))]
}

/// Returns the launch that copies the keys and values of `rows` tokens from `qkv` to the rows `places` of the caches `keys`
/// and `values`.
pub fn append_cache(
    real: Real,
    qkv: Address,
    places: Address,
    keys: Address,
    values: Address,
    rows: u64,
    shape: Heads,
) -> [Launch; 1] {
    let unit = Unit::new(Family::Attention, real, shape.head_dim);
    let arguments = vec![at(qkv), at(places), at(keys), at(values), n(shape.heads), n(shape.kv_heads)];
    let columns = shape.kv_heads * shape.head_dim;
    [launch(unit, "append_cache", rows, 256, arguments).with_grid_yz(columns.div_ceil(256), 1)]
}

/// Returns the launch that copies `rows` rows of the caches `keys` and `values`, from the rows `from` to the rows `to`.
pub fn copy_cache(
    real: Real,
    [from, to]: [Address; 2],
    keys: Address,
    values: Address,
    rows: u64,
    shape: Heads,
) -> [Launch; 1] {
    let unit = Unit::new(Family::Attention, real, shape.head_dim);
    let arguments = vec![at(from), at(to), at(keys), at(values), n(shape.kv_heads)];
    let columns = shape.kv_heads * shape.head_dim;
    [launch(unit, "copy_cache", rows, 256, arguments).with_grid_yz(columns.div_ceil(256), 1)]
}
