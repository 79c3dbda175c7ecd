//! What only the inside of the device shows: waits that are missing, time that is kept, queues that stop.

use super::clock::LAG_MOST as LAG;
use super::*;
use crate::device::{NoFiles, Unobserved};
use crate::transport::Transport;
use crate::transport::memory::Memory;
use plimsoll_core::{Category, WorkName};
use plimsoll_program::builder::Builder;
use plimsoll_program::op::{Collective, Exchange, Piece};
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Block, Index, Lifetime, Operand, Tensor};
use std::io;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const PIECE: u64 = 1000;

/// Eight pieces of f32 on the device and eight on the host.
struct Pieces {
    builder: Builder,
    device: TensorId,
    host: TensorId,
}

impl Pieces {
    fn new() -> Pieces {
        let mut builder = Builder::new(DType::F32, Kernels::Cpu { threads: 1 });
        let mut tensor = |name: &str, space| {
            builder.tensor(Tensor {
                name: name.into(),
                shape: vec![8 * PIECE],
                dtype: DType::F32,
                space,
                category: Category::Weight,
                lifetime: Lifetime::Persistent,
                slots: 1,
            })
        };
        let (device, host) = (tensor("device", Space::Device), tensor("host", Space::Host));
        Pieces { builder, device, host }
    }

    fn at(&self, tensor: TensorId, piece: i64) -> Operand {
        Operand::whole(tensor).from(Index::fixed(piece * PIECE as i64))
    }

    /// Adds piece `x` on the device to another one.
    fn add(&self, x: i64, into: i64) -> Op {
        OpKind::Add { x: self.at(self.device, x), into: self.at(self.device, into), elements: PIECE }.into()
    }

    fn copy(&self, into_device: bool, from: i64, to: i64) -> Op {
        let (source, target) = if into_device { (self.host, self.device) } else { (self.device, self.host) };
        let (from, to) = (self.at(source, from), self.at(target, to));
        let queue = if into_device { Queue::CopyIn } else { Queue::CopyOut };
        Op { kind: OpKind::TransferStart { from, to, elements: PIECE, sequence: 0 }, queue }
    }

    fn open(self, ops: Vec<Op>, op_seconds: f64, latency_seconds: f64) -> VirtualDevice {
        let mut set = self.builder.set;
        let blocks = vec![Block::once("all", ops)];
        let (inputs, outputs) = (vec![], vec![]);
        set.programs.push(Program { work: WorkName::Forward, name: "p".into(), inputs, outputs, blocks });
        let bytes = 8 * PIECE * 4;
        let offsets = vec![vec![Some(0)]; 2];
        let placement = Placement { offsets, arena_bytes: bytes, host_bytes: bytes, file_bytes: 0 };
        let what = Virtual {
            name: "virtual:test".into(),
            arena_budget: Bytes(bytes),
            threads: 1,
            price: Box::new(move |_, _| op_seconds),
            link: Link { bytes_per_second: 1e9, latency_seconds },
            scratch: None,
        };
        VirtualDevice::open(what, set, placement, DType::F32).unwrap()
    }
}

fn numbers(device: &mut VirtualDevice, tensor: u32) -> Vec<f32> {
    let mut values = vec![0f32; 8 * PIECE as usize];
    device.read(TensorId(tensor), 0, bytemuck::cast_slice_mut(&mut values));
    values
}

/// What both tensors hold after the Program, piece by piece.
fn result(device: &mut VirtualDevice) -> [Vec<f32>; 2] {
    for (tensor, first) in [(0, 0.0), (1, 100.0)] {
        let values: Vec<f32> = (0..8 * PIECE).map(|i| first + (i / PIECE) as f32).collect();
        device.write(TensorId(tensor), 0, bytemuck::cast_slice(&values));
    }
    device.run("p").unwrap();
    [0, 1].map(|tensor| numbers(device, tensor).iter().step_by(PIECE as usize).copied().collect())
}

/// Whether a Program gives wrong bytes when its waits are taken away, and right ones with them. The machine may be slow
/// enough to hide a race now and then, so it has a few tries.
fn race_shows(ops: impl Fn(&Pieces) -> Vec<Op>, op_seconds: f64, latency_seconds: f64) {
    let open = || {
        let pieces = Pieces::new();
        let ops = ops(&pieces);
        pieces.open(ops, op_seconds, latency_seconds)
    };
    let mut in_turn = open();
    in_turn.programs[0].queues.truncate(1);
    let expected = result(&mut in_turn);
    let mut whole = open();
    assert!(!whole.programs[0].waits.is_empty());
    assert_eq!(result(&mut whole), expected);
    let caught = (0..20).any(|_| {
        let mut broken = open();
        broken.programs[0].waits.clear();
        result(&mut broken) != expected
    });
    assert!(caught, "nobody would notice a missing wait");
}

#[test]
fn reading_before_a_copy_has_come_gives_wrong_bytes() {
    race_shows(|p| vec![p.copy(true, 3, 0), p.add(0, 1)], 0.0, 0.02);
}

#[test]
fn overwriting_what_is_still_read_gives_wrong_bytes() {
    race_shows(|p| vec![p.add(4, 5), p.add(0, 1), p.copy(true, 3, 0)], 0.02, 0.0);
}

#[test]
fn copying_out_what_is_not_computed_yet_gives_wrong_bytes() {
    race_shows(|p| vec![p.add(4, 5), p.add(2, 1), p.copy(false, 1, 6)], 0.02, 0.0);
}

#[test]
fn overwriting_what_is_still_copied_out_gives_wrong_bytes() {
    race_shows(|p| vec![p.copy(false, 1, 6), p.add(2, 1)], 0.0, 0.02);
}

#[test]
fn nothing_takes_less_than_its_price() {
    let pieces = Pieces::new();
    let ops = (0..20).map(|_| pieces.add(0, 1)).collect();
    let mut device = pieces.open(ops, 0.005, 0.0);
    let start = Instant::now();
    device.run("p").unwrap();
    device.run("p").unwrap();
    // 200 ms, less what may be caught up.
    assert!(start.elapsed().as_secs_f64() > 0.175, "{:?}", start.elapsed());
    // Copies of 1.4 MB, by a link of 1 GB/s and a latency of 10 ms each.
    let pieces = Pieces::new();
    let ops = (0..20).map(|_| pieces.copy(true, 0, 1)).collect();
    let mut device = pieces.open(ops, 0.0, 0.01);
    let start = Instant::now();
    device.run("p").unwrap();
    assert!(start.elapsed().as_secs_f64() > 0.175, "{:?}", start.elapsed());
}

#[test]
fn queues_that_do_not_wait_for_each_other_overlap_in_the_plan() {
    let pieces = Pieces::new();
    let computing = (0..10).map(|_| pieces.add(0, 1));
    let ops: Vec<Op> = computing.chain((2..6).map(|to| pieces.copy(true, 0, to))).collect();
    let mut device = pieces.open(ops, 0.01, 0.02);
    device.run("p").unwrap();
    // The plan alone, whatever the machine was busy with: 100 ms of ops beside 80 ms of copies.
    let planned = device.clock.planned();
    assert!((0.08..0.101).contains(&planned), "{planned}");
}

#[test]
fn what_is_slowed_down_takes_as_many_times_as_long_and_computes_all_that_time() {
    let pieces = Pieces::new();
    let ops = (0..10).map(|_| pieces.add(0, 1)).chain([pieces.copy(true, 0, 2)]).collect();
    let mut device = pieces.open(ops, 0.01, 0.0);
    for (factor, seconds) in [(1.0, 0.1), (3.0, 0.3)] {
        assert!(device.slow_down(factor));
        let (begin, before) = (device.clock.begin(), device.computed().unwrap());
        device.run("p").unwrap();
        let (planned, computed) = (device.clock.planned() - begin, device.computed().unwrap() - before);
        assert!(planned > seconds - 1e-9 && computed > seconds - 1e-9, "{planned} {computed}");
    }
}

#[test]
fn more_than_the_device_has_is_refused() {
    let pieces = Pieces::new();
    let ops = vec![pieces.add(0, 1)];
    let mut device = pieces.open(ops, 0.0, 0.0);
    let (set, mut placement) = (device.set.clone(), device.placement.clone());
    placement.arena_bytes += 64;
    let refused = device.adopt(set, placement).unwrap_err();
    assert!(refused.to_string().contains("virtual:test") && refused.to_string().contains("simulated"), "{refused}");
    assert!(refused.is_refusal());
    device.run("p").unwrap();
}

/// A device that adds `before` times, then sums piece 0 over a team of two, which takes a tenth of a second.
fn seated(rank: u32, before: usize, transport: &Arc<Memory>) -> VirtualDevice {
    let pieces = Pieces::new();
    let at = pieces.at(pieces.device, 0);
    let piece = Piece { input: at, output: at, counts: vec![PIECE - 300, 300] };
    let (collective, sequence) = (Collective::AllReduce, Index::fixed(1));
    let exchange = Exchange { collective, pieces: vec![piece], rank, peer: None, sequence, last: false };
    let on_wire = |kind| Op { kind, queue: Queue::Communication };
    let mut ops: Vec<Op> = (0..before).map(|_| pieces.add(1, 0)).collect();
    ops.push(on_wire(OpKind::CollectiveStart(exchange.clone())));
    ops.push(on_wire(OpKind::CollectiveWait(exchange)));
    ops.push(pieces.add(0, 2));
    let mut device = pieces.open(ops, 0.0, 0.0);
    device.what.price = Box::new(|_, op| if op.queue == Queue::Communication { 0.1 } else { 0.01 });
    device.programs = prepare(&device.what, &device.set, &device.placement);
    device.join(Seat { rank, transport: transport.clone(), nccl: false }).unwrap();
    device
}

/// Ends the process where a test waits for ever.
struct Watchdog(#[expect(dead_code, reason = "it is dropped")] mpsc::Sender<()>);

fn watchdog() -> Watchdog {
    let (alive, seen) = mpsc::channel();
    std::thread::spawn(move || {
        if seen.recv_timeout(Duration::from_secs(300)) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("a device waits for ever");
            std::process::abort();
        }
    });
    Watchdog(alive)
}

#[test]
fn a_collective_takes_the_links_time_after_the_slowest_is_ready() {
    let _watchdog = watchdog();
    let transport = Memory::between(2);
    let mut devices = [seated(0, 1, &transport), seated(1, 20, &transport)];
    let begin = devices.iter().map(|device| device.clock.begin()).fold(0.0, f64::max);
    let begin = begin.max(devices.iter().map(|device| device.clock.planned()).fold(0.0, f64::max));
    std::thread::scope(|scope| {
        for device in &mut devices {
            scope.spawn(|| {
                let values: Vec<f32> = (0..8 * PIECE).map(|i| (i / PIECE) as f32).collect();
                device.write(TensorId(0), 0, bytemuck::cast_slice(&values));
                device.run("p").unwrap();
            });
        }
    });
    // 200 ms until the slower one is ready, 100 ms on the wire, and then one op: the plan alone, in the time of both.
    let ends = devices.each_ref().map(|device| device.clock.planned());
    assert_eq!(ends[0], ends[1]);
    assert!(ends[0] > begin - LAG + 0.31 - 1e-9, "{} {begin}", ends[0]);
    // Waiting for the slower one, and for the wire, is no computing.
    let computed = devices.each_mut().map(|device| device.computed().unwrap());
    assert!(computed[0] > 0.02 - 1e-9 && computed[1] > 0.21 - 1e-9 && computed[0] < 0.5 * computed[1], "{computed:?}");
    // Piece 0 had 0 and became 1 and 20: everybody has the sum, in both parts, and has added it to piece 2.
    for device in &mut devices {
        let values = numbers(device, 0);
        assert!(values[..PIECE as usize].iter().all(|&value| value == 21.0));
        assert!(values[2 * PIECE as usize..3 * PIECE as usize].iter().all(|&value| value == 23.0));
    }
}

#[test]
fn a_device_that_fails_leaves_nobody_waiting_for_its_collective() {
    let _watchdog = watchdog();
    let transport = Memory::between(2);
    let mut devices = [seated(0, 1, &transport), seated(1, 1, &transport)];
    let [one, other] = &mut devices;
    let waits = std::thread::scope(|scope| {
        let waits = scope.spawn(|| one.run("p"));
        let fails = other.run("no such program");
        assert!(matches!(fails, Err(DeviceError::NoProgram { .. })));
        waits.join().unwrap()
    });
    assert!(matches!(waits, Err(DeviceError::Peer { rank: 1, .. })), "{waits:?}");
    // Who comes later hears of it, too, until it is cleared.
    assert!(matches!(one.run("p"), Err(DeviceError::Peer { .. })));
    transport.clear();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| one.run("p"));
        other.run("p").unwrap();
        first.join().unwrap().unwrap();
    });
}

/// Files that cannot be read.
struct Broken;

impl FileSpace for Broken {
    fn read(&mut self, _: &str, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::Error::other("broken"))
    }

    fn write(&mut self, _: &str, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::Error::other("broken"))
    }
}

#[test]
fn a_queue_that_fails_stops_those_that_wait_for_it() {
    let mut pieces = Pieces::new();
    let like = pieces.builder.set.tensor(pieces.host).clone();
    let file = pieces.builder.tensor(Tensor { name: "file".into(), space: Space::File, ..like });
    let (from, to) = (pieces.at(file, 0), pieces.at(pieces.device, 0));
    let from_file = Op { kind: OpKind::TransferStart { from, to, elements: PIECE, sequence: 0 }, queue: Queue::CopyIn };
    let ops = vec![from_file, pieces.add(0, 1), pieces.copy(false, 1, 2)];
    let mut device = pieces.open(ops, 0.0, 0.0);
    let failed = device.run_observed(Call::of("p"), &mut Broken, &mut Unobserved);
    assert!(matches!(failed, Err(DeviceError::File { .. })), "{failed:?}");
    // And it can be used again.
    let failed = device.run_observed(Call { from: 2, ..Call::of("p") }, &mut NoFiles, &mut Unobserved);
    assert!(failed.is_ok(), "{failed:?}");
}
