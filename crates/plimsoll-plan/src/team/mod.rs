//! What the devices of a team are given: who takes part, how much of the step each computes, and the recipe of each under
//! its own load line.
//!
//! Shares are whole sequences that make the slowest device as fast as it can be. They are found on menus (`search::menu`):
//! recipes of each device that fit, measured once and priced for any share; only what is chosen is packed. A device that
//! would slow the others, or cannot hold the model, is left out and named, with what would use it.

mod alternatives;
mod batch;
mod exchange;
mod whole;

use crate::paper;
use crate::search::{Answer, Question, can_hold, leanest, plan_like, plan_of, search, sets, under};
pub use alternatives::alternatives;
use batch::{Crew, Split};
use plimsoll_core::{Bytes, HostSpec, LeftOut, Member, Plan, Recipe, Rung, Sharing};
use plimsoll_program::Share;

/// Times that the host is shared out anew, and recipes that are given up because they do not pack.
const TRIES: usize = 40;

/// What is asked of the planner about a team.
#[derive(Clone, Debug)]
pub struct TeamQuestion<'a> {
    /// The same question for each device, in the order of ranks; `sequences` are those of the whole step, and `share` all
    /// of it.
    pub devices: Vec<Question<'a>>,
    /// The load line of the host, whose memory all have together.
    pub host: Bytes,
    /// Whether every device has to take part (`run.team = "all"`).
    pub all: bool,
}

/// One device of a team with all that is needed to run its part.
#[derive(Clone, Debug)]
pub struct Part {
    /// Which of the question's devices it is.
    pub device: usize,
    /// Its part of the step.
    pub share: Share,
    /// Sequences of a step that it computes.
    pub sequences: u64,
    /// Its own plan, Programs and layout.
    pub answer: Answer,
}

/// A team's plan with all that is needed to run it.
#[derive(Clone, Debug)]
pub struct TeamAnswer {
    /// Those that take part, in the order of ranks. Where nothing fits, the one that lacks the least.
    pub parts: Vec<Part>,
    /// The whole as it is written down.
    pub plan: Plan,
}

impl<'a> TeamQuestion<'a> {
    /// Sequences of a step, of all devices together.
    fn total(&self) -> u64 {
        self.devices.first().map_or(0, |question| question.sequences)
    }

    /// The first device of each kind.
    fn kinds(&self) -> Vec<usize> {
        let first = |device: &usize| self.first_alike(*device) == *device;
        (0..self.devices.len()).filter(first).collect()
    }

    /// The first device that is like another.
    fn first_alike(&self, device: usize) -> usize {
        let like = |other: &usize| batch::alike(&self.devices[*other], &self.devices[device]);
        (0..device).find(like).unwrap_or(device)
    }

    /// Tokens of a step, padding counted.
    fn tokens(&self) -> f64 {
        self.devices.first().map_or(0.0, |question| (question.sequences * question.sequence) as f64)
    }

    /// The question of one device that takes such a share, beside so much of the host.
    fn of(&self, device: usize, share: &Share, sequences: u64, host: Bytes) -> Question<'a> {
        let question = &self.devices[device];
        Question { share: share.clone(), sequences, host: with_budget(question.host, host), ..question.clone() }
    }

    /// Questions for menus under some rungs: with about the sequences that each device's published rates would give it.
    fn about(&self, rungs: &[Rung], hosts: &[Bytes]) -> Vec<Question<'a>> {
        let rate = |question: &Question| match question.precision {
            plimsoll_core::DType::Bf16 => question.device.rates.bf16_flops,
            _ => question.device.rates.f32_flops,
        };
        let all: f64 = self.devices.iter().map(rate).sum();
        let of = |(question, host): (&Question<'a>, &Bytes)| {
            let part = self.total() as f64 * rate(question) / all;
            let question = Question { host: with_budget(question.host, *host), ..question.clone() };
            Question { sequences: (part.ceil() as u64).clamp(1, self.total()), ..under(&question, rungs) }
        };
        self.devices.iter().zip(hosts).map(of).collect()
    }
}

/// A host of which so much may be used; one that does not exist stays so.
fn with_budget(host: HostSpec, budget: Bytes) -> HostSpec {
    HostSpec { budget: budget.min(host.budget), ..host }
}

/// Shares of a batch for ranks in order.
fn batch_shares(sequences: &[u64]) -> Vec<Share> {
    let before = |rank: usize| sequences[..rank].iter().sum();
    let share = |rank: usize| Share {
        sharing: Some(Sharing::Batch),
        rank: rank as u32,
        ranks: sequences.len() as u32,
        first_sequence: before(rank),
        ..Share::ALONE
    };
    (0..sequences.len()).map(share).collect()
}

/// The fastest team of the devices under their load lines, with the least loss that is needed; where nothing fits, the
/// device that lacks the least, with the budgets that would do.
///
/// # Panics
/// Without any device.
pub fn share_out(team: &TeamQuestion) -> TeamAnswer {
    let first = &team.devices[0];
    if team.devices.len() == 1 || first.optimizer.is_none() {
        return alone(team, fastest_alone(team, false), vec![]);
    }
    for rungs in sets(first, &first.lossy.allow) {
        if let Some(answer) = under_rungs(team, &rungs) {
            return answer;
        }
    }
    // Where all have to take part, one of them does not fit. Where none fits, what is missing is worked out for one.
    let lacks = |device: &usize| {
        let question = &team.devices[*device];
        leanest(question, &question.lossy.allow).device.saturating_sub(question.device.arena_budget().0)
    };
    let refused = match team.all {
        true => fastest_alone(team, true),
        false => {
            let device = team.kinds().into_iter().min_by_key(lacks).expect("a team has a device");
            (device, search(&team.devices[device]))
        }
    };
    let others: Vec<usize> = (0..team.devices.len()).filter(|&device| device != refused.0 && !team.all).collect();
    // What would use the others is said by what the refusal needs.
    let left_out = cannot_hold(team, &others, &[], false);
    alone(team, refused, left_out)
}

/// The best answer of any device by itself: what fits by its time, what does not by what it lacks; or, with
/// `refused_first`, of those that do not fit. Devices that are alike are asked once.
fn fastest_alone(team: &TeamQuestion, refused_first: bool) -> (usize, Answer) {
    let order = |plan: &Plan| match plan.fits {
        true => -1.0 / plan.predicted.step_seconds,
        false => plan.devices[0].peak_bytes.saturating_sub(plan.devices[0].budget_bytes).0 as f64,
    };
    let rank = |answer: &Answer| (refused_first && answer.plan.fits, order(&answer.plan));
    let answers = team.kinds().into_iter().map(|device| (device, search(&team.devices[device])));
    let ranked = answers.map(|(device, answer)| (rank(&answer), (device, answer)));
    let best = ranked.min_by(|(a, _), (b, _)| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    best.expect("a team has a device").1
}

/// A team of one: the run of a single device.
fn alone(team: &TeamQuestion, (device, answer): (usize, Answer), left_out: Vec<LeftOut>) -> TeamAnswer {
    let plan = Plan { left_out, ..answer.plan.clone() };
    TeamAnswer { parts: vec![Part { device, share: Share::ALONE, sequences: team.total(), answer }], plan }
}

/// The fastest team under some lossy rungs, if any device can hold the model under them.
fn under_rungs(team: &TeamQuestion, rungs: &[Rung]) -> Option<TeamAnswer> {
    let total = team.total();
    let mut hosts = vec![team.host; team.devices.len()];
    let mut questions = team.about(rungs, &hosts);
    for _ in 0..TRIES {
        let mut crew = Crew::new(&questions, total);
        let able = crew.able();
        if able.is_empty() || team.all && able.len() < team.devices.len() {
            return None;
        }
        let choose = |crew: &Crew| match team.all {
            true => crew.split(&able),
            false => crew.fastest(&able),
        };
        let mut split = choose(&crew)?;
        for _ in 0..4 {
            crew.look_near(&split);
            let next = choose(&crew)?;
            let same = next == split;
            split = next;
            if same {
                break;
            }
        }
        // All of them have one host.
        let wanted: Vec<Bytes> = crew.found(&split).iter().map(|found| Bytes(found.host)).collect();
        let all_wanted: Bytes = wanted.iter().copied().sum();
        if all_wanted > team.host {
            let of = |bytes: Bytes| Bytes((team.host.0 as f64 * (bytes.0 as f64 / all_wanted.0 as f64)) as u64);
            hosts = vec![Bytes(team.host.0 / team.devices.len() as u64); team.devices.len()];
            for (&device, &bytes) in split.devices.iter().zip(&wanted) {
                hosts[device] = of(bytes);
            }
            drop(crew);
            questions = team.about(rungs, &hosts);
            continue;
        }
        return packed(team, rungs, crew, split, &choose);
    }
    None
}

/// Packs what each device of a team would hold; what does not fit then is taken off the menu.
fn packed<'q>(
    team: &TeamQuestion,
    rungs: &[Rung],
    mut crew: Crew<'q>,
    mut split: Split,
    choose: &dyn Fn(&Crew<'q>) -> Option<Split>,
) -> Option<TeamAnswer> {
    for _ in 0..TRIES {
        if let [device] = split.devices[..] {
            let answer = search(&team.of(device, &Share::ALONE, team.total(), team.host));
            if answer.plan.fits {
                let left_out = left_out(team, rungs, &crew, &split);
                return Some(alone(team, (device, answer), left_out));
            }
        }
        let recipes: Vec<Recipe> = crew.found(&split).iter().map(|found| found.recipe.clone()).collect();
        let shares = batch_shares(&split.sequences);
        let mut parts: Vec<Part> = Vec::new();
        for (rank, share) in shares.into_iter().enumerate() {
            let (device, sequences) = (split.devices[rank], split.sequences[rank]);
            let question = team.of(device, &share, sequences, team.host);
            let question = under(&question, rungs);
            let like = |part: &&Part| {
                crew.alike(part.device, device)
                    && part.sequences == sequences
                    && part.answer.plan.recipe == recipes[rank]
            };
            let answer = match parts.iter().find(like) {
                Some(part) => plan_like(&question, &recipes[rank], &part.answer),
                None => plan_of(&question, &recipes[rank]),
            };
            if !answer.plan.fits {
                crew.strike(device, &recipes[rank]);
                break;
            }
            parts.push(Part { device, share, sequences, answer });
        }
        if parts.len() == split.devices.len() {
            let mut plan = whole::plan(team, &mut parts);
            if plan.fits {
                plan.left_out = left_out(team, rungs, &crew, &split);
                plan.worth = Some(alternatives::worth(team, &crew, &split));
                return Some(TeamAnswer { parts, plan });
            }
            // Packed, they want more of the host than there is.
            let largest = |a: &&Part, b: &&Part| a.answer.layout.host.bytes.cmp(&b.answer.layout.host.bytes);
            let part = parts.iter().max_by(largest)?;
            crew.strike(part.device, &part.answer.plan.recipe);
        }
        split = choose(&crew)?;
    }
    None
}

/// Those that take no part, and why.
fn left_out(team: &TeamQuestion, rungs: &[Rung], crew: &Crew, split: &Split) -> Vec<LeftOut> {
    let able = crew.able();
    let out = (0..team.devices.len()).filter(|device| !split.devices.contains(device));
    let (slow, unable): (Vec<usize>, Vec<usize>) = out.partition(|device| able.contains(device));
    let why = |device: usize| {
        let mut devices = split.devices.clone();
        devices.push(device);
        devices.sort_unstable();
        let named = |why: String| LeftOut {
            device: team.devices[device].device.name.clone(),
            why,
            used_by: None,
            tokens_per_second: None,
        };
        let Some(with) = crew.split(&devices) else {
            return named("no sequence of a step is left for it".to_owned());
        };
        let share = 100.0 * split.seconds / with.seconds;
        LeftOut {
            used_by: Some("--set run.team=all".to_owned()),
            tokens_per_second: Some(team.tokens() / with.seconds),
            ..named(format!("it would slow the team: to {share:.1} % of the tokens a second, predicted"))
        }
    };
    slow.into_iter().map(why).chain(cannot_hold(team, &unable, rungs, true)).collect()
}

/// Devices that cannot hold the model under some rungs; where it is asked for, with the least loss or the load line that
/// would do.
fn cannot_hold(team: &TeamQuestion, devices: &[usize], rungs: &[Rung], ways: bool) -> Vec<LeftOut> {
    let mut known: Vec<(usize, LeftOut)> = Vec::new();
    for &device in devices {
        let like = known.iter().find(|(other, _)| team.first_alike(*other) == team.first_alike(device));
        let why = like.map_or_else(|| lacks(team, device, rungs, ways), |(_, why)| why.clone());
        known.push((device, LeftOut { device: team.devices[device].device.name.clone(), ..why }));
    }
    known.into_iter().map(|(_, why)| why).collect()
}

/// What a device lacks to hold the model by itself.
fn lacks(team: &TeamQuestion, device: usize, rungs: &[Rung], ways: bool) -> LeftOut {
    let question = team.of(device, &Share::ALONE, 1, team.host);
    let name = &question.device.name;
    let smallest = leanest(&under(&question, rungs), &[]);
    let peak = Bytes(smallest.device) + question.device.charges;
    let offered: Vec<Rung> = Rung::ALL.into_iter().filter(|rung| question.lossy.offer.contains(rung)).collect();
    let further = |set: &Vec<Rung>| ways && set.len() > rungs.len() && rungs.iter().all(|rung| set.contains(rung));
    let fits = |set: &Vec<Rung>| can_hold(&under(&question, set));
    let enough = sets(&question, &offered).into_iter().filter(further).find(fits);
    let used_by = match enough {
        Some(set) => {
            let names: Vec<String> = set.iter().map(Rung::to_string).collect();
            Some(format!("--allow {}", names.join(",")))
        }
        // No more is written down than a device on paper has.
        None if !ways => None,
        None if paper::usable(name).is_some_and(|has| has < peak) => None,
        None => Some(format!("{name}={} in --devices", Bytes::mib(peak.0.div_ceil(1 << 20)))),
    };
    LeftOut {
        device: name.clone(),
        why: format!("its smallest recipe holds {peak}, and its load line is {}", question.device.budget),
        used_by,
        tokens_per_second: None,
    }
}

/// The plan of given shares and recipes, whatever the load lines say: for a resumed run. Members are found by their
/// devices' names.
///
/// # Panics
/// Where a member is no device of the question.
pub fn plan_of_team(team: &TeamQuestion, members: &[Member]) -> TeamAnswer {
    given(team, members, plan_of)
}

/// Plans a team again whose load lines have changed: everybody keeps its share, and its recipe where that still fits; the
/// others get the fastest one that does. Where there is none, the step is shared out anew.
///
/// # Panics
/// As [`plan_of_team`].
pub fn plan_again(team: &TeamQuestion, members: &[Member]) -> TeamAnswer {
    let kept = given(team, members, |question, recipe| {
        let kept = plan_of(question, recipe);
        if kept.plan.fits { kept } else { search(&under(question, &recipe.rungs)) }
    });
    if kept.plan.fits { kept } else { share_out(team) }
}

fn given(team: &TeamQuestion, members: &[Member], plan: impl Fn(&Question, &Recipe) -> Answer) -> TeamAnswer {
    let sequences: Vec<u64> = members.iter().map(|member| member.sequences).collect();
    let shares = if members.len() > 1 { batch_shares(&sequences) } else { vec![Share::ALONE] };
    let mut parts: Vec<Part> = Vec::new();
    for (member, share) in members.iter().zip(shares) {
        let named = |question: &Question| question.device.name == member.device;
        // Several devices on paper may have one name.
        let free = |device: &usize| parts.iter().all(|part| part.device != *device);
        let device = (0..team.devices.len()).filter(free).find(|&device| named(&team.devices[device]));
        let device = device.expect("a member is a device of the question");
        let question = team.of(device, &share, member.sequences, team.host);
        let like = |part: &&Part| {
            let (one, other) = (&team.devices[part.device], &team.devices[device]);
            batch::alike(one, other) && part.sequences == member.sequences && part.answer.plan.recipe == member.recipe
        };
        let answer = match parts.iter().find(like) {
            Some(part) => plan_like(&question, &member.recipe, &part.answer),
            None => plan(&question, &member.recipe),
        };
        parts.push(Part { device, share, sequences: member.sequences, answer });
    }
    let plan = whole::plan(team, &mut parts);
    TeamAnswer { parts, plan }
}
