//! Ops of the forward and backward pass: products, embeddings, norms, attention, elementwise ops and the loss.

use super::operands::OpContext;
use crate::cpu::kernels::{self, Multiply, NormWeight, Real};
use plimsoll_program::op::{SOFTMAX_STATS, not_in_family};
use plimsoll_program::scalars::{Metric, Scalar};
use plimsoll_program::{OpKind, Operand};

impl<T: Multiply> OpContext<'_, T> {
    /// Computes the matrix product that an op describes, with its bias and residual.
    pub fn run_product(&self, kind: &OpKind) {
        let OpKind::Product {
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
        } = kind
        else {
            not_in_family(kind)
        };
        let pool = self.site.pool;
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

    /// Looks up embeddings, or computes their gradient.
    pub fn run_embedding(&self, kind: &OpKind) {
        let pool = self.site.pool;
        match kind {
            OpKind::Embed { tokens, table, out, rows, hidden, vocab, scale } => {
                let table = self.read(table, vocab * hidden);
                kernels::embed(
                    pool,
                    self.read_integers(tokens, *rows),
                    table,
                    *hidden as usize,
                    *scale,
                    self.write(out, rows * hidden),
                );
            }
            OpKind::EmbedGrad { tokens, dout, dtable, workspace, rows, hidden, vocab, scale } => {
                self.workspace_of(workspace);
                let dout = self.read(dout, rows * hidden);
                let dtable = self.write_wide(dtable, vocab * hidden);
                let tokens = self.read_integers(tokens, *rows);
                kernels::embed_grad(pool, tokens, dout, *hidden as usize, *scale, dtable);
            }
            other => not_in_family(other),
        }
    }

    /// Returns the weight of a norm over `elements` elements, to which `offset` is added.
    fn norm_weight(&self, weight: &Operand, elements: u64, offset: f64) -> NormWeight<'_, T> {
        NormWeight { values: self.read(weight, elements), offset }
    }

    /// Normalizes rows or heads by their root mean square, or computes the gradient.
    pub fn run_norm(&self, kind: &OpKind) {
        let pool = self.site.pool;
        match kind {
            OpKind::RmsNorm { x, weight, residual, out, rstd, rows, dim, eps, offset } => {
                let (x, weight) = (self.read(x, rows * dim), self.norm_weight(weight, *dim, *offset));
                let residual = residual.as_ref().map(|residual| self.read(residual, rows * dim));
                let (out, rstd) = (self.write(out, rows * dim), self.write_wide(rstd, *rows));
                kernels::rms_norm(pool, x, weight, residual, *eps, out, rstd);
            }
            OpKind::RmsNormGrad { x, weight, rstd, dout, dx, dweight, workspace, rows, dim, offset, accumulate } => {
                kernels::rms_norm_grad(
                    pool,
                    self.read(x, rows * dim),
                    self.norm_weight(weight, *dim, *offset),
                    self.read_wide(rstd, *rows),
                    self.read(dout, rows * dim),
                    self.write(dx, rows * dim),
                    dweight.map(|dweight| self.write_wide(&dweight, *dim)),
                    *accumulate,
                    self.workspace_of(workspace),
                );
            }
            OpKind::HeadNorm { x, q_weight, k_weight, out, rstd, rows, shape, norm, eps, offset } => {
                let columns = rows * shape.columns();
                let [queries, keys] = shape.norm_widths(*norm);
                kernels::head_norm(
                    pool,
                    *shape,
                    self.read(x, columns),
                    [(q_weight, queries), (k_weight, keys)].map(|(weight, n)| self.norm_weight(weight, n, *offset)),
                    *eps,
                    self.write(out, columns),
                    self.write_wide(rstd, rows * shape.norm_count(*norm)),
                );
            }
            OpKind::HeadNormGrad {
                x,
                q_weight,
                k_weight,
                rstd,
                dx,
                dweights,
                workspace,
                rows,
                shape,
                norm,
                offset,
            } => {
                let columns = rows * shape.columns();
                let [queries, keys] = shape.norm_widths(*norm);
                kernels::head_norm_grad(
                    pool,
                    *shape,
                    self.read(x, columns),
                    [(q_weight, queries), (k_weight, keys)].map(|(weight, n)| self.norm_weight(weight, n, *offset)),
                    self.read_wide(rstd, rows * shape.norm_count(*norm)),
                    self.write(dx, columns),
                    dweights.map(|[q, k]| [self.write_wide(&q, queries), self.write_wide(&k, keys)]),
                    self.workspace_of(workspace),
                );
            }
            other => not_in_family(other),
        }
    }

    /// Runs attention, its gradient, rotary embeddings, or an append of keys and values to their cache.
    pub fn run_attention(&self, kind: &OpKind) {
        let pool = self.site.pool;
        match kind {
            OpKind::Rope { qkv, table, positions, rows, table_rows, key_shift, shape, inverse } => {
                let table = self.read_wide(table, table_rows * shape.head_dim);
                let qkv = self.write(qkv, rows * shape.columns());
                let positions = self.read_integers(positions, *rows);
                kernels::rope(pool, *shape, table, positions, *key_shift, *inverse, qkv);
            }
            OpKind::RopeTable { table, table_rows, head_dim, theta, scaling, amplitude, growth } => {
                let table = self.write_wide(table, table_rows * head_dim);
                kernels::rope_table(pool, *head_dim as usize, *theta, scaling, *amplitude, *growth, table);
            }
            OpKind::ShiftPositions { positions, document_start, out, rows, shift } => {
                let starts = document_start.as_ref().map(|starts| self.read_integers(starts, *rows));
                let positions = self.read_integers(positions, *rows);
                kernels::shift_positions(positions, starts, *shift, self.write_integers(out, *rows));
            }
            OpKind::Attention { qkv, document_start, out, stats, workspace, batch, sequence, shape, softcap } => {
                let rows = batch * sequence;
                kernels::attention(
                    pool,
                    *shape,
                    *softcap,
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
                softcap,
            } => {
                let rows = batch * sequence;
                kernels::attention_grad(
                    pool,
                    *shape,
                    *softcap,
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
            OpKind::CachedAttention {
                qkv,
                keys,
                values,
                places,
                first_keys,
                out,
                workspace,
                slots,
                sequences,
                rows,
                capacity,
                shape,
                softcap,
            } => {
                let (rows, caches) = (sequences * rows, slots * capacity * shape.kv_heads * shape.head_dim);
                kernels::cached_attention(
                    pool,
                    *shape,
                    *softcap,
                    self.read(qkv, rows * shape.columns()),
                    [keys, values].map(|cache| self.read(cache, caches)),
                    self.read_integers(places, rows),
                    (*sequences as usize, *capacity as usize),
                    first_keys.as_ref().map_or(&[], |first_keys| self.read_integers(first_keys, rows)),
                    self.write(out, rows * shape.query_columns()),
                    self.workspace_of(workspace),
                );
            }
            OpKind::AppendCache { qkv, keys, values, places, slots, sequences, rows, capacity, shape } => {
                let (rows, caches) = (sequences * rows, slots * capacity * shape.kv_heads * shape.head_dim);
                kernels::append_cache(
                    *shape,
                    self.read(qkv, rows * shape.columns()),
                    self.read_integers(places, rows),
                    self.write(keys, caches),
                    self.write(values, caches),
                );
            }
            OpKind::CopyCache { keys, values, from, to, slots, capacity, rows, shape } => {
                let caches = slots * capacity * shape.kv_heads * shape.head_dim;
                let [from, to] = [from, to].map(|places| self.read_integers(places, *rows));
                kernels::copy_cache(*shape, from, to, self.write(keys, caches), self.write(values, caches));
            }
            other => not_in_family(other),
        }
    }

    /// Runs an op that treats each element, or each row, alike: activation, dropout, sum, cast, or the copy of one row.
    pub fn run_elementwise(&self, kind: &OpKind) {
        let pool = self.site.pool;
        match kind {
            OpKind::Glu { gate_up, out, rows, ffn, activation } => {
                let (gate_up, out) = (self.read(gate_up, rows * 2 * ffn), self.write(out, rows * ffn));
                kernels::glu(pool, *activation, *ffn as usize, gate_up, out);
            }
            OpKind::GluGrad { gate_up, dout, dgate_up, rows, ffn, activation } => {
                let (ffn, wide, dout) = (*ffn as usize, rows * 2 * ffn, self.read(dout, rows * ffn));
                if self.offset(gate_up) == self.offset(dgate_up) {
                    kernels::glu_grad_in_place(pool, *activation, ffn, self.write(gate_up, wide), dout);
                } else {
                    let (gate_up, dgate_up) = (self.read(gate_up, wide), self.write(dgate_up, wide));
                    kernels::glu_grad(pool, *activation, ffn, gate_up, dout, dgate_up);
                }
            }
            OpKind::SoftCap { x, elements, cap } => kernels::soft_cap(pool, *cap, self.write(x, *elements)),
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
            OpKind::Cast { from, to, elements } => self.cast(from, to, *elements),
            other => not_in_family(other),
        }
    }

    /// Computes the softmax statistics of logits, the cross-entropy loss from them, or the gradient of the logits.
    pub fn run_loss(&self, kind: &OpKind) {
        let pool = self.site.pool;
        match kind {
            OpKind::SoftmaxStats { logits, labels, weights, stats, rows, first, columns, begin } => {
                let labelled = self.labelled_rows(labels, weights, *rows, *first, *columns);
                let stats = self.write_wide(stats, rows * SOFTMAX_STATS);
                kernels::softmax_stats(pool, labelled, self.read(logits, rows * columns), stats, *begin);
            }
            OpKind::CrossEntropy { stats, labels, weights, metrics, correct, log_probabilities, rows } => {
                let (labels, weights) = (self.read_integers(labels, *rows), self.read_wide(weights, *rows));
                let correct = correct.map(|correct| self.slice_of_mut::<i32>(&correct, *rows));
                let log_probabilities = log_probabilities.map(|output| self.write_wide(&output, *rows));
                let stats = self.read_wide(stats, rows * SOFTMAX_STATS);
                let loss = kernels::cross_entropy(stats, labels, weights, correct, log_probabilities);
                self.metrics(metrics)[Metric::LossSum as usize] += loss;
            }
            OpKind::SoftmaxGrad { logits, labels, weights, stats, scalars, rows, first, columns, softcap } => {
                let labelled = self.labelled_rows(labels, weights, *rows, *first, *columns);
                let (stats, scale) =
                    (self.read_wide(stats, rows * SOFTMAX_STATS), self.scalar(scalars, Scalar::InverseTokens));
                kernels::softmax_grad(pool, labelled, self.write(logits, rows * columns), stats, scale, *softcap);
            }
            other => not_in_family(other),
        }
    }

    /// Converts `elements` elements of `from` to the type of `to`. At least one of the two types must be `T` or
    /// `T::Wide`.
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
}
