//! The timeline of a plan: its peak is that of the plan, its categories add up, and it names the op that sets the peak.

use crate::common::{device, host, plan_request};
use plimsoll_core::{Bytes, DType, DevicePlan, DeviceSpec, Link, Parallelism, TimelinePoint, WorkKind, peak_point};
use plimsoll_plan::search::{LossyOptions, PlanRequest, search};
use plimsoll_plan::team::{TeamConstraint, TeamRequest, plan_team};
use plimsoll_plan::timeline::MAX_POINTS;
use plimsoll_program::models::decoder::Method;
use plimsoll_program::models::{ModelConfig, preset};

/// Asserts that a device's timeline agrees with its plan: in all, for each kind of work, and by category.
fn assert_timeline(name: &str, plan: &DevicePlan) {
    let peak = peak_point(&plan.timeline, None).unwrap_or_else(|| panic!("{name}: no points"));
    println!("{name}: {} {} ({} points)", plan.peak_bytes, peak.describe(), plan.timeline.len());
    assert!(plan.timeline.len() <= MAX_POINTS, "{name}: {} points", plan.timeline.len());
    assert_eq!(peak.bytes + plan.charges_bytes, plan.peak_bytes, "{name}");
    assert_eq!(peak.by_category, plan.by_category, "{name}");
    assert!(peak.op.is_some(), "{name}: {peak:?}");
    for point in &plan.timeline {
        let sum: Bytes = point.by_category.values().copied().sum();
        assert_eq!(sum, point.bytes, "{name}: {point:?}");
        assert!(point.op.is_some(), "{name}: {point:?}");
    }
    for (work, bytes) in plan.by_program.iter().filter(|(work, _)| **work != WorkKind::Replan) {
        let peak = peak_point(&plan.timeline, Some(*work)).map(|point| point.bytes);
        assert_eq!(peak, Some(*bytes), "{name}: {work}");
    }
}

fn assert_plan(name: &str, request: &PlanRequest) -> DevicePlan {
    let plan = search(request).plan;
    assert!(plan.fits, "{name}");
    assert_timeline(name, &plan.devices[0]);
    plan.devices[0].clone()
}

/// Returns the layers that the timeline passes in this kind of work, in its order.
fn layers(timeline: &[TimelinePoint], work: WorkKind) -> Vec<u32> {
    timeline.iter().filter(|point| point.work == work).filter_map(|point| point.layer).collect()
}

#[test]
fn peak_is_that_of_each_plan() {
    for model in ["smollm2-135m", "qwen3-0.6b", "llama-3.2-1b"] {
        let config = preset(model).expect("listed");
        for precision in [DType::F32, DType::Bf16] {
            let large = device("virtual:a", Bytes::gib(100), 1.0, Link::MEMORY);
            let name = format!("{model} in {precision}");
            let plan = assert_plan(&name, &PlanRequest { precision, ..plan_request(&config, &large, [8, 256]) });
            let forward = layers(&plan.timeline, WorkKind::Forward);
            let backward = layers(&plan.timeline, WorkKind::Backward);
            assert!(forward.len() > 5 && forward.is_sorted(), "{forward:?}");
            assert!(backward.len() > 5 && backward.is_sorted_by(|a, b| a >= b), "{backward:?}");
        }
    }
}

#[test]
fn offload_keeps_layers_of_unrolled_passes() {
    let config = preset("smollm2-135m").expect("listed");
    let free = device("virtual:a", Bytes::gib(100), 1.0, Link::MEMORY);
    let most = search(&plan_request(&config, &free, [8, 256])).plan.devices[0].peak_bytes;
    for percent in [45, 30, 15] {
        let small = device("virtual:a", Bytes(most.0 * percent / 100), 1.0, Link::MEMORY);
        let request = PlanRequest { host: host(Bytes::gib(16)), ..plan_request(&config, &small, [8, 256]) };
        let plan = assert_plan(&format!("{percent} % with a host"), &request);
        let backward = layers(&plan.timeline, WorkKind::Backward);
        assert!(backward.len() > 5 && backward.is_sorted_by(|a, b| a >= b), "{backward:?}");
    }
}

#[test]
fn adapters_name_an_op_at_every_point() {
    let config = preset("smollm2-135m").expect("listed");
    let device = device("virtual:a", Bytes::gib(100), 1.0, Link::MEMORY);
    let lossy = LossyOptions::default();
    let lossy = LossyOptions { method: Method::Lora(lossy.lora.clone()), ..lossy };
    assert_plan("LoRA", &PlanRequest { lossy, ..plan_request(&config, &device, [8, 256]) });
}

/// Asserts that the points of the forward and backward pass reach each of the few layers from `first` to `end`.
fn assert_every_layer(name: &str, plan: &DevicePlan, [first, end]: [u64; 2]) {
    for work in [WorkKind::Forward, WorkKind::Backward] {
        let mut computed = layers(&plan.timeline, work);
        computed.sort_unstable();
        computed.dedup();
        assert_eq!(computed, (first as u32..end as u32).collect::<Vec<_>>(), "{name} {work}");
    }
}

#[test]
fn unrolled_passes_of_few_layers_name_each() {
    let preset = preset("smollm2-135m").expect("listed");
    let link = Link { bytes_per_second: 1e9, latency_seconds: 20e-6 };
    for layers in [1, 2, 4] {
        let config = ModelConfig { layers, vocab: 1024, ..preset.clone() };
        let large = device("virtual:a", Bytes::gib(8), 1.0, link);
        let most = search(&plan_request(&config, &large, [8, 256])).plan.devices[0].peak_bytes;
        let small = device("virtual:a", Bytes(most.0 * 4 / 10), 1.0, link);
        let request = PlanRequest { host: host(Bytes::gib(16)), ..plan_request(&config, &small, [8, 256]) };
        assert_every_layer("offload", &assert_plan("offload", &request), [0, layers]);
        for parallelism in [Parallelism::Data, Parallelism::Sharded, Parallelism::Pipeline] {
            let devices = ["virtual:a", "virtual:b"].map(|name| device(name, Bytes::gib(8), 1.0, link));
            let plan = plan_team(&team(&config, &devices, parallelism)).plan;
            for (worker, device) in plan.team.iter().zip(&plan.devices) {
                let name = format!("{parallelism:?} {}", worker.device);
                assert_timeline(&name, device);
                assert_every_layer(&name, device, worker.layers.unwrap_or([0, layers]));
            }
        }
    }
}

fn team<'a>(config: &'a ModelConfig, devices: &'a [DeviceSpec], parallelism: Parallelism) -> TeamRequest<'a> {
    TeamRequest {
        devices: devices.iter().map(|device| plan_request(config, device, [16, 256])).collect(),
        host: Bytes::ZERO,
        require_all: true,
        constraint: Some(TeamConstraint::Parallelism(parallelism)),
        evaluations: None,
    }
}

#[test]
fn each_worker_of_a_team_has_its_timeline() {
    let config = preset("smollm2-135m").expect("listed");
    let link = Link { bytes_per_second: 1e9, latency_seconds: 20e-6 };
    for parallelism in [Parallelism::Data, Parallelism::Sharded, Parallelism::Pipeline] {
        let devices = ["virtual:a", "virtual:b", "virtual:c"].map(|name| device(name, Bytes::mib(3500), 1.0, link));
        let plan = plan_team(&team(&config, &devices, parallelism)).plan;
        assert_eq!((plan.fits, plan.parallelism, plan.devices.len()), (true, Some(parallelism), 3));
        for (worker, device) in plan.team.iter().zip(&plan.devices) {
            assert_timeline(&format!("{parallelism:?} {}", worker.device), device);
            let [first, end] = worker.layers.unwrap_or([0, config.layers]);
            let computed = layers(&device.timeline, WorkKind::Forward);
            assert!(computed.len() > 2 && computed.is_sorted(), "{computed:?}");
            assert!(computed.iter().all(|layer| (first..end).contains(&u64::from(*layer))), "{computed:?}");
        }
    }
}
