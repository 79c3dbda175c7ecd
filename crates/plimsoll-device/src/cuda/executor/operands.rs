//! Operand resolution: an [`OperandResolver`] turns an op of one block iteration into addresses, shapes and launches.
//! It starts no work; `prepare` decides how an op executes.

use crate::cpu::pool::Pool;
use crate::cuda::driver::Address;
use crate::cuda::kernels::Real;
use crate::cuda::kernels::launch::{self, Launch};
use crate::cuda::kernels::ops::{self, OperandLookup};
use crate::cuda::products::{Operands, Shape};
use crate::device::DeviceError;
use plimsoll_core::{DType, Space};
use plimsoll_program::op::{Collective, Piece};
use plimsoll_program::{Index, Lifetime, Op, OpKind, Operand, Placement, Program, ProgramSet, Tensor};

/// The programs of a run and the placement of their tensors.
pub(super) struct LoadedPlan {
    pub(super) set: ProgramSet,
    pub(super) placement: Placement,
    pub(super) real: Real,
}

impl LoadedPlan {
    /// Returns the end of the persistent tensors in the device arena.
    pub(super) fn persistent_end(&self) -> u64 {
        let stays = |tensor: &Tensor| tensor.lifetime == Lifetime::Persistent && tensor.space == Space::Device;
        let kept = self.set.tensors.iter().zip(&self.placement.offsets).filter(|(tensor, _)| stays(tensor));
        let ends = kept.flat_map(|(tensor, slots)| slots.iter().flatten().map(|first| first + tensor.bytes()));
        ends.max().unwrap_or(0)
    }

    /// Whether an op belongs to a message in the host arena.
    fn is_host_staged(&self, op: &Op) -> bool {
        match &op.kind {
            OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => {
                let on_host = |piece: &Piece| self.set.tensor(piece.input.tensor).space == Space::Host;
                exchange.is_point_to_point() && exchange.pieces.iter().all(on_host)
            }
            _ => false,
        }
    }

    /// Checks that every send out of device memory completes within the program that posts it. A staging slot cannot
    /// stay lent beyond that.
    pub(super) fn check_sends_completed(&self, program: &Program) -> Result<(), DeviceError> {
        let unfinished = DeviceError::CollectivesUnsupported {
            device: "a GPU whose send out of device memory ends in a later program",
        };
        let mut open_sends: Vec<(Option<u32>, Index)> = Vec::new();
        for op in program.blocks.iter().flat_map(|block| &block.ops).filter(|op| !self.is_host_staged(op)) {
            match &op.kind {
                OpKind::CollectiveStart(message) if message.collective == Collective::Send => {
                    open_sends.push((message.peer, message.sequence));
                }
                OpKind::CollectiveWait(message) if message.collective == Collective::Send => {
                    let position = open_sends.iter().position(|other| *other == (message.peer, message.sequence));
                    // Otherwise the send was posted by an earlier program.
                    let Some(position) = position else { return Err(unfinished) };
                    open_sends.remove(position);
                }
                _ => {}
            }
        }
        if open_sends.is_empty() { Ok(()) } else { Err(unfinished) }
    }

    /// Returns threads for host ops, if the programs have any.
    pub(super) fn pool(&self, threads: usize) -> Result<Option<Pool>, DeviceError> {
        let is_on_host = |program: &Program| program.trace().any(|(op, _)| op.queue.runs_on_host());
        Ok(self.set.programs.iter().any(is_on_host).then(|| Pool::new(threads)).transpose()?)
    }
}

/// Resolves operands to addresses in one iteration of a block.
#[derive(Clone, Copy)]
pub(super) struct OperandResolver<'a> {
    pub(super) plan: &'a LoadedPlan,
    /// The plan's placement, or the placement of a single op during warm-up.
    pub(super) placement: &'a Placement,
    /// Address of the first byte of the device arena.
    pub(super) base: Address,
    pub(super) variable: i64,
    pub(super) micro_batch: i64,
}

impl OperandResolver<'_> {
    pub(super) fn space(&self, operand: &Operand) -> Space {
        self.plan.set.tensor(operand.tensor).space
    }

    /// Returns the operand's first byte within its tensor's slot.
    pub(super) fn first_byte(&self, operand: &Operand) -> u64 {
        operand.first_byte(self.plan.set.tensor(operand.tensor), self.variable, self.micro_batch)
    }

    /// Returns the operand's first byte within the arena of its space.
    pub(super) fn offset(&self, operand: &Operand) -> u64 {
        self.placement.first_byte(&self.plan.set, operand, self.variable, self.micro_batch)
    }

    /// Returns shape and operands of a matrix product, or `None` for other ops.
    pub(super) fn product(&self, kind: &OpKind) -> Option<(Shape, Operands)> {
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
            return None;
        };
        let result = self.address_of(out);
        let addend = match residual {
            Some(residual) if !accumulate => self.address_of(residual),
            _ => result,
        };
        let operands = Operands {
            scale: *scale as f32,
            a: self.address_of(a),
            b: self.address_of(b),
            addend,
            out: result,
            bias: bias.as_ref().map_or(0, |bias| self.address_of(bias)),
            workspace: self.address_of(workspace),
        };
        let shape = Shape {
            m: *m,
            n: *n,
            k: *k,
            a_transposed: *a_transposed,
            b_transposed: *b_transposed,
            a_stride: *a_stride,
            addend_stride: if residual.is_some() && !accumulate { *n } else { *out_stride },
            out_stride: *out_stride,
            input: self.dtype(a),
            output: self.dtype(out),
            bias: bias.is_some(),
            has_addend: *accumulate || residual.is_some(),
            alignment: operands.alignments(),
            workspace_bytes: self.plan.set.tensor(workspace.tensor).bytes(),
        };
        Some((shape, operands))
    }

    /// Returns the kernels that may follow a product: one adds a bias that cuBLASLt cannot fuse, one adds the residual
    /// if the product accumulates.
    pub(super) fn post_product_launches(&self, kind: &OpKind) -> Vec<(PostProduct, Launch)> {
        let OpKind::Product { out, bias, residual, m, n, out_stride, accumulate, .. } = kind else { return Vec::new() };
        let add = |x: &Operand, x_stride: u64| {
            let [launch] = launch::add_rows(
                self.plan.real,
                self.address_of(x),
                x_stride,
                self.address_of(out),
                *out_stride,
                *m,
                *n,
            );
            launch
        };
        let mut after = Vec::new();
        if let Some(bias) = bias {
            after.push((PostProduct::Bias, add(bias, 0)));
        }
        if let Some(residual) = residual.filter(|_| *accumulate) {
            after.push((PostProduct::Residual, add(&residual, *n)));
        }
        after
    }

    /// Returns the address of a range in the device arena.
    pub(super) fn address(&self, offset: u64, bytes: u64) -> Address {
        let end = self.placement.arena_bytes;
        assert!(offset + bytes <= end, "bug: {bytes} bytes at {offset} do not lie in an arena of {end}");
        self.base + offset
    }

    /// Checks that kernels and products only touch device memory.
    pub(super) fn check(&self, op: &Op) -> Result<(), DeviceError> {
        let copies = matches!(op.kind, OpKind::TransferStart { .. } | OpKind::TransferWait { .. });
        let on_device = |operand: &Operand| self.space(operand) == Space::Device;
        if copies || self.runs_on_host(op) || op.accesses(&|_| 1).iter().all(|access| on_device(&access.operand)) {
            return Ok(());
        }
        Err(DeviceError::Unsupported { op: op.name(), device: "a GPU, with operands in host memory" })
    }

    /// Whether the op runs on the host: a CPU op, or a message in the host arena.
    pub(super) fn runs_on_host(&self, op: &Op) -> bool {
        op.queue.runs_on_host() || self.plan.is_host_staged(op)
    }

    /// Returns every kernel that the op may start; see [`OperandResolver::check`].
    pub(super) fn launches(&self, op: &Op) -> Vec<Launch> {
        if op.queue.runs_on_host() {
            return Vec::new();
        }
        match &op.kind {
            OpKind::Product { .. } => {
                self.post_product_launches(&op.kind).into_iter().map(|(_, launch)| launch).collect()
            }
            kind => ops::launches(kind, self).unwrap_or_default(),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PostProduct {
    Bias,
    Residual,
}

impl OperandLookup for OperandResolver<'_> {
    fn real(&self) -> Real {
        self.plan.real
    }

    fn address_of(&self, operand: &Operand) -> Address {
        assert_eq!(self.space(operand), Space::Device, "bug: kernels touch device memory only");
        self.address(self.offset(operand), 0)
    }

    fn dtype(&self, operand: &Operand) -> DType {
        self.plan.set.tensor(operand.tensor).dtype
    }

    fn index(&self, index: Index) -> i64 {
        index.at(self.variable, self.micro_batch)
    }
}
