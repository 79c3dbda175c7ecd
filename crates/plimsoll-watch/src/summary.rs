//! How a run ended, as a person reads it: what was predicted beside what was measured, the
//! evaluation, samples, and where the model lies. Pure: data to text.

use crate::progress::retreat_line;
use crate::text::{columns, count, percent, seconds, shell_word};
use plimsoll_core::{
    CollectivesBy, EvaluatorResult, LostDevice, MeasuredBy, MemberResult, RunResult, RunStatus, Sharing, counted,
};

/// A held-out sample and what the model made of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// What was given.
    pub prompt: String,
    /// What the data say comes next.
    pub expected: String,
    /// What the model said.
    pub answer: String,
}

/// The end of a run. `folder` is the run's, `model` where the model lies if it was written. Ends with
/// a line break.
pub fn summary(result: &RunResult, samples: &[Sample], folder: &str, model: Option<&str>, simulated: bool) -> String {
    let mut text = match result.status {
        RunStatus::Done => format!("done: {}, ", counted(result.steps, "step")),
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
    text += &columns(&measured_rows(result), "");
    text += &format!(
        "{} tokens/s (measured{})\n",
        count(result.tokens_per_second),
        if simulated { ", simulated devices" } else { "" }
    );
    if let Some(fallback) = &result.fallback {
        text += &format!("{fallback}\n");
    }
    for LostDevice { device, step, back_to, back_after } in &result.lost {
        let from = back_to.map_or(String::new(), |step| format!(", and the run went back to step {step}"));
        let until = back_after.map_or(String::new(), |step| format!(", back after step {step}"));
        text += &format!("lost at step {step}: {device}{from}{until}\n");
    }
    for retreat in &result.retreats {
        text += &format!("{}\n", retreat_line(retreat));
    }
    for never in &result.not_rehearsed {
        text += &format!("not rehearsed: {never} was never reached\n");
    }
    if result.rested_seconds > 0.0 {
        text += &format!("{} of rest, in which a warm device cooled down\n", seconds(result.rested_seconds));
    }
    text += "\n";
    if let Some(model) = model {
        text += &format!("model: {model}\n");
    }
    if result.status == RunStatus::Stopped {
        text += &format!("it goes on with: {}\n", resume_command(folder));
    }
    text
}

/// What is said of a run that shall go on and is done: what it has left, and the command that trains `more`. Ends with a line
/// break.
pub fn done_already(result: &RunResult, folder: &str, model: Option<&str>, more: &str) -> String {
    let mut text =
        format!("done already: {}, {}; nothing was changed\n", counted(result.steps, "step"), losses(result));
    text += &format!("result: {folder}/result.json\n");
    if let Some(model) = model {
        text += &format!("model: {model}\n");
    }
    text + &format!("for more steps: {more}\n")
}

/// Training loss and evaluation, in words.
fn losses(result: &RunResult) -> String {
    let mut text = format!("loss {:.4} -> {:.4}", result.loss.first, result.loss.last);
    if let Some(eval) = &result.eval {
        text += &format!(", held-out loss {:.4}", eval.loss);
        if let Some(share) = eval.exact_match {
            text += &format!(", exact match {}", percent(share, 1));
        }
    }
    text
}

/// The command that goes on with the run in this folder, as a shell reads it.
pub fn resume_command(folder: &str) -> String {
    format!("plimsoll train --resume {}", shell_word(folder))
}

/// Predicted and measured, side by side.
fn measured_rows(result: &RunResult) -> Vec<Vec<String>> {
    let mut rows = vec![["", "predicted", "measured", "difference"].map(str::to_owned).to_vec()];
    let mut row = |label: String, predicted: (String, f64), measured: (String, f64)| {
        let difference = match predicted.1 {
            0.0 => String::new(),
            _ if measured.1.is_nan() => String::new(),
            base => format!("{:+.1} %", (measured.1 / base - 1.0) * 100.0),
        };
        rows.push(vec![label, predicted.0, measured.0, difference]);
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
    }
    rows
}

/// What each device of a team did, a line each.
fn team_lines(result: &RunResult) -> String {
    let Some(sharing) = result.sharing else { return String::new() };
    let all: u64 = result.team.iter().map(|member| member.sequences).sum();
    let line = |member: &MemberResult| {
        let simulated = if member.simulated { " (simulated)" } else { "" };
        let did = match sharing {
            Sharing::Layers => format!("{} of all sequences", counted(member.recipe.recompute.len(), "layer")),
            _ if member.sequences == 0 => return format!("  {}: a part of the state{simulated}\n", member.device),
            _ => format!("{} of {}", member.sequences, counted(all, "sequence")),
        };
        let took = member.passes_over_predicted;
        format!("  {}: {did}, {took:.2} of the predicted time{simulated}\n", member.device)
    };
    let exchanged = exchanged(&result.team).map(|how| format!("  {how}\n")).unwrap_or_default();
    format!("{sharing} shared\n{}{exchanged}\n", result.team.iter().map(line).collect::<String>())
}

/// How GPUs exchanged, where they have NCCL.
fn exchanged(team: &[MemberResult]) -> Option<String> {
    let is_reason = |member: &&MemberResult| matches!(member.collectives, Some(CollectivesBy::Host { why: Some(_) }));
    let member = team.iter().find(is_reason).or(team.first())?;
    Some(match member.collectives.as_ref()? {
        CollectivesBy::Nccl => "exchanged by NCCL".to_owned(),
        CollectivesBy::Host { why: None } => "exchanged through memory of the host".to_owned(),
        CollectivesBy::Host { why: Some(why) } => {
            format!("exchanged through memory of the host: {}: {why}", member.device)
        }
    })
}

/// What a device did beside the steps.
fn evaluator_lines(evaluator: &EvaluatorResult) -> String {
    let EvaluatorResult { device, simulated, evaluations, .. } = evaluator;
    let simulated = if *simulated { " (simulated)" } else { "" };
    let of = |measured, predicted| format!("{}, predicted {}", seconds(measured), seconds(predicted));
    let (one, handed) = (
        of(evaluator.seconds, evaluator.predicted_seconds),
        of(evaluator.hand_over_seconds, evaluator.predicted_hand_over_seconds),
    );
    let times = counted(*evaluations, "time");
    format!("beside the steps {device} evaluated{simulated}\n  {times}: {one}; handed over in {handed}\n\n")
}

/// Samples, each on a line, right ones marked as such.
fn sample_rows(samples: &[Sample]) -> String {
    let width = samples.iter().map(|sample| sample.prompt.chars().count()).max().unwrap_or(0);
    let line = |sample: &Sample| {
        let Sample { prompt, expected, answer } = sample;
        let verdict = if answer == expected { "right".to_owned() } else { format!("wrong, expected {expected}") };
        format!("  {prompt:>width$} {answer}  {verdict}\n")
    };
    samples.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{
        Bytes, Class, DeviceMemory, EvalResult, LossSpan, MeasuredBy, Recipe, RecomputeLevel, Retreat, RunStatus,
        StepSeconds,
    };

    fn result() -> RunResult {
        RunResult {
            status: RunStatus::Done,
            steps: 450,
            loss: LossSpan { first: 2.7726, last: 0.0312 },
            tokens_per_second: 48_704.0,
            step_seconds: StepSeconds { median: 0.0862, p95: 0.0991, predicted: 0.0841 },
            eval: Some(EvalResult { loss: 0.0288, exact_match: Some(0.975) }),
            memory: vec![DeviceMemory {
                device: "cpu".into(),
                budget_bytes: Bytes::mib(48),
                budget_bytes_at_end: None,
                arena_bytes: Bytes::mib(36),
                arena_measured_bytes: Bytes::mib(36),
                predicted_bytes: Bytes::mib(40),
                measured_bytes: Some(Bytes(Bytes::mib(40).0 + (1 << 18))),
                measured_by: Some(MeasuredBy::Process),
            }],
            recipe: Recipe::on_device(64, vec![RecomputeLevel::Nothing; 3]),
            sharing: None,
            team: vec![],
            retreats: vec![],
            lost: vec![],
            evaluator: None,
            not_rehearsed: vec![],
            rested_seconds: 0.0,
            fallback: None,
        }
    }

    #[test]
    fn the_end_of_a_run_shows_predicted_and_measured_side_by_side() {
        let sample = |prompt: &str, expected: &str, answer: &str| Sample {
            prompt: prompt.into(),
            expected: expected.into(),
            answer: answer.into(),
        };
        let samples = [sample("347+085=", "2340", "2340"), sample("1+2=", "3000", "4000")];
        assert_eq!(
            summary(&result(), &samples, "runs/sums", Some("runs/sums/model"), false),
            "\
done: 450 steps, loss 2.7726 -> 0.0312, held-out loss 0.0288, exact match 97.5 %

samples
  347+085= 2340  right
      1+2= 4000  wrong, expected 3000

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
    fn a_stopped_run_says_how_it_goes_on() {
        let recipe = |micro_batch| Recipe::on_device(micro_batch, vec![RecomputeLevel::Nothing; 3]);
        let retreat = Retreat {
            device: "cpu".into(),
            step: 7,
            why: "cpu: the device ran out".into(),
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
        let not_rehearsed = vec!["--inject-oom 12:evaluate".to_owned()];
        let mut stopped = RunResult {
            status: RunStatus::Stopped,
            steps: 12,
            eval: None,
            retreats: vec![retreat],
            not_rehearsed,
            ..result()
        };
        stopped.memory[0].budget_bytes_at_end = Some(Bytes::mib(24));
        let text = summary(&stopped, &[], "runs/sums", None, true);
        assert!(
            text.contains("cpu load line              48.00 MiB\ncpu load line, at the end  24.00 MiB\n"),
            "{text}"
        );
        assert!(text.starts_with("stopped after step 12, loss 2.7726 -> 0.0312\n\n"), "{text}");
        assert!(text.contains("\n48.7 k tokens/s (measured, simulated devices)\n"), "{text}");
        assert!(
            text.contains(
                "\nretreat at step 7: cpu: the device ran out; from now on micro-batch 32, recompute 3 × nothing: \
                 arena 36.00 MiB -> 20.00 MiB, a step 84.1 ms -> 90.0 ms predicted; measured held \
                 40.00 MiB -> 25.00 MiB, a step 86.2 ms -> 100.0 ms (took 20.0 ms)\n\
                 not rehearsed: --inject-oom 12:evaluate was never reached\n"
            ),
            "{text}"
        );
        assert!(text.ends_with("\n\nit goes on with: plimsoll train --resume runs/sums\n"), "{text}");
        let Retreat { from, arena_bytes_before, .. } = stopped.retreats[0].clone();
        stopped.retreats[0].to = from;
        stopped.retreats[0].arena_bytes = arena_bytes_before;
        let text = summary(&stopped, &[], "runs/sums", None, true);
        assert!(text.contains("\nretreat at step 7: cpu: the device ran out; done again as it was\n"), "{text}");
        // Where the step is shared out anew everybody may keep its recipe: who computes what is what is new.
        stopped.retreats[0].sequences = Some([22, 20]);
        let text = summary(&stopped, &[], "runs/sums", None, true);
        let said =
            "\nshared anew at step 7: cpu: the device ran out; from now on cpu 22 -> 20 sequences, micro-batch 64";
        assert!(text.contains(said), "{text}");
    }

    #[test]
    fn the_result_has_the_names_that_other_tools_rely_on() {
        let text = serde_json::to_string(&result()).unwrap();
        assert_eq!(
            text,
            r#"{"status":"done","steps":450,"loss":{"first":2.7726,"last":0.0312},"tokens_per_second":48704.0,"step_seconds":{"median":0.0862,"p95":0.0991,"predicted":0.0841},"eval":{"loss":0.0288,"exact_match":0.975},"memory":[{"device":"cpu","budget_bytes":50331648,"arena_bytes":37748736,"arena_measured_bytes":37748736,"predicted_bytes":41943040,"measured_bytes":42205184,"measured_by":"process"}],"recipe":{"micro_batch":64,"recompute":["nothing","nothing","nothing"]},"retreats":[],"rested_seconds":0.0}"#
        );
        assert_eq!(serde_json::from_str::<RunResult>(&text).unwrap(), result());
    }
}
