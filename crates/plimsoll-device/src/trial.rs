//! Small Programs that are timed: a device runs them as it runs those of a step, so that what is measured is what a
//! step pays. One way for all devices.

use crate::device::{Device, DeviceError};
use half::bf16;
use plimsoll_core::{Category, DType, Space, WorkName};
use plimsoll_program::{Block, Lifetime, Mode, Op, Phase, Placement, Program, ProgramSet, TensorId};
use std::time::{Duration, Instant};

/// Opens the device that is measured.
pub(crate) type Open<'a> = dyn Fn(ProgramSet, Placement, DType) -> Result<Box<dyn Device>, DeviceError> + 'a;

/// A device with Programs to be timed.
pub(crate) struct Trial {
    device: Box<dyn Device>,
    /// Reading it waits for all that was started.
    last: TensorId,
}

impl Trial {
    /// Opens a device with the Programs of `set`; the tensor `last` stands on the device.
    pub fn open(open: &Open, set: ProgramSet, precision: DType, last: TensorId) -> Result<Trial, DeviceError> {
        let placement = side_by_side(&set);
        Ok(Trial { device: open(set, placement, precision)?, last })
    }

    /// Numbers of both signs and no zeros in every element: some processors are faster on zeros, which would be a lie.
    pub fn fill(&mut self, tensor: TensorId, dtype: DType, elements: u64) {
        let numbers = (0..elements).map(|index| ((index * 37) % 101) as f32 / 101.0 - 0.4951);
        let bytes: Vec<u8> = match dtype {
            DType::Bf16 => numbers.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
            _ => numbers.flat_map(f32::to_le_bytes).collect(),
        };
        self.device.write(tensor, 0, &bytes);
    }

    /// The seconds of each round of a Program, for about `duration` and at least three rounds, after one that is not
    /// counted. A round ends when the device has done all of it.
    pub fn rounds(&mut self, program: &str, duration: Duration) -> Result<Vec<f64>, DeviceError> {
        self.round(program)?;
        let start = Instant::now();
        let mut seconds = Vec::new();
        while seconds.len() < 3 || start.elapsed() < duration {
            seconds.push(self.round(program)?);
        }
        Ok(seconds)
    }

    fn round(&mut self, program: &str) -> Result<f64, DeviceError> {
        let start = Instant::now();
        self.device.run(program)?;
        self.device.read(self.last, 0, &mut [0; 2]);
        Ok(start.elapsed().as_secs_f64())
    }
}

/// A Program of ops that are done again and again. Its work has no name of its own.
pub(crate) fn repeated(name: &str, ops: Vec<Op>, repeat: u32) -> Program {
    let block = Block { name: "again".into(), first: 0, step: 0, repeat, ops };
    Program { work: WorkName::Forward, name: name.into(), inputs: vec![], outputs: vec![], blocks: vec![block] }
}

/// Adds a Program to a set, in a phase of its own.
pub(crate) fn add(set: &mut ProgramSet, program: Program) {
    set.phases.push(Phase { programs: vec![set.programs.len()] });
    set.programs.push(program);
}

/// A placement for ops that are only timed: everything has bytes of its own, but for the scratch of ops, which is at
/// the end for all of them: an op at a time uses it, and what one leaves there no other reads.
pub(crate) fn side_by_side(set: &ProgramSet) -> Placement {
    let mut placement = Placement::default();
    let mut is_scratch: Vec<bool> = set
        .tensors
        .iter()
        .map(|tensor| tensor.category == Category::Workspace && tensor.lifetime == Lifetime::Transient)
        .collect();
    let ops = set.programs.iter().flat_map(|program| &program.blocks).flat_map(|block| &block.ops);
    for access in ops.flat_map(|op| op.accesses(&|id| set.tensor(id).elements())) {
        is_scratch[access.operand.tensor.0 as usize] &= access.mode == Mode::Write;
    }
    for (tensor, is_scratch) in set.tensors.iter().zip(&is_scratch) {
        if *is_scratch {
            placement.offsets.push(Vec::new());
            continue;
        }
        let end = match tensor.space {
            Space::Device => &mut placement.arena_bytes,
            Space::Host => &mut placement.host_bytes,
            Space::Scratch | Space::File => {
                placement.offsets.push(vec![None; tensor.slots as usize]);
                continue;
            }
        };
        let mut place = || {
            let here = *end;
            *end = (here + tensor.bytes()).next_multiple_of(256);
            Some(here)
        };
        placement.offsets.push((0..tensor.slots).map(|_| place()).collect());
    }
    let first = placement.arena_bytes;
    let places = set.tensors.iter().zip(&mut placement.offsets).zip(is_scratch);
    for ((tensor, offsets), _) in places.filter(|(_, is_scratch)| *is_scratch) {
        offsets.resize(tensor.slots as usize, Some(first));
        placement.arena_bytes = placement.arena_bytes.max(first + tensor.bytes());
    }
    placement
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_program::Tensor;

    #[test]
    fn timed_tensors_have_bytes_of_their_own_and_scratch_is_shared() {
        let tensor = |name: &str, elements, space, category, lifetime, slots| Tensor {
            name: name.into(),
            shape: vec![elements],
            dtype: DType::F32,
            space,
            category,
            lifetime,
            slots,
        };
        let (weight, scratch) = (Category::Weight, Category::Workspace);
        let (stays, passes) = (Lifetime::Persistent, Lifetime::Transient);
        let set = ProgramSet {
            tensors: vec![
                tensor("first scratch", 100, Space::Device, scratch, passes, 1),
                tensor("weight", 3, Space::Device, weight, stays, 2),
                tensor("file", 9, Space::File, weight, stays, 1),
                tensor("on host", 5, Space::Host, weight, stays, 1),
                tensor("second scratch", 300, Space::Device, scratch, passes, 2),
            ],
            ..ProgramSet::default()
        };
        let placement = side_by_side(&set);
        assert_eq!(
            placement.offsets,
            [vec![Some(512)], vec![Some(0), Some(256)], vec![None], vec![Some(0)], vec![Some(512); 2]]
        );
        assert_eq!((placement.arena_bytes, placement.host_bytes), (512 + 1200, 256));
    }
}
