//! Timing of small Programs. A device runs them like the Programs of a training step, so the measured time is what a
//! step pays. All kinds of devices are timed in this way.

use crate::device::Device;
use crate::error::DeviceError;
use half::bf16;
use plimsoll_core::{Category, DType, Space, WorkKind};
use plimsoll_program::ProgramKind;
use plimsoll_program::{Block, Lifetime, Mode, Op, Phase, Placement, Program, ProgramSet, TensorId};
use std::time::{Duration, Instant};

/// A function that opens the device to be measured, given Programs, the placement of their tensors and the precision.
pub(super) type OpenDevice<'a> = dyn Fn(ProgramSet, Placement, DType) -> Result<Box<dyn Device>, DeviceError> + 'a;

/// An opened device that times Programs.
pub(super) struct TimingDevice {
    device: Box<dyn Device>,
    /// A tensor on the device that is read after each timed run, because a read waits for all submitted work.
    sync_tensor: TensorId,
}

impl TimingDevice {
    /// Opens a device with the Programs of `set`. `sync_tensor` must be a tensor on the device; each timed run ends
    /// with reading it.
    pub fn open(
        open: &OpenDevice,
        set: ProgramSet,
        precision: DType,
        sync_tensor: TensorId,
    ) -> Result<TimingDevice, DeviceError> {
        let placement = separate_placement(&set);
        Ok(TimingDevice { device: open(set, placement, precision)?, sync_tensor })
    }

    /// Fills a tensor with positive and negative values and no zeros. Some processors are faster on zeros, which would
    /// distort the measurement.
    pub fn fill_with_values(&mut self, tensor: TensorId, dtype: DType, elements: u64) {
        let numbers = (0..elements).map(|index| ((index * 37) % 101) as f32 / 101.0 - 0.4951);
        let bytes: Vec<u8> = match dtype {
            DType::Bf16 => numbers.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
            _ => numbers.flat_map(f32::to_le_bytes).collect(),
        };
        self.device.write(tensor, 0, &bytes);
    }

    /// Runs a Program once without timing it, then repeatedly for about `duration` and at least three times. Returns
    /// the seconds of each timed run, up to the end of all its ops.
    pub fn time_rounds(&mut self, program: ProgramKind, duration: Duration) -> Result<Vec<f64>, DeviceError> {
        self.time_round(program)?;
        let start = Instant::now();
        let mut seconds = Vec::new();
        while seconds.len() < 3 || start.elapsed() < duration {
            seconds.push(self.time_round(program)?);
        }
        Ok(seconds)
    }

    fn time_round(&mut self, program: ProgramKind) -> Result<f64, DeviceError> {
        let start = Instant::now();
        self.device.run(program)?;
        self.device.read(self.sync_tensor, 0, &mut [0; 2]);
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Returns a Program that runs `ops` in sequence, `repeat` times.
pub(super) fn repeated_program(ops: Vec<Op>, repeat: u32) -> Program {
    let block = Block { name: "again".into(), first: 0, step: 0, repeat, ops };
    Program {
        work: WorkKind::Forward,
        kind: ProgramKind::Probe(0),
        inputs: vec![],
        outputs: vec![],
        blocks: vec![block],
    }
}

/// Adds a Program to a set, in a phase of its own, and returns the kind that identifies it.
pub(super) fn add_program(set: &mut ProgramSet, program: Program) -> ProgramKind {
    let number = set.programs.len();
    let kind = ProgramKind::Probe(number as u32);
    set.phases.push(Phase { programs: vec![number] });
    set.programs.push(Program { kind, ..program });
    kind
}

/// Returns a placement for ops that are only timed. Every tensor outside files gets bytes of its own, except for the
/// workspaces of ops. Workspaces share the end of the arena, because one op runs at a time and none reads the workspace
/// of another.
pub(super) fn separate_placement(set: &ProgramSet) -> Placement {
    let mut placement = Placement::default();
    let mut is_workspace: Vec<bool> = set
        .tensors
        .iter()
        .map(|tensor| tensor.category == Category::Workspace && tensor.lifetime == Lifetime::Transient)
        .collect();
    let ops = set.programs.iter().flat_map(|program| &program.blocks).flat_map(|block| &block.ops);
    for access in ops.flat_map(|op| op.accesses(&|id| set.tensor(id).elements())) {
        is_workspace[access.operand.tensor.0 as usize] &= access.mode == Mode::Write;
    }
    for (tensor, is_workspace) in set.tensors.iter().zip(&is_workspace) {
        if *is_workspace {
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
        let mut next_offset = || {
            let offset = *end;
            *end = (offset + tensor.bytes()).next_multiple_of(256);
            Some(offset)
        };
        placement.offsets.push((0..tensor.slots).map(|_| next_offset()).collect());
    }
    let workspace_start = placement.arena_bytes;
    let tensors = set.tensors.iter().zip(&mut placement.offsets).zip(is_workspace);
    for ((tensor, offsets), _) in tensors.filter(|(_, is_workspace)| *is_workspace) {
        offsets.resize(tensor.slots as usize, Some(workspace_start));
        placement.arena_bytes = placement.arena_bytes.max(workspace_start + tensor.bytes());
    }
    placement
}

/// Returns the median. Of an even number of values, returns the larger of the two in the middle. Panics if there are
/// none.
pub(super) fn median(seconds: &[f64]) -> f64 {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_program::Tensor;

    #[test]
    fn only_workspaces_share_bytes() {
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
        let (persistent, transient) = (Lifetime::Persistent, Lifetime::Transient);
        let set = ProgramSet {
            tensors: vec![
                tensor("first scratch", 100, Space::Device, scratch, transient, 1),
                tensor("weight", 3, Space::Device, weight, persistent, 2),
                tensor("file", 9, Space::File, weight, persistent, 1),
                tensor("on host", 5, Space::Host, weight, persistent, 1),
                tensor("second scratch", 300, Space::Device, scratch, transient, 2),
            ],
            ..ProgramSet::default()
        };
        let placement = separate_placement(&set);
        assert_eq!(
            placement.offsets,
            [vec![Some(512)], vec![Some(0), Some(256)], vec![None], vec![Some(0)], vec![Some(512); 2]]
        );
        assert_eq!((placement.arena_bytes, placement.host_bytes), (512 + 1200, 256));
    }

    #[test]
    fn median_is_the_middle_value() {
        assert_eq!(median(&[3.0, 1.0, 100.0]), 3.0);
    }
}
