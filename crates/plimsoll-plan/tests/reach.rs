//! Model sizes that small paper devices reach, with offload to the host and with allowed lossy rungs. Charges are
//! included.

use crate::common::{self, plan_request};
use plimsoll_core::{Budget, Bytes, Class, DType, DeviceKind, DeviceSpec, Offload, Recipe, RecomputeLevel, Rung};
use plimsoll_plan::paper::paper;
use plimsoll_plan::search::{LossyOptions, PinnedChoices, PlanOutcome, PlanRequest, plan_recipe, search};
use plimsoll_program::models::decoder::{Base, Method, head_blocks};
use plimsoll_program::models::preset;
use plimsoll_program::passes::check::check;
use plimsoll_program::workspace::Kernels;
use std::time::Instant;

/// A run to plan.
#[derive(Clone)]
struct Case {
    model: &'static str,
    device: &'static str,
    budget: Budget,
    host: Bytes,
    sequence: u64,
    tokens: u64,
    allow: Vec<Rung>,
    lossy: LossyOptions,
}

impl Case {
    /// Plans the run and offers all rungs as remedies. Prints the result and checks the Programs.
    fn plan(&self) -> PlanOutcome {
        self.plan_offering(&Rung::ALL)
    }

    /// Plans the run and offers the given rungs as remedies. Prints the result and checks the Programs.
    fn plan_offering(&self, offer: &[Rung]) -> PlanOutcome {
        let Case { model, device, budget, host, sequence, tokens, .. } = *self;
        let config = preset(model).expect("listed");
        let device = paper(device, budget).expect("listed");
        let begin = Instant::now();
        let outcome = search(&PlanRequest {
            precision: DType::Bf16,
            host: common::host(host),
            lossy: LossyOptions { allow: self.allow.clone(), offer: offer.to_vec(), ..self.lossy.clone() },
            ..plan_request(&config, &device, [tokens / sequence, sequence])
        });
        let plan = &outcome.plan;
        println!(
            "{model} on {} of {}: {} {}, {} there and {} on the host, {:.2} s a step, {} tried, planned in {:.2?}",
            device.budget,
            device.name,
            if plan.fits { "fits:" } else { "does not fit:" },
            plan.recipe,
            plan.devices[0].peak_bytes,
            plan.host.peak_bytes,
            plan.predicted.step_seconds,
            outcome.tried.len(),
            begin.elapsed()
        );
        for need in &plan.needs {
            println!("  needs {need:?}");
        }
        check(&outcome.set).unwrap();
        assert!(!plan.fits || plan.devices[0].peak_bytes <= device.budget && plan.host.peak_bytes <= host);
        outcome
    }
}

/// Returns adapters of rank 16 on every projection, with a frozen base in nf4.
fn nf4_adapters() -> LossyOptions {
    let lossy = LossyOptions::default();
    LossyOptions { method: Method::Lora(lossy.lora.clone()), base: Base::Nf4, ..lossy }
}

#[test]
fn full_7b_fits_on_24_gib() {
    let case = Case {
        model: "qwen2.5-7b",
        device: "rtx3090",
        budget: Budget::Share(1.0),
        host: Bytes::gib(128),
        sequence: 1024,
        tokens: 65_536,
        allow: vec![],
        lossy: LossyOptions::default(),
    };
    let plan = case.plan().plan;
    assert!(plan.fits);
    // Master weight, moments and gradient in f32 and the weight in bf16 take 18 bytes per parameter, some of them on
    // the GPU.
    let short = Case { host: Bytes::gib(110), ..case }.plan().plan;
    assert!(short.fits && short.host.peak_bytes > Bytes::gib(100));
    assert!(plan.predicted.step_seconds < short.predicted.step_seconds, "more host memory makes a step faster");
}

#[test]
fn adapters_on_8b_fit_in_8_gib() {
    let case = Case {
        model: "llama-3.1-8b",
        device: "rtx3070",
        budget: Budget::Share(1.0),
        host: Bytes::gib(16),
        sequence: 4096,
        tokens: 65_536,
        allow: vec![],
        lossy: nf4_adapters(),
    };
    let plan = case.plan().plan;
    assert!(plan.fits);
}

#[test]
fn adapters_on_13b_fit_in_12_gib() {
    let case = Case {
        model: "llama-2-13b",
        device: "rtx3090",
        budget: Budget::Amount(Bytes::gib(12)),
        host: Bytes::gib(16),
        sequence: 4096,
        tokens: 65_536,
        allow: vec![],
        lossy: nf4_adapters(),
    };
    let plan = case.plan().plan;
    assert!(plan.fits);
}

#[test]
fn every_remedy_of_a_refusal_fits() {
    let case = Case {
        model: "smollm2-135m",
        device: "rtx3070",
        budget: Budget::Amount(Bytes::mib(900)),
        host: Bytes::mib(256),
        sequence: 512,
        tokens: 65_536,
        allow: vec![],
        lossy: LossyOptions::default(),
    };
    let plan = case.plan().plan;
    assert!(!plan.fits);
    assert!(plan.needs.len() > 3, "{:?}", plan.needs);
    let host = plan.needs.iter().filter_map(|need| need.host_bytes);
    assert_eq!(host.count(), 1, "more host memory is one remedy: {:?}", plan.needs);
    for need in &plan.needs {
        let budget = Budget::Amount(need.budget_bytes);
        let host = need.host_bytes.unwrap_or(case.host);
        let enough = Case { allow: need.allow.clone(), budget, host, ..case.clone() };
        assert!(enough.plan().plan.fits, "{need:?}");
    }
    let least = plan.needs[0].budget_bytes.saturating_sub(Bytes::mib(1));
    assert!(!Case { budget: Budget::Amount(least), ..case }.plan().plan.fits);
}

/// Largest ratio by which a step may get slower.
const MAX_RELATIVE_LOSS: f64 = 1.005;

/// Asserts that more memory never makes a step slower.
fn assert_never_slower(case: &Case, rooms: impl Iterator<Item = (Budget, Bytes)>) {
    let mut before = f64::INFINITY;
    for (budget, host) in rooms {
        let plan = Case { budget, host, ..case.clone() }.plan_offering(&[]).plan;
        let seconds = if plan.fits { plan.predicted.step_seconds } else { f64::INFINITY };
        assert!(
            seconds <= before * MAX_RELATIVE_LOSS,
            "{budget:?}, {host} on the host: {seconds} s, with less memory {before} s"
        );
        before = before.min(seconds);
    }
    assert!(before.is_finite(), "something fits");
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn more_host_memory_never_slows_a_step() {
    let small = Case {
        model: "smollm2-135m",
        device: "rtx3070",
        budget: Budget::Amount(Bytes::gib(3)),
        host: Bytes::ZERO,
        sequence: 512,
        tokens: 65_536,
        allow: vec![],
        lossy: LossyOptions::default(),
    };
    for gib in [1, 3] {
        let budget = Budget::Amount(Bytes::gib(gib));
        assert_never_slower(&small, (0..=8).map(|step| (budget, Bytes::mib(300 * step))));
    }
    let adapters = Case { model: "llama-3.1-8b", sequence: 4096, lossy: nf4_adapters(), ..small.clone() };
    assert_never_slower(&adapters, (2..=6).map(|gib| (Budget::DEVICE, Bytes::gib(gib))));
    assert_never_slower(&adapters, (2..=6).map(|gib| (Budget::Share(1.0), Bytes::gib(gib))));
    let whole = Case { model: "qwen2.5-7b", device: "rtx3090", sequence: 1024, ..small };
    assert_never_slower(&whole, (105..=130).step_by(5).map(|gib| (Budget::Share(1.0), Bytes::gib(gib))));
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn more_device_memory_never_slows_a_step() {
    let case = Case {
        model: "smollm2-135m",
        device: "rtx3070",
        budget: Budget::Share(1.0),
        host: Bytes::gib(1),
        sequence: 512,
        tokens: 65_536,
        allow: vec![],
        lossy: LossyOptions::default(),
    };
    for host in [Bytes::ZERO, Bytes::gib(1), Bytes::gib(3)] {
        assert_never_slower(&case, (2..=8).map(|step| (Budget::Amount(Bytes::mib(500 * step)), host)));
    }
    // Copies dominate steps of few tokens.
    let few = Case { model: "tinyllama-1.1b", device: "rtx3090", tokens: 4096, ..case };
    assert_never_slower(&few, (12..=20).map(|step| (Budget::Amount(Bytes::mib(500 * step)), Bytes::gib(100))));
}

#[test]
fn pinning_the_chosen_levels_changes_nothing() {
    let config = preset("smollm2-360m").unwrap();
    let device = paper("rtx3070", Budget::Amount(Bytes::gib(5))).unwrap();
    let open = PlanRequest {
        precision: DType::Bf16,
        host: common::host(Bytes::gib(16)),
        ..plan_request(&config, &device, [16, 1024])
    };
    let free = search(&open).plan;
    assert!(!free.recipe.offload.is_nothing(), "{}", free.recipe);
    let pins = PinnedChoices { recompute: Some(free.recipe.recompute.clone()), ..PinnedChoices::default() };
    let pinned = search(&PlanRequest { pins, ..open }).plan;
    assert_eq!(pinned.recipe.recompute, free.recipe.recompute);
    let (pinned, free) = (pinned.predicted.step_seconds, free.predicted.step_seconds);
    assert!(pinned <= free * MAX_RELATIVE_LOSS, "{pinned} s, free {free} s");
}

#[test]
fn refusal_names_smallest_host_and_taken_rungs() {
    let case = Case {
        model: "llama-3.1-8b",
        device: "rtx3070",
        budget: Budget::DEVICE,
        host: Bytes::gib(1),
        sequence: 4096,
        tokens: 65_536,
        allow: vec![Rung::Int8, Rung::Nf4, Rung::Lora],
        lossy: LossyOptions::default(),
    };
    let plan = case.plan().plan;
    assert!(!plan.fits);
    for need in &plan.needs {
        assert!(!(need.allow.contains(&Rung::Int8) && need.allow.contains(&Rung::Nf4)), "{need:?}");
    }
    let host = plan.needs.iter().find(|need| need.host_bytes.is_some()).expect("more host memory is a remedy");
    let bytes = host.host_bytes.expect("the remedy states host memory");
    assert!(bytes < Bytes::gib(4), "adapters on a 4-bit base need little host memory: {host:?}");
    let enough = Case { host: bytes, allow: host.allow.clone(), ..case.clone() };
    assert!(enough.plan().plan.fits, "{host:?}");
    let short = Case { host: Bytes(bytes.0 * 9 / 10), ..enough };
    assert!(!short.plan().plan.fits, "much less host memory does not fit: {host:?}");
}

#[test]
fn allowed_quantization_is_unused_if_adapters_suffice() {
    let case = Case {
        model: "llama-3.1-8b",
        device: "rtx3090",
        budget: Budget::DEVICE,
        host: Bytes::ZERO,
        sequence: 1024,
        tokens: 65_536,
        allow: vec![],
        lossy: LossyOptions::default(),
    };
    assert!(!case.plan().plan.fits, "a lossy rung is needed");
    for allow in [vec![Rung::Nf4], vec![Rung::Int8], vec![Rung::Bf16, Rung::Int8, Rung::Nf4]] {
        assert_eq!(Case { allow, ..case.clone() }.plan().plan.rungs, [Rung::Lora]);
    }
    // If the device is too small for adapters alone, the base is quantized.
    let small = Case { device: "rtx3070", host: Bytes::gib(1), sequence: 512, allow: vec![Rung::Nf4], ..case };
    assert_eq!(small.plan().plan.rungs, [Rung::Lora, Rung::Nf4]);
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn smallest_host_is_found_with_full_device() {
    let config = preset("llama-3.1-8b").unwrap();
    let device = paper("rtx3070", Budget::Amount(Bytes::mib(4776))).unwrap();
    let lossy = LossyOptions { allow: vec![Rung::Nf4], offer: Rung::ALL.to_vec(), ..LossyOptions::default() };
    let host = common::host(Bytes::mib(3604));
    let plan = search(&PlanRequest { host, lossy, ..plan_request(&config, &device, [16, 1024]) }).plan;
    assert!(!plan.fits);
    let need = plan.needs.iter().find(|need| need.host_bytes.is_some()).expect("more host memory is a remedy");
    // The search continues if a recipe packs slightly above its lower bound.
    assert!(need.host_bytes < Some(Bytes::gib(6)), "{need:?}");
}

#[test]
fn host_sums_are_reordered_for_gpus_only() {
    let (config, gpu) = (preset("smollm2-135m").unwrap(), paper("rtx3090", Budget::Share(1.0)).unwrap());
    let simulated = DeviceSpec { kind: DeviceKind::Virtual, threads: 1, ..gpu.clone() };
    for (device, embedding, class) in
        [(&gpu, false, Class::Identical), (&gpu, true, Class::Reordered), (&simulated, true, Class::Identical)]
    {
        let host = common::host(Bytes::gib(8));
        let request = PlanRequest { evaluate: false, host, ..plan_request(&config, device, [2, 128]) };
        let on_device = Recipe::on_device(2, vec![RecomputeLevel::Nothing; config.layers as usize]);
        let recipe = Recipe { offload: Offload { embedding, ..Offload::NOTHING }, ..on_device.clone() };
        assert_eq!(request.class_of_change(&on_device, &recipe), class, "{} {embedding}", device.name);
        assert_eq!(plan_recipe(&request, &recipe).plan.class, class, "{} {embedding}", device.name);
    }
}

#[test]
fn update_runs_where_it_is_faster() {
    let config = preset("smollm2-360m").expect("listed");
    let fast = paper("rtx3070", Budget::Amount(Bytes::gib(2))).expect("listed");
    let mut slow = fast.clone();
    slow.rates.host_link.bytes_per_second = 1e9;
    for (device, on_host) in [(fast, false), (slow, true)] {
        let host = common::host(Bytes::gib(64));
        let request =
            PlanRequest { precision: DType::Bf16, evaluate: false, host, ..plan_request(&config, &device, [8, 512]) };
        let plan = search(&request).plan;
        assert!(plan.fits && plan.recipe.offload.optimizer > 0, "{}", plan.recipe);
        assert_eq!(plan.recipe.offload.update, on_host, "{}", plan.recipe);
        let mut other = plan.recipe.clone();
        other.offload.update = !on_host;
        assert!(plan.predicted.step_seconds < plan_recipe(&request, &other).plan.predicted.step_seconds);
    }
}

#[test]
fn offloaded_head_frees_all_but_two_blocks() {
    let config = preset("llama-3.1-8b").expect("listed");
    let device = paper("rtx3070", Budget::Share(1.0)).expect("listed");
    let sequence = 4096;
    let request = PlanRequest {
        precision: DType::Bf16,
        host: common::host(Bytes::gib(16)),
        lossy: nf4_adapters(),
        ..plan_request(&config, &device, [16, sequence])
    };
    let layers = config.layers as usize;
    let planned = |head: bool| {
        let offload = Offload { inputs: layers as u32, embedding: true, head, ..Offload::NOTHING };
        let recipe = Recipe { offload, ..Recipe::on_device(1, vec![RecomputeLevel::Block; layers]) };
        plan_recipe(&request, &recipe).plan
    };
    let (resident, offloaded) = (planned(false), planned(true));
    let [whole, block] =
        [config.vocab, head_blocks(config.vocab, Kernels::Cuda)[0].end].map(|rows| rows * config.hidden * 2);
    // With an offloaded head, the f32 sums of the gradient exist for all rows.
    let sums = sequence * config.hidden * 4;
    let freed = resident.devices[0].arena_bytes.0 - offloaded.devices[0].arena_bytes.0;
    assert!(freed + sums >= whole - 2 * block && freed <= whole, "{} freed", Bytes(freed));
    assert_eq!(
        (resident.class, offloaded.class),
        (Class::Reordered, Class::Reordered),
        "only because of the micro-batches"
    );
    let seconds = offloaded.predicted.step_seconds - resident.predicted.step_seconds;
    println!("{} freed for {seconds:.2} s of {:.2} s a step", Bytes(freed), resident.predicted.step_seconds);
    assert!(seconds > 0.0, "logits are computed twice");
}
