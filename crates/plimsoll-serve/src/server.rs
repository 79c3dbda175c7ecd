//! The listening socket, and the limits of its connections.

use crate::access::LocalAddress;
use crate::guests::{Guest, Guests};
use crate::hub::{EndSignal, Hub};
use crate::routes::{State, router};
use crate::token::Token;
use axum::{Extension, Router};
use futures_util::future::{self, Either};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use plimsoll_core::Failure;
use plimsoll_watch::snapshot::Snapshot;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio_io_timeout::TimeoutStream;

/// Most connections at once. Each further one is answered with 503.
pub const MAX_CONNECTIONS: usize = 256;
/// Most bytes of the head of a request.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// Most headers of a request.
const MAX_HEADERS: usize = 64;
/// Most time in which the head of a request has to arrive; also the most time that a connection idles between requests.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Most time in which a client has to take some bytes of a response.
const WRITE_TIMEOUT: Duration = Duration::from_secs(20);
/// Pause after the system refused to accept a connection, as with too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Most time for the last snapshot before the server ends.
const LAST_SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(1);
/// Most time in which clients take the last snapshot.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// The response to connections above [`MAX_CONNECTIONS`], and above [`crate::guests::MAX_GUESTS`] of their address.
const BUSY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

/// A socket that listens, and is not served yet.
pub struct Server {
    listener: StdListener,
    address: SocketAddr,
    token: Option<Token>,
    stop: Stop,
}

/// Ends [`Server::run`] from another thread.
#[derive(Clone, Default)]
pub struct Stop(Arc<Notify>);

impl Stop {
    /// Ends the server, also if it has not started yet.
    pub fn stop(&self) {
        self.0.notify_one();
    }
}

impl Server {
    /// Listens at an address. Port 0 lets the system choose one. An address that other machines reach gets a token.
    ///
    /// # Errors
    /// The address is in use or none of this machine, or the system has no random bytes.
    pub fn bind(address: SocketAddr) -> io::Result<Server> {
        let listener = StdListener::bind(address)?;
        let token = if address.ip().to_canonical().is_loopback() { None } else { Some(Token::random()?) };
        Server::listening(listener, token)
    }

    /// Takes over a socket that listens, such as one that another process has bound. Without a token, only this machine
    /// may reach it.
    ///
    /// # Errors
    /// It is no listening socket, or other machines reach it and there is no token.
    pub fn listening(listener: StdListener, token: Option<Token>) -> io::Result<Server> {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        if token.is_none() && !address.ip().to_canonical().is_loopback() {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "an address of other machines needs a token"));
        }
        Ok(Server { address, listener, token, stop: Stop::default() })
    }

    /// Returns the listening socket and the token, for another process.
    pub fn into_socket(self) -> (StdListener, Option<Token>) {
        (self.listener, self.token)
    }

    /// Returns the address at which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the token that clients need; `None` if only this machine reaches the server.
    pub fn token(&self) -> Option<&Token> {
        self.token.as_ref()
    }

    /// Returns the handle that ends the server.
    pub fn stopper(&self) -> Stop {
        self.stop.clone()
    }

    /// Serves until [`Stop::stop`]. Streams of events then get one more snapshot and their end, and responses are
    /// completed. `take` takes a snapshot; it is called
    /// at most once per `interval`, and only while a client waits for one.
    ///
    /// # Errors
    /// The system refuses a thread, or a socket that it gave before.
    pub fn run(
        self,
        interval: Duration,
        take: impl FnMut() -> Result<Snapshot, Failure> + Send + 'static,
    ) -> Result<(), Failure> {
        let hub = Hub::start(interval, take).map_err(|_| Failure::no_thread("to take snapshots"))?;
        let failed = |error: io::Error| Failure::input(format!("{}: cannot be served: {error}", self.address));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let state = Arc::new(State { hub, token: self.token, port: self.address.port() });
        runtime.block_on(async {
            let listener = TcpListener::from_std(self.listener).map_err(failed)?;
            let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
            let accepted = accept(&listener, &state, &connections);
            future::select(pin!(accepted), pin!(self.stop.0.notified())).await;
            // Without a last snapshot, the newest one is the last.
            let _ = tokio::time::timeout(LAST_SNAPSHOT_TIMEOUT, state.hub.take_last()).await;
            state.hub.end();
            // A client that takes longer is cut off.
            let all_closed = connections.acquire_many(MAX_CONNECTIONS as u32);
            let _ = tokio::time::timeout(FLUSH_TIMEOUT, all_closed).await;
            Ok(())
        })
    }
}

/// Accepts connections, and serves each in a task of its own.
async fn accept(listener: &TcpListener, state: &Arc<State>, connections: &Arc<Semaphore>) {
    let (router, guests) = (router(Arc::clone(state)), Arc::new(Guests::default()));
    loop {
        let Ok((stream, peer)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let needs_token = state.token.is_some();
        let guest = if needs_token { Guests::admit(&guests, peer.ip()) } else { Some(Guest::trusted()) };
        let (Some(guest), Ok(permit)) = (guest, Arc::clone(connections).try_acquire_owned()) else {
            let _ = stream.try_write(BUSY);
            continue;
        };
        let (router, end) = (router.clone(), state.hub.end_signal());
        tokio::spawn(async move {
            serve_connection(stream, router, Arc::new(guest), end).await;
            drop(permit);
        });
    }
}

/// Serves the requests of one connection, one after the other. At the end of the server, completes the response that is
/// being sent, and closes the connection.
async fn serve_connection(stream: TcpStream, router: Router, guest: Arc<Guest>, mut end: EndSignal) {
    let Ok(local) = stream.local_addr() else { return };
    let _ = stream.set_nodelay(true);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(WRITE_TIMEOUT));
    let service = TowerToHyperService::new(router.layer(Extension(LocalAddress(local))).layer(Extension(guest)));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(Box::pin(stream)), service);
    let mut connection = pin!(connection);
    // A client that breaks off or sends no HTTP is no failure of the server.
    let has_ended = matches!(future::select(connection.as_mut(), pin!(end.wait())).await, Either::Right(_));
    if has_ended {
        connection.as_mut().graceful_shutdown();
        let _ = connection.await;
    }
}
