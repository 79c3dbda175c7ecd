//! Whole processes: what is resident at the peak of a run is what the plan said. Each run has a process of its own.

use super::case::Draw;
use super::tally::Tally;
use anyhow::{Context, ensure};
use plimsoll_core::{Bytes, DType};
use plimsoll_device::process;
use plimsoll_program::models::{ModelConfig, ModelType, RopeScaling};
use plimsoll_train::config::RunFile;
use plimsoll_train::session::start::Run;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;

/// What a run may be off, beside 1 % (DESIGN §3.2).
pub const OFF_BYTES: u64 = 16 << 20;

/// A run that is measured.
struct Whole {
    name: &'static str,
    /// hidden, layers, heads, kv heads, ffn, vocabulary; none for the built-in example.
    model: Option<(ModelType, [u64; 6])>,
    /// The name of an earlier run whose model is gone on from.
    from: Option<&'static str>,
    settings: &'static [&'static str],
}

const SETTINGS: &[&str] = &["run.threads=2", "train.steps=3", "train.warmup_steps=0", "train.save_every=2"];

const RUNS: &[Whole] = &[
    Whole {
        name: "example",
        model: None,
        from: None,
        settings: &["train.steps=20", "run.devices=cpu", "memory.budget=36MiB"],
    },
    Whole {
        name: "llama",
        model: Some((ModelType::Llama, [192, 6, 6, 2, 512, 4000])),
        from: None,
        settings: &["data.sequence=128", "train.batch_tokens=1024"],
    },
    Whole {
        name: "llama, bound",
        model: Some((ModelType::Llama, [192, 6, 6, 2, 512, 4000])),
        from: None,
        settings: &["data.sequence=128", "train.batch_tokens=4096", "memory.budget=92MiB"],
    },
    Whole {
        name: "qwen3, words",
        model: Some((ModelType::Qwen3, [64, 2, 4, 1, 160, 32000])),
        from: None,
        settings: &["data.sequence=256", "train.batch_tokens=2048", "train.optimizer=sgd"],
    },
    Whole {
        name: "qwen3, gone on",
        model: None,
        from: Some("qwen3, words"),
        settings: &["data.sequence=64", "train.batch_tokens=512", "run.threads=1"],
    },
    Whole {
        name: "mistral, long",
        model: Some((ModelType::Mistral, [96, 3, 6, 3, 256, 1000])),
        from: None,
        settings: &["data.sequence=1024", "train.batch_tokens=8192", "data.pack=true"],
    },
    Whole {
        name: "qwen2, many rows",
        model: Some((ModelType::Qwen2, [48, 2, 4, 2, 100, 500])),
        from: None,
        settings: &["data.sequence=512", "train.batch_tokens=524288", "train.steps=2", "run.threads=1"],
    },
    Whole {
        name: "mistral, large",
        model: Some((ModelType::Mistral, [384, 8, 6, 6, 1024, 8192])),
        from: None,
        settings: &["data.sequence=64", "train.batch_tokens=512"],
    },
];

/// What a run says of itself, and what the system says of its process.
#[derive(Debug, Serialize, Deserialize)]
struct Figures {
    recipe: String,
    budget: Bytes,
    charges: Bytes,
    arena: Bytes,
    arena_used: Bytes,
    predicted: Bytes,
    measured: Bytes,
    /// Asked of the system by the child itself, after the run.
    resident: Bytes,
}

/// Runs them all, each in a child, and gives the table.
///
/// # Errors
/// Where a child cannot be started; what does not hold is in the tally.
pub fn whole(tally: &mut Tally) -> anyhow::Result<String> {
    let folder = std::env::temp_dir().join(format!("plimsoll-soak-{}", std::process::id()));
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
        let most = f.predicted.0 / 100 + OFF_BYTES;
        tally.figure(
            "whole process: off the prediction, MiB",
            off.unsigned_abs() as f64 / 1048576.0,
            off.unsigned_abs() <= most,
            || format!("{}: {f:?}", run.name),
        );
        tally.check("whole process: arena planned = used", f.arena == f.arena_used, || format!("{}: {f:?}", run.name));
        tally.check("whole process: under the load line", f.measured <= f.budget, || format!("{}: {f:?}", run.name));
        // The kernel's counters lag by some pages a thread.
        let same = f.resident.0.abs_diff(f.measured.0) <= 1 << 20;
        tally.check("whole process: result.json says what the system says", same, || format!("{}: {f:?}", run.name));
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

/// One run, in this process.
///
/// # Errors
/// What the run says.
pub fn work(number: usize, folder: &Path) -> anyhow::Result<()> {
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
        finish(RunFile::load(Some(&file), &settings)?)
    } else {
        finish(RunFile::load(None, &settings)?)
    }
}

fn finish(file: RunFile) -> anyhow::Result<()> {
    let run = Run::new(file)?;
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

/// A model of these sizes: hidden, layers, heads, kv heads, ffn, vocabulary.
pub fn config(model_type: ModelType, [hidden, layers, heads, kv_heads, ffn, vocab]: [u64; 6]) -> ModelConfig {
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
        qk_norm: model_type.qk_norm(),
        max_positions: 4096,
        bos: None,
        eos: vec![0],
        init_std: 0.02,
    }
}

/// The least that a run has: of these tokens any model here can be fed.
const VOCAB_MIN: u64 = 500;

/// Documents of random tokens, in a file of the folder.
///
/// # Errors
/// Where it cannot be written.
pub fn data(folder: &Path, vocab: u64) -> anyhow::Result<String> {
    let mut draw = Draw::new(7, vocab);
    let mut text = String::new();
    for _ in 0..64 {
        let ids: Vec<u64> = (0..draw.from(10, 400)).map(|_| draw.from(0, vocab - 1)).collect();
        let _ = writeln!(text, "{{\"input_ids\":{ids:?}}}");
    }
    let path = folder.join("data.jsonl");
    fs::write(&path, text)?;
    Ok(path.display().to_string())
}
