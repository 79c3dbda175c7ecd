//! The checks of a case: budgets and refusals, placement, planned against used bytes, and equal results for all
//! recipes.

use super::case::{Case, Load, Rng};
use super::execution::{ExecutionOptions, RunValues, execute};
use super::observed_device::Observation;
use super::tally::Tally;
use super::test_device::TestDevice;
use plimsoll_core::{Bytes, Category, DType, DevicePlan, Recipe, RecomputeLevel, Space};
use plimsoll_plan::layout::{ALIGNMENT, Layout};
use plimsoll_plan::lifetimes::lifetimes;
use plimsoll_plan::search::{PlanOutcome, plan_recipe, search};
use plimsoll_program::ProgramSet;
use plimsoll_program::passes::check::check;
use std::collections::BTreeMap;

/// Largest permitted relative difference, in f64, of losses and weights between two micro-batch sizes.
const F64_DISTANCE: f64 = 1e-9;

/// Runs a case with a random recipe, and compares the output of every op with that of the CPU in f64.
pub fn run_ops(case: &Case) -> Tally {
    let mut tally = Tally::default();
    let device = case.device_spec(Bytes(1 << 40), case.threads);
    let mut rng = Rng::new(case.seed ^ 4, case.number);
    let recipe = Recipe::on_device(rng.range(1, case.sequences) as u32, rng.recompute_levels(case.config.layers));
    let outcome = plan_recipe(&case.request(&device, case.precision), &recipe);
    let label = case.to_string();
    check_plan_runs(
        case,
        &outcome,
        ExecutionOptions { observation: Observation::CpuReference, ..ExecutionOptions::new(case, &label) },
        &mut tally,
    );
    tally
}

/// Plans and runs one case, and makes all checks of this module.
pub fn run_case(case: &Case) -> Tally {
    let mut tally = Tally::default();
    let Some(outcome) = check_budgets(case, &mut tally) else { return tally };
    record_coverage(case, &outcome.plan.recipe, &mut tally);
    check_placement(case, &outcome.set, &outcome.layout, &mut tally);
    let label = case.to_string();
    let options = ExecutionOptions::new(case, &label);
    let Some(plain) = check_plan_runs(case, &outcome, options, &mut tally) else { return tally };
    tally.check("losses and logits are finite", plain.finite(), || format!("{label}: {:?}", plain.losses));
    let again =
        (case.device != TestDevice::Cpu).then(|| check_plan_runs(case, &outcome, options, &mut tally)).flatten();
    if let Some(again) = again {
        tally.check("same device, same plan, same bits", plain.same_bits(&again), || {
            format!("{label}: {:?} was {:?}", again.losses, plain.losses)
        });
    }
    if let Some(poisoned) =
        check_plan_runs(case, &outcome, ExecutionOptions { observation: Observation::EveryOp, ..options }, &mut tally)
    {
        let same = plain.same_bits(&poisoned);
        tally.check("poisoned dead bytes change no result", same, || {
            format!("{label}: {:?} was {:?}", poisoned.losses, plain.losses)
        });
    }
    compare_recipes(case, &outcome.plan.recipe, &plain, &mut tally);
    if case.device == TestDevice::Cpu {
        compare_thread_counts(case, &outcome.plan.recipe, &plain, &mut tally);
    }
    tally
}

fn record_coverage(case: &Case, recipe: &Recipe, tally: &mut Tally) {
    let Recipe { micro_batch, recompute, .. } = recipe;
    let whole = u64::from(*micro_batch) >= case.sequences;
    tally.cover(if whole { "with whole steps at once" } else { "with micro-batches" });
    let nothing = recompute.iter().all(|&level| level == RecomputeLevel::Nothing);
    tally.cover(match (case.optimizer.is_some(), nothing) {
        (false, _) => "without training",
        (true, true) => "that recompute nothing",
        (true, false) if recompute.iter().any(|level| level != &recompute[0]) => "that recompute layers unequally",
        (true, false) => "that recompute all layers alike",
    });
    if case.load == Load::TooSmall {
        tally.cover("refused and run with the named budget");
    }
}

fn check_plan_runs(
    case: &Case,
    outcome: &PlanOutcome,
    options: ExecutionOptions,
    tally: &mut Tally,
) -> Option<RunValues> {
    let result = execute(case, outcome, options, tally);
    tally
        .check("plans that fit run", result.is_ok(), || format!("{}: {}", options.label, result.as_ref().unwrap_err()));
    result.ok()
}

/// Plans a case under many budgets, and checks for each whether the plan has to fit. Returns the plan under the case's
/// own budget; `None` if that does not fit.
fn check_budgets(case: &Case, tally: &mut Tally) -> Option<PlanOutcome> {
    let mut rng = Rng::new(case.seed ^ 1, case.number);
    let mut plan_at = |budget: u64| plan_under_budget(case, budget, tally);
    let unlimited = plan_at(1 << 40);
    let refused = plan_at(1);
    let most = unlimited.plan.devices[0].arena_bytes.0;
    let smallest = refused.plan.needs.first().map_or(0, |smallest| smallest.budget_bytes.0);
    let at_smallest = plan_at(smallest);
    let below: Vec<(u64, PlanOutcome)> =
        [1, 1 << 20].map(|less| smallest.saturating_sub(less)).map(|budget| (budget, plan_at(budget))).into();
    let between: Vec<u64> = (0..3).map(|_| rng.range(smallest.min(most), most.max(smallest))).collect();
    let between: Vec<(u64, PlanOutcome)> = between.into_iter().map(|budget| (budget, plan_at(budget))).collect();
    let chosen = match case.load {
        Load::TooSmall => at_smallest.clone(),
        Load::Plenty => unlimited.clone(),
        Load::Between(share) => plan_at(smallest.min(most) + (most.saturating_sub(smallest) as f64 * share) as u64),
    };

    tally.check("plans that fit are not refused", unlimited.plan.fits, || format!("{case}: nothing fits"));
    tally.check("refusals name the smallest budget", !refused.plan.fits && smallest > 1, || {
        format!("{case}: {:?}", refused.plan.needs)
    });
    let arena = at_smallest.plan.devices[0].arena_bytes.0;
    tally.check("the named budget fits, to the byte", at_smallest.plan.fits && arena == smallest, || {
        format!("{case}: needs {smallest}, has {arena}")
    });
    for (budget, outcome) in below {
        let named = outcome.plan.needs.first().map_or(0, |smallest| smallest.budget_bytes.0);
        tally.check("smaller budgets are refused", !outcome.plan.fits && named == smallest, || {
            format!("{case}: needs {smallest}, at {budget}: fits {}, names {named}", outcome.plan.fits)
        });
    }
    for (budget, outcome) in &between {
        tally.check("plans that fit are not refused", outcome.plan.fits, || {
            format!("{case}: needs {smallest}, refused at {budget}")
        });
    }
    check_smallest_recipe(case, smallest, refused.layout.device.lower_bound_bytes, tally);
    tally.check("plans that fit are not refused", chosen.plan.fits, || {
        format!("{case}: needs {smallest}, the load line of the case is refused")
    });
    chosen.plan.fits.then_some(chosen)
}

/// Plans a case under a budget in bytes, and checks the packing and the size of the arena.
fn plan_under_budget(case: &Case, budget: u64, tally: &mut Tally) -> PlanOutcome {
    let device = case.device_spec(Bytes(budget), case.threads);
    let outcome = search(&case.request(&device, case.precision));
    check_packing_overhead(case, &outcome, tally);
    let arena = outcome.plan.devices[0].arena_bytes.0;
    tally.check("a plan that fits is within the load line", !outcome.plan.fits || arena <= budget, || {
        format!("{case}: {arena} bytes under {budget}")
    });
    outcome
}

/// Packs some recipes without the search, and checks that none needs fewer bytes than `bound`. `smallest` is the arena
/// of the smallest recipe that the search found, and `bound` the lower bound of that arena.
fn check_smallest_recipe(case: &Case, smallest: u64, bound: u64, tally: &mut Tally) {
    let device = case.device_spec(Bytes(1), case.threads);
    let request = case.request(&device, case.precision);
    let mut recipes: Vec<Recipe> = RecomputeLevel::ALL.iter().map(|&level| case.uniform(1, level)).collect();
    if case.optimizer.is_none() {
        recipes.truncate(1);
    } else if case.config.layers == 2 {
        let pairs = RecomputeLevel::ALL.iter().flat_map(|&a| RecomputeLevel::ALL.map(|b| vec![a, b]));
        recipes = pairs.map(|recompute| Recipe::on_device(1, recompute)).collect();
    } else {
        let mut rng = Rng::new(case.seed ^ 2, case.number);
        recipes.extend((0..6).map(|_| Recipe::on_device(1, rng.recompute_levels(case.config.layers))));
    }
    for recipe in recipes {
        let arena = plan_recipe(&request, &recipe).plan.devices[0].arena_bytes.0;
        tally.figure(
            "smaller than the named budget, bytes",
            smallest.saturating_sub(arena) as f64,
            arena >= bound,
            || format!("{case}: {recipe} needs {arena}, named {smallest}, whose bound is {bound}"),
        );
    }
}

fn check_packing_overhead(case: &Case, outcome: &PlanOutcome, tally: &mut Tally) {
    let (arena, bound) = (outcome.layout.placement.arena_bytes, outcome.layout.device.lower_bound_bytes);
    let percent = (arena as f64 / bound as f64 - 1.0) * 100.0;
    tally.figure("packing over the bound, percent", percent, arena >= bound, || {
        format!("{case}: {arena} for a bound of {bound}")
    });
    if arena > bound {
        let recipe = &outcome.plan.recipe;
        tally.note(format!("packing: {arena} over the bound {bound} ({percent:.4} %), {recipe}: {case}"));
    }
}

/// Checks that the measured bytes of each category are the planned ones.
pub fn check_arena_use(plan: &DevicePlan, used: Option<&BTreeMap<Category, Bytes>>, label: &str, tally: &mut Tally) {
    let planned = &plan.by_category;
    tally.check("measured categories have the planned bytes", used == Some(planned), || {
        format!("{label}: planned {planned:?}, used {used:?}")
    });
}

/// Checks that tensors that live at the same time share no bytes, and that every tensor is aligned and inside its
/// arena.
pub fn check_placement(case: &Case, set: &ProgramSet, layout: &Layout, tally: &mut Tally) {
    let malformed = check(set).err();
    tally.check("programs are well-formed", malformed.is_none(), || format!("{case}: {}", malformed.unwrap()));
    let placement = &layout.placement;
    let spaces = [
        (Space::Device, layout.device.persistent_bytes, placement.arena_bytes),
        (Space::Host, layout.host.persistent_bytes, placement.host_bytes),
    ];
    for (phase, (space, persistent_bytes, arena_bytes)) in set.phases.iter().flat_map(|p| spaces.map(|s| (p, s))) {
        let lifetimes = lifetimes(set, phase, space);
        let first = |i: usize| {
            let (id, slot) = lifetimes.slots[i][0];
            placement.offset(id, slot)
        };
        let mut wrong = None;
        for (i, a) in lifetimes.buffers.iter().enumerate() {
            let start = first(i);
            if !start.is_multiple_of(ALIGNMENT) || start + a.bytes > arena_bytes || start < persistent_bytes {
                wrong = Some(format!("{:?} at {start}", lifetimes.slots[i]));
            }
            for (j, b) in lifetimes.buffers.iter().enumerate().skip(i + 1) {
                let together = a.first <= b.last && b.first <= a.last && a.bytes > 0 && b.bytes > 0;
                if together && start < first(j) + b.bytes && first(j) < start + a.bytes {
                    wrong = Some(format!("{:?} on {:?}", lifetimes.slots[i], lifetimes.slots[j]));
                }
            }
        }
        tally
            .check("live tensors do not overlap", wrong.is_none(), || format!("{case}: {}", wrong.unwrap_or_default()));
    }
}

/// Runs other recipes of a case and compares their results with `plain`, the results of `recipe` (in f64, of a new run). Other recompute levels may
/// change no bit. Other micro-batch sizes may only change the order of sums.
fn compare_recipes(case: &Case, recipe: &Recipe, plain: &RunValues, tally: &mut Tally) {
    let device = case.device_spec(Bytes(1 << 40), case.threads);
    let mut rng = Rng::new(case.seed ^ 3, case.number);
    let run = |recipe: &Recipe, precision: DType, tally: &mut Tally| {
        let outcome = plan_recipe(&case.request(&device, precision), recipe);
        let label = format!("{case}, {precision}, {recipe}");
        check_plan_runs(case, &outcome, ExecutionOptions { precision, ..ExecutionOptions::new(case, &label) }, tally)
    };
    let size = u64::from(recipe.micro_batch);
    if case.optimizer.is_some() {
        let mixed = Recipe::on_device(recipe.micro_batch, rng.recompute_levels(case.config.layers));
        for other in [case.uniform(size, RecomputeLevel::Nothing), case.uniform(size, RecomputeLevel::Block), mixed] {
            if let Some(numbers) = run(&other, case.precision, tally) {
                tally.check("identical recipes keep every bit", numbers.same_bits(plain), || {
                    format!("{case}: {other} is not {recipe}: {:?} was {:?}", numbers.losses, plain.losses)
                });
            }
        }
    }
    let other_size = |rng: &mut Rng| {
        Recipe::on_device(rng.range(1, case.sequences) as u32, rng.recompute_levels(case.config.layers))
    };
    let others = [
        case.uniform(1, RecomputeLevel::Nothing),
        case.uniform(case.sequences, RecomputeLevel::Block),
        other_size(&mut rng),
    ];
    for (precision, most) in [(DType::F64, F64_DISTANCE), (case.precision, f64::INFINITY)] {
        // GPUs only compute in f32 and bf16.
        if precision == DType::F64 && case.device != TestDevice::Cpu {
            continue;
        }
        let first = if precision == case.precision { Some(plain.clone()) } else { run(recipe, precision, tally) };
        let Some(first) = first else { continue };
        for other in &others {
            let Some(numbers) = run(other, precision, tally) else { continue };
            let (distance, of) = first.distance(&numbers);
            let kind = format!("reordered: distance over micro-batches in {precision}");
            tally.figure(&kind, distance, distance <= most, || {
                format!("{case}: {other} from {recipe}: {of} is {distance:e} away")
            });
        }
    }
}

/// Runs a recipe with other numbers of threads, and checks that no bit differs from `plain`, its results in the case.
fn compare_thread_counts(case: &Case, recipe: &Recipe, plain: &RunValues, tally: &mut Tally) {
    for threads in (1..=3).filter(|&threads| threads != case.threads) {
        let device = case.device_spec(Bytes(1 << 40), threads);
        let outcome = plan_recipe(&case.request(&device, case.precision), recipe);
        let label = format!("{case}, with {threads} threads");
        let options = ExecutionOptions { threads, ..ExecutionOptions::new(case, &label) };
        if let Some(numbers) = check_plan_runs(case, &outcome, options, tally) {
            tally.check("the same bits for any number of threads", numbers.same_bits(plain), || {
                format!("{label}: {:?} was {:?}", numbers.losses, plain.losses)
            });
        }
    }
}
