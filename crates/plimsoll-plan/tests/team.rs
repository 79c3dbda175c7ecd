//! Planned teams: data parallel and sharded. Shares make the slowest device as fast as possible, each device keeps under its
//! own load line, and a device that would slow the team is excluded.

use crate::common::{self, device};
use plimsoll_core::{
    Budget, Bytes, Class, DType, DeviceKind, DeviceSpec, FileSpec, HostSpec, Link, Parallelism, Plan, Rung,
};
use plimsoll_plan::device_request::DevicesRequest;
use plimsoll_plan::paper;
use plimsoll_plan::search::{PlanRequest, search};
use plimsoll_plan::team::{
    EvaluationSchedule, Measurements, TeamConstraint, TeamOutcome, TeamRequest, add_device_remedies, alternatives,
    plan_fixed_team, plan_team, plan_team_if_fits, replan_team,
};
use plimsoll_program::ProgramKind;
use plimsoll_program::Schedule;
use plimsoll_program::models::{ModelConfig, preset};
use plimsoll_program::passes::collective_agreement::check_agreement;
use std::time::Instant;

fn plan_request<'a>(config: &'a ModelConfig, device: &'a DeviceSpec, sequences: u64) -> PlanRequest<'a> {
    common::plan_request(config, device, [sequences, 256.min(config.max_positions)])
}

fn team<'a>(config: &'a ModelConfig, devices: &'a [DeviceSpec], sequences: u64) -> TeamRequest<'a> {
    let devices = devices.iter().map(|device| plan_request(config, device, sequences)).collect();
    TeamRequest { devices, host: Bytes::ZERO, require_all: false, constraint: None, evaluations: None }
}

fn print_outcome(outcome: &TeamOutcome, begin: Instant) {
    let plan = &outcome.plan;
    println!("fits {}, {:?}, {:?}, planned in {:.2?}", plan.fits, plan.parallelism, plan.predicted, begin.elapsed());
    for worker in &plan.team {
        println!(
            "  {}: {} sequences, {}, {:.3} s busy, {:.3} s idle",
            worker.device, worker.sequences, worker.recipe, worker.busy_seconds, worker.idle_seconds
        );
    }
    for out in &plan.excluded {
        println!("  excluded {out:?}");
    }
}

#[test]
fn data_parallel_team_reaches_sum_of_single_devices() {
    let config = preset("smollm2-135m").expect("listed");
    for paces in [vec![1.0, 0.57], vec![1.0, 0.5], vec![1.0, 0.25], vec![0.1; 8]] {
        let devices: Vec<DeviceSpec> = paces
            .iter()
            .enumerate()
            .map(|(n, pace)| device(&format!("virtual:{n}"), Bytes::gib(24), *pace, Link::MEMORY))
            .collect();
        let begin = Instant::now();
        // A sharded team may be slightly faster.
        let constraint = Some(TeamConstraint::Parallelism(Parallelism::Data));
        let outcome = plan_team(&TeamRequest { constraint, ..team(&config, &devices, 64) });
        print_outcome(&outcome, begin);
        let alone: f64 = devices
            .iter()
            .map(|one| plan_team(&team(&config, std::slice::from_ref(one), 64)).plan.predicted.tokens_per_second)
            .sum();
        let ratio = outcome.plan.predicted.tokens_per_second / alone;
        println!("  {paces:?}: {ratio:.4} of the sum");
        assert!(ratio >= 0.95, "{paces:?}: {ratio}");
        assert_eq!(outcome.plan.parallelism, Some(Parallelism::Data));
        assert_eq!(outcome.plan.class, Class::Reordered);
        assert_eq!(outcome.workers.len(), devices.len());
        let bound = outcome.plan.scaling_efficiency.expect("of several devices");
        let (sum, upper) = (bound.single_device_tokens_per_second, bound.upper_bound_tokens_per_second);
        assert!((sum / alone - 1.0).abs() < 0.005 && upper < sum, "{bound:?}");
        assert!(outcome.plan.predicted.tokens_per_second <= upper, "{bound:?}");
        let fastest = &alternatives(&team(&config, &devices, 64), &outcome.plan, &Measurements::default())[0];
        assert!(fastest.devices.len() == devices.len(), "{fastest:?}");
    }
}

#[test]
fn slow_link_reports_cost_and_faster_host() {
    let config = preset("smollm2-135m").expect("listed");
    let over = |link: Link| {
        let names = [("a/virtual:0", 1.0), ("b/virtual:1", 0.5)];
        let devices = names.map(|(name, pace)| device(name, Bytes::gib(24), pace, link));
        plan_team(&TeamRequest { require_all: true, ..team(&config, &devices, 64) }).plan
    };
    let (fast, slow) = (over(Link::MEMORY), over(Link { bytes_per_second: 2e6, latency_seconds: 1e-4 }));
    let cost = |plan: &Plan| plan.link_seconds.expect("of several devices") / plan.predicted.step_seconds;
    assert!(cost(&fast) < 0.01 && cost(&slow) > 0.1, "{} and {}", cost(&fast), cost(&slow));
    assert_eq!(fast.faster_alone, None);
    let alone = slow.faster_alone.expect("the first host is faster without the second");
    assert!(alone.name == "a" && alone.tokens_per_second > slow.predicted.tokens_per_second);
}

/// Tries micro-batches that divide the ideal split. The ideal share of the faster device is 42.7 of 64 sequences; a search over
/// powers of two, and over divisors of the fastest split among those, stops at 42 : 22.
#[test]
fn split_considers_shares_without_small_divisors() {
    let config = preset("smollm2-135m").expect("listed");
    let devices = [0.6, 0.3].map(|pace| {
        let mut device = device("virtual:a", Bytes::gib(24), pace, Link::MEMORY);
        (device.rates.op_seconds, device.rates.memory_bytes_per_second) = (2e-4, 1e13);
        device
    });
    let outcome = plan_team(&team(&config, &devices, 64));
    let sequences: Vec<u64> = outcome.plan.team.iter().map(|worker| worker.sequences).collect();
    assert_eq!(sequences, [43, 21]);
}

#[test]
fn fixed_and_replanned_team_reproduce_the_plan() {
    let config = preset("smollm2-135m").expect("listed");
    let devices = [("a", 24, 1.0), ("b", 8, 0.57)];
    let devices = devices.map(|(name, gib, pace)| device(name, Bytes::gib(gib), pace, Link::MEMORY));
    let team = team(&config, &devices, 64);
    let outcome = plan_team(&team);
    let planned = Plan { scaling_efficiency: None, ..outcome.plan };
    assert_eq!(plan_fixed_team(&team, &planned.team).plan, planned);
    assert_eq!(replan_team(&team, &planned.team).plan, planned);
}

#[test]
fn replanning_changes_only_the_squeezed_recipe() {
    let config = preset("smollm2-135m").expect("listed");
    let devices = [("a", 24, 1.0), ("b", 8, 0.57)];
    let devices = devices.map(|(name, gib, pace)| device(name, Bytes::gib(gib), pace, Link::MEMORY));
    let before = plan_team(&team(&config, &devices, 64)).plan;
    let mut squeezed = devices.clone();
    squeezed[1].budget = before.devices[1].peak_bytes.saturating_sub(Bytes::mib(64));
    let after = replan_team(&team(&config, &squeezed, 64), &before.team).plan;
    assert!(after.fits && after.devices[1].peak_bytes <= squeezed[1].budget);
    assert_eq!(after.team[0].recipe, before.team[0].recipe);
    let sequences = |plan: &Plan| plan.team.iter().map(|worker| worker.sequences).collect::<Vec<_>>();
    assert_eq!(sequences(&after), sequences(&before));
    assert_ne!(after.team[1].recipe, before.team[1].recipe);
}

#[test]
fn team_worker_is_never_offered_a_scratch_file() {
    let config = preset("smollm2-135m").expect("listed");
    let devices = [device("a", Bytes::gib(24), 1.0, Link::MEMORY), device("b", Bytes::gib(24), 1.0, Link::MEMORY)];
    let constraint = Some(TeamConstraint::Parallelism(Parallelism::Data));
    let outcome = plan_team(&TeamRequest { constraint, ..team(&config, &devices, 8) });
    assert_eq!(outcome.plan.parallelism, Some(Parallelism::Data));
    let available = Bytes::gib(100);
    let file = FileSpec { available, ..FileSpec::NONE };
    let squeezed = DeviceSpec { budget: Bytes::gib(1), ..devices[0].clone() };
    let host = HostSpec { budget: Bytes::mib(512), file, ..HostSpec::NONE };
    let plan_request = PlanRequest { host, ..plan_request(&config, &squeezed, 8) };
    assert!(
        search(&plan_request).plan.needs.iter().any(|need| need.file_bytes.is_some()),
        "a single device may use a scratch file"
    );
    let refused = search(&plan_request.for_share(&outcome.workers[0].share, outcome.workers[0].sequences)).plan;
    assert!(!refused.fits && refused.needs.iter().all(|need| need.file_bytes.is_none()), "{:?}", refused.needs);
}

#[test]
fn slow_or_small_device_is_excluded_with_reason() {
    let config = preset("smollm2-135m").expect("listed");
    let slow_link = Link { bytes_per_second: 1e6, latency_seconds: 0.0 };
    let named = |name: &str, gib: u64, pace: f64, link: Link| device(name, Bytes::gib(gib), pace, link);
    for (devices, excluded, reason) in [
        ([named("a", 8, 1.0, slow_link), named("b", 1, 1.0, slow_link)], "b", "its smallest recipe holds"),
        ([named("a", 8, 0.5, slow_link), named("b", 8, 1.0, slow_link)], "a", "it would slow the team"),
    ] {
        let outcome = plan_team(&team(&config, &devices, 64));
        assert!(outcome.plan.fits && outcome.plan.parallelism.is_none() && outcome.plan.team.is_empty());
        assert_eq!(outcome.workers.len(), 1);
        let [out] = &outcome.plan.excluded[..] else { panic!("{:?}", outcome.plan.excluded) };
        assert!(out.device == excluded && out.reason.starts_with(reason) && out.remedy.is_none(), "{out:?}");
        let (team_request, mut plan) = (team(&config, &devices, 64), outcome.plan.clone());
        add_device_remedies(&team_request, &DevicesRequest::default(), &mut plan, &Measurements::default());
        assert_eq!(plan.excluded[0].remedy.as_deref(), Some("--set run.parallelism=all"));
        let all = TeamRequest { require_all: true, ..team(&config, &devices, 64) };
        let all = plan_team(&all).plan;
        let said = plan.excluded[0].tokens_per_second;
        let planned = reason.starts_with("it would").then_some(all.predicted.tokens_per_second);
        assert_eq!(said, planned, "{:?}", plan.excluded);
        // Only a pipeline works over such a slow link.
        assert_eq!((all.fits, all.team.len(), all.parallelism), (true, 2, Some(Parallelism::Pipeline)));
    }
}

#[test]
fn remedy_raises_the_excluded_one_of_equal_names() {
    let config = preset("smollm2-135m").expect("listed");
    let devices = [Budget::Share(0.9), Budget::Amount(Bytes::mib(700)), Budget::Amount(Bytes::mib(600))]
        .map(|budget| paper::paper("rtx3070", budget).expect("listed"));
    let request: DevicesRequest = "rtx3070,rtx3070=700MiB,rtx3070=600MiB".parse().expect("a request");
    let team_request = team(&config, &devices, 64);
    let mut plan = plan_team(&team_request).plan;
    assert_eq!(plan.excluded.iter().map(|out| out.device_index).collect::<Vec<_>>(), [1, 2]);
    add_device_remedies(&team_request, &request, &mut plan, &Measurements::default());
    for (out, [before, after]) in
        plan.excluded.iter().zip([["rtx3070", "rtx3070=600MiB"], ["rtx3070", "rtx3070=700MiB"]])
    {
        let words = out.remedy.as_deref().expect("a larger load line is a remedy");
        let lines: Vec<&str> = words.strip_prefix("--devices ").expect("a line").split(',').collect();
        let other = if out.device_index == 1 { lines[2] } else { lines[1] };
        assert_eq!([lines[0], other], [before, after], "{words}");
        let typed: DevicesRequest =
            words.strip_prefix("--devices ").expect("a line").parse().expect("the remedy parses");
        let given =
            typed.devices.iter().map(|asked| paper::paper(&asked.name(), asked.budget().unwrap_or(Budget::DEVICE)));
        let given: Vec<DeviceSpec> = given.map(|device| device.expect("listed")).collect();
        assert_eq!(plan_team(&team(&config, &given, 64)).workers.len(), 2, "{words}");
    }
}

#[test]
fn exclusion_reason_uses_allowed_rungs() {
    let config = preset("llama-2-13b").expect("listed");
    let devices = ["rtx3090", "rtx3070"].map(|name| paper::paper(name, Budget::Amount(Bytes::gib(2))).expect("listed"));
    let told = |allow: &[Rung]| {
        let mut team_request = team(&config, &devices, 4);
        team_request.devices.iter_mut().for_each(|one| one.lossy.allow = allow.to_vec());
        let plan = plan_team(&team_request).plan;
        let [out] = &plan.excluded[..] else { panic!("{:?}", plan.excluded) };
        let said = out.reason.strip_prefix("its smallest recipe holds ").and_then(|reason| reason.split_once(" GiB"));
        said.and_then(|(gib, _)| gib.parse::<f64>().ok()).unwrap_or_else(|| panic!("{out:?}"))
    };
    let (full, adapters) = (told(&[]), told(&[Rung::Lora]));
    assert!(adapters < 0.5 * full, "{full} GiB in full, {adapters} GiB with adapters");
}

#[test]
fn excluded_device_evaluates_if_it_saves_time() {
    let config = preset("smollm2-135m").expect("listed");
    let slow_link = Link { bytes_per_second: 1e6, latency_seconds: 0.0 };
    let devices = |mib: u64, pace: f64| {
        [device("a", Bytes::gib(8), 1.0, slow_link), device("b", Bytes::mib(mib), pace, slow_link)]
    };
    let asked = |devices: &[DeviceSpec], every: u64, rows: Option<u64>| {
        let evaluations = Some(EvaluationSchedule { every, rows });
        plan_team(&TeamRequest { evaluations, ..team(&config, devices, 64) })
    };
    // The weights take 513 MiB: one device has room for training, too, the other only for evaluation.
    for mib in [8192, 1000] {
        let devices = devices(mib, 0.5);
        let outcome = asked(&devices, 100, Some(1000));
        let [out] = &outcome.plan.excluded[..] else { panic!("{:?}", outcome.plan.excluded) };
        let evaluator_plan = out.evaluator_plan.as_ref().expect("it has room and time");
        let worker = outcome.evaluator.as_ref().expect("it does");
        assert!(out.device == "b" && worker.device == 1, "{out:?}");
        assert_eq!(evaluator_plan.device, worker.outcome.plan.devices[0]);
        assert!(worker.outcome.plan.fits && evaluator_plan.device.peak_bytes <= devices[1].budget);
        assert!(
            worker.outcome.set.program(ProgramKind::Update).is_none()
                && worker.outcome.set.program(ProgramKind::ReloadWeights).is_some()
        );
        let step_seconds = outcome.plan.predicted.step_seconds;
        let crossing = 4.0 * 134.5e6 / slow_link.bytes_per_second;
        assert!(evaluator_plan.weight_transfer_seconds > crossing, "the weights cross the link: {evaluator_plan:?}");
        assert!(
            evaluator_plan.saved_seconds(100.0 * step_seconds) > 0.0 && evaluator_plan.saved_seconds(0.0) < 0.0,
            "{evaluator_plan:?}"
        );
        assert!(
            (evaluator_plan.seconds / evaluator_plan.team_seconds - 2.0).abs() < 0.2,
            "half the pace: {evaluator_plan:?}"
        );
        // With an unknown number of rows, the plan has the least number that saves time.
        let unread = asked(&devices, 100, None).plan.excluded[0]
            .evaluator_plan
            .clone()
            .expect("some number of rows is worth it");
        let (least, of_one) = (unread.break_even_rows(), unread.team_seconds);
        assert!((of_one * 1000.0 / evaluator_plan.team_seconds - 1.0).abs() < 0.05, "{unread:?}");
        assert!(of_one * least as f64 >= unread.weight_transfer_seconds, "{unread:?}");
        // The micro-batch is that of the training device, if there is room for it.
        let (own, theirs) = (evaluator_plan.recipe.micro_batch, outcome.plan.recipe.micro_batch);
        assert!(own == theirs || mib == 1000 && own < theirs, "{own} and {theirs}");
        // A resumed run keeps the evaluator.
        let evaluations = Some(EvaluationSchedule { every: 100, rows: Some(1000) });
        let team_request = TeamRequest { evaluations, ..team(&config, &devices, 64) };
        if !outcome.plan.team.is_empty() {
            assert_eq!(
                plan_fixed_team(&team_request, &outcome.plan.team).evaluator.map(|worker| worker.device),
                Some(1)
            );
        }
    }
    for (devices, every, rows, reason) in [
        (devices(500, 0.5), 100, 1000, "it cannot hold the weights"),
        (devices(8192, 0.5), 0, 1000, "at the end the team would wait for it"),
        (devices(8192, 0.01), 1, 100_000, "the team would always wait for it"),
    ] {
        let outcome = asked(&devices, every, Some(rows));
        let out = &outcome.plan.excluded[0];
        assert!(out.device == "b" && out.evaluator_plan.is_none() && outcome.evaluator.is_none(), "{reason}: {out:?}");
    }
    let devices = devices(8192, 0.5);
    let mut slow_transfer = team(&config, &devices, 64);
    slow_transfer.devices.iter_mut().for_each(|plan_request| plan_request.host.memory_bytes_per_second = 1e6);
    for (rows, saves_time) in [(16, false), (16_000, true)] {
        let evaluations = Some(EvaluationSchedule { every: 10_000, rows: Some(rows) });
        let outcome = plan_team(&TeamRequest { evaluations, ..slow_transfer.clone() });
        assert_eq!(outcome.evaluator.is_some(), saves_time, "{rows} rows, and minutes to transfer the weights");
    }
    let all = TeamRequest { require_all: true, ..team(&config, &devices, 64) };
    let evaluations = Some(EvaluationSchedule { every: 100, rows: Some(1000) });
    let all = plan_team(&TeamRequest { evaluations, ..all });
    assert!(all.plan.excluded.is_empty() && all.evaluator.is_none());
    assert!(plan_team(&team(&config, &devices, 64)).evaluator.is_none(), "the run has no evaluations");
}

/// Asserts the invariants of a sharded plan.
fn assert_sharded(team: &TeamRequest, outcome: &TeamOutcome) {
    let plan = &outcome.plan;
    assert!(plan.fits && plan.parallelism == Some(Parallelism::Sharded) && plan.class >= Class::Reordered);
    assert_eq!(plan.team.iter().map(|worker| worker.shard_1024ths.expect("a worker")).sum::<u64>(), 1024);
    let sequences: u64 = plan.team.iter().map(|worker| worker.sequences).sum();
    assert_eq!(sequences, team.devices[0].sequences);
    let count = outcome.workers[0].share.micro_batches;
    for (assigned, worker) in outcome.workers.iter().zip(&plan.team) {
        assert_eq!(assigned.share.micro_batches, count);
        let most = count * u64::from(worker.recipe.micro_batch);
        assert!(worker.sequences <= most && (worker.sequences > 0 || most == 0), "{worker:?}");
    }
    let schedule = Schedule::accumulate(count as u32);
    let ranks = outcome.workers.iter().map(|worker| (&worker.outcome.set, &schedule)).collect::<Vec<_>>();
    if team.devices[0].device.kind != DeviceKind::Paper {
        check_agreement(&ranks).expect("all ranks agree");
    }
    assert!(plan.host.peak_bytes <= team.host);
    let again = plan_fixed_team(team, &plan.team).plan;
    assert_eq!(again.team, plan.team);
    assert!(again.fits && again.predicted == plan.predicted, "{:?} {:?}", again.predicted, plan.predicted);
}

#[test]
fn model_too_large_for_each_device_is_sharded() {
    let config = preset("smollm2-135m").expect("listed");
    for (mib, paces, link) in [
        ([1900, 700], [1.0, 0.57], Link::MEMORY),
        ([1800, 1000], [0.5, 1.0], Link { bytes_per_second: 1e9, latency_seconds: 1e-5 }),
        ([1500, 1500], [1.0, 1.0], Link::MEMORY),
    ] {
        let device = |name: &str, at: usize| device(name, Bytes::mib(mib[at]), paces[at], link);
        let devices = [device("a", 0), device("b", 1)];
        for device in &devices {
            assert!(!plan_team(&team(&config, std::slice::from_ref(device), 64)).plan.fits, "{}", device.budget);
        }
        let (team, begin) = (team(&config, &devices, 64), Instant::now());
        let outcome = plan_team(&team);
        print_outcome(&outcome, begin);
        assert_sharded(&team, &outcome);
        let shards: Vec<u64> = outcome.plan.team.iter().filter_map(|worker| worker.shard_1024ths).collect();
        assert_eq!(shards[0].cmp(&shards[1]), mib[0].cmp(&mib[1]), "by free memory: {shards:?}");
        let computed: Vec<u64> = outcome.plan.team.iter().map(|worker| worker.sequences).collect();
        assert!((computed[0] > computed[1]) == (paces[0] > paces[1]), "by speed: {computed:?}");
        let list = alternatives(&team, &outcome.plan, &Measurements::default());
        assert!(
            list[0].parallelism == Some(Parallelism::Sharded) && list.iter().filter(|other| !other.fits).count() > 0,
            "{list:?}"
        );
    }
}

#[test]
fn very_slow_device_becomes_storage_only() {
    let config = preset("smollm2-135m").expect("listed");
    let named_device = |name: &str, mib: u64, pace: f64| device(name, Bytes::mib(mib), pace, Link::MEMORY);
    for devices in [
        vec![named_device("fast", 1200, 1.0), named_device("slow", 1900, 0.02)],
        vec![named_device("slow", 1900, 0.02), named_device("fast", 1200, 1.0), named_device("other", 700, 0.8)],
    ] {
        let (named, begin) = (team(&config, &devices, 64), Instant::now());
        let outcome = plan_team(&named);
        print_outcome(&outcome, begin);
        assert_sharded(&named, &outcome);
        let storage_only = outcome.plan.team.iter().find(|worker| worker.device == "slow").expect("it takes part");
        assert_eq!((storage_only.sequences, storage_only.recipe.micro_batch), (0, 0));
        assert!(
            storage_only.reason.as_ref().is_some_and(|reason| reason.contains("slow the team to 3")),
            "{:?}",
            storage_only.reason
        );
        // The others do not fit without it, and would be slower if it computed.
        let others: Vec<DeviceSpec> = devices.iter().filter(|device| device.name != "slow").cloned().collect();
        assert!(!plan_team(&team(&config, &others, 64)).plan.fits);
        let tokens = outcome.plan.predicted.tokens_per_second;
        let list = alternatives(&named, &outcome.plan, &Measurements::default());
        let all_compute = list.iter().filter(|other| other.shares.iter().all(|share| !share.starts_with("0 ")));
        assert!(all_compute.clone().any(|other| other.parallelism == Some(Parallelism::Sharded)), "{list:?}");
        let fits = all_compute.filter(|other| other.fits).map(|other| other.predicted.tokens_per_second);
        assert!(fits.fold(0.0, f64::max) < 0.5 * tokens, "{list:?}");
        // It counts as taking part.
        let all = plan_team(&TeamRequest { require_all: true, ..named.clone() }).plan;
        assert_eq!((all.team, all.excluded), (outcome.plan.team, vec![]));
    }
}

/// Both slow devices have to be storage-only for the step to become faster. With one sequence each, a step has one micro-batch;
/// with only one storage-only worker, the others need two.
#[test]
fn two_slow_devices_become_storage_only_together() {
    let config = ModelConfig { layers: 4, vocab: 1024, ..preset("smollm2-135m").expect("listed") };
    let named_device = |name: &str, mib: u64, pace: f64| device(name, Bytes::mib(mib), pace, Link::MEMORY);
    let fast = named_device("fast", 102, 1.0);
    for (slow, said) in [
        (
            [named_device("b", 190, 0.02), named_device("c", 190, 0.02)],
            "with sequences of their own it and 1 other like it would slow the team to ",
        ),
        (
            [named_device("b", 208, 0.015), named_device("c", 170, 0.02)],
            "with sequences of its own it would slow the team to ",
        ),
    ] {
        let devices = [std::slice::from_ref(&fast), &slow[..]].concat();
        let constraint = Some(TeamConstraint::Parallelism(Parallelism::Sharded));
        let (team, begin) = (TeamRequest { constraint, ..team(&config, &devices, 3) }, Instant::now());
        let outcome = plan_team(&team);
        print_outcome(&outcome, begin);
        assert_sharded(&team, &outcome);
        let sequences: Vec<u64> = outcome.plan.team.iter().map(|worker| worker.sequences).collect();
        assert_eq!(sequences, [3, 0, 0]);
        for worker in &outcome.plan.team[1..] {
            assert!(worker.reason.as_ref().is_some_and(|reason| reason.starts_with(said)), "{:?}", worker.reason);
        }
        let all = plan_team(&TeamRequest { require_all: true, ..team.clone() }).plan;
        assert_eq!(all.team, outcome.plan.team);
    }
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn storage_only_workers_keep_their_load_line() {
    let config = ModelConfig { layers: 4, vocab: 1024, ..preset("smollm2-135m").expect("listed") };
    let mut storage_workers = 0;
    for paces in [[0.5, 0.02], [0.02, 0.1]] {
        for [fast, slow, other] in [[140, 220, 0], [170, 190, 0], [200, 260, 0], [120, 300, 80], [100, 160, 100]] {
            for (on_host, pace) in [0, 40].into_iter().zip(paces) {
                let named_device = |name: &str, mib: u64, pace: f64| device(name, Bytes::mib(mib), pace, Link::MEMORY);
                let mut devices = vec![named_device("fast", fast, 1.0), named_device("slow", slow, pace)];
                devices.extend((other > 0).then(|| named_device("other", other, 0.6)));
                let host = Bytes::mib(on_host);
                let constraint = Some(TeamConstraint::Parallelism(Parallelism::Sharded));
                let mut team = TeamRequest { host, constraint, ..team(&config, &devices, 12) };
                team.devices.iter_mut().for_each(|plan_request| plan_request.host = common::host(host));
                let outcome =
                    plan_team_if_fits(&team).filter(|outcome| outcome.plan.parallelism == Some(Parallelism::Sharded));
                let Some(outcome) = outcome else { continue };
                assert_sharded(&team, &outcome);
                storage_workers += outcome.plan.team.iter().filter(|worker| worker.sequences == 0).count();
                for plan in &outcome.plan.devices {
                    assert!(plan.peak_bytes <= plan.budget_bytes, "{plan:?}");
                }
            }
        }
    }
    assert!(storage_workers >= 5, "{storage_workers}");
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn more_memory_never_makes_a_team_slower() {
    let slow = Link { bytes_per_second: 125e6, latency_seconds: 1e-4 };
    // The cases: over a slow link even shards are best, whatever the room; one device alone is fastest, the one with more
    // room; the first of three stages is not the one with the most memory.
    /// A card, and its MiB before and after.
    type Card = (&'static str, [u64; 2]);
    /// A model on cards, sequences by tokens, a host, and whether all cards have to take part.
    type Case<'a> = (&'a str, &'a [Card], [u64; 2], Bytes, bool);
    let cases: [Case; 3] = [
        ("smollm2-360m", &[("rtx4090", [3363, 3363]), ("rtx3070", [6168, 7311])], [64, 256], Bytes::ZERO, true),
        ("smollm2-360m", &[("rtx4090", [4345, 4345]), ("rtx4090", [4922, 5021])], [16, 256], Bytes::gib(4), false),
        (
            "smollm2-135m",
            &[("rtx3070", [2425, 2645]), ("rtx4090", [2491, 2491]), ("rtx3070", [2262, 2262])],
            [16, 1024],
            Bytes::gib(4),
            true,
        ),
    ];
    for (model, cards, shape, host, all) in cases {
        let config = preset(model).expect("listed");
        let seconds = |at: usize| {
            let card = |(name, mib): &Card| {
                let card = paper::paper(name, Budget::Amount(Bytes::mib(mib[at]))).expect("listed");
                DeviceSpec { team_link: slow, ..card }
            };
            let cards: Vec<DeviceSpec> = cards.iter().map(card).collect();
            let request = |card| PlanRequest {
                precision: DType::Bf16,
                host: common::host(host),
                ..common::plan_request(&config, card, shape)
            };
            let (team, begin) = (
                TeamRequest {
                    devices: cards.iter().map(request).collect(),
                    host,
                    require_all: all,
                    constraint: None,
                    evaluations: None,
                },
                Instant::now(),
            );
            let outcome = plan_team(&team);
            print_outcome(&outcome, begin);
            assert!(outcome.plan.fits);
            outcome.plan.predicted.step_seconds
        };
        let [less, more] = [0, 1].map(seconds);
        assert!(more < 1.02 * less, "{model} on {cards:?}: {more} s, {less} s with less");
    }
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn device_with_slow_link_is_excluded() {
    let config = preset("smollm2-135m").expect("listed");
    let link = |bytes_per_second: f64| Link { bytes_per_second, latency_seconds: 1e-5 };
    let with = |devices: &[DeviceSpec], host: Bytes| {
        let mut team = TeamRequest { host, ..team(&config, devices, 64) };
        team.devices.iter_mut().for_each(|plan_request| plan_request.host = common::host(host));
        let begin = Instant::now();
        let outcome = plan_team(&team);
        print_outcome(&outcome, begin);
        assert!(outcome.plan.fits);
        outcome.plan
    };
    // The third device is like the second but for its link.
    let near = [("a", 1500, 0.5, 16e9), ("b", 1500, 0.3, 16e9)];
    let near = near.map(|(name, mib, pace, rate)| device(name, Bytes::mib(mib), pace, link(rate)));
    let with_remote = [near[0].clone(), near[1].clone(), device("c", Bytes::mib(1500), 0.3, link(1e5))];
    let (pair, three) = (with(&near, Bytes::ZERO), with(&with_remote, Bytes::ZERO));
    assert!(
        three.predicted.step_seconds < 1.01 * pair.predicted.step_seconds,
        "{:?}, {:?}",
        three.predicted,
        pair.predicted
    );
    assert_eq!(three.excluded[0].device, "c");
    // Excluding only one of two equally slow links gains nothing. The order of the devices does not matter.
    let cards = |rates: [f64; 4]| rates.map(|rate| device("a", Bytes::mib(1500), 0.5, link(rate)));
    let pair = with(&cards([16e9; 4])[..2], Bytes::ZERO);
    for rates in [[16e9, 16e9, 1e5, 1e5], [1e5, 16e9, 1e6, 16e9], [1e5, 1e5, 16e9, 16e9]] {
        let four = with(&cards(rates), Bytes::ZERO).predicted;
        assert!(four.step_seconds < 1.01 * pair.predicted.step_seconds, "{rates:?} {four:?}, {:?}", pair.predicted);
    }
    // A packed team waits longer for a slow link than estimated, so one device alone may be faster.
    let card = |mib: u64, rate: f64| {
        let card = paper::paper("rtx4060ti-16g", Budget::Amount(Bytes::mib(mib))).expect("listed");
        DeviceSpec { team_link: link(rate), ..card }
    };
    let cards = [card(9000, 12e9), card(2000, 1e8)];
    let (alone, join) = (with(&cards[..1], Bytes::gib(128)), with(&cards, Bytes::gib(128)));
    assert!(
        join.predicted.step_seconds < 1.01 * alone.predicted.step_seconds,
        "{:?}, {:?}",
        join.predicted,
        alone.predicted
    );
}

#[test]
fn host_for_one_device_goes_to_the_fastest() {
    // One layer, so that no pipeline is possible.
    let config = ModelConfig { layers: 1, vocab: 32, ..preset("smollm2-135m").expect("listed") };
    let host = Bytes::mib(40);
    let plan = |devices: &[DeviceSpec]| {
        let mut team = TeamRequest { host, ..team(&config, devices, 6) };
        team.devices.iter_mut().for_each(|plan_request| plan_request.host = common::host(host));
        let begin = Instant::now();
        let outcome = plan_team(&team);
        print_outcome(&outcome, begin);
        outcome.plan
    };
    let named_device = |name: &str, mib: u64, pace: f64| device(name, Bytes::mib(mib), pace, Link::MEMORY);
    let [slow, fast] = [named_device("slow", 60, 0.1), named_device("fast", 50, 0.4)];
    let alone = plan(std::slice::from_ref(&fast));
    assert!(alone.fits && plan(std::slice::from_ref(&slow)).fits);
    for join in [[slow.clone(), fast.clone()], [fast, slow]] {
        let join = plan(&join);
        assert_eq!(join.parallelism, None);
        assert!(join.predicted.step_seconds < 1.01 * alone.predicted.step_seconds, "{:?}", join.predicted);
        assert!(join.excluded.iter().all(|out| !out.reason.contains("smallest recipe")), "{:?}", join.excluded);
    }
}

#[test]
fn fixed_shards_still_balance_sequences() {
    let config = preset("smollm2-135m").expect("listed");
    let devices = |paces: [f64; 2]| {
        let device = |name: &str, at: usize| device(name, Bytes::mib(1500), paces[at], Link::MEMORY);
        [device("a", 0), device("b", 1)]
    };
    let (even, slower) = (devices([1.0, 1.0]), devices([1.0, 0.4]));
    let before = plan_team(&team(&config, &even, 64));
    assert_eq!(before.plan.parallelism, Some(Parallelism::Sharded));
    let shards = |outcome: &TeamOutcome| outcome.workers[0].share.state.clone();
    let unbalanced = plan_fixed_team(&team(&config, &slower, 64), &before.plan.team).plan;
    let kept =
        TeamRequest { constraint: Some(TeamConstraint::ShardSizes(shards(&before))), ..team(&config, &slower, 64) };
    let after = plan_team(&kept);
    assert_sharded(&kept, &after);
    assert_eq!(shards(&after), shards(&before));
    let sequences: Vec<u64> = after.plan.team.iter().map(|worker| worker.sequences).collect();
    assert!(sequences[0] > sequences[1], "{sequences:?}");
    let (then, now) = (after.plan.predicted.step_seconds, unbalanced.predicted.step_seconds);
    assert!(then < 0.9 * now, "{then} {now}");
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn large_model_fits_large_team() {
    let eight = &["rtx5090"; 8][..];
    assert_fits("qwen2.5-32b", eight, &[(0, &[Rung::Lora], true), (512, &[], true)]);
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn large_model_on_unequal_devices_fits_with_rungs() {
    assert_fits("llama-2-13b", &["rtx3090", "rtx3070"], &[(128, &[Rung::Lora], true), (128, &[], false)]);
}

/// Asserts whether a model fits a team, for each case of (GiB of the host, allowed rungs, fits).
fn assert_fits(model: &str, names: &[&str], cases: &[(u64, &[Rung], bool)]) {
    let devices = |names: &[&str]| -> Vec<DeviceSpec> {
        names.iter().map(|name| paper::paper(name, Budget::Share(0.9)).expect("listed")).collect()
    };
    for &(host, rungs, fits) in cases {
        let (config, devices) = (preset(model).expect("listed"), devices(names));
        let host = HostSpec { budget: Bytes::gib(host), memory_bytes_per_second: 50e9, ..HostSpec::NONE };
        let plan_request = |device| {
            let mut plan_request =
                PlanRequest { precision: DType::Bf16, sequence: 1024, host, ..plan_request(&config, device, 64) };
            plan_request.lossy.allow = rungs.to_vec();
            plan_request
        };
        let team = TeamRequest {
            devices: devices.iter().map(plan_request).collect(),
            host: host.budget,
            require_all: false,
            constraint: None,
            evaluations: None,
        };
        let begin = Instant::now();
        let outcome = plan_team(&team);
        println!("{model} over {names:?}, {rungs:?}:");
        print_outcome(&outcome, begin);
        assert_eq!(outcome.plan.fits, fits);
        if outcome.plan.parallelism == Some(Parallelism::Sharded) {
            assert_sharded(&team, &outcome);
        }
    }
}
