//! The forward pass of a micro-batch, without the loss.

use super::layer_inputs::LayerInputs;
use super::lora::{Adapter, Site};
use super::matrices::Matrix;
use super::{BuildOptions, Decoder, Weights};
use crate::builder::{Builder, Product};
use crate::op::{Heads, Op, OpKind};
use crate::program::Block;
use crate::tensor::{Index, Operand, TensorId};
use foldhash::HashMap;
use plimsoll_core::{Category, DType, RecomputeLevel};
use std::mem;
use std::ops::Range;

/// A function that returns the ops of attention (over a micro-batch, or over a key-value cache), and the tensors that
/// they write besides their output. Its operands, for N tokens, are the input (queries | keys | values side by side),
/// the output `[N, H·E]`, and the first key that each token sees, `[N]`.
pub(super) type AttentionOps<'f> =
    dyn FnMut(&mut Builder, Operand, Operand, Option<Operand>) -> (Vec<Op>, Vec<TensorId>) + 'f;

/// The input tensors of a forward pass over N tokens, which the host fills.
pub(super) struct Inputs {
    /// Token ids `[N]`; `None` on all pipeline stages but the first.
    pub tokens: Option<TensorId>,
    /// Position of each token within its document, `[N]`.
    pub positions: TensorId,
    /// For each token, the index within the sequence at which its document starts, `[N]`; `None` in generation, where
    /// it is 0.
    pub document_start: Option<TensorId>,
}

/// The ops of a forward pass over N tokens, and the tensors that the loss and the backward pass read.
pub(super) struct Forward {
    /// Ops that compute the inputs of the layers from those of the host; empty if all layers read the host's.
    pub layer_inputs: Vec<Op>,
    /// Ops of the embedding; empty if the input comes from the previous pipeline stage.
    pub embedding: Vec<Op>,
    /// Ops of the layers: one run of all layers, or several if layers differ in their adapters.
    pub layers: Vec<LayerRun>,
    /// Ops of the final norm; empty if the output goes to the next pipeline stage.
    pub last: Vec<Op>,
    /// Residual stream `[N, D]`: one slot before each layer and one after the last.
    pub hidden: TensorId,
    /// Output `[N, D]` of the final norm, and the head; `None` on all pipeline stages but the last.
    pub top: Option<(TensorId, TensorId)>,
    /// Lowest recompute level at which the forward pass drops an activation instead of keeping it, by activation.
    pub dropped_from: HashMap<TensorId, RecomputeLevel>,
}

/// Consecutive layers with the same ops.
pub(super) struct LayerRun {
    /// The layers, counted from the first one of the device.
    pub layers: Range<usize>,
    /// Ops of each layer, with the layer as the block's variable.
    pub ops: Vec<Op>,
}

/// Ops of a layer that some layers do not have.
struct PartialOps {
    /// Positions among the ops of a layer.
    ops: Range<usize>,
    /// For each layer of the device, whether it has the ops.
    layers: Vec<bool>,
}

/// The operands with which a sublayer, attention or feed-forward part, adds to the residual stream.
struct Addition {
    /// Name of the sublayer, for its activations.
    name: &'static str,
    /// Residual stream before the addition.
    stream: Operand,
    /// Residual stream after the addition.
    out: Operand,
    /// Bias of the sublayer's last product, if it has one.
    bias: Option<Operand>,
    /// Weight of the norm of the sublayer's output; `None` if there is none.
    norm: Option<TensorId>,
    /// Recompute level from which the forward pass drops the output before that norm.
    level: RecomputeLevel,
    /// Recompute level from which the forward pass drops the statistics of that norm; `None` if it keeps them.
    statistics: Option<RecomputeLevel>,
}

/// The forward pass of a layer under construction.
struct Layer<'a, 'b> {
    decoder: &'a mut Decoder<'b>,
    prefix: &'a str,
    rows: u64,
    /// Ops of all layers, with those that only some layers have.
    ops: Vec<Op>,
    /// The ops that only some layers have, in the order of `ops`.
    partial: Vec<PartialOps>,
    dropped_from: HashMap<TensorId, RecomputeLevel>,
    /// Whether dropout applies to the inputs of adapters, as in training.
    dropout: bool,
    /// Input of adapters after dropout, by the input of the layer's projections that it stems from.
    adapter_inputs: HashMap<Site, Operand>,
}

impl Layer<'_, '_> {
    /// Appends all ops of a layer. Layer l reads slot l of the residual stream `hidden` and writes slot l + 1.
    fn write(&mut self, hidden: TensorId, inputs: &LayerInputs, attention: &mut AttentionOps) {
        use RecomputeLevel::{Attention, Block as WholeBlock, FeedForward, Norms};
        let (rows, shape) = (self.rows, self.decoder.shape);
        let (d, f) = (self.decoder.options.config.hidden, self.decoder.options.config.ffn);
        let Weights { attention_norm, attention_output_norm, ffn_norm, ffn_output_norm, .. } = self.decoder.weights;
        let Weights { qk_norms, rope_table, .. } = self.decoder.weights;
        let Weights { qkv_bias, attention_out_bias, gate_up_bias, down_bias, .. } = self.decoder.weights;
        let [qkv_bias, attention_out_bias, gate_up_bias, down_bias] =
            [qkv_bias, attention_out_bias, gate_up_bias, down_bias].map(|bias| Some(Operand::layer(bias?, 0)));
        let (x, next) = (Operand::layer(hidden, 0), Operand::layer(hidden, 1));

        let normed = self.norm_input("attention", x, attention_norm);
        let name = if qk_norms.is_some() { "qkv_raw" } else { "qkv" };
        let product = self.add_activation(name, &[rows, shape.columns()], Attention);
        self.linear(|w| &w.qkv, (normed, Site::AttentionIn), product, [qkv_bias, None], Attention);
        let qkv = match qk_norms {
            Some(weights) => self.head_norm(product, weights, shape),
            None => product,
        };
        let table_rows = self.decoder.builder.set.tensor(rope_table).shape[0];
        self.ops.push(
            OpKind::Rope {
                qkv,
                table: Operand::whole(rope_table),
                positions: inputs.positions,
                rows,
                table_rows,
                key_shift: self.decoder.key_shift,
                shape,
                inverse: false,
            }
            .into(),
        );
        let mixed = self.add_activation("attention_mixed", &[rows, shape.query_columns()], Attention);
        let (ops, beside) = attention(&mut self.decoder.builder, qkv, mixed, inputs.first_keys);
        self.ops.extend(ops);
        self.dropped_from.extend(beside.into_iter().map(|id| (id, Attention)));
        let middle = self.add_activation("middle", &[rows, d], WholeBlock);
        let addition = Addition {
            name: "attention",
            stream: x,
            out: middle,
            bias: attention_out_bias,
            norm: attention_output_norm,
            level: Attention,
            statistics: Some(WholeBlock),
        };
        self.add_to_stream(|w| &w.attention_out, (mixed, Site::AttentionOut), &addition);

        let normed = self.norm_input("ffn", middle, ffn_norm);
        let gate_up = self.add_activation("gate_up_product", &[rows, 2 * f], FeedForward);
        self.linear(|w| &w.gate_up, (normed, Site::FfnIn), gate_up, [gate_up_bias, None], FeedForward);
        let gated = self.add_activation("gated", &[rows, f], Norms);
        let activation = self.decoder.options.config.model_type.activation();
        self.ops.push(OpKind::Glu { gate_up, out: gated, rows, ffn: f, activation }.into());
        // A repeated norm would write the next layer's input again, so the statistics stay: one number per token.
        let addition = Addition {
            name: "ffn",
            stream: middle,
            out: next,
            bias: down_bias,
            norm: ffn_output_norm,
            level: FeedForward,
            statistics: None,
        };
        self.add_to_stream(|w| &w.down, (gated, Site::FfnMiddle), &addition);
    }

    /// Appends the RMS norms of queries and keys (Qwen 3, OLMo 2) and returns their output.
    fn head_norm(&mut self, x: Operand, (q_norm, k_norm): (TensorId, TensorId), shape: Heads) -> Operand {
        let config = self.decoder.options.config;
        let norm = config.qk_norm.expect("weights of these norms exist only with them");
        let (rows, eps, wide) = (self.rows, config.norm_eps, self.decoder.options.precision.wide());
        let out = self.add_activation("qkv", &[rows, shape.columns()], RecomputeLevel::Norms);
        let rstd = self.add_tensor("qk_rstd", &[rows, shape.norm_count(norm)], wide, Some(RecomputeLevel::Norms));
        let (q_weight, k_weight) = (Operand::layer(q_norm, 0), Operand::layer(k_norm, 0));
        let offset = config.model_type.norm_offset();
        self.ops.push(OpKind::HeadNorm { x, q_weight, k_weight, out, rstd, rows, shape, norm, eps, offset }.into());
        out
    }

    /// Adds a tensor of the layer that the forward pass drops from recompute level `level` on, or never.
    fn add_tensor(&mut self, name: &str, dims: &[u64], dtype: DType, level: Option<RecomputeLevel>) -> Operand {
        let layers = self.decoder.options.depth();
        let name = format!("{}{name}", self.prefix);
        let id = self.decoder.builder.transient(&name, dims, dtype, Category::Activation, layers);
        self.dropped_from.extend(level.map(|level| (id, level)));
        Operand::layer(id, 0)
    }

    /// Adds an activation of the layer that the forward pass drops from recompute level `level` on.
    fn add_activation(&mut self, name: &str, dims: &[u64], level: RecomputeLevel) -> Operand {
        self.add_tensor(name, dims, self.decoder.options.precision, Some(level))
    }

    /// Appends the RMS norm of a sublayer's input, out = x / rms(x) · weight, and returns out. Returns x itself if the
    /// family has no such norm.
    fn norm_input(&mut self, name: &str, x: Operand, weight: Option<TensorId>) -> Operand {
        let Some(weight) = weight else { return x };
        let config = self.decoder.options.config;
        let (rows, dim, eps, offset) = (self.rows, config.hidden, config.norm_eps, config.model_type.norm_offset());
        let wide = self.decoder.options.precision.wide();
        let out = self.add_activation(&format!("{name}_normed"), &[rows, dim], RecomputeLevel::Norms);
        let rstd = self.add_tensor(&format!("{name}_rstd"), &[rows], wide, Some(RecomputeLevel::Norms));
        let weight = Operand::layer(weight, 0);
        self.ops.push(OpKind::RmsNorm { x, weight, residual: None, out, rstd, rows, dim, eps, offset }.into());
        out
    }

    /// Appends the last product of a sublayer, out = stream + x · matrixᵀ (+ bias), with a norm of what is added if the
    /// sublayer norms its output. `select` picks the matrix, and `site` names the input x.
    fn add_to_stream(
        &mut self,
        select: fn(&Weights) -> &Matrix,
        (x, site): (Operand, Site),
        &Addition { name, stream, out, bias, norm, level, statistics }: &Addition,
    ) {
        let Some(weight) = norm else {
            return self.linear(select, (x, site), out, [bias, Some(stream)], level);
        };
        let config = self.decoder.options.config;
        let (rows, dim, eps, offset) = (self.rows, config.hidden, config.norm_eps, config.model_type.norm_offset());
        let product = self.add_activation(&format!("{name}_output"), &[rows, dim], level);
        self.linear(select, (x, site), product, [bias, None], level);
        let wide = self.decoder.options.precision.wide();
        let rstd = self.add_tensor(&format!("{name}_output_rstd"), &[rows], wide, statistics);
        let (x, weight, residual) = (product, Operand::layer(weight, 0), Some(stream));
        self.ops.push(OpKind::RmsNorm { x, weight, residual, out, rstd, rows, dim, eps, offset }.into());
    }

    /// Appends out = x · matrixᵀ (+ bias) (+ residual), and the adapters of the matrix.
    ///
    /// `select` picks the matrix, and `site` names the input x. The forward pass drops the products of x and an
    /// adapter's A from recompute level `level` on.
    fn linear(
        &mut self,
        select: fn(&Weights) -> &Matrix,
        (x, site): (Operand, Site),
        out: Operand,
        [bias, residual]: [Option<Operand>; 2],
        level: RecomputeLevel,
    ) {
        let (rows, layers) = (self.rows, self.decoder.options.depth());
        // What is added to the residual stream may have a factor.
        let scale = residual.map_or(1.0, |_| self.decoder.options.config.extras.residual_multiplier);
        let Decoder { builder, weights, .. } = &mut *self.decoder;
        let matrix = select(weights);
        let (name, n, k) = (matrix.name, matrix.rows, matrix.columns);
        let weight = matrix.dequantized(builder, self.prefix, layers, &mut self.ops, &mut self.dropped_from);
        let product = Product { bias, residual, scale, ..Product::linear(x, weight, out, rows, k, n) };
        self.ops.push(builder.product(product));
        let adapters = self.decoder.adapters.iter().filter(|adapter| adapter.target.tensor() == name);
        let adapters: Vec<Adapter> = adapters.cloned().collect();
        if adapters.is_empty() {
            return;
        }
        let begin = self.ops.len();
        let x = self.adapter_input(x, site, k);
        let has_any = |layer| adapters.iter().any(|adapter| adapter.layers[layer]);
        self.limit_to(begin, (0..layers as usize).map(has_any).collect());
        for of_target in adapters.chunk_by(|one, next| one.a == next.a) {
            let name = format!("{}.low_rank", of_target[0].target.name());
            let rank = of_target.iter().map(|adapter| adapter.rank).max().unwrap_or(0);
            let low_rank = self.add_activation(&name, &[rows, rank], level);
            for adapter in of_target {
                let begin = self.ops.len();
                let columns = out.starting_at(Index::fixed(adapter.first_column as i64));
                let (a, b) = (Operand::layer(adapter.a, 0), Operand::layer(adapter.b, 0));
                let builder = &mut self.decoder.builder;
                self.ops.push(builder.product(Product::linear(x, a, low_rank, rows, k, adapter.rank)));
                self.ops.push(builder.product(Product {
                    out_stride: Some(n),
                    scale: scale * adapter.scale,
                    accumulate: true,
                    ..Product::linear(low_rank, b, columns, rows, adapter.rank, adapter.columns)
                }));
                self.limit_to(begin, adapter.layers.clone());
            }
        }
    }

    /// Notes that only these `layers` have the ops from number `begin` on. The entries stand for the layers of the
    /// device.
    fn limit_to(&mut self, begin: usize, layers: Vec<bool>) {
        let ops = begin..self.ops.len();
        if !ops.is_empty() && layers.contains(&false) {
            self.partial.push(PartialOps { ops, layers });
        }
    }

    /// Returns the ops of the `layers` layers of the device, in runs of layers with the same ops.
    fn into_runs(self, layers: usize) -> Vec<LayerRun> {
        let Layer { ops, partial, .. } = self;
        let parts_of = |layer: usize| partial.iter().map(|part| part.layers[layer]).collect::<Vec<bool>>();
        let all: Vec<usize> = (0..layers).collect();
        let runs = all.chunk_by(|one, next| parts_of(*one) == parts_of(*next));
        runs.map(|run| {
            let first = run[0];
            let is_absent = |op: usize| partial.iter().any(|part| part.ops.contains(&op) && !part.layers[first]);
            let own = ops.iter().enumerate().filter(|(number, _)| !is_absent(*number));
            LayerRun { layers: first..first + run.len(), ops: own.map(|(_, op)| op.clone()).collect() }
        })
        .collect()
    }

    /// Returns the input `[N, columns]` of adapters: x after dropout, or x itself without dropout. All projections of
    /// one input drop the same elements. It is cheap to recompute, so no recompute level keeps it.
    fn adapter_input(&mut self, x: Operand, site: Site, columns: u64) -> Operand {
        let lora = self.decoder.options.method.lora().expect("adapters have settings");
        if lora.dropout == 0.0 || !self.dropout {
            return x;
        }
        if let Some(input) = self.adapter_inputs.get(&site) {
            return *input;
        }
        let out =
            self.add_activation(&format!("{}.dropout", site.name()), &[self.rows, columns], RecomputeLevel::Nothing);
        let (micro_batch, sequence) = (self.decoder.options.micro_batch, self.decoder.options.sequence);
        let dropout = OpKind::Dropout {
            x,
            out,
            scalars: Operand::whole(self.decoder.scalars),
            seed: lora.seed,
            first_sample: Index { base: 0, scale: 0, micro_batch: micro_batch as i64 },
            layer: Index::layer(self.decoder.options.layers.start as i64),
            site: site as u8,
            probability: lora.dropout,
            rows: self.rows,
            columns,
            sequence,
            accumulate: false,
        };
        self.ops.push(dropout.into());
        self.adapter_inputs.insert(site, out);
        out
    }
}

impl Inputs {
    /// Returns all input tensors, with `tokens` only if it is not `None`.
    pub fn all(&self) -> Vec<TensorId> {
        self.tokens.into_iter().chain([self.positions]).chain(self.document_start).collect()
    }
}

/// Attention of a micro-batch within its sequences.
struct BatchAttention<'a> {
    options: &'a BuildOptions<'a>,
    prefix: &'a str,
    shape: Heads,
}

impl BatchAttention<'_> {
    /// Returns the attention op, and the tensor of softmax statistics that it writes. Adds this tensor and the
    /// workspace. See [`AttentionOps`].
    fn ops(
        &self,
        b: &mut Builder,
        qkv: Operand,
        out: Operand,
        first_keys: Option<Operand>,
    ) -> (Vec<Op>, Vec<TensorId>) {
        let BatchAttention { options, prefix, shape } = *self;
        let document_start = first_keys.expect("every micro-batch has documents");
        let (batch, sequence, layers) = (options.micro_batch, options.sequence, options.depth());
        let stats = b.statistic(&format!("{prefix}attention_stats"), &[batch, shape.heads, sequence], layers);
        let elements = options.kernels.attention_workspace(b.precision, sequence, shape);
        let scratch = b.workspace(&format!("{prefix}attention_workspace"), elements, layers);
        let op = OpKind::Attention {
            qkv,
            document_start,
            out,
            stats: Operand::layer(stats, 0),
            workspace: Operand::layer(scratch, 0),
            batch,
            sequence,
            shape,
            softcap: options.config.extras.score_softcap,
        };
        (vec![op.into()], vec![stats])
    }
}

impl Decoder<'_> {
    /// Adds the input tensors of a forward pass over `rows` tokens; `documents` says whether they are in documents.
    pub(super) fn inputs(&mut self, prefix: &str, rows: u64, documents: bool) -> Inputs {
        let mut input = |name: &str| {
            self.builder.transient(&format!("{prefix}{name}"), &[rows], DType::I32, Category::Activation, 1)
        };
        let tokens = self.options.is_first().then(|| input("tokens"));
        let positions = input("positions");
        Inputs { tokens, positions, document_start: documents.then(|| input("document_start")) }
    }

    /// Builds the forward pass over `rows` tokens; `attention` returns the ops of its attention. Names of activations
    /// start with `prefix`. `dropout` says whether dropout applies to the inputs of adapters.
    pub(super) fn forward(
        &mut self,
        prefix: &str,
        rows: u64,
        inputs: &Inputs,
        dropout: bool,
        attention: &mut AttentionOps,
    ) -> Forward {
        let config = self.options.config;
        let (d, layers) = (config.hidden, self.options.depth());
        let hidden = self.builder.activation(&format!("{prefix}hidden"), &[rows, d], layers + 1);
        let embedding = inputs.tokens.zip(self.weights.embedding).map(|(tokens, table)| {
            let (tokens, table, out) = (Operand::whole(tokens), Operand::whole(table), Operand::slot(hidden, 0));
            let scale = config.embedding_scale(self.options.precision);
            OpKind::Embed { tokens, table, out, rows, hidden: d, vocab: config.vocab, scale }.into()
        });
        let layer_inputs = self.layer_inputs(prefix, rows, inputs);
        let (ops, partial, dropped_from, adapter_inputs) = (vec![], vec![], HashMap::default(), HashMap::default());
        let mut layer =
            Layer { decoder: &mut *self, prefix, rows, ops, partial, dropped_from, dropout, adapter_inputs };
        layer.write(hidden, &layer_inputs, attention);
        let dropped_from = mem::take(&mut layer.dropped_from);
        let runs = layer.into_runs(layers as usize);

        let top = self.weights.top.map(|(final_norm, head)| {
            let normed = self.builder.activation(&format!("{prefix}normed"), &[rows, d], 1);
            let rstd = self.builder.statistic(&format!("{prefix}rstd"), &[rows], 1);
            let norm = OpKind::RmsNorm {
                x: Operand::slot(hidden, i64::from(layers)),
                weight: Operand::whole(final_norm),
                residual: None,
                out: Operand::whole(normed),
                rstd: Operand::whole(rstd),
                rows,
                dim: d,
                eps: config.norm_eps,
                offset: config.model_type.norm_offset(),
            };
            ((normed, head), norm.into())
        });
        let (top, last): (Option<(TensorId, TensorId)>, Option<Op>) = top.unzip();
        let (embedding, last) = (Vec::from_iter(embedding), Vec::from_iter(last));
        Forward { layer_inputs: layer_inputs.ops, embedding, layers: runs, last, hidden, top, dropped_from }
    }

    /// Builds the forward pass of a micro-batch, with attention within its sequences. Names of activations start with
    /// `prefix`; `dropout` says whether dropout applies to the inputs of adapters.
    pub(super) fn forward_over_batch(&mut self, prefix: &str, inputs: &Inputs, dropout: bool) -> Forward {
        let (options, shape) = (self.options, self.shape);
        let attention = BatchAttention { options, prefix, shape };
        let rows = options.micro_batch * options.sequence;
        let mut ops = |b: &mut Builder, qkv, out, first_keys: Option<Operand>| attention.ops(b, qkv, out, first_keys);
        self.forward(prefix, rows, inputs, dropout, &mut ops)
    }

    /// Returns the blocks of a forward pass, from the inputs of the layers to the final norm.
    pub(super) fn forward_blocks(forward: &Forward) -> Vec<Block> {
        let mut blocks = vec![
            Block::once("layer_inputs", forward.layer_inputs.clone()),
            Block::once("embedding", forward.embedding.clone()),
        ];
        for LayerRun { layers, ops } in &forward.layers {
            let (first, repeat) = (layers.start as i64, layers.len() as u32);
            blocks.push(Block { name: "layer".into(), first, step: 1, repeat, ops: ops.clone() });
        }
        blocks.push(Block::once("final_norm", forward.last.clone()));
        blocks.retain(|block| !block.ops.is_empty());
        blocks
    }

    /// Adds the two inputs of the loss, both of shape `[rows]`: the label of each token, and its weight in the loss.
    /// Returns both. Their names start with `prefix`. `None` on a pipeline stage other than the last, which alone
    /// computes the loss.
    pub(super) fn labels(&mut self, prefix: &str, rows: u64) -> Option<(TensorId, TensorId)> {
        if !self.options.is_last() {
            return None;
        }
        let labels = self.builder.transient(&format!("{prefix}labels"), &[rows], DType::I32, Category::Activation, 1);
        let weights = self.builder.statistic(&format!("{prefix}token_weights"), &[rows], 1);
        Some((labels, weights))
    }
}
