//! `plimsoll plan`: what a run would hold, and what would fit where it does not.

use crate::args::PlanArgs;
use crate::{again, say};
use plimsoll_core::{Bytes, Exit, Failure, Plan};
use plimsoll_device::cuda;
use plimsoll_device::probe::Memory;
use plimsoll_plan::paper;
use plimsoll_plan::search::Answer;
use plimsoll_program::models::ModelConfig;
use plimsoll_train::resolve::{Resolved, plan};
use plimsoll_train::run_file::RunFile;
use plimsoll_watch::plan::{PlanView, does_not_fit, explain, table};
use plimsoll_watch::text::count;
use std::path::Path;

/// Prints the plan. One that does not fit is an answer with the exit code of a failure.
///
/// # Errors
/// What is wrong with the run file, the model or the devices.
pub fn run(args: &PlanArgs) -> Result<Exit, Failure> {
    let file = args.resolve()?;
    let (resolved, answer) = plan(&file)?;
    if args.json {
        let json = serde_json::to_string_pretty(&answer.plan).expect("a plan is plain data");
        say::answer(&format!("{json}\n"));
    } else {
        let left_out = resolved.left_out().map_or(String::new(), |line| line + "\n");
        say::answer(&(shown(&file, &resolved, &answer, args.explain) + &left_out));
    }
    if answer.plan.fits {
        return Ok(Exit::Done);
    }
    say::complain(&refusal(&file, &answer.plan));
    Ok(Exit::DoesNotFit)
}

/// The plan as a table, with the recipes that were tried where somebody asked.
pub fn shown(file: &RunFile, resolved: &Resolved, answer: &Answer, with_tried: bool) -> String {
    let view = PlanView {
        title: &title(file, &resolved.model.config),
        plan: &answer.plan,
        specs: std::slice::from_ref(&resolved.device),
        tried: &answer.tried,
        allow: &file.memory.allow,
    };
    let tried = if with_tried { format!("\n{}", explain(&view)) } else { String::new() };
    table(&view) + &tried
}

/// What is said where a plan does not fit, with the command that was typed made ready.
pub fn refusal(file: &RunFile, plan: &Plan) -> Failure {
    let devices = file.devices();
    let command = again::command(std::env::args(), again::devices_have_budgets(&devices));
    // What the process holds beside its arena wavers from start to start: the ready command has room for that.
    let device = plan.devices.first().map(|device| device.name.as_str()).unwrap_or_default();
    let has = paper::usable(device).or_else(|| memory_of_gpu(device)).unwrap_or_else(|| Memory::read().total);
    let refusal = does_not_fit(plan, &command, |bytes| again::budget_flag(&devices, bytes + Bytes::mib(1)), Some(has));
    plan.learned.iter().cloned().fold(refusal, Failure::hint)
}

/// The memory of a GPU of this machine, by its name.
fn memory_of_gpu(device: &str) -> Option<Bytes> {
    let index = device.strip_prefix("cuda:")?.parse().ok()?;
    Some(cuda::open::card(index).ok()?.1.memory_bytes)
}

/// What is planned, in one line.
fn title(file: &RunFile, config: &ModelConfig) -> String {
    let name = Path::new(file.model_name()).file_name().map_or_else(|| "?".into(), |name| name.to_string_lossy());
    let parameters = count(config.parameters() as f64);
    let (tokens, sequence) = (file.train.batch_tokens, file.data.sequence);
    format!("{name}: {parameters} parameters, {tokens} tokens a step in sequences of {sequence}")
}
