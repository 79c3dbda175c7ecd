//! Shares of a batch: whole sequences that make the slowest as fast as it can be, everybody under its own load line, and
//! nobody in the team who slows it.

use plimsoll_core::{Bytes, Class, DType, DeviceKind, DeviceSpec, HostSpec, Link, Plan, Rates, Sharing};
use plimsoll_plan::search::{Lossy, Pins, Question};
use plimsoll_plan::team::{TeamAnswer, TeamQuestion, alternatives, plan_again, plan_of_team, share_out};
use plimsoll_program::Share;
use plimsoll_program::models::decoder::{AdamState, Optimizer, Source};
use plimsoll_program::models::{ModelConfig, preset};
use std::time::Instant;

const ADAMW: Optimizer = Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state: AdamState::Full };

/// A device of so much of a core's speed.
fn device(name: &str, budget: Bytes, pace: f64, link: Link) -> DeviceSpec {
    let core = Rates {
        f32_flops: 100e9,
        bf16_flops: 200e9,
        memory_bytes_per_second: 20e9,
        op_seconds: 2e-6,
        host_link: Link { bytes_per_second: 16e9, latency_seconds: 10e-6 },
        measured: false,
        ops: plimsoll_core::OpRates::default(),
    };
    DeviceSpec {
        name: name.into(),
        kind: DeviceKind::Virtual,
        budget,
        charges: Bytes::mib(8),
        charges_measured: false,
        threads: 1,
        rates: core.paced(pace),
        team_link: link,
    }
}

fn question<'a>(config: &'a ModelConfig, device: &'a DeviceSpec, sequences: u64) -> Question<'a> {
    Question {
        config,
        precision: DType::F32,
        sequence: 256.min(config.max_positions),
        sequences,
        source: Source::Random { seed: 1 },
        optimizer: Some(ADAMW),
        evaluate: true,
        generation: None,
        device,
        host: HostSpec::NONE,
        lossy: Lossy::default(),
        pins: Pins::default(),
        rungs: vec![],
        share: Share::ALONE,
    }
}

fn team<'a>(config: &'a ModelConfig, devices: &'a [DeviceSpec], sequences: u64) -> TeamQuestion<'a> {
    let devices = devices.iter().map(|device| question(config, device, sequences)).collect();
    TeamQuestion { devices, host: Bytes::ZERO, all: false }
}

fn say(answer: &TeamAnswer, begin: Instant) {
    let plan = &answer.plan;
    println!("fits {}, {:?}, {:?}, planned in {:.2?}", plan.fits, plan.sharing, plan.predicted, begin.elapsed());
    for member in &plan.team {
        println!(
            "  {}: {} sequences, {}, {:.3} s busy, {:.3} s idle",
            member.device, member.sequences, member.recipe, member.busy_seconds, member.idle_seconds
        );
    }
    for out in &plan.left_out {
        println!("  left out {out:?}");
    }
}

#[test]
fn a_team_does_what_its_devices_do_alone() {
    let config = preset("smollm2-135m").expect("listed");
    for paces in [vec![1.0, 0.57], vec![1.0, 0.5], vec![1.0, 0.25], vec![0.1; 8]] {
        let devices: Vec<DeviceSpec> = paces
            .iter()
            .enumerate()
            .map(|(n, pace)| device(&format!("virtual:{n}"), Bytes::gib(24), *pace, Link::MEMORY))
            .collect();
        let begin = Instant::now();
        let answer = share_out(&team(&config, &devices, 64));
        say(&answer, begin);
        let alone: f64 = devices
            .iter()
            .map(|one| share_out(&team(&config, std::slice::from_ref(one), 64)).plan.predicted.tokens_per_second)
            .sum();
        let worth = answer.plan.predicted.tokens_per_second / alone;
        println!("  {paces:?}: {worth:.4} of the sum");
        assert!(worth >= 0.95, "{paces:?}: {worth}");
        assert_eq!(answer.plan.sharing, Some(Sharing::Batch));
        assert_eq!(answer.plan.class, Class::Reordered);
        assert_eq!(answer.parts.len(), devices.len());
        let bound = answer.plan.worth.expect("of several devices");
        assert!((bound.alone / alone - 1.0).abs() < 0.02 && bound.at_most < bound.alone, "{bound:?}");
        assert!(answer.plan.predicted.tokens_per_second <= bound.at_most, "{bound:?}");
        let fastest = &alternatives(&team(&config, &devices, 64), &answer.plan)[0];
        assert!(fastest.sharing == Some(Sharing::Batch) && fastest.devices.len() == devices.len(), "{fastest:?}");
    }
}

#[test]
fn a_plan_of_given_shares_and_recipes_is_the_same_plan() {
    let config = preset("smollm2-135m").expect("listed");
    let devices = [("a", 24, 1.0), ("b", 8, 0.57)];
    let devices = devices.map(|(name, gib, pace)| device(name, Bytes::gib(gib), pace, Link::MEMORY));
    let team = team(&config, &devices, 64);
    let answer = share_out(&team);
    let planned = Plan { worth: None, ..answer.plan };
    assert_eq!(plan_of_team(&team, &planned.team).plan, planned);
    assert_eq!(plan_again(&team, &planned.team).plan, planned);
}

#[test]
fn only_the_squeezed_device_changes_its_recipe() {
    let config = preset("smollm2-135m").expect("listed");
    let devices = [("a", 24, 1.0), ("b", 8, 0.57)];
    let devices = devices.map(|(name, gib, pace)| device(name, Bytes::gib(gib), pace, Link::MEMORY));
    let before = share_out(&team(&config, &devices, 64)).plan;
    let mut squeezed = devices.clone();
    squeezed[1].budget = before.devices[1].peak_bytes.saturating_sub(Bytes::mib(64));
    let after = plan_again(&team(&config, &squeezed, 64), &before.team).plan;
    assert!(after.fits && after.devices[1].peak_bytes <= squeezed[1].budget);
    assert_eq!(after.team[0].recipe, before.team[0].recipe);
    let sequences = |plan: &Plan| plan.team.iter().map(|member| member.sequences).collect::<Vec<_>>();
    assert_eq!(sequences(&after), sequences(&before));
    assert_ne!(after.team[1].recipe, before.team[1].recipe);
}

#[test]
fn who_cannot_hold_the_model_or_would_slow_the_team_is_left_out_and_named() {
    let config = preset("smollm2-135m").expect("listed");
    let slow_link = Link { bytes_per_second: 1e6, latency_seconds: 0.0 };
    let named = |name: &str, gib: u64, pace: f64, link: Link| device(name, Bytes::gib(gib), pace, link);
    for (devices, left_out, why) in [
        ([named("a", 8, 1.0, Link::MEMORY), named("b", 1, 1.0, Link::MEMORY)], "b", "its smallest recipe holds"),
        ([named("a", 8, 0.5, slow_link), named("b", 8, 1.0, slow_link)], "a", "it would slow the team"),
    ] {
        let answer = share_out(&team(&config, &devices, 64));
        assert!(answer.plan.fits && answer.plan.sharing.is_none() && answer.plan.team.is_empty());
        assert_eq!(answer.parts.len(), 1);
        let [out] = &answer.plan.left_out[..] else { panic!("{:?}", answer.plan.left_out) };
        assert!(out.device == left_out && out.why.starts_with(why) && out.used_by.is_some(), "{out:?}");
        let all = TeamQuestion { all: true, ..team(&config, &devices, 64) };
        let all = share_out(&all).plan;
        assert_eq!((all.fits, all.team.len()), if left_out == "a" { (true, 2) } else { (false, 0) });
    }
}
