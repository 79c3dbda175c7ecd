//! A shorter way through byte-level tokenizers: a text is cut into words, and the tokens of words that were seen before
//! come from a table.
//!
//! The crate `tokenizers` copies a text several times, and keeps the place of each character through all steps. Nearly
//! all words of a text were seen before, so their tokens need none of this. Words that are new still get their tokens from
//! the crate's model.
//!
//! It knows tokenizers that consist of
//! - the normalizer NFC or none (texts that NFC would change take the long way),
//! - added tokens that match as they are written,
//! - patterns and digits that split a text, then the byte-level step,
//! - a BPE model with a token for each byte.
//!
//! For other tokenizers there is none, and the crate does all work. Tests compare both ways.

mod pattern;
mod table;
#[cfg(test)]
mod tests;

use super::placed_token::PlacedToken;
use aho_corasick::{AhoCorasick, MatchKind};
use pattern::{GPT2_PATTERN, Splitter, SplitterMemory, WordPattern, visit_words};
use serde_json::Value;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use table::WordTable;
use tokenizers::{Model, ModelWrapper, Tokenizer};
use unicode_normalization_alignments::{IsNormalized, is_nfc_quick};

/// Bytes that no text in UTF-8 has.
const INVALID_BYTES: [u8; 13] = [0xc0, 0xc1, 0xf5, 0xf6, 0xf7, 0xf8, 0xf9, 0xfa, 0xfb, 0xfc, 0xfd, 0xfe, 0xff];

/// The parts of a byte-level tokenizer that a text takes, with a table of words.
pub(super) struct WordTokenizer {
    normalizes: bool,
    /// Added tokens that are looked for first, then those that are looked for in the rest.
    added: [AddedTokens; 2],
    splitters: Vec<Splitter>,
    /// The character that stands for each byte in the vocabulary.
    letters: [char; 256],
    /// Shapes of the model's tokens by id.
    shapes: Vec<TokenShape>,
    trim: Option<Trim>,
    table: WordTable,
    /// Memory of splitters that no thread uses at present.
    memory: Mutex<Vec<SplitterMemory>>,
}

/// Tokens that match as they are written, the longest first.
struct AddedTokens {
    automaton: AhoCorasick,
    tokens: Vec<(u32, TokenShape)>,
}

/// The bytes of text that a token stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct TokenShape {
    bytes: u16,
    /// Number of spaces at the beginning.
    leading: u16,
    /// Number of spaces at the end.
    trailing: u16,
}

/// Places of tokens without the spaces at their beginning and end.
#[derive(Clone, Copy, Debug)]
struct Trim {
    /// Whether a single space at the beginning of the text remains.
    keeps_first_space: bool,
}

/// The tokens of a part of a text.
enum Piece<'a> {
    /// An added token.
    Added(u32, TokenShape),
    /// The tokens of a word.
    Word(&'a [u32]),
}

/// A reason to leave a text to the crate.
enum Refusal {
    /// The text needs a step that is not known here.
    OtherWay,
    /// The model fails.
    Model(String),
}

impl WordTokenizer {
    /// Reads the parts of a tokenizer. Returns `None` if one of them is not known.
    pub fn new(tokenizer: &Tokenizer) -> Option<WordTokenizer> {
        let letters = byte_letters();
        let normalizes = match tokenizer.get_normalizer().map(describe) {
            None => false,
            Some(normalizer) if normalizer["type"] == "NFC" => true,
            Some(_) => return None,
        };
        let splitters = read_splitters(&describe(tokenizer.get_pre_tokenizer()?))?;
        let trim = read_trim(&describe(tokenizer.get_post_processor()))?;
        let shapes = read_shapes(tokenizer.get_model(), &letters)?;
        let added = [AddedTokens::read(tokenizer, false)?, AddedTokens::read(tokenizer, true)?];
        let (table, memory) = (WordTable::new(), Mutex::default());
        Some(WordTokenizer { normalizes, added, splitters, letters, shapes, trim, table, memory })
    }

    /// Returns the tokens of `text` without special tokens around it; `None` if the crate has to encode this text.
    /// `tokenizer` is the one whose parts were read.
    ///
    /// # Errors
    /// The message of the crate's model.
    pub fn encode(&self, tokenizer: &Tokenizer, text: &str) -> Result<Option<Vec<u32>>, String> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let visited = self.visit_pieces(tokenizer, text, &mut |_, piece| match piece {
            Piece::Added(id, _) => ids.push(id),
            Piece::Word(word) => ids.extend_from_slice(word),
        });
        visited.map(|()| ids).map_or_else(Refusal::into_result, |ids| Ok(Some(ids)))
    }

    /// Returns the tokens of `text` with their places, as [`WordTokenizer::encode`] does.
    pub fn encode_placed(&self, tokenizer: &Tokenizer, text: &str) -> Result<Option<Vec<PlacedToken>>, String> {
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let visited = self.visit_pieces(tokenizer, text, &mut |start, piece| match piece {
            Piece::Added(id, shape) => tokens.push(self.place(text, start, id, shape, true)),
            Piece::Word(word) => {
                let mut at = start;
                for (index, &id) in word.iter().enumerate() {
                    let shape = self.shape(id);
                    tokens.push(self.place(text, at, id, shape, index == 0));
                    at += usize::from(shape.bytes);
                }
            }
        });
        visited.map(|()| tokens).map_or_else(Refusal::into_result, |tokens| Ok(Some(tokens)))
    }

    /// Returns a token at byte `start` of `text`. A token inside a character has the place of this character.
    fn place(&self, text: &str, start: usize, id: u32, shape: TokenShape, begins_word: bool) -> PlacedToken {
        // The ends of a text are boundaries of characters, so both searches end.
        let (mut start, mut end) = (start.min(text.len()), (start + usize::from(shape.bytes)).min(text.len()));
        while !text.is_char_boundary(end) {
            end += 1;
        }
        while !text.is_char_boundary(start) {
            start -= 1;
        }
        if let Some(Trim { keeps_first_space }) = self.trim {
            let keeps = keeps_first_space && start == 0 && shape.leading == 1;
            start = if keeps { start } else { end.min(start + usize::from(shape.leading)) };
            end = start.max(end - usize::from(shape.trailing).min(end));
        }
        PlacedToken { id, start: start as u32, end: end as u32, begins_word }
    }

    fn shape(&self, id: u32) -> TokenShape {
        self.shapes.get(id as usize).copied().unwrap_or_default()
    }

    /// Calls `visit` with the tokens of each part of a text, and the byte at which it begins.
    fn visit_pieces(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        visit: &mut dyn FnMut(usize, Piece),
    ) -> Result<(), Refusal> {
        if self.normalizes && !text.is_ascii() && is_nfc_quick(text.chars()) != IsNormalized::Yes {
            return Err(Refusal::OtherWay);
        }
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut memory = memory.unwrap_or_else(|| SplitterMemory::new(&self.splitters));
        let [first, second] = &self.added;
        let visited = first.visit_gaps(text, 0, &mut |gap, added| {
            second.visit_gaps(&text[gap.clone()], gap.start, &mut |gap, added| {
                self.visit_words(tokenizer, (&text[gap.clone()], gap.start), &mut memory, visit)?;
                added.into_iter().for_each(|(id, shape)| visit(gap.end, Piece::Added(id, shape)));
                Ok(())
            })?;
            added.into_iter().for_each(|(id, shape)| visit(gap.end, Piece::Added(id, shape)));
            Ok(())
        });
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
        visited
    }

    /// Calls `visit` with the tokens of each word of a text without added tokens. `start` is its place.
    fn visit_words(
        &self,
        tokenizer: &Tokenizer,
        (text, start): (&str, usize),
        memory: &mut SplitterMemory,
        visit: &mut dyn FnMut(usize, Piece),
    ) -> Result<(), Refusal> {
        visit_words(&self.splitters, memory, (text, 0), &mut |range| {
            let word = &text[range.clone()];
            let tokenize = || self.tokenize_word(tokenizer.get_model(), word);
            self.table.visit_tokens(word, tokenize, |ids| visit(start + range.start, Piece::Word(ids)))
        })
    }

    /// Returns the tokens of a word, from the model.
    fn tokenize_word(&self, model: &ModelWrapper, word: &str) -> Result<Vec<u32>, Refusal> {
        let letters: String = word.bytes().map(|byte| self.letters[usize::from(byte)]).collect();
        let tokens = model.tokenize(&letters).map_err(|error| Refusal::Model(error.to_string()))?;
        let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
        let bytes: usize = ids.iter().map(|&id| usize::from(self.shape(id).bytes)).sum();
        if bytes == word.len() { Ok(ids) } else { Err(Refusal::OtherWay) }
    }
}

impl Refusal {
    /// Returns `None` for a text that the crate has to encode, and the message of a model that fails.
    fn into_result<T>(self) -> Result<Option<T>, String> {
        match self {
            Refusal::OtherWay => Ok(None),
            Refusal::Model(reason) => Err(reason),
        }
    }
}

impl AddedTokens {
    /// Reads the added tokens that match before normalization, or those that match after it if `normalized`. Returns
    /// `None` if one of them matches in another way than as it is written.
    fn read(tokenizer: &Tokenizer, normalized: bool) -> Option<AddedTokens> {
        let (mut contents, mut tokens) = (Vec::new(), Vec::new());
        for (id, token) in tokenizer.get_added_tokens_decoder() {
            if token.lstrip
                || token.rstrip
                || token.single_word
                || (token.normalized && tokenizer.get_normalizer().is_some())
            {
                return None;
            }
            if token.normalized == normalized {
                tokens.push((id, TokenShape::of(&token.content, token.content.len())?));
                contents.push(token.content);
            }
        }
        let automaton = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(contents).ok()?;
        Some(AddedTokens { automaton, tokens })
    }

    /// Calls `visit` with the places between added tokens, each with the token that follows it. The last place has none.
    /// Places may be empty. `start` is added to all places.
    fn visit_gaps(
        &self,
        text: &str,
        start: usize,
        visit: &mut dyn FnMut(Range<usize>, Option<AddedToken>) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let mut at = 0;
        if !self.tokens.is_empty() {
            for found in self.automaton.find_iter(text) {
                visit(start + at..start + found.start(), Some(self.tokens[found.pattern().as_usize()]))?;
                at = found.end();
            }
        }
        visit(start + at..start + text.len(), None)
    }
}

impl TokenShape {
    /// Returns the shape of a token that is written as `token` and stands for `bytes` bytes of text. Returns `None` if it
    /// is longer than any real one.
    fn of(token: &str, bytes: usize) -> Option<TokenShape> {
        let is_space = |c: &char| *c == SPACE_LETTER || c.is_whitespace();
        let leading = token.chars().take_while(is_space).count().try_into().ok()?;
        let trailing = token.chars().rev().take_while(is_space).count().try_into().ok()?;
        Some(TokenShape { bytes: bytes.try_into().ok()?, leading, trailing })
    }
}

/// Returns a part of a tokenizer as `tokenizer.json` has it; null if there is none.
fn describe(part: impl serde::Serialize) -> Value {
    serde_json::to_value(part).unwrap_or_default()
}

/// Returns the steps of a part; a sequence has several.
fn steps<'a>(part: &'a Value, sequence: &str) -> &'a [Value] {
    match part[sequence].as_array() {
        Some(steps) if part["type"] == "Sequence" => steps,
        _ => std::slice::from_ref(part),
    }
}

/// Reads the rules that cut a text into words. The last step has to be the byte-level one.
fn read_splitters(part: &Value) -> Option<Vec<Splitter>> {
    let (last, steps) = steps(part, "pretokenizers").split_last()?;
    let mut splitters = Vec::new();
    for step in steps {
        splitters.push(match (step["type"].as_str()?, step["pattern"]["Regex"].as_str()) {
            ("Split", Some(pattern)) if step["behavior"] == "Isolated" && step["invert"] == false => {
                Splitter::Pattern(WordPattern::new(pattern)?)
            }
            ("Digits", _) => Splitter::Digits { single: step["individual_digits"].as_bool()? },
            _ => return None,
        });
    }
    if last["type"] != "ByteLevel" || last["add_prefix_space"] != false {
        return None;
    }
    if last["use_regex"].as_bool()? {
        splitters.push(Splitter::Pattern(WordPattern::new(GPT2_PATTERN)?));
    }
    Some(splitters)
}

/// Reads the rule for the places of tokens: `Some(None)` if they keep their spaces. Special tokens around a text are
/// added elsewhere.
fn read_trim(part: &Value) -> Option<Option<Trim>> {
    let mut trim = None;
    for step in steps(part, "processors").iter().filter(|step| !step.is_null() && step["type"] != "TemplateProcessing")
    {
        if step["type"] != "ByteLevel" || trim.is_some() {
            return None;
        }
        if step["trim_offsets"].as_bool()? {
            trim = Some(Trim { keeps_first_space: step["add_prefix_space"].as_bool()? });
        }
    }
    Some(trim)
}

/// Reads the shapes of all tokens of a model. Returns `None` if it is no BPE model of bytes, or chooses tokens at random.
fn read_shapes(model: &ModelWrapper, letters: &[char; 256]) -> Option<Vec<TokenShape>> {
    let ModelWrapper::BPE(pairs) = model else { return None };
    let is_set = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    let marks_words = is_set(pairs.get_continuing_subword_prefix()) || is_set(&pairs.end_of_word_suffix);
    if pairs.dropout.is_some() || marks_words {
        return None;
    }
    let has_bytes = (0..=255u8)
        .filter(|byte| !INVALID_BYTES.contains(byte))
        .all(|byte| model.token_to_id(letters[usize::from(byte)].encode_utf8(&mut [0; 4])).is_some());
    if !has_bytes {
        return None;
    }
    let count = model.get_vocab_size();
    let (mut shapes, mut found) = (Vec::with_capacity(count), 0);
    for id in 0..u32::try_from(2 * count).ok()? {
        if found == count {
            return Some(shapes);
        }
        let token = model.id_to_token(id);
        found += usize::from(token.is_some());
        let token = token.unwrap_or_default();
        shapes.push(TokenShape::of(&token, token.chars().count())?);
    }
    (found == count).then_some(shapes)
}

/// The number of an added token, and its shape.
type AddedToken = (u32, TokenShape);

/// The character that stands for a space in the vocabulary.
const SPACE_LETTER: char = 'Ġ';

/// Returns the character that stands for each byte in the vocabulary: itself where it is visible in Latin-1, otherwise
/// the next of the characters from U+0100 on.
fn byte_letters() -> [char; 256] {
    let mut next = '\u{100}'..;
    std::array::from_fn(|byte| match byte as u8 {
        byte @ (b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) => char::from(byte),
        _ => next.next().expect("there are more characters"),
    })
}
