//! Texts in windows that overlap: a plain text file, or the text of a record. Memory is bounded by a window.

use super::super::error::{DataError, SourceLocation};
use super::decompress::ByteStream;

/// The longest text that is tokenized at once. A tokenizer needs about 100 bytes of memory per byte of text.
pub(crate) const WINDOW_BYTES: usize = 64 << 10;
/// Bytes between the beginnings of two windows. It is a prime, so that groups of a few characters that a tokenizer
/// counts from the end of a window differ between two windows, and are seen where their tokens are compared.
pub(crate) const WINDOW_STRIDE: usize = 57_397;

/// A window of a text. An empty text has one empty window.
pub(crate) struct Window<'a> {
    pub text: &'a str,
    /// The byte of the text at which the window begins, before the end of the window before it.
    pub start: usize,
    /// Whether this is the last window.
    pub ends: bool,
}

/// The source of a text.
pub(crate) trait TextSource {
    /// Appends up to `count` bytes to `buffer`. Returns the bytes read, fewer only at the end of the text.
    ///
    /// # Errors
    /// A file that cannot be read.
    fn read_bytes(&mut self, buffer: &mut Vec<u8>, count: usize) -> Result<usize, DataError>;
}

impl TextSource for ByteStream {
    fn read_bytes(&mut self, buffer: &mut Vec<u8>, count: usize) -> Result<usize, DataError> {
        ByteStream::read_bytes(self, buffer, count)
    }
}

impl TextSource for &[u8] {
    fn read_bytes(&mut self, buffer: &mut Vec<u8>, count: usize) -> Result<usize, DataError> {
        let (read, rest) = self.split_at(count.min(self.len()));
        buffer.extend_from_slice(read);
        *self = rest;
        Ok(read.len())
    }
}

/// Passes a text to `on_window` in windows that overlap. Where a window ends depends only on the text.
///
/// # Errors
/// A text that cannot be read, has NUL bytes or is not UTF-8.
pub(crate) fn read_windows(
    source: &mut impl TextSource,
    location: impl Fn() -> SourceLocation,
    mut on_window: impl FnMut(Window) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let mut buffer = Vec::new();
    let mut start = 0;
    loop {
        let wanted = 2 * WINDOW_BYTES - buffer.len();
        let ended = source.read_bytes(&mut buffer, wanted)? < wanted;
        let text = match str::from_utf8(&buffer) {
            Ok(text) => text,
            // The last character is incomplete: its other bytes are not read yet.
            Err(error) if error.error_len().is_none() && !ended => {
                str::from_utf8(&buffer[..error.valid_up_to()]).unwrap_or_default()
            }
            Err(_) => return Err(DataError::NotUtf8 { location: location() }),
        };
        if text.len() <= WINDOW_BYTES {
            return on_window(Window { text, start, ends: true });
        }
        let window = &text[..floor_char_boundary(text, WINDOW_BYTES)];
        let next = floor_char_boundary(text, WINDOW_STRIDE);
        on_window(Window { text: window, start, ends: false })?;
        start += next;
        buffer.drain(..next);
    }
}

/// Returns the beginning of the character of `text` at the byte `at`, or `at` if a character begins there.
fn floor_char_boundary(text: &str, at: usize) -> usize {
    (0..=at).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}
