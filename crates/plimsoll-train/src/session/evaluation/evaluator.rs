//! A device beside the team: one that is left out of the steps evaluates what the others train, on a thread of its own. It has
//! an arena for weights and the activations of an evaluation under its own load line, is handed the weights as the team saves
//! them (`handover`), and is missed like the others where it is silent. When it is asked, and what becomes of the answer, is
//! in `evaluation`.

use super::handover::{Handover, Stand, Taking};
use super::{Cut, evaluate};
use crate::config::RunFile;
use crate::data::Dataset;
use crate::fault_injection::{Asked, Rehearsal};
use crate::planning::prepare::{Part, load_weights};
use crate::resolve::Resolved;
use crate::session::engine::{Engine, Evaluated};
use crate::session::pace::quantile;
use crate::session::trouble::Trouble;
use crate::team::heartbeat::{Heart, Pulse, Watch, silent};
use crate::team::open::{Opened, open_part};
use plimsoll_core::{
    Bytes, DeviceMemory, DevicePlan, DeviceSpec, Evaluates, EvaluatorResult, Failure, MeasuredBy, Recipe, Space,
};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Refusals of an evaluation, or of the weights that are never trained, after which it is given up.
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
    /// What the weights that are never trained came to, and then what it finds.
    ready: Receiver<Result<Vec<String>, Trouble>>,
    found: Receiver<(u64, Found)>,
    /// Its end.
    ends: Receiver<Engine>,
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

impl Evaluator {
    /// Opens a device with what it is to do; weights that are never trained are on their way to it then, see
    /// [`Evaluator::is_ready`]. After `silence` without a sign of life it is lost.
    ///
    /// # Errors
    /// What the device refuses.
    pub fn open(
        run: &RunFile,
        resolved: &Resolved,
        (part, evaluates): (Part, Evaluates),
        data: Arc<Dataset>,
        (asked, rank): (&[Arc<Asked>], u64),
    ) -> Result<Evaluator, Trouble> {
        let silence = Duration::from_secs_f64(run.run.heartbeat_seconds);
        let Opened { part, mut engine, plan, heart, watch, .. } = open_part(run, resolved, part, asked, true)?;
        let (device, pulse) = (part.device, heart.as_ref().map(Heart::pulse));
        engine.rehearse(Rehearsal::new(asked, run.train.seed, rank, &device.name, pulse));
        let memory = engine.device().memory();
        let on_device = if device.in_process() { memory.bytes(Space::Device) } else { Bytes::ZERO };
        let on_host = if device.host().is_none() { memory.bytes(Space::Host) } else { Bytes::ZERO };
        let arenas = on_device + on_host;
        let ((orders, asked), (says, found)) = (channel(), channel());
        let ((readies, ready), (end, ends)) = (channel(), channel());
        let (run, model) = (run.clone(), Arc::clone(&resolved.model));
        let works = move || {
            let loaded = insist(|| load_weights(&mut engine, &model, &run)).map(|((), refused)| refused);
            if readies.send(loaded).is_ok() {
                work(&mut engine, &data, &asked, &says);
            }
            // Nobody waits for one that was missed.
            let _ = end.send(engine);
        };
        let thread = thread::Builder::new().name(format!("plimsoll-evaluates-{}", device.name)).spawn(works);
        thread.map_err(|error| Failure::input(format!("the system refuses a thread: {error}")))?;
        Ok(Evaluator {
            device,
            plan: plan.devices[0].clone(),
            evaluates,
            orders,
            ready,
            found,
            ends,
            heart,
            _watch: watch,
            silence,
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

    /// Waits until it has the weights that are never trained, and says what it refused on the way.
    ///
    /// # Errors
    /// Why it cannot have them.
    pub fn is_ready(&self) -> Result<Vec<String>, Trouble> {
        self.said(&self.ready).unwrap_or_else(|| Err(self.lost()))
    }

    /// What its thread says next; nothing where it is missed, or gone.
    fn said<T>(&self, of: &Receiver<T>) -> Option<T> {
        loop {
            match of.recv_timeout(LOOK) {
                Ok(said) => return Some(said),
                Err(RecvTimeoutError::Timeout) if !self.is_missed() => {}
                Err(_) => return None,
            }
        }
    }

    fn is_missed(&self) -> bool {
        self.pulse().is_some_and(|pulse| pulse.is_lost())
    }

    /// Why nothing comes of it any more.
    fn lost(&self) -> Trouble {
        let name = &self.device.name;
        let why = if self.is_missed() { silent(name, self.silence) } else { format!("a fault of {name}'s own") };
        Trouble::Lost { rank: 0, why }
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
        let step = self.pending?;
        let lost = |evaluator: &Evaluator| {
            let sum = Err(evaluator.lost());
            Found { step, sum, seconds: 0.0, refused: vec![] }
        };
        if self.is_missed() {
            self.pending = None;
            return Some(lost(self));
        }
        let found = match self.found.recv_timeout(patience) {
            // Of an order that was taken back.
            Ok((number, Found { sum: Ok(_) | Err(Trouble::Refused { .. }), .. })) if number != self.number => None,
            Ok((_, found)) => Some(found),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(lost(self)),
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
            (None, Some(connection)) => connection.measured(),
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
    fn ended(mut self) -> Option<Engine> {
        let orders = std::mem::replace(&mut self.orders, channel().0);
        if self.is_missed() || self.pending.is_some() {
            // It keeps what it holds: nobody knows when it would give that back.
            std::mem::forget(orders);
            return None;
        }
        drop(orders);
        self.said(&self.ends)
    }
}

/// What its thread does, until nobody can ask for anything more.
fn work(engine: &mut Engine, data: &Dataset, orders: &Receiver<Order>, says: &Sender<(u64, Found)>) {
    for Order { number, step, cuts, weights } in orders {
        engine.at_step(step);
        let mut taking = Taking(&weights);
        let taken = engine.move_files("renew", &mut taking);
        weights.end(if taken.is_ok() { Stand::Taken } else { Stand::Refused });
        drop(taking);
        if weights.settled() == Stand::Dropped {
            continue;
        }
        let start = Instant::now();
        let found = match taken {
            Err(error) => Err(Trouble::from(error)),
            Ok(()) => insist(|| of_all(engine, data, &cuts)),
        };
        let (sum, refused) = match found {
            Ok((sum, refused)) => (Ok(sum), refused),
            Err(trouble) => (Err(trouble), vec![]),
        };
        let seconds = start.elapsed().as_secs_f64();
        if says.send((number, Found { step, sum, seconds, refused })).is_err() {
            break;
        }
    }
}

/// Does some work as it is until the device refuses it no more, and gives what it refused on the way.
///
/// # Errors
/// What else happens to it; it is of no use where it refuses for ever.
fn insist<T>(mut work: impl FnMut() -> Result<T, Trouble>) -> Result<(T, Vec<String>), Trouble> {
    let mut refused = Vec::new();
    loop {
        match work() {
            Ok(done) => return Ok((done, refused)),
            Err(Trouble::Refused { error, .. }) if refused.len() < TRIES => refused.push(error.to_string()),
            Err(Trouble::Refused { error, .. }) => {
                let why = format!("{error}; {TRIES} tries made no progress");
                return Err(Trouble::Lost { rank: 0, why });
            }
            Err(other) => return Err(other),
        }
    }
}

fn of_all(engine: &mut Engine, data: &Dataset, cuts: &[Cut]) -> Result<Evaluated, Trouble> {
    let mut sum = Evaluated::default();
    for cut in cuts {
        sum.add(evaluate(engine, data, cut, 0)?);
    }
    Ok(sum)
}
