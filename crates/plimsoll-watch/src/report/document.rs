//! A report as sections of text, tables and plots. Every number is formatted here, once for all kinds of output.

use super::plot::Plot;
use super::{DeviceReport, MemoryPair, ProgramMemory, Report};
use crate::progress::recovery_line;
use crate::snapshot::HistoryPoint;
use crate::snapshot::run_notes::{EvaluationNote, Newest};
use crate::text::{count, percent, seconds};
use plimsoll_core::{Bytes, MeasuredBy, format_count};
use std::time::{Duration, UNIX_EPOCH};

/// Text in place of a figure that was not measured.
const NOT_MEASURED: &str = "not measured";
/// Text in place of a figure that is not known.
const UNKNOWN: &str = "not known";
/// First second after the year 9999, since the Unix epoch.
const YEAR_10000: f64 = 253_402_300_800.0;

/// The report as it is written down.
pub(super) struct Document {
    /// The title: the name of the run.
    pub title: String,
    /// The state of the run and the time of the report.
    pub subtitle: String,
    pub sections: Vec<Section>,
}

/// A section with its heading.
pub(super) struct Section {
    pub heading: String,
    pub parts: Vec<Part>,
}

/// A part of a section. Texts are as in the report; they are escaped when they are written down.
pub(super) enum Part {
    /// A paragraph.
    Text(String),
    /// Lines, each an item.
    List(Vec<String>),
    /// A shell command.
    Command(String),
    /// Text of several lines, shown as it is.
    Preformatted(String),
    /// A table. The first column is text, the others are figures.
    Table { headings: Vec<String>, rows: Vec<Vec<String>> },
    /// Names with their values.
    Facts(Vec<(String, String)>),
    /// A ledger bar of a device.
    Bar(Bar),
    /// Plots side by side.
    Plots(Vec<Plot>),
}

/// The planned memory of a device as a bar.
pub(super) struct Bar {
    /// Description for readers who do not see the bar.
    pub label: String,
    /// Names and bytes of the parts, from the left.
    pub parts: Vec<(String, Bytes)>,
    pub load_line: Option<Bytes>,
    pub measured_peak: Option<Bytes>,
}

impl Document {
    /// Formats a report.
    pub fn new(report: &Report) -> Document {
        let run = &report.run;
        let name = run.folder.rsplit('/').find(|part| !part.is_empty()).unwrap_or(&run.folder);
        let simulated = if run.simulated { ", simulated speed" } else { "" };
        let mut sections = vec![warnings(report), overview(report), commands(report), settings(report)];
        sections.extend([environment(report), plan(report), recommendations(report)]);
        sections.extend(report.devices.iter().map(device));
        sections.extend([history(report), evaluations(report), recoveries(report), run_file(report)]);
        sections.retain(|section| !section.parts.is_empty());
        Document {
            title: name.to_owned(),
            subtitle: format!("{}{simulated}. Report of {}.", run.state.describe(), time(report.at)),
            sections,
        }
    }
}

fn section(heading: &str, parts: Vec<Part>) -> Section {
    Section { heading: heading.to_owned(), parts }
}

fn fact(name: &str, value: impl Into<String>) -> (String, String) {
    (name.to_owned(), value.into())
}

/// Formats a value that may be unknown.
fn or_unknown<T>(value: Option<T>, format: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| UNKNOWN.to_owned(), format)
}

/// Formats a measured value that may be missing.
fn or_not_measured<T>(value: Option<T>, format: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| NOT_MEASURED.to_owned(), format)
}

/// Formats a time in seconds since the Unix epoch as date and time of day in UTC.
fn time(at: f64) -> String {
    if !(0.0..YEAR_10000).contains(&at) {
        return UNKNOWN.to_owned();
    }
    let text = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(at as u64)).to_string();
    text.replace('T', " ").replace('Z', " UTC")
}

fn loss(loss: f64) -> String {
    format!("{loss:.4}")
}

fn tokens_per_second(rate: f64) -> String {
    format!("{} tokens/s", count(rate))
}

/// Formats the difference of a measured from a predicted value; `–` if one of them is unknown.
fn difference(predicted: Option<f64>, measured: Option<f64>) -> String {
    match (predicted, measured) {
        (Some(predicted), Some(measured)) if predicted > 0.0 => {
            format!("{:+.1} %", (measured / predicted - 1.0) * 100.0)
        }
        _ => "–".to_owned(),
    }
}

fn warnings(report: &Report) -> Section {
    let Newest { earlier, listed } = &report.warnings;
    let mut items: Vec<String> = listed.iter().cloned().collect();
    items.extend(earlier_events(*earlier));
    section("Warnings", if items.is_empty() { vec![] } else { vec![Part::List(items)] })
}

/// Returns a line about events that are not listed; `None` if all are.
fn earlier_events(count: u64) -> Option<String> {
    (count > 0).then(|| format!("{} not listed; events.jsonl has them all", format_count(count, "earlier event")))
}

fn overview(report: &Report) -> Section {
    let run = &report.run;
    let steps = run.steps.map_or(String::new(), |steps| format!(" of {steps}"));
    let mut facts = vec![
        fact("state", run.state.describe()),
        fact("steps", format!("{}{steps}", run.step)),
        fact("loss of the first step", or_unknown(report.first_loss, loss)),
        fact("loss of the newest step", or_unknown(run.loss, loss)),
        fact("loss of the newest evaluation", or_not_measured(run.eval_loss, loss)),
    ];
    let simulated = if report.speed.simulated { " (simulated)" } else { "" };
    let speed = or_not_measured(report.speed.measured_tokens_per_second, tokens_per_second);
    facts.push(fact("speed, measured", speed + simulated));
    facts.extend(run.peak_share.map(|share| fact("share of the peak of the devices", percent(share, 1))));
    facts.push(fact("time in steps", seconds(report.step_seconds_total) + simulated_steps(report)));
    facts.push(fact("started", or_unknown(report.started_at, time)));
    facts.push(fact("newest event", or_unknown(report.newest_at, time)));
    if report.starts.listed.len() > 1 {
        facts.push(fact("starts", (report.starts.earlier + report.starts.listed.len() as u64).to_string()));
    }
    facts.push(fact("newest checkpoint", or_unknown(run.checkpoint_step, |step| format!("step {step}"))));
    facts.push(fact("folder", &*run.folder));
    section("Run", vec![Part::Facts(facts)])
}

/// Returns the label of the time of steps. It counts the steps of all starts; evaluations and checkpoints take real time.
fn simulated_steps(report: &Report) -> &'static str {
    let is_simulated = report.speed.simulated || report.starts.listed.iter().any(|start| start.simulated);
    if is_simulated { " (simulated)" } else { "" }
}

fn commands(report: &Report) -> Section {
    let mut parts = Vec::new();
    if let Some(repeat) = &report.commands.repeat {
        let bits = match report.reproducible {
            Some(true) => " On the same kind of machine it gives the same bits.",
            Some(false) => " It may give other bits:",
            None => "",
        };
        parts.push(Part::Text(format!("This command repeats the run in another folder.{bits}")));
        if report.reproducible == Some(false) {
            parts.push(Part::List(report.reproducible_because.clone()));
        }
        parts.push(Part::Command(repeat.clone()));
    }
    if let Some(resume) = &report.commands.resume {
        parts.push(Part::Text("This command continues it.".to_owned()));
        parts.push(Part::Command(resume.clone()));
    }
    section("Commands", parts)
}

fn settings(report: &Report) -> Section {
    let Some(settings) = &report.settings else { return section("Model and method", vec![]) };
    let rungs = if settings.rungs.is_empty() { "none".to_owned() } else { settings.rungs.join(", ") };
    let facts = vec![
        fact("model", &*settings.model),
        fact("source of the model", &*settings.model_source),
        fact("first weights", &*settings.init),
        fact("parameters", or_unknown(report.parameters, |parameters| count(parameters as f64))),
        fact("method", &*settings.method),
        fact("lossy memory savings", rungs),
        fact("precision", &*settings.precision),
        fact("length", &*settings.length),
        fact("tokens per step", settings.batch_tokens.to_string()),
        fact("tokens per sequence", settings.sequence.to_string()),
        fact("optimizer", &*settings.optimizer),
        fact("learning rate", format!("{}, {}", settings.learning_rate, settings.schedule)),
        fact("seed", settings.seed.to_string()),
        fact("training data", settings.train_data.join(", ")),
        fact("evaluation data", settings.eval_data.join(", ")),
        fact("requested devices", &*settings.requested_devices),
    ];
    section("Model and method", vec![Part::Facts(facts)])
}

fn environment(report: &Report) -> Section {
    let mut facts = match &report.environment {
        None => vec![fact("program and machine", "not recorded by the program that ran it")],
        Some(environment) => vec![
            fact("Plimsoll", &*environment.plimsoll_version),
            fact("commit", or_unknown(environment.commit.as_ref(), String::clone)),
            fact("system", &*environment.system),
            fact("processor", format!("{}, {}", environment.processor, format_count(environment.cores, "core"))),
            fact("memory", environment.memory_bytes.to_string()),
        ],
    };
    for device in &report.devices {
        let hardware = match (&device.hardware, device.simulated) {
            (_, true) => "simulated on the processor".to_owned(),
            (hardware, false) => or_unknown(hardware.as_ref(), String::clone),
        };
        facts.push(fact(&format!("device {}", device.name), hardware));
    }
    section("Machine and versions", vec![Part::Facts(facts)])
}

fn plan(report: &Report) -> Section {
    let mut parts = Vec::new();
    if let Some(plan) = &report.plan {
        let parallelism = plan.parallelism.map_or("single device", |parallelism| parallelism.describe());
        let mut facts = vec![
            fact("parallelism", parallelism),
            fact("recipe", plan.recipe.to_string()),
            fact("effect on the results", crate::plan::describe_class(plan.class)),
            fact("offloaded to the host", plan.host_bytes.to_string()),
        ];
        facts.extend(plan.scratch_file_bytes.map(|bytes| fact("scratch file", bytes.to_string())));
        parts.push(Part::Facts(facts));
        let notes: Vec<String> = plan.excluded.iter().chain(&plan.notes).cloned().collect();
        if !notes.is_empty() {
            parts.push(Part::List(notes));
        }
    }
    let speed = &report.speed;
    let (step, rate) = (speed.predicted_step_seconds, speed.predicted_tokens_per_second);
    let simulated = if speed.simulated { "measured (simulated)" } else { "measured" };
    let (step_now, rate_now) = (speed.measured_step_seconds, speed.measured_tokens_per_second);
    let step_name = if speed.measured_step_seconds_p95.is_some() { "step, median" } else { "step, running mean" };
    // Figures under several plans differ from the prediction of the newest one for other reasons than its errors.
    let comparable = |measured: Option<f64>| measured.filter(|_| !speed.is_plan_replaced);
    let step_difference = difference(step, comparable(step_now));
    let rate_difference = difference(rate, comparable(rate_now));
    let mut rows = vec![
        figures(step_name, or_unknown(step, seconds), or_not_measured(step_now, seconds), step_difference),
        figures("tokens per second", or_unknown(rate, count), or_not_measured(rate_now, count), rate_difference),
    ];
    let p95 = speed.measured_step_seconds_p95;
    rows.extend(p95.map(|p95| figures("step, 95 of 100", "–".to_owned(), seconds(p95), "–".to_owned())));
    let headings = ["speed", "predicted", simulated, "difference"].map(str::to_owned).to_vec();
    parts.push(Part::Table { headings, rows });
    section("Plan: predicted and measured", parts)
}

/// Returns the section of the recommendations; without parts if none were asked for.
fn recommendations(report: &Report) -> Section {
    let Some(recommendations) = &report.recommendations else { return section("Recommendations", vec![]) };
    let mut parts = Vec::new();
    parts.push(Part::Text(match recommendations.is_empty() {
        true => "No change of settings is predicted to make this run faster.".to_owned(),
        false => "Each command starts a new run with one change, faster as predicted.".to_owned(),
    }));
    for recommendation in recommendations {
        parts.push(Part::Text(recommendation.text.clone()));
        parts.push(Part::Command(recommendation.command.clone()));
    }
    section("Recommendations", parts)
}

fn figures(name: &str, predicted: String, measured: String, difference: String) -> Vec<String> {
    vec![name.to_owned(), predicted, measured, difference]
}

/// Returns a row of a table of memory.
fn memory_row(name: &str, memory: MemoryPair) -> Vec<String> {
    let MemoryPair { predicted_bytes, measured_bytes } = memory;
    let number = |bytes: Option<Bytes>| bytes.map(|bytes| bytes.0 as f64);
    figures(
        name,
        or_unknown(predicted_bytes, |bytes| bytes.to_string()),
        or_not_measured(measured_bytes, |bytes| bytes.to_string()),
        difference(number(predicted_bytes), number(measured_bytes)),
    )
}

/// Returns the section of a device: its memory in all, by category and by Program.
fn device(device: &DeviceReport) -> Section {
    let mut parts = vec![Part::Bar(bar(device))];
    let mut rows = vec![
        memory_row("arena", device.arena),
        memory_row("charges (outside the arena)", device.charges),
        memory_row("in all", device.total),
    ];
    let line = or_unknown(device.load_line_bytes, |bytes| bytes.to_string());
    rows.push(figures("load line", line, String::new(), String::new()));
    let over = device.over_load_line_bytes;
    rows.extend(over.map(|over| figures("above the load line", String::new(), over.to_string(), String::new())));
    parts.push(memory_table("highest memory", rows));
    if device.measured_by == Some(MeasuredBy::FreeMemory) {
        let text = "Measured by the free memory of the GPU, which other processes change, too.";
        parts.push(Part::Text(text.to_owned()));
    }
    if let Some(newest) = device.newest_plan_arena_bytes.filter(|newest| Some(*newest) != device.arena.predicted_bytes)
    {
        let text = "The plan changed during the run. The tables below show the newest plan, with an arena of";
        parts.push(Part::Text(format!("{text} {newest}.")));
    }
    parts.extend(device.peak_set_by.as_ref().map(|peak| Part::Text(format!("Predicted {peak}."))));
    let categories = device.by_category.iter().map(|part| memory_row(&part.category.to_string(), part.memory));
    parts.push(memory_table("arena by category, when fullest", categories.collect()));
    parts.push(programs(device));
    let mut facts = Vec::new();
    facts.extend(device.sequences.map(|sequences| fact("sequences per step", sequences.to_string())));
    let slowdown = device.compute_slowdown.map(|slowdown| format!("{slowdown:.2} × the predicted time"));
    let simulated = if device.simulated { " (simulated)" } else { "" };
    facts.extend(slowdown.map(|slowdown| fact(&format!("compute time, measured{simulated}"), slowdown)));
    parts.push(Part::Facts(facts));
    parts.retain(|part| match part {
        Part::Table { rows, .. } => !rows.is_empty(),
        Part::Facts(facts) => !facts.is_empty(),
        _ => true,
    });
    section(&format!("Memory of {}{simulated}", device.name), parts)
}

/// Returns the table of the peaks of each kind of work, with the op that sets each, if the plan tells.
fn programs(device: &DeviceReport) -> Part {
    let tells = device.by_program.iter().any(|part| part.set_by.is_some());
    let row = |part: &ProgramMemory| {
        let mut row = memory_row(&part.program.to_string(), part.memory);
        row.extend(tells.then(|| part.set_by.clone().unwrap_or_else(|| "–".to_owned())));
        row
    };
    let mut headings =
        ["arena by Program, at its peak", "predicted", "measured", "difference"].map(str::to_owned).to_vec();
    headings.extend(tells.then(|| "predicted peak set by".to_owned()));
    Part::Table { headings, rows: device.by_program.iter().map(row).collect() }
}

fn memory_table(subject: &str, rows: Vec<Vec<String>>) -> Part {
    let headings = [subject, "predicted", "measured", "difference"].map(str::to_owned).to_vec();
    Part::Table { headings, rows }
}

fn bar(device: &DeviceReport) -> Bar {
    let mut parts: Vec<(String, Bytes)> = device
        .by_category
        .iter()
        .filter_map(|part| Some((part.category.to_string(), part.memory.predicted_bytes?)))
        .collect();
    parts.extend(device.charges.predicted_bytes.map(|bytes| ("charges".to_owned(), bytes)));
    Bar {
        label: format!("Planned memory of {} by category", device.name),
        parts,
        load_line: device.load_line_bytes,
        // The peak may be that of an earlier plan than the parts.
        measured_peak: device
            .total
            .measured_bytes
            .filter(|_| device.newest_plan_arena_bytes == device.arena.predicted_bytes),
    }
}

fn history(report: &Report) -> Section {
    let history = &report.run.history;
    let series = |value: fn(&HistoryPoint) -> Option<f64>| -> Vec<(f64, f64)> {
        history.iter().filter_map(|point| Some((point.step as f64, value(point)?))).collect()
    };
    let evaluations = report.evaluations.listed.iter();
    let marks = evaluations.filter_map(|evaluation| Some((evaluation.step as f64, evaluation.loss?))).collect();
    let simulated = if report.speed.simulated { ", simulated" } else { "" };
    let plots = vec![
        Plot::new("loss".to_owned(), series(|point| point.loss), loss).with_marks("evaluation", marks),
        Plot::new("learning rate".to_owned(), series(|point| Some(point.learning_rate)), |rate| format!("{rate:.2e}")),
        Plot::new("gradient norm".to_owned(), series(|point| Some(point.gradient_norm)), |norm| format!("{norm:.3}")),
        Plot::new(format!("tokens per second{simulated}"), series(|point| Some(point.tokens_per_second)), count),
    ];
    let plots: Vec<Plot> = plots.into_iter().filter(|plot| !plot.is_empty()).collect();
    section("History", if plots.is_empty() { vec![] } else { vec![Part::Plots(plots)] })
}

/// Returns the mean reward of an evaluation, or the share of right answers, or of pairs in which the chosen answer is preferred.
fn share_of(evaluation: &EvaluationNote) -> Option<String> {
    let share = || evaluation.exact_match.or(evaluation.preferences.map(|figures| figures.accuracy));
    let reward = evaluation.reward.map(|reward| format!("{reward:.3}"));
    reward.or_else(|| Some(percent(share()?, 1)))
}

fn evaluations(report: &Report) -> Section {
    let Newest { earlier, listed } = &report.evaluations;
    let row = |evaluation: &EvaluationNote| {
        let exact = share_of(evaluation).unwrap_or("–".to_owned());
        let by = evaluation.device.clone().unwrap_or_else(|| "the team".to_owned());
        vec![evaluation.step.to_string(), or_unknown(evaluation.loss, loss), exact, seconds(evaluation.seconds), by]
    };
    let has_pairs = listed.iter().any(|evaluation| evaluation.preferences.is_some());
    let has_rewards = listed.iter().any(|evaluation| evaluation.reward.is_some());
    let share = match (has_pairs, has_rewards) {
        (true, _) => "chosen preferred",
        (_, true) => "reward",
        _ => "exact match",
    };
    let headings = ["after step", "loss", share, "time", "evaluated by"].map(str::to_owned).to_vec();
    let mut parts = Vec::new();
    if !listed.is_empty() {
        parts.push(Part::Table { headings, rows: listed.iter().map(row).collect() });
    }
    parts.extend(earlier_events(*earlier).map(Part::Text));
    section("Evaluations", parts)
}

fn recoveries(report: &Report) -> Section {
    let mut items: Vec<String> = report.recoveries.listed.iter().map(recovery_line).collect();
    items.extend(earlier_events(report.recoveries.earlier));
    items.extend(report.team_changes.listed.iter().map(|change| match &change.reason {
        Some(reason) => format!("device lost at step {}: {} ({reason})", change.step, change.device),
        None => format!("device returned after step {}: {}", change.step, change.device),
    }));
    items.extend(earlier_events(report.team_changes.earlier));
    let text = if items.is_empty() { Part::Text("There was none.".to_owned()) } else { Part::List(items) };
    section("Recoveries and changes of the team", vec![text])
}

fn run_file(report: &Report) -> Section {
    let text = report.settings.as_ref().map(|settings| Part::Preformatted(settings.text.clone()));
    section("Run file", text.into_iter().collect())
}
