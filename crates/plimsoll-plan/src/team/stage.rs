//! The cost of a pipeline stage with any number of layers.
//!
//! Stages of one and of two layers are measured, each without and with full recompute, and each with several amounts of
//! offload. All other stages are interpolated from these.

use crate::layout::lower_bounds;
use crate::price::Prices;
use crate::search::PlanRequest;
use plimsoll_core::{Bytes, Category, DeviceKind, Link, Offload, Recipe, RecomputeLevel, Space};
use plimsoll_program::{Lifetime, Program, ProgramKind, ProgramSet, Tensor, TensorRole};

/// Number of kinds of tensors that a stage can offload to the host: the fields of [`OffloadableBytes`]. A kind is only
/// offloaded if all kinds before it are: those go first that cost least seconds per byte.
const OFFLOAD_KINDS: usize = 5;

/// The predicted seconds of a stage by offload: entry n is with all tensors of the first n kinds offloaded, entry 0
/// without offload.
type SecondsByOffload = [StageSeconds; OFFLOAD_KINDS + 1];

/// Predicted seconds of a pipeline stage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct StageSeconds {
    /// Seconds of the scores of a micro-batch, under present and initial weights; 0 in runs without scores.
    pub(super) score: f64,
    /// Seconds of the forward pass of a micro-batch.
    pub(super) forward: f64,
    /// Seconds of the backward pass of a micro-batch.
    pub(super) backward: f64,
    /// Seconds of the transfer of one hidden state or gradient between this stage and the next.
    pub(super) transfer: f64,
    /// Seconds of the work before the first and after the last pass of a step: beginning, gradient norm and update.
    pub(super) per_step: f64,
}

impl StageSeconds {
    /// Predicts the seconds of a stage from its Programs.
    pub fn of(set: &ProgramSet, prices: &Prices) -> StageSeconds {
        let no_wire = Link { bytes_per_second: f64::INFINITY, latency_seconds: 0.0 };
        let without_transfers = Prices { team_link: no_wire, ..*prices };
        let seconds = |prices: &Prices, kind: ProgramKind| {
            set.program(kind).map_or(0.0, |program: &Program| prices.program_seconds(set, program, true))
        };
        let hidden_bytes = set.find("train.hidden").map_or(0, |hidden| set.tensor(hidden).bytes());
        StageSeconds {
            score: seconds(&without_transfers, ProgramKind::Score)
                + seconds(&without_transfers, ProgramKind::Reference),
            forward: seconds(&without_transfers, ProgramKind::Forward),
            backward: seconds(&without_transfers, ProgramKind::Backward),
            transfer: prices.team_link.latency_seconds + hidden_bytes as f64 / prices.team_link.bytes_per_second,
            per_step: [ProgramKind::BeginStep, ProgramKind::GradientNorm, ProgramKind::Update]
                .into_iter()
                .map(|kind| seconds(prices, kind))
                .sum::<f64>(),
        }
    }

    /// Returns the seconds in which the stage computes in a step of `micro_batches` micro-batches.
    pub fn busy(&self, micro_batches: u32) -> f64 {
        f64::from(micro_batches) * (self.score + self.forward + self.backward) + self.per_step
    }

    /// Interpolates from `self` (fraction 0) to `other` (fraction 1), or extrapolates for a fraction above 1.
    fn interpolate(self, other: StageSeconds, fraction: f64) -> StageSeconds {
        self.plus_difference(fraction, self, other)
    }

    /// Adds `fraction` times the difference `b` − `a` to each of the seconds.
    fn plus_difference(self, fraction: f64, a: StageSeconds, b: StageSeconds) -> StageSeconds {
        let add = |from: f64, a: f64, b: f64| from + fraction * (b - a);
        StageSeconds {
            score: add(self.score, a.score, b.score),
            forward: add(self.forward, a.forward, b.forward),
            backward: add(self.backward, a.backward, b.backward),
            transfer: add(self.transfer, a.transfer, b.transfer),
            per_step: add(self.per_step, a.per_step, b.per_step),
        }
    }
}

/// Bytes of a stage that can be offloaded, by kind of tensor. The kinds are offloaded in the order of the fields: those
/// go first that cost least seconds per byte.
#[derive(Clone, Copy, Debug, Default)]
struct OffloadableBytes {
    optimizer_state: f64,
    /// The embedding table and its gradient, of which the host reads single rows; 0 if the head is tied to the table.
    embedding: f64,
    /// Inputs of layers, of all micro-batches in flight.
    layer_inputs: f64,
    gradients: f64,
    weights: f64,
}

impl OffloadableBytes {
    /// Adds up the bytes of the tensors that a stage's Programs keep on the device. `tied` says that the head is the
    /// embedding table.
    fn of(set: &ProgramSet, tied: bool) -> OffloadableBytes {
        let sum = |is_counted: &dyn Fn(&Tensor) -> bool| {
            let counted = set.tensors.iter().filter(|tensor| tensor.space == Space::Device && is_counted(tensor));
            counted.map(|tensor| tensor.bytes() * u64::from(tensor.slots)).sum::<u64>() as f64
        };
        let is_embedding = |tensor: &Tensor| !tied && tensor.role() == TensorRole::Embedding;
        let is_of_kind = |tensor: &Tensor, category: Category, of_embedding: bool| {
            (tensor.lifetime, tensor.category, is_embedding(tensor)) == (Lifetime::Persistent, category, of_embedding)
        };
        let persistent =
            |category: Category, of_embedding: bool| sum(&|tensor: &Tensor| is_of_kind(tensor, category, of_embedding));
        let optimizer_state = persistent(Category::Optimizer, false) + persistent(Category::Optimizer, true);
        OffloadableBytes {
            optimizer_state,
            embedding: persistent(Category::Weight, true) + persistent(Category::Gradient, true),
            layer_inputs: sum(&|tensor: &Tensor| tensor.name == "train.hidden"),
            gradients: persistent(Category::Gradient, false),
            weights: persistent(Category::Weight, false),
        }
    }

    /// Returns the bytes of each kind that are offloaded to free `bytes` on the device. Kinds are taken in the order of
    /// the fields. `None` if offloading everything frees too little.
    fn take(self, mut bytes: f64) -> Option<OffloadableBytes> {
        let mut take = |most: f64| {
            let taken = bytes.clamp(0.0, most);
            bytes -= taken;
            taken
        };
        let taken = OffloadableBytes {
            optimizer_state: take(self.optimizer_state),
            embedding: take(self.embedding),
            layer_inputs: take(self.layer_inputs),
            gradients: take(self.gradients),
            weights: take(self.weights),
        };
        (bytes <= 0.0).then_some(taken)
    }

    fn total(self) -> f64 {
        self.in_order().iter().sum()
    }

    /// Returns the bytes that pass through no staging ring of a pass: all but gradients and weights.
    fn without_rings(self) -> f64 {
        self.optimizer_state + self.embedding + self.layer_inputs
    }

    /// Returns the bytes of each kind, in the order in which they are offloaded.
    fn in_order(self) -> [f64; OFFLOAD_KINDS] {
        [self.optimizer_state, self.embedding, self.layer_inputs, self.gradients, self.weights]
    }

    /// Interpolates from `self` (fraction 0) to `other` (fraction 1), or extrapolates for a fraction above 1.
    fn interpolate(self, other: OffloadableBytes, fraction: f64) -> OffloadableBytes {
        let mix = |a: f64, b: f64| a + fraction * (b - a);
        OffloadableBytes {
            optimizer_state: mix(self.optimizer_state, other.optimizer_state),
            embedding: mix(self.embedding, other.embedding),
            layer_inputs: mix(self.layer_inputs, other.layer_inputs),
            gradients: mix(self.gradients, other.gradients),
            weights: mix(self.weights, other.weights),
        }
    }
}

/// A value without recompute and the same value with full recompute.
#[derive(Clone, Copy, Debug)]
struct ByRecompute<T> {
    /// The value without recompute.
    none: T,
    /// The value with full recompute.
    full: T,
}

/// Predicted seconds and bytes of a stage with a given number of layers, read from its Programs.
#[derive(Clone, Copy, Debug)]
pub(super) struct MeasuredStage {
    /// A lower bound on the bytes of the device arena, without offload.
    arena_bytes: ByRecompute<f64>,
    seconds: ByRecompute<SecondsByOffload>,
    offloadable: OffloadableBytes,
    /// Bytes of the hidden state of a micro-batch.
    pub hidden_bytes: f64,
}

/// Programs of a stage at one recompute level, with the bytes and predicted seconds read from them.
struct MeasuredLevel {
    arena_bytes: f64,
    seconds: SecondsByOffload,
    set: ProgramSet,
}

impl MeasuredStage {
    /// Reads bytes and predicted seconds of the stage of a request from its Programs. `can_offload` tells whether the
    /// tensors of the stage can be offloaded to the host.
    pub fn measure(request: &PlanRequest, can_offload: bool) -> MeasuredStage {
        let [none, full] = [RecomputeLevel::Nothing, RecomputeLevel::Block]
            .map(|level| MeasuredStage::measure_level(request, level, can_offload));
        let hidden_bytes = none.set.find("train.hidden").map_or(0.0, |hidden| none.set.tensor(hidden).bytes() as f64);
        MeasuredStage {
            arena_bytes: ByRecompute { none: none.arena_bytes, full: full.arena_bytes },
            seconds: ByRecompute { none: none.seconds, full: full.seconds },
            offloadable: OffloadableBytes::of(&none.set, request.config.tied),
            hidden_bytes,
        }
    }

    /// Builds the Programs of the stage at one recompute level in all layers, and reads bytes and predicted seconds
    /// from them. Pinned recompute levels replace `level`.
    fn measure_level(request: &PlanRequest, level: RecomputeLevel, can_offload: bool) -> MeasuredLevel {
        let own = request.share.own_layers(request.config.layers);
        let layers = (own.end - own.start) as u32;
        let prices = request.prices();
        let levels = request.pins.recompute.clone().unwrap_or_else(|| vec![level; layers as usize]);
        let micro_batch = request.pins.micro_batch.unwrap_or(1);
        let recipe = Recipe { rungs: request.rungs.clone(), ..Recipe::on_device(micro_batch, levels) };
        let set = request.compute_programs(&recipe);
        let mut seconds = [StageSeconds::of(&set, &prices); OFFLOAD_KINDS + 1];
        let with_offload = |kinds: usize, update: bool| {
            let offload = offload_of_kinds(request, kinds, update);
            StageSeconds::of(&request.compute_programs(&Recipe { offload, ..recipe.clone() }), &prices)
        };
        // The host or the device updates offloaded weights, whichever is faster.
        let update =
            can_offload && with_offload(OFFLOAD_KINDS, true).per_step < with_offload(OFFLOAD_KINDS, false).per_step;
        for (kinds, seconds) in seconds.iter_mut().enumerate().skip(1).filter(|_| can_offload) {
            *seconds = with_offload(kinds, update);
        }
        MeasuredLevel { arena_bytes: lower_bounds(&set).device as f64, seconds, set }
    }
}

/// Returns the offload choice with all tensors of the first `kinds` kinds of a stage. `update` says whether the host
/// runs the optimizer update of offloaded tensors.
fn offload_of_kinds(request: &PlanRequest, kinds: usize, update: bool) -> Offload {
    let own = request.share.own_layers(request.config.layers);
    let layers_of_kind = |kind: usize| if kind < kinds { (own.end - own.start) as u32 } else { 0 };
    let [optimizer, table, inputs, gradients, weights] = [0, 1, 2, 3, 4].map(layers_of_kind);
    let ends = request.ends();
    let with_table = if request.config.tied { weights > 0 } else { table > 0 };
    let (embedding, head) = (ends.embedding && with_table, ends.head && weights > 0);
    Offload { optimizer, gradients, weights, inputs, embedding, head, update, ..Offload::NOTHING }
}

/// A model of a stage with any number of layers. Its seconds and bytes are interpolated from two stages.
#[derive(Clone, Copy, Debug)]
pub(super) struct StageModel {
    /// The stage with one layer.
    pub one: MeasuredStage,
    /// The stage with two layers.
    pub two: MeasuredStage,
}

/// One way to run a stage: with some amount of recompute and of offload.
#[derive(Clone, Copy, Debug)]
pub(super) struct StageOption {
    pub seconds: StageSeconds,
    /// Bytes that are offloaded to the host.
    pub offloaded: f64,
}

/// The memory that a stage may use, and the numbers of micro-batches of its schedule.
#[derive(Clone, Copy, Debug)]
pub(super) struct StageLimits {
    /// Most bytes of the device arena.
    pub budget: f64,
    /// Most bytes of host memory; 0 if the stage cannot offload.
    pub host: f64,
    /// Number of micro-batches of a step.
    pub micro_batches: u32,
    /// Number of micro-batches in flight: the stage holds their activations at once.
    pub in_flight: u32,
}

impl StageModel {
    /// Returns the fastest way to run a stage of `layers` layers and then, if the fastest offloads more, the way that
    /// offloads least. Returns an empty list if the stage does not fit.
    pub fn options(&self, layers: u64, limits: &StageLimits) -> Vec<StageOption> {
        let stage = self.with_layers(layers, limits);
        let Some(smallest) = stage.option(1.0) else { return vec![] };
        let with_least_recompute = stage.option(stage.recompute_beside(0.0));
        let smallest = with_least_recompute.filter(|option| option.offloaded <= smallest.offloaded).unwrap_or(smallest);
        if limits.host == 0.0 {
            return vec![smallest];
        }
        // Recompute is tried without any, and as much as is needed beside the first kinds of offloaded tensors.
        let offloadable = stage.offloadable;
        let beside = [
            offloadable.optimizer_state,
            offloadable.without_rings(),
            offloadable.without_rings() + offloadable.gradients,
        ];
        let others = [0.0].into_iter().chain(beside.map(|bytes| stage.recompute_beside(bytes)));
        let busy = |option: &StageOption| option.seconds.busy(limits.micro_batches);
        let faster = |best: StageOption, other: StageOption| if busy(&other) < busy(&best) { other } else { best };
        let fastest = others.filter_map(|recompute| stage.option(recompute)).fold(smallest, faster);
        if fastest.offloaded > smallest.offloaded { vec![fastest, smallest] } else { vec![fastest] }
    }

    /// Interpolates the bytes of a stage of `layers` layers.
    fn with_layers<'s>(&'s self, layers: u64, limits: &'s StageLimits) -> SizedStage<'s> {
        let more = layers as f64 - 1.0;
        let extrapolate = |one: f64, two: f64| one + more * (two - one);
        let arena_bytes = ByRecompute {
            none: extrapolate(self.one.arena_bytes.none, self.two.arena_bytes.none),
            full: extrapolate(self.one.arena_bytes.full, self.two.arena_bytes.full),
        };
        let (one, two) = (&self.one.offloadable, &self.two.offloadable);
        let ring_bytes = 2.0 * (two.gradients - one.gradients + two.weights - one.weights);
        SizedStage { model: self, limits, more, arena_bytes, offloadable: one.interpolate(*two, more), ring_bytes }
    }

    /// Interpolates the seconds of a stage with 1 + `more` layers and a fraction of recompute. The stage offloads the
    /// `offloaded` part of the `offloadable` bytes of each kind.
    fn seconds(
        &self,
        more: f64,
        recompute: f64,
        offloadable: OffloadableBytes,
        offloaded: OffloadableBytes,
    ) -> StageSeconds {
        let with_kinds = |kinds: usize| {
            let none = self.one.seconds.none[kinds].interpolate(self.two.seconds.none[kinds], more);
            let full = self.one.seconds.full[kinds].interpolate(self.two.seconds.full[kinds], more);
            none.interpolate(full, recompute)
        };
        let kinds = offloaded.in_order().into_iter().zip(offloadable.in_order()).enumerate();
        let partly = kinds.filter(|(_, (offloaded, _))| *offloaded > 0.0);
        partly.fold(with_kinds(0), |sum, (kind, (offloaded, offloadable))| {
            sum.plus_difference(offloaded / offloadable, with_kinds(kind), with_kinds(kind + 1))
        })
    }
}

/// A stage with a given number of layers, and its interpolated bytes.
struct SizedStage<'s> {
    model: &'s StageModel,
    limits: &'s StageLimits,
    /// Number of layers after the first.
    more: f64,
    /// Bytes of the device arena, without offload.
    arena_bytes: ByRecompute<f64>,
    offloadable: OffloadableBytes,
    /// Bytes of the staging rings of two layers, through which offloaded gradients and weights pass.
    ring_bytes: f64,
}

impl SizedStage<'_> {
    /// Returns the way to run the stage with this fraction of recompute; `None` if it does not fit.
    fn option(&self, recompute: f64) -> Option<StageOption> {
        let needed = self.arena_bytes.none + recompute * (self.arena_bytes.full - self.arena_bytes.none);
        let missing = (needed - self.limits.budget).max(0.0);
        let has_rings = missing > self.offloadable.without_rings();
        let offloaded = self.offloadable.take(if has_rings { missing + self.ring_bytes } else { missing })?;
        let seconds = self.model.seconds(self.more, recompute, self.offloadable, offloaded);
        (offloaded.total() <= self.limits.host).then(|| StageOption { seconds, offloaded: offloaded.total() })
    }

    /// Returns the fraction of recompute with which the stage fits if it offloads this many bytes.
    fn recompute_beside(&self, offloaded: f64) -> f64 {
        let ByRecompute { none, full } = self.arena_bytes;
        ((none - offloaded - self.limits.budget) / (none - full).max(1.0)).clamp(0.0, 1.0)
    }
}

/// Returns whether a stage can offload tensors to a host with this load line. A CPU cannot, nor a request with pinned
/// offload.
pub(super) fn can_offload(request: &PlanRequest, host: Bytes) -> bool {
    host > Bytes::ZERO && request.pins.offload.is_none() && request.device.kind != DeviceKind::Cpu
}
