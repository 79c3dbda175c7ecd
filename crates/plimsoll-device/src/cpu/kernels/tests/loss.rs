//! Gated units, the loss, caps, and elementwise ops.

use super::*;

/// Returns the activation of x, by the formulas of its definition.
fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
    }
}

#[test]
fn glu_and_its_gradient_match_references() {
    let mut draw = Draw(12);
    for (rows, ffn, activation) in [
        (1, 1, Activation::Silu),
        (3, 37, Activation::Silu),
        (40, 130, Activation::Silu),
        (1, 1, Activation::GeluTanh),
        (40, 130, Activation::GeluTanh),
    ] {
        let mut gate_up: Vec<f64> = draw.many::<f64>(rows * 2 * ffn).iter().map(|x| x * 6.0).collect();
        let dout: Vec<f64> = draw.many(rows * ffn);
        let forward = |gate_up: &[f64]| {
            let mut out = vec![f64::NAN; rows * ffn];
            glu(&pool(2), activation, ffn, gate_up, &mut out);
            out
        };
        let want: Vec<f64> = (0..rows * ffn)
            .map(|i| {
                let at = i / ffn * 2 * ffn + i % ffn;
                activate(activation, gate_up[at]) * gate_up[at + ffn]
            })
            .collect();
        assert_close(&forward(&gate_up), &want, 1e-14, "glu");
        let narrow: Vec<f32> = gate_up.iter().map(|&x| x as f32).collect();
        let mut out = vec![0.0f32; rows * ffn];
        glu(&pool(2), activation, ffn, &narrow, &mut out);
        assert_close(&out, &want, 2e-6, "glu f32");

        let mut dgate_up = vec![f64::NAN; rows * 2 * ffn];
        glu_grad(&pool(2), activation, ffn, &gate_up, &dout, &mut dgate_up);
        let mut in_place = gate_up.clone();
        glu_grad_in_place(&pool(2), activation, ffn, &mut in_place, &dout);
        assert_eq!(in_place, dgate_up);
        check_differences(&mut gate_up, &dgate_up, "dgate_up", |x| dot(&forward(x), &dout));
        let (dout, mut got) = (dout.iter().map(|&x| x as f32).collect::<Vec<f32>>(), vec![f32::NAN; rows * 2 * ffn]);
        glu_grad(&pool(2), activation, ffn, &narrow, &dout, &mut got);
        assert_close(&got, &dgate_up, 2e-6, "dgate_up f32");
    }
    // Extreme inputs open or close the gate without NaN.
    for activation in [Activation::Silu, Activation::GeluTanh] {
        let (gate_up, mut out, mut dgate_up) = ([200.0, -200.0, 3.0, 3.0], [f32::NAN; 2], [f32::NAN; 4]);
        glu(&pool(1), activation, 2, &gate_up, &mut out);
        assert_eq!(out, [600.0, 0.0]);
        glu_grad(&pool(1), activation, 2, &gate_up, &[1.0; 2], &mut dgate_up);
        assert_eq!(dgate_up, [3.0, 0.0, 200.0, 0.0]);
    }
}

fn naive_loss(vocab: usize, logits: &[f64], labels: &[i32], weights: &[f64]) -> f64 {
    let mut total = 0.0;
    for (row, (&label, &weight)) in labels.iter().zip(weights).enumerate() {
        if label >= 0 && weight != 0.0 {
            let x = &logits[row * vocab..(row + 1) * vocab];
            total += weight * (x.iter().map(|x| x.exp()).sum::<f64>().ln() - x[label as usize]);
        }
    }
    total
}

/// Returns the loss of rows of logits, which are limited to ±`softcap` and processed in blocks of columns, and their
/// gradient times `scale`.
pub(super) fn loss_in_blocks<T: Real>(
    threads: usize,
    (vocab, block): (usize, usize),
    softcap: Option<f64>,
    logits: &[T],
    labels: &[i32],
    weights: &[T::Wide],
    scale: T::Wide,
) -> (f64, Vec<i32>, Vec<T>) {
    let (pool, rows) = (pool(threads), labels.len());
    let mut logits = logits.to_vec();
    if let Some(cap) = softcap {
        soft_cap(&pool, cap, &mut logits);
    }
    let mut stats = scratch::<T::Wide>(4 * rows as u64);
    let blocks: Vec<(usize, usize)> =
        (0..vocab).step_by(block).map(|first| (first, block.min(vocab - first))).collect();
    let part = |first: usize, columns: usize| -> Vec<T> {
        logits.chunks(vocab).flat_map(|row| &row[first..first + columns]).copied().collect()
    };
    for &(first, columns) in &blocks {
        let labelled = LabelledRows { labels, weights, first, columns };
        softmax_stats(&pool, labelled, &part(first, columns), &mut stats, first == 0);
    }
    let (mut correct, mut log_probabilities) = (vec![-1; rows], vec![T::Wide::ONE; rows]);
    let loss = cross_entropy(&stats, labels, weights, Some(&mut correct), Some(&mut log_probabilities));
    assert_eq!(loss.to_bits(), cross_entropy(&stats, labels, weights, None, None).to_bits());
    let weighted = log_probabilities.iter().zip(weights).map(|(each, weight)| each.to_f64() * weight.to_f64());
    let sum = -weighted.sum::<f64>();
    assert!(loss == sum || loss.is_nan() && sum.is_nan(), "{loss}, and {sum} by the log-probabilities");
    let ignored = |row: &usize| labels[*row] == IGNORED || weights[*row] == T::Wide::ZERO;
    assert!((0..rows).filter(ignored).all(|row| log_probabilities[row] == T::Wide::ZERO));
    let mut gradient = logits.clone();
    for &(first, columns) in &blocks {
        let mut block = part(first, columns);
        softmax_grad(&pool, LabelledRows { labels, weights, first, columns }, &mut block, &stats, scale, softcap);
        for (row, block) in block.chunks(columns).enumerate() {
            gradient[row * vocab + first..][..columns].copy_from_slice(block);
        }
    }
    (loss, correct, gradient)
}

#[test]
fn loss_and_its_gradient_match_references() {
    let mut draw = Draw(13);
    for (rows, vocab) in [(1, 1), (7, 5), (33, 101), (3, 1000)] {
        let mut logits: Vec<f64> = draw.many::<f64>(rows * vocab).iter().map(|x| x * 4.0).collect();
        let labels: Vec<i32> =
            (0..rows).map(|row| if row % 5 == 2 { IGNORED } else { draw.below(vocab) as i32 }).collect();
        let weights: Vec<f64> = (0..rows).map(|row| if row % 7 == 3 { 0.0 } else { draw.next() + 1.5 }).collect();
        let want = naive_loss(vocab, &logits, &labels, &weights);
        for block in [1, 3, vocab.div_ceil(3), vocab] {
            let (got, correct, gradient) = loss_in_blocks(2, (vocab, block), None, &logits, &labels, &weights, 0.25);
            assert!((got - want).abs() <= 1e-12 * (1.0 + want.abs()));
            for row in 0..rows {
                let x = &logits[row * vocab..(row + 1) * vocab];
                let counts = labels[row] >= 0 && weights[row] != 0.0;
                let best = (0..vocab).rev().max_by(|&a, &b| x[a].total_cmp(&x[b])).unwrap();
                assert_eq!(correct[row], i32::from(counts && best as i32 == labels[row]));
                if !counts {
                    assert!(gradient[row * vocab..(row + 1) * vocab].iter().all(|&g| g.to_bits() == 0));
                }
            }
            let narrow: Vec<f32> = logits.iter().map(|&x| x as f32).collect();
            let narrow_weights: Vec<f32> = weights.iter().map(|&x| x as f32).collect();
            let (got, _, narrow) = loss_in_blocks(2, (vocab, block), None, &narrow, &labels, &narrow_weights, 0.25);
            assert!((got - want).abs() <= 1e-5 * (1.0 + want.abs()));
            assert_close(&narrow, &gradient, 2e-6, "dlogits f32");
            if block > 3 || block == vocab {
                let loss = |x: &[f64]| 0.25 * loss_in_blocks(2, (vocab, block), None, x, &labels, &weights, 0.25).0;
                check_differences(&mut logits, &gradient, "dlogits", loss);
            }
        }
    }
}

#[test]
fn capped_loss_gradient_matches_differences() {
    let mut draw = Draw(15);
    // Around ½ · cap the two formulas of the hyperbolic tangent meet.
    for cap in [0.7, 8.0, 100.0] {
        let (rows, vocab) = (3, 41);
        let mut logits: Vec<f64> = draw.many::<f64>(rows * vocab).iter().map(|x| x * 6.0).collect();
        let mut capped = logits.clone();
        soft_cap(&pool(2), cap, &mut capped);
        let want: Vec<f64> = logits.iter().map(|x| cap * (x / cap).tanh()).collect();
        assert_close(&capped, &want, 1e-14, "capped");
        let mut narrow: Vec<f32> = logits.iter().map(|&x| x as f32).collect();
        soft_cap(&pool(1), cap, &mut narrow);
        assert_close(&narrow, &want, 1e-6, "capped f32");
        let (labels, weights) = ([4, IGNORED, 40], [1.0, 1.0, 0.3]);
        for block in [vocab, 15] {
            let run = |x: &[f64]| loss_in_blocks(2, (vocab, block), Some(cap), x, &labels, &weights, 0.25);
            let (loss, _, gradient) = run(&logits);
            assert!((loss - naive_loss(vocab, &want, &labels, &weights)).abs() <= 1e-12 * (1.0 + loss.abs()));
            check_differences(&mut logits, &gradient, "dlogits", |x| 0.25 * run(x).0);
        }
    }
    let mut extreme = [f32::INFINITY, f32::NEG_INFINITY, 1e30, -1e30, 0.0];
    soft_cap(&pool(1), 30.0, &mut extreme);
    assert_eq!(extreme, [30.0, -30.0, 30.0, -30.0, 0.0]);
}

#[test]
fn first_of_equal_logits_wins() {
    let logits = [1.0f32, 3.0, 3.0, 2.0, 1.0, 3.0, 3.0, 2.0, 3.0, 3.0, 3.0, 3.0];
    for block in 1..=4 {
        let (_, correct, _) = loss_in_blocks(1, (4, block), None, &logits, &[1, 2, 0], &[1.0; 3], 1.0);
        assert_eq!(correct, [1, 0, 1], "{block}");
    }
}

#[test]
fn huge_logits_do_not_overflow_and_nan_propagates() {
    for block in 1..=3 {
        let (loss, _, logits) = loss_in_blocks(1, (3, block), None, &[1e30f32, -1e30, 0.0], &[0], &[1.0], 1.0);
        assert_eq!((loss, &logits[..]), (0.0, &[0.0, 0.0, 0.0][..]));
        assert!(loss_in_blocks(1, (3, block), None, &[0.0, f32::NAN, 1.0], &[0], &[1.0], 1.0).0.is_nan());
        // A label outside all columns.
        assert!(loss_in_blocks(1, (3, block), None, &[0.0f32, 2.0, 1.0], &[3], &[1.0], 1.0).0.is_nan());
    }
}

#[test]
fn elementwise_ops_match_references() {
    fn check<T: Float>() {
        let mut draw = Draw(14);
        let pool = pool(3);
        for n in [0, 1, 33, 70_001] {
            let (x, y): (Vec<T>, Vec<T>) = (draw.many(n), draw.many(n));
            let mut sum = y.clone();
            add(&pool, &x, &mut sum);
            assert!((0..n).all(|i| sum[i] == x[i] + y[i]));
            copy(&pool, &x, &mut sum);
            assert_eq!(sum, x);
            fill(&pool, T::from_f64(0.5), &mut sum);
            assert!(sum.iter().all(|&x| x == T::from_f64(0.5)));
        }
        for (rows, columns) in [(1, 1), (77, 70), (1000, 3)] {
            let x: Vec<T> = draw.many(rows * columns);
            let mut into: Vec<T::Wide> = draw.many(columns);
            let mut want = to_f64s(&into);
            for i in 0..rows * columns {
                want[i % columns] += x[i].to_f64();
            }
            let size = workspace::cpu::sum_rows(rows as u64, columns as u64);
            sum_rows(&pool, rows, columns, &x, &mut into, &mut scratch(size));
            assert_close(&into, &want, tolerance::<T>(rows), "sum of rows");
        }
    }
    check::<f32>();
    check::<f64>();
}
