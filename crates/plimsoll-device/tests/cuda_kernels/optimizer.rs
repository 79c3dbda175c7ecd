//! Optimizer updates and gradient norms against the CPU kernels.

use super::*;

pub(super) fn update_scalars() -> Vec<f64> {
    let mut scalars = vec![0.0; SCALAR_COUNT as usize];
    for (place, value) in [
        (Scalar::LearningRate, 1e-2),
        (Scalar::BiasCorrection1, 0.271),
        (Scalar::BiasCorrection2, 0.1426),
        (Scalar::ClipFactor, 0.37),
        (Scalar::ClipNorm, 0.8),
    ] {
        scalars[place as usize] = Kind::F32.rounded(value);
    }
    scalars
}

/// Returns odd tensor sizes that fill one table and start another; one exceeds a chunk.
fn sizes() -> Vec<usize> {
    let mut sizes: Vec<usize> = (1..=66).collect();
    sizes[40] = 8192 + 1025;
    sizes[65] = 2 * 8192;
    sizes
}

/// Returns the numbers of `update_scalars` for the CPU kernels.
fn adamw_step(betas: [f64; 2], eps: f64, decay: f64) -> cpu::AdamW<f32> {
    let scalars = update_scalars();
    let of = |which: Scalar| scalars[which as usize] as f32;
    cpu::AdamW {
        rate: of(Scalar::LearningRate),
        betas,
        eps: eps as f32,
        decay: decay as f32,
        bias_corrections: [of(Scalar::BiasCorrection1), of(Scalar::BiasCorrection2)],
        clip: of(Scalar::ClipFactor),
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn adamw_matches_cpu_bits() {
    for shift in [0, 1] {
        let (mut gpu, mut draw) = (Gpu::new(shift), Draw(5));
        let (betas, eps) = ([0.9, 0.95], 1e-8);
        let (mut tensors, mut wants) = (Vec::new(), Vec::new());
        for (i, n) in sizes().into_iter().enumerate() {
            let [mut weight, gradient, mut first] = [(); 3].map(|()| narrow(&draw.many(Kind::F32, n)));
            let mut second: Vec<f32> = draw.many(Kind::F32, n).iter().map(|x| (x * x) as f32).collect();
            let decay = if i % 2 == 0 { 0.1 } else { 0.0 };
            let [w, g, m, v] = [&weight, &gradient, &first, &second].map(|x| gpu.put(Kind::F32, &wide(x)));
            let elements = n as u64;
            let tensor = OptimizerTensor { weight: w, gradient: g, first: m, second: v, ..OptimizerTensor::default() };
            tensors.push(OptimizerTensor { elements, decay, ..tensor });
            let step = adamw_step(betas, eps, decay);
            cpu::adamw(&pool(), step, &mut weight, &gradient, &mut first, &mut second);
            wants.push([weight, first, second]);
        }
        let gscalars = gpu.put(Kind::F32, &update_scalars());
        gpu.run(&adamw(&tensors, gscalars, betas, eps));
        for (tensor, want) in tensors.iter().zip(&wants) {
            same(&gpu.get(tensor.weight), &wide(&want[0]), "weight");
            same(&gpu.get(tensor.first), &wide(&want[1]), "first");
            same(&gpu.get(tensor.second), &wide(&want[2]), "second");
        }
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn eight_bit_adamw_matches_cpu_bits() {
    for shift in [0, 1] {
        let (mut gpu, mut draw) = (Gpu::new(shift), Draw(9));
        let (betas, eps) = ([0.9, 0.95], 1e-8);
        let (mut tensors, mut wants) = (Vec::new(), Vec::new());
        for (i, n) in sizes().into_iter().step_by(5).chain([255, 256, 257, 3000]).enumerate() {
            let blocks = n.div_ceil(256);
            let (mut weight, mut gradient) = (narrow(&draw.many(Kind::F32, n)), narrow(&draw.many(Kind::F32, n)));
            let codes = |draw: &mut Draw| (0..n).map(|_| draw.below(256) as u8).collect::<Vec<u8>>();
            let (mut first, mut second) = (codes(&mut draw), codes(&mut draw));
            let mut scales = || narrow(&draw.many(Kind::F32, blocks)).iter().map(|x| x.abs()).collect::<Vec<f32>>();
            let (mut first_scale, mut second_scale) = (scales(), scales());
            match i {
                // The first step: no moments yet, and a block without gradient.
                0 => {
                    (first, second) = (vec![127; n], vec![0; n]);
                    (first_scale, second_scale) = (vec![0.0; blocks], vec![0.0; blocks]);
                    gradient.fill(0.0);
                }
                1 => gradient[n / 2] = f32::NAN,
                2 => gradient[n / 2] = f32::INFINITY,
                _ => {}
            }
            let decay = if i % 2 == 0 { 0.1 } else { 0.0 };
            let [w, g] = [&weight, &gradient].map(|x| gpu.put(Kind::F32, &wide(x)));
            let [m, v] = [&first, &second].map(|x| gpu.put(Kind::U8, &bytes(x)));
            let [ms, vs] = [&first_scale, &second_scale].map(|x| gpu.put(Kind::F32, &wide(x)));
            let (elements, step) = (n as u64, adamw_step(betas, eps, decay));
            let (first_at, second_at) = (m, v);
            tensors.push(OptimizerTensor {
                weight: w,
                gradient: g,
                first: first_at,
                second: second_at,
                first_scale: ms,
                second_scale: vs,
                elements,
                decay,
            });
            let state = cpu::State8 {
                first: &mut first,
                first_scale: &mut first_scale,
                second: &mut second,
                second_scale: &mut second_scale,
            };
            cpu::adamw8(&pool(), step, &mut weight, &gradient, state);
            wants.push((weight, first, first_scale, second, second_scale));
        }
        let gscalars = gpu.put(Kind::F32, &update_scalars());
        gpu.run(&adamw8(&tensors, gscalars, betas, eps));
        for (tensor, (weight, first, first_scale, second, second_scale)) in tensors.iter().zip(&wants) {
            same(&gpu.get(tensor.weight), &wide(weight), "weight");
            same(&gpu.get(tensor.first_scale), &wide(first_scale), "first scale");
            same(&gpu.get(tensor.second_scale), &wide(second_scale), "second scale");
            same(&gpu.get(tensor.first), &bytes(first), "first");
            same(&gpu.get(tensor.second), &bytes(second), "second");
        }
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn sgd_with_and_without_momentum_matches_cpu() {
    for (shift, momentum) in [(0, 0.0), (1, 0.9), (0, 0.9)] {
        let (mut gpu, mut draw) = (Gpu::new(shift), Draw(6));
        let scalars = update_scalars();
        let (mut tensors, mut wants) = (Vec::new(), Vec::new());
        for n in sizes() {
            let [mut weight, gradient, mut buffer] = [(); 3].map(|()| draw.many(Kind::F32, n));
            let [w, g, m] = [&weight, &gradient, &buffer].map(|x| gpu.put(Kind::F32, x));
            let first = if momentum > 0.0 { m } else { 0 };
            let tensor = OptimizerTensor { weight: w, gradient: g, first, ..OptimizerTensor::default() };
            tensors.push(OptimizerTensor { elements: n as u64, decay: 0.1, ..tensor });
            let step = cpu::Sgd {
                rate: scalars[Scalar::LearningRate as usize],
                momentum,
                decay: 0.1,
                clip: scalars[Scalar::ClipFactor as usize],
            };
            cpu::sgd(&pool(), step, &mut weight, &gradient, (momentum > 0.0).then_some(&mut buffer[..]));
            wants.push((weight, m, buffer));
        }
        let gscalars = gpu.put(Kind::F32, &scalars);
        gpu.run(&sgd(&tensors, gscalars, momentum));
        for (tensor, (weight, buffer_at, buffer)) in tensors.iter().zip(&wants) {
            close(&gpu.get(tensor.weight), weight, Kind::F32, "weight");
            close(&gpu.get(*buffer_at), buffer, Kind::F32, "buffer");
        }
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn gradient_norm_and_clip_factor_match_cpu() {
    for shift in [0, 1] {
        let (mut gpu, mut draw) = (Gpu::new(shift), Draw(8));
        let (mut tensors, mut want) = (Vec::new(), 0.25);
        let mut sizes = sizes();
        sizes[3] = 70_003;
        for n in sizes {
            let x = draw.many(Kind::F32, n);
            want += x.iter().map(|x| x * x).sum::<f64>();
            tensors.push((gpu.put(Kind::F32, &x), n as u64));
        }
        let mut before = vec![9.0; METRIC_COUNT as usize];
        before[Metric::NormSquared as usize] = 0.25;
        let (partials, metrics) = (gpu.allocate(Kind::F64, NORM_PARTIALS as usize), gpu.put(Kind::F64, &before));
        gpu.run(&squared_norm(&tensors, partials, metrics));
        let got = gpu.get(metrics);
        assert!((got[Metric::NormSquared as usize] / want - 1.0).abs() < 1e-6, "{got:?} for {want}");
        assert_eq!(got[Metric::LossSum as usize], 9.0);

        for (clip, norm, factor) in [(0.8, 4.0, 0.8 / (2.0 + 1e-6)), (3.0, 4.0, 1.0), (0.0, 4.0, 1.0)] {
            let mut scalars = update_scalars();
            scalars[Scalar::ClipNorm as usize] = Kind::F32.rounded(clip);
            before[Metric::NormSquared as usize] = norm;
            let (gscalars, metrics) = (gpu.put(Kind::F32, &scalars), gpu.put(Kind::F64, &before));
            gpu.run(&clip_factor(metrics, gscalars));
            let got = gpu.get(gscalars)[Scalar::ClipFactor as usize];
            assert!((got - factor).abs() < 1e-6, "{got} for {factor}");
        }
    }
}
