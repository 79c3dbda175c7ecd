//! The run's end: a device that stands for one in another process.

use super::links::Ways;
use super::{Answer, Channel, Command, Found, Invitation, Request, RoomFound, VERSION, decode, encode, locked};
use crate::config::RunFile;
use crate::team::heartbeat::Pulse;
use plimsoll_core::{Algorithms, Bytes, CollectivesBy, DType, DeviceKind, DeviceSpec, MeasuredBy, Space};
use plimsoll_device::device::{Call, Device, DeviceError, FileSpace, Memory, NoFiles, Observer, Room, Unseen};
use plimsoll_device::probe;
use plimsoll_program::{Placement, ProgramSet, TensorId};
use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// How often whoever waits for an answer looks whether the device is missed.
const LOOK: Duration = Duration::from_millis(50);

/// What was asked, and where the answer goes.
type Errand = (Vec<u8>, Sender<io::Result<Vec<u8>>>);

/// The way to the process of a device. Who waits for an answer is let go when the device is missed: the thread that still
/// waits is the courier's.
pub struct Connection {
    device: String,
    channel: Arc<dyn Channel>,
    courier: Mutex<Sender<Errand>>,
    /// The team's present attempt.
    attempt: AtomicU64,
    /// Where it is found by the others of its team.
    place: Mutex<String>,
    /// The most that its process has held, as it last said; 0 of a GPU.
    measured: Mutex<Option<(Bytes, MeasuredBy)>>,
    pulse: Mutex<Option<Arc<Pulse>>>,
}

impl Connection {
    /// The way to the device of this name.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn new(device: &str, channel: Arc<dyn Channel>) -> Result<Arc<Connection>, DeviceError> {
        let (courier, errands) = self::channel::<Errand>();
        let carried = Arc::clone(&channel);
        let carries = move || {
            for (request, back) in errands {
                // Nobody waits any more where the device was missed.
                let _ = back.send(carried.call(&request));
            }
        };
        let thread = thread::Builder::new().name(format!("plimsoll-courier-{device}")).spawn(carries);
        thread.map_err(|_| DeviceError::NoThread { queue: "courier".to_owned() })?;
        Ok(Arc::new(Connection {
            device: device.to_owned(),
            channel,
            courier: Mutex::new(courier),
            attempt: AtomicU64::new(0),
            place: Mutex::default(),
            measured: Mutex::default(),
            pulse: Mutex::default(),
        }))
    }

    /// Where others find the device.
    pub(super) fn place(&self) -> String {
        locked(&self.place).clone()
    }

    /// The most that the process of the device has held, or what it held of its GPU, measured there when it was last looked
    /// at, and how that is known.
    pub fn measured(&self) -> Option<(Bytes, MeasuredBy)> {
        *locked(&self.measured)
    }

    /// The team tries something anew.
    pub(super) fn begin(&self, attempt: u64) {
        self.attempt.store(attempt, Ordering::Relaxed);
    }

    /// Tells the device that a rank gave up, whatever it is doing.
    pub(super) fn give_up(&self, attempt: u64, rank: u32, why: &str) {
        let request = encode(&Request::GiveUp { attempt, rank, why: why.to_owned() }, &[]);
        // Where it is gone there is nobody to be told.
        let _ = self.channel.aside(&request);
    }

    /// Tells the device that the team with this secret does not come together, if it waits for that.
    pub(super) fn call_off(&self, secret: &str) {
        // As above.
        let _ = self.channel.aside(&encode(&Request::CallOff { secret: secret.to_owned() }, &[]));
    }

    /// Whether the device gives a sign of life: its process, and what that asks.
    pub fn answers(&self) -> bool {
        let said = self.channel.aside(&encode(&Request::Alive, &[]));
        said.is_ok_and(|said| matches!(decode(&said), Ok((Answer::Done(_), _))))
    }

    /// What is known of its life from now on.
    pub fn watched_by(&self, pulse: Arc<Pulse>) {
        *locked(&self.pulse) = Some(pulse);
    }

    /// Asks what the device is that a run file names, as its process knows it.
    ///
    /// # Errors
    /// What its process says, or that it is gone.
    pub(super) fn describe(&self, run: RunFile) -> Result<DeviceSpec, DeviceError> {
        match self.ask(&Request::Describe { version: VERSION, run: Box::new(run) }, &[])?.0 {
            Answer::Described(spec) => Ok(*spec),
            Answer::Failed(fault) => Err(fault.error(&self.device)),
            other => Err(self.lost(format!("it answers {other:?}"))),
        }
    }

    /// Asks where others find the device.
    ///
    /// # Errors
    /// As above.
    pub fn find(&self) -> Result<String, DeviceError> {
        match self.ask(&Request::Find, &[])?.0 {
            Answer::Place(place) => Ok(place),
            Answer::Failed(fault) => Err(fault.error(&self.device)),
            other => Err(self.lost(format!("it answers {other:?}"))),
        }
    }

    /// Has it measure its links to all that are invited, and gives those that it has measured itself.
    ///
    /// # Errors
    /// As above.
    pub(super) fn measure(&self, rank: u32, invitation: &Invitation) -> Result<Vec<Option<Ways>>, DeviceError> {
        match self.ask(&Request::Measure { rank, invited: invitation.into() }, &[])?.0 {
            Answer::Links(links) => Ok(links),
            Answer::Failed(fault) => Err(fault.error(&self.device)),
            other => Err(self.lost(format!("it answers {other:?}"))),
        }
    }

    /// Takes a seat in a team.
    ///
    /// # Errors
    /// What its process says, or that it is gone.
    pub fn join(&self, rank: u32, invitation: &Invitation) -> Result<(), DeviceError> {
        match self.ask(&Request::Join { rank, invited: invitation.into() }, &[])?.0 {
            Answer::Failed(fault) => Err(fault.error(&self.device)),
            _ => Ok(()),
        }
    }

    fn lost(&self, why: impl std::fmt::Display) -> DeviceError {
        DeviceError::Lost { device: self.device.clone(), why: why.to_string() }
    }

    fn ask(&self, request: &Request, bytes: &[u8]) -> Result<(Answer, Vec<u8>), DeviceError> {
        let (back, answered) = channel();
        let sent = locked(&self.courier).send((encode(request, bytes), back));
        sent.map_err(|_| self.lost("its courier is gone"))?;
        let answer = loop {
            match answered.recv_timeout(LOOK) {
                Ok(answer) => break answer.map_err(|error| self.lost(error))?,
                Err(RecvTimeoutError::Disconnected) => return Err(self.lost("its courier is gone")),
                Err(RecvTimeoutError::Timeout) => {
                    if locked(&self.pulse).as_ref().is_some_and(|pulse| pulse.is_lost()) {
                        return Err(self.lost("no sign of life"));
                    }
                }
            }
        };
        let (answer, bytes) = decode(&answer).map_err(|error| self.lost(error))?;
        Ok((answer, bytes.to_vec()))
    }
}

/// A device in another process.
pub struct FarDevice {
    connection: Arc<Connection>,
    set: ProgramSet,
    arenas: [Bytes; 3],
    algorithms: Option<Algorithms>,
    kind: DeviceKind,
    /// What needs no answer, and the bytes that it brings.
    deferred: Vec<Command>,
    bytes: Vec<u8>,
    /// Whether something has run since it last settled.
    settled: bool,
    slower: f64,
    computed: Option<f64>,
    collectives: Option<CollectivesBy>,
    /// What could not be said when it happened.
    failed: Option<DeviceError>,
}

impl FarDevice {
    /// Opens a device in the process at the other end of a connection, which gives its memory back by itself where it hears nothing
    /// of the run for twice the `silence` after which a device is lost.
    ///
    /// # Errors
    /// What that process says, or that it is gone.
    pub fn open(
        connection: Arc<Connection>,
        spec: &DeviceSpec,
        set: ProgramSet,
        placement: Placement,
        precision: DType,
        algorithms: Option<&Algorithms>,
        silence: Duration,
    ) -> Result<FarDevice, DeviceError> {
        let request = Request::Open {
            version: VERSION,
            device: Box::new(spec.clone()),
            set: Box::new(set),
            placement,
            precision,
            algorithms: algorithms.cloned(),
            silence: 2 * silence,
        };
        let answer = connection.ask(&request, &[])?.0;
        let Request::Open { set, .. } = request else { unreachable!("it was just made") };
        let mut device = FarDevice {
            connection,
            set: *set,
            arenas: [Bytes::ZERO; 3],
            algorithms: None,
            kind: spec.kind,
            deferred: Vec::new(),
            bytes: Vec::new(),
            settled: true,
            slower: 1.0,
            computed: None,
            collectives: None,
            failed: None,
        };
        device.opened(answer)?;
        Ok(device)
    }

    fn opened(&mut self, answer: Answer) -> Result<(), DeviceError> {
        match answer {
            Answer::Opened { place, arenas, algorithms } => {
                *locked(&self.connection.place) = place;
                (self.arenas, self.algorithms) = (arenas, algorithms);
                Ok(())
            }
            Answer::Failed(fault) => Err(fault.error(&self.connection.device)),
            other => Err(self.connection.lost(format!("it answers {other:?}"))),
        }
    }

    fn defer(&mut self, command: Command) {
        self.deferred.push(command);
    }

    /// Has everything done that was put off, and `last`, whose answer this gives. A file that cannot be read or written is
    /// told as its own error.
    fn work(&mut self, last: Command, files: &mut dyn FileSpace) -> Result<(Found, Vec<u8>), DeviceError> {
        if let Some(failed) = self.failed.take() {
            self.deferred.clear();
            self.bytes.clear();
            return Err(failed);
        }
        self.deferred.push(last);
        let attempt = self.connection.attempt.load(Ordering::Relaxed);
        let request = Request::Work { attempt, commands: std::mem::take(&mut self.deferred) };
        let mut answer = self.connection.ask(&request, &std::mem::take(&mut self.bytes))?;
        let mut of_file = None;
        loop {
            let mut read = Vec::new();
            let moved = match &answer {
                (Answer::Done(_), _) => {
                    let (Answer::Done(found), bytes) = answer else { unreachable!("it was just looked at") };
                    return Ok((found, bytes));
                }
                (Answer::Failed(_), _) => {
                    let (Answer::Failed(fault), _) = answer else { unreachable!("it was just looked at") };
                    return Err(match of_file {
                        Some((tensor, source)) => DeviceError::File { tensor, source },
                        None => fault.error(&self.connection.device),
                    });
                }
                (Answer::Reads { tensor, offset, bytes }, _) => {
                    read = vec![0; *bytes as usize];
                    files.read(tensor, *offset, &mut read).map_err(|error| (tensor.clone(), error))
                }
                (Answer::Writes { tensor, offset }, bytes) => {
                    files.write(tensor, *offset, bytes).map_err(|error| (tensor.clone(), error))
                }
                (other, _) => return Err(self.connection.lost(format!("it answers {other:?}"))),
            };
            let failed = moved.err().map(|(tensor, error)| {
                let why = error.to_string();
                of_file = Some((tensor, error));
                why
            });
            answer = self.connection.ask(&Request::Files { failed }, &read)?;
        }
    }

    /// The same where nobody can be told what fails: it is said when the device settles.
    fn look_at(&mut self, command: Command) -> (Found, Vec<u8>) {
        self.work(command, &mut NoFiles).unwrap_or_else(|error| {
            self.failed = Some(error);
            (Found::default(), Vec::new())
        })
    }
}

impl Drop for FarDevice {
    fn drop(&mut self) {
        // Where it is gone, so is its memory.
        let _ = self.connection.ask(&Request::Close, &[]);
    }
}

/// Programs whose failure may be told by the next one of the step.
const PUT_OFF: [&str; 3] = ["begin", "forward", "backward"];

impl Device for FarDevice {
    /// As on a device with queues, observers are told of all ops before any runs.
    fn run_observed(
        &mut self,
        call: Call,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        let no_program = || DeviceError::NoProgram { program: call.program.to_owned() };
        let program = self.set.program(call.program).ok_or_else(no_program)?;
        let mut refused = None;
        let trace = (1..).zip(program.trace()).skip_while(|(tick, _)| *tick < call.from);
        for (tick, (op, _)) in trace.filter(|(_, (op, _))| op.runs(call.last)) {
            if let Err(error) = observer.before(tick, op, &mut Unseen) {
                refused = Some((tick, error));
                break;
            }
            observer.after(tick, op, &mut Unseen);
        }
        let Call { program, micro_batch, from, last } = call;
        let refuses_at = refused.as_ref().map(|(tick, _)| *tick);
        let run = Command::Run { program: program.to_owned(), micro_batch, from, last, refuses_at };
        self.settled = false;
        if refused.is_none() && PUT_OFF.contains(&program) {
            self.defer(run);
            return Ok(());
        }
        let done = self.work(run, files);
        match (refused, done) {
            // What this device was refused comes before what others have told it.
            (Some((_, error)), Err(DeviceError::Elsewhere { .. } | DeviceError::Peer { .. }) | Ok(_)) => Err(error),
            (_, done) => done.map(|_| ()),
        }
    }

    fn settle(&mut self) -> Result<(), DeviceError> {
        if self.settled && self.deferred.is_empty() && self.failed.is_none() {
            return Ok(());
        }
        let found = self.work(Command::Settle, &mut NoFiles)?.0;
        (self.settled, self.computed, self.collectives) = (true, found.computed, found.collectives);
        Ok(())
    }

    fn computed(&mut self) -> Option<f64> {
        self.computed
    }

    fn collectives(&self) -> Option<CollectivesBy> {
        self.collectives.clone()
    }

    fn slow_down(&mut self, factor: f64) -> bool {
        let simulated = self.kind == DeviceKind::Virtual;
        if simulated && factor != self.slower {
            self.slower = factor;
            self.defer(Command::SlowDown(factor));
        }
        simulated
    }

    fn write(&mut self, tensor: TensorId, slot: u32, bytes: &[u8]) {
        self.defer(Command::Write { tensor, slot, bytes: bytes.len() as u64 });
        self.bytes.extend_from_slice(bytes);
    }

    /// Where the device cannot be reached, what is read is no number.
    fn read(&mut self, tensor: TensorId, slot: u32, bytes: &mut [u8]) {
        let (_, found) = self.look_at(Command::Read { tensor, slot, bytes: bytes.len() as u64 });
        match found.len() == bytes.len() {
            true => bytes.copy_from_slice(&found),
            false => bytes.fill(0xff),
        }
    }

    fn adopt(&mut self, set: ProgramSet, placement: Placement) -> Result<(), DeviceError> {
        self.settle()?;
        let request = Request::Adopt { set: Box::new(set), placement };
        let answer = self.connection.ask(&request, &[])?.0;
        self.opened(answer)?;
        let Request::Adopt { set, .. } = request else { unreachable!("it was just made") };
        self.set = *set;
        Ok(())
    }

    fn room(&mut self) -> Option<Room> {
        let RoomFound { total, free, bound_by, held, measured } = self.look_at(Command::Room).0.room?;
        *locked(&self.connection.measured) = measured;
        Some(Room { memory: probe::Memory { total, free, bound_by }, held })
    }

    fn algorithms(&self) -> Option<Algorithms> {
        self.algorithms.clone()
    }

    fn memory(&mut self) -> &mut dyn Memory {
        self
    }
}

impl Memory for FarDevice {
    fn bytes(&self, space: Space) -> Bytes {
        match space {
            Space::Device => self.arenas[0],
            Space::Host => self.arenas[1],
            Space::Scratch => self.arenas[2],
            Space::File => Bytes::ZERO,
        }
    }

    fn look(&mut self, space: Space, range: Range<u64>) -> Cow<'_, [u8]> {
        Cow::Owned(self.look_at(Command::Look { space, first: range.start, end: range.end }).1)
    }

    fn fill(&mut self, space: Space, first: u64, bytes: &[u8]) {
        self.defer(Command::Fill { space, first, bytes: bytes.len() as u64 });
        self.bytes.extend_from_slice(bytes);
    }

    fn poison(&mut self, space: Space, range: Range<u64>) {
        self.defer(Command::Poison { space, first: range.start, end: range.end });
    }

    fn high_water(&mut self, space: Space) -> Bytes {
        self.look_at(Command::HighWater(space)).0.bytes
    }

    fn strayed(&mut self, space: Space) -> bool {
        self.look_at(Command::Strayed(space)).0.yes
    }
}
