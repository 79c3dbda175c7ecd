//! The CUDA C kernels as data: their sources, the units in which they are compiled, and their names. [`launch`]
//! computes grids and arguments. Nothing here needs CUDA; `cargo xtask cuda-check` compiles every unit and runs its
//! arithmetic on the CPU.
//!
//! Activations and the weights multiplied with them are f32 or bf16, the [`Real`] of a unit. All other real numbers are
//! f32: master weights, weight gradients, optimizer state, rstd, attention statistics, token weights, the RoPE table,
//! scalars and workspaces. Metrics are f64.

pub mod launch;
pub mod ops;
mod tiles;

pub use tiles::{Target, Tiles};

use plimsoll_program::formats;
use std::borrow::Cow;

/// CUDA source that precedes the source of every family of kernels.
const COMMON_SOURCE: &str = include_str!("common.cuh");
/// CUDA source for tensor cores, which precedes the source of `Family::TensorAttention`.
const TENSOR_SOURCE: &str = include_str!("tensor.cuh");
const RANDOM_SOURCE: &str = include_str!("random.cuh");
const FORMATS_SOURCE: &str = include_str!("formats.cuh");
/// NVRTC options besides the architecture. Fast math is off, so that divisions and roots round as on the CPU.
pub const OPTIONS: [&str; 1] = ["--std=c++17"];
/// The cap of attention scores in published models (Gemma 2).
const PUBLISHED_SOFTCAP: f64 = 50.0;
/// The largest head dimension that the attention kernels support.
pub const HEAD_DIM_MAX: u64 = plimsoll_program::models::CUDA_HEAD_DIM_MAX;

/// Data type of activations, and of the weights with which they are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Real {
    /// 32-bit float.
    F32,
    /// bfloat16.
    Bf16,
}

/// A CUDA source file (`.cu`) with its kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "named after the ops, as the files are")]
pub enum Family {
    Attention,
    Cast,
    Quantized,
    Collective,
    CrossEntropy,
    Dropout,
    Elementwise,
    Embed,
    HeadNorm,
    Init,
    Norm,
    Optimizer,
    Rope,
    Glu,
    TensorAttention,
}

impl Family {
    /// Every family.
    pub const ALL: [Family; 15] = [
        Family::Attention,
        Family::Cast,
        Family::Quantized,
        Family::Collective,
        Family::CrossEntropy,
        Family::Dropout,
        Family::Elementwise,
        Family::Embed,
        Family::HeadNorm,
        Family::Init,
        Family::Norm,
        Family::Optimizer,
        Family::Rope,
        Family::Glu,
        Family::TensorAttention,
    ];

    /// Returns the name of the family's file without extension, its source, and the names of the kernels in it.
    fn source_entry(self) -> (&'static str, &'static str, &'static [&'static str]) {
        match self {
            Family::Attention => (
                "attention",
                include_str!("attention.cu"),
                &[
                    "attention",
                    "cached_attention",
                    "cached_attention_part",
                    "cached_attention_join",
                    "append_cache",
                    "copy_cache",
                    "attention_delta",
                    "attention_grad_queries",
                    "attention_grad_keys",
                ],
            ),
            Family::Cast => (
                "cast",
                include_str!("cast.cu"),
                &[
                    "cast_f32_bf16",
                    "cast_bf16_f32",
                    "cast_f32_f16",
                    "cast_f16_f32",
                    "cast_f32_f64",
                    "cast_f64_f32",
                    "cast_bf16_f16",
                    "cast_f16_bf16",
                    "cast_bf16_f64",
                    "cast_f64_bf16",
                    "fill_f32",
                    "fill_f64",
                    "fill_bf16",
                    "fill_u8",
                ],
            ),
            Family::Quantized => (
                "quantized",
                include_str!("quantized.cu"),
                &["dequantize_nf4", "dequantize_int8", "quantize_int8", "quantize_nf4"],
            ),
            Family::Collective => ("collective", include_str!("collective.cu"), &["sum_ranks_f32", "sum_ranks_f64"]),
            Family::CrossEntropy => {
                ("cross_entropy", include_str!("cross_entropy.cu"), &["softmax_stats", "cross_entropy", "softmax_grad"])
            }
            Family::Dropout => ("dropout", include_str!("dropout.cu"), &["dropout"]),
            Family::Elementwise => (
                "elementwise",
                include_str!("elementwise.cu"),
                &["add", "soft_cap", "add_rows", "sum_rows", "add_partials", "pick_row"],
            ),
            Family::Embed => {
                ("embed", include_str!("embed.cu"), &["embed", "embed_order", "embed_grad", "embed_grad_join"])
            }
            Family::HeadNorm => ("head_norm", include_str!("head_norm.cu"), &["head_norm", "head_norm_grad"]),
            Family::Init => ("init", include_str!("init.cu"), &["init_normal", "init_uniform"]),
            Family::Norm => (
                "norm",
                include_str!("norm.cu"),
                &["rms_norm", "rms_norm_grad", "all_heads_norm", "all_heads_norm_grad"],
            ),
            Family::Optimizer => (
                "optimizer",
                include_str!("optimizer.cu"),
                &["adamw", "adamw8", "sgd", "squared_norm", "squared_norm_sum", "clip_factor"],
            ),
            Family::Rope => ("rope", include_str!("rope.cu"), &["rope", "rope_table", "shift_positions"]),
            Family::Glu => ("glu", include_str!("glu.cu"), &["glu", "glu_grad"]),
            Family::TensorAttention => (
                "attention_tensor",
                include_str!("attention_tensor.cu"),
                &[
                    "tensor_attention",
                    "tensor_cached_attention",
                    "tensor_attention_grad_queries",
                    "tensor_attention_grad_keys",
                ],
            ),
        }
    }

    /// Returns the names of the family's kernels.
    pub fn kernels(self) -> &'static [&'static str] {
        self.source_entry().2
    }

    /// Returns the sources to be placed between the common source and the family's own source. Each is a file name, for
    /// compiler messages, with its text.
    fn shared_sources(self) -> Vec<(&'static str, Cow<'static, str>)> {
        let formats = || vec![("formats.rs", Cow::Owned(format_tables())), ("formats.cuh", FORMATS_SOURCE.into())];
        match self {
            Family::TensorAttention => vec![("tensor.cuh", TENSOR_SOURCE.into())],
            Family::Dropout | Family::Init => vec![("random.cuh", RANDOM_SOURCE.into())],
            Family::Quantized | Family::Optimizer => formats(),
            _ => Vec::new(),
        }
    }

    /// Returns whether the source is compiled once for each data type of activations.
    fn has_real(self) -> bool {
        !matches!(self, Family::Cast | Family::Collective | Family::Init | Family::Optimizer | Family::TensorAttention)
    }

    /// Returns whether the source is compiled once for each head dimension.
    fn has_head_dim(self) -> bool {
        matches!(self, Family::Attention | Family::TensorAttention)
    }

    /// Returns whether the family's kernels support a head dimension; always true if they do not depend on it. Kernels
    /// for tensor cores need a multiple of 16.
    pub fn supports_head_dim(self, head_dim: u64) -> bool {
        match self {
            Family::Attention => head_dim <= HEAD_DIM_MAX,
            Family::TensorAttention => head_dim <= HEAD_DIM_MAX && head_dim.is_multiple_of(16),
            _ => true,
        }
    }
}

/// A translation unit: a family's source for one data type and head dimension. It is compiled and loaded as one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Unit {
    family: Family,
    real: Option<Real>,
    head_dim: Option<u64>,
    /// Tile sizes of attention on tensor cores.
    tiles: Option<Tiles>,
    /// Bits of the soft cap of attention scores, an f32 number.
    softcap: Option<u32>,
}

impl Unit {
    /// Creates the unit of a family's kernels for activations of type `real` and heads of `head_dim` elements. Ignores
    /// either of them if the kernels do not depend on it. Attention on tensor cores has its own function.
    pub fn new(family: Family, real: Real, head_dim: u64) -> Unit {
        debug_assert_ne!(family, Family::TensorAttention);
        let (real, head_dim) = (family.has_real().then_some(real), family.has_head_dim().then_some(head_dim));
        Unit { family, real, head_dim, tiles: None, softcap: None }
    }

    /// Creates the unit of the attention kernels for tensor cores, for heads of `head_dim` elements and these tiles.
    pub fn tensor_attention(head_dim: u64, tiles: Tiles) -> Unit {
        let (head_dim, tiles) = (Some(head_dim), Some(tiles));
        Unit { family: Family::TensorAttention, real: None, head_dim, tiles, softcap: None }
    }

    /// Creates the unit of the attention kernels without tensor cores. They limit scores to ±`softcap`, if it is given.
    pub fn attention(real: Real, head_dim: u64, softcap: Option<f64>) -> Unit {
        let softcap = softcap.map(|cap| (cap as f32).to_bits());
        Unit { softcap, ..Unit::new(Family::Attention, real, head_dim) }
    }

    /// Returns every unit of all families for f32, bf16 and these head dimensions on `target`, each unit once. Attention
    /// also comes with the cap of published models.
    pub fn all(head_dims: &[u64], target: Target) -> Vec<Unit> {
        let mut units = Vec::new();
        for family in Family::ALL {
            for real in [Real::F32, Real::Bf16] {
                let taken = head_dims.iter().copied().filter(|head_dim| family.supports_head_dim(*head_dim));
                if family == Family::Attention {
                    units
                        .extend(taken.clone().map(|head_dim| Unit::attention(real, head_dim, Some(PUBLISHED_SOFTCAP))));
                }
                units.extend(taken.map(|head_dim| match family {
                    Family::TensorAttention => Unit::tensor_attention(head_dim, Tiles::new(head_dim, target)),
                    _ => Unit::new(family, real, head_dim),
                }));
            }
        }
        units.sort();
        units.dedup();
        units
    }

    /// Returns the family whose kernels the unit contains.
    pub fn family(self) -> Family {
        self.family
    }

    /// Returns a name that no other unit has, such as `optimizer`, `norm-bf16` or `attention-f32-128`.
    pub fn name(self) -> String {
        let real = self.real.map_or("", |real| if real == Real::F32 { "-f32" } else { "-bf16" });
        let head_dim = self.head_dim.map_or(String::new(), |head_dim| format!("-{head_dim}"));
        let softcap = self.softcap.map_or(String::new(), |bits| format!("-softcap-{}", f32::from_bits(bits)));
        format!("{}{real}{head_dim}{softcap}", self.family.source_entry().0)
    }

    /// Returns the complete CUDA source of the unit, which includes no header. Compiler messages about it name the
    /// files of this crate.
    pub fn source(self) -> String {
        let (name, source, _) = self.family.source_entry();
        let real = self.real.map_or("", |real| match real {
            Real::F32 => "#define REAL float\n",
            Real::Bf16 => "#define REAL bf16\n",
        });
        let head_dim = self.head_dim.map_or(String::new(), |head_dim| format!("#define HEAD_DIM {head_dim}\n"));
        let tiles = self.tiles.map_or(String::new(), Tiles::defines);
        let cap = |bits: u32| format!("#define SOFTCAP {:?}f\n", f32::from_bits(bits));
        let softcap = self.softcap.map_or(String::new(), cap);
        let file = |name: &str, text: &str| format!("#line 1 \"{name}\"\n{text}");
        let shared: String = self.family.shared_sources().iter().map(|(name, text)| file(name, text)).collect();
        format!(
            "{real}{head_dim}{tiles}{softcap}{}{shared}{}",
            file("common.cuh", COMMON_SOURCE),
            file(&format!("{name}.cu"), source)
        )
    }
}

/// Returns CUDA source with the tables of the quantized formats, which `formats.cuh` uses. Numbers are written as bit
/// patterns.
fn format_tables() -> String {
    let table = |name: &str, values: &[f32]| {
        let bits: Vec<String> = values.iter().map(|value| format!("0x{:08x}u", value.to_bits())).collect();
        format!("__device__ const unsigned int {name}[{}] = {{{}}};\n", values.len(), bits.join(", "))
    };
    let thresholds = |signed| level_order(formats::dynamic_thresholds(signed));
    [
        table("SIGNED_MAP", formats::dynamic_map(true)),
        table("UNSIGNED_MAP", formats::dynamic_map(false)),
        table("SIGNED_TREE", &thresholds(true)),
        table("UNSIGNED_TREE", &thresholds(false)),
        table("NF4_VALUES", &formats::NF4),
        table("NF4_THRESHOLDS", formats::nf4_thresholds()),
    ]
    .concat()
}

/// Orders ascending numbers as the levels of a binary search tree: the middle one, then the middles of the two halves,
/// and so on. Their count must be one less than a power of two.
fn level_order(ascending: &[f32]) -> Vec<f32> {
    let (count, mut levels) = (ascending.len() + 1, Vec::with_capacity(ascending.len()));
    assert!(count.is_power_of_two());
    let mut step = count;
    while step > 1 {
        levels.extend((step / 2..count).step_by(step).map(|at| ascending[at - 1]));
        step /= 2;
    }
    levels
}

#[cfg(test)]
mod tests;
