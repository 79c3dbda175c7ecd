//! Planned = used on a GPU, for models that fill it: the arena to the byte, the whole device as NVML and the driver see
//! it, and budgets that are never passed. Models are as large as real ones; what they compute is shown by the others.

use super::case::{Case, Draw, Load};
use super::place::Place;
use super::tally::Tally;
use clap::ValueEnum;
use plimsoll_core::{Bytes, DType, DeviceSpec};
use plimsoll_device::calibration::algorithms;
use plimsoll_device::cuda::driver::{Context, Driver};
use plimsoll_device::cuda::gpus::{Card, Here};
use plimsoll_device::cuda::open::{Wish, card, measure_charges, open};
use plimsoll_device::device::DeviceError;
use plimsoll_plan::search::{Answer, search};
use plimsoll_program::models::decoder::Source;
use plimsoll_program::models::{ModelType, RopeScaling};
use plimsoll_train::session::engine::{Engine, StepInput};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// How far the whole device may be off: 1 % and this.
const OFF_BYTES: u64 = 64 << 20;

/// What a process holds beside arenas: assumed before anybody has measured it, then of the case before.
static LAST: AtomicU64 = AtomicU64::new(330 << 20);
/// Plans of a case, until its charges are those that it was planned with.
const PLANS_MAX: u32 = 3;

/// How large models are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Size {
    /// For a stand-in.
    Small,
    /// Some hundred million parameters, under the load lines of an RTX 3070 and an RTX 3090.
    Large,
}

impl Size {
    /// Load lines: what is free of 8 and of 24 GiB on cards that also show a desktop.
    fn budgets(self) -> [Bytes; 2] {
        let gib = |gib: f64| Bytes((gib * (1u64 << 30) as f64) as u64);
        match self {
            Size::Small => [Bytes::mib(420), Bytes::mib(500)],
            Size::Large => [gib(7.67), gib(23.57)],
        }
    }

    /// A model, and a step of it.
    fn case(self, seed: u64, number: u64) -> Case {
        let mut draw = Draw::new(!seed, number);
        let mut case = Case::new(seed, number);
        let config = &mut case.config;
        config.model_type = draw.of(&ModelType::ALL);
        config.qkv_bias = config.model_type.qkv_bias();
        config.qk_norm = config.model_type.qk_norm();
        config.kv_heads = draw.of(&[1, 2, 4, 8]);
        config.heads = config.kv_heads * draw.of(&[1, 2, 4]);
        config.rope_scaling = RopeScaling::None;
        config.init_std = 0.02;
        let (layers, sequence, sequences);
        match self {
            Size::Small => {
                config.head_dim = draw.of(&[16, 32]);
                (layers, sequence, sequences) = (draw.from(1, 3), draw.scaled(8, 40), draw.from(1, 4));
                config.vocab = draw.scaled(50, 400);
            }
            Size::Large => {
                config.head_dim = draw.of(&[64, 64, 80, 96, 128]);
                (layers, sequence, sequences) = (draw.from(4, 24), draw.scaled(128, 2048), draw.scaled(1, 12));
                config.vocab = draw.scaled(8_000, 152_000);
            }
        }
        config.layers = layers;
        config.hidden = config.heads * config.head_dim;
        config.ffn = (config.hidden as f64 * (2.0 + 2.0 * draw.share())) as u64 / 8 * 8;
        case.source = Source::Random { seed: number };
        case.generation = None;
        case.evaluate = true;
        case.load = Load::Plenty;
        Case { sequence, sequences, ..case }
    }
}

/// The GPU before this process used it.
struct Gpu {
    here: &'static Here,
    card: &'static Card,
    before: Option<Bytes>,
    context: Arc<Context>,
}

impl Gpu {
    /// Opened once in a process: what a context holds shows only then.
    fn get(number: u32) -> Result<&'static Gpu, String> {
        static GPU: OnceLock<Result<Gpu, String>> = OnceLock::new();
        GPU.get_or_init(|| Gpu::open(number)).as_ref().map_err(Clone::clone)
    }

    fn open(number: u32) -> Result<Gpu, String> {
        let said = |error: &dyn std::fmt::Display| error.to_string();
        let (here, card) = card(number).map_err(|error| said(&error))?;
        let memory = here.memory(card);
        let before = memory.map(|memory| memory.used_bytes);
        let driver = Arc::new(Driver::load(&here.driver.path).map_err(|error| said(&error))?);
        let context =
            Context::open(&driver, number, memory.map(|memory| memory.free_bytes)).map_err(|error| said(&error))?;
        Ok(Gpu { here, card, before, context })
    }

    /// What it holds beside the arena for these Programs, measured as a run measures it before it is planned for good.
    fn charges(&self, precision: DType, answer: &Answer) -> Result<Bytes, DeviceError> {
        let wish =
            Wish { index: self.card.index, threads: 1, precision, algorithms: None, charges: None, scratch: None };
        measure_charges(&wish, answer.set.clone(), answer.layout.placement.clone())
    }

    /// What this process holds; without NVML that is not known, since the context came before anybody looked.
    fn held(&self) -> Option<Bytes> {
        let now = self.here.memory(self.card)?;
        Some(Bytes(now.used_bytes.0.saturating_sub(self.before?.0)))
    }
}

/// Plans a model under a load line and trains it for a step.
pub fn run_plan(seed: u64, number: u64, size: Size, place: Place, precision: DType) -> Tally {
    let mut tally = Tally::default();
    let Place::Cuda(ordinal) = place else {
        tally.check("plans are checked on a GPU", false, || "give --device cuda:0".into());
        return tally;
    };
    let gpu = match Gpu::get(ordinal) {
        Ok(gpu) => gpu,
        Err(error) => {
            tally.check("the GPU opens", false, || error);
            return tally;
        }
    };
    let case = size.case(seed, number).on(place, precision);
    let budget = Draw::new(seed ^ 5, number).of(&size.budgets());
    // As in a run: a plan under charges that are only assumed says which Programs they are measured with, and every
    // model has libraries load other code.
    let mut device = DeviceSpec { charges: Bytes(LAST.load(Ordering::Relaxed)), ..case.device(budget, 1) };
    let mut answer = search(&case.question(&device, precision));
    let mut charges = Ok(device.charges);
    for _ in 0..PLANS_MAX {
        if !answer.plan.fits {
            break;
        }
        charges = gpu.charges(precision, &answer);
        let Ok(measured) = charges else { break };
        let enough = measured <= device.charges;
        (device.charges, device.charges_measured) = (measured, true);
        LAST.store(measured.0, Ordering::Relaxed);
        if enough {
            break;
        }
        answer = search(&case.question(&device, precision));
    }
    if let Err(error) = charges {
        tally.check("charges are measured", false, || format!("{case}: {error}"));
        return tally;
    }
    if !answer.plan.fits {
        tally.cover("refused");
        tally.check(
            "what is refused names its need",
            answer.plan.needs.iter().any(|n| n.budget_bytes > budget),
            || format!("{case}: {:?}", answer.plan.needs),
        );
        return tally;
    }
    tally.cover(&format!("under {budget}"));
    let result = steps(&case, gpu, &device, answer, &mut tally);
    tally.check("what fits runs", result.is_ok(), || format!("{case}: {}", result.unwrap_err()));
    tally
}

fn steps(case: &Case, gpu: &Gpu, device: &DeviceSpec, answer: Answer, tally: &mut Tally) -> Result<(), DeviceError> {
    let Place::Cuda(number) = case.place else { unreachable!("checked before") };
    let (set, placement, recipe) = (answer.set.clone(), answer.layout.placement, answer.plan.recipe);
    let (budget, charges) = (device.budget, device.charges);
    let (planned, predicted) = (placement.arena_bytes, placement.arena_bytes + charges.0);
    let (empty, _) = gpu.context.memory()?;
    // As a run has them: chosen while charges were measured.
    let known = algorithms(gpu.card);
    let opened = open(number, 1, case.precision, known.as_ref(), answer.set, placement)?;
    // What libraries have loaded while charges were measured is there already; the arena and the modules come.
    let loaded = opened.charges.libraries;
    let (sequence, vocab) = (case.sequence, case.config.vocab);
    let mut engine = Engine::new(opened.device, &set, case.precision, recipe, sequence, vocab);
    let (mut seen, mut taken) = (None, Bytes::ZERO);
    let mut look = || {
        seen = seen.max(gpu.held());
        taken = taken.max(gpu.context.memory().map_or(Bytes::ZERO, |(free, _)| Bytes(empty.0.saturating_sub(free.0))));
    };
    engine.run("load")?;
    look();
    if case.optimizer.is_some() {
        engine.run("fresh")?;
        let mut rows = case.rows(case.sequences, 1);
        let labelled_tokens = rows.labelled_tokens();
        let input =
            StepInput { step: 1, learning_rate: 1e-3, betas: [0.9, 0.95], clip_norm: case.clip_norm, labelled_tokens };
        let loss = engine.gradients(&mut rows, &input, 1)?;
        look();
        engine.update()?;
        tally.check("losses are finite", loss.is_finite(), || format!("{case}: {loss:?}"));
    }
    let sum = engine.evaluate(&mut case.rows(1, 99))?;
    tally.check("losses are finite", sum.loss_sum.is_finite(), || format!("{case}: {sum:?}"));
    look();
    let used = engine.stats().arena_measured_bytes.0;
    tally.figure("arena planned but not used, bytes", planned as f64 - used as f64, planned == used, || {
        format!("{case}: planned {planned}, used {used}")
    });
    if let Some(seen) = seen {
        let off = seen.0 as f64 - predicted as f64;
        let most = (predicted / 100 + OFF_BYTES) as f64;
        tally.figure("whole device: off the prediction, MiB", off.abs() / 1048576.0, off.abs() <= most, || {
            format!("{case}: predicted {}, held {seen}, of which charges {charges}", Bytes(predicted))
        });
        tally.check("budgets are never passed", seen <= budget, || format!("{case}: held {seen} under {budget}"));
    } else {
        tally.cover("whole device not seen: no NVML");
    }
    let granules = taken.0.saturating_sub(planned);
    tally.figure(
        "device memory beside the arena while it runs, MiB",
        granules as f64 / 1048576.0,
        granules <= loaded.0 + OFF_BYTES,
        || format!("{case}: arena {planned}, taken {taken}"),
    );
    Ok(())
}
