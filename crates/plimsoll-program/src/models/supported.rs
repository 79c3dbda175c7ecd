//! Which models the kernels of a target can compute. What a model may be at all is in `config`.

use super::ModelConfig;
use crate::workspace::Kernels;
use plimsoll_core::{DType, Failure};

/// The largest head of the CUDA kernels: the tiles of attention must fit into the 99 KiB of shared memory
/// that a block may have on most GPUs.
pub const CUDA_HEAD_DIM_MAX: u64 = 128;

/// A model that these kernels cannot compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// Heads that attention has no room for.
    #[error("heads of {head_dim} elements: attention on NVIDIA GPUs takes at most {most}")]
    HeadDim {
        /// Elements of the model's heads.
        head_dim: u64,
        /// The most that there is room for.
        most: u64,
    },
    /// f64 is for processors.
    #[error("kernels for NVIDIA GPUs compute in f32 and bf16, not in f64")]
    Precision,
}

impl From<Unsupported> for Failure {
    fn from(error: Unsupported) -> Failure {
        let key = match error {
            Unsupported::HeadDim { .. } => "model",
            Unsupported::Precision => "train.precision",
        };
        Failure::input(format!("{key}: {error}")).hint("run it on the cpu: --devices cpu")
    }
}

/// That a target's kernels can compute a model in a precision.
///
/// # Errors
/// What stands in the way.
pub fn supported(config: &ModelConfig, precision: DType, kernels: Kernels) -> Result<(), Unsupported> {
    let (head_dim, most) = (config.head_dim, CUDA_HEAD_DIM_MAX);
    match kernels {
        Kernels::Cuda if head_dim > most => Err(Unsupported::HeadDim { head_dim, most }),
        Kernels::Cuda if precision == DType::F64 => Err(Unsupported::Precision),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{preset, preset_names};

    #[test]
    fn heads_beyond_the_tiles_of_a_gpu_and_f64_are_refused_there_and_nowhere_else() {
        let preset = preset("qwen3-8b").unwrap();
        let wide = ModelConfig { head_dim: 130, ..preset.clone() };
        let refused = supported(&wide, DType::F32, Kernels::Cuda).unwrap_err();
        assert_eq!(refused.to_string(), "heads of 130 elements: attention on NVIDIA GPUs takes at most 128");
        assert_eq!(supported(&preset, DType::F64, Kernels::Cuda), Err(Unsupported::Precision));
        assert_eq!(supported(&wide, DType::F64, Kernels::Cpu { threads: 2 }), Ok(()));
    }

    #[test]
    fn every_preset_runs_everywhere() {
        for name in preset_names() {
            for kernels in [Kernels::Cuda, Kernels::Cpu { threads: 2 }] {
                for precision in [DType::F32, DType::Bf16] {
                    assert_eq!(supported(&preset(name).unwrap(), precision, kernels), Ok(()), "{name}");
                }
            }
        }
    }
}
