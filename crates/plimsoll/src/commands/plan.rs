//! `plimsoll plan`: prints the plan of a run; if it does not fit, also the remedies. Other commands refuse a run
//! through the functions here.

use super::advice::recommendations;
use super::hub::with_hub_files;
use super::rates::measure_in_child;
use super::ray::with_remote_devices;
use crate::args::PlanArgs;
use crate::{command_line, output};
use plimsoll_core::{DeviceSpec, Exit, Failure, Plan, format_count};
use plimsoll_plan::search::PlanOutcome;
use plimsoll_program::models::ModelConfig;
use plimsoll_train::planning::prepare::PassedLoadLines;
use plimsoll_train::planning::{PlannedRun, plan};
use plimsoll_train::resolve::{HubNeed, Model, RunRequest, process_bytes};
use plimsoll_watch::plan::{PlanView, explain, recommendations_text, table};
use plimsoll_watch::remedies::{self, RemedySettings};
use plimsoll_watch::text::{count, seconds};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Prints the plan. If it does not fit, also prints the remedies to stderr and returns exit code 3.
///
/// # Errors
/// An invalid run file, model or device.
pub fn run(args: &PlanArgs) -> Result<Exit, Failure> {
    let mut request = with_remote_devices(with_hub_files(args.build_request()?, HubNeed::Plan, false)?)?;
    request.measure_rates = Some(measure_in_child);
    request.process_bytes = Some(process_bytes());
    request.remote.missing_notes().for_each(|missed| output::print_note(&missed));
    for machine in request.devices().other_hosts() {
        output::print_note(&format!(
            "{machine}/host: on paper {machine} offloads to its own memory; a run over Ray does not yet, so leave it out to \
             plan for one"
        ));
    }
    let PlannedRun { resolved, devices, outcome: mut answer } = plan(&request, args.explain)?;
    if args.advise {
        let words: Vec<String> = typed_command().into_iter().filter(|word| word != "--advise").collect();
        answer.plan.recommendations = recommendations(
            &request,
            &answer.plan,
            |_| true,
            |_, settings| command_line::with_settings(words.iter().cloned(), settings),
        );
    }
    if args.json {
        let json = serde_json::to_string_pretty(&answer.plan).expect("a plan is plain data");
        output::print_json(&json);
    } else {
        output::print(&plan_text(&request, &resolved.model, &devices, &answer, args.explain));
        if args.advise && answer.plan.fits {
            output::print(&recommendations_text(&answer.plan.recommendations));
        }
    }
    if answer.plan.fits {
        return Ok(Exit::Done);
    }
    output::print_error(&refusal(&request, &answer.plan));
    Ok(Exit::DoesNotFit)
}

/// Formats the plan as a table and, with `explained`, every recipe that the planner tried.
pub fn plan_text(
    request: &RunRequest,
    model: &Model,
    devices: &[DeviceSpec],
    answer: &PlanOutcome,
    explained: bool,
) -> String {
    let view = PlanView {
        title: &title(request, &model.config),
        plan: &answer.plan,
        specs: devices,
        tried: &answer.tried,
        allow: &request.memory.allow,
    };
    let tried = if explained { format!("\n{}", explain(&view)) } else { String::new() };
    table(&view) + &tried
}

/// Describes why a plan does not fit, with variations of the typed command with which the run fits.
fn refusal(request: &RunRequest, plan: &Plan) -> Failure {
    refusal_for_command(request, plan, &typed_command(), |_| None)
}

/// Describes why a plan does not fit, with commands with which the run fits. They are variations of the command
/// `words`. `predict` returns the predicted seconds of the command of a remedy, which follow it as a comment of the
/// shell.
pub fn refusal_for_command(
    request: &RunRequest,
    plan: &Plan,
    words: &[String],
    predict: impl Fn(&RemedySettings) -> Option<f64>,
) -> Failure {
    refusal_with_commands(plan, &remedies_with_commands(request, plan, words), predict, false)
}

/// Returns the words of the command that the user typed, the program's name included.
fn typed_command() -> Vec<String> {
    std::env::args().collect()
}

/// Refuses a plan that does not fit. On a terminal, if `may_prompt`, offers the remedies, and replaces this process by
/// the command of the remedy that the user chooses. Returns the exit code of a refusal if the user chooses none.
///
/// # Errors
/// The refusal, if no remedy can be offered. A command that cannot be started.
pub fn refuse_or_prompt(request: &RunRequest, plan: &Plan, may_prompt: bool) -> Result<Exit, Failure> {
    let remedies = remedies_with_commands(request, plan, &typed_command());
    if !may_prompt || remedies.is_empty() || !output::is_interactive() {
        return Err(refusal(request, plan));
    }
    let failure = refusal_with_commands(plan, &remedies, |_| None, true);
    output::print_error(&failure);
    let Some(number) = output::prompt_choice(remedies.len()) else { return Ok(failure.exit) };
    // A fresh process: memory that this one holds by now would count as charges of the run.
    let program =
        std::env::current_exe().map_err(|error| Failure::bug(format!("cannot find this program: {error}")))?;
    let error = Command::new(program).args(&remedies[number].1[1..]).exec();
    Err(Failure::bug(format!("the command cannot be started: {error}")))
}

/// Refuses a run whose preparation passed load lines. The hint is the typed command with load lines that are enough.
pub fn refuse_preparation(request: &RunRequest, passed: &PassedLoadLines) -> Failure {
    let (failure, settings) = remedies::refusal_of_preparation(&request.devices(), passed.peak, &passed.devices);
    let command = command_line::with_settings(typed_command().into_iter(), &settings);
    failure.hint(command_line::shell_quoted(&command))
}

/// Describes why a plan does not fit, with the commands of the remedies and their predicted times.
fn refusal_with_commands(
    plan: &Plan,
    remedies: &[(RemedySettings, Vec<String>)],
    predict: impl Fn(&RemedySettings) -> Option<f64>,
    numbered: bool,
) -> Failure {
    let mut with_commands = Vec::new();
    for (remedy, words) in remedies {
        let time = predict(remedy).map_or_else(String::new, |time| format!("  # {} predicted", seconds(time)));
        with_commands.push((remedy.clone(), command_line::shell_quoted(words) + &time));
    }
    remedies::refusal(plan, &with_commands, numbered)
}

/// Returns the remedies of a plan that does not fit. Each comes with its command: `words` with the flags of the remedy.
fn remedies_with_commands(request: &RunRequest, plan: &Plan, words: &[String]) -> Vec<(RemedySettings, Vec<String>)> {
    let command = |remedy: &RemedySettings| command_line::with_settings(words.iter().cloned(), &remedy.settings);
    remedies::remedies(&request.devices(), plan).into_iter().map(|remedy| (remedy.clone(), command(&remedy))).collect()
}

/// Describes the planned model and batch in one line.
pub fn title(request: &RunRequest, config: &ModelConfig) -> String {
    let name = Path::new(request.model_name()).file_name().map_or_else(|| "?".into(), |name| name.to_string_lossy());
    let parameters = count(config.parameters() as f64);
    let (tokens, sequence) = (format_count(request.train.batch_tokens, "token"), request.data.sequence);
    format!("{name}: {parameters} parameters, {tokens} a step in sequences of {sequence}")
}
