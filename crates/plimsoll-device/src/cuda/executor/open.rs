//! From an [`Opening`] to a GPU that can run: the order in which things are taken, and the [`Charges`] that are measured
//! on the way. What is loaded and started once before that is in `warm_up`.

use super::frame::Plan;
use super::warm_up::{Kernels, Started};
use super::{CudaDevice, DEVICE};
use crate::cuda::arena::DeviceArena;
use crate::cuda::compile::Compiler;
use crate::cuda::driver::{Context, Driver, Gpu};
use crate::cuda::kernels::Real;
use crate::cuda::machine::Machine;
use crate::cuda::nccl;
use crate::cuda::products::{self, Products};
use crate::device::{Device, DeviceError};
use plimsoll_core::{Algorithms, Bytes, DType};
use plimsoll_program::{Placement, ProgramSet};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, PoisonError};

/// What it takes to open a GPU.
pub struct Opening<'a> {
    /// The driver.
    pub driver: &'a Arc<Driver>,
    /// cuBLASLt.
    pub products: &'a Arc<products::Library>,
    /// NVRTC and its cache.
    pub compiler: &'a Arc<Compiler>,
    /// NCCL, where it is here.
    pub nccl: Option<&'a Arc<nccl::Library>>,
    /// The GPU's number among the visible ones.
    pub ordinal: u32,
    /// What the run computes in: f32 or bf16.
    pub precision: DType,
    /// Threads of the processor, for ops that the host does.
    pub threads: usize,
    /// The algorithms of products that were chosen before, from plan or checkpoint.
    pub algorithms: Option<&'a Algorithms>,
    /// Where the scratch file is, where there may be one.
    pub scratch: Option<&'a Path>,
    /// What is free on the GPU now, where NVML says so: before this process has a context on it, if it has none yet.
    pub free_before: Option<Bytes>,
    /// The charges that were planned with: where they turn out to be more, no arena is taken.
    pub charges_max: Option<Bytes>,
}

/// What only the context itself takes, where nobody said what was free before it: most take less.
const CONTEXT_BYTES_MAX: Bytes = Bytes::mib(512);

/// Bytes that a GPU holds for us beside the arena, measured after everything was started once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Charges {
    /// The context. Where nobody said what was free before it: all that is held on the GPU then, or what most contexts
    /// do not reach, whichever is less.
    pub context: Bytes,
    /// Modules, cuBLASLt, local memory of kernels: what came after the context.
    pub libraries: Bytes,
    /// What is mapped beyond the arena's own bytes, at most: it changes with them, and charges should not.
    pub rounding: Bytes,
}

impl Charges {
    /// All of them.
    pub fn total(&self) -> Bytes {
        self.context + self.libraries + self.rounding
    }

    /// What a GPU holds is seen whole only when its context is opened for the first time: libraries keep much of what they
    /// have loaded in it. `since_first` is what came since then, as far as it is ours: others may have taken or given
    /// meanwhile, so that it counts as much as is possible.
    fn with_those_before(mut self, context: &Context, since_first: Bytes) -> Charges {
        let mut charged = context.charged.lock().unwrap_or_else(PoisonError::into_inner);
        *charged = (*charged).max(since_first.clamp(self.libraries, self.libraries + *charged));
        self.libraries = *charged;
        self
    }
}

/// An opened GPU.
pub struct Opened {
    /// Ready to run Programs; its arena is unwritten.
    pub device: Box<dyn Device>,
    /// What it is.
    pub gpu: Gpu,
    /// What it holds beside the arena.
    pub charges: Charges,
    /// The algorithms of its products, to be kept with plan and checkpoint.
    pub algorithms: Algorithms,
    /// Whether some of them were chosen now: a run that goes on may then differ in bits.
    pub chosen_anew: bool,
}

/// Opens a GPU: loads the kernels, chooses the algorithms of products, starts everything once, measures what that holds,
/// and only then takes the arena, whole and at once.
///
/// # Errors
/// What the GPU refuses; [`CudaError::Refused`] where the arena is larger than what is free;
/// [`DeviceError::MoreCharges`] where more is held beside it than was planned with.
///
/// [`CudaError::Refused`]: crate::cuda::driver::CudaError::Refused
pub fn open(opening: &Opening, set: ProgramSet, placement: Placement) -> Result<Opened, DeviceError> {
    let (mut device, charges) = start(opening, set, placement)?;
    device.charges = charges;
    if let Some(planned) = opening.charges_max.filter(|planned| charges.total() > *planned) {
        return Err(DeviceError::MoreCharges { held: charges.total(), planned });
    }
    let arena_bytes = device.plan.placement.arena_bytes;
    device.machine.retake(arena_bytes)?;
    device.machine.fill_pattern()?;
    device.prepare_all()?;
    device.machine.context.synchronize()?;
    let (algorithms, chosen_anew) = device.products.algorithms();
    let gpu = device.machine.context.gpu().clone();
    Ok(Opened { device: Box::new(device), gpu, charges, algorithms, chosen_anew })
}

/// What a GPU would hold beside the arena of these Programs, and the algorithms that their products would have. No more is
/// taken on the way than the largest op needs.
///
/// # Errors
/// What the GPU refuses.
pub fn charges(opening: &Opening, set: ProgramSet, placement: Placement) -> Result<(Charges, Algorithms), DeviceError> {
    let (device, charges) = start(opening, set, placement)?;
    Ok((charges, device.products.algorithms().0))
}

/// A GPU on which everything was started once, in an arena that is as large as the largest op needs; and what is held
/// beside it, or will be when the whole arena is taken.
fn start(opening: &Opening, set: ProgramSet, placement: Placement) -> Result<(CudaDevice, Charges), DeviceError> {
    let real = match opening.precision {
        DType::F32 => Real::F32,
        DType::Bf16 => Real::Bf16,
        _ => return Err(DeviceError::Unsupported { op: "this precision", device: DEVICE }),
    };
    let context = Context::open(opening.driver, opening.ordinal, opening.free_before)?;
    let (free_with_context, total) = context.memory()?;
    let machine = Machine::take(&context, &placement, opening.scratch)?;
    let products = Products::new(opening.products, &context, opening.algorithms)?;
    let plan = Arc::new(Plan { set, placement, real });
    let pool = plan.pool(opening.threads)?;
    let (prepared, kernels, compiler) = (BTreeMap::new(), Kernels::default(), opening.compiler.clone());
    let mut device = CudaDevice {
        prepared,
        products,
        kernels,
        plan,
        machine,
        pool,
        threads: opening.threads,
        compiler,
        charges: Charges::default(),
        started: Started::default(),
        seat: None,
        library: opening.nccl.cloned(),
        nccl: None,
        torn: false,
    };
    device.load_kernels()?;
    device.rehearse()?;
    let (free_after, _) = context.memory()?;
    let held = device.machine.held();
    let charges = Charges {
        context: match context.free_before() {
            Some(before) => before.saturating_sub(context.free_at_first()),
            None => total.saturating_sub(context.free_at_first()).min(CONTEXT_BYTES_MAX),
        },
        libraries: free_with_context.saturating_sub(free_after).saturating_sub(held),
        rounding: DeviceArena::rounding_max(&context)?,
    };
    let since_first = context.free_at_first().saturating_sub(free_after).saturating_sub(held);
    Ok((device, charges.with_those_before(&context, since_first)))
}
