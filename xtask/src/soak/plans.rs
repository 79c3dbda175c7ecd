//! Compares planned and used memory on a GPU with models that fill it: the arena to the byte, and the whole device
//! according to NVML and the driver. Budgets must never be exceeded. The values that are computed are checked
//! elsewhere.

use super::case::{Case, Load, Rng};
use super::checks::check_arena_use;
use super::tally::Tally;
use super::test_device::TestDevice;
use clap::ValueEnum;
use plimsoll_core::{Bytes, DType, DeviceSpec};
use plimsoll_device::cache::gemm_algorithms;
use plimsoll_device::cuda::driver::{Context, Driver};
use plimsoll_device::cuda::gpus::{CudaInstallation, GpuInfo};
use plimsoll_device::error::DeviceError;
use plimsoll_device::gpu::{OpenOptions, find_gpu, measure_charges, open};
use plimsoll_plan::search::{PlanOutcome, search};
use plimsoll_program::ProgramKind;
use plimsoll_program::models::decoder::WeightSource;
use plimsoll_program::models::{Extras, ModelType, RopeScaling};
use plimsoll_train::engine::{Engine, StepInput};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Permitted difference in bytes between predicted and measured memory of the whole device, in addition to 1 %.
const TOLERANCE_BYTES: u64 = 64 << 20;

/// Charges of the process on the GPU in bytes: an assumption at first, then the measurement of the previous case.
static LAST_CHARGES: AtomicU64 = AtomicU64::new(330 << 20);
/// Largest number of plans for one case. A case is planned again while its measured charges exceed those of the plan.
const PLANS_MAX: u32 = 3;

/// Size of the models that are planned and trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Size {
    /// Small models, for the stand-in that runs on the CPU in place of a GPU.
    Small,
    /// Hundreds of millions of parameters, with the load lines of an RTX 3070 and an RTX 3090.
    Large,
}

impl Size {
    /// Returns the load lines for models of this size. For large models, they are the free memory of cards with 8 and
    /// 24 GiB that also show a desktop.
    fn budgets(self) -> [Bytes; 2] {
        let gib = |gib: f64| Bytes((gib * (1u64 << 30) as f64) as u64);
        match self {
            Size::Small => [Bytes::mib(420), Bytes::mib(500)],
            Size::Large => [gib(7.67), gib(23.57)],
        }
    }

    /// Returns case `number` of the soak with this seed, with a random model and batch of this size.
    fn case(self, seed: u64, number: u64) -> Case {
        let mut rng = Rng::new(!seed, number);
        let mut case = Case::new(seed, number);
        let config = &mut case.config;
        config.model_type = rng.pick(&ModelType::ALL);
        config.qkv_bias = config.model_type.qkv_bias();
        (config.attention_out_bias, config.ffn_bias) = (false, false);
        config.qk_norm = config.model_type.qk_norm();
        config.kv_heads = rng.pick(&[1, 2, 4, 8]);
        config.heads = config.kv_heads * rng.pick(&[1, 2, 4]);
        config.rope_scaling = RopeScaling::None;
        config.extras = Extras::of_family(config.model_type);
        config.init_std = 0.02;
        let (layers, sequence, sequences);
        match self {
            Size::Small => {
                config.head_dim = rng.pick(&[16, 32]);
                (layers, sequence, sequences) = (rng.range(1, 3), rng.log_range(8, 40), rng.range(1, 4));
                config.vocab = rng.log_range(50, 400);
            }
            Size::Large => {
                config.head_dim = rng.pick(&[64, 64, 80, 96, 128]);
                (layers, sequence, sequences) = (rng.range(4, 24), rng.log_range(128, 2048), rng.log_range(1, 12));
                config.vocab = rng.log_range(8_000, 152_000);
            }
        }
        config.layers = layers;
        config.hidden = config.heads * config.head_dim;
        config.ffn = (config.hidden as f64 * (2.0 + 2.0 * rng.fraction())) as u64 / 8 * 8;
        case.source = WeightSource::Random { seed: number };
        case.generation = None;
        case.evaluate = true;
        case.load = Load::Plenty;
        Case { sequence, sequences, ..case }
    }
}

/// A GPU, with the bytes that were used on it before this process used it.
struct Gpu {
    here: &'static CudaInstallation,
    card: &'static GpuInfo,
    before: Option<Bytes>,
    context: Arc<Context>,
}

impl Gpu {
    /// Returns GPU `number`. The first call opens it for the whole process, because the memory of a context can only be
    /// measured when the context is created. Later calls ignore `number` and return that GPU.
    fn get(number: u32) -> Result<&'static Gpu, String> {
        static GPU: OnceLock<Result<Gpu, String>> = OnceLock::new();
        GPU.get_or_init(|| Gpu::open(number)).as_ref().map_err(Clone::clone)
    }

    fn open(number: u32) -> Result<Gpu, String> {
        let said = |error: &dyn std::fmt::Display| error.to_string();
        let (here, card) = find_gpu(number).map_err(|error| said(&error))?;
        let memory = here.memory(card);
        let before = memory.map(|memory| memory.used_bytes);
        let driver = Arc::new(Driver::load(&here.driver.path).map_err(|error| said(&error))?);
        let context =
            Context::open(&driver, number, memory.map(|memory| memory.free_bytes)).map_err(|error| said(&error))?;
        Ok(Gpu { here, card, before, context })
    }

    /// Measures the charges for the Programs of a plan on this GPU, in the same way as a run.
    fn charges(&self, precision: DType, outcome: &PlanOutcome) -> Result<Bytes, DeviceError> {
        let options = OpenOptions {
            index: self.card.index,
            threads: 1,
            precision,
            algorithms: None,
            charges: None,
            scratch: None,
        };
        measure_charges(&options, outcome.set.clone(), outcome.layout.placement.clone())
    }

    /// Returns the GPU memory that this process holds, as the increase of used memory since its start. `None` without
    /// NVML.
    fn held(&self) -> Option<Bytes> {
        let now = self.here.memory(self.card)?;
        Some(Bytes(now.used_bytes.0.saturating_sub(self.before?.0)))
    }
}

/// Plans a random model of this size under a load line of a GPU, trains one step, and checks planned against used
/// bytes.
pub fn run_plan(seed: u64, number: u64, size: Size, device: TestDevice, precision: DType) -> Tally {
    let mut tally = Tally::default();
    let TestDevice::Cuda(ordinal) = device else {
        tally.check("plans need a GPU", false, || "give --device cuda:0".into());
        return tally;
    };
    let gpu = match Gpu::get(ordinal) {
        Ok(gpu) => gpu,
        Err(error) => {
            tally.check("the GPU opens", false, || error);
            return tally;
        }
    };
    let case = size.case(seed, number).on(device, precision);
    let budget = Rng::new(seed ^ 5, number).pick(&size.budgets());
    // As in a run, the first plan uses assumed charges and determines the Programs for their measurement. Each model makes
    // the libraries load other code.
    let mut device = DeviceSpec { charges: Bytes(LAST_CHARGES.load(Ordering::Relaxed)), ..case.device_spec(budget, 1) };
    let mut outcome = search(&case.request(&device, precision));
    let mut charges = Ok(device.charges);
    for _ in 0..PLANS_MAX {
        if !outcome.plan.fits {
            break;
        }
        charges = gpu.charges(precision, &outcome);
        let Ok(measured) = charges else { break };
        let enough = measured <= device.charges;
        (device.charges, device.charges_measured) = (measured, true);
        LAST_CHARGES.store(measured.0, Ordering::Relaxed);
        if enough {
            break;
        }
        outcome = search(&case.request(&device, precision));
    }
    if let Err(error) = charges {
        tally.check("charges are measured", false, || format!("{case}: {error}"));
        return tally;
    }
    if !outcome.plan.fits {
        tally.cover("refused");
        tally.check(
            "refusals name the smallest budget",
            outcome.plan.needs.iter().any(|n| n.budget_bytes > budget),
            || format!("{case}: {:?}", outcome.plan.needs),
        );
        return tally;
    }
    tally.cover(&format!("under {budget}"));
    let result = train_one_step(&case, gpu, &device, outcome, &mut tally);
    tally.check("plans that fit run", result.is_ok(), || format!("{case}: {}", result.unwrap_err()));
    tally
}

fn train_one_step(
    case: &Case,
    gpu: &Gpu,
    device: &DeviceSpec,
    outcome: PlanOutcome,
    tally: &mut Tally,
) -> Result<(), DeviceError> {
    let TestDevice::Cuda(number) = case.device else { unreachable!("checked before") };
    let (set, placement, recipe) = (outcome.set.clone(), outcome.layout.placement, outcome.plan.recipe);
    let (budget, charges) = (device.budget, device.charges);
    let (planned, predicted) = (placement.arena_bytes, placement.arena_bytes + charges.0);
    let (empty, _) = gpu.context.memory()?;
    // As in a run, algorithms were chosen while charges were measured.
    let known = gemm_algorithms(gpu.card);
    let opened = open(number, 1, case.precision, known.as_ref(), outcome.set, placement)?;
    // Libraries were already loaded while charges were measured. Opening adds the arena and the modules.
    let loaded = opened.charges.libraries;
    let (sequence, vocab) = (case.sequence, case.config.vocab);
    let mut engine = Engine::new(opened.device, &set, case.precision, recipe, sequence, vocab);
    let (mut held_memory, mut used_memory) = (None, Bytes::ZERO);
    let mut measure = || {
        held_memory = held_memory.max(gpu.held());
        used_memory = used_memory
            .max(gpu.context.memory().map_or(Bytes::ZERO, |(free, _)| Bytes(empty.0.saturating_sub(free.0))));
    };
    engine.run(ProgramKind::Load)?;
    measure();
    if case.optimizer.is_some() {
        engine.run(ProgramKind::InitOptimizer)?;
        let mut rows = case.rows(case.sequences, 1);
        let loss_divisor = rows.labelled_tokens();
        let input =
            StepInput { step: 1, learning_rate: 1e-3, betas: [0.9, 0.95], clip_norm: case.clip_norm, loss_divisor };
        let loss = engine.gradients(&mut rows, &input, 1)?;
        measure();
        engine.update()?;
        tally.check("losses are finite", loss.is_finite(), || format!("{case}: {loss:?}"));
    }
    let sum = engine.evaluate(&mut case.rows(1, 99))?;
    tally.check("losses are finite", sum.loss_sum.is_finite(), || format!("{case}: {sum:?}"));
    measure();
    let used = engine.stats().arena_measured_bytes.0;
    tally.figure("arena planned but not used, bytes", planned as f64 - used as f64, planned == used, || {
        format!("{case}: planned {planned}, used {used}")
    });
    let used = engine.take_new_arena_use();
    check_arena_use(&outcome.plan.devices[0], used.as_ref(), &case.to_string(), tally);
    if let Some(held_memory) = held_memory {
        let off = held_memory.0 as f64 - predicted as f64;
        let most = (predicted / 100 + TOLERANCE_BYTES) as f64;
        tally.figure("whole device: off the prediction, MiB", off.abs() / 1048576.0, off.abs() <= most, || {
            format!("{case}: predicted {}, held {held_memory}, of which charges {charges}", Bytes(predicted))
        });
        tally.check("budgets are never exceeded", held_memory <= budget, || {
            format!("{case}: held {held_memory} under {budget}")
        });
    } else {
        tally.cover("whole device not seen: no NVML");
    }
    let granules = used_memory.0.saturating_sub(planned);
    tally.figure(
        "device memory outside the arena while it runs, MiB",
        granules as f64 / 1048576.0,
        granules <= loaded.0 + TOLERANCE_BYTES,
        || format!("{case}: arena {planned}, used_memory {used_memory}"),
    );
    Ok(())
}
