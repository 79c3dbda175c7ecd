//! Plans many models on the same devices, on all cores, within a time limit.

use super::candidates::{Candidate, Candidates};
use crate::command_line::shell_quoted;
use plimsoll_core::{DType, DeviceKind, DeviceSpec, Failure, Plan, Rung};
use plimsoll_train::config::{FallbackTarget, RunConfig, list_setting};
use plimsoll_train::planning::{plan, plan_if_fits};
use plimsoll_train::resolve::{RunRequest, process_bytes, resolve_devices};
use plimsoll_watch::model_list::{Fit, ListedDevice, MODELS_VERSION, ModelList, PlannedModel};
use std::collections::{BTreeSet, VecDeque};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Longest time in which refused models are planned again to learn what they lack.
const REFUSALS_TIME: Duration = Duration::from_secs(8);

/// The plans of many models on the same devices.
pub struct Survey {
    /// Settings of the run file, without a model.
    pub settings: Vec<String>,
    /// The rungs whose methods are planned besides full training and LoRA.
    pub allow: Vec<Rung>,
    /// Time after which no plan is waited for.
    pub time: Duration,
    /// Predicted tokens per second from which on a larger model ranks before a faster one.
    pub useful_tokens_per_second: f64,
    /// Whether models that do not fit are planned again to learn what they lack.
    pub explains_refusals: bool,
}

/// A plan to be made, and the row that it fills in.
#[derive(Clone)]
struct Job {
    row: usize,
    request: RunRequest,
}

impl Survey {
    /// Plans all models with all methods, and returns them, most useful first. After each plan, calls `on_row` with its
    /// row, the number of plans made, and that of all plans.
    ///
    /// Plans that are not made in time stay unknown. The threads that make them end with the process.
    ///
    /// # Errors
    /// An invalid setting or device.
    pub fn run(
        &self,
        candidates: Candidates,
        mut on_row: impl FnMut(&PlannedModel, usize, usize),
    ) -> Result<ModelList, Failure> {
        let end = Instant::now() + self.time;
        let (mut list, jobs) = self.prepare(candidates)?;
        let (mut planned, mut failed) = (0, BTreeSet::new());
        let rows = &mut list.models;
        for_each_result(jobs.clone(), end, plan_if_fits, |row, result| {
            planned += 1;
            match result {
                Ok(Some(plan)) => rows[row].set_plan(&plan),
                Ok(None) => rows[row].fit = Fit::DoesNotFit,
                Err(failure) => {
                    failed.insert(row);
                    list.notes.push(format!("{} ({}): {}", rows[row].label, rows[row].method(), failure.message));
                }
            }
            on_row(&rows[row], planned, jobs.len());
        });
        if self.explains_refusals {
            let refused = jobs.into_iter().filter(|job| rows[job.row].fit == Fit::DoesNotFit).collect();
            let end = end.min(Instant::now() + REFUSALS_TIME);
            for_each_result(refused, end, plan_without_fallback, |row, result| match result {
                Ok(plan) if plan.fits => rows[row].set_plan(&plan),
                Ok(plan) => rows[row].set_refusal(&plan),
                Err(_) => {}
            });
        }
        let mut row = 0..;
        list.models.retain(|_| !failed.contains(&row.next().expect("numbers do not end")));
        list.sort();
        Ok(list)
    }

    /// Returns the list with a row that is not planned for each model and method, and the plans to be made.
    ///
    /// # Errors
    /// An invalid setting or device.
    fn prepare(&self, candidates: Candidates) -> Result<(ModelList, VecDeque<Job>), Failure> {
        let first = candidates.models.first().ok_or_else(|| Failure::bug("there are no presets"))?;
        let request = self.request(first, &[])?;
        // Rates that are not known yet are measured here, before all cores are busy.
        let devices = resolve_devices(&request)?;
        let kind = devices.first().map_or(DeviceKind::Cpu, |device| device.kind);
        let methods = methods(&self.allow, request.arithmetic(kind) == DType::F32);
        let mut list = ModelList {
            version: MODELS_VERSION,
            devices: devices.iter().map(listed).collect(),
            sequence: u64::from(request.data.sequence),
            batch_tokens: request.train.batch_tokens,
            useful_tokens_per_second: self.useful_tokens_per_second,
            models: vec![],
            notes: candidates.notes,
        };
        let sequence = list.sequence;
        let (models, too_short): (Vec<_>, Vec<_>) =
            candidates.models.into_iter().partition(|model| sequence <= model.max_positions);
        list.notes.extend(too_short.iter().map(|model| {
            format!("{}: takes no more than {} tokens in a sequence (--sequence)", model.label, model.max_positions)
        }));
        let (mut jobs, held) = (VecDeque::new(), process_bytes());
        // One method of all models after the other, so that late ones are those with the most loss.
        for (rungs, model) in methods.iter().flat_map(|rungs| models.iter().map(move |model| (rungs, model))) {
            let mut request = self.request(model, rungs)?;
            request.process_bytes = Some(held);
            jobs.push_back(Job { row: list.models.len(), request });
            list.models.push(self.row(model, rungs));
        }
        Ok((list, jobs))
    }

    /// Returns the settings of a run of a model with a method.
    fn settings_of(&self, model: &Candidate, rungs: &[Rung]) -> Vec<String> {
        let rungs: Vec<String> = rungs.iter().map(ToString::to_string).collect();
        let without_allow = self.settings.iter().filter(|setting| !setting.starts_with("memory.allow"));
        let all = std::iter::once(model.setting.clone()).chain(without_allow.cloned());
        all.chain([list_setting("train.rungs", &rungs)]).collect()
    }

    /// Builds the request of a run of a model with a method.
    ///
    /// # Errors
    /// An invalid setting.
    fn request(&self, model: &Candidate, rungs: &[Rung]) -> Result<RunRequest, Failure> {
        Ok(RunConfig::from_settings(&self.settings_of(model, rungs))?.into())
    }

    /// Returns the row of a model and a method that is not planned yet.
    fn row(&self, model: &Candidate, rungs: &[Rung]) -> PlannedModel {
        let [_, settings @ ..] = &self.settings_of(model, rungs)[..] else { unreachable!("the model comes first") };
        let argument = model.argument();
        let mut words = ["plimsoll", "plan", "--model", &argument].map(str::to_owned).to_vec();
        words.extend(settings.iter().flat_map(|setting| ["--set".to_owned(), setting.clone()]));
        PlannedModel {
            model: model.name.clone(),
            label: model.label.clone(),
            argument,
            has_weights: model.has_weights,
            origin: model.origin,
            parameters: model.parameters,
            rungs: rungs.to_vec(),
            fit: Fit::NotPlanned,
            tokens_per_second: None,
            simulated: false,
            peaks: vec![],
            host_bytes: None,
            parallelism: None,
            given_up: vec![],
            missing: None,
            command: shell_quoted(&words),
        }
    }
}

/// Plans a run with the remedies of a refusal, on its devices alone: a plan of the processor in place of a GPU would say
/// nothing about the GPU.
fn plan_without_fallback(request: &RunRequest) -> Result<Plan, Failure> {
    let mut request = request.clone();
    request.config.run.fallback = FallbackTarget::None;
    Ok(plan(&request, false)?.outcome.plan)
}

fn listed(device: &DeviceSpec) -> ListedDevice {
    ListedDevice { name: device.name.clone(), simulated: device.simulated(), budget_bytes: device.budget }
}

/// Returns the methods of training as lists of rungs: full training and LoRA, then those of the allowed rungs. Each comes
/// with bf16, too, if that is allowed and `computes_in_f32`.
fn methods(allow: &[Rung], computes_in_f32: bool) -> Vec<Vec<Rung>> {
    let allowed = |rung: Rung| allow.contains(&rung);
    let mut methods = vec![vec![]];
    methods.extend(allowed(Rung::Adam8bit).then(|| vec![Rung::Adam8bit]));
    methods.push(vec![Rung::Lora]);
    methods
        .extend([Rung::Int8, Rung::Nf4].into_iter().filter(|base| allowed(*base)).map(|base| vec![Rung::Lora, base]));
    if allowed(Rung::Bf16) && computes_in_f32 {
        let in_bf16 = |method: &Vec<Rung>| [&[Rung::Bf16][..], method].concat();
        let more: Vec<Vec<Rung>> = methods.iter().map(in_bf16).collect();
        methods.extend(more);
    }
    methods
}

/// Applies `work` to the requests of all jobs on all cores, and calls `on_result` on this thread with the row and the
/// result of each, in the order in which they end. Returns at `end` at the latest, and begins no job after it.
fn for_each_result<R: Send + 'static>(
    jobs: VecDeque<Job>,
    end: Instant,
    work: impl Fn(&RunRequest) -> R + Copy + Send + 'static,
    mut on_result: impl FnMut(usize, R),
) {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    let jobs = Arc::new(Mutex::new(jobs));
    let (sender, results) = channel();
    for _ in 0..threads {
        let (jobs, sender) = (Arc::clone(&jobs), sender.clone());
        let take = move || jobs.lock().ok()?.pop_front().filter(|_| Instant::now() < end);
        // Jobs of a thread that the system refuses are left to the others.
        let _ = thread::Builder::new().name("models".into()).spawn(move || {
            while let Some(job) = take() {
                if sender.send((job.row, work(&job.request))).is_err() {
                    break;
                }
            }
        });
    }
    drop(sender);
    loop {
        match results.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok((row, result)) => on_result(row, result),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allowed_rungs_add_methods() {
        assert_eq!(methods(&[], true), [vec![], vec![Rung::Lora]]);
        let four = methods(&[Rung::Nf4, Rung::Bf16], true);
        let expected = [vec![], vec![Rung::Lora], vec![Rung::Lora, Rung::Nf4]];
        assert_eq!(four[..3], expected);
        assert_eq!(four[3..], expected.map(|method| [vec![Rung::Bf16], method].concat()));
        assert_eq!(methods(&[Rung::Adam8bit, Rung::Bf16], false), [vec![], vec![Rung::Adam8bit], vec![Rung::Lora]]);
    }

    #[test]
    fn late_results_are_not_waited_for() {
        let request: RunRequest = RunConfig::from_settings(&["model.preset=smollm2-135m".to_owned()]).unwrap().into();
        let jobs: VecDeque<Job> = (0..64).map(|row| Job { row, request: request.clone() }).collect();
        let start = Instant::now();
        let mut rows = BTreeSet::new();
        let work = |_: &RunRequest| thread::sleep(Duration::from_millis(200));
        for_each_result(jobs, start + Duration::from_millis(500), work, |row, ()| rows.extend([row]));
        assert!(!rows.is_empty() && rows.len() < 64, "{rows:?}");
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}
