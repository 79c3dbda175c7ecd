//! Operand resolution: an [`OperandResolver`] turns an op of one block iteration into addresses, shapes and launches.
//! It starts no work; `prepare` decides how an op executes.

use crate::cpu::pool::Pool;
use crate::cuda::driver::Address;
use crate::cuda::kernels::launch::{self, Launch};
use crate::cuda::kernels::ops::{self, OperandLookup};
use crate::cuda::kernels::{Real, Target};
use crate::cuda::products::{Operands, Shape};
use crate::error::DeviceError;
use plimsoll_core::{DType, Space};
use plimsoll_program::op::{Collective, ExchangeRange};
use plimsoll_program::{Index, Lifetime, Op, OpKind, Operand, Placement, Program, ProgramSet, Tensor};

/// The programs of a run and the placement of their tensors.
pub(super) struct LoadedPlan {
    /// Programs with their tensors.
    pub(super) set: ProgramSet,
    /// Offset of each tensor in the arena of its memory space.
    pub(super) placement: Placement,
    /// Data type of activations.
    pub(super) real: Real,
    /// The GPU and the compiler for which kernels are compiled.
    pub(super) target: Target,
}

impl LoadedPlan {
    /// Returns the end of the topmost persistent tensor in the device arena; 0 if there is none.
    pub(super) fn persistent_end(&self) -> u64 {
        let stays = |tensor: &Tensor| tensor.lifetime == Lifetime::Persistent && tensor.space == Space::Device;
        let kept = self.set.tensors.iter().zip(&self.placement.offsets).filter(|(tensor, _)| stays(tensor));
        let ends = kept.flat_map(|(tensor, slots)| slots.iter().flatten().map(|first| first + tensor.bytes()));
        ends.max().unwrap_or(0)
    }

    /// Returns whether an op starts or awaits a send or receive whose tensors lie in the host arena.
    fn is_host_staged(&self, op: &Op) -> bool {
        match &op.kind {
            OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => {
                let on_host = |piece: &ExchangeRange| self.set.tensor(piece.input.tensor).space == Space::Host;
                exchange.is_point_to_point() && exchange.pieces.iter().all(on_host)
            }
            _ => false,
        }
    }

    /// Checks that each send of tensors in device memory is started and awaited in the same program. It occupies a
    /// staging slot, which must be free again when the program ends.
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

    /// Returns a pool of `threads` threads for ops that run on the host; `None` if the programs have no such ops.
    pub(super) fn pool(&self, threads: usize) -> Result<Option<Pool>, DeviceError> {
        let is_on_host = |program: &Program| program.trace().any(|(op, _)| op.queue.runs_on_host());
        self.set.programs.iter().any(is_on_host).then(|| Pool::new(threads)).transpose()
    }
}

/// The context in which operands become addresses: a plan, one iteration of a block, and a micro-batch.
#[derive(Clone, Copy)]
pub(super) struct OperandResolver<'a> {
    /// Programs and placement of the run.
    pub(super) plan: &'a LoadedPlan,
    /// Placement from which addresses are computed: the plan's, or one for a single op during warm-up.
    pub(super) placement: &'a Placement,
    /// Address of the first byte of the device arena.
    pub(super) base: Address,
    /// Value of the loop variable of the op's block (repeated part of a Program), such as the index of a layer.
    pub(super) variable: i64,
    /// Number of the micro-batch in its step, from 0.
    pub(super) micro_batch: i64,
}

impl OperandResolver<'_> {
    /// Returns the memory space that holds the operand's tensor.
    pub(super) fn space(&self, operand: &Operand) -> Space {
        self.plan.set.tensor(operand.tensor).space
    }

    /// Returns the byte offset at which an operand begins, within the slot of its tensor.
    pub(super) fn first_byte(&self, operand: &Operand) -> u64 {
        operand.first_byte(self.plan.set.tensor(operand.tensor), self.variable, self.micro_batch)
    }

    /// Returns the offset of the operand's first byte within the arena of its memory space.
    pub(super) fn offset(&self, operand: &Operand) -> u64 {
        self.placement.first_byte(&self.plan.set, operand, self.variable, self.micro_batch)
    }

    /// Returns shape and operand addresses of a matrix product; `None` for other ops.
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

    /// Returns the kernels that may have to follow a matrix product; empty for other ops. One adds the bias, and is
    /// needed only if cuBLASLt cannot fuse it. One adds the residual to a product that accumulates.
    pub(super) fn post_product_launches(&self, kind: &OpKind) -> Vec<(PostProduct, Launch)> {
        let OpKind::Product { out, bias, residual, m, n, out_stride, accumulate, .. } = kind else { return Vec::new() };
        let add = |x: &Operand, x_stride: u64| self.add_rows(x, x_stride, out, *out_stride, [*m, *n]);
        let mut after = Vec::new();
        if let Some(bias) = bias {
            after.push((PostProduct::Bias, add(bias, 0)));
        }
        if let Some(residual) = residual.filter(|_| *accumulate) {
            after.push((PostProduct::Residual, add(&residual, *n)));
        }
        after
    }

    /// Returns the launch that adds the `m` × `n` matrix `x` to `out`. Strides are elements between the starts of rows;
    /// an `x_stride` of 0 adds one row to all rows.
    fn add_rows(&self, x: &Operand, x_stride: u64, out: &Operand, out_stride: u64, [m, n]: [u64; 2]) -> Launch {
        let (x, out) = (self.address_of(x), self.address_of(out));
        let [launch] = launch::add_rows(self.plan.real, x, x_stride, out, out_stride, m, n);
        launch
    }

    /// Returns the address of the range of `bytes` bytes at `offset` in the device arena. Panics if the range exceeds
    /// the placement's arena.
    pub(super) fn address(&self, offset: u64, bytes: u64) -> Address {
        let end = self.placement.arena_bytes;
        assert!(offset + bytes <= end, "bug: {bytes} bytes at {offset} do not lie in an arena of {end}");
        self.base + offset
    }

    /// Checks that an op which runs as a kernel, product or collective touches device memory only.
    pub(super) fn check(&self, op: &Op) -> Result<(), DeviceError> {
        let copies = matches!(op.kind, OpKind::TransferStart { .. } | OpKind::TransferWait { .. });
        let on_device = |operand: &Operand| self.space(operand) == Space::Device;
        if copies || self.runs_on_host(op) || op.accesses(&|_| 1).iter().all(|access| on_device(&access.operand)) {
            return Ok(());
        }
        Err(DeviceError::Unsupported { op: op.name(), device: "a GPU, with operands in host memory" })
    }

    /// Returns whether the CPU runs the op, because its queue belongs to the host or it is a message between host
    /// arenas.
    pub(super) fn runs_on_host(&self, op: &Op) -> bool {
        op.queue.runs_on_host() || self.plan.is_host_staged(op)
    }

    /// Returns the launch of every kernel that the op may start; empty if it starts none.
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

    fn target(&self) -> Target {
        self.plan.target
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
