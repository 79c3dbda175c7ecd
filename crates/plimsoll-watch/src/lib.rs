//! What can be seen of a run, a plan or a machine. Data come in, text goes out; nothing here knows
//! who makes them, and nothing here decides anything.

#![forbid(unsafe_code)]

pub mod devices;
pub mod models;
pub mod plan;
pub mod progress;
pub mod summary;
pub mod sweep;
pub mod terminal;
pub mod text;
pub mod ways;
