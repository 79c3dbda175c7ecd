//! The search on one rank of a sharded team (FSDP): its memory, the time of its gathers, and recipes under a load line that is
//! too low for the whole model.

use crate::common::plan_request;
use plimsoll_core::{Budget, Bytes, DType, Parallelism};
use plimsoll_plan::paper;
use plimsoll_plan::search::{PinnedChoices, PlanOutcome, PlanRequest, search};
use plimsoll_program::Share;
use plimsoll_program::models::preset;
use std::time::Instant;

/// Plans rank 0 of eight equal ranks with two sequences each: full training of llama-3.1-8b in bf16 on an rtx5090.
fn rank_of_eight(parallelism: Option<Parallelism>) -> PlanOutcome {
    let config = preset("llama-3.1-8b").expect("listed");
    let device = paper::paper("rtx5090", Budget::Share(0.95)).expect("listed");
    let share = Share { parallelism, rank: 0, ranks: 8, state: vec![128; 8], ..Share::SINGLE_DEVICE };
    let question = PlanRequest { precision: DType::Bf16, share, ..plan_request(&config, &device, [2, 1024]) };
    let begin = Instant::now();
    let outcome = search(&question);
    let plan = &outcome.plan;
    println!("{parallelism:?}: fits {}, {:?}, {} in {:.2?}", plan.fits, plan.predicted, plan.recipe, begin.elapsed());
    outcome
}

#[test]
fn model_too_large_for_one_fits_eight_shards() {
    let (alone, batch, state) = (None, Some(Parallelism::Data), Some(Parallelism::Sharded));
    assert!(!rank_of_eight(alone).plan.fits && !rank_of_eight(batch).plan.fits);
    let state = rank_of_eight(state);
    assert!(state.plan.fits);
    // Per weight: 2 bytes, 4 of gradient, 12 of optimizer state and master weight. A rank has an eighth of 8.03 billion weights.
    let resident = state.layout.device.persistent_bytes as f64;
    assert!((resident / (18.0 * 8.03e9 / 8.0) - 1.0).abs() < 0.01, "{}", Bytes(resident as u64));
    // Two all-gathers and one reduce-scatter (in the wide type) of the weights cross the link.
    let link = paper::paper("rtx5090", Budget::Share(0.95)).expect("listed").team_link;
    let link_seconds = (2.0 * 2.0 + 4.0) * 8.03e9 * 7.0 / 8.0 / link.bytes_per_second;
    assert!(state.plan.predicted.step_seconds > link_seconds, "{:?} {link_seconds}", state.plan.predicted);
}

#[test]
fn slightly_less_room_costs_slightly_more_recompute() {
    let config = preset("smollm2-135m").expect("listed");
    let rank = |budget: Budget| {
        let device = paper::paper("rtx3070", budget).expect("listed");
        let share =
            Share { parallelism: Some(Parallelism::Sharded), ranks: 2, state: vec![512; 2], ..Share::SINGLE_DEVICE };
        let pins = PinnedChoices { micro_batch: Some(4), ..PinnedChoices::default() };
        let outcome = search(&PlanRequest { share, pins, ..plan_request(&config, &device, [4, 512]) });
        let plan = outcome.plan;
        println!("{budget:?}: fits {}, {:?}, {}", plan.fits, plan.predicted, plan.recipe);
        assert!(plan.fits);
        (plan.devices[0].peak_bytes, plan.predicted.step_seconds)
    };
    let (peak, plain) = rank(Budget::DEVICE);
    // Gathered layers take a part of the memory. A rank that lacks less than that does not need full recompute.
    let mut before = plain;
    for percent in [99, 98, 96, 92] {
        let (_, seconds) = rank(Budget::Amount(Bytes(peak.0 * percent / 100)));
        assert!(seconds >= before && seconds < 1.05 * plain, "{percent} %: {seconds} s, {plain} s with full memory");
        before = seconds;
    }
}
