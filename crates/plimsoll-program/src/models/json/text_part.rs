//! The text part of a model that also takes images. Its configuration is the object `text_config` in `config.json`.
//!
//! Plimsoll trains and saves the text part alone: a model of the family that `text_config` names. The other parts, such as
//! an image encoder, are left out.

use crate::models::config::{ConfigError, ModelType};
use serde_json::{Map, Value, json};

/// Key of the object with the configuration of the text part.
const TEXT_KEY: &str = "text_config";

/// Families of models that take images and text: `model_type`, and the family of a text part that names none.
const WHOLE_FAMILIES: [(&str, ModelType); 3] =
    [("gemma3", ModelType::Gemma3Text), ("llava", ModelType::Llama), ("mistral3", ModelType::Mistral)];

/// Keys beside `text_config` that say nothing about the text part.
const OTHER_KEYS: [&str; 18] = [
    TEXT_KEY,
    "architectures",
    "boi_token_id",
    "boi_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_seq_length",
    "image_token_id",
    "image_token_index",
    "initializer_range",
    "mm_tokens_per_image",
    "model_type",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "vision_config",
    "vision_feature_layer",
    "vision_feature_select_strategy",
];

/// Keys of tokens. Those beside `text_config` have precedence over those in it, as in transformers.
const TOKEN_KEYS: [&str; 2] = ["bos_token_id", "eos_token_id"];

/// The text part of a model that has other parts.
#[derive(Clone, Debug, PartialEq)]
pub struct TextPart {
    /// `model_type` of the whole model, such as `gemma3`.
    pub whole: String,
    /// The `config.json` of the text part as a model of its own.
    pub config: Map<String, Value>,
}

impl TextPart {
    /// Returns the text part of the model with this `config.json`, and `None` if the model has no other parts.
    ///
    /// # Errors
    /// `text_config` is absent or no object, or sets a cap of logits, which has no effect in the whole model.
    pub fn find(root: &Map<String, Value>) -> Result<Option<TextPart>, ConfigError> {
        let name = root.get("model_type").and_then(Value::as_str);
        let Some((whole, default)) = WHOLE_FAMILIES.into_iter().find(|(whole, _)| Some(*whole) == name) else {
            return Ok(None);
        };
        let text = match root.get(TEXT_KEY) {
            Some(Value::Object(text)) => text,
            Some(Value::Null) | None => {
                return Err(ConfigError::Missing { key: TEXT_KEY.to_owned(), expected: "an object".to_owned() });
            }
            Some(other) => {
                let (key, expected) = (TEXT_KEY.to_owned(), "an object".to_owned());
                return Err(ConfigError::Wrong { key, found: super::shown(other), expected });
            }
        };
        // transformers caps logits in a model of text alone, but not in the whole one.
        let cap = "final_logit_softcapping";
        if let Some(found) = text.get(cap).filter(|found| !found.is_null()) {
            let (key, supported) = (format!("{TEXT_KEY}.{cap}"), "null".to_owned());
            return Err(ConfigError::Unsupported { key, found: super::shown(found), supported });
        }
        let mut config = text.clone();
        for (key, value) in root {
            let applies = match TOKEN_KEYS.contains(&key.as_str()) {
                true => !value.is_null(),
                false => !OTHER_KEYS.contains(&key.as_str()) && !text.contains_key(key),
            };
            if applies {
                config.insert(key.clone(), value.clone());
            }
        }
        config.entry("model_type").or_insert_with(|| json!(default.name()));
        let named = config.get("model_type").and_then(Value::as_str);
        if let Some(family) = ModelType::ALL.into_iter().find(|family| Some(family.name()) == named) {
            config.insert("architectures".to_owned(), json!([family.architecture()]));
            for (key, size) in default_sizes(family) {
                config.entry(key).or_insert(json!(size));
            }
        }
        Ok(Some(TextPart { whole: whole.to_owned(), config }))
    }

    /// Returns an error of the text part with the place of its key in the `config.json` of the whole model.
    pub(super) fn locate(&self, root: &Map<String, Value>, mut error: ConfigError) -> ConfigError {
        let key = match &mut error {
            ConfigError::Missing { key, .. }
            | ConfigError::Wrong { key, .. }
            | ConfigError::Unsupported { key, .. }
            | ConfigError::Contradiction { key, .. } => key,
            _ => return error,
        };
        let first = key.split('.').next().unwrap_or_default();
        let is_beside = root.contains_key(first) && !OTHER_KEYS.contains(&first);
        if !is_beside || root[TEXT_KEY].get(first).is_some() {
            *key = format!("{TEXT_KEY}.{key}");
        }
        error
    }
}

/// Returns the names of the families that have a text part.
pub(super) fn whole_names() -> [&'static str; WHOLE_FAMILIES.len()] {
    WHOLE_FAMILIES.map(|(whole, _)| whole)
}

/// Returns the sizes that transformers assumes where `text_config` leaves them out. A `config.json` of text alone must state
/// them.
fn default_sizes(family: ModelType) -> Vec<(&'static str, u64)> {
    let sizes = match family {
        ModelType::Llama => [32_000, 4096, 11_008, 32, 32],
        ModelType::Mistral => [32_000, 4096, 14_336, 32, 32],
        ModelType::Ministral3 => [131_072, 4096, 14_336, 34, 32],
        ModelType::Qwen2 | ModelType::Qwen3 => [151_936, 4096, 22_016, 32, 32],
        ModelType::Gemma3Text => [262_208, 2304, 9216, 26, 8],
        _ => return Vec::new(),
    };
    let keys = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"];
    keys.into_iter().zip(sizes).collect()
}

#[cfg(test)]
mod tests {
    use crate::models::{ConfigError, ModelConfig, ModelType, RopeScaling, TextPart};
    use plimsoll_core::DType;
    use serde_json::{Value, json};

    /// Returns a `config.json` as transformers 4.50 wrote it for Gemma 3 with images: `text_config` holds only values that
    /// differ from the defaults.
    fn gemma3() -> Value {
        json!({
            "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255_999, "eoi_token_index": 256_000,
            "eos_token_id": [1, 106], "image_token_index": 262_144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
            "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
        })
    }

    fn read(root: &Value) -> Result<ModelConfig, ConfigError> {
        ModelConfig::from_json(&root.to_string(), &[])
    }

    /// The expected values are those of `Gemma3Config(**config).text_config` in transformers 5.23.
    #[test]
    fn gemma3_text_part_has_transformers_defaults() {
        let config = read(&gemma3()).unwrap();
        assert_eq!((config.model_type, config.hidden, config.layers), (ModelType::Gemma3Text, 2560, 34));
        assert_eq!((config.vocab, config.heads, config.kv_heads, config.head_dim), (262_208, 8, 4, 256));
        assert_eq!((config.tied, config.max_positions, config.bos), (true, 131_072, Some(2)));
        assert_eq!((config.rope_theta, config.rope_scaling), (1e6, RopeScaling::Linear { factor: 8.0 }));
        assert_eq!((config.extras.window, config.extras.local_rope_theta), (Some(1024), Some(1e4)));
        // Tokens beside `text_config` have precedence.
        assert_eq!(config.eos, [1, 106]);
        // 4 B parameters, less the image encoder.
        assert_eq!(config.parameters(), 3_880_263_168);
    }

    #[test]
    fn text_part_is_written_as_text_model() {
        let root = gemma3();
        let config = read(&root).unwrap();
        let part = TextPart::find(root.as_object().unwrap()).unwrap().unwrap();
        assert_eq!((&*part.whole, &part.config["architectures"]), ("gemma3", &json!(["Gemma3ForCausalLM"])));
        let written = config.to_json(Some(&Value::Object(part.config.clone())), DType::F32);
        assert_eq!((&written["model_type"], &written["torch_dtype"]), (&json!("gemma3_text"), &Value::Null));
        assert!(["text_config", "vision_config", "image_token_index"].iter().all(|key| written.get(key).is_none()));
        assert_eq!(read(&written).as_ref(), Ok(&config));
        assert_eq!(read(&Value::Object(part.config)), Ok(config));
    }

    #[test]
    fn text_parts_of_other_families_are_read() {
        let text = json!({"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96});
        let mut root = json!({"model_type": "llava", "text_config": text, "tie_word_embeddings": true});
        let llava = read(&root).unwrap();
        assert_eq!((llava.model_type, llava.vocab, llava.heads, llava.tied), (ModelType::Llama, 32_000, 32, true));
        root["model_type"] = json!("mistral3");
        let mistral = read(&root).unwrap();
        assert_eq!((mistral.model_type, mistral.kv_heads, mistral.extras.window), (ModelType::Mistral, 8, Some(4096)));
        root["text_config"]["tie_word_embeddings"] = json!(false);
        root["text_config"]["model_type"] = json!("qwen2");
        let qwen2 = read(&root).unwrap();
        assert_eq!((qwen2.model_type, qwen2.vocab, qwen2.tied), (ModelType::Qwen2, 151_936, false));
    }

    #[test]
    fn errors_name_the_place_of_their_key() {
        let with = |pointer: &str, key: &str, value: Value| {
            let mut root = gemma3();
            root.pointer_mut(pointer).unwrap()[key] = value;
            read(&root).unwrap_err().to_string()
        };
        for (pointer, key, value, expected) in [
            ("/text_config", "hidden_size", json!(0), "`text_config.hidden_size` is 0"),
            ("/text_config", "attention_bias", json!(true), "`text_config.attention_bias` is true"),
            ("/text_config", "model_type", json!("gemma3n_text"), "`text_config.model_type` is \"gemma3n_text\""),
            ("/text_config", "final_logit_softcapping", json!(30.0), "`text_config.final_logit_softcapping` is 30.0"),
            ("/text_config", "twist", json!(1), "unknown key: `twist`"),
            ("", "quantization_config", json!({"bits": 4}), "`quantization_config` is {\"bits\":4}"),
            ("", "twist", json!(1), "unknown key: `twist`"),
            ("", "text_config", json!(null), "`text_config` is missing, expected an object"),
            ("", "text_config", json!([]), "`text_config` is [], expected an object"),
        ] {
            let message = with(pointer, key, value);
            assert!(message.starts_with(expected), "{pointer} {key}: {message}");
        }
    }
}
