//! Decoding of UTF-16 to UTF-8, in bounded memory.

use std::io::{self, ErrorKind, Read};

/// Code units that are decoded at once.
const UNITS: usize = 8 << 10;

/// A reader of UTF-16 bytes that yields UTF-8.
pub(super) struct Utf16Reader<R> {
    inner: R,
    is_little_endian: bool,
    /// UTF-8 that is not read yet, from the index `at` on.
    decoded: Vec<u8>,
    at: usize,
    /// The first half of a surrogate pair, whose second half is not read yet.
    pending: Option<u16>,
}

impl<R: Read> Utf16Reader<R> {
    /// Decodes the bytes after the byte order mark.
    pub fn new(inner: R, is_little_endian: bool) -> Utf16Reader<R> {
        Utf16Reader { inner, is_little_endian, decoded: Vec::new(), at: 0, pending: None }
    }

    /// Decodes the next code units. Decodes nothing at the end.
    fn decode_more(&mut self) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(2 * UNITS);
        self.inner.by_ref().take(2 * UNITS as u64).read_to_end(&mut bytes)?;
        (self.at, self.decoded) = (0, std::mem::take(&mut self.decoded));
        self.decoded.clear();
        let is_end = bytes.len() < 2 * UNITS;
        let (pairs, rest) = bytes.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(io::Error::new(ErrorKind::InvalidData, "UTF-16 text ends inside a character"));
        }
        let from_bytes = if self.is_little_endian { u16::from_le_bytes } else { u16::from_be_bytes };
        let mut units: Vec<u16> =
            self.pending.take().into_iter().chain(pairs.iter().map(|&pair| from_bytes(pair))).collect();
        let is_first_half = |unit: &u16| (0xd800..0xdc00).contains(unit);
        if !is_end && units.last().is_some_and(is_first_half) {
            self.pending = units.pop();
        }
        for character in char::decode_utf16(units) {
            let lone = |_| io::Error::new(ErrorKind::InvalidData, "UTF-16 text has a lone surrogate");
            let character = character.map_err(lone)?;
            self.decoded.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
        }
        Ok(())
    }
}

impl<R: Read> Read for Utf16Reader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at == self.decoded.len() {
            self.decode_more()?;
        }
        let count = buffer.len().min(self.decoded.len() - self.at);
        buffer[..count].copy_from_slice(&self.decoded[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(text: &str, is_little_endian: bool) -> String {
        let bytes: Vec<u8> = text
            .encode_utf16()
            .flat_map(|unit| if is_little_endian { unit.to_le_bytes() } else { unit.to_be_bytes() })
            .collect();
        let mut decoded = String::new();
        Utf16Reader::new(&bytes[..], is_little_endian).read_to_string(&mut decoded).unwrap();
        decoded
    }

    #[test]
    fn both_byte_orders_are_decoded() {
        // The text has surrogate pairs at odd and even places, so that some are cut by the buffer.
        for text in ["", "a", "añ語\u{1f600}", &"x\u{1f600}".repeat(3 * UNITS), &"\u{1f600}".repeat(3 * UNITS)] {
            for is_little_endian in [true, false] {
                assert!(decode(text, is_little_endian) == *text);
            }
        }
    }

    #[test]
    fn broken_utf16_is_refused() {
        for (bytes, reason) in
            [(&b"a\0b"[..], "ends inside"), (b"\x00\xd8a\0", "lone"), (b"\x00\xdc", "lone"), (b"\x00\xd8", "lone")]
        {
            let refusal = Utf16Reader::new(bytes, true).read_to_end(&mut Vec::new()).unwrap_err();
            assert!(refusal.to_string().contains(reason), "{bytes:?}: {refusal}");
        }
    }
}
