//! Tests of the soak itself: its inputs repeat, and its verdicts notice faults.

use super::super::case::Rng;
use super::damage::damage;
use super::judge::{RunOutput, UserFiles, wrong_end, wrong_message};
use super::process::{Start, run};
use super::scenario::Oracle;
use super::{arguments, tokenizers};
use plimsoll_device::private_file;
use plimsoll_program::models::ModelType;
use serde_json::json;
use std::fs;
use std::path::Path;

/// Starts a shell script in place of the program.
fn ended(folder: &Path, script: &'static str) -> super::process::Ended {
    run(Path::new("/bin/true"), folder, &Start { script, ..Start::new(Vec::new()) }).unwrap()
}

#[test]
fn same_seed_gives_the_same_damage() {
    let folder = private_file::temporary_folder().unwrap();
    let file = folder.path().join("tokenizer.json");
    for number in 0..200 {
        let [one, two] = [(), ()].map(|()| {
            let _ = fs::remove_file(&file);
            fs::write(&file, tokenizers::tokenizer(ModelType::Llama).to_string()).unwrap();
            let others = [Path::new("Cargo.toml").to_owned()];
            let described = damage(&file, &others, Path::new("victim"), &mut Rng::new(3, number)).unwrap().description;
            let _ = fs::remove_dir_all(&file);
            (described, arguments::absurd_command(&["train.steps".into()], &mut Rng::new(3, number)))
        });
        assert_eq!(one, two);
    }
}

#[test]
fn undocumented_ends_are_faults() {
    let folder = private_file::temporary_folder().unwrap();
    for script in ["exit 1", "exit 101", "kill -SEGV $$", "exit 134"] {
        assert!(wrong_end(&ended(folder.path(), script), None).is_some(), "{script}");
    }
    for script in ["exit 0", "exit 2", "exit 3", "exit 4"] {
        assert!(wrong_end(&ended(folder.path(), script), None).is_none(), "{script}");
    }
    assert!(wrong_end(&ended(folder.path(), "exit 0"), Some("it must not")).is_some());
}

#[test]
fn empty_raw_and_unnamed_messages_are_faults() {
    let folder = private_file::temporary_folder().unwrap();
    let names = ["config.json".to_owned()];
    for script in ["exit 2", "echo 'error: no' >&2; exit 2", "printf 'error: config.json \\033[2J' >&2; exit 2"] {
        assert!(wrong_message(&ended(folder.path(), script), &names).is_some(), "{script}");
    }
    assert!(wrong_message(&ended(folder.path(), "echo 'error: config.json: no' >&2; exit 2"), &names).is_none());
}

#[test]
fn changed_files_and_results_are_faults() {
    let folder = private_file::temporary_folder().unwrap();
    let inner = folder.path().join("input");
    fs::create_dir(&inner).unwrap();
    fs::write(inner.join("run.toml"), "a").unwrap();
    let before = UserFiles::read(&inner).unwrap();
    fs::write(inner.join("new"), "").unwrap();
    assert_eq!(before.changed(&UserFiles::read(&inner).unwrap()), None);
    fs::write(inner.join("run.toml"), "b").unwrap();
    assert!(before.changed(&UserFiles::read(&inner).unwrap()).is_some());

    let output = |loss: f64, model: &str| {
        fs::create_dir_all(inner.join("out/model")).unwrap();
        fs::write(inner.join("out/result.json"), json!({"loss": {"last": loss}}).to_string()).unwrap();
        fs::write(inner.join("out/model/model.safetensors"), model).unwrap();
        RunOutput::read(&inner.join("out")).unwrap()
    };
    let (plain, near, far) = (output(5.0, "a"), output(5.0001, "b"), output(5.1, "a"));
    let differs = |other: &RunOutput, oracle| other.difference(&plain, oracle).is_some();
    assert!(!differs(&plain, Oracle::Same) && differs(&near, Oracle::Same) && differs(&far, Oracle::Near));
    assert!(!differs(&near, Oracle::Near) && !differs(&far, Oracle::Any));
}
