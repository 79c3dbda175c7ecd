//! A run: from a resolved run file to a trained model. `prepare` opens and plans, `training` is the
//! loop, `engine` does one step on the device, `checkpoint` is what a run goes on from, `retreat` is what it
//! does when memory is refused or the load line moves, `pressure` is how it notices others, `cooling` lets a warm device rest.

pub mod bench;
pub mod checkpoint;
pub mod control;
mod cooling;
pub mod engine;
pub mod events;
pub mod inference;
pub mod merge;
mod open;
pub mod prepare;
mod pressure;
pub mod rate;
pub mod rehearsal;
mod retreat;
pub mod samples;
pub mod spaces;
pub mod training;
mod trouble;
