//! Generation of several sequences at once: each has the logits that it has alone, and the arena is used as planned.

mod common;
#[allow(dead_code, unused_imports, reason = "other tests use the rest")]
mod team_support;

use common::Watchdog;
use plimsoll_core::{Bytes, DType, DeviceKind, Offload, Recipe, RecomputeLevel};
use plimsoll_plan::search::{LossyOptions, PlanOutcome, PlanRequest, plan_recipe};
use plimsoll_program::ProgramKind;
use plimsoll_program::models::decoder::{Base, Generation};
use plimsoll_program::passes::check::check;
use plimsoll_train::engine::Engine;
use team_support::*;

/// Tokens of a chunk, enough for the kernels of prompts.
const CHUNK: u64 = 8;

/// Opens an engine that generates `slots` sequences of at most 24 tokens, with random weights.
fn open(case: &Case, slots: u64) -> (Engine, PlanOutcome) {
    let device = device(case.kind);
    let generation = Generation { slots, capacity: 24, chunk: CHUNK };
    let question = case.question(&device, 0);
    let request = PlanRequest { optimizer: None, evaluate: false, generation: Some(generation), ..question };
    let levels = vec![RecomputeLevel::Nothing; case.config.layers as usize];
    let recipe = Recipe { offload: case.offload, ..Recipe::on_device(1, levels) };
    let outcome = plan_recipe(&request, &recipe);
    check(&outcome.set).expect("the Programs are well-formed");
    let mut engine =
        Engine::new(case.open(&outcome), &outcome.set, case.precision, recipe, SEQUENCE, case.config.vocab);
    engine.run(ProgramKind::Load).expect("the device works");
    (engine, outcome)
}

/// Returns the prompt of a sequence.
fn prompt(case: &Case, sequence: usize) -> Vec<i32> {
    let vocab = case.config.vocab as i32;
    (0..[5, 1, 9, 8, 3][sequence]).map(|at| (sequence as i32 * 5 + at * 7 + 3) % vocab).collect()
}

/// Returns the logits after the prompt and after each of four more tokens of a sequence alone.
fn alone(case: &Case, sequence: usize) -> Vec<Vec<f64>> {
    let (mut engine, _) = open(case, 1);
    let prompt = prompt(case, sequence);
    let mut all = vec![engine.prefill(0, &prompt, 0).unwrap()];
    for (length, token) in (prompt.len()..).zip([3, 1, 4, 1]) {
        engine.decode(&[token], &[length]).unwrap();
        all.push(engine.logits(0).unwrap());
    }
    all
}

/// Returns the logits of five sequences that are generated at once, in the given of `count` slots. Each begins two tokens
/// after the one before it. Asserts that the arena is used as planned.
fn together(name: &str, case: &Case, count: usize, slots: [usize; 5]) -> Vec<Vec<Vec<f64>>> {
    let (mut engine, outcome) = open(case, count as u64);
    let (mut lengths, mut logits) = (vec![0; count], vec![Vec::new(); 5]);
    for turn in 0..14 {
        if turn % 2 == 0 && turn / 2 < 5 {
            let (sequence, prompt) = (turn / 2, prompt(case, turn / 2));
            // Keys and values of a common beginning are kept.
            let kept = if sequence == 2 { 4 } else { 0 };
            engine.prefill(slots[sequence], &prompt[..kept.max(1)], 0).unwrap();
            logits[sequence].push(engine.prefill(slots[sequence], &prompt[kept..], kept).unwrap());
            lengths[slots[sequence]] = prompt.len();
        }
        let active: Vec<usize> = (0..5).filter(|&sequence| (1..5).contains(&logits[sequence].len())).collect();
        let mut tokens = vec![0; count];
        for &sequence in &active {
            tokens[slots[sequence]] = [3, 1, 4, 1][logits[sequence].len() - 1];
        }
        engine.decode(&tokens, &lengths).unwrap();
        for sequence in active {
            logits[sequence].push(engine.logits(slots[sequence]).unwrap());
            lengths[slots[sequence]] += 1;
        }
    }
    let planned = &outcome.plan.devices[0];
    assert_eq!(engine.take_new_arena_use().as_ref(), Some(&planned.by_category), "{name}, {count} slots");
    assert_eq!(planned.by_category.values().copied().sum::<Bytes>(), planned.arena_bytes);
    logits
}

/// Returns the largest difference of logits, relative to the largest logit.
fn difference(found: &[Vec<f64>], expected: &[Vec<f64>]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().flatten().fold(0.0, |largest: f64, logit| largest.max(logit.abs()));
    let pairs = found.iter().flatten().zip(expected.iter().flatten());
    pairs.fold(0.0, |most: f64, (found, expected)| most.max((found - expected).abs())) / largest
}

fn check_case(name: &str, case: &Case) {
    let found = together(name, case, 6, [4, 0, 3, 5, 1]);
    assert_eq!(found, together(name, case, 9, [0, 8, 1, 2, 7]), "{name}: other slots, of another number");
    // Products of more than four rows sum in another order than those of one row.
    let tolerance = match case.precision {
        DType::F64 => 1e-13,
        DType::F32 => 1e-5,
        _ => 0.05,
    };
    for (sequence, found) in found.iter().enumerate() {
        let difference = difference(found, &alone(case, sequence));
        println!("{name}, sequence {sequence}: {difference:.1e}");
        assert!(difference <= tolerance, "{name}, sequence {sequence}: {difference:e}");
    }
}

#[test]
fn sequences_do_not_depend_on_each_other() {
    let _watchdog = Watchdog::new();
    for config in models() {
        for precision in [DType::F32, DType::F64, DType::Bf16] {
            check_case(&format!("{precision}"), &Case { precision, ..Case::new(&config, &[(1, 1)]) });
        }
        let lossy = LossyOptions { base: Base::Nf4, ..lora() };
        check_case("nf4 with adapters", &Case { lossy, precision: DType::Bf16, ..Case::new(&config, &[(1, 1)]) });
        let kind = DeviceKind::Virtual;
        let offload = Offload { weights: 1, head: true, ..Offload::NOTHING };
        check_case("offload", &Case { kind, offload, ..Case::new(&config, &[(1, 1)]) });
    }
}
