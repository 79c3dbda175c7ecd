//! A plan as text for people: the table of bytes, the recipes that were tried, and the failure with remedies where the
//! plan does not fit.

mod team;

use crate::remedies::RemedySettings;
use crate::text::{columns, columns_with_notes, count, percent, seconds, wrapped};
use plimsoll_core::{
    Bytes, Category, Class, DevicePlan, DeviceSpec, Failure, Fallback, Offload, Plan, PredictedGeneration, Recipe,
    Recommendation, Rung, RungEffect, RungPrice, SmallestRecipe, WorkKind, format_count, peak_point,
};
use plimsoll_plan::search::TriedRecipe;

/// Largest number of characters in a line of text. A longer line would wrap on a narrow terminal.
const WIDTH: usize = 80;
/// Largest number of devices that one table shows side by side.
const DEVICES_PER_TABLE: usize = 4;

/// A plan to display, with its title, its devices, the recipes that the planner tried, and the rungs that the user
/// allowed.
#[derive(Clone, Copy, Debug)]
pub struct PlanView<'a> {
    /// The planned run in one line, such as `sums: 0.33 M parameters, 3072 tokens a step`.
    pub title: &'a str,
    /// The plan.
    pub plan: &'a Plan,
    /// Specifications of the plan's devices, in the plan's order; may be empty. They state whether rates and charges
    /// were measured.
    pub specs: &'a [DeviceSpec],
    /// The recipes that the planner tried. Those with less loss of accuracy come first; among equals, the fastest comes
    /// first. Empty if the recipe was pinned by the user or stored with the run.
    pub tried: &'a [TriedRecipe],
    /// The lossy rungs that the user allowed. Empty if the plan must not lose accuracy.
    pub allow: &'a [Rung],
}

/// Formats a plan as tables of at most 80 columns, with up to four devices each. Ends with a line break.
pub fn table(view: &PlanView) -> String {
    let PlanView { plan, specs, .. } = view;
    let mut text = wrapped(&format!("plan for {}", view.title), WIDTH, "  ");
    if let Some(fallback) = &plan.fallback {
        text += &wrapped(&fallback_note(plan, fallback), WIDTH, "  ");
    }
    if plan.team.is_empty() {
        text += &team::excluded(plan);
        text += &wrapped(&format!("recipe: {} ({})", plan.recipe, describe_class(plan.class)), WIDTH, "  ");
        text += &wrapped(&format!("why: {}", choice_reason(view)), WIDTH, "  ");
    } else {
        text += &team::shares(view);
    }

    let mut columns_of: Vec<(&DevicePlan, Option<&DeviceSpec>)> =
        plan.devices.iter().enumerate().map(|(index, device)| (device, specs.get(index))).collect();
    if plan.host.arena_bytes > Bytes::ZERO {
        columns_of.push((&plan.host, None));
    }
    columns_of.extend(plan.file.as_ref().map(|file| (file, None)));
    for devices in columns_of.chunks(DEVICES_PER_TABLE) {
        text.push('\n');
        text += &columns(&device_rows(devices));
    }
    text += &team::machine_hosts(plan);
    text.push('\n');
    if plan.predicted.step_seconds > 0.0 {
        text += &format!(
            "predicted: {} a step, {} tokens/s{}\n",
            seconds(plan.predicted.step_seconds),
            count(plan.predicted.tokens_per_second),
            source_of_rates(view),
        );
    }
    if let Some(PredictedGeneration { sequences, token_seconds }) = plan.generation {
        text += &format!(
            "predicted: {} for a token of each of {sequences} completions, {} tokens/s\n",
            seconds(token_seconds),
            count(sequences as f64 / token_seconds),
        );
    }
    text += &plan.smallest.as_ref().map_or_else(String::new, smallest_recipe);
    if plan.checkpoint_bytes > Bytes::ZERO {
        text += &format!("a checkpoint: {}\n", plan.checkpoint_bytes);
    }
    for note in plan.shortfall_note.iter().chain(&plan.contention_note) {
        text += &wrapped(note, WIDTH, "  ");
    }
    if let Some(note) = lossy_rungs_note(view) {
        text += &wrapped(&note, WIDTH, "  ");
    }
    text
}

/// Formats recommendations as paragraphs, each with its command; says so if there are none.
pub fn recommendations_text(recommendations: &[Recommendation]) -> String {
    if recommendations.is_empty() {
        return "\nno change of settings is predicted to make this run faster\n".to_owned();
    }
    let paragraph = |recommendation: &Recommendation| {
        let Recommendation { text, command, .. } = recommendation;
        wrapped(&format!("- {text}"), WIDTH, "  ") + &format!("    {command}\n")
    };
    "\nfaster, as predicted:\n".to_owned() + &recommendations.iter().map(paragraph).collect::<String>()
}

/// Formats the recipe of the smallest peak with the bytes of each kind of work.
fn smallest_recipe(smallest: &SmallestRecipe) -> String {
    let SmallestRecipe { recipe, slots, peak_bytes, by_program, step_seconds } = smallest;
    let sentence = format!(
        "smallest load line (predicted): {peak_bytes}, with {recipe}, {} at once; {} a step",
        format_count(*slots as usize, "completion"),
        seconds(*step_seconds),
    );
    let mut rows = vec![vec!["arena in each Program there".to_owned(), String::new()]];
    let kinds = WORK_KINDS.iter().filter_map(|work| Some((work, by_program.get(work)?)));
    rows.extend(kinds.map(|(work, bytes)| vec![format!("  {work}"), bytes.to_string()]));
    wrapped(&sentence, WIDTH, "  ") + &columns(&rows)
}

/// Describes the reason for the fallback to the CPU, and the predicted throughput there.
fn fallback_note(plan: &Plan, fallback: &Fallback) -> String {
    format!("{fallback}; predicted on the CPU {} tokens/s", count(plan.predicted.tokens_per_second))
}

/// Describes the effect of a class of rungs on the results of a run.
pub(crate) fn describe_class(class: Class) -> &'static str {
    match class {
        Class::Identical => "identical: the same bits as without it",
        Class::Reordered => "reordered: equal up to the order of sums",
        Class::Lossy => "lossy: other arithmetic, as allowed",
    }
}

/// Explains why the plan has this recipe and not a faster one, by the recipes that were tried.
fn choice_reason(view: &PlanView) -> String {
    let PlanView { plan, tried, .. } = view;
    if !plan.fits {
        return "no allowed recipe fits; this is the smallest".to_owned();
    }
    let Some(place) = tried.iter().position(|tried| tried.recipe == plan.recipe) else {
        return "it is pinned, or stored with the run".to_owned();
    };
    // Recipes with less loss come first. That the plan has more loss means that none of them fits.
    let (alike, less): (Vec<&TriedRecipe>, Vec<&TriedRecipe>) =
        tried[..place].iter().partition(|tried| tried.recipe.rungs == plan.rungs);
    let less_loss = match less.len() {
        0 => String::new(),
        count => format!("; none of {} with less loss fits", format_count(count, "recipe")),
    };
    let all = tried.iter().filter(|tried| tried.recipe.rungs == plan.rungs).count();
    let reason = match alike.first() {
        None => format!("the fastest of {}, by prediction, and it fits", format_count(all, "recipe")),
        Some(fastest) => format!(
            "{} would be faster by prediction, but {} not fit: the fastest ({}) would hold {}",
            format_count(alike.len(), "recipe"),
            if alike.len() == 1 { "does" } else { "do" },
            fastest.recipe,
            fastest.peak_bytes,
        ),
    };
    reason + &less_loss
}

/// Returns the rows of one table with a column per device: bytes by category, the total against the load line, and
/// arena bytes by kind of Program.
fn device_rows(devices: &[(&DevicePlan, Option<&DeviceSpec>)]) -> Vec<Vec<String>> {
    let row = |label: &str, cell: &dyn Fn(&DevicePlan, Option<&DeviceSpec>) -> String| {
        let cells = devices.iter().map(|(plan, spec)| cell(plan, *spec));
        std::iter::once(label.to_owned()).chain(cells).collect::<Vec<_>>()
    };
    let mut rows = vec![row("when the arena is fullest", &|plan, _| plan.name.clone())];
    if devices.iter().any(|(plan, _)| plan.simulated) {
        rows.push(row("", &|plan, _| if plan.simulated { "simulated".into() } else { String::new() }));
    }
    for category in CATEGORIES {
        let bytes = |plan: &DevicePlan| plan.by_category.get(&category).copied().unwrap_or_default();
        if devices.iter().any(|(plan, _)| bytes(plan) > Bytes::ZERO) {
            rows.push(row(&format!("  {category}"), &|plan, _| bytes(plan).to_string()));
        }
    }
    rows.push(row("arena", &|plan, _| plan.arena_bytes.to_string()));
    rows.push(row("  bound of live bytes", &|plan, _| plan.lower_bound_bytes.to_string()));
    rows.push(row("  packing over the bound", &|plan, _| percent(packing_overhead(plan), 2)));
    let charges = match source_of_charges(devices) {
        Some(source) => format!("charges ({source})"),
        None => "charges".to_owned(),
    };
    rows.push(row(&charges, &|plan, _| plan.charges_bytes.to_string()));
    if charges == "charges" {
        rows.push(row("", &|_, spec| spec.map_or("", |spec| measured_or(spec.charges_measured, "assumed")).to_owned()));
    }
    rows.push(row("peak (predicted)", &|plan, _| plan.peak_bytes.to_string()));
    rows.push(row("load line", &|plan, _| plan.budget_bytes.to_string()));
    rows.push(row("  left under the line", &|plan, _| match plan.budget_bytes.0.checked_sub(plan.peak_bytes.0) {
        Some(left) => Bytes(left).to_string(),
        None => format!("-{}", plan.peak_bytes - plan.budget_bytes),
    }));
    rows.push(row("arena in each Program", &|_, _| String::new()));
    for work in WORK_KINDS {
        if devices.iter().any(|(plan, _)| plan.by_program.contains_key(&work)) {
            rows.push(row(&format!("  {work}"), &|plan, _| {
                plan.by_program.get(&work).map_or_else(|| "-".to_owned(), Bytes::to_string)
            }));
        }
    }
    rows
}

const CATEGORIES: [Category; 7] = [
    Category::Weight,
    Category::Gradient,
    Category::Optimizer,
    Category::Activation,
    Category::Workspace,
    Category::Communication,
    Category::Staging,
];

const WORK_KINDS: [WorkKind; 10] = [
    WorkKind::Load,
    WorkKind::Forward,
    WorkKind::Backward,
    WorkKind::Update,
    WorkKind::Evaluate,
    WorkKind::Score,
    WorkKind::Reference,
    WorkKind::Save,
    WorkKind::Generate,
    WorkKind::Replan,
];

/// Returns the fraction by which the arena is larger than the largest sum of simultaneously live bytes, its lower
/// bound. Returns 0 if the lower bound is 0.
fn packing_overhead(plan: &DevicePlan) -> f64 {
    match plan.lower_bound_bytes.0 {
        0 => 0.0,
        bound => plan.arena_bytes.0 as f64 / bound as f64 - 1.0,
    }
}

/// Returns `measured` or `assumed`, if this is true of the charges of all devices with a spec. Returns `None` if they
/// differ, or if none has a spec.
fn source_of_charges(devices: &[(&DevicePlan, Option<&DeviceSpec>)]) -> Option<&'static str> {
    let mut words =
        devices.iter().filter_map(|(_, spec)| *spec).map(|spec| measured_or(spec.charges_measured, "assumed"));
    let first = words.next()?;
    words.all(|word| word == first).then_some(first)
}

fn measured_or(measured: bool, otherwise: &'static str) -> &'static str {
    if measured { "measured" } else { otherwise }
}

/// Returns words in parentheses that name the source of the rates behind the predicted speed: a simulation, a
/// measurement, or published and assumed figures.
fn source_of_rates(view: &PlanView) -> &'static str {
    if view.plan.devices.iter().any(|device| device.simulated) {
        " (simulated devices)"
    } else if view.specs.iter().all(|spec| spec.rates.measured) {
        " (from measured rates)"
    } else {
        " (from published or assumed rates)"
    }
}

/// Lists the lossy rungs that the plan takes, and the allowed lossy rungs that it does not take. Returns `None` if
/// there is none of either.
fn lossy_rungs_note(view: &PlanView) -> Option<String> {
    let is_taken = |rung: &Rung| view.plan.rungs.contains(rung);
    let allowed = list_rungs(|rung| view.allow.contains(rung) && !is_taken(rung));
    match (&*list_rungs(is_taken), &*allowed) {
        ("", "") => None,
        ("", allowed) => Some(format!("allowed but not needed: {allowed}")),
        (taken, "") => Some(format!("lossy rungs taken: {taken}")),
        (taken, allowed) => Some(format!("lossy rungs taken: {taken}; allowed but not needed: {allowed}")),
    }
}

/// Lists the names of the rungs for which `is_listed` is true, in the order of the ladder.
pub fn list_rungs(is_listed: impl Fn(&Rung) -> bool) -> String {
    Rung::ALL.into_iter().filter(is_listed).map(|rung| rung.to_string()).collect::<Vec<_>>().join(", ")
}

/// Formats the explanation of a plan (`--explain`): the ops that set the peaks, the alternatives for a team, and the
/// bytes that each rung frees and the seconds that it adds. For a single device, the recipes that were tried follow.
pub fn explain(view: &PlanView) -> String {
    let peaks: String = view.plan.devices.iter().map(peaks).collect();
    let alternatives = peaks + &team::alternatives(view.plan);
    if view.plan.team.is_empty() {
        return alternatives + &rung_tables(&view.plan.ladder, "") + &recipes_tried(view);
    }
    alternatives + &team::ladders(view.plan)
}

/// Formats the peak of a device, with the op that sets it, and a table of the peaks of each kind of work. Ends with an
/// empty line. Returns an empty text for a plan without a timeline.
fn peaks(device: &DevicePlan) -> String {
    let Some(peak) = peak_point(&device.timeline, None) else { return String::new() };
    let sentence = format!("{}: peak {} {} (predicted)", device.name, device.peak_bytes, peak.describe());
    let mut rows = vec![["arena in each Program", "peak"].map(str::to_owned).to_vec()];
    let mut notes = vec!["set by".to_owned()];
    for (work, point) in WORK_KINDS.iter().filter_map(|work| Some((work, peak_point(&device.timeline, Some(*work))?))) {
        rows.push(vec![work.to_string(), point.bytes.to_string()]);
        notes.push(point.describe_place());
    }
    wrapped(&sentence, WIDTH, "  ") + &columns_with_notes(&rows, &notes, WIDTH) + "\n"
}

/// Formats a memory ladder as two tables: the effect of each rung alone, and the effect of each rung that the plan
/// takes. `prefix` begins both titles and names the devices. The text ends with an empty line. Returns an empty text
/// for an empty ladder.
fn rung_tables(ladder: &[RungPrice], prefix: &str) -> String {
    if ladder.is_empty() {
        return String::new();
    }
    let header = || vec![["rung", "frees", "costs", "tokens/s", "accuracy impact"].map(str::to_owned).to_vec()];
    let (mut alone, mut taken) = (header(), header());
    alone.extend(ladder.iter().map(|rung| rung_row(rung, &rung.alone)));
    taken.extend(ladder.iter().filter_map(|rung| Some(rung_row(rung, rung.in_plan.as_ref()?))));
    let title = |text: &str| wrapped(&format!("{prefix}{text} (predicted)"), WIDTH, "  ");
    let mut text = title("each rung alone, at its maximum, compared with the plain recipe") + &columns(&alone);
    text += "\n";
    text += &title("rungs of this plan, each compared with the plan without it");
    text += &if taken.len() > 1 { columns(&taken) } else { "none: this is the plain recipe\n".to_owned() };
    text + "\n"
}

/// Returns the table row of a rung: its name, its `effect` (bytes freed, seconds added, tokens per second), and its
/// impact on accuracy. The effect is that of the rung alone or that within the plan.
fn rung_row(rung: &RungPrice, effect: &RungEffect) -> Vec<String> {
    let allowed = if rung.allowed { "" } else { " (not allowed)" };
    vec![
        rung.rung.clone() + allowed,
        match effect {
            // A scratch file only frees memory of the host.
            RungEffect { freed_bytes: 0, host_bytes: ..0, file_bytes: 1.., .. } => {
                format!("{} of the host", Bytes(effect.host_bytes.unsigned_abs()))
            }
            RungEffect { freed_bytes: ..0, .. } => "nothing".to_owned(),
            _ => Bytes(effect.freed_bytes.unsigned_abs()).to_string(),
        },
        signed_seconds(effect.added_seconds),
        // A storage-only worker computes no tokens.
        if effect.tokens_per_second > 0.0 { count(effect.tokens_per_second) } else { "-".to_owned() },
        rung.accuracy_impact.clone(),
    ]
}

fn signed_seconds(number: f64) -> String {
    // Smaller differences are rounding errors.
    let sign = if number < -5e-7 { "-" } else { "+" };
    format!("{sign}{}", seconds(number.abs()))
}

/// Formats the recipes that were tried as a table, in the order of [`PlanView::tried`].
fn recipes_tried(view: &PlanView) -> String {
    let lossy = view.tried.iter().any(|tried| !tried.recipe.rungs.is_empty());
    let row = |recipe: String, rungs: String, others: [String; 3]| {
        std::iter::once(recipe).chain(lossy.then_some(rungs)).chain(others).collect::<Vec<_>>()
    };
    let rungs = |recipe: &Recipe| match recipe.rungs.as_slice() {
        [] => "none".to_owned(),
        rungs => rungs.iter().map(Rung::to_string).collect::<Vec<_>>().join(", "),
    };
    let longest = if lossy { 28 } else { 40 };
    let mut rows = vec![row("recipe".into(), "rungs".into(), ["peak", "step", "verdict"].map(str::to_owned))];
    let mut is_taken_above = false;
    for tried in view.tried {
        let taken = view.plan.fits && tried.recipe == view.plan.recipe;
        let over = view.plan.devices.first().map(|device| tried.peak_bytes.saturating_sub(device.budget_bytes));
        let verdict = match over {
            _ if taken => "taken".to_owned(),
            Some(over) if !tried.fits && over > Bytes::ZERO => format!("{over} over"),
            _ if !tried.fits => "over".to_owned(),
            _ if is_taken_above => "fits, slower".to_owned(),
            _ => "fits".to_owned(),
        };
        is_taken_above |= taken;
        let figures = [tried.peak_bytes.to_string(), seconds(tried.step_seconds), verdict];
        rows.push(row(short(&tried.recipe, longest), rungs(&tried.recipe), figures));
    }
    let mut text = format!("{} tried; bytes and seconds are predicted\n", format_count(view.tried.len(), "recipe"));
    let offloads = view.tried.iter().map(|tried| offload_line(&tried.recipe.offload));
    let offloads = std::iter::once(String::new()).chain(offloads);
    for (line, offload) in columns(&rows).lines().zip(offloads) {
        text += &format!("{line}\n{offload}");
    }
    text
}

/// Formats the offload of a recipe as one or more lines, which are printed below the recipe's row of a table. Returns
/// an empty text if nothing is offloaded.
fn offload_line(offload: &Offload) -> String {
    if offload.is_nothing() {
        return String::new();
    }
    let file = match offload.file.is_nothing() {
        true => String::new(),
        false => format!("; of these in the scratch file: {}", offload.file),
    };
    format!("  {}", wrapped(&format!("on the host: {offload}{file}"), WIDTH - 2, "    "))
}

/// Formats micro-batch and recompute levels of a recipe: `32: 2 × nothing, 1 × block`. Cuts the text after `longest`
/// characters and then adds `…`.
fn short(recipe: &Recipe, longest: usize) -> String {
    let text = format!("{}: {}", recipe.micro_batch, plimsoll_core::describe_levels(&recipe.recompute));
    match text.char_indices().nth(longest) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Returns the failure for a plan that does not fit. Each pair of a remedy and its command becomes a hint, in the given
/// order. If `numbered`, each hint begins with a number, by which the user chooses a remedy. Without remedies, a hint
/// states the device's `total_memory`, unless that is `None` (unknown).
pub(crate) fn does_not_fit(
    plan: &Plan,
    remedies: &[(RemedySettings, String)],
    total_memory: Option<Bytes>,
    numbered: bool,
) -> Failure {
    let over = plan.devices.iter().find(|device| device.peak_bytes > device.budget_bytes);
    let message = match over {
        Some(device) => format!(
            "does not fit: the smallest recipe holds {} on {}, the load line is {}",
            device.peak_bytes, device.name, device.budget_bytes
        ),
        None => "does not fit under the load lines".to_owned(),
    };
    let failure = Failure::does_not_fit(message);
    if let (Some(device), Some(total), []) = (over, total_memory, remedies) {
        return failure
            .hint(format!("no load line is enough: {} has {total}", device.name))
            .hint("take a larger device, a smaller model, or a shorter data.sequence");
    }
    remedies.iter().enumerate().fold(failure, |failure, (number, (remedy, command))| {
        let number = if numbered { format!("{}: ", number + 1) } else { String::new() };
        failure.hint(number + &remedy_hint(remedy, command, over.map(|device| device.budget_bytes)))
    })
}

/// Formats one remedy with its command. `present` is the present load line of the device that is too small; `None` if
/// the devices have enough memory and only the host has too little.
fn remedy_hint(settings: &RemedySettings, command: &str, present: Option<Bytes>) -> String {
    let RemedySettings { remedy, budget_bytes, .. } = settings;
    let names: Vec<String> = remedy.allow.iter().map(Rung::to_string).collect();
    let with = if names.is_empty() { String::new() } else { format!(" with {}", names.join(" and ")) };
    let host = remedy.host_bytes.map_or(String::new(), |host| format!(", {host} on the host"));
    let file = remedy.file_bytes.map_or(String::new(), |file| format!(", {file} in a scratch file"));
    let holds = match remedy.peak_bytes {
        Some(peak) => format!(", predicted {peak} of {budget_bytes}"),
        None if present.is_some_and(|present| remedy.budget_bytes <= present) => String::new(),
        None => format!(" from {budget_bytes}"),
    };
    format!("it fits{with}{holds}{host}{file}: {command}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{DeviceKind, Link, Predicted, Rates, RecomputeLevel, Remedy};
    use std::collections::BTreeMap;

    fn spec(name: &str, kind: DeviceKind, charges_measured: bool) -> DeviceSpec {
        DeviceSpec {
            name: name.into(),
            kind,
            budget: Bytes::mib(48),
            charges: Bytes::mib(4),
            charges_measured,
            team_link: Link::MEMORY,
            link_measured: false,
            nccl: None,
            threads: 2,
            rates: Rates {
                f32_flops: 2e11,
                bf16_flops: 0.0,
                memory_bytes_per_second: 2e10,
                op_seconds: 1e-6,
                host_link: Link { bytes_per_second: 2e10, latency_seconds: 0.0 },
                measured: true,
                ops: plimsoll_core::OpRates::default(),
            },
        }
    }

    fn device(name: &str, simulated: bool) -> DevicePlan {
        DevicePlan {
            name: name.into(),
            simulated,
            budget_bytes: Bytes::mib(48),
            arena_bytes: Bytes::mib(36),
            charges_bytes: Bytes::mib(4),
            peak_bytes: Bytes::mib(40),
            by_category: BTreeMap::from([(Category::Weight, Bytes::mib(4)), (Category::Activation, Bytes::mib(32))]),
            by_program: BTreeMap::from([(WorkKind::Load, Bytes::mib(8)), (WorkKind::Backward, Bytes::mib(36))]),
            timeline: vec![],
            lower_bound_bytes: Bytes::mib(36),
        }
    }

    fn recipe(micro_batch: u32, level: RecomputeLevel) -> Recipe {
        Recipe::on_device(micro_batch, vec![RecomputeLevel::Nothing, RecomputeLevel::Nothing, level])
    }

    fn plan() -> Plan {
        Plan {
            fits: true,
            recipe: recipe(64, RecomputeLevel::Block),
            class: Class::Reordered,
            rungs: vec![],
            checkpoint_bytes: Bytes::mib(12),
            devices: vec![device("cpu", false)],
            host: DevicePlan::default(),
            file: None,
            predicted: Predicted { step_seconds: 0.0841, tokens_per_second: 48_704.0 },
            generation: None,
            smallest: None,
            needs: vec![],
            planned_for: None,
            contention_note: None,
            shortfall_note: None,
            algorithms: None,
            fallback: None,
            ladder: vec![],
            recommendations: vec![],
            machine_hosts: vec![],
            parallelism: None,
            team: vec![],
            scaling_efficiency: None,
            link_seconds: None,
            faster_alone: None,
            excluded: vec![],
            alternatives: vec![],
        }
    }

    fn tried() -> Vec<TriedRecipe> {
        let tried = |recipe, mib, step_seconds, fits| TriedRecipe {
            recipe,
            peak_bytes: Bytes::mib(mib),
            host_bytes: Bytes::ZERO,
            file_bytes: Bytes::ZERO,
            step_seconds,
            fits,
        };
        vec![
            tried(recipe(256, RecomputeLevel::Nothing), 130, 0.080, false),
            tried(recipe(64, RecomputeLevel::Block), 40, 0.0841, true),
            tried(recipe(32, RecomputeLevel::Nothing), 36, 0.086, true),
        ]
    }

    #[test]
    fn table_lists_every_byte() {
        let (plan, tried) = (plan(), tried());
        let view = PlanView {
            title: "sums: 0.33 M parameters, 4096 tokens a step",
            plan: &plan,
            specs: &[spec("cpu", DeviceKind::Cpu, true)],
            tried: &tried,
            allow: &[Rung::Bf16, Rung::Nf4],
        };
        let expected = "\
plan for sums: 0.33 M parameters, 4096 tokens a step
recipe: micro-batch 64, recompute 2 × nothing, 1 × block (reordered: equal up to
  the order of sums)
why: 1 recipe would be faster by prediction, but does not fit: the fastest
  (micro-batch 256, recompute nothing) would hold 130.00 MiB

when the arena is fullest        cpu
  weight                    4.00 MiB
  activation               32.00 MiB
arena                      36.00 MiB
  bound of live bytes      36.00 MiB
  packing over the bound      0.00 %
charges (measured)          4.00 MiB
peak (predicted)           40.00 MiB
load line                  48.00 MiB
  left under the line       8.00 MiB
arena in each Program
  load                      8.00 MiB
  backward                 36.00 MiB

predicted: 84.1 ms a step, 48.7 k tokens/s (from measured rates)
a checkpoint: 12.00 MiB
allowed but not needed: bf16, nf4
";
        assert_eq!(table(&view), expected);
        assert_eq!(
            explain(&view),
            "\
3 recipes tried; bytes and seconds are predicted
recipe                            peak     step         verdict
256: nothing                130.00 MiB  80.0 ms  82.00 MiB over
64: 2 × nothing, 1 × block   40.00 MiB  84.1 ms           taken
32: nothing                  36.00 MiB  86.0 ms    fits, slower
"
        );
    }

    #[test]
    fn tried_recipes_show_their_offload() {
        let (plan, mut tried) = (plan(), tried());
        let optimizer = Offload { optimizer: 3, update: true, ..Offload::NOTHING };
        let file = plimsoll_core::ScratchOffload { optimizer: 2, gradients: 1, weights: 1 };
        let all = Offload { gradients: 3, weights: 3, inputs: 3, embedding: true, head: true, file, ..optimizer };
        tried[2].recipe = tried[1].recipe.clone();
        tried[1].recipe.offload = optimizer;
        tried[2].recipe.offload = all;
        let view = PlanView { title: "sums", plan: &plan, specs: &[], tried: &tried, allow: &[] };
        assert_eq!(
            explain(&view),
            "\
3 recipes tried; bytes and seconds are predicted
recipe                            peak     step         verdict
256: nothing                130.00 MiB  80.0 ms  82.00 MiB over
64: 2 × nothing, 1 × block   40.00 MiB  84.1 ms            fits
  on the host: optimizer of 3 layers, the update
64: 2 × nothing, 1 × block   36.00 MiB  86.0 ms            fits
  on the host: optimizer of 3 layers, gradients of 3, weights of 3, inputs of 3,
    embedding, head, the update; of these in the scratch file: optimizer of 2
    layers, gradients of 1, weights of 1
"
        );
    }

    #[test]
    fn explain_shows_bytes_cost_and_impact_of_rungs() {
        let effect = |freed: i64, added_seconds| RungEffect {
            freed_bytes: freed << 20,
            host_bytes: 0,
            file_bytes: 0,
            added_seconds,
            tokens_per_second: 1234.0,
        };
        let rung = |rung: &str, class, accuracy_impact: &str, allowed, in_plan| RungPrice {
            rung: rung.into(),
            class,
            accuracy_impact: accuracy_impact.into(),
            allowed,
            alone: effect(2048, 0.25),
            in_plan,
        };
        let ladder = vec![
            rung("micro_batch", Class::Reordered, "the order of sums", true, Some(effect(-3, -0.004))),
            rung("offload.optimizer", Class::Identical, "nothing", true, None),
            rung("nf4", Class::Lossy, Rung::Nf4.accuracy_impact(), false, None),
        ];
        let plan = Plan { ladder, ..plan() };
        let text = explain(&PlanView { title: "sums", plan: &plan, specs: &[], tried: &[], allow: &[] });
        assert!(
            text.starts_with(
                "\
each rung alone, at its maximum, compared with the plain recipe (predicted)
rung                  frees      costs  tokens/s       accuracy impact
micro_batch        2.00 GiB  +250.0 ms    1.23 k     the order of sums
offload.optimizer  2.00 GiB  +250.0 ms    1.23 k               nothing
nf4 (not allowed)  2.00 GiB  +250.0 ms    1.23 k  frozen base in 4 bit

rungs of this plan, each compared with the plan without it (predicted)
rung           frees    costs  tokens/s    accuracy impact
micro_batch  nothing  -4.0 ms    1.23 k  the order of sums

"
            ),
            "{text}"
        );
    }

    #[test]
    fn many_devices_stay_within_eighty_columns() {
        let plan = Plan {
            devices: ["virtual:a", "virtual:b", "virtual:c", "virtual:d", "virtual:e"]
                .map(|name| device(name, true))
                .to_vec(),
            host: device("host", true),
            ..plan()
        };
        let view = PlanView { title: "sums", plan: &plan, specs: &[], tried: &[], allow: &[] };
        let text = table(&view);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert_eq!(text.matches("simulated").count(), 6 + 1, "{text}");
        assert!(text.contains("tokens/s (simulated devices)\n"), "{text}");
        assert!(text.contains("why: it is pinned, or stored with the run\n"), "{text}");
    }

    #[test]
    fn mixed_charges_are_labelled_per_device() {
        let plan = Plan { devices: vec![device("cpu", false), device("rtx3090", false)], ..plan() };
        let mut paper = spec("rtx3090", DeviceKind::Paper, false);
        paper.rates.measured = false;
        let specs = [spec("cpu", DeviceKind::Cpu, true), paper];
        let text = table(&PlanView { title: "sums", plan: &plan, specs: &specs, tried: &[], allow: &[] });
        assert!(
            text.contains(
                "\ncharges                     4.00 MiB   4.00 MiB\n                            measured    assumed\n"
            ),
            "{text}"
        );
        assert!(text.contains("(from published or assumed rates)"), "{text}");
    }

    #[test]
    fn refusal_lists_commands_that_fit() {
        let mut small = plan();
        small.fits = false;
        small.devices[0].budget_bytes = Bytes::mib(32);
        let remedy = |allow: &[Rung], bytes, host_bytes| Remedy {
            allow: allow.to_vec(),
            budget_bytes: bytes,
            host_bytes,
            file_bytes: None,
            peak_bytes: (bytes < Bytes::mib(40)).then_some(bytes),
            other_budget_bytes: BTreeMap::new(),
        };
        let with_command = |remedy: Remedy, budget_bytes, flags: &str| {
            (RemedySettings { remedy, budget_bytes, settings: vec![] }, format!("plimsoll train run.toml {flags}"))
        };
        let remedies = [
            with_command(remedy(&[], Bytes::mib(40), None), Bytes::mib(41), "--budget 41MiB"),
            with_command(
                remedy(&[], Bytes::mib(31), Some(Bytes::mib(9))),
                Bytes::mib(32),
                "--devices virtual:a=32MiB,host=9MiB",
            ),
            with_command(
                remedy(&[Rung::Bf16, Rung::Adam8bit], Bytes::mib(30), None),
                Bytes::mib(32),
                "--allow bf16,adam8bit",
            ),
        ];
        assert_eq!(
            does_not_fit(&small, &remedies, None, false).to_string(),
            "\
does not fit: the smallest recipe holds 40.00 MiB on cpu, the load line is 32.00 MiB
  hint: it fits from 41.00 MiB: plimsoll train run.toml --budget 41MiB
  hint: it fits, predicted 31.00 MiB of 32.00 MiB, 9.00 MiB on the host: plimsoll train run.toml --devices virtual:a=32MiB,host=9MiB
  hint: it fits with bf16 and adam8bit, predicted 30.00 MiB of 32.00 MiB: plimsoll train run.toml --allow bf16,adam8bit"
        );
        assert!(does_not_fit(&small, &remedies, None, true).hints[2].starts_with("3: it fits with bf16"));
        assert_eq!(
            does_not_fit(&small, &[], Some(Bytes::mib(28)), false).to_string(),
            "\
does not fit: the smallest recipe holds 40.00 MiB on cpu, the load line is 32.00 MiB
  hint: no load line is enough: cpu has 28.00 MiB
  hint: take a larger device, a smaller model, or a shorter data.sequence"
        );
        let view = PlanView { title: "sums", plan: &small, specs: &[], tried: &[], allow: &[] };
        assert!(table(&view).contains("\n  left under the line      -8.00 MiB\n"), "{}", table(&view));
    }
}
