//! Embedding, norms and rotary positions.

use super::*;

#[test]
fn embedding_and_its_gradient_match_references() {
    /// Checks a factor that changes no bit of the rows, or one that needs rounding.
    fn check<T: Real>(scale: f64) {
        let mut draw = Draw(2);
        let (vocab, hidden) = (11, 70);
        let tokens: Vec<i32> = (0..37).map(|_| draw.below(vocab) as i32).collect();
        let table: Vec<T> = draw.many(vocab * hidden);
        let mut out = vec![T::from_f64(f64::NAN); tokens.len() * hidden];
        embed(&pool(2), &tokens, &table, hidden, scale, &mut out);
        let rows: Vec<T> = tokens
            .iter()
            .flat_map(|&t| &table[t as usize * hidden..][..hidden])
            .map(|x| T::from_f64(x.to_f64() * scale))
            .collect();
        assert_eq!(out, rows);
        let mut dtable: Vec<T::Wide> = draw.many(vocab * hidden);
        let mut want = to_f64s(&dtable);
        for (row, &token) in tokens.iter().enumerate() {
            for d in 0..hidden {
                want[token as usize * hidden + d] += scale * out[row * hidden + d].to_f64();
            }
        }
        embed_grad(&pool(2), &tokens, &out, hidden, scale, &mut dtable);
        assert_close(&dtable, &want, tolerance::<T>(tokens.len()), "dtable");
    }
    for scale in [1.0, 48.0] {
        check::<f32>(scale);
        check::<f64>(scale);
        check::<bf16>(scale);
    }
}

/// Numbers that norms add to their weights.
const OFFSETS: [f64; 2] = [0.0, 1.0];

fn naive_norm(x: &[f64], weight: &[f64], eps: f64) -> (Vec<f64>, f64) {
    let r = 1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt();
    (x.iter().zip(weight).map(|(x, w)| x * r * w).collect(), r)
}

#[test]
fn rms_norm_matches_reference() {
    fn check<T: Real>() {
        let mut draw = Draw(3);
        for (rows, dim) in [(1, 1), (3, 16), (70, 37), (5, 384)] {
            let (x, weight): (Vec<T>, Vec<T>) = (draw.many(rows * dim), draw.many(dim));
            let added: Vec<T> = draw.many(rows * dim);
            for (residual, offset) in [(None, 1.0), (Some(&added[..]), 0.0), (Some(&added[..]), 1.0)] {
                let (mut out, mut rstd) = (vec![T::ZERO; rows * dim], vec![T::Wide::ZERO; rows]);
                let factors: Vec<f64> = weight.iter().map(|weight| weight.to_f64() + offset).collect();
                rms_norm(&pool(2), &x, NormWeight { values: &weight, offset }, residual, 1e-5, &mut out, &mut rstd);
                for row in 0..rows {
                    let part = row * dim..(row + 1) * dim;
                    let (mut want, r) = naive_norm(&to_f64s(&x[part.clone()]), &factors, 1e-5);
                    for (want, residual) in want.iter_mut().zip(residual.iter().flat_map(|all| &all[part.clone()])) {
                        *want += residual.to_f64();
                    }
                    assert_close(&out[part], &want, tolerance::<T>(8), "norm");
                    assert_close(&[rstd[row]], &[r], tolerance::<T>(8), "rstd");
                }
            }
        }
    }
    check::<f32>();
    check::<f64>();
    check::<bf16>();
}

#[test]
fn rms_norm_grad_matches_differences() {
    let mut draw = Draw(4);
    for ((rows, dim), offset) in
        [(1, 1), (70, 5), (3, 37)].into_iter().flat_map(|size| OFFSETS.map(|offset| (size, offset)))
    {
        let (mut x, mut weight): (Vec<f64>, Vec<f64>) = (draw.many(rows * dim), draw.many(dim));
        let dout: Vec<f64> = draw.many(rows * dim);
        let loss = |x: &[f64], weight: &[f64]| {
            let (mut out, mut rstd) = (vec![0.0; rows * dim], vec![0.0; rows]);
            rms_norm(&pool(1), x, NormWeight { values: weight, offset }, None, 1e-3, &mut out, &mut rstd);
            (dot(&out, &dout), rstd)
        };
        let rstd = loss(&x, &weight).1;
        let before: Vec<f64> = draw.many(rows * dim);
        for accumulate in [false, true] {
            let (mut dx, mut dweight) = (before.clone(), vec![1.0; dim]);
            let mut scratch = scratch(workspace::cpu::sum_rows(rows as u64, dim as u64));
            let factor = NormWeight { values: &weight, offset };
            rms_norm_grad(&pool(2), &x, factor, &rstd, &dout, &mut dx, Some(&mut dweight), accumulate, &mut scratch);
            if accumulate {
                dx.iter_mut().zip(&before).for_each(|(dx, before)| *dx -= before);
            }
            dweight.iter_mut().for_each(|d| *d -= 1.0);
            let original = weight.clone();
            check_differences(&mut x, &dx, "dx", |x| loss(x, &original).0);
            let original = x.clone();
            check_differences(&mut weight, &dweight, "dweight", |weight| loss(&original, weight).0);
        }
    }
}

pub(super) const SHAPES: [Heads; 4] = [
    Heads { heads: 1, kv_heads: 1, head_dim: 2 },
    Heads { heads: 3, kv_heads: 1, head_dim: 18 },
    Heads { heads: 4, kv_heads: 2, head_dim: 64 },
    Heads { heads: 2, kv_heads: 2, head_dim: 70 },
];

pub(super) const NORMS: [QkNorm; 2] = [QkNorm::PerHead, QkNorm::AllHeads];

#[test]
fn head_norm_normalizes_queries_and_keys_only() {
    fn check<T: Real>(shape: Heads, norm: QkNorm, draw: &mut Draw) {
        let (rows, all, e) = (5, shape.columns() as usize, shape.head_dim as usize);
        let x: Vec<T> = draw.many(rows * all);
        let widths = shape.norm_widths(norm).map(|width| width as usize);
        let (wq, wk): (Vec<T>, Vec<T>) = (draw.many(widths[0]), draw.many(widths[1]));
        let count = shape.norm_count(norm) as usize;
        let (mut out, mut rstd) = (vec![T::from_f64(f64::NAN); rows * all], vec![T::Wide::ZERO; rows * count]);
        let weights = [&wq, &wk].map(|values| NormWeight { values, offset: 1.0 });
        head_norm(&pool(2), shape, &x, weights, 1e-6, &mut out, &mut rstd);
        let (keys, values) = (shape.query_columns() as usize, shape.rotated_heads() as usize * e);
        for row in 0..rows {
            let (x, out) = (&x[row * all..][..all], &out[row * all..][..all]);
            let queries = x[..keys].chunks(widths[0]).zip(out[..keys].chunks(widths[0])).map(|pair| (pair, &wq));
            let keys = x[keys..values].chunks(widths[1]).zip(out[keys..values].chunks(widths[1]));
            let normed: Vec<_> = queries.chain(keys.map(|pair| (pair, &wk))).collect();
            assert_eq!(normed.len(), count);
            for (((x, out), weight), r) in normed.into_iter().zip(&rstd[row * count..]) {
                let factors: Vec<f64> = weight.iter().map(|weight| weight.to_f64() + 1.0).collect();
                let (want, want_r) = naive_norm(&to_f64s(x), &factors, 1e-6);
                assert_close(out, &want, tolerance::<T>(8), "head norm");
                assert_close(&[*r], &[want_r], tolerance::<T>(8), "rstd");
            }
            assert_eq!(out[values..], x[values..]);
        }
    }
    let mut draw = Draw(5);
    for (shape, norm) in SHAPES.into_iter().flat_map(|shape| NORMS.map(|norm| (shape, norm))) {
        check::<f32>(shape, norm, &mut draw);
        check::<f64>(shape, norm, &mut draw);
        check::<bf16>(shape, norm, &mut draw);
    }
}

#[test]
fn head_norm_grad_matches_differences() {
    let mut draw = Draw(6);
    for (shape, norm) in SHAPES.into_iter().flat_map(|shape| NORMS.map(|norm| (shape, norm))) {
        let (rows, all, offset) = (35, shape.columns() as usize, OFFSETS[usize::from(shape.heads == 3)]);
        let [q_width, k_width] = shape.norm_widths(norm).map(|width| width as usize);
        let mut x: Vec<f64> = draw.many(rows * all);
        let (mut wq, mut wk): (Vec<f64>, Vec<f64>) = (draw.many(q_width), draw.many(k_width));
        let dout: Vec<f64> = draw.many(rows * all);
        let loss = |x: &[f64], wq: &[f64], wk: &[f64]| {
            let (mut out, mut rstd) = (vec![0.0; x.len()], vec![0.0; rows * shape.norm_count(norm) as usize]);
            let weights = [wq, wk].map(|values| NormWeight { values, offset });
            head_norm(&pool(1), shape, x, weights, 1e-3, &mut out, &mut rstd);
            (dot(&out, &dout), rstd)
        };
        let rstd = loss(&x, &wq, &wk).1;
        let (mut dx, mut dwq, mut dwk) = (dout.clone(), vec![0.0; q_width], vec![0.0; k_width]);
        let space = &mut scratch(workspace::cpu::sum_rows(rows as u64, (q_width + k_width) as u64));
        let weights = [&wq, &wk].map(|values| NormWeight { values: &values[..], offset });
        head_norm_grad(&pool(2), shape, &x, weights, &rstd, &mut dx, Some([&mut dwq, &mut dwk]), space);
        let (q, k, y) = (wq.clone(), wk.clone(), x.clone());
        check_differences(&mut x, &dx, "dx", |x| loss(x, &q, &k).0);
        check_differences(&mut wq, &dwq, "dwq", |wq| loss(&y, wq, &k).0);
        check_differences(&mut wk, &dwk, "dwk", |wk| loss(&y, &q, wk).0);
    }
}

#[test]
fn inverse_rope_restores_the_input() {
    fn check<T: Real>() {
        let mut draw = Draw(7);
        for shape in SHAPES {
            let (rows, all, e) = (9, shape.columns() as usize, shape.head_dim as usize);
            let positions: Vec<i32> = (0..rows).map(|_| draw.below(20) as i32).collect();
            let mut table = vec![T::Wide::from_f64(f64::NAN); 20 * e];
            rope_table(&pool(2), e, 10_000.0, &RopeScaling::None, 1.0, None, &mut table);
            let x: Vec<T> = draw.many(rows * all);
            let mut want = to_f64s(&x);
            for (row, &position) in positions.iter().enumerate() {
                for head in 0..shape.rotated_heads() as usize {
                    for i in 0..e / 2 {
                        let angle = f64::from(position) / 10_000f64.powf(2.0 * i as f64 / e as f64);
                        let (low, high) = (row * all + head * e + i, row * all + head * e + e / 2 + i);
                        let (a, b) = (want[low], want[high]);
                        want[low] = a * angle.cos() - b * angle.sin();
                        want[high] = b * angle.cos() + a * angle.sin();
                    }
                }
            }
            let mut qkv = x.clone();
            rope(&pool(2), shape, &table, &positions, 0, false, &mut qkv);
            assert_close(&qkv, &want, tolerance::<T>(40), "rope");
            if T::IS_WIDE {
                rope(&pool(2), shape, &table, &positions, 0, true, &mut qkv);
                assert_close(&qkv, &to_f64s(&x), tolerance::<T>(40), "there and back");
            }
        }
    }
    check::<f32>();
    check::<f64>();
    check::<bf16>();
}

#[test]
fn rope_scaling_stretches_long_wavelengths() {
    let e = 64;
    let table = |scaling: RopeScaling| {
        let mut table = vec![0.0f64; 8 * e];
        rope_table(&pool(1), e, 500_000.0, &scaling, 1.0, None, &mut table);
        // Angles of position 1; the first is 1 and all are below π/2.
        table[e + e / 2..2 * e].iter().map(|sin| sin.asin()).collect::<Vec<f64>>()
    };
    let plain = table(RopeScaling::None);
    let linear = table(RopeScaling::Linear { factor: 4.0 });
    let llama3 = table(RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    });
    let (mut original, mut blended, mut slow) = (0, 0, 0);
    for i in 0..e / 2 {
        let frequency = 500_000f64.powf(-2.0 * i as f64 / e as f64);
        assert!((plain[i] - frequency).abs() < 1e-12);
        assert!((linear[i] - frequency / 4.0).abs() < 1e-12);
        let turns = 8192.0 * frequency / std::f64::consts::TAU;
        let want = if turns > 4.0 {
            original += 1;
            frequency
        } else if turns < 1.0 {
            slow += 1;
            frequency / 8.0
        } else {
            blended += 1;
            let smooth = (turns - 1.0) / 3.0;
            frequency * ((1.0 - smooth) / 8.0 + smooth)
        };
        assert!((llama3[i] - want).abs() < 1e-12, "{i}");
    }
    assert!(original > 0 && blended > 0 && slow > 0);
}
