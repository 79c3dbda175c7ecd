//! [`CudaError`], the failures of a GPU and of NVIDIA's libraries, and their conversion to user-facing failures.

use plimsoll_core::{Bytes, Failure};
use std::borrow::Cow;

/// A failure of a GPU or of an NVIDIA library.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// A library file is missing or cannot be loaded.
    #[error("{library} cannot be loaded: {detail}")]
    Library {
        /// Name or path of the library.
        library: String,
        /// The loader's error.
        detail: String,
    },
    /// A library is too old: it lacks a function.
    #[error("{library} has no `{function}`: it is too old")]
    Function {
        /// Name or path of the library.
        library: String,
        /// Name of the function that the library lacks.
        function: &'static str,
    },
    /// The driver lists no GPU with the requested number.
    #[error("cuda:{ordinal} does not exist: the driver lists {count} GPU(s)")]
    NoDevice {
        /// The requested number, from 0.
        ordinal: u32,
        /// Number of GPUs that the driver lists.
        count: u32,
    },
    /// The driver refuses to open a GPU, because its compute mode reserves it for another process or forbids its use.
    #[error("cuda:{ordinal} ({gpu}) is not available: another process has it, or its compute mode forbids its use")]
    Unavailable {
        /// Number of the GPU, from 0.
        ordinal: u32,
        /// Name of the GPU.
        gpu: String,
    },
    /// The driver refused to allocate the arena: the GPU has too little free memory.
    #[error("the arena exceeds free memory on {gpu} ({requested} > {free}; total {total})")]
    Refused {
        /// Requested size of the arena.
        requested: Bytes,
        /// Name of the GPU.
        gpu: String,
        /// Free memory at that moment.
        free: Bytes,
        /// Total memory of the GPU.
        total: Bytes,
    },
    /// A kernel needs more shared memory per block than this GPU has.
    #[error("{kernel} needs {requested} of shared memory for a block, and {gpu} has {most}")]
    Shared {
        /// Name of the kernel.
        kernel: &'static str,
        /// Shared memory that the kernel needs per block.
        requested: Bytes,
        /// Name of the GPU.
        gpu: String,
        /// Shared memory that the GPU offers per block.
        most: Bytes,
    },
    /// The driver refused memory outside the arena, for example for a module, an event or a pinned buffer.
    #[error("out of memory: cannot {what}")]
    Memory {
        /// The attempted action as an infinitive without "to", such as `start a kernel`.
        what: Cow<'static, str>,
    },
    /// The CUDA context is broken: this process can no longer use the GPU.
    #[error("the GPU is lost: cannot {what}: {name} ({text})")]
    Lost {
        /// The attempted action as an infinitive without "to", such as `start a kernel`.
        what: Cow<'static, str>,
        /// The driver's name of the error.
        name: String,
        /// The driver's description.
        text: String,
    },
    /// An error of the driver that is neither a lack of memory nor the loss of the GPU.
    #[error("the driver refuses to {what}: {name} ({text})")]
    Call {
        /// The attempted action as an infinitive without "to", such as `start a kernel`.
        what: Cow<'static, str>,
        /// The driver's name of the error.
        name: String,
        /// The driver's description.
        text: String,
    },
    /// An error of cuBLASLt.
    #[error("cuBLASLt refuses to {what}: {name}{product}")]
    Product {
        /// The attempted action as an infinitive without "to", such as `start a kernel`.
        what: &'static str,
        /// The library's name of the error.
        name: String,
        /// Description of the matrix product, with a leading space; empty if the error concerns none.
        product: String,
    },
    /// An error of NCCL.
    #[error("NCCL refuses to {what}: {detail}")]
    Nccl {
        /// The attempted action as an infinitive without "to", such as `start a kernel`.
        what: &'static str,
        /// The library's description.
        detail: String,
    },
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Failure {
        let message = error.to_string();
        match error {
            CudaError::Library { .. } => {
                Failure::input(message).hint("run `plimsoll devices` to see which libraries were found, and where")
            }
            CudaError::Function { .. } => {
                Failure::input(message).hint("update the driver: CUDA 12 needs version 525 or newer")
            }
            CudaError::Shared { .. } => {
                Failure::input(message).hint("run on another device: --devices cpu (`plimsoll devices` lists all)")
            }
            CudaError::NoDevice { .. } => Failure::input(message).hint("run `plimsoll devices` to list the GPUs"),
            CudaError::Unavailable { .. } => Failure::input(message)
                .hint("end the other process on the GPU, or run on another one (`nvidia-smi` shows both)")
                .hint("to share the GPU: `nvidia-smi --compute-mode=DEFAULT`, as administrator"),
            CudaError::Refused { .. } | CudaError::Memory { .. } => Failure::does_not_fit(message)
                .hint("set a smaller --budget, or end other processes on the GPU (`nvidia-smi` lists them)"),
            CudaError::Lost { .. } => {
                Failure::stopped(message).hint("`--resume` continues from the newest checkpoint, in a new process")
            }
            CudaError::Nccl { .. } => Failure::stopped(message)
                .hint("`--resume` continues from the newest checkpoint")
                .hint("to exchange through host memory instead: --set run.nccl=false"),
            CudaError::Call { .. } | CudaError::Product { .. } => Failure::bug(message),
        }
    }
}
