//! One test body for every device: the same Programs give the same bytes everywhere, in whatever order their queues come
//! to run; a refusal at any op leaves exactly what the ops before it did; another plan leaves what stays. The stand-in for
//! a GPU (it runs on the CPU) is one of them, where there is a C++ compiler.

mod cuda_stand_in;

use plimsoll_core::{Bytes, Category, DType, Link, Space, WorkName};
use plimsoll_device::cpu::executor;
use plimsoll_device::device::{Call, Device, DeviceError, FileSpace, Memory, NoFiles, Observer, Unobserved};
use plimsoll_device::virtual_device::{self, Virtual};
use plimsoll_program::op::Queue;
use plimsoll_program::{Block, Index, Lifetime, Op, OpKind, Operand, Placement, Program, ProgramSet, Tensor, TensorId};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

/// Elements of a piece, and pieces of a tensor.
const PIECE: i64 = 64;
const PIECES: i64 = 6;

const DEVICE: TensorId = TensorId(0);
const HOST: TensorId = TensorId(1);
const FILE: TensorId = TensorId(2);
/// In the scratch file.
const SCRATCH: TensorId = TensorId(3);

/// One op on pieces `x` and `to`, by the number of its kind.
type Draw = (u8, i64, i64);

fn op(&(kind, x, to): &Draw, sequence: u64) -> Op {
    let at = |tensor, piece: i64| Operand::whole(tensor).from(Index::fixed(piece * PIECE));
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

/// A Program of these ops, every transfer awaited after one more op.
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
    let p = Program { work: WorkName::Forward, name: "p".into(), inputs: vec![], outputs: vec![], blocks };
    let bytes = (PIECE * PIECES) as u64 * precision.bytes();
    let placement = Placement {
        offsets: vec![vec![Some(256)], vec![Some(0)], vec![None], vec![Some(100)]],
        arena_bytes: bytes + 256,
        host_bytes: bytes,
        file_bytes: bytes + 100,
    };
    (ProgramSet { tensors, programs: vec![p], phases: vec![] }, placement)
}

/// Files in memory, that start as counted bytes.
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

/// Where scratch files are.
fn scratch() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

/// Every device that is here, and virtual ones that dawdle in different places.
fn devices(set: &ProgramSet, placement: &Placement, precision: DType) -> Vec<(String, Box<dyn Device>)> {
    let cpu = |threads| {
        let device = executor::open(set.clone(), placement.clone(), precision, threads, Some(scratch())).unwrap();
        (format!("cpu, {threads} threads"), device)
    };
    // Seconds of an op: a hash of its name and a place, so that ops differ and tests repeat.
    let dawdling = |name: &str, op_seconds: f64, link: Link, threads| {
        let salt = name.len();
        let what = Virtual {
            name: format!("virtual:{name}"),
            arena_budget: Bytes(1 << 20),
            threads,
            price: Box::new(move |_, op: &Op| op_seconds * ((format!("{op:?}").len() * 7 + salt) % 5) as f64),
            link,
            scratch: Some(scratch().to_owned()),
        };
        (what.name.clone(), virtual_device::open(what, set.clone(), placement.clone(), precision).unwrap())
    };
    let link = |bytes_per_second, latency_seconds| Link { bytes_per_second, latency_seconds };
    vec![
        cpu(1),
        cpu(2),
        dawdling("quick", 0.0, link(1e12, 0.0), 1),
        dawdling("slow-link", 0.0, link(1e6, 200e-6), 2),
        dawdling("slow-ops", 200e-6, link(1e12, 0.0), 1),
        dawdling("slow", 100e-6, link(2e6, 100e-6), 1),
    ]
}

fn fill(device: &mut dyn Device, precision: DType) {
    for (id, first) in [(DEVICE, 1.0), (HOST, 50.0), (SCRATCH, -20.0)] {
        let values: Vec<f64> = (0..PIECE * PIECES).map(|i| first + (i % 97) as f64 * 0.37).collect();
        device.write(id, 0, &executor::real_bytes(precision, &values));
    }
}

/// The bytes of both arenas and of the scratch file, and of what was written to files.
type Left = ([Vec<u8>; 3], BTreeMap<u64, Vec<u8>>);

fn left(device: &mut dyn Device, files: &Files, precision: DType) -> Left {
    let bytes = ((PIECE * PIECES) as u64 * precision.bytes()) as usize;
    let everywhere = [DEVICE, HOST, SCRATCH].map(|tensor| {
        let mut found = vec![0; bytes];
        device.read(tensor, 0, &mut found);
        found
    });
    (everywhere, files.0.clone())
}

/// Refuses at an op.
struct Refuse {
    at: u32,
    one_at_a_time: bool,
}

impl Observer for Refuse {
    fn before(&mut self, tick: u32, op: &Op, _: &mut dyn Memory) -> Result<(), DeviceError> {
        if tick == self.at {
            return Err(DeviceError::Refused { program: "p".into(), tick, op: op.name() });
        }
        Ok(())
    }

    fn one_at_a_time(&self) -> bool {
        self.one_at_a_time
    }
}

fn draws(most: usize) -> impl Strategy<Value = Vec<Draw>> {
    prop::collection::vec((0u8..13, 0..PIECES, 0..PIECES), 1..most)
}

/// All devices of a test.
type Devices = fn(&ProgramSet, &Placement, DType) -> Vec<(String, Box<dyn Device>)>;

/// The processor, and the stand-in for a GPU.
fn stand_in(set: &ProgramSet, placement: &Placement, precision: DType) -> Vec<(String, Box<dyn Device>)> {
    let cpu = executor::open(set.clone(), placement.clone(), precision, 1, Some(scratch())).unwrap();
    let gpu = cuda_stand_in::open(set.clone(), placement.clone(), precision, None).unwrap();
    vec![("cpu".into(), cpu), ("stand-in".into(), gpu.device)]
}

fn the_same_bytes(devices: Devices, draws: &[Draw], precision: DType) -> Result<(), TestCaseError> {
    let (set, placement) = program(draws, precision);
    let mut expected: Option<Left> = None;
    for (name, mut device) in devices(&set, &placement, precision) {
        fill(&mut *device, precision);
        let mut files = Files::default();
        device.run_with_files("p", &mut files).unwrap();
        let found = left(&mut *device, &files, precision);
        prop_assert!(expected.get_or_insert_with(|| found.clone()) == &found, "{}", name);
        let memory = device.memory();
        prop_assert!(!memory.strayed(Space::Device) && !memory.strayed(Space::Host), "{}", name);
    }
    Ok(())
}

fn a_refusal(devices: Devices, draws: &[Draw], at: prop::sample::Index, singly: bool) -> Result<(), TestCaseError> {
    let precision = DType::F32;
    let (set, placement) = program(draws, precision);
    let at = at.index(set.programs[0].length()) as u32 + 1;
    let mut expected: Option<[Left; 2]> = None;
    for (name, mut device) in devices(&set, &placement, precision) {
        fill(&mut *device, precision);
        let mut files = Files::default();
        let refused = device.run_observed(Call::of("p"), &mut files, &mut Refuse { at, one_at_a_time: singly });
        prop_assert!(refused.is_err_and(|error| error.is_refusal()), "{}", name);
        let before = left(&mut *device, &files, precision);
        let rest = Call { from: at, ..Call::of("p") };
        device.run_observed(rest, &mut files, &mut Unobserved).unwrap();
        let found = [before, left(&mut *device, &files, precision)];
        prop_assert!(expected.get_or_insert_with(|| found.clone()) == &found, "{}: refused at {}", name, at);
    }
    Ok(())
}

fn another_plan(devices: Devices, draws: &[Draw], swapped: bool, gap: u64) -> Result<(), TestCaseError> {
    let precision = DType::F32;
    let (set, placement) = program(draws, precision);
    let (mut other, mut elsewhere) = (set.clone(), placement.clone());
    if swapped {
        // What stood on the device now waits on the host, what was there in the file, and what was in the file is on the
        // device; the Programs are none for that.
        let spaces = [Space::Host, Space::Scratch, Space::File, Space::Device];
        other.tensors.iter_mut().zip(spaces).for_each(|(tensor, space)| tensor.space = space);
        other.programs.clear();
    }
    elsewhere.offsets = vec![vec![Some(gap / 256 * 256)]; 4];
    elsewhere.offsets[2] = vec![None];
    elsewhere.arena_bytes = gap / 256 * 256 + (PIECE * PIECES) as u64 * 4;
    (elsewhere.host_bytes, elsewhere.file_bytes) = (elsewhere.arena_bytes, elsewhere.arena_bytes);
    for (name, mut device) in devices(&set, &placement, precision) {
        fill(&mut *device, precision);
        let (mut files, mut none) = (Files::default(), NoFiles);
        let expected = left(&mut *device, &files, precision);
        device.adopt(other.clone(), elsewhere.clone()).unwrap();
        prop_assert_eq!(device.stats().arena_bytes, Bytes(elsewhere.arena_bytes));
        prop_assert!(left(&mut *device, &files, precision) == expected, "{}", name);
        device.adopt(set.clone(), placement.clone()).unwrap();
        prop_assert!(left(&mut *device, &files, precision) == expected, "{}", name);
        device.run_with_files("p", &mut files).unwrap();
        prop_assert!(device.run_with_files("q", &mut none).is_err());
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(40) })]

    #[test]
    fn the_same_programs_leave_the_same_bytes_on_every_device(
        draws in draws(30), precision in prop::sample::select(vec![DType::F32, DType::F64, DType::Bf16])
    ) {
        the_same_bytes(devices, &draws, precision)?;
    }

    #[test]
    fn a_refusal_leaves_what_the_ops_before_it_did_and_the_rest_can_follow(
        draws in draws(12), at: prop::sample::Index, singly: bool
    ) {
        a_refusal(devices, &draws, at, singly)?;
    }

    #[test]
    fn another_plan_leaves_what_stays_wherever_it_stands(draws in draws(12), swapped: bool, gap in 0u64..9000) {
        another_plan(devices, &draws, swapped, gap)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    #[test]
    #[ignore = "needs g++: cargo xtask cuda-check"]
    fn the_stand_in_is_one_of_them(
        draws in draws(30), precision in prop::sample::select(vec![DType::F32, DType::Bf16]),
        at: prop::sample::Index, singly: bool, swapped: bool, gap in 0u64..9000
    ) {
        the_same_bytes(stand_in, &draws, precision)?;
        a_refusal(stand_in, &draws, at, singly)?;
        another_plan(stand_in, &draws, swapped, gap)?;
    }
}
