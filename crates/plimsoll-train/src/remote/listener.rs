//! The port at which a process accepts its peers. Every program on the network can connect to it.
//!
//! A connection is a stranger until it proves to belong to a team that this process waits for (`greeting`). Strangers
//! are few and have little time, and the listener reads at most one greeting and one answer of each. Too many open files
//! or a failing network pause the listener and do not end it.

use super::greeting::{ACCEPTED, Challenge, GREETING_BYTES, Greeting, PROOF_BYTES};
use super::{Invitation, lock};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{HashSet, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::mem;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Largest number of strangers at one time. Further connections wait in the backlog of the system.
const STRANGERS_MAX: usize = 64;
/// Time after which a stranger is disconnected.
const STRANGER_TIMEOUT: Duration = Duration::from_secs(2);
/// Time after which the oldest of [`STRANGERS_MAX`] strangers makes room for the next connection.
const STRANGER_TIMEOUT_IF_FULL: Duration = Duration::from_millis(200);
/// Pause of the listener after an error of the system, such as too many open files.
const ERROR_PAUSE: Duration = Duration::from_millis(100);
/// Stack of the listener's thread in bytes.
const STACK_BYTES: usize = 128 << 10;

/// An accepted connection that has not become a peer. It is read without blocking.
struct Stranger {
    stream: TcpStream,
    /// Bytes received so far of the message that `challenge` calls for.
    received: Vec<u8>,
    /// The challenge that awaits an answer; `None` before a team expects the greeting.
    challenge: Option<SentChallenge>,
    since: Instant,
}

/// A challenge that was sent in the name of a team.
struct SentChallenge {
    /// Id of the [`ExpectedTeam`].
    team: u64,
    challenge: Challenge,
}

impl Stranger {
    /// Returns the number of bytes that are missing from the next message; 0 for a complete one.
    fn missing_bytes(&self) -> usize {
        let length = if self.challenge.is_some() { PROOF_BYTES } else { GREETING_BYTES };
        length - self.received.len()
    }

    /// Reads what has arrived of the next message. Bytes behind the message stay in the stream.
    ///
    /// # Errors
    /// The connection is closed, or its first bytes are not those of a greeting.
    fn read(&mut self) -> io::Result<()> {
        while self.missing_bytes() > 0 {
            let mut bytes = [0; GREETING_BYTES];
            match (&self.stream).read(&mut bytes[..self.missing_bytes()]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.received.extend(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        match self.challenge.is_some() || Greeting::may_begin_with(&self.received) {
            true => Ok(()),
            false => Err(ErrorKind::InvalidData.into()),
        }
    }
}

/// A team that waits for its higher ranks to connect to `rank`.
struct ExpectedTeam {
    id: u64,
    invitation: Invitation,
    rank: u32,
    /// Connections of the peers by rank. `None` for peers that have not connected, and for ranks up to `rank`.
    peers: Vec<Option<TcpStream>>,
}

impl ExpectedTeam {
    /// Returns whether the team waits for the sender of this greeting, and the greeting proves the secret.
    fn expects(&self, greeting: &Greeting) -> bool {
        let Greeting { team, from, to, .. } = *greeting;
        let numbers_match = (team, to) == (self.invitation.team, self.rank);
        let is_higher_rank = from > self.rank && (from as usize) < self.peers.len();
        numbers_match && is_higher_rank && greeting.is_proven(&self.invitation.secret)
    }

    /// Returns the lowest rank that has not connected.
    fn missing_peer(&self) -> Option<usize> {
        (self.rank as usize + 1..self.peers.len()).find(|peer| self.peers[*peer].is_none())
    }
}

/// State that the listener's thread shares with the threads that wait for peers.
#[derive(Default)]
struct State {
    teams: Vec<ExpectedTeam>,
    /// Number of teams that this process has waited for.
    team_count: u64,
    /// Secrets of cancelled teams.
    cancelled: HashSet<String>,
    /// Error of the listener's last attempt to accept a connection; `None` if it succeeded.
    accept_error: Option<String>,
}

impl State {
    fn check_cancelled(&self, secret: &str) -> io::Result<()> {
        match self.cancelled.contains(secret) {
            true => Err(io::Error::new(ErrorKind::ConnectionAborted, "the team was cancelled")),
            false => Ok(()),
        }
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    /// Handles the complete message of a stranger. A greeting that a team expects gets a challenge, and a stranger that
    /// answers it becomes a peer. Returns the stranger if it may still become one later.
    fn admit(&self, stranger: Stranger) -> Option<Stranger> {
        if stranger.challenge.is_none() {
            return self.challenge(stranger);
        }
        self.add_peer(stranger);
        None
    }

    /// Sends a challenge to a stranger if a team expects its greeting.
    fn challenge(&self, mut stranger: Stranger) -> Option<Stranger> {
        let greeting = Greeting::from_bytes(stranger.received.first_chunk()?)?;
        let state = lock(&self.state);
        // The team may be expected later.
        let Some(team) = state.teams.iter().find(|team| team.expects(&greeting)) else { return Some(stranger) };
        let challenge = Challenge::new(greeting).ok()?;
        // The bytes fit into the empty buffer of the connection. A peer without a reply connects again.
        stranger.stream.write_all(&challenge.to_bytes(&team.invitation.secret)).ok()?;
        stranger.received.clear();
        stranger.challenge = Some(SentChallenge { team: team.id, challenge });
        Some(stranger)
    }

    /// Makes a stranger a peer if it has answered its challenge.
    fn add_peer(&self, stranger: Stranger) {
        let Stranger { mut stream, received, challenge: Some(sent), .. } = stranger else { return };
        let mut state = lock(&self.state);
        let Some(team) = state.teams.iter_mut().find(|team| team.id == sent.team) else { return };
        if !sent.challenge.is_answered_by(&received, &team.invitation.secret) {
            return;
        }
        if stream.write_all(&[ACCEPTED]).and_then(|()| stream.set_nonblocking(false)).is_ok() {
            team.peers[sent.challenge.caller() as usize] = Some(stream);
            self.changed.notify_all();
        }
    }
}

/// Accepts the connections of peers, on a thread of its own.
pub(super) struct PeerListener {
    address: SocketAddr,
    shared: Arc<Shared>,
    /// Wakes the thread by a byte, and ends it when it is closed.
    waker: UnixStream,
}

impl PeerListener {
    /// Listens at the first of these addresses that can be bound; port 0 selects a free port.
    ///
    /// # Errors
    /// None of the addresses can be bound, or the system refuses a thread.
    pub fn bind(address: impl ToSocketAddrs) -> io::Result<PeerListener> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (waker, wakes) = UnixStream::pair()?;
        waker.set_nonblocking(true)?;
        wakes.set_nonblocking(true)?;
        let shared = Arc::<Shared>::default();
        let (strangers, paused_until) = (VecDeque::new(), None);
        let acceptor = Acceptor { listener, wakes, shared: Arc::clone(&shared), strangers, paused_until };
        let thread = thread::Builder::new().name("plimsoll-listen".to_owned()).stack_size(STACK_BYTES);
        thread.spawn(move || acceptor.run())?;
        Ok(PeerListener { address, shared, waker })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts the higher ranks of a team from now on, until the returned value is dropped.
    pub fn expect_peers<'a>(&'a self, invitation: &'a Invitation, rank: u32) -> ExpectedPeers<'a> {
        let peers = invitation.addresses.iter().map(|_| None).collect();
        let mut state = lock(&self.shared.state);
        state.team_count += 1;
        let id = state.team_count;
        state.teams.push(ExpectedTeam { id, invitation: invitation.clone(), rank, peers });
        drop(state);
        // A peer may have sent its greeting already. A thread with unread wake-ups needs no further one.
        let _ = (&self.waker).write(&[0]);
        ExpectedPeers { shared: &self.shared, invitation, id }
    }

    /// Checks that no team with this secret was cancelled.
    ///
    /// # Errors
    /// The team was cancelled.
    pub fn check_cancelled(&self, secret: &str) -> io::Result<()> {
        lock(&self.shared.state).check_cancelled(secret)
    }

    /// Cancels the team with this secret, and wakes the threads that wait for its peers.
    pub fn cancel_team(&self, secret: &str) {
        lock(&self.shared.state).cancelled.insert(secret.to_owned());
        self.shared.changed.notify_all();
    }
}

/// The higher ranks of a team, which the listener accepts while this value lives.
pub(super) struct ExpectedPeers<'a> {
    shared: &'a Shared,
    invitation: &'a Invitation,
    id: u64,
}

impl ExpectedPeers<'_> {
    /// Waits until all peers have connected. Returns their connections by rank.
    ///
    /// # Errors
    /// A peer does not connect before `deadline`, or the team was cancelled.
    pub fn wait(&self, deadline: Instant) -> io::Result<Vec<Option<TcpStream>>> {
        let mut state = lock(&self.shared.state);
        loop {
            state.check_cancelled(&self.invitation.secret)?;
            let team = state.teams.iter_mut().find(|team| team.id == self.id).expect("the team is removed on drop");
            let Some(peer) = team.missing_peer() else { return Ok(mem::take(&mut team.peers)) };
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                let address = &self.invitation.addresses[peer];
                let message = match &state.accept_error {
                    None => format!("rank {peer} at {address} did not connect in time"),
                    Some(error) => format!("no connection of rank {peer} at {address} could be accepted: {error}"),
                };
                return Err(io::Error::new(ErrorKind::TimedOut, message));
            }
            let waited = self.shared.changed.wait_timeout(state, remaining);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for ExpectedPeers<'_> {
    fn drop(&mut self) {
        lock(&self.shared.state).teams.retain(|team| team.id != self.id);
    }
}

/// The listener's thread.
struct Acceptor {
    listener: TcpListener,
    /// Receives a byte for each new team. Its other end is closed when the listener is dropped.
    wakes: UnixStream,
    shared: Arc<Shared>,
    /// Strangers in the order in which they connected.
    strangers: VecDeque<Stranger>,
    /// Time until which no connection is accepted, after an error of the system.
    paused_until: Option<Instant>,
}

impl Acceptor {
    /// Accepts connections until the [`PeerListener`] is dropped.
    fn run(mut self) {
        while self.is_wanted() {
            self.wait();
            self.accept_connections();
            self.read_messages();
        }
    }

    /// Reads the wake-ups, and returns whether the [`PeerListener`] still exists.
    fn is_wanted(&self) -> bool {
        !matches!((&self.wakes).read(&mut [0; 64]), Ok(0))
    }

    /// Waits until a connection, a byte of a greeting or a wake-up arrives, or until a deadline.
    fn wait(&self) {
        let mut files = vec![PollFd::new(&self.wakes, PollFlags::IN)];
        let now = Instant::now();
        let resumes_at = self.paused_until.filter(|until| *until > now);
        let has_room = self.has_room(now);
        if resumes_at.is_none() && has_room {
            files.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        let incomplete = self.strangers.iter().filter(|stranger| stranger.missing_bytes() > 0);
        files.extend(incomplete.map(|stranger| PollFd::new(&stranger.stream, PollFlags::IN)));
        let limit = if has_room { STRANGER_TIMEOUT } else { STRANGER_TIMEOUT_IF_FULL };
        let expires_at = self.strangers.front().map(|oldest| oldest.since + limit);
        let deadline = [resumes_at, expires_at].into_iter().flatten().min();
        let timeout = deadline.and_then(|at| Timespec::try_from(at.saturating_duration_since(now)).ok());
        // A failed call, for example for want of memory, must not keep this thread busy.
        if poll(&mut files, timeout.as_ref()).is_err() {
            thread::sleep(ERROR_PAUSE);
        }
    }

    /// Accepts the connections that wait, as far as there is room.
    fn accept_connections(&mut self) {
        let now = Instant::now();
        if self.paused_until.is_some_and(|until| now < until) {
            return;
        }
        self.paused_until = None;
        while self.has_room(now) {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if self.strangers.len() >= STRANGERS_MAX {
                        self.strangers.pop_front();
                    }
                    if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_ok() {
                        self.strangers.push_back(Stranger {
                            stream,
                            received: Vec::new(),
                            challenge: None,
                            since: now,
                        });
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    lock(&self.shared.state).accept_error = None;
                    return;
                }
                // A connection that was closed while it waited, or a signal.
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {}
                Err(error) => {
                    lock(&self.shared.state).accept_error = Some(error.to_string());
                    self.paused_until = Some(now + ERROR_PAUSE);
                    return;
                }
            }
        }
    }

    /// Returns whether a connection can be accepted: strangers are few, or the oldest has had its time.
    fn has_room(&self, now: Instant) -> bool {
        let is_old = |oldest: &Stranger| now.duration_since(oldest.since) >= STRANGER_TIMEOUT_IF_FULL;
        self.strangers.len() < STRANGERS_MAX || self.strangers.front().is_some_and(is_old)
    }

    /// Reads the messages of all strangers. Strangers that prove to belong to a team become peers. Strangers with other
    /// messages, or without more time, are disconnected.
    fn read_messages(&mut self) {
        for mut stranger in mem::take(&mut self.strangers) {
            let remaining = match stranger.read() {
                Ok(()) if stranger.missing_bytes() > 0 => Some(stranger),
                Ok(()) => self.shared.admit(stranger),
                Err(_) => None,
            };
            self.strangers.extend(remaining.filter(|stranger| stranger.since.elapsed() < STRANGER_TIMEOUT));
        }
    }
}
