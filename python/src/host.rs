//! A device of this process for a run in another one, which asks it over whatever carries bytes.

use crate::failure::{failed, raised, working};
use plimsoll_core::Failure;
use plimsoll_train::run::far::host;
use plimsoll_train::run::far::streams::TcpWires;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::net::{IpAddr, SocketAddr};

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

    /// Answers a request of the run; others may come at the same time.
    fn answer<'py>(&self, py: Python<'py>, request: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &working(py, || Ok(self.host.answer(request)))?))
    }
}
