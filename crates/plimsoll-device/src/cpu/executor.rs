//! The CPU as a device: runs the ops of a Program one after another on a thread pool. How an op runs is in `ops`.

use super::collectives::{start_collective, wait_collective};
use super::kernels::Real;
use super::ops::{RunOp, Site, runner};
use super::pool::Pool;
use crate::device::{Device, FileSpace, Memory, Observer, ProgramCall};
use crate::error::DeviceError;
use crate::spaces::Spaces;
use crate::transport::{self, GroupHandle};
use bytemuck::bytes_of;
use half::bf16;
use plimsoll_core::DType;
use plimsoll_program::{OpKind, Placement, ProgramSet, TensorId};
use std::path::Path;
use std::time::{Duration, Instant};

/// Opens the CPU as a device: allocates its arenas, starts its threads, and creates the scratch file in
/// `scratch_folder` if the plan has one. `scratch_folder` is `None` for runs without a scratch file.
///
/// # Errors
/// [`DeviceError::Arena`] if the machine lacks the memory, [`DeviceError::ScratchFile`] if the disk lacks the space,
/// [`DeviceError::Threads`] if the system refuses a thread.
///
/// # Panics
/// For a precision that the CPU does not compute in; the caller resolves the precision before.
pub fn open(
    set: ProgramSet,
    placement: Placement,
    precision: DType,
    threads: usize,
    scratch_folder: Option<&Path>,
) -> Result<Box<dyn Device>, DeviceError> {
    let (run, pool) = (runner(precision), Pool::new(threads)?);
    let spaces = Spaces::map(&placement, scratch_folder)?;
    Ok(Box::new(CpuDevice { spaces, pool, set, placement, run, group: None, compute_time: Duration::ZERO }))
}

struct CpuDevice {
    spaces: Spaces,
    pool: Pool,
    set: ProgramSet,
    placement: Placement,
    run: RunOp,
    /// Membership in a communication group; `None` for a single device.
    group: Option<GroupHandle>,
    /// Sum of the time spent in Programs so far, without their collectives.
    compute_time: Duration,
}

impl Device for CpuDevice {
    fn run_observed(
        &mut self,
        call: ProgramCall,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        let (pool, group, start) = (&self.pool, self.group.as_ref(), Instant::now());
        let mut run = ProgramRun {
            spaces: &mut self.spaces,
            pool,
            set: &self.set,
            placement: &self.placement,
            run: self.run,
            group,
            wait_time: Duration::ZERO,
        };
        let result = transport::abort_group_on_failure(group, || pool.enter(|| run.run_ops(call, files, observer)));
        self.compute_time += start.elapsed().saturating_sub(run.wait_time);
        result
    }

    fn compute_seconds(&mut self) -> Option<f64> {
        Some(self.compute_time.as_secs_f64())
    }

    fn join_group(&mut self, group: GroupHandle) -> Result<(), DeviceError> {
        self.spaces.join_group(group.clone());
        self.group = Some(group);
        Ok(())
    }

    fn write(&mut self, tensor: TensorId, slot: u32, bytes: &[u8]) {
        self.spaces.write(&self.set, &self.placement, tensor, slot, bytes);
    }

    fn read(&mut self, tensor: TensorId, slot: u32, bytes: &mut [u8]) {
        self.read_from(tensor, slot, 0, bytes);
    }

    fn read_from(&mut self, tensor: TensorId, slot: u32, from: u64, bytes: &mut [u8]) {
        self.spaces.read(&self.set, &self.placement, tensor, slot, from, bytes);
    }

    fn adopt(&mut self, set: ProgramSet, placement: Placement) -> Result<(), DeviceError> {
        self.spaces.adopt((&self.set, &self.placement), (&set, &placement))?;
        (self.set, self.placement) = (set, placement);
        Ok(())
    }

    fn memory(&mut self) -> &mut dyn Memory {
        &mut self.spaces
    }
}

/// One run of a Program, with the parts of the device that it uses.
struct ProgramRun<'a> {
    spaces: &'a mut Spaces,
    pool: &'a Pool,
    set: &'a ProgramSet,
    placement: &'a Placement,
    run: RunOp,
    group: Option<&'a GroupHandle>,
    /// Time spent in collectives, which includes waits for other ranks.
    wait_time: Duration,
}

impl ProgramRun<'_> {
    /// Runs the ops of the Program one after another, from number `call.first_op` on.
    fn run_ops(
        &mut self,
        call: ProgramCall,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        let ProgramRun { spaces, wait_time, .. } = self;
        let (pool, set, placement, group) = (self.pool, self.set, self.placement, self.group);
        let missing = || DeviceError::UnknownProgram { program: call.program.to_string() };
        let program = set.program(call.program).ok_or_else(missing)?;
        for (tick, (op, variable)) in (1..).zip(program.trace()).skip_while(|(tick, _)| *tick < call.first_op) {
            if !op.runs(call.is_last_micro_batch) {
                continue;
            }
            observer.before(tick, op, *spaces)?;
            let micro_batch = i64::from(call.micro_batch);
            let site = Site { spaces, pool, set, placement, variable, micro_batch };
            let wait_start = Instant::now();
            match &op.kind {
                OpKind::CollectiveStart(exchange) => {
                    start_collective(site, group, exchange, 0.0, 0.0)?;
                    *wait_time += wait_start.elapsed();
                }
                OpKind::CollectiveWait(exchange) => {
                    wait_collective(site, group, exchange, 0.0)?;
                    *wait_time += wait_start.elapsed();
                }
                _ => (self.run)(site, op, files)?,
            }
            observer.after(tick, op, *spaces);
        }
        Ok(())
    }
}

/// Converts numbers to the bytes that [`Device::write`] expects for a tensor of this type.
///
/// # Panics
/// For a type that the CPU does not compute in.
pub fn real_bytes(dtype: DType, values: &[f64]) -> Vec<u8> {
    fn bytes<T: Real>(values: &[f64]) -> Vec<u8> {
        values.iter().flat_map(|v| bytes_of(&T::from_f64(*v)).to_vec()).collect()
    }
    match dtype {
        DType::F64 => bytes::<f64>(values),
        DType::F32 => bytes::<f32>(values),
        DType::Bf16 => bytes::<bf16>(values),
        other => panic!("the CPU does not compute in {other}"),
    }
}

/// Converts bytes of [`Device::read`] for a tensor of this type to numbers.
///
/// # Panics
/// For a type that the CPU does not compute in.
pub fn real_values(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let mut values = Vec::new();
    read_real_values(dtype, bytes, &mut values);
    values
}

/// Replaces `into` by the values of a tensor, as [`real_values`] returns them. Its memory is used again.
///
/// # Panics
/// If `dtype` is no type of activations.
pub fn read_real_values(dtype: DType, bytes: &[u8], into: &mut Vec<f64>) {
    fn extend<T: Real>(bytes: &[u8], into: &mut Vec<f64>) {
        into.extend(bytes.chunks_exact(size_of::<T>()).map(|b| bytemuck::pod_read_unaligned::<T>(b).to_f64()));
    }
    into.clear();
    match dtype {
        DType::F64 => extend::<f64>(bytes, into),
        DType::F32 => extend::<f32>(bytes, into),
        DType::Bf16 => extend::<bf16>(bytes, into),
        other => panic!("the CPU does not compute in {other}"),
    }
}
