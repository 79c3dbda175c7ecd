//! Bytes that are held for somebody who shares a device: taken for good at once, and never more than was agreed.

use crate::failure::{raised, working};
use plimsoll_core::{Bytes, Failure};
use plimsoll_device::arena::Arena;
use plimsoll_device::cuda::arena::DeviceArena;
use plimsoll_device::cuda::open;
use pyo3::prelude::*;

/// A share of a memory, held in arenas: of a GPU's by its number, else of this machine's.
#[pyclass]
pub struct Hold {
    line: Bytes,
    gpu: Option<u32>,
    taken: Bytes,
    pieces: Vec<Piece>,
}

enum Piece {
    Memory(Arena),
    Gpu(DeviceArena),
}

#[pymethods]
impl Hold {
    /// A share of so many bytes, of which none is held yet.
    #[new]
    #[pyo3(signature = (line_bytes, gpu=None))]
    fn new(line_bytes: u64, gpu: Option<u32>) -> Hold {
        Hold { line: Bytes(line_bytes), gpu, taken: Bytes::ZERO, pieces: Vec::new() }
    }

    /// Takes bytes, with their pages. What the share has no room for is refused, and so is what the device has not.
    fn take(&mut self, py: Python<'_>, bytes: u64) -> PyResult<()> {
        let (asked, left) = (Bytes(bytes), self.line.saturating_sub(self.taken));
        if asked > left {
            let message = format!("{asked} were asked for, and {left} are left of a share of {}", self.line);
            return Err(raised(py, &Failure::does_not_fit(message)));
        }
        let gpu = self.gpu;
        self.pieces.push(working(py, || match gpu {
            Some(gpu) => Ok(Piece::Gpu(open::hold(gpu, asked)?)),
            None => Ok(Piece::Memory(Arena::map(bytes)?)),
        })?);
        self.taken += asked;
        Ok(())
    }

    /// Bytes of the share that are held now: of this machine's memory as the system says it, of a GPU's as they were mapped.
    fn held_bytes(&self) -> PyResult<u64> {
        let held = |piece: &Piece| match piece {
            Piece::Memory(arena) => Ok(arena.resident()?.0),
            Piece::Gpu(arena) => Ok(arena.held().0),
        };
        self.pieces.iter().map(held).sum()
    }

    /// Gives all back.
    fn release(&mut self) {
        self.pieces.clear();
        self.taken = Bytes::ZERO;
    }
}
