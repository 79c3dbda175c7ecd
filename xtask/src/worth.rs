//! `cargo xtask worth`: what unequal devices are worth together. Each device of a team trains alone, then all of them, then
//! a team in which the fastest is as slow as the slowest (what an even split comes to: the fast one waits). After that a
//! model that no device of a pair holds, as state in parts and as a pipeline: measured seconds beside predicted ones.
//! Simulated devices, real runs of the release binary; a measurement, so CI does not run it.

use crate::program;
use anyhow::{Context, Result, ensure};
use clap::Parser;
use plimsoll_core::{Plan, RunResult, Sharing, StepSeconds};
use std::fs;
use std::path::Path;
use std::process::Command;

/// A team has this share of what its devices do alone, at least.
const SUM_LEAST: f64 = 0.95;
/// And beats the even split of the pair 1 : 0.57 by this.
const EVEN_LEAST: f64 = 1.30;

/// State in parts and pipelines take this much longer or shorter than predicted, at most.
const OFF_MOST: f64 = 0.10;

/// Measure teams of unequal devices against what each does alone.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask worth")]
struct Args {
    /// Cores that the devices of a team have together. A device computes on one thread, and what its ops really take is up
    /// to a tenth above the rates: one that plays more than 0.8 of a core falls behind its own pace
    #[arg(long, default_value_t = 0.9)]
    cores: f64,
    /// Sequences of a step
    #[arg(long, default_value_t = 64)]
    sequences: u64,
    /// Steps of each run
    #[arg(long, default_value_t = 12)]
    steps: u64,
    /// The link between the devices
    #[arg(long, default_value = "16GB/s")]
    link: String,
}

/// Teams by the speeds of their devices.
const TEAMS: [(&str, &[f64]); 4] = [
    ("1 : 0.57", &[1.0, 0.57]),
    ("1 : 0.5", &[1.0, 0.5]),
    ("1 : 0.25", &[1.0, 0.25]),
    ("8 equal", &[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
];

/// A device: its budget in MiB and its part of all cores.
type Member = (u64, f64);

/// Teams that hold a model of 13 million parameters only together, nothing of it on the host: the devices, the link
/// between them, and how the model is then shared.
const TOGETHER: [(&[Member], &str, Sharing); 6] = [
    (&[(160, 0.33), (120, 0.33), (160, 0.33)], "16GB/s", Sharing::State),
    (&[(200, 0.5), (200, 0.5)], "2GB/s", Sharing::State),
    (&[(200, 0.65), (180, 0.35)], "16GB/s", Sharing::Layers),
    (&[(200, 0.5), (200, 0.5)], "200MB/s", Sharing::Layers),
    (&[(220, 0.65), (150, 0.35)], "50MB/s", Sharing::Layers),
    (&[(160, 0.33), (120, 0.33), (160, 0.33)], "50MB/s", Sharing::Layers),
];

/// The host is one for all, and not simulated: a slow device alone would leave its update to it, and eight alone would have
/// eight hosts. So nothing waits there.
const NO_HOST: &str = "[memory]\nhost = \"1MiB\"\n";

/// What a run trains.
struct Model {
    hidden: u64,
    layers: u64,
    steps: u64,
    /// The run file's part about memory.
    memory: &'static str,
}

/// Measures every team and prints a row for each.
///
/// # Errors
/// A run that fails, or a team that is worth less than is promised.
pub fn run(arguments: &[String]) -> Result<()> {
    let args = Args::parse_from(std::iter::once("worth").chain(arguments.iter().map(String::as_str)));
    let folder = std::env::temp_dir().join(format!("plimsoll-worth-{}", std::process::id()));
    fs::create_dir_all(&folder).context("no room for the runs")?;
    let measured = program::release().and_then(|binary| {
        let batches = batches(&args, &folder, &binary);
        let ways = ways(&args, &folder, &binary);
        match (batches, ways) {
            (Err(batches), Err(ways)) => Err(batches.context(format!("and {ways:#}"))),
            (batches, ways) => batches.and(ways),
        }
    });
    let _ = fs::remove_dir_all(&folder);
    measured
}

/// Shares of a batch, against what the devices do alone.
fn batches(args: &Args, folder: &Path, binary: &Path) -> Result<()> {
    write_run(args, folder, Model { hidden: 128, layers: 4, steps: args.steps, memory: NO_HOST })?;
    println!("simulated devices, {} sequences of 64 tokens a step; tokens/s, measured", args.sequences);
    println!("{:<10} {:>9} {:>9} {:>9} {:>7} {:>7}", "team", "sum alone", "together", "predicted", "share", "to even");
    let mut short = Vec::new();
    for (name, speeds) in TEAMS {
        let scale = args.cores / speeds.iter().sum::<f64>();
        let paces: Vec<f64> = speeds.iter().map(|speed| (1000.0 * speed * scale).floor() / 1000.0).collect();
        let speed = |paces: &[f64]| -> Result<RunResult> { train(binary, folder, &devices(args, paces)) };
        // Of a median step: a slow one is the machine's.
        let rate = |result: &RunResult| (args.sequences * 64) as f64 / result.step_seconds.median;
        let mut alone = 0.0;
        let mut known: Vec<(f64, f64)> = Vec::new();
        for &pace in &paces {
            let tokens = match known.iter().find(|(of, _)| *of == pace) {
                Some((_, tokens)) => *tokens,
                None => rate(&speed(&[pace])?),
            };
            known.push((pace, tokens));
            alone += tokens;
        }
        let together = speed(&paces)?;
        let slowest = paces.iter().copied().fold(f64::INFINITY, f64::min);
        let even = rate(&speed(&vec![slowest; paces.len()])?);
        let (share, to_even) = (rate(&together) / alone, rate(&together) / even);
        let predicted = (args.sequences * 64) as f64 / together.step_seconds.predicted;
        println!(
            "{name:<10} {alone:>9.0} {:>9.0} {predicted:>9.0} {:>6.1}% {to_even:>6.2}x",
            rate(&together),
            100.0 * share
        );
        if share < SUM_LEAST || speeds[1] == 0.57 && to_even < EVEN_LEAST {
            short.push(name);
        }
    }
    ensure!(short.is_empty(), "worth less than is promised: {}", short.join(", "));
    Ok(())
}

/// State in parts and pipelines, against what was predicted.
fn ways(args: &Args, folder: &Path, binary: &Path) -> Result<()> {
    write_run(args, folder, Model { hidden: 384, layers: 8, steps: args.steps.div_ceil(3), memory: NO_HOST })?;
    println!("\na model of 13 million parameters that no device holds; seconds of a step, the median measured");
    println!("{:<28} {:>8} {:<7} {:>9} {:>9} {:>7}", "devices", "link", "way", "measured", "predicted", "off");
    let mut off_by_much = Vec::new();
    for (members, link, sharing) in TOGETHER {
        let device = |(number, (mib, part)): (usize, &Member)| {
            format!("virtual:d{number}={mib}MiB@{:.3}:16GB/s:{link}", part * args.cores)
        };
        let result = train(binary, folder, &members.iter().enumerate().map(device).collect::<Vec<_>>().join(","))?;
        let plan: Plan = serde_json::from_slice(&fs::read(folder.join("run/plan.json"))?)?;
        let name = members.iter().map(|(mib, part)| format!("{mib} MiB x {part}")).collect::<Vec<_>>().join(", ");
        ensure!(plan.sharing == Some(sharing), "{name}: shared as {:?}", plan.sharing);
        let StepSeconds { median, predicted, .. } = result.step_seconds;
        let off = median / predicted - 1.0;
        println!("{name:<28} {link:>8} {sharing:<7} {median:>9.3} {predicted:>9.3} {:>+6.1}%", 100.0 * off);
        if off.abs() > OFF_MOST {
            off_by_much.push(name);
        }
    }
    ensure!(off_by_much.is_empty(), "further from what was predicted than is promised: {}", off_by_much.join(", "));
    Ok(())
}

fn devices(args: &Args, paces: &[f64]) -> String {
    let device = |(number, pace): (usize, &f64)| format!("virtual:d{number}=200MiB@{pace}:16GB/s:{}", args.link);
    paces.iter().enumerate().map(device).collect::<Vec<_>>().join(",")
}

/// A small model on tokens drawn at random: what is learned does not matter.
fn write_run(args: &Args, folder: &Path, model: Model) -> Result<()> {
    let tokens = args.sequences * 64;
    let mut state = 1u64;
    let mut draw = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % 1000
    };
    let line = |draw: &mut dyn FnMut() -> u64| {
        let ids: Vec<String> = (0..65).map(|_| draw().to_string()).collect();
        format!("{{\"input_ids\": [{}]}}\n", ids.join(", "))
    };
    let lines: String = (0..4 * args.sequences).map(|_| line(&mut draw)).collect();
    fs::write(folder.join("train.jsonl"), lines)?;
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": model.hidden,
        "intermediate_size": 3 * model.hidden, "num_attention_heads": model.hidden / 32,
        "num_key_value_heads": 2, "num_hidden_layers": model.layers, "vocab_size": 1024,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": true, "torch_dtype": "float32"});
    fs::write(folder.join("config.json"), config.to_string())?;
    let run = format!(
        "[model]\npath = \"config.json\"\ninit = \"random\"\n[data]\ntrain = \"train.jsonl\"\nformat = \"tokens\"\n\
         sequence = 64\n[train]\nsteps = {}\nbatch_tokens = {tokens}\n{}[run]\ndir = \"run\"\nteam = \"all\"\n",
        model.steps, model.memory
    );
    Ok(fs::write(folder.join("run.toml"), run)?)
}

fn train(binary: &Path, folder: &Path, devices: &str) -> Result<RunResult> {
    let run = folder.join("run");
    if run.exists() {
        fs::remove_dir_all(&run)?;
    }
    let output = Command::new(binary)
        .current_dir(folder)
        .args(["train", "run.toml", "--quiet", "--no-save", "--devices", devices])
        .output()
        .context("the binary cannot be started")?;
    ensure!(output.status.success(), "{devices}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&fs::read(run.join("result.json"))?)?)
}
