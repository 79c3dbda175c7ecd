//! Tests of the list of runs and of champions.

use super::champions::{ChampionFile, ChampionKey};
use super::*;
use crate::report::testing::{START, TestRun};
use std::fs;
use std::os::unix::fs::PermissionsExt;

const AT: f64 = START + 1000.0;

fn run(tokens_per_second: f64) -> TestRun {
    TestRun { tokens_per_second, ..TestRun::default() }
}

fn champions(folder: &Path) -> ChampionFile {
    let (file, notes) = ChampionFile::update(folder, AT).unwrap();
    assert!(notes.is_empty(), "{notes:?}");
    file
}

#[test]
fn runs_are_listed_newest_first() {
    let folder = tempfile::tempdir().unwrap();
    run(1000.0).write(folder.path(), "old");
    TestRun { start: START + 500.0, ended: None, ..TestRun::default() }.write(folder.path(), "new");
    TestRun { start: START + 100.0, device: "virtual:a=64MiB@0.5".into(), ..TestRun::default() }
        .write(&folder.path().join("sweep"), "middle");
    fs::create_dir(folder.path().join("empty")).unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    let list = RunList::read(folder.path(), AT).unwrap();
    let names: Vec<&str> = list.runs.iter().map(|run| run.folder.rsplit('/').next().unwrap()).collect();
    assert_eq!((names, list.notes.len()), (vec!["new", "middle", "old"], 0));
    let old = &list.runs[2];
    assert_eq!((old.state, old.tokens_per_second, old.eval_loss), (RunState::Done, Some(1000.0), Some(1.25)));
    assert_eq!((old.measured_peak_bytes, old.peak_device.as_deref()), (Some(Bytes::mib(39)), Some("cpu")));
    assert!(list.runs[1].simulated && list.table().contains("5.00 k (simulated)"), "{}", list.table());
    let line = list.table().lines().last().unwrap().split_whitespace().skip(1).collect::<Vec<_>>().join(" ");
    assert_eq!(line, "done llama cpu - 20/40 1.1000 1.2500 1.00 k 39.00 MiB");
    // Nothing was written.
    assert!(!folder.path().join("champions.json").exists());
}

#[test]
fn unreadable_runs_become_notes() {
    let folder = tempfile::tempdir().unwrap();
    run(1000.0).write(folder.path(), "good");
    fs::create_dir_all(folder.path().join("bad/events.jsonl")).unwrap();
    let list = RunList::read(folder.path(), AT).unwrap();
    assert_eq!((list.runs.len(), list.notes.len()), (1, 1));
    assert!(list.notes[0].contains("bad: cannot read events.jsonl"), "{:?}", list.notes);
    let refused = RunList::read(&folder.path().join("missing"), AT).unwrap_err();
    assert!(refused.message.contains("missing: cannot list its runs"), "{refused}");
}

#[test]
fn fastest_completed_run_of_a_kind_is_champion() {
    let folder = tempfile::tempdir().unwrap();
    run(1000.0).write(folder.path(), "slow");
    run(3000.0).write(folder.path(), "fast");
    TestRun { ended: Some("stopped"), ..run(9000.0) }.write(folder.path(), "stopped");
    TestRun { model: "/models/other".into(), ..run(10.0) }.write(folder.path(), "other");
    let simulated = TestRun { device: "virtual:a=64MiB@0.5".into(), ..run(50_000.0) };
    simulated.write(folder.path(), "simulated");
    let file = champions(folder.path());
    let found: Vec<(&str, bool, f64)> = file
        .champions
        .iter()
        .map(|champion| (&*champion.key.model, champion.key.simulated, champion.tokens_per_second))
        .collect();
    assert_eq!(found, [("llama", false, 3000.0), ("llama", true, 50_000.0), ("other", false, 10.0)]);
    assert_eq!(file.champions[1].key.devices, ["virtual:a=64MiB@0.5 (simulated on A Processor)"]);
    let list = RunList::read(folder.path(), AT).unwrap();
    let marked: Vec<bool> = ["slow", "fast", "stopped", "other", "simulated"]
        .map(|name| list.runs.iter().find(|run| run.folder.ends_with(&format!("/{name}"))).unwrap().champion)
        .to_vec();
    assert_eq!(marked, [false, true, false, true, true]);
}

#[test]
fn champion_outlives_its_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = run(3000.0).write(folder.path(), "run");
    let before = champions(folder.path());
    let champion = &before.champions[0];
    assert_eq!(champion.run_file, fs::read_to_string(path.join("run.toml")).unwrap());
    assert_eq!(champion.plan["devices"][0]["arena_bytes"], 16 << 20);
    assert_eq!(champion.environment.as_ref().unwrap().processor, "A Processor");
    let expected = ChampionKey {
        model: "llama".into(),
        parameters: 12_345,
        method: "full".into(),
        rungs: vec![],
        precision: "f32".into(),
        sequence: 32,
        devices: vec!["cpu (A Processor)".into()],
        simulated: false,
    };
    assert_eq!(champion.key, expected);
    fs::remove_dir_all(&path).unwrap();
    assert_eq!(champions(folder.path()), before);
    // Where lines are wrapped depends on the length of the path.
    let text = before.text(folder.path()).split_whitespace().collect::<Vec<_>>().join(" ");
    let rest = format!("on cpu (A Processor) run {} (gone), peak 39.00 MiB kept in", path.display());
    assert!(text.starts_with(&format!("3.00 k tokens/s llama, full, f32, 32 tokens per sequence {rest}")), "{text}");
    // A slower run in the same folder does not replace it, a faster one does.
    run(2000.0).write(folder.path(), "run");
    assert_eq!(champions(folder.path()), before);
    assert!(!RunList::read(folder.path(), AT).unwrap().runs[0].champion);
    run(4000.0).write(folder.path(), "run");
    assert_eq!(champions(folder.path()).champions[0].tokens_per_second, 4000.0);
}

#[test]
fn runs_on_changing_devices_are_no_champions() {
    let folder = tempfile::tempdir().unwrap();
    let path = run(3000.0).write(folder.path(), "run");
    let mut result: serde_json::Value = serde_json::from_slice(&fs::read(path.join("result.json")).unwrap()).unwrap();
    result["lost"] = serde_json::json!([{"device": "cuda:1", "step": 3}]);
    fs::write(path.join("result.json"), result.to_string()).unwrap();
    assert_eq!(champions(folder.path()), ChampionFile::default());
    assert!(!folder.path().join("champions.json").exists());
}

#[test]
fn champions_file_is_private_and_never_repaired() {
    let folder = tempfile::tempdir().unwrap();
    run(3000.0).write(folder.path(), "run");
    let file = champions(folder.path());
    let path = folder.path().join("champions.json");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(ChampionFile::read(folder.path()).unwrap(), file);
    let later = fs::read_to_string(&path).unwrap().replacen("\"version\": 1", "\"version\": 2", 1);
    let other_form = "{\"version\": 2, \"best\": {}}";
    let cases = [
        (&*later, "version 2, expected 1"),
        (other_form, "version 2, expected 1"),
        ("{\"version\": 1", "damaged"),
        ("{\"version\": 1, \"champions\": 3}", "damaged"),
        ("", "damaged"),
    ];
    for (damaged, reason) in cases {
        fs::write(&path, damaged).unwrap();
        let refused = ChampionFile::update(folder.path(), AT).unwrap_err();
        let name = path.display().to_string();
        assert!(refused.message.starts_with(&name) && refused.message.contains(reason), "{refused}");
        assert!(refused.hints[0].contains(&format!("mv -n {name} {name}.set-aside")), "{refused}");
        assert_eq!(fs::read_to_string(&path).unwrap(), damaged);
        let list = RunList::read(folder.path(), AT).unwrap();
        assert!(list.notes[0].contains(reason) && list.runs.len() == 1, "{:?}", list.notes);
    }
}

/// Rewrites a file of a run.
fn edit(path: &Path, change: impl Fn(&str) -> String) {
    let text = fs::read_to_string(path).unwrap();
    let changed = change(&text);
    assert_ne!(changed, text);
    fs::write(path, changed).unwrap();
}

#[test]
fn runs_on_unknown_hardware_do_not_compete() {
    type Change = fn(&Path);
    let cases: [(&str, Change, &str); 4] = [
        (
            "cpu",
            |run| edit(&run.join("events.jsonl"), |log| log.replace("\"environment\"", "\"other\"")),
            "the hardware of cpu is not known",
        ),
        (
            "virtual:a=64MiB@0.5",
            |run| edit(&run.join("events.jsonl"), |log| log.replace("\"environment\"", "\"other\"")),
            "the processor that simulates virtual:a is not known",
        ),
        (
            "virtual:a=64MiB@0.5",
            |run| edit(&run.join("run.toml"), |text| text.replace("virtual:a=64MiB@0.5", "virtual:b=64MiB@0.5")),
            "size and pace of virtual:a are not known",
        ),
        (
            "cpu",
            |run| edit(&run.join("plan.json"), |plan| plan.replace("\"cpu\"", "\"pc1/cpu\"")),
            "the hardware of the remote device pc1/cpu is not recorded",
        ),
    ];
    for (device, change, reason) in cases {
        let folder = tempfile::tempdir().unwrap();
        let path = TestRun { device: device.into(), ..run(3000.0) }.write(folder.path(), "run");
        assert_eq!(champions(folder.path()).champions.len(), 1);
        fs::remove_file(folder.path().join("champions.json")).unwrap();
        change(&path);
        let (file, notes) = ChampionFile::update(folder.path(), AT).unwrap();
        assert_eq!(
            (file, notes),
            (ChampionFile::default(), vec![format!("{}: is not compared: {reason}", path.display())])
        );
    }
}

/// Returns the number of logs below a folder that this process has open.
fn open_logs(folder: &Path) -> usize {
    let links = fs::read_dir("/proc/self/fd").unwrap().filter_map(|link| fs::read_link(link.ok()?.path()).ok());
    links.filter(|target| target.starts_with(folder) && target.ends_with("events.jsonl")).count()
}

#[test]
fn one_run_is_open_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a", "b", "c"] {
        run(1000.0).write(folder.path(), name);
    }
    let place = folder.path().canonicalize().unwrap();
    let mut runs = 0;
    for run in open_runs(folder.path()).unwrap() {
        assert_eq!((run.is_ok(), open_logs(&place)), (true, 1));
        runs += 1;
    }
    assert_eq!((runs, open_logs(&place)), (3, 0));
}

#[test]
fn updates_of_champions_wait_for_each_other() {
    let folder = tempfile::tempdir().unwrap();
    run(3000.0).write(folder.path(), "run");
    let held = fs::File::open(folder.path()).unwrap();
    held.lock().unwrap();
    let place = folder.path().to_owned();
    let update = std::thread::spawn(move || champions(&place));
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert!(!update.is_finished() && !folder.path().join("champions.json").exists());
    drop(held);
    assert_eq!(update.join().unwrap().champions.len(), 1);
}
