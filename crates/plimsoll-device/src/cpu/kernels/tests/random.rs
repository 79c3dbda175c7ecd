//! Dropout and random initialization.

use super::*;

/// An independent implementation of Philox-4x32-10 (Salmon et al., 2011).
fn philox(mut c: [u32; 4], mut k: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let (a, b) = (u64::from(c[0]) * 0xD251_1F53, u64::from(c[2]) * 0xCD9E_8D57);
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

#[test]
fn dropout_is_a_function_of_the_position() {
    fn check<T: Real>(columns: usize) {
        let mut draw = Draw(32);
        let (sequence, samples, probability) = (7, 5, 0.3);
        let at =
            Dropout { seed: 0x1234_5678_9abc_def0, step: 9, first_sample: 3, sequence, layer: 2, site: 4, probability };
        let n = sequence * samples * columns;
        let mut x: Vec<T> = draw.many(n);
        let before: Vec<T> = draw.many(n);
        x[1] = T::from_f64(f64::INFINITY);
        let mut out = before.clone();
        dropout(&pool(3), at, columns, &x, &mut out, true);
        let mut fresh = vec![T::from_f64(f64::NAN); n];
        dropout(&pool(2), at, columns, &x, &mut fresh, false);
        let factor = T::Wide::from_f64(1.0 / 0.7);
        let mut kept = 0;
        for i in 0..n {
            let (row, column) = (i / columns, i % columns);
            let element = row % sequence * columns + column;
            let counter = [(element / 4) as u32, 2 * 256 + 4, (3 + row / sequence) as u32, 9];
            let word = philox(counter, [0x9abc_def0, 0x1234_5678 ^ 0x4452_4F50])[element % 4];
            let stays = f64::from(word) >= (probability * 4_294_967_296.0).floor();
            let value = if stays { x[i].widen() * factor } else { T::Wide::ZERO };
            assert_eq!(fresh[i], T::narrow(value), "{i} of {columns}");
            assert_eq!(out[i], T::narrow(before[i].widen() + value), "{i} of {columns}");
            kept += usize::from(stays);
        }
        // Five standard deviations.
        let spread = 5.0 * (0.3f64 * 0.7 / n as f64).sqrt();
        assert!((kept as f64 / n as f64 - 0.7).abs() < spread, "{kept} of {n}");
        // The last samples alone give the same elements as the whole.
        let rest = 3 * sequence * columns;
        let mut part = vec![T::ZERO; n - rest];
        dropout(&pool(2), Dropout { first_sample: 6, ..at }, columns, &x[rest..], &mut part, false);
        assert_eq!(part, fresh[rest..]);
    }
    for columns in [1, 30, 64, 131] {
        check::<f32>(columns);
        check::<f64>(columns);
        check::<bf16>(columns);
    }
}

#[test]
fn uniform_numbers_respect_bound_and_portions() {
    let mut whole = vec![0.0f64; 100_003];
    uniform(&pool(2), 7, 3, 0, 0.25, &mut whole);
    assert!(whole.iter().all(|x| x.abs() < 0.25));
    let n = whole.len() as f64;
    assert!((whole.iter().sum::<f64>() / n).abs() < 5.0 * 0.25 / (3.0 * n).sqrt());
    let square = whole.iter().map(|x| x * x).sum::<f64>() / n;
    assert!((square / (0.0625 / 3.0) - 1.0).abs() < 5.0 * (0.8 / n).sqrt());
    let word = philox([1, 0, 3, 0], [7, 0])[2];
    assert_eq!(whole[6], ((f64::from(word) + 0.5) / 4_294_967_296.0 * 2.0 - 1.0) * 0.25);
    let mut part = vec![bf16::ZERO; 50];
    uniform(&pool(1), 7, 3, 4097, 0.25, &mut part);
    assert!(part.iter().zip(&whole[4097..]).all(|(a, b)| *a == bf16::from_f64(*b)));
}
