//! A rank whose team shares out its state: what it holds, what it takes to gather, and that a search finds recipes for it
//! under a load line that one device could not hold the model under.

mod common;

use common::question;
use plimsoll_core::{Budget, Bytes, DType, Sharing};
use plimsoll_plan::paper;
use plimsoll_plan::search::{Answer, Pins, Question, search};
use plimsoll_program::Share;
use plimsoll_program::models::preset;
use std::time::Instant;

/// Rank 0 of eight equal ones, each with two sequences, training llama-3.1-8b whole in bf16 on an rtx5090.
fn rank_of_eight(sharing: Option<Sharing>) -> Answer {
    let config = preset("llama-3.1-8b").expect("listed");
    let device = paper::paper("rtx5090", Budget::Share(0.95)).expect("listed");
    let share = Share { sharing, rank: 0, ranks: 8, state: vec![128; 8], ..Share::ALONE };
    let question = Question { precision: DType::Bf16, share, ..question(&config, &device, [2, 1024]) };
    let begin = Instant::now();
    let answer = search(&question);
    let plan = &answer.plan;
    println!("{sharing:?}: fits {}, {:?}, {} in {:.2?}", plan.fits, plan.predicted, plan.recipe, begin.elapsed());
    answer
}

#[test]
fn a_model_that_fits_no_device_fits_eight_that_hold_it_in_parts() {
    let (alone, batch, state) = (None, Some(Sharing::Batch), Some(Sharing::State));
    assert!(!rank_of_eight(alone).plan.fits && !rank_of_eight(batch).plan.fits);
    let state = rank_of_eight(state);
    assert!(state.plan.fits);
    // 2 bytes a weight, 4 a gradient, 12 of optimizer and master: 18 bytes of 8.03 billion, an eighth of it.
    let held = state.layout.device.persistent_bytes as f64;
    assert!((held / (18.0 * 8.03e9 / 8.0) - 1.0).abs() < 0.01, "{}", Bytes(held as u64));
    // Each of three passes over the weights (two gathers, one scatter in the wide type) crosses the link.
    let question_link = paper::paper("rtx5090", Budget::Share(0.95)).expect("listed").team_link;
    let wire = (2.0 * 2.0 + 4.0) * 8.03e9 * 7.0 / 8.0 / question_link.bytes_per_second;
    assert!(state.plan.predicted.step_seconds > wire, "{:?} {wire}", state.plan.predicted);
}

#[test]
fn a_rank_with_a_little_less_room_computes_a_little_again() {
    let config = preset("smollm2-135m").expect("listed");
    let rank = |budget: Budget| {
        let device = paper::paper("rtx3070", budget).expect("listed");
        let share = Share { sharing: Some(Sharing::State), ranks: 2, state: vec![512; 2], ..Share::ALONE };
        let pins = Pins { micro_batch: Some(4), ..Pins::default() };
        let answer = search(&Question { share, pins, ..question(&config, &device, [4, 512]) });
        let plan = answer.plan;
        println!("{budget:?}: fits {}, {:?}, {}", plan.fits, plan.predicted, plan.recipe);
        assert!(plan.fits);
        (plan.devices[0].peak_bytes, plan.predicted.step_seconds)
    };
    let (peak, plain) = rank(Budget::DEVICE);
    // What it gathers is a part of what it holds: who lacks less than that need not compute everything again.
    let mut before = plain;
    for percent in [99, 98, 96, 92] {
        let (_, seconds) = rank(Budget::Amount(Bytes(peak.0 * percent / 100)));
        assert!(seconds >= before && seconds < 1.05 * plain, "{percent} %: {seconds} s, {plain} s with all of it");
        before = seconds;
    }
}
