//! Measured use of the arena: on the CPU and virtual devices, its bytes by category are those of the plan. The buffers
//! that count at the fullest moment are exactly those that the step still needs.

use crate::common::Watchdog;
use crate::team_support::*;
use plimsoll_core::{Bytes, Category, DType, DeviceKind, Offload, Parallelism, Recipe, RecomputeLevel, Space};
use plimsoll_device::device::{Memory, NoObserver, Observer};
use plimsoll_device::error::DeviceError;
use plimsoll_plan::search::{LossyOptions, PlanOutcome, plan_recipe};
use plimsoll_program::models::ModelConfig;
use plimsoll_program::models::decoder::Base;
use plimsoll_program::{Lifetime, Mode, Op, Placement, ProgramKind, ProgramSet, TensorId};
use plimsoll_train::engine::Engine;
use plimsoll_train::engine::arena_use::{BytesByCategory, FullestMoment};
use std::ops::Range;

/// Runs two steps, an evaluation, text generation and a checkpoint, and returns the measured bytes by category of each
/// rank.
fn measured(case: &Case) -> Vec<Option<BytesByCategory>> {
    let mut team = case.team();
    for step in 1..=2 {
        team.step(step);
    }
    team.evaluated();
    team.generated();
    team.files();
    team.engines.iter_mut().map(Engine::take_new_arena_use).collect()
}

/// Asserts that each rank used as many bytes of each category as planned.
fn check_as_planned(name: &str, case: &Case) {
    for (rank, measured) in measured(case).into_iter().enumerate() {
        let plan = &case.answer(rank).plan.devices[0];
        let sum: Bytes = plan.by_category.values().copied().sum();
        assert_eq!(sum, plan.arena_bytes, "{name}, rank {rank}");
        assert_eq!(measured.as_ref(), Some(&plan.by_category), "{name}, rank {rank}");
    }
}

/// Runs `check` on cases of the CPU and of virtual devices.
fn on_each_kind(name: &str, case: &Case) {
    for kind in [DeviceKind::Cpu, DeviceKind::Virtual] {
        check_as_planned(
            &format!("{name}, {}, {kind:?}", case.config.model_type.name()),
            &Case { kind, ..case.clone() },
        );
    }
}

#[test]
fn single_device_uses_planned_bytes_by_category() {
    let _watchdog = Watchdog::new();
    for config in models() {
        let case = Case::new(&config, &[(4, 2)]);
        on_each_kind("full", &case);
        on_each_kind("one micro-batch", &Case::new(&config, &[(3, 3)]));
        on_each_kind("lora", &Case { lossy: lora(), precision: DType::F32, ..case.clone() });
        let nf4 = LossyOptions { base: Base::Nf4, ..lora() };
        on_each_kind("lora on nf4", &Case { lossy: nf4, precision: DType::Bf16, ..case });
    }
}

#[test]
fn offload_uses_planned_bytes_by_category() {
    let _watchdog = Watchdog::new();
    let none = Offload::NOTHING;
    for offload in [
        Offload { inputs: 2, ..none },
        Offload { optimizer: 2, update: true, ..none },
        Offload { optimizer: 2, gradients: 1, weights: 1, ..none },
        Offload { optimizer: 2, gradients: 2, weights: 2, inputs: 2, embedding: true, head: true, ..none },
    ] {
        for config in models() {
            let kind = DeviceKind::Virtual;
            check_as_planned(&format!("{offload}"), &Case { kind, offload, ..Case::new(&config, &[(4, 2)]) });
        }
    }
}

#[test]
fn teams_use_planned_bytes_by_category() {
    let _watchdog = Watchdog::new();
    for config in [&models()[0], &models()[3]] {
        on_each_kind("data parallel", &Case::new(config, &[(3, 2), (2, 1), (1, 1)]));
        let sharded = |ranks: &[(u64, u32)]| {
            let parts = vec![500, 24, 500];
            Case { parallelism: Parallelism::Sharded, parts, ..Case::new(config, ranks) }
        };
        on_each_kind("sharded", &sharded(&[(3, 2), (2, 1), (2, 1)]));
        on_each_kind("storage-only rank", &sharded(&[(4, 2), (0, 0), (2, 1)]));
        on_each_kind("pipeline", &Case::pipeline(config, &[0, 2, 3, 5], 4, 1));
        on_each_kind("pipeline with one micro-batch", &Case::pipeline(config, &[0, 1, 3], 2, 2));
        let offload = Offload { optimizer: 2, gradients: 2, weights: 1, inputs: 2, ..Offload::NOTHING };
        let kind = DeviceKind::Virtual;
        check_as_planned("stages", &Case { kind, offload, ..Case::pipeline(config, &[0, 2, 3, 5], 4, 1) });
    }
}

#[test]
fn remote_devices_have_unknown_bytes_by_category() {
    let _watchdog = Watchdog::new();
    let case = Case { remote: true, ..Case::new(&models()[0], &[(2, 1), (2, 1)]) };
    let found = measured(&case);
    assert_eq!(found[0].as_ref(), Some(&case.answer(0).plan.devices[0].by_category));
    assert_eq!(found[1], None);
}

#[test]
fn new_plan_starts_a_new_record() {
    let _watchdog = Watchdog::new();
    let case = Case::new(&models()[0], &[(4, 4)]);
    let mut team = case.team();
    team.step(1);
    let engine = &mut team.engines[0];
    assert!(engine.take_new_arena_use().is_some() && engine.take_new_arena_use().is_none());
    let device = device(case.kind);
    let recompute = vec![RecomputeLevel::Block; case.config.layers as usize];
    let smaller = plan_recipe(&case.question(&device, 0), &Recipe::on_device(1, recompute));
    let planned = smaller.plan.devices[0].by_category.clone();
    assert_ne!(planned, case.answer(0).plan.devices[0].by_category);
    engine.adopt(smaller).unwrap();
    assert!(engine.tensors_in_use().is_none() && engine.take_new_arena_use().is_none());
    team.step(2);
    team.evaluated();
    team.generated();
    team.files();
    assert_eq!(team.engines[0].take_new_arena_use(), Some(planned));
}

/// Observer that overwrites ranges of the arena with NaN, once, before one op.
struct PoisonBefore {
    /// Programs of the step that have ops, in order.
    programs: Vec<ProgramKind>,
    /// Number of Programs that have begun.
    begun: usize,
    moment: FullestMoment,
    ranges: Vec<Range<u64>>,
}

impl Observer for PoisonBefore {
    fn before(&mut self, tick: u32, _: &Op, memory: &mut dyn Memory) -> Result<(), DeviceError> {
        self.begun += usize::from(tick == 1);
        if self.programs[self.begun - 1] == self.moment.program && tick == self.moment.tick {
            self.ranges.drain(..).for_each(|range| memory.poison(Space::Device, range));
        }
        Ok(())
    }
}

impl Drop for PoisonBefore {
    fn drop(&mut self) {
        assert!(self.ranges.is_empty() || std::thread::panicking(), "the op has run");
    }
}

/// A step on one device of which the fullest moment is known.
struct KnownStep {
    team: Team,
    set: ProgramSet,
    placement: Placement,
    moment: FullestMoment,
    /// Bits of loss and gradient norm without poison.
    expected: [u64; 2],
}

impl KnownStep {
    fn new(config: &ModelConfig) -> KnownStep {
        let case = Case { precision: DType::F32, ..Case::new(config, &[(2, 2)]) };
        let mut team = case.team();
        let PlanOutcome { set, layout, .. } = case.answer(0);
        let loss = team.gradients(1).remove(0).unwrap();
        let expected = [loss.loss.to_bits(), loss.norm.to_bits()];
        let moment = team.engines[0].fullest_moment().expect("a step has run");
        KnownStep { team, set, placement: layout.placement, moment, expected }
    }

    fn range(&self, (tensor, slot): (TensorId, u32)) -> Range<u64> {
        let first = self.placement.offset(tensor, slot);
        first..first + self.set.tensor(tensor).bytes()
    }

    /// Returns the bits of loss and gradient norm of a step in which these ranges are poisoned before the op of the
    /// fullest moment.
    fn run_with(&mut self, ranges: Vec<Range<u64>>) -> [u64; 2] {
        let steps = [ProgramKind::BeginStep, ProgramKind::Forward, ProgramKind::Backward, ProgramKind::GradientNorm];
        let has_ops = |kind: &ProgramKind| self.set.program(*kind).is_some_and(|program| program.op_count() > 0);
        let programs = steps.into_iter().filter(has_ops).collect();
        let observer = PoisonBefore { programs, begun: 0, moment: self.moment.clone(), ranges };
        self.team.engines[0].observe(Box::new(observer));
        let loss = self.team.gradients(1).remove(0).unwrap();
        self.team.engines[0].observe(Box::new(NoObserver));
        [loss.loss.to_bits(), loss.norm.to_bits()]
    }

    /// Whether the op of the fullest moment writes a buffer and reads none of its bytes, or uses it as its workspace.
    fn is_result_or_workspace(&self, buffer: &[(TensorId, u32)]) -> bool {
        let program = self.set.program(self.moment.program).expect("it has run");
        let (op, variable) = program.trace().nth(self.moment.tick as usize - 1).expect("it has run");
        let accesses = op.accesses(&|tensor| self.set.tensor(tensor).elements());
        let modes: Vec<Mode> = accesses
            .iter()
            .filter(|access| {
                let operand = access.operand;
                let mut slots = operand.possible_slots(variable, self.set.tensor(operand.tensor).slots);
                slots.any(|slot| buffer.contains(&(operand.tensor, slot)))
            })
            .map(|access| access.mode)
            .collect();
        let is_workspace = self.set.tensor(buffer[0].0).category == Category::Workspace;
        !modes.is_empty() && (is_workspace || modes.iter().all(|mode| *mode == Mode::Write))
    }
}

#[test]
fn step_needs_exactly_the_buffers_in_use() {
    let _watchdog = Watchdog::new();
    for config in models() {
        let mut step = KnownStep::new(&config);
        let name = format!("{}: {:?} {}", config.model_type.name(), step.moment.program, step.moment.tick);
        assert!([ProgramKind::Forward, ProgramKind::Backward].contains(&step.moment.program), "{name}");
        let persistent = (0..).map(TensorId).zip(&step.set.tensors);
        let persistent = persistent
            .filter(|(_, tensor)| tensor.lifetime == Lifetime::Persistent && tensor.space == Space::Device)
            .flat_map(|(id, tensor)| (0..tensor.slots).map(move |slot| (id, slot)));
        let in_use = step.moment.buffers.iter().map(|slots| slots[0]);
        let mut used: Vec<Range<u64>> = persistent.chain(in_use).map(|slot| step.range(slot)).collect();
        used.sort_by_key(|range| range.start);
        assert!(used.is_sorted_by(|one, next| one.end <= next.start), "{name}: no byte counts twice");

        // Bytes that do not count are not needed.
        let ends = std::iter::once(0).chain(used.iter().map(|range| range.end));
        let starts = used.iter().map(|range| range.start).chain([step.placement.arena_bytes]);
        let unused: Vec<Range<u64>> = ends.zip(starts).map(|(end, start)| end..start).collect();
        assert_eq!(step.run_with(unused), step.expected, "{name}");

        // Each buffer that counts is needed, unless the op fills it first.
        let mut needed = 0;
        for buffer in step.moment.buffers.clone() {
            let tensor = step.set.tensor(buffer[0].0);
            // Poisoned token ids would be read out of bounds.
            if step.is_result_or_workspace(&buffer) || [DType::I32, DType::U8].contains(&tensor.dtype) {
                continue;
            }
            let (name, range) = (format!("{name}: {}", tensor.name), step.range(buffer[0]));
            assert_ne!(step.run_with(vec![range]), step.expected, "{name}");
            needed += 1;
        }
        assert!(needed >= 3, "{name}: {needed} of {}", step.moment.buffers.len());
    }
}
