//! `cargo xtask scaling-efficiency`: measures the scaling efficiency of teams of unequal simulated devices, with real
//! runs of the release build. Needs an idle machine, so CI does not run it.
//!
//! - Data parallel: each device trains alone, then all together, then a team in which all devices are as slow as the
//!   slowest one. This last team is as fast as an even split, in which faster devices wait.
//! - Sharded and pipeline: models that fit on no single device, with measured and predicted step times.

use crate::program;
use anyhow::{Context, Result, ensure};
use clap::Parser;
use plimsoll_core::{Parallelism, Plan, RunResult, StepSeconds};
use plimsoll_device::private_file;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Smallest permitted throughput of a team, relative to the sum of the throughputs of its devices alone.
const MIN_SCALING_EFFICIENCY: f64 = 0.95;
/// Smallest permitted speedup, over an even split, of a pair of devices with the relative speeds 1 and 0.57.
const MIN_SPEEDUP_OVER_EVEN_SPLIT: f64 = 1.30;

/// Largest permitted relative error of the predicted step time of sharded and pipeline runs.
const MAX_PREDICTION_ERROR: f64 = 0.10;

/// Compare teams of unequal devices with the sum of the same devices alone.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask scaling-efficiency")]
struct Args {
    /// CPU cores that the devices of a team use together. A device computes on one thread, and its ops take up to 10 %
    /// longer than the rates predict, so a device of more than 0.8 cores would fall behind its pace
    #[arg(long, default_value_t = 0.9)]
    cores: f64,
    /// Sequences per step
    #[arg(long, default_value_t = 64)]
    sequences: u64,
    /// Steps per run
    #[arg(long, default_value_t = 12)]
    steps: u64,
    /// Link between the devices
    #[arg(long, default_value = "16GB/s")]
    link: String,
}

/// Data parallel teams to measure: name, and relative speeds of the devices.
const TEAMS: [(&str, &[f64]); 4] = [
    ("1 : 0.57", &[1.0, 0.57]),
    ("1 : 0.5", &[1.0, 0.5]),
    ("1 : 0.25", &[1.0, 0.25]),
    ("8 equal", &[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
];

/// Budget of a device in MiB, and its share of the cores (`--cores`) that the devices of a team use together.
type DeviceShape = (u64, f64);

/// Teams whose devices can hold a model of 13 million parameters together, but not alone, without host memory. Each has
/// its devices, the link between them, and the kind of parallelism that it is measured with.
const SPLIT_MODELS: [(&[DeviceShape], &str, Parallelism); 7] = [
    (&[(160, 0.33), (120, 0.33), (160, 0.33)], "16GB/s", Parallelism::Sharded),
    (&[(200, 0.5), (200, 0.5)], "2GB/s", Parallelism::Sharded),
    // The second only stores a shard, and its update takes long.
    (&[(160, 0.98), (220, 0.02)], "16GB/s", Parallelism::Sharded),
    (&[(200, 0.65), (180, 0.35)], "16GB/s", Parallelism::Pipeline),
    (&[(200, 0.5), (200, 0.5)], "200MB/s", Parallelism::Pipeline),
    (&[(220, 0.65), (150, 0.35)], "50MB/s", Parallelism::Pipeline),
    (&[(160, 0.33), (120, 0.33), (160, 0.33)], "50MB/s", Parallelism::Pipeline),
];

/// Run-file section that leaves no room for offload to the host. The host is not simulated: a slow device alone could
/// run its update there at full speed. Eight devices that train alone would also have eight hosts.
const NO_HOST: &str = "[memory]\nhost = \"1MiB\"\n";

/// Sizes of a model, and length and memory settings of its run.
struct Model {
    hidden: u64,
    layers: u64,
    steps: u64,
    /// Memory section of the run file.
    memory: &'static str,
}

/// Trains all teams and prints a row with the measured and predicted speed of each.
///
/// # Errors
/// Fails if a run fails, if a team is slower than promised, or if a step time is predicted too badly.
pub fn run(arguments: &[String]) -> Result<()> {
    let args = Args::parse_from(std::iter::once("scaling-efficiency").chain(arguments.iter().map(String::as_str)));
    let folder = private_file::temporary_folder().context("cannot create a folder for the runs")?.keep();
    let measured = program::release().and_then(|binary| {
        let data_parallel = measure_data_parallel(&args, &folder, &binary);
        let split_models = measure_split_models(&args, &folder, &binary);
        match (data_parallel, split_models) {
            (Err(data_parallel), Err(split_models)) => Err(data_parallel.context(format!("and {split_models:#}"))),
            (data_parallel, split_models) => data_parallel.and(split_models),
        }
    });
    let _ = fs::remove_dir_all(&folder);
    measured
}

/// Compares the throughput of each data parallel team with the sum over its devices alone, and with an even split.
fn measure_data_parallel(args: &Args, folder: &Path, binary: &Path) -> Result<()> {
    write_run(args, folder, Model { hidden: 128, layers: 4, steps: args.steps, memory: NO_HOST })?;
    println!("simulated devices, {} sequences of 64 tokens a step; tokens/s, measured", args.sequences);
    println!("{:<10} {:>9} {:>9} {:>9} {:>7} {:>7}", "team", "sum alone", "together", "predicted", "share", "to even");
    let mut below_target = Vec::new();
    for (name, speeds) in TEAMS {
        let scale = args.cores / speeds.iter().sum::<f64>();
        let paces: Vec<f64> = speeds.iter().map(|speed| (1000.0 * speed * scale).floor() / 1000.0).collect();
        let speed = |paces: &[f64]| -> Result<RunResult> {
            let parallelism = if paces.len() == 1 { None } else { Some(Parallelism::Data) };
            train(binary, folder, &devices(args, paces), parallelism, paces.len())
        };
        // From the median step, because single slow steps are caused by the machine.
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
        if share < MIN_SCALING_EFFICIENCY || speeds[1] == 0.57 && to_even < MIN_SPEEDUP_OVER_EVEN_SPLIT {
            below_target.push(name);
        }
    }
    ensure!(below_target.is_empty(), "below the promised scaling efficiency: {}", below_target.join(", "));
    Ok(())
}

/// Compares measured and predicted step times of the sharded and pipeline teams in [`SPLIT_MODELS`].
fn measure_split_models(args: &Args, folder: &Path, binary: &Path) -> Result<()> {
    write_run(args, folder, Model { hidden: 384, layers: 8, steps: args.steps.div_ceil(3), memory: NO_HOST })?;
    println!(
        "\na model of 13 million parameters that fits on no single device; seconds per step, median of the measured"
    );
    println!("{:<28} {:>8} {:<8} {:>9} {:>9} {:>7}", "devices", "link", "split", "measured", "predicted", "error");
    let mut mispredicted = Vec::new();
    for (members, link, parallelism) in SPLIT_MODELS {
        let device = |(number, (mib, part)): (usize, &DeviceShape)| {
            format!("virtual:d{number}={mib}MiB@{:.3}:16GB/s:{link}", part * args.cores)
        };
        let devices = members.iter().enumerate().map(device).collect::<Vec<_>>().join(",");
        let result = train(binary, folder, &devices, Some(parallelism), members.len())?;
        let name = members.iter().map(|(mib, part)| format!("{mib} MiB x {part}")).collect::<Vec<_>>().join(", ");
        let StepSeconds { median, predicted, .. } = result.step_seconds;
        let off = median / predicted - 1.0;
        println!("{name:<28} {link:>8} {parallelism:<7} {median:>9.3} {predicted:>9.3} {:>+6.1}%", 100.0 * off);
        if off.abs() > MAX_PREDICTION_ERROR {
            mispredicted.push(name);
        }
    }
    ensure!(mispredicted.is_empty(), "step time mispredicted by more than promised: {}", mispredicted.join(", "));
    Ok(())
}

/// Formats simulated devices as a value of `--devices`. Each has one of the `paces`, in CPU cores.
fn devices(args: &Args, paces: &[f64]) -> String {
    let device = |(number, pace): (usize, &f64)| format!("virtual:d{number}=200MiB@{pace}:16GB/s:{}", args.link);
    paces.iter().enumerate().map(device).collect::<Vec<_>>().join(",")
}

/// Writes a run file, the configuration of a small model, and random tokens into `folder`.
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
         sequence = 64\n[train]\nsteps = {}\nbatch_tokens = {tokens}\n{}[run]\ndir = \"run\"\n",
        model.steps, model.memory
    );
    Ok(fs::write(folder.join("run.toml"), run)?)
}

/// Trains the run in `folder` on these devices with one kind of parallelism, and reads its result. Removes the run
/// folder of an earlier run first.
///
/// # Errors
/// Fails if the run fails, or if it does not train on `count` devices.
fn train(
    binary: &Path,
    folder: &Path,
    devices: &str,
    parallelism: Option<Parallelism>,
    count: usize,
) -> Result<RunResult> {
    let run = folder.join("run");
    if run.exists() {
        fs::remove_dir_all(&run)?;
    }
    let mut command = Command::new(binary);
    command.current_dir(folder).args(["train", "run.toml", "--quiet", "--no-save", "--devices", devices]);
    if let Some(parallelism) = parallelism {
        command.args(["--set", &format!("run.parallelism={parallelism}")]);
    }
    let output = command.output().context("the binary cannot be started")?;
    ensure!(output.status.success(), "{devices}: {}", String::from_utf8_lossy(&output.stderr));
    let plan: Plan = serde_json::from_slice(&fs::read(run.join("plan.json"))?)?;
    ensure!(parallelism.is_none() || plan.parallelism == parallelism, "{devices}: planned as {:?}", plan.parallelism);
    ensure!(plan.team.len().max(1) == count, "{devices}: {} devices take part", plan.team.len().max(1));
    Ok(serde_json::from_slice(&fs::read(run.join("result.json"))?)?)
}
