//! The retreat: what a run does when its device refuses memory in the middle of work, or when its load line
//! moves while it is under way. Weights and optimizer are carried over bit for bit, the samples are the same.
//!
//! A refusal takes the next recipe below the arena that was refused, first among those that leave every bit as
//! it is, then among all. A moved line takes the fastest recipe under it. When room returns the run goes back up,
//! later each time that this turned out to be too early. No retreat goes on for ever: [`TRIES`] refusals without
//! any finished work end the run, resumable.

use super::events::EventLog;
use super::prepare::programs_bytes;
use super::pressure::{Felt, Held, Pressure};
use super::training::Trainer;
use super::trouble::Trouble;
use crate::files::atomic;
use crate::resolve::{Work, question};
use plimsoll_core::{Budget, Bytes, DeviceKind, DeviceSpec, Event, Failure, Plan, Recipe, Retreat};
use plimsoll_device::calibration;
use plimsoll_device::device::DeviceError;
use plimsoll_device::probe::Memory;
use plimsoll_plan::search::{Answer, Question, plan_of, search};
use plimsoll_program::ProgramSet;
use std::time::Instant;

/// Refusals in a row, without any finished work between them, after which the run ends.
const TRIES: u32 = 6;
/// Steps after a refusal before the run goes back to the recipe that was refused. Doubled each time that it is
/// refused again.
const PATIENCE_STEPS: u64 = 32;
/// A recipe must be this much faster than the present one to be worth a move back up.
const WORTH: f64 = 0.98;

/// What the charges of the next start may be above those of this one.
const WAVER: Bytes = Bytes::mib(4);

/// What a run knows about the memory that it may hold.
pub struct Line {
    /// As the user said.
    budget: Budget,
    /// The load line that holds: the budget, or less while others press.
    bytes: Bytes,
    /// The load line of the host: what the user said came to at the start, or less while others press.
    host: Bytes,
    host_budget: Bytes,
    /// The most that has waited there.
    host_wanted: Bytes,
    /// The charges of the device without those of the Programs.
    bare_charges: Bytes,
    /// The recipe that the planner chose under the budget: where the run goes back to.
    home: Recipe,
    /// Refusals since work was last finished.
    refused: u32,
    /// When to go back up after a refusal: the step, and how many steps to wait the next time.
    up: Option<u64>,
    patience: u64,
    /// On the device, and on the host beside a device that has memory of its own.
    pressure: Pressure,
    host_pressure: Pressure,
    /// Whether the user has been told that others press in vain.
    told: bool,
}

impl Line {
    /// A run that starts with this plan, under what `budget` means for its device; `programs` of its charges are those of
    /// its Programs.
    pub fn new(budget: Budget, plan: &Plan, programs: Bytes) -> Line {
        let pressure = Pressure::new(Instant::now());
        Line {
            budget,
            bytes: plan.devices[0].budget_bytes,
            host: plan.host.budget_bytes,
            host_budget: plan.host.budget_bytes,
            host_wanted: plan.host.arena_bytes,
            bare_charges: plan.devices[0].charges_bytes.saturating_sub(programs),
            home: plan.recipe.clone(),
            refused: 0,
            up: None,
            patience: PATIENCE_STEPS,
            pressure,
            host_pressure: pressure,
            told: false,
        }
    }
}

/// What the Programs of a plan add to the charges: those of a GPU are measured with them.
pub(super) fn charged_programs(device: &DeviceSpec, set: &ProgramSet) -> Bytes {
    if device.kind == DeviceKind::Cuda { Bytes::ZERO } else { programs_bytes(set) }
}

impl Trainer {
    /// Does some work until the device does not refuse any more, one rung lower each time.
    pub(super) fn insist<T>(
        &mut self,
        log: &mut EventLog,
        mut work: impl FnMut(&mut Trainer) -> Result<T, Trouble>,
    ) -> Result<T, Failure> {
        loop {
            match work(self) {
                Ok(value) => {
                    self.finished();
                    return Ok(value);
                }
                Err(Trouble::Failure(failure)) => return Err(failure),
                Err(Trouble::Refused(error)) => self.give_way(&error, log)?,
            }
        }
    }

    /// One rung down after a refusal; where there is none, the same once more.
    fn give_way(&mut self, refused: &DeviceError, log: &mut EventLog) -> Result<(), Failure> {
        let start = Instant::now();
        self.count_refusal(refused)?;
        let why = format!("{}: {refused}", self.resolved.device.name);
        let below = self.plan.devices[0].arena_bytes.saturating_sub(Bytes(1));
        let lower = match self.under(below + self.resolved.device.charges, self.line.host, true) {
            Some(answer) => match self.adopt(answer) {
                Ok(left) => Some(left),
                // It stays as it was, and this counts as one more refusal.
                Err(Trouble::Refused(_)) => None,
                Err(Trouble::Failure(failure)) => return Err(failure),
            },
            None => None,
        };
        let step = self.step_now();
        if lower.is_some() {
            // What was only rehearsed says nothing of the device.
            if !matches!(refused, DeviceError::Refused { .. }) {
                self.remember(&why);
            }
            if self.line.up.is_some_and(|up| step < up + self.line.patience) {
                self.line.patience = self.line.patience.saturating_mul(2);
            }
            self.line.up = Some(step + self.line.patience);
        }
        let left = lower.unwrap_or_else(|| Left::nothing(self));
        self.tell(left, why, start, log)
    }

    /// Some work was finished: refusals before it do not count any more.
    pub(super) fn finished(&mut self) {
        self.line.refused = 0;
    }

    /// What was refused is done again as it is.
    pub(super) fn do_again(&mut self, refused: &DeviceError, log: &mut EventLog) -> Result<(), Failure> {
        let start = Instant::now();
        self.count_refusal(refused)?;
        let why = format!("{}: {refused}", self.resolved.device.name);
        self.tell(Left::nothing(self), why, start, log)
    }

    /// Counts a refusal; too many without any finished work end the run.
    fn count_refusal(&mut self, refused: &DeviceError) -> Result<(), Failure> {
        self.line.refused += 1;
        if self.line.refused <= TRIES {
            return Ok(());
        }
        let message = format!("step {}: {refused}; {TRIES} tries made no progress", self.step_now());
        Err(Failure::stopped(message).hint("the newest checkpoint stands"))
    }

    /// Asks the planner something about this run on its device as `device` has it, beside such a host.
    fn ask<T>(&self, device: &DeviceSpec, host: Bytes, ask: impl FnOnce(Question) -> T) -> Result<T, Failure> {
        let mut question = question(&self.run, &self.resolved.model, device, Work::Train)?;
        // What is free now is what this run leaves.
        question.host.budget = host;
        Ok(ask(question))
    }

    /// A plan of this run under load lines of its device and its host.
    fn plan_under(&self, line: Bytes, host: Bytes, plan: impl Fn(Question) -> Answer) -> Result<Answer, Failure> {
        let mut counted = Bytes::ZERO;
        loop {
            let charges = self.line.bare_charges + counted;
            let device = DeviceSpec { budget: line, charges, ..self.resolved.device.clone() };
            let answer = self.ask(&device, host, &plan)?;
            let programs = charged_programs(&device, &answer.set);
            if !answer.plan.fits || programs <= counted {
                return Ok(answer);
            }
            // A plan of more ops holds more beside its arena.
            counted = programs;
        }
    }

    /// The fastest plan under the load lines of device and host, if there is one; with `same_bits` first among those
    /// that change no bit.
    fn under(&self, line: Bytes, host: Bytes, same_bits: bool) -> Option<Answer> {
        let fastest = |pin: Option<u32>| {
            let answer = self.plan_under(line, host, |mut question| {
                question.pins.micro_batch = pin.or(question.pins.micro_batch);
                search(&question)
            });
            answer.ok().filter(|answer| answer.plan.fits)
        };
        let same = if same_bits { fastest(Some(self.plan.recipe.micro_batch)) } else { None };
        same.or_else(|| fastest(None))
    }

    /// Goes over to another plan. What is told about it comes later.
    fn adopt(&mut self, mut answer: Answer) -> Result<Left, Trouble> {
        let left = Left::nothing(self);
        answer.plan.devices[0].budget_bytes = self.line.bytes;
        answer.plan.host.budget_bytes = self.line.host;
        let plan = answer.plan.clone();
        self.engine.adopt(answer)?;
        // Products of other sizes have algorithms now that the next checkpoint has to know.
        self.info.algorithms = self.engine.algorithms();
        self.plan = Plan { algorithms: self.info.algorithms.clone(), ..plan };
        self.info.recipe = self.plan.recipe.clone();
        self.resolved.device.charges = self.plan.devices[0].charges_bytes;
        self.info.charges_bytes = self.resolved.device.charges;
        self.line.host_wanted = self.line.host_wanted.max(self.plan.host.arena_bytes);
        if self.plan.devices[0].peak_bytes > self.largest.peak_bytes {
            self.largest = self.plan.devices[0].clone();
        }
        let text = serde_json::to_vec_pretty(&self.plan).expect("plain data has a JSON form");
        atomic::write_file(&self.folder.join("plan.json"), &text)?;
        Ok(left)
    }

    fn tell(&mut self, left: Left, why: String, start: Instant, log: &mut EventLog) -> Result<(), Failure> {
        let to = self.plan.recipe.clone();
        let device = &self.resolved.device;
        let class = self.ask(device, self.line.host, |question| question.class_between(&left.recipe, &to))?;
        let retreat = Retreat {
            step: self.step_now(),
            why,
            from: left.recipe,
            to,
            class,
            arena_bytes_before: left.arena_bytes,
            arena_bytes: self.plan.devices[0].arena_bytes,
            seconds: start.elapsed().as_secs_f64(),
            predicted_step_seconds_before: left.step_seconds,
            predicted_step_seconds: self.plan.predicted.step_seconds,
        };
        self.retreats.push(retreat.clone());
        log.emit(Event::Retreat(retreat))
    }

    /// Between two steps: the load line may have moved, or room may have returned.
    pub(super) fn look_around(&mut self, log: &mut EventLog) -> Result<(), Failure> {
        let wishes: Vec<_> = self.control.iter().flat_map(|control| control.wishes()).collect();
        for wish in wishes {
            let (moved, message) = self.move_line(wish.budget, log)?;
            wish.answer(moved, message);
        }
        if self.line.up.is_some_and(|up| self.info.step >= up) {
            self.line.up = None;
            self.go_home("the recipe that was refused is tried again", log)?;
        }
        let start = Instant::now();
        if self.line.pressure.is_due(start) {
            self.feel_pressure(start, log)?;
            self.feel_host_pressure(start, log)?;
            self.line.pressure.looked(start, Instant::now());
        }
        Ok(())
    }

    /// The user wants another load line. Answers whether it holds from now on, and what that means.
    fn move_line(&mut self, budget: Budget, log: &mut EventLog) -> Result<(bool, String), Failure> {
        let start = Instant::now();
        let free = self.engine.memory().map(|memory| memory.free).unwrap_or_default();
        let line = budget.of(free + self.engine.held());
        let Some(answer) = self.under(line, self.line.host, false) else {
            let needs = self.smallest();
            let message = format!("{line} is not enough: the least that would do is {needs}; the run keeps its plan");
            return Ok((false, message));
        };
        let faster = answer.plan.predicted.step_seconds < self.plan.predicted.step_seconds;
        let before = (self.line.budget, self.line.bytes);
        (self.line.budget, self.line.bytes) = (budget, line);
        self.line.home = answer.plan.recipe.clone();
        if self.plan.devices[0].peak_bytes <= line && !faster {
            self.plan.devices[0].budget_bytes = line;
            return Ok((true, format!("load line {line}: the plan stays as it is ({})", self.plan.recipe)));
        }
        match self.adopt(answer) {
            Ok(left) => {
                self.tell(left, format!("the load line was moved to {line}"), start, log)?;
                let peak = self.plan.devices[0].peak_bytes;
                Ok((true, format!("load line {line}: {}, predicted peak {peak}", self.plan.recipe)))
            }
            Err(Trouble::Refused(error)) => {
                (self.line.budget, self.line.bytes) = before;
                Ok((false, format!("{error}; the run keeps its plan")))
            }
            Err(Trouble::Failure(failure)) => Err(failure),
        }
    }

    fn smallest(&self) -> Bytes {
        let leanest = self.plan_under(Bytes(1), self.line.host, |question| search(&question));
        let needs = leanest.map(|answer| answer.plan.needs).unwrap_or_default();
        needs.first().map(|need| need.budget_bytes).unwrap_or_default()
    }

    /// Back to the recipe that was planned under the user's load line; where that does not fit now, to the fastest that
    /// does. Stays where neither is worth it.
    fn go_home(&mut self, why: &str, log: &mut EventLog) -> Result<(), Failure> {
        let start = Instant::now();
        let (line, host) = (self.line.bytes, self.line.host);
        let home = self.plan_under(line, host, |question| plan_of(&question, &self.line.home))?;
        let there = self.plan.recipe == self.line.home;
        let best = if home.plan.fits && !there { Some(home) } else { self.under(line, host, false) };
        let worth = |plan: &Plan| plan.predicted.step_seconds < self.plan.predicted.step_seconds * WORTH;
        let Some(answer) = best.filter(|answer| worth(&answer.plan)) else { return Ok(()) };
        match self.adopt(answer) {
            Ok(left) => {
                calibration::forget_shortfalls(Some(&self.resolved.device));
                if there {
                    // There is more room than there was when the run was planned.
                    self.line.home = self.plan.recipe.clone();
                }
                self.tell(left, why.to_owned(), start, log)
            }
            Err(Trouble::Refused(_)) => {
                self.line.patience = self.line.patience.saturating_mul(2);
                self.line.up = Some(self.info.step + self.line.patience);
                Ok(())
            }
            Err(Trouble::Failure(failure)) => Err(failure),
        }
    }

    /// Others may need memory that this run holds, or give some back.
    fn feel_pressure(&mut self, start: Instant, log: &mut EventLog) -> Result<(), Failure> {
        let Some(memory) = self.engine.memory() else { return Ok(()) };
        let now = self.engine.held();
        let budget = self.line.budget.of(memory.free + now);
        let held = Held { now, line: self.line.bytes, budget, wanted: self.largest.peak_bytes };
        match self.line.pressure.feel(&memory, held, start) {
            Felt::Nothing => Ok(()),
            Felt::Room(room) => {
                (self.line.bytes, self.line.told) = (room, false);
                self.go_home("others gave memory back", log)
            }
            Felt::Less(left) if left >= self.plan.devices[0].peak_bytes => Ok(()),
            Felt::Less(left) => self.shrink(left, self.line.host, &memory, start, log),
        }
    }

    /// The same for what waits on the host beside a GPU. The host side of a virtual device is in the very memory that
    /// the device is in, which gives way.
    fn feel_host_pressure(&mut self, start: Instant, log: &mut EventLog) -> Result<(), Failure> {
        if self.engine.gpu().is_none() || self.line.host_wanted == Bytes::ZERO {
            return Ok(());
        }
        let (memory, now) = (Memory::read(), self.plan.host.arena_bytes);
        let (line, budget, wanted) = (self.line.host, self.line.host_budget, self.line.host_wanted);
        match self.line.host_pressure.feel(&memory, Held { now, line, budget, wanted }, start) {
            Felt::Nothing => Ok(()),
            Felt::Room(room) => {
                (self.line.host, self.line.told) = (room, false);
                self.go_home("others gave memory back", log)
            }
            Felt::Less(left) if left >= now => Ok(()),
            Felt::Less(left) => self.shrink(self.line.bytes, left, &memory, start, log),
        }
    }

    /// Goes over to the fastest plan under load lines that others have pressed down.
    fn shrink(
        &mut self,
        line: Bytes,
        host: Bytes,
        memory: &Memory,
        start: Instant,
        log: &mut EventLog,
    ) -> Result<(), Failure> {
        let why = format!("{} leaves {} free: others need memory", memory.bound_by, memory.free);
        let before = (self.line.bytes, self.line.host);
        let in_vain = match self.under(line, host, false) {
            None => format!("no recipe of this run holds less than {}", self.plan.devices[0].peak_bytes),
            Some(answer) => {
                (self.line.bytes, self.line.host) = (line, host);
                match self.adopt(answer) {
                    Ok(left) => {
                        self.remember(&why);
                        return self.tell(left, why, start, log);
                    }
                    Err(Trouble::Failure(failure)) => return Err(failure),
                    Err(Trouble::Refused(error)) => error.to_string(),
                }
            }
        };
        (self.line.bytes, self.line.host) = before;
        if std::mem::replace(&mut self.line.told, true) {
            return Ok(());
        }
        log.emit(Event::Warning { message: format!("{why}; {in_vain}, so the run goes on as it is") })
    }

    /// The next plan on this device starts where this run ended up, unless it goes back up before.
    fn remember(&self, why: &str) {
        let line = self.plan.devices[0].peak_bytes + WAVER;
        calibration::keep_shortfall(&self.resolved.device, line, why);
    }

    /// The step that is being done, or would be next.
    fn step_now(&self) -> u64 {
        self.info.step + 1
    }
}

/// What was left behind by a move to another plan.
struct Left {
    recipe: Recipe,
    arena_bytes: Bytes,
    step_seconds: f64,
}

impl Left {
    /// As it is: nothing has been left yet.
    fn nothing(trainer: &Trainer) -> Left {
        let plan = &trainer.plan;
        Left {
            recipe: plan.recipe.clone(),
            arena_bytes: plan.devices[0].arena_bytes,
            step_seconds: plan.predicted.step_seconds,
        }
    }
}
