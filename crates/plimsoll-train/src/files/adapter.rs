//! Reading and writing of PEFT adapter directories: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! Plimsoll supports LoRA on projections of every layer, with one rank and one scale for all. A configuration that asks
//! for more is refused with the name of its key. The projections with an adapter follow from the stored tensors.

use super::atomic;
use super::error::FilesError;
use super::model_dir::{
    CHAT_TEMPLATE, ModelWeights, check_tensor, read_generation_end_tokens, write_generation_config,
};
use super::read::{WeightFiles, read_small};
use super::write::{StoredTensor, WeightWriter, pretty_json};
use plimsoll_core::Bytes;
use plimsoll_program::models::decoder::Lora;
use plimsoll_program::models::{ModelConfig, Target};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Size limit of an `adapter_config.json`. A larger file is not an adapter configuration.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Keys of an `adapter_config.json` that do not change the computation, or that repeat information from the tensors.
const IGNORED_KEYS: [&str; 14] = [
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
];

/// An opened PEFT directory with LoRA adapters that match a model.
#[derive(Debug)]
pub struct AdapterDir {
    /// Path of the directory.
    pub path: PathBuf,
    /// r: the rank of every adapter.
    pub rank: u64,
    /// Scale of the adapters: their output is multiplied by alpha / r.
    pub alpha: f64,
    /// Whether the output is multiplied by alpha / √r instead (rsLoRA).
    pub rank_stabilized: bool,
    /// Whether `adapter_config.json` names the base model (`base_model_name_or_path`).
    pub names_base_model: bool,
    /// The projections with an adapter, in the order in which a layer computes them.
    pub targets: Vec<Target>,
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
        let (config_file, of_run) = (path.join("adapter_config.json"), path.join("adapter"));
        if !config_file.exists() {
            let hint = if of_run.join("adapter_config.json").exists() {
                format!("the adapters of this run are in {}", of_run.display())
            } else {
                "name the directory that peft or plimsoll wrote: it has adapter_config.json".to_owned()
            };
            return Err(invalid(&config_file, "no such file", &hint));
        }
        let AdapterConfig { rank, alpha, rank_stabilized, names_base_model } = read_config(&config_file)?;
        let file = path.join("adapter_model.safetensors");
        if !file.exists() && path.join("adapter_model.bin").exists() {
            return Err(invalid(
                &file,
                "no such file; only adapter_model.bin exists",
                "save the adapters again with a newer version of peft",
            ));
        }
        let files = WeightFiles::open_files(vec![file])?;
        let has_adapter = |target: &Target| {
            let module = format!(".{}.lora_", target.name());
            files.entries().any(|(name, _)| name.contains(&module))
        };
        let targets: Vec<Target> = config.targets().iter().copied().filter(has_adapter).collect();
        let parameters = config.adapter_parameters(&targets, rank);
        let expected = |name: &str| parameters.iter().any(|parameter| parameter.hf_name == name);
        let missing = parameters.iter().filter(|parameter| files.entry(&parameter.hf_name).is_none());
        let missing: Vec<String> = missing.map(|parameter| parameter.hf_name.clone()).collect();
        let extra: Vec<String> =
            files.entries().map(|(name, _)| name).filter(|name| !expected(name)).map(String::from).collect();
        if targets.is_empty() || !missing.is_empty() || !extra.is_empty() {
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
            rank,
            alpha,
            rank_stabilized,
            names_base_model,
            targets,
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

    /// Returns the adapters as settings for the Programs that compute with them. `dropout` and its `seed` apply to
    /// training only.
    pub fn lora(&self, dropout: f64, seed: u64) -> Lora {
        let AdapterDir { rank, alpha, rank_stabilized, targets, weights, .. } = self;
        Lora {
            rank: *rank,
            alpha: *alpha,
            rank_stabilized: *rank_stabilized,
            dropout,
            targets: targets.clone(),
            seed,
            source: weights.source(),
        }
    }
}

/// Returns an error about the adapter file `path`, with a description of the problem and a hint for the user.
fn invalid(path: &Path, problem: &str, hint: &str) -> FilesError {
    FilesError::Adapter { path: path.to_owned(), problem: problem.to_owned(), hint: hint.to_owned() }
}

/// The supported part of an `adapter_config.json`.
struct AdapterConfig {
    rank: u64,
    alpha: f64,
    rank_stabilized: bool,
    names_base_model: bool,
}

/// Reads an `adapter_config.json` and refuses settings that Plimsoll does not support.
fn read_config(path: &Path) -> Result<AdapterConfig, FilesError> {
    const MERGE: &str = "merge the adapters into the model with peft's merge_and_unload, then use that model";
    const DOWNLOAD: &str = "the file may be damaged: download it again";
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
            "r" | "lora_alpha" => true,
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
    let rank = value_of("r").as_u64().filter(|rank| (1..=1 << 20).contains(rank));
    let alpha = value_of("lora_alpha").as_f64().filter(|alpha| alpha.is_finite());
    match (rank, alpha) {
        (Some(rank), Some(alpha)) => Ok(AdapterConfig {
            rank,
            alpha,
            rank_stabilized: value_of("use_rslora") == true,
            names_base_model: value_of("base_model_name_or_path").is_string(),
        }),
        (None, _) => Err(invalid(path, &format!("`r` is {}, which is not a rank", value_of("r")), DOWNLOAD)),
        (_, None) => {
            Err(invalid(path, &format!("`lora_alpha` is {}, which is not a number", value_of("lora_alpha")), DOWNLOAD))
        }
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

/// Writes adapters as a PEFT directory and replaces an existing one. `base` is their base model, or `None` if its weights
/// are random. `write_weights` writes `tensors`. If `trained` is given, a
/// `generation_config.json` keeps its end tokens, because they differ from those of the base model.
/// `template` is the text of a chat template that replaces that of the base model.
///
/// # Errors
/// A failure of `write_weights` or of a file operation. An existing directory is then kept.
pub fn write_adapter_dir<E: From<FilesError>>(
    path: &Path,
    lora: &Lora,
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
        atomic::write_file(&dir.join("adapter_config.json"), &pretty_json(&config_json(lora, base)))?;
        if let Some(template) = template {
            atomic::write_file(&dir.join(CHAT_TEMPLATE), template.as_bytes())?;
        }
        trained.map_or(Ok(()), |trained| Ok(write_generation_config(dir, trained)?))
    })
}

/// Returns the content of the `adapter_config.json` of these adapters, as PEFT's `LoraConfig` reads it. Without `base`, it
/// names no base model.
fn config_json(lora: &Lora, base: Option<BaseModel>) -> Value {
    // PEFT documents alpha as an integer, but accepts any number.
    let is_integer = lora.alpha.fract() == 0.0 && lora.alpha.abs() < 1e15;
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.map(|base| base.name),
        "revision": base.and_then(|base| base.revision),
        "r": lora.rank,
        "lora_alpha": if is_integer { json!(lora.alpha as i64) } else { json!(lora.alpha) },
        "lora_dropout": lora.dropout,
        "target_modules": lora.targets.iter().map(|target| target.name()).collect::<Vec<_>>(),
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "use_dora": false,
        "use_rslora": lora.rank_stabilized,
        "modules_to_save": null,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{DType, Failure};
    use plimsoll_program::models::decoder::WeightSource;
    use plimsoll_program::models::preset;
    use std::fs;

    fn tiny() -> ModelConfig {
        let sizes = ModelConfig { hidden: 8, layers: 2, heads: 2, kv_heads: 1, ..preset("llama-3.2-1b").unwrap() };
        ModelConfig { head_dim: 4, ffn: 12, vocab: 16, ..sizes }
    }

    fn lora() -> Lora {
        let (targets, source) = (vec![Target::Q, Target::V, Target::Down], WeightSource::Random { seed: 1 });
        Lora { rank: 3, alpha: 6.0, rank_stabilized: true, dropout: 0.25, targets, seed: 1, source }
    }

    fn written() -> tempfile::TempDir {
        let (dir, config, lora) = (tempfile::tempdir().unwrap(), tiny(), lora());
        let tensors: Vec<StoredTensor> = lora
            .parameters(&config)
            .into_iter()
            .map(|p| StoredTensor { name: p.hf_name, dtype: DType::F32, shape: p.shape })
            .collect();
        write_adapter_dir::<FilesError>(
            &dir.path().join("adapter"),
            &lora,
            None,
            Some(&config),
            None,
            &tensors,
            |writer| {
                tensors.iter().try_for_each(|tensor| writer.write(&tensor.name, &vec![0; tensor.bytes() as usize]))
            },
        )
        .unwrap();
        dir
    }

    #[test]
    fn written_adapters_are_read_back() {
        let dir = written();
        let adapter = AdapterDir::open(&dir.path().join("adapter"), &tiny()).unwrap();
        assert!(adapter.unknown_base_note().is_some_and(|note| note.contains("names no base model")));
        assert_eq!(adapter.lora(0.25, 1).scale(), 6.0 / 3f64.sqrt());
        assert_eq!((adapter.rank, adapter.alpha, adapter.targets), (3, 6.0, lora().targets));
        assert_eq!(adapter.end_tokens, Some(tiny().eos));
        assert_eq!(adapter.weights.parameters.len(), 2 * 3 * 2);
    }

    #[test]
    fn unsupported_settings_are_refused_by_key() {
        let dir = written();
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
            ("rank_pattern", json!({"q_proj": 2}), "FILE: `rank_pattern` is {\"q_proj\":2}, which is not supported"),
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
