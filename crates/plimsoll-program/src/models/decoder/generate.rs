//! Programs without a backward pass: evaluation, and generation with its key-value cache.

use super::lora::Adapter;
use super::loss::{Loss, head_blocks};
use super::{BuildOptions, Decoder, Generation};
use crate::builder::{Builder, Product};
use crate::op::{Heads, Op, OpKind};
use crate::program::{Block, ProgramKind};
use crate::tensor::{Index, Lifetime, Operand, TensorId};
use plimsoll_core::{Category, DType, WorkKind};
use std::mem;

impl Decoder<'_> {
    /// Adds the Program that computes the loss of evaluation data.
    pub(super) fn evaluate(&mut self) {
        self.forward_with_loss(WorkKind::Evaluate, ProgramKind::Evaluate);
    }

    /// Adds the Program that computes the log-probability of each label of training data.
    pub(super) fn score(&mut self) {
        self.forward_with_loss(WorkKind::Score, ProgramKind::Score);
    }

    /// Adds the Program that computes the log-probability of each label under the initial weights.
    pub(super) fn reference(&mut self) {
        let initial = self.weights.replaced_by(&self.initial);
        let weights = mem::replace(&mut self.weights, initial);
        let copy = |id: &TensorId| self.initial.get(id).copied();
        // Adapters without a copy are left out.
        let copied =
            |adapter: &Adapter| Some(Adapter { a: copy(&adapter.a)?, b: copy(&adapter.b)?, ..adapter.clone() });
        let initial = self.adapters.iter().filter_map(copied).collect();
        let adapters = mem::replace(&mut self.adapters, initial);
        self.forward_with_loss(WorkKind::Reference, ProgramKind::Reference);
        (self.weights, self.adapters) = (weights, adapters);
    }

    /// Adds a forward pass with its loss, as a phase of its own. Its inputs and outputs are named after `kind`. It tells
    /// which labels had the largest logit; a score writes log-probabilities instead.
    fn forward_with_loss(&mut self, work: WorkKind, kind: ProgramKind) {
        let prefix = format!("{kind}.");
        let rows = self.options.micro_batch * self.options.sequence;
        let inputs = self.inputs(&prefix, rows, true);
        let labels = self.labels(&prefix, rows);
        let forward = self.forward_over_batch(&prefix, &inputs, false);
        let (mut all, mut outputs, mut blocks) = (inputs.all(), vec![], Self::forward_blocks(&forward));
        if let Some(((normed, head), (labels, token_weights))) = forward.top.zip(labels) {
            let (mut correct, mut log_probabilities) = (None, None);
            let output = if matches!(kind, ProgramKind::Score | ProgramKind::Reference) {
                let output = self.builder.statistic(&format!("{prefix}log_probabilities"), &[rows], 1);
                *log_probabilities.insert(output)
            } else {
                let name = format!("{prefix}correct");
                *correct.insert(self.builder.transient(&name, &[rows], DType::I32, Category::Activation, 1))
            };
            let (prefix, gradients) = (&prefix, None);
            let loss = Loss { prefix, normed, head, labels, token_weights, gradients, correct, log_probabilities };
            blocks.extend(self.loss(loss));
            all.extend([labels, token_weights]);
            outputs.push(output);
        }
        let program = self.push_program(work, kind, all, outputs, blocks);
        self.push_phase(vec![program]);
    }

    pub(super) fn generate(&mut self, generation: Generation) {
        let layers = self.options.depth();
        let shape = self.shape;
        let Generation { slots, capacity, .. } = generation;
        let (columns, precision) = (shape.kv_heads * shape.head_dim, self.options.precision);
        let mut cache = |name: &str| {
            let dims = [slots * capacity, columns];
            self.builder.on_device(name, &dims, precision, Category::Activation, Lifetime::Phase, layers)
        };
        let (keys, values) = (Operand::layer(cache("cache_keys"), 0), Operand::layer(cache("cache_values"), 0));
        let options = self.options;
        let mut programs = Vec::new();
        let (parts, part) = generation.parts();
        // Prompts in chunks, or one token of each sequence.
        for (kind, sequences, rows) in [(ProgramKind::Prefill, parts, part), (ProgramKind::Decode, slots, 1)] {
            let prefix = format!("{kind}.");
            let inputs = self.inputs(&prefix, sequences * rows, false);
            let name = format!("{prefix}places");
            let places = self.builder.transient(&name, &[sequences * rows], DType::I32, Category::Activation, 1);
            let attention = CachedAttention {
                options,
                prefix: &prefix,
                keys,
                values,
                places: Operand::whole(places),
                slots,
                sequences,
                rows,
                capacity,
                shape,
            };
            let rows = sequences * rows;
            let mut ops =
                |b: &mut Builder, qkv, out, first_keys: Option<Operand>| attention.ops(b, qkv, out, first_keys);
            let forward = self.forward(&prefix, rows, &inputs, false, &mut ops);
            let mut blocks = Self::forward_blocks(&forward);
            // With several slots, the decode Program processes the last token of each prompt.
            let top = forward.top.filter(|_| kind == ProgramKind::Decode || slots == 1);
            let logits = top.map(|top| self.logits(kind, rows, top, &mut blocks));
            let inputs = inputs.all().into_iter().chain([places]).collect();
            programs.push(self.push_program(WorkKind::Generate, kind, inputs, Vec::from_iter(logits), blocks));
        }
        if slots > 1 {
            programs.push(self.copy_prefix(keys, values, generation));
        }
        self.push_phase(programs);
    }

    /// Adds the Program that copies tokens from one slot of the key-value cache to others, as many as a chunk has at once.
    /// Returns its index.
    fn copy_prefix(&mut self, keys: Operand, values: Operand, generation: Generation) -> usize {
        let (kind, Generation { slots, capacity, chunk: rows }) = (ProgramKind::CopyPrefix, generation);
        let [from, to] = ["from", "to"].map(|name| {
            self.builder.transient(&format!("{kind}.{name}"), &[rows], DType::I32, Category::Activation, 1)
        });
        let (layers, shape) = (self.options.depth(), self.shape);
        let operands = (Operand::whole(from), Operand::whole(to));
        let copy = OpKind::CopyCache { keys, values, from: operands.0, to: operands.1, slots, capacity, rows, shape };
        let layer = Block { name: "layer".into(), first: 0, step: 1, repeat: layers, ops: vec![copy.into()] };
        self.push_program(WorkKind::Generate, kind, vec![from, to], vec![], vec![layer])
    }

    /// Appends the blocks that compute logits from the final norm, and returns their tensor: `[1, V]` of one row of a
    /// prompt, or `[rows, V]` of the next tokens of all sequences. Only the last stage of a pipeline computes logits.
    fn logits(
        &mut self,
        kind: ProgramKind,
        rows: u64,
        (normed, head): (TensorId, TensorId),
        blocks: &mut Vec<Block>,
    ) -> TensorId {
        let (d, v) = (self.options.config.hidden, self.options.config.vocab);
        let (x, rows) = if kind == ProgramKind::Prefill {
            let picked = self.builder.activation(&format!("{kind}.picked"), &[1, d], 1);
            let (x, out, scalars) = (Operand::whole(normed), Operand::whole(picked), Operand::whole(self.scalars));
            blocks.push(Block::once("pick", vec![OpKind::PickRow { x, scalars, out, rows, columns: d }.into()]));
            (picked, 1)
        } else {
            (normed, rows)
        };
        let logits = self.builder.activation(&format!("{kind}.logits"), &[rows, v], 1);
        let head_blocks = head_blocks(v, self.options.kernels);
        if rows > 1 && head_blocks.len() > 1 {
            // Each block writes some columns, and thereby keeps the others.
            let fill = OpKind::Fill { into: Operand::whole(logits), value: 0.0, elements: rows * v };
            blocks.push(Block::once("clear logits", vec![fill.into()]));
        }
        for block in head_blocks {
            let (columns, first) = (block.end - block.start, block.start as i64);
            let head = Operand::whole(head).starting_at(Index::fixed(first * d as i64));
            let out = Operand::whole(logits).starting_at(Index::fixed(first));
            let scale = 1.0 / self.options.config.extras.logits_scaling;
            let product = Product::linear(Operand::whole(x), head, out, rows, d, columns);
            let product = self.builder.product(Product { scale, out_stride: Some(v), ..product });
            blocks.push(Block::once("logits", vec![product]));
        }
        if let Some(cap) = self.options.config.extras.logit_softcap {
            let op = OpKind::SoftCap { x: Operand::whole(logits), elements: rows * v, cap };
            blocks.push(Block::once("cap logits", vec![op.into()]));
        }
        logits
    }
}

/// Attention of `rows` new tokens of each of `sequences` sequences over the key-value caches in `slots`.
struct CachedAttention<'a> {
    options: &'a BuildOptions<'a>,
    prefix: &'a str,
    keys: Operand,
    values: Operand,
    places: Operand,
    slots: u64,
    sequences: u64,
    rows: u64,
    capacity: u64,
    shape: Heads,
}

impl CachedAttention<'_> {
    /// Returns the ops that append to the caches and attend to them, and adds their workspace. See `AttentionOps`.
    fn ops(
        &self,
        b: &mut Builder,
        qkv: Operand,
        out: Operand,
        first_keys: Option<Operand>,
    ) -> (Vec<Op>, Vec<TensorId>) {
        let CachedAttention { options, prefix, keys, values, places, slots, sequences, rows, capacity, shape } = *self;
        let elements = options.kernels.cached_attention_workspace(b.precision, sequences, rows, capacity, shape);
        let scratch = b.workspace(&format!("{prefix}attention_workspace"), elements, options.depth());
        let append = OpKind::AppendCache { qkv, keys, values, places, slots, sequences, rows, capacity, shape };
        let attend = OpKind::CachedAttention {
            qkv,
            keys,
            values,
            places,
            first_keys,
            out,
            workspace: Operand::layer(scratch, 0),
            slots,
            sequences,
            rows,
            capacity,
            shape,
            softcap: options.config.extras.score_softcap,
        };
        (vec![append.into(), attend.into()], vec![])
    }
}
