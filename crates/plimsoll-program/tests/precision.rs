//! Effects of the precision on Programs: wide tensors, master weights, and dtypes in files.

use plimsoll_core::{Category, DType, RecomputeLevel, Space};
use plimsoll_program::models::decoder::{
    AdamState, Base, BuildOptions, Generation, Method, Optimizer, Scores, Training, WeightSource, build,
};
use plimsoll_program::models::{ModelConfig, preset};
use plimsoll_program::passes::check::{MalformedProgram, check};
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{OpKind, Program, ProgramKind, ProgramSet, Tensor};

const ADAMW: Optimizer = Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state: AdamState::Full };
const TARGETS: [Kernels; 2] = [Kernels::Cpu { threads: 2 }, Kernels::Cuda];

/// Returns models that differ in tied heads, biases, head norms and the place of norms.
fn models() -> Vec<ModelConfig> {
    ["smollm2-135m", "qwen2.5-7b", "qwen3-0.6b", "llama-3.1-8b", "olmo2-7b", "gemma2-9b", "gemma3-1b"]
        .map(|name| ModelConfig { layers: 3, ..preset(name).expect("listed") })
        .to_vec()
}

fn programs(
    config: &ModelConfig,
    precision: DType,
    kernels: Kernels,
    files: Option<DType>,
    optimizer: Option<Optimizer>,
) -> ProgramSet {
    let recompute = vec![RecomputeLevel::Nothing, RecomputeLevel::Attention, RecomputeLevel::Block];
    let source = match files {
        Some(dtype) => WeightSource::Files { dtypes: vec![dtype; config.hf_parameters().len()] },
        None => WeightSource::Random { seed: 1 },
    };
    build(&BuildOptions {
        config,
        layers: 0..config.layers,
        precision,
        kernels,
        sequence: 48,
        micro_batch: 2,
        source,
        method: Method::Full,
        base: Base::Plain,
        streamed_head: false,
        training: optimizer.map(|optimizer| Training { optimizer, recompute }),
        evaluate: true,
        scores: Scores::None,
        temperature: 1.0,
        generation: Some(Generation { slots: 1, capacity: 64, chunk: 16 }),
        files: true,
    })
}

fn named<'a>(set: &'a ProgramSet, name: &str) -> &'a Tensor {
    set.tensor(set.find(name).unwrap_or_else(|| panic!("there is no `{name}`")))
}

fn kinds(program: &Program) -> Vec<&'static str> {
    let mut kinds: Vec<_> = program.trace().map(|(op, _)| op.name()).collect();
    kinds.dedup();
    kinds
}

#[test]
fn programs_are_well_formed_in_every_precision() {
    for config in models() {
        for precision in [DType::F32, DType::F64, DType::Bf16] {
            for kernels in TARGETS {
                for files in [None, Some(DType::Bf16), Some(DType::F32), Some(DType::F16)] {
                    for optimizer in [Some(ADAMW), Some(Optimizer::Sgd { momentum: 0.9, decay: 0.0 }), None] {
                        let set = programs(&config, precision, kernels, files, optimizer);
                        check(&set).unwrap_or_else(|e| panic!("{precision}, {kernels:?}, {files:?}: {e}"));
                    }
                }
            }
        }
    }
}

#[test]
fn wrong_dtypes_are_reported() {
    let config = &models()[2];
    for name in [
        "rope_table",
        "scalars",
        "qkv",
        "q_norm",
        "embedding",
        "down.gradient",
        "embedding.gradient",
        "q_norm.gradient",
        "gate_up.first",
        "ffn_norm.master",
        "train.attention_rstd",
        "train.qk_rstd",
        "train.attention_stats",
        "train.token_weights",
        "train.gated",
        "train.logits",
        "train.softmax_stats",
        "norm_workspace",
        "cache_keys",
        "metrics",
    ] {
        let mut set = programs(config, DType::Bf16, Kernels::Cuda, None, Some(ADAMW));
        let id = set.find(name).unwrap_or_else(|| panic!("there is no `{name}`"));
        let tensor = &mut set.tensors[id.0 as usize];
        tensor.dtype = if tensor.dtype == DType::Bf16 { DType::F32 } else { DType::Bf16 };
        let found = check(&set).expect_err(name);
        assert!(matches!(found, MalformedProgram::Type { .. }), "{name}: {found}");
    }
}

#[test]
fn bf16_training_keeps_masters_and_sums_in_f32() {
    for config in models() {
        let set = programs(&config, DType::Bf16, Kernels::Cuda, Some(DType::Bf16), Some(ADAMW));
        let weights = set.tensors.iter().filter(|t| t.category == Category::Weight && t.name != "rope_table");
        let mut parameters = 0;
        for weight in weights {
            assert_eq!(weight.dtype, DType::Bf16, "{}", weight.name);
            parameters += weight.elements() * u64::from(weight.slots);
            for role in ["master", "gradient", "first", "second"] {
                let beside = named(&set, &format!("{}.{role}", weight.name));
                assert_eq!((beside.dtype, &beside.shape, beside.slots), (DType::F32, &weight.shape, weight.slots));
            }
        }
        // A tied table is one weight with one master.
        assert_eq!(parameters, config.parameters());
    }
}

#[test]
fn only_training_in_bf16_has_masters() {
    let config = &models()[0];
    let masters = |precision, optimizer| {
        let set = programs(config, precision, Kernels::Cuda, None, optimizer);
        set.tensors.iter().filter(|t| t.name.ends_with(".master")).count()
    };
    assert_eq!(masters(DType::F32, Some(ADAMW)), 0);
    assert_eq!(masters(DType::F64, Some(ADAMW)), 0);
    assert_eq!(masters(DType::Bf16, None), 0);
    assert!(masters(DType::Bf16, Some(ADAMW)) > 0);
}

#[test]
fn weights_are_cast_from_masters_after_updates() {
    let set = programs(&models()[0], DType::Bf16, Kernels::Cuda, None, Some(ADAMW));
    assert_eq!(kinds(set.program(ProgramKind::Update).unwrap()), ["adam_w", "cast"]);
    for name in [ProgramKind::Update, ProgramKind::Load, ProgramKind::Restore] {
        let program = set.program(name).unwrap();
        let casts = program.trace().filter(|(op, _)| {
            let OpKind::Cast { from, to, .. } = &op.kind else { return false };
            let (from, to) = (&set.tensor(from.tensor).name, &set.tensor(to.tensor).name);
            *from == format!("{to}.master")
        });
        let weights: u32 = set.tensors.iter().filter(|t| t.name.ends_with(".master")).map(|t| t.slots).sum();
        assert_eq!(casts.count(), weights as usize, "{name}");
    }
    let plain = programs(&models()[0], DType::F32, Kernels::Cuda, None, Some(ADAMW));
    assert_eq!(kinds(plain.program(ProgramKind::Update).unwrap()), ["adam_w"]);
}

#[test]
fn models_save_in_precision_and_checkpoints_wide() {
    for (precision, wide) in [(DType::Bf16, DType::F32), (DType::F32, DType::F32), (DType::F64, DType::F64)] {
        let set = programs(&models()[3], precision, Kernels::Cuda, None, Some(ADAMW));
        for tensor in set.tensors.iter().filter(|t| t.space == Space::File) {
            let expected = if tensor.name.starts_with("saved:") { precision } else { wide };
            assert_eq!(tensor.dtype, expected, "{}", tensor.name);
        }
    }
}

#[test]
fn random_matrices_pass_through_staging_in_pieces() {
    let config = &models()[3];
    let set = programs(config, DType::Bf16, Kernels::Cuda, None, None);
    let mut drawn = 0;
    let mut next = std::collections::HashMap::new();
    for (op, variable) in set.program(ProgramKind::Load).unwrap().trace() {
        let OpKind::InitNormal { into, number, first, elements, .. } = &op.kind else { continue };
        assert_eq!(set.tensor(into.tensor).category, Category::Staging);
        let begin = next.entry(*number).or_insert(0);
        assert_eq!(first.at(variable, 0), *begin, "parameter {number} is drawn without gap or overlap");
        *begin += *elements as i64;
        drawn += elements;
    }
    let matrices = config.hf_parameters().iter().filter(|p| p.shape.len() == 2).map(|p| p.elements()).sum::<u64>();
    assert_eq!(drawn, matrices);
}
