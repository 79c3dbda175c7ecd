//! The CPU device: thread pool, kernels, execution of ops and collectives, and the executor of Programs.

pub(crate) mod collectives;
pub mod executor;
pub mod kernels;
pub(crate) mod ops;
pub mod pool;
