//! Models of the Llama family: what they are, and the names of their weights.

pub mod config;
pub mod decoder;
mod json;
pub mod presets;
mod supported;
pub mod weights;

pub use config::{ConfigError, ModelConfig, ModelType, RopeScaling};
pub use presets::{closest_preset, of_size, preset, preset_names};
pub use supported::{CUDA_HEAD_DIM_MAX, Unsupported, supported};
pub use weights::{Parameter, Target};
