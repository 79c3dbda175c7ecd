//! A server on loopback that speaks the part of the hub's protocol that Plimsoll uses, and its faults on demand.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// A request as the server received it.
#[derive(Clone, Debug)]
pub struct Request {
    /// Path with its query.
    pub path: String,
    /// Headers by lower-case name.
    headers: BTreeMap<String, String>,
}

impl Request {
    /// Returns the value of a header; empty without it.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value)
    }
}

/// A deviation from an ordinary answer, for requests whose path contains some text.
#[derive(Clone, Debug)]
pub enum Fault {
    /// A status with further lines of the head.
    Status(u16, &'static str),
    /// The connection is closed after so many bytes of the content.
    CutAfter(usize),
    /// The content stops after so many bytes, and the connection stays open.
    StallAfter(usize),
    /// The first byte of the content is another one.
    Corrupt,
    /// A redirect to another server with the same path.
    Redirect(String),
    /// The whole file, although a part is asked for.
    IgnoreRange,
}

/// A repository: its commit and files.
#[derive(Clone, Default)]
struct Repository {
    commit: String,
    files: BTreeMap<String, Vec<u8>>,
    /// Size that the description states for large files, instead of their own.
    stated_bytes: Option<u64>,
}

#[derive(Default)]
struct State {
    /// Repositories by `models/OWNER/NAME` or `datasets/OWNER/NAME`.
    repositories: BTreeMap<String, Repository>,
    /// Faults with the text in the path and the number of requests that still have them.
    faults: Vec<(String, Fault, usize)>,
    requests: Vec<Request>,
}

/// A running server. It lasts as long as the test.
#[derive(Clone)]
pub struct Server {
    pub address: String,
    state: Arc<Mutex<State>>,
}

impl Server {
    pub fn start() -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let server = Server { address, state: Arc::default() };
        let serving = server.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let server = serving.clone();
                thread::spawn(move || server.answer(stream.unwrap()));
            }
        });
        server
    }

    /// Adds or replaces a repository, such as `models/acme/tiny`. The commit has this digit 40 times.
    pub fn put(&self, name: &str, digit: char, files: impl IntoIterator<Item = (String, Vec<u8>)>) {
        let commit = digit.to_string().repeat(40);
        let repository = Repository { commit, files: files.into_iter().collect(), stated_bytes: None };
        self.state.lock().unwrap().repositories.insert(name.to_owned(), repository);
    }

    /// Makes the description of a repository state another size for its large files.
    pub fn state_bytes(&self, name: &str, bytes: u64) {
        self.state.lock().unwrap().repositories.get_mut(name).unwrap().stated_bytes = Some(bytes);
    }

    /// Makes the next `count` requests whose path contains `part` fail.
    pub fn fail(&self, part: &str, fault: Fault, count: usize) {
        self.state.lock().unwrap().faults.push((part.to_owned(), fault, count));
    }

    /// Returns the requests since the last call.
    pub fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }

    fn answer(&self, mut stream: TcpStream) {
        let Some(request) = read_request(&stream) else { return };
        let (fault, content) = {
            let mut state = self.state.lock().unwrap();
            state.requests.push(request.clone());
            let found = state.faults.iter_mut().find(|(part, _, left)| *left > 0 && request.path.contains(&**part));
            let fault = found.map(|(_, fault, left)| {
                *left -= 1;
                fault.clone()
            });
            (fault, content(&state.repositories, &request.path))
        };
        // A client that has gone is no fault of the test.
        let _ = write_answer(&mut stream, &request, fault, content);
    }
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let path = lines.next()?.ok()?.split(' ').nth(1)?.to_owned();
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line.ok()?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    Some(Request { path, headers })
}

/// Returns the content of a path, or the hub's word for what is missing.
fn content(repositories: &BTreeMap<String, Repository>, path: &str) -> Result<Vec<u8>, &'static str> {
    let path = path.split('?').next().unwrap();
    if let Some(rest) = path.strip_prefix("/api/") {
        let (name, revision) = rest.split_once("/revision/").unwrap();
        let repository = repositories.get(name).ok_or("RepoNotFound")?;
        let known = ["main", "v1%2Fa", &repository.commit];
        let description = description(repository).to_string().into_bytes();
        return if known.contains(&revision) { Ok(description) } else { Err("RevisionNotFound") };
    }
    let (name, rest) = path[1..].split_once("/resolve/").ok_or("EntryNotFound")?;
    let (commit, file) = rest.split_once('/').unwrap();
    let name = if name.starts_with("datasets/") { name.to_owned() } else { format!("models/{name}") };
    let repository = repositories.get(&name).filter(|found| found.commit == commit).ok_or("RepoNotFound")?;
    repository
        .files
        .get(&file.replace("%20", " ").replace("%5B", "[").replace("%5D", "]"))
        .cloned()
        .ok_or("EntryNotFound")
}

/// Describes a repository as the hub does. Files of 1 KiB and more are large files.
fn description(repository: &Repository) -> Value {
    let sibling = |(name, bytes): (&String, &Vec<u8>)| match bytes.len() {
        0..1024 => {
            json!({"rfilename": name, "size": bytes.len(), "blobId": checksum("git hash-object --stdin", bytes)})
        }
        size => {
            let size = repository.stated_bytes.unwrap_or(size as u64);
            json!({
                "rfilename": name, "size": size, "blobId": "0".repeat(40),
                "lfs": {"sha256": checksum("sha256sum", bytes), "size": size, "pointerSize": 134},
            })
        }
    };
    let siblings: Vec<Value> = repository.files.iter().map(sibling).collect();
    json!({"id": "any", "sha": repository.commit, "gated": false, "siblings": siblings})
}

/// Returns the checksum that another program computes.
pub fn checksum(command: &str, bytes: &[u8]) -> String {
    let mut words = command.split(' ');
    let mut program = Command::new(words.next().unwrap());
    let mut child = program.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let bytes = bytes.to_vec();
    let writer = thread::spawn(move || input.write_all(&bytes).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    String::from_utf8(output.stdout).unwrap().split_whitespace().next().unwrap().to_owned()
}

fn write_answer(
    stream: &mut TcpStream,
    request: &Request,
    fault: Option<Fault>,
    content: Result<Vec<u8>, &'static str>,
) -> std::io::Result<()> {
    let head = |status: u16, lines: &str, length: usize| {
        format!("HTTP/1.1 {status} Status\r\nConnection: close\r\nContent-Length: {length}\r\n{lines}\r\n")
    };
    let mut content = match (&fault, content) {
        (Some(Fault::Status(status, lines)), _) => return stream.write_all(head(*status, lines, 0).as_bytes()),
        (Some(Fault::Redirect(address)), _) => {
            let location = format!("Location: {address}{}\r\n", request.path);
            return stream.write_all(head(302, &location, 0).as_bytes());
        }
        (_, Err(code)) => {
            return stream.write_all(head(404, &format!("X-Error-Code: {code}\r\n"), 0).as_bytes());
        }
        (_, Ok(content)) => content,
    };
    let range = request.header("range").strip_prefix("bytes=").and_then(|range| range.strip_suffix('-'));
    let first: usize =
        range.filter(|_| !matches!(fault, Some(Fault::IgnoreRange))).map_or(0, |first| first.parse().unwrap());
    let size = content.len();
    if first > 0 && first >= size {
        return stream.write_all(head(416, "", 0).as_bytes());
    }
    if matches!(fault, Some(Fault::Corrupt)) {
        content[0] ^= 1;
    }
    let part = &content[first..];
    let range = format!("Content-Range: bytes {first}-{}/{size}\r\n", size.saturating_sub(1));
    let head = if first > 0 { head(206, &range, part.len()) } else { head(200, "", part.len()) };
    stream.write_all(head.as_bytes())?;
    match fault {
        Some(Fault::CutAfter(bytes)) => stream.write_all(&part[..bytes.min(part.len())]),
        Some(Fault::StallAfter(bytes)) => {
            stream.write_all(&part[..bytes])?;
            stream.flush()?;
            thread::sleep(Duration::from_secs(100));
            Ok(())
        }
        _ => stream.write_all(part),
    }
}
