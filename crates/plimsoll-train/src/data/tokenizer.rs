//! The tokenizer of a model directory, and its end token. The `tokenizers` crate encodes and decodes; this module adds
//! error messages and reads the end token from the configuration files beside `tokenizer.json`.

use super::error::DataError;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};

/// The tokenizer of a model: a loaded `tokenizer.json` of the crate `tokenizers`.
pub struct Tokenizer {
    file: PathBuf,
    inner: tokenizers::Tokenizer,
    prefix: Vec<u32>,
    suffix: Vec<u32>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. Its truncation and padding settings are ignored, so that no token is dropped silently.
    pub fn load(file: &Path) -> Result<Tokenizer, DataError> {
        let bytes = fs::read(file).map_err(DataError::io("read", file))?;
        let invalid =
            |reason: tokenizers::Error| DataError::Tokenizer { file: file.to_owned(), reason: reason.to_string() };
        let mut inner = tokenizers::Tokenizer::from_bytes(&bytes).map_err(invalid)?;
        inner.with_truncation(None).map_err(invalid)?;
        inner.with_padding(None);
        // The special tokens around a text (a begin token, for most llama models) are the same for every text.
        let probe = inner.encode("a", true).map_err(invalid)?;
        let added = probe.get_special_tokens_mask();
        let before = added.iter().take_while(|&&mask| mask == 1).count();
        let after = added[before..].iter().rev().take_while(|&&mask| mask == 1).count();
        let ids = probe.get_ids();
        let (prefix, suffix) = (ids[..before].to_vec(), ids[ids.len() - after..].to_vec());
        Ok(Tokenizer { file: file.to_owned(), inner, prefix, suffix })
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

    /// Encodes a prompt: the special tokens that precede every text, then the text. No token follows.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let mut ids = self.prefix.clone();
        ids.extend(self.encode_piece(text).map_err(|reason| DataError::Encode { location: None, reason })?);
        Ok(ids)
    }

    /// Decodes `ids` to text, without special tokens.
    pub fn decode(&self, ids: &[u32]) -> Result<String, DataError> {
        self.inner.decode(ids, true).map_err(|reason| DataError::Encode { location: None, reason: reason.to_string() })
    }

    /// Encodes a piece of a document, without special tokens.
    pub(super) fn encode_piece(&self, text: &str) -> Result<Vec<u32>, String> {
        let encoding = self.inner.encode_fast(text, false).map_err(|reason| reason.to_string())?;
        Ok(encoding.get_ids().to_vec())
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

/// Returns the SHA-256 of a file's content, in hexadecimal.
pub(super) fn file_sha256(file: &Path) -> Result<String, DataError> {
    let mut reader = fs::File::open(file).map_err(DataError::io("read", file))?;
    let mut hasher = Sha256::new();
    std::io::copy(&mut reader, &mut hasher).map_err(DataError::io("read", file))?;
    Ok(format!("{:x}", hasher.finalize()))
}

/// Returns the id of the end token of the model in `folder`: that of `eos_token` in `tokenizer_config.json`, else
/// `eos_token_id` of `config.json` (the first, if it is a list). Returns `None` if neither defines one.
///
/// # Errors
/// An existing file that cannot be read or parsed. A missing file is not an error.
pub fn read_end_token(folder: &Path) -> Result<Option<u32>, DataError> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum TokenName {
        Plain(String),
        Object { content: String },
    }
    #[derive(Deserialize)]
    struct TokenizerConfig {
        eos_token: Option<TokenName>,
    }
    #[derive(Deserialize)]
    struct AddedToken {
        id: u32,
        content: String,
    }
    #[derive(Deserialize)]
    struct TokenizerFile {
        #[serde(default)]
        added_tokens: Vec<AddedToken>,
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum OneOrMany {
        One(u32),
        Several(Vec<u32>),
    }
    #[derive(Deserialize)]
    struct Config {
        eos_token_id: Option<OneOrMany>,
    }

    let config: Option<TokenizerConfig> = read_json(&folder.join("tokenizer_config.json"))?;
    if let Some(eos) = config.and_then(|config| config.eos_token) {
        let (TokenName::Plain(name) | TokenName::Object { content: name }) = eos;
        // Only the list of added tokens is parsed, because a whole tokenizer takes tens of megabytes.
        let file: Option<TokenizerFile> = read_json(&folder.join("tokenizer.json"))?;
        let id = file.and_then(|file| file.added_tokens.into_iter().find(|added| added.content == name));
        if let Some(added) = id {
            return Ok(Some(added.id));
        }
    }
    let config: Option<Config> = read_json(&folder.join("config.json"))?;
    Ok(config.and_then(|config| config.eos_token_id).and_then(|ids| match ids {
        OneOrMany::One(id) => Some(id),
        OneOrMany::Several(ids) => ids.first().copied(),
    }))
}

fn read_json<T: serde::de::DeserializeOwned>(file: &Path) -> Result<Option<T>, DataError> {
    let reader = match fs::File::open(file) {
        Ok(reader) => std::io::BufReader::new(reader),
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(DataError::Io { action: "read", file: file.to_owned(), source }),
    };
    serde_json::from_reader(reader)
        .map(Some)
        .map_err(|reason| DataError::Tokenizer { file: file.to_owned(), reason: reason.to_string() })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{TestData, all_rows};
    use super::*;
    use serde_json::{Value, json};

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
    fn text_in_pieces_has_tokens_of_whole_text() {
        let fixture = fixture();
        for long in fixture["long"].as_array().unwrap() {
            let cases = fixture["cases"].as_array().unwrap().iter().filter(|case| case["pattern"] == long["pattern"]);
            let text: String = cases.map(|case| case["text"].as_str().unwrap()).collect::<String>().repeat(60);
            assert!(text.len() > 128 << 10, "the text takes several pieces");
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
    fn end_token_matches_transformers() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, content: Value| fs::write(folder.path().join(name), content.to_string()).unwrap();
        let end = || read_end_token(folder.path()).unwrap();
        assert_eq!(end(), None);
        write("config.json", json!({ "eos_token_id": null }));
        assert_eq!(end(), None);
        write("config.json", json!({ "eos_token_id": [7, 8] }));
        assert_eq!(end(), Some(7));
        write("tokenizer_config.json", json!({ "eos_token": { "content": "<end>", "lstrip": false } }));
        assert_eq!(end(), Some(7), "no tokenizer.json resolves its name");
        write("tokenizer.json", super::super::addition_example::tokenizer());
        assert_eq!(end(), Some(12));
        fs::write(folder.path().join("config.json"), "{").unwrap();
        write("tokenizer_config.json", json!({}));
        assert!(matches!(read_end_token(folder.path()), Err(DataError::Tokenizer { .. })));
    }
}
