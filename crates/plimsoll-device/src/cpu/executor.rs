//! Runs Programs on the CPU: every operand is a range of the one arena, every op a kernel.

use super::kernels::{self, Real};
use super::pool::Pool;
use crate::arena::Arena;
use crate::device::{Call, Device, DeviceError, FileSpace, Memory, Observer};
use crate::spaces::Spaces;
use crate::transport::{self, Seat};
use bytemuck::bytes_of;
use half::{bf16, f16};
use plimsoll_core::{DType, Space};
use plimsoll_program::formats::{NF4_BLOCK, NF4_GROUP, STATE_BLOCK};
use plimsoll_program::op::{Quantised, SOFTMAX_STATS};
use plimsoll_program::scalars::{Metric, Scalar};
use plimsoll_program::{Op, OpKind, Operand, Placement, ProgramSet, TensorId};
use std::marker::PhantomData;
use std::path::Path;
use std::time::{Duration, Instant};

/// Opens the CPU as a device: takes the arenas, whole and at once, and starts the threads. The scratch file, where the
/// plan has one, is in `scratch`.
///
/// # Errors
/// [`DeviceError::Arena`] where the machine does not give that much memory, [`DeviceError::Scratch`] where the disk does
/// not.
///
/// # Panics
/// For a precision that the CPU does not compute in: the caller resolves it before.
pub fn open(
    set: ProgramSet,
    placement: Placement,
    precision: DType,
    threads: usize,
    scratch: Option<&Path>,
) -> Result<Box<dyn Device>, DeviceError> {
    let (run, pool) = (runner(precision), Pool::new(threads)?);
    let spaces = Spaces::map(&placement, scratch)?;
    Ok(Box::new(CpuDevice { spaces, pool, set, placement, run, seat: None, computed: Duration::ZERO }))
}

struct CpuDevice {
    spaces: Spaces,
    pool: Pool,
    set: ProgramSet,
    placement: Placement,
    run: RunOp,
    /// Its place in a team.
    seat: Option<Seat>,
    /// What it ran took so long, others not waited for.
    computed: Duration,
}

impl Device for CpuDevice {
    fn run_observed(
        &mut self,
        call: Call,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        let (spaces, pool, set, placement, run) = (&mut self.spaces, &self.pool, &self.set, &self.placement, self.run);
        let seat = self.seat.as_ref();
        let (start, mut waited) = (Instant::now(), Duration::ZERO);
        let work = || {
            let missing = || DeviceError::NoProgram { program: call.program.to_owned() };
            let program = set.program(call.program).ok_or_else(missing)?;
            for (tick, (op, variable)) in (1..).zip(program.trace()).skip_while(|(tick, _)| *tick < call.from) {
                if !op.runs(call.last) {
                    continue;
                }
                observer.before(tick, op, spaces)?;
                let micro_batch = i64::from(call.micro_batch);
                let site = Site { spaces, pool, set, placement, variable, micro_batch };
                let came = Instant::now();
                match &op.kind {
                    OpKind::CollectiveStart(exchange) => {
                        transport::exchange(site, seat, exchange, 0.0, 0.0)?;
                        waited += came.elapsed();
                    }
                    OpKind::CollectiveWait(exchange) => {
                        transport::ended(site, seat, exchange, 0.0)?;
                        waited += came.elapsed();
                    }
                    _ => run(site, op, files)?,
                }
                observer.after(tick, op, spaces);
            }
            Ok(())
        };
        let done = transport::seated(seat, || pool.enter(work));
        self.computed += start.elapsed().saturating_sub(waited);
        done
    }

    fn computed(&mut self) -> Option<f64> {
        Some(self.computed.as_secs_f64())
    }

    fn join(&mut self, seat: Seat) -> Result<(), DeviceError> {
        self.spaces.join(seat.clone());
        self.seat = Some(seat);
        Ok(())
    }

    fn write(&mut self, tensor: TensorId, slot: u32, bytes: &[u8]) {
        self.spaces.write(&self.set, &self.placement, tensor, slot, bytes);
    }

    fn read(&mut self, tensor: TensorId, slot: u32, bytes: &mut [u8]) {
        self.spaces.read(&self.set, &self.placement, tensor, slot, bytes);
    }

    fn adopt(&mut self, set: ProgramSet, placement: Placement) -> Result<(), DeviceError> {
        self.spaces.adopt((&self.set, &self.placement), (&set, &placement))?;
        (self.set, self.placement) = (set, placement);
        Ok(())
    }

    fn memory(&mut self) -> &mut dyn Memory {
        &mut self.spaces
    }
}

/// Where an op runs: memory, threads and plan, and the iteration of its block.
#[derive(Clone, Copy)]
pub(crate) struct Site<'a> {
    pub spaces: &'a Spaces,
    pub pool: &'a Pool,
    pub set: &'a ProgramSet,
    pub placement: &'a Placement,
    pub variable: i64,
    pub micro_batch: i64,
}

/// Runs one op to its end on the caller's thread and those of the site's pool.
///
/// Ops may run at the same time at sites that share their spaces, as long as none of them writes bytes that another one
/// touches: whoever calls sees to that.
pub(crate) type RunOp = fn(Site, &Op, &mut dyn FileSpace) -> Result<(), DeviceError>;

/// What runs ops of a run in this precision.
///
/// # Panics
/// For a precision that the CPU does not compute in.
pub(crate) fn runner(precision: DType) -> RunOp {
    fn run<T: Real>(site: Site, op: &Op, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        Frame::<T> { site, precision: PhantomData }.run(op, files)
    }
    match precision {
        DType::F32 => run::<f32>,
        DType::F64 => run::<f64>,
        DType::Bf16 => run::<bf16>,
        other => panic!("the CPU does not compute in {other}"),
    }
}

/// One op in one iteration of its block.
struct Frame<'a, T> {
    site: Site<'a>,
    precision: PhantomData<T>,
}

impl<'a, T: Real> Frame<'a, T> {
    /// The arena that the operand stands in.
    fn arena(&self, operand: &Operand) -> &'a Arena {
        self.site.spaces.of(self.site.set.tensor(operand.tensor).space)
    }

    /// The operand's first byte in its arena.
    fn offset(&self, operand: &Operand) -> u64 {
        self.site.placement.first_byte(self.site.set, operand, self.site.variable, self.site.micro_batch)
    }

    fn first_byte(&self, operand: &Operand) -> u64 {
        operand.first_byte(self.site.set.tensor(operand.tensor), self.site.variable, self.site.micro_batch)
    }

    fn of<E: bytemuck::Pod>(&self, operand: &Operand, elements: u64) -> &'a [E] {
        // SAFETY: an op's operands are disjoint ranges of the arena, or it is one of the in-place pairs
        // that `run` handles by taking one slice for both (the layout gives tensors that live at the
        // same time disjoint bytes; `passes::check` keeps operands inside their tensors). The arena
        // outlives the frame, and while the op runs nothing else writes these bytes, or touches those
        // that it writes: the promise of `RunOp`.
        unsafe { self.arena(operand).slice(self.offset(operand), elements as usize) }
    }

    fn of_mut<E: bytemuck::Pod>(&self, operand: &Operand, elements: u64) -> &'a mut [E] {
        // SAFETY: as in `of`.
        unsafe { self.arena(operand).slice_mut(self.offset(operand), elements as usize) }
    }

    fn read(&self, operand: &Operand, elements: u64) -> &'a [T] {
        self.of(operand, elements)
    }

    fn write(&self, operand: &Operand, elements: u64) -> &'a mut [T] {
        self.of_mut(operand, elements)
    }

    /// Sums, statistics and masters are in the wide type.
    fn read_wide(&self, operand: &Operand, elements: u64) -> &'a [T::Wide] {
        self.of(operand, elements)
    }

    fn write_wide(&self, operand: &Operand, elements: u64) -> &'a mut [T::Wide] {
        self.of_mut(operand, elements)
    }

    fn is(&self, operand: &Operand, dtype: DType) -> bool {
        self.site.set.tensor(operand.tensor).dtype == dtype
    }

    fn is_wide(&self, operand: &Operand) -> bool {
        self.is(operand, T::Wide::DTYPE)
    }

    fn integers(&self, operand: &Operand, elements: u64) -> &'a [i32] {
        self.of(operand, elements)
    }

    fn whole(&self, operand: &Operand) -> &'a mut [T::Wide] {
        self.write_wide(operand, self.site.set.tensor(operand.tensor).elements())
    }

    /// The scratch of an op. Which lane gets how many tasks is a matter of chance, and some scratch may
    /// stay unwritten; its last element is stamped, so that what the op holds is what is measured.
    fn scratch(&self, operand: &Operand) -> &'a mut [T::Wide] {
        let scratch = self.whole(operand);
        if let Some(last) = scratch.last_mut() {
            *last = T::Wide::ZERO;
        }
        scratch
    }

    fn labelled(
        &self,
        labels: &Operand,
        weights: &Operand,
        rows: u64,
        first: u64,
        columns: u64,
    ) -> kernels::Labelled<'a, T::Wide> {
        let (labels, weights) = (self.integers(labels, rows), self.read_wide(weights, rows));
        kernels::Labelled { labels, weights, first: first as usize, columns: columns as usize }
    }

    fn metrics(&self, operand: &Operand) -> &'a mut [f64] {
        self.of_mut(operand, self.site.set.tensor(operand.tensor).elements())
    }

    fn scalar(&self, operand: &Operand, which: Scalar) -> T::Wide {
        self.read_wide(operand, which as u64 + 1)[which as usize]
    }

    fn count(&self, operand: &Operand, which: Scalar) -> usize {
        self.scalar(operand, which).wide() as usize
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
                // Added in place where the sum stands on what it is added to.
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
                    scale: T::Wide::of(*scale),
                };
                let (scratch, written) = (self.scratch(workspace), (m - 1) * out_stride + n);
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
                    self.integers(tokens, *rows),
                    table,
                    *hidden as usize,
                    self.write(out, rows * hidden),
                );
            }
            OpKind::EmbedGrad { tokens, dout, dtable, workspace, rows, hidden, vocab } => {
                self.scratch(workspace);
                let dout = self.read(dout, rows * hidden);
                let dtable = self.write_wide(dtable, vocab * hidden);
                kernels::embed_grad(pool, self.integers(tokens, *rows), dout, *hidden as usize, dtable);
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
                    self.scratch(workspace),
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
                    self.write_wide(rstd, rows * shape.rotated()),
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
                    self.read_wide(rstd, rows * shape.rotated()),
                    self.write(dx, columns),
                    dweights.map(|both| both.map(|dweight| self.write_wide(&dweight, shape.head_dim))),
                    self.scratch(workspace),
                );
            }
            OpKind::Rope { qkv, table, positions, rows, table_rows, shape, inverse } => {
                let table = self.read_wide(table, table_rows * shape.head_dim);
                let qkv = self.write(qkv, rows * shape.columns());
                kernels::rope(pool, *shape, table, self.integers(positions, *rows), *inverse, qkv);
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
                    self.integers(document_start, rows),
                    self.write(out, rows * shape.query_columns()),
                    self.write_wide(stats, rows * shape.heads),
                    self.scratch(workspace),
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
                    self.integers(document_start, rows),
                    self.write(dqkv, rows * shape.columns()),
                    self.scratch(workspace),
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
                    self.scratch(workspace),
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
                let of = self.labelled(labels, weights, *rows, *first, *columns);
                let stats = self.write_wide(stats, rows * SOFTMAX_STATS);
                kernels::softmax_stats(pool, of, self.read(logits, rows * columns), stats, *begin);
            }
            OpKind::CrossEntropy { stats, labels, weights, metrics, correct, rows } => {
                let (labels, weights) = (self.integers(labels, *rows), self.read_wide(weights, *rows));
                let correct = correct.map(|correct| self.of_mut::<i32>(&correct, *rows));
                let loss =
                    kernels::cross_entropy(self.read_wide(stats, rows * SOFTMAX_STATS), labels, weights, correct);
                self.metrics(metrics)[Metric::LossSum as usize] += loss;
            }
            OpKind::SoftmaxGrad { logits, labels, weights, stats, scalars, rows, first, columns } => {
                let of = self.labelled(labels, weights, *rows, *first, *columns);
                let (stats, scale) =
                    (self.read_wide(stats, rows * SOFTMAX_STATS), self.scalar(scalars, Scalar::InverseTokens));
                kernels::softmax_grad(pool, of, self.write(logits, rows * columns), stats, scale);
            }
            OpKind::SumRows { x, into, workspace, rows, columns } => {
                let (into, scratch) = (self.write_wide(into, *columns), self.scratch(workspace));
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
                DType::F64 => kernels::fill(pool, *value, self.of_mut::<f64>(into, *elements)),
                DType::F32 => kernels::fill(pool, f32::of(*value), self.of_mut::<f32>(into, *elements)),
                DType::Bf16 => kernels::fill(pool, bf16::of(*value), self.of_mut::<bf16>(into, *elements)),
                DType::F16 => kernels::fill(pool, f16::from_f64(*value), self.of_mut::<f16>(into, *elements)),
                DType::I32 => kernels::fill(pool, *value as i32, self.of_mut::<i32>(into, *elements)),
                DType::U8 => kernels::fill(pool, *value as u8, self.of_mut::<u8>(into, *elements)),
            },
            OpKind::SquaredNorm { x, metrics, workspace, elements } => {
                self.scratch(workspace);
                let sum = kernels::squared_norm(pool, self.read_wide(x, *elements));
                self.metrics(metrics)[Metric::NormSquared as usize] += sum;
            }
            OpKind::ClipFactor { metrics, scalars } => {
                let norm = self.metrics(metrics)[Metric::NormSquared as usize].sqrt();
                let clip = self.scalar(scalars, Scalar::ClipNorm).wide();
                let factor = if clip > 0.0 { (clip / (norm + 1e-6)).min(1.0) } else { 1.0 };
                self.whole(scalars)[Scalar::ClipFactor as usize] = T::Wide::of(factor);
            }
            OpKind::AdamW { weight, gradient, first, second, scalars, elements, betas, eps, decay } => {
                let step = self.adamw(scalars, *betas, *eps, *decay);
                let n = *elements;
                let (weight, gradient) = (self.write_wide(weight, n), self.read_wide(gradient, n));
                kernels::adamw(pool, step, weight, gradient, self.write_wide(first, n), self.write_wide(second, n));
            }
            OpKind::Sgd { weight, gradient, momentum_buffer, scalars, elements, momentum, decay } => {
                let step = kernels::Sgd {
                    rate: self.scalar(scalars, Scalar::LearningRate),
                    momentum: T::Wide::of(*momentum),
                    decay: T::Wide::of(*decay),
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
            // Copies on the CPU are done when they have started.
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
                    first: self.of_mut(first, n),
                    first_scale: self.of_mut(first_scale, blocks),
                    second: self.of_mut(second, n),
                    second_scale: self.of_mut(second_scale, blocks),
                };
                let step = self.adamw(scalars, *betas, *eps, *decay);
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
            OpKind::Quantise { from, into, elements, columns } => {
                let into = match into {
                    Quantised::Int8 { codes, scales } => kernels::Coarse::Int8 {
                        codes: self.of_mut(codes, *elements),
                        scales: self.of_mut(scales, elements / columns),
                    },
                    Quantised::Nf4 { codes, scales, groups } => {
                        let blocks = elements.div_ceil(NF4_BLOCK);
                        kernels::Coarse::Nf4 {
                            codes: self.of_mut(codes, elements.div_ceil(2)),
                            scales: self.of_mut(scales, blocks),
                            groups: self.of_mut(groups, 2 * blocks.div_ceil(NF4_GROUP)),
                        }
                    }
                };
                if self.is_wide(from) {
                    kernels::quantise(pool, self.read_wide(from, *elements), *columns as usize, into);
                } else {
                    kernels::quantise(pool, self.read(from, *elements), *columns as usize, into);
                }
            }
            OpKind::Dequantise { from, into, elements, columns } => {
                let from = match from {
                    Quantised::Int8 { codes, scales } => kernels::Coarse::Int8 {
                        codes: self.of(codes, *elements),
                        scales: self.of(scales, elements / columns),
                    },
                    Quantised::Nf4 { codes, scales, groups } => {
                        let blocks = elements.div_ceil(NF4_BLOCK);
                        kernels::Coarse::Nf4 {
                            codes: self.of(codes, elements.div_ceil(2)),
                            scales: self.of(scales, blocks),
                            groups: self.of(groups, 2 * blocks.div_ceil(NF4_GROUP)),
                        }
                    }
                };
                kernels::dequantise(pool, from, *columns as usize, self.write(into, *elements));
            }
            // Devices meet before they come here, and when they have met it is done.
            OpKind::CollectiveStart(_) => {
                return Err(DeviceError::Unsupported { op: op.name(), device: "a single cpu" });
            }
            OpKind::CollectiveWait(_) => {}
        }
        Ok(())
    }

    /// The numbers of this step.
    fn adamw(&self, scalars: &Operand, betas: [f64; 2], eps: f64, decay: f64) -> kernels::AdamW<T::Wide> {
        kernels::AdamW {
            rate: self.scalar(scalars, Scalar::LearningRate),
            betas,
            eps: T::Wide::of(eps),
            decay: T::Wide::of(decay),
            bias_corrections: [
                self.scalar(scalars, Scalar::BiasCorrection1),
                self.scalar(scalars, Scalar::BiasCorrection2),
            ],
            clip: self.scalar(scalars, Scalar::ClipFactor),
        }
    }

    fn cast(&self, from: &Operand, to: &Operand, elements: u64) {
        let (source, target) = (self.site.set.tensor(from.tensor).dtype, self.site.set.tensor(to.tensor).dtype);
        let bytes = || self.of(from, elements * source.bytes());
        // One side is always a type that the run computes in.
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
                let to = self.of_mut(to, elements * target.bytes());
                kernels::to_bytes(self.site.pool, target, self.read_wide(from, elements), to)
            }
            _ => {
                let to = self.of_mut(to, elements * target.bytes());
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
                .read(&source.name, self.first_byte(from), self.of_mut(to, bytes))
                .map_err(|error| DeviceError::File { tensor: source.name.clone(), source: error }),
            (_, Space::File) => files
                .write(&target.name, self.first_byte(to), self.of(from, bytes))
                .map_err(|error| DeviceError::File { tensor: target.name.clone(), source: error }),
            (Space::Scratch, _) => self.site.spaces.scratch().read(self.offset(from), self.of_mut(to, bytes)),
            (_, Space::Scratch) => self.site.spaces.scratch().write(self.offset(to), self.of(from, bytes)),
            // The CPU is its own host.
            _ => {
                kernels::copy::<u8>(self.site.pool, self.of(from, bytes), self.of_mut(to, bytes));
                Ok(())
            }
        }
    }
}

/// Numbers as the bytes that [`Device::write`] takes for a tensor of this type.
///
/// # Panics
/// For a type that the CPU does not compute in.
pub fn real_bytes(dtype: DType, values: &[f64]) -> Vec<u8> {
    fn bytes<T: Real>(values: &[f64]) -> Vec<u8> {
        values.iter().flat_map(|v| bytes_of(&T::of(*v)).to_vec()).collect()
    }
    match dtype {
        DType::F64 => bytes::<f64>(values),
        DType::F32 => bytes::<f32>(values),
        DType::Bf16 => bytes::<bf16>(values),
        other => panic!("the CPU does not compute in {other}"),
    }
}

/// The numbers in bytes that [`Device::read`] gave for a tensor of this type.
///
/// # Panics
/// As [`real_bytes`].
pub fn real_values(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    fn values<T: Real>(bytes: &[u8]) -> Vec<f64> {
        bytes.chunks_exact(size_of::<T>()).map(|b| bytemuck::pod_read_unaligned::<T>(b).wide()).collect()
    }
    match dtype {
        DType::F64 => values::<f64>(bytes),
        DType::F32 => values::<f32>(bytes),
        DType::Bf16 => values::<bf16>(bytes),
        other => panic!("the CPU does not compute in {other}"),
    }
}
