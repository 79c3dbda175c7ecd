//! Norms of rows, and of queries and keys, against the CPU kernels.

use super::*;

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn rms_norm_and_gradient_match_cpu() {
    for_types_and_alignments(|mut gpu, real, kind, draw| {
        for (rows, dim, offset) in [(1, 3, 1.0), (3, 7, 0.0), (5, 1024, 1.0), (70, 36, 0.0), (1100, 33, 1.0)] {
            let (n, eps) = (rows * dim, 1e-5);
            let (x, weight) = (draw.many(kind, n), draw.many(kind, dim));
            let residual = draw.many(kind, n);
            let (gx, gweight, gresidual) = (gpu.put(kind, &x), gpu.put(kind, &weight), gpu.put(kind, &residual));
            let (out, rstd) = (gpu.allocate(kind, n), gpu.allocate(Kind::F32, rows));
            for (residual, gresidual) in [(None, 0), (Some(&residual[..]), gresidual)] {
                let (mut want, mut want_rstd) = (vec![0.0; n], vec![0.0; rows]);
                let factor = cpu::NormWeight { values: &weight[..], offset };
                cpu::rms_norm(&pool(), &x, factor, residual, eps, &mut want, &mut want_rstd);
                gpu.run(&rms_norm(real, [gx, gweight, gresidual], out, rstd, rows as u64, dim as u64, [eps, offset]));
                close(&gpu.get(out), &want, kind, "normed");
                close(&gpu.get(rstd), &want_rstd, Kind::F32, "rstd");
            }

            let rstd_values = gpu.get(rstd);
            let dout = draw.many(kind, n);
            let (before, dweight_before) = (draw.many(kind, n), draw.many(Kind::F32, dim));
            for accumulate in [false, true] {
                let (mut want, mut want_dweight) = (before.clone(), dweight_before.clone());
                let scratch = &mut scratch(workspace::cpu::sum_rows(rows as u64, dim as u64));
                let dweight = &mut want_dweight;
                cpu::rms_norm_grad(
                    &pool(),
                    &x,
                    cpu::NormWeight { values: &weight[..], offset },
                    &rstd_values,
                    &dout,
                    &mut want,
                    Some(dweight),
                    accumulate,
                    scratch,
                );
                let (gdout, gdx) = (gpu.put(kind, &dout), gpu.put(kind, &before));
                let gdweight = gpu.put(Kind::F32, &dweight_before);
                let room = gpu.allocate(Kind::F32, workspace::cuda::sum_rows(rows as u64, dim as u64) as usize);
                let inputs = [gx, gweight, rstd, gdout];
                let outputs = [gdx, gdweight, room];
                gpu.run(&rms_norm_grad(real, inputs, outputs, rows as u64, dim as u64, offset, accumulate));
                close(&gpu.get(gdx), &want, kind, "dx");
                close(&gpu.get(gdweight), &want_dweight, Kind::F32, "dweight");
            }
        }
    });
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn head_norms_and_gradients_match_cpu() {
    for_types_and_alignments(|mut gpu, real, kind, draw| {
        for (rows, heads, kv_heads, head_dim) in
            [(1, 1, 1, 6), (3, 4, 2, 64), (41, 3, 1, 33), (1030, 1, 1, 8), (2, 2, 1, 256)]
        {
            let shape = Heads { heads, kv_heads, head_dim };
            check_head_norms(&mut gpu, (real, kind), draw, rows, shape, QkNorm::PerHead);
        }
        for (rows, heads, kv_heads, head_dim) in
            [(1, 1, 1, 6), (3, 4, 2, 64), (41, 3, 1, 33), (70, 3, 1, 8), (9, 6, 2, 64)]
        {
            let shape = Heads { heads, kv_heads, head_dim };
            check_head_norms(&mut gpu, (real, kind), draw, rows, shape, QkNorm::AllHeads);
        }
    });
}

/// Compares norms of queries and keys, and their gradient, with the CPU kernels.
fn check_head_norms(
    gpu: &mut Gpu,
    (real, kind): (Real, Kind),
    draw: &mut Draw,
    rows: usize,
    shape: Heads,
    norm: QkNorm,
) {
    let n = rows * shape.columns() as usize;
    let [q_width, k_width] = shape.norm_widths(norm).map(|width| width as usize);
    let count = rows * shape.norm_count(norm) as usize;
    let x = draw.many(kind, n);
    let (q, k) = (draw.many(kind, q_width), draw.many(kind, k_width));
    // Some shapes have weights around zero.
    let offset = if shape.heads > shape.kv_heads { 1.0 } else { 0.0 };
    let weights = [&q, &k].map(|values| cpu::NormWeight { values: &values[..], offset });
    let (mut want, mut want_rstd) = (vec![0.0; n], vec![0.0; count]);
    cpu::head_norm(&pool(), shape, &x, weights, 1e-6, &mut want, &mut want_rstd);
    let inputs = [gpu.put(kind, &x), gpu.put(kind, &q), gpu.put(kind, &k)];
    let (out, rstd) = (gpu.allocate(kind, n), gpu.allocate(Kind::F32, count));
    gpu.run(&head_norm(real, inputs, out, rstd, rows as u64, shape, norm, [1e-6, offset]));
    close(&gpu.get(out), &want, kind, "normed");
    close(&gpu.get(rstd), &want_rstd, Kind::F32, "rstd");

    let rstd_values = gpu.get(rstd);
    let (dout, dq, dk) = (draw.many(kind, n), draw.many(Kind::F32, q_width), draw.many(Kind::F32, k_width));
    let (mut want, mut want_dq, mut want_dk) = (dout.clone(), dq.clone(), dk.clone());
    let both = (q_width + k_width) as u64;
    let room = &mut scratch(workspace::cpu::sum_rows(rows as u64, both));
    let dweights = Some([&mut want_dq[..], &mut want_dk[..]]);
    cpu::head_norm_grad(&pool(), shape, &x, weights, &rstd_values, &mut want, dweights, room);
    let (gdx, gdq, gdk) = (gpu.put(kind, &dout), gpu.put(Kind::F32, &dq), gpu.put(Kind::F32, &dk));
    let room = gpu.allocate(Kind::F32, workspace::cuda::sum_rows(rows as u64, both) as usize);
    let [x, q, k] = inputs;
    gpu.run(&head_norm_grad(real, [x, q, k, rstd], [gdx, room], [gdq, gdk], rows as u64, shape, norm, offset));
    close(&gpu.get(gdx), &want, kind, "dx");
    close(&gpu.get(gdq), &want_dq, Kind::F32, "dq_weight");
    close(&gpu.get(gdk), &want_dk, Kind::F32, "dk_weight");
}
