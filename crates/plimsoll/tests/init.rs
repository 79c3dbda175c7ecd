//! `plimsoll init`: the run file from flags and from a dialogue on a terminal, its plan, and a run with it.

use crate::common::{SMALL, Workspace, converse};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::process::{Command, Stdio};

/// Flags that answer every question for the model of a workspace.
const ANSWERS: [&str; 18] = [
    "--model",
    "./model",
    "--data",
    "train.jsonl",
    "--devices",
    "virtual:a=300MiB@0.5",
    "--allow",
    "lora",
    "--sequence",
    "32",
    "--batch-tokens",
    "256",
    "--steps",
    "3",
    "--run-dir",
    "first",
    "--out",
    "new.toml",
];

fn init<'a>(flags: &[&'a str]) -> Vec<&'a str> {
    [&["init", "--yes"], flags].concat()
}

/// Returns the answers with another value for a flag.
fn with(flag: &str, value: &'static str) -> Vec<&'static str> {
    let mut answers = ANSWERS.to_vec();
    let at = answers.iter().position(|word| *word == flag).expect("the flag is there");
    answers[at + 1] = value;
    answers
}

#[test]
fn run_file_from_flags_trains() {
    let workspace = Workspace::new(&SMALL);
    let shown = workspace.succeed(&init(&ANSWERS)).stdout;
    assert!(
        shown.ends_with("\nwritten: new.toml\nplan:    plimsoll plan new.toml\nstart:   plimsoll train new.toml\n")
    );
    let text = workspace.read("new.toml");
    assert!(text.contains("init = \"random\"") && text.contains("tokens, 200 documents, 1 file"), "{text}");
    let plan = workspace.succeed(&["plan", "new.toml"]).stdout;
    let recipe = |text: &str| text[text.find("\nrecipe: ").unwrap()..text.find("\nload line ").unwrap()].to_owned();
    assert_eq!(recipe(&shown), recipe(&plan));
    workspace.succeed(&["train", "new.toml", "--quiet"]);
    let result = workspace.json("first/result.json");
    assert_eq!((&result["status"], &result["steps"]), (&"done".into(), &3.into()), "{result}");
    // A second run in the same folder is refused before a file is written.
    let refusal = workspace.expect_refusal(2, &init(&with("--out", "other.toml")));
    assert!(refusal.contains("already holds a run"), "{refusal}");
    assert!(!workspace.path("other.toml").exists());
}

#[test]
fn existing_run_file_stays_without_force() {
    let workspace = Workspace::new(&SMALL);
    let before = workspace.read("run.toml");
    let refusal = workspace.expect_refusal(2, &init(&with("--out", "run.toml")));
    assert!(refusal.starts_with("error: run.toml exists\n  hint: ") && refusal.contains("--force"), "{refusal}");
    assert_eq!(workspace.read("run.toml"), before);
    workspace.succeed(&init(&[&with("--out", "run.toml")[..], &["--force"]].concat()));
    assert!(workspace.read("run.toml").starts_with("# Run file of Plimsoll"));
    assert!(workspace.expect_refusal(2, &init(&with("--out", "model"))).contains("model is a folder"));
    for (out, says) in [("train.jsonl", "training data"), ("model/config.json", "files of the model")] {
        let before = workspace.read(out);
        let refusal = workspace.expect_refusal(2, &init(&[&with("--out", out)[..], &["--force"]].concat()));
        assert!(refusal.contains(says), "{refusal}");
        assert_eq!(workspace.read(out), before);
    }
}

#[test]
fn questions_need_a_terminal() {
    let workspace = Workspace::new(&SMALL);
    let refusal = workspace.expect_refusal(2, &["init", "--model", "./model"]);
    assert!(refusal.contains("no terminal") && refusal.contains("plimsoll init --yes --model"), "{refusal}");
    let usage = workspace.run(&["init", "--yes"]);
    assert_eq!(usage.code, Some(2));
    assert!(usage.stderr.contains("--model") && usage.stderr.contains("--data"), "{}", usage.stderr);
    let usage = workspace.run(&init(&[&ANSWERS[..], &["--dir", "."]].concat()));
    assert_eq!(usage.code, Some(2));
    assert!(usage.stderr.contains("--dir"), "{}", usage.stderr);
}

#[test]
fn unusable_answers_write_no_file() {
    let workspace = Workspace::new(&SMALL);
    workspace.write("broken.jsonl", "{\"input_ids\": [1, 2]}\n{\"input_ids\": [1, 999]}\n");
    workspace.write("empty.jsonl", "");
    for (code, flag, value, says) in [
        (2, "--data", "missing.jsonl", "no file matches `missing.jsonl`"),
        (2, "--data", "broken.jsonl", "broken.jsonl:2: token 999 is outside"),
        (2, "--data", "empty.jsonl", "no document with something to predict"),
        (2, "--model", "./nowhere", "nowhere"),
        (2, "--devices", "cuda:77", "cuda:77"),
        (2, "--devices", "rtx3090", "`rtx3090` is a device on paper"),
        (2, "--allow", "nf5", "nf5"),
        (2, "--batch-tokens", "100", "--batch-tokens: 100 tokens in a step"),
        (2, "--out", "first/run.toml", "plimsoll train writes its own run.toml"),
        (2, "--out", "model/new.toml", "among the files of the model"),
        (3, "--devices", "cpu=20MiB", "does not fit"),
        // The processor, on which the run would fit, is not taken unless it is named.
        (3, "--devices", "virtual:a=20MiB@0.5", "or train on the processor: --devices cpu"),
    ] {
        let refusal = workspace.expect_refusal(code, &init(&with(flag, value)));
        assert!(refusal.contains(says), "{flag} {value}: {refusal}");
        assert!(!workspace.path("new.toml").exists(), "{flag} {value}");
    }
    // A preset has no tokenizer, so it takes no text.
    let mut text = with("--data", "train-text.jsonl");
    text[1] = "smollm2-135m";
    assert!(workspace.expect_refusal(2, &init(&text)).contains("smollm2-135m has no tokenizer"));
    workspace.succeed(&init(&with("--data", "train-text.jsonl")));
    assert!(workspace.read("new.toml").contains("format = \"text\""));
}

#[test]
fn refused_run_hints_commands_that_fit() {
    let workspace = Workspace::new(&SMALL);
    workspace.write("new.toml", "");
    let refusal = workspace.expect_refusal(3, &init(&[&with("--devices", "cpu=20MiB")[..], &["--force"]].concat()));
    let (_, command) = refusal.split_once(": plimsoll ").unwrap_or_else(|| panic!("{refusal}"));
    let words: Vec<&str> = command.lines().next().unwrap().split(' ').collect();
    workspace.succeed(&words);
    assert!(workspace.read("new.toml").starts_with("# Run file of Plimsoll"));
}

#[test]
fn dialogue_writes_the_run_file() {
    let workspace = Workspace::new(&SMALL);
    let answers = [
        ("Devices?", "virtual:a=300MiB@0.5\r"),
        ("What may be given up", "\r"),
        ("Model?", "another\r"),
        ("Which one?", "./nowhere\r"),
        ("no such directory", "\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}model\r"),
        ("Training data?", "train.jsonl\r"),
        ("200 documents", ""),
        ("Run folder?", "\r"),
        ("Run file?", "new.toml\r"),
        ("write new.toml?", "\r"),
    ];
    let flags = ["init", "--sequence", "32", "--batch-tokens", "256", "--steps", "2"];
    let (code, screen) = converse(&workspace, &flags, &answers);
    assert_eq!(code, Some(0), "{screen}");
    assert!(screen.contains("smollm2-135m") && screen.contains("tok/s (simulated)"), "{screen}");
    assert!(screen.contains("start:   plimsoll train new.toml"), "{screen}");
    // The command that repeats the answers gives the same file.
    let (_, again) = screen.split_once("again:   plimsoll ").unwrap_or_else(|| panic!("{screen}"));
    let again: Vec<&str> = again.trim().split(' ').collect();
    let written = workspace.read("new.toml");
    workspace.write("new.toml", "");
    workspace.succeed(&again);
    assert_eq!(workspace.read("new.toml"), written);
    workspace.succeed(&["train", "new.toml", "--quiet"]);
    assert_eq!(workspace.json("runs/model/result.json")["steps"], 2);
}

#[test]
fn unusable_flags_are_refused_before_questions() {
    let workspace = Workspace::new(&SMALL);
    std::fs::create_dir_all(workspace.path("taken/checkpoints")).unwrap();
    for (flag, value, says) in [
        ("--devices", "cuda:77", "cuda:77"),
        ("--devices", "rtx3090", "is a device on paper"),
        ("--out", "run.toml", "run.toml exists"),
        ("--run-dir", "taken", "already holds a run"),
        ("--budget", "much", "much"),
    ] {
        let (code, screen) = converse(&workspace, &["init", flag, value], &[]);
        assert_eq!(code, Some(2), "{flag} {value}: {screen}");
        let asks = screen.contains("Devices?") || screen.contains("given up");
        assert!(screen.contains(says) && !asks, "{flag} {value}: {screen}");
    }
}

#[test]
fn signal_at_a_question_restores_terminal() {
    let workspace = Workspace::new(&SMALL);
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let terminal = OpenOptions::new().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    let end = || Stdio::from(terminal.try_clone().unwrap());
    let mut child = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .arg("init")
        .current_dir(workspace.path(""))
        .env("PLIMSOLL_CACHE", workspace.path("cache"))
        .stdin(end())
        .stdout(end())
        .stderr(end())
        .spawn()
        .unwrap();
    let is_usable = || tcgetattr(&terminal).unwrap().local_modes.contains(LocalModes::ICANON | LocalModes::ECHO);
    let mut master = File::from(master);
    let (mut screen, mut some) = (String::new(), [0; 4096]);
    while !screen.contains("Devices?") || is_usable() {
        let count = master.read(&mut some).unwrap();
        screen += &String::from_utf8_lossy(&some[..count]);
    }
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(4), "{screen}");
    assert!(is_usable());
    assert!(!workspace.path("new.toml").exists());
}

#[test]
fn interrupted_dialogue_writes_nothing() {
    let workspace = Workspace::new(&SMALL);
    let flags = [&["init"], &ANSWERS[..]].concat();
    let (code, screen) = converse(&workspace, &flags, &[("write new.toml?", "\u{3}")]);
    assert_eq!(code, Some(4), "{screen}");
    assert!(screen.contains("stopped: no run file was written"), "{screen}");
    let (code, screen) = converse(&workspace, &flags, &[("write new.toml?", "n\r")]);
    assert_eq!(code, Some(4), "{screen}");
    let (code, screen) = converse(&workspace, &["init"], &[("Devices?", "\u{1b}")]);
    assert_eq!(code, Some(4), "{screen}");
    assert!(!workspace.file_names("").iter().any(|name| name.starts_with("new.toml")));
}
