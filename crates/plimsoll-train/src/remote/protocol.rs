//! Messages between a run and the process of a remote device, and their encoding: a length, JSON, then raw bytes.

use super::Invitation;
use crate::config::RunConfig;
use plimsoll_core::{
    Bytes, CollectiveBackend, DType, DeviceSpec, Exit, Failure, GemmAlgorithms, Link, MeasuredBy, Space,
};
use plimsoll_device::error::DeviceError;
use plimsoll_program::{Placement, ProgramKind, ProgramSet, TensorId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io;
use std::time::{Duration, Instant};

/// Version of the messages between a run and the process of a remote device. Both ends must have the same.
pub const VERSION: u32 = 7;

/// An [`Invitation`] as it is sent to another process. The epoch is sent as elapsed time, because the clocks of two
/// processes differ.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct InvitationMessage {
    team: u64,
    secret: String,
    addresses: Vec<String>,
    since_epoch: Duration,
    nccl: bool,
}

impl From<&Invitation> for InvitationMessage {
    fn from(invitation: &Invitation) -> InvitationMessage {
        let Invitation { team, secret, addresses, epoch, nccl } = invitation.clone();
        InvitationMessage { team, secret, addresses, since_epoch: epoch.elapsed(), nccl }
    }
}

impl From<InvitationMessage> for Invitation {
    fn from(message: InvitationMessage) -> Invitation {
        let InvitationMessage { team, secret, addresses, since_epoch, nccl } = message;
        let now = Instant::now();
        Invitation { team, secret, addresses, epoch: now.checked_sub(since_epoch).unwrap_or(now), nccl }
    }
}

/// A request from the run to the process of a device. Raw bytes may follow it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Asks for the specification of the device that `config` names.
    Describe { version: u32, config: Box<RunConfig> },
    /// Opens the device with the Programs of a plan.
    Open {
        version: u32,
        device: Box<DeviceSpec>,
        set: Box<ProgramSet>,
        placement: Placement,
        precision: DType,
        algorithms: Option<GemmAlgorithms>,
        /// Time without a message from the run after which the process closes the device.
        run_timeout: Duration,
    },
    /// Executes commands in order, up to the first that fails.
    Execute {
        /// Sequence number of the team's attempt at its work. A higher number than before makes the device forget
        /// aborts and messages of earlier attempts.
        attempt: u64,
        commands: Vec<Command>,
    },
    /// Answers a [`Response::ReadFile`], followed by the bytes that were read, or a [`Response::WriteFile`]. `error`
    /// tells why the file access failed.
    FileReply { error: Option<String> },
    /// Replaces the Programs and the placement of the open device by those of another plan.
    Adopt { set: Box<ProgramSet>, placement: Placement },
    /// Asks for the address at which peers reach the process.
    GetAddress,
    /// Measures the links to the other ranks, which receive the same request.
    MeasureLinks { rank: u32, invitation: InvitationMessage },
    /// Joins the device to a team.
    JoinTeam { rank: u32, invitation: InvitationMessage },
    /// Closes the device.
    Close,
    /// Out of band: asks whether the device responds.
    Ping,
    /// Out of band: aborts an attempt of the team, because `rank` has failed.
    Abort { attempt: u64, rank: u32, reason: String },
    /// Out of band: cancels the team with this secret.
    CancelTeam { secret: String },
}

/// A method call on the open device or on its memory, sent to the device's process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    /// Writes bytes into a slot of a tensor. They are the next `bytes` bytes after the JSON of the request.
    Write { tensor: TensorId, slot: u32, bytes: u64 },
    /// Runs a Program from its op number `first_op` on. Fault injection reports an out-of-memory error at op number
    /// `refuses_at`; `None` injects nothing.
    Run { program: ProgramKind, micro_batch: u32, first_op: u32, is_last_micro_batch: bool, refuses_at: Option<u32> },
    /// Waits until all queued Programs have finished. Returns compute seconds and the collective backend.
    Synchronize,
    /// Multiplies the compute time of a simulated device by this factor, for fault injection.
    SlowDown(f64),
    /// Returns the first `bytes` bytes in a slot of a tensor.
    Read { tensor: TensorId, slot: u32, bytes: u64 },
    /// Returns the bytes of a memory space from `first` up to, but without, `end`.
    View { space: Space, first: u64, end: u64 },
    /// Copies bytes into a memory space, from byte `first` on. They are the next `bytes` bytes after the JSON of the
    /// request.
    Fill { space: Space, first: u64, bytes: u64 },
    /// Overwrites the bytes of an arena from `first` up to, but without, `end` with NaN.
    Poison { space: Space, first: u64, end: u64 },
    /// Returns the offset just past the highest byte that was written in a memory space.
    HighWater(Space),
    /// Returns whether bytes next to the arena of a memory space, which belong to no tensor, were written. Always false
    /// for the scratch file.
    HasStrayWrites(Space),
    /// Returns total, free and held memory of the device.
    AvailableMemory,
}

/// A response from the process of a device. Raw bytes may follow it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Response {
    Described(Box<DeviceSpec>),
    Address(String),
    /// Speeds of the links from this process to each rank, in rank order. `None` for itself and for links that the peer
    /// measured.
    Links(Vec<Option<LinkSpeeds>>),
    Opened {
        address: String,
        arenas: ArenaSizes,
        algorithms: Option<GemmAlgorithms>,
    },
    Done(CommandResult),
    /// Asks the run to read bytes of a tensor from a file. The run answers with [`Request::FileReply`].
    ReadFile {
        tensor: String,
        offset: u64,
        bytes: u64,
    },
    /// Asks the run to write bytes into the file of a tensor; they follow this response. The run answers with
    /// [`Request::FileReply`].
    WriteFile {
        tensor: String,
        offset: u64,
    },
    Failed(ErrorReply),
}

/// Speeds of a link in both directions, as seen by the rank that measured it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkSpeeds {
    /// Bandwidth and latency from the measuring rank to its peer.
    pub to_peer: Link,
    /// Bandwidth and latency from the peer to the measuring rank.
    pub from_peer: Link,
}

/// Sizes of a remote device's arenas and scratch file.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ArenaSizes {
    pub device: Bytes,
    pub host: Bytes,
    pub scratch: Bytes,
}

/// Result of the last command of a [`Request::Execute`]. Fields for which that command has no result keep their
/// default.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct CommandResult {
    /// Result of [`Command::HighWater`]: the offset just past the highest byte written in the memory space that the
    /// command names; 0 if none was written.
    pub bytes: Bytes,
    /// Result of [`Command::SlowDown`] (whether the device supports it) or [`Command::HasStrayWrites`] (whether there
    /// were any).
    pub flag: bool,
    pub compute_seconds: Option<f64>,
    pub collectives: Option<CollectiveBackend>,
    pub memory: Option<MemoryReport>,
}

/// Total, free and held memory of a remote device.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct MemoryReport {
    pub total: Bytes,
    pub free: Bytes,
    pub bound_by: String,
    pub held: Bytes,
    /// Peak bytes of the process, or bytes that the process holds on its GPU, with the method of measurement. `None` if
    /// the system reports neither.
    pub measured: Option<(Bytes, MeasuredBy)>,
}

/// A [`DeviceError`] as it is sent to the run.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ErrorReply {
    PeerAborted { rank: u32, reason: String },
    PeerUnreachable { rank: u32, reason: String },
    Lost(String),
    File { tensor: String, reason: String },
    ChargesExceedPlan { held: Bytes, planned: Bytes },
    Other { out_of_memory: bool, exit: u8, message: String, hints: Vec<String> },
}

impl From<DeviceError> for ErrorReply {
    fn from(error: DeviceError) -> ErrorReply {
        match error {
            DeviceError::PeerAborted { rank, reason } => ErrorReply::PeerAborted { rank, reason },
            DeviceError::PeerUnreachable { rank, reason } => ErrorReply::PeerUnreachable { rank, reason },
            DeviceError::Lost { reason, .. } => ErrorReply::Lost(reason),
            error if error.is_device_lost() => ErrorReply::Lost(error.to_string()),
            DeviceError::File { tensor, source } => ErrorReply::File { tensor, reason: source.to_string() },
            DeviceError::ChargesExceedPlan { held, planned } => ErrorReply::ChargesExceedPlan { held, planned },
            error => {
                let out_of_memory = error.is_out_of_memory();
                let Failure { exit, message, hints } = error.into();
                ErrorReply::Other { out_of_memory, exit: exit as u8, message, hints }
            }
        }
    }
}

impl From<Failure> for ErrorReply {
    fn from(failure: Failure) -> ErrorReply {
        let Failure { exit, message, hints } = failure;
        ErrorReply::Other { out_of_memory: false, exit: exit as u8, message, hints }
    }
}

impl ErrorReply {
    /// Converts the reply into the [`DeviceError`] that it stands for, of the device with this name.
    pub fn into_error(self, device: &str) -> DeviceError {
        match self {
            ErrorReply::PeerAborted { rank, reason } => DeviceError::PeerAborted { rank, reason },
            ErrorReply::PeerUnreachable { rank, reason } => DeviceError::PeerUnreachable { rank, reason },
            ErrorReply::Lost(reason) => DeviceError::Lost { device: device.to_owned(), reason },
            ErrorReply::File { tensor, reason } => DeviceError::File { tensor, source: io::Error::other(reason) },
            ErrorReply::ChargesExceedPlan { held, planned } => DeviceError::ChargesExceedPlan { held, planned },
            ErrorReply::Other { out_of_memory, exit, message, hints } => {
                let failure = Failure { exit: exit_of(exit), message: format!("{device}: {message}"), hints };
                DeviceError::Remote { out_of_memory, failure: Box::new(failure) }
            }
        }
    }
}

/// Converts the number of an exit code into the exit code. An unknown number gives [`Exit::Bug`].
pub(crate) fn exit_of(number: u8) -> Exit {
    let exits = [Exit::Input, Exit::DoesNotFit, Exit::Stopped];
    exits.into_iter().find(|exit| *exit as u8 == number).unwrap_or(Exit::Bug)
}

/// Encodes a message: the length of its JSON as a little-endian `u64`, the JSON, then `bytes`.
pub(crate) fn encode(message: &impl Serialize, bytes: &[u8]) -> Vec<u8> {
    let json = serde_json::to_vec(message).expect("plain data has a JSON form");
    [&(json.len() as u64).to_le_bytes(), &*json, bytes].concat()
}

/// Decodes what [`encode`] produced into the message and the bytes that follow it.
///
/// # Errors
/// A truncated message, or JSON of another type.
pub(crate) fn decode<T: DeserializeOwned>(encoded: &[u8]) -> io::Result<(T, &[u8])> {
    let invalid = |reason: String| io::Error::new(io::ErrorKind::InvalidData, reason);
    let parts = encoded.split_first_chunk().and_then(|(length, rest)| {
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        rest.split_at_checked(length)
    });
    let (json, bytes) = parts.ok_or_else(|| invalid("truncated message".to_owned()))?;
    let message = serde_json::from_slice(json).map_err(|error| invalid(format!("malformed message: {error}")))?;
    Ok((message, bytes))
}
