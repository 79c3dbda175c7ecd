//! A recipe with its Programs and its packed arenas, and the plan that follows from them.

use super::plan_request::sums_on_host_instead_of_gpu;
use super::{PlanOutcome, PlanRequest, TriedRecipe};
use crate::layout::{ArenaLayout, Layout, lay_out};
use crate::timeline::timeline;
use plimsoll_core::{Bytes, Class, DeviceKind, DevicePlan, Plan, Predicted, Recipe, Remedy, Space};
use plimsoll_program::ProgramSet;
use std::collections::BTreeMap;

/// A recipe with its Programs and their packed layout.
#[derive(Clone, Debug)]
pub(crate) struct PackedCandidate {
    pub(super) recipe: Recipe,
    pub(super) set: ProgramSet,
    pub(super) layout: Layout,
}

impl PackedCandidate {
    /// Builds and packs the Programs of a recipe.
    pub(super) fn new(request: &PlanRequest, recipe: Recipe) -> PackedCandidate {
        let set = request.programs(&recipe);
        let layout = lay_out(&set);
        PackedCandidate { recipe, set, layout }
    }

    /// Returns the outcome with the plan of this recipe.
    pub(super) fn into_outcome(self, request: &PlanRequest, tried: Vec<TriedRecipe>) -> PlanOutcome {
        let PackedCandidate { recipe, set, layout } = self;
        let mut plan = to_plan(request, request.fits(&layout), recipe, &set, &layout);
        plan.devices[0].timeline = timeline(&set, &layout, request.share.own_layers(request.config.layers));
        PlanOutcome { plan, set, layout, tried, precision: request.precision }
    }
}

/// Computes the bytes of a checkpoint that the Programs of all workers write. A tensor that several workers write
/// counts once.
pub(crate) fn checkpoint_bytes<'a>(sets: impl IntoIterator<Item = &'a ProgramSet>) -> Bytes {
    let files = sets.into_iter().flat_map(|set| &set.tensors).filter(|tensor| tensor.space == Space::File);
    let saved = files.filter(|tensor| tensor.name.starts_with("checkpoint:"));
    let bytes_by_name: BTreeMap<&str, u64> = saved.map(|tensor| (&*tensor.name, tensor.bytes())).collect();
    Bytes(bytes_by_name.values().sum())
}

/// Returns the part of a plan for one space (device, host or scratch file), with its layout, budget and charges.
fn device_plan(
    name: &str,
    simulated: bool,
    budget_bytes: Bytes,
    charges_bytes: Bytes,
    layout: &ArenaLayout,
) -> DevicePlan {
    DevicePlan {
        name: name.into(),
        simulated,
        budget_bytes,
        arena_bytes: Bytes(layout.bytes),
        charges_bytes,
        peak_bytes: Bytes(layout.bytes) + charges_bytes,
        by_category: layout.by_category.clone(),
        by_program: layout.by_program.clone(),
        timeline: vec![],
        lower_bound_bytes: Bytes(layout.lower_bound_bytes),
    }
}

/// Returns the plan of a packed recipe. If it does not fit, its only remedy is its own peak; the search adds others.
fn to_plan(request: &PlanRequest, fits: bool, recipe: Recipe, set: &ProgramSet, layout: &Layout) -> Plan {
    let (device, host) = (request.device, &request.host);
    let peak = Bytes(layout.device.bytes) + device.charges;
    let step_seconds = request.step_seconds(set, &recipe);
    let needs = if fits { vec![] } else { vec![Remedy::new(vec![], peak)] };
    let in_order = u64::from(recipe.micro_batch) >= request.sequences && !sums_on_host_instead_of_gpu(request, set);
    let simulated_host = device.kind == DeviceKind::Virtual;
    Plan {
        fits,
        class: match (recipe.rungs.is_empty(), in_order) {
            (false, _) => Class::Lossy,
            (true, true) => Class::Identical,
            (true, false) => Class::Reordered,
        },
        rungs: recipe.rungs.clone(),
        checkpoint_bytes: checkpoint_bytes([set]),
        devices: vec![device_plan(&device.name, device.simulated(), device.budget, device.charges, &layout.device)],
        host: device_plan("host", simulated_host, host.budget, Bytes::ZERO, &layout.host),
        // The disk is real, also for a simulated device.
        file: (layout.file.bytes > 0).then(|| device_plan("file", false, host.file.budget, Bytes::ZERO, &layout.file)),
        predicted: Predicted {
            step_seconds,
            tokens_per_second: (request.sequences * request.sequence) as f64 / step_seconds,
        },
        generation: request.predict_generation(set),
        smallest: None,
        recipe,
        needs,
        planned_for: None,
        contention_note: None,
        shortfall_note: None,
        algorithms: None,
        fallback: None,
        ladder: vec![],
        recommendations: vec![],
        machine_hosts: vec![],
        parallelism: None,
        team: vec![],
        scaling_efficiency: None,
        link_seconds: None,
        faster_alone: None,
        excluded: vec![],
        alternatives: vec![],
    }
}
