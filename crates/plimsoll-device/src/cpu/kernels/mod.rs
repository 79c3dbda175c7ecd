//! What the CPU computes: pure functions over slices, one file per family of ops.
//!
//! Kernels are generic over [`Real`], the type of activations and weights (f32, bf16, or f64 for the
//! tests' reference executor); what they sum up, statistics, gradients of weights and scratch are in
//! its wide type, and each result is rounded once. They spread their work over a
//! [`Pool`](super::pool::Pool), and allocate nothing: scratch comes in as a slice whose
//! size `plimsoll_program::workspace` says. Results do not depend on the number of threads.
//! Slices shorter than the shapes say are a bug of the caller, and panic.
//!
//! Legend: B sequences of T tokens, N = B·T rows, D hidden, H heads, K kv heads, E head dim,
//! F ffn, V vocabulary, C = (H + 2K)·E columns of the fused queries | keys | values, R rows,
//! P positions. Matrices are row-major, weights are [out, in].

// In tiles of registers, an index is the row or the lane that the formula names.
#![allow(clippy::needless_range_loop)]

mod attention;
mod cast;
mod coarse;
mod dropout;
mod elementwise;
mod embed;
mod init;
mod loss;
mod norm;
mod optimizer;
mod pairs;
mod product;
mod rope;
pub(crate) mod simd;
mod swiglu;
#[cfg(test)]
mod tests;

pub use attention::{append_cache, attention, attention_grad, cached_attention};
pub use cast::{CastError, from_bytes, to_bytes};
pub use coarse::{Coarse, dequantise, quantise};
pub use dropout::{Dropout, dropout};
pub use elementwise::{add, copy, fill, round, sum_rows};
pub use embed::{embed, embed_grad};
pub use init::{normal, uniform};
pub use loss::{IGNORED, Labelled, cross_entropy, softmax_grad, softmax_stats};
pub use norm::{head_norm, head_norm_grad, rms_norm, rms_norm_grad};
pub use optimizer::{AdamW, Sgd, State8, adamw, adamw8, sgd, squared_norm};
pub use plimsoll_program::op::Heads;
pub use product::{Product, product};
pub use rope::{rope, rope_table};
pub use simd::{Float, Level, Real, level};
pub use swiglu::{swiglu, swiglu_grad, swiglu_grad_in_place};
