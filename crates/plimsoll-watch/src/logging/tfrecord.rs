//! The format of TensorBoard event files: records with checksums, and in each a message of Protocol Buffers.
//!
//! | record | bytes |
//! |---|---|
//! | length of the message, little endian | 8 |
//! | masked CRC-32C of the length | 4 |
//! | message | length |
//! | masked CRC-32C of the message | 4 |
//!
//! The messages are those of TensorFlow's `event.proto` and `summary.proto`. Only six of their fields are written, so they
//! are encoded here, without a library.

use crc::{CRC_32_ISCSI, Crc};

/// CRC-32C, the checksum of the records.
static CRC: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);
/// Constant that masks a checksum, as the format prescribes.
const MASK_DELTA: u32 = 0xa282_ead8;
/// Version of the event files, which opens each of them.
const FILE_VERSION: &str = "brain.Event:2";
/// `SessionLog.START`: events of this and later steps replace those that were written before.
const SESSION_START: u64 = 1;

/// Kinds of encoded fields (*wire types*).
const VARINT: u64 = 0;
const FIXED_64: u64 = 1;
const BYTES: u64 = 2;
const FIXED_32: u64 = 5;

/// A number with its name in TensorBoard.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Scalar {
    /// The name, such as `train/loss`.
    pub tag: String,
    /// The number; TensorBoard stores 32 bits.
    pub value: f32,
}

/// Content of an event.
pub(crate) enum Content<'a> {
    /// The version of the file.
    FileVersion,
    /// Events of this step and later ones, in earlier files or before this event, no longer count.
    Restart,
    /// Numbers of a step.
    Scalars(&'a [Scalar]),
}

/// Returns the record of an event. `time` is in seconds since the Unix epoch.
pub(crate) fn record(time: f64, step: u64, content: &Content) -> Vec<u8> {
    let mut event = Vec::new();
    put_key(&mut event, 1, FIXED_64);
    event.extend(time.to_le_bytes());
    if step > 0 {
        put_number(&mut event, 2, step.min(i64::MAX as u64));
    }
    match content {
        Content::FileVersion => put_bytes(&mut event, 3, FILE_VERSION.as_bytes()),
        Content::Restart => {
            let mut session = Vec::new();
            put_number(&mut session, 1, SESSION_START);
            put_bytes(&mut event, 7, &session);
        }
        Content::Scalars(scalars) => put_bytes(&mut event, 5, &summary(scalars)),
    }
    framed(&event)
}

/// Encodes the message `Summary`.
fn summary(scalars: &[Scalar]) -> Vec<u8> {
    let mut summary = Vec::new();
    for Scalar { tag, value } in scalars {
        let mut entry = Vec::new();
        put_bytes(&mut entry, 1, tag.as_bytes());
        put_key(&mut entry, 2, FIXED_32);
        entry.extend(value.to_le_bytes());
        put_bytes(&mut summary, 1, &entry);
    }
    summary
}

/// Puts a message between its length and the checksums.
fn framed(message: &[u8]) -> Vec<u8> {
    let length = (message.len() as u64).to_le_bytes();
    let parts = [&length[..], &masked_checksum(&length), message, &masked_checksum(message)];
    parts.concat()
}

/// Returns the checksum of bytes in its masked form, little endian.
fn masked_checksum(bytes: &[u8]) -> [u8; 4] {
    CRC.checksum(bytes).rotate_right(15).wrapping_add(MASK_DELTA).to_le_bytes()
}

/// Appends the key of a field: its number and its kind.
fn put_key(message: &mut Vec<u8>, field: u64, kind: u64) {
    put_varint(message, field << 3 | kind);
}

/// Appends a whole number.
fn put_number(message: &mut Vec<u8>, field: u64, number: u64) {
    put_key(message, field, VARINT);
    put_varint(message, number);
}

/// Appends text or an encoded message.
fn put_bytes(message: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    put_key(message, field, BYTES);
    put_varint(message, bytes.len() as u64);
    message.extend(bytes);
}

/// Appends a number in groups of seven bits, lowest first.
fn put_varint(message: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        message.push(number as u8 | 0x80);
        number >>= 7;
    }
    message.push(number as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records that TensorBoard's own `RecordWriter` (2.21) wrote, in hexadecimal digits.
    const VERSION: &str = "1800000000000000a37f4b2209000000000000e03f1a0d627261696e2e4576656e743a3266f7e1a8";
    const RESTART: &str = "100000000000000095fbfe1809000000000000f83f10ac023a020801713b788a";
    const SCALARS: &str = "3500000000000000d6c55de609000000000000f83f10ac022a270a110a0a747261696e2f6c6f7373150000803e\
                           0a120a0b747261696e2f65706f636815000000406b1bd179";

    /// Returns a record in hexadecimal digits.
    fn digits(time: f64, step: u64, content: &Content) -> String {
        record(time, step, content).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn checksum_is_that_of_the_published_test_vector() {
        // RFC 3720, B.4: 32 bytes of zeros.
        assert_eq!(CRC.checksum(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn records_equal_those_of_tensorboard() {
        let scalar = |tag: &str, value| Scalar { tag: tag.to_owned(), value };
        assert_eq!(digits(0.5, 0, &Content::FileVersion), VERSION);
        assert_eq!(digits(1.5, 300, &Content::Restart), RESTART);
        let scalars = [scalar("train/loss", 0.25), scalar("train/epoch", 2.0)];
        assert_eq!(digits(1.5, 300, &Content::Scalars(&scalars)), SCALARS);
    }

    #[test]
    fn long_numbers_take_several_bytes() {
        let mut bytes = Vec::new();
        [0, 127, 128, 300, u64::MAX].into_iter().for_each(|number| put_varint(&mut bytes, number));
        let expected = [vec![0, 127, 0x80, 1, 0xac, 2], vec![0xff; 9], vec![1]].concat();
        assert_eq!(bytes, expected);
    }
}
