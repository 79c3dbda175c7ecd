//! A device of this process for a run in another one, which asks it over whatever carries bytes.

use crate::failure::{failed, raised, working};
use plimsoll_core::Failure;
use plimsoll_device::process;
use plimsoll_train::remote::links::Ways;
use plimsoll_train::remote::streams::TcpWires;
use plimsoll_train::remote::{Invitation, host};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

/// There and back, bytes a second, and seconds until a byte is there.
type Measured = (f64, f64, f64);

/// What answers for the device.
#[pyclass]
pub struct Host {
    host: host::Host,
}

#[pymethods]
impl Host {
    /// Others meet it at this address, at the first of some ports that is free; 0 is any. `gpu` is the one that this process
    /// sees, whatever the run calls it.
    #[new]
    #[pyo3(signature = (ip, ports, gpu=None))]
    fn new(py: Python<'_>, ip: &str, ports: Vec<u16>, gpu: Option<u32>) -> PyResult<Host> {
        process::keep_nothing_freed();
        let listen = || {
            let ip: IpAddr = ip.parse().map_err(failed("ip"))?;
            let addresses: Vec<SocketAddr> = ports.iter().map(|port| SocketAddr::new(ip, *port)).collect();
            let wires = TcpWires::listen(&*addresses).map_err(|error| {
                Failure::input(format!("none of the ports for wires can be taken at {ip}: {error}"))
            })?;
            host::Host::seeing(wires, gpu).map_err(failed("a thread"))
        };
        Ok(Host { host: listen().map_err(|failure| raised(py, &failure))? })
    }

    /// Where others meet it.
    fn place(&self) -> String {
        self.host.place()
    }

    /// Measures the links to all that stand at these places and do the same, with a secret that nobody else has: bytes a
    /// second there and back, and how late a byte comes. Of each two the lower rank says it.
    fn measure(
        &self,
        py: Python<'_>,
        rank: u32,
        places: Vec<String>,
        secret: String,
    ) -> PyResult<Vec<Option<Measured>>> {
        let invitation = Invitation { team: 0, secret, places, epoch: Instant::now(), nccl: false };
        let said = |[there, back]: Ways| (there.bytes_per_second, back.bytes_per_second, there.latency_seconds);
        working(py, || {
            let found = self.host.measure(&invitation, rank).map_err(failed("links"))?;
            Ok(found.into_iter().map(|ways| ways.map(said)).collect())
        })
    }

    /// Answers a request of the run; others may come at the same time.
    fn answer<'py>(&self, py: Python<'py>, request: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &working(py, || Ok(self.host.answer(request)))?))
    }
}
