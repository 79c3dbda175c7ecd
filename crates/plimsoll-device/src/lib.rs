//! What runs: probes of hardware, sealed arenas, executors, and how fast they are.
//!
//! The only crate with `unsafe` code. What is computed comes from `plimsoll-program`; what fits is decided in
//! `plimsoll-plan`, which knows nothing of this crate.

pub mod arena;
pub mod bench;
pub mod calibration;
pub mod cpu;
pub mod cuda;
pub mod device;
pub mod disk;
pub mod heap;
mod op_rates;
pub mod probe;
pub mod process;
mod scratch;
pub mod spaces;
pub mod transport;
mod trial;
pub mod virtual_device;
