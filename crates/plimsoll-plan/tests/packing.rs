//! Properties of packings: buffers with overlapping lifetimes never share a byte, the reported top is exact, no packing
//! is below the lower bound, and Programs of all presets meet the bound.

use plimsoll_core::{DType, RecomputeLevel, Space};
use plimsoll_plan::layout::ALIGNMENT;
use plimsoll_plan::lifetimes::lifetimes;
use plimsoll_plan::packing::{Buffer, Packing, lower_bound, pack, pack_with_effort};
use plimsoll_program::models::decoder::{
    AdamState, Base, BuildOptions, Generation, Method, Optimizer, Scores, Training, WeightSource, build,
};
use plimsoll_program::models::{ModelConfig, preset, preset_names};
use plimsoll_program::workspace::Kernels;
use proptest::prelude::*;

/// Returns the recipes to pack: uniform ones, and mixtures like those that the search finds.
fn recipes(layers: usize) -> Vec<(String, Vec<RecomputeLevel>)> {
    use RecomputeLevel::*;
    let all = RecomputeLevel::ALL;
    let mut recipes: Vec<_> = all.iter().map(|&level| (format!("{level}"), vec![level; layers])).collect();
    let mut mixed = |name: &str, level: &dyn Fn(usize) -> RecomputeLevel| {
        recipes.push((name.to_owned(), (0..layers).map(level).collect()));
    };
    mixed("half", &|layer| if layer < layers / 2 { Block } else { Nothing });
    mixed("all but three", &|layer| if layer + 3 < layers { Block } else { Attention });
    mixed("every third", &|layer| [FeedForward, Norms, Block][layer % 3]);
    mixed("falling", &|layer| all[4 - 5 * layer / layers]);
    recipes
}

/// Returns the buffers of each phase of a run.
fn phases(
    config: &ModelConfig,
    precision: DType,
    [batch, tokens]: [u64; 2],
    recompute: Vec<RecomputeLevel>,
) -> Vec<Vec<Buffer>> {
    let optimizer = Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state: AdamState::Full };
    let set = build(&BuildOptions {
        config,
        layers: 0..config.layers,
        precision,
        kernels: Kernels::Cpu { threads: 2 },
        sequence: tokens,
        micro_batch: batch,
        source: WeightSource::Random { seed: 1 },
        method: Method::Full,
        base: Base::Plain,
        streamed_head: false,
        training: Some(Training { optimizer, recompute }),
        evaluate: true,
        scores: Scores::None,
        temperature: 1.0,
        generation: Some(Generation { slots: 1, capacity: tokens, chunk: 32 }),
        files: false,
    });
    set.phases.iter().map(|phase| lifetimes(&set, phase, Space::Device).buffers).collect()
}

/// Asserts the properties of a packing by comparing each pair of buffers: slow, and independent of the packing
/// algorithm.
fn check(buffers: &[Buffer], alignment: u64, packing: &Packing) {
    assert_eq!(packing.offsets.len(), buffers.len());
    let mut top = 0;
    for (i, (a, &from)) in buffers.iter().zip(&packing.offsets).enumerate() {
        assert_eq!(from % alignment, 0, "buffer {i} starts at {from}");
        top = top.max(from + a.bytes);
        for (j, (b, &other)) in buffers.iter().zip(&packing.offsets).enumerate().take(i) {
            let overlap_in_time = a.first <= b.last && b.first <= a.last;
            let share_bytes = from < other + b.bytes && other < from + a.bytes;
            assert!(
                !(overlap_in_time && share_bytes),
                "buffers {j} {b:?} at {other} and {i} {a:?} at {from} share bytes"
            );
        }
    }
    assert_eq!(packing.bytes, top, "the top is the end of the highest buffer");
    assert!(packing.bytes >= packing.lower_bound, "{} is below the bound {}", packing.bytes, packing.lower_bound);
    assert_eq!(packing.lower_bound, lower_bound(buffers, alignment));
}

/// At most three packings in a thousand miss the bound. A model with head norms in bf16 with recomputed norms misses it
/// by 0.12 %, and models that norm inputs and outputs miss it by less than 0.1 % while they generate. Phases that do
/// not depend on the recompute levels count once.
#[test]
fn preset_programs_meet_lower_bound() {
    const MAX_OVERHEAD: f64 = 0.2;
    let (mut all, mut missed) = (0, Vec::new());
    for name in preset_names() {
        let config = preset(name).unwrap();
        let (mut packed, mut buffers_max, mut worst) = (0, 0, 0.0f64);
        let sizes = [(DType::F32, [1, 512]), (DType::F32, [3, 777]), (DType::F32, [1, 4096]), (DType::Bf16, [8, 1024])];
        for (precision, [batch, tokens]) in sizes {
            let mut known: Vec<Vec<Buffer>> = Vec::new();
            for (recipe, recompute) in recipes(config.layers as usize) {
                for (number, buffers) in phases(&config, precision, [batch, tokens], recompute).into_iter().enumerate()
                {
                    if known.contains(&buffers) {
                        continue;
                    }
                    known.push(buffers.clone());
                    let buffers = &buffers;
                    let packing = pack(buffers, ALIGNMENT);
                    if recipe == "falling" && tokens == 777 {
                        check(buffers, ALIGNMENT, &packing);
                    }
                    let context =
                        format!("{name}, {precision:?}, {batch} × {tokens}, recompute {recipe}, phase {number}");
                    let overhead = 100.0 * packing.overhead();
                    assert!(overhead <= MAX_OVERHEAD, "{context}: overhead {overhead:.4} %");
                    if packing.bytes != packing.lower_bound {
                        missed.push(format!("{context}: overhead {overhead:.4} %"));
                    }
                    packed += 1;
                    buffers_max = buffers_max.max(buffers.len());
                    worst = worst.max(overhead);
                }
            }
        }
        all += packed;
        println!("{name:16} {packed:4} packings, up to {buffers_max:5} buffers, overhead at most {worst:.4} %");
    }
    assert!(1000 * missed.len() <= 3 * all, "{} of {all} miss the bound: {missed:#?}", missed.len());
}

fn buffer(bytes: u64, first: u32, last: u32) -> Buffer {
    Buffer { bytes, first, last }
}

#[test]
fn empty_input_takes_no_bytes() {
    assert_eq!(pack(&[], 256), Packing { offsets: vec![], bytes: 0, lower_bound: 0 });
    assert_eq!(pack(&[buffer(0, 3, 9)], 256), Packing { offsets: vec![0], bytes: 0, lower_bound: 0 });
}

#[test]
fn topmost_buffer_is_not_rounded() {
    let packing = pack_with_effort(&[buffer(1000, 0, 5), buffer(100, 2, 2), buffer(1024, 1, 7)], 256, 0);
    assert_eq!(packing.bytes, 1024 + 1024 + 100);
    assert_eq!(packing.offsets[1], 2048);
}

/// Both moments have the peak load. Only the long-lived small buffer can be topmost at both and save its rounding
/// twice.
#[test]
fn buffer_with_most_rounding_is_topmost() {
    let buffers = [buffer(768, 0, 0), buffer(512, 0, 1), buffer(768, 1, 1), buffer(4, 0, 1)];
    let packing = pack_with_effort(&buffers, 256, 0);
    check(&buffers, 256, &packing);
    assert_eq!((packing.offsets[3], packing.bytes, packing.lower_bound), (1280, 1284, 1284));
}

#[test]
fn effort_improves_hard_sets() {
    let mut improved = 0;
    for seed in 0..20 {
        let buffers = hard_set(seed, 200);
        let (plain, better) = (pack_with_effort(&buffers, 256, 0), pack_with_effort(&buffers, 256, 100_000));
        check(&buffers, 256, &better);
        assert!(better.bytes <= plain.bytes);
        improved += u32::from(better.bytes < plain.bytes);
        println!("set {seed}: {:.2} % → {:.2} %", 100.0 * plain.overhead(), 100.0 * better.overhead());
    }
    assert!(improved >= 10, "effort improved {improved} of 20 sets");
}

/// Returns random sizes and lifetimes, equal for a seed on every machine (a linear congruential generator).
fn hard_set(seed: u64, count: usize) -> Vec<Buffer> {
    let mut state = seed;
    let mut below = |bound: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % bound
    };
    let mut one = || {
        let first = below(150) as u32;
        buffer(1 + below(100_000), first, first + below(40) as u32)
    };
    (0..count).map(|_| one()).collect()
}

fn any_buffers() -> impl Strategy<Value = Vec<Buffer>> {
    let bytes = prop_oneof![0..2000u64, (0..9u64).prop_map(|units| 256 * units), 0..1u64 << 33];
    let one = (bytes, 0..60u32, 0..25u32).prop_map(|(bytes, first, length)| buffer(bytes, first, first + length));
    prop::collection::vec(one, 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn overlapping_lifetimes_share_no_byte(buffers in any_buffers(), alignment in 1..600u64, effort in 0..3000u64) {
        check(&buffers, alignment, &pack_with_effort(&buffers, alignment, effort));
    }

    #[test]
    fn lower_bound_is_largest_need_over_time(buffers in any_buffers(), alignment in 1..600u64) {
        let need = |moment: u32| {
            let live: Vec<u64> =
                buffers.iter().filter(|b| b.first <= moment && moment <= b.last).map(|b| b.bytes).collect();
            let rounded = |bytes: u64| bytes.div_ceil(alignment) * alignment;
            let sum: u64 = live.iter().map(|&bytes| rounded(bytes)).sum();
            sum - live.iter().map(|&bytes| rounded(bytes) - bytes).max().unwrap_or(0)
        };
        prop_assert_eq!(lower_bound(&buffers, alignment), (0..90).map(need).max().unwrap());
    }

    #[test]
    fn top_is_independent_of_input_order(
        (buffers, shuffled) in any_buffers().prop_flat_map(|b| (Just(b.clone()), Just(b).prop_shuffle())),
    ) {
        let (packing, shuffled_packing) = (pack_with_effort(&buffers, 256, 3000), pack_with_effort(&shuffled, 256, 3000));
        prop_assert_eq!(&packing, &pack_with_effort(&buffers, 256, 3000));
        prop_assert_eq!((packing.bytes, packing.lower_bound), (shuffled_packing.bytes, shuffled_packing.lower_bound));
    }

    /// Op numbers with large gaps are equivalent to the moments 0, 1, 2, …
    #[test]
    fn sparse_op_numbers_keep_lower_bound(buffers in any_buffers()) {
        let sparse: Vec<Buffer> =
            buffers.iter().map(|b| Buffer { first: b.first * 40_000_000, last: b.last * 40_000_000, ..*b }).collect();
        let (packing, sparse_packing) = (pack_with_effort(&buffers, 256, 1000), pack_with_effort(&sparse, 256, 1000));
        check(&sparse, 256, &sparse_packing);
        prop_assert_eq!(packing.lower_bound, sparse_packing.lower_bound);
    }
}
