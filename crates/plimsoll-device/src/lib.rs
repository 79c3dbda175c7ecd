//! Devices that execute Programs: the CPU, simulated devices, and NVIDIA GPUs.
//!
//! A plan consists of Programs (from `plimsoll-program`) and a placement of their tensors (from `plimsoll-plan`). A
//! device allocates the arenas of the plan once, when it is opened, and then runs Programs in them. This crate is the
//! only one with `unsafe` code; it knows nothing of the planner.
//!
//! Each module uses only modules of rows above it, and modules that precede it in its own row:
//!
//! | layer | modules |
//! |---|---|
//! | system | [`process`] and [`heap`] (memory of this process), [`probe`] (processor, memory, temperature) |
//! | files | [`regular_file`] (reading), [`private_file`] (caches, logs, temporary folders) |
//! | allocation | [`arena`] (one allocation between guard pages), [`error`] (failures of all devices) |
//! | communication | [`transport`] (groups of devices in one process or in several) |
//! | interface | [`device`] (trait [`Device`](device::Device), observers) |
//! | memory spaces | `scratch_file`, [`spaces`] (device arena, host arena and scratch file of a device) |
//! | executors | [`cpu`], then [`virtual_device`] (simulated accelerator on the CPU) and [`cuda`] |
//! | opening of GPUs | [`cache`] (charges and algorithms of earlier runs), [`gpu`] |
//! | measurement | [`machine`] (all devices), [`bench`](mod@bench) and [`disk`] (speed), [`calibration`] (cached rates) |
//!
//! # Example
//!
//! A Program with a single op, run on the CPU:
//!
//! ```
//! use plimsoll_core::{Category, DType, Space, WorkKind};
//! use plimsoll_device::cpu::executor;
//! use plimsoll_program::{Block, Lifetime, OpKind, Operand, Placement, Program, ProgramKind, ProgramSet, Tensor, TensorId};
//!
//! let tensor = Tensor {
//!     name: "x".into(),
//!     shape: vec![4],
//!     dtype: DType::F32,
//!     space: Space::Device,
//!     category: Category::Weight,
//!     lifetime: Lifetime::Persistent,
//!     slots: 1,
//! };
//! let fill = OpKind::Fill { into: Operand::whole(TensorId(0)), value: 1.5, elements: 4 };
//! let kind = ProgramKind::Probe(0);
//! let blocks = vec![Block::once("all", vec![fill.into()])];
//! let program = Program { work: WorkKind::Forward, kind, inputs: vec![], outputs: vec![], blocks };
//! let set = ProgramSet { tensors: vec![tensor], programs: vec![program], phases: vec![] };
//! let placement = Placement { offsets: vec![vec![Some(0)]], arena_bytes: 16, ..Placement::default() };
//!
//! let mut device = executor::open(set, placement, DType::F32, 1, None)?;
//! device.run(kind)?;
//! let mut bytes = [0; 16];
//! device.read(TensorId(0), 0, &mut bytes);
//! assert_eq!(executor::real_values(DType::F32, &bytes), [1.5; 4]);
//! # Ok::<(), plimsoll_device::error::DeviceError>(())
//! ```

pub mod arena;
pub mod bench;
pub mod cache;
pub mod calibration;
pub mod cpu;
pub mod cuda;
pub mod device;
pub mod disk;
pub mod error;
pub mod gpu;
pub mod heap;
pub mod machine;
pub mod private_file;
pub mod probe;
pub mod process;
pub mod regular_file;
mod scratch_file;
pub mod spaces;
pub mod transport;
pub mod virtual_device;
