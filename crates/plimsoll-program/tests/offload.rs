//! What the offload pass promises: Programs stay well-formed, whatever waits on the host.

use plimsoll_core::{DType, InFile, Offload, RecomputeLevel, Space};
use plimsoll_program::models::decoder::{
    AdamState, Base, Build, Generation, Method, Optimizer, Source, Training, build, head_blocks,
};
use plimsoll_program::models::{ModelConfig, preset};
use plimsoll_program::passes::check::check;
use plimsoll_program::passes::offload::offload;
use plimsoll_program::passes::scratch::scratch;
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Lifetime, ProgramSet, Tensor};

const ADAMW: Optimizer = Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state: AdamState::Full };
const LAYERS: u32 = 4;

/// A few layers of a model.
fn model(name: &str) -> ModelConfig {
    ModelConfig { layers: u64::from(LAYERS), ..preset(name).expect("listed") }
}

/// What a run does with its numbers: precision, rule, types in files.
type Run = (DType, Option<Optimizer>, Option<DType>);

fn programs(config: &ModelConfig, (precision, optimizer, files): Run, streamed_head: bool) -> ProgramSet {
    use RecomputeLevel::{Attention, Block, FeedForward, Nothing};
    let source = match files {
        Some(dtype) => Source::Files { dtypes: vec![dtype; config.hf_parameters().len()] },
        None => Source::Random { seed: 1 },
    };
    build(&Build {
        config,
        layers: 0..config.layers,
        precision,
        kernels: Kernels::Cuda,
        sequence: 48,
        micro_batch: 2,
        source,
        method: Method::Full,
        base: Base::Plain,
        streamed_head,
        training: optimizer
            .map(|optimizer| Training { optimizer, recompute: vec![Nothing, Attention, Block, FeedForward] }),
        evaluate: true,
        generation: Some(Generation { capacity: 64, chunk: 16 }),
        files: true,
    })
}

/// Everything that can be chosen, alone and together.
fn choices() -> Vec<Offload> {
    let all = LAYERS;
    let mut list = vec![Offload { inputs: 2, ..Offload::NOTHING }, Offload { weights: 1, ..Offload::NOTHING }];
    for optimizer in [1, all] {
        for gradients in [0, optimizer] {
            for weights in [0, 1, optimizer] {
                for inputs in [0, all] {
                    for (embedding, head) in [(false, false), (true, false), (false, true), (true, true)] {
                        let update = list.len() % 2 == 0;
                        let file = InFile::NOTHING;
                        list.push(Offload { optimizer, gradients, weights, inputs, embedding, head, update, file });
                    }
                }
            }
        }
    }
    list
}

fn persistent(set: &ProgramSet, space: Space) -> u64 {
    let stays = set.tensors.iter().filter(|t| t.space == space && t.lifetime == Lifetime::Persistent);
    stays.map(|t| t.bytes() * u64::from(t.slots)).sum()
}

// Each has something that the others lack.

#[test]
fn every_choice_gives_well_formed_programs_and_loses_no_byte_with_a_tied_head() {
    every_choice_gives_well_formed_programs_and_loses_no_byte(&model("smollm2-135m"));
}

#[test]
fn every_choice_gives_well_formed_programs_and_loses_no_byte_with_biases() {
    every_choice_gives_well_formed_programs_and_loses_no_byte(&model("qwen2.5-7b"));
}

#[test]
fn every_choice_gives_well_formed_programs_and_loses_no_byte_with_norms_of_heads() {
    every_choice_gives_well_formed_programs_and_loses_no_byte(&model("qwen3-0.6b"));
}

#[test]
fn every_choice_gives_well_formed_programs_and_loses_no_byte_with_a_head_of_its_own() {
    every_choice_gives_well_formed_programs_and_loses_no_byte(&model("llama-3.1-8b"));
}

fn every_choice_gives_well_formed_programs_and_loses_no_byte(config: &ModelConfig) {
    let sgd = Optimizer::Sgd { momentum: 0.9, decay: 0.0 };
    let mut runs = Vec::new();
    for precision in [DType::F32, DType::Bf16] {
        for (optimizer, files) in [(Some(ADAMW), None), (Some(sgd), Some(DType::Bf16)), (None, Some(DType::F32))] {
            runs.push((precision, optimizer, files));
        }
    }
    let plain: Vec<[ProgramSet; 2]> =
        runs.iter().map(|&run| [false, true].map(|streamed| programs(config, run, streamed))).collect();
    for (number, choice) in choices().into_iter().enumerate() {
        let run = number % runs.len();
        for one_micro_batch in [false, true] {
            let plain = &plain[run][usize::from(choice.streams_head(config.tied))];
            let set = offload(plain.clone(), LAYERS, &choice, one_micro_batch);
            let said = || format!("{:?}, {choice}, {one_micro_batch}", runs[run]);
            check(&set).unwrap_or_else(|e| panic!("{}: {e}", said()));
            let all = persistent(plain, Space::Device);
            let both = persistent(&set, Space::Device) + persistent(&set, Space::Host);
            assert_eq!(both, all, "{}", said());
            // The same with all of it in the file, or some, on a device of its own and on one that is its own host.
            for (number, memory) in [(LAYERS, Space::Host), (1 + number as u32 % LAYERS, Space::Device)] {
                let in_file = InFile { optimizer: number, gradients: number, weights: number };
                let set = scratch(set.clone(), LAYERS, in_file, memory);
                check(&set).unwrap_or_else(|e| panic!("{}, in the file {in_file}: {e}", said()));
                let spaces = [Space::Device, Space::Host, Space::Scratch];
                let everywhere = spaces.map(|space| persistent(&set, space));
                assert_eq!(everywhere.iter().sum::<u64>(), all, "{}", said());
                let some = choice.weights > 0 || choice.optimizer > 0 && runs[run].1.is_some();
                assert!(everywhere[2] > 0 || !some, "{}", said());
            }
        }
    }
}

#[test]
fn nothing_that_waits_changes_nothing() {
    let plain = programs(&model("smollm2-135m"), (DType::F32, Some(ADAMW), None), false);
    assert_eq!(offload(plain.clone(), LAYERS, &Offload::NOTHING, true), plain);
}

/// Of a head that waits, two blocks are on the device, and two of its gradient.
#[test]
fn a_head_that_waits_is_on_the_device_in_blocks() {
    for (config, choice) in [
        (model("llama-3.1-8b"), Offload { head: true, ..Offload::NOTHING }),
        (model("smollm2-135m"), Offload { embedding: true, ..Offload::NOTHING }),
    ] {
        let block = head_blocks(config.vocab, Kernels::Cuda)[0].end * config.hidden;
        for precision in [DType::F32, DType::Bf16] {
            let set = offload(programs(&config, (precision, Some(ADAMW), None), true), LAYERS, &choice, false);
            let on_device = |t: &&Tensor| t.space == Space::Device && t.elements() >= config.vocab * config.hidden;
            let whole: Vec<&str> = set.tensors.iter().filter(on_device).map(|t| &*t.name).collect();
            let table = if config.tied { "embedding" } else { "head" };
            // Masters and moments stay, and so does the other table.
            assert!(whole.iter().all(|name| name.split('.').next() != Some(table) || name.split('.').count() > 1));
            assert!(!whole.contains(&&*format!("{table}.gradient")));
            for (ring, dtype) in [(table.to_owned(), precision), (format!("{table}.gradient"), precision.wide())] {
                let ring = set.find(&format!("backward.ring.{ring}")).expect("it is fetched");
                let Tensor { shape, dtype: found, slots, .. } = set.tensor(ring);
                assert_eq!((&shape[..], *found, *slots), (&[block][..], dtype, 2));
            }
        }
    }
}
