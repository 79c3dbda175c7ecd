//! Tokens of a long document from the tokens of its windows, so that they are those of the whole text.
//!
//! A tokenizer needs much memory per byte of text, so a long text is tokenized in windows. Two neighbours overlap, and
//! a text is cut only inside a stretch of the overlap in which both windows have the same tokens at the same places.
//! Tokenizers go through a text from left to right, or merge neighbours, so windows that agree stay equal from there
//! on.
//!
//! Windows may disagree: the later one begins inside a group of digits or blanks, for example. It is then tokenized
//! again, from the beginning of a token of the earlier one. If they still disagree, both are tokenized as one text.
//! This goes on up to [`JOINED_BYTES_MAX`].

use super::guard;
use super::placed_token::PlacedToken;
use super::tokenizer::{ENCODE_TIME_MAX, Tokenizer};
use std::ops::Range;

/// Bytes at the ends of an overlap in which tokens may differ, because a window does not show the text beyond its end.
const MARGIN_BYTES: usize = 2 << 10;
/// The fewest equal tokens between which a text is cut.
const EQUAL_TOKENS_MIN: usize = 8;
/// The longest text without a place to cut. It is the longest line of a `.jsonl` file, so only `.txt` files reach it.
const JOINED_BYTES_MAX: usize = 16 << 20;

/// A window of a document's text with its tokens.
pub(super) struct TokenWindow {
    pub text: String,
    /// The byte of the document at which `text` begins.
    pub start: usize,
    pub tokens: Vec<PlacedToken>,
}

/// The windows of one document, joined one by one.
pub(super) struct WindowJoiner {
    /// The text after the last cut, with some text before it.
    window: TokenWindow,
    /// Index of the first token after the last cut.
    first: usize,
    /// Bytes of `window.text` that `window.tokens` belong to.
    tokenized: usize,
}

impl WindowJoiner {
    /// Begins with the first window of a document.
    pub fn new(window: TokenWindow) -> WindowJoiner {
        WindowJoiner { first: 0, tokenized: window.text.len(), window }
    }

    /// Adds the next window, and returns the tokens up to the last cut. `is_last` tells whether the document ends with
    /// this window.
    ///
    /// # Errors
    /// A message, if the tokenizer fails or the text has no place to cut.
    pub fn add(&mut self, next: TokenWindow, is_last: bool, tokenizer: &Tokenizer) -> Result<Vec<u32>, String> {
        if self.tokenized == self.window.text.len() {
            let in_words = tokenizer.keeps_tokens_when_cut();
            if let Some(cut) = self.find_cut(&next, in_words) {
                return Ok(self.cut_before(cut, next));
            }
            let aligned = self.align(&next, tokenizer)?;
            if let Some(cut) = self.find_cut(&aligned, in_words) {
                return Ok(self.cut_before(cut, aligned));
            }
        }
        let text = &mut self.window.text;
        text.push_str(&next.text[self.window.start + text.len() - next.start..]);
        if text.len() > JOINED_BYTES_MAX {
            let (start, limit) = (self.window.start, JOINED_BYTES_MAX >> 20);
            return Err(format!(
                "the text has no place to cut it within {limit} MiB from byte {start} on; add line breaks or split it"
            ));
        }
        // Tokenizing only when the text has doubled keeps the work proportional to the text.
        if is_last || text.len() >= 2 * self.tokenized {
            self.tokenize_again(tokenizer)?;
        }
        Ok(Vec::new())
    }

    /// Returns the tokens after the last cut, up to the end of the document.
    pub fn finish(self) -> impl Iterator<Item = u32> {
        self.window.tokens.into_iter().skip(self.first).map(|token| token.id)
    }

    /// Cuts the text before one token that both windows have: index `cut.0` in the present window, `cut.1` in `next`.
    /// Returns the present window's tokens from the last cut to this one, and replaces the window by `next`.
    fn cut_before(&mut self, cut: (usize, usize), next: TokenWindow) -> Vec<u32> {
        let ids = self.window.tokens[self.first..cut.0].iter().map(|token| token.id).collect();
        *self = WindowJoiner { first: cut.1, ..WindowJoiner::new(next) };
        ids
    }

    /// Finds the same token in this window and in `next`, in the middle of a stretch in which both have equal tokens.
    /// Returns its index in each. A word begins with that token, unless `in_words` allows a cut inside a word.
    fn find_cut(&self, next: &TokenWindow, in_words: bool) -> Option<(usize, usize)> {
        let shift = next.start - self.window.start;
        let (low, high) = (shift + MARGIN_BYTES, self.window.text.len().checked_sub(MARGIN_BYTES)?);
        let here = range_between(&self.window.tokens, self.first, low, high)?;
        let there = range_between(&next.tokens, 0, low - shift, high.checked_sub(shift)?)?;
        let (equal, others) = (&self.window.tokens[here.clone()], &next.tokens[there.clone()]);
        let shifted = others.iter().map(|token| token.shifted(shift as u32));
        if equal.len() < EQUAL_TOKENS_MIN || !shifted.eq(equal.iter().copied()) {
            return None;
        }
        // A character may be split into several tokens, which then have the same place.
        let is_cut = |&at: &usize| equal[at - 1].end <= equal[at].start;
        let middle = equal.len() / 2;
        let mut outwards =
            (0..middle).flat_map(|distance| [middle + distance, middle - distance]).filter(|at| *at < equal.len());
        let word = outwards.clone().find(|at| is_cut(at) && equal[*at].begins_word);
        let at = word.or_else(|| outwards.find(is_cut).filter(|_| in_words))?;
        Some((here.start + at, there.start + at))
    }

    /// Tokenizes the text of `next` again, from the first token or, if there is one, the first word that begins in it.
    fn align(&self, next: &TokenWindow, tokenizer: &Tokenizer) -> Result<TokenWindow, String> {
        let shift = next.start - self.window.start;
        let starts = || self.window.tokens[self.first..].iter().filter(|token| token.start as usize > shift);
        let first = starts().find(|token| token.begins_word).or_else(|| starts().next());
        let skipped = first.map_or(0, |token| token.start as usize - shift);
        let text = next.text.get(skipped..).unwrap_or_default().to_owned();
        Ok(TokenWindow { tokens: tokenizer.encode_placed(&text)?, text, start: next.start + skipped })
    }

    /// Tokenizes the whole text after a window was added to it, and finds the last cut again.
    fn tokenize_again(&mut self, tokenizer: &Tokenizer) -> Result<(), String> {
        let (limited, text) = (tokenizer.clone(), self.window.text.clone());
        let tokens = guard::run_limited(ENCODE_TIME_MAX, move || limited.encode_placed(&text))
            .map_err(|reason| tokenizer.name_file(&reason))??;
        let first = match self.first {
            0 => Some(0),
            first => tokens.iter().position(|token| *token == self.window.tokens[first]),
        };
        self.first = first.ok_or_else(|| {
            format!("its tokens near byte {} depend on distant text; add line breaks or split it", self.window.start)
        })?;
        (self.window.tokens, self.tokenized) = (tokens, self.window.text.len());
        Ok(())
    }
}

/// Returns the range of the tokens that lie between the bytes `low` and `high`, from the index `first` on. There is none
/// unless a token ends after `high`.
fn range_between(tokens: &[PlacedToken], first: usize, low: usize, high: usize) -> Option<Range<usize>> {
    let begin = first + tokens[first..].iter().position(|token| token.start as usize >= low)?;
    let count = tokens[begin..].iter().position(|token| token.end as usize > high)?;
    Some(begin..begin + count)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{TestData, all_rows};
    use super::super::tokenizer::Tokenizer;
    use serde_json::{Value, json};
    use std::fs;

    /// Returns a tokenizer of single characters, and of the pairs of neighbours in `words`, merged in that order.
    fn pair_tokenizer(words: &[&str], normalizer: &Value, words_pattern: Option<&str>) -> Value {
        let mut vocab: Vec<String> = vec!["<unk>".to_owned()];
        let mut merges = Vec::new();
        vocab.extend(" ▁\nabcdefghijklmnopqrstuvwxyz0123456789語文字".chars().map(String::from));
        for word in words {
            let letters: Vec<char> = word.chars().collect();
            let (first, rest) = letters.split_at(letters.len() / 2);
            merges.push((String::from_iter(first), String::from_iter(rest)));
            vocab.push((*word).to_owned());
        }
        let vocab: serde_json::Map<String, Value> = vocab.into_iter().zip((0..).map(Value::from)).collect();
        let split = |pattern| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": normalizer,
            "pre_tokenizer": words_pattern.map(split), "post_processor": null, "decoder": null,
            "model": { "type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "<unk>", "fuse_unk": true }
        })
    }

    /// Checks that `text` in a data file has the tokens of the whole text.
    fn check_tokens(name: &str, text: &str, tokenizer: &Value) {
        let mut sample = TestData::text(&[text], 1, false);
        let file = sample.tokenizer.clone().unwrap();
        fs::write(&file, tokenizer.to_string()).unwrap();
        let whole = Tokenizer::load(&file).unwrap().encode_whole(text).unwrap();
        sample.spec.sequence = whole.len() as u64;
        (sample.spec.vocab, sample.spec.end_token) = (400, Some(0));
        let rows = all_rows(&sample.open().unwrap());
        let ids: Vec<u32> = rows.tokens.iter().map(|&id| id as u32).collect();
        let different = ids.iter().zip(&whole).position(|(id, whole)| id != whole);
        assert_eq!((different, ids.len()), (None, whole.len()), "{name}");
    }

    #[test]
    fn long_documents_have_tokens_of_whole_text() {
        let space = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
        let prepend = json!({ "type": "Prepend", "prepend": "▁" });
        let marked = json!({ "type": "Sequence", "normalizers": [prepend, space] });
        let pairs = ["th", "in", "aa", "aaaa", "▁a", "  ", "    ", "語文", "12", "1212"];
        let sentences = "the autumn rain in a basin\nkept lights\n\n".repeat(3000);
        let digits = "7".to_owned() + &"12".repeat(40_000);
        let blanks = format!("rain{}\n{}the end", " ".repeat(70_001), " ".repeat(9_000));
        let han = "語文字".repeat(9_001);
        let words = r"\p{N}{1,3}|\s*[\r\n/]+|\s+(?!\S)|\s+|[^\s\p{N}]+";
        let sentence_piece = pair_tokenizer(&pairs, &marked, None);
        let word_split = pair_tokenizer(&pairs, &Value::Null, Some(words));
        for (name, text) in [
            ("sentences", &sentences),
            ("one letter", &"a".repeat(80_001)),
            ("digits", &digits),
            ("blanks", &blanks),
            ("han", &han),
            ("unknown run", &format!("{}a rain", "Ω".repeat(80_000))),
        ] {
            check_tokens(&format!("{name}, marked beginning"), text, &sentence_piece);
            check_tokens(&format!("{name}, split into words"), text, &word_split);
        }
    }
}
