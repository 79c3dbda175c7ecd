//! What waits on the host changes no bit: losses, norms, evaluations, tokens, every weight, gradient and state, and the
//! files of a checkpoint are those of the run that keeps everything on the device.

use plimsoll_core::{
    Bytes, DType, DeviceKind, DeviceSpec, FileSpec, HostSpec, InFile, Link, Offload, Rates, Recipe, RecomputeLevel,
    Space,
};
use plimsoll_device::device::FileSpace;
use plimsoll_device::virtual_device::{Virtual, open};
use plimsoll_plan::search::{Lossy, Pins, Question, plan_of};
use plimsoll_program::models::decoder::{AdamState, Base, Generation, Lora, Method, Optimizer, Source, head_blocks};
use plimsoll_program::models::{ModelConfig, preset};
use plimsoll_program::passes::check::check;
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Lifetime, Share, TensorId};
use plimsoll_train::data::Rows;
use plimsoll_train::session::engine::{Engine, StepInput};
use std::collections::BTreeMap;
use std::io;

const LINK: Link = Link { bytes_per_second: 1e12, latency_seconds: 0.0 };
const SEQUENCE: u64 = 20;
const SEQUENCES: u64 = 4;

/// Each has something that the others lack: tied heads, biases, norms of heads, a head of its own. The embedding and the
/// widest matrix have the 4096 elements from which on state is coarse.
fn models() -> Vec<ModelConfig> {
    let small = |name: &str, layers: u64| {
        let known = preset(name).expect("listed");
        let (heads, kv_heads, head_dim) = (4, 2, 8);
        ModelConfig { hidden: 32, layers, heads, kv_heads, head_dim, ffn: 80, vocab: 131, ..known }
    };
    vec![small("smollm2-135m", 3), small("qwen2.5-7b", 4), small("qwen3-0.6b", 1), small("llama-3.1-8b", 2)]
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

#[derive(Default)]
struct Files(BTreeMap<String, Vec<u8>>);

impl FileSpace for Files {
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

/// All that a run leaves behind.
#[derive(Debug, PartialEq)]
struct Left {
    losses: Vec<[u64; 2]>,
    evaluated: u64,
    logits: Vec<u64>,
    /// By the name of the tensor in the plain Programs, and its slot.
    tensors: BTreeMap<(String, u32), Vec<u8>>,
    files: BTreeMap<String, Vec<u8>>,
}

impl Left {
    /// What differs, in words.
    fn differs(&self, other: &Left) -> Option<String> {
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
        (self != other).then(|| "evaluation, tokens, or what is there at all".to_owned())
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

/// What a run does with its numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Numbers {
    /// Everything is trained.
    Whole,
    /// The same with 8-bit state.
    State8,
    /// Adapters of a base in 4 bit.
    Adapters4,
    /// Adapters of a base in 8 bit.
    Adapters8,
}

impl Numbers {
    fn of(self) -> (AdamState, Lossy) {
        let lossy = Lossy::default();
        let adapters = |base| Lossy {
            method: Method::Lora(Lora { dropout: 0.2, rank: 4, ..lossy.lora.clone() }),
            base,
            ..lossy.clone()
        };
        match self {
            Numbers::Whole => (AdamState::Full, lossy),
            Numbers::State8 => (AdamState::Blockwise8, lossy),
            Numbers::Adapters4 => (AdamState::Full, adapters(Base::Nf4)),
            Numbers::Adapters8 => (AdamState::Full, adapters(Base::Int8)),
        }
    }
}

fn run(config: &ModelConfig, precision: DType, numbers: Numbers, micro_batch: u32, offload: Offload) -> Left {
    run_on(DeviceKind::Virtual, config, precision, numbers, micro_batch, offload)
}

fn run_on(
    kind: DeviceKind,
    config: &ModelConfig,
    precision: DType,
    numbers: Numbers,
    micro_batch: u32,
    offload: Offload,
) -> Left {
    let device = DeviceSpec { kind, ..device() };
    let (state, lossy) = numbers.of();
    let question = Question {
        config,
        precision,
        sequence: SEQUENCE,
        sequences: SEQUENCES,
        source: Source::Random { seed: 3 },
        optimizer: Some(Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state }),
        evaluate: true,
        generation: Some(Generation { capacity: 16, chunk: 4 }),
        device: &device,
        host: HostSpec { budget: Bytes::gib(2), memory_bytes_per_second: 1e10, file: FileSpec::NONE },
        lossy,
        pins: Pins::default(),
        rungs: vec![],
        share: Share::ALONE,
    };
    let levels = RecomputeLevel::ALL.iter().rev().cycle().take(config.layers as usize).copied().collect();
    let recipe = Recipe { micro_batch, recompute: levels, offload, rungs: vec![] };
    let answer = plan_of(&question, &recipe);
    check(&answer.set).unwrap_or_else(|e| panic!("{recipe}: {e}"));
    // A tied head goes with its embedding; everything else that can be chosen takes something to the host.
    let beside = answer.layout.host.bytes + answer.layout.file.bytes;
    assert!(offload.is_nothing() || config.tied || beside > 0, "{offload}");
    assert!(kind != DeviceKind::Cpu || answer.layout.host.bytes == 0, "the processor is its own host");
    let set = answer.set.clone();
    let what = Virtual {
        name: "virtual:a".into(),
        arena_budget: Bytes::gib(1),
        threads: 2,
        price: Box::new(|_, _| 0.0),
        link: LINK,
        scratch: Some(env!("CARGO_TARGET_TMPDIR").into()),
    };
    let device = open(what, answer.set, answer.layout.placement, precision).expect("the arenas are given");
    let mut engine = Engine::new(device, &set, precision, recipe, SEQUENCE, config.vocab);
    let mut files = Files::default();
    engine.move_files("load", &mut files).unwrap();
    engine.run("fresh").unwrap();
    let mut losses = Vec::new();
    for step in 1..=3 {
        let mut rows = rows(SEQUENCES, config.vocab, step as i32);
        let labelled_tokens = rows.labelled_tokens();
        let input = StepInput { step, learning_rate: 1e-2, betas: [0.9, 0.95], clip_norm: 0.3, labelled_tokens };
        let loss = engine.gradients(&mut rows, &input, 1).unwrap();
        engine.update().unwrap();
        losses.push([loss.loss.to_bits(), loss.norm.to_bits()]);
    }
    let evaluated = engine.evaluate(&mut rows(SEQUENCES, config.vocab, 9)).unwrap().loss_sum.to_bits();
    let logits = engine.extend(&[3, 1, 4, 1, 5], 0).unwrap();
    let logits = logits.iter().map(|logit| logit.to_bits()).collect();
    for program in ["checkpoint", "save", "restore"].into_iter().filter(|name| set.program(name).is_some()) {
        engine.move_files(program, &mut files).unwrap();
    }
    let mut tensors = BTreeMap::new();
    for (number, tensor) in set.tensors.iter().enumerate() {
        if tensor.lifetime != Lifetime::Persistent || tensor.space == Space::File {
            continue;
        }
        let parts = [".file", ".host", ""];
        let part = parts.iter().position(|part| tensor.name.ends_with(part)).expect("the last is a part of every name");
        let base = &tensor.name[..tensor.name.len() - parts[part].len()];
        let slots = |part: &&str| set.find(&format!("{base}{part}")).map_or(0, |home| set.tensor(home).slots);
        let before: u32 = parts[..part].iter().map(slots).sum();
        for slot in 0..tensor.slots {
            let mut bytes = vec![0; tensor.bytes() as usize];
            engine.device().read(TensorId(number as u32), slot, &mut bytes);
            tensors.insert((base.to_owned(), before + slot), bytes);
        }
    }
    // What it is before it is cleared is the next step's business.
    tensors.retain(|(name, _), _| name != "scalars" && name != "metrics");
    Left { losses, evaluated, logits, tensors, files: files.0 }
}

/// Each kind alone, and together, for some layers and for all.
fn choices(layers: u32) -> Vec<Offload> {
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
            file: InFile::NOTHING,
        },
        Offload { optimizer: some, update: true, ..none },
        Offload { optimizer: layers, update: true, ..none },
        Offload { optimizer: layers, gradients: some, weights: some, update: true, ..none },
        Offload { optimizer: layers, gradients: layers, weights: layers, embedding: true, update: true, ..none },
    ]
}

#[test]
fn whatever_waits_no_bit_changes() {
    for config in models() {
        for precision in [DType::F32, DType::Bf16] {
            for micro_batch in [2, 4] {
                let plain = run(&config, precision, Numbers::Whole, micro_batch, Offload::NOTHING);
                for choice in choices(config.layers as u32) {
                    let found = run(&config, precision, Numbers::Whole, micro_batch, choice);
                    let differs = plain.differs(&found);
                    assert_eq!(differs, None, "{:?}, {precision}, {micro_batch}, {choice}", config.model_type);
                }
            }
        }
    }
}

/// All or some of what waits, in the scratch file.
fn in_file(choice: Offload, part: u32) -> Offload {
    let Offload { optimizer, gradients, weights, .. } = choice;
    let of = |count: u32| count.div_ceil(part);
    Offload { file: InFile { optimizer: of(optimizer), gradients: of(gradients), weights: of(weights) }, ..choice }
}

#[test]
fn whatever_waits_in_the_scratch_file_no_bit_changes() {
    for (number, config) in models().into_iter().enumerate() {
        let precision = [DType::F32, DType::Bf16][number % 2];
        for micro_batch in [2, 4] {
            let plain = run(&config, precision, Numbers::Whole, micro_batch, Offload::NOTHING);
            let waiting =
                choices(config.layers as u32).into_iter().filter(|choice| !in_file(*choice, 1).file.is_nothing());
            for (at, choice) in waiting.enumerate() {
                let choice = in_file(choice, 1 + (at + number) as u32 % 2);
                let found = run(&config, precision, Numbers::Whole, micro_batch, choice);
                let differs = plain.differs(&found);
                assert_eq!(
                    differs, None,
                    "{:?}, {micro_batch}, {choice}, in the file {}",
                    config.model_type, choice.file
                );
            }
        }
    }
}

#[test]
fn coarse_state_and_matrices_in_the_scratch_file_keep_every_bit() {
    let config = models().swap_remove(1);
    for numbers in [Numbers::State8, Numbers::Adapters4, Numbers::Adapters8] {
        let plain = run(&config, DType::F32, numbers, 2, Offload::NOTHING);
        for choice in choices(config.layers as u32).into_iter().skip(7).map(|choice| in_file(choice, 1)) {
            let found = run(&config, DType::F32, numbers, 2, choice);
            assert_eq!(plain.differs(&found), None, "{numbers:?}, {choice}, in the file {}", choice.file);
        }
    }
}

/// The processor is its own host: what waits does so in the file.
#[test]
fn on_the_processor_the_scratch_file_changes_no_bit() {
    for (config, precision) in models().into_iter().zip([DType::F32, DType::Bf16, DType::F32, DType::Bf16]) {
        let plain = run_on(DeviceKind::Cpu, &config, precision, Numbers::Whole, 2, Offload::NOTHING);
        let all = config.layers as u32;
        for (optimizer, gradients, weights) in [(all, 0, 0), (1, 0, 0), (all, all, 0), (all, all, all), (all, 0, 1)] {
            let choice = in_file(Offload { optimizer, gradients, weights, ..Offload::NOTHING }, 1);
            let found = run_on(DeviceKind::Cpu, &config, precision, Numbers::Whole, 2, choice);
            assert_eq!(plain.differs(&found), None, "{:?}, {choice}", config.model_type);
        }
    }
}

#[test]
fn whatever_waits_no_bit_of_lossy_rungs_changes() {
    for config in models().into_iter().skip(1).step_by(2) {
        for numbers in [Numbers::State8, Numbers::Adapters4, Numbers::Adapters8] {
            let plain = run(&config, DType::F32, numbers, 2, Offload::NOTHING);
            for choice in choices(config.layers as u32).into_iter().skip(5) {
                let found = run(&config, DType::F32, numbers, 2, choice);
                assert_eq!(plain.differs(&found), None, "{:?}, {numbers:?}, {choice}", config.model_type);
            }
        }
    }
}

/// A table that is updated a piece at a time.
#[test]
fn pieces_of_a_large_tensor_change_no_bit() {
    let config = ModelConfig { vocab: 70_001, layers: 1, ..models().swap_remove(3) };
    for numbers in [Numbers::Whole, Numbers::State8] {
        let plain = run(&config, DType::F32, numbers, 4, Offload::NOTHING);
        let choice = Offload { optimizer: 1, gradients: 1, head: true, ..Offload::NOTHING };
        assert_eq!(plain.differs(&run(&config, DType::F32, numbers, 4, choice)), None, "{numbers:?}");
        // The same by the host, with gradients that come to it and weights that go back.
        let choice = Offload { optimizer: 1, update: true, ..Offload::NOTHING };
        assert_eq!(plain.differs(&run(&config, DType::F32, numbers, 4, choice)), None, "{numbers:?} on the host");
        // And in parts through windows, by either.
        for update in [false, true] {
            let choice = in_file(Offload { optimizer: 1, gradients: 1, update, ..Offload::NOTHING }, 1);
            assert_eq!(plain.differs(&run(&config, DType::F32, numbers, 4, choice)), None, "{numbers:?}, {update}");
        }
    }
}

/// A head of several blocks, the last of which is smaller, and rows that are no multiple of a block's: the loss takes
/// all rows for each block of the head, or all of the head for each block of rows.
#[test]
fn a_head_that_comes_in_blocks_changes_no_bit() {
    let all = Offload {
        optimizer: 1,
        gradients: 1,
        weights: 1,
        inputs: 1,
        embedding: true,
        head: true,
        update: true,
        file: InFile::NOTHING,
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
        // Two micro-batches of two blocks of rows, or one of three.
        for (precision, numbers, micro_batch) in
            [(DType::F32, Numbers::Whole, 2), (DType::Bf16, Numbers::Whole, 4), (DType::Bf16, Numbers::Adapters8, 4)]
        {
            let plain = run(&config, precision, numbers, micro_batch, Offload::NOTHING);
            for choice in [head, updated, all] {
                let differs = plain.differs(&run(&config, precision, numbers, micro_batch, choice));
                assert_eq!(differs, None, "tied {tied}, {precision}, {numbers:?}, {micro_batch}, {choice}");
            }
        }
    }
}
