//! The decoder of the Llama, Mistral and Qwen family as Programs: training, evaluation, generation,
//! loading and saving.
//!
//! ```text
//! hidden₀ = embedding[tokens]
//! for each layer:   h = hidden + attention(norm(hidden)) · W_o
//!                   hidden' = h + swiglu(norm(h) · W_gate_up) · W_down
//! loss    = cross entropy(norm(hidden_L) · headᵀ), in blocks of rows: full logits never exist
//! ```
//!
//! Legend: N = B·T rows, D hidden, H heads, K kv heads, E head dim, C = (H+2K)·E, F ffn, V vocabulary, L layers.

use super::config::ModelConfig;
use super::weights::Parameter;
use crate::builder::{Builder, Product};
use crate::derivative::Tape;
use crate::op::{Heads, Op, OpKind, Queue};
use crate::passes::recompute::recompute;
use crate::program::{Block, Phase, Program, ProgramSet};
use crate::scalars::{METRIC_COUNT, METRICS, SCALAR_COUNT, SCALARS};
use crate::tensor::{Index, Lifetime, Operand, Tensor, TensorId};
use crate::workspace::Kernels;
use plimsoll_core::{Category, DType, RecomputeLevel, Space, WorkName};
use std::collections::{HashMap, HashSet};

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
    },
    /// Stochastic gradient descent.
    Sgd {
        /// 0 = none, and no state.
        momentum: f64,
        /// Decay of matrices (added to the gradient).
        decay: f64,
    },
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
}

/// What a training run adds.
#[derive(Clone, Debug, PartialEq)]
pub struct Training {
    /// The rule.
    pub optimizer: Optimizer,
    /// What each layer makes again, first layer first.
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
    /// Forward, backward, update, checkpoints.
    pub training: Option<Training>,
    /// Forward pass and loss.
    pub evaluate: bool,
    /// Prompt to tokens.
    pub generation: Option<Generation>,
    /// Loading, saving, checkpoints. They do not depend on the recipe, so a search leaves them out.
    pub files: bool,
}

/// Bytes of a staging buffer, at most.
pub const STAGING_BYTES: u64 = 4 << 20;
/// Bytes of a block of logits that the loss aims at. The number of rows depends on the vocabulary
/// alone, so that no rung changes the order of sums.
pub const LOGITS_BYTES: u64 = 8 << 20;

/// Rows of logits that stand at once.
pub fn loss_rows(vocab: u64) -> u64 {
    let rows = (LOGITS_BYTES / (4 * vocab)).max(1);
    (1 << rows.ilog2()).clamp(32, 1024)
}

/// Writes down all Programs.
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

/// Turns qkv `[N,C]` into `[N, H·E]`: the ops, and the tensors that they leave beside their result.
type AttentionOps<'f> = dyn FnMut(&mut Builder, Operand, Operand) -> (Vec<Op>, Vec<TensorId>) + 'f;

/// Tensors of weights.
struct Weights {
    embedding: TensorId,
    attention_norm: TensorId,
    qkv: TensorId,
    qkv_bias: Option<TensorId>,
    qk_norms: Option<(TensorId, TensorId)>,
    attention_out: TensorId,
    ffn_norm: TensorId,
    gate_up: TensorId,
    down: TensorId,
    final_norm: TensorId,
    head: TensorId,
    rope_table: TensorId,
}

struct Decoder<'a> {
    what: &'a Build<'a>,
    builder: Builder,
    weights: Weights,
    /// Wide copies of the weights, where the arithmetic is too coarse to add small updates to.
    masters: HashMap<TensorId, TensorId>,
    scalars: TensorId,
    metrics: TensorId,
    shape: Heads,
    table_rows: u64,
}

/// The inputs of a pass over a micro-batch.
struct Inputs {
    tokens: TensorId,
    positions: TensorId,
    document_start: TensorId,
}

/// A forward pass: its blocks, and the tensors that others ask for.
struct Forward {
    embedding: Vec<Op>,
    layer: Vec<Op>,
    last: Vec<Op>,
    /// [N, D], one slot before each layer and one after the last.
    hidden: TensorId,
    /// [N, D] after the last norm.
    normed: TensorId,
    /// From which level on a tensor is thrown away.
    dropped_from: HashMap<TensorId, RecomputeLevel>,
}

impl<'a> Decoder<'a> {
    fn new(what: &'a Build<'a>) -> Decoder<'a> {
        let config = what.config;
        let mut builder = Builder::new(what.precision, what.kernels);
        let shape = Heads { heads: config.heads, kv_heads: config.kv_heads, head_dim: config.head_dim };
        let (d, f, v, layers) = (config.hidden, config.ffn, config.vocab, config.layers as u32);
        let mut weight = |name: &str, dims: &[u64], slots: u32| {
            builder.persistent(name, dims, what.precision, Category::Weight, slots)
        };
        let embedding = weight("embedding", &[v, d], 1);
        let attention_norm = weight("attention_norm", &[d], layers);
        let qkv = weight("qkv", &[shape.columns(), d], layers);
        let qkv_bias = config.qkv_bias.then(|| weight("qkv_bias", &[shape.columns()], layers));
        let qk_norms = config
            .qk_norm
            .then(|| (weight("q_norm", &[shape.head_dim], layers), weight("k_norm", &[shape.head_dim], layers)));
        let attention_out = weight("attention_out", &[d, shape.query_columns()], layers);
        let ffn_norm = weight("ffn_norm", &[d], layers);
        let gate_up = weight("gate_up", &[2 * f, d], layers);
        let down = weight("down", &[d, f], layers);
        let final_norm = weight("final_norm", &[d], 1);
        let head = if config.tied { embedding } else { weight("head", &[v, d], 1) };
        let table_rows = what.sequence.max(what.generation.map_or(0, |g| g.capacity));
        let wide = what.precision.wide();
        let rope_table = builder.persistent("rope_table", &[table_rows, shape.head_dim], wide, Category::Weight, 1);
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
            final_norm,
            head,
            rope_table,
        };
        let scalars = builder.persistent(SCALARS, &[SCALAR_COUNT], wide, Category::Staging, 1);
        let metrics = builder.persistent(METRICS, &[METRIC_COUNT], DType::F64, Category::Staging, 1);
        let masters = HashMap::new();
        let mut decoder = Decoder { what, builder, weights, masters, scalars, metrics, shape, table_rows };
        if what.training.is_some() && what.precision != wide {
            for id in decoder.trained() {
                let master = decoder.beside(id, "master", Category::Optimizer);
                decoder.masters.insert(id, master);
            }
        }
        decoder
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
    fn from_masters(&self) -> Vec<Block> {
        let copies = self.trained().into_iter().filter_map(|id| Some((id, *self.masters.get(&id)?)));
        copies
            .map(|(id, master)| {
                let tensor = self.builder.set.tensor(id);
                let (from, to) = (Operand::layer(master, 0), Operand::layer(id, 0));
                let ops = vec![OpKind::Cast { from, to, elements: tensor.elements() }.into()];
                Block { name: tensor.name.clone(), first: 0, step: 1, repeat: tensor.slots, ops }
            })
            .collect()
    }

    /// All trained tensors.
    fn trained(&self) -> Vec<TensorId> {
        let w = &self.weights;
        let mut list = vec![w.embedding, w.attention_norm, w.qkv];
        list.extend(w.qkv_bias);
        list.extend(w.qk_norms.iter().flat_map(|(q, k)| [*q, *k]));
        list.extend([w.attention_out, w.ffn_norm, w.gate_up, w.down, w.final_norm]);
        if w.head != w.embedding {
            list.push(w.head);
        }
        list
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

    // ---- forward ----

    fn inputs(&mut self, prefix: &str, rows: u64) -> Inputs {
        let mut input = |name: &str| {
            self.builder.transient(&format!("{prefix}{name}"), &[rows], DType::I32, Category::Activation, 1)
        };
        Inputs { tokens: input("tokens"), positions: input("positions"), document_start: input("document_start") }
    }

    /// The forward pass over `rows` rows. `attention` makes the op that turns qkv[N,C] into [N, H·E].
    fn forward(&mut self, prefix: &str, rows: u64, inputs: &Inputs, attention: &mut AttentionOps) -> Forward {
        use RecomputeLevel::{Attention, Block as WholeBlock, FeedForward, Norms};
        let config = self.what.config;
        let (d, f, layers) = (config.hidden, config.ffn, config.layers as u32);
        let (shape, eps) = (self.shape, config.norm_eps);
        let b = &mut self.builder;
        let w = &self.weights;
        let mut dropped_from = HashMap::new();
        let (precision, wide) = (b.precision, b.precision.wide());
        let mut value = |b: &mut Builder, name: &str, dims: &[u64], dtype: DType, level: RecomputeLevel| {
            let id = b.transient(&format!("{prefix}{name}"), dims, dtype, Category::Activation, layers);
            dropped_from.insert(id, level);
            Operand::layer(id, 0)
        };
        let hidden = b.activation(&format!("{prefix}hidden"), &[rows, d], layers + 1);

        let embedding = vec![
            OpKind::Embed {
                tokens: Operand::whole(inputs.tokens),
                table: Operand::whole(w.embedding),
                out: Operand::slot(hidden, 0),
                rows,
                hidden: d,
                vocab: config.vocab,
            }
            .into(),
        ];

        let (x, next) = (Operand::layer(hidden, 0), Operand::layer(hidden, 1));
        let mut layer: Vec<Op> = Vec::new();
        let norm1 = value(b, "attention_normed", &[rows, d], precision, Norms);
        let rstd1 = value(b, "attention_rstd", &[rows], wide, Norms);
        layer.push(
            OpKind::RmsNorm {
                x,
                weight: Operand::layer(w.attention_norm, 0),
                out: norm1,
                rstd: rstd1,
                rows,
                dim: d,
                eps,
            }
            .into(),
        );
        let product = value(
            b,
            if w.qk_norms.is_some() { "qkv_raw" } else { "qkv" },
            &[rows, shape.columns()],
            precision,
            Attention,
        );
        layer.push(b.product(Product {
            bias: w.qkv_bias.map(|tensor| Operand::layer(tensor, 0)),
            ..Product::linear(norm1, Operand::layer(w.qkv, 0), product, rows, d, shape.columns())
        }));
        let mut qkv = product;
        if let Some((q_norm, k_norm)) = w.qk_norms {
            let normed = value(b, "qkv", &[rows, shape.columns()], precision, Norms);
            let rstd = value(b, "qk_rstd", &[rows, shape.rotated()], wide, Norms);
            layer.push(
                OpKind::HeadNorm {
                    x: product,
                    q_weight: Operand::layer(q_norm, 0),
                    k_weight: Operand::layer(k_norm, 0),
                    out: normed,
                    rstd,
                    rows,
                    shape,
                    eps,
                }
                .into(),
            );
            qkv = normed;
        }
        layer.push(
            OpKind::Rope {
                qkv,
                table: Operand::whole(w.rope_table),
                positions: Operand::whole(inputs.positions),
                rows,
                table_rows: self.table_rows,
                shape,
                inverse: false,
            }
            .into(),
        );
        let mixed = value(b, "attention_mixed", &[rows, shape.query_columns()], precision, Attention);
        let (ops, beside) = attention(b, qkv, mixed);
        layer.extend(ops);
        let middle = value(b, "middle", &[rows, d], precision, WholeBlock);
        layer.push(b.product(Product {
            residual: Some(x),
            ..Product::linear(mixed, Operand::layer(w.attention_out, 0), middle, rows, shape.query_columns(), d)
        }));
        let norm2 = value(b, "ffn_normed", &[rows, d], precision, Norms);
        let rstd2 = value(b, "ffn_rstd", &[rows], wide, Norms);
        layer.push(
            OpKind::RmsNorm {
                x: middle,
                weight: Operand::layer(w.ffn_norm, 0),
                out: norm2,
                rstd: rstd2,
                rows,
                dim: d,
                eps,
            }
            .into(),
        );
        let gate_up = value(b, "gate_up_product", &[rows, 2 * f], precision, FeedForward);
        layer.push(b.product(Product::linear(norm2, Operand::layer(w.gate_up, 0), gate_up, rows, d, 2 * f)));
        let gated = value(b, "gated", &[rows, f], precision, Norms);
        layer.push(OpKind::SwiGlu { gate_up, out: gated, rows, ffn: f }.into());
        layer.push(b.product(Product {
            residual: Some(middle),
            ..Product::linear(gated, Operand::layer(w.down, 0), next, rows, f, d)
        }));

        let normed = b.activation(&format!("{prefix}normed"), &[rows, d], 1);
        let rstd = b.statistic(&format!("{prefix}rstd"), &[rows], 1);
        let last = vec![
            OpKind::RmsNorm {
                x: Operand::slot(hidden, i64::from(layers)),
                weight: Operand::whole(w.final_norm),
                out: Operand::whole(normed),
                rstd: Operand::whole(rstd),
                rows,
                dim: d,
                eps,
            }
            .into(),
        ];
        dropped_from.extend(beside.into_iter().map(|id| (id, Attention)));
        Forward { embedding, layer, last, hidden, normed, dropped_from }
    }

    /// Attention within a micro-batch.
    fn forward_over_batch(&mut self, prefix: &str, inputs: &Inputs) -> Forward {
        let (batch, sequence, kernels) = (self.what.micro_batch, self.what.sequence, self.what.kernels);
        let layers = self.what.config.layers as u32;
        let shape = self.shape;
        let document_start = Operand::whole(inputs.document_start);
        let mut attention = |b: &mut Builder, qkv: Operand, out: Operand| {
            let stats = b.statistic(&format!("{prefix}attention_stats"), &[batch, shape.heads, sequence], layers);
            let elements = kernels.attention(b.precision, sequence, shape);
            let scratch = b.scratch(&format!("{prefix}attention_workspace"), elements, layers);
            let op = OpKind::Attention {
                qkv,
                document_start,
                out,
                stats: Operand::layer(stats, 0),
                workspace: Operand::layer(scratch, 0),
                batch,
                sequence,
                shape,
            };
            (vec![op.into()], vec![stats])
        };
        self.forward(prefix, batch * sequence, inputs, &mut attention)
    }

    fn forward_blocks(&self, forward: &Forward) -> Vec<Block> {
        vec![
            Block::once("embedding", forward.embedding.clone()),
            Block {
                name: "layer".into(),
                first: 0,
                step: 1,
                repeat: self.what.config.layers as u32,
                ops: forward.layer.clone(),
            },
            Block::once("final_norm", forward.last.clone()),
        ]
    }

    // ---- loss ----

    /// The loss over all rows in blocks of fixed size. With `gradients` = (dnormed, dhead) the logits
    /// become their gradient in place and are used up; with `correct` hits are written down.
    fn loss(
        &mut self,
        prefix: &str,
        normed: TensorId,
        labels: TensorId,
        token_weights: TensorId,
        gradients: Option<(TensorId, TensorId)>,
        correct: Option<TensorId>,
    ) -> Vec<Block> {
        let (d, v) = (self.what.config.hidden, self.what.config.vocab);
        let rows = self.what.micro_batch * self.what.sequence;
        let block_rows = loss_rows(v).min(rows);
        let logits = self.builder.activation(&format!("{prefix}logits"), &[block_rows, v], 1);
        let scratch =
            self.builder.scratch(&format!("{prefix}loss_workspace"), self.what.kernels.cross_entropy(block_rows), 1);
        let head = Operand::whole(self.weights.head);
        let ops = |this: &mut Decoder, rows: u64, first: Index, per_row: fn(Index, u64) -> Index| {
            let wide = per_row(first, d);
            let x = Operand::whole(normed).from(wide);
            let logits = Operand::whole(logits);
            let mut ops = vec![
                this.builder.product(Product::linear(x, head, logits, rows, d, v)),
                OpKind::CrossEntropy {
                    logits,
                    labels: Operand::whole(labels).from(first),
                    weights: Operand::whole(token_weights).from(first),
                    scalars: Operand::whole(this.scalars),
                    metrics: Operand::whole(this.metrics),
                    correct: correct.map(|c| Operand::whole(c).from(first)),
                    workspace: Operand::whole(scratch),
                    rows,
                    vocab: v,
                    gradient: gradients.is_some(),
                }
                .into(),
            ];
            if let Some((dnormed, dhead)) = gradients {
                // dhead[V,D] += dlogitsᵀ · x ; dx[rows,D] = dlogits · head
                ops.push(this.builder.product(Product {
                    a: logits,
                    b: x,
                    out: Operand::whole(dhead),
                    bias: None,
                    residual: None,
                    m: v,
                    n: d,
                    k: rows,
                    a_transposed: true,
                    b_transposed: false,
                    accumulate: true,
                }));
                ops.push(this.builder.product(Product {
                    a: logits,
                    b: head,
                    out: Operand::whole(dnormed).from(wide),
                    bias: None,
                    residual: None,
                    m: rows,
                    n: d,
                    k: v,
                    a_transposed: false,
                    b_transposed: false,
                    accumulate: false,
                }));
            }
            ops
        };
        let scaled = |index: Index, by: u64| Index {
            base: index.base * by as i64,
            scale: index.scale * by as i64,
            micro_batch: 0,
        };
        let (whole, rest) = (rows / block_rows, rows % block_rows);
        let mut blocks = vec![Block {
            name: "loss".into(),
            first: 0,
            step: 1,
            repeat: whole as u32,
            ops: ops(self, block_rows, Index::stride(block_rows as i64), scaled),
        }];
        if rest > 0 {
            blocks.push(Block::once("loss_rest", ops(self, rest, Index::fixed((whole * block_rows) as i64), scaled)));
        }
        blocks
    }

    fn labels(&mut self, prefix: &str, rows: u64) -> (TensorId, TensorId) {
        let labels = self.builder.transient(&format!("{prefix}labels"), &[rows], DType::I32, Category::Activation, 1);
        let weights = self.builder.statistic(&format!("{prefix}token_weights"), &[rows], 1);
        (labels, weights)
    }

    // ---- training ----

    fn train(&mut self, training: &Training) {
        assert_eq!(training.recompute.len() as u64, self.what.config.layers, "one level a layer");
        let rows = self.what.micro_batch * self.what.sequence;
        let layers = self.what.config.layers as i64;
        let inputs = self.inputs("train.", rows);
        let (labels, token_weights) = self.labels("train.", rows);
        let forward = self.forward_over_batch("train.", &inputs);

        let mut gradients = HashMap::new();
        for id in self.trained() {
            let gradient = self.beside(id, "gradient", Category::Gradient);
            gradients.insert(id, gradient);
        }

        let dnormed = self.builder.activation("train.normed.gradient", &[rows, self.what.config.hidden], 1);
        let dhead = gradients[&self.weights.head];
        let mut blocks = self.loss("train.", forward.normed, labels, token_weights, Some((dnormed, dhead)), None);

        // One buffer carries the gradient of the residual stream through all layers.
        let stream =
            Operand::whole(self.builder.activation("train.stream.gradient", &[rows, self.what.config.hidden], 1));
        let mut tape = Tape::new(&mut self.builder, &gradients);
        tape.seed(Operand::whole(forward.normed), Operand::whole(dnormed));
        tape.place(Operand::slot(forward.hidden, layers), stream);
        for op in forward.last.iter().rev() {
            tape.derive(&op.kind);
        }
        blocks.push(Block::once("final_norm", tape.into_ops()));

        let mut tape = Tape::new(&mut self.builder, &gradients);
        tape.seed(Operand::layer(forward.hidden, 1), stream);
        for op in forward.layer.iter().rev() {
            tape.derive(&op.kind);
        }
        assert_eq!(tape.gradient(Operand::layer(forward.hidden, 0)), Some(stream), "the stream is summed in place");
        let backward = tape.into_ops();
        let mut last = layers;
        for levels in training.recompute.chunk_by(|a, b| a == b).collect::<Vec<_>>().iter().rev() {
            let dropped: HashSet<TensorId> =
                forward.dropped_from.iter().filter(|(_, from)| **from <= levels[0]).map(|(id, _)| *id).collect();
            let ops = recompute(&mut self.builder, &forward.layer, &backward, &dropped);
            blocks.push(Block { name: "layer".into(), first: last - 1, step: -1, repeat: levels.len() as u32, ops });
            last -= levels.len() as i64;
        }

        let mut tape = Tape::new(&mut self.builder, &gradients);
        tape.seed(Operand::slot(forward.hidden, 0), stream);
        for op in forward.embedding.iter().rev() {
            tape.derive(&op.kind);
        }
        blocks.push(Block::once("embedding", tape.into_ops()));

        let blocks_forward = self.forward_blocks(&forward);
        let all = vec![inputs.tokens, inputs.positions, inputs.document_start, labels, token_weights];
        let forward = self.push(WorkName::Forward, "forward", all, vec![], blocks_forward);
        let backward = self.push(WorkName::Backward, "backward", vec![], vec![], blocks);
        self.phase(vec![forward, backward]);
        self.update(&training.optimizer, &gradients);
        if self.what.files {
            self.save(&training.optimizer);
        }
    }

    fn update(&mut self, optimizer: &Optimizer, gradients: &HashMap<TensorId, TensorId>) {
        let scalars = Operand::whole(self.scalars);
        let metrics = Operand::whole(self.metrics);
        let mut begin = vec![Block::once(
            "metrics",
            vec![OpKind::Fill { into: metrics, value: 0.0, elements: METRIC_COUNT }.into()],
        )];
        let mut fresh = Vec::new();
        let mut norm = Vec::new();
        let elements = self.what.kernels.squared_norm();
        let workspace = Operand::whole(self.builder.scratch("norm_workspace", elements, 1));
        let mut update = Vec::new();
        for id in self.trained() {
            let Tensor { name, shape, slots, .. } = self.builder.set.tensor(id).clone();
            let elements: u64 = shape.iter().product();
            let weight = Operand::layer(self.master(id), 0);
            let gradient = Operand::layer(gradients[&id], 0);
            let over_slots =
                |op: OpKind| Block { name: name.clone(), first: 0, step: 1, repeat: slots, ops: vec![op.into()] };
            begin.push(over_slots(OpKind::Fill { into: gradient, value: 0.0, elements }));
            norm.push(over_slots(OpKind::SquaredNorm { x: gradient, metrics, workspace, elements }));
            let matrices_only = |decay: f64| if shape.len() == 2 { decay } else { 0.0 };
            let mut state = |this: &mut Decoder, kind: &str| {
                let id = this.beside(id, kind, Category::Optimizer);
                fresh.push(over_slots(OpKind::Fill { into: Operand::layer(id, 0), value: 0.0, elements }));
                Operand::layer(id, 0)
            };
            update.push(over_slots(match *optimizer {
                Optimizer::AdamW { betas, eps, decay } => OpKind::AdamW {
                    weight,
                    gradient,
                    first: state(self, "first"),
                    second: state(self, "second"),
                    scalars,
                    elements,
                    betas,
                    eps,
                    decay: matrices_only(decay),
                },
                Optimizer::Sgd { momentum, decay } => OpKind::Sgd {
                    weight,
                    gradient,
                    momentum_buffer: (momentum != 0.0).then(|| state(self, "first")),
                    scalars,
                    elements,
                    momentum,
                    decay: matrices_only(decay),
                },
            }));
        }
        update.extend(self.from_masters());
        norm.push(Block::once("clip", vec![OpKind::ClipFactor { metrics, scalars }.into()]));
        let programs = [
            // Once, where a run starts without a checkpoint.
            (WorkName::Load, "fresh", fresh),
            (WorkName::Update, "begin", begin),
            (WorkName::Update, "norm", norm),
            (WorkName::Update, "update", update),
        ];
        for (work, name, blocks) in programs {
            let program = self.push(work, name, vec![], vec![], blocks);
            self.phase(vec![program]);
        }
    }

    // ---- evaluation and generation ----

    fn evaluate(&mut self) {
        let rows = self.what.micro_batch * self.what.sequence;
        let inputs = self.inputs("evaluate.", rows);
        let (labels, token_weights) = self.labels("evaluate.", rows);
        let forward = self.forward_over_batch("evaluate.", &inputs);
        let correct = self.builder.transient("evaluate.correct", &[rows], DType::I32, Category::Activation, 1);
        let mut blocks = self.forward_blocks(&forward);
        blocks.extend(self.loss("evaluate.", forward.normed, labels, token_weights, None, Some(correct)));
        let all = vec![inputs.tokens, inputs.positions, inputs.document_start, labels, token_weights];
        let program = self.push(WorkName::Evaluate, "evaluate", all, vec![correct], blocks);
        self.phase(vec![program]);
    }

    fn generate(&mut self, generation: Generation) {
        let layers = self.what.config.layers as u32;
        let shape = self.shape;
        let capacity = generation.capacity;
        let (columns, precision) = (shape.kv_heads * shape.head_dim, self.what.precision);
        let mut cache = |name: &str| {
            let dims = [capacity, columns];
            self.builder.on_device(name, &dims, precision, Category::Activation, Lifetime::Phase, layers)
        };
        let (keys, values) = (Operand::layer(cache("cache_keys"), 0), Operand::layer(cache("cache_values"), 0));
        let scalars = Operand::whole(self.scalars);
        let kernels = self.what.kernels;
        let mut programs = Vec::new();
        for (name, rows) in [("prefill", generation.chunk), ("decode", 1)] {
            let prefix = format!("{name}.");
            let inputs = self.inputs(&prefix, rows);
            let mut attention = |b: &mut Builder, qkv: Operand, out: Operand| {
                let elements = kernels.cached_attention(b.precision, rows, capacity, shape);
                let scratch = b.scratch(&format!("{prefix}attention_workspace"), elements, layers);
                let append = OpKind::AppendCache { qkv, keys, values, scalars, rows, capacity, shape };
                let attend = OpKind::CachedAttention {
                    qkv,
                    keys,
                    values,
                    scalars,
                    out,
                    workspace: Operand::layer(scratch, 0),
                    rows,
                    capacity,
                    shape,
                };
                (vec![append.into(), attend.into()], vec![])
            };
            let forward = self.forward(&prefix, rows, &inputs, &mut attention);
            let (d, v) = (self.what.config.hidden, self.what.config.vocab);
            let picked = self.builder.activation(&format!("{prefix}picked"), &[1, d], 1);
            let logits = self.builder.activation(&format!("{prefix}logits"), &[1, v], 1);
            let head = Operand::whole(self.weights.head);
            let product = Product::linear(Operand::whole(picked), head, Operand::whole(logits), 1, d, v);
            let product = self.builder.product(product);
            let mut blocks = self.forward_blocks(&forward);
            blocks.push(Block::once(
                "logits",
                vec![
                    OpKind::PickRow {
                        x: Operand::whole(forward.normed),
                        scalars,
                        out: Operand::whole(picked),
                        rows,
                        columns: d,
                    }
                    .into(),
                    product,
                ],
            ));
            programs.push(self.push(
                WorkName::Generate,
                name,
                vec![inputs.tokens, inputs.positions],
                vec![logits],
                blocks,
            ));
        }
        self.phase(programs);
    }

    // ---- files ----

    fn weight_tensor(&self, parameter: &Parameter) -> TensorId {
        self.builder.find(parameter.tensor).expect("every parameter has its tensor")
    }

    fn place_of(tensor: TensorId, parameter: &Parameter) -> Operand {
        Operand {
            tensor,
            slot: Index::fixed(parameter.layer.unwrap_or(0) as i64),
            offset: Index::fixed(parameter.offset as i64),
        }
    }

    /// A staging buffer for elements of `dtype`, no larger than the `largest` parameter that goes through it.
    fn staging(&mut self, program: &str, dtype: DType, largest: u64) -> TensorId {
        let name = format!("{program}.staging.{dtype}");
        if let Some(id) = self.builder.find(&name) {
            return id;
        }
        let elements = largest.min(STAGING_BYTES / dtype.bytes());
        self.builder.transient(&name, &[elements], dtype, Category::Staging, 1)
    }

    fn file(&mut self, name: &str, shape: &[u64], dtype: DType) -> TensorId {
        match self.builder.find(name) {
            Some(id) => id,
            None => self.builder.tensor(Tensor {
                name: name.into(),
                shape: shape.into(),
                dtype,
                space: Space::File,
                category: Category::Staging,
                lifetime: Lifetime::Persistent,
                slots: 1,
            }),
        }
    }

    /// `elements` of a tensor through a staging buffer, a piece at a time: `ops` moves a piece, given how
    /// many elements it has, the place in the tensor, and where it begins.
    fn pieces(
        &self,
        name: &str,
        staging: TensorId,
        place: Operand,
        elements: u64,
        ops: &dyn Fn(u64, Operand, Index) -> Vec<Op>,
    ) -> Vec<Block> {
        let piece = self.builder.set.tensor(staging).elements();
        let ops = |elements: u64, offset: Index| {
            let there = place.from(Index { base: place.offset.base + offset.base, ..offset });
            ops(elements, there, offset)
        };
        let (whole, rest) = (elements / piece, elements % piece);
        let mut blocks = Vec::new();
        if whole > 0 {
            let ops = ops(piece, Index::stride(piece as i64));
            blocks.push(Block { name: name.into(), first: 0, step: 1, repeat: whole as u32, ops });
        }
        if rest > 0 {
            blocks.push(Block::once(name, ops(rest, Index::fixed((whole * piece) as i64))));
        }
        blocks
    }

    /// Blocks that bring `elements` of a file to a place on the device.
    fn from_file(&self, name: &str, file: TensorId, staging: TensorId, place: Operand, elements: u64) -> Vec<Block> {
        let staged = Operand::whole(staging);
        self.pieces(name, staging, place, elements, &|elements, place, offset| {
            let (from, queue) = (Operand::whole(file).from(offset), Queue::CopyIn);
            vec![
                Op { kind: OpKind::TransferStart { from, to: staged, elements, sequence: 0 }, queue },
                Op { kind: OpKind::TransferWait { from, to: staged, elements, sequence: 0 }, queue },
                OpKind::Cast { from: staged, to: place, elements }.into(),
            ]
        })
    }

    /// Blocks that bring `elements` of a place on the device to a file.
    fn to_file(&self, name: &str, file: TensorId, staging: TensorId, place: Operand, elements: u64) -> Vec<Block> {
        let staged = Operand::whole(staging);
        self.pieces(name, staging, place, elements, &|elements, place, offset| {
            let (to, queue) = (Operand::whole(file).from(offset), Queue::CopyOut);
            vec![
                OpKind::Cast { from: place, to: staged, elements }.into(),
                Op { kind: OpKind::TransferStart { from: staged, to, elements, sequence: 0 }, queue },
                Op { kind: OpKind::TransferWait { from: staged, to, elements, sequence: 0 }, queue },
            ]
        })
    }

    fn table(&self) -> Block {
        let config = self.what.config;
        let kind = OpKind::RopeTable {
            table: Operand::whole(self.weights.rope_table),
            table_rows: self.table_rows,
            head_dim: config.head_dim,
            theta: config.rope_theta,
            scaling: config.rope_scaling,
        };
        Block::once("rope_table", vec![kind.into()])
    }

    /// Blocks that draw a matrix. Numbers are drawn in the wide type; where the weights have no wide
    /// copy, they pass through staging.
    fn drawn(&mut self, parameter: &Parameter, number: u64, seed: u64, place: Operand, largest: u64) -> Vec<Block> {
        let (std, wide) = (self.what.config.init_std, self.what.precision.wide());
        let draw = |into: Operand, first: Index, elements: u64| {
            OpKind::InitNormal { into, seed, number, first, std, elements }.into()
        };
        let (name, elements) = (&parameter.hf_name, parameter.elements());
        if self.builder.set.tensor(place.tensor).dtype == wide {
            return vec![Block::once(name, vec![draw(place, Index::fixed(0), elements)])];
        }
        let staging = self.staging("load", wide, largest);
        let staged = Operand::whole(staging);
        self.pieces(name, staging, place, elements, &|elements, to, offset| {
            vec![draw(staged, offset, elements), OpKind::Cast { from: staged, to, elements }.into()]
        })
    }

    fn load(&mut self) {
        let mut blocks = vec![self.table()];
        let parameters = self.what.config.hf_parameters();
        let largest = parameters.iter().map(Parameter::elements).max().unwrap_or(1);
        for (number, parameter) in parameters.iter().enumerate() {
            let place = Self::place_of(self.master(self.weight_tensor(parameter)), parameter);
            let elements = parameter.elements();
            match &self.what.source {
                Source::Random { seed } if parameter.shape.len() == 2 => {
                    blocks.extend(self.drawn(parameter, number as u64, *seed, place, largest));
                }
                Source::Random { .. } => {
                    let value = if parameter.tensor == "qkv_bias" { 0.0 } else { 1.0 };
                    let fill = OpKind::Fill { into: place, value, elements };
                    blocks.push(Block::once(&parameter.hf_name, vec![fill.into()]));
                }
                Source::Files { dtypes } => {
                    let dtype = dtypes[number];
                    let file = self.file(&format!("model:{}", parameter.hf_name), &parameter.shape, dtype);
                    let same = parameters.iter().zip(dtypes).filter(|(_, other)| **other == dtype);
                    let largest = same.map(|(p, _)| p.elements()).max().unwrap_or(1);
                    let staging = self.staging("load", dtype, largest);
                    blocks.extend(self.from_file(&parameter.hf_name, file, staging, place, elements));
                }
            }
        }
        blocks.extend(self.from_masters());
        let program = self.push(WorkName::Load, "load", vec![], vec![], blocks);
        self.phase(vec![program]);
    }

    /// `save` writes the model in the run's precision; `checkpoint` writes weights (their masters, where
    /// there are any) and optimizer in the wide type, and `restore` reads that.
    fn save(&mut self, optimizer: &Optimizer) {
        let (precision, wide) = (self.what.precision, self.what.precision.wide());
        let states: &[&str] = match optimizer {
            Optimizer::AdamW { .. } => &["first", "second"],
            Optimizer::Sgd { momentum, .. } if *momentum != 0.0 => &["first"],
            Optimizer::Sgd { .. } => &[],
        };
        let parameters = self.what.config.hf_parameters();
        let largest = parameters.iter().map(Parameter::elements).max().unwrap_or(1);
        let programs = [
            ("save", WorkName::Save, precision, &[][..]),
            ("checkpoint", WorkName::Save, wide, states),
            ("restore", WorkName::Load, wide, states),
        ];
        for (name, work, dtype, states) in programs {
            let restores = name == "restore";
            let mut blocks = if restores { vec![self.table()] } else { vec![] };
            let staging = self.staging(name, dtype, largest);
            for parameter in &parameters {
                let weight = self.weight_tensor(parameter);
                let group = if name == "save" { "saved" } else { "checkpoint" };
                for state in [None].into_iter().chain(states.iter().map(Some)) {
                    let (tensor, file) = match state {
                        None => (self.master(weight), format!("{group}:{}", parameter.hf_name)),
                        Some(state) => {
                            let name = format!("{}.{state}", parameter.tensor);
                            let tensor = self.builder.find(&name).expect("the optimizer's state has been made");
                            (tensor, format!("{group}:{state}.{}", parameter.hf_name))
                        }
                    };
                    let id = self.file(&file, &parameter.shape, dtype);
                    let (place, elements) = (Self::place_of(tensor, parameter), parameter.elements());
                    blocks.extend(match restores {
                        true => self.from_file(&file, id, staging, place, elements),
                        false => self.to_file(&file, id, staging, place, elements),
                    });
                }
            }
            if restores {
                blocks.extend(self.from_masters());
            }
            let program = self.push(work, name, vec![], vec![], blocks);
            self.phase(vec![program]);
        }
    }
}
