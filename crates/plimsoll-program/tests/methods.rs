//! Adapters, quantized bases and 8-bit optimizer state: trained tensors, operands and bytes of their Programs.

use plimsoll_core::{Category, DType, RecomputeLevel, Space};
use plimsoll_program::models::decoder::{
    AdamState, AdaptedModule, Base, BuildOptions, Generation, Lora, Method, Optimizer, Scores, Training, WeightSource,
    build, merge,
};
use plimsoll_program::models::{ModelConfig, Target, preset};
use plimsoll_program::op::Quantized;
use plimsoll_program::passes::check::check;
use plimsoll_program::scalars::{METRIC_COUNT, SCALAR_COUNT};
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Block, Lifetime, OpKind, Program, ProgramKind, ProgramSet, Tensor};
use std::collections::{HashMap, HashSet};

const LEVELS: [RecomputeLevel; 3] = [RecomputeLevel::Nothing, RecomputeLevel::FeedForward, RecomputeLevel::Block];

fn adamw(state: AdamState) -> Optimizer {
    Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state }
}

/// Returns models that differ in tied heads, biases, head norms and the place of norms.
fn models() -> Vec<ModelConfig> {
    ["smollm2-135m", "qwen2.5-7b", "qwen3-0.6b", "llama-3.1-8b", "olmo2-7b", "gemma2-9b", "gemma3-1b"]
        .map(|name| ModelConfig { layers: 3, ..preset(name).expect("listed") })
        .to_vec()
}

fn lora(targets: &[Target], dropout: f64) -> Lora {
    Lora {
        rank: 16,
        alpha: 32.0,
        rank_stabilized: false,
        dropout,
        targets: targets.to_vec(),
        modules: None,
        seed: 5,
        source: WeightSource::Random { seed: 5 },
    }
}

fn options<'a>(config: &'a ModelConfig, precision: DType, method: Method, base: Base) -> BuildOptions<'a> {
    BuildOptions {
        config,
        layers: 0..config.layers,
        precision,
        kernels: Kernels::Cuda,
        sequence: 48,
        micro_batch: 2,
        source: WeightSource::Files { dtypes: vec![DType::Bf16; config.hf_parameters().len()] },
        method,
        base,
        streamed_head: false,
        training: Some(Training { optimizer: adamw(AdamState::Full), recompute: LEVELS.to_vec() }),
        evaluate: true,
        scores: Scores::None,
        temperature: 1.0,
        generation: Some(Generation { slots: 1, capacity: 64, chunk: 16 }),
        files: true,
    }
}

/// Returns the bytes of each resident device tensor by name.
fn resident_bytes(set: &ProgramSet) -> HashMap<&str, u64> {
    let resident = set.tensors.iter().filter(|t| t.lifetime == Lifetime::Persistent && t.space == Space::Device);
    resident.map(|t| (t.name.as_str(), t.bytes() * u64::from(t.slots))).collect()
}

fn program(set: &ProgramSet, kind: ProgramKind) -> &Program {
    set.program(kind).unwrap_or_else(|| panic!("there is no program `{kind}`"))
}

#[test]
fn programs_are_well_formed_for_every_method() {
    let some = lora(&[Target::Q, Target::V], 0.0);
    let all = lora(&Target::ALL, 0.1);
    let partial = partial_lora();
    let from_files = |lora: &Lora, config: &ModelConfig| Lora {
        source: WeightSource::Files { dtypes: vec![DType::F32; lora.parameters(config).len()] },
        ..lora.clone()
    };
    for config in models() {
        for precision in [DType::F32, DType::F64, DType::Bf16] {
            for base in [Base::Plain, Base::Int8, Base::Nf4] {
                for adapters in [&some, &all, &partial, &from_files(&all, &config)] {
                    let method = Method::Lora(adapters.clone());
                    for state in [AdamState::Full, AdamState::Blockwise8] {
                        let training = Some(Training { optimizer: adamw(state), recompute: LEVELS.to_vec() });
                        let set =
                            build(&BuildOptions { training, ..options(&config, precision, method.clone(), base) });
                        check(&set).unwrap_or_else(|e| panic!("{precision}, {base:?}, {state:?}: {e}"));
                    }
                    let set = build(&BuildOptions { training: None, ..options(&config, precision, method, base) });
                    check(&set).unwrap_or_else(|e| panic!("{precision}, {base:?}: {e}"));
                }
                let source = WeightSource::Random { seed: 3 };
                let plain = BuildOptions { training: None, source, ..options(&config, precision, Method::Full, base) };
                check(&build(&plain)).unwrap_or_else(|e| panic!("{precision}, {base:?}: {e}"));
            }
            let optimizer = adamw(AdamState::Blockwise8);
            let training = Some(Training { optimizer, recompute: LEVELS.to_vec() });
            let set = build(&BuildOptions { training, ..options(&config, precision, Method::Full, Base::Plain) });
            check(&set).unwrap_or_else(|e| panic!("{precision}, full, 8 bit: {e}"));
        }
    }
}

#[test]
fn only_adapters_have_gradients_masters_and_state() {
    for config in models() {
        let set = build(&options(&config, DType::Bf16, Method::Lora(lora(&Target::ALL, 0.1)), Base::Nf4));
        let beside = set.tensors.iter().filter(|t| matches!(t.category, Category::Gradient | Category::Optimizer));
        for tensor in beside {
            assert!(tensor.name.contains(".lora_"), "{}", tensor.name);
        }
        for name in ["embed_grad", "sum_rows"] {
            assert!(program(&set, ProgramKind::Backward).trace().all(|(op, _)| op.name() != name), "{name}");
        }
        for (op, _) in program(&set, ProgramKind::Backward).trace() {
            match &op.kind {
                OpKind::RmsNormGrad { dweight, .. } => assert_eq!(*dweight, None),
                OpKind::HeadNormGrad { dweights, .. } => assert_eq!(*dweights, None),
                // Only adapters have weight gradients, which are sums over tokens.
                OpKind::Product { out, a_transposed: true, .. } => {
                    assert!(set.tensor(out.tensor).name.contains(".lora_"));
                }
                _ => {}
            }
        }
        let saved: Vec<&str> = set.tensors.iter().filter_map(|t| t.name.strip_prefix("saved:")).collect();
        let files = set.files(ProgramKind::Save).into_iter().filter_map(|t| t.name.strip_prefix("saved:"));
        assert_eq!(files.collect::<Vec<_>>(), saved, "in the order of the tensors");
        assert_eq!(saved.len(), 3 * 7 * 2);
        assert_eq!(saved[0], "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
        assert_eq!(saved[9], "base_model.model.model.layers.0.mlp.gate_proj.lora_B.weight");
    }
}

#[test]
fn only_targets_have_adapters() {
    let config = &models()[1];
    let set = build(&options(config, DType::F32, Method::Lora(lora(&[Target::V, Target::Q], 0.0)), Base::Plain));
    let trained: Vec<&str> = set
        .tensors
        .iter()
        .filter(|t| t.category == Category::Weight && t.name.contains(".lora_"))
        .map(|t| t.name.as_str())
        .collect();
    assert_eq!(trained, ["q.lora_a", "q.lora_b", "v.lora_a", "v.lora_b"]);
}

/// Returns adapters on the queries of two of three layers, with different ranks and scales.
fn partial_lora() -> Lora {
    let module = |layer, rank, alpha| AdaptedModule { layer, target: Target::Q, rank, alpha };
    Lora { rank: 6, modules: Some(vec![module(0, 6, 3.0), module(2, 4, 8.0)]), ..lora(&[Target::Q], 0.1) }
}

#[test]
fn layers_have_only_their_own_adapters() {
    let config = &models()[1];
    let set = build(&options(config, DType::F32, Method::Lora(partial_lora()), Base::Plain));
    check(&set).expect("well-formed");
    let scales = |kind| {
        let blocks = program(&set, kind).blocks.iter().filter(|block| block.name == "layer");
        let of_block = |block: &Block| {
            let products = block.ops.iter().filter_map(|op| match op.kind {
                OpKind::Product { b, k, scale, .. } if set.tensor(b.tensor).name == "q.lora_b" => Some((k, scale)),
                _ => None,
            });
            (block.first, products.collect::<Vec<_>>())
        };
        blocks.map(of_block).collect::<Vec<_>>()
    };
    assert_eq!(scales(ProgramKind::Forward), [(0, vec![(6, 0.5)]), (1, vec![]), (2, vec![(4, 2.0)])]);
    let drops_inputs = |block: &&Block| block.ops.iter().any(|op| matches!(op.kind, OpKind::Dropout { .. }));
    let forward = program(&set, ProgramKind::Forward).blocks.iter().filter(drops_inputs);
    assert_eq!(forward.map(|block| block.first).collect::<Vec<_>>(), [0, 2]);
    let tensor = set.tensor(set.find("q.lora_b").expect("the adapter"));
    assert_eq!((&tensor.shape[..], tensor.slots), (&[Target::Q.shape(config)[0], 6][..], 3));
    let saved = set.tensors.iter().filter(|t| t.name.starts_with("saved:")).map(|t| &t.shape[..]);
    assert_eq!(
        saved.map(|shape| shape.iter().min().copied()).collect::<Vec<_>>(),
        [Some(6), Some(6), Some(4), Some(4)]
    );
}

#[test]
fn adapters_add_to_columns_of_their_projection() {
    let config = &models()[3];
    let set = build(&options(config, DType::Bf16, Method::Lora(lora(&Target::ALL, 0.0)), Base::Nf4));
    let mut found = HashSet::new();
    for (op, _) in program(&set, ProgramKind::Forward).trace() {
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
fn quantized_matrices_are_dequantized_for_each_product() {
    let config = &models()[3];
    let set = build(&options(config, DType::Bf16, Method::Lora(lora(&Target::ALL, 0.0)), Base::Nf4));
    for name in
        [ProgramKind::Forward, ProgramKind::Backward, ProgramKind::Evaluate, ProgramKind::Prefill, ProgramKind::Decode]
    {
        for block in program(&set, name).blocks.iter().filter(|b| b.name == "layer") {
            // The dequantization of a matrix and its product are adjacent.
            let uses = |id| {
                let touches = |op: &plimsoll_program::Op| {
                    op.accesses(&|id| set.tensor(id).elements()).iter().any(|access| access.operand.tensor == id)
                };
                (0..block.ops.len()).filter(|&i| touches(&block.ops[i])).collect::<Vec<_>>()
            };
            let whole = |op: &plimsoll_program::Op| match &op.kind {
                OpKind::Dequantize { into, .. } => Some(into.tensor),
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
fn quantized_pieces_cover_matrices_in_whole_blocks() {
    for config in models() {
        for base in [Base::Int8, Base::Nf4] {
            for source in [
                WeightSource::Files { dtypes: vec![DType::F16; config.hf_parameters().len()] },
                WeightSource::Random { seed: 1 },
            ] {
                let options = options(&config, DType::Bf16, Method::Full, base);
                let set = build(&BuildOptions { training: None, source, ..options });
                let mut next: HashMap<(u32, i64), [i64; 3]> = HashMap::new();
                for (op, variable) in program(&set, ProgramKind::Load).trace() {
                    let OpKind::Quantize { into, elements, columns, .. } = &op.kind else { continue };
                    let parts = into.parts(*elements, *columns);
                    let codes = parts[0].operand;
                    let key = (codes.tensor.0, codes.slot.at(variable, 0));
                    let next = next.entry(key).or_default();
                    for (part, next) in parts.iter().zip(next.iter_mut()) {
                        let operand = part.operand;
                        assert_eq!(operand.offset.at(variable, 0), *next, "{}", set.tensor(operand.tensor).name);
                        *next += part.elements as i64;
                    }
                    if let Quantized::Int8 { .. } = into {
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
fn nf4_8b_model_with_adapters_has_expected_bytes() {
    let config = preset("llama-3.1-8b").expect("listed");
    let lora = lora(&Target::ALL, 0.0);
    let training = Some(Training { optimizer: adamw(AdamState::Full), recompute: vec![RecomputeLevel::Block; 32] });
    let options = options(&config, DType::Bf16, Method::Lora(lora), Base::Nf4);
    let set = build(&BuildOptions { training, sequence: 4096, micro_batch: 1, generation: None, ..options });
    let bytes = resident_bytes(&set);
    // Per layer, in elements: q, k, v, o, gate, up, down.
    let matrices: [u64; 7] =
        [4096 * 4096, 1024 * 4096, 1024 * 4096, 4096 * 4096, 14336 * 4096, 14336 * 4096, 4096 * 14336];
    let sum = |each: &dyn Fn(u64) -> u64| 32 * matrices.iter().map(|&n| each(n)).sum::<u64>();
    let of = |ends: &str| bytes.iter().filter(|(name, _)| name.ends_with(ends)).map(|(_, bytes)| bytes).sum::<u64>();
    assert_eq!(of(".codes"), sum(&|n| n / 2));
    assert_eq!(of(".scales"), sum(&|n| n / 64));
    assert_eq!(of(".groups"), sum(&|n| n / 64 / 256 * 8));
    // 4.127 bits per element (QLoRA, §3).
    let bits = 8.0 * (of(".codes") + of(".scales") + of(".groups")) as f64 / sum(&|n| n) as f64;
    assert!((bits - 4.127).abs() < 0.003, "{bits}");
    // A [r, in] and B [out, r] of each: in + out columns of r.
    let wide = [4096 + 4096, 4096 + 1024, 4096 + 1024, 4096 + 4096, 4096 + 14336, 4096 + 14336, 14336 + 4096];
    let adapters = 32 * 16 * wide.iter().sum::<u64>();
    assert_eq!(adapters, 41_943_040);
    // Two bytes for the bf16 weight; master, gradient and two moments take four bytes each.
    let beside: u64 = bytes.iter().filter(|(name, _)| name.contains(".lora_")).map(|(_, bytes)| bytes).sum();
    assert_eq!(beside, adapters * (2 + 4 * 4));
    let tables = 2 * 128_256 * 4096 * 2;
    let norms = (2 * 32 + 1) * 4096 * 2;
    let rest = 4096 * 128 * 4 + SCALAR_COUNT * 4 + METRIC_COUNT * 8;
    let quantized = sum(&|n| n / 2) + sum(&|n| n / 64) + sum(&|n| n / 64 / 256 * 8);
    assert_eq!(bytes.values().sum::<u64>(), quantized + adapters * 18 + tables + norms + rest);
}

#[test]
fn quantized_state_has_expected_bytes() {
    // The embedding has 4096 elements, norms have 64.
    let config = &ModelConfig { hidden: 64, ffn: 127, vocab: 64, ..models()[0].clone() };
    let training =
        Some(Training { optimizer: adamw(AdamState::Blockwise8), recompute: vec![RecomputeLevel::Nothing; 3] });
    let set = build(&BuildOptions { training, ..options(config, DType::F32, Method::Full, Base::Plain) });
    let bytes = resident_bytes(&set);
    let (mut quantized_elements, mut full) = (0, 0);
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
                quantized_elements += n * slots;
            }
        }
    }
    assert!(quantized_elements > 0 && full > 0);
    // A checkpoint contains the quantized state unchanged.
    let checkpointed = |dtype: DType, of: &[&str]| -> u64 {
        let kept = |t: &&Tensor| t.dtype == dtype && of.iter().any(|role| t.name.starts_with(role));
        set.tensors.iter().filter(kept).map(|t| t.elements()).sum()
    };
    assert_eq!(checkpointed(DType::U8, &["checkpoint:"]), quantized_elements);
    assert_eq!(checkpointed(DType::F32, &["checkpoint:first.model", "checkpoint:second.model"]), full);
    // Updates of one kind are adjacent, so that a GPU runs them in one launch.
    let kinds: Vec<&str> = program(&set, ProgramKind::Update).trace().map(|(op, _)| op.name()).collect();
    assert_eq!(kinds.chunk_by(|a, b| a == b).map(|run| run[0]).collect::<Vec<_>>(), ["adam_w", "adam_w8"]);
}

#[test]
fn merge_holds_adapters_and_one_model_piece() {
    for config in models() {
        let adapters = lora(&[Target::K, Target::Up, Target::Down], 0.0);
        let dtypes = vec![DType::F16; adapters.parameters(&config).len()];
        let adapters = Lora { source: WeightSource::Files { dtypes }, ..adapters };
        let dtypes = vec![DType::Bf16; config.hf_parameters().len()];
        let set = merge(&config, &adapters, Kernels::Cpu { threads: 2 }, &dtypes);
        check(&set).unwrap();
        let staying = resident_bytes(&set);
        assert!(staying.keys().all(|name| name.contains(".lora_")), "{staying:?}");
        // Every parameter is written once, from its first to its last element.
        let mut next: HashMap<u32, i64> = HashMap::new();
        let mut added = 0;
        for (op, variable) in program(&set, ProgramKind::Merge).trace() {
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
