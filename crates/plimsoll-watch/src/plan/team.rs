//! The lines of a plan about its team: the share of each device, excluded devices with reasons, and alternative teams.

use super::{PlanView, WIDTH, describe_class, rung_tables};
use crate::text::{columns, count, ordinal, percent, seconds, wrapped};
use plimsoll_core::{
    Alternative, DeviceKind, DevicePlan, DeviceSpec, EvaluatorPlan, ExcludedDevice, FasterAlone, MachineHost,
    Parallelism, Plan, WorkerPlan, format_count,
};

/// Formats a paragraph for each excluded device, with the reason. Devices that share a name, a reason and all other
/// details share one paragraph.
pub(super) fn excluded(plan: &Plan) -> String {
    let mut groups: Vec<(Vec<usize>, &ExcludedDevice)> = Vec::new();
    for device in &plan.excluded {
        let is_alike =
            |first: &ExcludedDevice| ExcludedDevice { device_index: first.device_index, ..device.clone() } == *first;
        match groups.iter_mut().find(|(_, first)| is_alike(first)) {
            Some((numbers, _)) => numbers.push(device.device_index),
            None => groups.push((vec![device.device_index], device)),
        }
    }
    groups.iter().map(|(numbers, device)| excluded_paragraph(plan, device, numbers)).collect()
}

/// Formats the paragraph for a group of excluded devices. `numbers` are their indices among all requested devices.
fn excluded_paragraph(plan: &Plan, device: &ExcludedDevice, numbers: &[usize]) -> String {
    let ExcludedDevice { reason, remedy, evaluator_plan, .. } = device;
    let remedy = remedy.as_ref().map_or(String::new(), |settings| format!("; it would take part with {settings}"));
    let evaluates = evaluator_plan.as_ref().map_or(String::new(), evaluator_note);
    let name = name_devices(plan, &device.device, numbers);
    wrapped(&format!("excluded: {name}: {reason}{remedy}{evaluates}"), WIDTH, "  ")
}

/// Formats a group of devices that are all called `name`, such as `3 × rtx5090`. `numbers` are the devices' indices
/// among all requested devices. If other devices have this name too, their positions are added:
/// `3 × rtx5090 (the 2nd to 4th of 8 devices)`.
fn name_devices(plan: &Plan, name: &str, numbers: &[usize]) -> String {
    let names = || {
        let used = plan.devices.iter().map(|device| &device.name);
        used.chain(plan.excluded.iter().map(|excluded| &excluded.device))
    };
    let count = if numbers.len() > 1 { format!("{} × ", numbers.len()) } else { String::new() };
    if names().filter(|other| *other == name).count() == numbers.len() {
        return format!("{count}{name}");
    }
    let positions: Vec<String> = numbers.iter().map(|number| ordinal(number + 1)).collect();
    let are_consecutive = numbers.windows(2).all(|pair| pair[1] == pair[0] + 1);
    let positions = match &*positions {
        [first, _, .., last] if are_consecutive => format!("{first} to {last}"),
        [before @ .., last] if !before.is_empty() => format!("{} and {last}", before.join(", ")),
        positions => positions.concat(),
    };
    format!("{count}{name} (the {positions} of {} devices)", names().count())
}

/// Formats a paragraph for each storage-only worker: its share of the state, and the reason why it computes no
/// sequences. Returns an empty text if there is none.
fn storage_only(plan: &Plan) -> String {
    let workers = plan.team.iter().zip(&plan.devices).filter(|(worker, _)| worker.sequences == 0);
    workers.map(|(worker, device)| storage_only_paragraph(worker, device)).collect()
}

fn storage_only_paragraph(worker: &WorkerPlan, device: &DevicePlan) -> String {
    let shard = percent(worker.shard_1024ths.unwrap_or(0) as f64 / 1024.0, 1);
    let simulated = if device.simulated { " (simulated)" } else { "" };
    let reason = worker.reason.as_ref().map_or(String::new(), |reason| format!(": {reason}"));
    let line = format!("{}{simulated} stores {shard} of the state and computes no sequences{reason}", worker.device);
    wrapped(&line, WIDTH, "  ")
}

/// Describes the evaluations that an excluded device runs while the team trains.
fn evaluator_note(evaluator_plan: &EvaluatorPlan) -> String {
    let EvaluatorPlan { device, rows, team_seconds, weight_transfer_seconds, .. } = evaluator_plan;
    let memory = format!("predicted {} of {}", device.peak_bytes, device.budget_bytes);
    let [own, team, transfer] = [evaluator_plan.seconds, *team_seconds, *weight_transfer_seconds].map(seconds);
    match rows {
        Some(_) => format!(
            "; it evaluates while the team trains, {memory}, in {own}; the team transfers weights for {transfer} instead of \
             evaluating for {team}"
        ),
        None => format!(
            "; it evaluates while the team trains, {memory}, if data.eval has at least {}: {own} per row; the team transfers \
             weights for {transfer} instead of evaluating for {team} per row",
            format_count(evaluator_plan.break_even_rows(), "row")
        ),
    }
}

/// Formats the team of a plan: the share, memory and time of each worker, the recipes, the excluded devices, the
/// scaling efficiency and the links.
pub(super) fn shares(view: &PlanView) -> String {
    let PlanView { plan, specs, .. } = view;
    let parallelism = plan.parallelism.map_or(String::new(), |parallelism| format!("{} over ", parallelism.describe()));
    let title = format!("team: {parallelism}{} devices ({})", plan.team.len(), describe_class(plan.class));
    let mut text = wrapped(&title, WIDTH, "  ") + &excluded(plan) + &storage_only(plan);
    if let Some(efficiency) = plan.scaling_efficiency {
        let fraction = |tokens: f64| percent(tokens / efficiency.single_device_tokens_per_second, 1);
        let upper_bound = efficiency.upper_bound_tokens_per_second;
        let efficiency_line = format!(
            "scaling efficiency: {} (predicted); at most {} without communication",
            fraction(plan.predicted.tokens_per_second),
            fraction(upper_bound),
        );
        text += &wrapped(&efficiency_line, WIDTH, "  ");
    }
    if let Some(FasterAlone { name, tokens_per_second }) = &plan.faster_alone {
        let alone = format!("{name} alone would be faster: predicted {} tokens/s", count(*tokens_per_second));
        text += &wrapped(&alone, WIDTH, "  ");
    }
    text.push('\n');
    text += &columns(&rows(plan));
    for (devices, first) in by_recipe(plan) {
        let names =
            if devices.len() == plan.team.len() && devices.len() > 1 { "all".to_owned() } else { devices.join(", ") };
        text += &wrapped(&format!("{names}: {}", first.recipe), WIDTH, "  ");
    }
    text + &links(plan, specs)
}

/// Returns the rows of a table with one row per worker below a header: its share of the work, memory, and busy and idle
/// seconds.
fn rows(plan: &Plan) -> Vec<Vec<String>> {
    // Shards replace the column of the micro-batch, which is in the recipe, too.
    let is_sharded = plan.team.iter().any(|worker| worker.shard_1024ths.is_some());
    let third = if is_sharded { "shard" } else { "micro-batch" };
    let work = if plan.parallelism == Some(Parallelism::Pipeline) { "layers" } else { "sequences" };
    let header = ["device", work, third, "peak", "load line", "busy", "idle"].map(str::to_owned);
    let mut rows = vec![header.to_vec()];
    for (worker, device) in plan.team.iter().zip(&plan.devices) {
        rows.push(vec![
            worker.device.clone() + if device.simulated { " (simulated)" } else { "" },
            // Layers count from 0, as in the names of weights.
            worker.layers.map_or(worker.sequences.to_string(), |[first, end]| format!("{first} to {}", end - 1)),
            worker.shard_1024ths.map_or(worker.recipe.micro_batch.to_string(), |part| percent(part as f64 / 1024.0, 1)),
            device.peak_bytes.to_string(),
            device.budget_bytes.to_string(),
            seconds(worker.busy_seconds),
            seconds(worker.idle_seconds),
        ]);
    }
    rows
}

/// Groups the workers by recipe. Returns, for each group, the names of its devices and its first worker, in the order
/// of the first workers.
fn by_recipe(plan: &Plan) -> Vec<(Vec<String>, &WorkerPlan)> {
    let mut groups: Vec<(Vec<String>, &WorkerPlan)> = Vec::new();
    for worker in &plan.team {
        match groups.iter_mut().find(|(_, first)| first.recipe == worker.recipe) {
            Some((names, _)) => names.push(worker.device.clone()),
            None => groups.push((vec![worker.device.clone()], worker)),
        }
    }
    groups
}

/// Describes the slowest link of the team, and the predicted seconds that all links add to a step. Returns an empty
/// text if `specs` is empty.
fn links(plan: &Plan, specs: &[DeviceSpec]) -> String {
    let Some(slowest) =
        specs.iter().min_by(|a, b| a.team_link.bytes_per_second.total_cmp(&b.team_link.bytes_per_second))
    else {
        return String::new();
    };
    let source = match slowest.kind {
        _ if slowest.link_measured => "measured",
        DeviceKind::Virtual => "simulated",
        _ => "assumed",
    };
    let rate = match slowest.team_link.bytes_per_second {
        rate if rate >= 1e9 => format!("{:.1} GB/s", rate / 1e9),
        rate => format!("{:.1} MB/s", rate / 1e6),
    };
    let costs =
        plan.link_seconds.map_or(String::new(), |cost| format!("; links cost {} of a step (predicted)", seconds(cost)));
    // Paper devices have no host unless the request names one.
    let has_no_host = plan.host.budget_bytes.0 == 0 && specs.iter().all(|spec| spec.kind == DeviceKind::Paper);
    let is_dominated = plan.link_seconds.is_some_and(|cost| cost > 0.5 * plan.predicted.step_seconds);
    let host = match slowest.remote_host() {
        Some(machine) => format!("{machine}/host=64GiB"),
        None => "host=64GiB".to_owned(),
    };
    let hint = match has_no_host && is_dominated {
        true => format!("; offload to a host could reduce this: name the host memory in --devices, such as {host}"),
        false => String::new(),
    };
    let line = format!("slowest link: {rate} each way, of {} ({source}){costs}{hint}", slowest.name);
    wrapped(&line, WIDTH, "  ")
}

/// Formats the use of each machine's host memory, if several machines have any; otherwise returns an empty text.
pub(super) fn machine_hosts(plan: &Plan) -> String {
    let host = |host: &MachineHost| format!("{} {} of {}", host.name, host.arena_bytes, host.budget_bytes);
    match &*plan.machine_hosts {
        [] => String::new(),
        hosts => wrapped(&format!("hosts: {}", hosts.iter().map(host).collect::<Vec<_>>().join(", ")), WIDTH, "  "),
    }
}

/// Formats the alternatives for the team as a table, in the order of [`Plan::alternatives`]. The text ends with an
/// empty line. Returns an empty text if there are no alternatives.
pub(super) fn alternatives(plan: &Plan) -> String {
    if plan.alternatives.is_empty() {
        return String::new();
    }
    let mut rows = vec![["team", "tokens/s", "step", "fullest", "verdict"].map(str::to_owned).to_vec()];
    let mut is_taken_above = false;
    for alternative in &plan.alternatives {
        let taken = !is_taken_above && is_plan_itself(plan, alternative);
        is_taken_above |= taken;
        let verdict = match (taken, alternative.fits) {
            (true, true) => "taken",
            (false, true) => "fits",
            (_, false) => "does not fit",
        };
        rows.push(vec![
            name(alternative),
            count(alternative.predicted.tokens_per_second),
            seconds(alternative.predicted.step_seconds),
            alternative.peak_bytes.iter().max().copied().unwrap_or_default().to_string(),
            verdict.to_owned(),
        ]);
    }
    wrapped("alternative teams; bytes and seconds are predicted", WIDTH, "  ") + &columns(&rows) + "\n"
}

/// Formats the memory ladder of each worker. Workers with equal ladders share their tables. The text ends with an empty
/// line. Returns an empty text if all ladders are empty.
pub(super) fn ladders(plan: &Plan) -> String {
    let mut groups: Vec<(Vec<&str>, &WorkerPlan)> = Vec::new();
    for worker in &plan.team {
        match groups.iter_mut().find(|(_, first)| first.ladder == worker.ladder) {
            Some((names, _)) => names.push(&worker.device),
            None => groups.push((vec![&worker.device], worker)),
        }
    }
    let name = |names: &[&str]| match names {
        names if names.len() == plan.team.len() => "each".to_owned(),
        names => names.join(", "),
    };
    groups.iter().map(|(names, first)| rung_tables(&first.ladder, &format!("{}: ", name(names)))).collect()
}

/// Returns whether an alternative is the plan itself.
fn is_plan_itself(plan: &Plan, alternative: &Alternative) -> bool {
    let names: Vec<&str> = plan.devices.iter().map(|device| &*device.name).collect();
    let devices: Vec<&str> = alternative.devices.iter().map(|name| &**name).collect();
    alternative.parallelism == plan.parallelism && devices == names && alternative.predicted == plan.predicted
}

/// Names an alternative: `rtx3090 alone`, `data over 8 × rtx5090`. If it has at most four devices with unequal shares
/// of the work, the shares are added: `(3 : 1)`.
fn name(alternative: &Alternative) -> String {
    let mut groups: Vec<(&str, usize)> = Vec::new();
    for device in &alternative.devices {
        match groups.last_mut() {
            Some((name, number)) if *name == device => *number += 1,
            _ => groups.push((device, 1)),
        }
    }
    let names: Vec<String> = groups
        .into_iter()
        .map(|(name, number)| if number > 1 { format!("{number} × {name}") } else { name.to_owned() })
        .collect();
    let Some(parallelism) = alternative.parallelism else { return format!("{} alone", names.join(", ")) };
    let shares: Vec<&str> =
        alternative.shares.iter().map(|share| share.split(' ').next().unwrap_or_default()).collect();
    let differ = shares.windows(2).any(|pair| pair[0] != pair[1]);
    let shares = if differ && shares.len() <= 4 { format!(" ({})", shares.join(" : ")) } else { String::new() };
    let kind = match parallelism {
        Parallelism::Data => "data",
        Parallelism::Sharded => "sharded",
        Parallelism::Pipeline => "pipeline",
    };
    format!("{kind} over {}{shares}", names.join(", "))
}
