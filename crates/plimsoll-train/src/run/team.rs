//! The devices that work on a run, each with its engine, its share of every step, and the load line that it is held
//! under. A team of one is the rule. What several do they do at the same time, each on a thread of its own; what one of
//! them refuses is dropped by all, so that they stay at the same step.

use super::drift::SECONDS_LEAST;
use super::engine::{Engine, StepInput, StepLoss};
use super::far::spread::{Gathered, Member as Reached, Spread};
use super::far::{Elsewhere, Hosts};
use super::heartbeat::{Hangs, Heart, Watch, silent};
use super::pace::quantile;
use super::prepare::Part;
use super::rehearsal::{Asked, Rehearsal};
use super::retreat::Line;
use super::samples::Continues;
use super::trouble::Trouble;
use crate::data::Rows;
use crate::files::StoredTensor;
use plimsoll_core::{
    Bytes, DType, DeviceKind, DeviceMemory, DevicePlan, DeviceSpec, HostSpec, MeasuredBy, Member, MemberResult, Plan,
    Rates, Sharing, Space,
};
use plimsoll_device::cuda::collectives;
use plimsoll_device::device::{DeviceError, FileSpace};
use plimsoll_device::transport::{Seat, Transport, memory};
use plimsoll_device::{calibration, process};
use plimsoll_plan::price::Prices;
use plimsoll_plan::search::Answer;
use plimsoll_program::Share;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// One device at work.
pub struct Worker {
    /// What it is; its charges are those of its plan.
    pub device: DeviceSpec,
    /// What of each step is its own.
    pub share: Share,
    /// Sequences of each step that it computes.
    pub sequences: u64,
    /// The device with its Programs.
    pub engine: Engine,
    /// Its own plan, as if it were alone with its share.
    pub plan: Plan,
    /// The plan under which it held most so far.
    pub largest: DevicePlan,
    /// How much of its arena was used under that plan, measured.
    used: Bytes,
    /// The most that it held before the arenas that there are now, measured; none of a GPU.
    held: Bytes,
    /// The load line, and what moves it.
    pub line: Line,
    /// Its part of a step, where there are others.
    rows: Rows,
    /// Whether it has done the update of the present step.
    updated: bool,
    computing: Computing,
    /// What it computed in the last step took so long, measured and predicted; nothing where it does not tell.
    computed: (f64, f64),
    /// What was measured of that over what was predicted, in each step.
    factors: Vec<f64>,
    /// Its signs of life, where others may wait for it.
    heart: Option<Heart>,
}

/// Fewer steps say nothing of a device's speed.
const STEPS_LEAST: usize = 8;

impl Worker {
    /// A device that is open under the plan of its part.
    pub fn new(part: &Part, engine: Engine, plan: Plan, line: Line) -> Worker {
        Worker {
            device: part.device.clone(),
            share: part.share.clone(),
            sequences: part.sequences,
            engine,
            largest: plan.devices[0].clone(),
            plan,
            used: Bytes::ZERO,
            held: Bytes::ZERO,
            line,
            rows: Rows::default(),
            updated: false,
            computing: Computing::of(&part.device, &part.answer),
            computed: (0.0, 0.0),
            factors: Vec::new(),
            heart: None,
        }
    }

    /// Whether its rates were measured just now beside other work: those of the processor can be.
    fn is_disturbed(&self) -> bool {
        self.device.kind == DeviceKind::Cpu && calibration::disturbed().is_some()
    }

    /// Begins to give signs of life.
    fn live(&mut self, silence: Duration) {
        self.heart = self.engine.heart(&self.device.name, silence);
    }

    /// Its thread begins some work, or is back from it.
    fn at_work(&self, at_work: bool) {
        if let Some(heart) = &self.heart {
            heart.pulse().at_work(at_work);
        }
    }

    /// How much of its arena was used, where that was never larger.
    fn look_back(&mut self) {
        if self.plan.devices[0].peak_bytes == self.largest.peak_bytes {
            self.used = self.used.max(self.engine.stats().arena_measured_bytes);
        }
    }

    /// It has gone over to another plan, which predicts what it computes.
    pub fn goes_by(&mut self, plan: Plan, computing: Computing) {
        self.computing = computing;
        // Products of other sizes have algorithms now that the next checkpoint has to know.
        self.plan = Plan { algorithms: self.engine.algorithms(), ..plan };
        self.device.charges = self.plan.devices[0].charges_bytes;
        self.line.waits(self.plan.host.arena_bytes);
        if self.plan.devices[0].peak_bytes > self.largest.peak_bytes {
            (self.largest, self.used) = (self.plan.devices[0].clone(), Bytes::ZERO);
        }
    }

    /// The rows of a step that are its own; in the last step of all there may be fewer.
    fn own(&self, rows: usize) -> Range<usize> {
        let first = (self.share.first_sequence as usize).min(rows);
        first..(first + self.sequences as usize).min(rows)
    }
}

/// Predicted seconds in which a device computes before the update of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Computing {
    /// A forward and a backward pass.
    micro_batch: f64,
    /// What comes before the first and after the last.
    once: f64,
}

impl Computing {
    /// What a plan says.
    pub fn of(device: &DeviceSpec, answer: &Answer) -> Computing {
        let (rates, team_link) = (&device.rates, device.team_link);
        let prices = Prices { rates, host: &HostSpec::NONE, precision: answer.precision, team_link };
        let of = |programs: [&str; 2]| {
            let found = programs.iter().filter_map(|name| answer.set.program(name));
            found.map(|program| prices.computing_seconds(&answer.set, program)).sum()
        };
        Computing { micro_batch: of(["forward", "backward"]), once: of(["begin", "norm"]) }
    }
}

/// All devices of a run, in the order of ranks.
pub struct Team {
    workers: Vec<Worker>,
    transport: Arc<dyn Transport>,
    /// After so long without a sign of life a device is lost.
    silence: Duration,
    watch: Option<Watch>,
    hangs: Hangs,
    /// Bytes of arenas in this process's memory that stand beside those of the team, and the most that the process held with
    /// them, the team's left out, before the team's arenas that there are now, measured.
    beside: Bytes,
    held_beside: Bytes,
    /// The devices that live elsewhere.
    elsewhere: Elsewhere,
    /// Teams that there have been.
    teams: u64,
}

/// What carries bytes between these devices: those of a GPU go through its staging.
fn transport(workers: &[Worker]) -> Arc<dyn Transport> {
    let ranks = workers.len() as u32;
    match workers.iter().any(|worker| worker.device.kind == DeviceKind::Cuda) {
        true => memory::Memory::in_rounds(ranks, collectives::ROUND_BYTES),
        false => memory::Memory::between(ranks),
    }
}

impl Continues for Team {
    fn extend(&mut self, tokens: &[i32], length: usize) -> Result<Vec<f64>, Trouble> {
        if !self.holds_parts() {
            return Ok(self.workers[0].engine.extend(tokens, length)?);
        }
        // All have the same tokens; those that come to logits, which of a pipeline is the last stage, come to the same.
        let all = self.all(|worker| Ok(worker.engine.extend(tokens, length)?))?;
        Ok(all.into_iter().find(|logits| !logits.is_empty()).expect("somebody has the head"))
    }

    fn capacity(&self) -> usize {
        self.workers[0].engine.capacity()
    }
}

/// Tells the others when its thread panics: they may be waiting for what it would have sent.
struct GiveUpOnPanic<'a>(&'a dyn Transport, usize);

impl Drop for GiveUpOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.give_up(self.1 as u32, "a fault of its own");
        }
    }
}

impl Team {
    /// Brings open devices together.
    ///
    /// # Errors
    /// A device that cannot work in a team.
    pub fn new(workers: Vec<Worker>, elsewhere: Elsewhere, silence: Duration, hangs: Hangs) -> Result<Team, Trouble> {
        let transport = transport(&workers);
        let (beside, held_beside) = (Bytes::ZERO, Bytes::ZERO);
        let mut team =
            Team { workers, transport, silence, watch: None, hangs, elsewhere, teams: 0, beside, held_beside };
        // A process elsewhere misses the run, too.
        let several = team.len() > 1;
        let missed = |worker: &&mut Worker| several || worker.engine.far().is_some();
        team.workers.iter_mut().filter(missed).for_each(|worker| worker.live(silence));
        team.seat()?;
        Ok(team)
    }

    /// From now on these devices are missed where they are silent.
    fn watch(&mut self) {
        let pulse =
            |(rank, worker): (u32, &Worker)| Some((rank, worker.device.name.clone(), worker.heart.as_ref()?.pulse()));
        // The one before looks away first.
        self.watch = None;
        let team: Vec<_> = (0..).zip(&self.workers).filter_map(pulse).collect();
        let transport = Arc::clone(&self.transport);
        let lost = move |rank: u32, why: &str| transport.give_up(rank, why);
        let watch = || Watch::start(team, lost, self.silence, Arc::clone(&self.hangs));
        self.watch = if self.len() > 1 { watch() } else { None };
    }

    /// A device that was silent for too long.
    fn missed(&self) -> Option<Trouble> {
        let is_lost = |worker: &Worker| worker.heart.as_ref().is_some_and(|heart| heart.pulse().is_lost());
        let rank = self.workers.iter().position(is_lost)?;
        Some(Trouble::Lost { rank, why: silent(&self.workers[rank].device.name, self.silence) })
    }

    /// Tells every device its place.
    fn seat(&mut self) -> Result<(), Trouble> {
        if self.len() > 1
            && self.workers.iter().any(|worker| worker.engine.far().is_some())
            && let Some(hosts) = self.elsewhere.hosts()
        {
            return self.seat_apart(&*hosts);
        }
        self.watch();
        if self.len() == 1 {
            return Ok(());
        }
        for (rank, worker) in (0..).zip(&mut self.workers) {
            worker.engine.join(Seat { rank, transport: Arc::clone(&self.transport) })?;
        }
        Ok(())
    }

    /// The same where some of them live elsewhere: they meet over wires.
    fn seat_apart(&mut self, hosts: &dyn Hosts) -> Result<(), Trouble> {
        let reached = |worker: &Worker| match worker.engine.far() {
            Some(line) => Reached::Far(Arc::clone(line)),
            None => Reached::Here,
        };
        let members: Vec<Reached> = self.workers.iter().map(reached).collect();
        self.teams += 1;
        let lost = |(rank, error): (usize, DeviceError)| match Trouble::from(error).of_rank(rank) {
            Trouble::Peer(error) => Trouble::Lost { rank, why: error.to_string() },
            other => other,
        };
        let Gathered { transport, seats } = Spread::gather(&members, hosts, self.teams).map_err(lost)?;
        self.transport = transport;
        for (worker, seat) in self.workers.iter_mut().zip(seats) {
            match seat {
                Some(seat) => worker.engine.join(seat)?,
                None => worker.engine.is_seated(),
            }
        }
        self.watch();
        Ok(())
    }

    /// How many devices there are.
    pub fn len(&self) -> usize {
        self.workers.len()
    }

    /// All of them.
    pub fn workers(&self) -> &[Worker] {
        &self.workers
    }

    /// One of them.
    pub fn worker(&mut self, rank: usize) -> &mut Worker {
        &mut self.workers[rank]
    }

    /// The one that writes files and draws samples.
    pub fn first(&mut self) -> &mut Worker {
        &mut self.workers[0]
    }

    /// The rank of the device of this name; where none is named there must be one alone.
    ///
    /// # Errors
    /// No such device, in words.
    pub fn named(&self, device: Option<&str>) -> Result<usize, String> {
        let names = || self.workers.iter().map(|worker| worker.device.name.as_str()).collect::<Vec<_>>().join(", ");
        match device {
            None if self.len() == 1 => Ok(0),
            None => Err(format!("name the device: --device one of {}", names())),
            Some(name) => {
                let rank = self.workers.iter().position(|worker| worker.device.name == name);
                rank.ok_or_else(|| format!("no `{name}` works on this run; there is {}", names()))
            }
        }
    }

    /// All do some work at the same time. Where one cannot, none has done it, and what happened to that one is told.
    pub fn all<T: Send>(&mut self, work: impl Fn(&mut Worker) -> Result<T, Trouble> + Sync) -> Result<Vec<T>, Trouble> {
        let transport = &*self.transport;
        let work = |rank: usize, worker: &mut Worker| {
            let _guard = GiveUpOnPanic(transport, rank);
            worker.at_work(true);
            let result = work(worker);
            worker.at_work(false);
            if let Err(trouble) = &result {
                transport.give_up(rank as u32, &trouble.what());
            }
            result.map_err(|trouble| trouble.of_rank(rank))
        };
        let (first, others) = self.workers.split_first_mut().expect("a team has a device");
        let results: Vec<Result<T, Trouble>> = thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> =
                (1..).zip(others).map(|(rank, worker)| scope.spawn(move || work(rank, worker))).collect();
            let mut results = vec![work(0, first)];
            results.extend(threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| resume_unwind(panic))));
            results
        });
        self.transport.clear();
        if let Some(trouble) = self.missed() {
            return Err(trouble);
        }
        let mut done = Vec::new();
        let mut worst: Option<Trouble> = None;
        for result in results {
            match result {
                Ok(value) => done.push(value),
                Err(trouble) if worst.as_ref().is_none_or(|worst| trouble.weight() > worst.weight()) => {
                    worst = Some(trouble);
                }
                Err(_) => {}
            }
        }
        match worst {
            None => Ok(done),
            // It has nothing to say itself, and the others do not reach it.
            Some(Trouble::Peer(DeviceError::CutOff { rank, why })) => {
                let name = self.workers.get(rank as usize).map_or("a device", |worker| &worker.device.name);
                Err(Trouble::Lost { rank: rank as usize, why: format!("{name} cannot be reached: {why}") })
            }
            Some(worst) => Err(worst),
        }
    }

    /// From now on this step is being done: for rehearsals.
    pub fn at_step(&mut self, step: u64) {
        for worker in &mut self.workers {
            worker.engine.at_step(step);
            worker.updated = false;
        }
    }

    /// Devices refuse, and are lost, where this says.
    pub fn rehearse(&mut self, asked: &[Arc<Asked>], seed: u64) {
        for (rank, worker) in (0..).zip(&mut self.workers) {
            let pulse = worker.heart.as_ref().map(Heart::pulse);
            worker.engine.rehearse(Rehearsal::new(asked, seed, rank, &worker.device.name, pulse));
        }
    }

    /// Gradients of all rows of a step, and the clip factor: on each device those of its own rows, summed up over all.
    /// The weights stay as they are.
    ///
    /// # Errors
    /// What a device fails with; the step is dropped on all of them.
    pub fn gradients(&mut self, rows: &mut Rows, input: &StepInput) -> Result<StepLoss, Trouble> {
        if let [only] = &mut self.workers[..] {
            return Ok(only.engine.gradients(rows, input)?);
        }
        let rows = &*rows;
        let together = self.micro_batches();
        let found = self.all(|worker| {
            let own = worker.own(rows.len());
            worker.rows.copy_from(rows, own);
            // Micro-batches in which it has nothing to do, but others need its part of the state.
            while (worker.rows.len() as u64) < together * u64::from(worker.plan.recipe.micro_batch) {
                worker.rows.push_empty();
            }
            Ok(worker.engine.gradients(&mut worker.rows, input)?)
        })?;
        for worker in &mut self.workers {
            let Some(own) = worker.engine.computed() else { continue };
            let predicted = own.micro_batches as f64 * worker.computing.micro_batch + worker.computing.once;
            worker.computed = (own.seconds, predicted);
            worker.factors.push(own.seconds / predicted);
        }
        Ok(found[0])
    }

    /// A step of a device alone took so long, measured.
    pub fn took(&mut self, seconds: f64) {
        if let [only] = &mut self.workers[..] {
            only.factors.push(seconds / only.plan.predicted.step_seconds);
        }
    }

    /// Whether each device holds a part of the model that no other has: of the state, or of the layers.
    pub fn holds_parts(&self) -> bool {
        matches!(self.workers[0].share.sharing, Some(Sharing::State | Sharing::Layers))
    }

    /// Micro-batches of a step that all have to do together, because each holds a part of the state: as many as whoever has
    /// most of them. 0 where everybody works by itself.
    fn micro_batches(&self) -> u64 {
        let of = |worker: &Worker| worker.sequences.div_ceil(u64::from(worker.plan.recipe.micro_batch));
        if self.holds_parts() { self.workers.iter().map(of).max().unwrap_or(0) } else { 0 }
    }

    /// Measured and predicted seconds in which each device computed in the last step.
    pub fn computed(&self) -> Vec<(f64, f64)> {
        self.workers.iter().map(|worker| worker.computed).collect()
    }

    /// The weights change, on all devices in the same way. Called again after a refusal, it goes on where it stopped, on
    /// those that are not done.
    ///
    /// # Errors
    /// What a device fails with; the others have done it all the same.
    pub fn update(&mut self) -> Result<(), Trouble> {
        self.all(|worker| {
            if !worker.updated {
                worker.engine.update()?;
                worker.updated = true;
            }
            Ok(())
        })?;
        Ok(())
    }

    /// How far the update of the present step has come: ops that are done, over all devices; those of one that is done count
    /// as more than any has.
    pub fn updated(&self) -> u64 {
        let of = |worker: &Worker| if worker.updated { 1 << 32 } else { worker.engine.updated() };
        self.workers.iter().map(of).sum()
    }

    /// Lets all devices go, with all that stands on them.
    pub fn disband(&mut self) {
        self.watch = None;
        self.workers.clear();
    }

    /// What a device holds now, measured: a GPU by itself, the others in this process, of which what belongs to other
    /// devices and to the host's side is not theirs.
    pub fn held(&mut self, rank: usize) -> Bytes {
        let elsewhere = self.arenas_beside(rank);
        let worker = &mut self.workers[rank];
        match worker.device.in_process() {
            false => worker.engine.held(),
            true => process::resident().unwrap_or(Bytes::ZERO).saturating_sub(elsewhere),
        }
    }

    /// Before an arena changes or a device leaves: what was used and held under the arenas that there are. Nothing is asked
    /// of a device that is `gone`.
    pub fn look_back(&mut self, gone: Option<usize>) {
        let peak = process::peak_resident().unwrap_or(Bytes::ZERO);
        for rank in (0..self.len()).filter(|rank| Some(*rank) != gone) {
            let held = peak.saturating_sub(self.arenas_beside(rank));
            let worker = &mut self.workers[rank];
            worker.look_back();
            worker.held = worker.held.max(held);
        }
        self.held_beside = self.held_beside.max(peak.saturating_sub(self.arenas()));
        let _ = process::reset_peak();
    }

    /// From now on a device beside the team has arenas of so many bytes in this process's memory, which held so much with
    /// them before.
    pub fn stands_beside(&mut self, arenas: Bytes, held: Bytes) {
        (self.beside, self.held_beside) = (arenas, held);
    }

    /// What this process held at most with what stands beside the team, the team's own arenas left out, measured.
    pub fn held_beside(&mut self) -> Option<Bytes> {
        let peak = process::peak_resident().ok()?;
        Some(peak.saturating_sub(self.arenas()).max(self.held_beside))
    }

    /// Bytes of the team's arenas in this process's memory.
    fn arenas(&mut self) -> Bytes {
        (0..self.len()).map(|rank| self.arenas_of(rank)).map(|[device, host]| device + host).sum()
    }

    /// Bytes of a device's arenas in this process's memory: its own, and on the host's side.
    fn arenas_of(&mut self, rank: usize) -> [Bytes; 2] {
        let worker = &mut self.workers[rank];
        if worker.device.host().is_some() {
            return [Bytes::ZERO; 2];
        }
        let of_process = worker.device.in_process();
        let memory = worker.engine.device().memory();
        [if of_process { memory.bytes(Space::Device) } else { Bytes::ZERO }, memory.bytes(Space::Host)]
    }

    /// Bytes of arenas in this process's memory that are not the device's own.
    fn arenas_beside(&mut self, rank: usize) -> Bytes {
        let [own, _] = self.arenas_of(rank);
        self.arenas().saturating_sub(own) + self.beside
    }

    /// The plan of all, from what each goes by now.
    pub fn plan(&self, before: &Plan) -> Plan {
        if let [only] = &self.workers[..] {
            return only.plan.clone();
        }
        let busiest = |team: &[Member]| team.iter().map(|member| member.busy_seconds).fold(0.0, f64::max);
        let exchange = before.predicted.step_seconds - busiest(&before.team);
        let mut plan = before.clone();
        for ((worker, device), member) in self.workers.iter().zip(&mut plan.devices).zip(&mut plan.team) {
            *device = worker.plan.devices[0].clone();
            if member.recipe != worker.plan.recipe {
                member.busy_seconds = worker.plan.predicted.step_seconds;
            }
            member.recipe = worker.plan.recipe.clone();
            member.algorithms = worker.plan.algorithms.clone();
        }
        let step_seconds = busiest(&plan.team) + exchange;
        plan.team.iter_mut().for_each(|member| member.idle_seconds = step_seconds - member.busy_seconds);
        plan.predicted.tokens_per_second *= plan.predicted.step_seconds / step_seconds;
        plan.predicted.step_seconds = step_seconds;
        plan.recipe = self.workers[0].plan.recipe.clone();
        plan.host.arena_bytes = self.workers.iter().map(|worker| worker.plan.host.arena_bytes).sum();
        plan.host.peak_bytes = plan.host.arena_bytes;
        plan
    }

    /// The names of all devices.
    pub fn names(&self) -> Vec<String> {
        self.workers.iter().map(|worker| worker.device.name.clone()).collect()
    }

    /// The devices as the planner sees them now: under the load lines that hold, with what they hold beside their arenas.
    pub fn specs(&self) -> Vec<DeviceSpec> {
        self.workers.iter().map(|worker| DeviceSpec { budget: worker.line.bytes, ..worker.device.clone() }).collect()
    }

    /// The place of a device.
    pub fn rank_of(&self, name: &str) -> Option<usize> {
        self.workers.iter().position(|worker| worker.device.name == name)
    }

    /// Takes the order of these names, which are those of all devices.
    pub fn order_as(&mut self, names: &[String]) {
        self.workers.sort_by_key(|worker| names.iter().position(|name| *name == worker.device.name));
    }

    /// Every device goes over to its part of another way to share the work.
    ///
    /// # Errors
    /// What a device refuses: then some have gone over, and some have not.
    pub fn adopt(&mut self, parts: &[Part]) -> Result<(), Trouble> {
        self.look_back(None);
        for (rank, (worker, part)) in self.workers.iter_mut().zip(parts).enumerate() {
            worker.engine.adopt(part.answer.clone()).map_err(|error| Trouble::from(error).of_rank(rank))?;
            (worker.share, worker.sequences) = (part.share.clone(), part.sequences);
            worker.device.rates = part.device.rates.clone();
            worker.goes_by(part.answer.plan.clone(), Computing::of(&part.device, &part.answer));
            worker.line.home = worker.plan.recipe.clone();
        }
        // On the way there were arenas of both.
        let _ = process::reset_peak();
        self.seat()
    }

    /// What all devices hold now, measured.
    pub fn held_by_all(&mut self) -> Bytes {
        if self.len() == 1 {
            return self.held(0);
        }
        let beside = self.workers.iter_mut().filter(|worker| !worker.device.in_process());
        let beside: Bytes = beside.map(|worker| worker.engine.held()).sum();
        let here = self.workers.iter_mut().filter(|worker| worker.device.host().is_none());
        let hosts = here.map(|worker| worker.engine.device().memory().bytes(Space::Host)).sum();
        let process = process::resident().unwrap_or(Bytes::ZERO).saturating_sub(hosts);
        let none_here = !self.workers.iter().any(|worker| worker.device.in_process());
        if none_here { beside } else { beside + process }
    }

    /// The tensors of files that a Program reads or writes, of all devices together, each once.
    pub fn files(&self, program: &str) -> Vec<StoredTensor> {
        let stages = if self.workers[0].share.sharing == Some(Sharing::Layers) { self.len() } else { 1 };
        self.workers[..stages].iter().flat_map(|worker| worker.engine.files(program)).cloned().collect()
    }

    /// Runs a Program that writes files: the first device does it, with the help of the others where what is written
    /// stands in parts on all of them; the stages of a pipeline do it one after the other, each with what is its own.
    ///
    /// # Errors
    /// What a device or a file fails with.
    pub fn store(&mut self, program: &str, files: &mut dyn FileSpace) -> Result<(), Trouble> {
        let writers = match self.workers[0].share.sharing {
            None | Some(Sharing::Batch) => 1,
            Some(Sharing::Layers) => self.len(),
            Some(Sharing::State) => 0,
        };
        let store = |(rank, worker): (usize, &mut Worker)| {
            worker.engine.move_files(program, files).map_err(|error| Trouble::from(error).of_rank(rank))
        };
        if writers > 0 {
            let stored = self.workers.iter_mut().enumerate().take(writers).try_for_each(store);
            // Nobody else was at work: who gave up has told it here.
            self.transport.clear();
            return stored;
        }
        let files = Mutex::new(Some(files));
        self.all(|worker| {
            let mine = if worker.share.rank == 0 { files.lock().ok().and_then(|mut files| files.take()) } else { None };
            match mine {
                Some(files) => worker.engine.move_files(program, files)?,
                None => worker.engine.run(program)?,
            }
            Ok(())
        })?;
        Ok(())
    }

    /// What each device held, beside what its plan said.
    pub fn memory(&mut self) -> Vec<DeviceMemory> {
        let peak = process::peak_resident().ok();
        (0..self.len())
            .map(|rank| {
                let elsewhere = self.arenas_beside(rank);
                let worker = &mut self.workers[rank];
                worker.look_back();
                let measured = match (worker.engine.gpu(), worker.engine.far()) {
                    // All that it holds was taken at the start.
                    (Some(gpu), _) => gpu.measured(),
                    // Nothing that waits on a host is held elsewhere.
                    (None, Some(line)) => line.peak().map(|peak| (peak, MeasuredBy::Process)),
                    // What waits on the host is not on the device, though it is in this process.
                    (None, None) => {
                        peak.map(|peak| (peak.saturating_sub(elsewhere).max(worker.held), MeasuredBy::Process))
                    }
                };
                let plan = &worker.largest;
                DeviceMemory {
                    device: plan.name.clone(),
                    budget_bytes: plan.budget_bytes,
                    budget_bytes_at_end: Some(worker.line.bytes).filter(|line| *line != plan.budget_bytes),
                    arena_bytes: plan.arena_bytes,
                    arena_measured_bytes: worker.used,
                    predicted_bytes: plan.peak_bytes,
                    measured_bytes: measured.map(|(bytes, _)| bytes),
                    measured_by: measured.map(|(_, by)| by),
                }
            })
            .collect()
    }

    /// What each did in the last step; nothing of a device alone.
    pub fn results(&self) -> Vec<MemberResult> {
        if self.len() == 1 {
            return vec![];
        }
        let result = |worker: &Worker| MemberResult {
            device: worker.device.name.clone(),
            simulated: worker.device.simulated(),
            sequences: worker.sequences,
            recipe: worker.plan.recipe.clone(),
            passes_over_predicted: quantile(&worker.factors, 0.5),
        };
        self.workers.iter().map(result).collect()
    }

    /// Operations a second that the devices were measured to do in products of this arithmetic, all together; 0 where one
    /// was measured beside other work, which is no peak.
    pub fn peak_flops(&self, precision: DType) -> f64 {
        let flops = |rates: &Rates| if precision == DType::Bf16 { rates.bf16_flops } else { rates.f32_flops };
        match self.workers.iter().any(Worker::is_disturbed) {
            true => 0.0,
            false => self.workers.iter().map(|worker| flops(&worker.device.rates)).sum(),
        }
    }

    /// Devices that were far slower than planned are planned as such by the next run. Simulated ones are as fast as the user
    /// says, and rates that were measured beside other work are nothing to compare with.
    pub fn remember_speeds(&self, run: &str) {
        let known = |worker: &Worker| !worker.device.simulated() && !worker.is_disturbed();
        let real = |worker: &&Worker| known(worker) && worker.plan.predicted.step_seconds >= SECONDS_LEAST;
        for worker in self.workers.iter().filter(real).filter(|worker| worker.factors.len() >= STEPS_LEAST) {
            calibration::keep_speed(&worker.device, quantile(&worker.factors, 0.5), run);
        }
    }

    /// A device that is gone leaves, with all that it held; the others are told their new places by the next plan. Its name.
    pub fn leave(&mut self, rank: usize) -> String {
        self.watch = None;
        self.look_back(Some(rank));
        let Worker { device, .. } = self.workers.remove(rank);
        // What is gone is no part of what anybody holds from now on.
        let _ = process::reset_peak();
        self.transport = transport(&self.workers);
        self.watch();
        device.name
    }
}
