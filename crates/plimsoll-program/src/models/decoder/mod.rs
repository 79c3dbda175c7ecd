//! The decoder of the Llama, Mistral and Qwen family as Programs: training, evaluation, generation,
//! loading and saving.
//!
//! ```text
//! hidden₀ = embedding[tokens]
//! for each layer:   h = hidden + attention(norm(hidden)) · W_o
//!                   hidden' = h + swiglu(norm(h) · W_gate_up) · W_down
//! loss    = cross entropy(norm(hidden_L) · headᵀ), in blocks: full logits never exist
//! ```
//!
//! Here is what can be asked for, and the tensors that stay; the Programs are written in `forward`, `loss`,
//! `backward`, `generate` and `files`. How matrices are stored is in `matrices`, adapters in `lora`.
//!
//! Legend: N = B·T rows, D hidden, H heads, K kv heads, E head dim, C = (H+2K)·E, F ffn, V vocabulary, L layers,
//! r rank of adapters.

mod backward;
mod files;
mod forward;
mod generate;
mod lora;
mod loss;
mod matrices;

use self::lora::Adapter;
use self::matrices::Matrix;
use super::config::ModelConfig;
use crate::builder::Builder;
use crate::op::{Heads, OpKind};
use crate::program::{Block, Phase, Program, ProgramSet};
use crate::scalars::{METRIC_COUNT, METRICS, SCALAR_COUNT, SCALARS};
use crate::tensor::{Operand, Tensor, TensorId};
use crate::workspace::Kernels;
use plimsoll_core::{Category, DType, RecomputeLevel, WorkName};
use std::collections::HashMap;
use std::ops::Range;

pub(crate) use self::backward::STREAM;
pub use self::files::STAGING_BYTES;
pub use self::lora::{Lora, merge};
pub use self::loss::{head_blocks, loss_rows, streams_head};

/// How AdamW keeps its two moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdamState {
    /// In the wide type.
    #[default]
    Full,
    /// A byte an element, in blocks of 256 with a scale each, but for small tensors ([`crate::formats`]).
    Blockwise8,
}

/// The rule that turns gradients into weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// AdamW with decoupled decay of matrices.
    AdamW {
        /// β₁, β₂.
        betas: [f64; 2],
        /// Added to the root of the second moment.
        eps: f64,
        /// Decay of matrices.
        decay: f64,
        /// How the moments are kept.
        state: AdamState,
    },
    /// Stochastic gradient descent.
    Sgd {
        /// 0 = none, and no state.
        momentum: f64,
        /// Decay of matrices (added to the gradient).
        decay: f64,
    },
}

/// What is trained.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Method {
    /// Every weight.
    #[default]
    Full,
    /// Adapters of a frozen model.
    Lora(Lora),
}

impl Method {
    /// The adapters, where there are any.
    pub fn lora(&self) -> Option<&Lora> {
        match self {
            Method::Full => None,
            Method::Lora(lora) => Some(lora),
        }
    }
}

/// How the matrices of the layers are stored while they are frozen. Embeddings, head, norms and biases
/// always have the run's precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Base {
    /// In the run's precision.
    #[default]
    Plain,
    /// 8 bit, one scale a row, outliers not apart.
    Int8,
    /// 4 bit as QLoRA has it, scales quantised once more.
    Nf4,
}

/// Where weights come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// Normal numbers (norms one, biases zero).
    Random {
        /// Their seed.
        seed: u64,
    },
    /// A model directory; the type of each parameter in the file, in the order of `hf_parameters`.
    Files {
        /// One for each parameter.
        dtypes: Vec<DType>,
    },
    /// A run that is under way: `renew` brings what its `save` gives, in the run's precision, as often as it is run.
    Saved,
}

/// What a training run adds.
#[derive(Clone, Debug, PartialEq)]
pub struct Training {
    /// The rule.
    pub optimizer: Optimizer,
    /// What each layer that is this device's makes again, first layer first.
    pub recompute: Vec<RecomputeLevel>,
}

/// What generation adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation {
    /// Tokens that the cache can hold.
    pub capacity: u64,
    /// Tokens of the prompt that go in at once.
    pub chunk: u64,
}

/// What to build.
#[derive(Clone, Debug, PartialEq)]
pub struct Build<'a> {
    /// The model.
    pub config: &'a ModelConfig,
    /// The layers that are this device's: all of them, or a stage of a pipeline. The first stage has the embedding, the
    /// last one the final norm, the head and the loss. Blocks and slots count from the stage's first layer, names of files
    /// from the model's.
    pub layers: Range<u64>,
    /// Arithmetic, activations and weights.
    pub precision: DType,
    /// Whose kernels run.
    pub kernels: Kernels,
    /// T.
    pub sequence: u64,
    /// B.
    pub micro_batch: u64,
    /// Weights.
    pub source: Source,
    /// What is trained, or was: evaluation and generation compute with the adapters, too.
    pub method: Method,
    /// How matrices that are not trained are stored.
    pub base: Base,
    /// Whether the head waits elsewhere and comes in blocks, where it has enough of them ([`streams_head`]): then the
    /// loss takes all rows for each block, and makes its logits twice.
    pub streamed_head: bool,
    /// Forward, backward, update, checkpoints.
    pub training: Option<Training>,
    /// Forward pass and loss.
    pub evaluate: bool,
    /// Prompt to tokens.
    pub generation: Option<Generation>,
    /// Loading, saving, checkpoints. They do not depend on the recipe, so a search leaves them out.
    pub files: bool,
}

/// Writes down all Programs.
///
/// # Panics
/// Where matrices that are trained shall be stored quantised, or a stage of a pipeline shall generate: the caller refuses
/// that before.
pub fn build(what: &Build) -> ProgramSet {
    let mut decoder = Decoder::new(what);
    if what.files {
        decoder.load();
    }
    if let Some(training) = &what.training {
        decoder.train(training);
    }
    if what.evaluate {
        decoder.evaluate();
    }
    if let Some(generation) = what.generation {
        decoder.generate(generation);
    }
    decoder.builder.set
}

impl Build<'_> {
    /// Whether tokens come in here.
    fn is_first(&self) -> bool {
        self.layers.start == 0
    }

    /// Whether the loss is found here.
    fn is_last(&self) -> bool {
        self.layers.end == self.config.layers
    }

    /// Layers that are this device's.
    fn depth(&self) -> u32 {
        (self.layers.end - self.layers.start) as u32
    }
}

/// Tensors of weights; those that belong to other stages of a pipeline are not there.
struct Weights {
    embedding: Option<TensorId>,
    attention_norm: TensorId,
    qkv: Matrix,
    qkv_bias: Option<TensorId>,
    qk_norms: Option<(TensorId, TensorId)>,
    attention_out: Matrix,
    ffn_norm: TensorId,
    gate_up: Matrix,
    down: Matrix,
    /// The final norm and the head, which is the embedding where they are tied.
    top: Option<(TensorId, TensorId)>,
    rope_table: TensorId,
}

impl Weights {
    /// All that are computed with, in the order of a file, where no matrix is quantised.
    fn plain(&self) -> Vec<TensorId> {
        let mut list = Vec::from_iter(self.embedding);
        list.push(self.attention_norm);
        list.extend(self.qkv.plain());
        list.extend(self.qkv_bias);
        list.extend(self.qk_norms.iter().flat_map(|(q, k)| [*q, *k]));
        list.extend(self.attention_out.plain());
        list.push(self.ffn_norm);
        list.extend(self.gate_up.plain());
        list.extend(self.down.plain());
        if let Some((final_norm, head)) = self.top {
            list.push(final_norm);
            list.extend((self.embedding != Some(head)).then_some(head));
        }
        list
    }

    /// Whether a weight has a slot for each layer.
    fn of_layers(&self, weight: TensorId) -> bool {
        let outside = |(final_norm, head): (TensorId, TensorId)| weight == final_norm || weight == head;
        self.embedding != Some(weight) && !self.top.is_some_and(outside)
    }

    fn matrices(&self) -> [&Matrix; 4] {
        [&self.qkv, &self.attention_out, &self.gate_up, &self.down]
    }
}

struct Decoder<'a> {
    what: &'a Build<'a>,
    builder: Builder,
    weights: Weights,
    /// In the order of the targets.
    adapters: Vec<Adapter>,
    /// Wide copies of trained weights, where the arithmetic is too coarse to add small updates to.
    masters: HashMap<TensorId, TensorId>,
    scalars: TensorId,
    metrics: TensorId,
    shape: Heads,
    table_rows: u64,
}

impl<'a> Decoder<'a> {
    fn new(what: &'a Build<'a>) -> Decoder<'a> {
        let config = what.config;
        let frozen = what.training.is_none() || what.method.lora().is_some();
        assert!(what.base == Base::Plain || frozen, "matrices that are trained are not quantised");
        let mut builder = Builder::new(what.precision, what.kernels);
        let shape = Heads { heads: config.heads, kv_heads: config.kv_heads, head_dim: config.head_dim };
        let (d, v, layers) = (config.hidden, config.vocab, what.depth());
        let weight = |builder: &mut Builder, name: &str, dims: &[u64], slots: u32| {
            builder.persistent(name, dims, what.precision, Category::Weight, slots)
        };
        let matrix = |builder: &mut Builder, name| Matrix::new(builder, what, name);
        let b = &mut builder;
        let embeds = what.is_first() || what.is_last() && config.tied;
        let embedding = embeds.then(|| weight(b, "embedding", &[v, d], 1));
        let attention_norm = weight(b, "attention_norm", &[d], layers);
        let qkv = matrix(b, "qkv");
        let qkv_bias = config.qkv_bias.then(|| weight(b, "qkv_bias", &[shape.columns()], layers));
        let qk_norms = config
            .qk_norm
            .then(|| (weight(b, "q_norm", &[shape.head_dim], layers), weight(b, "k_norm", &[shape.head_dim], layers)));
        let attention_out = matrix(b, "attention_out");
        let ffn_norm = weight(b, "ffn_norm", &[d], layers);
        let gate_up = matrix(b, "gate_up");
        let down = matrix(b, "down");
        let top = what.is_last().then(|| {
            let final_norm = weight(b, "final_norm", &[d], 1);
            let tied = embedding.filter(|_| config.tied);
            (final_norm, tied.unwrap_or_else(|| weight(b, "head", &[v, d], 1)))
        });
        let table_rows = what.sequence.max(what.generation.map_or(0, |g| g.capacity));
        let wide = what.precision.wide();
        let rope_table = b.persistent("rope_table", &[table_rows, shape.head_dim], wide, Category::Weight, 1);
        let weights = Weights {
            embedding,
            attention_norm,
            qkv,
            qkv_bias,
            qk_norms,
            attention_out,
            ffn_norm,
            gate_up,
            down,
            top,
            rope_table,
        };
        let adapters = what.method.lora().map_or(vec![], |lora| lora.adapters(b, config, layers, what.precision));
        let scalars = b.persistent(SCALARS, &[SCALAR_COUNT], wide, Category::Staging, 1);
        let metrics = b.persistent(METRICS, &[METRIC_COUNT], DType::F64, Category::Staging, 1);
        let masters = HashMap::new();
        let mut decoder = Decoder { what, builder, weights, adapters, masters, scalars, metrics, shape, table_rows };
        if what.training.is_some() && what.precision != wide {
            for id in decoder.trained() {
                let master = decoder.beside(id, "master", Category::Optimizer);
                decoder.masters.insert(id, master);
            }
        }
        decoder
    }

    /// All trained tensors.
    fn trained(&self) -> Vec<TensorId> {
        match self.what.method {
            Method::Full => self.weights.plain(),
            Method::Lora(_) => self.adapters.iter().flat_map(|adapter| [adapter.a, adapter.b]).collect(),
        }
    }

    /// A wide tensor beside a weight, of the same shape.
    fn beside(&mut self, weight: TensorId, role: &str, category: Category) -> TensorId {
        let Tensor { name, shape, slots, .. } = self.builder.set.tensor(weight).clone();
        self.builder.persistent(&format!("{name}.{role}"), &shape, self.what.precision.wide(), category, slots)
    }

    /// What updates, files and checkpoints work on: the master of a weight, or the weight itself.
    fn master(&self, weight: TensorId) -> TensorId {
        self.masters.get(&weight).copied().unwrap_or(weight)
    }

    /// The weights that are computed with, made from their masters.
    fn weights_of_masters(&self) -> Vec<Block> {
        let copies = self.trained().into_iter().filter_map(|id| Some((id, *self.masters.get(&id)?)));
        copies
            .map(|(id, master)| {
                let tensor = self.builder.set.tensor(id);
                let (from, to) = (Operand::layer(master, 0), Operand::layer(id, 0));
                let cast = OpKind::Cast { from, to, elements: tensor.elements() };
                over_slots(tensor, cast)
            })
            .collect()
    }

    fn push(
        &mut self,
        work: WorkName,
        name: &str,
        inputs: Vec<TensorId>,
        outputs: Vec<TensorId>,
        blocks: Vec<Block>,
    ) -> usize {
        self.builder.set.programs.push(Program { work, name: name.into(), inputs, outputs, blocks });
        self.builder.set.programs.len() - 1
    }

    fn phase(&mut self, programs: Vec<usize>) {
        self.builder.set.phases.push(Phase { programs });
    }

    /// A Program that is a phase of its own, without inputs and outputs.
    fn alone(&mut self, work: WorkName, name: &str, blocks: Vec<Block>) {
        let program = self.push(work, name, vec![], vec![], blocks);
        self.phase(vec![program]);
    }
}

/// An op on each slot of a tensor.
fn over_slots(tensor: &Tensor, op: OpKind) -> Block {
    Block { name: tensor.name.clone(), first: 0, step: 1, repeat: tensor.slots, ops: vec![op.into()] }
}
