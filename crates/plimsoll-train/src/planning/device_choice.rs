//! Choice of the device for work that one device does: the preferred one of several, and the processor as the last resort.

use super::request::plan_request;
use crate::config::{FallbackTarget, ParallelismChoice};
use crate::resolve::devices::{cpu_device, use_host_exchange};
use crate::resolve::{Model, Resolved, RunRequest, Workload};
use plimsoll_core::{DeviceKind, Failure, Fallback, Plan};
use plimsoll_plan::device_request::DeviceRequest;
use plimsoll_plan::search::{PlanOutcome, search};

impl Resolved {
    /// Resolves the devices for `work` and chooses one for work that is not training: the device that the planner prefers.
    ///
    /// # Errors
    /// The errors of [`Resolved::new`], or a paper device, which can only be planned for.
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

    /// Plans for every device and chooses the fastest that fits. If none fits, chooses the one that lacks the least memory.
    fn choose_device(&mut self, run: &RunRequest, work: Workload) -> Result<(), Failure> {
        let mut best = search(&self.plan_request(run, work)?);
        for number in 0..self.others.len() {
            let other = search(&plan_request(run, &self.model, &self.others[number], work)?);
            if plan_rank(&other.plan).total_cmp(&plan_rank(&best.plan)).is_lt() {
                best = other;
                std::mem::swap(&mut self.device, &mut self.others[number]);
            }
        }
        Ok(())
    }

    /// Returns `outcome`, or the plan on the processor if `outcome` does not fit and that does, see
    /// [`Resolved::fall_back_to_cpu`].
    ///
    /// # Errors
    /// Those of `plan`.
    pub(crate) fn or_fall_back_to_cpu(
        &mut self,
        run: &RunRequest,
        outcome: PlanOutcome,
        plan: impl FnOnce(&mut Resolved, &RunRequest) -> Result<PlanOutcome, Failure>,
    ) -> Result<PlanOutcome, Failure> {
        if outcome.plan.fits {
            return Ok(outcome);
        }
        Ok(self.fall_back_to_cpu(run, &outcome.plan, plan)?.unwrap_or(outcome))
    }

    /// Replaces accelerators by the processor, after their plan was `refused`, if the run fits under the host's load line.
    /// `plan` plans for the processor and may measure its charges. The experiment does not change: the precision stays that of
    /// the accelerator. Returns `None`, and keeps the device, if the fallback does not fit or does not apply:
    /// - `run.fallback` is off, or the device is no accelerator;
    /// - the user named the processor, which then has its own load line;
    /// - some devices are remote, or a team must use all devices.
    ///
    /// # Errors
    /// Those of `plan`.
    pub(crate) fn fall_back_to_cpu(
        &mut self,
        run: &RunRequest,
        refused: &Plan,
        plan: impl FnOnce(&mut Resolved, &RunRequest) -> Result<PlanOutcome, Failure>,
    ) -> Result<Option<PlanOutcome>, Failure> {
        let is_accelerator = matches!(self.device.kind, DeviceKind::Cuda | DeviceKind::Virtual);
        let requested = run.devices();
        let names_cpu = requested.devices.iter().any(|device| matches!(device, DeviceRequest::Cpu { .. }));
        let several = refused.team.len() > 1 || !self.others.is_empty();
        let excluded =
            names_cpu || requested.has_remote_devices() || several && run.run.parallelism == ParallelismChoice::All;
        if !is_accelerator || excluded || run.run.fallback == FallbackTarget::None {
            return Ok(None);
        }
        let mut decided = run.clone();
        decided.decide_precision(self.device.kind);
        let accelerator = std::mem::replace(&mut self.device, cpu_device(run, Some(run.host_budget()))?);
        let mut on_cpu = plan(self, &decided)?;
        if !on_cpu.plan.fits {
            self.device = accelerator;
            return Ok(None);
        }
        self.others.clear();
        let lacking = &refused.devices[0];
        let fallback = Fallback {
            device: lacking.name.clone(),
            budget_bytes: lacking.budget_bytes,
            required_bytes: lacking.peak_bytes,
        };
        on_cpu.plan.fallback = Some(fallback.clone());
        self.fallback = Some(fallback);
        Ok(Some(on_cpu))
    }

    /// Returns an error if the device can only be planned for.
    fn reject_paper_devices(&self) -> Result<(), Failure> {
        if self.device.kind != DeviceKind::Paper {
            return Ok(());
        }
        let message = format!("run.devices: `{}` is a device on paper: nothing runs on it", self.device.name);
        Err(Failure::input(message).hint("plan for it with `plimsoll plan`, or run on `cpu`"))
    }
}

/// Returns a key that sorts plans by preference: plans that fit by step time, then the others by missing bytes.
pub(crate) fn plan_rank(plan: &Plan) -> f64 {
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
