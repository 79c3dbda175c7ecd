//! Output for people and programs: runs, plans, sweeps and devices as text, live views and JSON.
//!
//! Each module turns data of the other crates into text. None of them plans, trains or decides anything, and most
//! functions return a `String`, so that the caller chooses where it is printed.
//!
//! | module | input | output |
//! |---|---|---|
//! | [`plan`] | a plan with its devices and the recipes that were tried | tables of bytes, `--explain`, a refusal |
//! | [`remedies`] | a plan that does not fit | the settings with which it fits |
//! | [`terminal`] | the events of a run | a live line, whole lines, or JSON lines |
//! | [`progress`] | the events of a run | the text of one line |
//! | [`stopping`] | the events of a run | the work before it stops |
//! | [`summary`] | the result of a run | predicted beside measured figures |
//! | [`sweep`], [`models`] | reports of `plimsoll sweep` and `plimsoll bench models` | tables |
//! | [`model_list`] | plans of several models on the same devices | a table, JSON |
//! | [`data_report`] | figures and samples of training data | a text with a plot, JSON |
//! | [`devices`] | devices and measured rates | tables, JSON |
//! | [`cluster`] | the state of a Ray cluster, read by the Python side | devices of a snapshot, findings of the doctor |
//! | [`doctor`] | a machine and a run that is about to start | conditions that cost something, with their mend |
//! | [`snapshot`] | a machine and a run's folder | the state at one moment |
//! | [`process`] | one process and the devices of this machine | its memory over time, and what it leaves for a run |
//! | [`view`] | snapshots | the live terminal view, lines, JSON |
//! | [`report`] | the folder of a run | one page, Markdown, JSON |
//! | [`runs`] | a folder of runs | a table, JSON, the champions |
//! | [`logging`] | the events of a run | TensorBoard's event files, messages of the webhook |
//! | [`download`] | bytes that have arrived | a live line |
//! | [`text`] | numbers, rows, words | formatted numbers, aligned columns, wrapped lines, shell words |
//!
//! # Example
//!
//! The line for a finished run of a sweep, and the devices of this machine:
//!
//! ```
//! use plimsoll_core::{SweepRun, SweepState};
//! use plimsoll_device::machine::Machine;
//! use plimsoll_watch::{devices, sweep};
//!
//! let run = SweepRun {
//!     state: SweepState::Done,
//!     steps: 200,
//!     seconds: 12.5,
//!     loss: Some(0.25),
//!     ..SweepRun::new("sums-seed=1")
//! };
//! assert_eq!(sweep::ended(&run), "done   sums-seed=1: 200 steps, loss 0.2500, 12.50 s\n");
//!
//! // device  cores     memory       free  would take  threads
//! // cpu         2  23.54 GiB  22.57 GiB   20.32 GiB        2
//! print!("{}", devices::table(&Machine::read()));
//! ```

#![forbid(unsafe_code)]

pub mod cluster;
pub mod data_report;
pub mod devices;
pub mod doctor;
pub mod download;
pub mod logging;
pub mod model_list;
pub mod models;
pub mod plan;
pub mod process;
pub mod progress;
pub mod remedies;
pub mod report;
pub mod runs;
pub mod snapshot;
pub mod stopping;
pub mod summary;
pub mod sweep;
pub mod terminal;
pub mod text;
pub mod view;
