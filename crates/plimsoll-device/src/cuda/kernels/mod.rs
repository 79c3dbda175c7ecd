//! The CUDA C kernels as data: their sources, how these become units that are compiled, and what is
//! in them. How each kernel is launched is in [`launch`]. Nothing here needs CUDA; `cargo xtask
//! cuda-check` compiles every unit and runs its arithmetic on the CPU.
//!
//! Activations and the weights that meet them are f32 or bf16, the [`Real`] of a unit. Everything else
//! that is real is f32 in both: master weights and gradients of weights, the optimizer's state, rstd,
//! attention's statistics, token weights, the RoPE table, scalars and scratch. Metrics are f64.

pub mod launch;
pub mod ops;

use plimsoll_program::formats;
use std::borrow::Cow;

/// What stands before every family's source.
const COMMON: &str = include_str!("common.cuh");
/// What stands between that and the source of some families.
const TENSOR: &str = include_str!("tensor.cuh");
const RANDOM: &str = include_str!("random.cuh");
const FORMATS: &str = include_str!("formats.cuh");
/// What NVRTC is told beside the architecture. No fast math: divisions and roots round as the CPU's do.
pub const OPTIONS: [&str; 1] = ["--std=c++17"];
/// The largest head that attention is compiled for.
pub const HEAD_DIM_MAX: u64 = plimsoll_program::models::CUDA_HEAD_DIM_MAX;

/// The type of activations, and of the weights that meet them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Real {
    /// 32-bit float.
    F32,
    /// bfloat16.
    Bf16,
}

/// Kernels of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "named after the ops, as the files are")]
pub enum Family {
    Attention,
    Cast,
    Coarse,
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
    /// All of them.
    pub const ALL: [Family; 15] = [
        Family::Attention,
        Family::Cast,
        Family::Coarse,
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

    /// The file's name without its extension, the file, and the kernels in it.
    fn row(self) -> (&'static str, &'static str, &'static [&'static str]) {
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
            Family::Coarse => (
                "coarse",
                include_str!("coarse.cu"),
                &["dequantise_nf4", "dequantise_int8", "quantise_int8", "quantise_nf4"],
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

    /// The names of the kernels in it.
    pub fn kernels(self) -> &'static [&'static str] {
        self.row().2
    }

    /// What stands between the common part and its source, each with the name that a compiler calls it by.
    fn shared(self) -> Vec<(&'static str, Cow<'static, str>)> {
        let formats = || vec![("formats.rs", Cow::Owned(tables())), ("formats.cuh", FORMATS.into())];
        match self {
            Family::TensorAttention => vec![("tensor.cuh", TENSOR.into())],
            Family::Dropout | Family::Init => vec![("random.cuh", RANDOM.into())],
            Family::Coarse | Family::Optimizer => formats(),
            _ => Vec::new(),
        }
    }

    /// Whether its kernels depend on the type of activations.
    fn has_real(self) -> bool {
        !matches!(self, Family::Cast | Family::Collective | Family::Init | Family::Optimizer | Family::TensorAttention)
    }

    /// Whether its kernels depend on the head dimension.
    fn has_head_dim(self) -> bool {
        matches!(self, Family::Attention | Family::TensorAttention)
    }

    /// Whether there are kernels for heads of so many elements. Tensor cores take whole matrices.
    pub fn takes(self, head_dim: u64) -> bool {
        match self {
            Family::Attention => head_dim <= HEAD_DIM_MAX,
            Family::TensorAttention => head_dim <= HEAD_DIM_MAX && head_dim.is_multiple_of(16),
            _ => true,
        }
    }
}

/// What is compiled and loaded as one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Unit {
    family: Family,
    real: Option<Real>,
    head_dim: Option<u64>,
}

impl Unit {
    /// The unit that holds a family's kernels for a type of activations and a head dimension, where
    /// the family depends on them.
    pub fn new(family: Family, real: Real, head_dim: u64) -> Unit {
        Unit { family, real: family.has_real().then_some(real), head_dim: family.has_head_dim().then_some(head_dim) }
    }

    /// Every unit of the families for these head dimensions, each once.
    pub fn all(head_dims: &[u64]) -> Vec<Unit> {
        let mut units = Vec::new();
        for family in Family::ALL {
            for real in [Real::F32, Real::Bf16] {
                let taken = head_dims.iter().filter(|&&head_dim| family.takes(head_dim));
                units.extend(taken.map(|&head_dim| Unit::new(family, real, head_dim)));
            }
        }
        units.sort();
        units.dedup();
        units
    }

    /// Whose kernels they are.
    pub fn family(self) -> Family {
        self.family
    }

    /// Unique among units: `norm-bf16`, `attention-f32-128`.
    pub fn name(self) -> String {
        let real = self.real.map_or("", |real| if real == Real::F32 { "-f32" } else { "-bf16" });
        let head_dim = self.head_dim.map_or(String::new(), |head_dim| format!("-{head_dim}"));
        format!("{}{real}{head_dim}", self.family.row().0)
    }

    /// The whole source: it includes no header, and what a compiler says about it names our files.
    pub fn source(self) -> String {
        let (name, source, _) = self.family.row();
        let real = self.real.map_or("", |real| match real {
            Real::F32 => "#define REAL float\n",
            Real::Bf16 => "#define REAL bf16\n",
        });
        let head_dim = self.head_dim.map_or(String::new(), |head_dim| format!("#define HEAD_DIM {head_dim}\n"));
        let file = |name: &str, text: &str| format!("#line 1 \"{name}\"\n{text}");
        let shared: String = self.family.shared().iter().map(|(name, text)| file(name, text)).collect();
        format!("{real}{head_dim}{}{shared}{}", file("common.cuh", COMMON), file(&format!("{name}.cu"), source))
    }
}

/// The tables of the coarse formats, each number by its bits; what they are for is in `formats.cuh`.
fn tables() -> String {
    let table = |name: &str, numbers: &[f32]| {
        let bits: Vec<String> = numbers.iter().map(|number| format!("0x{:08x}u", number.to_bits())).collect();
        format!("__device__ const unsigned int {name}[{}] = {{{}}};\n", numbers.len(), bits.join(", "))
    };
    let thresholds = |signed| in_levels(formats::dynamic_thresholds(signed));
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

/// Ascending numbers, one less than a power of two, level by level: the middle one, then those in the middle of the
/// halves, and so on.
fn in_levels(ascending: &[f32]) -> Vec<f32> {
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
