//! The page of a run or of this machine: `plimsoll watch --serve`, and the server that `plimsoll train --serve` starts.

use crate::{output, signals};
use plimsoll_core::Failure;
use plimsoll_serve::remote::TOKEN_VARIABLE;
use plimsoll_serve::server::Server;
use plimsoll_serve::token::Token;
use plimsoll_watch::snapshot::Snapshot;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag::register;
use std::io::{self, ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::parent_id;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

/// Port of the page unless `--serve` names another one.
const DEFAULT_PORT: u16 = 1876;
/// Time between two looks whether the process of the run still exists.
const PARENT_PERIOD: Duration = Duration::from_millis(100);
/// Most time that a killed process takes to release its memory and its files.
const KILL_TIME: Duration = Duration::from_secs(10);
/// Time between two looks whether threads of a killed process are left.
const THREAD_PERIOD: Duration = Duration::from_millis(5);

/// Binds the address of `--serve`; `None` is the default one, or another port of this machine if that is in use.
///
/// # Errors
/// The address is in use or none of this machine.
pub fn bind(address: Option<SocketAddr>) -> Result<Server, Failure> {
    let default = SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT));
    let bound = match Server::bind(address.unwrap_or(default)) {
        Err(error) if address.is_none() && error.kind() == ErrorKind::AddrInUse => {
            Server::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
        }
        bound => bound,
    };
    bound.map_err(|error| {
        let failure = Failure::input(format!("{}: cannot listen there: {error}", address.unwrap_or(default)));
        failure.hint("choose another port of this machine, or let the system choose one: --serve 127.0.0.1:0")
    })
}

/// Returns whether other machines reach an address, so that its server needs a token.
pub fn needs_token(address: SocketAddr) -> bool {
    !address.ip().to_canonical().is_loopback()
}

/// Prints the token of a server that other machines reach, once, and how they reach it.
pub fn print_access(server: &Server) {
    let Some(token) = server.token() else { return };
    let at = server.address();
    output::print_note("the traffic is not encrypted: serve on a network that you trust, or through SSH");
    if at.ip().is_unspecified() {
        output::print_note(&format!("from other machines: http://IP-ADDRESS-OF-THIS-MACHINE:{}", at.port()));
    }
    output::print_status(&format!("token: {}", token.digits()));
}

/// Serves the page until a signal ends it. `address` is that of `--serve`; `None` is the default. `take` takes a
/// snapshot, at most one per `period`.
///
/// # Errors
/// The address is in use or none of this machine.
pub fn serve(
    address: Option<SocketAddr>,
    period: Duration,
    take: impl FnMut() -> Result<Snapshot, Failure> + Send + 'static,
) -> Result<(), Failure> {
    let server = bind(address)?;
    let stop = server.stopper();
    signals::on_first(move || stop.stop())?;
    print_access(&server);
    output::print(&format!("serving http://{} until Ctrl-C\n", server.address()));
    server.run(period, take)
}

/// Serves the page on the socket that is the standard input of this process, until `run`, the process that started this
/// one, ends or asks for it on the connection that is the standard output. The environment variable `PLIMSOLL_TOKEN`
/// holds the token, if it needs one.
///
/// A job manager that ends a job signals all its processes. The run then saves, which can take minutes, so this process
/// ignores these signals until the run ends.
///
/// # Errors
/// Standard input is no listening socket, standard output is no connection, or the system refuses a thread.
pub fn serve_standard_input(
    run: u32,
    period: Duration,
    take: impl FnMut() -> Result<Snapshot, Failure> + Send + 'static,
) -> Result<(), Failure> {
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // If the handler cannot be installed, the signal ends this process, and the run goes on.
        let _ = register(signal, Arc::new(AtomicBool::new(false)));
    }
    let failed = |error: io::Error| Failure::input(format!("standard input is no socket to serve: {error}"));
    let unconnected = |error: io::Error| Failure::input(format!("standard output is no connection: {error}"));
    let connection = UnixStream::from(io::stdout().as_fd().try_clone_to_owned().map_err(unconnected)?);
    connection.set_read_timeout(Some(PARENT_PERIOD)).map_err(unconnected)?;
    let socket = io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
    let token = std::env::var(TOKEN_VARIABLE).ok().and_then(|digits| Token::parse(&digits));
    let server = Server::listening(TcpListener::from(socket), token).map_err(failed)?;
    let stop = server.stopper();
    let parent = thread::Builder::new().name("parent".into()).stack_size(128 << 10);
    let started = parent.spawn(move || {
        wait_for_end(connection, run);
        wait_for_threads(run);
        stop.stop();
    });
    started.map_err(|_| Failure::no_thread("to watch for the end of the run"))?;
    server.run(period, take)
}

/// Waits until `run` asks for the end with a byte on the connection, or is no longer the parent of this process.
fn wait_for_end(mut connection: UnixStream, run: u32) {
    while parent_id() == run {
        match connection.read(&mut [0]) {
            // While a process ends, its connection closes before it has released all its files.
            Ok(0) => thread::sleep(PARENT_PERIOD),
            Ok(_) => return,
            // The system may name the read timeout in two ways.
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => thread::sleep(PARENT_PERIOD),
        }
    }
}

/// Waits until no thread of a process runs, at most [`KILL_TIME`], unless this process is its child. The last thread of a
/// killed process releases its files, the locks among them, but children get another parent before that.
fn wait_for_threads(process: u32) {
    let began = Instant::now();
    while parent_id() != process && has_thread(process) && began.elapsed() < KILL_TIME {
        thread::sleep(THREAD_PERIOD);
    }
}

/// Returns whether a thread of a process has not ended yet. Those that have ended stay in the list until the parent of
/// the process learns of it.
fn has_thread(process: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let state = |folder: PathBuf| {
        let stat = std::fs::read_to_string(folder.join("stat")).ok()?;
        stat.rsplit_once(')')?.1.trim_start().chars().next()
    };
    threads.filter_map(|thread| state(thread.path())).any(|state| !['Z', 'X'].contains(&state))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::Command;

    #[test]
    fn ended_process_has_no_threads() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        assert!(has_thread(child.id()));
        child.kill().unwrap();
        wait_for_threads(child.id());
        assert!(!has_thread(child.id()), "the child waits to be reaped");
        child.wait().unwrap();
        assert!(!has_thread(child.id()));
    }

    #[test]
    fn byte_or_other_parent_ends_the_wait() {
        let (connection, mut run_end) = UnixStream::pair().unwrap();
        connection.set_read_timeout(Some(PARENT_PERIOD)).unwrap();
        wait_for_end(connection.try_clone().unwrap(), parent_id() + 1);
        let waiting = thread::spawn(move || wait_for_end(connection, parent_id()));
        thread::sleep(2 * PARENT_PERIOD);
        assert!(!waiting.is_finished());
        run_end.write_all(&[0]).unwrap();
        waiting.join().unwrap();
    }
}
