//! SwiGLU, the loss, and elementwise ops.

use super::*;

#[test]
fn swiglu_and_its_gradient_match_references() {
    let mut draw = Draw(12);
    for (rows, ffn) in [(1, 1), (3, 37), (40, 130)] {
        let mut gate_up: Vec<f64> = draw.many::<f64>(rows * 2 * ffn).iter().map(|x| x * 6.0).collect();
        let dout: Vec<f64> = draw.many(rows * ffn);
        let forward = |gate_up: &[f64]| {
            let mut out = vec![f64::NAN; rows * ffn];
            swiglu(&pool(2), ffn, gate_up, &mut out);
            out
        };
        let want: Vec<f64> = (0..rows * ffn)
            .map(|i| {
                let at = i / ffn * 2 * ffn + i % ffn;
                gate_up[at] / (1.0 + (-gate_up[at]).exp()) * gate_up[at + ffn]
            })
            .collect();
        assert_close(&forward(&gate_up), &want, 1e-14, "swiglu");
        let narrow: Vec<f32> = gate_up.iter().map(|&x| x as f32).collect();
        let mut out = vec![0.0f32; rows * ffn];
        swiglu(&pool(2), ffn, &narrow, &mut out);
        assert_close(&out, &want, 2e-6, "swiglu f32");

        let mut dgate_up = vec![f64::NAN; rows * 2 * ffn];
        swiglu_grad(&pool(2), ffn, &gate_up, &dout, &mut dgate_up);
        let mut in_place = gate_up.clone();
        swiglu_grad_in_place(&pool(2), ffn, &mut in_place, &dout);
        assert_eq!(in_place, dgate_up);
        check_differences(&mut gate_up, &dgate_up, "dgate_up", |x| dot(&forward(x), &dout));
        let (dout, mut got) = (dout.iter().map(|&x| x as f32).collect::<Vec<f32>>(), vec![f32::NAN; rows * 2 * ffn]);
        swiglu_grad(&pool(2), ffn, &narrow, &dout, &mut got);
        assert_close(&got, &dgate_up, 2e-6, "dgate_up f32");
    }
    // Extreme inputs open or close the gate without NaN.
    let mut out = [f32::NAN; 2];
    swiglu(&pool(1), 2, &[200.0, -200.0, 3.0, 3.0], &mut out);
    assert_eq!(out, [600.0, 0.0]);
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

/// Returns the loss of rows of logits, processed in blocks of columns, and their gradient times `scale`.
pub(super) fn loss_in_blocks<T: Real>(
    threads: usize,
    (vocab, block): (usize, usize),
    logits: &[T],
    labels: &[i32],
    weights: &[T::Wide],
    scale: T::Wide,
) -> (f64, Vec<i32>, Vec<T>) {
    let (pool, rows) = (pool(threads), labels.len());
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
    let mut correct = vec![-1; rows];
    let loss = cross_entropy(&stats, labels, weights, Some(&mut correct));
    assert_eq!(loss.to_bits(), cross_entropy(&stats, labels, weights, None).to_bits());
    let mut gradient = logits.to_vec();
    for &(first, columns) in &blocks {
        let mut block = part(first, columns);
        softmax_grad(&pool, LabelledRows { labels, weights, first, columns }, &mut block, &stats, scale);
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
            let (got, correct, gradient) = loss_in_blocks(2, (vocab, block), &logits, &labels, &weights, 0.25);
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
            let (got, _, narrow) = loss_in_blocks(2, (vocab, block), &narrow, &labels, &narrow_weights, 0.25);
            assert!((got - want).abs() <= 1e-5 * (1.0 + want.abs()));
            assert_close(&narrow, &gradient, 2e-6, "dlogits f32");
            if block > 3 || block == vocab {
                let loss = |x: &[f64]| 0.25 * loss_in_blocks(2, (vocab, block), x, &labels, &weights, 0.25).0;
                check_differences(&mut logits, &gradient, "dlogits", loss);
            }
        }
    }
}

#[test]
fn first_of_equal_logits_wins() {
    let logits = [1.0f32, 3.0, 3.0, 2.0, 1.0, 3.0, 3.0, 2.0, 3.0, 3.0, 3.0, 3.0];
    for block in 1..=4 {
        let (_, correct, _) = loss_in_blocks(1, (4, block), &logits, &[1, 2, 0], &[1.0; 3], 1.0);
        assert_eq!(correct, [1, 0, 1], "{block}");
    }
}

#[test]
fn huge_logits_do_not_overflow_and_nan_propagates() {
    for block in 1..=3 {
        let (loss, _, logits) = loss_in_blocks(1, (3, block), &[1e30f32, -1e30, 0.0], &[0], &[1.0], 1.0);
        assert_eq!((loss, &logits[..]), (0.0, &[0.0, 0.0, 0.0][..]));
        assert!(loss_in_blocks(1, (3, block), &[0.0, f32::NAN, 1.0], &[0], &[1.0], 1.0).0.is_nan());
        // A label outside all columns.
        assert!(loss_in_blocks(1, (3, block), &[0.0f32, 2.0, 1.0], &[3], &[1.0], 1.0).0.is_nan());
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
