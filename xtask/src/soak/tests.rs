//! The soak can fail: each fault that it is there to find is put in, and found.

use super::case::Case;
use super::checks::placed;
use super::drive::{How, drive};
use super::tally::Tally;
use super::watch::Look;
use plimsoll_core::{Bytes, Space};
use plimsoll_device::device::{Call, Device, DeviceError, FileSpace, Memory, Observer};
use plimsoll_plan::search::{Answer, search};
use plimsoll_program::{Op, OpKind, TensorId};

/// A case that trains, evaluates and generates.
fn case() -> Case {
    let all = |case: &Case| case.optimizer.is_some() && case.evaluate && case.generation.is_some();
    (0..).map(|number| Case::new(3, number)).find(all).expect("there are many")
}

fn plan(case: &Case) -> Answer {
    search(&case.question(&case.device(Bytes::gib(1), case.threads), plimsoll_core::DType::F32))
}

/// The kinds of checks that fail.
fn failures(case: &Case, answer: &Answer, how: How) -> Vec<String> {
    let mut tally = Tally::default();
    drive(case, answer, how, &mut tally).expect("it runs all the same");
    tally.kinds.iter().filter(|(_, kind)| !kind.failed.is_empty()).map(|(name, _)| name.clone()).collect()
}

/// A device with a fault: `fault` is called with the memory after every op.
struct Faulty {
    inner: Box<dyn Device>,
    fault: fn(&Op, &mut dyn Memory),
    heap: usize,
}

struct Meddler<'a> {
    outer: &'a mut dyn Observer,
    fault: fn(&Op, &mut dyn Memory),
}

impl Observer for Meddler<'_> {
    fn before(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) -> Result<(), DeviceError> {
        self.outer.before(tick, op, memory)
    }

    fn after(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) {
        (self.fault)(op, memory);
        self.outer.after(tick, op, memory);
    }
}

impl Device for Faulty {
    fn run_observed(
        &mut self,
        call: Call,
        files: &mut dyn FileSpace,
        outer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        std::hint::black_box(vec![1u8; self.heap]);
        self.inner.run_observed(call, files, &mut Meddler { outer, fault: self.fault })
    }

    fn settle(&mut self) -> Result<(), DeviceError> {
        self.inner.settle()
    }

    fn write(&mut self, tensor: TensorId, slot: u32, bytes: &[u8]) {
        self.inner.write(tensor, slot, bytes);
    }

    fn read(&mut self, tensor: TensorId, slot: u32, bytes: &mut [u8]) {
        self.inner.read(tensor, slot, bytes);
    }

    fn memory(&mut self) -> &mut dyn Memory {
        self.inner.memory()
    }
}

fn nothing(_: &Op, _: &mut dyn Memory) {}

#[test]
fn a_write_beyond_what_is_declared_is_found() {
    fn fault(op: &Op, memory: &mut dyn Memory) {
        if matches!(op.kind, OpKind::SwiGlu { .. }) {
            // Scalars and metrics stand lowest: no layer writes them.
            let byte = memory.look(Space::Device, 70..71)[0];
            memory.fill(Space::Device, 70, &[byte ^ 1]);
        }
    }
    let case = case();
    let how = How {
        look: Look::EveryOp,
        damage: |inner| Box::new(Faulty { inner, fault, heap: 0 }),
        ..How::new(&case, "faulty")
    };
    assert!(failures(&case, &plan(&case), how).contains(&"ops write only what they declare".to_owned()));
}

#[test]
fn memory_outside_the_arena_is_found() {
    let case = case();
    let how =
        How { damage: |inner| Box::new(Faulty { inner, fault: nothing, heap: 1 << 20 }), ..How::new(&case, "faulty") };
    assert!(failures(&case, &plan(&case), how).contains(&"heap while a program runs, bytes".to_owned()));
}

#[test]
fn bytes_that_are_planned_and_not_used_are_found() {
    let case = case();
    let mut answer = plan(&case);
    answer.layout.placement.arena_bytes += 4;
    let found = failures(&case, &answer, How::new(&case, "faulty"));
    assert!(found.contains(&"arena planned but not used, bytes".to_owned()), "{found:?}");
}

#[test]
fn tensors_that_live_together_on_the_same_bytes_are_found() {
    let case = case();
    let mut answer = plan(&case);
    let set = &answer.set;
    let place = |name: &str| set.find(name).expect("a tensor of every plan").0 as usize;
    let (one, other) = (place("train.tokens"), place("train.labels"));
    answer.layout.placement.offsets[one] = answer.layout.placement.offsets[other].clone();
    let mut tally = Tally::default();
    placed(&case, &answer.set, &answer.layout, &mut tally);
    assert_eq!(tally.failed(), 1, "{}", tally.lines());
}

#[test]
fn a_tensor_that_dies_too_early_changes_the_bits() {
    let case = case();
    let answer = plan(&case);
    let whole = drive(&case, &answer, How::new(&case, "whole"), &mut Tally::default()).expect("it runs");
    // As a planner would have it that forgot that the backward pass reads the inputs.
    let mut forgetful = answer.clone();
    let backward = forgetful.set.program_index("backward").expect("it trains");
    let phase =
        forgetful.set.phases.iter_mut().find(|phase| phase.programs.contains(&backward)).expect("it has a phase");
    phase.programs.retain(|&program| program != backward);
    forgetful.set.phases.push(plimsoll_program::Phase { programs: vec![backward] });
    let how = How { look: Look::EveryOp, ..How::new(&case, "forgetful") };
    let poisoned = std::panic::catch_unwind(|| drive(&case, &forgetful, how, &mut Tally::default()));
    assert!(!matches!(poisoned, Ok(Ok(numbers)) if numbers.same_bits(&whole)));
}

#[test]
fn an_op_that_computes_something_else_is_named() {
    fn fault(op: &Op, memory: &mut dyn Memory) {
        if let OpKind::ClipFactor { .. } = op.kind {
            // Scalars stand lowest.
            memory.fill(Space::Device, 0, &[0x40; 64]);
        }
    }
    let case = case();
    let how = How { look: Look::Twin, ..How::new(&case, "twin") };
    assert_eq!(failures(&case, &plan(&case), how), Vec::<String>::new());
    let how = How { damage: |inner| Box::new(Faulty { inner, fault, heap: 0 }), ..how };
    assert_eq!(failures(&case, &plan(&case), how), ["clip_factor in f32: off the CPU's in f64"]);
}
