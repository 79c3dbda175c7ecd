//! What can go wrong while devices work for a run: one refuses memory, which a run survives, one is gone, which a team
//! survives, or anything else, which ends the run. Some of it takes a run back to a checkpoint.

use crate::data::DataError;
use crate::files::FilesError;
use plimsoll_core::Failure;
use plimsoll_device::device::DeviceError;

/// Why work was not done.
#[derive(Debug)]
pub enum Trouble {
    /// A device refused memory. What it holds is as it was before the op that it refused.
    Refused {
        /// Its rank in the team.
        rank: usize,
        /// What it says.
        error: DeviceError,
    },
    /// A device is gone, with all that stood on it.
    Lost {
        /// Its rank in the team.
        rank: usize,
        /// What is known of it.
        why: String,
    },
    /// Another device of the team could not do its part, and says so itself.
    Peer(DeviceError),
    /// Anything else.
    Failure(Failure),
}

impl Trouble {
    /// In words, for the others.
    pub(crate) fn what(&self) -> String {
        match self {
            Trouble::Refused { error, .. } | Trouble::Peer(error) => error.to_string(),
            Trouble::Lost { why, .. } => why.clone(),
            Trouble::Failure(failure) => failure.message.clone(),
        }
    }

    /// The same, of the device of this rank.
    pub(crate) fn of_rank(self, rank: usize) -> Trouble {
        match self {
            Trouble::Refused { error, .. } => Trouble::Refused { rank, error },
            Trouble::Lost { why, .. } => Trouble::Lost { rank, why },
            other => other,
        }
    }

    /// Which of several troubles a run has to answer first.
    pub(crate) fn weight(&self) -> u32 {
        match self {
            Trouble::Failure(_) => 3,
            Trouble::Lost { .. } => 2,
            Trouble::Refused { .. } => 1,
            Trouble::Peer(_) => 0,
        }
    }
}

/// Why a run does not simply go on.
#[derive(Debug)]
pub enum Halt {
    /// It ends.
    Failure(Failure),
    /// It stops early, and can go on.
    Stop {
        /// Why.
        failure: Failure,
        /// Whether weights and optimizer are those of the last step that was finished.
        whole: bool,
    },
    /// It has gone back to a checkpoint: what was being done is not done, and steps are counted from there.
    Back,
}

impl From<Failure> for Halt {
    fn from(failure: Failure) -> Halt {
        Halt::Failure(failure)
    }
}

impl From<Trouble> for Halt {
    fn from(trouble: Trouble) -> Halt {
        Halt::Failure(trouble.into())
    }
}

impl From<FilesError> for Halt {
    fn from(error: FilesError) -> Halt {
        Halt::Failure(error.into())
    }
}

impl From<DataError> for Halt {
    fn from(error: DataError) -> Halt {
        Halt::Failure(error.into())
    }
}

impl From<DeviceError> for Trouble {
    fn from(error: DeviceError) -> Trouble {
        match error {
            error if error.is_loss() => Trouble::Lost { rank: 0, why: error.to_string() },
            error if error.is_peers() => Trouble::Peer(error),
            error if error.is_refusal() => Trouble::Refused { rank: 0, error },
            error => Trouble::Failure(error.into()),
        }
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
            Trouble::Refused { error, .. } | Trouble::Peer(error) => error.into(),
            Trouble::Lost { why, .. } => Failure::stopped(why),
            Trouble::Failure(failure) => failure,
        }
    }
}
