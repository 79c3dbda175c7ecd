//! Attention, its gradient and attention over a cache.

use super::*;

/// Returns the first visible key of every token, for sequences of documents of odd lengths.
pub(super) fn documents(draw: &mut Draw, batch: usize, sequence: usize, longest: usize) -> Vec<i32> {
    let mut starts = Vec::new();
    for _ in 0..batch {
        let (mut start, mut end) = (0, 1 + draw.below(longest));
        for token in 0..sequence {
            if token == end {
                (start, end) = (token, token + 1 + draw.below(longest));
            }
            starts.push(start as i32);
        }
    }
    starts
}

fn naive_attention(
    shape: Heads,
    softcap: Option<f64>,
    sequence: usize,
    qkv: &[f64],
    starts: &[i32],
) -> (Vec<f64>, Vec<f64>) {
    let capped = |score: f64| softcap.map_or(score, |cap| cap * (score / cap).tanh());
    let (h, kv, e) = (shape.heads as usize, shape.kv_heads as usize, shape.head_dim as usize);
    let (all, rows) = (shape.columns() as usize, starts.len());
    let (mut out, mut stats) = (vec![0.0; rows * h * e], vec![0.0; rows * h]);
    for row in 0..rows {
        let (b, i) = (row / sequence, row % sequence);
        for head in 0..h {
            let key = |j: usize, part: usize| {
                let at = (b * sequence + j) * all + (h + part * kv + head / (h / kv)) * e;
                &qkv[at..at + e]
            };
            let query = &qkv[row * all + head * e..][..e];
            let seen = starts[row] as usize..=i;
            let scores: Vec<f64> = seen.clone().map(|j| capped(dot(query, key(j, 0)) / (e as f64).sqrt())).collect();
            let sum: f64 = scores.iter().map(|s| s.exp()).sum();
            stats[(b * h + head) * sequence + i] = sum.ln();
            for (j, score) in seen.zip(&scores) {
                for (d, value) in key(j, 1).iter().enumerate() {
                    out[row * h * e + head * e + d] += score.exp() / sum * value;
                }
            }
        }
    }
    (out, stats)
}

pub(super) fn run_attention<T: Multiply>(
    threads: usize,
    shape: Heads,
    softcap: Option<f64>,
    sequence: usize,
    qkv: &[T],
    starts: &[i32],
) -> (Vec<T>, Vec<T::Wide>) {
    let rows = starts.len();
    let mut out = vec![T::from_f64(f64::NAN); rows * shape.query_columns() as usize];
    let mut stats = vec![T::Wide::from_f64(f64::NAN); rows * shape.heads as usize];
    let kernels = Kernels::Cpu { threads: threads as u64 };
    let mut scratch = scratch(kernels.attention_workspace(T::DTYPE, sequence as u64, shape));
    attention(&pool(threads), shape, softcap, sequence, qkv, starts, &mut out, &mut stats, &mut scratch);
    (out, stats)
}

pub(super) fn run_attention_grad<T: Multiply>(
    threads: usize,
    shape: Heads,
    softcap: Option<f64>,
    sequence: usize,
    qkv: &[T],
    dout: &[T],
    starts: &[i32],
) -> Vec<T> {
    let (out, stats) = run_attention(threads, shape, softcap, sequence, qkv, starts);
    attention_grad_of(threads, shape, softcap, sequence, qkv, &out, dout, &stats, starts)
}

pub(super) fn attention_grad_of<T: Multiply>(
    threads: usize,
    shape: Heads,
    softcap: Option<f64>,
    sequence: usize,
    qkv: &[T],
    out: &[T],
    dout: &[T],
    stats: &[T::Wide],
    starts: &[i32],
) -> Vec<T> {
    let mut dqkv = vec![T::from_f64(f64::NAN); qkv.len()];
    let kernels = Kernels::Cpu { threads: threads as u64 };
    let mut scratch = scratch(kernels.attention_grad_workspace(T::DTYPE, 1, sequence as u64, shape));
    attention_grad(&pool(threads), shape, softcap, sequence, qkv, out, dout, stats, starts, &mut dqkv, &mut scratch);
    dqkv
}

/// Returns the cap of scores with which a shape is tested: none, or one that many scores exceed.
pub(super) fn softcap_of(shape: Heads) -> Option<f64> {
    (shape.heads > shape.kv_heads).then_some(0.4)
}

/// Test cases (batch, sequence, longest document): one token, less than a block, and several blocks of queries and
/// keys, with and without document boundaries inside.
pub(super) const SEQUENCES: [(usize, usize, usize); 5] =
    [(3, 1, 1), (2, 23, 9), (1, 130, 1000), (2, 130, 50), (1, 600, 300)];

#[test]
fn attention_sees_only_its_document() {
    fn check<T: Multiply>() {
        let mut draw = Draw(8);
        for shape in SHAPES {
            let softcap = softcap_of(shape);
            for (batch, sequence, longest) in SEQUENCES {
                let starts = documents(&mut draw, batch, sequence, longest);
                let qkv: Vec<T> = draw.many(batch * sequence * shape.columns() as usize);
                let (out, stats) = run_attention(2, shape, softcap, sequence, &qkv, &starts);
                let (want, want_stats) = naive_attention(shape, softcap, sequence, &to_f64s(&qkv), &starts);
                assert_close(&out, &want, tolerance::<T>(40), &format!("{shape:?} {sequence}"));
                assert_close(&stats, &want_stats, tolerance::<T>(40), &format!("stats {shape:?} {sequence}"));
            }
        }
    }
    check::<f32>();
    check::<f64>();
    check::<bf16>();
}

#[test]
fn attention_grad_matches_differences() {
    let mut draw = Draw(9);
    for shape in SHAPES {
        let softcap = softcap_of(shape);
        for (batch, sequence, longest) in [(3, 1, 1), (2, 23, 9), (1, 130, 1000), (1, 150, 60)] {
            let starts = documents(&mut draw, batch, sequence, longest);
            let mut qkv: Vec<f64> = draw.many(batch * sequence * shape.columns() as usize);
            let dout: Vec<f64> = draw.many(batch * sequence * shape.query_columns() as usize);
            let dqkv = run_attention_grad(2, shape, softcap, sequence, &qkv, &dout, &starts);
            check_differences(&mut qkv, &dqkv, "dqkv", |qkv| {
                dot(&run_attention(1, shape, softcap, sequence, qkv, &starts).0, &dout)
            });
        }
    }
}

#[test]
fn attention_grad_in_f32_matches_f64() {
    let mut draw = Draw(10);
    for shape in SHAPES {
        let softcap = softcap_of(shape);
        for (batch, sequence, longest) in SEQUENCES {
            let starts = documents(&mut draw, batch, sequence, longest);
            let qkv: Vec<f32> = draw.many(batch * sequence * shape.columns() as usize);
            let dout: Vec<f32> = draw.many(batch * sequence * shape.query_columns() as usize);
            let got = run_attention_grad(2, shape, softcap, sequence, &qkv, &dout, &starts);
            let want = run_attention_grad(1, shape, softcap, sequence, &to_f64s(&qkv), &to_f64s(&dout), &starts);
            assert_close(&got, &want, 1e-4, &format!("{shape:?} {sequence}"));
        }
    }
}

#[test]
fn huge_scores_do_not_overflow() {
    let shape = Heads { heads: 1, kv_heads: 1, head_dim: 2 };
    let qkv: Vec<f32> = (0..100 * 6).map(|i| if i % 6 < 4 { 1e4 + i as f32 } else { i as f32 }).collect();
    let (out, stats) = run_attention(1, shape, None, 100, &qkv, &[0; 100]);
    assert!(out.iter().chain(&stats).all(|x| x.is_finite()));
}

#[test]
fn cached_attention_matches_full_attention() {
    fn check<T: Multiply>() {
        let mut draw = Draw(11);
        for shape in SHAPES {
            let total = 300;
            let qkv: Vec<T> = draw.many(total * shape.columns() as usize);
            for window in [total as u64, 1, 90] {
                let positions: Vec<i32> = (0..total as i32).collect();
                let mut first_keys = vec![0; total];
                shift_positions(&positions, None, 1 - window as i32, &mut first_keys);
                compare_with_full_attention(shape, &qkv, &first_keys);
            }
        }
    }
    check::<f32>();
    check::<f64>();
    check::<bf16>();
}

/// Compares attention over a cache, to which the tokens in `qkv` are added in parts, with attention over a sequence.
fn compare_with_full_attention<T: Multiply>(shape: Heads, qkv: &[T], first_keys: &[i32]) {
    let (total, all, softcap) = (first_keys.len(), shape.columns() as usize, softcap_of(shape));
    let width = (shape.kv_heads * shape.head_dim) as usize;
    let (want, _) = naive_attention(shape, softcap, total, &to_f64s(qkv), first_keys);
    let capacity = total + 7;
    // The third of three caches; the others must not be read.
    let (slot, size) = (2, 3 * capacity * width);
    let (mut keys, mut values) = (vec![T::from_f64(f64::NAN); size], vec![T::from_f64(f64::NAN); size]);
    let mut start = 0;
    // A prompt, single tokens, a few tokens, and a long remainder.
    for rows in [70, 1, 1, 5, 8, 215] {
        let new = &qkv[start * all..(start + rows) * all];
        let places: Vec<i32> = (start..start + rows).map(|at| (slot * capacity + at) as i32).collect();
        append_cache(shape, new, &places, &mut keys, &mut values);
        let mut out = vec![T::from_f64(f64::NAN); rows * shape.query_columns() as usize];
        let kernels = Kernels::Cpu { threads: 2 };
        let size = kernels.cached_attention_workspace(T::DTYPE, 1, rows as u64, capacity as u64, shape);
        let mut scratch = scratch(size);
        let seen = &first_keys[start..start + rows];
        let caches = [&keys[..], &values[..]];
        cached_attention(&pool(2), shape, softcap, new, caches, &places, (1, capacity), seen, &mut out, &mut scratch);
        let columns = shape.query_columns() as usize;
        assert_close(
            &out,
            &want[start * columns..(start + rows) * columns],
            tolerance::<T>(40),
            &format!("{shape:?} {start}"),
        );
        start += rows;
    }
    assert_eq!(start, total);
}
