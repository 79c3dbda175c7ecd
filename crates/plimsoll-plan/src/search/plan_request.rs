//! The request that the planner answers, [`PlanRequest`], and its answer, [`PlanOutcome`]. The request also builds the
//! Programs of any recipe and prices them. The search over recipes is in the parent module.

use crate::layout::Layout;
use crate::price::Prices;
use plimsoll_core::{
    Bytes, Class, DType, DeviceKind, DeviceSpec, FileSpec, HostSpec, Offload, Parallelism, PerSpace, Plan,
    PredictedGeneration, Recipe, RecomputeLevel, Rung, Space, WorkKind,
};
use plimsoll_program::models::decoder::{
    AdamState, Base, BuildOptions, Generation, Lora, Method, Optimizer, Scores, Training, WeightSource, build,
};
use plimsoll_program::models::{ModelConfig, Target};
use plimsoll_program::op::Queue;
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Op, OpKind, ProgramKind, ProgramSet, Share, passes};

/// A request to the planner: a model, a step, one device with its host, and the choices left open.
#[derive(Clone, Debug)]
pub struct PlanRequest<'a> {
    /// The shape of the model.
    pub config: &'a ModelConfig,
    /// Precision of the arithmetic. The rung `bf16` may lower it.
    pub precision: DType,
    /// Tokens per sequence.
    pub sequence: u64,
    /// Sequences of an optimizer step that the device computes; for an evaluation, the most in one batch. 0 for a
    /// storage-only worker of a sharded team.
    pub sequences: u64,
    /// Source of the initial weights: random numbers, files, or a run that is being trained.
    pub source: WeightSource,
    /// The optimizer; `None` for an evaluation or a generation without training.
    pub optimizer: Option<Optimizer>,
    /// Whether the Programs include evaluation.
    pub evaluate: bool,
    /// The log-probabilities of its labels with which each step begins.
    pub scores: Scores,
    /// Divisor of the logits in the loss, the temperature at which completions are sampled; 1 for other objectives.
    pub temperature: f64,
    /// Sizes for token generation, in tokens: of the key-value cache, and of one prefill call. `None` if the run
    /// generates no tokens.
    pub generation: Option<Generation>,
    /// The device with its load line, charges and rates.
    pub device: &'a DeviceSpec,
    /// The host for offloaded tensors; [`HostSpec::NONE`] if nothing can be offloaded.
    pub host: HostSpec,
    /// The training method, the storage of frozen matrices, and the lossy rungs that the planner may take.
    pub lossy: LossyOptions,
    /// Choices fixed by the user.
    pub pins: PinnedChoices,
    /// Lossy rungs that this request has already taken, by [`with_lossy`]; empty if none was taken.
    pub rungs: Vec<Rung>,
    /// The device's share of the step in a team. In a team, `sequences` counts only this device's sequences, and
    /// `team_link` in `device` is the slowest link of the team.
    pub share: Share,
}

/// The training method, the storage of frozen matrices, and the lossy rungs that may be taken.
#[derive(Clone, Debug, PartialEq)]
pub struct LossyOptions {
    /// Training method: all parameters or adapters.
    pub method: Method,
    /// Storage format of frozen matrices.
    pub base: Base,
    /// Rungs that the planner may take (`memory.allow`); empty if the plan must be lossless.
    pub allow: Vec<Rung>,
    /// Rungs that a refusal may offer as remedies; empty if it may offer none.
    pub offer: Vec<Rung>,
    /// Adapters that the rung `lora` trains.
    pub lora: Lora,
}

impl Default for LossyOptions {
    fn default() -> LossyOptions {
        let (targets, source) = (Target::ALL.to_vec(), WeightSource::Random { seed: 1 });
        let lora = Lora {
            rank: 16,
            alpha: 32.0,
            rank_stabilized: false,
            dropout: 0.0,
            targets,
            modules: None,
            seed: 1,
            source,
        };
        LossyOptions { method: Method::Full, base: Base::Plain, allow: vec![], offer: vec![], lora }
    }
}

/// Choices of the recipe that the user has fixed. The planner makes each choice that is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PinnedChoices {
    /// Sequences per micro-batch; `None` lets the planner choose.
    pub micro_batch: Option<u32>,
    /// Recompute level of each layer, first layer first; `None` lets the planner choose.
    pub recompute: Option<Vec<RecomputeLevel>>,
    /// Tensors offloaded to the host; `None` lets the planner choose, and [`Offload::NOTHING`] forbids offload.
    pub offload: Option<Offload>,
}

/// A recipe that the search considered.
#[derive(Clone, Debug, PartialEq)]
pub struct TriedRecipe {
    /// The recipe.
    pub recipe: Recipe,
    /// Predicted bytes on the device including charges. Exact for the fastest recipes, which are packed; a lower bound
    /// for all others.
    pub peak_bytes: Bytes,
    /// Predicted bytes on the host; zero without offload.
    pub host_bytes: Bytes,
    /// Predicted bytes in the scratch file; zero if nothing is offloaded to it.
    pub file_bytes: Bytes,
    /// Predicted seconds of a step.
    pub step_seconds: f64,
    /// Whether the recipe stays under the load lines.
    pub fits: bool,
}

/// The planner's answer: a plan or a refusal, with the Programs and the layout needed to run it.
#[derive(Clone, Debug)]
pub struct PlanOutcome {
    /// The plan, or a refusal with remedies.
    pub plan: Plan,
    /// The Programs of the plan.
    pub set: ProgramSet,
    /// The arenas of the Programs, with the offset of each tensor.
    pub layout: Layout,
    /// Recipes that the search considered, fastest first in each of its rounds (in memory, with the scratch file, with
    /// each combination of lossy rungs). Empty if the recipe was given.
    pub tried: Vec<TriedRecipe>,
    /// Precision of the Programs: lower than requested if the rung `bf16` is taken.
    pub precision: DType,
}

/// Whether a set has the Programs that move files (load, save, checkpoint).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FilePrograms {
    /// All Programs.
    With,
    /// All others.
    Without,
    /// No others.
    Only,
}

/// Whether a device has the first and the last part of a model: a pipeline stage may lack them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelEnds {
    /// Whether the device has the embedding table.
    pub embedding: bool,
    /// Whether the device has a head that is not tied to the embedding.
    pub head: bool,
}

impl<'a> PlanRequest<'a> {
    /// Replaces adapters that differ between layers by the largest ones in every layer. For Programs of fewer layers
    /// than the model has.
    #[must_use]
    pub(super) fn with_uniform_adapters(mut self) -> PlanRequest<'a> {
        if let Method::Lora(lora) = &mut self.lossy.method {
            *lora = lora.uniform();
        }
        self
    }

    /// Restricts the request to a device's share of a step, with `sequences` sequences. Teams use no scratch file, so
    /// the request of a rank gets none. In a pipeline, recompute levels in `pins` are cut to the layers of the stage.
    #[must_use]
    pub fn for_share(mut self, share: &Share, sequences: u64) -> PlanRequest<'a> {
        (self.share, self.sequences) = (share.clone(), sequences);
        if share.parallelism.is_some() {
            self.host.file = FileSpec::NONE;
        }
        if share.parallelism == Some(Parallelism::Pipeline) {
            let own = share.own_layers(self.config.layers);
            let of_stage = |levels: Vec<RecomputeLevel>| levels[own.start as usize..own.end as usize].to_vec();
            self.pins.recompute = self.pins.recompute.map(of_stage);
        }
        self
    }
}

impl PlanRequest<'_> {
    /// Builds the Programs of a recipe for this device's share, without its offload. `files` says whether they include
    /// those that move files, or are no others.
    pub(super) fn build(&self, config: &ModelConfig, recipe: &Recipe, files: FilePrograms) -> ProgramSet {
        let mut set = build(&BuildOptions {
            config,
            layers: self.share.own_layers(config.layers),
            precision: self.precision,
            kernels: Kernels::for_device(self.device),
            sequence: self.sequence,
            // A storage-only worker takes part in the collectives of a micro-batch of one sequence.
            micro_batch: u64::from(recipe.micro_batch.max(1)),
            source: self.source.clone(),
            method: self.lossy.method.clone(),
            base: self.lossy.base,
            streamed_head: recipe.offload.streams_head(config.tied),
            training: self.optimizer.map(|optimizer| Training { optimizer, recompute: recipe.recompute.clone() }),
            evaluate: self.evaluate,
            scores: self.scores,
            temperature: self.temperature,
            generation: self.generation,
            files: files != FilePrograms::Without,
        });
        if files == FilePrograms::Only {
            set.retain_programs(|program| matches!(program.work, WorkKind::Load | WorkKind::Save));
        }
        passes::parallelism::parallelize(set, &self.share, recipe, self.micro_batch_count(recipe), config.tied)
    }

    /// Returns a recipe that stands for all recipes with the same Programs without offload and without files. Of the
    /// offload choice, they depend on the streamed head, and on the collectives that are awaited at once.
    pub(super) fn build_key(&self, recipe: &Recipe) -> Recipe {
        let Offload { weights, gradients, embedding, head, .. } = recipe.offload;
        let (weights, gradients) = (weights.min(1), gradients.min(1));
        Recipe { offload: Offload { weights, gradients, embedding, head, ..Offload::NOTHING }, ..recipe.clone() }
    }

    /// Builds all Programs of a recipe for the device's share of the step, with recompute, offload and parallelism.
    pub fn programs(&self, recipe: &Recipe) -> ProgramSet {
        let plain = self.build(self.config, recipe, FilePrograms::With);
        let offloaded = self.offload(plain, recipe);
        passes::trim_staging::trim_staging_buffers(
            self.stage_messages_on_host(self.move_to_scratch_file(offloaded, recipe.offload)),
        )
    }

    /// Builds the Programs of a recipe without those that only read or write files: load, save, checkpoint. Offload to
    /// the host is part of them; offload to the scratch file is not.
    pub(crate) fn compute_programs(&self, recipe: &Recipe) -> ProgramSet {
        let plain = self.build(self.config, recipe, FilePrograms::Without);
        self.stage_messages_on_host(self.offload(plain, recipe))
    }

    /// Offloads tensors of the Programs of a recipe to the host.
    fn offload(&self, plain: ProgramSet, recipe: &Recipe) -> ProgramSet {
        let one_micro_batch = self.micro_batch_count(recipe) == 1;
        match recipe.offload.is_nothing() {
            true => plain,
            false => passes::offload::offload(&plain, self.layers() as u32, &recipe.offload, one_micro_batch),
        }
    }

    /// Makes the sends of a pipeline stage on a GPU pass through host memory. Programs of other devices, or without a
    /// pipeline, stay unchanged.
    pub(super) fn stage_messages_on_host(&self, set: ProgramSet) -> ProgramSet {
        let is_pipeline = self.share.parallelism == Some(Parallelism::Pipeline);
        let staged = is_pipeline && Kernels::for_device(self.device) == Kernels::Cuda;
        if staged { passes::host_staged_p2p::stage_sends_through_host(set) } else { set }
    }

    /// Moves offloaded tensors of `set` to the scratch file: those for which `offload` chooses the file. Other tensors
    /// stay where they are.
    pub(super) fn move_to_scratch_file(&self, set: ProgramSet, offload: Offload) -> ProgramSet {
        let memory = if self.is_own_host() { Space::Device } else { Space::Host };
        match offload.file.is_nothing() {
            true => set,
            false => passes::scratch_file::move_to_scratch_file(set, self.layers() as u32, offload.file, memory),
        }
    }

    /// Returns whether the device is the CPU, which is its own host. It can offload to the scratch file only.
    pub(super) fn is_own_host(&self) -> bool {
        self.device.kind == DeviceKind::Cpu
    }

    /// Returns the number of layers that the device computes.
    pub(super) fn layers(&self) -> usize {
        let own = self.share.own_layers(self.config.layers);
        (own.end - own.start) as usize
    }

    /// Returns whether the device has the embedding, and whether it has an output head of its own. A tied head counts
    /// as the embedding.
    pub(crate) fn ends(&self) -> ModelEnds {
        let (stage, stages) = self.share.stage();
        let (first, last, tied) = (stage == 0, stage + 1 == stages, self.config.tied);
        ModelEnds { embedding: first || last && tied, head: last && !tied }
    }

    /// Returns a recipe with the given choices and the lossy rungs of the request.
    pub(super) fn recipe(&self, micro_batch: u32, recompute: Vec<RecomputeLevel>, offload: Offload) -> Recipe {
        Recipe { micro_batch, recompute, offload, rungs: self.rungs.clone() }
    }

    /// Returns a recipe without offload and with one recompute level for all layers.
    pub(super) fn uniform(&self, micro_batch: u32, level: RecomputeLevel) -> Recipe {
        self.recipe(micro_batch, vec![level; self.layers()], Offload::NOTHING)
    }

    /// Returns what happens to the results if a run goes on under recipe `to` instead of `from`. They keep every bit
    /// ([`Class::Identical`]), or sums are added in another order ([`Class::Reordered`]).
    pub fn class_of_change(&self, from: &Recipe, to: &Recipe) -> Class {
        let has_host_sums = |recipe: &Recipe| {
            let request = with_lossy(self, &recipe.rungs);
            sums_on_host_instead_of_gpu(&request, &request.programs(recipe))
        };
        let same_sums = from.offload.embedding == to.offload.embedding || has_host_sums(from) == has_host_sums(to);
        if from.micro_batch == to.micro_batch && same_sums { Class::Identical } else { Class::Reordered }
    }

    /// Returns the micro-batch sizes to try, ascending: divisors of the device's sequences and powers of two. A pinned
    /// size is the only one. A storage-only worker has the single size 0.
    pub(super) fn micro_batch_sizes(&self) -> Vec<u32> {
        if self.is_storage_only() {
            return vec![0];
        }
        if let Some(pinned) = self.pins.micro_batch {
            return vec![pinned];
        }
        let most = self.sequences.clamp(1, 1 << 16) as u32;
        (1..=most).filter(|size| most.is_multiple_of(*size) || size.is_power_of_two()).collect()
    }

    /// Returns whether the device is a storage-only worker of a sharded team.
    pub(super) fn is_storage_only(&self) -> bool {
        self.share.parallelism == Some(Parallelism::Sharded) && self.sequences == 0
    }

    /// Returns the recompute level of each layer if the planner has no choice. These are the pinned levels, or no
    /// recompute for a request without training and for a storage-only worker. `None` lets the planner choose.
    pub(super) fn fixed_recompute(&self) -> Option<Vec<RecomputeLevel>> {
        let nothing = || vec![RecomputeLevel::Nothing; self.layers()];
        match &self.pins.recompute {
            Some(pinned) if self.optimizer.is_some() => Some(pinned.clone()),
            _ => (self.optimizer.is_none() || self.is_storage_only()).then(nothing),
        }
    }

    /// Returns the number of micro-batches of a step under a recipe.
    pub(super) fn micro_batch_count(&self, recipe: &Recipe) -> u32 {
        self.share.micro_batches_of(self.sequences, recipe.micro_batch) as u32
    }

    /// Returns the rates from which the seconds of ops on the device and its host are predicted.
    pub(crate) fn prices(&self) -> Prices<'_> {
        let team_link = self.device.team_link;
        Prices { rates: &self.device.rates, host: &self.host, precision: self.precision, team_link }
    }

    /// Predicts the seconds of a step, or of an evaluation if the request trains nothing.
    pub(super) fn step_seconds(&self, set: &ProgramSet, recipe: &Recipe) -> f64 {
        let count = self.micro_batch_count(recipe);
        let prices = self.prices();
        if self.optimizer.is_some() {
            return prices.step_seconds(set, count, true);
        }
        set.program(ProgramKind::Evaluate)
            .map_or(0.0, |evaluate| prices.program_seconds(set, evaluate, true) * f64::from(count))
    }

    /// Predicts the speed of generation; `None` unless several sequences are generated at once.
    pub(super) fn predict_generation(&self, set: &ProgramSet) -> Option<PredictedGeneration> {
        let sequences = self.generation.map(|generation| generation.slots).filter(|slots| *slots > 1)?;
        let decode = set.program(ProgramKind::Decode)?;
        Some(PredictedGeneration { sequences, token_seconds: self.prices().program_seconds(set, decode, true) })
    }

    /// Returns the most bytes that each arena and the scratch file may hold.
    pub(super) fn arena_limits(&self) -> PerSpace<u64> {
        PerSpace { device: self.device.arena_budget().0, host: self.host.budget.0, file: self.host.file.budget.0 }
    }

    /// Returns the fewest bytes of the device's arena that are above the load line.
    pub(super) fn arena_bound(&self) -> u64 {
        self.device.arena_budget().0.saturating_add(1)
    }

    /// Returns those of the `rungs` that the request does not have already.
    pub(crate) fn rungs_in_addition(&self, rungs: &[Rung]) -> Vec<Rung> {
        rungs.iter().copied().filter(|rung| !self.rungs.contains(rung)).collect()
    }

    /// Returns whether a layout stays under the load lines.
    pub(super) fn fits(&self, layout: &Layout) -> bool {
        layout.bytes().fits(&self.arena_limits())
    }
}

/// Returns the request with lossy rungs taken: they change its precision, optimizer state, training method or the
/// storage of frozen matrices. Rungs that the request already has stay.
pub fn with_lossy<'a>(request: &PlanRequest<'a>, rungs: &[Rung]) -> PlanRequest<'a> {
    let mut request = request.clone();
    request.rungs.extend(request.rungs_in_addition(rungs));
    for rung in rungs {
        match rung {
            Rung::Bf16 => request.precision = DType::Bf16,
            Rung::Adam8bit => {
                if let Some(Optimizer::AdamW { state, .. }) = &mut request.optimizer {
                    *state = AdamState::Blockwise8;
                }
            }
            Rung::Lora => request.lossy.method = Method::Lora(request.lossy.lora.clone()),
            Rung::Int8 => request.lossy.base = Base::Int8,
            Rung::Nf4 => request.lossy.base = Base::Nf4,
        }
    }
    request
}

/// Returns whether the host adds up rows of the embedding gradient for a GPU, whose kernel adds them in another order.
/// A virtual device uses the host's kernels, so its order is the same.
pub(super) fn sums_on_host_instead_of_gpu(request: &PlanRequest, set: &ProgramSet) -> bool {
    let on_host = |op: &Op| op.queue == Queue::Host && matches!(op.kind, OpKind::EmbedGrad { .. });
    let mut ops = set.programs.iter().flat_map(|program| &program.blocks).flat_map(|block| &block.ops);
    Kernels::for_device(request.device) == Kernels::Cuda && ops.any(on_host)
}
