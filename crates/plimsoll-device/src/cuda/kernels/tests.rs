//! Checks that family table, sources and launches agree.

use super::launch::{self, *};
use super::*;
use crate::cuda::architecture::Architecture;
use plimsoll_core::DType;
use plimsoll_program::op::{Activation, Heads, QkNorm, RopeScaling};
use plimsoll_program::scalars::{Metric, Scalar};
use plimsoll_program::workspace::cuda::NORM_PARTIALS;
use std::collections::BTreeSet;

const SHAPE: Heads = Heads { heads: 6, kv_heads: 2, head_dim: 64 };

/// An Ampere GPU of a data center.
const TARGET: Target = target(8, 0);

const fn target(major: u32, minor: u32) -> Target {
    Target { architecture: Architecture { major, minor }, compiler: 1305 }
}

/// Returns [`launches_for`] on [`TARGET`].
fn launches(real: Real, rows: u64, shape: Heads) -> Vec<Launch> {
    launches_for(TARGET, real, rows, shape)
}

/// Returns launches of every kernel that fits heads of `shape`. Sizes are like those of models, with `rows` rows.
fn launches_for(target: Target, real: Real, rows: u64, shape: Heads) -> Vec<Launch> {
    let mut all = Vec::new();
    all.extend(rms_norm(real, [0; 3], 0, 0, rows, 8192, [1e-5, 0.0]));
    all.extend(rms_norm_grad(real, [0; 4], [0; 3], rows, 8192, 0.0, true));
    for norm in [QkNorm::PerHead, QkNorm::AllHeads] {
        all.extend(head_norm(real, [0; 3], 0, 0, rows, shape, norm, [1e-6, 0.0]));
        all.extend(head_norm_grad(real, [0; 4], [0; 2], [0; 2], rows, shape, norm, 0.0));
    }
    all.extend(rope(real, [0; 3], rows, 0, shape, true));
    all.extend(rope_table(real, 0, [131_072, shape.head_dim], 1e6, RopeScaling::None, 1.0, None));
    all.extend(launch::shift_positions(real, 0, 0, 0, rows, 1 - 4096));
    for softcap in [None, Some(50.0)] {
        all.extend(launch::attention(real, target, [0; 4], 1, rows, shape, softcap));
        all.extend(attention_grad(real, target, [0; 5], [0; 2], 1, rows, shape, softcap));
    }
    for (sequences, rows) in [(1, rows), (1, 1), (64, 1)] {
        let tokens = NewTokens { sequences, rows, capacity: 131_072 };
        all.extend(cached_attention(real, target, [0; 5], 0, 0, tokens, shape, None));
    }
    all.extend(append_cache(real, 0, 0, 0, 0, rows, shape));
    all.extend(copy_cache(real, [0; 2], 0, 0, rows, shape));
    all.extend(glu(real, Activation::Silu, 0, 0, rows, 28_672));
    all.extend(glu_grad(real, Activation::Silu, [0; 3], rows, 28_672));
    all.extend(softmax_stats(real, [0; 4], rows, 0, 152_064, true));
    all.extend(cross_entropy(real, [0; 3], 0, None, None, rows));
    all.extend(softmax_grad(real, [0; 5], rows, 0, 152_064, None));
    all.extend(embed(real, [0; 3], rows, 8192, 152_064, 1.0));
    all.extend(embed_grad(real, [0; 4], rows, 8192, 152_064, 1.0));
    all.extend(add(real, 0, 0, rows * 8192));
    all.extend(soft_cap(real, 0, rows * 8192, 30.0));
    all.extend(add_rows(real, 0, 0, 0, 12_288, rows, 12_288));
    all.extend(sum_rows(real, 0, 0, 0, rows, 12_288));
    all.extend(pick_row(real, 0, 0, 0, 8192));
    for from in [DType::F64, DType::F32, DType::Bf16, DType::F16] {
        for to in [DType::F64, DType::F32, DType::Bf16, DType::F16] {
            all.extend(cast(from, 0, to, 0, rows * 8192).into_iter().flatten());
        }
        all.extend(fill(from, 0, 0.0, rows * 8192).into_iter().flatten());
    }
    all.extend(fill(DType::U8, 0, 0.0, rows * 8192).into_iter().flatten());
    for dtype in [DType::F64, DType::F32, DType::Bf16] {
        let parts = RankParts { own: 0, others: 0, stride: rows, rank: 1, ranks: 3 };
        all.extend(sum_ranks(dtype, parts, 0, rows * 8192, true).into_iter().flatten());
    }
    all.extend(init_normal(0, 1, 2, 3, 0.02, rows * 8192));
    all.extend(init_uniform(0, 1, 2, 3, 0.02, rows * 8192));
    for sequence in [1, rows] {
        let site = Dropout { seed: 1, first_sample: 2, sequence, layer: 3, site: 4, probability: 0.1 };
        all.extend(launch::dropout(real, site, [0; 3], rows, 8192, true));
    }
    for quantized in
        [QuantizedAddresses::Int8 { codes: 0, scales: 0 }, QuantizedAddresses::Nf4 { codes: 0, scales: 0, groups: 0 }]
    {
        all.extend(quantize(0, quantized, rows * 8192, 8192));
        all.extend(dequantize(real, quantized, 0, rows * 8192, 8192));
    }
    let tensor = OptimizerTensor { elements: rows * 8192, decay: 0.1, ..OptimizerTensor::default() };
    all.extend(adamw(&[tensor; 65], 0, [0.9, 0.95], 1e-8));
    all.extend(adamw8(&[tensor; 65], 0, [0.9, 0.95], 1e-8));
    all.extend(sgd(&[tensor; 65], 0, 0.9));
    all.extend(squared_norm(&[(0, rows * 8192); 65], 0, 0));
    all.extend(clip_factor(0, 0));
    all
}

/// Returns the parameters (type and name each) that the declaration of `kernel` in `source` has.
fn parameters<'a>(source: &'a str, kernel: &str) -> Vec<&'a str> {
    let start = source
        .match_indices(&format!("{kernel}("))
        .map(|(at, _)| at)
        .find(|&at| {
            let line = source[..at].rfind("extern \"C\" __global__").unwrap_or(0);
            !source[line..at].contains('{') && source[..at].ends_with([' ', '\n']) && line > 0
        })
        .unwrap_or_else(|| panic!("{kernel} is declared"));
    let inside = &source[start + kernel.len() + 1..];
    inside[..inside.find(')').unwrap()].split(',').map(str::trim).collect()
}

#[test]
fn family_table_names_every_kernel() {
    for family in Family::ALL {
        let (name, source, kernels) = family.source_entry();
        let declared = source.matches("extern \"C\" __global__").count();
        assert_eq!(declared, kernels.len(), "{name}.cu");
        assert_eq!(source.contains("REAL"), family.has_real(), "{name}.cu");
        assert_eq!(source.contains("HEAD_DIM"), family.has_head_dim(), "{name}.cu");
        for kernel in kernels {
            assert!(!parameters(source, kernel).is_empty());
        }
    }
}

#[test]
fn launches_match_kernel_signatures() {
    let mut launched = BTreeSet::new();
    let odd = Heads { head_dim: 6, ..SHAPE };
    for launch in [launches(Real::Bf16, 100, SHAPE), launches(Real::Bf16, 100, odd)].concat() {
        launched.insert(launch.kernel);
        let declared = parameters(launch.unit.family().source_entry().1, launch.kernel);
        let given: Vec<&str> = launch
            .arguments
            .iter()
            .map(|argument| match argument {
                Argument::Address(_) => "*",
                Argument::U32(_) => "u32",
                Argument::U64(_) => "u64",
                Argument::F32(_) => "float",
                Argument::F64(_) => "double",
                Argument::Table(_) => "Table",
            })
            .collect();
        assert_eq!(given.len(), declared.len(), "{}", launch.kernel);
        for (given, declared) in given.iter().zip(declared) {
            let parts: Vec<&str> = declared.split_whitespace().collect();
            let kind = parts[parts.len() - 2];
            let fits = if *given == "*" { kind.ends_with('*') } else { kind == *given };
            assert!(fits, "{}: {declared} is given {given}", launch.kernel);
        }
    }
    let all: BTreeSet<&str> = Family::ALL.iter().flat_map(|family| family.kernels()).copied().collect();
    assert_eq!(launched, all);
}

#[test]
fn launches_stay_within_gpu_limits() {
    for rows in [1, 100, 65_535, 1 << 20] {
        for (head_dim, real) in [2, 6, 64, 80, HEAD_DIM_MAX].map(|e| [(e, Real::F32), (e, Real::Bf16)]).concat() {
            for launch in launches(real, rows, Heads { head_dim, ..SHAPE }) {
                let name = launch.kernel;
                assert!(launch.grid.iter().all(|&blocks| blocks > 0), "{name}");
                assert!(launch.grid[0] <= 0x7fff_ffff && launch.grid[1..].iter().all(|&y| y <= 65_535), "{name}");
                assert!(launch.block % 32 == 0 && launch.block <= 1024, "{name}");
                // sm_86, sm_89 and sm_120 allow 99 KiB per block, of which 1 KiB is left for static arrays.
                assert!(launch.shared_bytes <= 98 * 1024, "{name}: {}", launch.shared_bytes);
                let bytes: usize = launch
                    .arguments
                    .iter()
                    .map(|argument| match argument {
                        Argument::Table(table) => size_of_val(&**table),
                        _ => 8,
                    })
                    .sum();
                assert!(bytes <= 4096, "{name}");
            }
        }
    }
}

#[test]
fn two_gradient_blocks_fit_small_multiprocessors() {
    // 100 KiB for each multiprocessor; a block takes 1 KiB more than its kernel asks for.
    for (head_dim, blocks) in [(16, 2), (32, 2), (48, 2), (64, 2), (80, 2), (96, 2), (112, 2), (128, 1)] {
        for target in [target(8, 6), target(8, 9), target(12, 0)] {
            let all = launches_for(target, Real::Bf16, 700, Heads { head_dim, ..SHAPE });
            let keys = all.iter().find(|launch| launch.kernel == "tensor_attention_grad_keys").unwrap();
            assert!(blocks * (keys.shared_bytes + 1024) <= 100 * 1024, "{head_dim}: {}", keys.shared_bytes);
        }
    }
}

#[test]
fn forward_requests_only_its_tiles() {
    let shared = |target, head_dim| {
        launch::attention(Real::Bf16, target, [0; 4], 1, 700, Heads { head_dim, ..SHAPE }, None)[0].shared_bytes
    };
    // 128 queries and two tiles of keys, in rows of a head and 16 bytes.
    assert_eq!(shared(TARGET, 80), (128 + 2 * 32) * 176);
    assert_eq!(shared(TARGET, 128), (128 + 2 * 64) * 272);
    assert_eq!(shared(target(12, 0), 128), (128 + 2 * 32) * 272);
    assert_eq!(shared(Target { compiler: 1300, ..TARGET }, 128), (128 + 2 * 32) * 272);
}

#[test]
fn squared_norm_fits_its_workspace() {
    for elements in [1, 16_384, 16_385, 1 << 20, 4_000_000_000] {
        for count in [1, 63, 64, 65, 200] {
            for launch in squared_norm(&vec![(0, elements); count], 0, 0) {
                assert!(u64::from(launch.grid[0]) <= NORM_PARTIALS);
            }
        }
    }
}

#[test]
fn scalar_and_metric_indices_match_programs() {
    let constants: Vec<(&str, usize)> = COMMON_SOURCE
        .lines()
        .flat_map(|line| line.split([',', ';']))
        .filter_map(|part| {
            let (name, value) = part.trim().trim_start_matches("constexpr u32 ").split_once(" = ")?;
            Some((name, value.parse().ok()?))
        })
        .collect();
    for (name, value) in [
        ("LEARNING_RATE", Scalar::LearningRate as usize),
        ("BIAS_CORRECTION_1", Scalar::BiasCorrection1 as usize),
        ("BIAS_CORRECTION_2", Scalar::BiasCorrection2 as usize),
        ("CLIP_NORM", Scalar::ClipNorm as usize),
        ("CLIP_FACTOR", Scalar::ClipFactor as usize),
        ("INVERSE_TOKENS", Scalar::InverseTokens as usize),
        ("LAST_ROW", Scalar::LastRow as usize),
        ("STEP", Scalar::Step as usize),
        ("LOSS_SUM", Metric::LossSum as usize),
        ("NORM_SQUARED", Metric::NormSquared as usize),
    ] {
        assert!(constants.contains(&(name, value)), "{name} is {value}: {constants:?}");
    }
}

#[test]
fn unit_names_are_unique() {
    let units = Unit::all(&[64, 128], TARGET);
    let names: BTreeSet<String> = units.iter().map(|unit| unit.name()).collect();
    assert_eq!(names.len(), units.len());
    assert!(names.contains("attention-bf16-128") && names.contains("norm-f32") && names.contains("optimizer"));
}

/// Finds the code of a value by a walk down the tree `levels`, as `code_of` in formats.cuh does.
fn code_by_levels(levels: &[f32], value: f32) -> usize {
    let mut node = 0;
    while let Some(threshold) = levels.get(node) {
        node = 2 * node + 1 + usize::from(*threshold < value);
    }
    node - levels.len()
}

#[test]
fn level_order_thresholds_give_format_codes() {
    for thresholds in [formats::dynamic_thresholds(true), formats::dynamic_thresholds(false), formats::nf4_thresholds()]
    {
        let levels = level_order(thresholds);
        let near = thresholds.iter().flat_map(|t| [t.next_down(), *t, t.next_up()]);
        for value in near.chain([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0]) {
            assert_eq!(code_by_levels(&levels, value), usize::from(formats::code(thresholds, value)), "{value}");
        }
    }
}
