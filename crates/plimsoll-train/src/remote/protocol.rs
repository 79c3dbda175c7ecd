//! Messages between a run and the process of a remote device, and their encoding: a length, JSON, then raw bytes.

use super::Invitation;
use super::links::LinkSpeeds;
use crate::config::RunConfig;
use plimsoll_core::{Bytes, CollectiveBackend, DType, DeviceSpec, Exit, Failure, GemmAlgorithms, MeasuredBy, Space};
use plimsoll_device::device::DeviceError;
use plimsoll_program::{Placement, ProgramKind, ProgramSet, TensorId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io;
use std::time::{Duration, Instant};

/// Version of the messages. Both ends must have the same.
pub const VERSION: u32 = 5;

/// An [`Invitation`] as it is sent to another process. The epoch is sent as elapsed time, because the clocks of two processes
/// differ.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct InvitationMessage {
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
pub(super) enum Request {
    /// Returns the specification of the device that the configuration names.
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
        /// See [`WireTransport::begin_attempt`](plimsoll_device::transport::wire::WireTransport::begin_attempt).
        attempt: u64,
        commands: Vec<Command>,
    },
    /// Reply to [`Response::ReadFile`], followed by the bytes, and to [`Response::WriteFile`].
    FileReply { error: Option<String> },
    /// Replaces the plan of the open device.
    Adopt { set: Box<ProgramSet>, placement: Placement },
    /// Returns the address at which peers reach the process.
    GetAddress,
    /// Measures the links to the other ranks, which receive the same request.
    MeasureLinks { rank: u32, invitation: InvitationMessage },
    /// Joins the device to a team.
    JoinTeam { rank: u32, invitation: InvitationMessage },
    /// Closes the device.
    Close,
    /// Out of band: reports whether the device responds.
    Ping,
    /// Out of band: aborts an attempt of the team, because `rank` has failed.
    Abort { attempt: u64, rank: u32, reason: String },
    /// Out of band: cancels the team with this secret.
    CancelTeam { secret: String },
}

/// A call of one method of the remote device or its memory.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Command {
    /// Writes the next `bytes` of the request into a tensor.
    Write { tensor: TensorId, slot: u32, bytes: u64 },
    /// Runs a Program. `refuses_at` is the op at which fault injection reports an out-of-memory error.
    Run { program: ProgramKind, micro_batch: u32, first_op: u32, is_last_micro_batch: bool, refuses_at: Option<u32> },
    /// Waits until all queued Programs have finished.
    Synchronize,
    /// Sets the compute slowdown of a simulated device.
    SlowDown(f64),
    /// Returns the bytes of a tensor.
    Read { tensor: TensorId, slot: u32, bytes: u64 },
    /// Returns a range of a memory space.
    View { space: Space, first: u64, end: u64 },
    /// Copies the next `bytes` of the request into a memory space.
    Fill { space: Space, first: u64, bytes: u64 },
    /// Overwrites a range of a memory space with a marker.
    Poison { space: Space, first: u64, end: u64 },
    /// Returns the high-water mark of a memory space.
    HighWater(Space),
    /// Returns whether bytes outside the arena were written.
    HasStrayWrites(Space),
    /// Returns the available memory of the device.
    AvailableMemory,
}

/// A response from the process of a device. Raw bytes may follow it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Response {
    Described(Box<DeviceSpec>),
    Address(String),
    /// Speeds by rank; only those that this process measured itself.
    Links(Vec<Option<LinkSpeeds>>),
    Opened {
        address: String,
        arenas: ArenaSizes,
        algorithms: Option<GemmAlgorithms>,
    },
    Done(CommandResult),
    /// Requests bytes of a tensor from a file of the run.
    ReadFile {
        tensor: String,
        offset: u64,
        bytes: u64,
    },
    /// Hands over bytes of a tensor for a file of the run.
    WriteFile {
        tensor: String,
        offset: u64,
    },
    Failed(ErrorReply),
}

/// Bytes of the arena in each memory space.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct ArenaSizes {
    pub device: Bytes,
    pub host: Bytes,
    pub scratch: Bytes,
}

/// Result of the last of the executed commands. Each command sets the fields that it has a result for.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct CommandResult {
    /// High-water mark.
    pub bytes: Bytes,
    /// Whether a slowdown was accepted, or stray writes were found.
    pub flag: bool,
    pub compute_seconds: Option<f64>,
    pub collectives: Option<CollectiveBackend>,
    pub memory: Option<MemoryReport>,
}

/// Available memory of a remote device.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct MemoryReport {
    pub total: Bytes,
    pub free: Bytes,
    pub bound_by: String,
    pub held: Bytes,
    /// Peak bytes of the process, or bytes that the process holds on its GPU, with the method of measurement.
    pub measured: Option<(Bytes, MeasuredBy)>,
}

/// A [`DeviceError`] as it is sent to the run.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ErrorReply {
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
    /// Converts the reply into an error of the device with this name.
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

/// Returns the exit code with this number; an unknown number stands for a bug.
pub(super) fn exit_of(number: u8) -> Exit {
    let exits = [Exit::Input, Exit::DoesNotFit, Exit::Stopped];
    exits.into_iter().find(|exit| *exit as u8 == number).unwrap_or(Exit::Bug)
}

/// Encodes a message: the length of its JSON as a little-endian `u64`, the JSON, then `bytes`.
pub(super) fn encode(message: &impl Serialize, bytes: &[u8]) -> Vec<u8> {
    let json = serde_json::to_vec(message).expect("plain data has a JSON form");
    [&(json.len() as u64).to_le_bytes(), &*json, bytes].concat()
}

/// Decodes what [`encode`] produced into the message and the bytes that follow it.
///
/// # Errors
/// A truncated message, or JSON of another type.
pub(super) fn decode<T: DeserializeOwned>(encoded: &[u8]) -> io::Result<(T, &[u8])> {
    let invalid = |reason: String| io::Error::new(io::ErrorKind::InvalidData, reason);
    let parts = encoded.split_first_chunk().and_then(|(length, rest)| {
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        rest.split_at_checked(length)
    });
    let (json, bytes) = parts.ok_or_else(|| invalid("truncated message".to_owned()))?;
    let message = serde_json::from_slice(json).map_err(|error| invalid(format!("malformed message: {error}")))?;
    Ok((message, bytes))
}
