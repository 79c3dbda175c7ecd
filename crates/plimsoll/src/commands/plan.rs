//! `plimsoll plan`: what a run would hold, and what would fit where it does not.

use super::ray::reached;
use crate::args::PlanArgs;
use crate::{again, say};
use plimsoll_core::{DeviceSpec, Exit, Failure, Plan, counted};
use plimsoll_plan::search::Answer;
use plimsoll_program::models::ModelConfig;
use plimsoll_train::config::RunFile;
use plimsoll_train::resolve::{Model, Planned, plan};
use plimsoll_watch::plan::{PlanView, explain, table};
use plimsoll_watch::text::count;
use plimsoll_watch::ways::{self, Way};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Prints the plan. One that does not fit is an answer with the exit code of a failure.
///
/// # Errors
/// What is wrong with the run file, the model or the devices.
pub fn run(args: &PlanArgs) -> Result<Exit, Failure> {
    let file = reached(args.resolve()?)?;
    file.elsewhere.missed().for_each(|missed| say::note(&missed));
    let Planned { resolved, devices, answer } = plan(&file, args.explain)?;
    if args.json {
        let json = serde_json::to_string_pretty(&answer.plan).expect("a plan is plain data");
        say::answer(&format!("{json}\n"));
    } else {
        say::answer(&shown(&file, &resolved.model, &devices, &answer, args.explain));
    }
    if answer.plan.fits {
        return Ok(Exit::Done);
    }
    say::complain(&refusal(&file, &answer.plan));
    Ok(Exit::DoesNotFit)
}

/// The plan as a table, with the recipes that were tried where somebody asked.
pub fn shown(file: &RunFile, model: &Model, devices: &[DeviceSpec], answer: &Answer, with_tried: bool) -> String {
    let view = PlanView {
        title: &title(file, &model.config),
        plan: &answer.plan,
        specs: devices,
        tried: &answer.tried,
        allow: &file.memory.allow,
    };
    let tried = if with_tried { format!("\n{}", explain(&view)) } else { String::new() };
    table(&view) + &tried
}

/// What is said where a plan does not fit, with the commands that would.
fn refusal(file: &RunFile, plan: &Plan) -> Failure {
    refusal_of(file, plan, &typed())
}

/// The same where the words of the command are these.
pub fn refusal_of(file: &RunFile, plan: &Plan, words: &[String]) -> Failure {
    refusal_with(plan, &ways_again(file, plan, words), false)
}

/// The command as it was typed.
fn typed() -> Vec<String> {
    std::env::args().collect()
}

/// Says that a plan does not fit. On a terminal it asks which way to take, and takes that one alone.
///
/// # Errors
/// The refusal, where there is nobody to ask, or nobody wants any of it; and what comes of the command that is taken.
pub fn refuse(file: &RunFile, plan: &Plan, may_ask: bool) -> Result<Exit, Failure> {
    let ways = ways_again(file, plan, &typed());
    if !may_ask || ways.is_empty() || !say::is_somebody_there() {
        return Err(refusal(file, plan));
    }
    let failure = refusal_with(plan, &ways, true);
    say::complain(&failure);
    let Some(number) = say::ask_which(ways.len()) else { return Ok(failure.exit) };
    // A process of its own, as if it had been typed: what this one holds by now would be charged.
    let program = std::env::current_exe().map_err(|error| Failure::bug(format!("where the program is: {error}")))?;
    let error = Command::new(program).args(&ways[number].1[1..]).exec();
    Err(Failure::bug(format!("the command cannot be started: {error}")))
}

fn refusal_with(plan: &Plan, ways: &[(Way, Vec<String>)], numbered: bool) -> Failure {
    let ways: Vec<(Way, String)> = ways.iter().map(|(way, words)| (way.clone(), again::quoted(words))).collect();
    ways::refusal(plan, &ways, numbered)
}

/// What would make a plan fit on this machine, with the command that takes it: `words` with other flags.
fn ways_again(file: &RunFile, plan: &Plan, words: &[String]) -> Vec<(Way, Vec<String>)> {
    let command = |way: &Way| again::changed(words.iter().cloned(), &way.settings);
    ways::ways(&file.devices(), plan).into_iter().map(|way| (way.clone(), command(&way))).collect()
}

/// What is planned, in one line.
pub fn title(file: &RunFile, config: &ModelConfig) -> String {
    let name = Path::new(file.model_name()).file_name().map_or_else(|| "?".into(), |name| name.to_string_lossy());
    let parameters = count(config.parameters() as f64);
    let (tokens, sequence) = (counted(file.train.batch_tokens, "token"), file.data.sequence);
    format!("{name}: {parameters} parameters, {tokens} a step in sequences of {sequence}")
}
