//! The device's end: a process that holds one device and answers for it.

use super::links::{self, Ways};
use super::{Answer, Command, Fault, Found, Invitation, Request, RoomFound, VERSION, Wires, decode, encode, locked};
use crate::planning::charges::charges;
use crate::resolve::{devices, rates_under_line};
use crate::team::open::{open, signs_of_life};
use plimsoll_core::{Bytes, DeviceKind, Failure, MeasuredBy, Space};
use plimsoll_device::cuda::open::OnGpu;
use plimsoll_device::device::{Call, Device, DeviceError, FileSpace, Memory, Observer};
use plimsoll_device::process;
use plimsoll_device::transport::wire::Wired;
use plimsoll_device::transport::{Seat, Transport};
use plimsoll_plan::request::DeviceRequest;
use plimsoll_program::Op;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// What was asked, with its bytes, and where the answer goes.
type Asked = (Request, Vec<u8>, Sender<Vec<u8>>);

/// Files go to and fro in pieces of so many bytes at most: each is held a few times on its way.
const PIECE: usize = 1 << 20;

/// What carries requests and files comes to hold in this process beside what any run does: a piece of a file in several copies,
/// and buffers of connections. Measured under Ray: 1 MiB in thousands of steps, 7 to 9 MiB in all where files are saved, of which runs
/// are charged with 5 anyway.
const CARRIES: Bytes = Bytes::mib(8);

/// A process's device. Dropped, it lets go of it as soon as what is under way has ended.
pub struct Host {
    asked: Arc<Mutex<Sender<Asked>>>,
    seated: Arc<Mutex<Option<Arc<Wired>>>>,
    heard: Arc<Heard>,
    signs: Arc<Signs>,
    wires: Arc<dyn Wires>,
}

/// What tells whether the device of this process is there, see [`signs_of_life`]; nothing where there is none.
type Signs = Mutex<Option<Arc<dyn Fn() -> bool + Send + Sync>>>;

/// When the run was last heard of. As of devices, what is counted are looks, not seconds of a clock.
#[derive(Default)]
struct Heard {
    /// Looks since then; [`NOT_YET`] before its first sign of life.
    missed: AtomicU32,
    /// Milliseconds after which it is gone; 0 where there is no device.
    silence: AtomicU64,
}

/// A run that has given no sign of life yet is not missed.
const NOT_YET: u32 = u32::MAX;

/// Looks in the time after which the run is gone.
const LOOKS: u32 = 20;
/// Between looks where there is no device.
const IDLE: Duration = Duration::from_millis(200);

impl Host {
    /// A process that meets others as `wires` say; it has no device yet.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn new(wires: Arc<dyn Wires>) -> io::Result<Host> {
        Host::seeing(wires, None)
    }

    /// One that sees a single GPU, by this number, whatever it is called where others are seen, too.
    ///
    /// # Errors
    /// As above.
    pub fn seeing(wires: Arc<dyn Wires>, gpu: Option<u32>) -> io::Result<Host> {
        let (asked, requests) = channel();
        let seated = Arc::new(Mutex::new(None));
        let (heard, signs) = (Arc::new(Heard::default()), Arc::<Signs>::default());
        let asks = Asks { requests, back: None, put_off: None };
        let mut work = Work {
            asks,
            wires: Arc::clone(&wires),
            gpu,
            seated: Arc::clone(&seated),
            heard: Arc::clone(&heard),
            signs: Arc::clone(&signs),
            device: None,
            on_gpu: None,
            attempt: 0,
        };
        let work = move || work.all();
        thread::Builder::new().name("plimsoll-far".to_owned()).spawn(work)?;
        let asked = Arc::new(Mutex::new(asked));
        let host =
            Host { asked: Arc::clone(&asked), seated: Arc::clone(&seated), heard: Arc::clone(&heard), signs, wires };
        let asked = Arc::downgrade(&asked);
        let watch = move || {
            while let Some(asked) = asked.upgrade() {
                let look = heard.look();
                if look.is_none() {
                    // Others may wait for it, and it for them.
                    let seat = locked(&seated).clone();
                    seat.iter().for_each(|seat| seat.give_up(seat.rank(), "it hears nothing of the run"));
                    let asked = locked(&asked);
                    // Nobody waits for the answer; where its thread is gone there is no device.
                    let _ = asked.send((Request::Close, Vec::new(), channel().0));
                }
                drop(asked);
                thread::sleep(look.unwrap_or(IDLE * LOOKS) / LOOKS);
            }
        };
        thread::Builder::new().name("plimsoll-hears".to_owned()).spawn(watch)?;
        Ok(host)
    }

    /// Where others find this process.
    pub fn place(&self) -> String {
        self.wires.place()
    }

    /// Measures the links to all that are invited and do the same. Of each two the lower rank says what it has found.
    ///
    /// # Errors
    /// Somebody does not come, or is gone.
    pub fn measure(&self, invitation: &Invitation, rank: u32) -> io::Result<Vec<Option<Ways>>> {
        links::measured(rank, &self.wires.meet(invitation, rank)?)
    }

    /// Answers a request, whichever way it came. What came aside is answered at once; for the rest there is one at a time.
    pub fn answer(&self, request: &[u8]) -> Vec<u8> {
        if self.heard.missed.load(Ordering::Relaxed) != NOT_YET {
            self.heard.missed.store(0, Ordering::Relaxed);
        }
        let failed = |why: String| encode(&Answer::Failed(Fault::Lost(why)), &[]);
        match decode(request) {
            Err(error) => failed(error.to_string()),
            Ok((Request::Alive, _)) => {
                self.heard.missed.store(0, Ordering::Relaxed);
                let signs = locked(&self.signs).clone();
                match signs.is_none_or(|signs| signs()) {
                    true => encode(&Answer::Done(Found::default()), &[]),
                    false => failed("it gives no sign of life".to_owned()),
                }
            }
            Ok((Request::GiveUp { attempt, rank, why }, _)) => {
                let seated = locked(&self.seated).clone();
                seated.iter().for_each(|seated| seated.give_up_in(attempt, rank, &why));
                encode(&Answer::Done(Found::default()), &[])
            }
            Ok((Request::CallOff { secret }, _)) => {
                self.wires.call_off(&secret);
                encode(&Answer::Done(Found::default()), &[])
            }
            Ok((request, bytes)) => {
                let (back, answered) = channel();
                let asked = locked(&self.asked).clone();
                let sent = asked.send((request, bytes.to_vec(), back));
                sent.ok().and_then(|()| answered.recv().ok()).unwrap_or_else(|| failed("it came upon a bug".to_owned()))
            }
        }
    }
}

impl Heard {
    /// A look: how long the silence may be, and none where it has been longer, which is said once.
    fn look(&self) -> Option<Duration> {
        let silence = Duration::from_millis(self.silence.load(Ordering::Relaxed));
        if silence.is_zero() || self.missed.load(Ordering::Relaxed) == NOT_YET {
            return Some(IDLE * LOOKS);
        }
        if self.missed.fetch_add(1, Ordering::Relaxed) < LOOKS {
            return Some(silence);
        }
        self.silence.store(0, Ordering::Relaxed);
        None
    }
}

/// The requests to a device's thread, one after the other.
struct Asks {
    requests: Receiver<Asked>,
    /// Where the answer to the present one goes.
    back: Option<Sender<Vec<u8>>>,
    /// What was asked where an answer about files was waited for.
    put_off: Option<Asked>,
}

impl Asks {
    /// The next request; none where nobody will ask any more.
    fn next(&mut self) -> Option<(Request, Vec<u8>)> {
        let (request, bytes, back) = self.put_off.take().or_else(|| self.requests.recv().ok())?;
        self.back = Some(back);
        Some((request, bytes))
    }

    fn answer(&mut self, answer: &Answer, bytes: &[u8]) {
        if let Some(back) = self.back.take() {
            // Who asked may be gone.
            let _ = back.send(encode(answer, bytes));
        }
    }

    /// Asks the run for something of its files.
    fn of_files(&mut self, answer: &Answer, bytes: &[u8]) -> io::Result<Vec<u8>> {
        self.answer(answer, bytes);
        match self.next() {
            Some((Request::Files { failed: None }, bytes)) => Ok(bytes),
            Some((Request::Files { failed: Some(why) }, _)) => Err(io::Error::other(why)),
            other => {
                self.put_off = other.zip(self.back.take()).map(|((request, bytes), back)| (request, bytes, back));
                Err(io::Error::new(io::ErrorKind::BrokenPipe, "the run that has the file is gone"))
            }
        }
    }
}

/// The files are where the run is.
impl FileSpace for Asks {
    fn read(&mut self, tensor: &str, offset: u64, into: &mut [u8]) -> io::Result<()> {
        for (offset, into) in (offset..).step_by(PIECE).zip(into.chunks_mut(PIECE)) {
            let asked = Answer::Reads { tensor: tensor.to_owned(), offset, bytes: into.len() as u64 };
            let bytes = self.of_files(&asked, &[])?;
            if bytes.len() != into.len() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            into.copy_from_slice(&bytes);
        }
        Ok(())
    }

    fn write(&mut self, tensor: &str, offset: u64, from: &[u8]) -> io::Result<()> {
        for (offset, from) in (offset..).step_by(PIECE).zip(from.chunks(PIECE)) {
            self.of_files(&Answer::Writes { tensor: tensor.to_owned(), offset }, from)?;
        }
        Ok(())
    }
}

/// Refuses at an op: the run has rehearsed it.
struct Refuses<'a> {
    program: &'a str,
    at: Option<u32>,
}

impl Observer for Refuses<'_> {
    fn before(&mut self, tick: u32, op: &Op, _: &mut dyn Memory) -> Result<(), DeviceError> {
        match self.at == Some(tick) {
            true => Err(DeviceError::Refused { program: self.program.to_owned(), tick, op: op.name() }),
            false => Ok(()),
        }
    }

    fn one_at_a_time(&self) -> bool {
        false
    }
}

/// The thread of a device.
struct Work {
    asks: Asks,
    wires: Arc<dyn Wires>,
    gpu: Option<u32>,
    seated: Arc<Mutex<Option<Arc<Wired>>>>,
    heard: Arc<Heard>,
    signs: Arc<Signs>,
    device: Option<Box<dyn Device>>,
    /// What tells how much of its GPU is held, where it is one.
    on_gpu: Option<OnGpu>,
    attempt: u64,
}

impl Work {
    fn all(&mut self) {
        while let Some((request, bytes)) = self.asks.next() {
            let mut found = Vec::new();
            let answer = self.one(request, &bytes, &mut found).unwrap_or_else(Answer::Failed);
            self.asks.answer(&answer, &found);
        }
    }

    fn one(&mut self, request: Request, bytes: &[u8], found: &mut Vec<u8>) -> Result<Answer, Fault> {
        match request {
            Request::Describe { version, mut run } => {
                same_version(version)?;
                let mut named = run.devices();
                if let (Some(gpu), [DeviceRequest::Cuda { index, .. }]) = (self.gpu, &mut named.devices[..]) {
                    *index = Some(gpu);
                }
                run.run.devices = named.to_string();
                let (rows, sequence) = (run.batch_sequences(), u64::from(run.data.sequence));
                // Before anything is measured, which leaves pages behind that a run would touch, too: plans are the same whether
                // rates are known or not.
                let held = charges(rows, sequence);
                rates_under_line(&run).map_err(Fault::of)?;
                if self.device.is_none() {
                    // What measuring took was given back: from here on the peak is that of runs.
                    let _ = process::reset_peak();
                }
                let mut device = devices(&run).map_err(Fault::of)?.remove(0);
                if device.in_process() {
                    (device.charges, device.charges_measured) = (held + CARRIES, true);
                }
                Ok(Answer::Described(Box::new(device)))
            }
            Request::Open { version, mut device, set, placement, precision, algorithms, silence } => {
                same_version(version)?;
                self.leave();
                if let Some((_, name)) = device.name.split_once('/') {
                    device.name = name.to_owned();
                }
                if let (Some(gpu), DeviceKind::Cuda) = (self.gpu, device.kind) {
                    device.name = format!("cuda:{gpu}");
                }
                // While it is opened it is asked for signs of life, which are signs of the run's, too.
                self.gives(Some(signs_of_life(&device, None)));
                self.heard.missed.store(NOT_YET, Ordering::Relaxed);
                let (opened, on_gpu) = open(&device, *set, placement, precision, algorithms.as_ref(), None)?;
                (self.device, self.on_gpu) = (Some(opened), on_gpu);
                self.heard.silence.store((silence.as_millis() as u64).max(1), Ordering::Relaxed);
                process::give_back();
                self.opened()
            }
            Request::Adopt { set, placement } => {
                self.device()?.adopt(*set, placement)?;
                self.opened()
            }
            Request::Find => Ok(Answer::Place(self.wires.place())),
            Request::Measure { rank, invited } => {
                let links = self.wires.meet(&invited.into(), rank).and_then(|wires| links::measured(rank, &wires));
                Ok(Answer::Links(links.map_err(|error| DeviceError::CutOff { rank, why: error.to_string() })?))
            }
            Request::Join { rank, invited } => {
                let invitation = invited.into();
                let cut_off = |error: io::Error| DeviceError::CutOff { rank, why: error.to_string() };
                let wires = self.wires.meet(&invitation, rank).map_err(cut_off)?;
                let transport = Wired::new(rank, wires, invitation.epoch).map_err(cut_off)?;
                self.device()?.join(Seat { rank, transport: transport.clone(), nccl: invitation.nccl })?;
                self.seat(Some(transport));
                Ok(Answer::Done(Found::default()))
            }
            Request::Close => {
                self.leave();
                Ok(Answer::Done(Found::default()))
            }
            Request::Work { attempt, commands } => {
                let seated = locked(&self.seated).clone();
                if let Some(seated) = seated.filter(|_| attempt > self.attempt) {
                    seated.begin(attempt);
                    self.attempt = attempt;
                }
                let (mut rest, mut last) = (bytes, Found::default());
                for command in commands {
                    last = self.does(command, &mut rest, found)?;
                }
                Ok(Answer::Done(last))
            }
            Request::Files { .. } | Request::Alive | Request::GiveUp { .. } | Request::CallOff { .. } => {
                Err(Fault::Lost("it was not asked about that".to_owned()))
            }
        }
    }

    fn device(&mut self) -> Result<&mut Box<dyn Device>, Fault> {
        self.device.as_mut().ok_or_else(|| Fault::Lost("its process has been started anew".to_owned()))
    }

    fn seat(&mut self, transport: Option<Arc<Wired>>) {
        *locked(&self.seated) = transport;
        self.attempt = 0;
    }

    fn gives(&self, signs: Option<Arc<dyn Fn() -> bool + Send + Sync>>) {
        *locked(&self.signs) = signs;
    }

    fn leave(&mut self) {
        self.heard.silence.store(0, Ordering::Relaxed);
        (self.device, self.on_gpu) = (None, None);
        self.gives(None);
        self.seat(None);
        process::give_back();
    }

    fn opened(&mut self) -> Result<Answer, Fault> {
        let place = self.wires.place();
        let device = self.device()?;
        let algorithms = device.algorithms();
        let memory = device.memory();
        let arenas = [Space::Device, Space::Host, Space::Scratch].map(|space| memory.bytes(space));
        Ok(Answer::Opened { place, arenas, algorithms })
    }

    /// Does what needs the device. `rest` is what the run has sent along and nobody has taken yet.
    fn does(&mut self, command: Command, rest: &mut &[u8], found: &mut Vec<u8>) -> Result<Found, Fault> {
        let Work { device, asks, on_gpu, .. } = self;
        let device = device.as_mut().ok_or_else(|| Fault::Lost("its process has been started anew".to_owned()))?;
        let mut take = |bytes: u64| {
            let (taken, left) = rest.split_at_checked(bytes as usize).ok_or_else(cut_short)?;
            *rest = left;
            Ok::<_, Fault>(taken)
        };
        let mut answer = Found::default();
        match command {
            Command::Write { tensor, slot, bytes } => device.write(tensor, slot, take(bytes)?),
            Command::Run { program, micro_batch, from, last, refuses_at } => {
                let call = Call { program: &program, micro_batch, from, last };
                device.run_observed(call, asks, &mut Refuses { program: &program, at: refuses_at })?;
            }
            Command::Settle => {
                device.settle()?;
                (answer.computed, answer.collectives) = (device.computed(), device.collectives());
            }
            Command::SlowDown(factor) => answer.yes = device.slow_down(factor),
            Command::Read { tensor, slot, bytes } => {
                *found = vec![0; bytes as usize];
                device.read(tensor, slot, found);
            }
            Command::Look { space, first, end } => *found = device.memory().look(space, first..end).into_owned(),
            Command::Fill { space, first, bytes } => device.memory().fill(space, first, take(bytes)?),
            Command::Poison { space, first, end } => device.memory().poison(space, first..end),
            Command::HighWater(space) => answer.bytes = device.memory().high_water(space),
            Command::Strayed(space) => answer.yes = device.memory().strayed(space),
            Command::Room => {
                answer.room = device.room().map(|room| RoomFound {
                    total: room.memory.total,
                    free: room.memory.free,
                    bound_by: room.memory.bound_by,
                    held: room.held,
                    measured: match on_gpu {
                        Some(gpu) => gpu.measured(),
                        None => process::peak_resident().ok().map(|peak| (peak, MeasuredBy::Process)),
                    },
                });
            }
        }
        Ok(answer)
    }
}

fn cut_short() -> Fault {
    Fault::of(Failure::bug("what was sent along is cut short"))
}

fn same_version(version: u32) -> Result<(), Fault> {
    match version == VERSION {
        true => Ok(()),
        false => Err(Fault::of(
            Failure::input(format!("the run speaks version {version}, and this process version {VERSION}"))
                .hint("install the same Plimsoll on all machines"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RunFile;
    use crate::remote::streams::TcpWires;

    #[test]
    fn what_another_version_says_is_refused_and_what_is_no_request_is_no_fault_of_the_device() {
        let host = Host::new(TcpWires::listen("127.0.0.1:0").unwrap()).unwrap();
        let run = Box::new(RunFile::from_settings(&["model.preset=smollm2-135m".to_owned()]).unwrap());
        let answer = host.answer(&encode(&Request::Describe { version: VERSION + 1, run }, &[]));
        let (answer, _) = decode::<Answer>(&answer).unwrap();
        let Answer::Failed(fault) = answer else { panic!("{answer:?}") };
        let failure = Failure::from(fault.error("b/cpu"));
        assert_eq!(failure.exit, plimsoll_core::Exit::Input);
        assert!(failure.message.starts_with(&format!("b/cpu: the run speaks version {}", VERSION + 1)), "{failure}");
        let commands = vec![Command::Settle];
        let work = encode(&Request::Work { attempt: 0, commands }, &[]);
        for bytes in [&[][..], &[1; 7], &[0xff; 40], &work[..work.len() - 1], &work] {
            let answer = host.answer(bytes);
            assert!(matches!(decode(&answer), Ok((Answer::Failed(Fault::Lost(_)), _))), "{bytes:?}");
        }
        assert!(matches!(decode(&host.answer(&encode(&Request::Alive, &[]))), Ok((Answer::Done(_), _))));
    }
}
