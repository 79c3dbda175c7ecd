//! Training on rewarded completions (GRPO): those of a file, and those that the model samples. Losses, teams, refused memory,
//! and runs that are killed.

use crate::common::{SMALL, Shape, Workspace};
use serde_json::{Value, json};
use std::fs;

const QUICK: Shape = Shape { threads: "1", ..SMALL };

/// Settings of a run over completions, without its data.
const SETTINGS: &str = "
[model]
path = \"model\"
init = \"random\"
[train]
objective = \"grpo\"
steps = 6
learning_rate = 1e-2
warmup_steps = 0
save_every = 1
[grpo]
num_generations = 4
prompts_per_step = 3
max_prompt_length = 8
max_completion_length = 8
";

/// Creates a workspace with the run file `rollouts.toml`, which trains on the completions of `rollouts.jsonl`, and
/// `sampled.toml`, which samples completions of `prompts.jsonl`. A completion is rewarded if it begins with the letter `a`.
fn workspace() -> Workspace {
    let workspace = Workspace::new(&QUICK);
    let mut lines = Vec::new();
    for number in 0..36u64 {
        let ids = |seed: u64, count: u64| -> Vec<u64> { (0..count).map(|at| 2 + (seed * 7 + at * at) % 26).collect() };
        let group = number / 4;
        let (prompt, completion) = (ids(group, 1 + group % 8), ids(number + 3, 1 + number % 8));
        let rewards = json!([(number * 5 % 7) as f64 / 7.0, if number % 3 == 0 { json!(null) } else { json!(0.5) }]);
        lines.push(json!({ "prompt_ids": prompt, "completion_ids": completion, "rewards": rewards }).to_string());
    }
    workspace.write("rollouts.jsonl", lines.join("\n"));
    for (name, count) in [("prompts", 20), ("held-out", 6)] {
        let letter = |number: usize| char::from(b'a' + (number % 26) as u8).to_string();
        let prompt = |number: usize| json!({ "prompt": letter(7 * number).repeat(1 + number % 8), "answer": "a" });
        let lines: Vec<String> = (0..count).map(|number| prompt(number).to_string()).collect();
        workspace.write(&format!("{name}.jsonl"), lines.join("\n"));
    }
    let run = "[run]\ndir = \"run\"\nthreads = 1\n";
    workspace.write(
        "rollouts.toml",
        format!("[data]\ntrain = \"rollouts.jsonl\"\nformat = \"rollouts\"\n{SETTINGS}num_iterations = 2\n{run}"),
    );
    let rewards = "rewards = [\"regex:^a\", \"length_penalty:6\"]\nreward_weights = [1.0, 0.1]\n";
    workspace.write(
        "sampled.toml",
        format!("[data]\ntrain = \"prompts.jsonl\"\neval = \"held-out.jsonl\"\n{SETTINGS}{rewards}{run}"),
    );
    workspace
}

/// Trains with the run file `file` in the run folder `run` with more arguments, and returns `result.json`.
fn train(workspace: &Workspace, file: &str, run: &str, more: &[&str]) -> Value {
    let dir = format!("run.dir={run}");
    workspace.succeed(&[&["train", file, "--quiet", "--set", &dir], more].concat());
    workspace.json(&format!("{run}/result.json"))
}

/// Returns loss and gradient norm of all steps of a run.
fn losses(workspace: &Workspace, run: &str) -> Vec<[f64; 2]> {
    let events = workspace.events(run);
    let steps = events.iter().filter(|event| event["event"] == "step");
    steps.map(|step| [step["loss"].as_f64().unwrap(), step["norm"].as_f64().unwrap()]).collect()
}

/// Returns the bytes of the trained model.
fn model(workspace: &Workspace, run: &str) -> Vec<u8> {
    fs::read(workspace.path(&format!("{run}/model/model.safetensors"))).unwrap()
}

/// Returns the completions of a round, as tokens.
fn completions(workspace: &Workspace, run: &str, round: u32) -> Vec<Value> {
    let text = workspace.read(&format!("{run}/rounds/round-{round}.jsonl"));
    text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["completion_ids"].clone()).collect()
}

/// Checks that two runs have the same losses and norms up to the rounding of sums.
fn assert_same_losses(workspace: &Workspace, run: &str, other: &str) {
    let (found, expected) = (losses(workspace, run), losses(workspace, other));
    assert_eq!(found.len(), expected.len());
    for (step, (found, expected)) in found.iter().flatten().zip(expected.iter().flatten()).enumerate() {
        assert!((found - expected).abs() < 1e-9 * expected.abs().max(1e-3), "{run}, value {step}: {found}, {expected}");
    }
}

#[test]
fn micro_batches_and_teams_change_no_loss_of_rollouts() {
    let workspace = workspace();
    let precise = ["--set", "train.precision=f64", "--set", "grpo.beta=0.1"];
    train(&workspace, "rollouts.toml", "plain", &precise);
    let expected = losses(&workspace, "plain");
    assert!(expected.iter().all(|[_, norm]| *norm > 1e-3), "{expected:?}");
    let rounds: Vec<Value> = workspace.events("plain").into_iter().filter(|event| event["event"] == "round").collect();
    let numbers: Vec<u64> = rounds.iter().map(|event| event["round"].as_u64().unwrap()).collect();
    assert_eq!(numbers, [1, 1, 2, 2, 3, 3]);
    assert_eq!((&rounds[0]["kl"], &rounds[0]["completions"]["count"]), (&json!(0.0), &json!(12)), "{}", rounds[0]);
    assert!(rounds[5]["kl"].as_f64() > Some(1e-6), "{}", rounds[5]);
    for micro_batch in ["1", "5", "12"] {
        let pinned = format!("recipe.micro_batch={micro_batch}");
        let run = format!("micro-batch-{micro_batch}");
        train(&workspace, "rollouts.toml", &run, &[&precise[..], &["--set", &pinned]].concat());
        assert_same_losses(&workspace, &run, "plain");
    }
    for parallelism in ["data", "sharded", "pipeline"] {
        let kind = format!("run.parallelism={parallelism}");
        let devices = ["--devices", "virtual:a=64MiB@1,virtual:b=64MiB@0.5", "--set", &kind];
        let result = train(&workspace, "rollouts.toml", parallelism, &[&precise[..], &devices].concat());
        assert_eq!(result["parallelism"], parallelism);
        assert_same_losses(&workspace, parallelism, "plain");
    }
}

#[test]
fn rollouts_on_the_command_line_replace_sampling() {
    let workspace = workspace();
    train(&workspace, "rollouts.toml", "file", &[]);
    let settings = ["--set", "grpo.num_iterations=2", "--set", "grpo.reward_weights=[]"];
    train(&workspace, "sampled.toml", "flag", &[&["--rollouts", "rollouts.jsonl"][..], &settings].concat());
    assert_eq!(losses(&workspace, "flag"), losses(&workspace, "file"));
    assert_eq!(model(&workspace, "flag"), model(&workspace, "file"));
}

#[test]
fn rewarded_completions_become_likely() {
    let workspace = workspace();
    let longer = ["--set", "train.steps=40", "--set", "train.eval_every=39", "--set", "grpo.num_generations=16"];
    let result = train(&workspace, "sampled.toml", "run", &longer);
    assert!(result["eval"]["reward"].as_f64() > Some(0.9), "{}", result["eval"]);
    let rounds = result["rounds"].as_array().unwrap();
    assert_eq!(rounds.len(), 40);
    assert!(rounds[0]["reward"].as_f64() < Some(0.3) && rounds[39]["reward"].as_f64() > Some(0.8), "{}", rounds[39]);
    assert!(rounds[39]["entropy"].as_f64() < rounds[0]["entropy"].as_f64());
    assert_eq!(rounds[0]["rewards"].as_object().unwrap().len(), 2, "{}", rounds[0]);
    let memory = &result["memory"][0];
    assert_eq!(memory["arena_bytes"], memory["arena_measured_bytes"]);
    let plan = workspace.json("run/plan.json");
    assert!(plan["devices"][0]["by_program"]["generate"].as_u64() > Some(0), "{plan}");
    assert!(plan["devices"][0]["by_program"].get("score").is_none(), "all ratios are 1: {plan}");
}

#[test]
fn completions_depend_on_neither_slots_nor_team() {
    let workspace = workspace();
    let precise = ["--set", "train.precision=f64", "--set", "train.steps=3"];
    train(&workspace, "sampled.toml", "plain", &precise);
    let expected: Vec<_> = (1..=3).map(|round| completions(&workspace, "plain", round)).collect();
    assert_eq!(expected[0].len(), 12);
    assert!(expected[0][..4].iter().any(|completion| *completion != expected[0][0]), "a group has different ones");
    let slots = ["1", "5"].map(|slots| (format!("slots-{slots}"), vec![format!("recipe.slots={slots}")]));
    let team = |kind: &str| {
        let devices = "run.devices=\"virtual:a=64MiB@1,virtual:b=64MiB@0.5\"".to_owned();
        (kind.to_owned(), vec![devices, format!("run.parallelism={kind}")])
    };
    let teams = ["data", "sharded", "pipeline"].map(team);
    for (run, settings) in slots.into_iter().chain(teams) {
        let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
        train(&workspace, "sampled.toml", &run, &[&precise[..], &settings].concat());
        for (round, expected) in (1..).zip(&expected) {
            assert_eq!(completions(&workspace, &run, round), *expected, "{run}, round {round}");
        }
        assert_same_losses(&workspace, &run, "plain");
        let plan = workspace.json(&format!("{run}/plan.json"));
        let sequences = match run.as_str() {
            "slots-1" => None,
            "slots-5" => Some(5),
            // Each worker has slots for all completions.
            "data" => Some(24),
            _ => Some(12),
        };
        assert_eq!(plan["generation"]["sequences"].as_u64(), sequences, "{run}: {plan}");
        assert_eq!(
            plan["generation"]["token_seconds"].as_f64().is_some_and(|seconds| seconds > 0.0),
            sequences.is_some()
        );
    }
}

#[test]
fn kl_penalty_of_sampled_completions_equals_that_of_a_file() {
    let workspace = workspace();
    let precise = ["train.precision=f64", "grpo.beta=0.1", "grpo.num_iterations=2", "data.shuffle=false"];
    let low_rank = ["train.method=lora", "lora.rank=4", "train.learning_rate=2e-2"];
    let adapter = ["--set", "train.method=lora", "--set", "lora.rank=4", "--set", "train.learning_rate=2e-2"];
    train(&workspace, "sampled.toml", "first", &adapter);
    let continued = ["train.method=lora", "model.adapter=first/adapter", "train.learning_rate=2e-2"];
    for (method, settings) in [("full", &[][..]), ("lora", &low_rank), ("continued", &continued)] {
        let settings: Vec<&str> = precise.iter().chain(settings).flat_map(|setting| ["--set", setting]).collect();
        train(&workspace, "sampled.toml", method, &settings);
        let rounds = workspace.json(&format!("{method}/result.json"))["rounds"].clone();
        assert_eq!(rounds[0]["kl"], 0.0, "{method}");
        assert!(rounds[5]["kl"].as_f64() > Some(1e-5) && rounds[5]["seconds"]["reference"] == 0.0, "{}", rounds[5]);
        let plan = workspace.json(&format!("{method}/plan.json"));
        assert!(plan["devices"][0]["by_program"]["reference"].as_u64() > Some(0), "{plan}");
        // The reference pass of completions of a file scores under the initial weights themselves.
        let files = (1..=3).map(|round| workspace.read(&format!("{method}/rounds/round-{round}.jsonl")));
        workspace.write("sampled.jsonl", files.collect::<String>());
        let replayed = format!("{method}-replayed");
        train(&workspace, "sampled.toml", &replayed, &[&["--rollouts", "sampled.jsonl"][..], &settings].concat());
        assert_same_losses(&workspace, &replayed, method);
        for (kind, micro_batch) in [("data", 1), ("sharded", 2), ("pipeline", 3)] {
            let run = format!("{method}-{kind}");
            let (parallelism, size) = (format!("run.parallelism={kind}"), format!("recipe.micro_batch={micro_batch}"));
            let team = ["--devices", "virtual:a=64MiB@1,virtual:b=64MiB@0.5", "--set", &parallelism, "--set", &size];
            train(&workspace, "sampled.toml", &run, &[&settings[..], &team].concat());
            assert_same_losses(&workspace, &run, method);
        }
    }
}

#[test]
fn refused_memory_in_each_phase_keeps_every_bit() {
    let workspace = workspace();
    for (plain, file, beta, faults) in [
        ("rollouts", "rollouts.toml", "0", &["1:score", "2:score:9", "4:forward", "5:update:2"][..]),
        ("sampled", "sampled.toml", "0", &["1:decode", "2:prefill", "3:decode:7", "4:backward", "5:update:2"]),
        ("penalized", "sampled.toml", "0.1", &["1:reference", "3:reference:7", "4:prefill"]),
    ] {
        let beta = format!("grpo.beta={beta}");
        let pinned = ["--set", "recipe.micro_batch=4", "--set", &beta];
        train(&workspace, file, plain, &pinned);
        for at in faults {
            let run = format!("{plain}-{}", at.replace(':', "-"));
            let result = train(&workspace, file, &run, &[&pinned[..], &["--inject-oom", at]].concat());
            assert_eq!(result["recoveries"][0]["class"], "identical", "{at}: {result}");
            assert_eq!(losses(&workspace, &run), losses(&workspace, plain), "{at}");
            assert_eq!(model(&workspace, &run), model(&workspace, plain), "{at}");
        }
    }
}

#[test]
fn killed_rounds_continue_with_the_same_completions() {
    let workspace = workspace();
    for (plain, file, beta, events) in [
        ("rollouts", "rollouts.toml", "0", [2, 5, 8]),
        ("sampled", "sampled.toml", "0", [3, 6, 9]),
        ("penalized", "sampled.toml", "0.1", [3, 7, 10]),
    ] {
        let beta = format!("grpo.beta={beta}");
        let twice = ["--set", "grpo.num_iterations=2", "--set", &beta];
        train(&workspace, file, plain, &twice);
        for lines in events {
            let run = format!("{plain}-killed-{lines}");
            let dir = format!("run.dir={run}");
            let mut running = workspace.start(&[&["train", file, "--quiet", "--set", &dir][..], &twice].concat());
            running
                .wait_until(|| workspace.path(&run).join("run.toml").exists() && workspace.events(&run).len() >= lines);
            running.kill();
            workspace.succeed(&["train", "--resume", &run, "--quiet"]);
            assert_eq!(model(&workspace, &run), model(&workspace, plain), "{run}");
            for round in 1..=3 {
                assert_eq!(completions(&workspace, &run, round), completions(&workspace, plain, round), "{run}");
            }
        }
    }
}

#[test]
fn plan_names_the_smallest_load_line() {
    let workspace = workspace();
    let plan: Value = serde_json::from_str(&workspace.succeed(&["plan", "sampled.toml", "--json"]).stdout).unwrap();
    let (smallest, peak) = (&plan["smallest"], plan["devices"][0]["peak_bytes"].as_u64().unwrap());
    let least = smallest["peak_bytes"].as_u64().unwrap();
    assert!(least < peak && smallest["slots"] == 1, "{smallest}");
    assert!(smallest["by_program"]["generate"].as_u64() > Some(0), "{smallest}");
    let plans_under = |line: u64| workspace.run(&["plan", "sampled.toml", "--devices", &format!("cpu={line}")]).code;
    assert_eq!(plans_under(least), Some(0));
    assert_eq!(plans_under(least - (1 << 20)), Some(3));
}

#[test]
fn failed_reward_stops_the_run_resumably() {
    let workspace = workspace();
    workspace.write(
        "reward.sh",
        "read line || exit 0\n[ -e works ] || exit 3\necho 1\nwhile read line; do echo 0.5; done\n",
    );
    let settings = ["--set", "grpo.rewards=[\"command:sh reward.sh\"]", "--set", "grpo.reward_weights=[]"];
    let failed = workspace.run(&[&["train", "sampled.toml", "--quiet"][..], &settings].concat());
    assert_eq!(failed.code, Some(4), "{}", failed.stderr);
    let told = failed.stderr;
    assert!(told.contains("sh reward.sh") && told.contains("plimsoll train --resume"), "{told}");
    workspace.write("works", "");
    workspace.succeed(&["train", "--resume", "run", "--quiet"]);
    let result = workspace.json("run/result.json");
    assert_eq!((&result["status"], &result["steps"]), (&json!("done"), &json!(6)));
}

#[test]
fn functions_in_python_reward_completions() {
    let workspace = workspace();
    workspace.write(
        "rewards.py",
        "def first_letter(completions, answer):\n\
         \x20   with open('calls', 'a') as file:\n\
         \x20       print(len(completions), file=file)\n\
         \x20   return [float(text.startswith(start)) for text, start in zip(completions, answer)]\n",
    );
    let rewards = ["--set", "grpo.rewards=[\"python:rewards.py:first_letter\"]", "--set", "grpo.reward_weights=[]"];
    let sizes = ["--set", "train.steps=3", "--set", "recipe.slots=1", "--set", "grpo.max_completion_length=24"];
    train(&workspace, "sampled.toml", "function", &[&rewards[..], &sizes].concat());
    let calls: Vec<usize> = workspace.read("calls").lines().map(|line| line.parse().unwrap()).collect();
    // Those of three rounds, and of the evaluation at the end.
    assert_eq!(calls.iter().sum::<usize>(), 3 * 12 + 6, "{calls:?}");
    // The same rewards as those of the built-in function.
    let built_in = ["--set", "grpo.rewards=[\"regex:^a\"]", "--set", "grpo.reward_weights=[]"];
    train(&workspace, "sampled.toml", "built-in", &[&built_in[..], &sizes].concat());
    assert_eq!(model(&workspace, "function"), model(&workspace, "built-in"));
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn example_learns_carries_from_rewards() {
    let workspace = workspace();
    let settings = ["--set", "run.dir=example", "--set", "train.steps=15", "--set", "run.threads=2"];
    workspace.succeed(&[&["train", "--example", "grpo", "--quiet"][..], &settings].concat());
    let before = workspace.json("example/supervised/result.json")["eval"]["exact_match"].as_f64().unwrap();
    let after = workspace.json("example/result.json")["eval"]["reward"].as_f64().unwrap();
    assert!(before < 0.5 && after > before + 0.2, "{before} before, {after} after");
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn example_prefers_carries() {
    let workspace = workspace();
    let settings = ["--set", "run.dir=example", "--set", "run.threads=2"];
    workspace.succeed(&[&["train", "--example", "dpo", "--quiet"][..], &settings].concat());
    let preferences = workspace.json("example/result.json")["eval"]["preferences"].clone();
    assert!(preferences["accuracy"].as_f64() > Some(0.95), "{preferences}");
    let pairs: Vec<Value> = read_lines(&workspace, "example/example/held-out-pairs.jsonl");
    let prompts: Vec<String> = pairs.iter().map(|pair| json!({ "prompt": pair["prompt"] }).to_string()).collect();
    workspace.write("questions.jsonl", prompts.join("\n"));
    let right_answers = |model: &str, out: &str| {
        let files = ["--prompts", "questions.jsonl", "--out", out, "--max-tokens", "6"];
        workspace.succeed(&[&["generate", model][..], &files].concat());
        let answers = read_lines(&workspace, out);
        assert_eq!(answers.len(), pairs.len());
        let right = answers.iter().zip(&pairs).filter(|(answer, pair)| answer["text"] == pair["chosen"]);
        right.count() as f64 / pairs.len() as f64
    };
    let before = right_answers("example/supervised/model", "before.jsonl");
    let after = right_answers("example/model", "after.jsonl");
    assert!(before < 0.3 && after > before + 0.5, "{before} before, {after} after");
}

/// Reads a file of JSON lines.
fn read_lines(workspace: &Workspace, file: &str) -> Vec<Value> {
    workspace.read(file).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn other_data_and_settings_are_refused() {
    let workspace = workspace();
    for (settings, expected) in [
        (&["data.train=train-text.jsonl"][..], "its format is text, but train.objective = \"grpo\" takes prompt"),
        (
            &["train.objective=supervised", "data.sequence=16"],
            "its format is prompt, which only train.objective = \"grpo\" takes",
        ),
        (&["grpo.max_completion_length=80"], "takes up to 88 tokens, but"),
        (&["data.train=rollouts.jsonl"], "the files hold rollouts, not prompts"),
        (&["grpo.max_prompt_length=3"], "tokens, more than grpo.max_prompt_length = 3"),
        (&["grpo.rewards=[\"exact\"]", "grpo.reward_weights=[]"], "`exact` is not a reward"),
        (&["grpo.rewards=[]", "grpo.reward_weights=[]"], "grpo.rewards: there is no reward"),
        (
            &["grpo.prompts_per_step=16000000", "grpo.num_generations=64"],
            "completions of 16 tokens are more than 2147483648 tokens",
        ),
        (&["grpo.reward_weights=[1.0]"], "1 weight for 2 rewards"),
        (&["data.sequence=32"], "prompt and completion have 16 tokens with train.objective = \"grpo\""),
        (&["grpo.num_generations=1"], "grpo.num_generations is 1, expected a whole number from 2"),
        (&["train.method=lora", "lora.dropout=0.1"], "does not support dropout: its score runs without it"),
        (&["data.train=rollouts.jsonl", "data.eval=rollouts.jsonl", "data.format=rollouts"], "data.eval: completions"),
    ] {
        let words: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
        let refused = workspace.expect_refusal(2, &[&["train", "sampled.toml"], &words[..]].concat());
        assert!(refused.contains(expected), "{settings:?}: {refused}");
    }
    assert!(!workspace.path("run").exists());
}
