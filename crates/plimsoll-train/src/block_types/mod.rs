//! Element types of GGUF tensors. A quantized row is a sequence of blocks, each with its own scale.
//!
//! | module | content |
//! |---|---|
//! | `quants` | one module for each quantized type: rows of f32 to blocks |
//! | `decode` | blocks to rows of f32 |

mod decode;
mod quants;

use half::{bf16, f16};
use quants::{q4_0, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0};
use std::fmt;

/// The element type of a GGUF tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BlockType {
    /// 32-bit floating point.
    F32,
    /// 16-bit floating point with 5 bits of exponent.
    F16,
    /// 16-bit floating point with 8 bits of exponent.
    Bf16,
    /// 4 bits, and a scale for 32 elements.
    Q4_0,
    /// 5 bits, and a scale for 32 elements.
    Q5_0,
    /// 5 bits, and a scale and a minimum for 32 elements.
    Q5_1,
    /// 8 bits, and a scale for 32 elements.
    Q8_0,
    /// 4 bits; 8 scales and minimums of 6 bits, which share two factors, for 256 elements.
    Q4K,
    /// 5 bits; 8 scales and minimums of 6 bits, which share two factors, for 256 elements.
    Q5K,
    /// 6 bits; 16 scales of 8 bits, which share a factor, for 256 elements.
    Q6K,
}

impl BlockType {
    /// All types.
    pub const ALL: [BlockType; 10] = [
        BlockType::F32,
        BlockType::F16,
        BlockType::Bf16,
        BlockType::Q4_0,
        BlockType::Q5_0,
        BlockType::Q5_1,
        BlockType::Q8_0,
        BlockType::Q4K,
        BlockType::Q5K,
        BlockType::Q6K,
    ];

    /// Returns the number of the type in the header of a file.
    pub const fn id(self) -> u32 {
        match self {
            BlockType::F32 => 0,
            BlockType::F16 => 1,
            BlockType::Q4_0 => 2,
            BlockType::Q5_0 => 6,
            BlockType::Q5_1 => 7,
            BlockType::Q8_0 => 8,
            BlockType::Q4K => 12,
            BlockType::Q5K => 13,
            BlockType::Q6K => 14,
            BlockType::Bf16 => 30,
        }
    }

    /// Returns the name of the type in lower case, such as `q4_k`.
    pub const fn name(self) -> &'static str {
        match self {
            BlockType::F32 => "f32",
            BlockType::F16 => "f16",
            BlockType::Bf16 => "bf16",
            BlockType::Q4_0 => "q4_0",
            BlockType::Q5_0 => "q5_0",
            BlockType::Q5_1 => "q5_1",
            BlockType::Q8_0 => "q8_0",
            BlockType::Q4K => "q4_k",
            BlockType::Q5K => "q5_k",
            BlockType::Q6K => "q6_k",
        }
    }

    /// Returns the number of elements in a block. The columns of a tensor are a multiple of it.
    pub const fn elements(self) -> u64 {
        match self {
            BlockType::F32 | BlockType::F16 | BlockType::Bf16 => 1,
            BlockType::Q4_0 | BlockType::Q5_0 | BlockType::Q5_1 | BlockType::Q8_0 => 32,
            BlockType::Q4K | BlockType::Q5K | BlockType::Q6K => 256,
        }
    }

    /// Returns the size of a block in bytes.
    pub const fn block_bytes(self) -> u64 {
        match self {
            BlockType::F32 => 4,
            BlockType::F16 | BlockType::Bf16 => 2,
            BlockType::Q4_0 => q4_0::BYTES as u64,
            BlockType::Q5_0 => q5_0::BYTES as u64,
            BlockType::Q5_1 => q5_1::BYTES as u64,
            BlockType::Q8_0 => q8_0::BYTES as u64,
            BlockType::Q4K => q4_k::BYTES as u64,
            BlockType::Q5K => q5_k::BYTES as u64,
            BlockType::Q6K => q6_k::BYTES as u64,
        }
    }

    /// Returns the size of `elements` elements in bytes. They are whole blocks.
    pub const fn bytes(self, elements: u64) -> u64 {
        elements / self.elements() * self.block_bytes()
    }

    /// Returns the largest magnitude of a value that the type stores: that of an f16, in which scales are stored, too.
    pub fn largest(self) -> f32 {
        match self {
            BlockType::F32 => f32::MAX,
            BlockType::Bf16 => bf16::MAX.to_f32(),
            _ => f16::MAX.to_f32(),
        }
    }

    /// Converts finite values of whole blocks, and fills `into`, which has the size of the blocks.
    ///
    /// # Panics
    /// If `from` are no whole blocks, or `into` has another size.
    pub fn encode(self, from: &[f32], into: &mut [u8]) {
        assert!((from.len() as u64).is_multiple_of(self.elements()), "values are whole blocks");
        assert_eq!(into.len() as u64, self.bytes(from.len() as u64), "the blocks fill their bytes");
        match self {
            BlockType::F32 => encode_each(from, into, f32::to_le_bytes),
            BlockType::F16 => encode_each(from, into, |value| f16::from_f32(value).to_le_bytes()),
            BlockType::Bf16 => encode_each(from, into, |value| bf16::from_f32(value).to_le_bytes()),
            BlockType::Q4_0 => encode_blocks(from, into, q4_0::quantize),
            BlockType::Q5_0 => encode_blocks(from, into, q5_0::quantize),
            BlockType::Q5_1 => encode_blocks(from, into, q5_1::quantize),
            BlockType::Q8_0 => encode_blocks(from, into, q8_0::quantize),
            BlockType::Q4K => encode_blocks(from, into, q4_k::quantize),
            BlockType::Q5K => encode_blocks(from, into, q5_k::quantize),
            BlockType::Q6K => encode_blocks(from, into, q6_k::quantize),
        }
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

fn encode_each<const BYTES: usize>(from: &[f32], into: &mut [u8], encode: impl Fn(f32) -> [u8; BYTES]) {
    for (value, bytes) in from.iter().zip(into.as_chunks_mut::<BYTES>().0) {
        *bytes = encode(*value);
    }
}

fn encode_blocks<const ELEMENTS: usize, const BYTES: usize>(
    from: &[f32],
    into: &mut [u8],
    quantize: impl Fn(&[f32; ELEMENTS]) -> [u8; BYTES],
) {
    for (values, bytes) in from.as_chunks::<ELEMENTS>().0.iter().zip(into.as_chunks_mut::<BYTES>().0) {
        *bytes = quantize(values);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn round_trip(block_type: BlockType, values: &[f32]) -> Vec<f32> {
        let mut bytes = vec![0xa5; block_type.bytes(values.len() as u64) as usize];
        block_type.encode(values, &mut bytes);
        let mut back = vec![0.0; values.len()];
        block_type.decode(&bytes, &mut back);
        back
    }

    /// Returns values with a bell-shaped distribution, as weights have it.
    fn weights(count: usize, mut seed: u64) -> Vec<f32> {
        let mut uniform = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 40) as f32 / (1u64 << 24) as f32
        };
        (0..count).map(|_| 0.05 * ((0..12).map(|_| uniform()).sum::<f32>() - 6.0)).collect()
    }

    fn relative_error(values: &[f32], back: &[f32]) -> f64 {
        let square = |x: f32| f64::from(x) * f64::from(x);
        let error: f64 = values.iter().zip(back).map(|(a, b)| square(a - b)).sum();
        (error / values.iter().map(|x| square(*x)).sum::<f64>()).sqrt()
    }

    #[test]
    fn relative_errors_of_weights_stay_below_bounds() {
        let values = weights(64 * 256, 1);
        let bounds = [
            (BlockType::F32, 0.0),
            (BlockType::F16, 0.000_22),
            (BlockType::Bf16, 0.0018),
            (BlockType::Q8_0, 0.0055),
            (BlockType::Q6K, 0.0175),
            (BlockType::Q5K, 0.0360),
            (BlockType::Q5_1, 0.0390),
            (BlockType::Q5_0, 0.0440),
            (BlockType::Q4K, 0.0730),
            (BlockType::Q4_0, 0.0880),
        ];
        let errors = bounds.map(|(block_type, _)| relative_error(&values, &round_trip(block_type, &values)));
        // A bound far above the error would let a worse search pass.
        let is_near = |(error, (_, bound)): (&f64, &(BlockType, f64))| error <= bound && *error >= bound * 0.9;
        assert!(errors.iter().zip(&bounds).all(is_near), "{errors:?}, bounds {bounds:?}");
    }

    #[test]
    fn zeros_and_constants_survive_quantization() {
        for block_type in BlockType::ALL {
            for value in [0.0f32, -0.0, 1.0, -1.0, 1e-30, -1e-30, 60000.0, -60000.0] {
                for back in round_trip(block_type, &[value; 256]) {
                    let bound = (value.abs() * 0.08).max(1e-6);
                    assert!((back - value).abs() <= bound, "{block_type}: {value} became {back}");
                }
            }
        }
    }

    #[test]
    fn largest_values_stay_finite() {
        for block_type in BlockType::ALL {
            let largest = block_type.largest();
            for values in [[largest; 256], [-largest; 256]] {
                let back = round_trip(block_type, &values);
                assert!(back.iter().all(|value| value.is_finite()), "{block_type}");
            }
        }
        assert!(round_trip(BlockType::Bf16, &[f32::MAX]).iter().all(|value| value.is_infinite()));
    }

    proptest! {
        /// Finite values of any size never panic, and stay finite within the range of the type.
        #[test]
        fn any_finite_block_is_encoded(values in prop::collection::vec(any::<f32>(), 512), shift in 0u32..60) {
            for block_type in BlockType::ALL {
                let values: Vec<f32> = values
                    .iter()
                    .map(|value| if value.is_finite() { value / 2f32.powi(shift as i32) } else { 0.5 })
                    .collect();
                let back = round_trip(block_type, &values);
                prop_assert_eq!(back.len(), values.len());
                if values.iter().all(|value| value.abs() <= block_type.largest()) {
                    prop_assert!(back.iter().all(|value| value.is_finite()), "{}", block_type);
                }
            }
        }

        /// NaN and infinite values, which the writer refuses, do not panic.
        #[test]
        fn values_that_are_not_finite_do_not_panic(bits in prop::collection::vec(any::<u32>(), 256)) {
            let values: Vec<f32> = bits.iter().map(|bits| f32::from_bits(bits | 0x7f80_0000)).collect();
            for block_type in BlockType::ALL {
                let mut bytes = vec![0; block_type.bytes(256) as usize];
                block_type.encode(&values, &mut bytes);
            }
        }

        /// No element is further from its value than the step between neighbouring codes of its group allows.
        #[test]
        fn elements_stay_within_a_step(seed in any::<u64>()) {
            let values = weights(256, seed);
            for (block_type, group, levels) in [
                (BlockType::Q8_0, 32, 254.0),
                (BlockType::Q5_0, 32, 31.0),
                (BlockType::Q4_0, 32, 15.0),
                (BlockType::Q6K, 16, 40.0),
                (BlockType::Q5K, 32, 22.0),
                (BlockType::Q4K, 32, 10.0),
            ] {
                let back = round_trip(block_type, &values);
                for (values, back) in values.chunks(group).zip(back.chunks(group)) {
                    let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
                    let step = 2.0 * largest / levels;
                    for (value, back) in values.iter().zip(back) {
                        prop_assert!((value - back).abs() <= step * 1.1, "{}: {} {}", block_type, value, back);
                    }
                }
            }
        }
    }
}
