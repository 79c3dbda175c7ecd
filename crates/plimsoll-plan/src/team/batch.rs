//! Every device has the whole model and computes some of the sequences: whole shares that make the slowest as fast as
//! it can be, and which devices are worth having.

use super::exchange::Exchange;
use super::{
    Given, ShareOut, TeamAnswer, TeamQuestion, Way, alone, alternatives, cannot_hold, circles, named, slower_with,
    with_budget,
};
use crate::search::{Candidate, Known, Menu, Question, can_hold_knowing, search};
use plimsoll_core::{Bytes, DeviceSpec, LeftOut, Recipe, Rung, Sharing, Worth};
use plimsoll_program::Share;
use std::sync::Arc;

/// Times that the host is shared out anew.
const TRIES: usize = 40;
/// The least of the host that a device needs is found to so many binary places of what there is.
const HALVINGS: u32 = 10;

/// The devices of a team with what each can do. Devices that are alike have one menu.
pub(super) struct Crew<'q> {
    /// For each device the question that its menu answers.
    questions: &'q [Question<'q>],
    menus: Vec<Menu<'q>>,
    /// Which menu a device has.
    kind: Vec<usize>,
    /// Sequences of a step.
    total: u64,
}

/// Some devices with their sequences, and the seconds of a step.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Split {
    pub devices: Vec<usize>,
    pub sequences: Vec<u64>,
    pub seconds: f64,
}

/// Whether what one device does is what the other does.
pub(super) fn alike(a: &Question, b: &Question) -> bool {
    let nameless = |device: &DeviceSpec| DeviceSpec { name: String::new(), ..device.clone() };
    nameless(a.device) == nameless(b.device) && a.host == b.host && a.sequences == b.sequences && a.pins == b.pins
}

impl<'q> Crew<'q> {
    /// Menus for questions that ask for about as many sequences as will be each one's share.
    pub fn new(questions: &'q [Question<'q>], total: u64) -> Crew<'q> {
        let mut first: Vec<usize> = Vec::new();
        let mut kind = Vec::new();
        for question in questions {
            let known = first.iter().position(|&number| alike(&questions[number], question));
            kind.push(known.unwrap_or(first.len()));
            if known.is_none() {
                first.push(kind.len() - 1);
            }
        }
        let menus: Vec<Menu> = first.iter().map(|&number| Menu::new(&questions[number], total)).collect();
        Crew { questions, menus, kind, total }
    }

    fn menu(&self, device: usize) -> &Menu<'q> {
        &self.menus[self.kind[device]]
    }

    /// Whether two devices have one menu.
    pub fn alike(&self, one: usize, other: usize) -> bool {
        self.kind[one] == self.kind[other]
    }

    /// The devices that can hold the model.
    pub fn able(&self) -> Vec<usize> {
        (0..self.kind.len()).filter(|&device| !self.menu(device).is_empty()).collect()
    }

    /// What the devices have to exchange.
    pub fn exchange(&self, devices: &[usize]) -> Exchange {
        let questions: Vec<&Question> = devices.iter().map(|&device| &self.questions[device]).collect();
        Exchange::between(&questions)
    }

    /// The fastest shares of some devices, whether or not fewer would be faster; `None` where one of them would have none.
    pub fn split(&self, devices: &[usize]) -> Option<Split> {
        self.split_under(devices, &self.exchange(devices))
    }

    /// The same if nothing had to be exchanged.
    pub fn split_without_exchange(&self, devices: &[usize]) -> Option<Split> {
        self.split_under(devices, &Exchange::default())
    }

    /// The same number of sequences for everybody, as far as they go.
    pub fn even(&self, devices: &[usize]) -> Option<Split> {
        let ranks = devices.len() as u64;
        let sequences = (0..ranks).map(|rank| self.total * (rank + 1) / ranks - self.total * rank / ranks);
        self.priced(devices, sequences.collect())
    }

    /// What given shares come to; `None` where somebody has none, or cannot do it.
    fn priced(&self, devices: &[usize], sequences: Vec<u64>) -> Option<Split> {
        let exchange = self.exchange(devices);
        let of = |(&device, &own): (&usize, &u64)| self.seconds(device, own, &exchange);
        let seconds = devices.iter().zip(&sequences).map(of).fold(0.0, f64::max);
        let possible = seconds.is_finite() && sequences.iter().all(|&own| own > 0);
        possible.then(|| Split { devices: devices.to_vec(), sequences, seconds })
    }

    /// Seconds of a step in which a device does so many sequences.
    fn seconds(&self, device: usize, sequences: u64, exchange: &Exchange) -> f64 {
        let best = self.menu(device).best(sequences, &|hides| exchange.beyond(hides));
        best.map_or(f64::INFINITY, |(_, seconds)| seconds)
    }

    fn split_under(&self, devices: &[usize], exchange: &Exchange) -> Option<Split> {
        let seconds_of = |device: usize, sequences: u64| self.seconds(device, sequences, exchange);
        let wait = |hides: f64| exchange.beyond(hides);
        let most = |device: usize, seconds: f64| self.menu(device).most(seconds, &wait).min(self.total);
        // The least time in which all of it is done; the one that does it alone in the shortest has time enough.
        let alone = devices.iter().map(|&device| seconds_of(device, self.total)).fold(f64::INFINITY, f64::min);
        // Nobody is without work.
        let one_each = devices.iter().map(|&device| seconds_of(device, 1)).fold(0.0, f64::max);
        if !alone.is_finite() || !one_each.is_finite() || self.total < devices.len() as u64 {
            return None;
        }
        let (mut low, mut high) = (0.0, alone);
        for _ in 0..100 {
            let middle = 0.5 * (low + high);
            let done: u64 = devices.iter().map(|&device| most(device, middle)).sum();
            if done >= self.total { high = middle } else { low = middle }
        }
        let within = high.max(one_each);
        let mut sequences: Vec<u64> = devices.iter().map(|&device| most(device, within)).collect();
        // What is too much is taken from those that take longest, so that devices that are alike do alike.
        let mut seconds: Vec<f64> =
            devices.iter().zip(&sequences).map(|(&device, &own)| seconds_of(device, own)).collect();
        for _ in self.total..sequences.iter().sum() {
            let longest = |a: &usize, b: &usize| {
                seconds[*a].total_cmp(&seconds[*b]).then(sequences[*a].cmp(&sequences[*b])).then(a.cmp(b))
            };
            let from = (0..devices.len()).filter(|&rank| sequences[rank] > 1).max_by(longest)?;
            sequences[from] -= 1;
            seconds[from] = seconds_of(devices[from], sequences[from]);
        }
        let slowest = seconds.iter().copied().fold(0.0, f64::max);
        Some(Split { devices: devices.to_vec(), sequences, seconds: slowest })
    }

    /// The fastest of all teams of these devices that are looked at: of those within reach over some link the fastest so
    /// many, and then with one more or one less for as long as that helps.
    pub fn fastest(&self, able: &[usize]) -> Option<Split> {
        let alone = |device: usize| self.split(&[device]).map_or(f64::INFINITY, |split| split.seconds);
        let mut order: Vec<(usize, f64)> = able.iter().map(|&device| (device, alone(device))).collect();
        order.sort_by(|a, b| a.1.total_cmp(&b.1));
        let order: Vec<usize> = order.into_iter().map(|(device, _)| device).collect();
        let of_first = |order: &[usize]| {
            let mut devices = order.to_vec();
            devices.sort_unstable();
            self.split(&devices)
        };
        let faster = |best: Option<Split>, other: Option<Split>| match (best, other) {
            (Some(best), Some(other)) if other.seconds < best.seconds => Some(other),
            (best, other) => best.or(other),
        };
        let circles = circles(&order, |device| self.questions[device].device.team_link);
        let firsts = circles.iter().flat_map(|circle| (1..=circle.len()).map(|number| &circle[..number]));
        let mut best = firsts.map(of_first).fold(None, faster)?;
        loop {
            let changed = able.iter().filter_map(|&device| {
                let mut devices = best.devices.clone();
                match devices.binary_search(&device) {
                    Ok(at) => drop(devices.remove(at)),
                    Err(at) => devices.insert(at, device),
                }
                if devices.is_empty() { None } else { self.split(&devices) }
            });
            let next = changed.map(Some).fold(None, faster);
            match next {
                Some(next) if next.seconds < best.seconds => best = next,
                _ => return Some(best),
            }
        }
    }

    /// What each of a team does best with its share.
    pub fn found(&self, split: &Split) -> Vec<&Candidate> {
        let exchange = self.exchange(&split.devices);
        let of = |(&device, &own): (&usize, &u64)| {
            let best = self.menu(device).best(own, &|hides| exchange.beyond(hides));
            best.expect("a share has a recipe").0
        };
        split.devices.iter().zip(&split.sequences).map(of).collect()
    }

    /// The same as others see it; all have one host.
    pub fn way(&self, split: &Split, host: Bytes) -> Way {
        let parts = split.devices.iter().zip(&split.sequences).zip(self.found(split)).zip(shares(&split.sequences));
        let given = parts.map(|(((&device, &sequences), found), share)| Given {
            device,
            share,
            sequences,
            recipe: found.recipe.clone(),
            host,
            device_bytes: found.device,
            host_bytes: found.host,
        });
        let sharing = (split.devices.len() > 1).then_some(Sharing::Batch);
        Way { sharing, ranks: given.collect(), seconds: split.seconds }
    }

    /// Looks at recipes near those of a team.
    pub fn look_near(&mut self, split: &Split) {
        let exchange = self.exchange(&split.devices);
        for (&device, &own) in split.devices.iter().zip(&split.sequences) {
            self.menus[self.kind[device]].look_near(own, &|hides| exchange.beyond(hides));
        }
    }

    /// Looks at recipes near those of each device alone, and of the same number of sequences for everybody.
    pub fn look_near_plain(&mut self) {
        let able = self.able();
        let splits = able.iter().filter_map(|&device| self.split(&[device])).chain(self.even(&able));
        for split in splits.collect::<Vec<_>>() {
            self.look_near(&split);
        }
    }

    /// Looks at recipes for the whole shares on both sides of those that would make all devices end at once, if sequences
    /// could be cut: what divides neither is found nowhere else.
    fn look_at_ideal(&mut self) {
        let able = self.able();
        let exchange = self.exchange(&able);
        let speeds: Vec<f64> = able.iter().map(|&device| 1.0 / self.menu(device).seconds_each()).collect();
        let all: f64 = speeds.iter().sum();
        for (&device, speed) in able.iter().zip(&speeds) {
            let ideal = self.total as f64 * speed / all;
            for share in [ideal.floor() as u64, ideal.ceil() as u64] {
                self.menus[self.kind[device]].look_at_divisors(share, &|hides| exchange.beyond(hides));
            }
        }
    }

    /// Takes a recipe off a device's menu.
    pub fn strike(&mut self, device: usize, recipe: &Recipe) {
        self.menus[self.kind[device]].strike(recipe);
    }
}

/// Shares of a batch among the devices of a team, under some lossy rungs.
pub(super) struct Batch<'t, 'q> {
    team: &'t TeamQuestion<'t>,
    rungs: &'t [Rung],
    crew: Crew<'q>,
}

/// Looks at shares of a batch among devices that have one host: what each wants of it is found out first.
pub(super) fn with_hosts<T>(team: &TeamQuestion, rungs: &[Rung], then: impl Fn(Batch) -> Option<T>) -> Option<T> {
    let mut hosts = vec![team.host; team.devices.len()];
    let known: Vec<Arc<Known>> = team.devices.iter().map(|_| Arc::default()).collect();
    for _ in 0..TRIES {
        let questions = team.about(rungs, &hosts);
        let mut batch = Batch { team, rungs, crew: Crew::new(&questions, team.total()) };
        if team.devices.len() > 1 {
            batch.crew.look_at_ideal();
            batch.crew.look_near_plain();
        }
        let mut split = batch.choose()?;
        for _ in 0..4 {
            batch.crew.look_near(&split);
            let next = batch.choose()?;
            let same = next == split;
            split = next;
            if same {
                break;
            }
        }
        let wanted: Vec<Bytes> = batch.crew.found(&split).iter().map(|found| Bytes(found.host)).collect();
        let all_wanted: Bytes = wanted.iter().copied().sum();
        if all_wanted <= team.host {
            return then(batch);
        }
        hosts = vec![Bytes(team.host.0 / team.devices.len() as u64); team.devices.len()];
        let parts = parts_of_host(team, &questions, &known, &split.devices, &wanted);
        for (&device, bytes) in split.devices.iter().zip(parts) {
            hosts[device] = bytes;
        }
    }
    None
}

/// The host in parts for some devices that want more of it together than there is: in proportion to what each wants, or,
/// where one could not hold the model with that, to what each wants beyond the least that it needs. What is `known` of each
/// device is so beside any part of the host.
fn parts_of_host(
    team: &TeamQuestion,
    questions: &[Question],
    known: &[Arc<Known>],
    devices: &[usize],
    wanted: &[Bytes],
) -> Vec<Bytes> {
    let holds = |device: usize, host: Bytes| {
        let question = &questions[device];
        let question = Question { host: with_budget(question.host, host), ..question.clone() };
        can_hold_knowing(&question, &known[device])
    };
    let beyond = |least: &[Bytes]| {
        let more = |at: usize| wanted[at].saturating_sub(least[at]).0 as f64;
        let left = team.host.saturating_sub(least.iter().copied().sum()).0 as f64;
        let all = (0..wanted.len()).map(more).sum::<f64>().max(1.0);
        let part = |at: usize| least[at] + Bytes((left * more(at) / all) as u64);
        (0..wanted.len()).map(part).collect::<Vec<_>>()
    };
    let parts = beyond(&vec![Bytes::ZERO; devices.len()]);
    if devices.iter().zip(&parts).all(|(&device, part)| holds(device, *part)) {
        return parts;
    }
    // Packed, it is a little more than what was wanted by its bounds.
    let least = |&device: &usize| {
        let (mut low, mut high) = (0, team.host.0);
        while high - low > (team.host.0 >> HALVINGS).max(1) {
            let middle = low + (high - low) / 2;
            if holds(device, Bytes(middle)) { high = middle } else { low = middle + 1 }
        }
        Bytes(if holds(device, Bytes::ZERO) { 0 } else { high })
    };
    let least: Vec<Bytes> = devices.iter().map(least).collect();
    if least.iter().copied().sum::<Bytes>() > team.host { parts } else { beyond(&least) }
}

impl Batch<'_, '_> {
    fn choose(&self) -> Option<Split> {
        let able = self.crew.able();
        match self.team.all {
            true if able.len() < self.team.devices.len() => None,
            true => self.crew.split(&able),
            false => self.crew.fastest(&able),
        }
    }
}

impl Batch<'_, '_> {
    /// A packed team, or the device that does more alone: only what is packed knows how long others are really waited for.
    pub fn or_alone(&self, packed: TeamAnswer) -> TeamAnswer {
        let Batch { team, crew, .. } = self;
        let seconds = packed.plan.predicted.step_seconds;
        if team.all || packed.parts.len() == 1 {
            return packed;
        }
        let splits = crew.able().into_iter().filter_map(|device| crew.split(&[device]));
        let Some(split) = splits.min_by(|a, b| a.seconds.total_cmp(&b.seconds)).filter(|split| split.seconds < seconds)
        else {
            return packed;
        };
        let (device, way) = (split.devices[0], crew.way(&split, team.host));
        let answer = search(&team.of(device, &Share::ALONE, team.total(), team.host));
        if !answer.plan.fits || answer.plan.predicted.step_seconds >= seconds {
            return packed;
        }
        let mut left_out = self.left_out(&way);
        for part in packed.parts.iter().filter(|part| part.device != device) {
            let why = slower_with(team, part.device, answer.plan.predicted.step_seconds, seconds);
            if let Some(known) = left_out.iter_mut().find(|out| out.number == part.device) {
                *known = why;
            }
        }
        alone(team, (device, answer), left_out)
    }
}

impl ShareOut for Batch<'_, '_> {
    fn fastest(&self) -> Option<Way> {
        Some(self.crew.way(&self.choose()?, self.team.host))
    }

    fn strike(&mut self, way: &Way, rank: usize, _: Bytes) {
        let Given { device, ref recipe, .. } = way.ranks[rank];
        self.crew.strike(device, recipe);
    }

    fn left_out(&self, way: &Way) -> Vec<LeftOut> {
        let Batch { team, rungs, crew } = self;
        let (able, taken) = (crew.able(), way.devices());
        let out = (0..team.devices.len()).filter(|device| !taken.contains(device));
        let (slow, unable): (Vec<usize>, Vec<usize>) = out.partition(|device| able.contains(device));
        let why = |device: usize| {
            let mut devices = taken.clone();
            devices.push(device);
            devices.sort_unstable();
            match crew.split(&devices) {
                Some(with) => slower_with(team, device, way.seconds, with.seconds),
                None => named(team, device, "no sequence of a step is left for it".to_owned()),
            }
        };
        slow.into_iter().map(why).chain(cannot_hold(team, &unable, rungs, &[])).collect()
    }

    fn worth(&self, way: &Way) -> Option<Worth> {
        Some(alternatives::worth(self.team, &self.crew, &way.devices()))
    }
}

/// Shares of a batch for ranks in order.
pub(super) fn shares(sequences: &[u64]) -> Vec<Share> {
    let share = |rank: usize| Share {
        sharing: Some(Sharing::Batch),
        rank: rank as u32,
        ranks: sequences.len() as u32,
        first_sequence: sequences[..rank].iter().sum(),
        ..Share::ALONE
    };
    match sequences.len() {
        1 => vec![Share::ALONE],
        ranks => (0..ranks).map(share).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::can_hold;
    use crate::team::testing;
    use plimsoll_core::{Bytes, DeviceKind, HostSpec, Link};
    use plimsoll_program::models::{ModelConfig, preset};
    use proptest::prelude::*;

    fn device(pace: f64, budget: Bytes, megabytes_per_second: f64) -> DeviceSpec {
        let team_link = Link { bytes_per_second: megabytes_per_second * 1e6, latency_seconds: 1e-5 };
        DeviceSpec { kind: DeviceKind::Paper, ..testing::device(pace, budget, team_link) }
    }

    fn question<'a>(config: &'a ModelConfig, device: &'a DeviceSpec, sequences: u64) -> Question<'a> {
        testing::question(config, device, 64, sequences)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn no_other_shares_and_no_other_devices_are_faster(
            kinds in prop::collection::vec((0.05f64..1.0, 500u64..1500, 1.0f64..4.0), 1..4),
            copies in prop::collection::vec(1usize..3, 3),
            total in 1u64..96,
        ) {
            let config = ModelConfig { layers: 2, ..preset("smollm2-135m").expect("listed") };
            let devices: Vec<DeviceSpec> = kinds
                .iter()
                .zip(&copies)
                .flat_map(|((pace, mib, decade), copies)| vec![device(*pace, Bytes::mib(*mib), 10f64.powf(*decade)); *copies])
                .collect();
            let questions: Vec<Question> =
                devices.iter().map(|device| question(&config, device, total.div_ceil(devices.len() as u64))).collect();
            let crew = Crew::new(&questions, total);
            let able = crew.able();
            let Some(best) = crew.fastest(&able) else {
                prop_assert!(able.is_empty());
                return Ok(());
            };
            prop_assert_eq!(best.sequences.iter().sum::<u64>(), total);
            prop_assert_eq!(crew.priced(&best.devices, best.sequences.clone()), Some(best.clone()));
            let ranks = best.devices.len();
            for (from, to) in (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))) {
                let mut moved = best.sequences.clone();
                moved[from] -= 1;
                moved[to] += 1;
                if let Some(moved) = crew.priced(&best.devices, moved) {
                    prop_assert!(moved.seconds >= best.seconds, "{best:?}, {moved:?}");
                }
                if crew.alike(best.devices[from], best.devices[to]) {
                    prop_assert!(best.sequences[from].abs_diff(best.sequences[to]) <= 1, "{best:?}");
                }
            }
            for &device in &able {
                let mut devices = best.devices.clone();
                match devices.binary_search(&device) {
                    Ok(at) => drop(devices.remove(at)),
                    Err(at) => devices.insert(at, device),
                }
                if let Some(other) = crew.split(&devices).filter(|_| !devices.is_empty()) {
                    prop_assert!(other.seconds >= best.seconds, "{best:?}, {other:?}");
                }
            }
        }
    }

    #[test]
    fn what_is_listed_of_an_exchange_is_what_is_packed() {
        // Half of a pass is the loss of a large vocabulary, beside which nothing can be exchanged yet.
        let config = preset("smollm2-135m").expect("listed");
        let devices = [device(1.0, Bytes::gib(8), 100.0), device(0.5, Bytes::gib(8), 100.0)];
        let questions: Vec<Question> = devices.iter().map(|device| question(&config, device, 16)).collect();
        let mut crew = Crew::new(&questions, 16);
        crew.look_near_plain();
        let split = crew.even(&[0, 1]).expect("both can hold it");
        let shares = shares(&split.sequences);
        let seconds = |(rank, found): (usize, &&Candidate)| {
            let question = questions[rank].clone().of_share(&shares[rank], split.sequences[rank]);
            let set = question.computing(&found.recipe);
            let count = split.sequences[rank].div_ceil(u64::from(found.recipe.micro_batch));
            question.prices().schedule_seconds(&set, &shares[rank].schedule(count as u32).calls)
        };
        let packed = crew.found(&split).iter().enumerate().map(seconds).fold(0.0, f64::max);
        assert!((split.seconds / packed - 1.0).abs() < 0.01, "{} listed, {packed} packed", split.seconds);
    }

    /// The least of the host beside which a device holds the model.
    fn least_host(question: &Question, most: Bytes) -> Option<Bytes> {
        let holds =
            |mib: u64| can_hold(&Question { host: with_budget(question.host, Bytes::mib(mib)), ..question.clone() });
        let (mut low, mut high) = (0, most.0 >> 20);
        if !holds(high) {
            return None;
        }
        while low < high {
            let middle = low + (high - low) / 2;
            if holds(middle) { high = middle } else { low = middle + 1 }
        }
        Some(Bytes::mib(high))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(6))]
        #[test]
        fn all_take_part_where_the_host_has_what_each_needs(lines in prop::collection::vec(60u64..500, 2..4)) {
            let config = ModelConfig { layers: 2, vocab: 4096, ..preset("smollm2-135m").expect("listed") };
            let devices: Vec<DeviceSpec> = lines.iter().map(|line| device(0.5, Bytes::mib(*line), 1000.0)).collect();
            let most = Bytes::gib(1);
            let host = HostSpec { budget: most, ..HostSpec::NONE };
            let questions: Vec<Question> =
                devices.iter().map(|device| Question { host, ..question(&config, device, 16) }).collect();
            let needed: Option<Vec<Bytes>> = questions.iter().map(|question| least_host(question, most)).collect();
            let Some(needed) = needed else { return Ok(()) };
            let host = needed.into_iter().sum::<Bytes>() + Bytes::mib(4);
            let team = TeamQuestion { devices: questions, host, all: true, only: None, evaluations: None };
            let taken = with_hosts(&team, &[], |batch| batch.choose().map(|split| split.devices.len()));
            prop_assert_eq!(taken, Some(lines.len()), "{:?} beside {}", lines, host);
        }
    }
}
