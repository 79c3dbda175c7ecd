//! The plan of a team as it is written down, from the plans of its members.

use super::{Part, TeamQuestion};
use crate::price::Prices;
use plimsoll_core::{Bytes, Class, DevicePlan, Member, Plan, Predicted, Sharing};
use plimsoll_program::Schedule;

/// The whole plan: fits where every member does and all together are under the host's load line. Each member's own plan
/// is given its part of the host.
pub(super) fn plan(team: &TeamQuestion, parts: &mut [Part]) -> Plan {
    let held: Bytes = parts.iter().map(|part| part.answer.plan.host.arena_bytes).sum();
    let left = team.host.saturating_sub(held).0 / parts.len() as u64;
    let on_host = held <= team.host;
    for part in parts.iter_mut().filter(|part| part.answer.plan.host.budget_bytes > Bytes::ZERO) {
        part.answer.plan.host.budget_bytes = part.answer.plan.host.arena_bytes + Bytes(left);
    }
    let (first, many) = (&parts[0].answer.plan, parts.len() > 1);
    let busy: Vec<(f64, f64)> = parts.iter().map(|part| busy(team, part)).collect();
    let step_seconds = busy.iter().map(|(busy, waits)| busy + waits).fold(0.0, f64::max);
    let tokens = (team.total() * team.devices[0].sequence) as f64;
    let member = |(part, (busy, _)): (&Part, &(f64, f64))| Member {
        device: team.devices[part.device].device.name.clone(),
        recipe: part.answer.plan.recipe.clone(),
        sequences: part.sequences,
        layers: None,
        state: None,
        algorithms: None,
        busy_seconds: *busy,
        idle_seconds: step_seconds - busy,
    };
    Plan {
        fits: on_host && parts.iter().all(|part| part.answer.plan.fits),
        class: if many { first.class.max(Class::Reordered) } else { first.class },
        devices: parts.iter().map(|part| part.answer.plan.devices[0].clone()).collect(),
        sharing: many.then_some(Sharing::Batch),
        team: if many { parts.iter().zip(&busy).map(member).collect() } else { vec![] },
        host: host(team, parts),
        predicted: Predicted { step_seconds, tokens_per_second: tokens / step_seconds },
        ..first.clone()
    }
}

/// Seconds in which a device computes, and those in which it waits for the sums of the team alone.
fn busy(team: &TeamQuestion, part: &Part) -> (f64, f64) {
    let (question, plan) = (&team.devices[part.device], &part.answer.plan);
    let prices = Prices {
        rates: &question.device.rates,
        host: &question.host,
        precision: part.answer.precision,
        team_link: question.device.team_link,
    };
    let count = part.sequences.div_ceil(u64::from(plan.recipe.micro_batch)) as u32;
    let mut calls = Schedule::accumulate(count).calls;
    calls.iter_mut().for_each(|call| call.last = false);
    let (computes, whole) = (prices.schedule_seconds(&part.answer.set, &calls), plan.predicted.step_seconds);
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
