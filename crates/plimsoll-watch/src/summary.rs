//! The summary at the end of a run as text: predicted and measured figures side by side, the evaluation, samples, and
//! the folder of the model.

use crate::progress::{preferences_text, recovery_line};
use crate::text::{columns, count, excerpt, percent, seconds, shell_word};
use plimsoll_core::printable::printable_message;
use plimsoll_core::{
    CollectiveBackend, EvaluatorResult, LostDevice, MeasuredBy, Parallelism, Recovery, RunResult, RunStatus,
    WorkerResult, format_count,
};

/// Most recoveries that the summary lists: the newest ones.
const RECOVERIES_MAX: usize = 3;

/// A held-out sample with the answer of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The prompt.
    pub prompt: String,
    /// The one right continuation of the prompt, from the data; `None` if there is no single right one, as in prose.
    pub right_answer: Option<String>,
    /// The continuation of the prompt that the model generated.
    pub answer: String,
}

/// Formats the summary of a run. `samples` may be empty, and `folder` is the run folder. `model` is the folder of the
/// trained model or adapters; `None` if none was written. With `simulated`, the speed is labelled as simulated. Ends
/// with a line break.
pub fn summary(result: &RunResult, samples: &[Sample], folder: &str, model: Option<&str>, simulated: bool) -> String {
    let mut text = match result.status {
        RunStatus::Done => format!("done: {}, ", format_count(result.steps, "step")),
        RunStatus::Stopped => format!("stopped after step {}, ", result.steps),
    };
    text += &format!("{}\n", losses(result));
    if !samples.is_empty() {
        text += "\nsamples\n";
        text += &sample_rows(samples);
    }
    text += "\n";
    text += &team_lines(result);
    text += &result.evaluator.as_ref().map_or(String::new(), evaluator_lines);
    text += &columns(&measured_rows(result));
    text += &format!(
        "{} tokens/s (measured{})\n",
        count(result.tokens_per_second),
        if simulated { ", simulated devices" } else { "" }
    );
    if let Some(fallback) = &result.fallback {
        text += &format!("{}\n", printable_message(&fallback.to_string()));
    }
    for LostDevice { device, step, resumed_from_step, returned_after_step } in &result.lost {
        let from = resumed_from_step.map_or(String::new(), |step| format!(", resumed from step {step}"));
        let until = returned_after_step.map_or(String::new(), |step| format!(", returned after step {step}"));
        text += &format!("device lost at step {step}: {device}{from}{until}\n");
    }
    text += &recovery_lines(&result.recoveries, folder);
    if let Some(steps) = result.unlabelled_steps {
        text += &format!("{} without any label\n", format_count(steps, "step"));
    }
    for fault in &result.faults_not_triggered {
        text += &format!("injected fault not triggered: {fault}\n");
    }
    if result.thermal_pause_seconds > 0.0 {
        text += &format!("{} of thermal pauses\n", seconds(result.thermal_pause_seconds));
    }
    if result.reproducible {
        text += "reproducible: the same command gives the same bits\n";
    }
    text += "\n";
    if let Some(model) = model {
        text += &format!("{}: {model}\n", output_kind(model));
    }
    if result.status == RunStatus::Stopped {
        text += &format!("to resume: {}\n", resume_command(folder));
    }
    text
}

/// Names the content of a run's output folder: a model, or adapters.
fn output_kind(folder: &str) -> &'static str {
    if folder.ends_with("/adapter") { "adapters" } else { "model" }
}

/// Formats the message for `--resume` of a run that is already done. `folder` is the run folder, and `model` the folder
/// of the trained model, `None` if none was written. `more` is a command that trains for more steps. The text ends with
/// a line break.
pub fn already_done(result: &RunResult, folder: &str, model: Option<&str>, more: &str) -> String {
    let mut text =
        format!("already done: {}, {}; nothing was changed\n", format_count(result.steps, "step"), losses(result));
    text += &format!("result: {folder}/result.json\n");
    if let Some(model) = model {
        text += &format!("{}: {model}\n", output_kind(model));
    }
    text + &format!("for more steps: {more}\n")
}

/// Formats the first and last training loss, and the figures of the last evaluation, if there was one.
fn losses(result: &RunResult) -> String {
    let mut text = format!("loss {:.4} -> {:.4}", result.loss.first, result.loss.last);
    if let Some(eval) = &result.eval {
        text += &match eval.reward {
            Some(reward) => format!(", held-out reward {reward:.3}"),
            None => format!(", held-out loss {:.4}", eval.loss),
        };
        if let Some(share) = eval.exact_match {
            text += &format!(", exact match {}", percent(share, 1));
        }
        if let Some(figures) = &eval.preferences {
            text += &format!(", prefers {}", preferences_text(figures));
        }
    }
    text
}

/// Returns the shell command that resumes the run in a folder.
pub fn resume_command(folder: &str) -> String {
    format!("plimsoll train --resume {}", shell_word(folder))
}

/// Formats the newest recoveries, one line each, and the changes of the devices' shares in one line. The event log in
/// the run folder `folder` has them all.
fn recovery_lines(recoveries: &[Recovery], folder: &str) -> String {
    let (shares, others): (Vec<&Recovery>, Vec<&Recovery>) =
        recoveries.iter().partition(|recovery| recovery.sequences.is_some());
    let hidden = others.len().saturating_sub(RECOVERIES_MAX);
    let mut text = match hidden {
        0 => String::new(),
        _ => format!("{} in {folder}/events.jsonl, and:\n", format_count(hidden, "earlier recovery")),
    };
    for recovery in &others[hidden..] {
        text += &format!("{}\n", printable_message(&recovery_line(recovery)));
    }
    if let Some(last) = shares.last() {
        let mut steps: Vec<u64> = shares.iter().map(|recovery| recovery.step).collect();
        steps.dedup();
        let change = |recovery: &&Recovery| {
            recovery.sequences.map(|[then, now]| format!("{} {then} -> {now} sequences", recovery.device))
        };
        let changes: Vec<String> =
            shares.iter().filter(|recovery| recovery.step == last.step).filter_map(change).collect();
        let line = format!(
            "shares changed {}; last at step {}: {} (all: {folder}/events.jsonl)",
            format_count(steps.len(), "time"),
            last.step,
            changes.join(", ")
        );
        text += &format!("{}\n", printable_message(&line));
    }
    text
}

/// Returns table rows with predicted and measured figures side by side.
fn measured_rows(result: &RunResult) -> Vec<Vec<String>> {
    let mut rows = vec![["", "predicted", "measured", "difference"].map(str::to_owned).to_vec()];
    let mut row = |label: String, predicted: (String, f64), measured: (String, f64)| {
        rows.push(vec![label, predicted.0, measured.0, difference(predicted.1, measured.1)]);
    };
    let shown = |bytes: plimsoll_core::Bytes| (bytes.to_string(), bytes.0 as f64);
    for memory in &result.memory {
        row(format!("{} arena", memory.device), shown(memory.arena_bytes), shown(memory.arena_measured_bytes));
        let held = match memory.measured_by {
            Some(MeasuredBy::FreeMemory) => format!("{} in all (by its free memory)", memory.device),
            Some(MeasuredBy::Process) | None => format!("{} in all", memory.device),
        };
        let measured = memory.measured_bytes.map_or(("not known".to_owned(), f64::NAN), shown);
        row(held, shown(memory.predicted_bytes), measured);
    }
    let step = &result.step_seconds;
    row("step, median".to_owned(), (seconds(step.predicted), step.predicted), (seconds(step.median), step.median));
    rows.push(vec!["step, 95 of 100".to_owned(), String::new(), seconds(step.p95)]);
    for memory in &result.memory {
        rows.push(vec![format!("{} load line", memory.device), memory.budget_bytes.to_string()]);
        if let Some(line) = memory.budget_bytes_at_end {
            rows.push(vec![format!("{} load line, at the end", memory.device), line.to_string()]);
        }
        if let Some(over) = memory.over_load_line_bytes {
            rows.push(vec![format!("{} above its load line", memory.device), String::new(), over.to_string()]);
        }
    }
    rows
}

/// Formats the difference of `measured` from `predicted` in percent, such as `+3.2 %`. Returns an empty text if the
/// prediction is 0, or if `measured` is NaN (not known).
fn difference(predicted: f64, measured: f64) -> String {
    match predicted {
        0.0 => String::new(),
        _ if measured.is_nan() => String::new(),
        base => format!("{:+.1} %", (measured / base - 1.0) * 100.0),
    }
}

/// Formats the parallelism of the team, one line about the work of each worker, and the backend of the
/// collectives. Returns an empty text for a single device.
fn team_lines(result: &RunResult) -> String {
    let Some(parallelism) = result.parallelism else { return String::new() };
    let all: u64 = result.team.iter().map(|worker| worker.sequences).sum();
    let lines: String = result.team.iter().map(|worker| worker_line(worker, parallelism, all)).collect();
    let collectives = collectives_note(&result.team).map(|how| format!("  {how}\n")).unwrap_or_default();
    format!("{}\n{lines}{collectives}\n", parallelism.describe())
}

/// Formats the work of a worker as one line. `sequences` is the number of sequences per step of the whole team.
fn worker_line(worker: &WorkerResult, parallelism: Parallelism, sequences: u64) -> String {
    let simulated = if worker.simulated { " (simulated)" } else { "" };
    let did = match parallelism {
        Parallelism::Pipeline => {
            format!("{} of all sequences", format_count(worker.recipe.recompute.len(), "layer"))
        }
        _ if worker.sequences == 0 => return format!("  {}: storage-only{simulated}\n", worker.device),
        _ => format!("{} of {}", worker.sequences, format_count(sequences, "sequence")),
    };
    let took = worker.compute_slowdown;
    format!("  {}: {did}, {took:.2} × the predicted compute time{simulated}\n", worker.device)
}

/// Describes the backend of the team's collectives. If a GPU cannot use NCCL, adds the reason. Returns `None` if NCCL
/// is no choice for these devices, such as CPUs.
fn collectives_note(team: &[WorkerResult]) -> Option<String> {
    let is_reason =
        |worker: &&WorkerResult| matches!(worker.collectives, Some(CollectiveBackend::Host { reason: Some(_) }));
    let worker = team.iter().find(is_reason).or(team.first())?;
    Some(match worker.collectives.as_ref()? {
        CollectiveBackend::Nccl => "collectives by NCCL".to_owned(),
        CollectiveBackend::Host { reason: None } => "collectives through host memory".to_owned(),
        CollectiveBackend::Host { reason: Some(reason) } => {
            format!("collectives through host memory: {}: {reason}", worker.device)
        }
    })
}

/// Formats the work of the evaluator: the number of evaluations, and the measured and predicted seconds of an
/// evaluation and of a weight transfer.
fn evaluator_lines(evaluator: &EvaluatorResult) -> String {
    let EvaluatorResult { device, simulated, evaluations, .. } = evaluator;
    let simulated = if *simulated { " (simulated)" } else { "" };
    let figures = |measured, predicted| format!("{}, predicted {}", seconds(measured), seconds(predicted));
    let (one, transfer) = (
        figures(evaluator.seconds, evaluator.predicted_seconds),
        figures(evaluator.weight_transfer_seconds, evaluator.predicted_weight_transfer_seconds),
    );
    let times = format_count(*evaluations, "time");
    format!("evaluator: {device}{simulated}\n  {times}: {one}; weight transfer {transfer}\n\n")
}

/// Formats samples, one line each: excerpts of prompt and answer, and whether the answer is right, if there is a single
/// right one.
fn sample_rows(samples: &[Sample]) -> String {
    let width = samples.iter().map(|sample| excerpt(&sample.prompt).chars().count()).max().unwrap_or(0);
    samples.iter().map(|sample| sample_row(sample, width)).collect()
}

/// Formats a sample as one line, with the prompt aligned right in `width` characters.
fn sample_row(Sample { prompt, right_answer, answer }: &Sample, width: usize) -> String {
    let verdict = match right_answer {
        None => String::new(),
        Some(right) if answer == right => "  right".to_owned(),
        Some(right) => format!("  expected {}", excerpt(right)),
    };
    format!("  {:>width$} {}{verdict}\n", excerpt(prompt), excerpt(answer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{
        Bytes, Class, DeviceMemory, EvalResult, LossSpan, MeasuredBy, Recipe, RecomputeLevel, Recovery, RunStatus,
        StepSeconds,
    };

    fn result() -> RunResult {
        RunResult {
            status: RunStatus::Done,
            steps: 450,
            loss: LossSpan { first: 2.7726, last: 0.0312 },
            unlabelled_steps: None,
            tokens_per_second: 48_704.0,
            step_seconds: StepSeconds { median: 0.0862, p95: 0.0991, predicted: 0.0841 },
            eval: Some(EvalResult { loss: 0.0288, exact_match: Some(0.975), preferences: None, reward: None }),
            rounds: vec![],
            memory: vec![DeviceMemory {
                device: "cpu".into(),
                budget_bytes: Bytes::mib(48),
                budget_bytes_at_end: None,
                arena_bytes: Bytes::mib(36),
                arena_measured_bytes: Bytes::mib(36),
                arena_measured_by_category: None,
                predicted_bytes: Bytes::mib(40),
                measured_bytes: Some(Bytes(Bytes::mib(40).0 + (1 << 18))),
                measured_by: Some(MeasuredBy::Process),
                over_load_line_bytes: None,
            }],
            recipe: Recipe::on_device(64, vec![RecomputeLevel::Nothing; 3]),
            parallelism: None,
            team: vec![],
            recoveries: vec![],
            lost: vec![],
            evaluator: None,
            faults_not_triggered: vec![],
            thermal_pause_seconds: 0.0,
            fallback: None,
            reproducible: false,
            reproducible_because: vec!["shares follow measured speeds".into()],
        }
    }

    #[test]
    fn summary_shows_predicted_beside_measured() {
        let sample = |prompt: &str, right: Option<&str>, answer: &str| Sample {
            prompt: prompt.into(),
            right_answer: right.map(str::to_owned),
            answer: answer.into(),
        };
        let samples = [
            sample("347+085=", Some("2340"), "2340"),
            sample("1+2=", Some("3000"), "4000"),
            sample("It was a", None, " dark night"),
        ];
        assert_eq!(
            summary(&result(), &samples, "runs/sums", Some("runs/sums/model"), false),
            "\
done: 450 steps, loss 2.7726 -> 0.0312, held-out loss 0.0288, exact match 97.5 %

samples
  347+085= 2340  right
      1+2= 4000  expected 3000
  It was a  dark night

                 predicted   measured  difference
cpu arena        36.00 MiB  36.00 MiB      +0.0 %
cpu in all       40.00 MiB  40.25 MiB      +0.6 %
step, median       84.1 ms    86.2 ms      +2.5 %
step, 95 of 100               99.1 ms
cpu load line    48.00 MiB
48.7 k tokens/s (measured)

model: runs/sums/model
"
        );
    }

    #[test]
    fn sample_is_one_bounded_line() {
        let sample = Sample {
            prompt: "a\nb".into(),
            right_answer: Some("c\u{1b}]0;t\u{7}".into()),
            answer: "\n\n".to_owned() + &"d".repeat(70_000),
        };
        let rows = sample_rows(&[sample.clone(), Sample { prompt: "e".repeat(70_000), ..sample }]);
        let first = rows.lines().next().unwrap();
        assert!(first.contains(r"  a\nb \n\ndd") && first.ends_with(r"d  expected c\u{1b}]0;t\u{7}"), "{first}");
        assert!(rows.lines().count() == 2 && rows.chars().count() < 1200, "{rows}");
    }

    #[test]
    fn stopped_run_shows_resume_command() {
        let recipe = |micro_batch| Recipe::on_device(micro_batch, vec![RecomputeLevel::Nothing; 3]);
        let recovery = Recovery {
            device: "cpu".into(),
            step: 7,
            reason: "cpu: the device ran out".into(),
            from: recipe(64),
            to: recipe(32),
            sequences: None,
            class: Class::Reordered,
            arena_bytes_before: Bytes::mib(36),
            arena_bytes: Bytes::mib(20),
            held_bytes_before: Some(Bytes::mib(40)),
            held_bytes: Some(Bytes::mib(25)),
            seconds: 0.02,
            predicted_step_seconds_before: 0.0841,
            predicted_step_seconds: 0.09,
            step_seconds_before: Some(0.0862),
            step_seconds: Some(0.1),
        };
        let faults_not_triggered = vec!["--inject-oom 12:evaluate".to_owned()];
        let mut stopped = RunResult {
            status: RunStatus::Stopped,
            steps: 12,
            eval: None,
            rounds: vec![],
            recoveries: vec![recovery],
            faults_not_triggered,
            ..result()
        };
        stopped.memory[0].budget_bytes_at_end = Some(Bytes::mib(24));
        stopped.memory[0].over_load_line_bytes = Some(Bytes::mib(2));
        let text = summary(&stopped, &[], "runs/sums", None, true);
        assert!(
            text.contains("cpu load line              48.00 MiB\ncpu load line, at the end  24.00 MiB\n"),
            "{text}"
        );
        let is_over = |line: &str| line.starts_with("cpu above its load line ") && line.ends_with(" 2.00 MiB");
        assert!(text.lines().any(is_over), "{text}");
        assert!(text.starts_with("stopped after step 12, loss 2.7726 -> 0.0312\n\n"), "{text}");
        assert!(text.contains("\n48.7 k tokens/s (measured, simulated devices)\n"), "{text}");
        assert!(
            text.contains(
                "\nrecovery at step 7: cpu: the device ran out; now micro-batch 32, recompute nothing: \
                 arena 36.00 MiB -> 20.00 MiB, step 84.1 ms -> 90.0 ms (predicted); measured memory \
                 40.00 MiB -> 25.00 MiB, step 86.2 ms -> 100.0 ms (took 20.0 ms)\n\
                 injected fault not triggered: --inject-oom 12:evaluate\n"
            ),
            "{text}"
        );
        assert!(text.ends_with("\n\nto resume: plimsoll train --resume runs/sums\n"), "{text}");
        let Recovery { from, arena_bytes_before, .. } = stopped.recoveries[0].clone();
        stopped.recoveries[0].to = from;
        stopped.recoveries[0].arena_bytes = arena_bytes_before;
        let text = summary(&stopped, &[], "runs/sums", None, true);
        assert!(text.contains("\nrecovery at step 7: cpu: the device ran out; repeated without changes\n"), "{text}");
        // Many recoveries and changes of shares stay short.
        let recovery = stopped.recoveries[0].clone();
        let share = |step, device: &str, sequences| Recovery {
            step,
            device: device.into(),
            sequences: Some(sequences),
            ..recovery.clone()
        };
        stopped.recoveries = vec![recovery.clone(); 7];
        stopped.recoveries.extend([share(8, "cpu", [64, 22]), share(9, "cpu", [22, 20]), share(9, "cuda:0", [42, 44])]);
        let text = recovery_lines(&stopped.recoveries, "runs/sums");
        let earlier = "4 earlier recoveries in runs/sums/events.jsonl, and:\nrecovery at step 7: ";
        assert!(text.starts_with(earlier), "{text}");
        let line = "\nshares changed 2 times; last at step 9: cpu 22 -> 20 sequences, cuda:0 42 -> 44 sequences (all: \
                    runs/sums/events.jsonl)\n";
        assert!(text.ends_with(line) && text.lines().count() == 5, "{text}");
    }

    #[test]
    fn result_json_has_stable_keys() {
        let text = serde_json::to_string(&result()).unwrap();
        assert_eq!(
            text,
            r#"{"status":"done","steps":450,"loss":{"first":2.7726,"last":0.0312},"tokens_per_second":48704.0,"step_seconds":{"median":0.0862,"p95":0.0991,"predicted":0.0841},"eval":{"loss":0.0288,"exact_match":0.975},"memory":[{"device":"cpu","budget_bytes":50331648,"arena_bytes":37748736,"arena_measured_bytes":37748736,"predicted_bytes":41943040,"measured_bytes":42205184,"measured_by":"process"}],"recipe":{"micro_batch":64,"recompute":["nothing","nothing","nothing"]},"recoveries":[],"thermal_pause_seconds":0.0,"reproducible":false,"reproducible_because":["shares follow measured speeds"]}"#
        );
        assert_eq!(serde_json::from_str::<RunResult>(&text).unwrap(), result());
    }
}
