//! The forward pass of a micro-batch, up to the loss.

use super::lora::Site;
use super::matrices::Matrix;
use super::{Decoder, Weights};
use crate::builder::{Builder, Product};
use crate::op::{Heads, Op, OpKind};
use crate::program::Block;
use crate::tensor::{Index, Operand, TensorId};
use plimsoll_core::{Category, DType, RecomputeLevel};
use std::collections::HashMap;

/// Turns qkv `[N,C]` into `[N, H·E]`: the ops, and the tensors that they leave beside their result.
pub(super) type AttentionOps<'f> = dyn FnMut(&mut Builder, Operand, Operand) -> (Vec<Op>, Vec<TensorId>) + 'f;

/// The inputs of a pass over a micro-batch.
pub(super) struct Inputs {
    /// Where tokens come in.
    pub tokens: Option<TensorId>,
    pub positions: TensorId,
    pub document_start: TensorId,
}

/// A forward pass: its blocks, and the tensors that others ask for.
pub(super) struct Forward {
    /// Empty where the first layer's input comes from another stage.
    pub embedding: Vec<Op>,
    pub layer: Vec<Op>,
    /// Empty where the last layer's output goes to another stage.
    pub last: Vec<Op>,
    /// [N, D], one slot before each layer and one after the last.
    pub hidden: TensorId,
    /// [N, D] after the last norm, and the head that it goes to, where they are.
    pub top: Option<(TensorId, TensorId)>,
    /// From which level on a tensor is thrown away.
    pub dropped_from: HashMap<TensorId, RecomputeLevel>,
}

/// A layer while it is written down.
struct Layer<'a, 'b> {
    decoder: &'a mut Decoder<'b>,
    prefix: &'a str,
    rows: u64,
    ops: Vec<Op>,
    dropped_from: HashMap<TensorId, RecomputeLevel>,
    /// Whether adapters leave out a part of what they see, as in training.
    dropout: bool,
    /// What is left of the inputs of adapters.
    left: HashMap<Site, Operand>,
}

impl Layer<'_, '_> {
    /// All ops of a layer: from slot l of `hidden` to slot l + 1.
    fn write_down(&mut self, hidden: TensorId, inputs: &Inputs, attention: &mut AttentionOps) {
        use RecomputeLevel::{Attention, Block as WholeBlock, FeedForward, Norms};
        let (rows, shape, table_rows) = (self.rows, self.decoder.shape, self.decoder.table_rows);
        let (d, f) = (self.decoder.what.config.hidden, self.decoder.what.config.ffn);
        let Weights { attention_norm, qkv_bias, qk_norms, ffn_norm, rope_table, .. } = self.decoder.weights;
        let (x, next) = (Operand::layer(hidden, 0), Operand::layer(hidden, 1));

        let normed = self.norm("attention", x, attention_norm);
        let name = if qk_norms.is_some() { "qkv_raw" } else { "qkv" };
        let product = self.value(name, &[rows, shape.columns()], Attention);
        let bias = qkv_bias.map(|tensor| Operand::layer(tensor, 0));
        self.linear(|w| &w.qkv, (normed, Site::AttentionIn), product, [bias, None], Attention);
        let qkv = match qk_norms {
            Some(weights) => self.head_norm(product, weights, shape),
            None => product,
        };
        self.ops.push(
            OpKind::Rope {
                qkv,
                table: Operand::whole(rope_table),
                positions: Operand::whole(inputs.positions),
                rows,
                table_rows,
                shape,
                inverse: false,
            }
            .into(),
        );
        let mixed = self.value("attention_mixed", &[rows, shape.query_columns()], Attention);
        let (ops, beside) = attention(&mut self.decoder.builder, qkv, mixed);
        self.ops.extend(ops);
        self.dropped_from.extend(beside.into_iter().map(|id| (id, Attention)));
        let middle = self.value("middle", &[rows, d], WholeBlock);
        self.linear(|w| &w.attention_out, (mixed, Site::AttentionOut), middle, [None, Some(x)], Attention);

        let normed = self.norm("ffn", middle, ffn_norm);
        let gate_up = self.value("gate_up_product", &[rows, 2 * f], FeedForward);
        self.linear(|w| &w.gate_up, (normed, Site::FfnIn), gate_up, [None, None], FeedForward);
        let gated = self.value("gated", &[rows, f], Norms);
        self.ops.push(OpKind::SwiGlu { gate_up, out: gated, rows, ffn: f }.into());
        self.linear(|w| &w.down, (gated, Site::FfnMiddle), next, [None, Some(middle)], FeedForward);
    }

    /// The norms of query and key heads.
    fn head_norm(&mut self, x: Operand, (q_norm, k_norm): (TensorId, TensorId), shape: Heads) -> Operand {
        let (rows, eps, wide) = (self.rows, self.decoder.what.config.norm_eps, self.decoder.what.precision.wide());
        let out = self.value("qkv", &[rows, shape.columns()], RecomputeLevel::Norms);
        let rstd = self.made("qk_rstd", &[rows, shape.rotated()], wide, RecomputeLevel::Norms);
        let (q_weight, k_weight) = (Operand::layer(q_norm, 0), Operand::layer(k_norm, 0));
        self.ops.push(OpKind::HeadNorm { x, q_weight, k_weight, out, rstd, rows, shape, eps }.into());
        out
    }

    fn made(&mut self, name: &str, dims: &[u64], dtype: DType, level: RecomputeLevel) -> Operand {
        let layers = self.decoder.what.depth();
        let name = format!("{}{name}", self.prefix);
        let id = self.decoder.builder.transient(&name, dims, dtype, Category::Activation, layers);
        self.dropped_from.insert(id, level);
        Operand::layer(id, 0)
    }

    /// An activation of the layer, which recompute throws away from `level` on.
    fn value(&mut self, name: &str, dims: &[u64], level: RecomputeLevel) -> Operand {
        self.made(name, dims, self.decoder.what.precision, level)
    }

    /// out = x / rms(x) · weight.
    fn norm(&mut self, name: &str, x: Operand, weight: TensorId) -> Operand {
        let (rows, dim, eps) = (self.rows, self.decoder.what.config.hidden, self.decoder.what.config.norm_eps);
        let wide = self.decoder.what.precision.wide();
        let out = self.value(&format!("{name}_normed"), &[rows, dim], RecomputeLevel::Norms);
        let rstd = self.made(&format!("{name}_rstd"), &[rows], wide, RecomputeLevel::Norms);
        self.ops.push(OpKind::RmsNorm { x, weight: Operand::layer(weight, 0), out, rstd, rows, dim, eps }.into());
        out
    }

    /// out = x · matrixᵀ (+ bias) (+ residual), and what the matrix's adapters add to their columns. Recompute throws
    /// the insides of adapters away from `level` on.
    fn linear(
        &mut self,
        of: fn(&Weights) -> &Matrix,
        (x, site): (Operand, Site),
        out: Operand,
        [bias, residual]: [Option<Operand>; 2],
        level: RecomputeLevel,
    ) {
        let (rows, layers) = (self.rows, self.decoder.what.depth());
        let Decoder { builder, weights, .. } = &mut *self.decoder;
        let matrix = of(weights);
        let (name, n, k) = (matrix.name, matrix.rows, matrix.columns);
        let weight = matrix.whole(builder, self.prefix, layers, &mut self.ops, &mut self.dropped_from);
        let product = Product { bias, residual, ..Product::linear(x, weight, out, rows, k, n) };
        self.ops.push(builder.product(product));
        let Some(lora) = self.decoder.what.method.lora() else { return };
        for number in 0..self.decoder.adapters.len() {
            let adapter = self.decoder.adapters[number];
            if adapter.target.tensor() != name {
                continue;
            }
            let x = self.left_of(x, site, k);
            let inside = self.value(&format!("{}.inside", adapter.target.name()), &[rows, lora.rank], level);
            let columns = out.from(Index::fixed(adapter.first_column as i64));
            let (a, b) = (Operand::layer(adapter.a, 0), Operand::layer(adapter.b, 0));
            let builder = &mut self.decoder.builder;
            self.ops.push(builder.product(Product::linear(x, a, inside, rows, k, lora.rank)));
            self.ops.push(builder.product(Product {
                out_stride: Some(n),
                scale: lora.scale(),
                accumulate: true,
                ..Product::linear(inside, b, columns, rows, lora.rank, adapter.columns)
            }));
        }
    }

    /// What adapters see of x `[N, columns]`: all projections of one input leave out the same elements. It costs little
    /// to make, so it is never kept.
    fn left_of(&mut self, x: Operand, site: Site, columns: u64) -> Operand {
        let lora = self.decoder.what.method.lora().expect("adapters have settings");
        if lora.dropout == 0.0 || !self.dropout {
            return x;
        }
        if let Some(left) = self.left.get(&site) {
            return *left;
        }
        let out = self.value(&format!("{}.left", site.name()), &[self.rows, columns], RecomputeLevel::Nothing);
        let (micro_batch, sequence) = (self.decoder.what.micro_batch, self.decoder.what.sequence);
        let dropout = OpKind::Dropout {
            x,
            out,
            scalars: Operand::whole(self.decoder.scalars),
            seed: lora.seed,
            first_sample: Index { base: 0, scale: 0, micro_batch: micro_batch as i64 },
            layer: Index::layer(self.decoder.what.layers.start as i64),
            site: site as u8,
            probability: lora.dropout,
            rows: self.rows,
            columns,
            sequence,
            accumulate: false,
        };
        self.ops.push(dropout.into());
        self.left.insert(site, out);
        out
    }
}

impl Inputs {
    /// What the host fills.
    pub fn all(&self) -> Vec<TensorId> {
        self.tokens.into_iter().chain([self.positions, self.document_start]).collect()
    }
}

impl Decoder<'_> {
    pub(super) fn inputs(&mut self, prefix: &str, rows: u64) -> Inputs {
        let mut input = |name: &str| {
            self.builder.transient(&format!("{prefix}{name}"), &[rows], DType::I32, Category::Activation, 1)
        };
        let tokens = self.what.is_first().then(|| input("tokens"));
        Inputs { tokens, positions: input("positions"), document_start: input("document_start") }
    }

    /// The forward pass over `rows` rows. `attention` makes the op that turns qkv[N,C] into [N, H·E].
    pub(super) fn forward(
        &mut self,
        prefix: &str,
        rows: u64,
        inputs: &Inputs,
        dropout: bool,
        attention: &mut AttentionOps,
    ) -> Forward {
        let config = self.what.config;
        let (d, layers) = (config.hidden, self.what.depth());
        let hidden = self.builder.activation(&format!("{prefix}hidden"), &[rows, d], layers + 1);
        let embedding = inputs.tokens.zip(self.weights.embedding).map(|(tokens, table)| {
            let (tokens, table, out) = (Operand::whole(tokens), Operand::whole(table), Operand::slot(hidden, 0));
            OpKind::Embed { tokens, table, out, rows, hidden: d, vocab: config.vocab }.into()
        });
        let (ops, dropped_from, left) = (Vec::new(), HashMap::new(), HashMap::new());
        let mut layer = Layer { decoder: &mut *self, prefix, rows, ops, dropped_from, dropout, left };
        layer.write_down(hidden, inputs, attention);
        let Layer { ops, dropped_from, .. } = layer;

        let top = self.weights.top.map(|(final_norm, head)| {
            let normed = self.builder.activation(&format!("{prefix}normed"), &[rows, d], 1);
            let rstd = self.builder.statistic(&format!("{prefix}rstd"), &[rows], 1);
            let norm = OpKind::RmsNorm {
                x: Operand::slot(hidden, i64::from(layers)),
                weight: Operand::whole(final_norm),
                out: Operand::whole(normed),
                rstd: Operand::whole(rstd),
                rows,
                dim: d,
                eps: config.norm_eps,
            };
            ((normed, head), norm.into())
        });
        let (top, last): (Option<(TensorId, TensorId)>, Option<Op>) = top.unzip();
        let (embedding, last) = (Vec::from_iter(embedding), Vec::from_iter(last));
        Forward { embedding, layer: ops, last, hidden, top, dropped_from }
    }

    /// Attention within a micro-batch.
    pub(super) fn forward_over_batch(&mut self, prefix: &str, inputs: &Inputs, dropout: bool) -> Forward {
        let (batch, sequence, kernels) = (self.what.micro_batch, self.what.sequence, self.what.kernels);
        let layers = self.what.depth();
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
        self.forward(prefix, batch * sequence, inputs, dropout, &mut attention)
    }

    pub(super) fn forward_blocks(&self, forward: &Forward) -> Vec<Block> {
        let (first, step, repeat) = (0, 1, self.what.depth());
        let mut blocks = vec![
            Block::once("embedding", forward.embedding.clone()),
            Block { name: "layer".into(), first, step, repeat, ops: forward.layer.clone() },
            Block::once("final_norm", forward.last.clone()),
        ];
        blocks.retain(|block| !block.ops.is_empty());
        blocks
    }

    /// What the loss is found with, where it is.
    pub(super) fn labels(&mut self, prefix: &str, rows: u64) -> Option<(TensorId, TensorId)> {
        if !self.what.is_last() {
            return None;
        }
        let labels = self.builder.transient(&format!("{prefix}labels"), &[rows], DType::I32, Category::Activation, 1);
        let weights = self.builder.statistic(&format!("{prefix}token_weights"), &[rows], 1);
        Some((labels, weights))
    }
}
