//! The memory ladder: random models, methods, precisions, load lines, hosts, links and allowed rungs.
//!
//! All cases are planned, and a third of them run on a virtual device. Plans that fit use exactly their bytes. Refusals
//! name remedies that fit and run. No recipe that fits is overlooked.

use super::case::{Case, Rng};
use super::checks::check_arena_use;
use super::execution::{InMemoryFiles, generate_all, train_step};
use super::observed_device::tensors_at_byte;
use super::tally::Tally;
use plimsoll_core::{
    Bytes, DType, DeviceKind, DeviceSpec, FileSpec, HostSpec, Link, Offload, Recipe, Remedy, Rung, ScratchOffload,
    Space,
};
use plimsoll_device::error::DeviceError;
use plimsoll_device::virtual_device::{self, VirtualDeviceSpec};
use plimsoll_plan::price::Prices;
use plimsoll_plan::search::{LossyOptions, PlanOutcome, PlanRequest, plan_recipe, search};
use plimsoll_program::ProgramKind;
use plimsoll_program::models::Target;
use plimsoll_program::models::decoder::{AdamState, Base, Lora, Method, Optimizer, WeightSource};
use plimsoll_program::passes::check::check;
use plimsoll_train::engine::Engine;

/// One case in this many is not only planned, but also run.
const RUN_EVERY: u64 = 3;

/// A case with its lossy options, the load lines of device and host, and the link between them.
struct LadderCase {
    case: Case,
    lossy: LossyOptions,
    budget: Bytes,
    host: HostSpec,
    link: Link,
}

impl LadderCase {
    fn new(seed: u64, number: u64) -> LadderCase {
        let mut rng = Rng::new(seed ^ 6, number);
        let mut case = Case::new(seed, number);
        case.precision = rng.pick(&[DType::F32, DType::F32, DType::Bf16]);
        if let Some(Optimizer::AdamW { state, .. }) = &mut case.optimizer {
            *state = rng.pick(&[AdamState::Full, AdamState::Full, AdamState::Blockwise8]);
        }
        let targets: Vec<Target> = Target::ALL.into_iter().filter(|_| rng.chance(0.7)).collect();
        let targets = if targets.is_empty() { Target::ALL.to_vec() } else { targets };
        let lora = Lora {
            rank: rng.log_range(1, 16),
            alpha: rng.pick(&[8.0, 32.0]),
            rank_stabilized: false,
            dropout: rng.pick(&[0.0, 0.1]),
            targets,
            modules: None,
            seed: number,
            source: WeightSource::Random { seed: number },
        };
        let adapters = rng.chance(0.35);
        let base = rng.pick(&[Base::Plain, Base::Plain, Base::Int8, Base::Nf4]);
        let frozen = adapters || case.optimizer.is_none();
        let lossy = LossyOptions {
            method: if adapters && case.optimizer.is_some() { Method::Lora(lora.clone()) } else { Method::Full },
            base: if frozen { base } else { Base::Plain },
            allow: Rung::ALL.into_iter().filter(|_| rng.chance(0.3)).collect(),
            offer: Rung::ALL.to_vec(),
            lora,
        };
        let host_link =
            Link { bytes_per_second: rng.pick(&[1.25e8, 4e9, 1.6e10, 1e12]), latency_seconds: rng.pick(&[0.0, 1e-5]) };
        // Some cases have a vocabulary large enough for an output head of several blocks.
        if rng.chance(0.2) {
            case.config.vocab = rng.range(24_576, 50_000);
        }
        let mut ladder = LadderCase { case, lossy, budget: Bytes(1 << 40), host: HostSpec::NONE, link: host_link };
        let device = ladder.device();
        let most = search(&ladder.request(&device)).plan.devices[0].arena_bytes.0 as f64;
        ladder.budget = Bytes((most * (0.1 + rng.fraction())) as u64);
        let host_bytes = Bytes((most * 2.0 * rng.fraction()) as u64);
        let host = HostSpec { budget: host_bytes, memory_bytes_per_second: 1e10, file: FileSpec::NONE };
        ladder.host = rng.pick(&[HostSpec::NONE, host, host, HostSpec { budget: Bytes::gib(1), ..host }]);
        let file_bytes = Bytes((most * 3.0 * rng.fraction()) as u64);
        if rng.chance(0.5) && ladder.host != HostSpec::NONE {
            let available = Bytes::gib(8);
            let budget = rng.pick(&[Bytes::ZERO, file_bytes, file_bytes, available]);
            ladder.host.budget = Bytes((ladder.host.budget.0 as f64 * rng.pick(&[0.1, 0.4, 1.0])) as u64);
            ladder.host.file = FileSpec { budget, available, ..FileSpec::NONE };
        }
        ladder
    }

    fn device(&self) -> DeviceSpec {
        let mut device = self.case.device_spec(self.budget, self.case.threads);
        device.kind = DeviceKind::Virtual;
        device.rates.host_link = self.link;
        device
    }

    fn request<'a>(&'a self, device: &'a DeviceSpec) -> PlanRequest<'a> {
        let plain = self.case.request(device, self.case.precision);
        PlanRequest { host: self.host, lossy: self.lossy.clone(), ..plain }
    }

    fn label(&self) -> String {
        let list = |rungs: &[Rung]| rungs.iter().map(Rung::to_string).collect::<Vec<_>>().join(",");
        let LossyOptions { method, base, allow, .. } = &self.lossy;
        let method = if matches!(method, Method::Lora(_)) { "lora" } else { "full" };
        format!(
            "{}; {method}, {base:?}, allow {}, {} under {} with a host of {} and a file of {}, {:.0e} B/s",
            self.case,
            list(allow),
            self.case.precision,
            self.budget,
            self.host.budget,
            self.host.file.budget,
            self.link.bytes_per_second
        )
    }
}

/// Plans case `number` of the soak with this seed and makes all checks. Also runs one case in [`RUN_EVERY`].
pub fn run_ladder(seed: u64, number: u64) -> Tally {
    let mut tally = Tally::default();
    let ladder = LadderCase::new(seed, number);
    let outcome = plan_and_check(&ladder, &mut tally);
    if outcome.plan.fits {
        record_coverage(&outcome, &mut tally);
        check_rungs_needed(&ladder, &outcome, &mut tally);
        if number.is_multiple_of(RUN_EVERY) {
            check_runs(&ladder, &outcome, "plans that fit run", &mut tally);
        }
        return tally;
    }
    tally.cover("refused");
    check_no_recipe_overlooked(&ladder, &mut tally);
    let needs = &outcome.plan.needs;
    tally.check("refusals name remedies", !needs.is_empty(), || ladder.label());
    let chosen = Rng::new(seed ^ 7, number).range(0, needs.len().max(1) as u64 - 1) as usize;
    for (i, need) in needs.iter().enumerate() {
        let remedied = with_remedy(seed, number, need);
        let outcome = plan_and_check(&remedied, &mut tally);
        tally.check("remedies fit", outcome.plan.fits, || {
            let plan = &outcome.plan;
            let (device, host) = (plan.devices[0].arena_bytes, plan.host.arena_bytes);
            format!("{}: {need:?} gives {}, {device} and {host}", ladder.label(), plan.recipe)
        });
        if outcome.plan.fits && i == chosen && number.is_multiple_of(RUN_EVERY) {
            check_runs(&remedied, &outcome, "remedies run", &mut tally);
        }
    }
    tally
}

/// Returns case `number` of the soak with this seed, with the load lines and allowed rungs that the remedy `need` asks
/// for.
fn with_remedy(seed: u64, number: u64, need: &Remedy) -> LadderCase {
    let mut ladder = LadderCase::new(seed, number);
    ladder.budget = need.budget_bytes;
    ladder.lossy.allow.clone_from(&need.allow);
    if let Some(host_bytes) = need.host_bytes {
        ladder.host.budget = host_bytes;
    }
    if let Some(file_bytes) = need.file_bytes {
        ladder.host.file.budget = file_bytes;
    }
    ladder
}

/// Plans a case, makes the checks that hold for every plan, and returns the plan.
fn plan_and_check(ladder: &LadderCase, tally: &mut Tally) -> PlanOutcome {
    let device = ladder.device();
    let outcome = search(&ladder.request(&device));
    tally.cover("planned");
    let malformed = check(&outcome.set).err();
    tally.check("programs are well-formed", malformed.is_none(), || {
        format!("{}: {}", ladder.label(), malformed.unwrap())
    });
    let (arena, host) = (outcome.plan.devices[0].arena_bytes, outcome.plan.host.arena_bytes);
    let file = outcome.plan.file.as_ref().map_or(Bytes::ZERO, |file| file.arena_bytes);
    let under = arena <= ladder.budget && host <= ladder.host.budget && file <= ladder.host.file.budget;
    tally.check("only plans within all load lines fit", under == outcome.plan.fits, || {
        format!("{}: fits {}, {arena}, {host} and {file}", ladder.label(), outcome.plan.fits)
    });
    let allowed = outcome.plan.rungs.iter().all(|rung| {
        let brought_along = *rung == Rung::Lora && ladder.lossy.allow.iter().any(|allowed| *allowed > Rung::Lora);
        ladder.lossy.allow.contains(rung) || brought_along
    });
    tally.check("only allowed rungs are taken", allowed, || format!("{}: {:?}", ladder.label(), outcome.plan.rungs));
    outcome
}

fn record_coverage(outcome: &PlanOutcome, tally: &mut Tally) {
    let recipe = &outcome.plan.recipe;
    tally.cover("fits");
    for rung in &outcome.plan.rungs {
        tally.cover(&format!("with {rung}"));
    }
    let Offload { optimizer, gradients, weights, inputs, embedding, head, file, .. } = recipe.offload;
    for (waits, what) in [
        (optimizer > 0, "optimizer"),
        (gradients > 0, "gradients"),
        (weights > 0, "weights"),
        (inputs > 0, "inputs"),
        (embedding, "embedding"),
        (head, "head"),
        (!file.is_nothing(), "the scratch file behind what is"),
    ] {
        if waits {
            tally.cover(&format!("with {what} on the host"));
        }
    }
}

/// Checks that a plan takes lossy rungs only if it needs them: without them, the case must not fit.
fn check_rungs_needed(ladder: &LadderCase, outcome: &PlanOutcome, tally: &mut Tally) {
    if outcome.plan.rungs.is_empty() {
        return;
    }
    let device = ladder.device();
    let mut request = ladder.request(&device);
    request.lossy.allow.clear();
    let without = search(&request);
    tally.cover("planned");
    tally.check("lossy rungs are only taken if needed", !without.plan.fits, || {
        format!("{}: {:?} was taken", ladder.label(), outcome.plan.rungs)
    });
}

/// Packs random recipes without the search and checks that none of them fits a case that the search refused.
fn check_no_recipe_overlooked(ladder: &LadderCase, tally: &mut Tally) {
    let device = ladder.device();
    let request = ladder.request(&device);
    let mut rng = Rng::new(ladder.case.seed ^ 8, ladder.case.number);
    let layers = ladder.case.config.layers;
    let trained = ladder.case.optimizer.is_some();
    let host = ladder.host != HostSpec::NONE;
    let file = ladder.host.file.budget > Bytes::ZERO;
    for _ in 0..4 {
        let micro_batch = if rng.chance(0.7) { 1 } else { rng.range(1, ladder.case.sequences) };
        let plain = Recipe::on_device(micro_batch as u32, rng.recompute_levels(layers));
        let upto = |rng: &mut Rng, most: u64| if rng.chance(0.6) { most as u32 } else { rng.range(0, most) as u32 };
        let optimizer = if trained { upto(&mut rng, layers) } else { 0 };
        let offload = Offload {
            optimizer,
            gradients: if trained { upto(&mut rng, u64::from(optimizer)) } else { 0 },
            weights: if trained { upto(&mut rng, u64::from(optimizer)) } else { upto(&mut rng, layers) },
            inputs: if trained { upto(&mut rng, layers) } else { 0 },
            embedding: rng.chance(0.5),
            head: rng.chance(0.5),
            update: optimizer > 0 && rng.chance(0.5),
            file: ScratchOffload::NOTHING,
        };
        let Offload { gradients, weights, .. } = offload;
        let mut in_file = |most: u32| if file { upto(&mut rng, u64::from(most)) } else { 0 };
        let in_file =
            ScratchOffload { optimizer: in_file(optimizer), gradients: in_file(gradients), weights: in_file(weights) };
        let offload = Offload { file: in_file, ..offload };
        let recipe = Recipe { offload: if host { offload } else { Offload::NOTHING }, ..plain };
        let layout = plan_recipe(&request, &recipe).layout;
        tally.cover("random recipes against a refusal");
        let beside = Bytes(layout.host.bytes) <= ladder.host.budget;
        let beside = beside && Bytes(layout.file.bytes) <= ladder.host.file.budget;
        let fits = Bytes(layout.device.bytes) <= ladder.budget && beside;
        tally.check("no recipe that fits is overlooked", !fits, || {
            format!("{}: {recipe}, {} fits in {}", ladder.label(), recipe.offload, Bytes(layout.device.bytes))
        });
    }
}

/// Runs the Programs of a plan and checks that no error occurs. `what` is the name of this check.
fn check_runs(ladder: &LadderCase, outcome: &PlanOutcome, what: &str, tally: &mut Tally) {
    tally.cover("run");
    let result = run_programs(ladder, outcome, tally);
    tally.check(what, result.is_ok(), || {
        format!("{}: {}: {}", ladder.label(), outcome.plan.recipe, result.unwrap_err())
    });
}

/// Runs the Programs of a plan on a virtual device, and checks heap, results and used bytes. It loads, trains two
/// steps, evaluates and generates, as far as the case does these.
fn run_programs(ladder: &LadderCase, outcome: &PlanOutcome, tally: &mut Tally) -> Result<(), DeviceError> {
    let case = &ladder.case;
    let device = ladder.device();
    let (rates, host, precision) = (device.rates.clone(), ladder.host, outcome.precision);
    let what = VirtualDeviceSpec {
        name: "virtual".into(),
        arena_budget: ladder.budget,
        threads: case.threads as usize,
        price: Box::new(move |set, op| {
            Prices { rates: &rates, host: &host, precision, team_link: plimsoll_core::Link::MEMORY }.op_seconds(set, op)
        }),
        link: ladder.link,
        scratch_folder: Some(std::env::temp_dir()),
    };
    let (set, placement) = (outcome.set.clone(), outcome.layout.placement.clone());
    let (planned, planned_host, planned_file) = (placement.arena_bytes, placement.host_bytes, placement.file_bytes);
    let device = virtual_device::open(what, set, placement, precision)?;
    let recipe = outcome.plan.recipe.clone();
    let mut engine = Engine::new(device, &outcome.set, precision, recipe, case.sequence, case.config.vocab);
    let mut memory = InMemoryFiles::new(&outcome.set, &mut Rng::new(case.seed, case.number));
    let mut numbers = Vec::new();
    engine.move_files(ProgramKind::Load, &mut memory)?;
    if case.optimizer.is_some() {
        engine.run(ProgramKind::InitOptimizer)?;
        for step in 1..=2 {
            let (loss, grown) = train_step(case, &mut engine, step, 1e-3)?;
            numbers.extend([loss.loss, loss.norm]);
            let most = grown.largest_bytes;
            tally.figure("heap: largest piece in a step, bytes", most as f64, most <= 64 << 10, || {
                format!("{}: {grown:?}", ladder.label())
            });
        }
        for program in [ProgramKind::Checkpoint, ProgramKind::Save, ProgramKind::Restore] {
            engine.move_files(program, &mut memory)?;
        }
    }
    if case.evaluate {
        numbers.push(engine.evaluate(&mut case.rows(2, 99))?.loss_sum);
    }
    if let Some(generation) = case.generation {
        numbers.extend(generate_all(case, generation, &mut engine)?.concat());
    }
    tally.check("numbers are finite", numbers.iter().all(|x| x.is_finite()), || {
        format!("{}: {:?}", ladder.label(), &numbers[..numbers.len().min(8)])
    });
    let (stats, used) = (engine.stats(), engine.take_new_arena_use());
    check_arena_use(&outcome.plan.devices[0], used.as_ref(), &ladder.label(), tally);
    for (kind, space, planned, used) in [
        ("arena planned but not used, bytes", Space::Device, planned, stats.arena_measured_bytes.0),
        ("host arena planned but not used, bytes", Space::Host, planned_host, stats.host_measured_bytes.0),
        ("scratch file planned but not used, bytes", Space::Scratch, planned_file, stats.file_measured_bytes.0),
    ] {
        let placement = &outcome.layout.placement;
        let top = tensors_at_byte(&outcome.set, placement, space, planned.saturating_sub(1)).join(", ");
        // All slots of a ring are as large as its largest piece, and that piece may not pass through the topmost slot.
        let explained = [
            (".ring.", space, "whose topmost slot of a ring is not filled"),
            (".host_ring.", Space::Host, "whose topmost slot of the host's ring is not filled"),
            (".window.", Space::Host, "whose topmost window is not filled"),
        ];
        let explained =
            explained.into_iter().find(|(name, of, _)| planned != used && space == *of && top.contains(name));
        explained.iter().for_each(|(.., sort)| tally.cover(sort));
        tally.figure(kind, planned as f64 - used as f64, planned == used || explained.is_some(), || {
            let recipe = &outcome.plan.recipe;
            format!("{}: {recipe}: planned {planned}, used {used}; on top stands {top}", ladder.label())
        });
    }
    Ok(())
}
