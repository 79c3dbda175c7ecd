//! Weights, gradients and the optimizer's state stand in parts on all devices, as large as each one's memory allows, and
//! every device computes some of the sequences of every micro-batch, as many as its speed allows. What a layer needs is
//! gathered for each pass over it, so nobody has to hold the model, and everybody waits for everybody, layer by layer: all
//! have the same number of micro-batches. Who has no room for one sequence, or would be in the way of the others even with
//! that, can do without any: it holds a part of the state, and computes nothing but the update of that.
//!
//! How many micro-batches there are is tried, fewest first: each takes the exchange once more, and what is large has to be
//! computed again. A sketch of each is made from what a rank takes and holds where nothing is computed again, and where
//! everything is; the most promising are searched for recipes.

use super::{Given, LeftOut, Only, ShareOut, TeamQuestion, Way, circles, out_of_way, slowest};
use crate::search::{Candidate, InParts, Question, Rank, computing_seconds, fastest_by_bounds, side_by_side, under};
use plimsoll_core::{Bytes, DeviceSpec, Rung, Sharing, Worth, counted};
use plimsoll_program::Share;
use std::cell::{OnceCell, RefCell};
use std::collections::{HashMap, HashSet};

/// All of the state, in the parts of a share.
const WHOLE: u64 = 1024;
/// A sketch that is no slower than so many times the fastest is searched for recipes, too.
const NEAR: f64 = 1.03;
/// Sketches that are searched at most, but for those that turn out to have no recipe.
const LOOKS: usize = 2;
/// Numbers of micro-batches in a row that may be slower than the best before the rest is not looked at.
const WORSE: usize = 2;
/// Room for what parts are rounded up to.
const ROOM: f64 = 1.002;
/// Parts that are more alike are drawn for so many more amounts of what is computed again.
const AGAIN: u32 = 4;
/// And are taken where they take no more than this part of the time.
const CLEARLY: f64 = 0.995;
/// Why a device that could take part computes nothing.
const UNABLE: &str = "it has no recipe with a sequence of each micro-batch";
/// Times that the parts of a sketch are drawn anew because a rank has no recipe for its own.
const TRIES: usize = 4;

/// Shares of state among the devices of a team, under some lossy rungs.
pub(super) struct State<'t, 'q> {
    team: &'t TeamQuestion<'q>,
    rungs: &'t [Rung],
    /// Bytes of a device that are not planned with, because what packs did not.
    held_back: Vec<u64>,
    in_parts: OnceCell<InParts>,
    computing: RefCell<HashMap<(usize, u32), f64>>,
    ranks: RefCell<HashMap<(usize, u32, usize, u64), Rank>>,
}

/// Who gets what, before recipes are known.
#[derive(Clone, Debug)]
struct Sketch {
    count: u64,
    micro_batches: Vec<u64>,
    parts: Vec<u64>,
    hosts: Vec<Bytes>,
    /// Bytes of the state that wait on the host, of all ranks together.
    waits: f64,
    seconds: f64,
}

impl<'t, 'q> State<'t, 'q> {
    pub fn new(team: &'t TeamQuestion<'q>, rungs: &'t [Rung]) -> State<'t, 'q> {
        State {
            team,
            rungs,
            held_back: vec![0; team.devices.len()],
            in_parts: OnceCell::new(),
            computing: RefCell::default(),
            ranks: RefCell::default(),
        }
    }

    /// No sharing of state does more tokens a second: everybody computes all the time, and nothing twice.
    pub fn at_most(&self) -> f64 {
        self.at_most_of(0..self.team.devices.len())
    }

    /// The same where these compute.
    fn at_most_of(&self, devices: impl Iterator<Item = usize>) -> f64 {
        self.at_most_in(devices, None)
    }

    /// About as much as that, where these compute a step in micro-batches of any size: the largest mostly is the fastest.
    pub fn about_at_most(&self, devices: &[usize]) -> f64 {
        self.at_most_in(devices.iter().copied(), Some(self.team.total()))
    }

    fn at_most_in(&self, devices: impl Iterator<Item = usize>, further: Option<u64>) -> f64 {
        let of = |device: usize| {
            let sizes = (0..32).map(|power| 1u64 << power).take_while(|&size| size <= self.team.total()).chain(further);
            let pinned = self.team.devices[device].pins.micro_batch.map(u64::from);
            let rate = |size: u64| size as f64 / self.computing(device, size);
            sizes.filter(|size| pinned.is_none_or(|pin| pin == *size)).chain(pinned).map(rate).fold(0.0, f64::max)
        };
        let sequences: f64 = devices.map(of).sum();
        sequences * self.team.tokens() / self.team.total() as f64
    }

    /// About the least of the host that would do: everybody computes one sequence at once, and all again.
    pub fn least_host(&self) -> Option<Bytes> {
        let devices: Vec<usize> = (0..self.team.devices.len()).collect();
        let all = Ranks::of(devices, |_| false);
        let sketch = self.sketch(&all, all.devices.len() as u64, &vec![0; all.devices.len()])?;
        Some(Bytes(sketch.waits as u64))
    }

    /// Seconds in which a device computes a micro-batch: between sizes that are powers of two, in proportion.
    fn computing(&self, device: usize, micro_batch: u64) -> f64 {
        if micro_batch == 0 {
            return 0.0;
        }
        let kind = self.team.first_alike(device);
        let exactly = |size: u64| {
            let key = (kind, size as u32);
            let known = self.computing.borrow().get(&key).copied();
            known.unwrap_or_else(|| {
                let question = under(&self.team.devices[kind], self.rungs);
                let seconds = computing_seconds(&question, size as u32);
                self.computing.borrow_mut().insert(key, seconds);
                seconds
            })
        };
        let below = 1 << micro_batch.ilog2();
        match micro_batch - below {
            0 => exactly(below),
            more => exactly(below) + (exactly(2 * below) - exactly(below)) * more as f64 / below as f64,
        }
    }

    /// A question about a device of a team with this link, that holds and computes such a share.
    fn question<'s>(&self, spec: &'s DeviceSpec, device: usize, given: &Given) -> Question<'s>
    where
        'q: 's,
    {
        let question = self.team.of(device, &given.share, given.sequences, given.host);
        let question = Question { device: spec, ..under(&question, self.rungs) };
        let pins = crate::search::Pins { micro_batch: Some(given.recipe.micro_batch), ..question.pins.clone() };
        Question { pins, ..question }
    }

    /// The device as it is planned with in a team of some.
    fn spec(&self, device: usize, devices: &[usize]) -> DeviceSpec {
        let spec = self.team.devices[device].device;
        let team_link = slowest(devices.iter().map(|&device| self.team.devices[device].device.team_link));
        let budget = spec.budget.saturating_sub(Bytes(self.held_back[device]));
        DeviceSpec { team_link, budget, ..spec.clone() }
    }

    fn rank(&self, device: usize, micro_batch: u64, devices: &[usize]) -> Rank {
        let spec = self.spec(device, devices);
        let link = spec.team_link.bytes_per_second.to_bits();
        let key = (self.team.first_alike(device), micro_batch as u32, devices.len(), link);
        let known = self.ranks.borrow().get(&key).copied();
        known.unwrap_or_else(|| {
            let ranks = devices.len() as u64;
            let state = even(WHOLE, ranks);
            let share = Share { sharing: Some(Sharing::State), ranks: ranks as u32, state, ..Share::ALONE };
            let question = self.team.of(device, &share, micro_batch, Bytes::ZERO);
            let question = Question { device: &spec, ..under(&question, self.rungs) };
            let rank = Rank::of(&question, micro_batch as u32);
            self.ranks.borrow_mut().insert(key, rank);
            rank
        })
    }

    /// The parts that stay as they are, where they do.
    fn kept(&self) -> Option<&'t [u64]> {
        match &self.team.only {
            Some(Only::Parts(parts)) => Some(parts),
            _ => None,
        }
    }

    /// What a device of some has beside a part that stays, and cannot wait on the host.
    fn room(&self, device: usize, devices: &[usize]) -> u64 {
        let own = |parts: &[u64]| (self.in_parts().all * parts[device] as f64 / WHOLE as f64) as u64;
        let stays = self.kept().map_or(0, |parts| own(parts).saturating_sub(self.team.host.0));
        self.spec(device, devices).arena_budget().0.saturating_sub(stays)
    }

    fn in_parts(&self) -> InParts {
        *self.in_parts.get_or_init(|| InParts::of(&under(&self.team.devices[0], self.rungs)))
    }

    /// So many sequences of a micro-batch, each to whom it makes the least slow, and one at least to who computes; nobody gets
    /// more than it can hold.
    fn micro_batches(&self, Ranks { devices, holds }: &Ranks, sequences: u64, caps: &[u64]) -> Option<Vec<u64>> {
        let mut own: Vec<u64> = holds.iter().map(|&holds| u64::from(!holds)).collect();
        let least: u64 = own.iter().sum();
        if sequences < least || own.iter().zip(caps).any(|(own, cap)| own > cap) {
            return None;
        }
        for _ in least..sequences {
            let after = |rank: &usize| self.computing(devices[*rank], own[*rank] + 1);
            let free = (0..devices.len()).filter(|&rank| !holds[rank] && own[rank] < caps[rank]);
            let rank = free.min_by(|a, b| after(a).total_cmp(&after(b)))?;
            own[rank] += 1;
        }
        Some(own)
    }

    /// What such a number of micro-batches comes to, by what ranks take and hold; `tight` bytes of each are not used.
    fn sketch(&self, ranks: &Ranks, at_once: u64, tight: &[u64]) -> Option<Sketch> {
        let Ranks { devices, holds } = ranks;
        if self.team.total() < ranks.computes() {
            return None;
        }
        let budget = |rank: usize| {
            let budget = self.spec(devices[rank], devices).arena_budget().0;
            budget.saturating_sub(tight[rank])
        };
        let beside = |rank: usize| self.room(devices[rank], devices).saturating_sub(tight[rank]);
        let pinned = self.team.devices[0].pins.micro_batch.map(u64::from);
        let mut caps = vec![u64::MAX; devices.len()];
        for _ in 0..TRIES {
            let micro_batches = match pinned {
                Some(pin) => holds.iter().map(|&holds| if holds { 0 } else { pin }).collect(),
                None => self.micro_batches(ranks, at_once, &caps)?,
            };
            let taken: Vec<Rank> =
                devices.iter().zip(&micro_batches).map(|(&device, &own)| self.rank(device, own, devices)).collect();
            let over = (0..devices.len()).filter(|&rank| taken[rank].beside[1] > beside(rank)).collect::<Vec<_>>();
            if over.is_empty() {
                let count = self.team.total().div_ceil(micro_batches.iter().sum());
                let budgets = (0..devices.len()).map(budget).collect::<Vec<_>>();
                return self.filled(devices, count, micro_batches, &taken, &budgets);
            }
            if pinned.is_some() || over.iter().any(|&rank| holds[rank]) {
                return None;
            }
            for rank in over {
                let fits = micro_batches[rank] as u128 * u128::from(beside(rank)) / u128::from(taken[rank].beside[1]);
                caps[rank] = (fits as u64).min(micro_batches[rank] - 1);
            }
        }
        None
    }

    /// Parts by free memory, or as they are: first where nothing is computed again, then where so much is that it just fits,
    /// at last with what waits on the host.
    fn filled(
        &self,
        devices: &[usize],
        count: u64,
        micro_batches: Vec<u64>,
        ranks: &[Rank],
        budgets: &[u64],
    ) -> Option<Sketch> {
        let InParts { all, optimizer } = self.in_parts();
        let wanted = all * ROOM;
        let between = |pair: [f64; 2], again: f64| pair[0] + again * (pair[1] - pair[0]);
        let free = |rank: usize, again: f64| {
            let beside = between(ranks[rank].beside.map(|bytes| bytes as f64), again);
            (budgets[rank] as f64 - beside).max(0.0)
        };
        // How much is computed again, so that there is so much room.
        let least_again = |room: &dyn Fn(f64) -> f64, wanted: f64| {
            if room(0.0) >= wanted {
                return 0.0;
            }
            let (mut low, mut high) = (0.0, 1.0);
            for _ in 0..20 {
                let again = 0.5 * (low + high);
                if room(again) < wanted { low = again } else { high = again }
            }
            high
        };
        let link = |device: usize| self.team.devices[device].device.rates.host_link.bytes_per_second;
        let links: f64 = devices.iter().map(|&device| link(device)).sum();
        let of_links: Vec<f64> = devices.iter().map(|&device| link(device) / links).collect();
        let own = |parts: &[u64], rank: usize| all * parts[rank] as f64 / WHOLE as f64;
        let every = 0..devices.len();
        let elsewhere =
            |parts: &[u64], again: &[f64], rank: usize| (own(parts, rank) - free(rank, again[rank])).max(0.0);
        let seconds = |parts: &[u64], again: &[f64]| {
            let even = WHOLE as f64 / devices.len() as f64;
            let least = parts.iter().min().map_or(0.0, |least| *least as f64 / even);
            let of = |rank: usize| {
                let waits = elsewhere(parts, again, rank);
                let of_optimizer = waits.min(own(parts, rank) * optimizer / all);
                let rate = link(devices[rank]);
                let passes = ranks[rank].passes(again[rank], devices.len(), least);
                let once = ranks[rank].once * (parts[rank] as f64 / even).max(1.0);
                (once + 2.0 * of_optimizer / rate, passes + 2.0 * (waits - of_optimizer) / rate)
            };
            let seconds: Vec<(f64, f64)> = every.clone().map(of).collect();
            let most = |of: fn(&(f64, f64)) -> f64| seconds.iter().map(of).fold(0.0, f64::max);
            most(|rank| rank.0) + count as f64 * most(|rank| rank.1)
        };
        let sum = |again: f64| every.clone().map(|rank| free(rank, again)).sum::<f64>();
        let (parts, again, waits): (Vec<u64>, Vec<f64>, f64) = match self.kept() {
            Some(kept) => {
                let again = |rank: usize| least_again(&|again| free(rank, again), own(kept, rank) * ROOM);
                let again: Vec<f64> = every.clone().map(again).collect();
                let waits = every.clone().map(|rank| elsewhere(kept, &again, rank)).sum();
                (kept.to_vec(), again, waits)
            }
            None => {
                let least = least_again(&sum, wanted);
                // What does not fit waits on the host, in proportion to the links that it has to cross.
                let waits = (wanted - sum(least)).max(0.0);
                let room: Vec<f64> = every.clone().map(|rank| free(rank, least) + waits * of_links[rank]).collect();
                let by_room = (whole_parts(&room), vec![least; devices.len()]);
                // More that is computed again leaves room for parts that are more alike.
                let alike = (0..=AGAIN).map(|step| least + (1.0 - least) * f64::from(step) / f64::from(AGAIN));
                let alike = alike.filter(|again| sum(*again) >= wanted).map(|again| {
                    let room: Vec<f64> = every.clone().map(|rank| free(rank, again)).collect();
                    (whole_parts(&levelled(&room, wanted)), vec![again; devices.len()])
                });
                let faster = |best: (f64, (Vec<u64>, Vec<f64>)), drawn: (Vec<u64>, Vec<f64>)| {
                    let seconds = seconds(&drawn.0, &drawn.1);
                    if seconds < CLEARLY * best.0 { (seconds, drawn) } else { best }
                };
                let (_, (parts, again)) = alike.fold((seconds(&by_room.0, &by_room.1), by_room), faster);
                (parts, again, waits)
            }
        };
        if waits > self.team.host.0 as f64 {
            return None;
        }
        let host = |part: &f64| Bytes((self.team.host.0 as f64 * part) as u64);
        Some(Sketch {
            seconds: seconds(&parts, &again),
            hosts: of_links.iter().map(host).collect(),
            waits,
            count,
            micro_batches,
            parts,
        })
    }

    /// Sketches of numbers of micro-batches that are worth trying, fastest first.
    fn sketches(&self, ranks: &Ranks) -> Vec<Sketch> {
        let (total, least) = (self.team.total(), ranks.computes());
        let mut at_once: Vec<u64> = match self.team.devices[0].pins.micro_batch {
            Some(pin) => vec![u64::from(pin) * least],
            None => {
                let counts = (0..32).flat_map(|power| [1 << power, 3 << power]).take_while(|&count| count <= 2 * total);
                // At last as few at once as there are devices that compute.
                counts.map(|count| total.div_ceil(count)).filter(|&at_once| at_once >= least).chain([least]).collect()
            }
        };
        at_once.sort_unstable_by(|a, b| b.cmp(a));
        at_once.dedup();
        let mut found: Vec<Sketch> = Vec::new();
        let (mut best, mut worse) = (f64::INFINITY, 0);
        for at_once in at_once {
            let Some(sketch) = self.sketch(ranks, at_once, &vec![0; ranks.devices.len()]) else { continue };
            worse = if sketch.seconds < best { 0 } else { worse + 1 };
            best = best.min(sketch.seconds);
            found.push(sketch);
            if worse > WORSE {
                break;
            }
        }
        found.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        found
    }

    /// The fastest way for some devices, all of which take part.
    fn way(&self, ranks: &Ranks) -> Option<Way> {
        let sketches = self.sketches(ranks);
        let least = sketches.first()?.seconds;
        let near = sketches.iter().take(LOOKS).take_while(|sketch| sketch.seconds <= NEAR * least);
        let found: Vec<Option<Way>> = near.map(|sketch| self.searched(ranks, sketch)).collect();
        let looked = found.len();
        fastest(found.into_iter().flatten())
            .or_else(|| sketches.iter().skip(looked).find_map(|sketch| self.searched(ranks, sketch)))
    }

    /// A sketch with the recipe of each rank, if all have one.
    fn searched(&self, ranks: &Ranks, sketch: &Sketch) -> Option<Way> {
        let devices = &ranks.devices;
        let specs: Vec<DeviceSpec> = devices.iter().map(|&device| self.spec(device, devices)).collect();
        let mut tight = vec![0; devices.len()];
        let mut sketch = sketch.clone();
        for _ in 0..TRIES {
            let mut given = self.given(devices, &sketch);
            // Who is alike has one recipe, that of the largest part.
            let alike = |a: usize, b: usize| {
                self.team.first_alike(devices[a]) == self.team.first_alike(devices[b])
                    && given[a].recipe.micro_batch == given[b].recipe.micro_batch
                    && self.held_back[devices[a]] == self.held_back[devices[b]]
            };
            let largest = |rank: usize| {
                let like = (0..devices.len()).filter(|&other| alike(other, rank));
                like.max_by_key(|&other| (sketch.parts[other], std::cmp::Reverse(other))).expect("it is like itself")
            };
            let stands_for: Vec<usize> = (0..devices.len()).map(largest).collect();
            let asked: Vec<usize> = (0..devices.len()).filter(|&rank| stands_for[rank] == rank).collect();
            let asked: Vec<(usize, Question)> = asked
                .into_iter()
                .map(|rank| (rank, self.question(&specs[rank], devices[rank], &given[rank])))
                .collect();
            let found = side_by_side(&asked, |(_, question)| fastest_by_bounds(question));
            let found: HashMap<usize, Option<Candidate>> = asked.iter().map(|(rank, _)| *rank).zip(found).collect();
            let without = (0..devices.len()).filter(|&rank| found[&stands_for[rank]].is_none());
            let without: Vec<usize> = without.collect();
            if without.is_empty() {
                let (mut once, mut passes) = (0.0f64, 0.0f64);
                for (rank, given) in given.iter_mut().enumerate() {
                    let candidate = found[&stands_for[rank]].as_ref().expect("all have one");
                    given.recipe = candidate.recipe.clone();
                    (given.device_bytes, given.host_bytes) = (candidate.device, candidate.host);
                    (once, passes) = (once.max(candidate.once), passes.max(candidate.passes));
                }
                let seconds = once + sketch.count as f64 * passes;
                return Some(Way { sharing: Some(Sharing::State), ranks: given, seconds });
            }
            for rank in without {
                tight[rank] += specs[rank].arena_budget().0 / 48;
            }
            sketch = self.sketch(ranks, sketch.micro_batches.iter().sum(), &tight)?;
        }
        None
    }

    /// What a sketch gives each rank; of recipes only the micro-batch is known.
    fn given(&self, devices: &[usize], sketch: &Sketch) -> Vec<Given> {
        let mut sequences: Vec<u64> = sketch.micro_batches.iter().map(|own| own * sketch.count).collect();
        for _ in self.team.total()..sequences.iter().sum() {
            let most = (0..sequences.len()).max_by_key(|&rank| (sequences[rank], std::cmp::Reverse(rank)));
            sequences[most.expect("a team has a device")] -= 1;
        }
        let shares = shares(&sequences, &sketch.parts, sketch.count);
        let of = |(rank, share): (usize, Share)| Given {
            device: devices[rank],
            share,
            sequences: sequences[rank],
            recipe: plimsoll_core::Recipe::on_device(sketch.micro_batches[rank] as u32, vec![]),
            host: sketch.hosts[rank],
            device_bytes: 0,
            host_bytes: 0,
        };
        shares.into_iter().enumerate().map(of).collect()
    }

    /// The fastest way for some devices. So many of them compute nothing as is best: those that have no room for a sequence, and
    /// then the slowest. They hold a part of the state; or are not there, where devices `may_leave`.
    fn way_without_the_slow(&self, mut devices: Vec<usize>, may_leave: bool) -> Option<Way> {
        let all = devices.clone();
        let room_for = |device: usize, sequences: u64| {
            let least = self.rank(device, sequences, &all).beside[1];
            least <= self.room(device, &all)
        };
        devices.retain(|&device| !may_leave || room_for(device, 0));
        if devices.len() < 2 {
            return None;
        }
        let at_once = self.team.devices[0].pins.micro_batch.map_or(1, u64::from);
        let (mut able, unable): (Vec<usize>, Vec<usize>) =
            devices.iter().partition(|&&device| room_for(device, at_once));
        able.sort_by(|&a, &b| self.computing(b, 1).total_cmp(&self.computing(a, 1)));
        let mut best: Option<Way> = None;
        for slow in 0..able.len() {
            let (slow, compute) = able.split_at(slow);
            // Where there is a way, who is as slow is as much in the way.
            let as_slow = slow.last().is_some_and(|&last| self.computing(last, 1) <= self.computing(compute[0], 1));
            if as_slow && best.is_some() {
                continue;
            }
            // Not even if they did nothing else.
            let at_least = self.team.tokens() / self.at_most_of(compute.iter().copied());
            if best.as_ref().is_some_and(|best| best.seconds <= at_least) {
                break;
            }
            let idle = [&unable, slow].concat();
            let with = self.way(&Ranks::of(devices.clone(), |device| idle.contains(&device)));
            let mut others = compute.to_vec();
            others.sort_unstable();
            let without = may_leave && others.len() > 1 && others.len() < devices.len();
            let without = without.then(|| self.way(&Ranks::of(others, |_| false))).flatten();
            best = fastest(best.into_iter().chain(with).chain(without));
        }
        while let Some(way) = best.as_ref().filter(|_| may_leave).and_then(|best| self.without_a_holder(best)) {
            best = Some(way);
        }
        best
    }

    /// A way without one of those that only hold a part of the state, if that is faster: it may hold less than it costs.
    fn without_a_holder(&self, way: &Way) -> Option<Way> {
        let devices = way.devices();
        let mut seen = HashSet::new();
        let mut first = |device: usize| seen.insert((self.team.first_alike(device), self.held_back[device]));
        let holders = devices.iter().copied().filter(|&device| only_holds(way, device) && first(device));
        let without = |out: usize| {
            let others = devices.iter().copied().filter(|&device| device != out).collect();
            Ranks::of(others, |device| only_holds(way, device))
        };
        let ways = holders.filter(|_| devices.len() > 2).filter_map(|out| self.way(&without(out)));
        fastest(ways).filter(|without| without.seconds < way.seconds)
    }

    /// Beside a way in which somebody only holds a part of the state, that in which all compute; else that in which those only
    /// hold that are in the way of the others: who has one sequence of each micro-batch and is still the slowest.
    pub fn otherwise(&self, way: &Way) -> Option<Way> {
        let all = Ranks::of(way.devices(), |_| false);
        if way.ranks.iter().any(|given| given.sequences == 0) {
            return self.way(&all);
        }
        let seconds = |given: &Given| self.computing(given.device, u64::from(given.recipe.micro_batch));
        let slowest = way.ranks.iter().map(seconds).fold(0.0, f64::max);
        let slows = |given: &&Given| given.recipe.micro_batch == 1 && seconds(given) >= slowest;
        let slow: Vec<usize> = way.ranks.iter().filter(slows).map(|given| given.device).collect();
        let ranks = Ranks::of(all.devices, |device| slow.contains(&device));
        if slow.is_empty() || ranks.computes() == 0 { None } else { self.way(&ranks) }
    }
}

/// Who takes part, in the order of ranks.
#[derive(Clone, Debug)]
struct Ranks {
    devices: Vec<usize>,
    /// Which of them only hold a part of the state, and compute nothing.
    holds: Vec<bool>,
}

impl Ranks {
    /// Some devices, of which those only hold for which it is said.
    fn of(devices: Vec<usize>, holds: impl Fn(usize) -> bool) -> Ranks {
        Ranks { holds: devices.iter().map(|&device| holds(device)).collect(), devices }
    }

    /// How many compute.
    fn computes(&self) -> u64 {
        self.holds.iter().filter(|holds| !**holds).count() as u64
    }
}

fn fastest(ways: impl Iterator<Item = Way>) -> Option<Way> {
    ways.min_by(|a, b| a.seconds.total_cmp(&b.seconds))
}

/// Whether a device is in a way, and only holds a part of the state.
fn only_holds(way: &Way, device: usize) -> bool {
    way.ranks.iter().any(|given| given.device == device && given.sequences == 0)
}

impl ShareOut for State<'_, '_> {
    fn fastest(&self) -> Option<Way> {
        let devices: Vec<usize> = (0..self.team.devices.len()).collect();
        if self.team.all || self.kept().is_some() {
            return self.way_without_the_slow(devices, false);
        }
        let circles = circles(&devices, |device| self.team.devices[device].device.team_link);
        fastest(circles.into_iter().filter_map(|circle| self.way_without_the_slow(circle, true)))
    }

    fn strike(&mut self, way: &Way, rank: usize, over: Bytes) {
        // At least a little, so that this comes to an end.
        let Given { device, .. } = way.ranks[rank];
        self.held_back[device] += over.0 + self.team.devices[device].device.budget.0 / 256;
    }

    fn left_out(&self, way: &Way) -> Vec<LeftOut> {
        let with = |devices: &[usize]| self.way(&Ranks::of(devices.to_vec(), |device| only_holds(way, device)));
        out_of_way(self.team, way, UNABLE, with)
    }

    fn why_holds(&self, way: &Way) -> Vec<Option<String>> {
        let slows = |who: &str, too: &dyn Fn(usize) -> bool| {
            let with = self.way(&Ranks::of(way.devices(), |device| only_holds(way, device) && !too(device)))?;
            let part = 100.0 * way.seconds / with.seconds;
            Some(format!("{who} would slow the team to {part:.1} % of the tokens a second, predicted"))
        };
        let why = |given: &Given| {
            let like = |device: usize| self.team.first_alike(device) == self.team.first_alike(given.device);
            let alike = way.ranks.iter().filter(|other| other.sequences == 0 && like(other.device)).count() as u64;
            // Those that are alike are told alike.
            let all = (alike > 1).then(|| {
                let who = format!("with some of their own it and {} like it", counted(alike - 1, "other"));
                slows(&who, &like)
            });
            let alone = || slows("with some of its own it", &|device| device == given.device);
            all.flatten().or_else(alone).unwrap_or_else(|| UNABLE.to_owned())
        };
        way.ranks.iter().map(|given| (given.sequences == 0).then(|| why(given))).collect()
    }

    fn worth(&self, _: &Way) -> Option<Worth> {
        None
    }
}

/// Shares of state for ranks in order.
pub(super) fn shares(sequences: &[u64], parts: &[u64], count: u64) -> Vec<Share> {
    let share = |rank: usize| Share {
        sharing: Some(Sharing::State),
        rank: rank as u32,
        ranks: sequences.len() as u32,
        first_sequence: sequences[..rank].iter().sum(),
        state: parts.to_vec(),
        micro_batches: count,
        ..Share::ALONE
    };
    (0..sequences.len()).map(share).collect()
}

/// So much in parts that are as alike as the room for each allows.
fn levelled(room: &[f64], wanted: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..room.len()).collect();
    order.sort_by(|&a, &b| room[a].total_cmp(&room[b]));
    let (mut parts, mut left) = (vec![0.0; room.len()], wanted);
    for (done, &rank) in order.iter().enumerate() {
        parts[rank] = room[rank].min(left / (room.len() - done) as f64);
        left -= parts[rank];
    }
    parts
}

fn even(all: u64, ranks: u64) -> Vec<u64> {
    (0..ranks).map(|rank| all * (rank + 1) / ranks - all * rank / ranks).collect()
}

/// Parts of 1024 in proportion to room: rounded down, and what is left to whom has the most left.
fn whole_parts(room: &[f64]) -> Vec<u64> {
    let all: f64 = room.iter().sum();
    let exact: Vec<f64> = room.iter().map(|room| WHOLE as f64 * room / all).collect();
    let mut parts: Vec<u64> = exact.iter().map(|part| *part as u64).collect();
    for _ in parts.iter().sum()..WHOLE {
        let left = |rank: usize| (exact[rank] - parts[rank] as f64) * all / exact[rank].max(1e-9);
        let most = (0..parts.len()).max_by(|&a, &b| left(a).total_cmp(&left(b)).then(b.cmp(&a)));
        parts[most.expect("a team has a device")] += 1;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::team::testing::{device, question};
    use plimsoll_core::{HostSpec, Link};
    use plimsoll_program::models::{ModelConfig, preset};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_are_as_alike_as_the_room_allows(room in prop::collection::vec(0.0f64..100.0, 1..6), of_all in 0.01f64..1.0) {
            let wanted = of_all * room.iter().sum::<f64>();
            let parts = levelled(&room, wanted);
            prop_assert!((parts.iter().sum::<f64>() - wanted).abs() < 1e-9 * wanted.max(1.0), "{parts:?} {wanted}");
            prop_assert!(parts.iter().zip(&room).all(|(part, room)| part <= room));
            // Who has less than another has no room for more.
            let most = parts.iter().copied().fold(0.0, f64::max);
            prop_assert!(parts.iter().zip(&room).all(|(part, room)| part == room || *part > most - 1e-9), "{parts:?} {room:?}");
        }
    }

    /// A small model over some devices, so many sequences a step.
    fn team<'a>(config: &'a ModelConfig, devices: &'a [DeviceSpec], sequences: u64, host: Bytes) -> TeamQuestion<'a> {
        let host_of = HostSpec { budget: host, memory_bytes_per_second: 30e9, ..HostSpec::NONE };
        let of = |device| Question { evaluate: true, host: host_of, ..question(config, device, 256, sequences) };
        TeamQuestion { devices: devices.iter().map(of).collect(), host, all: false, only: None, evaluations: None }
    }

    fn model() -> ModelConfig {
        ModelConfig { layers: 4, vocab: 1024, ..preset("smollm2-135m").expect("listed") }
    }

    /// Every way to have some devices compute, some hold, and some not there, but for what could not be faster than `seconds`.
    fn every_way(state: &State, may_leave: bool, mut seconds: f64) -> Vec<(usize, Way)> {
        let number = state.team.devices.len();
        let mut ways = Vec::new();
        for code in 0..3usize.pow(number as u32) {
            let does = |device: usize| code / 3usize.pow(device as u32) % 3;
            let there: Vec<usize> = (0..number).filter(|&device| does(device) < 2).collect();
            let compute = there.iter().copied().filter(|&device| does(device) == 0);
            let could = state.team.tokens() / state.at_most_of(compute.clone()) < seconds;
            if there.len() < 2 || compute.count() == 0 || !(may_leave || there.len() == number) || !could {
                continue;
            }
            let held = there.iter().filter(|&&device| does(device) == 1).count();
            let way = state.way(&Ranks::of(there, |device| does(device) == 1));
            seconds = way.iter().map(|way| way.seconds).fold(seconds, f64::min);
            ways.extend(way.map(|way| (held, way)));
        }
        ways
    }

    #[test]
    fn several_that_are_in_the_way_hold_together() {
        let config = model();
        for slow in [[(0.02, 190), (0.02, 190)], [(0.015, 208), (0.02, 170)]] {
            let mut devices = vec![device(1.0, Bytes::mib(102), Link::MEMORY)];
            devices.extend(slow.map(|(pace, mib)| device(pace, Bytes::mib(mib), Link::MEMORY)));
            let team = team(&config, &devices, 3, Bytes::ZERO);
            let state = State::new(&team, &[]);
            let way = state.fastest().expect("they hold it together");
            assert_eq!(way.devices(), [0, 1, 2]);
            assert!((1..3).all(|device| only_holds(&way, device)), "{way:?}");
            let all = every_way(&state, true, f64::INFINITY);
            let few = all.iter().filter(|(held, _)| *held < 2).map(|(_, way)| way.seconds);
            let few = few.fold(f64::INFINITY, f64::min);
            println!("{slow:?}: {} s, {few} s with one that holds at most", way.seconds);
            assert!(few.is_finite() && way.seconds < 0.5 * few, "{} s and {few} s", way.seconds);
            let whose = if slow[0] == slow[1] { "their own it and 1 other like it" } else { "its own it" };
            for why in state.why_holds(&way).into_iter().skip(1) {
                let why = why.expect("it holds");
                let part = why.strip_prefix(&format!("with some of {whose} would slow the team to "));
                let part: f64 =
                    part.and_then(|part| part.split_once(' ')?.0.parse().ok()).unwrap_or_else(|| panic!("{why}"));
                assert!(part < 50.0, "{why}");
            }
        }
    }

    /// Whoever computes, holds or is not there.
    #[test]
    fn hardly_any_other_way_is_faster() {
        let config = model();
        let mut seed = 1u64;
        // The upper bits of a linear congruential generator.
        let mut random = || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 40) as f64 / (1u64 << 24) as f64
        };
        let (mut planned, mut held) = (0, 0);
        for case in 0..16 {
            let link = Link { bytes_per_second: [1e10, 4e8][case % 2], latency_seconds: 1e-5 };
            let mut devices = vec![device(1.0, Bytes::mib((80.0 * 4f64.powf(random())) as u64), link)];
            while devices.len() < 3 + case / 12 {
                let pace = 10f64.powf(-2.0 * random());
                let slow = device(pace, Bytes::mib((80.0 * 4f64.powf(random())) as u64), link);
                let again = devices[1..].last().filter(|_| random() < 0.4).cloned();
                devices.push(again.unwrap_or(slow));
            }
            let team = team(&config, &devices, [6, 12, 24][case % 3], Bytes::mib(40 * u64::from(case % 4 == 3)));
            let state = State::new(&team, &[]);
            let may_leave = random() < 0.6;
            let way = state.way_without_the_slow((0..devices.len()).collect(), may_leave);
            let found = way.as_ref().map_or(f64::INFINITY, |way| way.seconds);
            let ways = every_way(&state, may_leave, found);
            let best = ways.iter().map(|(_, way)| way.seconds).fold(f64::INFINITY, f64::min);
            assert!(found < 1.05 * best || best == f64::INFINITY, "{case}: {found} s and {best} s, {devices:?}");
            planned += usize::from(way.is_some());
            held += way.map_or(0, |way| way.ranks.iter().filter(|given| given.sequences == 0).count());
        }
        println!("{planned} planned, {held} hold");
        assert!(planned >= 8 && held >= 6, "{planned} planned, {held} hold");
    }
}
