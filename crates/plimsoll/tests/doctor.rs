//! `plimsoll doctor`: the machine, runs that fit, do not fit or are invalid, limits of the process, and untouched files.

use crate::common::{CommandOutput, SMALL, Shape, Workspace};
use serde_json::Value;

/// Returns the findings of a doctor command, after checking that they are complete and match its exit code.
fn findings(done: &CommandOutput) -> Vec<Value> {
    let findings = done.json()["findings"].as_array().unwrap_or_else(|| panic!("{done:?}")).clone();
    for finding in &findings {
        for key in ["id", "severity", "text", "cost", "mend"] {
            assert!(finding[key].as_str().is_some_and(|text| !text.is_empty()), "{key}: {finding}");
        }
    }
    let has_error = findings.iter().any(|finding| finding["severity"] == "error");
    assert_eq!(done.code, Some(if has_error { 2 } else { 0 }), "{done:?}");
    findings
}

fn doctor(workspace: &Workspace, words: &[&str]) -> Vec<Value> {
    findings(&workspace.run(&[&["doctor", "--json"], words].concat()))
}

/// Returns the finding of a check; `None` if there is none.
fn find<'a>(findings: &'a [Value], id: &str) -> Option<&'a Value> {
    findings.iter().find(|finding| finding["id"] == id)
}

/// Returns the finding of a check, which must exist.
fn expect<'a>(findings: &'a [Value], id: &str) -> &'a Value {
    find(findings, id).unwrap_or_else(|| panic!("{id}: {findings:?}"))
}

/// Runs the doctor in a shell with a limit, such as `ulimit -v 4000000`.
fn under_limit(workspace: &Workspace, limit: &str, words: &[&str]) -> Vec<Value> {
    let script = format!("{limit}; exec \"$@\"");
    let args = [&["doctor", "--json"], words].concat();
    findings(&workspace.start_wrapped(&["sh", "-c", &script, "sh"], &args).wait())
}

#[test]
fn machine_without_nvidia_is_noted_not_refused() {
    let workspace = Workspace::new(&SMALL);
    let devices = workspace.succeed(&["devices", "--json"]).json();
    let findings = doctor(&workspace, &[]);
    let has_driver = devices["nvidia"]["driver"].is_string() || devices["nvidia"]["error"].is_string();
    let has_card = devices["nvidia"]["cards_on_bus"] != 0;
    assert_eq!(find(&findings, "no-nvidia-gpu").is_some(), !has_driver && !has_card, "{findings:?}");
    assert_eq!(find(&findings, "driver-missing").is_some(), !has_driver && has_card, "{findings:?}");
    let text = workspace.run(&["doctor"]).stdout;
    // The two commands measure the load of the machine apart: one may find busy processors, the other not.
    for finding in findings.iter().filter(|finding| finding["id"] != "cpu-busy") {
        let start = format!("{} {}: ", finding["severity"].as_str().unwrap(), finding["id"].as_str().unwrap());
        assert!(text.lines().any(|line| line.starts_with(&start)), "{start}: {text}");
    }
}

#[test]
fn run_that_fits_has_its_command() {
    let workspace = Workspace::new(&SMALL);
    let before = workspace.read_files("cache");
    let findings = doctor(&workspace, &["run.toml", "--devices", "cpu=400MiB"]);
    let fits = expect(&findings, "run-fits");
    let text = fits["text"].as_str().unwrap();
    assert!(text.starts_with("run.toml fits: ") && text.ends_with(" of 400.00 MiB on cpu (predicted)"), "{text}");
    assert_eq!(fits["mend"], "plimsoll train run.toml --devices cpu=400MiB");
    assert_eq!(workspace.read_files("cache"), before);
    assert!(!workspace.path("run").exists());
    workspace.succeed(&["train", "run.toml", "--devices", "cpu=400MiB", "--quiet"]);
    let findings = doctor(&workspace, &["run.toml"]);
    let taken = expect(&findings, "run-invalid")["text"].as_str().unwrap();
    assert!(taken.starts_with("run.toml: run.dir: folder ") && taken.ends_with("/run already holds a run"), "{taken}");
}

#[test]
fn run_that_does_not_fit_has_commands_that_do() {
    let workspace = Workspace::new(&Shape { batch_sequences: 64, ..SMALL });
    let findings = doctor(&workspace, &["run.toml", "--devices", "cpu=8MiB"]);
    let refused = expect(&findings, "run-does-not-fit");
    assert!(refused["text"].as_str().unwrap().contains("does not fit: the smallest recipe holds "), "{refused}");
    let mend = refused["mend"].as_str().unwrap();
    let (_, command) = mend.lines().next().unwrap().split_once(": plimsoll train ").unwrap_or_else(|| panic!("{mend}"));
    let words: Vec<&str> = command.split(' ').collect();
    workspace.succeed(&[&["plan"], &words[..]].concat());
    assert!(find(&findings, "run-fits").is_none());
}

#[test]
fn invalid_run_files_name_their_fault() {
    let workspace = Workspace::new(&SMALL);
    let invalid = |words: &[&str]| {
        let findings = doctor(&workspace, words);
        let finding = expect(&findings, "run-invalid").clone();
        (finding["text"].as_str().unwrap().to_owned(), finding["mend"].as_str().unwrap().to_owned())
    };
    assert!(invalid(&["missing.toml"]).0.starts_with("cannot read missing.toml: "));
    let text = workspace.read("run.toml");
    workspace.write("wrong.toml", text.replace("steps =", "stepz ="));
    let (message, mend) = invalid(&["wrong.toml"]);
    assert!(message.starts_with("wrong.toml, line ") && message.ends_with(": unknown key `train.stepz`"), "{message}");
    assert_eq!(mend, "did you mean `train.steps`?");
    workspace.write("no-data.toml", text.replace("train.jsonl", "other.jsonl"));
    assert!(invalid(&["no-data.toml"]).0.contains("other.jsonl"));
    assert!(invalid(&["run.toml", "--devices", "rtx3090"]).0.contains("`rtx3090` is a device on paper"));
    // The run fits, and its model is missing: both are told.
    workspace.write("no-weights.toml", text.replace("init = \"random\"\n", ""));
    let findings = doctor(&workspace, &["no-weights.toml", "--devices", "cpu=400MiB"]);
    assert!(find(&findings, "run-invalid").is_some(), "{findings:?}");
    let mend = &expect(&findings, "run-fits")["mend"];
    assert_eq!(mend, "once its errors are mended: plimsoll train no-weights.toml --devices cpu=400MiB");
    let refusal = workspace.expect_refusal(2, &["doctor", "--devices", "cpu"]);
    assert!(refusal.contains("no run is named"), "{refusal}");
}

#[test]
fn limits_of_process_become_findings() {
    let workspace = Workspace::new(&SMALL);
    let run = ["run.toml", "--devices", "cpu=400MiB"];
    // 64 blocks of at most 1 KiB, less than the checkpoint.
    let findings = under_limit(&workspace, "ulimit -f 64", &run);
    let file = expect(&findings, "file-size-limit");
    assert_eq!(file["severity"], "error");
    assert!(file["cost"].as_str().unwrap().contains("stops at its first checkpoint"), "{file}");
    assert!(find(&doctor(&workspace, &run), "file-size-limit").is_none());
    let findings = under_limit(&workspace, "ulimit -v 4000000", &[]);
    let space = expect(&findings, "address-space-limit");
    assert!(space["text"].as_str().unwrap().contains("3.81 GiB (ulimit -v)"), "{space}");
    let findings = under_limit(&workspace, "ulimit -n 100", &[]);
    assert_eq!(expect(&findings, "open-files-limit")["severity"], "warning");
}
