//! The plan of a deterministic run. It is chosen by the nominal figures of the devices, so that the same command has
//! the same plan at each start. Then the run follows it like a stored plan, with measured figures: predicted times are
//! those of this machine, and the plan must fit in the memory that is free.

use super::planner::{Charges, Planner};
use super::previous_plan::PreviousPlan;
use super::sum_order::SumOrder;
use crate::resolve::devices::choose_nccl;
use crate::resolve::{Model, RunRequest, resolve_devices};
use plimsoll_core::{DeviceKind, DeviceSpec, ExcludedDevice, Failure, Plan, WorkerPlan};
use plimsoll_plan::team::TeamOutcome;

/// A plan that was chosen by nominal figures.
pub(crate) struct NominalPlan {
    /// The plan, for the run to follow.
    pub known: PreviousPlan,
    excluded: Vec<ExcludedDevice>,
}

impl NominalPlan {
    /// Chooses the plan of a deterministic run. Returns `None` if the run is not deterministic, if it has devices of
    /// other hosts, which have no nominal figures, or if no plan fits.
    ///
    /// # Errors
    /// The run file fixes choices that do not match the model, or devices that cannot be used.
    pub fn choose(run: &RunRequest, model: &Model) -> Result<Option<NominalPlan>, Failure> {
        if !run.is_deterministic() || run.devices().has_remote_devices() {
            return Ok(None);
        }
        let nominal = RunRequest { nominal: true, ..run.clone() };
        let mut devices = resolve_devices(&nominal)?;
        choose_nccl(&nominal, &mut devices);
        let outcome = Planner::new(&nominal, model, Charges::Stated).plan_run(&mut devices, None)?;
        Ok(Some(outcome).filter(|outcome| outcome.plan.fits).and_then(|outcome| NominalPlan::of(&devices, outcome)))
    }

    fn of(devices: &[DeviceSpec], outcome: TeamOutcome) -> Option<NominalPlan> {
        let mut known = PreviousPlan::from_plan(&outcome.plan)?;
        if let ([only], true) = (&outcome.workers[..], devices.len() > 1) {
            // The plan of one device does not name it, and the run has others.
            known.team = vec![sole_worker(&devices[only.device].name, only.sequences, &outcome.plan)];
        }
        Some(NominalPlan { known, excluded: outcome.plan.excluded })
    }

    /// Copies the reasons for which devices were excluded to `plan`, if it follows this one.
    pub fn explain_excluded(&self, plan: &mut Plan) {
        if SumOrder::of_plan(plan) != SumOrder::of_previous(&self.known) {
            return;
        }
        for out in &mut plan.excluded {
            if let Some(nominal) = self.excluded.iter().find(|nominal| nominal.device_index == out.device_index) {
                let evaluator_plan = out.evaluator_plan.take();
                *out = ExcludedDevice { evaluator_plan, ..nominal.clone() };
            }
        }
    }
}

/// Returns the worker that does the whole step, as a team of one.
fn sole_worker(device: &str, sequences: u64, plan: &Plan) -> WorkerPlan {
    WorkerPlan {
        device: device.to_owned(),
        recipe: plan.recipe.clone(),
        sequences,
        layers: None,
        shard_1024ths: None,
        reason: None,
        algorithms: None,
        busy_seconds: plan.predicted.step_seconds,
        idle_seconds: 0.0,
        ladder: Vec::new(),
    }
}

/// Returns the reason why the same command may have another plan at its next start, and so other bits; `None` if it has
/// the same. `known` is the plan that the run follows: a stored one, that of a checkpoint or a nominal one. `plan` is
/// the plan of the run on `devices`.
pub(crate) fn cause_of_other_plan(
    run: &RunRequest,
    known: Option<&PreviousPlan>,
    plan: &Plan,
    devices: &[DeviceSpec],
) -> Option<String> {
    match known {
        Some(known) if SumOrder::of_previous(known) == SumOrder::of_plan(plan) => None,
        Some(_) => {
            Some("the plan to follow does not fit in the memory that is free now, so another one was made".to_owned())
        }
        None if is_pinned(run, devices) => None,
        None if !run.is_deterministic() => {
            let reason = "shares and micro-batches follow measured speeds and free memory";
            Some(format!("{reason}; run.deterministic = true fixes them"))
        }
        None if run.devices().has_remote_devices() => {
            let reason = "devices of other hosts share the work by measured speeds";
            Some(format!("{reason}; --plan with a stored plan fixes it"))
        }
        None => Some("no plan fits by the nominal figures of the devices, so it follows measured ones".to_owned()),
    }
}

/// Whether the run file leaves no choice that affects sums: one CPU or virtual device, and its micro-batch is fixed.
fn is_pinned(run: &RunRequest, devices: &[DeviceSpec]) -> bool {
    let on_cpu = |device: &DeviceSpec| matches!(device.kind, DeviceKind::Cpu | DeviceKind::Virtual);
    devices.len() == 1
        && devices.iter().all(on_cpu)
        && run.recipe.micro_batch.is_some()
        && (run.train.rungs.is_some() || run.memory.allow.is_empty())
}

/// Whether this plan of one device can be followed by a run on several devices: it must name its device.
pub(crate) fn is_plan_for(known: &PreviousPlan, devices: usize) -> bool {
    devices == 1 || !known.team.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::tests::run_request;
    use plimsoll_core::Parallelism;

    const MODEL: &str = "model.preset=smollm2-135m";

    fn chosen(devices: &str) -> PreviousPlan {
        let run = run_request(&[MODEL, "run.deterministic=true", &format!("run.devices={devices}")]);
        NominalPlan::choose(&run, &Model::open(&run).unwrap()).unwrap().unwrap().known
    }

    #[test]
    fn nominal_shares_follow_stated_paces() {
        let plan = chosen("virtual:a=6GiB@0.4,virtual:b=6GiB@0.2");
        let shares: Vec<u64> = plan.team.iter().map(|worker| worker.sequences).collect();
        assert!(shares.len() == 2 && shares[0].abs_diff(2 * shares[1]) <= 3, "{shares:?}");
        assert_eq!(plan.parallelism, Some(Parallelism::Data));
    }

    #[test]
    fn excluded_device_leaves_a_named_worker() {
        let plan = chosen("virtual:a=6GiB@0.4,virtual:b=40MiB@0.2");
        assert_eq!(plan.team.iter().map(|worker| worker.device.as_str()).collect::<Vec<_>>(), ["virtual:a"]);
        assert_eq!(plan.parallelism, None);
    }

    #[test]
    fn undetermined_run_names_its_cause() {
        let device = crate::planning::testing::device("cpu", DeviceKind::Cpu);
        let cause = |settings: &[&str]| {
            let run = run_request(&[&[MODEL, "run.devices=cpu"], settings].concat());
            let model = Model::open(&run).unwrap();
            let mut devices = [device.clone()];
            let plan = Planner::new(&run, &model, Charges::Stated).plan_run(&mut devices, None).unwrap().plan;
            cause_of_other_plan(&run, None, &plan, &devices)
        };
        assert!(cause(&[]).unwrap().contains("run.deterministic = true fixes them"));
        assert_eq!(cause(&["recipe.micro_batch=2"]), None);
    }
}
