//! Tests that offloading to host memory or the scratch file changes no bit. Each run is compared with a run that keeps
//! everything on the device: losses, gradient norms, evaluation, logits, every weight, gradient and optimizer state,
//! and the files of a checkpoint.

use plimsoll_core::{
    Bytes, DType, DeviceKind, DeviceSpec, FileSpec, HostSpec, Link, Offload, Rates, Recipe, RecomputeLevel,
    ScratchOffload, Space,
};
use plimsoll_device::device::FileSpace;
use plimsoll_device::virtual_device::{VirtualDeviceSpec, open};
use plimsoll_plan::search::{LossyOptions, PinnedChoices, PlanRequest, plan_recipe};
use plimsoll_program::models::decoder::{
    AdamState, Base, Generation, Lora, Method, Optimizer, Scores, WeightSource, head_blocks,
};
use plimsoll_program::models::{ModelConfig, preset};
use plimsoll_program::passes::check::check;
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Lifetime, ProgramKind, Share, TensorId};
use plimsoll_train::data::Rows;
use plimsoll_train::engine::{Engine, StepInput};
use std::collections::BTreeMap;
use std::io;

const LINK: Link = Link { bytes_per_second: 1e12, latency_seconds: 0.0 };
const SEQUENCE: u64 = 20;
const SEQUENCES: u64 = 4;

/// Returns small models that differ in their features: tied heads, biases, norms of heads, an untied head, norms of
/// outputs, caps of scores and logits, two rotary bases. The embedding and the widest matrix have at least 4096
/// elements, the minimum for quantized state.
fn models() -> Vec<ModelConfig> {
    let small = |name: &str, layers: u64| {
        let known = preset(name).expect("listed");
        let (heads, kv_heads, head_dim) = (4, 2, 8);
        ModelConfig { hidden: 32, layers, heads, kv_heads, head_dim, ffn: 80, vocab: 131, ..known }
    };
    let of_inputs =
        [small("smollm2-135m", 3), small("qwen2.5-7b", 4), small("qwen3-0.6b", 1), small("llama-3.1-8b", 2)];
    let mut two_bases = small("gemma3-1b", 3);
    two_bases.extras.full_layers = vec![1];
    of_inputs.into_iter().chain([small("olmo2-7b", 3), small("gemma2-2b", 2), two_bases]).collect()
}

fn device() -> DeviceSpec {
    DeviceSpec {
        name: "virtual:a".into(),
        kind: DeviceKind::Virtual,
        budget: Bytes::gib(2),
        charges: Bytes::ZERO,
        charges_measured: false,
        link_measured: false,
        nccl: None,
        team_link: Link::MEMORY,
        threads: 2,
        rates: Rates {
            f32_flops: 1e11,
            bf16_flops: 1e11,
            memory_bytes_per_second: 1e10,
            op_seconds: 1e-6,
            host_link: LINK,
            measured: false,
            ops: plimsoll_core::OpRates::default(),
        },
    }
}

/// Files of a checkpoint, in memory, by tensor name.
#[derive(Default)]
struct MemoryFiles(BTreeMap<String, Vec<u8>>);

impl FileSpace for MemoryFiles {
    fn read(&mut self, tensor: &str, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let bytes = self.0.get(tensor).ok_or(io::ErrorKind::NotFound)?;
        into.copy_from_slice(&bytes[offset as usize..][..into.len()]);
        Ok(())
    }

    fn write(&mut self, tensor: &str, offset: u64, from: &[u8]) -> io::Result<()> {
        let bytes = self.0.entry(tensor.to_owned()).or_default();
        let end = offset as usize + from.len();
        bytes.resize(bytes.len().max(end), 0);
        bytes[offset as usize..end].copy_from_slice(from);
        Ok(())
    }
}

/// Everything that a run computes, for comparison bit by bit.
#[derive(Debug, PartialEq)]
struct RunOutcome {
    /// Bits of the loss and of the gradient norm, per step.
    losses: Vec<[u64; 2]>,
    /// Bits of the evaluation's loss sum.
    evaluated: u64,
    logits: Vec<u64>,
    /// Bytes of the persistent tensors, by the tensor's name without offload and its slot.
    tensors: BTreeMap<(String, u32), Vec<u8>>,
    files: BTreeMap<String, Vec<u8>>,
}

impl RunOutcome {
    /// Describes the first difference.
    fn first_difference(&self, other: &RunOutcome) -> Option<String> {
        if self.losses != other.losses {
            return Some(format!("losses: {:?}, {:?}", self.losses, other.losses));
        }
        let tensors = self.tensors.iter().find(|(key, bytes)| other.tensors.get(key) != Some(bytes));
        if let Some((key, _)) = tensors {
            return Some(format!("tensor {key:?}"));
        }
        if let Some((name, _)) = self.files.iter().find(|(name, bytes)| other.files.get(*name) != Some(bytes)) {
            return Some(format!("file {name}"));
        }
        (self != other).then(|| "evaluation, logits, or the set of tensors or files".to_owned())
    }
}

fn rows(count: u64, vocab: u64, seed: i32) -> Rows {
    let mut rows = Rows::new(count, SEQUENCE);
    for row in 0..count as i32 {
        for i in 0..SEQUENCE as i32 {
            rows.tokens.push((row * 31 + i * 7 + seed * 13) % vocab as i32);
            rows.labels.push((row * 17 + i * 5 + seed) % vocab as i32);
            let start = if i < 5 { 0 } else { 5 };
            rows.positions.push(i - start);
            rows.document_start.push(start);
            rows.weights.push(1.0);
        }
    }
    rows
}

/// Training methods and number formats.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Training {
    /// All weights are trained.
    Full,
    /// All weights are trained, with 8-bit optimizer state.
    FullAdam8,
    /// LoRA on a base quantized to NF4.
    LoraNf4,
    /// LoRA on a base quantized to int8.
    LoraInt8,
}

impl Training {
    fn options(self) -> (AdamState, LossyOptions) {
        let lossy = LossyOptions::default();
        let lora = |base| LossyOptions {
            method: Method::Lora(Lora { dropout: 0.2, rank: 4, ..lossy.lora.clone() }),
            base,
            ..lossy.clone()
        };
        match self {
            Training::Full => (AdamState::Full, lossy),
            Training::FullAdam8 => (AdamState::Blockwise8, lossy),
            Training::LoraNf4 => (AdamState::Full, lora(Base::Nf4)),
            Training::LoraInt8 => (AdamState::Full, lora(Base::Int8)),
        }
    }
}

fn run(config: &ModelConfig, precision: DType, training: Training, micro_batch: u32, offload: Offload) -> RunOutcome {
    run_on(DeviceSpec { kind: DeviceKind::Virtual, ..device() }, config, precision, training, micro_batch, offload)
}

fn run_on(
    device: DeviceSpec,
    config: &ModelConfig,
    precision: DType,
    training: Training,
    micro_batch: u32,
    offload: Offload,
) -> RunOutcome {
    let (state, lossy) = training.options();
    let request = PlanRequest {
        config,
        precision,
        sequence: SEQUENCE,
        sequences: SEQUENCES,
        source: WeightSource::Random { seed: 3 },
        optimizer: Some(Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state }),
        evaluate: true,
        scores: Scores::None,
        temperature: 1.0,
        generation: Some(Generation { slots: 1, capacity: 16, chunk: 4 }),
        device: &device,
        host: HostSpec { budget: Bytes::gib(2), memory_bytes_per_second: 1e10, file: FileSpec::NONE },
        lossy,
        pins: PinnedChoices::default(),
        rungs: vec![],
        share: Share::SINGLE_DEVICE,
    };
    let recompute = RecomputeLevel::ALL.iter().rev().cycle().take(config.layers as usize).copied().collect();
    let recipe = Recipe { micro_batch, recompute, offload, rungs: vec![] };
    let outcome = plan_recipe(&request, &recipe);
    let layout = &outcome.layout;
    check(&outcome.set).unwrap_or_else(|e| panic!("{recipe}: {e}"));
    // A tied head moves with its embedding. Every other choice offloads something.
    assert!(offload.is_nothing() || config.tied || layout.host.bytes + layout.file.bytes > 0, "{offload}");
    assert!(device.kind != DeviceKind::Cpu || layout.host.bytes == 0, "the CPU is its own host");
    let set = outcome.set.clone();
    let spec = VirtualDeviceSpec {
        name: "virtual:a".into(),
        arena_budget: Bytes::gib(1),
        threads: 2,
        price: Box::new(|_, _| 0.0),
        link: LINK,
        scratch_folder: Some(env!("CARGO_TARGET_TMPDIR").into()),
    };
    let device = open(spec, outcome.set, outcome.layout.placement, precision).expect("the arenas fit their budgets");
    let mut engine = Engine::new(device, &set, precision, recipe, SEQUENCE, config.vocab);
    let mut files = MemoryFiles::default();
    engine.move_files(ProgramKind::Load, &mut files).unwrap();
    engine.run(ProgramKind::InitOptimizer).unwrap();
    let mut losses = Vec::new();
    for step in 1..=3 {
        let mut rows = rows(SEQUENCES, config.vocab, step as i32);
        let loss_divisor = rows.labelled_tokens();
        let input = StepInput { step, learning_rate: 1e-2, betas: [0.9, 0.95], clip_norm: 0.3, loss_divisor };
        let loss = engine.gradients(&mut rows, &input, 1).unwrap();
        engine.update().unwrap();
        losses.push([loss.loss.to_bits(), loss.norm.to_bits()]);
    }
    let evaluated = engine.evaluate(&mut rows(SEQUENCES, config.vocab, 9)).unwrap().loss_sum.to_bits();
    let logits = engine.extend(&[3, 1, 4, 1, 5], 0).unwrap().iter().map(|logit| logit.to_bits()).collect();
    for program in [ProgramKind::Checkpoint, ProgramKind::Save, ProgramKind::Restore]
        .into_iter()
        .filter(|kind| set.program(*kind).is_some())
    {
        engine.move_files(program, &mut files).unwrap();
    }
    let mut tensors = BTreeMap::new();
    for (number, tensor) in set.tensors.iter().enumerate() {
        if tensor.lifetime != Lifetime::Persistent || tensor.space == Space::File {
            continue;
        }
        // An offloaded tensor is split into up to three: the layers in the file, on the host, and on the device.
        let suffixes = [".file", ".host", ""];
        let at = suffixes.iter().position(|suffix| tensor.name.ends_with(suffix)).expect("every name ends with \"\"");
        let base = &tensor.name[..tensor.name.len() - suffixes[at].len()];
        let slots = |suffix: &&str| set.find(&format!("{base}{suffix}")).map_or(0, |id| set.tensor(id).slots);
        let before: u32 = suffixes[..at].iter().map(slots).sum();
        for slot in 0..tensor.slots {
            let mut bytes = vec![0; tensor.bytes() as usize];
            engine.device().read(TensorId(number as u32), slot, &mut bytes);
            tensors.insert((base.to_owned(), before + slot), bytes);
        }
    }
    // Their values after a step are undefined: the next step clears them.
    tensors.retain(|(name, _), _| name != "scalars" && name != "metrics");
    RunOutcome { losses, evaluated, logits, tensors, files: files.0 }
}

/// Returns offload choices: each kind of tensor alone and combined, for some layers and for all.
fn offload_choices(layers: u32) -> Vec<Offload> {
    let some = layers.div_ceil(2);
    let none = Offload::NOTHING;
    vec![
        Offload { inputs: layers, ..none },
        Offload { inputs: some, ..none },
        Offload { optimizer: some, ..none },
        Offload { optimizer: layers, ..none },
        Offload { optimizer: layers, gradients: some, ..none },
        Offload { optimizer: layers, weights: some, inputs: some, ..none },
        Offload { weights: layers, ..none },
        Offload { optimizer: layers, gradients: layers, weights: layers, ..none },
        Offload { embedding: true, ..none },
        Offload { head: true, ..none },
        Offload { optimizer: layers, embedding: true, head: true, ..none },
        Offload {
            optimizer: layers,
            gradients: layers,
            weights: layers,
            inputs: layers,
            embedding: true,
            head: true,
            update: false,
            file: ScratchOffload::NOTHING,
        },
        Offload { optimizer: some, update: true, ..none },
        Offload { optimizer: layers, update: true, ..none },
        Offload { optimizer: layers, gradients: some, weights: some, update: true, ..none },
        Offload { optimizer: layers, gradients: layers, weights: layers, embedding: true, update: true, ..none },
    ]
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn offload_to_host_is_bit_exact() {
    for config in models() {
        for precision in [DType::F32, DType::Bf16] {
            for micro_batch in [2, 4] {
                let plain = run(&config, precision, Training::Full, micro_batch, Offload::NOTHING);
                for choice in offload_choices(config.layers as u32) {
                    let offloaded = run(&config, precision, Training::Full, micro_batch, choice);
                    let difference = plain.first_difference(&offloaded);
                    assert_eq!(difference, None, "{:?}, {precision}, {micro_batch}, {choice}", config.model_type);
                }
            }
        }
    }
}

/// Moves 1/`divisor` of the offloaded layers of `choice` to the scratch file, rounded up.
fn in_file(choice: Offload, divisor: u32) -> Offload {
    let Offload { optimizer, gradients, weights, .. } = choice;
    let share = |count: u32| count.div_ceil(divisor);
    Offload {
        file: ScratchOffload { optimizer: share(optimizer), gradients: share(gradients), weights: share(weights) },
        ..choice
    }
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn offload_to_scratch_file_is_bit_exact() {
    for (number, config) in models().into_iter().enumerate() {
        let precision = [DType::F32, DType::Bf16][number % 2];
        for micro_batch in [2, 4] {
            let plain = run(&config, precision, Training::Full, micro_batch, Offload::NOTHING);
            let file_choices = offload_choices(config.layers as u32)
                .into_iter()
                .filter(|choice| !in_file(*choice, 1).file.is_nothing());
            for (at, choice) in file_choices.enumerate() {
                let choice = in_file(choice, 1 + (at + number) as u32 % 2);
                let offloaded = run(&config, precision, Training::Full, micro_batch, choice);
                let difference = plain.first_difference(&offloaded);
                assert_eq!(
                    difference, None,
                    "{:?}, {micro_batch}, {choice}, in the file {}",
                    config.model_type, choice.file
                );
            }
        }
    }
}

#[test]
fn quantized_scratch_tensors_keep_every_bit() {
    let config = models().swap_remove(1);
    for training in [Training::FullAdam8, Training::LoraNf4, Training::LoraInt8] {
        let plain = run(&config, DType::F32, training, 2, Offload::NOTHING);
        for choice in offload_choices(config.layers as u32).into_iter().skip(7).map(|choice| in_file(choice, 1)) {
            let offloaded = run(&config, DType::F32, training, 2, choice);
            assert_eq!(plain.first_difference(&offloaded), None, "{training:?}, {choice}, in the file {}", choice.file);
        }
    }
}

/// The CPU is its own host, so it offloads only to the scratch file.
#[test]
fn scratch_file_on_cpu_is_bit_exact() {
    let precisions = [DType::F32, DType::Bf16, DType::F32, DType::Bf16, DType::F32, DType::Bf16, DType::F32];
    for (config, precision) in models().into_iter().zip(precisions) {
        let plain = run_on(
            DeviceSpec { kind: DeviceKind::Cpu, ..device() },
            &config,
            precision,
            Training::Full,
            2,
            Offload::NOTHING,
        );
        let all = config.layers as u32;
        for (optimizer, gradients, weights) in [(all, 0, 0), (1, 0, 0), (all, all, 0), (all, all, all), (all, 0, 1)] {
            let choice = in_file(Offload { optimizer, gradients, weights, ..Offload::NOTHING }, 1);
            let offloaded =
                run_on(DeviceSpec { kind: DeviceKind::Cpu, ..device() }, &config, precision, Training::Full, 2, choice);
            assert_eq!(plain.first_difference(&offloaded), None, "{:?}, {choice}", config.model_type);
        }
    }
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn offload_with_lossy_rungs_is_bit_exact() {
    for config in [1, 3, 4, 5, 6].map(|number| models().swap_remove(number)) {
        for training in [Training::FullAdam8, Training::LoraNf4, Training::LoraInt8] {
            let plain = run(&config, DType::F32, training, 2, Offload::NOTHING);
            for choice in offload_choices(config.layers as u32).into_iter().skip(5) {
                let offloaded = run(&config, DType::F32, training, 2, choice);
                assert_eq!(plain.first_difference(&offloaded), None, "{:?}, {training:?}, {choice}", config.model_type);
            }
        }
    }
}

/// The embedding and head are large enough to be updated in pieces.
#[test]
fn large_tensor_updated_in_pieces_is_bit_exact() {
    let config = ModelConfig { vocab: 70_001, layers: 1, ..models().swap_remove(3) };
    for training in [Training::Full, Training::FullAdam8] {
        let plain = run(&config, DType::F32, training, 4, Offload::NOTHING);
        let choice = Offload { optimizer: 1, gradients: 1, head: true, ..Offload::NOTHING };
        assert_eq!(plain.first_difference(&run(&config, DType::F32, training, 4, choice)), None, "{training:?}");
        // The host runs the update: gradients are copied to it, and weights back to the device.
        let choice = Offload { optimizer: 1, update: true, ..Offload::NOTHING };
        assert_eq!(
            plain.first_difference(&run(&config, DType::F32, training, 4, choice)),
            None,
            "{training:?} on the host"
        );
        // The optimizer state and gradients are in the scratch file, with the update on the device or on the host.
        for update in [false, true] {
            let choice = in_file(Offload { optimizer: 1, gradients: 1, update, ..Offload::NOTHING }, 1);
            assert_eq!(
                plain.first_difference(&run(&config, DType::F32, training, 4, choice)),
                None,
                "{training:?}, {update}"
            );
        }
    }
}

/// The head has several blocks, the last of which is smaller, and the number of rows is not a multiple of a block of
/// rows. The loss iterates over all rows per head block, or over the whole head per block of rows.
#[test]
#[ignore = "slow: .ci/slow-tests"]
fn offloaded_head_in_blocks_is_bit_exact() {
    let all = Offload {
        optimizer: 1,
        gradients: 1,
        weights: 1,
        inputs: 1,
        embedding: true,
        head: true,
        update: true,
        file: ScratchOffload::NOTHING,
    };
    for tied in [false, true] {
        let config = ModelConfig { vocab: 70_001, layers: 1, tied, ..models().swap_remove(3) };
        let sizes: Vec<u64> = head_blocks(config.vocab, Kernels::Cpu { threads: 1 })
            .iter()
            .map(|block| block.end - block.start)
            .collect();
        assert!(sizes.len() > 4 && sizes[sizes.len() - 1] < sizes[0], "{sizes:?}");
        let head = Offload { embedding: tied, head: !tied, ..Offload::NOTHING };
        let updated = Offload { optimizer: 1, gradients: 1, ..head };
        // Two micro-batches of two row blocks each, or one micro-batch of three.
        for (precision, training, micro_batch) in
            [(DType::F32, Training::Full, 2), (DType::Bf16, Training::Full, 4), (DType::Bf16, Training::LoraInt8, 4)]
        {
            let plain = run(&config, precision, training, micro_batch, Offload::NOTHING);
            for choice in [head, updated, all] {
                let difference = plain.first_difference(&run(&config, precision, training, micro_batch, choice));
                assert_eq!(difference, None, "tied {tied}, {precision}, {training:?}, {micro_batch}, {choice}");
            }
        }
    }
}
