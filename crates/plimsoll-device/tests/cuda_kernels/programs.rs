//! Whole programs, op by op through `ops::launches`, against the CPU executor in f64: checks addresses and layouts of
//! all operands.

use super::optimizer::update_scalars;
use super::*;
use plimsoll_core::{RecomputeLevel, Space};
use plimsoll_device::cpu::executor;
use plimsoll_device::cuda::kernels::ops::{self, OperandLookup};
use plimsoll_device::device::Device;
use plimsoll_program::models::config::{Extras, ModelConfig, ModelType, QkNorm, QueryGrowth};
use plimsoll_program::models::decoder::{
    AdamState, Base, BuildOptions, Generation, Method, Optimizer, Scores, Training, WeightSource, build,
};
use plimsoll_program::{OpKind, Operand, Placement, ProgramKind, ProgramSet, TensorId};

const BATCH: u64 = 2;
const SEQUENCE: u64 = 37;
const CHUNK: u64 = 5;
/// More workspace than any op of this small model needs.
const SCRATCH: usize = 1 << 16;

/// A model with every feature: grouped heads, biases, head norms, a tied head, scaled positions, a window and
/// no rotation in one layer each, and multipliers.
fn model() -> ModelConfig {
    ModelConfig {
        model_type: ModelType::Qwen3,
        hidden: 20,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
        ffn: 27,
        vocab: 61,
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

/// Returns all kinds of layers: [`model`], the same model with norms of the outputs of attention and feed-forward part,
/// and of all heads together, one with norms of inputs and outputs, and with caps of scores and logits, and one with two
/// rotary bases and queries that grow with their position.
fn models() -> [ModelConfig; 4] {
    let norms_outputs = ModelConfig { model_type: ModelType::Olmo2, qk_norm: Some(QkNorm::AllHeads), ..model() };
    let extras = Extras { score_softcap: Some(2.0), logit_softcap: Some(3.0), ..model().extras };
    let norms_both = ModelConfig { model_type: ModelType::Gemma2, extras, ..model() };
    let unrotated_layers = vec![];
    let query_growth = Some(QueryGrowth { beta: 0.5, period: 3 });
    let extras = Extras {
        logit_softcap: Some(3.0),
        local_rope_theta: Some(50.0),
        unrotated_layers,
        query_growth,
        ..model().extras
    };
    let two_bases = ModelConfig { model_type: ModelType::Gemma3Text, extras, ..model() };
    [model(), norms_outputs, norms_both, two_bases]
}

fn programs(config: &ModelConfig, precision: DType) -> ProgramSet {
    build(&BuildOptions {
        config,
        layers: 0..config.layers,
        precision,
        kernels: Kernels::Cpu { threads: 1 },
        sequence: SEQUENCE,
        micro_batch: BATCH,
        source: WeightSource::Random { seed: 4 },
        method: Method::Full,
        base: Base::Plain,
        streamed_head: false,
        training: Some(Training {
            // The epsilon exceeds the rounding of gradients; a smaller one would magnify rounding of gradients near
            // 0.
            optimizer: Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-3, decay: 0.1, state: AdamState::Full },
            recompute: vec![RecomputeLevel::Nothing, RecomputeLevel::Block],
        }),
        evaluate: true,
        scores: Scores::None,
        temperature: 1.0,
        generation: Some(Generation { slots: 1, capacity: 16, chunk: CHUNK }),
        files: true,
    })
}

/// The kernels as a device: each slot of each tensor has its own buffer.
struct ShimDevice {
    gpu: Gpu,
    set: ProgramSet,
    slots: Vec<Vec<Address>>,
    scratch: Address,
}

/// Resolves an op's operands in one iteration of its block.
struct IterationOperands<'a>(&'a ShimDevice, i64);

impl IterationOperands<'_> {
    fn slot(&self, operand: &Operand) -> (Address, usize) {
        let slots = &self.0.slots[operand.tensor.0 as usize];
        let slot = operand.slot.at(self.1, 0).rem_euclid(slots.len() as i64);
        (slots[slot as usize], operand.offset.at(self.1, 0) as usize)
    }
}

impl OperandLookup for IterationOperands<'_> {
    fn real(&self) -> Real {
        Real::F32
    }

    fn target(&self) -> Target {
        TARGET
    }

    fn address_of(&self, operand: &Operand) -> Address {
        let tensor = self.0.set.tensor(operand.tensor);
        // Workspaces in programs for the CPU have CPU sizes.
        if tensor.category == plimsoll_core::Category::Workspace {
            return self.0.scratch;
        }
        let (slot, offset) = self.slot(operand);
        slot + offset as u64 * tensor.dtype.bytes()
    }

    fn dtype(&self, operand: &Operand) -> DType {
        self.0.set.tensor(operand.tensor).dtype
    }

    fn index(&self, index: plimsoll_program::Index) -> i64 {
        index.at(self.1, 0)
    }
}

impl ShimDevice {
    fn new(set: ProgramSet) -> ShimDevice {
        let mut gpu = Gpu::new(0);
        let mut slots = Vec::new();
        for tensor in &set.tensors {
            let kind = match tensor.dtype {
                DType::F64 => Kind::F64,
                DType::I32 => Kind::I32,
                _ => Kind::F32,
            };
            let held = tensor.space != Space::File && tensor.category != plimsoll_core::Category::Workspace;
            let elements = if held { tensor.elements() as usize } else { 0 };
            slots.push((0..tensor.slots).map(|_| gpu.allocate(kind, elements)).collect());
        }
        let scratch = gpu.allocate(Kind::F32, SCRATCH);
        ShimDevice { gpu, set, slots, scratch }
    }

    fn run(&mut self, program: ProgramKind) {
        let trace: Vec<(OpKind, i64)> =
            self.set.program(program).unwrap().trace().map(|(op, at)| (op.kind.clone(), at)).collect();
        for (kind, variable) in trace {
            if let OpKind::Product { .. } = kind {
                self.product(&kind, variable);
            } else {
                let launches = ops::launches(&kind, &IterationOperands(self, variable)).expect("an op of kernels");
                self.gpu.run(&launches);
            }
        }
    }

    /// Computes a matrix product as the library does on a GPU; a kernel adds the bias, as if the library could not
    /// fuse it.
    fn product(&mut self, kind: &OpKind, variable: i64) {
        let OpKind::Product {
            a, b, out, bias, residual, m, n, k, a_transposed, b_transposed, scale, accumulate, ..
        } = kind
        else {
            unreachable!()
        };
        let operands = IterationOperands(self, variable);
        let part = |operand: &Operand, elements: u64| {
            let (slot, offset) = operands.slot(operand);
            self.gpu.get(slot)[offset..offset + elements as usize].to_vec()
        };
        let (a, b, (slot, offset)) = (part(a, m * k), part(b, k * n), operands.slot(out));
        let residual = residual.map(|residual| part(&residual, m * n));
        let mut whole = self.gpu.get(slot);
        let mut scratch = scratch(workspace::cpu::product(1, *m, *n, *k));
        let whole_ones = cpu::Product::new(*m as usize, *n as usize, *k as usize, &a, &b);
        let product = cpu::Product {
            b_transposed: *b_transposed,
            residual: residual.as_deref(),
            scale: *scale,
            accumulate: *accumulate,
            ..if *a_transposed { whole_ones.a_transposed() } else { whole_ones }
        };
        cpu::product(&pool(), product, &mut whole[offset..offset + (m * n) as usize], &mut scratch);
        let launches =
            bias.map(|bias| add_rows(Real::F32, operands.address_of(&bias), 0, operands.address_of(out), *n, *m, *n));
        self.gpu.set(slot, &whole);
        self.gpu.run(launches.as_ref().map_or(&[], |launches| launches));
    }

    fn get(&self, tensor: TensorId, slot: u32) -> Vec<f64> {
        self.gpu.get(self.slots[tensor.0 as usize][slot as usize])
    }

    fn set(&mut self, tensor: TensorId, values: &[f64]) {
        self.gpu.set(self.slots[tensor.0 as usize][0], values);
    }
}

/// Returns a placement without overlaps.
fn disjoint_placement(set: &ProgramSet) -> Placement {
    let mut next = 0;
    let mut offsets = Vec::new();
    for tensor in &set.tensors {
        let held = tensor.space != Space::File;
        let places =
            (0..tensor.slots).map(|slot| held.then_some(next + u64::from(slot) * tensor.bytes().next_multiple_of(256)));
        offsets.push(places.collect());
        next += if held { u64::from(tensor.slots) * tensor.bytes().next_multiple_of(256) } else { 0 };
    }
    Placement { offsets, arena_bytes: next, ..Placement::default() }
}

/// Both devices, with equal weights.
struct DevicePair {
    shim: ShimDevice,
    cpu: Box<dyn Device>,
}

impl DevicePair {
    fn new(config: &ModelConfig) -> DevicePair {
        let set = programs(config, DType::F64);
        let placement = disjoint_placement(&set);
        let cpu = executor::open(set, placement, DType::F64, 1, None).unwrap();
        let mut both = DevicePair { shim: ShimDevice::new(programs(config, DType::F32)), cpu };
        both.shim.run(ProgramKind::Load);
        for id in both.tensors(|tensor| tensor.category == plimsoll_core::Category::Weight) {
            for slot in 0..both.shim.set.tensor(id).slots {
                let bytes: Vec<u8> = both.shim.get(id, slot).iter().flat_map(|x| x.to_le_bytes()).collect();
                both.cpu.write(id, slot, &bytes);
            }
        }
        let scalars = both.shim.set.find("scalars").unwrap();
        let mut values = update_scalars();
        values[Scalar::InverseTokens as usize] = 1.0 / 64.0;
        both.put(scalars, &values);
        both
    }

    fn tensors(&self, which: impl Fn(&plimsoll_program::Tensor) -> bool) -> Vec<TensorId> {
        let all = self.shim.set.tensors.iter().enumerate();
        all.filter(|(_, tensor)| which(tensor)).map(|(id, _)| TensorId(id as u32)).collect()
    }

    fn put(&mut self, tensor: TensorId, values: &[f64]) {
        self.shim.set(tensor, values);
        let bytes: Vec<u8> = match self.shim.set.tensor(tensor).dtype {
            DType::I32 => values.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        self.cpu.write(tensor, 0, &bytes);
    }

    fn put_named(&mut self, name: &str, values: &[f64]) {
        let tensor = self.shim.set.find(name).unwrap();
        self.put(tensor, values);
    }

    fn run(&mut self, program: ProgramKind) {
        self.shim.run(program);
        self.cpu.run(program).unwrap();
    }

    /// Compares a tensor by the largest difference relative to its root mean square.
    fn compare(&mut self, tensor: TensorId, tolerance: f64) {
        let Tensor { name, slots, .. } = &self.shim.set.tensor(tensor).clone();
        let integers = self.shim.set.tensor(tensor).dtype == DType::I32;
        for slot in 0..*slots {
            let got = self.shim.get(tensor, slot);
            let mut bytes = vec![0; got.len() * if integers { 4 } else { 8 }];
            self.cpu.read(tensor, slot, &mut bytes);
            let want: Vec<f64> = if integers {
                bytes.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap()).into()).collect()
            } else {
                bytes.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect()
            };
            let size = (want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                assert!((got - want).abs() <= tolerance * size, "{name}.{slot}[{i}]: {got} for {want}, of {size}");
            }
        }
    }

    fn batch(&mut self, prefix: &str) {
        let (mut draw, rows) = (Draw(12), (BATCH * SEQUENCE) as usize);
        let integers = |x: Vec<i32>| x.into_iter().map(f64::from).collect::<Vec<_>>();
        let starts = documents(&mut draw, BATCH as usize, SEQUENCE as usize);
        let positions = starts.iter().enumerate().map(|(i, start)| (i % SEQUENCE as usize) as i32 - start);
        let mut labels = draw.integers(rows, 61);
        labels[3] = -100;
        self.put_named(&format!("{prefix}tokens"), &integers(draw.integers(rows, 61)));
        self.put_named(&format!("{prefix}positions"), &integers(positions.collect()));
        self.put_named(&format!("{prefix}document_start"), &integers(starts));
        self.put_named(&format!("{prefix}labels"), &integers(labels));
        self.put_named(&format!("{prefix}token_weights"), &vec![1.0; rows]);
    }
}

use plimsoll_program::Tensor;

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn training_step_matches_cpu() {
    for config in models() {
        let mut both = DevicePair::new(&config);
        both.batch("train.");
        for program in [
            ProgramKind::InitOptimizer,
            ProgramKind::BeginStep,
            ProgramKind::Forward,
            ProgramKind::Backward,
            ProgramKind::GradientNorm,
        ] {
            both.run(program);
        }
        for id in both.tensors(|tensor| tensor.category == plimsoll_core::Category::Gradient) {
            both.compare(id, 2e-5);
        }
        for name in ["metrics", "scalars"] {
            both.compare(both.shim.set.find(name).unwrap(), 1e-5);
        }
        both.run(ProgramKind::Update);
        for id in both.tensors(|tensor| tensor.category == plimsoll_core::Category::Optimizer) {
            both.compare(id, 1e-4);
        }
        for id in both.tensors(|tensor| tensor.category == plimsoll_core::Category::Weight) {
            both.compare(id, 1e-4);
        }
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn evaluation_matches_cpu() {
    for config in models() {
        let mut both = DevicePair::new(&config);
        both.batch("evaluate.");
        both.put_named("metrics", &vec![0.0; METRIC_COUNT as usize]);
        both.run(ProgramKind::Evaluate);
        both.compare(both.shim.set.find("metrics").unwrap(), 1e-5);
        both.compare(both.shim.set.find("evaluate.correct").unwrap(), 0.0);
    }
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn prefill_and_decode_match_cpu() {
    for config in models() {
        let mut both = DevicePair::new(&config);
        for (program, first, rows) in [(ProgramKind::Prefill, 0, CHUNK), (ProgramKind::Decode, CHUNK, 1)] {
            let mut scalars = update_scalars();
            scalars[Scalar::LastRow as usize] = (rows - 1) as f64;
            both.put_named("scalars", &scalars);
            let positions: Vec<f64> = (first..first + rows).map(|at| at as f64).collect();
            both.put_named(&format!("{program}.positions"), &positions);
            both.put_named(&format!("{program}.places"), &positions);
            both.put_named(&format!("{program}.tokens"), &positions.iter().map(|at| 7.0 * at).collect::<Vec<_>>());
            both.run(program);
            both.compare(both.shim.set.find(&format!("{program}.logits")).unwrap(), 2e-5);
        }
    }
}
