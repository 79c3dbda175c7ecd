//! Rules that cut a text into words: regular expressions of published tokenizers, and digits.

use regex_automata::meta::{Cache, Regex};
use regex_automata::util::syntax;
use regex_automata::{Anchored, Input};
use std::ops::Range;

/// The pattern of the byte-level step of `tokenizers`, which is that of GPT-2.
pub(super) const GPT2_PATTERN: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// White space up to the last character before other text.
const BLANKS_BEFORE_TEXT: &str = r"|\s+(?!\S)";
/// Index of the regular expression for white space in a [`WordPattern`] that has one.
const BLANKS: usize = 1;

/// A rule that cuts a text into words.
#[derive(Debug)]
pub(super) enum Splitter {
    /// A word is a match, or text between two matches.
    Pattern(WordPattern),
    /// A word is a digit if `single`, otherwise a run of digits, or text between them.
    Digits { single: bool },
}

/// A regular expression that cuts a text into words. In place of a lookahead, which needs a slower engine, it has an
/// expression of its own for white space.
#[derive(Debug)]
pub(super) struct WordPattern {
    regex: Regex,
    has_blanks: bool,
}

/// Memory of the engine for regular expressions, one for each splitter. It serves one text after another.
pub(super) struct SplitterMemory(Vec<Option<Cache>>);

impl SplitterMemory {
    /// Returns memory for `splitters`.
    pub fn new(splitters: &[Splitter]) -> SplitterMemory {
        let caches = splitters.iter().map(|splitter| match splitter {
            Splitter::Pattern(pattern) => Some(pattern.regex.create_cache()),
            Splitter::Digits { .. } => None,
        });
        SplitterMemory(caches.collect())
    }
}

/// Calls `visit` with each word of `text` in order: the places that remain after each of `splitters` has cut it.
/// `start` is added to all places.
///
/// # Errors
/// The error of `visit`.
pub(super) fn visit_words<E>(
    splitters: &[Splitter],
    memory: &mut SplitterMemory,
    (text, start): (&str, usize),
    visit: &mut dyn FnMut(Range<usize>) -> Result<(), E>,
) -> Result<(), E> {
    fn cut<E>(
        splitters: &[Splitter],
        caches: &mut [Option<Cache>],
        (text, start): (&str, usize),
        visit: &mut dyn FnMut(Range<usize>) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some((splitter, rest)) = splitters.split_first() else { return visit(start..start + text.len()) };
        let (cache, caches) = caches.split_first_mut().expect("each splitter has its memory");
        let mut at = 0;
        while at < text.len() {
            let end = match (splitter, &mut *cache) {
                (Splitter::Pattern(pattern), Some(cache)) => pattern.end_of_word(text, at, cache),
                (Splitter::Digits { single: true }, _) if text[at..].starts_with(char::is_numeric) => {
                    at + text[at..].chars().next().map_or(0, char::len_utf8)
                }
                _ => end_of_run(text, at, char::is_numeric),
            };
            cut(rest, caches, (&text[at..end], start + at), visit)?;
            at = end;
        }
        Ok(())
    }
    cut(splitters, &mut memory.0, (text, start), visit)
}

/// Returns the end of the longest part of `text` from `at` on whose characters all are in `class`, or all are not.
fn end_of_run(text: &str, at: usize, class: fn(char) -> bool) -> usize {
    let is_inside = text[at..].starts_with(class);
    text[at..].find(|c| class(c) != is_inside).map_or(text.len(), |length| at + length)
}

impl WordPattern {
    /// Reads a pattern. Returns `None` if the faster engine does not know it, or reads it in another way.
    pub fn new(pattern: &str) -> Option<WordPattern> {
        let blanks = [format!(r"{BLANKS_BEFORE_TEXT}|\s+"), format!(r"{BLANKS_BEFORE_TEXT}|\s")];
        let rest = blanks.iter().find_map(|blanks| pattern.strip_suffix(blanks.as_str()));
        let has_blanks = rest.is_some();
        let rest = rest.unwrap_or(pattern);
        if has_possessive_repetition(rest) {
            return None;
        }
        let parts = if has_blanks { vec![rest, r"\s+"] } else { vec![rest] };
        let parts = syntax::parse_many(&parts).ok()?;
        // An empty match would not move on.
        if parts.iter().any(|part| part.properties().minimum_len().is_none_or(|length| length == 0)) {
            return None;
        }
        let regex = Regex::builder().build_many_from_hir(&parts).ok()?;
        Some(WordPattern { regex, has_blanks })
    }

    /// Returns the end of the word that begins at `at`, which is before the end of `text`.
    fn end_of_word(&self, text: &str, at: usize, cache: &mut Cache) -> usize {
        let input = Input::new(text).span(at..text.len());
        let Some(found) = self.regex.search_half_with(cache, &input.clone().anchored(Anchored::Yes)) else {
            let next = self.regex.search_with(cache, &input);
            return next.map_or(text.len(), |next| next.start());
        };
        let end = found.offset();
        if !(self.has_blanks && found.pattern().as_usize() == BLANKS && end < text.len()) {
            return end;
        }
        // The last white space belongs to the text after it, unless it is alone.
        let last = text[at..end].char_indices().next_back().map_or(0, |(index, _)| index);
        if last == 0 { end } else { at + last }
    }
}

/// Returns whether a pattern has a possessive repetition such as `a++`. Both engines accept it, with two meanings. All else
/// that only `fancy-regex` knows is an error of the faster engine.
fn has_possessive_repetition(pattern: &str) -> bool {
    let (mut in_class, mut after_repetition, mut in_count) = (false, false, false);
    let mut characters = pattern.chars().peekable();
    while let Some(c) = characters.next() {
        if c == '+' && after_repetition {
            return true;
        }
        let ends_count = c == '}' && in_count;
        after_repetition = !in_class && (ends_count || matches!(c, '+' | '*' | '?'));
        in_count = (in_count && !ends_count) || (c == '{' && characters.peek().is_some_and(char::is_ascii_digit));
        match c {
            '\\' => drop(characters.next()),
            '[' => in_class = true,
            ']' => in_class = false,
            _ => {}
        }
    }
    false
}
