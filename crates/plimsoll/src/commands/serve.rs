//! `plimsoll watch --serve`: the page of a run or of this machine.

use crate::{output, signals};
use plimsoll_core::Failure;
use plimsoll_serve::server::Server;
use plimsoll_watch::snapshot::Snapshot;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Port of the page unless `--serve` names another one.
const DEFAULT_PORT: u16 = 1876;

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
    let default = SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT));
    let bound = match Server::bind(address.unwrap_or(default)) {
        Err(error) if address.is_none() && error.kind() == ErrorKind::AddrInUse => {
            Server::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
        }
        bound => bound,
    };
    let server = bound.map_err(|error| {
        let failure = Failure::input(format!("{}: cannot listen there: {error}", address.unwrap_or(default)));
        failure.hint("choose another port of this machine, or let the system choose one: --serve 127.0.0.1:0")
    })?;
    let stop = server.stopper();
    signals::on_first(move || stop.stop())?;
    let at = server.address();
    if let Some(token) = server.token() {
        output::print_note("the traffic is not encrypted: serve on a network that you trust, or through SSH");
        if at.ip().is_unspecified() {
            output::print_note(&format!("from other machines: http://IP-ADDRESS-OF-THIS-MACHINE:{}", at.port()));
        }
        output::print_status(&format!("token: {}", token.digits()));
    }
    output::print(&format!("serving http://{at} until Ctrl-C\n"));
    server.run(period, take)
}
