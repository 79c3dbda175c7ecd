//! File types: the choice of an element type for each tensor, as llama.cpp makes it.
//!
//! Vectors (norms, biases) stay f32. The head, or an embedding that serves as the head, gets at least 6 bits. The mixes
//! `q4_k_m` and `q5_k_m` give 6 bits to the value and down projections of half of the layers: the first eighth, the last
//! eighth, and every third layer between.

use crate::block_types::BlockType;
use plimsoll_program::models::{ModelConfig, ModelType, Parameter, Target};
use std::fmt;

/// The type of a GGUF file, which decides the type of each tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileType {
    /// Matrices in f32.
    F32,
    /// Matrices in f16.
    F16,
    /// Matrices in bf16.
    Bf16,
    /// Matrices in `q8_0`.
    Q8_0,
    /// Matrices in `q4_0`, the head in `q6_k`.
    Q4_0,
    /// Matrices in `q4_k`, some in `q6_k`.
    Q4KM,
    /// Matrices in `q5_k`, some in `q6_k`.
    Q5KM,
    /// Matrices in `q6_k`.
    Q6K,
}

/// The type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChosenType {
    /// Type of the tensor in the file.
    pub block_type: BlockType,
    /// Type that the file type asks for, if its blocks do not divide the tensor's columns; otherwise `None`.
    pub replaced: Option<BlockType>,
}

impl FileType {
    /// All file types, from the largest to the smallest.
    pub const ALL: [FileType; 8] = [
        FileType::F32,
        FileType::Bf16,
        FileType::F16,
        FileType::Q8_0,
        FileType::Q6K,
        FileType::Q5KM,
        FileType::Q4KM,
        FileType::Q4_0,
    ];

    /// Returns the name of the file type, such as `q4_k_m`.
    pub const fn name(self) -> &'static str {
        match self {
            FileType::F32 => "f32",
            FileType::F16 => "f16",
            FileType::Bf16 => "bf16",
            FileType::Q8_0 => "q8_0",
            FileType::Q4_0 => "q4_0",
            FileType::Q4KM => "q4_k_m",
            FileType::Q5KM => "q5_k_m",
            FileType::Q6K => "q6_k",
        }
    }

    /// Returns the file type with a name, in any case, and `None` if there is none.
    pub fn named(name: &str) -> Option<FileType> {
        FileType::ALL.into_iter().find(|file_type| file_type.name().eq_ignore_ascii_case(name))
    }

    /// Returns the value of the key `general.file_type`.
    pub const fn id(self) -> u32 {
        match self {
            FileType::F32 => 0,
            FileType::F16 => 1,
            FileType::Q4_0 => 2,
            FileType::Q8_0 => 7,
            FileType::Q4KM => 15,
            FileType::Q5KM => 17,
            FileType::Q6K => 18,
            FileType::Bf16 => 32,
        }
    }

    /// Returns the type of most matrices.
    const fn default_block(self) -> BlockType {
        match self {
            FileType::F32 => BlockType::F32,
            FileType::F16 => BlockType::F16,
            FileType::Bf16 => BlockType::Bf16,
            FileType::Q8_0 => BlockType::Q8_0,
            FileType::Q4_0 => BlockType::Q4_0,
            FileType::Q4KM => BlockType::Q4K,
            FileType::Q5KM => BlockType::Q5K,
            FileType::Q6K => BlockType::Q6K,
        }
    }

    /// Returns the type of a parameter in a file of this type.
    pub fn choose(self, config: &ModelConfig, parameter: &Parameter) -> ChosenType {
        let [_, columns] = parameter.shape[..] else {
            return ChosenType { block_type: BlockType::F32, replaced: None };
        };
        let wanted = self.wanted(config, parameter);
        let block_type = fitting_type(wanted, columns);
        ChosenType { block_type, replaced: (block_type != wanted).then_some(wanted) }
    }

    /// Returns the type of a matrix, regardless of its columns.
    fn wanted(self, config: &ModelConfig, parameter: &Parameter) -> BlockType {
        let block_type = self.default_block();
        if matches!(self, FileType::F32 | FileType::F16 | FileType::Bf16 | FileType::Q8_0) {
            return block_type;
        }
        let is_head = parameter.tensor == "head" || config.tied && parameter.tensor == "embedding";
        if is_head {
            return BlockType::Q6K;
        }
        let is_mix = matches!(self, FileType::Q4KM | FileType::Q5KM);
        let is_sensitive = matches!(parameter.target, Some(Target::V | Target::Down));
        match parameter.layer {
            Some(layer) if is_mix && is_sensitive && gets_more_bits(layer, config.layers) => BlockType::Q6K,
            // With 8 query heads to a value head, the value projection is small.
            _ if parameter.target == Some(Target::V) && block_type == BlockType::Q4K && is_70b(config) => {
                BlockType::Q5K
            }
            // The value projection is a part of the fused one.
            _ if parameter.target == Some(Target::Qkv) && self == FileType::Q4KM => BlockType::Q5K,
            _ if parameter.target == Some(Target::Qkv) && self == FileType::Q5KM => BlockType::Q6K,
            _ => block_type,
        }
    }
}

/// Returns whether the mixes give more bits to the value and down projections of a layer.
fn gets_more_bits(layer: u64, layers: u64) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

/// Returns whether llama.cpp counts a model among those with 70 billion parameters.
fn is_70b(config: &ModelConfig) -> bool {
    let has_groups = config.heads != config.kv_heads;
    config.layers == 80
        && (config.model_type == ModelType::Qwen2 || config.model_type != ModelType::Qwen3 && has_groups)
}

/// Returns the type itself if its blocks divide the columns; else a type of about the same error with smaller blocks,
/// and f16 for columns that are no multiple of 32.
fn fitting_type(wanted: BlockType, columns: u64) -> BlockType {
    let smaller = match wanted {
        BlockType::Q4K => BlockType::Q5_0,
        BlockType::Q5K => BlockType::Q5_1,
        BlockType::Q6K => BlockType::Q8_0,
        other => other,
    };
    let fits = |block_type: &BlockType| columns.is_multiple_of(block_type.elements());
    [wanted, smaller].into_iter().find(fits).unwrap_or(BlockType::F16)
}

impl fmt::Display for FileType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_program::models::preset;
    use std::collections::BTreeMap;

    fn chosen(config: &ModelConfig, file_type: FileType) -> BTreeMap<String, ChosenType> {
        let parameters = config.hf_parameters().into_iter();
        parameters.map(|parameter| (parameter.hf_name.clone(), file_type.choose(config, &parameter))).collect()
    }

    #[test]
    fn mixes_give_six_bits_to_half_of_the_layers() {
        let config = preset("llama-3.1-8b").unwrap();
        for (file_type, usual) in [(FileType::Q4KM, BlockType::Q4K), (FileType::Q5KM, BlockType::Q5K)] {
            let types = chosen(&config, file_type);
            assert_eq!(types["lm_head.weight"].block_type, BlockType::Q6K);
            assert_eq!(types["model.embed_tokens.weight"].block_type, usual);
            assert_eq!(types["model.layers.3.self_attn.q_proj.weight"].block_type, usual);
            assert_eq!(types["model.layers.3.input_layernorm.weight"].block_type, BlockType::F32);
            for name in ["self_attn.v_proj", "mlp.down_proj"] {
                let six_bits =
                    |layer: &u64| types[&format!("model.layers.{layer}.{name}.weight")].block_type == BlockType::Q6K;
                let layers: Vec<u64> = (0..32).filter(six_bits).collect();
                assert_eq!(layers, [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]);
            }
        }
    }

    #[test]
    fn fused_projections_have_more_bits_in_mixes() {
        let config = ModelConfig { model_type: ModelType::Phi3, ..preset("llama-3.1-8b").unwrap() };
        let fused = |file_type| chosen(&config, file_type)["model.layers.3.self_attn.qkv_proj.weight"].block_type;
        let types = [FileType::Q4KM, FileType::Q5KM, FileType::Q6K, FileType::Q4_0].map(fused);
        assert_eq!(types, [BlockType::Q5K, BlockType::Q6K, BlockType::Q6K, BlockType::Q4_0]);
    }

    #[test]
    fn embedding_of_tied_model_has_type_of_head() {
        let config = preset("llama-3.2-1b").unwrap();
        assert!(config.tied);
        for file_type in [FileType::Q4_0, FileType::Q4KM, FileType::Q6K] {
            assert_eq!(chosen(&config, file_type)["model.embed_tokens.weight"].block_type, BlockType::Q6K);
        }
        assert_eq!(chosen(&config, FileType::Q8_0)["model.embed_tokens.weight"].block_type, BlockType::Q8_0);
    }

    #[test]
    fn columns_between_blocks_get_smaller_blocks() {
        // Rows of 896 columns are no multiple of 256; those of the down projection have 4864.
        let config = preset("qwen2.5-0.5b").unwrap();
        let types = chosen(&config, FileType::Q4KM);
        let query = types["model.layers.0.self_attn.q_proj.weight"];
        assert_eq!(query, ChosenType { block_type: BlockType::Q5_0, replaced: Some(BlockType::Q4K) });
        assert_eq!(types["model.layers.5.mlp.down_proj.weight"].replaced, None);
        assert_eq!(types["model.embed_tokens.weight"].block_type, BlockType::Q8_0);
        assert_eq!(fitting_type(BlockType::Q5K, 32), BlockType::Q5_1);
        assert_eq!(fitting_type(BlockType::Q4_0, 20), BlockType::F16);
        assert_eq!(fitting_type(BlockType::Q6K, 20), BlockType::F16);
    }

    #[test]
    fn names_are_found_in_any_case() {
        assert_eq!(FileType::named("Q4_K_M"), Some(FileType::Q4KM));
        assert_eq!(FileType::named("q3_k"), None);
    }
}
