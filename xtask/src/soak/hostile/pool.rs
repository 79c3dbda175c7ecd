//! The undamaged files, made once per soak: tiny models, tokenizers, data, run files, plans, a finished run, an
//! adapter, a sweep and caches.

use super::super::case::Rng;
use super::super::whole_process::{ModelSizes, config};
use super::process::{self, Start};
use super::tokenizers::{self, VOCAB, WORDS};
use crate::program;
use anyhow::{Context, ensure};
use plimsoll_core::DType;
use plimsoll_device::private_file;
use plimsoll_program::models::ModelType;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Folder that holds an undamaged file or a copy of it, at the same place in each.
pub struct Pool {
    /// Folder of everything that the soak writes.
    pub scratch: PathBuf,
    /// Folder of the undamaged files.
    pub folder: PathBuf,
    /// Keys of the run file as `section.key`.
    pub keys: Vec<String>,
}

const RUN_FILE: &str = r#"[model]
path = "llama"

[data]
train = "data/train.jsonl"
eval = "data/eval.jsonl"
sequence = 16

[train]
steps = 2
batch_tokens = 32
learning_rate = 1e-3
schedule = "constant"
warmup_steps = 0
save_every = 1
keep = 5

[memory]
budget = "64MiB"

[run]
dir = "out"
devices = "cpu"
threads = 1
"#;

impl Pool {
    /// Makes all files with the program `binary`.
    ///
    /// # Errors
    /// Fails if a file cannot be written or a command of the program fails.
    pub fn new(binary: &Path) -> anyhow::Result<Pool> {
        let scratch = private_file::temporary_folder().context("cannot make a folder")?.keep();
        let mut pool = Pool { folder: scratch.join("pool"), scratch, keys: Vec::new() };
        let folder = &pool.folder;
        program::write_device_rates(&folder.join("cache"))?;
        fs::create_dir(folder.join("temporary"))?;
        pool.write("run.toml", RUN_FILE)?;
        pool.write_data()?;
        pool.write_special_files()?;
        for family in ModelType::ALL {
            pool.make_model(family, binary)?;
        }
        let virtual_devices = "virtual:a=64MiB@0.4,virtual:b=48MiB@0.3";
        let team = ["--devices", virtual_devices, "--set", "run.parallelism=all"];
        pool.make_plan("plan.json", &[], binary)?;
        pool.make_plan("team-plan.json", &team, binary)?;
        pool.start("train run.toml --quiet --set run.dir=run", binary)?;
        // As a run that was killed between its last checkpoint and its result.
        fs::remove_dir_all(folder.join("run/model"))?;
        fs::remove_file(folder.join("run/result.json"))?;
        pool.start("train run.toml --quiet --set train.method=lora --set run.dir=tuned", binary)?;
        fs::rename(folder.join("tuned/adapter"), folder.join("adapter"))?;
        fs::remove_dir_all(folder.join("tuned"))?;
        pool.start("sweep run.toml --quiet --dir sweep --set train.seed=1,2 --devices cpu=128MiB", binary)?;
        let full = fs::read_to_string(folder.join("run/run.toml"))?;
        let full = full.replace(&format!("{}/run\"", folder.display()), "out\"");
        pool.write("full.toml", full.replace(&format!("{}/", folder.display()), ""))?;
        pool.keys = keys(&full);
        Ok(pool)
    }

    /// Copies all files to the folder of input `number`, and returns that folder.
    ///
    /// # Errors
    /// Fails if a file cannot be copied.
    pub fn copy_for(&self, number: u64) -> anyhow::Result<PathBuf> {
        let folder = self.scratch.join(format!("input-{number}"));
        self.copy_folder(&self.folder, &folder)?;
        fs::write(folder.join("victim"), "precious")?;
        Ok(folder)
    }

    /// Copies a folder. Paths of the pool in run files become those of the copy.
    fn copy_folder(&self, from: &Path, to: &Path) -> anyhow::Result<()> {
        fs::create_dir(to)?;
        for entry in fs::read_dir(from)? {
            let (entry, source) = entry.map(|entry| (entry.file_type(), entry.path()))?;
            let (kind, target) = (entry?, to.join(source.file_name().unwrap_or_default()));
            let name = target.to_string_lossy().into_owned();
            if kind.is_dir() {
                self.copy_folder(&source, &target)?;
            } else if kind.is_symlink() {
                symlink(fs::read_link(&source)?, &target)?;
            } else if kind.is_file() && name.ends_with(".toml") {
                let copy = to.ancestors().find(|folder| folder.parent() == Some(self.scratch.as_path())).unwrap_or(to);
                let text = fs::read_to_string(&source)?;
                let (pool, copy) = (self.folder.display().to_string(), copy.display().to_string());
                fs::write(&target, text.replace(&format!("{pool}/"), &format!("{copy}/")))?;
            } else if kind.is_file() {
                fs::copy(&source, &target)?;
            }
        }
        Ok(())
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> anyhow::Result<()> {
        let path = self.folder.join(name);
        fs::create_dir_all(path.parent().context("a file has a folder")?)?;
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Runs a command of the program to its end, and returns its stdout.
    fn start(&self, command: &str, binary: &Path) -> anyhow::Result<Vec<u8>> {
        let start = Start::new(command.split(' ').map(Into::into).collect());
        let ended = process::run(binary, &self.folder, &start)?;
        let said = String::from_utf8_lossy(&ended.stderr);
        ensure!(ended.code() == Some(0), "plimsoll {command}: {}: {said}", ended.in_words());
        Ok(ended.stdout)
    }

    fn make_plan(&self, name: &str, arguments: &[&str], binary: &Path) -> anyhow::Result<()> {
        let plan = self.start(&[&["plan run.toml --json"][..], arguments].concat().join(" "), binary)?;
        self.write(name, plan)
    }

    /// Makes the folder of a model: a configuration, a tokenizer, and the weights after a short training.
    fn make_model(&self, family: ModelType, binary: &Path) -> anyhow::Result<()> {
        let name = family.name();
        let (heads, kv_heads) = (2, if family == ModelType::Qwen2 { 2 } else { 1 });
        let sizes = ModelSizes { hidden: 16, layers: 2, heads, kv_heads, ffn: 24, vocab: VOCAB };
        let shape = config(family, sizes).to_json(None, DType::F32);
        self.write(&format!("{name}-new/config.json"), shape.to_string())?;
        self.write(&format!("{name}-new/tokenizer.json"), tokenizers::tokenizer(family).to_string())?;
        self.write(&format!("{name}-new/tokenizer_config.json"), json!({"eos_token": "<end>"}).to_string())?;
        let settings = format!("--set model.path={name}-new --set model.init=random --set run.dir={name}-run");
        self.start(&format!("train run.toml --quiet {settings}"), binary)?;
        let model = self.folder.join(name);
        fs::rename(self.folder.join(format!("{name}-run/model")), &model)?;
        for name in [format!("{name}-run"), format!("{name}-new")] {
            fs::remove_dir_all(self.folder.join(name))?;
        }
        for (file, content) in [
            ("tokenizer_config.json", json!({"eos_token": "<end>", "add_bos_token": false})),
            ("special_tokens_map.json", json!({"eos_token": {"content": "<end>"}, "unk_token": "<unk>"})),
            ("generation_config.json", json!({"eos_token_id": [0], "do_sample": false})),
        ] {
            self.write(&format!("{name}/{file}"), content.to_string())?;
        }
        // One model has its weights in a file with an index.
        if family == ModelType::Qwen2 { self.split_weights(&model) } else { Ok(()) }
    }

    /// Renames the weights of a model, and writes the index that names their file.
    fn split_weights(&self, model: &Path) -> anyhow::Result<()> {
        let part = "model-00001-of-00001.safetensors";
        fs::rename(model.join("model.safetensors"), model.join(part))?;
        let bytes = fs::read(model.join(part))?;
        let end = 8 + u64::from_le_bytes(bytes[..8].try_into()?) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..end])?;
        let names = header.as_object().into_iter().flatten().map(|(name, _)| name.clone());
        let map: serde_json::Map<String, Value> =
            names.filter(|name| name != "__metadata__").map(|name| (name, part.into())).collect();
        let index = json!({"metadata": {"total_size": bytes.len() - end}, "weight_map": map});
        fs::write(model.join("model.safetensors.index.json"), index.to_string())?;
        Ok(())
    }

    fn write_data(&self) -> anyhow::Result<()> {
        let mut rng = Rng::new(26, 0);
        let mut texts = [String::new(), String::new()];
        let mut tokens = String::new();
        for number in 0..60 {
            let words: Vec<&str> = (0..rng.range(3, 12)).map(|_| rng.pick(&WORDS)).collect();
            let line = json!({"text": words.join(" "), "source": number});
            let _ = writeln!(texts[usize::from(number % 6 == 0)], "{line}");
            let ids: Vec<u64> = (0..rng.range(3, 24)).map(|_| rng.range(2, VOCAB - 1)).collect();
            let labels: Vec<i64> = ids.iter().map(|id| if id % 5 == 0 { -100 } else { *id as i64 }).collect();
            let mask = vec![1; ids.len()];
            let _ = writeln!(tokens, "{}", json!({"input_ids": ids, "labels": labels, "attention_mask": mask}));
        }
        self.write("data/train.jsonl", &texts[0])?;
        self.write("data/eval.jsonl", &texts[1])?;
        self.write("data/tokens.jsonl", tokens)?;
        self.write("data/story.txt", WORDS.join(" ").repeat(20))
    }

    fn write_special_files(&self) -> anyhow::Result<()> {
        fs::create_dir_all(self.folder.join("special/folder"))?;
        self.write("special/empty", "")?;
        for (name, target) in [("loop", "loop"), ("zero", "/dev/zero"), ("dangling", "nowhere")] {
            symlink(target, self.folder.join("special").join(name))?;
        }
        Ok(())
    }
}

/// Creates a FIFO and a socket in `special` of an input's folder. A copy of the pool cannot contain them.
///
/// # Errors
/// Fails if a file cannot be made.
pub fn make_special_files(folder: &Path) -> anyhow::Result<()> {
    let special = folder.join("special");
    let made = Command::new("mkfifo").arg(special.join("fifo")).status()?.success();
    ensure!(made, "cannot make a FIFO");
    std::os::unix::net::UnixListener::bind(special.join("socket"))?;
    Ok(())
}

/// Returns all keys of a run file as `section.key`.
fn keys(text: &str) -> Vec<String> {
    let (mut section, mut keys) = ("", Vec::new());
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = name;
        } else if let Some((key, _)) = line.split_once(" = ") {
            keys.push(format!("{section}.{key}"));
        }
    }
    // A full run file lacks the keys without a default.
    let others = ["model.preset", "model.adapter", "train.epochs", "train.hours", "memory.file", "memory.file_dir"];
    keys.extend(others.iter().chain(&["recipe.micro_batch", "run.max_temperature"]).map(|key| (*key).to_owned()));
    keys
}
