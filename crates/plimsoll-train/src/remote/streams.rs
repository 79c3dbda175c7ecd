//! Requests and wires over sockets: the plainest carriers. They are as safe as the network is; who has none of its own keeps
//! its secrets with what carries the invitations.

use super::host::Host;
use super::{Channel, Invitation, Wires, locked};
use plimsoll_device::transport::wire::Wire;
use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};
use std::mem;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Whoever was invited has come by then, or does not.
const COMES: Duration = Duration::from_secs(30);
/// Who is called and does not answer is called again after that.
const RINGS: Duration = Duration::from_secs(2);
/// How long a stranger may take to say who it is.
const GREETS: Duration = Duration::from_secs(2);
/// More than this is no greeting of ours.
const GREETING_BYTES_MAX: u64 = 256;
/// So many strangers are listened to at a time; the others wait with the system.
const STRANGERS_MAX: usize = 64;
/// More than this is no request of ours.
const MOST_BYTES: u64 = 1 << 36;

pub(super) fn send(stream: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
    stream.write_all(bytes)?;
    stream.flush()
}

pub(super) fn receive(stream: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 8];
    stream.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > MOST_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "what came is no request"));
    }
    let mut bytes = Vec::new();
    stream.take(length).read_to_end(&mut bytes)?;
    if (bytes.len() as u64) < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(bytes)
}

/// A channel of two streams: one for what is asked, one for what is said aside.
pub struct Streams<S> {
    asked: Mutex<S>,
    aside: Mutex<S>,
}

impl<S: Read + Write + Send> Streams<S> {
    /// The run's ends of both.
    pub fn new(asked: S, aside: S) -> Streams<S> {
        Streams { asked: Mutex::new(asked), aside: Mutex::new(aside) }
    }

    fn ask(stream: &Mutex<S>, request: &[u8]) -> io::Result<Vec<u8>> {
        let mut stream = locked(stream);
        send(&mut *stream, request)?;
        receive(&mut *stream)
    }
}

impl<S: Read + Write + Send> Channel for Streams<S> {
    fn call(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        Streams::ask(&self.asked, request)
    }

    fn aside(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        Streams::ask(&self.aside, request)
    }
}

/// Answers on both streams of a channel until the run closes them.
pub fn serve<S: Read + Write + Send>(host: &Host, asked: S, aside: S) {
    let answers = |mut stream: S| {
        while let Ok(request) = receive(&mut stream) {
            if send(&mut stream, &host.answer(&request)).is_err() {
                return;
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| answers(aside));
        answers(asked);
    });
}

/// Who asks for a wire: the team, both ranks, and what only the invited know.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Greeting {
    team: u64,
    from: u32,
    to: u32,
    secret: String,
}

impl Greeting {
    fn bytes(&self) -> Vec<u8> {
        let Greeting { team, from, to, secret } = self;
        [&team.to_le_bytes()[..], &from.to_le_bytes(), &to.to_le_bytes(), secret.as_bytes()].concat()
    }

    fn read(bytes: &[u8]) -> Option<Greeting> {
        let (team, rest) = bytes.split_first_chunk()?;
        let (from, rest) = rest.split_first_chunk()?;
        let (to, secret) = rest.split_first_chunk()?;
        let (from, to) = (u32::from_le_bytes(*from), u32::from_le_bytes(*to));
        let secret = std::str::from_utf8(secret).ok()?.to_owned();
        Some(Greeting { team: u64::from_le_bytes(*team), from, to, secret })
    }
}

/// Somebody at the door who has not said yet who it is. Nobody waits for that: it is heard as it comes.
struct Stranger {
    stream: TcpStream,
    /// What has come so far: a length, and so much of a greeting.
    said: Vec<u8>,
    until: Instant,
}

impl Stranger {
    /// Who it is, once all of that has come; what it says behind that is for the team.
    ///
    /// # Errors
    /// That was no greeting, or its time is up.
    fn hear(&mut self) -> io::Result<Option<Greeting>> {
        let no_greeting = || io::Error::from(io::ErrorKind::InvalidData);
        loop {
            let length = self.said.first_chunk().map(|length| u64::from_le_bytes(*length));
            if length.is_some_and(|length| length > GREETING_BYTES_MAX) {
                return Err(no_greeting());
            }
            let missing = 8 + length.unwrap_or(0) as usize - self.said.len();
            if missing == 0 {
                return Greeting::read(&self.said[8..]).ok_or_else(no_greeting).map(Some);
            }
            let mut bytes = [0; GREETING_BYTES_MAX as usize];
            match (&self.stream).read(&mut bytes[..missing]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.said.extend(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < self.until => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Wires over TCP: every process listens, and of two ranks the higher one calls.
pub struct TcpWires {
    listener: TcpListener,
    address: SocketAddr,
    /// Who has called, and not said who it is.
    strangers: Mutex<Vec<Stranger>>,
    /// Who has called, and not been asked for yet.
    came: Mutex<HashMap<Greeting, TcpStream>>,
    /// The secrets of the teams that were called off.
    called_off: Mutex<HashSet<String>>,
}

impl TcpWires {
    /// Listens at an address under which the others reach this process; port 0 is any that is free.
    ///
    /// # Errors
    /// What the system says.
    pub fn listen(address: impl ToSocketAddrs) -> io::Result<Arc<TcpWires>> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (strangers, came, called_off) = (Mutex::default(), Mutex::default(), Mutex::default());
        Ok(Arc::new(TcpWires { listener, address, strangers, came, called_off }))
    }

    /// Whether this process still waits for the others of the team with this secret.
    fn waits(&self, secret: &str, until: Instant) -> io::Result<bool> {
        match locked(&self.called_off).contains(secret) {
            true => Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the meeting was called off")),
            false => Ok(Instant::now() < until),
        }
    }

    /// Lets in whoever is at the door and says who it is. Whether anybody has come in.
    fn let_in(&self) -> io::Result<bool> {
        let mut strangers = locked(&self.strangers);
        while strangers.len() < STRANGERS_MAX {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    stream.set_nodelay(true)?;
                    strangers.push(Stranger { stream, said: Vec::new(), until: Instant::now() + GREETS });
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        let mut anybody = false;
        for mut stranger in mem::take(&mut *strangers) {
            match stranger.hear() {
                Ok(None) => strangers.push(stranger),
                Ok(Some(greeting)) => {
                    stranger.stream.set_nonblocking(false)?;
                    locked(&self.came).insert(greeting, stranger.stream);
                    anybody = true;
                }
                // Who does not say who it is is sent away.
                Err(_) => {}
            }
        }
        Ok(anybody)
    }
}

impl Wires for TcpWires {
    fn place(&self) -> String {
        self.address.to_string()
    }

    fn meet(&self, invitation: &Invitation, rank: u32) -> io::Result<Vec<Option<Arc<dyn Wire>>>> {
        let Invitation { team, secret, places, .. } = invitation;
        let greeting = |from, to| Greeting { team: *team, from, to, secret: secret.clone() };
        let mut wires: Vec<Option<Arc<dyn Wire>>> = places.iter().map(|_| None).collect();
        let until = Instant::now() + COMES;
        for (peer, place) in (0..rank).zip(places) {
            let of = |error: io::Error| io::Error::new(error.kind(), format!("rank {peer} at {place}: {error}"));
            let address = place.to_socket_addrs().map_err(of)?.next();
            let address = address.ok_or_else(|| of(io::ErrorKind::NotFound.into()))?;
            let mut stream = loop {
                match TcpStream::connect_timeout(&address, RINGS) {
                    Err(error) if error.kind() == io::ErrorKind::TimedOut && self.waits(secret, until)? => {}
                    called => break called.map_err(of)?,
                }
            };
            stream.set_nodelay(true)?;
            send(&mut stream, &greeting(rank, peer).bytes()).map_err(of)?;
            wires[peer as usize] = Some(Arc::new(stream));
        }
        // Who was called to a team before this one does not come any more.
        locked(&self.came).retain(|of, _| of.team >= *team);
        loop {
            let mut missing = None;
            for peer in rank + 1..places.len() as u32 {
                if wires[peer as usize].is_none() {
                    match locked(&self.came).remove(&greeting(peer, rank)) {
                        Some(stream) => wires[peer as usize] = Some(Arc::new(stream)),
                        None => missing = Some(peer),
                    }
                }
            }
            match missing {
                None => return Ok(wires),
                Some(peer) if !self.waits(secret, until)? => {
                    let place = &places[peer as usize];
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        format!("rank {peer} at {place} does not come"),
                    ));
                }
                Some(_) if self.let_in()? => {}
                Some(_) => thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    fn call_off(&self, secret: &str) {
        locked(&self.called_off).insert(secret.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Far sooner than nobody comes.
    #[test]
    fn who_waits_for_a_team_that_is_called_off_is_let_go() {
        let wires = TcpWires::listen("127.0.0.1:0").unwrap();
        let places = vec![wires.place(), "127.0.0.1:9".into()];
        let began = Instant::now();
        let team = Invitation { team: 2, secret: "this one".into(), places, epoch: began, nccl: false };
        wires.call_off("the one before");
        let error = thread::scope(|scope| {
            let meets = scope.spawn(|| wires.meet(&team, 0).map(|_| ()).unwrap_err());
            thread::sleep(Duration::from_millis(50));
            assert!(!meets.is_finished());
            wires.call_off("this one");
            meets.join().unwrap()
        });
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
        // It may have been called off before it began.
        assert_eq!(wires.meet(&team, 0).map(|_| ()).unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
        assert!(began.elapsed() < COMES / 2);
    }

    #[test]
    fn who_was_not_invited_gets_no_wire() {
        let ranks: Vec<Arc<TcpWires>> = (0..3).map(|_| TcpWires::listen("127.0.0.1:0").unwrap()).collect();
        let places: Vec<String> = ranks.iter().map(|rank| rank.place()).collect();
        let invitation =
            Invitation { team: 2, secret: "known".into(), places: places.clone(), epoch: Instant::now(), nccl: false };
        // Of a team before, without the secret, and with nothing to say.
        let mut strangers = Vec::new();
        for (team, secret) in [(1, "known"), (2, "guessed"), (2, "")] {
            let mut stranger = TcpStream::connect(&places[0]).unwrap();
            let greeting = Greeting { team, from: 1, to: 0, secret: secret.into() };
            send(&mut stranger, &greeting.bytes()).unwrap();
            strangers.push(stranger);
        }
        strangers.push(TcpStream::connect(&places[0]).unwrap());
        strangers[3].write_all(&[0xff; 12]).unwrap();
        let wires: Vec<_> = thread::scope(|scope| {
            let meet = |(rank, wires): (u32, &Arc<TcpWires>)| {
                let (wires, invitation) = (wires.clone(), &invitation);
                scope.spawn(move || wires.meet(invitation, rank).unwrap())
            };
            let threads: Vec<_> = (0..).zip(&ranks).map(meet).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (from, to) in [(0, 1), (1, 0), (1, 2), (2, 0)] {
            let (sends, receives) = (wires[from][to].as_ref().unwrap(), wires[to][from].as_ref().unwrap());
            sends.send(&[from as u8, to as u8]).unwrap();
            let mut got = [9; 2];
            receives.receive(&mut got).unwrap();
            assert_eq!(got, [from as u8, to as u8]);
        }
    }

    /// Far sooner than one of them alone may take.
    #[test]
    fn strangers_who_say_nothing_or_little_hold_up_no_meeting() {
        let ranks = [0, 1].map(|_| TcpWires::listen("127.0.0.1:0").unwrap());
        let places: Vec<String> = ranks.iter().map(|rank| rank.place()).collect();
        let strangers: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(&places[0]).unwrap()).collect();
        let mut drips = &strangers[0];
        drips.write_all(&[40, 0, 0]).unwrap();
        let (team, began) = (
            Invitation { team: 2, secret: "known".into(), places, epoch: Instant::now(), nccl: false },
            Instant::now(),
        );
        let wires = thread::scope(|scope| {
            let other = scope.spawn(|| ranks[1].meet(&team, 1).unwrap());
            [ranks[0].meet(&team, 0).unwrap(), other.join().unwrap()]
        });
        assert!(began.elapsed() < GREETS, "{:?}", began.elapsed());
        // What is said right behind a greeting has not been heard with it.
        wires[1][0].as_ref().unwrap().send(&[7]).unwrap();
        let mut got = [9];
        wires[0][1].as_ref().unwrap().receive(&mut got).unwrap();
        assert_eq!(got, [7]);
    }

    #[test]
    fn a_stranger_who_says_a_byte_now_and_then_is_sent_away_all_the_same() {
        let wires = TcpWires::listen("127.0.0.1:0").unwrap();
        let mut stranger = TcpStream::connect(wires.place()).unwrap();
        stranger.write_all(&[40]).unwrap();
        while locked(&wires.strangers).is_empty() {
            wires.let_in().unwrap();
        }
        let began = Instant::now();
        while !locked(&wires.strangers).is_empty() {
            assert!(began.elapsed() < 2 * GREETS);
            let _ = stranger.write_all(&[0]);
            thread::sleep(GREETS / 20);
            assert!(!wires.let_in().unwrap());
        }
        assert!(began.elapsed() > GREETS / 2);
    }
}
