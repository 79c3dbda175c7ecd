//! The page of a run or of this machine: `plimsoll watch --serve`, and the server that `plimsoll train --serve` starts.

use crate::{output, signals};
use plimsoll_core::Failure;
use plimsoll_serve::remote::TOKEN_VARIABLE;
use plimsoll_serve::server::Server;
use plimsoll_serve::token::Token;
use plimsoll_watch::snapshot::Snapshot;
use rustix::process::nice;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::process::parent_id;
use std::thread;
use std::time::Duration;

/// Port of the page unless `--serve` names another one.
const DEFAULT_PORT: u16 = 1876;
/// Niceness that the server of a run adds to its own, so that the run gets the processor first.
const NICENESS: i32 = 10;
/// Time between two looks whether the process of the run still exists.
const PARENT_PERIOD: Duration = Duration::from_millis(100);

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

/// Serves the page on the socket that is the standard input of this process, until SIGTERM or the end of `run`, the
/// process that started this one. The environment variable `PLIMSOLL_TOKEN` holds the token, if it needs one.
///
/// # Errors
/// Standard input is no listening socket, or the system refuses a thread.
pub fn serve_standard_input(
    run: u32,
    period: Duration,
    take: impl FnMut() -> Result<Snapshot, Failure> + Send + 'static,
) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::input(format!("standard input is no socket to serve: {error}"));
    let socket = io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
    let token = std::env::var(TOKEN_VARIABLE).ok().and_then(|digits| Token::parse(&digits));
    let server = Server::listening(TcpListener::from(socket), token).map_err(failed)?;
    // A system that refuses runs the server at the priority of the run.
    let _ = nice(NICENESS);
    let stop = server.stopper();
    let by_signal = stop.clone();
    signals::on_first(move || by_signal.stop())?;
    let parent = thread::Builder::new().name("parent".into()).stack_size(128 << 10);
    let started = parent.spawn(move || {
        while parent_id() == run {
            thread::sleep(PARENT_PERIOD);
        }
        stop.stop();
    });
    started.map_err(|_| Failure::no_thread("to watch for the end of the run"))?;
    server.run(period, take)
}
