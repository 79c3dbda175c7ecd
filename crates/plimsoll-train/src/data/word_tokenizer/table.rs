//! Words with their tokens, in a table of fixed size that threads share.

use std::sync::{Mutex, PoisonError};

/// The longest word that the table holds. Longer words are rare.
const WORD_BYTES_MAX: usize = 24;
/// The most tokens of a word that the table holds.
const TOKENS_MAX: usize = 5;
/// Number of parts of the table, each with a lock.
const PARTS: usize = 512;
/// Number of words in a part.
const PART_WORDS: usize = 64;

/// A table of 32,768 words in 1.5 MiB. A word has one possible place, and replaces the word that was there.
pub(super) struct WordTable {
    parts: Box<[Mutex<[Entry; PART_WORDS]>]>,
}

/// A word with its tokens. `count` is 0 in an empty entry.
#[derive(Clone, Copy, Default)]
struct Entry {
    word: WordKey,
    ids: [u32; TOKENS_MAX],
    count: u8,
}

/// The bytes of a word, filled up with zeros, and their number.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct WordKey {
    parts: [u64; WORD_BYTES_MAX / 8],
    bytes: u8,
}

impl WordTable {
    /// Returns an empty table.
    pub fn new() -> WordTable {
        WordTable { parts: (0..PARTS).map(|_| Mutex::new([Entry::default(); PART_WORDS])).collect() }
    }

    /// Passes the tokens of `word` to `visit`. Words that the table lacks get them from `tokenize`.
    ///
    /// # Errors
    /// The error of `tokenize`.
    pub fn visit_tokens<E>(
        &self,
        word: &str,
        tokenize: impl FnOnce() -> Result<Vec<u32>, E>,
        visit: impl FnOnce(&[u32]),
    ) -> Result<(), E> {
        let Some(key) = WordKey::new(word) else {
            visit(&tokenize()?);
            return Ok(());
        };
        let hash = key.hash();
        let (part, index) = ((hash >> 32) as usize % PARTS, (hash >> 48) as usize % PART_WORDS);
        let found = self.parts[part].lock().unwrap_or_else(PoisonError::into_inner)[index];
        if found.count > 0 && found.word == key {
            visit(&found.ids[..found.count.into()]);
            return Ok(());
        }
        let tokens = tokenize()?;
        if (1..=TOKENS_MAX).contains(&tokens.len()) {
            let mut entry = Entry { word: key, count: tokens.len() as u8, ..Entry::default() };
            entry.ids[..tokens.len()].copy_from_slice(&tokens);
            self.parts[part].lock().unwrap_or_else(PoisonError::into_inner)[index] = entry;
        }
        visit(&tokens);
        Ok(())
    }
}

impl WordKey {
    /// Returns `None` if the word is too long for the table.
    fn new(word: &str) -> Option<WordKey> {
        let mut bytes = [0; WORD_BYTES_MAX];
        bytes.get_mut(..word.len())?.copy_from_slice(word.as_bytes());
        let mut parts = [0; WORD_BYTES_MAX / 8];
        for (part, bytes) in parts.iter_mut().zip(bytes.as_chunks().0) {
            *part = u64::from_le_bytes(*bytes);
        }
        Some(WordKey { parts, bytes: word.len() as u8 })
    }

    /// Mixes the bytes by multiplication, of which the upper bits depend on all.
    fn hash(&self) -> u64 {
        const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
        let mix = |hash: u64, part: u64| {
            let product = u128::from(hash ^ part) * u128::from(FACTOR);
            (product >> 64) as u64 ^ product as u64
        };
        self.parts.iter().fold(u64::from(self.bytes) ^ FACTOR, |hash, &part| mix(hash, part)).wrapping_mul(FACTOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::convert::Infallible;

    /// Returns the tokens of a word, made from its bytes, and whether they were computed now.
    fn look_up(table: &WordTable, word: &str) -> (Vec<u32>, bool) {
        let (computed, mut seen) = (Cell::new(false), Vec::new());
        let tokenize = || {
            computed.set(true);
            Ok::<_, Infallible>(word.bytes().map(u32::from).collect())
        };
        table.visit_tokens(word, tokenize, |ids| seen = ids.to_vec()).unwrap();
        (seen, computed.get())
    }

    #[test]
    fn words_are_computed_once() {
        let table = WordTable::new();
        for word in ["a", "ab", "", "a\0", "word", "twelve bytes"] {
            let ids: Vec<u32> = word.bytes().map(u32::from).collect();
            assert_eq!(look_up(&table, word), (ids.clone(), true));
            let is_kept = (1..=TOKENS_MAX).contains(&ids.len());
            assert_eq!(look_up(&table, word), (ids, !is_kept), "{word:?}");
        }
    }

    #[test]
    fn words_that_share_a_place_keep_their_own_tokens() {
        let table = WordTable::new();
        let words: Vec<String> = (0..100_000).map(|number| format!("{number:x}")).collect();
        for word in words.iter().chain(&words) {
            assert_eq!(look_up(&table, word).0, word.bytes().map(u32::from).collect::<Vec<_>>());
        }
        let kept = words.iter().rev().take(10_000).filter(|word| !look_up(&table, word).1).count();
        assert!(kept > 7_000, "{kept} of the last 10,000 words are in the table");
    }
}
