//! Reading and writing `config.json` of a Hugging Face directory.
//!
//! - A key that changes the arithmetic is applied, or refused by name unless its value is neutral.
//! - Keys known to be inert are accepted.
//! - All other keys are refused unless the user ignores them explicitly.
//!
//! Defaults of absent keys are those of the configuration class in transformers 5 (`configuration_llama.py` and so on).
//! Sizes that determine the shapes of weights have no default.

use super::config::{Activation, ConfigError, Extras, ModelConfig, ModelType, limit};
use super::family::{Family, Windows};
use plimsoll_core::DType;
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::collections::BTreeSet;

mod rope;
mod text_part;

pub use text_part::TextPart;

/// Keys of `config.json` that do not change the arithmetic of training: names and versions, defaults of generation and
/// of classifiers, and switches of what transformers returns or caches.
const INERT: &[&str] = &[
    // origin
    "architectures",
    "_name_or_path",
    "name_or_path",
    "_commit_hash",
    "transformers_version",
    "transformers.js_config",
    "is_llama_config",
    "unsloth_fixed",
    "unsloth_version",
    "model_name",
    // storage and execution
    "torch_dtype",
    "dtype",
    "use_cache",
    "use_bfloat16",
    "torchscript",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "cache_implementation",
    "_sliding_window_pattern",
    "attn_implementation",
    "pretraining_tp",
    "keys_to_ignore_at_inference",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "tf_legacy_loss",
    // tokens
    "pad_token_id",
    "unk_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "tokenizer_class",
    "prefix",
    // classifiers and encoders
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "finetuning_task",
    "task_specific_params",
    "is_decoder",
    "tie_encoder_decoder",
    "cross_attention_hidden_size",
    // generation
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
];

/// Returns the keys of `config.json` that Plimsoll does not support in a family, each with the values at which it changes
/// nothing.
fn neutral_switches(family: &Family) -> [(&'static str, Vec<Value>); 13] {
    let off = || vec![json!(false)];
    let none = || vec![json!([]), json!({})];
    let mut activations = vec![json!(family.activation.name())];
    activations.extend((family.activation == Activation::Silu).then(|| json!("swish")));
    [
        ("hidden_act", activations),
        ("attention_dropout", vec![json!(0), json!(0.0)]),
        ("partial_rotary_factor", vec![json!(1), json!(1.0)]),
        ("rope_interleaved", off()),
        ("use_mrope", off()),
        ("is_causal", vec![json!(true)]),
        ("is_encoder_decoder", off()),
        ("add_cross_attention", off()),
        ("chunk_size_feed_forward", vec![json!(0)]),
        ("pruned_heads", none()),
        ("quantization_config", Vec::new()),
        ("per_layer_config", none()),
        ("tie_last_hidden_states", Vec::new()),
    ]
}

/// Largest accepted `query_pre_attn_scalar`.
const QUERY_SCALAR_MAX: u64 = 1 << 20;

/// Largest number of end tokens of a model.
const END_TOKENS_MAX: usize = 64;

impl ModelConfig {
    /// Reads the text of a `config.json`. Of a model with other parts, such as `gemma3`, reads the [`TextPart`].
    ///
    /// `ignore_keys` are keys that the user declares inert (`--ignore-config-key`); a key inside `rope_scaling` is
    /// `rope_scaling.KEY`.
    ///
    /// # Errors
    /// Fails if the text is no JSON object. Otherwise returns the first key that is missing, wrong, unsupported,
    /// contradicted, or ignored although it changes the arithmetic; without such a key, all unknown keys.
    pub fn from_json(text: &str, ignore_keys: &[String]) -> Result<ModelConfig, ConfigError> {
        let root: Value = serde_json::from_str(text).map_err(|e| ConfigError::Json { message: e.to_string() })?;
        let Value::Object(map) = &root else {
            return Err(ConfigError::Json { message: format!("expected an object, found {}", shown(&root)) });
        };
        let Some(text) = TextPart::find(map)? else { return read_whole(map, ignore_keys) };
        read_whole(&text.config, ignore_keys).map_err(|error| text.locate(map, error))
    }

    /// Reads the end tokens from the text of a `generation_config.json`. If a model has this file, generation stops at
    /// these tokens and not at those of `config.json`, as in transformers. No or a null `eos_token_id` means none.
    ///
    /// # Errors
    /// The text is no JSON object, or `eos_token_id` holds no tokens.
    pub fn generation_end_tokens(text: &str) -> Result<Vec<i64>, ConfigError> {
        let map: Map<String, Value> =
            serde_json::from_str(text).map_err(|e| ConfigError::Json { message: e.to_string() })?;
        Ok(Keys::new(&map, "").tokens("eos_token_id", END_TOKENS_MAX)?.unwrap_or_default())
    }

    /// Returns the end tokens as the value of `eos_token_id`.
    pub fn end_tokens_to_json(&self) -> Value {
        match self.eos.as_slice() {
            [] => Value::Null,
            [one] => json!(one),
            several => json!(several),
        }
    }

    /// Returns the `config.json` of this model with weights stored as `dtype`.
    ///
    /// `base` is the `config.json` that the model was read from; its keys are kept unless this model determines them.
    /// A model without end tokens keeps those of `base`: its `generation_config.json` says that there are none.
    /// `None` stands for a model without a file, such as a preset. The key names are those that both transformers 4 and
    /// 5 read: version 4 ignores `rope_parameters` and would compute other frequencies. It does not know `ministral3`, which
    /// has that key.
    pub fn to_json(&self, base: Option<&Value>, dtype: DType) -> Value {
        let mut map = match base {
            Some(Value::Object(map)) => map.clone(),
            _ => Map::new(),
        };
        for other_spelling in ["rope_parameters", "rope_theta", "rope_scaling", "torch_dtype"] {
            map.shift_remove(other_spelling);
        }
        let mut facts = vec![
            ("architectures", json!([self.model_type.architecture()])),
            ("model_type", json!(self.model_type.name())),
            ("hidden_size", json!(self.hidden)),
            ("num_hidden_layers", json!(self.layers)),
            ("num_attention_heads", json!(self.heads)),
            ("num_key_value_heads", json!(self.kv_heads)),
            ("head_dim", json!(self.head_dim)),
            ("intermediate_size", json!(self.ffn)),
            ("vocab_size", json!(self.vocab)),
            ("tie_word_embeddings", json!(self.tied)),
            ("rms_norm_eps", json!(self.norm_eps)),
            ("max_position_embeddings", json!(self.max_positions)),
            ("initializer_range", json!(self.init_std)),
            ("bos_token_id", json!(self.bos)),
            ("dtype", json!(dtype_name(dtype))),
        ];
        facts.extend(rope::to_json(self));
        for (key, value) in facts {
            map.insert(key.to_owned(), value);
        }
        if !self.eos.is_empty() || !map.contains_key("eos_token_id") {
            map.insert("eos_token_id".to_owned(), self.end_tokens_to_json());
        }
        // Switches with a default that differs from this model's value, or between readers.
        let family = self.model_type.family();
        let mut switches = vec![("hidden_act", json!(family.activation.name())), ("attention_dropout", json!(0.0))];
        if family.has_bias_switches {
            let biases = [("attention_bias", self.attention_out_bias), ("mlp_bias", self.ffn_bias)];
            switches.extend(biases.map(|(key, has_bias)| (key, json!(has_bias))));
        }
        if family.windows != Windows::Refused {
            switches.push(("sliding_window", json!(self.extras.window)));
        }
        if matches!(family.windows, Windows::Switched | Windows::SwitchedUnrotated) {
            switches.push(("use_sliding_window", json!(self.extras.window.is_some())));
            switches.extend(self.extras.window.map(|_| ("layer_types", self.layer_types())));
        }
        if self.model_type == ModelType::SmolLm3 {
            let rotates = |layer| u64::from(self.rotation_of(layer).is_some());
            switches.push(("no_rope_layers", (0..self.layers).map(rotates).collect()));
        }
        if self.model_type == ModelType::Granite {
            let Extras { embedding_multiplier, residual_multiplier, attention_multiplier, .. } = self.extras;
            switches.extend([
                ("embedding_multiplier", json!(embedding_multiplier)),
                ("residual_multiplier", json!(residual_multiplier)),
                ("attention_multiplier", json!(attention_multiplier.unwrap_or(1.0 / (self.head_dim as f64).sqrt()))),
                ("logits_scaling", json!(self.extras.logits_scaling)),
            ]);
        }
        if matches!(family.windows, Windows::Periodic { .. }) {
            switches.push(("layer_types", self.layer_types()));
        }
        switches.extend(rope::local_to_json(self));
        if self.model_type.caps_logits() {
            let query_scalar = self.extras.attention_multiplier.map_or(self.head_dim as f64, |scale| scale.powi(-2));
            switches.extend([
                ("hidden_activation", json!(family.activation.name())),
                ("query_pre_attn_scalar", json!(query_scalar.round() as u64)),
                ("attn_logit_softcapping", json!(self.extras.score_softcap)),
                ("final_logit_softcapping", json!(self.extras.logit_softcap)),
            ]);
        }
        for (key, value) in switches {
            map.entry(key).or_insert(value);
        }
        Value::Object(map)
    }
}

impl ModelConfig {
    /// Returns the value of `layer_types`: the kind of attention of each layer.
    fn layer_types(&self) -> Value {
        let kind = |layer| if self.window_of(layer).is_some() { "sliding_attention" } else { "full_attention" };
        (0..self.layers).map(kind).collect()
    }
}

/// Returns the name of a dtype in PyTorch, such as `bfloat16`.
fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "float64",
        DType::F32 => "float32",
        DType::Bf16 => "bfloat16",
        DType::F16 => "float16",
        DType::I32 => "int32",
        DType::U8 => "uint8",
    }
}

/// Reads all keys of a `config.json`, except those that `ignore_keys` names.
fn read_whole(map: &Map<String, Value>, ignore_keys: &[String]) -> Result<ModelConfig, ConfigError> {
    let keys = Keys::new(map, "");
    let config = read(&keys)?;
    config.validate()?;
    keys.finish(ignore_keys)?;
    Ok(config)
}

fn read(keys: &Keys) -> Result<ModelConfig, ConfigError> {
    let model_type = read_type(keys)?;
    let family = model_type.family();
    for (key, neutral) in neutral_switches(family) {
        keys.must_be_neutral(key, &neutral)?;
    }
    let [attention_bias, ffn_bias] = read_biases(keys, model_type)?;

    let hidden = keys.size("hidden_size", limit::HIDDEN)?;
    let heads = keys.size("num_attention_heads", limit::HEADS)?;
    let layers = keys.size("num_hidden_layers", limit::LAYERS)?;
    let max_positions = keys.whole("max_position_embeddings", limit::POSITIONS)?.unwrap_or(family.max_positions);
    let extras = read_extras(keys, family, layers, max_positions)?;
    let frequencies = rope::read(keys, family, max_positions)?;
    let extras = Extras { local_rope_theta: frequencies.local_theta, query_growth: frequencies.query_growth, ..extras };
    Ok(ModelConfig {
        model_type,
        hidden,
        layers,
        heads,
        kv_heads: read_kv_heads(keys, family, heads)?,
        head_dim: read_head_dim(keys, family, hidden, heads)?,
        ffn: keys.size("intermediate_size", limit::FFN)?,
        vocab: keys.size("vocab_size", limit::VOCAB)?,
        tied: keys.flag("tie_word_embeddings")?.unwrap_or(family.tied),
        norm_eps: keys.number("rms_norm_eps")?.unwrap_or(family.norm_eps),
        rope_theta: frequencies.theta,
        rope_scaling: frequencies.scaling,
        qkv_bias: model_type.qkv_bias() || attention_bias,
        attention_out_bias: attention_bias,
        ffn_bias,
        qk_norm: model_type.qk_norm(),
        max_positions,
        bos: keys.tokens("bos_token_id", 1)?.map_or(family.bos, |ids| ids.first().copied()),
        eos: keys.tokens("eos_token_id", END_TOKENS_MAX)?.unwrap_or_else(|| family.eos.to_vec()),
        init_std: keys.number("initializer_range")?.unwrap_or(0.02),
        extras,
    })
}

/// Reads whether all projections of attention have biases, and whether those of the feed-forward part have.
fn read_biases(keys: &Keys, model_type: ModelType) -> Result<[bool; 2], ConfigError> {
    if model_type.has_bias_switches() {
        return Ok([keys.flag("attention_bias")?.unwrap_or(false), keys.flag("mlp_bias")?.unwrap_or(false)]);
    }
    keys.must_be_neutral("mlp_bias", &[json!(false)])?;
    if model_type == ModelType::Qwen2 {
        // It has biases of queries, keys and values regardless of this key.
        keys.flag("attention_bias")?;
    } else {
        keys.must_be_neutral("attention_bias", &[json!(false)])?;
    }
    Ok([false, false])
}

fn read_type(keys: &Keys) -> Result<ModelType, ConfigError> {
    let supported = || [&ModelType::ALL.map(ModelType::name)[..], &text_part::whole_names()].concat().join(", ");
    let name = keys.text("model_type")?.ok_or_else(|| keys.missing("model_type", supported()))?;
    ModelType::ALL
        .into_iter()
        .find(|t| t.name() == name)
        .ok_or_else(|| keys.unsupported("model_type", &json!(name), supported()))
}

fn read_kv_heads(keys: &Keys, family: &Family, heads: u64) -> Result<u64, ConfigError> {
    let key = "num_key_value_heads";
    Ok(match keys.whole(key, limit::HEADS)? {
        Some(found) => found,
        None if keys.raw(key).is_some() => heads, // null
        None => family.kv_heads.unwrap_or(heads),
    })
}

fn read_head_dim(keys: &Keys, family: &Family, hidden: u64, heads: u64) -> Result<u64, ConfigError> {
    if let Some(found) = keys.whole("head_dim", limit::HEAD_DIM)? {
        return Ok(found);
    }
    match (family.head_dim, keys.raw("head_dim")) {
        (Some(default), None) => Ok(default),
        (Some(_), Some(null)) => Err(keys.wrong("head_dim", null, "a whole number")),
        (None, _) if hidden.is_multiple_of(heads) => Ok(hidden / heads),
        (None, _) => {
            let expected = format!("a multiple of num_attention_heads, {heads}, where head_dim is absent");
            Err(keys.wrong("hidden_size", &json!(hidden), expected))
        }
    }
}

/// Reads the parts that only some families have.
fn read_extras(keys: &Keys, family: &Family, layers: u64, max_positions: u64) -> Result<Extras, ConfigError> {
    let unrotated_layers = read_unrotated_layers(keys, family, layers)?;
    let (window, full_layers) = read_windows(keys, family, [layers, max_positions], &unrotated_layers)?;
    let extras = Extras { window, full_layers, unrotated_layers, ..Extras::default() };
    match family.model_type {
        ModelType::Phi3 => {
            keys.must_be_neutral("resid_pdrop", &[json!(0), json!(0.0)])?;
            keys.must_be_neutral("embd_pdrop", &[json!(0), json!(0.0)])?;
            Ok(extras)
        }
        ModelType::Granite => {
            let multiplier = |key: &str| Ok::<_, ConfigError>(keys.number(key)?.unwrap_or(1.0));
            Ok(Extras {
                embedding_multiplier: multiplier("embedding_multiplier")?,
                residual_multiplier: multiplier("residual_multiplier")?,
                attention_multiplier: Some(multiplier("attention_multiplier")?),
                logits_scaling: multiplier("logits_scaling")?,
                ..extras
            })
        }
        ModelType::Gemma2 => read_gemma(keys, extras, [Some(50.0), Some(30.0)]),
        ModelType::Gemma3Text => {
            // transformers ignores this key.
            keys.must_be_neutral("attn_logit_softcapping", &[])?;
            read_gemma(keys, extras, [None; 2])
        }
        _ => Ok(extras),
    }
}

/// Adds to `extras` what Gemma models have: the factor of attention scores, and caps of scores and logits. `defaults` are
/// the caps of absent keys.
fn read_gemma(keys: &Keys, extras: Extras, defaults: [Option<f64>; 2]) -> Result<Extras, ConfigError> {
    keys.must_be_neutral("hidden_activation", &[json!(Activation::GeluTanh.name())])?;
    keys.must_be_neutral("use_bidirectional_attention", &[json!(false)])?;
    let query_scalar = keys.whole("query_pre_attn_scalar", QUERY_SCALAR_MAX)?.unwrap_or(256);
    let cap = |key: &str, default: Option<f64>| {
        let by_default = default.filter(|_| keys.raw(key).is_none());
        Ok::<_, ConfigError>(keys.number(key)?.or(by_default))
    };
    Ok(Extras {
        attention_multiplier: Some((query_scalar as f64).sqrt().recip()),
        score_softcap: cap("attn_logit_softcapping", defaults[0])?,
        logit_softcap: cap("final_logit_softcapping", defaults[1])?,
        ..extras
    })
}

/// Reads the layers without rotary positions: those with a zero in `no_rope_layers`, or else each nth one.
fn read_unrotated_layers(keys: &Keys, family: &Family, layers: u64) -> Result<Vec<u64>, ConfigError> {
    if family.model_type != ModelType::SmolLm3 {
        return Ok(Vec::new());
    }
    let interval = keys.whole("no_rope_layer_interval", limit::LAYERS)?.unwrap_or(4);
    let expected = || format!("a list of {layers} zeros and ones, or more");
    let switches = keys.read("no_rope_layers", expected, |value| {
        let list = value.as_array().filter(|list| list.len() as u64 >= layers)?;
        list.iter().map(|switch| switch.as_u64().filter(|switch| *switch < 2)).collect::<Option<Vec<u64>>>()
    })?;
    let rotates = |layer: &u64| match &switches {
        Some(switches) => switches[*layer as usize] == 1,
        None => !(layer + 1).is_multiple_of(interval),
    };
    Ok((0..layers).filter(|layer| !rotates(layer)).collect())
}

/// Reads the sliding window, and the layers without it. A family that has no windows refuses one that would hide keys
/// within `max_positions`.
fn read_windows(
    keys: &Keys,
    family: &Family,
    [layers, max_positions]: [u64; 2],
    unrotated_layers: &[u64],
) -> Result<(Option<u64>, Vec<u64>), ConfigError> {
    let switched_on = keys.flag("use_sliding_window")?;
    let window = keys.whole("sliding_window", limit::POSITIONS)?;
    let by_default = |default: Option<u64>| default.filter(|_| keys.raw("sliding_window").is_none());
    // Layers below `max_window_layers` have full attention.
    let first = keys.read("max_window_layers", || "a whole number".into(), Value::as_u64)?;
    let (window, mut full_layers) = match family.windows {
        Windows::Refused => {
            if let Some(window) = window.filter(|window| *window < max_positions && switched_on != Some(false)) {
                let supported = format!("null, or at least max_position_embeddings, {max_positions}");
                return Err(keys.unsupported("sliding_window", &json!(window), supported));
            }
            (None, Vec::new())
        }
        Windows::Always { default } => (window.or(by_default(default)), Vec::new()),
        Windows::Switched => {
            let window = window.or(by_default(Some(4096))).filter(|_| switched_on == Some(true));
            (window, (0..first.unwrap_or(28).min(layers)).collect())
        }
        Windows::SwitchedUnrotated => {
            let rotated = (0..layers).filter(|layer| !unrotated_layers.contains(layer));
            (window.filter(|_| switched_on == Some(true)), rotated.collect())
        }
        Windows::Periodic { default, period } => {
            let has_key = family.model_type == ModelType::Gemma3Text;
            let listed = if has_key { keys.whole("sliding_window_pattern", limit::LAYERS)? } else { None };
            let period = listed.unwrap_or(period);
            let full = (0..layers).filter(|layer| (layer + 1).is_multiple_of(period));
            (window.or(by_default(Some(default))), full.collect())
        }
    };
    if let Some(listed) = read_full_layers(keys, layers)? {
        if window.is_none() && (listed.len() as u64) < layers {
            let found = keys.raw("layer_types").expect("the list was read");
            let supported = format!("\"full_attention\" for each of the {layers} layers, without a sliding window");
            return Err(keys.unsupported("layer_types", found, supported));
        }
        // These families have one kind of layer, whatever the list says.
        let uniform = if window.is_some() { 0 } else { layers };
        if matches!(family.windows, Windows::Always { .. }) && listed.len() as u64 != uniform {
            let found = keys.raw("layer_types").expect("the list was read");
            let supported = "the same kind for all layers, as `sliding_window` says".to_owned();
            return Err(keys.unsupported("layer_types", found, supported));
        }
        full_layers = listed;
    }
    if window.is_none() || full_layers.len() as u64 == layers {
        return Ok((None, Vec::new()));
    }
    Ok((window, full_layers))
}

/// Reads from `layer_types` which layers have full attention; all others have a sliding window. `None` without the key.
fn read_full_layers(keys: &Keys, layers: u64) -> Result<Option<Vec<u64>>, ConfigError> {
    let Some(found) = keys.value("layer_types") else { return Ok(None) };
    let (full, sliding) = ("full_attention", "sliding_attention");
    let known = |list: &&Vec<Value>| list.len() as u64 == layers && list.iter().all(|t| t == full || t == sliding);
    let Some(list) = found.as_array().filter(known) else {
        let supported = format!("\"{full}\" or \"{sliding}\" for each of the {layers} layers");
        return Err(keys.unsupported("layer_types", found, supported));
    };
    Ok(Some((0..layers).zip(list).filter(|(_, kind)| *kind == full).map(|(layer, _)| layer).collect()))
}

fn contradiction(key: &str, found: &Value, other: &str, other_found: &Value) -> ConfigError {
    ConfigError::Contradiction {
        key: key.to_owned(),
        found: shown(found),
        other: other.to_owned(),
        other_found: shown(other_found),
    }
}

/// Returns a value as JSON for messages, shortened if it is long.
fn shown(value: &Value) -> String {
    const LONGEST: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// A JSON object that records which keys the reader has looked up; all other keys are unknown.
struct Keys<'a> {
    map: &'a Map<String, Value>,
    section: &'a str,
    asked: RefCell<BTreeSet<String>>,
    /// Paths of unknown keys in inner objects.
    unknown: RefCell<Vec<String>>,
}

impl<'a> Keys<'a> {
    fn new(map: &'a Map<String, Value>, section: &'a str) -> Keys<'a> {
        Keys { map, section, asked: RefCell::default(), unknown: RefCell::default() }
    }

    fn path(&self, key: &str) -> String {
        if self.section.is_empty() { key.to_owned() } else { format!("{}.{key}", self.section) }
    }

    /// Returns the value of a key, which may be null, and `None` if the key is absent.
    fn raw(&self, key: &str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(key.to_owned());
        self.map.get(key)
    }

    /// Returns the value of a key, and `None` if it is null or absent.
    fn value(&self, key: &str) -> Option<&'a Value> {
        self.raw(key).filter(|value| !value.is_null())
    }

    fn missing(&self, key: &str, expected: String) -> ConfigError {
        ConfigError::Missing { key: self.path(key), expected }
    }

    fn wrong(&self, key: &str, found: &Value, expected: impl Into<String>) -> ConfigError {
        ConfigError::Wrong { key: self.path(key), found: shown(found), expected: expected.into() }
    }

    fn unsupported(&self, key: &str, found: &Value, supported: String) -> ConfigError {
        ConfigError::Unsupported { key: self.path(key), found: shown(found), supported }
    }

    fn read<T>(
        &self,
        key: &str,
        expected: impl FnOnce() -> String,
        as_type: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        as_type(value).map(Some).ok_or_else(|| self.wrong(key, value, expected()))
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.read(key, || "true or false".into(), Value::as_bool)
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        self.read(key, || "a word in quotes".into(), Value::as_str)
    }

    fn number(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.read(key, || "a number".into(), Value::as_f64)
    }

    fn whole(&self, key: &str, largest: u64) -> Result<Option<u64>, ConfigError> {
        let expected = || format!("a whole number from 1 to {largest}");
        self.read(key, expected, |value| value.as_u64().filter(|n| (1..=largest).contains(n)))
    }

    /// Returns the value of a key that must be a size from 1 to `largest` and has no default.
    fn size(&self, key: &str, largest: u64) -> Result<u64, ConfigError> {
        let expected = || format!("a whole number from 1 to {largest}");
        self.whole(key, largest)?.ok_or_else(|| self.missing(key, expected()))
    }

    /// Returns the token ids of a key, and `None` if the key is absent. The value is one number or null (no tokens); if
    /// `most` is above 1, also a list of at most `most` numbers.
    fn tokens(&self, key: &str, most: usize) -> Result<Option<Vec<i64>>, ConfigError> {
        let expected = if most == 1 { "a token number or null" } else { "a token number, a list of them, or null" };
        match self.raw(key) {
            Some(Value::Null) => Ok(Some(Vec::new())),
            _ => self.read(
                key,
                || expected.into(),
                |value| match value {
                    Value::Array(list) if most > 1 && list.len() <= most => list.iter().map(Value::as_i64).collect(),
                    one => one.as_i64().map(|id| vec![id]),
                },
            ),
        }
    }

    fn section(&self, key: &'a str) -> Result<Option<Keys<'a>>, ConfigError> {
        self.read(key, || "an object or null".into(), |value| value.as_object().map(|map| Keys::new(map, key)))
    }

    /// Refuses a key with a value other than null and those of `neutral`, which change nothing.
    fn must_be_neutral(&self, key: &str, neutral: &[Value]) -> Result<(), ConfigError> {
        match self.value(key) {
            Some(found) if !neutral.contains(found) => {
                let mut supported: Vec<_> = neutral.iter().map(shown).collect();
                supported.push("null".into());
                supported.dedup();
                Err(self.unsupported(key, found, supported.join(", ")))
            }
            _ => Ok(()),
        }
    }

    /// Takes over the records of an inner object, such as `rope_scaling`: the keys that the reader looked up, and those
    /// that it did not (unknown keys).
    fn adopt(&self, inner: Keys) {
        let mut asked = self.asked.borrow_mut();
        asked.extend(inner.asked.borrow().iter().map(|key| inner.path(key)));
        let unknown = inner.map.keys().filter(|key| !inner.asked.borrow().contains(*key));
        self.unknown.borrow_mut().extend(unknown.map(|key| inner.path(key)));
    }

    /// Refuses keys that the reader has not looked up. Keys that do not matter for training ([`INERT`]) and those in
    /// `ignore_keys` are accepted. Also refuses a key in `ignore_keys` that the reader has looked up.
    fn finish(self, ignore_keys: &[String]) -> Result<(), ConfigError> {
        let asked = self.asked.into_inner();
        if let Some(key) = ignore_keys.iter().find(|key| asked.contains(*key)) {
            return Err(ConfigError::CannotIgnore { key: key.clone() });
        }
        let mut unknown: Vec<String> =
            self.map.keys().filter(|key| !asked.contains(*key) && !INERT.contains(&key.as_str())).cloned().collect();
        unknown.extend(self.unknown.into_inner());
        unknown.retain(|key| !ignore_keys.contains(key));
        if unknown.is_empty() { Ok(()) } else { Err(ConfigError::Unknown { keys: unknown }) }
    }
}

#[cfg(test)]
mod tests;
