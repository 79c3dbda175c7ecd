//! Plans of a run: the requests to the planner, the charges of each device, and the chosen plan.
//!
//! Data flows config → resolve → planning. Nothing here opens a device, except to measure the charges of a GPU.
//!
//! | module | content |
//! |---|---|
//! | `request` | requests to the planner for one device and for a team |
//! | `charges` | charges of a team and of Programs, and the fixed point between charges and plan |
//! | `device_choice` | the preferred device for work that one device does, and the fallback to the processor |
//! | [`plan`](mod@plan) | the plan of a run file, without opening model weights or data (`plimsoll plan`) |
//! | [`prepare`](mod@prepare) | model, data and plan of a run that is about to start, with measured charges |
//! | [`demand`](mod@demand) | the least memory that leaves a run fast, for `plimsoll sweep` |

pub(crate) mod charges;
pub mod demand;
mod device_choice;
pub mod plan;
pub mod prepare;
pub mod request;

pub use plan::{PlannedRun, check_stored_plan, plan};
pub use request::{optimizer, team_request};
