//! Opening the devices of a plan: which executor runs what a [`DeviceSpec`] describes, and what becomes of a plan where a
//! device turns out to be otherwise.

use super::engine::Engine;
use super::events::EventLog;
use super::heartbeat::Hangs;
use super::prepare::{Part, Planned, rounded};
use super::retreat::{Line, charged_programs};
use super::team::{Team, Worker};
use super::trouble::Trouble;
use crate::resolve::Resolved;
use crate::run_file::RunFile;
use plimsoll_core::{Algorithms, Budget, Bytes, DType, DeviceKind, DeviceSpec, Event, Failure, HostSpec, Link, Plan};
use plimsoll_device::cpu::executor;
use plimsoll_device::cuda;
use plimsoll_device::cuda::open::{OnGpu, Wish};
use plimsoll_device::device::{Device, DeviceError};
use plimsoll_device::probe::Memory;
use plimsoll_device::virtual_device::{self, Virtual};
use plimsoll_plan::price::Prices;
use plimsoll_plan::search::{Answer, plan_of, search};
use plimsoll_plan::team::evaluating;
use plimsoll_program::{Op, Placement, ProgramSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Opens a device with the Programs of a plan; of a GPU comes what is seen of it beside them. `algorithms` are those that
/// the run's products had before, `scratch` is the folder of the scratch file, where there may be one.
///
/// # Errors
/// What the machine refuses, or a device that no executor runs.
pub fn open(
    spec: &DeviceSpec,
    set: ProgramSet,
    placement: Placement,
    precision: DType,
    algorithms: Option<&Algorithms>,
    scratch: Option<&Path>,
) -> Result<(Box<dyn Device>, Option<OnGpu>), DeviceError> {
    let threads = spec.threads as usize;
    match spec.kind {
        DeviceKind::Cpu if scratch.is_none() => Ok((executor::open(set, placement, precision, threads, None)?, None)),
        DeviceKind::Cpu => Ok((virtual_device::open(processor(spec, scratch), set, placement, precision)?, None)),
        DeviceKind::Virtual => {
            let what = Virtual { scratch: scratch.map(Path::to_owned), ..virtual_of(spec, precision) };
            Ok((virtual_device::open(what, set, placement, precision)?, None))
        }
        DeviceKind::Cuda => {
            let wish = Wish { scratch, ..wish(spec, precision, algorithms) };
            let (device, gpu) = cuda::open::open_for_run(&wish, set, placement)?;
            Ok((device, Some(gpu)))
        }
        DeviceKind::Paper => Err(DeviceError::Unsupported { op: "a run", device: "a device on paper" }),
    }
}

fn wish<'a>(spec: &DeviceSpec, precision: DType, algorithms: Option<&'a Algorithms>) -> Wish<'a> {
    let index = spec.name.strip_prefix("cuda:").and_then(|index| index.parse().ok());
    Wish {
        index: index.expect("GPUs are named by the driver's numbers"),
        threads: spec.threads as usize,
        precision,
        algorithms,
        charges: spec.charges_measured.then_some(spec.charges),
        scratch: None,
    }
}

/// Measures the charges of a GPU that nobody has measured yet, with the Programs of a plan that assumes them. Whether
/// there is something new to plan with.
///
/// # Errors
/// What the machine refuses, but for memory: then what was assumed stands.
pub fn settle_gpu(spec: &mut DeviceSpec, answer: &Answer, scratch: Option<&Path>) -> Result<bool, DeviceError> {
    if spec.kind != DeviceKind::Cuda || spec.charges_measured || spec.host().is_some() {
        return Ok(false);
    }
    let wish = Wish { scratch, ..wish(spec, answer.precision, None) };
    match cuda::open::measure_charges(&wish, answer.set.clone(), answer.layout.placement.clone()) {
        Ok(charges) => {
            (spec.charges, spec.charges_measured) = (rounded(charges), true);
            Ok(true)
        }
        Err(error) if error.is_refusal() => Ok(false),
        Err(error) => Err(error),
    }
}

/// The virtual device that a spec describes: its ops take what the planner says that they take.
fn virtual_of(spec: &DeviceSpec, precision: DType) -> Virtual {
    let (rates, team_link) = (spec.rates.clone(), spec.team_link);
    let price = move |set: &ProgramSet, op: &Op| {
        Prices { rates: &rates, host: &HostSpec::NONE, precision, team_link }.op_seconds(set, op)
    };
    Virtual {
        name: spec.name.clone(),
        arena_budget: spec.arena_budget(),
        threads: spec.threads as usize,
        price: Box::new(price),
        link: spec.rates.host_link,
        scratch: None,
    }
}

/// The processor itself with queues, so that it computes while the scratch file is read and written: at no pace.
fn processor(spec: &DeviceSpec, scratch: Option<&Path>) -> Virtual {
    Virtual {
        name: spec.name.clone(),
        arena_budget: Bytes(u64::MAX),
        threads: spec.threads as usize,
        price: Box::new(|_, _| 0.0),
        link: Link { bytes_per_second: f64::INFINITY, latency_seconds: 0.0 },
        scratch: scratch.map(Path::to_owned),
    }
}

/// What a GPU holds beside the arena wavers: a plan that was made with a little less is made again.
const PLANS_MAX: u32 = 3;

/// Opens the devices of a plan.
pub(super) fn open_team(
    run: &RunFile,
    resolved: &Resolved,
    planned: Planned,
    hangs: &Hangs,
    log: &mut EventLog,
) -> Result<(Team, Plan), Failure> {
    let Planned { mut plan, mut parts, .. } = planned;
    let mut workers = Vec::new();
    for part in &mut parts {
        let worker = open_worker(run, resolved, part)?;
        if let (Some(before), Some(now)) = (&part.algorithms, &worker.plan.algorithms)
            && worker.engine.chose_anew()
        {
            let message = format!(
                "some algorithms of products were chosen anew (now: {now}; before: {before}): last bits may differ from \
                 an undisturbed run"
            );
            log.emit(Event::Warning { message })?;
        }
        workers.push(worker);
    }
    let silence = Duration::from_secs_f64(run.run.heartbeat_seconds);
    let team = Team::new(workers, run.elsewhere.clone(), silence, Arc::clone(hangs))?;
    if let [only] = team.workers() {
        let Plan { of, learned, disturbed, left_out, .. } = plan;
        plan = Plan { of, learned, disturbed, left_out, ..only.plan.clone() };
    }
    Ok((team, plan))
}

/// Opens the device of a part, with its load line.
fn open_worker(run: &RunFile, resolved: &Resolved, part: &mut Part) -> Result<Worker, Failure> {
    let made_with = made_with(run, resolved, &part.device);
    let made = || made_with.map_or_else(|| budget(run, resolved, &part.device), Budget::Amount);
    let budget = run.moved.get(&part.device.name).copied().unwrap_or_else(made);
    let (engine, plan, programs) = open_engine(run, resolved, part, false)?;
    Ok(Worker::new(part, engine, plan.clone(), Line::new(budget, made_with, &plan, programs)))
}

/// What the run file allows a device.
fn budget(run: &RunFile, resolved: &Resolved, device: &DeviceSpec) -> Budget {
    match &resolved.fallback {
        Some(_) => run.host(),
        None => run.budget_of(&device.name),
    }
}

/// Of a virtual device: as large as its user says, whatever was learned of it; of one on another host that host has said it.
pub(super) fn made_with(run: &RunFile, resolved: &Resolved, device: &DeviceSpec) -> Option<Bytes> {
    let here = device.host().is_none();
    let said = || if here { budget(run, resolved, device).of(Memory::read().free) } else { Bytes::ZERO };
    let made_with = || device.budget.max(said());
    (device.kind == DeviceKind::Virtual).then(made_with)
}

/// Opens the device of a part, one that `evaluates` alone perhaps; gives its plan, and the charges of its Programs. Where a GPU
/// turns out to hold more beside the arena than was planned with, no arena was taken yet: its part is planned once more, so
/// that the load line holds.
///
/// # Errors
/// What the machine refuses, or what does not fit any more.
pub(super) fn open_engine(
    run: &RunFile,
    resolved: &Resolved,
    part: &mut Part,
    evaluates: bool,
) -> Result<(Engine, Plan, Bytes), Trouble> {
    let (precision, sequence) = (run.arithmetic(part.device.kind), u64::from(run.data.sequence));
    let vocab = resolved.model.config.vocab;
    let made_with = made_with(run, resolved, &part.device);
    // A simulated device has the pace that its user says, whatever it is planned with by now.
    let mut all = std::iter::once(&resolved.device).chain(&resolved.others);
    let rates = all.find(|device| device.name == part.device.name).map_or(&part.device.rates, |device| &device.rates);
    let rates = rates.clone();
    let far = part.device.host().map(|_| run.elsewhere.line(&part.device.name)).transpose()?;
    let mut plans = 1;
    loop {
        let (answer, plan) = (part.answer.clone(), part.answer.plan.clone());
        let programs = charged_programs(&part.device, &answer.set);
        let algorithms = part.algorithms.as_ref();
        let spec = match made_with {
            Some(budget) => &DeviceSpec { budget, rates: rates.clone(), ..part.device.clone() },
            None => &part.device,
        };
        let opened = match &far {
            Some(line) => {
                let (line, silence) = (Arc::clone(line), Duration::from_secs_f64(run.run.heartbeat_seconds));
                Engine::open_far(line, answer, precision, spec, algorithms, silence, sequence, vocab)
            }
            None => Engine::open(answer, precision, spec, algorithms, run.scratch(), sequence, vocab),
        };
        let held = match opened {
            Ok(engine) => {
                let plan = Plan { algorithms: engine.algorithms(), ..plan };
                return Ok((engine, plan, programs));
            }
            Err(DeviceError::MoreCharges { held, .. }) if plans < PLANS_MAX => held,
            Err(error) => return Err(error.into()),
        };
        plans += 1;
        part.device.charges = rounded(held);
        let question = part.question(run, &resolved.model)?;
        let question = if evaluates { evaluating(&question) } else { question };
        let mut answer = plan_of(&question, &plan.recipe);
        if !answer.plan.fits && !evaluates {
            answer = search(&question);
        }
        if !answer.plan.fits {
            let message = format!("{} holds {held} beside the arena, more than was planned for", part.device.name);
            let least = answer.plan.needs.first().map(|need| need.budget_bytes);
            let hint = least.map(|least| format!("the least that would do: --budget {}", Budget::Amount(least)));
            return Err(hint.into_iter().fold(Failure::does_not_fit(message), Failure::hint).into());
        }
        part.answer = answer;
    }
}
