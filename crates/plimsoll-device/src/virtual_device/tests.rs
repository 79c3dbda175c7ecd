//! Behaviour visible only inside the device: missing waits, simulated time and stopped queues.

use super::clock::MAX_LAG_SECONDS;
use super::*;
use crate::device::{NoFiles, NoObserver};
use crate::transport::Transport;
use crate::transport::in_process::InProcessTransport;
use plimsoll_core::{Category, WorkKind};
use plimsoll_program::ProgramKind;
use plimsoll_program::builder::Builder;
use plimsoll_program::op::{Collective, Exchange, ExchangeRange};
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Block, Index, Lifetime, Operand, Tensor};
use std::io;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const PIECE_ELEMENTS: u64 = 1000;

/// Builds Programs over one tensor on the device and one on the host, of eight f32 pieces each.
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
                shape: vec![8 * PIECE_ELEMENTS],
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
        Operand::whole(tensor).starting_at(Index::fixed(piece * PIECE_ELEMENTS as i64))
    }

    /// Returns an op that adds piece `x` on the device to piece `into`.
    fn add(&self, x: i64, into: i64) -> Op {
        OpKind::Add { x: self.at(self.device, x), into: self.at(self.device, into), elements: PIECE_ELEMENTS }.into()
    }

    fn copy(&self, into_device: bool, from: i64, to: i64) -> Op {
        let (source, target) = if into_device { (self.host, self.device) } else { (self.device, self.host) };
        let (from, to) = (self.at(source, from), self.at(target, to));
        let queue = if into_device { Queue::CopyIn } else { Queue::CopyOut };
        Op { kind: OpKind::TransferStart { from, to, elements: PIECE_ELEMENTS, sequence: 0 }, queue }
    }

    fn open(self, ops: Vec<Op>, op_seconds: f64, latency_seconds: f64) -> VirtualDevice {
        let mut set = self.builder.set;
        let blocks = vec![Block::once("all", ops)];
        let (inputs, outputs) = (vec![], vec![]);
        set.programs.push(Program { work: WorkKind::Forward, kind: ProgramKind::Probe(0), inputs, outputs, blocks });
        let bytes = 8 * PIECE_ELEMENTS * 4;
        let offsets = vec![vec![Some(0)]; 2];
        let placement = Placement { offsets, arena_bytes: bytes, host_bytes: bytes, file_bytes: 0 };
        let spec = VirtualDeviceSpec {
            name: "virtual:test".into(),
            arena_budget: Bytes(bytes),
            threads: 1,
            price: Box::new(move |_, _| op_seconds),
            link: Link { bytes_per_second: 1e9, latency_seconds },
            scratch_folder: None,
        };
        VirtualDevice::open(spec, set, placement, DType::F32).unwrap()
    }
}

fn values_of(device: &mut VirtualDevice, tensor: u32) -> Vec<f32> {
    let mut values = vec![0f32; 8 * PIECE_ELEMENTS as usize];
    device.read(TensorId(tensor), 0, bytemuck::cast_slice_mut(&mut values));
    values
}

/// Runs the Program on known inputs and returns the first value of each piece, for both tensors.
fn result(device: &mut VirtualDevice) -> [Vec<f32>; 2] {
    for (tensor, first) in [(0, 0.0), (1, 100.0)] {
        let values: Vec<f32> = (0..8 * PIECE_ELEMENTS).map(|i| first + (i / PIECE_ELEMENTS) as f32).collect();
        device.write(TensorId(tensor), 0, bytemuck::cast_slice(&values));
    }
    device.run(ProgramKind::Probe(0)).unwrap();
    [0, 1].map(|tensor| values_of(device, tensor).iter().step_by(PIECE_ELEMENTS as usize).copied().collect())
}

/// Checks that a Program gives wrong bytes without its waits and right ones with them. A slow machine may hide a race
/// now and then, so there are several tries.
fn assert_race_detected(ops: impl Fn(&Pieces) -> Vec<Op>, op_seconds: f64, latency_seconds: f64) {
    let open = || {
        let pieces = Pieces::new();
        let ops = ops(&pieces);
        pieces.open(ops, op_seconds, latency_seconds)
    };
    let mut serialized = open();
    serialized.programs[0].queues.truncate(1);
    let expected = result(&mut serialized);
    let mut threaded = open();
    assert!(!threaded.programs[0].waits.is_empty());
    assert_eq!(result(&mut threaded), expected);
    let caught = (0..20).any(|_| {
        let mut broken = open();
        broken.programs[0].waits.clear();
        result(&mut broken) != expected
    });
    assert!(caught, "a missing wait goes unnoticed");
}

#[test]
fn missing_wait_before_a_read_is_detected() {
    assert_race_detected(|p| vec![p.copy(true, 3, 0), p.add(0, 1)], 0.0, 0.02);
}

#[test]
fn missing_wait_before_an_overwrite_is_detected() {
    assert_race_detected(|p| vec![p.add(4, 5), p.add(0, 1), p.copy(true, 3, 0)], 0.02, 0.0);
}

#[test]
fn missing_wait_before_a_copy_out_is_detected() {
    assert_race_detected(|p| vec![p.add(4, 5), p.add(2, 1), p.copy(false, 1, 6)], 0.02, 0.0);
}

#[test]
fn missing_wait_after_a_copy_out_is_detected() {
    assert_race_detected(|p| vec![p.copy(false, 1, 6), p.add(2, 1)], 0.0, 0.02);
}

#[test]
fn ops_take_at_least_their_price() {
    let pieces = Pieces::new();
    let ops = (0..20).map(|_| pieces.add(0, 1)).collect();
    let mut device = pieces.open(ops, 0.005, 0.0);
    let start = Instant::now();
    device.run(ProgramKind::Probe(0)).unwrap();
    device.run(ProgramKind::Probe(0)).unwrap();
    // 200 ms, minus the permitted lag.
    assert!(start.elapsed().as_secs_f64() > 0.175, "{:?}", start.elapsed());
    // Small copies over a link with a latency of 10 ms each.
    let pieces = Pieces::new();
    let ops = (0..20).map(|_| pieces.copy(true, 0, 1)).collect();
    let mut device = pieces.open(ops, 0.0, 0.01);
    let start = Instant::now();
    device.run(ProgramKind::Probe(0)).unwrap();
    assert!(start.elapsed().as_secs_f64() > 0.175, "{:?}", start.elapsed());
}

#[test]
fn independent_queues_overlap() {
    let pieces = Pieces::new();
    let computing = (0..10).map(|_| pieces.add(0, 1));
    let ops: Vec<Op> = computing.chain((2..6).map(|to| pieces.copy(true, 0, to))).collect();
    let mut device = pieces.open(ops, 0.01, 0.02);
    device.run(ProgramKind::Probe(0)).unwrap();
    // Only the planned time counts, not the load of this machine: 100 ms of ops overlap 80 ms of copies.
    let planned = device.clock.planned_end();
    assert!((0.08..0.101).contains(&planned), "{planned}");
}

#[test]
fn slowdown_multiplies_compute_time() {
    let pieces = Pieces::new();
    let ops = (0..10).map(|_| pieces.add(0, 1)).chain([pieces.copy(true, 0, 2)]).collect();
    let mut device = pieces.open(ops, 0.01, 0.0);
    for (factor, seconds) in [(1.0, 0.1), (3.0, 0.3)] {
        assert!(device.set_compute_slowdown(factor));
        let (begin, before) = (device.clock.next_start(), device.compute_seconds().unwrap());
        device.run(ProgramKind::Probe(0)).unwrap();
        let (planned, computed) = (device.clock.planned_end() - begin, device.compute_seconds().unwrap() - before);
        assert!(planned > seconds - 1e-9 && computed > seconds - 1e-9, "{planned} {computed}");
    }
}

#[test]
fn plan_beyond_the_load_line_is_refused() {
    let pieces = Pieces::new();
    let ops = vec![pieces.add(0, 1)];
    let mut device = pieces.open(ops, 0.0, 0.0);
    let (set, mut placement) = (device.set.clone(), device.placement.clone());
    placement.arena_bytes += 64;
    let refused = device.adopt(set, placement).unwrap_err();
    assert!(refused.to_string().contains("virtual:test") && refused.to_string().contains("simulated"), "{refused}");
    assert!(refused.is_out_of_memory());
    device.run(ProgramKind::Probe(0)).unwrap();
}

/// Opens a device of a group of two. Its Program runs `before` additions, then an all-reduce of piece 0 that takes 0.1
/// s.
fn open_in_group(rank: u32, before: usize, transport: &Arc<InProcessTransport>) -> VirtualDevice {
    let pieces = Pieces::new();
    let at = pieces.at(pieces.device, 0);
    let piece = ExchangeRange { input: at, output: at, counts: vec![PIECE_ELEMENTS - 300, 300] };
    let (collective, sequence) = (Collective::AllReduce, Index::fixed(1));
    let exchange = Exchange { collective, pieces: vec![piece], rank, peer: None, sequence, last: false };
    let communication_op = |kind| Op { kind, queue: Queue::Communication };
    let mut ops: Vec<Op> = (0..before).map(|_| pieces.add(1, 0)).collect();
    ops.push(communication_op(OpKind::CollectiveStart(exchange.clone())));
    ops.push(communication_op(OpKind::CollectiveWait(exchange)));
    ops.push(pieces.add(0, 2));
    let mut device = pieces.open(ops, 0.0, 0.0);
    device.spec.price = Box::new(|_, op| if op.queue == Queue::Communication { 0.1 } else { 0.01 });
    device.programs = prepare(&device.spec, &device.set, &device.placement);
    device.join_group(GroupHandle { rank, transport: transport.clone(), nccl: false }).unwrap();
    device
}

/// Aborts the process if a test hangs.
struct Watchdog(#[expect(dead_code, reason = "it is dropped")] mpsc::Sender<()>);

fn watchdog() -> Watchdog {
    let (alive, seen) = mpsc::channel();
    std::thread::spawn(move || {
        if seen.recv_timeout(Duration::from_secs(300)) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("a device hangs");
            std::process::abort();
        }
    });
    Watchdog(alive)
}

#[test]
fn collective_starts_when_the_slowest_rank_is_ready() {
    let _watchdog = watchdog();
    let transport = InProcessTransport::new_group(2);
    let mut devices = [open_in_group(0, 1, &transport), open_in_group(1, 20, &transport)];
    let begin = devices.iter().map(|device| device.clock.next_start()).fold(0.0, f64::max);
    let begin = begin.max(devices.iter().map(|device| device.clock.planned_end()).fold(0.0, f64::max));
    std::thread::scope(|scope| {
        for device in &mut devices {
            scope.spawn(|| {
                let values: Vec<f32> = (0..8 * PIECE_ELEMENTS).map(|i| (i / PIECE_ELEMENTS) as f32).collect();
                device.write(TensorId(0), 0, bytemuck::cast_slice(&values));
                device.run(ProgramKind::Probe(0)).unwrap();
            });
        }
    });
    // The slower device is ready after 200 ms, the all-reduce takes 100 ms, then one op runs; in planned time.
    let ends = devices.each_ref().map(|device| device.clock.planned_end());
    assert_eq!(ends[0], ends[1]);
    assert!(ends[0] > begin - MAX_LAG_SECONDS + 0.31 - 1e-9, "{} {begin}", ends[0]);
    // Waits for the slower device and the transfer do not count as computing.
    let computed = devices.each_mut().map(|device| device.compute_seconds().unwrap());
    assert!(computed[0] > 0.02 - 1e-9 && computed[1] > 0.21 - 1e-9 && computed[0] < 0.5 * computed[1], "{computed:?}");
    // Piece 0 was 0 and became 1 and 20. Both devices have the sum in all parts, and added it to piece 2.
    for device in &mut devices {
        let values = values_of(device, 0);
        assert!(values[..PIECE_ELEMENTS as usize].iter().all(|&value| value == 21.0));
        assert!(values[2 * PIECE_ELEMENTS as usize..3 * PIECE_ELEMENTS as usize].iter().all(|&value| value == 23.0));
    }
}

#[test]
fn failed_device_aborts_the_collective() {
    let _watchdog = watchdog();
    let transport = InProcessTransport::new_group(2);
    let mut devices = [open_in_group(0, 1, &transport), open_in_group(1, 1, &transport)];
    let [one, other] = &mut devices;
    let waits = std::thread::scope(|scope| {
        let waits = scope.spawn(|| one.run(ProgramKind::Probe(0)));
        let fails = other.run(ProgramKind::Probe(1));
        assert!(matches!(fails, Err(DeviceError::UnknownProgram { .. })));
        waits.join().unwrap()
    });
    assert!(matches!(waits, Err(DeviceError::PeerAborted { rank: 1, .. })), "{waits:?}");
    // Later calls fail as well, until the group is reset.
    assert!(matches!(one.run(ProgramKind::Probe(0)), Err(DeviceError::PeerAborted { .. })));
    transport.reset();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| one.run(ProgramKind::Probe(0)));
        other.run(ProgramKind::Probe(0)).unwrap();
        first.join().unwrap().unwrap();
    });
}

/// A file space in which every access fails.
struct BrokenFiles;

impl FileSpace for BrokenFiles {
    fn read(&mut self, _: &str, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::Error::other("broken"))
    }

    fn write(&mut self, _: &str, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::Error::other("broken"))
    }
}

#[test]
fn failed_queue_stops_the_others() {
    let mut pieces = Pieces::new();
    let host_tensor = pieces.builder.set.tensor(pieces.host).clone();
    let file = pieces.builder.tensor(Tensor { name: "file".into(), space: Space::File, ..host_tensor });
    let (from, to) = (pieces.at(file, 0), pieces.at(pieces.device, 0));
    let from_file =
        Op { kind: OpKind::TransferStart { from, to, elements: PIECE_ELEMENTS, sequence: 0 }, queue: Queue::CopyIn };
    let ops = vec![from_file, pieces.add(0, 1), pieces.copy(false, 1, 2)];
    let mut device = pieces.open(ops, 0.0, 0.0);
    let failed = device.run_observed(ProgramCall::of(ProgramKind::Probe(0)), &mut BrokenFiles, &mut NoObserver);
    assert!(matches!(failed, Err(DeviceError::File { .. })), "{failed:?}");
    // The device remains usable.
    let failed = device.run_observed(
        ProgramCall { first_op: 2, ..ProgramCall::of(ProgramKind::Probe(0)) },
        &mut NoFiles,
        &mut NoObserver,
    );
    assert!(failed.is_ok(), "{failed:?}");
}
