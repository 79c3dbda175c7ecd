//! The executor of GPUs, end to end on the stand-in (it runs on the CPU): whole Programs against the CPU's executor, and
//! what happens when the device refuses or is lost. What a stand-in cannot show is in `cuda_stand_in/README.md`.

mod cuda_stand_in;

use plimsoll_core::{
    Algorithms, Bytes, Category, CollectivesBy, DType, Exit, Failure, Recipe, RecomputeLevel, Sharing, Space,
};
use plimsoll_device::cpu::executor;
use plimsoll_device::cuda::arena::DeviceArena;
use plimsoll_device::cuda::collectives::{ROUND_BYTES, Stands};
use plimsoll_device::cuda::compile::Compiler;
use plimsoll_device::cuda::driver::{Context, CudaError, Driver, Pinned, Stream};
use plimsoll_device::cuda::executor::Opened;
use plimsoll_device::cuda::nccl::{self, Nccl};
use plimsoll_device::device::{Call, Device, DeviceError, FileSpace, Memory, NoFiles, Observer, Unobserved};
use plimsoll_device::transport::memory::Memory as InProcess;
use plimsoll_device::transport::{Seat, Transport};
use plimsoll_program::models::Target;
use plimsoll_program::models::config::{ModelConfig, ModelType, RopeScaling};
use plimsoll_program::models::decoder::{
    AdamState, Base, Build, Generation, Lora, Method, Optimizer, Source, Training, build,
};
use plimsoll_program::op::{Collective, Exchange, Piece};
use plimsoll_program::passes::mail::by_way_of_host;
use plimsoll_program::passes::share::share;
use plimsoll_program::scalars::{METRIC_COUNT, Metric, SCALAR_COUNT, Scalar};
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Index, Op, Operand, Placement, ProgramSet, Share, Tensor, TensorId};
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

/// A model with everything: grouped heads, biases, norms of heads, a tied head, stretched positions.
fn model() -> ModelConfig {
    ModelConfig {
        model_type: ModelType::Qwen3,
        hidden: 24,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        // The widest matrix has the 4096 elements from which on state is coarse.
        ffn: 96,
        vocab: VOCAB as u64,
        tied: true,
        norm_eps: 1e-5,
        rope_theta: 1e4,
        rope_scaling: RopeScaling::Linear { factor: 2.0 },
        qkv_bias: true,
        qk_norm: true,
        max_positions: 64,
        bos: None,
        eos: vec![],
        init_std: 0.3,
    }
}

/// What is trained, and how coarsely it is stored.
#[derive(Clone)]
struct Form {
    method: Method,
    base: Base,
    state: AdamState,
}

impl Form {
    /// All of it, in the run's arithmetic.
    const FULL: Form = Form { method: Method::Full, base: Base::Plain, state: AdamState::Full };

    /// Adapters of every projection, with dropout, beside a frozen base.
    fn adapters(base: Base) -> Form {
        let targets = Target::ALL.into_iter().collect();
        let lora = Lora { rank: 3, alpha: 6.0, dropout: 0.1, targets, seed: 9, source: Source::Random { seed: 9 } };
        Form { method: Method::Lora(lora), base, ..Form::FULL }
    }
}

fn programs(precision: DType, kernels: Kernels) -> ProgramSet {
    programs_of(&Form::FULL, precision, kernels)
}

fn programs_of(form: &Form, precision: DType, kernels: Kernels) -> ProgramSet {
    let generation = Some(Generation { capacity: 16, chunk: CHUNK });
    stage_of(form, precision, kernels, 0..model().layers, generation)
}

/// Those of some of the layers.
fn stage_of(
    form: &Form,
    precision: DType,
    kernels: Kernels,
    layers: Range<u64>,
    generation: Option<Generation>,
) -> ProgramSet {
    let levels = [RecomputeLevel::Nothing, RecomputeLevel::Block];
    let recompute = levels[layers.start as usize..layers.end as usize].to_vec();
    build(&Build {
        config: &model(),
        layers,
        precision,
        kernels,
        sequence: SEQUENCE,
        micro_batch: BATCH,
        source: Source::Random { seed: 4 },
        method: form.method.clone(),
        base: form.base,
        streamed_head: false,
        training: Some(Training {
            // An epsilon above the rounding of gradients: else a step magnifies it where they are nearly 0.
            optimizer: Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-3, decay: 0.1, state: form.state },
            recompute,
        }),
        evaluate: true,
        generation,
        files: true,
    })
}

/// A placement in which everything has bytes of its own, but for the scratch of ops, which begins where all else ends.
fn side_by_side(set: &ProgramSet) -> Placement {
    side_by_side_from(set, 0)
}

/// The same, above `first` bytes of the device's arena that nobody uses.
fn side_by_side_from(set: &ProgramSet, first: u64) -> Placement {
    let offsets = vec![Vec::new(); set.tensors.len()];
    let mut placement = Placement { offsets, arena_bytes: first, ..Placement::default() };
    // Matrices that were made whole are read by the next op.
    let kept = |tensor: &Tensor| tensor.category != Category::Workspace || tensor.name.contains(".whole");
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

/// What a rank of a team works on: a GPU of the stand-in, or the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum On {
    Gpu(u32),
    Cpu,
}

/// A device, the Programs that it runs, and its files.
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
        Run::on_cpu_of(&Form::FULL)
    }

    fn on_cpu_of(form: &Form) -> Run {
        let set = programs_of(form, DType::F64, Kernels::Cpu { threads: 1 });
        let device = executor::open(set.clone(), side_by_side(&set), DType::F64, 1, None).unwrap();
        Run { device, set, files: Files::default() }
    }

    fn on_stand_in(precision: DType) -> Run {
        Run::with(precision, None).0
    }

    fn with(precision: DType, algorithms: Option<&Algorithms>) -> (Run, Opened2) {
        Run::of(&Form::FULL, precision, algorithms)
    }

    fn of(form: &Form, precision: DType, algorithms: Option<&Algorithms>) -> (Run, Opened2) {
        let set = programs_of(form, precision, Kernels::Cuda);
        let opened = cuda_stand_in::open(set.clone(), side_by_side(&set), precision, algorithms).unwrap();
        let Opened { device, algorithms, chosen_anew, charges, gpu } = opened;
        assert!(gpu.name.contains("stand-in"), "{gpu:?}");
        assert!(charges.libraries > Bytes::ZERO && charges.rounding < Bytes(2 << 20), "{charges:?}");
        (Run { device, set, files: Files::default() }, (algorithms, chosen_anew))
    }

    /// A rank of a team of two, on the stand-in or on the processor.
    fn of_rank(rank: u32, sharing: Sharing, on: On, algorithms: Option<&Algorithms>) -> Run {
        let on_cpu = on == On::Cpu;
        let kernels = if on_cpu { Kernels::Cpu { threads: 1 } } else { Kernels::Cuda };
        let first_sequence = u64::from(rank) * BATCH;
        let own =
            Share { sharing: Some(sharing), rank, ranks: 2, first_sequence, state: vec![700, 324], ..Share::ALONE };
        Run::opened(
            share(programs(DType::F32, kernels), &own, &Recipe::on_device(BATCH as u32, vec![]), 1, true),
            on,
            algorithms,
        )
    }

    /// A stage of a pipeline of two, in a step of so many micro-batches.
    fn of_stage(own: &Share, micro_batches: u32, on_cpu: bool) -> Run {
        let kernels = if on_cpu { Kernels::Cpu { threads: 1 } } else { Kernels::Cuda };
        let layers = own.own_layers(model().layers);
        let set = stage_of(&Form::FULL, DType::F32, kernels, layers, None);
        let set = share(set, own, &Recipe::on_device(BATCH as u32, vec![]), micro_batches, true);
        let on = if on_cpu { On::Cpu } else { On::Gpu(0) };
        Run::opened(if on_cpu { set } else { by_way_of_host(set) }, on, None)
    }

    fn opened(set: ProgramSet, on: On, algorithms: Option<&Algorithms>) -> Run {
        let placement = side_by_side(&set);
        let device = match on {
            On::Cpu => executor::open(set.clone(), placement, DType::F32, 1, None).unwrap(),
            On::Gpu(number) => {
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

    fn run(&mut self, program: &str) {
        self.try_run(program, &mut Unobserved).unwrap_or_else(|error| panic!("{program}: {error}"));
    }

    fn try_run(&mut self, program: &str, observer: &mut dyn Observer) -> Result<(), DeviceError> {
        self.device.run_observed(Call::of(program), &mut self.files, observer)
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

    /// What of a micro-batch the Programs read, which may be some of it.
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

    /// The same weights as another device has, by way of its files.
    fn restore_from(&mut self, other: &Run) {
        for (name, bytes) in &other.files.0 {
            let dtype = |set: &ProgramSet| set.tensor(set.find(name).unwrap()).dtype;
            let bytes = bytes_of(dtype(&self.set), &numbers(dtype(&other.set), bytes));
            self.files.0.insert(name.clone(), bytes);
        }
        self.run("restore");
    }

    /// Steps of training, each of two micro-batches; the losses.
    fn train(&mut self, steps: usize) -> Vec<f64> {
        let mut losses = Vec::new();
        for step in 0..steps {
            self.gradients(step);
            self.run("update");
            losses.push(self.metric(Metric::LossSum) / 148.0);
        }
        losses
    }

    fn gradients(&mut self, step: usize) {
        self.gradients_of(step, 0..2);
    }

    /// Those of some of the micro-batches.
    fn gradients_of(&mut self, step: usize, micro_batches: Range<usize>) {
        self.begin(step);
        for micro_batch in micro_batches {
            self.batch("train.", 2 * step + micro_batch);
            self.run("forward");
            self.run("backward");
        }
        self.run("norm");
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
        self.run("begin");
    }

    fn metric(&mut self, which: Metric) -> f64 {
        let metrics = self.set.find("metrics").unwrap();
        self.get(metrics, 0)[which as usize]
    }

    fn evaluate(&mut self) -> (f64, Vec<f64>) {
        self.put("metrics", &[0.0; METRIC_COUNT as usize]);
        self.batch("evaluate.", 77);
        self.run("evaluate");
        let correct = self.set.find("evaluate.correct").unwrap();
        (self.metric(Metric::LossSum), self.get(correct, 0))
    }

    /// Logits after a prompt and after one more token.
    fn generate(&mut self) -> Vec<f64> {
        let mut logits = Vec::new();
        for (program, first, rows) in [("prefill", 0, CHUNK), ("decode", CHUNK, 1)] {
            self.scalars(&[(Scalar::CacheLength, first as f64), (Scalar::LastRow, (rows - 1) as f64)]);
            let positions: Vec<f64> = (first..first + rows).map(|at| at as f64).collect();
            self.put(&format!("{program}.positions"), &positions);
            self.put(&format!("{program}.tokens"), &positions.iter().map(|at| 7.0 * at).collect::<Vec<_>>());
            self.run(program);
            let of = self.set.find(&format!("{program}.logits")).unwrap();
            logits.extend(self.get(of, 0));
        }
        logits
    }
}

type Opened2 = (Algorithms, bool);

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
fn training_evaluating_and_generating_in_f32_are_those_of_the_cpu_in_f64() {
    let (mut gpu, mut cpu) = (Run::on_stand_in(DType::F32), Run::on_cpu());
    gpu.run("load");
    gpu.run("fresh");
    gpu.run("checkpoint");
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
    assert!(!gpu.device.memory().strayed(Space::Device));
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn training_in_bf16_follows_the_cpu_in_f64() {
    let (mut gpu, mut cpu) = (Run::on_stand_in(DType::Bf16), Run::on_cpu());
    gpu.run("load");
    gpu.run("fresh");
    gpu.run("checkpoint");
    cpu.restore_from(&gpu);
    close(&gpu.train(3), &cpu.train(3), 2e-2, "losses");
    let ((loss, _), (want, _)) = (gpu.evaluate(), cpu.evaluate());
    close(&[loss], &[want], 2e-2, "loss");
}

/// Ends the process where ranks wait for each other for ever.
fn watchdog() -> Arc<AtomicBool> {
    let done = Arc::new(AtomicBool::new(false));
    let seen = done.clone();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(240));
        if !seen.load(Ordering::Relaxed) {
            eprintln!("a rank hangs");
            std::process::abort();
        }
    });
    done
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn a_team_trains_what_one_device_trains_whether_batch_or_state_is_shared_out() {
    const STEPS: usize = 3;
    let done = watchdog();
    let mut alone = Run::on_stand_in(DType::F32);
    alone.run("load");
    alone.run("fresh");
    let losses = alone.train(STEPS);
    let weights = alone.all_of(Category::Weight);
    let mut bits: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    // Of products: timed when they are chosen, so that others may be chosen the next time.
    let mut algorithms: BTreeMap<(String, u32), Algorithms> = BTreeMap::new();
    for (sharing, beside, round_bytes, nccl) in [
        (Sharing::Batch, On::Gpu(0), ROUND_BYTES, false),
        (Sharing::Batch, On::Gpu(0), 1000, false),
        (Sharing::Batch, On::Cpu, 3000, false),
        (Sharing::State, On::Gpu(0), 1000, false),
        (Sharing::State, On::Cpu, ROUND_BYTES, false),
        (Sharing::Batch, On::Gpu(1), ROUND_BYTES, true),
        (Sharing::State, On::Gpu(1), 1000, true),
        // NCCL takes no GPU twice: they go on without it.
        (Sharing::Batch, On::Gpu(0), 3000, true),
    ] {
        let what = format!("{sharing}, {round_bytes}, beside {beside:?}, by NCCL: {nccl}");
        let transport = InProcess::in_rounds(2, round_bytes);
        let on_cpu = beside == On::Cpu;
        let of_rank = |rank: u32, on| Run::of_rank(rank, sharing, on, algorithms.get(&(sharing.to_string(), rank)));
        let mut team = [of_rank(0, On::Gpu(0)), of_rank(1, beside)];
        if !on_cpu {
            let chosen =
                (0..).zip(&team).map(|(rank, run)| ((sharing.to_string(), rank), run.device.algorithms().unwrap()));
            algorithms.extend(chosen);
        }
        let found: Vec<Vec<f64>> = std::thread::scope(|scope| {
            let ranks = team.iter_mut().enumerate().map(|(rank, run)| {
                let seat = Seat { rank: rank as u32, transport: transport.clone(), nccl };
                scope.spawn(move || {
                    run.device.join(seat).unwrap();
                    run.run("load");
                    run.run("fresh");
                    let step = |step| {
                        run.gradients_of(step, rank..rank + 1);
                        run.run("update");
                        run.metric(Metric::LossSum) / 148.0
                    };
                    (0..STEPS).map(step).collect()
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert_eq!(found[0], found[1], "{what}");
        close(&found[0], &losses, 1e-5, &what);
        let [first, second] = team.each_mut().map(|run| run.all_of(Category::Weight));
        if sharing == Sharing::Batch {
            assert!(first == second || on_cpu, "all have the same bits: {what}");
            for (name, want) in &weights {
                close(&first[name], want, 2e-4, name);
                close(&second[name], want, 2e-4, name);
            }
        }
        for run in &mut team {
            assert!(!run.device.memory().strayed(Space::Device), "{what}");
        }
        if !on_cpu {
            // Whichever way bytes go, sums are taken in the same order.
            let tensors = [first, second].into_iter().flat_map(BTreeMap::into_values);
            // What a rank has no part of is NaN.
            let all: Vec<u64> = found.into_iter().chain(tensors).flatten().map(f64::to_bits).collect();
            assert!(*bits.entry(sharing.to_string()).or_insert_with(|| all.clone()) == all, "the same bits: {what}");
        }
        let by = team.each_mut().map(|run| run.device.collectives());
        match (nccl, beside) {
            (true, On::Gpu(1)) => assert_eq!(by, [const { Some(CollectivesBy::Nccl) }; 2], "{what}"),
            (true, _) => {
                let [Some(CollectivesBy::Host { why: Some(why) }), Some(CollectivesBy::Host { why: Some(_) })] = &by
                else {
                    panic!("{by:?}")
                };
                assert!(why.starts_with("NCCL refuses to bring the ranks together: "), "{why}");
            }
            _ => assert_eq!(by, [const { None }; 2], "{what}"),
        }
    }
    done.store(true, Ordering::Relaxed);
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn a_pipeline_trains_what_one_device_trains() {
    const STEPS: usize = 3;
    let done = watchdog();
    let mut alone = Run::on_stand_in(DType::F32);
    alone.run("load");
    alone.run("fresh");
    let losses = alone.train(STEPS);
    let (evaluated, _) = alone.evaluate();
    alone.run("save");
    // GPUs below and above the processor, and with another GPU; messages of several rounds.
    for (on_cpu, round_bytes) in [([false, false], ROUND_BYTES), ([false, true], 1000), ([true, false], 3000)] {
        let what = format!("beside the processor: {on_cpu:?}, {round_bytes}");
        let transport = InProcess::in_rounds(2, round_bytes);
        let share = |rank| {
            let (sharing, layers) = (Some(Sharing::Layers), vec![0, 1, 2]);
            Share { sharing, rank, ranks: 2, layers, ..Share::ALONE }
        };
        let mut team = [0, 1].map(|rank| Run::of_stage(&share(rank), 2, on_cpu[rank as usize]));
        let found: Vec<(Vec<f64>, f64)> = std::thread::scope(|scope| {
            let ranks = (0..).zip(&mut team).map(|(rank, run)| {
                let seat = Seat { rank, transport: transport.clone(), nccl: false };
                let calls = share(rank).schedule(2).calls;
                scope.spawn(move || {
                    run.device.join(seat).unwrap();
                    run.run("load");
                    run.run("fresh");
                    let step = |step| {
                        run.begin(step);
                        for call in calls.iter().filter(|call| call.program != "begin") {
                            let micro_batch = call.micro_batch;
                            if call.program == "forward" {
                                run.batch_of("train.", 2 * step + micro_batch as usize, micro_batch);
                            }
                            let call = Call { micro_batch, last: call.last, ..Call::of(&call.program) };
                            run.device.run_observed(call, &mut NoFiles, &mut Unobserved).unwrap();
                        }
                        run.metric(Metric::LossSum) / 148.0
                    };
                    let losses = (0..STEPS).map(step).collect();
                    run.put("metrics", &[0.0; METRIC_COUNT as usize]);
                    run.batch("evaluate.", 77);
                    run.run("evaluate");
                    let evaluated = run.metric(Metric::LossSum);
                    run.run("save");
                    (losses, evaluated)
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert_eq!(found[0].0, found[1].0, "{what}");
        close(&found[0].0, &losses, 1e-5, &what);
        close(&[found[1].1], &[evaluated], 1e-5, &what);
        let mut saved = 0;
        for run in &mut team {
            for (name, bytes) in &run.files.0 {
                let dtype = run.set.tensor(run.set.find(name).unwrap()).dtype;
                close(&numbers(dtype, bytes), &numbers(dtype, &alone.files.0[name]), 2e-4, name);
                saved += 1;
            }
            for space in [Space::Device, Space::Host] {
                assert!(!run.device.memory().strayed(space), "{what}");
            }
        }
        assert_eq!(saved, alone.files.0.len(), "{what}");
    }
    done.store(true, Ordering::Relaxed);
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn a_rank_that_refuses_an_op_leaves_nobody_waiting_and_the_step_can_be_done_again() {
    a_refused_step_is_done_again(false);
    a_refused_step_is_done_again(true);
}

fn a_refused_step_is_done_again(nccl: bool) {
    let done = watchdog();
    let transport = InProcess::in_rounds(2, 1000);
    let mut team = [0, 1].map(|rank| Run::of_rank(rank, Sharing::Batch, On::Gpu(if nccl { rank } else { 0 }), None));
    let barrier = &Barrier::new(2);
    let found: Vec<f64> = std::thread::scope(|scope| {
        let ranks = team.iter_mut().enumerate().map(|(rank, run)| {
            let transport = transport.clone();
            scope.spawn(move || {
                run.device.join(Seat { rank: rank as u32, transport: transport.clone(), nccl }).unwrap();
                run.run("load");
                run.run("fresh");
                // Rank 1 refuses in the backward pass, when some gradients have been summed up and others have not.
                run.begin(0);
                run.batch("train.", rank);
                run.run("forward");
                let ticks = run.set.program("backward").unwrap().length() as u32;
                let mut refuses = Refuses { tick: if rank == 1 { ticks / 2 } else { 0 }, singly: false };
                let refused = run.try_run("backward", &mut refuses).unwrap_err();
                assert_eq!(refused.is_peers(), rank == 0, "{refused}");
                barrier.wait();
                if rank == 0 {
                    transport.clear();
                }
                barrier.wait();
                run.gradients_of(0, rank..rank + 1);
                run.run("update");
                run.metric(Metric::LossSum) / 148.0
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let mut alone = Run::on_stand_in(DType::F32);
    alone.run("load");
    alone.run("fresh");
    close(&found, &[alone.train(1)[0]; 2], 1e-5, "loss");
    let weights = alone.all_of(Category::Weight);
    let got = team[0].all_of(Category::Weight);
    for (name, want) in &weights {
        close(&got[name], want, 2e-4, name);
    }
    done.store(true, Ordering::Relaxed);
}

/// A run on the stand-in, and one on the CPU in f64 that begins with its weights.
fn both(form: &Form, precision: DType) -> (Run, Run) {
    let (mut gpu, mut cpu) = (Run::of(form, precision, None).0, Run::on_cpu_of(form));
    for run in [&mut gpu, &mut cpu] {
        run.run("load");
        run.run("fresh");
    }
    gpu.run("checkpoint");
    cpu.restore_from(&gpu);
    (gpu, cpu)
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn adapters_beside_a_coarse_base_are_trained_as_on_the_cpu() {
    for (base, precision, tolerance) in
        [(Base::Nf4, DType::F32, 1e-5), (Base::Int8, DType::F32, 1e-5), (Base::Nf4, DType::Bf16, 2e-2)]
    {
        let (mut gpu, mut cpu) = both(&Form::adapters(base), precision);
        // What was quantised is the same to the bit: what was drawn in f64 is rounded once either way.
        let coarse = |run: &mut Run| {
            let mut all = run.all_of(Category::Weight);
            all.retain(|name, _| name.contains(".codes.") || name.contains(".scales.") || name.contains(".groups."));
            all
        };
        let codes = coarse(&mut cpu);
        assert!(!codes.is_empty());
        assert_eq!(coarse(&mut gpu), codes);
        close(&gpu.train(3), &cpu.train(3), tolerance, "losses");
        let (got, want) = (gpu.all_of(Category::Weight), cpu.all_of(Category::Weight));
        // In bf16 a gradient near 0 has another sign now and then, and a step of AdamW is as large as any.
        for (name, want) in want.iter().filter(|(name, _)| name.contains("lora") && precision == DType::F32) {
            close(&got[name], want, 2e-4, name);
        }
        assert_eq!(coarse(&mut gpu), codes, "frozen");
        let ((got, _), (want, _)) = (gpu.evaluate(), cpu.evaluate());
        close(&[got], &[want], tolerance, "loss");
        assert!(!gpu.device.memory().strayed(Space::Device));
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn a_step_with_moments_of_a_byte_is_that_of_the_cpu() {
    let (mut gpu, mut cpu) = both(&Form { state: AdamState::Blockwise8, ..Form::FULL }, DType::F32);
    close(&gpu.train(1), &cpu.train(1), 1e-5, "losses");
    for (name, want) in cpu.all_of(Category::Weight) {
        close(&gpu.all_of(Category::Weight)[&name], &want, 2e-4, &name);
    }
    let (got, want) = (gpu.all_of(Category::Optimizer), cpu.all_of(Category::Optimizer));
    // Names end with the slot: `gate_up.first.0` has `gate_up.first_scale.0` beside it.
    let is_coarse = |name: &str| {
        let (tensor, slot) = name.rsplit_once('.').unwrap();
        want.contains_key(&format!("{tensor}_scale.{slot}"))
    };
    assert!(want.keys().any(|name| is_coarse(name)));
    for (name, want) in &want {
        if !is_coarse(name) {
            close(&got[name], want, 1e-4, name);
            continue;
        }
        // A moment beside a threshold may fall on its other side.
        let away = |(got, want): (&f64, &f64)| (got - want).abs();
        let steps: Vec<f64> = got[name].iter().zip(want).map(away).collect();
        assert!(steps.iter().all(|step| *step <= 1.0), "{name}");
        assert!(steps.iter().sum::<f64>() <= 0.01 * steps.len() as f64 + 1.0, "{name}");
    }
    close(&gpu.train(2), &cpu.train(2), 1e-3, "losses");
}

/// Looks at every op, and does nothing.
struct Looks;

impl Observer for Looks {}

/// Refuses one op of one Program once.
struct Refuses {
    tick: u32,
    singly: bool,
}

impl Observer for Refuses {
    fn before(&mut self, tick: u32, op: &Op, _: &mut dyn Memory) -> Result<(), DeviceError> {
        let refused = DeviceError::Refused { program: "update".into(), tick, op: op.name() };
        if tick == self.tick { Err(refused) } else { Ok(()) }
    }

    fn one_at_a_time(&self) -> bool {
        self.singly
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn who_looks_changes_no_bit_and_algorithms_that_were_kept_are_taken_again() {
    let (mut first, (algorithms, chosen_anew)) = Run::with(DType::F32, None);
    assert!(chosen_anew && !algorithms.chosen.is_empty());
    let (mut second, (again, chosen_anew)) = Run::with(DType::F32, Some(&algorithms));
    assert!(!chosen_anew, "all were known");
    assert_eq!(again, algorithms);
    for run in [&mut first, &mut second] {
        run.run("load");
        run.run("fresh");
    }
    first.train(2);
    for step in 0..2 {
        second.gradients(step);
        second.try_run("update", &mut Looks).unwrap();
    }
    assert_eq!(first.all_of(Category::Weight), second.all_of(Category::Weight));
    assert_eq!(first.all_of(Category::Optimizer), second.all_of(Category::Optimizer));
    // Of another library nothing is taken over.
    let other = Algorithms { library: 1, ..algorithms };
    assert!(Run::with(DType::F32, Some(&other)).1.1);
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn an_update_that_is_refused_goes_on_where_it_stopped() {
    let (mut plain, (algorithms, _)) = Run::with(DType::F32, None);
    plain.run("load");
    plain.run("fresh");
    plain.run("checkpoint");
    plain.gradients(0);
    plain.run("update");
    let want = plain.all_of(Category::Weight);
    let mut rehearsed = Run::with(DType::F32, Some(&algorithms)).0;
    rehearsed.restore_from(&plain);
    let ticks = rehearsed.set.program("update").unwrap().length() as u32;
    for tick in (1..=ticks).step_by(5) {
        for singly in [false, true] {
            rehearsed.run("restore");
            rehearsed.gradients(0);
            let refused = rehearsed.try_run("update", &mut Refuses { tick, singly });
            assert!(refused.unwrap_err().is_refusal());
            let rest = Call { from: tick, ..Call::of("update") };
            rehearsed.device.run_observed(rest, &mut NoFiles, &mut Unobserved).unwrap();
            assert_eq!(rehearsed.all_of(Category::Weight), want, "op {tick}");
        }
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn an_arena_larger_than_the_gpu_does_not_fit_and_leaves_nothing_behind() {
    let set = programs(DType::F32, Kernels::Cuda);
    let placement = Placement { arena_bytes: 1 << 40, ..side_by_side(&set) };
    let Err(error) = cuda_stand_in::open(set, placement, DType::F32, None) else { panic!("a TiB fits") };
    assert!(error.is_refusal());
    assert!(matches!(error, DeviceError::Cuda(CudaError::Refused { asked: Bytes(asked), .. }) if asked == 1 << 40));
    assert_eq!(Failure::from(error).exit, Exit::DoesNotFit);
    // What was taken on the way is free again.
    Run::on_stand_in(DType::F32).run("load");
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn a_file_that_fails_is_named_and_the_device_goes_on() {
    let mut run = Run::on_stand_in(DType::F32);
    run.run("load");
    run.run("fresh");
    let failed = run.device.run_observed(Call::of("checkpoint"), &mut NoFiles, &mut Unobserved);
    assert!(matches!(failed, Err(DeviceError::File { .. })), "{failed:?}");
    run.run("checkpoint");
    let weights = run.all_of(Category::Weight);
    run.gradients(0);
    run.run("update");
    assert_ne!(run.all_of(Category::Weight), weights);
    run.run("restore");
    assert_eq!(run.all_of(Category::Weight), weights);
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn what_stays_keeps_every_bit_when_the_plan_changes_between_steps() {
    let (mut plain, (algorithms, _)) = Run::with(DType::F32, None);
    let mut moved = Run::with(DType::F32, Some(&algorithms)).0;
    for run in [&mut plain, &mut moved] {
        run.run("load");
        run.run("fresh");
        run.train(1);
    }
    let size = |run: &mut Run| run.device.memory().bytes(Space::Device).0;
    let before = size(&mut moved);
    // Up by more than a piece, by less than a tensor, and down again.
    for first in [40 << 20, (40 << 20) + 512, 256] {
        let placement = side_by_side_from(&moved.set, first);
        moved.device.adopt(moved.set.clone(), placement).unwrap();
        assert_eq!(size(&mut moved), before + first);
        assert_eq!(moved.all_of(Category::Weight), plain.all_of(Category::Weight));
        assert_eq!(moved.all_of(Category::Optimizer), plain.all_of(Category::Optimizer));
        assert_eq!(moved.train(1), plain.train(1));
    }
    let refused = moved.device.adopt(moved.set.clone(), side_by_side_from(&moved.set, 1 << 40));
    assert!(refused.unwrap_err().is_refusal());
    assert_eq!(moved.train(1), plain.train(1));
    assert_eq!(moved.all_of(Category::Weight), plain.all_of(Category::Weight));
}

/// Numbers that differ from place to place, whose sums round.
fn number(rank: usize, at: u64) -> f64 {
    let draw = (at * 7919 + rank as u64 * 104_729 + at * at % 977) % 100_003;
    draw as f64 / 100_003.0 * 10f64.powi((at % 7) as i32)
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn three_ranks_exchange_parts_of_any_size_by_nccl_in_any_number_of_batches() {
    let done = watchdog();
    // Bytes of scratch; counts of each piece.
    let none: &[&[u64]] = &[&[0, 0, 0]];
    let odd: &[&[u64]] = &[&[0, 1, 777], &[1023, 0, 5], &[64, 64, 64], &[0, 0, 1]];
    let many = vec![&[3u64, 40, 1][..]; 150];
    for (scratch_bytes, counts) in [(2048, odd), (5000, odd), (1 << 20, odd), (1 << 20, &many[..]), (4096, none)] {
        for dtype in [DType::F32, DType::F64] {
            for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather] {
                let what = format!("{collective:?} of {dtype} through {scratch_bytes} bytes");
                let transport = InProcess::in_rounds(3, ROUND_BYTES);
                let found: Vec<Vec<Vec<f64>>> = std::thread::scope(|scope| {
                    let ranks = (0..3).map(|rank| {
                        let transport: Arc<dyn Transport> = transport.clone();
                        let seat = Seat { rank, transport, nccl: true };
                        scope.spawn(move || exchanged(&seat, dtype, collective, counts, scratch_bytes))
                    });
                    let ranks: Vec<_> = ranks.collect();
                    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
                });
                for (rank, pieces) in found.iter().enumerate() {
                    for (counts, found) in counts.iter().zip(pieces) {
                        let rounded = |x: f64| if dtype == DType::F32 { f64::from(x as f32) } else { x };
                        let sum = |at: u64| {
                            let all = (0..3).map(|rank| rounded(number(rank, at)));
                            all.reduce(|sum, next| rounded(sum + next)).unwrap()
                        };
                        let (total, before) = (counts.iter().sum::<u64>(), counts[..rank].iter().sum::<u64>());
                        let firsts = |of: usize| counts[..of].iter().sum::<u64>();
                        let want: Vec<f64> = match collective {
                            Collective::AllReduce => (0..total).map(sum).collect(),
                            // Added to what is there, which is 1.
                            Collective::ReduceScatter => {
                                (0..counts[rank]).map(|at| rounded(1.0 + sum(before + at))).collect()
                            }
                            _ => (0..3)
                                .flat_map(|of| (0..counts[of]).map(move |at| (of, at)))
                                .map(|(of, at)| rounded(number(of, firsts(of) + at)))
                                .collect(),
                        };
                        assert_eq!(found, &want, "rank {rank}: {what}, {counts:?}");
                    }
                }
            }
        }
    }
    done.store(true, Ordering::Relaxed);
}

/// What a rank has of pieces after a collective.
fn exchanged(
    seat: &Seat,
    dtype: DType,
    collective: Collective,
    counts: &[&[u64]],
    scratch_bytes: u64,
) -> Vec<Vec<f64>> {
    let (context, mut nccl) = nccl_on(seat.rank, scratch_bytes);
    let (rank, size) = (seat.rank as usize, dtype.bytes());
    let mut arena = DeviceArena::take(&context, 1 << 20).unwrap();
    let stream = Stream::new(&context).unwrap();
    let operand = |tensor| Operand { tensor: TensorId(tensor), slot: Index::fixed(0), offset: Index::fixed(0) };
    let (mut next, mut pieces, mut stands, mut pinned) = (arena.base(), Vec::new(), Vec::new(), Vec::new());
    for counts in counts {
        let (total, before, own) = (counts.iter().sum::<u64>(), counts[..rank].iter().sum::<u64>(), counts[rank]);
        let mut take = |values: Vec<f64>| {
            let at = next;
            let bytes = bytes_of(dtype, &values);
            let room = Pinned::new(&context, bytes.len() as u64).unwrap();
            if !bytes.is_empty() {
                // SAFETY: as many bytes, which nothing else touches; the range lies in the arena, which nobody uses.
                unsafe {
                    room.base().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                    stream.copy_in(at, room.base(), bytes.len() as u64).unwrap();
                }
            }
            pinned.push(room);
            next += bytes.len() as u64;
            at
        };
        let all = |first: u64, count: u64| (first..first + count).map(|at| number(rank, at)).collect();
        let (input, output) = match collective {
            Collective::AllReduce => {
                let both = take(all(0, total));
                (both, both)
            }
            Collective::ReduceScatter => (take(all(0, total)), take(vec![1.0; own as usize])),
            _ => (take(all(before, own)), take(vec![f64::NAN; total as usize])),
        };
        stands
            .push((Stands { input, output, dtype }, if collective == Collective::ReduceScatter { own } else { total }));
        pieces.push(Piece { input: operand(0), output: operand(0), counts: counts.to_vec() });
    }
    let exchange = Exchange { collective, pieces, rank: seat.rank, peer: None, sequence: Index::fixed(0), last: false };
    let places: Vec<Stands> = stands.iter().map(|(stands, _)| *stands).collect();
    // SAFETY: all stands in the arena, and nothing else is at work in it.
    assert!(unsafe { nccl.meet(&exchange, 7, &places, seat, &stream) }.unwrap(), "{:?}", nccl.used());
    let read = |(stands, elements): &(Stands, u64)| {
        let mut bytes = vec![0; (elements * size) as usize];
        if !bytes.is_empty() {
            // SAFETY: as above; pageable memory is written before the stream is over.
            unsafe { stream.copy_out(bytes.as_mut_ptr(), stands.output, bytes.len() as u64) }.unwrap();
            stream.synchronize().unwrap();
        }
        numbers(dtype, &bytes)
    };
    let found = stands.iter().map(read).collect();
    nccl.close();
    stream.synchronize().unwrap();
    arena.retake(0).unwrap();
    found
}

/// NCCL on the GPU of that number, with so much scratch; in the context that is the thread's from now on.
fn nccl_on(ordinal: u32, scratch_bytes: u64) -> (Arc<Context>, Nccl) {
    let folder = cuda_stand_in::folder();
    let driver = Arc::new(Driver::load(&folder.join("libcuda.so.1")).unwrap());
    let compiler = Arc::new(Compiler::open(&folder.join("libnvrtc.so.13"), "13", Some(folder)).unwrap());
    let library = Arc::new(nccl::Library::load(&folder.join("nccl/libnccl.so.2")).unwrap());
    let context = Context::open(&driver, ordinal, None).unwrap();
    let nccl = Nccl::new(&library, &compiler, &context, scratch_bytes);
    (context, nccl)
}
