//! Passes over Programs: each rewrites a [`crate::ProgramSet`] for one choice of the recipe, or checks it.
//!
//! | pass | does |
//! |---|---|
//! | [`recompute`] | recomputes dropped activations in the backward pass (activation checkpointing) |
//! | [`parallelism`] | adds collectives: data parallel, sharded (FSDP, ZeRO-3), pipeline |
//! | [`offload`] | moves tensors to the host and adds the copies |
//! | [`scratch_file`] | moves offloaded tensors on to the scratch file |
//! | [`host_staged_p2p`] | copies pipeline messages through host memory |
//! | [`trim_staging`] | shrinks staging buffers to the elements in use |
//! | [`check`] | checks a set: ranges, dtypes, order of reads and writes, paired starts and waits |
//! | [`collective_agreement`] | checks that all ranks start the same collectives |
//!
//! A set goes through them in this order. A pass returns it unchanged if the recipe makes no use of the pass.

pub mod check;
pub mod collective_agreement;
pub mod host_staged_p2p;
pub mod offload;
pub mod parallelism;
pub mod recompute;
pub mod scratch_file;
pub mod trim_staging;
