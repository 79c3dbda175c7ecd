//! Causal attention within documents, its gradient, and attention over a cache.
//!
//! Each block of Q queries is combined with the keys it can see, one block of keys at a time; no T × T matrix exists. Scores
//! are stored transposed, [keys, Q]. The queries of a block fill the lanes of vectors, so softmax needs no sums across lanes,
//! and queries are the only operand that must be transposed.
//!
//! Forward (Milakov and Gimelshein, "Online normalizer calculation for softmax"; Dao et al.,
//! "FlashAttention"): S = K·Qᵀ, P = e^(S − max so far), out = rescaled out + Pᵀ·V.
//! Backward, from stats = ln Σ e^S: P = e^(S − stats), dV += P·dO, dP = V·dOᵀ,
//! dS = P · (dP − δ) / √E with δ = Σ out · dO, dK += dS·Q, dQ += dSᵀ·K.
//! With a soft cap c, scores S become c · tanh(S / c), and dS has the factor 1 − (S / c)².
//!
//! In bf16, S and dP are pair products of the stored operands. P, dS and sums over blocks of keys or queries stay in f32 in the
//! workspace, and are rounded once.

use super::Heads;
use super::elementwise::round_to;
use super::product::{Depth, Left, Multiply, QUERIES, Target, add_row_dots, small_product};
use super::simd::{Float, Real, get, get_or, put, strips, vectorized};
use super::softcap::{cap_scaled, cap_slope};
use crate::cpu::pool::{Pool, Shared};
use plimsoll_program::workspace::Kernels;
use plimsoll_program::workspace::cpu::ATTENTION_KEYS;
use std::ops::Range;

/// Number of keys that are processed at once, in a block.
const KEYS: usize = ATTENTION_KEYS as usize;
/// Number of new tokens from which attention over a cache processes queries in blocks. Fewer are processed one by one.
const FEW_TOKENS: usize = 8;

/// Layout of heads in a row of fused queries | keys | values.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    /// Number of query heads H.
    pub heads: usize,
    /// Number of key heads K; there are as many value heads.
    pub kv_heads: usize,
    /// Number of columns of a head, E.
    pub head: usize,
    /// First column of keys: H·E.
    pub keys: usize,
    /// First column of values: (H + K)·E.
    pub values: usize,
    /// Number of all columns, C = (H + 2K)·E.
    pub all: usize,
}

impl Columns {
    /// Returns the layout for these numbers of heads.
    ///
    /// # Panics
    /// Panics if the query heads are no multiple of the key heads.
    pub fn from_heads(shape: Heads) -> Columns {
        let (heads, kv_heads, head) = (shape.heads as usize, shape.kv_heads as usize, shape.head_dim as usize);
        assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads), "{heads} heads over {kv_heads} kv heads");
        Columns {
            heads,
            kv_heads,
            head,
            keys: heads * head,
            values: (heads + kv_heads) * head,
            all: (heads + 2 * kv_heads) * head,
        }
    }
}

/// The keys and values of one head of one sequence.
#[derive(Clone, Copy)]
struct Cache<'a, T> {
    /// The first token's key, and all elements after it; keys begin `row` elements apart.
    keys: &'a [T],
    /// The first token's value, and all elements after it; values begin `row` elements apart.
    values: &'a [T],
    /// Number of elements from one token to the next.
    row: usize,
}

/// The workspace of one thread, split into its parts. Q is `QUERIES`, the largest number of queries in a block. If
/// activations have the wide type, results are summed in the output, and the parts for sums are empty.
struct Scratch<'a, T> {
    /// [E, Q]: the queries, as right-hand operands.
    queries: &'a mut [T],
    /// [E, Q]: the output's gradients, as right-hand operands. Empty in the forward direction.
    douts: &'a mut [T],
    /// [keys, Q]: scores, then probabilities.
    scores: &'a mut [T],
    /// [keys, Q]: the gradients of the scores. Empty in the forward direction.
    dscores: &'a mut [T],
    /// `[Q]`: forward, the largest score of each query so far; backward, the statistics ln Σ e^S of each query.
    largest: &'a mut [T],
    /// `[Q]`: forward, Σ e^(S − max) of each query so far; backward, δ = Σ out · dO of each query.
    sum: &'a mut [T],
    /// `[Q]`: factor that corrects the earlier results of each query when its largest score grows.
    factor: &'a mut [T],
    /// `[Q]`: the first visible key of each query.
    start: &'a mut [T],
    /// [Q, E]: forward, the sums of the outputs; backward, those of the queries' gradients.
    sums: &'a mut [T],
    /// [T, E]: the sums of the gradients of the keys. Empty in the forward direction.
    key_sums: &'a mut [T],
    /// [T, E]: the sums of the gradients of the values. Empty in the forward direction.
    value_sums: &'a mut [T],
}

impl<'a, T> Scratch<'a, T> {
    /// Splits the workspace of one thread for heads of `head` columns and blocks of at most `keys` keys. `tokens` is
    /// the length of the sequence in the backward direction, `None` in the forward direction. `apart` reserves parts
    /// for sums in the wide type.
    fn split(lane: &'a mut [T], head: usize, keys: usize, tokens: Option<usize>, apart: bool) -> Self {
        let gradient = tokens.is_some();
        let twice = |size: usize| if gradient { size } else { 0 };
        let (queries, rest) = lane.split_at_mut(QUERIES * head);
        let (douts, rest) = rest.split_at_mut(twice(QUERIES * head));
        let (scores, rest) = rest.split_at_mut(QUERIES * keys);
        let (dscores, rest) = rest.split_at_mut(twice(QUERIES * keys));
        let (largest, rest) = rest.split_at_mut(QUERIES);
        let (sum, rest) = rest.split_at_mut(QUERIES);
        let (factor, rest) = rest.split_at_mut(QUERIES);
        let (start, rest) = rest.split_at_mut(QUERIES);
        let (sums, rest) = rest.split_at_mut(if apart { QUERIES * head } else { 0 });
        let each = if apart { tokens.unwrap_or(0) * head } else { 0 };
        let (key_sums, rest) = rest.split_at_mut(each);
        let value_sums = &mut rest[..each];
        Scratch { queries, douts, scores, dscores, largest, sum, factor, start, sums, key_sums, value_sums }
    }
}

/// A block of queries: `count` (`<= QUERIES`) of them, the first at key position `first`.
#[derive(Clone, Copy)]
struct Block<'a> {
    first: usize,
    count: usize,
    /// The first visible key of each query; empty if every query sees all keys from 0 on.
    starts: &'a [i32],
}

impl Block<'_> {
    /// Returns the first key that any query of the block sees.
    fn first_visible_key(&self) -> usize {
        self.starts.iter().min().map_or(0, |&start| start as usize)
    }

    /// Writes the first visible key of each query to `start`. Elements beyond the queries of the block become 0: they
    /// see all keys.
    fn first_visible_keys<T: Float>(&self, start: &mut [T]) {
        start.fill(T::ZERO);
        for (lane, &value) in start.iter_mut().zip(self.starts) {
            *lane = T::from_f64(f64::from(value));
        }
    }

    /// Sets `scores[keys, Q]`, of the keys from `from` on, to −∞ where the query does not see the key. Only keys before
    /// the start of some query's document, and keys from the block's first query on, can be hidden.
    fn hide_keys<T: Float>(&self, scores: &mut [T], from: usize, start: &[T]) {
        let keys = scores.len() / QUERIES;
        let last_start = self.starts.iter().max().map_or(0, |&start| start as usize);
        let begun = last_start.saturating_sub(from).min(keys);
        let diagonal = (self.first + 1).saturating_sub(from).clamp(begun, keys);
        hide_keys(&mut scores[..begun * QUERIES], from, self.first, start);
        hide_keys(&mut scores[diagonal * QUERIES..], from + diagonal, self.first, start);
    }
}

impl Block<'_> {
    /// Returns the range of keys, counted from `from`, that query i of the block may see: 0 ..= first + i − from.
    fn visible_keys(&self, from: usize) -> Depth {
        if from <= self.first { Depth::To(self.first - from) } else { Depth::Whole }
    }

    /// Returns the range of queries of the block that may see the key `from` + j: those from query `from` + j − first
    /// on.
    fn visible_queries(&self, from: usize) -> Depth {
        if from <= self.first { Depth::From(self.first - from) } else { Depth::Whole }
    }

    /// Computes `to[keys, Q]` = `rows[keys, E]` · `right[E, Q]`, for the keys from `from` on. For keys that the first
    /// half of the queries cannot see, that half is set to zero instead.
    fn scores<T: Multiply>(
        &self,
        from: usize,
        keys: usize,
        head: usize,
        rows: *const T,
        row: usize,
        right: &[T::Wide],
        to: &mut [T::Wide],
    ) {
        const HALF: usize = QUERIES / 2;
        let all_visible = (self.first + HALF).saturating_sub(from).min(keys);
        let target = Target::new(to.as_mut_ptr(), QUERIES, false);
        T::score(all_visible, QUERIES, head, rows, row, right.as_ptr(), target);
        for scores in to[all_visible * QUERIES..keys * QUERIES].chunks_exact_mut(QUERIES) {
            scores[..HALF].fill(T::Wide::ZERO);
        }
        let (rows, target) = (rows.wrapping_add(all_visible * row), &mut to[all_visible * QUERIES..]);
        if all_visible < keys {
            let target = Target::new(target[HALF..].as_mut_ptr(), QUERIES, false);
            T::score(keys - all_visible, HALF, head, rows, row, right[HALF..].as_ptr(), target);
        }
    }
}

/// Computes `out[N, H·E]` and `stats[B, H, T]` (log-sum-exp of the scaled scores) of `qkv[N, C]` in sequences of
/// `sequence` tokens: query i of a sequence sees its keys `document_start[i]..=i`. Scores are limited to ±`softcap`.
/// `scratch` has `workspace::cpu::attention` elements.
pub fn attention<T: Multiply>(
    pool: &Pool,
    shape: Heads,
    softcap: Option<f64>,
    sequence: usize,
    qkv: &[T],
    document_start: &[i32],
    out: &mut [T],
    stats: &mut [T::Wide],
    scratch: &mut [T::Wide],
) {
    let c = Columns::from_heads(shape);
    let rows = document_start.len();
    assert!(sequence > 0 && rows.is_multiple_of(sequence) && qkv.len() == rows * c.all);
    assert!(out.len() == rows * c.keys && stats.len() == rows * c.heads);
    let keys = sequence.min(KEYS);
    let lane_size = Kernels::Cpu { threads: 1 }.attention_workspace(T::DTYPE, sequence as u64, shape) as usize;
    let scratch = Shared::new(&mut scratch[..pool.threads() * lane_size]);
    let (out, stats) = (Shared::new(out), Shared::new(stats));
    let blocks = sequence.div_ceil(QUERIES);
    // Blocks of the same head are adjacent, so that its keys stay in the cache. Late blocks, which
    // see the most keys, come first.
    pool.run(rows / sequence * c.heads * blocks, |task, lane| {
        let (unit, block) = (task / blocks, blocks - 1 - task % blocks);
        let (b, head) = (unit / c.heads, unit % c.heads);
        let kv = head / (c.heads / c.kv_heads);
        let first = block * QUERIES;
        let count = QUERIES.min(sequence - first);
        let row = b * sequence + first;
        // SAFETY: lanes have disjoint parts.
        let lane = unsafe { scratch.part(lane * lane_size..(lane + 1) * lane_size) };
        // SAFETY: tasks have disjoint queries.
        let stats = unsafe { stats.part(unit * sequence + first..unit * sequence + first + count) };
        let sequence_qkv = &qkv[b * sequence * c.all..(b + 1) * sequence * c.all];
        // SAFETY: inside the output; only this task writes these rows and columns.
        let to = unsafe { out.start().add(row * c.keys + head * c.head) };
        forward(
            Block { first, count, starts: &document_start[row..row + count] },
            &qkv[row * c.all + head * c.head..],
            c.all,
            Cache {
                keys: &sequence_qkv[c.keys + kv * c.head..],
                values: &sequence_qkv[c.values + kv * c.head..],
                row: c.all,
            },
            (c.head, softcap),
            (to, c.keys),
            Some(stats),
            Scratch::split(lane, c.head, keys, None, !T::IS_WIDE),
        );
    });
}

/// Computes the output of one block of queries of one head, and their statistics unless `stats` is `None`. `queries`
/// begins with the block's first query; queries are `query_row` elements apart. `out` is the address of the first
/// result, and `out_row` its row stride.
fn forward<T: Multiply>(
    block: Block,
    queries: &[T],
    query_row: usize,
    cache: Cache<T>,
    (head, softcap): (usize, Option<f64>),
    (out, out_row): (*mut T, usize),
    stats: Option<&mut [T::Wide]>,
    s: Scratch<T::Wide>,
) {
    let count = block.count;
    let (sums, sums_row) = if T::IS_WIDE { (out.cast(), out_row) } else { (s.sums.as_mut_ptr(), head) };
    T::pack_right_operand(queries, query_row, count, head, inverse_sqrt(head), s.queries);
    let rest = T::remaining_scale(inverse_sqrt(head));
    block.first_visible_keys(s.start);
    s.largest.fill(T::Wide::LOWEST);
    s.sum.fill(T::Wide::ZERO);
    let (first_visible_key, end) = (block.first_visible_key(), block.first + count);
    let mut from = first_visible_key;
    while from < end {
        let keys = (end - from).min(s.scores.len() / QUERIES);
        let k = &cache.keys[from * cache.row..(from + keys - 1) * cache.row + head];
        let v = &cache.values[from * cache.row..(from + keys - 1) * cache.row + head];
        block.scores(from, keys, head, k.as_ptr(), cache.row, s.queries, s.scores);
        let scores = &mut s.scores[..keys * QUERIES];
        let rest = cap_scores(scores, rest, softcap);
        block.hide_keys(scores, from, s.start);
        online_softmax(scores, rest, s.largest, s.sum, s.factor);
        if from > first_visible_key {
            scale_rows(sums, sums_row, count, head, s.factor);
        }
        let to = Target::new(sums, sums_row, from > first_visible_key);
        let (depth, p) = (block.visible_keys(from), Left::columns(scores.as_ptr(), QUERIES));
        small_product::<T::Wide, T>(count, head, keys, depth, p, v.as_ptr(), cache.row, to);
        from += keys;
    }
    for (factor, sum) in s.factor.iter_mut().zip(&*s.sum) {
        *factor = T::Wide::ONE / *sum;
    }
    scale_rows(sums, sums_row, count, head, s.factor);
    if !T::IS_WIDE {
        round_rows(s.sums, count, head, out, out_row);
    }
    if let Some(stats) = stats {
        for (lane, to) in stats.iter_mut().enumerate() {
            *to = s.largest[lane] + s.sum[lane].ln();
        }
    }
}

/// Computes the gradient of `attention`: all of `dqkv[N, C]`, from the inputs and outputs of `attention` and
/// `dout[N, H·E]`. `scratch` has `workspace::cpu::attention_grad` elements.
pub fn attention_grad<T: Multiply>(
    pool: &Pool,
    shape: Heads,
    softcap: Option<f64>,
    sequence: usize,
    qkv: &[T],
    out: &[T],
    dout: &[T],
    stats: &[T::Wide],
    document_start: &[i32],
    dqkv: &mut [T],
    scratch: &mut [T::Wide],
) {
    let c = Columns::from_heads(shape);
    let rows = document_start.len();
    assert!(sequence > 0 && rows.is_multiple_of(sequence) && qkv.len() == rows * c.all && dqkv.len() == rows * c.all);
    assert!(out.len() == rows * c.keys && dout.len() == rows * c.keys && stats.len() == rows * c.heads);
    let keys = sequence.min(KEYS);
    let lane_size = Kernels::Cpu { threads: 1 }.attention_grad_workspace(T::DTYPE, 1, sequence as u64, shape) as usize;
    let scratch = Shared::new(&mut scratch[..pool.threads() * lane_size]);
    let dqkv = Shared::new(dqkv);
    let group = c.heads / c.kv_heads;
    // A task is a kv head of a sequence with all its query heads, so their sums have one order.
    pool.run(rows / sequence * c.kv_heads, |task, lane| {
        let (b, kv) = (task / c.kv_heads, task % c.kv_heads);
        // SAFETY: lanes have disjoint parts.
        let lane = unsafe { scratch.part(lane * lane_size..(lane + 1) * lane_size) };
        let mut s = Scratch::split(lane, c.head, keys, Some(sequence), !T::IS_WIDE);
        s.key_sums.fill(T::Wide::ZERO);
        s.value_sums.fill(T::Wide::ZERO);
        let first_row = b * sequence;
        let at = |row: usize, column: usize| (first_row + row) * c.all + column;
        let (k_column, v_column) = (c.keys + kv * c.head, c.values + kv * c.head);
        if T::IS_WIDE {
            for row in 0..sequence {
                for column in [k_column, v_column] {
                    // SAFETY: only this task accesses the sums of this head and sequence.
                    unsafe { dqkv.part(at(row, column)..at(row, column) + c.head) }.fill(T::ZERO);
                }
            }
        }
        for head in kv * group..(kv + 1) * group {
            for first in (0..sequence).step_by(QUERIES) {
                let count = QUERIES.min(sequence - first);
                let row = first_row + first;
                let q = at(first, head * c.head);
                let o = row * c.keys + head * c.head;
                // SAFETY: inside dqkv; only this task writes these columns of this sequence's rows.
                let (dq, dk, dv) = unsafe {
                    let start = dqkv.start();
                    (start.add(q), start.add(at(0, k_column)), start.add(at(0, v_column)))
                };
                backward(
                    Block { first, count, starts: &document_start[row..row + count] },
                    (&c, softcap),
                    &qkv[q..],
                    Cache { keys: &qkv[at(0, k_column)..], values: &qkv[at(0, v_column)..], row: c.all },
                    &out[o..],
                    &dout[o..],
                    &stats[(b * c.heads + head) * sequence + first..][..count],
                    [dq, dk, dv],
                    &mut s,
                );
            }
        }
        if !T::IS_WIDE {
            for (sums, column) in [(&s.key_sums, k_column), (&s.value_sums, v_column)] {
                // SAFETY: inside dqkv; only this task writes these columns of this sequence's rows.
                let to = unsafe { dqkv.start().add(at(0, column)) };
                round_rows(sums, sequence, c.head, to, c.all);
            }
        }
    });
}

/// Computes the gradients of one block of queries of one head. Writes the gradient of the queries, and adds to those of
/// keys and values. If activations do not have the wide type, adds to the sums in `s` instead.
fn backward<T: Multiply>(
    block: Block,
    (c, softcap): (&Columns, Option<f64>),
    queries: &[T],
    cache: Cache<T>,
    out: &[T],
    dout: &[T],
    stats: &[T::Wide],
    [dq, dk, dv]: [*mut T; 3],
    s: &mut Scratch<T::Wide>,
) {
    let (count, head) = (block.count, c.head);
    let [(q_sums, q_row), (k_sums, k_row), (v_sums, v_row)] = if T::IS_WIDE {
        [dq, dk, dv].map(|to| (to.cast::<T::Wide>(), c.all))
    } else {
        [&mut *s.sums, &mut *s.key_sums, &mut *s.value_sums].map(|sums| (sums.as_mut_ptr(), head))
    };
    T::pack_right_operand(queries, c.all, count, head, inverse_sqrt(head), s.queries);
    T::pack_right_operand(dout, c.keys, count, head, T::Wide::ONE, s.douts);
    let rest = T::remaining_scale(inverse_sqrt(head));
    block.first_visible_keys(s.start);
    s.largest.fill(T::Wide::ZERO);
    s.largest[..count].copy_from_slice(stats);
    s.sum.fill(T::Wide::ZERO);
    for (lane, delta) in s.sum[..count].iter_mut().enumerate() {
        *delta = dot(&out[lane * c.keys..][..head], &dout[lane * c.keys..][..head]);
    }
    let (first_visible_key, end) = (block.first_visible_key(), block.first + count);
    let mut from = first_visible_key;
    while from < end {
        let keys = (end - from).min(s.scores.len() / QUERIES);
        let rows = from * cache.row..(from + keys - 1) * cache.row + head;
        let k = cache.keys[rows.clone()].as_ptr();
        let v = cache.values[rows].as_ptr();
        block.scores(from, keys, head, k, cache.row, s.queries, s.scores);
        block.scores(from, keys, head, v, cache.row, s.douts, s.dscores);
        let (p, ds) = (&mut s.scores[..keys * QUERIES], &mut s.dscores[..keys * QUERIES]);
        let rest = cap_scores(p, rest, softcap);
        block.hide_keys(p, from, s.start);
        let inverse_cap = softcap.map(|cap| T::Wide::from_f64(cap.recip()));
        score_gradients(p, rest, inverse_cap, ds, s.largest, s.sum, inverse_sqrt(head));
        // SAFETY: rows from.. of the sums are inside them.
        let (dk, dv) = unsafe { (k_sums.add(from * k_row), v_sums.add(from * v_row)) };
        let (depth, rows) = (block.visible_queries(from), |x: &[T::Wide]| Left::rows(x.as_ptr(), QUERIES));
        small_product::<T::Wide, T>(
            keys,
            head,
            count,
            depth,
            rows(p),
            dout.as_ptr(),
            c.keys,
            Target::new(dv, v_row, true),
        );
        let to = Target::new(dk, k_row, true);
        small_product::<T::Wide, T>(keys, head, count, depth, rows(ds), queries.as_ptr(), c.all, to);
        let (depth, to) = (block.visible_keys(from), Target::new(q_sums, q_row, from > first_visible_key));
        small_product::<T::Wide, T>(count, head, keys, depth, Left::columns(ds.as_ptr(), QUERIES), k, cache.row, to);
        from += keys;
    }
    if !T::IS_WIDE {
        round_rows(s.sums, count, head, dq, c.all);
    }
}

/// Copies the keys and values of the n tokens in `qkv[n, C]` to the rows `places[n]` of the caches `keys[P, K·E]` and
/// `values[P, K·E]`.
pub fn append_cache<T: Real>(shape: Heads, qkv: &[T], places: &[i32], keys: &mut [T], values: &mut [T]) {
    let c = Columns::from_heads(shape);
    let width = c.kv_heads * c.head;
    for (row, &place) in qkv.chunks_exact(c.all).zip(places) {
        let to = place as usize * width..(place as usize + 1) * width;
        keys[to.clone()].copy_from_slice(&row[c.keys..c.values]);
        values[to].copy_from_slice(&row[c.values..]);
    }
}

/// Copies rows of the caches `keys[P, K·E]` and `values[P, K·E]`: row `from[i]` to row `to[i]`, unless that is negative.
pub fn copy_cache<T: Real>(shape: Heads, from: &[i32], to: &[i32], keys: &mut [T], values: &mut [T]) {
    let c = Columns::from_heads(shape);
    let width = c.kv_heads * c.head;
    for (&from, &to) in from.iter().zip(to).filter(|(_, to)| **to >= 0) {
        let (from, to) = (from as usize * width, to as usize * width);
        keys.copy_within(from..from + width, to);
        values.copy_within(from..from + width, to);
    }
}

/// Moves positions: `out[N]` = document_start + max(0, positions + shift). With a shift of 1 − window, this is the first
/// key that each token sees through a sliding window. Without `document_start`, all documents start at 0.
pub fn shift_positions(positions: &[i32], document_start: Option<&[i32]>, shift: i32, out: &mut [i32]) {
    for (row, (moved, &position)) in out.iter_mut().zip(positions).enumerate() {
        let start = document_start.map_or(0, |starts| starts[row]);
        *moved = start + (position + shift).max(0);
    }
}

/// Computes `out[n, H·E]`: attention of the n new tokens in `qkv[n, C]` over all keys in their cache up to their own.
/// `keys` and `values` [P, K·E] hold caches of `capacity` tokens one after another, which already contain the new tokens
/// in the rows `places[n]`. The n tokens are those of `sequences` sequences, equally many of each, at consecutive places.
/// New token i sees the keys of its cache from `first_keys[i]` on; an empty list stands for zeros. `scratch` has
/// `workspace::cpu::cached_attention` elements.
pub fn cached_attention<T: Multiply>(
    pool: &Pool,
    shape: Heads,
    softcap: Option<f64>,
    qkv: &[T],
    [keys, values]: [&[T]; 2],
    places: &[i32],
    (sequences, capacity): (usize, usize),
    first_keys: &[i32],
    out: &mut [T],
    scratch: &mut [T::Wide],
) {
    let c = Columns::from_heads(shape);
    let (rows, width) = (qkv.len() / c.all / sequences, c.kv_heads * c.head);
    assert!(values.len() == keys.len() && places.len() == sequences * rows && out.len() == places.len() * c.keys);
    let one = Kernels::Cpu { threads: 1 };
    let lane_size = one.cached_attention_workspace(T::DTYPE, 1, rows as u64, capacity as u64, shape) as usize;
    let scratch = Shared::new(&mut scratch[..pool.threads() * lane_size]);
    let out = Shared::new(out);
    let each = if rows < FEW_TOKENS { 1 } else { QUERIES };
    let blocks = rows.div_ceil(each);
    pool.run(sequences * c.heads * blocks, |task, lane| {
        let (head, block) = (task % c.heads, task / c.heads);
        let (sequence, first) = (block / blocks, block % blocks * each);
        let count = each.min(rows - first);
        let kv = head / (c.heads / c.kv_heads);
        let place = places[sequence * rows] as usize;
        let (slot, start) = (place / capacity, place % capacity);
        assert!(start + rows <= capacity);
        let [keys, values] = [keys, values].map(|all| &all[slot * capacity * width..(slot + 1) * capacity * width]);
        // SAFETY: lanes have disjoint parts.
        let lane = unsafe { scratch.part(lane * lane_size..(lane + 1) * lane_size) };
        let row = sequence * rows + first;
        let queries = &qkv[row * c.all + head * c.head..];
        let cache = Cache { keys: &keys[kv * c.head..], values: &values[kv * c.head..], row: width };
        let at = row * c.keys + head * c.head;
        if rows < FEW_TOKENS {
            // SAFETY: each task processes a different head of a token.
            let to = unsafe { out.part(at..at + c.head) };
            let s = Scratch::split(lane, c.head, capacity.min(KEYS), None, !T::IS_WIDE);
            let from = first_keys.get(row).map_or(0, |&key| key as usize);
            one_query(&queries[..c.head], softcap, cache, from..start + first + 1, to, s);
        } else {
            // SAFETY: inside the output; tasks write disjoint rows and columns.
            let to = unsafe { out.start().add(at) };
            let starts = first_keys.get(row..row + count).unwrap_or(&[]);
            let block = Block { first: start + first, count, starts };
            let s = Scratch::split(lane, c.head, capacity.min(KEYS), None, !T::IS_WIDE);
            forward(block, queries, c.all, cache, (c.head, softcap), (to, c.keys), None, s);
        }
    });
}

/// Computes attention of one query over the keys `seen` of `cache`, and writes it to `out[E]`.
fn one_query<T: Real>(
    query: &[T],
    softcap: Option<f64>,
    cache: Cache<T>,
    seen: Range<usize>,
    out: &mut [T],
    s: Scratch<T::Wide>,
) {
    let head = query.len();
    let scale = inverse_sqrt::<T::Wide>(head);
    let (mut largest, mut sum) = (T::Wide::LOWEST, T::Wide::ZERO);
    let sums = if T::IS_WIDE { bytemuck::cast_slice_mut(out) } else { &mut s.sums[..head] };
    sums.fill(T::Wide::ZERO);
    let mut from = seen.start;
    while from < seen.end {
        let keys = (seen.end - from).min(s.scores.len());
        let scores = &mut s.scores[..keys];
        scores.fill(T::Wide::ZERO);
        add_row_dots(query, &cache.keys[from * cache.row..], cache.row, scores);
        multiply(scores, scale);
        cap_scores(scores, T::Wide::ONE, softcap);
        let new = scores.iter().fold(largest, |most, &score| if score > most { score } else { most });
        let factor = (largest - new).exp();
        multiply(sums, factor);
        sum = sum * factor + exponentiate(scores, new);
        largest = new;
        let values = &cache.values[from * cache.row..(from + keys - 1) * cache.row + head];
        let to = Target::new(sums.as_mut_ptr(), head, true);
        let p = Left::rows(scores.as_ptr(), keys);
        small_product::<T::Wide, T>(1, head, keys, Depth::Whole, p, values.as_ptr(), cache.row, to);
        from += keys;
    }
    multiply(sums, T::Wide::ONE / sum);
    if !T::IS_WIDE {
        round_rows(s.sums, 1, head, out.as_mut_ptr(), head);
    }
}

/// Limits scores that still need the factor `rest` to ±`softcap`, and returns the factor that they need then. Without a
/// cap they stay as they are.
fn cap_scores<T: Float>(scores: &mut [T], rest: T, softcap: Option<f64>) -> T {
    let Some(cap) = softcap else { return rest };
    cap_scaled(scores, rest, T::from_f64(cap));
    T::ONE
}

/// Returns 1 / √`head`, the scale of the scores of a head with `head` columns.
fn inverse_sqrt<T: Float>(head: usize) -> T {
    T::ONE / T::from_f64(head as f64).sqrt()
}

vectorized! {
    /// Returns a · b; both have the same length.
    fn dot<T, V>(a: &[T], b: &[T]) -> T::Wide {
        let mut sum = V::splat(T::Wide::ZERO);
        strips::<T, V>(a.len(), #[inline(always)] |at, count| {
            sum = get::<T, V>(a, at, count).mul_add(get::<T, V>(b, at, count), sum);
        });
        sum.sum()
    }
}

vectorized! {
    /// Multiplies all elements of `x` by `factor`.
    fn multiply<T: Float, V>(x: &mut [T], factor: T) {
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let value: V = get(x, at, count);
            put(x, at, count, value * V::splat(factor));
        });
    }
}

vectorized! {
    /// Replaces each x by e^(x − largest), and returns their sum.
    fn exponentiate<T: Float, V>(x: &mut [T], largest: T) -> T {
        let mut sum = V::splat(T::ZERO);
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let value = (get_or(x, at, count, V::splat(T::MINUS_INFINITY)) - V::splat(largest)).exp();
            sum = sum + value;
            put(x, at, count, value);
        });
        sum.sum()
    }
}

vectorized! {
    /// Sets the element of `scores[keys, Q]` of key j (from `from` on) and query i (from `first` on) to −∞, unless the
    /// query sees the key: the query's `start` <= j <= i.
    fn hide_keys<T: Float, V>(scores: &mut [T], from: usize, first: usize, start: &[T]) {
        let hidden = V::splat(T::MINUS_INFINITY);
        let mut places = [T::ZERO; QUERIES];
        for (lane, place) in places.iter_mut().enumerate() {
            *place = T::from_f64((first + lane) as f64);
        }
        for (j, row) in scores.chunks_exact_mut(QUERIES).enumerate() {
            let key = V::splat(T::from_f64((from + j) as f64));
            strips::<T, V>(QUERIES, #[inline(always)] |at, count| {
                let score = key.select_le(get(&places, at, count), get(row, at, count), hidden);
                put(row, at, count, get::<T, V>(start, at, count).select_le(key, score, hidden));
            });
        }
    }
}

vectorized! {
    /// Replaces each score s in `scores[keys, Q]` by e^(rest · s − largest); `rest` is the scale that the scores still
    /// lack. Before that, raises `largest` to the largest scaled score of each query so far, and sets `factor` to the
    /// resulting correction of earlier results. Corrects `sum`, and adds the new results of each query to it.
    fn online_softmax<T: Float, V>(scores: &mut [T], rest: T, largest: &mut [T], sum: &mut [T], factor: &mut [T]) {
        let rest = V::splat(rest);
        strips::<T, V>(QUERIES, #[inline(always)] |at, count| {
            let old: V = get(largest, at, count);
            let mut new = V::splat(T::LOWEST);
            for row in scores.chunks_exact(QUERIES) {
                new = get::<T, V>(row, at, count).max(new);
            }
            let new = (new * rest).max(old);
            let minus = V::splat(T::ZERO) - new;
            let scale = (old - new).exp();
            let mut total = get::<T, V>(sum, at, count) * scale;
            for row in scores.chunks_exact_mut(QUERIES) {
                let p = get::<T, V>(row, at, count).mul_add(rest, minus).exp();
                total = total + p;
                put(row, at, count, p);
            }
            put(largest, at, count, new);
            put(sum, at, count, total);
            put(factor, at, count, scale);
        });
    }
}

vectorized! {
    /// Replaces `p[keys, Q]`, scores that still need the factor `rest`, by probabilities P = e^(S − stats). Replaces
    /// `ds[keys, Q]`, the gradients dP of the probabilities, by those of the scores: dS = P · (dP − delta) · scale, times
    /// the derivative of the cap if there is one.
    fn score_gradients<T: Float, V>(
        p: &mut [T],
        rest: T,
        inverse_cap: Option<T>,
        ds: &mut [T],
        stats: &[T],
        delta: &[T],
        scale: T
    ) {
        let (rest, scale) = (V::splat(rest), V::splat(scale));
        for (p, ds) in p.chunks_exact_mut(QUERIES).zip(ds.chunks_exact_mut(QUERIES)) {
            strips::<T, V>(QUERIES, #[inline(always)] |at, count| {
                let minus = V::splat(T::ZERO) - get(stats, at, count);
                let score = get::<T, V>(p, at, count);
                let probability = score.mul_add(rest, minus).exp();
                put(p, at, count, probability);
                let mut d = probability * (get::<T, V>(ds, at, count) - get(delta, at, count)) * scale;
                if let Some(inverse_cap) = inverse_cap {
                    d = d * cap_slope::<T, V>(score, V::splat(inverse_cap));
                }
                put(ds, at, count, d);
            });
        }
    }
}

/// Multiplies each of the `count` rows of `out[count, head]` by its element of `factor`. Rows are `out_row` elements
/// apart.
fn scale_rows<T: Float>(out: *mut T, out_row: usize, count: usize, head: usize, factor: &[T]) {
    for (lane, &factor) in factor[..count].iter().enumerate() {
        // SAFETY: `out` is the block's exclusive part of the output: count rows of `head` elements.
        multiply(unsafe { std::slice::from_raw_parts_mut(out.add(lane * out_row), head) }, factor);
    }
}

/// Rounds the first `count` rows of `sums`, of `head` elements each, into rows of `to` with stride `to_row`.
fn round_rows<T: Real>(sums: &[T::Wide], count: usize, head: usize, to: *mut T, to_row: usize) {
    for (row, sums) in sums.chunks_exact(head).take(count).enumerate() {
        // SAFETY: `to` is the caller's exclusive part of a result: count rows of `head` elements.
        round_to(sums, unsafe { std::slice::from_raw_parts_mut(to.add(row * to_row), head) });
    }
}
