//! What packing promises: buffers that live together never share a byte, the top is what it says, nothing beats the
//! bound, and on training steps of every published shape the bound is met exactly. The steps here imitate the traces of
//! real Programs (kept activations, recompute, big short-lived workspaces); those Programs have tests of their own.

use plimsoll_plan::packing::{Buffer, Packing, lower_bound, pack, pack_with_effort};
use proptest::prelude::*;

const ALIGNMENT: u64 = 256;

/// Hidden D, layers L, heads H, kv heads K, head size, ffn F, vocabulary V.
struct Shape {
    name: &'static str,
    hidden: u64,
    layers: usize,
    heads: u64,
    kv_heads: u64,
    head: u64,
    ffn: u64,
    vocabulary: u64,
}

const fn shape(name: &'static str, dims: [u64; 7]) -> Shape {
    let [hidden, layers, heads, kv_heads, head, ffn, vocabulary] = dims;
    Shape { name, hidden, layers: layers as usize, heads, kv_heads, head, ffn, vocabulary }
}

/// The presets, from each model's public `config.json`.
const PRESETS: [Shape; 16] = [
    shape("smollm2-135m", [576, 30, 9, 3, 64, 1536, 49152]),
    shape("smollm2-360m", [960, 32, 15, 5, 64, 2560, 49152]),
    shape("tinyllama-1.1b", [2048, 22, 32, 4, 64, 5632, 32000]),
    shape("llama-3.2-1b", [2048, 16, 32, 8, 64, 8192, 128256]),
    shape("llama-3.2-3b", [3072, 28, 24, 8, 128, 8192, 128256]),
    shape("llama-3.1-8b", [4096, 32, 32, 8, 128, 14336, 128256]),
    shape("llama-2-7b", [4096, 32, 32, 32, 128, 11008, 32000]),
    shape("llama-2-13b", [5120, 40, 40, 40, 128, 13824, 32000]),
    shape("mistral-7b-v0.3", [4096, 32, 32, 8, 128, 14336, 32768]),
    shape("qwen2.5-0.5b", [896, 24, 14, 2, 64, 4864, 151936]),
    shape("qwen2.5-1.5b", [1536, 28, 12, 2, 128, 8960, 151936]),
    shape("qwen2.5-7b", [3584, 28, 28, 4, 128, 18944, 152064]),
    shape("qwen2.5-14b", [5120, 48, 40, 8, 128, 13824, 152064]),
    shape("qwen2.5-32b", [5120, 64, 40, 8, 128, 27648, 152064]),
    shape("qwen3-0.6b", [1024, 28, 16, 8, 128, 3072, 151936]),
    shape("qwen3-8b", [4096, 36, 32, 8, 128, 12288, 151936]),
];

/// What a layer's backward makes again instead of keeping; each level includes those before it.
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug)]
enum Recompute {
    Nothing,
    NormsAndSwiglu,
    FeedForward,
    Attention,
    Block,
}
use Recompute::*;

/// A step being written down, op by op.
#[derive(Default)]
struct Trace {
    buffers: Vec<Buffer>,
    op: u32,
}

impl Trace {
    /// One op: it reads, it has a workspace of its own, it makes new tensors of these sizes.
    fn op<const N: usize>(&mut self, reads: &[usize], workspace: u64, makes: [u64; N]) -> [usize; N] {
        self.op += 1;
        for &read in reads {
            self.buffers[read].last = self.op;
        }
        if workspace > 0 {
            self.buffers.push(Buffer { bytes: workspace, first: self.op, last: self.op });
        }
        makes.map(|bytes| {
            self.buffers.push(Buffer { bytes, first: self.op, last: self.op });
            self.buffers.len() - 1
        })
    }
}

/// What the backward of a layer reads, apart from the block's input: tensors that were kept, or were made again.
#[derive(Default, Clone, Copy)]
struct Inside {
    norm: Option<[usize; 2]>,
    attention: Option<[usize; 5]>,
    middle: Option<usize>,
    ffn_norm: Option<[usize; 2]>,
    gate_up: Option<[usize; 2]>,
    swiglu: Option<usize>,
}

/// One micro-batch: B × T tokens of f32 (R = B · T rows), forward, loss and backward.
struct Step<'a> {
    shape: &'a Shape,
    rows: u64,
    trace: Trace,
}

impl Step<'_> {
    fn wide(&self, columns: u64) -> u64 {
        4 * self.rows * columns
    }

    /// Makes what is missing of a block whose input is `x`, and its output.
    fn forward(&mut self, x: usize, inside: &mut Inside, output: bool) -> Option<usize> {
        let (s, rows) = (self.shape, self.rows);
        let (hidden, ffn) = (self.wide(s.hidden), self.wide(s.ffn));
        let (q, kv) = (self.wide(s.heads * s.head), self.wide(s.kv_heads * s.head));
        let t = &mut self.trace;
        let [h, rstd] = *inside.norm.get_or_insert_with(|| t.op(&[x], 0, [hidden, 4 * rows]));
        let attention = *inside.attention.get_or_insert_with(|| {
            let [query] = t.op(&[h, rstd], 0, [q]);
            let [key] = t.op(&[h], 0, [kv]);
            let [value] = t.op(&[h], 0, [kv]);
            t.op(&[query, key], 0, []);
            let [mixed, lse] = t.op(&[query, key, value], 64 << 10, [q, 4 * rows * s.heads]);
            [query, key, value, mixed, lse]
        });
        let middle = *inside.middle.get_or_insert_with(|| t.op(&[x, attention[3]], 0, [hidden])[0]);
        let [h, rstd] = *inside.ffn_norm.get_or_insert_with(|| t.op(&[middle], 0, [hidden, 4 * rows]));
        let [gate, up] = *inside.gate_up.get_or_insert_with(|| {
            let [gate] = t.op(&[h, rstd], 0, [ffn]);
            let [up] = t.op(&[h], 0, [ffn]);
            [gate, up]
        });
        let swiglu = *inside.swiglu.get_or_insert_with(|| t.op(&[gate, up], 0, [ffn])[0]);
        output.then(|| t.op(&[middle, swiglu], 0, [hidden])[0])
    }

    /// What is left of a block after its forward.
    fn forget(inside: &mut Inside, recompute: Recompute) {
        if recompute >= NormsAndSwiglu {
            (inside.norm, inside.ffn_norm, inside.swiglu) = (None, None, None);
        }
        if recompute >= FeedForward {
            inside.gate_up = None;
        }
        if recompute >= Attention {
            inside.attention = None;
        }
        if recompute >= Block {
            inside.middle = None;
        }
    }

    /// From the gradient of a block's output to that of its input.
    fn backward(&mut self, x: usize, mut inside: Inside, gradient: usize) -> usize {
        self.forward(x, &mut inside, false);
        let s = self.shape;
        let (hidden, ffn) = (self.wide(s.hidden), self.wide(s.ffn));
        let (q, kv) = (self.wide(s.heads * s.head), self.wide(s.kv_heads * s.head));
        let (row_sums, lse) = (self.wide(s.heads), self.wide(1));
        let t = &mut self.trace;
        let ([h, rstd], [h2, rstd2]) = (inside.norm.unwrap(), inside.ffn_norm.unwrap());
        let [query, key, value, mixed, log_sums] = inside.attention.unwrap();
        let [gate, up] = inside.gate_up.unwrap();
        t.op(&[inside.swiglu.unwrap(), gradient], 0, []);
        let [d_swiglu] = t.op(&[gradient], 0, [ffn]);
        t.op(&[d_swiglu, gate, up], 0, []); // in place: gate and up become their gradients
        t.op(&[h2, gate], 0, []);
        t.op(&[h2, up], 0, []);
        let [d_h2] = t.op(&[gate], 0, [hidden]);
        t.op(&[up, d_h2], 0, []);
        let [d_middle] = t.op(&[d_h2, inside.middle.unwrap(), rstd2, gradient], 4 * 64 * s.hidden, [hidden]);
        t.op(&[mixed, d_middle], 0, []);
        let [d_mixed] = t.op(&[d_middle], 0, [q]);
        let [sums] = t.op(&[d_mixed, mixed], 0, [row_sums]);
        let [d_query, d_key, d_value] = t.op(&[query, key, value, d_mixed, log_sums, sums], lse, [q, kv, kv]);
        t.op(&[d_query, d_key], 0, []);
        let [d_h] = t.op(&[d_query, h], 0, [hidden]);
        t.op(&[d_key, h, d_h], 0, []);
        t.op(&[d_value, h, d_h], 0, []);
        t.op(&[d_h, x, rstd, d_middle], 4 * 64 * s.hidden, [hidden])[0]
    }

    /// The loss over blocks of rows: logits of a block are a workspace, the gradient of the hidden state is made.
    fn loss(&mut self, x: usize) -> usize {
        let hidden = self.wide(self.shape.hidden);
        let [h, rstd] = self.trace.op(&[x], 0, [hidden, 4 * self.rows]);
        let block = self.rows.min(512);
        let workspace = 4 * block * self.shape.vocabulary;
        let [losses, d_h] = self.trace.op(&[h], workspace, [4 * self.rows, hidden]);
        for _ in 1..self.rows.div_ceil(block) {
            self.trace.op(&[h, d_h, losses], workspace, []);
        }
        self.trace.op(&[losses], 0, [4]);
        self.trace.op(&[d_h, x, rstd], 4 * 64 * self.shape.hidden, [hidden])[0]
    }
}

/// The lifetimes of one step; `recompute` says what each layer makes again.
fn step(shape: &Shape, batch: u64, tokens: u64, recompute: impl Fn(usize) -> Recompute) -> Vec<Buffer> {
    let mut step = Step { shape, rows: batch * tokens, trace: Trace::default() };
    let hidden = step.wide(shape.hidden);
    let [ids, scalars] = step.trace.op(&[], 0, [4 * batch * tokens, 4 * 12]);
    let [mut x] = step.trace.op(&[ids], 0, [hidden]);
    let mut kept = Vec::new();
    for layer in 0..shape.layers {
        let mut inside = Inside::default();
        let output = step.forward(x, &mut inside, true).unwrap();
        Step::forget(&mut inside, recompute(layer));
        kept.push((x, inside));
        x = output;
    }
    let mut gradient = step.loss(x);
    for (x, inside) in kept.into_iter().rev() {
        gradient = step.backward(x, inside, gradient);
    }
    step.trace.op(&[gradient, ids, scalars], 0, []);
    step.trace.buffers
}

type Recipe = (&'static str, Box<dyn Fn(usize) -> Recompute>);

/// The recipes to pack: uniform ones and the mixtures that a search ends on.
fn recipes(layers: usize) -> Vec<Recipe> {
    vec![
        ("nothing", Box::new(|_| Nothing)),
        ("norms", Box::new(|_| NormsAndSwiglu)),
        ("ffn", Box::new(|_| FeedForward)),
        ("attention", Box::new(|_| Attention)),
        ("block", Box::new(|_| Block)),
        ("half", Box::new(move |layer| if layer < layers / 2 { Block } else { Nothing })),
        ("every third", Box::new(|layer| if layer % 3 == 0 { FeedForward } else { NormsAndSwiglu })),
        (
            "falling",
            Box::new(move |layer| [Block, Attention, FeedForward, NormsAndSwiglu, Nothing][5 * layer / layers]),
        ),
    ]
}

/// Compares each pair: slow, and independent of how packing finds its way.
fn check(buffers: &[Buffer], alignment: u64, packing: &Packing) {
    assert_eq!(packing.offsets.len(), buffers.len());
    let mut top = 0;
    for (i, (a, &from)) in buffers.iter().zip(&packing.offsets).enumerate() {
        assert_eq!(from % alignment, 0, "buffer {i} starts at {from}");
        top = top.max(from + a.bytes);
        for (j, (b, &other)) in buffers.iter().zip(&packing.offsets).enumerate().take(i) {
            let together = a.first <= b.last && b.first <= a.last;
            let share = from < other + b.bytes && other < from + a.bytes;
            assert!(!(together && share), "buffers {j} {b:?} at {other} and {i} {a:?} at {from} share bytes");
        }
    }
    assert_eq!(packing.bytes, top, "the top is the byte past the last one used");
    assert!(packing.bytes >= packing.lower_bound, "{} beats the bound {}", packing.bytes, packing.lower_bound);
    assert_eq!(packing.lower_bound, lower_bound(buffers, alignment));
}

#[test]
fn steps_of_all_presets_meet_the_bound_exactly() {
    for shape in &PRESETS {
        let (mut buffers_max, mut worst) = (0, 0.0f64);
        for (batch, tokens) in [(1, 512), (3, 777), (8, 1024), (2, 37)] {
            for (name, recompute) in recipes(shape.layers) {
                let buffers = step(shape, batch, tokens, recompute);
                let packing = pack(&buffers, ALIGNMENT);
                if tokens == 777 {
                    check(&buffers, ALIGNMENT, &packing);
                }
                let context = format!("{} {batch} × {tokens}, recompute {name}", shape.name);
                assert_eq!(
                    packing.bytes,
                    packing.lower_bound,
                    "{context}: overhead {:.4} %",
                    100.0 * packing.overhead()
                );
                buffers_max = buffers_max.max(buffers.len());
                worst = worst.max(packing.overhead());
            }
        }
        println!("{:16} up to {buffers_max:5} buffers, overhead at most {:.4} %", shape.name, 100.0 * worst);
    }
}

fn buffer(bytes: u64, first: u32, last: u32) -> Buffer {
    Buffer { bytes, first, last }
}

#[test]
fn nothing_takes_nothing() {
    assert_eq!(pack(&[], 256), Packing { offsets: vec![], bytes: 0, lower_bound: 0 });
    assert_eq!(pack(&[buffer(0, 3, 9)], 256), Packing { offsets: vec![0], bytes: 0, lower_bound: 0 });
}

#[test]
fn the_topmost_buffer_is_not_rounded() {
    let packing = pack_with_effort(&[buffer(1000, 0, 5), buffer(100, 2, 2), buffer(1024, 1, 7)], 256, 0);
    assert_eq!(packing.bytes, 1024 + 1024 + 100);
    assert_eq!(packing.offsets[1], 2048);
}

/// Both moments are full; only the long-lived small buffer can be the topmost of both and save its rounding twice.
#[test]
fn the_buffer_with_most_rounding_is_put_on_top() {
    let buffers = [buffer(768, 0, 0), buffer(512, 0, 1), buffer(768, 1, 1), buffer(4, 0, 1)];
    let packing = pack_with_effort(&buffers, 256, 0);
    check(&buffers, 256, &packing);
    assert_eq!((packing.offsets[3], packing.bytes, packing.lower_bound), (1280, 1284, 1284));
}

#[test]
fn effort_brings_hard_sets_down() {
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

/// Random sizes and lifetimes, the same for a seed everywhere (a linear congruential stream).
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
    #[test]
    fn buffers_that_live_together_share_no_byte(buffers in any_buffers(), alignment in 1..600u64, effort in 0..3000u64) {
        check(&buffers, alignment, &pack_with_effort(&buffers, alignment, effort));
    }

    #[test]
    fn the_bound_is_the_need_of_the_worst_moment(buffers in any_buffers(), alignment in 1..600u64) {
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
    fn the_top_does_not_depend_on_the_order_of_the_input(
        (buffers, shuffled) in any_buffers().prop_flat_map(|b| (Just(b.clone()), Just(b).prop_shuffle())),
    ) {
        let (packing, again) = (pack_with_effort(&buffers, 256, 3000), pack_with_effort(&shuffled, 256, 3000));
        prop_assert_eq!(&packing, &pack_with_effort(&buffers, 256, 3000));
        prop_assert_eq!((packing.bytes, packing.lower_bound), (again.bytes, again.lower_bound));
    }

    /// Op numbers with wide holes between them mean the same as the moments 0, 1, 2, …
    #[test]
    fn sparse_op_numbers_change_nothing(buffers in any_buffers()) {
        let sparse: Vec<Buffer> =
            buffers.iter().map(|b| Buffer { first: b.first * 40_000_000, last: b.last * 40_000_000, ..*b }).collect();
        let (packing, wide) = (pack_with_effort(&buffers, 256, 1000), pack_with_effort(&sparse, 256, 1000));
        check(&sparse, 256, &wide);
        prop_assert_eq!(packing.lower_bound, wide.lower_bound);
    }
}
