//! Opening a GPU for execution: the order of allocations, and the measurement of [`Charges`]. Loading and first runs of
//! kernels are in `warm_up`.

use super::operands::LoadedPlan;
use super::warm_up::{LoadedKernels, WarmedUp};
use super::{CudaDevice, DEVICE};
use crate::cuda::arena::DeviceArena;
use crate::cuda::compile::Compiler;
use crate::cuda::driver::{Context, Driver, Gpu};
use crate::cuda::kernels::Real;
use crate::cuda::nccl;
use crate::cuda::products::{self, Products};
use crate::cuda::resources::GpuResources;
use crate::device::{Device, DeviceError};
use plimsoll_core::{Bytes, DType, GemmAlgorithms};
use plimsoll_program::{Placement, ProgramSet};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, PoisonError};

/// Everything that opening a GPU needs.
pub struct OpenRequest<'a> {
    /// The driver.
    pub driver: &'a Arc<Driver>,
    /// cuBLASLt.
    pub products: &'a Arc<products::Library>,
    /// NVRTC and its cache.
    pub compiler: &'a Arc<Compiler>,
    /// NCCL, if installed.
    pub nccl: Option<&'a Arc<nccl::Library>>,
    /// GPU number among the visible ones.
    pub ordinal: u32,
    /// Data type of the computation: f32 or bf16.
    pub precision: DType,
    /// CPU threads for host ops.
    pub threads: usize,
    /// GEMM algorithms from a plan or checkpoint.
    pub algorithms: Option<&'a GemmAlgorithms>,
    /// Folder of the scratch file, if the run may have one.
    pub scratch: Option<&'a Path>,
    /// Free memory of the GPU from NVML, before this process opens a context on it (or now, if one is already open).
    pub free_before: Option<Bytes>,
    /// Planned charges. If the measured charges exceed them, no arena is allocated.
    pub charges_max: Option<Bytes>,
}

/// Assumed upper bound of the context's own memory, used if free memory before the context is unknown.
const CONTEXT_BYTES_MAX: Bytes = Bytes::mib(512);

/// Bytes that a GPU holds outside the arena, measured after everything has run once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Charges {
    /// The context. If free memory before it is unknown: all memory then in use on the GPU, at most
    /// `CONTEXT_BYTES_MAX`.
    pub context: Bytes,
    /// Modules, cuBLASLt and kernel-local memory: everything that was loaded after the context.
    pub libraries: Bytes,
    /// Upper bound of bytes mapped beyond the arena size. A constant bound, so that charges do not change with the
    /// arena size.
    pub rounding: Bytes,
}

impl Charges {
    /// Returns the sum of all charges.
    pub fn total(&self) -> Bytes {
        self.context + self.libraries + self.rounding
    }

    /// Includes memory that libraries kept from earlier openings of the same context.
    ///
    /// `since_first` is the memory taken since the context was first opened. Other processes may have taken or freed
    /// memory meanwhile, so it is clamped to the possible range.
    fn with_earlier_libraries(mut self, context: &Context, since_first: Bytes) -> Charges {
        let mut known_max = context.library_bytes_max.lock().unwrap_or_else(PoisonError::into_inner);
        *known_max = (*known_max).max(since_first.clamp(self.libraries, self.libraries + *known_max));
        self.libraries = *known_max;
        self
    }
}

/// A GPU ready for execution.
pub struct OpenedGpu {
    /// The device; its arena is unwritten.
    pub device: Box<dyn Device>,
    /// Properties of the GPU.
    pub gpu: Gpu,
    /// Measured memory outside the arena.
    pub charges: Charges,
    /// GEMM algorithms, to be stored with the plan and checkpoints.
    pub algorithms: GemmAlgorithms,
    /// Whether some algorithms were chosen at this opening. Results of a resumed run may then differ in bits.
    pub newly_tuned: bool,
}

/// Opens a GPU: loads kernels, chooses GEMM algorithms, runs everything once, measures charges, then allocates the
/// arena at its full size.
///
/// # Errors
/// Returns [`CudaError::Refused`] if the arena exceeds free memory, [`DeviceError::ChargesExceedPlan`] if the measured
/// charges exceed the planned ones, and other errors of the driver.
///
/// [`CudaError::Refused`]: crate::cuda::driver::CudaError::Refused
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

/// Measures the charges that a GPU would have with these programs, and chooses their GEMM algorithms. Allocates only as
/// much arena as the largest op needs.
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

/// Returns a GPU on which everything has run once, with an arena as large as the largest op needs, and its charges once
/// the full arena is allocated.
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
    let plan = Arc::new(LoadedPlan { set, placement, real });
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
    Ok((device, charges.with_earlier_libraries(&context, since_first)))
}
