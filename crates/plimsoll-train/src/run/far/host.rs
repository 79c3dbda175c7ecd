//! The device's end: a process that holds one device and answers for it.

use super::{Answer, Command, Fault, Found, Request, RoomFound, VERSION, Wires, decode, encode};
use crate::resolve::devices;
use crate::run::open::open;
use crate::run::prepare::settle_charges;
use plimsoll_core::{Bytes, Failure, Space};
use plimsoll_device::device::{Call, Device, DeviceError, FileSpace, Memory, Observer};
use plimsoll_device::process;
use plimsoll_device::transport::Seat;
use plimsoll_device::transport::wire::Wired;
use plimsoll_program::Op;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

/// What was asked, with its bytes, and where the answer goes.
type Asked = (Request, Vec<u8>, Sender<Vec<u8>>);

/// A process's device. Dropped, it lets go of it as soon as what is under way has ended.
pub struct Host {
    asked: Mutex<Sender<Asked>>,
    seated: Arc<Mutex<Option<Arc<Wired>>>>,
}

impl Host {
    /// A process that meets others as `wires` say; it has no device yet.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn new(wires: Arc<dyn Wires>) -> io::Result<Host> {
        let (asked, requests) = channel();
        let seated = Arc::new(Mutex::new(None));
        let (asks, of) = (Asks { requests, back: None }, Arc::clone(&seated));
        let work = move || Work { asks, wires, seated: of, device: None, attempt: 0 }.all();
        thread::Builder::new().name("plimsoll-far".to_owned()).spawn(work)?;
        Ok(Host { asked: Mutex::new(asked), seated })
    }

    /// Answers a request, whichever way it came. What came aside is answered at once; for the rest there is one at a time.
    pub fn answer(&self, request: &[u8]) -> Vec<u8> {
        let failed = |why: String| encode(&Answer::Failed(Fault::Lost(why)), &[]);
        match decode(request) {
            Err(error) => failed(error.to_string()),
            Ok((Request::Alive, _)) => encode(&Answer::Done(Found::default()), &[]),
            Ok((Request::GiveUp { attempt, rank, why }, _)) => {
                let seated = self.seated.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
                seated.iter().for_each(|seated| seated.give_up_in(attempt, rank, &why));
                encode(&Answer::Done(Found::default()), &[])
            }
            Ok((request, bytes)) => {
                let (back, answered) = channel();
                let asked = self.asked.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
                let sent = asked.send((request, bytes.to_vec(), back));
                sent.ok().and_then(|()| answered.recv().ok()).unwrap_or_else(|| failed("it came upon a bug".to_owned()))
            }
        }
    }
}

/// The requests to a device's thread, one after the other.
struct Asks {
    requests: Receiver<Asked>,
    /// Where the answer to the present one goes.
    back: Option<Sender<Vec<u8>>>,
}

impl Asks {
    /// The next request; none where nobody will ask any more.
    fn next(&mut self) -> Option<(Request, Vec<u8>)> {
        let (request, bytes, back) = self.requests.recv().ok()?;
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
            _ => Err(io::Error::new(io::ErrorKind::BrokenPipe, "the run that has the file is gone")),
        }
    }
}

/// The files are where the run is.
impl FileSpace for Asks {
    fn read(&mut self, tensor: &str, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let asked = Answer::Reads { tensor: tensor.to_owned(), offset, bytes: into.len() as u64 };
        let bytes = self.of_files(&asked, &[])?;
        if bytes.len() != into.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        into.copy_from_slice(&bytes);
        Ok(())
    }

    fn write(&mut self, tensor: &str, offset: u64, from: &[u8]) -> io::Result<()> {
        self.of_files(&Answer::Writes { tensor: tensor.to_owned(), offset }, from).map(|_| ())
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
    seated: Arc<Mutex<Option<Arc<Wired>>>>,
    device: Option<Box<dyn Device>>,
    attempt: u64,
}

impl Work {
    fn all(mut self) {
        while let Some((request, bytes)) = self.asks.next() {
            let mut found = Vec::new();
            let answer = self.one(request, &bytes, &mut found).unwrap_or_else(Answer::Failed);
            self.asks.answer(&answer, &found);
        }
    }

    fn one(&mut self, request: Request, bytes: &[u8], found: &mut Vec<u8>) -> Result<Answer, Fault> {
        match request {
            Request::Describe { version, run } => {
                same_version(version)?;
                let (rows, sequence) = (run.batch_sequences(), u64::from(run.data.sequence));
                let mut device = devices(&run).map_err(Fault::of)?.remove(0);
                settle_charges(&mut device, rows, sequence);
                Ok(Answer::Described(Box::new(device)))
            }
            Request::Open { version, mut device, set, placement, precision, algorithms } => {
                same_version(version)?;
                self.leave();
                if let Some((_, name)) = device.name.split_once('/') {
                    device.name = name.to_owned();
                }
                let (opened, _) = open(&device, *set, placement, precision, algorithms.as_ref(), None)?;
                self.device = Some(opened);
                process::give_back();
                self.opened()
            }
            Request::Adopt { set, placement } => {
                self.device()?.adopt(*set, placement)?;
                self.opened()
            }
            Request::Join { rank, invited } => {
                let invitation = invited.into();
                let cut_off = |error: io::Error| DeviceError::CutOff { rank, why: error.to_string() };
                let wires = self.wires.meet(&invitation, rank).map_err(cut_off)?;
                let transport = Wired::new(rank, wires, invitation.epoch).map_err(cut_off)?;
                self.device()?.join(Seat { rank, transport: transport.clone() })?;
                self.seat(Some(transport));
                Ok(Answer::Done(Found::default()))
            }
            Request::Close => {
                self.leave();
                Ok(Answer::Done(Found::default()))
            }
            Request::Work { attempt, commands } => {
                let seated = self.seated.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
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
            Request::Files { .. } | Request::Alive | Request::GiveUp { .. } => {
                Err(Fault::Lost("it was not asked about that".to_owned()))
            }
        }
    }

    fn device(&mut self) -> Result<&mut Box<dyn Device>, Fault> {
        self.device.as_mut().ok_or_else(|| Fault::Lost("its process has been started anew".to_owned()))
    }

    fn seat(&mut self, transport: Option<Arc<Wired>>) {
        *self.seated.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = transport;
        self.attempt = 0;
    }

    fn leave(&mut self) {
        self.device = None;
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
        let Work { device, asks, .. } = self;
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
                answer.computed = device.computed();
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
                    peak: process::peak_resident().unwrap_or(Bytes::ZERO),
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
