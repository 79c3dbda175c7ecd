//! Adapters, quantised bases and coarse optimizer state as Programs: what is trained, what stands where, how many bytes
//! it takes.

use plimsoll_core::{Category, DType, RecomputeLevel, Space};
use plimsoll_program::models::decoder::{
    AdamState, Base, Build, Generation, Lora, Method, Optimizer, Source, Training, build, merge,
};
use plimsoll_program::models::{ModelConfig, Target, preset};
use plimsoll_program::op::Quantised;
use plimsoll_program::passes::check::check;
use plimsoll_program::scalars::{METRIC_COUNT, SCALAR_COUNT};
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Lifetime, OpKind, Program, ProgramSet, Tensor};
use std::collections::{HashMap, HashSet};

const LEVELS: [RecomputeLevel; 3] = [RecomputeLevel::Nothing, RecomputeLevel::FeedForward, RecomputeLevel::Block];

fn adamw(state: AdamState) -> Optimizer {
    Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state }
}

/// Each has something that the others lack: tied heads, biases, norms of heads.
fn models() -> Vec<ModelConfig> {
    ["smollm2-135m", "qwen2.5-7b", "qwen3-0.6b", "llama-3.1-8b"]
        .map(|name| ModelConfig { layers: 3, ..preset(name).expect("listed") })
        .to_vec()
}

fn lora(targets: &[Target], dropout: f64) -> Lora {
    Lora { rank: 16, alpha: 32.0, dropout, targets: targets.to_vec(), seed: 5, source: Source::Random { seed: 5 } }
}

fn what<'a>(config: &'a ModelConfig, precision: DType, method: Method, base: Base) -> Build<'a> {
    Build {
        config,
        layers: 0..config.layers,
        precision,
        kernels: Kernels::Cuda,
        sequence: 48,
        micro_batch: 2,
        source: Source::Files { dtypes: vec![DType::Bf16; config.hf_parameters().len()] },
        method,
        base,
        streamed_head: false,
        training: Some(Training { optimizer: adamw(AdamState::Full), recompute: LEVELS.to_vec() }),
        evaluate: true,
        generation: Some(Generation { capacity: 64, chunk: 16 }),
        files: true,
    }
}

/// Bytes of all that stays, by the tensor's name.
fn staying(set: &ProgramSet) -> HashMap<&str, u64> {
    let stays = set.tensors.iter().filter(|t| t.lifetime == Lifetime::Persistent && t.space == Space::Device);
    stays.map(|t| (t.name.as_str(), t.bytes() * u64::from(t.slots))).collect()
}

fn program<'a>(set: &'a ProgramSet, name: &str) -> &'a Program {
    set.program(name).unwrap_or_else(|| panic!("there is no program `{name}`"))
}

#[test]
fn every_method_base_and_state_gives_well_formed_programs() {
    let some = lora(&[Target::Q, Target::V], 0.0);
    let all = lora(&Target::ALL, 0.1);
    let from_files = |lora: &Lora, config: &ModelConfig| Lora {
        source: Source::Files { dtypes: vec![DType::F32; lora.parameters(config).len()] },
        ..lora.clone()
    };
    for config in models() {
        for precision in [DType::F32, DType::F64, DType::Bf16] {
            for base in [Base::Plain, Base::Int8, Base::Nf4] {
                for adapters in [&some, &all, &from_files(&all, &config)] {
                    let method = Method::Lora(adapters.clone());
                    for state in [AdamState::Full, AdamState::Blockwise8] {
                        let training = Some(Training { optimizer: adamw(state), recompute: LEVELS.to_vec() });
                        let set = build(&Build { training, ..what(&config, precision, method.clone(), base) });
                        check(&set).unwrap_or_else(|e| panic!("{precision}, {base:?}, {state:?}: {e}"));
                    }
                    let set = build(&Build { training: None, ..what(&config, precision, method, base) });
                    check(&set).unwrap_or_else(|e| panic!("{precision}, {base:?}: {e}"));
                }
                let source = Source::Random { seed: 3 };
                let plain = Build { training: None, source, ..what(&config, precision, Method::Full, base) };
                check(&build(&plain)).unwrap_or_else(|e| panic!("{precision}, {base:?}: {e}"));
            }
            let optimizer = adamw(AdamState::Blockwise8);
            let training = Some(Training { optimizer, recompute: LEVELS.to_vec() });
            let set = build(&Build { training, ..what(&config, precision, Method::Full, Base::Plain) });
            check(&set).unwrap_or_else(|e| panic!("{precision}, full, 8 bit: {e}"));
        }
    }
}

#[test]
fn only_adapters_have_gradients_masters_and_state() {
    for config in models() {
        let set = build(&what(&config, DType::Bf16, Method::Lora(lora(&Target::ALL, 0.1)), Base::Nf4));
        let beside = set.tensors.iter().filter(|t| matches!(t.category, Category::Gradient | Category::Optimizer));
        for tensor in beside {
            assert!(tensor.name.contains(".lora_"), "{}", tensor.name);
        }
        for name in ["embed_grad", "sum_rows"] {
            assert!(program(&set, "backward").trace().all(|(op, _)| op.name() != name), "{name}");
        }
        for (op, _) in program(&set, "backward").trace() {
            match &op.kind {
                OpKind::RmsNormGrad { dweight, .. } => assert_eq!(*dweight, None),
                OpKind::HeadNormGrad { dweights, .. } => assert_eq!(*dweights, None),
                // The only sums over tokens are those of adapters.
                OpKind::Product { out, a_transposed: true, .. } => {
                    assert!(set.tensor(out.tensor).name.contains(".lora_"));
                }
                _ => {}
            }
        }
        let saved: Vec<&str> = set.tensors.iter().filter_map(|t| t.name.strip_prefix("saved:")).collect();
        let files = set.files("save").into_iter().filter_map(|t| t.name.strip_prefix("saved:"));
        assert_eq!(files.collect::<Vec<_>>(), saved, "in the order of the tensors");
        assert_eq!(saved.len(), 3 * 7 * 2);
        assert_eq!(saved[0], "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
        assert_eq!(saved[9], "base_model.model.model.layers.0.mlp.gate_proj.lora_B.weight");
    }
}

#[test]
fn targets_alone_have_adapters() {
    let config = &models()[1];
    let set = build(&what(config, DType::F32, Method::Lora(lora(&[Target::V, Target::Q], 0.0)), Base::Plain));
    let trained: Vec<&str> = set
        .tensors
        .iter()
        .filter(|t| t.category == Category::Weight && t.name.contains(".lora_"))
        .map(|t| t.name.as_str())
        .collect();
    assert_eq!(trained, ["q.lora_a", "q.lora_b", "v.lora_a", "v.lora_b"]);
}

#[test]
fn what_adapters_add_goes_to_the_columns_of_their_projection() {
    let config = &models()[3];
    let set = build(&what(config, DType::Bf16, Method::Lora(lora(&Target::ALL, 0.0)), Base::Nf4));
    let mut found = HashSet::new();
    for (op, _) in program(&set, "forward").trace() {
        let OpKind::Product { b, out, n, k: 16, out_stride, scale, accumulate, .. } = &op.kind else { continue };
        let name = set.tensor(b.tensor).name.clone();
        found.insert(name.clone());
        let expected = match name.as_str() {
            "q.lora_b" => (0, 4096, 6144),
            "k.lora_b" => (4096, 1024, 6144),
            "v.lora_b" => (5120, 1024, 6144),
            "o.lora_b" | "down.lora_b" => (0, 4096, 4096),
            "gate.lora_b" => (0, 14336, 28672),
            "up.lora_b" => (14336, 14336, 28672),
            other => panic!("{other}"),
        };
        assert_eq!((out.offset.base, *n, *out_stride), expected, "{name}");
        assert_eq!((*scale, *accumulate), (2.0, true), "{name}");
    }
    assert_eq!(found.len(), 7);
}

#[test]
fn a_quantised_matrix_is_made_whole_for_each_product_and_never_kept() {
    let config = &models()[3];
    let set = build(&what(config, DType::Bf16, Method::Lora(lora(&Target::ALL, 0.0)), Base::Nf4));
    for name in ["forward", "backward", "evaluate", "prefill", "decode"] {
        for block in program(&set, name).blocks.iter().filter(|b| b.name == "layer") {
            // Between the op that makes a matrix and its last use stands nothing but its product.
            let uses = |id| {
                let touches = |op: &plimsoll_program::Op| {
                    op.accesses(&|id| set.tensor(id).elements()).iter().any(|access| access.operand.tensor == id)
                };
                (0..block.ops.len()).filter(|&i| touches(&block.ops[i])).collect::<Vec<_>>()
            };
            let whole = |op: &plimsoll_program::Op| match &op.kind {
                OpKind::Dequantise { into, .. } => Some(into.tensor),
                _ => None,
            };
            let made: HashSet<_> = block.ops.iter().filter_map(whole).collect();
            assert!(made.len() >= 4, "{name}: each of the four matrices is used");
            for id in made {
                let uses = uses(id);
                assert_eq!(uses.len(), uses[uses.len() - 1] - uses[0] + 1, "{name}: {}", set.tensor(id).name);
                assert_eq!(block.ops[uses[uses.len() - 1]].name(), "product");
            }
        }
    }
}

#[test]
fn pieces_of_a_quantised_matrix_cover_it_once_and_begin_with_their_blocks() {
    for config in models() {
        for base in [Base::Int8, Base::Nf4] {
            for source in
                [Source::Files { dtypes: vec![DType::F16; config.hf_parameters().len()] }, Source::Random { seed: 1 }]
            {
                let what = what(&config, DType::Bf16, Method::Full, base);
                let set = build(&Build { training: None, source, ..what });
                let mut next: HashMap<(u32, i64), [i64; 3]> = HashMap::new();
                for (op, variable) in program(&set, "load").trace() {
                    let OpKind::Quantise { into, elements, columns, .. } = &op.kind else { continue };
                    let parts = into.parts(*elements, *columns);
                    let codes = parts[0].0;
                    let key = (codes.tensor.0, codes.slot.at(variable, 0));
                    let next = next.entry(key).or_default();
                    for ((operand, count), next) in parts.iter().zip(next.iter_mut()) {
                        assert_eq!(operand.offset.at(variable, 0), *next, "{}", set.tensor(operand.tensor).name);
                        *next += *count as i64;
                    }
                    if let Quantised::Int8 { .. } = into {
                        assert!(elements.is_multiple_of(*columns), "whole rows");
                    }
                }
                assert_eq!(next.len(), 3 * 7);
                for ((tensor, _), ends) in next {
                    assert_eq!(ends[0] as u64, set.tensors[tensor as usize].elements());
                }
            }
        }
    }
}

#[test]
fn an_8b_model_in_nf4_with_adapters_takes_the_bytes_that_arithmetic_says() {
    let config = preset("llama-3.1-8b").expect("listed");
    let lora = lora(&Target::ALL, 0.0);
    let training = Some(Training { optimizer: adamw(AdamState::Full), recompute: vec![RecomputeLevel::Block; 32] });
    let what = what(&config, DType::Bf16, Method::Lora(lora), Base::Nf4);
    let set = build(&Build { training, sequence: 4096, micro_batch: 1, generation: None, ..what });
    let bytes = staying(&set);
    // Per layer, in elements: q, k, v, o, gate, up, down.
    let matrices: [u64; 7] =
        [4096 * 4096, 1024 * 4096, 1024 * 4096, 4096 * 4096, 14336 * 4096, 14336 * 4096, 4096 * 14336];
    let sum = |each: &dyn Fn(u64) -> u64| 32 * matrices.iter().map(|&n| each(n)).sum::<u64>();
    let of = |ends: &str| bytes.iter().filter(|(name, _)| name.ends_with(ends)).map(|(_, bytes)| bytes).sum::<u64>();
    assert_eq!(of(".codes"), sum(&|n| n / 2));
    assert_eq!(of(".scales"), sum(&|n| n / 64));
    assert_eq!(of(".groups"), sum(&|n| n / 64 / 256 * 8));
    // 4.127 bits an element (QLoRA, §3).
    let bits = 8.0 * (of(".codes") + of(".scales") + of(".groups")) as f64 / sum(&|n| n) as f64;
    assert!((bits - 4.127).abs() < 0.003, "{bits}");
    // A [r, in] and B [out, r] of each: in + out columns of r.
    let wide = [4096 + 4096, 4096 + 1024, 4096 + 1024, 4096 + 4096, 4096 + 14336, 4096 + 14336, 14336 + 4096];
    let adapters = 32 * 16 * wide.iter().sum::<u64>();
    assert_eq!(adapters, 41_943_040);
    // Two bytes to compute with; master, gradient and two moments in four each.
    let beside: u64 = bytes.iter().filter(|(name, _)| name.contains(".lora_")).map(|(_, bytes)| bytes).sum();
    assert_eq!(beside, adapters * (2 + 4 * 4));
    let tables = 2 * 128_256 * 4096 * 2;
    let norms = (2 * 32 + 1) * 4096 * 2;
    let rest = 4096 * 128 * 4 + SCALAR_COUNT * 4 + METRIC_COUNT * 8;
    let quantised = sum(&|n| n / 2) + sum(&|n| n / 64) + sum(&|n| n / 64 / 256 * 8);
    assert_eq!(bytes.values().sum::<u64>(), quantised + adapters * 18 + tables + norms + rest);
}

#[test]
fn coarse_state_takes_a_byte_a_moment_and_a_scale_for_256_and_small_tensors_keep_theirs() {
    // The embedding has 4096 elements, norms have 64.
    let config = &ModelConfig { hidden: 64, ffn: 127, vocab: 64, ..models()[0].clone() };
    let training =
        Some(Training { optimizer: adamw(AdamState::Blockwise8), recompute: vec![RecomputeLevel::Nothing; 3] });
    let set = build(&Build { training, ..what(config, DType::F32, Method::Full, Base::Plain) });
    let bytes = staying(&set);
    let (mut coarse, mut full) = (0, 0);
    for weight in set.tensors.iter().filter(|t| t.category == Category::Weight && t.name != "rope_table") {
        let (name, n, slots) = (&weight.name, weight.elements(), u64::from(weight.slots));
        for moment in ["first", "second"] {
            let scale = bytes.get(format!("{name}.{moment}_scale").as_str());
            if n < 4096 {
                assert_eq!((bytes[format!("{name}.{moment}").as_str()], scale), (4 * n * slots, None), "{name}");
                full += n * slots;
            } else {
                assert_eq!(bytes[format!("{name}.{moment}").as_str()], n * slots, "{name}");
                assert_eq!(scale, Some(&(4 * n.div_ceil(256) * slots)), "{name}");
                coarse += n * slots;
            }
        }
    }
    assert!(coarse > 0 && full > 0);
    // A checkpoint has all of it, as it is.
    let checkpointed = |dtype: DType, of: &[&str]| -> u64 {
        let kept = |t: &&Tensor| t.dtype == dtype && of.iter().any(|role| t.name.starts_with(role));
        set.tensors.iter().filter(kept).map(|t| t.elements()).sum()
    };
    assert_eq!(checkpointed(DType::U8, &["checkpoint:"]), coarse);
    assert_eq!(checkpointed(DType::F32, &["checkpoint:first.model", "checkpoint:second.model"]), full);
    // Updates of one kind follow each other: a GPU takes them in one launch.
    let kinds: Vec<&str> = program(&set, "update").trace().map(|(op, _)| op.name()).collect();
    assert_eq!(kinds.chunk_by(|a, b| a == b).map(|run| run[0]).collect::<Vec<_>>(), ["adam_w", "adam_w8"]);
}

#[test]
fn merging_holds_the_adapters_and_a_piece_of_the_model() {
    for config in models() {
        let adapters = lora(&[Target::K, Target::Up, Target::Down], 0.0);
        let dtypes = vec![DType::F16; adapters.parameters(&config).len()];
        let adapters = Lora { source: Source::Files { dtypes }, ..adapters };
        let dtypes = vec![DType::Bf16; config.hf_parameters().len()];
        let set = merge(&config, &adapters, Kernels::Cpu { threads: 2 }, &dtypes);
        check(&set).unwrap();
        let staying = staying(&set);
        assert!(staying.keys().all(|name| name.contains(".lora_")), "{staying:?}");
        // Every parameter is written once, from its first to its last element.
        let mut next: HashMap<u32, i64> = HashMap::new();
        let mut added = 0;
        for (op, variable) in program(&set, "merge").trace() {
            match &op.kind {
                OpKind::TransferStart { to, elements, .. } if set.tensor(to.tensor).space == Space::File => {
                    let next = next.entry(to.tensor.0).or_default();
                    assert_eq!(to.offset.at(variable, 0), *next);
                    *next += *elements as i64;
                }
                OpKind::Product { m, n, .. } => added += m * n,
                _ => {}
            }
        }
        for parameter in config.hf_parameters() {
            let id = set.find(&format!("merged:{}", parameter.hf_name)).expect("every parameter is written");
            assert_eq!(next[&id.0] as u64, parameter.elements());
        }
        let per_layer = config.kv_width() * config.hidden + 2 * config.ffn * config.hidden;
        assert_eq!(added, 3 * per_layer);
    }
}
