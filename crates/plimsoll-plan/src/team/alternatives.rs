//! Ways to share out beside the one that is taken, and the ladder of each member, for who asks; and what a team is worth
//! beside its devices alone.

use super::batch::{Crew, Split};
use super::layers::Layers;
use super::state::State;
use super::{Part, ShareOut, TeamAnswer, TeamQuestion, Way, parts_of, slowest, whole};
use crate::search::{Question, ladder, leanest, under};
use plimsoll_core::{
    Alternative, Bytes, DeviceSpec, FasterAlone, Plan, Predicted, Recipe, Rung, Sharing, Worth, counted,
};
use plimsoll_program::Share;

/// Those that could do no more than a team, even if they did so many times what they do at most, are not looked at closely.
const CLEARLY: f64 = 1.1;

/// What the devices of a team do, beside what they do alone.
pub(super) fn worth(team: &TeamQuestion, crew: &Crew, devices: &[usize]) -> Worth {
    let tokens = team.tokens();
    let alone = devices.iter().filter_map(|&device| crew.split(&[device])).map(|split| tokens / split.seconds);
    let at_most = crew.split_without_exchange(devices).map_or(0.0, |split| tokens / split.seconds);
    Worth { alone: alone.sum(), at_most }
}

/// Who would be faster without the others, where a plan keeps all of them.
pub(super) fn faster_alone(team: &TeamQuestion, plan: &Plan) -> Option<FasterAlone> {
    if !team.all || plan.team.is_empty() {
        return None;
    }
    let all: Vec<usize> = (0..team.devices.len()).collect();
    let state = State::new(team, &plan.rungs);
    let mut apart = apart(team, &all);
    apart.retain(|(_, devices)| CLEARLY * state.about_at_most(devices) > plan.predicted.tokens_per_second);
    if apart.is_empty() {
        return None;
    }
    let questions = team.about(&plan.rungs, &vec![team.host; team.devices.len()]);
    let mut crew = Crew::new(&questions, team.total());
    crew.look_near_plain();
    let speed = |devices: &[usize]| {
        let able = devices.iter().all(|device| crew.able().contains(device));
        crew.split(devices).filter(|_| able).map(|split| team.tokens() / split.seconds)
    };
    let apart =
        apart.into_iter().filter_map(|(name, devices)| Some(FasterAlone { name, tokens_per_second: speed(&devices)? }));
    let best = apart.max_by(|a, b| a.tokens_per_second.total_cmp(&b.tokens_per_second))?;
    (best.tokens_per_second > plan.predicted.tokens_per_second).then_some(best)
}

/// What could do without the others: the devices of each host, or of a single host each device.
fn apart(team: &TeamQuestion, devices: &[usize]) -> Vec<(String, Vec<usize>)> {
    let host = |device: usize| team.devices[device].device.host().unwrap_or("this machine").to_owned();
    let mut hosts: Vec<(String, Vec<usize>)> = Vec::new();
    for &device in devices {
        match hosts.iter_mut().find(|(name, _)| *name == host(device)) {
            Some((_, devices)) => devices.push(device),
            None => hosts.push((host(device), vec![device])),
        }
    }
    match hosts.len() {
        1 => devices.iter().map(|&device| (team.devices[device].device.name.clone(), vec![device])).collect(),
        _ => hosts,
    }
}

/// The ways to share out beside a plan, and the plan's own: each device alone, of the fastest devices so many as there are,
/// the same number of sequences for everybody, the state in parts, and a pipeline. Those that fit come first, fastest first. What
/// is not taken has bounds of its bytes, without packing; but for a shared batch that seems to be faster than what is taken: how
/// long the others are really waited for is known of what is packed.
pub fn alternatives(team: &TeamQuestion, plan: &Plan) -> Vec<Alternative> {
    let questions = team.about(&plan.rungs, &vec![team.host; team.devices.len()]);
    let mut crew = Crew::new(&questions, team.total());
    crew.look_near_plain();
    let able = crew.able();
    if let Some(split) = crew.split(&able) {
        crew.look_near(&split);
    }
    let mut ways: Vec<Split> = able.iter().filter_map(|&device| crew.split(&[device])).collect();
    ways.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let order: Vec<usize> = ways.iter().map(|way| way.devices[0]).collect();
    // Devices that are alike are looked at once.
    ways.dedup_by(|a, b| crew.alike(a.devices[0], b.devices[0]));
    for number in 2..=order.len() {
        let mut devices = order[..number].to_vec();
        devices.sort_unstable();
        let split = crew.split(&devices);
        if number == order.len() {
            ways.extend(
                crew.even(&devices)
                    .filter(|even| Some(&even.sequences) != split.as_ref().map(|split| &split.sequences)),
            );
        }
        ways.extend(split);
    }
    let state = State::new(team, &plan.rungs);
    let fastest = state.fastest();
    let otherwise = fastest.as_ref().and_then(|way| state.otherwise(way));
    let state = fastest.filter(|_| plan.sharing != Some(Sharing::State)).into_iter().chain(otherwise);
    let layers = Layers::new(team, &plan.rungs).fastest().filter(|_| plan.sharing != Some(Sharing::Layers));
    let ways = ways.iter().map(|split| crew.way(split, team.host)).chain(state).chain(layers);
    let seems_faster = |way: &Way| way.sharing == Some(Sharing::Batch) && way.seconds < plan.predicted.step_seconds;
    let of = |way: Way| if seems_faster(&way) { as_packed(team, &plan.rungs, &way) } else { written(team, &way) };
    let mut list: Vec<Alternative> = ways.map(of).collect();
    let unable = team.kinds().into_iter().filter(|device| !able.contains(device));
    list.extend(unable.map(|device| self::unable(team, &plan.rungs, device)));
    let taken = taken(plan);
    let sequences = |way: &Alternative| way.shares.iter().map(|share| first_word(share)).collect::<Vec<_>>();
    let what = |way: &Alternative| (way.sharing, way.devices.clone(), sequences(way));
    list.retain(|way| what(way) != what(&taken));
    list.push(taken);
    list.sort_by(|a, b| b.fits.cmp(&a.fits).then(a.predicted.step_seconds.total_cmp(&b.predicted.step_seconds)));
    list
}

/// Writes down what each rung frees and costs on each member. Those that do the same have the same ladder.
pub fn ladders(team: &TeamQuestion, answer: &mut TeamAnswer) {
    let TeamAnswer { parts, plan, .. } = answer;
    let team_link = slowest(parts.iter().map(|part| team.devices[part.device].device.team_link));
    let same = |one: &Part, other: &Part| {
        let what = |part: &Part| (team.first_alike(part.device), part.sequences, part.share.own_part());
        let staged = one.share.sharing == Some(Sharing::Layers);
        !staged && what(one) == what(other) && one.answer.plan.recipe == other.answer.plan.recipe
    };
    for rank in 0..plan.team.len() {
        let part = &parts[rank];
        plan.team[rank].ladder = match (0..rank).find(|&before| same(&parts[before], part)) {
            Some(before) => plan.team[before].ladder.clone(),
            None => {
                let question = team.of(part.device, &part.share, part.sequences, team.host);
                let device = &DeviceSpec { team_link, ..question.device.clone() };
                ladder(&Question { device, ..question }, &part.answer.plan.recipe).2
            }
        };
    }
}

fn first_word(text: &str) -> String {
    text.split(' ').next().unwrap_or_default().to_owned()
}

/// The plan's own way.
fn taken(plan: &Plan) -> Alternative {
    let alone = [share(None, 0, None, &plan.recipe)];
    let shares = plan.team.iter();
    let shares = shares.map(|member| share(plan.sharing, member.sequences, member.state, &member.recipe));
    Alternative {
        sharing: plan.sharing,
        devices: plan.devices.iter().map(|device| device.name.clone()).collect(),
        shares: if plan.team.is_empty() { alone.to_vec() } else { shares.collect() },
        fits: plan.fits,
        peak_bytes: plan.devices.iter().map(|device| device.peak_bytes).collect(),
        predicted: plan.predicted,
    }
}

fn written(team: &TeamQuestion, way: &Way) -> Alternative {
    let spec = |device: usize| team.devices[device].device;
    let ranks = || way.ranks.iter();
    Alternative {
        sharing: way.sharing,
        devices: ranks().map(|given| spec(given.device).name.clone()).collect(),
        shares: ranks()
            .map(|given| share(way.sharing, given.sequences, given.share.own_part(), &given.recipe))
            .collect(),
        fits: ranks().map(|given| given.host_bytes).sum::<u64>() <= team.host.0,
        peak_bytes: ranks().map(|given| Bytes(given.device_bytes) + spec(given.device).charges).collect(),
        predicted: Predicted { step_seconds: way.seconds, tokens_per_second: team.tokens() / way.seconds },
    }
}

/// The same of a way that is packed for it; by its bounds where its recipes do not pack.
fn as_packed(team: &TeamQuestion, rungs: &[Rung], way: &Way) -> Alternative {
    let bounds = written(team, way);
    let Ok(mut parts) = parts_of(team, rungs, way) else { return bounds };
    let Plan { fits, predicted, devices, .. } = whole::plan(team, &mut parts);
    let peak_bytes = devices.into_iter().map(|device| device.peak_bytes).collect();
    Alternative { fits, predicted, peak_bytes, ..bounds }
}

/// What a device is given, in words.
fn share(sharing: Option<Sharing>, sequences: u64, state: Option<u64>, recipe: &Recipe) -> String {
    match (sharing, state) {
        (None, _) => format!("all sequences, {recipe}"),
        (Some(Sharing::Layers), _) => format!("{}, {recipe}", counted(recipe.recompute.len(), "layer")),
        (Some(_), None) => format!("{}, {recipe}", counted(sequences, "sequence")),
        (Some(_), Some(parts)) => {
            format!("{}, {parts} of 1024 parts of the state, {recipe}", counted(sequences, "sequence"))
        }
    }
}

/// A device that cannot hold the model, with its smallest recipe.
fn unable(team: &TeamQuestion, rungs: &[Rung], device: usize) -> Alternative {
    let question = under(&team.of(device, &Share::ALONE, team.total(), team.host), rungs);
    let smallest = leanest(&question, &[]);
    Alternative {
        sharing: None,
        devices: vec![question.device.name.clone()],
        shares: vec![format!("all sequences, {}", smallest.recipe)],
        fits: false,
        peak_bytes: vec![Bytes(smallest.device) + question.device.charges],
        predicted: Predicted { step_seconds: smallest.seconds, tokens_per_second: team.tokens() / smallest.seconds },
    }
}
