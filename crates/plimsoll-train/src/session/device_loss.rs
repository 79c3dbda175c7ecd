//! Loss of a device: removes the worker, plans the run for the remaining devices, and waits for the device to return.

use crate::events::EventLog;
use crate::planning::team_plan::TeamPlan;
use crate::session::interrupt::StepInterrupt;
use crate::session::training::Session;
use crate::team::unavailable::UnavailableDevice;
use plimsoll_core::{Bytes, DeviceSpec, Event, Failure, LostDevice};

/// Limit for quick losses: a device has a quick loss if it is lost again less than this many steps after its return.
const QUICK_LOSS_STEPS: u64 = 16;

impl Session {
    /// Removes a failed worker whose part of the state no other worker has. Plans the run for the remaining devices
    /// (with the unused ones if needed), and restarts from the newest checkpoint. Returns [`StepInterrupt::RolledBack`]
    /// after success, else the reason to end the run: no plan fits, or the restart failed.
    pub(crate) fn restart_without(&mut self, rank: usize, reason: &str, log: &mut EventLog) -> StepInterrupt {
        match self.replan_after_loss(rank, reason, log) {
            Ok(planned) => self.restart_from_checkpoint(planned, log),
            Err(interrupt) => interrupt,
        }
    }

    /// Removes a lost worker. Returns a plan for the remaining devices (with the unused ones if needed), under which
    /// the run restarts from the newest checkpoint.
    fn replan_after_loss(&mut self, rank: usize, reason: &str, log: &mut EventLog) -> Result<TeamPlan, StepInterrupt> {
        let (resumed_from_step, host) = (self.newest_checkpoint_step()?, self.host_load_line());
        let spec = self.remove_worker(rank);
        let planned = self.replan_without(spec, &self.team.specs(), host, reason, Some(resumed_from_step), log)?;
        self.warn_excluded(&planned, log)?;
        Ok(planned)
    }

    /// Removes a lost worker from a data parallel team and logs the loss. The others keep their plan.
    pub(crate) fn remove_lost_worker(&mut self, rank: usize, reason: &str, log: &mut EventLog) -> Result<(), Failure> {
        let spec = self.remove_worker(rank);
        let device = self.record_loss(spec, None);
        log.emit(Event::DeviceLost {
            step: self.current_step,
            device,
            reason: reason.to_owned(),
            remaining_devices: self.team.names(),
            resumed_from_step: None,
        })
    }

    /// Removes a worker from the team and returns its device.
    fn remove_worker(&mut self, rank: usize) -> DeviceSpec {
        let spec = self.team.specs().swap_remove(rank);
        self.team.remove(rank);
        spec
    }

    /// Plans the run for `rest`, the remaining devices of the team, after the loss of `lost`; if no plan fits there,
    /// also for the unused devices. Logs the loss. `host` is the load line of host memory. `resumed_from_step`, for the
    /// log, is the step of the checkpoint from which the run restarts; `None` if the loss came while devices were opened.
    ///
    /// # Errors
    /// No plan fits, even with the unused devices: the run stops and can be resumed.
    pub(crate) fn replan_without(
        &mut self,
        lost: DeviceSpec,
        rest: &[DeviceSpec],
        host: Bytes,
        reason: &str,
        resumed_from_step: Option<u64>,
        log: &mut EventLog,
    ) -> Result<TeamPlan, StepInterrupt> {
        let is_remote = lost.remote_host().is_some();
        let (step, device) = (self.current_step, self.record_loss(lost, resumed_from_step));
        // The event names the devices of the new plan.
        let planned = self.plan_that_fits(rest, host);
        let assignments = planned.iter().flatten().flat_map(|planned| &planned.assignments);
        let left = assignments.map(|assignment| assignment.device.name.clone()).collect();
        log.emit(Event::DeviceLost {
            step,
            device,
            reason: reason.to_owned(),
            remaining_devices: left,
            resumed_from_step,
        })?;
        planned?.ok_or_else(|| {
            let failure = match rest {
                [] => {
                    let hint = match self.unused_devices(rest).is_empty() {
                        true => "no other device works on this run",
                        false => "no other device works on this run, and no recipe fits on the excluded devices",
                    };
                    Failure::stopped(format!("step {step}: {reason}")).hint(hint)
                }
                _ => no_recipe_fits(reason),
            };
            // This machine may have lost its network, and not the other one.
            let hint = "to see the machines of the cluster and how they rejoin: plimsoll cluster";
            let state_intact = self.team_state().holds_whole_state();
            StepInterrupt::Stop { failure: if is_remote { failure.hint(hint) } else { failure }, state_intact }
        })
    }

    /// Starts to poll a lost remote device for its return, unless it ran out of memory too often or was lost by fault
    /// injection. Also gives another chance to returned devices that the team declined before, because the team is
    /// smaller now.
    pub(crate) fn watch_for_return(&mut self, spec: DeviceSpec) {
        self.recovery.unavailable.iter_mut().for_each(|unavailable| unavailable.declined = false);
        let may_return = spec.remote_host().is_some()
            && !self.recovery.refusals.is_over_limit(&spec.name)
            && !self.faults.iter().any(|fault| fault.has_disabled(&spec.name));
        // A device that is lost while it joins has a poller that answered before.
        self.recovery.unavailable.retain(|unavailable| unavailable.spec.name != spec.name);
        if may_return {
            let quick_losses = self.count_quick_losses(&spec.name);
            self.recovery.unavailable.extend(UnavailableDevice::poll(
                spec,
                self.context.run.remote.clone(),
                quick_losses,
            ));
        }
    }

    /// Returns how many times in a row, up to now, a device was lost less than [`QUICK_LOSS_STEPS`] steps after its
    /// return.
    fn count_quick_losses(&self, name: &str) -> u32 {
        let (mut quick_losses, mut step) = (0, self.current_step);
        for lost in self.recovery.lost.iter().rev().filter(|lost| lost.device == name) {
            match lost.returned_after_step {
                Some(returned) if step.saturating_sub(returned) < QUICK_LOSS_STEPS => {
                    (quick_losses, step) = (quick_losses + 1, lost.step)
                }
                _ => break,
            }
        }
        quick_losses
    }

    /// Records the loss of a device and returns its name.
    fn record_loss(&mut self, spec: DeviceSpec, resumed_from_step: Option<u64>) -> String {
        let device = spec.name.clone();
        self.recovery.lost_since_step = true;
        self.watch_for_return(spec);
        self.recovery.lost.push(LostDevice {
            device: device.clone(),
            step: self.current_step,
            resumed_from_step,
            returned_after_step: None,
        });
        device
    }

    /// Whether a device was lost and has not returned.
    pub(crate) fn is_device_lost(&self, device: &str) -> bool {
        let mut lost = self.recovery.lost.iter().rev();
        lost.find(|lost| lost.device == device).is_some_and(|lost| lost.returned_after_step.is_none())
    }
}

/// Returns the failure of a run that stops because no recipe fits on the remaining devices. `reason` tells why the run
/// had to plan again.
pub(crate) fn no_recipe_fits(reason: &str) -> Failure {
    Failure::stopped(format!("{reason}; no recipe of this run fits on the remaining devices"))
        .hint("add devices with --devices, or allow lossy options with --allow")
}
