//! Wrong input that only shows once model, data or disk are opened: the right exit code, one clear
//! message with what to do, nothing lost, and nothing left that the next run trips over. What the
//! run file's reader refuses is in `input.rs`.

mod common;

use common::{Place, SMALL, Shape, config, tokenizer};
use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

const TRAIN: [&str; 3] = ["train", "run.toml", "--quiet"];

/// A run that begins with trained weights, in `pretrained/`.
fn with_weights() -> Place {
    let place = Place::new(&Shape { steps: 2, ..SMALL });
    place.succeed(&TRAIN);
    fs::rename(place.path("run/model"), place.path("pretrained")).unwrap();
    fs::remove_dir_all(place.path("run")).unwrap();
    let text = place.read("run.toml").replace("\"model\"\ninit = \"random\"", "\"pretrained\"");
    place.write("run.toml", text);
    place
}

/// The refusal of a new run, which says all of `words` and leaves no run behind.
fn refused(place: &Place, words: &[&str]) -> String {
    let message = place.refuse(2, &TRAIN);
    for word in words {
        assert!(message.contains(word), "{word}: {message}");
    }
    assert!(!place.path("run/run.toml").exists() && !place.path("run/checkpoints").exists(), "{message}");
    message
}

#[test]
fn damaged_weights_are_refused_and_mended_ones_train_with_the_same_command() {
    let place = with_weights();
    let weights = "pretrained/model.safetensors";
    let good = fs::read(place.path(weights)).unwrap();
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
        ("cut off", good[..good.len() - 5].to_vec()),
        ("at least 8 bytes", good[..5].to_vec()),
        ("the header claims", [&u64::MAX.to_le_bytes()[..], &good[8..]].concat()),
        ("the header is wrong", [&good[..8], &vec![b'#'; good.len() - 8]].concat()),
        ("unknown type `F99`", with_header(&|text| text.replacen("F32", "F99", 1))),
        ("spans", with_header(&|text| text.replacen("[32,", "[33,", 1))),
        ("missing `model.norm.weight`", with_header(&|text| text.replace("model.norm.weight", "model.worm.weight"))),
        ("NaN or infinite weights", not_a_number),
    ];
    for (words, bytes) in files {
        place.write(weights, bytes);
        refused(&place, &[words, weights.split('/').next().unwrap()]);
    }
    fs::remove_file(place.path(weights)).unwrap();
    refused(&place, &["no *.safetensors file", "model.init=random"]);
    place.write(weights, good);
    place.succeed(&TRAIN);
}

#[test]
fn a_model_that_is_not_what_it_should_be_is_refused_by_file_and_key() {
    let place = Place::new(&SMALL);
    let with = |key: &str, value: Value| {
        let mut config = config(SMALL.hidden);
        config[key] = value;
        place.write("model/config.json", config.to_string());
    };
    with("attention_style", "upside-down".into());
    refused(&place, &["model/config.json", "`attention_style`", "ignore"]);
    with("hidden_size", "wide".into());
    refused(&place, &["model/config.json", "hidden_size"]);
    with("num_attention_heads", 0.into());
    refused(&place, &["model/config.json", "num_attention_heads"]);
    place.write("model/config.json", "{\"model_type\": ");
    refused(&place, &["model/config.json"]);
    fs::remove_file(place.path("model/config.json")).unwrap();
    refused(&place, &["model/config.json"]);
    fs::rename(place.path("model"), place.path("elsewhere")).unwrap();
    refused(&place, &["/model: no such directory"]);
}

#[test]
fn what_needs_no_rates_is_said_before_any_are_measured() {
    let place = Place::new(&SMALL);
    let rates = place.path("cache/devices.json");
    fs::remove_file(&rates).unwrap();
    for setting in ["data.train=nowhere.jsonl", "data.eval=nowhere.jsonl", "model.path=nowhere"] {
        place.run(&["train", "run.toml", "--quiet", "--set", setting]).refusal(2);
        assert!(!rates.exists(), "{setting}: rates were measured for an error");
    }
    place
        .run(&["train", "run.toml", "--quiet", "--set", "model.preset=smollm2-135m", "--set", "model.init=pretrained"])
        .refusal(2);
    assert!(!rates.exists(), "rates were measured for a model without weights");
}

#[test]
fn a_tokenizer_of_another_model_is_refused() {
    let place = Place::new(&SMALL);
    let text = place.read("run.toml").replace("\"tokens\"", "\"text\"").replace(".jsonl", "-text.jsonl");
    place.write("run.toml", text);
    place.write("model/tokenizer.json", tokenizer(40).to_string());
    refused(&place, &["tokenizer.json knows 40 tokens, the model 32"]);
    place.write("model/tokenizer.json", "{}");
    refused(&place, &["tokenizer.json cannot be used"]);
    fs::remove_file(place.path("model/tokenizer.json")).unwrap();
    refused(&place, &["tokenizer.json"]);
    place.write("model/tokenizer.json", tokenizer(32).to_string());
    place.succeed(&TRAIN);
}

#[test]
fn data_that_cannot_be_trained_on_are_refused_by_file_and_line() {
    let place = Place::new(&SMALL);
    let line = |text: &str| format!("{}\n{text}\n", json!({"input_ids": [3, 4, 5]}));
    let files: [(String, &str); 7] = [
        (String::new(), "nothing to predict in"),
        (json!({"input_ids": [3]}).to_string(), "1 empty documents"),
        (json!({"input_ids": [3, 4], "labels": [-100, -100]}).to_string(), "have the label -100"),
        (line("{\"input_ids\": [3, 99]}"), "train.jsonl:2: token 99 is outside"),
        (line("{\"input_ids\": [3, 4], \"labels\": [3]}"), "train.jsonl:2: 1 label for 2 tokens"),
        (line("no json"), "train.jsonl:2: "),
        (line("{\"text\": \"abc\"}"), "train.jsonl:2: "),
    ];
    for (content, words) in files {
        place.write("train.jsonl", content);
        refused(&place, &[words]);
    }
    fs::remove_file(place.path("train.jsonl")).unwrap();
    refused(&place, &["no file matches"]);
}

#[test]
fn what_the_model_or_the_machine_cannot_take_is_refused_with_what_they_can() {
    let place = Place::new(&SMALL);
    let train = |setting: &str| place.refuse(2, &[&TRAIN[..], &["--set", setting]].concat());
    assert!(train("data.sequence=128").contains("takes no more than 64"));
    assert!(train("run.threads=1024").contains("1024 threads are more than the "));
    assert!(train("run.devices=rtx3090").contains("`rtx3090` is a device on paper"));
    assert!(train("run.devices=cuda:99").contains("run.devices: cuda:99: "));
    assert_eq!(place.names("run"), [""; 0]);
    // Too small a load line: exit code 3, and the ready command works.
    let message = place.refuse(3, &[&TRAIN[..], &["--budget", "2MiB"]].concat());
    assert!(message.starts_with("error: does not fit: the smallest recipe holds "), "{message}");
    let (_, ready) = message.split_once("plimsoll ").unwrap();
    let ready = ready.lines().next().expect("the command of the first hint");
    place.succeed(&ready.trim().split(' ').collect::<Vec<_>>());
}

#[test]
fn a_run_folder_takes_one_run_and_one_program_at_a_time() {
    let place = Place::new(&Shape { steps: 100_000, ..SMALL });
    let mut first = place.start(&TRAIN);
    assert!(first.until(|| place.path("run/checkpoints/step-4").exists()));
    for again in [&TRAIN[..], &["train", "--resume", "run"]] {
        let message = place.refuse(2, again);
        assert!(message.contains("another plimsoll trains in "), "{message}");
    }
    first.signal("TERM");
    assert_eq!(first.end().code, Some(4), "the first one is not disturbed");
    let message = place.refuse(2, &TRAIN);
    assert!(message.contains("holds a run already") && message.contains("--resume "), "{message}");
}

#[test]
fn a_run_folder_that_cannot_be_written_is_named() {
    let place = Place::new(&SMALL);
    place.write("file", "");
    // Not even root can make a folder below a file, or in /proc.
    for folder in ["file/run", "/proc/plimsoll"] {
        let message = place.refuse(2, &[&TRAIN[..], &["--set", &format!("run.dir={folder}")]].concat());
        assert!(message.contains("run.dir: ") && message.contains("can be written"), "{message}");
    }
    place.succeed(&TRAIN);
    fs::remove_dir_all(place.path("run/checkpoints/step-24")).unwrap();
    fs::remove_file(place.path("run/events.jsonl")).unwrap();
    fs::create_dir(place.path("run/events.jsonl")).unwrap();
    let message = place.refuse(2, &["train", "--resume", "run", "--quiet"]);
    assert!(message.contains("run/events.jsonl: cannot write"), "{message}");
}

#[test]
fn a_model_directory_is_only_read() {
    let place = with_weights();
    let dir = place.path("pretrained");
    for file in fs::read_dir(&dir).unwrap() {
        fs::set_permissions(file.unwrap().path(), Permissions::from_mode(0o444)).unwrap();
    }
    fs::set_permissions(&dir, Permissions::from_mode(0o555)).unwrap();
    let before = place.files("pretrained");
    place.succeed(&TRAIN);
    fs::remove_file(place.path("run/result.json")).unwrap();
    place.succeed(&["train", "--resume", "run", "--quiet"]);
    place.succeed(&["eval", "pretrained", "--data", "eval.jsonl", "--format", "tokens"]);
    assert!(before == place.files("pretrained"));
    fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_loss_that_is_no_number_stops_before_the_weights_change() {
    let place = Place::new(&SMALL);
    let diverging =
        ["--set", "train.learning_rate=1e30", "--set", "train.warmup_steps=0", "--set", "train.save_every=1"];
    let message = place.refuse(4, &[&TRAIN[..], &diverging].concat());
    assert!(message.starts_with("stopped: step ") && message.contains("the loss is "), "{message}");
    for words in ["the newest checkpoint stands", "a lower train.learning_rate", "plimsoll train --resume "] {
        assert!(message.contains(words), "{message}");
    }
    let steps = place.events("run").iter().filter(|event| event["event"] == "step").count();
    assert!(place.names("run/checkpoints").contains(&format!("step-{steps}")));
    // The same samples give the same loss: it stops again, at the same step, and loses nothing.
    let before = place.files("run/checkpoints");
    let again = place.refuse(4, &["train", "--resume", "run", "--quiet"]);
    assert_eq!(message.lines().next(), again.lines().next());
    assert!(before == place.files("run/checkpoints"));
}

/// What holds when a save was refused: what was saved before is whole, and the run ends like any other.
fn nothing_was_lost(place: &Place, code: Option<i32>, message: &str) {
    assert_eq!(code, Some(2), "{message}");
    assert!(message.starts_with("error: ") && message.contains("plimsoll train --resume "), "{message}");
    assert!(!message.contains("panic"), "{message}");
    assert_eq!(place.names("run/checkpoints"), ["step-4", "step-8"], "{message}");
    assert!(!place.path("run/model").exists());
    let calm = Place::new(&SMALL);
    calm.succeed(&TRAIN);
    place.succeed(&["train", "--resume", "run", "--quiet"]);
    assert!(calm.files("run/model") == place.files("run/model"));
}

#[test]
fn a_disk_that_is_full_while_saving_loses_nothing() {
    let can = Command::new("unshare").args(["-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).output();
    if !can.as_ref().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: this system mounts no small file system for a test ({can:?})");
        return;
    }
    let place = Place::new(&SMALL);
    // Room for two checkpoints of 231 KiB, not for a third. The file system is gone with the command: what it held is
    // copied out.
    fs::create_dir(place.path("small")).unwrap();
    let script = "mount -t tmpfs -o size=600k tmpfs small && { \"$@\"; code=$?; cp -a small run; exit $code; }";
    let train = [&TRAIN[..], &["--set", "run.dir=small", "--set", "train.keep=9"]].concat();
    let done = place.start_as(&["unshare", "-rm", "sh", "-c", script, "sh"], &train).end();
    assert!(done.stderr.contains("no space left on the disk for "), "{}", done.stderr);
    nothing_was_lost(&place, done.code, &done.stderr);
}

#[test]
fn a_file_that_must_not_grow_while_saving_loses_nothing() {
    let place = Place::new(&SMALL);
    let mut run = place.start(&[&TRAIN[..], &["--set", "train.keep=9"]].concat());
    assert!(run.until(|| place.path("run/checkpoints/step-8").exists()));
    run.kill();
    for step in place.names("run/checkpoints") {
        if !["step-4", "step-8"].contains(&step.as_str()) {
            fs::remove_dir_all(place.path("run/checkpoints").join(step)).unwrap();
        }
    }
    // A quick machine may have come to the end.
    let _ = fs::remove_dir_all(place.path("run/model"));
    // 64 blocks of at most 1 KiB; a signal that would end the program is ignored.
    let script = "trap '' XFSZ; ulimit -f 64; exec \"$@\"";
    let done = place.start_as(&["sh", "-c", script, "sh"], &["train", "--resume", "run", "--quiet"]).end();
    nothing_was_lost(&place, done.code, &done.stderr);
}

#[test]
fn other_data_of_the_same_size_do_not_go_on_with_a_run() {
    let place = Place::new(&SMALL);
    place.succeed(&["train", "run.toml", "--quiet"]);
    let data = place.read("train.jsonl");
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
    fs::remove_dir_all(place.path("run/checkpoints/step-24")).unwrap();
    place.write("train.jsonl", swapped);
    let message = place.refuse(2, &["train", "--resume", "run", "--quiet"]);
    assert!(message.contains("data.train: tokens or labels are not those of "), "{message}");
    place.write("train.jsonl", data);
    place.succeed(&["train", "--resume", "run", "--quiet"]);
}
