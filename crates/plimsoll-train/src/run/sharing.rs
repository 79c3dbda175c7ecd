//! How a run shares its work anew while it is under way: when a device is gone, and when devices turn out to be faster or
//! slower than the plan says. The experiment stays what it is: every step has the same samples.

use super::drift::Drift;
use super::events::EventLog;
use super::prepare::{Known, Planned, share_among};
use super::retreat::Left;
use super::training::Trainer;
use super::trouble::{Halt, Trouble};
use crate::run::checkpoint::newest;
use plimsoll_core::{Bytes, Class, DeviceSpec, Event, Failure, LostDevice, Sharing};
use std::path::Path;
use std::time::Instant;

/// Other shares must make a step this much faster to be worth the move.
const WORTH: f64 = 0.98;

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
        let worker = self.team.leave(rank);
        let (step, device) = (self.now, worker.device.name.clone());
        drop(worker);
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
        let planned = share_among(&self.run, &self.resolved.model, &specs, self.host_line(), None, None)?;
        if !planned.plan.fits {
            return Ok(false);
        }
        self.take_shares(planned, why, start, log)?;
        Ok(true)
    }

    /// Devices that turn out to be faster or slower than planned share the work as they really are.
    /// What stands in parts stays where it is.
    pub(super) fn watch_drift(&mut self, log: &mut EventLog) -> Result<(), Halt> {
        if self.team.len() == 1 || self.team.holds_parts() {
            return Ok(());
        }
        let Some(factors) = self.drift.see(self.info.step, &self.team.passed()) else { return Ok(()) };
        let start = Instant::now();
        let mut specs = self.team.specs();
        for (spec, factor) in specs.iter_mut().zip(&factors) {
            spec.rates = spec.rates.paced(1.0 / factor);
        }
        let host = self.host_line();
        let (now, batch) = (Known::of_plan(&self.plan), Some(Sharing::Batch));
        let as_they_are = share_among(&self.run, &self.resolved.model, &specs, host, now.as_ref(), batch)?;
        let planned = share_among(&self.run, &self.resolved.model, &specs, host, None, batch)?;
        self.shared_again += 1;
        let worth = planned.plan.predicted.step_seconds < as_they_are.plan.predicted.step_seconds * WORTH;
        if !planned.plan.fits || !worth {
            self.drift = Drift::rested(self.info.step, self.shared_again);
            return Ok(());
        }
        let name =
            |(spec, factor): (&DeviceSpec, &f64)| format!("{} takes {factor:.2} times what was planned", spec.name);
        let why = specs.iter().zip(&factors).map(name).collect::<Vec<_>>().join(", ");
        self.take_shares(planned, &why, start, log)
    }

    fn host_line(&self) -> Bytes {
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
        let planned = share_among(&self.run, &self.resolved.model, &specs, self.host_line(), None, None)?;
        if !planned.plan.fits {
            return Err(Failure::stopped(format!("{why}; no recipe of this run fits on what is left"))
                .hint("name more devices, or allow more: --allow"));
        }
        Ok(planned)
    }

    /// All go over to other shares; who has none leaves. What stands in parts, or is going to, does so by way of a
    /// checkpoint.
    pub(super) fn take_shares(
        &mut self,
        planned: Planned,
        why: &str,
        start: Instant,
        log: &mut EventLog,
    ) -> Result<(), Halt> {
        if self.team.holds_parts() || planned.plan.sharing.is_some_and(|sharing| sharing != Sharing::Batch) {
            if self.filled && self.info.step > 0 {
                self.save(log)?;
            }
            log.emit(Event::Warning { message: format!("{why}; the run goes on from the checkpoint in another way") })?;
            return Err(self.go_back(planned, log));
        }
        let Planned { plan, parts } = planned;
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
        self.plan = plan;
        self.drift = Drift::rested(self.info.step, self.shared_again);
        self.write_plan()?;
        for (rank, left) in left.into_iter().enumerate() {
            self.told(rank, left, Class::Reordered, why.to_owned(), start, log)?;
        }
        Ok(())
    }
}
