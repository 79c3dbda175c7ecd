//! What a run file means on this machine: which model (`model`), which devices under which load lines (`devices`), and the
//! question that this puts to the planner (`question`), which `plan` asks for a training run. `example` is what there is where
//! nothing is named. Nothing is run and no weight is read.

pub(crate) mod devices;
pub(crate) mod example;
pub(crate) mod model;

pub(crate) use crate::planning::plan::plan_of_what;
pub use crate::planning::plan::{Planned, check_followed, plan};
pub(crate) use crate::planning::question::{evaluations, host, host_beside, lora, question, staging};
pub use crate::planning::question::{optimizer, team_question};
pub use devices::{Named, check_asked, devices, disturbed, named, pace};
pub(crate) use devices::{learned, rates_under_line};
pub use example::write_example;
pub use model::Model;

use crate::config::{FallbackTo, RunFile, TeamOf};
use crate::planning::plan::order;
use devices::{cpu, exchange_by_host, exchange_by_nccl};
use plimsoll_core::{DeviceKind, DeviceSpec, Failure, Fallback, Plan};
use plimsoll_plan::request::DeviceRequest;
use plimsoll_plan::search::{Answer, Question, search};
use plimsoll_program::models::decoder::Generation;
use std::sync::Arc;

/// What the planner is asked to make room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A training run, with evaluations where there is data for them, and samples where the data can be
    /// read as text.
    Train,
    /// An evaluation alone.
    Evaluate,
    /// Tokens from a prompt.
    Generate(Generation),
}

/// All that the planner's question borrows from.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The model: devices that load it share it.
    pub model: Arc<Model>,
    /// The device. Its charges are assumed until model and data are open.
    pub device: DeviceSpec,
    /// Further devices that were asked for, or could be.
    pub others: Vec<DeviceSpec>,
    /// Whether the user has left it to us which of them is used.
    pub open: bool,
    /// The device that was asked for, where the processor stands in for it.
    pub fallback: Option<Fallback>,
}

impl Resolved {
    /// Looks at the devices that the run file names for its model.
    ///
    /// # Errors
    /// What the user has to change.
    pub fn new(file: &RunFile, model: Model) -> Result<Resolved, Failure> {
        model.takes(file)?;
        let mut devices = devices(file)?;
        exchange_by_nccl(file, &mut devices);
        let others = devices.split_off(1);
        let open =
            !file.devices().devices.iter().any(|asked| !matches!(asked, DeviceRequest::Cuda { index: None, .. }));
        Ok(Resolved { model: Arc::new(model), device: devices.remove(0), others, open, fallback: None })
    }

    /// The same, with the device that a run is to use: where it is left to us, the one that the planner prefers.
    ///
    /// # Errors
    /// As [`Resolved::new`]; several devices, or one that can only be planned for.
    pub fn to_run(file: &RunFile, model: Model, work: Work) -> Result<Resolved, Failure> {
        let mut resolved = Resolved::new(file, model)?;
        resolved.only_here()?;
        if work != Work::Train && !resolved.others.is_empty() {
            // What is done once is done by one device.
            exchange_by_host(std::iter::once(&mut resolved.device).chain(&mut resolved.others));
            resolved.prefer(file, work)?;
            resolved.others.clear();
        }
        Ok(resolved)
    }

    /// Plans for every device and takes the fastest that fits; where none does, the one that lacks the least. The
    /// others are left out.
    fn prefer(&mut self, file: &RunFile, work: Work) -> Result<Answer, Failure> {
        let mut answer = search(&self.question(file, work)?);
        for number in 0..self.others.len() {
            let other = search(&question(file, &self.model, &self.others[number], work)?);
            if order(&other.plan).total_cmp(&order(&answer.plan)).is_lt() {
                answer = other;
                std::mem::swap(&mut self.device, &mut self.others[number]);
            }
        }
        Ok(answer)
    }

    /// The answer, or where it does not fit, that of the last rung, see [`Resolved::on_cpu`].
    ///
    /// # Errors
    /// As planning.
    pub(crate) fn or_on_cpu(
        &mut self,
        file: &RunFile,
        answer: Answer,
        plan: impl FnOnce(&mut Resolved, &RunFile) -> Result<Answer, Failure>,
    ) -> Result<Answer, Failure> {
        if answer.plan.fits {
            return Ok(answer);
        }
        Ok(self.on_cpu(file, &answer.plan, plan)?.unwrap_or(answer))
    }

    /// The last rung, where a plan does not fit: the processor does the work of accelerators that cannot hold it, if that fits
    /// under the host's load line. `plan` plans for the device that there then is; its charges may be settled there. What
    /// belongs to the experiment stays what it would have been. A processor that is named itself, for so much, does no more than
    /// that; it takes no work of other machines' devices, and none of a team that nobody may be left out of.
    ///
    /// # Errors
    /// As planning.
    pub(crate) fn on_cpu(
        &mut self,
        file: &RunFile,
        refused: &Plan,
        plan: impl FnOnce(&mut Resolved, &RunFile) -> Result<Answer, Failure>,
    ) -> Result<Option<Answer>, Failure> {
        let accelerator = matches!(self.device.kind, DeviceKind::Cuda | DeviceKind::Virtual);
        let asked = file.devices();
        let has_cpu = asked.devices.iter().any(|asked| matches!(asked, DeviceRequest::Cpu { .. }));
        let several = refused.team.len() > 1 || !self.others.is_empty();
        let bound = has_cpu || asked.elsewhere() || several && file.run.team == TeamOf::All;
        if !accelerator || bound || file.run.fallback == FallbackTo::None {
            return Ok(None);
        }
        let mut decided = file.clone();
        decided.decide_precision(self.device.kind);
        let left = std::mem::replace(&mut self.device, cpu(file, Some(file.host()))?);
        let mut on_cpu = plan(self, &decided)?;
        if !on_cpu.plan.fits {
            self.device = left;
            return Ok(None);
        }
        self.others.clear();
        let lacks = &refused.devices[0];
        let (device, budget_bytes, needs_bytes) = (lacks.name.clone(), lacks.budget_bytes, lacks.peak_bytes);
        let fallback = Fallback { device, budget_bytes, needs_bytes };
        on_cpu.plan.fallback = Some(fallback.clone());
        self.fallback = Some(fallback);
        Ok(Some(on_cpu))
    }

    /// That the devices are here.
    ///
    /// # Errors
    /// One that can only be planned for.
    fn only_here(&self) -> Result<(), Failure> {
        if self.device.kind != DeviceKind::Paper {
            return Ok(());
        }
        let message = format!("run.devices: `{}` is a device on paper: nothing runs on it", self.device.name);
        Err(Failure::input(message).hint("plan for it with `plimsoll plan`, or run on `cpu`"))
    }

    /// What to ask the planner.
    ///
    /// # Errors
    /// Pins that do not go with the model.
    pub fn question(&self, file: &RunFile, work: Work) -> Result<Question<'_>, Failure> {
        question(file, &self.model, &self.device, work)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn file(settings: &[&str]) -> RunFile {
        let settings: Vec<String> = settings.iter().map(|setting| (*setting).to_owned()).collect();
        RunFile::parse("run.toml", "", &settings).unwrap()
    }

    pub(crate) fn refusal(settings: &[&str]) -> String {
        let file = file(settings);
        let refused = Model::open(&file)
            .and_then(|model| Resolved::new(&file, model))
            .and_then(|resolved| resolved.question(&file, Work::Train).map(|_| ()));
        let failure = refused.expect_err("this is refused");
        assert_eq!(failure.exit as i32, 2);
        failure.to_string()
    }

    #[test]
    fn what_this_version_cannot_do_is_named() {
        let model = "model.preset=smollm2-135m";
        assert_eq!(
            refusal(&["model.preset=smolm2-135m", "run.devices=rtx3090"]),
            "model.preset: `smolm2-135m` is no known shape\n  hint: did you mean `smollm2-135m`?"
        );
        assert!(
            refusal(&[model, "data.sequence=1048576", "run.devices=rtx3090"])
                .starts_with("data.sequence is 1048576, but smollm2-135m takes no more than ")
        );
        assert!(
            refusal(&[model, "run.devices=rtx3090", "recipe.recompute=[\"block\", \"norms\"]"])
                .starts_with("recipe.recompute names 2 layers, the model has 30\n")
        );
    }

    #[test]
    fn devices_on_paper_are_planned_for_and_not_run_on() {
        let file = file(&["model.preset=smollm2-135m", "run.devices=rtx3070,rtx3090"]);
        let failure = Resolved::to_run(&file, Model::open(&file).unwrap(), Work::Train).unwrap_err();
        assert_eq!(
            failure.to_string(),
            "run.devices: `rtx3070` is a device on paper: nothing runs on it\n  hint: plan for it with `plimsoll plan`, or run on `cpu`"
        );
    }
}
