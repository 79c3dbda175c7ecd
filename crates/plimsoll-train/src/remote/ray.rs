//! Devices of a Ray cluster. Ray speaks Python, and so does the process that stands between: `plimsoll.ray.hosting` finds
//! what the run file names, has Ray place a worker on each device, and carries requests there and back. Here is the run's
//! end of it. The run itself stays out of Ray: when the cluster goes, the run is there to say so, and to save.
//!
//! What goes over the pipe has its length in front. First the run says what it wants, in JSON, and is told what that is; then
//! words with bytes behind them, as everywhere between both ends, whose number says which answer is whose.

use super::streams::{TcpWires, receive, send};
use super::{Channel, Elsewhere, Hosts, Wires, decode, encode, locked};
use crate::config::RunFile;
use plimsoll_core::{Exit, Failure};
use plimsoll_plan::request::{DeviceRequest, DevicesRequest};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long the process may take to leave the cluster.
const LEAVES: Duration = Duration::from_secs(15);

/// What the run wants.
#[derive(Serialize)]
struct Wanted {
    devices: Vec<String>,
    /// What each may hold where its word does not say: an amount, or a share of what is free; none is all of that.
    budget: Option<String>,
    /// Whether each device's bytes are kept by themselves, for the runs of a sweep.
    for_runs: bool,
    /// The run's folder, by which others of the cluster know whose their devices are; none of a sweep.
    run: Option<String>,
}

/// What that turned out to be.
#[derive(Deserialize)]
#[serde(untagged)]
enum Placed {
    There {
        /// Words of `run.devices`, with load lines.
        devices: Vec<String>,
        /// This machine's address, as the others know it.
        ip: IpAddr,
        /// Where the run's own devices may be met, the first that is free; 0 is any.
        ports: Vec<u16>,
        /// Devices of the cluster that were asked for with all others, and are gone.
        missed: Vec<String>,
    },
    Failed {
        exit: u8,
        message: String,
        hints: Vec<String>,
    },
}

/// What stands in front of a request.
#[derive(Serialize)]
struct Errand<'a> {
    number: u64,
    /// Without one it is asked which devices are there, each with what is kept of it.
    device: Option<&'a str>,
    aside: bool,
}

/// What stands in front of its answer.
#[derive(Deserialize)]
struct Back {
    number: u64,
    failed: Option<String>,
}

/// Brings the devices of the cluster that a run file names: from now on it is known what they are, and they are reached.
/// `python` has the wheel, and Ray.
///
/// # Errors
/// What that process says: there is no cluster, no such device, or no room on it.
pub fn reach(run: &mut RunFile, python: &Path) -> Result<(), Failure> {
    bring(run, python, false).map(|_| ())
}

fn bring(run: &mut RunFile, python: &Path, for_runs: bool) -> Result<Arc<Process>, Failure> {
    let asked = run.devices();
    // The cluster's lines are the usual share of what was free when it was joined.
    let budget = run.memory.budget.map(|budget| budget.to_string());
    let (away, own): (Vec<DeviceRequest>, Vec<DeviceRequest>) = asked
        .devices
        .into_iter()
        .partition(|device| matches!(device, DeviceRequest::Elsewhere { .. } | DeviceRequest::Ray { .. }));
    let folder = || std::path::absolute(&run.run.dir).map_or(run.run.dir.clone(), |path| path.display().to_string());
    let folder = (!for_runs).then(folder);
    let wanted = Wanted { devices: away.iter().map(ToString::to_string).collect(), budget, for_runs, run: folder };
    let (process, mut says) = Process::start(python)?;
    let (devices, ip, ports, missed) = match process.place(&wanted, &mut says)? {
        Placed::There { devices, ip, ports, missed } => {
            // Where all others are elsewhere, they are who is met.
            let ports = if own.is_empty() { vec![0] } else { ports };
            (own.iter().map(ToString::to_string).chain(devices).collect::<Vec<_>>().join(","), ip, ports, missed)
        }
        Placed::Failed { exit, message, hints } => {
            let exits = [Exit::Input, Exit::DoesNotFit, Exit::Stopped];
            let exit = exits.into_iter().find(|known| *known as u8 == exit).unwrap_or(Exit::Bug);
            return Err(Failure { exit, message, hints });
        }
    };
    let named: DevicesRequest = devices.parse()?;
    let at = |error: io::Error| {
        Failure::input(format!(
            "Ray says that this machine is {ip}, and none of its ports for wires can be taken: {error}"
        ))
    };
    let places: Vec<SocketAddr> = ports.into_iter().map(|port| SocketAddr::new(ip, port)).collect();
    let wires = TcpWires::listen(&*places).map_err(at)?;
    let process = Arc::new(process);
    let answers = Arc::clone(&process.answers);
    let thread = thread::Builder::new().name("plimsoll-ray".to_owned()).spawn(move || answers.all(says));
    thread.map_err(|error| Failure::bug(format!("the system gives no thread: {error}")))?;
    let named = DevicesRequest { host: asked.host, file: asked.file, ..named };
    run.elsewhere = Elsewhere::by(Arc::new(Cluster { process: Arc::clone(&process), wires })).of(named).without(missed);
    Ok(process)
}

/// Names, for a run, what a sweep has kept of its device: the run is placed in that, and asks Ray for nothing of its own.
pub const KEPT: &str = "PLIMSOLL_RAY_KEPT";

/// How often it is asked which devices of a sweep are there.
const LOOKS: Duration = Duration::from_secs(1);

/// What is kept of each device that is there, by its name.
type There = BTreeMap<String, String>;

/// The devices of a cluster that are kept for the runs of a sweep.
pub struct Kept {
    process: Arc<Process>,
    /// Empty where the cluster is gone.
    there: Arc<Mutex<There>>,
}

/// Has the devices of the cluster that a sweep names kept for its runs. They can be asked what they are until the first run is
/// placed there.
///
/// # Errors
/// As [`reach`].
pub fn keep(run: &mut RunFile, python: &Path) -> Result<Kept, Failure> {
    Ok(Kept { process: bring(run, python, true)?, there: Arc::default() })
}

impl Kept {
    /// From now on runs are placed there, and it is looked after who is.
    ///
    /// # Errors
    /// The cluster is gone, or the system gives no thread.
    pub fn for_runs(&self) -> Result<(), Failure> {
        let gone = |error: io::Error| Failure::stopped(format!("--devices: {error}"));
        *locked(&self.there) = self.process.there().map_err(gone)?;
        let (process, there) = (Arc::downgrade(&self.process), Arc::downgrade(&self.there));
        let look = move || {
            loop {
                thread::sleep(LOOKS);
                let (Some(process), Some(there)) = (process.upgrade(), there.upgrade()) else { return };
                match process.there() {
                    Ok(found) => *locked(&there) = found,
                    Err(_) if process.ended() => return locked(&there).clear(),
                    // One answer that did not come says nothing of the devices.
                    Err(_) => {}
                }
            }
        };
        let thread = thread::Builder::new().name("plimsoll-ray-look".to_owned()).spawn(look);
        thread.map(|_| ()).map_err(|error| Failure::bug(format!("the system gives no thread: {error}")))
    }

    /// Whether the cluster is gone.
    pub fn cut_off(&self) -> bool {
        self.process.ended()
    }

    /// What is kept of a device, while that is there.
    pub fn of(&self, device: &str) -> Option<String> {
        locked(&self.there).get(device).cloned()
    }
}

/// The cluster, as a run has it.
struct Cluster {
    process: Arc<Process>,
    wires: Arc<TcpWires>,
}

impl Hosts for Cluster {
    fn channel(&self, device: &str) -> io::Result<Arc<dyn Channel>> {
        Ok(Arc::new(Way { process: Arc::clone(&self.process), device: device.to_owned() }))
    }

    fn wires(&self) -> Arc<dyn Wires> {
        self.wires.clone()
    }
}

/// The way to one device of it.
struct Way {
    process: Arc<Process>,
    device: String,
}

impl Channel for Way {
    fn call(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        self.process.ask(Some(&self.device), false, request)
    }

    fn aside(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        self.process.ask(Some(&self.device), true, request)
    }
}

/// The process that speaks with Ray. It ends when it hears nothing more, and what it has placed with it.
struct Process {
    child: Mutex<Child>,
    /// The last line that it will have written to its standard error.
    complaint: Mutex<Option<JoinHandle<String>>>,
    hears: Mutex<Option<ChildStdin>>,
    answers: Arc<Answers>,
    number: AtomicU64,
}

/// Who waits for which answer.
type Waiting = HashMap<u64, Sender<io::Result<Vec<u8>>>>;

/// None any more where the process has ended.
struct Answers(Mutex<Option<Waiting>>);

fn ended() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the process that speaks with Ray has ended")
}

impl Process {
    fn start(python: &Path) -> Result<(Process, ChildStdout), Failure> {
        let mut command = Command::new(python);
        command.args(["-m", "plimsoll.ray.hosting"]).env("PYTHONSAFEPATH", "1");
        // Signals from the terminal are meant for the run, which needs this for as long as it saves.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let gone = |error: io::Error| Failure::input(format!("{} cannot be started: {error}", python.display()));
        let mut child = command.spawn().map_err(gone)?;
        let says = child.stdout.take().expect("it is piped");
        let hears = Mutex::new(child.stdin.take());
        let errors = BufReader::new(child.stderr.take().expect("it is piped"));
        // What Ray has to say there of its own processes is for no screen.
        let last = |last: String, line: io::Result<String>| line.ok().filter(|line| !line.is_empty()).unwrap_or(last);
        let complaint = thread::spawn(move || errors.lines().fold(String::new(), last));
        let answers = Arc::new(Answers(Mutex::new(Some(Waiting::new()))));
        let (child, complaint) = (Mutex::new(child), Mutex::new(Some(complaint)));
        Ok((Process { child, complaint, hears, answers, number: AtomicU64::new(0) }, says))
    }

    fn hears(&self, bytes: &[u8]) -> io::Result<()> {
        locked(&self.hears).as_mut().map_or_else(|| Err(ended()), |hears| send(hears, bytes))
    }

    fn place(&self, wanted: &Wanted, says: &mut ChildStdout) -> Result<Placed, Failure> {
        let words = serde_json::to_vec(wanted).expect("plain data has a JSON form");
        let placed = self.hears(&words).and_then(|()| receive(says));
        placed.ok().and_then(|placed| serde_json::from_slice(&placed).ok()).ok_or_else(|| {
            let _ = locked(&self.child).kill();
            let complaint = locked(&self.complaint).take().and_then(|last| last.join().ok()).unwrap_or_default();
            Failure::bug(format!("the process that speaks with Ray has ended without an answer: {complaint}"))
        })
    }

    fn ended(&self) -> bool {
        locked(&self.answers.0).is_none()
    }

    fn there(&self) -> io::Result<There> {
        let answer = self.ask(None, false, &[])?;
        serde_json::from_slice(&answer).map_err(io::Error::other)
    }

    fn ask(&self, device: Option<&str>, aside: bool, request: &[u8]) -> io::Result<Vec<u8>> {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let (back, answered) = channel();
        locked(&self.answers.0).as_mut().ok_or_else(ended)?.insert(number, back);
        self.hears(&encode(&Errand { number, device, aside }, request))?;
        answered.recv().unwrap_or_else(|_| Err(ended()))
    }
}

impl Answers {
    /// The thread that hands each answer to who waits for it.
    fn all(&self, mut says: ChildStdout) {
        while let Ok(said) = receive(&mut says) {
            let Ok((Back { number, failed }, bytes)) = decode(&said) else { break };
            let waits = locked(&self.0).as_mut().and_then(|waiting| waiting.remove(&number));
            if let Some(waits) = waits {
                // Who has asked may have gone on without it.
                let _ = waits.send(failed.map_or_else(|| Ok(bytes.to_vec()), |why| Err(io::Error::other(why))));
            }
        }
        *locked(&self.0) = None;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        *locked(&self.hears) = None;
        let mut child = locked(&self.child);
        let patience = Instant::now() + LEAVES;
        while matches!(child.try_wait(), Ok(None)) && Instant::now() < patience {
            thread::sleep(Duration::from_millis(10));
        }
        // One that has ended already is not killed, and what it has placed ends with it either way.
        let _ = child.kill();
        let _ = child.wait();
    }
}
