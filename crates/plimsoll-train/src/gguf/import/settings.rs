//! The keys of a GGUF file as a `config.json`.

use crate::gguf::architecture::name_architecture;
use crate::gguf::family_settings::{
    GEMMA2_SOFTCAPS, GEMMA2_WINDOW, GEMMA3_LOCAL_THETA, applies_windows, gemma_query_scalar, window_period,
};
use crate::gguf::file::GgufFile;
use crate::gguf::frequencies::{YARN_BETAS, find_llama3_scaling};
use plimsoll_program::models::{ModelType, RopeScaling};
use serde_json::{Map, Value, json};

/// Returns the `config.json` of the model in a file. `rope_divisors` are the values of `rope_freqs.weight`; empty if the
/// file has none.
///
/// # Errors
/// A description of the key that is missing, or of a setting that Plimsoll does not support.
pub fn read_settings(file: &GgufFile, rope_divisors: &[f32]) -> Result<Value, String> {
    let settings = Settings::of(file)?;
    let heads = settings.whole("attention.head_count")?;
    let hidden = settings.whole("embedding_length")?;
    let theta = settings.number("rope.freq_base")?.unwrap_or(10000.0);
    let head_dim = settings.optional_whole("attention.key_length")?.unwrap_or(hidden / heads.max(1));
    let mut config = Map::new();
    for (key, value) in [
        ("model_type", json!(settings.model_type.name())),
        ("architectures", json!([settings.model_type.architecture()])),
        ("hidden_size", json!(hidden)),
        ("num_hidden_layers", json!(settings.whole("block_count")?)),
        ("intermediate_size", json!(settings.whole("feed_forward_length")?)),
        ("num_attention_heads", json!(heads)),
        ("num_key_value_heads", json!(settings.optional_whole("attention.head_count_kv")?.unwrap_or(heads))),
        ("head_dim", json!(head_dim)),
        ("vocab_size", json!(settings.vocabulary()?)),
        ("max_position_embeddings", json!(settings.whole("context_length")?)),
        ("rms_norm_eps", json!(settings.required_number("attention.layer_norm_rms_epsilon")?)),
        ("tie_word_embeddings", json!(!file.tensors.contains_key("output.weight"))),
        ("bos_token_id", settings.token("bos")),
        ("eos_token_id", settings.token("eos")),
        ("pad_token_id", settings.token("padding")),
    ] {
        config.insert(key.to_owned(), value);
    }
    config.extend(settings.rotation(rope_divisors, theta, head_dim)?);
    config.extend(settings.of_family()?);
    settings.refuse_parts(head_dim)?;
    Ok(Value::Object(config))
}

/// Returns the tokens at which generation stops.
pub fn end_tokens(file: &GgufFile) -> Vec<i64> {
    let token = |name: &&str| file.keys.get(&format!("tokenizer.ggml.{name}_token_id"))?.as_i64();
    let mut tokens: Vec<i64> = ["eos", "eot", "eom"].iter().filter_map(token).collect();
    let mut seen = std::collections::HashSet::new();
    tokens.retain(|token| seen.insert(*token));
    tokens
}

/// The settings of a model in a file.
struct Settings<'a> {
    file: &'a GgufFile,
    architecture: &'a str,
    model_type: ModelType,
}

impl<'a> Settings<'a> {
    fn of(file: &'a GgufFile) -> Result<Settings<'a>, String> {
        let architecture = file.keys.get("general.architecture").and_then(Value::as_str);
        let architecture = architecture.ok_or("`general.architecture` is missing")?;
        let of_name = |model_type: &&ModelType| name_architecture(**model_type) == architecture;
        let Some(first) = ModelType::ALL.iter().find(of_name) else {
            let mut names: Vec<&str> = ModelType::ALL.into_iter().map(name_architecture).collect();
            names.dedup();
            return Err(format!("the architecture `{architecture}` is not supported; supported: {}", names.join(", ")));
        };
        let settings = Settings { file, architecture, model_type: *first };
        // OLMo 3 has the architecture of OLMo 2, with windows.
        let model_type = match first {
            ModelType::Olmo2 if settings.window()?.is_some() => ModelType::Olmo3,
            first => *first,
        };
        Ok(Settings { model_type, ..settings })
    }

    fn value(&self, key: &str) -> Option<&'a Value> {
        self.file.keys.get(&format!("{}.{key}", self.architecture))
    }

    /// Returns a whole number.
    fn optional_whole(&self, key: &str) -> Result<Option<u64>, String> {
        let Some(value) = self.value(key) else { return Ok(None) };
        value.as_u64().map(Some).ok_or_else(|| format!("`{}.{key}` is no whole number", self.architecture))
    }

    fn whole(&self, key: &str) -> Result<u64, String> {
        self.optional_whole(key)?.ok_or_else(|| format!("`{}.{key}` is missing", self.architecture))
    }

    fn number(&self, key: &str) -> Result<Option<f64>, String> {
        let Some(value) = self.value(key) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| format!("`{}.{key}` is no number", self.architecture))
    }

    fn required_number(&self, key: &str) -> Result<f64, String> {
        self.number(key)?.ok_or_else(|| format!("`{}.{key}` is missing", self.architecture))
    }

    /// Returns the rows of the embedding.
    fn vocabulary(&self) -> Result<u64, String> {
        let embedding = self.file.tensors.get("token_embd.weight").ok_or("tensor `token_embd.weight` is missing")?;
        Ok(embedding.shape[0])
    }

    /// Returns the id of a special token; null if the file names none.
    fn token(&self, name: &str) -> Value {
        self.file.keys.get(&format!("tokenizer.ggml.{name}_token_id")).cloned().unwrap_or_default()
    }

    /// Returns the sliding window; `None` if there is none, for which llama.cpp stores 0 or nothing.
    fn window(&self) -> Result<Option<u64>, String> {
        Ok(self.optional_whole("attention.sliding_window")?.filter(|window| *window > 0))
    }

    /// Returns the keys of the rotary frequencies. `theta` is their base, in layers without a window if the others have their
    /// own.
    fn rotation(&self, divisors: &[f32], theta: f64, head_dim: u64) -> Result<Map<String, Value>, String> {
        let scaling = self.rope_scaling(divisors, theta, head_dim)?;
        let config = match self.model_type {
            ModelType::Ministral3 => {
                let mut parameters = rope_parameters(theta, &scaling);
                let beta = self.required_number("attention.temperature_scale")?;
                parameters.insert("llama_4_scaling_beta".to_owned(), json!(beta));
                json!({ "rope_parameters": parameters })
            }
            ModelType::Olmo3 => json!({ "rope_parameters": {
                "full_attention": rope_parameters(theta, &scaling),
                "sliding_attention": rope_parameters(theta, &Value::Null),
            } }),
            _ => json!({ "rope_theta": theta, "rope_scaling": scaling }),
        };
        let Value::Object(config) = config else { unreachable!("all are objects") };
        Ok(config)
    }

    /// Returns the scaling of rotary frequencies; null if there is none.
    fn rope_scaling(&self, divisors: &[f32], theta: f64, head_dim: u64) -> Result<Value, String> {
        if !divisors.is_empty() {
            let Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            }) = find_llama3_scaling(divisors, theta, head_dim)
            else {
                return Err("the divisors in `rope_freqs.weight` are not those of Llama 3".to_owned());
            };
            return Ok(json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_position_embeddings,
            }));
        }
        // Files without a type scale linearly, the older ones by another key.
        let factor = self.number("rope.scaling.factor")?.or(self.number("rope.scale_linear")?);
        let is_neutral = factor.is_none_or(|factor| factor == 0.0 || factor == 1.0);
        match self.value("rope.scaling.type").and_then(Value::as_str) {
            Some("none") => Ok(Value::Null),
            None | Some("linear") if is_neutral => Ok(Value::Null),
            None | Some("linear") => Ok(json!({ "rope_type": "linear", "factor": factor })),
            Some("yarn") if self.model_type.norm_offset() == 0.0 => self.yarn(),
            Some(other) => Err(format!("`{}.rope.scaling.type` is {other}, which is not supported", self.architecture)),
        }
    }

    /// Returns the scaling of rotary frequencies by YaRN.
    fn yarn(&self) -> Result<Value, String> {
        let factor = self.required_number("rope.scaling.factor")?;
        let number = |key: &str, default: f64| Ok::<_, String>(self.number(key)?.unwrap_or(default));
        let is_ministral3 = self.model_type == ModelType::Ministral3;
        let growth = RopeScaling::yarn_growth(factor, 1.0);
        let divisor = match number("rope.scaling.yarn_log_multiplier", 0.0)? {
            0.0 => 1.0,
            1.0 if is_ministral3 => growth,
            _ => return Err(format!("`{}.rope.scaling.yarn_log_multiplier` is not supported", self.architecture)),
        };
        // llama.cpp reads them for this family only.
        let [fast, slow] = match is_ministral3 {
            true => [
                number("rope.scaling.yarn_beta_fast", YARN_BETAS[0])?,
                number("rope.scaling.yarn_beta_slow", YARN_BETAS[1])?,
            ],
            false => YARN_BETAS,
        };
        Ok(json!({
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.whole("rope.scaling.original_context_length")?,
            "beta_fast": fast,
            "beta_slow": slow,
            "attention_factor": number("rope.scaling.attn_factor", 1.0)? * growth / divisor,
        }))
    }

    /// Returns the keys that only some families have.
    fn of_family(&self) -> Result<Map<String, Value>, String> {
        let has = |tensor: &str| self.file.tensors.contains_key(tensor);
        let mut config = Map::new();
        let mut insert = |key: &str, value: Value| drop(config.insert(key.to_owned(), value));
        if self.model_type == ModelType::Llama {
            insert("attention_bias", has("blk.0.attn_q.bias").into());
            insert("mlp_bias", has("blk.0.ffn_up.bias").into());
        }
        if matches!(self.model_type, ModelType::Phi3 | ModelType::Olmo3) {
            insert("sliding_window", json!(self.window()?));
        }
        if self.model_type == ModelType::Granite {
            for (key, name) in [
                ("attention.scale", "attention_multiplier"),
                ("embedding_scale", "embedding_multiplier"),
                ("residual_scale", "residual_multiplier"),
                ("logit_scale", "logits_scaling"),
            ] {
                insert(name, self.required_number(key)?.into());
            }
        }
        if matches!(self.model_type, ModelType::Gemma2 | ModelType::Gemma3Text) {
            config.extend(self.of_gemma()?);
        }
        Ok(config)
    }

    /// Returns the keys that only Gemma models have.
    fn of_gemma(&self) -> Result<Map<String, Value>, String> {
        let [layers, hidden] = [self.whole("block_count")?, self.whole("embedding_length")?];
        let [heads, head_dim] = [self.whole("attention.head_count")?.max(1), self.whole("attention.key_length")?];
        let mut config = Map::new();
        let mut insert = |key: &str, value: Value| drop(config.insert(key.to_owned(), value));
        insert("hidden_activation", json!("gelu_pytorch_tanh"));
        let scalar = gemma_query_scalar(self.model_type, layers, hidden, heads, head_dim);
        insert("query_pre_attn_scalar", json!(scalar));
        if self.model_type == ModelType::Gemma2 {
            insert("sliding_window", json!(self.window()?.unwrap_or(GEMMA2_WINDOW)));
            for (key, default) in ["attn_logit_softcapping", "final_logit_softcapping"].into_iter().zip(GEMMA2_SOFTCAPS)
            {
                insert(key, json!(self.number(key)?.unwrap_or(default)));
            }
        } else {
            insert("sliding_window", json!(self.whole("attention.sliding_window")?));
            let local = self.number("rope.freq_base_swa")?.unwrap_or(GEMMA3_LOCAL_THETA);
            insert("rope_local_base_freq", json!(local));
        }
        Ok(config)
    }

    /// Refuses settings that change the arithmetic and have no key in `config.json`.
    fn refuse_parts(&self, head_dim: u64) -> Result<(), String> {
        let rotated = self.optional_whole("rope.dimension_count")?.unwrap_or(head_dim);
        let value_dim = self.optional_whole("attention.value_length")?.unwrap_or(head_dim);
        if rotated != head_dim || value_dim != head_dim {
            let reason = "values and rotated elements must be as many as the elements of a head";
            return Err(format!(
                "heads have {head_dim} elements, {rotated} of them rotated, and values {value_dim}: {reason}"
            ));
        }
        let is_yarn = self.value("rope.scaling.type").is_some_and(|kind| kind == "yarn");
        let has_caps = self.model_type == ModelType::Gemma2;
        let neutral = [
            ("expert_count", 0.0, true),
            ("rope.scaling.attn_factor", 1.0, !is_yarn),
            ("attn_logit_softcapping", 0.0, !has_caps),
            ("final_logit_softcapping", 0.0, !has_caps),
        ];
        let changes = |key: &str, neutral: f64| self.value(key).is_some_and(|value| value.as_f64() != Some(neutral));
        if let Some((key, ..)) = neutral.into_iter().find(|(key, neutral, applies)| *applies && changes(key, *neutral))
        {
            return Err(format!("`{}.{key}` is not supported", self.architecture));
        }
        let known = self.model_type == ModelType::Phi3 || applies_windows(self.model_type);
        if self.window()?.is_some() && !known {
            return Err(format!("`{}.attention.sliding_window` is not supported", self.architecture));
        }
        let (key, period) = ("attention.sliding_window_pattern", window_period(self.model_type));
        let layers = self.optional_whole("block_count")?;
        let differs = |period: u64| self.value(key).is_some_and(|pattern| !has_period(pattern, period, layers));
        match period.is_some_and(differs) {
            true => Err(format!("`{}.{key}` is not supported", self.architecture)),
            false => Ok(()),
        }
    }
}

/// Returns the settings of a rotation as transformers 5 writes them. `scaling` is a value of `rope_scaling`.
fn rope_parameters(theta: f64, scaling: &Value) -> Map<String, Value> {
    let mut parameters = scaling.as_object().cloned().unwrap_or_default();
    parameters.entry("rope_type").or_insert(json!("default"));
    parameters.insert("rope_theta".to_owned(), json!(theta));
    parameters
}

/// Returns whether a pattern of windows leaves out every nth layer, n = `period`. The pattern is the period, or a list that
/// tells for each of `layers` layers whether it has a window.
fn has_period(pattern: &Value, period: u64, layers: Option<u64>) -> bool {
    let Some(list) = pattern.as_array() else { return pattern.as_u64() == Some(period) };
    let expected = (1..).map(|number: u64| !number.is_multiple_of(period));
    let is_expected = |(has_window, expected): (&Value, bool)| has_window.as_bool() == Some(expected);
    layers == Some(list.len() as u64) && list.iter().zip(expected).all(is_expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a file without tensors. Keys begin with the architecture.
    fn file(architecture: &str, keys: &[(&str, Value)]) -> GgufFile {
        let own = keys.iter().map(|(key, value)| (format!("{architecture}.{key}"), value.clone()));
        GgufFile {
            path: "x.gguf".into(),
            file: std::fs::File::open("/dev/null").unwrap(),
            keys: own.chain([("general.architecture".to_owned(), json!(architecture))]).collect(),
            tensors: [].into(),
        }
    }

    #[test]
    fn settings_that_change_arithmetic_are_refused_by_name() {
        let error = Settings::of(&file("mamba", &[])).err().unwrap();
        assert!(error.starts_with("the architecture `mamba` is not supported; supported: llama, mistral3"), "{error}");
        let refusal = |architecture: &str, key: &str, value: Value| {
            let file = file(architecture, &[(key, value), ("block_count", json!(7))]);
            Settings::of(&file).unwrap().refuse_parts(64).err()
        };
        let window = "attention.sliding_window";
        assert_eq!(refusal("llama", window, json!(4096)).unwrap(), "`llama.attention.sliding_window` is not supported");
        let pattern = "attention.sliding_window_pattern";
        let layers = json!([true, true, false, true, true, false, true]);
        let expected = format!("`gemma3.{pattern}` is not supported");
        assert_eq!(refusal("gemma3", pattern, json!(4)).as_ref(), Some(&expected));
        assert_eq!(refusal("gemma3", pattern, layers).as_ref(), Some(&expected));
        assert_eq!(refusal("gemma3", pattern, json!([])).as_ref(), Some(&expected));
        assert_eq!(
            refusal("gemma3", "final_logit_softcapping", json!(30.0)).unwrap(),
            "`gemma3.final_logit_softcapping` is not supported"
        );
        for (architecture, key, value) in [
            ("phi3", window, json!(2047)),
            ("gemma3", pattern, json!([true, true, true, true, true, false, true])),
            ("gemma2", pattern, json!(2)),
            ("gemma2", "final_logit_softcapping", json!(20.0)),
            ("gemma3", "final_logit_softcapping", json!(0.0)),
        ] {
            assert_eq!(refusal(architecture, key, value), None, "{architecture}.{key}");
        }
    }

    #[test]
    fn windows_tell_olmo3_from_olmo2() {
        let model_type = |window: u64| {
            Settings::of(&file("olmo2", &[("attention.sliding_window", json!(window))])).unwrap().model_type
        };
        assert_eq!((model_type(4096), model_type(0)), (ModelType::Olmo3, ModelType::Olmo2));
        assert_eq!(Settings::of(&file("olmo2", &[])).unwrap().model_type, ModelType::Olmo2);
    }

    #[test]
    fn yarn_of_a_file_has_the_factor_of_llama_cpp() {
        let scaling = |architecture: &str, more: &[(&str, Value)]| {
            let keys = [
                ("rope.scaling.type", json!("yarn")),
                ("rope.scaling.factor", json!(4.0)),
                ("rope.scaling.original_context_length", json!(8192)),
            ];
            let file = file(architecture, &[&keys, more].concat());
            let scaling = Settings::of(&file).unwrap().rope_scaling(&[], 1e6, 128)?;
            Ok::<_, String>((scaling["attention_factor"].as_f64().unwrap(), scaling["beta_fast"].as_f64().unwrap()))
        };
        let (default, log) = (RopeScaling::yarn_growth(4.0, 1.0), ("rope.scaling.yarn_log_multiplier", json!(1.0)));
        assert_eq!(scaling("qwen3", &[("rope.scaling.yarn_beta_fast", json!(16.0))]), Ok((default, 32.0)));
        assert_eq!(scaling("qwen3", &[("rope.scaling.attn_factor", json!(0.5))]), Ok((0.5 * default, 32.0)));
        let ministral3 = scaling("mistral3", &[log.clone(), ("rope.scaling.yarn_beta_fast", json!(16.0))]);
        assert_eq!(ministral3, Ok((1.0, 16.0)));
        let error = scaling("qwen3", &[log]).unwrap_err();
        assert_eq!(error, "`qwen3.rope.scaling.yarn_log_multiplier` is not supported");
        assert_eq!(scaling("gemma3", &[]).unwrap_err(), "`gemma3.rope.scaling.type` is yarn, which is not supported");
    }

    #[test]
    fn factor_without_a_type_scales_linearly() {
        let scaling = |key: &str, factor: f64| {
            let file = file("llama", &[(key, json!(factor))]);
            Settings::of(&file).unwrap().rope_scaling(&[], 1e4, 64).unwrap()
        };
        let by_four = json!({ "rope_type": "linear", "factor": 4.0 });
        assert_eq!(
            (scaling("rope.scaling.factor", 4.0), scaling("rope.scale_linear", 4.0)),
            (by_four.clone(), by_four)
        );
        assert_eq!(
            (scaling("rope.scaling.factor", 1.0), scaling("rope.scale_linear", 0.0)),
            (Value::Null, Value::Null)
        );
    }
}
