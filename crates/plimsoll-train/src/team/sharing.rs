//! How a run shares its work anew while it is under way: when a device is gone, and when devices turn out to be faster or
//! slower than the plan says. The experiment stays what it is: every step has the same samples. Where devices keep what
//! stands on them, only sequences go to others; else all goes by way of a checkpoint of the present step.

use super::Worker;
use super::absent::Absent;
use crate::fault_injection::{Asked, Injection};
use crate::planning::prepare::{Known, Part, Planned, share_among, share_if_fits};
use crate::recovery::Left;
use crate::session::checkpoint::newest;
use crate::session::events::EventLog;
use crate::session::training::Trainer;
use crate::session::trouble::{Halt, Trouble};
use plimsoll_core::{Bytes, Class, DeviceSpec, Event, Failure, LostDevice, Sharing};
use plimsoll_plan::team::Only;
use std::sync::Arc;
use std::time::Instant;

/// Other shares must make a step this much faster to be worth the move.
const WORTH: f64 = 0.98;
/// And save so many times what the move is expected to take in the steps that are left.
const PAYS: f64 = 2.0;
/// A device that is lost within so many steps after it has come back is asked for less soon.
const SOON: u64 = 16;

impl Trainer {
    /// A device is gone. What it computed of the present step is dropped, and where the others have all that the run needs,
    /// they go on from the last step that was finished. Where the state, or a part of it, is gone with it, they go on from the
    /// last checkpoint; where there are no others, those that were left out do.
    pub(crate) fn go_on_without(&mut self, rank: usize, why: &str, log: &mut EventLog) -> Result<(), Halt> {
        if self.team.len() > 1 && !self.team.holds_parts() {
            self.part_with(rank, why, log)?;
            return self.share_anew(why, log);
        }
        let (back_to, host) = (self.newest_saved()?, self.host_line());
        let spec = self.lets_go(rank);
        let planned = self.planned_without(spec, &self.team.specs(), host, why, Some(back_to), log)?;
        self.names_left_out(&planned, log)?;
        Err(self.go_back(planned, log))
    }

    /// Lets a device that is gone leave a team whose others have all that the run needs, without another plan.
    pub(crate) fn part_with(&mut self, rank: usize, why: &str, log: &mut EventLog) -> Result<(), Failure> {
        let spec = self.lets_go(rank);
        let device = self.is_lost(spec, None);
        log.emit(Event::Lost { step: self.now, device, why: why.to_owned(), left: self.team.names(), back_to: None })
    }

    /// A device leaves the team. What it was.
    fn lets_go(&mut self, rank: usize) -> DeviceSpec {
        let spec = self.team.specs().swap_remove(rank);
        self.team.leave(rank);
        spec
    }

    /// A device is gone, and these are left of those that worked, who go back to a step perhaps. Says so, and how the run goes
    /// on; where nobody can go on with it, it stops.
    pub(crate) fn planned_without(
        &mut self,
        gone: DeviceSpec,
        rest: &[DeviceSpec],
        host: Bytes,
        why: &str,
        back_to: Option<u64>,
        log: &mut EventLog,
    ) -> Result<Planned, Halt> {
        let far = gone.host().is_some();
        let (step, device) = (self.now, self.is_lost(gone, back_to));
        // Who goes on is known when that is planned.
        let planned = self.fitting(rest, host);
        let parts = planned.iter().flatten().flat_map(|planned| &planned.parts);
        let left = parts.map(|part| part.device.name.clone()).collect();
        log.emit(Event::Lost { step, device, why: why.to_owned(), left, back_to })?;
        planned?.ok_or_else(|| {
            let failure = match rest {
                [] => {
                    let hint = match self.left_out(rest).is_empty() {
                        true => "no other device works on this run",
                        false => {
                            "no other device works on this run, and no recipe of it fits on those that were left out"
                        }
                    };
                    Failure::stopped(format!("step {step}: {why}")).hint(hint)
                }
                _ => fits_nowhere(why),
            };
            // It may be this machine that has dropped out, and not the other.
            let hint = "what has become of the machines, and how one takes part again, is said by: plimsoll cluster";
            Halt::Stop { failure: if far { failure.hint(hint) } else { failure }, whole: false }
        })
    }

    /// A device that was lost is asked for, if it is another host's: one that is of no use, or that was to be lost, is not. Those
    /// that are back are looked at again: there are fewer devices now.
    pub(crate) fn may_come_back(&mut self, spec: DeviceSpec) {
        self.absent.iter_mut().for_each(|absent| absent.declined = false);
        let was_to_be = |asked: &Arc<Asked>| match &asked.what {
            Injection::Loss { device, .. } | Injection::Silence { device, .. } => {
                *device == spec.name && asked.has_happened()
            }
            _ => false,
        };
        let comes = spec.host().is_some() && !self.is_of_no_use(&spec.name) && !self.rehearsed.iter().any(was_to_be);
        // One that was lost while it was taken in has answered before that.
        self.absent.retain(|absent| absent.spec.name != spec.name);
        if comes {
            let often = self.lost_soon(&spec.name);
            self.absent.extend(Absent::wait_for(spec, self.run.elsewhere.clone(), often));
        }
    }

    /// How many times in a row until now a device was lost soon after it had come back.
    fn lost_soon(&self, name: &str) -> u32 {
        let (mut often, mut step) = (0, self.now);
        for lost in self.lost.iter().rev().filter(|lost| lost.device == name) {
            match lost.back_after {
                Some(back) if step.saturating_sub(back) < SOON => (often, step) = (often + 1, lost.step),
                _ => break,
            }
        }
        often
    }

    /// A device is gone, and those that are left go back to a step perhaps. Its name.
    fn is_lost(&mut self, spec: DeviceSpec, back_to: Option<u64>) -> String {
        let device = spec.name.clone();
        self.has_lost = true;
        self.may_come_back(spec);
        self.lost.push(LostDevice { device: device.clone(), step: self.now, back_to, back_after: None });
        device
    }

    /// Whether a device was lost and has not come back.
    fn is_gone(&self, device: &str) -> bool {
        let mut lost = self.lost.iter().rev();
        lost.find(|lost| lost.device == device).is_some_and(|lost| lost.back_after.is_none())
    }

    /// All devices of the run, in the order of the run file.
    fn devices(&self) -> impl Iterator<Item = &DeviceSpec> {
        std::iter::once(&self.resolved.device).chain(&self.resolved.others)
    }

    /// One of them, as it was measured before the run.
    fn before(&self, name: &str) -> &DeviceSpec {
        self.devices().find(|device| device.name == name).expect("it is one of them")
    }

    /// Those that could work on the run beside these, as they were measured before it: who evaluates is one of them.
    pub(crate) fn left_out(&self, team: &[DeviceSpec]) -> Vec<DeviceSpec> {
        let is_other = |device: &&DeviceSpec| team.iter().all(|other| other.name != device.name);
        self.devices().filter(is_other).filter(|device| !self.is_gone(&device.name)).cloned().collect()
    }

    /// The same with these, in the order of the run file: sums are taken in it.
    fn all_devices(&self, team: &[DeviceSpec]) -> Vec<DeviceSpec> {
        self.with(team, &self.left_out(team))
    }

    fn with(&self, team: &[DeviceSpec], others: &[DeviceSpec]) -> Vec<DeviceSpec> {
        let mut all = [team, others].concat();
        self.order(&mut all);
        all
    }

    fn order(&self, devices: &mut [DeviceSpec]) {
        devices.sort_by_key(|device| self.devices().position(|named| named.name == device.name));
    }

    /// The step of the newest checkpoint; 0 where there is none.
    fn newest_saved(&self) -> Result<u64, Failure> {
        Ok(newest(&self.folder)?.0.map_or(0, |checkpoint| checkpoint.info.step))
    }

    /// Takes in devices that were lost and are there again, where that saves more in the steps that are left than the way by a
    /// checkpoint takes. Between two steps.
    pub(crate) fn take_back(&mut self, log: &mut EventLog) -> Result<(), Halt> {
        let is_back = |absent: &&Absent| absent.is_back() && !absent.declined;
        let back: Vec<DeviceSpec> = self.absent.iter().filter(is_back).map(|absent| absent.spec.clone()).collect();
        if back.is_empty() {
            return Ok(());
        }
        // There are fewer and fewer steps left: what does not pay for this team now will not later.
        self.absent.iter_mut().for_each(|absent| absent.declined = absent.is_back());
        let mut specs = self.team.specs();
        specs.extend(back.iter().cloned());
        self.order(&mut specs);
        let planned = share_if_fits(&self.run, &self.resolved.model, &specs, self.host_line(), None)?;
        let Some(planned) = planned else { return Ok(()) };
        let team: Vec<String> = planned.parts.iter().map(|part| part.device.name.clone()).collect();
        let newly =
            |trainer: &Trainer| team.iter().filter(|name| trainer.team.rank_of(name).is_none()).cloned().collect();
        let new: Vec<String> = newly(self);
        let as_they_are = self.plan.predicted.step_seconds;
        if new.is_empty() || !self.pays(&planned, as_they_are, PAYS) {
            return Ok(());
        }
        self.save(log)?;
        if newly(self) != new {
            // Somebody was lost meanwhile: all are looked at again.
            return Ok(());
        }
        let step = self.info.step;
        for device in new {
            let mut lost = self.lost.iter_mut().rev();
            lost.find(|lost| lost.device == device).into_iter().for_each(|lost| lost.back_after = Some(step));
            log.emit(Event::Back { step, device, team: team.clone() })?;
        }
        Err(self.go_back(planned, log))
    }

    /// A device has no recipe for its share that holds less than `line`: the others take some of it, or all. Whether they
    /// can.
    pub(crate) fn share_with_less(
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
        let budget = std::mem::replace(&mut specs[rank].budget, line);
        let planned = share_if_fits(&self.run, &self.resolved.model, &specs, self.host_line(), None)?;
        let Some(mut planned) = planned else { return Ok(false) };
        // Steps that are done are not given up for this.
        if !self.saves && self.info.step > 0 && !self.stays(&planned) {
            return Ok(false);
        }
        // Its line is where it was, and the plan holds less.
        planned.has_line(&specs[rank].name, budget);
        self.take_shares(planned, why, start, log)?;
        Ok(true)
    }

    /// Devices that turn out to be faster or slower than planned share the work as they really are, in the same way. Those that
    /// were too slow for any of it are asked again after a rest, as fast as before the run. Between two steps.
    pub(crate) fn watch_drift(&mut self, log: &mut EventLog) -> Result<(), Halt> {
        let at_work = self.team.workers().iter().filter(|worker| worker.sequences > 0);
        let at_work: Vec<String> = at_work.map(|worker| worker.device.name.clone()).collect();
        self.drift.work(&at_work);
        let benched = self.drift.have_worked().filter(|name| !at_work.contains(name) && !self.is_gone(name));
        let benched: Vec<String> = benched.filter(|_| self.drift.asks_again(self.info.step)).cloned().collect();
        let computed = self.team.computed();
        let Some(factors) = self.drift.see(self.info.step, &computed, !benched.is_empty()) else { return Ok(()) };
        let start = Instant::now();
        let mut specs = self.team.specs();
        let (mut why, mut slower) = (Vec::new(), Vec::new());
        for ((spec, factor), _) in
            specs.iter_mut().zip(&factors).zip(&computed).filter(|(_, computed)| computed.is_some())
        {
            spec.rates = spec.rates.paced(1.0 / factor);
            slower.push(self.before(&spec.name).rates.f32_flops / spec.rates.f32_flops);
            if *factor != 1.0 {
                why.push(format!("{} takes {factor:.2} times what was planned", spec.name));
            }
        }
        // Who computes nothing is as fast as before the run, for all that is known, or slower by what all others are.
        let alike = if slower.len() > 1 { slower.into_iter().fold(f64::INFINITY, f64::min) } else { 1.0 };
        let mut left_out = self.left_out(&specs);
        left_out.retain(|device| benched.contains(&device.name));
        let idle = specs.iter_mut().zip(&computed).filter(|(_, computed)| computed.is_none());
        for spec in idle.map(|(spec, _)| spec).chain(&mut left_out) {
            spec.rates = self.before(&spec.name).rates.paced(1.0 / alike);
        }
        why.extend(benched.iter().map(|name| format!("{name} may be as fast again as before the run")));
        let host = self.host_line();
        let whole = self.plan.sharing.map(Only::Sharing);
        let (run, model) = (&self.run, &self.resolved.model);
        let as_they_are = match self.team.len() {
            1 => self.plan.predicted.step_seconds,
            _ => {
                let known = Known::of_plan(&self.plan);
                let same = share_among(run, model, &specs, host, known.as_ref(), whole.clone(), None)?;
                same.plan.predicted.step_seconds
            }
        };
        // Parts of the state stay where they are, if that is enough.
        let parts = self.team.workers()[0].share.state.clone();
        let parts = (self.plan.sharing == Some(Sharing::State) && left_out.is_empty()).then_some(Only::Parts(parts));
        let all = if left_out.is_empty() { specs.clone() } else { self.with(&specs, &left_out) };
        let mut found = None;
        for only in parts.iter().map(Some).chain([whole.as_ref()]) {
            let planned = share_if_fits(run, model, &all, host, only.cloned())?;
            found = planned.filter(|planned| self.pays(planned, as_they_are, PAYS));
            if found.is_some() {
                break;
            }
        }
        let parts = found.iter().flat_map(|planned| &planned.parts).filter(|part| part.sequences > 0);
        let back = parts.map(|part| &part.device.name).any(|name| benched.contains(name));
        self.drift.looked(self.info.step, back);
        let Some(planned) = found else { return Ok(()) };
        self.take_shares(planned, &why.join(", "), start, log)
    }

    /// Whether other shares save so many `times`, over the steps that are left, what the move to them takes; `as_they_are` are
    /// the predicted seconds of a step that is not shared out anew.
    fn pays(&self, planned: &Planned, as_they_are: f64, times: f64) -> bool {
        let step_seconds = planned.plan.predicted.step_seconds;
        let costs = match self.stays(planned) {
            true => 0.0,
            // There is nothing to go back to.
            false if !self.saves => f64::INFINITY,
            false => self.filling_seconds + self.saving_seconds.unwrap_or(self.filling_seconds),
        };
        let saves = (as_they_are - step_seconds) * self.steps_left(as_they_are);
        step_seconds < as_they_are * WORTH && saves > times * costs
    }

    /// Whether everybody holds under these shares what it holds now.
    fn stays(&self, planned: &Planned) -> bool {
        let both = [self.plan.sharing, planned.plan.sharing].map(|sharing| sharing.unwrap_or(Sharing::Batch));
        match both {
            [Sharing::Batch, Sharing::Batch] => {
                planned.parts.iter().all(|part| self.team.rank_of(&part.device.name).is_some())
            }
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

    pub(crate) fn host_line(&self) -> Bytes {
        let lines = self.team.workers().iter().map(|worker| worker.line.host);
        lines.max().filter(|host| *host > Bytes::ZERO).unwrap_or(self.host)
    }

    /// The devices that are left share the work of a step anew, under the load lines that hold now.
    pub(crate) fn share_anew(&mut self, why: &str, log: &mut EventLog) -> Result<(), Halt> {
        let start = Instant::now();
        let planned = self.fitting(&self.team.specs(), self.host_line())?;
        // The others have all that the run needs.
        let planned = planned.ok_or_else(|| Halt::Stop { failure: fits_nowhere(why), whole: true })?;
        self.take_shares(planned, &format!("{why}: the others share its work"), start, log)
    }

    /// How these devices would share the work beside such a host, where nothing of it stands on them; with those that were left
    /// out, where they cannot by themselves; nothing where it does not fit.
    fn fitting(&self, devices: &[DeviceSpec], host: Bytes) -> Result<Option<Planned>, Failure> {
        let all = self.all_devices(devices);
        let among = [devices, if all.len() > devices.len() { &all } else { &[] }];
        for devices in among.into_iter().filter(|devices| !devices.is_empty()) {
            let planned = share_if_fits(&self.run, &self.resolved.model, devices, host, None)?;
            if planned.is_some() {
                return Ok(planned);
            }
        }
        Ok(None)
    }

    /// Those of the team that have no part in a plan; why is told.
    fn names_left_out(&self, planned: &Planned, log: &mut EventLog) -> Result<Vec<String>, Failure> {
        let has_none = |name: &String| planned.parts.iter().all(|part| part.device.name != *name);
        let unused: Vec<String> = self.team.names().into_iter().filter(has_none).collect();
        for out in planned.plan.left_out.iter().filter(|out| unused.contains(&out.device)) {
            let message = format!("{} is left out from now on: {}", out.device, out.why);
            log.emit(Event::Warning { message })?;
        }
        Ok(unused)
    }

    /// All go over to other shares; who has none leaves. Where something that stands in parts, or is going to, has to go
    /// elsewhere, it does so by way of a checkpoint.
    pub(crate) fn take_shares(
        &mut self,
        planned: Planned,
        why: &str,
        start: Instant,
        log: &mut EventLog,
    ) -> Result<(), Halt> {
        let stays = self.stays(&planned);
        if !stays && self.filled && self.info.step > 0 {
            self.save(log)?;
        }
        let unused = self.names_left_out(&planned, log)?;
        if !stays {
            let from = match self.newest_saved()? {
                0 => "begins anew".to_owned(),
                step => format!("goes on from the checkpoint of step {step}"),
            };
            log.emit(Event::Warning { message: format!("{why}; the run {from}, in another way") })?;
            return Err(self.go_back(planned, log));
        }
        let Planned { plan, parts, .. } = planned;
        for name in unused {
            let rank = self.team.rank_of(&name).expect("it is one of them");
            self.team.leave(rank);
        }
        self.team.is_relieved(!self.left_out(&self.team.specs()).is_empty());
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
        self.drift.begins(self.info.step);
        self.write_plan()?;
        for (rank, left) in left.into_iter().enumerate() {
            // Whose part is what it was has nothing to tell.
            if !left.is_that_of(&self.team.workers()[rank]) {
                self.told(rank, left, Class::Reordered, why.to_owned(), start, log)?;
            }
        }
        Ok(())
    }
}

/// A run that comes to its end, resumable.
fn fits_nowhere(why: &str) -> Failure {
    Failure::stopped(format!("{why}; no recipe of this run fits on what is left"))
        .hint("name more devices, or allow more: --allow")
}
