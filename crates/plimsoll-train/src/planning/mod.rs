//! Plans of a run: what it needs of each device, and the recipe that it trains with.
//!
//! Data flows config → resolve → planning. Nothing here opens a device, except to measure the charges of a GPU.
//!
//! ```text
//! plimsoll plan                 ─► plan ────┐              ┌─ request: run file → PlanRequest, TeamRequest
//! train, sweep (through demand) ─► prepare ─┤              │
//! evaluation, generation  ─► device_choice ─┼─► Planner ───┼─ charges: of teams, previous plans and Programs
//! recovery, rebalancing   ──────────────────┘              │
//!                                                          └─ plimsoll_plan: search, plan_team
//! ```
//!
//! One `Planner` makes all plans of a run:
//!
//! 1. It starts from the charges that the devices have, or measures those of this process.
//! 2. It makes a request of the run file, and asks `plimsoll_plan` for the fastest recipe that fits. A previous plan comes
//!    first: it is kept if it still fits.
//! 3. It charges the Programs of that plan, and measures its GPUs. If charges have changed, it repeats step 2.
//! 4. If several devices do not fit together, it plans for each of them alone. If an accelerator does not fit, it plans for the
//!    processor.
//!
//! | module | content |
//! |---|---|
//! | `planner` | the `Planner`, and the fixed point between charges and plan |
//! | `charges` | the charge model: charges of a team, of a previous plan and of Programs |
//! | `request` | requests to `plimsoll_plan` for one device and for a team |
//! | `device_choice` | the preferred device for work that one device does, and the fallback to the processor |
//! | `sequences` | the number of sequences that a generation computes at once |
//! | `nominal` | the plan of a deterministic run, chosen without measurements |
//! | `sum_order` | the parts of a plan that decide the order of sums |
//! | [`previous_plan`] | the plan of an earlier part of a run, which a resumed run keeps |
//! | [`plan_check`] | whether a plan from a file agrees with itself and with the run |
//! | [`team_plan`] | the plan of a run together with its devices |
//! | [`plan`](mod@plan) | the plan of a run file, without opening model weights or data (`plimsoll plan`) |
//! | [`prepare`](mod@prepare) | model, data and plan of a run that is about to start, with measured charges |
//! | [`advice`](mod@advice) | changes of settings that make a run faster, with their plans (`--advise`) |
//! | [`demand`](mod@demand) | the least memory that leaves a run fast, for `plimsoll sweep` |

pub mod advice;
pub(crate) mod charges;
pub(crate) mod completions;
pub mod demand;
pub(crate) mod device_choice;
pub(crate) mod nominal;
pub mod plan;
pub mod plan_check;
pub(crate) mod planner;
pub mod prepare;
pub mod previous_plan;
pub(crate) mod request;
pub(crate) mod sequences;
pub(crate) mod sum_order;
pub mod team_plan;
#[cfg(test)]
mod testing;

pub use plan::{PlannedRun, check_stored_plan, plan, plan_if_fits};
