//! Execution of single ops on the CPU: from an op's operands to slices of the arenas, and to a kernel.
//!
//! [`runner`] gives the function for a precision, which hands each op to the function of its family (`layers`, `state`).
//! `operands` turns operands into slices.

mod layers;
mod operands;
mod state;

use super::kernels::Multiply;
use super::pool::Pool;
use crate::device::FileSpace;
use crate::error::DeviceError;
use crate::spaces::Spaces;
use half::bf16;
use operands::OpContext;
use plimsoll_core::DType;
use plimsoll_program::op::Family;
use plimsoll_program::{Op, OpKind, Placement, ProgramSet};
use std::marker::PhantomData;

/// The context of an op: memory, threads, plan, micro-batch, and the iteration of its block (repeated part of a
/// Program).
#[derive(Clone, Copy)]
pub(crate) struct Site<'a> {
    /// Memory of the device.
    pub spaces: &'a Spaces,
    /// Threads of the kernels.
    pub pool: &'a Pool,
    /// Programs of the plan, with their tensors.
    pub set: &'a ProgramSet,
    /// Offset of each tensor in its arena.
    pub placement: &'a Placement,
    /// Value of the loop variable of the op's block (repeated part of a Program), such as the index of a layer.
    pub variable: i64,
    /// Number of the micro-batch in the step, counted from 0.
    pub micro_batch: i64,
}

/// A function that runs one op to its end, on the caller's thread and those of the site's pool.
///
/// Several ops may run at once in the same memory. The caller ensures that none of them writes bytes that another one
/// accesses.
pub(crate) type RunOp = fn(Site, &Op, &mut dyn FileSpace) -> Result<(), DeviceError>;

/// Returns the function that runs ops in a precision.
///
/// # Panics
/// For a precision that the CPU does not compute in.
pub(crate) fn runner(precision: DType) -> RunOp {
    fn run<T: Multiply>(site: Site, op: &Op, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        run_op(&OpContext::<T> { site, precision: PhantomData }, op, files)
    }
    match precision {
        DType::F32 => run::<f32>,
        DType::F64 => run::<f64>,
        DType::Bf16 => run::<bf16>,
        other => panic!("the CPU does not compute in {other}"),
    }
}

/// Runs an op by calling the function for its family, such as norms. Fails for the start of a collective, which
/// executors must run themselves; its wait does nothing here.
fn run_op<T: Multiply>(context: &OpContext<T>, op: &Op, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
    let kind = &op.kind;
    match kind.family() {
        Family::Matmul => context.run_product(kind),
        Family::Embedding => context.run_embedding(kind),
        Family::Norm => context.run_norm(kind),
        Family::Attention => context.run_attention(kind),
        Family::Loss => context.run_loss(kind),
        Family::Elementwise => context.run_elementwise(kind),
        Family::Fill => context.run_fill(kind),
        Family::Quantization => context.run_quantization(kind),
        Family::Optimizer => context.run_optimizer(kind),
        Family::Transfer => context.run_transfer(kind, files)?,
        // The executors handle collectives; a start has ended when it returns.
        Family::Collective if matches!(kind, OpKind::CollectiveWait(_)) => {}
        Family::Collective => return Err(DeviceError::Unsupported { op: op.name(), device: "a single cpu" }),
    }
    Ok(())
}
