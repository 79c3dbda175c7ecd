//! A run: its file, its data, its model's files, and the training loop.

#![forbid(unsafe_code)]

pub mod data;
pub mod files;
pub mod resolve;
pub mod run;
pub mod run_file;
