//! NVIDIA GPUs. Here are the kernels as data, and how each is launched.

pub mod compile;
pub mod driver;
pub mod gpus;
pub mod kernels;
pub mod libraries;
pub mod nvml;
pub mod products;
