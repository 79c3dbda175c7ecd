//! A snapshot as lines, for output that is no terminal.

use super::overview::{figures, machine_parts, progress_parts};
use crate::snapshot::Snapshot;
use crate::snapshot::plan::PlanSnapshot;
use plimsoll_core::printable::printable_message;

/// Formats a snapshot as lines: the run with its plan, the machine, each device, warnings and recommendations.
pub fn lines(snapshot: &Snapshot) -> String {
    let mut lines = Vec::new();
    if let Some(run) = &snapshot.run {
        let simulated = if run.simulated { " (simulated speed)" } else { "" };
        lines.push(format!("{} {}: {}{simulated}", run.folder, run.state.describe(), progress_parts(run).join("  ")));
        lines.extend(run.plan.iter().flat_map(PlanSnapshot::lines));
    }
    lines.push(machine_parts(snapshot).join("  "));
    for device in &snapshot.devices {
        lines.push(figures(device));
        lines.extend(device.peak_sentence().map(|peak| format!("{}: predicted {peak}", device.name)));
    }
    lines.extend(snapshot.warnings.iter().map(|warning| format!("warning: {warning}")));
    let advice = snapshot.recommendations.iter();
    lines.extend(advice.map(|advice| format!("faster: {}; {}", advice.text, advice.command)));
    lines.iter().map(|line| printable_message(line) + "\n").collect()
}

/// Formats a snapshot as a JSON object on several lines.
pub fn json(snapshot: &Snapshot) -> String {
    serde_json::to_string_pretty(snapshot).expect("plain data has a JSON form")
}
