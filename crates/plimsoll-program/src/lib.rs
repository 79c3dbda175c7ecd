//! Programs: a training step as data. This crate describes *what* a device computes; it runs, allocates and prices
//! nothing.
//!
//! A [`Program`] is a straight-line list of ops over named, typed, shaped tensors, grouped into repeated [`Block`]s
//! such as transformer layers. A [`ProgramSet`] has all Programs of one device: forward, backward, update, evaluation,
//! generation, loading, saving. No op allocates memory, so the planner knows every byte before the run starts.
//!
//! ```text
//! ModelConfig ─► models::decoder::build ─► ProgramSet ─► passes ─► ProgramSet ─► planner ─► Placement ─► executor
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`program`], [`tensor`], [`op`] | the representation; [`OpKind`] is the closed set of ops |
//! | [`schedule`] | the order of Programs in a step: gradient accumulation, 1F1B |
//! | [`models`] | model configurations, and the decoder that all model families share |
//! | [`derivative`] | the gradient ops of each op |
//! | [`passes`] | recompute, parallelism, offload, and checks |
//! | [`formats`] | int8, nf4 and 8-bit optimizer state |
//! | [`workspace`] | temporary memory that kernels need |
//! | [`placement`], [`order`] | the planner's byte offsets, and the waits between queues that follow from them |
//!
//! # Example
//! A linear layer `y[4, 3] = x[4, 2] · Wᵀ` as a Program:
//!
//! ```
//! use plimsoll_core::{Category, DType, WorkKind};
//! use plimsoll_program::builder::{Builder, Product};
//! use plimsoll_program::passes::check::check;
//! use plimsoll_program::workspace::Kernels;
//! use plimsoll_program::{Block, Mode, Operand, Phase, Program, ProgramKind};
//!
//! let mut builder = Builder::new(DType::F32, Kernels::Cpu { threads: 1 });
//! let weight = builder.persistent("weight", &[3, 2], DType::F32, Category::Weight, 1);
//! let x = builder.activation("x", &[4, 2], 1);
//! let y = builder.activation("y", &[4, 3], 1);
//! let [x_at, weight_at, y_at] = [x, weight, y].map(Operand::whole);
//! let linear = builder.product(Product::linear(x_at, weight_at, y_at, 4, 2, 3));
//!
//! let mut set = builder.set;
//! set.programs.push(Program {
//!     work: WorkKind::Forward,
//!     kind: ProgramKind::Forward,
//!     inputs: vec![x],
//!     outputs: vec![y],
//!     blocks: vec![Block::once("linear", vec![linear])],
//! });
//! set.phases.push(Phase { programs: vec![0] });
//! assert_eq!(check(&set), Ok(()));
//!
//! // Each op states what it touches and costs.
//! let (op, _) = set.programs[0].trace().next().unwrap();
//! let accesses = op.accesses(&|id| set.tensor(id).elements());
//! let written = accesses.iter().find(|access| access.operand == y_at).unwrap();
//! assert_eq!((written.mode, written.elements), (Mode::Write, 12));
//! assert_eq!(op.cost().product_flops, 2.0 * 4.0 * 2.0 * 3.0);
//! ```

#![forbid(unsafe_code)]

pub mod builder;
pub mod derivative;
pub mod formats;
pub mod models;
pub mod op;
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
pub use program::{Block, Phase, Program, ProgramKind, ProgramSet};
pub use schedule::{Call, Schedule};
pub use share::Share;
pub use tensor::{Index, Lifetime, Operand, Tensor, TensorId, TensorRole};
