//! Models of all families: configuration, published shapes, weight names, and their Programs in
//! [`decoder`].

pub mod config;
pub mod decoder;
mod family;
mod json;
pub mod presets;
mod rope;
mod supported;
pub mod weights;

pub use config::{ConfigError, Extras, ModelConfig};
pub use family::{Activation, ModelType, QkNorm};
pub use json::TextPart;
pub use presets::{closest_preset, preset, preset_name, preset_names};
pub use rope::{QueryGrowth, RopeScaling};
pub use supported::{CUDA_HEAD_DIM_MAX, Unsupported, check_supported};
pub use weights::{Parameter, Target};
