//! Execution of single ops on the CPU: from an op's operands to slices of the arenas, and to a kernel.

use super::kernels::{self, Real};
use super::pool::Pool;
use crate::arena::Arena;
use crate::device::{DeviceError, FileSpace};
use crate::spaces::Spaces;
use half::{bf16, f16};
use plimsoll_core::{DType, Space};
use plimsoll_program::formats::{NF4_BLOCK, NF4_GROUP, STATE_BLOCK};
use plimsoll_program::op::{Quantized, SOFTMAX_STATS};
use plimsoll_program::scalars::{Metric, Scalar};
use plimsoll_program::{Op, OpKind, Operand, Placement, ProgramSet};
use std::marker::PhantomData;

/// The context of an op: memory, threads, plan, and the iteration of its block.
#[derive(Clone, Copy)]
pub(crate) struct Site<'a> {
    pub spaces: &'a Spaces,
    pub pool: &'a Pool,
    pub set: &'a ProgramSet,
    pub placement: &'a Placement,
    pub variable: i64,
    pub micro_batch: i64,
}

/// A function that runs one op to its end, on the caller's thread and those of the site's pool.
///
/// Ops may run concurrently at sites that share their spaces if none of them writes bytes that another one accesses.
/// The caller ensures this.
pub(crate) type RunOp = fn(Site, &Op, &mut dyn FileSpace) -> Result<(), DeviceError>;

/// Returns the function that runs ops in a precision.
///
/// # Panics
/// For a precision that the CPU does not compute in.
pub(crate) fn runner(precision: DType) -> RunOp {
    fn run<T: Real>(site: Site, op: &Op, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        OpContext::<T> { site, precision: PhantomData }.run(op, files)
    }
    match precision {
        DType::F32 => run::<f32>,
        DType::F64 => run::<f64>,
        DType::Bf16 => run::<bf16>,
        other => panic!("the CPU does not compute in {other}"),
    }
}

/// An op in one iteration of its block.
struct OpContext<'a, T> {
    site: Site<'a>,
    precision: PhantomData<T>,
}

impl<'a, T: Real> OpContext<'a, T> {
    /// Returns the arena that holds the operand.
    fn arena(&self, operand: &Operand) -> &'a Arena {
        self.site.spaces.arena(self.site.set.tensor(operand.tensor).space)
    }

    /// Returns the operand's first byte in its arena.
    fn offset(&self, operand: &Operand) -> u64 {
        self.site.placement.first_byte(self.site.set, operand, self.site.variable, self.site.micro_batch)
    }

    /// Returns the operand's first byte in its tensor.
    fn first_byte(&self, operand: &Operand) -> u64 {
        operand.first_byte(self.site.set.tensor(operand.tensor), self.site.variable, self.site.micro_batch)
    }

    fn slice_of<E: bytemuck::Pod>(&self, operand: &Operand, elements: u64) -> &'a [E] {
        // SAFETY: an op's operands are disjoint ranges of the arena, except for the in-place pairs, for which `run`
        // takes one slice. The layout gives tensors that live at the same time disjoint bytes, and `passes::check`
        // keeps operands inside their tensors. The arena outlives this context. While the op runs, no other code writes
        // these bytes or accesses those that it writes, by the promise of `RunOp`.
        unsafe { self.arena(operand).slice(self.offset(operand), elements as usize) }
    }

    fn slice_of_mut<E: bytemuck::Pod>(&self, operand: &Operand, elements: u64) -> &'a mut [E] {
        // SAFETY: the conditions of `slice_of` hold for writes as well.
        unsafe { self.arena(operand).slice_mut(self.offset(operand), elements as usize) }
    }

    fn read(&self, operand: &Operand, elements: u64) -> &'a [T] {
        self.slice_of(operand, elements)
    }

    fn write(&self, operand: &Operand, elements: u64) -> &'a mut [T] {
        self.slice_of_mut(operand, elements)
    }

    /// Returns an operand of the wide type, in which sums, statistics and master weights are stored.
    fn read_wide(&self, operand: &Operand, elements: u64) -> &'a [T::Wide] {
        self.slice_of(operand, elements)
    }

    fn write_wide(&self, operand: &Operand, elements: u64) -> &'a mut [T::Wide] {
        self.slice_of_mut(operand, elements)
    }

    fn has_dtype(&self, operand: &Operand, dtype: DType) -> bool {
        self.site.set.tensor(operand.tensor).dtype == dtype
    }

    fn is_wide(&self, operand: &Operand) -> bool {
        self.has_dtype(operand, T::Wide::DTYPE)
    }

    fn read_integers(&self, operand: &Operand, elements: u64) -> &'a [i32] {
        self.slice_of(operand, elements)
    }

    /// Returns the whole tensor of an operand in the wide type, for writing.
    fn write_all_wide(&self, operand: &Operand) -> &'a mut [T::Wide] {
        self.write_wide(operand, self.site.set.tensor(operand.tensor).elements())
    }

    /// Returns the workspace of an op. The distribution of tasks to lanes is random and may leave parts unwritten.
    /// Writing the last element makes the measured size equal the planned one.
    fn workspace_of(&self, operand: &Operand) -> &'a mut [T::Wide] {
        let workspace = self.write_all_wide(operand);
        if let Some(last) = workspace.last_mut() {
            *last = T::Wide::ZERO;
        }
        workspace
    }

    fn labelled_rows(
        &self,
        labels: &Operand,
        weights: &Operand,
        rows: u64,
        first: u64,
        columns: u64,
    ) -> kernels::LabelledRows<'a, T::Wide> {
        let (labels, weights) = (self.read_integers(labels, rows), self.read_wide(weights, rows));
        kernels::LabelledRows { labels, weights, first: first as usize, columns: columns as usize }
    }

    fn metrics(&self, operand: &Operand) -> &'a mut [f64] {
        self.slice_of_mut(operand, self.site.set.tensor(operand.tensor).elements())
    }

    fn scalar(&self, operand: &Operand, which: Scalar) -> T::Wide {
        self.read_wide(operand, which as u64 + 1)[which as usize]
    }

    fn count(&self, operand: &Operand, which: Scalar) -> usize {
        self.scalar(operand, which).to_f64() as usize
    }

    fn run(&self, op: &Op, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        let pool = self.site.pool;
        match &op.kind {
            OpKind::Product {
                a,
                b,
                out,
                bias,
                residual,
                workspace,
                m,
                n,
                k,
                a_transposed,
                b_transposed,
                a_stride,
                out_stride,
                scale,
                accumulate,
            } => {
                // A residual at the same address as the output is added in place.
                let in_place = residual.is_some_and(|r| self.offset(&r) == self.offset(out));
                let (a_rows, a_columns) = if *a_transposed { (k, m) } else { (m, k) };
                let product = kernels::Product {
                    m: *m as usize,
                    n: *n as usize,
                    k: *k as usize,
                    a: self.read(a, (a_rows - 1) * a_stride + a_columns),
                    a_transposed: *a_transposed,
                    b: self.read(b, k * n),
                    b_transposed: *b_transposed,
                    bias: bias.map(|bias| self.read(&bias, *n)),
                    residual: residual.filter(|_| !in_place).map(|residual| self.read(&residual, m * n)),
                    accumulate: *accumulate || in_place,
                    a_row: *a_stride as usize,
                    out_row: *out_stride as usize,
                    scale: T::Wide::from_f64(*scale),
                };
                let (scratch, written) = (self.workspace_of(workspace), (m - 1) * out_stride + n);
                if self.is_wide(out) {
                    kernels::product(pool, product, self.write_wide(out, written), scratch);
                } else {
                    kernels::product(pool, product, self.write(out, written), scratch);
                }
            }
            OpKind::Embed { tokens, table, out, rows, hidden, vocab } => {
                let table = self.read(table, vocab * hidden);
                kernels::embed(
                    pool,
                    self.read_integers(tokens, *rows),
                    table,
                    *hidden as usize,
                    self.write(out, rows * hidden),
                );
            }
            OpKind::EmbedGrad { tokens, dout, dtable, workspace, rows, hidden, vocab } => {
                self.workspace_of(workspace);
                let dout = self.read(dout, rows * hidden);
                let dtable = self.write_wide(dtable, vocab * hidden);
                kernels::embed_grad(pool, self.read_integers(tokens, *rows), dout, *hidden as usize, dtable);
            }
            OpKind::RmsNorm { x, weight, out, rstd, rows, dim, eps } => {
                let (x, weight) = (self.read(x, rows * dim), self.read(weight, *dim));
                kernels::rms_norm(pool, x, weight, *eps, self.write(out, rows * dim), self.write_wide(rstd, *rows));
            }
            OpKind::RmsNormGrad { x, weight, rstd, dout, dx, dweight, workspace, rows, dim, accumulate } => {
                kernels::rms_norm_grad(
                    pool,
                    self.read(x, rows * dim),
                    self.read(weight, *dim),
                    self.read_wide(rstd, *rows),
                    self.read(dout, rows * dim),
                    self.write(dx, rows * dim),
                    dweight.map(|dweight| self.write_wide(&dweight, *dim)),
                    *accumulate,
                    self.workspace_of(workspace),
                );
            }
            OpKind::HeadNorm { x, q_weight, k_weight, out, rstd, rows, shape, eps } => {
                let columns = rows * shape.columns();
                kernels::head_norm(
                    pool,
                    *shape,
                    self.read(x, columns),
                    self.read(q_weight, shape.head_dim),
                    self.read(k_weight, shape.head_dim),
                    *eps,
                    self.write(out, columns),
                    self.write_wide(rstd, rows * shape.rotated_heads()),
                );
            }
            OpKind::HeadNormGrad { x, q_weight, k_weight, rstd, dx, dweights, workspace, rows, shape } => {
                let columns = rows * shape.columns();
                kernels::head_norm_grad(
                    pool,
                    *shape,
                    self.read(x, columns),
                    self.read(q_weight, shape.head_dim),
                    self.read(k_weight, shape.head_dim),
                    self.read_wide(rstd, rows * shape.rotated_heads()),
                    self.write(dx, columns),
                    dweights.map(|both| both.map(|dweight| self.write_wide(&dweight, shape.head_dim))),
                    self.workspace_of(workspace),
                );
            }
            OpKind::Rope { qkv, table, positions, rows, table_rows, shape, inverse } => {
                let table = self.read_wide(table, table_rows * shape.head_dim);
                let qkv = self.write(qkv, rows * shape.columns());
                kernels::rope(pool, *shape, table, self.read_integers(positions, *rows), *inverse, qkv);
            }
            OpKind::RopeTable { table, table_rows, head_dim, theta, scaling } => {
                let table = self.write_wide(table, table_rows * head_dim);
                kernels::rope_table(pool, *head_dim as usize, *theta, scaling, table);
            }
            OpKind::Attention { qkv, document_start, out, stats, workspace, batch, sequence, shape } => {
                let rows = batch * sequence;
                kernels::attention(
                    pool,
                    *shape,
                    *sequence as usize,
                    self.read(qkv, rows * shape.columns()),
                    self.read_integers(document_start, rows),
                    self.write(out, rows * shape.query_columns()),
                    self.write_wide(stats, rows * shape.heads),
                    self.workspace_of(workspace),
                );
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
            } => {
                let rows = batch * sequence;
                kernels::attention_grad(
                    pool,
                    *shape,
                    *sequence as usize,
                    self.read(qkv, rows * shape.columns()),
                    self.read(out, rows * shape.query_columns()),
                    self.read(dout, rows * shape.query_columns()),
                    self.read_wide(stats, rows * shape.heads),
                    self.read_integers(document_start, rows),
                    self.write(dqkv, rows * shape.columns()),
                    self.workspace_of(workspace),
                );
            }
            OpKind::CachedAttention { qkv, keys, values, scalars, out, workspace, rows, capacity, shape } => {
                let cache = capacity * shape.kv_heads * shape.head_dim;
                kernels::cached_attention(
                    pool,
                    *shape,
                    self.read(qkv, rows * shape.columns()),
                    self.read(keys, cache),
                    self.read(values, cache),
                    self.count(scalars, Scalar::CacheLength),
                    self.write(out, rows * shape.query_columns()),
                    self.workspace_of(workspace),
                );
            }
            OpKind::AppendCache { qkv, keys, values, scalars, rows, capacity, shape } => {
                let cache = capacity * shape.kv_heads * shape.head_dim;
                kernels::append_cache(
                    *shape,
                    self.read(qkv, rows * shape.columns()),
                    self.count(scalars, Scalar::CacheLength),
                    self.write(keys, cache),
                    self.write(values, cache),
                );
            }
            OpKind::SwiGlu { gate_up, out, rows, ffn } => {
                kernels::swiglu(pool, *ffn as usize, self.read(gate_up, rows * 2 * ffn), self.write(out, rows * ffn));
            }
            OpKind::SwiGluGrad { gate_up, dout, dgate_up, rows, ffn } => {
                let (ffn, wide, dout) = (*ffn as usize, rows * 2 * ffn, self.read(dout, rows * ffn));
                if self.offset(gate_up) == self.offset(dgate_up) {
                    kernels::swiglu_grad_in_place(pool, ffn, self.write(gate_up, wide), dout);
                } else {
                    kernels::swiglu_grad(pool, ffn, self.read(gate_up, wide), dout, self.write(dgate_up, wide));
                }
            }
            OpKind::SoftmaxStats { logits, labels, weights, stats, rows, first, columns, begin } => {
                let labelled = self.labelled_rows(labels, weights, *rows, *first, *columns);
                let stats = self.write_wide(stats, rows * SOFTMAX_STATS);
                kernels::softmax_stats(pool, labelled, self.read(logits, rows * columns), stats, *begin);
            }
            OpKind::CrossEntropy { stats, labels, weights, metrics, correct, rows } => {
                let (labels, weights) = (self.read_integers(labels, *rows), self.read_wide(weights, *rows));
                let correct = correct.map(|correct| self.slice_of_mut::<i32>(&correct, *rows));
                let loss =
                    kernels::cross_entropy(self.read_wide(stats, rows * SOFTMAX_STATS), labels, weights, correct);
                self.metrics(metrics)[Metric::LossSum as usize] += loss;
            }
            OpKind::SoftmaxGrad { logits, labels, weights, stats, scalars, rows, first, columns } => {
                let labelled = self.labelled_rows(labels, weights, *rows, *first, *columns);
                let (stats, scale) =
                    (self.read_wide(stats, rows * SOFTMAX_STATS), self.scalar(scalars, Scalar::InverseTokens));
                kernels::softmax_grad(pool, labelled, self.write(logits, rows * columns), stats, scale);
            }
            OpKind::SumRows { x, into, workspace, rows, columns } => {
                let (into, scratch) = (self.write_wide(into, *columns), self.workspace_of(workspace));
                kernels::sum_rows(pool, *rows as usize, *columns as usize, self.read(x, rows * columns), into, scratch);
            }
            OpKind::PickRow { x, scalars, out, rows, columns } => {
                let row = self.count(scalars, Scalar::LastRow) * *columns as usize;
                let x = self.read(x, rows * columns);
                self.write(out, *columns).copy_from_slice(&x[row..row + *columns as usize]);
            }
            OpKind::Add { x, into, elements } => {
                let n = *elements;
                match (self.is_wide(x), self.is_wide(into)) {
                    (true, true) => kernels::add(pool, self.read_wide(x, n), self.write_wide(into, n)),
                    (true, false) => kernels::add(pool, self.read_wide(x, n), self.write(into, n)),
                    (false, true) => kernels::add(pool, self.read(x, n), self.write_wide(into, n)),
                    (false, false) => kernels::add(pool, self.read(x, n), self.write(into, n)),
                }
            }
            OpKind::Fill { into, value, elements } => match self.site.set.tensor(into.tensor).dtype {
                DType::F64 => kernels::fill(pool, *value, self.slice_of_mut::<f64>(into, *elements)),
                DType::F32 => kernels::fill(pool, f32::from_f64(*value), self.slice_of_mut::<f32>(into, *elements)),
                DType::Bf16 => kernels::fill(pool, bf16::from_f64(*value), self.slice_of_mut::<bf16>(into, *elements)),
                DType::F16 => kernels::fill(pool, f16::from_f64(*value), self.slice_of_mut::<f16>(into, *elements)),
                DType::I32 => kernels::fill(pool, *value as i32, self.slice_of_mut::<i32>(into, *elements)),
                DType::U8 => kernels::fill(pool, *value as u8, self.slice_of_mut::<u8>(into, *elements)),
            },
            OpKind::SquaredNorm { x, metrics, workspace, elements } => {
                self.workspace_of(workspace);
                let sum = kernels::squared_norm(pool, self.read_wide(x, *elements));
                self.metrics(metrics)[Metric::NormSquared as usize] += sum;
            }
            OpKind::ClipFactor { metrics, scalars } => {
                let norm = self.metrics(metrics)[Metric::NormSquared as usize].sqrt();
                let clip = self.scalar(scalars, Scalar::ClipNorm).to_f64();
                let factor = if clip > 0.0 { (clip / (norm + 1e-6)).min(1.0) } else { 1.0 };
                self.write_all_wide(scalars)[Scalar::ClipFactor as usize] = T::Wide::from_f64(factor);
            }
            OpKind::AdamW { weight, gradient, first, second, scalars, elements, betas, eps, decay } => {
                let step = self.adamw_step(scalars, *betas, *eps, *decay);
                let n = *elements;
                let (weight, gradient) = (self.write_wide(weight, n), self.read_wide(gradient, n));
                kernels::adamw(pool, step, weight, gradient, self.write_wide(first, n), self.write_wide(second, n));
            }
            OpKind::Sgd { weight, gradient, momentum_buffer, scalars, elements, momentum, decay } => {
                let step = kernels::Sgd {
                    rate: self.scalar(scalars, Scalar::LearningRate),
                    momentum: T::Wide::from_f64(*momentum),
                    decay: T::Wide::from_f64(*decay),
                    clip: self.scalar(scalars, Scalar::ClipFactor),
                };
                let n = *elements;
                let buffer = momentum_buffer.map(|buffer| self.write_wide(&buffer, n));
                kernels::sgd(pool, step, self.write_wide(weight, n), self.read_wide(gradient, n), buffer);
            }
            OpKind::Cast { from, to, elements } => self.cast(from, to, *elements),
            OpKind::InitNormal { into, seed, number, first, std, elements } => {
                let first = first.at(self.site.variable, self.site.micro_batch) as u64;
                if self.is_wide(into) {
                    kernels::normal(pool, *seed, *number, first, *std, self.write_wide(into, *elements));
                } else {
                    kernels::normal(pool, *seed, *number, first, *std, self.write(into, *elements));
                }
            }
            OpKind::TransferStart { from, to, elements, .. } => self.transfer(from, to, *elements, files)?,
            // On the CPU a copy has ended when its start returns.
            OpKind::TransferWait { .. } => {}
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
                let at = kernels::Dropout {
                    seed: *seed,
                    step: self.count(scalars, Scalar::Step) as u32,
                    first_sample: first_sample.at(self.site.variable, self.site.micro_batch) as u32,
                    sequence: *sequence as usize,
                    layer: layer.at(self.site.variable, self.site.micro_batch) as u32,
                    site: *site,
                    probability: *probability,
                };
                let (x, out) = (self.read(x, rows * columns), self.write(out, rows * columns));
                kernels::dropout(pool, at, *columns as usize, x, out, *accumulate);
            }
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
                decay,
            } => {
                let (n, blocks) = (*elements, elements.div_ceil(STATE_BLOCK));
                let state = kernels::State8 {
                    first: self.slice_of_mut(first, n),
                    first_scale: self.slice_of_mut(first_scale, blocks),
                    second: self.slice_of_mut(second, n),
                    second_scale: self.slice_of_mut(second_scale, blocks),
                };
                let step = self.adamw_step(scalars, *betas, *eps, *decay);
                kernels::adamw8(pool, step, self.write_wide(weight, n), self.read_wide(gradient, n), state);
            }
            OpKind::InitUniform { into, seed, number, first, bound, elements } => {
                let first = first.at(self.site.variable, self.site.micro_batch) as u64;
                if self.is_wide(into) {
                    kernels::uniform(pool, *seed, *number, first, *bound, self.write_wide(into, *elements));
                } else {
                    kernels::uniform(pool, *seed, *number, first, *bound, self.write(into, *elements));
                }
            }
            OpKind::Quantize { from, into, elements, columns } => {
                let into = match into {
                    Quantized::Int8 { codes, scales } => kernels::QuantizedData::Int8 {
                        codes: self.slice_of_mut(codes, *elements),
                        scales: self.slice_of_mut(scales, elements / columns),
                    },
                    Quantized::Nf4 { codes, scales, groups } => {
                        let blocks = elements.div_ceil(NF4_BLOCK);
                        kernels::QuantizedData::Nf4 {
                            codes: self.slice_of_mut(codes, elements.div_ceil(2)),
                            scales: self.slice_of_mut(scales, blocks),
                            groups: self.slice_of_mut(groups, 2 * blocks.div_ceil(NF4_GROUP)),
                        }
                    }
                };
                if self.is_wide(from) {
                    kernels::quantize(pool, self.read_wide(from, *elements), *columns as usize, into);
                } else {
                    kernels::quantize(pool, self.read(from, *elements), *columns as usize, into);
                }
            }
            OpKind::Dequantize { from, into, elements, columns } => {
                let from = match from {
                    Quantized::Int8 { codes, scales } => kernels::QuantizedData::Int8 {
                        codes: self.slice_of(codes, *elements),
                        scales: self.slice_of(scales, elements / columns),
                    },
                    Quantized::Nf4 { codes, scales, groups } => {
                        let blocks = elements.div_ceil(NF4_BLOCK);
                        kernels::QuantizedData::Nf4 {
                            codes: self.slice_of(codes, elements.div_ceil(2)),
                            scales: self.slice_of(scales, blocks),
                            groups: self.slice_of(groups, 2 * blocks.div_ceil(NF4_GROUP)),
                        }
                    }
                };
                kernels::dequantize(pool, from, *columns as usize, self.write(into, *elements));
            }
            // The executors handle collectives; a start has ended when it returns.
            OpKind::CollectiveStart(_) => {
                return Err(DeviceError::Unsupported { op: op.name(), device: "a single cpu" });
            }
            OpKind::CollectiveWait(_) => {}
        }
        Ok(())
    }

    /// Returns the hyperparameters of this step.
    fn adamw_step(&self, scalars: &Operand, betas: [f64; 2], eps: f64, decay: f64) -> kernels::AdamW<T::Wide> {
        kernels::AdamW {
            rate: self.scalar(scalars, Scalar::LearningRate),
            betas,
            eps: T::Wide::from_f64(eps),
            decay: T::Wide::from_f64(decay),
            bias_corrections: [
                self.scalar(scalars, Scalar::BiasCorrection1),
                self.scalar(scalars, Scalar::BiasCorrection2),
            ],
            clip: self.scalar(scalars, Scalar::ClipFactor),
        }
    }

    fn cast(&self, from: &Operand, to: &Operand, elements: u64) {
        let (source, target) = (self.site.set.tensor(from.tensor).dtype, self.site.set.tensor(to.tensor).dtype);
        let bytes = || self.slice_of(from, elements * source.bytes());
        // One side always has a type that the run computes in.
        let done = match (source == T::Wide::DTYPE, target == T::DTYPE) {
            (true, true) => {
                kernels::round::<T>(self.site.pool, self.read_wide(from, elements), self.write(to, elements));
                Ok(())
            }
            (_, true) => kernels::from_bytes(self.site.pool, source, bytes(), self.write(to, elements)),
            _ if target == T::Wide::DTYPE => {
                kernels::from_bytes(self.site.pool, source, bytes(), self.write_wide(to, elements))
            }
            (true, _) => {
                let to = self.slice_of_mut(to, elements * target.bytes());
                kernels::to_bytes(self.site.pool, target, self.read_wide(from, elements), to)
            }
            _ => {
                let to = self.slice_of_mut(to, elements * target.bytes());
                kernels::to_bytes(self.site.pool, target, self.read(from, elements), to)
            }
        };
        done.expect("casts are between floats, and ranges have the same length");
    }

    fn transfer(
        &self,
        from: &Operand,
        to: &Operand,
        elements: u64,
        files: &mut dyn FileSpace,
    ) -> Result<(), DeviceError> {
        let (source, target) = (self.site.set.tensor(from.tensor), self.site.set.tensor(to.tensor));
        let bytes = elements * source.dtype.bytes();
        match (source.space, target.space) {
            (Space::File, _) => files
                .read(&source.name, self.first_byte(from), self.slice_of_mut(to, bytes))
                .map_err(|error| DeviceError::File { tensor: source.name.clone(), source: error }),
            (_, Space::File) => files
                .write(&target.name, self.first_byte(to), self.slice_of(from, bytes))
                .map_err(|error| DeviceError::File { tensor: target.name.clone(), source: error }),
            (Space::Scratch, _) => self.site.spaces.scratch().read(self.offset(from), self.slice_of_mut(to, bytes)),
            (_, Space::Scratch) => self.site.spaces.scratch().write(self.offset(to), self.slice_of(from, bytes)),
            // Device and host memory are the same on the CPU.
            _ => {
                kernels::copy::<u8>(self.site.pool, self.slice_of(from, bytes), self.slice_of_mut(to, bytes));
                Ok(())
            }
        }
    }
}
