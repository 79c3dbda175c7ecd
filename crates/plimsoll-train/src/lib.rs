//! One run of Plimsoll, from its run file to its result.
//!
//! A run passes through six stages. Each stage is a module with an output type, and uses earlier stages only:
//!
//! | stage | module | output |
//! |---|---|---|
//! | config | [`config`] | [`config::RunConfig`]: the run file as plain data |
//! | resolve | [`resolve`] | [`resolve::RunRequest`], [`resolve::Resolved`]: model, devices, load lines and rates on this machine |
//! | plan | [`planning`] | [`planning::PlannedRun`], [`planning::prepare::PreparedRun`]: the recipe, Programs and arenas of each device |
//! | open | [`session`], `team` | opened devices that hold their arenas and form a team |
//! | train | [`session`] | the training loop: steps, evaluations, checkpoints; it carries out what `recovery` decides |
//! | report | [`session`] | [`session::outcome::Outcome`]: `result.json`, events and the trained model |
//!
//! The modules form layers. A module imports modules of the rows above it only, or some of its own row without an
//! import cycle:
//!
//! | layer | modules |
//! |---|---|
//! | rewards | [`rewards`]: rewards of completions, built in or from commands |
//! | data and files | [`config`], [`data`], [`block_types`], [`files`], [`gguf`] (files of llama.cpp), [`hub`] (models and data of the Hugging Face Hub), `events` (`events.jsonl`), `step_times` |
//! | signs of life and faults | `heartbeat`, [`fault_injection`] |
//! | other processes | [`remote`]: connections to devices of other processes, as the run sees them |
//! | this machine | [`resolve`] |
//! | one device | [`engine`]: a device that runs Programs |
//! | users of one device | [`planning`], [`device_server`] (the process of a remote device), [`inference`] (finished models), [`bench`](mod@bench) |
//! | decisions | `recovery`: pure functions of a state and an event; `objective`: losses over pairs of answers and groups of completions |
//! | several devices | `team`: the workers of a run |
//! | the run | [`session`] |
//!
//! Plan a run on a device that is not present:
//!
//! ```
//! use plimsoll_train::config::RunConfig;
//! use plimsoll_train::planning::plan;
//! use plimsoll_train::resolve::RunRequest;
//!
//! let settings = ["model.preset=smollm2-135m", "run.devices=rtx3090=8GiB"].map(str::to_owned);
//! let run = RunRequest::from(RunConfig::from_settings(&settings)?);
//! let planned = plan(&run, false)?;
//! assert!(planned.outcome.plan.fits);
//! # Ok::<(), plimsoll_core::Failure>(())
//! ```
//!
//! Train the built-in example and print its loss:
//!
//! ```no_run
//! use plimsoll_train::config::RunConfig;
//! use plimsoll_train::session::start::Run;
//! use std::sync::atomic::AtomicBool;
//!
//! let config = RunConfig::load(None, &["train.steps=20".to_owned()])?;
//! let run = Run::new(config.into())?;
//! let outcome = run.start(&mut |record| println!("{record:?}"), &AtomicBool::new(false))?;
//! println!("loss {:?}", outcome.result.loss);
//! # Ok::<(), plimsoll_core::Failure>(())
//! ```

#![forbid(unsafe_code)]

pub mod bench;
pub mod block_types;
pub mod config;
pub mod data;
pub mod device_server;
pub mod engine;
mod events;
pub mod fault_injection;
pub mod files;
pub mod gguf;
mod heartbeat;
pub mod hub;
pub mod inference;
mod objective;
pub mod planning;
mod recovery;
pub mod remote;
pub mod resolve;
pub mod rewards;
pub mod session;
mod step_times;
mod team;
