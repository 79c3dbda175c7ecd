//! `plimsoll budget`: changes the load line of a run that is under way.

use crate::args::BudgetArgs;
use crate::output;
use plimsoll_core::{Exit, Failure};
use plimsoll_train::session::control;

/// Sends the new load line to the run and prints its reply.
///
/// # Errors
/// No run is under way in the folder, or the device is not part of it. Exit code 3 if no recipe fits under the new
/// line; the run then continues unchanged.
pub fn run(args: &BudgetArgs) -> Result<Exit, Failure> {
    let moved = control::request_budget(&args.run_dir, args.device.as_deref(), args.budget)?;
    if args.json {
        output::print_json(&serde_json::to_string(&moved).expect("an answer is plain data"));
    } else {
        output::print(&format!("{}\n", moved.message));
    }
    Ok(Exit::Done)
}
