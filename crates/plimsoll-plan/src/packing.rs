//! Where each tensor lies in the one arena of a space: offsets for buffers with known lifetimes, and the bound that no
//! packing can beat.
//!
//! What lives when is decided by the Program; which buffers stand in a fixed region instead is decided by the caller.
//! Here is only the puzzle that is left: rectangles of known height (bytes) and known place on the time axis, to be
//! stacked as low as they go (dynamic storage allocation; NP-hard, but kind to the traces of training steps).
//!
//! # The bound
//!
//! Offsets are multiples of the alignment, the end of the highest buffer is not: [`Packing::bytes`] is the byte just past
//! the last one used, the same number that a high-water mark measured in a running arena shows. At any moment the live
//! buffers stand on top of each other; each but the topmost takes its size rounded up to the alignment, and the topmost
//! its plain size. So a moment needs at least *the sum of the rounded sizes of all that lives, less the largest rounding
//! among them*, and [`lower_bound`] is the largest such need over time. It is a bound for every packing with aligned
//! offsets, and a packing that meets it has an overhead of exactly zero, last buffer included.
//!
//! # The method
//!
//! First-fit and best-fit over several orders, with the buffers of the fullest moment in front or not, with long-lived
//! ones hanging from the ceiling or not. The lowest result is kept, and the first that meets the bound ends the search. A
//! packing whose rounded top is as low as can be, but whose unrounded top is not, is tried again with buffers of much
//! rounding pinned to the top. What is still too high is improved: the buffers that stick out are placed earlier, again
//! and again, until a counted effort is spent. Nothing depends on a clock, on addresses or on hashing: equal input gives
//! equal offsets.

use std::cmp::Reverse;
use std::ops::RangeInclusive;

/// One tensor to be packed: its size and when it lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// Size, not rounded. A buffer of zero bytes takes no room and lies at offset 0.
    pub bytes: u64,
    /// The first moment (op number) at which its content matters.
    pub first: u32,
    /// The last such moment, inclusive: a buffer with `last == 7` may share bytes with one with `first == 8`.
    pub last: u32,
}

/// Offsets for a set of buffers, in the order in which they were given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packing {
    /// First byte of each buffer, a multiple of the alignment.
    pub offsets: Vec<u64>,
    /// The byte just past the last one used by any buffer; not rounded up.
    pub bytes: u64,
    /// What no packing of these buffers can beat; see [`lower_bound`].
    pub lower_bound: u64,
}

impl Packing {
    /// The share by which the packing exceeds the bound; 0 when it meets it.
    pub fn overhead(&self) -> f64 {
        if self.bytes == self.lower_bound { 0.0 } else { self.bytes as f64 / self.lower_bound as f64 - 1.0 }
    }
}

/// The smallest number of bytes that any packing with these aligned offsets can take: over all moments, the largest sum
/// of the rounded sizes of what lives, less the largest rounding among them. Linear in buffers and moments where op
/// numbers are dense.
///
/// # Panics
/// When a buffer ends before it begins, or `alignment` is 0: mistakes of the caller. The sum of all sizes must fit u64.
pub fn lower_bound(buffers: &[Buffer], alignment: u64) -> u64 {
    Puzzle::new(buffers, alignment).bound()
}

/// The effort of [`pack`]: about a second at 10,000 buffers, and only where no fixed order comes down to the bound but
/// for the rounding of the topmost buffer.
pub const EFFORT: u64 = 500_000;

/// Packs `buffers` at multiples of `alignment`, with [`EFFORT`].
///
/// # Panics
/// As [`lower_bound`].
pub fn pack(buffers: &[Buffer], alignment: u64) -> Packing {
    pack_with_effort(buffers, alignment, EFFORT)
}

/// Packs `buffers` at multiples of `alignment`. Where none of the fixed orders comes down to the bound, improvement goes
/// on until `effort` more buffers are placed, about a microsecond each. It is a count, so the result is the same on every
/// machine; 0 leaves it at the fixed orders.
///
/// # Panics
/// As [`lower_bound`].
pub fn pack_with_effort(buffers: &[Buffer], alignment: u64, effort: u64) -> Packing {
    let puzzle = Puzzle::new(buffers, alignment);
    let offsets = Search::new(&puzzle).run(effort);
    Packing {
        bytes: puzzle.bytes(&offsets),
        lower_bound: puzzle.bound(),
        offsets: offsets.iter().map(|offset| offset * alignment).collect(),
    }
}

/// A buffer in the terms of the search: sizes in units of the alignment, times in ticks.
#[derive(Clone, Copy)]
struct Item {
    units: u64,
    /// Bytes by which rounding to units exceeds the buffer's own size.
    slack: u64,
    first: u32,
    last: u32,
}

/// The buffers to pack and all that follows from them alone.
struct Puzzle {
    items: Vec<Item>,
    alignment: u64,
    /// Live units at each tick.
    load: Vec<u64>,
    /// The largest load: no packing has its rounded top below this.
    ceiling: u64,
    /// The ticks whose load is the ceiling, ascending.
    peaks: Vec<u32>,
    /// Bytes of rounding that can be saved at the top at every peak: what the bound lies below the ceiling.
    slack: u64,
}

impl Puzzle {
    fn new(buffers: &[Buffer], alignment: u64) -> Puzzle {
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
        let ceiling = load.iter().copied().max().unwrap_or(0);
        let peaks: Vec<u32> = (0..ticks as u32).filter(|&tick| load[tick as usize] == ceiling).collect();
        let slack = top_slack(&items, &peaks);
        Puzzle { items, alignment, load, ceiling, peaks, slack }
    }

    fn bound(&self) -> u64 {
        self.ceiling * self.alignment - self.slack
    }

    /// The byte just past the last one used, for offsets in units.
    fn bytes(&self, offsets: &[u64]) -> u64 {
        let ends =
            self.items.iter().zip(offsets).map(|(item, offset)| (offset + item.units) * self.alignment - item.slack);
        ends.max().unwrap_or(0)
    }

    /// The first moment of the largest load.
    fn peak(&self) -> u32 {
        self.peaks.first().copied().unwrap_or(0)
    }

    /// Whether `item` is one of those that hang from the ceiling.
    fn hangs(&self, item: &Item, hang: Hang) -> bool {
        let peak = self.peak();
        let long = item.last - item.first > self.load.len() as u32 / 16;
        long && match hang {
            Hang::Nothing => false,
            Hang::OffPeak => item.last < peak || peak < item.first,
            Hang::AfterPeak => peak.saturating_sub(item.first) < item.last.saturating_sub(peak) / 8,
        }
    }

    /// Buffers that, pinned under the ceiling, bring the top from the ceiling down to the bound: disjoint in time,
    /// together alive at every peak, each with enough rounding to save. `None` where there is nothing to save, or no
    /// such set is found.
    fn crown(&self) -> Option<Vec<usize>> {
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
        let mut crown: Vec<usize> = Vec::new();
        let mut free_from = 0;
        for &peak in &self.peaks {
            if peak < free_from {
                continue;
            }
            // The one that reaches furthest leaves the fewest to be found; of those the smallest is least in the way.
            let begun = std::iter::from_fn(|| candidates.next_if(|&i| self.items[i].first <= peak));
            let fitting = begun.filter(|&i| self.items[i].first >= free_from && self.items[i].last >= peak);
            let chosen = fitting.max_by_key(|&i| (self.items[i].last, Reverse(self.items[i].units)))?;
            free_from = self.items[chosen].last + 1;
            crown.push(chosen);
        }
        Some(crown)
    }
}

/// Lifetimes in ticks, and the number of ticks. Two lifetimes meet exactly if the later first is within the other, so
/// only firsts matter: sparse op numbers become ranks of firsts, dense ones stay as they are.
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

/// The smallest, over the peaks, of the largest slack that is alive there.
fn top_slack(items: &[Item], peaks: &[u32]) -> u64 {
    let alive_at = |item: &Item| {
        let from = peaks.partition_point(|&peak| peak < item.first);
        let to = peaks.partition_point(|&peak| peak <= item.last);
        (from < to).then_some((item.slack, from, to))
    };
    let mut candidates: Vec<_> = items.iter().filter(|item| item.slack > 0).filter_map(alive_at).collect();
    candidates.sort_unstable_by_key(|&(slack, ..)| Reverse(slack));
    // Painted in decreasing slack, each peak once: `next[p]` leads to the first peak from p on that has no slack yet.
    let mut next: Vec<usize> = (0..=peaks.len()).collect();
    let mut unpainted = peaks.len();
    for (slack, from, to) in candidates {
        let mut peak = root(&mut next, from);
        while peak < to {
            next[peak] = peak + 1;
            unpainted -= 1;
            peak = root(&mut next, peak);
        }
        if unpainted == 0 {
            return slack;
        }
    }
    0
}

fn root(next: &mut [usize], mut at: usize) -> usize {
    while next[at] != at {
        next[at] = next[next[at]];
        at = next[at];
    }
    at
}

/// Which of the gaps that a buffer fits into it takes.
#[derive(Clone, Copy)]
enum Fit {
    /// The lowest.
    First,
    /// The tightest, of equally tight ones the lowest.
    Best,
    /// The highest of those under this unit.
    Last { below: u64 },
}

/// A buffer that has its place.
#[derive(Clone, Copy)]
struct Placed {
    offset: u64,
    end: u64,
    first: u32,
    last: u32,
}

/// The placed buffers by rising offset, in windows of time: a buffer that lives for a few ops is fitted by looking at
/// the neighbours in its window, not at the whole step. Windows overlap by half, so that every short lifetime is inside
/// one of them; long lifetimes look at `all`.
struct Shelf {
    window_ticks: u32,
    windows: Vec<Vec<Placed>>,
    all: Vec<Placed>,
}

impl Shelf {
    fn new(ticks: usize) -> Shelf {
        let window_ticks = (ticks as u32 / 32).max(64);
        let windows = ticks.div_ceil(window_ticks as usize);
        Shelf { window_ticks, windows: vec![Vec::new(); windows], all: Vec::new() }
    }

    fn clear(&mut self) {
        self.windows.iter_mut().for_each(Vec::clear);
        self.all.clear();
    }

    /// Placed buffers by rising offset: at least all those that live together with `item`.
    fn near(&self, item: &Item) -> &[Placed] {
        let window = item.first / self.window_ticks;
        if item.last / self.window_ticks <= window + 1 { &self.windows[window as usize] } else { &self.all }
    }

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

    fn windows_of(&self, first: u32, last: u32) -> RangeInclusive<usize> {
        let from = (first / self.window_ticks).saturating_sub(1);
        from as usize..=(last / self.window_ticks) as usize
    }

    /// The unit at which `item` is to stand: in a gap between its neighbours, or on top of them where it fits into none.
    fn fit(&self, item: &Item, fit: Fit) -> u64 {
        let mut floor = 0;
        let mut chosen: Option<(u64, u64)> = None;
        for placed in self.near(item) {
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

/// Which long-lived buffers hang from the ceiling instead of standing on the floor. What is kept for the backward and
/// shrinks in it, and what is born there and stays (gradients), then need not fill each other's holes.
#[derive(Clone, Copy)]
enum Hang {
    Nothing,
    /// Those that do not live at the peak.
    OffPeak,
    /// Those whose life lies after the peak, or nearly so.
    AfterPeak,
}

/// How buffers are placed.
#[derive(Clone, Copy)]
struct Way {
    hang: Hang,
    fit: Fit,
}

impl Way {
    fn all() -> impl Iterator<Item = Way> {
        let hangs = [Hang::Nothing, Hang::OffPeak, Hang::AfterPeak];
        hangs.into_iter().flat_map(|hang| [Fit::First, Fit::Best].map(|fit| Way { hang, fit }))
    }
}

/// A packing found: offsets in units, and the order and way that led to them.
#[derive(Clone)]
struct Found {
    order: Vec<u32>,
    way: Way,
    offsets: Vec<u64>,
    /// The highest rounded end, in units.
    height: u64,
    bytes: u64,
}

/// The search for the lowest packing.
struct Search<'a> {
    puzzle: &'a Puzzle,
    shelf: Shelf,
    crown: Option<Vec<usize>>,
    best: Option<Found>,
}

impl<'a> Search<'a> {
    fn new(puzzle: &'a Puzzle) -> Search<'a> {
        Search { puzzle, shelf: Shelf::new(puzzle.load.len()), crown: puzzle.crown(), best: None }
    }

    fn run(mut self, effort: u64) -> Vec<u64> {
        for order in Order::all() {
            let order = order.sort(self.puzzle);
            for way in Way::all() {
                self.consider(&order, way);
                if self.at_bound() {
                    return self.best.expect("a packing at the bound").offsets;
                }
            }
        }
        self.improve(effort);
        self.best.map(|best| best.offsets).unwrap_or_default()
    }

    fn at_bound(&self) -> bool {
        self.best.as_ref().is_some_and(|best| best.bytes == self.puzzle.bound())
    }

    fn at_ceiling(&self) -> bool {
        self.best.as_ref().is_some_and(|best| best.height == self.puzzle.ceiling)
    }

    /// Packs in this order and keeps the result if it is better than the best.
    fn consider(&mut self, order: &[u32], way: Way) {
        if !self.at_ceiling() {
            let limit = self.best.as_ref().map_or(u64::MAX, |best| best.height - 1);
            if let Ok(offsets) = self.place(order, way, limit, false) {
                self.keep(order, way, offsets);
            }
        }
        self.consider_crowned(order, way);
    }

    /// Under what gets down to the ceiling a crown is tried, for the bytes between ceiling and bound.
    fn consider_crowned(&mut self, order: &[u32], way: Way) {
        if self.at_ceiling()
            && !self.at_bound()
            && self.crown.is_some()
            && let Ok(offsets) = self.place(order, way, self.puzzle.ceiling, true)
        {
            self.keep(order, way, offsets);
        }
    }

    fn keep(&mut self, order: &[u32], way: Way, offsets: Vec<u64>) {
        let bytes = self.puzzle.bytes(&offsets);
        if self.best.as_ref().is_none_or(|best| bytes < best.bytes) {
            let height = self.puzzle.items.iter().zip(&offsets).map(|(item, offset)| offset + item.units).max();
            self.best = Some(Found { order: order.to_vec(), way, offsets, height: height.unwrap_or(0), bytes });
        }
    }

    /// Places the items one by one. The error is the position in `order` of the first that would end above `limit`.
    fn place(&mut self, order: &[u32], way: Way, limit: u64, crowned: bool) -> Result<Vec<u64>, usize> {
        const UNPLACED: u64 = u64::MAX;
        let items = &self.puzzle.items;
        let mut offsets = vec![UNPLACED; items.len()];
        self.shelf.clear();
        if let (true, Some(crown)) = (crowned, &self.crown) {
            let top = self.puzzle.ceiling;
            // Between the members of the crown nothing may use the last unit: it could have too little rounding.
            let mut lid_from = 0;
            for &i in crown {
                let Item { units, first, last, .. } = items[i];
                offsets[i] = top - units;
                self.shelf.insert(Placed { offset: top - units, end: top, first, last });
                if lid_from < first {
                    self.shelf.insert(Placed { offset: top - 1, end: top, first: lid_from, last: first - 1 });
                }
                lid_from = last + 1;
            }
            let ticks = self.puzzle.load.len() as u32;
            if lid_from < ticks {
                self.shelf.insert(Placed { offset: top - 1, end: top, first: lid_from, last: ticks - 1 });
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
            let hangs = self.puzzle.hangs(item, way.hang);
            let offset = self.shelf.fit(item, if hangs { Fit::Last { below: self.puzzle.ceiling } } else { way.fit });
            let end = offset + item.units;
            if end > limit {
                return Err(position);
            }
            offsets[i] = offset;
            self.shelf.insert(Placed { offset, end, first: item.first, last: item.last });
        }
        Ok(offsets)
    }

    /// Packs on for a lower rounded top until `effort` buffers are placed: the first buffer that sticks out above what is wanted
    /// is placed earlier the next time. From time to time the walk goes back to the best order.
    fn improve(&mut self, effort: u64) {
        const WALK: u32 = 128;
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let Some(Found { mut order, mut way, .. }) = self.best.clone() else { return };
        let mut spent = 0;
        let mut number = 0u32;
        while spent < effort && !self.at_ceiling() {
            let best = self.best.as_ref().expect("the fixed orders found one");
            number += 1;
            if number.is_multiple_of(WALK) {
                order.clone_from(&best.order);
                let fit = if (number / WALK).is_multiple_of(2) { best.way.fit } else { Fit::First };
                way = Way { fit, ..best.way };
            }
            match self.place(&order, way, best.height - 1, false) {
                Ok(offsets) => {
                    spent += order.len() as u64;
                    self.keep(&order, way, offsets);
                    self.consider_crowned(&order, way);
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

/// An order in which buffers are placed: those that live at the peak in front or not, the others by a measure.
#[derive(Clone, Copy)]
struct Order {
    front: Front,
    by: Measure,
}

/// What comes before all else: the buffers that live at the peak. There they stand without a gap, and all others have to
/// get by with what that core leaves. In a training step it is the stack of kept activations, the first made and last
/// freed at the bottom, with the peak's own work on top of it.
#[derive(Clone, Copy)]
enum Front {
    Nothing,
    /// In the order in which they begin.
    PeakByFirst,
    /// The last to end before the others.
    PeakByLast,
    /// The same, but all that is small at the bottom, where it is out of the way (labels, row statistics).
    SmallThenPeakByLast,
}

/// What a buffer is ranked by, largest before others.
#[derive(Clone, Copy)]
enum Measure {
    Size,
    /// Size times lifetime.
    Area,
    /// The most that lives at any time of its life.
    Load,
    Lifetime,
    /// How early it begins.
    Start,
}

impl Order {
    const FRONTS: [Front; 4] = [Front::Nothing, Front::PeakByFirst, Front::PeakByLast, Front::SmallThenPeakByLast];
    const MEASURES: [Measure; 5] = [Measure::Size, Measure::Area, Measure::Load, Measure::Lifetime, Measure::Start];

    /// All orders, those first that most often lead down to the bound.
    fn all() -> impl Iterator<Item = Order> {
        Self::MEASURES.into_iter().flat_map(|by| Self::FRONTS.map(|front| Order { front, by }))
    }

    fn sort(self, puzzle: &Puzzle) -> Vec<u32> {
        let lifetime = |item: &Item| u64::from(item.last - item.first + 1);
        let peak = puzzle.peak();
        let small = puzzle.ceiling / 4096;
        let loads = RangeMax::new(&puzzle.load);
        let key = |item: &Item| -> (u64, u64) {
            let at_peak = (item.first..=item.last).contains(&peak);
            match (self.front, self.by) {
                (Front::PeakByFirst, _) if at_peak => (u64::MAX, u64::from(u32::MAX - item.first)),
                (Front::SmallThenPeakByLast, _) if at_peak && item.units < small => (u64::MAX, u64::MAX),
                (Front::PeakByLast | Front::SmallThenPeakByLast, _) if at_peak => (u64::MAX, u64::from(item.last)),
                (_, Measure::Size) => (item.units, lifetime(item)),
                (_, Measure::Area) => (item.units.saturating_mul(lifetime(item)), item.units),
                (_, Measure::Load) => (loads.largest(item.first, item.last), item.units),
                (_, Measure::Start) => (u64::from(u32::MAX - item.first), item.units),
                (_, Measure::Lifetime) => (lifetime(item), item.units),
            }
        };
        // Ties are broken by what a buffer is, by where it was given only between equals: the height that comes out does
        // not depend on the order of the input.
        let ranked = |(item, i): (&Item, u32)| (Reverse(key(item)), item.first, item.last, item.units, item.slack, i);
        let mut ranked: Vec<_> = puzzle.items.iter().zip(0u32..).map(ranked).collect();
        ranked.sort_unstable();
        ranked.into_iter().map(|(.., i)| i).collect()
    }
}

/// The largest of any range of a list, from the largest of all ranges whose length is a power of two.
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

    fn largest(&self, first: u32, last: u32) -> u64 {
        let level = (last - first + 1).ilog2();
        let row = &self.0[level as usize];
        row[first as usize].max(row[last as usize + 1 - (1 << level)])
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014): a fixed stream, so that a packing is a function of its input.
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
