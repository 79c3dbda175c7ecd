//! Memory held on a device up to a limit, with which `plimsoll verify` tests devices.

use crate::failure::{run_detached, to_exception};
use plimsoll_core::{Bytes, Failure};
use plimsoll_device::arena::Arena;
use plimsoll_device::cuda::arena::DeviceArena;
use plimsoll_device::gpu;
use pyo3::prelude::*;

/// Memory held on one device up to a limit: on the GPU with index `gpu`, or without `gpu` in the memory of this
/// machine.
#[pyclass]
pub struct MemoryHold {
    limit: Bytes,
    gpu: Option<u32>,
    taken: Bytes,
    pieces: Vec<Piece>,
}

enum Piece {
    Memory(Arena),
    Gpu(DeviceArena),
}

#[pymethods]
impl MemoryHold {
    /// Creates an empty hold of at most `limit_bytes`.
    #[new]
    #[pyo3(signature = (limit_bytes, gpu=None))]
    fn new(limit_bytes: u64, gpu: Option<u32>) -> MemoryHold {
        MemoryHold { limit: Bytes(limit_bytes), gpu, taken: Bytes::ZERO, pieces: Vec::new() }
    }

    /// Allocates `bytes` bytes and backs them with physical memory. Fails if they exceed the rest of the limit or the
    /// free memory of the device.
    fn take(&mut self, py: Python<'_>, bytes: u64) -> PyResult<()> {
        let (requested, left) = (Bytes(bytes), self.limit.saturating_sub(self.taken));
        if requested > left {
            let message = format!("{requested} were requested, and {left} are left of a limit of {}", self.limit);
            return Err(to_exception(py, &Failure::does_not_fit(message)));
        }
        let gpu = self.gpu;
        self.pieces.push(run_detached(py, || match gpu {
            Some(gpu) => Ok(Piece::Gpu(gpu::hold_bytes(gpu, requested)?)),
            None => Ok(Piece::Memory(Arena::map(bytes)?)),
        })?);
        self.taken += requested;
        Ok(())
    }

    /// Returns the bytes held now: resident memory as the system reports it, or mapped memory of the GPU.
    fn held_bytes(&self) -> PyResult<u64> {
        let held = |piece: &Piece| match piece {
            Piece::Memory(arena) => Ok(arena.resident()?.0),
            Piece::Gpu(arena) => Ok(arena.held_bytes().0),
        };
        self.pieces.iter().map(held).sum()
    }

    /// Frees all held memory.
    fn release(&mut self) {
        self.pieces.clear();
        self.taken = Bytes::ZERO;
    }
}
