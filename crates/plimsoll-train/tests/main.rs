//! Tests of engines, teams and runs without the command line. One program holds those that need no process of their own.

mod arena_use;
mod batching;
mod common;
mod offload;
mod parity;
mod remote;
mod team;
mod team_support;
