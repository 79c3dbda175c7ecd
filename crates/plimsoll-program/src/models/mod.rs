//! Models of the Llama family: what they are, and the names of their weights.

pub mod config;
pub mod decoder;
mod json;
pub mod presets;
pub mod weights;

pub use config::{ConfigError, ModelConfig, ModelType, RopeScaling};
pub use presets::{closest_preset, preset, preset_names};
pub use weights::Parameter;
