//! Compute capabilities of GPUs, and the range that the kernels support.

use serde::Serialize;
use std::fmt;

/// The compute capability of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Architecture {
    /// Major version: 8 of 8.6.
    pub major: u32,
    /// Minor version: 6 of 8.6.
    pub minor: u32,
}

impl Architecture {
    /// Returns the name of the GPU generation, such as `Ampere`.
    pub fn family(self) -> &'static str {
        match (self.major, self.minor) {
            (0..=4, _) => "Kepler or older",
            (5, _) => "Maxwell",
            (6, _) => "Pascal",
            (7, 0..=4) => "Volta",
            (7, _) => "Turing",
            (8, 9) => "Ada",
            (8, _) => "Ampere",
            (9, _) => "Hopper",
            (10..=12, _) => "Blackwell",
            _ => "newer than Blackwell",
        }
    }

    /// Checks that the kernels run on this architecture: Ampere (the first with bf16) to Blackwell.
    ///
    /// # Errors
    /// Returns the reason if they do not.
    pub fn check(self) -> Result<(), String> {
        match self.major {
            0..=7 => Err(format!("{} ({self}) is too old: it has no bf16; Ampere (8.0) is the oldest", self.family())),
            8..=12 => Ok(()),
            _ => Err(format!("compute capability {self} is {}: this version does not know it", self.family())),
        }
    }

    /// Returns the number that names of compilation targets contain: 86 (of `sm_86`) for 8.6.
    pub(super) fn number(self) -> u32 {
        self.major * 10 + self.minor
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_architectures_are_refused_by_name() {
        let check = |major, minor| Architecture { major, minor }.check();
        assert_eq!(check(7, 5).unwrap_err(), "Turing (7.5) is too old: it has no bf16; Ampere (8.0) is the oldest");
        assert!(check(6, 1).unwrap_err().starts_with("Pascal (6.1) is too old"));
        for (major, minor) in [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)] {
            assert_eq!(check(major, minor), Ok(()));
        }
        assert!(check(13, 0).unwrap_err().contains("13.0 is newer than Blackwell"));
    }
}
