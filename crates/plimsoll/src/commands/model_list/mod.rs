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

/// The keys that this command sets itself for each row.
const KEYS_OF_ROWS: [&str; 5] = ["model.path", "model.preset", "model.adapter", "train.method", "train.rungs"];

/// Prints the models, most useful first. Rows appear on a terminal as they are planned. Returns exit code 3 if every
/// model was planned, and none fits.
///
/// # Errors
/// An invalid setting or device, a folder that cannot be read or has no model, or a list without a model.
pub fn run(args: &ModelsArgs) -> Result<Exit, Failure> {
    let settings = args.settings();
    settings.iter().try_for_each(|setting| check_setting(setting))?;
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
    if list.models.is_empty() {
        list.notes.iter().for_each(|note| output::print_note(note));
        return Err(Failure::input("no model is left to list: the notes above say why")
            .hint("change these settings, such as a shorter --sequence"));
    }
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

/// Checks that a setting leaves the model and the method of each row as they are.
///
/// # Errors
/// A setting of [`KEYS_OF_ROWS`].
fn check_setting(setting: &str) -> Result<(), Failure> {
    let key = setting.split('=').next().unwrap_or_default().trim();
    if !KEYS_OF_ROWS.contains(&key) {
        return Ok(());
    }
    let message = format!("--set {key}: plimsoll models sets this key for each row of the list");
    Err(Failure::input(message)
        .hint("name folders with --dir and lossy methods with --allow")
        .hint("plan one model with plimsoll plan --model"))
}

/// Prints a planned row to stderr if that is a terminal.
pub fn print_row(row: &PlannedModel, planned: usize, all: usize) {
    if output::is_error_terminal() {
        output::print_status(&format!("{planned}/{all} {} {}: {}", row.label, row.method(), row.outcome()));
    }
}
