//! What devices do at the same time, each on a thread of its own, which owns the engine meanwhile, their opening included. So
//! nobody has to wait for a device that is missed: it is *left behind*, with its engine and all that this holds, and gives that
//! back when its thread comes back, or never. What it could still touch is its own: what it stores goes nowhere any more, and
//! the team that it leaves behind meets elsewhere.

use crate::session::engine::Engine;
use crate::session::evaluation::handover::UNDER_WAY;
use crate::session::trouble::Trouble;
use crate::team::heartbeat::Pulse;
use plimsoll_core::Bytes;
use plimsoll_device::device::{Call, Device, DeviceError, FileSpace, Memory, Observer, Unseen};
use plimsoll_device::transport::Transport;
use plimsoll_program::{Placement, ProgramSet, TensorId};
use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

/// How often who waits looks whether the devices are still there.
const LOOK: Duration = Duration::from_millis(50);

/// What a device is to do; what it stores goes to the files.
pub type Task<T> = Box<dyn FnOnce(&mut Engine, &mut dyn FileSpace) -> Result<T, Trouble> + Send>;

/// A device with what it is to do.
pub struct Hand<T> {
    /// Its place in the team.
    pub rank: usize,
    /// It comes back with what it did.
    pub engine: Engine,
    /// What is known of its life, where it is missed.
    pub pulse: Option<Arc<Pulse>>,
    /// What it does.
    pub task: Task<T>,
}

/// What became of a device.
pub enum Came<T> {
    /// It came back.
    Back(Box<Engine>, Result<T, Trouble>),
    /// It is left behind, and holds what it held for as long as this is there.
    Not(Weak<()>),
}

/// What a thread says.
enum Said<T> {
    Stores { tensor: String, offset: u64, bytes: Vec<u8>, stored: Sender<io::Result<()>> },
    Ends { rank: usize, engine: Box<Engine>, did: Result<Result<T, Trouble>, Box<dyn Any + Send>> },
}

/// All do their work at the same time; what they store goes to `files`, on this very thread. Who fails, or panics, gives up
/// for all. Comes back when all are back but those who are missed, with the rank of each.
///
/// # Panics
/// Where one of them does.
pub fn abreast<T: Send + 'static>(
    hands: Vec<Hand<T>>,
    transport: &Arc<dyn Transport>,
    files: &mut dyn FileSpace,
) -> Vec<(usize, Came<T>)> {
    let (says, said) = channel();
    let mut out: Vec<(usize, Option<Arc<Pulse>>, Weak<()>)> = Vec::new();
    for hand in hands {
        let holds = Arc::new(());
        out.push((hand.rank, hand.pulse.clone(), Arc::downgrade(&holds)));
        let (says, transport) = (says.clone(), Arc::clone(transport));
        thread::spawn(move || {
            work(hand, &says, &*transport);
            drop(holds);
        });
    }
    let (mut came, mut panicked) = (Vec::new(), None);
    let is_missed = |pulse: &Option<Arc<Pulse>>| pulse.as_ref().is_some_and(|pulse| pulse.is_lost());
    while !out.iter().all(|(_, pulse, _)| is_missed(pulse)) {
        match said.recv_timeout(LOOK) {
            Ok(Said::Stores { tensor, offset, bytes, stored }) => {
                // Who does not listen is missed by now.
                let _ = stored.send(files.write(&tensor, offset, &bytes));
            }
            Ok(Said::Ends { rank, engine, did }) => {
                out.retain(|(of, ..)| *of != rank);
                match did {
                    Ok(did) => came.push((rank, Came::Back(engine, did))),
                    Err(panic) => panicked = Some(panic),
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => unreachable!("every thread says how it ends"),
        }
    }
    if let Some(panic) = panicked {
        resume_unwind(panic);
    }
    came.extend(out.into_iter().map(|(rank, _, holds)| (rank, Came::Not(holds))));
    came
}

fn work<T: Send>(hand: Hand<T>, says: &Sender<Said<T>>, transport: &dyn Transport) {
    let Hand { rank, mut engine, task, .. } = hand;
    let mut files = Stored(says);
    let did = catch_unwind(AssertUnwindSafe(|| task(&mut engine, &mut files)));
    match &did {
        Ok(Ok(_)) => {}
        Ok(Err(trouble)) => transport.give_up(rank as u32, &trouble.what()),
        // The others may be waiting for what it would have sent.
        Err(_) => transport.give_up(rank as u32, "a fault of its own"),
    }
    // Who was missed meanwhile says it to nobody, and gives back what it holds.
    let _ =
        says.send(Said::Ends { rank, engine: Box::new(engine), did: did.map(|did| did.map_err(|t| t.of_rank(rank))) });
}

/// What a thread stores: the files stay where they are waited for.
struct Stored<'a, T>(&'a Sender<Said<T>>);

impl<T: Send> FileSpace for Stored<'_, T> {
    fn read(&mut self, tensor: &str, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("`{tensor}` is only written")))
    }

    fn write(&mut self, tensor: &str, offset: u64, from: &[u8]) -> io::Result<()> {
        let gone = || io::Error::new(io::ErrorKind::BrokenPipe, format!("`{tensor}` is waited for no more"));
        for (number, bytes) in from.chunks(UNDER_WAY).enumerate() {
            let (stored, answer): (_, Receiver<io::Result<()>>) = channel();
            let offset = offset + (number * UNDER_WAY) as u64;
            let bytes = bytes.to_vec();
            let said = Said::Stores { tensor: tensor.to_owned(), offset, bytes, stored };
            self.0.send(said).map_err(|_| gone())?;
            answer.recv().map_err(|_| gone())??;
        }
        Ok(())
    }
}

/// What was left behind in this process's memory.
#[derive(Clone, Default)]
pub struct Behind(Arc<Mutex<Vec<Left>>>);

/// Arenas of so many bytes, and what is there for as long as they are.
type Left = (Bytes, Weak<()>);

impl Behind {
    fn all(&self) -> MutexGuard<'_, Vec<Left>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Arenas of so many bytes are, for as long as `holds` is there.
    pub fn leave(&self, bytes: Bytes, holds: Weak<()>) {
        self.all().push((bytes, holds));
    }

    /// Lets an engine go that may never come back from that: on a thread of its own.
    pub fn let_go(&self, engine: Engine, bytes: Bytes) {
        let holds = Arc::new(());
        self.leave(bytes, Arc::downgrade(&holds));
        thread::spawn(move || {
            drop(engine);
            drop(holds);
        });
    }

    /// The bytes that there are.
    pub fn bytes(&self) -> Bytes {
        self.all().iter().filter(|(_, holds)| holds.strong_count() > 0).map(|(bytes, _)| *bytes).sum()
    }

    /// The bytes that there are, or were at some time since [`Behind::forget`]: a peak has them all.
    pub fn peak_bytes(&self) -> Bytes {
        self.all().iter().map(|(bytes, _)| *bytes).sum()
    }

    /// What has been given back is no part of a peak that is counted from now on.
    pub fn forget(&self) {
        self.all().retain(|(_, holds)| holds.strong_count() > 0);
    }
}

/// Stands for a device whose engine is elsewhere: on a thread, which perhaps never brings it back.
pub struct Gone {
    name: String,
    memory: Unseen,
}

impl Gone {
    /// In the place of the device of this name.
    pub fn of(name: &str) -> Box<dyn Device> {
        Box::new(Gone { name: name.to_owned(), memory: Unseen })
    }
}

impl Device for Gone {
    fn run_observed(&mut self, _: Call, _: &mut dyn FileSpace, _: &mut dyn Observer) -> Result<(), DeviceError> {
        Err(DeviceError::Lost { device: self.name.clone(), why: String::new() })
    }

    fn adopt(&mut self, _: ProgramSet, _: Placement) -> Result<(), DeviceError> {
        Err(DeviceError::Lost { device: self.name.clone(), why: String::new() })
    }

    fn write(&mut self, _: TensorId, _: u32, _: &[u8]) {}

    /// What is read of it is no number.
    fn read(&mut self, _: TensorId, _: u32, bytes: &mut [u8]) {
        bytes.fill(0xff);
    }

    fn memory(&mut self) -> &mut dyn Memory {
        &mut self.memory
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::team::heartbeat::{Heart, Watch};
    use plimsoll_device::device::NoFiles;
    use plimsoll_device::transport::memory;

    fn hand<T>(rank: usize, pulse: Option<Arc<Pulse>>, task: Task<T>) -> Hand<T> {
        Hand { rank, engine: Engine::gone("a"), pulse, task }
    }

    #[test]
    fn who_is_missed_is_not_waited_for_and_gives_back_what_it_holds_when_it_comes_back() {
        let silence = Duration::from_millis(100);
        let heart = Heart::start("b", silence, || false).expect("a thread");
        let _watch = Watch::start(vec![(1, "b".to_owned(), heart.pulse())], |_, _| {}, silence).expect("a thread");
        let (wakes, woken) = channel::<()>();
        let sleeps = move |_: &mut Engine, files: &mut dyn FileSpace| {
            woken.recv().expect("the test wakes it");
            assert!(files.write("saved:b", 0, &[1]).is_err(), "nobody waits for what it stores");
            Ok(0)
        };
        let hands = vec![hand(0, None, Box::new(|_, _| Ok(7))), hand(1, Some(heart.pulse()), Box::new(sleeps))];
        let transport: Arc<dyn Transport> = memory::Memory::between(2);
        let came = abreast(hands, &transport, &mut NoFiles);
        let [(0, Came::Back(_, Ok(7))), (1, Came::Not(holds))] = &came[..] else { panic!("one is back, one is not") };
        let behind = Behind::default();
        behind.leave(Bytes(5), holds.clone());
        behind.forget();
        assert_eq!((behind.bytes(), behind.peak_bytes()), (Bytes(5), Bytes(5)));
        wakes.send(()).expect("it listens");
        while holds.strong_count() > 0 {
            thread::yield_now();
        }
        assert_eq!((behind.bytes(), behind.peak_bytes()), (Bytes::ZERO, Bytes(5)));
        behind.forget();
        assert_eq!(behind.peak_bytes(), Bytes::ZERO);
    }

    #[test]
    fn what_is_stored_arrives_in_order_and_what_fails_there_is_told_here() {
        struct Full(Vec<u8>);
        impl FileSpace for Full {
            fn read(&mut self, _: &str, _: u64, _: &mut [u8]) -> io::Result<()> {
                unreachable!("nothing is read")
            }
            fn write(&mut self, tensor: &str, offset: u64, from: &[u8]) -> io::Result<()> {
                assert_eq!((tensor, offset), ("saved:a", self.0.len() as u64));
                self.0.extend_from_slice(from);
                if self.0.len() > 2 * UNDER_WAY { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
            }
        }
        let given: Vec<u8> = (0..3 * UNDER_WAY).map(|i| (i * 31 % 251) as u8).collect();
        let all = given.clone();
        let store = move |_: &mut Engine, files: &mut dyn FileSpace| {
            Ok(files.write("saved:a", 0, &all).expect_err("it is full").kind())
        };
        let transport: Arc<dyn Transport> = memory::Memory::between(1);
        let mut files = Full(Vec::new());
        let came = abreast(vec![hand(0, None, Box::new(store))], &transport, &mut files);
        assert!(matches!(&came[..], [(0, Came::Back(_, Ok(io::ErrorKind::StorageFull)))]));
        assert!(files.0 == given);
    }

    #[test]
    #[should_panic(expected = "a bug of the test's")]
    fn who_panics_is_heard_of_when_the_others_are_back() {
        let transport: Arc<dyn Transport> = memory::Memory::between(2);
        let panics: Task<()> = Box::new(|_, _| panic!("a bug of the test's"));
        abreast(vec![hand(0, None, panics), hand(1, None, Box::new(|_, _| Ok(())))], &transport, &mut NoFiles);
    }
}
