//! Whole processes: compares the peak resident memory of a run with the plan. Each run is a process of its own.

use super::case::Rng;
use super::tally::Tally;
use anyhow::{Context, ensure};
use plimsoll_core::{Bytes, DType};
use plimsoll_device::{private_file, process};
use plimsoll_program::models::{Extras, ModelConfig, ModelType, RopeScaling};
use plimsoll_train::config::RunConfig;
use plimsoll_train::session::start::Run;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;

/// Permitted difference in bytes between predicted and measured memory of a process, in addition to 1 %.
pub const TOLERANCE_BYTES: u64 = 16 << 20;

/// Sizes of a small model.
#[derive(Clone, Copy, Debug)]
pub struct ModelSizes {
    /// Hidden size.
    pub hidden: u64,
    /// Number of layers.
    pub layers: u64,
    /// Number of attention heads.
    pub heads: u64,
    /// Number of key/value heads.
    pub kv_heads: u64,
    /// Feed-forward size.
    pub ffn: u64,
    /// Vocabulary size.
    pub vocab: u64,
}

/// A run whose memory is measured, in a process of its own.
struct ProcessRun {
    name: &'static str,
    /// Type and sizes of a new model; `None` for the built-in example, and for the model of an earlier run.
    model: Option<(ModelType, ModelSizes)>,
    /// Name of an earlier run whose model this run trains further; `None` if the run starts from a new model or from
    /// the built-in example.
    from: Option<&'static str>,
    settings: &'static [&'static str],
}

const SETTINGS: &[&str] = &["run.threads=2", "train.steps=3", "train.warmup_steps=0", "train.save_every=2"];

const RUNS: &[ProcessRun] = &[
    ProcessRun {
        name: "example",
        model: None,
        from: None,
        settings: &["train.steps=20", "run.devices=cpu", "memory.budget=36MiB"],
    },
    ProcessRun {
        name: "llama",
        model: Some((
            ModelType::Llama,
            ModelSizes { hidden: 192, layers: 6, heads: 6, kv_heads: 2, ffn: 512, vocab: 4000 },
        )),
        from: None,
        settings: &["data.sequence=128", "train.batch_tokens=1024"],
    },
    ProcessRun {
        name: "llama, bound",
        model: Some((
            ModelType::Llama,
            ModelSizes { hidden: 192, layers: 6, heads: 6, kv_heads: 2, ffn: 512, vocab: 4000 },
        )),
        from: None,
        settings: &["data.sequence=128", "train.batch_tokens=4096", "memory.budget=92MiB"],
    },
    ProcessRun {
        name: "qwen3, words",
        model: Some((
            ModelType::Qwen3,
            ModelSizes { hidden: 64, layers: 2, heads: 4, kv_heads: 1, ffn: 160, vocab: 32000 },
        )),
        from: None,
        settings: &["data.sequence=256", "train.batch_tokens=2048", "train.optimizer=sgd"],
    },
    ProcessRun {
        name: "qwen3, continued",
        model: None,
        from: Some("qwen3, words"),
        settings: &["data.sequence=64", "train.batch_tokens=512", "run.threads=1"],
    },
    ProcessRun {
        name: "mistral, long",
        model: Some((
            ModelType::Mistral,
            ModelSizes { hidden: 96, layers: 3, heads: 6, kv_heads: 3, ffn: 256, vocab: 1000 },
        )),
        from: None,
        settings: &["data.sequence=1024", "train.batch_tokens=8192", "data.pack=true"],
    },
    ProcessRun {
        name: "qwen2, many rows",
        model: Some((
            ModelType::Qwen2,
            ModelSizes { hidden: 48, layers: 2, heads: 4, kv_heads: 2, ffn: 100, vocab: 500 },
        )),
        from: None,
        settings: &["data.sequence=512", "train.batch_tokens=524288", "train.steps=2", "run.threads=1"],
    },
    ProcessRun {
        name: "mistral, large",
        model: Some((
            ModelType::Mistral,
            ModelSizes { hidden: 384, layers: 8, heads: 6, kv_heads: 6, ffn: 1024, vocab: 8192 },
        )),
        from: None,
        settings: &["data.sequence=64", "train.batch_tokens=512"],
    },
];

/// Memory of a run: figures of its plan, figures of its `result.json`, and a figure of the operating system.
#[derive(Debug, Serialize, Deserialize)]
struct Figures {
    recipe: String,
    budget: Bytes,
    charges: Bytes,
    arena: Bytes,
    arena_used: Bytes,
    predicted: Bytes,
    measured: Bytes,
    /// Peak resident memory that the system reports for the process.
    resident: Bytes,
}

/// Trains each of [`RUNS`] in a child process, adds checks of its memory to `tally`, and returns a table of planned and
/// measured memory.
///
/// # Errors
/// Fails if a child process cannot be started. Failed checks are in the tally.
pub fn run_all(tally: &mut Tally) -> anyhow::Result<String> {
    let folder = private_file::temporary_folder().context("cannot make a folder")?.keep();
    let mut table = format!(
        "{:<18} {:>10} {:>10} {:>10} {:>10} {:>10} {:>8}  recipe\n",
        "run", "arena", "used", "charges", "predicted", "measured", "off"
    );
    for (number, run) in RUNS.iter().enumerate() {
        let output = Command::new(std::env::current_exe().context("where is this program?")?)
            .args(["soak", "--whole-worker", &number.to_string(), "--folder"])
            .arg(&folder)
            .env("PLIMSOLL_CACHE", folder.join("cache"))
            .env("RUST_BACKTRACE", "0")
            .output()
            .context("cannot start a run")?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let figures = output
            .stdout
            .split(|byte| *byte == b'\n')
            .rev()
            .find_map(|line| serde_json::from_slice::<Figures>(line).ok());
        let Some(f) = figures else {
            tally.check("whole process: runs", false, || format!("{}: {}: {said}", run.name, output.status));
            continue;
        };
        tally.check("whole process: runs", true, String::new);
        let off = f.measured.0 as i64 - f.predicted.0 as i64;
        let most = f.predicted.0 / 100 + TOLERANCE_BYTES;
        tally.figure(
            "whole process: off the prediction, MiB",
            off.unsigned_abs() as f64 / 1048576.0,
            off.unsigned_abs() <= most,
            || format!("{}: {f:?}", run.name),
        );
        tally.check("whole process: arena planned = used", f.arena == f.arena_used, || format!("{}: {f:?}", run.name));
        tally.check("whole process: under the load line", f.measured <= f.budget, || format!("{}: {f:?}", run.name));
        // The counters of the Linux kernel lag by some pages per thread.
        let same = f.resident.0.abs_diff(f.measured.0) <= 1 << 20;
        tally.check("whole process: result.json matches the system", same, || format!("{}: {f:?}", run.name));
        let mib = |bytes: u64| format!("{:.2}", bytes as f64 / 1048576.0);
        let _ = writeln!(
            table,
            "{:<18} {:>10} {:>10} {:>10} {:>10} {:>10} {:>+8.2}  {}",
            run.name,
            mib(f.arena.0),
            mib(f.arena_used.0),
            mib(f.charges.0),
            mib(f.predicted.0),
            mib(f.measured.0),
            off as f64 / 1048576.0,
            f.recipe
        );
    }
    let _ = fs::remove_dir_all(&folder);
    Ok(table + "(MiB)")
}

/// Trains run `number` of [`RUNS`] in this process, and prints its memory as JSON. `folder` holds the folders of all
/// runs.
///
/// # Errors
/// Fails if the run fails.
pub fn run_one(number: usize, folder: &Path) -> anyhow::Result<()> {
    let run = RUNS.get(number).context("there is no such run")?;
    let folder_of = |name: &str| folder.join(name.replace([' ', ','], "_"));
    let here = folder_of(run.name);
    fs::create_dir_all(&here)?;
    let mut settings: Vec<String> = SETTINGS.iter().chain(run.settings).map(|s| (*s).to_owned()).collect();
    settings.push(format!("run.dir={}", here.join("run").display()));
    if run.settings.iter().all(|s| !s.starts_with("memory.budget")) {
        settings.push("memory.budget=1GiB".into());
    }
    let mut path = None;
    if let Some((model_type, sizes)) = run.model {
        let config = config(model_type, sizes);
        fs::write(here.join("config.json"), config.to_json(None, DType::F32).to_string())?;
        settings.extend([format!("model.path={}", here.display()), "model.init=random".into()]);
        path = Some(data(&here, config.vocab)?);
    } else if let Some(from) = run.from {
        settings.push(format!("model.path={}", folder_of(from).join("run/model").display()));
        path = Some(data(&here, VOCAB_MIN)?);
    }
    if let Some(path) = path {
        settings.extend([format!("data.train={path}"), format!("data.eval={path}"), "data.format=tokens".into()]);
        let file = here.join("run.toml");
        fs::write(&file, "")?;
        train(RunConfig::load(Some(&file), &settings)?)
    } else {
        train(RunConfig::load(None, &settings)?)
    }
}

fn train(file: RunConfig) -> anyhow::Result<()> {
    let run = Run::new(file.into())?;
    let plan = run.prepared().planned.plan.clone();
    ensure!(plan.fits, "does not fit: {:?}", plan.needs);
    let outcome = run.start(&mut |_| {}, &AtomicBool::new(false))?;
    let (memory, device) = (&outcome.result.memory[0], &plan.devices[0]);
    let figures = Figures {
        recipe: plan.recipe.to_string(),
        budget: device.budget_bytes,
        charges: device.charges_bytes,
        arena: memory.arena_bytes,
        arena_used: memory.arena_measured_bytes,
        predicted: memory.predicted_bytes,
        measured: memory.measured_bytes.context("what the process holds")?,
        resident: process::peak_resident()?,
    };
    println!("\n{}", serde_json::to_string(&figures)?);
    Ok(())
}

/// Returns the configuration of a model with these sizes.
pub fn config(model_type: ModelType, sizes: ModelSizes) -> ModelConfig {
    let ModelSizes { hidden, layers, heads, kv_heads, ffn, vocab } = sizes;
    ModelConfig {
        model_type,
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim: hidden / heads,
        ffn,
        vocab,
        tied: false,
        norm_eps: 1e-5,
        rope_theta: 1e4,
        rope_scaling: RopeScaling::None,
        qkv_bias: model_type.qkv_bias(),
        attention_out_bias: false,
        ffn_bias: false,
        qk_norm: model_type.qk_norm(),
        max_positions: 4096,
        bos: None,
        eos: vec![0],
        init_std: 0.02,
        extras: Extras::of_family(model_type),
    }
}

/// Smallest vocabulary of all models in [`RUNS`]. Data with tokens below this number suit each of them.
pub const VOCAB_MIN: u64 = 500;

/// Writes documents of random tokens below `vocab` to a file in `folder`, and returns the file's path.
///
/// # Errors
/// Fails if the file cannot be written.
pub fn data(folder: &Path, vocab: u64) -> anyhow::Result<String> {
    let mut rng = Rng::new(7, vocab);
    let mut text = String::new();
    for _ in 0..64 {
        let ids: Vec<u64> = (0..rng.range(10, 400)).map(|_| rng.range(0, vocab - 1)).collect();
        let _ = writeln!(text, "{{\"input_ids\":{ids:?}}}");
    }
    let path = folder.join("data.jsonl");
    fs::write(&path, text)?;
    Ok(path.display().to_string())
}
