//! [`ArenaError`], the failures to allocate an arena, and their conversion to user-facing failures.

use crate::probe::Memory;
use plimsoll_core::{Bytes, Failure};
use std::io;

/// A failed allocation of an arena.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The machine, the container or a limit of the process does not provide that much memory.
    #[error("cannot allocate an arena of {requested}: {available} available ({bound_by})")]
    OutOfMemory {
        /// Requested size.
        requested: Bytes,
        /// Bytes that were available at that moment. If the arena was to be resized, its own bytes are included.
        available: Bytes,
        /// Name of the limit that determines the available memory: the machine, a control group, a limit of the
        /// process, or the load line of a simulated device.
        bound_by: String,
    },
    /// The system does not tell how much memory is available, for example because too many files are open.
    #[error("cannot allocate an arena of {requested}: {reason}")]
    MemoryUnknown {
        /// Requested size.
        requested: Bytes,
        /// Reason why the available memory is unknown.
        reason: String,
    },
    /// A system call failed for another reason.
    #[error("`{call}` failed on the arena: {source}")]
    System {
        /// Name of the system call.
        call: &'static str,
        /// Error of the operating system.
        source: io::Error,
    },
}

impl ArenaError {
    /// Returns the error of an arena that exceeds the `available` bytes of `memory`.
    pub(crate) fn refused(requested: Bytes, available: Bytes, memory: &Memory) -> ArenaError {
        let bound_by = memory.bound_by.clone();
        match memory.is_known() {
            true => ArenaError::OutOfMemory { requested, available, bound_by },
            false => ArenaError::MemoryUnknown { requested, reason: bound_by },
        }
    }
}

impl From<ArenaError> for Failure {
    fn from(error: ArenaError) -> Failure {
        let message = error.to_string();
        match error {
            ArenaError::OutOfMemory { .. } => {
                Failure::does_not_fit(message).hint("set a smaller --budget, or stop other processes that hold memory")
            }
            ArenaError::MemoryUnknown { .. } => {
                Failure::input(message).hint("raise the limit of open files: ulimit -n 1024")
            }
            ArenaError::System { .. } => Failure::bug(message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::Exit;

    #[test]
    fn unknown_memory_is_no_shortage() {
        let memory = |total, bound_by: &str| Memory { total, free: Bytes::ZERO, bound_by: bound_by.to_owned() };
        let refused = |memory: &Memory| ArenaError::refused(Bytes::mib(8), Bytes::ZERO, memory);
        let short = Failure::from(refused(&memory(Bytes::gib(1), "the machine")));
        assert_eq!(short.exit, Exit::DoesNotFit);
        let unknown = Failure::from(refused(&memory(Bytes::ZERO, "/proc/meminfo cannot be read")));
        assert_eq!(unknown.exit, Exit::Input);
        assert!(unknown.message.contains("/proc/meminfo") && unknown.hints[0].contains("ulimit -n"), "{unknown:?}");
    }
}
