//! The memory of a device over one step: a few moments, each with the op that runs and the bytes by category.
//!
//! The moments follow from the lifetimes of `lifetimes` and the offsets of `layout`. Each is the fullest moment of a part
//! of the work, so the peak of each kind of work is among them, except of re-planning, which runs no ops. A plan has one
//! timeline, computed once it is chosen.

use crate::layout::Layout;
use crate::lifetimes::{Lifetimes, ProgramTicks, lifetimes};
use crate::memory_use::PhaseMemory;
use plimsoll_core::{Bytes, Category, Space, TimelinePoint, WorkKind};
use plimsoll_program::{Access, Block, Mode, Op, Placement, Program, ProgramKind, ProgramSet, Tensor};
use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

/// Most points of a timeline.
pub const MAX_POINTS: usize = 32;

/// Name of the blocks that compute a transformer layer.
const LAYER: &str = "layer";

/// The place of a Program in a step.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    BeforeStep,
    Score,
    Begin,
    Forward,
    Backward,
    Norm,
    Update,
    AfterStep,
    Generation,
    Files,
}

impl Place {
    fn of(kind: ProgramKind) -> Place {
        match kind {
            ProgramKind::Load
            | ProgramKind::InitOptimizer
            | ProgramKind::Restore
            | ProgramKind::ReloadWeights
            | ProgramKind::Merge => Place::BeforeStep,
            ProgramKind::Score | ProgramKind::Reference => Place::Score,
            ProgramKind::BeginStep => Place::Begin,
            ProgramKind::Forward => Place::Forward,
            ProgramKind::Backward => Place::Backward,
            ProgramKind::GradientNorm => Place::Norm,
            ProgramKind::Update => Place::Update,
            ProgramKind::Evaluate | ProgramKind::Probe(_) => Place::AfterStep,
            ProgramKind::Prefill | ProgramKind::CopyPrefix | ProgramKind::Decode => Place::Generation,
            ProgramKind::Save | ProgramKind::Checkpoint => Place::Files,
        }
    }

    /// Returns the number of points of the Programs at this place. Those of all places together are at most
    /// [`MAX_POINTS`].
    fn points(self) -> PointCounts {
        match self {
            Place::Forward => PointCounts { before_layers: 1, layers: 8, after_layers: 1 },
            Place::Backward => PointCounts { before_layers: 2, layers: 9, after_layers: 1 },
            Place::Update => PointCounts { before_layers: 3, layers: 0, after_layers: 0 },
            _ => PointCounts::ONE,
        }
    }
}

/// The number of points before, within and after the layers of a Program. A Program without layers is before them.
#[derive(Clone, Copy, PartialEq, Eq)]
struct PointCounts {
    before_layers: u32,
    layers: u32,
    after_layers: u32,
}

impl PointCounts {
    /// One point, which all Programs of the same place and kind of work share.
    const ONE: PointCounts = PointCounts { before_layers: 1, layers: 0, after_layers: 0 };
}

/// A moment of a phase: the index of the phase, the Program that runs, and its tick.
#[derive(Clone, Copy)]
struct Moment {
    phase: usize,
    program: usize,
    first: u32,
    tick: u32,
    bytes: u64,
}

/// A phase with its lifetimes and bytes in use.
struct MeasuredPhase {
    lifetimes: Lifetimes,
    memory: PhaseMemory,
}

/// Computes the timeline of the device's arena. `layers` are the layers of the model that the device computes. Returns
/// nothing for Programs without phases, which never run.
pub(crate) fn timeline(set: &ProgramSet, layout: &Layout, layers: Range<u64>) -> Vec<TimelinePoint> {
    let measure = |phase| {
        let lifetimes = lifetimes(set, phase, Space::Device);
        let memory = PhaseMemory::new(&lifetimes, top(&lifetimes, layout));
        MeasuredPhase { lifetimes, memory }
    };
    let phases: Vec<MeasuredPhase> = set.phases.iter().map(measure).collect();
    let mut places: BTreeMap<(Place, WorkKind), Vec<Moment>> = BTreeMap::new();
    for (number, phase) in phases.iter().enumerate() {
        for ticks in phase.lifetimes.programs.iter().filter(|ticks| ticks.first <= ticks.last) {
            let place = Place::of(set.programs[ticks.program].kind);
            let moments = places.entry((place, ticks.work)).or_default();
            for range in ranges(&set.programs[ticks.program], ticks, place.points()) {
                let tick = phase.memory.fullest_tick_between(*range.start(), *range.end());
                let bytes = phase.memory.at(tick);
                moments.push(Moment { phase: number, program: ticks.program, first: ticks.first, tick, bytes });
            }
        }
    }
    leave_out_begin(&mut places);
    let mut points = Vec::new();
    for ((place, work), moments) in places {
        let kept = if place.points() == PointCounts::ONE { fullest(&moments).into_iter().collect() } else { moments };
        points.extend(kept.into_iter().map(|moment| {
            let MeasuredPhase { lifetimes, memory } = &phases[moment.phase];
            let by_category = memory.by_category(set, Space::Device, lifetimes, moment.tick);
            point(set, work, moment, by_category, &layers)
        }));
    }
    debug_assert!(points.len() <= MAX_POINTS, "{} points", points.len());
    points
}

/// Leaves out the begin of the step, which belongs to the update but comes before the forward pass, unless it has the
/// peak of the update.
fn leave_out_begin(places: &mut BTreeMap<(Place, WorkKind), Vec<Moment>>) {
    let most = |places: &BTreeMap<(Place, WorkKind), Vec<Moment>>, begins: bool, work: WorkKind| {
        let of_work = places.iter().filter(|(key, _)| (key.0 == Place::Begin) == begins && key.1 == work);
        of_work.flat_map(|(_, moments)| moments).map(|moment| moment.bytes).max()
    };
    let works: Vec<WorkKind> = places.keys().filter(|key| key.0 == Place::Begin).map(|key| key.1).collect();
    for work in works {
        if most(places, true, work) <= most(places, false, work) {
            places.remove(&(Place::Begin, work));
        }
    }
}

/// Returns the end of the highest buffer of a phase on the device, in bytes; without buffers, that of the persistent
/// tensors.
fn top(lifetimes: &Lifetimes, layout: &Layout) -> u64 {
    let Placement { offsets, .. } = &layout.placement;
    let ends = lifetimes.buffers.iter().zip(&lifetimes.slots).map(|(buffer, slots)| {
        let (tensor, slot) = slots[0];
        offsets[tensor.0 as usize][slot as usize].unwrap_or(0) + buffer.bytes
    });
    ends.max().unwrap_or(layout.device.persistent_bytes)
}

/// Divides the ticks of a Program into ranges, each of which becomes a point.
fn ranges(program: &Program, ticks: &ProgramTicks, counts: PointCounts) -> Vec<RangeInclusive<u32>> {
    let ProgramTicks { first, last, .. } = *ticks;
    let layers = layer_ops(&program.blocks).filter(|_| counts.layers > 0);
    // Tick `first` is that of the first op, but tick 0 is that of the host. In tick `last` a Program may run no op.
    let at = |number: u32| (first.max(1) + number).min(last);
    let is_last_op = |end: u32| end >= program.op_count() as u32;
    let end_of = |layers: &Range<u32>| if is_last_op(layers.end) { last + 1 } else { at(layers.end) };
    let (begin, end) = layers.map_or((last + 1, last + 1), |layers| (at(layers.start), end_of(&layers)));
    let before = (begin > first).then(|| parts(first, begin - 1, counts.before_layers));
    let within = (end > begin).then(|| parts(begin, end - 1, counts.layers));
    let after = (end <= last).then(|| parts(end, last, counts.after_layers.max(1)));
    before.into_iter().flatten().chain(within.into_iter().flatten()).chain(after.into_iter().flatten()).collect()
}

/// Returns the numbers of the ops from the first to the last layer of a Program; `None` for a Program without layers.
fn layer_ops(blocks: &[Block]) -> Option<Range<u32>> {
    let (mut count, mut found) = (0, None::<Range<u32>>);
    for block in blocks {
        let end = count + block.ops.len() as u32 * block.repeat;
        if block.name == LAYER {
            found = Some(found.map_or(count, |layers| layers.start)..end);
        }
        count = end;
    }
    found
}

/// Divides the ticks from `first` to `last` into at most `count` ranges of about the same length.
fn parts(first: u32, last: u32, count: u32) -> impl Iterator<Item = RangeInclusive<u32>> {
    let ticks = u64::from(last - first) + 1;
    let count = u64::from(count).min(ticks);
    let start = move |part: u64| first + (part * ticks / count) as u32;
    (0..count).map(move |part| start(part)..=start(part + 1) - 1)
}

/// Returns the first moment with the most bytes.
fn fullest(moments: &[Moment]) -> Option<Moment> {
    moments.iter().copied().reduce(|best, moment| if moment.bytes > best.bytes { moment } else { best })
}

/// Describes a moment: the op that runs, with its block and layer.
fn point(
    set: &ProgramSet,
    work: WorkKind,
    moment: Moment,
    by_category: BTreeMap<Category, Bytes>,
    layers: &Range<u64>,
) -> TimelinePoint {
    let program = &set.programs[moment.program];
    // Tick `first` is that of the first op, but tick 0 is that of the host.
    let number = i64::from(moment.tick) - i64::from(moment.first.max(1));
    let running = usize::try_from(number).ok().and_then(|number| op_at(&program.blocks, number));
    TimelinePoint {
        work,
        part: running.map(|running| running.block.name.clone()),
        layer: running.and_then(|running| layer(running, layers)),
        op: running.map(|running| running.op.name().to_owned()),
        tensor: running.and_then(|running| subject(set, running.op)),
        bytes: Bytes(moment.bytes),
        by_category,
    }
}

/// An op of a Program in one iteration of its block.
#[derive(Clone, Copy)]
struct RunningOp<'s> {
    block: &'s Block,
    /// Value of the block's variable.
    variable: i64,
    op: &'s Op,
}

/// Returns the op with this number in the order in which the ops of a Program run; `None` after the last.
fn op_at(blocks: &[Block], mut number: usize) -> Option<RunningOp<'_>> {
    for block in blocks {
        let count = block.ops.len() * block.repeat as usize;
        if number < count {
            let iteration = (number / block.ops.len()) as i64;
            let (variable, op) = (block.first + block.step * iteration, &block.ops[number % block.ops.len()]);
            return Some(RunningOp { block, variable, op });
        }
        number -= count;
    }
    None
}

/// Returns the layer of the model that an op belongs to, counted from 0; `None` outside the layers. The variable of a
/// block of layers is the layer's number, counted from the first layer of the device.
fn layer(running: RunningOp, layers: &Range<u64>) -> Option<u32> {
    let RunningOp { block, variable, .. } = running;
    let own = u64::try_from(variable).ok().filter(|_| block.name == LAYER)?;
    u32::try_from(layers.start + own).ok().filter(|layer| u64::from(*layer) < layers.end)
}

/// Returns the name of the tensor that tells most about an op: the weight that it reads, else the gradient or optimizer
/// state that it touches, else its first operand that is written. A gathered or staged copy has the name of its tensor.
fn subject(set: &ProgramSet, op: &Op) -> Option<String> {
    let accesses = op.accesses(&|tensor| set.tensor(tensor).elements());
    let of = |category: Category| {
        let is_copy = |tensor: &Tensor, name: &str| tensor.category == category && tensor.name == name;
        let is_of = |name: &&str| set.tensors.iter().any(|tensor| is_copy(tensor, name));
        accesses.iter().map(|access| original_name(&set.tensor(access.operand.tensor).name)).find(is_of)
    };
    let is_written = |access: &&Access| access.mode != Mode::Read;
    let written = || accesses.iter().find(is_written).map(|access| &*set.tensor(access.operand.tensor).name);
    let named = of(Category::Weight).or_else(|| of(Category::Gradient)).or_else(|| of(Category::Optimizer));
    named.or_else(|| written().map(original_name)).map(str::to_owned)
}

/// Returns the name of the tensor from which a gathered or staged copy is named; other names as they are.
fn original_name(name: &str) -> &str {
    let name = name.split_once(".ring.").map_or(name, |(_, name)| name);
    let name = match name.strip_suffix(".gathered") {
        Some(name) => name.split_once('.').map_or(name, |(_, name)| name),
        None => name,
    };
    name.strip_suffix(".host").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_divided_without_gaps() {
        for (first, last, count) in [(0, 0, 10), (3, 9, 3), (5, 104, 12), (7, 11, 12)] {
            let parts: Vec<_> = parts(first, last, count).collect();
            let all: Vec<u32> = parts.iter().cloned().flatten().collect();
            assert_eq!(all, (first..=last).collect::<Vec<_>>(), "{parts:?}");
            assert!(parts.len() <= count as usize && parts.iter().all(|part| !part.is_empty()));
        }
    }
}
