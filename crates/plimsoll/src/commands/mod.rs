//! What each command does: resolve, call, print.

pub mod budget;
pub mod devices;
pub mod model;
pub mod models;
pub mod plan;
pub mod ray;
pub mod sweep;
pub mod train;
