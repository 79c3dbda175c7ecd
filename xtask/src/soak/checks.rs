//! What is shown of a case.

use super::case::{Case, Draw, Load};
use super::drive::{How, Numbers, drive};
use super::place::Place;
use super::tally::Tally;
use super::watch::Look;
use plimsoll_core::{Bytes, DType, Recipe, RecomputeLevel, Space};
use plimsoll_plan::layout::{ALIGNMENT, Layout};
use plimsoll_plan::lifetimes::lifetimes;
use plimsoll_plan::search::{Answer, plan_of, search};
use plimsoll_program::ProgramSet;
use plimsoll_program::passes::check::check;

/// How far losses and weights may be apart in f64.
const F64_DISTANCE: f64 = 1e-9;

/// Every op of a case beside the CPU's in f64.
pub fn run_ops(case: &Case) -> Tally {
    let mut tally = Tally::default();
    let device = case.device(Bytes(1 << 40), case.threads);
    let mut draw = Draw::new(case.seed ^ 4, case.number);
    let recipe = Recipe::on_device(draw.from(1, case.sequences) as u32, draw.levels(case.config.layers));
    let answer = plan_of(&case.question(&device, case.precision), &recipe);
    let label = case.to_string();
    fits_and_runs(case, &answer, How { look: Look::Twin, ..How::new(case, &label) }, &mut tally);
    tally
}

/// Everything that is shown of one case.
pub fn run_case(case: &Case) -> Tally {
    let mut tally = Tally::default();
    let Some(answer) = budgets(case, &mut tally) else { return tally };
    covers(case, &answer.plan.recipe, &mut tally);
    placed(case, &answer.set, &answer.layout, &mut tally);
    let label = case.to_string();
    let how = How::new(case, &label);
    let Some(plain) = fits_and_runs(case, &answer, how, &mut tally) else { return tally };
    tally.check("losses and logits are finite", plain.finite(), || format!("{label}: {:?}", plain.losses));
    let again = (case.place != Place::Cpu).then(|| fits_and_runs(case, &answer, how, &mut tally)).flatten();
    if let Some(again) = again {
        tally.check("same device, same plan, same bits", plain.same_bits(&again), || {
            format!("{label}: {:?} was {:?}", again.losses, plain.losses)
        });
    }
    if let Some(poisoned) = fits_and_runs(case, &answer, How { look: Look::EveryOp, ..how }, &mut tally) {
        let same = plain.same_bits(&poisoned);
        tally.check("poison in everything dead changes no bit", same, || {
            format!("{label}: {:?} was {:?}", poisoned.losses, plain.losses)
        });
    }
    other_recipes(case, &answer.plan.recipe, &plain, &mut tally);
    if case.place == Place::Cpu {
        other_threads(case, &answer.plan.recipe, &plain, &mut tally);
    }
    tally
}

fn covers(case: &Case, recipe: &Recipe, tally: &mut Tally) {
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
        tally.cover("refused and run at the named need");
    }
}

fn fits_and_runs(case: &Case, answer: &Answer, how: How, tally: &mut Tally) -> Option<Numbers> {
    let result = drive(case, answer, how, tally);
    tally.check("what fits runs", result.is_ok(), || format!("{}: {}", how.label, result.as_ref().unwrap_err()));
    result.ok()
}

/// Yes and no at many budgets; gives the plan that the case runs.
fn budgets(case: &Case, tally: &mut Tally) -> Option<Answer> {
    let mut draw = Draw::new(case.seed ^ 1, case.number);
    let mut ask = |budget: u64| {
        let device = case.device(Bytes(budget), case.threads);
        let answer = search(&case.question(&device, case.precision));
        overhead(case, &answer, tally);
        let arena = answer.plan.devices[0].arena_bytes.0;
        tally.check("a plan that fits is under the load line", !answer.plan.fits || arena <= budget, || {
            format!("{case}: {arena} bytes under {budget}")
        });
        answer
    };
    let plenty = ask(1 << 40);
    let refused = ask(1);
    let most = plenty.plan.devices[0].arena_bytes.0;
    let need = refused.plan.needs.first().map_or(0, |need| need.budget_bytes.0);
    let at_need = ask(need);
    let below: Vec<(u64, Answer)> = [need - 1, need.saturating_sub(1 << 20)].map(|budget| (budget, ask(budget))).into();
    let between: Vec<u64> = (0..3).map(|_| draw.from(need.min(most), most.max(need))).collect();
    let between: Vec<(u64, Answer)> = between.into_iter().map(|budget| (budget, ask(budget))).collect();
    let chosen = match case.load {
        Load::TooSmall => at_need.clone(),
        Load::Plenty => plenty.clone(),
        Load::Between(share) => ask(need.min(most) + (most.saturating_sub(need) as f64 * share) as u64),
    };

    tally.check("no false no", plenty.plan.fits, || format!("{case}: nothing fits"));
    tally.check("what is refused names its need", !refused.plan.fits && need > 1, || {
        format!("{case}: {:?}", refused.plan.needs)
    });
    let arena = at_need.plan.devices[0].arena_bytes.0;
    tally.check("the named need fits, to the byte", at_need.plan.fits && arena == need, || {
        format!("{case}: needs {need}, has {arena}")
    });
    for (budget, answer) in below {
        let named = answer.plan.needs.first().map_or(0, |need| need.budget_bytes.0);
        tally.check("less than the need is refused", !answer.plan.fits && named == need, || {
            format!("{case}: needs {need}, at {budget}: fits {}, names {named}", answer.plan.fits)
        });
    }
    for (budget, answer) in &between {
        tally.check("no false no", answer.plan.fits, || format!("{case}: needs {need}, refused at {budget}"));
    }
    leaner(case, need, refused.layout.device.lower_bound_bytes, tally);
    tally.check("no false no", chosen.plan.fits, || {
        format!("{case}: needs {need}, the load line of the case is refused")
    });
    chosen.plan.fits.then_some(chosen)
}

/// Recipes are laid out without the search: none may be smaller than the bound of what the search calls the least. (By
/// how much packing misses the bound is a figure of its own.)
fn leaner(case: &Case, need: u64, bound: u64, tally: &mut Tally) {
    let device = case.device(Bytes(1), case.threads);
    let question = case.question(&device, case.precision);
    let mut recipes: Vec<Recipe> = RecomputeLevel::ALL.iter().map(|&level| case.uniform(1, level)).collect();
    if case.optimizer.is_none() {
        recipes.truncate(1);
    } else if case.config.layers == 2 {
        let pairs = RecomputeLevel::ALL.iter().flat_map(|&a| RecomputeLevel::ALL.map(|b| vec![a, b]));
        recipes = pairs.map(|recompute| Recipe::on_device(1, recompute)).collect();
    } else {
        let mut draw = Draw::new(case.seed ^ 2, case.number);
        recipes.extend((0..6).map(|_| Recipe::on_device(1, draw.levels(case.config.layers))));
    }
    for recipe in recipes {
        let arena = plan_of(&question, &recipe).plan.devices[0].arena_bytes.0;
        tally.figure("smaller than the named need, bytes", need.saturating_sub(arena) as f64, arena >= bound, || {
            format!("{case}: {recipe} needs {arena}, named {need}, whose bound is {bound}")
        });
    }
}

fn overhead(case: &Case, answer: &Answer, tally: &mut Tally) {
    let (arena, bound) = (answer.layout.placement.arena_bytes, answer.layout.device.lower_bound_bytes);
    let percent = (arena as f64 / bound as f64 - 1.0) * 100.0;
    tally.figure("packing over the bound, percent", percent, arena >= bound, || {
        format!("{case}: {arena} for a bound of {bound}")
    });
    if arena > bound {
        let recipe = &answer.plan.recipe;
        tally.note(format!("packing: {arena} over the bound {bound} ({percent:.4} %), {recipe}: {case}"));
    }
}

/// Nothing that lives at one time shares bytes; everything is aligned and inside.
pub fn placed(case: &Case, set: &ProgramSet, layout: &Layout, tally: &mut Tally) {
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
        tally.check("what lives together lies apart", wrong.is_none(), || {
            format!("{case}: {}", wrong.unwrap_or_default())
        });
    }
}

/// Recompute changes no bit; micro-batches change nothing but the order of sums.
fn other_recipes(case: &Case, recipe: &Recipe, plain: &Numbers, tally: &mut Tally) {
    let device = case.device(Bytes(1 << 40), case.threads);
    let mut draw = Draw::new(case.seed ^ 3, case.number);
    let run = |recipe: &Recipe, precision: DType, tally: &mut Tally| {
        let answer = plan_of(&case.question(&device, precision), recipe);
        let label = format!("{case}, {precision}, {recipe}");
        fits_and_runs(case, &answer, How { precision, ..How::new(case, &label) }, tally)
    };
    let size = u64::from(recipe.micro_batch);
    if case.optimizer.is_some() {
        let mixed = Recipe::on_device(recipe.micro_batch, draw.levels(case.config.layers));
        for other in [case.uniform(size, RecomputeLevel::Nothing), case.uniform(size, RecomputeLevel::Block), mixed] {
            if let Some(numbers) = run(&other, case.precision, tally) {
                tally.check("identical is identical", numbers.same_bits(plain), || {
                    format!("{case}: {other} is not {recipe}: {:?} was {:?}", numbers.losses, plain.losses)
                });
            }
        }
    }
    let other_size =
        |draw: &mut Draw| Recipe::on_device(draw.from(1, case.sequences) as u32, draw.levels(case.config.layers));
    let others = [
        case.uniform(1, RecomputeLevel::Nothing),
        case.uniform(case.sequences, RecomputeLevel::Block),
        other_size(&mut draw),
    ];
    for (precision, most) in [(DType::F64, F64_DISTANCE), (case.precision, f64::INFINITY)] {
        // GPUs compute in f32 and bf16 alone.
        if precision == DType::F64 && case.place != Place::Cpu {
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

/// The number of threads changes no bit.
fn other_threads(case: &Case, recipe: &Recipe, plain: &Numbers, tally: &mut Tally) {
    for threads in (1..=3).filter(|&threads| threads != case.threads) {
        let device = case.device(Bytes(1 << 40), threads);
        let answer = plan_of(&case.question(&device, case.precision), recipe);
        let label = format!("{case}, with {threads} threads");
        let how = How { threads, ..How::new(case, &label) };
        if let Some(numbers) = fits_and_runs(case, &answer, how, tally) {
            tally.check("the same bits for any number of threads", numbers.same_bits(plain), || {
                format!("{label}: {:?} was {:?}", numbers.losses, plain.losses)
            });
        }
    }
}
