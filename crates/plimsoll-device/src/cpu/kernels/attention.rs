//! Causal attention within documents, its gradient, and attention over a cache.
//!
//! A block of Q queries meets the keys it can see, a block at a time; no T × T matrix exists. The
//! scores stand transposed, [keys, Q]: queries lie side by side in the lanes of vectors, so that
//! softmax needs no sums across lanes, and queries are the only operand that must be transposed.
//!
//! Forward (Milakov and Gimelshein, "Online normalizer calculation for softmax"; Dao et al.,
//! "FlashAttention"): S = K·Qᵀ, P = e^(S − max so far), out = rescaled out + Pᵀ·V.
//! Backward, from stats = ln Σ e^S: P = e^(S − stats), dV += P·dO, dP = V·dOᵀ,
//! dS = P · (dP − δ) / √E with δ = Σ out · dO, dK += dS·Q, dQ += dSᵀ·K.

use super::Heads;
use super::product::{Depth, FEW_ROWS, Left, Target, dots_1, small_product};
use super::simd::{Real, get, get_or, put, strips, transpose, vectorised};
use crate::cpu::pool::{Pool, Shared};
use plimsoll_program::workspace;
use plimsoll_program::workspace::cpu::{ATTENTION_KEYS, ATTENTION_QUERIES};

/// Queries in a block.
const QUERIES: usize = ATTENTION_QUERIES as usize;
/// Keys in a block.
const KEYS: usize = ATTENTION_KEYS as usize;
/// Fewer new tokens than this meet the cache one by one.
const FEW: usize = 8;

/// Where heads lie in a row of queries | keys | values.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    /// H
    pub heads: usize,
    /// K
    pub kv_heads: usize,
    /// E
    pub head: usize,
    /// Where keys begin: H·E.
    pub keys: usize,
    /// Where values begin: (H + K)·E.
    pub values: usize,
    /// C
    pub all: usize,
}

impl Columns {
    pub fn of(shape: Heads) -> Columns {
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
    /// From the head's first key on.
    keys: &'a [T],
    /// From the head's first value on.
    values: &'a [T],
    /// Elements from one token to the next.
    row: usize,
}

/// A lane's scratch, cut up.
struct Scratch<'a, T> {
    /// [E, Q]: the queries, transposed and scaled.
    queries: &'a mut [T],
    /// [E, Q]: the output's gradients, transposed. Empty in the forward direction.
    douts: &'a mut [T],
    /// [keys, Q]: scores, then probabilities.
    scores: &'a mut [T],
    /// [keys, Q]: the gradients of the scores. Empty in the forward direction.
    dscores: &'a mut [T],
    /// `[Q]` each: the largest score or the statistics; the sum or δ; a factor; the first visible key.
    largest: &'a mut [T],
    sum: &'a mut [T],
    factor: &'a mut [T],
    start: &'a mut [T],
}

impl<'a, T> Scratch<'a, T> {
    fn cut(lane: &'a mut [T], head: usize, keys: usize, gradient: bool) -> Self {
        let twice = |size: usize| if gradient { size } else { 0 };
        let (queries, rest) = lane.split_at_mut(QUERIES * head);
        let (douts, rest) = rest.split_at_mut(twice(QUERIES * head));
        let (scores, rest) = rest.split_at_mut(QUERIES * keys);
        let (dscores, rest) = rest.split_at_mut(twice(QUERIES * keys));
        let (largest, rest) = rest.split_at_mut(QUERIES);
        let (sum, rest) = rest.split_at_mut(QUERIES);
        let (factor, rest) = rest.split_at_mut(QUERIES);
        Scratch { queries, douts, scores, dscores, largest, sum, factor, start: &mut rest[..QUERIES] }
    }
}

/// A block of queries: `count` (`<= QUERIES`) of them, the first at key position `first`.
#[derive(Clone, Copy)]
struct Block<'a> {
    first: usize,
    count: usize,
    /// The first visible key of each; empty: all keys from 0.
    starts: &'a [i32],
}

impl Block<'_> {
    /// The first key that any query sees.
    fn least(&self) -> usize {
        self.starts.iter().min().map_or(0, |&start| start as usize)
    }

    /// The first visible keys into lanes; lanes beyond `count` see everything.
    fn lanes<T: Real>(&self, start: &mut [T]) {
        start.fill(T::ZERO);
        for (lane, &value) in start.iter_mut().zip(self.starts) {
            *lane = T::of(f64::from(value));
        }
    }

    /// Scores [keys, Q] of the keys from `from` on become −∞ where the query does not see the key.
    /// Only keys before some document's start, and those on the diagonal, need a look.
    fn hide<T: Real>(&self, scores: &mut [T], from: usize, start: &[T]) {
        let keys = scores.len() / QUERIES;
        let last_start = self.starts.iter().max().map_or(0, |&start| start as usize);
        let begun = last_start.saturating_sub(from).min(keys);
        let diagonal = (self.first + 1).saturating_sub(from).clamp(begun, keys);
        hide(&mut scores[..begun * QUERIES], from, self.first, start);
        hide(&mut scores[diagonal * QUERIES..], from + diagonal, self.first, start);
    }
}

impl Block<'_> {
    /// Of the keys from `from` on, those that query i of the block may see: 0 ..= first + i − from.
    fn keys_of_query(&self, from: usize) -> Depth {
        if from <= self.first { Depth::To(self.first - from) } else { Depth::Whole }
    }

    /// The queries of the block that may see key j from `from` on: from + j − first ...
    fn queries_of_key(&self, from: usize) -> Depth {
        if from <= self.first { Depth::From(self.first - from) } else { Depth::Whole }
    }

    /// `to[keys, Q]` = the rows from key `from` on · `right[E, Q]`. Where the diagonal leaves the first
    /// half of the lanes nothing to see, that half is not computed but becomes zeros.
    fn scores<T: Real>(
        &self,
        from: usize,
        keys: usize,
        head: usize,
        rows: *const T,
        row: usize,
        right: &[T],
        to: &mut [T],
    ) {
        const HALF: usize = QUERIES / 2;
        let whole = (self.first + HALF).saturating_sub(from).min(keys);
        let target = Target::new(to.as_mut_ptr(), QUERIES, false);
        small_product(whole, QUERIES, head, Depth::Whole, Left::rows(rows, row), right.as_ptr(), QUERIES, target);
        for scores in to[whole * QUERIES..keys * QUERIES].chunks_exact_mut(QUERIES) {
            scores[..HALF].fill(T::ZERO);
        }
        let (rows, target) = (rows.wrapping_add(whole * row), &mut to[whole * QUERIES..]);
        if whole < keys {
            let target = Target::new(target[HALF..].as_mut_ptr(), QUERIES, false);
            let right = right[HALF..].as_ptr();
            small_product(keys - whole, HALF, head, Depth::Whole, Left::rows(rows, row), right, QUERIES, target);
        }
    }
}

/// `out[N, H·E]` and `stats[B, H, T]` (log-sum-exp of the scaled scores) of `qkv[N, C]` in sequences of
/// `sequence` tokens: query i of a sequence sees its keys `document_start[i]..=i`. `scratch` has
/// `workspace::cpu::attention` elements.
pub fn attention<T: Real>(
    pool: &Pool,
    shape: Heads,
    sequence: usize,
    qkv: &[T],
    document_start: &[i32],
    out: &mut [T],
    stats: &mut [T],
    scratch: &mut [T],
) {
    let c = Columns::of(shape);
    let rows = document_start.len();
    assert!(sequence > 0 && rows.is_multiple_of(sequence) && qkv.len() == rows * c.all);
    assert!(out.len() == rows * c.keys && stats.len() == rows * c.heads);
    let keys = sequence.min(KEYS);
    let lane_size = workspace::cpu::attention(1, sequence as u64, c.head as u64) as usize;
    let scratch = Shared::new(&mut scratch[..pool.threads() * lane_size]);
    let (out, stats) = (Shared::new(out), Shared::new(stats));
    let blocks = sequence.div_ceil(QUERIES);
    // The blocks of a head follow each other, so that its keys stay in the cache; late ones, which
    // see the most keys, come first.
    pool.run(rows / sequence * c.heads * blocks, |task, lane| {
        let (unit, block) = (task / blocks, blocks - 1 - task % blocks);
        let (b, head) = (unit / c.heads, unit % c.heads);
        let kv = head / (c.heads / c.kv_heads);
        let first = block * QUERIES;
        let count = QUERIES.min(sequence - first);
        let row = b * sequence + first;
        // SAFETY: each lane has its own part.
        let lane = unsafe { scratch.part(lane * lane_size..(lane + 1) * lane_size) };
        // SAFETY: each task has queries of its own.
        let stats = unsafe { stats.part(unit * sequence + first..unit * sequence + first + count) };
        let of_sequence = &qkv[b * sequence * c.all..(b + 1) * sequence * c.all];
        // SAFETY: inside the output, whose rows × columns are this task's own.
        let to = unsafe { out.start().add(row * c.keys + head * c.head) };
        forward(
            Block { first, count, starts: &document_start[row..row + count] },
            &qkv[row * c.all + head * c.head..],
            c.all,
            Cache {
                keys: &of_sequence[c.keys + kv * c.head..],
                values: &of_sequence[c.values + kv * c.head..],
                row: c.all,
            },
            c.head,
            (to, c.keys),
            Some(stats),
            Scratch::cut(lane, c.head, keys, false),
        );
    });
}

/// The output of one block of queries of one head. `queries` starts at the block's first query,
/// rows are `query_row` apart; `out` is where the first result goes, and how far rows are apart.
fn forward<T: Real>(
    block: Block,
    queries: &[T],
    query_row: usize,
    cache: Cache<T>,
    head: usize,
    (out, out_row): (*mut T, usize),
    stats: Option<&mut [T]>,
    s: Scratch<T>,
) {
    let count = block.count;
    lay_out(queries, query_row, count, head, scale_of(head), s.queries);
    block.lanes(s.start);
    s.largest.fill(T::LOWEST);
    s.sum.fill(T::ZERO);
    let (least, end) = (block.least(), block.first + count);
    let mut from = least;
    while from < end {
        let keys = (end - from).min(s.scores.len() / QUERIES);
        let k = &cache.keys[from * cache.row..(from + keys - 1) * cache.row + head];
        let v = &cache.values[from * cache.row..(from + keys - 1) * cache.row + head];
        block.scores(from, keys, head, k.as_ptr(), cache.row, s.queries, s.scores);
        let scores = &mut s.scores[..keys * QUERIES];
        block.hide(scores, from, s.start);
        soften(scores, s.largest, s.sum, s.factor);
        if from > least {
            scale_rows(out, out_row, count, head, s.factor);
        }
        let to = Target::new(out, out_row, from > least);
        let (depth, p) = (block.keys_of_query(from), Left::columns(scores.as_ptr(), QUERIES));
        small_product(count, head, keys, depth, p, v.as_ptr(), cache.row, to);
        from += keys;
    }
    for (factor, sum) in s.factor.iter_mut().zip(&*s.sum) {
        *factor = T::ONE / *sum;
    }
    scale_rows(out, out_row, count, head, s.factor);
    if let Some(stats) = stats {
        for (lane, to) in stats.iter_mut().enumerate() {
            *to = s.largest[lane] + s.sum[lane].ln();
        }
    }
}

/// `dqkv[N, C]`, written whole, from what `attention` read and wrote and the gradient `dout[N, H·E]`.
/// `scratch` has `workspace::cpu::attention_grad` elements.
pub fn attention_grad<T: Real>(
    pool: &Pool,
    shape: Heads,
    sequence: usize,
    qkv: &[T],
    out: &[T],
    dout: &[T],
    stats: &[T],
    document_start: &[i32],
    dqkv: &mut [T],
    scratch: &mut [T],
) {
    let c = Columns::of(shape);
    let rows = document_start.len();
    assert!(sequence > 0 && rows.is_multiple_of(sequence) && qkv.len() == rows * c.all && dqkv.len() == rows * c.all);
    assert!(out.len() == rows * c.keys && dout.len() == rows * c.keys && stats.len() == rows * c.heads);
    let keys = sequence.min(KEYS);
    let lane_size = workspace::cpu::attention_grad(1, sequence as u64, c.head as u64) as usize;
    let scratch = Shared::new(&mut scratch[..pool.threads() * lane_size]);
    let dqkv = Shared::new(dqkv);
    let group = c.heads / c.kv_heads;
    // A task is a kv head of a sequence, with all its query heads: their sums have one order.
    pool.run(rows / sequence * c.kv_heads, |task, lane| {
        let (b, kv) = (task / c.kv_heads, task % c.kv_heads);
        // SAFETY: each lane has its own part.
        let lane = unsafe { scratch.part(lane * lane_size..(lane + 1) * lane_size) };
        let mut s = Scratch::cut(lane, c.head, keys, true);
        let first_row = b * sequence;
        let at = |row: usize, column: usize| (first_row + row) * c.all + column;
        let (k_column, v_column) = (c.keys + kv * c.head, c.values + kv * c.head);
        for row in 0..sequence {
            for column in [k_column, v_column] {
                // SAFETY: this head's keys and values of this sequence are this task's own.
                unsafe { dqkv.part(at(row, column)..at(row, column) + c.head) }.fill(T::ZERO);
            }
        }
        for head in kv * group..(kv + 1) * group {
            for first in (0..sequence).step_by(QUERIES) {
                let count = QUERIES.min(sequence - first);
                let row = first_row + first;
                let q = at(first, head * c.head);
                let o = row * c.keys + head * c.head;
                // SAFETY: inside dqkv; this task's own columns of this sequence's rows.
                let (dq, dk, dv) = unsafe {
                    let start = dqkv.start();
                    (start.add(q), start.add(at(0, k_column)), start.add(at(0, v_column)))
                };
                backward(
                    Block { first, count, starts: &document_start[row..row + count] },
                    &c,
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
    });
}

/// One block of queries of one head: writes its part of dq, adds to dk and dv.
fn backward<T: Real>(
    block: Block,
    c: &Columns,
    queries: &[T],
    cache: Cache<T>,
    out: &[T],
    dout: &[T],
    stats: &[T],
    [dq, dk, dv]: [*mut T; 3],
    s: &mut Scratch<T>,
) {
    let (count, head) = (block.count, c.head);
    lay_out(queries, c.all, count, head, scale_of(head), s.queries);
    lay_out(dout, c.keys, count, head, T::ONE, s.douts);
    block.lanes(s.start);
    s.largest.fill(T::ZERO);
    s.largest[..count].copy_from_slice(stats);
    s.sum.fill(T::ZERO);
    for (lane, delta) in s.sum[..count].iter_mut().enumerate() {
        *delta = dot(&out[lane * c.keys..][..head], &dout[lane * c.keys..][..head]);
    }
    let (least, end) = (block.least(), block.first + count);
    let mut from = least;
    while from < end {
        let keys = (end - from).min(s.scores.len() / QUERIES);
        let rows = from * cache.row..(from + keys - 1) * cache.row + head;
        let k = cache.keys[rows.clone()].as_ptr();
        let v = cache.values[rows].as_ptr();
        block.scores(from, keys, head, k, cache.row, s.queries, s.scores);
        block.scores(from, keys, head, v, cache.row, s.douts, s.dscores);
        let (p, ds) = (&mut s.scores[..keys * QUERIES], &mut s.dscores[..keys * QUERIES]);
        block.hide(p, from, s.start);
        score_gradients(p, ds, s.largest, s.sum, scale_of(head));
        // SAFETY: rows from.. of dk and dv are inside them.
        let (dk, dv) = unsafe { (dk.add(from * c.all), dv.add(from * c.all)) };
        let add = |to| Target::new(to, c.all, true);
        let (depth, rows) = (block.queries_of_key(from), |x: &[T]| Left::rows(x.as_ptr(), QUERIES));
        small_product(keys, head, count, depth, rows(p), dout.as_ptr(), c.keys, add(dv));
        small_product(keys, head, count, depth, rows(ds), queries.as_ptr(), c.all, add(dk));
        let (depth, to) = (block.keys_of_query(from), Target::new(dq, c.all, from > least));
        small_product(count, head, keys, depth, Left::columns(ds.as_ptr(), QUERIES), k, cache.row, to);
        from += keys;
    }
}

/// Keys and values of the n tokens in `qkv[n, C]` into the caches [P, K·E], from row `start` on.
pub fn append_cache<T: Real>(shape: Heads, qkv: &[T], start: usize, keys: &mut [T], values: &mut [T]) {
    let c = Columns::of(shape);
    let width = c.kv_heads * c.head;
    for (i, row) in qkv.chunks_exact(c.all).enumerate() {
        let to = (start + i) * width..(start + i + 1) * width;
        keys[to.clone()].copy_from_slice(&row[c.keys..c.values]);
        values[to].copy_from_slice(&row[c.values..]);
    }
}

/// `out[n, H·E]`: the queries of the n tokens in `qkv[n, C]`, which stand at positions `start`.. of the
/// caches [P, K·E] already, over all keys up to their own. `scratch` has
/// `workspace::cpu::cached_attention` elements for the caches' P.
pub fn cached_attention<T: Real>(
    pool: &Pool,
    shape: Heads,
    qkv: &[T],
    keys: &[T],
    values: &[T],
    start: usize,
    out: &mut [T],
    scratch: &mut [T],
) {
    let c = Columns::of(shape);
    let (rows, width) = (qkv.len() / c.all, c.kv_heads * c.head);
    let capacity = keys.len() / width;
    assert!(start + rows <= capacity && values.len() == keys.len() && out.len() == rows * c.keys);
    let lane_size = workspace::cpu::cached_attention(1, rows as u64, capacity as u64, c.head as u64) as usize;
    let scratch = Shared::new(&mut scratch[..pool.threads() * lane_size]);
    let out = Shared::new(out);
    let each = if rows < FEW { 1 } else { QUERIES };
    let blocks = rows.div_ceil(each);
    pool.run(c.heads * blocks, |task, lane| {
        let (head, first) = (task % c.heads, task / c.heads * each);
        let count = each.min(rows - first);
        let kv = head / (c.heads / c.kv_heads);
        // SAFETY: each lane has its own part.
        let lane = unsafe { scratch.part(lane * lane_size..(lane + 1) * lane_size) };
        let queries = &qkv[first * c.all + head * c.head..];
        let cache = Cache { keys: &keys[kv * c.head..], values: &values[kv * c.head..], row: width };
        let at = first * c.keys + head * c.head;
        if rows < FEW {
            // SAFETY: each task has a head of a token of its own.
            let to = unsafe { out.part(at..at + c.head) };
            one_query(&queries[..c.head], cache, start + first + 1, to, lane);
        } else {
            // SAFETY: inside the output; each task has rows and columns of its own.
            let to = unsafe { out.start().add(at) };
            let block = Block { first: start + first, count, starts: &[] };
            let s = Scratch::cut(lane, c.head, capacity.min(KEYS), false);
            forward(block, queries, c.all, cache, c.head, (to, c.keys), None, s);
        }
    });
}

/// One query over the first `seen` keys.
fn one_query<T: Real>(query: &[T], cache: Cache<T>, seen: usize, out: &mut [T], lane: &mut [T]) {
    let head = query.len();
    let most = (lane.len() / QUERIES - head - 4) * QUERIES;
    let scale = scale_of::<T>(head);
    let (mut largest, mut sum) = (T::LOWEST, T::ZERO);
    out.fill(T::ZERO);
    let mut from = 0;
    while from < seen {
        let keys = (seen - from).min(most);
        let scores = &mut lane[..keys];
        let mut new = largest;
        for (i, four) in scores.chunks_mut(4).enumerate() {
            let mut sums = [[T::ZERO; 4]; FEW_ROWS];
            dots_1(head, query, &cache.keys[(from + 4 * i) * cache.row..], cache.row, four.len(), &mut sums);
            for (score, sum) in four.iter_mut().zip(sums[0]) {
                *score = sum * scale;
                new = if *score > new { *score } else { new };
            }
        }
        let factor = (largest - new).exp();
        multiply(out, factor);
        sum = sum * factor + weights(scores, new);
        largest = new;
        let values = &cache.values[from * cache.row..(from + keys - 1) * cache.row + head];
        let to = Target::new(out.as_mut_ptr(), head, true);
        small_product(1, head, keys, Depth::Whole, Left::rows(scores.as_ptr(), keys), values.as_ptr(), cache.row, to);
        from += keys;
    }
    multiply(out, T::ONE / sum);
}

/// 1 / √E
fn scale_of<T: Real>(head: usize) -> T {
    T::ONE / T::of(head as f64).sqrt()
}

/// `to[E, Q]` = scale · the first `count` rows of from, `row` apart; other lanes become zeros.
fn lay_out<T: Real>(from: &[T], row: usize, count: usize, head: usize, scale: T, to: &mut [T]) {
    if count < QUERIES {
        to.fill(T::ZERO);
    }
    transpose(from, row, count, head, scale, to, QUERIES);
}

vectorised! {
    fn dot<T, V>(a: &[T], b: &[T]) -> T {
        let mut sum = V::splat(T::ZERO);
        strips::<T, V>(a.len(), #[inline(always)] |at, count| {
            sum = get::<T, V>(a, at, count).mul_add(get(b, at, count), sum);
        });
        sum.sum()
    }
}

vectorised! {
    fn multiply<T, V>(x: &mut [T], factor: T) {
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let value: V = get(x, at, count);
            put(x, at, count, value * V::splat(factor));
        });
    }
}

vectorised! {
    /// x = e^(x − largest); returns the sum.
    fn weights<T, V>(x: &mut [T], largest: T) -> T {
        let mut sum = V::splat(T::ZERO);
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let value = (get_or(x, at, count, V::splat(T::MINUS_INFINITY)) - V::splat(largest)).exp();
            sum = sum + value;
            put(x, at, count, value);
        });
        sum.sum()
    }
}

vectorised! {
    /// `scores[keys, Q]` of key j (from `from` on) and query i (from `first` on) become −∞ unless
    /// `start[i]` <= j <= i.
    fn hide<T, V>(scores: &mut [T], from: usize, first: usize, start: &[T]) {
        let hidden = V::splat(T::MINUS_INFINITY);
        let mut places = [T::ZERO; QUERIES];
        for (lane, place) in places.iter_mut().enumerate() {
            *place = T::of((first + lane) as f64);
        }
        for (j, row) in scores.chunks_exact_mut(QUERIES).enumerate() {
            let key = V::splat(T::of((from + j) as f64));
            strips::<T, V>(QUERIES, #[inline(always)] |at, count| {
                let score = key.where_le(get(&places, at, count), get(row, at, count), hidden);
                put(row, at, count, get::<T, V>(start, at, count).where_le(key, score, hidden));
            });
        }
    }
}

vectorised! {
    /// `scores[keys, Q]` become e^(score − largest), with the largest score of each lane so far; `sum`
    /// goes on, and `factor` is what earlier results must be multiplied with.
    fn soften<T, V>(scores: &mut [T], largest: &mut [T], sum: &mut [T], factor: &mut [T]) {
        strips::<T, V>(QUERIES, #[inline(always)] |at, count| {
            let old: V = get(largest, at, count);
            let mut new = old;
            for row in scores.chunks_exact(QUERIES) {
                new = get::<T, V>(row, at, count).max(new);
            }
            let scale = (old - new).exp();
            let mut total = get::<T, V>(sum, at, count) * scale;
            for row in scores.chunks_exact_mut(QUERIES) {
                let p = (get::<T, V>(row, at, count) - new).exp();
                total = total + p;
                put(row, at, count, p);
            }
            put(largest, at, count, new);
            put(sum, at, count, total);
            put(factor, at, count, scale);
        });
    }
}

vectorised! {
    /// `p[keys, Q]` from scores to probabilities, ds from dP to dS.
    fn score_gradients<T, V>(p: &mut [T], ds: &mut [T], stats: &[T], delta: &[T], scale: T) {
        let scale = V::splat(scale);
        for (p, ds) in p.chunks_exact_mut(QUERIES).zip(ds.chunks_exact_mut(QUERIES)) {
            strips::<T, V>(QUERIES, #[inline(always)] |at, count| {
                let probability = (get::<T, V>(p, at, count) - get(stats, at, count)).exp();
                put(p, at, count, probability);
                let d = get::<T, V>(ds, at, count) - get(delta, at, count);
                put(ds, at, count, probability * d * scale);
            });
        }
    }
}

/// Rows of `out` times their lane's factor.
fn scale_rows<T: Real>(out: *mut T, out_row: usize, count: usize, head: usize, factor: &[T]) {
    for (lane, &factor) in factor[..count].iter().enumerate() {
        // SAFETY: `out` is the block's own part of the output: count rows of `head` elements.
        multiply(unsafe { std::slice::from_raw_parts_mut(out.add(lane * out_row), head) }, factor);
    }
}
