//! Snapshots of this machine, with which `plimsoll watch` shows the devices of a cluster.

use crate::failure::run_detached;
use crate::json;
use plimsoll_watch::snapshot::source::Source;
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError};

/// Takes snapshots of this machine, one after the other. Each covers the time since the one before.
#[pyclass]
pub struct MachineWatch(Mutex<Source>);

#[pymethods]
impl MachineWatch {
    /// Starts with the present load of the processor.
    #[new]
    fn new() -> MachineWatch {
        MachineWatch(Mutex::new(Source::machine()))
    }

    /// Returns the JSON of `plimsoll watch --json`.
    fn snapshot(&self, py: Python<'_>) -> PyResult<String> {
        run_detached(py, || Ok(json(&self.0.lock().unwrap_or_else(PoisonError::into_inner).snapshot()?)))
    }
}
