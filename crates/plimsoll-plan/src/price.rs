//! Predicted seconds of ops, Programs and schedules.
//!
//! | op | predicted time |
//! |---|---|
//! | matrix product | operations at the rate measured for its size |
//! | attention | operations at the rate measured for attention |
//! | other op on a measured device | bytes moved at the rate measured for its kind |
//! | op on a paper device | the longer of operations and bytes moved; other arithmetic at a tenth of the matrix rate |
//! | copy between device and host | bytes over the host link |
//! | scratch file | bytes at the disk's rate |
//! | collective | bytes over the team link |
//! | op on the host | bytes moved at the host's memory bandwidth |
//!
//! Every op on the device also has a fixed overhead. The queues of a Program run concurrently, except for ops that
//! access the same tensors: `Clock` simulates them.

use plimsoll_core::{DType, HostSpec, Link, OpRates, Rates, Space};
use plimsoll_program::op::{Access, Exchange, ExchangeRange, Queue};
use plimsoll_program::passes::recompute::RECOMPUTED_SUFFIX;
use plimsoll_program::{Block, Mode, Op, OpKind, Program, ProgramKind, ProgramSet, TensorId};

/// Assumed rate of arithmetic outside matrix products, as a fraction of the f32 matrix rate, for ops without a measured
/// rate. Such arithmetic runs on vector units and reuses no registers.
const OTHER_ARITHMETIC_RATE: f64 = 0.1;

/// The Programs that run for each micro-batch of a step, in order. Only some runs have scores.
pub(crate) const MICRO_BATCH_PROGRAMS: [ProgramKind; 4] =
    [ProgramKind::Score, ProgramKind::Reference, ProgramKind::Forward, ProgramKind::Backward];

/// Predicts the seconds of one op on the device.
fn op_seconds(set: &ProgramSet, op: &Op, rates: &Rates, precision: DType) -> f64 {
    let cost = op.cost();
    let product_rate = rates.product_flops(precision);
    let elements_of = |id: TensorId| set.tensor(id).elements();
    let dtype_of = |id: TensorId| set.tensor(id).dtype;
    let bytes = op.bytes_moved(&elements_of, &dtype_of) as f64;
    let (ops, timed) = rates.ops.for_precision(precision);
    if let OpKind::Product { m, n, k, .. } = op.kind
        && let Some(rate) = product_rate_at(ops, [m, n, k])
    {
        let rate = if timed { rate } else { rate * product_rate / rates.f32_flops };
        return rates.op_seconds + cost.product_flops / rate;
    }
    if let Some(rate) = ops.other_ops.get(op.name()) {
        let work = if cost.product_flops > 0.0 { cost.product_flops } else { bytes };
        return rates.op_seconds + work / rate;
    }
    let moved = bytes / rates.memory_bytes_per_second;
    let other = cost.other_flops / (rates.f32_flops * OTHER_ARITHMETIC_RATE);
    let product = cost.product_flops / product_rate;
    rates.op_seconds + if product > 0.0 { product.max(moved) + other } else { moved.max(other) }
}

/// Interpolates the measured rate of a matrix product of size m × n × k, in operations per second. Between the timed
/// sizes the interpolation is linear on logarithmic scales. Outside of them, the rate of the nearest size applies.
/// Returns `None` without measurements.
fn product_rate_at(ops: &OpRates, size: [u64; 3]) -> Option<f64> {
    let sizes = &ops.product_sizes;
    if sizes.is_empty() || ops.product_flops.len() != sizes.len().pow(3) {
        return None;
    }
    let places = size.map(|wanted| locate(sizes, wanted));
    let mut log_rate = 0.0;
    for corner in 0..8usize {
        let (mut weight, mut at) = (1.0, 0);
        for (axis, (below, fraction)) in places.iter().enumerate() {
            let up = corner >> axis & 1;
            weight *= if up == 1 { *fraction } else { 1.0 - fraction };
            at = at * sizes.len() + (below + up).min(sizes.len() - 1);
        }
        log_rate += weight * ops.product_flops[at].ln();
    }
    Some(log_rate.exp())
}

/// Locates `wanted` in the ascending `sizes`. Returns the index of the last size that is at most `wanted`. Also returns
/// the position of `wanted` between this size (0) and the next (1) on a logarithmic scale. A `wanted` outside of the
/// sizes counts as the nearest size.
fn locate(sizes: &[u64], wanted: u64) -> (usize, f64) {
    let wanted = wanted.clamp(sizes[0], sizes[sizes.len() - 1]);
    let below = sizes.iter().rposition(|&size| size <= wanted).expect("clamped to the first");
    let ratio_to_below = |size: u64| (size as f64 / sizes[below] as f64).ln();
    (below, sizes.get(below + 1).map_or(0.0, |&above| ratio_to_below(wanted) / ratio_to_below(above)))
}

/// The rates of a device and its host, from which the seconds of their work are predicted.
#[derive(Clone, Copy, Debug)]
pub struct Prices<'a> {
    /// Rates of the device.
    pub rates: &'a Rates,
    /// The host of the device, with its scratch file.
    pub host: &'a HostSpec,
    /// Precision of the arithmetic.
    pub precision: DType,
    /// The slowest link of the device's team.
    pub team_link: Link,
}

impl Prices<'_> {
    /// Predicts the seconds in which an op keeps its queue busy; 0 for an op that waits for a copy or a collective.
    pub fn op_seconds(&self, set: &ProgramSet, op: &Op) -> f64 {
        match (&op.kind, op.queue) {
            (OpKind::TransferWait { .. } | OpKind::CollectiveWait(_), _) => 0.0,
            (OpKind::CollectiveStart(exchange), _) => {
                self.team_link.latency_seconds + wire_bytes(set, exchange) / self.team_link.bytes_per_second
            }
            (OpKind::TransferStart { from, elements, .. }, Queue::FileRead | Queue::FileWrite) => {
                let bytes = (elements * set.tensor(from.tensor).dtype.bytes()) as f64;
                let file = &self.host.file;
                let reads = op.queue == Queue::FileRead;
                bytes / if reads { file.read_bytes_per_second } else { file.write_bytes_per_second }
            }
            (OpKind::TransferStart { from, to, elements, .. }, _) => {
                let bytes = (elements * set.tensor(from.tensor).dtype.bytes()) as f64;
                let crosses_link =
                    set.tensor(from.tensor).space != Space::File && set.tensor(to.tensor).space != Space::File;
                let link = &self.rates.host_link;
                match crosses_link {
                    true => link.latency_seconds + bytes / link.bytes_per_second,
                    false => bytes / self.host.memory_bytes_per_second,
                }
            }
            (_, Queue::Host) => {
                let bytes = op.bytes_moved(&|id| set.tensor(id).elements(), &|id| set.tensor(id).dtype);
                bytes as f64 / self.host.memory_bytes_per_second
            }
            _ => op_seconds(set, op, self.rates, self.precision),
        }
    }

    /// Predicts the seconds of one call of a Program. Each queue runs its ops in order, and an op waits for ops of
    /// other queues that access the same tensor. `last` selects the last micro-batch of a step, in which data parallel
    /// workers also run the all-reduce.
    pub fn program_seconds(&self, set: &ProgramSet, program: &Program, last: bool) -> f64 {
        let mut ops = program.blocks.iter().flat_map(|block| &block.ops).filter(|op| op.runs(last));
        if ops.all(|op| op.queue == Queue::Compute) {
            let block = |block: &Block| {
                let ops = block.ops.iter().filter(|op| op.runs(last));
                let iteration: f64 = ops.map(|op| self.op_seconds(set, op)).sum();
                iteration * f64::from(block.repeat)
            };
            return program.blocks.iter().map(block).sum();
        }
        let mut clock = Clock::new(set, program);
        self.for_each_timed_op(set, program, last, &mut |op, variable, seconds| {
            let begin = clock.ready(set, op, variable);
            clock.end(op, begin + seconds);
        });
        clock.all_end()
    }

    /// Calls `visit` with each op that one call of a Program runs, in order, with the value of its block's variable and its
    /// predicted seconds. A block of compute ops only, whose iterations access the same slots, counts as one long iteration.
    /// `last` selects the last micro-batch of a step.
    fn for_each_timed_op<'p>(
        &self,
        set: &ProgramSet,
        program: &'p Program,
        last: bool,
        visit: &mut dyn FnMut(&'p Op, i64, f64),
    ) {
        for block in &program.blocks {
            let seconds: Vec<f64> = block.ops.iter().map(|op| self.op_seconds(set, op)).collect();
            if block.repeat > 1 && block.touches_fixed_slots() && block.ops.iter().all(|op| op.queue == Queue::Compute)
            {
                // All iterations access the same slots.
                for (op, seconds) in block.ops.iter().zip(&seconds) {
                    visit(op, block.first, seconds * f64::from(block.repeat));
                }
                continue;
            }
            for variable in block.variables() {
                for (op, seconds) in block.ops.iter().zip(&seconds).filter(|(op, _)| op.runs(last)) {
                    visit(op, variable, *seconds);
                }
            }
        }
    }

    /// Predicts the seconds of one call of each of these Programs, one after the other; one that `set` lacks takes no time.
    /// `last` selects the last micro-batch of a step.
    pub(crate) fn programs_seconds(&self, set: &ProgramSet, kinds: &[ProgramKind], last: bool) -> f64 {
        let programs = kinds.iter().filter_map(|kind| set.program(*kind));
        programs.map(|program| self.program_seconds(set, program, last)).sum()
    }

    /// Predicts the compute time of one call of a Program, without copies, host work and communication.
    pub fn compute_seconds(&self, set: &ProgramSet, program: &Program) -> f64 {
        program.blocks.iter().map(|block| self.block_seconds(set, block)).sum()
    }

    /// Predicts the compute time of all iterations of a block, without copies, host work and communication.
    pub fn block_seconds(&self, set: &ProgramSet, block: &Block) -> f64 {
        self.sum_seconds(set, block, |op| op.queue == Queue::Compute)
    }

    /// Predicts the seconds in which one call of a Program keeps the team link busy.
    pub fn exchange_seconds(&self, set: &ProgramSet, program: &Program) -> f64 {
        let exchanges = |op: &Op| matches!(op.kind, OpKind::CollectiveStart(_));
        program.blocks.iter().map(|block| self.sum_seconds(set, block, exchanges)).sum()
    }

    /// Sums the predicted seconds of the selected ops over all iterations of a block.
    fn sum_seconds(&self, set: &ProgramSet, block: &Block, is_selected: impl Fn(&Op) -> bool) -> f64 {
        let ops = block.ops.iter().filter(|op| is_selected(op));
        ops.map(|op| self.op_seconds(set, op)).sum::<f64>() * f64::from(block.repeat)
    }

    /// Predicts the seconds of a step of `micro_batches` micro-batches. Each Program begins when the previous one has
    /// ended; one that `set` lacks takes no time. `exchanges` says whether data parallel workers all-reduce
    /// gradients; that of the loss always runs.
    pub fn step_seconds(&self, set: &ProgramSet, micro_batches: u32, exchanges: bool) -> f64 {
        let StepPhases { passes, update } = self.step_phases(set, micro_batches, exchanges);
        passes + update
    }

    /// Predicts the seconds of a step like [`Prices::step_seconds`], by phase.
    pub fn step_phases(&self, set: &ProgramSet, micro_batches: u32, exchanges: bool) -> StepPhases {
        let seconds = |kinds: &[ProgramKind], last: bool| self.programs_seconds(set, kinds, last);
        let update = seconds(&[ProgramKind::BeginStep, ProgramKind::GradientNorm, ProgramKind::Update], exchanges);
        // A step may have millions of micro-batches, so they are not added up one by one.
        let passes = match micro_batches.checked_sub(1) {
            None => 0.0,
            Some(0) => seconds(&MICRO_BATCH_PROGRAMS, exchanges),
            Some(earlier) => {
                f64::from(earlier) * seconds(&MICRO_BATCH_PROGRAMS, false) + seconds(&MICRO_BATCH_PROGRAMS, exchanges)
            }
        };
        StepPhases { passes, update }
    }
}

/// Predicted seconds of the phases of a step on one device. The workers of a sharded team wait for each other between
/// the phases.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepPhases {
    /// Score, if there is one, forward and backward of all micro-batches.
    pub passes: f64,
    /// The work that is done once: the beginning of the step, gradient norm and update.
    pub update: f64,
}

/// Computes the bytes that an exchange (a collective, a send or a receive) moves over the busiest link in one
/// direction. A collective runs in a ring of equal links: each rank's part passes all other ranks once, in an
/// all-reduce twice (Patarasuk and Yuan, 2009).
fn wire_bytes(set: &ProgramSet, exchange: &Exchange) -> f64 {
    let bytes =
        |piece: &ExchangeRange| wire_elements(exchange, piece) * set.tensor(piece.input.tensor).dtype.bytes() as f64;
    exchange.pieces.iter().map(bytes).sum()
}

/// Computes the number of elements of one piece of an exchange that cross the busiest link in one direction.
fn wire_elements(exchange: &Exchange, piece: &ExchangeRange) -> f64 {
    let total: u64 = piece.counts.iter().sum();
    let own = piece.counts[exchange.rank as usize];
    let least = piece.counts.iter().min().copied().unwrap_or(0);
    let ranks = piece.counts.len() as f64;
    match exchange.collective {
        collective if collective.is_point_to_point() => own as f64,
        collective if collective.sums() && collective.gathers() => 2.0 * total as f64 * (ranks - 1.0) / ranks,
        _ => (total - least) as f64,
    }
}

/// A part of a slot, and the simulated seconds at which the last write and the last read of the part end. Parts are
/// identified by their first element.
#[derive(Clone, Copy, Default)]
struct SlotPart {
    first: i64,
    written: f64,
    read: f64,
}

/// An access of an op to a part of a slot.
#[derive(Clone, Copy)]
struct PartAccess {
    slot: usize,
    part: usize,
    writes: bool,
}

/// Number of queues of a device.
const QUEUES: usize = Queue::FileWrite as usize + 1;

/// A simulation of a Program's queues: the time at which each queue is free, and the last accesses to shared tensors.
struct Clock {
    queues: [f64; QUEUES],
    /// Index in `slots` of the first slot of each tensor; `None` for a tensor that only the compute queue accesses.
    shared: Vec<Option<usize>>,
    /// The accessed parts of each slot.
    slots: Vec<Vec<SlotPart>>,
    /// Accesses of the op that is being simulated, to tensors that several queues may access.
    accesses: Vec<PartAccess>,
}

impl Clock {
    fn new(set: &ProgramSet, program: &Program) -> Clock {
        let (mut shared, mut slots) = (vec![None; set.tensors.len()], 0);
        let ops = program.blocks.iter().flat_map(|block| &block.ops).filter(|op| op.queue != Queue::Compute);
        for op in ops {
            op.for_each_access(&|_| 0, &mut |access| {
                let id = access.operand.tensor;
                shared[id.0 as usize].get_or_insert_with(|| {
                    slots += set.tensor(id).slots as usize;
                    slots - set.tensor(id).slots as usize
                });
            });
        }
        Clock { queues: [0.0; QUEUES], shared, slots: vec![Vec::new(); slots], accesses: Vec::new() }
    }

    /// Returns the seconds at which an op can begin, in the iteration `variable` of its block: its queue is free, and ops that
    /// access the same parts have ended. [`Clock::end`] has to follow.
    fn ready(&mut self, set: &ProgramSet, op: &Op, variable: i64) -> f64 {
        let Clock { queues, shared, slots, accesses } = self;
        let mut ready = queues[op.queue as usize];
        accesses.clear();
        op.for_each_access(&|_| 0, &mut |Access { operand, mode, .. }| {
            let Some(first_slot) = shared[operand.tensor.0 as usize] else { return };
            let slot = first_slot + set.tensor(operand.tensor).slot(operand.slot.at(variable, 0)) as usize;
            let (first, writes) = (operand.offset.at(variable, 0), mode != Mode::Read);
            let part = slots[slot].iter().position(|part| part.first == first).unwrap_or_else(|| {
                slots[slot].push(SlotPart { first, ..SlotPart::default() });
                slots[slot].len() - 1
            });
            let SlotPart { written, read, .. } = slots[slot][part];
            ready = ready.max(written).max(if writes { read } else { 0.0 });
            accesses.push(PartAccess { slot, part, writes });
        });
        ready
    }

    /// Ends the op that was last asked about by [`Clock::ready`], after `seconds` from the begin of the Program.
    fn end(&mut self, op: &Op, seconds: f64) {
        self.queues[op.queue as usize] = seconds;
        for &PartAccess { slot, part, writes } in &self.accesses {
            let SlotPart { written, read, .. } = &mut self.slots[slot][part];
            let last = if writes { written } else { read };
            *last = last.max(seconds);
        }
    }

    /// Returns the seconds after which all queues are free.
    fn all_end(&self) -> f64 {
        self.queues.iter().copied().fold(0.0, f64::max)
    }
}

/// A data parallel rank, or a device that works alone.
pub struct Rank<'a> {
    /// The rates of the device.
    pub prices: Prices<'a>,
    /// The rank's Programs.
    pub set: &'a ProgramSet,
    /// Number of the rank's micro-batches in a step.
    pub micro_batches: u32,
}

impl Rank<'_> {
    /// Predicts the seconds of one call of each of these Programs, like [`Prices::programs_seconds`].
    fn seconds(&self, kinds: &[ProgramKind], last: bool) -> f64 {
        self.prices.programs_seconds(self.set, kinds, last)
    }

    /// Predicts the seconds from the begin of a step to the last backward pass.
    fn before_last_backward(&self) -> f64 {
        let earlier = f64::from(self.micro_batches - 1);
        let first = [ProgramKind::Score, ProgramKind::Reference, ProgramKind::BeginStep, ProgramKind::Forward];
        self.seconds(&first, true)
            + if earlier > 0.0 { earlier * self.seconds(&MICRO_BATCH_PROGRAMS, false) } else { 0.0 }
    }
}

/// The last backward pass of a rank in a simulation with the other ranks.
struct SimulatedBackward<'a> {
    set: &'a ProgramSet,
    clock: Clock,
    /// The ops that are left, last one first: each with its block's variable and its predicted seconds.
    left: Vec<(&'a Op, i64, f64)>,
    /// Seconds from the begin of the step to that of the pass.
    begin: f64,
}

impl<'a> SimulatedBackward<'a> {
    /// Returns the pass of a rank before its first op; `None` for a rank that computes nothing.
    fn of(rank: &Rank<'a>) -> Option<SimulatedBackward<'a>> {
        let backward = rank.set.program(ProgramKind::Backward).filter(|_| rank.micro_batches > 0)?;
        let mut left = Vec::new();
        rank.prices.for_each_timed_op(rank.set, backward, true, &mut |op, variable, seconds| {
            left.push((op, variable, seconds));
        });
        left.reverse();
        let (clock, begin) = (Clock::new(rank.set, backward), rank.before_last_backward());
        Some(SimulatedBackward { set: rank.set, clock, left, begin })
    }

    /// Runs the ops up to the next collective. Returns when the rank is ready for it, in seconds from the begin of the step,
    /// and how many seconds the collective takes; `None` if no collective is left.
    fn advance(&mut self) -> Option<(f64, f64)> {
        while let Some(&(op, variable, seconds)) = self.left.last() {
            let ready = self.clock.ready(self.set, op, variable);
            if matches!(op.kind, OpKind::CollectiveStart(_)) {
                return Some((self.begin + ready, seconds));
            }
            self.clock.end(op, ready + seconds);
            self.left.pop();
        }
        None
    }

    /// Ends the collective before which the rank waits, at these seconds from the begin of the step.
    fn end_collective(&mut self, seconds: f64) {
        if let Some((op, ..)) = self.left.pop() {
            self.clock.end(op, seconds - self.begin);
        }
    }
}

/// Predicts the seconds of a step on each data parallel rank. An all-reduce begins when all ranks have reached it. A rank that
/// reaches it first goes on with its backward pass, as far as it has buffers: offloaded gradients wait in a staging ring
/// until they are reduced.
pub fn data_parallel_seconds(ranks: &[Rank]) -> Vec<f64> {
    let passes: Option<Vec<SimulatedBackward>> = ranks.iter().map(SimulatedBackward::of).collect();
    let Some(mut passes) = passes.filter(|passes| passes.len() > 1) else {
        return ranks.iter().map(|rank| rank.prices.step_seconds(rank.set, rank.micro_batches, true)).collect();
    };
    loop {
        let waiting: Vec<Option<(f64, f64)>> = passes.iter_mut().map(SimulatedBackward::advance).collect();
        let reached = waiting.iter().flatten();
        let Some(end) = reached.map(|(ready, _)| *ready).reduce(f64::max) else { break };
        let end = end + waiting.iter().flatten().map(|(_, seconds)| *seconds).fold(0.0, f64::max);
        passes.iter_mut().zip(&waiting).filter(|(_, at)| at.is_some()).for_each(|(pass, _)| pass.end_collective(end));
    }
    // The gradient norm begins with an all-reduce of the loss, so it begins when all ranks have ended their passes.
    let passed = passes.iter().map(|pass| pass.begin + pass.clock.all_end()).fold(0.0, f64::max);
    let after = |rank: &Rank| rank.seconds(&[ProgramKind::GradientNorm, ProgramKind::Update], true);
    ranks.iter().map(|rank| passed + after(rank)).collect()
}

/// Computes the number of floating-point operations of the matrix products in the passes of one micro-batch, without
/// recompute. Divided by the time and the measured peak rate, this gives the utilization.
pub fn required_gemm_flops(set: &ProgramSet) -> f64 {
    let all = |kind: ProgramKind| gemm_flops(set, kind, |_| true);
    let recomputed = gemm_flops(set, ProgramKind::Backward, |op| is_recompute(set, op));
    MICRO_BATCH_PROGRAMS.into_iter().map(all).sum::<f64>() - recomputed
}

/// Sums the floating-point operations of the selected matrix products in one call of a Program; 0 if `set` lacks the
/// Program.
fn gemm_flops(set: &ProgramSet, kind: ProgramKind, is_selected: impl Fn(&Op) -> bool) -> f64 {
    let flops_of_block = |block: &Block| {
        let ops = block.ops.iter().filter(|op| is_selected(op));
        ops.map(|op| op.cost().product_flops).sum::<f64>() * f64::from(block.repeat)
    };
    set.program(kind).map_or(0.0, |program| program.blocks.iter().map(flops_of_block).sum())
}

/// Returns whether an op recomputes a value for the backward pass.
fn is_recompute(set: &ProgramSet, op: &Op) -> bool {
    let accesses = op.accesses(&|id: TensorId| set.tensor(id).elements());
    let mut written = accesses.iter().filter(|access| access.mode == Mode::Write);
    written.any(|access| set.tensor(access.operand.tensor).name.ends_with(RECOMPUTED_SUFFIX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn product_rates_interpolate_between_timed_sizes() {
        let sizes = vec![16, 64, 256];
        // Each axis has another exponent, so that a swap of axes is detected.
        let rate = |m: u64, n: u64, k: u64| 1e9 * (m as f64).powf(0.5) * (n as f64).powf(0.25) * (k as f64).powf(0.1);
        let cube = sizes.iter().flat_map(|&m| sizes.iter().flat_map(move |&n| [16, 64, 256].map(move |k| (m, n, k))));
        let ops = OpRates {
            product_flops: cube.map(|(m, n, k)| rate(m, n, k)).collect(),
            product_sizes: sizes,
            ..OpRates::default()
        };
        for (m, n, k) in [(16, 64, 256), (256, 16, 16), (100, 30, 70), (17, 255, 128)] {
            let found = product_rate_at(&ops, [m, n, k]).expect("there is a table");
            assert!((found / rate(m, n, k) - 1.0).abs() < 1e-9, "{m} × {n} × {k}: {found}");
        }
        let beyond = product_rate_at(&ops, [4, 4096, 64]).expect("there is a table");
        assert!((beyond / rate(16, 256, 64) - 1.0).abs() < 1e-9);
        assert_eq!(product_rate_at(&OpRates::default(), [1, 1, 1]), None);
    }
}
