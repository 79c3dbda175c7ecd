//! Tests of the vector types: exponentials, transposition, partial vectors and rounding to bf16.

use super::*;

vectorized! {
    fn exp_all<T: Float, V>(x: &mut [T]) {
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let value: V = get(x, at, count);
            put(x, at, count, value.exp());
        });
    }
}

#[test]
fn exp_error_is_within_two_units() {
    let mut x: Vec<f32> = (-1_040_000..=887_000).map(|i| i as f32 * 1e-4).collect();
    let exact: Vec<f64> = x.iter().map(|&x| f64::from(x).exp()).collect();
    exp_all(&mut x);
    for (got, want) in x.iter().zip(exact) {
        // A unit in the last place of the nearest f32, or of the subnormals.
        let unit = (want * f64::from(f32::EPSILON)).max(f64::from(f32::from_bits(1)));
        assert!((f64::from(*got) - want).abs() <= 2.0 * unit, "{got} for {want}");
    }
}

#[test]
fn exp_of_the_extremes() {
    let mut x = [f32::NEG_INFINITY, -1e30, -200.0, 0.0, 88.8, 1e30, f32::INFINITY, f32::NAN, -0.0, 89.9, 90.1];
    exp_all(&mut x);
    let inf = f32::INFINITY;
    assert_eq!(x[..7], [0.0, 0.0, 0.0, 1.0, inf, inf, inf]);
    assert!(x[7].is_nan());
    assert_eq!(x[8..], [1.0, inf, inf]);
    let mut x = [f64::NEG_INFINITY, 1.0, f64::NAN, 710.0, -5.0];
    exp_all(&mut x);
    assert_eq!(x[..2], [0.0, 1f64.exp()]);
    assert!(x[2].is_nan() && x[3].is_infinite() && x[4] == (-5f64).exp());
}

#[test]
fn transpose_handles_any_shape() {
    fn check<T: Float>() {
        for (rows, columns) in [(1, 1), (16, 16), (5, 40), (40, 5), (67, 33), (64, 64)] {
            let (from_row, to_row) = (columns + 3, rows + 2);
            let from: Vec<T> = (0..rows * from_row).map(|i| T::from_f64(i as f64)).collect();
            let mut to = vec![T::from_f64(-1.0); columns * to_row];
            transpose(&from, from_row, rows, columns, T::from_f64(0.5), &mut to, to_row);
            for (at, value) in to.iter().enumerate() {
                let (j, i) = (at / to_row, at % to_row);
                let want = if i < rows { T::from_f64((i * from_row + j) as f64 * 0.5) } else { T::from_f64(-1.0) };
                assert_eq!(*value, want, "{i}, {j} of {rows} x {columns}");
            }
        }
    }
    check::<f32>();
    check::<f64>();
}

vectorized! {
    fn sum_and_max<T: Float, V>(x: &[T], out: &mut [T]) -> (T, T) {
        let mut sum = V::splat(T::ZERO);
        let mut largest = V::splat(T::MINUS_INFINITY);
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            let value: V = get(x, at, count);
            sum = sum + value;
            largest = largest.max(get_or(x, at, count, V::splat(T::MINUS_INFINITY)));
            put(out, at, count, value.select_le(V::splat(T::ZERO), V::splat(T::ONE), value.sqrt()));
        });
        (sum.sum(), largest.max_lane())
    }
}

#[test]
fn partial_vectors_touch_only_their_elements() {
    for n in 0..40 {
        let x: Vec<f32> = (0..n).map(|i| i as f32 - 5.0).collect();
        let mut out = vec![-7.0f32; n + 20];
        let (sum, largest) = sum_and_max(&x, &mut out[..n]);
        assert_eq!(sum, x.iter().sum::<f32>());
        assert_eq!(largest, x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        for i in 0..n {
            assert_eq!(out[i], if x[i] <= 0.0 { 1.0 } else { x[i].sqrt() });
        }
        assert!(out[n..].iter().all(|&kept| kept == -7.0));
    }
}

vectorized! {
    fn round_trip<T, V>(x: &[T::Wide], out: &mut [T], back: &mut [T::Wide]) {
        strips::<T, V>(x.len(), #[inline(always)] |at, count| {
            put(out, at, count, get::<T::Wide, V>(x, at, count));
            put(back, at, count, get::<T, V>(out, at, count));
        });
    }
}

#[test]
fn vectors_round_to_bf16_like_scalars() {
    // Every upper half, with lower halves below, at and above the tie; parts of vectors at the end.
    let bits =
        (0..=u16::MAX).flat_map(|high| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| u32::from(high) << 16 | low));
    let x: Vec<f32> = bits.chain([0; 5]).map(f32::from_bits).collect();
    let (mut out, mut back) = (vec![bf16::ONE; x.len()], vec![1.0; x.len()]);
    round_trip(&x, &mut out, &mut back);
    for (i, x) in x.iter().enumerate() {
        assert_eq!(out[i].to_bits(), bf16::from_f32(*x).to_bits(), "{x} ({:x})", x.to_bits());
        assert_eq!(back[i].to_bits(), u32::from(out[i].to_bits()) << 16);
    }
}
