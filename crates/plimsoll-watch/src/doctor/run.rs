//! Checks of a run: whether it is valid and fits, its folder, and the GPUs that it leaves unused.

use super::{Finding, FindingId, PlanReadings, Readings, RunReadings, Severity};
use crate::text::seconds;
use plimsoll_core::printable::printable_line;
use plimsoll_core::{Bytes, Exit, Failure, Plan, Recommendation, format_count};

/// Most recommendations that are findings.
const RECOMMENDATIONS_MAX: usize = 3;

/// Returns the findings about the run; empty without one.
pub(super) fn findings(readings: &Readings) -> Vec<Finding> {
    let Some(run) = &readings.run else { return vec![] };
    let mut findings: Vec<Finding> = run.failures.iter().map(|failure| refused(run, failure)).collect();
    if let Some(planned) = &run.planned {
        findings.push(fit(run, planned));
        let listed = planned.recommendations.iter().take(RECOMMENDATIONS_MAX);
        findings.extend(listed.map(|recommendation| faster(&planned.plan, recommendation)));
        findings.extend(folder_not_writable(planned));
        findings.extend(disk_space(planned));
        findings.extend(unused_gpus(readings, run, &planned.plan));
    }
    findings
}

/// Returns the finding for a failure that refuses the run.
fn refused(run: &RunReadings, failure: &Failure) -> Finding {
    let id = if failure.exit == Exit::DoesNotFit { FindingId::RunDoesNotFit } else { FindingId::RunInvalid };
    let named = failure.message.contains(&run.run_file);
    let place = if named { String::new() } else { format!("{}: ", run.run_file) };
    let mend = match failure.hints.is_empty() {
        true => "correct the named key or file".to_owned(),
        // A hint is one line, whatever names it contains.
        false => failure.hints.iter().map(|hint| printable_line(hint)).collect::<Vec<_>>().join("\n"),
    };
    Finding::new(id, Severity::Error, place + &failure.message, "the run does not start", mend)
}

/// Returns the finding whether the plan fits.
fn fit(run: &RunReadings, planned: &PlanReadings) -> Finding {
    if let Some(refusal) = &planned.refusal {
        return refused(run, refusal);
    }
    let plan = &planned.plan;
    let devices = plan.devices.iter().map(|device| {
        let simulated = if device.simulated { " (simulated)" } else { "" };
        format!("{} of {} on {}{simulated}", device.peak_bytes, device.budget_bytes, device.name)
    });
    let mut text = format!("{} fits: {} (predicted)", run.run_file, devices.collect::<Vec<_>>().join(", "));
    if let Some(fallback) = &plan.fallback {
        text += &format!("; {fallback}");
    }
    let cost = format!("a step takes {} (predicted)", seconds(plan.predicted.step_seconds));
    let first = if run.failures.is_empty() { "" } else { "once its errors are mended: " };
    Finding::new(FindingId::RunFits, Severity::Note, text, cost, format!("{first}{}", run.train_command))
}

/// Returns the finding for a recommendation.
fn faster(plan: &Plan, recommendation: &Recommendation) -> Finding {
    let now = plan.predicted.step_seconds;
    let after = now / recommendation.speedup;
    let cost = format!("a step takes {} instead of {} (predicted)", seconds(now), seconds(after));
    let Recommendation { text, command, .. } = recommendation;
    Finding::new(FindingId::RunFaster, Severity::Note, text, cost, command)
}

fn folder_not_writable(planned: &PlanReadings) -> Option<Finding> {
    planned.is_writable.filter(|is_writable| !is_writable)?;
    let text = format!("run.dir: {} cannot be written", planned.folder);
    let mend = "use another folder: --set run.dir=runs/another";
    Some(Finding::new(FindingId::FolderNotWritable, Severity::Error, text, "the run does not start", mend))
}

/// Returns a finding if the disk has too little space for the checkpoints: an error if not even one fits. A new
/// checkpoint is written before the oldest is removed.
fn disk_space(planned: &PlanReadings) -> Option<Finding> {
    let (one, free) = (planned.plan.checkpoint_bytes, planned.disk_free_bytes?);
    let most = u64::from(planned.checkpoints_kept) + 1;
    let needed = Bytes(one.0.saturating_mul(most));
    if free >= needed {
        return None;
    }
    let severity = if free < one { Severity::Error } else { Severity::Warning };
    let text = format!(
        "the disk of {} has {free} free, and {} of {one} take {needed} (predicted)",
        planned.folder,
        format_count(most, "checkpoint")
    );
    let mend = "free space on that disk\nor use another disk: --set run.dir=/path/on/another/disk\n\
                or keep fewer checkpoints: --set train.keep=1";
    Some(Finding::new(FindingId::DiskSpace, severity, text, "the run stops when it saves and the disk is full", mend))
}

/// Returns a finding for each usable GPU of this machine that the plan leaves unused. Plans for devices of other
/// machines, or that are not present, have none.
fn unused_gpus(readings: &Readings, run: &RunReadings, plan: &Plan) -> Vec<Finding> {
    let is_here = |name: &str| {
        let is_device = readings.machine.devices.iter().any(|device| device.name == name);
        is_device || name.starts_with("virtual:")
    };
    if !plan.fits || !plan.devices.iter().all(|device| is_here(&device.name)) {
        return vec![];
    }
    let is_used = |name: &str| plan.devices.iter().any(|device| device.name == name);
    let mut findings = Vec::new();
    for gpu in readings.usable_gpus().filter(|gpu| !is_used(&gpu.name)) {
        let excluded = plan.excluded.iter().find(|excluded| excluded.device == gpu.name);
        if excluded.is_some_and(|excluded| excluded.evaluator_plan.is_some()) {
            continue;
        }
        let text = format!("{} does not use {} ({})", run.run_file, gpu.name, gpu.model);
        findings.push(match excluded {
            Some(excluded) => {
                let remedy = excluded.remedy.as_ref().map(|remedy| format!("{} {remedy}", run.train_command));
                let text = format!("{text}: {}", excluded.reason);
                let cost = "none, as far as the planner predicts";
                let mend = remedy.unwrap_or_else(|| format!("to compare: {}", run.all_gpus_command));
                Finding::new(FindingId::GpuUnused, Severity::Note, text, cost, mend)
            }
            None => {
                let cost = "the run may be slower than on all GPUs; the plan on all of them has its predicted speed";
                Finding::new(FindingId::GpuUnused, Severity::Warning, text, cost, &run.all_gpus_command)
            }
        });
    }
    findings
}
