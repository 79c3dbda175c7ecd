//! The ladder: random models, methods, precisions, load lines, hosts, links and allowed rungs, planned and, a share of
//! them, run on a virtual device. A yes runs in exactly its bytes; a no names needs that fit and run; no recipe that
//! fits is overlooked.

use super::case::{Case, Draw};
use super::drive::{Memory, generated, trained};
use super::tally::Tally;
use super::watch::standing_at;
use plimsoll_core::{
    Bytes, DType, DeviceKind, DeviceSpec, FileSpec, HostSpec, InFile, Link, Need, Offload, Recipe, Rung, Space,
};
use plimsoll_device::device::DeviceError;
use plimsoll_device::virtual_device::{self, Virtual};
use plimsoll_plan::price::Prices;
use plimsoll_plan::search::{Answer, Lossy, Question, plan_of, search};
use plimsoll_program::models::Target;
use plimsoll_program::models::decoder::{AdamState, Base, Lora, Method, Optimizer, Source};
use plimsoll_program::passes::check::check;
use plimsoll_train::session::engine::Engine;

/// One in so many plans is run; every third case runs the plan that it was given, whatever it is.
const RUN_EVERY: u64 = 3;

/// A case and where on the ladder it stands.
struct Ladder {
    case: Case,
    lossy: Lossy,
    budget: Bytes,
    host: HostSpec,
    link: Link,
}

impl Ladder {
    fn new(seed: u64, number: u64) -> Ladder {
        let mut draw = Draw::new(seed ^ 6, number);
        let mut case = Case::new(seed, number);
        case.precision = draw.of(&[DType::F32, DType::F32, DType::Bf16]);
        if let Some(Optimizer::AdamW { state, .. }) = &mut case.optimizer {
            *state = draw.of(&[AdamState::Full, AdamState::Full, AdamState::Blockwise8]);
        }
        let targets: Vec<Target> = Target::ALL.into_iter().filter(|_| draw.chance(0.7)).collect();
        let targets = if targets.is_empty() { Target::ALL.to_vec() } else { targets };
        let lora = Lora {
            rank: draw.scaled(1, 16),
            alpha: draw.of(&[8.0, 32.0]),
            dropout: draw.of(&[0.0, 0.1]),
            targets,
            seed: number,
            source: Source::Random { seed: number },
        };
        let adapters = draw.chance(0.35);
        let base = draw.of(&[Base::Plain, Base::Plain, Base::Int8, Base::Nf4]);
        let frozen = adapters || case.optimizer.is_none();
        let lossy = Lossy {
            method: if adapters && case.optimizer.is_some() { Method::Lora(lora.clone()) } else { Method::Full },
            base: if frozen { base } else { Base::Plain },
            allow: Rung::ALL.into_iter().filter(|_| draw.chance(0.3)).collect(),
            offer: Rung::ALL.to_vec(),
            lora,
        };
        let host_link =
            Link { bytes_per_second: draw.of(&[1.25e8, 4e9, 1.6e10, 1e12]), latency_seconds: draw.of(&[0.0, 1e-5]) };
        // Now and then a head of several blocks.
        if draw.chance(0.2) {
            case.config.vocab = draw.from(24_576, 50_000);
        }
        let mut ladder = Ladder { case, lossy, budget: Bytes(1 << 40), host: HostSpec::NONE, link: host_link };
        let device = ladder.device();
        let most = search(&ladder.question(&device)).plan.devices[0].arena_bytes.0 as f64;
        ladder.budget = Bytes((most * (0.1 + draw.share())) as u64);
        let host_bytes = Bytes((most * 2.0 * draw.share()) as u64);
        let host = HostSpec { budget: host_bytes, memory_bytes_per_second: 1e10, file: FileSpec::NONE };
        ladder.host = draw.of(&[HostSpec::NONE, host, host, HostSpec { budget: Bytes::gib(1), ..host }]);
        let file_bytes = Bytes((most * 3.0 * draw.share()) as u64);
        if draw.chance(0.5) && ladder.host != HostSpec::NONE {
            let room = Bytes::gib(8);
            let budget = draw.of(&[Bytes::ZERO, file_bytes, file_bytes, room]);
            ladder.host.budget = Bytes((ladder.host.budget.0 as f64 * draw.of(&[0.1, 0.4, 1.0])) as u64);
            ladder.host.file = FileSpec { budget, room, ..FileSpec::NONE };
        }
        ladder
    }

    fn device(&self) -> DeviceSpec {
        let mut device = self.case.device(self.budget, self.case.threads);
        device.kind = DeviceKind::Virtual;
        device.rates.host_link = self.link;
        device
    }

    fn question<'a>(&'a self, device: &'a DeviceSpec) -> Question<'a> {
        let plain = self.case.question(device, self.case.precision);
        Question { host: self.host, lossy: self.lossy.clone(), ..plain }
    }

    fn label(&self) -> String {
        let list = |rungs: &[Rung]| rungs.iter().map(Rung::to_string).collect::<Vec<_>>().join(",");
        let Lossy { method, base, allow, .. } = &self.lossy;
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

/// Everything that is shown of one case.
pub fn run_ladder(seed: u64, number: u64) -> Tally {
    let mut tally = Tally::default();
    let ladder = Ladder::new(seed, number);
    let answer = ask(&ladder, &mut tally);
    if answer.plan.fits {
        covers(&answer, &mut tally);
        frugal(&ladder, &answer, &mut tally);
        if number.is_multiple_of(RUN_EVERY) {
            runs(&ladder, &answer, "what fits runs", &mut tally);
        }
        return tally;
    }
    tally.cover("refused");
    overlooked(&ladder, &mut tally);
    let needs = &answer.plan.needs;
    tally.check("a no names its needs", !needs.is_empty(), || ladder.label());
    let chosen = Draw::new(seed ^ 7, number).from(0, needs.len().max(1) as u64 - 1) as usize;
    for (i, need) in needs.iter().enumerate() {
        let eased = eased(seed, number, need);
        let answer = ask(&eased, &mut tally);
        tally.check("a need that is met fits", answer.plan.fits, || {
            let plan = &answer.plan;
            let (device, host) = (plan.devices[0].arena_bytes, plan.host.arena_bytes);
            format!("{}: {need:?} gives {}, {device} and {host}", ladder.label(), plan.recipe)
        });
        if answer.plan.fits && i == chosen && number.is_multiple_of(RUN_EVERY) {
            runs(&eased, &answer, "a need that is met runs", &mut tally);
        }
    }
    tally
}

/// The same case with what a need asks for.
fn eased(seed: u64, number: u64, need: &Need) -> Ladder {
    let mut ladder = Ladder::new(seed, number);
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

/// A plan, and what holds of each.
fn ask(ladder: &Ladder, tally: &mut Tally) -> Answer {
    let device = ladder.device();
    let answer = search(&ladder.question(&device));
    tally.cover("planned");
    let malformed = check(&answer.set).err();
    tally.check("programs are well-formed", malformed.is_none(), || {
        format!("{}: {}", ladder.label(), malformed.unwrap())
    });
    let (arena, host) = (answer.plan.devices[0].arena_bytes, answer.plan.host.arena_bytes);
    let file = answer.plan.file.as_ref().map_or(Bytes::ZERO, |file| file.arena_bytes);
    let under = arena <= ladder.budget && host <= ladder.host.budget && file <= ladder.host.file.budget;
    tally.check("a yes is under all load lines, a no is not", under == answer.plan.fits, || {
        format!("{}: fits {}, {arena}, {host} and {file}", ladder.label(), answer.plan.fits)
    });
    let allowed = answer.plan.rungs.iter().all(|rung| {
        let brought_along = *rung == Rung::Lora && ladder.lossy.allow.iter().any(|allowed| *allowed > Rung::Lora);
        ladder.lossy.allow.contains(rung) || brought_along
    });
    tally.check("no rung is taken that was not allowed", allowed, || {
        format!("{}: {:?}", ladder.label(), answer.plan.rungs)
    });
    answer
}

fn covers(answer: &Answer, tally: &mut Tally) {
    let recipe = &answer.plan.recipe;
    tally.cover("fits");
    for rung in &answer.plan.rungs {
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

/// No loss is taken that was not needed: without the last of its rungs the plan does not fit.
fn frugal(ladder: &Ladder, answer: &Answer, tally: &mut Tally) {
    if answer.plan.rungs.is_empty() {
        return;
    }
    let device = ladder.device();
    let mut question = ladder.question(&device);
    question.lossy.allow.clear();
    let without = search(&question);
    tally.cover("planned");
    tally.check("nothing is lost where nothing has to be", !without.plan.fits, || {
        format!("{}: {:?} was taken", ladder.label(), answer.plan.rungs)
    });
}

/// Recipes drawn at random, laid out without the search: where it says no, none of them fits.
fn overlooked(ladder: &Ladder, tally: &mut Tally) {
    let device = ladder.device();
    let question = ladder.question(&device);
    let mut draw = Draw::new(ladder.case.seed ^ 8, ladder.case.number);
    let layers = ladder.case.config.layers;
    let trained = ladder.case.optimizer.is_some();
    let host = ladder.host != HostSpec::NONE;
    let file = ladder.host.file.budget > Bytes::ZERO;
    for _ in 0..4 {
        let micro_batch = if draw.chance(0.7) { 1 } else { draw.from(1, ladder.case.sequences) };
        let plain = Recipe::on_device(micro_batch as u32, draw.levels(layers));
        let upto = |draw: &mut Draw, most: u64| if draw.chance(0.6) { most as u32 } else { draw.from(0, most) as u32 };
        let optimizer = if trained { upto(&mut draw, layers) } else { 0 };
        let offload = Offload {
            optimizer,
            gradients: if trained { upto(&mut draw, u64::from(optimizer)) } else { 0 },
            weights: if trained { upto(&mut draw, u64::from(optimizer)) } else { upto(&mut draw, layers) },
            inputs: if trained { upto(&mut draw, layers) } else { 0 },
            embedding: draw.chance(0.5),
            head: draw.chance(0.5),
            update: optimizer > 0 && draw.chance(0.5),
            file: InFile::NOTHING,
        };
        let Offload { gradients, weights, .. } = offload;
        let mut in_file = |most: u32| if file { upto(&mut draw, u64::from(most)) } else { 0 };
        let in_file =
            InFile { optimizer: in_file(optimizer), gradients: in_file(gradients), weights: in_file(weights) };
        let offload = Offload { file: in_file, ..offload };
        let recipe = Recipe { offload: if host { offload } else { Offload::NOTHING }, ..plain };
        let layout = plan_of(&question, &recipe).layout;
        tally.cover("drawn against a no");
        let beside = Bytes(layout.host.bytes) <= ladder.host.budget;
        let beside = beside && Bytes(layout.file.bytes) <= ladder.host.file.budget;
        let fits = Bytes(layout.device.bytes) <= ladder.budget && beside;
        tally.check("no recipe that fits is overlooked", !fits, || {
            format!("{}: {recipe}, {} fits in {}", ladder.label(), recipe.offload, Bytes(layout.device.bytes))
        });
    }
}

/// Runs a plan; `what` is the promise.
fn runs(ladder: &Ladder, answer: &Answer, what: &str, tally: &mut Tally) {
    tally.cover("run");
    let result = steps(ladder, answer, tally);
    tally
        .check(what, result.is_ok(), || format!("{}: {}: {}", ladder.label(), answer.plan.recipe, result.unwrap_err()));
}

/// Loads, trains for two steps, evaluates and generates where the case does.
fn steps(ladder: &Ladder, answer: &Answer, tally: &mut Tally) -> Result<(), DeviceError> {
    let case = &ladder.case;
    let device = ladder.device();
    let (rates, host, precision) = (device.rates.clone(), ladder.host, answer.precision);
    let what = Virtual {
        name: "virtual".into(),
        arena_budget: ladder.budget,
        threads: case.threads as usize,
        price: Box::new(move |set, op| {
            Prices { rates: &rates, host: &host, precision, team_link: plimsoll_core::Link::MEMORY }.op_seconds(set, op)
        }),
        link: ladder.link,
        scratch: Some(std::env::temp_dir()),
    };
    let (set, placement) = (answer.set.clone(), answer.layout.placement.clone());
    let (planned, planned_host, planned_file) = (placement.arena_bytes, placement.host_bytes, placement.file_bytes);
    let device = virtual_device::open(what, set, placement, precision)?;
    let recipe = answer.plan.recipe.clone();
    let mut engine = Engine::new(device, &answer.set, precision, recipe, case.sequence, case.config.vocab);
    let mut memory = Memory::new(&answer.set, &mut Draw::new(case.seed, case.number));
    let mut numbers = Vec::new();
    engine.move_files("load", &mut memory)?;
    if case.optimizer.is_some() {
        engine.run("fresh")?;
        for step in 1..=2 {
            let (loss, grown) = trained(case, &mut engine, step, 1e-3)?;
            numbers.extend([loss.loss, loss.norm]);
            let most = grown.largest_bytes;
            tally.figure("heap: largest piece in a step, bytes", most as f64, most <= 64 << 10, || {
                format!("{}: {grown:?}", ladder.label())
            });
        }
        for program in ["checkpoint", "save", "restore"] {
            engine.move_files(program, &mut memory)?;
        }
    }
    if case.evaluate {
        numbers.push(engine.evaluate(&mut case.rows(2, 99))?.loss_sum);
    }
    if let Some(generation) = case.generation {
        numbers.extend(generated(case, generation, &mut engine)?.concat());
    }
    tally.check("numbers are finite", numbers.iter().all(|x| x.is_finite()), || {
        format!("{}: {:?}", ladder.label(), &numbers[..numbers.len().min(8)])
    });
    let stats = engine.stats();
    for (kind, space, planned, used) in [
        ("arena planned but not used, bytes", Space::Device, planned, stats.arena_measured_bytes.0),
        ("host arena planned but not used, bytes", Space::Host, planned_host, stats.host_measured_bytes.0),
        ("scratch file planned but not used, bytes", Space::Scratch, planned_file, stats.file_measured_bytes.0),
    ] {
        let placement = &answer.layout.placement;
        let top = standing_at(&answer.set, placement, space, planned.saturating_sub(1)).join(", ");
        // All slots of a ring are as large as its largest piece, which need not come through the topmost one.
        let explained = [
            (".ring.", space, "whose topmost slot of a ring is not filled"),
            (".host_ring.", Space::Host, "whose topmost slot of the host's ring is not filled"),
            (".window.", Space::Host, "whose topmost window is not filled"),
        ];
        let explained =
            explained.into_iter().find(|(name, of, _)| planned != used && space == *of && top.contains(name));
        explained.iter().for_each(|(.., sort)| tally.cover(sort));
        tally.figure(kind, planned as f64 - used as f64, planned == used || explained.is_some(), || {
            let recipe = &answer.plan.recipe;
            format!("{}: {recipe}: planned {planned}, used {used}; on top stands {top}", ladder.label())
        });
    }
    Ok(())
}
