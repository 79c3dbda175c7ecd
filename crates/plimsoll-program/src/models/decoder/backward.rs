//! The backward pass, the norm of all gradients, and the update.

use super::loss::Loss;
use super::{AdamState, Decoder, Optimizer, Training, over_slots};
use crate::derivative::Tape;
use crate::formats::{STATE_BLOCK, STATE_LEAST};
use crate::op::OpKind;
use crate::passes::recompute::recompute;
use crate::program::Block;
use crate::scalars::METRIC_COUNT;
use crate::tensor::{Operand, Tensor, TensorId};
use plimsoll_core::{Category, DType, WorkName};
use std::collections::{HashMap, HashSet};

/// The gradient of the residual stream in a backward pass.
pub(crate) const STREAM: &str = "train.stream.gradient";

/// Kept beside a trained tensor by the optimizer.
pub(super) struct State {
    /// The end of its name.
    pub role: &'static str,
    /// None: the wide type.
    pub dtype: Option<DType>,
    /// How many elements of the trained tensor share one of it.
    pub each: u64,
}

impl Optimizer {
    /// What is kept beside a trained tensor of so many elements.
    pub(super) fn state(&self, elements: u64) -> Vec<State> {
        let full = |role| State { role, dtype: None, each: 1 };
        let coarse = |role| State { role, dtype: Some(DType::U8), each: 1 };
        let scale = |role| State { role, dtype: Some(DType::F32), each: STATE_BLOCK };
        match self {
            Optimizer::AdamW { state: AdamState::Blockwise8, .. } if elements >= STATE_LEAST => {
                vec![coarse("first"), scale("first_scale"), coarse("second"), scale("second_scale")]
            }
            Optimizer::AdamW { .. } => vec![full("first"), full("second")],
            Optimizer::Sgd { momentum, .. } if *momentum != 0.0 => vec![full("first")],
            Optimizer::Sgd { .. } => vec![],
        }
    }
}

impl Decoder<'_> {
    pub(super) fn train(&mut self, training: &Training) {
        assert_eq!(training.recompute.len(), self.what.depth() as usize, "one level a layer");
        let rows = self.what.micro_batch * self.what.sequence;
        let layers = i64::from(self.what.depth());
        let inputs = self.inputs("train.", rows);
        let labels = self.labels("train.", rows);
        let forward = self.forward_over_batch("train.", &inputs, true);

        let mut gradients = HashMap::new();
        for id in self.trained() {
            let gradient = self.beside(id, "gradient", Category::Gradient);
            gradients.insert(id, gradient);
        }

        let mut blocks = Vec::new();
        let top = forward.top.zip(labels).map(|((normed, head), (labels, token_weights))| {
            let dnormed = self.builder.activation("train.normed.gradient", &[rows, self.what.config.hidden], 1);
            let (prefix, dhead, correct) = ("train.", gradients.get(&head).copied(), None);
            let asked = Some((dnormed, dhead));
            blocks = self.loss(Loss { prefix, normed, head, labels, token_weights, gradients: asked, correct });
            (normed, dnormed)
        });

        // One buffer carries the gradient of the residual stream through all layers.
        let stream = Operand::whole(self.builder.activation(STREAM, &[rows, self.what.config.hidden], 1));
        if let Some((normed, dnormed)) = top {
            let mut tape = Tape::new(&mut self.builder, &gradients, &forward.last);
            tape.seed(Operand::whole(normed), Operand::whole(dnormed));
            tape.place(Operand::slot(forward.hidden, layers), stream);
            for op in forward.last.iter().rev() {
                tape.derive(&op.kind);
            }
            blocks.push(Block::once("final_norm", tape.into_ops()));
        }

        let mut tape = Tape::new(&mut self.builder, &gradients, &forward.layer);
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

        let mut tape = Tape::new(&mut self.builder, &gradients, &forward.embedding);
        tape.seed(Operand::slot(forward.hidden, 0), stream);
        for op in forward.embedding.iter().rev() {
            tape.derive(&op.kind);
        }
        // A frozen table has no gradient.
        let embedding = tape.into_ops();
        blocks.extend((!embedding.is_empty()).then(|| Block::once("embedding", embedding)));

        let blocks_forward = self.forward_blocks(&forward);
        let all = inputs.all().into_iter().chain(labels.into_iter().flat_map(<[TensorId; 2]>::from)).collect();
        let forward = self.push(WorkName::Forward, "forward", all, vec![], blocks_forward);
        let backward = self.push(WorkName::Backward, "backward", vec![], vec![], blocks);
        self.phase(vec![forward, backward]);
        self.update(&training.optimizer, &gradients);
        if self.what.files {
            self.save(&training.optimizer);
        }
    }

    /// The tensors beside a weight that the optimizer keeps.
    fn state_of(&mut self, weight: TensorId, optimizer: &Optimizer) -> Vec<TensorId> {
        let Tensor { name, slots, .. } = self.builder.set.tensor(weight).clone();
        let elements = self.elements_of(weight);
        let states = optimizer.state(elements).into_iter();
        states
            .map(|State { role, dtype, each }| match dtype {
                None => self.beside(weight, role, Category::Optimizer),
                Some(dtype) => {
                    let dims = [elements.div_ceil(each)];
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
        let partials = self.what.kernels.squared_norm();
        let workspace = Operand::whole(self.builder.scratch("norm_workspace", partials, 1));
        for id in self.trained() {
            let states = self.state_of(id, optimizer);
            let tensor = self.builder.set.tensor(id);
            let elements = tensor.elements();
            let decays = tensor.shape.len() == 2;
            let weight = Operand::layer(self.master(id), 0);
            let gradient = Operand::layer(gradients[&id], 0);
            begin.push(over_slots(tensor, OpKind::Fill { into: gradient, value: 0.0, elements }));
            norm.push(over_slots(tensor, OpKind::SquaredNorm { x: gradient, metrics, workspace, elements }));
            for &state in &states {
                let (into, elements) = (Operand::layer(state, 0), self.builder.set.tensor(state).elements());
                fresh.push(over_slots(tensor, OpKind::Fill { into, value: 0.0, elements }));
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
            update.push(over_slots(tensor, op));
        }
        // Updates of one kind stand side by side, so that a device can take many in one launch.
        update.sort_by_key(|block| matches!(block.ops[0].kind, OpKind::AdamW8 { .. }));
        update.extend(self.weights_of_masters());
        norm.push(Block::once("clip", vec![OpKind::ClipFactor { metrics, scalars }.into()]));
        // `fresh` runs once, where a run starts without a checkpoint.
        self.alone(WorkName::Load, "fresh", fresh);
        self.alone(WorkName::Update, "begin", begin);
        self.alone(WorkName::Update, "norm", norm);
        self.alone(WorkName::Update, "update", update);
    }
}
