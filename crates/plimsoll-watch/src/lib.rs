//! Output for people and programs: runs, plans, sweeps and devices as text, live views and JSON.
//!
//! Each module turns data into text. None of them plans, trains or decides anything.

#![forbid(unsafe_code)]

pub mod devices;
pub mod models;
pub mod plan;
pub mod progress;
pub mod remedies;
pub mod summary;
pub mod sweep;
pub mod terminal;
pub mod text;
