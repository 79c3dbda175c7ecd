//! Random cases of the soak: a small model, its data, its device and its budget. Every value is a function of
//! (seed, number), so that a case can be repeated alone.

use super::test_device::TestDevice;
use plimsoll_core::{Bytes, DType, DeviceSpec, Link, Rates, Recipe, RecomputeLevel};
use plimsoll_plan::search::{LossyOptions, PinnedChoices, PlanRequest};
use plimsoll_program::Share;
use plimsoll_program::models::decoder::{AdamState, Generation, Optimizer, Scores, WeightSource};
use plimsoll_program::models::{Extras, ModelConfig, ModelType, QueryGrowth, RopeScaling};
use plimsoll_train::data::Rows;
use std::fmt;

/// Generator of random numbers (splitmix64 of Steele, Lea and Flood).
pub struct Rng(u64);

impl Rng {
    /// Returns the generator for case `number` of the soak with this seed.
    pub fn new(seed: u64, number: u64) -> Rng {
        let mut rng = Rng(seed);
        let mixed = rng.next();
        Rng(mixed ^ number.wrapping_mul(0xd6e8_feb8_6659_fd93))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number from 0 (inclusive) to 1 (exclusive).
    pub fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns true with the probability `share`.
    pub fn chance(&mut self, share: f64) -> bool {
        self.fraction() < share
    }

    /// Returns an integer from `low` to `high`, both included.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    /// Returns an integer from `low` to `high`, both included, whose logarithm is uniformly distributed.
    pub fn log_range(&mut self, low: u64, high: u64) -> u64 {
        let (low_log, high_log) = ((low as f64).ln(), ((high + 1) as f64).ln());
        ((low_log + self.fraction() * (high_log - low_log)).exp() as u64).clamp(low, high)
    }

    /// Returns one element of a list.
    pub fn pick<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.range(0, list.len() as u64 - 1) as usize].clone()
    }

    /// Returns a random recompute level for each layer.
    pub fn recompute_levels(&mut self, layers: u64) -> Vec<RecomputeLevel> {
        (0..layers).map(|_| self.pick(&RecomputeLevel::ALL)).collect()
    }
}

/// The log-probabilities that cases with training compute, by the number of the case.
const SCORES: [Scores; 4] = [Scores::Present, Scores::None, Scores::PresentAndInitial, Scores::None];

/// The budget of a case, relative to the memory that its model needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Load {
    /// Less than any recipe needs. After the refusal, the case runs with the budget that the refusal names.
    TooSmall,
    /// A budget between two others: 0 stands for the smallest that fits, 1 for that of the fastest recipe.
    Between(f64),
    /// More than any recipe needs.
    Plenty,
}

/// A small model with everything that a run needs.
#[derive(Clone, Debug)]
pub struct Case {
    /// Seed of the soak.
    pub seed: u64,
    /// Number of the case within the soak.
    pub number: u64,
    /// Shape of the model.
    pub config: ModelConfig,
    /// Number of tokens per sequence.
    pub sequence: u64,
    /// Number of sequences per step.
    pub sequences: u64,
    /// Number of CPU threads.
    pub threads: u32,
    /// Optimizer; `None` for a case without training.
    pub optimizer: Option<Optimizer>,
    /// Whether the case evaluates the loss.
    pub evaluate: bool,
    /// The log-probabilities of labels that the case computes.
    pub scores: Scores,
    /// Divisor of the logits in the loss.
    pub temperature: f64,
    /// Parameters of text generation; `None` if the case generates nothing.
    pub generation: Option<Generation>,
    /// Source of the initial weights.
    pub source: WeightSource,
    /// Maximum gradient norm; 0 disables clipping.
    pub clip_norm: f64,
    /// Budget of the device, relative to the memory that the model needs.
    pub load: Load,
    /// Device on which the case runs.
    pub device: TestDevice,
    /// Dtype of the case's arithmetic.
    pub precision: DType,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.config;
        write!(
            f,
            "--seed {} --case {} --device {} --dtype {}: {} {} layers, hidden {}, heads {}/{}×{}, ffn {}, vocab {}{}; {} × {} tokens, {} thread(s), {}{}{}{}, {:?}",
            self.seed,
            self.number,
            self.device,
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
            ["", ", score", ", scores"][self.scores.count() as usize],
            if self.generation.is_some() { ", generate" } else { "" },
            self.load
        )
    }
}

fn config(rng: &mut Rng) -> ModelConfig {
    let model_type = rng.pick(&ModelType::ALL);
    let kv_heads = rng.pick(&[1, 1, 2, 3]);
    let heads = kv_heads * rng.pick(&[1, 1, 2, 4]);
    let hidden = rng.log_range(8, 128);
    // The `transformers` library refuses such models with a hidden size that is not a multiple of the number of heads.
    let is_multiple = matches!(model_type, ModelType::Llama | ModelType::Gemma2 | ModelType::Gemma3Text);
    let hidden = if is_multiple { hidden.next_multiple_of(heads) } else { hidden };
    let original = 1 << rng.range(2, 6);
    let scaling = rng.pick(&[
        RopeScaling::None,
        RopeScaling::None,
        RopeScaling::Linear { factor: 4.0 },
        RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: original,
        },
    ]);
    let mut extras = extras(rng, model_type);
    if model_type == ModelType::Ministral3 {
        extras.query_growth = Some(QueryGrowth { beta: 0.5, period: original });
    }
    let [attention_bias, ffn_bias] = [(); 2].map(|()| model_type.has_bias_switches() && rng.chance(0.3));
    ModelConfig {
        model_type,
        hidden,
        layers: rng.range(1, 6),
        heads,
        kv_heads,
        head_dim: 2 * rng.log_range(1, 24),
        ffn: rng.log_range(1, 300),
        vocab: rng.log_range(8, 4000),
        tied: rng.chance(0.5),
        norm_eps: rng.pick(&[1e-5, 1e-6]),
        rope_theta: rng.pick(&[1e4, 5e5, 1e6]),
        rope_scaling: if model_type.scales_frequencies() { scaling } else { RopeScaling::None },
        qkv_bias: model_type.qkv_bias() || attention_bias,
        attention_out_bias: attention_bias,
        ffn_bias,
        qk_norm: model_type.qk_norm(),
        max_positions: 4096,
        bos: None,
        eos: vec![0],
        // Larger than in real models, so that small differences become visible.
        init_std: rng.pick(&[0.02, 0.1]),
        extras,
    }
}

/// Returns parts that only some families have: in some cases a sliding window, and what the family always has.
fn extras(rng: &mut Rng, model_type: ModelType) -> Extras {
    let has_windows =
        !matches!(model_type, ModelType::Llama | ModelType::Granite | ModelType::Olmo2) && rng.chance(0.5);
    let in_all_layers = matches!(model_type, ModelType::Mistral | ModelType::Ministral3 | ModelType::Phi3);
    let window = has_windows.then(|| rng.log_range(1, 32));
    let mut extras = Extras { window, ..Extras::of_family(model_type) };
    if has_windows && !in_all_layers {
        extras.full_layers = vec![0];
    }
    if model_type == ModelType::SmolLm3 {
        extras.unrotated_layers = vec![rng.range(0, 2)];
    }
    if model_type.caps_logits() {
        extras.attention_multiplier = Some(rng.pick(&[0.25, 1.0]));
        extras.score_softcap = (model_type.caps_scores() && rng.chance(0.7)).then_some(2.0);
        extras.logit_softcap = rng.chance(0.7).then_some(5.0);
    }
    if extras.local_rope_theta.is_some() {
        extras.local_rope_theta = Some(rng.pick(&[1e3, 5e5]));
    }
    if model_type == ModelType::Granite {
        extras.embedding_multiplier = rng.pick(&[1.0, 12.0]);
        extras.residual_multiplier = rng.pick(&[1.0, 0.22]);
        extras.attention_multiplier = Some(rng.pick(&[1.0, 0.1]));
        extras.logits_scaling = rng.pick(&[1.0, 8.0]);
    }
    extras
}

impl Case {
    /// Returns the case with another device and arithmetic.
    pub fn on(self, device: TestDevice, precision: DType) -> Case {
        Case { device, precision, ..self }
    }

    /// Returns case `number` of the soak with this seed, on the CPU in f32.
    pub fn new(seed: u64, number: u64) -> Case {
        let mut rng = Rng::new(seed, number);
        let config = config(&mut rng);
        config.validate().expect("random models are sound");
        let sequence = rng.log_range(1, 64);
        let optimizer = rng.chance(0.9).then(|| match rng.range(0, 3) {
            0 => Optimizer::Sgd { momentum: 0.0, decay: 0.0 },
            1 => Optimizer::Sgd { momentum: 0.9, decay: 0.1 },
            // With the usual epsilon of 1e-8, rounding noise in gradients that should be zero would become full steps.
            _ => Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-6, decay: 0.1, state: AdamState::Full },
        });
        let chunk = rng.log_range(2, 16);
        let one = Generation { slots: 1, capacity: chunk * rng.range(1, 5), chunk };
        let several = Generation { slots: 2 + number % 5, capacity: 32 + number % 24, chunk: 8 + 8 * (number % 3) };
        let generation = if number.is_multiple_of(2) { several } else { one };
        let generation = rng.chance(if optimizer.is_some() { 0.3 } else { 0.6 }).then_some(generation);
        let dtypes = config.hf_parameters().iter().map(|_| rng.pick(&[DType::F32, DType::Bf16, DType::F16])).collect();
        let source =
            if rng.chance(0.3) { WeightSource::Files { dtypes } } else { WeightSource::Random { seed: number } };
        Case {
            seed,
            number,
            sequence,
            sequences: rng.log_range(1, 12),
            threads: rng.range(1, 2) as u32,
            evaluate: optimizer.is_some() && rng.chance(0.8) || generation.is_none(),
            scores: if optimizer.is_some() { SCORES[(number % 4) as usize] } else { Scores::None },
            temperature: if number.is_multiple_of(4) { 0.7 } else { 1.0 },
            optimizer,
            generation,
            source,
            clip_norm: rng.pick(&[0.0, 0.5, 1e9]),
            load: match rng.range(0, 5) {
                0 => Load::TooSmall,
                1 => Load::Plenty,
                _ => Load::Between(rng.fraction()),
            },
            device: TestDevice::Cpu,
            precision: DType::F32,
            config,
        }
    }

    /// Returns case `number` of the attention cases with this seed: one or two layers with heads of 64 to 128 elements,
    /// as in published models, and sequences of 130 to 700 tokens. All other sizes are small.
    pub fn attention(seed: u64, number: u64) -> Case {
        let mut rng = Rng::new(seed ^ 5, number);
        let mut case = Case::new(seed, number);
        let config = &mut case.config;
        config.layers = rng.range(1, 2);
        config.kv_heads = rng.range(1, 2);
        config.heads = config.kv_heads * rng.range(1, 8);
        config.head_dim = rng.pick(&[64, 80, 96, 112, 128]);
        config.hidden = 16 * rng.range(1, 4);
        if config.model_type == ModelType::Llama {
            config.hidden = config.hidden.next_multiple_of(config.heads);
        }
        config.ffn = rng.range(16, 64);
        config.vocab = rng.range(32, 256);
        case.sequence = rng.range(130, 700);
        case.sequences = rng.range(1, 3);
        // More new tokens at once than the kernels for few rows take, so that those for many rows run too.
        let chunk = rng.range(5, 200);
        case.generation = rng.chance(0.7).then_some(Generation { slots: 1, capacity: chunk * rng.range(2, 3), chunk });
        case.load = Load::Plenty;
        // The weights have one dtype for each parameter of the changed model.
        case.source = WeightSource::Random { seed: number };
        config.validate().expect("attention cases are sound");
        case
    }

    /// Returns the device as the planner sees it: with the load line `budget`, without charges, and with assumed rates.
    pub fn device_spec(&self, budget: Bytes, threads: u32) -> DeviceSpec {
        DeviceSpec {
            name: "device".into(),
            kind: self.device.kind(),
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

    /// Returns the request to plan this case on `device`, with arithmetic in `precision` and without lossy rungs.
    pub fn request<'a>(&'a self, device: &'a DeviceSpec, precision: DType) -> PlanRequest<'a> {
        PlanRequest {
            config: &self.config,
            precision,
            sequence: self.sequence,
            sequences: self.sequences,
            source: self.source.clone(),
            optimizer: self.optimizer,
            evaluate: self.evaluate,
            scores: self.scores,
            temperature: self.temperature,
            generation: self.generation,
            device,
            host: self.device.host(),
            lossy: LossyOptions::default(),
            pins: PinnedChoices::default(),
            rungs: vec![],
            share: Share::SINGLE_DEVICE,
        }
    }

    /// Returns a recipe with the same recompute level for all layers.
    pub fn uniform(&self, micro_batch: u64, level: RecomputeLevel) -> Recipe {
        Recipe::on_device(micro_batch as u32, vec![level; self.config.layers as usize])
    }

    /// Returns `count` random rows of tokens. A row may hold several documents, and some labels are ignored. Another
    /// `salt` gives other rows.
    pub fn rows(&self, count: u64, salt: u64) -> Rows {
        let mut rng = Rng::new(self.seed ^ salt, self.number);
        let mut rows = Rows::new(count, self.sequence);
        for _ in 0..count {
            let (labelled, ends) = (rng.fraction(), rng.fraction() * 0.2);
            let mut start = 0;
            for at in 0..self.sequence as i32 {
                if at > 0 && rng.chance(ends) {
                    start = at;
                }
                let counts = rng.chance(labelled);
                rows.tokens.push(rng.range(0, self.config.vocab - 1) as i32);
                rows.labels.push(if counts { rng.range(0, self.config.vocab - 1) as i32 } else { -100 });
                rows.positions.push(at - start);
                rows.document_start.push(start);
                rows.weights.push(if counts { 1.0 } else { 0.0 });
            }
        }
        // At least one label counts, so that there is a loss to compare.
        rows.labels[0] = 0;
        rows.weights[0] = 1.0;
        rows
    }

    /// Returns a prompt of at least two tokens that leaves room for at most three more, so that generation fills the
    /// cache.
    pub fn prompt(&self, generation: Generation) -> Vec<i32> {
        let mut rng = Rng::new(!self.seed, self.number);
        let length = generation.capacity.saturating_sub(rng.range(0, 3)).max(2);
        (0..length).map(|_| rng.range(0, self.config.vocab - 1) as i32).collect()
    }
}
