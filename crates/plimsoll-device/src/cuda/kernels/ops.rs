//! Translation of program ops to kernel launches. Matrix products and copies are missing here: cuBLASLt and the driver
//! do them.

use super::launch::{self, Address, Dropout, Launch, NewTokens, OptimizerTensor, QuantizedAddresses};
use super::{Real, Target};
use plimsoll_core::DType;
use plimsoll_program::op::{Family, OpKind, Quantized, not_in_family};
use plimsoll_program::tensor::{Index, Operand};

/// A source of the addresses and data types of an op's operands, in one iteration of the op's block.
pub trait OperandLookup {
    /// Returns the data type of the run's activations.
    fn real(&self) -> Real;
    /// Returns the GPU and the compiler for which kernels are compiled.
    fn target(&self) -> Target;
    /// Returns the device address of the operand's first element.
    fn address_of(&self, operand: &Operand) -> Address;
    /// Returns the data type of the operand's elements.
    fn dtype(&self, operand: &Operand) -> DType;
    /// Returns the value of an index, such as a layer number, in this iteration of the op's block.
    fn index(&self, index: Index) -> i64;
}

/// Returns the kernel launches that carry out an op, in order. `None` if no kernel does the op: products, casts between
/// equal types, fills of types without a kernel, transfers and collectives.
///
/// Workspaces are as large as `plimsoll_program::workspace` states for CUDA.
pub fn launches(kind: &OpKind, operands: &impl OperandLookup) -> Option<Vec<Launch>> {
    match kind.family() {
        Family::Embedding => Some(embedding_launches(kind, operands)),
        Family::Norm => Some(norm_launches(kind, operands)),
        Family::Attention => Some(attention_launches(kind, operands)),
        Family::Loss => Some(loss_launches(kind, operands)),
        Family::Elementwise => elementwise_launches(kind, operands),
        Family::Fill => fill_launches(kind, operands),
        Family::Quantization => Some(quantization_launches(kind, operands)),
        Family::Optimizer => optimizer_launches(kind, operands),
        Family::Matmul | Family::Transfer | Family::Collective => None,
    }
}

/// Returns the launches of an embedding op or its gradient, in order.
fn embedding_launches(kind: &OpKind, operands: &impl OperandLookup) -> Vec<Launch> {
    let (real, at) = (operands.real(), |operand: &Operand| operands.address_of(operand));
    match kind {
        OpKind::Embed { tokens, table, out, rows, hidden, vocab, scale } => {
            launch::embed(real, [tokens, table, out].map(at), *rows, *hidden, *vocab, *scale).to_vec()
        }
        OpKind::EmbedGrad { tokens, dout, dtable, workspace, rows, hidden, vocab, scale } => {
            let tensors = [tokens, dout, dtable, workspace].map(at);
            launch::embed_grad(real, tensors, *rows, *hidden, *vocab, *scale).to_vec()
        }
        other => not_in_family(other),
    }
}

/// Returns the launches of an RMS norm or its gradient, in order.
fn norm_launches(kind: &OpKind, operands: &impl OperandLookup) -> Vec<Launch> {
    let (real, at) = (operands.real(), |operand: &Operand| operands.address_of(operand));
    match kind {
        OpKind::RmsNorm { x, weight, residual, out, rstd, rows, dim, eps, offset } => {
            let inputs = [at(x), at(weight), residual.as_ref().map_or(0, at)];
            launch::rms_norm(real, inputs, at(out), at(rstd), *rows, *dim, [*eps, *offset]).to_vec()
        }
        OpKind::RmsNormGrad { x, weight, rstd, dout, dx, dweight, workspace, rows, dim, offset, accumulate } => {
            let inputs = [x, weight, rstd, dout].map(at);
            // The last launch accumulates the weight's gradient; a frozen weight has none.
            let (dweight, count) = dweight.as_ref().map_or((0, 1), |dweight| (at(dweight), 2));
            let outputs = [at(dx), dweight, at(workspace)];
            let all = launch::rms_norm_grad(real, inputs, outputs, *rows, *dim, *offset, *accumulate);
            all[..count].to_vec()
        }
        OpKind::HeadNorm { x, q_weight, k_weight, out, rstd, rows, shape, norm, eps, offset } => {
            let inputs = [x, q_weight, k_weight].map(at);
            launch::head_norm(real, inputs, at(out), at(rstd), *rows, *shape, *norm, [*eps, *offset]).to_vec()
        }
        OpKind::HeadNormGrad { x, q_weight, k_weight, rstd, dx, dweights, workspace, rows, shape, norm, offset } => {
            let inputs = [x, q_weight, k_weight, rstd].map(at);
            let (into, count) = dweights.as_ref().map_or(([0; 2], 1), |dweights| (dweights.each_ref().map(at), 3));
            let outputs = [at(dx), at(workspace)];
            let all = launch::head_norm_grad(real, inputs, outputs, into, *rows, *shape, *norm, *offset);
            all[..count].to_vec()
        }
        other => not_in_family(other),
    }
}

/// Returns the launches of an op of attention, rotary positions or the key-value cache, in order.
fn attention_launches(kind: &OpKind, operands: &impl OperandLookup) -> Vec<Launch> {
    let (real, at) = (operands.real(), |operand: &Operand| operands.address_of(operand));
    let target = operands.target();
    match kind {
        OpKind::Rope { qkv, table, positions, rows, table_rows: _, key_shift, shape, inverse } => {
            let operands = [qkv, table, positions].map(at);
            launch::rope(real, operands, *rows, *key_shift, *shape, *inverse).to_vec()
        }
        OpKind::RopeTable { table, table_rows, head_dim, theta, scaling, amplitude, growth } => {
            let size = [*table_rows, *head_dim];
            launch::rope_table(real, at(table), size, *theta, *scaling, *amplitude, *growth).to_vec()
        }
        OpKind::ShiftPositions { positions, document_start, out, rows, shift } => {
            let starts = document_start.as_ref().map_or(0, at);
            launch::shift_positions(real, at(positions), starts, at(out), *rows, *shift).to_vec()
        }
        OpKind::Attention { qkv, document_start, out, stats, workspace: _, batch, sequence, shape, softcap } => {
            let [qkv, starts, out, stats] = [qkv, document_start, out, stats].map(at);
            launch::attention(real, target, [qkv, starts, out, stats], *batch, *sequence, *shape, *softcap).to_vec()
        }
        OpKind::AttentionGrad {
            qkv,
            out,
            dout,
            stats,
            document_start,
            dqkv,
            workspace,
            batch,
            sequence,
            shape,
            softcap,
        } => {
            let inputs = [qkv, out, dout, stats, document_start].map(at);
            let outputs = [at(dqkv), at(workspace)];
            launch::attention_grad(real, target, inputs, outputs, *batch, *sequence, *shape, *softcap)
        }
        OpKind::CachedAttention {
            qkv,
            keys,
            values,
            places,
            first_keys,
            out,
            workspace,
            slots: _,
            sequences,
            rows,
            capacity,
            shape,
            softcap,
        } => {
            let [qkv, keys, values, places] = [qkv, keys, values, places].map(at);
            let inputs = [qkv, keys, values, places, first_keys.as_ref().map_or(0, at)];
            let tokens = NewTokens { sequences: *sequences, rows: *rows, capacity: *capacity };
            launch::cached_attention(real, target, inputs, at(out), at(workspace), tokens, *shape, *softcap)
        }
        OpKind::AppendCache { qkv, keys, values, places, slots: _, sequences, rows, capacity: _, shape } => {
            let rows = sequences * rows;
            launch::append_cache(real, at(qkv), at(places), at(keys), at(values), rows, *shape).to_vec()
        }
        OpKind::CopyCache { keys, values, from, to, slots: _, capacity: _, rows, shape } => {
            launch::copy_cache(real, [from, to].map(at), at(keys), at(values), *rows, *shape).to_vec()
        }
        other => not_in_family(other),
    }
}

/// Returns the launches of an activation, dropout, sum, row copy or cast, in order. `None` for a cast between equal
/// types or non-float types.
fn elementwise_launches(kind: &OpKind, operands: &impl OperandLookup) -> Option<Vec<Launch>> {
    let (real, at) = (operands.real(), |operand: &Operand| operands.address_of(operand));
    Some(match kind {
        OpKind::Glu { gate_up, out, rows, ffn, activation } => {
            launch::glu(real, *activation, at(gate_up), at(out), *rows, *ffn).to_vec()
        }
        OpKind::GluGrad { gate_up, dout, dgate_up, rows, ffn, activation } => {
            launch::glu_grad(real, *activation, [gate_up, dout, dgate_up].map(at), *rows, *ffn).to_vec()
        }
        OpKind::SoftCap { x, elements, cap } => launch::soft_cap(real, at(x), *elements, *cap).to_vec(),
        OpKind::SumRows { x, into, workspace, rows, columns } => {
            launch::sum_rows(real, at(x), at(into), at(workspace), *rows, *columns).to_vec()
        }
        OpKind::PickRow { x, scalars, out, rows: _, columns } => {
            launch::pick_row(real, at(x), at(scalars), at(out), *columns).to_vec()
        }
        OpKind::Add { x, into, elements } => launch::add(real, at(x), at(into), *elements).to_vec(),
        OpKind::Dropout {
            x,
            out,
            scalars,
            seed,
            first_sample,
            layer,
            site,
            probability,
            rows,
            columns,
            sequence,
            accumulate,
        } => {
            let site = Dropout {
                seed: *seed,
                first_sample: operands.index(*first_sample) as u64,
                sequence: *sequence,
                layer: operands.index(*layer) as u64,
                site: *site,
                probability: *probability,
            };
            launch::dropout(real, site, [x, out, scalars].map(at), *rows, *columns, *accumulate).to_vec()
        }
        OpKind::Cast { from, to, elements } => {
            launch::cast(operands.dtype(from), at(from), operands.dtype(to), at(to), *elements)?.to_vec()
        }
        other => not_in_family(other),
    })
}

/// Returns the launches of an op of the loss, in order.
fn loss_launches(kind: &OpKind, operands: &impl OperandLookup) -> Vec<Launch> {
    let (real, at) = (operands.real(), |operand: &Operand| operands.address_of(operand));
    match kind {
        OpKind::SoftmaxStats { logits, labels, weights, stats, rows, first, columns, begin } => {
            let tensors = [logits, labels, weights, stats].map(at);
            launch::softmax_stats(real, tensors, *rows, *first, *columns, *begin).to_vec()
        }
        OpKind::CrossEntropy { stats, labels, weights, metrics, correct, log_probabilities, rows } => {
            let [correct, log_probabilities] = [correct, log_probabilities].map(|output| output.as_ref().map(at));
            let inputs = [stats, labels, weights].map(at);
            launch::cross_entropy(real, inputs, at(metrics), correct, log_probabilities, *rows).to_vec()
        }
        OpKind::SoftmaxGrad { logits, labels, weights, stats, scalars, rows, first, columns, softcap } => {
            let tensors = [logits, labels, weights, stats, scalars].map(at);
            launch::softmax_grad(real, tensors, *rows, *first, *columns, *softcap).to_vec()
        }
        other => not_in_family(other),
    }
}

/// Returns the launches of an optimizer update, gradient norm or clip factor, in order. Never `None` for these ops.
fn optimizer_launches(kind: &OpKind, operands: &impl OperandLookup) -> Option<Vec<Launch>> {
    let at = |operand: &Operand| operands.address_of(operand);
    Some(match kind {
        OpKind::SquaredNorm { x, metrics, workspace, elements } => {
            launch::squared_norm(&[(at(x), *elements)], at(workspace), at(metrics))
        }
        OpKind::ClipFactor { metrics, scalars } => launch::clip_factor(at(metrics), at(scalars)).to_vec(),
        OpKind::AdamW { scalars, betas, eps, .. } => {
            launch::adamw(&[optimizer_tensor(kind, operands)?], at(scalars), *betas, *eps)
        }
        OpKind::AdamW8 { scalars, betas, eps, .. } => {
            launch::adamw8(&[optimizer_tensor(kind, operands)?], at(scalars), *betas, *eps)
        }
        OpKind::Sgd { scalars, momentum, .. } => {
            launch::sgd(&[optimizer_tensor(kind, operands)?], at(scalars), *momentum)
        }
        other => not_in_family(other),
    })
}

/// Returns the launches of an op that fills a tensor with a constant or random numbers, in order. `None` if no kernel
/// fills the data type.
fn fill_launches(kind: &OpKind, operands: &impl OperandLookup) -> Option<Vec<Launch>> {
    let at = |operand: &Operand| operands.address_of(operand);
    Some(match kind {
        OpKind::Fill { into, value, elements } => {
            launch::fill(operands.dtype(into), at(into), *value, *elements)?.to_vec()
        }
        OpKind::InitNormal { into, seed, number, first, std, elements } => {
            launch::init_normal(at(into), *seed, *number, operands.index(*first) as u64, *std, *elements).to_vec()
        }
        OpKind::InitUniform { into, seed, number, first, bound, elements } => {
            launch::init_uniform(at(into), *seed, *number, operands.index(*first) as u64, *bound, *elements).to_vec()
        }
        other => not_in_family(other),
    })
}

/// Returns the launches of a quantization or dequantization, in order.
fn quantization_launches(kind: &OpKind, operands: &impl OperandLookup) -> Vec<Launch> {
    let (real, at) = (operands.real(), |operand: &Operand| operands.address_of(operand));
    match kind {
        OpKind::Quantize { from, into, elements, columns } => {
            launch::quantize(at(from), quantized_addresses(into, operands), *elements, *columns).to_vec()
        }
        OpKind::Dequantize { from, into, elements, columns } => {
            launch::dequantize(real, quantized_addresses(from, operands), at(into), *elements, *columns).to_vec()
        }
        other => not_in_family(other),
    }
}

/// Returns the addresses of a quantized matrix: its codes, scales and, for nf4, scales of groups.
fn quantized_addresses(matrix: &Quantized, operands: &impl OperandLookup) -> QuantizedAddresses {
    let at = |operand: &Operand| operands.address_of(operand);
    match matrix {
        Quantized::Int8 { codes, scales } => QuantizedAddresses::Int8 { codes: at(codes), scales: at(scales) },
        Quantized::Nf4 { codes, scales, groups } => {
            QuantizedAddresses::Nf4 { codes: at(codes), scales: at(scales), groups: at(groups) }
        }
    }
}

/// Returns the tensor that an optimizer op updates; `None` for other ops. One launch of [`launch::adamw`],
/// [`launch::adamw8`] or [`launch::sgd`] can update many such tensors.
pub fn optimizer_tensor(kind: &OpKind, operands: &impl OperandLookup) -> Option<OptimizerTensor> {
    let at = |operand: &Operand| operands.address_of(operand);
    match kind {
        OpKind::AdamW { weight, gradient, first, second, elements, decay, .. } => {
            let [weight, gradient, first, second] = [weight, gradient, first, second].map(at);
            Some(OptimizerTensor {
                weight,
                gradient,
                first,
                second,
                elements: *elements,
                decay: *decay,
                ..OptimizerTensor::default()
            })
        }
        OpKind::AdamW8 { weight, gradient, first, first_scale, second, second_scale, elements, decay, .. } => {
            let [weight, gradient, first, second] = [weight, gradient, first, second].map(at);
            let [first_scale, second_scale] = [first_scale, second_scale].map(at);
            let (elements, decay) = (*elements, *decay);
            Some(OptimizerTensor { weight, gradient, first, second, first_scale, second_scale, elements, decay })
        }
        OpKind::Sgd { weight, gradient, momentum_buffer, elements, decay, .. } => {
            let (weight, gradient, first) = (at(weight), at(gradient), momentum_buffer.as_ref().map_or(0, at));
            Some(OptimizerTensor {
                weight,
                gradient,
                first,
                elements: *elements,
                decay: *decay,
                ..OptimizerTensor::default()
            })
        }
        _ => None,
    }
}
