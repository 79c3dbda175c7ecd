//! Evaluations: which rows each device takes of one, and who makes it. The team does, or a device beside it (`evaluator`),
//! which is handed the weights and finds what they come to while the team goes on: then the event comes when it is ready, at
//! the latest before the next evaluation and before the end. A device beside the team is never needed: where it is lost, or
//! refuses, the team evaluates from then on.

pub(crate) mod evaluator;
pub(crate) mod handover;

use crate::data::{Dataset, Rows};
use crate::planning::prepare::{Known, Part, Planned, share_among};
use crate::resolve::evaluations;
use crate::session::control::Moved;
use crate::session::engine::{Engine, Evaluated};
use crate::session::events::EventLog;
use crate::session::training::Trainer;
use crate::session::trouble::{Halt, Trouble};
use crate::team::open::made_with;
use crate::team::{Team, Worker};
use evaluator::{Evaluator, Found};
use handover::{Giving, Stand};
use plimsoll_core::{
    Budget, Bytes, DeviceSpec, EvalResult, Evaluates, Event, Failure, LostDevice, Member, Sharing, micro_batches,
};
use plimsoll_device::process;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Refusals of weights after which a device is not asked to take them any more.
const TRIES: u32 = 6;

/// Rows of an evaluation in order, so many at once: what each time comes to is added up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Which.
    pub rows: Range<u64>,
    /// At once.
    pub at_once: u32,
}

impl Cut {
    fn times(&self) -> u64 {
        micro_batches(self.rows.end - self.rows.start, self.at_once)
    }
}

/// Loss and hits of some rows, in at least so many micro-batches: others may wait for them.
///
/// # Errors
/// Data that cannot be read, and what the device fails with.
pub fn evaluate(engine: &mut Engine, data: &Dataset, cut: &Cut, at_least: u64) -> Result<Evaluated, Trouble> {
    let Cut { rows: all, at_once } = cut;
    let at_once = u64::from(*at_once);
    let mut rows = Rows::new(u64::from(engine.recipe().micro_batch).max(at_once), data.sequence());
    let mut sum = Evaluated::default();
    for first in (0..cut.times().max(at_least)).map(|time| (all.start + time * at_once).min(all.end)) {
        data.read(first..(first + at_once).min(all.end), &mut rows)?;
        sum.add(engine.evaluate(&mut rows)?);
    }
    Ok(sum)
}

impl Team {
    /// The rows of an evaluation that each device takes; the stages of a pipeline have all of them.
    fn cuts(&self, rows: u64) -> Vec<Cut> {
        let total: u64 = self.workers().iter().map(|worker| worker.sequences).sum();
        let at = |sequences: u64| (u128::from(rows) * u128::from(sequences) / u128::from(total)) as u64;
        let cut = |worker: &Worker| {
            let first = worker.share.first_sequence;
            let all = total == worker.sequences || worker.share.sharing == Some(Sharing::Layers);
            let rows = if all { 0..rows } else { at(first)..at(first + worker.sequences) };
            Cut { rows, at_once: worker.plan.recipe.micro_batch }
        };
        self.workers().iter().map(cut).collect()
    }

    /// The same of one device that does it all, in the same order and as many rows at once.
    fn cuts_of_one(&self, rows: u64) -> Vec<Cut> {
        let mut cuts = self.cuts(rows);
        if self.workers()[0].share.sharing == Some(Sharing::Layers) {
            cuts.truncate(1);
        }
        cuts
    }

    /// Loss and hits over a data set, each device on a part of the rows; of a pipeline the last stage finds what they come to.
    ///
    /// # Errors
    /// Data that cannot be read, and what a device fails with.
    pub fn evaluate(&mut self, data: &Arc<Dataset>) -> Result<Evaluated, Trouble> {
        let cuts = self.cuts(data.rows());
        let together = if self.holds_parts() { cuts.iter().map(Cut::times).max().unwrap_or(0) } else { 0 };
        let data = Arc::clone(data);
        let parts = self.all(move |rank, engine| evaluate(engine, &data, &cuts[rank], together))?;
        let mut sum = Evaluated::default();
        parts.into_iter().for_each(|part| sum.add(part));
        Ok(sum)
    }
}

impl Trainer {
    /// Opens the device beside the team, if there is to be one. A run does not need it: what it refuses is only said.
    pub(crate) fn open_evaluator(&mut self, part: Option<Part>, log: &mut EventLog) -> Result<(), Failure> {
        let Some((part, data)) = part.zip(self.eval.clone()) else { return Ok(()) };
        let name = part.device.name.clone();
        let planned = self.plan.left_out.iter_mut().find(|out| out.device == name);
        let Some(evaluates) = planned.and_then(|out| out.evaluates.clone()) else { return Ok(()) };
        let rehearsed = (&self.rehearsed[..], self.team.len() as u64);
        let opened = match Evaluator::open(&self.run, &self.resolved, (part, evaluates), data, rehearsed) {
            Ok(evaluator) => {
                self.team.stands_beside(evaluator.arenas(), Bytes::ZERO);
                let ready = evaluator.is_ready();
                self.evaluator = Some(evaluator);
                ready
            }
            Err(trouble) => Err(trouble),
        };
        match opened {
            Ok(refused) => {
                let told = |refused| format!("{name}: {refused}; the weights are read again");
                refused.into_iter().try_for_each(|refused| log.emit(Event::Warning { message: told(refused) }))
            }
            Err(trouble) => {
                self.dismiss()?;
                self.evaluates_no_more(&name);
                match trouble {
                    Trouble::Lost { why, .. } => self.evaluator_is_lost(name, why, log),
                    other => {
                        let message = format!("{name}: {}; the team evaluates itself", other.what());
                        log.emit(Event::Warning { message })
                    }
                }
            }
        }
    }

    /// The device beside the team is gone, which is told like any other loss.
    fn evaluator_is_lost(&mut self, device: String, why: String, log: &mut EventLog) -> Result<(), Failure> {
        let (step, left, back_to) = (self.info.step, self.team.names(), None);
        self.lost.push(LostDevice { device: device.clone(), step, back_to, back_after: None });
        log.emit(Event::Lost { step, device, why, left, back_to })
    }

    /// The plan says what is.
    fn evaluates_no_more(&mut self, device: &str) {
        let mut left_out = self.plan.left_out.iter_mut();
        left_out.find(|out| out.device == device).into_iter().for_each(|out| out.evaluates = None);
    }

    /// Evaluates after the present step, if that has not been done.
    pub(crate) fn evaluate(&mut self, log: &mut EventLog) -> Result<(), Halt> {
        self.await_evaluation(log)?;
        if self.eval.is_none() || self.last_eval.is_some_and(|(step, _)| step == self.info.step) {
            return Ok(());
        }
        if self.hand_over(log)? { Ok(()) } else { self.evaluate_here(log) }
    }

    /// A run that goes on after a step whose evaluation was still under way when it was cut off makes that one again.
    pub(crate) fn evaluate_again(&mut self, log: &mut EventLog) -> Result<(), Halt> {
        let step = self.info.step;
        let due = step > 0 && self.is_evaluated_after(step) && !self.is_last();
        let under_way = self.evaluator.as_ref().is_some_and(|evaluator| evaluator.is_at(step));
        if due && !under_way && !log.has_evaluation(step)? { self.evaluate(log) } else { Ok(()) }
    }

    /// Whether the run file asks for an evaluation after a step, before the last one.
    pub(crate) fn is_evaluated_after(&self, step: u64) -> bool {
        let every = self.run.train.eval_every;
        every > 0 && step.is_multiple_of(every)
    }

    /// The team evaluates.
    fn evaluate_here(&mut self, log: &mut EventLog) -> Result<(), Halt> {
        let Some(data) = self.eval.clone() else { return Ok(()) };
        let start = Instant::now();
        let sum = self.insist(log, |trainer| trainer.team.evaluate(&data))?;
        Ok(self.evaluated(self.info.step, sum, start.elapsed().as_secs_f64(), None, log)?)
    }

    fn evaluated(
        &mut self,
        step: u64,
        sum: Evaluated,
        seconds: f64,
        device: Option<String>,
        log: &mut EventLog,
    ) -> Result<(), Failure> {
        let exact_match = (sum.samples > 0).then(|| sum.exact as f64 / sum.samples as f64);
        self.last_eval = Some((step, EvalResult { loss: sum.loss(), exact_match }));
        log.emit(Event::Evaluation { step, loss: sum.loss(), exact_match, tokens: sum.tokens, seconds, device })
    }

    /// Hands the present weights over to the device beside the team. Whether it has them.
    fn hand_over(&mut self, log: &mut EventLog) -> Result<bool, Halt> {
        let last = self.is_last();
        let mut why = String::new();
        for _ in 0..TRIES {
            let Some(evaluator) = self.evaluator.as_ref().filter(|evaluator| !last || evaluator.is_faster()) else {
                return Ok(false);
            };
            let (name, start) = (evaluator.name().to_owned(), Instant::now());
            let stand = self.insist(log, Trainer::give_weights)?;
            let Some(evaluator) = &mut self.evaluator else { return Ok(false) };
            if stand == Stand::Taken {
                evaluator.was_given(start.elapsed().as_secs_f64());
                return Ok(true);
            }
            match evaluator.wait() {
                Some(Found { sum: Err(Trouble::Refused { error, .. }), .. }) => why = format!("{name}: {error}"),
                Some(Found { sum: Err(trouble), .. }) => {
                    self.go_on_without_evaluator(trouble, log)?;
                    return Ok(false);
                }
                Some(Found { sum: Ok(_), .. }) | None => return Ok(false),
            }
            log.emit(Event::Warning { message: format!("{why}; the weights are handed over again") })?;
        }
        let trouble = Trouble::Lost { rank: 0, why: format!("{why}; {TRIES} tries made no progress") };
        self.go_on_without_evaluator(trouble, log)?;
        Ok(false)
    }

    fn give_weights(&mut self) -> Result<Stand, Trouble> {
        let Some((eval, evaluator)) = self.eval.as_ref().zip(self.evaluator.as_mut()) else {
            return Ok(Stand::Dropped);
        };
        let weights = evaluator.begin(self.info.step, self.team.cuts_of_one(eval.rows()));
        if let Err(trouble) = self.team.store("save", &mut Giving(&weights)) {
            weights.end(Stand::Dropped);
            evaluator.forget();
            return Err(trouble);
        }
        Ok(weights.settled())
    }

    /// Between two steps: an evaluation may be ready.
    pub(crate) fn look_for_evaluation(&mut self, log: &mut EventLog) -> Result<(), Halt> {
        let found = self.evaluator.as_mut().and_then(Evaluator::ready);
        self.take_in(found, log)
    }

    /// An evaluation that is under way comes to its end.
    pub(crate) fn await_evaluation(&mut self, log: &mut EventLog) -> Result<(), Halt> {
        let found = self.evaluator.as_mut().and_then(Evaluator::wait);
        self.take_in(found, log)
    }

    fn take_in(&mut self, found: Option<Found>, log: &mut EventLog) -> Result<(), Halt> {
        match self.tell_found(found, log)? {
            // Nobody has the weights of that step any more.
            Some(trouble) => {
                self.go_on_without_evaluator(trouble, log)?;
                self.evaluate_here(log)
            }
            None => Ok(()),
        }
    }

    /// The device beside the team is to do other work, if this plan is about it: what it is at comes to its end, and it gives
    /// back all that it holds.
    pub(crate) fn recall_evaluator(&mut self, planned: &Planned, log: &mut EventLog) -> Result<(), Halt> {
        let Some(evaluator) = &mut self.evaluator else { return Ok(()) };
        let takes_part = planned.parts.iter().any(|part| part.device.name == evaluator.name());
        if !takes_part && planned.plan.left_out.iter().all(|out| out.device != evaluator.name()) {
            return Ok(());
        }
        let found = evaluator.wait();
        let trouble = self.tell_found(found, log)?;
        if let Some(Trouble::Failure(failure)) = trouble {
            return Err(failure.into());
        }
        if let (Some(name), Some(trouble)) = (self.dismiss()?, trouble) {
            // Whether it is there at all turns out when it is opened.
            log.emit(Event::Warning { message: format!("{name}: {}: that is not evaluated", trouble.what()) })?;
        }
        Ok(())
    }

    /// Says what the device beside the team has found. Why there is no answer, where there is none.
    fn tell_found(&mut self, found: Option<Found>, log: &mut EventLog) -> Result<Option<Trouble>, Failure> {
        let Some(Found { step, sum, seconds, refused }) = found else { return Ok(None) };
        let device = self.evaluator.as_ref().map(|evaluator| evaluator.name().to_owned());
        for refused in refused {
            let of = device.as_deref().unwrap_or_default();
            log.emit(Event::Warning { message: format!("{of}: {refused}; the evaluation is done again") })?;
        }
        match sum {
            Ok(sum) => self.evaluated(step, sum, seconds, device, log).map(|()| None),
            Err(trouble) => Ok(Some(trouble)),
        }
    }

    /// The device beside the team is gone, or of no use: the team evaluates from now on.
    fn go_on_without_evaluator(&mut self, trouble: Trouble, log: &mut EventLog) -> Result<(), Halt> {
        if let Trouble::Failure(failure) = trouble {
            return Err(failure.into());
        }
        match self.dismiss()? {
            Some(device) => Ok(self.evaluator_is_lost(device, trouble.what(), log)?),
            None => Ok(()),
        }
    }

    /// The device beside the team gives back what it holds, if it can be asked to. Its name.
    fn dismiss(&mut self) -> Result<Option<String>, Failure> {
        let Some(evaluator) = self.evaluator.take() else { return Ok(None) };
        let device = evaluator.name().to_owned();
        self.evaluated_by = evaluator.result();
        self.team.look_back(None);
        if evaluator.leave() {
            self.team.stands_beside(Bytes::ZERO, Bytes::ZERO);
        }
        self.team.reset_peak();
        self.evaluates_no_more(&device);
        self.write_plan()?;
        Ok(Some(device))
    }

    /// The user wants another load line for the device beside the team. It goes on under it with what it has room for, or
    /// gives back all that it holds, and the team evaluates from then on: no run needs it. Answers where the line is and what
    /// that means.
    pub(crate) fn move_line_beside(
        &mut self,
        budget: Budget,
        log: &mut EventLog,
    ) -> Result<Result<Moved, Failure>, Halt> {
        // What is under way comes to its end under the line before.
        self.await_evaluation(log)?;
        let Some(evaluator) = &self.evaluator else {
            return Ok(Err(Failure::input("the device that evaluated is gone: the team evaluates itself")));
        };
        let (device, before) = (evaluator.device().clone(), evaluator.recipe().clone());
        let made_with = made_with(&self.run, &self.resolved, &device);
        let line = budget.of(made_with.unwrap_or(device.budget)).min(made_with.unwrap_or(Bytes(u64::MAX)));
        let does = match self.evaluating_under(DeviceSpec { budget: line, ..device.clone() })? {
            Some((part, evaluates)) if evaluates.recipe == before => {
                let evaluator = self.evaluator.iter_mut();
                evaluator.for_each(|evaluator| evaluator.goes_by(part.device.clone(), &evaluates));
                self.evaluates(&device.name, evaluates);
                self.write_plan()?;
                format!("it evaluates as before ({before})")
            }
            Some((part, evaluates)) => {
                let (peak, recipe) = (evaluates.device.peak_bytes, evaluates.recipe.clone());
                let measured = self.evaluator.as_ref().map(Evaluator::measured);
                self.dismiss()?;
                self.evaluates(&device.name, evaluates);
                self.open_evaluator(Some(part), log)?;
                self.write_plan()?;
                match (&mut self.evaluator, measured) {
                    (Some(evaluator), Some(measured)) => {
                        evaluator.goes_on_from(measured);
                        format!("it evaluates with {recipe}, predicted peak {peak}")
                    }
                    _ => "it could not be opened again: the team evaluates itself from now on".to_owned(),
                }
            }
            None => {
                self.dismiss()?;
                "that is no room, or no help: the team evaluates itself from now on".to_owned()
            }
        };
        self.keep_line(device.name.clone(), budget, line)?;
        log.emit(Event::Warning { message: format!("{}: the load line was moved to {line}: {does}", device.name) })?;
        Ok(Ok(Moved { budget_bytes: line, message: format!("load line {line}: {does}") }))
    }

    /// The plan says that a device evaluates, and how.
    fn evaluates(&mut self, device: &str, evaluates: Evaluates) {
        let mut left_out = self.plan.left_out.iter_mut();
        left_out.find(|out| out.device == device).into_iter().for_each(|out| out.evaluates = Some(evaluates.clone()));
    }

    /// How a device would evaluate what the team trains as it does now; none where it has no room, or is no help.
    fn evaluating_under(&self, device: DeviceSpec) -> Result<Option<(Part, Evaluates)>, Failure> {
        let name = device.name.clone();
        let devices: Vec<DeviceSpec> = self.team.specs().into_iter().chain([device]).collect();
        let alone = |worker: &Worker| Member {
            device: worker.device.name.clone(),
            recipe: worker.plan.recipe.clone(),
            sequences: worker.sequences,
            layers: None,
            state: None,
            why: None,
            algorithms: None,
            busy_seconds: 0.0,
            idle_seconds: 0.0,
            ladder: vec![],
        };
        let mut known = Known::of_plan(&self.plan);
        if let ([only], Some(known)) = (self.team.workers(), &mut known) {
            known.team = vec![alone(only)];
        }
        let evaluations = evaluations(&self.run, self.eval.as_ref().map(|eval| eval.rows()));
        let (model, host) = (&self.resolved.model, self.host_line());
        let planned = share_among(&self.run, model, &devices, host, known.as_ref(), None, evaluations)?;
        process::give_back();
        let now = self.team.workers().iter().map(|worker| (&worker.device.name, &worker.plan.recipe));
        let stays = planned.parts.iter().map(|part| (&part.device.name, &part.answer.plan.recipe)).eq(now);
        let out = planned.plan.left_out.into_iter().find(|out| out.device == name);
        Ok(planned.evaluator.zip(out.and_then(|out| out.evaluates)).filter(|_| stays))
    }
}
