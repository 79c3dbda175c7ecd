//! Pipelines: stages of unequal size on devices none of which holds the model, each under its own load line.

mod common;

use common::question;
use plimsoll_core::{Bytes, DeviceKind, DeviceSpec, HostSpec, Link, Offload, Sharing};
use plimsoll_plan::search::{Question, search};
use plimsoll_plan::team::{Only, TeamAnswer, TeamQuestion, alternatives, plan_of_team, share_out};
use plimsoll_program::Schedule;
use plimsoll_program::models::{ModelConfig, preset};
use plimsoll_program::passes::check::check;
use plimsoll_program::passes::collectives::agree;
use std::time::Instant;

/// Too slow for weights to go to and fro.
const SLOW: Link = Link { bytes_per_second: 12e6, latency_seconds: 100e-6 };

/// A device of so much of a core's speed.
fn device(name: &str, budget: Bytes, pace: f64) -> DeviceSpec {
    common::device(name, budget, pace, SLOW)
}

fn team<'a>(config: &'a ModelConfig, devices: &'a [DeviceSpec], sequences: u64) -> TeamQuestion<'a> {
    beside(config, devices, sequences, Bytes::ZERO)
}

/// The same beside so much of a host.
fn beside<'a>(config: &'a ModelConfig, devices: &'a [DeviceSpec], sequences: u64, host: Bytes) -> TeamQuestion<'a> {
    let spec = HostSpec { budget: host, memory_bytes_per_second: 1e10, ..HostSpec::NONE };
    let question = |device: &'a DeviceSpec| Question { host: spec, ..question(config, device, [sequences, 256]) };
    TeamQuestion { devices: devices.iter().map(question).collect(), host, all: false, only: None, evaluations: None }
}

fn planned(team: &TeamQuestion) -> TeamAnswer {
    let begin = Instant::now();
    let answer = share_out(team);
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

/// That a plan is a pipeline whose stages cover the model, hold their lines and that of the host, and agree with each other.
fn is_a_pipeline(team: &TeamQuestion, answer: &TeamAnswer) {
    let plan = &answer.plan;
    let (config, sequences) = (team.devices[0].config, team.devices[0].sequences);
    assert_eq!((plan.fits, plan.sharing), (true, Some(Sharing::Layers)));
    let ends: Vec<[u64; 2]> = plan.team.iter().map(|member| member.layers.expect("it has layers")).collect();
    assert_eq!((ends[0][0], ends[ends.len() - 1][1]), (0, config.layers));
    assert!(ends.windows(2).all(|pair| pair[0][1] == pair[1][0]), "{ends:?}");
    for (member, device) in plan.team.iter().zip(&plan.devices) {
        let [first, end] = member.layers.expect("it has layers");
        assert_eq!((member.recipe.recompute.len() as u64, member.sequences), (end - first, sequences));
        assert!(team.host > Bytes::ZERO || member.recipe.offload == Offload::NOTHING);
        assert_eq!(member.recipe.micro_batch, plan.team[0].recipe.micro_batch);
        assert!(device.peak_bytes <= device.budget_bytes);
        assert!((member.busy_seconds + member.idle_seconds - plan.predicted.step_seconds).abs() < 1e-9);
    }
    let count = sequences.div_ceil(u64::from(plan.team[0].recipe.micro_batch)) as u32;
    let schedules: Vec<Schedule> = answer.parts.iter().map(|part| part.share.schedule(count)).collect();
    let ranks: Vec<_> = answer.parts.iter().map(|part| &part.answer.set).zip(&schedules).collect();
    agree(&ranks).expect("all stages agree");
    answer.parts.iter().for_each(|part| check(&part.answer.set).expect("it is well formed"));
    let held = |part: &plimsoll_plan::team::Part| {
        let host = &part.answer.plan.host;
        assert!(host.arena_bytes <= host.budget_bytes || host.arena_bytes == Bytes::ZERO);
        host.arena_bytes
    };
    assert_eq!(answer.parts.iter().map(held).sum::<Bytes>(), plan.host.arena_bytes);
    assert!(plan.host.arena_bytes <= team.host, "{} of {}", plan.host.arena_bytes, team.host);
    // All of it is saved, each tensor once.
    assert_eq!(plan.checkpoint_bytes, search(&team.devices[0]).plan.checkpoint_bytes);
    // As it is written down it is found again.
    let again = plan_of_team(team, &plan.team);
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
        let answer = planned(&team(&config, &devices, 16));
        is_a_pipeline(&team(&config, &devices, 16), &answer);
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
    let answer = planned(&team(&config, &devices, 32));
    is_a_pipeline(&team(&config, &devices, 32), &answer);
}

#[test]
fn what_a_stage_has_no_room_for_waits_on_the_host() {
    let config = preset("smollm2-135m").expect("listed");
    let named = |budgets: &[u64]| -> Vec<DeviceSpec> {
        let of = |(number, mib): (usize, &u64)| device(&format!("virtual:{number}"), Bytes::mib(*mib), 1.0);
        budgets.iter().enumerate().map(of).collect()
    };
    for (budgets, host) in
        [(&[1300, 700][..], Bytes::gib(4)), (&[700, 400], Bytes::gib(4)), (&[600, 700, 500], Bytes::mib(2200))]
    {
        let devices = named(budgets);
        let without = TeamQuestion { only: Some(Only::Sharing(Sharing::Layers)), ..team(&config, &devices, 16) };
        assert!(!share_out(&without).plan.fits, "nothing need wait over {budgets:?}");
        let team = TeamQuestion { only: Some(Only::Sharing(Sharing::Layers)), ..beside(&config, &devices, 16, host) };
        let answer = planned(&team);
        is_a_pipeline(&team, &answer);
        assert!(answer.plan.team.iter().any(|member| member.recipe.offload.optimizer > 0), "{budgets:?}");
        // A stage has nothing of what it lacks wait.
        for (member, last) in answer.plan.team.iter().zip(1..) {
            let ([first, _], offload) = (member.layers.expect("it has layers"), member.recipe.offload);
            let ends = first == 0 || last == answer.plan.team.len();
            assert!(!offload.head && (ends || !offload.embedding), "{offload}");
        }
        // More of the host is never slower.
        let more = TeamQuestion {
            only: Some(Only::Sharing(Sharing::Layers)),
            ..beside(&config, &devices, 16, Bytes::gib(16))
        };
        let more = planned(&more).plan;
        assert!(more.fits && more.predicted.step_seconds <= 1.01 * answer.plan.predicted.step_seconds);
    }
}

#[test]
fn of_all_ways_a_pipeline_is_taken_over_slow_links_whatever_has_to_wait() {
    // A tied table would go over the link.
    let config = ModelConfig { tied: false, ..preset("smollm2-135m").expect("listed") };
    let devices = [device("virtual:a", Bytes::mib(700), 1.0), device("virtual:b", Bytes::mib(600), 0.8)];
    let team = beside(&config, &devices, 16, Bytes::gib(3));
    let answer = planned(&team);
    is_a_pipeline(&team, &answer);
    assert!(answer.plan.team.iter().all(|member| !member.recipe.offload.is_nothing()));
    let ways = alternatives(&team, &answer.plan);
    assert!(ways.iter().any(|way| way.sharing == Some(Sharing::Layers) && way.fits));
}

#[test]
fn a_refusal_names_the_least_of_the_host_that_would_do_for_all() {
    let config = ModelConfig { tied: false, ..preset("smollm2-135m").expect("listed") };
    let devices = [device("virtual:a", Bytes::mib(700), 1.0), device("virtual:b", Bytes::mib(600), 0.8)];
    for only in [None, Some(Sharing::Layers)] {
        let with = |host: Bytes| {
            share_out(&TeamQuestion { only: only.map(Only::Sharing), ..beside(&config, &devices, 16, host) }).plan
        };
        let refused = with(Bytes::mib(256));
        assert!(!refused.fits);
        let host = refused.needs.iter().find_map(|need| need.host_bytes).expect("more of the host would do");
        println!("{only:?}: {host} of the host");
        assert!(with(host).fits, "{host} is not enough");
        let less = with(Bytes((host.0 as f64 * 0.9) as u64));
        assert!(!less.fits, "less than {host} is enough: {:?}", less.sharing);
    }
}

#[test]
fn messages_of_gpus_stand_on_the_host_and_without_one_there_is_no_pipeline() {
    // A tied table would go over the host, too.
    let config = ModelConfig { tied: false, ..preset("smollm2-135m").expect("listed") };
    let devices = [("a", 2400, 1.0), ("b", 1400, 0.5)]
        .map(|(name, budget, pace)| DeviceSpec { kind: DeviceKind::Paper, ..device(name, Bytes::mib(budget), pace) });
    let only = Some(Only::Sharing(Sharing::Layers));
    let with = |host: Bytes| share_out(&TeamQuestion { only: only.clone(), ..beside(&config, &devices, 16, host) });
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
fn stages_of_gpus_have_their_messages_beside_what_waits() {
    let config = ModelConfig { tied: false, ..preset("smollm2-135m").expect("listed") };
    let devices = [("a", 700, 1.0), ("b", 600, 0.8)]
        .map(|(name, budget, pace)| DeviceSpec { kind: DeviceKind::Paper, ..device(name, Bytes::mib(budget), pace) });
    let team =
        TeamQuestion { only: Some(Only::Sharing(Sharing::Layers)), ..beside(&config, &devices, 16, Bytes::gib(3)) };
    let answer = planned(&team);
    is_a_pipeline(&team, &answer);
    assert!(answer.plan.team.iter().any(|member| member.recipe.offload.optimizer > 0));
    // And with all of it there, the inputs that come from another stage, too.
    let mut members = answer.plan.team.clone();
    for member in &mut members {
        let [first, end] = member.layers.expect("it has layers");
        let all = (end - first) as u32;
        member.recipe.offload =
            Offload { optimizer: all, gradients: all, weights: all, inputs: all, ..Offload::NOTHING };
    }
    let answer = plan_of_team(&team, &members);
    answer.parts.iter().for_each(|part| check(&part.answer.set).expect("it is well formed"));
    assert!(answer.plan.host.arena_bytes > Bytes::mib(1500));
}

#[test]
fn a_model_that_fits_everywhere_is_not_cut() {
    let config = preset("smollm2-135m").expect("listed");
    let devices: Vec<DeviceSpec> = (0..2).map(|n| device(&format!("virtual:{n}"), Bytes::gib(24), 1.0)).collect();
    let fast = |device: &DeviceSpec| DeviceSpec { team_link: Link::MEMORY, ..device.clone() };
    let devices: Vec<DeviceSpec> = devices.iter().map(fast).collect();
    assert_eq!(planned(&team(&config, &devices, 64)).plan.sharing, Some(Sharing::Batch));
}
