//! The end of a server: each stream gets a last snapshot and its end.

use super::client::{Served, WATCHDOG};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

/// Reads a connection to its end.
fn rest(mut stream: TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("the connection is closed, not reset");
    text
}

#[test]
fn streams_end_with_a_last_snapshot() {
    let served = Served::local(Duration::from_secs(600));
    let [all, last] = ["/api/events", "/api/events/last"].map(|path| served.open(path));
    while served.readings() == 0 {
        thread::sleep(Duration::from_millis(5));
    }
    thread::sleep(Duration::from_millis(100));
    served.stop();
    let [all, last] = [all, last].map(rest);
    assert_eq!((all.matches("event: snapshot\n").count(), last.matches("event: snapshot\n").count()), (2, 1));
    for text in [all, last] {
        assert!(text.contains("\"at\":2.0"), "{text}");
        // The chunk without bytes completes the response.
        assert!(text.contains("event: end\ndata: {}\n\n") && text.ends_with("\r\n0\r\n\r\n"), "{text}");
    }
    assert_eq!(served.readings(), 2);
}

#[test]
fn idle_connections_do_not_delay_the_end() {
    let served = Served::local(Duration::from_secs(600));
    let mut idle = served.connect();
    write!(idle, "GET /healthz HTTP/1.1\r\nhost: {}\r\n\r\n", served.address).unwrap();
    let unused = served.connect();
    thread::sleep(Duration::from_millis(100));
    let began = Instant::now();
    served.stop();
    assert!(rest(idle).ends_with("ok\n"));
    assert_eq!(rest(unused), "");
    assert!(began.elapsed() < WATCHDOG);
}
