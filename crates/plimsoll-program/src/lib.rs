//! What is computed, as data: tensors, ops and their derivatives, Programs, the passes over them,
//! and the models that are written down in them. Nothing here runs, allocates or prices anything.
//!
//! Start at [`program::Program`]; [`op::OpKind`] is the closed set of ops; [`models::decoder`]
//! writes the Programs of the Llama, Mistral and Qwen family.

#![forbid(unsafe_code)]

pub mod builder;
pub mod derivative;
pub mod formats;
pub mod models;
pub mod op;
mod operands;
pub mod order;
pub mod passes;
pub mod placement;
pub mod program;
pub mod scalars;
pub mod schedule;
pub mod share;
pub mod tensor;
pub mod workspace;

pub use op::{Access, Mode, Op, OpKind};
pub use placement::Placement;
pub use program::{Block, Phase, Program, ProgramSet};
pub use schedule::{Call, Schedule};
pub use share::Share;
pub use tensor::{Index, Lifetime, Operand, Tensor, TensorId};
