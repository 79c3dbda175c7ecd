//! Choice of the device for work that one device does: the preferred one of several, and the processor as the last
//! resort.

use super::planner::{Charges, Planner};
use crate::config::{FallbackTarget, ParallelismChoice};
use crate::resolve::devices::{cpu_device, use_host_exchange};
use crate::resolve::{Model, Resolved, RunRequest, Workload};
use plimsoll_core::{DeviceKind, Failure, Fallback, Plan};
use plimsoll_plan::device_request::DeviceRequest;
use plimsoll_plan::search::PlanOutcome;

impl Resolved {
    /// Combines `model` with the devices of a run for `work`. Training keeps all devices that the run names. Other work
    /// keeps only the best one: the fastest on which it fits.
    ///
    /// # Errors
    /// The errors of [`Resolved::new`], or the run names a paper device, which can only be planned for.
    pub fn for_run(run: &RunRequest, model: Model, work: Workload) -> Result<Resolved, Failure> {
        let mut resolved = Resolved::new(run, model)?;
        resolved.reject_paper_devices()?;
        if work != Workload::Train && !resolved.others.is_empty() {
            use_host_exchange(std::iter::once(&mut resolved.device).chain(&mut resolved.others));
            resolved.choose_device(run, work)?;
            resolved.others.clear();
        }
        Ok(resolved)
    }

    /// Plans `work` for every device, and makes the best device `self.device`. The best is the fastest on which the
    /// work fits. If it fits on none, the best is the device that lacks the least memory.
    fn choose_device(&mut self, run: &RunRequest, work: Workload) -> Result<(), Failure> {
        let planner = Planner::new(run, &self.model, Charges::Stated);
        let mut best = planner.plan_work(&mut self.device, work)?;
        for device in &mut self.others {
            let other = planner.plan_work(device, work)?;
            if plan_rank(&other.plan).total_cmp(&plan_rank(&best.plan)).is_lt() {
                best = other;
                std::mem::swap(&mut self.device, device);
            }
        }
        Ok(())
    }

    /// Returns an error if the first device is a paper device, on which nothing runs.
    fn reject_paper_devices(&self) -> Result<(), Failure> {
        if self.device.kind == DeviceKind::Paper { Err(paper_device_failure(&self.device.name)) } else { Ok(()) }
    }
}

/// Returns the failure of a run on a paper device, on which nothing runs.
pub(crate) fn paper_device_failure(name: &str) -> Failure {
    Failure::input(format!("run.devices: `{name}` is a device on paper: nothing runs on it"))
        .hint("plan for it with `plimsoll plan`, or run on `cpu`")
}

impl Planner<'_> {
    /// Plans `work` on the device of `resolved`. If `work` does not fit there, plans it on the processor if
    /// [`Planner::fall_back_to_cpu`] allows that. Stores the device and its charges in `resolved`. The result may not
    /// fit.
    ///
    /// # Errors
    /// Those of [`Planner::plan_work`].
    pub(crate) fn plan_chosen_device(&self, resolved: &mut Resolved, work: Workload) -> Result<PlanOutcome, Failure> {
        let outcome = self.plan_work(&mut resolved.device, work)?;
        Ok(self.fall_back_to_cpu(resolved, &outcome.plan, work)?.unwrap_or(outcome))
    }

    /// Replaces the accelerators in `resolved` by the processor if their `plan` does not fit and `work` fits on the
    /// processor under the host's load line. Returns the plan on the processor. The experiment does not change: the
    /// precision stays that of the accelerator.
    ///
    /// Returns `None`, and keeps the devices, if `plan` fits, if `work` does not fit on the processor, or if no
    /// fallback is allowed:
    /// - `run.fallback` is off, or the device is no accelerator;
    /// - the user named the processor, which then has its own load line;
    /// - some devices are remote, or a team must use all devices.
    ///
    /// # Errors
    /// Those of [`Planner::plan_work`].
    pub(crate) fn fall_back_to_cpu(
        &self,
        resolved: &mut Resolved,
        plan: &Plan,
        work: Workload,
    ) -> Result<Option<PlanOutcome>, Failure> {
        if plan.fits || !may_fall_back(self.run, resolved, plan) {
            return Ok(None);
        }
        let mut decided = self.run.clone();
        decided.decide_precision(resolved.device.kind);
        let planner = Planner { run: &decided, ..*self };
        let mut processor = cpu_device(self.run, Some(self.run.host_budget()))?;
        let mut on_cpu = planner.plan_work(&mut processor, work)?;
        if !on_cpu.plan.fits {
            return Ok(None);
        }
        resolved.device = processor;
        resolved.others.clear();
        let lacking = &plan.devices[0];
        let fallback = Fallback {
            device: lacking.name.clone(),
            budget_bytes: lacking.budget_bytes,
            required_bytes: lacking.peak_bytes,
        };
        on_cpu.plan.fallback = Some(fallback.clone());
        resolved.fallback = Some(fallback);
        Ok(Some(on_cpu))
    }
}

/// Whether the processor may replace the accelerators of a run whose `plan` does not fit. False under the conditions
/// that [`Planner::fall_back_to_cpu`] lists.
fn may_fall_back(run: &RunRequest, resolved: &Resolved, plan: &Plan) -> bool {
    let requested = run.devices();
    let is_accelerator = matches!(resolved.device.kind, DeviceKind::Cuda | DeviceKind::Virtual);
    let names_cpu = requested.devices.iter().any(|device| matches!(device, DeviceRequest::Cpu { .. }));
    let several = plan.team.len() > 1 || !resolved.others.is_empty();
    let needs_all = several && run.run.parallelism == ParallelismChoice::All;
    is_accelerator
        && !names_cpu
        && !requested.has_remote_devices()
        && !needs_all
        && run.run.fallback != FallbackTarget::None
}

/// Returns a number that is lower for better plans. Plans that fit have the lowest numbers, ordered by step time. The
/// others have higher numbers, ordered by the bytes that they lack.
fn plan_rank(plan: &Plan) -> f64 {
    if plan.fits {
        return -1.0 / plan.predicted.step_seconds;
    }
    plan.devices.iter().map(|device| device.peak_bytes.saturating_sub(device.budget_bytes).0 as f64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::tests::run_request;

    #[test]
    fn paper_devices_are_planned_but_not_run() {
        let run = run_request(&["model.preset=smollm2-135m", "run.devices=rtx3070,rtx3090"]);
        let failure = Resolved::for_run(&run, Model::open(&run).unwrap(), Workload::Train).unwrap_err();
        assert_eq!(
            failure.to_string(),
            "run.devices: `rtx3070` is a device on paper: nothing runs on it\n  hint: plan for it with `plimsoll plan`, or run on `cpu`"
        );
    }
}
