//! `cargo xtask sweep`: sweeps 30 runs of mixed size over two unequal virtual devices with memory 24 : 8, and compares
//! the total time with a lower bound for any schedule. Needs an idle machine.

use crate::program;
use anyhow::{Context, Result, ensure};
use clap::Parser;
use plimsoll_core::{SweepReport, SweepState};
use plimsoll_device::private_file;
use serde_json::json;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Largest permitted excess of the sweep's total time over its lower bound, as a fraction of the bound.
const MAX_EXCESS: f64 = 0.10;

/// Sweep 30 runs of mixed size over two devices.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask sweep")]
struct Args {
    /// Devices of the sweep
    #[arg(long, default_value = "virtual:a=192MiB@0.30,virtual:b=64MiB@0.15")]
    devices: String,
    /// Number of runs
    #[arg(long, default_value_t = 30)]
    runs: u64,
    /// Factor for the number of steps of all runs
    #[arg(long, default_value_t = 1.0)]
    longer: f64,
    /// Program [default: a release build of this workspace]
    #[arg(long)]
    binary: Option<PathBuf>,
}

/// Writes models, data and run files, runs the sweep, and prints its report in Markdown.
///
/// # Errors
/// Fails if a run is not done or exceeded its load line, or if the sweep took too long.
pub fn run(arguments: &[String]) -> Result<()> {
    let args = Args::parse_from(std::iter::once("sweep").chain(arguments.iter().map(String::as_str)));
    let binary = args.binary.clone().map_or_else(program::release, Ok)?;
    let folder = private_file::temporary_folder()?.keep();
    let files: Vec<PathBuf> = (0..args.runs).map(|number| write_run(&folder, number, &args)).collect::<Result<_>>()?;
    program::write_device_rates(&folder.join("cache"))?;
    let status = Command::new(binary)
        .env("PLIMSOLL_CACHE", folder.join("cache"))
        .arg("sweep")
        .args(&files)
        .args(["--devices", &args.devices, "--dir"])
        .arg(folder.join("sweep"))
        .status()
        .context("the sweep cannot be started")?;
    let report: SweepReport = serde_json::from_slice(&fs::read(folder.join("sweep/sweep.json"))?)?;
    println!("{}", markdown(&report));
    ensure!(status.success(), "runs are not done: {}", folder.display());
    for run in &report.runs {
        ensure!(run.measured_bytes <= run.predicted_bytes, "{} exceeded its memory limit", run.name);
    }
    let above = report.seconds / report.lower_bound_seconds - 1.0;
    ensure!(above <= MAX_EXCESS, "the last run ended {:.1} % above the bound", above * 100.0);
    fs::remove_dir_all(&folder)?;
    Ok(())
}

/// Writes the run file of run `number`, with its model and data, and returns the path of the run file. Models, batch
/// sizes and lengths repeat with different periods, so that runs differ.
fn write_run(folder: &Path, number: u64, args: &Args) -> Result<PathBuf> {
    let (hidden, layers) = [(64, 2), (96, 3), (128, 4), (192, 4), (256, 4), (320, 6)][(number % 6) as usize];
    let sequences = [4, 8, 16, 8, 32][(number % 5) as usize];
    let tokens = 64 * sequences;
    // Equal work for each run, times a factor from 1 to 3.
    let parameters = (layers * 12 * hidden * hidden + 512 * hidden) as f64;
    let times = 1.0 + (number * 7 % 11) as f64 / 5.0;
    let steps = ((args.longer * times * 9e10 / (6.0 * parameters * tokens as f64)) as u64).max(5);
    let model = folder.join(format!("model-{hidden}"));
    fs::create_dir_all(&model)?;
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": hidden / 32, "num_key_value_heads": hidden / 32,
        "head_dim": 32, "intermediate_size": 8 * hidden / 3 / 32 * 32, "hidden_act": "silu",
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "attention_bias": false,
        "mlp_bias": false, "tie_word_embeddings": true, "initializer_range": 0.02, "bos_token_id": null,
        "eos_token_id": 0, "torch_dtype": "float32",
    });
    fs::write(model.join("config.json"), config.to_string())?;
    let data = folder.join("train.jsonl");
    if !data.exists() {
        let row = |row: u64| {
            let ids: Vec<u64> = (0..64).map(|place| 1 + (row * row + 7 * place * (row % 5 + 1)) % 500).collect();
            format!("{}\n", json!({ "input_ids": ids }))
        };
        fs::write(&data, (0..2000).map(row).collect::<String>())?;
    }
    let path = folder.join(format!("{number:02}-{layers}x{hidden}.toml"));
    let text = format!(
        "[model]\npath = {model:?}\ninit = \"random\"\n[data]\ntrain = {data:?}\nformat = \"tokens\"\nsequence = 64\n\
         [train]\nsteps = {steps}\nbatch_tokens = {tokens}\nlearning_rate = 1e-3\n"
    );
    fs::write(&path, text)?;
    Ok(path)
}

/// Formats the report of a sweep as Markdown: a table of the runs, and lines on total time and devices.
fn markdown(report: &SweepReport) -> String {
    let mib =
        |bytes: Option<plimsoll_core::Bytes>| bytes.map_or_else(String::new, |bytes| format!("{:.1}", bytes.as_mib()));
    let mut text = String::from(
        "| run | device | share of its time | MiB limit | MiB measured | s predicted | s measured | steps | loss | retries | state |\n\
         |---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|\n",
    );
    for run in &report.runs {
        let state = serde_json::to_value(run.state).expect("a word");
        let _ = writeln!(
            text,
            "| {} | {} | {:.0} % | {} | {} | {:.1} | {:.1} | {} | {:.3} | {} | {} |",
            run.name,
            run.device.as_deref().unwrap_or_default(),
            run.share.unwrap_or(0.0) * 100.0,
            mib(run.predicted_bytes),
            mib(run.measured_bytes),
            run.predicted_seconds.unwrap_or(0.0),
            run.seconds,
            run.steps,
            run.loss.unwrap_or(f64::NAN),
            run.retries,
            state.as_str().unwrap_or_default(),
        );
    }
    let done = report.runs.iter().filter(|run| run.state == SweepState::Done).count();
    let above = |seconds: f64| (seconds / report.lower_bound_seconds - 1.0) * 100.0;
    let _ = writeln!(
        text,
        "\n{done} of {} done; first start to last end {:.1} s measured ({:+.1} %), {:.1} s predicted ({:+.1} %); bound {:.1} s (predicted)",
        report.runs.len(),
        report.seconds,
        above(report.seconds),
        report.predicted_seconds,
        above(report.predicted_seconds),
        report.lower_bound_seconds,
    );
    for device in &report.devices {
        let _ = writeln!(
            text,
            "{}: at most {} workers at a time, which reserved {} of {}",
            device.name, device.workers, device.peak_reserved_bytes, device.budget_bytes
        );
    }
    text
}
