//! Limits of the kernels: which models and precisions a device can compute. Limits of models in general are in
//! `config`.

use super::ModelConfig;
use crate::workspace::Kernels;
use plimsoll_core::{DType, Failure};

/// Largest head size of the CUDA kernels. The tiles of attention must fit into 99 KiB, the shared memory that a thread
/// block may have on most GPUs.
pub const CUDA_HEAD_DIM_MAX: u64 = 128;

/// The reason why the kernels of a device cannot compute a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// The model's heads are too large for attention.
    #[error("head size {head_dim} exceeds the limit of attention on NVIDIA GPUs ({max})")]
    HeadDim {
        /// Size of an attention head of the model, in elements.
        head_dim: u64,
        /// Largest supported head size.
        max: u64,
    },
    /// The run's precision is f64, which only CPU kernels support.
    #[error("kernels for NVIDIA GPUs support f32 and bf16, not f64")]
    Precision,
}

impl From<Unsupported> for Failure {
    fn from(error: Unsupported) -> Failure {
        let key = match error {
            Unsupported::HeadDim { .. } => "model",
            Unsupported::Precision => "train.precision",
        };
        Failure::input(format!("{key}: {error}")).hint("run on the CPU: --devices cpu")
    }
}

/// Checks that the kernels of a device (CPU or CUDA) can compute a model in the precision of the run.
///
/// # Errors
/// A head size or precision that these kernels do not support.
pub fn check_supported(config: &ModelConfig, precision: DType, kernels: Kernels) -> Result<(), Unsupported> {
    let (head_dim, max) = (config.head_dim, CUDA_HEAD_DIM_MAX);
    match kernels {
        Kernels::Cuda if head_dim > max => Err(Unsupported::HeadDim { head_dim, max }),
        Kernels::Cuda if precision == DType::F64 => Err(Unsupported::Precision),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{preset, preset_names};

    #[test]
    fn gpu_refuses_large_heads_and_f64() {
        let preset = preset("qwen3-8b").unwrap();
        let wide = ModelConfig { head_dim: 130, ..preset.clone() };
        let refused = check_supported(&wide, DType::F32, Kernels::Cuda).unwrap_err();
        assert_eq!(refused.to_string(), "head size 130 exceeds the limit of attention on NVIDIA GPUs (128)");
        assert_eq!(check_supported(&preset, DType::F64, Kernels::Cuda), Err(Unsupported::Precision));
        assert_eq!(check_supported(&wide, DType::F64, Kernels::Cpu { threads: 2 }), Ok(()));
    }

    #[test]
    fn presets_with_heads_of_256_are_refused_by_gpus_only() {
        let mut refused = Vec::new();
        for name in preset_names() {
            let config = preset(name).unwrap();
            for precision in [DType::F32, DType::Bf16] {
                assert_eq!(check_supported(&config, precision, Kernels::Cpu { threads: 2 }), Ok(()), "{name}");
                refused
                    .extend(check_supported(&config, precision, Kernels::Cuda).err().map(|_| (name, config.head_dim)));
            }
        }
        refused.dedup();
        assert_eq!(refused, [("gemma2-2b", 256), ("gemma2-9b", 256), ("gemma3-270m", 256), ("gemma3-1b", 256)]);
    }
}
