//! Tests of the planner on paper devices and models. One program holds them all.

mod common;
mod packing;
mod pipeline;
mod presets;
mod reach;
mod sharded;
mod team;
mod timeline;
