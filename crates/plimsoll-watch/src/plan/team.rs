//! The part of a plan that several devices bring: who takes part with which share, who does not and why, and the other ways
//! to share out.

use super::{PlanView, WIDTH, class, rungs};
use crate::text::{columns, count, ordinal, percent, seconds, wrapped};
use plimsoll_core::{
    Alternative, DeviceKind, DevicePlan, DeviceSpec, Evaluates, FasterAlone, LeftOut, Member, Plan, Sharing, Worth,
    counted,
};

/// The devices that take no part, a line or two each; those of one name that are alike in all together.
pub(super) fn left_out(plan: &Plan) -> String {
    let mut groups: Vec<(Vec<usize>, &LeftOut)> = Vec::new();
    for out in &plan.left_out {
        let alike = |first: &LeftOut| LeftOut { number: first.number, ..out.clone() } == *first;
        match groups.iter_mut().find(|(_, first)| alike(first)) {
            Some((numbers, _)) => numbers.push(out.number),
            None => groups.push((vec![out.number], out)),
        }
    }
    let line = |(numbers, out): &(Vec<usize>, &LeftOut)| {
        let LeftOut { why, used_by, evaluates, .. } = out;
        let used_by = used_by.as_ref().map_or(String::new(), |settings| format!("; it would be used with {settings}"));
        let does = evaluates.as_ref().map_or(String::new(), does);
        wrapped(&format!("left out: {}: {why}{used_by}{does}", which(plan, &out.device, numbers)), WIDTH, "  ")
    };
    groups.iter().map(line).collect()
}

/// Devices of one name, and which they are where others have it, too: `3 × rtx5090 (the 2nd to 4th of 8 devices)`.
fn which(plan: &Plan, name: &str, numbers: &[usize]) -> String {
    let names = || {
        let used = plan.devices.iter().map(|device| &device.name);
        used.chain(plan.left_out.iter().map(|out| &out.device))
    };
    let many = if numbers.len() > 1 { format!("{} × ", numbers.len()) } else { String::new() };
    if names().filter(|other| *other == name).count() == numbers.len() {
        return format!("{many}{name}");
    }
    let places: Vec<String> = numbers.iter().map(|number| ordinal(number + 1)).collect();
    let in_a_row = numbers.windows(2).all(|pair| pair[1] == pair[0] + 1);
    let places = match &*places {
        [first, _, .., last] if in_a_row => format!("{first} to {last}"),
        [before @ .., last] if !before.is_empty() => format!("{} and {last}", before.join(", ")),
        places => places.concat(),
    };
    format!("{many}{name} (the {places} of {} devices)", names().count())
}

/// The devices that only hold a part of the state, a line or two each.
fn holds(plan: &Plan) -> String {
    let line = |(member, device): (&Member, &DevicePlan)| {
        let part = percent(member.state.unwrap_or(0) as f64 / 1024.0, 1);
        let simulated = if device.simulated { " (simulated)" } else { "" };
        let why = member.why.as_ref().map_or(String::new(), |why| format!(": {why}"));
        let said = format!("{}{simulated} holds {part} of the state and computes no sequences{why}", member.device);
        wrapped(&said, WIDTH, "  ")
    };
    plan.team.iter().zip(&plan.devices).filter(|(member, _)| member.sequences == 0).map(line).collect()
}

/// What a device does beside the steps.
fn does(evaluates: &Evaluates) -> String {
    let Evaluates { device, rows, team_seconds, hand_over_seconds, .. } = evaluates;
    let holds = format!("it evaluates meanwhile, predicted {} of {}", device.peak_bytes, device.budget_bytes);
    let [own, team, given] = [evaluates.seconds, *team_seconds, *hand_over_seconds].map(seconds);
    match rows {
        Some(_) => format!("; {holds}, in {own}: {given} to hand over the weights instead of {team}"),
        None => format!(
            "; {holds}, from {} of data.eval on: {own} a row, {given} to hand over the weights instead of {team} a row",
            counted(evaluates.least_rows(), "row")
        ),
    }
}

/// Who is in the team, with which share and under which recipe.
pub(super) fn shares(view: &PlanView) -> String {
    let PlanView { plan, specs, .. } = view;
    let sharing = plan.sharing.map_or(String::new(), |sharing| format!("{sharing} shared by "));
    let title = format!("team: {sharing}{} devices ({})", plan.team.len(), class(plan.class));
    let mut text = wrapped(&title, WIDTH, "  ") + &left_out(plan) + &holds(plan);
    if let Some(Worth { alone, at_most }) = plan.worth {
        let of_alone = |tokens: f64| percent(tokens / alone, 1);
        let worth = format!(
            "worth: predicted {} of what these devices do alone, added up; at most {}, by whole sequences and everybody's update",
            of_alone(plan.predicted.tokens_per_second),
            of_alone(at_most),
        );
        text += &wrapped(&worth, WIDTH, "  ");
    }
    if let Some(FasterAlone { name, tokens_per_second }) = &plan.faster_alone {
        let alone = format!("{name} alone would be faster: predicted {} tokens/s", count(*tokens_per_second));
        text += &wrapped(&alone, WIDTH, "  ");
    }
    text.push('\n');
    text += &columns(&rows(plan), "");
    for (members, first) in alike(plan) {
        let names =
            if members.len() == plan.team.len() && members.len() > 1 { "all".to_owned() } else { members.join(", ") };
        text += &wrapped(&format!("{names}: {}", first.recipe), WIDTH, "  ");
    }
    text + &links(plan, specs)
}

fn rows(plan: &Plan) -> Vec<Vec<String>> {
    // Where the state stands in parts, they say more than the micro-batch, which is in the recipe, too.
    let parts = plan.team.iter().any(|member| member.state.is_some());
    let third = if parts { "of the state" } else { "micro-batch" };
    let shared = if plan.sharing == Some(Sharing::Layers) { "layers" } else { "sequences" };
    let header = ["device", shared, third, "peak", "load line", "busy", "idle"].map(str::to_owned);
    let mut rows = vec![header.to_vec()];
    for (member, device) in plan.team.iter().zip(&plan.devices) {
        rows.push(vec![
            member.device.clone() + if device.simulated { " (simulated)" } else { "" },
            // Counted from 0, as in the names of weights.
            member.layers.map_or(member.sequences.to_string(), |[first, end]| format!("{first} to {}", end - 1)),
            member.state.map_or(member.recipe.micro_batch.to_string(), |part| percent(part as f64 / 1024.0, 1)),
            device.peak_bytes.to_string(),
            device.budget_bytes.to_string(),
            seconds(member.busy_seconds),
            seconds(member.idle_seconds),
        ]);
    }
    rows
}

/// Members by their recipes, in order of the first of each.
fn alike(plan: &Plan) -> Vec<(Vec<String>, &Member)> {
    let mut groups: Vec<(Vec<String>, &Member)> = Vec::new();
    for member in &plan.team {
        match groups.iter_mut().find(|(_, first)| first.recipe == member.recipe) {
            Some((names, _)) => names.push(member.device.clone()),
            None => groups.push((vec![member.device.clone()], member)),
        }
    }
    groups
}

/// What the exchange goes over.
fn links(plan: &Plan, specs: &[DeviceSpec]) -> String {
    let Some(slowest) =
        specs.iter().min_by(|a, b| a.team_link.bytes_per_second.total_cmp(&b.team_link.bytes_per_second))
    else {
        return String::new();
    };
    let word = match slowest.kind {
        _ if slowest.link_measured => "measured",
        DeviceKind::Virtual => "simulated",
        _ => "assumed",
    };
    let rate = match slowest.team_link.bytes_per_second {
        rate if rate >= 1e9 => format!("{:.1} GB/s", rate / 1e9),
        rate => format!("{:.1} MB/s", rate / 1e6),
    };
    let costs =
        plan.link_seconds.map_or(String::new(), |cost| format!("; links cost {} of a step, predicted", seconds(cost)));
    // On paper there is no host but one that is named.
    let nowhere = plan.host.budget_bytes.0 == 0 && specs.iter().all(|spec| spec.kind == DeviceKind::Paper);
    let mostly = plan.link_seconds.is_some_and(|cost| cost > 0.5 * plan.predicted.step_seconds);
    let hint = if nowhere && mostly {
        "; no host was named for anything to wait on: with the memory of theirs (host=64GiB) less may have to cross"
    } else {
        ""
    };
    let said = format!("the slowest link between them: {rate} each way, of {} ({word}){costs}{hint}", slowest.name);
    wrapped(&said, WIDTH, "  ")
}

/// The ways to share out that were looked at, fastest first. Ends with an empty line where there are any.
pub(super) fn alternatives(plan: &Plan) -> String {
    if plan.alternatives.is_empty() {
        return String::new();
    }
    let mut rows = vec![["way", "tokens/s", "step", "fullest", "verdict"].map(str::to_owned).to_vec()];
    let mut found = false;
    for way in &plan.alternatives {
        let taken = !found && is_taken(plan, way);
        found |= taken;
        let verdict = match (taken, way.fits) {
            (true, true) => "taken",
            (false, true) => "fits",
            (_, false) => "does not fit",
        };
        rows.push(vec![
            name(way),
            count(way.predicted.tokens_per_second),
            seconds(way.predicted.step_seconds),
            way.peak_bytes.iter().max().copied().unwrap_or_default().to_string(),
            verdict.to_owned(),
        ]);
    }
    wrapped("ways to share out; bytes and seconds are predicted", WIDTH, "  ") + &columns(&rows, "") + "\n"
}

/// What each rung frees and costs each member; those with the same figures together. Ends with an empty line where there
/// are any.
pub(super) fn ladders(plan: &Plan) -> String {
    let mut groups: Vec<(Vec<&str>, &Member)> = Vec::new();
    for member in &plan.team {
        match groups.iter_mut().find(|(_, first)| first.ladder == member.ladder) {
            Some((names, _)) => names.push(&member.device),
            None => groups.push((vec![&member.device], member)),
        }
    }
    let name = |names: &[&str]| match names {
        names if names.len() == plan.team.len() => "each".to_owned(),
        names => names.join(", "),
    };
    groups.iter().map(|(names, first)| rungs(&first.ladder, &format!("{}: ", name(names)))).collect()
}

fn is_taken(plan: &Plan, way: &Alternative) -> bool {
    let names: Vec<&str> = plan.devices.iter().map(|device| &*device.name).collect();
    let devices: Vec<&str> = way.devices.iter().map(|name| &**name).collect();
    way.sharing == plan.sharing && devices == names && way.predicted == plan.predicted
}

/// What a way does: `rtx3090 alone`, `batch over 8 × rtx5090`, with the shares where they differ.
fn name(way: &Alternative) -> String {
    let mut groups: Vec<(&str, usize)> = Vec::new();
    for device in &way.devices {
        match groups.last_mut() {
            Some((name, number)) if *name == device => *number += 1,
            _ => groups.push((device, 1)),
        }
    }
    let names: Vec<String> = groups
        .into_iter()
        .map(|(name, number)| if number > 1 { format!("{number} × {name}") } else { name.to_owned() })
        .collect();
    let Some(sharing) = way.sharing else { return format!("{} alone", names.join(", ")) };
    let shares: Vec<&str> = way.shares.iter().map(|share| share.split(' ').next().unwrap_or_default()).collect();
    let differ = shares.windows(2).any(|pair| pair[0] != pair[1]);
    let shares = if differ && shares.len() <= 4 { format!(" ({})", shares.join(" : ")) } else { String::new() };
    format!("{sharing} over {}{shares}", names.join(", "))
}
