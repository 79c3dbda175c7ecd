//! Tests of reports: the same numbers in all forms, unfinished and damaged runs, hostile names.

use super::document::{Document, Part};
use super::testing::{START, TestRun};
use super::*;
use crate::snapshot::RunState;
use plimsoll_core::{EVENTS_VERSION, Event, Record};
use std::fs;
use std::path::Path;

fn report(folder: &Path) -> Report {
    Report::read(folder, START + 100.0).unwrap()
}

/// Returns all cells of tables and facts of a report, without the headings.
fn cells(report: &Report) -> Vec<String> {
    let mut cells = Vec::new();
    for part in Document::new(report).sections.into_iter().flat_map(|section| section.parts) {
        match part {
            Part::Table { rows, .. } => cells.extend(rows.into_iter().flatten()),
            Part::Facts(facts) => cells.extend(facts.into_iter().flat_map(|(name, value)| [name, value])),
            _ => {}
        }
    }
    cells
}

/// Returns the names of a device's categories with their predicted and measured MiB; `u64::MAX` for unknown bytes.
fn by_category(device: &DeviceReport) -> Vec<(String, u64, u64)> {
    let mib = |bytes: Option<Bytes>| bytes.map_or(u64::MAX, |bytes| bytes.0 >> 20);
    let parts = device.by_category.iter();
    parts
        .map(|CategoryMemory { category, memory }| {
            (category.to_string(), mib(memory.predicted_bytes), mib(memory.measured_bytes))
        })
        .collect()
}

/// Returns what [`by_category`] returns for these categories.
fn categories(expected: &[(&str, u64, u64)]) -> Vec<(String, u64, u64)> {
    expected.iter().map(|(name, predicted, measured)| ((*name).to_owned(), *predicted, *measured)).collect()
}

#[test]
fn all_forms_show_the_same_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let report = report(&TestRun::default().write(folder.path(), "run"));
    let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
    assert_eq!(json["speed"]["measured_tokens_per_second"], 5000.5);
    assert_eq!(json["devices"][0]["total"]["measured_bytes"], 39 << 20);
    assert_eq!(json["devices"][0]["by_category"][0]["predicted_bytes"], 4 << 20);
    assert_eq!(
        by_category(&report.devices[0]),
        categories(&[("weight", 4, 4), ("activation", 12, 10), ("workspace", 0, 2)])
    );
    assert_eq!(json["devices"][0]["by_category"][1]["measured_bytes"], 10 << 20);
    assert!(json["devices"][0]["by_program"][0]["measured_bytes"].is_null());
    assert_eq!((&json["run"]["loss"], &json["first_loss"]), (&1.1.into(), &3.0.into()));
    let (html, markdown) = (report.html(), report.markdown());
    let shown =
        ["5.00 k", "39.00 MiB", "-2.5 %", "not measured", "-16.7 %", "1.1000", "3.0000", "52.0 ms", "50.0 %", "12.3 k"];
    for figure in shown {
        assert!(html.contains(figure) && markdown.contains(figure), "{figure}: {markdown}");
    }
    // Each cell is in both, in the escaped form of each.
    for cell in cells(&report).iter().filter(|cell| cell.chars().all(|c| c.is_alphanumeric() || " .%+,".contains(c))) {
        assert!(html.contains(&format!(">{cell}</")), "{cell}");
        assert!(markdown.contains(&format!("| {cell} |")), "{cell}");
    }
}

#[test]
fn plots_match_the_history() {
    let folder = tempfile::tempdir().unwrap();
    let html = report(&TestRun::default().write(folder.path(), "run")).html();
    assert!(html.contains("<b>loss</b>: first 3.0000, lowest 1.1000, highest 3.0000, last 1.1000"), "{html}");
    assert!(
        html.contains("<b>tokens per second</b>: first 4.00 k, lowest 4.00 k, highest 4.00 k, last 4.00 k"),
        "{html}"
    );
    assert!(html.contains("<title>evaluation after step 20: 1.2500</title>"), "{html}");
    let line = html.split("<polyline points=\"").nth(1).unwrap().split('"').next().unwrap();
    assert_eq!(line.split(' ').count(), 20);
}

#[test]
fn page_needs_nothing_from_outside() {
    let folder = tempfile::tempdir().unwrap();
    let html = report(&TestRun::default().write(folder.path(), "run")).html();
    for word in ["<script", "http:", "https:", "src=", "href=", "url(", "@import", "onload", "<iframe", "<link"] {
        assert!(!html.contains(word), "{word}");
    }
    assert!(html.contains("default-src 'none'") && html.contains("prefers-color-scheme: dark"));
    assert!(html.contains("name=\"viewport\"") && html.contains("@media print"));
}

#[test]
fn hostile_names_stay_text() {
    let folder = tempfile::tempdir().unwrap();
    let hostile = "<script>alert('x')</script>|`\u{1b}[31m";
    // A name of a folder cannot contain a slash.
    let name = "<script>alert('x')<img src=x onerror=alert(1)>";
    let run = TestRun { model: format!("/models/{}", hostile.replace('/', ":")), ..TestRun::default() };
    let report = report(&run.write(folder.path(), name));
    let (html, markdown) = (report.html(), report.markdown());
    assert!(!html.contains("<script") && !html.contains("<img") && !html.contains('\u{1b}'), "{html}");
    assert!(html.contains("<h1>&lt;script&gt;alert(&#39;x&#39;)&lt;img src=x onerror=alert(1)&gt;</h1>"), "{html}");
    assert!(markdown.starts_with("# \\<script\\>alert('x')\\<img src=x onerror=alert(1)\\>\n"), "{markdown}");
    assert!(!markdown.contains('\u{1b}') && report.json().contains("\\u001b[31m"));
}

#[test]
fn unfinished_runs_have_reports() {
    let folder = tempfile::tempdir().unwrap();
    let stopped = TestRun { ended: Some("stopped"), ..TestRun::default() };
    let stopped = report(&stopped.write(folder.path(), "stopped"));
    assert_eq!(stopped.run.state, RunState::Stopped);
    assert!(stopped.commands.resume.as_ref().unwrap().starts_with("plimsoll train --resume "));

    let path = TestRun { ended: None, ..TestRun::default() }.write(folder.path(), "died");
    let died = report(&path);
    assert_eq!((died.run.state, died.run.step), (RunState::Died, 20));
    assert!(died.warnings.listed[0].starts_with("its process ended without a last event"), "{:?}", died.warnings);
    let total = &died.devices[0].total;
    assert_eq!((total.predicted_bytes, total.measured_bytes), (Some(Bytes::mib(40)), Some(Bytes::mib(38))));
    assert_eq!((died.devices[0].arena.measured_bytes, died.reproducible), (None, None));
    let of_events = categories(&[("weight", 4, 4), ("activation", 12, 11), ("workspace", 0, 1)]);
    assert_eq!(by_category(&died.devices[0]), of_events);
    assert_eq!((died.speed.measured_step_seconds, died.speed.measured_step_seconds_p95), (Some(0.064), None));
    assert!(died.html().contains("step, running mean"), "{}", died.html());

    let log = fs::File::open(path.join("events.jsonl")).unwrap();
    log.try_lock().unwrap();
    let running = report(&path);
    assert_eq!((running.run.state, &running.commands.resume), (RunState::Running, &None));
    assert!(running.html().contains("running"));
}

#[test]
fn damaged_files_leave_gaps_not_failures() {
    let folder = tempfile::tempdir().unwrap();
    let path = TestRun::default().write(folder.path(), "run");
    let log = fs::read_to_string(path.join("events.jsonl")).unwrap();
    fs::write(path.join("events.jsonl"), &log[..log.len() - 20]).unwrap();
    fs::write(path.join("plan.json"), "{\"fits\": tru").unwrap();
    fs::write(path.join("run.toml"), "[model").unwrap();
    let cut = report(&path);
    assert_eq!((cut.run.state, cut.run.step, cut.plan.is_none()), (RunState::Died, 20, true));
    assert_eq!((&cut.settings, &cut.commands.repeat), (&None, &None));
    let warnings = cut.warnings.listed.iter().cloned().collect::<Vec<_>>().join("\n");
    assert!(warnings.contains("run.toml: ") && warnings.contains("plan.json is missing"), "{warnings}");
    assert!(cut.html().contains("not known") && cut.markdown().contains("## Warnings"));
    for name in ["plan.json", "run.toml", "result.json"] {
        fs::remove_file(path.join(name)).unwrap();
    }
    fs::write(path.join("events.jsonl"), "").unwrap();
    let empty = report(&path);
    assert_eq!((empty.run.state, empty.first_loss, empty.devices.len()), (RunState::Died, None, 0));
    assert!(empty.html().ends_with("</html>\n"));
    let refused = Report::read(folder.path(), START).unwrap_err();
    assert!(refused.message.contains("holds no run"), "{refused}");
}

#[test]
fn result_has_precedence_after_a_new_plan() {
    let folder = tempfile::tempdir().unwrap();
    let path = TestRun::default().write(folder.path(), "run");
    let mut plan: serde_json::Value = serde_json::from_slice(&fs::read(path.join("plan.json")).unwrap()).unwrap();
    assert!(report(&path).html().contains("<title>measured peak: 39.00 MiB</title>"));
    plan["devices"][0]["arena_bytes"] = (12_u64 << 20).into();
    plan["devices"][0]["charges_bytes"] = (20_u64 << 20).into();
    fs::write(path.join("plan.json"), plan.to_string()).unwrap();
    let changed = report(&path);
    let device = &changed.devices[0];
    let arenas = [device.arena.predicted_bytes, device.arena.measured_bytes, device.newest_plan_arena_bytes];
    assert_eq!(arenas, [16, 16, 12].map(|mib| Some(Bytes::mib(mib))));
    assert!(changed.html().contains("The plan changed during the run."), "{}", changed.html());
    // The result measured the largest plan, and the events the newest one.
    let of_events = categories(&[("weight", 4, 4), ("activation", 12, 11), ("workspace", 0, 1)]);
    assert_eq!(by_category(device), of_events);
    // Arena and charges are those of one plan; the parts of the bar are those of another one than its peak.
    assert_eq!(device.charges.predicted_bytes.map(|charges| charges + Bytes::mib(16)), device.total.predicted_bytes);
    assert!(!changed.html().contains("<title>measured peak"), "{}", changed.html());
}

#[test]
fn categories_of_a_replaced_plan_are_not_shown() {
    let folder = tempfile::tempdir().unwrap();
    let path = TestRun { ended: None, ..TestRun::default() }.write(folder.path(), "run");
    let log = fs::read_to_string(path.join("events.jsonl")).unwrap();
    let end = |to: u64| {
        let recipe = |micro_batch: u64| serde_json::json!({"micro_batch": micro_batch, "recompute": ["nothing"]});
        let recovery = serde_json::json!({
            "step": 20, "device": "cpu", "reason": "out of memory", "from": recipe(8), "to": recipe(to),
            "class": "identical", "arena_bytes_before": Bytes::mib(16), "arena_bytes": Bytes::mib(16), "seconds": 0.1,
            "predicted_step_seconds_before": 0.05, "predicted_step_seconds": 0.05,
        });
        let event = Event::Recovery(Box::new(serde_json::from_value(recovery).unwrap()));
        serde_json::to_string(&Record { version: EVENTS_VERSION, time: START, event }).unwrap() + "\n"
    };
    // A repetition under the same plan, and a new plan.
    for (to, activation) in [(8, 11), (4, u64::MAX)] {
        fs::write(path.join("events.jsonl"), log.clone() + &end(to)).unwrap();
        let found = by_category(&report(&path).devices[0]);
        assert_eq!(found.iter().find(|part| part.0 == "activation").unwrap().2, activation, "{found:?}");
    }
}

/// Returns the differences of time of a step and speed from the prediction, as a report shows them.
fn speed_differences(folder: &Path) -> [String; 2] {
    let cells = cells(&report(folder));
    let difference = |name| cells[cells.iter().position(|cell| cell == name).unwrap() + 3].clone();
    ["step, median", "tokens per second"].map(difference)
}

#[test]
fn replaced_plans_have_no_difference_of_speed() {
    let folder = tempfile::tempdir().unwrap();
    let path = TestRun::default().write(folder.path(), "run");
    assert_eq!(speed_differences(&path), ["+4.0 %", "-2.3 %"]);
    let log = fs::read_to_string(path.join("events.jsonl")).unwrap();
    let recipe = |micro_batch: u64| serde_json::json!({"micro_batch": micro_batch, "recompute": ["nothing", "block"]});
    let recovery = serde_json::json!({
        "step": 5, "device": "cpu", "reason": "out of memory", "from": recipe(8), "to": recipe(4), "class": "identical",
        "arena_bytes_before": Bytes::mib(16), "arena_bytes": Bytes::mib(12), "seconds": 0.1,
        "predicted_step_seconds_before": 0.05, "predicted_step_seconds": 0.06,
    });
    let event = Event::Recovery(Box::new(serde_json::from_value(recovery).unwrap()));
    let record = Record { version: EVENTS_VERSION, time: START, event };
    let (start, rest) = log.split_once('\n').unwrap();
    let recovered = format!("{start}\n{}\n{rest}", serde_json::to_string(&record).unwrap());
    fs::write(path.join("events.jsonl"), &recovered).unwrap();
    assert_eq!(speed_differences(&path), ["–", "–"]);
    // The figures of the next start are those of one plan.
    fs::write(path.join("events.jsonl"), recovered + &log).unwrap();
    assert_eq!(speed_differences(&path), ["+4.0 %", "-2.3 %"]);
}

#[test]
fn simulated_seconds_are_labelled() {
    let folder = tempfile::tempdir().unwrap();
    for (device, label) in [("virtual:a=64MiB@0.5", " (simulated)"), ("cpu", "")] {
        let run = TestRun { device: device.into(), ..TestRun::default() };
        let cells = cells(&report(&run.write(folder.path(), device)));
        let after = |name: &str| &cells[cells.iter().position(|cell| cell == name).unwrap() + 1];
        assert_eq!(*after("time in steps"), format!("1.28 s{label}"));
        // Evaluations take real time.
        assert!(cells.contains(&"500.0 ms".to_owned()), "{cells:?}");
    }
}

#[test]
fn commands_quote_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let parent = folder.path().canonicalize().unwrap();
    let report = report(&TestRun::default().write(&parent, "my run"));
    let path = parent.join("my run");
    let path = path.display();
    let expected = format!("plimsoll train '{path}/run.toml' --set 'run.dir={path}-repeat'");
    assert_eq!(report.commands, Commands { repeat: Some(expected), resume: None });
}
