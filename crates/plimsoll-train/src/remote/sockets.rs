//! Channels and peer networks over sockets.
//!
//! The wires of a team connect as follows. Every process listens. Of two ranks, the higher one connects and sends a
//! `Greeting` with the secret of the team; connections without a valid greeting are closed. Traffic is not encrypted,
//! so these sockets are as safe as the network.

use super::{Channel, Invitation, PeerNetwork, lock};
use plimsoll_device::transport::wire::Wire;
use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};
use std::mem;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Time within which all peers of a team must connect.
const PEER_TIMEOUT: Duration = Duration::from_secs(30);
/// Time after which an unanswered attempt to connect to a peer is repeated.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time that an accepted connection has to send its greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(2);
/// Size of the largest valid [`Greeting`], in bytes.
const GREETING_BYTES_MAX: u64 = 256;
/// Largest number of accepted connections without a complete greeting. Further ones wait in the listener's backlog.
const PENDING_CONNECTIONS_MAX: usize = 64;
/// Size of the largest valid message in bytes.
const MESSAGE_BYTES_MAX: u64 = 1 << 36;

/// Sends a message: its length as a little-endian `u64`, then its bytes.
pub(crate) fn send(stream: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
    stream.write_all(bytes)?;
    stream.flush()
}

/// Receives a message that [`send`] sent.
pub(crate) fn receive(stream: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 8];
    stream.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > MESSAGE_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the message exceeds the size limit"));
    }
    let mut bytes = Vec::new();
    stream.take(length).read_to_end(&mut bytes)?;
    if (bytes.len() as u64) < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(bytes)
}

/// A channel over two streams: one for requests in order, one for out-of-band requests.
pub struct StreamChannel<S> {
    requests: Mutex<S>,
    out_of_band: Mutex<S>,
}

impl<S: Read + Write + Send> StreamChannel<S> {
    /// Creates the run's side of a channel.
    pub fn new(requests: S, out_of_band: S) -> StreamChannel<S> {
        StreamChannel { requests: Mutex::new(requests), out_of_band: Mutex::new(out_of_band) }
    }

    fn exchange(stream: &Mutex<S>, request: &[u8]) -> io::Result<Vec<u8>> {
        let mut stream = lock(stream);
        send(&mut *stream, request)?;
        receive(&mut *stream)
    }
}

impl<S: Read + Write + Send> Channel for StreamChannel<S> {
    fn call(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        StreamChannel::exchange(&self.requests, request)
    }

    fn call_out_of_band(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        StreamChannel::exchange(&self.out_of_band, request)
    }
}

/// First message on a connection between two ranks of a team.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Greeting {
    team: u64,
    from: u32,
    to: u32,
    secret: String,
}

impl Greeting {
    fn to_bytes(&self) -> Vec<u8> {
        let Greeting { team, from, to, secret } = self;
        [&team.to_le_bytes()[..], &from.to_le_bytes(), &to.to_le_bytes(), secret.as_bytes()].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Greeting> {
        let (team, rest) = bytes.split_first_chunk()?;
        let (from, rest) = rest.split_first_chunk()?;
        let (to, secret) = rest.split_first_chunk()?;
        let (from, to) = (u32::from_le_bytes(*from), u32::from_le_bytes(*to));
        let secret = std::str::from_utf8(secret).ok()?.to_owned();
        Some(Greeting { team: u64::from_le_bytes(*team), from, to, secret })
    }
}

/// An accepted connection that has not sent its whole greeting. It is polled without blocking.
struct PendingConnection {
    stream: TcpStream,
    /// Bytes received so far: a length, then part of a greeting.
    received: Vec<u8>,
    deadline: Instant,
}

impl PendingConnection {
    /// Reads what has arrived and returns the greeting once it is complete. Bytes behind the greeting stay in the
    /// stream, because they belong to the team.
    ///
    /// # Errors
    /// Bytes that are not a greeting, a closed connection, or an expired deadline.
    fn poll_greeting(&mut self) -> io::Result<Option<Greeting>> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        loop {
            let length = self.received.first_chunk().map(|length| u64::from_le_bytes(*length));
            if length.is_some_and(|length| length > GREETING_BYTES_MAX) {
                return Err(invalid());
            }
            let remaining = 8 + length.unwrap_or(0) as usize - self.received.len();
            if remaining == 0 {
                return Greeting::from_bytes(&self.received[8..]).ok_or_else(invalid).map(Some);
            }
            let mut bytes = [0; GREETING_BYTES_MAX as usize];
            match (&self.stream).read(&mut bytes[..remaining]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.received.extend(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < self.deadline => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// A peer network over TCP.
pub struct TcpPeerNetwork {
    listener: TcpListener,
    address: SocketAddr,
    /// Accepted connections without a complete greeting.
    pending: Mutex<Vec<PendingConnection>>,
    /// Connections whose greeting is complete, by greeting, until the team that it names takes them.
    greeted: Mutex<HashMap<Greeting, TcpStream>>,
    /// Secrets of cancelled teams.
    cancelled: Mutex<HashSet<String>>,
}

impl TcpPeerNetwork {
    /// Listens at the first of these addresses that can be bound. Peers reach this process there; port 0 selects a free
    /// port.
    ///
    /// # Errors
    /// None of the addresses can be bound.
    pub fn listen(address: impl ToSocketAddrs) -> io::Result<Arc<TcpPeerNetwork>> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (pending, greeted, cancelled) = (Mutex::default(), Mutex::default(), Mutex::default());
        Ok(Arc::new(TcpPeerNetwork { listener, address, pending, greeted, cancelled }))
    }

    /// Returns whether this process may go on waiting for the team with this secret: `deadline` has not passed yet.
    ///
    /// # Errors
    /// The team was cancelled.
    fn may_wait(&self, secret: &str, deadline: Instant) -> io::Result<bool> {
        match lock(&self.cancelled).contains(secret) {
            true => Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the team was cancelled")),
            false => Ok(Instant::now() < deadline),
        }
    }

    /// Accepts new connections and polls pending ones. Returns whether any has completed its greeting.
    fn accept_connections(&self) -> io::Result<bool> {
        let mut pending = lock(&self.pending);
        while pending.len() < PENDING_CONNECTIONS_MAX {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    stream.set_nodelay(true)?;
                    let deadline = Instant::now() + GREETING_TIMEOUT;
                    pending.push(PendingConnection { stream, received: Vec::new(), deadline });
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        let mut any_greeted = false;
        for mut connection in mem::take(&mut *pending) {
            match connection.poll_greeting() {
                Ok(None) => pending.push(connection),
                Ok(Some(greeting)) => {
                    connection.stream.set_nonblocking(false)?;
                    lock(&self.greeted).insert(greeting, connection.stream);
                    any_greeted = true;
                }
                // Dropping the connection closes it.
                Err(_) => {}
            }
        }
        Ok(any_greeted)
    }

    /// Connects to a peer. Tries again after each timeout until `deadline`. The outer error says that the team was
    /// cancelled; the inner one is that of the last attempt.
    fn connect(&self, address: &SocketAddr, secret: &str, deadline: Instant) -> io::Result<io::Result<TcpStream>> {
        loop {
            match TcpStream::connect_timeout(address, CONNECT_TIMEOUT) {
                Err(error) if error.kind() == io::ErrorKind::TimedOut && self.may_wait(secret, deadline)? => {}
                connected => return Ok(connected),
            }
        }
    }
}

impl PeerNetwork for TcpPeerNetwork {
    fn address(&self) -> String {
        self.address.to_string()
    }

    fn connect_peers(&self, invitation: &Invitation, rank: u32) -> io::Result<Vec<Option<Arc<dyn Wire>>>> {
        let Invitation { team, secret, addresses, .. } = invitation;
        let greeting = |from, to| Greeting { team: *team, from, to, secret: secret.clone() };
        let mut wires: Vec<Option<Arc<dyn Wire>>> = addresses.iter().map(|_| None).collect();
        let deadline = Instant::now() + PEER_TIMEOUT;
        for (peer, address) in (0..rank).zip(addresses) {
            let with_peer =
                |error: io::Error| io::Error::new(error.kind(), format!("rank {peer} at {address}: {error}"));
            let resolved = address.to_socket_addrs().map_err(with_peer)?.next();
            let resolved = resolved.ok_or_else(|| with_peer(io::ErrorKind::NotFound.into()))?;
            let mut stream = self.connect(&resolved, secret, deadline)?.map_err(with_peer)?;
            stream.set_nodelay(true)?;
            send(&mut stream, &greeting(rank, peer).to_bytes()).map_err(with_peer)?;
            wires[peer as usize] = Some(Arc::new(stream));
        }
        // Connections of earlier teams are obsolete.
        lock(&self.greeted).retain(|greeting, _| greeting.team >= *team);
        loop {
            let mut missing = None;
            for peer in rank + 1..addresses.len() as u32 {
                if wires[peer as usize].is_none() {
                    match lock(&self.greeted).remove(&greeting(peer, rank)) {
                        Some(stream) => wires[peer as usize] = Some(Arc::new(stream)),
                        None => missing = Some(peer),
                    }
                }
            }
            match missing {
                None => return Ok(wires),
                Some(peer) if !self.may_wait(secret, deadline)? => {
                    let address = &addresses[peer as usize];
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        format!("rank {peer} at {address} did not connect within {} s", PEER_TIMEOUT.as_secs()),
                    ));
                }
                Some(_) if self.accept_connections()? => {}
                Some(_) => thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    fn cancel_team(&self, secret: &str) {
        lock(&self.cancelled).insert(secret.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cancelling takes effect long before the timeout.
    #[test]
    fn cancelled_team_stops_waiting() {
        let network = TcpPeerNetwork::listen("127.0.0.1:0").unwrap();
        let addresses = vec![network.address(), "127.0.0.1:9".into()];
        let start = Instant::now();
        let team = Invitation { team: 2, secret: "this team".into(), addresses, epoch: start, nccl: false };
        network.cancel_team("another team");
        let error = thread::scope(|scope| {
            let waiting = scope.spawn(|| network.connect_peers(&team, 0).map(|_| ()).unwrap_err());
            thread::sleep(Duration::from_millis(50));
            assert!(!waiting.is_finished());
            network.cancel_team("this team");
            waiting.join().unwrap()
        });
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
        // A team can be cancelled before this process waits for it.
        let error = network.connect_peers(&team, 0).map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
        assert!(start.elapsed() < PEER_TIMEOUT / 2);
    }

    #[test]
    fn connections_without_valid_greeting_get_no_wire() {
        let ranks: Vec<Arc<TcpPeerNetwork>> = (0..3).map(|_| TcpPeerNetwork::listen("127.0.0.1:0").unwrap()).collect();
        let addresses: Vec<String> = ranks.iter().map(|rank| rank.address()).collect();
        let epoch = Instant::now();
        let invitation =
            Invitation { team: 2, secret: "known".into(), addresses: addresses.clone(), epoch, nccl: false };
        // Greetings of an earlier team, with a wrong secret and without a secret; then bytes that are not a greeting.
        let mut intruders = Vec::new();
        for (team, secret) in [(1, "known"), (2, "guessed"), (2, "")] {
            let mut intruder = TcpStream::connect(&addresses[0]).unwrap();
            let greeting = Greeting { team, from: 1, to: 0, secret: secret.into() };
            send(&mut intruder, &greeting.to_bytes()).unwrap();
            intruders.push(intruder);
        }
        intruders.push(TcpStream::connect(&addresses[0]).unwrap());
        intruders[3].write_all(&[0xff; 12]).unwrap();
        let wires: Vec<_> = thread::scope(|scope| {
            let connect = |(rank, network): (u32, &Arc<TcpPeerNetwork>)| {
                let (network, invitation) = (network.clone(), &invitation);
                scope.spawn(move || network.connect_peers(invitation, rank).unwrap())
            };
            let threads: Vec<_> = (0..).zip(&ranks).map(connect).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (from, to) in [(0, 1), (1, 0), (1, 2), (2, 0)] {
            let (sender, receiver) = (wires[from][to].as_ref().unwrap(), wires[to][from].as_ref().unwrap());
            sender.send(&[from as u8, to as u8]).unwrap();
            let mut received = [9; 2];
            receiver.receive(&mut received).unwrap();
            assert_eq!(received, [from as u8, to as u8]);
        }
    }

    /// The team forms sooner than a single silent connection times out.
    #[test]
    fn silent_connections_do_not_delay_a_team() {
        let ranks = [0, 1].map(|_| TcpPeerNetwork::listen("127.0.0.1:0").unwrap());
        let addresses: Vec<String> = ranks.iter().map(|rank| rank.address()).collect();
        let silent: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(&addresses[0]).unwrap()).collect();
        let mut partial = &silent[0];
        partial.write_all(&[40, 0, 0]).unwrap();
        let start = Instant::now();
        let team = Invitation { team: 2, secret: "known".into(), addresses, epoch: start, nccl: false };
        let wires = thread::scope(|scope| {
            let other = scope.spawn(|| ranks[1].connect_peers(&team, 1).unwrap());
            [ranks[0].connect_peers(&team, 0).unwrap(), other.join().unwrap()]
        });
        assert!(start.elapsed() < GREETING_TIMEOUT, "{:?}", start.elapsed());
        // Bytes behind the greeting are left to the team.
        wires[1][0].as_ref().unwrap().send(&[7]).unwrap();
        let mut received = [9];
        wires[0][1].as_ref().unwrap().receive(&mut received).unwrap();
        assert_eq!(received, [7]);
    }

    #[test]
    fn slow_greeting_is_closed_after_timeout() {
        let network = TcpPeerNetwork::listen("127.0.0.1:0").unwrap();
        let mut slow = TcpStream::connect(network.address()).unwrap();
        slow.write_all(&[40]).unwrap();
        while lock(&network.pending).is_empty() {
            network.accept_connections().unwrap();
        }
        let start = Instant::now();
        while !lock(&network.pending).is_empty() {
            assert!(start.elapsed() < 2 * GREETING_TIMEOUT);
            let _ = slow.write_all(&[0]);
            thread::sleep(GREETING_TIMEOUT / 20);
            assert!(!network.accept_connections().unwrap());
        }
        assert!(start.elapsed() > GREETING_TIMEOUT / 2);
    }
}
