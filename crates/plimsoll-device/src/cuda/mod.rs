//! NVIDIA GPUs, from library discovery to program execution.
//!
//! - Discovery: [`libraries`] (files on disk), [`gpus`] (devices), [`nvml`] (memory, temperature, clocks).
//! - Kernels: [`kernels`] holds the sources, [`compile`] turns them into machine code.
//! - Execution, bottom to top: [`driver`] (function table and safe wrappers), [`arena`], [`queues`] and [`staging`],
//!   which [`resources`] groups per GPU, then [`products`] (cuBLASLt), [`collectives`] and [`nccl`], and the
//!   [`executor`].
//! - [`open`] opens a GPU by its number; [`bench`](mod@bench) measures it.
//! - [`headers`] compares the declarations used here with NVIDIA's headers.

pub mod arena;
pub mod bench;
pub mod collectives;
pub mod compile;
pub mod driver;
pub mod executor;
pub mod gpus;
pub mod headers;
pub mod kernels;
pub mod libraries;
pub mod nccl;
pub mod nvml;
pub mod open;
pub mod products;
pub mod queues;
pub mod resources;
pub mod staging;
