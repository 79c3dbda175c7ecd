//! The resident bytes of any offload choice: what stays allocated for the whole run on the device, on the host and in
//! the scratch file.
//!
//! Tensors are offloaded in independent units ([`OffloadUnit`]). Each unit changes the resident bytes by a fixed delta,
//! which is measured once on the real tensors. The resident bytes of a choice are a sum of deltas. Bytes that a recipe
//! needs above its resident bytes are in `measure`.

use super::PlanRequest;
use super::plan_request::FilePrograms;
use crate::layout::{ALIGNMENT, lower_bounds};
use plimsoll_core::{Category, Offload, PerSpace, RecomputeLevel, ScratchOffload, Space};
use plimsoll_program::ProgramSet;
use plimsoll_program::passes::offload::offload_programs;
use std::ops::{Add, Mul, Sub};

/// Resident bytes of a device and its host under one offload choice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct ResidentBytes {
    /// Resident bytes in the device arena, the host arena and the scratch file.
    pub spaces: PerSpace<u64>,
    /// Offloaded bytes, on the host and in the scratch file.
    pub offloaded: OffloadedBytes,
    /// The part of `offloaded` that is in the scratch file.
    pub in_file: OffloadedBytes,
}

/// Offloaded bytes of weights, gradients and optimizer state.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct OffloadedBytes {
    pub weights: f64,
    pub gradients: f64,
    pub optimizer: f64,
}

/// [`ResidentBytes`] as real numbers, or a difference of two.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct ResidencyDelta {
    spaces: PerSpace<f64>,
    offloaded: OffloadedBytes,
    in_file: OffloadedBytes,
}

/// A kind of group of tensors that are offloaded together, such as the gradients of one layer. See
/// [`OffloadUnit::count`] for the number of groups of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OffloadUnit {
    /// Optimizer state and master weights of one layer, on the host.
    LayerOptimizer,
    /// Optimizer state and master weights of embedding and head. They are offloaded after those of all layers.
    EndsOptimizer,
    /// Gradients of one layer, on the host.
    LayerGradients,
    /// Weight matrices of one layer, on the host.
    LayerWeights,
    /// The embedding table and its gradient, on the host.
    Embedding,
    /// The head and its gradient, on the host.
    Head,
    /// Optimizer state and master weights of one layer, moved on from the host to the scratch file.
    LayerOptimizerInFile,
    /// Optimizer state and master weights of embedding and head, moved on to the scratch file.
    EndsOptimizerInFile,
    /// Gradients of one layer, moved on to the scratch file.
    LayerGradientsInFile,
    /// Weight matrices of one layer, moved on to the scratch file.
    LayerWeightsInFile,
}

impl OffloadUnit {
    /// Returns how many units of this kind a choice offloads, of a model with `layers` layers.
    fn count(self, offload: &Offload, layers: u32) -> u32 {
        let all_layers = |count: u32| u32::from(count >= layers);
        match self {
            OffloadUnit::LayerOptimizer => offload.optimizer,
            OffloadUnit::EndsOptimizer => all_layers(offload.optimizer),
            OffloadUnit::LayerGradients => offload.gradients,
            OffloadUnit::LayerWeights => offload.weights,
            OffloadUnit::Embedding => u32::from(offload.embedding),
            OffloadUnit::Head => u32::from(offload.head),
            OffloadUnit::LayerOptimizerInFile => offload.file.optimizer,
            OffloadUnit::EndsOptimizerInFile => all_layers(offload.file.optimizer),
            OffloadUnit::LayerGradientsInFile => offload.file.gradients,
            OffloadUnit::LayerWeightsInFile => offload.file.weights,
        }
    }
}

/// A model of the resident bytes of all offload choices.
#[derive(Clone, Debug)]
pub(super) struct ResidencyModel {
    /// Resident bytes without offload.
    without_offload: ResidencyDelta,
    /// The change of the resident bytes by one offloaded unit, for each kind of unit.
    deltas: [(OffloadUnit, ResidencyDelta); 10],
}

impl ResidencyModel {
    /// Computes the change of the resident bytes by each unit, by offloading the resident tensors of a request.
    pub fn measure(request: &PlanRequest) -> ResidencyModel {
        let layers = request.layers() as u32;
        let tensors = resident_tensors(request);
        let all_layers = f64::from(layers);
        let nothing = Offload::NOTHING;
        let optimizer = |optimizer: u32| Offload { optimizer, ..nothing };
        let one_gradient = Offload { gradients: 1, ..nothing };
        let one_weight = Offload { weights: 1, ..nothing };
        let optimizer_in_file = |count: u32| Offload {
            file: ScratchOffload { optimizer: count, ..ScratchOffload::NOTHING },
            ..optimizer(layers)
        };
        let gradient_in_file =
            Offload { file: ScratchOffload { gradients: 1, ..ScratchOffload::NOTHING }, ..one_gradient };
        let weight_in_file = Offload { file: ScratchOffload { weights: 1, ..ScratchOffload::NOTHING }, ..one_weight };

        let measure = |offload: Offload| ResidencyDelta::from(measure_residency(request, &tensors, offload));
        let without_offload = measure(nothing);
        let (all_optimizers, gradients, weights) =
            (measure(optimizer(layers)), measure(one_gradient), measure(one_weight));
        let layer_optimizer = measure(optimizer(1)) - without_offload;
        let layer_optimizer_in_file = measure(optimizer_in_file(1)) - all_optimizers;
        // The delta of the ends is the rest of the delta of everything, after all layers are subtracted.
        let ends_optimizer = all_optimizers - (without_offload + layer_optimizer * all_layers);
        let ends_optimizer_in_file =
            measure(optimizer_in_file(layers)) - (all_optimizers + layer_optimizer_in_file * all_layers);
        let deltas = [
            (OffloadUnit::LayerOptimizer, layer_optimizer),
            (OffloadUnit::EndsOptimizer, ends_optimizer),
            (OffloadUnit::LayerGradients, gradients - without_offload),
            (OffloadUnit::LayerWeights, weights - without_offload),
            (OffloadUnit::Embedding, measure(Offload { embedding: true, ..nothing }) - without_offload),
            (OffloadUnit::Head, measure(Offload { head: true, ..nothing }) - without_offload),
            (OffloadUnit::LayerOptimizerInFile, layer_optimizer_in_file),
            (OffloadUnit::EndsOptimizerInFile, ends_optimizer_in_file),
            (OffloadUnit::LayerGradientsInFile, measure(gradient_in_file) - gradients),
            (OffloadUnit::LayerWeightsInFile, measure(weight_in_file) - weights),
        ];
        ResidencyModel { without_offload, deltas }
    }

    /// Predicts the resident bytes of a choice, of a model with `layers` layers.
    pub fn predict(&self, offload: &Offload, layers: u32) -> ResidentBytes {
        let counted = self.deltas.iter().map(|(unit, delta)| (unit.count(offload, layers), *delta));
        let used = counted.filter(|(count, _)| *count > 0);
        used.fold(self.without_offload, |sum, (count, delta)| sum + delta * f64::from(count)).into()
    }
}

/// Returns a set with the tensors of a request without offload. It has no Programs, so only resident tensors take
/// bytes.
pub(crate) fn resident_tensors(request: &PlanRequest) -> ProgramSet {
    let recipe = request.uniform(1, RecomputeLevel::Nothing);
    let set = request.build(request.config, &recipe, FilePrograms::Without);
    ProgramSet { programs: vec![], phases: vec![], ..set }
}

/// Computes the resident bytes of an offload choice, by offloading the resident `tensors` of a request.
fn measure_residency(request: &PlanRequest, tensors: &ProgramSet, offload: Offload) -> ResidentBytes {
    let offloaded = offload_programs(tensors, request.layers() as u32, &offload, false, &|_| false);
    let set = request.move_to_scratch_file(offloaded, offload);
    let bytes = |spaces: &[Space], category: Category| {
        let tensors = set.tensors.iter().filter(|t| spaces.contains(&t.space) && t.category == category);
        tensors.map(|t| t.bytes() * u64::from(t.slots)).sum::<u64>() as f64
    };
    let offloaded_bytes = |spaces: &[Space]| OffloadedBytes {
        weights: bytes(spaces, Category::Weight),
        gradients: bytes(spaces, Category::Gradient),
        optimizer: bytes(spaces, Category::Optimizer),
    };
    let bounds = lower_bounds(&set);
    ResidentBytes {
        spaces: PerSpace { device: bounds.device.next_multiple_of(ALIGNMENT), ..bounds },
        offloaded: offloaded_bytes(&[Space::Host, Space::Scratch]),
        in_file: offloaded_bytes(&[Space::Scratch]),
    }
}

impl OffloadedBytes {
    /// Applies `combine` to the two weights, to the two gradients and to the two optimizer states.
    fn combine(self, other: OffloadedBytes, combine: impl Fn(f64, f64) -> f64) -> OffloadedBytes {
        OffloadedBytes {
            weights: combine(self.weights, other.weights),
            gradients: combine(self.gradients, other.gradients),
            optimizer: combine(self.optimizer, other.optimizer),
        }
    }
}

impl From<ResidentBytes> for ResidencyDelta {
    fn from(bytes: ResidentBytes) -> ResidencyDelta {
        let ResidentBytes { spaces, offloaded, in_file } = bytes;
        ResidencyDelta { spaces: spaces.map(|bytes| bytes as f64), offloaded, in_file }
    }
}

impl From<ResidencyDelta> for ResidentBytes {
    fn from(delta: ResidencyDelta) -> ResidentBytes {
        let ResidencyDelta { spaces, offloaded, in_file } = delta;
        ResidentBytes { spaces: spaces.map(|bytes| bytes as u64), offloaded, in_file }
    }
}

impl Add for ResidencyDelta {
    type Output = ResidencyDelta;
    fn add(self, other: ResidencyDelta) -> ResidencyDelta {
        ResidencyDelta {
            spaces: self.spaces + other.spaces,
            offloaded: self.offloaded.combine(other.offloaded, Add::add),
            in_file: self.in_file.combine(other.in_file, Add::add),
        }
    }
}

impl Sub for ResidencyDelta {
    type Output = ResidencyDelta;
    fn sub(self, other: ResidencyDelta) -> ResidencyDelta {
        self + other * -1.0
    }
}

impl Mul<f64> for ResidencyDelta {
    type Output = ResidencyDelta;
    fn mul(self, factor: f64) -> ResidencyDelta {
        let scale = |bytes: OffloadedBytes| bytes.combine(bytes, |value, _| value * factor);
        ResidencyDelta {
            spaces: self.spaces.map(|bytes| bytes * factor),
            offloaded: scale(self.offloaded),
            in_file: scale(self.in_file),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paper::paper;
    use crate::search::LossyOptions;
    use crate::testing;
    use plimsoll_core::{Budget, DType};
    use plimsoll_program::models::decoder::{Base, Method};
    use plimsoll_program::models::preset;

    #[test]
    fn predicted_residency_equals_measured_residency() {
        let device = paper("rtx3090", Budget::DEVICE).unwrap();
        let lossy = LossyOptions::default();
        let adapters = LossyOptions { method: Method::Lora(lossy.lora.clone()), base: Base::Nf4, ..lossy.clone() };
        for (model, lossy) in [("smollm2-135m", &lossy), ("llama-3.2-1b", &adapters), ("qwen2.5-7b", &lossy)] {
            let config = preset(model).unwrap();
            let request = testing::request(&config, &device, 512, 4);
            let request = PlanRequest { precision: DType::Bf16, lossy: lossy.clone(), ..request };
            let layers = config.layers as u32;
            let (residency, tensors) = (ResidencyModel::measure(&request), resident_tensors(&request));
            for number in 0..64u32 {
                // Each count goes through its range at another stride.
                let count = |stride: u32, most: u32| (number * stride) % (most + 1);
                let optimizer = if number % 3 == 0 { layers } else { count(7, layers) };
                let (gradients, weights) = (count(5, optimizer), count(11, optimizer));
                let file = ScratchOffload {
                    optimizer: if number % 2 == 0 { optimizer } else { count(3, optimizer) },
                    gradients: count(13, gradients),
                    weights: count(17, weights),
                };
                let (embedding, head) = (number & 4 > 0, number & 8 > 0 && !config.tied);
                let offload = Offload { optimizer, gradients, weights, embedding, head, file, ..Offload::NOTHING };
                let predicted = residency.predict(&offload, layers);
                let measured = measure_residency(&request, &tensors, offload);
                let difference = ResidencyDelta::from(predicted) - ResidencyDelta::from(measured);
                let of_category = |bytes: OffloadedBytes| [bytes.weights, bytes.gradients, bytes.optimizer];
                let [a, b] = [difference.offloaded, difference.in_file].map(of_category);
                let differences = difference.spaces.into_array().into_iter().chain(a).chain(b);
                // The last tensor of a space is not rounded up.
                assert!(
                    differences.fold(0.0, |most, bytes| f64::max(most, bytes.abs())) < ALIGNMENT as f64,
                    "{model}, {offload:?}: {predicted:?} {measured:?}"
                );
            }
        }
    }
}
