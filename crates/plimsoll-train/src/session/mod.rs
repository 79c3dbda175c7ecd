//! One training run, from opening the devices to its result.
//!
//! The route is one-way: [`start::Run`] plans a run or resumes one, `opening` opens its devices and loads the state, `training` runs
//! the loop, and `run_folder` writes the result.
//!
//! ```text
//! start → opening → loop { gradients → update → evaluate → save → adapt } → final evaluation → model → result
//! ```
//!
//! Before the update, a failed step is dropped and repeated with the same rows. From the update on it only rolls forward. If part
//! of the state is lost with a device, the loop is left with `failure::StepInterrupt::RolledBack` and continues from the newest
//! checkpoint. Between two steps ("adapt"), the session rebalances the team, takes devices back, answers the control socket, reacts
//! to memory pressure and pauses hot devices.
//!
//! | module | content |
//! |---|---|
//! | `start` | planning, resuming and starting a run |
//! | `opening` | opening the devices of a plan, loading or restoring the state |
//! | `training` | the `Session` type and the training loop |
//! | `context` | the parts of a `Session`: inputs, saving, recovery state |
//! | `engine` | one device with the Programs of a run: steps, evaluations, tokens |
//! | `evaluation` | evaluation on the team, or on a device outside it |
//! | `checkpoint` | format of checkpoints, reading and writing them |
//! | `run_folder` | files of a run: plan, checkpoints, model, result |
//! | `tensor_files` | file access of Programs that load or save tensors |
//! | `length` | steps and end of a run |
//! | `learning_rate` | learning rate schedules |
//! | `step_times` | measured step durations |
//! | `thermal` | pauses for hot devices |
//! | `control` | control socket: changes of the load line |
//! | `events` | `events.jsonl`, and the lock of the run folder |
//! | `failure` | failures of devices, interruptions of the loop |
//! | `outcome` | what the caller receives at the end |
//!
//! Out-of-memory recovery is in `recovery`, the devices are in `team`; both extend `Session`.

pub mod checkpoint;
pub(crate) mod context;
pub mod control;
pub mod engine;
pub mod evaluation;
pub mod events;
pub(crate) mod failure;
pub mod learning_rate;
pub(crate) mod length;
mod opening;
pub mod outcome;
pub(crate) mod run_folder;
pub mod start;
pub(crate) mod step_times;
pub mod tensor_files;
pub(crate) mod thermal;
pub mod training;
