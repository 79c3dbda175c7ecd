//! `plimsoll bench models`: models are planned and trained one after another, and a failing one does not stop the others.

use crate::common::{SMALL, Workspace, config};
use serde_json::Value;

/// Runs the benchmark, which has to end with `code` and delete its temporary files. Returns its rows and its output.
fn bench(workspace: &Workspace, code: i32, more: &[&str]) -> (Vec<Value>, String) {
    std::fs::create_dir_all(workspace.path("tmp")).unwrap();
    let tmp = format!("TMPDIR={}", workspace.path("tmp").display());
    let args = ["bench", "models", "--samples", "24", "--sequence", "32", "--json", "rows.json"];
    let done = workspace.start_wrapped(&["env", &tmp], &[&args[..], more].concat()).wait();
    assert_eq!(done.code, Some(code), "{}{}", done.stderr, done.stdout);
    assert!(workspace.file_names("tmp").is_empty(), "{:?}", workspace.file_names("tmp"));
    let bench = workspace.json("rows.json");
    assert_eq!((&bench["samples"], &bench["sequence"]), (&24.into(), &32.into()));
    (bench["models"].as_array().unwrap().clone(), done.stdout)
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn failing_model_does_not_stop_others() {
    let workspace = Workspace::new(&SMALL);
    std::fs::create_dir(workspace.path("broken")).unwrap();
    workspace.write("broken/config.json", "{");
    std::fs::create_dir(workspace.path("wide")).unwrap();
    workspace.write("wide/config.json", config(64).to_string());
    let one_step = ["--budget", "128MiB", "--set", "train.batch_tokens=256"];
    let (rows, text) =
        bench(&workspace, 2, &[&["./broken", "./model", "smollm2-135m", "./wide"], &one_step[..]].concat());
    let status: Vec<&str> = rows.iter().map(|row| row["status"].as_str().unwrap()).collect();
    assert_eq!(status, ["failed", "ran", "does_not_fit", "ran"], "{text}");
    assert!(rows[0]["reason"].as_str().unwrap().contains("config.json"), "{}", rows[0]);
    assert!(rows[2]["needs"][0]["budget_bytes"].as_u64() > rows[2]["budget_bytes"].as_u64(), "{}", rows[2]);
    for row in [&rows[1], &rows[3]] {
        assert_eq!((&row["fits"], &row["steps"], &row["recoveries"]), (&true.into(), &3.into(), &0.into()), "{row}");
        for measured in ["measured_bytes", "measured_step_seconds", "tokens_per_second", "measured_seconds"] {
            assert!(row[measured].as_f64().unwrap() > 0.0, "{measured}: {row}");
        }
        assert!(row["predicted_bytes"].as_u64().unwrap() <= 128 << 20, "{row}");
    }
    assert!(text.contains("./wide") && text.contains("does not fit: the smallest recipe holds"), "{text}");
    // Token caches of the benchmark are deleted as well.
    assert!(!workspace.file_names("cache").contains(&"tokens".to_owned()), "{:?}", workspace.file_names("cache"));
}

#[test]
fn interrupts_end_benchmark_and_remove_its_files() {
    let workspace = Workspace::new(&SMALL);
    std::fs::create_dir(workspace.path("tmp")).unwrap();
    let tmp = format!("TMPDIR={}", workspace.path("tmp").display());
    let line = ["bench", "models", "./model", "smollm2-135m", "--sequence", "32", "--budget", "700MiB"];
    let quick = ["--samples", "40000", "--set", "train.batch_tokens=256"];
    // One step takes far longer than the time between the two signals.
    let slow = ["--samples", "131072", "--set", "train.batch_tokens=4194304", "--set", "recipe.micro_batch=8"];
    for (attempt, (more, interrupts, says)) in
        [(&quick[..], 1, "stopped: 0 of 2 models tried\n"), (&slow, 2, "stopped: at once, by a second Ctrl-C\n")]
            .into_iter()
            .enumerate()
    {
        let mut run = workspace.start_wrapped(&["env", &tmp], &[&line[..], more].concat());
        let stderr = || workspace.read(&format!("{}.stderr", attempt + 1));
        assert!(run.wait_until(|| stderr().contains("./model: training ")), "{}", stderr());
        run.signal("INT");
        assert!(run.wait_until(|| stderr().contains("; Ctrl-C again to stop now\n")) || interrupts == 1);
        if interrupts == 2 {
            run.signal("INT");
        }
        let done = run.wait();
        assert_eq!(done.code, Some(4), "{}", done.stderr);
        assert!(done.stderr.contains("./model: training ") && done.stderr.contains(" predicted\n"), "{}", done.stderr);
        assert!(done.stderr.contains(says), "{}", done.stderr);
        let rest = "\n  hint: for the others: plimsoll bench models ./model smollm2-135m --sequence 32";
        assert!(done.stderr.contains(rest), "{}", done.stderr);
        assert!(workspace.file_names("tmp").is_empty(), "{:?}", workspace.file_names("tmp"));
    }
}

#[test]
fn common_errors_are_reported_before_first_model() {
    let workspace = Workspace::new(&SMALL);
    for (words, says) in [
        (["--devices", "foo"], "foo"),
        (["--devices", "cuda:99"], "cuda:99"),
        (["--allow", "nf5"], "nf5"),
        (["--set", "train.nosuch=1"], "train.nosuch"),
    ] {
        let refusal = workspace
            .expect_refusal(2, &[&["bench", "models", "./model", "7b", "--json", "rows.json"][..], &words].concat());
        assert!(refusal.contains(says), "{refusal}");
        assert!(!workspace.path("rows.json").exists(), "{words:?}");
    }
}

#[test]
fn plan_and_benchmark_know_the_same_names() {
    let workspace = Workspace::new(&SMALL);
    let names = ["1b", "SmolLM2-135M", "llama-3.2-1B", "./model"];
    let (rows, _) = bench(&workspace, 0, &[&names[..], &["--devices", "h200"]].concat());
    for (name, row) in names.into_iter().zip(rows) {
        let plan =
            ["plan", "--model", name, "--devices", "h200", "--sequence", "32", "--batch-tokens", "1024", "--json"];
        let plan = workspace.succeed(&plan).json();
        assert_eq!(plan["planned_for"]["parameters"], row["parameters"], "{name}");
        assert!(row["parameters"].as_u64() > Some(0), "{row}");
    }
}

#[test]
fn paper_devices_plan_models_and_sizes_name_presets() {
    let workspace = Workspace::new(&SMALL);
    let devices = ["--devices", "rtx3090,host=64GiB", "--allow", "nf4,lora"];
    let (rows, text) = bench(&workspace, 0, &[&["7b", "11b"], &devices[..]].concat());
    let named: Vec<&str> = rows.iter().map(|row| row["resolved_model"].as_str().unwrap()).collect();
    assert_eq!(named, ["llama-2-7b", "llama-11b"]);
    for row in &rows {
        assert_eq!((&row["status"], &row["fits"]), (&"planned".into(), &true.into()), "{row}");
        assert!(row["measured_bytes"].is_null() && row["tokens_per_second"].is_null(), "{row}");
    }
    assert!(text.contains("planned only: a paper device"), "{text}");
    // A model that does not fit has remedies, with commands for that model only.
    let (rows, text) = bench(&workspace, 0, &["smollm2-135m", "1b", "--devices", "rtx3070=4GiB,host=2GiB"]);
    let needs = rows[1]["needs"].as_array().unwrap();
    assert!(needs.iter().any(|need| need["allow"].as_array().unwrap().contains(&"lora".into())), "{needs:?}");
    assert!(needs.iter().any(|need| need["host_bytes"].as_u64() > Some(2 << 30)), "{needs:?}");
    let hints: Vec<&str> = rows[1]["hints"].as_array().unwrap().iter().map(|hint| hint.as_str().unwrap()).collect();
    for hint in &hints {
        assert!(text.contains(&format!("\n  hint: {hint}\n")), "{text}");
        let command = hint.split_once(": ").unwrap().1;
        assert!(command.contains("  # ") && command.ends_with(" predicted"), "{hint}");
        assert!(command.starts_with("plimsoll bench models --samples 24") && command.contains(" 1b "), "{hint}");
        assert!(!command.contains("smollm2-135m"), "{hint}");
    }
    assert!(hints.iter().any(|hint| hint.contains("on the host")), "{hints:?}");
    // Exit code 3 if no model fits.
    let (rows, _) = bench(&workspace, 3, &["smollm2-135m", "smollm2-360m", "--devices", "rtx3070=1GiB"]);
    assert!(rows.len() == 2 && rows.iter().all(|row| row["status"] == "does_not_fit"), "{rows:?}");
    // A failed run is reported with its error message.
    let (rows, text) = bench(
        &workspace,
        2,
        &[
            "./model",
            "--set",
            "train.learning_rate=1e30",
            "--set",
            "train.clip_norm=0",
            "--set",
            "train.batch_tokens=256",
        ],
    );
    assert_eq!((&rows[0]["status"], &rows[0]["fits"]), (&"failed".into(), &true.into()), "{text}");
    assert!(rows[0]["reason"].as_str().unwrap().starts_with("exit 4: step "), "{text}");
}
