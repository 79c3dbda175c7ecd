//! One training run, from opening the devices to its result.
//!
//! The route is one-way. [`start::Run`] plans a run or resumes one, and `opening` opens its devices and loads the
//! state. Then `training` runs the loop, and `run_folder` writes the result.
//!
//! ```text
//! start → opening → loop { gradients → update → evaluate → save → adapt } → final evaluation → model → result
//! ```
//!
//! Before the update, a failed step is dropped and repeated with the same rows. From the update on it only rolls
//! forward. If part of the state is lost with a device, the loop is left with `interrupt::StepInterrupt::RolledBack`
//! and continues from the newest checkpoint. Between two steps ("adapt"), the session rebalances the team, takes
//! devices back, answers the control socket, reacts to memory pressure and pauses hot devices.
//!
//! | module | content |
//! |---|---|
//! | `start` | planning, resuming and starting a run |
//! | `opening` | opening the devices of a plan, loading or restoring the state |
//! | `training` | the `Session` type and the training loop |
//! | `context` | the parts of a `Session`: inputs, saving, recovery state |
//! | `recover` | out-of-memory errors: carries out what `recovery` decides |
//! | `device_loss` | lost devices |
//! | `load_changes` | changed load lines and memory pressure |
//! | `rebalance` | changes of the team and of its shares |
//! | `evaluation` | evaluation on the team, or on a device outside it |
//! | `preference` | steps and evaluations over pairs of answers (DPO) |
//! | `rounds` | steps over groups of completions (GRPO) |
//! | `reference` | log-probabilities under the initial weights |
//! | `evaluator` | the device outside the team that evaluates |
//! | `checkpoint` | format of checkpoints, reading and writing them |
//! | `run_folder` | files of a run: plan, checkpoints, model, result |
//! | `length` | steps and end of a run |
//! | `learning_rate` | learning rate schedules |
//! | `thermal` | pauses for hot devices |
//! | `control` | control socket: changes of the load line |
//! | `samples` | text generation by the team |
//! | `interrupt` | interruptions of the loop |
//! | `outcome` | what the caller receives at the end |
//!
//! The decisions of recovery are in `recovery`, the devices in `team`. Neither knows the session.

pub mod checkpoint;
pub(crate) mod context;
pub mod control;
pub(crate) mod device_loss;
mod evaluation;
pub(crate) mod evaluator;
pub(crate) mod interrupt;
pub mod learning_rate;
pub mod length;
mod load_changes;
mod opening;
pub mod outcome;
mod preference;
pub(crate) mod rebalance;
pub(crate) mod recover;
mod reference;
mod rewarding;
mod rounds;
pub(crate) mod run_folder;
mod samples;
pub mod start;
pub(crate) mod thermal;
pub mod training;
