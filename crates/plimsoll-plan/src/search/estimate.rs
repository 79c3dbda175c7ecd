//! About how long a step takes under a choice of what waits, so that a search measures the likely ones first: from what
//! has been measured of others, without a Program written down. What is measured is in `measure`.

use super::measure::Measurer;
use super::stays::Waiting;
use plimsoll_core::Offload;
use plimsoll_program::models::decoder::Method;

impl Measurer<'_> {
    /// About how many seconds a step takes under a choice, with the lightest level of recompute that about fits;
    /// `None` where none does. Found without writing Programs down: what has to be computed, what has to be copied,
    /// what stays.
    pub fn about(&self, micro_batch: u32, offload: Offload) -> Option<f64> {
        if !self.may_fit(micro_batch, offload) {
            return None;
        }
        let question = self.question;
        let plain = self.plain(micro_batch);
        let stays = self.persistent(offload);
        let count = question.share.micro_batches_of(question.sequences, micro_batch) as f64;
        let rate = question.device.rates.host_link.bytes_per_second;
        let inputs = u64::from(offload.inputs) * plain.input_bytes;
        let Waiting { weights, gradients, .. } = self.of_layers(offload);
        let in_file = stays.in_file;
        let table = (question.config.vocab * question.config.hidden) as f64;
        let streamed = self.streams_head(offload);
        let head = if streamed { table * question.precision.bytes() as f64 } else { 0.0 };
        let trained = question.optimizer.is_some() && question.lossy.method == Method::Full;
        let head_gradient = if streamed && trained { table * question.precision.wide().bytes() as f64 } else { 0.0 };
        let again = if count > 1.0 { gradients + head_gradient } else { 0.0 };
        let copied_in = count * (2.0 * (weights + head) + again + inputs as f64);
        let copied_out = count * (gradients + head_gradient + inputs as f64);
        let of_passes = self.disk_seconds(
            count * (2.0 * in_file.weights + if count > 1.0 { in_file.gradients } else { 0.0 }),
            count * in_file.gradients,
        );
        // Two slots in each ring, of a layer each.
        let of_layer = |bytes: f64, layers: u32| if layers > 0 { 2.0 * bytes / f64::from(layers) } else { 0.0 };
        let rings = of_layer(weights, offload.weights)
            + of_layer(gradients, offload.gradients)
            + 2.0 * plain.head_block * (head + head_gradient);
        let freed = self.in_flight(micro_batch) * inputs;
        let budget = (question.device.arena_budget().0 + freed).checked_sub(stays.device + rings as u64)?;
        let more = match question.fixed_levels() {
            None => self.profile(micro_batch).lightest(question.layers(), budget)?,
            // Whether it fits is measured: what is known here is too coarse to say no, and nothing else can be tried.
            Some(_) => self.candidate(self.made_again(micro_batch, Offload::NOTHING)).passes - plain.pass_seconds,
        };
        let logits = if streamed { plain.logits_seconds } else { 0.0 };
        let computed = count * (plain.pass_seconds + logits + more);
        let passes = computed.max(copied_in / rate).max(copied_out / rate).max(of_passes);
        Some(passes + self.once_about(micro_batch, offload))
    }

    /// About how many seconds pass once a step: between those that are measured where nothing and where all of it waits.
    fn once_about(&self, micro_batch: u32, offload: Offload) -> f64 {
        let question = self.question;
        if question.optimizer.is_none() {
            return 0.0;
        }
        let (layers, update) = (self.layers(), offload.update);
        let measured = |optimizer: u32, gradients: u32, weights: u32| {
            let update = update && optimizer > 0;
            let choice = Offload { optimizer, gradients, weights, update, ..Offload::NOTHING };
            let recipe = self.made_again(micro_batch, choice);
            self.once_a_step(&recipe, &|| question.build(question.config, &recipe, false)).seconds
        };
        let part = |count: u32, all: u32| if all > 0 { f64::from(count) / f64::from(all) } else { 0.0 };
        let between = |part: f64, none: f64, all: &dyn Fn() -> f64| {
            if part > 0.0 { none + part * (all() - none) } else { none }
        };
        let once = if offload.optimizer < layers {
            // With the last layer's state goes all else that is trained.
            between(part(offload.optimizer, layers - 1), measured(0, 0, 0), &|| measured(layers - 1, 0, 0))
        } else {
            let (gradients, weights) = (part(offload.gradients, layers), part(offload.weights, layers));
            let with =
                |weights: u32| between(gradients, measured(layers, 0, weights), &|| measured(layers, layers, weights));
            between(weights, with(0), &|| with(layers))
        };
        let in_file = self.persistent(offload).in_file;
        let of_file = self.disk_seconds(in_file.gradients + in_file.state, in_file.state + in_file.weights)
            + self.disk_seconds(in_file.gradients, 0.0);
        once.max(of_file)
    }

    /// What waits, but for ends: rows of the embedding are looked up and added to where they are, and the head comes in
    /// blocks, twice.
    fn of_layers(&self, offload: Offload) -> Waiting {
        let (question, waits) = (self.question, self.persistent(offload).waits);
        let ends = [offload.embedding, offload.head].iter().filter(|waits| **waits).count() as u64;
        let elements = (ends * question.config.vocab * question.config.hidden) as f64;
        let weights = (waits.weights - elements * question.precision.bytes() as f64).max(0.0);
        let gradients = (waits.gradients - elements * question.precision.wide().bytes() as f64).max(0.0);
        Waiting { weights, gradients, ..waits }
    }

    /// What the disk takes, which reads and writes at once.
    fn disk_seconds(&self, read: f64, written: f64) -> f64 {
        let file = &self.question.host.file;
        (read / file.read_bytes_per_second).max(written / file.write_bytes_per_second)
    }
}
