//! The results of `plimsoll bench models` as text.

use crate::text::{columns, count, seconds};
use plimsoll_core::printable::{printable_line, printable_message};
use plimsoll_core::{Bytes, ModelRow, ModelStatus, ModelsBench, format_count};

/// Formats the workload, a table with a row per model, and a note on each model.
pub fn table(bench: &ModelsBench) -> String {
    let head = [
        "model",
        "parameters",
        "fits",
        "bytes predicted",
        "measured",
        "step predicted",
        "measured",
        "tok/s",
        "recoveries",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(bench.models.iter().map(row));
    let notes: String = bench.models.iter().map(note).collect();
    let [samples, tokens] = [format_count(bench.samples, "sequence"), format_count(bench.sequence, "token")];
    let workload = format!("{samples} of {tokens} each, random weights\n\n");
    format!("{workload}{}\n{notes}", columns(&rows))
}

fn row(row: &ModelRow) -> Vec<String> {
    let bytes = |bytes: Option<Bytes>| bytes.map_or_else(String::new, |bytes| bytes.to_string());
    let time = |time: Option<f64>| time.map_or_else(String::new, seconds);
    let fits = match row.status {
        ModelStatus::Ran | ModelStatus::Planned => "yes",
        ModelStatus::DoesNotFit => "no",
        ModelStatus::Failed if row.fits => "yes, failed",
        ModelStatus::Failed => "failed",
    };
    vec![
        row.model.clone(),
        row.parameters.map_or_else(String::new, |parameters| count(parameters as f64)),
        fits.to_owned(),
        bytes(row.predicted_bytes),
        bytes(row.measured_bytes),
        time(row.predicted_step_seconds),
        time(row.measured_step_seconds),
        row.tokens_per_second.map_or_else(String::new, count),
        row.recoveries.map_or_else(String::new, |recoveries| recoveries.to_string()),
    ]
}

/// Formats the note of a model: its resolved name, device, recipe and times, as far as they are known. Adds the reason
/// and hints if the model does not fit or its run failed.
fn note(row: &ModelRow) -> String {
    let mut parts = Vec::new();
    parts.extend((row.model != row.resolved_model).then(|| row.resolved_model.clone()));
    parts.extend(row.device.as_ref().map(|device| {
        let simulated = if row.simulated { " (simulated)" } else { "" };
        match &row.team[..] {
            [] => format!("{device}{simulated}"),
            team => format!("a team of {}{simulated}, bytes and recipe of {device}", team.join(" and ")),
        }
    }));
    if row.fits {
        parts.extend(row.recipe.as_ref().map(ToString::to_string));
    }
    parts.extend(row.over_load_line_bytes.map(|over| format!("{over} above the load line")));
    parts.extend(row.predicted_host_bytes.filter(|host| host.0 > 0).map(|host| format!("{host} on the host")));
    let (predicted, measured) = (row.predicted_seconds, row.measured_seconds);
    parts.extend(predicted.map(|predicted| format!("all steps {} predicted", seconds(predicted))));
    parts.extend(measured.map(|measured| format!("start to end {} measured", seconds(measured))));
    if row.status == ModelStatus::Planned {
        parts.push("planned only: a paper device".to_owned());
    }
    parts.extend(row.reason.as_deref().map(printable_message));
    let hints: String = row.hints.iter().map(|hint| format!("  hint: {}\n", printable_line(hint))).collect();
    format!("{}: {}\n{hints}", row.model, parts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_separates_predicted_from_measured() {
        let ran = ModelRow {
            status: ModelStatus::Ran,
            fits: true,
            parameters: Some(6_738_000_000),
            device: Some("virtual:a".into()),
            simulated: true,
            predicted_bytes: Some(Bytes::gib(6)),
            measured_bytes: Some(Bytes::gib(5)),
            over_load_line_bytes: Some(Bytes::mib(3)),
            predicted_step_seconds: Some(2.0),
            measured_step_seconds: Some(2.5),
            tokens_per_second: Some(1234.0),
            measured_seconds: Some(60.0),
            recoveries: Some(1),
            ..ModelRow::new("7b", "llama-2-7b")
        };
        let team = ["virtual:a", "virtual:b"].map(str::to_owned).to_vec();
        let of_team = note(&ModelRow { team, ..ran.clone() });
        assert!(
            of_team.contains("a team of virtual:a and virtual:b (simulated), bytes and recipe of virtual:a"),
            "{of_team}"
        );
        let refused = ModelRow {
            status: ModelStatus::DoesNotFit,
            reason: Some("does not fit: the smallest recipe holds 40.00 GiB".into()),
            hints: vec!["it fits from 40.01 GiB: plimsoll bench models llama-2-13b --budget 40970MiB".into()],
            ..ModelRow::new("llama-2-13b", "llama-2-13b")
        };
        let broken = ModelRow { reason: Some("exit 2: no such model".into()), ..ModelRow::new("x", "x") };
        let text = table(&ModelsBench { samples: 1000, sequence: 1024, models: vec![ran, refused, broken] });
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "1000 sequences of 1024 tokens each, random weights");
        assert!(lines[2].ends_with("tok/s  recoveries"), "{text}");
        for word in ["7b", "yes", "6.00 GiB", "5.00 GiB", "2.00 s", "2.50 s", "1.23 k", "1"] {
            assert!(lines[3].contains(word), "{word}: {text}");
        }
        assert!(lines[4].contains("no") && lines[5].contains("failed"), "{text}");
        assert_eq!(
            lines[7],
            "7b: llama-2-7b, virtual:a (simulated), 3.00 MiB above the load line, start to end 60.00 s measured"
        );
        assert_eq!(lines[8], "llama-2-13b: does not fit: the smallest recipe holds 40.00 GiB");
        assert_eq!(lines[9], "  hint: it fits from 40.01 GiB: plimsoll bench models llama-2-13b --budget 40970MiB");
        assert_eq!(lines[10], "x: exit 2: no such model");
    }
}
