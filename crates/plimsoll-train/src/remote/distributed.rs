//! Forms a team of local and remote devices: connects every pair of devices by a wire, and passes aborts and new
//! attempts on to each device.

use super::device::Connection;
use super::greeting::random_bytes;
use super::{Invitation, PeerNetwork, RemoteConnector, lock, peer_unreachable};
use plimsoll_device::error::DeviceError;
use plimsoll_device::transport::wire::WireTransport;
use plimsoll_device::transport::{CollectiveCall, GroupHandle, Transport};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

/// A device of a distributed team, as the run's process sees it.
#[derive(Clone)]
pub enum TeamEndpoint {
    /// A device in this process.
    Local,
    /// A device at the other end of a connection.
    Remote(Arc<Connection>),
}

impl TeamEndpoint {
    fn connection(&self) -> Option<&Arc<Connection>> {
        match self {
            TeamEndpoint::Local => None,
            TeamEndpoint::Remote(connection) => Some(connection),
        }
    }

    /// Connects the device to its peers as `rank`. Returns the transport of a local device, `None` for a remote one.
    fn join(
        &self,
        rank: u32,
        invitation: &Invitation,
        network: &dyn PeerNetwork,
    ) -> Result<Option<Arc<WireTransport>>, DeviceError> {
        match self {
            TeamEndpoint::Remote(connection) => {
                connection.begin_attempt(0);
                connection.join_team(rank, invitation).map(|()| None)
            }
            TeamEndpoint::Local => connect_transport(network, invitation, rank).map(Some),
        }
    }
}

/// Connects this process to the other ranks of an invitation, and creates the transport of `rank` over their wires.
///
/// # Errors
/// A peer does not connect, or the system refuses a thread.
pub(crate) fn connect_transport(
    network: &dyn PeerNetwork,
    invitation: &Invitation,
    rank: u32,
) -> Result<Arc<WireTransport>, DeviceError> {
    let wires = network.connect_peers(invitation, rank);
    let transport = wires.and_then(|wires| WireTransport::new(rank, wires, invitation.epoch));
    transport.map_err(|error| peer_unreachable(rank, &error))
}

/// A remote device with its rank in the team.
struct RemoteRank {
    rank: u32,
    connection: Arc<Connection>,
}

/// The run's control over the collectives of a distributed team: aborts attempts and begins new ones. The devices
/// exchange over wires of their own.
pub struct DistributedTransport {
    epoch: Instant,
    local: Vec<Arc<WireTransport>>,
    remote: Vec<RemoteRank>,
    world_size: u32,
    attempt: AtomicU64,
    /// Number of the last attempt that was aborted; `None` before the first abort.
    aborted_attempt: Mutex<Option<u64>>,
}

/// A connected team.
pub struct ConnectedTeam {
    /// Control over the collectives of the whole team.
    pub transport: Arc<DistributedTransport>,
    /// Group handles of the local devices in rank order. `None` for remote devices, whose own processes hold theirs.
    pub groups: Vec<Option<GroupHandle>>,
}

impl DistributedTransport {
    /// Connects all devices of a team with each other. `endpoints` are in rank order; `team` is a number that no other
    /// team of the run has; `nccl` says whether all devices are GPUs that exchange by NCCL.
    ///
    /// # Errors
    /// The failing rank with its error: a lost device, or one that cannot reach its peers. If a device is lost, devices
    /// that wait for it are told to stop, and this does not wait for them.
    ///
    /// # Panics
    /// If a thread that connects a device panics.
    pub fn connect_team(
        endpoints: &[TeamEndpoint],
        connector: &dyn RemoteConnector,
        team: u64,
        nccl: bool,
    ) -> Result<ConnectedTeam, (usize, DeviceError)> {
        let network = connector.peer_network();
        let address = |endpoint: &TeamEndpoint| match endpoint {
            TeamEndpoint::Local => network.address(),
            TeamEndpoint::Remote(connection) => connection.address(),
        };
        let secret = random_secret().map_err(|error| (0, peer_unreachable(0, &error)))?;
        let epoch = Instant::now();
        let addresses = endpoints.iter().map(address).collect();
        let invitation = Arc::new(Invitation { team, secret: secret.clone(), addresses, epoch, nccl });
        let (sender, results) = channel();
        for (rank, endpoint) in endpoints.iter().enumerate() {
            let (invitation, network) = (Arc::clone(&invitation), Arc::clone(&network));
            let (endpoint, thread_sender) = (endpoint.clone(), sender.clone());
            // The receiver is gone if another rank was lost meanwhile.
            let join = move || drop(thread_sender.send((rank, endpoint.join(rank as u32, &invitation, &*network))));
            if thread::Builder::new().spawn(join).is_err() {
                let _ = sender.send((rank, Err(DeviceError::NoThread { queue: "communication".to_owned() })));
            }
        }
        drop(sender);
        let mut local: Vec<Option<Arc<WireTransport>>> = endpoints.iter().map(|_| None).collect();
        let mut failed: Option<(usize, DeviceError)> = None;
        for _ in endpoints {
            match results.recv().expect("every thread sends its result") {
                (rank, Ok(transport)) => local[rank] = transport,
                // A lost rank is the reason why its peers cannot connect, so nothing waits for them.
                (rank, Err(error)) if error.is_device_lost() => {
                    network.cancel_team(&secret);
                    cancel_remote_ranks(endpoints, rank, &secret);
                    return Err((rank, error));
                }
                (rank, Err(error)) => failed = failed.or(Some((rank, error))),
            }
        }
        if let Some(failed) = failed {
            return Err(failed);
        }
        let remote = (0..)
            .zip(endpoints)
            .filter_map(|(rank, endpoint)| Some(RemoteRank { rank, connection: Arc::clone(endpoint.connection()?) }));
        let transport = Arc::new(DistributedTransport {
            epoch,
            local: local.iter().flatten().cloned().collect(),
            remote: remote.collect(),
            world_size: endpoints.len() as u32,
            attempt: AtomicU64::new(0),
            aborted_attempt: Mutex::new(None),
        });
        let group = |(rank, transport): (u32, Option<Arc<WireTransport>>)| {
            Some(GroupHandle { rank, transport: transport?, nccl })
        };
        Ok(ConnectedTeam { transport, groups: (0..).zip(local).map(group).collect() })
    }
}

/// Tells all remote devices but rank `lost` that the team will not form. Each is told on a thread of its own, because
/// it may not respond.
fn cancel_remote_ranks(endpoints: &[TeamEndpoint], lost: usize, secret: &str) {
    let others = endpoints.iter().enumerate().filter(|(rank, _)| *rank != lost);
    for connection in others.filter_map(|(_, endpoint)| endpoint.connection()) {
        let (connection, secret) = (Arc::clone(connection), secret.to_owned());
        // If the system refuses a thread, the device waits until its own timeout.
        let _ = thread::Builder::new().spawn(move || connection.cancel_team(&secret));
    }
}

/// Returns 128 random bits as hexadecimal text.
pub(super) fn random_secret() -> io::Result<String> {
    let bytes = random_bytes::<16>()?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Panic text of the exchange methods of [`DistributedTransport`]. They are never called, because each device exchanges
/// over its own [`WireTransport`].
const NO_EXCHANGE: &str = "devices exchange over their own wire transports";

impl Transport for DistributedTransport {
    fn world_size(&self) -> u32 {
        self.world_size
    }

    fn epoch(&self) -> Instant {
        self.epoch
    }

    fn exchange(&self, _: CollectiveCall) -> Result<f64, DeviceError> {
        unreachable!("{NO_EXCHANGE}")
    }

    fn post_send(&self, _: CollectiveCall) -> Result<(), DeviceError> {
        unreachable!("{NO_EXCHANGE}")
    }

    fn wait_send(&self, _: u32, _: u32, _: u64) -> Result<f64, DeviceError> {
        unreachable!("{NO_EXCHANGE}")
    }

    fn cancel_sends(&self, _: u32) {}

    fn is_borrowed(&self, _: u32, _: Range<usize>) -> bool {
        false
    }

    /// Aborts the current attempt on all devices, because `rank` has failed. Later calls in the same attempt do
    /// nothing. Remote devices are told on threads of their own, because a device may be lost and not respond.
    fn abort(&self, rank: u32, reason: &str) {
        let attempt = self.attempt.load(Ordering::Relaxed);
        let before = lock(&self.aborted_attempt).replace(attempt);
        if before == Some(attempt) {
            return;
        }
        self.local.iter().for_each(|transport| transport.abort_attempt(attempt, rank, reason));
        for remote in self.remote.iter().filter(|remote| remote.rank != rank) {
            let (connection, reason) = (Arc::clone(&remote.connection), reason.to_owned());
            // If the system refuses a thread, the device learns of the abort from its peers or from a closed wire.
            let _ = thread::Builder::new().spawn(move || connection.abort_attempt(attempt, rank, &reason));
        }
    }

    fn check_aborted(&self) -> Result<(), DeviceError> {
        unreachable!("{NO_EXCHANGE}")
    }

    fn reset(&self) {
        let attempt = self.attempt.fetch_add(1, Ordering::Relaxed) + 1;
        self.local.iter().for_each(|transport| transport.begin_attempt(attempt));
        self.remote.iter().for_each(|remote| remote.connection.begin_attempt(attempt));
    }
}
