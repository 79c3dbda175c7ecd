//! A run: its file, what that means on this machine, its data, its model's files, and the training loop. `charges` is what a
//! device of it holds beside its arena.

#![forbid(unsafe_code)]

mod charges;
pub mod data;
pub mod files;
pub mod resolve;
pub mod run;
pub mod run_file;
