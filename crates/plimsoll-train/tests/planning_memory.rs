//! Test that the search for a plan takes little memory. It has its own binary, because it counts all allocations.

use plimsoll_core::{Budget, Bytes, DType, DeviceKind, DeviceSpec, HostSpec};
use plimsoll_device::heap::{CountingAllocator, measure_growth};
use plimsoll_plan::paper::paper;
use plimsoll_plan::search::{LossyOptions, PinnedChoices, PlanRequest, search};
use plimsoll_program::Share;
use plimsoll_program::models::decoder::{AdamState, Base, Method, Optimizer, Scores, WeightSource};
use plimsoll_program::models::{ModelConfig, preset};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// A search that kept the Programs of each packed recipe would exceed the bound.
#[test]
fn search_holds_programs_of_one_recipe() {
    let sizes = ModelConfig { hidden: 64, layers: 24, heads: 4, kv_heads: 2, head_dim: 16, ffn: 200, ..small() };
    let device = paper("rtx3090", Budget::Amount(Bytes(3 << 19))).unwrap();
    let device = DeviceSpec { name: "a".into(), kind: DeviceKind::Virtual, charges: Bytes::ZERO, ..device };
    let lossy = LossyOptions::default();
    let request = PlanRequest {
        config: &sizes,
        precision: DType::F32,
        sequence: 64,
        sequences: 16,
        source: WeightSource::Random { seed: 1 },
        optimizer: Some(Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state: AdamState::Full }),
        evaluate: true,
        scores: Scores::None,
        temperature: 1.0,
        generation: None,
        device: &device,
        host: HostSpec { budget: Bytes::gib(4), memory_bytes_per_second: 30e9, ..HostSpec::NONE },
        lossy: LossyOptions { method: Method::Lora(lossy.lora.clone()), base: Base::Nf4, ..lossy },
        pins: PinnedChoices::default(),
        rungs: vec![],
        share: Share::SINGLE_DEVICE,
    };
    let (outcome, growth) = measure_growth(|| search(&request));
    assert!(outcome.plan.fits && !outcome.plan.recipe.offload.is_nothing(), "{}", outcome.plan.recipe);
    // All that remains is the outcome: the Programs of its recipe, and their layout.
    assert!(growth.peak_bytes < growth.kept_bytes as u64 * 3 / 2, "{growth:?}");
}

/// Returns the configuration of a small vocabulary; the other sizes do not matter.
fn small() -> ModelConfig {
    ModelConfig { vocab: 900, ..preset("smollm2-135m").expect("the table has this model") }
}
