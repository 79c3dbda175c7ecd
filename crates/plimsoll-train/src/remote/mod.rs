//! Devices in other processes, on this machine or on other hosts.
//!
//! ```text
//!   run ── Engine ── RemoteDevice ── Channel ──► DeviceServer ── Device     (one row per remote device)
//!                                                     │
//!                                  collectives: wires between all devices of the team
//! ```
//! Only the [`Device`](plimsoll_device::device::Device) is remote. The engine and everything above it (recovery, loss
//! of a device, stragglers) do not differ from a run on local devices. Three rules shape the protocol:
//! - Commands without a result are queued and sent with the next command that has one, so a step takes a few round trips.
//! - Files stay with the run. The device's process asks the run for bytes to read and hands over bytes to write.
//! - Collectives do not pass through the run: the devices of a team exchange over wires of their own.
//!
//! This module is the run's side, and what both sides share. The device's side is `device_server`.
//!
//! | module | content |
//! |---|---|
//! | `protocol` | requests, responses and their encoding |
//! | `device` | the run's side: [`device::RemoteDevice`] and its connection |
//! | `distributed` | forms a team of local and remote devices |
//! | `links` | measures bandwidth and latency between hosts |
//! | `sockets` | channels and wires over sockets |
//! | `listener` | the port at which a process accepts its peers |
//! | `greeting` | proofs with which two ranks recognize each other |
//! | `ray` | places devices on the machines of a Ray cluster |

pub mod device;
pub mod distributed;
mod greeting;
pub mod links;
mod listener;
pub(crate) mod protocol;
pub mod ray;
pub mod sockets;

pub use protocol::{LinkSpeeds, VERSION};

use self::device::Connection;
use crate::config::RunConfig;
use plimsoll_core::{DeviceSpec, Failure};
use plimsoll_device::error::DeviceError;
use plimsoll_device::transport::wire::Wire;
use plimsoll_plan::device_request::DevicesRequest;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// Locks a mutex, also if a thread panicked while it held the lock. No update under these locks leaves partial state.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Carries requests to the process of a device, and its responses back.
pub trait Channel: Send + Sync {
    /// Sends a request and waits for the response without a timeout. Callers make at most one such call at a time.
    ///
    /// # Errors
    /// The process has ended or cannot be reached.
    fn call(&self, request: &[u8]) -> io::Result<Vec<u8>>;

    /// Sends a request that the process answers at once, even while a [`Channel::call`] is in progress. Returns the
    /// response.
    ///
    /// # Errors
    /// The process has ended or cannot be reached.
    fn call_out_of_band(&self, request: &[u8]) -> io::Result<Vec<u8>>;
}

/// Network between the processes of a team, over which their devices exchange. Each process has one.
pub trait PeerNetwork: Send + Sync {
    /// Returns the address at which peers reach this process.
    fn address(&self) -> String;

    /// Connects this process, as `rank`, to every other rank of a team. Returns one wire per rank, in rank order, and
    /// `None` for `rank` itself. All ranks call this at the same time and wait for each other.
    ///
    /// # Errors
    /// A peer cannot be reached or does not connect in time, or the team was cancelled.
    fn connect_peers(&self, invitation: &Invitation, rank: u32) -> io::Result<Vec<Option<Arc<dyn Wire>>>>;

    /// Cancels the team with this secret. Its [`PeerNetwork::connect_peers`] returns an error, whether it waits already
    /// or is called later.
    fn cancel_team(&self, secret: &str);
}

/// Reaches the processes of remote devices.
pub trait RemoteConnector: Send + Sync {
    /// Returns a channel to the process of a device. Repeated calls for one device reach the same process.
    ///
    /// # Errors
    /// The device does not exist, or its process cannot be started.
    fn channel(&self, device: &str) -> io::Result<Arc<dyn Channel>>;

    /// Returns the network over which local devices connect to remote ones.
    fn peer_network(&self) -> Arc<dyn PeerNetwork>;
}

/// The remote devices of a run, and the connector that reaches them. The caller provides both; the run file does not
/// say how devices are reached.
#[derive(Clone, Default)]
pub struct RemoteDevices {
    connector: Option<Arc<dyn RemoteConnector>>,
    devices: Option<DevicesRequest>,
    missing: Vec<String>,
}

impl RemoteDevices {
    /// Creates the set of devices that `connector` reaches.
    pub fn via(connector: Arc<dyn RemoteConnector>) -> RemoteDevices {
        RemoteDevices { connector: Some(connector), ..RemoteDevices::default() }
    }

    /// Sets all devices of the run, local ones included. They replace `run.devices`, which may contain words such as
    /// `ray` for the devices of a cluster.
    pub fn with_devices(self, devices: DevicesRequest) -> RemoteDevices {
        RemoteDevices { devices: Some(devices), ..self }
    }

    /// Sets the names of cluster devices that were requested and are not available.
    pub fn with_missing(self, missing: Vec<String>) -> RemoteDevices {
        RemoteDevices { missing, ..self }
    }

    /// Returns a note for the user about each requested cluster device that is not available.
    pub fn missing_notes(&self) -> impl Iterator<Item = String> {
        let note = |device: &String| {
            format!("{device} of the cluster is unavailable and not used; for its state: plimsoll cluster")
        };
        self.missing.iter().map(note)
    }

    /// Returns all devices of the run, as set by [`RemoteDevices::with_devices`]. `None` if they were not set:
    /// `run.devices` then names them.
    pub fn devices(&self) -> Option<&DevicesRequest> {
        self.devices.as_ref()
    }

    /// Returns the connector, if the caller provided one.
    pub fn connector(&self) -> Option<Arc<dyn RemoteConnector>> {
        self.connector.clone()
    }

    /// Connects to the process of a device.
    ///
    /// # Errors
    /// There is no connector, the device does not exist, its process cannot be started, or the system refuses a thread.
    pub(crate) fn connection(&self, device: &str) -> Result<Arc<Connection>, Failure> {
        let connector = self.connector().ok_or_else(|| {
            Failure::input(format!(
                "run.devices: `{device}` is on another host, and this command reaches no other host"
            ))
            .hint("plimsoll train, plan and sweep reach the hosts of a cluster (docs/ray.md)")
        })?;
        let unreachable = |reason: String| Failure::input(format!("run.devices: {device}: {reason}"));
        let channel = connector.channel(device).map_err(|error| unreachable(error.to_string()))?;
        Ok(Connection::new(device, channel)?)
    }

    /// Asks the process of a device for its specification. `config` names the device as that process knows it. The
    /// returned specification has the name `device`.
    ///
    /// # Errors
    /// The process cannot be reached, or reports a failure.
    pub(crate) fn describe(&self, device: &str, config: RunConfig) -> Result<DeviceSpec, Failure> {
        let spec = self.connection(device)?.describe(config).map_err(unreachable_failure)?;
        Ok(DeviceSpec { name: device.to_owned(), ..spec })
    }
}

impl fmt::Debug for RemoteDevices {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(if self.connector.is_some() { "connected" } else { "not connected" })
    }
}

/// Addresses and credentials with which the devices of one team connect to each other.
#[derive(Clone, Debug)]
pub struct Invitation {
    /// Number of the team, unique within the run. 0 stands for a measurement of links.
    pub team: u64,
    /// Random text known only to the ranks of the team and to the process that formed it, which sends it to each of them.
    /// It never crosses the connections between ranks.
    pub secret: String,
    /// Address of each rank, in rank order.
    pub addresses: Vec<String>,
    /// Common zero of the clocks of all simulated devices in the team.
    pub epoch: Instant,
    /// Whether all devices are GPUs that exchange by NCCL.
    pub nccl: bool,
}

/// Returns the error of a rank that cannot reach its peers.
pub(crate) fn peer_unreachable(rank: u32, error: &io::Error) -> DeviceError {
    DeviceError::PeerUnreachable { rank, reason: error.to_string() }
}

/// Hint for the user about a host that stops responding before a run has begun.
const CLUSTER_PORTS: &str =
    "ports 7300 and 7310-7419 (110 more for each further device) must be open between the machines: docs/ray.md";

/// Converts an error that occurred before the run has begun. A lost device or wire is reported as wrong input with a
/// hint about ports, because a firewall is the usual cause; other errors are passed on.
pub(crate) fn unreachable_failure(error: DeviceError) -> Failure {
    match error {
        DeviceError::Lost { .. } | DeviceError::PeerUnreachable { .. } | DeviceError::PeerAborted { .. } => {
            Failure::input(error.to_string()).hint(CLUSTER_PORTS)
        }
        other => other.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::Exit;

    /// A connector with channels that refuse every request.
    struct RefusingConnector;

    impl Channel for RefusingConnector {
        fn call(&self, _: &[u8]) -> io::Result<Vec<u8>> {
            Err(io::ErrorKind::ConnectionRefused.into())
        }

        fn call_out_of_band(&self, request: &[u8]) -> io::Result<Vec<u8>> {
            self.call(request)
        }
    }

    impl RemoteConnector for RefusingConnector {
        fn channel(&self, _: &str) -> io::Result<Arc<dyn Channel>> {
            Ok(Arc::new(RefusingConnector))
        }

        fn peer_network(&self) -> Arc<dyn PeerNetwork> {
            unreachable!("this test forms no team")
        }
    }

    #[test]
    fn unreachable_host_is_input_error() {
        let lost = || DeviceError::Lost { device: "pc2/cpu".to_owned(), reason: "connection refused".to_owned() };
        let reason = || "timed out".to_owned();
        let unreachable = DeviceError::PeerUnreachable { rank: 1, reason: reason() };
        let aborted = DeviceError::PeerAborted { rank: 1, reason: reason() };
        for error in [lost(), unreachable, aborted] {
            let message = error.to_string();
            let failure = unreachable_failure(error);
            assert_eq!((failure.exit, failure.message), (Exit::Input, message));
            assert!(failure.hints[0].contains("7310-7419") && failure.hints[0].contains("docs/ray.md"));
        }
        let devices = RemoteDevices::via(Arc::new(RefusingConnector));
        let failure = devices.describe("pc2/cpu", RunConfig::default()).unwrap_err();
        assert_eq!((failure.exit, &failure.hints), (Exit::Input, &unreachable_failure(lost()).hints));
        // A failure that the remote process reports itself is not changed.
        let reported = |failure: Failure| {
            unreachable_failure(DeviceError::Remote { out_of_memory: false, failure: Box::new(failure) })
        };
        let bug = || Failure::bug("pc2/cpu: internal error");
        assert_eq!(reported(bug()), bug());
        let refused = || Failure::input("pc2/cpu: memory.host is too large");
        assert_eq!(reported(refused()), refused());
    }
}
