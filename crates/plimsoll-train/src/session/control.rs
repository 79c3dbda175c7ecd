//! Control socket of a running run, `control.sock` in its run folder.
//!
//! `plimsoll budget` connects to it and asks for another load line. Write permission on the socket is the only access
//! control. Request and reply are one line of JSON each. The run answers between two steps.

use plimsoll_core::{Budget, Bytes, Exit, Failure};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

/// Longest time that a client waits for the reply. A run replies between two steps, which can take minutes.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// Longest time that the run waits for a client to send its whole request, or to receive the reply.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Size of the largest valid request in bytes.
const REQUEST_BYTES_MAX: usize = 4096;
/// Pause after a client could not be accepted, for example because too many files are open.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Request of a client.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// Load line that the device shall have from the next step on.
    budget: Budget,
    /// Name of the device; `None` means the only device of the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    device: Option<String>,
}

/// A load line that was changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BudgetChange {
    /// The new load line in bytes.
    pub budget_bytes: Bytes,
    /// Description of the plan under the new load line.
    pub message: String,
}

/// Reply to a client: the changed load line, or the reason for refusing it.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    Changed(BudgetChange),
    DoesNotFit(String),
    Invalid(String),
}

impl From<Result<BudgetChange, Failure>> for Reply {
    fn from(answer: Result<BudgetChange, Failure>) -> Reply {
        match answer {
            Ok(change) => Reply::Changed(change),
            Err(failure) if failure.exit == Exit::DoesNotFit => Reply::DoesNotFit(failure.message),
            Err(failure) => Reply::Invalid(failure.message),
        }
    }
}

impl From<Reply> for Result<BudgetChange, Failure> {
    fn from(reply: Reply) -> Result<BudgetChange, Failure> {
        match reply {
            Reply::Changed(change) => Ok(change),
            Reply::DoesNotFit(message) => Err(Failure::does_not_fit(message)),
            Reply::Invalid(message) => Err(Failure::input(message)),
        }
    }
}

/// A client's request for another load line, which the run has not answered yet.
pub struct BudgetRequest {
    /// Load line that the client asks for.
    pub budget: Budget,
    /// Name of the device; `None` means the only device of the run.
    pub device: Option<String>,
    reply: Sender<Reply>,
}

impl BudgetRequest {
    /// Sends the answer to the client, if it is still connected.
    pub fn answer(self, answer: Result<BudgetChange, Failure>) {
        let _ = self.reply.send(answer.into());
    }
}

/// Paths of the control sockets of this process.
static OPEN_SOCKETS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Removes the control sockets of this process, before it ends without a drop.
pub fn remove_open_sockets() {
    for path in OPEN_SOCKETS.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        let _ = fs::remove_file(path);
    }
}

/// Listening control socket of this run. The socket file is removed on drop.
pub struct ControlSocket {
    path: PathBuf,
    pending_requests: Receiver<BudgetRequest>,
}

fn socket(run_dir: &Path) -> PathBuf {
    run_dir.join("control.sock")
}

impl ControlSocket {
    /// Creates the socket in the run folder, which the caller has locked, and starts a thread that serves clients.
    ///
    /// # Errors
    /// The socket cannot be created, for example because its path is too long or the file system does not support
    /// sockets. Or the system refuses a thread.
    pub fn listen(run_dir: &Path) -> io::Result<ControlSocket> {
        let path = socket(run_dir);
        // A killed run leaves its socket behind.
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&path)?;
        OPEN_SOCKETS.lock().unwrap_or_else(PoisonError::into_inner).push(path.clone());
        let (sender, pending_requests) = channel();
        thread::Builder::new().name("control".into()).stack_size(128 << 10).spawn(move || {
            for client in listener.incoming() {
                // Clients are served one after the other, and the last request wins.
                match client {
                    Ok(client) => drop(answer_client(&client, &sender)),
                    Err(_) => thread::sleep(ACCEPT_PAUSE),
                }
            }
        })?;
        Ok(ControlSocket { path, pending_requests })
    }

    /// Returns the requests that arrived since the previous call.
    pub fn pending_requests(&self) -> impl Iterator<Item = BudgetRequest> + '_ {
        self.pending_requests.try_iter()
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
        OPEN_SOCKETS.lock().unwrap_or_else(PoisonError::into_inner).retain(|path| *path != self.path);
    }
}

/// Reads a request up to the end of its line.
///
/// # Errors
/// The request is not complete in time, or the stream fails.
fn read_request(mut client: &UnixStream) -> io::Result<Vec<u8>> {
    let deadline = Instant::now() + REQUEST_TIMEOUT;
    let (mut request, mut bytes) = (Vec::new(), [0; 512]);
    while !request.ends_with(b"\n") && request.len() < REQUEST_BYTES_MAX {
        let remaining = deadline.checked_duration_since(Instant::now()).filter(|remaining| !remaining.is_zero());
        client.set_read_timeout(Some(remaining.ok_or(io::ErrorKind::TimedOut)?))?;
        match client.read(&mut bytes)? {
            0 => break,
            count => request.extend(&bytes[..count]),
        }
    }
    Ok(request)
}

fn answer_client(client: &UnixStream, pending_requests: &Sender<BudgetRequest>) -> io::Result<()> {
    client.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    let request = read_request(client)?;
    let answer = match serde_json::from_slice::<Request>(&request) {
        Err(error) => Reply::Invalid(format!("invalid request: {error}")),
        Ok(Request { budget, device }) => {
            let (reply, answer) = channel();
            let ended = || Reply::Invalid("the run has ended".into());
            match pending_requests.send(BudgetRequest { budget, device, reply }) {
                Err(_) => ended(),
                Ok(()) => answer.recv_timeout(REPLY_TIMEOUT).unwrap_or_else(|error| match error {
                    RecvTimeoutError::Timeout => {
                        let minutes = REPLY_TIMEOUT.as_secs() / 60;
                        Reply::Invalid(format!("the run has not answered for {minutes} minutes"))
                    }
                    RecvTimeoutError::Disconnected => ended(),
                }),
            }
        }
    };
    let mut text = serde_json::to_vec(&answer).expect("plain data has a JSON form");
    text.push(b'\n');
    (&*client).write_all(&text)
}

/// Asks the run in the folder `run_dir` to change the load line of a device, and waits for the reply. A `device` of
/// `None` means the only device of the run.
///
/// # Errors
/// - No run is active in this folder, or it ended meanwhile.
/// - The named device does not work on the run, or no device is named and several work on it.
/// - No recipe fits under the load line (exit 3). The run keeps its plan.
pub fn request_budget(run_dir: &Path, device: Option<&str>, budget: Budget) -> Result<BudgetChange, Failure> {
    let path = socket(run_dir);
    let not_running = |error: io::Error| no_active_run(run_dir, &error);
    let mut stream = UnixStream::connect(&path).map_err(not_running)?;
    let mut text =
        serde_json::to_vec(&Request { budget, device: device.map(str::to_owned) }).expect("plain data has a JSON form");
    text.push(b'\n');
    stream.write_all(&text).map_err(not_running)?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).map_err(not_running)?;
    let ended = |_| Failure::input(format!("{}: the run has ended", run_dir.display()));
    serde_json::from_str::<Reply>(&line).map_err(ended)?.into()
}

/// Returns the failure of a request to a folder in which no run replies. `error` is the error of the socket.
fn no_active_run(run_dir: &Path, error: &io::Error) -> Failure {
    use io::ErrorKind::{ConnectionRefused, NotFound};
    let reason = match error.kind() {
        NotFound if !run_dir.is_dir() => ": the folder does not exist".to_owned(),
        // There is no socket, or a killed run left it behind.
        NotFound | ConnectionRefused => String::new(),
        _ => format!(" ({error})"),
    };
    Failure::input(format!("{}: no run is active in this folder{reason}", run_dir.display()))
        .hint("name the folder (run.dir) of a run that `plimsoll train` is working on")
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::Bytes;

    #[test]
    fn request_reaches_run_and_reply_returns() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(socket(folder.path()), "left by a killed run").unwrap();
        let control = ControlSocket::listen(folder.path()).unwrap();
        let path = folder.path().to_owned();
        let client = thread::spawn(move || request_budget(&path, None, Budget::Amount(Bytes::gib(6))));
        let request = control.pending_requests.recv_timeout(REQUEST_TIMEOUT).unwrap();
        assert_eq!(request.budget, Budget::Amount(Bytes::gib(6)));
        let change = BudgetChange { budget_bytes: Bytes::gib(6), message: "done".into() };
        request.answer(Ok(change.clone()));
        assert_eq!(client.join().unwrap(), Ok(change));
        drop(control);
        assert!(!socket(folder.path()).exists());
    }

    #[test]
    fn socket_is_removed_without_drop() {
        let folder = tempfile::tempdir().unwrap();
        let control = ControlSocket::listen(folder.path()).unwrap();
        assert!(OPEN_SOCKETS.lock().unwrap().contains(&control.path));
        drop(control);
        assert!(!OPEN_SOCKETS.lock().unwrap().contains(&socket(folder.path())));
    }

    #[test]
    fn missing_run_and_invalid_request_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let error_message = |folder: &Path| request_budget(folder, None, Budget::DEVICE).unwrap_err().message;
        assert!(error_message(folder.path()).ends_with("no run is active in this folder"));
        assert!(
            error_message(&folder.path().join("nope"))
                .ends_with("no run is active in this folder: the folder does not exist")
        );
        let _control = ControlSocket::listen(folder.path()).unwrap();
        let mut stream = UnixStream::connect(socket(folder.path())).unwrap();
        stream.write_all(b"{\"budget\": \"six\"}\n").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        assert!(line.contains("\"invalid\":\"invalid request"), "{line}");
    }

    #[test]
    fn endless_request_is_refused_at_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let _control = ControlSocket::listen(folder.path()).unwrap();
        let mut stream = UnixStream::connect(socket(folder.path())).unwrap();
        stream.write_all(&[b' '; REQUEST_BYTES_MAX]).unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        assert!(line.contains("\"invalid\":\"invalid request"), "{line}");
    }
}
