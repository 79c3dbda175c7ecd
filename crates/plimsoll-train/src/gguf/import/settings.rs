//! The keys of a GGUF file as a `config.json`.

use crate::gguf::architecture::{find_llama3_scaling, has_form, name_architecture};
use crate::gguf::file::GgufFile;
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
        ("rope_theta", json!(theta)),
        ("rope_scaling", settings.rope_scaling(rope_divisors, theta, head_dim)?),
        ("tie_word_embeddings", json!(!file.tensors.contains_key("output.weight"))),
        ("bos_token_id", settings.token("bos")),
        ("eos_token_id", settings.token("eos")),
        ("pad_token_id", settings.token("padding")),
    ] {
        config.insert(key.to_owned(), value);
    }
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
        let known: Vec<ModelType> = ModelType::ALL.into_iter().filter(|model_type| has_form(*model_type)).collect();
        let found = known.iter().find(|model_type| name_architecture(**model_type) == architecture);
        let model_type = *found.ok_or_else(|| {
            let names: Vec<&str> = known.iter().map(|model_type| name_architecture(*model_type)).collect();
            format!("the architecture `{architecture}` is not supported; supported: {}", names.join(", "))
        })?;
        Ok(Settings { file, architecture, model_type })
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
        match self.value("rope.scaling.type").and_then(Value::as_str) {
            None | Some("none") => Ok(Value::Null),
            Some("linear") => {
                let factor = self.required_number("rope.scaling.factor")?;
                Ok(json!({ "rope_type": "linear", "factor": factor }))
            }
            Some(other) => Err(format!("`{}.rope.scaling.type` is {other}, which is not supported", self.architecture)),
        }
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
        if self.model_type == ModelType::Phi3 {
            // llama.cpp stores 0 for no window.
            let window = self.optional_whole("attention.sliding_window")?.filter(|window| *window > 0);
            insert("sliding_window", json!(window));
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
        let neutral = [("expert_count", 0.0), ("rope.scaling.attn_factor", 1.0)];
        let changes =
            |&(key, neutral): &(&str, f64)| self.value(key).is_some_and(|value| value.as_f64() != Some(neutral));
        if let Some((key, _)) = neutral.into_iter().find(changes) {
            return Err(format!("`{}.{key}` is not supported", self.architecture));
        }
        // OLMo 3 has the architecture of OLMo 2, with windows.
        let window = self.optional_whole("attention.sliding_window")?.filter(|window| *window > 0);
        if window.is_some() && self.model_type != ModelType::Phi3 {
            return Err(format!("`{}.attention.sliding_window` is not supported", self.architecture));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_without_form_are_refused_by_name() {
        let file = |architecture: &str| GgufFile {
            path: "x.gguf".into(),
            file: std::fs::File::open("/dev/null").unwrap(),
            keys: [
                ("general.architecture".to_owned(), json!(architecture)),
                (format!("{architecture}.attention.sliding_window"), json!(4096)),
            ]
            .into(),
            tensors: [].into(),
        };
        for architecture in ["gemma2", "gemma3", "mistral3"] {
            let error = read_settings(&file(architecture), &[]).unwrap_err();
            assert!(error.starts_with(&format!("the architecture `{architecture}` is not supported")), "{error}");
            assert!(error.ends_with("granite, olmo2"), "{error}");
        }
        let olmo3 = file("olmo2");
        let refused = Settings::of(&olmo3).unwrap().refuse_parts(64).unwrap_err();
        assert_eq!(refused, "`olmo2.attention.sliding_window` is not supported");
        let phi3 = file("phi3");
        assert_eq!(Settings::of(&phi3).unwrap().refuse_parts(64), Ok(()));
    }
}
