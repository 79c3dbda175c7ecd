//! The tokenizer of a model directory, and its end token. The `tokenizers` crate encodes and decodes; this module adds
//! error messages, keeps its panics and endless work from ending or holding the process, and reads the end token from
//! the configuration files beside `tokenizer.json`.

use super::error::DataError;
use super::placed_token::PlacedToken;
use super::word_tokenizer::WordTokenizer;
use super::{foreign_format, guard, tokenizer_check};
use plimsoll_device::regular_file;
use serde::Deserialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokenizers::ModelWrapper;

/// The longest time for one batch of text. A batch takes about a second.
pub(super) const ENCODE_TIME_MAX: Duration = Duration::from_secs(120);
/// The most special tokens that a tokenizer may put around a text.
const SPECIAL_TOKENS_MAX: usize = 64;

/// The tokenizer of a model: a loaded `tokenizer.json` of the crate `tokenizers`.
#[derive(Clone)]
pub struct Tokenizer {
    file: PathBuf,
    inner: Arc<tokenizers::Tokenizer>,
    /// A shorter way to the same tokens, if there is one for this tokenizer.
    words: Option<Arc<WordTokenizer>>,
    prefix: Vec<u32>,
    suffix: Vec<u32>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. Its truncation and padding settings are ignored, so that no token is dropped silently.
    pub fn load(file: &Path) -> Result<Tokenizer, DataError> {
        let bytes = regular_file::read(file).map_err(DataError::io("read", file))?;
        let invalid = |reason: String| DataError::Tokenizer { file: file.to_owned(), reason };
        foreign_format::check(file, &bytes)?;
        tokenizer_check::check(&bytes).map_err(invalid)?;
        let (inner, probe) = call_library(|| load_without_limits(&bytes)).map_err(invalid)?;
        // The special tokens around a text (a begin token, for most llama models) are the same for every text.
        let added = probe.get_special_tokens_mask();
        let before = added.iter().take_while(|&&mask| mask == 1).count();
        let after = added[before..].iter().rev().take_while(|&&mask| mask == 1).count();
        let count = before + after;
        if count > SPECIAL_TOKENS_MAX {
            let reason = format!("it puts {count} special tokens around a text; the limit is {SPECIAL_TOKENS_MAX}");
            return Err(invalid(reason));
        }
        let ids = probe.get_ids();
        let (prefix, suffix) = (ids[..before].to_vec(), ids[ids.len() - after..].to_vec());
        let words = guard::catch_panic(|| WordTokenizer::new(&inner)).unwrap_or_default().map(Arc::new);
        Ok(Tokenizer { file: file.to_owned(), inner: Arc::new(inner), words, prefix, suffix })
    }

    /// Returns the path of the `tokenizer.json`.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Returns the size of the vocabulary, including added tokens.
    pub fn vocab(&self) -> u64 {
        self.inner.get_vocab_size(true) as u64
    }

    /// Returns the id of the token with exactly this text, and `None` if there is none.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the text of a token, as `tokenizer.json` writes it.
    pub(super) fn token_text(&self, id: u32) -> String {
        self.inner.id_to_token(id).unwrap_or_default()
    }

    /// Returns the ids of the special tokens.
    pub(super) fn special_ids(&self) -> HashSet<u32> {
        let added = self.inner.get_added_tokens_decoder();
        added.into_iter().filter(|(_, token)| token.special).map(|(id, _)| id).collect()
    }

    /// Encodes a prompt: the special tokens that precede every text, then the text. No token follows.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let (tokenizer, text) = (self.clone(), text.to_owned());
        let encoded = guard::run_limited(ENCODE_TIME_MAX, move || tokenizer.encode_text(&text));
        let ids = encoded.and_then(|ids| ids).map_err(|reason| self.encode_error(&reason))?;
        Ok([&self.prefix[..], &ids].concat())
    }

    /// Decodes `ids` to text, without special tokens.
    pub fn decode(&self, ids: &[u32]) -> Result<String, DataError> {
        call_library(|| self.inner.decode(ids, true)).map_err(|reason| self.encode_error(&reason))
    }

    /// Decodes `ids` to text, with special tokens.
    pub(super) fn decode_all(&self, ids: &[u32]) -> Result<String, String> {
        call_library(|| self.inner.decode(ids, false)).map_err(|reason| self.name_file(&reason))
    }

    /// Encodes the text of a whole document, without special tokens.
    pub(super) fn encode_whole(&self, text: &str) -> Result<Vec<u32>, String> {
        call_library(|| self.encode_text(text)).map_err(|reason| self.name_file(&reason))
    }

    fn encode_text(&self, text: &str) -> Result<Vec<u32>, String> {
        if let Some(ids) = self.words.as_ref().map(|words| words.encode(&self.inner, text)).transpose()?.flatten() {
            return Ok(ids);
        }
        Ok(self.inner.encode_fast(text, false).map_err(|reason| reason.to_string())?.get_ids().to_vec())
    }

    /// Encodes a window of a document, without special tokens. Returns the tokens with their places in `text`. It takes
    /// longer than [`Tokenizer::encode_whole`].
    pub(super) fn encode_placed(&self, text: &str) -> Result<Vec<PlacedToken>, String> {
        call_library(|| self.place_tokens(text)).map_err(|reason| self.name_file(&reason))
    }

    fn place_tokens(&self, text: &str) -> Result<Vec<PlacedToken>, String> {
        let words = self.words.as_ref().map(|words| words.encode_placed(&self.inner, text)).transpose()?;
        if let Some(tokens) = words.flatten() {
            return Ok(tokens);
        }
        let encoding = self.inner.encode(text, false).map_err(|reason| reason.to_string())?;
        let words = encoding.get_word_ids();
        let places = encoding.get_ids().iter().zip(encoding.get_offsets()).enumerate();
        let tokens = places.map(|(index, (&id, &(start, end)))| PlacedToken {
            id,
            start: start as u32,
            end: end as u32,
            begins_word: index == 0 || words.get(index) != words.get(index - 1),
        });
        Ok(tokens.collect())
    }

    /// Returns whether a word that is cut between two of its tokens keeps its tokens. Merges of pairs never cross such a
    /// place. Other models choose the tokens of a word as a whole.
    pub(super) fn keeps_tokens_when_cut(&self) -> bool {
        matches!(self.inner.get_model(), ModelWrapper::BPE(_))
    }

    fn encode_error(&self, reason: &str) -> DataError {
        DataError::Encode { location: None, reason: self.name_file(reason) }
    }

    /// Returns a message that names the `tokenizer.json` and the `reason` of a failure.
    pub(super) fn name_file(&self, reason: &str) -> String {
        format!("{} cannot be used: {reason}", self.file.display())
    }

    /// Returns the special tokens that the tokenizer puts before every text, and those that it puts after it.
    pub(crate) fn surrounding(&self) -> (&[u32], &[u32]) {
        (&self.prefix, &self.suffix)
    }

    /// Returns the special tokens that the tokenizer puts before every text.
    pub(super) fn prefix(&self) -> &[u32] {
        &self.prefix
    }

    /// Returns the special tokens that the tokenizer puts after every text. The end token follows them.
    pub(super) fn suffix(&self) -> &[u32] {
        &self.suffix
    }
}

/// Calls the crate `tokenizers`, and returns its errors and panics as messages.
fn call_library<T, E: ToString>(call: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    guard::catch_panic(call)
        .map_err(|panic| format!("the library `tokenizers` fails: {panic}"))?
        .map_err(|reason| reason.to_string())
}

/// Reads a tokenizer, removes its truncation and padding, and encodes a text of one letter with special tokens.
fn load_without_limits(bytes: &[u8]) -> tokenizers::Result<(tokenizers::Tokenizer, tokenizers::Encoding)> {
    let mut inner = tokenizers::Tokenizer::from_bytes(bytes)?;
    inner.with_truncation(None)?;
    inner.with_padding(None);
    let probe = inner.encode("a", true)?;
    Ok((inner, probe))
}

/// Returns the SHA-256 of a file's content, in hexadecimal.
pub(super) fn file_sha256(file: &Path) -> Result<String, DataError> {
    let mut reader = regular_file::open(file).map_err(DataError::io("read", file))?;
    let mut hasher = Sha256::new();
    std::io::copy(&mut reader, &mut hasher).map_err(DataError::io("read", file))?;
    Ok(format!("{:x}", hasher.finalize()))
}

/// Returns the id of the end token of the model in `folder`: that of `eos_token` in `tokenizer_config.json` or
/// `special_tokens_map.json`, else `eos_token_id` of `config.json` (the first, if it is a list; −1 stands for no
/// token). Returns `None` if none of them defines one.
///
/// # Errors
/// An existing file that cannot be read or parsed. A missing file is not an error.
pub fn read_end_token(folder: &Path) -> Result<Option<u32>, DataError> {
    read_named_token(folder, "eos_token", "eos_token_id")
}

/// Returns the id of the begin token of the model in `folder`: that of `bos_token`, else `bos_token_id` of `config.json`.
/// They are found as those of the end token are ([`read_end_token`]).
///
/// # Errors
/// An existing file that cannot be read or parsed. A missing file is not an error.
pub fn read_begin_token(folder: &Path) -> Result<Option<u32>, DataError> {
    read_named_token(folder, "bos_token", "bos_token_id")
}

/// Returns the id of the padding token of the model in `folder`: that of `pad_token`, else `pad_token_id` of
/// `config.json`. They are found as those of the end token are ([`read_end_token`]).
///
/// # Errors
/// An existing file that cannot be read or parsed. A missing file is not an error.
pub(crate) fn read_pad_token(folder: &Path) -> Result<Option<u32>, DataError> {
    read_named_token(folder, "pad_token", "pad_token_id")
}

/// Returns the id of the token that the files beside a tokenizer name under `name_key`, else that under `id_key` of
/// `config.json`.
fn read_named_token(folder: &Path, name_key: &str, id_key: &str) -> Result<Option<u32>, DataError> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum TokenName {
        Plain(String),
        Object { content: String },
    }

    for file in ["tokenizer_config.json", "special_tokens_map.json"] {
        let file = folder.join(file);
        let config: Option<Map<String, Value>> = read_json(&file)?;
        let token = config.and_then(|mut config| config.remove(name_key)).unwrap_or_default();
        let token: Option<TokenName> = serde_json::from_value(token)
            .map_err(|reason| DataError::Tokenizer { file, reason: format!("{name_key}: {reason}") })?;
        let Some(TokenName::Plain(name) | TokenName::Object { content: name }) = token else { continue };
        if let Some(id) = find_token(&folder.join("tokenizer.json"), &name)? {
            return Ok(Some(id));
        }
    }
    let config: Option<Map<String, Value>> = read_json(&folder.join("config.json"))?;
    let ids = match config.and_then(|mut config| config.remove(id_key)).unwrap_or_default() {
        Value::Array(ids) => ids,
        id => vec![id],
    };
    Ok(ids.iter().find_map(Value::as_u64).and_then(|id| id.try_into().ok()))
}

/// Returns the id of the token with the text `name` in a `tokenizer.json`, and `None` if there is none.
fn find_token(tokenizer: &Path, name: &str) -> Result<Option<u32>, DataError> {
    #[derive(Deserialize)]
    struct AddedToken {
        id: u32,
        content: String,
    }
    #[derive(Deserialize)]
    struct AddedTokens {
        #[serde(default)]
        added_tokens: Vec<AddedToken>,
    }
    #[derive(Deserialize)]
    struct Model {
        #[serde(default)]
        vocab: Value,
    }
    #[derive(Deserialize)]
    struct Vocabulary {
        model: Model,
    }

    // The vocabulary takes tens of megabytes, so it is parsed only if the token is not an added one.
    let added: Option<AddedTokens> = read_json(tokenizer)?;
    let Some(AddedTokens { added_tokens }) = added else { return Ok(None) };
    if let Some(token) = added_tokens.into_iter().find(|added| added.content == name) {
        return Ok(Some(token.id));
    }
    let vocabulary: Option<Vocabulary> = read_json(tokenizer)?;
    Ok(vocabulary.and_then(|Vocabulary { model }| match model.vocab {
        Value::Object(ids) => ids.get(name)?.as_u64()?.try_into().ok(),
        // A Unigram model lists its tokens with their scores.
        Value::Array(tokens) => tokens.iter().position(|token| token[0] == name)?.try_into().ok(),
        _ => None,
    }))
}

fn read_json<T: serde::de::DeserializeOwned>(file: &Path) -> Result<Option<T>, DataError> {
    if !regular_file::is_present(file) {
        return Ok(None);
    }
    let mut reader = BufReader::new(regular_file::open(file).map_err(DataError::io("read", file))?);
    foreign_format::check(file, reader.fill_buf().map_err(DataError::io("read", file))?)?;
    serde_json::from_reader(reader)
        .map(Some)
        .map_err(|reason| DataError::Tokenizer { file: file.to_owned(), reason: reason.to_string() })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{TestData, all_rows};
    use super::*;
    use serde_json::json;
    use std::fs;

    /// Returns the reference tokens that `tests/fixtures/word_patterns.py` wrote.
    fn fixture() -> Value {
        serde_json::from_str(include_str!("../../tests/fixtures/word_patterns.json")).unwrap()
    }

    /// Returns the fixture's tokenizer with the word pattern named `pattern`.
    fn tokenizer(fixture: &Value, pattern: &Value) -> String {
        let mut tokenizer = fixture["tokenizer"].clone();
        let regex = &fixture["patterns"][pattern.as_str().unwrap()];
        tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"] = json!({ "Regex": regex });
        tokenizer.to_string()
    }

    #[test]
    fn words_are_split_like_published_tokenizers() {
        let fixture = fixture();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tokenizer.json");
        for case in fixture["cases"].as_array().unwrap() {
            fs::write(&file, tokenizer(&fixture, &case["pattern"])).unwrap();
            let tokenizer = Tokenizer::load(&file).unwrap();
            let text = case["text"].as_str().unwrap();
            let ids = tokenizer.encode(text).unwrap();
            assert_eq!(json!(ids), case["ids"], "{} on {text:?}", case["pattern"]);
            assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        }
    }

    #[test]
    fn text_in_windows_has_tokens_of_whole_text() {
        let fixture = fixture();
        for long in fixture["long"].as_array().unwrap() {
            let cases = fixture["cases"].as_array().unwrap().iter().filter(|case| case["pattern"] == long["pattern"]);
            let text: String = cases.map(|case| case["text"].as_str().unwrap()).collect::<String>().repeat(60);
            assert!(text.len() > 128 << 10, "the text takes several windows");
            let count = long["tokens"].as_u64().unwrap();
            let mut sample = TestData::text(&[&text], count, false);
            sample.spec.vocab = 400;
            sample.spec.end_token = Some(0);
            fs::write(sample.tokenizer.as_ref().unwrap(), tokenizer(&fixture, &long["pattern"])).unwrap();
            let data = sample.open().unwrap();
            assert_eq!(data.tokens(), count + 1);
            let ids = all_rows(&data).tokens;
            let sum: u64 = (1..).zip(&ids).map(|(at, &id)| at * id as u64).sum();
            assert_eq!(json!(sum), long["sum"]);
        }
    }

    #[test]
    fn truncation_and_padding_settings_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tokenizer.json");
        let mut tokenizer = super::super::addition_example::tokenizer();
        tokenizer["truncation"] =
            json!({ "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0 });
        tokenizer["padding"] = json!({
            "strategy": { "Fixed": 9 }, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "0"
        });
        fs::write(&file, tokenizer.to_string()).unwrap();
        assert_eq!(Tokenizer::load(&file).unwrap().encode("12345").unwrap(), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn panicking_tokenizer_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tokenizer.json");
        let mut tokenizer = super::super::addition_example::tokenizer();
        // The only word of this trie points far outside it.
        tokenizer["normalizer"] = json!({ "type": "Precompiled", "precompiled_charsmap": "BAAAAP///39hYgA=" });
        fs::write(&file, tokenizer.to_string()).unwrap();
        let refusal = Tokenizer::load(&file).err().unwrap().to_string();
        let expected = format!("{} cannot be used: the library `tokenizers` fails: index out", file.display());
        assert!(refusal.starts_with(&expected), "{refusal}");
    }

    #[test]
    fn end_token_matches_transformers() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, content: Value| fs::write(folder.path().join(name), content.to_string()).unwrap();
        let end = || read_end_token(folder.path()).unwrap();
        assert_eq!(end(), None);
        write("config.json", json!({ "eos_token_id": null }));
        assert_eq!(end(), None);
        write("config.json", json!({ "eos_token_id": [7, 8] }));
        assert_eq!(end(), Some(7));
        write("config.json", json!({ "eos_token_id": -1 }));
        assert_eq!(end(), None, "-1 is no token");
        write("config.json", json!({ "eos_token_id": [7, 8] }));
        write("tokenizer_config.json", json!({ "eos_token": { "content": "<end>", "lstrip": false } }));
        assert_eq!(end(), Some(7), "no tokenizer.json resolves its name");
        write("tokenizer.json", super::super::addition_example::tokenizer());
        assert_eq!(end(), Some(12));
        write("tokenizer_config.json", json!({ "eos_token": "3" }));
        assert_eq!(end(), Some(3), "a token of the vocabulary");
        write("special_tokens_map.json", json!({ "eos_token": "<end>" }));
        write("tokenizer_config.json", json!({}));
        assert_eq!(end(), Some(12));
        fs::remove_file(folder.path().join("special_tokens_map.json")).unwrap();
        std::os::unix::fs::symlink("nowhere", folder.path().join("special_tokens_map.json")).unwrap();
        assert!(read_end_token(folder.path()).is_err(), "a link to a missing file");
        fs::remove_file(folder.path().join("special_tokens_map.json")).unwrap();
        fs::write(folder.path().join("config.json"), "{").unwrap();
        write("tokenizer_config.json", json!({}));
        assert!(matches!(read_end_token(folder.path()), Err(DataError::Tokenizer { .. })));
    }
}
