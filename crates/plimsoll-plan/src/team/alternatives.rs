//! Ways to share out beside the one that is taken, for who asks, and what a team is worth beside its devices alone.

use super::TeamQuestion;
use super::batch::{Crew, Split};
use crate::search::{leanest, under};
use plimsoll_core::{Alternative, Bytes, Plan, Predicted, Rung, Sharing, Worth};
use plimsoll_program::Share;

/// What the devices of a team do, beside what they do alone.
pub(super) fn worth(team: &TeamQuestion, crew: &Crew, split: &Split) -> Worth {
    let tokens = team.tokens();
    let alone = split.devices.iter().filter_map(|&device| crew.split(&[device])).map(|split| tokens / split.seconds);
    let at_most = crew.split_without_exchange(&split.devices).map_or(0.0, |split| tokens / split.seconds);
    Worth { alone: alone.sum(), at_most }
}

/// The ways to share out beside a plan, and the plan's own: each device alone, of the fastest devices so many as there are,
/// and the same number of sequences for everybody. Those that fit come first, fastest first. What is not taken has bounds
/// of its bytes, without packing.
pub fn alternatives(team: &TeamQuestion, plan: &Plan) -> Vec<Alternative> {
    let questions = team.about(&plan.rungs, &vec![team.host; team.devices.len()]);
    let mut crew = Crew::new(&questions, team.total());
    let able = crew.able();
    for split in able.iter().filter_map(|&device| crew.split(&[device])).chain(crew.split(&able)).collect::<Vec<_>>() {
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
    let mut list: Vec<Alternative> = ways.iter().map(|way| written(team, &crew, way)).collect();
    let unable = (0..team.devices.len()).filter(|device| !able.contains(device));
    list.extend(unable.map(|device| self::unable(team, &plan.rungs, device)));
    let taken = taken(plan);
    let sequences = |way: &Alternative| way.shares.iter().map(|share| first_word(share)).collect::<Vec<_>>();
    list.retain(|way| (&way.devices, sequences(way)) != (&taken.devices, sequences(&taken)));
    list.push(taken);
    list.sort_by(|a, b| b.fits.cmp(&a.fits).then(a.predicted.step_seconds.total_cmp(&b.predicted.step_seconds)));
    list
}

fn first_word(text: &str) -> String {
    text.split(' ').next().unwrap_or_default().to_owned()
}

/// The plan's own way.
fn taken(plan: &Plan) -> Alternative {
    let alone = [format!("all sequences, {}", plan.recipe)];
    let shares = plan.team.iter().map(|member| format!("{} sequences, {}", member.sequences, member.recipe));
    Alternative {
        sharing: plan.sharing,
        devices: plan.devices.iter().map(|device| device.name.clone()).collect(),
        shares: if plan.team.is_empty() { alone.to_vec() } else { shares.collect() },
        fits: plan.fits,
        peak_bytes: plan.devices.iter().map(|device| device.peak_bytes).collect(),
        predicted: plan.predicted,
    }
}

fn written(team: &TeamQuestion, crew: &Crew, split: &Split) -> Alternative {
    let tokens = team.tokens();
    let found = crew.found(split);
    let parts = || split.devices.iter().zip(&split.sequences).zip(&found);
    Alternative {
        sharing: (split.devices.len() > 1).then_some(Sharing::Batch),
        devices: split.devices.iter().map(|&device| team.devices[device].device.name.clone()).collect(),
        shares: parts()
            .map(|((_, &sequences), found)| match split.devices.len() {
                1 => format!("all sequences, {}", found.recipe),
                _ => format!("{sequences} sequences, {}", found.recipe),
            })
            .collect(),
        fits: found.iter().map(|found| found.host).sum::<u64>() <= team.host.0,
        peak_bytes: parts()
            .map(|((&device, _), found)| Bytes(found.device) + team.devices[device].device.charges)
            .collect(),
        predicted: Predicted { step_seconds: split.seconds, tokens_per_second: tokens / split.seconds },
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
