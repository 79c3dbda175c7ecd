//! Which devices the planner uses: budgets of excluded devices, and the commands that would use them.

use super::helpers::{QUICK, assert_within_load_lines, one_layer_model};
use crate::common::Workspace;
use serde_json::Value;

#[test]
fn full_device_does_not_reduce_other_budgets() {
    let workspace = one_layer_model();
    let words = ["run.toml", "--json", "--set", "run.fallback=none", "--set", "train.steps=1"];
    let alone = workspace.run(&[&["plan", "--devices", "virtual:a=1MiB@0.4,host=1MiB"][..], &words].concat());
    let plan: Value = serde_json::from_str(&alone.stdout).unwrap();
    let line = (plan["needs"][0]["budget_bytes"].as_u64().unwrap() >> 20) + 2;
    let devices = format!("virtual:a={line}MiB@0.4,virtual:b=8MiB@0.3,host=1MiB");
    for command in ["plan", "train"] {
        workspace.succeed(&[&[command, "--devices", &devices][..], &words].concat());
    }
    let plan = workspace.json("run/plan.json");
    assert_eq!(
        (&plan["devices"][0]["name"], &plan["excluded"][0]["device"]),
        (&"virtual:a".into(), &"virtual:b".into())
    );
    assert_within_load_lines(&workspace.json("run/result.json"));
    let injected = ["--devices", &devices, "--set", "run.dir=other", "--inject-loss", "virtual:b:1"];
    let refused = workspace.run(&[&["train"][..], &words, &injected].concat());
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("`virtual:b` is excluded from this run: "), "{}", refused.stderr);
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn remedies_for_excluded_devices_work() {
    for (workspace, devices, asked) in [
        // Reasons for the exclusion, in this order: too slow; too small but fast; too small for a sequence and too slow to
        // store a shard; too small for a shard as well.
        (Workspace::new(&QUICK), "virtual:a=64MiB@0.4,virtual:b=48MiB@0.1::10MB/s", "--set run.parallelism=all"),
        (
            one_layer_model(),
            "virtual:a=180MiB@0.4,virtual:b=60MiB@0.3::1GB/s,host=1MiB",
            "--devices virtual:a=180MiB@0.4,virtual:b=",
        ),
        (one_layer_model(), "virtual:a=180MiB@0.4,virtual:b=60MiB@0.1::200MB/s,host=1MiB", "--set run.parallelism=all"),
        (one_layer_model(), "virtual:a=180MiB@0.4,virtual:b=40MiB@0.1::200MB/s,host=1MiB", "MiB@0.1::200MB/s"),
    ] {
        let one_step = ["train", "run.toml", "--json", "--set", "train.steps=1", "--set", "data.eval=[]"];
        for command in [&["plan", "run.toml", "--json"][..], &one_step] {
            let plan = |words: &[&str]| {
                let done = workspace.succeed(&[command, words].concat());
                let plan = if command[0] == "plan" { done.json() } else { workspace.json("run/plan.json") };
                let _ = std::fs::remove_dir_all(workspace.path("run"));
                plan
            };
            let without = plan(&["--devices", devices]);
            let out = &without["excluded"][0];
            assert_eq!(out["device"], "virtual:b", "{without}");
            let remedy = out["remedy"].as_str().unwrap_or_else(|| panic!("{out}"));
            assert!(remedy.contains(asked), "{remedy}");
            let words: Vec<&str> = remedy.split(' ').collect();
            let named = if words.contains(&"--devices") { &[][..] } else { &["--devices", devices] };
            let with = plan(&[named, &words].concat());
            let names: Vec<&Value> = with["devices"].as_array().unwrap().iter().map(|device| &device["name"]).collect();
            assert!(with["fits"] == true && names.contains(&&Value::from("virtual:b")), "{remedy}: {with}");
        }
    }
}

#[test]
fn refused_parallelism_is_not_marked_taken() {
    let workspace = one_layer_model();
    let words = ["--set", "run.parallelism=all", "--devices", "virtual:a=60MiB@0.4,virtual:b=60MiB@0.3,host=1MiB"];
    let done = workspace.run(&[&["plan", "run.toml", "--explain"][..], &words].concat());
    assert_eq!(done.code, Some(3), "{}", done.stderr);
    let verdicts = |verdict: &str| done.stdout.lines().filter(|line| line.ends_with(verdict)).count();
    assert_eq!((verdicts("  does not fit"), verdicts("  taken")), (2, 0), "{}", done.stdout);
}
