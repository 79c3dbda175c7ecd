//! Runs on remote devices, each in a process of its own: they end with the bits of a run on local devices, a refused step is
//! repeated by all, and a killed process is a lost device.

use crate::common::Watchdog;
use plimsoll_core::{Event, Exit, Record, RunStatus};
use plimsoll_device::probe::Cpu;
use plimsoll_train::config::RunConfig;
use plimsoll_train::device_server::{DeviceServer, serve};
use plimsoll_train::remote::sockets::{StreamChannel, TcpPeerNetwork};
use plimsoll_train::remote::{Channel, PeerNetwork, RemoteConnector, RemoteDevices};
use plimsoll_train::resolve::RunRequest;
use plimsoll_train::session::outcome::Outcome;
use plimsoll_train::session::start::Run;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{fs, io, thread};

/// Environment variable with the socket of the test that started a server process.
const SERVER_SOCKET: &str = "PLIMSOLL_TEST_SERVER_SOCKET";

/// A server process with its channel.
struct ServerProcess {
    child: Child,
    channel: Arc<PausingChannel>,
}

/// A channel that can pause its process when it sends a certain request.
struct PausingChannel {
    streams: StreamChannel<UnixStream>,
    process: u32,
    /// Name of the request that pauses the process.
    pause_at: Option<&'static str>,
}

impl Channel for PausingChannel {
    fn call(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        // The JSON of a request follows its length.
        let is_request = |name: &str| request[8..].starts_with(format!("{{\"{name}\":").as_bytes());
        if self.pause_at.is_some_and(is_request) {
            signal(self.process, "-STOP");
        }
        self.streams.call(request)
    }

    fn call_out_of_band(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        self.streams.call_out_of_band(request)
    }
}

fn signal(process: u32, signal: &str) {
    assert!(Command::new("kill").args([signal, &process.to_string()]).status().expect("kill is installed").success());
}

/// One server process per device, started on demand and killed when the [`KillOnDrop`] of the run is dropped.
struct ServerProcesses {
    folder: tempfile::TempDir,
    network: Arc<TcpPeerNetwork>,
    children: Mutex<HashMap<String, ServerProcess>>,
    started: AtomicU64,
    pause: Option<Pause>,
}

/// A device with the request at which its process is paused.
#[derive(Clone, Copy)]
struct Pause {
    device: &'static str,
    request: &'static str,
}

impl ServerProcesses {
    fn new(pause: Option<Pause>) -> Arc<ServerProcesses> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let network = TcpPeerNetwork::listen("127.0.0.1:0").expect("a free port");
        Arc::new(ServerProcesses { folder, network, children: Mutex::default(), started: AtomicU64::new(0), pause })
    }

    fn signal(&self, device: &str, name: &str) {
        signal(self.children.lock().unwrap()[device].child.id(), name);
    }

    /// Returns the address at which the process of a device accepts peers.
    fn address(&self, device: &str) -> SocketAddr {
        let request = b"\"GetAddress\"";
        let encoded = [&(request.len() as u64).to_le_bytes()[..], request].concat();
        let response = self.channel(device).and_then(|channel| channel.call(&encoded)).expect("the device responds");
        let response: Value = serde_json::from_slice(&response[8..]).expect("the response is JSON");
        response["Address"].as_str().and_then(|address| address.parse().ok()).expect("an address")
    }

    /// Kills the process of a device; the next request for the device starts another one.
    fn kill_process(&self, device: &str) {
        let mut server = self.children.lock().unwrap().remove(device).expect("the device has a process");
        server.kill();
    }
}

impl ServerProcess {
    fn kill(&mut self) {
        self.child.kill().expect("the test owns this process");
        self.child.wait().expect("the test owns this process");
    }
}

/// Kills the processes of a run. Threads of the run may still hold the processes themselves.
struct KillOnDrop(Arc<ServerProcesses>);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        self.0.children.lock().unwrap().values_mut().for_each(ServerProcess::kill);
    }
}

impl RemoteConnector for ServerProcesses {
    fn channel(&self, device: &str) -> io::Result<Arc<dyn Channel>> {
        let mut children = self.children.lock().unwrap();
        if let Some(server) = children.get(device) {
            return Ok(server.channel.clone());
        }
        let socket = self.folder.path().join(self.started.fetch_add(1, Ordering::Relaxed).to_string());
        let listener = UnixListener::bind(&socket)?;
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--exact", "remote::server_process_of_other_tests", "--nocapture"]);
        let child = command.env(SERVER_SOCKET, &socket).stdout(Stdio::null()).spawn()?;
        let streams = StreamChannel::new(listener.accept()?.0, listener.accept()?.0);
        let pause_at = self.pause.filter(|pause| pause.device == device).map(|pause| pause.request);
        let channel = Arc::new(PausingChannel { streams, process: child.id(), pause_at });
        children.insert(device.to_owned(), ServerProcess { child, channel: channel.clone() });
        Ok(channel)
    }

    fn peer_network(&self) -> Arc<dyn PeerNetwork> {
        self.network.clone()
    }
}

/// Runs a server process for another test; does nothing without its socket.
#[test]
fn server_process_of_other_tests() {
    let Some(socket) = std::env::var_os(SERVER_SOCKET) else { return };
    let network = TcpPeerNetwork::listen("127.0.0.1:0").expect("a free port");
    let server = DeviceServer::new(network).expect("a thread");
    let connect = || UnixStream::connect(&socket).expect("the test listens");
    let (requests, out_of_band) = (connect(), connect());
    serve(&server, requests, out_of_band);
}

/// Environment variable with the folder of a test that runs in a process of its own, in which memory is measured.
const TEST_FOLDER: &str = "PLIMSOLL_TEST_FOLDER";

/// Runs a test in a process of its own, with stored rates, so that plans are the same on every machine. Returns the folder in
/// that process, and `None` in the process that started it.
fn in_own_process(test: &str) -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os(TEST_FOLDER) {
        let folder = PathBuf::from(folder);
        fs::write(folder.join("began"), "").expect("the folder is writable");
        return Some(folder);
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
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
    let entries: Vec<Value> = (1..=cpu.threads).map(entry).collect();
    fs::write(folder.path().join("devices.json"), Value::from(entries).to_string()).expect("the folder is writable");
    let mut command = Command::new(std::env::current_exe().expect("the path of this program"));
    command.args(["--exact", &format!("remote::{test}"), "--nocapture", "--include-ignored"]);
    command.env(TEST_FOLDER, folder.path()).env("PLIMSOLL_CACHE", folder.path());
    assert!(command.status().expect("the process starts").success(), "{test}");
    assert!(folder.path().join("began").exists(), "no test has the name {test}");
    None
}

/// Returns the three devices of all runs; those in `remote` are on another host.
fn devices(remote: &[&str]) -> String {
    let device = |(name, mib, pace): (&str, u32, f64)| {
        let host = if remote.contains(&name) { format!("host-{name}/") } else { String::new() };
        format!("{host}virtual:{name}={mib}MiB@{pace}::10GB/s+10us")
    };
    [("a", 120, 0.8), ("b", 110, 0.4), ("c", 100, 0.2)].map(device).join(",")
}

fn run_request(folder: &Path, devices: &str, steps: u32) -> RunRequest {
    let settings = [
        "run.parallelism=data",
        "run.heartbeat_seconds=2",
        "run.threads=1",
        "train.batch_tokens=768",
        "train.eval_every=4",
        "train.save_every=3",
    ];
    let own = [
        format!("run.dir={}", folder.display()),
        format!("run.devices={devices},host=4KiB"),
        format!("train.steps={steps}"),
    ];
    let all = settings.iter().map(|setting| (*setting).to_owned()).chain(own);
    RunConfig::load(None, &all.collect::<Vec<_>>()).expect("valid settings").into()
}

/// Result of a finished run.
struct Finished {
    outcome: Outcome,
    /// Losses of all steps and evaluations.
    losses: Vec<f64>,
    model: Vec<u8>,
}

/// Trains for eight steps and passes every event to `on_event`.
fn train(
    folder: &Path,
    remote: &[&str],
    injections: &[&str],
    mut on_event: impl FnMut(&Event, &ServerProcesses),
) -> Finished {
    let run = train_until(folder, remote, injections, 8, |event, servers| {
        on_event(event, servers);
        false
    });
    finished(folder, run)
}

/// Returns the result of a run that has reached its end.
fn finished(folder: &Path, (outcome, losses): (Outcome, Vec<f64>)) -> Finished {
    assert_eq!(outcome.result.status, RunStatus::Done);
    let model = fs::read(folder.join("model/model.safetensors")).expect("the model was saved");
    Finished { outcome, losses, model }
}

/// Trains for `steps` steps, or until `on_event` returns true. Returns the losses of all steps and evaluations.
fn train_until(
    folder: &Path,
    remote: &[&str],
    injections: &[&str],
    steps: u32,
    on_event: impl FnMut(&Event, &ServerProcesses) -> bool,
) -> (Outcome, Vec<f64>) {
    let servers = ServerProcesses::new(None);
    let _kill = KillOnDrop(servers.clone());
    train_on(&servers, run_request(folder, &devices(remote), steps), injections, on_event)
}

/// Trains on the processes of `servers`, until `on_event` returns true.
fn train_on(
    servers: &Arc<ServerProcesses>,
    request: RunRequest,
    injections: &[&str],
    mut on_event: impl FnMut(&Event, &ServerProcesses) -> bool,
) -> (Outcome, Vec<f64>) {
    let mut run = planned(servers, request);
    assert_eq!(run.prepared().planned.plan.team.len(), 3);
    let injections = injections.iter().map(|text| text.parse().expect("a valid injection")).collect();
    run.inject_faults(injections).expect("the injected faults can happen");
    let (mut losses, stop) = (Vec::new(), AtomicBool::new(false));
    let mut observe = |record: &Record| {
        if let Event::Step { loss, .. } | Event::Evaluation { loss, .. } = &record.event {
            losses.push(*loss);
        }
        if on_event(&record.event, servers) {
            stop.store(true, Ordering::Relaxed);
        }
    };
    let outcome = run.start(&mut observe, &stop).unwrap_or_else(|failure| panic!("{failure}"));
    (outcome, losses)
}

/// Plans a run on remote devices in these processes.
fn planned(servers: &Arc<ServerProcesses>, mut request: RunRequest) -> Run {
    request.remote = RemoteDevices::via(servers.clone());
    let run = Run::new(request).unwrap_or_else(|failure| panic!("{failure}"));
    assert!(run.prepared().planned.plan.fits);
    run
}

fn assert_same_losses(one: &Finished, other: &Finished) {
    assert_eq!(one.losses.len(), other.losses.len());
    for (one, other) in one.losses.iter().zip(&other.losses) {
        assert!((one - other).abs() <= 1e-4 * one.abs(), "{one} and {other}");
    }
}

#[test]
fn remote_devices_give_identical_results() {
    let _watchdog = Watchdog::new();
    let Some(folder) = in_own_process("remote_devices_give_identical_results") else { return };
    let local = train(&folder.join("local"), &[], &[], |_, _| {});
    let mixed = train(&folder.join("mixed"), &["b", "c"], &[], |_, _| {});
    let recipes = |run: &Finished| -> Vec<_> {
        run.outcome.result.team.iter().map(|worker| (worker.sequences, worker.recipe.clone())).collect()
    };
    assert_eq!(recipes(&local), recipes(&mixed));
    assert_eq!(local.losses, mixed.losses);
    assert!(local.model == mixed.model);
    // Each process stays below its load line by its own measurement.
    for device in &mixed.outcome.result.memory {
        let measured = device.measured_bytes.expect("every process reports its memory");
        assert!(measured <= device.budget_bytes, "{device:?}");
        assert_eq!(device.arena_measured_bytes, device.arena_bytes, "{device:?}");
    }
    let remote = train(&folder.join("remote"), &["a", "b", "c"], &[], |_, _| {});
    assert_eq!(local.losses, remote.losses);
    assert!(local.model == remote.model);
}

/// Greeting of rank 1 to rank 0 of team 1, without a valid proof.
const UNPROVEN: &[u8] = b"plimsoll\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0................................................";

/// Number of strangers that connect to the ports of a run.
const STRANGERS: usize = 500;

/// Keeps strangers connected to `ports` until the run has ended: silent and slow ones, and ones that send another
/// protocol or a greeting without proof. Reports each round, and returns how many strangers were disconnected.
fn crowd_ports(ports: &[SocketAddr], round: &Sender<()>, ended: &AtomicBool) -> usize {
    let mut strangers: Vec<Option<TcpStream>> = (0..STRANGERS).map(|_| None).collect();
    let mut disconnected = 0;
    while !ended.load(Ordering::Relaxed) {
        for (number, stranger) in strangers.iter_mut().enumerate() {
            let (first, later): (&[u8], &[u8]) = match number % 4 {
                0 => (&[], &[]),
                1 => (b"plimsoll", &[0]),
                2 => (b"GET / HTTP/1.1\r\n\r\n", &[]),
                _ => (UNPROVEN, &[0xff; 32]),
            };
            match stranger {
                None => {
                    let connected = TcpStream::connect_timeout(&ports[number % ports.len()], Duration::from_millis(20));
                    *stranger = connected.ok().filter(|stream| stream.set_nonblocking(true).is_ok());
                    let _ = stranger.as_mut().map(|stream| stream.write_all(first));
                }
                Some(stream) => {
                    let _ = stream.write_all(later);
                    if !matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock) {
                        *stranger = None;
                        disconnected += 1;
                    }
                }
            }
        }
        let _ = round.send(());
        thread::sleep(Duration::from_millis(100));
    }
    disconnected
}

#[test]
fn strangers_on_wire_ports_change_nothing() {
    let _watchdog = Watchdog::new();
    let Some(folder) = in_own_process("strangers_on_wire_ports_change_nothing") else { return };
    let undisturbed = train(&folder.join("undisturbed"), &[], &[], |_, _| {});
    let servers = ServerProcesses::new(None);
    let _kill = KillOnDrop(servers.clone());
    let own = servers.network.address().parse().expect("an address");
    let ports = [own, servers.address("host-b/virtual:b"), servers.address("host-c/virtual:c")];
    let (ended, (round, rounds)) = (AtomicBool::new(false), channel());
    let disturbed = thread::scope(|scope| {
        let strangers = scope.spawn(|| crowd_ports(&ports, &round, &ended));
        rounds.recv().expect("strangers connect");
        let folder = folder.join("disturbed");
        let run = train_on(&servers, run_request(&folder, &devices(&["b", "c"]), 8), &[], |_, _| false);
        ended.store(true, Ordering::Relaxed);
        assert!(strangers.join().expect("strangers do not panic") > STRANGERS);
        finished(&folder, run)
    });
    assert!(disturbed.outcome.result.lost.is_empty(), "{:?}", disturbed.outcome.result.lost);
    assert_eq!(undisturbed.losses, disturbed.losses);
    assert!(undisturbed.model == disturbed.model);
}

#[test]
fn refused_step_on_remote_device_is_repeated() {
    let _watchdog = Watchdog::new();
    let Some(folder) = in_own_process("refused_step_on_remote_device_is_repeated") else { return };
    let undisturbed = train(&folder.join("undisturbed"), &[], &[], |_, _| {});
    let refusals = [
        "host-b/virtual:b/2:backward:9",
        "host-c/virtual:c/3:norm",
        "host-b/virtual:b/4:update:3",
        "virtual:a/5:begin",
    ];
    let refused = train(&folder.join("refused"), &["b", "c"], &refusals, |_, _| {});
    let devices: Vec<_> = refused.outcome.result.recoveries.iter().map(|recovery| recovery.device.clone()).collect();
    assert_eq!(devices, ["host-b/virtual:b", "host-c/virtual:c", "host-b/virtual:b", "virtual:a"]);
    assert_same_losses(&undisturbed, &refused);
}

#[test]
fn killed_or_paused_process_is_lost_device() {
    let _watchdog = Watchdog::new();
    let Some(folder) = in_own_process("killed_or_paused_process_is_lost_device") else { return };
    let undisturbed = train(&folder.join("undisturbed"), &[], &[], |_, _| {});
    for (number, (device, signal)) in
        [("host-b/virtual:b", "-KILL"), ("host-c/virtual:c", "-STOP"), ("host-a/virtual:a", "-KILL")].iter().enumerate()
    {
        let run = train(&folder.join(format!("run-{number}")), &["a", "b", "c"], &[], |event, servers| {
            if matches!(event, Event::Step { step: 3, .. }) {
                servers.signal(device, signal);
            }
        });
        let lost: Vec<_> = run.outcome.result.lost.iter().map(|lost| lost.device.clone()).collect();
        assert_eq!(lost, [*device]);
        assert_same_losses(&undisturbed, &run);
    }
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn process_paused_while_opening_or_joining_is_lost() {
    let _watchdog = Watchdog::new();
    let Some(folder) = in_own_process("process_paused_while_opening_or_joining_is_lost") else { return };
    let run = |name: &str, devices: &str, pause: Option<Pause>| {
        let servers = ServerProcesses::new(pause);
        let _kill = KillOnDrop(servers.clone());
        let mut request = run_request(&folder.join(name), devices, 4);
        request.run.heartbeat_seconds = 1.5;
        let run = planned(&servers, request);
        let mut observe = |record: &Record| {
            if pause.is_none() && matches!(record.event, Event::Step { step: 2, .. }) {
                servers.signal("host-b/virtual:b", "-STOP");
            }
        };
        run.start(&mut observe, &AtomicBool::new(false))
    };
    let opening = Pause { device: "host-b/virtual:b", request: "Open" };
    let joining = Pause { device: "host-c/virtual:c", request: "JoinTeam" };
    for (name, remote, pause) in [("opening", &["b", "c"][..], opening), ("joining", &["c"], joining)] {
        let outcome = run(name, &devices(remote), Some(pause)).unwrap_or_else(|failure| panic!("{failure}"));
        let lost: Vec<_> = outcome.result.lost.iter().map(|lost| (lost.device.as_str(), lost.step)).collect();
        let expected = (RunStatus::Done, vec![(pause.device, 0)], 4);
        assert_eq!((outcome.result.status, lost, outcome.result.steps), expected);
    }
    // Without another device the run stops, at any time.
    let only = "host-b/virtual:b=110MiB@0.4";
    for (name, pause) in [("alone", Some(opening)), ("later", None)] {
        let failure = run(name, only, pause).err().expect("no device is left");
        assert_eq!(failure.exit, Exit::Stopped, "{failure}");
        assert!(failure.to_string().contains("no other device works on this run"), "{failure}");
    }
}

#[test]
fn restarted_process_rejoins_the_team() {
    let _watchdog = Watchdog::new();
    let Some(folder) = in_own_process("restarted_process_rejoins_the_team") else { return };
    // Many more steps than the test runs: the remaining steps must be worth a restart from a checkpoint.
    const STEPS: u32 = 4000;
    let (mut losses, mut returned) = (BTreeMap::new(), None);
    let (outcome, _) = train_until(&folder.join("killed"), &["b", "c"], &[], STEPS, |event, servers| {
        match event {
            Event::Step { step, loss, .. } => drop(losses.insert(*step, *loss)),
            Event::DeviceReturned { step, device, team } => {
                assert_eq!((device.as_str(), team.len()), ("host-b/virtual:b", 3));
                assert_eq!(*step, *losses.keys().last().expect("steps were done"), "between two steps");
                returned = Some(*step);
            }
            _ => {}
        }
        if matches!(event, Event::Step { step: 3, .. }) && returned.is_none() && losses.len() == 3 {
            servers.kill_process("host-b/virtual:b");
        }
        returned.is_some_and(|returned| losses.contains_key(&(returned + 4)))
    });
    let returned = returned.expect("the device returned");
    assert_eq!(outcome.result.status, RunStatus::Stopped);
    let lost: Vec<_> =
        outcome.result.lost.iter().map(|lost| (lost.device.as_str(), lost.returned_after_step)).collect();
    assert_eq!(lost, [("host-b/virtual:b", Some(returned))]);
    let names: Vec<_> = outcome.result.team.iter().map(|worker| worker.device.as_str()).collect();
    assert_eq!(names, ["virtual:a", "host-b/virtual:b", "host-c/virtual:c"]);
    let mut undisturbed = BTreeMap::new();
    train_until(&folder.join("undisturbed"), &[], &[], STEPS, |event, _| {
        if let Event::Step { step, loss, .. } = event {
            undisturbed.insert(*step, *loss);
        }
        undisturbed.len() == losses.len()
    });
    assert!(undisturbed.keys().eq(losses.keys()));
    for (step, loss) in undisturbed {
        assert!((loss - losses[&step]).abs() <= 1e-4 * loss.abs(), "step {step}: {loss} and {}", losses[&step]);
    }
}

#[test]
fn host_without_connector_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let failure = Run::new(run_request(folder.path(), "host1/cpu", 8)).err().expect("there is no such host");
    assert_eq!(failure.exit, Exit::Input);
    assert!(
        failure.to_string().contains("run.devices: `host1/cpu` is on another host, and this command reaches"),
        "{failure}"
    );
}
