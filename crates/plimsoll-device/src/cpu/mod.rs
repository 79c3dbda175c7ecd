//! The CPU device: thread pool, kernels, execution of ops, and the executor of Programs.

pub mod executor;
pub mod kernels;
pub(crate) mod ops;
pub mod pool;
