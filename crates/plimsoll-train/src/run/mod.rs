//! A run: from a resolved run file to a trained model.

pub mod engine;
pub mod rate;
pub mod spaces;
