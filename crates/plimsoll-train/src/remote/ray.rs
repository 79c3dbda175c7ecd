//! Devices of a Ray cluster.
//!
//! Ray speaks Python, so a helper process (`python -m plimsoll.ray.run_helper`) stands between the run and the cluster:
//! it resolves the devices that the run file names, has Ray place a worker on each, and forwards requests to the
//! workers. This module is the run's side. The run itself is not part of the cluster, so it can save and report when
//! the cluster fails.
//!
//! Messages over the pipe have a length in front. The first exchange is JSON: a `PlacementRequest` and a
//! `PlacementReply`. All later messages are encoded as in `protocol`, and a number pairs each response with its
//! request.

use super::protocol::{decode, encode, exit_of};
use super::sockets::{TcpPeerNetwork, receive, send};
use super::{Channel, PeerNetwork, RemoteConnector, RemoteDevices, lock};
use crate::config::RunConfig;
use plimsoll_core::Failure;
use plimsoll_plan::device_request::{DeviceRequest, DevicesRequest};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Time that the helper process has to leave the cluster before it is killed.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(15);

/// Environment variable with the placement group that a sweep has reserved for this run's device. The run is placed in
/// that group and reserves nothing itself.
pub const RESERVATION_ENV: &str = "PLIMSOLL_RAY_KEPT";

/// Interval at which a sweep checks which of its devices are available.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// First message to the helper process: the devices to place.
#[derive(Serialize)]
struct PlacementRequest {
    devices: Vec<String>,
    /// Load line of each device that is named without one: an amount, or a share of free memory. `None` selects all
    /// memory that the device contributes to the cluster and no run has reserved.
    budget: Option<String>,
    /// Whether each device is reserved separately, for the runs of a sweep.
    #[serde(rename = "for_runs")]
    for_sweep: bool,
    /// The run folder, which the cluster shows as the owner of the devices; `None` for a sweep.
    run: Option<String>,
}

/// Answer of the helper process to the [`PlacementRequest`].
#[derive(Deserialize)]
#[serde(untagged)]
enum PlacementReply {
    Placed(Placement),
    Failed { exit: u8, message: String, hints: Vec<String> },
}

/// The devices that Ray has placed.
#[derive(Deserialize)]
struct Placement {
    /// Devices in the notation of `run.devices`, with load lines.
    devices: Vec<String>,
    /// Address of this machine within the cluster.
    ip: IpAddr,
    /// Ports on which the run's own devices may accept connections from peers. The first free one is used; 0 selects
    /// any free port.
    ports: Vec<u16>,
    /// Names of cluster devices that were requested and are not available.
    #[serde(rename = "missed")]
    missing: Vec<String>,
}

/// Header of a request to the helper process.
#[derive(Serialize)]
struct RequestHeader<'a> {
    number: u64,
    /// Name of the device that the request is for; `None` asks which reserved devices are available.
    device: Option<&'a str>,
    #[serde(rename = "aside")]
    out_of_band: bool,
}

/// Header of a response from the helper process.
#[derive(Deserialize)]
struct ResponseHeader {
    number: u64,
    #[serde(rename = "failed")]
    error: Option<String>,
}

/// Places the cluster devices that a run names, and returns the connections to them. `python` is the path of an
/// interpreter that has Plimsoll and Ray installed.
///
/// # Errors
/// There is no cluster, no such device, or not enough free memory on it.
pub fn connect_cluster(config: &RunConfig, python: &Path) -> Result<RemoteDevices, Failure> {
    Ok(place_devices(config, python, false)?.1)
}

fn place_devices(
    config: &RunConfig,
    python: &Path,
    for_sweep: bool,
) -> Result<(Arc<HelperProcess>, RemoteDevices), Failure> {
    let requested = config.requested_devices();
    // Without a budget, a device gets the share of free memory that it had when it joined the cluster.
    let budget = config.memory.budget.map(|budget| budget.to_string());
    let (remote, local): (Vec<DeviceRequest>, Vec<DeviceRequest>) = requested
        .devices
        .into_iter()
        .partition(|device| matches!(device, DeviceRequest::Remote { .. } | DeviceRequest::Ray { .. }));
    let dir = &config.run.dir;
    let folder = || std::path::absolute(dir).map_or(dir.clone(), |path| path.display().to_string());
    let folder = (!for_sweep).then(folder);
    let request =
        PlacementRequest { devices: remote.iter().map(ToString::to_string).collect(), budget, for_sweep, run: folder };
    let (process, mut stdout) = HelperProcess::start(python)?;
    let placement = match process.place(&request, &mut stdout)? {
        PlacementReply::Placed(placement) => placement,
        PlacementReply::Failed { exit, message, hints } => {
            return Err(Failure { exit: exit_of(exit), message, hints });
        }
    };
    let Placement { devices, ip, ports, missing } = placement;
    let names: Vec<String> = local.iter().map(ToString::to_string).chain(devices).collect();
    let placed: DevicesRequest = names.join(",").parse()?;
    // Without local devices, no peer connects to this process, and any port will do.
    let ports = if local.is_empty() { vec![0] } else { ports };
    let addresses: Vec<SocketAddr> = ports.into_iter().map(|port| SocketAddr::new(ip, port)).collect();
    let no_port = |error: io::Error| {
        Failure::input(format!(
            "Ray says that this machine is {ip}, and none of its ports for wires can be taken: {error}"
        ))
    };
    let network = TcpPeerNetwork::listen(&*addresses).map_err(no_port)?;
    let process = Arc::new(process);
    let replies = Arc::clone(&process.replies);
    let thread = thread::Builder::new().name("plimsoll-ray".to_owned()).spawn(move || replies.dispatch_all(stdout));
    thread.map_err(no_thread)?;
    let placed = DevicesRequest { host: requested.host, file: requested.file, ..placed };
    let cluster = Cluster { process: Arc::clone(&process), network };
    Ok((process, RemoteDevices::via(Arc::new(cluster)).with_devices(placed).with_missing(missing)))
}

fn no_thread(error: io::Error) -> Failure {
    Failure::bug(format!("the system refuses a thread: {error}"))
}

/// Placement group of each reserved device that is available, by device name.
type AvailableReservations = BTreeMap<String, String>;

/// Devices of a cluster that are reserved for the runs of a sweep.
pub struct Reservation {
    process: Arc<HelperProcess>,
    /// Placement groups of the available devices, as last polled; empty before the runs begin and after the helper
    /// process has ended.
    available: Arc<Mutex<AvailableReservations>>,
}

/// Reserves the cluster devices that a sweep names, and returns the connections to them. The devices answer requests
/// over these connections until [`Reservation::begin_runs`].
///
/// # Errors
/// The errors of [`connect_cluster`].
pub fn reserve(config: &RunConfig, python: &Path) -> Result<(RemoteDevices, Reservation), Failure> {
    let (process, remote) = place_devices(config, python, true)?;
    Ok((remote, Reservation { process, available: Arc::default() }))
}

impl Reservation {
    /// Hands the reserved devices over to the runs of the sweep, and from now on tracks which devices are available.
    ///
    /// # Errors
    /// The helper process has ended or cannot reach the cluster, or the system refuses a thread.
    pub fn begin_runs(&self) -> Result<(), Failure> {
        let lost = |error: io::Error| Failure::stopped(format!("--devices: {error}"));
        *lock(&self.available) = self.process.available_reservations().map_err(lost)?;
        let (process, available) = (Arc::downgrade(&self.process), Arc::downgrade(&self.available));
        let poll = move || poll_reservations(&process, &available);
        let thread = thread::Builder::new().name("plimsoll-ray-poll".to_owned()).spawn(poll);
        thread.map(|_| ()).map_err(no_thread)
    }

    /// Returns whether the helper process has ended, with the loss of the cluster or by a failure of its own. No device
    /// of the reservation can be reached then.
    pub fn is_lost(&self) -> bool {
        self.process.has_ended()
    }

    /// Returns the placement group of a reserved device; `None` while the device is not available.
    pub fn placement_group(&self, device: &str) -> Option<String> {
        lock(&self.available).get(device).cloned()
    }
}

/// Updates `available` at intervals, until the process has ended or the reservation is dropped.
fn poll_reservations(process: &Weak<HelperProcess>, available: &Weak<Mutex<AvailableReservations>>) {
    loop {
        thread::sleep(POLL_INTERVAL);
        let (Some(process), Some(available)) = (process.upgrade(), available.upgrade()) else { return };
        match process.available_reservations() {
            Ok(reservations) => *lock(&available) = reservations,
            Err(_) if process.has_ended() => return lock(&available).clear(),
            // A single failed query does not mean that the devices are lost.
            Err(_) => {}
        }
    }
}

/// The connector of a run on a Ray cluster.
struct Cluster {
    process: Arc<HelperProcess>,
    network: Arc<TcpPeerNetwork>,
}

impl RemoteConnector for Cluster {
    fn channel(&self, device: &str) -> io::Result<Arc<dyn Channel>> {
        Ok(Arc::new(DeviceChannel { process: Arc::clone(&self.process), device: device.to_owned() }))
    }

    fn peer_network(&self) -> Arc<dyn PeerNetwork> {
        self.network.clone()
    }
}

/// A channel to one device of the cluster.
struct DeviceChannel {
    process: Arc<HelperProcess>,
    device: String,
}

impl Channel for DeviceChannel {
    fn call(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        self.process.ask(Some(&self.device), false, request)
    }

    fn call_out_of_band(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        self.process.ask(Some(&self.device), true, request)
    }
}

/// The helper process that speaks with Ray. It ends when its standard input is closed, and so do the workers that it
/// placed.
struct HelperProcess {
    child: Mutex<Child>,
    /// Thread that reads the standard error of the process and, once that has ended, returns the last line. `None`
    /// after it was joined.
    last_error_line: Mutex<Option<JoinHandle<String>>>,
    stdin: Mutex<Option<ChildStdin>>,
    replies: Arc<ReplyDispatcher>,
    next_number: AtomicU64,
}

/// Callers that wait for a response, by request number.
type WaitingCallers = HashMap<u64, Sender<io::Result<Vec<u8>>>>;

/// Hands each response of the helper process to the caller that waits for it. Holds the waiting callers; `None` after
/// the process has ended.
struct ReplyDispatcher(Mutex<Option<WaitingCallers>>);

fn process_ended() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the process that speaks with Ray has ended")
}

impl HelperProcess {
    fn start(python: &Path) -> Result<(HelperProcess, ChildStdout), Failure> {
        let mut command = Command::new(python);
        command.args(["-m", "plimsoll.ray.run_helper"]).env("PYTHONSAFEPATH", "1");
        // A process group of its own: signals from the terminal are for the run, which needs this process while it saves.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let not_started = |error: io::Error| Failure::input(format!("{} cannot be started: {error}", python.display()));
        let mut child = command.spawn().map_err(not_started)?;
        let stdout = child.stdout.take().expect("stdout is piped");
        let stdin = Mutex::new(child.stdin.take());
        // Ray writes much about its own processes to standard error. Only the last line is kept, for error messages.
        let stderr = BufReader::new(child.stderr.take().expect("stderr is piped"));
        let last = |last: String, line: io::Result<String>| line.ok().filter(|line| !line.is_empty()).unwrap_or(last);
        let last_error_line = thread::Builder::new().spawn(move || stderr.lines().fold(String::new(), last));
        let last_error_line = last_error_line.map_err(|error| {
            let _ = child.kill();
            not_started(error)
        })?;
        let replies = Arc::new(ReplyDispatcher(Mutex::new(Some(WaitingCallers::new()))));
        let (child, last_error_line) = (Mutex::new(child), Mutex::new(Some(last_error_line)));
        Ok((HelperProcess { child, last_error_line, stdin, replies, next_number: AtomicU64::new(0) }, stdout))
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        lock(&self.stdin).as_mut().map_or_else(|| Err(process_ended()), |stdin| send(stdin, bytes))
    }

    fn place(&self, request: &PlacementRequest, stdout: &mut ChildStdout) -> Result<PlacementReply, Failure> {
        let json = serde_json::to_vec(request).expect("plain data has a JSON form");
        let reply = self.send(&json).and_then(|()| receive(stdout));
        reply.ok().and_then(|reply| serde_json::from_slice(&reply).ok()).ok_or_else(|| {
            let _ = lock(&self.child).kill();
            let line = lock(&self.last_error_line).take().and_then(|thread| thread.join().ok()).unwrap_or_default();
            Failure::bug(format!("the process that speaks with Ray has ended without an answer: {line}"))
        })
    }

    fn has_ended(&self) -> bool {
        lock(&self.replies.0).is_none()
    }

    fn available_reservations(&self) -> io::Result<AvailableReservations> {
        let response = self.ask(None, false, &[])?;
        serde_json::from_slice(&response).map_err(io::Error::other)
    }

    fn ask(&self, device: Option<&str>, out_of_band: bool, request: &[u8]) -> io::Result<Vec<u8>> {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let (sender, response) = channel();
        lock(&self.replies.0).as_mut().ok_or_else(process_ended)?.insert(number, sender);
        self.send(&encode(&RequestHeader { number, device, out_of_band }, request)).inspect_err(|_| {
            if let Some(callers) = lock(&self.replies.0).as_mut() {
                callers.remove(&number);
            }
        })?;
        response.recv().unwrap_or_else(|_| Err(process_ended()))
    }
}

impl ReplyDispatcher {
    /// Reads responses of the helper process and hands them to their callers, until the process ends.
    fn dispatch_all(&self, mut stdout: ChildStdout) {
        while let Ok(response) = receive(&mut stdout) {
            let Ok((ResponseHeader { number, error }, bytes)) = decode(&response) else { break };
            let caller = lock(&self.0).as_mut().and_then(|callers| callers.remove(&number));
            if let Some(caller) = caller {
                let result = error.map_or_else(|| Ok(bytes.to_vec()), |error| Err(io::Error::other(error)));
                // The caller may have stopped waiting.
                let _ = caller.send(result);
            }
        }
        *lock(&self.0) = None;
    }
}

impl Drop for HelperProcess {
    fn drop(&mut self) {
        *lock(&self.stdin) = None;
        let mut child = lock(&self.child);
        let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
        while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
        // Killing a process that has ended has no effect. Its workers end with it either way.
        let _ = child.kill();
        let _ = child.wait();
    }
}
