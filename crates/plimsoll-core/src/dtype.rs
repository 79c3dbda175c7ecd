//! Element types of tensors.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// 64-bit float: sums of metrics, and the reference precision of tests.
    F64,
    /// 32-bit float.
    F32,
    /// bfloat16: 8 bits of exponent, 7 bits of fraction.
    Bf16,
    /// IEEE half precision; occurs only in files.
    F16,
    /// 32-bit integer: tokens, labels, positions.
    I32,
    /// A byte: quantized blocks, and buffers for raw bytes.
    U8,
}

impl DType {
    /// Returns the size of one element in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::U8 => 1,
        }
    }

    /// Returns the type used for sums, master weights and statistics of values of this type: `F64` for `F64`,
    /// `F32` otherwise.
    pub const fn wide(self) -> DType {
        match self {
            DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::I32 => "i32",
            DType::U8 => "u8",
        })
    }
}
