//! Passes over Programs: what turns a plain Program into the one a recipe asks for, and checks.

pub mod check;
pub mod collectives;
pub mod mail;
pub mod offload;
pub mod recompute;
pub mod scratch;
pub mod share;
pub mod trim;
mod types;
