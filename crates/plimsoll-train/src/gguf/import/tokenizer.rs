//! The tokenizer of a GGUF file as a `tokenizer.json` and the files beside it.

use crate::gguf::file::GgufFile;
use crate::gguf::pre_tokenizer;
use crate::gguf::tokenizer::{SPACE, byte_token, token_kind};
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// Longest token of a BPE with scores, in bytes: all its splits are looked up.
const PIECE_BYTES_MAX: usize = 512;

/// The files of a tokenizer, by name, with their content.
pub struct TokenizerFiles {
    /// The `tokenizer.json`.
    pub tokenizer: Value,
    /// The `tokenizer_config.json`.
    pub config: Value,
    /// Chat templates by name; that of the model is `default`.
    pub templates: Vec<(String, String)>,
}

/// Reads the tokenizer of a file; `None` if the file has none.
///
/// # Errors
/// A description of the part that is missing or not supported.
pub fn read_tokenizer(file: &GgufFile) -> Result<Option<TokenizerFiles>, String> {
    let keys = &file.keys;
    let Some(kind) = keys.get("tokenizer.ggml.model").and_then(Value::as_str) else { return Ok(None) };
    if kind == "no_vocab" || kind == "none" {
        return Ok(None);
    }
    let tokens = Tokens::of(file)?;
    let (model, splitting) = match kind {
        "gpt2" => byte_level(file, &tokens)?,
        "llama" => sentencepiece(file, &tokens)?,
        other => return Err(format!("`tokenizer.ggml.model` is {other}; gpt2 and llama are supported")),
    };
    let begin = tokens.special(file, "bos");
    let is_set = |key: &str, default: bool| keys.get(key).and_then(Value::as_bool).unwrap_or(default);
    let adds_begin = is_set("tokenizer.ggml.add_bos_token", kind == "llama") && begin.is_some();
    let adds_end = is_set("tokenizer.ggml.add_eos_token", false);
    let around = [adds_begin.then_some("bos"), adds_end.then_some("eos")];
    let mut tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": tokens.added(), "model": model,
        "post_processor": template(file, &tokens, around),
    });
    for (key, value) in splitting {
        tokenizer[key] = value;
    }
    let mut config = Map::new();
    config.insert("tokenizer_class".to_owned(), json!("PreTrainedTokenizerFast"));
    for (key, name) in [("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")]
    {
        config.insert(key.to_owned(), json!(tokens.special(file, name).map(|(_, text)| text)));
    }
    config.insert("add_bos_token".to_owned(), adds_begin.into());
    config.insert("add_eos_token".to_owned(), adds_end.into());
    config.insert("clean_up_tokenization_spaces".to_owned(), false.into());
    Ok(Some(TokenizerFiles { tokenizer, config: Value::Object(config), templates: templates(file) }))
}

/// Returns the chat templates of a file, by name.
fn templates(file: &GgufFile) -> Vec<(String, String)> {
    let text = |(key, value): (&String, &Value)| {
        let name = key.strip_prefix("tokenizer.chat_template")?;
        let name = if name.is_empty() { "default" } else { name.strip_prefix('.')? };
        Some((name.to_owned(), value.as_str()?.to_owned()))
    };
    file.keys.iter().filter_map(text).collect()
}

/// The tokens of a file by their ids.
struct Tokens<'a> {
    texts: Vec<&'a str>,
    kinds: Vec<i64>,
}

impl<'a> Tokens<'a> {
    fn of(file: &'a GgufFile) -> Result<Tokens<'a>, String> {
        let list = |key: &str| file.keys.get(key).and_then(Value::as_array);
        let tokens = list("tokenizer.ggml.tokens").ok_or("`tokenizer.ggml.tokens` is missing")?;
        let texts: Option<Vec<&str>> = tokens.iter().map(Value::as_str).collect();
        let texts = texts.ok_or("`tokenizer.ggml.tokens` is no list of texts")?;
        let kinds: Vec<i64> = match list("tokenizer.ggml.token_type") {
            Some(kinds) => kinds.iter().map(|kind| kind.as_i64().unwrap_or(0)).collect(),
            None => vec![i64::from(token_kind::NORMAL); texts.len()],
        };
        if kinds.len() != texts.len() {
            return Err(format!("{} tokens have {} types in `tokenizer.ggml.token_type`", texts.len(), kinds.len()));
        }
        Ok(Tokens { texts, kinds })
    }

    fn is(&self, id: usize, kind: i32) -> bool {
        self.kinds[id] == i64::from(kind)
    }

    /// Returns id and text of a special token; `None` if the file names none.
    fn special(&self, file: &GgufFile, name: &str) -> Option<(u64, &'a str)> {
        let id = file.keys.get(&format!("tokenizer.ggml.{name}_token_id"))?.as_u64()?;
        Some((id, *self.texts.get(usize::try_from(id).ok()?)?))
    }

    /// Returns the ids and texts of all tokens but those that fill up the vocabulary.
    fn used(&self) -> impl Iterator<Item = (usize, &'a str)> + '_ {
        let is_used = |&(id, _): &(usize, &str)| !self.is(id, token_kind::UNUSED);
        self.texts.iter().copied().enumerate().filter(is_used)
    }

    /// Returns the vocabulary of the BPE.
    fn vocabulary(&self) -> Map<String, Value> {
        self.used().map(|(id, text)| (text.to_owned(), json!(id))).collect()
    }

    /// Returns the tokens that are found in text before it is split.
    fn added(&self) -> Vec<Value> {
        let kinds = [token_kind::CONTROL, token_kind::USER_DEFINED, token_kind::UNKNOWN];
        let is_added = |id: usize| kinds.iter().any(|kind| self.is(id, *kind));
        self.used().filter(|(id, _)| is_added(*id)).map(|(id, text)| self.added_token(id, text)).collect()
    }

    /// Returns a token as an element of `added_tokens`.
    fn added_token(&self, id: usize, text: &str) -> Value {
        json!({
            "id": id, "content": text, "special": !self.is(id, token_kind::USER_DEFINED),
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        })
    }
}

type Splitting = Vec<(&'static str, Value)>;

/// Returns model and splitting of a byte-level BPE.
fn byte_level(file: &GgufFile, tokens: &Tokens) -> Result<(Value, Splitting), String> {
    let merges = file.keys.get("tokenizer.ggml.merges").ok_or("`tokenizer.ggml.merges` is missing")?;
    let pre = file.keys.get("tokenizer.ggml.pre").and_then(Value::as_str).unwrap_or("gpt-2");
    let (steps, ignores_merges) = pre_tokenizer::named(pre).ok_or_else(|| {
        format!("the pre-tokenizer `{pre}` is not supported; supported: {}", pre_tokenizer::names().join(", "))
    })?;
    let model = json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": ignores_merges,
        "vocab": tokens.vocabulary(), "merges": merges,
    });
    // Published tokenizers with these patterns normalize.
    let normalizer = if pre.starts_with("qwen") { json!({ "type": "NFC" }) } else { Value::Null };
    let decoder = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
    Ok((model, vec![("normalizer", normalizer), ("pre_tokenizer", steps), ("decoder", decoder)]))
}

/// Returns model and splitting of a BPE with bytes as a fallback. The file has scores: of all pairs of neighbours, the one
/// is merged whose token has the highest. So the merges are all pairs that make a token, in the order of its score.
fn sentencepiece(file: &GgufFile, tokens: &Tokens) -> Result<(Value, Splitting), String> {
    let scores = file.keys.get("tokenizer.ggml.scores").and_then(Value::as_array);
    let scores = scores.ok_or("`tokenizer.ggml.scores` is missing")?;
    if scores.len() != tokens.texts.len() {
        return Err(format!("{} tokens have {} scores", tokens.texts.len(), scores.len()));
    }
    if let Some(missing) = (0..256).map(byte_token).find(|token| !tokens.texts.contains(&&**token)) {
        return Err(format!("the token `{missing}` of a byte is missing"));
    }
    if let Some((id, text)) = tokens.used().find(|(_, text)| text.len() > PIECE_BYTES_MAX) {
        return Err(format!("token {id} has {} bytes; {PIECE_BYTES_MAX} are the most", text.len()));
    }
    let ids: HashMap<&str, usize> = tokens.used().map(|(id, text)| (text, id)).collect();
    let mut merges: Vec<(f64, usize, &str, &str)> = Vec::new();
    for (id, text) in tokens.used().filter(|(id, _)| tokens.is(*id, token_kind::NORMAL)) {
        let score = scores[id].as_f64().unwrap_or(0.0);
        let splits = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
        let pairs = splits.filter(|(first, second)| ids.contains_key(first) && ids.contains_key(second));
        merges.extend(pairs.map(|(first, second)| (score, id, first, second)));
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let merges: Vec<[&str; 2]> = merges.into_iter().map(|(.., first, second)| [first, second]).collect();
    let model = json!({
        "type": "BPE", "dropout": null, "unk_token": tokens.special(file, "unknown").map(|(_, text)| text),
        "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
        "ignore_merges": false, "vocab": tokens.vocabulary(), "merges": merges,
    });
    let adds_space = file.keys.get("tokenizer.ggml.add_space_prefix").and_then(Value::as_bool).unwrap_or(true);
    let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE });
    let prepend = json!({ "type": "Prepend", "prepend": SPACE });
    let steps: Vec<Value> = adds_space.then_some(prepend).into_iter().chain([replace]).collect();
    let restore = json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " });
    let strip = json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 });
    let mut decoders = vec![restore, json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })];
    decoders.extend(adds_space.then_some(strip));
    let splitting = vec![
        ("normalizer", json!({ "type": "Sequence", "normalizers": steps })),
        ("pre_tokenizer", Value::Null),
        ("decoder", json!({ "type": "Sequence", "decoders": decoders })),
    ];
    Ok((model, splitting))
}

/// Returns the post-processor that puts special tokens before and after a text. `around` has their names.
fn template(file: &GgufFile, tokens: &Tokens, around: [Option<&str>; 2]) -> Value {
    let [before, after] = around.map(|name| name.and_then(|name| tokens.special(file, name)));
    if before.is_none() && after.is_none() {
        return Value::Null;
    }
    let special = |token: Option<(u64, &str)>, sequence: u8| {
        token.map(|(_, text)| json!({ "SpecialToken": { "id": text, "type_id": sequence } }))
    };
    let text = |id: &str, sequence: u8| json!({ "Sequence": { "id": id, "type_id": sequence } });
    let part = |id: &str, sequence: u8| {
        [special(before, sequence), Some(text(id, sequence)), special(after, sequence)].into_iter().flatten()
    };
    let used = before.into_iter().chain(after);
    let specials: Map<String, Value> =
        used.map(|(id, text)| (text.to_owned(), json!({ "id": text, "ids": [id], "tokens": [text] }))).collect();
    json!({
        "type": "TemplateProcessing",
        "single": part("A", 0).collect::<Vec<Value>>(),
        "pair": part("A", 0).chain(part("B", 1)).collect::<Vec<Value>>(),
        "special_tokens": specials,
    })
}
