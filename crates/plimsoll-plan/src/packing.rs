//! Packing of buffers into an arena: offsets for buffers with known sizes and lifetimes, and a lower bound.
//!
//! The input are rectangles of known height (bytes) at a known place on the time axis. They are stacked as low as
//! possible. This is dynamic storage allocation, which is NP-hard in general but benign for the traces of training
//! steps. Lifetimes are computed in `lifetimes`; buffers at fixed offsets are handled in `layout`.
//!
//! # Lower bound
//!
//! Offsets are multiples of the alignment, but the end of the highest buffer is not: [`Packing::bytes`] is the end of
//! the last used byte, equal to the high-water mark measured in a running arena. At any moment the live buffers are
//! stacked: each except the topmost takes its size rounded up to the alignment, and the topmost takes its plain size.
//! So a moment needs at least *the sum of the rounded sizes of all live buffers, less the largest rounding among them*.
//! [`lower_bound`] is the largest such need over time. A packing that meets it has an overhead of exactly zero.
//!
//! # Method
//!
//! 1. First fit and best fit are tried with several orders of the buffers. Buffers that live at the peak are placed
//!    first or not; long-lived buffers are placed at the top of the arena or not. The first packing that meets the
//!    bound ends the search.
//! 2. If the rounded top of a packing is minimal but its plain top is not, the same order is tried with buffers of much
//!    rounding fixed at the top.
//! 3. Otherwise the best packing is improved: buffers that exceed the wanted height are placed earlier, until a counted
//!    effort is spent.
//!
//! Nothing depends on a clock, on addresses or on hashing: equal input gives equal offsets.

use std::cmp::Reverse;
use std::ops::RangeInclusive;

/// A buffer to pack: its size and its lifetime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// Size in bytes, not rounded. A buffer of zero bytes is at offset 0.
    pub bytes: u64,
    /// First moment (op number) of the lifetime.
    pub first: u32,
    /// Last moment of the lifetime, inclusive: a buffer with `last == 7` may share bytes with one with `first == 8`.
    pub last: u32,
}

/// Offsets for a set of buffers, in the order of the input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packing {
    /// First byte of each buffer, a multiple of the alignment.
    pub offsets: Vec<u64>,
    /// End of the highest buffer, not rounded up.
    pub bytes: u64,
    /// Lower bound of `bytes` for any packing of these buffers; see [`lower_bound`].
    pub lower_bound: u64,
}

impl Packing {
    /// Computes the fraction by which the packing exceeds the lower bound; 0 if it meets it.
    pub fn overhead(&self) -> f64 {
        if self.bytes == self.lower_bound { 0.0 } else { self.bytes as f64 / self.lower_bound as f64 - 1.0 }
    }
}

/// Computes a lower bound of the bytes of any packing with aligned offsets. Each moment needs the sum of the rounded
/// sizes of live buffers, less the largest rounding among them. The bound is the largest need over all moments. Returns
/// 0 without buffers. Linear in buffers and moments if op numbers are dense.
///
/// # Panics
/// If a buffer ends before it begins, or if `alignment` is 0. The sum of all sizes must fit in u64.
pub fn lower_bound(buffers: &[Buffer], alignment: u64) -> u64 {
    PackingProblem::new(buffers, alignment).lower_bound()
}

/// Effort of [`pack`]: the number of buffers that it places to improve a packing, about a second for 10,000 buffers.
/// [`pack`] spends it only if no fixed order of the buffers reaches the lower bound with all sizes rounded up.
pub const EFFORT: u64 = 500_000;

/// Packs `buffers` at multiples of `alignment`, with [`EFFORT`].
///
/// # Panics
/// If a buffer ends before it begins, or if `alignment` is 0.
pub fn pack(buffers: &[Buffer], alignment: u64) -> Packing {
    pack_with_effort(buffers, alignment, EFFORT)
}

/// Packs `buffers` at multiples of `alignment`. The function first places the buffers in some fixed orders. If none
/// gives a packing at the lower bound, it improves the best one until `effort` more buffers have been placed, about a
/// microsecond each. The effort is a count, so the result is the same on every machine. 0 tries the fixed orders only.
///
/// # Panics
/// If a buffer ends before it begins, or if `alignment` is 0.
pub fn pack_with_effort(buffers: &[Buffer], alignment: u64, effort: u64) -> Packing {
    let problem = PackingProblem::new(buffers, alignment);
    let offsets = PackingSearch::new(&problem).run(effort);
    Packing {
        bytes: problem.bytes(&offsets),
        lower_bound: problem.lower_bound(),
        offsets: offsets.iter().map(|offset| offset * alignment).collect(),
    }
}

/// A buffer with its size in units of the alignment and its lifetime in ticks.
#[derive(Clone, Copy)]
struct Item {
    units: u64,
    /// Bytes added by rounding the size up to units.
    slack: u64,
    first: u32,
    last: u32,
}

/// The buffers to pack, and their summed sizes at each tick.
struct PackingProblem {
    items: Vec<Item>,
    alignment: u64,
    /// Units of the alignment that are live at each tick, with every buffer rounded up.
    load: Vec<u64>,
    /// Most live units at any tick. No packing is lower if all sizes are rounded up to units.
    max_load: u64,
    /// Ticks at which `max_load` units are live, ascending.
    peaks: Vec<u32>,
    /// Bytes by which the lower bound is below `max_load` units. At every peak, some live buffer has at least these
    /// bytes of rounding, which an arena saves if that buffer is at the top.
    slack: u64,
}

impl PackingProblem {
    fn new(buffers: &[Buffer], alignment: u64) -> PackingProblem {
        assert!(alignment > 0, "the alignment of a packing is at least one byte");
        let (lifetimes, ticks) = lifetimes(buffers);
        let items: Vec<Item> = buffers
            .iter()
            .zip(lifetimes)
            .map(|(buffer, (first, last))| {
                let units = buffer.bytes.div_ceil(alignment);
                Item { units, slack: units * alignment - buffer.bytes, first, last }
            })
            .collect();

        let mut load = vec![0u64; ticks + 1];
        for item in &items {
            load[item.first as usize] = load[item.first as usize].wrapping_add(item.units);
            load[item.last as usize + 1] = load[item.last as usize + 1].wrapping_sub(item.units);
        }
        load.pop();
        let mut live = 0u64;
        for change in &mut load {
            live = live.wrapping_add(*change);
            *change = live;
        }
        let max_load = load.iter().copied().max().unwrap_or(0);
        let peaks: Vec<u32> = (0..ticks as u32).filter(|&tick| load[tick as usize] == max_load).collect();
        let slack = top_slack(&items, &peaks);
        PackingProblem { items, alignment, load, max_load, peaks, slack }
    }

    /// Returns the lower bound in bytes.
    fn lower_bound(&self) -> u64 {
        self.max_load * self.alignment - self.slack
    }

    /// Returns the end of the highest buffer in bytes, for offsets in units.
    fn bytes(&self, offsets: &[u64]) -> u64 {
        let ends =
            self.items.iter().zip(offsets).map(|(item, offset)| (offset + item.units) * self.alignment - item.slack);
        ends.max().unwrap_or(0)
    }

    /// Returns the first tick with the most live units; 0 without buffers.
    fn peak(&self) -> u32 {
        self.peaks.first().copied().unwrap_or(0)
    }

    /// Returns whether `top_placement` places `item` from the top downwards. Short-lived items never are.
    fn is_placed_at_top(&self, item: &Item, top_placement: TopPlacement) -> bool {
        let peak = self.peak();
        let long = item.last - item.first > self.load.len() as u32 / 16;
        long && match top_placement {
            TopPlacement::None => false,
            TopPlacement::OffPeak => item.last < peak || peak < item.first,
            TopPlacement::AfterPeak => peak.saturating_sub(item.first) < item.last.saturating_sub(peak) / 8,
        }
    }

    /// Returns the indices of buffers that are fixed at the top of the arena, so that it can end at the lower bound.
    /// Exactly one of them lives at every peak, and each has at least `slack` bytes of rounding. Returns `None` if
    /// `slack` is 0, or if no such buffers are found.
    fn top_buffers(&self) -> Option<Vec<usize>> {
        if self.slack == 0 {
            return None;
        }
        let enough = (0..self.items.len()).filter(|&i| self.items[i].slack >= self.slack);
        let mut candidates: Vec<usize> = enough.collect();
        candidates.sort_unstable_by_key(|&i| {
            let Item { units, slack, first, last } = self.items[i];
            (first, last, units, slack, i)
        });
        let mut candidates = candidates.into_iter().peekable();
        let mut top_buffers: Vec<usize> = Vec::new();
        let mut free_from = 0;
        for &peak in &self.peaks {
            if peak < free_from {
                continue;
            }
            // The buffer that lives longest covers the most peaks; among equals, the smallest obstructs least.
            let begun = std::iter::from_fn(|| candidates.next_if(|&i| self.items[i].first <= peak));
            let fitting = begun.filter(|&i| self.items[i].first >= free_from && self.items[i].last >= peak);
            let chosen = fitting.max_by_key(|&i| (self.items[i].last, Reverse(self.items[i].units)))?;
            free_from = self.items[chosen].last + 1;
            top_buffers.push(chosen);
        }
        Some(top_buffers)
    }
}

/// Converts op numbers to ticks: returns the first and last tick of each buffer, and the number of ticks. Dense op
/// numbers are ticks already. For sparse ones, the ticks number the distinct starts, because only starts decide which
/// lifetimes overlap.
fn lifetimes(buffers: &[Buffer]) -> (Vec<(u32, u32)>, usize) {
    let mut latest = 0;
    for buffer in buffers {
        assert!(buffer.first <= buffer.last, "a buffer lives from {} to {}", buffer.first, buffer.last);
        latest = latest.max(buffer.first);
    }
    if buffers.is_empty() {
        return (Vec::new(), 0);
    }
    if (latest as usize) < 4 * buffers.len() {
        let clamped = buffers.iter().map(|buffer| (buffer.first, buffer.last.min(latest)));
        return (clamped.collect(), latest as usize + 1);
    }
    let mut firsts: Vec<u32> = buffers.iter().map(|buffer| buffer.first).collect();
    firsts.sort_unstable();
    firsts.dedup();
    let rank = |time: u32| firsts.partition_point(|&first| first <= time) as u32 - 1;
    (buffers.iter().map(|buffer| (rank(buffer.first), rank(buffer.last))).collect(), firsts.len())
}

/// Computes the largest slack (bytes of rounding) among the buffers that live at each peak, and returns the smallest of
/// these values.
fn top_slack(items: &[Item], peaks: &[u32]) -> u64 {
    let alive_at = |item: &Item| {
        let from = peaks.partition_point(|&peak| peak < item.first);
        let to = peaks.partition_point(|&peak| peak <= item.last);
        (from < to).then_some((item.slack, from, to))
    };
    let mut candidates: Vec<_> = items.iter().filter(|item| item.slack > 0).filter_map(alive_at).collect();
    candidates.sort_unstable_by_key(|&(slack, ..)| Reverse(slack));
    // Union-find: peaks are covered in the order of decreasing slack. `next[p]` leads to the first uncovered peak from
    // p on.
    let mut next: Vec<usize> = (0..=peaks.len()).collect();
    let mut uncovered = peaks.len();
    for (slack, from, to) in candidates {
        let mut peak = find_root(&mut next, from);
        while peak < to {
            next[peak] = peak + 1;
            uncovered -= 1;
            peak = find_root(&mut next, peak);
        }
        if uncovered == 0 {
            return slack;
        }
    }
    0
}

/// Follows `next` to its fixed point, with path compression.
fn find_root(next: &mut [usize], mut at: usize) -> usize {
    while next[at] != at {
        next[at] = next[next[at]];
        at = next[at];
    }
    at
}

/// The choice among the gaps that a buffer fits into.
#[derive(Clone, Copy)]
enum Fit {
    /// The lowest gap.
    First,
    /// The tightest gap; among equals the lowest.
    Best,
    /// The units that end at unit `below`, if all neighbors end lower; otherwise the upper end of the highest gap.
    Last { below: u64 },
}

/// A placed buffer, in units and ticks.
#[derive(Clone, Copy)]
struct Placed {
    offset: u64,
    end: u64,
    first: u32,
    last: u32,
}

/// The placed buffers by ascending offset, indexed by windows of time. A short-lived buffer is compared with the
/// neighbors in its window only. Windows overlap by half, so that every short lifetime is inside one of them.
/// Long-lived buffers are compared with `all`.
struct PlacedBuffers {
    window_ticks: u32,
    windows: Vec<Vec<Placed>>,
    all: Vec<Placed>,
}

impl PlacedBuffers {
    fn new(ticks: usize) -> PlacedBuffers {
        let window_ticks = (ticks as u32 / 32).max(64);
        let windows = ticks.div_ceil(window_ticks as usize);
        PlacedBuffers { window_ticks, windows: vec![Vec::new(); windows], all: Vec::new() }
    }

    fn clear(&mut self) {
        self.windows.iter_mut().for_each(Vec::clear);
        self.all.clear();
    }

    /// Returns a superset of the placed buffers that overlap `item` in time, by ascending offset: those of one window
    /// if `item` lies inside it, else all. The caller compares the times.
    fn neighbors(&self, item: &Item) -> &[Placed] {
        let window = item.first / self.window_ticks;
        if item.last / self.window_ticks <= window + 1 { &self.windows[window as usize] } else { &self.all }
    }

    /// Adds a placed buffer.
    fn insert(&mut self, placed: Placed) {
        fn insert_sorted(list: &mut Vec<Placed>, placed: Placed) {
            let at = list.partition_point(|other| other.offset <= placed.offset);
            list.insert(at, placed);
        }
        let windows = self.windows_of(placed.first, placed.last);
        for list in &mut self.windows[windows] {
            insert_sorted(list, placed);
        }
        insert_sorted(&mut self.all, placed);
    }

    /// Returns the indices of the windows that overlap a lifetime from tick `first` to tick `last`, inclusive.
    fn windows_of(&self, first: u32, last: u32) -> RangeInclusive<usize> {
        let from = (first / self.window_ticks).saturating_sub(1);
        from as usize..=(last / self.window_ticks) as usize
    }

    /// Returns the offset for `item` in units: in a gap between its neighbors, or on top of them if it fits into none.
    fn find_offset(&self, item: &Item, fit: Fit) -> u64 {
        let mut floor = 0;
        let mut chosen: Option<(u64, u64)> = None;
        for placed in self.neighbors(item) {
            if placed.last < item.first || placed.first > item.last {
                continue;
            }
            if placed.offset >= floor + item.units {
                let gap = placed.offset - floor;
                match fit {
                    Fit::First => return floor,
                    Fit::Best if gap == item.units => return floor,
                    Fit::Best if chosen.is_none_or(|(least, _)| gap < least) => chosen = Some((gap, floor)),
                    Fit::Best => {}
                    Fit::Last { .. } => chosen = Some((gap, placed.offset - item.units)),
                }
            }
            floor = floor.max(placed.end);
        }
        match fit {
            Fit::Last { below } if floor + item.units <= below => below - item.units,
            _ => chosen.map_or(floor, |(_, offset)| offset),
        }
    }
}

/// The long-lived buffers that are placed from the top downwards instead of from the bottom. This separates
/// activations, which are freed during the backward pass, from gradients, which appear during it and stay.
#[derive(Clone, Copy)]
enum TopPlacement {
    None,
    /// Buffers that do not live at the peak.
    OffPeak,
    /// Buffers that begin after the peak, or that live much longer after it than before it.
    AfterPeak,
}

/// A strategy for placing buffers one by one.
#[derive(Clone, Copy)]
struct PlacementStrategy {
    top_placement: TopPlacement,
    fit: Fit,
}

impl PlacementStrategy {
    fn all() -> impl Iterator<Item = PlacementStrategy> {
        let top_placements = [TopPlacement::None, TopPlacement::OffPeak, TopPlacement::AfterPeak];
        top_placements
            .into_iter()
            .flat_map(|top_placement| [Fit::First, Fit::Best].map(|fit| PlacementStrategy { top_placement, fit }))
    }
}

/// The best packing found so far: offsets in units, with their order and strategy.
#[derive(Clone)]
struct BestPacking {
    order: Vec<u32>,
    strategy: PlacementStrategy,
    offsets: Vec<u64>,
    /// End of the highest buffer in units, rounded up.
    height: u64,
    bytes: u64,
}

/// The search for the lowest packing.
struct PackingSearch<'a> {
    problem: &'a PackingProblem,
    placed_buffers: PlacedBuffers,
    top_buffers: Option<Vec<usize>>,
    best: Option<BestPacking>,
}

impl<'a> PackingSearch<'a> {
    fn new(problem: &'a PackingProblem) -> PackingSearch<'a> {
        PackingSearch {
            problem,
            placed_buffers: PlacedBuffers::new(problem.load.len()),
            top_buffers: problem.top_buffers(),
            best: None,
        }
    }

    /// Runs the search, and returns the offset of each buffer in units. `effort` limits the improvement after the fixed
    /// orders, as in [`pack_with_effort`].
    fn run(mut self, effort: u64) -> Vec<u64> {
        for order in PlacementOrder::all() {
            let order = order.sort(self.problem);
            for strategy in PlacementStrategy::all() {
                self.try_order(&order, strategy);
                if self.is_at_lower_bound() {
                    return self.best.expect("a packing at the bound").offsets;
                }
            }
        }
        self.improve(effort);
        self.best.map(|best| best.offsets).unwrap_or_default()
    }

    fn is_at_lower_bound(&self) -> bool {
        self.best.as_ref().is_some_and(|best| best.bytes == self.problem.lower_bound())
    }

    fn is_at_max_load(&self) -> bool {
        self.best.as_ref().is_some_and(|best| best.height == self.problem.max_load)
    }

    /// Packs the buffers in this order, and keeps the result if it is lower than the best packing so far.
    fn try_order(&mut self, order: &[u32], strategy: PlacementStrategy) {
        if !self.is_at_max_load() {
            let limit = self.best.as_ref().map_or(u64::MAX, |best| best.height - 1);
            if let Ok(offsets) = self.place(order, strategy, limit, false) {
                self.keep_if_better(order, strategy, offsets);
            }
        }
        self.try_with_top_buffers(order, strategy);
    }

    /// Packs again with the buffers of `top_buffers` at the top, if the best packing is minimal in units but not in
    /// bytes.
    fn try_with_top_buffers(&mut self, order: &[u32], strategy: PlacementStrategy) {
        if self.is_at_max_load()
            && !self.is_at_lower_bound()
            && self.top_buffers.is_some()
            && let Ok(offsets) = self.place(order, strategy, self.problem.max_load, true)
        {
            self.keep_if_better(order, strategy, offsets);
        }
    }

    fn keep_if_better(&mut self, order: &[u32], strategy: PlacementStrategy, offsets: Vec<u64>) {
        let bytes = self.problem.bytes(&offsets);
        if self.best.as_ref().is_none_or(|best| bytes < best.bytes) {
            let height = self.problem.items.iter().zip(&offsets).map(|(item, offset)| offset + item.units).max();
            self.best =
                Some(BestPacking { order: order.to_vec(), strategy, offsets, height: height.unwrap_or(0), bytes });
        }
    }

    /// Places the items one by one, and returns their offsets in units. The error is the position in `order` of the
    /// first item that would end above `limit` units.
    fn place(
        &mut self,
        order: &[u32],
        strategy: PlacementStrategy,
        limit: u64,
        with_top_buffers: bool,
    ) -> Result<Vec<u64>, usize> {
        const UNPLACED: u64 = u64::MAX;
        let items = &self.problem.items;
        let mut offsets = vec![UNPLACED; items.len()];
        self.placed_buffers.clear();
        if let (true, Some(top_buffers)) = (with_top_buffers, &self.top_buffers) {
            let top = self.problem.max_load;
            // Between the top buffers, no other buffer may use the last unit: it could have too little rounding.
            let mut gap_start = 0;
            for &i in top_buffers {
                let Item { units, first, last, .. } = items[i];
                offsets[i] = top - units;
                self.placed_buffers.insert(Placed { offset: top - units, end: top, first, last });
                if gap_start < first {
                    self.placed_buffers.insert(Placed { offset: top - 1, end: top, first: gap_start, last: first - 1 });
                }
                gap_start = last + 1;
            }
            let ticks = self.problem.load.len() as u32;
            if gap_start < ticks {
                self.placed_buffers.insert(Placed { offset: top - 1, end: top, first: gap_start, last: ticks - 1 });
            }
        }
        for (position, &i) in order.iter().enumerate() {
            let (i, item) = (i as usize, &items[i as usize]);
            if offsets[i] != UNPLACED {
                continue;
            }
            if item.units == 0 {
                offsets[i] = 0;
                continue;
            }
            let at_top = self.problem.is_placed_at_top(item, strategy.top_placement);
            let offset = self
                .placed_buffers
                .find_offset(item, if at_top { Fit::Last { below: self.problem.max_load } } else { strategy.fit });
            let end = offset + item.units;
            if end > limit {
                return Err(position);
            }
            offsets[i] = offset;
            self.placed_buffers.insert(Placed { offset, end, first: item.first, last: item.last });
        }
        Ok(offsets)
    }

    /// Searches for a packing of fewer units until `effort` buffers are placed. The first buffer that exceeds the
    /// wanted height is placed earlier in the next attempt. The search restarts from the best order at regular
    /// intervals.
    fn improve(&mut self, effort: u64) {
        const RESTART_INTERVAL: u32 = 128;
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let Some(BestPacking { mut order, mut strategy, .. }) = self.best.clone() else { return };
        let mut spent = 0;
        let mut number = 0u32;
        while spent < effort && !self.is_at_max_load() {
            let best = self.best.as_ref().expect("the fixed orders have found a packing");
            number += 1;
            if number.is_multiple_of(RESTART_INTERVAL) {
                order.clone_from(&best.order);
                let fit = if (number / RESTART_INTERVAL).is_multiple_of(2) { best.strategy.fit } else { Fit::First };
                strategy = PlacementStrategy { fit, ..best.strategy };
            }
            match self.place(&order, strategy, best.height - 1, false) {
                Ok(offsets) => {
                    spent += order.len() as u64;
                    self.keep_if_better(&order, strategy, offsets);
                    self.try_with_top_buffers(&order, strategy);
                }
                Err(position) => {
                    spent += position as u64 + 1;
                    let to = random.below(position as u64 + 1) as usize;
                    order[to..=position].rotate_right(1);
                }
            }
        }
    }
}

/// An order in which buffers are placed.
#[derive(Clone, Copy)]
struct PlacementOrder {
    first_buffers: FirstBuffers,
    by: SortKey,
}

/// Choice of the buffers that an order places first: none, or those live at the peak, sorted in one of several ways.
/// Placed first, the buffers of the peak lie without gaps. In a training step these are the kept activations, those made
/// first and freed last at the bottom, and on top the tensors of the op at the peak.
#[derive(Clone, Copy)]
enum FirstBuffers {
    None,
    /// Buffers at the peak in the order of their start.
    PeakByStart,
    /// Buffers at the peak, from the latest end to the earliest.
    PeakByEnd,
    /// Small buffers at the peak (labels, row statistics) at the bottom, then the others at the peak, from the latest
    /// end to the earliest.
    SmallThenPeakByEnd,
}

/// The sort key of the buffers that [`FirstBuffers`] leaves. The buffer with the largest key is placed first.
#[derive(Clone, Copy)]
enum SortKey {
    Size,
    /// Size times lifetime.
    Area,
    /// Largest sum, over the ticks of the lifetime, of the sizes of all buffers that are live at the tick.
    Load,
    Lifetime,
    /// Start of the lifetime; here the earliest is placed first.
    Start,
}

impl PlacementOrder {
    const FIRST_BUFFERS: [FirstBuffers; 4] =
        [FirstBuffers::None, FirstBuffers::PeakByStart, FirstBuffers::PeakByEnd, FirstBuffers::SmallThenPeakByEnd];
    const SORT_KEYS: [SortKey; 5] = [SortKey::Size, SortKey::Area, SortKey::Load, SortKey::Lifetime, SortKey::Start];

    /// Returns all orders. Those that reach the lower bound most often come first.
    fn all() -> impl Iterator<Item = PlacementOrder> {
        Self::SORT_KEYS
            .into_iter()
            .flat_map(|by| Self::FIRST_BUFFERS.map(|first_buffers| PlacementOrder { first_buffers, by }))
    }

    /// Returns the indices of the items in this order.
    fn sort(self, problem: &PackingProblem) -> Vec<u32> {
        let loads = RangeMax::new(&problem.load);
        // Ties are broken by the buffer's properties; the input position decides only between equal buffers. So the
        // height of the packing does not depend on the order of the input.
        let ranked = |(item, i): (&Item, u32)| {
            let priority = Reverse(self.priority(item, problem, &loads));
            (priority, item.first, item.last, item.units, item.slack, i)
        };
        let mut ranked: Vec<_> = problem.items.iter().zip(0u32..).map(ranked).collect();
        ranked.sort_unstable();
        ranked.into_iter().map(|(.., i)| i).collect()
    }

    /// Returns the priority of an item: the item with the largest one is placed first. `loads` finds the most live
    /// units in a range of ticks.
    fn priority(self, item: &Item, problem: &PackingProblem, loads: &RangeMax) -> (u64, u64) {
        let lifetime = u64::from(item.last - item.first + 1);
        let is_small = item.units < problem.max_load / 4096;
        let at_peak = (item.first..=item.last).contains(&problem.peak());
        match (self.first_buffers, self.by) {
            (FirstBuffers::PeakByStart, _) if at_peak => (u64::MAX, u64::from(u32::MAX - item.first)),
            (FirstBuffers::SmallThenPeakByEnd, _) if at_peak && is_small => (u64::MAX, u64::MAX),
            (FirstBuffers::PeakByEnd | FirstBuffers::SmallThenPeakByEnd, _) if at_peak => {
                (u64::MAX, u64::from(item.last))
            }
            (_, SortKey::Size) => (item.units, lifetime),
            (_, SortKey::Area) => (item.units.saturating_mul(lifetime), item.units),
            (_, SortKey::Load) => (loads.largest(item.first, item.last), item.units),
            (_, SortKey::Start) => (u64::from(u32::MAX - item.first), item.units),
            (_, SortKey::Lifetime) => (lifetime, item.units),
        }
    }
}

/// Range maximum queries over a list: a sparse table of the maxima of all ranges with a power of two as length.
struct RangeMax(Vec<Vec<u64>>);

impl RangeMax {
    fn new(values: &[u64]) -> RangeMax {
        let mut levels = vec![values.to_vec()];
        let mut width = 1;
        while 2 * width <= values.len() {
            let below = levels.last().expect("at least the values");
            levels.push((0..=values.len() - 2 * width).map(|i| below[i].max(below[i + width])).collect());
            width *= 2;
        }
        RangeMax(levels)
    }

    /// Returns the largest value from index `first` to `last`, inclusive.
    fn largest(&self, first: u32, last: u32) -> u64 {
        let level = (last - first + 1).ilog2();
        let row = &self.0[level as usize];
        row[first as usize].max(row[last as usize + 1 - (1 << level)])
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014) with a fixed seed, so that a packing is a function of its input.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}
