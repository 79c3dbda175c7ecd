//! Optimizer updates and the gradient norm.

use super::*;

#[test]
fn squared_norm_matches_reference_and_propagates_nan() {
    let mut draw = Draw(15);
    for n in [0, 1, 100, 300_001] {
        let x: Vec<f32> = draw.many(n);
        let want: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
        assert!((squared_norm(&pool(2), &x) - want).abs() <= 1e-6 * want);
    }
    let mut x = vec![1.0f32; 50_000];
    x[49_999] = f32::INFINITY;
    assert_eq!(squared_norm(&pool(2), &x), f64::INFINITY);
    x[3] = f32::NAN;
    assert!(squared_norm(&pool(2), &x).is_nan());
}

#[test]
fn adamw_matches_its_formula() {
    fn check<T: Float>() {
        let mut draw = Draw(16);
        let n = 50_003;
        let mut weight: Vec<T> = draw.many(n);
        let (mut first, mut second) = (vec![T::ZERO; n], vec![T::ZERO; n]);
        let (mut w, mut m, mut v) = (to_f64s(&weight), vec![0.0; n], vec![0.0; n]);
        for t in 1..=3 {
            let gradient: Vec<T> = draw.many(n);
            let (c1, c2) = (1.0 - 0.9f64.powi(t), 1.0 - 0.95f64.powi(t));
            let step = AdamW {
                rate: T::from_f64(1e-2),
                betas: [0.9, 0.95],
                eps: T::from_f64(1e-8),
                decay: T::from_f64(0.1),
                bias_corrections: [T::from_f64(c1), T::from_f64(c2)],
                clip: T::from_f64(0.5),
            };
            adamw(&pool(2), step, &mut weight, &gradient, &mut first, &mut second);
            for i in 0..n {
                let g = gradient[i].to_f64() * 0.5;
                w[i] -= 1e-2 * 0.1 * w[i];
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.95 * v[i] + 0.05 * g * g;
                w[i] -= 1e-2 / c1 * m[i] / (v[i].sqrt() / c2.sqrt() + 1e-8);
            }
        }
        assert_close(&weight, &w, tolerance::<T>(16), "weights");
        assert_close(&first, &m, tolerance::<T>(16), "first moments");
        assert_close(&second, &v, tolerance::<T>(16), "second moments");
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn sgd_matches_its_formula() {
    let mut draw = Draw(17);
    let n = 20_003;
    for momentum in [None, Some(0.9)] {
        let mut weight: Vec<f64> = draw.many(n);
        let mut buffer = vec![0.0; n];
        let (mut w, mut b) = (weight.clone(), vec![0.0; n]);
        for _ in 0..3 {
            let gradient: Vec<f64> = draw.many(n);
            let step = Sgd { rate: 1e-2, momentum: momentum.unwrap_or(0.0), decay: 0.1, clip: 0.5 };
            sgd(&pool(2), step, &mut weight, &gradient, momentum.map(|_| &mut buffer[..]));
            for i in 0..n {
                b[i] = momentum.unwrap_or(0.0) * b[i] + gradient[i] * 0.5 + 0.1 * w[i];
                w[i] -= 1e-2 * b[i];
            }
        }
        assert_close(&weight, &w, 1e-14, "weights");
    }
}
