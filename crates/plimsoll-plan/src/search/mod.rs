//! The search for the fastest recipe under the load lines of a device and its host.
//!
//! For each micro-batch a dynamic program over (layer, live bytes) chooses what to recompute (`profile`); where that is
//! not enough, or costs more than copies do, tensors wait on the host (`offload`). The candidates are ordered by
//! predicted time, and the first whose packed arenas fit is the plan. Where none does, lossy rungs are taken as far as
//! they are allowed (`rungs`), and at last the plan says what it would need.

mod estimate;
mod ladder;
mod lean;
mod measure;
mod menu;
mod offload;
mod parts;
mod profile;
mod rungs;
mod side_by_side;
mod stays;

use crate::layout::{ArenaLayout, Layout, lay_out};
use crate::price::Prices;
use measure::Measurer;
use plimsoll_core::{
    Bytes, Class, DType, DeviceKind, DevicePlan, DeviceSpec, FileSpec, HostSpec, Need, Offload, Plan, Predicted,
    Recipe, RecomputeLevel, Rung, Sharing, Space, WorkName,
};
use plimsoll_program::models::decoder::{Base, Build, Generation, Lora, Method, Optimizer, Source, Training, build};
use plimsoll_program::models::{ModelConfig, Target};
use plimsoll_program::op::Queue;
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Op, OpKind, Program, ProgramSet, Share, passes};
use profile::{Profile, choose, profile};
use std::collections::BTreeMap;
use std::sync::Arc;

pub use ladder::ladder;
pub use lean::lean;
pub(crate) use measure::{Candidate, Known, bare};
pub(crate) use menu::Menu;
pub(crate) use parts::{InParts, Rank, computing_seconds, fastest_by_bounds};
pub use rungs::under;
pub(crate) use rungs::{Sets, leanest, need, sets};
pub(crate) use side_by_side::{both, side_by_side};

/// Finalists that are packed before the search gives up on packing luck.
const FINALISTS: usize = 20;

/// What is asked of the planner.
#[derive(Clone, Debug)]
pub struct Question<'a> {
    /// The model.
    pub config: &'a ModelConfig,
    /// Arithmetic.
    pub precision: DType,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Sequences of an optimizer step (of an evaluation: at most so many at once); 0 where the state is shared out and the
    /// device only holds a part of it.
    pub sequences: u64,
    /// Weights.
    pub source: Source,
    /// The rule, where something is trained.
    pub optimizer: Option<Optimizer>,
    /// Whether there are evaluations.
    pub evaluate: bool,
    /// Whether tokens are generated.
    pub generation: Option<Generation>,
    /// The device.
    pub device: &'a DeviceSpec,
    /// The host beside it; [`HostSpec::NONE`] where nothing can wait.
    pub host: HostSpec,
    /// What is trained, how the rest is stored, and what may become coarser.
    pub lossy: Lossy,
    /// What the user has fixed.
    pub pins: Pins,
    /// The lossy rungs that are in all this already.
    pub rungs: Vec<Rung>,
    /// The part of the step that this device computes; `sequences` are its own. The device's `team_link` is then the
    /// slowest of its team.
    pub share: Share,
}

/// What is trained, how the rest is stored, and what may become coarser where nothing else fits.
#[derive(Clone, Debug, PartialEq)]
pub struct Lossy {
    /// What is trained.
    pub method: Method,
    /// How frozen matrices are stored.
    pub base: Base,
    /// The rungs that may be taken.
    pub allow: Vec<Rung>,
    /// The rungs that a refusal may offer.
    pub offer: Vec<Rung>,
    /// The adapters that the rung `lora` would train.
    pub lora: Lora,
}

impl Default for Lossy {
    fn default() -> Lossy {
        let (targets, source) = (Target::ALL.to_vec(), Source::Random { seed: 1 });
        let lora = Lora { rank: 16, alpha: 32.0, dropout: 0.0, targets, seed: 1, source };
        Lossy { method: Method::Full, base: Base::Plain, allow: vec![], offer: vec![], lora }
    }
}

/// Choices that the user has fixed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pins {
    /// Sequences in a micro-batch.
    pub micro_batch: Option<u32>,
    /// What each layer makes again.
    pub recompute: Option<Vec<RecomputeLevel>>,
    /// What waits on the host.
    pub offload: Option<Offload>,
}

/// A recipe that was looked at.
#[derive(Clone, Debug, PartialEq)]
pub struct Tried {
    /// The choices.
    pub recipe: Recipe,
    /// Predicted bytes on the device, charges included (the bound; packed for finalists).
    pub peak_bytes: Bytes,
    /// Predicted bytes on the host.
    pub host_bytes: Bytes,
    /// Predicted bytes of the scratch file.
    pub file_bytes: Bytes,
    /// Predicted seconds of a step.
    pub step_seconds: f64,
    /// Whether it is under the load lines.
    pub fits: bool,
}

/// A plan with all that is needed to run it.
#[derive(Clone, Debug)]
pub struct Answer {
    /// As it is written down.
    pub plan: Plan,
    /// The Programs.
    pub set: ProgramSet,
    /// Where everything stands.
    pub layout: Layout,
    /// What else was looked at, fastest first.
    pub tried: Vec<Tried>,
    /// What the Programs compute in: coarser than was asked where that rung is taken.
    pub precision: DType,
}

impl<'a> Question<'a> {
    /// The same about a share of the step in which a device computes so many sequences. Teams take no scratch file.
    #[must_use]
    pub fn of_share(mut self, share: &Share, sequences: u64) -> Question<'a> {
        (self.share, self.sequences) = (share.clone(), sequences);
        if share.sharing.is_some() {
            self.host.file = FileSpec::NONE;
        }
        if share.sharing == Some(Sharing::Layers) {
            let own = share.own_layers(self.config.layers);
            let of_stage = |levels: Vec<RecomputeLevel>| levels[own.start as usize..own.end as usize].to_vec();
            self.pins.recompute = self.pins.recompute.map(of_stage);
        }
        self
    }
}

impl Question<'_> {
    /// The Programs of a recipe, of this device's share, before anything waits on the host.
    fn build(&self, config: &ModelConfig, recipe: &Recipe, files: bool) -> ProgramSet {
        let whole = build(&Build {
            config,
            layers: self.share.own_layers(config.layers),
            precision: self.precision,
            kernels: Kernels::of(self.device),
            sequence: self.sequence,
            // Who computes none takes part in what one takes.
            micro_batch: u64::from(recipe.micro_batch.max(1)),
            source: self.source.clone(),
            method: self.lossy.method.clone(),
            base: self.lossy.base,
            streamed_head: recipe.offload.streams_head(config.tied),
            training: self.optimizer.map(|optimizer| Training { optimizer, recompute: recipe.recompute.clone() }),
            evaluate: self.evaluate,
            generation: self.generation,
            files,
        });
        passes::share::share(whole, &self.share, recipe, self.micro_batches_of(recipe), config.tied)
    }

    /// All Programs of a recipe.
    pub fn programs(&self, recipe: &Recipe) -> ProgramSet {
        let plain = self.build(self.config, recipe, true);
        let one = self.micro_batches_of(recipe) == 1;
        let waits = passes::offload::offload(plain, self.layers() as u32, &recipe.offload, one);
        passes::trim::trim(self.mailed(self.with_file(waits, recipe.offload)))
    }

    /// Messages between the stages of a pipeline stand on the host, where a device's memory is its own.
    fn mailed(&self, set: ProgramSet) -> ProgramSet {
        let by_mail = self.share.sharing == Some(Sharing::Layers) && Kernels::of(self.device) == Kernels::Cuda;
        if by_mail { passes::mail::by_way_of_host(set) } else { set }
    }

    /// What of that which waits does so in the scratch file is moved there.
    fn with_file(&self, set: ProgramSet, offload: Offload) -> ProgramSet {
        let memory = if self.is_own_host() { Space::Device } else { Space::Host };
        match offload.file.is_nothing() {
            true => set,
            false => passes::scratch::scratch(set, self.layers() as u32, offload.file, memory),
        }
    }

    /// Whether the device is its own host: then nothing waits but in the scratch file.
    fn is_own_host(&self) -> bool {
        self.device.kind == DeviceKind::Cpu
    }

    fn layers(&self) -> usize {
        let own = self.share.own_layers(self.config.layers);
        (own.end - own.start) as usize
    }

    /// Whether it has the embedding, and a head that is not the embedding: stages of a pipeline may lack them.
    pub(crate) fn ends(&self) -> [bool; 2] {
        let (stage, stages) = self.share.stage();
        let (first, last, tied) = (stage == 0, stage + 1 == stages, self.config.tied);
        [first || last && tied, last && !tied]
    }

    fn uniform(&self, micro_batch: u32, level: RecomputeLevel) -> Recipe {
        self.recipe(micro_batch, vec![level; self.layers()], Offload::NOTHING)
    }

    /// What going over from one recipe to another does to the numbers.
    pub fn class_between(&self, from: &Recipe, to: &Recipe) -> Class {
        let host_sums = |recipe: &Recipe| {
            let question = rungs::under(self, &recipe.rungs);
            host_sums_for_gpu(&question, &question.programs(recipe))
        };
        let alike = from.offload.embedding == to.offload.embedding || host_sums(from) == host_sums(to);
        if from.micro_batch == to.micro_batch && alike { Class::Identical } else { Class::Reordered }
    }

    fn recipe(&self, micro_batch: u32, recompute: Vec<RecomputeLevel>, offload: Offload) -> Recipe {
        Recipe { micro_batch, recompute, offload, rungs: self.rungs.clone() }
    }

    /// Micro-batches worth trying: those that divide the step, and powers of two.
    fn micro_batches(&self) -> Vec<u32> {
        if self.only_holds() {
            return vec![0];
        }
        if let Some(pinned) = self.pins.micro_batch {
            return vec![pinned];
        }
        let most = self.sequences.clamp(1, 1 << 16) as u32;
        (1..=most).filter(|b| most.is_multiple_of(*b) || b.is_power_of_two()).collect()
    }

    /// Whether the device computes none of the sequences, and only holds a part of the state.
    fn only_holds(&self) -> bool {
        self.share.sharing == Some(Sharing::State) && self.sequences == 0
    }

    /// What each layer makes again, where that is not open.
    fn fixed_levels(&self) -> Option<Vec<RecomputeLevel>> {
        let nothing = || vec![RecomputeLevel::Nothing; self.layers()];
        match &self.pins.recompute {
            Some(pinned) if self.optimizer.is_some() => Some(pinned.clone()),
            _ => (self.optimizer.is_none() || self.only_holds()).then(nothing),
        }
    }

    /// How many micro-batches a step has.
    fn micro_batches_of(&self, recipe: &Recipe) -> u32 {
        self.share.micro_batches_of(self.sequences, recipe.micro_batch) as u32
    }

    /// Programs that compute.
    pub(crate) fn computing(&self, recipe: &Recipe) -> ProgramSet {
        let (plain, one) = (self.build(self.config, recipe, false), self.micro_batches_of(recipe) == 1);
        self.mailed(match recipe.offload.is_nothing() {
            true => plain,
            false => passes::offload::offload(plain, self.layers() as u32, &recipe.offload, one),
        })
    }

    pub(crate) fn prices(&self) -> Prices<'_> {
        let team_link = self.device.team_link;
        Prices { rates: &self.device.rates, host: &self.host, precision: self.precision, team_link }
    }

    fn seconds(&self, set: &ProgramSet, recipe: &Recipe) -> f64 {
        let count = self.micro_batches_of(recipe);
        let prices = self.prices();
        if self.optimizer.is_some() {
            return prices.schedule_seconds(set, &self.share.schedule(count).calls);
        }
        set.program("evaluate").map_or(0.0, |evaluate| prices.program_seconds(set, evaluate, true) * f64::from(count))
    }

    fn fits(&self, layout: &Layout) -> bool {
        let waits = layout.host.bytes <= self.host.budget.0 && layout.file.bytes <= self.host.file.budget.0;
        layout.device.bytes <= self.device.arena_budget().0 && waits
    }
}

/// All recipes of some micro-batches that are worth looking at.
fn candidates(measurer: &Measurer, micro_batches: &[u32]) -> Vec<Candidate> {
    let question = measurer.question;
    let waits = question.pins.offload.unwrap_or_default();
    let mut list: Vec<Candidate> =
        micro_batches.iter().flat_map(|&micro_batch| candidates_of(measurer, micro_batch, waits)).collect();
    if question.pins.offload.is_none() {
        offload::add(measurer, micro_batches, &mut list);
    }
    list
}

/// The recipes of one micro-batch under one choice of what waits.
fn candidates_of(measurer: &Measurer, micro_batch: u32, waits: Offload) -> Vec<Candidate> {
    let question = measurer.question;
    let lightest = question.fixed_levels().unwrap_or_else(|| vec![RecomputeLevel::Nothing; question.layers()]);
    let lightest = measurer.candidate(question.recipe(micro_batch, lightest, waits));
    let fits = measurer.fits(&lightest);
    let mut list = vec![lightest];
    if !fits && question.fixed_levels().is_none() {
        list.extend(measurer.recomputed(micro_batch, waits));
    }
    list
}

/// A recipe with everything that follows from it.
#[derive(Clone, Debug)]
pub(crate) struct Laid {
    recipe: Recipe,
    set: ProgramSet,
    layout: Layout,
}

impl Laid {
    fn new(question: &Question, recipe: Recipe) -> Laid {
        let set = question.programs(&recipe);
        let layout = lay_out(&set);
        Laid { recipe, set, layout }
    }

    fn answer(self, question: &Question, tried: Vec<Tried>) -> Answer {
        let Laid { recipe, set, layout } = self;
        let plan = write_down(question, question.fits(&layout), recipe, &set, &layout);
        Answer { plan, set, layout, tried, precision: question.precision }
    }
}

/// Finds the fastest plan that fits, with the least loss that is needed; where nothing fits, the leanest, with the
/// budgets that would do.
pub fn search(question: &Question) -> Answer {
    searched(&Sets::new(question), |known, refused| {
        let mut needs = rungs::needs(known, refused);
        rungs::foresee(known, refused, &mut needs);
        needs
    })
}

/// The same for one of several devices: what it would hold where a refusal's needs are met is for all of them to plan.
pub(crate) fn search_one_of(known: &Sets) -> Answer {
    searched(known, rungs::needs)
}

fn searched(known: &Sets, needs: impl Fn(&Sets, &Plan) -> Vec<Need>) -> Answer {
    let mut tried = Vec::new();
    let question = known.question;
    for rungs in rungs::sets(question, &question.lossy.allow) {
        if let Some(laid) = known.fastest(&rungs, &mut tried) {
            return Arc::unwrap_or_clone(laid).answer(&rungs::under(question, &rungs), tried);
        }
    }
    let leanest = known.leanest(&question.lossy.allow);
    let under = rungs::under(question, &leanest.recipe.rungs);
    let mut answer = Arc::unwrap_or_clone(leanest.laid(&under)).answer(&under, tried);
    if !answer.plan.fits {
        answer.plan.needs = needs(known, &answer.plan);
    }
    answer
}

/// Whether a device can hold anything under the present rungs, by the bounds of the recipe that needs the least.
pub(crate) fn can_hold(question: &Question) -> bool {
    can_hold_knowing(question, &Arc::default())
}

/// The same with what has been measured for questions that differ in load lines alone.
pub(crate) fn can_hold_knowing(question: &Question, known: &Arc<Known>) -> bool {
    let bound = question.device.arena_budget().0.saturating_add(1);
    offload::leanest(&Measurer::knowing(question, Arc::clone(known)), Some(bound)).is_some()
}

/// The fastest recipe that fits, by its packed arenas. What is looked at is added to `tried`, fastest first.
fn fastest(measurer: &Measurer, tried: &mut Vec<Tried>) -> Option<Arc<Laid>> {
    let question = measurer.question;
    let mut list = candidates(measurer, &question.micro_batches());
    list.sort_by(|a, b| a.seconds.total_cmp(&b.seconds).then(a.device.cmp(&b.device)));
    let mut looks: Vec<Tried> =
        list.iter().map(|candidate| candidate.tried(question.device.charges, measurer.fits(candidate))).collect();
    let mut found = None;
    let fitting = list.iter().zip(&mut looks).filter(|(candidate, _)| measurer.fits(candidate));
    for (candidate, look) in fitting.take(FINALISTS) {
        let laid = candidate.laid(question);
        look.peak_bytes = Bytes(laid.layout.device.bytes) + question.device.charges;
        look.host_bytes = Bytes(laid.layout.host.bytes);
        look.file_bytes = Bytes(laid.layout.file.bytes);
        look.fits = question.fits(&laid.layout);
        if look.fits {
            found = Some(laid);
            break;
        }
    }
    tried.extend(looks);
    found
}

/// The plan of one recipe, whatever the load lines say: for a resumed run, and for pins.
pub fn plan_of(question: &Question, recipe: &Recipe) -> Answer {
    let question = rungs::under(question, &recipe.rungs);
    Laid::new(&question, recipe.clone()).answer(&question, Vec::new())
}

/// The same, where another device has the same recipe: what stands where its tensors stand is laid out once. Programs of a
/// device on paper, which nobody runs, are the other's, without those that move files: they are long.
pub(crate) fn plan_like(question: &Question, recipe: &Recipe, like: &Answer) -> Answer {
    let question = rungs::under(question, &recipe.rungs);
    let set = match question.device.kind {
        DeviceKind::Paper if question.share.sharing == Some(Sharing::State) => {
            let runs = |program: &&Program| !matches!(program.work, WorkName::Load | WorkName::Save);
            let programs = like.set.programs.iter().filter(runs).cloned().collect();
            ProgramSet { programs, phases: vec![], tensors: like.set.tensors.clone() }
        }
        _ => question.programs(recipe),
    };
    let layout = if set.tensors == like.set.tensors { like.layout.clone() } else { lay_out(&set) };
    Laid { recipe: recipe.clone(), set, layout }.answer(&question, Vec::new())
}

/// Bytes of a checkpoint's tensors, which several may write: each once.
pub(crate) fn checkpoint_bytes<'a>(sets: impl IntoIterator<Item = &'a ProgramSet>) -> Bytes {
    let files = sets.into_iter().flat_map(|set| &set.tensors).filter(|tensor| tensor.space == Space::File);
    let saved = files.filter(|tensor| tensor.name.starts_with("checkpoint:"));
    let each: BTreeMap<&str, u64> = saved.map(|tensor| (&*tensor.name, tensor.bytes())).collect();
    Bytes(each.values().sum())
}

/// Whether the host adds up what a GPU's kernel adds up in another order: rows of the embedding's gradient. A virtual
/// device has the host's own kernel.
fn host_sums_for_gpu(question: &Question, set: &ProgramSet) -> bool {
    let by_host = |op: &Op| op.queue == Queue::Host && matches!(op.kind, OpKind::EmbedGrad { .. });
    let mut ops = set.programs.iter().flat_map(|program| &program.blocks).flat_map(|block| &block.ops);
    Kernels::of(question.device) == Kernels::Cuda && ops.any(by_host)
}

/// What a space beside the device holds.
fn beside(name: &str, simulated: bool, budget_bytes: Bytes, layout: &ArenaLayout) -> DevicePlan {
    DevicePlan {
        name: name.into(),
        simulated,
        budget_bytes,
        arena_bytes: Bytes(layout.bytes),
        charges_bytes: Bytes::ZERO,
        peak_bytes: Bytes(layout.bytes),
        by_category: layout.by_category.clone(),
        by_program: layout.by_program.clone(),
        lower_bound_bytes: Bytes(layout.lower_bound_bytes),
    }
}

fn write_down(question: &Question, fits: bool, recipe: Recipe, set: &ProgramSet, layout: &Layout) -> Plan {
    let device = question.device;
    let peak = Bytes(layout.device.bytes) + device.charges;
    let step_seconds = question.seconds(set, &recipe);
    let need = Need {
        allow: vec![],
        budget_bytes: peak,
        host_bytes: None,
        file_bytes: None,
        peak_bytes: None,
        others: BTreeMap::new(),
    };
    let needs = if fits { vec![] } else { vec![need] };
    let in_order = u64::from(recipe.micro_batch) >= question.sequences && !host_sums_for_gpu(question, set);
    Plan {
        fits,
        class: match (recipe.rungs.is_empty(), in_order) {
            (false, _) => Class::Lossy,
            (true, true) => Class::Identical,
            (true, false) => Class::Reordered,
        },
        rungs: recipe.rungs.clone(),
        checkpoint_bytes: checkpoint_bytes([set]),
        devices: vec![DevicePlan {
            name: device.name.clone(),
            simulated: device.simulated(),
            budget_bytes: device.budget,
            arena_bytes: Bytes(layout.device.bytes),
            charges_bytes: device.charges,
            peak_bytes: peak,
            by_category: layout.device.by_category.clone(),
            by_program: layout.device.by_program.clone(),
            lower_bound_bytes: Bytes(layout.device.lower_bound_bytes),
        }],
        host: beside("host", device.kind == DeviceKind::Virtual, question.host.budget, &layout.host),
        // The disk is this machine's, whoever plays the device.
        file: (layout.file.bytes > 0).then(|| beside("file", false, question.host.file.budget, &layout.file)),
        predicted: Predicted {
            step_seconds,
            tokens_per_second: (question.sequences * question.sequence) as f64 / step_seconds,
        },
        recipe,
        needs,
        of: None,
        disturbed: None,
        learned: None,
        algorithms: None,
        fallback: None,
        ladder: vec![],
        sharing: None,
        team: vec![],
        worth: None,
        link_seconds: None,
        faster_alone: None,
        left_out: vec![],
        alternatives: vec![],
    }
}
