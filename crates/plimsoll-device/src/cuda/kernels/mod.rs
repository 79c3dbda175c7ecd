//! The CUDA C kernels as data: their sources, the units in which they are compiled, and their names. [`launch`]
//! computes grids and arguments. Nothing here needs CUDA; `cargo xtask cuda-check` compiles every unit and runs its
//! arithmetic on the CPU.
//!
//! Activations and the weights multiplied with them are f32 or bf16, the [`Real`] of a unit. All other real numbers are
//! f32: master weights, weight gradients, optimizer state, rstd, attention statistics, token weights, the RoPE table,
//! scalars and workspaces. Metrics are f64.

pub mod launch;
pub mod ops;

use plimsoll_program::formats;
use std::borrow::Cow;

/// Source that precedes every family.
const COMMON_SOURCE: &str = include_str!("common.cuh");
/// Sources that follow it in some families.
const TENSOR_SOURCE: &str = include_str!("tensor.cuh");
const RANDOM_SOURCE: &str = include_str!("random.cuh");
const FORMATS_SOURCE: &str = include_str!("formats.cuh");
/// NVRTC options besides the architecture. No fast math: divisions and roots round as on the CPU.
pub const OPTIONS: [&str; 1] = ["--std=c++17"];
/// The largest head dimension that attention supports.
pub const HEAD_DIM_MAX: u64 = plimsoll_program::models::CUDA_HEAD_DIM_MAX;

/// Data type of activations and of the weights multiplied with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Real {
    /// 32-bit float.
    F32,
    /// bfloat16.
    Bf16,
}

/// A source file with its kernels.
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
    SwiGlu,
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
        Family::SwiGlu,
        Family::TensorAttention,
    ];

    /// Returns the file name without extension, the source, and the kernels in it.
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
                &["add", "add_rows", "sum_rows", "add_partials", "pick_row"],
            ),
            Family::Embed => {
                ("embed", include_str!("embed.cu"), &["embed", "embed_order", "embed_grad", "embed_grad_join"])
            }
            Family::HeadNorm => ("head_norm", include_str!("head_norm.cu"), &["head_norm", "head_norm_grad"]),
            Family::Init => ("init", include_str!("init.cu"), &["init_normal", "init_uniform"]),
            Family::Norm => ("norm", include_str!("norm.cu"), &["rms_norm", "rms_norm_grad"]),
            Family::Optimizer => (
                "optimizer",
                include_str!("optimizer.cu"),
                &["adamw", "adamw8", "sgd", "squared_norm", "squared_norm_sum", "clip_factor"],
            ),
            Family::Rope => ("rope", include_str!("rope.cu"), &["rope", "rope_table"]),
            Family::SwiGlu => ("swiglu", include_str!("swiglu.cu"), &["swiglu", "swiglu_grad"]),
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

    /// Returns the sources between the common part and the family's source, with the file names for compiler messages.
    fn shared_sources(self) -> Vec<(&'static str, Cow<'static, str>)> {
        let formats = || vec![("formats.rs", Cow::Owned(format_tables())), ("formats.cuh", FORMATS_SOURCE.into())];
        match self {
            Family::TensorAttention => vec![("tensor.cuh", TENSOR_SOURCE.into())],
            Family::Dropout | Family::Init => vec![("random.cuh", RANDOM_SOURCE.into())],
            Family::Quantized | Family::Optimizer => formats(),
            _ => Vec::new(),
        }
    }

    /// Whether the kernels depend on the data type of activations.
    fn has_real(self) -> bool {
        !matches!(self, Family::Cast | Family::Collective | Family::Init | Family::Optimizer | Family::TensorAttention)
    }

    /// Whether the kernels depend on the head dimension.
    fn has_head_dim(self) -> bool {
        matches!(self, Family::Attention | Family::TensorAttention)
    }

    /// Whether there are kernels for this head dimension. Tensor cores need a multiple of 16.
    pub fn supports_head_dim(self, head_dim: u64) -> bool {
        match self {
            Family::Attention => head_dim <= HEAD_DIM_MAX,
            Family::TensorAttention => head_dim <= HEAD_DIM_MAX && head_dim.is_multiple_of(16),
            _ => true,
        }
    }
}

/// A translation unit, compiled and loaded as one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Unit {
    family: Family,
    real: Option<Real>,
    head_dim: Option<u64>,
}

impl Unit {
    /// Creates the unit with a family's kernels. Data type and head dimension are dropped if the family does not depend
    /// on them.
    pub fn new(family: Family, real: Real, head_dim: u64) -> Unit {
        Unit { family, real: family.has_real().then_some(real), head_dim: family.has_head_dim().then_some(head_dim) }
    }

    /// Returns every unit of all families for these head dimensions, each once.
    pub fn all(head_dims: &[u64]) -> Vec<Unit> {
        let mut units = Vec::new();
        for family in Family::ALL {
            for real in [Real::F32, Real::Bf16] {
                let taken = head_dims.iter().filter(|&&head_dim| family.supports_head_dim(head_dim));
                units.extend(taken.map(|&head_dim| Unit::new(family, real, head_dim)));
            }
        }
        units.sort();
        units.dedup();
        units
    }

    /// Returns the family.
    pub fn family(self) -> Family {
        self.family
    }

    /// Returns a unique name: `norm-bf16`, `attention-f32-128`.
    pub fn name(self) -> String {
        let real = self.real.map_or("", |real| if real == Real::F32 { "-f32" } else { "-bf16" });
        let head_dim = self.head_dim.map_or(String::new(), |head_dim| format!("-{head_dim}"));
        format!("{}{real}{head_dim}", self.family.source_entry().0)
    }

    /// Returns the complete source. It includes no header, and compiler messages name the files of this crate.
    pub fn source(self) -> String {
        let (name, source, _) = self.family.source_entry();
        let real = self.real.map_or("", |real| match real {
            Real::F32 => "#define REAL float\n",
            Real::Bf16 => "#define REAL bf16\n",
        });
        let head_dim = self.head_dim.map_or(String::new(), |head_dim| format!("#define HEAD_DIM {head_dim}\n"));
        let file = |name: &str, text: &str| format!("#line 1 \"{name}\"\n{text}");
        let shared: String = self.family.shared_sources().iter().map(|(name, text)| file(name, text)).collect();
        format!("{real}{head_dim}{}{shared}{}", file("common.cuh", COMMON_SOURCE), file(&format!("{name}.cu"), source))
    }
}

/// Returns the tables of the quantized formats, with numbers as bit patterns; `formats.cuh` uses them.
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

/// Orders ascending numbers (one less than a power of two) by tree level: the middle one, then the middles of the
/// halves, and so on.
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
