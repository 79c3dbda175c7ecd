//! The kernels of the CPU: pure functions over slices, one file per family of ops.
//!
//! Kernels are generic over [`Real`], the type of activations and weights: f32, bf16, or f64 for the reference executor of the
//! tests. Sums, statistics, weight gradients and workspaces are in its wide type, and each result is rounded once. Kernels spread
//! their work over a [`Pool`](super::pool::Pool) and allocate nothing; `plimsoll_program::workspace` gives the size of each
//! workspace slice. Results do not depend on the number of threads. Slices shorter than the shapes require are a bug of the
//! caller, and panic.
//!
//! `simd` holds the vectors and number types below all kernels. `product` holds matrix products, which attention uses as well.
//!
//! Legend: B sequences of T tokens, N = B·T rows, D hidden, H heads, K kv heads, E head dim,
//! F ffn, V vocabulary, C = (H + 2K)·E columns of the fused queries | keys | values, R rows,
//! P positions. Matrices are row-major, weights are [out, in].

// In register tiles, indices name the row or lane of the formula.
#![allow(clippy::needless_range_loop)]

mod attention;
mod cast;
mod dropout;
mod elementwise;
mod embed;
mod glu;
mod init;
mod loss;
mod norm;
mod optimizer;
mod product;
mod quantized;
mod rope;
pub(crate) mod simd;
mod softcap;
#[cfg(test)]
mod tests;

pub use attention::{append_cache, attention, attention_grad, cached_attention, copy_cache, shift_positions};
pub use cast::{CastError, from_bytes, to_bytes};
pub use dropout::{Dropout, dropout};
pub use elementwise::{add, copy, fill, round, sum_rows};
pub use embed::{embed, embed_grad};
pub use glu::{glu, glu_grad, glu_grad_in_place};
pub use init::{normal, uniform};
pub use loss::{IGNORED, LabelledRows, cross_entropy, softmax_grad, softmax_stats};
pub use norm::{NormWeight, head_norm, head_norm_grad, rms_norm, rms_norm_grad};
pub use optimizer::{AdamW, Sgd, State8, adamw, adamw8, sgd, squared_norm};
pub use plimsoll_program::op::{Activation, Heads};
pub use product::{Multiply, Product, product};
pub use quantized::{QuantizedData, dequantize, quantize};
pub use rope::{rope, rope_table};
pub use simd::{Float, Real, SimdLevel, simd_level};
pub use softcap::soft_cap;
