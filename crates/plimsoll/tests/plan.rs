//! `plimsoll plan` for paper devices, without weights: tables, JSON and refusals.

use serde_json::{Value, json};
use std::process::{Command, Output};

fn plan(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_plimsoll")).arg("plan").args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

const SMALL: [&str; 8] =
    ["--model", "smollm2-135m", "--devices", "rtx3090", "--sequence", "512", "--batch-tokens", "4096"];

#[test]
fn paper_plan_is_a_table_within_terminal_width() {
    let output = plan(&[&SMALL[..], &["--explain", "--allow", "bf16"]].concat());
    let table = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    for words in [
        "plan for smollm2-135m: 134.5 M parameters",
        "charges (assumed)",
        "peak (predicted)",
        "recipes tried",
        "published",
    ] {
        assert!(table.contains(words), "{words}: {table}");
    }
}

#[test]
fn first_docs_example_matches_output() {
    let book = include_str!("../../../docs/plans.md");
    let (_, example) = book.split_once("\n`plimsoll plan ").unwrap();
    let (words, rest) = example.split_once('`').unwrap();
    let shown = rest.split("```\n").nth(1).unwrap();
    assert_eq!(shown, text(&plan(&words.split(' ').collect::<Vec<_>>()).stdout), "{words}");
}

/// Runs a command of the shell that starts with `plimsoll`, and returns the plan that it prints as JSON.
fn plan_of_command(command: &str) -> Value {
    let define = "plimsoll() { \"$PROGRAM\" \"$@\"; }; ";
    let mut shell = Command::new("sh");
    let output =
        shell.arg("-c").arg(define.to_owned() + command).env("PROGRAM", env!("CARGO_BIN_EXE_plimsoll")).output();
    serde_json::from_slice(&output.unwrap().stdout).unwrap_or_else(|error| panic!("{command}: {error}"))
}

#[test]
fn recommended_command_gives_predicted_plan() {
    let peak = |plan: &Value| -> i64 {
        let devices = plan["devices"].as_array().unwrap().iter();
        devices.map(|device| device["peak_bytes"].as_i64().unwrap()).sum()
    };
    let seconds = |plan: &Value| plan["predicted"]["step_seconds"].as_f64().unwrap();
    let few = ["--model", "smollm2-135m", "--sequence", "512", "--batch-tokens", "8192"];
    let cases: [&[&str]; 4] = [
        &["--devices", "rtx3090", "--set", "recipe.micro_batch=1", "--set", "recipe.recompute=block"],
        &["--devices", "rtx3090=4GiB,host=8GiB"],
        &["--devices", "rtx3090,rtx3070", "--set", "run.parallelism=pipeline"],
        &["--devices", "rtx3070=2GiB,host=8GiB", "--set", "train.precision=f32"],
    ];
    for case in cases {
        let words = [&few[..], case, &["--json"]].concat();
        let before: Value = serde_json::from_slice(&plan(&words).stdout).unwrap();
        assert!(before["recommendations"].is_null(), "they are computed only if asked for");
        let advised: Value = serde_json::from_slice(&plan(&[&words[..], &["--advise"]].concat()).stdout).unwrap();
        let recommendations = advised["recommendations"].as_array().unwrap_or_else(|| panic!("{case:?}: none"));
        for recommendation in recommendations {
            let after = plan_of_command(recommendation["command"].as_str().unwrap());
            assert_eq!(recommendation["bytes"], peak(&after) - peak(&before), "{recommendation}");
            let speedup = seconds(&before) / seconds(&after);
            assert!(speedup >= 1.02, "{recommendation}");
            assert!((recommendation["speedup"].as_f64().unwrap() - speedup).abs() < 1e-9, "{recommendation}");
        }
    }
}

/// Runs the command on the first line of `block`, and asserts that it prints the other lines in their order. Lines with
/// `…` are left out.
fn check_docs_block(block: &str) {
    let (command, shown) = block.split_once('\n').unwrap();
    let output = plan(&command.split_whitespace().skip(2).collect::<Vec<_>>());
    let printed = text(&output.stdout) + &text(&output.stderr);
    let mut lines = printed.lines().map(str::trim_end);
    for line in shown.lines().filter(|line| !line.contains('…')) {
        assert!(lines.any(|printed| printed == line), "{command}\nprints no line {line:?} here:\n{printed}");
    }
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn docs_of_teams_show_printed_plans() {
    let book = include_str!("../../../docs/teams.md");
    let blocks: Vec<&str> = book.split("```\n$ ").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(blocks.len() >= 8, "{blocks:?}");
    blocks.into_iter().for_each(check_docs_block);
}

#[test]
fn parallelism_all_uses_all_devices_or_none() {
    let three = ["--model", "smollm2-135m", "--devices", "rtx3090,rtx3090,rtx3090", "--sequence", "256"];
    let of = |tokens, all: &[&str]| plan(&[&three[..], &["--batch-tokens", tokens], all].concat());
    let all = ["--set", "run.parallelism=all"];
    // If all devices are required, a device without a sequence becomes a storage-only worker.
    for (tokens, hold) in [("256", 2), ("512", 1)] {
        let held = text(&of(tokens, &all).stdout);
        assert_eq!(held.matches("and computes no sequences").count(), hold, "{held}");
    }
    let one = of("256", &[]);
    assert_eq!(one.status.code(), Some(0));
    assert!(
        text(&one.stdout).contains("excluded: 2 × rtx3090 (the 2nd and 3rd of 3 devices): "),
        "{}",
        text(&one.stdout)
    );
}

#[test]
fn team_plan_explains_one_ladder_per_worker_kind() {
    let team = |devices| plan(&["--model", "smollm2-135m", "--sequence", "512", "--devices", devices, "--explain"]);
    let unequal = text(&team("rtx3090,rtx3070,host=16GiB").stdout);
    for words in ["rtx3090: each rung alone", "rtx3070: each rung alone", "rtx3070: rungs of this plan"] {
        assert!(unequal.contains(words), "{words}: {unequal}");
    }
    assert!(unequal.lines().all(|line| line.chars().count() <= 80), "{unequal}");
    let equal = text(&team("rtx3090,rtx3090,host=16GiB").stdout);
    assert_eq!(equal.matches("each: each rung alone").count(), 1, "{equal}");
}

#[test]
fn plan_prints_json() {
    let output = plan(&[&SMALL[..], &["--json"]].concat());
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    for key in ["fits", "recipe", "class", "devices", "host", "predicted", "needs"] {
        assert!(!plan[key].is_null(), "{key}: {plan}");
    }
    let device = &plan["devices"][0];
    assert_eq!(device["name"], "rtx3090");
    let number = |key: &str| device[key].as_u64().unwrap_or_else(|| panic!("{key}: {device}"));
    assert_eq!(number("arena_bytes") + number("charges_bytes"), number("peak_bytes"));
    assert!(number("peak_bytes") <= number("budget_bytes"));
    assert!(number("lower_bound_bytes") <= number("arena_bytes"));
}

#[test]
fn plan_offloads_only_when_device_is_short() {
    let host = |devices: &str| {
        let devices = format!("run.devices={devices}");
        let output = plan(&["--model", "smollm2-135m", "--sequence", "256", "--set", &devices, "--json"]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let plan: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        plan["host"]["arena_bytes"].as_u64().unwrap()
    };
    assert_eq!(host("rtx3090,host=64GiB"), 0);
    assert!(host("rtx3090=2GiB,host=64GiB") > 0);
}

#[test]
fn machines_on_paper_offload_to_their_own_hosts() {
    let excluded_reason = |devices: &str| {
        let devices = ["--devices", devices, "--set", "run.parallelism=data", "--json"];
        let size = ["--model", "smollm2-360m", "--sequence", "256", "--batch-tokens", "4096"];
        let plan: Value = serde_json::from_slice(&plan(&[&size[..], &devices].concat()).stdout).unwrap();
        plan["excluded"][0]["reason"].as_str().unwrap().to_owned()
    };
    // The memory of the first machine is out of reach of the second.
    let two = "pc1/rtx3090,pc1/host=32GiB,pc2/rtx3070=2GiB,pc1-pc2=100gbit";
    assert!(excluded_reason(two).starts_with("its smallest recipe holds "));
    assert!(excluded_reason(&format!("{two},pc2/host=32GiB")).starts_with("it would slow the team "));
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn plan_names_the_host_memory_of_each_machine() {
    let folder = model_folder(&json!({
        "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "num_hidden_layers": 4, "vocab_size": 49152, "max_position_embeddings": 2048,
    }));
    let size = ["--model", folder.path().to_str().unwrap(), "--sequence", "256", "--batch-tokens", "4096"];
    let planned = |devices: &str, more: &[&str]| {
        let output = plan(&[&size[..], &["--devices", devices, "--set", "run.parallelism=all"], more].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let two = "pc1/rtx3090=1GiB,pc1/host=32GiB,pc2/rtx3070=1GiB,pc2/host=16GiB,pc1-pc2=100gbit";
    let json = planned(two, &["--json"]);
    let plan: Value = serde_json::from_str(&json).unwrap();
    let hosts = plan["machine_hosts"].as_array().unwrap();
    assert_eq!((&hosts[0]["name"], &hosts[1]["name"]), (&"pc1/host".into(), &"pc2/host".into()));
    let bytes = |host: &Value, key: &str| host[key].as_u64().unwrap();
    let used: Vec<u64> = hosts.iter().map(|host| bytes(host, "arena_bytes")).collect();
    assert!(hosts.iter().all(|host| 0 < bytes(host, "arena_bytes")), "{hosts:?}");
    assert!(hosts.iter().all(|host| bytes(host, "arena_bytes") <= bytes(host, "budget_bytes")), "{hosts:?}");
    assert_eq!(Some(used.iter().sum()), plan["host"]["arena_bytes"].as_u64());
    let table = planned(two, &[]);
    assert!(table.contains("\nhosts: pc1/host ") && table.contains(" of 16.00 GiB\n"), "{table}");
    // Upper and lower case name the same cards and machines.
    let same = "PC1/RTX3090=1GiB,pc1/Host=32GiB,Pc2/Rtx3070=1GiB,PC2/host=16GiB,pc2-pc1=100Gbit";
    let lower = |plan: &str| plan.to_lowercase();
    assert_eq!(lower(&planned(same, &["--json"])), lower(&json));
}

/// Returns the folder of a llama of hidden size 576, with `keys` in place of some keys of its `config.json`.
fn model_folder(keys: &Value) -> tempfile::TempDir {
    let mut config = crate::common::config(576);
    config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

/// Returns the seconds of a step of a llama with few layers, with `model` in place of some keys of its `config.json`.
fn planned_seconds(model: &Value, devices: &str, words: &[&str]) -> f64 {
    let folder = model_folder(model);
    let output = plan(&[&["--model", folder.path().to_str().unwrap(), "--json", "--devices", devices], words].concat());
    let planned: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output.stderr)));
    planned["predicted"]["step_seconds"].as_f64().unwrap()
}

#[test]
fn more_host_memory_never_slows_few_layers() {
    // The first was slower by 9 % and the second by 1.8 %: an estimate left out the fastest offload choice.
    let small = json!({
        "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "num_hidden_layers": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    });
    let large = json!({
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "num_hidden_layers": 6, "vocab_size": 128256, "max_position_embeddings": 8192,
        "tie_word_embeddings": false,
    });
    let cases = [
        (small, "rtx3070=908917866B", ["453140806B", "2803133952B"], ["f32", "128", "768"]),
        (
            large,
            "a100-40g=8137540502B,rtx3070=8137540502B",
            ["30626807807B", "30821167843B"],
            ["bf16", "1024", "16384"],
        ),
    ];
    for (model, devices, hosts, [precision, sequence, tokens]) in cases {
        let precision = format!("train.precision={precision}");
        let words = ["--set", &*precision, "--sequence", sequence, "--batch-tokens", tokens];
        let seconds = |host: &str| planned_seconds(&model, &format!("{devices},host={host}"), &words);
        let [less, more] = hosts.map(seconds);
        assert!(more <= 1.005 * less, "{devices}: {less} s, with more host memory {more} s");
    }
}

#[test]
fn unknown_devices_have_a_remedy() {
    for (devices, message, hint) in [
        ("8*rtx5090", "run.devices: `8*rtx5090` is not a known device", "did you mean `8xrtx5090`?"),
        ("rtx3090,hst=64GiB", "run.devices: `hst` is not a known device", "did you mean `host`?"),
        (
            "pc1/rtx3090,pc2/rtx3070,pc1-pc3=1gbit",
            "run.devices: `pc1-pc3`: no paper device of the list is in a machine `pc3`",
            "the list has cards in pc1, pc2",
        ),
    ] {
        let output = plan(&["--model", "smollm2-135m", "--devices", devices]);
        assert_eq!(output.status.code(), Some(2));
        let refusal = text(&output.stderr);
        assert!(refusal.contains(message) && refusal.contains(&format!("  hint: {hint}\n")), "{refusal}");
    }
}

#[test]
fn sixteen_cards_of_the_user_are_planned() {
    let cards = "pc1/12xcard:mine=12GiB,bf16=60TFLOPS,memory=450GB/s,link=12GB/s,pc2/4xRTX3090,pc1-pc2=100gbit";
    let output = plan(&["--model", "smollm2-135m", "--devices", cards, "--set", "run.parallelism=all", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<&str> = plan["devices"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    assert_eq!(names, [["pc1/card:mine"; 12].to_vec(), ["pc2/rtx3090"; 4].to_vec()].concat());
}

#[test]
fn refusal_includes_a_command_that_fits() {
    let output = plan(&[&SMALL[..], &["--budget", "1GiB"]].concat());
    let refusal = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{refusal}");
    assert!(refusal.starts_with("error: does not fit: the smallest recipe holds "), "{refusal}");
    let (_, command) = refusal.split_once("plimsoll plan ").expect("a ready command");
    let ready: Vec<&str> = command.lines().next().unwrap().split(' ').collect();
    assert_eq!(plan(&ready).status.code(), Some(0), "{ready:?}");
}

#[test]
fn pipeline_split_accounts_for_offload_time() {
    let cards = ["rtx5090"; 8].join(",") + ",host=512GiB";
    let output = plan(&["--devices", &cards, "--model", "qwen2.5-32b", "--explain", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    let ways = plan["alternatives"].as_array().unwrap();
    let layers = ways.iter().find(|way| way["parallelism"] == "pipeline").expect("a pipeline is possible");
    let seconds = layers["predicted"]["step_seconds"].as_f64().unwrap();
    // A split that only counts the bytes over the link once per step would take 19.5 s.
    assert!(seconds < 19.0, "{seconds} s a step");
}
