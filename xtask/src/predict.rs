//! `cargo xtask predict`: how far predicted step times are from measured ones, over recipes drawn at random. It is a
//! measurement: on a machine that does other work it says so little that CI does not run it.

use crate::soak::case::Draw;
use anyhow::{Result, ensure};
use clap::Parser;
use plimsoll_core::DType;
use plimsoll_program::models::decoder::Base;
use plimsoll_train::bench::{StepShape, step};

/// The median error that is promised.
const MEDIAN_MOST: f64 = 0.10;

/// Predict and measure training steps of many recipes in turn.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask predict")]
struct Args {
    /// Where recipes are drawn from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many recipes
    #[arg(long, default_value_t = 36)]
    recipes: u64,
    /// cpu, or cuda:0
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Threads that compute on the processor
    #[arg(long, default_value_t = 2)]
    threads: u32,
}

/// A step of at most some hundred GFLOP.
fn shape(draw: &mut Draw, args: &Args) -> StepShape {
    loop {
        let heads = draw.of(&[4, 6, 8, 12]);
        let hidden = heads * draw.of(&[32, 64]);
        let shape = StepShape {
            vocab: draw.of(&[1000, 4096, 16000]),
            layers: draw.from(2, 8),
            hidden,
            heads,
            kv_heads: draw.of(&[heads, heads / 2]),
            ffn: hidden * draw.from(2, 4),
            sequence: draw.of(&[64, 128, 256, 512]),
            batch: draw.of(&[1, 2, 4, 8]),
            accumulate: draw.of(&[1, 2, 4]),
            threads: args.threads,
            steps: 7,
            warmup: 2,
            dtype: draw.of(&[DType::F32, DType::Bf16]),
            checkpoint: draw.chance(0.4),
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

/// Measures, prints a line for each recipe, and the median.
///
/// # Errors
/// A median error above what is promised.
pub fn run(arguments: &[String]) -> Result<()> {
    let args = Args::parse_from(std::iter::once("predict").chain(arguments.iter().map(String::as_str)));
    let mut draw = Draw::new(args.seed, 0);
    let mut errors = Vec::new();
    println!("{:>10} {:>10} {:>7}  recipe", "predicted", "measured", "off");
    for _ in 0..args.recipes {
        let shape = shape(&mut draw, &args);
        let found = step(&shape)?;
        let (predicted, measured) = (found.predicted_step_seconds, found.step_seconds_median);
        let off = predicted / measured - 1.0;
        errors.push(off.abs());
        println!(
            "{:>7.2} ms {:>7.2} ms {:>+6.1}%  {} layers, hidden {}, heads {}/{}, ffn {}, vocab {}, {} × {} × {} tokens, {}{}",
            predicted * 1e3,
            measured * 1e3,
            off * 100.0,
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
        "off by {:.1} % in the median, {:.1} % at most in nine of ten ({} recipes)",
        at(0.5),
        at(0.9),
        errors.len()
    );
    ensure!(at(0.5) <= MEDIAN_MOST * 100.0, "the median is above {:.0} %", MEDIAN_MOST * 100.0);
    Ok(())
}
