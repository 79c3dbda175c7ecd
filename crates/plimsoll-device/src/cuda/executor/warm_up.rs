//! Everything once before it counts: kernels are loaded, products get their algorithms, and each of both is started alone
//! on zeros, so that drivers load code now and a step takes no memory. The same when another plan is gone over to, where
//! what stays may not be touched.

use super::CudaDevice;
use super::frame::{Frame, Plan};
use crate::cuda::driver::{Address, CudaError, Function, Module};
use crate::cuda::kernels::Unit;
use crate::cuda::kernels::launch::Launch;
use crate::cuda::kernels::ops::Places;
use crate::cuda::products::Shape;
use crate::device::{DeviceError, NoFiles};
use crate::spaces::{self, Arenas};
use plimsoll_core::{Bytes, Space};
use plimsoll_program::op::Queue;
use plimsoll_program::{Op, OpKind, Placement, TensorId};
use std::collections::{BTreeMap, BTreeSet};

/// Loaded modules, and the kernels in them.
#[derive(Default)]
pub(super) struct Kernels {
    functions: BTreeMap<(Unit, &'static str), Function>,
    /// What each may have of shared memory: never less than a plan before had, which may come back.
    shared_bytes: BTreeMap<(Unit, &'static str), u32>,
    modules: BTreeMap<Unit, Module>,
}

/// What was started once on a device: its code is there, and no memory is taken when it is started again.
#[derive(Clone, Default)]
pub(super) struct Started {
    kernels: BTreeSet<(Unit, &'static str)>,
    products: BTreeSet<Shape>,
}

impl Kernels {
    pub(super) fn function(&self, launch: &Launch) -> Function {
        self.functions[&(launch.unit, launch.kernel)]
    }
}

impl Frame<'_> {
    /// Where operands stand when the op is the only one: what it touches of the device's arena begins at the first byte,
    /// in the same order, overlapping as before, and as far from multiples of 256 bytes. The arena that it needs is
    /// never larger than the whole one.
    fn alone(&self, op: &Op) -> Placement {
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
                // What lies between goes, in whole steps of 256.
                shift = (start - placement.arena_bytes) / 256 * 256;
            }
            covered = end.max(covered);
            placement.offsets[tensor.0 as usize][slot as usize] = Some(start - shift);
            placement.arena_bytes = covered - shift;
        }
        placement
    }

    /// Where operands stand when all of them begin at the first byte, as far from multiples of 256 bytes as before.
    fn piled(&self, op: &Op) -> Placement {
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

    /// Ranges of the device's arena that an op touches.
    fn touched(&self, op: &Op) -> Vec<(Address, u64)> {
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
    /// Compiles and loads every kernel that an op of any Program starts, as far as that was not done before.
    pub(super) fn load_kernels(&mut self) -> Result<(), DeviceError> {
        let mut shared_bytes: BTreeMap<(Unit, &'static str), u32> = BTreeMap::new();
        for program in &self.plan.set.programs {
            self.plan.check_messages(program)?;
            for (op, variable) in program.trace() {
                let frame = self.frame(variable, 0);
                frame.check(op)?;
                for launch in frame.launches(op) {
                    let most = shared_bytes.entry((launch.unit, launch.kernel)).or_default();
                    *most = launch.shared_bytes.max(*most);
                }
            }
        }
        let mut units: Vec<Unit> = shared_bytes.keys().map(|(unit, _)| *unit).collect();
        units.dedup();
        units.retain(|unit| !self.kernels.modules.contains_key(unit));
        let context = &self.machine.context;
        let gpu = context.gpu();
        if let Some(((_, kernel), bytes)) = shared_bytes.iter().find(|(_, bytes)| **bytes > gpu.shared_bytes_max) {
            let [asked, most] = [*bytes, gpu.shared_bytes_max].map(|bytes| Bytes(bytes.into()));
            return Err(CudaError::Shared { kernel, asked, gpu: gpu.name.clone(), most }.into());
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

    /// Chooses an algorithm for every product that has none, as the library proposes: nothing is timed, since the arena
    /// holds what stays.
    fn choose_algorithms(&mut self) -> Result<(), CudaError> {
        for program in &self.plan.set.programs {
            for (op, variable) in program.trace() {
                let (plan, base) = (&*self.plan, self.machine.base());
                let frame = Frame { plan, placement: &plan.placement, base, variable, micro_batch: 0 };
                if let Some((shape, operands)) = frame.product(&op.kind) {
                    // SAFETY: nothing is started, for want of a stream.
                    unsafe { self.products.prepare(shape, &operands, None) }?;
                }
            }
        }
        Ok(())
    }

    /// Starts every kernel and every product once, each op alone, on zeros, in an arena that is as large as the largest
    /// of them needs; products have their algorithms chosen there.
    pub(super) fn rehearse(&mut self) -> Result<(), DeviceError> {
        let plan = self.plan.clone();
        let (ops, started) = self.distinct(&plan);
        let placements: Vec<Placement> = ops.iter().map(|(op, variable)| self.frame(*variable, 0).alone(op)).collect();
        self.machine.retake(placements.iter().map(|placement| placement.arena_bytes).max().unwrap_or(0))?;
        let base = self.machine.base();
        for ((op, variable), placement) in ops.into_iter().zip(&placements) {
            self.start_alone(&Frame { plan: &plan, placement, base, variable, micro_batch: 0 }, op)?;
        }
        self.started = started;
        Ok(())
    }

    /// Does an op on zeros, wherever its operands stand; a product that has no algorithm gets the quickest.
    fn start_alone(&mut self, frame: &Frame, op: &Op) -> Result<(), DeviceError> {
        for (at, bytes) in frame.touched(op) {
            // SAFETY: a range of the arena, in the order of the queue that the op is started on.
            unsafe { self.machine.queues.compute().zero(at, bytes) }?;
        }
        if let Some((shape, operands)) = frame.product(&op.kind) {
            // SAFETY: ranges of the arena, as large as the plan says (`passes::check`); nothing else is at work.
            unsafe { self.products.prepare(shape, &operands, Some(self.machine.queues.compute())) }?;
        }
        for work in self.works(frame, op)? {
            self.start(&work, Queue::Compute, 0, &mut NoFiles)?;
        }
        Ok(self.machine.context.finish(op.name())?)
    }

    /// Ops that together start every kernel and every product that was not started before, each with the number of its
    /// iteration; and what has been started then.
    fn distinct<'a>(&self, plan: &'a Plan) -> (Vec<(&'a Op, i64)>, Started) {
        let (mut started, mut found) = (self.started.clone(), Vec::new());
        for (op, variable) in plan.set.programs.iter().flat_map(|program| program.trace()) {
            let frame = Frame { plan, ..self.frame(variable, 0) };
            let mut is_new = frame.product(&op.kind).is_some_and(|(shape, _)| started.products.insert(shape));
            for launch in frame.launches(op) {
                is_new |= started.kernels.insert((launch.unit, launch.kernel));
            }
            if is_new {
                found.push((op, variable));
            }
        }
        (found, started)
    }

    /// Starts once what the plan that was gone over to has and none before it had, so that drivers and libraries load
    /// its code now, and not in a step: in the part of the arena where nothing stays, which a smaller plan has just
    /// given memory back for. Operands of a product that is too large for that part stand on top of each other, since
    /// nobody looks at the result; another op that is too large is left to its first step.
    fn start_new(&mut self) -> Result<(), DeviceError> {
        let plan = self.plan.clone();
        let (ops, started) = self.distinct(&plan);
        if ops.is_empty() {
            return Ok(());
        }
        let (free, _) = self.machine.context.memory()?;
        let first = plan.kept_bytes().next_multiple_of(256);
        let (base, room) = (self.machine.base() + first, plan.placement.arena_bytes.saturating_sub(first));
        for (op, variable) in ops {
            let whole = self.frame(variable, 0);
            let alone = whole.alone(op);
            let is_product = matches!(op.kind, OpKind::Product { .. });
            let placement = if alone.arena_bytes > room && is_product { whole.piled(op) } else { alone };
            if placement.arena_bytes <= room {
                self.start_alone(&Frame { plan: &plan, placement: &placement, base, variable, micro_batch: 0 }, op)?;
            }
        }
        let taken = free.saturating_sub(self.machine.context.memory()?.0);
        (self.started, self.charges.libraries) = (started, self.charges.libraries + taken);
        // What was written there is nobody's.
        self.machine.resize(Space::Device, plan.placement.arena_bytes, first.min(plan.placement.arena_bytes))
    }

    /// Makes the plan that it has now, instead of `old`, run: first what can be refused, then what stays moves, then code
    /// that is new is loaded. Algorithms are not timed now: the arena holds what stays.
    pub(super) fn go_over_from(&mut self, old: &Plan) -> Result<(), DeviceError> {
        let pool = self.plan.pool(self.threads)?;
        let (free, _) = self.machine.context.memory()?;
        let loaded = self.load_kernels();
        self.charges.libraries += free.saturating_sub(self.machine.context.memory()?.0);
        loaded?;
        self.choose_algorithms()?;
        self.prepare_all()?;
        let plan = self.plan.clone();
        let (old, new) = ((&old.set, &old.placement), (&plan.set, &plan.placement));
        self.machine.spaces().scratch().check()?;
        spaces::adopt(&mut self.machine, old, new)?;
        self.machine.spaces().scratch().check()?;
        if let Err(error) = self.start_new() {
            // Back to where it was, but for what passes from op to op.
            self.torn = true;
            if let Err(stuck) = spaces::adopt(&mut self.machine, new, old) {
                let gone = CudaError::Memory { what: "go back to the plan before".into() };
                self.machine.keep(Err::<(), _>(if let DeviceError::Cuda(error) = stuck { error } else { gone }));
            }
            return Err(error);
        }
        self.pool = pool;
        Ok(())
    }
}
