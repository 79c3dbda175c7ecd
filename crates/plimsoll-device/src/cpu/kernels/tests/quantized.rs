//! Quantized matrices and 8-bit optimizer state.

use super::*;

/// Returns numbers of very different magnitudes, with zeros and a whole block of zeros.
fn weights<T: Real>(draw: &mut Draw, n: usize) -> Vec<T> {
    (0..n)
        .map(|i| T::from_f64(if i % 97 == 5 || (640..704).contains(&i) { 0.0 } else { draw.next().powi(3) }))
        .collect()
}

#[test]
fn quantized_matrices_match_the_format_definition() {
    fn check<T: Real>(draw: &mut Draw) {
        // Several groups of 256 blocks with a partial last block, and less than a block.
        for (rows, columns) in [(3, 11), (1, 64), (70, 501)] {
            let from: Vec<T> = weights(draw, rows * columns);
            let exact: Vec<f32> = from.iter().map(|x| x.to_f64() as f32).collect();
            let n = from.len();
            let blocks = n.div_ceil(64);
            let (mut codes, mut scales) = (vec![1; n.div_ceil(2)], vec![1; blocks]);
            let mut groups = vec![f32::NAN; 2 * blocks.div_ceil(256)];
            let into = QuantizedData::Nf4 { codes: &mut codes[..], scales: &mut scales[..], groups: &mut groups[..] };
            quantize(&pool(2), &from, columns, into);
            let (mut want_codes, mut want_scales, mut want_groups) = (vec![0; codes.len()], vec![0; blocks], vec![]);
            let full_end: Vec<f32> =
                exact.chunks(64).zip(want_codes.chunks_mut(32)).map(|(x, codes)| nf4_block(x, codes)).collect();
            for (full_end, scales) in full_end.chunks(256).zip(want_scales.chunks_mut(256)) {
                want_groups.extend(nf4_group(full_end, scales));
            }
            assert_eq!((&codes, &scales, &groups), (&want_codes, &want_scales, &want_groups));
            let mut back = vec![T::from_f64(f64::NAN); n];
            let stored = QuantizedData::Nf4 { codes: &codes[..], scales: &scales[..], groups: &groups[..] };
            dequantize(&pool(3), stored, columns, &mut back);
            for (i, back) in back.iter().enumerate() {
                let group = i / 64 / 256 * 2;
                let scale = nf4_scale(scales[i / 64], [groups[group], groups[group + 1]]);
                assert_eq!(*back, T::from_f64(nf4_value(codes[i / 2], i % 2 == 0, scale).into()), "nf4[{i}]");
            }

            let (mut codes, mut scales) = (vec![1; n], vec![f32::NAN; rows]);
            quantize(&pool(2), &from, columns, QuantizedData::Int8 { codes: &mut codes[..], scales: &mut scales[..] });
            let mut want = vec![0; columns];
            for (row, x) in exact.chunks(columns).enumerate() {
                assert_eq!(int8_row(x, &mut want), scales[row]);
                assert_eq!(want, codes[row * columns..(row + 1) * columns]);
            }
            dequantize(&pool(3), QuantizedData::Int8 { codes: &codes[..], scales: &scales[..] }, columns, &mut back);
            for (i, back) in back.iter().enumerate() {
                assert_eq!(*back, T::from_f64(int8_value(codes[i], scales[i / columns]).into()), "int8[{i}]");
            }
        }
    }
    let mut draw = Draw(30);
    check::<f32>(&mut draw);
    check::<f64>(&mut draw);
    check::<bf16>(&mut draw);
}

/// The 16 nf4 values as printed in the QLoRA paper (appendix E).
const PUBLISHED: [f64; 16] = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
];

#[test]
fn nf4_values_survive_a_round_trip() {
    // Every block contains its largest magnitude, so its scale is 2; all scales are equal and therefore exact.
    let from: Vec<f32> = (0..64 * 20).map(|i| PUBLISHED[(i * 5 + i / 64) % 16] as f32 * 2.0).collect();
    let (mut codes, mut scales, mut groups) = (vec![0; from.len() / 2], vec![0; 20], vec![0.0; 2]);
    let into = QuantizedData::Nf4 { codes: &mut codes[..], scales: &mut scales[..], groups: &mut groups[..] };
    quantize(&pool(2), &from, 64, into);
    for (i, byte) in codes.iter().enumerate() {
        let code = |i: usize| ((i * 5 + i / 64) % 16) as u8;
        assert_eq!(*byte, code(2 * i) << 4 | code(2 * i + 1), "the first of a pair is in the upper half");
    }
    let mut back = vec![f32::NAN; from.len()];
    let stored = QuantizedData::Nf4 { codes: &codes[..], scales: &scales[..], groups: &groups[..] };
    dequantize(&pool(2), stored, 64, &mut back);
    assert_eq!(back, from);
}

/// Compares nf4 codes with those of bitsandbytes 0.50.2 on the CPU:
/// `i = torch.arange(256.); x = (i * 37 % 101 - 50) / 64 * (1 + i // 64)`
/// `quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=False)[0]`
#[test]
fn nf4_codes_match_bitsandbytes() {
    const THEIRS: &str = "04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c1\
                          6d18e3b04c17e29f3b05d17e2af4c06d18e2a04c16e29f3b05d17e29f3c05d18\
                          e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f3b05d17e2af\
                          4c06d18e2a04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05";
    let from: Vec<f32> = (0..256).map(|i| ((i * 37 % 101) as f32 - 50.0) / 64.0 * (1 + i / 64) as f32).collect();
    let (mut codes, mut scales, mut groups) = (vec![0; 128], vec![0; 4], vec![0.0; 2]);
    let into = QuantizedData::Nf4 { codes: &mut codes[..], scales: &mut scales[..], groups: &mut groups[..] };
    quantize(&pool(2), &from, 256, into);
    assert_eq!(codes.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), THEIRS);
}

#[test]
fn adamw8_matches_adamw_on_dequantized_state() {
    let mut draw = Draw(31);
    let n = 256usize * 70 + 37;
    let blocks = n.div_ceil(256);
    let mut weight: Vec<f32> = draw.many(n);
    let (mut first, mut second) = (vec![127; n], vec![0; n]);
    let (mut first_scale, mut second_scale) = (vec![0.0; blocks], vec![0.0; blocks]);
    let (mut plain, mut plain_first, mut plain_second) = (weight.clone(), vec![0.0; n], vec![0.0; n]);
    for t in 1..=4 {
        // Includes blocks without any gradient.
        let mut gradient: Vec<f32> = draw.many(n);
        gradient[3 * 256..4 * 256].fill(0.0);
        let step = AdamW {
            rate: 1e-2,
            betas: [0.9, 0.95],
            eps: 1e-8,
            decay: 0.1,
            bias_corrections: [1.0 - 0.9f32.powi(t), 1.0 - 0.95f32.powi(t)],
            clip: 0.5,
        };
        let full_end = |codes: &[u8], scales: &[f32], signed: bool| -> Vec<f32> {
            codes.iter().enumerate().map(|(i, &code)| dynamic_map(signed)[code as usize] * scales[i / 256]).collect()
        };
        let (mut m, mut v) = (full_end(&first, &first_scale, true), full_end(&second, &second_scale, false));
        let mut want = weight.clone();
        adamw(&pool(1), step, &mut want, &gradient, &mut m, &mut v);
        let state = State8 {
            first: &mut first,
            first_scale: &mut first_scale,
            second: &mut second,
            second_scale: &mut second_scale,
        };
        adamw8(&pool(3), step, &mut weight, &gradient, state);
        assert_eq!(weight, want);
        for (codes, scales, values, signed) in [(&first, &first_scale, &m, true), (&second, &second_scale, &v, false)] {
            for (block, values) in values.chunks(256).enumerate() {
                let most = values.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                assert_eq!(scales[block], most);
                for (x, code) in values.iter().zip(&codes[block * 256..]) {
                    assert_eq!(*code, formats::code(formats::dynamic_thresholds(signed), x * formats::inverse(most)));
                }
            }
        }
        adamw(&pool(1), step, &mut plain, &gradient, &mut plain_first, &mut plain_second);
    }
    // Close to, but not equal to, the result with full-precision state; the 4 steps together change about 4e-2.
    let distance = weight.iter().zip(&plain).map(|(a, b)| f64::from((a - b).abs())).sum::<f64>() / n as f64;
    assert!(distance > 0.0 && distance < 4e-3, "{distance}");
}
