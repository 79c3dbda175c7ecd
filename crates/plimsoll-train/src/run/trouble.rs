//! What can go wrong while a device works for a run: it refuses memory, which a run survives, or anything else,
//! which ends it.

use crate::data::DataError;
use crate::files::FilesError;
use plimsoll_core::Failure;
use plimsoll_device::device::DeviceError;

/// Why work was not done.
#[derive(Debug)]
pub enum Trouble {
    /// The device refused memory. What it holds is as it was before the op that it refused.
    Refused(DeviceError),
    /// Anything else.
    Failure(Failure),
}

impl From<DeviceError> for Trouble {
    fn from(error: DeviceError) -> Trouble {
        if error.is_refusal() { Trouble::Refused(error) } else { Trouble::Failure(error.into()) }
    }
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Trouble {
        Trouble::Failure(failure)
    }
}

impl From<FilesError> for Trouble {
    fn from(error: FilesError) -> Trouble {
        Trouble::Failure(error.into())
    }
}

impl From<DataError> for Trouble {
    fn from(error: DataError) -> Trouble {
        Trouble::Failure(error.into())
    }
}

impl From<Trouble> for Failure {
    fn from(trouble: Trouble) -> Failure {
        match trouble {
            Trouble::Refused(error) => error.into(),
            Trouble::Failure(failure) => failure,
        }
    }
}
