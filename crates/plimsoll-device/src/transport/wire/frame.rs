//! Frames: the messages that two ranks exchange over a wire, with their header and the bytes of collectives and sends.

use crate::transport::CollectiveCall;
use plimsoll_core::DType;

use std::ops::Range;

/// The purpose of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameKind {
    /// A rank has joined a collective. The payload is the part of its input that the receiver of the frame needs.
    Join,
    /// A rank has summed its own part of an all-reduce over all ranks. The payload is that sum.
    ReducedPart,
    /// A point-to-point send. The payload is the sent bytes.
    Send,
    /// The receiver of a point-to-point send has taken it, at the planned time in the header's `ready_seconds`.
    SendCompleted,
    /// The rank in the header's `number` aborted. The payload is the reason, as text.
    Abort,
}

const FRAME_KINDS: [FrameKind; 5] =
    [FrameKind::Join, FrameKind::ReducedPart, FrameKind::Send, FrameKind::SendCompleted, FrameKind::Abort];

/// The header in front of a frame's body. On the wire it is seven little-endian 64-bit numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct FrameHeader {
    pub kind: FrameKind,
    pub attempt: u64,
    /// Number of collectives that the frame's sender has joined in this attempt. In a `Join` frame it includes the
    /// collective that the frame announces.
    pub collective_index: u64,
    /// Sequence number of the collective or send; in an abort, the rank that aborted.
    pub number: u64,
    /// Planned time when the frame's sender is ready, in seconds since the epoch; in `SendCompleted`, the planned end.
    pub ready_seconds: f64,
    pub duration_seconds: f64,
    /// Number of bytes at the start of the body that hold the signature: the collective, types and sizes.
    pub signature_bytes: u32,
    pub body_bytes: u32,
}

/// Size of a frame's header.
pub(super) const HEADER_BYTES: usize = 56;
/// Most bytes by which the body of a frame may exceed the size of a round. Larger frames are invalid.
pub(super) const MAX_SIGNATURE_BYTES: u64 = 1 << 24;

impl FrameHeader {
    /// Encodes the header.
    pub fn bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let kind = FRAME_KINDS.iter().position(|kind| *kind == self.kind).expect("all kinds are listed");
        let numbers = [
            kind as u64,
            self.attempt,
            self.collective_index,
            self.number,
            self.ready_seconds.to_bits(),
            self.duration_seconds.to_bits(),
            u64::from(self.signature_bytes) << 32 | u64::from(self.body_bytes),
        ];
        bytes.as_chunks_mut().0.iter_mut().zip(numbers).for_each(|(bytes, number)| *bytes = number.to_le_bytes());
        bytes
    }

    /// Decodes a header; `None` if it is invalid.
    pub fn read(bytes: &[u8; HEADER_BYTES]) -> Option<FrameHeader> {
        let at = |index: usize| u64::from_le_bytes(bytes.as_chunks().0[index]);
        let (signature_bytes, body_bytes) = ((at(6) >> 32) as u32, at(6) as u32);
        Some(FrameHeader {
            kind: *FRAME_KINDS.get(usize::try_from(at(0)).ok()?)?,
            attempt: at(1),
            collective_index: at(2),
            number: at(3),
            ready_seconds: f64::from_bits(at(4)),
            duration_seconds: f64::from_bits(at(5)),
            signature_bytes: (signature_bytes <= body_bytes).then_some(signature_bytes)?,
            body_bytes,
        })
    }
}

/// A message between two ranks.
pub(super) struct Frame {
    pub header: FrameHeader,
    pub body: Vec<u8>,
}

impl Frame {
    /// Creates a frame; sets the sizes in the header.
    pub fn new(header: FrameHeader, signature: Vec<u8>, payload: Vec<u8>) -> Frame {
        let (signature_bytes, mut body) = (signature.len() as u32, signature);
        body.extend(payload);
        Frame { header: FrameHeader { signature_bytes, body_bytes: body.len() as u32, ..header }, body }
    }

    /// Returns the signature at the start of the body.
    pub fn signature(&self) -> &[u8] {
        &self.body[..self.header.signature_bytes as usize]
    }

    /// Returns the body without the signature.
    pub fn payload(&self) -> &[u8] {
        &self.body[self.header.signature_bytes as usize..]
    }
}

/// Encodes the properties of a call that all its ranks must agree on: the sizes, and for collectives kind and types.
pub(super) fn signature(call: &CollectiveCall) -> Vec<u8> {
    let mut signature = Vec::new();
    let mut number = |number: u64| signature.extend_from_slice(&number.to_le_bytes());
    match call.collective {
        collective if collective.is_point_to_point() => {
            call.buffers.iter().for_each(|buffer| number(buffer.counts[call.rank as usize] * buffer.dtype.bytes()));
        }
        collective => {
            number(collective as u64);
            for buffer in &call.buffers {
                number(buffer.dtype as u64);
                buffer.counts.iter().for_each(|&count| number(count));
            }
        }
    }
    signature
}

/// Returns the byte range of a rank's part within a piece, given the number of elements of each rank's part.
pub(super) fn part_bytes(counts: &[u64], dtype: DType, rank: u32) -> Range<usize> {
    let first: u64 = counts[..rank as usize].iter().sum();
    let offset = |elements: u64| (elements * dtype.bytes()) as usize;
    offset(first)..offset(first + counts[rank as usize])
}

/// Appends a copy of bytes `range` of the buffer at `from` to `to`. A rank lends this buffer to the transport for a
/// collective.
///
/// # Safety
/// The buffer is lent, and no thread writes it now.
pub(super) unsafe fn append(from: *const u8, range: Range<usize>, to: &mut Vec<u8>) {
    // SAFETY: the caller's promise.
    to.extend_from_slice(unsafe { std::slice::from_raw_parts(from.add(range.start), range.len()) });
}

/// Returns the bytes of this rank's input that `receiver` needs in a collective, of all pieces in order. `None` stands
/// for all ranks, which need the whole part of this rank.
///
/// # Safety
/// The buffers are lent, and no thread writes them now.
pub(super) unsafe fn join_payload(call: &CollectiveCall, receiver: Option<u32>) -> Vec<u8> {
    let mut payload = Vec::new();
    for buffer in &call.buffers {
        let range = match receiver {
            Some(peer) => part_bytes(&buffer.counts, buffer.dtype, peer),
            None => 0..part_bytes(&buffer.counts, buffer.dtype, call.rank).len(),
        };
        // SAFETY: the caller's promise.
        unsafe { append(buffer.input, range, &mut payload) };
    }
    payload
}
