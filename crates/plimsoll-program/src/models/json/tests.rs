//! Tests of `config.json` against the values that transformers reads from the same file.

use super::*;
use crate::models::{QueryGrowth, RopeScaling, preset, preset_names};
use proptest::prelude::*;

/// The public configuration of Llama 3.2 1B, as transformers 4.45 wrote it.
const LLAMA_3_2_1B: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu",
  "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
  "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
  "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256 }"#;

/// The public configuration of SmolLM2 135M Instruct.
const SMOLLM2_135M: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
  "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": true,
  "max_position_embeddings": 8192, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2,
  "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null,
  "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
  "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 49152 }"#;

/// The public configuration of Qwen2.5 0.5B.
const QWEN_2_5_05B: &str = r#"{
  "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
  "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
  "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
  "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
  "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "transformers_version": "4.40.1", "use_cache": true, "use_mrope": false,
  "use_sliding_window": false, "vocab_size": 151936 }"#;

fn small(model_type: &str) -> Map<String, Value> {
    let text = format!(
        r#"{{"model_type": "{model_type}", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256, "sliding_window": null}}"#
    );
    serde_json::from_str(&text).unwrap()
}

fn with(model_type: &str, changes: Value) -> Result<ModelConfig, ConfigError> {
    with_ignored(model_type, changes, &[])
}

fn with_ignored(model_type: &str, changes: Value, ignored: &[&str]) -> Result<ModelConfig, ConfigError> {
    let mut map = small(model_type);
    map.extend(changes.as_object().unwrap().clone());
    let ignored: Vec<String> = ignored.iter().map(|&key| key.to_owned()).collect();
    ModelConfig::from_json(&Value::Object(map).to_string(), &ignored)
}

#[test]
fn published_files_match_presets() {
    let read = |text| ModelConfig::from_json(text, &[]).unwrap();
    assert_eq!(read(LLAMA_3_2_1B), preset("llama-3.2-1b").unwrap());
    assert_eq!(read(QWEN_2_5_05B), preset("qwen2.5-0.5b").unwrap());
    let instruct = ModelConfig { bos: Some(1), eos: vec![2], ..preset("smollm2-135m").unwrap() };
    assert_eq!(read(SMOLLM2_135M), instruct);
}

#[test]
fn both_spellings_of_rope_and_dtype_agree() {
    let scaling = json!({"rope_type": "linear", "factor": 2.0});
    let old = with("llama", json!({"rope_theta": 5e5, "rope_scaling": scaling, "torch_dtype": "float16"})).unwrap();
    let older = json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}});
    let new = json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "dtype": "float16"});
    assert_eq!((old.rope_theta, old.rope_scaling), (5e5, RopeScaling::Linear { factor: 2.0 }));
    assert_eq!(with("llama", older).unwrap(), old);
    assert_eq!(with("llama", new).unwrap(), old);
    let plain = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}});
    assert_eq!(with("llama", plain).unwrap().rope_scaling, RopeScaling::None);
    let contradicting = json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}});
    assert!(matches!(with("llama", contradicting), Err(ConfigError::Contradiction { .. })));
}

/// The expected values are those of `AutoConfig.for_model(type)` in transformers 5.23.
#[test]
fn absent_keys_have_transformers_defaults() {
    let read = |model_type: &str, absent: &[&str]| {
        let mut map = small(model_type);
        map.insert("num_attention_heads".into(), json!(32));
        map.insert("max_position_embeddings".into(), json!(64));
        for key in absent {
            map.shift_remove(*key);
        }
        ModelConfig::from_json(&Value::Object(map).to_string(), &[]).unwrap()
    };
    let absent = ["num_key_value_heads", "max_position_embeddings"];
    let shape = |c: &ModelConfig| (c.kv_heads, c.head_dim, c.max_positions, c.bos, c.eos.clone());
    assert_eq!(shape(&read("llama", &absent)), (32, 2, 2048, Some(1), vec![2]));
    assert_eq!(shape(&read("mistral", &absent)), (8, 2, 131_072, Some(1), vec![2]));
    assert_eq!(shape(&read("qwen2", &absent)), (32, 2, 32_768, None, vec![]));
    assert_eq!(shape(&read("qwen3", &absent)), (32, 128, 32_768, None, vec![]));
    for model_type in ["llama", "mistral", "qwen2", "qwen3"] {
        let config = read(model_type, &[]);
        let rest = (config.tied, config.norm_eps, config.rope_theta, config.rope_scaling, config.init_std);
        assert_eq!(rest, (false, 1e-6, 10_000.0, RopeScaling::None, 0.02), "{model_type}");
    }
    // A Mistral file without the key has a window of 4096 tokens.
    assert_eq!(read("mistral", &["sliding_window"]).extras.window, Some(4096));
    assert_eq!(shape(&read("phi3", &absent)), (32, 2, 4096, Some(1), vec![32_000]));
    assert_eq!(shape(&read("smollm3", &absent)), (4, 2, 32_768, Some(128_000), vec![128_001]));
    assert_eq!(shape(&read("granite", &absent)), (32, 2, 2048, Some(1), vec![2]));
    assert_eq!(shape(&read("olmo2", &absent)), (32, 2, 2048, None, vec![50_279]));
    let rest = |model_type: &str| {
        let config = read(model_type, &[]);
        (config.tied, config.norm_eps, config.rope_theta)
    };
    assert_eq!(rest("phi3"), (false, 1e-5, 1e4));
    assert_eq!(rest("smollm3"), (true, 1e-6, 2e6));
    assert_eq!(rest("granite"), (false, 1e-6, 1e4));
    assert_eq!(rest("olmo2"), (false, 1e-5, 1e4));
}

#[test]
fn windows_are_read_and_written_per_layer() {
    let slides = |changes: Value| {
        json!({"use_sliding_window": true, "sliding_window": 128}).as_object().map(|map| {
            let mut map = map.clone();
            map.extend(changes.as_object().unwrap().clone());
            Value::Object(map)
        })
    };
    let none = Vec::<u64>::new();
    for (model_type, changes, full_layers) in [
        ("mistral", json!({}), none.clone()),
        ("mistral", json!({"layer_types": ["sliding_attention", "sliding_attention"]}), none.clone()),
        ("phi3", json!({}), none.clone()),
        ("qwen2", json!({"max_window_layers": 1}), vec![0]),
        ("qwen3", json!({"layer_types": ["sliding_attention", "full_attention"]}), vec![1]),
        ("smollm3", json!({"no_rope_layers": [1, 0]}), vec![0]),
    ] {
        let config = with(model_type, slides(changes).unwrap()).unwrap();
        assert_eq!((config.extras.window, &config.extras.full_layers), (Some(128), &full_layers), "{model_type}");
        let written = config.to_json(None, DType::F32).to_string();
        assert_eq!(ModelConfig::from_json(&written, &[]), Ok(config), "{model_type}");
    }
    let mixed = json!({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]});
    assert!(matches!(with("mistral", mixed), Err(ConfigError::Unsupported { .. })));
}

#[test]
fn layers_without_rotation_are_read_and_written() {
    let unrotated = |changes| with("smollm3", changes).unwrap().extras.unrotated_layers;
    assert_eq!(unrotated(json!({"num_hidden_layers": 9})), [3, 7]);
    assert_eq!(unrotated(json!({"num_hidden_layers": 4, "no_rope_layer_interval": 2})), [1, 3]);
    assert_eq!(unrotated(json!({"no_rope_layers": [0, 1, 1, 0]})), [0]);
    let config = with("smollm3", json!({"no_rope_layers": [0, 1]})).unwrap();
    let written = config.to_json(None, DType::F32).to_string();
    assert_eq!(ModelConfig::from_json(&written, &[]), Ok(config));
    assert!(matches!(with("smollm3", json!({"no_rope_layers": [1]})), Err(ConfigError::Wrong { .. })));
}

#[test]
fn multipliers_are_read_and_written() {
    let keys = json!({
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625, "logits_scaling": 8,
    });
    let config = with("granite", keys.clone()).unwrap();
    assert_eq!((config.extras.embedding_multiplier, config.extras.attention_multiplier), (12.0, Some(0.015_625)));
    let written = config.to_json(None, DType::F32).to_string();
    assert_eq!(ModelConfig::from_json(&written, &[]), Ok(config));
    assert!(matches!(with("llama", keys), Err(ConfigError::Unknown { .. })));
    assert!(matches!(with("granite", json!({"logits_scaling": 0})), Err(ConfigError::Wrong { .. })));
}

#[test]
fn gemma2_settings_are_read_and_written() {
    // Absent keys have the defaults of `Gemma2Config`.
    let mut map = small("gemma2");
    map.insert("num_hidden_layers".to_owned(), json!(5));
    map.shift_remove("sliding_window");
    let extras = ModelConfig::from_json(&Value::Object(map).to_string(), &[]).unwrap().extras;
    assert_eq!((extras.window, &extras.full_layers[..]), (Some(4096), &[1, 3][..]));
    assert_eq!((extras.score_softcap, extras.logit_softcap), (Some(50.0), Some(30.0)));
    assert_eq!(extras.attention_multiplier, Some(1.0 / 16.0));
    let keys = json!({
        "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7,
        "query_pre_attn_scalar": 144, "attn_logit_softcapping": null, "final_logit_softcapping": 12.5,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "cache_implementation": "hybrid",
    });
    let config = with("gemma2", keys).unwrap();
    assert_eq!((config.extras.window, &config.extras.full_layers[..]), (Some(7), &[0][..]));
    assert_eq!((config.extras.score_softcap, config.extras.logit_softcap), (None, Some(12.5)));
    let written = config.to_json(None, DType::F32).to_string();
    assert_eq!(ModelConfig::from_json(&written, &[]), Ok(config));
    assert!(matches!(with("llama", json!({"attn_logit_softcapping": 50.0})), Err(ConfigError::Unknown { .. })));
    assert!(matches!(with("gemma2", json!({"final_logit_softcapping": 0})), Err(ConfigError::Wrong { .. })));
}

#[test]
fn gemma3_settings_are_read_and_written() {
    // Absent keys have the defaults of `Gemma3TextConfig`.
    let mut map = small("gemma3_text");
    map.insert("num_hidden_layers".to_owned(), json!(7));
    map.shift_remove("sliding_window");
    let config = ModelConfig::from_json(&Value::Object(map).to_string(), &[]).unwrap();
    let extras = &config.extras;
    assert_eq!((extras.window, &extras.full_layers[..]), (Some(4096), &[5][..]));
    assert_eq!((extras.score_softcap, extras.logit_softcap), (None, None));
    assert_eq!((config.rope_theta, extras.local_rope_theta), (1e6, Some(1e4)));
    let linear = json!({"rope_type": "linear", "factor": 8.0});
    let old = json!({
        "num_hidden_layers": 3, "sliding_window_pattern": 2, "sliding_window": 7, "rope_theta": 5e5,
        "rope_local_base_freq": 2e3, "rope_scaling": linear,
    });
    let new = json!({
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 7, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
        },
    });
    let config = with("gemma3_text", old).unwrap();
    assert_eq!(config.rope_scaling, RopeScaling::Linear { factor: 8.0 });
    assert_eq!((config.rope_theta, config.extras.local_rope_theta), (5e5, Some(2e3)));
    assert_eq!(with("gemma3_text", new).as_ref(), Ok(&config));
    let written = config.to_json(None, DType::F32).to_string();
    assert_eq!(ModelConfig::from_json(&written, &[]), Ok(config));
    let scaled = json!({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}});
    let error = with("gemma3_text", scaled).unwrap_err().to_string();
    assert!(error.starts_with("`rope_parameters.sliding_attention.rope_type`"), "{error}");
    let contradictory = json!({
        "rope_local_base_freq": 2e3, "rope_parameters": {"sliding_attention": {"rope_theta": 1e3}},
    });
    assert!(matches!(with("gemma3_text", contradictory), Err(ConfigError::Contradiction { .. })));
    let unknown = json!({"rope_parameters": {"other": {}}});
    assert_eq!(with("gemma3_text", unknown), Err(ConfigError::Unknown { keys: vec!["rope_parameters.other".into()] }));
}

/// The expected bases are those of `Olmo3Config` in transformers 5.23, which takes its default for layers with a window.
#[test]
fn olmo3_settings_are_read_and_written() {
    let mut map = small("olmo3");
    map.insert("num_hidden_layers".to_owned(), json!(9));
    map.shift_remove("sliding_window");
    let config = ModelConfig::from_json(&Value::Object(map.clone()).to_string(), &[]).unwrap();
    assert_eq!((config.extras.window, &config.extras.full_layers[..]), (Some(4096), &[3, 7][..]));
    assert_eq!((config.rope_theta, config.extras.local_rope_theta), (5e5, Some(5e5)));
    // Without scaling, all layers rotate alike.
    assert_eq!((config.rotations().len(), config.rotation_of(2), config.rotation_of(3)), (1, Some(0), Some(0)));

    let yarn = json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64});
    map.insert("rope_scaling".to_owned(), yarn);
    let config = ModelConfig::from_json(&Value::Object(map).to_string(), &[]).unwrap();
    assert_eq!((config.rotation_of(2), config.rotation_of(3)), (Some(1), Some(0)));
    let [full, local] = config.rotations()[..] else { panic!("{config:?}") };
    assert_eq!((local.theta, local.scaling, local.amplitude), (5e5, RopeScaling::None, 1.0));
    assert_eq!((full.theta, full.scaling), (5e5, config.rope_scaling));
    assert!((full.amplitude - (1.0 + 0.1 * 8.0f64.ln())).abs() < 1e-12, "{full:?}");
    assert_eq!(config.to_json(None, DType::F32).get("rope_parameters"), None);

    let sections = |local: Value| {
        let full = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4});
        json!({"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": full, "sliding_attention": local}})
    };
    let config = with("olmo3", sections(json!({"rope_type": "default", "rope_theta": 2e4}))).unwrap();
    assert_eq!((config.rope_theta, config.extras.local_rope_theta), (1e4, Some(2e4)));
    assert_eq!(config.rope_scaling, RopeScaling::Linear { factor: 2.0 });
    let written = config.to_json(None, DType::F32).to_string();
    assert_eq!(ModelConfig::from_json(&written, &[]), Ok(config));
    assert_eq!(with("olmo3", sections(Value::Null)).unwrap().extras.local_rope_theta, Some(5e5));
    let error = with("olmo3", json!({"rope_theta": 1e4})).unwrap_err().to_string();
    assert!(error.starts_with("`rope_theta` is 10000.0"), "{error}");
}

#[test]
fn models_with_extras_of_their_family_are_read() {
    for model_type in ModelType::ALL {
        let mut config = ModelConfig::from_json(&Value::Object(small(model_type.name())).to_string(), &[]).unwrap();
        config.extras = Extras::of_family(model_type);
        (config.rope_theta, config.rope_scaling) = (2e4, RopeScaling::None);
        let read = ModelConfig::from_json(&config.to_json(None, DType::F32).to_string(), &[]).unwrap();
        let rotation =
            |config: &ModelConfig| (config.rope_theta, config.extras.local_rope_theta, config.extras.query_growth);
        assert_eq!(rotation(&read), rotation(&config), "{model_type}");
    }
}

#[test]
fn ministral3_settings_are_read_and_written() {
    let mut map = small("ministral3");
    let read = |map: &Map<String, Value>| ModelConfig::from_json(&Value::Object(map.clone()).to_string(), &[]);
    let yarn = |factor, original| RopeScaling::Yarn {
        factor,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position_embeddings: original,
        truncate: true,
        attention_factor: 1.0,
    };
    // Absent keys have the defaults of `Ministral3Config`.
    let config = read(&map).unwrap();
    assert_eq!((config.head_dim, config.max_positions, config.norm_eps), (128, 262_144, 1e-5));
    assert_eq!((config.rope_theta, config.rope_scaling), (1e6, yarn(16.0, 16_384)));
    assert_eq!(config.extras.query_growth, Some(QueryGrowth { beta: 0.1, period: 16_384 }));
    assert_eq!(config.extras, Extras::of_family(ModelType::Ministral3));
    assert_eq!(config.query_growth_within(16_384), None);
    assert_eq!(config.query_growth_within(16_385), config.extras.query_growth);
    let parameters = json!({
        "type": "yarn", "rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64,
        "max_position_embeddings": 256, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.25,
    });
    map.insert("rope_parameters".to_owned(), parameters);
    let config = read(&map).unwrap();
    assert_eq!((config.rope_theta, config.rope_scaling), (5e5, yarn(4.0, 64)));
    let growth = config.extras.query_growth.unwrap();
    assert_eq!(growth, QueryGrowth { beta: 0.25, period: 64 });
    assert_eq!((growth.factor(63), growth.factor(64)), (1.0, 1.0 + 0.25 * 2f64.ln()));
    let written = config.to_json(Some(&Value::Object(map.clone())), DType::F32);
    assert!(["rope_theta", "rope_scaling"].iter().all(|key| written.get(key).is_none()));
    assert_eq!(ModelConfig::from_json(&written.to_string(), &[]), Ok(config));
    for (key, value, expected) in [
        ("llama_4_scaling_beta", Value::Null, "`rope_parameters.llama_4_scaling_beta` is missing"),
        ("llama_4_scaling_beta", json!(-1), "`rope_parameters.llama_4_scaling_beta` is -1, expected a number from 0"),
        ("rope_theta", Value::Null, "`rope_parameters.rope_theta` is missing"),
        ("twist", json!(1), "unknown key: `rope_parameters.twist`"),
    ] {
        let mut map = map.clone();
        map["rope_parameters"][key] = value;
        let error = read(&map).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let error = with("ministral3", json!({"rope_theta": 1e6})).unwrap_err().to_string();
    assert!(error.starts_with("`rope_theta` is 1000000.0, which is not supported"), "{error}");
    let error = with("mistral", json!({"rope_parameters": {"llama_4_scaling_beta": 0.1}})).unwrap_err();
    assert_eq!(error, ConfigError::Unknown { keys: vec!["rope_parameters.llama_4_scaling_beta".into()] });
}

/// The expected factors are those of `_compute_yarn_parameters` in transformers 5.23.
#[test]
fn yarn_settings_have_transformers_defaults() {
    let scaling = |inner: Value| {
        let config = with("llama", json!({"max_position_embeddings": 64, "rope_scaling": inner})).unwrap();
        let written = config.to_json(None, DType::F32).to_string();
        assert_eq!(ModelConfig::from_json(&written, &[]).as_ref(), Ok(&config));
        config.rope_scaling
    };
    let yarn = |attention_factor| RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position_embeddings: 64,
        truncate: true,
        attention_factor,
    };
    let grown = |coefficient: f64| 0.1 * coefficient * 4f64.ln() + 1.0;
    assert_eq!(scaling(json!({"rope_type": "yarn", "factor": 4.0})), yarn(grown(1.0)));
    let both = json!({"type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 0.5});
    assert_eq!(scaling(both), yarn(grown(2.0) / grown(0.5)));
    assert_eq!(scaling(json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5})), yarn(1.5));
    assert_eq!(scaling(json!({"type": "dynamic", "factor": 2.0})), RopeScaling::Dynamic { factor: 2.0 });
}

#[test]
fn unsupported_arithmetic_is_refused_by_key() {
    let cases = [
        ("llama", "hidden_act", json!("gelu")),
        ("mistral", "attention_bias", json!(true)),
        ("qwen3", "attention_bias", json!(true)),
        ("mistral", "mlp_bias", json!(true)),
        ("llama", "attention_dropout", json!(0.1)),
        ("llama", "partial_rotary_factor", json!(0.5)),
        ("llama", "rope_interleaved", json!(true)),
        ("llama", "quantization_config", json!({"bits": 4})),
        ("llama", "model_type", json!("gemma")),
        ("llama", "layer_types", json!(["full_attention", "sliding_attention"])),
        ("llama", "sliding_window", json!(1024)),
        ("granite", "attention_bias", json!(true)),
        ("gemma2", "hidden_activation", json!("silu")),
        ("gemma2", "hidden_act", json!("silu")),
        ("gemma3_text", "attn_logit_softcapping", json!(50.0)),
        ("gemma2", "use_bidirectional_attention", json!(true)),
        ("olmo2", "attention_bias", json!(true)),
        ("phi3", "resid_pdrop", json!(0.1)),
        ("phi3", "rope_scaling", json!({"type": "linear", "factor": 4.0})),
        ("phi3", "rope_scaling", json!({"type": "longrope", "short_factor": [1.0]})),
        ("qwen2", "use_mrope", json!(true)),
        ("llama", "rope_scaling", json!({"rope_type": "longrope", "short_factor": [1.0]})),
        ("qwen2", "rope_parameters", json!({"rope_type": "mrope"})),
        ("llama", "rope_parameters", json!({"partial_rotary_factor": 0.25})),
    ];
    for (model_type, key, value) in cases {
        let error = with(model_type, json!({key: value})).unwrap_err();
        assert!(matches!(error, ConfigError::Unsupported { .. }), "{key}: {error}");
        assert!(error.to_string().starts_with(&format!("`{key}")), "{key}: {error}");
        assert!(with_ignored(model_type, json!({key: value}), &[key]).is_err(), "{key} was ignored");
    }
}

#[test]
fn llama_biases_are_read_and_written() {
    let biases = |config: &ModelConfig| (config.qkv_bias, config.attention_out_bias, config.ffn_bias);
    for (attention, mlp) in [(false, false), (true, false), (false, true), (true, true)] {
        let config = with("llama", json!({"attention_bias": attention, "mlp_bias": mlp})).unwrap();
        assert_eq!(biases(&config), (attention, attention, mlp));
        let written = config.to_json(None, DType::F32).to_string();
        assert_eq!(ModelConfig::from_json(&written, &[]).as_ref(), Ok(&config));
        let names: Vec<String> = config.hf_parameters().into_iter().map(|parameter| parameter.hf_name).collect();
        let count = |module: &str| names.iter().filter(|name| name.contains(module) && name.ends_with(".bias")).count();
        let layers = config.layers as usize;
        assert_eq!(
            (count(".self_attn."), count(".mlp.")),
            (4 * layers * usize::from(attention), 3 * layers * usize::from(mlp))
        );
        let elements: u64 = config.hf_parameters().iter().map(|parameter| parameter.elements()).sum();
        assert_eq!(elements, config.parameters());
    }
    // Qwen 2 has no bias of the output whatever the key says.
    assert_eq!(biases(&with("qwen2", json!({"attention_bias": true})).unwrap()), (true, false, false));
}

#[test]
fn neutral_values_are_accepted() {
    let plain = with("llama", json!({})).unwrap();
    for (key, value) in [
        ("hidden_act", json!("silu")),
        ("attention_dropout", json!(0)),
        ("attention_bias", json!(null)),
        ("quantization_config", json!(null)),
        ("layer_types", json!(["full_attention", "full_attention"])),
        ("sliding_window", json!(2048)),
        ("rope_scaling", json!({})),
        ("rope_scaling", json!({"type": "default"})),
        ("temperature", json!(0.7)),
    ] {
        assert_eq!(with("llama", json!({key: value})).as_ref(), Ok(&plain), "{key}");
    }
    let window = json!({"use_sliding_window": false, "sliding_window": 128});
    assert_eq!(with("qwen2", window), with("qwen2", json!({})));
    let last_layers_only = json!({"use_sliding_window": true, "sliding_window": 128, "max_window_layers": 2});
    assert_eq!(with("qwen2", last_layers_only), with("qwen2", json!({})));
}

#[test]
fn unknown_keys_are_refused_unless_ignored() {
    let changes = json!({"logit_scale": 2.0, "rope_scaling": {"type": "linear", "factor": 2.0, "twist": 1}});
    let error = with("llama", changes.clone()).unwrap_err();
    assert_eq!(error.to_string(), "unknown keys: `logit_scale`, `rope_scaling.twist`");
    assert!(error.hints()[0].ends_with("--ignore-config-key logit_scale --ignore-config-key rope_scaling.twist"));
    assert!(with_ignored("llama", changes, &["logit_scale", "rope_scaling.twist"]).is_ok());
    let error = with_ignored("llama", json!({}), &["hidden_size"]).unwrap_err();
    assert_eq!(error, ConfigError::CannotIgnore { key: "hidden_size".into() });
}

#[test]
fn wrong_values_are_named_with_expected_ones() {
    let cases = [
        (json!({"hidden_size": 0}), "`hidden_size` is 0, expected a whole number from 1 to 262144"),
        (json!({"hidden_size": -64}), "`hidden_size` is -64, expected a whole number from 1 to 262144"),
        (json!({"vocab_size": 1e30}), "`vocab_size` is 1e+30, expected a whole number from 1 to 67108864"),
        (json!({"hidden_size": 64.0}), "`hidden_size` is 64.0, expected a whole number from 1 to 262144"),
        (json!({"hidden_size": "64"}), "`hidden_size` is \"64\", expected a whole number from 1 to 262144"),
        (json!({"hidden_size": null}), "`hidden_size` is missing, expected a whole number from 1 to 262144"),
        (json!({"num_key_value_heads": 3}), "`num_key_value_heads` is 3, expected a divisor of num_attention_heads, 4"),
        (json!({"head_dim": 15}), "`head_dim` is 15, expected an even number (its halves are rotated)"),
        (json!({"tie_word_embeddings": "yes"}), "`tie_word_embeddings` is \"yes\", expected true or false"),
        (json!({"rope_theta": 0}), "`rope_theta` is 0, expected a number from 1 to 1e30"),
        (
            json!({"rope_scaling": {"type": "linear"}}),
            "`rope_scaling.factor` is missing, expected a number (for linear)",
        ),
        (json!({"rope_scaling": "linear"}), "`rope_scaling` is \"linear\", expected an object or null"),
        (json!({"bos_token_id": [1]}), "`bos_token_id` is [1], expected a token number or null"),
    ];
    for (changes, expected) in cases {
        assert_eq!(with("llama", changes).unwrap_err().to_string(), expected);
    }
    for text in ["", "[]", "{", "{\"a\": 1e999}", "nul"] {
        assert!(matches!(ModelConfig::from_json(text, &[]), Err(ConfigError::Json { .. })), "{text}");
    }
    let huge =
        json!({"hidden_size": 1 << 18, "head_dim": 64, "num_hidden_layers": 1 << 12, "intermediate_size": 1 << 22});
    assert!(with("llama", huge).unwrap_err().to_string().contains("parameters together"));
}

#[test]
fn written_config_reads_back_equal() {
    for name in preset_names() {
        let config = preset(name).unwrap();
        let written = config.to_json(None, DType::Bf16);
        assert_eq!(ModelConfig::from_json(&written.to_string(), &[]), Ok(config.clone()), "{name}");
        let rewritten = config.to_json(Some(&written), DType::Bf16);
        assert_eq!(rewritten, written, "{name}");
    }
}

#[test]
fn generation_config_lists_end_tokens() {
    let read = |text: &str| ModelConfig::generation_end_tokens(text).map_err(|error| error.to_string());
    for (text, tokens) in [
        (r#"{"eos_token_id": [14, 17], "temperature": 0.6}"#, vec![14, 17]),
        (r#"{"eos_token_id": 17}"#, vec![17]),
        (r#"{"eos_token_id": -1}"#, vec![-1]),
        (r#"{"eos_token_id": null}"#, vec![]),
        ("{}", vec![]),
    ] {
        assert_eq!(read(text), Ok(tokens), "{text}");
    }
    assert!(read(r#"{"eos_token_id": "2"}"#).unwrap_err().starts_with("`eos_token_id` is \"2\", expected a token"));
    assert!(read("[").unwrap_err().starts_with("not valid JSON"));
}

#[test]
fn model_without_end_tokens_keeps_those_of_base() {
    let config = preset("smollm2-135m").unwrap();
    let base = config.to_json(None, DType::F32);
    let none = ModelConfig { eos: Vec::new(), ..config.clone() };
    assert_eq!(none.to_json(Some(&base), DType::F32), base);
    assert_eq!(none.to_json(None, DType::F32)["eos_token_id"], Value::Null);
    let two = ModelConfig { eos: vec![5, 6], ..config };
    assert_eq!(two.to_json(Some(&base), DType::F32)["eos_token_id"], json!([5, 6]));
}

#[test]
fn writing_keeps_other_keys_of_base() {
    let base = json!({
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "torch_dtype": "float16",
        "pad_token_id": 7, "own_key": {"deep": [1]}, "eos_token_id": [3, 4],
    });
    let mut map = small("mistral");
    map.extend(base.as_object().unwrap().clone());
    let base = Value::Object(map);
    let config = ModelConfig::from_json(&base.to_string(), &["own_key".into()]).unwrap();
    let written = config.to_json(Some(&base), DType::F32);
    assert_eq!((&written["pad_token_id"], &written["own_key"]), (&json!(7), &json!({"deep": [1]})));
    assert_eq!((&written["dtype"], written.get("torch_dtype")), (&json!("float32"), None));
    assert_eq!((&written["rope_theta"], written.get("rope_parameters")), (&json!(5e5), None));
    assert_eq!((&written["eos_token_id"], &written["sliding_window"]), (&json!([3, 4]), &Value::Null));
    assert_eq!(ModelConfig::from_json(&written.to_string(), &["own_key".into()]), Ok(config));
}

/// Generates JSON of limited depth, mostly with keys that the reader knows.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (0u64..300).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop_oneof![Just("llama3"), Just("yarn"), Just("linear"), Just("default"), Just("é\u{10ffff}")]
            .prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 32, 8, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
            prop::collection::vec((any_key(), inner), 0..8)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

fn any_key() -> impl Strategy<Value = String> {
    let known: Vec<String> = preset("llama-3.2-1b")
        .unwrap()
        .to_json(None, DType::F32)
        .as_object()
        .unwrap()
        .keys()
        .map(String::from)
        .chain(["rope_parameters", "sliding_window", "layer_types", "factor", "rope_type", "type"].map(String::from))
        .chain(["use_sliding_window", "max_window_layers", "no_rope_layers", "attention_multiplier"].map(String::from))
        .chain(["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"].map(String::from))
        .collect();
    prop_oneof![9 => prop::sample::select(known), 1 => ".{0,20}"]
}

proptest! {
    /// Accepted configurations are within the limits and read back equal.
    #[test]
    fn arbitrary_values_are_read_or_refused(
        changes in prop::collection::vec((any_key(), any_json()), 0..6),
        model_type in prop::sample::select(ModelType::ALL.map(ModelType::name).to_vec()),
    ) {
        let mut map = small(model_type);
        map.extend(changes);
        if let Ok(config) = ModelConfig::from_json(&Value::Object(map).to_string(), &[]) {
            prop_assert!(config.parameters() <= limit::PARAMETERS);
            let written = config.to_json(None, DType::F32).to_string();
            prop_assert_eq!(ModelConfig::from_json(&written, &[]), Ok(config));
        }
    }

    #[test]
    fn arbitrary_text_is_read_or_refused(at in 0usize..LLAMA_3_2_1B.len(), bytes in prop::collection::vec(any::<u8>(), 1..4)) {
        let mut text = LLAMA_3_2_1B.as_bytes().to_vec();
        let end = (at + bytes.len()).min(text.len());
        text.splice(at..end, bytes);
        let _ = ModelConfig::from_json(&String::from_utf8_lossy(&text), &[]);
        let _ = ModelConfig::from_json(&String::from_utf8_lossy(&text[..at]), &[]);
    }
}
