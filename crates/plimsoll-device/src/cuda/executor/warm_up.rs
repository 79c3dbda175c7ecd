//! Warm-up: loads kernels, chooses GEMM algorithms, and runs each kernel and product once on zeros. Drivers load code
//! at the first run, so a later step allocates nothing. After a plan change the same is done without touching
//! persistent tensors.

use super::CudaDevice;
use super::operands::{LoadedPlan, OperandResolver};
use crate::cuda::driver::{Address, Function, Module};
use crate::cuda::kernels::Unit;
use crate::cuda::kernels::launch::Launch;
use crate::cuda::kernels::ops::OperandLookup;
use crate::cuda::products::Shape;
use crate::device::NoFiles;
use crate::error::{CudaError, DeviceError};
use crate::spaces::{self, ResizableArenas};
use plimsoll_core::{Bytes, Space};
use plimsoll_program::op::Queue;
use plimsoll_program::{Op, OpKind, Placement, TensorId};
use std::collections::{BTreeMap, BTreeSet};

/// The modules that are loaded on a GPU, and their kernels.
#[derive(Default)]
pub(super) struct LoadedKernels {
    functions: BTreeMap<(Unit, &'static str), Function>,
    /// Limit of dynamic shared memory of each kernel: the most that any plan so far needed. It never shrinks, because
    /// the device may return to an earlier plan.
    shared_bytes: BTreeMap<(Unit, &'static str), u32>,
    modules: BTreeMap<Unit, Module>,
}

/// The kernels and matrix products that have run once on a device, so that their code is loaded.
#[derive(Clone, Default)]
pub(super) struct WarmedUp {
    kernels: BTreeSet<(Unit, &'static str)>,
    products: BTreeSet<Shape>,
}

impl LoadedKernels {
    /// Returns the loaded kernel that a launch starts.
    ///
    /// # Panics
    /// Panics if the kernel was not loaded.
    pub(super) fn function(&self, launch: &Launch) -> Function {
        self.functions[&(launch.unit, launch.kernel)]
    }
}

impl OperandResolver<'_> {
    /// Returns a placement for a single op, with its operands moved together at the start of the arena.
    ///
    /// Operands keep their order, overlaps and address modulo 256 bytes. Such an arena is never larger than that of the
    /// plan.
    fn compact_placement(&self, op: &Op) -> Placement {
        let elements_of = |id: TensorId| self.plan.set.tensor(id).elements();
        let accesses = op.accesses(&elements_of);
        let mut spans: Vec<(u64, u64, TensorId, u32)> = accesses
            .iter()
            .filter(|access| self.space(&access.operand) == Space::Device)
            .map(|access| {
                let tensor = self.plan.set.tensor(access.operand.tensor);
                let slot = tensor.slot(self.index(access.operand.slot));
                let start = self.placement.offset(access.operand.tensor, slot);
                let bytes = access.elements * tensor.dtype.bytes();
                (start, self.offset(&access.operand) + bytes, access.operand.tensor, slot)
            })
            .collect();
        spans.sort_unstable();
        let mut placement = Placement { arena_bytes: 0, ..self.placement.clone() };
        let (mut covered, mut shift) = (0, 0);
        for (start, end, tensor, slot) in spans {
            if start >= covered {
                // Close the gap before this span, in steps of 256 bytes.
                shift = (start - placement.arena_bytes) / 256 * 256;
            }
            covered = end.max(covered);
            placement.offsets[tensor.0 as usize][slot as usize] = Some(start - shift);
            placement.arena_bytes = covered - shift;
        }
        placement
    }

    /// Returns a placement for a single op, with all operands over each other at the start of the arena. They keep
    /// their address modulo 256 bytes.
    fn overlapping_placement(&self, op: &Op) -> Placement {
        let mut placement = Placement { arena_bytes: 0, ..self.placement.clone() };
        for access in op.accesses(&|id| self.plan.set.tensor(id).elements()) {
            let tensor = self.plan.set.tensor(access.operand.tensor);
            if tensor.space == Space::Device {
                let slot = tensor.slot(self.index(access.operand.slot));
                let first = self.placement.offset(access.operand.tensor, slot) % 256;
                placement.offsets[access.operand.tensor.0 as usize][slot as usize] = Some(first);
                let end = first + self.first_byte(&access.operand) + access.elements * tensor.dtype.bytes();
                placement.arena_bytes = placement.arena_bytes.max(end);
            }
        }
        placement
    }

    /// Returns address and size in bytes of each range of the device arena that an op touches.
    fn device_ranges(&self, op: &Op) -> Vec<(Address, u64)> {
        let elements_of = |id: TensorId| self.plan.set.tensor(id).elements();
        let accesses = op.accesses(&elements_of);
        let on_device = accesses.iter().filter(|access| self.space(&access.operand) == Space::Device);
        on_device
            .map(|access| {
                let bytes = access.elements * self.dtype(&access.operand).bytes();
                (self.address(self.offset(&access.operand), bytes), bytes)
            })
            .collect()
    }
}

impl CudaDevice {
    /// Compiles and loads all kernels that the plan's programs need and that are not loaded yet. Raises the limit of
    /// shared memory where a kernel needs more.
    pub(super) fn load_kernels(&mut self) -> Result<(), DeviceError> {
        let mut shared_bytes: BTreeMap<(Unit, &'static str), u32> = BTreeMap::new();
        for program in &self.plan.set.programs {
            self.plan.check_sends_completed(program)?;
            for (op, variable) in program.trace() {
                let resolver = self.resolver(variable, 0);
                resolver.check(op)?;
                for launch in resolver.launches(op) {
                    let most = shared_bytes.entry((launch.unit, launch.kernel)).or_default();
                    *most = launch.shared_bytes.max(*most);
                }
            }
        }
        let mut units: Vec<Unit> = shared_bytes.keys().map(|(unit, _)| *unit).collect();
        units.dedup();
        units.retain(|unit| !self.kernels.modules.contains_key(unit));
        let context = &self.resources.context;
        let gpu = context.gpu();
        if let Some(((_, kernel), bytes)) = shared_bytes.iter().find(|(_, bytes)| **bytes > gpu.shared_bytes_max) {
            let [requested, most] = [*bytes, gpu.shared_bytes_max].map(|bytes| Bytes(bytes.into()));
            return Err(CudaError::Shared { kernel, requested, gpu: gpu.name.clone(), most }.into());
        }
        let cubins = self.compiler.cubins(&units, gpu.architecture)?;
        for (unit, cubin) in units.into_iter().zip(cubins) {
            self.kernels.modules.insert(unit, Module::load(context, unit, &cubin)?);
        }
        for ((unit, kernel), bytes) in shared_bytes {
            let most = self.kernels.shared_bytes.entry((unit, kernel)).or_default();
            *most = bytes.max(*most);
            let function = self.kernels.modules[&unit].function(kernel, *most)?;
            self.kernels.functions.insert((unit, kernel), function);
        }
        Ok(())
    }

    /// Chooses an algorithm for each matrix product of the plan that has none. Takes cuBLASLt's first proposal, because
    /// timing would overwrite tensors in the arena.
    fn choose_algorithms(&mut self) -> Result<(), CudaError> {
        for program in &self.plan.set.programs {
            for (op, variable) in program.trace() {
                let (plan, base) = (&*self.plan, self.resources.base());
                let resolver = OperandResolver { plan, placement: &plan.placement, base, variable, micro_batch: 0 };
                if let Some((shape, operands)) = resolver.product(&op.kind) {
                    // SAFETY: without a stream nothing is started.
                    unsafe { self.products.prepare(shape, &operands, None) }?;
                }
            }
        }
        Ok(())
    }

    /// Runs every kernel and every product of the plan once, each op alone and on zeros, and times GEMM algorithms.
    /// Resizes the arena to what the largest op needs, and discards its contents.
    pub(super) fn warm_up_all(&mut self) -> Result<(), DeviceError> {
        let plan = self.plan.clone();
        let (ops, warmed_up) = self.ops_to_warm_up(&plan);
        let placements: Vec<Placement> =
            ops.iter().map(|(op, variable)| self.resolver(*variable, 0).compact_placement(op)).collect();
        self.resources
            .resize_discarding(placements.iter().map(|placement| placement.arena_bytes).max().unwrap_or(0))?;
        let base = self.resources.base();
        for ((op, variable), placement) in ops.into_iter().zip(&placements) {
            self.warm_up_op(&OperandResolver { plan: &plan, placement, base, variable, micro_batch: 0 }, op)?;
        }
        self.warmed_up = warmed_up;
        Ok(())
    }

    /// Runs one op with all operands zero. A product without an algorithm first gets the fastest of cuBLASLt's
    /// proposals.
    fn warm_up_op(&mut self, resolver: &OperandResolver, op: &Op) -> Result<(), DeviceError> {
        for (at, bytes) in resolver.device_ranges(op) {
            // SAFETY: a range of the arena, ordered on the queue that runs the op.
            unsafe { self.resources.queues.compute().zero(at, bytes) }?;
        }
        if let Some((shape, operands)) = resolver.product(&op.kind) {
            // SAFETY: ranges of the arena, as large as planned (`passes::check`); no other work runs.
            unsafe { self.products.prepare(shape, &operands, Some(self.resources.queues.compute())) }?;
        }
        for work in self.work_for(resolver, op)? {
            self.start_work(&work, Queue::Compute, 0, &mut NoFiles)?;
        }
        Ok(self.resources.context.finish(op.name())?)
    }

    /// Returns ops that together start every kernel and product of `plan` that has not run yet. Each comes with the
    /// iteration of its block. Also returns the record of warmed-up kernels and products as it will be after they run.
    fn ops_to_warm_up<'a>(&self, plan: &'a LoadedPlan) -> (Vec<(&'a Op, i64)>, WarmedUp) {
        let (mut warmed_up, mut found) = (self.warmed_up.clone(), Vec::new());
        for (op, variable) in plan.set.programs.iter().flat_map(|program| program.trace()) {
            let resolver = OperandResolver { plan, ..self.resolver(variable, 0) };
            let mut is_new = resolver.product(&op.kind).is_some_and(|(shape, _)| warmed_up.products.insert(shape));
            for launch in resolver.launches(op) {
                is_new |= warmed_up.kernels.insert((launch.unit, launch.kernel));
            }
            if is_new {
                found.push((op, variable));
            }
        }
        (found, warmed_up)
    }

    /// Runs kernels and products that are new in the current plan once, so that their code is loaded before the next
    /// step.
    ///
    /// The ops run in the arena range above the persistent tensors. If a product does not fit there, its operands
    /// overlap, because the result is unused. Any other op that does not fit is skipped, and first runs in a step.
    fn warm_up_new(&mut self) -> Result<(), DeviceError> {
        let plan = self.plan.clone();
        let (ops, warmed_up) = self.ops_to_warm_up(&plan);
        if ops.is_empty() {
            return Ok(());
        }
        let (free, _) = self.resources.context.memory()?;
        let first = plan.persistent_end().next_multiple_of(256);
        let (base, room) = (self.resources.base() + first, plan.placement.arena_bytes.saturating_sub(first));
        for (op, variable) in ops {
            let in_place = self.resolver(variable, 0);
            let compact = in_place.compact_placement(op);
            let is_product = matches!(op.kind, OpKind::Product { .. });
            let placement =
                if compact.arena_bytes > room && is_product { in_place.overlapping_placement(op) } else { compact };
            if placement.arena_bytes <= room {
                self.warm_up_op(
                    &OperandResolver { plan: &plan, placement: &placement, base, variable, micro_batch: 0 },
                    op,
                )?;
            }
        }
        self.warmed_up = warmed_up;
        self.add_library_bytes(free)?;
        // The range above the persistent tensors is unwritten again.
        self.resources.resize(Space::Device, plan.placement.arena_bytes, first.min(plan.placement.arena_bytes))
    }

    /// Switches the device from plan `old` to `self.plan`: loads kernels, prepares programs, moves persistent tensors,
    /// then runs new kernels and products once. Algorithms are not timed, because the arena holds persistent tensors.
    ///
    /// # Errors
    /// Fails if memory is refused or an op cannot run. Persistent tensors are then back in their old places. If they
    /// cannot be moved back, every later operation of the device fails.
    pub(super) fn switch_from(&mut self, old: &LoadedPlan) -> Result<(), DeviceError> {
        let pool = self.plan.pool(self.threads)?;
        let (free, _) = self.resources.context.memory()?;
        let loaded = self.load_kernels();
        self.add_library_bytes(free)?;
        loaded?;
        self.choose_algorithms()?;
        self.prepare_all()?;
        let plan = self.plan.clone();
        let (old, new) = ((&old.set, &old.placement), (&plan.set, &plan.placement));
        self.resources.spaces().scratch().check()?;
        spaces::adopt(&mut self.resources, old, new)?;
        self.resources.spaces().scratch().check()?;
        if let Err(error) = self.warm_up_new() {
            // Restores the old plan. Tensors that live between ops are lost.
            self.intermediates_lost = true;
            if let Err(restore_error) = spaces::adopt(&mut self.resources, new, old) {
                let restore_failed = CudaError::Memory { what: "restore the previous plan".into() };
                self.resources.record_failure(Err::<(), _>(if let DeviceError::Cuda(error) = restore_error {
                    error
                } else {
                    restore_failed
                }));
            }
            return Err(error);
        }
        self.pool = pool;
        Ok(())
    }
}
