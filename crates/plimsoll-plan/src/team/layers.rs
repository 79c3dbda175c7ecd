//! The layers stand one after another on the devices, each with a run of them that its memory and its speed allow, and
//! micro-batches go through them like through a pipeline. Only hidden states go from device to device, so slow links matter
//! little; what is lost is the time in which the pipeline fills and empties, and what its slowest stage takes longer than the
//! others. What a stage has no room for waits on the host, as it does beside one device: optimizer state, gradients, weights,
//! inputs of layers. Messages of GPUs stand there, too: where nothing of it may be used there is no pipeline over them.
//!
//! Where stages begin is found by dynamic programming over (stage, layers below): a stage of so many layers takes and holds
//! what was measured of stages of few, where nothing is computed again and where everything is, and what lies between is in
//! proportion; what still has no room is worked out to wait, which takes what was measured of stages of few of which all of it
//! waits, in proportion again. All stages together keep under the line of the host. How many sequences a micro-batch has, which
//! devices take part and in which order is tried. What is most promising is searched for recipes.

use super::{Given, LeftOut, ShareOut, TeamQuestion, Way, circles, out_of_way, slowest};
use crate::layout::lower_bounds;
use crate::price::Prices;
use crate::search::{Candidate, Pins, Question, fastest_by_bounds, side_by_side, under};
use plimsoll_core::{
    Bytes, Category, DeviceKind, DeviceSpec, Link, Offload, Recipe, RecomputeLevel, Rung, Sharing, Space, Worth,
};
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Lifetime, Program, ProgramSet, Schedule, Share, Tensor};
use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;

/// Of so many devices every order of stages is tried.
const EVERY_ORDER: usize = 4;
/// Sizes of micro-batches in a row that may be slower than the best before the rest is not looked at.
const WORSE: usize = 2;
/// Cuts that are searched for recipes before only those with the smallest micro-batches are.
const LOOKS: usize = 6;
/// Times that the stages are drawn anew because one has no recipe for its layers.
const TRIES: usize = 6;
/// Ways to cut the layers that are kept for so many stages and so many layers.
const FRONTIER: usize = 12;

/// What a stage takes for a micro-batch and in a step, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct StageSeconds {
    forward: f64,
    backward: f64,
    /// A message to the next stage, or from it.
    message: f64,
    /// Before the first and after the last pass.
    once: f64,
}

impl StageSeconds {
    /// What Programs of a stage come to by these prices.
    pub fn of(set: &ProgramSet, prices: &Prices) -> StageSeconds {
        let no_wire = Link { bytes_per_second: f64::INFINITY, latency_seconds: 0.0 };
        let alone = Prices { team_link: no_wire, ..*prices };
        let of = |prices: &Prices, name: &str| {
            set.program(name).map_or(0.0, |program: &Program| prices.program_seconds(set, program, true))
        };
        let once = |prices: &Prices| ["begin", "norm", "update"].into_iter().map(|name| of(prices, name)).sum::<f64>();
        let bytes = set.find("train.hidden").map_or(0, |hidden| set.tensor(hidden).bytes());
        StageSeconds {
            forward: of(&alone, "forward"),
            backward: of(&alone, "backward"),
            message: prices.team_link.latency_seconds + bytes as f64 / prices.team_link.bytes_per_second,
            once: once(prices),
        }
    }

    /// Seconds in which the stage computes.
    pub fn busy(&self, micro_batches: u32) -> f64 {
        f64::from(micro_batches) * (self.forward + self.backward) + self.once
    }

    fn between(self, other: StageSeconds, part: f64) -> StageSeconds {
        self.further(part, self, other)
    }

    /// So much of the way from `a` to `b` further.
    fn further(self, part: f64, a: StageSeconds, b: StageSeconds) -> StageSeconds {
        let go = |from: f64, a: f64, b: f64| from + part * (b - a);
        StageSeconds {
            forward: go(self.forward, a.forward, b.forward),
            backward: go(self.backward, a.backward, b.backward),
            message: go(self.message, a.message, b.message),
            once: go(self.once, a.once, b.once),
        }
    }
}

/// Seconds of a step of a pipeline: every stage does its calls in order. What goes down waits to be taken, what goes up is
/// handed over.
pub(super) fn step_seconds(stages: &[StageSeconds], micro_batches: u32) -> f64 {
    let count = stages.len();
    let passes = |stage: usize| {
        let schedule = Schedule::one_forward_one_backward(count as u32, stage as u32, micro_batches);
        let passes = schedule.calls.into_iter().filter(|call| ["forward", "backward"].contains(&&*call.program));
        passes.map(|call| (call.program == "forward", call.micro_batch as usize)).collect::<Vec<_>>()
    };
    let calls: Vec<Vec<(bool, usize)>> = (0..count).map(passes).collect();
    let (mut next, mut free) = (vec![0; count], vec![0.0f64; count]);
    // When what goes down and up is there to be taken; and whether a stage waits for that.
    let mut shown = vec![vec![None; micro_batches as usize]; count];
    let mut gradient = vec![vec![None; micro_batches as usize]; count];
    let mut handing = vec![false; count];
    while (0..count).any(|stage| next[stage] < calls[stage].len()) {
        for stage in 0..count {
            while let Some(&(forward, number)) = calls[stage].get(next[stage]).filter(|_| !handing[stage]) {
                let peer = if forward { stage.checked_sub(1) } else { Some(stage + 1).filter(|next| *next < count) };
                let ready: Option<f64> = match (peer, forward) {
                    (None, _) => Some(free[stage]),
                    (Some(below), true) => {
                        shown[below][number].map(|at: f64| at.max(free[stage]) + stages[below].message)
                    }
                    (Some(above), false) => {
                        gradient[above][number].map(|at: f64| at.max(free[stage]) + stages[stage].message)
                    }
                };
                let Some(ready) = ready else { break };
                if let (Some(above), false) = (peer, forward) {
                    (free[above], handing[above]) = (free[above].max(ready), false);
                }
                let StageSeconds { forward: down, backward: up, .. } = stages[stage];
                free[stage] = ready + if forward { down } else { up };
                let there = if forward { &mut shown } else { &mut gradient };
                there[stage][number] = Some(free[stage]);
                handing[stage] = !forward && stage > 0;
                next[stage] += 1;
            }
        }
    }
    let passes = free.iter().copied().fold(0.0, f64::max);
    passes + stages.iter().map(|stage| stage.once).fold(0.0, f64::max)
}

/// What may wait on the host: state, gradients, weights, inputs of layers; each only where all before it does.
const MAY_WAIT: usize = 4;

/// What a stage takes where nothing waits, and where all of the first, the first two, ... of what may wait does.
type Waiting = [StageSeconds; MAY_WAIT + 1];

/// A stage of some layers: bytes and seconds, where nothing is computed again and where everything is.
#[derive(Clone, Copy, Debug)]
struct Measured {
    bytes: [f64; 2],
    seconds: [Waiting; 2],
    has: Has,
    /// Bytes of a hidden state.
    hidden: f64,
}

/// Bytes of a stage that can wait on the host, in the order in which they do: what is touched least goes first.
#[derive(Clone, Copy, Debug, Default)]
struct Has {
    state: f64,
    gradients: f64,
    weights: f64,
    /// Of all micro-batches in flight.
    inputs: f64,
}

impl Has {
    fn of(set: &ProgramSet) -> Has {
        let bytes = |wanted: &dyn Fn(&Tensor) -> bool| {
            let of = set.tensors.iter().filter(|tensor| tensor.space == Space::Device && wanted(tensor));
            of.map(|tensor| tensor.bytes() * u64::from(tensor.slots)).sum::<u64>() as f64
        };
        let stays = |category: Category| {
            bytes(&|tensor: &Tensor| tensor.lifetime == Lifetime::Persistent && tensor.category == category)
        };
        Has {
            state: stays(Category::Optimizer),
            gradients: stays(Category::Gradient),
            weights: stays(Category::Weight),
            inputs: bytes(&|tensor: &Tensor| tensor.name == "train.hidden"),
        }
    }

    /// What of it waits where so many bytes have no room; none where that is not enough.
    fn waiting(self, mut bytes: f64) -> Option<Has> {
        let mut take = |most: f64| {
            let taken = bytes.clamp(0.0, most);
            bytes -= taken;
            taken
        };
        let Has { state, gradients, weights, inputs } = self;
        let waits =
            Has { state: take(state), gradients: take(gradients), weights: take(weights), inputs: take(inputs) };
        (bytes <= 0.0).then_some(waits)
    }

    fn sum(self) -> f64 {
        self.state + self.gradients + self.weights + self.inputs
    }

    fn between(self, other: Has, part: f64) -> Has {
        let mix = |a: f64, b: f64| a + part * (b - a);
        Has {
            state: mix(self.state, other.state),
            gradients: mix(self.gradients, other.gradients),
            weights: mix(self.weights, other.weights),
            inputs: mix(self.inputs, other.inputs),
        }
    }
}

impl Measured {
    /// The stage that a question is about; `may_wait` says whether anything of it can wait on the host.
    fn of(question: &Question, may_wait: bool) -> Measured {
        let (own, prices) = (question.share.own_layers(question.config.layers), question.prices());
        let all = (own.end - own.start) as u32;
        let of = |level: RecomputeLevel| {
            let levels = question.pins.recompute.clone();
            let levels = levels.unwrap_or_else(|| vec![level; all as usize]);
            let micro_batch = question.pins.micro_batch.unwrap_or(1);
            let recipe = Recipe { rungs: question.rungs.clone(), ..Recipe::on_device(micro_batch, levels) };
            let set = question.computing(&recipe);
            let mut seconds = [StageSeconds::of(&set, &prices); MAY_WAIT + 1];
            let with = |waiting: usize, update: bool| {
                let wait = |what: usize| if what < waiting { all } else { 0 };
                let [optimizer, gradients, weights, inputs] = [0, 1, 2, 3].map(wait);
                let [embedding, head] = question.ends().map(|there| there && weights > 0);
                let offload =
                    Offload { optimizer, gradients, weights, inputs, embedding, head, update, ..Offload::NOTHING };
                StageSeconds::of(&question.computing(&Recipe { offload, ..recipe.clone() }), &prices)
            };
            // The update of what waits is made by whom it takes less.
            let update = may_wait && with(3, true).once < with(3, false).once;
            for (waiting, seconds) in seconds.iter_mut().enumerate().skip(1).filter(|_| may_wait) {
                *seconds = with(waiting, update);
            }
            (lower_bounds(&set)[0] as f64, seconds, set)
        };
        let [(light, quick, set), (least, slow, _)] = [RecomputeLevel::Nothing, RecomputeLevel::Block].map(of);
        let hidden = set.find("train.hidden").map_or(0.0, |hidden| set.tensor(hidden).bytes() as f64);
        Measured { bytes: [light, least], seconds: [quick, slow], has: Has::of(&set), hidden }
    }
}

/// Stages of one layer more and more, from two that were measured.
#[derive(Clone, Copy, Debug)]
struct Stages {
    one: Measured,
    two: Measured,
}

/// What a stage of so many layers could be like.
#[derive(Clone, Copy, Debug)]
struct Stage {
    seconds: StageSeconds,
    /// Bytes that wait on the host.
    waits: f64,
}

/// What a stage works beside: its load line and the host.
#[derive(Clone, Copy, Debug)]
struct Beside {
    budget: f64,
    /// Bytes of the host that may be used at most.
    host: f64,
    micro_batches: u32,
    in_flight: u32,
}

impl Stages {
    /// The fastest stage of so many layers, and where it is another one that which needs the least of the host.
    fn of(&self, layers: u64, beside: &Beside) -> Vec<Stage> {
        let more = layers as f64 - 1.0;
        let grown = |one: f64, two: f64| one + more * (two - one);
        let [light, least] = [0, 1].map(|at| grown(self.one.bytes[at], self.two.bytes[at]));
        let has = self.one.has.between(self.two.has, more);
        // Gradients and weights come by way of buffers of two layers.
        let rings =
            2.0 * (self.two.has.gradients - self.one.has.gradients + self.two.has.weights - self.one.has.weights);
        let of = |again: f64| {
            let lacks = (light + again * (least - light) - beside.budget).max(0.0);
            let with_rings = if lacks > has.state { lacks + rings } else { lacks };
            let waits = has.waiting(with_rings)?;
            let seconds = self.waiting(more, again, has, waits);
            (waits.sum() <= beside.host).then(|| Stage { seconds, waits: waits.sum() })
        };
        // So much is computed again that what lacks room is nothing, or just the state; or nothing is, or all.
        let room = |waits: f64| ((light - waits - beside.budget) / (light - least).max(1.0)).clamp(0.0, 1.0);
        let Some(leanest) = of(1.0) else { return vec![] };
        let leanest = of(room(0.0)).filter(|stage| stage.waits <= leanest.waits).unwrap_or(leanest);
        if beside.host == 0.0 {
            return vec![leanest];
        }
        let busy = |stage: &Stage| stage.seconds.busy(beside.micro_batches);
        let others = [0.0, room(has.state), room(has.state + has.gradients)].into_iter().filter_map(of);
        let fastest = others.fold(leanest, |best, other| if busy(&other) < busy(&best) { other } else { best });
        if fastest.waits > leanest.waits { vec![fastest, leanest] } else { vec![fastest] }
    }

    /// What a stage of so many `more` layers than one takes that has so much, of which some waits, and computes so much
    /// `again`: between what was measured where all of it waits and where none does.
    fn waiting(&self, more: f64, again: f64, has: Has, waits: Has) -> StageSeconds {
        let at = |waiting: usize| {
            let [quick, slow] =
                [0, 1].map(|level| self.one.seconds[level][waiting].between(self.two.seconds[level][waiting], more));
            quick.between(slow, again)
        };
        let of = |has: Has| [has.state, has.gradients, has.weights, has.inputs];
        let parts = of(waits).into_iter().zip(of(has)).enumerate().filter(|(_, (waits, _))| *waits > 0.0);
        parts.fold(at(0), |sum, (what, (waits, has))| sum.further(waits / has, at(what), at(what + 1)))
    }
}

/// Whether anything of a stage can wait on a host of so many bytes.
fn may_wait(question: &Question, host: Bytes) -> bool {
    host > Bytes::ZERO && question.pins.offload.is_none() && question.device.kind != DeviceKind::Cpu
}

/// Pipelines of the devices of a team, under some lossy rungs.
pub(super) struct Layers<'t, 'q> {
    team: &'t TeamQuestion<'q>,
    rungs: &'t [Rung],
    /// Bytes of a device that are not planned with, because what packs did not.
    held_back: Vec<u64>,
    /// By kind of device, stage and number of stages, and sequences of a micro-batch.
    stages: RefCell<HashMap<(usize, usize, usize, u32), Stages>>,
    /// The fastest, until something is held back.
    fastest: OnceCell<Option<Way>>,
}

/// Where the layers are cut, before recipes are known.
#[derive(Clone, Debug)]
struct Sketch {
    micro_batch: u32,
    /// The first layer of each stage, and the number of all.
    layers: Vec<u64>,
    /// Bytes of the host that are used, those that each stage may have, and whether anything of it waits there.
    host: Bytes,
    hosts: Vec<Bytes>,
    waits: Vec<bool>,
    seconds: f64,
}

/// A way to cut off the first layers.
#[derive(Clone, Copy, Debug)]
struct Cut {
    slowest: f64,
    sum: f64,
    /// Bytes on the host.
    host: f64,
    /// The last stage, and the cut before it: how many layers that has, and which of their cuts it is.
    stage: Stage,
    before: (u64, usize),
}

impl<'t, 'q> Layers<'t, 'q> {
    pub fn new(team: &'t TeamQuestion<'q>, rungs: &'t [Rung]) -> Layers<'t, 'q> {
        Layers {
            team,
            rungs,
            held_back: vec![0; team.devices.len()],
            stages: RefCell::default(),
            fastest: OnceCell::new(),
        }
    }

    /// The layers of the model.
    fn depth(&self) -> u64 {
        self.team.devices[0].config.layers
    }

    /// The device as it is planned with in a team of some.
    fn spec(&self, device: usize, devices: &[usize]) -> DeviceSpec {
        let spec = self.team.devices[device].device;
        let team_link = slowest(devices.iter().map(|&device| self.team.devices[device].device.team_link));
        let budget = spec.budget.saturating_sub(Bytes(self.held_back[device]));
        DeviceSpec { team_link, budget, ..spec.clone() }
    }

    /// Whether the messages of a device stand on the host.
    fn by_mail(&self, device: usize) -> bool {
        Kernels::of(self.team.devices[device].device) == Kernels::Cuda
    }

    /// A question about a device of a team with this link, that has such layers, and so much of the host.
    fn question<'s>(
        &self,
        spec: &'s DeviceSpec,
        device: usize,
        share: &Share,
        micro_batch: u32,
        host: Bytes,
    ) -> Question<'s>
    where
        'q: 's,
    {
        let question = under(&self.team.of(device, share, self.team.total(), host), self.rungs);
        let pins = Pins { micro_batch: Some(micro_batch), ..question.pins.clone() };
        Question { device: spec, pins, ..question }
    }

    /// The stages that some devices can be.
    fn all_stages(&self, devices: &[usize], micro_batch: u32) -> Vec<Stages> {
        let count = devices.len();
        let key = |stage: usize| (self.team.first_alike(devices[stage]), stage, count, micro_batch);
        let unknown: Vec<usize> = (0..count).filter(|&stage| !self.stages.borrow().contains_key(&key(stage))).collect();
        let specs: Vec<DeviceSpec> = devices.iter().map(|&device| self.spec(device, devices)).collect();
        // A stage of so many layers, among others that have what is left.
        let of = |stage: usize, layers: u64| {
            let others = self.depth() - layers;
            let below = others * stage as u64 / (count as u64 - 1);
            let first = |rank: usize| match rank {
                rank if rank <= stage => below * rank as u64 / stage.max(1) as u64,
                rank => {
                    let (after, all) = ((rank - stage - 1) as u64, (count - stage - 1).max(1) as u64);
                    below + layers + (others - below) * after / all
                }
            };
            let layers: Vec<u64> = (0..=count).map(first).collect();
            let share = shares(&layers).swap_remove(stage);
            self.question(&specs[stage], devices[stage], &share, micro_batch, self.team.host)
        };
        let most = (self.depth() + 1 - count as u64).min(2);
        let questions: Vec<[Question; 2]> = unknown.iter().map(|&stage| [of(stage, 1), of(stage, most)]).collect();
        let host = self.team.host;
        let found = side_by_side(&questions, |[one, two]| {
            let may_wait = may_wait(one, host);
            Stages { one: Measured::of(one, may_wait), two: Measured::of(two, may_wait) }
        });
        let mut known = self.stages.borrow_mut();
        known.extend(unknown.iter().map(|&stage| key(stage)).zip(found));
        (0..count).map(|stage| known[&key(stage)]).collect()
    }

    /// What a stage works beside.
    fn beside(&self, devices: &[usize], stage: usize, micro_batch: u32, tight: u64) -> Beside {
        let question = under(&self.team.devices[devices[stage]], self.rungs);
        let spec = self.spec(devices[stage], devices);
        let micro_batches = self.team.total().div_ceil(u64::from(micro_batch)) as u32;
        Beside {
            budget: spec.arena_budget().0.saturating_sub(tight) as f64,
            host: if may_wait(&question, self.team.host) { self.team.host.0 as f64 } else { 0.0 },
            micro_batches,
            in_flight: ((devices.len() - stage) as u32).min(micro_batches).max(1),
        }
    }

    /// The best cut for some devices in this order; `tight` bytes of each are not used.
    fn sketch(&self, devices: &[usize], micro_batch: u32, tight: &[u64]) -> Option<Sketch> {
        let cuts = self.sketches(devices, micro_batch, tight).into_iter();
        cuts.min_by(|a, b| a.seconds.total_cmp(&b.seconds))
    }

    /// About the least of the host that would do for all devices, a sequence at a time.
    pub fn least_host(&self) -> Option<Bytes> {
        let micro_batch = self.team.devices[0].pins.micro_batch.unwrap_or(1);
        let devices = self.deepest(self.every_device())?;
        let orders = self.orders(&devices);
        let cuts = orders.iter().flat_map(|order| self.sketches(order, micro_batch, &vec![0; order.len()]));
        cuts.map(|cut| cut.host).min()
    }

    /// The cuts for some devices in this order that no other beats.
    fn sketches(&self, devices: &[usize], micro_batch: u32, tight: &[u64]) -> Vec<Sketch> {
        let stages = self.all_stages(devices, micro_batch);
        let (count, depth) = (devices.len(), self.depth());
        let beside: Vec<Beside> =
            (0..count).map(|stage| self.beside(devices, stage, micro_batch, tight[stage])).collect();
        let micro_batches = beside[0].micro_batches;
        // Messages of GPUs, for each micro-batch in flight and on its way.
        let mail = |stage: usize| match self.by_mail(devices[stage]) {
            true => f64::from(beside[stage].in_flight + 2) * stages[stage].one.hidden,
            false => 0.0,
        };
        let host = self.team.host.0 as f64 - (0..count).map(mail).sum::<f64>();
        // For each number of stages and of layers, the ways to cut them off that no other beats.
        let mut cuts: Vec<Vec<Vec<Cut>>> = Vec::new();
        for stage in 0..count {
            let mut next: Vec<Vec<Cut>> = vec![vec![]; depth as usize + 1];
            let most = depth - (count - stage - 1) as u64;
            let of: Vec<Vec<Stage>> = (1..=most)
                .map(|layers| stages[stage].of(layers, &beside[stage]))
                .take_while(|of| !of.is_empty())
                .collect();
            for below in 0..=depth {
                let before: Vec<(f64, f64, f64)> = match cuts.last() {
                    Some(cuts) => cuts[below as usize].iter().map(|cut| (cut.slowest, cut.sum, cut.host)).collect(),
                    None if below == 0 => vec![(0.0, 0.0, 0.0)],
                    None => vec![],
                };
                for (own, ways) in (1..).zip(&of).take_while(|(own, _)| below + own <= most) {
                    if stage + 1 == count && below + own < depth {
                        continue;
                    }
                    for (&way, (number, &(slowest, sum, waits))) in
                        ways.iter().flat_map(|way| before.iter().enumerate().map(move |before| (way, before)))
                    {
                        let busy = way.seconds.busy(micro_batches);
                        if waits + way.waits <= host.max(0.0) {
                            let (slowest, sum, host) = (slowest.max(busy), sum + busy, waits + way.waits);
                            let before = (below, number);
                            next[(below + own) as usize].push(Cut { slowest, sum, host, stage: way, before });
                        }
                    }
                }
            }
            next.iter_mut().for_each(unbeaten);
            cuts.push(next);
        }
        let sketch = |last: &Cut| {
            let (mut ways, mut layers, mut cut) = (vec![last.stage], vec![depth], last);
            for stage in (0..count - 1).rev() {
                let (below, number) = cut.before;
                cut = &cuts[stage][below as usize][number];
                ways.push(cut.stage);
                layers.push(below);
            }
            layers.push(0);
            ways.reverse();
            layers.reverse();
            let seconds: Vec<StageSeconds> = ways.iter().map(|way| way.seconds).collect();
            let left = (host - last.host).max(0.0) / count as f64;
            let of = |(stage, way): (usize, &Stage)| Bytes((way.waits + mail(stage) + left) as u64).min(self.team.host);
            Sketch {
                micro_batch,
                layers,
                host: Bytes((last.host + (0..count).map(mail).sum::<f64>()) as u64),
                hosts: ways.iter().enumerate().map(of).collect(),
                waits: ways.iter().map(|way| way.waits > 0.0).collect(),
                seconds: step_seconds(&seconds, micro_batches),
            }
        };
        let all = cuts.last().expect("there is a stage");
        all[depth as usize].iter().map(sketch).collect()
    }

    /// Orders of some devices that are worth trying: of a few every one, else as they were named, and by their memory, both
    /// ways.
    fn orders(&self, devices: &[usize]) -> Vec<Vec<usize>> {
        let mut by_memory = devices.to_vec();
        by_memory.sort_by_key(|&device| self.team.devices[device].device.arena_budget());
        let both = |order: Vec<usize>| [order.iter().rev().copied().collect(), order];
        let mut orders: Vec<Vec<usize>> = match devices.len() {
            ..=EVERY_ORDER => every_order(devices),
            _ => both(devices.to_vec()).into_iter().chain(both(by_memory)).collect(),
        };
        orders.sort_by_key(|order| order != devices);
        let kinds = |order: &Vec<usize>| order.iter().map(|&d| self.team.first_alike(d)).collect::<Vec<_>>();
        let mut seen = Vec::new();
        orders.retain(|order| {
            let new = !seen.contains(&kinds(order));
            seen.push(kinds(order));
            new
        });
        orders
    }

    /// The fastest way for some devices, all of which take part.
    fn way(&self, devices: &[usize]) -> Option<Way> {
        let total = self.team.total();
        let sizes: Vec<u32> = match self.team.devices[0].pins.micro_batch {
            Some(pinned) => vec![pinned],
            None => (0..16).map(|power| 1 << power).take_while(|&size| u64::from(size) <= total).collect(),
        };
        let mut found: Vec<(Vec<usize>, Sketch)> = Vec::new();
        for order in self.orders(devices) {
            let (mut best, mut worse) = (f64::INFINITY, 0);
            for &size in &sizes {
                let Some(sketch) = self.sketch(&order, size, &vec![0; order.len()]) else { continue };
                worse = if sketch.seconds < best { 0 } else { worse + 1 };
                best = best.min(sketch.seconds);
                found.push((order.clone(), sketch));
                if worse >= WORSE {
                    break;
                }
            }
        }
        found.sort_by(|a, b| a.1.seconds.total_cmp(&b.1.seconds));
        // What is worth most, and what needs the least.
        let least = found.iter().map(|(_, sketch)| sketch.micro_batch).min();
        let leanest = found.iter().skip(LOOKS).filter(|(_, sketch)| Some(sketch.micro_batch) == least);
        found.iter().take(LOOKS).chain(leanest).find_map(|(order, sketch)| self.searched(order, sketch))
    }

    /// A sketch with the recipe of each stage, if all have one.
    fn searched(&self, devices: &[usize], sketch: &Sketch) -> Option<Way> {
        let specs: Vec<DeviceSpec> = devices.iter().map(|&device| self.spec(device, devices)).collect();
        let mut tight = vec![0; devices.len()];
        let mut sketch = sketch.clone();
        for _ in 0..TRIES {
            let shares = shares(&sketch.layers);
            let of = |stage: usize| {
                let (spec, device, share) = (&specs[stage], devices[stage], &shares[stage]);
                let question = self.question(spec, device, share, sketch.micro_batch, sketch.hosts[stage]);
                let all_here = (!sketch.waits[stage]).then_some(Offload::NOTHING);
                let pins = Pins { offload: question.pins.offload.or(all_here), ..question.pins.clone() };
                Question { pins, ..question }
            };
            let questions: Vec<Question> = (0..devices.len()).map(of).collect();
            let found = side_by_side(&questions, |question| {
                let found = fastest_by_bounds(question)?;
                let seconds = StageSeconds::of(&question.computing(&found.recipe), &question.prices());
                Some((found, seconds))
            });
            let without: Vec<usize> = (0..devices.len()).filter(|&stage| found[stage].is_none()).collect();
            if without.is_empty() {
                let found: Vec<_> = found.into_iter().flatten().collect();
                let seconds: Vec<StageSeconds> = found.iter().map(|(_, seconds)| *seconds).collect();
                let micro_batches = self.team.total().div_ceil(u64::from(sketch.micro_batch)) as u32;
                let given = |(stage, (candidate, _)): (usize, &(Candidate, _))| Given {
                    device: devices[stage],
                    share: shares[stage].clone(),
                    sequences: self.team.total(),
                    recipe: candidate.recipe.clone(),
                    host: sketch.hosts[stage],
                    device_bytes: candidate.device,
                    host_bytes: candidate.host,
                };
                let ranks = found.iter().enumerate().map(given).collect();
                let seconds = step_seconds(&seconds, micro_batches);
                return Some(Way { sharing: Some(Sharing::Layers), ranks, seconds });
            }
            for stage in without {
                tight[stage] += specs[stage].arena_budget().0 / 32;
            }
            sketch = self.sketch(devices, sketch.micro_batch, &tight)?;
        }
        None
    }
}

impl Layers<'_, '_> {
    fn slowest(&self, devices: &[usize]) -> Option<usize> {
        let speed = |device: usize| self.team.devices[device].device.rates.f32_flops;
        devices.iter().copied().min_by(|&a, &b| speed(a).total_cmp(&speed(b)))
    }

    /// As many of some devices as can have a layer each, if there can be a pipeline of them at all.
    fn deepest(&self, mut devices: Vec<usize>) -> Option<Vec<usize>> {
        let pinned = &self.team.devices[0].pins;
        if self.team.devices[0].optimizer.is_none() || pinned.offload.is_some_and(|offload| !offload.is_nothing()) {
            return None;
        }
        if self.team.host == Bytes::ZERO && devices.iter().any(|&device| self.by_mail(device)) {
            return None;
        }
        while devices.len() as u64 > self.depth() && !self.team.all {
            let out = self.slowest(&devices)?;
            devices.retain(|device| *device != out);
        }
        (2..=self.depth()).contains(&(devices.len() as u64)).then_some(devices)
    }

    fn every_device(&self) -> Vec<usize> {
        (0..self.team.devices.len()).collect()
    }

    fn found(&self) -> Option<Way> {
        let devices = self.every_device();
        if self.team.all {
            return self.way(&self.deepest(devices)?);
        }
        let circles = circles(&devices, |device| self.team.devices[device].device.team_link);
        let ways = circles.into_iter().filter_map(|circle| self.way_without_the_slow(self.deepest(circle)?));
        ways.min_by(|a, b| a.seconds.total_cmp(&b.seconds))
    }

    /// The fastest way for some devices, or for fewer of them where each that is left out was in the way of the others.
    fn way_without_the_slow(&self, mut devices: Vec<usize>) -> Option<Way> {
        let mut best = self.way(&devices);
        while devices.len() > 2 {
            let mut outs = match devices.len() {
                ..=EVERY_ORDER => devices.clone(),
                _ => self.slowest(&devices).into_iter().collect(),
            };
            outs.dedup_by_key(|device| self.team.first_alike(*device));
            let fewer = outs.into_iter().filter_map(|out| {
                let devices: Vec<usize> = devices.iter().copied().filter(|&device| device != out).collect();
                self.way(&devices).map(|way| (devices, way))
            });
            match fewer.min_by(|a, b| a.1.seconds.total_cmp(&b.1.seconds)) {
                Some((fewer, way)) if best.as_ref().is_none_or(|best| way.seconds < best.seconds) => {
                    (devices, best) = (fewer, Some(way));
                }
                _ => break,
            }
        }
        best
    }
}

impl ShareOut for Layers<'_, '_> {
    fn fastest(&self) -> Option<Way> {
        self.fastest.get_or_init(|| self.found()).clone()
    }

    fn strike(&mut self, way: &Way, rank: usize, over: Bytes) {
        // At least a little, so that this comes to an end.
        let Given { device, .. } = way.ranks[rank];
        self.fastest.take();
        self.held_back[device] += over.0 + self.team.devices[device].device.budget.0 / 256;
    }

    fn left_out(&self, way: &Way) -> Vec<LeftOut> {
        out_of_way(self.team, way, "it has no recipe with a layer of its own", |devices| {
            (devices.len() as u64 <= self.depth()).then(|| self.way(devices)).flatten()
        })
    }

    fn worth(&self, _: &Way) -> Option<Worth> {
        None
    }
}

/// All orders of some devices.
fn every_order(devices: &[usize]) -> Vec<Vec<usize>> {
    if devices.is_empty() {
        return vec![vec![]];
    }
    let first = |&first: &usize| {
        let others: Vec<usize> = devices.iter().copied().filter(|&device| device != first).collect();
        every_order(&others).into_iter().map(move |order| [vec![first], order].concat()).collect::<Vec<_>>()
    };
    devices.iter().flat_map(first).collect()
}

/// Keeps the cuts that no other beats in every way: the fastest of them, and that which needs the least of the host.
fn unbeaten(cuts: &mut Vec<Cut>) {
    cuts.sort_by(|a, b| a.slowest.total_cmp(&b.slowest).then(a.sum.total_cmp(&b.sum)).then(a.host.total_cmp(&b.host)));
    let mut kept: Vec<Cut> = Vec::new();
    for cut in cuts.drain(..) {
        if kept.iter().all(|other| cut.sum < other.sum || cut.host < other.host) {
            kept.push(cut);
        }
    }
    let leanest = kept.iter().skip(FRONTIER).min_by(|a, b| a.host.total_cmp(&b.host)).copied();
    kept.truncate(FRONTIER);
    kept.extend(leanest);
    *cuts = kept;
}

/// Shares of layers for ranks in order.
pub(super) fn shares(layers: &[u64]) -> Vec<Share> {
    let share = |rank: usize| Share {
        sharing: Some(Sharing::Layers),
        rank: rank as u32,
        ranks: layers.len() as u32 - 1,
        layers: layers.to_vec(),
        ..Share::ALONE
    };
    (0..layers.len() - 1).map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(forward: f64, backward: f64, message: f64) -> StageSeconds {
        StageSeconds { forward, backward, message, once: 0.0 }
    }

    #[test]
    fn equal_stages_lose_the_time_in_which_the_pipeline_fills_and_empties() {
        for stages in 1..6usize {
            for micro_batches in 1..9 {
                let found = step_seconds(&vec![stage(1.0, 2.0, 0.0); stages], micro_batches);
                let expected = 3.0 * (f64::from(micro_batches) + stages as f64 - 1.0);
                assert!((found - expected).abs() < 1e-9, "{stages} stages, {micro_batches}: {found}, {expected}");
            }
        }
    }

    #[test]
    fn a_step_is_as_long_as_its_slowest_stage_and_no_longer_than_all_in_turn() {
        for (one, two, three) in [(1.0, 2.0, 3.0), (3.0, 2.0, 1.0), (1.0, 5.0, 1.0), (2.0, 0.1, 2.0)] {
            for message in [0.0, 0.3] {
                let stages = [one, two, three].map(|forward| stage(forward, 2.0 * forward, message));
                for micro_batches in [1, 2, 3, 10] {
                    let found = step_seconds(&stages, micro_batches);
                    let all: f64 = stages.iter().map(|stage| stage.forward + stage.backward).sum();
                    let slowest = stages.iter().map(|stage| stage.forward + stage.backward).fold(0.0, f64::max);
                    let count = f64::from(micro_batches);
                    assert!(found >= (count * slowest).max(all + 4.0 * message) - 1e-9);
                    assert!(found <= count * (all + 4.0 * message) + 1e-9);
                }
            }
        }
    }
}
