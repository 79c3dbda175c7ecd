//! The closed set of ops, and per op its name, accesses, cost and operand types. Derivatives are in
//! [`crate::derivative`], quantized formats in [`crate::formats`], kernels in the device crate.
//!
//! [`OpKind`] lists all ops with a legend of the shape letters. Each family of ops has a module with three functions:
//!
//! | function | answers |
//! |---|---|
//! | `visit_accesses` | which elements of which tensors does the op read and write? |
//! | `cost` | how many floating-point operations does it take? |
//! | `expect_types` | which dtype must each operand have? |
//!
//! To add an op: add a variant and its family to `kind`, its operands to `operands`, and an arm to the functions of its
//! family. If it occurs in a forward pass, add its derivative to [`crate::derivative`].

mod attention;
mod collective;
mod elementwise;
mod embedding;
mod fill;
mod kind;
mod loss;
mod matmul;
mod norm;
pub(crate) mod operands;
mod optimizer;
mod quantization;
mod transfer;
mod types;

use self::types::OperandTypes;
use crate::tensor::{Operand, TensorId};
use plimsoll_core::DType;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

pub use self::attention::Heads;
pub use self::collective::{Collective, Exchange, ExchangeRange};
pub use self::kind::{Family, OpKind, not_in_family};
pub use self::loss::SOFTMAX_STATS;
pub use self::quantization::{Quantized, QuantizedPart};
pub(crate) use self::types::mistyped_operand;
pub use crate::models::{Activation, QkNorm, QueryGrowth, RopeScaling};

/// The queue, like a CUDA stream, that an op runs on. Ops of one queue run in order. Ops of different queues may
/// overlap, unless they touch the same bytes and one of them writes ([`crate::order`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Queue {
    /// Arithmetic on the device; the default queue.
    #[default]
    Compute,
    /// Copies into the device from host memory, or from files of models and checkpoints.
    CopyIn,
    /// Copies from the device to host memory, or to files of models and checkpoints.
    CopyOut,
    /// Collectives and point-to-point messages between workers.
    Communication,
    /// Work of the CPU on offloaded tensors in host memory.
    Host,
    /// Copies from the scratch file, which holds offloaded tensors that exceed host memory.
    FileRead,
    /// Copies to the scratch file.
    FileWrite,
}

impl Queue {
    /// Returns whether the host's CPU runs the ops of the queue, not the device.
    pub fn runs_on_host(self) -> bool {
        matches!(self, Queue::Host | Queue::FileRead | Queue::FileWrite)
    }
}

/// An operation on tensors (`kind`), and the queue that it runs on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Op {
    /// The operation with its operands and sizes.
    pub kind: OpKind,
    /// The queue that runs it.
    pub queue: Queue,
}

impl From<OpKind> for Op {
    fn from(kind: OpKind) -> Op {
        Op { kind, queue: Queue::Compute }
    }
}

/// The way in which an op touches a range of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Reads only.
    Read,
    /// Writes every element without reading it.
    Write,
    /// Reads and writes, or writes only some of the elements.
    Update,
}

/// A range of tensor elements that an op reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Access {
    /// Tensor slot and first element of the range.
    pub operand: Operand,
    /// Number of elements in the range.
    pub elements: u64,
    /// Whether the op reads the elements, writes them, or both.
    pub mode: Mode,
}

/// The number of floating-point operations of an op, from which the planner predicts its time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Floating-point operations in matrix products; a multiply-add counts as two.
    pub product_flops: f64,
    /// The sizes (m, n, k) of the matrix product, or of a typical product inside attention; `None` for other ops.
    pub product_shape: Option<(u64, u64, u64)>,
    /// Other floating-point operations.
    pub other_flops: f64,
}

impl Cost {
    /// Returns the cost of operations inside and outside matrix products.
    fn new(product_flops: f64, other_flops: f64) -> Cost {
        Cost { product_flops, product_shape: None, other_flops }
    }

    /// Returns the cost of operations outside matrix products: `flops` for each element of a tensor of these extents.
    /// The counts are floating-point numbers, because those of long sequences exceed 64 bits.
    fn other<const N: usize>(flops: f64, extents: [u64; N]) -> Cost {
        Cost::new(0.0, extents.iter().fold(flops, |product, &extent| product * extent as f64))
    }
}

/// The ranges that an op touches, one [`Access`] each.
pub type Accesses = SmallVec<[Access; 8]>;

/// A closure (`visit`) that is called with each range that an op touches, and methods that build these calls.
struct AccessVisitor<'a> {
    elements_of: &'a dyn Fn(TensorId) -> u64,
    visit: &'a mut dyn FnMut(Access),
}

impl AccessVisitor<'_> {
    fn touch(&mut self, operand: Operand, elements: u64, mode: Mode) {
        (self.visit)(Access { operand, elements, mode });
    }

    fn read(&mut self, operand: Operand, elements: u64) {
        self.touch(operand, elements, Mode::Read);
    }

    fn write(&mut self, operand: Operand, elements: u64) {
        self.touch(operand, elements, Mode::Write);
    }

    fn update(&mut self, operand: Operand, elements: u64) {
        self.touch(operand, elements, Mode::Update);
    }

    /// Calls `visit` with the operand's whole tensor as a range that the op reads, such as the scalar tensor.
    fn read_all(&mut self, operand: Operand) {
        self.read(operand, (self.elements_of)(operand.tensor));
    }

    /// Calls `visit` with the operand's whole tensor as a range that the op writes, such as a workspace.
    fn write_all(&mut self, operand: Operand) {
        self.write(operand, (self.elements_of)(operand.tensor));
    }

    /// Calls `visit` with the operand's whole tensor as a range that the op reads and writes, such as the metrics
    /// tensor.
    fn update_all(&mut self, operand: Operand) {
        self.update(operand, (self.elements_of)(operand.tensor));
    }
}

impl Op {
    /// Returns the name of the op's kind, such as `rms_norm_grad`; plans, messages and measured rates use it.
    pub fn name(&self) -> &'static str {
        self.kind.name()
    }

    /// Returns whether the op runs for a micro-batch; `last` tells whether that is the last one of its step.
    /// Collectives on complete gradients run for the last one only, all other ops for each.
    pub fn runs(&self, last: bool) -> bool {
        match &self.kind {
            OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => last || !exchange.last,
            _ => true,
        }
    }

    /// Returns all ranges of elements that the op reads or writes. `elements_of` must return the number of elements of
    /// a tensor's slot: the length of the range for tensors that the op touches as a whole.
    pub fn accesses(&self, elements_of: &dyn Fn(TensorId) -> u64) -> Accesses {
        let mut list = SmallVec::new();
        self.for_each_access(elements_of, &mut |access| list.push(access));
        list
    }

    /// Calls `visit` with each range of elements that the op reads or writes, like [`Op::accesses`] but without a list.
    pub fn for_each_access(&self, elements_of: &dyn Fn(TensorId) -> u64, visit: &mut dyn FnMut(Access)) {
        let (op, visitor) = (&self.kind, &mut AccessVisitor { elements_of, visit });
        match op.family() {
            Family::Matmul => matmul::visit_accesses(op, visitor),
            Family::Embedding => embedding::visit_accesses(op, visitor),
            Family::Norm => norm::visit_accesses(op, visitor),
            Family::Attention => attention::visit_accesses(op, visitor),
            Family::Loss => loss::visit_accesses(op, visitor),
            Family::Elementwise => elementwise::visit_accesses(op, visitor),
            Family::Fill => fill::visit_accesses(op, visitor),
            Family::Quantization => quantization::visit_accesses(op, visitor),
            Family::Optimizer => optimizer::visit_accesses(op, visitor),
            Family::Transfer => transfer::visit_accesses(op, visitor),
            Family::Collective => collective::visit_accesses(op, visitor),
        }
    }

    /// Returns a pair of operands (read, written) that the op's kernel allows to be the same memory, and `None` if it
    /// allows none.
    ///
    /// The planner places both at the same bytes if no later op needs the read tensor and both have the same size.
    pub fn in_place(&self) -> Option<(Operand, Operand)> {
        match &self.kind {
            OpKind::GluGrad { gate_up, dgate_up, .. } => Some((*gate_up, *dgate_up)),
            OpKind::Product { residual: Some(residual), out, .. } => Some((*residual, *out)),
            _ => None,
        }
    }

    /// Returns the number of floating-point operations of the op, 0 for copies and collectives. If it depends on data,
    /// as in attention within documents, returns the largest possible number.
    pub fn cost(&self) -> Cost {
        let op = &self.kind;
        match op.family() {
            Family::Matmul => matmul::cost(op),
            Family::Embedding => embedding::cost(op),
            Family::Norm => norm::cost(op),
            Family::Attention => attention::cost(op),
            Family::Loss => loss::cost(op),
            Family::Elementwise => elementwise::cost(op),
            Family::Fill => fill::cost(op),
            Family::Quantization => quantization::cost(op),
            Family::Optimizer => optimizer::cost(op),
            Family::Transfer | Family::Collective => Cost::default(),
        }
    }

    /// Returns the number of bytes that the op reads and writes in memory. A range that is both read and written counts
    /// twice. Waits move 0 bytes. `elements_of` gives the elements of a tensor's slot, `dtype_of` its dtype.
    pub fn bytes_moved(&self, elements_of: &dyn Fn(TensorId) -> u64, dtype_of: &dyn Fn(TensorId) -> DType) -> u64 {
        if matches!(self.kind, OpKind::TransferWait { .. } | OpKind::CollectiveWait(_)) {
            return 0;
        }
        let mut bytes = 0;
        self.for_each_access(elements_of, &mut |access| {
            let times = if access.mode == Mode::Update { 2 } else { 1 };
            bytes += self.elements_moved(&access) * dtype_of(access.operand.tensor).bytes() * times;
        });
        bytes
    }

    /// Returns how many of the elements of an access the op reads or writes. They are fewer than all if token ids or a
    /// row number in `scalars` select rows of a table, or if a stride skips columns.
    fn elements_moved(&self, access: &Access) -> u64 {
        let is = |operand: &Operand| access.operand == *operand;
        match &self.kind {
            OpKind::Embed { table, rows, hidden, .. } if is(table) => rows * hidden,
            OpKind::EmbedGrad { dtable, rows, hidden, .. } if is(dtable) => rows * hidden,
            OpKind::AppendCache { keys, values, sequences, rows, shape, .. } if is(keys) || is(values) => {
                sequences * rows * shape.kv_heads * shape.head_dim
            }
            OpKind::CopyCache { keys, values, rows, shape, .. } if is(keys) || is(values) => {
                rows * shape.kv_heads * shape.head_dim
            }
            OpKind::CachedAttention { keys, values, sequences, capacity, shape, .. } if is(keys) || is(values) => {
                sequences * capacity * shape.kv_heads * shape.head_dim
            }
            OpKind::PickRow { x, columns, .. } if is(x) => *columns,
            OpKind::Product { a, m, k, .. } if is(a) => m * k,
            OpKind::Product { out, m, n, .. } if is(out) => m * n,
            _ => access.elements,
        }
    }
}
