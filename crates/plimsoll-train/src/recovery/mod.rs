//! Decisions of recovery: what a run does when a device fails, when its memory changes, or when another plan is faster.
//!
//! A decision is a function of a state and an event, and returns an action. Nothing here knows the session, opens a
//! device, reads a file or makes a plan. The session (`session::recover`, `load_changes`, `rebalance`) collects the
//! state and carries out the action. What came of it is the next event.
//!
//! | module | event | decision |
//! |---|---|---|
//! | `failures` | a device ran out of memory, is lost, or took no smaller plan | [`failures::decide_after_failure`] |
//! | `load_changes` | the memory that a worker may use has changed | [`load_changes::decide_load_change`] |
//! | `moves` | another plan of the team is faster | [`moves::is_worth_moving`] |
//!
//! | module | state |
//! |---|---|
//! | `load_line` | load lines of a worker, and the next attempt to return to the preferred recipe |
//! | `pressure` | free memory over time: when a worker must shrink, and when it may grow again |
//! | `stragglers` | measured compute times: when the work should be rebalanced |

pub(crate) mod failures;
pub(crate) mod load_changes;
mod load_line;
pub(crate) mod moves;
pub(crate) mod pressure;
pub(crate) mod stragglers;

pub use load_line::LoadLine;

/// Fraction of the present step time. Another plan is worth a change only if its step time is below this fraction.
const MAX_STEP_TIME_RATIO: f64 = 0.98;
