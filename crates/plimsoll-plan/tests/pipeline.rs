//! Planned pipelines: stages of unequal size on devices that cannot hold the model alone, each under its own load line.

use crate::common::{self, plan_request};
use plimsoll_core::{Bytes, DeviceKind, DeviceSpec, HostSpec, Link, Offload, Parallelism};
use plimsoll_plan::search::{PlanRequest, search};
use plimsoll_plan::team::{
    Measurements, TeamConstraint, TeamOutcome, TeamRequest, alternatives, plan_fixed_team, plan_team,
};
use plimsoll_program::Schedule;
use plimsoll_program::models::{ModelConfig, preset};
use plimsoll_program::passes::check::check;
use plimsoll_program::passes::collective_agreement::check_agreement;
use std::time::Instant;

/// A link too slow for gathering weights.
const SLOW: Link = Link { bytes_per_second: 12e6, latency_seconds: 100e-6 };

/// Returns a simulated device with a fraction `pace` of a CPU core's speed.
fn device(name: &str, budget: Bytes, pace: f64) -> DeviceSpec {
    common::device(name, budget, pace, SLOW)
}

fn team<'a>(config: &'a ModelConfig, devices: &'a [DeviceSpec], sequences: u64) -> TeamRequest<'a> {
    team_with_host(config, devices, sequences, Bytes::ZERO)
}

/// Returns a team with a host load line of `host`.
fn team_with_host<'a>(
    config: &'a ModelConfig,
    devices: &'a [DeviceSpec],
    sequences: u64,
    host: Bytes,
) -> TeamRequest<'a> {
    let spec = HostSpec { budget: host, memory_bytes_per_second: 1e10, ..HostSpec::NONE };
    let question =
        |device: &'a DeviceSpec| PlanRequest { host: spec, ..plan_request(config, device, [sequences, 256]) };
    TeamRequest {
        devices: devices.iter().map(question).collect(),
        host,
        require_all: false,
        constraint: None,
        evaluations: None,
    }
}

fn plan_and_print(team: &TeamRequest) -> TeamOutcome {
    let begin = Instant::now();
    let outcome = plan_team(team);
    println!(
        "{:?}: fits {}, {:?}, in {:.2?}",
        outcome.plan.parallelism,
        outcome.plan.fits,
        outcome.plan.predicted,
        begin.elapsed()
    );
    for (worker, device) in outcome.plan.team.iter().zip(&outcome.plan.devices) {
        println!(
            "  {} {:?}: {}, {} of {}, {:.3} s busy, {:.3} s idle",
            worker.device,
            worker.layers,
            worker.recipe,
            device.peak_bytes,
            device.budget_bytes,
            worker.busy_seconds,
            worker.idle_seconds
        );
    }
    for out in &outcome.plan.excluded {
        println!("  excluded {out:?}");
    }
    outcome
}

/// Asserts that a plan is a pipeline: its stages cover the model, keep all load lines, and agree on their transfers.
fn assert_pipeline(team: &TeamRequest, outcome: &TeamOutcome) {
    let plan = &outcome.plan;
    let (config, sequences) = (team.devices[0].config, team.devices[0].sequences);
    assert_eq!((plan.fits, plan.parallelism), (true, Some(Parallelism::Pipeline)));
    let ends: Vec<[u64; 2]> = plan.team.iter().map(|worker| worker.layers.expect("it has layers")).collect();
    assert_eq!((ends[0][0], ends[ends.len() - 1][1]), (0, config.layers));
    assert!(ends.windows(2).all(|pair| pair[0][1] == pair[1][0]), "{ends:?}");
    for (worker, device) in plan.team.iter().zip(&plan.devices) {
        let [first, end] = worker.layers.expect("it has layers");
        assert_eq!((worker.recipe.recompute.len() as u64, worker.sequences), (end - first, sequences));
        assert!(team.host > Bytes::ZERO || worker.recipe.offload == Offload::NOTHING);
        assert_eq!(worker.recipe.micro_batch, plan.team[0].recipe.micro_batch);
        assert!(device.peak_bytes <= device.budget_bytes);
        assert!((worker.busy_seconds + worker.idle_seconds - plan.predicted.step_seconds).abs() < 1e-9);
    }
    let count = sequences.div_ceil(u64::from(plan.team[0].recipe.micro_batch)) as u32;
    let schedules: Vec<Schedule> = outcome.workers.iter().map(|worker| worker.share.schedule(count)).collect();
    let ranks: Vec<_> = outcome.workers.iter().map(|worker| &worker.outcome.set).zip(&schedules).collect();
    check_agreement(&ranks).expect("all stages agree");
    outcome.workers.iter().for_each(|worker| check(&worker.outcome.set).expect("it is well formed"));
    let host_bytes = |worker: &plimsoll_plan::team::PlannedWorker| {
        let host = &worker.outcome.plan.host;
        assert!(host.arena_bytes <= host.budget_bytes || host.arena_bytes == Bytes::ZERO);
        host.arena_bytes
    };
    assert_eq!(outcome.workers.iter().map(host_bytes).sum::<Bytes>(), plan.host.arena_bytes);
    assert!(plan.host.arena_bytes <= team.host, "{} of {}", plan.host.arena_bytes, team.host);
    // All stages together save each tensor once.
    assert_eq!(plan.checkpoint_bytes, search(&team.devices[0]).plan.checkpoint_bytes);
    // A plan for the stored shares and recipes is the same.
    let again = plan_fixed_team(team, &plan.team);
    assert_eq!((&again.plan.team, again.plan.predicted), (&plan.team, plan.predicted));
}

#[test]
fn model_too_large_for_each_device_becomes_pipeline() {
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
        let outcome = plan_and_print(&team(&config, &devices, 16));
        assert_pipeline(&team(&config, &devices, 16), &outcome);
        // A step takes longer than its slowest stage is busy, but not much longer.
        let busiest = outcome.plan.team.iter().map(|worker| worker.busy_seconds).fold(0.0, f64::max);
        let step = outcome.plan.predicted.step_seconds;
        assert!(step >= busiest && step < 2.0 * busiest, "{step} s, {busiest} s busy");
        let list = alternatives(&team(&config, &devices, 16), &outcome.plan, &Measurements::default());
        assert!(list.iter().any(|other| other.parallelism == Some(Parallelism::Pipeline) && other.fits));
        assert!(list.iter().filter(|other| other.parallelism.is_none()).all(|other| !other.fits));
    }
}

#[test]
fn eight_devices_hold_a_larger_model() {
    let config = preset("smollm2-360m").expect("listed");
    let devices: Vec<DeviceSpec> = (0..8).map(|n| device(&format!("virtual:{n}"), Bytes::mib(1300), 1.0)).collect();
    let outcome = plan_and_print(&team(&config, &devices, 32));
    assert_pipeline(&team(&config, &devices, 32), &outcome);
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn stages_offload_what_does_not_fit() {
    let config = preset("smollm2-135m").expect("listed");
    let devices_with = |budgets: &[u64]| -> Vec<DeviceSpec> {
        let device_with = |(number, mib): (usize, &u64)| device(&format!("virtual:{number}"), Bytes::mib(*mib), 1.0);
        budgets.iter().enumerate().map(device_with).collect()
    };
    for (budgets, host) in
        [(&[1300, 700][..], Bytes::gib(4)), (&[700, 400], Bytes::gib(4)), (&[600, 700, 500], Bytes::mib(2200))]
    {
        let devices = devices_with(budgets);
        let without = TeamRequest {
            constraint: Some(TeamConstraint::Parallelism(Parallelism::Pipeline)),
            ..team(&config, &devices, 16)
        };
        assert!(!plan_team(&without).plan.fits, "{budgets:?} fit without offload");
        let team = TeamRequest {
            constraint: Some(TeamConstraint::Parallelism(Parallelism::Pipeline)),
            ..team_with_host(&config, &devices, 16, host)
        };
        let outcome = plan_and_print(&team);
        assert_pipeline(&team, &outcome);
        assert!(outcome.plan.team.iter().any(|worker| worker.recipe.offload.optimizer > 0), "{budgets:?}");
        // A stage without embedding or head offloads neither.
        for (worker, last) in outcome.plan.team.iter().zip(1..) {
            let ([first, _], offload) = (worker.layers.expect("it has layers"), worker.recipe.offload);
            let ends = first == 0 || last == outcome.plan.team.len();
            assert!(!offload.head && (ends || !offload.embedding), "{offload}");
        }
        // More of the host is never slower.
        let more = TeamRequest {
            constraint: Some(TeamConstraint::Parallelism(Parallelism::Pipeline)),
            ..team_with_host(&config, &devices, 16, Bytes::gib(16))
        };
        let more = plan_and_print(&more).plan;
        assert!(more.fits && more.predicted.step_seconds <= 1.01 * outcome.plan.predicted.step_seconds);
    }
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn slow_links_prefer_an_offloading_pipeline() {
    // A tied embedding would cross the link.
    let config = ModelConfig { tied: false, ..preset("smollm2-135m").expect("listed") };
    let devices = [device("virtual:a", Bytes::mib(700), 1.0), device("virtual:b", Bytes::mib(600), 0.8)];
    let team = team_with_host(&config, &devices, 16, Bytes::gib(3));
    let outcome = plan_and_print(&team);
    assert_pipeline(&team, &outcome);
    assert!(outcome.plan.team.iter().all(|worker| !worker.recipe.offload.is_nothing()));
    let list = alternatives(&team, &outcome.plan, &Measurements::default());
    assert!(list.iter().any(|other| other.parallelism == Some(Parallelism::Pipeline) && other.fits));
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn refusal_names_the_least_host_for_all() {
    let config = ModelConfig { tied: false, ..preset("smollm2-135m").expect("listed") };
    let devices = [device("virtual:a", Bytes::mib(700), 1.0), device("virtual:b", Bytes::mib(600), 0.8)];
    for only in [None, Some(Parallelism::Pipeline)] {
        let with = |host: Bytes| {
            plan_team(&TeamRequest {
                constraint: only.map(TeamConstraint::Parallelism),
                ..team_with_host(&config, &devices, 16, host)
            })
            .plan
        };
        let refused = with(Bytes::mib(256));
        assert!(!refused.fits);
        let host = refused.needs.iter().find_map(|need| need.host_bytes).expect("more host memory is a remedy");
        println!("{only:?}: {host} of the host");
        assert!(with(host).fits, "{host} is not enough");
        let less = with(Bytes((host.0 as f64 * 0.9) as u64));
        assert!(!less.fits, "less than {host} is enough: {:?}", less.parallelism);
    }
}

#[test]
fn gpu_pipeline_needs_host_memory_for_transfers() {
    // A tied embedding would be staged on the host, too.
    let config = ModelConfig { tied: false, ..preset("smollm2-135m").expect("listed") };
    let devices = [("a", 2400, 1.0), ("b", 1400, 0.5)]
        .map(|(name, budget, pace)| DeviceSpec { kind: DeviceKind::Paper, ..device(name, Bytes::mib(budget), pace) });
    let constraint = Some(TeamConstraint::Parallelism(Parallelism::Pipeline));
    let with = |host: Bytes| {
        plan_team(&TeamRequest { constraint: constraint.clone(), ..team_with_host(&config, &devices, 16, host) })
    };
    let outcome = with(Bytes::mib(64));
    assert_eq!((outcome.plan.fits, outcome.plan.parallelism), (true, Some(Parallelism::Pipeline)));
    // The first stage keeps a sent hidden state until its gradient is back: two micro-batches, and one receive buffer. The last
    // stage sends and receives in one buffer.
    let worker = &outcome.plan.team[0];
    let message = u64::from(worker.recipe.micro_batch) * 256 * config.hidden * 4;
    let host_bytes: Vec<u64> = outcome.workers.iter().map(|worker| worker.outcome.plan.host.arena_bytes.0).collect();
    assert_eq!(host_bytes, [3 * message, message]);
    outcome.workers.iter().for_each(|worker| check(&worker.outcome.set).expect("it is well formed"));
    assert_ne!(with(Bytes::ZERO).plan.parallelism, Some(Parallelism::Pipeline));
    // Nor where the host is smaller than the transfer buffers.
    assert_ne!(with(Bytes(message)).plan.parallelism, Some(Parallelism::Pipeline));
}

#[test]
fn gpu_stages_stage_transfers_beside_offload() {
    let config = ModelConfig { tied: false, ..preset("smollm2-135m").expect("listed") };
    let devices = [("a", 700, 1.0), ("b", 600, 0.8)]
        .map(|(name, budget, pace)| DeviceSpec { kind: DeviceKind::Paper, ..device(name, Bytes::mib(budget), pace) });
    let team = TeamRequest {
        constraint: Some(TeamConstraint::Parallelism(Parallelism::Pipeline)),
        ..team_with_host(&config, &devices, 16, Bytes::gib(3))
    };
    let outcome = plan_and_print(&team);
    assert_pipeline(&team, &outcome);
    assert!(outcome.plan.team.iter().any(|worker| worker.recipe.offload.optimizer > 0));
    // Everything can be offloaded, even inputs that come from another stage.
    let mut workers = outcome.plan.team.clone();
    for worker in &mut workers {
        let [first, end] = worker.layers.expect("it has layers");
        let all = (end - first) as u32;
        worker.recipe.offload =
            Offload { optimizer: all, gradients: all, weights: all, inputs: all, ..Offload::NOTHING };
    }
    let outcome = plan_fixed_team(&team, &workers);
    outcome.workers.iter().for_each(|worker| check(&worker.outcome.set).expect("it is well formed"));
    assert!(outcome.plan.host.arena_bytes > Bytes::mib(1500));
}

#[test]
fn small_model_is_not_split_into_stages() {
    let config = preset("smollm2-135m").expect("listed");
    let devices: Vec<DeviceSpec> = (0..2).map(|n| device(&format!("virtual:{n}"), Bytes::gib(24), 1.0)).collect();
    let fast = |device: &DeviceSpec| DeviceSpec { team_link: Link::MEMORY, ..device.clone() };
    let devices: Vec<DeviceSpec> = devices.iter().map(fast).collect();
    assert_eq!(plan_and_print(&team(&config, &devices, 64)).plan.parallelism, Some(Parallelism::Data));
}
