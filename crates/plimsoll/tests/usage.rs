//! Errors in flags, settings and run files: exit code 2, one clear message, no panic.

use std::path::Path;
use std::process::{Command, Output};

fn plimsoll(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_plimsoll")).args(args).current_dir(dir).env("NO_COLOR", "1").output().unwrap()
}

/// Returns the message of a command that is refused with exit code 2 and prints nothing to stdout.
fn refusal(dir: &Path, args: &[&str]) -> String {
    let output = plimsoll(dir, args);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "", "{args:?}");
    assert!(!stderr.contains("panic"), "{stderr}");
    stderr
}

#[test]
fn wrong_flag_suggests_the_right_one() {
    let dir = tempfile::tempdir().unwrap();
    let message = refusal(dir.path(), &["train", "--buget", "1GiB"]);
    assert!(message.contains("'--buget'") && message.contains("--budget"), "{message}");
    refusal(dir.path(), &["sail"]);
    refusal(dir.path(), &["train", "run.toml", "--resume", "runs/a"]);
    refusal(dir.path(), &["bench", "step", "--layers", "0"]);
    refusal(dir.path(), &["bench", "devices", "--duration", "3 moons"]);
    refusal(dir.path(), &["generate", "model", "--prompt", "x", "--top-p", "2"]);
    refusal(dir.path(), &["eval", "model"]);
}

#[test]
fn names_reach_terminal_escaped_and_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let name = format!("x\u{1b}]0;t\u{7}\u{9b}\u{202e}\u{200b}\n{}.toml", "n".repeat(1000));
    // Clap leaves out the sequence that begins with ESC.
    let shown = r"\u{9b}\u{202e}\u{200b}";
    for args in [&["train", &name][..], &[&name], &["plan", "--set", &name], &["plan", "--devices", &name]] {
        let message = refusal(dir.path(), args);
        assert!(message.contains(shown) && message.contains("nn…nn"), "{message}");
        assert!(!message.contains(['\u{1b}', '\u{7}', '\u{9b}', '\u{202e}', '\u{200b}']), "{message:?}");
    }
}

#[test]
fn help_exits_with_success() {
    let dir = tempfile::tempdir().unwrap();
    let commands: [&[&str]; 8] =
        [&[], &["train"], &["plan"], &["bench", "step"], &["join"], &["cluster"], &["verify"], &["leave"]];
    for words in commands {
        for args in [[words, &["--help"]].concat(), [&["help"], words].concat()] {
            let output = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
                .args(&args)
                .current_dir(dir.path())
                .env("PLIMSOLL_PYTHON", "/nonexistent/python3")
                .output()
                .unwrap();
            assert_eq!(output.status.code(), Some(0), "{args:?}");
            let help = String::from_utf8(output.stdout).unwrap();
            assert!(help.contains(["Usage: plimsoll", &words.join(" ")].join(" ").trim_end()), "{args:?}: {help}");
        }
    }
}

#[test]
fn run_file_errors_name_file_line_key() {
    let dir = tempfile::tempdir().unwrap();
    let write = |text: &str| std::fs::write(dir.path().join("run.toml"), text).unwrap();

    write("[model]\npath = \"m\"\n\n[train]\nstepz = 5\n");
    assert_eq!(
        refusal(dir.path(), &["train", "run.toml"]),
        "error: run.toml, line 5: unknown key `train.stepz`\n  hint: did you mean `train.steps`?\n"
    );
    write("[model]\npath = \"m\"\n[train]\nsteps = \"many\"\n");
    assert_eq!(
        refusal(dir.path(), &["plan", "run.toml"]),
        "error: run.toml, line 4: train.steps is \"many\", expected a whole number, 1 or more\n"
    );
    write("[model]\npath = \"m\"\n[train]\nsteps = 5\n");
    assert_eq!(
        refusal(dir.path(), &["train", "run.toml"]),
        "error: data.train is not set\n  hint: set data.train to a file, such as data.jsonl\n"
    );
    write("[model\n");
    assert!(refusal(dir.path(), &["train", "run.toml"]).starts_with("error: run.toml, line 1: "));
    std::fs::write(dir.path().join("run.toml"), [0xff, 0xfe, 0x00]).unwrap();
    assert!(refusal(dir.path(), &["train", "run.toml"]).starts_with("error: cannot read run.toml: "));
}

#[test]
fn missing_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    assert!(refusal(dir.path(), &["train", "nowhere.toml"]).starts_with("error: cannot read nowhere.toml: "));
    assert!(
        refusal(dir.path(), &["train", "--resume", "nowhere"])
            .starts_with("error: nowhere is no run folder: it has no run.toml\n  hint: ")
    );
    std::fs::create_dir(dir.path().join("early")).unwrap();
    std::fs::write(dir.path().join("early/events.jsonl"), "").unwrap();
    assert_eq!(
        refusal(dir.path(), &["train", "--resume", "early"]),
        "error: early: this run ended before it began to train, so there is nothing to resume\n  \
         hint: start it again: plimsoll train, with the run file and flags of that run\n"
    );
    assert!(
        refusal(dir.path(), &["train", "--plan", "nowhere.json"])
            .starts_with("error: cannot read the plan nowhere.json: ")
    );
    std::fs::write(dir.path().join("plan.json"), "{}").unwrap();
    assert!(refusal(dir.path(), &["train", "--plan", "plan.json"]).starts_with("error: plan.json is not a plan: "));
}

#[test]
fn invalid_settings_are_refused_with_key() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(
        refusal(dir.path(), &["train", "--set", "train.stepz=5"]),
        "error: command line: unknown key `train.stepz`\n  hint: did you mean `train.steps`?\n"
    );
    assert_eq!(
        refusal(dir.path(), &["train", "--set", "train.steps=lots"]),
        "error: command line: train.steps is \"lots\", expected a whole number, 1 or more\n"
    );
    let hint = "  hint: write --set section.key=value, such as --set train.steps=20\n";
    assert_eq!(
        refusal(dir.path(), &["plan", "--set", "train.steps"]),
        format!("error: --set train.steps: no `=` between key and value\n{hint}")
    );
    for nonsense in
        ["", "=", "=5", ".=5", "train=5", "train.=5", "a.b.c=5", "train.steps=[", "train.steps=\u{7}", "✓=✓"]
    {
        refusal(dir.path(), &["train", "--set", nonsense]);
    }
    assert!(
        refusal(dir.path(), &["train", "--budget", "lots"])
            .starts_with("error: command line: memory.budget is \"lots\", expected ")
    );
    assert!(
        refusal(dir.path(), &["train", "--devices", "gpu"])
            .starts_with("error: command line: run.devices: `gpu` is not a known device\n  hint: ")
    );
    assert!(refusal(dir.path(), &["train", "--allow", "16,2"]).starts_with("error: command line: memory.allow is "));
}

#[test]
fn json_output_includes_failures() {
    let dir = tempfile::tempdir().unwrap();
    let output = plimsoll(dir.path(), &["plan", "--json", "--set", "train.stepz=5"]);
    assert_eq!(output.status.code(), Some(2));
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        object,
        serde_json::json!({"error": {
            "exit": 2,
            "message": "command line: unknown key `train.stepz`",
            "hints": ["did you mean `train.steps`?"],
        }})
    );
    let output = plimsoll(dir.path(), &["bench", "step", "--threads", "99999"]);
    assert_eq!(output.status.code(), Some(2));
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let message = object["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("--threads: 99999 threads exceed the "), "{message}");
}
