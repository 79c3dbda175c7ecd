//! An excluded device that evaluates while the others train.

use super::helpers::{
    EVAL_EVERY_TWO, QUICK, WITH_EVALUATOR, assert_same_weights, assert_within_load_lines, lost_device, persistent_oom,
    read_weights, step_losses, train, train_plain, train_together, worker_names,
};
use crate::common::{Shape, Workspace};
use serde_json::Value;

/// Returns all evaluations in order: the step, and a text with loss, share of exact matches and number of tokens.
fn evaluations(workspace: &Workspace, run: &str) -> Vec<(u64, String)> {
    let of = |event: &Value| {
        let said = ["loss", "exact_match", "tokens"].map(|key| event[key].to_string());
        (event["step"].as_u64().unwrap(), said.join(" "))
    };
    workspace.events(run).iter().filter(|event| event["event"] == "evaluation").map(of).collect()
}

#[test]
fn excluded_device_evaluates_without_changing_bits() {
    let workspace = Workspace::new(&QUICK);
    train(&workspace, "plain", &[&["--devices", "virtual:a=64MiB@0.4"][..], &EVAL_EVERY_TWO].concat());
    let words = ["train", "run.toml", "--set", "run.dir=beside", "--devices", WITH_EVALUATOR];
    let said = workspace.succeed(&[&words[..], &EVAL_EVERY_TWO].concat()).stdout;
    let named: String = said.lines().take(10).map(str::trim).collect::<Vec<_>>().join(" ");
    let named = named.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "excluded: virtual:b: it would slow the team",
        "--set run.parallelism=all",
        "it evaluates while the team trains, predicted",
    ] {
        assert!(named.contains(part), "{part}: {named}");
    }
    let result = workspace.json("beside/result.json");
    assert_eq!((&result["status"], worker_names(&result).len()), (&"done".into(), 0));
    assert_within_load_lines(&result);
    let devices: Vec<&Value> = result["memory"].as_array().unwrap().iter().map(|memory| &memory["device"]).collect();
    assert_eq!(devices, ["virtual:a", "virtual:b"]);
    let evaluator = &result["evaluator"];
    assert_eq!((&evaluator["device"], &evaluator["simulated"]), (&"virtual:b".into(), &true.into()), "{result}");
    assert!(evaluator["predicted_seconds"].as_f64() > Some(0.0) && evaluator["seconds"].as_f64() > Some(0.0));
    let planned = &workspace.json("beside/plan.json")["excluded"][0];
    assert_eq!(
        (&planned["device"], &planned["evaluator_plan"]["rows"]),
        (&"virtual:b".into(), &24.into()),
        "{planned}"
    );
    // Every bit equals the run without an evaluator.
    assert_eq!(step_losses(&workspace, "plain"), step_losses(&workspace, "beside"));
    assert_eq!(evaluations(&workspace, "plain"), evaluations(&workspace, "beside"));
    assert_eq!(workspace.json("plain/result.json")["eval"], result["eval"]);
    assert!(read_weights(&workspace, "plain") == read_weights(&workspace, "beside"));
    // Each evaluation event names its device and comes after its step.
    let mut done = 0;
    for event in workspace.events("beside") {
        if event["event"] == "step" {
            done = event["step"].as_u64().unwrap();
        } else if event["event"] == "evaluation" {
            let step = event["step"].as_u64().unwrap();
            assert!(step <= done && (step == 8 || event["device"] == "virtual:b"), "{event}");
        }
    }
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn evaluator_uses_exact_team_weights() {
    let workspace = Workspace::new(&QUICK);
    // Evaluations long enough to be worth a slow link, and rare enough for a slow device.
    workspace.write("eval.jsonl", workspace.read("eval.jsonl").repeat(4));
    // Two equal devices: both searches divide the step in the middle, so both runs have the same bits.
    let (two, evaluated) = ("virtual:a=64MiB@0.25,virtual:b=64MiB@0.25", ["--set", "train.eval_every=6"]);
    train(&workspace, "plain", &[&["--devices", two][..], &evaluated].concat());
    let three = format!("{two},virtual:c=48MiB@0.12::22MB/s");
    let result = train(&workspace, "beside", &[&["--devices", &three][..], &evaluated].concat());
    assert_eq!(
        (worker_names(&result), &result["parallelism"]),
        (vec!["virtual:a", "virtual:b"], &"data".into()),
        "{result}"
    );
    assert_eq!(result["evaluator"]["device"], "virtual:c", "{result}");
    assert_within_load_lines(&result);
    assert_eq!(step_losses(&workspace, "plain"), step_losses(&workspace, "beside"));
    assert_eq!(evaluations(&workspace, "plain"), evaluations(&workspace, "beside"));
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn run_survives_any_evaluator_fault() {
    let workspace = Workspace::new(&QUICK);
    let (_, words) = train_plain(
        &workspace,
        &[&["--devices", WITH_EVALUATOR, "--set", "run.heartbeat_seconds=1"][..], &EVAL_EVERY_TWO].concat(),
    );
    let weights_of_all = read_weights(&workspace, "plain");
    let again = ["virtual:b/0:load", "virtual:b/2:renew:3", "virtual:a/4:save", "virtual:b/6:evaluate"];
    let cases: [(Vec<&str>, Option<&str>); 11] = [
        (again.map(|at| ["--inject-oom", at]).concat(), None),
        (persistent_oom("virtual:b/4:evaluate"), Some("refusals in a row")),
        (persistent_oom("virtual:b/4:renew"), Some("tries made no progress")),
        (persistent_oom("virtual:b/0:load"), Some("refusals in a row")),
        (vec!["--inject-loss", "virtual:b:4:renew"], Some("virtual:b is lost")),
        // Before the first work of the evaluator.
        (vec!["--inject-loss", "virtual:b:0:load"], Some("virtual:b is lost")),
        (vec!["--inject-loss", "virtual:b:0"], Some("virtual:b is lost")),
        (vec!["--inject-silence", "virtual:b:4"], Some("sent no heartbeat for 1 s")),
        // Its thread never returns; other workers do not block on it.
        (vec!["--inject-silence", "virtual:b:4:forever"], Some("sent no heartbeat for 1 s")),
        (vec!["--inject-silence", "virtual:b:0:forever"], Some("sent no heartbeat for 1 s")),
        (vec!["--inject-silence", "virtual:b:0:open:forever"], Some("sent no heartbeat for 1 s")),
    ];
    let each: Vec<&[&str]> = cases.iter().map(|(injected, _)| &injected[..]).collect();
    // Two runs at the same time.
    let pairs = each.chunks(2).zip(["run-0", "run-1", "run-2", "run-3", "run-4", "run-5"]);
    let results: Vec<Value> = pairs.flat_map(|(pair, name)| train_together(&workspace, name, &words, pair)).collect();
    for (number, ((injected, lost), result)) in cases.iter().zip(results).enumerate() {
        let run = format!("run-{}-{}", number / 2, number % 2);
        let untriggered = result["faults_not_triggered"].as_array().map_or(0, Vec::len);
        assert!(result["status"] == "done" && untriggered < injected.len() / 2, "{injected:?}: {result}");
        assert_eq!(step_losses(&workspace, "plain"), step_losses(&workspace, &run), "{injected:?}");
        assert!(read_weights(&workspace, &run) == weights_of_all, "{injected:?}");
        let (plain, found) = (evaluations(&workspace, "plain"), evaluations(&workspace, &run));
        assert_eq!(plain.last(), found.last(), "{injected:?}");
        let lost_events: Vec<Value> =
            workspace.events(&run).into_iter().filter(|event| event["event"] == "device_lost").collect();
        match lost {
            None => {
                assert!(
                    untriggered == 0 && lost_events.is_empty() && plain == found,
                    "{injected:?}: {lost_events:?}, {found:?}"
                );
                assert_eq!(result["evaluator"]["device"], "virtual:b", "{injected:?}");
            }
            Some(reason) => {
                assert_eq!(
                    (lost_events.len(), &lost_events[0]["device"]),
                    (1, &"virtual:b".into()),
                    "{injected:?}: {lost_events:?}"
                );
                assert!(lost_events[0]["reason"].as_str().unwrap().contains(reason), "{injected:?}: {lost_events:?}");
                assert_eq!(result["lost"][0]["device"], "virtual:b");
                // The team evaluates instead. One evaluation may be missing: its weights were updated meanwhile.
                assert!(found.len() >= plain.len() - 1, "{injected:?}: {found:?}");
            }
        }
    }
    // The evaluator is lost while it evaluates weights that the team no longer has.
    let result = train(&workspace, "late", &[&words[..], &["--inject-loss", "virtual:b:4:evaluate"]].concat());
    assert_eq!(
        (&result["status"], step_losses(&workspace, "late")),
        (&"done".into(), step_losses(&workspace, "plain"))
    );
    assert_eq!(evaluations(&workspace, "plain").last(), evaluations(&workspace, "late").last());
    // A stopped run resumes with all of its devices.
    train(&workspace, "cut", &[&words[..], &["--set", "train.steps=4"]].concat());
    let text = workspace.read("cut/run.toml").replace("steps = 4", "steps = 8");
    workspace.write("cut/run.toml", text);
    workspace.succeed(&["train", "--resume", "cut", "--quiet"]);
    assert_eq!(step_losses(&workspace, "plain"), step_losses(&workspace, "cut"));
    assert_eq!(evaluations(&workspace, "plain").last(), evaluations(&workspace, "cut").last());
    assert_eq!(workspace.json("cut/result.json")["evaluator"]["device"], "virtual:b");
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn evaluator_replaces_lost_device() {
    let workspace = Workspace::new(&QUICK);
    let (_, words) = train_plain(
        &workspace,
        &[&["--devices", WITH_EVALUATOR, "--set", "run.heartbeat_seconds=1"][..], &EVAL_EVERY_TWO].concat(),
    );
    // Before an evaluation, during one, and while its weights are transferred.
    for (number, at) in ["virtual:a:2", "virtual:a:7:begin", "virtual:a:6:save", "virtual:a:0:load"].iter().enumerate()
    {
        let run = format!("run-{number}");
        let result = train(&workspace, &run, &[&words[..], &["--inject-loss", at]].concat());
        assert_eq!((&result["status"], &result["steps"]), (&"done".into(), &8.into()), "{at}: {result}");
        assert_eq!(lost_device(&workspace, &run).0, "virtual:a", "{at}");
        assert!(workspace.json(&format!("{run}/plan.json"))["excluded"].as_array().is_none_or(Vec::is_empty), "{at}");
        assert_within_load_lines(&result);
        let found = evaluations(&workspace, &run);
        let of = |step: u64| found.iter().rfind(|(of, _)| *of == step).is_some();
        assert!([2, 4, 6, 8].into_iter().all(of), "{at}: {found:?}");
        assert_same_weights(&workspace, "plain", &run, 1e-3);
    }
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn impossible_evaluator_faults_are_refused() {
    let workspace = Workspace::new(&QUICK);
    // There is no evaluation after step 3.
    let words = [&["--devices", WITH_EVALUATOR][..], &EVAL_EVERY_TWO].concat();
    let result = train(&workspace, "run", &[&words[..], &["--inject-oom", "virtual:b/3:evaluate"]].concat());
    assert_eq!(result["faults_not_triggered"], serde_json::json!(["--inject-oom virtual:b/3:evaluate"]));
    let words = [&words[..], &["--set", "run.dir=refused", "--plan", "run/plan.json"]].concat();
    for (flag, at, says) in [
        ("--inject-oom", "virtual:b/4:renew:100000", "has no op 100000 in `renew`"),
        ("--inject-oom", "virtual:b/4:evaluate:adam_w", "has no op `adam_w` in `evaluate`"),
        ("--inject-oom", "virtual:b/4:re-plan", "runs no `re-plan`"),
        ("--inject-oom", "virtual:b/4:backward", "runs no `backward`"),
        ("--inject-oom", "virtual:b/0:renew", "does not run `renew` in step 0"),
        ("--inject-oom", "virtual:b/4:load", "does not run `load` in step 4"),
        ("--inject-oom", "4:renew:100000", "this run has no Program `renew`"),
        ("--inject-loss", "virtual:b:4:backward", "runs no `backward`"),
        ("--inject-slow", "virtual:b:3:2", "has no training passes to slow down"),
    ] {
        let said = workspace.expect_refusal(2, &[&["train", "run.toml", flag, at][..], &words].concat());
        assert!(said.contains(at) && said.contains(says), "{says}: {said}");
    }
}

#[test]
fn resume_repeats_only_missing_evaluations() {
    let workspace = Workspace::new(&QUICK);
    let saved = ["--set", "train.save_every=2", "--set", "train.keep=4"];
    let (_, words) = train_plain(&workspace, &[&["--devices", WITH_EVALUATOR][..], &saved, &EVAL_EVERY_TWO].concat());
    train(&workspace, "cut", &words);
    // The state after a kill between the checkpoint of step 4 and the end of the evaluation of step 4.
    std::fs::remove_file(workspace.path("cut/result.json")).unwrap();
    for step in [6, 8] {
        let path = workspace.path(&format!("cut/checkpoints/step-{step}"));
        std::fs::remove_dir_all(path).unwrap();
    }
    let events = workspace.read("cut/events.jsonl");
    let after = |line: &&str| {
        let event: Value = serde_json::from_str(line).unwrap();
        event["step"].as_u64().is_none_or(|step| step < 4 || step == 4 && event["event"] != "evaluation")
    };
    let before: Vec<&str> = events.lines().filter(after).collect();
    workspace.write("cut/events.jsonl", before.join("\n") + "\n");
    assert_eq!(evaluations(&workspace, "cut").len(), 1);
    workspace.succeed(&["train", "--resume", "cut", "--quiet"]);
    assert_eq!(evaluations(&workspace, "cut"), evaluations(&workspace, "plain"));
    // The evaluation of step 4 exists now, so it is not repeated.
    for step in [6, 8] {
        std::fs::remove_dir_all(workspace.path(&format!("cut/checkpoints/step-{step}"))).unwrap();
    }
    workspace.succeed(&["train", "--resume", "cut", "--quiet"]);
    let steps: Vec<u64> = evaluations(&workspace, "cut").into_iter().map(|(step, _)| step).collect();
    assert_eq!(steps, [2, 4, 6, 8, 6, 8]);
}

#[test]
fn evaluator_budget_moves_or_team_evaluates() {
    let workspace = Workspace::new(&Shape { steps: 4000, ..QUICK });
    let words = ["train", "run.toml", "--quiet", "--set", "run.dir=run", "--devices", WITH_EVALUATOR];
    let mut running = workspace.start(&[&words[..], &EVAL_EVERY_TWO].concat());
    let evaluated = || evaluations(&workspace, "run").len();
    assert!(running.wait_until(|| evaluated() > 0));
    let planned = || workspace.json("run/plan.json")["excluded"][0]["evaluator_plan"].clone();
    let moved = |line: &str| workspace.succeed(&["budget", "run", line, "--device", "virtual:b"]).stdout;
    let said = moved("40MiB");
    assert!(said.contains("load line 40.00 MiB: it evaluates as before"), "{said}");
    assert_eq!(planned()["device"]["budget_bytes"], 40 << 20);
    assert_eq!(workspace.json("run/load-lines.json")["virtual:b"]["to"], "40MiB", "stored for a resumed run");
    // One byte below its peak: a smaller micro-batch.
    let (rows, peak) =
        (planned()["recipe"]["micro_batch"].clone(), planned()["device"]["peak_bytes"].as_u64().unwrap());
    let said = moved(&(peak - 1).to_string());
    assert!(said.contains("it evaluates with micro-batch"), "{said}");
    let now = planned();
    assert!(
        now["recipe"]["micro_batch"].as_u64() < rows.as_u64() && now["device"]["peak_bytes"].as_u64() < Some(peak),
        "{now}"
    );
    let before = evaluated();
    assert!(running.wait_until(|| evaluated() > before + 1));
    let said = moved("1MiB");
    assert!(said.contains("the team evaluates from now on"), "{said}");
    assert!(
        planned().is_null()
            && workspace.expect_refusal(2, &["budget", "run", "1MiB", "--device", "virtual:b"]).contains("virtual:a")
    );
    let before = evaluated();
    assert!(running.wait_until(|| evaluated() > before));
    running.signal("TERM");
    assert_eq!(running.wait().code, Some(4));
    let result = workspace.json("run/result.json");
    assert!(
        result["evaluator"]["evaluations"].as_u64() > Some(1) && result["lost"].as_array().is_none_or(Vec::is_empty),
        "{result}"
    );
    let last = workspace.events("run").into_iter().rfind(|event| event["event"] == "evaluation").unwrap();
    assert!(last["device"].is_null(), "{last}");
}
