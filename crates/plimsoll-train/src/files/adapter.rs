//! A PEFT directory with adapters of a model: `adapter_config.json` and `adapter_model.safetensors`, read and written.
//!
//! What Plimsoll computes is LoRA on the projections of every layer, one rank and one scale for all. What an adapter has
//! beyond that is refused by the name of its key. Which projections have an adapter is what the tensors say.

use super::atomic;
use super::error::FilesError;
use super::model_dir::{ModelWeights, check};
use super::read::{WeightFiles, read_small};
use super::write::{StoredTensor, WeightWriter, pretty};
use plimsoll_core::Bytes;
use plimsoll_program::models::decoder::Lora;
use plimsoll_program::models::{ModelConfig, Target};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// A larger `adapter_config.json` is something else.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Keys that say nothing about what is computed, or say what the tensors say themselves.
const INERT: [&str; 14] = [
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

/// Adapters that go with a model.
#[derive(Debug)]
pub struct AdapterDir {
    /// The directory.
    pub path: PathBuf,
    /// r.
    pub rank: u64,
    /// What adapters add is multiplied with alpha / r.
    pub alpha: f64,
    /// Whether it says of which model they are.
    pub names_base: bool,
    /// Which projections have one, in the order in which a layer computes them.
    pub targets: Vec<Target>,
    /// A and B of each, in the order of [`ModelConfig::adapter_parameters`].
    pub weights: ModelWeights,
}

impl AdapterDir {
    /// Opens a directory and holds it against the model.
    ///
    /// # Errors
    /// Adapters of another kind, of other parts, or of another model.
    pub fn open(path: &Path, config: &ModelConfig) -> Result<AdapterDir, FilesError> {
        if !path.is_dir() {
            return Err(FilesError::NoFile { path: path.to_owned(), problem: "no such directory" });
        }
        let (rank, alpha, names_base) = read_config(&path.join("adapter_config.json"))?;
        let file = path.join("adapter_model.safetensors");
        if !file.exists() && path.join("adapter_model.bin").exists() {
            return Err(bad(&file, "no such file, only adapter_model.bin", "save it again with a newer peft"));
        }
        let files = WeightFiles::open_files(vec![file])?;
        let has = |target: &Target| {
            let module = format!(".{}.lora_", target.name());
            files.entries().any(|(name, _)| name.contains(&module))
        };
        let targets: Vec<Target> = Target::ALL.into_iter().filter(has).collect();
        let parameters = config.adapter_parameters(&targets, rank);
        let expected = |name: &str| parameters.iter().any(|parameter| parameter.hf_name == name);
        let missing = parameters.iter().filter(|parameter| files.entry(&parameter.hf_name).is_none());
        let missing: Vec<String> = missing.map(|parameter| parameter.hf_name.clone()).collect();
        let extra: Vec<String> =
            files.entries().map(|(name, _)| name).filter(|name| !expected(name)).map(String::from).collect();
        if targets.is_empty() || !missing.is_empty() || !extra.is_empty() {
            return Err(FilesError::AdapterNames { dir: path.to_owned(), missing, extra });
        }
        let mut found = Vec::new();
        for parameter in parameters {
            let entry = files.entry(&parameter.hf_name).expect("seen above");
            check(&files, &parameter.hf_name, entry, &parameter)?;
            found.push((parameter, entry.clone()));
        }
        Ok(AdapterDir {
            path: path.to_owned(),
            rank,
            alpha,
            names_base,
            targets,
            weights: ModelWeights { parameters: found, files },
        })
    }

    /// What is said of adapters that name no model: they may have been trained over weights that nobody has.
    pub fn of_nothing(&self) -> Option<String> {
        let path = self.path.display();
        (!self.names_base).then(|| {
            format!(
                "{path} names no base model: adapters that were trained over random weights go with those alone, which are \
                 saved nowhere; such a model is trained whole first, and adapters over its RUN/model"
            )
        })
    }

    /// As a Program computes with them; `dropout` and its `seed` are for training.
    pub fn lora(&self, dropout: f64, seed: u64) -> Lora {
        let AdapterDir { rank, alpha, targets, weights, .. } = self;
        Lora { rank: *rank, alpha: *alpha, dropout, targets: targets.clone(), seed, source: weights.source() }
    }
}

fn bad(path: &Path, problem: &str, hint: &str) -> FilesError {
    FilesError::Adapter { path: path.to_owned(), problem: problem.to_owned(), hint: hint.to_owned() }
}

/// Rank and alpha, where nothing else is asked for, and whether a base model is named.
fn read_config(path: &Path) -> Result<(u64, f64, bool), FilesError> {
    const OTHER: &str = "merge it into its model with peft's merge_and_unload, then use that model";
    let text = read_small(path, MAX_CONFIG_BYTES)?;
    let keys: Map<String, Value> = serde_json::from_slice(&text)
        .map_err(|error| bad(path, &format!("it is no JSON object: {error}"), "fetch it again"))?;
    let named = |key: &str| keys.get(key).unwrap_or(&Value::Null);
    if named("peft_type") != "LORA" {
        return Err(bad(path, &format!("`peft_type` is {}, only \"LORA\" is read", named("peft_type")), OTHER));
    }
    for (key, value) in &keys {
        let nothing = match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            Value::String(word) => key == "bias" && word == "none",
            _ => false,
        };
        let known = match &**key {
            "r" | "lora_alpha" => true,
            // Other ways to begin move the base's weights, too.
            "init_lora_weights" => {
                *value == true || ["gaussian", "eva", "orthogonal"].iter().any(|harmless| value == harmless)
            }
            key => INERT.contains(&key),
        };
        if !nothing && !known {
            return Err(bad(path, &format!("`{key}` is {value}, which is not supported"), OTHER));
        }
    }
    let rank = named("r").as_u64().filter(|rank| (1..=1 << 20).contains(rank));
    let alpha = named("lora_alpha").as_f64().filter(|alpha| alpha.is_finite());
    match (rank, alpha) {
        (Some(rank), Some(alpha)) => Ok((rank, alpha, named("base_model_name_or_path").is_string())),
        (None, _) => Err(bad(path, &format!("`r` is {}, which is no rank", named("r")), "fetch it again")),
        (_, None) => {
            Err(bad(path, &format!("`lora_alpha` is {}, which is no number", named("lora_alpha")), "fetch it again"))
        }
    }
}

/// Writes adapters as a PEFT directory, whole, in place of what may be there. `base` is where the model lies that they
/// belong to; none where it was drawn. `write_weights` writes `tensors`.
///
/// # Errors
/// What `write_weights` or the system says; an older directory is then still there.
pub fn write_adapter_dir<E: From<FilesError>>(
    path: &Path,
    lora: &Lora,
    base: Option<&Path>,
    tensors: &[StoredTensor],
    write_weights: impl FnOnce(&mut WeightWriter) -> Result<(), E>,
) -> Result<(), E> {
    atomic::write_dir(path, |dir| {
        // PEFT looks for one file.
        let mut writer = WeightWriter::create(dir, "adapter_model", tensors, Bytes(u64::MAX))?;
        write_weights(&mut writer)?;
        writer.finish()?;
        atomic::write_file(&dir.join("adapter_config.json"), &pretty(&to_json(lora, base)))?;
        Ok(())
    })
}

/// `adapter_config.json` as PEFT's `LoraConfig` reads it.
fn to_json(lora: &Lora, base: Option<&Path>) -> Value {
    // PEFT says that alpha is a whole number, and takes any.
    let whole = lora.alpha.fract() == 0.0 && lora.alpha.abs() < 1e15;
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": if whole { json!(lora.alpha as i64) } else { json!(lora.alpha) },
        "lora_dropout": lora.dropout,
        "target_modules": lora.targets.iter().map(|target| target.name()).collect::<Vec<_>>(),
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "use_dora": false,
        "use_rslora": false,
        "modules_to_save": null,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{DType, Failure};
    use plimsoll_program::models::decoder::Source;
    use plimsoll_program::models::preset;
    use std::fs;

    fn tiny() -> ModelConfig {
        let sizes = ModelConfig { hidden: 8, layers: 2, heads: 2, kv_heads: 1, ..preset("llama-3.2-1b").unwrap() };
        ModelConfig { head_dim: 4, ffn: 12, vocab: 16, ..sizes }
    }

    fn lora() -> Lora {
        let (targets, source) = (vec![Target::Q, Target::V, Target::Down], Source::Random { seed: 1 });
        Lora { rank: 3, alpha: 6.0, dropout: 0.25, targets, seed: 1, source }
    }

    fn written() -> tempfile::TempDir {
        let (dir, config, lora) = (tempfile::tempdir().unwrap(), tiny(), lora());
        let tensors: Vec<StoredTensor> = lora
            .parameters(&config)
            .into_iter()
            .map(|p| StoredTensor { name: p.hf_name, dtype: DType::F32, shape: p.shape })
            .collect();
        write_adapter_dir::<FilesError>(&dir.path().join("adapter"), &lora, None, &tensors, |writer| {
            tensors.iter().try_for_each(|tensor| writer.write(&tensor.name, &vec![0; tensor.bytes() as usize]))
        })
        .unwrap();
        dir
    }

    #[test]
    fn what_is_written_is_read_back() {
        let dir = written();
        let adapter = AdapterDir::open(&dir.path().join("adapter"), &tiny()).unwrap();
        assert!(adapter.of_nothing().is_some_and(|said| said.contains("names no base model")));
        assert_eq!((adapter.rank, adapter.alpha, adapter.targets), (3, 6.0, lora().targets));
        assert_eq!(adapter.weights.parameters.len(), 2 * 3 * 2);
    }

    #[test]
    fn what_is_not_computed_is_refused_by_its_key() {
        let dir = written();
        let path = dir.path().join("adapter");
        let file = path.join("adapter_config.json");
        let good: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        let refusal = |key: &str, value: Value| {
            let mut keys = good.clone();
            keys[key] = value;
            fs::write(&file, keys.to_string()).unwrap();
            let said = AdapterDir::open(&path, &tiny()).map(|_| ()).map_err(|error| Failure::from(error).message);
            said.err().unwrap_or_default().replace(&*file.display().to_string(), "FILE")
        };
        for (key, value, said) in [
            ("use_rslora", json!(true), "FILE: `use_rslora` is true, which is not supported"),
            ("use_dora", json!(true), "FILE: `use_dora` is true, which is not supported"),
            ("modules_to_save", json!(["lm_head"]), "FILE: `modules_to_save` is [\"lm_head\"], which is not supported"),
            ("rank_pattern", json!({"q_proj": 2}), "FILE: `rank_pattern` is {\"q_proj\":2}, which is not supported"),
            ("bias", json!("all"), "FILE: `bias` is \"all\", which is not supported"),
            ("init_lora_weights", json!("pissa"), "FILE: `init_lora_weights` is \"pissa\", which is not supported"),
            ("of_tomorrow", json!(3), "FILE: `of_tomorrow` is 3, which is not supported"),
            ("peft_type", json!("IA3"), "FILE: `peft_type` is \"IA3\", only \"LORA\" is read"),
            ("r", json!(0), "FILE: `r` is 0, which is no rank"),
            ("peft_version", json!("0.1"), ""),
            ("loftq_config", json!({}), ""),
        ] {
            assert_eq!(refusal(key, value), said);
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
