//! The run itself: opening devices, steps, evaluation, checkpoints, the end.

pub mod checkpoint;
pub mod control;
pub(crate) mod cooling;
pub mod engine;
pub mod evaluation;
pub mod events;
pub(crate) mod pace;
pub mod rate;
pub(crate) mod saving;
pub mod spaces;
pub mod start;
pub mod training;
pub(crate) mod trouble;
