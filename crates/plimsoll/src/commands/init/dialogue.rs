//! The questions of `plimsoll init` on a terminal. Each answer becomes the flag that stands for it, so questions and flags
//! have the same defaults and checks.

use super::super::model_list::candidates::Candidates;
use super::super::model_list::print_row;
use super::super::model_list::survey::Survey;
use super::answers::{
    Answers, DEFAULT_OUT, check_run_dir, check_tokenizer, check_value, default_run_dir, describe_data, inspect_data,
    open_model, parse_rungs,
};
use super::out_file::{self, Protected};
use crate::args::InitArgs;
use crate::output;
use crate::signals;
use inquire::validator::Validation;
use inquire::{Confirm, CustomUserError, InquireError, MultiSelect, Select, Text};
use plimsoll_core::printable::printable_line;
use plimsoll_core::{Failure, Rung};
use plimsoll_device::machine::Machine;
use plimsoll_train::config::{RunConfig, setting};
use plimsoll_train::resolve::{RunRequest, resolve_devices};
use plimsoll_watch::devices;
use plimsoll_watch::model_list::{Fit, ModelList, ModelOrigin, PlannedModel, USEFUL_TOKENS_PER_SECOND};
use plimsoll_watch::text::{count, excerpt};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use signal_hook::low_level::exit;
use std::collections::HashSet;
use std::fmt;
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

/// Longest time in which models are planned for suggestions.
const SUGGESTIONS_TIME: Duration = Duration::from_secs(15);
/// Most models that are suggested.
const MAX_SUGGESTIONS: usize = 20;
/// Load line of the host under which nothing can be offloaded.
const NO_OFFLOAD: &str = "1B";
/// The choice of a model that is not suggested.
const OTHER_MODEL: &str = "another model: a folder, a config.json or a preset";

/// Asks for each answer that no flag gives, and returns all of them.
///
/// # Errors
/// An invalid flag or device, or the user ends the questions.
pub fn ask(args: &InitArgs) -> Result<Answers, Failure> {
    check_flags(args)?;
    end_on_signal()?;
    let mut filled = args.clone();
    output::print(&devices::table(&Machine::read()));
    if filled.devices.is_none() {
        filled.devices = Some(ask_devices(&filled)?);
    }
    ask_savings(&mut filled)?;
    if filled.model.is_none() {
        ask_model(&mut filled)?;
    }
    let model = filled.model.clone().unwrap_or_default();
    let opened = open_model(&model)?;
    if filled.data.is_empty() {
        filled.data = vec![ask_data(&model)?];
    }
    let summary = inspect_data(&filled.data, Some(opened.config.vocab))?;
    check_tokenizer(&opened, &model, &summary)?;
    output::print(&format!("{}\n", describe_data(&summary)));
    if filled.run_dir.is_none() {
        filled.run_dir = Some(ask_run_dir(&default_run_dir(&model))?);
    }
    if filled.out.is_none() {
        let protected = Protected { run_dir: filled.run_dir.clone(), model: Some(model), data: summary.files };
        filled.out = Some(ask_out(filled.force, protected)?.into());
    }
    Answers::from_flags(&filled)
}

/// Checks the flags that are given, before the first question.
///
/// # Errors
/// An invalid flag, a device that cannot be used, a folder that holds a run, or a file that must not be replaced.
fn check_flags(args: &InitArgs) -> Result<(), Failure> {
    for (key, value) in [("memory.budget", &args.budget), ("memory.host", &args.host), ("memory.allow", &args.allow)] {
        value.as_deref().map(|value| check_value(key, value)).transpose()?;
    }
    if let Some(devices) = &args.devices {
        usable_devices(devices, args.budget.as_deref())?;
    }
    if let Some(model) = &args.model {
        open_model(model)?;
    }
    if let Some(folder) = &args.run_dir {
        check_run_dir(folder)?;
    }
    let Some(out) = &args.out else { return Ok(()) };
    out_file::check(out, args.force)?;
    Protected { run_dir: args.run_dir.clone(), model: args.model.clone(), data: vec![] }.check(out)
}

/// Ends the program at SIGINT, SIGTERM or SIGHUP, with the terminal as it is now. A question puts the terminal into raw
/// mode, in which the shell would not be usable.
///
/// # Errors
/// The system refuses to install a handler or to start a thread.
fn end_on_signal() -> Result<(), Failure> {
    let terminal = tcgetattr(io::stdin()).ok();
    signals::on_first(move || end(terminal.as_ref()))
}

/// Restores the modes and the cursor of the terminal, and ends the program.
fn end(terminal: Option<&Termios>) -> ! {
    const SHOW_CURSOR: &str = "\x1b[?25h";
    // The terminal may be gone.
    let _ = terminal.map(|modes| tcsetattr(io::stdin(), OptionalActions::Now, modes));
    let _ = writeln!(io::stderr(), "{SHOW_CURSOR}");
    output::print_error(&ended());
    exit(ended().exit as i32)
}

/// Asks a question that is answered by yes or no.
///
/// # Errors
/// The user ends the questions.
pub fn confirm(question: &str) -> Result<bool, Failure> {
    Confirm::new(&printable_line(question)).with_default(true).prompt().map_err(failure)
}

/// Returns the failure after the user has ended the questions.
pub fn ended() -> Failure {
    Failure::stopped("no run file was written")
}

/// Converts an error of a question to a failure.
fn failure(error: InquireError) -> Failure {
    match error {
        InquireError::OperationCanceled | InquireError::OperationInterrupted => ended(),
        InquireError::IO(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => ended(),
        other => Failure::input(format!("the question cannot be asked: {other}"))
            .hint("give the answers as flags: plimsoll init --yes --model qwen2.5-0.5b --data data.jsonl"),
    }
}

/// Converts the result of a check to that of a question, which is asked again after an error.
fn validation(checked: Result<(), Failure>) -> Result<Validation, CustomUserError> {
    Ok(match checked {
        Ok(()) => Validation::Valid,
        Err(failure) => {
            let hints = failure.hints.first().map(|hint| format!(" ({hint})")).unwrap_or_default();
            Validation::Invalid(printable_line(&format!("{}{hints}", failure.message)).into())
        }
    })
}

/// Asks for the devices until they can be used.
fn ask_devices(args: &InitArgs) -> Result<String, Failure> {
    let budget = args.budget.clone();
    let check = move |text: &str| validation(usable_devices(text, budget.as_deref()));
    let question = Text::new("Devices?").with_default("auto").with_validator(check);
    question
        .with_help_message("auto: the GPUs, else the processor; or a list such as cuda:0,cuda:1 or cpu=6GiB")
        .prompt()
        .map_err(failure)
}

/// Resolves devices for any model, without planning.
///
/// # Errors
/// Devices that are invalid, not present, or on paper.
fn usable_devices(devices: &str, budget: Option<&str>) -> Result<(), Failure> {
    let mut settings = vec!["model.preset=1b".to_owned(), setting("run.devices", devices)];
    settings.extend(budget.map(|budget| setting("memory.budget", budget)));
    let request: RunRequest = RunConfig::from_settings(&settings)?.into();
    if let Some(paper) = request.devices().devices.iter().find(|device| device.is_paper()) {
        let message = format!("{} is a device on paper, and a run needs one that is present", paper.name());
        return Err(Failure::input(message).hint("plimsoll models plans for devices on paper"));
    }
    resolve_devices(&request).map(drop)
}

/// A saving of memory that the user may permit.
#[derive(Clone, Copy, PartialEq)]
enum Saving {
    Offload,
    Rung(Rung),
}

impl fmt::Display for Saving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Saving::Offload => write!(f, "offload to host memory (slower, same results)"),
            Saving::Rung(rung) => write!(f, "{rung} ({})", rung.accuracy_impact()),
        }
    }
}

/// Asks for the savings that the planner may take if nothing else fits, unless flags give them.
fn ask_savings(args: &mut InitArgs) -> Result<(), Failure> {
    if args.allow.is_some() {
        return Ok(());
    }
    let offload = args.host.is_none().then_some(Saving::Offload);
    let all: Vec<Saving> = offload.into_iter().chain(Rung::ALL.map(Saving::Rung)).collect();
    let preset: &[usize] = if offload.is_some() { &[0] } else { &[] };
    let question = MultiSelect::new("What may be given up if nothing else fits?", all).with_default(preset);
    let chosen = question.with_help_message("space: choose, Enter: done").prompt().map_err(failure)?;
    if offload.is_some() && !chosen.contains(&Saving::Offload) {
        args.host = Some(NO_OFFLOAD.to_owned());
    }
    let rungs = chosen.iter().filter_map(|saving| match saving {
        Saving::Rung(rung) => Some(rung.to_string()),
        Saving::Offload => None,
    });
    args.allow = Some(rungs.collect::<Vec<_>>().join(","));
    Ok(())
}

/// A choice of a model: one that was planned, or another.
enum ModelChoice {
    Planned(Box<PlannedModel>),
    Other,
}

impl fmt::Display for ModelChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ModelChoice::Other => write!(f, "{OTHER_MODEL}"),
            ModelChoice::Planned(row) => {
                let (name, size) = (excerpt(&row.label), count(row.parameters as f64));
                write!(f, "{name}  {size}  {}: {}", row.method(), printable_line(&row.outcome()))?;
                match (row.has_weights, row.origin) {
                    (true, _) => Ok(()),
                    (false, ModelOrigin::Preset) => write!(f, " (preset, no weights)"),
                    (false, _) => write!(f, " (no weights)"),
                }
            }
        }
    }
}

/// Suggests models that fit, each with its predicted speed, and asks for one.
fn ask_model(args: &mut InitArgs) -> Result<(), Failure> {
    let list = suggestions(args)?;
    list.notes.iter().for_each(|note| output::print_note(note));
    let useful = list.models.into_iter().filter(|row| row.fit == Fit::Fits && is_sensible(row));
    let mut wanted: Vec<PlannedModel> = useful.filter(|row| is_of_method(row, args.method.as_deref())).collect();
    // The order among those with weights, and among those without, stays.
    wanted.sort_by_key(|row| !row.has_weights);
    let mut choices: Vec<ModelChoice> = Vec::new();
    let mut known = HashSet::new();
    for row in wanted {
        // The planner chooses among the rungs that are allowed, so rows that differ only in them are one choice.
        if choices.len() < MAX_SUGGESTIONS && known.insert((row.model.clone(), row.rungs.contains(&Rung::Lora))) {
            choices.push(ModelChoice::Planned(Box::new(row)));
        }
    }
    choices.push(ModelChoice::Other);
    let help = "the first are models with weights; to name a folder or a file, choose the last line";
    let question = Select::new("Model?", choices).with_scorer(&score_model).with_help_message(help);
    match question.prompt().map_err(failure)? {
        ModelChoice::Planned(row) => {
            let method = if row.rungs.contains(&Rung::Lora) { "lora" } else { "full" };
            args.method.get_or_insert_with(|| method.to_owned());
            args.model = Some(row.argument);
        }
        ModelChoice::Other => {
            let check = |text: &str| validation(open_model(text).map(drop));
            let question = Text::new("Which one?").with_validator(check);
            args.model = Some(question.prompt().map_err(failure)?);
        }
    }
    Ok(())
}

/// Returns how well a choice matches the typed text. The choice of another model stays whatever is typed, such as a path.
fn score_model(typed: &str, choice: &ModelChoice, text: &str, number: usize) -> Option<i64> {
    let score = Select::<ModelChoice>::DEFAULT_SCORER(typed, choice, text, number);
    score.or(matches!(choice, ModelChoice::Other).then_some(i64::MIN))
}

/// Returns whether a row is worth a suggestion: adapters beside random frozen weights are not.
fn is_sensible(row: &PlannedModel) -> bool {
    row.has_weights || !row.rungs.contains(&Rung::Lora)
}

fn is_of_method(row: &PlannedModel, method: Option<&str>) -> bool {
    method.is_none_or(|method| row.rungs.contains(&Rung::Lora) == (method == "lora"))
}

/// Plans models with the answers so far.
fn suggestions(args: &InitArgs) -> Result<ModelList, Failure> {
    let keys = [("run.devices", &args.devices), ("memory.budget", &args.budget), ("memory.host", &args.host)];
    let given = keys.into_iter().filter_map(|(key, value)| Some(setting(key, value.as_deref()?)));
    let sequence = args.sequence.map(|sequence| format!("data.sequence={sequence}"));
    let batch_tokens = args.batch_tokens.map(|tokens| format!("train.batch_tokens={tokens}"));
    let settings: Vec<String> = given.chain(sequence).chain(batch_tokens).collect();
    let survey = Survey {
        allow: parse_rungs(args.allow.as_deref().unwrap_or_default())?,
        time: SUGGESTIONS_TIME,
        useful_tokens_per_second: USEFUL_TOKENS_PER_SECOND,
        explains_refusals: false,
        settings,
    };
    output::print_progress("planning models for suggestions");
    survey.run(Candidates::find(&args.dir, &survey.settings)?, print_row)
}

/// Asks for the training data until they can be read, and the model can be trained on them.
fn ask_data(model: &str) -> Result<String, Failure> {
    let model = model.to_owned();
    let check = move |text: &str| validation(check_data(&model, text));
    let question = Text::new("Training data?").with_validator(check);
    question.with_help_message("a file, a glob such as data/*.jsonl, or hub:OWNER/NAME").prompt().map_err(failure)
}

/// Checks that data can be read, and that a model can be trained on them.
///
/// # Errors
/// Data that cannot be read, or text for a model without a tokenizer.
fn check_data(model: &str, data: &str) -> Result<(), Failure> {
    let opened = open_model(model)?;
    check_tokenizer(&opened, model, &inspect_data(&[data.to_owned()], Some(opened.config.vocab))?)
}

/// Asks for a run folder that holds no run.
fn ask_run_dir(default: &str) -> Result<String, Failure> {
    let check = |text: &str| validation(check_run_dir(text));
    Text::new("Run folder?").with_default(default).with_validator(check).prompt().map_err(failure)
}

/// Asks for the run file until it may be written.
fn ask_out(force: bool, protected: Protected) -> Result<String, Failure> {
    let check = move |text: &str| validation(check_out(Path::new(text), force, &protected));
    Text::new("Run file?").with_default(DEFAULT_OUT).with_validator(check).prompt().map_err(failure)
}

/// Checks that the run file may be written.
///
/// # Errors
/// A file that exists, unless `force`, or that is protected.
fn check_out(out: &Path, force: bool, protected: &Protected) -> Result<(), Failure> {
    out_file::check(out, force)?;
    protected.check(out)
}
