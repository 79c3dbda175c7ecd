//! Bytes that are held for somebody who shares a machine: taken for good at once, and never more than was agreed.

use crate::failure::{raised, working};
use plimsoll_core::{Bytes, Failure};
use plimsoll_device::arena::Arena;
use pyo3::prelude::*;

/// A share of this machine's memory, held in arenas.
#[pyclass]
pub struct Hold {
    line: Bytes,
    arenas: Vec<Arena>,
}

impl Hold {
    fn bytes(&self) -> Bytes {
        self.arenas.iter().map(Arena::bytes).sum()
    }
}

#[pymethods]
impl Hold {
    /// A share of so many bytes, of which none is held yet.
    #[new]
    fn new(line_bytes: u64) -> Hold {
        Hold { line: Bytes(line_bytes), arenas: Vec::new() }
    }

    /// Takes bytes, with their pages. What the share has no room for is refused, and so is what the machine has not.
    fn take(&mut self, py: Python<'_>, bytes: u64) -> PyResult<()> {
        let (asked, left) = (Bytes(bytes), self.line.saturating_sub(self.bytes()));
        if asked > left {
            let message = format!("{asked} were asked for, and {left} are left of a share of {}", self.line);
            return Err(raised(py, &Failure::does_not_fit(message)));
        }
        self.arenas.push(working(py, || Ok(Arena::map(bytes)?))?);
        Ok(())
    }

    /// Bytes of the share that are resident in memory now, as the system says.
    fn resident_bytes(&self) -> PyResult<u64> {
        self.arenas.iter().map(|arena| Ok(arena.resident()?.0)).sum()
    }

    /// Gives all back.
    fn release(&mut self) {
        self.arenas.clear();
    }
}
