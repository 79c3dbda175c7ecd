//! A sweep as text: a line when a run starts or ends, and a table at the end.

use crate::text::{columns, percent, seconds};
use plimsoll_core::printable::printable_message;
use plimsoll_core::{Bytes, SweepDevice, SweepReport, SweepRun, SweepState, format_count};

/// Formats the line that announces the planning of a sweep with `runs` runs. Planning takes a while.
pub fn planning(runs: usize) -> String {
    format!("plan   {}: measuring devices and planning each run on them\n", format_count(runs, "run"))
}

/// Formats the line for a run that has started.
pub fn started(run: &SweepRun) -> String {
    let device = run.device.as_deref().unwrap_or_default();
    let share = percent(run.share.unwrap_or(0.0), 0);
    let retry = if run.retries > 0 { format!(", retry {}", run.retries) } else { String::new() };
    let left = seconds((run.predicted_seconds.unwrap_or(0.0) - run.seconds).max(0.0));
    format!(
        "start  {}: {} of {device} and {share} of its time{retry}, {left} predicted\n",
        run.name,
        bytes(run.budget_bytes)
    )
}

/// Formats the line for a run whose worker process has ended. Such a run is done, waits for a retry, or ended without
/// success.
pub fn ended(run: &SweepRun) -> String {
    let reason = run.reason.as_ref().map_or(String::new(), |reason| format!(": {}", printable_message(reason)));
    let loss = run.loss.map_or(String::new(), |loss| format!(", loss {loss:.4}"));
    match run.state {
        SweepState::Done => {
            format!("done   {}: {}{loss}, {}\n", run.name, format_count(run.steps, "step"), seconds(run.seconds))
        }
        SweepState::Waiting => format!("retry  {}: after step {}{reason}\n", run.name, run.steps),
        _ => format!("ended  {}: {}, after step {}{reason}\n", run.name, state(run.state), run.steps),
    }
}

/// Formats the final table: all runs, the reasons of those that are not done, and the use of the devices.
pub fn table(report: &SweepReport) -> String {
    let head = [
        "run",
        "device",
        "bytes predicted",
        "measured",
        "seconds predicted",
        "measured",
        "steps",
        "loss",
        "eval loss",
        "retries",
        "state",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(report.runs.iter().map(row));
    let unfinished = report.runs.iter().filter(|run| run.state != SweepState::Done);
    let reasons = unfinished
        .filter_map(|run| Some(format!("{}: {}\n", run.name, printable_message(run.reason.as_ref()?))))
        .collect::<String>();
    let devices: String = report.devices.iter().map(device).collect();
    format!("\n{}\n{reasons}{devices}{}", columns(&rows), ending(report))
}

fn row(run: &SweepRun) -> Vec<String> {
    let loss = |loss: Option<f64>| loss.map_or_else(String::new, |loss| format!("{loss:.4}"));
    vec![
        run.name.clone(),
        run.device.clone().unwrap_or_default(),
        bytes(run.predicted_bytes),
        bytes(run.measured_bytes),
        run.predicted_seconds.map_or_else(String::new, seconds),
        if run.seconds > 0.0 { seconds(run.seconds) } else { String::new() },
        run.steps.to_string(),
        loss(run.loss),
        loss(run.eval_loss),
        run.retries.to_string(),
        state(run.state).to_owned(),
    ]
}

fn bytes(bytes: Option<Bytes>) -> String {
    bytes.map_or_else(String::new, |bytes| bytes.to_string())
}

fn state(state: SweepState) -> &'static str {
    match state {
        SweepState::Waiting => "waiting",
        SweepState::Running => "running",
        SweepState::Done => "done",
        SweepState::Stopped => "stopped",
        SweepState::DoesNotFit => "does not fit",
        SweepState::Failed => "failed",
    }
}

fn device(device: &SweepDevice) -> String {
    let simulated = if device.simulated { " (simulated)" } else { "" };
    let SweepDevice { name, peak_reserved_bytes, budget_bytes, workers, reason, .. } = device;
    if let Some(reason) = reason {
        return format!("{name}{simulated}: not used: {}\n", printable_message(reason));
    }
    let workers = format_count(*workers, "worker");
    format!("{name}{simulated}: at most {workers} at a time, {peak_reserved_bytes} of {budget_bytes} reserved\n")
}

fn ending(report: &SweepReport) -> String {
    let done = report.runs.iter().filter(|run| run.state == SweepState::Done).count();
    let retries: u32 = report.runs.iter().map(|run| run.retries).sum();
    let mut text = format!(
        "{done} of {} done ({}), {}\n",
        format_count(report.runs.len(), "run"),
        percent(report.success_rate(), 1),
        format_count(retries, "retry")
    );
    // Stopped runs would make the comparison meaningless.
    let ended = |run: &SweepRun| matches!(run.state, SweepState::Done | SweepState::DoesNotFit);
    if report.lower_bound_seconds > 0.0 && report.runs.iter().all(ended) {
        let difference = |seconds: f64, base: f64| match percent((seconds / base - 1.0).abs(), 1) {
            share if seconds < base => format!("{share} less"),
            share => format!("{share} more"),
        };
        text += &format!(
            "first start to last end, predicted: {}, {} than the lower bound of any packing ({}, predicted)\n\
             first start to last end, measured: {}: {} than predicted\n",
            seconds(report.predicted_seconds),
            difference(report.predicted_seconds, report.lower_bound_seconds),
            seconds(report.lower_bound_seconds),
            seconds(report.seconds),
            difference(report.seconds, report.predicted_seconds),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_lists_runs_and_reasons_of_failures() {
        let done = SweepRun {
            state: SweepState::Done,
            device: Some("virtual:a".into()),
            budget_bytes: Some(Bytes::mib(40)),
            predicted_bytes: Some(Bytes::mib(40)),
            measured_bytes: Some(Bytes::mib(38)),
            share: Some(0.25),
            predicted_seconds: Some(10.0),
            seconds: 11.0,
            steps: 20,
            loss: Some(1.5),
            ..SweepRun::new("one")
        };
        let reason = "fits on none of the devices: virtual:a has 96.00 MiB, the least that would do there is 1.00 GiB";
        let refused = SweepRun { state: SweepState::DoesNotFit, reason: Some(reason.into()), ..SweepRun::new("huge") };
        assert_eq!(started(&done), "start  one: 40.00 MiB of virtual:a and 25 % of its time, 0 µs predicted\n");
        assert_eq!(ended(&done), "done   one: 20 steps, loss 1.5000, 11.00 s\n");
        let device = SweepDevice {
            name: "virtual:a".into(),
            simulated: true,
            budget_bytes: Bytes::mib(96),
            peak_reserved_bytes: Bytes::mib(80),
            workers: 2,
            reason: None,
        };
        let mut report = SweepReport {
            version: SweepReport::VERSION,
            requested_devices: "virtual:a=96MiB".into(),
            requested_budget: None,
            retries: 2,
            workers: None,
            devices: vec![device],
            runs: vec![done, refused],
            predicted_seconds: 10.5,
            lower_bound_seconds: 10.0,
            seconds: 11.0,
        };
        let text = table(&report);
        assert!(
            text.contains("virtual:a        40.00 MiB  38.00 MiB            10.00 s   11.00 s     20  1.5000"),
            "{text}"
        );
        assert!(text.contains(&format!("huge: {reason}\n")), "{text}");
        assert!(text.contains("virtual:a (simulated): at most 2 workers at a time, 80.00 MiB of 96.00 MiB"), "{text}");
        assert!(text.contains("1 of 2 runs done (50.0 %), 0 retries\n"), "{text}");
        assert!(
            text.contains("predicted: 10.50 s, 5.0 % more than the lower bound of any packing (10.00 s, predicted)\n"),
            "{text}"
        );
        assert!(text.contains("measured: 11.00 s: 4.8 % more than predicted\n"), "{text}");
        report.devices[0].reason = Some("no run fits there".into());
        assert!(table(&report).contains("virtual:a (simulated): not used: no run fits there\n"), "{}", table(&report));
        report.runs[1].state = SweepState::Stopped;
        assert!(!table(&report).contains("packing"), "stopped sweeps are not compared with the bound");
    }
}
