//! Measured use of a device's arena: the tensors in use while ops run, and the bytes of each category at the fullest
//! moment. It checks what the plan predicts, so it knows neither the planner's lifetimes nor the placement.
//!
//! `ArenaUse` observes the first run of each Program after a start or a re-plan. In a loop over micro-batches it
//! observes all runs of the first step, because some ops run for the last micro-batch only. Later runs cost nothing.
//!
//! | tensor | in use |
//! |---|---|
//! | persistent | always |
//! | reserved for a phase ([`Lifetime::Phase`]) | in the whole phase, if an op of the phase accessed it |
//! | transient | from the first to the last op that accessed it |
//! | input of a Program | also from the start of the phase: the host fills it |
//! | output of a Program | also to the end of the phase: the host reads it |
//!
//! Time is the number of an op in its phase, in the order in which devices issue ops. Ops of different queues overlap,
//! so the order in which they end is unknown. Micro-batches share the numbers of their ops: a tensor is in use at an op
//! if it is for any micro-batch.

use plimsoll_core::{Bytes, Category, Space};
use plimsoll_device::device::{Memory, Observer, ProgramCall};
use plimsoll_device::error::DeviceError;
use plimsoll_program::{Lifetime, Op, Operand, Program, ProgramKind, ProgramSet, TensorId};
use std::collections::BTreeMap;

/// A slot of a tensor: the tensor, and the index of the slot from 0.
pub type Slot = (TensorId, u32);

/// Bytes by category of tensors.
pub type BytesByCategory = BTreeMap<Category, Bytes>;

/// The op at which the most bytes of tensors were in use, as measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FullestMoment {
    /// The Program of the op.
    pub program: ProgramKind,
    /// Number of the op in its Program, counted from 1.
    pub tick: u32,
    /// Buffers in use other than persistent tensors, each with its slots. Several slots share a buffer if an op wrote
    /// its result in place.
    pub buffers: Vec<Vec<Slot>>,
    /// Bytes of the tensors in use, persistent ones included and gaps between tensors not.
    pub by_category: BytesByCategory,
}

/// Adds the gaps between tensors as workspace, so that the categories sum to `measured_bytes`, the high-water mark of
/// the arena. A plan counts gaps in the same way.
pub(crate) fn with_gaps(mut tensors: BytesByCategory, measured_bytes: Bytes) -> BytesByCategory {
    let attributed: Bytes = tensors.values().copied().sum();
    *tensors.entry(Category::Workspace).or_default() += measured_bytes.saturating_sub(attributed);
    tensors
}

/// A recorder of the accesses to the tensors in a device's arena. The default records nothing.
#[derive(Default)]
pub(super) struct ArenaUse {
    slots: SlotTable,
    /// Bytes of the persistent tensors in the arena.
    persistent: BytesByCategory,
    /// Programs in the order of the set.
    programs: Vec<RecordedProgram>,
    /// Phases in the order of the set.
    phases: Vec<RecordedPhase>,
    /// The run that is observed now; `None` between runs.
    run: Option<ObservedRun>,
    /// The fullest moment of the phases whose record is complete; `None` without such a phase.
    concluded: Option<PhaseMoment>,
    /// Bytes of the tensors at the fullest moment; `None` if no op was recorded, or until they are computed.
    tensors_in_use: Option<BytesByCategory>,
    /// Whether a run was recorded since the last [`ArenaUse::take_news`].
    has_news: bool,
}

/// A run of a Program.
#[derive(Clone, Copy)]
struct ObservedRun {
    /// Index of the Program in the set.
    program: usize,
    /// Number of the micro-batch in the step, counted from 0.
    micro_batch: i64,
}

/// The fullest moment of a phase.
#[derive(Clone)]
struct PhaseMoment {
    /// Index of the phase in the set.
    phase: usize,
    moment: FullestMoment,
}

/// The slots of all tensors in the arena that are not persistent, numbered tensor by tensor.
#[derive(Default)]
struct SlotTable {
    tensors: Vec<RecordedTensor>,
    slots: Vec<Slot>,
}

struct RecordedTensor {
    category: Category,
    /// Bytes of a slot.
    bytes: u64,
    slot_count: u32,
    /// Whether the bytes are reserved for a whole phase.
    is_reserved: bool,
    /// Number of the first slot; `None` for a persistent tensor and for one outside the arena.
    first_slot: Option<usize>,
}

struct RecordedProgram {
    kind: ProgramKind,
    /// Index of the Program's phase; `None` for a Program in no phase, which is not recorded.
    phase: Option<usize>,
    /// Number of ops of earlier Programs of the phase.
    start: u32,
    op_count: u32,
    inputs: Vec<TensorId>,
    outputs: Vec<TensorId>,
    /// Blocks in order; empty once the Program is recorded.
    blocks: Vec<RecordedBlock>,
    /// Whether nothing more is recorded.
    is_done: bool,
}

/// The ticks of a block, and the values of its variable.
struct RecordedBlock {
    /// Number of its first op in the Program, counted from 1.
    first_tick: u32,
    /// Number of ops of an iteration.
    op_count: u32,
    first: i64,
    step: i64,
}

/// First and last op of a phase, by number, that accessed a slot.
#[derive(Clone, Copy)]
struct Span {
    first: u32,
    last: u32,
}

/// An op that may write its result over its input.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct InPlacePair {
    /// Number of the op in the phase.
    time: u32,
    /// Number of the slot that is read.
    read: usize,
    /// Number of the slot that is written.
    written: usize,
}

/// The accesses of a phase.
#[derive(Default)]
struct RecordedPhase {
    /// Accesses by slot number; empty before the first run.
    spans: Vec<Option<Span>>,
    pairs: Vec<InPlacePair>,
    /// The time at which the host reads outputs: one after the last op.
    end: u32,
    /// Whether an op was recorded.
    has_run: bool,
}

/// Slots that share bytes, and the ops for which these are in use.
struct UsedBuffer {
    bytes: u64,
    category: Category,
    span: Span,
    /// Slot numbers; empty for a buffer that is part of another one.
    slots: Vec<usize>,
}

impl SlotTable {
    fn new(set: &ProgramSet) -> SlotTable {
        let mut table = SlotTable::default();
        for (id, tensor) in (0..).map(TensorId).zip(&set.tensors) {
            let is_temporary = tensor.lifetime != Lifetime::Persistent && tensor.space == Space::Device;
            table.tensors.push(RecordedTensor {
                category: tensor.category,
                bytes: tensor.bytes(),
                slot_count: tensor.slots,
                is_reserved: tensor.lifetime == Lifetime::Phase,
                first_slot: is_temporary.then_some(table.slots.len()),
            });
            let slots = if is_temporary { tensor.slots } else { 0 };
            table.slots.extend((0..slots).map(|slot| (id, slot)));
        }
        table
    }

    /// Returns the number of a tensor's slot. `slot` counts modulo the number of slots, as in an op. `None` for a tensor
    /// without numbers.
    fn number(&self, tensor: TensorId, slot: i64) -> Option<usize> {
        let tensor = &self.tensors[tensor.0 as usize];
        tensor.first_slot.map(|first| first + slot.rem_euclid(i64::from(tensor.slot_count)) as usize)
    }

    fn tensor(&self, number: usize) -> &RecordedTensor {
        &self.tensors[self.slots[number].0.0 as usize]
    }

    /// Returns the buffers of a phase. Input and output of an op that may work in place share a buffer if they have
    /// equal sizes, no later op accessed the input and no earlier one the output.
    fn buffers(&self, phase: &RecordedPhase) -> Vec<UsedBuffer> {
        let mut buffer_of = vec![None; phase.spans.len()];
        let mut buffers: Vec<UsedBuffer> = Vec::new();
        for (number, span) in phase.spans.iter().enumerate() {
            let Some(accessed) = *span else { continue };
            let RecordedTensor { category, bytes, is_reserved, .. } = *self.tensor(number);
            let span = if is_reserved { Span { first: 0, last: phase.end } } else { accessed };
            buffer_of[number] = Some(buffers.len());
            buffers.push(UsedBuffer { bytes, category, span, slots: vec![number] });
        }
        let mut pairs = phase.pairs.clone();
        pairs.sort_unstable();
        for InPlacePair { time, read, written } in pairs {
            let (Some(from), Some(to)) = (buffer_of[read], buffer_of[written]) else { continue };
            let (before, after) = (&buffers[from], &buffers[to]);
            if from == to || before.span.last != time || after.span.first != time || before.bytes != after.bytes {
                continue;
            }
            buffers[from].span.last = after.span.last;
            let moved = std::mem::take(&mut buffers[to].slots);
            moved.iter().for_each(|number| buffer_of[*number] = Some(from));
            buffers[from].slots.extend(moved);
        }
        buffers.retain(|buffer| !buffer.slots.is_empty());
        buffers
    }
}

impl RecordedProgram {
    fn new(program: &Program) -> RecordedProgram {
        let (mut blocks, mut first_tick) = (Vec::new(), 1);
        for block in program.blocks.iter().filter(|block| block.repeat > 0 && !block.ops.is_empty()) {
            let op_count = block.ops.len() as u32;
            blocks.push(RecordedBlock { first_tick, op_count, first: block.first, step: block.step });
            first_tick += op_count * block.repeat;
        }
        RecordedProgram {
            kind: program.kind,
            phase: None,
            start: 0,
            op_count: first_tick - 1,
            inputs: program.inputs.clone(),
            outputs: program.outputs.clone(),
            blocks,
            is_done: false,
        }
    }

    /// Returns the value of the block's variable at op number `tick`, counted from 1.
    fn variable(&self, tick: u32) -> i64 {
        let after = self.blocks.partition_point(|block| block.first_tick <= tick);
        let Some(block) = after.checked_sub(1).map(|index| &self.blocks[index]) else { return 0 };
        block.first + block.step * i64::from((tick - block.first_tick) / block.op_count)
    }

    /// Returns the number of the op in the Program, counted from 1, that is op number `time` of the phase; `None` if
    /// that op belongs to another Program.
    fn tick_at(&self, time: u32) -> Option<u32> {
        time.checked_sub(self.start).filter(|tick| (1..=self.op_count).contains(tick))
    }
}

impl RecordedPhase {
    /// Records an access to a slot; does nothing without a slot.
    fn access(&mut self, slot: Option<usize>, time: u32) {
        let Some(span) = slot.and_then(|number| self.spans.get_mut(number)) else { return };
        let Span { first, last } = span.unwrap_or(Span { first: time, last: time });
        *span = Some(Span { first: first.min(time), last: last.max(time) });
    }
}

impl ArenaUse {
    /// Creates a recorder for the Programs of a device.
    pub(super) fn new(set: &ProgramSet) -> ArenaUse {
        let mut persistent = BytesByCategory::new();
        let in_arena = set.tensors.iter().filter(|tensor| tensor.space == Space::Device);
        for tensor in in_arena.filter(|tensor| tensor.lifetime == Lifetime::Persistent) {
            *persistent.entry(tensor.category).or_default() += Bytes(tensor.bytes() * u64::from(tensor.slots));
        }
        let mut programs: Vec<RecordedProgram> = set.programs.iter().map(RecordedProgram::new).collect();
        let mut phases = Vec::new();
        for (number, phase) in set.phases.iter().enumerate() {
            let mut start = 0;
            for &index in &phase.programs {
                let program = &mut programs[index];
                (program.phase, program.start) = (Some(number), start);
                start += program.op_count;
            }
            phases.push(RecordedPhase { end: start + 1, ..RecordedPhase::default() });
        }
        ArenaUse { slots: SlotTable::new(set), persistent, programs, phases, ..ArenaUse::default() }
    }

    /// Begins a run of a Program. Returns whether the run is to be observed, see [`ArenaUse::observer`].
    pub(super) fn begin(&mut self, call: ProgramCall) -> bool {
        let is_recorded = |program: &RecordedProgram| program.kind == call.program && !program.is_done;
        let Some(program) = self.programs.iter().position(is_recorded) else { return false };
        let Some(phase) = self.programs[program].phase.map(|phase| &mut self.phases[phase]) else { return false };
        let run = ObservedRun { program, micro_batch: i64::from(call.micro_batch) };
        phase.spans.resize(self.slots.slots.len(), None);
        for input in &self.programs[program].inputs {
            phase.access(self.slots.number(*input, run.micro_batch), 0);
        }
        self.run = Some(run);
        true
    }

    /// Returns an observer of the run that [`ArenaUse::begin`] began. It passes all ops to `inner`.
    pub(super) fn observer<'a>(&'a mut self, inner: &'a mut dyn Observer) -> ArenaObserver<'a> {
        ArenaObserver { recorder: self, inner }
    }

    /// Ends an observed run that succeeded; does nothing without one. After an error, the ops that ran stay recorded,
    /// and the next run of the Program is observed too.
    pub(super) fn end(&mut self, call: ProgramCall) {
        let Some(run) = self.run.take() else { return };
        let program = &mut self.programs[run.program];
        if let Some(phase) = program.phase.map(|phase| &mut self.phases[phase]) {
            for output in &program.outputs {
                phase.access(self.slots.number(*output, 0), phase.end);
            }
        }
        if call.is_last_micro_batch {
            program.is_done = true;
            program.blocks = Vec::new();
        }
        (self.tensors_in_use, self.has_news) = (None, true);
    }

    /// Records an op of the observed run. `tick` is its number in the Program, counted from 1.
    fn record(&mut self, tick: u32, op: &Op) {
        let Some(ObservedRun { program, micro_batch }) = self.run else { return };
        let (slots, program) = (&self.slots, &self.programs[program]);
        let Some(phase) = program.phase.map(|phase| &mut self.phases[phase]) else { return };
        let (variable, time) = (program.variable(tick), program.start + tick);
        let number = |operand: Operand| slots.number(operand.tensor, operand.slot.at(variable, micro_batch));
        op.for_each_access(&|_| 0, &mut |access| phase.access(number(access.operand), time));
        let pair = op.in_place().and_then(|(read, written)| number(read).zip(number(written)));
        phase.pairs.extend(pair.map(|(read, written)| InPlacePair { time, read, written }));
        phase.has_run = true;
    }

    /// Returns whether a run was recorded since the last call.
    pub(super) fn take_news(&mut self) -> bool {
        std::mem::take(&mut self.has_news)
    }

    /// Returns the bytes of the tensors in use at the fullest moment, without gaps between tensors; `None` if no op was
    /// recorded.
    pub(super) fn tensors_in_use(&mut self) -> Option<&BytesByCategory> {
        if self.tensors_in_use.is_none() {
            self.tensors_in_use = self.fullest_moment().map(|moment| moment.by_category);
        }
        self.tensors_in_use.as_ref()
    }

    /// Returns the moment with the most bytes in use; `None` if no op was recorded. Of equally full moments, the first
    /// one of the last such phase.
    pub(super) fn fullest_moment(&mut self) -> Option<FullestMoment> {
        self.conclude_phases();
        let running = (0..self.phases.len()).filter_map(|phase| self.fullest_of_phase(phase));
        running.chain(self.concluded.clone()).max_by_key(PhaseMoment::order).map(|fullest| fullest.moment)
    }

    /// Keeps the fullest moment of the phases of which all Programs are recorded, and frees their records.
    fn conclude_phases(&mut self) {
        for number in 0..self.phases.len() {
            let mut of_phase = self.programs.iter().filter(|program| program.phase == Some(number));
            if self.phases[number].has_run && of_phase.all(|program| program.is_done) {
                let found = self.fullest_of_phase(number).into_iter();
                self.concluded = found.chain(self.concluded.take()).max_by_key(PhaseMoment::order);
                self.phases[number] = RecordedPhase { end: self.phases[number].end, ..RecordedPhase::default() };
            }
        }
    }

    /// Returns the first of the fullest moments of a phase; `None` without a record.
    fn fullest_of_phase(&self, number: usize) -> Option<PhaseMoment> {
        let phase = self.phases.get(number).filter(|phase| phase.has_run)?;
        let buffers = self.slots.buffers(phase);
        let time = fullest_time(&buffers);
        let mut of_phase = self.programs.iter().filter(|program| program.phase == Some(number));
        let (program, tick) = of_phase.find_map(|program| Some((program.kind, program.tick_at(time)?)))?;
        let (mut by_category, mut slots) = (self.persistent.clone(), Vec::new());
        for buffer in buffers.into_iter().filter(|buffer| buffer.span.first <= time && time <= buffer.span.last) {
            *by_category.entry(buffer.category).or_default() += Bytes(buffer.bytes);
            slots.push(buffer.slots.iter().map(|number| self.slots.slots[*number]).collect());
        }
        Some(PhaseMoment { phase: number, moment: FullestMoment { program, tick, buffers: slots, by_category } })
    }
}

impl PhaseMoment {
    /// Returns a key that is largest for the moment with the most bytes, and among equal ones for the last phase.
    fn order(&self) -> (Bytes, usize) {
        (self.moment.by_category.values().copied().sum(), self.phase)
    }
}

/// Returns the first op of a phase, by its number, at which the most bytes are in use; 1 without buffers.
fn fullest_time(buffers: &[UsedBuffer]) -> u32 {
    let mut changes: Vec<(u32, i128)> = Vec::with_capacity(2 * buffers.len());
    for UsedBuffer { bytes, span, .. } in buffers {
        // The host fills inputs at time 0, when no op runs.
        changes.push((span.first.max(1), i128::from(*bytes)));
        changes.push((span.last + 1, -i128::from(*bytes)));
    }
    changes.sort_unstable();
    let (mut bytes, mut fullest) = (0, (1, 0));
    // At equal times, decreases come first.
    for (time, change) in changes {
        bytes += change;
        if bytes > fullest.1 {
            fullest = (time, bytes);
        }
    }
    fullest.0
}

/// An observer that records the accesses of ops and passes the ops to another observer.
pub(super) struct ArenaObserver<'a> {
    recorder: &'a mut ArenaUse,
    inner: &'a mut dyn Observer,
}

impl Observer for ArenaObserver<'_> {
    fn before(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) -> Result<(), DeviceError> {
        self.inner.before(tick, op, memory)
    }

    fn after(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) {
        self.recorder.record(tick, op);
        self.inner.after(tick, op, memory);
    }

    fn serializes_ops(&self) -> bool {
        self.inner.serializes_ops()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{DType, WorkKind};
    use plimsoll_device::device::{NoMemory, NoObserver};
    use plimsoll_program::builder::Builder;
    use plimsoll_program::op::Activation;
    use plimsoll_program::workspace::Kernels;
    use plimsoll_program::{Block, OpKind, Phase};

    fn add(x: Operand, into: Operand) -> Op {
        OpKind::Add { x, into, elements: 1 }.into()
    }

    fn fill(into: TensorId) -> Op {
        OpKind::Fill { into: Operand::whole(into), value: 0.0, elements: 1 }.into()
    }

    fn program(kind: ProgramKind, inputs: Vec<TensorId>, outputs: Vec<TensorId>, blocks: Vec<Block>) -> Program {
        Program { work: WorkKind::Forward, kind, inputs, outputs, blocks }
    }

    /// Returns a set with 40 bytes of weights and of the phases that `fill_in` adds.
    fn set(fill_in: impl FnOnce(&mut Builder)) -> ProgramSet {
        let mut builder = Builder::new(DType::F32, Kernels::Cpu { threads: 1 });
        builder.persistent("weight", &[5], DType::F32, Category::Weight, 2);
        fill_in(&mut builder);
        builder.set
    }

    /// Issues the ops of a Program to the recorder, as a device does. Returns whether the recorder observed them.
    fn run(recorder: &mut ArenaUse, set: &ProgramSet, call: ProgramCall) -> bool {
        if !recorder.begin(call) {
            return false;
        }
        let trace = (1..).zip(set.program(call.program).unwrap().trace());
        for (tick, (op, _)) in trace.filter(|(_, (op, _))| op.runs(call.is_last_micro_batch)) {
            recorder.observer(&mut NoObserver).after(tick, op, &mut NoMemory);
        }
        recorder.end(call);
        true
    }

    fn bytes(expected: &[(Category, u64)]) -> BytesByCategory {
        expected.iter().map(|(category, bytes)| (*category, Bytes(*bytes))).collect()
    }

    /// Three layers that each keep 100 bytes for a backward pass in reverse order.
    fn layers() -> ProgramSet {
        set(|builder| {
            let x = builder.transient("x", &[4], DType::F32, Category::Activation, 1);
            let kept = builder.transient("kept", &[25], DType::F32, Category::Activation, 3);
            let temporary = builder.transient("temporary", &[50], DType::F32, Category::Workspace, 1);
            let gradient = builder.transient("gradient", &[20], DType::F32, Category::Gradient, 1);
            let on_host = builder.transient("home", &[9000], DType::F32, Category::Activation, 1);
            builder.set.tensors[on_host.0 as usize].space = Space::Host;
            let keep = add(Operand::whole(x), Operand::layer(kept, 0));
            let use_kept = add(Operand::layer(kept, 0), Operand::whole(temporary));
            let forward = Block { name: "layer".into(), first: 0, step: 1, repeat: 3, ops: vec![keep, use_kept] };
            let ops = vec![fill(on_host), add(Operand::layer(kept, 0), Operand::whole(gradient))];
            let backward = Block { name: "layer".into(), first: 2, step: -1, repeat: 3, ops };
            let begin = Block::once("begin", vec![fill(gradient)]);
            builder.set.programs = vec![
                program(ProgramKind::Forward, vec![x], vec![], vec![forward]),
                program(ProgramKind::Backward, vec![], vec![gradient], vec![begin, backward]),
            ];
            builder.set.phases = vec![Phase { programs: vec![0, 1] }];
        })
    }

    #[test]
    fn fullest_moment_follows_the_accessed_layers() {
        let set = layers();
        let mut recorder = ArenaUse::new(&set);
        assert_eq!((recorder.fullest_moment(), recorder.tensors_in_use()), (None, None));
        assert!(run(&mut recorder, &set, ProgramCall::of(ProgramKind::Forward)));
        // No backward pass has read a layer, so only the layer of op 2 and the input, of 16 bytes, count.
        let moment = recorder.fullest_moment().unwrap();
        assert_eq!((moment.program, moment.tick), (ProgramKind::Forward, 2));
        let one_layer = [(Category::Weight, 40), (Category::Activation, 116), (Category::Workspace, 200)];
        assert_eq!(moment.by_category, bytes(&one_layer));
        assert!(run(&mut recorder, &set, ProgramCall::of(ProgramKind::Backward)));
        let all = [(Category::Weight, 40), (Category::Activation, 316), (Category::Workspace, 200)];
        assert_eq!(recorder.tensors_in_use(), Some(&bytes(&all)));
        let moment = recorder.fullest_moment().unwrap();
        assert_eq!((moment.program, moment.tick, moment.buffers.len()), (ProgramKind::Forward, 5, 5));
        assert_eq!(with_gaps(moment.by_category, Bytes(600))[&Category::Workspace], Bytes(244));
    }

    #[test]
    fn other_ops_change_the_record() {
        let set = layers();
        // Op 4 is neither the first nor the last of any tensor. Without op 5 the last layer begins later, and the input
        // ends earlier. Without op 6 the temporary tensor ends before the last layer begins.
        for (skipped, activation) in [(4, 316), (5, 300), (6, 216)] {
            let mut recorder = ArenaUse::new(&set);
            for kind in [ProgramKind::Forward, ProgramKind::Backward] {
                assert!(recorder.begin(ProgramCall::of(kind)));
                let trace = (1..).zip(set.program(kind).unwrap().trace());
                for (tick, (op, _)) in trace.filter(|(tick, _)| kind == ProgramKind::Backward || *tick != skipped) {
                    recorder.observer(&mut NoObserver).after(tick, op, &mut NoMemory);
                }
                recorder.end(ProgramCall::of(kind));
            }
            let expected = [(Category::Weight, 40), (Category::Activation, activation), (Category::Workspace, 200)];
            assert_eq!(recorder.tensors_in_use(), Some(&bytes(&expected)), "op {skipped}");
        }
    }

    #[test]
    fn in_place_result_shares_the_bytes_of_its_input() {
        for (reads_input_again, expected) in [(false, 120), (true, 200)] {
            let set = set(|builder| {
                let [gate_up, dgate_up] = ["gate_up", "dgate_up"].map(|name| builder.activation(name, &[20], 1));
                let dout = builder.activation("dout", &[10], 1);
                let [gate, result, above] = [gate_up, dgate_up, dout].map(Operand::whole);
                let (rows, ffn, activation) = (1, 10, Activation::Silu);
                let grad = OpKind::GluGrad { gate_up: gate, dout: above, dgate_up: result, rows, ffn, activation };
                let mut ops = vec![fill(gate_up), fill(dout), grad.into(), fill(dgate_up)];
                ops.extend(reads_input_again.then(|| fill(gate_up)));
                let blocks = vec![Block::once("grad", ops)];
                builder.set.programs = vec![program(ProgramKind::Backward, vec![], vec![], blocks)];
                builder.set.phases = vec![Phase { programs: vec![0] }];
            });
            let mut recorder = ArenaUse::new(&set);
            assert!(run(&mut recorder, &set, ProgramCall::of(ProgramKind::Backward)));
            assert_eq!(recorder.tensors_in_use().unwrap()[&Category::Activation], Bytes(expected));
        }
    }

    #[test]
    fn reserved_and_handed_over_tensors_outlast_their_ops() {
        let set = set(|builder| {
            let cache = builder.activation("cache", &[8], 2);
            builder.set.tensors[cache.0 as usize].lifetime = Lifetime::Phase;
            let [input, output] = ["input", "output"].map(|name| builder.activation(name, &[3], 1));
            let large = builder.transient("large", &[100], DType::F32, Category::Workspace, 1);
            let write = add(Operand::whole(input), Operand::slot(cache, 1));
            let prefill = vec![Block::once("prefill", vec![fill(large)])];
            let decode = vec![Block::once("decode", vec![write, fill(output)])];
            builder.set.programs = vec![
                program(ProgramKind::Prefill, vec![], vec![], prefill),
                program(ProgramKind::Decode, vec![input], vec![output], decode),
            ];
            builder.set.phases = vec![Phase { programs: vec![0, 1] }];
        });
        let mut recorder = ArenaUse::new(&set);
        for kind in [ProgramKind::Prefill, ProgramKind::Decode] {
            assert!(run(&mut recorder, &set, ProgramCall::of(kind)));
        }
        // Slot 1 of the cache and the input are reserved from the start of the phase. Slot 0 was never accessed.
        let expected = [(Category::Weight, 40), (Category::Activation, 32 + 12), (Category::Workspace, 400)];
        assert_eq!(recorder.tensors_in_use(), Some(&bytes(&expected)));
    }

    #[test]
    fn only_the_first_step_is_observed() {
        let set = set(|builder| {
            let activations = builder.activation("activations", &[10], 4);
            let mut operand = Operand::whole(activations);
            operand.slot.micro_batch = 1;
            builder.set.tensors[activations.0 as usize].lifetime = Lifetime::Phase;
            let blocks = vec![Block::once("forward", vec![add(operand, operand)])];
            builder.set.programs = vec![program(ProgramKind::Forward, vec![], vec![], blocks)];
            builder.set.phases = vec![Phase { programs: vec![0] }];
        });
        let mut recorder = ArenaUse::new(&set);
        let call = ProgramCall::of(ProgramKind::Forward);
        for (micro_batch, slots) in [(0, 1), (1, 2), (2, 3)] {
            assert!(run(
                &mut recorder,
                &set,
                ProgramCall { micro_batch, is_last_micro_batch: micro_batch == 2, ..call }
            ));
            assert!(recorder.take_news() && !recorder.take_news());
            // The slots of micro-batches that ran count, and no others.
            assert_eq!(recorder.tensors_in_use().unwrap()[&Category::Activation], Bytes(40 * slots));
        }
        assert!(!run(&mut recorder, &set, ProgramCall { micro_batch: 3, ..call }) && !recorder.take_news());
        assert_eq!(recorder.tensors_in_use().unwrap()[&Category::Activation], Bytes(120));
        assert!(!ArenaUse::default().begin(call));
    }

    #[test]
    fn failed_runs_are_observed_again() {
        let set = layers();
        let mut recorder = ArenaUse::new(&set);
        let call = ProgramCall::of(ProgramKind::Forward);
        assert!(recorder.begin(call));
        let (op, _) = set.programs[0].trace().next().unwrap();
        let mut inner = NoObserver;
        let mut observer = recorder.observer(&mut inner);
        assert!(!observer.serializes_ops() && observer.before(1, op, &mut NoMemory).is_ok());
        // The op was refused, so the device calls no second hook.
        assert_eq!(recorder.tensors_in_use(), None);
        assert!(run(&mut recorder, &set, call) && !run(&mut recorder, &set, call));
        assert_eq!(recorder.tensors_in_use().unwrap()[&Category::Workspace], Bytes(200));
    }

    #[test]
    fn phase_with_persistent_tensors_only_has_their_bytes() {
        let set = set(|builder| {
            let blocks = vec![Block::once("update", vec![fill(TensorId(0))])];
            builder.set.programs = vec![program(ProgramKind::Update, vec![], vec![], blocks)];
            builder.set.phases = vec![Phase { programs: vec![0] }];
        });
        let mut recorder = ArenaUse::new(&set);
        assert!(run(&mut recorder, &set, ProgramCall::of(ProgramKind::Update)));
        assert_eq!(recorder.tensors_in_use(), Some(&bytes(&[(Category::Weight, 40)])));
    }
}
