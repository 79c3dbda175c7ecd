//! The arena of a GPU: one range of addresses, taken once, in which memory is mapped. Where tensors lie in it is the
//! plan's business; what is copied from and to it is the executor's.
//!
//! ```text
//!   │ piece │ piece │ … │ last piece │ reserved addresses without memory … │
//!   base                     held ┘                             capacity ┘
//! ```
//! Where the driver maps memory, address space as large as the whole GPU is reserved first, and memory is mapped into
//! the lower part of it, piece by piece: the arena grows and shrinks at its upper end between steps, and what stays
//! keeps its addresses. Pieces are [`PIECE_BYTES`], the last one as small as the driver's granularity (2 MiB) allows.
//! What the device holds beyond the arena's own bytes is a charge: less than the granularity where the arena was taken
//! as large as it is, less than a piece where it has shrunk.
//!
//! Other drivers give plain memory: there the arena may shrink without giving memory back, and does not grow.

use super::driver::{Address, Context, CudaError};
use plimsoll_core::Bytes;
use std::sync::Arc;

/// Memory is mapped in pieces of this many bytes: large enough that a whole GPU is mapped in a second, small enough
/// that what a shrunken arena holds too much is nothing.
pub const PIECE_BYTES: u64 = 32 << 20;

/// The one allocation of a device.
pub struct DeviceArena {
    context: Arc<Context>,
    base: Address,
    /// What was asked for.
    bytes: u64,
    /// Bytes of the pieces that are mapped, in order; of plain memory the one piece.
    pieces: Vec<u64>,
    /// How the memory came.
    kind: Kind,
}

/// How an arena has its memory.
enum Kind {
    /// Mapped into this many reserved bytes, in multiples of the granularity.
    Mapped { capacity: u64, granularity: u64 },
    /// From `cuMemAlloc`.
    Plain,
}

/// The pieces that are mapped above `held` bytes so that `bytes` are held, each a multiple of `granularity`.
fn pieces_above(held: u64, bytes: u64, granularity: u64) -> Vec<u64> {
    let piece = PIECE_BYTES.next_multiple_of(granularity);
    let missing = bytes.saturating_sub(held).next_multiple_of(granularity);
    let rest = missing % piece;
    let whole = std::iter::repeat_n(piece, (missing / piece) as usize);
    whole.chain((rest > 0).then_some(rest)).collect()
}

/// How many of the pieces an arena of `bytes` keeps.
fn pieces_kept(pieces: &[u64], bytes: u64) -> usize {
    let mut held = 0;
    let begins = pieces.iter().map(|piece| {
        held += piece;
        held - piece
    });
    begins.take_while(|begin| *begin < bytes).count()
}

impl DeviceArena {
    /// Takes an arena of `bytes`, all of it at once.
    ///
    /// # Errors
    /// [`CudaError::Refused`] where the GPU has not that much left; then nothing is held.
    pub fn take(context: &Arc<Context>, bytes: u64) -> Result<DeviceArena, CudaError> {
        let context = context.clone();
        if !context.gpu().virtual_memory {
            let base = if bytes == 0 { Ok(0) } else { context.allocate(bytes) };
            let base = base.map_err(|error| refused(&context, bytes, error))?;
            return Ok(DeviceArena { base, bytes, pieces: vec![bytes], kind: Kind::Plain, context });
        }
        let granularity = context.granularity()?.max(1);
        let (_, total) = context.memory()?;
        let capacity = total.0.max(bytes).next_multiple_of(granularity);
        let base = context.reserve(capacity)?;
        let kind = Kind::Mapped { capacity, granularity };
        // From here on dropping `arena` gives back what it holds, on every way out.
        let mut arena = DeviceArena { base, bytes: 0, pieces: Vec::new(), kind, context };
        arena.resize(bytes)?;
        Ok(arena)
    }

    /// The address of byte 0.
    pub fn base(&self) -> Address {
        self.base
    }

    /// The size that was asked for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What the device holds for it.
    pub fn held(&self) -> Bytes {
        Bytes(self.pieces.iter().sum())
    }

    /// The addresses of `bytes` at `offset`.
    ///
    /// # Panics
    /// Where they do not lie in the arena: the plan or the executor is wrong.
    pub fn address(&self, offset: u64, bytes: u64) -> Address {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "bug: {bytes} bytes at offset {offset} do not lie in an arena of {} bytes",
            self.bytes
        );
        self.base + offset
    }

    /// The most that the device holds beyond the bytes of an arena that is taken as large as it is.
    ///
    /// # Errors
    /// What the driver says.
    pub fn rounding_max(context: &Context) -> Result<Bytes, CudaError> {
        let granularity = if context.gpu().virtual_memory { context.granularity()? } else { 1 };
        Ok(Bytes(granularity.saturating_sub(1)))
    }

    /// Makes the arena another size, while nothing in it has to stay: also where a driver does not map.
    ///
    /// # Errors
    /// As [`DeviceArena::resize`]; a driver that does not map may then have given the memory away.
    pub fn retake(&mut self, bytes: u64) -> Result<(), CudaError> {
        if matches!(self.kind, Kind::Plain) && bytes > self.held().0 {
            if self.base != 0 {
                self.context.synchronize()?;
                // SAFETY: ours, and nothing is at work.
                unsafe { self.context.free(self.base) }?;
            }
            (self.base, self.bytes, self.pieces) = (0, 0, Vec::new());
            self.base = self.context.allocate(bytes).map_err(|error| refused(&self.context, bytes, error))?;
            self.pieces = vec![bytes];
        }
        self.resize(bytes)
    }

    /// Makes the arena larger or smaller at its upper end, while nothing is at work in it. What stays keeps its
    /// addresses and its bits; what is new holds anything.
    ///
    /// # Errors
    /// [`CudaError::Refused`] where the GPU has not that much left; then all is as it was.
    pub fn resize(&mut self, bytes: u64) -> Result<(), CudaError> {
        let held = self.held().0;
        match self.kind {
            Kind::Plain if bytes > held => {
                return Err(refused(&self.context, bytes, CudaError::Memory { what: "grow".into() }));
            }
            Kind::Plain => {}
            Kind::Mapped { capacity, .. } if bytes > capacity => {
                return Err(refused(&self.context, bytes, CudaError::Memory { what: "grow".into() }));
            }
            Kind::Mapped { granularity, .. } if bytes > held => self.grow(held, bytes, granularity)?,
            Kind::Mapped { .. } => self.shrink_to(pieces_kept(&self.pieces, bytes))?,
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Maps what is missing; all of it or nothing.
    fn grow(&mut self, held: u64, bytes: u64, granularity: u64) -> Result<(), CudaError> {
        let before = self.pieces.len();
        let mut end = held;
        for piece in pieces_above(held, bytes, granularity) {
            // SAFETY: the range lies above all pieces and below the capacity, which was checked; all are multiples
            // of the granularity.
            if let Err(error) = unsafe { self.context.map(self.base + end, piece) } {
                self.shrink_to(before)?;
                return Err(refused(&self.context, bytes, error));
            }
            self.pieces.push(piece);
            end += piece;
        }
        Ok(())
    }

    /// Gives the pieces from number `kept` on back.
    fn shrink_to(&mut self, kept: usize) -> Result<(), CudaError> {
        while self.pieces.len() > kept {
            let piece = self.pieces.pop().expect("there are more than are kept");
            let at = self.base + self.held().0;
            // SAFETY: a piece that was mapped as one; the caller lets nothing work in it.
            unsafe { self.context.unmap(at, piece) }?;
        }
        Ok(())
    }
}

/// A refusal of memory, with what the GPU has; other errors as they are.
fn refused(context: &Context, asked: u64, error: CudaError) -> CudaError {
    match (error, context.memory()) {
        (CudaError::Memory { .. }, Ok((free, total))) => {
            CudaError::Refused { asked: Bytes(asked), gpu: context.gpu().name.clone(), free, total }
        }
        (error, _) => error,
    }
}

impl Drop for DeviceArena {
    fn drop(&mut self) {
        // Nothing can be done about a refusal here: a lost context takes its memory along. Work that is under way in
        // the arena has to end before it goes.
        let _ = self.context.enter().and_then(|()| self.context.synchronize());
        match self.kind {
            Kind::Plain if self.bytes == 0 && self.base == 0 => {}
            // SAFETY: ours, and nothing is at work.
            Kind::Plain => drop(unsafe { self.context.free(self.base) }),
            Kind::Mapped { capacity, .. } => {
                if self.shrink_to(0).is_ok() {
                    // SAFETY: reserved as one in `take`, and nothing is mapped any more.
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
        fn an_arena_holds_what_it_needs_less_than_a_granule_more_as_taken_and_less_than_a_piece_more_as_shrunk(
            first in 1u64..1 << 38, second in 1u64..1 << 38
        ) {
            let pieces = pieces_above(0, first, GRANULARITY);
            let held: u64 = pieces.iter().sum();
            prop_assert!(held >= first && held - first < GRANULARITY);
            prop_assert!(pieces.iter().all(|piece| piece % GRANULARITY == 0 && *piece <= PIECE_BYTES && *piece > 0));
            if second <= held {
                let kept: u64 = pieces[..pieces_kept(&pieces, second)].iter().sum();
                prop_assert!(kept >= second && kept - second < PIECE_BYTES);
            } else {
                let more: u64 = pieces_above(held, second, GRANULARITY).iter().sum();
                prop_assert!(held + more >= second && held + more - second < GRANULARITY);
            }
        }
    }

    #[test]
    fn an_empty_arena_holds_nothing() {
        assert_eq!(pieces_above(0, 0, GRANULARITY), Vec::<u64>::new());
        assert_eq!(pieces_kept(&[GRANULARITY], 0), 0);
    }
}
