//! Rebalancing: changes of the team and of its shares during a run, when devices are lost, return, or turn out to be
//! faster or slower than planned. The loss itself is handled in `device_loss`.
//!
//! Every step keeps the same samples. If all workers keep the state that they hold, only sequences move between them.
//! Otherwise the run saves a checkpoint and restarts from it with the new plan.

use crate::events::EventLog;
use crate::planning::previous_plan::PreviousPlan;
use crate::planning::team_plan::{TeamPlan, WorkerAssignment};
use crate::recovery::failures::Work;
use crate::recovery::moves::{self, MoveCandidate, MoveState};
use crate::recovery::stragglers::{StragglerAction, assume_rates, decide_after_slowdown};
use crate::session::checkpoint::newest;
use crate::session::device_loss::no_recipe_fits;
use crate::session::interrupt::{Continuation, StepInterrupt};
use crate::session::length::remaining_steps;
use crate::session::recover::PlanBefore;
use crate::session::training::Session;
use crate::team::Worker;
use crate::team::unavailable::UnavailableDevice;
use plimsoll_core::{Bytes, Class, DeviceSpec, Event, Failure, Parallelism};
use plimsoll_plan::team::TeamConstraint;
use std::time::Instant;

impl Session {
    /// Returns all devices of the run, in the order of the run file.
    fn devices(&self) -> impl Iterator<Item = &DeviceSpec> {
        self.context.resolved.devices()
    }

    /// Returns the specification of the device `name` as it was measured before the run.
    fn spec_before_run(&self, name: &str) -> &DeviceSpec {
        self.devices().find(|device| device.name == name).expect("the run has this device")
    }

    /// Returns the devices outside `team` that are not lost, as they were measured before the run. They include the
    /// evaluator.
    pub(crate) fn unused_devices(&self, team: &[DeviceSpec]) -> Vec<DeviceSpec> {
        let is_other = |device: &&DeviceSpec| team.iter().all(|other| other.name != device.name);
        self.devices().filter(is_other).filter(|device| !self.is_device_lost(&device.name)).cloned().collect()
    }

    /// Returns the devices of `team` and all unused devices in the order of the run file, which fixes the order of
    /// sums.
    fn all_devices(&self, team: &[DeviceSpec]) -> Vec<DeviceSpec> {
        self.merge_specs(team, &self.unused_devices(team))
    }

    /// Returns the devices in `team` and `others` together, in the order of the run file.
    fn merge_specs(&self, team: &[DeviceSpec], others: &[DeviceSpec]) -> Vec<DeviceSpec> {
        let mut all = [team, others].concat();
        self.sort_by_run_file(&mut all);
        all
    }

    /// Sorts devices in the order of the run file.
    fn sort_by_run_file(&self, devices: &mut [DeviceSpec]) {
        devices.sort_by_key(|device| self.devices().position(|named| named.name == device.name));
    }

    /// Returns the step of the newest complete checkpoint in the run folder; 0 without one.
    pub(crate) fn newest_checkpoint_step(&self) -> Result<u64, Failure> {
        Ok(newest(&self.context.folder)?.0.map_or(0, |checkpoint| checkpoint.info.step))
    }

    /// Takes lost devices that have returned back into the team, if that saves more than twice the time that the
    /// restart costs. The run then restarts from a checkpoint, and the result is [`StepInterrupt::RolledBack`]. Called
    /// between two steps.
    pub(crate) fn readmit_returned_devices(&mut self, log: &mut EventLog) -> Result<(), StepInterrupt> {
        let has_answered = |unavailable: &&UnavailableDevice| unavailable.has_answered() && !unavailable.declined;
        let returned: Vec<DeviceSpec> =
            self.recovery.unavailable.iter().filter(has_answered).map(|unavailable| unavailable.spec.clone()).collect();
        if returned.is_empty() {
            return Ok(());
        }
        // Fewer steps remain later, so what is not worth it for this team now will not be worth it later.
        self.recovery.unavailable.iter_mut().for_each(|unavailable| unavailable.declined = unavailable.has_answered());
        let mut specs = self.team.specs();
        specs.extend(returned.iter().cloned());
        self.sort_by_run_file(&mut specs);
        let planned = self.context.planner(self.host_load_line()).plan_team_if_fits(&specs, None)?;
        let Some(planned) = planned else { return Ok(()) };
        let team: Vec<String> = planned.assignments.iter().map(|part| part.device.name.clone()).collect();
        let new_devices =
            |session: &Session| team.iter().filter(|name| session.team.rank_of(name).is_none()).cloned().collect();
        let new: Vec<String> = new_devices(self);
        let present_seconds = self.plan.predicted.step_seconds;
        if new.is_empty() || !self.is_worth_moving(&planned, present_seconds) {
            return Ok(());
        }
        self.save(log)?;
        if new_devices(self) != new {
            // Another device was lost meanwhile: consider all devices again.
            return Ok(());
        }
        let step = self.info.step;
        for device in new {
            let mut lost = self.recovery.lost.iter_mut().rev();
            lost.find(|lost| lost.device == device).into_iter().for_each(|lost| lost.returned_after_step = Some(step));
            log.emit(Event::DeviceReturned { step, device, team: team.clone() })?;
        }
        Err(self.restart_from_checkpoint(planned, log))
    }

    /// Rebalances the team because no recipe for the share of the worker `rank` fits under the load line `line`.
    /// Returns false and changes nothing if no plan of the team fits with that load line, or if the change would lose
    /// finished steps.
    pub(crate) fn rebalance_below(
        &mut self,
        rank: usize,
        line: Bytes,
        reason: &str,
        log: &mut EventLog,
    ) -> Result<bool, StepInterrupt> {
        let start = Instant::now();
        let mut specs = self.team.specs();
        let budget = std::mem::replace(&mut specs[rank].budget, line);
        let planned = self.context.planner(self.host_load_line()).plan_team_if_fits(&specs, None)?;
        let Some(mut planned) = planned else { return Ok(false) };
        // Without saving, a restart would lose the finished steps.
        if !self.checkpoints.enabled && self.info.step > 0 && !self.keeps_state_in_place(&planned) {
            return Ok(false);
        }
        // The load line itself does not move; only the plan holds less.
        planned.set_budget(&specs[rank].name, budget);
        self.switch_to_plan(planned, reason, start, log)?;
        Ok(true)
    }

    /// Rebalances the work if workers are faster or slower than planned; the kind of parallelism stays the same. After
    /// a number of steps, also considers devices again that got no work because they were too slow, with their speed
    /// from before the run. Called between two steps. A deterministic run only reports slow workers.
    pub(crate) fn rebalance_stragglers(&mut self, log: &mut EventLog) -> Result<(), StepInterrupt> {
        let deterministic = self.context.run.is_deterministic();
        let at_work = self.team.workers().iter().filter(|worker| worker.sequences > 0);
        let at_work: Vec<String> = at_work.map(|worker| worker.device.name.clone()).collect();
        self.stragglers.record_active(&at_work);
        let idle_candidates =
            self.stragglers.ever_active().filter(|name| !at_work.contains(name) && !self.is_device_lost(name));
        let may_retry = !deterministic && self.stragglers.may_retry_idle(self.info.step);
        let idle_candidates: Vec<String> = idle_candidates.filter(|_| may_retry).cloned().collect();
        let computed = self.team.compute_times();
        let Some(slowdowns) = self.stragglers.observe(self.info.step, &computed, !idle_candidates.is_empty()) else {
            return Ok(());
        };
        if self.keeps_shares(deterministic, &slowdowns, log)? {
            return Ok(());
        }
        let start = Instant::now();
        let mut specs = self.team.specs();
        let mut idle_specs = self.unused_devices(&specs);
        idle_specs.retain(|device| idle_candidates.contains(&device.name));
        let measured = computed.iter().zip(&slowdowns).map(|(computed, slowdown)| computed.map(|_| *slowdown));
        let measured: Vec<Option<f64>> = measured.collect();
        let rates_before_run = |name: &str| &self.spec_before_run(name).rates;
        let mut reasons = assume_rates(&mut specs, &mut idle_specs, &measured, rates_before_run);
        reasons
            .extend(idle_candidates.iter().map(|name| format!("{name} may have its speed from before the run again")));
        let planner = self.context.planner(self.host_load_line());
        let same_parallelism = self.plan.parallelism.map(TeamConstraint::Parallelism);
        let present_seconds = match self.team.len() {
            1 => self.plan.predicted.step_seconds,
            _ => {
                let known = PreviousPlan::from_plan(&self.plan);
                let planner = planner.with_previous(known.as_ref());
                planner.plan_team(&specs, same_parallelism.clone(), None)?.plan.predicted.step_seconds
            }
        };
        // Prefer a plan that keeps the parts of the state in place.
        let parts = self.team.workers()[0].share.state.clone();
        let parts = (self.plan.parallelism == Some(Parallelism::Sharded) && idle_specs.is_empty())
            .then_some(TeamConstraint::ShardSizes(parts));
        let all = if idle_specs.is_empty() { specs.clone() } else { self.merge_specs(&specs, &idle_specs) };
        let mut found = None;
        for only in parts.iter().map(Some).chain([same_parallelism.as_ref()]) {
            let planned = planner.plan_team_if_fits(&all, only.cloned())?;
            found = planned.filter(|planned| self.is_worth_moving(planned, present_seconds));
            if found.is_some() {
                break;
            }
        }
        let computing = found.iter().flat_map(|planned| &planned.assignments).filter(|part| part.sequences > 0);
        let readmitted = computing.map(|part| &part.device.name).any(|name| idle_candidates.contains(name));
        self.stragglers.record_review(self.info.step, readmitted);
        let Some(planned) = found else { return Ok(()) };
        self.switch_to_plan(planned, &reasons.join(", "), start, log)
    }

    /// Whether the workers keep their shares in spite of these slowdowns. Then logs the slow ones; the interval to the
    /// next such warning doubles each time.
    fn keeps_shares(&mut self, deterministic: bool, slowdowns: &[f64], log: &mut EventLog) -> Result<bool, Failure> {
        let workers = self.team.workers().iter().zip(slowdowns).filter(|(worker, _)| worker.sequences > 0);
        let named: Vec<(&str, f64)> = workers.map(|(worker, times)| (worker.device.name.as_str(), *times)).collect();
        match decide_after_slowdown(deterministic, &named) {
            StragglerAction::Rebalance => return Ok(false),
            StragglerAction::Report(message) => log.emit(Event::Warning { message })?,
            StragglerAction::Keep => {}
        }
        self.stragglers.record_review(self.info.step, false);
        Ok(true)
    }

    /// Whether the run should change to `planned`. The plan must be at least 2 % faster. If state has to move, it must
    /// also save more than twice the time of the restart. `present_seconds` is the predicted step time without the
    /// change.
    fn is_worth_moving(&self, planned: &TeamPlan, present_seconds: f64) -> bool {
        let restart_seconds = self.setup_seconds + self.checkpoints.write_seconds.unwrap_or(self.setup_seconds);
        let now = MoveState {
            step_seconds: present_seconds,
            remaining_steps: remaining_steps(&self.context.run, &self.info, present_seconds),
            // Without checkpoints there is nothing to restart from.
            restart_seconds: self.checkpoints.enabled.then_some(restart_seconds),
        };
        let candidate = MoveCandidate {
            step_seconds: planned.plan.predicted.step_seconds,
            keeps_state: self.keeps_state_in_place(planned),
        };
        moves::is_worth_moving(&now, &candidate)
    }

    /// Whether the team can change to the plan `planned` without a restart: every worker of that plan already holds the
    /// state that it needs.
    fn keeps_state_in_place(&self, planned: &TeamPlan) -> bool {
        let before_and_after = [self.plan.parallelism, planned.plan.parallelism]
            .map(|parallelism| parallelism.unwrap_or(Parallelism::Data));
        match before_and_after {
            [Parallelism::Data, Parallelism::Data] => {
                planned.assignments.iter().all(|part| self.team.rank_of(&part.device.name).is_some())
            }
            [Parallelism::Sharded, Parallelism::Sharded] | [Parallelism::Pipeline, Parallelism::Pipeline] => {
                let workers = self.team.workers();
                let same = |(worker, part): (&Worker, &WorkerAssignment)| {
                    let (now, then) = (&worker.share, &part.share);
                    worker.device.name == part.device.name && (&now.state, &now.layers) == (&then.state, &then.layers)
                };
                workers.len() == planned.assignments.len() && workers.iter().zip(&planned.assignments).all(same)
            }
            _ => false,
        }
    }

    /// Returns the largest present load line of host memory among the workers, or that of the start if no worker has
    /// one.
    pub(crate) fn host_load_line(&self) -> Bytes {
        let lines = self.team.workers().iter().map(|worker| worker.line.host);
        lines.max().filter(|host| *host > Bytes::ZERO).unwrap_or(self.context.host_budget)
    }

    /// Rebalances the work over the remaining workers, under their present load lines.
    pub(crate) fn rebalance(&mut self, reason: &str, log: &mut EventLog) -> Result<(), StepInterrupt> {
        let start = Instant::now();
        let planned = self.plan_that_fits(&self.team.specs(), self.host_load_line())?;
        let planned = planned.ok_or_else(|| StepInterrupt::Stop {
            failure: no_recipe_fits(reason),
            state_intact: self.team_state().holds_whole_state(),
        })?;
        self.switch_to_plan(planned, &format!("{reason}: the remaining devices share its work"), start, log)
    }

    /// Plans the run for `devices` under a host load line. If it does not fit on them, plans with all other devices
    /// that are not lost. Returns `None` if nothing fits.
    pub(crate) fn plan_that_fits(&self, devices: &[DeviceSpec], host: Bytes) -> Result<Option<TeamPlan>, Failure> {
        let all = self.all_devices(devices);
        let candidates = [devices, if all.len() > devices.len() { &all } else { &[] }];
        for devices in candidates.into_iter().filter(|devices| !devices.is_empty()) {
            let planned = self.context.planner(host).plan_team_if_fits(devices, None)?;
            if planned.is_some() {
                return Ok(planned);
            }
        }
        Ok(None)
    }

    /// Returns the names of the workers that a plan does not use, and logs the reason for each.
    pub(crate) fn warn_excluded(&self, planned: &TeamPlan, log: &mut EventLog) -> Result<Vec<String>, Failure> {
        let is_unused = |name: &String| planned.assignments.iter().all(|part| part.device.name != *name);
        let unused: Vec<String> = self.team.names().into_iter().filter(is_unused).collect();
        for out in planned.plan.excluded.iter().filter(|out| unused.contains(&out.device)) {
            let message = format!("{} is excluded from now on: {}", out.device, out.reason);
            log.emit(Event::Warning { message })?;
        }
        Ok(unused)
    }

    /// Switches the team to another plan; workers that the plan does not use leave. If state has to move, the run saves
    /// a checkpoint and restarts from the newest one, and the result is [`StepInterrupt::RolledBack`].
    pub(crate) fn switch_to_plan(
        &mut self,
        planned: TeamPlan,
        reason: &str,
        start: Instant,
        log: &mut EventLog,
    ) -> Result<(), StepInterrupt> {
        let keeps_state = self.keeps_state_in_place(&planned);
        if !keeps_state && self.state_loaded && self.info.step > 0 {
            self.save(log)?;
        }
        let unused = self.warn_excluded(&planned, log)?;
        if !keeps_state {
            let from = match self.newest_checkpoint_step()? {
                0 => "restarts from step 0".to_owned(),
                step => format!("restarts from the checkpoint of step {step}"),
            };
            log.emit(Event::Warning { message: format!("{reason}; the run {from} with another plan") })?;
            return Err(self.restart_from_checkpoint(planned, log));
        }
        let TeamPlan { plan, assignments, .. } = planned;
        for name in unused {
            let rank = self.team.rank_of(&name).expect("the run has this device");
            self.team.remove(rank);
        }
        self.team.set_has_replacement(!self.unused_devices(&self.team.specs()).is_empty());
        // The plan may have another order of ranks.
        self.team.reorder(&assignments.iter().map(|part| part.device.name.clone()).collect::<Vec<_>>());
        let plans_before: Vec<PlanBefore> = (0..self.team.len()).map(|rank| self.plan_before(rank)).collect();
        // Workers that have switched already do so again.
        while let Err(failure) = self.team.adopt(&assignments) {
            match self.recover(failure, Work::PlanSwitch, log)? {
                Continuation::Repeat => {}
                Continuation::PlanChanged | Continuation::FinishStep(_) => return Ok(()),
            }
        }
        self.set_plan(plan);
        self.stragglers.restart(self.info.step);
        self.store_current_plan()?;
        for (rank, before) in plans_before.into_iter().enumerate() {
            // Workers with an unchanged part have nothing to report.
            if !before.is_unchanged(&self.team.workers()[rank]) {
                self.record_recovery(rank, before, Class::Reordered, reason.to_owned(), start, log)?;
            }
        }
        Ok(())
    }
}
