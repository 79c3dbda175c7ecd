//! Tokens with their places in a text.

/// A token with its place in a text. It is small, because a batch has a token for up to each byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlacedToken {
    pub id: u32,
    /// Offset in bytes of the token's first character.
    pub start: u32,
    /// Offset in bytes after the token's last character.
    pub end: u32,
    /// Whether a word, as the tokenizer splits the text, begins with this token.
    pub begins_word: bool,
}

impl PlacedToken {
    /// Returns the token at its place in a text that has `bytes` more before it.
    pub fn shifted(self, bytes: u32) -> PlacedToken {
        PlacedToken { start: self.start + bytes, end: self.end + bytes, ..self }
    }
}
