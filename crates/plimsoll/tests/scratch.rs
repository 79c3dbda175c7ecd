//! A scratch file where memory is short: the files of the plain run, bit for bit, also after `kill -9`; nothing is left
//! behind, and a disk that has no room says so before anything runs.

mod common;

use common::{Place, SMALL, Shape};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

/// A model whose state is most of what a run holds.
const WIDE: Shape = Shape { hidden: 384, steps: 6, batch_sequences: 2, save_every: 2, threads: "1", ..SMALL };

/// The model that a run made, and its last checkpoint's tensors.
fn made(place: &Place, run: &str) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = place.files(&format!("{run}/model"));
    files.extend(place.files(&format!("{run}/checkpoints/step-{}", WIDE.steps)));
    files.retain(|path, _| path.extension().is_some_and(|extension| extension == "safetensors"));
    assert!(files.len() >= 2, "{:?}", files.keys());
    files
}

/// The predicted peak of a device where everything is as it likes, in MiB, as a run counts it that is about to begin.
fn least(place: &Place, devices: &str) -> u64 {
    let refusal = place.run(&train(devices, "run.dir=asked")).refusal(3);
    let (_, from) = refusal.split_once("it fits from ").expect("a larger load line would do");
    from.split_once(' ').unwrap().0.parse::<f64>().unwrap() as u64
}

/// The devices of the command that a refusal gives for a scratch file.
fn with_file(refusal: &str) -> String {
    let hint =
        refusal.lines().find(|line| line.contains(" in a scratch file: ")).unwrap_or_else(|| panic!("{refusal}"));
    let (_, words) = hint.split_once("--devices ").expect("devices have the file's load line");
    words.split(' ').next().unwrap().trim_matches('\'').to_owned()
}

/// Devices that are short by so many MiB, with the file that a refusal names.
fn short(place: &Place, tiny: &str, by: u64, devices: impl Fn(u64) -> String) -> String {
    let devices = devices(least(place, tiny) - by);
    with_file(&place.run(&train(&devices, "run.dir=asked")).refusal(3))
}

fn train<'a>(devices: &'a str, run: &'a str) -> Vec<&'a str> {
    let pinned = ["--set", "recipe.micro_batch=2", "--set", "run.fallback=none", "--quiet"];
    [&["train", "run.toml", "--devices", devices, "--set", run][..], &pinned].concat()
}

fn on_the_processor(place: &Place) -> String {
    short(place, "cpu=1MiB", 12, |mib| format!("cpu={mib}MiB"))
}

#[test]
fn a_run_with_a_scratch_file_makes_the_files_of_the_plain_run() {
    let place = Place::new(&WIDE);
    place.succeed(&train("cpu", "run.dir=plain"));
    let plain = made(&place, "plain");
    // The host has room for windows, not for what the device lacks.
    let beside = short(&place, "virtual:a=1MiB@0.5,host=1MiB", 24, |mib| format!("virtual:a={mib}MiB@0.5,host=16MiB"));
    for (name, devices) in [("on-cpu", on_the_processor(&place)), ("beside", beside)] {
        assert!(devices.contains(",file="), "{devices}");
        let run = format!("run.dir={name}");
        place.succeed(&train(&devices, &run));
        assert!(made(&place, name) == plain, "{devices}");
        let plan = place.json(&format!("{name}/plan.json"));
        assert!(plan["file"]["arena_bytes"].as_u64() > Some(0), "{devices}: {plan}");
        assert_ne!(plan["recipe"]["offload"]["file"], Value::Null);
        let left = place.names(name);
        assert!(left.iter().all(|file| !file.contains("scratch")), "{left:?}");
    }
}

#[test]
fn a_run_with_a_scratch_file_goes_on_after_kill() {
    let place = Place::new(&WIDE);
    place.succeed(&train("cpu", "run.dir=plain"));
    let devices = on_the_processor(&place);
    let mut run = place.start(&train(&devices, "run.dir=run"));
    assert!(run.until(|| place.events("run").iter().any(|event| event["event"] == "checkpoint")), "it saves");
    run.kill();
    let left: Vec<String> = place.names("run");
    assert!(left.iter().all(|file| !file.contains("scratch")), "{left:?}");
    place.succeed(&["train", "--resume", "run", "--quiet"]);
    assert!(made(&place, "run") == made(&place, "plain"), "{devices}");
}

#[test]
fn a_disk_that_has_no_room_is_refused_before_anything_runs() {
    let can = Command::new("unshare").args(["-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).output();
    if !can.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: file systems cannot be mounted here");
        return;
    }
    let place = Place::new(&WIDE);
    let devices = on_the_processor(&place);
    std::fs::create_dir(place.path("small")).unwrap();
    let script = "mount -t tmpfs -o size=600k tmpfs small && exec \"$@\"";
    let args = [&train(&devices, "run.dir=run")[..], &["--set", "memory.file_dir=small"]].concat();
    let refusal = place.start_as(&["unshare", "-rm", "sh", "-c", script, "sh"], &args).end().refusal(2);
    assert!(refusal.contains("a scratch file of ") && refusal.contains("memory.file_dir"), "{refusal}");
}
