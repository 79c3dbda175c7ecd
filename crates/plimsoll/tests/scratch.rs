//! Offload to a scratch file: the run writes the same files, bit for bit, as one without, also after `kill -9`. The
//! scratch file is removed, and a full disk is reported before the run starts.

use crate::common::{SMALL, Shape, Workspace};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

/// A model with optimizer state that is most of the memory of its run.
const WIDE: Shape = Shape { hidden: 384, steps: 6, batch_sequences: 2, save_every: 2, threads: "1", ..SMALL };

/// Reads the tensors of the model and of the last checkpoint of a run.
fn model_and_checkpoint(workspace: &Workspace, run: &str) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = workspace.read_files(&format!("{run}/model"));
    files.extend(workspace.read_files(&format!("{run}/checkpoints/step-{}", WIDE.steps)));
    files.retain(|path, _| path.extension().is_some_and(|extension| extension == "safetensors"));
    assert!(files.len() >= 2, "{:?}", files.keys());
    files
}

/// Returns the smallest budget in MiB that fits without a scratch file, from the refusal of a run on these devices.
fn in_memory_peak_mib(workspace: &Workspace, devices: &str) -> u64 {
    let refusal = workspace.run(&train(devices, "run.dir=asked")).refusal(3);
    let (_, from) = refusal.split_once("it fits from ").expect("a larger budget fits");
    from.split_once(' ').unwrap().0.parse::<f64>().unwrap() as u64
}

/// Returns the value of `--devices` in the hint of a refusal that uses a scratch file.
fn devices_with_file(refusal: &str) -> String {
    let hint =
        refusal.lines().find(|line| line.contains(" in a scratch file: ")).unwrap_or_else(|| panic!("{refusal}"));
    let (_, words) = hint.split_once("--devices ").expect("the hint has --devices");
    words.split(' ').next().unwrap().trim_matches('\'').to_owned()
}

/// Returns devices that lack `by` MiB, with the scratch file that the refusal recommends.
fn devices_short_of(workspace: &Workspace, tiny: &str, by: u64, devices: impl Fn(u64) -> String) -> String {
    let devices = devices(in_memory_peak_mib(workspace, tiny) - by);
    devices_with_file(&workspace.run(&train(&devices, "run.dir=asked")).refusal(3))
}

fn train<'a>(devices: &'a str, run: &'a str) -> Vec<&'a str> {
    let pinned = ["--set", "recipe.micro_batch=2", "--set", "run.fallback=none", "--quiet"];
    [&["train", "run.toml", "--devices", devices, "--set", run][..], &pinned].concat()
}

fn cpu_with_scratch_file(workspace: &Workspace) -> String {
    devices_short_of(workspace, "cpu=1MiB", 12, |mib| format!("cpu={mib}MiB"))
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn scratch_file_run_matches_plain_run() {
    let workspace = Workspace::new(&WIDE);
    workspace.succeed(&train("cpu", "run.dir=plain"));
    let plain = model_and_checkpoint(&workspace, "plain");
    // The host has room for the windows of the scratch file, but not for the offloaded tensors.
    let beside = devices_short_of(&workspace, "virtual:a=1MiB@0.5,host=1MiB", 24, |mib| {
        format!("virtual:a={mib}MiB@0.5,host=16MiB")
    });
    for (name, devices) in [("on-cpu", cpu_with_scratch_file(&workspace)), ("beside", beside)] {
        assert!(devices.contains(",file="), "{devices}");
        let run = format!("run.dir={name}");
        workspace.succeed(&train(&devices, &run));
        assert!(model_and_checkpoint(&workspace, name) == plain, "{devices}");
        let plan = workspace.json(&format!("{name}/plan.json"));
        assert!(plan["file"]["arena_bytes"].as_u64() > Some(0), "{devices}: {plan}");
        assert_ne!(plan["recipe"]["offload"]["file"], Value::Null);
        let left = workspace.file_names(name);
        assert!(left.iter().all(|file| !file.contains("scratch")), "{left:?}");
    }
}

#[test]
fn scratch_file_run_resumes_after_kill() {
    let workspace = Workspace::new(&WIDE);
    workspace.succeed(&train("cpu", "run.dir=plain"));
    let devices = cpu_with_scratch_file(&workspace);
    let mut run = workspace.start(&train(&devices, "run.dir=run"));
    assert!(run.wait_until(|| workspace.events("run").iter().any(|event| event["event"] == "checkpoint")), "it saves");
    run.kill();
    let left: Vec<String> = workspace.file_names("run");
    assert!(left.iter().all(|file| !file.contains("scratch")), "{left:?}");
    workspace.succeed(&["train", "--resume", "run", "--quiet"]);
    assert!(model_and_checkpoint(&workspace, "run") == model_and_checkpoint(&workspace, "plain"), "{devices}");
}

#[test]
fn full_scratch_disk_is_refused_before_start() {
    let mount_output = Command::new("unshare").args(["-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).output();
    if !mount_output.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: file systems cannot be mounted here");
        return;
    }
    let workspace = Workspace::new(&WIDE);
    let devices = cpu_with_scratch_file(&workspace);
    std::fs::create_dir(workspace.path("small")).unwrap();
    let script = "mount -t tmpfs -o size=600k tmpfs small && exec \"$@\"";
    let args = [&train(&devices, "run.dir=run")[..], &["--set", "memory.file_dir=small"]].concat();
    let refusal = workspace.start_wrapped(&["unshare", "-rm", "sh", "-c", script, "sh"], &args).wait().refusal(2);
    assert!(refusal.contains("a scratch file of ") && refusal.contains("memory.file_dir"), "{refusal}");
}
