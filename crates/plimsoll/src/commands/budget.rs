//! `plimsoll budget`: another load line for a run that is under way.

use crate::args::BudgetArgs;
use crate::say;
use plimsoll_core::{Exit, Failure};
use plimsoll_train::session::control;

/// Asks the run, and says what it answers.
///
/// # Errors
/// No run is under way there, no such device works on it, or it cannot do with so little (exit 3: it goes on as it was).
pub fn run(args: &BudgetArgs) -> Result<Exit, Failure> {
    let moved = control::ask(&args.run_dir, args.device.as_deref(), args.budget)?;
    let text = match args.json {
        true => serde_json::to_string(&moved).expect("an answer is plain data"),
        false => moved.message,
    };
    say::answer(&format!("{text}\n"));
    Ok(Exit::Done)
}
