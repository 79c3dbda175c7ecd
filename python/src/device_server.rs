//! Access from Python to the server of a remote device: Ray carries the requests of a run to this process, and the
//! server answers them. The server itself is `plimsoll_train::device_server`.

use crate::failure::{argument_error, run_detached, to_exception};
use plimsoll_core::Failure;
use plimsoll_device::process;
use plimsoll_train::device_server;
use plimsoll_train::remote::sockets::TcpPeerNetwork;
use plimsoll_train::remote::{Invitation, LinkSpeeds};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

/// Measured speed of a link, as a tuple in Python: bytes per second to the peer, bytes per second from the peer, and
/// latency in seconds.
type LinkTuple = (f64, f64, f64);

/// The server of the device in this process.
#[pyclass]
pub struct DeviceServer {
    server: device_server::DeviceServer,
}

#[pymethods]
impl DeviceServer {
    /// Creates a server that accepts peers at `ip`, on the first free port of `ports`; 0 stands for any port. `gpu` is
    /// the index of the GPU in this process, which may differ from its index in the run; `None` for any other device.
    #[new]
    #[pyo3(signature = (ip, ports, gpu=None))]
    fn new(py: Python<'_>, ip: &str, ports: Vec<u16>, gpu: Option<u32>) -> PyResult<DeviceServer> {
        process::set_heap_trim_threshold();
        let server = start_server(ip, &ports, gpu).map_err(|failure| to_exception(py, &failure))?;
        Ok(DeviceServer { server })
    }

    /// Returns the address at which peers connect.
    fn address(&self) -> String {
        self.server.address()
    }

    /// Measures the links to the peers at `addresses`, one address per rank. All ranks call this function at the same
    /// time with the same `secret`. Returns one entry per rank. Of each pair of ranks, only the lower rank gets the
    /// figures of their link; all other entries are `None`.
    fn measure_links(
        &self,
        py: Python<'_>,
        rank: u32,
        addresses: Vec<String>,
        secret: String,
    ) -> PyResult<Vec<Option<LinkTuple>>> {
        let invitation = Invitation { team: 0, secret, addresses, epoch: Instant::now(), nccl: false };
        let to_tuple = |speeds: LinkSpeeds| {
            (speeds.to_peer.bytes_per_second, speeds.from_peer.bytes_per_second, speeds.to_peer.latency_seconds)
        };
        run_detached(py, || {
            let links = self.server.measure_links(&invitation, rank).map_err(argument_error("links"))?;
            Ok(links.into_iter().map(|speeds| speeds.map(to_tuple)).collect())
        })
    }

    /// Returns the encoded response to an encoded request of the run. Several threads may call this at the same time.
    fn answer<'py>(&self, py: Python<'py>, request: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &run_detached(py, || Ok(self.server.answer(request)))?))
    }
}

/// Starts a server with the arguments of [`DeviceServer::new`].
fn start_server(ip: &str, ports: &[u16], gpu: Option<u32>) -> Result<device_server::DeviceServer, Failure> {
    let ip: IpAddr = ip.parse().map_err(argument_error("ip"))?;
    let addresses: Vec<SocketAddr> = ports.iter().map(|port| SocketAddr::new(ip, *port)).collect();
    let network = TcpPeerNetwork::listen(&*addresses).map_err(|error| {
        Failure::input(format!("none of the ports for connections between workers is available at {ip}: {error}"))
    })?;
    device_server::DeviceServer::with_gpu(network, gpu).map_err(argument_error("a thread"))
}
