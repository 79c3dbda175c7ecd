//! A device under observation: heap growth, the bytes that each op changes, and results that depend on bytes that no op
//! has written.

use super::reference::CpuReference;
use super::tally::Tally;
use plimsoll_core::{Category, DType, Space};
use plimsoll_device::device::{Device, FileSpace, Memory, NoObserver, Observer, ProgramCall};
use plimsoll_device::error::DeviceError;
use plimsoll_device::heap;
use plimsoll_plan::lifetimes::{Lifetimes, Slot, deaths, lifetimes};
use plimsoll_program::ProgramKind;
use plimsoll_program::{Lifetime, Mode, Op, OpKind, Placement, ProgramSet, TensorId};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Largest permitted growth of the heap, in bytes, while a Program runs: enough for messages between threads, too small
/// for a tensor.
const HEAP_BYTES: u64 = 64 << 10;

/// The way in which a device is observed while it runs Programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observation {
    /// The device runs unchanged. Only the heap, writes outside the arena and the results are checked.
    Outcome,
    /// After every op, the whole arena is compared with its expected bytes. Bytes that no live tensor holds are
    /// overwritten, so that an op that reads them computes another result.
    EveryOp,
    /// The output of every op is compared with that of the CPU in f64 for the same input.
    CpuReference,
}

/// A device under observation.
pub struct ObservedDevice {
    inner: Box<dyn Device>,
    found: Arc<Mutex<Tally>>,
    shadow: Option<ShadowMemory>,
    reference: Option<CpuReference>,
    case: String,
}

impl ObservedDevice {
    /// Wraps a device that runs the Programs of `set` in `precision`. The wrapper adds its checks to `found`, with the
    /// name `case` in failure messages.
    ///
    /// # Errors
    /// Fails if there is no memory for the CPU reference.
    pub fn new(
        inner: Box<dyn Device>,
        set: Arc<ProgramSet>,
        placement: Placement,
        precision: DType,
        observation: Observation,
        found: Arc<Mutex<Tally>>,
        case: String,
    ) -> Result<ObservedDevice, DeviceError> {
        let its_found = Arc::clone(&found);
        let (mut shadow, mut reference) = (None, None);
        match observation {
            Observation::Outcome => {}
            Observation::EveryOp => shadow = Some(ShadowMemory::new(set, placement, its_found, case.clone())),
            Observation::CpuReference => {
                reference = Some(CpuReference::new(set, placement, precision, its_found, case.clone())?)
            }
        }
        Ok(ObservedDevice { inner, found, shadow, reference, case })
    }
}

impl Device for ObservedDevice {
    fn run_observed(
        &mut self,
        call: ProgramCall,
        files: &mut dyn FileSpace,
        _: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        if let Some(shadow) = &mut self.shadow {
            shadow.enter(call.program, call.micro_batch);
            return self.inner.run_observed(call, files, shadow);
        }
        if let Some(reference) = &mut self.reference {
            reference.enter(call);
            return self.inner.run_observed(call, files, reference);
        }
        let program = call.program;
        let (result, grown) = heap::measure_growth(|| self.inner.run_observed(call, files, &mut NoObserver));
        let memory = self.inner.memory();
        let has_stray_write = SPACES.iter().any(|&space| memory.has_stray_writes(space));
        let mut found = self.found.lock().expect("no thread panics while it holds the lock");
        found.check("no writes outside the arena", !has_stray_write, || format!("{}: {program}", self.case));
        let most = grown.largest_bytes.max(grown.peak_bytes);
        found.figure("heap while a program runs, bytes", most as f64, most <= HEAP_BYTES, || {
            format!("{}: {program}: {grown:?}", self.case)
        });
        result
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.inner.synchronize()
    }

    fn write(&mut self, tensor: TensorId, slot: u32, bytes: &[u8]) {
        self.inner.write(tensor, slot, bytes);
        if let Some(shadow) = &mut self.shadow {
            shadow.record_host_write(tensor, slot, bytes);
        }
    }

    fn read(&mut self, tensor: TensorId, slot: u32, bytes: &mut [u8]) {
        self.inner.read(tensor, slot, bytes);
    }

    fn memory(&mut self) -> &mut dyn Memory {
        self.inner.memory()
    }
}

/// A copy of the arenas with the expected value of every byte. As an observer, it compares them with the real arenas
/// after every op.
struct ShadowMemory {
    set: Arc<ProgramSet>,
    placement: Placement,
    phases: Vec<(Lifetimes, HashMap<u32, Vec<Slot>>)>,
    found: Arc<Mutex<Tally>>,
    case: String,
    /// Expected bytes of each arena.
    bytes: BTreeMap<Space, Vec<u8>>,
    program: usize,
    phase: usize,
    /// Index of the phase to which the last completed Program belongs; `None` before the first one.
    before: Option<usize>,
    /// Number of ops in those Programs of the phase that precede the current Program.
    start: u32,
    micro_batch: i64,
    trace: Vec<(Op, i64)>,
    /// Ranges that were overwritten with poison before the current op, because the op has to write them whole.
    poisoned: Vec<(Space, Range<u64>)>,
}

/// Memory spaces with an arena.
const SPACES: [Space; 2] = [Space::Device, Space::Host];

/// A byte range of an arena that an op reads or writes, with the tensor that lies there.
struct AccessedRange {
    space: Space,
    range: Range<u64>,
    mode: Mode,
    tensor: TensorId,
}

impl AccessedRange {
    /// Returns whether the two ranges share a byte.
    fn overlaps(&self, other: &AccessedRange) -> bool {
        self.space == other.space && self.range.start < other.range.end && other.range.start < self.range.end
    }
}

impl ShadowMemory {
    fn new(set: Arc<ProgramSet>, placement: Placement, found: Arc<Mutex<Tally>>, case: String) -> ShadowMemory {
        let phases = set
            .phases
            .iter()
            .map(|phase| {
                let lifetimes = lifetimes(&set, phase, Space::Device);
                let deaths = deaths(&set, &lifetimes);
                (lifetimes, deaths)
            })
            .collect();
        ShadowMemory {
            set,
            placement,
            phases,
            found,
            case,
            bytes: BTreeMap::new(),
            program: 0,
            phase: 0,
            before: None,
            start: 0,
            micro_batch: 0,
            trace: Vec::new(),
            poisoned: Vec::new(),
        }
    }

    /// Records which Program runs next and for which micro-batch. Also determines the Program's place in its phase, and
    /// lists its ops in order.
    fn enter(&mut self, program: ProgramKind, micro_batch: u32) {
        let set = &self.set;
        self.program = set.program_index(program).expect("a program of the set");
        self.phase = set.phases.iter().position(|p| p.programs.contains(&self.program)).expect("it stands in a phase");
        let before = set.phases[self.phase].programs.iter().take_while(|&&p| p != self.program);
        self.start = before.map(|&p| set.programs[p].op_count() as u32).sum();
        self.micro_batch = i64::from(micro_batch);
        self.trace = set.programs[self.program].trace().map(|(op, variable)| (op.clone(), variable)).collect();
    }

    fn record_host_write(&mut self, tensor: TensorId, slot: u32, bytes: &[u8]) {
        let first = self.placement.offset(tensor, slot) as usize;
        if let Some(known) = self.bytes.get_mut(&self.set.tensor(tensor).space) {
            known[first..first + bytes.len()].copy_from_slice(bytes);
        }
    }

    fn accessed_ranges(&self, op: &Op, variable: i64) -> Vec<AccessedRange> {
        let elements = |id: TensorId| self.set.tensor(id).elements();
        op.accesses(&elements)
            .into_iter()
            .filter(|access| self.set.tensor(access.operand.tensor).space != Space::File)
            .map(|access| {
                let (operand, tensor) = (access.operand, self.set.tensor(access.operand.tensor));
                let slot = operand.slot.at(variable, self.micro_batch).rem_euclid(i64::from(tensor.slots)) as u32;
                let inside = operand.offset.at(variable, self.micro_batch) as u64 * tensor.dtype.bytes();
                let first = self.placement.offset(operand.tensor, slot) + inside;
                let range = first..first + access.elements * tensor.dtype.bytes();
                AccessedRange { space: tensor.space, range, mode: access.mode, tensor: operand.tensor }
            })
            .collect()
    }

    /// Records the present bytes of a range of the arena as the expected ones.
    fn record(&mut self, space: Space, range: Range<u64>, memory: &mut dyn Memory) {
        let known = &mut self.bytes.get_mut(&space).expect("both arenas are known")[index_range(&range)];
        known.copy_from_slice(&memory.view(space, range));
    }

    /// Returns the offset in the arena of the first byte in a range that differs from its expected value; `None` if
    /// none does.
    fn first_change(&self, space: Space, range: Range<u64>, memory: &mut dyn Memory) -> Option<u64> {
        let first = range.start;
        difference(&self.bytes[&space][index_range(&range)], &memory.view(space, range)).map(|at| first + at as u64)
    }

    fn poison(&mut self, space: Space, range: Range<u64>, memory: &mut dyn Memory) {
        memory.poison(space, range.clone());
        self.record(space, range, memory);
    }

    /// Overwrites with poison all bytes that the current Program must not read: those that belong to no tensor that is
    /// alive at its start.
    fn poison_dead(&mut self, memory: &mut dyn Memory) {
        // The generation cache lives between calls, but each forward pass starts a new micro-batch.
        let has_phase_tensors =
            self.phases[self.phase].0.slots.iter().flatten().any(|s| self.set.tensor(s.0).lifetime == Lifetime::Phase);
        let is_new_phase = self.before != Some(self.phase) || self.start == 0 && !has_phase_tensors;
        let program = self.set.programs[self.program].kind;
        // When a run starts or resumes, nothing in the arena has been written yet. A run with frozen weights loads them
        // before it resumes.
        let loads = |phase: usize| {
            let kinds = self.set.phases[phase].programs.iter().map(|&program| self.set.programs[program].kind);
            kinds.eq([ProgramKind::Load])
        };
        let is_first_program = self.before.is_none_or(|before| program == ProgramKind::Restore && !loads(before));
        let mut keep: Vec<(Space, Range<u64>)> = Vec::new();
        let mut keep_slot = |id: TensorId, slot: u32| {
            if let Some(first) = self.placement.offsets[id.0 as usize][slot as usize] {
                keep.push((self.set.tensor(id).space, first..first + self.set.tensor(id).bytes()));
            }
        };
        if !is_first_program {
            for (id, tensor) in self.set.tensors.iter().enumerate() {
                if tensor.lifetime == Lifetime::Persistent && tensor.space != Space::File {
                    (0..tensor.slots).for_each(|slot| keep_slot(TensorId(id as u32), slot));
                }
            }
        }
        let inputs = &self.set.programs[self.program].inputs;
        let (lifetimes, _) = &self.phases[self.phase];
        for (buffer, slots) in lifetimes.buffers.iter().zip(&lifetimes.slots) {
            let is_input = slots.iter().any(|(id, _)| inputs.contains(id));
            let lives = buffer.first <= self.start && buffer.last > self.start && (!is_new_phase || is_input);
            if lives {
                slots.iter().for_each(|&(id, slot)| keep_slot(id, slot));
            }
        }
        keep.sort_by_key(|(_, range)| range.start);
        for space in SPACES {
            let mut at = 0;
            for (_, range) in keep.iter().filter(|(of, _)| *of == space) {
                if at < range.start {
                    self.poison(space, at..range.start, memory);
                }
                at = at.max(range.end);
            }
            let end = memory.bytes(space).0;
            self.poison(space, at..end, memory);
        }
    }

    fn name(&self, tick: u32, op: &Op) -> String {
        format!("{}: {} at op {tick} ({})", self.case, self.set.programs[self.program].kind, op.name())
    }

    /// Returns the names, separated by commas, of the tensors that hold a byte of an arena.
    fn tensors_at(&self, space: Space, byte: u64) -> String {
        tensors_at_byte(&self.set, &self.placement, space, byte).join(", ")
    }

    fn check(&self, kind: &str, wrong: Option<String>) {
        self.found
            .lock()
            .expect("no thread panics while it holds the lock")
            .check(kind, wrong.is_none(), || wrong.unwrap_or_default());
    }
}

/// Converts a range of byte offsets to a range of indices into a slice.
fn index_range(range: &Range<u64>) -> Range<usize> {
    range.start as usize..range.end as usize
}

/// Returns the names, each as `name[slot]`, of the tensors that the placement puts on a byte of an arena.
pub fn tensors_at_byte(set: &ProgramSet, placement: &Placement, space: Space, byte: u64) -> Vec<String> {
    let mut names = Vec::new();
    let tensors = set.tensors.iter().zip(&placement.offsets);
    for (tensor, offsets) in tensors.filter(|(tensor, _)| tensor.space == space) {
        for (slot, offset) in offsets.iter().enumerate() {
            if offset.is_some_and(|first| (first..first + tensor.bytes()).contains(&byte)) {
                names.push(format!("{}[{slot}]", tensor.name));
            }
        }
    }
    names
}

/// Returns the first index at which two slices of equal length differ; `None` if they are equal.
fn difference(a: &[u8], b: &[u8]) -> Option<usize> {
    if a == b { None } else { a.iter().zip(b).position(|(a, b)| a != b) }
}

impl Observer for ShadowMemory {
    fn before(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) -> Result<(), DeviceError> {
        let (expected, variable) = self.trace[tick as usize - 1].clone();
        assert_eq!(&expected, op, "the executor runs the program's ops in order");
        if tick == 1 {
            for space in SPACES {
                let all = 0..memory.bytes(space).0;
                self.bytes.entry(space).or_insert_with(|| memory.view(space, all.clone()).to_vec());
                let wrong = self.first_change(space, all.clone(), memory).map(|at| {
                    format!("{}: byte {at} changed before it ({})", self.name(tick, op), self.tensors_at(space, at))
                });
                self.check("between programs only the host writes", wrong);
                self.record(space, all, memory);
            }
            self.poison_dead(memory);
        }
        self.poisoned.clear();
        if !matches!(op.kind, OpKind::TransferWait { .. } | OpKind::CollectiveWait(_)) {
            let touched = self.accessed_ranges(op, variable);
            for written in touched.iter().filter(|t| t.mode == Mode::Write) {
                // An op reads and writes its in-place operand.
                if !touched.iter().any(|t| t.mode != Mode::Write && t.overlaps(written)) {
                    self.poison(written.space, written.range.clone(), memory);
                    self.poisoned.push((written.space, written.range.clone()));
                }
            }
        }
        Ok(())
    }

    fn after(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) {
        let variable = self.trace[tick as usize - 1].1;
        let touched = self.accessed_ranges(op, variable);
        let mut written: Vec<(Space, Range<u64>)> =
            touched.iter().filter(|t| t.mode != Mode::Read).map(|t| (t.space, t.range.clone())).collect();
        written.sort_by_key(|(space, range)| (*space, range.start));
        let mut wrong = None;
        for space in SPACES {
            let mut at = 0;
            let end = memory.bytes(space).0;
            let here = written.iter().filter(|(of, _)| *of == space).map(|(_, range)| range.clone());
            for range in here.chain(std::iter::once(end..end)) {
                if at < range.start && wrong.is_none() {
                    wrong = self.first_change(space, at..range.start, memory).map(|byte| (space, byte));
                }
                at = at.max(range.end);
            }
        }
        let wrong = wrong.map(|(space, byte)| {
            format!("{} changes byte {byte} ({})", self.name(tick, op), self.tensors_at(space, byte))
        });
        self.check("ops write only what they declare", wrong);

        let mut left = None;
        for t in touched.iter().filter(|t| self.poisoned.contains(&(t.space, t.range.clone()))) {
            let tensor = self.set.tensor(t.tensor);
            if tensor.category == Category::Workspace {
                continue;
            }
            let size = tensor.dtype.bytes() as usize;
            let before = &self.bytes[&t.space][index_range(&t.range)];
            let now = memory.view(t.space, t.range.clone());
            if let Some(element) = now.chunks_exact(size).position(|element| element == &before[..size]) {
                left = Some(format!("{} leaves element {element} of `{}`", self.name(tick, op), tensor.name));
            }
        }
        self.check("ops write all they declare as written", left);
        for (space, range) in written {
            self.record(space, range, memory);
        }
        let has_stray_write = SPACES.iter().any(|&space| memory.has_stray_writes(space)).then(|| self.name(tick, op));
        self.check("no writes outside the arena", has_stray_write);
        let dead = self.phases[self.phase].1.get(&(self.start + tick)).cloned().unwrap_or_default();
        for (id, slot) in dead {
            let (first, tensor) = (self.placement.offset(id, slot), self.set.tensor(id));
            let (space, range) = (tensor.space, first..first + tensor.bytes());
            self.poison(space, range, memory);
        }
        if tick as usize == self.trace.len() {
            self.before = Some(self.phase);
        }
    }
}
