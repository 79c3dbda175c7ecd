//! `cargo xtask predict`: compares predicted and measured step times of random recipes. Needs an idle machine, so CI
//! does not run it.

use crate::soak::case::Rng;
use anyhow::{Result, ensure};
use clap::Parser;
use plimsoll_core::DType;
use plimsoll_program::models::decoder::Base;
use plimsoll_train::bench::{StepShape, step};

/// Largest permitted median of the relative errors of predicted step times.
const MAX_MEDIAN_ERROR: f64 = 0.10;

/// Predict and measure the training steps of random recipes.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask predict")]
struct Args {
    /// Seed of the random recipes
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of recipes
    #[arg(long, default_value_t = 36)]
    recipes: u64,
    /// Device: cpu or cuda:0
    #[arg(long, default_value = "cpu")]
    device: String,
    /// CPU threads
    #[arg(long, default_value_t = 2)]
    threads: u32,
}

/// Returns the shape of a random training step of about 2 to 250 GFLOP.
fn shape(rng: &mut Rng, args: &Args) -> StepShape {
    loop {
        let heads = rng.pick(&[4, 6, 8, 12]);
        let hidden = heads * rng.pick(&[32, 64]);
        let shape = StepShape {
            vocab: rng.pick(&[1000, 4096, 16000]),
            layers: rng.range(2, 8),
            hidden,
            heads,
            kv_heads: rng.pick(&[heads, heads / 2]),
            ffn: hidden * rng.range(2, 4),
            sequence: rng.pick(&[64, 128, 256, 512]),
            batch: rng.pick(&[1, 2, 4, 8]),
            accumulate: rng.pick(&[1, 2, 4]),
            threads: args.threads,
            steps: 7,
            warmup: 2,
            dtype: rng.pick(&[DType::F32, DType::Bf16]),
            checkpoint: rng.chance(0.4),
            memory: None,
            device: args.device.clone(),
            rank: 0,
            base: Base::Plain,
        };
        let parameters = shape.layers * hidden * (4 * hidden + 3 * shape.ffn) + shape.vocab * hidden;
        let flops = 6.0 * (parameters * shape.sequence * shape.batch * shape.accumulate) as f64;
        if (2e9..2.5e11).contains(&flops) {
            return shape;
        }
    }
}

/// Predicts and measures the step time of random recipes. Prints a line for each, and the median and 90th percentile of
/// the errors.
///
/// # Errors
/// Fails if a step cannot run, or if the median error is too large.
pub fn run(arguments: &[String]) -> Result<()> {
    let args = Args::parse_from(std::iter::once("predict").chain(arguments.iter().map(String::as_str)));
    let mut rng = Rng::new(args.seed, 0);
    let mut errors = Vec::new();
    println!("{:>10} {:>10} {:>7}  recipe", "predicted", "measured", "error");
    for _ in 0..args.recipes {
        let shape = shape(&mut rng, &args);
        let measurement = step(&shape)?;
        let (predicted, measured) = (measurement.predicted_step_seconds, measurement.step_seconds_median);
        let error = predicted / measured - 1.0;
        errors.push(error.abs());
        println!(
            "{:>7.2} ms {:>7.2} ms {:>+6.1}%  {} layers, hidden {}, heads {}/{}, ffn {}, vocab {}, {} × {} × {} tokens, {}{}",
            predicted * 1e3,
            measured * 1e3,
            error * 100.0,
            shape.layers,
            shape.hidden,
            shape.heads,
            shape.kv_heads,
            shape.ffn,
            shape.vocab,
            shape.accumulate,
            shape.batch,
            shape.sequence,
            shape.dtype,
            if shape.checkpoint { ", recomputed" } else { "" }
        );
    }
    errors.sort_by(f64::total_cmp);
    let at = |share: f64| errors[((errors.len() - 1) as f64 * share).round() as usize] * 100.0;
    println!(
        "error: {:.1} % in the median, {:.1} % in the 90th percentile ({} recipes)",
        at(0.5),
        at(0.9),
        errors.len()
    );
    ensure!(at(0.5) <= MAX_MEDIAN_ERROR * 100.0, "the median is above {:.0} %", MAX_MEDIAN_ERROR * 100.0);
    Ok(())
}
