//! NVIDIA GPUs, from library discovery to program execution.
//!
//! Each group imports only groups above it:
//!
//! | group | modules |
//! |---|---|
//! | declarations | [`abi`] (functions, constants and structures of NVIDIA's libraries as data), [`architecture`] |
//! | discovery | [`libraries`] (files on disk), [`nvml`] (memory, temperature, clocks) |
//! | kernels | [`kernels`] (sources and launch parameters), [`compile`] (machine code) |
//! | one GPU | [`driver`] (function table and safe wrappers), [`arena`], [`queues`], [`staging`], and [`resources`], which groups them |
//! | products and collectives | [`products`] (cuBLASLt), [`pieces`], [`nccl`], [`collectives`] (by NCCL or through the host) |
//! | execution | [`executor`] |
//! | checks and lists | [`gpus`] (GPUs of this machine), [`headers`] (declarations compared with NVIDIA's headers) |
//!
//! [`crate::gpu`] opens a GPU by its number; [`crate::bench`](mod@crate::bench) measures it.

pub mod abi;
pub mod architecture;
pub mod arena;
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
pub mod pieces;
pub mod products;
pub mod queues;
pub mod resources;
pub mod staging;
