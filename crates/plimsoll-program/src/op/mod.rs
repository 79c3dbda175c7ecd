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

use self::kind::{Family, not_in_family};
use self::types::OperandTypes;
use crate::tensor::{Operand, TensorId};
use plimsoll_core::DType;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

pub use self::attention::Heads;
pub use self::collective::{Collective, Exchange, Piece};
pub use self::kind::OpKind;
pub use self::loss::SOFTMAX_STATS;
pub use self::quantization::{Quantized, QuantizedPart};
pub(crate) use self::types::mistyped_operand;
pub use crate::models::config::RopeScaling;

/// The queue that an op runs on. The order between queues follows from hazards on arena ranges ([`crate::order`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Queue {
    /// Arithmetic on the device.
    #[default]
    Compute,
    /// Copies into the device.
    CopyIn,
    /// Copies out of the device.
    CopyOut,
    /// Collectives and point-to-point messages.
    Communication,
    /// Work of the host's processor on host tensors.
    Host,
    /// Copies out of the scratch file.
    FileRead,
    /// Copies into the scratch file.
    FileWrite,
}

impl Queue {
    /// Returns whether the host's processor runs the queue, not the device.
    pub fn runs_on_host(self) -> bool {
        matches!(self, Queue::Host | Queue::FileRead | Queue::FileWrite)
    }
}

/// An op and the queue that it runs on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Op {
    /// The operation with its operands.
    pub kind: OpKind,
    /// The queue that runs it.
    pub queue: Queue,
}

impl From<OpKind> for Op {
    fn from(kind: OpKind) -> Op {
        Op { kind, queue: Queue::Compute }
    }
}

/// The way in which an op touches elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Reads only.
    Read,
    /// Writes every element without reading it.
    Write,
    /// Reads and writes, or writes only some of the elements.
    Update,
}

/// A range of elements that an op touches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Access {
    /// First element.
    pub operand: Operand,
    /// Number of elements.
    pub elements: u64,
    /// Whether they are read or written.
    pub mode: Mode,
}

/// The floating-point operations of an op.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Floating-point operations in matrix products.
    pub product_flops: f64,
    /// The (m, n, k) of the product, or of each of the products inside attention.
    pub product_shape: Option<(u64, u64, u64)>,
    /// Other floating-point operations.
    pub other_flops: f64,
}

impl Cost {
    /// Returns the cost of operations inside and outside matrix products.
    fn new(product_flops: u64, other_flops: u64) -> Cost {
        Cost { product_flops: product_flops as f64, product_shape: None, other_flops: other_flops as f64 }
    }

    /// Returns the cost of operations outside matrix products.
    fn other(flops: u64) -> Cost {
        Cost::new(0, flops)
    }
}

/// The ranges that an op touches.
pub type Accesses = SmallVec<[Access; 8]>;

/// Passes the ranges that an op touches to a visitor.
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

    /// Reads the whole tensor: scalars, metrics.
    fn read_all(&mut self, operand: Operand) {
        self.read(operand, (self.elements_of)(operand.tensor));
    }

    /// Writes the whole tensor: a workspace.
    fn write_all(&mut self, operand: Operand) {
        self.write(operand, (self.elements_of)(operand.tensor));
    }

    /// Updates the whole tensor: scalars, metrics.
    fn update_all(&mut self, operand: Operand) {
        self.update(operand, (self.elements_of)(operand.tensor));
    }
}

impl Op {
    /// Returns the name of the op's kind, such as `rms_norm_grad`; plans, messages and measured rates use it.
    pub fn name(&self) -> &'static str {
        self.kind.name()
    }

    /// Returns whether the op runs in a call for the last micro-batch of a step (`last`), or for an earlier one.
    pub fn runs(&self, last: bool) -> bool {
        match &self.kind {
            OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => last || !exchange.last,
            _ => true,
        }
    }

    /// Returns all ranges that the op touches. `elements_of` gives the elements of a workspace, which an op touches
    /// whole.
    pub fn accesses(&self, elements_of: &dyn Fn(TensorId) -> u64) -> Accesses {
        let mut list = SmallVec::new();
        self.for_each_access(elements_of, &mut |access| list.push(access));
        list
    }

    /// Calls `visit` with each range of [`Op::accesses`], in the same order.
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

    /// Returns the (read, written) operands that may share their bytes.
    ///
    /// The planner uses this if the read tensor is not needed afterwards and both have the same size.
    pub fn in_place(&self) -> Option<(Operand, Operand)> {
        match &self.kind {
            OpKind::SwiGluGrad { gate_up, dgate_up, .. } => Some((*gate_up, *dgate_up)),
            OpKind::Product { residual: Some(residual), out, .. } => Some((*residual, *out)),
            _ => None,
        }
    }

    /// Returns the floating-point operations, in the worst case if they depend on data.
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

    /// Returns the bytes read and written. Each range counts once, an updated range twice; a wait moves nothing.
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

    /// Returns the elements of an access that memory really transfers.
    ///
    /// They are fewer than the access covers if tokens or scalars select rows, or if a stride skips columns.
    fn elements_moved(&self, access: &Access) -> u64 {
        let is = |operand: &Operand| access.operand == *operand;
        match &self.kind {
            OpKind::Embed { table, rows, hidden, .. } if is(table) => rows * hidden,
            OpKind::EmbedGrad { dtable, rows, hidden, .. } if is(dtable) => rows * hidden,
            OpKind::AppendCache { keys, values, rows, shape, .. } if is(keys) || is(values) => {
                rows * shape.kv_heads * shape.head_dim
            }
            OpKind::PickRow { x, columns, .. } if is(x) => *columns,
            OpKind::Product { a, m, k, .. } if is(a) => m * k,
            OpKind::Product { out, m, n, .. } if is(out) => m * n,
            _ => access.elements,
        }
    }
}
