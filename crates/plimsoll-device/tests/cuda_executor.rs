//! End-to-end tests of the GPU executor on the stand-in, which runs on the CPU: whole programs against the CPU
//! executor, and recovery after refusals and device loss. `cuda_stand_in/README.md` lists what the stand-in cannot
//! show.

mod cuda_stand_in;
#[path = "cuda_executor/teams.rs"]
mod teams;

use plimsoll_core::{
    Bytes, Category, CollectiveBackend, DType, Exit, Failure, GemmAlgorithms, Parallelism, Recipe, RecomputeLevel,
    Space,
};
use plimsoll_device::cpu::executor;
use plimsoll_device::cuda::arena::DeviceArena;
use plimsoll_device::cuda::collectives::ROUND_BYTES;
use plimsoll_device::cuda::compile::Compiler;
use plimsoll_device::cuda::driver::{Context, Driver, Pinned, Stream};
use plimsoll_device::cuda::executor::OpenedGpu;
use plimsoll_device::cuda::nccl::{self, Nccl};
use plimsoll_device::cuda::pieces::PieceAddresses;
use plimsoll_device::device::{Device, FileSpace, Memory, NoFiles, NoObserver, Observer, ProgramCall};
use plimsoll_device::error::{CudaError, DeviceError};
use plimsoll_device::transport::in_process::InProcessTransport;
use plimsoll_device::transport::{GroupHandle, Transport};
use plimsoll_program::models::Target;
use plimsoll_program::models::config::{Extras, ModelConfig, ModelType, QkNorm, RopeScaling};
use plimsoll_program::models::decoder::{
    AdamState, Base, BuildOptions, Generation, Lora, Method, Optimizer, Scores, Training, WeightSource, build,
};
use plimsoll_program::op::{Collective, Exchange, ExchangeRange};
use plimsoll_program::passes::host_staged_p2p::stage_sends_through_host;
use plimsoll_program::passes::parallelism::parallelize;
use plimsoll_program::scalars::{METRIC_COUNT, Metric, SCALAR_COUNT, Scalar};
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Index, Op, Operand, Placement, ProgramKind, ProgramSet, Share, Tensor, TensorId};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

const BATCH: u64 = 2;
const SEQUENCE: u64 = 37;
const CHUNK: u64 = 5;
const VOCAB: i32 = 61;

/// A model with every feature: grouped heads, biases, head norms, a tied head, scaled positions, a window and
/// no rotation in one layer each, and multipliers.
fn model() -> ModelConfig {
    ModelConfig {
        model_type: ModelType::Qwen3,
        hidden: 24,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        // The widest matrix has the 4096 elements from which on optimizer state is quantized.
        ffn: 96,
        vocab: VOCAB as u64,
        tied: true,
        norm_eps: 1e-5,
        rope_theta: 1e4,
        rope_scaling: RopeScaling::Linear { factor: 2.0 },
        qkv_bias: true,
        attention_out_bias: true,
        ffn_bias: true,
        qk_norm: Some(QkNorm::PerHead),
        max_positions: 64,
        bos: None,
        eos: vec![],
        init_std: 0.3,
        extras: Extras {
            window: Some(5),
            full_layers: vec![1],
            unrotated_layers: vec![0],
            embedding_multiplier: 2.0,
            residual_multiplier: 0.5,
            attention_multiplier: Some(0.3),
            logits_scaling: 1.5,
            ..Extras::default()
        },
    }
}

/// The trained parameters, and their storage formats.
#[derive(Clone)]
struct TrainingForm {
    method: Method,
    base: Base,
    state: AdamState,
}

impl TrainingForm {
    /// Full fine-tuning, without quantization.
    const FULL: TrainingForm = TrainingForm { method: Method::Full, base: Base::Plain, state: AdamState::Full };

    /// LoRA adapters on every projection, with dropout, over a frozen base.
    fn adapters(base: Base) -> TrainingForm {
        let targets = Target::ALL.into_iter().collect();
        let lora = Lora {
            rank: 3,
            alpha: 6.0,
            rank_stabilized: false,
            dropout: 0.1,
            targets,
            modules: None,
            seed: 9,
            source: WeightSource::Random { seed: 9 },
        };
        TrainingForm { method: Method::Lora(lora), base, ..TrainingForm::FULL }
    }
}

fn programs(precision: DType, kernels: Kernels) -> ProgramSet {
    programs_of(&TrainingForm::FULL, precision, kernels)
}

fn programs_of(form: &TrainingForm, precision: DType, kernels: Kernels) -> ProgramSet {
    let generation = Some(Generation { slots: 1, capacity: 16, chunk: CHUNK });
    stage_of(form, precision, kernels, 0..model().layers, generation)
}

/// Builds the programs of a range of layers.
fn stage_of(
    form: &TrainingForm,
    precision: DType,
    kernels: Kernels,
    layers: Range<u64>,
    generation: Option<Generation>,
) -> ProgramSet {
    let levels = [RecomputeLevel::Nothing, RecomputeLevel::Block];
    let recompute = levels[layers.start as usize..layers.end as usize].to_vec();
    build(&BuildOptions {
        config: &model(),
        layers,
        precision,
        kernels,
        sequence: SEQUENCE,
        micro_batch: BATCH,
        source: WeightSource::Random { seed: 4 },
        method: form.method.clone(),
        base: form.base,
        streamed_head: false,
        training: Some(Training {
            // The epsilon exceeds the rounding of gradients; a smaller one would magnify rounding of gradients near 0.
            optimizer: Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-3, decay: 0.1, state: form.state },
            recompute,
        }),
        evaluate: true,
        scores: Scores::None,
        temperature: 1.0,
        generation,
        files: true,
    })
}

/// Returns a placement without overlaps, except for workspaces, which share the range above all other tensors.
fn disjoint_placement(set: &ProgramSet) -> Placement {
    disjoint_placement_from(set, 0)
}

/// Returns a placement without overlaps that leaves the first `first` bytes of the device arena unused.
fn disjoint_placement_from(set: &ProgramSet, first: u64) -> Placement {
    let offsets = vec![Vec::new(); set.tensors.len()];
    let mut placement = Placement { offsets, arena_bytes: first, ..Placement::default() };
    // Dequantized matrices are read by the next op, so they are no shared workspace.
    let kept = |tensor: &Tensor| tensor.category != Category::Workspace || tensor.name.contains(".dequantized");
    let is_scratch = |index: &usize| !kept(&set.tensors[*index]);
    let (scratch, rest): (Vec<usize>, Vec<usize>) = (0..set.tensors.len()).partition(is_scratch);
    for index in rest {
        let tensor = &set.tensors[index];
        let end = match tensor.space {
            Space::Device => Some(&mut placement.arena_bytes),
            Space::Host => Some(&mut placement.host_bytes),
            Space::Scratch | Space::File => None,
        };
        let bytes = tensor.bytes().next_multiple_of(256);
        let first = end.map(|end| std::mem::replace(end, *end + bytes * u64::from(tensor.slots)));
        placement.offsets[index] = (0..tensor.slots).map(|slot| Some(first? + u64::from(slot) * bytes)).collect();
    }
    let first = placement.arena_bytes;
    for index in scratch {
        let tensor = &set.tensors[index];
        placement.offsets[index] = vec![Some(first); tensor.slots as usize];
        placement.arena_bytes = placement.arena_bytes.max(first + tensor.bytes());
    }
    placement
}

/// Files in memory.
#[derive(Default)]
struct Files(BTreeMap<String, Vec<u8>>);

impl FileSpace for Files {
    fn read(&mut self, tensor: &str, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let file = self.0.get(tensor).ok_or_else(|| io::Error::other("no such file"))?;
        into.copy_from_slice(&file[offset as usize..offset as usize + into.len()]);
        Ok(())
    }

    fn write(&mut self, tensor: &str, offset: u64, from: &[u8]) -> io::Result<()> {
        let file = self.0.entry(tensor.to_owned()).or_default();
        file.resize(file.len().max(offset as usize + from.len()), 0);
        file[offset as usize..offset as usize + from.len()].copy_from_slice(from);
        Ok(())
    }
}

/// Device of a rank: a GPU of the stand-in, or the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RankDevice {
    Gpu(u32),
    Cpu,
}

/// A device with its programs and files.
struct Run {
    device: Box<dyn Device>,
    set: ProgramSet,
    files: Files,
}

fn numbers(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        DType::F64 => bytes.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
        DType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect(),
        DType::I32 => bytes.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap()).into()).collect(),
        DType::U8 => bytes.iter().map(|b| f64::from(*b)).collect(),
        DType::Bf16 => {
            bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes(b.try_into().unwrap()).to_f64()).collect()
        }
        other => panic!("no {other} here"),
    }
}

fn bytes_of(dtype: DType, values: &[f64]) -> Vec<u8> {
    match dtype {
        DType::F64 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::F32 => values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
        DType::I32 => values.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect(),
        DType::U8 => values.iter().map(|x| *x as u8).collect(),
        other => panic!("no {other} here"),
    }
}

impl Run {
    fn on_cpu() -> Run {
        Run::on_cpu_of(&TrainingForm::FULL)
    }

    fn on_cpu_of(form: &TrainingForm) -> Run {
        let set = programs_of(form, DType::F64, Kernels::Cpu { threads: 1 });
        let device = executor::open(set.clone(), disjoint_placement(&set), DType::F64, 1, None).unwrap();
        Run { device, set, files: Files::default() }
    }

    fn on_stand_in(precision: DType) -> Run {
        Run::with(precision, None).0
    }

    fn with(precision: DType, algorithms: Option<&GemmAlgorithms>) -> (Run, TuningResult) {
        Run::of(&TrainingForm::FULL, precision, algorithms)
    }

    fn of(form: &TrainingForm, precision: DType, algorithms: Option<&GemmAlgorithms>) -> (Run, TuningResult) {
        let set = programs_of(form, precision, Kernels::Cuda);
        let opened = cuda_stand_in::open(set.clone(), disjoint_placement(&set), precision, algorithms).unwrap();
        let OpenedGpu { device, algorithms, newly_tuned, charges, gpu } = opened;
        assert!(gpu.name.contains("stand-in"), "{gpu:?}");
        assert!(charges.libraries > Bytes::ZERO && charges.rounding < Bytes(2 << 20), "{charges:?}");
        (Run { device, set, files: Files::default() }, (algorithms, newly_tuned))
    }

    /// Opens a rank of a team of two, on the stand-in or on the CPU.
    fn of_rank(rank: u32, parallelism: Parallelism, on: RankDevice, algorithms: Option<&GemmAlgorithms>) -> Run {
        let on_cpu = on == RankDevice::Cpu;
        let kernels = if on_cpu { Kernels::Cpu { threads: 1 } } else { Kernels::Cuda };
        let first_sequence = u64::from(rank) * BATCH;
        let own = Share {
            parallelism: Some(parallelism),
            rank,
            ranks: 2,
            first_sequence,
            state: vec![700, 324],
            ..Share::SINGLE_DEVICE
        };
        Run::opened(
            parallelize(programs(DType::F32, kernels), &own, &Recipe::on_device(BATCH as u32, vec![]), 1, true),
            on,
            algorithms,
        )
    }

    /// Opens a stage of a pipeline of two, for a step of `micro_batches` micro-batches.
    fn of_stage(own: &Share, micro_batches: u32, on_cpu: bool) -> Run {
        let kernels = if on_cpu { Kernels::Cpu { threads: 1 } } else { Kernels::Cuda };
        let layers = own.own_layers(model().layers);
        let set = stage_of(&TrainingForm::FULL, DType::F32, kernels, layers, None);
        let set = parallelize(set, own, &Recipe::on_device(BATCH as u32, vec![]), micro_batches, true);
        let on = if on_cpu { RankDevice::Cpu } else { RankDevice::Gpu(0) };
        Run::opened(if on_cpu { set } else { stage_sends_through_host(set) }, on, None)
    }

    fn opened(set: ProgramSet, on: RankDevice, algorithms: Option<&GemmAlgorithms>) -> Run {
        let placement = disjoint_placement(&set);
        let device = match on {
            RankDevice::Cpu => executor::open(set.clone(), placement, DType::F32, 1, None).unwrap(),
            RankDevice::Gpu(number) => {
                cuda_stand_in::open_gpu(number, set.clone(), placement, DType::F32, algorithms).unwrap().device
            }
        };
        Run { device, set, files: Files::default() }
    }

    fn put(&mut self, name: &str, values: &[f64]) {
        let tensor = self.set.find(name).unwrap();
        self.device.write(tensor, 0, &bytes_of(self.set.tensor(tensor).dtype, values));
    }

    fn get(&mut self, tensor: TensorId, slot: u32) -> Vec<f64> {
        let mut bytes = vec![0; self.set.tensor(tensor).bytes() as usize];
        self.device.read(tensor, slot, &mut bytes);
        numbers(self.set.tensor(tensor).dtype, &bytes)
    }

    fn all_of(&mut self, category: Category) -> BTreeMap<String, Vec<f64>> {
        let mut found = BTreeMap::new();
        for id in (0..self.set.tensors.len() as u32).map(TensorId) {
            let tensor = self.set.tensor(id).clone();
            if tensor.category == category && tensor.space == Space::Device {
                for slot in 0..tensor.slots {
                    found.insert(format!("{}.{slot}", tensor.name), self.get(id, slot));
                }
            }
        }
        found
    }

    fn run(&mut self, program: ProgramKind) {
        self.try_run(program, &mut NoObserver).unwrap_or_else(|error| panic!("{program}: {error}"));
    }

    fn try_run(&mut self, program: ProgramKind, observer: &mut dyn Observer) -> Result<(), DeviceError> {
        self.device.run_observed(ProgramCall::of(program), &mut self.files, observer)
    }

    fn scalars(&mut self, some: &[(Scalar, f64)]) {
        let mut all = [0.0; SCALAR_COUNT as usize];
        for (which, value) in some {
            all[*which as usize] = *value;
        }
        self.put("scalars", &all);
    }

    fn batch(&mut self, prefix: &str, seed: usize) {
        self.batch_of(prefix, seed, 0);
    }

    /// Writes those batch tensors of a micro-batch that the programs have.
    fn batch_of(&mut self, prefix: &str, seed: usize, micro_batch: u32) {
        let rows = (BATCH * SEQUENCE) as usize;
        let draw = |i: usize, of: i32| ((i * 7919 + seed * 104_729 + i * i) % of as usize) as f64;
        let at = |i: usize| i % SEQUENCE as usize;
        let start = |i: usize| if at(i) < 11 { 0.0 } else { 11.0 };
        let all = |f: &dyn Fn(usize) -> f64| (0..rows).map(f).collect::<Vec<_>>();
        let mut put = |name: &str, values: &[f64]| {
            if let Some(tensor) = self.set.find(&format!("{prefix}{name}")) {
                let known = self.set.tensor(tensor);
                self.device.write(tensor, micro_batch % known.slots, &bytes_of(known.dtype, values));
            }
        };
        put("tokens", &all(&|i| draw(i, VOCAB)));
        put("labels", &all(&|i| if i == 3 { -100.0 } else { draw(i + 1, VOCAB) }));
        put("positions", &all(&|i| at(i) as f64 - start(i)));
        put("document_start", &all(&start));
        put("token_weights", &vec![1.0; rows]);
    }

    /// Restores the weights of another device from its files.
    fn restore_from(&mut self, other: &Run) {
        for (name, bytes) in &other.files.0 {
            let dtype = |set: &ProgramSet| set.tensor(set.find(name).unwrap()).dtype;
            let bytes = bytes_of(dtype(&self.set), &numbers(dtype(&other.set), bytes));
            self.files.0.insert(name.clone(), bytes);
        }
        self.run(ProgramKind::Restore);
    }

    /// Trains `steps` steps of two micro-batches each, and returns the losses.
    fn train(&mut self, steps: usize) -> Vec<f64> {
        let mut losses = Vec::new();
        for step in 0..steps {
            self.gradients(step);
            self.run(ProgramKind::Update);
            losses.push(self.metric(Metric::LossSum) / 148.0);
        }
        losses
    }

    fn gradients(&mut self, step: usize) {
        self.gradients_of(step, 0..2);
    }

    /// Computes the gradients of a range of micro-batches.
    fn gradients_of(&mut self, step: usize, micro_batches: Range<usize>) {
        self.begin(step);
        for micro_batch in micro_batches {
            self.batch("train.", 2 * step + micro_batch);
            self.run(ProgramKind::Forward);
            self.run(ProgramKind::Backward);
        }
        self.run(ProgramKind::GradientNorm);
    }

    fn begin(&mut self, step: usize) {
        let power = |beta: f64| 1.0 - beta.powi(step as i32 + 1);
        self.scalars(&[
            (Scalar::LearningRate, 0.01),
            (Scalar::BiasCorrection1, power(0.9)),
            (Scalar::BiasCorrection2, power(0.95)),
            (Scalar::ClipNorm, 0.5),
            (Scalar::ClipFactor, 1.0),
            (Scalar::InverseTokens, 1.0 / 148.0),
            (Scalar::Step, step as f64 + 1.0),
        ]);
        self.run(ProgramKind::BeginStep);
    }

    fn metric(&mut self, which: Metric) -> f64 {
        let metrics = self.set.find("metrics").unwrap();
        self.get(metrics, 0)[which as usize]
    }

    fn evaluate(&mut self) -> (f64, Vec<f64>) {
        self.put("metrics", &[0.0; METRIC_COUNT as usize]);
        self.batch("evaluate.", 77);
        self.run(ProgramKind::Evaluate);
        let correct = self.set.find("evaluate.correct").unwrap();
        (self.metric(Metric::LossSum), self.get(correct, 0))
    }

    /// Returns the logits after a prompt and after one more token.
    fn generate(&mut self) -> Vec<f64> {
        let mut logits = Vec::new();
        for (program, first, rows) in [(ProgramKind::Prefill, 0, CHUNK), (ProgramKind::Decode, CHUNK, 1)] {
            self.scalars(&[(Scalar::LastRow, (rows - 1) as f64)]);
            let positions: Vec<f64> = (first..first + rows).map(|at| at as f64).collect();
            self.put(&format!("{program}.positions"), &positions);
            self.put(&format!("{program}.places"), &positions);
            self.put(&format!("{program}.tokens"), &positions.iter().map(|at| 7.0 * at).collect::<Vec<_>>());
            self.run(program);
            let of = self.set.find(&format!("{program}.logits")).unwrap();
            logits.extend(self.get(of, 0));
        }
        logits
    }
}

type TuningResult = (GemmAlgorithms, bool);

#[track_caller]
fn close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    let size = (want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= tolerance * size, "{what}[{i}]: {got} for {want}, of {size}");
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn f32_run_matches_cpu_in_f64() {
    let (mut gpu, mut cpu) = (Run::on_stand_in(DType::F32), Run::on_cpu());
    gpu.run(ProgramKind::Load);
    gpu.run(ProgramKind::InitOptimizer);
    gpu.run(ProgramKind::Checkpoint);
    cpu.restore_from(&gpu);
    close(&gpu.train(3), &cpu.train(3), 1e-5, "losses");
    let (got, want) = (gpu.all_of(Category::Weight), cpu.all_of(Category::Weight));
    for (name, want) in &want {
        close(&got[name], want, 2e-4, name);
    }
    let ((loss, correct), (want, hits)) = (gpu.evaluate(), cpu.evaluate());
    close(&[loss], &[want], 1e-5, "loss");
    assert_eq!(correct, hits);
    close(&gpu.generate(), &cpu.generate(), 5e-4, "logits");
    let stats = gpu.device.stats();
    assert_eq!(stats.arena_measured_bytes, stats.arena_bytes, "everything was used, and nothing beside it");
    assert!(!gpu.device.memory().has_stray_writes(Space::Device));
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn bf16_training_follows_cpu_in_f64() {
    let (mut gpu, mut cpu) = (Run::on_stand_in(DType::Bf16), Run::on_cpu());
    gpu.run(ProgramKind::Load);
    gpu.run(ProgramKind::InitOptimizer);
    gpu.run(ProgramKind::Checkpoint);
    cpu.restore_from(&gpu);
    close(&gpu.train(3), &cpu.train(3), 2e-2, "losses");
    let ((loss, _), (want, _)) = (gpu.evaluate(), cpu.evaluate());
    close(&[loss], &[want], 2e-2, "loss");
}

/// Opens a run on the stand-in, and one on the CPU in f64 with the same weights.
fn gpu_and_cpu(form: &TrainingForm, precision: DType) -> (Run, Run) {
    let (mut gpu, mut cpu) = (Run::of(form, precision, None).0, Run::on_cpu_of(form));
    for run in [&mut gpu, &mut cpu] {
        run.run(ProgramKind::Load);
        run.run(ProgramKind::InitOptimizer);
    }
    gpu.run(ProgramKind::Checkpoint);
    cpu.restore_from(&gpu);
    (gpu, cpu)
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn lora_on_quantized_base_matches_cpu() {
    for (base, precision, tolerance) in
        [(Base::Nf4, DType::F32, 1e-5), (Base::Int8, DType::F32, 1e-5), (Base::Nf4, DType::Bf16, 2e-2)]
    {
        let (mut gpu, mut cpu) = gpu_and_cpu(&TrainingForm::adapters(base), precision);
        // Quantized values agree in every bit: numbers drawn in f64 are rounded once on both devices.
        let quantized = |run: &mut Run| {
            let mut all = run.all_of(Category::Weight);
            all.retain(|name, _| name.contains(".codes.") || name.contains(".scales.") || name.contains(".groups."));
            all
        };
        let codes = quantized(&mut cpu);
        assert!(!codes.is_empty());
        assert_eq!(quantized(&mut gpu), codes);
        close(&gpu.train(3), &cpu.train(3), tolerance, "losses");
        let (got, want) = (gpu.all_of(Category::Weight), cpu.all_of(Category::Weight));
        // In bf16 the sign of a gradient near 0 may differ, and an AdamW step has the same size for any gradient.
        for (name, want) in want.iter().filter(|(name, _)| name.contains("lora") && precision == DType::F32) {
            close(&got[name], want, 2e-4, name);
        }
        assert_eq!(quantized(&mut gpu), codes, "frozen");
        let ((got, _), (want, _)) = (gpu.evaluate(), cpu.evaluate());
        close(&[got], &[want], tolerance, "loss");
        assert!(!gpu.device.memory().has_stray_writes(Space::Device));
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn eight_bit_adam_step_matches_cpu() {
    let (mut gpu, mut cpu) =
        gpu_and_cpu(&TrainingForm { state: AdamState::Blockwise8, ..TrainingForm::FULL }, DType::F32);
    close(&gpu.train(1), &cpu.train(1), 1e-5, "losses");
    for (name, want) in cpu.all_of(Category::Weight) {
        close(&gpu.all_of(Category::Weight)[&name], &want, 2e-4, &name);
    }
    let (got, want) = (gpu.all_of(Category::Optimizer), cpu.all_of(Category::Optimizer));
    // Names end with the slot: `gate_up.first.0` comes with `gate_up.first_scale.0`.
    let is_quantized = |name: &str| {
        let (tensor, slot) = name.rsplit_once('.').unwrap();
        want.contains_key(&format!("{tensor}_scale.{slot}"))
    };
    assert!(want.keys().any(|name| is_quantized(name)));
    for (name, want) in &want {
        if !is_quantized(name) {
            close(&got[name], want, 1e-4, name);
            continue;
        }
        // A moment near a threshold may be rounded to either side.
        let away = |(got, want): (&f64, &f64)| (got - want).abs();
        let steps: Vec<f64> = got[name].iter().zip(want).map(away).collect();
        assert!(steps.iter().all(|step| *step <= 1.0), "{name}");
        assert!(steps.iter().sum::<f64>() <= 0.01 * steps.len() as f64 + 1.0, "{name}");
    }
    close(&gpu.train(2), &cpu.train(2), 1e-3, "losses");
}

/// An observer that does nothing.
struct PassiveObserver;

impl Observer for PassiveObserver {}

/// Refuses one op of a program once.
struct RefuseOnce {
    tick: u32,
    singly: bool,
}

impl Observer for RefuseOnce {
    fn before(&mut self, tick: u32, op: &Op, _: &mut dyn Memory) -> Result<(), DeviceError> {
        let refused = DeviceError::OutOfMemory { program: ProgramKind::Update.to_string(), tick, op: op.name() };
        if tick == self.tick { Err(refused) } else { Ok(()) }
    }

    fn serializes_ops(&self) -> bool {
        self.singly
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn observers_change_nothing_and_stored_algorithms_are_reused() {
    let (mut first, (algorithms, newly_tuned)) = Run::with(DType::F32, None);
    assert!(newly_tuned && !algorithms.chosen.is_empty());
    let (mut second, (again, newly_tuned)) = Run::with(DType::F32, Some(&algorithms));
    assert!(!newly_tuned, "all were known");
    assert_eq!(again, algorithms);
    for run in [&mut first, &mut second] {
        run.run(ProgramKind::Load);
        run.run(ProgramKind::InitOptimizer);
    }
    first.train(2);
    for step in 0..2 {
        second.gradients(step);
        second.try_run(ProgramKind::Update, &mut PassiveObserver).unwrap();
    }
    assert_eq!(first.all_of(Category::Weight), second.all_of(Category::Weight));
    assert_eq!(first.all_of(Category::Optimizer), second.all_of(Category::Optimizer));
    // Algorithms of another library version are not used.
    let other = GemmAlgorithms { library: 1, ..algorithms };
    assert!(Run::with(DType::F32, Some(&other)).1.1);
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn refused_update_resumes_at_refused_op() {
    let (mut plain, (algorithms, _)) = Run::with(DType::F32, None);
    plain.run(ProgramKind::Load);
    plain.run(ProgramKind::InitOptimizer);
    plain.run(ProgramKind::Checkpoint);
    plain.gradients(0);
    plain.run(ProgramKind::Update);
    let want = plain.all_of(Category::Weight);
    let mut resumed = Run::with(DType::F32, Some(&algorithms)).0;
    resumed.restore_from(&plain);
    let ticks = resumed.set.program(ProgramKind::Update).unwrap().op_count() as u32;
    for tick in (1..=ticks).step_by(5) {
        for singly in [false, true] {
            resumed.run(ProgramKind::Restore);
            resumed.gradients(0);
            let refused = resumed.try_run(ProgramKind::Update, &mut RefuseOnce { tick, singly });
            assert!(refused.unwrap_err().is_out_of_memory());
            let rest = ProgramCall { first_op: tick, ..ProgramCall::of(ProgramKind::Update) };
            resumed.device.run_observed(rest, &mut NoFiles, &mut NoObserver).unwrap();
            assert_eq!(resumed.all_of(Category::Weight), want, "op {tick}");
        }
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn oversized_arena_is_refused_without_leak() {
    let set = programs(DType::F32, Kernels::Cuda);
    let placement = Placement { arena_bytes: 1 << 40, ..disjoint_placement(&set) };
    let Err(error) = cuda_stand_in::open(set, placement, DType::F32, None) else { panic!("a TiB fits") };
    assert!(error.is_out_of_memory());
    assert!(matches!(error, DeviceError::Cuda(CudaError::Refused { requested: Bytes(asked), .. }) if asked == 1 << 40));
    assert_eq!(Failure::from(error).exit, Exit::DoesNotFit);
    // The refused opening leaks no memory.
    Run::on_stand_in(DType::F32).run(ProgramKind::Load);
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn file_failure_leaves_device_usable() {
    let mut run = Run::on_stand_in(DType::F32);
    run.run(ProgramKind::Load);
    run.run(ProgramKind::InitOptimizer);
    let failed = run.device.run_observed(ProgramCall::of(ProgramKind::Checkpoint), &mut NoFiles, &mut NoObserver);
    assert!(matches!(failed, Err(DeviceError::File { .. })), "{failed:?}");
    run.run(ProgramKind::Checkpoint);
    let weights = run.all_of(Category::Weight);
    run.gradients(0);
    run.run(ProgramKind::Update);
    assert_ne!(run.all_of(Category::Weight), weights);
    run.run(ProgramKind::Restore);
    assert_eq!(run.all_of(Category::Weight), weights);
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn plan_change_keeps_persistent_tensors() {
    let (mut plain, (algorithms, _)) = Run::with(DType::F32, None);
    let mut adopting = Run::with(DType::F32, Some(&algorithms)).0;
    for run in [&mut plain, &mut adopting] {
        run.run(ProgramKind::Load);
        run.run(ProgramKind::InitOptimizer);
        run.train(1);
    }
    let size = |run: &mut Run| run.device.memory().bytes(Space::Device).0;
    let before = size(&mut adopting);
    // Grows by more than a piece, then by less than a tensor, then shrinks.
    for first in [40 << 20, (40 << 20) + 512, 256] {
        let placement = disjoint_placement_from(&adopting.set, first);
        adopting.device.adopt(adopting.set.clone(), placement).unwrap();
        assert_eq!(size(&mut adopting), before + first);
        assert_eq!(adopting.all_of(Category::Weight), plain.all_of(Category::Weight));
        assert_eq!(adopting.all_of(Category::Optimizer), plain.all_of(Category::Optimizer));
        assert_eq!(adopting.train(1), plain.train(1));
    }
    let refused = adopting.device.adopt(adopting.set.clone(), disjoint_placement_from(&adopting.set, 1 << 40));
    assert!(refused.unwrap_err().is_out_of_memory());
    assert_eq!(adopting.train(1), plain.train(1));
    assert_eq!(adopting.all_of(Category::Weight), plain.all_of(Category::Weight));
}
