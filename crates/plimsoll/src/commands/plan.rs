//! `plimsoll plan`: what a run would hold, and what would fit where it does not.

use crate::args::PlanArgs;
use crate::{again, say};
use plimsoll_core::{Bytes, DevicePlan, DeviceSpec, Exit, Failure, Need, Plan};
use plimsoll_device::cuda;
use plimsoll_device::probe::Memory;
use plimsoll_plan::paper;
use plimsoll_plan::request::DevicesRequest;
use plimsoll_plan::search::{Answer, ladder};
use plimsoll_program::models::ModelConfig;
use plimsoll_train::resolve::{Model, Planned, Work, plan};
use plimsoll_train::run_file::RunFile;
use plimsoll_watch::plan::{PlanView, Way, does_not_fit, explain, table};
use plimsoll_watch::text::count;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Prints the plan. One that does not fit is an answer with the exit code of a failure.
///
/// # Errors
/// What is wrong with the run file, the model or the devices.
pub fn run(args: &PlanArgs) -> Result<Exit, Failure> {
    let file = args.resolve()?;
    let Planned { resolved, devices, mut answer } = plan(&file, args.explain)?;
    if args.explain && answer.plan.team.is_empty() {
        (_, _, answer.plan.ladder) = ladder(&resolved.question(&file, Work::Train)?, &answer.plan.recipe);
    }
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
    refusal_with(plan, &ways(file, plan, words), false)
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
    let ways = ways(file, plan, &typed());
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
    let shown: Vec<Way> = ways.iter().map(|(way, _)| way.clone()).collect();
    let refusal = does_not_fit(plan, &shown, Some(memory_of(plan).1), numbered);
    plan.learned.iter().cloned().fold(refusal, Failure::hint)
}

/// What would make a plan fit on this machine, cheapest loss first: as a person reads it, and as `words` with other flags.
fn ways(file: &RunFile, plan: &Plan, words: &[String]) -> Vec<(Way, Vec<String>)> {
    let devices = file.devices();
    let Some(device) = plan.devices.first() else { return Vec::new() };
    let (free, _) = memory_of(plan);
    let mut ways: Vec<(Way, Vec<String>)> = Vec::new();
    for found in plan.needs.iter().filter_map(|need| way(need, &devices, device, free, words)) {
        if !ways.iter().any(|(before, _)| is_enough(before, &found.0)) {
            ways.push(found);
        }
    }
    ways
}

/// Whether rungs of a way alone fit under the load line of another's command, which names them and more: that command
/// would take no more than these. Lines of commands are rounded up, so two may be one that differ by less.
fn is_enough(less: &Way, more: &Way) -> bool {
    let Need { allow, host_bytes: None, file_bytes: None, .. } = &less.need else { return false };
    less.line_bytes <= more.line_bytes && allow.iter().all(|rung| more.need.allow.contains(rung))
}

fn way(
    need: &Need,
    devices: &DevicesRequest,
    device: &DevicePlan,
    free: Bytes,
    words: &[String],
) -> Option<(Way, Vec<String>)> {
    let line = device.budget_bytes;
    let whole = |bytes: Bytes| Bytes::mib(bytes.0.div_ceil(1 << 20));
    // What the process holds beside its arena wavers from start to start: the ready command has room for that.
    let budget = (need.budget_bytes > line).then(|| whole(need.budget_bytes) + Bytes::mib(1));
    let host = need.host_bytes.map(whole);
    // On paper there is as much of the host as one writes down.
    let host_has = if devices.on_paper() { Bytes(u64::MAX) } else { Memory::read().free };
    if budget.is_some_and(|bytes| bytes > free) || host.is_some_and(|bytes| bytes > host_has) {
        return None;
    }
    let device = (devices.devices.len() > 1).then(|| device.name.clone());
    let file = need.file_bytes.map(whole);
    let change = again::Change { allow: need.allow.clone(), device, budget, host, file };
    let words = again::changed(words.iter().cloned(), devices, &change);
    let way = Way { need: need.clone(), line_bytes: budget.unwrap_or(line), command: again::quoted(&words) };
    Some((way, words))
}

/// What is free of the memory of a plan's device, and how much it has.
fn memory_of(plan: &Plan) -> (Bytes, Bytes) {
    let device = plan.devices.first().map(|device| device.name.as_str()).unwrap_or_default();
    let alone = paper::usable(device).map(|bytes| (bytes, bytes));
    let memory = Memory::read();
    alone.or_else(|| memory_of_gpu(device)).unwrap_or((memory.free, memory.total))
}

/// What is free of the memory of a GPU of this machine, by its name, and how much it has.
fn memory_of_gpu(device: &str) -> Option<(Bytes, Bytes)> {
    let index = device.strip_prefix("cuda:")?.parse().ok()?;
    let (here, card) = cuda::open::card(index).ok()?;
    Some((cuda::open::free_bytes(here, card).ok()?, card.memory_bytes))
}

/// What is planned, in one line.
pub fn title(file: &RunFile, config: &ModelConfig) -> String {
    let name = Path::new(file.model_name()).file_name().map_or_else(|| "?".into(), |name| name.to_string_lossy());
    let parameters = count(config.parameters() as f64);
    let (tokens, sequence) = (file.train.batch_tokens, file.data.sequence);
    format!("{name}: {parameters} parameters, {tokens} tokens a step in sequences of {sequence}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::Rung;

    #[test]
    fn a_command_that_would_take_less_than_it_names_is_not_named() {
        let way = |allow: &[Rung], mib, host_bytes| Way {
            need: Need {
                allow: allow.to_vec(),
                budget_bytes: Bytes::mib(mib),
                host_bytes,
                file_bytes: None,
                peak_bytes: None,
            },
            line_bytes: Bytes::mib(mib),
            command: String::new(),
        };
        let lora = way(&[Rung::Lora], 41, None);
        let with_nf4 = |mib| way(&[Rung::Lora, Rung::Nf4], mib, None);
        assert!(is_enough(&lora, &with_nf4(41)) && is_enough(&lora, &with_nf4(42)));
        assert!(!is_enough(&lora, &with_nf4(40)), "more is lost for a lower line");
        assert!(!is_enough(&lora, &way(&[Rung::Adam8bit], 41, None)), "it loses something else");
        assert!(!is_enough(&way(&[Rung::Lora], 41, Some(Bytes::gib(1))), &with_nf4(41)), "the host may be short");
    }
}
