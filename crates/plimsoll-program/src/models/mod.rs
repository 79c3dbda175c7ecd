//! Models of the Llama, Mistral and Qwen families: configuration, published shapes, weight names, and their Programs in
//! [`decoder`].

pub mod config;
pub mod decoder;
mod json;
pub mod presets;
mod supported;
pub mod weights;

pub use config::{ConfigError, ModelConfig, ModelType, RopeScaling};
pub use presets::{closest_preset, preset, preset_name, preset_names};
pub use supported::{CUDA_HEAD_DIM_MAX, Unsupported, check_supported};
pub use weights::{Parameter, Target};
