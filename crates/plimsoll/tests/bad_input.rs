//! Errors in the model, the data and the disk, found when they are opened: the exit code, one message with hints, no lost
//! data and no leftovers that disturb the next run. Errors in flags and run files are in `usage.rs`.

use crate::common::{SMALL, Shape, Workspace, config, tokenizer};
use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

const TRAIN: [&str; 3] = ["train", "run.toml", "--quiet"];

/// Creates a workspace with a run that starts from trained weights in `pretrained/`.
fn with_weights() -> Workspace {
    let workspace = Workspace::new(&Shape { steps: 2, ..SMALL });
    workspace.succeed(&TRAIN);
    fs::rename(workspace.path("run/model"), workspace.path("pretrained")).unwrap();
    fs::remove_dir_all(workspace.path("run")).unwrap();
    let text = workspace.read("run.toml").replace("\"model\"\ninit = \"random\"", "\"pretrained\"");
    workspace.write("run.toml", text);
    workspace
}

/// Returns the refusal of a new run, which contains all of `words` and creates no run folder.
fn refused(workspace: &Workspace, words: &[&str]) -> String {
    let message = workspace.expect_refusal(2, &TRAIN);
    for word in words {
        assert!(message.contains(word), "{word}: {message}");
    }
    assert!(!workspace.path("run/run.toml").exists() && !workspace.path("run/checkpoints").exists(), "{message}");
    message
}

#[test]
fn damaged_weights_are_refused_and_repaired_weights_train() {
    let workspace = with_weights();
    let weights = "pretrained/model.safetensors";
    let good = fs::read(workspace.path(weights)).unwrap();
    let header = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let with_header = |change: &dyn Fn(&str) -> String| {
        let changed = change(std::str::from_utf8(&good[8..8 + header]).unwrap()).into_bytes();
        [&(changed.len() as u64).to_le_bytes()[..], &changed, &good[8 + header..]].concat()
    };
    let not_a_number = {
        let mut bytes = good.clone();
        let last = bytes.len() - 4;
        bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
        bytes
    };
    let files: [(&str, Vec<u8>); 8] = [
        ("truncated", good[..good.len() - 5].to_vec()),
        ("at least 8 bytes", good[..5].to_vec()),
        ("the header claims", [&u64::MAX.to_le_bytes()[..], &good[8..]].concat()),
        ("invalid header", [&good[..8], &vec![b'#'; good.len() - 8]].concat()),
        ("unknown type `F99`", with_header(&|text| text.replacen("F32", "F99", 1))),
        ("spans", with_header(&|text| text.replacen("[32,", "[33,", 1))),
        ("missing `model.norm.weight`", with_header(&|text| text.replace("model.norm.weight", "model.worm.weight"))),
        ("NaN or infinite weights", not_a_number),
    ];
    for (words, bytes) in files {
        workspace.write(weights, bytes);
        refused(&workspace, &[words, weights.split('/').next().unwrap()]);
    }
    fs::remove_file(workspace.path(weights)).unwrap();
    refused(&workspace, &["no *.safetensors file", "model.init=random"]);
    workspace.write(weights, good);
    workspace.succeed(&TRAIN);
}

#[test]
fn invalid_model_config_is_refused_by_key() {
    let workspace = Workspace::new(&SMALL);
    let with = |key: &str, value: Value| {
        let mut config = config(SMALL.hidden);
        config[key] = value;
        workspace.write("model/config.json", config.to_string());
    };
    with("attention_style", "upside-down".into());
    refused(&workspace, &["model/config.json", "`attention_style`", "ignore"]);
    with("hidden_size", "wide".into());
    refused(&workspace, &["model/config.json", "hidden_size"]);
    with("num_attention_heads", 0.into());
    refused(&workspace, &["model/config.json", "num_attention_heads"]);
    workspace.write("model/config.json", "{\"model_type\": ");
    refused(&workspace, &["model/config.json"]);
    fs::remove_file(workspace.path("model/config.json")).unwrap();
    refused(&workspace, &["model/config.json"]);
    fs::rename(workspace.path("model"), workspace.path("elsewhere")).unwrap();
    refused(&workspace, &["/model: no such directory"]);
}

#[test]
fn input_errors_come_before_rate_measurement() {
    let workspace = Workspace::new(&SMALL);
    let rates = workspace.path("cache/devices.json");
    fs::remove_file(&rates).unwrap();
    for setting in ["data.train=nowhere.jsonl", "data.eval=nowhere.jsonl", "model.path=nowhere"] {
        workspace.run(&["train", "run.toml", "--quiet", "--set", setting]).refusal(2);
        assert!(!rates.exists(), "{setting}: rates were measured for an error");
    }
    workspace
        .run(&["train", "run.toml", "--quiet", "--set", "model.preset=smollm2-135m", "--set", "model.init=pretrained"])
        .refusal(2);
    assert!(!rates.exists(), "rates were measured for a model without weights");
}

#[test]
fn tokenizer_of_another_model_is_refused() {
    let workspace = Workspace::new(&SMALL);
    let text = workspace.read("run.toml").replace("\"tokens\"", "\"text\"").replace(".jsonl", "-text.jsonl");
    workspace.write("run.toml", text);
    workspace.write("model/tokenizer.json", tokenizer(40).to_string());
    refused(&workspace, &["tokenizer.json has 40 tokens, but the model has 32"]);
    workspace.write("model/tokenizer.json", "{}");
    refused(&workspace, &["tokenizer.json cannot be used"]);
    fs::remove_file(workspace.path("model/tokenizer.json")).unwrap();
    refused(&workspace, &["tokenizer.json"]);
    workspace.write("model/tokenizer.json", tokenizer(32).to_string());
    workspace.succeed(&TRAIN);
}

#[test]
fn invalid_data_is_refused_by_file_and_line() {
    let workspace = Workspace::new(&SMALL);
    let line = |text: &str| format!("{}\n{text}\n", json!({"input_ids": [3, 4, 5]}));
    let files: [(String, &str); 8] = [
        (String::new(), "nothing to predict in"),
        (json!({"input_ids": [3]}).to_string(), "nothing to predict"),
        (json!({"input_ids": [3, 4], "labels": [3, -100]}).to_string(), "a label other than -100"),
        (json!({"input_ids": [3, 4, 5], "attention_mask": [1, 0, 1]}).to_string(), "`attention_mask` hides tokens"),
        (line("{\"input_ids\": [3, 99]}"), "train.jsonl:2: token 99 is outside"),
        (line("{\"input_ids\": [3, 4], \"labels\": [3]}"), "train.jsonl:2: 1 label for 2 tokens"),
        (line("no json"), "train.jsonl:2: "),
        (line("{\"text\": \"abc\"}"), "train.jsonl:2: "),
    ];
    for (content, words) in files {
        workspace.write("train.jsonl", content);
        refused(&workspace, &[words]);
    }
    fs::remove_file(workspace.path("train.jsonl")).unwrap();
    refused(&workspace, &["no file matches"]);
}

#[test]
fn fifos_are_refused_as_input_without_waiting() {
    let workspace = Workspace::new(&SMALL);
    for file in ["run.toml", "model/config.json", "train.jsonl"] {
        let (path, aside) = (workspace.path(file), workspace.path("aside"));
        fs::rename(&path, &aside).unwrap();
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        refused(&workspace, &[file, "it is a FIFO, not a regular file"]);
        fs::rename(&aside, &path).unwrap();
    }
}

#[test]
fn limits_of_model_and_machine_are_reported() {
    let workspace = Workspace::new(&SMALL);
    let train = |setting: &str| workspace.expect_refusal(2, &[&TRAIN[..], &["--set", setting]].concat());
    assert!(train("data.sequence=128").contains("takes no more than 64"));
    assert!(train("run.threads=1024").contains("1024 threads exceed the "));
    assert!(train("run.devices=rtx3090").contains("`rtx3090` is a device on paper"));
    assert!(train("run.devices=cuda:99").contains("run.devices: cuda:99: "));
    assert_eq!(workspace.file_names("run"), [""; 0]);
    // A load line that is too small: exit code 3, and the command of the hint works.
    let message = workspace.expect_refusal(3, &[&TRAIN[..], &["--budget", "2MiB"]].concat());
    assert!(message.starts_with("error: does not fit: the smallest recipe holds "), "{message}");
    let (_, ready) = message.split_once("plimsoll ").unwrap();
    let ready = ready.lines().next().expect("the command of the first hint");
    workspace.succeed(&ready.trim().split(' ').collect::<Vec<_>>());
}

#[test]
fn run_folder_accepts_one_process_at_a_time() {
    let workspace = Workspace::new(&Shape { steps: 100_000, ..SMALL });
    let mut first = workspace.start(&TRAIN);
    assert!(first.wait_until(|| workspace.path("run/checkpoints/step-4").exists()));
    for again in [&TRAIN[..], &["train", "--resume", "run"]] {
        let message = workspace.expect_refusal(2, again);
        assert!(message.contains("another plimsoll process trains in "), "{message}");
    }
    first.signal("TERM");
    assert_eq!(first.wait().code, Some(4), "the first one is not disturbed");
    let message = workspace.expect_refusal(2, &TRAIN);
    assert!(message.contains("already holds a run") && message.contains("--resume "), "{message}");
}

#[test]
fn unwritable_run_folder_is_named() {
    let workspace = Workspace::new(&SMALL);
    workspace.write("file", "");
    // Not even root can create a folder below a file or in /proc.
    for folder in ["file/run", "/proc/plimsoll"] {
        let message = workspace.expect_refusal(2, &[&TRAIN[..], &["--set", &format!("run.dir={folder}")]].concat());
        assert!(message.contains("run.dir: ") && message.contains("can be written"), "{message}");
    }
    workspace.succeed(&TRAIN);
    fs::remove_dir_all(workspace.path("run/checkpoints/step-24")).unwrap();
    fs::remove_file(workspace.path("run/events.jsonl")).unwrap();
    fs::create_dir(workspace.path("run/events.jsonl")).unwrap();
    let message = workspace.expect_refusal(2, &["train", "--resume", "run", "--quiet"]);
    assert!(message.contains("run/events.jsonl: cannot write"), "{message}");
}

#[test]
fn model_directory_stays_unchanged() {
    let workspace = with_weights();
    let dir = workspace.path("pretrained");
    for file in fs::read_dir(&dir).unwrap() {
        fs::set_permissions(file.unwrap().path(), Permissions::from_mode(0o444)).unwrap();
    }
    fs::set_permissions(&dir, Permissions::from_mode(0o555)).unwrap();
    let before = workspace.read_files("pretrained");
    workspace.succeed(&TRAIN);
    fs::remove_file(workspace.path("run/result.json")).unwrap();
    workspace.succeed(&["train", "--resume", "run", "--quiet"]);
    workspace.succeed(&["eval", "pretrained", "--data", "eval.jsonl", "--format", "tokens"]);
    assert!(before == workspace.read_files("pretrained"));
    fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn non_finite_loss_stops_before_the_update() {
    let workspace = Workspace::new(&SMALL);
    let diverging =
        ["--set", "train.learning_rate=1e30", "--set", "train.warmup_steps=0", "--set", "train.save_every=1"];
    let message = workspace.expect_refusal(4, &[&TRAIN[..], &diverging].concat());
    assert!(message.starts_with("stopped: step ") && message.contains("are not finite"), "{message}");
    for words in ["the newest checkpoint is of step", "a lower train.learning_rate", "plimsoll train --resume "] {
        assert!(message.contains(words), "{message}");
    }
    let steps = workspace.events("run").iter().filter(|event| event["event"] == "step").count();
    assert!(workspace.file_names("run/checkpoints").contains(&format!("step-{steps}")));
    // The resumed run sees the same samples, so it stops at the same step again and loses nothing.
    let before = workspace.read_files("run/checkpoints");
    let again = workspace.expect_refusal(4, &["train", "--resume", "run", "--quiet"]);
    assert_eq!(message.lines().next(), again.lines().next());
    assert!(before == workspace.read_files("run/checkpoints"));
}

#[test]
fn non_finite_weights_are_not_saved() {
    let workspace = Workspace::new(&SMALL);
    let overflowing = ["train.learning_rate=1e39", "train.warmup_steps=0", "train.save_every=1"];
    let settings = overflowing.iter().flat_map(|setting| ["--set", setting]);
    let message = workspace.expect_refusal(4, &TRAIN.into_iter().chain(settings).collect::<Vec<_>>());
    assert!(message.contains("step 1: no checkpoint is written, because `"), "{message}");
    assert!(message.contains("NaN or infinite") && message.contains("a lower train.learning_rate"), "{message}");
    assert_eq!(workspace.file_names("run/checkpoints"), Vec::<String>::new());
    assert!(!workspace.path("run/model").exists());
}

/// Checks a run with a failed save: earlier checkpoints are intact, and the resumed run ends like an undisturbed one.
fn assert_nothing_lost(workspace: &Workspace, code: Option<i32>, message: &str) {
    assert_eq!(code, Some(2), "{message}");
    assert!(message.starts_with("error: ") && message.contains("plimsoll train --resume "), "{message}");
    assert!(!message.contains("panic"), "{message}");
    assert_eq!(workspace.file_names("run/checkpoints"), ["step-4", "step-8"], "{message}");
    assert!(!workspace.path("run/model").exists());
    let calm = Workspace::new(&SMALL);
    calm.succeed(&TRAIN);
    workspace.succeed(&["train", "--resume", "run", "--quiet"]);
    assert!(calm.read_files("run/model") == workspace.read_files("run/model"));
}

#[test]
fn full_disk_while_saving_loses_nothing() {
    let can = Command::new("unshare").args(["-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).output();
    if !can.as_ref().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: this system mounts no small file system for a test ({can:?})");
        return;
    }
    let workspace = Workspace::new(&SMALL);
    // The file system has room for two checkpoints of 231 KiB. It disappears with the command, so its files are copied out.
    fs::create_dir(workspace.path("small")).unwrap();
    let script = "mount -t tmpfs -o size=600k tmpfs small && { \"$@\"; code=$?; cp -a small run; exit $code; }";
    let train = [&TRAIN[..], &["--set", "run.dir=small", "--set", "train.keep=9"]].concat();
    let done = workspace.start_wrapped(&["unshare", "-rm", "sh", "-c", script, "sh"], &train).wait();
    assert!(done.stderr.contains("no space left on the disk for "), "{}", done.stderr);
    assert_nothing_lost(&workspace, done.code, &done.stderr);
}

#[test]
fn file_size_limit_while_saving_loses_nothing() {
    let workspace = Workspace::new(&SMALL);
    let mut run = workspace.start(&[&TRAIN[..], &["--set", "train.keep=9"]].concat());
    assert!(run.wait_until(|| workspace.path("run/checkpoints/step-8").exists()));
    run.kill();
    for step in workspace.file_names("run/checkpoints") {
        if !["step-4", "step-8"].contains(&step.as_str()) {
            fs::remove_dir_all(workspace.path("run/checkpoints").join(step)).unwrap();
        }
    }
    // A fast machine may have finished the run.
    let _ = fs::remove_dir_all(workspace.path("run/model"));
    // A limit of 64 blocks of at most 1 KiB. Its signal must not end the program.
    let script = "ulimit -f 64; exec \"$@\"";
    let done = workspace.start_wrapped(&["sh", "-c", script, "sh"], &["train", "--resume", "run", "--quiet"]).wait();
    assert_nothing_lost(&workspace, done.code, &done.stderr);
}

#[test]
fn limits_of_process_are_named() {
    let workspace = Workspace::new(&SMALL);
    let script = "ulimit -s 128; exec \"$@\"";
    let refusal = workspace.start_wrapped(&["sh", "-c", script, "sh"], &["plan", "run.toml"]).wait().refusal(2);
    assert!(refusal.contains("the limit of the stack is 128.00 KiB") && refusal.contains("ulimit -s"), "{refusal}");
    for files in [5, 9, 12, 15, 16, 20, 24, 32] {
        let script = format!("ulimit -n {files}; exec \"$@\"");
        let done = workspace.start_wrapped(&["sh", "-c", &script, "sh"], &TRAIN).wait();
        if files < 16 {
            let refusal = done.refusal(2);
            assert!(refusal.contains(&format!("the limit of open files is {files}, ")), "{refusal}");
            assert!(refusal.contains("ulimit -n"), "{refusal}");
        } else {
            assert_eq!(done.code, Some(0), "{files}: {done:?}");
            fs::remove_dir_all(workspace.path("run")).unwrap();
        }
    }
}

#[test]
fn results_that_reach_no_output_are_failures() {
    let workspace = Workspace::new(&SMALL);
    let script = "exec \"$@\" >/dev/full";
    let refusal = workspace.start_wrapped(&["sh", "-c", script, "sh"], &["plan", "run.toml"]).wait().refusal(2);
    assert!(refusal.contains("standard output: cannot write the result: "), "{refusal}");
    let closed = "\"$@\" | true";
    assert_eq!(workspace.start_wrapped(&["sh", "-c", closed, "sh"], &["plan", "run.toml"]).wait().code, Some(0));
}

#[test]
fn resume_refuses_changed_data_of_equal_size() {
    let workspace = Workspace::new(&SMALL);
    workspace.succeed(&["train", "run.toml", "--quiet"]);
    let data = workspace.read("train.jsonl");
    let swapped: String = data
        .chars()
        .map(|c| {
            if c == '3' {
                '4'
            } else if c == '4' {
                '3'
            } else {
                c
            }
        })
        .collect();
    assert_ne!(data, swapped);
    fs::remove_dir_all(workspace.path("run/checkpoints/step-24")).unwrap();
    workspace.write("train.jsonl", swapped);
    let message = workspace.expect_refusal(2, &["train", "--resume", "run", "--quiet"]);
    assert!(message.contains("data.train: tokens or labels differ from those of "), "{message}");
    workspace.write("train.jsonl", data);
    workspace.succeed(&["train", "--resume", "run", "--quiet"]);
}
