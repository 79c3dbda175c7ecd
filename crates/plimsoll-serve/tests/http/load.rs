//! Many clients, slow clients, and requests that are no HTTP.

use super::client::{Served, WATCHDOG, numbered};
use plimsoll_serve::guests::MAX_GUESTS;
use plimsoll_serve::server::MAX_CONNECTIONS;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// Requests of [`random_requests_do_no_harm`].
const REQUESTS: usize = 10_000;
/// Most memory that a server may take in addition for nine times as many requests.
const MAX_GROWTH_KIB: u64 = 4 << 10;
/// Clients of [`many_clients_share_readings`].
const CLIENTS: usize = 200;

/// Random numbers: splitmix64 of Steele, Lea and Flood.
struct Rng(u64);

impl Rng {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end as u64) as usize
    }

    fn pick<'a>(&mut self, words: &[&'a str]) -> &'a str {
        words[self.below(words.len())]
    }
}

/// Returns a request that is right in some parts and damaged in others.
fn request(rng: &mut Rng, host: &str) -> Vec<u8> {
    let method = rng.pick(&["GET", "GET", "GET", "POST", "HEAD", "get", "", "\u{7f}", "GET GET"]);
    let paths = [
        "/",
        "/api/snapshot",
        "/metrics",
        "/healthz",
        "/login",
        "/../../etc/passwd",
        "/%00",
        "*",
        "http://a/",
        "/%ff?",
    ];
    let path = match rng.below(12) {
        0 => "/x".repeat(rng.below(20_000)),
        _ => rng.pick(&paths).to_owned(),
    };
    let version = rng.pick(&["HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", ""]);
    let mut text = format!("{method} {path} {version}\r\nhost: {host}\r\n");
    for _ in 0..rng.below(4) {
        text += rng.pick(&[
            "host: evil.example\r\n",
            "content-length: 18446744073709551616\r\n",
            "content-length: 5\r\n",
            "transfer-encoding: chunked\r\n",
            "authorization: Bearer \u{e9}\r\n",
            "cookie: plimsoll_token_1=;;;==;\r\n",
            "origin: null\r\n",
            "expect: 100-continue\r\n",
            "upgrade: websocket\r\nconnection: upgrade\r\n",
            "no header\r\n",
            ": empty\r\n",
        ]);
    }
    if rng.below(20) == 0 {
        text += &"a: b\r\n".repeat(rng.below(200));
    }
    text += "connection: close\r\n\r\n";
    let mut bytes = text.into_bytes();
    for _ in 0..rng.below(4) {
        let at = rng.below(bytes.len());
        match rng.below(3) {
            0 => bytes[at] = rng.below(256) as u8,
            1 => bytes.truncate(at.max(1)),
            _ => bytes.insert(at, rng.below(256) as u8),
        }
    }
    bytes
}

/// Sends random requests to a server. Fails if it answers one with a file, or stops answering.
fn send_random_requests(served: &Served, rng: &mut Rng, count: usize) {
    let host = served.address.to_string();
    let mut answered = 0;
    for _ in 0..count {
        let mut stream = served.connect();
        let bytes = request(rng, &host);
        // The server may close the connection before it has read a damaged request to its end.
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(Shutdown::Write);
        let mut response = Vec::new();
        let _ = stream.read_to_end(&mut response);
        assert!(response.len() < 200_000 && !response.windows(5).any(|some| some == b"root:"), "{bytes:?}");
        answered += usize::from(response.starts_with(b"HTTP/1."));
    }
    assert!(answered > count / 2, "{answered} of {count}");
    assert_eq!(served.get("/healthz", &[]).status, 200);
}

/// Returns the memory that this process holds, in KiB.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("Linux reports it");
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn random_requests_do_no_harm() {
    send_random_requests(&Served::local(Duration::from_secs(1)), &mut Rng(1), REQUESTS);
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn many_random_requests_leave_memory_bounded() {
    let (served, mut rng) = (Served::local(Duration::from_secs(1)), Rng(2));
    send_random_requests(&served, &mut rng, REQUESTS);
    let before = resident_kib();
    send_random_requests(&served, &mut rng, 9 * REQUESTS);
    let after = resident_kib();
    assert!(after < before + MAX_GROWTH_KIB, "{before} KiB grew to {after} KiB");
}

#[test]
fn many_clients_share_readings() {
    let interval = Duration::from_millis(100);
    let served = Served::local(interval);
    let began = Instant::now();
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| served.events()).collect();
    for client in &mut clients {
        let numbers = [client.next(), client.next()].map(|(_, snapshot)| snapshot["at"].as_f64().unwrap());
        assert!(numbers[0] < numbers[1], "{numbers:?}");
    }
    let most = began.elapsed().as_secs_f64() / interval.as_secs_f64() + 1.0;
    let readings = served.readings();
    assert!((2.0..=most).contains(&(readings as f64)), "{readings} of at most {most}");
    drop(clients);
    // The server learns that a client has gone when it sends the next event.
    thread::sleep(5 * interval);
    let after = served.readings();
    thread::sleep(5 * interval);
    assert_eq!(served.readings(), after, "readings end with the last client");
}

#[test]
fn connections_beyond_the_limit_are_refused() {
    let served = Served::local(Duration::from_secs(1));
    let idle: Vec<TcpStream> = (0..MAX_CONNECTIONS).map(|_| served.connect()).collect();
    let mut further = served.connect();
    let mut response = String::new();
    further.read_to_string(&mut response).unwrap();
    assert!(response.starts_with("HTTP/1.1 503 "), "{response}");
    drop(idle);
    let began = Instant::now();
    let is_served = || {
        let mut stream = served.connect();
        let mut response = String::new();
        let asked = write!(stream, "GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        asked.and_then(|()| stream.read_to_string(&mut response)).is_ok() && response.ends_with("ok\n")
    };
    while !is_served() {
        assert!(began.elapsed() < WATCHDOG, "closed connections still count");
    }
}

#[test]
fn strangers_leave_room_for_token_holders() {
    let served = Served::start("0.0.0.0:0", Duration::from_secs(600), |number| Ok(numbered(number)));
    let ask = |stream: &mut TcpStream, authorization: &str| {
        write!(stream, "GET /healthz HTTP/1.1\r\nhost: {}\r\n{authorization}\r\n", served.address).unwrap();
        let mut start = [0; 12];
        stream.read_exact(&mut start).unwrap();
        String::from_utf8(start.to_vec()).unwrap()
    };
    let token = format!("authorization: Bearer {}\r\n", served.token);
    // Connections that have brought the token do not count.
    let mut trusted: Vec<TcpStream> = (0..MAX_GUESTS).map(|_| served.connect()).collect();
    for stream in &mut trusted {
        assert_eq!(ask(stream, &token), "HTTP/1.1 200");
    }
    let mut strangers: Vec<TcpStream> = (0..MAX_GUESTS).map(|_| served.connect()).collect();
    let (mut further, mut response) = (served.connect(), String::new());
    further.read_to_string(&mut response).unwrap();
    assert!(response.starts_with("HTTP/1.1 503 "), "{response}");
    // A refused request ends its connection, which frees its place.
    let stranger = &mut strangers[0];
    assert_eq!(ask(stranger, ""), "HTTP/1.1 401");
    let mut rest = String::new();
    stranger.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("connection: close\r\n"), "{rest}");
    let began = Instant::now();
    let is_served = || {
        let mut stream = served.connect();
        write!(stream, "GET /healthz HTTP/1.1\r\nhost: {}\r\n{token}connection: close\r\n\r\n", served.address)
            .unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).is_ok() && response.starts_with("HTTP/1.1 200 ")
    };
    while !is_served() {
        assert!(began.elapsed() < WATCHDOG, "the place of a closed connection stays taken");
    }
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn slow_head_ends_the_connection() {
    let served = Served::local(Duration::from_secs(1));
    let mut stream = served.connect();
    let began = Instant::now();
    stream.write_all(b"GET / HTTP/1.1\r\nhost: ").unwrap();
    let mut response = String::new();
    let _ = stream.read_to_string(&mut response);
    assert!(!response.contains("200 OK") && began.elapsed() < WATCHDOG, "{response}");
}
