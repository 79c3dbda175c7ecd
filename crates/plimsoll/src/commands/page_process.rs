//! The page of a run during the run (`train --serve`). Its server is a process of its own, which only reads the run folder:
//! it takes no memory of the run, delays none of its steps, and cannot stop it.
//!
//! The command binds the socket before it plans, so that a wrong address is refused at once. The server gets the socket as
//! its standard input. Its standard output is a connection on which the run asks for its end.

use super::serve;
use crate::output;
use plimsoll_serve::remote::TOKEN_VARIABLE;
use plimsoll_serve::server::Server;
use plimsoll_serve::token::Token;
use std::io::Write;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Time that the server has for the last snapshot before it is killed. It needs milliseconds, but has a low priority, and
/// other work may leave it little of the processor.
const CLOSE_TIME: Duration = Duration::from_secs(15);
/// Time between two looks whether the server has ended.
const CLOSE_PERIOD: Duration = Duration::from_millis(10);

/// The page of a run, shared by the threads of the run and of the signals.
#[derive(Clone)]
pub struct RunPage(Arc<Mutex<Shared>>);

/// The page with the lines that are still to be printed.
struct Shared {
    page: Page,
    /// The line with the address; empty without a page.
    address: String,
    /// Prints that line.
    announce: fn(&str),
    /// Whether a view covered the terminal at the last event.
    was_covered: bool,
    /// A note that waits until no view covers the terminal; `None` if there is none.
    note: Option<String>,
}

/// State of the page of a run.
enum Page {
    /// The page is to be served from the first event on, when the folder holds the run.
    Bound {
        folder: PathBuf,
        listener: TcpListener,
        token: Option<Token>,
    },
    Open(PageServer),
    /// There is no page.
    None,
}

/// The process that serves the page.
struct PageServer {
    child: Child,
    /// The connection to it. A byte asks the server to end.
    connection: UnixStream,
}

impl RunPage {
    /// Returns no page.
    pub fn none() -> RunPage {
        RunPage::new(Page::None, String::new(), |_| {})
    }

    /// Returns the page of the run in a folder, which a server on the socket of `server` will serve, and prints its
    /// address with `announce`.
    pub fn of(server: Server, folder: PathBuf, announce: fn(&str)) -> RunPage {
        serve::print_access(&server);
        let address = format!("serving http://{} until the run ends", server.address());
        announce(&address);
        let (listener, token) = server.into_socket();
        RunPage::new(Page::Bound { folder, listener, token }, address, announce)
    }

    fn new(page: Page, address: String, announce: fn(&str)) -> RunPage {
        RunPage(Arc::new(Mutex::new(Shared { page, address, announce, was_covered: false, note: None })))
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the server at the first event of the run, and notices at each event if the server has ended. A note says if
    /// there is no page any more, and the run goes on.
    ///
    /// `is_covered` says that a view covers the terminal. After the view, the address is printed once more.
    pub fn observe(&self, is_covered: bool) {
        let mut shared = self.lock();
        shared.start();
        shared.notice_end();
        if is_covered {
            shared.was_covered = true;
            return;
        }
        shared.print_note();
        let was_covered = std::mem::replace(&mut shared.was_covered, false);
        if was_covered && matches!(shared.page, Page::Open(_)) {
            (shared.announce)(&shared.address);
        }
    }

    /// Ends the server after one last snapshot, and waits for it. The caller has closed the view.
    pub fn close(&self) {
        let page = {
            let mut shared = self.lock();
            shared.notice_end();
            shared.print_note();
            shared.take_page()
        };
        page.close();
    }

    /// Ends the server like [`RunPage::close`], unless another thread uses it now.
    pub fn try_close(&self) {
        let page = self.0.try_lock().map(|mut shared| shared.take_page());
        if let Ok(page) = page {
            page.close();
        }
    }
}

impl Shared {
    /// Starts the server, if it is to be started.
    fn start(&mut self) {
        if !matches!(self.page, Page::Bound { .. }) {
            return;
        }
        if let Page::Bound { folder, listener, token } = self.take_page() {
            match PageServer::start(&folder, listener, token.as_ref()) {
                Ok(server) => self.page = Page::Open(server),
                Err(error) => self.note = Some(format!("the page cannot be served: {error}")),
            }
        }
    }

    /// Notices if the server has ended, although the run has not.
    fn notice_end(&mut self) {
        let Page::Open(server) = &mut self.page else { return };
        if let Ok(Some(status)) = server.child.try_wait() {
            self.page = Page::None;
            self.note = Some(early_end(status, &self.address));
        }
    }

    fn print_note(&mut self) {
        if let Some(note) = self.note.take() {
            output::print_note(&note);
        }
    }

    fn take_page(&mut self) -> Page {
        std::mem::replace(&mut self.page, Page::None)
    }
}

/// Formats the note about a server that has ended before its run. `address` is the line with its address.
fn early_end(status: ExitStatus, address: &str) -> String {
    let url = address.split(' ').nth(1).unwrap_or_default();
    format!("the page at {url} has ended ({status}); the run goes on without it")
}

impl Page {
    fn close(self) {
        if let Page::Open(server) = self {
            server.close();
        }
    }
}

impl PageServer {
    /// Starts the server of the run in a folder.
    ///
    /// # Errors
    /// The process cannot be started.
    fn start(folder: &Path, listener: TcpListener, token: Option<&Token>) -> std::io::Result<PageServer> {
        let own = std::process::id().to_string();
        let (connection, of_server) = UnixStream::pair()?;
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["watch", "--serve-standard-input", "--of-process", &own]).arg(folder);
        command.env_remove(TOKEN_VARIABLE);
        if let Some(token) = token {
            // Only processes of the same user can read it there.
            command.env(TOKEN_VARIABLE, token.digits());
        }
        command.stdin(Stdio::from(OwnedFd::from(listener))).stdout(Stdio::from(OwnedFd::from(of_server)));
        // In a group of its own, the server gets no Ctrl-C of the terminal: the run ends it.
        let child = command.process_group(0).spawn()?;
        Ok(PageServer { child, connection })
    }

    /// Asks the server to end, and waits for it.
    fn close(self) {
        let PageServer { mut child, mut connection } = self;
        // A server that has ended takes no byte.
        let _ = connection.write_all(&[0]);
        let began = Instant::now();
        while matches!(child.try_wait(), Ok(None)) {
            if began.elapsed() > CLOSE_TIME {
                let _ = child.kill();
            }
            thread::sleep(CLOSE_PERIOD);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn early_end_of_the_server_is_noticed_once() {
        let connection = UnixStream::pair().unwrap().0;
        let child = Command::new("false").spawn().unwrap();
        let page = RunPage::new(Page::Open(PageServer { child, connection }), "serving http://a".into(), |_| {});
        let began = Instant::now();
        while page.lock().note.is_none() {
            assert!(began.elapsed() < Duration::from_secs(30));
            page.observe(true);
            thread::sleep(CLOSE_PERIOD);
        }
        let mut shared = page.lock();
        let note = shared.note.take().unwrap();
        assert_eq!(note, "the page at http://a has ended (exit status: 1); the run goes on without it");
        shared.notice_end();
        assert!(shared.note.is_none() && matches!(shared.page, Page::None));
    }
}
