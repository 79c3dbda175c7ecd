//! Measures bandwidth and latency between hosts, over the same kind of wires that the devices of a team use. Each pair
//! of ranks is measured in turn.

use super::device::Connection;
use super::distributed::random_secret;
use super::protocol::LinkSpeeds;
use super::{Invitation, PeerNetwork, RemoteConnector, peer_unreachable};
use plimsoll_core::Link;
use plimsoll_device::error::DeviceError;
use plimsoll_device::transport::wire::Wire;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// Number of round trips in a latency measurement. Half of their median is the latency.
const PINGS: usize = 21;
/// Bytes of one chunk in a bandwidth measurement.
const CHUNK_BYTES: usize = 1 << 20;
/// Duration that a bandwidth measurement aims at.
const TARGET_SECONDS: f64 = 0.25;
/// Largest number of chunks in a bandwidth measurement.
const MAX_CHUNKS: f64 = 256.0;
/// Time after which an unfinished measurement closes its wires, which makes it fail.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Command that the measuring rank sends to its peer: send one byte back. As after the other command bytes, a number of
/// chunks follows.
const PING: u8 = b'p';
const RECEIVE_CHUNKS: u8 = b't';
const SEND_CHUNKS: u8 = b'g';
const FINISH: u8 = b'e';

/// Measures the links between the processes of `connections` and, if `include_local`, this process. Returns for each
/// process the lowest bandwidth and the highest latency of its links, over both directions. This process comes last.
///
/// # Errors
/// The failing rank with its error: a lost process, or a peer that cannot be reached.
pub(crate) fn measure_slowest_links(
    connections: &[Arc<Connection>],
    include_local: bool,
    connector: &dyn RemoteConnector,
) -> Result<Vec<Link>, (usize, DeviceError)> {
    let network = connector.peer_network();
    let mut addresses = Vec::new();
    for (rank, connection) in connections.iter().enumerate() {
        addresses.push(connection.fetch_address().map_err(|error| (rank, error))?);
    }
    addresses.extend(include_local.then(|| network.address()));
    let ranks = addresses.len();
    let secret = random_secret().map_err(|error| (0, peer_unreachable(0, &error)))?;
    // Teams of the run are numbered from 1.
    let invitation = Invitation { team: 0, secret, addresses, epoch: Instant::now(), nccl: false };
    let measure = |rank: usize| measure_rank(rank as u32, connections.get(rank), &*network, &invitation);
    let results: Vec<Result<Vec<Option<LinkSpeeds>>, DeviceError>> = thread::scope(|scope| {
        let measure = &measure;
        let start = |rank| thread::Builder::new().spawn_scoped(scope, move || measure(rank));
        let threads: Vec<_> = (0..ranks).map(start).collect();
        threads.into_iter().map(join).collect()
    });
    slowest_by_rank(results)
}

/// Waits for the thread of a rank. Fails if the system has refused the thread.
fn join<T>(thread: io::Result<ScopedJoinHandle<Result<T, DeviceError>>>) -> Result<T, DeviceError> {
    match thread {
        Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
        Err(_) => Err(DeviceError::NoThread { queue: "communication".to_owned() }),
    }
}

/// Measures the links of a rank through its connection. Without a connection, the rank is this process, which measures
/// its links itself.
fn measure_rank(
    rank: u32,
    connection: Option<&Arc<Connection>>,
    network: &dyn PeerNetwork,
    invitation: &Invitation,
) -> Result<Vec<Option<LinkSpeeds>>, DeviceError> {
    match connection {
        Some(connection) => connection.measure_links(rank, invitation),
        None => measure_own_links(network, invitation, rank).map_err(|error| peer_unreachable(rank, &error)),
    }
}

/// Connects this process to the other ranks of an invitation, and measures its links as [`measure_links`] does.
///
/// # Errors
/// A peer does not connect or disconnects.
pub(crate) fn measure_own_links(
    network: &dyn PeerNetwork,
    invitation: &Invitation,
    rank: u32,
) -> io::Result<Vec<Option<LinkSpeeds>>> {
    measure_links(rank, &network.connect_peers(invitation, rank)?)
}

/// Combines the measurements of all ranks into one link per rank. It has the lowest bandwidth and the highest latency
/// of the rank's links, over both directions. A rank without links gets [`Link::MEMORY`].
fn slowest_by_rank(
    results: Vec<Result<Vec<Option<LinkSpeeds>>, DeviceError>>,
) -> Result<Vec<Link>, (usize, DeviceError)> {
    let mut slowest: Vec<Option<Link>> = vec![None; results.len()];
    let mut failed: Option<(usize, DeviceError)> = None;
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(links) => {
                for (peer, speeds) in links.into_iter().enumerate().filter_map(|(peer, speeds)| Some((peer, speeds?))) {
                    let link = slower(speeds.to_peer, speeds.from_peer);
                    for end in [rank, peer] {
                        slowest[end] = Some(slowest[end].map_or(link, |before| slower(before, link)));
                    }
                }
            }
            // A lost rank is the cause of its peers' failures, so its error takes precedence.
            Err(error) if failed.is_none() || error.is_device_lost() => failed = Some((rank, error)),
            Err(_) => {}
        }
    }
    match failed {
        Some(failed) => Err(failed),
        None => Ok(slowest.into_iter().map(|link| link.unwrap_or(Link::MEMORY)).collect()),
    }
}

/// Returns a link with the lower bandwidth and the higher latency of two links.
fn slower(one: Link, other: Link) -> Link {
    Link {
        bytes_per_second: one.bytes_per_second.min(other.bytes_per_second),
        latency_seconds: one.latency_seconds.max(other.latency_seconds),
    }
}

/// Measures the links of `rank` over `wires`, which hold one wire per rank, while the other ranks do the same. Of each
/// pair, the lower rank measures and the higher rank responds. Returns the measured speeds in rank order, `None` where
/// the other rank measured.
///
/// # Errors
/// A wire that is closed, or a measurement that exceeds [`TIMEOUT`].
fn measure_links(rank: u32, wires: &[Option<Arc<dyn Wire>>]) -> io::Result<Vec<Option<LinkSpeeds>>> {
    let (done, finished) = channel::<()>();
    let watched = wires.to_vec();
    let watch = move || {
        if finished.recv_timeout(TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            watched.iter().flatten().for_each(|wire| wire.close());
        }
    };
    thread::Builder::new().name("plimsoll-link-timeout".to_owned()).spawn(watch)?;
    let mut links = vec![None; wires.len()];
    // All ranks take their pairs in the same order, so no cycle of waiting ranks can form.
    for wire in wires[..rank as usize].iter().flatten() {
        respond(&**wire)?;
    }
    for (peer, wire) in wires.iter().enumerate().skip(rank as usize + 1) {
        links[peer] = wire.as_ref().map(|wire| measure_link(&**wire)).transpose()?;
    }
    drop(done);
    Ok(links)
}

fn command(kind: u8, chunks: u32) -> [u8; 5] {
    let [a, b, c, d] = chunks.to_le_bytes();
    [kind, a, b, c, d]
}

/// Runs `work` and returns the seconds that it takes.
fn time_seconds(work: impl FnOnce() -> io::Result<()>) -> io::Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Measures one link in both directions.
fn measure_link(wire: &dyn Wire) -> io::Result<LinkSpeeds> {
    let ping = || {
        wire.send(&command(PING, 0))?;
        wire.receive(&mut [0])
    };
    let mut round_trips: Vec<f64> = (0..PINGS).map(|_| time_seconds(ping)).collect::<Result<_, _>>()?;
    round_trips.sort_by(f64::total_cmp);
    let round_trip = round_trips[PINGS / 2];
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut bytes_per_second = |kind: u8| measure_bandwidth(wire, kind, &mut chunk, round_trip);
    let (to_peer, from_peer) = (bytes_per_second(RECEIVE_CHUNKS)?, bytes_per_second(SEND_CHUNKS)?);
    wire.send(&command(FINISH, 0))?;
    let link = |bytes_per_second| Link { bytes_per_second, latency_seconds: round_trip / 2.0 };
    Ok(LinkSpeeds { to_peer: link(to_peer), from_peer: link(from_peer) })
}

/// Returns the bytes per second in one direction, which `kind` selects as in [`transfer_seconds`]. `chunk` is a buffer
/// for one chunk, `round_trip` the measured time of a ping in seconds.
fn measure_bandwidth(wire: &dyn Wire, kind: u8, chunk: &mut [u8], round_trip: f64) -> io::Result<f64> {
    // The first chunk tells how many chunks take long enough to measure.
    let first = transfer_seconds(wire, kind, 1, chunk)?;
    let chunks = (TARGET_SECONDS / first).clamp(1.0, MAX_CHUNKS) as u32;
    let seconds = transfer_seconds(wire, kind, chunks, chunk)?;
    Ok(f64::from(chunks) * CHUNK_BYTES as f64 / (seconds - round_trip).max(seconds / 2.0))
}

/// Transfers `chunks` chunks through the buffer `chunk`, and returns the seconds that this takes. `kind` tells the peer
/// what to do: [`RECEIVE_CHUNKS`] or [`SEND_CHUNKS`].
fn transfer_seconds(wire: &dyn Wire, kind: u8, chunks: u32, chunk: &mut [u8]) -> io::Result<f64> {
    time_seconds(|| {
        wire.send(&command(kind, chunks))?;
        for _ in 0..chunks {
            if kind == RECEIVE_CHUNKS { wire.send(chunk)? } else { wire.receive(chunk)? }
        }
        if kind == RECEIVE_CHUNKS { wire.receive(&mut [0]) } else { Ok(()) }
    })
}

/// Responds to the commands of the measuring rank until it sends [`FINISH`].
fn respond(wire: &dyn Wire) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let mut received = [0; 5];
        wire.receive(&mut received)?;
        let [kind, a, b, c, d] = received;
        let chunks = u32::from_le_bytes([a, b, c, d]);
        match kind {
            PING => wire.send(&[0])?,
            RECEIVE_CHUNKS => {
                for _ in 0..chunks {
                    wire.receive(&mut chunk)?;
                }
                wire.send(&[0])?;
            }
            SEND_CHUNKS => {
                for _ in 0..chunks {
                    wire.send(&chunk)?;
                }
            }
            FINISH => return Ok(()),
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "unknown command in a link measurement")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::Mutex;

    /// A wire that delays what it sends.
    struct SlowWire {
        stream: UnixStream,
        delay_per_chunk: Duration,
        sending: Mutex<()>,
    }

    impl Wire for SlowWire {
        fn send(&self, bytes: &[u8]) -> io::Result<()> {
            let _one = self.sending.lock().unwrap();
            thread::sleep(self.delay_per_chunk.mul_f64(bytes.len() as f64 / CHUNK_BYTES as f64));
            (&self.stream).write_all(bytes)
        }

        fn receive(&self, into: &mut [u8]) -> io::Result<()> {
            (&self.stream).read_exact(into)
        }

        fn close(&self) {
            let _ = self.stream.shutdown(std::net::Shutdown::Both);
        }
    }

    #[test]
    fn every_pair_measures_both_directions() {
        let mut wires: Vec<Vec<Option<Arc<dyn Wire>>>> = (0..3).map(|_| vec![None, None, None]).collect();
        let slow_wire = |stream, delay_per_chunk| SlowWire { stream, delay_per_chunk, sending: Mutex::default() };
        for (one, other) in [(0, 1), (0, 2), (1, 2)] {
            let (near_end, far_end) = UnixStream::pair().unwrap();
            // Only the direction from rank 2 to rank 0 is slow.
            let delay = if (one, other) == (0, 2) { Duration::from_millis(40) } else { Duration::ZERO };
            wires[one][other] = Some(Arc::new(slow_wire(near_end, Duration::ZERO)));
            wires[other][one] = Some(Arc::new(slow_wire(far_end, delay)));
        }
        let speeds: Vec<_> = thread::scope(|scope| {
            let rank = |(rank, wires): (u32, &Vec<_>)| {
                let wires = wires.clone();
                scope.spawn(move || measure_links(rank, &wires).unwrap())
            };
            let threads: Vec<_> = (0..).zip(&wires).map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let measured: Vec<Vec<bool>> = speeds.iter().map(|links| links.iter().map(Option::is_some).collect()).collect();
        assert_eq!(measured, [[false, true, true], [false, false, true], [false; 3]]);
        let slow_rate = CHUNK_BYTES as f64 / 0.040;
        let pair = |one: usize, other: usize| -> LinkSpeeds { speeds[one][other].expect("this pair was measured") };
        assert!(pair(0, 2).from_peer.bytes_per_second <= slow_rate, "{speeds:?}");
        // The other direction and the other links are not slowed down.
        let fast = [pair(0, 2).to_peer, pair(0, 1).to_peer, pair(0, 1).from_peer, pair(1, 2).from_peer];
        assert!(fast.iter().all(|link| link.bytes_per_second > slow_rate), "{speeds:?}");
    }

    #[test]
    fn closed_wire_fails_at_both_ends() {
        let (near_end, far_end) = UnixStream::pair().unwrap();
        drop(far_end);
        let wire: Arc<dyn Wire> = Arc::new(near_end);
        assert!(measure_links(0, &[None, Some(wire.clone())]).is_err());
        assert!(measure_links(1, &[Some(wire), None]).is_err());
    }
}
