//! Rounding in bf16. The reference is the kernel in f64 on the same numbers; each result is rounded once.

use super::*;

#[test]
fn bf16_attention_gradients_are_rounded_once() {
    let mut draw = Draw(20);
    for shape in SHAPES {
        let softcap = softcap_of(shape);
        for (batch, sequence, longest) in SEQUENCES {
            let starts = documents(&mut draw, batch, sequence, longest);
            let qkv: Vec<bf16> = draw.many(batch * sequence * shape.columns() as usize);
            let dout: Vec<bf16> = draw.many(batch * sequence * shape.query_columns() as usize);
            let (out, stats) = run_attention(2, shape, softcap, sequence, &qkv, &starts);
            let got = attention_grad_of(2, shape, softcap, sequence, &qkv, &out, &dout, &stats, &starts);
            let [wide_qkv, wide_out, wide_dout] = [&qkv, &out, &dout].map(|x| to_f64s(x));
            let want = attention_grad_of(
                1,
                shape,
                softcap,
                sequence,
                &wide_qkv,
                &wide_out,
                &wide_dout,
                &to_f64s(&stats),
                &starts,
            );
            assert_close(&got, &want, 2e-5, &format!("{shape:?} {sequence}"));
        }
    }
}

#[test]
fn bf16_norm_gradients_are_rounded_once() {
    let mut draw = Draw(21);
    for (rows, dim) in [(1, 1), (70, 37), (40, 384)] {
        let (x, dout): (Vec<bf16>, Vec<bf16>) = (draw.many(rows * dim), draw.many(rows * dim));
        let (weight, before): (Vec<bf16>, Vec<bf16>) = (draw.many(dim), draw.many(rows * dim));
        let (mut out, mut rstd) = (vec![bf16::ZERO; rows * dim], vec![0.0f32; rows]);
        rms_norm(&pool(2), &x, NormWeight { values: &weight, offset: 1.0 }, None, 1e-3, &mut out, &mut rstd);
        for accumulate in [false, true] {
            let size = workspace::cpu::sum_rows(rows as u64, dim as u64);
            let (mut dx, mut dweight) = (before.clone(), vec![1.0f32; dim]);
            let space = &mut scratch(size);
            let factor = NormWeight { values: &weight[..], offset: 1.0 };
            rms_norm_grad(&pool(2), &x, factor, &rstd, &dout, &mut dx, Some(&mut dweight), accumulate, space);
            let (mut want, mut want_weight) = (to_f64s(&before), vec![1.0; dim]);
            rms_norm_grad(
                &pool(1),
                &to_f64s(&x),
                NormWeight { values: &to_f64s(&weight), offset: 1.0 },
                &to_f64s(&rstd),
                &to_f64s(&dout),
                &mut want,
                Some(&mut want_weight),
                accumulate,
                &mut scratch(size),
            );
            assert_close(&dx, &want, tolerance::<bf16>(40), "dx");
            assert_close(&dweight, &want_weight, tolerance::<f32>(rows), "dweight");
        }
    }
    for (shape, norm) in SHAPES.into_iter().flat_map(|shape| NORMS.map(|norm| (shape, norm))) {
        let (rows, [q, k]) = (35, shape.norm_widths(norm).map(|width| width as usize));
        let x: Vec<bf16> = draw.many(rows * shape.columns() as usize);
        let dout: Vec<bf16> = draw.many(x.len());
        let (wq, wk): (Vec<bf16>, Vec<bf16>) = (draw.many(q), draw.many(k));
        let (mut out, mut rstd) = (vec![bf16::ZERO; x.len()], vec![0.0f32; rows * shape.norm_count(norm) as usize]);
        let weights = [&wq, &wk].map(|values| NormWeight { values: &values[..], offset: 1.0 });
        head_norm(&pool(2), shape, &x, weights, 1e-3, &mut out, &mut rstd);
        let size = workspace::cpu::sum_rows(rows as u64, (q + k) as u64);
        let (mut dx, mut dq, mut dk) = (dout.clone(), vec![0.0f32; q], vec![0.0f32; k]);
        head_norm_grad(&pool(2), shape, &x, weights, &rstd, &mut dx, Some([&mut dq, &mut dk]), &mut scratch(size));
        let (mut want, mut want_q, mut want_k) = (to_f64s(&dout), vec![0.0; q], vec![0.0; k]);
        let [x, wq, wk] = [&x, &wq, &wk].map(|x| to_f64s(x));
        let space = &mut scratch(size);
        head_norm_grad(
            &pool(1),
            shape,
            &x,
            [&wq, &wk].map(|values| NormWeight { values: &values[..], offset: 1.0 }),
            &to_f64s(&rstd),
            &mut want,
            Some([&mut want_q, &mut want_k]),
            space,
        );
        assert_close(&dx, &want, tolerance::<bf16>(40), "dx");
        assert_close(&dq, &want_q, tolerance::<f32>(rows * 4), "dq");
        assert_close(&dk, &want_k, tolerance::<f32>(rows * 4), "dk");
    }
}

#[test]
fn bf16_glu_is_rounded_once() {
    let mut draw = Draw(22);
    for (rows, ffn, activation) in
        [(1, 1, Activation::Silu), (3, 37, Activation::Silu), (40, 130, Activation::GeluTanh)]
    {
        let gate_up: Vec<bf16> = draw.many::<f64>(rows * 2 * ffn).iter().map(|x| bf16::from_f64(x * 6.0)).collect();
        let dout: Vec<bf16> = draw.many(rows * ffn);
        let (mut out, mut want) = (vec![bf16::NAN; rows * ffn], vec![f64::NAN; rows * ffn]);
        glu(&pool(2), activation, ffn, &gate_up, &mut out);
        glu(&pool(1), activation, ffn, &to_f64s(&gate_up), &mut want);
        assert_close(&out, &want, 2e-6, "glu");
        let (mut got, mut want) = (vec![bf16::NAN; gate_up.len()], vec![f64::NAN; gate_up.len()]);
        glu_grad(&pool(2), activation, ffn, &gate_up, &dout, &mut got);
        glu_grad(&pool(1), activation, ffn, &to_f64s(&gate_up), &to_f64s(&dout), &mut want);
        assert_close(&got, &want, 2e-6, "dgate_up");
        let mut in_place = gate_up.clone();
        glu_grad_in_place(&pool(2), activation, ffn, &mut in_place, &dout);
        assert_eq!(in_place, got);
    }
}

#[test]
fn bf16_loss_is_rounded_once() {
    let mut draw = Draw(23);
    for (rows, vocab) in [(1, 1), (33, 101), (3, 1000)] {
        let logits: Vec<bf16> = draw.many::<f64>(rows * vocab).iter().map(|x| bf16::from_f64(x * 4.0)).collect();
        let labels: Vec<i32> =
            (0..rows).map(|row| if row % 5 == 2 { IGNORED } else { draw.below(vocab) as i32 }).collect();
        let weights: Vec<f32> = draw.many(rows);
        for block in [vocab.div_ceil(3), vocab] {
            let (loss, hit, got) = loss_in_blocks(2, (vocab, block), None, &logits, &labels, &weights, 0.25);
            let (want_loss, want_hit, want) =
                loss_in_blocks(1, (vocab, block), None, &to_f64s(&logits), &labels, &to_f64s(&weights), 0.25);
            assert!((loss - want_loss).abs() <= 1e-5 * (1.0 + want_loss.abs()));
            assert_eq!(hit, want_hit);
            assert_close(&got, &want, 2e-6, "dlogits");
        }
    }
}

#[test]
fn sums_and_casts_accept_both_types() {
    let mut draw = Draw(24);
    let (x, y): (Vec<bf16>, Vec<f32>) = (draw.many(70_001), draw.many(70_001));
    let (mut narrow, mut full) = (x.clone(), y.clone());
    add(&pool(2), &y, &mut narrow);
    add(&pool(2), &x, &mut full);
    for i in 0..x.len() {
        assert_eq!(full[i], y[i] + x[i].to_f32());
        assert_eq!(narrow[i], bf16::from_f32(full[i]));
    }
    let mut rounded = vec![bf16::NAN; y.len()];
    round(&pool(2), &y, &mut rounded);
    assert!(y.iter().zip(&rounded).all(|(y, rounded)| bf16::from_f32(*y) == *rounded));
}
