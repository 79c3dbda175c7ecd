//! Ops on stored tensors: optimizer, fills, quantization and transfers.

use super::operands::OpContext;
use crate::cpu::kernels::{self, Multiply, Real};
use crate::device::FileSpace;
use crate::error::DeviceError;
use half::{bf16, f16};
use plimsoll_core::{DType, Space};
use plimsoll_program::formats::{NF4_BLOCK, NF4_GROUP, STATE_BLOCK};
use plimsoll_program::op::{Quantized, not_in_family};
use plimsoll_program::scalars::{Metric, Scalar};
use plimsoll_program::{OpKind, Operand};

impl<T: Multiply> OpContext<'_, T> {
    /// Updates weights, or computes the norm and the clip factor of gradients.
    pub fn run_optimizer(&self, kind: &OpKind) {
        let pool = self.site.pool;
        match kind {
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
            other => not_in_family(other),
        }
    }

    /// Fills a tensor with a constant or with random numbers.
    pub fn run_fill(&self, kind: &OpKind) {
        let pool = self.site.pool;
        match kind {
            OpKind::Fill { into, value, elements } => match self.site.set.tensor(into.tensor).dtype {
                DType::F64 => kernels::fill(pool, *value, self.slice_of_mut::<f64>(into, *elements)),
                DType::F32 => kernels::fill(pool, f32::from_f64(*value), self.slice_of_mut::<f32>(into, *elements)),
                DType::Bf16 => kernels::fill(pool, bf16::from_f64(*value), self.slice_of_mut::<bf16>(into, *elements)),
                DType::F16 => kernels::fill(pool, f16::from_f64(*value), self.slice_of_mut::<f16>(into, *elements)),
                DType::I32 => kernels::fill(pool, *value as i32, self.slice_of_mut::<i32>(into, *elements)),
                DType::U8 => kernels::fill(pool, *value as u8, self.slice_of_mut::<u8>(into, *elements)),
            },
            OpKind::InitNormal { into, seed, number, first, std, elements } => {
                let first = first.at(self.site.variable, self.site.micro_batch) as u64;
                if self.is_wide(into) {
                    kernels::normal(pool, *seed, *number, first, *std, self.write_wide(into, *elements));
                } else {
                    kernels::normal(pool, *seed, *number, first, *std, self.write(into, *elements));
                }
            }
            OpKind::InitUniform { into, seed, number, first, bound, elements } => {
                let first = first.at(self.site.variable, self.site.micro_batch) as u64;
                if self.is_wide(into) {
                    kernels::uniform(pool, *seed, *number, first, *bound, self.write_wide(into, *elements));
                } else {
                    kernels::uniform(pool, *seed, *number, first, *bound, self.write(into, *elements));
                }
            }
            other => not_in_family(other),
        }
    }

    /// Quantizes or dequantizes a matrix.
    pub fn run_quantization(&self, kind: &OpKind) {
        let pool = self.site.pool;
        match kind {
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
            other => not_in_family(other),
        }
    }

    /// Returns the hyperparameters of AdamW for this step; those that change with the step come from `scalars`.
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

    /// Copies all elements of a transfer at its start; does nothing for the wait.
    ///
    /// # Errors
    /// Fails if a file cannot be read or written.
    pub fn run_transfer(&self, kind: &OpKind, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        match kind {
            OpKind::TransferStart { from, to, elements, .. } => self.transfer(from, to, *elements, files),
            // On the CPU a copy has ended when its start returns.
            OpKind::TransferWait { .. } => Ok(()),
            other => not_in_family(other),
        }
    }

    /// Copies elements between memory spaces, or between memory and a file.
    ///
    /// # Errors
    /// Fails if a file cannot be read or written.
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
