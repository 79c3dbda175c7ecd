//! The backward pass, the norm of all gradients, and the update.

use super::forward::{Forward, LayerRun};
use super::loss::Loss;
use super::{AdamState, Decoder, Optimizer, Training, for_each_slot};
use crate::derivative::Tape;
use crate::formats::{QUANTIZED_STATE_ELEMENTS_MIN, STATE_BLOCK};
use crate::op::OpKind;
use crate::passes::recompute::recompute;
use crate::program::{Block, ProgramKind};
use crate::scalars::METRIC_COUNT;
use crate::tensor::{Operand, Tensor, TensorId};
use foldhash::{HashMap, HashSet};
use plimsoll_core::{Category, DType, RecomputeLevel, WorkKind};

/// Name of the tensor with the gradient of the residual stream in a backward pass; all layers share it.
pub(crate) const RESIDUAL_GRADIENT: &str = "train.stream.gradient";

/// The description of a tensor of optimizer state that belongs to a trained tensor.
pub(super) struct OptimizerTensor {
    /// Name suffix, such as `first` for the first moment.
    pub role: &'static str,
    /// Dtype of a tensor of 8-bit state: u8, or f32 for its scales. `None` for state that is not quantized, which is in
    /// f32 (f64 in an f64 run).
    pub dtype: Option<DType>,
    /// Elements of the trained tensor per element of this tensor: 1, or 256 for the scales of 8-bit state.
    pub elements_per_entry: u64,
}

impl Optimizer {
    /// Returns descriptions of the tensors of optimizer state that a trained tensor with `elements` elements per slot
    /// needs. Empty for SGD without momentum.
    pub(super) fn state(&self, elements: u64) -> Vec<OptimizerTensor> {
        let full = |role| OptimizerTensor { role, dtype: None, elements_per_entry: 1 };
        let quantized = |role| OptimizerTensor { role, dtype: Some(DType::U8), elements_per_entry: 1 };
        let scale = |role| OptimizerTensor { role, dtype: Some(DType::F32), elements_per_entry: STATE_BLOCK };
        match self {
            Optimizer::AdamW { state: AdamState::Blockwise8, .. } if elements >= QUANTIZED_STATE_ELEMENTS_MIN => {
                vec![quantized("first"), scale("first_scale"), quantized("second"), scale("second_scale")]
            }
            Optimizer::AdamW { .. } => vec![full("first"), full("second")],
            Optimizer::Sgd { momentum, .. } if *momentum != 0.0 => vec![full("first")],
            Optimizer::Sgd { .. } => vec![],
        }
    }
}

impl Decoder<'_> {
    pub(super) fn train(&mut self, training: &Training) {
        assert_eq!(training.recompute.len(), self.options.depth() as usize, "one recompute level per layer");
        let rows = self.options.micro_batch * self.options.sequence;
        let layers = i64::from(self.options.depth());
        let inputs = self.inputs("train.", rows, true);
        let labels = self.labels("train.", rows);
        let forward = self.forward_over_batch("train.", &inputs, true);

        let mut gradients = HashMap::default();
        for id in self.trained_weights() {
            let gradient = self.add_companion(id, "gradient", Category::Gradient);
            gradients.insert(id, gradient);
        }

        let mut blocks = Vec::new();
        let top = forward.top.zip(labels).map(|((normed, head), (labels, token_weights))| {
            let dnormed = self.builder.activation("train.normed.gradient", &[rows, self.options.config.hidden], 1);
            let gradients = Some((dnormed, gradients.get(&head).copied()));
            blocks = self.loss(Loss {
                prefix: "train.",
                normed,
                head,
                labels,
                token_weights,
                gradients,
                correct: None,
                log_probabilities: None,
            });
            (normed, dnormed)
        });

        // One buffer holds the gradient of the residual stream through all layers.
        let stream = Operand::whole(self.builder.activation(RESIDUAL_GRADIENT, &[rows, self.options.config.hidden], 1));
        if let Some((normed, dnormed)) = top {
            let mut tape = Tape::new(&mut self.builder, &gradients, &forward.last);
            tape.set_gradient(Operand::whole(normed), Operand::whole(dnormed));
            tape.reserve_gradient(Operand::slot(forward.hidden, layers), stream);
            for op in forward.last.iter().rev() {
                tape.derive(&op.kind);
            }
            blocks.push(Block::once("final_norm", tape.into_ops()));
        }

        for run in forward.layers.iter().rev() {
            let levels = &training.recompute[run.layers.clone()];
            blocks.extend(self.backward_layers(run, levels, &forward, stream, &gradients));
        }

        let mut tape = Tape::new(&mut self.builder, &gradients, &forward.embedding);
        tape.set_gradient(Operand::slot(forward.hidden, 0), stream);
        for op in forward.embedding.iter().rev() {
            tape.derive(&op.kind);
        }
        // A frozen embedding has no gradient.
        let embedding = tape.into_ops();
        blocks.extend((!embedding.is_empty()).then(|| Block::once("embedding", embedding)));

        let blocks_forward = Self::forward_blocks(&forward);
        let all = inputs.all().into_iter().chain(labels.into_iter().flat_map(<[TensorId; 2]>::from)).collect();
        let forward = self.push_program(WorkKind::Forward, ProgramKind::Forward, all, vec![], blocks_forward);
        let backward = self.push_program(WorkKind::Backward, ProgramKind::Backward, vec![], vec![], blocks);
        self.push_phase(vec![forward, backward]);
        self.update(&training.optimizer, &gradients);
        if self.options.files {
            self.save(&training.optimizer);
        }
    }

    /// Returns the blocks of the backward pass of layers with equal ops, last layer first: a block for each stretch of
    /// layers with the same recompute level. `stream` holds the gradient of the residual stream.
    fn backward_layers(
        &mut self,
        run: &LayerRun,
        levels: &[RecomputeLevel],
        forward: &Forward,
        stream: Operand,
        gradients: &HashMap<TensorId, TensorId>,
    ) -> Vec<Block> {
        let mut tape = Tape::new(&mut self.builder, gradients, &run.ops);
        tape.set_gradient(Operand::layer(forward.hidden, 1), stream);
        for op in run.ops.iter().rev() {
            tape.derive(&op.kind);
        }
        assert_eq!(
            tape.gradient(Operand::layer(forward.hidden, 0)),
            Some(stream),
            "the residual gradient is summed in place"
        );
        let backward = tape.into_ops();
        let mut end = run.layers.end as i64;
        let mut blocks = Vec::new();
        for levels in levels.chunk_by(|a, b| a == b).collect::<Vec<_>>().iter().rev() {
            let dropped: HashSet<TensorId> =
                forward.dropped_from.iter().filter(|(_, from)| **from <= levels[0]).map(|(id, _)| *id).collect();
            let ops = recompute(&mut self.builder, &run.ops, &backward, &dropped);
            blocks.push(Block { name: "layer".into(), first: end - 1, step: -1, repeat: levels.len() as u32, ops });
            end -= levels.len() as i64;
        }
        blocks
    }

    /// Adds the tensors of optimizer state of a weight and returns them.
    fn add_optimizer_state(&mut self, weight: TensorId, optimizer: &Optimizer) -> Vec<TensorId> {
        let Tensor { name, slots, .. } = self.builder.set.tensor(weight).clone();
        let elements = self.elements_of(weight);
        let states = optimizer.state(elements).into_iter();
        states
            .map(|OptimizerTensor { role, dtype, elements_per_entry }| match dtype {
                None => self.add_companion(weight, role, Category::Optimizer),
                Some(dtype) => {
                    let dims = [elements.div_ceil(elements_per_entry)];
                    self.builder.persistent(&format!("{name}.{role}"), &dims, dtype, Category::Optimizer, slots)
                }
            })
            .collect()
    }

    fn update(&mut self, optimizer: &Optimizer, gradients: &HashMap<TensorId, TensorId>) {
        let scalars = Operand::whole(self.scalars);
        let metrics = Operand::whole(self.metrics);
        let clear = OpKind::Fill { into: metrics, value: 0.0, elements: METRIC_COUNT };
        let mut begin = vec![Block::once("metrics", vec![clear.into()])];
        let mut fresh = Vec::new();
        let mut norm = Vec::new();
        let mut update = Vec::new();
        let partials = self.options.kernels.squared_norm_workspace();
        let workspace = Operand::whole(self.builder.workspace("norm_workspace", partials, 1));
        for id in self.trained_weights() {
            let states = self.add_optimizer_state(id, optimizer);
            let tensor = self.builder.set.tensor(id);
            let elements = tensor.elements();
            let decays = tensor.shape.len() == 2;
            let weight = Operand::layer(self.master_or_weight(id), 0);
            let gradient = Operand::layer(gradients[&id], 0);
            begin.push(for_each_slot(tensor, OpKind::Fill { into: gradient, value: 0.0, elements }));
            norm.push(for_each_slot(tensor, OpKind::SquaredNorm { x: gradient, metrics, workspace, elements }));
            for &state in &states {
                let (into, elements) = (Operand::layer(state, 0), self.builder.set.tensor(state).elements());
                fresh.push(for_each_slot(tensor, OpKind::Fill { into, value: 0.0, elements }));
            }
            let matrices_only = |decay: f64| if decays { decay } else { 0.0 };
            let states: Vec<Operand> = states.into_iter().map(|state| Operand::layer(state, 0)).collect();
            let op = match (*optimizer, &states[..]) {
                (Optimizer::AdamW { betas, eps, decay, .. }, &[first, second]) => {
                    let decay = matrices_only(decay);
                    OpKind::AdamW { weight, gradient, first, second, scalars, elements, betas, eps, decay }
                }
                (Optimizer::AdamW { betas, eps, decay, .. }, &[first, first_scale, second, second_scale]) => {
                    OpKind::AdamW8 {
                        weight,
                        gradient,
                        first,
                        first_scale,
                        second,
                        second_scale,
                        scalars,
                        elements,
                        betas,
                        eps,
                        decay: matrices_only(decay),
                    }
                }
                (Optimizer::Sgd { momentum, decay }, buffer) => OpKind::Sgd {
                    weight,
                    gradient,
                    momentum_buffer: buffer.first().copied(),
                    scalars,
                    elements,
                    momentum,
                    decay: matrices_only(decay),
                },
                (optimizer, states) => unreachable!("{optimizer:?} has no {} states", states.len()),
            };
            update.push(for_each_slot(tensor, op));
        }
        // Updates of one kind are adjacent, so that a device can run many of them in one launch.
        update.sort_by_key(|block| matches!(block.ops[0].kind, OpKind::AdamW8 { .. }));
        update.extend(self.cast_masters());
        norm.push(Block::once("clip", vec![OpKind::ClipFactor { metrics, scalars }.into()]));
        self.push_program_as_phase(WorkKind::Load, ProgramKind::InitOptimizer, fresh);
        self.push_program_as_phase(WorkKind::Update, ProgramKind::BeginStep, begin);
        self.push_program_as_phase(WorkKind::Update, ProgramKind::GradientNorm, norm);
        self.push_program_as_phase(WorkKind::Update, ProgramKind::Update, update);
    }
}
