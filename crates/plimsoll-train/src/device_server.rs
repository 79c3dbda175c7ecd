//! The device's side: a process that holds one device and answers the run's requests for it.
//!
//! Three threads work together:
//! - callers of [`DeviceServer::answer`] handle out-of-band requests themselves and queue all others;
//! - the device thread (`DeviceWorker`) executes queued requests one at a time;
//! - the contact thread closes the device if the run sends nothing for too long, so that its memory becomes free.

use crate::config::RunConfig;
use crate::engine::open::{liveness_probe, open_device};
use crate::heartbeat::{MissedTicks, TICKS_PER_TIMEOUT};
use crate::remote::distributed::connect_transport;
use crate::remote::links;
use crate::remote::protocol::{
    ArenaSizes, Command, CommandResult, ErrorReply, LinkSpeeds, MemoryReport, Request, Response, VERSION, decode,
    encode,
};
use crate::remote::sockets::{receive, send};
use crate::remote::{Invitation, PeerNetwork, lock, peer_unreachable};
use crate::resolve::charges::process_charges;
use crate::resolve::{RunRequest, resolve_devices};
use plimsoll_core::{Bytes, DeviceKind, DeviceSpec, Failure, MeasuredBy, Space};
use plimsoll_device::device::{AvailableMemory, Device, FileSpace, Memory, Observer, ProgramCall};
use plimsoll_device::error::DeviceError;
use plimsoll_device::gpu::GpuMonitor;
use plimsoll_device::process;
use plimsoll_device::transport::wire::WireTransport;
use plimsoll_device::transport::{GroupHandle, Transport};
use plimsoll_plan::device_request::DeviceRequest;
use plimsoll_program::{Op, ProgramKind};
use std::io::{self, Read, Write};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;

/// Largest number of bytes of a file in one message. While a message is sent, several copies of its bytes exist.
const FILE_CHUNK_BYTES: usize = 1 << 20;

/// Memory of a device server for requests and files, in addition to the charges of any run (bytes outside the arena).
/// It holds copies of a file chunk and buffers of connections. Measured under Ray: 1 MiB after thousands of steps; 7 to
/// 9 MiB if files are saved, of which the charges of a run already cover 5 MiB.
const TRANSPORT_BYTES: Bytes = Bytes::mib(8);

/// A request on its way to the device thread.
struct QueuedRequest {
    request: Request,
    bytes: Vec<u8>,
    /// Channel to which the encoded response is sent.
    response_sender: Sender<Vec<u8>>,
}

/// Function that returns whether the device responds.
type LivenessProbe = Arc<dyn Fn() -> bool + Send + Sync>;

/// State that all threads of a device server share.
struct Shared {
    /// Transport of the team that the device has joined; `None` before it joins one, and once it is closed.
    transport: Mutex<Option<Arc<WireTransport>>>,
    contact: ContactMonitor,
    /// Probe of the open device; `None` if no device is open.
    liveness_probe: Mutex<Option<LivenessProbe>>,
    network: Arc<dyn PeerNetwork>,
}

/// Server that answers the requests of a run for the one device of this process. After the server is dropped, the
/// device is closed as soon as the current request has ended.
pub struct DeviceServer {
    requests: Arc<Mutex<Sender<QueuedRequest>>>,
    shared: Arc<Shared>,
}

/// Monitor of the messages that the run sends to this process. It detects that the run has stopped sending them.
#[derive(Default)]
struct ContactMonitor(Mutex<Contact>);

/// State of the contact between the run and this process.
#[derive(Default)]
struct Contact {
    /// Number of ticks of the contact thread since the run's last message. `None` before the run's first ping; until
    /// then, the run is never considered lost.
    missed_ticks: Option<MissedTicks>,
    /// Time without a message after which the run is considered lost. `None` if no device is open, or once the run is
    /// considered lost.
    timeout: Option<Duration>,
}

/// Time between two ticks of the contact thread if no device is open, or before the first ping of the run.
const IDLE_TICK_INTERVAL: Duration = Duration::from_millis(200);

impl DeviceServer {
    /// Starts a server without an open device.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn new(network: Arc<dyn PeerNetwork>) -> io::Result<DeviceServer> {
        DeviceServer::with_gpu(network, None)
    }

    /// Starts a server without an open device, in a process that may be restricted to one GPU. `gpu` is the index of
    /// that GPU in this process, which may differ from the index that the run uses; `None` without a restriction.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn with_gpu(network: Arc<dyn PeerNetwork>, gpu: Option<u32>) -> io::Result<DeviceServer> {
        let (sender, receiver) = channel();
        let shared = Arc::new(Shared {
            transport: Mutex::default(),
            contact: ContactMonitor::default(),
            liveness_probe: Mutex::default(),
            network,
        });
        let queue = RequestQueue { requests: receiver, response_sender: None, postponed: None };
        let worker_state = Arc::clone(&shared);
        let worker = DeviceWorker { queue, shared: worker_state, gpu, device: None, gpu_monitor: None, attempt: 0 };
        thread::Builder::new().name("plimsoll-remote".to_owned()).spawn(move || worker.run())?;
        let requests = Arc::new(Mutex::new(sender));
        let (contact_state, weak_requests) = (Arc::clone(&shared), Arc::downgrade(&requests));
        let monitor = move || contact_state.monitor_contact(&weak_requests);
        thread::Builder::new().name("plimsoll-contact".to_owned()).spawn(monitor)?;
        Ok(DeviceServer { requests, shared })
    }

    /// Returns the address at which peers reach this process.
    pub fn address(&self) -> String {
        self.shared.network.address()
    }

    /// Measures the links from `rank` to the other ranks of an invitation, while these do the same. Returns one entry
    /// per rank: the speeds of the link to a higher rank, and `None` for a lower rank or `rank` itself.
    ///
    /// # Errors
    /// A peer does not connect or disconnects.
    pub fn measure_links(&self, invitation: &Invitation, rank: u32) -> io::Result<Vec<Option<LinkSpeeds>>> {
        links::measure_own_links(&*self.shared.network, invitation, rank)
    }

    /// Returns the encoded response to an encoded request. Answers out-of-band requests (pings, aborts and the
    /// cancellation of a team) at once. For all others, waits until the device thread has handled them and the requests
    /// before them.
    pub fn answer(&self, request: &[u8]) -> Vec<u8> {
        self.shared.contact.record_message();
        let done = || encode(&Response::Done(CommandResult::default()), &[]);
        let failed = |reason: String| encode(&Response::Failed(ErrorReply::Lost(reason)), &[]);
        match decode(request) {
            Err(error) => failed(error.to_string()),
            Ok((Request::Ping, _)) => {
                self.shared.contact.record_ping();
                let probe = lock(&self.shared.liveness_probe).clone();
                match probe.is_none_or(|probe| probe()) {
                    true => done(),
                    false => failed("the device does not respond".to_owned()),
                }
            }
            Ok((Request::Abort { attempt, rank, reason }, _)) => {
                let transport = lock(&self.shared.transport).clone();
                transport.iter().for_each(|transport| transport.abort_attempt(attempt, rank, &reason));
                done()
            }
            Ok((Request::CancelTeam { secret }, _)) => {
                self.shared.network.cancel_team(&secret);
                done()
            }
            Ok((request, bytes)) => {
                let (response_sender, response) = channel();
                let requests = lock(&self.requests).clone();
                let sent = requests.send(QueuedRequest { request, bytes: bytes.to_vec(), response_sender });
                let response = sent.ok().and_then(|()| response.recv().ok());
                response.unwrap_or_else(|| failed("internal error: the device thread has ended".to_owned()))
            }
        }
    }
}

/// Answers requests on both streams of a [`StreamChannel`](crate::remote::sockets::StreamChannel) until the run closes
/// them.
pub fn serve<S: Read + Write + Send>(server: &DeviceServer, requests: S, out_of_band: S) {
    thread::scope(|scope| {
        // Without this thread the streams are closed, and the run loses the device.
        if thread::Builder::new().spawn_scoped(scope, || answer_all(server, out_of_band)).is_ok() {
            answer_all(server, requests);
        }
    });
}

/// Answers the requests on one stream until the run closes it.
fn answer_all(server: &DeviceServer, mut stream: impl Read + Write) {
    while let Ok(request) = receive(&mut stream) {
        if send(&mut stream, &server.answer(&request)).is_err() {
            return;
        }
    }
}

impl Shared {
    /// Counts the ticks of the contact thread, and closes the device once the run is lost. Returns after the server is
    /// dropped.
    fn monitor_contact(&self, requests: &Weak<Mutex<Sender<QueuedRequest>>>) {
        while let Some(requests) = requests.upgrade() {
            if self.contact.loses_run_with_tick() {
                self.close_after_lost_contact(&requests);
            }
            drop(requests);
            thread::sleep(self.contact.tick_interval());
        }
    }

    /// Aborts the team's current work, if the device is in a team. Then queues a request to close the device.
    fn close_after_lost_contact(&self, requests: &Mutex<Sender<QueuedRequest>>) {
        // Peers may wait for this device, and this device for its peers.
        let transport = lock(&self.transport).clone();
        transport.iter().for_each(|transport| transport.abort(transport.rank(), "it has lost contact with the run"));
        // The response is not needed. If the device thread has ended, there is no device to close.
        let close = QueuedRequest { request: Request::Close, bytes: Vec::new(), response_sender: channel().0 };
        let _ = lock(requests).send(close);
    }
}

impl ContactMonitor {
    /// Records that the run has sent a message. Has no effect before the run's first ping.
    fn record_message(&self) {
        lock(&self.0).missed_ticks.iter_mut().for_each(MissedTicks::reset);
    }

    /// Records a ping of the run. From its first ping on, the run can be considered lost.
    fn record_ping(&self) {
        lock(&self.0).missed_ticks = Some(MissedTicks::default());
    }

    /// Sets the state before the run's first ping again, because another device is being opened. Does not block.
    fn await_first_ping(&self) {
        lock(&self.0).missed_ticks = None;
    }

    /// Sets the time without a message after which the run is considered lost; `None` if no device is open.
    fn set_timeout(&self, timeout: Option<Duration>) {
        lock(&self.0).timeout = timeout;
    }

    /// Counts a tick of the contact thread since the run's last message. Returns whether the run must be considered
    /// lost from this tick on. Returns true at most once for each opened device.
    fn loses_run_with_tick(&self) -> bool {
        let mut contact = lock(&self.0);
        let Contact { missed_ticks: Some(missed_ticks), timeout: timeout @ Some(_) } = &mut *contact else {
            return false;
        };
        let is_lost = missed_ticks.count_tick();
        if is_lost {
            *timeout = None;
        }
        is_lost
    }

    /// Returns the time until the next tick of the contact thread.
    fn tick_interval(&self) -> Duration {
        match *lock(&self.0) {
            Contact { missed_ticks: Some(_), timeout: Some(timeout) } => timeout / TICKS_PER_TIMEOUT,
            _ => IDLE_TICK_INTERVAL,
        }
    }
}

/// Receiving end of the request queue, held by the device thread.
struct RequestQueue {
    requests: Receiver<QueuedRequest>,
    /// Channel for the response to the current request; `None` once the response is sent.
    response_sender: Option<Sender<Vec<u8>>>,
    /// Request that arrived while the device thread expected a file reply. It is handled next; `None` if there is none.
    postponed: Option<QueuedRequest>,
}

impl RequestQueue {
    /// Waits for the next request and returns it with the bytes that follow it; `None` after the server was dropped.
    fn next(&mut self) -> Option<(Request, Vec<u8>)> {
        let queued = self.postponed.take().or_else(|| self.requests.recv().ok())?;
        let QueuedRequest { request, bytes, response_sender } = queued;
        self.response_sender = Some(response_sender);
        Some((request, bytes))
    }

    /// Sends the response to the current request, followed by `bytes`. Does nothing if a response has been sent.
    fn respond(&mut self, response: &Response, bytes: &[u8]) {
        if let Some(response_sender) = self.response_sender.take() {
            // The requester may have disconnected.
            let _ = response_sender.send(encode(response, bytes));
        }
    }

    /// Asks the run to read or write one of its files. Sends `request` as the response to the current request, followed
    /// by `bytes`. Returns the bytes of the run's reply.
    ///
    /// # Errors
    /// The run reports an error, another request arrives instead of the reply, or the server is dropped.
    fn exchange_file_bytes(&mut self, request: &Response, bytes: &[u8]) -> io::Result<Vec<u8>> {
        self.respond(request, bytes);
        match self.next() {
            Some((Request::FileReply { error: None }, bytes)) => Ok(bytes),
            Some((Request::FileReply { error: Some(reason) }, _)) => Err(io::Error::other(reason)),
            other => {
                let other = other.zip(self.response_sender.take());
                let queued = |((request, bytes), response_sender)| QueuedRequest { request, bytes, response_sender };
                self.postponed = other.map(queued);
                Err(io::Error::new(io::ErrorKind::BrokenPipe, "the run that has the file does not respond"))
            }
        }
    }
}

/// Asks the run to read and write its files, chunk by chunk.
impl FileSpace for RequestQueue {
    fn read(&mut self, tensor: &str, offset: u64, into: &mut [u8]) -> io::Result<()> {
        for (offset, into) in (offset..).step_by(FILE_CHUNK_BYTES).zip(into.chunks_mut(FILE_CHUNK_BYTES)) {
            let request = Response::ReadFile { tensor: tensor.to_owned(), offset, bytes: into.len() as u64 };
            let bytes = self.exchange_file_bytes(&request, &[])?;
            if bytes.len() != into.len() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            into.copy_from_slice(&bytes);
        }
        Ok(())
    }

    fn write(&mut self, tensor: &str, offset: u64, from: &[u8]) -> io::Result<()> {
        for (offset, from) in (offset..).step_by(FILE_CHUNK_BYTES).zip(from.chunks(FILE_CHUNK_BYTES)) {
            self.exchange_file_bytes(&Response::WriteFile { tensor: tensor.to_owned(), offset }, from)?;
        }
        Ok(())
    }
}

/// Observer of one Program that injects an out-of-memory error at the request of the run. The error occurs before the
/// op with the number `op`, counted from 1. If `op` is `None`, no error occurs.
struct InjectedRefusal {
    program: ProgramKind,
    op: Option<u32>,
}

impl Observer for InjectedRefusal {
    fn before(&mut self, tick: u32, op: &Op, _: &mut dyn Memory) -> Result<(), DeviceError> {
        match self.op == Some(tick) {
            true => Err(DeviceError::OutOfMemory { program: self.program.to_string(), tick, op: op.name() }),
            false => Ok(()),
        }
    }

    fn serializes_ops(&self) -> bool {
        false
    }
}

/// The device thread: owns the device and executes requests in order.
struct DeviceWorker {
    queue: RequestQueue,
    shared: Arc<Shared>,
    /// Index of the only GPU that this process sees; `None` if the process is not restricted to one GPU.
    gpu: Option<u32>,
    device: Option<Box<dyn Device>>,
    /// Monitor of the memory that this process holds on its GPU; `None` unless a GPU is open.
    gpu_monitor: Option<GpuMonitor>,
    /// Number of the team's current attempt at its work, counted from 1; 0 before the first one. After an abort the
    /// team begins the next attempt, and messages of earlier ones are ignored.
    attempt: u64,
}

impl DeviceWorker {
    /// Handles requests until the server is dropped.
    fn run(mut self) {
        while let Some((request, bytes)) = self.queue.next() {
            let mut output = Vec::new();
            let response = self.handle(request, &bytes, &mut output).unwrap_or_else(Response::Failed);
            self.queue.respond(&response, &output);
        }
    }

    /// Handles a request that is followed by `bytes`, and returns the response. Stores the bytes that must follow the
    /// response in `output`.
    fn handle(&mut self, request: Request, bytes: &[u8], output: &mut Vec<u8>) -> Result<Response, ErrorReply> {
        let network = Arc::clone(&self.shared.network);
        match request {
            Request::Describe { version, config } => {
                check_version(version)?;
                Ok(Response::Described(Box::new(self.describe(*config)?)))
            }
            Request::Open { version, device, set, placement, precision, algorithms, run_timeout } => {
                check_version(version)?;
                self.close();
                let device = self.with_local_name(*device);
                // Pings arrive while the device opens. They also prove that the run is alive.
                self.set_liveness_probe(Some(liveness_probe(&device, None)));
                self.shared.contact.await_first_ping();
                let opened = open_device(&device, *set, placement, precision, algorithms.as_ref(), None)?;
                (self.device, self.gpu_monitor) = (Some(opened.0), opened.1);
                self.shared.contact.set_timeout(Some(run_timeout.max(Duration::from_millis(1))));
                process::trim_heap();
                self.opened_response()
            }
            Request::Adopt { set, placement } => {
                self.device()?.adopt(*set, placement)?;
                self.opened_response()
            }
            Request::GetAddress => Ok(Response::Address(network.address())),
            Request::MeasureLinks { rank, invitation } => {
                let speeds = links::measure_own_links(&*network, &invitation.into(), rank);
                Ok(Response::Links(speeds.map_err(|error| peer_unreachable(rank, &error))?))
            }
            Request::JoinTeam { rank, invitation } => {
                let invitation = invitation.into();
                let transport = connect_transport(&*network, &invitation, rank)?;
                let group = GroupHandle { rank, transport: transport.clone(), nccl: invitation.nccl };
                self.device()?.join_group(group)?;
                self.set_transport(Some(transport));
                Ok(Response::Done(CommandResult::default()))
            }
            Request::Close => {
                self.close();
                Ok(Response::Done(CommandResult::default()))
            }
            Request::Execute { attempt, commands } => {
                let transport = lock(&self.shared.transport).clone();
                if let Some(transport) = transport.filter(|_| attempt > self.attempt) {
                    transport.begin_attempt(attempt);
                    self.attempt = attempt;
                }
                let (mut input, mut result) = (bytes, CommandResult::default());
                for command in commands {
                    result = self.execute(command, &mut input, output)?;
                }
                Ok(Response::Done(result))
            }
            Request::FileReply { .. } | Request::Ping | Request::Abort { .. } | Request::CancelTeam { .. } => {
                Err(ErrorReply::Lost("unexpected request".to_owned()))
            }
        }
    }

    /// Returns the specification of the only device that `config` names. Measures the charges (bytes outside the arena)
    /// of a CPU or virtual device; those of a GPU may be assumed.
    fn describe(&self, config: RunConfig) -> Result<DeviceSpec, ErrorReply> {
        let mut run = RunRequest::from(config);
        let mut named = run.devices();
        if let (Some(gpu), [DeviceRequest::Cuda { index, .. }]) = (self.gpu, &mut named.devices[..]) {
            *index = Some(gpu);
        }
        run.run.devices = named.to_string();
        // Charges are measured before rates, because measuring rates touches pages that a run would touch, too. So the plan
        // does not depend on whether the rates were known.
        let charges = process_charges(run.buffered_sequences(), u64::from(run.data.sequence));
        let mut device = resolve_devices(&run)?.remove(0);
        if self.device.is_none() {
            // A measurement has freed its memory. From here on the peak belongs to runs.
            let _ = process::reset_peak();
        }
        if device.in_process() {
            (device.charges, device.charges_measured) = (charges + TRANSPORT_BYTES, true);
        }
        Ok(device)
    }

    /// Returns the device with its name in this process instead of its name in the run. The local name has no host, and
    /// a GPU has its index in this process.
    fn with_local_name(&self, mut device: DeviceSpec) -> DeviceSpec {
        if let Some((_, name)) = device.name.split_once('/') {
            device.name = name.to_owned();
        }
        if let (Some(gpu), DeviceKind::Cuda) = (self.gpu, device.kind) {
            device.name = format!("cuda:{gpu}");
        }
        device
    }

    fn device(&mut self) -> Result<&mut Box<dyn Device>, ErrorReply> {
        self.device.as_mut().ok_or_else(no_open_device)
    }

    fn set_transport(&mut self, transport: Option<Arc<WireTransport>>) {
        *lock(&self.shared.transport) = transport;
        self.attempt = 0;
    }

    fn set_liveness_probe(&self, probe: Option<LivenessProbe>) {
        *lock(&self.shared.liveness_probe) = probe;
    }

    /// Closes the device, if one is open, and returns its memory to the system.
    fn close(&mut self) {
        self.shared.contact.set_timeout(None);
        (self.device, self.gpu_monitor) = (None, None);
        self.set_liveness_probe(None);
        self.set_transport(None);
        process::trim_heap();
    }

    fn opened_response(&mut self) -> Result<Response, ErrorReply> {
        let address = self.shared.network.address();
        let device = self.device()?;
        let algorithms = device.algorithms();
        let memory = device.memory();
        let [device, host, scratch] = [Space::Device, Space::Host, Space::Scratch].map(|space| memory.bytes(space));
        Ok(Response::Opened { address, arenas: ArenaSizes { device, host, scratch }, algorithms })
    }

    /// Executes a command on the device. Removes the bytes that the command needs from the front of `input`. A command
    /// that reads replaces the contents of `output`.
    fn execute(
        &mut self,
        command: Command,
        input: &mut &[u8],
        output: &mut Vec<u8>,
    ) -> Result<CommandResult, ErrorReply> {
        let DeviceWorker { device, queue, gpu_monitor, .. } = self;
        let device = device.as_mut().ok_or_else(no_open_device)?;
        let mut result = CommandResult::default();
        match command {
            Command::Write { tensor, slot, bytes } => device.write(tensor, slot, take_input(input, bytes)?),
            Command::Run { program, micro_batch, first_op, is_last_micro_batch, refuses_at } => {
                let call = ProgramCall { program, micro_batch, first_op, is_last_micro_batch };
                device.run_observed(call, queue, &mut InjectedRefusal { program, op: refuses_at })?;
            }
            Command::Synchronize => {
                device.synchronize()?;
                (result.compute_seconds, result.collectives) = (device.compute_seconds(), device.collectives());
            }
            Command::SlowDown(factor) => result.flag = device.set_compute_slowdown(factor),
            Command::Read { tensor, slot, bytes } => {
                *output = vec![0; bytes as usize];
                device.read(tensor, slot, output);
            }
            Command::View { space, first, end } => *output = device.memory().view(space, first..end).into_owned(),
            Command::Fill { space, first, bytes } => device.memory().fill(space, first, take_input(input, bytes)?),
            Command::Poison { space, first, end } => device.memory().poison(space, first..end),
            Command::HighWater(space) => result.bytes = device.memory().high_water(space),
            Command::HasStrayWrites(space) => result.flag = device.memory().has_stray_writes(space),
            Command::AvailableMemory => {
                let available = device.available_memory();
                result.memory = available.map(|available| memory_report(available, gpu_monitor.as_ref()));
            }
        }
        Ok(result)
    }
}

/// Removes the next `bytes` bytes from the front of a request's input and returns them.
///
/// # Errors
/// The input is shorter.
fn take_input<'a>(input: &mut &'a [u8], bytes: u64) -> Result<&'a [u8], ErrorReply> {
    let truncated = || ErrorReply::from(Failure::bug("the input of a request is truncated"));
    let (taken, rest) = input.split_at_checked(bytes as usize).ok_or_else(truncated)?;
    *input = rest;
    Ok(taken)
}

fn memory_report(available: AvailableMemory, gpu: Option<&GpuMonitor>) -> MemoryReport {
    let measured = match gpu {
        Some(gpu) => gpu.measured_bytes(),
        None => process::peak_resident().ok().map(|peak| (peak, MeasuredBy::Process)),
    };
    let AvailableMemory { memory, held_bytes } = available;
    MemoryReport { total: memory.total, free: memory.free, bound_by: memory.bound_by, held: held_bytes, measured }
}

fn no_open_device() -> ErrorReply {
    ErrorReply::Lost("its process has been restarted".to_owned())
}

fn check_version(version: u32) -> Result<(), ErrorReply> {
    match version == VERSION {
        true => Ok(()),
        false => Err(Failure::input(format!("the run speaks version {version}, and this process version {VERSION}"))
            .hint("install the same Plimsoll on all machines")
            .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::sockets::TcpPeerNetwork;

    #[test]
    fn other_version_and_malformed_requests_are_rejected() {
        let server = DeviceServer::new(TcpPeerNetwork::listen("127.0.0.1:0").unwrap()).unwrap();
        let config = Box::new(RunConfig::from_settings(&["model.preset=smollm2-135m".to_owned()]).unwrap());
        let response = server.answer(&encode(&Request::Describe { version: VERSION + 1, config }, &[]));
        let (response, _) = decode::<Response>(&response).unwrap();
        let Response::Failed(error) = response else { panic!("{response:?}") };
        let failure = Failure::from(error.into_error("b/cpu"));
        assert_eq!(failure.exit, plimsoll_core::Exit::Input);
        assert!(failure.message.starts_with(&format!("b/cpu: the run speaks version {}", VERSION + 1)), "{failure}");
        let commands = vec![Command::Synchronize];
        let execute = encode(&Request::Execute { attempt: 0, commands }, &[]);
        for bytes in [&[][..], &[1; 7], &[0xff; 40], &execute[..execute.len() - 1], &execute] {
            let response = server.answer(bytes);
            assert!(matches!(decode(&response), Ok((Response::Failed(ErrorReply::Lost(_)), _))), "{bytes:?}");
        }
        assert!(matches!(decode(&server.answer(&encode(&Request::Ping, &[]))), Ok((Response::Done(_), _))));
    }
}
