//! What stays for the whole run, and where: the sum of what each thing that waits makes of it, each found once by moving
//! tensors. What a recipe needs above that is in `measure`.

use super::measure::{Measurer, bare};
use crate::layout::{ALIGNMENT, lower_bounds};
use plimsoll_core::{Category, InFile, Offload, Space};
use plimsoll_program::passes::offload::offload_only;

/// What stays for the whole run, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Stays {
    /// On the device.
    pub device: u64,
    /// On the host.
    pub host: u64,
    /// In the scratch file.
    pub file: u64,
    /// What waits, in either, by what it is.
    pub(super) waits: Waiting,
    /// Of that, what waits in the file.
    pub(super) in_file: Waiting,
}

/// Bytes of what waits, by what it is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Waiting {
    pub(super) weights: f64,
    pub(super) gradients: f64,
    pub(super) state: f64,
}

/// What stays where, for any choice: everything waits by itself, so what a choice comes to is a sum.
#[derive(Clone, Debug)]
pub(super) struct StaysOfAll {
    nothing: Stays,
    /// What one of each makes of it.
    parts: [[f64; 9]; PARTS],
}

/// What a choice has of all that can wait.
const PARTS: usize = 10;

/// How much of each can wait: layers, but for ends, and for what goes where all layers' state has gone.
fn parts_of(offload: Offload, layers: u32) -> [u32; PARTS] {
    let Offload { optimizer, gradients, weights, embedding, head, file, .. } = offload;
    let rest = |optimizer: u32| u32::from(optimizer >= layers);
    [
        optimizer,
        rest(optimizer),
        gradients,
        weights,
        u32::from(embedding),
        u32::from(head),
        file.optimizer,
        rest(file.optimizer),
        file.gradients,
        file.weights,
    ]
}

impl Stays {
    fn numbers(self) -> [f64; 9] {
        let Stays { device, host, file, waits, in_file } = self;
        let of = |waiting: Waiting| [waiting.weights, waiting.gradients, waiting.state];
        let ([a, b, c], [d, e, f]) = (of(waits), of(in_file));
        [device as f64, host as f64, file as f64, a, b, c, d, e, f]
    }

    fn of(numbers: [f64; 9]) -> Stays {
        let [device, host, file, a, b, c, d, e, f] = numbers;
        let waiting = |weights, gradients, state| Waiting { weights, gradients, state };
        let [device, host, file] = [device, host, file].map(|bytes| bytes as u64);
        Stays { device, host, file, waits: waiting(a, b, c), in_file: waiting(d, e, f) }
    }
}

impl StaysOfAll {
    fn of(measurer: &Measurer) -> StaysOfAll {
        let layers = measurer.layers();
        let of = |offload: Offload| measurer.measured_stays(offload).numbers();
        let nothing = Offload::NOTHING;
        let with_file = |offload: Offload, file: InFile| Offload { file, ..offload };
        let (state, gradients, weights) = (
            |optimizer: u32| Offload { optimizer, ..nothing },
            |gradients: u32| Offload { gradients, ..nothing },
            |weights: u32| Offload { weights, ..nothing },
        );
        let in_file = |optimizer: u32| InFile { optimizer, ..InFile::NOTHING };
        // One more of each than in another choice.
        let steps = [
            (state(1), nothing),
            (state(layers), state(layers)),
            (gradients(1), nothing),
            (weights(1), nothing),
            (Offload { embedding: true, ..nothing }, nothing),
            (Offload { head: true, ..nothing }, nothing),
            (with_file(state(layers), in_file(1)), state(layers)),
            (with_file(state(layers), in_file(layers)), with_file(state(layers), in_file(layers))),
            (with_file(gradients(1), InFile { gradients: 1, ..InFile::NOTHING }), gradients(1)),
            (with_file(weights(1), InFile { weights: 1, ..InFile::NOTHING }), weights(1)),
        ];
        let nothing = of(nothing);
        let mut parts = [[0.0; 9]; PARTS];
        for (part, (with, without)) in steps.into_iter().enumerate() {
            // What comes with the last layer is what is left of all when the layers are taken off.
            let less = match part {
                1 => sum(nothing, &[(f64::from(layers), parts[0])]),
                7 => sum(of(state(layers)), &[(f64::from(layers), parts[6])]),
                _ => of(without),
            };
            parts[part] = sum(of(with), &[(-1.0, less)]);
        }
        StaysOfAll { nothing: Stays::of(nothing), parts }
    }
}

/// A sum of numbers with factors.
fn sum(first: [f64; 9], others: &[(f64, [f64; 9])]) -> [f64; 9] {
    others.iter().fold(first, |sum, (factor, numbers)| std::array::from_fn(|at| sum[at] + factor * numbers[at]))
}

impl Measurer<'_> {
    /// What stays for the whole run, and where.
    pub fn persistent(&self, offload: Offload) -> Stays {
        let all = self.known.stays.get_or_init(|| StaysOfAll::of(self));
        let parts = parts_of(offload, self.layers()).map(f64::from).into_iter().zip(all.parts);
        let there = parts.filter(|(count, _)| *count > 0.0);
        Stays::of(there.fold(all.nothing.numbers(), |stays, part| sum(stays, &[part])))
    }

    /// The same, found by moving all tensors.
    fn measured_stays(&self, offload: Offload) -> Stays {
        let set = self.known.bare.get_or_init(|| bare(self.question));
        let bare = offload_only(set.clone(), self.layers(), &offload, false, &|_| false);
        let bare = self.question.with_file(bare, offload);
        let bytes = |spaces: &[Space], category: Category| {
            let of = bare.tensors.iter().filter(|t| spaces.contains(&t.space) && t.category == category);
            of.map(|t| t.bytes() * u64::from(t.slots)).sum::<u64>() as f64
        };
        let waiting = |spaces: &[Space]| Waiting {
            weights: bytes(spaces, Category::Weight),
            gradients: bytes(spaces, Category::Gradient),
            state: bytes(spaces, Category::Optimizer),
        };
        let [device, host, file] = lower_bounds(&bare);
        Stays {
            device: device.next_multiple_of(ALIGNMENT),
            host,
            file,
            waits: waiting(&[Space::Host, Space::Scratch]),
            in_file: waiting(&[Space::Scratch]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paper::paper;
    use crate::search::{Lossy, Pins, Question};
    use plimsoll_core::{Budget, DType, HostSpec};
    use plimsoll_program::Share;
    use plimsoll_program::models::decoder::{AdamState, Base, Method, Optimizer, Source};
    use plimsoll_program::models::preset;

    #[test]
    fn what_stays_is_the_sum_of_what_waits() {
        let device = paper("rtx3090", Budget::DEVICE).unwrap();
        let state = AdamState::Full;
        let lossy = Lossy::default();
        let adapters = Lossy { method: Method::Lora(lossy.lora.clone()), base: Base::Nf4, ..lossy.clone() };
        for (model, lossy) in [("smollm2-135m", &lossy), ("llama-3.2-1b", &adapters), ("qwen2.5-7b", &lossy)] {
            let config = preset(model).unwrap();
            let question = Question {
                config: &config,
                precision: DType::Bf16,
                sequence: 512,
                sequences: 4,
                source: Source::Random { seed: 1 },
                optimizer: Some(Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state }),
                evaluate: false,
                generation: None,
                device: &device,
                host: HostSpec::NONE,
                lossy: lossy.clone(),
                pins: Pins::default(),
                rungs: vec![],
                share: Share::ALONE,
            };
            let (measurer, layers) = (Measurer::new(&question), config.layers as u32);
            for number in 0..64u32 {
                // Each of the counts goes through its range at another pace.
                let count = |pace: u32, most: u32| (number * pace) % (most + 1);
                let optimizer = if number % 3 == 0 { layers } else { count(7, layers) };
                let (gradients, weights) = (count(5, optimizer), count(11, optimizer));
                let file = InFile {
                    optimizer: if number % 2 == 0 { optimizer } else { count(3, optimizer) },
                    gradients: count(13, gradients),
                    weights: count(17, weights),
                };
                let (embedding, head) = (number & 4 > 0, number & 8 > 0 && !config.tied);
                let offload = Offload { optimizer, gradients, weights, embedding, head, file, ..Offload::NOTHING };
                let (sum, moved) = (measurer.persistent(offload), measurer.measured_stays(offload));
                let bytes = |stays: Stays| stays.numbers().map(|number| number as i64);
                let apart = bytes(sum).into_iter().zip(bytes(moved)).map(|(a, b)| (a - b).abs());
                // What is last in a space is not rounded up.
                assert!(apart.max() < Some(ALIGNMENT as i64), "{model}, {offload:?}: {sum:?} {moved:?}");
            }
        }
    }
}
