//! The CPU as a device.

pub mod executor;
pub mod kernels;
pub mod pool;
