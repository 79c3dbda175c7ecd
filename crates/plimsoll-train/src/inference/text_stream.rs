//! The text of generated tokens, piece by piece, up to a stop text.

use super::decoding::EndReason;
use crate::data::{DataError, Tokenizer};

/// Number of tokens before the generated ones that are decoded with them, because the text of a token depends on those
/// before it, for example in a leading space.
const CONTEXT_TOKENS: usize = 16;

/// The tokens and the text that follow a prompt.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Continuation {
    /// Its text.
    pub text: String,
    /// Its tokens, including an end token and those of a stop text.
    pub tokens: Vec<i32>,
    /// The reason for which it ends.
    pub end: EndReason,
}

/// Decodes tokens as they are generated. Pieces of text are given out as soon as no later token can change them.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    stops: &'a [String],
    /// Tokens that are decoded with the next ones, and the tokens whose text is not complete.
    tokens: Vec<u32>,
    /// Number of the tokens in `tokens` whose text was given out.
    known: usize,
    /// Text that may be the beginning of a stop text.
    held: String,
    text: String,
    is_stopped: bool,
}

impl<'a> TextStream<'a> {
    /// Returns a stream of the text after `prompt`, which ends before the first of `stops`. Those must not be empty.
    pub fn new(tokenizer: &'a Tokenizer, stops: &'a [String], prompt: &[i32]) -> TextStream<'a> {
        let start = prompt.len().saturating_sub(CONTEXT_TOKENS);
        let tokens: Vec<u32> = prompt[start..].iter().map(|&id| id as u32).collect();
        let (known, held, text) = (tokens.len(), String::new(), String::new());
        TextStream { tokenizer, stops, tokens, known, held, text, is_stopped: false }
    }

    /// Adds a token. Returns the text that is final now, which may be empty.
    ///
    /// # Errors
    /// Tokens that the tokenizer cannot decode.
    pub fn push(&mut self, token: i32) -> Result<String, DataError> {
        self.tokens.push(token as u32);
        let before = self.tokenizer.decode(&self.tokens[..self.known])?;
        let whole = self.tokenizer.decode(&self.tokens)?;
        // A character of several tokens is incomplete until its last token.
        if whole.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        let piece = self.continuation(&before, &whole)?;
        let start = self.tokens.len().saturating_sub(CONTEXT_TOKENS);
        self.tokens.drain(..start);
        self.known = self.tokens.len();
        Ok(self.take(&piece, false))
    }

    /// Returns the rest of the text, after the last token.
    ///
    /// # Errors
    /// Tokens that the tokenizer cannot decode.
    pub fn finish(&mut self) -> Result<String, DataError> {
        let before = self.tokenizer.decode(&self.tokens[..self.known])?;
        let whole = self.tokenizer.decode(&self.tokens)?;
        self.known = self.tokens.len();
        let piece = self.continuation(&before, &whole)?;
        Ok(self.take(&piece, true))
    }

    /// Returns whether the text has one of the stop texts. No more tokens are of use then.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Returns all text that was given out.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the text of the tokens after the known ones. If those change the text before them, it is their own text.
    fn continuation(&self, before: &str, whole: &str) -> Result<String, DataError> {
        match whole.strip_prefix(before) {
            Some(continuation) => Ok(continuation.to_owned()),
            None => self.tokenizer.decode(&self.tokens[self.known..]),
        }
    }

    /// Adds `piece`, and returns the text that no stop text can begin in. At the end that is all text.
    fn take(&mut self, piece: &str, is_end: bool) -> String {
        if self.is_stopped {
            return String::new();
        }
        self.held.push_str(piece);
        let stop = self.stops.iter().filter_map(|stop| self.held.find(stop)).min();
        let length = match stop {
            Some(start) => start,
            None if is_end => self.held.len(),
            None => self.held.len() - self.stops.iter().map(|stop| begun_bytes(&self.held, stop)).max().unwrap_or(0),
        };
        let rest = self.held.split_off(length);
        let given = std::mem::replace(&mut self.held, rest);
        self.is_stopped = stop.is_some();
        self.text.push_str(&given);
        given
    }
}

/// Returns the length of the longest end of `text` with which `stop` begins.
fn begun_bytes(text: &str, stop: &str) -> usize {
    let lengths = (1..stop.len().min(text.len() + 1)).rev();
    lengths.into_iter().find(|&length| stop.is_char_boundary(length) && text.ends_with(&stop[..length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::addition_example;
    use std::fs;

    /// Returns the pieces of the text of `tokens`, and whether a stop text ended it.
    fn pieces(stops: &[&str], prompt: &[i32], tokens: &[i32]) -> (Vec<String>, bool) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tokenizer.json");
        fs::write(&file, addition_example::tokenizer().to_string()).unwrap();
        let tokenizer = Tokenizer::load(&file).unwrap();
        let stops: Vec<String> = stops.iter().map(|&stop| stop.to_owned()).collect();
        let mut stream = TextStream::new(&tokenizer, &stops, prompt);
        let mut pieces = Vec::new();
        for &token in tokens {
            pieces.push(stream.push(token).unwrap());
            if stream.is_stopped() {
                break;
            }
        }
        pieces.push(stream.finish().unwrap());
        assert_eq!(stream.text(), pieces.concat());
        (pieces, stream.is_stopped())
    }

    #[test]
    fn pieces_are_the_text_of_the_tokens() {
        let (found, stopped) = pieces(&[], &[1, 2], &[3, 10, 4]);
        assert_eq!((found, stopped), (vec!["3".to_owned(), "+".into(), "4".into(), String::new()], false));
    }

    #[test]
    fn text_ends_before_a_stop_text() {
        let all = |stops: &[&str]| pieces(stops, &[], &[1, 2, 3, 4, 5, 6]);
        assert_eq!(
            all(&["45"]),
            (
                ["1", "2", "3", "", "", ""].map(String::from)[..5]
                    .to_vec()
                    .into_iter()
                    .chain([String::new()])
                    .collect(),
                true
            )
        );
        assert_eq!(all(&["46"]).0.concat(), "123456", "the beginning of a stop text is given out later");
        assert_eq!(all(&["69"]), (["1", "2", "3", "4", "5", "", "6"].map(String::from).to_vec(), false));
        assert_eq!(all(&["56", "3"]).0.concat(), "12", "the first stop text in the text counts");
    }

    #[test]
    fn beginnings_of_stop_texts_are_found() {
        assert_eq!(begun_bytes("abc", "cd"), 1);
        assert_eq!(begun_bytes("abc", "bcd"), 2);
        assert_eq!(begun_bytes("abc", "abcd"), 3);
        assert_eq!(begun_bytes("abc", "x"), 0);
        assert_eq!(begun_bytes("é", "éa"), 2);
        assert_eq!(begun_bytes("", "ab"), 0);
    }
}
