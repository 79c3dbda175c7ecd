//! The client that attaches to a server by URL.

use super::client::{Served, full, numbered};
use plimsoll_core::Failure;
use plimsoll_serve::remote::RemoteRun;
use plimsoll_watch::snapshot::Snapshot;
use plimsoll_watch::view::lines;
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

const INTERVAL: Duration = Duration::from_secs(600);

/// Reads a snapshot by the URL of a server.
fn read(served: &Served, token: Option<&str>) -> Result<Snapshot, Failure> {
    RemoteRun::new(&format!("http://{}", served.address), token.map(str::to_owned)).unwrap().snapshot()
}

#[test]
fn attached_snapshot_equals_the_served_one() {
    let served = Served::local(INTERVAL);
    assert_eq!(read(&served, None).unwrap(), numbered(1));
    // Numbers that JSON cannot hold are `null`, and stay so.
    let mut odd = full();
    odd["run"]["history"][0]["tokens_per_second"] = json!(null);
    let snapshot: Snapshot = serde_json::from_value(odd.clone()).unwrap();
    let served = Served::start("127.0.0.1:0", INTERVAL, move |_| Ok(snapshot.clone()));
    assert_eq!(serde_json::to_value(read(&served, None).unwrap()).unwrap(), odd);
}

#[test]
fn token_is_needed_and_suffices() {
    let served = Served::start("0.0.0.0:0", INTERVAL, |number| Ok(numbered(number)));
    for token in [None, Some("00")] {
        let failure = read(&served, token).unwrap_err();
        assert!(failure.message.contains("the server needs its token"), "{failure}");
        assert!(failure.hints[0].starts_with("PLIMSOLL_TOKEN=TOKEN plimsoll watch http://127.0.0.1:"), "{failure}");
    }
    assert!(read(&served, Some(&served.token)).is_ok());
}

#[test]
fn failure_of_the_server_is_passed_on() {
    let served = Served::start("127.0.0.1:0", INTERVAL, |_| Err(Failure::input("runs/a: gone\u{1b}[2J")));
    let failure = read(&served, None).unwrap_err();
    assert!(failure.message.ends_with(": runs/a: gone\u{1b}[2J"), "{failure}");
    assert!(failure.to_string().ends_with("gone\\u{1b}[2J"), "{failure}");
}

#[test]
fn text_of_the_server_is_escaped_in_lines() {
    let mut hostile = full();
    let text = "\u{1b}]0;owned\u{7}\r\n\u{202e}";
    for place in ["/run/folder", "/devices/0/name", "/devices/0/model", "/warnings/0", "/feed/0/text"] {
        *hostile.pointer_mut(place).unwrap() = text.into();
    }
    hostile["run"]["eta_seconds"] = json!(1e300);
    hostile["devices"][0]["total_bytes"] = json!(u64::MAX);
    hostile["devices"][0]["load_line_bytes"] = json!(0);
    let snapshot: Snapshot = serde_json::from_value(hostile).unwrap();
    let served = Served::start("127.0.0.1:0", INTERVAL, move |_| Ok(snapshot.clone()));
    let shown = lines::lines(&read(&served, None).unwrap());
    assert!(shown.contains("owned") && !shown.contains(['\u{1b}', '\u{7}', '\r', '\u{202e}']), "{shown:?}");
}

/// Answers one request with these bytes, and returns the failure of the client.
fn failure_for(response: impl Into<Vec<u8>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let response = response.into();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 4096]);
        // The client need not take all of it.
        let _ = stream.write_all(&response);
    });
    let failure = RemoteRun::new(&url, None).unwrap().snapshot().unwrap_err();
    server.join().unwrap();
    assert!(failure.message.starts_with(&url), "{failure}");
    failure.message
}

#[test]
fn other_servers_are_refused_by_name() {
    let html = "HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>";
    assert!(failure_for(html).ends_with("no served run (no JSON)"));
    let redirect = "HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n";
    assert!(failure_for(redirect).ends_with("no served run (status 302)"));
    let endless = b"HTTP/1.1 200 OK\r\n\r\n".iter().copied().chain(std::iter::repeat_n(b' ', 32 << 20));
    assert!(failure_for(endless.collect::<Vec<u8>>()).contains("no snapshot can be read"));
    assert!(failure_for("SSH-2.0-OpenSSH_9\r\n").contains("no snapshot can be read"));
    let cut_off = "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"version\"";
    assert!(failure_for(cut_off).contains("no snapshot can be read"));
}
