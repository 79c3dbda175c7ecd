//! Devices in other processes are devices like all others: a run with some of them ends with the bits of one that has all of
//! its devices in its own process, whoever refuses is dropped by all, and a process that is killed is a device that is lost.

mod common;

use common::Watchdog;
use plimsoll_core::{Event, Exit, Record, RunStatus};
use plimsoll_device::probe::Cpu;
use plimsoll_train::config::RunFile;
use plimsoll_train::remote::host::Host;
use plimsoll_train::remote::streams::{Streams, TcpWires, serve};
use plimsoll_train::remote::{Channel, Elsewhere, Hosts, Wires};
use plimsoll_train::session::start::{Outcome, Run};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::{fs, io};

/// Where a process that is started to be a host finds the test.
const HOST_OF: &str = "PLIMSOLL_TEST_HOST_OF";

/// A process, and the way to it.
type Reached = (Child, Arc<Way>);

/// The way to a process that stands still, perhaps, when it is asked for something.
struct Way {
    streams: Streams<UnixStream>,
    process: u32,
    stops_at: Option<&'static str>,
}

impl Channel for Way {
    fn call(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        // The words behind their length.
        let asks = |what: &str| request[8..].starts_with(format!("{{\"{what}\":").as_bytes());
        if self.stops_at.is_some_and(asks) {
            signal(self.process, "-STOP");
        }
        self.streams.call(request)
    }

    fn aside(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        self.streams.aside(request)
    }
}

fn signal(process: u32, signal: &str) {
    assert!(Command::new("kill").args([signal, &process.to_string()]).status().expect("kill is there").success());
}

/// A process for each device; killed when the [`End`] of the run is dropped, or before.
struct Processes {
    folder: tempfile::TempDir,
    wires: Arc<TcpWires>,
    children: Mutex<HashMap<String, Reached>>,
    started: AtomicU64,
    /// A device whose process stands still when it is asked for this.
    stops: Option<(&'static str, &'static str)>,
}

impl Processes {
    fn new() -> Arc<Processes> {
        Processes::that_stop(None)
    }

    fn that_stop(stops: Option<(&'static str, &'static str)>) -> Arc<Processes> {
        let folder = tempfile::tempdir().expect("a folder");
        let wires = TcpWires::listen("127.0.0.1:0").expect("a port");
        Arc::new(Processes { folder, wires, children: Mutex::default(), started: AtomicU64::new(0), stops })
    }

    fn signal(&self, device: &str, name: &str) {
        signal(self.children.lock().unwrap()[device].0.id(), name);
    }

    /// Kills the process of a device; there is another as soon as somebody asks for it.
    fn start_anew(&self, device: &str) {
        let (mut child, _) = self.children.lock().unwrap().remove(device).expect("it has one");
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
    }
}

/// Ends the processes of a run: what it has left behind, and who asks for devices that were lost, know them for longer.
struct End(Arc<Processes>);

impl Drop for End {
    fn drop(&mut self) {
        for (child, _) in self.0.children.lock().unwrap().values_mut() {
            child.kill().expect("it is ours");
            child.wait().expect("it is ours");
        }
    }
}

impl Hosts for Processes {
    fn channel(&self, device: &str) -> io::Result<Arc<dyn Channel>> {
        let mut children = self.children.lock().unwrap();
        if let Some((_, channel)) = children.get(device) {
            return Ok(channel.clone());
        }
        let socket = self.folder.path().join(self.started.fetch_add(1, Ordering::Relaxed).to_string());
        let listener = UnixListener::bind(&socket)?;
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--exact", "a_process_that_is_a_host_of_other_tests", "--nocapture"]);
        let child = command.env(HOST_OF, &socket).stdout(Stdio::null()).spawn()?;
        let (asked, aside) = (listener.accept()?.0, listener.accept()?.0);
        let stops_at = self.stops.filter(|(of, _)| *of == device).map(|(_, what)| what);
        let channel = Arc::new(Way { streams: Streams::new(asked, aside), process: child.id(), stops_at });
        children.insert(device.to_owned(), (child, channel.clone()));
        Ok(channel)
    }

    fn wires(&self) -> Arc<dyn Wires> {
        self.wires.clone()
    }
}

/// Nothing by itself.
#[test]
fn a_process_that_is_a_host_of_other_tests() {
    let Some(socket) = std::env::var_os(HOST_OF) else { return };
    let wires = TcpWires::listen("127.0.0.1:0").expect("a port");
    let host = Host::new(wires).expect("a thread");
    let connect = || UnixStream::connect(&socket).expect("the test listens");
    let (asked, aside) = (connect(), connect());
    serve(&host, asked, aside);
}

/// The folder of a test that runs in a process of its own, which what it holds is measured in.
const FOLDER_OF: &str = "PLIMSOLL_TEST_FOLDER_OF";

/// Runs a test of this name in such a process, with rates as if they had been measured: plans are the same everywhere. In
/// that process it gives the folder.
fn alone(test: &str) -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os(FOLDER_OF) {
        return Some(folder.into());
    }
    let folder = tempfile::tempdir().expect("a folder");
    let cpu = Cpu::read();
    let entry = |threads: u32| {
        json!({
            "plimsoll": env!("CARGO_PKG_VERSION"), "device": "cpu", "model": cpu.model, "features": cpu.features,
            "threads": threads,
            "rates": {
                "f32_flops": 5e10, "bf16_flops": 5e10, "memory_bytes_per_second": 2e10, "op_seconds": 2e-6,
                "host_link": {"bytes_per_second": 1e10, "latency_seconds": 2e-6}, "measured": true,
            },
        })
    };
    let known: Vec<Value> = (1..=cpu.threads).map(entry).collect();
    fs::write(folder.path().join("devices.json"), Value::from(known).to_string()).expect("it can be written");
    let mut command = Command::new(std::env::current_exe().expect("it runs"));
    command.args(["--exact", test, "--nocapture"]).env(FOLDER_OF, folder.path()).env("PLIMSOLL_CACHE", folder.path());
    assert!(command.status().expect("it starts").success(), "{test}");
    None
}

/// Where runs have the same devices, near and far.
fn devices(far: &[&str]) -> String {
    let device = |(name, mib, pace): (&str, u32, f64)| {
        let host = if far.contains(&name) { format!("host-{name}/") } else { String::new() };
        format!("{host}virtual:{name}={mib}MiB@{pace}::10GB/s+10us")
    };
    [("a", 120, 0.8), ("b", 110, 0.4), ("c", 100, 0.2)].map(device).join(",")
}

fn run_file(folder: &Path, devices: &str, steps: u32) -> RunFile {
    let settings = [
        "run.team=all",
        "run.heartbeat_seconds=2",
        "run.threads=1",
        "train.batch_tokens=768",
        "train.eval_every=4",
        "train.save_every=3",
    ];
    let own = [
        format!("run.dir={}", folder.display()),
        format!("run.devices={devices},host=1MiB"),
        format!("train.steps={steps}"),
    ];
    let all = settings.iter().map(|setting| (*setting).to_owned()).chain(own);
    RunFile::load(None, &all.collect::<Vec<_>>()).expect("the settings are good")
}

/// What a run came to.
struct Left {
    outcome: Outcome,
    /// Of every step, and of the evaluations.
    losses: Vec<f64>,
    model: Vec<u8>,
}

/// Trains, and tells `each` every event.
fn train(folder: &Path, far: &[&str], injections: &[&str], mut each: impl FnMut(&Event, &Processes)) -> Left {
    let (outcome, losses) = train_until(folder, far, injections, 8, |event, hosts| {
        each(event, hosts);
        false
    });
    assert_eq!(outcome.result.status, RunStatus::Done);
    let model = fs::read(folder.join("model/model.safetensors")).expect("the model was saved");
    Left { outcome, losses, model }
}

/// Trains for so many steps, or until `each`, which is told every event, says that it is enough. With what was left come the
/// losses of steps and evaluations.
fn train_until(
    folder: &Path,
    far: &[&str],
    injections: &[&str],
    steps: u32,
    mut each: impl FnMut(&Event, &Processes) -> bool,
) -> (Outcome, Vec<f64>) {
    let hosts = Processes::new();
    let _end = End(hosts.clone());
    let mut run = planned(&hosts, run_file(folder, &devices(far), steps));
    assert_eq!(run.prepared().planned.plan.team.len(), 3);
    run.rehearse(injections.iter().map(|text| text.parse().expect("an injection")).collect()).expect("it can happen");
    let (mut losses, stop) = (Vec::new(), AtomicBool::new(false));
    let mut watch = |record: &Record| {
        if let Event::Step { loss, .. } | Event::Evaluation { loss, .. } = &record.event {
            losses.push(*loss);
        }
        if each(&record.event, &hosts) {
            stop.store(true, Ordering::Relaxed);
        }
    };
    let outcome = run.start(&mut watch, &stop).unwrap_or_else(|failure| panic!("{failure}"));
    (outcome, losses)
}

/// A run on devices some of which are in those processes.
fn planned(hosts: &Arc<Processes>, mut file: RunFile) -> Run {
    file.elsewhere = Elsewhere::by(hosts.clone());
    let run = Run::new(file).unwrap_or_else(|failure| panic!("{failure}"));
    assert!(run.prepared().planned.plan.fits);
    run
}

fn same_experiment(one: &Left, other: &Left) {
    assert_eq!(one.losses.len(), other.losses.len());
    for (one, other) in one.losses.iter().zip(&other.losses) {
        assert!((one - other).abs() <= 1e-4 * one.abs(), "{one} and {other}");
    }
}

#[test]
fn a_run_over_several_processes_ends_with_the_bits_of_one() {
    let _watchdog = Watchdog::new();
    let Some(place) = alone("a_run_over_several_processes_ends_with_the_bits_of_one") else { return };
    let here = train(&place.join("here"), &[], &[], |_, _| {});
    let there = train(&place.join("there"), &["b", "c"], &[], |_, _| {});
    let recipes = |left: &Left| -> Vec<_> {
        left.outcome.result.team.iter().map(|member| (member.sequences, member.recipe.clone())).collect()
    };
    assert_eq!(recipes(&here), recipes(&there));
    assert_eq!(here.losses, there.losses);
    assert!(here.model == there.model);
    // Each host's line is held, as it was measured there.
    for device in &there.outcome.result.memory {
        let measured = device.measured_bytes.expect("the process says");
        assert!(measured <= device.budget_bytes, "{device:?}");
        assert_eq!(device.arena_measured_bytes, device.arena_bytes, "{device:?}");
    }
    // All of them elsewhere.
    let all = train(&place.join("all"), &["a", "b", "c"], &[], |_, _| {});
    assert_eq!(here.losses, all.losses);
    assert!(here.model == all.model);
}

#[test]
fn what_a_device_elsewhere_refuses_is_dropped_by_all_and_done_again() {
    let _watchdog = Watchdog::new();
    let Some(place) = alone("what_a_device_elsewhere_refuses_is_dropped_by_all_and_done_again") else { return };
    let plain = train(&place.join("plain"), &[], &[], |_, _| {});
    let refusals = [
        "host-b/virtual:b/2:backward:9",
        "host-c/virtual:c/3:norm",
        "host-b/virtual:b/4:update:3",
        "virtual:a/5:begin",
    ];
    let left = train(&place.join("refused"), &["b", "c"], &refusals, |_, _| {});
    let devices: Vec<_> = left.outcome.result.retreats.iter().map(|retreat| retreat.device.clone()).collect();
    assert_eq!(devices, ["host-b/virtual:b", "host-c/virtual:c", "host-b/virtual:b", "virtual:a"]);
    same_experiment(&plain, &left);
}

#[test]
fn a_process_that_is_killed_or_stands_still_is_a_device_that_is_lost() {
    let _watchdog = Watchdog::new();
    let Some(place) = alone("a_process_that_is_killed_or_stands_still_is_a_device_that_is_lost") else { return };
    let plain = train(&place.join("plain"), &[], &[], |_, _| {});
    for (number, (device, signal)) in
        [("host-b/virtual:b", "-KILL"), ("host-c/virtual:c", "-STOP"), ("host-a/virtual:a", "-KILL")].iter().enumerate()
    {
        let left = train(&place.join(format!("run-{number}")), &["a", "b", "c"], &[], |event, hosts| {
            if matches!(event, Event::Step { step: 3, .. }) {
                hosts.signal(device, signal);
            }
        });
        let lost: Vec<_> = left.outcome.result.lost.iter().map(|lost| lost.device.clone()).collect();
        assert_eq!(lost, [*device]);
        same_experiment(&plain, &left);
    }
}

#[test]
fn a_process_that_stands_still_while_it_is_opened_or_takes_its_seat_is_a_device_that_is_lost() {
    let _watchdog = Watchdog::new();
    let Some(place) =
        alone("a_process_that_stands_still_while_it_is_opened_or_takes_its_seat_is_a_device_that_is_lost")
    else {
        return;
    };
    let run = |name: &str, devices: &str, stops| {
        let hosts = Processes::that_stop(stops);
        let _end = End(hosts.clone());
        let mut file = run_file(&place.join(name), devices, 4);
        file.run.heartbeat_seconds = 1.5;
        let run = planned(&hosts, file);
        let mut signals = |record: &Record| {
            if stops.is_none() && matches!(record.event, Event::Step { step: 2, .. }) {
                hosts.signal("host-b/virtual:b", "-STOP");
            }
        };
        run.start(&mut signals, &AtomicBool::new(false))
    };
    for (name, far, device, asked) in
        [("opened", &["b", "c"][..], "host-b/virtual:b", "Open"), ("seated", &["c"], "host-c/virtual:c", "Join")]
    {
        let left = run(name, &devices(far), Some((device, asked))).unwrap_or_else(|why| panic!("{why}"));
        let lost: Vec<_> = left.result.lost.iter().map(|lost| (lost.device.as_str(), lost.step)).collect();
        assert_eq!((left.result.status, lost, left.result.steps), (RunStatus::Done, vec![(device, 0)], 4));
    }
    // Without any other the run stops, whenever it is.
    let only = "host-b/virtual:b=110MiB@0.4";
    for (name, stops) in [("alone", Some(("host-b/virtual:b", "Open"))), ("later", None)] {
        let why = run(name, only, stops).err().expect("nobody is left");
        assert_eq!(why.exit, Exit::Stopped, "{why}");
        assert!(why.to_string().contains("no other device works on this run"), "{why}");
    }
}

#[test]
fn a_process_that_is_started_anew_is_taken_in_again() {
    let _watchdog = Watchdog::new();
    let Some(place) = alone("a_process_that_is_started_anew_is_taken_in_again") else { return };
    // More than will be done: what it saves in the steps that are left is worth the way by a checkpoint.
    const STEPS: u32 = 4000;
    let (mut last, mut back) = (BTreeMap::new(), None);
    let (outcome, _) = train_until(&place.join("killed"), &["b", "c"], &[], STEPS, |event, hosts| {
        match event {
            Event::Step { step, loss, .. } => drop(last.insert(*step, *loss)),
            Event::Back { step, device, team } => {
                assert_eq!((device.as_str(), team.len()), ("host-b/virtual:b", 3));
                assert_eq!(*step, *last.keys().last().expect("some were done"), "between two steps");
                back = Some(*step);
            }
            _ => {}
        }
        if matches!(event, Event::Step { step: 3, .. }) && back.is_none() && last.len() == 3 {
            hosts.start_anew("host-b/virtual:b");
        }
        back.is_some_and(|back| last.contains_key(&(back + 4)))
    });
    let back = back.expect("it came back");
    assert_eq!(outcome.result.status, RunStatus::Stopped);
    let lost: Vec<_> = outcome.result.lost.iter().map(|lost| (lost.device.as_str(), lost.back_after)).collect();
    assert_eq!(lost, [("host-b/virtual:b", Some(back))]);
    let names: Vec<_> = outcome.result.team.iter().map(|member| member.device.as_str()).collect();
    assert_eq!(names, ["virtual:a", "host-b/virtual:b", "host-c/virtual:c"]);
    let mut plain = BTreeMap::new();
    train_until(&place.join("plain"), &[], &[], STEPS, |event, _| {
        if let Event::Step { step, loss, .. } = event {
            plain.insert(*step, *loss);
        }
        plain.len() == last.len()
    });
    assert!(plain.keys().eq(last.keys()));
    for (step, loss) in plain {
        assert!((loss - last[&step]).abs() <= 1e-4 * loss.abs(), "step {step}: {loss} and {}", last[&step]);
    }
}

#[test]
fn a_host_that_nothing_reaches_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let failure = Run::new(run_file(folder.path(), "host1/cpu", 8)).err().expect("there is no such host");
    assert_eq!(failure.exit, Exit::Input);
    assert!(
        failure.to_string().contains("run.devices: `host1/cpu` is on another host, and nothing here reaches"),
        "{failure}"
    );
}
