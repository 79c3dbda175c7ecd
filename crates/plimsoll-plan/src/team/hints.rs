//! Other settings of a team that somebody is told of: what would use a device that is left out, and what would let all take
//! part where one cannot. The team is planned under each before it is named, so that it is true when it is typed.

use super::{Only, TeamAnswer, TeamQuestion, batch, fitting, slows};
use crate::paper;
use crate::request::DevicesRequest;
use crate::search::{Question, can_hold, leanest, need, plan_of, search, sets, under};
use plimsoll_core::{Budget, Bytes, DeviceKind, DevicePlan, DeviceSpec, Need, Plan, Rung, Sharing};
use plimsoll_program::Share;
use std::collections::BTreeMap;

/// What a process holds beside its arenas wavers from start to start.
const WAVER: Bytes = Bytes::mib(1);

/// What is other than in a question.
#[derive(Clone, Debug, Default)]
struct Change {
    /// Load lines of devices, by their numbers.
    lines: BTreeMap<usize, Bytes>,
    /// Lossy rungs that are allowed, too.
    allow: Vec<Rung>,
    /// Whether every device has to take part.
    all: bool,
}

impl Change {
    /// The team under it, where that fits.
    fn planned(&self, team: &TeamQuestion) -> Option<TeamAnswer> {
        let line = |(number, question): (usize, &Question)| {
            let line = self.lines.get(&number).copied();
            DeviceSpec { budget: line.unwrap_or(question.device.budget), ..question.device.clone() }
        };
        let specs: Vec<DeviceSpec> = team.devices.iter().enumerate().map(line).collect();
        let of = |(question, device)| {
            let Question { mut lossy, .. } = Question::clone(question);
            lossy.allow.extend(self.allow.iter().filter(|rung| !question.lossy.allow.contains(rung)));
            Question { device, lossy, ..question.clone() }
        };
        let devices = team.devices.iter().zip(&specs).map(of).collect();
        let (all, only) = (team.all || self.all, team.only.clone());
        let answer = fitting(&TeamQuestion { devices, host: team.host, all, only, evaluations: None })?;
        (!all || answer.parts.len() == team.devices.len()).then_some(answer)
    }

    /// As settings behind the command whose devices were asked for in these words.
    fn words(&self, team: &TeamQuestion, request: &DevicesRequest) -> String {
        let mut words = Vec::new();
        if !self.allow.is_empty() {
            let names: Vec<String> = self.allow.iter().map(Rung::to_string).collect();
            words.push(format!("--allow {}", names.join(",")));
        }
        if !self.lines.is_empty() {
            let mut request = request.clone();
            for (&number, line) in &self.lines {
                if let Some(at) = asked(team, &request, number) {
                    request.devices[at].give(Budget::Amount(*line));
                }
            }
            words.push(format!("--devices {request}"));
        }
        if self.all {
            words.push("--set run.team=all".to_owned());
        }
        words.join(" ")
    }
}

/// Says of each device that is left out of a plan what would use it, where something does. `request` is what the devices were
/// asked for with.
pub fn say_what_would_use(team: &TeamQuestion, request: &DevicesRequest, plan: &mut Plan) {
    let without = plan.predicted.tokens_per_second;
    let mut known: Vec<(usize, Option<(Change, f64)>)> = Vec::new();
    let out: Vec<usize> = plan.left_out.iter().map(|out| out.number).collect();
    for (at, &device) in out.iter().enumerate().filter(|_| plan.fits) {
        let alike = |other: usize| team.first_alike(other) == team.first_alike(device);
        // Of those that are alike, whichever takes part.
        let before = (0..team.devices.len()).filter(|number| alike(*number) && !out.contains(number)).count();
        let uses = |change: Change| {
            let answer = change.planned(team)?;
            let taken = answer.parts.iter().filter(|part| alike(part.device)).count();
            (taken > before).then_some((change, answer.plan.predicted.tokens_per_second))
        };
        let like = known.iter().find(|(other, _)| alike(*other));
        // Those that are alike are told alike, but for their names.
        let found = match like {
            Some((_, Some((change, with)))) if change.lines.is_empty() => Some((change.clone(), *with)),
            Some((_, None)) => None,
            _ => changes(team, request, device, &plan.rungs).into_iter().find_map(uses),
        };
        let left_out = &mut plan.left_out[at];
        left_out.used_by = found.as_ref().map(|(change, _)| change.words(team, request));
        // What was an estimate until now.
        if let (Some(estimated), Some((_, with))) = (&mut left_out.tokens_per_second, &found) {
            (*estimated, left_out.why) = (*with, slows(with / without));
        }
        known.push((device, found));
    }
}

/// Where in a request a device of a team is asked for: of several with one name, which are on paper, the first is the first.
fn asked(team: &TeamQuestion, request: &DevicesRequest, number: usize) -> Option<usize> {
    let name = &team.devices[number].device.name;
    let before = team.devices[..number].iter().filter(|question| question.device.name == *name).count();
    let named = request.devices.iter().enumerate().filter(|(_, asked)| asked.name() == *name);
    named.map(|(at, _)| at).nth(before)
}

/// What may use a device, what costs least first.
fn changes(team: &TeamQuestion, request: &DevicesRequest, device: usize, rungs: &[Rung]) -> Vec<Change> {
    let all = Change { all: true, ..Change::default() };
    let question = team.of(device, &Share::ALONE, 1, team.host);
    let name = question.device.name.clone();
    if can_hold(&under(&question, rungs)) {
        return vec![all];
    }
    let named = asked(team, request, device).map(|at| &request.devices[at]);
    let has_own = named.is_some_and(|asked| asked.budget().is_some());
    // What was not given a line has all that is free.
    let may_have_more = match question.device.kind {
        DeviceKind::Cpu | DeviceKind::Cuda => has_own,
        DeviceKind::Virtual | DeviceKind::Paper => named.is_some(),
    };
    let needed = may_have_more.then(|| line_of(&under(&question, rungs))).flatten();
    let needed = needed.filter(|line| paper::usable(&name).is_none_or(|has| *line <= has));
    let line = |line: Bytes| Change { lines: BTreeMap::from([(device, line)]), ..Change::default() };
    let mut changes: Vec<Change> = needed.map(line).into_iter().collect();
    changes.push(all.clone());
    changes.extend(needed.map(|needed| Change { all: true, ..line(needed) }));
    // Where others can do without, rungs are taken only if all have to take part.
    let offered: Vec<Rung> = Rung::ALL.into_iter().filter(|rung| question.lossy.offer.contains(rung)).collect();
    let further = |set: &Vec<Rung>| set.len() > rungs.len() && rungs.iter().all(|rung| set.contains(rung));
    let enough = sets(&question, &offered).into_iter().filter(further).find(|set| can_hold(&under(&question, set)));
    changes.extend(enough.map(|allow| Change { allow, ..all }));
    changes
}

/// The load line under which a device holds what is asked, as it is written down; none where no line is enough.
fn line_of(question: &Question) -> Option<Bytes> {
    let mut question = question.clone();
    (question.lossy.allow, question.lossy.offer) = (vec![], vec![]);
    let need =
        search(&question).plan.needs.into_iter().find(|need| need.host_bytes.is_none() && need.allow.is_empty())?;
    Some(Bytes::mib(need.budget_bytes.0.div_ceil(1 << 20)) + WAVER)
}

/// Where no lossy rung by itself lets one device hold what is asked: the first that does where all share it. What takes more
/// rungs is no longer among the needs then.
pub(super) fn with_one_rung(team: &TeamQuestion, refused: &mut Plan) {
    let (question, line) = (&team.devices[0], refused.devices[0].budget_bytes);
    let of_rungs = |need: &Need| need.host_bytes.is_none() && need.file_bytes.is_none();
    let further = |need: &Need| need.allow.iter().filter(|rung| !question.lossy.allow.contains(rung)).count();
    if refused.needs.iter().any(|need| of_rungs(need) && need.budget_bytes <= line && further(need) <= 1) {
        return;
    }
    let offered = |rung: &Rung| question.lossy.offer.contains(rung) && !question.lossy.allow.contains(rung);
    let alone =
        |rung: Rung| Change { allow: vec![rung], ..Change::default() }.planned(team).map(|answer| answer.plan.rungs);
    let Some(taken) = Rung::ALL.into_iter().filter(offered).find_map(alone) else { return };
    let covered = |need: &Need| of_rungs(need) && taken.iter().all(|rung| need.allow.contains(rung));
    refused.needs.retain(|need| !covered(need));
    let needs = &mut refused.needs;
    let at = needs.iter().position(|need| !need.allow.is_empty()).unwrap_or(needs.len());
    let allow = taken.into_iter().filter(|rung| !question.rungs.contains(rung)).collect();
    needs.insert(at, need(allow, line));
}

/// The needs of the one device that lacks the least, as they are where every device has to take part: each with its part of
/// the sequences and of the host, under the lines that the others need then, too. What is not enough for all together is not
/// among them.
pub(super) fn for_all(team: &TeamQuestion, refused: &Plan) -> Vec<Need> {
    let (total, ranks) = (team.total(), team.devices.len() as u64);
    let Some(first) = refused.devices.first().filter(|_| total >= ranks) else { return vec![] };
    let sequences: Vec<u64> = (0..ranks).map(|rank| total * (rank + 1) / ranks - total * rank / ranks).collect();
    let shares = batch::shares(&sequences);
    let batch = TeamQuestion { only: Some(Only::Sharing(Sharing::Batch)), ..team.clone() };
    let of_all = |need: &Need| {
        let mut lines: BTreeMap<String, Bytes> = BTreeMap::new();
        for (device, share) in shares.iter().enumerate() {
            let question = team.of(device, share, sequences[device], Bytes(team.host.0 / ranks));
            let question = under(&question, &need.allow);
            let smallest = plan_of(&question, &leanest(&question, &[]).recipe).plan.devices[0].peak_bytes;
            if smallest > question.device.budget {
                let line = lines.entry(question.device.name.clone()).or_default();
                *line = (*line).max(Bytes::mib(smallest.0.div_ceil(1 << 20)) + WAVER);
            }
        }
        // No more is written down than a device on paper has.
        let has = |(name, line): (&String, &Bytes)| paper::usable(name).is_none_or(|has| *line <= has);
        if !lines.iter().all(has) {
            return None;
        }
        // All of a name that have less are given it: nobody's line is lowered.
        let raised = |(number, question): (usize, &Question)| {
            let line = lines.get(&question.device.name).filter(|line| **line > question.device.budget)?;
            Some((number, *line))
        };
        let raised = team.devices.iter().enumerate().filter_map(raised).collect();
        Change { lines: raised, allow: need.allow.clone(), all: true }.planned(&batch)?;
        let mut others = lines;
        let budget_bytes = others.get(&first.name).copied().unwrap_or(first.budget_bytes);
        if team.devices.iter().filter(|question| question.device.name == first.name).count() == 1 {
            others.remove(&first.name);
        }
        Some(Need { others, budget_bytes, peak_bytes: None, ..need.clone() })
    };
    let here = |need: &&Need| need.host_bytes.is_none() && need.file_bytes.is_none();
    let mut needs: Vec<Need> = refused.needs.iter().filter(here).filter_map(of_all).collect();
    if let Some(at) = needs.iter().position(|need| need.allow.is_empty()) {
        let enough = with_less(team, first, &needs[at]);
        // Nobody takes a loss where the same is enough without one.
        needs.retain(|need| need.allow.is_empty() || need.budget_bytes < enough.budget_bytes);
        needs[at] = enough;
    }
    needs
}

/// The same need under lower lines, where all take part in another way than by a batch that they share: in so many steps at
/// most from what the devices have to what would be enough for that.
fn with_less(team: &TeamQuestion, first: &DevicePlan, need: &Need) -> Need {
    const STEPS: u64 = 32;
    let enough = |name: &String| match need.others.get(name) {
        Some(line) => Some(*line),
        None => (*name == first.name).then_some(need.budget_bytes),
    };
    let lacks = |(number, question): (usize, &Question)| {
        let DeviceSpec { name, budget, .. } = question.device;
        enough(name).filter(|enough| enough > budget).map(|enough| (number, *budget, enough))
    };
    let lacking: Vec<(usize, Bytes, Bytes)> = team.devices.iter().enumerate().filter_map(lacks).collect();
    let lines_at = |step: u64| -> BTreeMap<usize, Bytes> {
        let line = |(number, has, enough): &(usize, Bytes, Bytes)| {
            let more = (enough.0 - has.0).div_ceil(STEPS) * step;
            (*number, (*enough).min(Bytes::mib((has.0 + more).div_ceil(1 << 20))))
        };
        lacking.iter().map(line).collect()
    };
    let (mut not, mut does) = (0, STEPS);
    while does - not > 1 {
        let step = (not + does) / 2;
        let lines = lines_at(step).into_iter().map(|(number, line)| (number, line.saturating_sub(WAVER))).collect();
        match (Change { lines, all: true, ..Change::default() }.planned(team)) {
            Some(_) => does = step,
            None => not = step,
        }
    }
    let lines = lines_at(does);
    let named = |name: &String| lines.iter().find(|(number, _)| team.devices[**number].device.name == *name);
    let line = |name: &String, before: Bytes| named(name).map_or(before, |(_, line)| *line);
    let others = need.others.iter().map(|(name, before)| (name.clone(), line(name, *before))).collect();
    Need { budget_bytes: line(&first.name, need.budget_bytes), others, ..need.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::Lossy;
    use crate::team::{share_out, testing};
    use plimsoll_core::Link;
    use plimsoll_program::models::{ModelConfig, preset};

    #[test]
    fn one_rung_that_is_enough_for_all_together_is_named_instead_of_two_that_one_device_needs() {
        let config = ModelConfig { layers: 4, vocab: 1024, ..preset("smollm2-135m").expect("listed") };
        let device = testing::device(1.0, Bytes::mib(50), Link::MEMORY);
        let lossy = Lossy { offer: vec![Rung::Adam8bit, Rung::Lora, Rung::Nf4], ..Lossy::default() };
        let needs = |devices: usize| {
            let question = Question { lossy: lossy.clone(), ..testing::question(&config, &device, 64, 6) };
            let devices = vec![question; devices];
            let team = TeamQuestion { devices, host: Bytes::ZERO, all: false, only: None, evaluations: None };
            let plan = share_out(&team).plan;
            assert!(!plan.fits);
            let words = |need: Need| (need.allow, need.budget_bytes <= device.budget);
            plan.needs.into_iter().map(words).collect::<Vec<_>>()
        };
        let (lora, both) = (vec![Rung::Lora], vec![Rung::Lora, Rung::Nf4]);
        let (nothing, adam) = ((vec![], false), (vec![Rung::Adam8bit], false));
        assert_eq!(needs(1), [nothing.clone(), adam.clone(), (lora.clone(), false), (both, true)]);
        assert_eq!(needs(3), [nothing, (lora, true), adam]);
    }

    #[test]
    fn where_all_have_to_take_part_what_is_named_is_enough_and_no_loss_is_offered_for_more() {
        let config = ModelConfig { layers: 4, vocab: 1024, ..preset("smollm2-135m").expect("listed") };
        let of_line = |(name, line)| DeviceSpec {
            name: String::from(name),
            ..testing::device(1.0, Bytes::mib(line), Link::MEMORY)
        };
        let devices = [("large", 400), ("small", 60)].map(of_line);
        let lossy = Lossy { offer: vec![Rung::Adam8bit, Rung::Lora], ..Lossy::default() };
        let of = |devices: &[DeviceSpec]| {
            let of = |device| Question { lossy: lossy.clone(), ..testing::question(&config, device, 64, 6) };
            let devices = devices.iter().map(of).collect();
            share_out(&TeamQuestion { devices, host: Bytes::ZERO, all: true, only: None, evaluations: None }).plan
        };
        let refused = of(&devices);
        assert!(!refused.fits);
        let least = &refused.needs[0];
        assert_eq!((&least.allow, least.others.len()), (&vec![], 0), "{refused:?}");
        let mut enough = devices;
        enough[1].budget = least.budget_bytes;
        let plan = of(&enough);
        assert!(plan.fits && plan.team.len() == 2 && plan.sharing != Some(Sharing::Batch), "{least:?}");
        assert!(refused.needs[1..].iter().all(|need| need.budget_bytes < least.budget_bytes), "{:?}", refused.needs);
    }
}
