//! Compares each op of a device with the CPU in f64. Before the device runs an op, its inputs are copied to the CPU,
//! which runs the same op; then the outputs are compared. A wrong op is found even in a long Program.

use super::tally::Tally;
use plimsoll_core::{Category, DType, Space};
use plimsoll_device::cpu::executor;
use plimsoll_device::device::{Device, Memory, NoFiles, NoObserver, Observer, ProgramCall};
use plimsoll_device::error::DeviceError;
use plimsoll_program::ProgramKind;
use plimsoll_program::op::Access;
use plimsoll_program::{Block, Mode, Op, OpKind, Placement, Program, ProgramSet, Tensor, TensorId};
use std::collections::HashMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

/// Number of elements of each workspace on the CPU. Ops of small models need fewer.
const WORKSPACE_ELEMENTS: u64 = 1 << 21;

/// Converts the bytes of a tensor with elements of `dtype` to numbers.
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

/// Converts the bits of an IEEE half-precision number to the number.
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

/// Largest permitted differences of an op's output from the f64 result.
struct Tolerance {
    /// For an element, relative to the larger of its value and the root mean square of all elements.
    element: f64,
    /// For the norm of the difference of all elements, relative to the norm of the result.
    norm: f64,
}

impl Tolerance {
    /// Returns the tolerance for `op` in `precision`.
    ///
    /// The values for f32 permit sums over a few hundred elements in another order. bf16 rounds by up to 2⁻⁹, and
    /// products inside attention also round their factors.
    fn of(op: &OpKind, precision: DType) -> Tolerance {
        let usual = match precision {
            DType::Bf16 => Tolerance { element: 3e-2, norm: 5e-3 },
            _ => Tolerance { element: 5e-5, norm: 1e-5 },
        };
        match op {
            // Tensor cores get probabilities and their gradients in bf16. Sums of these gradients over hundreds of keys
            // cancel, so that single elements of the result differ by more. PyTorch's flash attention differs by up to
            // 0.23 on such inputs (docs/measured/gpu.md).
            OpKind::AttentionGrad { .. } if precision == DType::Bf16 => Tolerance { element: 0.15, ..usual },
            // The angle is the product of position and frequency, each rounded to f32, so its error grows with the
            // position.
            OpKind::RopeTable { table_rows, .. } => {
                let rounding = *table_rows as f64 * f64::from(f32::EPSILON);
                Tolerance { element: usual.element.max(rounding), norm: usual.norm.max(rounding) }
            }
            _ => usual,
        }
    }
}

/// A closure to run on the thread that owns the CPU device. An observer may move between threads, but a device may not.
type Work = Box<dyn FnOnce(&mut dyn Device) + Send>;

struct ReferenceThread(Sender<Work>);

impl ReferenceThread {
    fn open(set: ProgramSet) -> Result<ReferenceThread, DeviceError> {
        let (sender, receiver) = channel::<Work>();
        let (result_sender, result_receiver) = channel();
        thread::spawn(move || {
            let placement = separate_placement(&set);
            match executor::open(set, placement, DType::F64, 1, None) {
                Ok(mut device) => {
                    let _ = result_sender.send(Ok(()));
                    receiver.iter().for_each(|work| work(&mut *device));
                }
                Err(error) => drop(result_sender.send(Err(error))),
            }
        });
        result_receiver
            .recv()
            .expect("the reference thread reports whether it opened")
            .map(|()| ReferenceThread(sender))
    }

    fn run<T: Send + 'static>(&self, work: impl FnOnce(&mut dyn Device) -> T + Send + 'static) -> T {
        let (value_sender, value_receiver) = channel();
        let work: Work = Box::new(move |device| drop(value_sender.send(work(device))));
        self.0.send(work).expect("the reference thread is alive");
        value_receiver.recv().expect("the reference thread does not panic")
    }
}

/// Observer of a device that repeats each op on the CPU in f64 and compares the outputs.
pub struct CpuReference {
    set: Arc<ProgramSet>,
    placement: Placement,
    cpu: ReferenceThread,
    /// The Program on the CPU that consists of one op of the observed device. The key is the op's Program and its
    /// number in it, counted from 1.
    cpu_programs: HashMap<(ProgramKind, u32), ProgramKind>,
    precision: DType,
    found: Arc<Mutex<Tally>>,
    case: String,
    program: ProgramKind,
    micro_batch: u32,
    trace: Vec<(Op, i64)>,
}

impl CpuReference {
    /// Creates the reference for the Programs of `set`, which the observed device runs in `precision` with this
    /// placement. Its checks are added to `found`.
    ///
    /// # Errors
    /// Fails if there is no memory for the CPU device.
    pub fn new(
        set: Arc<ProgramSet>,
        placement: Placement,
        precision: DType,
        found: Arc<Mutex<Tally>>,
        case: String,
    ) -> Result<CpuReference, DeviceError> {
        let (single_ops, cpu_programs) = single_ops(&set);
        let cpu = ReferenceThread::open(single_ops)?;
        let (program, trace) = (ProgramKind::Load, Vec::new());
        Ok(CpuReference { set, placement, cpu, cpu_programs, precision, found, case, program, micro_batch: 0, trace })
    }

    /// Records which Program runs next and for which micro-batch, and lists its ops in order.
    pub fn enter(&mut self, call: ProgramCall) {
        self.program = call.program;
        self.micro_batch = call.micro_batch;
        let program = self.set.program(call.program).expect("a program of the set");
        self.trace = program.trace().map(|(op, variable)| (op.clone(), variable)).collect();
    }

    /// Returns the accesses of op number `tick` to tensors other than workspaces. Each comes with the slot of the
    /// tensor, and with the index of the first element that is accessed.
    fn accesses(&self, tick: u32) -> Vec<(Access, u32, u64)> {
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

    /// Reads elements of a tensor's slot from the memory of the observed device, as numbers.
    fn on_device(&self, id: TensorId, slot: u32, first: u64, elements: u64, memory: &mut dyn Memory) -> Vec<f64> {
        let (tensor, size) = (self.set.tensor(id), self.set.tensor(id).dtype.bytes());
        let start = self.placement.offset(id, slot) + first * size;
        values(tensor.dtype, &memory.view(tensor.space, start..start + elements * size))
    }

    fn compare(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) {
        for (access, slot, first) in self.accesses(tick) {
            if access.mode == Mode::Read {
                continue;
            }
            let id = access.operand.tensor;
            let got = self.on_device(id, slot, first, access.elements, memory);
            let integers = self.set.tensor(id).dtype == DType::I32;
            let size = if integers { 4 } else { 8 };
            let mut bytes = vec![0; ((first + access.elements) * size) as usize];
            let bytes = self.cpu.run(move |cpu| {
                cpu.read(id, slot, &mut bytes);
                bytes
            });
            let want = values(if integers { DType::I32 } else { DType::F64 }, &bytes[(first * size) as usize..]);
            let known = want.iter().filter(|x| !x.is_nan()).map(|x| x * x);
            let root = (known.sum::<f64>() / want.len() as f64).sqrt();
            // Unwritten parts of a cache are NaN on both sides.
            let same = |got: f64, want: f64| got == want || got.is_nan() && want.is_nan();
            let off =
                |got: f64, want: f64| if same(got, want) { 0.0 } else { (got - want).abs() / want.abs().max(root) };
            let apart = got.iter().zip(&want).map(|(got, want)| off(*got, *want));
            // NaN counts as the largest difference.
            let worst = apart.enumerate().fold(
                (0, 0.0),
                |worst: (usize, f64), (at, off)| {
                    if off.is_nan() || off > worst.1 { (at, off) } else { worst }
                },
            );
            let sum_of_squares = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>();
            let differences = got.iter().zip(&want).filter(|(got, want)| !same(**got, **want));
            let difference = sum_of_squares(&mut differences.map(|(got, want)| got - want)).sqrt();
            let size = root * (want.len() as f64).sqrt();
            let apart = if difference == 0.0 { 0.0 } else { difference / size };
            let tolerance = Tolerance::of(&op.kind, self.precision);
            let (tensor, at) = (&self.set.tensor(id).name, worst.0);
            let message = || {
                let (program, case) = (&self.program, &self.case);
                format!("{case}: {program} op {tick}, `{tensor}`[{at}]: {} for {}", got[at], want[at])
            };
            let (name, precision) = (op.name(), self.precision);
            let mut found = self.found.lock().expect("no thread panics while it holds the lock");
            let kind = format!("{name} in {precision}: off the CPU's in f64");
            found.figure(&kind, worst.1, worst.1 <= tolerance.element, message);
            let kind = format!("{name} in {precision}: off the CPU's in f64, all elements");
            found.figure(&kind, apart, apart <= tolerance.norm, message);
        }
    }
}

impl Observer for CpuReference {
    fn before(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) -> Result<(), DeviceError> {
        if !comparable(&self.set, op) {
            return Ok(());
        }
        for (access, slot, first) in self.accesses(tick) {
            if access.mode == Mode::Write {
                continue;
            }
            let id = access.operand.tensor;
            // Writes start at the first element of a slot, so elements before this part are copied as well.
            let seen = self.on_device(id, slot, 0, first + access.elements, memory);
            let bytes: Vec<u8> = if self.set.tensor(id).dtype == DType::I32 {
                seen.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect()
            } else {
                seen.iter().flat_map(|x| x.to_le_bytes()).collect()
            };
            self.cpu.run(move |cpu| cpu.write(id, slot, &bytes));
        }
        Ok(())
    }

    fn after(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) {
        if !comparable(&self.set, op) {
            return;
        }
        let (program, micro_batch) = (self.program, self.micro_batch);
        let single = self.cpu_programs[&(program, tick)];
        let ran = self.cpu.run(move |cpu| {
            let call = ProgramCall { micro_batch, ..ProgramCall::of(single) };
            cpu.run_observed(call, &mut NoFiles, &mut NoObserver)
        });
        match ran {
            Ok(()) => self.compare(tick, op, memory),
            Err(error) => {
                let line = format!("{}: {program} op {tick}: {error}", self.case);
                self.found.lock().expect("no thread panics while it holds the lock").check(
                    "the CPU reference runs",
                    false,
                    || line,
                );
            }
        }
    }
}

/// Returns whether an op can be repeated on the CPU, because it only computes on tensors. False for copies, collectives
/// and file access, which other checks cover.
fn comparable(set: &ProgramSet, op: &Op) -> bool {
    let other_ops = matches!(
        op.kind,
        OpKind::TransferStart { .. }
            | OpKind::TransferWait { .. }
            | OpKind::CollectiveStart(_)
            | OpKind::CollectiveWait(_)
    );
    let touched = op.accesses(&|id| set.tensor(id).elements());
    !other_ops && touched.iter().all(|access| set.tensor(access.operand.tensor).space != Space::File)
}

/// Returns a Program set in which each [`comparable`] op of `set` is a Program of its own, once for each iteration of
/// its block. The map gives that Program for the original Program and the number of the op in its trace, from 1.
///
/// Tensors in memory move to device memory. They become f64, except those of i32, and workspaces get
/// [`WORKSPACE_ELEMENTS`]. Tensors in files stay as they are.
fn single_ops(set: &ProgramSet) -> (ProgramSet, HashMap<(ProgramKind, u32), ProgramKind>) {
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
            tensor.shape = vec![WORKSPACE_ELEMENTS];
        }
    }
    wide.phases.clear();
    wide.programs = Vec::new();
    let mut kinds = HashMap::new();
    for program in &set.programs {
        for (index, (op, variable)) in program.trace().enumerate() {
            if comparable(set, op) {
                let block = Block { first: variable, ..Block::once("op", vec![op.clone()]) };
                let kind = ProgramKind::Probe(wide.programs.len() as u32);
                kinds.insert((program.kind, index as u32 + 1), kind);
                wide.programs.push(Program { kind, blocks: vec![block], ..program.clone() });
            }
        }
    }
    (wide, kinds)
}

/// Returns a placement in which tensors share no bytes. Only workspaces share theirs, because one op runs at a time.
fn separate_placement(set: &ProgramSet) -> Placement {
    let mut arena_bytes = 8 * WORKSPACE_ELEMENTS;
    let offsets = set.tensors.iter().map(|t| (0..t.slots).map(|_| place_slot(t, &mut arena_bytes)).collect()).collect();
    Placement { offsets, arena_bytes, ..Placement::default() }
}

/// Places a slot of a tensor at the end of the arena, which grows. Returns its offset; `None` for a file.
fn place_slot(tensor: &Tensor, arena_bytes: &mut u64) -> Option<u64> {
    if tensor.space == Space::File {
        return None;
    }
    if tensor.category == Category::Workspace {
        return Some(0);
    }
    let first = *arena_bytes;
    *arena_bytes += tensor.bytes().next_multiple_of(512);
    Some(first)
}
