//! Programs without a backward pass: evaluation, and generation with its key-value cache.

use super::loss::{Loss, head_blocks};
use super::{BuildOptions, Decoder, Generation};
use crate::builder::{Builder, Product};
use crate::op::{Heads, Op, OpKind};
use crate::program::{Block, ProgramKind};
use crate::tensor::{Index, Lifetime, Operand, TensorId};
use plimsoll_core::{Category, DType, WorkKind};

impl Decoder<'_> {
    pub(super) fn evaluate(&mut self) {
        let rows = self.options.micro_batch * self.options.sequence;
        let inputs = self.inputs("evaluate.", rows, true);
        let labels = self.labels("evaluate.", rows);
        let forward = self.forward_over_batch("evaluate.", &inputs, false);
        let (mut all, mut outputs, mut blocks) = (inputs.all(), vec![], self.forward_blocks(&forward));
        if let Some(((normed, head), (labels, token_weights))) = forward.top.zip(labels) {
            let correct = self.builder.transient("evaluate.correct", &[rows], DType::I32, Category::Activation, 1);
            let (prefix, gradients) = ("evaluate.", None);
            let loss = Loss { prefix, normed, head, labels, token_weights, gradients, correct: Some(correct) };
            blocks.extend(self.loss(loss));
            all.extend([labels, token_weights]);
            outputs.push(correct);
        }
        let program = self.push_program(WorkKind::Evaluate, ProgramKind::Evaluate, all, outputs, blocks);
        self.push_phase(vec![program]);
    }

    pub(super) fn generate(&mut self, generation: Generation) {
        let layers = self.options.depth();
        let shape = self.shape;
        let capacity = generation.capacity;
        let (columns, precision) = (shape.kv_heads * shape.head_dim, self.options.precision);
        let mut cache = |name: &str| {
            let dims = [capacity, columns];
            self.builder.on_device(name, &dims, precision, Category::Activation, Lifetime::Phase, layers)
        };
        let (keys, values) = (Operand::layer(cache("cache_keys"), 0), Operand::layer(cache("cache_values"), 0));
        let scalars = Operand::whole(self.scalars);
        let options = self.options;
        let mut programs = Vec::new();
        for (kind, rows) in [(ProgramKind::Prefill, generation.chunk), (ProgramKind::Decode, 1)] {
            let prefix = format!("{kind}.");
            let inputs = self.inputs(&prefix, rows, false);
            let attention = CachedAttention { options, prefix: &prefix, keys, values, scalars, rows, capacity, shape };
            let mut ops =
                |b: &mut Builder, qkv, out, first_keys: Option<Operand>| attention.ops(b, qkv, out, first_keys);
            let forward = self.forward(&prefix, rows, &inputs, false, &mut ops);
            let (d, v) = (self.options.config.hidden, self.options.config.vocab);
            let mut blocks = self.forward_blocks(&forward);
            let mut outputs = vec![];
            // Only the last stage of a pipeline computes logits.
            if let Some((normed, head)) = forward.top {
                let picked = self.builder.activation(&format!("{prefix}picked"), &[1, d], 1);
                let logits = self.builder.activation(&format!("{prefix}logits"), &[1, v], 1);
                let (x, out) = (Operand::whole(normed), Operand::whole(picked));
                blocks.push(Block::once("pick", vec![OpKind::PickRow { x, scalars, out, rows, columns: d }.into()]));
                for block in head_blocks(v, self.options.kernels) {
                    let (columns, first) = (block.end - block.start, block.start as i64);
                    let head = Operand::whole(head).starting_at(Index::fixed(first * d as i64));
                    let out = Operand::whole(logits).starting_at(Index::fixed(first));
                    let scale = 1.0 / self.options.config.extras.logits_scaling;
                    let product = Product::linear(Operand::whole(picked), head, out, 1, d, columns);
                    blocks.push(Block::once("logits", vec![self.builder.product(Product { scale, ..product })]));
                }
                outputs.push(logits);
            }
            programs.push(self.push_program(WorkKind::Generate, kind, inputs.all(), outputs, blocks));
        }
        self.push_phase(programs);
    }
}

/// Attention of `rows` new tokens over the key-value cache.
struct CachedAttention<'a> {
    options: &'a BuildOptions<'a>,
    prefix: &'a str,
    keys: Operand,
    values: Operand,
    scalars: Operand,
    rows: u64,
    capacity: u64,
    shape: Heads,
}

impl CachedAttention<'_> {
    /// Returns the ops that append to the cache and attend to it, and adds their workspace. See `AttentionOps`.
    fn ops(
        &self,
        b: &mut Builder,
        qkv: Operand,
        out: Operand,
        first_keys: Option<Operand>,
    ) -> (Vec<Op>, Vec<TensorId>) {
        let CachedAttention { options, prefix, keys, values, scalars, rows, capacity, shape } = *self;
        let elements = options.kernels.cached_attention_workspace(b.precision, rows, capacity, shape);
        let scratch = b.workspace(&format!("{prefix}attention_workspace"), elements, options.depth());
        let workspace = Operand::layer(scratch, 0);
        let append = OpKind::AppendCache { qkv, keys, values, scalars, rows, capacity, shape };
        let attend =
            OpKind::CachedAttention { qkv, keys, values, scalars, first_keys, out, workspace, rows, capacity, shape };
        (vec![append.into(), attend.into()], vec![])
    }
}
