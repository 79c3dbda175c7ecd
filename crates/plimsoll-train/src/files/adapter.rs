//! Reading and writing of PEFT adapter directories: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! Plimsoll supports LoRA on the projections of layers. A configuration that asks for more is refused with the name of its
//! key. The stored tensors must be those that the configuration asks for.

use super::adapter_config::{AdapterConfig, AdapterConfigError, ModuleNames};
use super::atomic;
use super::error::FilesError;
use super::model_dir::{
    CHAT_TEMPLATE, ModelWeights, check_tensor, read_generation_end_tokens, write_generation_config,
};
use super::read::{TensorEntry, WeightFiles, read_small};
use super::write::{StoredTensor, WeightWriter, pretty_json};
use plimsoll_core::Bytes;
use plimsoll_program::models::decoder::{Lora, WeightSource};
use plimsoll_program::models::{ModelConfig, Parameter, Target};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Size limit of an `adapter_config.json`. A larger file is not an adapter configuration.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Name of the file with the settings of adapters.
const CONFIG_FILE: &str = "adapter_config.json";

/// Keys of an `adapter_config.json` that do not change the computation.
const IGNORED_KEYS: [&str; 12] = [
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];

/// An opened PEFT directory with LoRA adapters that match a model.
#[derive(Debug)]
pub struct AdapterDir {
    /// Path of the directory.
    pub path: PathBuf,
    /// Settings of the adapters, with a dropout of 0.
    pub config: AdapterConfig,
    /// The adapters of the model that the settings choose.
    lora: Lora,
    /// Whether `adapter_config.json` names the base model (`base_model_name_or_path`).
    pub names_base_model: bool,
    /// The tokens at which generation stops, from a `generation_config.json` beside the adapters; `None` if those of
    /// the base model apply.
    pub end_tokens: Option<Vec<i64>>,
    /// The matrices A and B of each adapter, in the order of [`ModelConfig::adapter_parameters`].
    pub weights: ModelWeights,
}

impl AdapterDir {
    /// Opens an adapter directory and checks that its tensors match the model of `config`.
    ///
    /// # Errors
    /// Adapters of an unsupported kind, or adapters that do not match the model.
    pub fn open(path: &Path, config: &ModelConfig) -> Result<AdapterDir, FilesError> {
        if !path.is_dir() {
            return Err(FilesError::BadPath { path: path.to_owned(), problem: "no such directory" });
        }
        let config_file = path.join(CONFIG_FILE);
        if !config_file.exists() {
            return Err(invalid(&config_file, "no such file", &suggest_adapter(path)));
        }
        let (keys, adapters) = read_config(&config_file)?;
        let file = path.join("adapter_model.safetensors");
        if !file.exists() && path.join("adapter_model.bin").exists() {
            return Err(invalid(
                &file,
                "no such file; only adapter_model.bin exists",
                "save the adapters again with a newer version of peft",
            ));
        }
        let files = WeightFiles::open_files(vec![file])?;
        let unusable = |error: AdapterConfigError| invalid(&config_file, &error.to_string(), MERGE);
        let lora = adapters.lora(config, 0, WeightSource::Files { dtypes: vec![] }).map_err(unusable)?;
        let parameters = lora.parameters(config);
        let expected = |name: &str| parameters.iter().any(|parameter| parameter.hf_name == name);
        let missing = parameters.iter().filter(|parameter| files.entry(&parameter.hf_name).is_none());
        let missing: Vec<String> = missing.map(|parameter| parameter.hf_name.clone()).collect();
        let extra: Vec<String> =
            files.entries().map(|(name, _)| name).filter(|name| !expected(name)).map(String::from).collect();
        if parameters.is_empty() || !missing.is_empty() || !extra.is_empty() {
            return Err(FilesError::AdapterNames { dir: path.to_owned(), missing, extra });
        }
        let mut matched = Vec::new();
        for parameter in parameters {
            let entry = files.entry(&parameter.hf_name).expect("checked above");
            check_tensor(&files, &parameter.hf_name, entry, &parameter)?;
            matched.push((parameter, entry.clone()));
        }
        Ok(AdapterDir {
            path: path.to_owned(),
            config: adapters,
            lora,
            names_base_model: keys.get("base_model_name_or_path").is_some_and(Value::is_string),
            end_tokens: read_generation_end_tokens(path)?,
            weights: ModelWeights { parameters: matched, files },
        })
    }

    /// Returns a warning if the adapters name no base model, and `None` if they do. Without a name they may belong to
    /// random weights that were never saved.
    pub fn unknown_base_note(&self) -> Option<String> {
        let path = self.path.display();
        (!self.names_base_model).then(|| {
            format!(
                "{path} names no base model: adapters trained on random weights work only with those weights, which were \
                 not saved; train a full model first, then adapters on its RUN/model"
            )
        })
    }

    /// Returns the paths of the modules with an adapter.
    pub fn modules(&self) -> ModuleNames {
        let of_tensor = |(parameter, _): &(Parameter, TensorEntry)| {
            parameter.target.zip(parameter.layer).map(|(target, layer)| target.module(layer))
        };
        let mut paths: Vec<String> = self.weights.parameters.iter().filter_map(of_tensor).collect();
        paths.dedup();
        ModuleNames::List(paths)
    }

    /// Returns the adapters as settings for the Programs that compute with them. `dropout` and its `seed` apply to
    /// training only.
    pub fn lora(&self, dropout: f64, seed: u64) -> Lora {
        Lora { dropout, seed, source: self.weights.source(), ..self.lora.clone() }
    }
}

/// Returns an error about the adapter file `path`, with a description of the problem and a hint for the user.
fn invalid(path: &Path, problem: &str, hint: &str) -> FilesError {
    FilesError::Adapter { path: path.to_owned(), problem: problem.to_owned(), hint: hint.to_owned() }
}

/// Returns a hint for a directory that is no adapter directory: the adapters in it. A run folder has them in `adapter`, and
/// PEFT writes several adapters of one model to subdirectories with their names.
fn suggest_adapter(path: &Path) -> String {
    let entries = path.read_dir().into_iter().flatten().flatten();
    let within = entries.map(|entry| entry.path()).filter(|path| path.join(CONFIG_FILE).is_file());
    let mut within: Vec<String> = within.map(|path| path.display().to_string()).collect();
    within.sort();
    if within.is_empty() {
        return "name the directory that peft or plimsoll wrote: it has adapter_config.json".to_owned();
    }
    format!("this directory has adapters in {}", within.join(", "))
}

/// The hint for adapters of an unsupported kind.
const MERGE: &str = "merge the adapters into the model with peft's merge_and_unload, then use that model";
/// The hint for a file with invalid values.
const DOWNLOAD: &str = "the file may be damaged: download it again";

/// Reads an `adapter_config.json` and refuses settings that Plimsoll does not support. Returns its keys, and what they set.
fn read_config(path: &Path) -> Result<(Map<String, Value>, AdapterConfig), FilesError> {
    let text = read_small(path, MAX_CONFIG_BYTES)?;
    let keys: Map<String, Value> = serde_json::from_slice(&text)
        .map_err(|error| invalid(path, &format!("not a JSON object: {error}"), DOWNLOAD))?;
    let value_of = |key: &str| keys.get(key).unwrap_or(&Value::Null);
    if value_of("peft_type") != "LORA" {
        return Err(invalid(
            path,
            &format!("`peft_type` is {}, only \"LORA\" is supported", value_of("peft_type")),
            MERGE,
        ));
    }
    for (key, value) in &keys {
        let is_off = match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            Value::String(word) => key == "bias" && word == "none",
            _ => false,
        };
        let is_supported = match &**key {
            "r" | "lora_alpha" | "target_modules" | "exclude_modules" => true,
            "layers_to_transform" | "layers_pattern" | "rank_pattern" | "alpha_pattern" => true,
            "use_rslora" => value.is_boolean(),
            // Other initializations also change the base weights.
            "init_lora_weights" => {
                *value == true || ["gaussian", "eva", "orthogonal"].iter().any(|supported| value == supported)
            }
            key => IGNORED_KEYS.contains(&key),
        };
        if !is_off && !is_supported {
            return Err(invalid(path, &format!("`{key}` is {value}, which is not supported"), MERGE));
        }
    }
    let config = parse_config(&keys).map_err(|AdapterConfigError { key, problem }| {
        invalid(path, &format!("`{key}` is {}, {problem}", value_of(key)), DOWNLOAD)
    })?;
    Ok((keys, config))
}

/// Returns the settings of adapters in the keys of an `adapter_config.json`, with a dropout of 0.
fn parse_config(keys: &Map<String, Value>) -> Result<AdapterConfig, AdapterConfigError> {
    let value_of = |key: &str| keys.get(key).unwrap_or(&Value::Null);
    let error = |key, problem: &str| AdapterConfigError { key, problem: problem.to_owned() };
    let rank = |value: &Value| value.as_u64().filter(|rank| (1..=1 << 20).contains(rank));
    let alpha = |value: &Value| value.as_f64().filter(|alpha| alpha.is_finite());
    let names = |key: &'static str| {
        let names: Option<ModuleNames> =
            serde_json::from_value(value_of(key).clone()).map_err(|_| error(key, "which are no names of modules"))?;
        Ok(names.map_or(ModuleNames::NONE, in_order_of_layers))
    };
    let layer = |value: &Value| value.as_u64().ok_or(error("layers_to_transform", "which are no layers"));
    let pattern = |value: &Value| {
        let text = value.as_str().ok_or(error("layers_pattern", "which is no pattern"))?;
        Ok(text.to_owned())
    };
    let targets = names("target_modules")?;
    if targets.is_empty() {
        return Err(error("target_modules", "which names no modules"));
    }
    Ok(AdapterConfig {
        rank: rank(value_of("r")).ok_or(error("r", "which is not a rank"))?,
        alpha: alpha(value_of("lora_alpha")).ok_or(error("lora_alpha", "which is not a number"))?,
        rank_stabilized: *value_of("use_rslora") == true,
        dropout: 0.0,
        targets,
        excluded: names("exclude_modules")?,
        layers: one_or_many(value_of("layers_to_transform")).map(layer).collect::<Result<_, _>>()?,
        layers_pattern: one_or_many(value_of("layers_pattern")).map(pattern).collect::<Result<_, _>>()?,
        rank_pattern: pattern_values(keys, "rank_pattern", rank, "which has a value that is not a rank")?,
        alpha_pattern: pattern_values(keys, "alpha_pattern", alpha, "which has a value that is not a number")?,
    })
}

/// Returns the elements of a list, or a single value; nothing for `null`.
fn one_or_many(value: &Value) -> impl Iterator<Item = &Value> {
    match value {
        Value::Array(list) => list.iter(),
        Value::Null => [].iter(),
        one => std::slice::from_ref(one).iter(),
    }
}

/// Returns the patterns of a key with their values, which `convert` returns, in the order of the file.
fn pattern_values<T>(
    keys: &Map<String, Value>,
    key: &'static str,
    convert: impl Fn(&Value) -> Option<T>,
    problem: &str,
) -> Result<Vec<(String, T)>, AdapterConfigError> {
    let error = || AdapterConfigError { key, problem: problem.to_owned() };
    let patterns = match keys.get(key) {
        None | Some(Value::Null) => return Ok(vec![]),
        Some(value) => value.as_object().ok_or_else(error)?,
    };
    patterns.iter().map(|(pattern, value)| Ok((pattern.clone(), convert(value).ok_or_else(error)?))).collect()
}

/// Sorts a list of names as a layer computes its projections. PEFT writes them in any order.
fn in_order_of_layers(names: ModuleNames) -> ModuleNames {
    match names {
        ModuleNames::List(mut names) => {
            names.sort_by_cached_key(|name| (Target::named(name), name.clone()));
            ModuleNames::List(names)
        }
        pattern @ ModuleNames::Pattern(_) => pattern,
    }
}

/// The base model that `adapter_config.json` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseModel<'a> {
    /// Its directory, or the name of its repository on the Hugging Face Hub.
    pub name: &'a Path,
    /// Its commit on the hub; `None` for a directory.
    pub revision: Option<&'a str>,
}

/// Writes adapters as a PEFT directory and replaces an existing one. `config` has their settings. `base` is their base model, or `None` if its weights
/// are random. `write_weights` writes `tensors`. If `trained` is given, a
/// `generation_config.json` keeps its end tokens, because they differ from those of the base model.
/// `template` is the text of a chat template that replaces that of the base model.
///
/// # Errors
/// A failure of `write_weights` or of a file operation. An existing directory is then kept.
pub fn write_adapter_dir<E: From<FilesError>>(
    path: &Path,
    config: &AdapterConfig,
    base: Option<BaseModel>,
    trained: Option<&ModelConfig>,
    template: Option<&str>,
    tensors: &[StoredTensor],
    write_weights: impl FnOnce(&mut WeightWriter) -> Result<(), E>,
) -> Result<(), E> {
    atomic::write_dir(path, |dir| {
        // PEFT expects a single weight file.
        let mut writer = WeightWriter::create(dir, "adapter_model", tensors, Bytes(u64::MAX))?;
        write_weights(&mut writer)?;
        writer.finish()?;
        atomic::write_file(&dir.join(CONFIG_FILE), &pretty_json(&config_json(config, base)))?;
        if let Some(template) = template {
            atomic::write_file(&dir.join(CHAT_TEMPLATE), template.as_bytes())?;
        }
        trained.map_or(Ok(()), |trained| Ok(write_generation_config(dir, trained)?))
    })
}

/// Returns the content of the `adapter_config.json` of these adapters, as PEFT's `LoraConfig` reads it. Without `base`, it
/// names no base model.
fn config_json(config: &AdapterConfig, base: Option<BaseModel>) -> Value {
    let mut keys = config.to_json();
    keys["base_model_name_or_path"] = json!(base.map(|base| base.name));
    keys["revision"] = json!(base.and_then(|base| base.revision));
    keys
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{DType, Failure};
    use plimsoll_program::models::decoder::AdaptedModule;
    use plimsoll_program::models::preset;
    use std::fs;

    fn tiny() -> ModelConfig {
        let sizes = ModelConfig { hidden: 8, layers: 2, heads: 2, kv_heads: 1, ..preset("llama-3.2-1b").unwrap() };
        ModelConfig { head_dim: 4, ffn: 12, vocab: 16, ..sizes }
    }

    fn adapters() -> AdapterConfig {
        AdapterConfig {
            rank: 3,
            alpha: 6.0,
            rank_stabilized: true,
            dropout: 0.0,
            targets: ModuleNames::List(vec!["q_proj".into(), "v_proj".into(), "down_proj".into()]),
            excluded: ModuleNames::NONE,
            layers: vec![],
            layers_pattern: vec![],
            rank_pattern: vec![],
            alpha_pattern: vec![],
        }
    }

    /// Writes adapters of zeros. Returns a folder with the directory `adapter`.
    fn write(adapters: &AdapterConfig) -> tempfile::TempDir {
        let (dir, config) = (tempfile::tempdir().unwrap(), tiny());
        let lora = adapters.lora(&config, 1, WeightSource::Random { seed: 1 }).unwrap();
        let stored = |p: Parameter| StoredTensor { name: p.hf_name, dtype: DType::F32, shape: p.shape };
        let tensors: Vec<StoredTensor> = lora.parameters(&config).into_iter().map(stored).collect();
        let path = dir.path().join("adapter");
        write_adapter_dir::<FilesError>(&path, adapters, None, Some(&config), None, &tensors, |writer| {
            tensors.iter().try_for_each(|tensor| writer.write(&tensor.name, &vec![0; tensor.bytes() as usize]))
        })
        .unwrap();
        dir
    }

    #[test]
    fn written_adapters_are_read_back() {
        let dir = write(&adapters());
        let adapter = AdapterDir::open(&dir.path().join("adapter"), &tiny()).unwrap();
        assert!(adapter.unknown_base_note().is_some_and(|note| note.contains("names no base model")));
        assert_eq!(adapter.config, adapters());
        let lora = adapter.lora(0.25, 1);
        assert_eq!((lora.rank, lora.alpha, lora.rank_stabilized, lora.dropout), (3, 6.0, true, 0.25));
        assert_eq!((lora.targets, lora.modules), (vec![Target::Q, Target::V, Target::Down], None));
        assert_eq!(adapter.end_tokens, Some(tiny().eos));
        assert_eq!(adapter.weights.parameters.len(), 2 * 3 * 2);
    }

    #[test]
    fn written_patterns_are_read_back() {
        let patterns = AdapterConfig {
            layers: vec![1],
            layers_pattern: vec!["layers".into()],
            excluded: ModuleNames::Pattern(".*mlp.*".into()),
            rank_pattern: vec![("v_proj".into(), 2), (".*".into(), 4)],
            alpha_pattern: vec![("1.self_attn.q_proj".into(), 2.5)],
            ..adapters()
        };
        let dir = write(&patterns);
        let adapter = AdapterDir::open(&dir.path().join("adapter"), &tiny()).unwrap();
        assert_eq!(adapter.config, patterns);
        let module = |target, rank, alpha| AdaptedModule { layer: 1, target, rank, alpha };
        let modules = vec![module(Target::Q, 4, 2.5), module(Target::V, 2, 6.0)];
        assert_eq!(adapter.lora(0.0, 1).modules, Some(modules));
        let paths = ["q_proj", "v_proj"].map(|name| format!("model.layers.1.self_attn.{name}")).to_vec();
        assert_eq!(adapter.modules(), ModuleNames::List(paths));
    }

    #[test]
    fn named_adapters_are_suggested() {
        let dir = write(&adapters());
        let other = dir.path().join("other");
        fs::rename(dir.path().join("adapter"), &other).unwrap();
        let failure = Failure::from(AdapterDir::open(dir.path(), &tiny()).unwrap_err());
        assert_eq!(failure.hints, [format!("this directory has adapters in {}", other.display())]);
    }

    #[test]
    fn unsupported_settings_are_refused_by_key() {
        let dir = write(&adapters());
        let path = dir.path().join("adapter");
        let file = path.join("adapter_config.json");
        let good: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        let refusal = |key: &str, value: Value| {
            let mut keys = good.clone();
            keys[key] = value;
            fs::write(&file, keys.to_string()).unwrap();
            let opened = AdapterDir::open(&path, &tiny()).map(|_| ()).map_err(|error| Failure::from(error).message);
            opened.err().unwrap_or_default().replace(&*file.display().to_string(), "FILE")
        };
        for (key, value, message) in [
            ("use_rslora", json!("yes"), "FILE: `use_rslora` is \"yes\", which is not supported"),
            ("use_dora", json!(true), "FILE: `use_dora` is true, which is not supported"),
            ("modules_to_save", json!(["lm_head"]), "FILE: `modules_to_save` is [\"lm_head\"], which is not supported"),
            (
                "rank_pattern",
                json!({"q_proj": "2"}),
                "FILE: `rank_pattern` is {\"q_proj\":\"2\"}, which has a value that is not a rank",
            ),
            ("target_modules", json!(null), "FILE: `target_modules` is null, which names no modules"),
            (
                "target_modules",
                json!("(q_proj"),
                "FILE: `target_modules` has `(q_proj`, which is no pattern: \
                 Parsing error at position 7: Opening parenthesis without closing parenthesis",
            ),
            ("layers_to_transform", json!([-1]), "FILE: `layers_to_transform` is [-1], which are no layers"),
            ("bias", json!("all"), "FILE: `bias` is \"all\", which is not supported"),
            ("init_lora_weights", json!("pissa"), "FILE: `init_lora_weights` is \"pissa\", which is not supported"),
            ("future_setting", json!(3), "FILE: `future_setting` is 3, which is not supported"),
            ("peft_type", json!("IA3"), "FILE: `peft_type` is \"IA3\", only \"LORA\" is supported"),
            ("r", json!(0), "FILE: `r` is 0, which is not a rank"),
            ("peft_version", json!("0.1"), ""),
            ("loftq_config", json!({}), ""),
        ] {
            assert_eq!(refusal(key, value), message);
        }
        fs::write(&file, good.to_string()).unwrap();
        let other = ModelConfig { layers: 3, ..tiny() };
        let message = Failure::from(AdapterDir::open(&path, &other).unwrap_err()).message;
        assert!(message.contains("missing `base_model.model.model.layers.2."), "{message}");
        let other = ModelConfig { ffn: 14, ..tiny() };
        let message = Failure::from(AdapterDir::open(&path, &other).unwrap_err()).message;
        assert!(message.contains("lora_A.weight` has shape [3, 12], but config.json says [3, 14]"), "{message}");
    }
}
