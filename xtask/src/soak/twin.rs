//! Each op beside the CPU's in f64: before an op of a device runs, what it reads is copied to a twin, which runs the
//! same op; then what both wrote is compared. One wrong op is named, however long the Program.

use super::tally::Tally;
use plimsoll_core::{Category, DType, Space};
use plimsoll_device::cpu::executor;
use plimsoll_device::device::{Call, Device, DeviceError, Memory, NoFiles, Observer, Unobserved};
use plimsoll_program::op::Access;
use plimsoll_program::{Block, Mode, Op, OpKind, Placement, Program, ProgramSet, TensorId};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

/// Elements of scratch of every op on the CPU: more than small models need.
const SCRATCH: u64 = 1 << 21;

/// The numbers in bytes of a type.
pub fn values(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let wide = |bits: u32| f64::from(f32::from_bits(bits));
    match dtype {
        DType::F64 => bytes.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().expect("eight"))).collect(),
        DType::F32 => bytes.chunks_exact(4).map(|b| wide(u32::from_le_bytes(b.try_into().expect("four")))).collect(),
        DType::Bf16 => bytes
            .chunks_exact(2)
            .map(|b| wide(u32::from(u16::from_le_bytes(b.try_into().expect("two"))) << 16))
            .collect(),
        DType::I32 => bytes.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().expect("four")).into()).collect(),
        DType::F16 => bytes.chunks_exact(2).map(|b| half(u16::from_le_bytes(b.try_into().expect("two")))).collect(),
        other => panic!("{other} is no number"),
    }
}

/// The value of IEEE half precision, from its bits.
fn half(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let size = match exponent {
        0 => fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -size } else { size }
}

/// How far an element may be off, as a share of itself or of the root mean square, whichever is more. f32: sums over a
/// few hundred elements in another order. bf16: half a unit in the last place is 2⁻⁹, and products inside attention
/// round what they multiply.
fn tolerance(precision: DType) -> f64 {
    if precision == DType::Bf16 { 3e-2 } else { 5e-5 }
}

/// Work for a device that lives on a thread of its own: an observer may move between threads, a device may not.
type Work = Box<dyn FnOnce(&mut dyn Device) + Send>;

struct Cpu(Sender<Work>);

impl Cpu {
    fn open(set: ProgramSet) -> Result<Cpu, DeviceError> {
        let (works, given) = channel::<Work>();
        let (opened, whether) = channel();
        thread::spawn(move || {
            let placement = side_by_side(&set);
            match executor::open(set, placement, DType::F64, 1, None) {
                Ok(mut device) => {
                    let _ = opened.send(Ok(()));
                    given.iter().for_each(|work| work(&mut *device));
                }
                Err(error) => drop(opened.send(Err(error))),
            }
        });
        whether.recv().expect("the thread says whether it opened").map(|()| Cpu(works))
    }

    fn ask<T: Send + 'static>(&self, work: impl FnOnce(&mut dyn Device) -> T + Send + 'static) -> T {
        let (answer, answered) = channel();
        let work: Work = Box::new(move |device| drop(answer.send(work(device))));
        self.0.send(work).expect("the twin's thread lives");
        answered.recv().expect("the twin does not panic")
    }
}

/// The CPU in f64, op by op.
pub struct Twin {
    set: Arc<ProgramSet>,
    placement: Placement,
    cpu: Cpu,
    precision: DType,
    found: Arc<Mutex<Tally>>,
    case: String,
    program: String,
    micro_batch: u32,
    trace: Vec<(Op, i64)>,
}

impl Twin {
    /// A twin of the Programs of `set`, which a device runs in `precision` at the places of `placement`.
    ///
    /// # Errors
    /// When the CPU has no memory for it.
    pub fn new(
        set: Arc<ProgramSet>,
        placement: Placement,
        precision: DType,
        found: Arc<Mutex<Tally>>,
        case: String,
    ) -> Result<Twin, DeviceError> {
        let cpu = Cpu::open(single_ops(&set))?;
        let (program, trace) = (String::new(), Vec::new());
        Ok(Twin { set, placement, cpu, precision, found, case, program, micro_batch: 0, trace })
    }

    /// A Program is about to run.
    pub fn enter(&mut self, call: Call) {
        call.program.clone_into(&mut self.program);
        self.micro_batch = call.micro_batch;
        let program = self.set.program(call.program).expect("a program of the set");
        self.trace = program.trace().map(|(op, variable)| (op.clone(), variable)).collect();
    }

    /// The places that an op touches, with the slot and the first element of each.
    fn places(&self, tick: u32) -> Vec<(Access, u32, u64)> {
        let (op, variable) = &self.trace[tick as usize - 1];
        let (variable, micro_batch) = (*variable, i64::from(self.micro_batch));
        op.accesses(&|id| self.set.tensor(id).elements())
            .into_iter()
            .filter(|access| self.set.tensor(access.operand.tensor).category != Category::Workspace)
            .map(|access| {
                let slots = i64::from(self.set.tensor(access.operand.tensor).slots);
                let slot = access.operand.slot.at(variable, micro_batch).rem_euclid(slots) as u32;
                (access, slot, access.operand.offset.at(variable, micro_batch) as u64)
            })
            .collect()
    }

    /// Elements of a slot as they stand on the device.
    fn on_device(&self, id: TensorId, slot: u32, first: u64, elements: u64, memory: &mut dyn Memory) -> Vec<f64> {
        let (tensor, size) = (self.set.tensor(id), self.set.tensor(id).dtype.bytes());
        let start = self.placement.offset(id, slot) + first * size;
        values(tensor.dtype, &memory.look(tensor.space, start..start + elements * size))
    }

    fn compare(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) {
        for (access, slot, first) in self.places(tick) {
            if access.mode == Mode::Read {
                continue;
            }
            let id = access.operand.tensor;
            let got = self.on_device(id, slot, first, access.elements, memory);
            let integers = self.set.tensor(id).dtype == DType::I32;
            let size = if integers { 4 } else { 8 };
            let mut bytes = vec![0; ((first + access.elements) * size) as usize];
            let bytes = self.cpu.ask(move |cpu| {
                cpu.read(id, slot, &mut bytes);
                bytes
            });
            let want = values(if integers { DType::I32 } else { DType::F64 }, &bytes[(first * size) as usize..]);
            let known = want.iter().filter(|x| !x.is_nan()).map(|x| x * x);
            let root = (known.sum::<f64>() / want.len() as f64).sqrt();
            // Parts of a cache that nobody has written yet are NaN on both sides.
            let same = |got: f64, want: f64| got == want || got.is_nan() && want.is_nan();
            let off =
                |got: f64, want: f64| if same(got, want) { 0.0 } else { (got - want).abs() / want.abs().max(root) };
            let apart = got.iter().zip(&want).map(|(got, want)| off(*got, *want));
            // NaN is the worst of all.
            let worst = apart.enumerate().fold(
                (0, 0.0),
                |worst: (usize, f64), (at, off)| {
                    if off.is_nan() || off > worst.1 { (at, off) } else { worst }
                },
            );
            let kind = format!("{} in {}: off the CPU's in f64", op.name(), self.precision);
            let held = worst.1 <= tolerance(self.precision);
            let mut found = self.found.lock().expect("nobody panics with it");
            found.figure(&kind, worst.1, held, || {
                let (tensor, at) = (&self.set.tensor(id).name, worst.0);
                let (program, case) = (&self.program, &self.case);
                format!("{case}: {program} op {tick}, `{tensor}`[{at}]: {} for {}", got[at], want[at])
            });
        }
    }
}

impl Observer for Twin {
    fn before(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) -> Result<(), DeviceError> {
        if !comparable(&self.set, op) {
            return Ok(());
        }
        for (access, slot, first) in self.places(tick) {
            if access.mode == Mode::Write {
                continue;
            }
            let id = access.operand.tensor;
            // A device is written from a slot's first element on: what stands before this part does no harm.
            let seen = self.on_device(id, slot, 0, first + access.elements, memory);
            let bytes: Vec<u8> = if self.set.tensor(id).dtype == DType::I32 {
                seen.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect()
            } else {
                seen.iter().flat_map(|x| x.to_le_bytes()).collect()
            };
            self.cpu.ask(move |cpu| cpu.write(id, slot, &bytes));
        }
        Ok(())
    }

    fn after(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) {
        if !comparable(&self.set, op) {
            return;
        }
        let program = name(&self.program, tick);
        let (same, micro_batch) = (program.clone(), self.micro_batch);
        let ran = self.cpu.ask(move |cpu| {
            let call = Call { micro_batch, ..Call::of(&same) };
            cpu.run_observed(call, &mut NoFiles, &mut Unobserved)
        });
        match ran {
            Ok(()) => self.compare(tick, op, memory),
            Err(error) => {
                let line = format!("{}: {program}: {error}", self.case);
                self.found.lock().expect("nobody panics with it").check("the twin runs", false, || line);
            }
        }
    }
}

fn name(program: &str, tick: u32) -> String {
    format!("{program}/{tick}")
}

/// Whether an op computes something from tensors: copies and files are shown otherwise.
fn comparable(set: &ProgramSet, op: &Op) -> bool {
    let elsewhere = matches!(
        op.kind,
        OpKind::TransferStart { .. }
            | OpKind::TransferWait { .. }
            | OpKind::CollectiveStart(_)
            | OpKind::CollectiveWait(_)
    );
    let touched = op.accesses(&|id| set.tensor(id).elements());
    !elsewhere && touched.iter().all(|access| set.tensor(access.operand.tensor).space != Space::File)
}

/// The same tensors in f64 on one side, and a Program for each op that runs.
fn single_ops(set: &ProgramSet) -> ProgramSet {
    let mut wide = set.clone();
    for tensor in &mut wide.tensors {
        if tensor.space == Space::File {
            continue;
        }
        tensor.space = Space::Device;
        if tensor.dtype != DType::I32 {
            tensor.dtype = DType::F64;
        }
        if tensor.category == Category::Workspace {
            tensor.shape = vec![SCRATCH];
        }
    }
    wide.phases.clear();
    wide.programs = Vec::new();
    for program in &set.programs {
        for (index, (op, variable)) in program.trace().enumerate() {
            if comparable(set, op) {
                let block = Block { first: variable, ..Block::once("op", vec![op.clone()]) };
                let name = name(&program.name, index as u32 + 1);
                wide.programs.push(Program { name, blocks: vec![block], ..program.clone() });
            }
        }
    }
    wide
}

/// A placement in which everything has bytes of its own, but for scratch: one op runs at a time.
fn side_by_side(set: &ProgramSet) -> Placement {
    let mut arena_bytes = 8 * SCRATCH;
    let place = |tensor: &plimsoll_program::Tensor, at: &mut u64| {
        if tensor.space == Space::File {
            return None;
        }
        if tensor.category == Category::Workspace {
            return Some(0);
        }
        let first = *at;
        *at += tensor.bytes().next_multiple_of(512);
        Some(first)
    };
    let offsets = set.tensors.iter().map(|t| (0..t.slots).map(|_| place(t, &mut arena_bytes)).collect()).collect();
    Placement { offsets, arena_bytes, ..Placement::default() }
}
