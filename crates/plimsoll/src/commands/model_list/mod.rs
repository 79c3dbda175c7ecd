//! `plimsoll models`: the models that can be trained on some devices, each planned with each method.

pub mod candidates;
pub mod survey;

use crate::args::ModelsArgs;
use crate::output;
use candidates::Candidates;
use plimsoll_core::{Exit, Failure};
use plimsoll_train::config::RunConfig;
use plimsoll_watch::model_list::{Fit, PlannedModel};
use survey::Survey;

/// Prints the models, most useful first. Rows appear on a terminal as they are planned. Returns exit code 3 if every
/// model was planned, and none fits.
///
/// # Errors
/// An invalid setting or device, or a folder that cannot be read or has no model.
pub fn run(args: &ModelsArgs) -> Result<Exit, Failure> {
    let settings = args.settings();
    let candidates = Candidates::find(&args.dir, &settings)?;
    let any_model = candidates.models.first().map(|model| model.setting.clone());
    let config = RunConfig::from_settings(&any_model.into_iter().chain(settings.clone()).collect::<Vec<_>>())?;
    let survey = Survey {
        settings,
        allow: config.memory.allow,
        time: args.time,
        useful_tokens_per_second: args.useful_speed,
        explains_refusals: true,
    };
    output::print_progress("planning models");
    let list = survey.run(candidates, print_row)?;
    match args.json {
        true => output::print_json(&list.json()),
        false => output::print(&list.table()),
    }
    list.notes.iter().for_each(|note| output::print_note(note));
    let left = list.models.iter().filter(|model| model.fit == Fit::NotPlanned).count();
    if left > 0 {
        output::print_note(&format!("{left} of {} not planned in {:?}: raise --time", list.models.len(), args.time));
    }
    let none_fits = list.models.iter().all(|model| model.fit == Fit::DoesNotFit);
    Ok(if none_fits { Exit::DoesNotFit } else { Exit::Done })
}

/// Prints a planned row to stderr if that is a terminal.
pub fn print_row(row: &PlannedModel, planned: usize, all: usize) {
    if output::is_error_terminal() {
        output::print_status(&format!("{planned}/{all} {} {}: {}", row.model, row.method(), row.outcome()));
    }
}
