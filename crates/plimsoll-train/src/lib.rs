//! A run: its file, its data, its model's files, and the training loop.

pub mod data;
pub mod run_file;
