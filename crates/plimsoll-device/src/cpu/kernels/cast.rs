//! Conversion between numbers and the bytes of files: little-endian, rounded to nearest even.

use super::simd::{Real, to_odd};
use crate::cpu::pool::{Pool, Shared};
use half::{bf16, f16};
use plimsoll_core::DType;

/// Smallest number of elements that one task of the thread pool processes.
const MIN_TASK_ELEMENTS: usize = 16384;

/// A failed conversion between bytes and numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CastError {
    /// The type is not a float type.
    #[error("{0} is not a float type: expected f64, f32, bf16 or f16")]
    NotFloat(DType),
    /// The number of bytes does not match the number and type of the elements.
    #[error("{bytes} bytes do not hold {elements} elements of {dtype}")]
    Length {
        /// Number of bytes given.
        bytes: usize,
        /// Number of elements that the bytes should hold.
        elements: usize,
        /// Type of the elements.
        dtype: DType,
    },
}

impl From<CastError> for plimsoll_core::Failure {
    fn from(error: CastError) -> Self {
        plimsoll_core::Failure::input(error.to_string())
    }
}

fn check(dtype: DType, bytes: usize, elements: usize) -> Result<(), CastError> {
    if !matches!(dtype, DType::F64 | DType::F32 | DType::Bf16 | DType::F16) {
        return Err(CastError::NotFloat(dtype));
    }
    if bytes as u64 != elements as u64 * dtype.bytes() {
        return Err(CastError::Length { bytes, elements, dtype });
    }
    Ok(())
}

/// Reads `to.len()` numbers of `dtype` from `bytes`, and rounds them to type `T` (ties to even). `bytes` hold exactly
/// these numbers, little-endian and at any alignment.
///
/// # Errors
/// Fails if `dtype` is no float type, or if the number of bytes does not match.
pub fn from_bytes<T: Real>(pool: &Pool, dtype: DType, bytes: &[u8], to: &mut [T]) -> Result<(), CastError> {
    check(dtype, bytes.len(), to.len())?;
    let (total, to) = (to.len(), Shared::new(to));
    pool.split(total, MIN_TASK_ELEMENTS, |range, _| {
        // SAFETY: ranges of one split are disjoint.
        let to = unsafe { to.part(range.clone()) };
        match dtype {
            DType::F64 => read(bytes, range.start, to, |b| T::from_f64(f64::from_le_bytes(b))),
            DType::F32 => read(bytes, range.start, to, |b| T::from_f64(f32::from_le_bytes(b).into())),
            DType::Bf16 => read(bytes, range.start, to, |b| T::from_f64(bf16::from_le_bytes(b).to_f64())),
            _ => read(bytes, range.start, to, |b| T::from_f64(f16::from_le_bytes(b).to_f32().into())),
        }
    });
    Ok(())
}

/// Writes `from` as numbers of `dtype` to `bytes`, rounded to nearest (ties to even). `bytes` have exactly the size of
/// these numbers, which are little-endian and at any alignment.
///
/// # Errors
/// Fails if `dtype` is no float type, or if the number of bytes does not match.
pub fn to_bytes<T: Real>(pool: &Pool, dtype: DType, from: &[T], bytes: &mut [u8]) -> Result<(), CastError> {
    check(dtype, bytes.len(), from.len())?;
    let bytes = Shared::new(bytes);
    let size = dtype.bytes() as usize;
    pool.split(from.len(), MIN_TASK_ELEMENTS, |range, _| {
        // SAFETY: ranges of one split are disjoint.
        let to = unsafe { bytes.part(range.start * size..range.end * size) };
        let from = &from[range];
        match dtype {
            DType::F64 => write(from, to, |x| x.to_f64().to_le_bytes()),
            DType::F32 => write(from, to, |x| (x.to_f64() as f32).to_le_bytes()),
            DType::Bf16 => write(from, to, |x| bf16::from_f32(to_odd(x.to_f64())).to_le_bytes()),
            _ => write(from, to, |x| f16::from_f32(to_odd(x.to_f64())).to_le_bytes()),
        }
    });
    Ok(())
}

fn read<T, const N: usize>(bytes: &[u8], first: usize, to: &mut [T], convert: impl Fn([u8; N]) -> T) {
    let bytes = bytes[first * N..(first + to.len()) * N].as_chunks::<N>().0;
    for (to, bytes) in to.iter_mut().zip(bytes) {
        *to = convert(*bytes);
    }
}

fn write<T: Copy, const N: usize>(from: &[T], to: &mut [u8], convert: impl Fn(T) -> [u8; N]) {
    for (from, to) in from.iter().zip(to.as_chunks_mut::<N>().0) {
        *to = convert(*from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_works_at_any_alignment() {
        let pool = Pool::new(2).unwrap();
        let values: Vec<f32> = (0..40_001).map(|i| (i as f32 - 20_000.0) * 0.37).collect();
        let mut bytes = vec![0u8; values.len() * 4 + 1];
        to_bytes(&pool, DType::F32, &values, &mut bytes[1..]).unwrap();
        let mut back = vec![0.0f32; values.len()];
        from_bytes(&pool, DType::F32, &bytes[1..], &mut back).unwrap();
        assert_eq!(values, back);
        let mut wide = vec![0.0f64; values.len()];
        from_bytes(&pool, DType::F32, &bytes[1..], &mut wide).unwrap();
        assert!(values.iter().zip(&wide).all(|(a, b)| f64::from(*a) == *b));
    }

    #[test]
    fn bf16_rounds_once_to_nearest_even() {
        let pool = Pool::new(1).unwrap();
        // Around 1, bf16 has steps of 2^-7: ties at odd multiples of 2^-8.
        let step = 1.0 / 128.0;
        let cases = [
            (1.0 + step / 2.0, 1.0),
            (1.0 + 1.5 * step, 1.0 + 2.0 * step),
            // Just above the tie; rounding through f32 would give the tie and then round down.
            (1.0 + step / 2.0 + 1e-12, 1.0 + step),
        ];
        for (given, want) in cases {
            let mut bytes = [0u8; 2];
            to_bytes(&pool, DType::Bf16, &[given], &mut bytes).unwrap();
            let mut back = [0.0f64];
            from_bytes(&pool, DType::Bf16, &bytes, &mut back).unwrap();
            assert_eq!(back[0], want, "{given}");
        }
        for dtype in [DType::F16, DType::Bf16, DType::F64] {
            let given = [1.0f32, -0.5, 0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1024.0];
            let mut bytes = vec![0u8; given.len() * dtype.bytes() as usize];
            to_bytes(&pool, dtype, &given, &mut bytes).unwrap();
            let mut back = [0.0f32; 7];
            from_bytes(&pool, dtype, &bytes, &mut back).unwrap();
            for (a, b) in given.iter().zip(back) {
                assert!(*a == b || (a.is_nan() && b.is_nan()), "{dtype} {a} {b}");
            }
        }
    }

    #[test]
    fn wrong_lengths_and_types_are_rejected() {
        let pool = Pool::new(1).unwrap();
        let mut to = [0.0f32; 2];
        let error = from_bytes(&pool, DType::Bf16, &[0; 5], &mut to).unwrap_err();
        assert_eq!(error.to_string(), "5 bytes do not hold 2 elements of bf16");
        assert_eq!(from_bytes(&pool, DType::I32, &[0; 8], &mut to), Err(CastError::NotFloat(DType::I32)));
        assert_eq!(to_bytes(&pool, DType::U8, &to, &mut [0; 2]), Err(CastError::NotFloat(DType::U8)));
    }
}
