//! The control socket of a run, `control.sock` in its folder: whoever may write there can move the load line of
//! the run while it is under way. One line of JSON each way.

use plimsoll_core::{Budget, Bytes, Exit, Failure};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use std::{fs, io, thread};

/// How long a run may take to answer: it does so between two steps.
const PATIENCE: Duration = Duration::from_secs(30 * 60);
/// How long a caller may take to say what it wants.
const HURRY: Duration = Duration::from_secs(5);

/// What a caller says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// The load line that shall hold from the next step on.
    budget: Budget,
    /// Of this device; may be left out where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    device: Option<String>,
}

/// A load line that was moved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Moved {
    /// Where it is now.
    pub budget_bytes: Bytes,
    /// What the run does now.
    pub message: String,
}

/// What a run answers: a line that was moved, or why it was not.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    Moved(Moved),
    TooLittle(String),
    Wrong(String),
}

impl From<Result<Moved, Failure>> for Reply {
    fn from(answer: Result<Moved, Failure>) -> Reply {
        match answer {
            Ok(moved) => Reply::Moved(moved),
            Err(failure) if failure.exit == Exit::DoesNotFit => Reply::TooLittle(failure.message),
            Err(failure) => Reply::Wrong(failure.message),
        }
    }
}

impl From<Reply> for Result<Moved, Failure> {
    fn from(reply: Reply) -> Result<Moved, Failure> {
        match reply {
            Reply::Moved(moved) => Ok(moved),
            Reply::TooLittle(message) => Err(Failure::does_not_fit(message)),
            Reply::Wrong(message) => Err(Failure::input(message)),
        }
    }
}

/// A wish that the run has not answered yet.
pub struct Wish {
    /// The load line that is asked for.
    pub budget: Budget,
    /// The device that is meant.
    pub device: Option<String>,
    reply: Sender<Reply>,
}

impl Wish {
    /// Answers the caller, if it still listens.
    pub fn answer(self, answer: Result<Moved, Failure>) {
        let _ = self.reply.send(answer.into());
    }
}

/// The socket of this run, for as long as it lives.
pub struct Control {
    path: PathBuf,
    wishes: Receiver<Wish>,
}

fn socket(run_dir: &Path) -> PathBuf {
    run_dir.join("control.sock")
}

impl Control {
    /// Listens in the run folder, which this program holds.
    ///
    /// # Errors
    /// A socket that cannot be made: a path that is too long for one, or a file system that has none.
    pub fn listen(run_dir: &Path) -> io::Result<Control> {
        let path = socket(run_dir);
        // Left by a run that was killed.
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&path)?;
        let (sender, wishes) = channel();
        thread::Builder::new().name("control".into()).stack_size(128 << 10).spawn(move || {
            for caller in listener.incoming().flatten() {
                // One after another: a run answers between steps, and the last wish wins.
                let _ = serve(&caller, &sender);
            }
        })?;
        Ok(Control { path, wishes })
    }

    /// What has been asked for since the last look.
    pub fn wishes(&self) -> impl Iterator<Item = Wish> + '_ {
        self.wishes.try_iter()
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn serve(caller: &UnixStream, wishes: &Sender<Wish>) -> io::Result<()> {
    caller.set_read_timeout(Some(HURRY))?;
    let mut line = String::new();
    BufReader::new(caller).read_line(&mut line)?;
    let answer = match serde_json::from_str::<Request>(&line) {
        Err(error) => Reply::Wrong(format!("not understood: {error}")),
        Ok(Request { budget, device }) => {
            let (reply, answer) = channel();
            let ended = || Reply::Wrong("the run has ended".into());
            match wishes.send(Wish { budget, device, reply }) {
                Err(_) => ended(),
                Ok(()) => answer.recv_timeout(PATIENCE).unwrap_or_else(|_| ended()),
            }
        }
    };
    let mut text = serde_json::to_vec(&answer).expect("plain data has a JSON form");
    text.push(b'\n');
    (&*caller).write_all(&text)
}

/// Asks the run of this folder to hold another load line, and waits for its answer.
///
/// # Errors
/// No run is under way there, or it went away; no device of that name works on it; it cannot do with so little (exit 3), and
/// goes on as it was.
pub fn ask(run_dir: &Path, device: Option<&str>, budget: Budget) -> Result<Moved, Failure> {
    let path = socket(run_dir);
    let nobody = |error: io::Error| {
        use io::ErrorKind::{ConnectionRefused, NotFound};
        let why = match error.kind() {
            NotFound if !run_dir.is_dir() => ": there is no such folder".to_owned(),
            // No socket, or one that a killed run has left.
            NotFound | ConnectionRefused => String::new(),
            _ => format!(" ({error})"),
        };
        Failure::input(format!("{}: no run is under way here{why}", run_dir.display()))
            .hint("name the folder of a run that `plimsoll train` works on now (run.dir)")
    };
    let mut stream = UnixStream::connect(&path).map_err(nobody)?;
    let mut text =
        serde_json::to_vec(&Request { budget, device: device.map(str::to_owned) }).expect("plain data has a JSON form");
    text.push(b'\n');
    stream.write_all(&text).map_err(nobody)?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).map_err(nobody)?;
    let ended = |_| Failure::input(format!("{}: the run has ended", run_dir.display()));
    serde_json::from_str::<Reply>(&line).map_err(ended)?.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::Bytes;

    #[test]
    fn a_wish_reaches_the_run_and_its_answer_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(socket(folder.path()), "left by a killed run").unwrap();
        let control = Control::listen(folder.path()).unwrap();
        let path = folder.path().to_owned();
        let caller = thread::spawn(move || ask(&path, None, Budget::Amount(Bytes::gib(6))));
        let wish = control.wishes.recv_timeout(HURRY).unwrap();
        assert_eq!(wish.budget, Budget::Amount(Bytes::gib(6)));
        let moved = Moved { budget_bytes: Bytes::gib(6), message: "done".into() };
        wish.answer(Ok(moved.clone()));
        assert_eq!(caller.join().unwrap(), Ok(moved));
        drop(control);
        assert!(!socket(folder.path()).exists());
    }

    #[test]
    fn a_folder_without_a_run_and_words_that_mean_nothing_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let told = |folder: &Path| ask(folder, None, Budget::DEVICE).unwrap_err().message;
        assert!(told(folder.path()).ends_with("no run is under way here"));
        assert!(told(&folder.path().join("nope")).ends_with("no run is under way here: there is no such folder"));
        let _control = Control::listen(folder.path()).unwrap();
        let mut stream = UnixStream::connect(socket(folder.path())).unwrap();
        stream.write_all(b"{\"budget\": \"six\"}\n").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        assert!(line.contains("\"wrong\":\"not understood"), "{line}");
    }
}
