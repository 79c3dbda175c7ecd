//! A device beside the team: one that is left out of the steps evaluates what the others train, on a thread of its own. It has
//! an arena for weights and the activations of an evaluation under its own load line, is handed the weights as the team saves
//! them (`handover`), and is missed like the others where it is silent. When it is asked, and what becomes of the answer, is
//! in `evaluation`.

use super::engine::{Engine, Evaluated};
use super::evaluation::{Cut, evaluate};
use super::handover::{Handover, Stand, Taking};
use super::heartbeat::{Hangs, Heart, Pulse, Watch, silent};
use super::open::open_engine;
use super::pace::quantile;
use super::prepare::{Part, load_weights};
use super::rehearsal::{Asked, Rehearsal};
use super::trouble::Trouble;
use crate::data::Dataset;
use crate::resolve::Resolved;
use crate::run_file::RunFile;
use plimsoll_core::{
    Bytes, DeviceMemory, DevicePlan, DeviceSpec, Evaluates, EvaluatorResult, MeasuredBy, Recipe, Space,
};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Refusals of an evaluation after which it is given up.
const TRIES: usize = 6;
/// How often who waits looks whether the device is still there.
const LOOK: Duration = Duration::from_millis(50);

/// What it is asked for.
struct Order {
    number: u64,
    step: u64,
    cuts: Vec<Cut>,
    weights: Arc<Handover>,
}

/// What it says.
pub struct Found {
    /// The step whose weights they were.
    pub step: u64,
    /// What the rows come to, or why there is no answer.
    pub sum: Result<Evaluated, Trouble>,
    /// How long it took, measured.
    pub seconds: f64,
    /// What it refused on the way.
    pub refused: Vec<String>,
}

/// A device beside the team.
pub struct Evaluator {
    device: DeviceSpec,
    plan: DevicePlan,
    evaluates: Evaluates,
    orders: Sender<Order>,
    found: Receiver<(u64, Found)>,
    thread: JoinHandle<Engine>,
    heart: Option<Heart>,
    _watch: Option<Watch>,
    silence: Duration,
    /// Bytes of arenas in this process's memory.
    arenas: Bytes,
    /// The number of the last order, and the step of the one that is under way.
    number: u64,
    pending: Option<u64>,
    /// Measured seconds of each evaluation, and of each handing over.
    seconds: Vec<f64>,
    given: Vec<f64>,
}

/// What a run knows of its devices' lives.
pub struct Life {
    /// After so long without a sign of life a device is lost.
    pub silence: Duration,
    /// What is done where a device hangs.
    pub hangs: Hangs,
}

impl Evaluator {
    /// Opens a device with what it is to do, and with the weights that are never trained.
    ///
    /// # Errors
    /// What the device refuses, or a model that cannot be read.
    pub fn open(
        run: &RunFile,
        resolved: &Resolved,
        (mut part, evaluates): (Part, Evaluates),
        data: Arc<Dataset>,
        (asked, rank): (&[Arc<Asked>], u64),
        life: &Life,
    ) -> Result<Evaluator, Trouble> {
        let (mut engine, plan, _) = open_engine(run, resolved, &mut part, true)?;
        let device = part.device.clone();
        let heart = engine.heart(&device.name, life.silence);
        let pulse = heart.as_ref().map(Heart::pulse);
        let watched = pulse.iter().map(|pulse| (0, device.name.clone(), Arc::clone(pulse))).collect();
        // Who waits for it looks by itself; nobody waits for its thread.
        let watch = Watch::start(watched, |_, _| {}, life.silence, Arc::clone(&life.hangs));
        engine.rehearse(Rehearsal::new(asked, run.train.seed, rank, &device.name, pulse));
        load_weights(&mut engine, &resolved.model, run)?;
        let memory = engine.device().memory();
        let on_device = if device.in_process() { memory.bytes(Space::Device) } else { Bytes::ZERO };
        let on_host = if device.host().is_none() { memory.bytes(Space::Host) } else { Bytes::ZERO };
        let arenas = on_device + on_host;
        let ((orders, asked), (says, found)) = (channel(), channel());
        let thread = thread::Builder::new()
            .name(format!("plimsoll-evaluates-{}", device.name))
            .spawn(move || work(engine, &data, &asked, &says))
            .map_err(|error| plimsoll_core::Failure::input(format!("the system refuses a thread: {error}")))?;
        Ok(Evaluator {
            device,
            plan: plan.devices[0].clone(),
            evaluates,
            orders,
            found,
            thread,
            heart,
            _watch: watch,
            silence: life.silence,
            arenas,
            number: 0,
            pending: None,
            seconds: Vec::new(),
            given: Vec::new(),
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.device.name
    }

    /// What it is, with its load line.
    pub fn device(&self) -> &DeviceSpec {
        &self.device
    }

    /// Its one recipe.
    pub fn recipe(&self) -> &Recipe {
        &self.evaluates.recipe
    }

    /// Under another load line it goes on as it does.
    pub fn goes_by(&mut self, device: DeviceSpec, evaluates: &Evaluates) {
        (self.device, self.plan, self.evaluates) = (device, evaluates.device.clone(), evaluates.clone());
    }

    /// Measured seconds of each evaluation, and of each handing over.
    pub fn measured(&self) -> (Vec<f64>, Vec<f64>) {
        (self.seconds.clone(), self.given.clone())
    }

    /// The same device, opened anew, goes on from what was measured of it.
    pub fn goes_on_from(&mut self, measured: (Vec<f64>, Vec<f64>)) {
        (self.seconds, self.given) = measured;
    }

    /// Bytes of its arenas in this process's memory.
    pub fn arenas(&self) -> Bytes {
        self.arenas
    }

    /// The bytes of its arena on the device.
    pub fn arena_bytes(&self) -> Bytes {
        self.plan.arena_bytes
    }

    /// Whether the team would take longer, where it has nothing else to do meanwhile: predicted.
    pub fn is_faster(&self) -> bool {
        self.evaluates.saves(0.0) > 0.0
    }

    /// Begins an evaluation of these rows after a step; the weights are to be given.
    pub fn begin(&mut self, step: u64, cuts: Vec<Cut>) -> Arc<Handover> {
        let weights = Handover::new(self.pulse());
        self.number += 1;
        let order = Order { number: self.number, step, cuts, weights: Arc::clone(&weights) };
        self.pending = Some(step);
        if self.orders.send(order).is_err() {
            // Its thread is gone: whoever waits for it is told so.
            weights.end(Stand::Refused);
        }
        weights
    }

    /// Whether the evaluation after this step is under way.
    pub fn is_at(&self, step: u64) -> bool {
        self.pending == Some(step)
    }

    /// What is under way is needed no more.
    pub fn forget(&mut self) {
        self.pending = None;
    }

    /// The same of what is about a step after this one.
    pub fn forget_after(&mut self, step: u64) {
        self.pending = self.pending.filter(|of| *of <= step);
    }

    /// It was given the weights, which took so long.
    pub fn was_given(&mut self, seconds: f64) {
        self.given.push(seconds);
    }

    /// What it has found, if it is ready; none where nothing is under way.
    pub fn ready(&mut self) -> Option<Found> {
        self.pending?;
        self.next(Duration::ZERO)
    }

    /// What it finds, when it is ready; none where nothing is under way.
    pub fn wait(&mut self) -> Option<Found> {
        while self.pending.is_some() {
            let found = self.next(LOOK);
            if found.is_some() {
                return found;
            }
        }
        None
    }

    fn next(&mut self, patience: Duration) -> Option<Found> {
        let lost = |step: u64, why: String| {
            let sum = Err(Trouble::Lost { rank: 0, why });
            Found { step, sum, seconds: 0.0, refused: vec![] }
        };
        let step = self.pending?;
        if self.pulse().is_some_and(|pulse| pulse.is_lost()) {
            self.pending = None;
            return Some(lost(step, silent(&self.device.name, self.silence)));
        }
        let found = match self.found.recv_timeout(patience) {
            // Of an order that was taken back.
            Ok((number, Found { sum: Ok(_) | Err(Trouble::Refused { .. }), .. })) if number != self.number => None,
            Ok((_, found)) => Some(found),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(lost(step, format!("a fault of {}'s own", self.device.name))),
        }?;
        self.pending = None;
        if found.sum.is_ok() {
            self.seconds.push(found.seconds);
        }
        Some(found)
    }

    fn pulse(&self) -> Option<Arc<Pulse>> {
        self.heart.as_ref().map(Heart::pulse)
    }

    /// What it did; nothing where it made no evaluation.
    pub fn result(&self) -> Option<EvaluatorResult> {
        let Evaluates { seconds, hand_over_seconds, recipe, .. } = &self.evaluates;
        (!self.seconds.is_empty()).then(|| EvaluatorResult {
            device: self.device.name.clone(),
            simulated: self.device.simulated(),
            recipe: recipe.clone(),
            evaluations: self.seconds.len() as u64,
            seconds: quantile(&self.seconds, 0.5),
            predicted_seconds: *seconds,
            hand_over_seconds: quantile(&self.given, 0.5),
            predicted_hand_over_seconds: *hand_over_seconds,
        })
    }

    /// Gives back all that it holds, if it can be asked to.
    pub fn leave(self) -> bool {
        self.ended().is_some()
    }

    /// What it held, beside what was planned; `held` is what this process held with it at most, without the others' arenas.
    pub fn memory(self, held: Option<Bytes>) -> Option<DeviceMemory> {
        let plan = self.plan.clone();
        let mut engine = self.ended()?;
        // A process elsewhere says it with its room.
        let _ = engine.memory();
        let measured = match (engine.gpu(), engine.far()) {
            (Some(gpu), _) => gpu.measured(),
            (None, Some(line)) => line.peak().map(|peak| (peak, MeasuredBy::Process)),
            (None, None) => held.map(|held| (held, MeasuredBy::Process)),
        };
        Some(DeviceMemory {
            device: plan.name,
            budget_bytes: plan.budget_bytes,
            budget_bytes_at_end: None,
            arena_bytes: plan.arena_bytes,
            arena_measured_bytes: engine.stats().arena_measured_bytes,
            predicted_bytes: plan.peak_bytes,
            measured_bytes: measured.map(|(bytes, _)| bytes),
            measured_by: measured.map(|(_, by)| by),
        })
    }

    /// The end of its thread; who is silent, or is still at work, is not waited for.
    fn ended(self) -> Option<Engine> {
        let Evaluator { orders, thread, heart, pending, .. } = self;
        let silent = heart.is_some_and(|heart| heart.pulse().is_lost());
        if silent || pending.is_some() {
            // It keeps what it holds: nobody knows when it would give that back.
            std::mem::forget(orders);
            return None;
        }
        drop(orders);
        thread.join().ok()
    }
}

/// What its thread does, until nobody can ask for anything more.
fn work(mut engine: Engine, data: &Dataset, orders: &Receiver<Order>, says: &Sender<(u64, Found)>) -> Engine {
    for Order { number, step, cuts, weights } in orders {
        engine.at_step(step);
        let mut taking = Taking(&weights);
        let taken = engine.move_files("renew", &mut taking);
        weights.end(if taken.is_ok() { Stand::Taken } else { Stand::Refused });
        drop(taking);
        if weights.settled() == Stand::Dropped {
            continue;
        }
        let (start, mut refused) = (Instant::now(), Vec::new());
        let sum = match taken {
            Err(error) => Err(Trouble::from(error)),
            Ok(()) => loop {
                match of_all(&mut engine, data, &cuts) {
                    Err(Trouble::Refused { error, .. }) if refused.len() < TRIES => refused.push(error.to_string()),
                    Err(Trouble::Refused { error, .. }) => {
                        let why = format!("{error}; {TRIES} tries made no progress");
                        break Err(Trouble::Lost { rank: 0, why });
                    }
                    other => break other,
                }
            },
        };
        let seconds = start.elapsed().as_secs_f64();
        if says.send((number, Found { step, sum, seconds, refused })).is_err() {
            break;
        }
    }
    engine
}

fn of_all(engine: &mut Engine, data: &Dataset, cuts: &[Cut]) -> Result<Evaluated, Trouble> {
    let mut sum = Evaluated::default();
    for cut in cuts {
        sum.add(evaluate(engine, data, cut, 0)?);
    }
    Ok(sum)
}
