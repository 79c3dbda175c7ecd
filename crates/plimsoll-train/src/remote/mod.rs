//! Devices that live in other processes, on this machine or on others. Here are the words between the two ends, and what
//! carries them; `device` is what the run has of such a device, `host` what answers for the real one, `spread` how a team of
//! both kinds comes together, `links` how fast they reach each other, `streams` carries all of it over sockets, and `ray` has
//! them placed on the machines of a cluster.
//!
//! ```text
//!   run ── Engine ── FarDevice ── Channel ──► Host ── Device      (one of these for each device)
//!                                                       │
//!                                  collectives: Wires between all devices of the team
//! ```
//! What is far is only the [`Device`](plimsoll_device::device::Device): the engine, with everything that a run does when a
//! device refuses, is lost or is slow, is the same for all. What needs no answer is sent along with what does, so a step is
//! a few requests. Files are the run's: the far end asks for what it reads and hands over what it writes.

pub mod device;
pub mod host;
pub mod links;
pub mod ray;
pub mod spread;
pub mod streams;

use self::device::Connection;
use crate::config::RunFile;
use plimsoll_core::{Algorithms, Bytes, CollectivesBy, DType, DeviceSpec, Exit, Failure, MeasuredBy, Space};
use plimsoll_device::device::DeviceError;
use plimsoll_device::transport::wire::Wire;
use plimsoll_plan::request::DevicesRequest;
use plimsoll_program::{Placement, ProgramSet, TensorId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Both ends must have the same: the words of another version mean something else.
pub const VERSION: u32 = 4;

/// What a mutex holds, whoever has panicked with it: nothing here is left half-done.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Carries requests to the process of a device, and its answers back.
pub trait Channel: Send + Sync {
    /// Hands over a request and waits for the answer, however long that takes. There is one at a time.
    ///
    /// # Errors
    /// That process is gone, or cannot be reached.
    fn call(&self, request: &[u8]) -> io::Result<Vec<u8>>;

    /// The same beside a call that may be under way; it is answered at once.
    ///
    /// # Errors
    /// As above.
    fn aside(&self, request: &[u8]) -> io::Result<Vec<u8>>;
}

/// How the devices of a team find each other, as one process knows it.
pub trait Wires: Send + Sync {
    /// Where this process is found by the others.
    fn place(&self) -> String;

    /// A wire to every rank of a team, in the order of ranks, with none to this one. All ranks do this at the same time,
    /// and wait for each other.
    ///
    /// # Errors
    /// Somebody cannot be reached, or does not come, or the meeting is called off.
    fn meet(&self, invitation: &Invitation, rank: u32) -> io::Result<Vec<Option<Arc<dyn Wire>>>>;

    /// Nobody needs to wait any more for the others of the team with this secret: it does not come together.
    fn call_off(&self, secret: &str);
}

/// What a run needs of the devices that live elsewhere.
pub trait Hosts: Send + Sync {
    /// The way to the process of a device. Asked for once more, it is that of the same process.
    ///
    /// # Errors
    /// There is no such device, or its process cannot be started.
    fn channel(&self, device: &str) -> io::Result<Arc<dyn Channel>>;

    /// How the devices of this very process meet those.
    fn wires(&self) -> Arc<dyn Wires>;
}

/// The devices of a run that live in other processes, as whoever starts it brings them: its file says nothing of how they
/// are reached.
#[derive(Clone, Default)]
pub struct Elsewhere {
    hosts: Option<Arc<dyn Hosts>>,
    devices: Option<DevicesRequest>,
    missed: Vec<String>,
}

impl Elsewhere {
    /// They are reached like this.
    pub fn by(hosts: Arc<dyn Hosts>) -> Elsewhere {
        Elsewhere { hosts: Some(hosts), ..Elsewhere::default() }
    }

    /// The devices that the words of the run file have turned out to be.
    pub fn of(self, devices: DevicesRequest) -> Elsewhere {
        Elsewhere { devices: Some(devices), ..self }
    }

    /// Devices that would be among them, and are gone.
    pub fn without(self, missed: Vec<String>) -> Elsewhere {
        Elsewhere { missed, ..self }
    }

    /// What is said of those.
    pub fn missed(&self) -> impl Iterator<Item = String> {
        let said =
            |device: &String| format!("{device} of the cluster is gone, and is done without: see plimsoll cluster");
        self.missed.iter().map(said)
    }

    /// These, where that is not for the run file to say.
    pub fn devices(&self) -> Option<&DevicesRequest> {
        self.devices.as_ref()
    }

    /// How they are reached, where somebody has said so.
    pub fn hosts(&self) -> Option<Arc<dyn Hosts>> {
        self.hosts.clone()
    }

    /// The way to a device.
    ///
    /// # Errors
    /// Nobody has said how, there is no such device, or its process cannot be started.
    pub(crate) fn connection(&self, device: &str) -> Result<Arc<Connection>, Failure> {
        let hosts = self.hosts().ok_or_else(|| {
            Failure::input(format!("run.devices: `{device}` is on another host, and nothing here reaches that"))
                .hint("plimsoll train, plan and sweep reach the hosts of a cluster (docs/ray.md)")
        })?;
        let gone = |why: String| Failure::input(format!("run.devices: {device}: {why}"));
        let channel = hosts.channel(device).map_err(|error| gone(error.to_string()))?;
        Ok(Connection::new(device, channel)?)
    }

    /// Asks the process of a device what it is, can do, and may hold. `run` names it as its own process knows it.
    ///
    /// # Errors
    /// As above, and what that process says.
    pub(crate) fn describe(&self, device: &str, run: RunFile) -> Result<DeviceSpec, Failure> {
        let spec = self.connection(device)?.describe(run).map_err(out_of_reach)?;
        Ok(DeviceSpec { name: device.to_owned(), ..spec })
    }
}

impl fmt::Debug for Elsewhere {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(if self.hosts.is_some() { "reached" } else { "nowhere" })
    }
}

/// However they are reached, it is the same run.
impl PartialEq for Elsewhere {
    fn eq(&self, _: &Elsewhere) -> bool {
        true
    }
}

/// Who comes together in a team, and where.
#[derive(Clone, Debug)]
pub struct Invitation {
    /// A number that no other team of the run has.
    pub team: u64,
    /// What nobody knows who is not invited.
    pub secret: String,
    /// Where each rank is found.
    pub places: Vec<String>,
    /// When the clocks of simulated devices begin.
    pub epoch: Instant,
    /// Whether all are GPUs that exchange by NCCL.
    pub nccl: bool,
}

/// The same on its way to another process, whose clock counts from elsewhere.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Invited {
    team: u64,
    secret: String,
    places: Vec<String>,
    since_epoch: Duration,
    nccl: bool,
}

impl From<&Invitation> for Invited {
    fn from(invitation: &Invitation) -> Invited {
        let Invitation { team, secret, places, epoch, nccl } = invitation.clone();
        Invited { team, secret, places, since_epoch: epoch.elapsed(), nccl }
    }
}

impl From<Invited> for Invitation {
    fn from(invited: Invited) -> Invitation {
        let Invited { team, secret, places, since_epoch, nccl } = invited;
        let now = Instant::now();
        Invitation { team, secret, places, epoch: now.checked_sub(since_epoch).unwrap_or(now), nccl }
    }
}

/// What the run asks of a device's process. Bytes stand behind it.
#[derive(Debug, Serialize, Deserialize)]
enum Request {
    /// Says what the device is that a run file names, with what it can do and hold here.
    Describe { version: u32, run: Box<RunFile> },
    /// Opens the device with the Programs of a plan.
    Open {
        version: u32,
        device: Box<DeviceSpec>,
        set: Box<ProgramSet>,
        placement: Placement,
        precision: DType,
        algorithms: Option<Algorithms>,
        /// The run is gone where it is not heard of for so long, however it looks.
        silence: Duration,
    },
    /// Does all of this, up to what fails.
    Work {
        /// See [`Wired::begin`](plimsoll_device::transport::wire::Wired::begin).
        attempt: u64,
        commands: Vec<Command>,
    },
    /// The answer to [`Answer::Reads`], whose bytes stand behind it, and to [`Answer::Writes`].
    Files { failed: Option<String> },
    /// Goes over to another plan.
    Adopt { set: Box<ProgramSet>, placement: Placement },
    /// Says where others find it.
    Find,
    /// Measures its links to others that do the same.
    Measure { rank: u32, invited: Invited },
    /// Takes a seat in a team.
    Join { rank: u32, invited: Invited },
    /// Lets the device go.
    Close,
    /// Aside: gives a sign of life.
    Alive,
    /// Aside: tells the device that a rank of its team gave up.
    GiveUp { attempt: u64, rank: u32, why: String },
    /// Aside: the team with this secret does not come together.
    CallOff { secret: String },
}

#[derive(Debug, Serialize, Deserialize)]
enum Command {
    Write { tensor: TensorId, slot: u32, bytes: u64 },
    Run { program: String, micro_batch: u32, from: u32, last: bool, refuses_at: Option<u32> },
    Settle,
    SlowDown(f64),
    Read { tensor: TensorId, slot: u32, bytes: u64 },
    Look { space: Space, first: u64, end: u64 },
    Fill { space: Space, first: u64, bytes: u64 },
    Poison { space: Space, first: u64, end: u64 },
    HighWater(Space),
    Strayed(Space),
    Room,
}

/// What a device's process answers. Bytes stand behind it.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Described(Box<DeviceSpec>),
    Place(String),
    /// By rank, those that it has measured itself.
    Links(Vec<Option<links::Ways>>),
    Opened {
        place: String,
        /// On the device, on its host, in the scratch file.
        arenas: [Bytes; 3],
        algorithms: Option<Algorithms>,
    },
    Done(Found),
    /// So many bytes of a file's tensor are needed.
    Reads {
        tensor: String,
        offset: u64,
        bytes: u64,
    },
    /// These bytes belong into a file.
    Writes {
        tensor: String,
        offset: u64,
    },
    Failed(Fault),
}

/// What the last of some commands found.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Found {
    bytes: Bytes,
    yes: bool,
    computed: Option<f64>,
    collectives: Option<CollectivesBy>,
    room: Option<RoomFound>,
}

#[derive(Debug, Serialize, Deserialize)]
struct RoomFound {
    total: Bytes,
    free: Bytes,
    bound_by: String,
    held: Bytes,
    /// The most that the process has held, or what it holds of its GPU, and how that is known.
    measured: Option<(Bytes, MeasuredBy)>,
}

/// What a device failed with.
#[derive(Debug, Serialize, Deserialize)]
enum Fault {
    Peer { rank: u32, why: String },
    CutOff { rank: u32, why: String },
    Lost(String),
    File { tensor: String, why: String },
    MoreCharges { held: Bytes, planned: Bytes },
    Other { refusal: bool, exit: u8, message: String, hints: Vec<String> },
}

impl From<DeviceError> for Fault {
    fn from(error: DeviceError) -> Fault {
        match error {
            DeviceError::Peer { rank, why } => Fault::Peer { rank, why },
            DeviceError::CutOff { rank, why } => Fault::CutOff { rank, why },
            DeviceError::Lost { why, .. } => Fault::Lost(why),
            error if error.is_loss() => Fault::Lost(error.to_string()),
            DeviceError::File { tensor, source } => Fault::File { tensor, why: source.to_string() },
            DeviceError::MoreCharges { held, planned } => Fault::MoreCharges { held, planned },
            error => {
                let refusal = error.is_refusal();
                let Failure { exit, message, hints } = error.into();
                Fault::Other { refusal, exit: exit as u8, message, hints }
            }
        }
    }
}

impl Fault {
    fn of(failure: Failure) -> Fault {
        let Failure { exit, message, hints } = failure;
        Fault::Other { refusal: false, exit: exit as u8, message, hints }
    }

    /// The same as an error of a device of this name.
    fn error(self, device: &str) -> DeviceError {
        match self {
            Fault::Peer { rank, why } => DeviceError::Peer { rank, why },
            Fault::CutOff { rank, why } => DeviceError::CutOff { rank, why },
            Fault::Lost(why) => DeviceError::Lost { device: device.to_owned(), why },
            Fault::File { tensor, why } => DeviceError::File { tensor, source: io::Error::other(why) },
            Fault::MoreCharges { held, planned } => DeviceError::MoreCharges { held, planned },
            Fault::Other { refusal, exit, message, hints } => {
                let exits = [Exit::Input, Exit::DoesNotFit, Exit::Stopped];
                let exit = exits.into_iter().find(|known| *known as u8 == exit).unwrap_or(Exit::Bug);
                let failure = Failure { exit, message: format!("{device}: {message}"), hints };
                DeviceError::Elsewhere { refusal, failure: Box::new(failure) }
            }
        }
    }
}

/// What a machine that answers no more while devices are looked at has to be asked for, before it is called a bug of ours.
const CLUSTER_PORTS: &str =
    "ports 7300 and 7310-7419 (110 more for each further device) must be open between the machines: docs/ray.md";

/// A device, or a wire between two, that is lost before any run has begun: on real machines mostly a firewall's doing.
pub(crate) fn out_of_reach(error: DeviceError) -> Failure {
    match error {
        DeviceError::Lost { .. } | DeviceError::CutOff { .. } | DeviceError::Peer { .. } => {
            Failure::input(error.to_string()).hint(CLUSTER_PORTS)
        }
        other => other.into(),
    }
}

/// Words with bytes behind them: how long the words are, the words, the bytes.
fn encode(words: &impl Serialize, bytes: &[u8]) -> Vec<u8> {
    let words = serde_json::to_vec(words).expect("plain data has a JSON form");
    [&(words.len() as u64).to_le_bytes(), &*words, bytes].concat()
}

/// What [`encode`] made, taken apart.
fn decode<T: DeserializeOwned>(text: &[u8]) -> io::Result<(T, &[u8])> {
    let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let parts = text.split_first_chunk().and_then(|(length, rest)| {
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        rest.split_at_checked(length)
    });
    let (words, bytes) = parts.ok_or_else(|| wrong("what came is cut off".to_owned()))?;
    let words =
        serde_json::from_slice(words).map_err(|error| wrong(format!("what came is not understood: {error}")))?;
    Ok((words, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine that hangs up whatever it is asked.
    struct Unreached;

    impl Channel for Unreached {
        fn call(&self, _: &[u8]) -> io::Result<Vec<u8>> {
            Err(io::ErrorKind::ConnectionRefused.into())
        }

        fn aside(&self, request: &[u8]) -> io::Result<Vec<u8>> {
            self.call(request)
        }
    }

    impl Hosts for Unreached {
        fn channel(&self, _: &str) -> io::Result<Arc<dyn Channel>> {
            Ok(Arc::new(Unreached))
        }

        fn wires(&self) -> Arc<dyn Wires> {
            unreachable!("nobody meets")
        }
    }

    #[test]
    fn a_machine_that_cannot_be_reached_is_no_bug_of_ours() {
        let lost = || DeviceError::Lost { device: "pc2/cpu".to_owned(), why: "connection refused".to_owned() };
        let why = || "timed out".to_owned();
        for error in [lost(), DeviceError::CutOff { rank: 1, why: why() }, DeviceError::Peer { rank: 1, why: why() }] {
            let message = error.to_string();
            let failure = out_of_reach(error);
            assert_eq!((failure.exit, failure.message), (Exit::Input, message));
            assert!(failure.hints[0].contains("7310-7419") && failure.hints[0].contains("docs/ray.md"));
        }
        let described = Elsewhere::by(Arc::new(Unreached)).describe("pc2/cpu", RunFile::default()).unwrap_err();
        assert_eq!((described.exit, &described.hints), (Exit::Input, &out_of_reach(lost()).hints));
        // What the other end says of itself stays what it is.
        let said =
            |failure: Failure| out_of_reach(DeviceError::Elsewhere { refusal: false, failure: Box::new(failure) });
        let bug = || Failure::bug("pc2/cpu: it came upon a bug");
        assert_eq!(said(bug()), bug());
        let refused = || Failure::input("pc2/cpu: memory.host is too large");
        assert_eq!(said(refused()), refused());
    }
}
