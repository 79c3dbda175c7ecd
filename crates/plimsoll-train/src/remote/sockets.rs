//! Channels and peer networks over sockets.
//!
//! The wires of a team connect as follows. Every process listens. Of two ranks, the higher one connects and sends a
//! greeting. The lower one replies once its team is expected there. Both prove that they know the secret of the team. A
//! rank without a reply connects again. Traffic is not encrypted, so these sockets are as safe as the network.

use super::greeting::{ACCEPTED, CHALLENGE_BYTES, Greeting};
use super::listener::PeerListener;
use super::{Channel, Invitation, PeerNetwork, lock};
use plimsoll_device::transport::wire::Wire;
use rustix::io::Errno;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Time within which all peers of a team must connect.
const PEER_TIMEOUT: Duration = Duration::from_secs(30);
/// Time after which an unanswered attempt to connect to a peer is repeated.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause before a failed attempt to connect is repeated, and interval of the checks for a cancelled team.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
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

/// A peer network over TCP.
pub struct TcpPeerNetwork {
    listener: PeerListener,
}

impl TcpPeerNetwork {
    /// Listens at the first of these addresses that can be bound. Peers reach this process there; port 0 selects a free
    /// port.
    ///
    /// # Errors
    /// None of the addresses can be bound, or the system refuses a thread.
    pub fn listen(address: impl ToSocketAddrs) -> io::Result<Arc<TcpPeerNetwork>> {
        Ok(Arc::new(TcpPeerNetwork { listener: PeerListener::bind(address)? }))
    }

    /// Connects `caller.rank` to `peer` at `address`, and waits until the peer has accepted it. Tries again after
    /// failures that may pass.
    ///
    /// # Errors
    /// The peer cannot be reached, does not reply before the deadline, or does not know the secret. Or the team was
    /// cancelled.
    fn connect(&self, caller: &Caller, peer: u32, address: &SocketAddr) -> io::Result<TcpStream> {
        loop {
            let connected = TcpStream::connect_timeout(address, CONNECT_TIMEOUT);
            match connected.and_then(|stream| self.greet(caller, peer, stream)) {
                Err(error) if may_pass(&error) && Instant::now() < caller.deadline => {}
                connected => return connected,
            }
            self.listener.check_cancelled(&caller.invitation.secret)?;
            thread::sleep(RETRY_INTERVAL);
        }
    }

    /// Exchanges greeting and proofs with a peer.
    fn greet(&self, caller: &Caller, peer: u32, mut stream: TcpStream) -> io::Result<TcpStream> {
        let Invitation { team, secret, .. } = caller.invitation;
        let greeting = Greeting::new(*team, [caller.rank, peer], secret)?;
        stream.set_nodelay(true)?;
        stream.write_all(&greeting.to_bytes())?;
        stream.set_read_timeout(Some(RETRY_INTERVAL))?;
        let challenge = self.receive_reply::<CHALLENGE_BYTES>(caller, &stream)?;
        stream.write_all(&greeting.answer(&challenge, secret)?)?;
        if self.receive_reply(caller, &stream)? != [ACCEPTED] {
            return Err(io::Error::new(ErrorKind::InvalidData, "it replies to the greeting in another protocol"));
        }
        stream.set_read_timeout(None)?;
        Ok(stream)
    }

    /// Receives a reply of a peer that has `N` bytes.
    fn receive_reply<const N: usize>(&self, caller: &Caller, mut stream: &TcpStream) -> io::Result<[u8; N]> {
        let (mut reply, mut received) = ([0; N], 0);
        while received < N {
            match stream.read(&mut reply[received..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => received += count,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    self.listener.check_cancelled(&caller.invitation.secret)?;
                    if Instant::now() >= caller.deadline {
                        return Err(io::Error::new(ErrorKind::TimedOut, "it does not reply to the greeting"));
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(reply)
    }
}

/// A rank that connects to lower ranks of its team.
struct Caller<'a> {
    invitation: &'a Invitation,
    rank: u32,
    /// Time until which attempts to connect are repeated.
    deadline: Instant,
}

/// Returns whether an attempt to connect may succeed later. The peer closes connections while strangers crowd its port
/// or before it expects the team. A full table of files or ports is a passing state of this process.
fn may_pass(error: &io::Error) -> bool {
    let crowded = [ErrorKind::TimedOut, ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset, ErrorKind::BrokenPipe];
    let exhausted = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::ADDRNOTAVAIL, Errno::AGAIN];
    crowded.contains(&error.kind()) || Errno::from_io_error(error).is_some_and(|errno| exhausted.contains(&errno))
}

impl PeerNetwork for TcpPeerNetwork {
    fn address(&self) -> String {
        self.listener.address().to_string()
    }

    fn connect_peers(&self, invitation: &Invitation, rank: u32) -> io::Result<Vec<Option<Arc<dyn Wire>>>> {
        let deadline = Instant::now() + PEER_TIMEOUT;
        let caller = Caller { invitation, rank, deadline };
        let higher_ranks = self.listener.expect_peers(invitation, rank);
        let mut lower_ranks = Vec::new();
        for (peer, address) in (0..rank).zip(&invitation.addresses) {
            let with_peer =
                |error: io::Error| io::Error::new(error.kind(), format!("rank {peer} at {address}: {error}"));
            let resolved = address.to_socket_addrs().map_err(with_peer)?.next();
            let resolved = resolved.ok_or_else(|| with_peer(ErrorKind::NotFound.into()))?;
            lower_ranks.push(Some(self.connect(&caller, peer, &resolved).map_err(with_peer)?));
        }
        let to_wire = |stream: TcpStream| -> Arc<dyn Wire> { Arc::new(stream) };
        let streams = lower_ranks.into_iter().chain(higher_ranks.wait(deadline)?.into_iter().skip(rank as usize));
        Ok(streams.map(|stream| stream.map(to_wire)).collect())
    }

    fn cancel_team(&self, secret: &str) {
        self.listener.cancel_team(secret);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::net::TcpListener;
    use std::process::Command;

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
        // Greetings of an earlier team, with wrong secrets and without a secret, and of ranks that do not connect here.
        let mut intruders = Vec::new();
        let wrong_secrets = ["guessed", "knowm", ""].map(|secret| (2, 1, secret));
        let wrong_numbers = [(1, 1), (2, 0), (2, 9)].map(|(team, from)| (team, from, "known"));
        for (team, from, secret) in wrong_secrets.into_iter().chain(wrong_numbers) {
            let mut intruder = TcpStream::connect(&addresses[0]).unwrap();
            intruder.write_all(&Greeting::new(team, [from, 0], secret).unwrap().to_bytes()).unwrap();
            intruders.push(intruder);
        }
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
        for mut intruder in intruders {
            intruder.set_nonblocking(true).unwrap();
            assert!(!intruder.read(&mut [0]).is_ok_and(|count| count > 0));
        }
    }

    /// A program that has recorded the messages of a rank sends them again.
    #[test]
    fn replayed_messages_get_no_wire() {
        let ranks = [0, 1].map(|_| TcpPeerNetwork::listen("127.0.0.1:0").unwrap());
        let addresses: Vec<String> = ranks.iter().map(|rank| rank.address()).collect();
        let team = Invitation { team: 2, secret: "known".into(), addresses, epoch: Instant::now(), nccl: false };
        let recorded = Greeting::new(2, [1, 0], "known").unwrap();
        let call = || {
            let mut stream = TcpStream::connect(ranks[0].address()).unwrap();
            stream.write_all(&recorded.to_bytes()).unwrap();
            let mut challenge = [0; CHALLENGE_BYTES];
            stream.read_exact(&mut challenge).unwrap();
            (stream, challenge)
        };
        thread::scope(|scope| {
            let waiting = scope.spawn(|| ranks[0].connect_peers(&team, 0).unwrap());
            let (_rank, challenge) = call();
            let answer = recorded.answer(&challenge, "known").unwrap();
            let (mut replaying, _) = call();
            replaying.write_all(&answer).unwrap();
            assert_eq!(replaying.read(&mut [0]).unwrap_or(0), 0, "the connection is closed without a reply");
            assert!(!waiting.is_finished());
            ranks[1].connect_peers(&team, 1).unwrap();
            assert!(waiting.join().unwrap()[1].is_some());
        });
    }

    #[test]
    fn listener_without_secret_gets_no_wire() {
        let rank = TcpPeerNetwork::listen("127.0.0.1:0").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addresses = vec![listener.local_addr().unwrap().to_string(), rank.address()];
        let team = Invitation { team: 2, secret: "known".into(), addresses, epoch: Instant::now(), nccl: false };
        let error = thread::scope(|scope| {
            let calling = scope.spawn(|| rank.connect_peers(&team, 1).map(|_| ()).unwrap_err());
            let mut called = listener.accept().unwrap().0;
            called.write_all(&[7; CHALLENGE_BYTES]).unwrap();
            calling.join().unwrap()
        });
        assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
    }

    /// The team forms sooner than a single silent connection times out.
    #[test]
    fn silent_connections_do_not_delay_a_team() {
        let ranks = [0, 1].map(|_| TcpPeerNetwork::listen("127.0.0.1:0").unwrap());
        let addresses: Vec<String> = ranks.iter().map(|rank| rank.address()).collect();
        // More than the listener holds at one time.
        let silent: Vec<TcpStream> = (0..150).map(|_| TcpStream::connect(&addresses[0]).unwrap()).collect();
        let mut partial = &silent[0];
        partial.write_all(b"pli").unwrap();
        let start = Instant::now();
        let team = Invitation { team: 2, secret: "known".into(), addresses, epoch: start, nccl: false };
        let wires = thread::scope(|scope| {
            let other = scope.spawn(|| ranks[1].connect_peers(&team, 1).unwrap());
            // The peer's greeting arrives before the team is expected here.
            thread::sleep(Duration::from_millis(50));
            [ranks[0].connect_peers(&team, 0).unwrap(), other.join().unwrap()]
        });
        assert!(start.elapsed() < CONNECT_TIMEOUT, "{:?}", start.elapsed());
        // Bytes behind the greeting are left to the team.
        wires[1][0].as_ref().unwrap().send(&[7]).unwrap();
        let mut received = [9];
        wires[0][1].as_ref().unwrap().receive(&mut received).unwrap();
        assert_eq!(received, [7]);
    }

    /// Sends bytes to a network, then single bytes until it closes the connection. Returns the time until then.
    fn time_until_closed(network: &TcpPeerNetwork, first_bytes: &[u8]) -> Duration {
        let start = Instant::now();
        let mut stream = TcpStream::connect(network.address()).unwrap();
        stream.write_all(first_bytes).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let is_silent = |error: &io::Error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
        while stream.read(&mut [0]).is_err_and(|error| is_silent(&error)) {
            assert!(start.elapsed() < Duration::from_secs(10));
            let _ = stream.write_all(&[0]);
        }
        start.elapsed()
    }

    #[test]
    fn slow_and_malformed_greetings_are_disconnected() {
        let network = TcpPeerNetwork::listen("127.0.0.1:0").unwrap();
        for malformed in [&[0xff; 12][..], &[0; 8], &1_u64.rotate_right(1).to_le_bytes(), b"GET / HTTP/1.1\r\n\r\n"] {
            assert!(time_until_closed(&network, malformed) < Duration::from_secs(1), "{malformed:?}");
        }
        let slow = time_until_closed(&network, b"plimsoll");
        assert!((1.0..4.0).contains(&slow.as_secs_f64()), "{slow:?}");
    }

    /// Environment variable of the process in which files are scarce.
    const FEW_FILES: &str = "PLIMSOLL_TEST_FEW_FILES";

    #[test]
    fn full_table_of_files_only_delays_a_team() {
        if std::env::var_os(FEW_FILES).is_none() {
            let mut command = Command::new("sh");
            command.args(["-c", "ulimit -n 64 && exec \"$0\" --exact \"$1\""]).arg(std::env::current_exe().unwrap());
            command.arg("remote::sockets::tests::full_table_of_files_only_delays_a_team").env(FEW_FILES, "1");
            let output = command.output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        let ranks = [0, 1].map(|_| TcpPeerNetwork::listen("127.0.0.1:0").unwrap());
        let addresses = ranks.iter().map(|rank| rank.address()).collect();
        let team = Invitation { team: 2, secret: "known".into(), addresses, epoch: Instant::now(), nccl: false };
        let mut files: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        thread::scope(|scope| {
            let connect = |rank: u32| ranks[rank as usize].connect_peers(&team, rank).unwrap().len();
            let threads = [0, 1].map(|rank| scope.spawn(move || connect(rank)));
            // At first rank 1 cannot connect. With one file it can, but rank 0 cannot accept.
            for _ in 0..2 {
                thread::sleep(Duration::from_millis(300));
                assert!(threads.iter().all(|thread| !thread.is_finished()));
                files.pop();
            }
            drop(files);
            assert_eq!(threads.map(|thread| thread.join().unwrap()), [2, 2]);
        });
    }
}
