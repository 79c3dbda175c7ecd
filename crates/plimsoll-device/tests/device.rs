//! One test body for every device. The same Programs give the same bytes on all of them, in whatever order their queues run. A
//! failure at any op leaves exactly the results of the ops before it. Another plan keeps the persistent tensors. The stand-in
//! for a GPU, which runs on the CPU, is tested as well if a C++ compiler is available.

mod cuda_stand_in;

use plimsoll_core::{Bytes, Category, DType, Link, Space, WorkKind};
use plimsoll_device::cpu::executor;
use plimsoll_device::device::{Device, FileSpace, Memory, NoFiles, NoObserver, Observer, ProgramCall};
use plimsoll_device::error::DeviceError;
use plimsoll_device::virtual_device::{self, VirtualDeviceSpec};
use plimsoll_program::ProgramKind;
use plimsoll_program::op::Queue;
use plimsoll_program::{Block, Index, Lifetime, Op, OpKind, Operand, Placement, Program, ProgramSet, Tensor, TensorId};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

/// Elements of a piece.
const PIECE: i64 = 64;
/// Pieces of a tensor.
const PIECES: i64 = 6;

const DEVICE: TensorId = TensorId(0);
const HOST: TensorId = TensorId(1);
const FILE: TensorId = TensorId(2);
/// Tensor in the scratch file.
const SCRATCH: TensorId = TensorId(3);

/// An op on pieces `x` and `to`: (number of its kind, x, to).
type Draw = (u8, i64, i64);

fn op(&(kind, x, to): &Draw, sequence: u64) -> Op {
    let at = |tensor, piece: i64| Operand::whole(tensor).starting_at(Index::fixed(piece * PIECE));
    let elements = PIECE as u64;
    let add = |tensor| OpKind::Add {
        x: at(tensor, x),
        into: at(tensor, if x == to { (to + 1) % PIECES } else { to }),
        elements,
    };
    let copy = |from, target| OpKind::TransferStart { from: at(from, x), to: at(target, to), elements, sequence };
    match kind {
        0 | 1 => Op { kind: add(DEVICE), queue: Queue::Compute },
        2 => Op { kind: OpKind::Fill { into: at(DEVICE, to), value: x as f64 + 0.5, elements }, queue: Queue::Compute },
        3 => Op { kind: add(HOST), queue: Queue::Host },
        4 | 5 => Op { kind: copy(HOST, DEVICE), queue: Queue::CopyIn },
        6 => Op { kind: copy(DEVICE, HOST), queue: Queue::CopyOut },
        7 => Op { kind: copy(FILE, DEVICE), queue: Queue::CopyIn },
        8 => Op { kind: copy(DEVICE, FILE), queue: Queue::CopyOut },
        9 | 10 => Op { kind: copy(SCRATCH, HOST), queue: Queue::FileRead },
        _ => Op { kind: copy(HOST, SCRATCH), queue: Queue::FileWrite },
    }
}

/// Returns a Program of these ops that waits for every transfer one op later.
fn program(draws: &[Draw], precision: DType) -> (ProgramSet, Placement) {
    let tensor = |name: &str, space| Tensor {
        name: name.into(),
        shape: vec![(PIECE * PIECES) as u64],
        dtype: precision,
        space,
        category: Category::Weight,
        lifetime: Lifetime::Persistent,
        slots: 1,
    };
    let mut ops = Vec::new();
    let mut open: Option<Op> = None;
    for (number, draw) in draws.iter().enumerate() {
        let op = op(draw, number as u64);
        let started = match &op.kind {
            OpKind::TransferStart { from, to, elements, sequence } => Some(Op {
                kind: OpKind::TransferWait { from: *from, to: *to, elements: *elements, sequence: *sequence },
                queue: op.queue,
            }),
            _ => None,
        };
        ops.push(op);
        ops.extend(open.take());
        open = started;
    }
    ops.extend(open);
    let spaces = [("device", Space::Device), ("host", Space::Host), ("file", Space::File), ("scratch", Space::Scratch)];
    let tensors = spaces.map(|(name, space)| tensor(name, space)).to_vec();
    let blocks = vec![Block::once("all", ops)];
    let p = Program { work: WorkKind::Forward, kind: ProgramKind::Probe(0), inputs: vec![], outputs: vec![], blocks };
    let bytes = (PIECE * PIECES) as u64 * precision.bytes();
    let placement = Placement {
        offsets: vec![vec![Some(256)], vec![Some(0)], vec![None], vec![Some(100)]],
        arena_bytes: bytes + 256,
        host_bytes: bytes,
        file_bytes: bytes + 100,
    };
    (ProgramSet { tensors, programs: vec![p], phases: vec![] }, placement)
}

/// Files in memory, with counted bytes as initial contents.
#[derive(Clone, Default)]
struct Files(BTreeMap<u64, Vec<u8>>);

impl FileSpace for Files {
    fn read(&mut self, _: &str, offset: u64, into: &mut [u8]) -> io::Result<()> {
        into.iter_mut().enumerate().for_each(|(i, byte)| *byte = (offset as usize + i) as u8 % 60);
        Ok(())
    }

    fn write(&mut self, _: &str, offset: u64, from: &[u8]) -> io::Result<()> {
        self.0.insert(offset, from.to_vec());
        Ok(())
    }
}

/// Returns the folder of scratch files.
fn scratch() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

/// Opens the CPU with one and two threads, and virtual devices with delays in different places.
fn devices(set: &ProgramSet, placement: &Placement, precision: DType) -> Vec<(String, Box<dyn Device>)> {
    let cpu = |threads| {
        let device = executor::open(set.clone(), placement.clone(), precision, threads, Some(scratch())).unwrap();
        (format!("cpu, {threads} threads"), device)
    };
    // The time of an op is a hash of its description, so that ops differ and tests are repeatable.
    let delayed = |name: &str, op_seconds: f64, link: Link, threads| {
        let salt = name.len();
        let spec = VirtualDeviceSpec {
            name: format!("virtual:{name}"),
            arena_budget: Bytes(1 << 20),
            threads,
            price: Box::new(move |_, op: &Op| op_seconds * ((format!("{op:?}").len() * 7 + salt) % 5) as f64),
            link,
            scratch_folder: Some(scratch().to_owned()),
        };
        (spec.name.clone(), virtual_device::open(spec, set.clone(), placement.clone(), precision).unwrap())
    };
    let link = |bytes_per_second, latency_seconds| Link { bytes_per_second, latency_seconds };
    vec![
        cpu(1),
        cpu(2),
        delayed("quick", 0.0, link(1e12, 0.0), 1),
        delayed("slow-link", 0.0, link(1e6, 200e-6), 2),
        delayed("slow-ops", 200e-6, link(1e12, 0.0), 1),
        delayed("slow", 100e-6, link(2e6, 100e-6), 1),
    ]
}

fn fill(device: &mut dyn Device, precision: DType) {
    for (id, first) in [(DEVICE, 1.0), (HOST, 50.0), (SCRATCH, -20.0)] {
        let values: Vec<f64> = (0..PIECE * PIECES).map(|i| first + (i % 97) as f64 * 0.37).collect();
        device.write(id, 0, &executor::real_bytes(precision, &values));
    }
}

/// Contents of the device, host and scratch tensors, and the bytes written to files.
type Contents = ([Vec<u8>; 3], BTreeMap<u64, Vec<u8>>);

fn contents(device: &mut dyn Device, files: &Files, precision: DType) -> Contents {
    let bytes = ((PIECE * PIECES) as u64 * precision.bytes()) as usize;
    let everywhere = [DEVICE, HOST, SCRATCH].map(|tensor| {
        let mut found = vec![0; bytes];
        device.read(tensor, 0, &mut found);
        found
    });
    (everywhere, files.0.clone())
}

/// An observer that runs out of memory at an op.
struct FailAt {
    at: u32,
    serializes_ops: bool,
}

impl Observer for FailAt {
    fn before(&mut self, tick: u32, op: &Op, _: &mut dyn Memory) -> Result<(), DeviceError> {
        if tick == self.at {
            return Err(DeviceError::OutOfMemory { program: ProgramKind::Probe(0).to_string(), tick, op: op.name() });
        }
        Ok(())
    }

    fn serializes_ops(&self) -> bool {
        self.serializes_ops
    }
}

fn draws(most: usize) -> impl Strategy<Value = Vec<Draw>> {
    prop::collection::vec((0u8..13, 0..PIECES, 0..PIECES), 1..most)
}

/// Function that opens all devices of a test.
type Devices = fn(&ProgramSet, &Placement, DType) -> Vec<(String, Box<dyn Device>)>;

/// Opens the CPU and the stand-in for a GPU.
fn stand_in(set: &ProgramSet, placement: &Placement, precision: DType) -> Vec<(String, Box<dyn Device>)> {
    let cpu = executor::open(set.clone(), placement.clone(), precision, 1, Some(scratch())).unwrap();
    let gpu = cuda_stand_in::open(set.clone(), placement.clone(), precision, None).unwrap();
    vec![("cpu".into(), cpu), ("stand-in".into(), gpu.device)]
}

fn check_same_bytes(devices: Devices, draws: &[Draw], precision: DType) -> Result<(), TestCaseError> {
    let (set, placement) = program(draws, precision);
    let mut expected: Option<Contents> = None;
    for (name, mut device) in devices(&set, &placement, precision) {
        fill(&mut *device, precision);
        let mut files = Files::default();
        device.run_with_files(ProgramKind::Probe(0), &mut files).unwrap();
        let found = contents(&mut *device, &files, precision);
        prop_assert!(expected.get_or_insert_with(|| found.clone()) == &found, "{}", name);
        let memory = device.memory();
        prop_assert!(!memory.has_stray_writes(Space::Device) && !memory.has_stray_writes(Space::Host), "{}", name);
    }
    Ok(())
}

fn check_failed_op(
    devices: Devices,
    draws: &[Draw],
    at: prop::sample::Index,
    serialized: bool,
) -> Result<(), TestCaseError> {
    let precision = DType::F32;
    let (set, placement) = program(draws, precision);
    let at = at.index(set.programs[0].op_count()) as u32 + 1;
    let mut expected: Option<[Contents; 2]> = None;
    for (name, mut device) in devices(&set, &placement, precision) {
        fill(&mut *device, precision);
        let mut files = Files::default();
        let refused = device.run_observed(
            ProgramCall::of(ProgramKind::Probe(0)),
            &mut files,
            &mut FailAt { at, serializes_ops: serialized },
        );
        prop_assert!(refused.is_err_and(|error| error.is_out_of_memory()), "{}", name);
        let before = contents(&mut *device, &files, precision);
        let rest = ProgramCall { first_op: at, ..ProgramCall::of(ProgramKind::Probe(0)) };
        device.run_observed(rest, &mut files, &mut NoObserver).unwrap();
        let found = [before, contents(&mut *device, &files, precision)];
        prop_assert!(expected.get_or_insert_with(|| found.clone()) == &found, "{}: refused at {}", name, at);
    }
    Ok(())
}

fn check_plan_switch(devices: Devices, draws: &[Draw], swapped: bool, gap: u64) -> Result<(), TestCaseError> {
    let precision = DType::F32;
    let (set, placement) = program(draws, precision);
    let (mut new_set, mut new_placement) = (set.clone(), placement.clone());
    if swapped {
        // The device tensor moves to the host, the host tensor to the scratch file, and the scratch tensor to the device. The
        // Programs do not match these spaces and are removed.
        let spaces = [Space::Host, Space::Scratch, Space::File, Space::Device];
        new_set.tensors.iter_mut().zip(spaces).for_each(|(tensor, space)| tensor.space = space);
        new_set.programs.clear();
    }
    new_placement.offsets = vec![vec![Some(gap / 256 * 256)]; 4];
    new_placement.offsets[2] = vec![None];
    new_placement.arena_bytes = gap / 256 * 256 + (PIECE * PIECES) as u64 * 4;
    (new_placement.host_bytes, new_placement.file_bytes) = (new_placement.arena_bytes, new_placement.arena_bytes);
    for (name, mut device) in devices(&set, &placement, precision) {
        fill(&mut *device, precision);
        let (mut files, mut none) = (Files::default(), NoFiles);
        let expected = contents(&mut *device, &files, precision);
        device.adopt(new_set.clone(), new_placement.clone()).unwrap();
        prop_assert_eq!(device.stats().arena_bytes, Bytes(new_placement.arena_bytes));
        prop_assert!(contents(&mut *device, &files, precision) == expected, "{}", name);
        device.adopt(set.clone(), placement.clone()).unwrap();
        prop_assert!(contents(&mut *device, &files, precision) == expected, "{}", name);
        device.run_with_files(ProgramKind::Probe(0), &mut files).unwrap();
        prop_assert!(device.run_with_files(ProgramKind::Probe(1), &mut none).is_err());
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(40) })]

    #[test]
    fn programs_give_the_same_bytes_on_every_device(
        draws in draws(30), precision in prop::sample::select(vec![DType::F32, DType::F64, DType::Bf16])
    ) {
        check_same_bytes(devices, &draws, precision)?;
    }

    #[test]
    fn failed_op_leaves_earlier_results_and_can_continue(
        draws in draws(12), at: prop::sample::Index, serialized: bool
    ) {
        check_failed_op(devices, &draws, at, serialized)?;
    }

    #[test]
    fn plan_switch_keeps_persistent_tensors(draws in draws(12), swapped: bool, gap in 0u64..9000) {
        check_plan_switch(devices, &draws, swapped, gap)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    #[test]
    #[ignore = "needs g++: cargo xtask cuda-check"]
    fn stand_in_behaves_like_the_cpu(
        draws in draws(30), precision in prop::sample::select(vec![DType::F32, DType::Bf16]),
        at: prop::sample::Index, serialized: bool, swapped: bool, gap in 0u64..9000
    ) {
        check_same_bytes(stand_in, &draws, precision)?;
        check_failed_op(stand_in, &draws, at, serialized)?;
        check_plan_switch(stand_in, &draws, swapped, gap)?;
    }
}
