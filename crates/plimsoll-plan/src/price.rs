//! What ops cost in time, from the rates that `plimsoll bench devices` measured.
//!
//! A product costs its operations at the rate measured for products of its size, attention its
//! operations and every other op its traffic at the rate measured for its kind, and each a fixed price
//! on top. A device on paper has only a product rate and a memory rate: there an op takes its products,
//! or its traffic, whichever is longer, and other arithmetic at a tenth of the product rate.
//!
//! Copies between device and host cost their bytes over the link, those of the scratch file what the disk takes,
//! collectives theirs over the link of the team; what the
//! host does, its traffic. Queues run beside each
//! other as far as the ops on them do not touch the same tensors: a Program's price is found by running it on a clock.

use plimsoll_core::{DType, HostSpec, Link, OpRates, Rates, Space};
use plimsoll_program::op::{Access, Collective, Exchange, Piece, Queue};
use plimsoll_program::{Block, Call, Mode, Op, OpKind, Program, ProgramSet, TensorId};
use std::collections::HashMap;

/// On paper, other arithmetic runs at this part of the product rate: vector units, no reuse of registers.
const OTHER_RATE: f64 = 0.1;

/// Predicted seconds of one op on the device.
fn op_seconds(set: &ProgramSet, op: &Op, rates: &Rates, precision: DType) -> f64 {
    let cost = op.cost();
    let product_rate = rates.product_flops(precision);
    let elements_of = |id: TensorId| set.tensor(id).elements();
    let dtype_of = |id: TensorId| set.tensor(id).dtype;
    let bytes = op.bytes_moved(&elements_of, &dtype_of) as f64;
    let (ops, timed) = rates.ops.of(precision);
    if let OpKind::Product { m, n, k, .. } = op.kind
        && let Some(rate) = product_rate_at(ops, [m, n, k])
    {
        let rate = if timed { rate } else { rate * product_rate / rates.f32_flops };
        return rates.op_seconds + cost.product_flops / rate;
    }
    if let Some(rate) = ops.others.get(op.name()) {
        let work = if cost.product_flops > 0.0 { cost.product_flops } else { bytes };
        return rates.op_seconds + work / rate;
    }
    let moved = bytes / rates.memory_bytes_per_second;
    let other = cost.other_flops / (rates.f32_flops * OTHER_RATE);
    let product = cost.product_flops / product_rate;
    rates.op_seconds + if product > 0.0 { product.max(moved) + other } else { moved.max(other) }
}

/// The rate of a product of this size: between the sizes that were timed, in proportion on
/// logarithmic scales; beyond them, that of the nearest.
fn product_rate_at(ops: &OpRates, size: [u64; 3]) -> Option<f64> {
    let sizes = &ops.product_sizes;
    if sizes.is_empty() || ops.product_flops.len() != sizes.len().pow(3) {
        return None;
    }
    // For each dimension the timed size below, and how far it is to the next.
    let place = |wanted: u64| {
        let wanted = wanted.clamp(sizes[0], sizes[sizes.len() - 1]);
        let below = sizes.iter().rposition(|&s| s <= wanted).expect("clamped to the first");
        match sizes.get(below + 1) {
            Some(&above) => {
                (below, (wanted as f64 / sizes[below] as f64).ln() / (above as f64 / sizes[below] as f64).ln())
            }
            None => (below, 0.0),
        }
    };
    let places = size.map(place);
    let mut log_rate = 0.0;
    for corner in 0..8usize {
        let (mut weight, mut at) = (1.0, 0);
        for (dimension, (below, part)) in places.iter().enumerate() {
            let up = corner >> dimension & 1;
            weight *= if up == 1 { *part } else { 1.0 - part };
            at = at * sizes.len() + (below + up).min(sizes.len() - 1);
        }
        log_rate += weight * ops.product_flops[at].ln();
    }
    Some(log_rate.exp())
}

/// What work costs on a device and its host.
#[derive(Clone, Copy, Debug)]
pub struct Prices<'a> {
    /// The device.
    pub rates: &'a Rates,
    /// The host.
    pub host: &'a HostSpec,
    /// The arithmetic.
    pub precision: DType,
    /// The slowest link of the team that the device works in.
    pub team_link: Link,
}

impl Prices<'_> {
    /// Predicted seconds that an op keeps its queue busy.
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
                let over_link =
                    set.tensor(from.tensor).space != Space::File && set.tensor(to.tensor).space != Space::File;
                let link = &self.rates.host_link;
                match over_link {
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

    /// Predicted seconds of one call of a Program: each queue takes its ops in order, and an op waits for those of
    /// other queues that touched the same tensor.
    /// `last` says that it is a step's last micro-batch, which sums over a team.
    pub fn program_seconds(&self, set: &ProgramSet, program: &Program, last: bool) -> f64 {
        let mut ops = program.blocks.iter().flat_map(|block| &block.ops).filter(|op| op.runs(last));
        if ops.all(|op| op.queue == Queue::Compute) {
            let block = |block: &Block| {
                let ops = block.ops.iter().filter(|op| op.runs(last));
                let once: f64 = ops.map(|op| self.op_seconds(set, op)).sum();
                once * f64::from(block.repeat)
            };
            return program.blocks.iter().map(block).sum();
        }
        let mut clock = Clock::new(set, program);
        for block in &program.blocks {
            let seconds: Vec<f64> = block.ops.iter().map(|op| self.op_seconds(set, op)).collect();
            if block.repeat > 1 && block.keeps_its_slots() && block.ops.iter().all(|op| op.queue == Queue::Compute) {
                // All iterations need the same of what others touch: one of them stands for all.
                for (op, seconds) in block.ops.iter().zip(&seconds) {
                    clock.run(set, op, block.first, seconds * f64::from(block.repeat));
                }
                continue;
            }
            for variable in block.variables() {
                for (op, seconds) in block.ops.iter().zip(&seconds).filter(|(op, _)| op.runs(last)) {
                    clock.run(set, op, variable, *seconds);
                }
            }
        }
        clock.queues.iter().copied().fold(0.0, f64::max)
    }

    /// Predicted seconds in which the device computes in one call of a Program: copies, the host and other devices left out.
    pub fn computing_seconds(&self, set: &ProgramSet, program: &Program) -> f64 {
        program.blocks.iter().map(|block| self.block_seconds(set, block)).sum()
    }

    /// The same of all repeats of a block.
    pub fn block_seconds(&self, set: &ProgramSet, block: &Block) -> f64 {
        self.sum_seconds(set, block, |op| op.queue == Queue::Compute)
    }

    /// Predicted seconds in which one call of a Program keeps the link of the team busy.
    pub fn exchange_seconds(&self, set: &ProgramSet, program: &Program) -> f64 {
        let exchanges = |op: &Op| matches!(op.kind, OpKind::CollectiveStart(_));
        program.blocks.iter().map(|block| self.sum_seconds(set, block, exchanges)).sum()
    }

    /// Predicted seconds of some ops of a block, added up.
    fn sum_seconds(&self, set: &ProgramSet, block: &Block, counts: impl Fn(&Op) -> bool) -> f64 {
        let ops = block.ops.iter().filter(|op| counts(op));
        ops.map(|op| self.op_seconds(set, op)).sum::<f64>() * f64::from(block.repeat)
    }

    /// Predicted seconds of a Schedule: each Program begins when the one before it is over.
    pub fn schedule_seconds(&self, set: &ProgramSet, calls: &[Call]) -> f64 {
        let mut known: HashMap<(&str, bool), f64> = HashMap::new();
        let mut sum = 0.0;
        for call in calls {
            sum += *known.entry((&call.program, call.last)).or_insert_with(|| {
                set.program(&call.program).map_or(0.0, |program| self.program_seconds(set, program, call.last))
            });
        }
        sum
    }
}

/// Bytes that a collective takes over the busiest link, one way: round a ring of equal links each rank's part passes all
/// others once, and a sum that everybody gets does so twice (Patarasuk and Yuan, 2009).
fn wire_bytes(set: &ProgramSet, exchange: &Exchange) -> f64 {
    let bytes = |piece: &Piece| {
        let total: u64 = piece.counts.iter().sum();
        let own = piece.counts[exchange.rank as usize];
        let least = piece.counts.iter().min().copied().unwrap_or(0);
        let ranks = piece.counts.len() as f64;
        let elements = match exchange.collective {
            Collective::AllReduce => 2.0 * total as f64 * (ranks - 1.0) / ranks,
            Collective::ReduceScatter | Collective::AllGather => (total - least) as f64,
            Collective::Send | Collective::Receive => own as f64,
        };
        elements * set.tensor(piece.input.tensor).dtype.bytes() as f64
    };
    exchange.pieces.iter().map(bytes).sum()
}

/// When a part of a slot was last written and read. Its first element tells it from others.
#[derive(Clone, Copy, Default)]
struct Touched {
    first: i64,
    written: f64,
    read: f64,
}

/// When each queue is free, and when what several of them touch was last written and read.
struct Clock {
    queues: [f64; 7],
    /// The number of the first slot of each tensor that others than the compute queue touch.
    shared: Vec<Option<usize>>,
    /// By the number of the slot.
    touched: Vec<Vec<Touched>>,
    /// What the present op touches of it: the slot, the part's place there, whether it is written.
    parts: Vec<(usize, usize, bool)>,
}

impl Clock {
    fn new(set: &ProgramSet, program: &Program) -> Clock {
        let (mut shared, mut slots) = (vec![None; set.tensors.len()], 0);
        let ops = program.blocks.iter().flat_map(|block| &block.ops).filter(|op| op.queue != Queue::Compute);
        for op in ops {
            op.each_access(&|_| 0, &mut |access| {
                let id = access.operand.tensor;
                shared[id.0 as usize].get_or_insert_with(|| {
                    slots += set.tensor(id).slots as usize;
                    slots - set.tensor(id).slots as usize
                });
            });
        }
        Clock { queues: [0.0; 7], shared, touched: vec![Vec::new(); slots], parts: Vec::new() }
    }

    fn run(&mut self, set: &ProgramSet, op: &Op, variable: i64, seconds: f64) {
        let Clock { queues, shared, touched, parts } = self;
        let queue = &mut queues[op.queue as usize];
        let mut ready = *queue;
        parts.clear();
        op.each_access(&|_| 0, &mut |Access { operand, mode, .. }| {
            let Some(first_slot) = shared[operand.tensor.0 as usize] else { return };
            let slot = first_slot + set.tensor(operand.tensor).slot(operand.slot.at(variable, 0)) as usize;
            let (first, writes) = (operand.offset.at(variable, 0), mode != Mode::Read);
            let known = touched[slot].iter().position(|part| part.first == first).unwrap_or_else(|| {
                touched[slot].push(Touched { first, ..Touched::default() });
                touched[slot].len() - 1
            });
            let part = touched[slot][known];
            ready = ready.max(part.written).max(if writes { part.read } else { 0.0 });
            parts.push((slot, known, writes));
        });
        *queue = ready + seconds;
        for &(slot, known, writes) in &*parts {
            let Touched { written, read, .. } = &mut touched[slot][known];
            let last = if writes { written } else { read };
            *last = last.max(*queue);
        }
    }
}

/// Operations in the matrix products of one micro-batch's forward and backward pass, recompute
/// left out: what the step must do. Its share of the measured peak is the distance to the limit.
pub fn needed_product_flops(set: &ProgramSet) -> f64 {
    let forward_once = |name: &str| -> f64 {
        set.program(name).map_or(0.0, |program| {
            program
                .blocks
                .iter()
                .map(|b| b.ops.iter().map(|op| op.cost().product_flops).sum::<f64>() * f64::from(b.repeat))
                .sum()
        })
    };
    let again = |name: &str| -> f64 {
        set.program(name).map_or(0.0, |program| {
            program
                .blocks
                .iter()
                .map(|b| {
                    let repeated = |op: &&Op| {
                        let elements_of = |id: TensorId| set.tensor(id).elements();
                        op.accesses(&elements_of).iter().any(|a| {
                            a.mode == plimsoll_program::Mode::Write
                                && set.tensor(a.operand.tensor).name.ends_with(".again")
                        })
                    };
                    b.ops.iter().filter(repeated).map(|op| op.cost().product_flops).sum::<f64>() * f64::from(b.repeat)
                })
                .sum()
        })
    };
    forward_once("forward") + forward_once("backward") - again("backward")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn product_rates_are_those_timed_and_lie_between_them_elsewhere() {
        let sizes = vec![16, 64, 256];
        // Each dimension has its own influence, so that none can be mistaken for another.
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
