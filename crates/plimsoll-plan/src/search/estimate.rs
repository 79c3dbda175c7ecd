//! Estimates of a step's seconds under an offload choice, without writing Programs. The search measures the most
//! promising choices first. The estimates build on measurements of other choices (`measure`).

use super::measure::{Measurer, MicroBatchCosts};
use super::residency::OffloadedBytes;
use plimsoll_core::{Offload, Parallelism};
use plimsoll_program::models::decoder::Method;

/// Seconds in which the tensors of one layer cross the host link in one direction, if they are offloaded.
#[derive(Clone, Copy)]
struct LayerCopies {
    weights: f64,
    gradients: f64,
    inputs: f64,
    /// Whether the step has several micro-batches, so that gradients come back to be added to.
    accumulates: bool,
}

impl Measurer<'_> {
    /// Estimates the seconds of a step under an offload choice, with the least recompute that fits by this estimate.
    /// Returns `None` if no recompute makes it fit. The estimate adds up the layers, each as long as the longest of its
    /// compute, copies in, and copies out, and the work done once per step. Disk traffic may take longer than the layers.
    pub fn estimate_step_seconds(&self, micro_batch: u32, offload: Offload) -> Option<f64> {
        if !self.may_fit(micro_batch, offload) {
            return None;
        }
        let request = self.request;
        let costs = self.micro_batch_costs(micro_batch);
        let resident = self.resident(offload);
        let count = request.share.micro_batches_of(request.sequences, micro_batch) as f64;
        let link_rate = request.device.rates.host_link.bytes_per_second;
        let inputs = u64::from(offload.inputs) * costs.input_bytes;
        let OffloadedBytes { weights, gradients, .. } = self.offloaded_layer_bytes(offload);
        let in_file = resident.in_file;
        let table = (request.config.vocab * request.config.hidden) as f64;
        let streamed = self.streams_head(offload);
        let head = if streamed { table * request.precision.bytes() as f64 } else { 0.0 };
        let trained = request.optimizer.is_some() && request.lossy.method == Method::Full;
        let head_gradient = if streamed && trained { table * request.precision.wide().bytes() as f64 } else { 0.0 };
        // Each pass of a micro-batch reads all weights.
        let weight_reads = 2.0 + f64::from(request.scores.count());
        let disk_seconds = self.disk_seconds(
            count * (weight_reads * in_file.weights + if count > 1.0 { in_file.gradients } else { 0.0 }),
            count * in_file.gradients,
        );
        // Each staging ring has two slots of one layer.
        let two_layers = |bytes: f64, layers: u32| if layers > 0 { 2.0 * bytes / f64::from(layers) } else { 0.0 };
        let layer_rings = two_layers(weights, offload.weights) + two_layers(gradients, offload.gradients);
        let head_rings = 2.0 * costs.head_block * (head + head_gradient);
        // Stages and sharded ranks measure few choices, so a cautious estimate leaves out those that hardly fit.
        let is_cautious = matches!(request.share.parallelism, Some(Parallelism::Sharded | Parallelism::Pipeline));
        let (layer_rings, head_rings) =
            if is_cautious { (0.0, head_rings + layer_rings) } else { (layer_rings, head_rings) };
        let freed = self.in_flight(micro_batch) * inputs;
        let budget =
            (request.device.arena_budget().0 + freed).checked_sub(resident.spaces.device + head_rings as u64)?;
        let recompute_seconds = match request.fixed_recompute() {
            None => self.profile(micro_batch).min_recompute_seconds(request.layers(), budget, layer_rings as u64)?,
            // The estimate of bytes is too imprecise to exclude the only possible levels: they are measured.
            Some(_) => {
                let fixed = self.candidate(self.full_recompute(micro_batch, Offload::NOTHING));
                fixed.per_micro_batch_seconds - costs.pass_seconds
            }
        };
        let accumulates = count > 1.0;
        let per_layer = |bytes: f64, layers: u32| bytes / f64::from(layers.max(1)) / link_rate;
        let copies = LayerCopies {
            weights: per_layer(weights, offload.weights),
            gradients: per_layer(gradients, offload.gradients),
            inputs: costs.input_bytes as f64 / link_rate,
            accumulates,
        };
        let in_layers = self.layer_pass_seconds(&costs, recompute_seconds / request.layers() as f64, offload, copies);
        let logits = if streamed { costs.logits_seconds } else { 0.0 };
        let layers = request.layers() as f64;
        let layer_seconds = costs.layer_score_seconds + costs.layer_forward_seconds + costs.layer_backward_seconds;
        let beside_layers = costs.pass_seconds - layers * layer_seconds + logits;
        let head_reads = if request.optimizer.is_some() { weight_reads } else { 1.0 };
        let head_in = head_reads * head + if accumulates { head_gradient } else { 0.0 };
        let beside_layers = beside_layers.max(head_in / link_rate).max(head_gradient / link_rate);
        let passes = (count * (in_layers + beside_layers)).max(disk_seconds);
        Some(passes + self.estimate_per_step_seconds(micro_batch, offload))
    }

    /// Estimates the seconds of the passes of one micro-batch through all layers. `recompute_seconds`
    /// is the recompute of one layer, on average. Copies of a layer overlap with the computing of one layer only, because
    /// they start one layer ahead. A layer therefore takes the longest of its own computing, copies in, and copies out.
    fn layer_pass_seconds(
        &self,
        costs: &MicroBatchCosts,
        recompute_seconds: f64,
        offload: Offload,
        copies: LayerCopies,
    ) -> f64 {
        let layers = self.layers();
        let mut ends = [offload.weights, offload.gradients, offload.inputs, layers].map(|count| count.min(layers));
        ends.sort_unstable();
        let (mut seconds, mut first) = (0.0, 0);
        for end in ends {
            // Layers from `first` to `end` have the same tensors offloaded: each count begins at the first layer.
            let if_offloaded = |count: u32, seconds: f64| if first < count { seconds } else { 0.0 };
            let weights = if_offloaded(offload.weights, copies.weights);
            let gradients = if_offloaded(offload.gradients, copies.gradients);
            let inputs = if_offloaded(offload.inputs, copies.inputs);
            let accumulated = if copies.accumulates { gradients } else { 0.0 };
            let forward = costs.layer_forward_seconds.max(weights).max(inputs);
            let computed = costs.layer_backward_seconds + recompute_seconds;
            let backward = computed.max(weights + accumulated + inputs).max(gradients);
            let trained = if self.request.optimizer.is_some() { backward } else { 0.0 };
            let scores = f64::from(self.request.scores.count());
            let score = costs.layer_score_seconds.max(scores * weights);
            seconds += f64::from(end - first) * (score + forward + trained);
            first = end;
        }
        seconds
    }

    /// Estimates the seconds of the work done once per step, by interpolation between measurements with nothing and
    /// with everything offloaded. Returns 0 without training.
    fn estimate_per_step_seconds(&self, micro_batch: u32, offload: Offload) -> f64 {
        let request = self.request;
        if request.optimizer.is_none() {
            return 0.0;
        }
        let (layers, update) = (self.layers(), offload.update);
        let measured = |optimizer: u32, gradients: u32, weights: u32| {
            let update = update && optimizer > 0;
            let choice = Offload { optimizer, gradients, weights, update, ..Offload::NOTHING };
            self.measured_per_step_seconds(micro_batch, choice)
        };
        let fraction = |count: u32, all: u32| if all > 0 { f64::from(count) / f64::from(all) } else { 0.0 };
        let interpolate = |fraction: f64, none: f64, all: &dyn Fn() -> f64| {
            if fraction > 0.0 { none + fraction * (all() - none) } else { none }
        };
        let measured_seconds = if offload.optimizer < layers {
            // With the last layer, the optimizer state of embedding and head is offloaded too.
            interpolate(fraction(offload.optimizer, layers - 1), measured(0, 0, 0), &|| measured(layers - 1, 0, 0))
        } else {
            let gradients = fraction(offload.gradients, layers);
            let with_weights = |weights: u32| {
                interpolate(gradients, measured(layers, 0, weights), &|| measured(layers, layers, weights))
            };
            interpolate(fraction(offload.weights, layers), with_weights(0), &|| with_weights(layers))
        };
        let in_file = self.resident(offload).in_file;
        let disk_seconds = self
            .disk_seconds(in_file.gradients + in_file.optimizer, in_file.optimizer + in_file.weights)
            + self.disk_seconds(in_file.gradients, 0.0);
        measured_seconds.max(disk_seconds)
    }

    /// Predicts the seconds of the work done once per step from Programs with full recompute.
    fn measured_per_step_seconds(&self, micro_batch: u32, offload: Offload) -> f64 {
        let recipe = self.full_recompute(micro_batch, offload);
        self.per_step(&recipe, &|| self.without_offload(&recipe)).seconds
    }

    /// Returns the offloaded bytes of the layers, without weights and gradients of embedding and head. The estimate
    /// counts those apart: embedding rows are used on the host, and the head is fetched in blocks.
    fn offloaded_layer_bytes(&self, offload: Offload) -> OffloadedBytes {
        let (request, offloaded) = (self.request, self.resident(offload).offloaded);
        let ends = [offload.embedding, offload.head].iter().filter(|is_offloaded| **is_offloaded).count() as u64;
        let elements = (ends * request.config.vocab * request.config.hidden) as f64;
        let weights = (offloaded.weights - elements * request.precision.bytes() as f64).max(0.0);
        let gradients = (offloaded.gradients - elements * request.precision.wide().bytes() as f64).max(0.0);
        OffloadedBytes { weights, gradients, ..offloaded }
    }

    /// Predicts the seconds of disk traffic: the longer of reading and writing, because the disk does both at once.
    fn disk_seconds(&self, read_bytes: f64, written_bytes: f64) -> f64 {
        let file = &self.request.host.file;
        (read_bytes / file.read_bytes_per_second).max(written_bytes / file.write_bytes_per_second)
    }
}
