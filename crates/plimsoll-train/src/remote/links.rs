//! How fast hosts reach each other: measured over the very wires that their devices will meet over, each two in turn.

use super::device::Connection;
use super::{Hosts, Invitation, spread};
use plimsoll_core::Link;
use plimsoll_device::device::DeviceError;
use plimsoll_device::transport::wire::Wire;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Small messages there and back, of which the median counts.
const PINGS: usize = 21;
/// What is sent at a time to see how fast it is, for how long about, and how often at most.
const PIECE: usize = 1 << 20;
const SECONDS: f64 = 0.25;
const PIECES: f64 = 256.0;
/// Who is cut off in the middle of it is not waited for longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the one that measures asks of the other.
const PING: u8 = b'p';
const TAKES: u8 = b't';
const GIVES: u8 = b'g';
const ENDS: u8 = b'e';

/// The slowest link of each of these processes to the others, the slower way of it: in the order of ranks, the
/// process of the run itself last where it takes part.
///
/// # Errors
/// Of the rank that comes with it: who is gone, or does not reach the others.
pub(crate) fn slowest(
    connections: &[Arc<Connection>],
    and_here: bool,
    hosts: &dyn Hosts,
) -> Result<Vec<Link>, (usize, DeviceError)> {
    let wires = hosts.wires();
    let cut_off = |rank: usize, error: io::Error| DeviceError::CutOff { rank: rank as u32, why: error.to_string() };
    let mut places = Vec::new();
    for (rank, connection) in connections.iter().enumerate() {
        places.push(connection.find().map_err(|error| (rank, error))?);
    }
    places.extend(and_here.then(|| wires.place()));
    let ranks = places.len();
    let secret = spread::secret().map_err(|error| (0, cut_off(0, error)))?;
    // Teams are counted from 1.
    let invitation = Invitation { team: 0, secret, places, epoch: Instant::now(), nccl: false };
    let measure = |rank: usize| match connections.get(rank) {
        Some(connection) => connection.measure(rank as u32, &invitation),
        None => {
            let met = wires.meet(&invitation, rank as u32);
            met.and_then(|wires| measured(rank as u32, &wires)).map_err(|error| cut_off(rank, error))
        }
    };
    let found: Vec<Result<Vec<Option<Ways>>, DeviceError>> = thread::scope(|scope| {
        let measure = &measure;
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || measure(rank))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    let mut slowest: Vec<Option<Link>> = vec![None; ranks];
    let mut failed: Option<(usize, DeviceError)> = None;
    for (rank, found) in found.into_iter().enumerate() {
        match found {
            Ok(links) => {
                for (peer, [there, back]) in (0..).zip(links).filter_map(|(peer, ways)| Some((peer, ways?))) {
                    let link = slower(there, back);
                    for end in [rank, peer] {
                        slowest[end] = Some(slowest[end].map_or(link, |before| slower(before, link)));
                    }
                }
            }
            // Who is lost keeps the others from measuring.
            Err(error) if failed.is_none() || error.is_loss() => failed = Some((rank, error)),
            Err(_) => {}
        }
    }
    match failed {
        Some(failed) => Err(failed),
        None => Ok(slowest.into_iter().map(|link| link.unwrap_or(Link::MEMORY)).collect()),
    }
}

fn slower(one: Link, other: Link) -> Link {
    Link {
        bytes_per_second: one.bytes_per_second.min(other.bytes_per_second),
        latency_seconds: one.latency_seconds.max(other.latency_seconds),
    }
}

/// A link as the one that has measured it sees it: what it sends to the other, and what comes back.
pub type Ways = [Link; 2];

/// A rank's part: of each two the lower one measures, and all take their pairs in the same order. What it has measured
/// itself, by rank.
///
/// # Errors
/// A wire that ends, or takes longer than anybody has patience for.
pub(super) fn measured(rank: u32, wires: &[Option<Arc<dyn Wire>>]) -> io::Result<Vec<Option<Ways>>> {
    let (done, waits) = channel::<()>();
    let closes = wires.to_vec();
    let watch = move || {
        if waits.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            closes.iter().flatten().for_each(|wire| wire.close());
        }
    };
    thread::Builder::new().name("plimsoll-patience".to_owned()).spawn(watch)?;
    let mut links = vec![None; wires.len()];
    // Whoever is lower measures first: so nobody waits for one that waits for somebody else.
    for wire in wires[..rank as usize].iter().flatten() {
        answers(&**wire)?;
    }
    for (peer, wire) in wires.iter().enumerate().skip(rank as usize + 1) {
        links[peer] = wire.as_ref().map(|wire| measures(&**wire)).transpose()?;
    }
    drop(done);
    Ok(links)
}

fn word(what: u8, pieces: u32) -> [u8; 5] {
    let [a, b, c, d] = pieces.to_le_bytes();
    [what, a, b, c, d]
}

/// Seconds that something takes.
fn timed(what: impl FnOnce() -> io::Result<()>) -> io::Result<f64> {
    let began = Instant::now();
    what()?;
    Ok(began.elapsed().as_secs_f64())
}

fn measures(wire: &dyn Wire) -> io::Result<Ways> {
    let ping = || {
        wire.send(&word(PING, 0))?;
        wire.receive(&mut [0])
    };
    let mut late: Vec<f64> = (0..PINGS).map(|_| timed(ping)).collect::<Result<_, _>>()?;
    late.sort_by(f64::total_cmp);
    let there_and_back = late[PINGS / 2];
    let mut piece = vec![0; PIECE];
    let mut rate = |way: u8| -> io::Result<f64> {
        let mut moves = |pieces: u32| {
            timed(|| {
                wire.send(&word(way, pieces))?;
                for _ in 0..pieces {
                    if way == TAKES { wire.send(&piece)? } else { wire.receive(&mut piece)? }
                }
                if way == TAKES { wire.receive(&mut [0]) } else { Ok(()) }
            })
        };
        // How many take long enough to be measured by.
        let pieces = (SECONDS / moves(1)?).clamp(1.0, PIECES) as u32;
        let took = moves(pieces)?;
        Ok(f64::from(pieces) * PIECE as f64 / (took - there_and_back).max(took / 2.0))
    };
    let rates = [rate(TAKES)?, rate(GIVES)?];
    wire.send(&word(ENDS, 0))?;
    Ok(rates.map(|bytes_per_second| Link { bytes_per_second, latency_seconds: there_and_back / 2.0 }))
}

fn answers(wire: &dyn Wire) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        let mut word = [0; 5];
        wire.receive(&mut word)?;
        let [what, a, b, c, d] = word;
        let pieces = u32::from_le_bytes([a, b, c, d]);
        match what {
            PING => wire.send(&[0])?,
            TAKES => {
                for _ in 0..pieces {
                    wire.receive(&mut piece)?;
                }
                wire.send(&[0])?;
            }
            GIVES => {
                for _ in 0..pieces {
                    wire.send(&piece)?;
                }
            }
            ENDS => return Ok(()),
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "what came is no part of measuring a link")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::Mutex;

    /// A wire on which every piece takes so long.
    struct Slow(UnixStream, Duration, Mutex<()>);

    impl Wire for Slow {
        fn send(&self, bytes: &[u8]) -> io::Result<()> {
            let _one = self.2.lock().unwrap();
            thread::sleep(self.1.mul_f64(bytes.len() as f64 / PIECE as f64));
            (&self.0).write_all(bytes)
        }

        fn receive(&self, into: &mut [u8]) -> io::Result<()> {
            (&self.0).read_exact(into)
        }

        fn close(&self) {
            let _ = self.0.shutdown(std::net::Shutdown::Both);
        }
    }

    #[test]
    fn each_two_measure_both_ways_of_their_link() {
        let mut wires: Vec<Vec<Option<Arc<dyn Wire>>>> = (0..3).map(|_| vec![None, None, None]).collect();
        for (one, other) in [(0, 1), (0, 2), (1, 2)] {
            let (here, there) = UnixStream::pair().unwrap();
            // Only what rank 2 sends to rank 0 is slow.
            let slow = if (one, other) == (0, 2) { Duration::from_millis(40) } else { Duration::ZERO };
            wires[one][other] = Some(Arc::new(Slow(here, Duration::ZERO, Mutex::default())));
            wires[other][one] = Some(Arc::new(Slow(there, slow, Mutex::default())));
        }
        let found: Vec<_> = thread::scope(|scope| {
            let rank = |(rank, wires): (u32, &Vec<_>)| {
                let wires = wires.clone();
                scope.spawn(move || measured(rank, &wires).unwrap())
            };
            let threads: Vec<_> = (0..).zip(&wires).map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let measured: Vec<Vec<bool>> = found.iter().map(|links| links.iter().map(Option::is_some).collect()).collect();
        assert_eq!(measured, [[false, true, true], [false, false, true], [false; 3]]);
        let (most, rate) = (PIECE as f64 / 0.040, |one: usize, other: usize, way: usize| {
            let ways: Ways = found[one][other].expect("it was measured");
            ways[way].bytes_per_second
        });
        assert!(rate(0, 2, 1) <= most, "{found:?}");
        // Neither the other way is slowed by it, nor are other links.
        assert!(
            [rate(0, 2, 0), rate(0, 1, 0), rate(0, 1, 1), rate(1, 2, 1)].iter().all(|rate| *rate > most),
            "{found:?}"
        );
    }

    #[test]
    fn a_wire_that_ends_is_an_error_at_both_ends() {
        let (here, there) = UnixStream::pair().unwrap();
        drop(there);
        let here: Arc<dyn Wire> = Arc::new(here);
        assert!(measured(0, &[None, Some(here.clone())]).is_err());
        assert!(measured(1, &[Some(here), None]).is_err());
    }
}
