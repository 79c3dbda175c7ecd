//! The device arena: one address range, reserved once, into which memory is mapped. The plan decides the placement of
//! tensors; the executor does the copies.
//!
//! ```text
//!   │ piece │ piece │ … │ last piece │ reserved addresses without memory … │
//!   base                     held ┘                             capacity ┘
//! ```
//! If the driver supports virtual memory, address space for the whole GPU is reserved first. Memory is mapped into its
//! lower part, piece by piece. The arena grows and shrinks at its upper end between steps, and tensors below keep their
//! addresses.
//!
//! Pieces are [`PIECE_BYTES`] long; the last one is as short as the driver's granularity (2 MiB) allows. Bytes mapped
//! beyond the arena size are a charge: less than the granularity after an allocation, less than a piece after
//! shrinking.
//!
//! Other drivers provide plain memory. Such an arena does not grow, and shrinking does not free memory.

use super::driver::{Address, Context};
use crate::error::CudaError;
use plimsoll_core::Bytes;
use std::sync::Arc;

/// Size of the pieces in which an arena maps memory. Larger pieces map faster (a whole GPU within a second). Smaller
/// ones waste less: an arena that has shrunk holds less than one piece too much.
pub const PIECE_BYTES: u64 = 32 << 20;

/// The one range of a GPU's memory that holds all device tensors of a run.
pub struct DeviceArena {
    context: Arc<Context>,
    base: Address,
    /// The size that the last resize requested; the mapped pieces may be larger.
    bytes: u64,
    /// Sizes of the mapped pieces in address order. Memory of `cuMemAlloc` is one piece.
    pieces: Vec<u64>,
    /// Kind of the memory: mapped, or allocated by `cuMemAlloc`.
    backing: Backing,
}

/// Kind of an arena's memory.
enum Backing {
    /// Memory mapped into a reserved range of `capacity` bytes, in multiples of the driver's `granularity`.
    Mapped { capacity: u64, granularity: u64 },
    /// Memory allocated by `cuMemAlloc`, which cannot grow in place.
    Plain,
}

/// Returns the sizes of the pieces that an arena which holds `held` bytes must map to hold at least `bytes`. Each size
/// is a multiple of `granularity`.
fn pieces_to_map(held: u64, bytes: u64, granularity: u64) -> Vec<u64> {
    let piece = PIECE_BYTES.next_multiple_of(granularity);
    let missing = bytes.saturating_sub(held).next_multiple_of(granularity);
    let rest = missing % piece;
    let whole = std::iter::repeat_n(piece, (missing / piece) as usize);
    whole.chain((rest > 0).then_some(rest)).collect()
}

/// Returns how many of its `pieces`, from the lowest address on, an arena keeps when it shrinks to `bytes`.
fn pieces_kept(pieces: &[u64], bytes: u64) -> usize {
    let mut held = 0;
    let begins = pieces.iter().map(|piece| {
        held += piece;
        held - piece
    });
    begins.take_while(|begin| *begin < bytes).count()
}

impl DeviceArena {
    /// Allocates an arena of `bytes`. On drivers with virtual memory it reserves addresses for the whole GPU first.
    ///
    /// # Errors
    /// [`CudaError::Refused`] if the GPU has too little free memory; then nothing stays allocated.
    pub fn allocate(context: &Arc<Context>, bytes: u64) -> Result<DeviceArena, CudaError> {
        let context = context.clone();
        if !context.gpu().virtual_memory {
            let base = if bytes == 0 { Ok(0) } else { context.allocate(bytes) };
            let base = base.map_err(|error| to_refusal(&context, bytes, error))?;
            return Ok(DeviceArena { base, bytes, pieces: vec![bytes], backing: Backing::Plain, context });
        }
        let granularity = context.granularity()?.max(1);
        let (_, total) = context.memory()?;
        let capacity = total.0.max(bytes).next_multiple_of(granularity);
        let base = context.reserve(capacity)?;
        let backing = Backing::Mapped { capacity, granularity };
        // From here on, dropping `arena` frees what it holds on every error path.
        let mut arena = DeviceArena { base, bytes: 0, pieces: Vec::new(), backing, context };
        arena.resize(bytes)?;
        Ok(arena)
    }

    /// Returns the address of the first byte.
    pub fn base(&self) -> Address {
        self.base
    }

    /// Returns the size of the arena in bytes, without bytes that are mapped beyond it.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the device memory that the arena holds, with bytes that are mapped beyond its size.
    pub fn held_bytes(&self) -> Bytes {
        Bytes(self.pieces.iter().sum())
    }

    /// Returns the device address of the range of `bytes` bytes at `offset` in the arena.
    ///
    /// # Panics
    /// Panics if the range exceeds the arena, which is a bug of the plan or the executor.
    pub fn address(&self, offset: u64, bytes: u64) -> Address {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "bug: {bytes} bytes at offset {offset} do not lie in an arena of {} bytes",
            self.bytes
        );
        self.base + offset
    }

    /// Returns the most bytes that a newly allocated arena can map beyond its size, whatever that size is.
    ///
    /// # Errors
    /// Returns the error of the driver.
    pub fn rounding_bytes_max(context: &Context) -> Result<Bytes, CudaError> {
        let granularity = if context.gpu().virtual_memory { context.granularity()? } else { 1 };
        Ok(Bytes(granularity.saturating_sub(1)))
    }

    /// Resizes the arena; its contents are undefined afterwards. Unlike [`DeviceArena::resize`], this can grow an arena
    /// on drivers without virtual memory, by a new allocation.
    ///
    /// # Errors
    /// [`CudaError::Refused`] if the GPU has too little free memory. The arena is then empty on drivers without virtual
    /// memory, otherwise unchanged.
    pub fn resize_discarding(&mut self, bytes: u64) -> Result<(), CudaError> {
        if matches!(self.backing, Backing::Plain) && bytes > self.held_bytes().0 {
            if self.base != 0 {
                self.context.synchronize()?;
                // SAFETY: allocated by this arena, and no work is in progress.
                unsafe { self.context.free(self.base) }?;
            }
            (self.base, self.bytes, self.pieces) = (0, 0, Vec::new());
            self.base = self.context.allocate(bytes).map_err(|error| to_refusal(&self.context, bytes, error))?;
            self.pieces = vec![bytes];
        }
        self.resize(bytes)
    }

    /// Grows or shrinks the arena at its upper end, while no work uses it. Remaining bytes keep their addresses and
    /// contents; new bytes are undefined.
    ///
    /// # Errors
    /// [`CudaError::Refused`] if the GPU has too little free memory, or the arena must grow without virtual memory. The
    /// arena is then unchanged.
    pub fn resize(&mut self, bytes: u64) -> Result<(), CudaError> {
        let held = self.held_bytes().0;
        match self.backing {
            Backing::Plain if bytes > held => {
                return Err(to_refusal(&self.context, bytes, CudaError::Memory { what: "grow".into() }));
            }
            Backing::Plain => {}
            Backing::Mapped { capacity, .. } if bytes > capacity => {
                return Err(to_refusal(&self.context, bytes, CudaError::Memory { what: "grow".into() }));
            }
            Backing::Mapped { granularity, .. } if bytes > held => self.grow(held, bytes, granularity)?,
            Backing::Mapped { .. } => self.shrink_to(pieces_kept(&self.pieces, bytes))?,
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Maps pieces above the `held` bytes until at least `bytes` are held, in multiples of `granularity`. If the GPU
    /// refuses a piece, unmaps the new ones again.
    fn grow(&mut self, held: u64, bytes: u64, granularity: u64) -> Result<(), CudaError> {
        let before = self.pieces.len();
        let mut end = held;
        for piece in pieces_to_map(held, bytes, granularity) {
            // SAFETY: the range lies above all pieces and below the capacity, which was checked; both are multiples of
            // the granularity.
            if let Err(error) = unsafe { self.context.map(self.base + end, piece) } {
                self.shrink_to(before)?;
                return Err(to_refusal(&self.context, bytes, error));
            }
            self.pieces.push(piece);
            end += piece;
        }
        Ok(())
    }

    /// Keeps the first `kept` pieces, and unmaps the others.
    fn shrink_to(&mut self, kept: usize) -> Result<(), CudaError> {
        while self.pieces.len() > kept {
            let piece = self.pieces.pop().expect("more pieces than are kept");
            let at = self.base + self.held_bytes().0;
            // SAFETY: a piece that was mapped as one; the caller ensures that no work uses it.
            unsafe { self.context.unmap(at, piece) }?;
        }
        Ok(())
    }
}

/// Adds the GPU's memory figures to an out-of-memory error; returns other errors unchanged.
fn to_refusal(context: &Context, requested: u64, error: CudaError) -> CudaError {
    match (error, context.memory()) {
        (CudaError::Memory { .. }, Ok((free, total))) => {
            CudaError::Refused { requested: Bytes(requested), gpu: context.gpu().name.clone(), free, total }
        }
        (error, _) => error,
    }
}

impl Drop for DeviceArena {
    fn drop(&mut self) {
        // A failure cannot be handled here; a lost context loses its memory anyway. Work in the arena must complete
        // first.
        let _ = self.context.enter().and_then(|()| self.context.synchronize());
        match self.backing {
            Backing::Plain if self.bytes == 0 && self.base == 0 => {}
            // SAFETY: allocated by this arena, and no work is in progress.
            Backing::Plain => drop(unsafe { self.context.free(self.base) }),
            Backing::Mapped { capacity, .. } => {
                if self.shrink_to(0).is_ok() {
                    // SAFETY: reserved as one in `allocate`, and nothing is mapped any more.
                    drop(unsafe { self.context.unreserve(self.base, capacity) });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GRANULARITY: u64 = 2 << 20;

    proptest! {
        #[test]
        fn mapped_bytes_exceed_request_by_under_one_step(
            first in 1u64..1 << 38, second in 1u64..1 << 38
        ) {
            let pieces = pieces_to_map(0, first, GRANULARITY);
            let held: u64 = pieces.iter().sum();
            prop_assert!(held >= first && held - first < GRANULARITY);
            prop_assert!(pieces.iter().all(|piece| piece % GRANULARITY == 0 && *piece <= PIECE_BYTES && *piece > 0));
            if second <= held {
                let kept: u64 = pieces[..pieces_kept(&pieces, second)].iter().sum();
                prop_assert!(kept >= second && kept - second < PIECE_BYTES);
            } else {
                let more: u64 = pieces_to_map(held, second, GRANULARITY).iter().sum();
                prop_assert!(held + more >= second && held + more - second < GRANULARITY);
            }
        }
    }

    #[test]
    fn empty_arena_maps_nothing() {
        assert_eq!(pieces_to_map(0, 0, GRANULARITY), Vec::<u64>::new());
        assert_eq!(pieces_kept(&[GRANULARITY], 0), 0);
    }
}
