//! The planner: it finds the fastest recipe that stays under the load lines, and packs its tensors.
//!
//! | module | responsibility |
//! |---|---|
//! | `lifetimes` | lifetime of every tensor on the time axis of a phase |
//! | `packing` | offsets of buffers with known lifetimes, and the lower bound |
//! | `layout` | arenas of the device and its host, and the scratch file |
//! | `price` | predicted seconds of ops and Programs |
//! | `search` | the fastest recipe of one device, or the remedies of a refusal |
//! | `team` | data parallel, sharded and pipeline plans over several devices |
//! | `sweep` | the schedule of many runs on shared devices |
//! | `device_request` | the device list of `--devices` and `run.devices` |
//! | `paper` | published rates of paper devices |
//!
//! The crate is pure: it touches no device, no file and no clock.

#![forbid(unsafe_code)]

pub mod device_request;
pub mod layout;
pub mod lifetimes;
pub mod packing;
pub mod paper;
pub mod price;
pub mod search;
pub mod sweep;
pub mod team;
