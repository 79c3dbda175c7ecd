//! How a team comes together some of whose devices live elsewhere: everybody gets wires to all others, and what the run
//! says to all goes to each in its way.

use super::device::Connection;
use super::{Hosts, Invitation, locked};
use plimsoll_device::device::DeviceError;
use plimsoll_device::transport::wire::Wired;
use plimsoll_device::transport::{Meeting, Seat, Transport};
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

/// A device of such a team, as this process has it.
#[derive(Clone)]
pub enum Member {
    /// In this process.
    Here,
    /// At the other end of a connection.
    Far(Arc<Connection>),
}

impl Member {
    /// The way to it, where it is elsewhere.
    fn far(&self) -> Option<&Arc<Connection>> {
        match self {
            Member::Here => None,
            Member::Far(connection) => Some(connection),
        }
    }
}

/// What this process knows of the meetings of such a team. Devices meet at their own wires, not here.
pub struct Spread {
    epoch: Instant,
    here: Vec<Arc<Wired>>,
    far: Vec<(u32, Arc<Connection>)>,
    ranks: u32,
    attempt: AtomicU64,
    /// The last attempt in which somebody gave up, as all have been told.
    told: Mutex<Option<u64>>,
}

/// A team that has come together.
pub struct Gathered {
    /// What this process knows of its meetings.
    pub transport: Arc<Spread>,
    /// In the order of ranks, the seats of the devices of this process; the others have theirs.
    pub seats: Vec<Option<Seat>>,
}

impl Spread {
    /// Gives every device its seat, in the order of ranks. `team` is a number that no other team of this run has; `nccl`
    /// whether all are GPUs that exchange by it.
    ///
    /// # Errors
    /// Of the rank that comes with it: who is gone, or does not find the others. Where somebody is gone, those who look for it
    /// are told, and not waited for.
    ///
    /// # Panics
    /// Where what somebody sits down with does.
    pub fn gather(
        members: &[Member],
        hosts: &dyn Hosts,
        team: u64,
        nccl: bool,
    ) -> Result<Gathered, (usize, DeviceError)> {
        let wires = hosts.wires();
        let place = |member: &Member| match member {
            Member::Here => wires.place(),
            Member::Far(connection) => connection.place(),
        };
        let cut_off = |rank: usize, error: io::Error| DeviceError::CutOff { rank: rank as u32, why: error.to_string() };
        let secret = secret().map_err(|error| (0, cut_off(0, error)))?;
        let epoch = Instant::now();
        let places = members.iter().map(place).collect();
        let invitation = Invitation { team, secret: secret.clone(), places, epoch, nccl };
        let meets = Arc::clone(&wires);
        let join = move |rank: usize, member: &Member| match member {
            Member::Far(connection) => {
                connection.begin(0);
                connection.join(rank as u32, &invitation).map(|()| None)
            }
            Member::Here => {
                let found = meets.meet(&invitation, rank as u32).and_then(|all| Wired::new(rank as u32, all, epoch));
                found.map(Some).map_err(|error| cut_off(rank, error))
            }
        };
        let (join, (says, said)) = (Arc::new(join), channel());
        for (rank, member) in members.iter().enumerate() {
            let (join, member, says) = (Arc::clone(&join), member.clone(), says.clone());
            // Nobody listens any more where another one is gone.
            thread::spawn(move || drop(says.send((rank, join(rank, &member)))));
        }
        drop(says);
        let mut seats: Vec<Option<Arc<Wired>>> = members.iter().map(|_| None).collect();
        let mut failed: Option<(usize, DeviceError)> = None;
        for _ in members {
            match said.recv().expect("every thread says how it ends") {
                (rank, Ok(seat)) => seats[rank] = seat,
                // Who is lost keeps the others from finding it.
                (rank, Err(error)) if error.is_loss() => {
                    wires.call_off(&secret);
                    let others = members.iter().enumerate().filter(|(other, _)| *other != rank);
                    for connection in others.filter_map(|(_, member)| member.far()) {
                        let (connection, secret) = (Arc::clone(connection), secret.clone());
                        // Without a thread it waits until nobody has come.
                        let _ = thread::Builder::new().spawn(move || connection.call_off(&secret));
                    }
                    return Err((rank, error));
                }
                (rank, Err(error)) => failed = failed.or(Some((rank, error))),
            }
        }
        if let Some(failed) = failed {
            return Err(failed);
        }
        let far = (0..).zip(members).filter_map(|(rank, member)| Some((rank, Arc::clone(member.far()?))));
        let transport = Arc::new(Spread {
            epoch,
            here: seats.iter().flatten().cloned().collect(),
            far: far.collect(),
            ranks: members.len() as u32,
            attempt: AtomicU64::new(0),
            told: Mutex::new(None),
        });
        let seat = |(rank, wired): (u32, Option<Arc<Wired>>)| Some(Seat { rank, transport: wired?, nccl });
        Ok(Gathered { transport, seats: (0..).zip(seats).map(seat).collect() })
    }
}

/// What nobody can guess.
pub(super) fn secret() -> io::Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

impl Transport for Spread {
    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn epoch(&self) -> Instant {
        self.epoch
    }

    fn meet(&self, _: Meeting) -> Result<f64, DeviceError> {
        unreachable!("devices have seats at their own wires")
    }

    fn show(&self, _: Meeting) -> Result<(), DeviceError> {
        unreachable!("devices have seats at their own wires")
    }

    fn taken(&self, _: u32, _: u32, _: u64) -> Result<f64, DeviceError> {
        unreachable!("devices have seats at their own wires")
    }

    fn withdraw(&self, _: u32) {}

    fn lends(&self, _: u32, _: Range<usize>) -> bool {
        false
    }

    /// Who is far is told aside, and not waited for: it may be the very one that is gone.
    fn give_up(&self, rank: u32, why: &str) {
        let attempt = self.attempt.load(Ordering::Relaxed);
        let before = locked(&self.told).replace(attempt);
        if before == Some(attempt) {
            return;
        }
        self.here.iter().for_each(|wired| wired.give_up_in(attempt, rank, why));
        for (_, connection) in self.far.iter().filter(|(far, _)| *far != rank) {
            let (connection, why) = (Arc::clone(connection), why.to_owned());
            // Without a thread it hears of it from the others, or when its wire ends.
            let _ = thread::Builder::new().spawn(move || connection.give_up(attempt, rank, &why));
        }
    }

    fn agreed(&self) -> Result<(), DeviceError> {
        unreachable!("devices have seats at their own wires")
    }

    fn clear(&self) {
        let attempt = self.attempt.fetch_add(1, Ordering::Relaxed) + 1;
        self.here.iter().for_each(|wired| wired.begin(attempt));
        self.far.iter().for_each(|(_, connection)| connection.begin(attempt));
    }
}
