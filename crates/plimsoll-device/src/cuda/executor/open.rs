//! Opening a GPU for execution: the order of allocations, and the measurement of [`Charges`]. Loading and first runs of
//! kernels are in `warm_up`.

use super::operands::LoadedPlan;
use super::warm_up::{LoadedKernels, WarmedUp};
use super::{CudaDevice, DEVICE};
use crate::cuda::arena::DeviceArena;
use crate::cuda::compile::Compiler;
use crate::cuda::driver::{Context, Driver, Gpu};
use crate::cuda::kernels::{Real, Target};
use crate::cuda::nccl;
use crate::cuda::products::{self, Products};
use crate::cuda::resources::GpuResources;
use crate::device::Device;
use crate::error::{CudaError, DeviceError};
use plimsoll_core::{Bytes, DType, GemmAlgorithms};
use plimsoll_program::{Placement, ProgramSet};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, PoisonError};

/// Function that returns the bytes that this process holds on a GPU, or `None` if NVML does not see the process.
pub type ProcessBytes = Arc<dyn Fn() -> Option<Bytes> + Send + Sync>;

/// The libraries, settings and limits for opening a GPU.
pub struct OpenRequest<'a> {
    /// Function table of the driver.
    pub driver: &'a Arc<Driver>,
    /// cuBLASLt, for matrix products.
    pub products: &'a Arc<products::Library>,
    /// NVRTC, which compiles kernels, with its cache.
    pub compiler: &'a Arc<Compiler>,
    /// NCCL; `None` if it is not installed. Collectives then go through the host.
    pub nccl: Option<&'a Arc<nccl::Library>>,
    /// Number of the GPU among the visible ones, from 0.
    pub ordinal: u32,
    /// Data type of the computation: f32 or bf16.
    pub precision: DType,
    /// Number of CPU threads for ops that run on the host.
    pub threads: usize,
    /// GEMM algorithms from a plan or checkpoint; `None` if there are none. For a product without a usable algorithm,
    /// opening times several and keeps the fastest.
    pub algorithms: Option<&'a GemmAlgorithms>,
    /// Folder of the scratch file; `None` for runs without a scratch file.
    pub scratch: Option<&'a Path>,
    /// Free memory of the GPU just before this opening, from NVML; `None` if NVML does not report it. Not used if this
    /// process already has a context on the GPU.
    pub free_before: Option<Bytes>,
    /// Reports the bytes that this process holds on the GPU.
    pub process_bytes: &'a ProcessBytes,
    /// Charges in the plan: bytes that the GPU may hold outside the arena. Opening fails if more are measured. `None`
    /// sets no limit.
    pub charges_max: Option<Bytes>,
}

/// Assumed upper bound of the memory that a CUDA context takes. Used if the free memory before the context is unknown.
const CONTEXT_BYTES_MAX: Bytes = Bytes::mib(512);

/// Assumed upper bound of the bytes that the driver takes for a process on a GPU and NVML does not count as the
/// process's own. On an H200, a whole device held at most 4 MiB more than predicted, in 111 plans.
const UNCOUNTED_BYTES_MAX: Bytes = Bytes::mib(32);

/// Bytes that this process holds on a GPU outside the arena, measured after each kernel and product has run once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Charges {
    /// Memory taken by opening the CUDA context. If the free memory before that is unknown, this is an upper bound: all
    /// memory in use on the GPU just after, at most `CONTEXT_BYTES_MAX`.
    pub context: Bytes,
    /// Memory taken after the context was opened and outside the arena: loaded kernels, cuBLASLt, and local memory of
    /// kernels.
    pub libraries: Bytes,
    /// Upper bound of the bytes that are mapped beyond the arena's size, because memory is mapped in whole granules. It
    /// is the same for every arena size.
    pub rounding: Bytes,
}

impl Charges {
    /// Returns the sum of all charges.
    pub fn total(&self) -> Bytes {
        self.context + self.libraries + self.rounding
    }

    /// Limits context and libraries to `own_max` bytes, the most that this process holds outside the arena; `None` sets
    /// no limit. Charges are measured as a decrease of free memory, to which memory that other processes take meanwhile
    /// counts too.
    fn at_most(self, own_max: Option<Bytes>) -> Charges {
        let Some(own_max) = own_max else { return self };
        let context = self.context.min(own_max);
        Charges { context, libraries: self.libraries.min(own_max.saturating_sub(context)), ..self }
    }

    /// Raises `libraries` to include memory that libraries kept from earlier uses of the same context.
    ///
    /// `since_first` is the memory taken on the GPU since the context was opened. Other processes may have taken or
    /// freed some of it. It is therefore clamped between `libraries` and `libraries` plus the largest figure of earlier
    /// uses.
    fn with_earlier_libraries(mut self, context: &Context, since_first: Bytes) -> Charges {
        let mut known_max = context.library_bytes_max.lock().unwrap_or_else(PoisonError::into_inner);
        *known_max = (*known_max).max(since_first.clamp(self.libraries, self.libraries + *known_max));
        self.libraries = *known_max;
        self
    }
}

/// A GPU ready for execution.
pub struct OpenedGpu {
    /// The device, with its arena at full size. The arena holds the pattern of unwritten bytes.
    pub device: Box<dyn Device>,
    /// Properties of the GPU.
    pub gpu: Gpu,
    /// Measured bytes that the GPU holds outside the arena.
    pub charges: Charges,
    /// GEMM algorithm of each matrix product, to be stored with the plan and checkpoints.
    pub algorithms: GemmAlgorithms,
    /// Whether this opening chose an algorithm that the request did not give. Results of a resumed run may then differ
    /// in bits from those before.
    pub newly_tuned: bool,
}

/// Opens a GPU: loads kernels, chooses GEMM algorithms, runs each kernel and product once, measures charges, then
/// allocates the arena at its full size.
///
/// # Errors
/// Returns [`CudaError::Refused`] if the arena exceeds free memory, [`DeviceError::ChargesExceedPlan`] if the measured
/// charges exceed the planned ones, and other errors of the driver.
///
/// [`CudaError::Refused`]: crate::error::CudaError::Refused
pub fn open(request: &OpenRequest, set: ProgramSet, placement: Placement) -> Result<OpenedGpu, DeviceError> {
    let (mut device, charges) = open_without_arena(request, set, placement)?;
    device.charges = charges;
    if let Some(planned) = request.charges_max.filter(|planned| charges.total() > *planned) {
        return Err(DeviceError::ChargesExceedPlan { held: charges.total(), planned });
    }
    let arena_bytes = device.plan.placement.arena_bytes;
    device.resources.resize_discarding(arena_bytes)?;
    device.resources.fill_pattern()?;
    device.prepare_all()?;
    device.resources.context.synchronize()?;
    let (algorithms, newly_tuned) = device.products.algorithms();
    let gpu = device.resources.context.gpu().clone();
    Ok(OpenedGpu { device: Box::new(device), gpu, charges, algorithms, newly_tuned })
}

/// Opens a GPU for these programs, runs each kernel and product once, and closes the device. Its arena is just large
/// enough for the largest op. Returns the measured charges and the chosen GEMM algorithms.
///
/// # Errors
/// Returns the error of the GPU.
pub fn measure_charges(
    request: &OpenRequest,
    set: ProgramSet,
    placement: Placement,
) -> Result<(Charges, GemmAlgorithms), DeviceError> {
    let (device, charges) = open_without_arena(request, set, placement)?;
    Ok((charges, device.products.algorithms().0))
}

/// Opens a GPU with an arena just large enough for the largest op, and runs each kernel and product once. Returns it
/// with the measured charges, which do not change when the full arena is allocated.
fn open_without_arena(
    request: &OpenRequest,
    set: ProgramSet,
    placement: Placement,
) -> Result<(CudaDevice, Charges), DeviceError> {
    let real = match request.precision {
        DType::F32 => Real::F32,
        DType::Bf16 => Real::Bf16,
        _ => return Err(DeviceError::Unsupported { op: "this precision", device: DEVICE }),
    };
    let context = Context::open(request.driver, request.ordinal, request.free_before)?;
    let (free_with_context, total) = context.memory()?;
    let resources = GpuResources::allocate(&context, &placement, request.scratch)?;
    let products = Products::new(request.products, &context, request.algorithms)?;
    let target = Target { architecture: context.gpu().architecture, compiler: request.compiler.release() };
    let plan = Arc::new(LoadedPlan { set, placement, real, target });
    let pool = plan.pool(request.threads)?;
    let (prepared, kernels, compiler) = (BTreeMap::new(), LoadedKernels::default(), request.compiler.clone());
    let mut device = CudaDevice {
        prepared,
        products,
        kernels,
        plan,
        resources,
        pool,
        threads: request.threads,
        compiler,
        charges: Charges::default(),
        process_bytes: request.process_bytes.clone(),
        warmed_up: WarmedUp::default(),
        group: None,
        nccl_library: request.nccl.cloned(),
        nccl: None,
        intermediates_lost: false,
    };
    device.load_kernels()?;
    device.warm_up_all()?;
    let (free_after, _) = context.memory()?;
    let held = device.resources.held_bytes();
    let charges = Charges {
        context: match context.free_before() {
            Some(before) => before.saturating_sub(context.free_after_open()),
            None => total.saturating_sub(context.free_after_open()).min(CONTEXT_BYTES_MAX),
        },
        libraries: free_with_context.saturating_sub(free_after).saturating_sub(held),
        rounding: DeviceArena::rounding_bytes_max(&context)?,
    };
    let since_first = context.free_after_open().saturating_sub(free_after).saturating_sub(held);
    let own_max = device.own_charges_max();
    let since_first = own_max.map_or(since_first, |own_max| since_first.min(own_max));
    Ok((device, charges.at_most(own_max).with_earlier_libraries(&context, since_first)))
}

impl CudaDevice {
    /// Returns an upper bound of the context and library memory of this process: its bytes on the GPU without the
    /// arena. `None` if NVML does not see the process.
    fn own_charges_max(&self) -> Option<Bytes> {
        let process_bytes = (self.process_bytes)()?;
        Some(process_bytes.saturating_sub(self.resources.held_bytes()) + UNCOUNTED_BYTES_MAX)
    }

    /// Adds memory that libraries took to the charges. `free_before` is the free memory of the GPU before that.
    ///
    /// # Errors
    /// Fails if the driver does not report its memory.
    pub(super) fn add_library_bytes(&mut self, free_before: Bytes) -> Result<(), CudaError> {
        let taken = free_before.saturating_sub(self.resources.context.memory()?.0);
        self.charges.libraries += taken;
        self.charges = self.charges.at_most(self.own_charges_max());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_others_is_no_charge() {
        let mib = Bytes::mib;
        let charges = Charges { context: mib(500), libraries: mib(27_000), rounding: mib(2) };
        assert_eq!(charges.at_most(None), charges);
        let own = Charges { libraries: mib(60), ..charges };
        assert_eq!(charges.at_most(Some(mib(560))), own);
        assert_eq!(own.at_most(Some(mib(600))), own);
        // Another process took memory while the context was opened.
        let whole = Charges { context: mib(560), libraries: Bytes::ZERO, ..charges };
        assert_eq!(Charges { context: mib(9_000), ..charges }.at_most(Some(mib(560))), whole);
    }
}
