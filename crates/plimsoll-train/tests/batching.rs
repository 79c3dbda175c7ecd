//! Generation of several sequences at once: each has the logits that it has alone, and the arena is used as planned.

use crate::common::Watchdog;
use crate::team_support::*;
use plimsoll_core::{Bytes, DType, DeviceKind, Offload, Recipe, RecomputeLevel};
use plimsoll_plan::search::{LossyOptions, PlanOutcome, PlanRequest, plan_recipe};
use plimsoll_program::ProgramKind;
use plimsoll_program::models::decoder::{Base, Generation, PART_TOKENS};
use plimsoll_program::passes::check::check;
use plimsoll_train::engine::{Engine, SlotCopy, SlotTokens};

/// Tokens of a chunk: two parts.
const CHUNK: u64 = 2 * PART_TOKENS;

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
    (0..[5, 1, 14, 9, 3][sequence]).map(|at| (sequence as i32 * 5 + at * 7 + 3) % vocab).collect()
}

/// New tokens of each sequence.
const NEW: [i32; 4] = [3, 1, 4, 1];

/// Returns the logits of the next token of a slot.
fn logits(engine: &mut Engine, slot: usize) -> Vec<f64> {
    let mut logits = Vec::new();
    engine.read_logits(slot, &mut logits).unwrap();
    logits
}

/// Returns the logits after the prompt and after each of four more tokens of a sequence alone.
fn alone(case: &Case, sequence: usize) -> Vec<Vec<f64>> {
    let (mut engine, _) = open(case, 1);
    let prompt = prompt(case, sequence);
    let mut all = vec![engine.prefill(&prompt, 0).unwrap()];
    for (length, token) in (prompt.len()..).zip(NEW) {
        engine.decode(&[token], &[length]).unwrap();
        all.push(logits(&mut engine, 0));
    }
    all
}

/// Returns the logits of five sequences that are generated at once, in the given of `count` slots. Asserts that the arena
/// is used as planned.
fn together(name: &str, case: &Case, count: usize, slots: [usize; 5]) -> Vec<Vec<Vec<f64>>> {
    let (mut engine, outcome) = open(case, count as u64);
    let prompts: Vec<_> = (0..5).map(|sequence| prompt(case, sequence)).collect();
    let (mut lengths, mut found) = (vec![0; count], vec![Vec::new(); 5]);
    for (turn, begins) in [&[0][..], &[], &[1, 2], &[3, 4], &[], &[], &[], &[]].into_iter().enumerate() {
        let before = |sequence: usize| &prompts[sequence][..prompts[sequence].len() - 1];
        let slot_tokens = |&sequence: &usize| {
            // Keys and values of a common beginning are copied.
            let kept = if sequence == 2 { 4 } else { 0 };
            SlotTokens { slot: slots[sequence], tokens: &before(sequence)[kept..], length: kept }
        };
        if turn == 2 {
            let spare = (0..count).find(|slot| !slots.contains(slot)).unwrap();
            engine.append(&[SlotTokens { slot: spare, tokens: &prompts[2][..4], length: 0 }]).unwrap();
            engine.copy_slots(&[SlotCopy { from: spare, to: slots[2], positions: 0..4 }]).unwrap();
        }
        engine.append(&begins.iter().map(slot_tokens).collect::<Vec<_>>()).unwrap();
        begins.iter().for_each(|&sequence| lengths[slots[sequence]] = before(sequence).len());
        let has_begun = |sequence: usize| lengths[slots[sequence]] > 0 || begins.contains(&sequence);
        let active: Vec<usize> = (0..5).filter(|&at| has_begun(at) && found[at].len() <= NEW.len()).collect();
        let mut tokens = vec![0; count];
        for &sequence in &active {
            let last = prompts[sequence].last();
            tokens[slots[sequence]] = *last.into_iter().chain(&NEW).nth(found[sequence].len()).unwrap();
        }
        engine.decode(&tokens, &lengths).unwrap();
        for sequence in active {
            found[sequence].push(logits(&mut engine, slots[sequence]));
            lengths[slots[sequence]] += 1;
        }
    }
    let planned = &outcome.plan.devices[0];
    assert_eq!(engine.take_new_arena_use().as_ref(), Some(&planned.by_category), "{name}, {count} slots");
    assert_eq!(planned.by_category.values().copied().sum::<Bytes>(), planned.arena_bytes);
    found
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
