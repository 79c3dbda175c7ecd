//! A `tokenizer.json` as metadata. Two kinds of tokenizers have a form in GGUF:
//!
//! | kind | `tokenizer.ggml.model` | recognized by |
//! |---|---|---|
//! | BPE on bytes, as in GPT-2 | `gpt2` | a pre-tokenizer of type `ByteLevel` |
//! | BPE on characters with bytes as a fallback, as in Llama 2 | `llama` | `byte_fallback`, and spaces written as `▁` |
//!
//! The second kind has no list of merges in GGUF. llama.cpp merges the pair whose token has the highest score, so a token's
//! score is the negative rank of the first merge that makes it.

use super::error::GgufError;
use super::metadata::{Metadata, MetadataValue};
use super::pre_tokenizer;
use crate::data::template::read_own_templates;
use crate::data::{Tokenizer, read_begin_token, read_end_token, read_pad_token};
use plimsoll_device::regular_file;
use serde::Deserialize;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

/// The character that stands for a space.
pub const SPACE: &str = "▁";

/// The kinds of tokens, with their numbers in a file.
pub mod token_kind {
    pub const NORMAL: i32 = 1;
    pub const UNKNOWN: i32 = 2;
    pub const CONTROL: i32 = 3;
    pub const USER_DEFINED: i32 = 4;
    pub const UNUSED: i32 = 5;
    pub const BYTE: i32 = 6;
}

/// The folder of a model with its parsed `tokenizer.json`.
pub struct TokenizerFolder {
    folder: PathBuf,
    path: PathBuf,
    tokenizer: Tokenizer,
    parts: Parts,
}

/// The keys of a `tokenizer.json` that have a form in GGUF.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    model: Model,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

#[derive(Deserialize)]
struct Model {
    #[serde(default)]
    vocab: HashMap<String, u32>,
    #[serde(default)]
    merges: Vec<Merge>,
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
}

/// A merge of two tokens, in the older form `"a b"` or in the newer form `["a", "b"]`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Line(String),
    Pair(String, String),
}

impl Merge {
    /// Returns the text of the merged token.
    fn merged(&self) -> String {
        match self {
            Merge::Line(line) => line.replacen(' ', "", 1),
            Merge::Pair(first, second) => format!("{first}{second}"),
        }
    }

    fn line(&self) -> String {
        match self {
            Merge::Line(line) => line.clone(),
            Merge::Pair(first, second) => format!("{first} {second}"),
        }
    }
}

/// The type of the model in a `tokenizer.json`, which is read before the rest.
#[derive(Deserialize)]
struct ModelKind {
    model: KindOfModel,
}

#[derive(Deserialize)]
struct KindOfModel {
    #[serde(default, rename = "type")]
    kind: Option<String>,
}

/// Choices of the user and of the model for [`TokenizerFolder::metadata`].
pub struct TokenizerRequest<'a> {
    /// V: rows of the model's embedding.
    pub vocab: u64,
    /// Tokens at which generation stops.
    pub end_tokens: &'a [i64],
    /// Name of the pre-tokenizer in llama.cpp; `None` if it is to be recognized.
    pub pre: Option<&'a str>,
    /// A chat template that replaces those of the model's folder.
    pub template: Option<&'a str>,
}

/// A tokenizer in the terms of GGUF.
pub struct ExpressedTokenizer {
    /// Metadata keys that describe the tokenizer.
    pub metadata: Metadata,
    /// Value of `tokenizer.ggml.model`.
    pub kind: &'static str,
    /// Value of `tokenizer.ggml.pre`.
    pub pre: String,
    /// Properties of the tokenizer that llama.cpp does not have and that rarely matter.
    pub notes: Vec<String>,
}

/// Tokens by their ids, with kinds and scores.
struct TokenTable {
    texts: Vec<String>,
    kinds: Vec<i32>,
    scores: Vec<f32>,
}

impl TokenizerFolder {
    /// Reads the tokenizer in a model's folder.
    ///
    /// # Errors
    /// A `tokenizer.json` that is missing or invalid, or whose model is no BPE.
    pub fn open(folder: &Path) -> Result<TokenizerFolder, GgufError> {
        let path = folder.join("tokenizer.json");
        if !regular_file::is_present(&path) {
            return Err(GgufError::NoTokenizer { path });
        }
        let tokenizer = Tokenizer::load(&path)?;
        let refuse = |reason: String| GgufError::Tokenizer { path: path.clone(), reason, hint: String::new() };
        let bytes = regular_file::read(&path).map_err(|error| refuse(format!("cannot read: {error}")))?;
        let kind: ModelKind = serde_json::from_slice(&bytes).map_err(|error| refuse(error.to_string()))?;
        match kind.model.kind.as_deref() {
            // Old files do not name the type, but only a BPE has merges.
            Some("BPE") | None => {}
            Some(other) => {
                return Err(refuse(format!("the model is of type {other}, which is not supported; supported: BPE")));
            }
        }
        let parts: Parts = serde_json::from_slice(&bytes).map_err(|error| refuse(error.to_string()))?;
        Ok(TokenizerFolder { folder: folder.to_owned(), path, tokenizer, parts })
    }

    fn refuse(&self, reason: impl Into<String>, hint: &str) -> GgufError {
        GgufError::Tokenizer { path: self.path.clone(), reason: reason.into(), hint: hint.to_owned() }
    }

    /// Expresses the tokenizer.
    ///
    /// # Errors
    /// A part of the tokenizer that GGUF has no form for, or more tokens than the model's vocabulary has.
    pub fn express(&self, request: &TokenizerRequest) -> Result<ExpressedTokenizer, GgufError> {
        let mut metadata = Metadata::default();
        let mut notes = self.added_token_notes();
        let mut table = self.token_table(request.vocab)?;
        let is_byte_level = pre_tokenizer::is_byte_level(&self.parts.pre_tokenizer);
        let (kind, pre) = if is_byte_level {
            let pre = self.name_pre_tokenizer(request.pre, &mut notes)?;
            ("gpt2", pre)
        } else {
            ("llama", self.check_sentencepiece(request.pre)?)
        };
        metadata.push("tokenizer.ggml.model", kind);
        metadata.push("tokenizer.ggml.pre", &*pre);
        if is_byte_level {
            let merges = self.parts.model.merges.iter().map(Merge::line).collect();
            metadata.push("tokenizer.ggml.merges", MetadataValue::Strings(merges));
        } else {
            self.score(&mut table);
            metadata.push("tokenizer.ggml.scores", MetadataValue::F32s(table.scores));
            metadata.push("tokenizer.ggml.add_space_prefix", self.adds_space_prefix()?);
            if let Some(id) = self.parts.model.unk_token.as_ref().and_then(|token| self.tokenizer.token_id(token)) {
                metadata.push("tokenizer.ggml.unknown_token_id", id);
            }
        }
        metadata.push("tokenizer.ggml.tokens", MetadataValue::Strings(table.texts));
        metadata.push("tokenizer.ggml.token_type", MetadataValue::I32s(table.kinds));
        self.push_special_tokens(request, &mut metadata, &mut notes)?;
        self.push_templates(&mut metadata, request.template)?;
        Ok(ExpressedTokenizer { metadata, kind, pre, notes })
    }

    /// Returns notes about added tokens that take spaces around them, which llama.cpp does not do.
    fn added_token_notes(&self) -> Vec<String> {
        let takes_spaces = |token: &&AddedToken| token.lstrip || token.rstrip || token.single_word;
        let names: Vec<String> =
            self.parts.added_tokens.iter().filter(takes_spaces).map(|token| format!("`{}`", token.content)).collect();
        if names.is_empty() {
            return Vec::new();
        }
        let shown = names.iter().take(3).cloned().collect::<Vec<_>>().join(", ");
        let more = if names.len() > 3 { format!(" and {} more", names.len() - 3) } else { String::new() };
        vec![format!("lstrip, rstrip or single_word of the added tokens {shown}{more} have no effect in llama.cpp")]
    }

    /// Returns the tokens by their ids. Ids without a token, up to the model's vocabulary, become unused tokens.
    fn token_table(&self, vocab: u64) -> Result<TokenTable, GgufError> {
        let Parts { added_tokens, model, .. } = &self.parts;
        let ids = model.vocab.values().copied().chain(added_tokens.iter().map(|token| token.id));
        let needed = ids.max().map_or(0, |id| u64::from(id) + 1);
        if needed > vocab {
            let reason =
                format!("it has a token with id {}, but the model's vocabulary has {vocab} tokens", needed - 1);
            return Err(self.refuse(reason, "use the tokenizer.json that belongs to the model"));
        }
        let mut texts: Vec<Option<&str>> = vec![None; vocab as usize];
        let mut kinds = vec![token_kind::NORMAL; vocab as usize];
        for (text, &id) in &model.vocab {
            texts[id as usize] = Some(text);
            if model.byte_fallback && is_byte_token(text) {
                kinds[id as usize] = token_kind::BYTE;
            }
        }
        for token in added_tokens {
            texts[token.id as usize] = Some(&token.content);
            kinds[token.id as usize] = if token.special { token_kind::CONTROL } else { token_kind::USER_DEFINED };
        }
        if let Some(&id) = model.unk_token.as_ref().and_then(|token| model.vocab.get(token)) {
            kinds[id as usize] = token_kind::UNKNOWN;
        }
        let mut seen: HashSet<&str> = HashSet::new();
        if let Some(twice) = texts.iter().flatten().find(|text| !seen.insert(text)) {
            return Err(self.refuse(format!("two tokens have the text `{twice}`"), ""));
        }
        let mut named = Vec::with_capacity(texts.len());
        for (id, text) in texts.iter().enumerate() {
            if text.is_none() {
                kinds[id] = token_kind::UNUSED;
            }
            named.push(text.map_or_else(|| format!("[PAD{id}]"), str::to_owned));
        }
        Ok(TokenTable { texts: named, kinds, scores: vec![0.0; vocab as usize] })
    }

    /// Returns the name of the pre-tokenizer of a byte-level tokenizer, and refuses other parts without a form in GGUF.
    fn name_pre_tokenizer(&self, pre: Option<&str>, notes: &mut Vec<String>) -> Result<String, GgufError> {
        let Parts { normalizer, model, pre_tokenizer, .. } = &self.parts;
        for step in sequence(normalizer, "normalizers") {
            match step["type"].as_str() {
                Some("NFC") => {
                    notes.push("llama.cpp does not normalize text to NFC, as tokenizer.json does".to_owned())
                }
                _ => return Err(self.refuse(format!("the normalizer {step} has no form in GGUF"), "")),
            }
        }
        let affixes = [
            ("continuing_subword_prefix", &model.continuing_subword_prefix),
            ("end_of_word_suffix", &model.end_of_word_suffix),
        ];
        for (key, affix) in affixes {
            if let Some(affix) = affix.as_ref().filter(|affix| !affix.is_empty()) {
                return Err(self.refuse(format!("`{key}` is `{affix}`, which has no form in GGUF"), ""));
            }
        }
        if let Some(pre) = pre {
            return Ok(pre.to_owned());
        }
        pre_tokenizer::recognize(pre_tokenizer, model.ignore_merges)
            .map(str::to_owned)
            .map_err(|steps| GgufError::UnknownPreTokenizer { path: self.path.clone(), steps })
    }

    /// Checks that a tokenizer without byte-level words is of the second kind. Returns the name of its pre-tokenizer.
    fn check_sentencepiece(&self, pre: Option<&str>) -> Result<String, GgufError> {
        let model = &self.parts.model;
        if !model.byte_fallback {
            let reason = "it is neither a byte-level BPE (ByteLevel) nor a BPE with byte_fallback";
            return Err(self.refuse(reason, "llama.cpp has no other tokenizers for these models"));
        }
        if let Some(missing) = (0..256).map(byte_token).find(|token| !model.vocab.contains_key(token)) {
            return Err(self.refuse(format!("`byte_fallback` is true, but the token `{missing}` is missing"), ""));
        }
        Ok(pre.unwrap_or("default").to_owned())
    }

    /// Returns whether a space is put before a text.
    fn adds_space_prefix(&self) -> Result<bool, GgufError> {
        let (mut prefix, mut replaces) = (false, false);
        for step in sequence(&self.parts.normalizer, "normalizers") {
            match step["type"].as_str() {
                Some("Prepend") if step["prepend"] == SPACE => prefix = true,
                Some("Replace") if step["pattern"]["String"] == " " && step["content"] == SPACE => replaces = true,
                _ => return Err(self.refuse(format!("the normalizer {step} has no form in GGUF"), "")),
            }
        }
        let normalizer_replaces = replaces;
        for step in sequence(&self.parts.pre_tokenizer, "pretokenizers") {
            if normalizer_replaces && is_space_split(step) {
                // No space is left.
                continue;
            }
            if step["type"] != "Metaspace" || step["replacement"] != SPACE || step["split"] != false {
                return Err(self.refuse(format!("the pre-tokenizer {step} has no form in GGUF"), ""));
            }
            replaces = true;
            prefix |= match step["prepend_scheme"].as_str() {
                Some(scheme) => scheme != "never",
                None => step["add_prefix_space"] != false,
            };
        }
        if replaces { Ok(prefix) } else { Err(self.refuse(format!("spaces are not written as `{SPACE}`"), "")) }
    }

    /// Sets the scores: the negative rank of the first merge that makes a token. Tokens that no merge makes get the lowest.
    fn score(&self, table: &mut TokenTable) {
        let model = &self.parts.model;
        table.scores.fill(-(model.merges.len() as f32) - 1.0);
        for (rank, merge) in model.merges.iter().enumerate().rev() {
            if let Some(&id) = model.vocab.get(&merge.merged()) {
                table.scores[id as usize] = -(rank as f32);
            }
        }
    }

    /// Adds the ids of special tokens, and whether they are put around a text.
    fn push_special_tokens(
        &self,
        request: &TokenizerRequest,
        metadata: &mut Metadata,
        notes: &mut Vec<String>,
    ) -> Result<(), GgufError> {
        let is_token = |id: &u32| u64::from(*id) < request.vocab;
        let (prefix, suffix) = self.tokenizer.surrounding();
        let begin = match prefix {
            [] => read_begin_token(&self.folder)?.filter(is_token),
            [token] => Some(*token),
            more => {
                let reason = format!("it puts {} tokens before each text; GGUF can express one", more.len());
                return Err(self.refuse(reason, ""));
            }
        };
        let named_end = read_end_token(&self.folder)?.filter(is_token);
        let mut ends: Vec<u32> =
            request.end_tokens.iter().filter_map(|id| u32::try_from(*id).ok()).filter(is_token).collect();
        if let Some(end) = named_end.filter(|end| ends.is_empty() || ends.contains(end)) {
            ends.retain(|id| *id != end);
            ends.insert(0, end);
        }
        let [end, ..] = ends[..] else {
            let reason = "the model has no end token; llama.cpp would stop at a token of its own choice";
            return Err(self.refuse(reason, "name it: eos_token_id in generation_config.json"));
        };
        if !suffix.is_empty() && suffix != [end] {
            let reason =
                format!("it puts the tokens {suffix:?} after each text; GGUF can express the end token {end} only");
            return Err(self.refuse(reason, ""));
        }
        if let Some(begin) = begin {
            metadata.push("tokenizer.ggml.bos_token_id", begin);
        }
        for (key, id) in ["eos", "eot", "eom"].into_iter().zip(&ends) {
            metadata.push(format!("tokenizer.ggml.{key}_token_id"), *id);
        }
        if ends.len() > 3 {
            notes.push(format!("GGUF has keys for three end tokens; llama.cpp may not stop at {:?}", &ends[3..]));
        }
        if let Some(pad) = read_pad_token(&self.folder)?.filter(is_token) {
            metadata.push("tokenizer.ggml.padding_token_id", pad);
        }
        metadata.push("tokenizer.ggml.add_bos_token", !prefix.is_empty());
        metadata.push("tokenizer.ggml.add_eos_token", !suffix.is_empty());
        Ok(())
    }

    /// Adds the chat template `given`, or else those of the model's folder.
    fn push_templates(&self, metadata: &mut Metadata, given: Option<&str>) -> Result<(), GgufError> {
        if let Some(text) = given {
            metadata.push("tokenizer.chat_template", text);
            return Ok(());
        }
        let mut names = Vec::new();
        for (name, text) in read_own_templates(&self.folder)? {
            if name == "default" {
                metadata.push("tokenizer.chat_template", &*text);
            } else {
                metadata.push(format!("tokenizer.chat_template.{name}"), &*text);
                names.push(name);
            }
        }
        if !names.is_empty() {
            metadata.push("tokenizer.chat_templates", MetadataValue::Strings(names));
        }
        Ok(())
    }

    /// Returns the texts of tokens.
    pub fn token_texts(&self, ids: &[i64]) -> Vec<String> {
        let ids: HashSet<i64> = ids.iter().copied().collect();
        let Parts { added_tokens, model, .. } = &self.parts;
        let added = added_tokens.iter().filter(|token| ids.contains(&i64::from(token.id)));
        let mut texts: Vec<(u32, &str)> = added.map(|token| (token.id, token.content.as_str())).collect();
        let in_vocab = model.vocab.iter().filter(|(_, id)| ids.contains(&i64::from(**id)));
        texts.extend(in_vocab.map(|(text, id)| (*id, text.as_str())));
        texts.sort_unstable();
        texts.dedup_by_key(|(id, _)| *id);
        texts.into_iter().map(|(_, text)| text.to_owned()).collect()
    }
}

/// Returns the steps of a part in their order; none if the part is absent.
fn sequence<'a>(part: &'a Value, key: &str) -> Vec<&'a Value> {
    match part {
        Value::Null => Vec::new(),
        _ => match part[key].as_array() {
            Some(steps) => steps.iter().flat_map(|step| sequence(step, key)).collect(),
            None => vec![part],
        },
    }
}

/// Returns whether a step of a pre-tokenizer splits at spaces, as in Gemma.
fn is_space_split(step: &Value) -> bool {
    step["type"] == "Split" && step["pattern"]["String"] == " " && step["invert"] != true
}

/// Returns the text of the token that stands for a byte.
pub fn byte_token(byte: u32) -> String {
    format!("<0x{byte:02X}>")
}

fn is_byte_token(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

#[cfg(test)]
mod tests;
