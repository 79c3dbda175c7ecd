//! A run: from a resolved run file to a trained model. `prepare` opens and plans, `start` begins it or goes on, `training` is the loop, `saving` what that writes down, `team` is the
//! devices that work on it, `abreast` what they do at the same time, `engine` does the work of one, `evaluation` says who evaluates what: the team, or an `evaluator`
//! beside it, to which the weights are `handover`ed. `checkpoint` is what a run goes on from, `retreat` is what it does when
//! memory is refused or the load line moves, `pressure` is how it notices others, `cooling` lets a warm device rest, `far` is devices in
//! other processes, `pace` is what steps took, `sharing` shares the work anew when a device is gone or `drift`s from its plan.

mod abreast;
mod absent;
pub mod bench;
pub mod checkpoint;
pub mod control;
mod cooling;
pub mod demand;
mod drift;
pub mod engine;
pub mod evaluation;
mod evaluator;
pub mod events;
pub mod far;
mod handover;
mod heartbeat;
pub mod inference;
pub mod merge;
mod open;
mod pace;
pub mod prepare;
mod pressure;
pub mod rate;
pub mod rehearsal;
mod retreat;
pub mod samples;
mod saving;
mod sharing;
pub mod spaces;
pub mod start;
mod team;
pub mod training;
mod trouble;
