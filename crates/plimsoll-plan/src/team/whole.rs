//! The plan of a team as it is written down, from the plans of its members.

use super::layers::{StageSeconds, step_seconds};
use super::{Part, TeamQuestion, slowest};
use crate::price::Prices;
use crate::search::checkpoint_bytes;
use plimsoll_core::{Bytes, Class, DevicePlan, Link, Member, Plan, Predicted, Sharing};

/// A link over which everything is there at once.
const NO_TIME: Link = Link { bytes_per_second: f64::INFINITY, latency_seconds: 0.0 };

/// The whole plan: fits where every member does and all together are under the host's load line. Each member's own plan
/// is given its part of the host.
pub(super) fn plan(team: &TeamQuestion, parts: &mut [Part]) -> Plan {
    let held: Bytes = parts.iter().map(|part| part.answer.plan.host.arena_bytes).sum();
    let left = team.host.saturating_sub(held).0 / parts.len() as u64;
    let on_host = held <= team.host;
    for part in parts.iter_mut().filter(|part| part.answer.plan.host.budget_bytes > Bytes::ZERO) {
        part.answer.plan.host.budget_bytes = part.answer.plan.host.arena_bytes + Bytes(left);
    }
    let link = slowest(parts.iter().map(|part| team.devices[part.device].device.team_link));
    let times = |parts: &[Part], link| match parts[0].share.sharing {
        Some(Sharing::Layers) => pipeline(team, parts, link),
        _ => parts.iter().map(|part| busy(team, part, link)).collect::<Vec<_>>(),
    };
    let step = |times: &[(f64, f64)]| times.iter().map(|(busy, waits)| busy + waits).fold(0.0, f64::max);
    let (busy, unlinked) = (times(parts, link), step(&times(parts, NO_TIME)));
    for (part, (busy, waits)) in parts.iter_mut().zip(&busy) {
        let (question, step_seconds) = (&team.devices[part.device], busy + waits);
        let tokens = (part.sequences * question.sequence) as f64;
        part.answer.plan.predicted = Predicted { step_seconds, tokens_per_second: tokens / step_seconds };
    }
    let (first, sharing) = (&parts[0].answer.plan, parts[0].share.sharing);
    let many = sharing.is_some();
    let step_seconds = step(&busy);
    let member = |(part, (busy, _)): (&Part, &(f64, f64))| Member {
        device: team.devices[part.device].device.name.clone(),
        recipe: part.answer.plan.recipe.clone(),
        sequences: part.sequences,
        layers: (sharing == Some(Sharing::Layers)).then(|| {
            let own = part.share.own_layers(team.devices[part.device].config.layers);
            [own.start, own.end]
        }),
        state: part.share.own_part(),
        why: None,
        algorithms: None,
        busy_seconds: *busy,
        idle_seconds: step_seconds - busy,
        ladder: vec![],
    };
    Plan {
        fits: on_host && parts.iter().all(|part| part.answer.plan.fits),
        class: if many { first.class.max(Class::Reordered) } else { first.class },
        devices: parts.iter().map(|part| part.answer.plan.devices[0].clone()).collect(),
        sharing,
        team: if many { parts.iter().zip(&busy).map(member).collect() } else { vec![] },
        link_seconds: many.then_some((step_seconds - unlinked).max(0.0)),
        // Every stage saves what is its own.
        checkpoint_bytes: match sharing {
            Some(Sharing::Layers) => checkpoint_bytes(parts.iter().map(|part| &part.answer.set)),
            _ => first.checkpoint_bytes,
        },
        host: host(team, parts),
        predicted: Predicted { step_seconds, tokens_per_second: team.tokens() / step_seconds },
        ..first.clone()
    }
}

/// The same of the stages of a pipeline: they wait for each other.
fn pipeline(team: &TeamQuestion, parts: &[Part], team_link: Link) -> Vec<(f64, f64)> {
    let stage = |part: &Part| {
        let (question, precision) = (&team.devices[part.device], part.answer.precision);
        let (rates, host) = (&question.device.rates, &question.host);
        StageSeconds::of(&part.answer.set, &Prices { rates, host, precision, team_link })
    };
    let first = &parts[0];
    let count = first.share.micro_batches_of(first.sequences, first.answer.plan.recipe.micro_batch) as u32;
    let stages: Vec<StageSeconds> = parts.iter().map(stage).collect();
    let all = step_seconds(&stages, count);
    stages.iter().map(|stage| stage.busy(count)).map(|busy| (busy, (all - busy).max(0.0))).collect()
}

/// Seconds in which a device computes, and those in which it waits for what the team exchanges alone.
fn busy(team: &TeamQuestion, part: &Part, team_link: Link) -> (f64, f64) {
    let (question, set) = (&team.devices[part.device], &part.answer.set);
    let prices = |team_link| Prices {
        rates: &question.device.rates,
        host: &question.host,
        precision: part.answer.precision,
        team_link,
    };
    let count = part.share.micro_batches_of(part.sequences, part.answer.plan.recipe.micro_batch);
    let mut calls = part.share.schedule(count as u32).calls;
    let whole = prices(team_link).schedule_seconds(set, &calls);
    let at_once = match part.share.sharing {
        Some(Sharing::Batch) => {
            calls.iter_mut().for_each(|call| call.last = false);
            team_link
        }
        _ => NO_TIME,
    };
    let computes = prices(at_once).schedule_seconds(set, &calls);
    (computes, (whole - computes).max(0.0))
}

/// The host's sides of all members, one beside the other.
fn host(team: &TeamQuestion, parts: &[Part]) -> DevicePlan {
    let mut whole = DevicePlan { name: "host".into(), budget_bytes: team.host, ..DevicePlan::default() };
    for DevicePlan {
        simulated,
        arena_bytes,
        charges_bytes,
        peak_bytes,
        by_category,
        by_program,
        lower_bound_bytes,
        ..
    } in parts.iter().map(|part| &part.answer.plan.host)
    {
        whole.simulated |= simulated;
        whole.arena_bytes += *arena_bytes;
        whole.charges_bytes += *charges_bytes;
        whole.peak_bytes += *peak_bytes;
        whole.lower_bound_bytes += *lower_bound_bytes;
        for (category, bytes) in by_category {
            *whole.by_category.entry(*category).or_default() += *bytes;
        }
        for (work, bytes) in by_program {
            *whole.by_program.entry(*work).or_default() += *bytes;
        }
    }
    whole
}
