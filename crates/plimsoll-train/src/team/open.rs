//! Opening the devices of a plan: which executor runs what a [`DeviceSpec`] describes, what tells meanwhile whether it is
//! there, and what becomes of a plan where a device turns out to be otherwise.

use super::abreast::{Behind, Came, Hand, Task, abreast};
use super::{Team, Worker};
use crate::config::RunFile;
use crate::fault_injection::{Asked, Rehearsal};
use crate::planning::charges::{charged_programs, rounded};
use crate::planning::prepare::{Part, Planned};
use crate::recovery::LoadLine;
use crate::remote::device::Connection;
use crate::resolve::Resolved;
use crate::session::engine::Engine;
use crate::session::events::EventLog;
use crate::session::trouble::Trouble;
use crate::team::heartbeat::{Heart, Pulse, Watch, silent};
use plimsoll_core::{Algorithms, Budget, Bytes, DType, DeviceKind, DeviceSpec, Event, Failure, HostSpec, Link, Plan};
use plimsoll_device::cpu::executor;
use plimsoll_device::cuda;
use plimsoll_device::cuda::open::{OnGpu, Wish};
use plimsoll_device::device::{Device, DeviceError, NoFiles};
use plimsoll_device::probe::Memory;
use plimsoll_device::transport::{Transport, memory};
use plimsoll_device::virtual_device::{self, Virtual};
use plimsoll_plan::price::Prices;
use plimsoll_plan::search::{Answer, plan_of, search};
use plimsoll_plan::team::{evaluating, same_count};
use plimsoll_program::{Op, Placement, ProgramSet};
use std::path::Path;
use std::sync::Arc;
use std::thread;
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

/// What asks a device for a sign of life, from before it is opened on and beside all its work, however long that takes: a GPU
/// by itself, one that is far through its process, which does the same there.
pub(crate) fn signs_of_life(
    spec: &DeviceSpec,
    connection: Option<Arc<Connection>>,
) -> Arc<dyn Fn() -> bool + Send + Sync> {
    match (connection, spec.kind) {
        (Some(connection), _) => Arc::new(move || connection.answers()),
        (None, DeviceKind::Cuda) => Arc::new(cuda::open::answers(number_of(spec))),
        // The processor answers for as long as threads run.
        _ => Arc::new(|| true),
    }
}

/// The driver's number of a GPU.
fn number_of(spec: &DeviceSpec) -> u32 {
    let index = spec.name.strip_prefix("cuda:").and_then(|index| index.parse().ok());
    index.expect("GPUs are named by the driver's numbers")
}

fn wish<'a>(spec: &DeviceSpec, precision: DType, algorithms: Option<&'a Algorithms>) -> Wish<'a> {
    Wish {
        index: number_of(spec),
        threads: spec.threads as usize,
        precision,
        algorithms,
        // What NCCL holds comes later.
        charges: spec.charges_measured.then_some(spec.charges.saturating_sub(spec.nccl_bytes())),
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
            (spec.charges, spec.charges_measured) = (rounded(charges) + spec.nccl_bytes(), true);
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

/// Opens the devices of a plan; `behind` is what those before them have left, and others could take over from one that works
/// alone if it is `relieved`. Gives what all go by, which is the plan of a device alone.
///
/// # Errors
/// What the machine refuses, and who is lost.
pub(crate) fn open_team(
    run: &RunFile,
    resolved: &Resolved,
    planned: Planned,
    asked: &[Arc<Asked>],
    behind: &Behind,
    under_way: bool,
    relieved: bool,
    log: &mut EventLog,
) -> Result<(Team, Plan), Trouble> {
    let Planned { mut plan, parts, .. } = planned;
    // Who is open already is missed until it is let go, where another one fails.
    let (mut watches, mut workers) = (Vec::new(), Vec::new());
    for (rank, part) in parts.into_iter().enumerate() {
        let before = part.algorithms.clone();
        let (worker, watch) = open_worker(run, resolved, part, asked).map_err(|trouble| match trouble {
            // The others were at work until now, and can go on.
            trouble if under_way => Trouble::Lost { rank, why: trouble.what() },
            trouble => trouble.of_rank(rank),
        })?;
        watches.push(watch);
        if let (Some(before), Some(now)) = (before, &worker.plan.algorithms)
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
    drop(watches);
    let mut team = Team::new(workers, run.elsewhere.clone(), silence(run), behind.clone(), relieved)?;
    team.rehearse(asked, run.train.seed);
    if let [only] = team.workers() {
        let Plan { of, learned, disturbed, left_out, .. } = plan;
        plan = Plan { of, learned, disturbed, left_out, ..only.plan.clone() };
    }
    Ok((team, plan))
}

/// After so long without a sign of life a device is lost.
fn silence(run: &RunFile) -> Duration {
    Duration::from_secs_f64(run.run.heartbeat_seconds)
}

/// Opens the device of a part, with its load line; see [`Opened::watch`].
fn open_worker(
    run: &RunFile,
    resolved: &Resolved,
    part: Part,
    asked: &[Arc<Asked>],
) -> Result<(Worker, Option<Watch>), Trouble> {
    let made_with = made_with(run, resolved, &part.device);
    let made = || made_with.map_or_else(|| budget(run, resolved, &part.device), Budget::Amount);
    let budget = run.moved.get(&part.device.name).copied().unwrap_or_else(made);
    let Opened { part, engine, plan, programs, heart, watch } = open_part(run, resolved, part, asked, false)?;
    let line = LoadLine::new(budget, made_with, &plan, programs);
    Ok((Worker::new(&part, engine, plan, line, heart), watch))
}

/// What the run file allows a device.
fn budget(run: &RunFile, resolved: &Resolved, device: &DeviceSpec) -> Budget {
    match &resolved.fallback {
        Some(_) => run.host(),
        None => run.budget_of(&device.name),
    }
}

/// What a device was made with: a virtual one is as large as its user says, and of one on another host so much is kept for the
/// run, whatever was learned of it.
pub(crate) fn made_with(run: &RunFile, resolved: &Resolved, device: &DeviceSpec) -> Option<Bytes> {
    let here = device.host().is_none();
    let free = || if here { Memory::read().free } else { device.budget };
    let made_with = || device.budget.max(budget(run, resolved, device).of(free()));
    (device.kind == DeviceKind::Virtual || !here).then(made_with)
}

/// A device that has been opened.
pub(crate) struct Opened {
    /// What it does, as it was planned with at last.
    pub part: Part,
    /// The device with its Programs.
    pub engine: Engine,
    /// Its plan.
    pub plan: Plan,
    /// The charges of its Programs.
    pub programs: Bytes,
    /// Its signs of life, which it gives from before its opening on.
    pub heart: Option<Heart>,
    /// Who misses it, until others do.
    pub watch: Option<Watch>,
}

/// Opens the device of a part, one that `evaluates` alone perhaps, on a thread that owns it meanwhile. However long that takes,
/// it is there for as long as it gives signs of life; one that does not is left behind, with what it may have taken by then.
///
/// # Errors
/// What the machine refuses, what does not fit any more, and a device that is lost.
pub(crate) fn open_part(
    run: &RunFile,
    resolved: &Resolved,
    mut part: Part,
    asked: &[Arc<Asked>],
    evaluates: bool,
) -> Result<Opened, Trouble> {
    let (name, silence) = (part.device.name.clone(), silence(run));
    let connection = part.device.host().map(|_| run.elsewhere.connection(&name)).transpose()?;
    let signs = signs_of_life(&part.device, connection.clone());
    let heart = Heart::start(&name, silence, move || signs());
    let pulse = heart.as_ref().map(Heart::pulse);
    if let (Some(connection), Some(pulse)) = (&connection, &pulse) {
        // Who waits for its answers is let go when it is missed.
        connection.watched_by(Arc::clone(pulse));
    }
    let watched = pulse.iter().map(|pulse| (0, name.clone(), Arc::clone(pulse))).collect();
    // Who waits for it looks by itself.
    let watch = Watch::start(watched, |_, _| {}, silence);
    let (run, resolved, asked, beats) = (run.clone(), resolved.clone(), asked.to_vec(), pulse.clone());
    let task: Task<_> = Box::new(move |engine, _| {
        let plan;
        let programs;
        (*engine, plan, programs) = open_engine(&run, &resolved, &mut part, connection, &asked, beats, evaluates)?;
        Ok((part, plan, programs))
    });
    let hand = Hand { rank: 0, engine: Engine::gone(&name), pulse: pulse.clone(), task };
    let nobody_else: Arc<dyn Transport> = memory::Memory::between(1);
    let came = abreast(vec![hand], &nobody_else, &mut NoFiles).pop();
    if pulse.is_some_and(|pulse| pulse.is_lost()) {
        // One that is back by now may not come back from being closed.
        thread::spawn(move || drop(came));
        return Err(Trouble::Lost { rank: 0, why: silent(&name, silence) });
    }
    let Some((_, Came::Back(engine, opened))) = came else { unreachable!("who is not missed is waited for") };
    let (part, plan, programs) = opened?;
    Ok(Opened { part, engine: *engine, plan, programs, heart, watch })
}

/// Opens the device of a part; gives its plan, and the charges of its Programs. Where a GPU turns out to hold more beside the
/// arena than was planned with, no arena was taken yet: its part is planned once more, so that the load line holds.
fn open_engine(
    run: &RunFile,
    resolved: &Resolved,
    part: &mut Part,
    far: Option<Arc<Connection>>,
    asked: &[Arc<Asked>],
    pulse: Option<Arc<Pulse>>,
    evaluates: bool,
) -> Result<(Engine, Plan, Bytes), Trouble> {
    Rehearsal::opening(asked, &part.device.name, pulse)?;
    let (precision, sequence) = (run.arithmetic(part.device.kind), u64::from(run.data.sequence));
    let vocab = resolved.model.config.vocab;
    let made_with = made_with(run, resolved, &part.device);
    // A simulated device has the pace that its user says, whatever it is planned with by now.
    let mut all = std::iter::once(&resolved.device).chain(&resolved.others);
    let rates = all.find(|device| device.name == part.device.name).map_or(&part.device.rates, |device| &device.rates);
    let rates = rates.clone();
    let mut plans = 1;
    loop {
        let (answer, plan) = (part.answer.clone(), part.answer.plan.clone());
        let programs = charged_programs(&part.device, &answer.set);
        let algorithms = part.algorithms.as_ref();
        let played = made_with.filter(|_| part.device.simulated());
        let played = played.map(|budget| DeviceSpec { budget, rates: rates.clone(), ..part.device.clone() });
        let spec = played.as_ref().unwrap_or(&part.device);
        let opened = match &far {
            Some(connection) => {
                let connection = Arc::clone(connection);
                Engine::open_far(connection, answer, precision, spec, algorithms, silence(run), sequence, vocab)
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
        part.device.charges = rounded(held) + part.device.nccl_bytes();
        let question = part.question(run, &resolved.model)?;
        let question = if evaluates { evaluating(&question) } else { question };
        let mut answer = plan_of(&question, &plan.recipe);
        if !answer.plan.fits && !evaluates {
            // The others go on in the same number of micro-batches.
            answer = search(&same_count(question, &plan.recipe));
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
