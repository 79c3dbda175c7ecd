//! The retreat: what a run does when a device refuses memory in the middle of work, or when its load line
//! moves while it is under way. Weights and optimizer are carried over bit for bit, the samples are the same.
//!
//! Of a team only the device that is squeezed changes its recipe, where its share can be done with less; else the shares
//! are drawn anew (`sharing`). A refusal takes the next recipe below the arena that was refused, first among those that leave every bit as
//! it is, then among all. A moved line takes the fastest recipe under it. When room returns the run goes back up,
//! later each time that this turned out to be too early. No retreat goes on for ever: after [`TRIES`] refusals of a device
//! without any finished work the others, or those that were left out, go on without it; where there are none the run ends,
//! resumable.

mod load_line;
mod pressure;

pub use load_line::LoadLine;

use crate::planning::charges::charged_programs;
use crate::planning::prepare::question_of;
use crate::resolve::Resolved;
use crate::session::control::Moved;
use crate::session::evaluation::evaluator::Evaluator;
use crate::session::events::EventLog;
use crate::session::training::Trainer;
use crate::session::trouble::{Halt, Trouble};
use crate::team::{Computing, Worker};
use plimsoll_core::{Budget, Bytes, Class, DeviceSpec, Event, Failure, Plan, Recipe, Retreat};
use plimsoll_device::calibration;
use plimsoll_device::device::DeviceError;
use plimsoll_device::probe::Memory;
use plimsoll_device::process;
use plimsoll_plan::search::{Answer, Question, plan_of, search};
use plimsoll_plan::team::same_count;
use pressure::{Felt, Held, room};
use std::time::Instant;

/// Refusals of a device, without any finished work between them, after which it is of no use.
const TRIES: u32 = 6;
/// A recipe must be this much faster than the present one to be worth a move back up.
const WORTH: f64 = 0.98;

/// What the charges of the next start may be above those of this one.
const WAVER: Bytes = Bytes::mib(4);

impl Trainer {
    /// Does some work until no device refuses any more, one rung lower each time, or is lost. Then the run has come further.
    pub(crate) fn insist<T>(
        &mut self,
        log: &mut EventLog,
        work: impl FnMut(&mut Trainer) -> Result<T, Trouble>,
    ) -> Result<T, Halt> {
        let done = self.insist_again(log, work)?;
        self.finished();
        Ok(done)
    }

    /// The same for work that was done before.
    pub(crate) fn insist_again<T>(
        &mut self,
        log: &mut EventLog,
        mut work: impl FnMut(&mut Trainer) -> Result<T, Trouble>,
    ) -> Result<T, Halt> {
        loop {
            match work(self) {
                Ok(value) => return Ok(value),
                Err(Trouble::Refused { rank, error }) => self.give_way(rank, &error, log)?,
                Err(Trouble::Lost { rank, why }) => self.go_on_without(rank, &why, log)?,
                Err(other) => return Err(other.into()),
            }
        }
    }

    fn worker(&self, rank: usize) -> &Worker {
        &self.team.workers()[rank]
    }

    fn line(&mut self, rank: usize) -> &mut LoadLine {
        &mut self.team.worker(rank).line
    }

    /// One rung down after a refusal; where there is none, the same once more.
    fn give_way(&mut self, rank: usize, refused: &DeviceError, log: &mut EventLog) -> Result<(), Halt> {
        let start = Instant::now();
        if let Some(why) = self.refuses_for_ever(rank, refused) {
            return self.leave_out(rank, &why, true, log);
        }
        let Worker { device, plan, line, .. } = self.worker(rank);
        let why = format!("{}: {refused}", device.name);
        let below = plan.devices[0].arena_bytes.saturating_sub(Bytes(1)) + device.charges;
        let lower = match self.under(rank, below, line.host, true) {
            Some(answer) => match self.adopt(rank, answer) {
                Ok(left) => Some(left),
                // It stays as it was, and this counts as one more refusal; who is lost is found to be when it is to work.
                Err(Trouble::Refused { .. } | Trouble::Lost { .. }) => None,
                Err(other) => return Err(other.into()),
            },
            None => None,
        };
        if lower.is_none() && self.share_with_less(rank, below, &why, log)? {
            return Ok(());
        }
        let step = self.now;
        if lower.is_some() {
            // What was only rehearsed says nothing of the device.
            if !matches!(refused, DeviceError::Refused { .. }) {
                self.remember(rank, &why);
            }
            let line = self.line(rank);
            if line.up.is_some_and(|up| step < up + line.patience) {
                line.patience = line.patience.saturating_mul(2);
            }
            line.up = Some(step + line.patience);
        }
        let left = lower.unwrap_or_else(|| Left::nothing(self.worker(rank)));
        Ok(self.tell(rank, left, why, start, log)?)
    }

    /// Some work was finished: refusals before it do not count any more.
    pub(crate) fn finished(&mut self) {
        self.refused.clear();
    }

    /// What was refused of an update is done again as it is.
    pub(crate) fn do_again(&mut self, rank: usize, refused: &DeviceError, log: &mut EventLog) -> Result<(), Failure> {
        let start = Instant::now();
        let why = format!("{}: {refused}", self.worker(rank).device.name);
        self.tell(rank, Left::nothing(self.worker(rank)), why, start, log)
    }

    /// Counts a refusal of a device. What is said of one that refused too often without any finished work.
    pub(crate) fn refuses_for_ever(&mut self, rank: usize, refused: &DeviceError) -> Option<String> {
        let alone = self.team.len() == 1;
        let name = self.worker(rank).device.name.clone();
        let of = if alone { String::new() } else { format!("{name}: ") };
        let times = self.refused.entry(name).or_default();
        *times += 1;
        (*times > TRIES).then(|| format!("{of}{refused}; {TRIES} tries made no progress"))
    }

    /// Whether a device has refused so often.
    pub(crate) fn is_of_no_use(&self, device: &str) -> bool {
        self.refused.get(device).is_some_and(|times| *times > TRIES)
    }

    /// A device refuses for ever: the others, or those that were left out, go on as without one that is lost. Where there are
    /// none the run stops. Its weights and optimizer are `whole` or not: what stands on it alone is saved before it goes.
    pub(crate) fn leave_out(&mut self, rank: usize, why: &str, whole: bool, log: &mut EventLog) -> Result<(), Halt> {
        let alone = self.team.len() == 1;
        if alone && self.left_out(&self.team.specs()).is_empty() {
            let failure = Failure::stopped(format!("step {}: {why}", self.now));
            return Err(Halt::Stop { failure, whole });
        }
        if (alone || self.team.holds_parts()) && whole && self.filled {
            self.save_if_possible(TRIES, log)?;
        }
        self.go_on_without(rank, why, log)
    }

    /// Asks the planner something about the share of a device as `device` has it, beside such a host.
    fn ask<T>(
        &self,
        rank: usize,
        device: &DeviceSpec,
        host: Bytes,
        ask: impl FnOnce(Question) -> T,
    ) -> Result<T, Failure> {
        let Worker { share, sequences, plan, .. } = self.worker(rank);
        let question = question_of(&self.run, &self.resolved.model, device, share, *sequences)?;
        let mut question = same_count(question, &plan.recipe);
        // What is free now is what this run leaves.
        question.host.budget = host;
        // What the file holds is no longer free on the disk, but it is this run's.
        let file = plan.file.as_ref().map_or(Bytes::ZERO, |file| file.budget_bytes);
        question.host.file.budget = question.host.file.budget.max(file);
        Ok(ask(question))
    }

    /// A plan of a device's share under load lines of the device and its host.
    fn plan_under(
        &self,
        rank: usize,
        line: Bytes,
        host: Bytes,
        plan: impl Fn(Question) -> Answer,
    ) -> Result<Answer, Failure> {
        let worker = self.worker(rank);
        let mut counted = Bytes::ZERO;
        loop {
            let charges = worker.line.bare_charges + counted;
            let device = DeviceSpec { budget: line, charges, ..worker.device.clone() };
            let answer = self.ask(rank, &device, host, &plan)?;
            let programs = charged_programs(&device, &answer.set);
            if !answer.plan.fits || programs <= counted {
                return Ok(answer);
            }
            // A plan of more ops holds more beside its arena.
            counted = programs;
        }
    }

    /// The fastest plan of a device's share under load lines of device and host, if there is one; with `same_bits` first
    /// among those that change no bit.
    fn under(&self, rank: usize, line: Bytes, host: Bytes, same_bits: bool) -> Option<Answer> {
        let fastest = |pin: Option<u32>| {
            let answer = self.plan_under(rank, line, host, |mut question| {
                question.pins.micro_batch = pin.or(question.pins.micro_batch);
                search(&question)
            });
            answer.ok().filter(|answer| answer.plan.fits)
        };
        // Where all have the same number of micro-batches, nobody takes other ones.
        let same = if same_bits || self.team.holds_parts() {
            fastest(Some(self.worker(rank).plan.recipe.micro_batch))
        } else {
            None
        };
        let others = || if self.team.holds_parts() { None } else { fastest(None) };
        let found = same.or_else(others);
        // What planning took goes back: it is beside arenas that are full.
        process::give_back();
        found
    }

    /// A device goes over to another plan of its share. What is told about it comes later.
    fn adopt(&mut self, rank: usize, mut answer: Answer) -> Result<Left, Trouble> {
        let left = self.leaves(rank);
        self.team.look_back(None);
        let worker = self.team.worker(rank);
        answer.plan.devices[0].budget_bytes = worker.line.bytes;
        answer.plan.host.budget_bytes = worker.line.host;
        let (plan, computing) = (answer.plan.clone(), Computing::of(&worker.device, &answer));
        self.team.one(rank, move |engine| Ok(engine.adopt(answer)?))?;
        self.team.worker(rank).goes_by(plan, computing);
        // What planning took goes back, too: others may need it.
        process::give_back();
        // On the way there were arenas of both.
        self.team.reset_peak();
        self.write_plan()?;
        Ok(left)
    }

    /// What a device would leave if it went over to another plan now.
    pub(crate) fn leaves(&mut self, rank: usize) -> Left {
        let held = self.team.held(rank);
        Left { held_bytes: Some(held), ..Left::nothing(self.worker(rank)) }
    }

    fn tell(
        &mut self,
        rank: usize,
        left: Left,
        why: String,
        start: Instant,
        log: &mut EventLog,
    ) -> Result<(), Failure> {
        let worker = self.worker(rank);
        let to = worker.plan.recipe.clone();
        let class =
            self.ask(rank, &worker.device, worker.line.host, |question| question.class_between(&left.recipe, &to))?;
        self.told(rank, left, class, why, start, log)
    }

    /// Writes down what gave way on a device, what it left and what it went over to.
    pub(crate) fn told(
        &mut self,
        rank: usize,
        left: Left,
        class: Class,
        why: String,
        start: Instant,
        log: &mut EventLog,
    ) -> Result<(), Failure> {
        let held_bytes = left.held_bytes.map(|_| self.team.held(rank));
        let step_seconds_before = self.pace.turns(self.now > self.info.step);
        let worker = self.worker(rank);
        let retreat = Retreat {
            step: self.now,
            device: worker.device.name.clone(),
            why,
            from: left.recipe,
            to: worker.plan.recipe.clone(),
            sequences: (worker.sequences != left.sequences).then_some([left.sequences, worker.sequences]),
            class,
            arena_bytes_before: left.arena_bytes,
            arena_bytes: worker.plan.devices[0].arena_bytes,
            held_bytes_before: left.held_bytes,
            held_bytes,
            seconds: start.elapsed().as_secs_f64(),
            predicted_step_seconds_before: left.step_seconds,
            predicted_step_seconds: worker.plan.predicted.step_seconds,
            step_seconds_before,
            step_seconds: None,
        };
        self.retreats.push(retreat.clone());
        log.emit(Event::Retreat(Box::new(retreat)))
    }

    /// Between two steps: load lines may have moved, or room may have returned.
    pub(crate) fn look_around(&mut self, log: &mut EventLog) -> Result<(), Halt> {
        let wishes: Vec<_> = self.control.iter().flat_map(|control| control.wishes()).collect();
        for wish in wishes {
            let evaluator = self.evaluator.as_ref().map(Evaluator::name);
            let answer = match self.team.named(wish.device.as_deref()) {
                Ok(rank) => self.move_line(rank, wish.budget, log)?,
                Err(_) if evaluator.is_some() && wish.device.as_deref() == evaluator => {
                    self.move_line_beside(wish.budget, log)?
                }
                Err(message) => Err(Failure::input(message)),
            };
            wish.answer(answer);
        }
        for rank in 0..self.team.len() {
            if self.worker(rank).line.up.is_some_and(|up| self.info.step >= up) {
                self.line(rank).up = None;
                self.go_home(rank, "the recipe that was refused is tried again", log)?;
            }
            let start = Instant::now();
            if self.worker(rank).line.pressure.is_due(start) {
                self.feel_pressure(rank, start, log)?;
                self.feel_host_pressure(rank, start, log)?;
                self.line(rank).pressure.looked(start, Instant::now());
            }
        }
        Ok(())
    }

    /// What is free of a device's memory and held of it now, and how much of that the run may hold at most.
    fn has(&mut self, rank: usize) -> (Bytes, Bytes) {
        let memory = self.team.worker(rank).engine.memory();
        let held = self.team.held(rank);
        let Worker { plan, line, .. } = self.worker(rank);
        match memory {
            // What is planned has room already.
            Some(memory) => (memory.free + held, line.at_most(room(&memory, held).max(plan.devices[0].peak_bytes))),
            None => (held, line.at_most(Bytes(u64::MAX))),
        }
    }

    /// The user wants another load line for a device. Answers where it is from now on and what that means, or why it is not
    /// moved. No line is above what the device has.
    fn move_line(
        &mut self,
        rank: usize,
        budget: Budget,
        log: &mut EventLog,
    ) -> Result<Result<Moved, Failure>, Failure> {
        let start = Instant::now();
        let (all, most) = self.has(rank);
        let worker = self.worker(rank);
        let asked = worker.line.of(budget, all);
        let line = asked.min(most);
        let (budget, told) = match line < asked {
            true => {
                let told = format!(
                    "{line}, the most that {} may hold for this run ({asked} was asked for)",
                    worker.device.name
                );
                (Budget::Amount(line), told)
            }
            false => (budget, line.to_string()),
        };
        let refused = |why: String| Ok(Err(Failure::does_not_fit(format!("{why}; the run keeps its plan"))));
        let moved =
            |message: String| Ok(Ok(Moved { budget_bytes: line, message: format!("load line {told}: {message}") }));
        let Some(answer) = self.under(rank, line, worker.line.host, false) else {
            return refused(format!("{told} is not enough: the least that would do is {}", self.smallest(rank)));
        };
        let worker = self.team.worker(rank);
        let faster = answer.plan.predicted.step_seconds < worker.plan.predicted.step_seconds;
        let before = (worker.line.budget, worker.line.bytes, worker.line.home.clone());
        (worker.line.budget, worker.line.bytes) = (budget, line);
        worker.line.home = answer.plan.recipe.clone();
        let device = worker.device.name.clone();
        if worker.plan.devices[0].peak_bytes <= line && !faster {
            worker.plan.devices[0].budget_bytes = line;
            let message = format!("the plan stays as it is ({})", worker.plan.recipe);
            self.write_plan()?;
            self.keep_line(device, budget, line)?;
            return moved(message);
        }
        match self.adopt(rank, answer) {
            Ok(left) => {
                self.keep_line(device, budget, line)?;
                self.tell(rank, left, format!("the load line was moved to {line}"), start, log)?;
                let Worker { plan, .. } = self.worker(rank);
                moved(format!("{}, predicted peak {}", plan.recipe, plan.devices[0].peak_bytes))
            }
            Err(trouble @ (Trouble::Refused { .. } | Trouble::Lost { .. })) => {
                let line = self.line(rank);
                (line.budget, line.bytes, line.home) = before;
                refused(trouble.what())
            }
            Err(other) => Err(other.into()),
        }
    }

    /// A line that was moved holds for the rest of the run, whoever starts it again.
    pub(crate) fn keep_line(&mut self, device: String, budget: Budget, line: Bytes) -> Result<(), Failure> {
        let Resolved { device: first, others, .. } = &mut self.resolved;
        let named = std::iter::once(first).chain(others).filter(|spec| spec.name == device);
        named.for_each(|spec| spec.budget = line);
        self.run.moved.insert(device, budget);
        self.run.keep_moved(&self.folder)
    }

    fn smallest(&self, rank: usize) -> Bytes {
        let host = self.worker(rank).line.host;
        let leanest = self.plan_under(rank, Bytes(1), host, |question| search(&question));
        let needs = leanest.map(|answer| answer.plan.needs).unwrap_or_default();
        needs.first().map(|need| need.budget_bytes).unwrap_or_default()
    }

    /// Back to the recipe that was planned under the user's load line; where that does not fit now, to the fastest that
    /// does. Stays where neither is worth it.
    fn go_home(&mut self, rank: usize, why: &str, log: &mut EventLog) -> Result<(), Failure> {
        let start = Instant::now();
        let worker = self.worker(rank);
        let (line, host) = (worker.line.bytes, worker.line.host);
        let home = self.plan_under(rank, line, host, |question| plan_of(&question, &worker.line.home))?;
        let there = worker.plan.recipe == worker.line.home;
        let best = if home.plan.fits && !there { Some(home) } else { self.under(rank, line, host, false) };
        let worth = |plan: &Plan| plan.predicted.step_seconds < worker.plan.predicted.step_seconds * WORTH;
        let Some(answer) = best.filter(|answer| worth(&answer.plan)) else { return Ok(()) };
        match self.adopt(rank, answer) {
            Ok(left) => {
                let worker = self.team.worker(rank);
                calibration::forget_line(&worker.device);
                if there {
                    // There is more room than there was when the run was planned.
                    worker.line.home = worker.plan.recipe.clone();
                }
                self.tell(rank, left, why.to_owned(), start, log)
            }
            Err(Trouble::Refused { .. } | Trouble::Lost { .. }) => {
                let step = self.info.step;
                let line = self.line(rank);
                line.patience = line.patience.saturating_mul(2);
                line.up = Some(step + line.patience);
                Ok(())
            }
            Err(other) => Err(other.into()),
        }
    }

    /// Others may need memory that a device holds, or give some back.
    fn feel_pressure(&mut self, rank: usize, start: Instant, log: &mut EventLog) -> Result<(), Failure> {
        let Some(memory) = self.team.worker(rank).engine.memory() else { return Ok(()) };
        let now = self.team.held(rank);
        let worker = self.team.worker(rank);
        let budget = worker.line.at_most(worker.line.of(worker.line.budget, memory.free + now));
        let held = Held { now, line: worker.line.bytes, budget, wanted: worker.largest.peak_bytes };
        match worker.line.pressure.feel(&memory, held, start) {
            Felt::Nothing => Ok(()),
            Felt::Room(room) => {
                (worker.line.bytes, worker.line.told) = (room, false);
                self.go_home(rank, "others gave memory back", log)
            }
            Felt::Less(left) if left >= worker.plan.devices[0].peak_bytes => Ok(()),
            Felt::Less(left) => {
                let host = worker.line.host;
                self.shrink(rank, left, host, &memory, start, log)
            }
        }
    }

    /// The same for what waits on the host beside a GPU. The host side of a virtual device is in the very memory that
    /// the device is in, which gives way.
    fn feel_host_pressure(&mut self, rank: usize, start: Instant, log: &mut EventLog) -> Result<(), Failure> {
        let worker = self.team.worker(rank);
        if worker.engine.gpu().is_none() || worker.line.host_wanted == Bytes::ZERO {
            return Ok(());
        }
        let (memory, now) = (Memory::read(), worker.plan.host.arena_bytes);
        let (line, budget, wanted) = (worker.line.host, worker.line.host_budget, worker.line.host_wanted);
        match worker.line.host_pressure.feel(&memory, Held { now, line, budget, wanted }, start) {
            Felt::Nothing => Ok(()),
            Felt::Room(room) => {
                (worker.line.host, worker.line.told) = (room, false);
                self.go_home(rank, "others gave memory back", log)
            }
            Felt::Less(left) if left >= now => Ok(()),
            Felt::Less(left) => {
                let line = worker.line.bytes;
                self.shrink(rank, line, left, &memory, start, log)
            }
        }
    }

    /// A device goes over to the fastest plan under load lines that others have pressed down.
    fn shrink(
        &mut self,
        rank: usize,
        line: Bytes,
        host: Bytes,
        memory: &Memory,
        start: Instant,
        log: &mut EventLog,
    ) -> Result<(), Failure> {
        let why = format!("{} leaves {} free: others need memory", memory.bound_by, memory.free);
        let worker = self.worker(rank);
        let before = (worker.line.bytes, worker.line.host);
        let in_vain = match self.under(rank, line, host, false) {
            None => format!("no recipe of this run holds less than {}", worker.plan.devices[0].peak_bytes),
            Some(answer) => {
                let now = self.line(rank);
                (now.bytes, now.host) = (line, host);
                match self.adopt(rank, answer) {
                    Ok(left) => {
                        self.remember(rank, &why);
                        return self.tell(rank, left, why, start, log);
                    }
                    Err(trouble @ (Trouble::Refused { .. } | Trouble::Lost { .. })) => trouble.what(),
                    Err(other) => return Err(other.into()),
                }
            }
        };
        let line = self.line(rank);
        (line.bytes, line.host) = before;
        if std::mem::replace(&mut line.told, true) {
            return Ok(());
        }
        log.emit(Event::Warning { message: format!("{why}; {in_vain}, so the run goes on as it is") })
    }

    /// The next plan on this device starts where this run ended up, unless it goes back up before.
    fn remember(&self, rank: usize, why: &str) {
        let worker = self.worker(rank);
        let line = worker.plan.devices[0].peak_bytes + WAVER;
        calibration::keep_line(&worker.device, line, why);
    }
}

/// What was left behind by a move to another plan.
pub(crate) struct Left {
    recipe: Recipe,
    sequences: u64,
    arena_bytes: Bytes,
    /// Measured, where the device goes over to another plan.
    held_bytes: Option<Bytes>,
    step_seconds: f64,
}

impl Left {
    /// Whether a device goes by the same recipe for as many sequences now.
    pub(crate) fn is_that_of(&self, worker: &Worker) -> bool {
        (self.sequences, &self.recipe) == (worker.sequences, &worker.plan.recipe)
    }

    /// As it is: nothing has been left yet.
    pub(crate) fn nothing(worker: &Worker) -> Left {
        let plan = &worker.plan;
        Left {
            recipe: plan.recipe.clone(),
            sequences: worker.sequences,
            arena_bytes: plan.devices[0].arena_bytes,
            held_bytes: None,
            step_seconds: plan.predicted.step_seconds,
        }
    }
}
