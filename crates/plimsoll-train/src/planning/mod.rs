//! Plans of a run: what the planner is asked, the charges of each device, and the chosen plan.

pub(crate) mod charges;
pub mod demand;
pub(crate) mod plan;
pub mod prepare;
pub(crate) mod question;
