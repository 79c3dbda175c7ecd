//! More memory never makes a plan worse. A question is a random model on a random team of paper and virtual devices. It
//! is planned under many budgets of one device, of all devices, of one host or of the scratch file. As this budget
//! grows, a plan that fits never becomes a refusal, and a step never becomes slower.
//!
//! Refusals name remedies. Each fits, and a budget 1 % below it does not. The program itself runs the commands of
//! refusals on virtual devices as they are printed.

use super::case::Rng;
use super::runs::{RandomRun, small_model};
use super::tally::Tally;
use super::whole_process::ModelSizes;
use anyhow::{Context, ensure};
use plimsoll_core::{
    Budget, Bytes, DType, DeviceKind, DeviceSpec, Exit, FileSpec, HostSpec, Link, OpRates, Plan, Rates, Remedy, Rung,
};
use plimsoll_plan::paper;
use plimsoll_plan::search::{LossyOptions, PinnedChoices, PlanRequest};
use plimsoll_plan::team::{
    Measurements, PlannedWorker, TeamOutcome, TeamRequest, plan_measured_team_if_fits, plan_team, plan_team_if_fits,
};
use plimsoll_program::Share;
use plimsoll_program::models::decoder::{AdamState, Base, Method, Optimizer, Scores, WeightSource};
use plimsoll_program::models::{ModelConfig, preset};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

/// Number of budgets under which each question is planned.
const BUDGETS: usize = 20;
/// Number of the budgets that are spaced evenly on a logarithmic scale. The others are around the edges of plans.
const SPACED_BUDGETS: usize = 8;
/// Largest part by which more memory may make a step slower.
const MAX_SLOWDOWN: f64 = 0.005;
/// Remedies are the least that is enough within this fraction, and within [`REMEDY_BYTES`].
const REMEDY_FRACTION: f64 = 0.01;
/// Remedies are rounded up to whole MiB, and some leave room for the memory of a process.
const REMEDY_BYTES: Bytes = Bytes::mib(2);
/// Most refusals of a question of which the remedies are checked.
const MAX_REFUSALS: usize = 1;
/// One question in this many is also asked of the program, with virtual devices.
const PROGRAM_EVERY: u64 = 4;
/// Most times that the devices of a run are halved until it is refused.
const MAX_HALVINGS: u32 = 4;

/// A budget that a question raises.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Raised {
    /// The load line of one device.
    Device(usize),
    /// The load lines of all devices, which are equal.
    AllDevices,
    /// The host of one machine.
    Host(usize),
    /// The scratch file.
    File,
}

/// The budgets of a team.
#[derive(Clone, Debug)]
struct Budgets {
    devices: Vec<Bytes>,
    /// The host of each machine.
    hosts: Vec<Bytes>,
    file: Bytes,
}

impl Budgets {
    /// Returns these budgets, in which those that `raised` names are set to `bytes`.
    fn with(&self, raised: Raised, bytes: Bytes) -> Budgets {
        let mut budgets = self.clone();
        match raised {
            Raised::Device(device) => budgets.devices[device] = bytes,
            Raised::AllDevices => budgets.devices.fill(bytes),
            Raised::Host(machine) => budgets.hosts[machine] = bytes,
            Raised::File => budgets.file = bytes,
        }
        budgets
    }
}

/// A random model on a random team.
#[derive(Clone)]
struct RandomTeam {
    label: String,
    config: ModelConfig,
    precision: DType,
    sequence: u64,
    sequences: u64,
    lossy: LossyOptions,
    devices: Vec<DeviceSpec>,
    /// The machine of each device.
    machines: Vec<usize>,
    require_all: bool,
    budgets: Budgets,
    raised: Raised,
    /// The least and the most bytes of the raised budget.
    range: [Bytes; 2],
    measurements: Arc<Measurements>,
}

/// The answer to a question under some budgets.
#[derive(Clone, Debug)]
struct BudgetPlan {
    fits: bool,
    step_seconds: f64,
    rungs: Vec<Rung>,
    /// Bytes of the raised budget that the plan uses; zero for a refusal.
    used: Bytes,
    summary: String,
}

/// Returns a random model: a preset, mostly with fewer layers, so that planning takes less time. If `small`, it has two to
/// four layers.
fn random_model(rng: &mut Rng, small: bool) -> (String, ModelConfig) {
    let large = rng.chance(0.12) && !small;
    let names: &[&str] = match large {
        true => &["smollm2-135m", "smollm2-360m", "llama-3.2-1b", "llama-3.2-3b", "qwen2.5-0.5b"],
        false => &["smollm2-135m", "smollm2-360m", "llama-3.2-1b", "llama-3.1-8b", "llama-2-13b", "qwen2.5-1.5b"],
    };
    let name = rng.pick(names);
    let config = preset(name).expect("listed");
    let layers = if large { config.layers } else { rng.range(2, if small { 4 } else { 9 }) };
    (format!("{name} with {layers} layers"), ModelConfig { layers, ..config })
}

/// Returns the kind of a random device: a paper device of the table, or a virtual one.
fn random_kind(rng: &mut Rng) -> DeviceSpec {
    let cards = ["rtx3070", "rtx3090", "rtx4090", "rtx5090", "rtx4060ti-16g", "a100-40g", "h100-sxm"];
    if rng.chance(0.75) {
        return paper::paper(rng.pick(&cards), Budget::DEVICE).expect("listed");
    }
    let core = Rates {
        f32_flops: 100e9,
        bf16_flops: 200e9,
        memory_bytes_per_second: 20e9,
        op_seconds: 2e-6,
        host_link: Link { bytes_per_second: rng.pick(&[1e9, 4e9, 16e9]), latency_seconds: 1e-5 },
        measured: false,
        ops: OpRates::default(),
    };
    DeviceSpec {
        name: "virtual:a".into(),
        kind: DeviceKind::Virtual,
        budget: Bytes::ZERO,
        charges: Bytes::mib(rng.range(8, 64)),
        charges_measured: false,
        link_measured: false,
        nccl: None,
        threads: 1,
        rates: core.paced(rng.pick(&[1.0, 0.5, 0.1])),
        team_link: Link { bytes_per_second: rng.pick(&[125e6, 1e9, 16e9]), latency_seconds: 1e-5 },
    }
}

/// Returns random devices with their machines: 1 to 16 of one to three kinds, on one to three machines. If `small`, there
/// are at most four devices.
fn random_devices(rng: &mut Rng, small: bool) -> (Vec<DeviceSpec>, Vec<usize>) {
    let counts: &[u64] = if small { &[1, 1, 2, 2, 3, 4] } else { &[1, 1, 2, 2, 2, 3, 4, 4, 8, 16] };
    let count = rng.pick(counts);
    let machine_count = if rng.chance(0.7) { 1 } else { rng.range(1, count.min(3)) };
    let kinds: Vec<DeviceSpec> = (0..rng.pick(&[1, 1, 2, 3])).map(|_| random_kind(rng)).collect();
    let wire = rng.pick(&[paper::ethernet(1.0), paper::ethernet(10.0), paper::ethernet(100.0)]);
    let machines: Vec<usize> = (0..count).map(|device| (device * machine_count / count) as usize).collect();
    let machine_of = |machine: usize| (machine_count > 1).then_some(machine);
    let devices = (0..machines.len()).map(|n| named_device(rng.pick(&kinds), n, machine_of(machines[n]), wire));
    let devices = devices.collect();
    (devices, machines)
}

/// Names a device of a kind by its number. With `machine`, the device is on one of several, behind the link `wire`.
fn named_device(kind: DeviceSpec, number: usize, machine: Option<usize>, wire: Link) -> DeviceSpec {
    let name = if kind.kind == DeviceKind::Virtual { format!("virtual:d{number}") } else { kind.name.clone() };
    let Some(machine) = machine else { return DeviceSpec { name, ..kind } };
    let is_slower = wire.bytes_per_second < kind.team_link.bytes_per_second;
    let team_link = if is_slower { wire } else { kind.team_link };
    DeviceSpec { name: format!("pc{machine}/{name}"), team_link, ..kind }
}

/// Returns random adapters or full training, and the storage of frozen matrices.
fn random_method(rng: &mut Rng) -> LossyOptions {
    let lossy = LossyOptions { offer: Rung::ALL.to_vec(), ..LossyOptions::default() };
    let allow = if rng.chance(0.15) { vec![rng.pick(&[Rung::Adam8bit, Rung::Lora, Rung::Nf4])] } else { vec![] };
    match rng.range(0, 3) {
        0 => {
            let base = rng.pick(&[Base::Plain, Base::Int8, Base::Nf4]);
            LossyOptions { method: Method::Lora(lossy.lora.clone()), base, ..lossy }
        }
        _ => LossyOptions { allow, ..lossy },
    }
}

impl RandomTeam {
    fn new(seed: u64, number: u64, small: bool) -> RandomTeam {
        let mut rng = Rng::new(seed ^ 17, number);
        let (model, config) = random_model(&mut rng, small);
        let (devices, machines) = random_devices(&mut rng, small);
        let lossy = random_method(&mut rng);
        let precision = rng.pick(&[DType::F32, DType::Bf16, DType::Bf16]);
        let (sequence, sequences) = (rng.pick(&[128, 256, 512, 1024]), rng.pick(&[4, 6, 8, 16, 32, 64]));
        let require_all = devices.len() > 1 && rng.chance(0.15);
        let machine_count = machines.last().map_or(1, |last| last + 1);
        let raised = match rng.range(0, 9) {
            0..=4 => Raised::Host(rng.range(0, machine_count as u64 - 1) as usize),
            5 if devices.len() == 1 => Raised::File,
            5..=7 => Raised::Device(rng.range(0, devices.len() as u64 - 1) as usize),
            _ => Raised::AllDevices,
        };
        let file = Bytes::ZERO;
        let budgets =
            Budgets { devices: vec![Bytes::ZERO; devices.len()], hosts: vec![Bytes::ZERO; machine_count], file };
        let mut question = RandomTeam {
            label: String::new(),
            config,
            precision,
            sequence,
            sequences,
            lossy,
            devices,
            machines,
            require_all,
            budgets,
            raised,
            range: [Bytes::ZERO; 2],
            measurements: Arc::default(),
        };
        question.draw_budgets(&mut rng);
        let names: Vec<&str> = question.devices.iter().map(|device| &*device.name).collect();
        let allow: Vec<String> = question.lossy.allow.iter().map(Rung::to_string).collect();
        let method = if matches!(question.lossy.method, Method::Lora(_)) { "lora" } else { "full" };
        question.label = format!(
            "--seed {seed} --case {number}{}: {model}, {precision}, {method} {:?}, allow [{}], {sequences} × {sequence}{} on {}, {:?} of {:?}",
            if small { " --small" } else { "" },
            question.lossy.base,
            allow.join(","),
            if require_all { ", all" } else { "" },
            names.join(","),
            question.raised,
            question.budgets,
        );
        question
    }

    /// Draws the budgets in relation to the bytes of the model's state.
    fn draw_budgets(&mut self, rng: &mut Rng) {
        let parameters = self.config.parameters() as f64;
        let frozen = match self.lossy.base {
            Base::Plain => 2.0,
            Base::Int8 => 1.0,
            Base::Nf4 => 0.6,
        };
        let state = match self.lossy.method {
            Method::Full => 18.0 * parameters,
            Method::Lora(_) => frozen * parameters,
        };
        let charges = self.devices.iter().map(|device| device.charges.0).max().unwrap_or(0) as f64;
        let count = self.devices.len() as f64;
        let line = |part: f64| Bytes((charges + state * part) as u64);
        let bytes = |part: f64| Bytes((state * part) as u64);
        let alike = rng.chance(0.6);
        let own = |rng: &mut Rng| 2f64.powf(-3.5 + 4.0 * rng.fraction()) / count.sqrt();
        let first = own(rng);
        for device in 0..self.devices.len() {
            self.budgets.devices[device] = line(if alike { first } else { own(rng) });
        }
        for machine in 0..self.budgets.hosts.len() {
            self.budgets.hosts[machine] = rng.pick(&[Bytes::ZERO, bytes(0.3), bytes(1.0), bytes(2.5)]);
        }
        self.range = match self.raised {
            Raised::Host(_) | Raised::File => [bytes(0.02), bytes(4.0)],
            Raised::Device(_) | Raised::AllDevices => [line(0.02), line(2.0)],
        };
    }

    /// Plans the question under `budgets`, with `allow` as the allowed rungs.
    fn with_team<T>(&self, budgets: &Budgets, allow: &[Rung], then: impl FnOnce(&TeamRequest) -> T) -> T {
        let with_line = |(device, &budget)| DeviceSpec { budget, ..DeviceSpec::clone(device) };
        let devices: Vec<DeviceSpec> = self.devices.iter().zip(&budgets.devices).map(with_line).collect();
        let file = match devices.len() {
            1 => FileSpec { budget: budgets.file, available: Bytes::gib(1 << 12), ..FileSpec::NONE },
            _ => FileSpec::NONE,
        };
        let file = if self.raised == Raised::File { file } else { FileSpec::NONE };
        let host = |machine: usize| HostSpec { budget: budgets.hosts[machine], memory_bytes_per_second: 30e9, file };
        let request = |(device, &machine)| self.request(device, host(machine), allow);
        then(&TeamRequest {
            devices: devices.iter().zip(&self.machines).map(request).collect(),
            host: budgets.hosts.iter().copied().sum(),
            require_all: self.require_all,
            constraint: None,
            evaluations: None,
        })
    }

    /// Returns the request to plan the whole step on one device.
    fn request<'a>(&'a self, device: &'a DeviceSpec, host: HostSpec, allow: &[Rung]) -> PlanRequest<'a> {
        PlanRequest {
            config: &self.config,
            precision: self.precision,
            sequence: self.sequence,
            sequences: self.sequences,
            source: WeightSource::Random { seed: 1 },
            optimizer: Some(Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state: AdamState::Full }),
            evaluate: false,
            scores: Scores::None,
            temperature: 1.0,
            generation: None,
            device,
            host,
            lossy: LossyOptions { allow: allow.to_vec(), ..self.lossy.clone() },
            pins: PinnedChoices::default(),
            rungs: vec![],
            share: Share::SINGLE_DEVICE,
        }
    }

    /// Plans the question with the raised budget at `bytes`.
    fn plan_with(&self, bytes: Bytes) -> BudgetPlan {
        let budgets = self.budgets.with(self.raised, bytes);
        self.with_team(&budgets, &self.lossy.allow, |team| {
            self.to_budget_plan(plan_measured_team_if_fits(team, &self.measurements))
        })
    }

    fn to_budget_plan(&self, outcome: Option<TeamOutcome>) -> BudgetPlan {
        let Some(outcome) = outcome else {
            let (used, summary) = (Bytes::ZERO, "refused".to_owned());
            return BudgetPlan { fits: false, step_seconds: f64::INFINITY, rungs: vec![], used, summary };
        };
        let plan = &outcome.plan;
        let is_beside = |machine: usize, worker: &&PlannedWorker| self.machines[worker.device] == machine;
        let host = |machine: usize| {
            let beside = outcome.workers.iter().filter(|worker| is_beside(machine, worker));
            beside.map(|worker| worker.outcome.plan.host.arena_bytes).sum()
        };
        let used = match self.raised {
            Raised::Device(_) | Raised::AllDevices => plan.devices.iter().map(|device| device.peak_bytes).max(),
            Raised::Host(machine) => Some(host(machine)),
            Raised::File => plan.file.as_ref().map(|file| file.arena_bytes),
        };
        let recipes: Vec<String> = match plan.team.is_empty() {
            true => vec![plan.recipe.to_string()],
            false => {
                let worker = |worker: &plimsoll_core::WorkerPlan| {
                    let part = worker.shard_1024ths.map_or(String::new(), |shard| format!(" of {shard}/1024"));
                    format!("{}{part} {}", worker.sequences, worker.recipe)
                };
                plan.team.iter().map(worker).collect()
            }
        };
        let parallelism = plan.parallelism.map_or("alone".to_owned(), |kind| format!("{kind:?}"));
        BudgetPlan {
            fits: plan.fits,
            step_seconds: plan.predicted.step_seconds,
            rungs: plan.rungs.clone(),
            used: used.unwrap_or_default(),
            summary: format!("{parallelism} [{}]", recipes.join("; ")),
        }
    }

    /// Returns whether the question fits under these budgets.
    fn fits(&self, budgets: &Budgets, allow: &[Rung]) -> bool {
        self.with_team(budgets, allow, |team| plan_measured_team_if_fits(team, &self.measurements).is_some())
    }

    /// Returns the budgets under a remedy of the refused `plan`; with `less`, slightly smaller ones. `None` if the remedy
    /// raises no budget that could be smaller.
    fn under_remedy(&self, plan: &Plan, remedy: &Remedy, less: bool) -> Option<Budgets> {
        let present = &self.budgets;
        let mut budgets = present.clone();
        let lower = |bytes: Bytes| match less {
            true => bytes.saturating_sub(REMEDY_BYTES.max(Bytes((bytes.0 as f64 * REMEDY_FRACTION) as u64))),
            false => bytes,
        };
        let mut is_raised = false;
        let name = &plan.devices.first()?.name;
        let named = |name: &str| {
            let numbers = 0..self.devices.len();
            numbers.filter(|&number| self.devices[number].name == name).collect::<Vec<_>>()
        };
        if remedy.budget_bytes > plan.devices[0].budget_bytes {
            // Of several devices with the name, the largest gets the new load line.
            let device = named(name).into_iter().rev().max_by_key(|&device| present.devices[device])?;
            is_raised |= lower(remedy.budget_bytes) > present.devices[device];
            budgets.devices[device] = present.devices[device].max(lower(remedy.budget_bytes));
        }
        for (name, &bytes) in &remedy.other_budget_bytes {
            for device in named(name).into_iter().filter(|&device| present.devices[device] < bytes) {
                is_raised |= lower(bytes) > present.devices[device];
                budgets.devices[device] = present.devices[device].max(lower(bytes));
            }
        }
        if let Some(bytes) = remedy.host_bytes {
            let machine = self.machines[named(name)[0]];
            is_raised |= lower(bytes) > present.hosts[machine];
            budgets.hosts[machine] = present.hosts[machine].max(lower(bytes));
        }
        if let Some(bytes) = remedy.file_bytes {
            is_raised |= lower(bytes) > present.file;
            budgets.file = present.file.max(lower(bytes));
        }
        (is_raised || !less).then_some(budgets)
    }
}

/// Plans a question of the soak, by its seed and number, under many budgets and makes all checks. One question in
/// [`PROGRAM_EVERY`] is also asked of the program. With `small`, team and model are small.
pub fn run_question(binary: &Path, (seed, number): (u64, u64), small: bool) -> Tally {
    let mut tally = Tally::default();
    let question = RandomTeam::new(seed, number, small);
    tally.cover("questions");
    tally.cover(&format!("{} devices", question.devices.len()));
    let answers = ask(&question);
    check_answers(&question, &answers, &mut tally);
    check_fresh_plan(&question, &answers, &mut tally);
    let refused = answers.iter().rev().filter(|(_, answer)| !answer.fits).map(|(bytes, _)| *bytes);
    for bytes in refused.take(MAX_REFUSALS) {
        check_remedies(&question, bytes, &mut tally);
    }
    if number.is_multiple_of(PROGRAM_EVERY) {
        let result = check_program(binary, seed, number, &mut tally);
        tally.check("the program plans or refuses", result.is_ok(), || {
            format!("--seed {seed} --case {number}: {:#}", result.unwrap_err())
        });
    }
    tally
}

/// Plans a question under [`BUDGETS`] budgets: evenly spaced ones, and those around the bytes that plans use and around
/// the edge between refusals and plans.
fn ask(question: &RandomTeam) -> BTreeMap<Bytes, BudgetPlan> {
    let [least, most] = question.range.map(|bytes| bytes.0 as f64);
    let mut answers = BTreeMap::new();
    for number in 0..SPACED_BUDGETS {
        let bytes = Bytes((least * (most / least).powf(number as f64 / (SPACED_BUDGETS - 1) as f64)) as u64);
        answers.insert(bytes, question.plan_with(bytes));
    }
    while answers.len() < BUDGETS {
        let Some(next) = next_budget(&answers) else { break };
        answers.insert(next, question.plan_with(next));
    }
    answers
}

/// Returns a budget that has not been tried: in turn near the bytes that a plan uses, in the middle of the edge, and
/// between two plans.
fn next_budget(answers: &BTreeMap<Bytes, BudgetPlan>) -> Option<Bytes> {
    let is_new = |bytes: &Bytes| *bytes > Bytes::ZERO && !answers.contains_key(bytes);
    let used = answers.values().filter(|answer| answer.fits).map(|answer| answer.used);
    let near = |used: Bytes| [used, Bytes(used.0 + (1 << 20)), used.saturating_sub(Bytes(1)), Bytes(used.0 * 51 / 50)];
    let near_plans: Vec<Bytes> = used.flat_map(near).filter(is_new).collect();
    let pairs = || answers.iter().zip(answers.iter().skip(1));
    let edge = pairs().find(|((_, low), (_, high))| !low.fits && high.fits);
    let edge = edge.map(|((low, _), (high, _))| Bytes(low.0.midpoint(high.0))).filter(is_new);
    let gap = pairs().filter(|((_, low), (_, high))| low.fits && high.fits);
    let gap = gap.max_by(|a, b| (a.1.0.0 as f64 / a.0.0.0 as f64).total_cmp(&(b.1.0.0 as f64 / b.0.0.0 as f64)));
    let gap = gap.map(|((low, _), (high, _))| Bytes(low.0.midpoint(high.0))).filter(is_new);
    let near_plan = near_plans.get(answers.len() * 7 % near_plans.len().max(1)).copied();
    match answers.len() % 4 {
        0 => edge.or(near_plan).or(gap),
        3 => gap.or(near_plan).or(edge),
        _ => near_plan.or(edge).or(gap),
    }
}

/// Checks that answers get no worse as the budget grows.
fn check_answers(question: &RandomTeam, answers: &BTreeMap<Bytes, BudgetPlan>, tally: &mut Tally) {
    let mut before: Vec<(Bytes, &BudgetPlan)> = Vec::new();
    for (&bytes, answer) in answers {
        tally.cover(if answer.fits { "budgets that fit" } else { "budgets refused" });
        let fitting = before.iter().find(|(_, other)| other.fits);
        tally.check("more memory never refuses", answer.fits || fitting.is_none(), || {
            let (less, other) = fitting.expect("there is one");
            format!("{}: refused with {}, with {} {}", question.label, exact(bytes), exact(*less), other.summary)
        });
        let comparable = before.iter().filter(|(_, other)| other.fits && answer.fits && other.rungs == answer.rungs);
        let fastest = comparable.min_by(|a, b| a.1.step_seconds.total_cmp(&b.1.step_seconds));
        if let Some((less, other)) = fastest {
            let slowdown = (answer.step_seconds / other.step_seconds - 1.0).max(0.0);
            // A difference of rounding counts as none.
            let slowdown = if slowdown < 1e-9 { 0.0 } else { slowdown };
            tally.figure("more memory never slows a step, part", slowdown, slowdown <= MAX_SLOWDOWN, || {
                format!(
                    "{}: with {} {} s, {}; with {} {} s, {}",
                    question.label,
                    exact(bytes),
                    answer.step_seconds,
                    answer.summary,
                    exact(*less),
                    other.step_seconds,
                    other.summary
                )
            });
        }
        before.push((bytes, answer));
    }
}

/// Checks that the measurements of other plans do not change a plan: one budget is planned without them.
fn check_fresh_plan(question: &RandomTeam, answers: &BTreeMap<Bytes, BudgetPlan>, tally: &mut Tally) {
    let Some((&bytes, answer)) = answers.iter().filter(|(_, answer)| answer.fits).nth(answers.len() / 4) else {
        return;
    };
    let budgets = question.budgets.with(question.raised, bytes);
    let fresh =
        question.with_team(&budgets, &question.lossy.allow, |team| question.to_budget_plan(plan_team_if_fits(team)));
    let distance = (fresh.step_seconds / answer.step_seconds - 1.0).abs();
    tally.figure("earlier measurements change no plan, part of time", distance, distance < 1e-9, || {
        format!("{} at {}: {} and {}", question.label, exact(bytes), fresh.summary, answer.summary)
    });
}

fn exact(bytes: Bytes) -> String {
    format!("{}B ({bytes})", bytes.0)
}

/// Checks the remedies of the refusal under a raised budget of `bytes`: each fits, and slightly less does not.
fn check_remedies(question: &RandomTeam, bytes: Bytes, tally: &mut Tally) {
    let budgets = question.budgets.with(question.raised, bytes);
    let allow = &question.lossy.allow;
    let plan = question.with_team(&budgets, allow, |team| plan_team(team).plan);
    tally.check("a refusal is one with remedies, too", !plan.fits, || question.label.clone());
    tally.cover("refusals with checked remedies");
    let refused = RandomTeam { budgets, ..question.clone() };
    for remedy in &plan.needs {
        let allow: Vec<Rung> =
            allow.iter().chain(remedy.allow.iter().filter(|rung| !allow.contains(rung))).copied().collect();
        let label = || format!("{} at {}: {remedy:?}", question.label, exact(bytes));
        let Some(enough) = refused.under_remedy(&plan, remedy, false) else { continue };
        let fits = refused.fits(&enough, &allow);
        tally.check("every remedy fits", fits, label);
        if let Some(less) = refused.under_remedy(&plan, remedy, true).filter(|_| fits) {
            tally.cover(if remedy.host_bytes.is_some() { "remedies of host memory" } else { "remedies of load lines" });
            tally.check("no remedy is more than 1 % too large", !refused.fits(&less, &allow), label);
        }
    }
}

/// Returns random sizes of a model of a few MiB.
fn model_sizes(rng: &mut Rng) -> ModelSizes {
    let hidden = rng.pick(&[64, 128, 192]);
    ModelSizes { hidden, layers: rng.range(2, 8), ffn: 3 * hidden, vocab: rng.pick(&[500, 4000]), ..small_model(rng) }
}

/// Returns one to three virtual devices of `mib` MiB or more, as a value of `--devices`.
fn virtual_devices(rng: &mut Rng, mib: u64) -> String {
    let device = |number: u64, rng: &mut Rng| {
        let (budget, pace) = (mib + rng.range(0, mib / 2), rng.pick(&["0.5", "0.3", "0.2"]));
        format!("virtual:d{number}={budget}MiB@{pace}:16GB/s:{}", rng.pick(&["16GB/s", "125MB/s+100us"]))
    };
    let list: Vec<String> = (0..rng.range(1, 3)).map(|number| device(number, rng)).collect();
    format!("{},host={}MiB", list.join(","), rng.pick(&[1, 4, 16]))
}

/// Asks the program for a plan on virtual devices that are too small, and runs the commands of its refusal as printed.
fn check_program(binary: &Path, seed: u64, number: u64, tally: &mut Tally) -> anyhow::Result<()> {
    let mut mib = 96;
    for _ in 0..MAX_HALVINGS {
        let devices = |rng: &mut Rng| virtual_devices(rng, mib);
        let run = RandomRun::on(binary, (seed ^ 19, number), &model_sizes, &devices)?.with(&["run.fallback=none"]);
        let checked = check_commands(&run, tally);
        fs::remove_dir_all(&run.folder)?;
        if checked.with_context(|| run.label.clone())? {
            break;
        }
        mib /= 2;
    }
    Ok(())
}

/// Plans a run and, if it is refused, runs the commands of its hints. Returns whether it was refused.
fn check_commands(run: &RandomRun, tally: &mut Tally) -> anyhow::Result<bool> {
    let refusal = run.command(&["plan"], true).output().context("plan")?;
    if refusal.status.code() != Some(Exit::DoesNotFit as i32) {
        let stderr = String::from_utf8_lossy(&refusal.stderr);
        ensure!(refusal.status.success(), "plan ended with {}: {stderr}", refusal.status);
        return Ok(false);
    }
    tally.cover("refusals of the program");
    let stderr = String::from_utf8(refusal.stderr)?;
    let commands = stderr.lines().filter_map(|line| {
        line.trim().strip_prefix("hint: it fits")?.split_once(": plimsoll ").map(|(_, words)| words)
    });
    for words in commands {
        let line = format!("\"$0\" {words}");
        let program = run.command(&[], false).get_program().to_owned();
        let mut shell = Command::new("sh");
        shell.args(["-c", &line]).arg(&program).current_dir(&run.folder);
        shell.env("PLIMSOLL_CACHE", run.folder.join("cache"));
        let typed = shell.output().context("sh")?;
        tally.cover("commands typed");
        tally.check("commands of refusals fit as typed", typed.status.success(), || {
            format!("{}: {words}: {}", run.label, String::from_utf8_lossy(&typed.stderr))
        });
    }
    Ok(true)
}
