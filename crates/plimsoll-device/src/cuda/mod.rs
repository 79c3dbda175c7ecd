//! NVIDIA GPUs: what is there ([`libraries`], [`gpus`], [`nvml`]), the kernels as data and how they become machine code
//! ([`kernels`], [`compile`]), and what runs Programs: [`driver`] at the bottom, then [`arena`], [`queues`] and
//! [`staging`], held together by a [`machine`]; [`products`], [`collectives`] and [`nccl`] beside them; the [`executor`] on top, and
//! [`open`] from a GPU's number to it. [`headers`] has what NVIDIA's must say of all that is called.

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
pub mod machine;
pub mod nccl;
pub mod nvml;
pub mod open;
pub mod products;
pub mod queues;
pub mod staging;
