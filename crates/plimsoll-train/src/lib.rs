//! A run: its file, what that means on this machine, its data, its model's files, and the training loop (`run`). `charges` is what a
//! device of it holds beside its arena, `demand` all that it needs of one; `inference` is what is done with a finished model, `bench`
//! a step that is timed.

#![forbid(unsafe_code)]

pub mod bench;
pub mod config;
pub mod data;
pub mod fault_injection;
pub mod files;
pub mod inference;
pub mod planning;
mod recovery;
pub mod remote;
pub mod resolve;
pub mod session;
pub(crate) mod team;
