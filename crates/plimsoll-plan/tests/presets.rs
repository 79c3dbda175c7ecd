//! Plans of all presets: Programs are well-formed, packings meet the lower bound, and a refused run fits at the budget
//! that the refusal names.

use crate::common;
use plimsoll_core::{Bytes, DType, DeviceKind, DeviceSpec, Link, Rates, Recipe, RecomputeLevel, Space, WorkKind};
use plimsoll_plan::search::{PinnedChoices, PlanRequest, plan_recipe, search};
use plimsoll_program::models::decoder::Generation;
use plimsoll_program::models::{preset, preset_names};
use plimsoll_program::{Lifetime, Tensor};

fn device(budget: Bytes) -> DeviceSpec {
    DeviceSpec {
        name: "paper".into(),
        kind: DeviceKind::Paper,
        budget,
        charges: Bytes::mib(10),
        charges_measured: false,
        link_measured: false,
        nccl: None,
        team_link: Link::MEMORY,
        threads: 2,
        rates: Rates {
            f32_flops: 200e9,
            bf16_flops: 400e9,
            memory_bytes_per_second: 20e9,
            op_seconds: 5e-6,
            host_link: Link { bytes_per_second: 20e9, latency_seconds: 0.0 },
            measured: false,
            ops: plimsoll_core::OpRates::default(),
        },
    }
}

fn plan_request<'a>(config: &'a plimsoll_program::models::ModelConfig, device: &'a DeviceSpec) -> PlanRequest<'a> {
    let generation = Some(Generation { slots: 1, capacity: 256, chunk: 64 });
    PlanRequest { generation, ..common::plan_request(config, device, [64, 1024.min(config.max_positions)]) }
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn every_preset_packs_to_lower_bound() {
    let targets = [DeviceKind::Cpu, DeviceKind::Paper];
    let runs = targets.into_iter().flat_map(|kind| [(kind, DType::F32), (kind, DType::Bf16)]);
    for (name, (kind, precision)) in runs.flat_map(|run| preset_names().map(move |name| (name, run))) {
        let config = preset(name).expect("a listed preset exists");
        let large = DeviceSpec { kind, ..device(Bytes::gib(100_000)) };
        let outcome = search(&PlanRequest { precision, ..plan_request(&config, &large) });
        let name = format!("{name} in {precision} on {kind:?}");
        assert!(outcome.plan.fits, "{name}");
        plimsoll_program::passes::check::check(&outcome.set).unwrap_or_else(|e| panic!("{name}: {e}"));
        let plan = &outcome.plan.devices[0];
        assert_eq!(plan.arena_bytes, plan.lower_bound_bytes, "{name}: packing overhead");
        let categories: Bytes = plan.by_category.values().copied().sum();
        assert_eq!(categories, plan.arena_bytes, "{name}: categories add up");
    }
}

#[test]
fn tight_budget_is_met_by_recompute() {
    let config = preset("smollm2-135m").expect("listed");
    let large = device(Bytes::gib(1000));
    let free = search(&plan_request(&config, &large));
    let tight = device(Bytes::gib(4));
    let bound = search(&plan_request(&config, &tight));
    assert!(bound.plan.fits);
    assert_ne!(free.plan.recipe, bound.plan.recipe);
    assert!(bound.plan.devices[0].peak_bytes <= Bytes::gib(4));
    assert!(bound.plan.predicted.step_seconds >= free.plan.predicted.step_seconds);
    assert_eq!(bound.plan.devices[0].arena_bytes, bound.plan.devices[0].lower_bound_bytes);
}

#[test]
fn refused_run_fits_at_named_budget_exactly() {
    for name in ["smollm2-135m", "qwen3-0.6b", "llama-3.2-1b"] {
        let config = preset(name).expect("listed");
        let nothing = device(Bytes::mib(64));
        let refused = search(&plan_request(&config, &nothing));
        assert!(!refused.plan.fits, "{name}");
        let need = refused.plan.needs[0].budget_bytes;
        let enough = device(need);
        let fits = search(&plan_request(&config, &enough));
        assert!(fits.plan.fits, "{name}: {need} is the named budget");
        assert!(fits.plan.devices[0].peak_bytes <= need);
        let less = device(need.saturating_sub(Bytes::mib(1)));
        assert!(!search(&plan_request(&config, &less)).plan.fits, "{name}: less than {need} fits too");
    }
}

#[test]
fn recipe_change_moves_no_persistent_tensor() {
    for name in ["smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b"] {
        let config = preset(name).expect("listed");
        let large = device(Bytes::gib(1000));
        let request = plan_request(&config, &large);
        let layouts: Vec<_> = [(1, RecomputeLevel::Block), (8, RecomputeLevel::Nothing), (3, RecomputeLevel::Norms)]
            .map(|(micro_batch, level)| Recipe::on_device(micro_batch, vec![level; config.layers as usize]))
            .iter()
            .map(|recipe| {
                let outcome = plan_recipe(&request, recipe);
                let is_persistent = |t: &Tensor| t.lifetime == Lifetime::Persistent && t.space == Space::Device;
                let places = outcome.set.tensors.iter().zip(&outcome.layout.placement.offsets);
                let persistent = places.filter(|(t, _)| is_persistent(t)).map(|(t, at)| (t.name.clone(), at.clone()));
                (persistent.collect::<Vec<_>>(), outcome.layout.device.by_program[&WorkKind::Replan])
            })
            .collect();
        assert!(layouts.windows(2).all(|pair| pair[0] == pair[1]), "{name}");
    }
}

#[test]
fn pinned_recipe_is_kept() {
    let config = preset("smollm2-135m").expect("listed");
    let large = device(Bytes::gib(1000));
    let mut request = plan_request(&config, &large);
    request.pins =
        PinnedChoices { micro_batch: Some(4), recompute: Some(vec![RecomputeLevel::Block; 30]), offload: None };
    let outcome = search(&request);
    assert_eq!(outcome.plan.recipe.micro_batch, 4);
    assert_eq!(outcome.plan.recipe.recompute, vec![RecomputeLevel::Block; 30]);
}
