//! Where operands stand: a [`Frame`] resolves an op of one iteration to addresses, shapes and launches. It starts nothing
//! and keeps nothing; what becomes of an op on this device is in `prepare`.

use crate::cpu::pool::Pool;
use crate::cuda::driver::Address;
use crate::cuda::kernels::Real;
use crate::cuda::kernels::launch::{self, Launch};
use crate::cuda::kernels::ops::{self, Places};
use crate::cuda::products::{Operands, Shape};
use crate::device::DeviceError;
use plimsoll_core::{DType, Space};
use plimsoll_program::op::{Collective, Piece};
use plimsoll_program::{Index, Lifetime, Op, OpKind, Operand, Placement, Program, ProgramSet, Tensor};

/// What runs, and where its tensors stand.
pub(super) struct Plan {
    pub(super) set: ProgramSet,
    pub(super) placement: Placement,
    pub(super) real: Real,
}

impl Plan {
    /// Up to where the device's arena holds what stays from Program to Program.
    pub(super) fn kept_bytes(&self) -> u64 {
        let stays = |tensor: &Tensor| tensor.lifetime == Lifetime::Persistent && tensor.space == Space::Device;
        let kept = self.set.tensors.iter().zip(&self.placement.offsets).filter(|(tensor, _)| stays(tensor));
        let ends = kept.flat_map(|(tensor, slots)| slots.iter().flatten().map(|first| first + tensor.bytes()));
        ends.max().unwrap_or(0)
    }

    /// Whether an op is about a message that stands in the host's arena.
    fn is_mail(&self, op: &Op) -> bool {
        match &op.kind {
            OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => {
                let on_host = |piece: &Piece| self.set.tensor(piece.input.tensor).space == Space::Host;
                exchange.is_message() && exchange.pieces.iter().all(on_host)
            }
            _ => false,
        }
    }

    /// That messages in the device's memory have been taken when the Program that shows them ends: a slot of staging cannot
    /// be lent any longer.
    pub(super) fn check_messages(&self, program: &Program) -> Result<(), DeviceError> {
        let late = DeviceError::NoTeam { device: "a GPU that waits late for messages out of its memory" };
        let mut shown: Vec<(Option<u32>, Index)> = Vec::new();
        for op in program.blocks.iter().flat_map(|block| &block.ops).filter(|op| !self.is_mail(op)) {
            match &op.kind {
                OpKind::CollectiveStart(message) if message.collective == Collective::Send => {
                    shown.push((message.peer, message.sequence));
                }
                OpKind::CollectiveWait(message) if message.collective == Collective::Send => {
                    let place = shown.iter().position(|other| *other == (message.peer, message.sequence));
                    // Else it was shown by a Program before this one.
                    let Some(place) = place else { return Err(late) };
                    shown.remove(place);
                }
                _ => {}
            }
        }
        if shown.is_empty() { Ok(()) } else { Err(late) }
    }

    /// Threads for the ops of the host's processor, where there are any.
    pub(super) fn pool(&self, threads: usize) -> Result<Option<Pool>, DeviceError> {
        let is_on_host = |program: &Program| program.trace().any(|(op, _)| op.queue.is_hosts());
        Ok(self.set.programs.iter().any(is_on_host).then(|| Pool::new(threads)).transpose()?)
    }
}

/// An iteration of a block: where operands stand in it.
#[derive(Clone, Copy)]
pub(super) struct Frame<'a> {
    pub(super) plan: &'a Plan,
    /// The plan's, or that of an op which stands alone.
    pub(super) placement: &'a Placement,
    /// The arena's first byte.
    pub(super) base: Address,
    pub(super) variable: i64,
    pub(super) micro_batch: i64,
}

impl Frame<'_> {
    pub(super) fn space(&self, operand: &Operand) -> Space {
        self.plan.set.tensor(operand.tensor).space
    }

    /// The operand's first byte in its tensor's slot.
    pub(super) fn first_byte(&self, operand: &Operand) -> u64 {
        operand.first_byte(self.plan.set.tensor(operand.tensor), self.variable, self.micro_batch)
    }

    /// The operand's first byte in the arena of its space.
    pub(super) fn offset(&self, operand: &Operand) -> u64 {
        self.placement.first_byte(&self.plan.set, operand, self.variable, self.micro_batch)
    }

    /// The shape of a product and its operands, where the op is one.
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
        let result = self.at(out);
        let added = match residual {
            Some(residual) if !accumulate => self.at(residual),
            _ => result,
        };
        let operands = Operands {
            scale: *scale as f32,
            a: self.at(a),
            b: self.at(b),
            added,
            out: result,
            bias: bias.as_ref().map_or(0, |bias| self.at(bias)),
            workspace: self.at(workspace),
        };
        let shape = Shape {
            m: *m,
            n: *n,
            k: *k,
            a_transposed: *a_transposed,
            b_transposed: *b_transposed,
            a_stride: *a_stride,
            added_stride: if residual.is_some() && !accumulate { *n } else { *out_stride },
            out_stride: *out_stride,
            input: self.dtype(a),
            output: self.dtype(out),
            bias: bias.is_some(),
            adds: *accumulate || residual.is_some(),
            alignment: operands.alignments(),
            workspace_bytes: self.plan.set.tensor(workspace.tensor).bytes(),
        };
        Some((shape, operands))
    }

    /// The kernels that may follow a product: for a bias that the library does not take along, and for a residual
    /// where the result is added to what stands there.
    pub(super) fn after_product(&self, kind: &OpKind) -> Vec<(AfterProduct, Launch)> {
        let OpKind::Product { out, bias, residual, m, n, out_stride, accumulate, .. } = kind else { return Vec::new() };
        let add = |x: &Operand, x_stride: u64| {
            let [launch] = launch::add_rows(self.plan.real, self.at(x), x_stride, self.at(out), *out_stride, *m, *n);
            launch
        };
        let mut after = Vec::new();
        if let Some(bias) = bias {
            after.push((AfterProduct::Bias, add(bias, 0)));
        }
        if let Some(residual) = residual.filter(|_| *accumulate) {
            after.push((AfterProduct::Residual, add(&residual, *n)));
        }
        after
    }

    /// The address of a place in the arena.
    pub(super) fn address(&self, offset: u64, bytes: u64) -> Address {
        let end = self.placement.arena_bytes;
        assert!(offset + bytes <= end, "bug: {bytes} bytes at {offset} do not lie in an arena of {end}");
        self.base + offset
    }

    /// That kernels and products touch the device's memory only.
    pub(super) fn check(&self, op: &Op) -> Result<(), DeviceError> {
        let copies = matches!(op.kind, OpKind::TransferStart { .. } | OpKind::TransferWait { .. });
        let on_device = |operand: &Operand| self.space(operand) == Space::Device;
        if copies || self.is_hosts(op) || op.accesses(&|_| 1).iter().all(|access| on_device(&access.operand)) {
            return Ok(());
        }
        Err(DeviceError::Unsupported { op: op.name(), device: "a gpu on memory of the host" })
    }

    /// Whether the host does it: ops of its processor, and messages that stand in its arena.
    pub(super) fn is_hosts(&self, op: &Op) -> bool {
        op.queue.is_hosts() || self.plan.is_mail(op)
    }

    /// Every kernel that the op may start; see [`Frame::check`].
    pub(super) fn launches(&self, op: &Op) -> Vec<Launch> {
        if op.queue.is_hosts() {
            return Vec::new();
        }
        match &op.kind {
            OpKind::Product { .. } => self.after_product(&op.kind).into_iter().map(|(_, launch)| launch).collect(),
            kind => ops::launches(kind, self).unwrap_or_default(),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterProduct {
    Bias,
    Residual,
}

impl Places for Frame<'_> {
    fn real(&self) -> Real {
        self.plan.real
    }

    fn at(&self, operand: &Operand) -> Address {
        assert_eq!(self.space(operand), Space::Device, "bug: a kernel touches the device's memory only");
        self.address(self.offset(operand), 0)
    }

    fn dtype(&self, operand: &Operand) -> DType {
        self.plan.set.tensor(operand.tensor).dtype
    }

    fn index(&self, index: Index) -> i64 {
        index.at(self.variable, self.micro_batch)
    }
}
