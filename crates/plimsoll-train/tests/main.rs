//! Tests of engines, teams and runs without the command line. One program holds
//! all of them except `data_memory` and `planning_memory`, which measure the peak of their process.

mod arena_use;
mod batching;
mod common;
mod offload;
mod parity;
mod remote;
mod team;
mod team_support;
