//! Random cases: a small model, what is done with it, its data. Everything is a function of (seed, number).

use super::place::Place;
use plimsoll_core::{Bytes, DType, DeviceSpec, Link, Rates, Recipe, RecomputeLevel};
use plimsoll_plan::search::{Lossy, Pins, Question};
use plimsoll_program::Share;
use plimsoll_program::models::decoder::{AdamState, Generation, Optimizer, Source};
use plimsoll_program::models::{ModelConfig, ModelType, RopeScaling};
use plimsoll_train::data::Rows;
use std::fmt;

/// Numbers drawn one after another (splitmix64 of Steele, Lea and Flood).
pub struct Draw(u64);

impl Draw {
    /// The draws of one case.
    pub fn new(seed: u64, number: u64) -> Draw {
        let mut draw = Draw(seed);
        let mixed = draw.next();
        Draw(mixed ^ number.wrapping_mul(0xd6e8_feb8_6659_fd93))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 up to 1.
    pub fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Whether something happens that happens so often.
    pub fn chance(&mut self, share: f64) -> bool {
        self.share() < share
    }

    /// A whole number, both ends included.
    pub fn from(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    /// A whole number, small ones as often as large ones.
    pub fn scaled(&mut self, low: u64, high: u64) -> u64 {
        let (low_log, high_log) = ((low as f64).ln(), ((high + 1) as f64).ln());
        ((low_log + self.share() * (high_log - low_log)).exp() as u64).clamp(low, high)
    }

    /// One of several.
    pub fn of<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.from(0, list.len() as u64 - 1) as usize].clone()
    }

    /// A level for each layer.
    pub fn levels(&mut self, layers: u64) -> Vec<RecomputeLevel> {
        (0..layers).map(|_| self.of(&RecomputeLevel::ALL)).collect()
    }
}

/// What a case looks for in the budget.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Load {
    /// Less than anything needs; the case then runs at the budget that the refusal names.
    TooSmall,
    /// So far from the smallest budget (0) to that of the fastest recipe (1).
    Between(f64),
    /// More than enough.
    Plenty,
}

/// A small model and what is done with it.
#[derive(Clone, Debug)]
pub struct Case {
    /// Of the whole soak.
    pub seed: u64,
    /// Within the soak.
    pub number: u64,
    /// The model.
    pub config: ModelConfig,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Sequences of a step.
    pub sequences: u64,
    /// Threads that compute.
    pub threads: u32,
    /// How weights change, where they do.
    pub optimizer: Option<Optimizer>,
    /// Whether the loss is evaluated.
    pub evaluate: bool,
    /// Whether tokens are generated.
    pub generation: Option<Generation>,
    /// Where weights come from.
    pub source: Source,
    /// Clipping; 0 clips nothing.
    pub clip_norm: f64,
    /// Of the device.
    pub load: Load,
    /// The device.
    pub place: Place,
    /// Its arithmetic.
    pub precision: DType,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.config;
        write!(
            f,
            "--seed {} --case {} --device {} --dtype {}: {} {} layers, hidden {}, heads {}/{}×{}, ffn {}, vocab {}{}; {} × {} tokens, {} thread(s), {}{}{}, {:?}",
            self.seed,
            self.number,
            self.place,
            self.precision,
            c.model_type,
            c.layers,
            c.hidden,
            c.heads,
            c.kv_heads,
            c.head_dim,
            c.ffn,
            c.vocab,
            if c.tied { " tied" } else { "" },
            self.sequences,
            self.sequence,
            self.threads,
            match self.optimizer {
                Some(Optimizer::AdamW { .. }) => "adamw",
                Some(Optimizer::Sgd { .. }) => "sgd",
                None => "no training",
            },
            if self.evaluate { ", evaluate" } else { "" },
            if self.generation.is_some() { ", generate" } else { "" },
            self.load
        )
    }
}

fn config(draw: &mut Draw) -> ModelConfig {
    let model_type = draw.of(&ModelType::ALL);
    let kv_heads = draw.of(&[1, 1, 2, 3]);
    let heads = kv_heads * draw.of(&[1, 1, 2, 4]);
    let hidden = draw.scaled(8, 128);
    // transformers refuses a llama whose hidden size is no multiple of its heads.
    let hidden = if model_type == ModelType::Llama { hidden.next_multiple_of(heads) } else { hidden };
    let original = 1 << draw.from(2, 6);
    ModelConfig {
        model_type,
        hidden,
        layers: draw.from(1, 6),
        heads,
        kv_heads,
        head_dim: 2 * draw.scaled(1, 24),
        ffn: draw.scaled(1, 300),
        vocab: draw.scaled(8, 4000),
        tied: draw.chance(0.5),
        norm_eps: draw.of(&[1e-5, 1e-6]),
        rope_theta: draw.of(&[1e4, 5e5, 1e6]),
        rope_scaling: draw.of(&[
            RopeScaling::None,
            RopeScaling::None,
            RopeScaling::Linear { factor: 4.0 },
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: original,
            },
        ]),
        qkv_bias: model_type.qkv_bias(),
        qk_norm: model_type.qk_norm(),
        max_positions: 4096,
        bos: None,
        eos: vec![0],
        // Larger than in real models, so that small differences show.
        init_std: draw.of(&[0.02, 0.1]),
    }
}

impl Case {
    /// The same case on another device, in another arithmetic.
    pub fn on(self, place: Place, precision: DType) -> Case {
        Case { place, precision, ..self }
    }

    /// A case by its number, on the CPU in f32.
    pub fn new(seed: u64, number: u64) -> Case {
        let mut draw = Draw::new(seed, number);
        let config = config(&mut draw);
        config.validate().expect("random models are sound");
        let sequence = draw.scaled(1, 64);
        let optimizer = draw.chance(0.9).then(|| match draw.from(0, 3) {
            0 => Optimizer::Sgd { momentum: 0.0, decay: 0.0 },
            1 => Optimizer::Sgd { momentum: 0.9, decay: 0.1 },
            // With the usual epsilon of 1e-8, gradients that are zero but for rounding become steps.
            _ => Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-6, decay: 0.1, state: AdamState::Full },
        });
        let chunk = draw.scaled(2, 16);
        let generation = Generation { capacity: chunk * draw.from(1, 5), chunk };
        let generation = draw.chance(if optimizer.is_some() { 0.3 } else { 0.6 }).then_some(generation);
        let dtypes = config.hf_parameters().iter().map(|_| draw.of(&[DType::F32, DType::Bf16, DType::F16])).collect();
        let source = if draw.chance(0.3) { Source::Files { dtypes } } else { Source::Random { seed: number } };
        Case {
            seed,
            number,
            sequence,
            sequences: draw.scaled(1, 12),
            threads: draw.from(1, 2) as u32,
            evaluate: optimizer.is_some() && draw.chance(0.8) || generation.is_none(),
            optimizer,
            generation,
            source,
            clip_norm: draw.of(&[0.0, 0.5, 1e9]),
            load: match draw.from(0, 5) {
                0 => Load::TooSmall,
                1 => Load::Plenty,
                _ => Load::Between(draw.share()),
            },
            place: Place::Cpu,
            precision: DType::F32,
            config,
        }
    }

    /// The device under a load line.
    pub fn device(&self, budget: Bytes, threads: u32) -> DeviceSpec {
        DeviceSpec {
            name: "device".into(),
            kind: self.place.kind(),
            budget,
            charges: Bytes::ZERO,
            charges_measured: false,
            link_measured: false,
            nccl: None,
            team_link: Link::MEMORY,
            threads,
            rates: Rates {
                f32_flops: 1e11,
                bf16_flops: 1e11,
                memory_bytes_per_second: 1e10,
                op_seconds: 1e-6,
                host_link: Link { bytes_per_second: 1e10, latency_seconds: 0.0 },
                measured: false,
                ops: plimsoll_core::OpRates::default(),
            },
        }
    }

    /// What the planner is asked.
    pub fn question<'a>(&'a self, device: &'a DeviceSpec, precision: DType) -> Question<'a> {
        Question {
            config: &self.config,
            precision,
            sequence: self.sequence,
            sequences: self.sequences,
            source: self.source.clone(),
            optimizer: self.optimizer,
            evaluate: self.evaluate,
            generation: self.generation,
            device,
            host: self.place.host(),
            lossy: Lossy::default(),
            pins: Pins::default(),
            rungs: vec![],
            share: Share::ALONE,
        }
    }

    /// A recipe with one level everywhere.
    pub fn uniform(&self, micro_batch: u64, level: RecomputeLevel) -> Recipe {
        Recipe::on_device(micro_batch as u32, vec![level; self.config.layers as usize])
    }

    /// Rows with several documents each and some labels that do not count.
    pub fn rows(&self, count: u64, salt: u64) -> Rows {
        let mut draw = Draw::new(self.seed ^ salt, self.number);
        let mut rows = Rows::new(count, self.sequence);
        for _ in 0..count {
            let (labelled, ends) = (draw.share(), draw.share() * 0.2);
            let mut start = 0;
            for at in 0..self.sequence as i32 {
                if at > 0 && draw.chance(ends) {
                    start = at;
                }
                let counts = draw.chance(labelled);
                rows.tokens.push(draw.from(0, self.config.vocab - 1) as i32);
                rows.labels.push(if counts { draw.from(0, self.config.vocab - 1) as i32 } else { -100 });
                rows.positions.push(at - start);
                rows.document_start.push(start);
                rows.weights.push(if counts { 1.0 } else { 0.0 });
            }
        }
        // At least one token counts, so that there is a loss to compare.
        rows.labels[0] = 0;
        rows.weights[0] = 1.0;
        rows
    }

    /// A prompt of at least two tokens, with room for at most three behind it: the cache is filled to its end.
    pub fn prompt(&self, generation: Generation) -> Vec<i32> {
        let mut draw = Draw::new(!self.seed, self.number);
        let length = generation.capacity.saturating_sub(draw.from(0, 3)).max(2);
        (0..length).map(|_| draw.from(0, self.config.vocab - 1) as i32).collect()
    }
}
