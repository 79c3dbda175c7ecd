//! The offload passes keep Programs well-formed and lose no byte, for every choice of offloaded tensors.

use plimsoll_core::{DType, Offload, RecomputeLevel, ScratchOffload, Space};
use plimsoll_program::models::decoder::{
    AdamState, Base, BuildOptions, Generation, Method, Optimizer, Scores, Training, WeightSource, build, head_blocks,
};
use plimsoll_program::models::{ModelConfig, preset};
use plimsoll_program::passes::check::check;
use plimsoll_program::passes::offload::offload;
use plimsoll_program::passes::scratch_file::move_to_scratch_file;
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Lifetime, ProgramSet, Tensor};

const ADAMW: Optimizer = Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state: AdamState::Full };
const LAYERS: u32 = 4;

/// A few layers of a model.
fn model(name: &str) -> ModelConfig {
    ModelConfig { layers: u64::from(LAYERS), ..preset(name).expect("listed") }
}

/// The settings of a run that affect dtypes.
#[derive(Clone, Copy, Debug)]
struct Run {
    precision: DType,
    /// Optimizer; `None` builds no training Programs.
    optimizer: Option<Optimizer>,
    /// Dtype of the model files; `None` for random initialization.
    files: Option<DType>,
}

fn programs(config: &ModelConfig, run: Run, streamed_head: bool) -> ProgramSet {
    let Run { precision, optimizer, files } = run;
    use RecomputeLevel::{Attention, Block, FeedForward, Nothing};
    let source = match files {
        Some(dtype) => WeightSource::Files { dtypes: vec![dtype; config.hf_parameters().len()] },
        None => WeightSource::Random { seed: 1 },
    };
    build(&BuildOptions {
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
        scores: Scores::None,
        temperature: 1.0,
        generation: Some(Generation { slots: 1, capacity: 64, chunk: 16 }),
        files: true,
    })
}

/// Returns choices of offloaded tensors, alone and combined.
fn choices() -> Vec<Offload> {
    let all = LAYERS;
    let mut list = vec![Offload { inputs: 2, ..Offload::NOTHING }, Offload { weights: 1, ..Offload::NOTHING }];
    for optimizer in [1, all] {
        for gradients in [0, optimizer] {
            for weights in [0, 1, optimizer] {
                for inputs in [0, all] {
                    for (embedding, head) in [(false, false), (true, false), (false, true), (true, true)] {
                        let update = list.len() % 2 == 0;
                        let file = ScratchOffload::NOTHING;
                        list.push(Offload { optimizer, gradients, weights, inputs, embedding, head, update, file });
                    }
                }
            }
        }
    }
    list
}

fn persistent(set: &ProgramSet, space: Space) -> u64 {
    let resident = set.tensors.iter().filter(|t| t.space == space && t.lifetime == Lifetime::Persistent);
    resident.map(|t| t.bytes() * u64::from(t.slots)).sum()
}

#[test]
fn offload_keeps_all_bytes_with_tied_head() {
    check_every_choice(&model("smollm2-135m"));
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn offload_keeps_all_bytes_with_biases() {
    check_every_choice(&model("qwen2.5-7b"));
}

#[test]
fn offload_keeps_all_bytes_with_head_norms() {
    check_every_choice(&model("qwen3-0.6b"));
}

#[test]
fn offload_keeps_all_bytes_with_norms_of_outputs() {
    check_every_choice(&model("olmo2-1b"));
}

#[test]
fn offload_keeps_all_bytes_with_norms_of_inputs_and_outputs() {
    check_every_choice(&model("gemma2-2b"));
}

#[test]
fn offload_keeps_all_bytes_with_separate_head() {
    check_every_choice(&model("llama-3.1-8b"));
}

/// Checks that Programs stay well-formed and persistent bytes stay equal under every choice. A smaller vocabulary keeps
/// the number of head blocks, and with it the test, short.
fn check_every_choice(config: &ModelConfig) {
    let config = &ModelConfig { vocab: 32_768, ..config.clone() };
    assert!(head_blocks(config.vocab, Kernels::Cuda).len() > 2, "an offloaded head is streamed");
    let sgd = Optimizer::Sgd { momentum: 0.9, decay: 0.0 };
    let mut runs = Vec::new();
    for precision in [DType::F32, DType::Bf16] {
        for (optimizer, files) in [(Some(ADAMW), None), (Some(sgd), Some(DType::Bf16)), (None, Some(DType::F32))] {
            runs.push(Run { precision, optimizer, files });
        }
    }
    let plain: Vec<[ProgramSet; 2]> =
        runs.iter().map(|&run| [false, true].map(|streamed| programs(config, run, streamed))).collect();
    for (number, choice) in choices().into_iter().enumerate() {
        let run = number % runs.len();
        for one_micro_batch in [false, true] {
            let plain = &plain[run][usize::from(choice.streams_head(config.tied))];
            let set = offload(plain, LAYERS, &choice, one_micro_batch);
            let case = || format!("{:?}, {choice}, {one_micro_batch}", runs[run]);
            check(&set).unwrap_or_else(|e| panic!("{}: {e}", case()));
            let all = persistent(plain, Space::Device);
            let moved = persistent(&set, Space::Device) + persistent(&set, Space::Host);
            assert_eq!(moved, all, "{}", case());
            // With all of it in the scratch file on a GPU, and with some of it on a device that is its own host.
            for (number, memory) in [(LAYERS, Space::Host), (1 + number as u32 % LAYERS, Space::Device)] {
                let in_file = ScratchOffload { optimizer: number, gradients: number, weights: number };
                let set = move_to_scratch_file(set.clone(), LAYERS, in_file, memory);
                check(&set).unwrap_or_else(|e| panic!("{}, in the file {in_file}: {e}", case()));
                let spaces = [Space::Device, Space::Host, Space::Scratch];
                let everywhere = spaces.map(|space| persistent(&set, space));
                assert_eq!(everywhere.iter().sum::<u64>(), all, "{}", case());
                let some = choice.weights > 0 || choice.optimizer > 0 && runs[run].optimizer.is_some();
                assert!(everywhere[2] > 0 || !some, "{}", case());
            }
        }
    }
}

#[test]
fn empty_offload_keeps_programs_unchanged() {
    let run = Run { precision: DType::F32, optimizer: Some(ADAMW), files: None };
    let plain = programs(&model("smollm2-135m"), run, false);
    assert_eq!(offload(&plain, LAYERS, &Offload::NOTHING, true), plain);
}

/// The device holds two blocks of a streamed head, and two of its gradient.
#[test]
fn streamed_head_takes_two_blocks_on_device() {
    for (config, choice) in [
        (model("llama-3.1-8b"), Offload { head: true, ..Offload::NOTHING }),
        (model("smollm2-135m"), Offload { embedding: true, ..Offload::NOTHING }),
    ] {
        let block = head_blocks(config.vocab, Kernels::Cuda)[0].end * config.hidden;
        for precision in [DType::F32, DType::Bf16] {
            let run = Run { precision, optimizer: Some(ADAMW), files: None };
            let set = offload(&programs(&config, run, true), LAYERS, &choice, false);
            let on_device = |t: &&Tensor| t.space == Space::Device && t.elements() >= config.vocab * config.hidden;
            let whole: Vec<&str> = set.tensors.iter().filter(on_device).map(|t| &*t.name).collect();
            let table = if config.tied { "embedding" } else { "head" };
            // Masters, moments and the other table stay on the device.
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
