//! The decoder of all model families as Programs: training, evaluation, generation, loading and
//! saving.
//!
//! ```text
//! hidden₀ = embedding[tokens]
//! for each layer:   h = hidden + attention(norm(hidden)) · W_o
//!                   hidden' = h + glu(norm(h) · W_gate_up) · W_down
//! loss    = cross entropy(norm(hidden_L) · headᵀ), in blocks: full logits never exist
//! ```
//!
//! Some families norm the outputs of attention and of the feed-forward part, instead of their inputs or beside them:
//!
//! ```text
//! for each layer:   h = hidden + norm(attention(hidden) · W_o)
//!                   hidden' = h + norm(glu(h · W_gate_up) · W_down)
//! ```
//!
//! This module has the options and the resident weights. `forward`, `loss`, `backward`, `generate` and `files` write
//! the Programs. Storage of matrices is in `matrices`, adapters are in `lora`.
//!
//! Legend: N = B·T rows, D hidden, H heads, K kv heads, E head dim, C = (H+2K)·E, F ffn, V vocabulary, L layers,
//! r rank of adapters.

mod backward;
mod files;
mod forward;
mod generate;
mod layer_inputs;
mod lora;
mod loss;
mod matrices;

use self::lora::Adapter;
use self::matrices::Matrix;
use super::config::ModelConfig;
use crate::builder::Builder;
use crate::op::{Heads, OpKind};
use crate::program::{Block, Phase, Program, ProgramKind, ProgramSet};
use crate::scalars::{METRIC_COUNT, METRICS, SCALAR_COUNT, SCALARS};
use crate::tensor::{Operand, Tensor, TensorId};
use crate::workspace::Kernels;
use foldhash::HashMap;
use plimsoll_core::{Category, DType, RecomputeLevel, WorkKind};
use std::ops::Range;

pub(crate) use self::backward::RESIDUAL_GRADIENT;
pub use self::files::STAGING_BYTES;
pub use self::lora::{AdaptedModule, Lora, merge};
pub use self::loss::{head_blocks, loss_rows, streams_head};

/// Name suffix of the frozen copy of a trained weight with its initial values.
pub(crate) const INITIAL_SUFFIX: &str = ".initial";

/// The storage format of AdamW's two moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdamState {
    /// f32, or f64 in an f64 run.
    #[default]
    Full,
    /// 8-bit Adam (bitsandbytes): one byte per element, and an f32 scale per block of 256 elements. Tensors below 4096
    /// elements keep their moments in f32 or f64 ([`crate::formats`]).
    Blockwise8,
}

/// The optimizer of a run with its settings. The learning rate is not among them: it changes with each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// AdamW with decoupled weight decay of matrices.
    AdamW {
        /// Decay rates β₁ and β₂ of the first and second moment.
        betas: [f64; 2],
        /// Value added to the root of the second moment.
        eps: f64,
        /// Weight decay coefficient; applies to matrices only.
        decay: f64,
        /// Storage format of the moments.
        state: AdamState,
    },
    /// Stochastic gradient descent.
    Sgd {
        /// Momentum; 0 for none, which needs no state.
        momentum: f64,
        /// Weight decay coefficient. The update adds this coefficient · weight to the gradient of each matrix; other
        /// tensors do not decay.
        decay: f64,
    },
}

/// The training method.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Method {
    /// Training of all weights.
    #[default]
    Full,
    /// Training of low-rank adapters on a frozen model.
    Lora(Lora),
}

impl Method {
    /// Returns the settings of the LoRA adapters, and `None` if all weights are trained.
    pub fn lora(&self) -> Option<&Lora> {
        match self {
            Method::Full => None,
            Method::Lora(lora) => Some(lora),
        }
    }
}

/// The storage format of frozen layer matrices, as in QLoRA. Embedding, head, norms and biases always have the run's
/// precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Base {
    /// Not quantized: the run's precision.
    #[default]
    Plain,
    /// int8: one byte per element and an f32 scale per row, without separate outliers.
    Int8,
    /// nf4 as in QLoRA: 4 bits per element, with scales that are quantized themselves.
    Nf4,
}

/// The origin of the weights that a run starts with, or of its LoRA adapters ([`Lora::source`]).
#[derive(Clone, Debug, PartialEq)]
pub enum WeightSource {
    /// Random initialization. In a model, matrices are drawn from a normal distribution with standard deviation
    /// [`ModelConfig::init_std`], norms multiply by one and biases are zero. [`Lora::source`] describes that of adapters.
    Random {
        /// Seed of the random numbers.
        seed: u64,
    },
    /// The safetensors files of a model directory.
    Files {
        /// Dtype of each parameter in the files, in the order of [`ModelConfig::hf_parameters`], or of
        /// [`ModelConfig::adapter_parameters`] for adapters.
        dtypes: Vec<DType>,
    },
    /// A training run on other devices, for a device that only evaluates. Its Program [`ProgramKind::ReloadWeights`]
    /// reads, before each evaluation, the weights that [`ProgramKind::Save`] of the training devices writes.
    LiveRun,
}

/// Options of the Programs for training: forward and backward pass, update and checkpoints.
#[derive(Clone, Debug, PartialEq)]
pub struct Training {
    /// Optimizer with its settings.
    pub optimizer: Optimizer,
    /// Recompute level (which activations the backward pass recomputes) of each layer of this device, first layer
    /// first.
    pub recompute: Vec<RecomputeLevel>,
}

/// The Programs that compute log-probabilities of labels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scores {
    /// None.
    #[default]
    None,
    /// [`ProgramKind::Score`], under the present weights.
    Present,
    /// The same, and [`ProgramKind::Reference`], under the initial weights. If new adapters are trained, these are the
    /// weights without adapters. Otherwise the device holds a frozen copy of all trained weights.
    PresentAndInitial,
}

impl Scores {
    /// Returns the number of the Programs.
    pub fn count(self) -> u32 {
        match self {
            Scores::None => 0,
            Scores::Present => 1,
            Scores::PresentAndInitial => 2,
        }
    }
}

/// Options of the Programs for generation: prefill and decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation {
    /// Sequences that are generated at once. Each has a slot: a key-value cache of its own.
    pub slots: u64,
    /// Tokens that the key-value cache of a sequence can hold.
    pub capacity: u64,
    /// Prompt tokens that one call of the prefill Program processes: consecutive ones of the prompt with one slot, and with
    /// several slots parts of [`PART_TOKENS`] consecutive tokens of any prompts.
    pub chunk: u64,
}

/// Number of consecutive tokens of one prompt in a chunk that has tokens of several prompts. The last part of a prompt is
/// padded.
pub const PART_TOKENS: u64 = 8;

impl Generation {
    /// Returns the number of parts of a chunk, and the tokens of a part.
    ///
    /// # Panics
    /// If the chunk of several slots is no whole number of parts.
    pub fn parts(&self) -> (u64, u64) {
        if self.slots == 1 {
            return (1, self.chunk);
        }
        assert!(self.chunk.is_multiple_of(PART_TOKENS), "chunks have whole parts, not {} tokens", self.chunk);
        (self.chunk / PART_TOKENS, PART_TOKENS)
    }
}

/// Options of [`build`], which makes the Programs of one device from a model configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct BuildOptions<'a> {
    /// Model configuration.
    pub config: &'a ModelConfig,
    /// Layers of this device: all layers, or those of a pipeline stage. The first stage has the embedding; the last has
    /// the final norm, the head and the loss. Layer numbers in Programs count from the first layer of the stage, those
    /// in file names from the first layer of the model.
    pub layers: Range<u64>,
    /// Dtype of arithmetic, activations and weights.
    pub precision: DType,
    /// Kernels that run the ops (CPU or CUDA); they determine workspaces and the blocks of the loss.
    pub kernels: Kernels,
    /// T: tokens per sequence.
    pub sequence: u64,
    /// B: sequences per micro-batch.
    pub micro_batch: u64,
    /// Origin of the weights with which the run starts.
    pub source: WeightSource,
    /// Training method: all weights or LoRA adapters. Evaluation and generation use the adapters too.
    pub method: Method,
    /// Storage format of frozen matrices.
    pub base: Base,
    /// Whether the device holds only two blocks of the output head at a time, because the head is offloaded to the
    /// host. The loss then processes all tokens for each block, and computes logits twice. Has no effect if the head
    /// has too few blocks ([`streams_head`]).
    pub streamed_head: bool,
    /// Options of the Programs for training (forward, backward, update, checkpoints); `None` builds none of them.
    pub training: Option<Training>,
    /// Whether to build the evaluation Program.
    pub evaluate: bool,
    /// The Programs for log-probabilities of labels.
    pub scores: Scores,
    /// Divisor of the logits in the loss and the score. 1 except where the loss is over samples of another temperature.
    pub temperature: f64,
    /// Options of the Programs for generation (prefill and decode); `None` builds neither.
    pub generation: Option<Generation>,
    /// Whether to build the Programs for loading, saving and checkpoints. They do not depend on the planner's choices,
    /// so its search omits them.
    pub files: bool,
}

/// Builds the Programs of one device (forward, backward, update, load, save, …) for a decoder, as the options ask for.
///
/// # Panics
/// Panics if matrices are both trained and quantized, which the caller must refuse. Also panics if the number of
/// recompute levels is not the number of layers.
pub fn build(options: &BuildOptions) -> ProgramSet {
    let mut decoder = Decoder::new(options);
    if options.files {
        decoder.load();
    }
    if let Some(training) = &options.training {
        decoder.train(training);
    }
    if options.evaluate {
        decoder.evaluate();
    }
    if options.scores != Scores::None {
        decoder.score();
    }
    if options.scores == Scores::PresentAndInitial {
        decoder.reference();
    }
    if let Some(generation) = options.generation {
        decoder.generate(generation);
    }
    decoder.builder.set
}

impl BuildOptions<'_> {
    /// Returns whether this device has the first layer, as the first pipeline stage or the only device.
    fn is_first(&self) -> bool {
        self.layers.start == 0
    }

    /// Returns whether this device computes the loss, as the last pipeline stage or the only device.
    fn is_last(&self) -> bool {
        self.layers.end == self.config.layers
    }

    /// Returns whether the run trains new adapters, without which the model has its initial values.
    fn starts_without_adapters(&self) -> bool {
        self.method.lora().is_some_and(|lora| matches!(lora.source, WeightSource::Random { .. }))
    }

    /// Returns the number of layers of this device.
    fn depth(&self) -> u32 {
        (self.layers.end - self.layers.start) as u32
    }
}

/// The weight tensors of this device.
#[derive(Clone)]
struct Weights {
    embedding: Option<TensorId>,
    /// Norm of the input of attention, if the family has one.
    attention_norm: Option<TensorId>,
    qkv: Matrix,
    qkv_bias: Option<TensorId>,
    qk_norms: Option<(TensorId, TensorId)>,
    attention_out: Matrix,
    attention_out_bias: Option<TensorId>,
    /// Norm of the output of attention, if the family has one.
    attention_output_norm: Option<TensorId>,
    /// Norm of the input of the feed-forward part, if the family has one.
    ffn_norm: Option<TensorId>,
    gate_up: Matrix,
    gate_up_bias: Option<TensorId>,
    down: Matrix,
    down_bias: Option<TensorId>,
    /// Norm of the output of the feed-forward part, if the family has one.
    ffn_output_norm: Option<TensorId>,
    /// Final norm and output head; the head is the embedding tensor if both are tied. `None` on all pipeline stages but
    /// the last.
    top: Option<(TensorId, TensorId)>,
    rope_table: TensorId,
}

impl Weights {
    /// Adds the weights of a device. `table_shape` is that of the rotary table.
    fn new(b: &mut Builder, options: &BuildOptions, table_shape: [u64; 2]) -> Weights {
        let config = options.config;
        let (d, v, layers) = (config.hidden, config.vocab, options.depth());
        let weight = |builder: &mut Builder, name: &str, dims: &[u64], slots: u32| {
            builder.persistent(name, dims, options.precision, Category::Weight, slots)
        };
        let matrix = |builder: &mut Builder, name| Matrix::new(builder, options, name);
        let bias = |builder: &mut Builder, matrix: &Matrix| {
            let target = matrix.target().filter(|target| target.has_bias(config))?;
            Some(weight(builder, target.bias(), &[matrix.rows], layers))
        };
        let embeds = options.is_first() || options.is_last() && config.tied;
        let embedding = embeds.then(|| weight(b, "embedding", &[v, d], 1));
        let norm = |b: &mut Builder, name, is_present: bool| is_present.then(|| weight(b, name, &[d], layers));
        let (of_inputs, of_outputs) = (config.model_type.norms_inputs(), config.model_type.norms_outputs());
        let attention_norm = norm(b, "attention_norm", of_inputs);
        let qkv = matrix(b, "qkv");
        let qkv_bias = bias(b, &qkv);
        let qk_norms = config
            .qk_norm_widths()
            .map(|[queries, keys]| (weight(b, "q_norm", &[queries], layers), weight(b, "k_norm", &[keys], layers)));
        let attention_out = matrix(b, "attention_out");
        let attention_out_bias = bias(b, &attention_out);
        let attention_output_norm = norm(b, "attention_output_norm", of_outputs);
        let ffn_norm = norm(b, "ffn_norm", of_inputs);
        let gate_up = matrix(b, "gate_up");
        let gate_up_bias = bias(b, &gate_up);
        let down = matrix(b, "down");
        let down_bias = bias(b, &down);
        let ffn_output_norm = norm(b, "ffn_output_norm", of_outputs);
        let top = options.is_last().then(|| {
            let final_norm = weight(b, "final_norm", &[d], 1);
            let tied = embedding.filter(|_| config.tied);
            (final_norm, tied.unwrap_or_else(|| weight(b, "head", &[v, d], 1)))
        });
        let wide = options.precision.wide();
        let rope_table = b.persistent("rope_table", &table_shape, wide, Category::Weight, 1);
        Weights {
            embedding,
            attention_norm,
            qkv,
            qkv_bias,
            qk_norms,
            attention_out,
            attention_out_bias,
            attention_output_norm,
            ffn_norm,
            gate_up,
            gate_up_bias,
            down,
            down_bias,
            ffn_output_norm,
            top,
            rope_table,
        }
    }

    /// Returns all weights that are not quantized and may be trained, from the embedding to the head. A tied head is
    /// not listed twice.
    fn plain(&self) -> Vec<TensorId> {
        let mut list = Vec::from_iter(self.embedding);
        list.extend(self.attention_norm);
        list.extend(self.qkv.plain());
        list.extend(self.qkv_bias);
        list.extend(self.qk_norms.iter().flat_map(|(q, k)| [*q, *k]));
        list.extend(self.attention_out.plain());
        list.extend(self.attention_out_bias);
        list.extend(self.attention_output_norm);
        list.extend(self.ffn_norm);
        list.extend(self.gate_up.plain());
        list.extend(self.gate_up_bias);
        list.extend(self.down.plain());
        list.extend(self.down_bias);
        list.extend(self.ffn_output_norm);
        if let Some((final_norm, head)) = self.top {
            list.push(final_norm);
            list.extend((self.embedding != Some(head)).then_some(head));
        }
        list
    }

    /// Returns these weights with the tensors that `copies` has instead of those that it names.
    fn replaced_by(&self, copies: &HashMap<TensorId, TensorId>) -> Weights {
        let copy = |id: TensorId| copies.get(&id).copied().unwrap_or(id);
        let of = |id: Option<TensorId>| id.map(copy);
        let both = |(one, other): (TensorId, TensorId)| (copy(one), copy(other));
        Weights {
            embedding: of(self.embedding),
            attention_norm: of(self.attention_norm),
            qkv: self.qkv.replaced_by(copy),
            qkv_bias: of(self.qkv_bias),
            qk_norms: self.qk_norms.map(both),
            attention_out: self.attention_out.replaced_by(copy),
            attention_out_bias: of(self.attention_out_bias),
            attention_output_norm: of(self.attention_output_norm),
            ffn_norm: of(self.ffn_norm),
            gate_up: self.gate_up.replaced_by(copy),
            gate_up_bias: of(self.gate_up_bias),
            down: self.down.replaced_by(copy),
            down_bias: of(self.down_bias),
            ffn_output_norm: of(self.ffn_output_norm),
            top: self.top.map(both),
            rope_table: self.rope_table,
        }
    }

    /// Returns whether a weight has a slot for each layer.
    fn has_layer_slots(&self, weight: TensorId) -> bool {
        let outside = |(final_norm, head): (TensorId, TensorId)| weight == final_norm || weight == head;
        self.embedding != Some(weight) && !self.top.is_some_and(outside)
    }

    fn matrices(&self) -> [&Matrix; 4] {
        [&self.qkv, &self.attention_out, &self.gate_up, &self.down]
    }
}

struct Decoder<'a> {
    options: &'a BuildOptions<'a>,
    builder: Builder,
    weights: Weights,
    /// LoRA adapters in the order of their targets, one for each rank and scale; empty if all weights are trained.
    adapters: Vec<Adapter>,
    /// Master weight of each trained bf16 weight: an f32 copy, because bf16 loses small updates. Empty in other
    /// precisions and without training.
    masters: HashMap<TensorId, TensorId>,
    /// Frozen copy of each trained weight, with its initial values. Empty unless [`ProgramKind::Reference`] reads them.
    initial: HashMap<TensorId, TensorId>,
    scalars: TensorId,
    metrics: TensorId,
    shape: Heads,
    /// Rows of the rotary table for each rotation of the model.
    table_rows: u64,
    /// Number of rows of the rotary table by which the row of a key lies behind that of a query at the same position.
    key_shift: u64,
}

impl<'a> Decoder<'a> {
    fn new(options: &'a BuildOptions<'a>) -> Decoder<'a> {
        let config = options.config;
        let frozen = options.training.is_none() || options.method.lora().is_some();
        assert!(options.base == Base::Plain || frozen, "trained matrices cannot be quantized");
        let mut builder = Builder::new(options.precision, options.kernels);
        let shape = Heads { heads: config.heads, kv_heads: config.kv_heads, head_dim: config.head_dim };
        let table_rows = options.sequence.max(options.generation.map_or(0, |g| g.capacity));
        let wide = options.precision.wide();
        let query_rows = table_rows * config.rotations().len() as u64;
        let key_shift = config.query_growth_within(table_rows).map_or(0, |_| query_rows);
        let table_shape = [query_rows + key_shift, shape.head_dim];
        let weights = Weights::new(&mut builder, options, table_shape);
        let b = &mut builder;
        let own_layers = options.layers.clone();
        let adapters =
            options.method.lora().map_or(vec![], |lora| lora.adapters(b, config, own_layers, options.precision));
        let scalars = b.persistent(SCALARS, &[SCALAR_COUNT], wide, Category::Staging, 1);
        let metrics = b.persistent(METRICS, &[METRIC_COUNT], DType::F64, Category::Staging, 1);
        let (masters, initial) = (HashMap::default(), HashMap::default());
        let mut decoder = Decoder {
            options,
            builder,
            weights,
            adapters,
            masters,
            initial,
            scalars,
            metrics,
            shape,
            table_rows,
            key_shift,
        };
        if options.scores == Scores::PresentAndInitial && !options.starts_without_adapters() {
            decoder.add_initial();
        }
        if options.training.is_some() && options.precision != wide {
            for id in decoder.trained_weights() {
                let master = decoder.add_companion(id, "master", Category::Optimizer);
                decoder.masters.insert(id, master);
            }
        }
        decoder
    }

    /// Adds a frozen copy of each trained weight for its initial values.
    fn add_initial(&mut self) {
        for id in self.trained_weights() {
            let Tensor { name, shape, dtype, slots, .. } = self.builder.set.tensor(id).clone();
            let name = format!("{name}{INITIAL_SUFFIX}");
            let copy = self.builder.persistent(&name, &shape, dtype, Category::Weight, slots);
            self.initial.insert(id, copy);
        }
    }

    /// Returns all trained tensors: the weights, or the adapters if the model is frozen.
    fn trained_weights(&self) -> Vec<TensorId> {
        match self.options.method {
            Method::Full => self.weights.plain(),
            Method::Lora(_) => {
                // Adjacent adapters of different ranks or scales may share tensors.
                let of_targets = self.adapters.chunk_by(|one, next| one.a == next.a);
                of_targets.flat_map(|adapters| [adapters[0].a, adapters[0].b]).collect()
            }
        }
    }

    /// Adds a persistent tensor of the shape of a weight, such as its gradient, named `WEIGHT.ROLE`. Its dtype is f32,
    /// or f64 in an f64 run.
    fn add_companion(&mut self, weight: TensorId, role: &str, category: Category) -> TensorId {
        let Tensor { name, shape, slots, .. } = self.builder.set.tensor(weight).clone();
        self.builder.persistent(&format!("{name}.{role}"), &shape, self.options.precision.wide(), category, slots)
    }

    /// Returns the tensor that updates, files and checkpoints use: the master weight, or the weight itself if it has
    /// none.
    fn master_or_weight(&self, weight: TensorId) -> TensorId {
        self.masters.get(&weight).copied().unwrap_or(weight)
    }

    /// Returns the blocks that round master weights (f32) to the weights that forward and backward passes use (bf16).
    /// Empty if there are no masters.
    fn cast_masters(&self) -> Vec<Block> {
        let copies = self.trained_weights().into_iter().filter_map(|id| Some((id, *self.masters.get(&id)?)));
        copies
            .map(|(id, master)| {
                let tensor = self.builder.set.tensor(id);
                let (from, to) = (Operand::layer(master, 0), Operand::layer(id, 0));
                let cast = OpKind::Cast { from, to, elements: tensor.elements() };
                for_each_slot(tensor, cast)
            })
            .collect()
    }

    /// Returns the blocks that copy the trained weights to the frozen copies of their initial values.
    fn copy_initial(&self) -> Vec<Block> {
        let copies = self.trained_weights().into_iter().filter_map(|id| Some((id, *self.initial.get(&id)?)));
        copies
            .map(|(id, copy)| {
                let tensor = self.builder.set.tensor(id);
                let (from, to) = (Operand::layer(id, 0), Operand::layer(copy, 0));
                for_each_slot(tensor, OpKind::Cast { from, to, elements: tensor.elements() })
            })
            .collect()
    }

    /// Adds a Program and returns its index in [`crate::ProgramSet::programs`].
    fn push_program(
        &mut self,
        work: WorkKind,
        kind: ProgramKind,
        inputs: Vec<TensorId>,
        outputs: Vec<TensorId>,
        mut blocks: Vec<Block>,
    ) -> usize {
        blocks.iter_mut().for_each(|block| block.ops.shrink_to_fit());
        blocks.shrink_to_fit();
        self.builder.set.programs.push(Program { work, kind, inputs, outputs, blocks });
        self.builder.set.programs.len() - 1
    }

    /// Adds a phase (Programs that run in sequence and share activations) of the Programs with these indices.
    fn push_phase(&mut self, programs: Vec<usize>) {
        self.builder.set.phases.push(Phase { programs });
    }

    /// Adds a Program without inputs and outputs, which shares no activations with others: a phase of its own.
    fn push_program_as_phase(&mut self, work: WorkKind, kind: ProgramKind, blocks: Vec<Block>) {
        let program = self.push_program(work, kind, vec![], vec![], blocks);
        self.push_phase(vec![program]);
    }
}

/// Returns a block that applies an op to each slot (layer) of a tensor.
fn for_each_slot(tensor: &Tensor, op: OpKind) -> Block {
    Block { name: tensor.name.clone(), first: 0, step: 1, repeat: tensor.slots, ops: vec![op.into()] }
}
