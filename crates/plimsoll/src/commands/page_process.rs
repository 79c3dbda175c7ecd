//! The page of a run during the run (`train --serve`). Its server is a process of its own, which only reads the run folder:
//! it takes no memory of the run, delays none of its steps, and cannot stop it.
//!
//! The command binds the socket before it plans, so that a wrong address is refused at once. The server gets the socket as
//! its standard input.

use super::serve;
use crate::output;
use plimsoll_core::Record;
use plimsoll_serve::remote::TOKEN_VARIABLE;
use plimsoll_serve::server::Server;
use plimsoll_serve::token::Token;
use rustix::process::{Pid, Signal, kill_process};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Time that the server has for the last snapshot before it is killed.
const CLOSE_TIME: Duration = Duration::from_secs(3);
/// Time between two looks whether the server has ended.
const CLOSE_PERIOD: Duration = Duration::from_millis(10);

/// The page of a run, shared by the threads of the run and of the signals.
#[derive(Clone)]
pub struct RunPage(Arc<Mutex<Page>>);

/// State of the page of a run.
enum Page {
    /// The page is to be served from the first event on, when the folder holds the run.
    Bound {
        folder: PathBuf,
        listener: TcpListener,
        token: Option<Token>,
    },
    Open(Child),
    /// There is no page.
    None,
}

impl RunPage {
    /// Returns no page.
    pub fn none() -> RunPage {
        RunPage(Arc::new(Mutex::new(Page::None)))
    }

    /// Returns the page of the run in a folder, which a server on the socket of `server` will serve, and prints its
    /// address with `announce`.
    pub fn of(server: Server, folder: PathBuf, announce: fn(&str)) -> RunPage {
        serve::print_access(&server);
        announce(&format!("serving http://{} until the run ends", server.address()));
        let (listener, token) = server.into_socket();
        RunPage(Arc::new(Mutex::new(Page::Bound { folder, listener, token })))
    }

    fn lock(&self) -> MutexGuard<'_, Page> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the server at the first event of the run. If that fails, a note says so, and the run goes on.
    pub fn observe(&self, _record: &Record) {
        let mut page = self.lock();
        if !matches!(*page, Page::Bound { .. }) {
            return;
        }
        if let Page::Bound { folder, listener, token } = std::mem::replace(&mut *page, Page::None) {
            match start(&folder, listener, token.as_ref()) {
                Ok(child) => *page = Page::Open(child),
                Err(error) => output::print_note(&format!("the page cannot be served: {error}")),
            }
        }
    }

    /// Ends the server after one last snapshot, and waits for it.
    pub fn close(&self) {
        let page = std::mem::replace(&mut *self.lock(), Page::None);
        if let Page::Open(child) = page {
            close(child);
        }
    }

    /// Ends the server like [`RunPage::close`], unless another thread uses it now.
    pub fn try_close(&self) {
        let page = self.0.try_lock().map(|mut page| std::mem::replace(&mut *page, Page::None));
        if let Ok(Page::Open(child)) = page {
            close(child);
        }
    }
}

/// Starts the server of the run in a folder.
fn start(folder: &Path, listener: TcpListener, token: Option<&Token>) -> std::io::Result<Child> {
    let own = std::process::id().to_string();
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["watch", "--serve-standard-input", "--of-process", &own]).arg(folder);
    command.env_remove(TOKEN_VARIABLE);
    if let Some(token) = token {
        // Only processes of the same user can read it there.
        command.env(TOKEN_VARIABLE, token.digits());
    }
    // In a group of its own, the server gets no Ctrl-C of the terminal: the run ends it.
    command.process_group(0).stdin(Stdio::from(OwnedFd::from(listener))).stdout(Stdio::null()).spawn()
}

/// Asks a server to end, and waits for it.
fn close(mut child: Child) {
    let is_running = |child: &mut Child| matches!(child.try_wait(), Ok(None));
    let began = Instant::now();
    if is_running(&mut child) {
        let _ = kill_process(Pid::from_child(&child), Signal::TERM);
    }
    while is_running(&mut child) {
        if began.elapsed() > CLOSE_TIME {
            let _ = child.kill();
        }
        thread::sleep(CLOSE_PERIOD);
    }
}
