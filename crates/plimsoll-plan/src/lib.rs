//! The planner of Plimsoll: it fits a training step into the memory of the devices, before anything is allocated.
//!
//! A [`PlanRequest`](search::PlanRequest) names a model, a batch, a device with its load line and rates, and the host
//! behind it. The planner tries *recipes*: micro-batch sizes, recompute levels and offload choices. It builds the
//! Programs of a recipe, packs their tensors into one arena, and predicts the seconds of a step. The fastest recipe
//! that stays under all load lines is the plan. If none does, the answer is a refusal with *remedies*: the smallest
//! budgets that are enough.
//!
//! | module | responsibility |
//! |---|---|
//! | [`search`] | the fastest recipe of one device, or the remedies of a refusal: start reading here |
//! | [`team`] | data parallel, sharded and pipeline plans over several devices |
//! | [`layout`] | the arenas of the device and of its host, and the scratch file |
//! | [`packing`] | offsets of buffers with known lifetimes, and the lower bound |
//! | [`lifetimes`] | lifetime of every tensor on the time axis of a phase |
//! | [`timeline`] | the memory of a device over a step, with the op at each moment |
//! | `memory_use` | bytes of a phase in use at each tick |
//! | [`price`] | predicted seconds of ops and Programs |
//! | [`sweep`] | the schedule of many runs on shared devices |
//! | [`device_request`] | the device list of `--devices` and `run.devices` |
//! | [`paper`] | published rates of paper devices, which are planned for and not present |
//! | `bisection` | the smallest value that is enough |
//!
//! The crate is pure: it touches no device, no file and no clock. Equal requests give equal plans.
//!
//! # Example
//!
//! The plan to train SmolLM2-135M on an RTX 3070, which need not be present:
//!
//! ```
//! use plimsoll_core::{Budget, DType, HostSpec};
//! use plimsoll_plan::paper::paper;
//! use plimsoll_plan::search::{LossyOptions, PinnedChoices, PlanRequest, search};
//! use plimsoll_program::Share;
//! use plimsoll_program::models::decoder::{AdamState, Optimizer, Scores, WeightSource};
//! use plimsoll_program::models::preset;
//!
//! let config = preset("smollm2-135m").expect("a preset");
//! let device = paper("rtx3070", Budget::DEVICE).expect("a paper device");
//! let request = PlanRequest {
//!     config: &config,
//!     precision: DType::Bf16,
//!     sequence: 512,
//!     sequences: 8,
//!     source: WeightSource::Random { seed: 1 },
//!     optimizer: Some(Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state: AdamState::Full }),
//!     evaluate: false,
//!     scores: Scores::None,
//!     temperature: 1.0,
//!     generation: None,
//!     device: &device,
//!     host: HostSpec::NONE,
//!     lossy: LossyOptions::default(),
//!     pins: PinnedChoices::default(),
//!     rungs: vec![],
//!     share: Share::SINGLE_DEVICE,
//! };
//!
//! let plan = search(&request).plan;
//! assert!(plan.fits);
//! let peak = plan.devices[0].peak_bytes;
//! assert!(peak > device.charges && peak <= device.budget);
//! println!("{peak} of {}: {}", device.budget, plan.recipe);
//! ```

#![forbid(unsafe_code)]

mod bisection;
pub mod device_request;
pub mod layout;
pub mod lifetimes;
mod memory_use;
pub mod packing;
pub mod paper;
pub mod price;
pub mod search;
pub mod sweep;
pub mod team;
#[cfg(test)]
mod testing;
pub mod timeline;
