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
//! | train | [`session`], `recovery` | the training loop: steps, evaluations, checkpoints; recovery after out-of-memory errors and lost devices |
//! | report | [`session`] | [`session::outcome::Outcome`]: `result.json`, events and the trained model |
//!
//! Modules beside this route: [`data`] (rows of tokens), [`files`] (models, adapters and checkpoints on disk), [`remote`]
//! (devices in other processes), [`inference`] (evaluation, generation and merging of finished models), [`fault_injection`],
//! and [`bench`](mod@bench) (a timed training step).
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
pub mod config;
pub mod data;
pub mod fault_injection;
pub mod files;
pub mod inference;
pub mod planning;
mod recovery;
pub mod remote;
pub mod resolve;
pub mod session;
pub(crate) mod team;
