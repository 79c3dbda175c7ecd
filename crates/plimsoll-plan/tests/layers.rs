//! Pipelines: stages of unequal size on devices none of which holds the model, each under its own load line.

use plimsoll_core::{Bytes, DType, DeviceKind, DeviceSpec, HostSpec, Link, Offload, Rates, Sharing};
use plimsoll_plan::search::{Lossy, Pins, Question, search};
use plimsoll_plan::team::{TeamAnswer, TeamQuestion, alternatives, plan_of_team, share_out};
use plimsoll_program::models::decoder::{AdamState, Optimizer, Source};
use plimsoll_program::models::{ModelConfig, preset};
use plimsoll_program::passes::check::check;
use plimsoll_program::passes::collectives::agree;
use plimsoll_program::{Schedule, Share};
use std::time::Instant;

const ADAMW: Optimizer = Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state: AdamState::Full };

/// Too slow for weights to go to and fro.
const SLOW: Link = Link { bytes_per_second: 12e6, latency_seconds: 100e-6 };

/// A device of so much of a core's speed.
fn device(name: &str, budget: Bytes, pace: f64) -> DeviceSpec {
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
        team_link: SLOW,
    }
}

fn team<'a>(config: &'a ModelConfig, devices: &'a [DeviceSpec], sequences: u64) -> TeamQuestion<'a> {
    let question = |device: &'a DeviceSpec| Question {
        config,
        precision: DType::F32,
        sequence: 256,
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
    };
    TeamQuestion { devices: devices.iter().map(question).collect(), host: Bytes::ZERO, all: false, only: None }
}

fn planned(config: &ModelConfig, devices: &[DeviceSpec], sequences: u64) -> TeamAnswer {
    let team = team(config, devices, sequences);
    let begin = Instant::now();
    let answer = share_out(&team);
    println!(
        "{:?}: fits {}, {:?}, in {:.2?}",
        answer.plan.sharing,
        answer.plan.fits,
        answer.plan.predicted,
        begin.elapsed()
    );
    for (member, device) in answer.plan.team.iter().zip(&answer.plan.devices) {
        println!(
            "  {} {:?}: {}, {} of {}, {:.3} s busy, {:.3} s idle",
            member.device,
            member.layers,
            member.recipe,
            device.peak_bytes,
            device.budget_bytes,
            member.busy_seconds,
            member.idle_seconds
        );
    }
    for out in &answer.plan.left_out {
        println!("  left out {out:?}");
    }
    answer
}

/// That a plan is a pipeline whose stages cover the model, hold their lines, and agree with each other.
fn is_a_pipeline(config: &ModelConfig, devices: &[DeviceSpec], sequences: u64, answer: &TeamAnswer) {
    let plan = &answer.plan;
    assert_eq!((plan.fits, plan.sharing), (true, Some(Sharing::Layers)));
    let ends: Vec<[u64; 2]> = plan.team.iter().map(|member| member.layers.expect("it has layers")).collect();
    assert_eq!((ends[0][0], ends[ends.len() - 1][1]), (0, config.layers));
    assert!(ends.windows(2).all(|pair| pair[0][1] == pair[1][0]), "{ends:?}");
    for (member, device) in plan.team.iter().zip(&plan.devices) {
        let [first, end] = member.layers.expect("it has layers");
        assert_eq!((member.recipe.recompute.len() as u64, member.sequences), (end - first, sequences));
        assert_eq!(member.recipe.offload, Offload::NOTHING);
        assert_eq!(member.recipe.micro_batch, plan.team[0].recipe.micro_batch);
        assert!(device.peak_bytes <= device.budget_bytes);
        assert!((member.busy_seconds + member.idle_seconds - plan.predicted.step_seconds).abs() < 1e-9);
    }
    let count = sequences.div_ceil(u64::from(plan.team[0].recipe.micro_batch)) as u32;
    let schedules: Vec<Schedule> = answer.parts.iter().map(|part| part.share.schedule(count)).collect();
    let ranks: Vec<_> = answer.parts.iter().map(|part| &part.answer.set).zip(&schedules).collect();
    agree(&ranks).expect("all stages agree");
    answer.parts.iter().for_each(|part| check(&part.answer.set).expect("it is well formed"));
    // As it is written down it is found again.
    let again = plan_of_team(&team(config, devices, sequences), &plan.team);
    assert_eq!((&again.plan.team, again.plan.predicted), (&plan.team, plan.predicted));
}

#[test]
fn a_model_that_fits_no_device_becomes_a_pipeline_of_unequal_stages() {
    let config = preset("smollm2-135m").expect("listed");
    for (budgets, paces) in [
        (&[Bytes::mib(1700), Bytes::mib(900)][..], &[1.0, 0.5][..]),
        (&[Bytes::mib(900), Bytes::mib(1700)], &[1.0, 0.5]),
        (&[Bytes::mib(1100), Bytes::mib(700), Bytes::mib(900)], &[1.0, 0.4, 0.7]),
    ] {
        let devices: Vec<DeviceSpec> = budgets
            .iter()
            .zip(paces)
            .enumerate()
            .map(|(number, (budget, pace))| device(&format!("virtual:{number}"), *budget, *pace))
            .collect();
        for (device, question) in devices.iter().zip(team(&config, &devices, 16).devices) {
            assert!(!search(&question).plan.fits, "{} holds it alone", device.name);
        }
        let answer = planned(&config, &devices, 16);
        is_a_pipeline(&config, &devices, 16, &answer);
        // It takes longer than if all of them computed all the time, and not much longer than its slowest stage.
        let busiest = answer.plan.team.iter().map(|member| member.busy_seconds).fold(0.0, f64::max);
        let step = answer.plan.predicted.step_seconds;
        assert!(step >= busiest && step < 2.0 * busiest, "{step} s, {busiest} s busy");
        let ways = alternatives(&team(&config, &devices, 16), &answer.plan);
        assert!(ways.iter().any(|way| way.sharing == Some(Sharing::Layers) && way.fits));
        assert!(ways.iter().filter(|way| way.sharing.is_none()).all(|way| !way.fits));
    }
}

#[test]
fn eight_devices_hold_what_one_of_them_never_could() {
    let config = preset("smollm2-360m").expect("listed");
    let devices: Vec<DeviceSpec> = (0..8).map(|n| device(&format!("virtual:{n}"), Bytes::mib(1300), 1.0)).collect();
    let answer = planned(&config, &devices, 32);
    is_a_pipeline(&config, &devices, 32, &answer);
}

#[test]
fn messages_of_gpus_stand_on_the_host_and_without_one_there_is_no_pipeline() {
    // A tied table would go over the host, too.
    let config = ModelConfig { tied: false, ..preset("smollm2-135m").expect("listed") };
    let devices = [("a", 2400, 1.0), ("b", 1400, 0.5)]
        .map(|(name, budget, pace)| DeviceSpec { kind: DeviceKind::Paper, ..device(name, Bytes::mib(budget), pace) });
    let with = |host: Bytes| {
        let team = TeamQuestion { only: Some(Sharing::Layers), host, ..team(&config, &devices, 16) };
        let spec = HostSpec { budget: host, memory_bytes_per_second: 1e10, ..HostSpec::NONE };
        let questions = team.devices.iter().map(|question| Question { host: spec, ..question.clone() });
        share_out(&TeamQuestion { devices: questions.collect(), ..team })
    };
    let answer = with(Bytes::mib(64));
    assert_eq!((answer.plan.fits, answer.plan.sharing), (true, Some(Sharing::Layers)));
    // What the first stage shows stays until its gradient is back, of two micro-batches, beside one that comes; what comes to the last
    // and what goes from it stand in one place.
    let member = &answer.plan.team[0];
    let message = u64::from(member.recipe.micro_batch) * 256 * config.hidden * 4;
    let held: Vec<u64> = answer.parts.iter().map(|part| part.answer.plan.host.arena_bytes.0).collect();
    assert_eq!(held, [3 * message, message]);
    answer.parts.iter().for_each(|part| check(&part.answer.set).expect("it is well formed"));
    assert_ne!(with(Bytes::ZERO).plan.sharing, Some(Sharing::Layers));
    // And where there is less of it than they take.
    assert_ne!(with(Bytes(message)).plan.sharing, Some(Sharing::Layers));
}

#[test]
fn a_model_that_fits_everywhere_is_not_cut() {
    let config = preset("smollm2-135m").expect("listed");
    let devices: Vec<DeviceSpec> = (0..2).map(|n| device(&format!("virtual:{n}"), Bytes::gib(24), 1.0)).collect();
    let fast = |device: &DeviceSpec| DeviceSpec { team_link: Link::MEMORY, ..device.clone() };
    let devices: Vec<DeviceSpec> = devices.iter().map(fast).collect();
    assert_eq!(planned(&config, &devices, 64).plan.sharing, Some(Sharing::Batch));
}
