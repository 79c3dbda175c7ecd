//! `plimsoll report` and `plimsoll runs` on real runs: finished, under way, killed and damaged ones.

use crate::common::{SMALL, Shape, Workspace};
use plimsoll_core::Bytes;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;

/// Arguments that train the built-in example for a few steps.
const EXAMPLE: [&str; 4] = ["train", "--quiet", "--set", "train.steps=12"];

/// Returns the words of a command that a report prints, without the name of the program.
fn words(command: &Value) -> Vec<&str> {
    let command = command.as_str().unwrap();
    assert!(!command.contains(['\'', '"']), "{command}");
    command.split(' ').skip(1).collect()
}

/// Asserts that a device of a report has used as many bytes of each category as planned, and not only a few of them.
fn assert_used_as_planned(device: &Value) {
    let categories = device["by_category"].as_array().unwrap();
    for category in categories {
        assert_eq!(category["measured_bytes"], category["predicted_bytes"], "{device}");
    }
    let has_bytes = |category: &&Value| category["measured_bytes"].as_u64().unwrap() > 0;
    assert!(categories.iter().filter(has_bytes).count() >= 4, "{device}");
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn report_of_the_example_shows_its_result() {
    let workspace = Workspace::new(&SMALL);
    workspace.succeed(&EXAMPLE);
    let said = workspace.succeed(&["report", "runs/sums"]).stdout;
    assert_eq!(said, "report: runs/sums/report.html\n");
    let mode = fs::metadata(workspace.path("runs/sums/report.html")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    let (result, plan) = (workspace.json("runs/sums/result.json"), workspace.json("runs/sums/plan.json"));
    let report = workspace.succeed(&["report", "runs/sums", "--json"]).json();
    assert_eq!((&report["run"]["state"], &report["settings"]["model"]), (&"done".into(), &"built-in example".into()));
    assert_eq!(report["speed"]["measured_tokens_per_second"], result["tokens_per_second"]);
    assert_eq!(report["speed"]["measured_step_seconds"], result["step_seconds"]["median"]);
    assert_eq!(report["environment"]["plimsoll_version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["evaluations"]["listed"][0]["loss"], result["eval"]["loss"]);
    let planned = plan["devices"].as_array().unwrap();
    assert_eq!(report["devices"].as_array().unwrap().len(), planned.len());
    for (device, plan) in report["devices"].as_array().unwrap().iter().zip(planned) {
        let memory =
            result["memory"].as_array().unwrap().iter().find(|memory| memory["device"] == plan["name"]).unwrap();
        assert_eq!(device["arena"]["measured_bytes"], memory["arena_measured_bytes"]);
        assert_eq!(device["arena"]["predicted_bytes"], memory["arena_bytes"]);
        assert_eq!(device["total"]["measured_bytes"], memory["measured_bytes"]);
        let categories = device["by_category"].as_array().unwrap().iter();
        let sum: u64 = categories.map(|category| category["predicted_bytes"].as_u64().unwrap()).sum();
        assert_used_as_planned(device);
        assert_eq!(memory["arena_measured_by_category"], plan["by_category"]);
        assert_eq!(sum, plan["lower_bound_bytes"].as_u64().unwrap());
    }

    // The page and the text show the rate of the result, and the page has all of its plots.
    let rate = report["speed"]["measured_tokens_per_second"].as_f64().unwrap();
    let rate = plimsoll_watch::text::count(rate);
    let (page, text) =
        (workspace.read("runs/sums/report.html"), workspace.succeed(&["report", "runs/sums", "--markdown"]));
    assert!(page.contains(&rate) && text.stdout.contains(&rate), "{rate}: {}", text.stdout);
    assert_eq!(page.matches("<figure>").count(), 4);
    // Each category of each device has the same bytes in both columns.
    for (device, plan) in report["devices"].as_array().unwrap().iter().zip(planned) {
        let table = text.stdout.split(&format!("## Memory of {}", plan["name"].as_str().unwrap())).nth(1).unwrap();
        for category in device["by_category"].as_array().unwrap() {
            let bytes = Bytes(category["measured_bytes"].as_u64().unwrap());
            let difference = if bytes == Bytes::ZERO { "–" } else { "+0.0 %" };
            let row = format!("| {} | {bytes} | {bytes} | {difference} |", category["category"].as_str().unwrap());
            assert!(table.contains(&row), "{row}: {table}");
        }
    }
    assert!(!page.contains("<script") && !page.contains("http:") && !page.contains("https:"));
}

#[test]
fn printed_command_repeats_the_run() {
    let workspace = Workspace::new(&SMALL);
    workspace.succeed(&["train", "run.toml", "--quiet", "--set", "run.deterministic=true"]);
    let report = workspace.succeed(&["report", "run", "--json"]).json();
    assert_eq!(report["commands"]["resume"], Value::Null);
    workspace.succeed(&[&words(&report["commands"]["repeat"])[..], &["--quiet"]].concat());
    assert_eq!(workspace.json("run-repeat/result.json")["loss"], workspace.json("run/result.json")["loss"]);
}

#[test]
fn asked_report_has_recommendations_of_its_run() {
    let workspace = Workspace::new(&SMALL);
    workspace.succeed(&["train", "run.toml", "--quiet", "--set", "recipe.micro_batch=1"]);
    assert_eq!(workspace.succeed(&["report", "run", "--json"]).json()["recommendations"], Value::Null);
    let report = workspace.succeed(&["report", "run", "--json", "--advise"]).json();
    let watched = workspace.succeed(&["watch", "run", "--json", "--advise"]).json();
    assert_eq!(report["recommendations"], watched["recommendations"]);
    let first = &report["recommendations"][0];
    assert!(first["speedup"].as_f64() > Some(1.0), "{report}");
    let text = workspace.succeed(&["report", "run", "--markdown", "--advise"]).stdout;
    let command = first["command"].as_str().unwrap();
    assert!(text.contains("## Recommendations\n") && text.contains(command), "{text}");
    assert!(!workspace.succeed(&["report", "run", "--markdown"]).stdout.contains("## Recommendations"));
}

#[test]
fn running_and_killed_runs_have_reports() {
    let workspace = Workspace::new(&Shape { steps: 100_000, ..SMALL });
    let mut run = workspace.start(&["train", "run.toml", "--quiet"]);
    let has_saved = || workspace.events("run").iter().any(|event| event["event"] == "checkpoint");
    assert!(run.wait_until(has_saved));
    let report = workspace.succeed(&["report", "run", "--json"]).json();
    assert_eq!((&report["run"]["state"], &report["reproducible"]), (&"running".into(), &Value::Null));
    assert_eq!(report["devices"][0]["arena"]["measured_bytes"], Value::Null);
    assert_used_as_planned(&report["devices"][0]);
    let snapshot = workspace.succeed(&["watch", "run", "--json"]).json();
    assert_eq!(snapshot["devices"][0]["measured_by_category"], snapshot["devices"][0]["by_category"]);
    run.kill();
    workspace.succeed(&["report", "run"]);
    assert!(workspace.read("run/report.html").contains("its process ended without a last event"));
    let report = workspace.succeed(&["report", "run", "--json"]).json();
    assert_eq!(report["run"]["state"], "died");
    let settings = ["--quiet", "--set", "train.steps=1"];
    let resumed = workspace.run(&[&words(&report["commands"]["resume"])[..], &settings].concat());
    assert!(resumed.code == Some(0) || resumed.stderr.contains("train.steps"), "{}", resumed.stderr);
}

#[test]
fn hostile_names_do_not_reach_the_page() {
    let workspace = Workspace::new(&SMALL);
    let name = "<script>alert(1)<b>";
    fs::rename(workspace.path("model"), workspace.path(name)).unwrap();
    let (path, dir) = (format!("model.path={name}"), format!("run.dir={name}-run"));
    let settings: Vec<&str> = [&*path, "model.init=random", &*dir, "train.steps=2"]
        .into_iter()
        .flat_map(|setting| ["--set", setting])
        .collect();
    workspace.succeed(&[&["train", "run.toml", "--quiet"], &settings[..]].concat());
    let folder = format!("{name}-run");
    workspace.succeed(&["report", &folder]);
    let page = workspace.read(&format!("{folder}/report.html"));
    assert!(!page.contains("<script") && !page.contains("<b>-run"), "{page}");
    assert!(page.contains("<td>&lt;script&gt;alert(1)&lt;b&gt;</td>"), "{page}");
    let text = workspace.succeed(&["report", &folder, "--markdown"]).stdout;
    assert!(text.starts_with("# \\<script\\>alert(1)\\<b\\>-run\n"), "{text}");
}

#[test]
fn folders_without_a_run_are_refused() {
    let workspace = Workspace::new(&SMALL);
    fs::create_dir(workspace.path("empty")).unwrap();
    let refusal = workspace.expect_refusal(2, &["report", "empty"]);
    assert!(refusal.contains("empty: holds no run") && refusal.contains("hint: "), "{refusal}");
    let refusal = workspace.expect_refusal(2, &["report", "missing", "--markdown"]);
    assert!(refusal.contains("missing: no such run folder"), "{refusal}");
    let refusal = workspace.expect_refusal(2, &["runs"]);
    assert!(refusal.contains("runs: cannot list its runs"), "{refusal}");
    assert_eq!(workspace.succeed(&["runs", "empty"]).stdout, "no runs in empty\n");
    assert!(workspace.file_names("empty").is_empty());
}

#[test]
fn champions_outlive_their_runs() {
    let workspace = Workspace::new(&SMALL);
    for dir in ["runs/one", "runs/two"] {
        workspace.succeed(&["train", "run.toml", "--quiet", "--set", &format!("run.dir={dir}")]);
    }
    let list = workspace.succeed(&["runs", "--json"]).json();
    let speeds: Vec<(&str, f64)> = list["runs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|run| (run["folder"].as_str().unwrap(), run["tokens_per_second"].as_f64().unwrap()))
        .collect();
    assert_eq!([speeds[0].0, speeds[1].0], ["runs/two", "runs/one"]);
    assert!(!workspace.path("runs/champions.json").exists());

    let best = if speeds[0].1 > speeds[1].1 { speeds[0] } else { speeds[1] };
    let champions = workspace.succeed(&["runs", "--champions", "--json"]).json();
    assert_eq!(champions, workspace.json("runs/champions.json"));
    let champion = &champions["champions"][0];
    assert_eq!((champions["champions"].as_array().unwrap().len(), &champion["tokens_per_second"]), (1, &best.1.into()));
    assert!(champion["run"].as_str().unwrap().ends_with(best.0), "{champion}");
    assert_eq!(champion["plan"], workspace.json(&format!("{}/plan.json", best.0)));
    assert_eq!(champion["run_file"], workspace.read(&format!("{}/run.toml", best.0)));
    assert!(workspace.succeed(&["runs"]).stdout.contains(&format!("{} *", best.0)));

    for dir in ["runs/one", "runs/two"] {
        fs::remove_dir_all(workspace.path(dir)).unwrap();
    }
    let table = workspace.succeed(&["runs", "--champions"]).stdout;
    assert!(table.contains("(gone)") && workspace.json("runs/champions.json") == champions, "{table}");

    workspace.write("runs/champions.json", "{\"version\"");
    let refusal = workspace.expect_refusal(2, &["runs", "--champions"]);
    assert!(refusal.contains("runs/champions.json") && refusal.contains("hint: restore the file"), "{refusal}");
    assert_eq!(workspace.read("runs/champions.json"), "{\"version\"");
    let listed = workspace.succeed(&["runs"]);
    assert!(listed.stderr.contains("note: runs/champions.json"), "{}", listed.stderr);
}
