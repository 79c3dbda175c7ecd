//! A run: from a resolved run file to a trained model. `prepare` opens and plans, `start` begins it or goes on, `training` is the
//! loop, `saving` what that writes down. `team` is the devices that work on it, `engine` does the work of one, `evaluation` says who
//! evaluates what, `retreat` is what it does when memory is refused or the load line moves, `cooling` lets a warm device rest, `far`
//! is devices in other processes. `checkpoint` is what a run goes on from, `pace` what steps took, `rehearsal` troubles on purpose.

pub mod checkpoint;
pub mod control;
mod cooling;
pub mod engine;
pub mod evaluation;
pub mod events;
pub mod far;
mod heartbeat;
pub mod merge;
mod pace;
pub mod prepare;
pub mod rate;
pub mod rehearsal;
mod retreat;
mod saving;
pub mod spaces;
pub mod start;
pub(crate) mod team;
pub mod training;
pub(crate) mod trouble;
