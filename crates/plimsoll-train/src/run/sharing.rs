//! How a run shares its work anew while it is under way: when a device is gone, and when devices turn out to be faster or
//! slower than the plan says. The experiment stays what it is: every step has the same samples. Where devices keep what
//! stands on them, only sequences go to others; else all goes by way of a checkpoint of the present step.

use super::drift::Drift;
use super::events::EventLog;
use super::prepare::{Known, Part, Planned, share_among};
use super::retreat::Left;
use super::team::Worker;
use super::training::Trainer;
use super::trouble::{Halt, Trouble};
use crate::run::checkpoint::newest;
use plimsoll_core::{Bytes, Class, DeviceSpec, Event, Failure, LostDevice, Sharing};
use plimsoll_device::process;
use plimsoll_plan::team::Only;
use std::path::Path;
use std::time::Instant;

/// Other shares must make a step this much faster to be worth the move.
const WORTH: f64 = 0.98;
/// And save so many times what the move is expected to take in the steps that are left.
const PAYS: f64 = 2.0;

impl Trainer {
    /// A device is gone. What it computed of the present step is dropped, and where the others have all that the run needs,
    /// they go on from the last step that was finished. Where a part of the state is gone with it, they go on from the last
    /// checkpoint.
    pub(super) fn go_on_without(&mut self, rank: usize, why: &str, log: &mut EventLog) -> Result<(), Halt> {
        let parts = self.team.holds_parts();
        self.part_with(rank, why, log)?;
        if !parts {
            return self.share_anew(why, log);
        }
        let planned = self.planned_anew(why).map_err(|failure| Halt::Stop { failure, whole: false })?;
        Err(self.go_back(planned, log))
    }

    /// Lets a device that is gone leave the team, without another plan. Without any other the run stops.
    pub(super) fn part_with(&mut self, rank: usize, why: &str, log: &mut EventLog) -> Result<(), Halt> {
        let alone = self.team.len() == 1;
        let newest = |folder: &Path| Ok::<_, Failure>(newest(folder)?.0.map_or(0, |checkpoint| checkpoint.info.step));
        let back_to = if alone || self.team.holds_parts() { Some(newest(&self.folder)?) } else { None };
        let (step, device) = (self.now, self.team.leave(rank));
        self.lost.push(LostDevice { device: device.clone(), step, back_to });
        log.emit(Event::Lost { step, device, why: why.to_owned(), left: self.team.names(), back_to })?;
        if alone {
            let failure = Failure::stopped(format!("step {step}: {why}")).hint("no other device works on this run");
            return Err(Halt::Stop { failure, whole: false });
        }
        Ok(())
    }

    /// A device has no recipe for its share that holds less than `line`: the others take some of it, or all. Whether they
    /// can.
    pub(super) fn share_with_less(
        &mut self,
        rank: usize,
        line: Bytes,
        why: &str,
        log: &mut EventLog,
    ) -> Result<bool, Halt> {
        if self.team.len() == 1 {
            return Ok(false);
        }
        let start = Instant::now();
        let mut specs = self.team.specs();
        specs[rank].budget = line;
        let planned = share_among(&self.run, &self.resolved.model, &specs, self.host_line(), None, None, None)?;
        if !planned.plan.fits {
            return Ok(false);
        }
        self.take_shares(planned, why, start, log)?;
        Ok(true)
    }

    /// Devices that turn out to be faster or slower than planned share the work as they really are, in the same way. Between
    /// two steps.
    pub(super) fn watch_drift(&mut self, log: &mut EventLog) -> Result<(), Halt> {
        let Some(sharing) = self.plan.sharing.filter(|_| self.team.len() > 1) else { return Ok(()) };
        let Some(factors) = self.drift.see(self.info.step, &self.team.computed()) else { return Ok(()) };
        let start = Instant::now();
        let mut specs = self.team.specs();
        for (spec, factor) in specs.iter_mut().zip(&factors) {
            spec.rates = spec.rates.paced(1.0 / factor);
        }
        let (host, whole) = (self.host_line(), Only::Sharing(sharing));
        let among = |known: Option<&Known>, only: &Only| {
            let planned = share_among(&self.run, &self.resolved.model, &specs, host, known, Some(only.clone()), None);
            // What planning took goes back: it is beside arenas that are full.
            process::give_back();
            planned
        };
        let as_they_are = among(Known::of_plan(&self.plan).as_ref(), &whole)?.plan.predicted.step_seconds;
        // Parts of the state stay where they are, if that is enough.
        let parts = self.team.workers()[0].share.state.clone();
        let parts = (sharing == Sharing::State).then_some(Only::Parts(parts));
        let mut found = None;
        for only in parts.iter().chain([&whole]) {
            let planned = among(None, only)?;
            if planned.plan.fits && self.pays(&planned, as_they_are) {
                found = Some(planned);
                break;
            }
        }
        self.shared_again += 1;
        self.drift = Drift::rested(self.info.step, self.shared_again);
        let Some(planned) = found else { return Ok(()) };
        let name =
            |(spec, factor): (&DeviceSpec, &f64)| format!("{} takes {factor:.2} times what was planned", spec.name);
        let why = specs.iter().zip(&factors).map(name).collect::<Vec<_>>().join(", ");
        self.take_shares(planned, &why, start, log)
    }

    /// Whether other shares save more, over the steps that are left, than the move to them takes; `as_they_are` are the
    /// predicted seconds of a step that is not shared out anew.
    fn pays(&self, planned: &Planned, as_they_are: f64) -> bool {
        let step_seconds = planned.plan.predicted.step_seconds;
        let costs = match self.stays(planned) {
            true => 0.0,
            // There is nothing to go back to.
            false if !self.saves => f64::INFINITY,
            false => self.filling_seconds + self.saving_seconds.unwrap_or(self.filling_seconds),
        };
        let saves = (as_they_are - step_seconds) * self.steps_left(as_they_are);
        step_seconds < as_they_are * WORTH && saves > PAYS * costs
    }

    /// Whether everybody holds under these shares what it holds now.
    fn stays(&self, planned: &Planned) -> bool {
        let both = [self.plan.sharing, planned.plan.sharing].map(|sharing| sharing.unwrap_or(Sharing::Batch));
        match both {
            [Sharing::Batch, Sharing::Batch] => true,
            [Sharing::State, Sharing::State] | [Sharing::Layers, Sharing::Layers] => {
                let workers = self.team.workers();
                let same = |(worker, part): (&Worker, &Part)| {
                    let (now, then) = (&worker.share, &part.share);
                    worker.device.name == part.device.name && (&now.state, &now.layers) == (&then.state, &then.layers)
                };
                workers.len() == planned.parts.len() && workers.iter().zip(&planned.parts).all(same)
            }
            _ => false,
        }
    }

    pub(super) fn host_line(&self) -> Bytes {
        self.team.workers().iter().map(|worker| worker.line.host).max().unwrap_or(Bytes::ZERO)
    }

    /// The devices that are left share the work of a step anew, under the load lines that hold now.
    pub(super) fn share_anew(&mut self, why: &str, log: &mut EventLog) -> Result<(), Halt> {
        let start = Instant::now();
        // The others have all that the run needs.
        let planned = self.planned_anew(why).map_err(|failure| Halt::Stop { failure, whole: true })?;
        self.take_shares(planned, &format!("{why}: the others share its work"), start, log)
    }

    /// How the devices that there are would share the work.
    fn planned_anew(&self, why: &str) -> Result<Planned, Failure> {
        let specs: Vec<DeviceSpec> = self.team.specs();
        let planned = share_among(&self.run, &self.resolved.model, &specs, self.host_line(), None, None, None)?;
        if !planned.plan.fits {
            return Err(Failure::stopped(format!("{why}; no recipe of this run fits on what is left"))
                .hint("name more devices, or allow more: --allow"));
        }
        Ok(planned)
    }

    /// All go over to other shares; who has none leaves. Where something that stands in parts, or is going to, has to go
    /// elsewhere, it does so by way of a checkpoint.
    pub(super) fn take_shares(
        &mut self,
        planned: Planned,
        why: &str,
        start: Instant,
        log: &mut EventLog,
    ) -> Result<(), Halt> {
        if !self.stays(&planned) {
            if self.filled && self.info.step > 0 {
                self.save(log)?;
            }
            log.emit(Event::Warning { message: format!("{why}; the run goes on from the checkpoint in another way") })?;
            return Err(self.go_back(planned, log));
        }
        let Planned { plan, parts, .. } = planned;
        let unused: Vec<String> =
            self.team.names().into_iter().filter(|name| parts.iter().all(|part| part.device.name != *name)).collect();
        for name in unused {
            let rank = self.team.rank_of(&name).expect("it is one of them");
            self.team.leave(rank);
        }
        // By name: the plan may order them otherwise.
        self.team.order_as(&parts.iter().map(|part| part.device.name.clone()).collect::<Vec<_>>());
        let left: Vec<Left> = (0..self.team.len()).map(|rank| self.leaves(rank)).collect();
        // Who has gone over already does so again.
        while let Err(trouble) = self.team.adopt(&parts) {
            match trouble {
                Trouble::Refused { rank, error } => {
                    if let Some(why) = self.refuses_for_ever(rank, &error) {
                        return self.leave_out(rank, &why, true, log);
                    }
                }
                Trouble::Lost { rank, why } => return self.go_on_without(rank, &why, log),
                other => return Err(other.into()),
            }
        }
        self.goes_by(plan);
        self.drift = Drift::rested(self.info.step, self.shared_again);
        self.write_plan()?;
        for (rank, left) in left.into_iter().enumerate() {
            self.told(rank, left, Class::Reordered, why.to_owned(), start, log)?;
        }
        Ok(())
    }
}
