//! NVIDIA GPUs. Here are the kernels as data, and how each is launched.

pub mod kernels;
pub mod libraries;
