//! What the devices of a team are given: who takes part, how much of the step each computes, and the recipe of each under
//! its own load line.
//!
//! Each way to share out (`ShareOut`) finds its fastest team by the bounds of what everybody holds; the faster one is
//! taken, and only what is chosen is packed. *Batch* gives whole sequences to devices that have the whole model, *state*
//! holds the model in parts. A device that would slow the others, or cannot hold the model, is left out and named, with what
//! would use it; where it can evaluate beside the others, and that is worth it, it does (`evaluator`).

mod alternatives;
mod batch;
mod evaluator;
mod exchange;
mod hints;
mod layers;
mod state;
#[cfg(test)]
mod testing;
mod whole;

use crate::search::{
    Answer, Pins, Question, Sets, both, can_hold, leanest, need, plan_like, plan_of, search, search_one_of, sets,
    side_by_side, under,
};
pub use alternatives::{alternatives, ladders};
pub use evaluator::evaluating;
pub use hints::say_what_would_use;
use layers::Layers;
use plimsoll_core::{Bytes, FileSpec, HostSpec, LeftOut, Link, Member, Need, Plan, Recipe, Rung, Sharing, Worth};
use plimsoll_program::Share;
use state::State;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Recipes that are given up because they do not pack.
const TRIES: usize = 40;
/// Where devices can hold the model, the state in parts must take no more than this part of the time to be worth it: a part
/// that stands on one device alone is lost with it.
const WORTH: f64 = 0.95;
/// So many times what is worked out to wait on the host are tried, where a refusal looks for the least of it.
const MORE: [f64; 4] = [1.01, 1.02, 1.04, 1.1];

/// A way to share out a step, by the bounds of what everybody holds: nothing is packed yet.
#[derive(Clone, Debug)]
struct Way {
    /// None for a device alone.
    sharing: Option<Sharing>,
    /// What each device is given, in the order of ranks.
    ranks: Vec<Given>,
    /// Of a step.
    seconds: f64,
}

/// What one device is given.
#[derive(Clone, Debug)]
struct Given {
    /// Which of the question's devices it is.
    device: usize,
    share: Share,
    sequences: u64,
    recipe: Recipe,
    /// The load line of its part of the host.
    host: Bytes,
    /// No packing of its arenas is smaller.
    device_bytes: u64,
    host_bytes: u64,
}

impl Way {
    /// Those that take part, in the order of ranks.
    fn devices(&self) -> Vec<usize> {
        self.ranks.iter().map(|given| given.device).collect()
    }
}

/// One of the ways to share out, over the devices of a team and under some lossy rungs.
trait ShareOut {
    /// The fastest team in this way; none where nothing fits.
    fn fastest(&self) -> Option<Way>;
    /// Packed, a rank holds so many bytes more than it may: another recipe, or another share, is looked for.
    fn strike(&mut self, way: &Way, rank: usize, over: Bytes);
    /// Those that take no part, and why.
    fn left_out(&self, way: &Way) -> Vec<LeftOut>;
    /// What the devices do beside what they do alone, where they can.
    fn worth(&self, way: &Way) -> Option<Worth>;
    /// Why those that compute nothing do not, by ranks.
    fn why_holds(&self, way: &Way) -> Vec<Option<String>> {
        vec![None; way.ranks.len()]
    }
}

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
    /// The only way to share out that is asked for.
    pub only: Option<Only>,
    /// The evaluations that a device which is left out may make; none where there are none, or where the team makes them.
    pub evaluations: Option<Evaluations>,
}

/// How a run evaluates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evaluations {
    /// Steps between two of them; 0 where there is one at the end alone.
    pub every: u64,
    /// Rows of one, where the data have been read.
    pub rows: Option<u64>,
}

/// What a team is held to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Only {
    /// This way to share out.
    Sharing(Sharing),
    /// The state in these parts, one for each device: all take part, and only the sequences are shared out anew.
    Parts(Vec<u64>),
}

impl Only {
    fn sharing(&self) -> Sharing {
        match self {
            Only::Sharing(sharing) => *sharing,
            Only::Parts(_) => Sharing::State,
        }
    }
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
    /// Who evaluates beside them: one of those that are left out.
    pub evaluator: Option<Part>,
}

impl<'a> TeamQuestion<'a> {
    /// Whether a way to share out comes into question.
    fn asked(&self, sharing: Sharing) -> bool {
        self.only.as_ref().is_none_or(|only| only.sharing() == sharing)
    }

    /// What a device does by itself.
    fn alone(&self, device: usize) -> Answer {
        let question = &self.devices[device];
        if self.devices.len() == 1 { search(question) } else { search_one_of(&Sets::new(question)) }
    }

    /// Whether there is nothing to share.
    fn is_for_one(&self) -> bool {
        self.devices.len() == 1 || self.devices[0].optimizer.is_none()
    }

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
        let question = self.devices[device].clone().of_share(share, sequences);
        Question { host: with_budget(question.host, host), ..question }
    }

    /// Questions for menus under some rungs: with about the sequences that each device's published rates would give it.
    fn about(&self, rungs: &[Rung], hosts: &[Bytes]) -> Vec<Question<'a>> {
        let rate = |question: &Question| question.device.rates.product_flops(question.precision);
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

/// The fastest team of the devices under their load lines, with the least loss that is needed; where nothing fits, the
/// device that lacks the least, with the budgets that would do.
///
/// # Panics
/// Without any device.
pub fn share_out(team: &TeamQuestion) -> TeamAnswer {
    described(team, shared_out(team))
}

/// The same where something fits; where nothing does, nobody works out what would: who plans under way has no room for that.
///
/// # Panics
/// Without any device.
pub fn share_out_if_fits(team: &TeamQuestion) -> Option<TeamAnswer> {
    let found = match team.is_for_one() {
        true => Some(alone(team, fastest_alone(team, false), vec![])).filter(|answer| answer.plan.fits),
        false => fitting(team),
    };
    found.map(|answer| described(team, answer))
}

/// The same with who evaluates, and what would be faster alone.
fn described(team: &TeamQuestion, answer: TeamAnswer) -> TeamAnswer {
    let mut answer = evaluator::with(team, answer);
    answer.plan.faster_alone = alternatives::faster_alone(team, &answer.plan);
    answer
}

fn shared_out(team: &TeamQuestion) -> TeamAnswer {
    let first = &team.devices[0];
    if team.is_for_one() {
        return alone(team, fastest_alone(team, false), vec![]);
    }
    if let Some(answer) = fitting(team) {
        return answer;
    }
    // Where all have to take part, one of them does not fit. Where none fits, what is missing is worked out for one.
    let (device, mut answer) = match team.all {
        true => fastest_alone(team, true),
        false => lacks_the_least(team),
    };
    if team.all && !answer.plan.fits {
        answer.plan.needs = hints::for_all(team, &answer.plan);
    }
    // With one of these all are planned for, and how much this one then holds is not known.
    answer.plan.needs.iter_mut().for_each(|need| need.peak_bytes = None);
    let others: Vec<usize> = (0..team.devices.len()).filter(|&other| other != device && !team.all).collect();
    let (more, left_out) = both(
        || if answer.plan.fits { None } else { with_more_of_the_host(team, &answer.plan) },
        || cannot_hold(team, &others, &[], &first.lossy.allow),
    );
    if !answer.plan.fits && !team.all {
        hints::with_one_rung(team, &mut answer.plan);
    }
    if let Some(need) = more {
        let needs = &mut answer.plan.needs;
        match needs.iter_mut().find(|need| need.host_bytes.is_some()) {
            Some(alone) => *alone = need,
            None => needs.push(need),
        }
    }
    alone(team, (device, answer), left_out)
}

/// The device that lacks the least to hold the model by itself, with the budgets that would do.
fn lacks_the_least(team: &TeamQuestion) -> (usize, Answer) {
    let kinds = team.kinds();
    let known: Vec<Sets> = kinds.iter().map(|&device| Sets::new(&team.devices[device])).collect();
    let lacks = side_by_side(&known, |known| {
        let Question { lossy, device, .. } = known.question;
        known.leanest(&lossy.allow).device.saturating_sub(device.arena_budget().0)
    });
    let least = (0..kinds.len()).min_by_key(|&kind| lacks[kind]).expect("a team has a device");
    (kinds[least], search_one_of(&known[least]))
}

/// The fastest team with the least loss that is needed, where some team fits.
fn fitting(team: &TeamQuestion) -> Option<TeamAnswer> {
    let first = &team.devices[0];
    // What a device is charged with may be all that it has: no recipe holds nothing.
    let full = team.devices.iter().filter(|question| question.device.arena_budget() == Bytes::ZERO).count();
    if full == team.devices.len() || (team.all && full > 0) {
        return None;
    }
    sets(first, &first.lossy.allow).into_iter().find_map(|rungs| under_rungs(team, &rungs))
}

/// The fastest device that can hold the model with all of the host, where no two share a batch: the host may not be enough
/// for them.
fn without_the_others(team: &TeamQuestion, rungs: &[Rung]) -> Option<TeamAnswer> {
    if team.all || !team.asked(Sharing::Batch) {
        return None;
    }
    let able = |device: &usize| can_hold(&under(&team.devices[*device], rungs));
    let kinds = team.kinds().into_iter().filter(able);
    let best = best_alone(team, kinds, false).filter(|(_, answer)| answer.plan.fits)?;
    let others = (0..team.devices.len()).filter(|&device| device != best.0);
    let (able, unable): (Vec<usize>, Vec<usize>) = others.partition(|&device| able(&team.first_alike(device)));
    let beside = |&device: &usize| {
        let why = "there is no room for it and for what it wants of the host beside the faster one";
        named(team, device, why.to_owned())
    };
    let left_out = able.iter().map(beside).chain(cannot_hold(team, &unable, rungs, &[])).collect();
    Some(alone(team, best, left_out))
}

/// The best answer of any device by itself: what fits by its time, what does not by what it lacks; or, with
/// `refused_first`, of those that do not fit. Devices that are alike are asked once.
fn fastest_alone(team: &TeamQuestion, refused_first: bool) -> (usize, Answer) {
    best_alone(team, team.kinds().into_iter(), refused_first).expect("a team has a device")
}

/// The same of some devices; none where there are none.
fn best_alone(
    team: &TeamQuestion,
    devices: impl Iterator<Item = usize>,
    refused_first: bool,
) -> Option<(usize, Answer)> {
    let order = |plan: &Plan| match plan.fits {
        true => -1.0 / plan.predicted.step_seconds,
        false => plan.devices[0].peak_bytes.saturating_sub(plan.devices[0].budget_bytes).0 as f64,
    };
    let rank = |answer: &Answer| (refused_first && answer.plan.fits, order(&answer.plan));
    let answers = devices.map(|device| (device, team.alone(device)));
    let ranked = answers.map(|(device, answer)| (rank(&answer), (device, answer)));
    let best = ranked.min_by(|(a, _), (b, _)| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    best.map(|(_, best)| best)
}

/// A team of one: the run of a single device.
fn alone(team: &TeamQuestion, (device, answer): (usize, Answer), left_out: Vec<LeftOut>) -> TeamAnswer {
    let plan = Plan { left_out, ..answer.plan.clone() };
    let part = Part { device, share: Share::ALONE, sequences: team.total(), answer };
    TeamAnswer { parts: vec![part], plan, evaluator: None }
}

/// The fastest team under some lossy rungs, if there is one: a batch shared out by devices that can hold the model, the
/// state in parts, or a pipeline.
fn under_rungs(team: &TeamQuestion, rungs: &[Rung]) -> Option<TeamAnswer> {
    let batch = team.asked(Sharing::Batch).then(|| {
        batch::with_hosts(team, rungs, |mut batch| {
            let packed = packed(team, rungs, &mut batch)?;
            Some(batch.or_alone(packed))
        })
    });
    let batch = batch.flatten().or_else(|| without_the_others(team, rungs));
    if !team.asked(Sharing::State) && !team.asked(Sharing::Layers) {
        return batch;
    }
    let (mut state, mut layers) = (State::new(team, rungs), Layers::new(team, rungs));
    let tokens = |answer: &TeamAnswer| answer.plan.predicted.tokens_per_second;
    if batch.as_ref().is_some_and(|batch| tokens(batch) >= WORTH * state.at_most()) {
        return batch;
    }
    // What does not promise enough is not packed.
    let (mut least, mut best) = (batch.as_ref().map_or(0.0, |batch| tokens(batch) / WORTH), batch);
    let promised = |sharing: Sharing, ways: &mut dyn ShareOut| {
        let way = if team.asked(sharing) { ways.fastest() } else { None };
        way.map_or(0.0, |way| team.tokens() / way.seconds)
    };
    let (of_state, of_layers) =
        both(|| promised(Sharing::State, &mut state), || promised(Sharing::Layers, &mut layers));
    let mut others: [(f64, &mut dyn ShareOut); 2] = [(of_state, &mut state), (of_layers, &mut layers)];
    others.sort_by(|a, b| b.0.total_cmp(&a.0));
    for (promises, ways) in others {
        let found = if promises > least { packed(team, rungs, ways) } else { None };
        if let Some(found) = found.filter(|found| tokens(found) > least) {
            (least, best) = (tokens(&found), Some(found));
        }
    }
    best
}

/// The least of the host that would do for all together, with the layers or the state shared out, where that is less than
/// one of them alone would need there, as `refused` says.
fn with_more_of_the_host(team: &TeamQuestion, refused: &Plan) -> Option<Need> {
    let first = &team.devices[0];
    let alone = refused.needs.iter().find_map(|need| need.host_bytes);
    let none = |question: &Question| HostSpec { file: FileSpec::NONE, ..question.host } == HostSpec::NONE;
    if team.devices.iter().all(none) || first.pins.offload.is_some() {
        return None;
    }
    let with = |host: Bytes| {
        let beside = |question: &Question<'_>| HostSpec { budget: host, ..question.host };
        let devices = team.devices.iter().map(|question| Question { host: beside(question), ..question.clone() });
        TeamQuestion { devices: devices.collect(), host, ..team.clone() }
    };
    let endless = with(Bytes::gib(1 << 20));
    for rungs in sets(first, &first.lossy.allow) {
        let (layers, state) = both(
            || team.asked(Sharing::Layers).then(|| Layers::new(&endless, &rungs).least_host()).flatten(),
            || team.asked(Sharing::State).then(|| State::new(&endless, &rungs).least_host()).flatten(),
        );
        // The state in parts takes longer to pack: where it is no less, that is not done.
        let layers = layers.map(|least| (least, Sharing::Layers)).into_iter();
        let ways = layers.chain(state.map(|least| (least, Sharing::State)));
        let mut found: Option<Bytes> = None;
        for (least, sharing) in ways {
            for more in MORE.map(|more| Bytes::mib((least.0 as f64 * more) as u64 >> 20)) {
                let known = found.into_iter().chain(alone).min();
                if more <= team.host || known.is_some_and(|known| more >= known) {
                    continue;
                }
                let mut team = with(more);
                let answer = match sharing {
                    Sharing::Layers => {
                        // That is what was estimated.
                        let one = |pins: &mut Pins| pins.micro_batch = pins.micro_batch.or(Some(1));
                        team.devices.iter_mut().for_each(|question| one(&mut question.pins));
                        packed(&team, &rungs, &mut Layers::new(&team, &rungs))
                    }
                    _ => packed(&team, &rungs, &mut State::new(&team, &rungs)),
                };
                if answer.is_some() {
                    found = Some(more);
                    break;
                }
            }
        }
        if found.is_some() {
            return Some(Need { host_bytes: found, ..need(rungs, refused.devices.first()?.budget_bytes) });
        }
    }
    None
}

/// Packs what each device of the fastest way would hold; what does not fit then is struck.
fn packed(team: &TeamQuestion, rungs: &[Rung], ways: &mut dyn ShareOut) -> Option<TeamAnswer> {
    for _ in 0..TRIES {
        let way = ways.fastest()?;
        if let [Given { device, .. }] = way.ranks[..] {
            let answer = search(&team.of(device, &Share::ALONE, team.total(), team.host));
            if answer.plan.fits {
                return Some(alone(team, (device, answer), ways.left_out(&way)));
            }
        }
        let (rank, over) = match parts_of(team, rungs, &way) {
            Ok(mut parts) => {
                let mut plan = whole::plan(team, &mut parts);
                if plan.fits {
                    plan.left_out = ways.left_out(&way);
                    plan.worth = ways.worth(&way);
                    plan.team.iter_mut().zip(ways.why_holds(&way)).for_each(|(member, why)| member.why = why);
                    return Some(TeamAnswer { parts, plan, evaluator: None });
                }
                // Packed, they want more of the host than there is.
                let host = |rank: &usize| parts[*rank].answer.layout.host.bytes;
                ((0..parts.len()).max_by_key(host)?, Bytes::ZERO)
            }
            Err(over) => over,
        };
        ways.strike(&way, rank, over);
    }
    None
}

/// What each rank of a way holds, packed, those that are alike once; or the first that does not fit, and by how much.
fn parts_of(team: &TeamQuestion, rungs: &[Rung], way: &Way) -> Result<Vec<Part>, (usize, Bytes)> {
    let question = |given: &Given| {
        let Given { device, ref share, sequences, host, .. } = *given;
        under(&team.of(device, share, sequences, host), rungs)
    };
    let like = |a: &Given, b: &Given| {
        team.first_alike(a.device) == team.first_alike(b.device)
            && (a.sequences, a.share.own_part()) == (b.sequences, b.share.own_part())
            && a.recipe == b.recipe
    };
    let first = |given: &Given| way.ranks.iter().position(|other| like(other, given)).expect("it is like itself");
    let firsts: Vec<usize> = (0..way.ranks.len()).filter(|&rank| first(&way.ranks[rank]) == rank).collect();
    // What comes after one that does not fit need not be known.
    let last = AtomicUsize::new(usize::MAX);
    let found = side_by_side(&firsts, |&rank| {
        let given = &way.ranks[rank];
        let answer = (rank < last.load(Ordering::Relaxed)).then(|| plan_of(&question(given), &given.recipe))?;
        if !answer.plan.fits {
            last.fetch_min(rank, Ordering::Relaxed);
        }
        Some(answer)
    });
    let mut found = found.into_iter();
    let mut parts: Vec<Part> = Vec::new();
    for (rank, given) in way.ranks.iter().enumerate() {
        let answer = match first(given) {
            first if first < rank => plan_like(&question(given), &given.recipe, &parts[first].answer),
            _ => found.next().flatten().expect("nothing before it does not fit"),
        };
        if !answer.plan.fits {
            return Err((rank, over(&answer.plan)));
        }
        let Given { device, ref share, sequences, .. } = *given;
        parts.push(Part { device, share: share.clone(), sequences, answer });
    }
    Ok(parts)
}

/// How far a plan is above the load line of its device.
fn over(plan: &Plan) -> Bytes {
    plan.devices[0].peak_bytes.saturating_sub(plan.devices[0].budget_bytes)
}

/// The link that sets the pace of a team's exchange: its slowest.
fn slowest(links: impl Iterator<Item = Link>) -> Link {
    let slower = |a: Link, b: Link| if b.bytes_per_second < a.bytes_per_second { b } else { a };
    links.reduce(slower).unwrap_or(Link::MEMORY)
}

/// All of these devices, those without the slowest links, and so on: a team exchanges at the pace of its slowest link, so
/// leaving out one of several that are as far away gains nothing.
fn circles(devices: &[usize], link: impl Fn(usize) -> Link) -> Vec<Vec<usize>> {
    let pace = |device: usize| link(device).bytes_per_second;
    let mut paces: Vec<f64> = devices.iter().map(|&device| pace(device)).collect();
    paces.sort_by(f64::total_cmp);
    paces.dedup();
    let within = |least: f64| devices.iter().copied().filter(|&device| pace(device) >= least).collect();
    paces.into_iter().map(within).collect()
}

/// A device that takes no part, and why.
fn named(team: &TeamQuestion, number: usize, why: String) -> LeftOut {
    let device = team.devices[number].device.name.clone();
    LeftOut { device, number, why, used_by: None, tokens_per_second: None, evaluates: None }
}

/// Who takes no part in a way whose state or layers are shared out: with it the others are slower, as `with` finds, or it
/// cannot take part at all.
fn out_of_way(team: &TeamQuestion, way: &Way, unable: &str, with: impl Fn(&[usize]) -> Option<Way>) -> Vec<LeftOut> {
    let taken = way.devices();
    let out = (0..team.devices.len()).filter(|device| !taken.contains(device));
    let why = |device: usize| {
        let mut devices = taken.clone();
        devices.push(device);
        devices.sort_unstable();
        match with(&devices) {
            Some(with) => slower_with(team, device, way.seconds, with.seconds),
            None => named(team, device, unable.to_owned()),
        }
    };
    out.map(why).collect()
}

/// A device with which a step would take longer than without it.
fn slower_with(team: &TeamQuestion, device: usize, without: f64, with: f64) -> LeftOut {
    LeftOut { tokens_per_second: Some(team.tokens() / with), ..named(team, device, slows(without / with)) }
}

/// Why a device is left out with which a team does such a part of what it does without it.
fn slows(part: f64) -> String {
    format!("it would slow the team: to {:.1} % of the tokens a second, predicted", 100.0 * part)
}

/// Devices that cannot hold the model under some rungs, nor with any of those that are allowed, too.
fn cannot_hold(team: &TeamQuestion, devices: &[usize], rungs: &[Rung], allow: &[Rung]) -> Vec<LeftOut> {
    let mut kinds: Vec<usize> = devices.iter().map(|&device| team.first_alike(device)).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let why = side_by_side(&kinds, |&kind| lacks(team, kind, rungs, allow));
    let of = |&device: &usize| {
        let kind = kinds.binary_search(&team.first_alike(device)).expect("every device is of a kind");
        named(team, device, why[kind].clone())
    };
    devices.iter().map(of).collect()
}

/// What a device lacks to hold the model by itself.
fn lacks(team: &TeamQuestion, device: usize, rungs: &[Rung], allow: &[Rung]) -> String {
    let question = team.of(device, &Share::ALONE, 1, team.host);
    let smallest = leanest(&under(&question, rungs), allow);
    let peak = Bytes(smallest.device) + question.device.charges;
    format!("its smallest recipe holds {peak}, and its load line is {}", question.device.budget)
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
        if kept.plan.fits { kept } else { search(&same_count(under(question, &recipe.rungs), recipe)) }
    });
    if kept.plan.fits { kept } else { share_out(team) }
}

/// Where all ranks have the same number of micro-batches, one that looks for another recipe keeps its own.
pub fn same_count<'a>(question: Question<'a>, recipe: &Recipe) -> Question<'a> {
    match question.share.sharing {
        Some(Sharing::State | Sharing::Layers) => {
            let pins = Pins { micro_batch: Some(recipe.micro_batch), ..question.pins.clone() };
            Question { pins, ..question }
        }
        _ => question,
    }
}

fn given(team: &TeamQuestion, members: &[Member], plan: impl Fn(&Question, &Recipe) -> Answer) -> TeamAnswer {
    let shares = shares_of(members);
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
            batch::alike(one, other)
                && (part.sequences, part.share.own_part()) == (member.sequences, share.own_part())
                && part.answer.plan.recipe == member.recipe
        };
        let answer = match parts.iter().find(like) {
            Some(part) => plan_like(&question, &member.recipe, &part.answer),
            None => plan(&question, &member.recipe),
        };
        parts.push(Part { device, share, sequences: member.sequences, answer });
    }
    let mut plan = whole::plan(team, &mut parts);
    plan.team.iter_mut().zip(members).for_each(|(member, before)| member.why.clone_from(&before.why));
    let others = (0..team.devices.len()).filter(|device| parts.iter().all(|part| part.device != *device));
    let unused = |device: usize| named(team, device, "it has no part in this plan".to_owned());
    plan.left_out = others.map(unused).collect();
    evaluator::with(team, TeamAnswer { parts, plan, evaluator: None })
}

/// The shares of members, as they are written down.
fn shares_of(members: &[Member]) -> Vec<Share> {
    let sequences: Vec<u64> = members.iter().map(|member| member.sequences).collect();
    let parts: Option<Vec<u64>> = members.iter().map(|member| member.state).collect();
    let of = |member: &Member| member.recipe.micro_batches(member.sequences);
    let ends: Option<Vec<u64>> = members.iter().map(|member| member.layers.map(|[_, end]| end)).collect();
    if let Some(ends) = ends.filter(|ends| ends.len() > 1) {
        return layers::shares(&[vec![0], ends].concat());
    }
    match parts {
        _ if members.len() < 2 => vec![Share::ALONE],
        Some(parts) => state::shares(&sequences, &parts, members.iter().map(of).max().unwrap_or(1)),
        None => batch::shares(&sequences),
    }
}
