//! `plimsoll report`: the report of a run as a page, as Markdown or as JSON.

use super::advice::recommendations_for_run;
use crate::args::ReportArgs;
use crate::output;
use plimsoll_core::{Exit, Failure, Recommendation};
use plimsoll_device::private_file;
use plimsoll_watch::report::Report;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Writes `report.html` into the run folder and prints its path, or prints the report.
///
/// # Errors
/// There is no such run folder, it cannot be read, or the page cannot be written.
pub fn run(args: &ReportArgs) -> Result<Exit, Failure> {
    let mut report = Report::read(&args.run_dir, now())?;
    if args.advise {
        report.recommendations = recommendations_or_note(&args.run_dir);
    }
    if args.json {
        output::print_json(&report.json());
    } else if args.markdown {
        output::print(&report.markdown());
    } else {
        let path = args.run_dir.join("report.html");
        private_file::replace(&path, report.html().as_bytes()).map_err(|error| {
            Failure::input(format!("{}: cannot write the report: {error}", path.display()))
                .hint("print it instead: --markdown or --json")
        })?;
        output::print(&format!("report: {}\n", path.display()));
    }
    Ok(Exit::Done)
}

/// Returns the recommendations for a run; `None` with a note if it cannot be planned anew.
fn recommendations_or_note(folder: &Path) -> Option<Vec<Recommendation>> {
    let found = recommendations_for_run(folder);
    found.inspect_err(|failure| output::print_note(&format!("no recommendations: {}", failure.message))).ok()
}

/// Returns the present time in seconds since the Unix epoch.
pub(super) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
