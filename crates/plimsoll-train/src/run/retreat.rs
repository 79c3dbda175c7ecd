//! The retreat: what a run does when its device refuses memory in the middle of work, or when its load line
//! moves while it is under way. Weights and optimizer are carried over bit for bit, the samples are the same.
//!
//! A refusal takes the next recipe below the arena that was refused, first among those that leave every bit as
//! it is, then among all. A moved line takes the fastest recipe under it. When room returns the run goes back up,
//! later each time that this turned out to be too early. No retreat goes on for ever: [`TRIES`] refusals without
//! any finished work end the run, resumable.

use super::events::EventLog;
use super::training::Trainer;
use super::trouble::Trouble;
use crate::files::atomic;
use crate::resolve::{Work, question};
use plimsoll_core::{Budget, Bytes, Class, DeviceSpec, Event, Failure, Recipe, Retreat};
use plimsoll_device::device::DeviceError;
use plimsoll_device::probe::Memory;
use plimsoll_device::process;
use plimsoll_plan::search::{Answer, Pins, plan_of, search};
use std::time::{Duration, Instant};

/// Refusals in a row, without any finished work between them, after which the run ends.
const TRIES: u32 = 6;
/// Steps after a refusal before the run goes back to the recipe that was refused. Doubled each time that it is
/// refused again.
const PATIENCE_STEPS: u64 = 32;
/// How often the memory of the machine is looked at, at most.
const LOOK: Duration = Duration::from_secs(1);
/// How long room must have been there before it is used again.
const CALM: Duration = Duration::from_secs(10);
/// A recipe must be this much faster than the present one to be worth a move back up.
const WORTH: f64 = 0.98;

/// What a run knows about the memory that it may hold.
pub struct Line {
    /// As the user said.
    budget: Budget,
    /// The load line that holds: the budget, or less while others press.
    bytes: Bytes,
    /// The recipe that the planner chose under the budget: where the run goes back to.
    home: Recipe,
    /// Refusals since work was last finished.
    refused: u32,
    /// When to go back up after a refusal: the step, and how many steps to wait the next time.
    up: Option<u64>,
    patience: u64,
    looked: Instant,
    /// Since when there has been room again, while others press.
    calm: Option<Instant>,
    /// Whether the user has been told that nothing smaller fits.
    told: bool,
}

impl Line {
    /// A run that starts under `bytes`, which is what `budget` meant, with this recipe.
    pub fn new(budget: Budget, bytes: Bytes, home: Recipe) -> Line {
        let now = Instant::now();
        Line {
            budget,
            bytes,
            home,
            refused: 0,
            up: None,
            patience: PATIENCE_STEPS,
            looked: now,
            calm: None,
            told: false,
        }
    }
}

/// What others leave to this process, when they press: less than `margin` of the machine's memory free.
fn pressed(memory: &Memory, held: Bytes) -> Option<Bytes> {
    let margin = margin(memory);
    (memory.free < margin).then(|| (held + memory.free).saturating_sub(Bytes(2 * margin.0)))
}

/// Free memory that is left to the machine: 2 % of it, at most 512 MiB.
fn margin(memory: &Memory) -> Bytes {
    Bytes(memory.total.0 / 50).min(Bytes::mib(512))
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
        let lower = match self.under(below + self.resolved.device.charges, true) {
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

    /// The fastest plan under a load line, if there is one; with `same_bits` first among those that change no bit.
    fn under(&self, line: Bytes, same_bits: bool) -> Option<Answer> {
        let device = DeviceSpec { budget: line, ..self.resolved.device.clone() };
        let ask = |pin: Option<u32>| {
            let mut question = question(&self.run, &self.resolved.model, &device, Work::Train).ok()?;
            // What waits where stays as it is: nothing has to move.
            let offload = Some(self.plan.recipe.offload);
            question.pins = Pins { micro_batch: pin.or(question.pins.micro_batch), offload, ..question.pins };
            let answer = search(&question);
            answer.plan.fits.then_some(answer)
        };
        let same = if same_bits { ask(Some(self.plan.recipe.micro_batch)) } else { None };
        same.or_else(|| ask(None))
    }

    /// Goes over to another plan. What is told about it comes later.
    fn adopt(&mut self, mut answer: Answer) -> Result<Left, Trouble> {
        let left = Left::nothing(self);
        answer.plan.devices[0].budget_bytes = self.line.bytes;
        let plan = answer.plan.clone();
        self.engine.adopt(answer)?;
        self.plan = plan;
        self.info.recipe = self.plan.recipe.clone();
        if self.plan.devices[0].peak_bytes > self.largest.peak_bytes {
            self.largest = self.plan.devices[0].clone();
        }
        let text = serde_json::to_vec_pretty(&self.plan).expect("plain data has a JSON form");
        atomic::write_file(&self.folder.join("plan.json"), &text)?;
        Ok(left)
    }

    fn tell(&mut self, left: Left, why: String, start: Instant, log: &mut EventLog) -> Result<(), Failure> {
        let to = self.plan.recipe.clone();
        let class = if left.recipe.micro_batch == to.micro_batch { Class::Identical } else { Class::Reordered };
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
        // What presses on a GPU is another program's arena, which its driver keeps apart from ours.
        if self.line.looked.elapsed() >= LOOK && self.engine.gpu().is_none() {
            self.line.looked = Instant::now();
            self.feel_pressure(&Memory::read(), process::resident().unwrap_or_default(), log)?;
        }
        Ok(())
    }

    /// The user wants another load line. Answers whether it holds from now on, and what that means.
    fn move_line(&mut self, budget: Budget, log: &mut EventLog) -> Result<(bool, String), Failure> {
        let start = Instant::now();
        let line = budget.of(self.engine.free() + self.engine.held());
        let Some(answer) = self.under(line, false) else {
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
        let device = DeviceSpec { budget: Bytes(1), ..self.resolved.device.clone() };
        let question = question(&self.run, &self.resolved.model, &device, Work::Train);
        let needs = question.map(|question| search(&question).plan.needs).unwrap_or_default();
        needs.first().map(|need| need.budget_bytes).unwrap_or_default()
    }

    /// Back to the recipe that was planned under the load line, where it is worth it.
    fn go_home(&mut self, why: &str, log: &mut EventLog) -> Result<(), Failure> {
        let start = Instant::now();
        if self.plan.recipe == self.line.home {
            return Ok(());
        }
        let device = DeviceSpec { budget: self.line.bytes, ..self.resolved.device.clone() };
        let answer = plan_of(&question(&self.run, &self.resolved.model, &device, Work::Train)?, &self.line.home);
        let worth = answer.plan.predicted.step_seconds < self.plan.predicted.step_seconds * WORTH;
        if !answer.plan.fits || !worth {
            return Ok(());
        }
        match self.adopt(answer) {
            Ok(left) => self.tell(left, why.to_owned(), start, log),
            Err(Trouble::Refused(_)) => {
                self.line.patience = self.line.patience.saturating_mul(2);
                self.line.up = Some(self.info.step + self.line.patience);
                Ok(())
            }
            Err(Trouble::Failure(failure)) => Err(failure),
        }
    }

    /// Others may need memory that this run holds, or give some back.
    fn feel_pressure(&mut self, memory: &Memory, held: Bytes, log: &mut EventLog) -> Result<(), Failure> {
        let start = Instant::now();
        if let Some(left) = pressed(memory, held) {
            self.line.calm = None;
            let peak = self.plan.devices[0].peak_bytes;
            if left >= peak {
                return Ok(());
            }
            let why = format!("{} leaves {} free: others need memory", memory.bound_by, memory.free);
            let Some(answer) = self.under(left, false) else {
                if !std::mem::replace(&mut self.line.told, true) {
                    let message = format!("{why}; no recipe holds less than {peak}, so the run goes on as it is");
                    log.emit(Event::Warning { message })?;
                }
                return Ok(());
            };
            self.line.bytes = left;
            return match self.adopt(answer) {
                Ok(before) => self.tell(before, why, start, log),
                Err(Trouble::Refused(_)) => Ok(()),
                Err(Trouble::Failure(failure)) => Err(failure),
            };
        }
        let budget = self.line.budget.of(memory.free + held);
        if self.line.bytes >= budget {
            self.line.calm = None;
            return Ok(());
        }
        // Room for the old plan and twice the margin, for a while: else the run would go up and down all the time.
        let wanted = self.largest.peak_bytes.saturating_sub(held) + Bytes(2 * margin(memory).0);
        if memory.free < wanted {
            self.line.calm = None;
            return Ok(());
        }
        if self.line.calm.get_or_insert_with(Instant::now).elapsed() < CALM {
            return Ok(());
        }
        (self.line.bytes, self.line.calm, self.line.told) = (budget, None, false);
        self.go_home("others gave memory back", log)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_press_when_little_is_left_and_get_room_back() {
        let memory = |free| Memory { total: Bytes::gib(10), free, bound_by: "the machine".into() };
        assert_eq!(margin(&memory(Bytes::ZERO)), Bytes(Bytes::gib(10).0 / 50));
        assert_eq!(pressed(&memory(Bytes::gib(1)), Bytes::gib(4)), None);
        let left = pressed(&memory(Bytes::mib(100)), Bytes::gib(4)).unwrap();
        assert!(left < Bytes::gib(4) && left > Bytes::gib(3), "{left}");
        assert_eq!(pressed(&memory(Bytes::ZERO), Bytes::mib(1)), Some(Bytes::ZERO));
    }
}
