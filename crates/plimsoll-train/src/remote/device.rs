//! The run's side of a remote device: a [`Device`] that forwards its calls, and the connection to the other process.

use super::protocol::{
    ArenaSizes, Command, CommandResult, LinkSpeeds, MemoryReport, Request, Response, VERSION, decode, encode,
};
use super::{Channel, Invitation, lock};
use crate::config::RunConfig;
use crate::heartbeat::Liveness;
use plimsoll_core::{Bytes, CollectiveBackend, DType, DeviceKind, DeviceSpec, GemmAlgorithms, MeasuredBy, Space};
use plimsoll_device::device::{AvailableMemory, Device, FileSpace, Memory, NoFiles, NoMemory, Observer, ProgramCall};
use plimsoll_device::error::DeviceError;
use plimsoll_device::probe;
use plimsoll_program::{Placement, ProgramKind, ProgramSet, TensorId};
use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Interval at which a caller that waits for a response checks whether the heartbeat monitor has declared the device
/// lost.
const LIVENESS_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A request that waits until the connection's thread sends it, with the sender that returns the response.
struct PendingRequest {
    request: Vec<u8>,
    reply: Sender<io::Result<Vec<u8>>>,
}

/// A connection to the process of a device. A thread of its own waits for responses, so a caller can return as soon as
/// the device is declared lost.
pub struct Connection {
    device: String,
    channel: Arc<dyn Channel>,
    requests: Mutex<Sender<PendingRequest>>,
    /// Sequence number of the team's current attempt at its work, which is sent with commands.
    attempt: AtomicU64,
    /// Address at which the other devices of the team reach this one; empty until the device is opened.
    address: Mutex<String>,
    /// Peak bytes of the device's process, or bytes held on its GPU, with the method of measurement. `None` until the
    /// process has reported them.
    measured_memory: Mutex<Option<(Bytes, MeasuredBy)>>,
    liveness: Mutex<Option<Arc<Liveness>>>,
}

impl Connection {
    /// Creates a connection to the device with this name, and starts its thread. Sends nothing yet.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn new(device: &str, channel: Arc<dyn Channel>) -> Result<Arc<Connection>, DeviceError> {
        let (requests, pending) = self::channel::<PendingRequest>();
        let thread_channel = Arc::clone(&channel);
        let forward = move || forward_requests(&*thread_channel, pending);
        let thread = thread::Builder::new().name(format!("plimsoll-requests-{device}")).spawn(forward);
        thread.map_err(|_| DeviceError::NoThread { queue: "requests".to_owned() })?;
        Ok(Arc::new(Connection {
            device: device.to_owned(),
            channel,
            requests: Mutex::new(requests),
            attempt: AtomicU64::new(0),
            address: Mutex::default(),
            measured_memory: Mutex::default(),
            liveness: Mutex::default(),
        }))
    }

    /// Returns the address at which peers reach the opened device; empty if it was never opened.
    pub(super) fn address(&self) -> String {
        lock(&self.address).clone()
    }

    /// Returns the peak bytes of the device's process, or the bytes that it held on its GPU, with the method of
    /// measurement. They are as of the last [`Device::available_memory`]; `None` before, or if the process cannot
    /// measure them.
    pub fn measured_memory(&self) -> Option<(Bytes, MeasuredBy)> {
        *lock(&self.measured_memory)
    }

    /// Sets the sequence number of the team's current attempt, which is sent with all later commands.
    pub(super) fn begin_attempt(&self, attempt: u64) {
        self.attempt.store(attempt, Ordering::Relaxed);
    }

    /// Tells the device at once that the worker `rank` has failed, even while the device works on a request. The device
    /// then ends the attempt with the number `attempt`.
    pub(super) fn abort_attempt(&self, attempt: u64, rank: u32, reason: &str) {
        let request = encode(&Request::Abort { attempt, rank, reason: reason.to_owned() }, &[]);
        // A lost device needs no notice.
        let _ = self.channel.call_out_of_band(&request);
    }

    /// Tells the device that the team whose invitation has this secret will not form, in case the device waits for it.
    pub(super) fn cancel_team(&self, secret: &str) {
        // A lost device needs no notice.
        let _ = self.channel.call_out_of_band(&encode(&Request::CancelTeam { secret: secret.to_owned() }, &[]));
    }

    /// Returns whether the process responds and reports that its device responds.
    pub fn is_responsive(&self) -> bool {
        let response = self.channel.call_out_of_band(&encode(&Request::Ping, &[]));
        response.is_ok_and(|response| matches!(decode(&response), Ok((Response::Done(_), _))))
    }

    /// Sets the record of the device's heartbeats. Requests fail as soon as this record declares the device lost.
    pub fn set_liveness(&self, liveness: Arc<Liveness>) {
        *lock(&self.liveness) = Some(liveness);
    }

    /// Requests the specification of the device that `config` names. `config` must use the name by which the device's
    /// own process knows it.
    ///
    /// # Errors
    /// An error that the process reports, or a lost connection.
    pub(super) fn describe(&self, config: RunConfig) -> Result<DeviceSpec, DeviceError> {
        match self.ask(&Request::Describe { version: VERSION, config: Box::new(config) }, &[])?.0 {
            Response::Described(spec) => Ok(*spec),
            other => Err(self.unexpected(other)),
        }
    }

    /// Requests the address at which peers reach the device.
    ///
    /// # Errors
    /// An error that the process reports, or a lost connection.
    pub fn fetch_address(&self) -> Result<String, DeviceError> {
        match self.ask(&Request::GetAddress, &[])?.0 {
            Response::Address(address) => Ok(address),
            other => Err(self.unexpected(other)),
        }
    }

    /// Has the device, as `rank`, measure its links to the other ranks of the invitation. Returns the speeds in rank
    /// order, `None` for links that the device did not measure itself.
    ///
    /// # Errors
    /// An error that the process reports, or a lost connection.
    pub(super) fn measure_links(
        &self,
        rank: u32,
        invitation: &Invitation,
    ) -> Result<Vec<Option<LinkSpeeds>>, DeviceError> {
        match self.ask(&Request::MeasureLinks { rank, invitation: invitation.into() }, &[])?.0 {
            Response::Links(speeds) => Ok(speeds),
            other => Err(self.unexpected(other)),
        }
    }

    /// Has the opened device join a team as `rank`.
    ///
    /// # Errors
    /// An error that the process reports, or a lost connection.
    pub fn join_team(&self, rank: u32, invitation: &Invitation) -> Result<(), DeviceError> {
        match self.ask(&Request::JoinTeam { rank, invitation: invitation.into() }, &[])?.0 {
            Response::Done(_) => Ok(()),
            other => Err(self.unexpected(other)),
        }
    }

    /// Returns an error that declares the device lost.
    fn lost(&self, reason: impl std::fmt::Display) -> DeviceError {
        DeviceError::Lost { device: self.device.clone(), reason: reason.to_string() }
    }

    /// Converts a response of another kind than requested into an error: a failure that the process reports, or else
    /// the loss of the device.
    fn unexpected(&self, response: Response) -> DeviceError {
        match response {
            Response::Failed(error) => error.into_error(&self.device),
            other => self.lost(format!("unexpected response {other:?}")),
        }
    }

    /// Sends a request followed by `bytes`, and waits for the response. Returns it with the bytes that follow it. Fails
    /// as soon as the device is declared lost.
    fn ask(&self, request: &Request, bytes: &[u8]) -> Result<(Response, Vec<u8>), DeviceError> {
        let (reply, response) = channel();
        let sent = lock(&self.requests).send(PendingRequest { request: encode(request, bytes), reply });
        sent.map_err(|_| self.lost("the thread of its connection has ended"))?;
        let response = loop {
            match response.recv_timeout(LIVENESS_CHECK_INTERVAL) {
                Ok(response) => break response.map_err(|error| self.lost(error))?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.lost("the thread of its connection has ended"));
                }
                Err(RecvTimeoutError::Timeout) => {
                    if lock(&self.liveness).as_ref().is_some_and(|liveness| liveness.is_lost()) {
                        return Err(self.lost("no sign of life"));
                    }
                }
            }
        };
        let (response, bytes) = decode(&response).map_err(|error| self.lost(error))?;
        Ok((response, bytes.to_vec()))
    }
}

/// Sends each request over `channel` and passes the response to its caller, until the connection is dropped.
fn forward_requests(channel: &dyn Channel, pending: Receiver<PendingRequest>) {
    for PendingRequest { request, reply } in pending {
        // The caller has returned if the device was declared lost.
        let _ = reply.send(channel.call(&request));
    }
}

/// A device in another process.
pub struct RemoteDevice {
    connection: Arc<Connection>,
    set: ProgramSet,
    arenas: ArenaSizes,
    algorithms: Option<GemmAlgorithms>,
    kind: DeviceKind,
    /// Commands without a result. They are kept back and sent together with the next command that has a result.
    deferred: Vec<Command>,
    /// Bytes that the deferred commands write, in the order of the commands.
    deferred_input: Vec<u8>,
    /// Whether no Program was submitted since the last synchronization.
    synchronized: bool,
    slowdown: f64,
    compute_seconds: Option<f64>,
    collectives: Option<CollectiveBackend>,
    /// Error of a call that cannot return errors. The next call that can return errors returns it.
    deferred_error: Option<DeviceError>,
}

impl RemoteDevice {
    /// Opens a device in the process at the other end of a connection. That process closes the device if it receives
    /// nothing from the run for twice `heartbeat_timeout`.
    ///
    /// # Errors
    /// An error that the process reports, or a lost connection.
    pub fn open(
        connection: Arc<Connection>,
        spec: &DeviceSpec,
        set: ProgramSet,
        placement: Placement,
        precision: DType,
        algorithms: Option<&GemmAlgorithms>,
        heartbeat_timeout: Duration,
    ) -> Result<RemoteDevice, DeviceError> {
        let request = Request::Open {
            version: VERSION,
            device: Box::new(spec.clone()),
            set: Box::new(set),
            placement,
            precision,
            algorithms: algorithms.cloned(),
            run_timeout: 2 * heartbeat_timeout,
        };
        let response = connection.ask(&request, &[])?.0;
        let Request::Open { set, .. } = request else { unreachable!("the request was built above") };
        let mut device = RemoteDevice {
            connection,
            set: *set,
            arenas: ArenaSizes::default(),
            algorithms: None,
            kind: spec.kind,
            deferred: Vec::new(),
            deferred_input: Vec::new(),
            synchronized: true,
            slowdown: 1.0,
            compute_seconds: None,
            collectives: None,
            deferred_error: None,
        };
        device.handle_opened(response)?;
        Ok(device)
    }

    /// Stores address, arena sizes and algorithms from the response to a request that opened the device or replaced its
    /// plan.
    fn handle_opened(&mut self, response: Response) -> Result<(), DeviceError> {
        match response {
            Response::Opened { address, arenas, algorithms } => {
                *lock(&self.connection.address) = address;
                (self.arenas, self.algorithms) = (arenas, algorithms);
                Ok(())
            }
            other => Err(self.connection.unexpected(other)),
        }
    }

    fn defer(&mut self, command: Command) {
        self.deferred.push(command);
    }

    /// Executes the deferred commands and then `last`; returns the result of `last` with the bytes that it read.
    /// Meanwhile serves the device's requests for `files`; if one fails, returns its error instead of the one that
    /// follows. If an earlier call has left an error, returns it and executes nothing.
    fn execute(&mut self, last: Command, files: &mut dyn FileSpace) -> Result<(CommandResult, Vec<u8>), DeviceError> {
        if let Some(error) = self.deferred_error.take() {
            self.deferred.clear();
            self.deferred_input.clear();
            return Err(error);
        }
        self.deferred.push(last);
        let attempt = self.connection.attempt.load(Ordering::Relaxed);
        let request = Request::Execute { attempt, commands: std::mem::take(&mut self.deferred) };
        let (mut response, mut bytes) = self.connection.ask(&request, &std::mem::take(&mut self.deferred_input))?;
        let mut file_error = None;
        loop {
            let mut read = Vec::new();
            let (tensor, access) = match response {
                Response::Done(result) => return Ok((result, bytes)),
                Response::Failed(error) => {
                    return Err(file_error.unwrap_or_else(|| error.into_error(&self.connection.device)));
                }
                Response::ReadFile { tensor, offset, bytes } => {
                    read = vec![0; bytes as usize];
                    let access = files.read(&tensor, offset, &mut read);
                    (tensor, access)
                }
                Response::WriteFile { tensor, offset } => {
                    let access = files.write(&tensor, offset, &bytes);
                    (tensor, access)
                }
                other => return Err(self.connection.unexpected(other)),
            };
            let error = access.as_ref().err().map(io::Error::to_string);
            if let Err(source) = access {
                file_error = Some(DeviceError::File { tensor, source });
            }
            (response, bytes) = self.connection.ask(&Request::FileReply { error }, &read)?;
        }
    }

    /// Executes a command for a method that cannot return errors. If the command fails, returns an empty result, and
    /// keeps the error for the next call that can return errors.
    fn execute_infallible(&mut self, command: Command) -> (CommandResult, Vec<u8>) {
        self.execute(command, &mut NoFiles).unwrap_or_else(|error| {
            self.deferred_error = Some(error);
            (CommandResult::default(), Vec::new())
        })
    }
}

impl Drop for RemoteDevice {
    fn drop(&mut self) {
        // If the process is lost, its memory is free already.
        let _ = self.connection.ask(&Request::Close, &[]);
    }
}

/// Programs that the run keeps back and sends together with the next Program of the step. That Program also reports
/// their errors.
const DEFERRED_PROGRAMS: [ProgramKind; 3] = [ProgramKind::BeginStep, ProgramKind::Forward, ProgramKind::Backward];

impl Device for RemoteDevice {
    /// Runs a Program. The observer sees all ops before any of them runs, as on a device with queues.
    fn run_observed(
        &mut self,
        call: ProgramCall,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        let unknown_program = || DeviceError::UnknownProgram { program: call.program.to_string() };
        let program = self.set.program(call.program).ok_or_else(unknown_program)?;
        let mut refusal = None;
        let trace = (1..).zip(program.trace()).skip_while(|(tick, _)| *tick < call.first_op);
        for (tick, (op, _)) in trace.filter(|(_, (op, _))| op.runs(call.is_last_micro_batch)) {
            if let Err(error) = observer.before(tick, op, &mut NoMemory) {
                refusal = Some((tick, error));
                break;
            }
            observer.after(tick, op, &mut NoMemory);
        }
        let ProgramCall { program, micro_batch, first_op, is_last_micro_batch } = call;
        let refuses_at = refusal.as_ref().map(|(tick, _)| *tick);
        let run = Command::Run { program, micro_batch, first_op, is_last_micro_batch, refuses_at };
        self.synchronized = false;
        if refusal.is_none() && DEFERRED_PROGRAMS.contains(&program) {
            self.defer(run);
            return Ok(());
        }
        let done = self.execute(run, files);
        match (refusal, done) {
            // The refusal of this device takes precedence over what its peers reported.
            (Some((_, error)), Err(DeviceError::Remote { .. } | DeviceError::PeerAborted { .. }) | Ok(_)) => Err(error),
            (_, done) => done.map(|_| ()),
        }
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        if self.synchronized && self.deferred.is_empty() && self.deferred_error.is_none() {
            return Ok(());
        }
        let result = self.execute(Command::Synchronize, &mut NoFiles)?.0;
        self.synchronized = true;
        (self.compute_seconds, self.collectives) = (result.compute_seconds, result.collectives);
        Ok(())
    }

    fn compute_seconds(&mut self) -> Option<f64> {
        self.compute_seconds
    }

    fn collectives(&self) -> Option<CollectiveBackend> {
        self.collectives.clone()
    }

    fn set_compute_slowdown(&mut self, factor: f64) -> bool {
        let simulated = self.kind == DeviceKind::Virtual;
        if simulated && factor != self.slowdown {
            self.slowdown = factor;
            self.defer(Command::SlowDown(factor));
        }
        simulated
    }

    fn write(&mut self, tensor: TensorId, slot: u32, bytes: &[u8]) {
        self.defer(Command::Write { tensor, slot, bytes: bytes.len() as u64 });
        self.deferred_input.extend_from_slice(bytes);
    }

    /// Copies bytes out of a tensor's slot into `bytes`. If the device cannot be reached, sets all bits of `bytes`,
    /// which is NaN for floats.
    fn read(&mut self, tensor: TensorId, slot: u32, bytes: &mut [u8]) {
        let (_, read) = self.execute_infallible(Command::Read { tensor, slot, bytes: bytes.len() as u64 });
        match read.len() == bytes.len() {
            true => bytes.copy_from_slice(&read),
            false => bytes.fill(0xff),
        }
    }

    fn adopt(&mut self, set: ProgramSet, placement: Placement) -> Result<(), DeviceError> {
        self.synchronize()?;
        let request = Request::Adopt { set: Box::new(set), placement };
        let response = self.connection.ask(&request, &[])?.0;
        self.handle_opened(response)?;
        let Request::Adopt { set, .. } = request else { unreachable!("the request was built above") };
        self.set = *set;
        Ok(())
    }

    fn available_memory(&mut self) -> Option<AvailableMemory> {
        let report = self.execute_infallible(Command::AvailableMemory).0.memory?;
        let MemoryReport { total, free, bound_by, held, measured } = report;
        *lock(&self.connection.measured_memory) = measured;
        Some(AvailableMemory { memory: probe::Memory { total, free, bound_by }, held_bytes: held })
    }

    fn algorithms(&self) -> Option<GemmAlgorithms> {
        self.algorithms.clone()
    }

    fn memory(&mut self) -> &mut dyn Memory {
        self
    }
}

impl Memory for RemoteDevice {
    fn bytes(&self, space: Space) -> Bytes {
        match space {
            Space::Device => self.arenas.device,
            Space::Host => self.arenas.host,
            Space::Scratch => self.arenas.scratch,
            Space::File => Bytes::ZERO,
        }
    }

    fn view(&mut self, space: Space, range: Range<u64>) -> Cow<'_, [u8]> {
        Cow::Owned(self.execute_infallible(Command::View { space, first: range.start, end: range.end }).1)
    }

    fn fill(&mut self, space: Space, first: u64, bytes: &[u8]) {
        self.defer(Command::Fill { space, first, bytes: bytes.len() as u64 });
        self.deferred_input.extend_from_slice(bytes);
    }

    fn poison(&mut self, space: Space, range: Range<u64>) {
        self.defer(Command::Poison { space, first: range.start, end: range.end });
    }

    fn high_water(&mut self, space: Space) -> Bytes {
        self.execute_infallible(Command::HighWater(space)).0.bytes
    }

    fn has_stray_writes(&mut self, space: Space) -> bool {
        self.execute_infallible(Command::HasStrayWrites(space)).0.flag
    }
}
