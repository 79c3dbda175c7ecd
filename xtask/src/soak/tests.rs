//! Tests of the soak itself: each kind of fault that it has to find is injected and found.

use super::case::Case;
use super::checks::check_placement;
use super::execution::{ExecutionOptions, execute};
use super::observed_device::Observation;
use super::tally::Tally;
use plimsoll_core::{Bytes, Space};
use plimsoll_device::device::{Device, FileSpace, Memory, Observer, ProgramCall};
use plimsoll_device::error::DeviceError;
use plimsoll_plan::search::{PlanOutcome, search};
use plimsoll_program::scalars::{SCALARS, Scalar};
use plimsoll_program::{Op, OpKind, ProgramKind, TensorId};

/// Returns the cases that train, evaluate and generate.
fn cases() -> impl Iterator<Item = Case> {
    let all = |case: &Case| case.optimizer.is_some() && case.evaluate && case.generation.is_some();
    (0..).map(|number| Case::new(3, number)).filter(all)
}

/// Returns a case that trains, evaluates and generates.
fn case() -> Case {
    cases().next().expect("there are many")
}

fn plan(case: &Case) -> PlanOutcome {
    search(&case.request(&case.device_spec(Bytes::gib(1), case.threads), plimsoll_core::DType::F32))
}

/// Executes a plan with these options and returns the names of the checks that fail.
fn failures(case: &Case, outcome: &PlanOutcome, options: ExecutionOptions) -> Vec<String> {
    let mut tally = Tally::default();
    execute(case, outcome, options, &mut tally).expect("it runs in spite of the fault");
    tally.kinds.iter().filter(|(_, kind)| !kind.failed.is_empty()).map(|(name, _)| name.clone()).collect()
}

/// A device with injected faults: `fault` may change the memory after every op, and each Program allocates `heap`
/// bytes.
struct Faulty {
    inner: Box<dyn Device>,
    fault: fn(&Op, &mut dyn Memory),
    heap: usize,
}

struct FaultInjector<'a> {
    outer: &'a mut dyn Observer,
    fault: fn(&Op, &mut dyn Memory),
}

impl Observer for FaultInjector<'_> {
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
        call: ProgramCall,
        files: &mut dyn FileSpace,
        outer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        std::hint::black_box(vec![1u8; self.heap]);
        self.inner.run_observed(call, files, &mut FaultInjector { outer, fault: self.fault })
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.inner.synchronize()
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
fn undeclared_write_is_found() {
    fn fault(op: &Op, memory: &mut dyn Memory) {
        if matches!(op.kind, OpKind::Glu { .. }) {
            // Scalars and metrics are at the start of the arena; no layer writes them.
            let byte = memory.view(Space::Device, 70..71)[0];
            memory.fill(Space::Device, 70, &[byte ^ 1]);
        }
    }
    let case = case();
    let options = ExecutionOptions {
        observation: Observation::EveryOp,
        damage: |inner| Box::new(Faulty { inner, fault, heap: 0 }),
        ..ExecutionOptions::new(&case, "faulty")
    };
    assert!(failures(&case, &plan(&case), options).contains(&"ops write only what they declare".to_owned()));
}

#[test]
fn heap_allocation_is_found() {
    let case = case();
    let options = ExecutionOptions {
        damage: |inner| Box::new(Faulty { inner, fault: nothing, heap: 1 << 20 }),
        ..ExecutionOptions::new(&case, "faulty")
    };
    assert!(failures(&case, &plan(&case), options).contains(&"heap while a program runs, bytes".to_owned()));
}

#[test]
fn unused_planned_bytes_are_found() {
    let case = case();
    let mut outcome = plan(&case);
    outcome.layout.placement.arena_bytes += 4;
    let found = failures(&case, &outcome, ExecutionOptions::new(&case, "faulty"));
    assert!(found.contains(&"arena planned but not used, bytes".to_owned()), "{found:?}");
}

#[test]
fn overlapping_live_tensors_are_found() {
    let case = case();
    let mut outcome = plan(&case);
    let set = &outcome.set;
    let place = |name: &str| set.find(name).expect("a tensor of every plan").0 as usize;
    let (one, other) = (place("train.tokens"), place("train.labels"));
    outcome.layout.placement.offsets[one] = outcome.layout.placement.offsets[other].clone();
    let mut tally = Tally::default();
    check_placement(&case, &outcome.set, &outcome.layout, &mut tally);
    assert_eq!(tally.failed(), 1, "{}", tally.lines());
}

#[test]
fn early_tensor_death_changes_result() {
    let case = case();
    let outcome = plan(&case);
    let whole =
        execute(&case, &outcome, ExecutionOptions::new(&case, "whole"), &mut Tally::default()).expect("it runs");
    // A planner that forgets that the backward pass reads the inputs.
    let mut broken_plan = outcome.clone();
    let backward = broken_plan.set.program_index(ProgramKind::Backward).expect("it trains");
    let phase =
        broken_plan.set.phases.iter_mut().find(|phase| phase.programs.contains(&backward)).expect("it has a phase");
    phase.programs.retain(|&program| program != backward);
    broken_plan.set.phases.push(plimsoll_program::Phase { programs: vec![backward] });
    let options = ExecutionOptions { observation: Observation::EveryOp, ..ExecutionOptions::new(&case, "broken_plan") };
    let poisoned = std::panic::catch_unwind(|| execute(&case, &broken_plan, options, &mut Tally::default()));
    assert!(!matches!(poisoned, Ok(Ok(numbers)) if numbers.same_bits(&whole)));
}

#[test]
fn wrong_op_is_named() {
    fn fault(op: &Op, memory: &mut dyn Memory) {
        if let OpKind::ClipFactor { .. } = op.kind {
            // A norm of 0.01 alone: with other learning rates, weights would leave the range in which ops are compared.
            memory.fill(Space::Device, 4 * Scalar::ClipNorm as u64, &[0x3c; 4]);
        }
    }
    let scalars_are_first = |case: &Case| {
        let PlanOutcome { set, layout, .. } = plan(case);
        layout.placement.offsets[set.find(SCALARS).expect("a tensor of every plan").0 as usize] == [Some(0)]
    };
    let case = cases().find(scalars_are_first).expect("the scalars of many plans are at the start of the arena");
    let options = ExecutionOptions { observation: Observation::CpuReference, ..ExecutionOptions::new(&case, "twin") };
    assert_eq!(failures(&case, &plan(&case), options), Vec::<String>::new());
    let options = ExecutionOptions { damage: |inner| Box::new(Faulty { inner, fault, heap: 0 }), ..options };
    let kind = "clip_factor in f32: off the CPU's in f64";
    assert_eq!(failures(&case, &plan(&case), options), [kind.to_owned(), format!("{kind}, all elements")]);
}
