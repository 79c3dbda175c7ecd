//! Every preset plans: its Programs are well-formed, the packing meets the bound, and what is
//! refused fits at the budget that the refusal names.

mod common;

use plimsoll_core::{Bytes, DType, DeviceKind, DeviceSpec, Link, Rates, Recipe, RecomputeLevel, Space, WorkName};
use plimsoll_plan::search::{Pins, Question, plan_of, search};
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

fn question<'a>(config: &'a plimsoll_program::models::ModelConfig, device: &'a DeviceSpec) -> Question<'a> {
    let generation = Some(Generation { capacity: 256, chunk: 64 });
    Question { generation, ..common::question(config, device, [64, 1024.min(config.max_positions)]) }
}

#[test]
fn every_preset_packs_to_the_bound_in_every_precision_on_every_target() {
    let targets = [DeviceKind::Cpu, DeviceKind::Paper];
    let runs = targets.into_iter().flat_map(|kind| [(kind, DType::F32), (kind, DType::Bf16)]);
    for (name, (kind, precision)) in runs.flat_map(|run| preset_names().map(move |name| (name, run))) {
        let config = preset(name).expect("a listed preset exists");
        let plenty = DeviceSpec { kind, ..device(Bytes::gib(100_000)) };
        let answer = search(&Question { precision, ..question(&config, &plenty) });
        let name = format!("{name} in {precision} on {kind:?}");
        assert!(answer.plan.fits, "{name}");
        plimsoll_program::passes::check::check(&answer.set).unwrap_or_else(|e| panic!("{name}: {e}"));
        let plan = &answer.plan.devices[0];
        assert_eq!(plan.arena_bytes, plan.lower_bound_bytes, "{name}: packing overhead");
        let categories: Bytes = plan.by_category.values().copied().sum();
        assert_eq!(categories, plan.arena_bytes, "{name}: categories add up");
    }
}

#[test]
fn a_budget_that_binds_is_met_by_recomputing() {
    let config = preset("smollm2-135m").expect("listed");
    let plenty = device(Bytes::gib(1000));
    let free = search(&question(&config, &plenty));
    let tight = device(Bytes::gib(4));
    let bound = search(&question(&config, &tight));
    assert!(bound.plan.fits);
    assert_ne!(free.plan.recipe, bound.plan.recipe);
    assert!(bound.plan.devices[0].peak_bytes <= Bytes::gib(4));
    assert!(bound.plan.predicted.step_seconds >= free.plan.predicted.step_seconds);
    assert_eq!(bound.plan.devices[0].arena_bytes, bound.plan.devices[0].lower_bound_bytes);
}

#[test]
fn what_is_refused_fits_at_the_budget_named_and_not_at_a_mebibyte_less() {
    for name in ["smollm2-135m", "qwen3-0.6b", "llama-3.2-1b"] {
        let config = preset(name).expect("listed");
        let nothing = device(Bytes::mib(64));
        let refused = search(&question(&config, &nothing));
        assert!(!refused.plan.fits, "{name}");
        let need = refused.plan.needs[0].budget_bytes;
        let enough = device(need);
        let fits = search(&question(&config, &enough));
        assert!(fits.plan.fits, "{name}: {need} was named");
        assert!(fits.plan.devices[0].peak_bytes <= need);
        let less = device(need.saturating_sub(Bytes::mib(1)));
        assert!(!search(&question(&config, &less)).plan.fits, "{name}: less than {need} fits, too");
    }
}

#[test]
fn going_from_one_recipe_to_another_moves_nothing_that_stays() {
    for name in ["smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b"] {
        let config = preset(name).expect("listed");
        let plenty = device(Bytes::gib(1000));
        let asked = question(&config, &plenty);
        let layouts: Vec<_> = [(1, RecomputeLevel::Block), (8, RecomputeLevel::Nothing), (3, RecomputeLevel::Norms)]
            .map(|(micro_batch, level)| Recipe::on_device(micro_batch, vec![level; config.layers as usize]))
            .iter()
            .map(|recipe| {
                let answer = plan_of(&asked, recipe);
                let stays = |t: &Tensor| t.lifetime == Lifetime::Persistent && t.space == Space::Device;
                let places = answer.set.tensors.iter().zip(&answer.layout.placement.offsets);
                let persistent = places.filter(|(t, _)| stays(t)).map(|(t, at)| (t.name.clone(), at.clone()));
                (persistent.collect::<Vec<_>>(), answer.layout.device.by_program[&WorkName::Replan])
            })
            .collect();
        assert!(layouts.windows(2).all(|pair| pair[0] == pair[1]), "{name}");
    }
}

#[test]
fn a_pinned_recipe_is_kept() {
    let config = preset("smollm2-135m").expect("listed");
    let plenty = device(Bytes::gib(1000));
    let mut asked = question(&config, &plenty);
    asked.pins = Pins { micro_batch: Some(4), recompute: Some(vec![RecomputeLevel::Block; 30]), offload: None };
    let answer = search(&asked);
    assert_eq!(answer.plan.recipe.micro_batch, 4);
    assert_eq!(answer.plan.recipe.recompute, vec![RecomputeLevel::Block; 30]);
}
