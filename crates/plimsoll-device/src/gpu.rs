//! Opening a GPU by its number (`cuda:0`) with the charges and algorithms in the [`cache`], and watching it
//! from outside the executor. The executor itself is in [`crate::cuda`].
//!
//! Driver, compiler, cuBLASLt and NCCL are loaded once per process, each from the file that discovery chose.

use crate::cache;
use crate::cuda::arena::DeviceArena;
use crate::cuda::compile::Compiler;
use crate::cuda::driver::{Context, Driver};
use crate::cuda::executor::{self, OpenRequest, OpenedGpu, ProcessBytes};
use crate::cuda::gpus::{self, CudaInstallation, GpuInfo};
use crate::cuda::{nccl, products};
use crate::device::Device;
use crate::error::{CudaError, DeviceError};
use crate::probe::Temperature;
use plimsoll_core::{Bytes, DType, GemmAlgorithms, MeasuredBy};
use plimsoll_program::{Placement, ProgramSet};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The loaded NVIDIA libraries that every GPU of the process uses.
struct CudaLibraries {
    driver: Arc<Driver>,
    products: Arc<products::Library>,
    compiler: Arc<Compiler>,
    /// NCCL; `None` if no usable version is installed.
    nccl: Option<Arc<nccl::Library>>,
}

/// Returns NVIDIA's libraries. The first call loads them; if loading fails, the next call tries again.
fn libraries(installation: &'static CudaInstallation) -> Result<&'static CudaLibraries, DeviceError> {
    static LIBRARIES: Mutex<Option<&'static CudaLibraries>> = Mutex::new(None);
    let mut libraries = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(libraries) = *libraries {
        return Ok(libraries);
    }
    let folder = cache::folder();
    let opened = CudaLibraries {
        driver: Arc::new(Driver::load(&installation.driver.path)?),
        products: Arc::new(products::Library::load(&installation.cublaslt()?.path)?),
        compiler: Arc::new(Compiler::open(
            &installation.nvrtc()?.path,
            &installation.driver_version,
            folder.as_deref(),
        )?),
        nccl: installation.nccl().and_then(|found| nccl::Library::load(&found.path).ok()).map(Arc::new),
    };
    // Never unloaded: a driver that has started must stay loaded.
    Ok(libraries.insert(Box::leak(Box::new(opened))))
}

/// Returns the GPU with the driver's number `index`, and the CUDA installation that lists it.
///
/// # Errors
/// Fails if the number is not listed, or there is no driver.
pub fn find_gpu(index: u32) -> Result<(&'static CudaInstallation, &'static GpuInfo), DeviceError> {
    let installation = gpus::installation()?;
    let count = installation.gpus.len() as u32;
    let gpu = installation.gpus.get(index as usize);
    Ok((installation, gpu.ok_or(CudaError::NoDevice { ordinal: index, count })?))
}

/// Returns the free memory of a GPU as reported by NVML. If NVML does not report it, a CUDA context is opened and
/// asked.
///
/// # Errors
/// A library is missing, or the driver fails.
pub fn free_bytes(installation: &'static CudaInstallation, gpu: &GpuInfo) -> Result<Bytes, DeviceError> {
    if let Some(memory) = installation.memory(gpu) {
        return Ok(memory.free_bytes);
    }
    // The context stays open. Its own memory is missing in this figure, so the figure errs on the low side.
    let context = Context::open(&libraries(installation)?.driver, gpu.index, None)?;
    Ok(context.memory()?.0)
}

/// Allocates memory on a GPU without running Programs in it. Dropping the returned arena frees the memory.
///
/// # Errors
/// Fails if the number is not listed, a library is missing, or the GPU has too little free memory.
pub fn hold_bytes(index: u32, bytes: Bytes) -> Result<DeviceArena, DeviceError> {
    let (installation, _) = find_gpu(index)?;
    let context = Context::open(&libraries(installation)?.driver, index, None)?;
    Ok(DeviceArena::allocate(&context, bytes.0)?)
}

/// Returns the free memory of a GPU that NVML reported when this function was first called for that GPU, before this
/// process had a context on it. None if NVML did not report it then.
fn initial_free_bytes(installation: &CudaInstallation, gpu: &GpuInfo) -> Option<Bytes> {
    static INITIAL: Mutex<BTreeMap<u32, Option<Bytes>>> = Mutex::new(BTreeMap::new());
    let mut stored = INITIAL.lock().unwrap_or_else(PoisonError::into_inner);
    *stored.entry(gpu.index).or_insert_with(|| installation.memory(gpu).map(|memory| memory.free_bytes))
}

/// Returns the bytes that this process holds on a GPU. None if NVML does not see the process.
fn process_bytes(installation: &CudaInstallation, gpu: &GpuInfo) -> Option<Bytes> {
    let own = std::process::id();
    installation.processes(gpu).into_iter().find(|process| process.pid == own)?.held_bytes
}

/// Returns a closure that checks whether a GPU still responds, callable from any thread while the GPU works or is being
/// opened.
///
/// A GPU that fell off the bus, or has a hanging driver, does not respond. If NVML does not report the GPU when the
/// closure is first called, the check always succeeds.
pub fn liveness_probe(index: u32) -> impl Fn() -> bool + Send + Sync {
    let first_answer = OnceLock::new();
    move || {
        let responds = find_gpu(index).is_ok_and(|(installation, gpu)| installation.memory(gpu).is_some());
        let first = *first_answer.get_or_init(|| responds);
        responds || !first
    }
}

/// Access to memory figures and temperature of a GPU that a run has opened, also while a Program runs on it.
pub struct GpuMonitor {
    installation: &'static CudaInstallation,
    gpu: &'static GpuInfo,
    /// Whether some GEMM algorithms were newly chosen when the GPU was opened, because neither the caller nor the cache
    /// had them.
    pub newly_tuned: bool,
}

impl GpuMonitor {
    /// Returns the bytes that this process holds on the GPU. None if NVML does not see the process, as in containers
    /// and on WSL.
    pub fn process_bytes(&self) -> Option<Bytes> {
        process_bytes(self.installation, self.gpu)
    }

    /// Returns the bytes that this process holds on the GPU, and how they were measured.
    ///
    /// If NVML does not see this process, the result is the decrease of the GPU's free memory since before this process
    /// used the GPU. None if NVML reports neither.
    pub fn measured_bytes(&self) -> Option<(Bytes, MeasuredBy)> {
        let from_free_memory = || {
            let free_now = self.installation.memory(self.gpu)?.free_bytes;
            Some((initial_free_bytes(self.installation, self.gpu)?.saturating_sub(free_now), MeasuredBy::FreeMemory))
        };
        self.process_bytes().map(|held| (held, MeasuredBy::Process)).or_else(from_free_memory)
    }

    /// Returns the GPU's temperature, and whether the GPU is throttled because of heat. None if NVML does not report
    /// the temperature.
    pub fn heat(&self) -> Option<Temperature> {
        self.installation.condition(self.gpu).heat()
    }
}

/// Options of a run for opening a GPU.
#[derive(Clone, Copy)]
pub struct OpenOptions<'a> {
    /// Number of the GPU in the driver's list, from 0.
    pub index: u32,
    /// Number of CPU threads for ops that run on the host.
    pub threads: usize,
    /// Data type of the computation.
    pub precision: DType,
    /// GEMM algorithms of an earlier run. None takes those in the [`cache`]. An algorithm is newly chosen for each
    /// matrix product that has none.
    pub algorithms: Option<&'a GemmAlgorithms>,
    /// Bytes outside the arena (charges) that the plan assumes. If the GPU holds more, opening fails before the arena
    /// is allocated. None sets no limit.
    pub charges: Option<Bytes>,
    /// Folder of the scratch file. None if the run has no scratch file.
    pub scratch: Option<&'a Path>,
}

impl OpenOptions<'_> {
    fn with_request<T>(
        &self,
        open_with: impl FnOnce(&OpenRequest, &'static CudaInstallation, &'static GpuInfo) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let (installation, gpu) = find_gpu(self.index)?;
        let libraries = libraries(installation)?;
        let initial_free = initial_free_bytes(installation, gpu);
        let stored = if self.algorithms.is_none() { cache::gemm_algorithms(gpu) } else { None };
        let process_bytes: ProcessBytes = Arc::new(|| process_bytes(installation, gpu));
        let request = OpenRequest {
            driver: &libraries.driver,
            products: &libraries.products,
            compiler: &libraries.compiler,
            nccl: libraries.nccl.as_ref(),
            ordinal: self.index,
            precision: self.precision,
            threads: self.threads,
            algorithms: self.algorithms.or(stored.as_ref()),
            // A library may have kept memory of a context that was closed. Taking the larger figure does not attribute
            // it to others.
            free_before: installation.memory(gpu).map(|memory| memory.free_bytes).max(initial_free),
            process_bytes: &process_bytes,
            charges_max: self.charges,
            scratch: self.scratch,
        };
        open_with(&request, installation, gpu)
    }
}

/// Opens a GPU to time the Programs of `set`. Matrix products use the given algorithms. Missing ones, or all if
/// `algorithms` is None, are chosen anew. Bytes outside the arena (charges) are not limited.
///
/// # Errors
/// Fails if the GPU does not exist, a library is missing, or the GPU refuses memory.
pub fn open(
    index: u32,
    threads: usize,
    precision: DType,
    algorithms: Option<&GemmAlgorithms>,
    set: ProgramSet,
    placement: Placement,
) -> Result<OpenedGpu, DeviceError> {
    let options = OpenOptions { index, threads, precision, algorithms, charges: None, scratch: None };
    options.with_request(|request, _, _| executor::open(&OpenRequest { algorithms, ..*request }, set, placement))
}

/// Memory of a GPU at one moment. A figure that is not reported is None.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryMoment {
    /// The moment, such as `after context`.
    pub moment: &'static str,
    /// Free memory by NVML, which other processes change, too.
    pub nvml_free_bytes: Option<Bytes>,
    /// Memory of this process by NVML.
    pub nvml_process_bytes: Option<Bytes>,
    /// Free memory by the driver. None without a context.
    pub driver_free_bytes: Option<Bytes>,
}

impl MemoryMoment {
    fn now(
        moment: &'static str,
        installation: &CudaInstallation,
        gpu: &GpuInfo,
        context: Option<&Context>,
    ) -> MemoryMoment {
        MemoryMoment {
            moment,
            nvml_free_bytes: installation.memory(gpu).map(|memory| memory.free_bytes),
            nvml_process_bytes: process_bytes(installation, gpu),
            driver_free_bytes: context.and_then(|context| context.memory().ok()).map(|(free, _)| free),
        }
    }
}

/// Memory of a GPU from before its context to after its end.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryLedger {
    /// Size of the arena.
    pub arena_bytes: Bytes,
    /// Measured charges: bytes outside the arena.
    pub charges_bytes: Bytes,
    /// The moments in their order.
    pub moments: Vec<MemoryMoment>,
}

/// Opens a GPU for the Programs of `set` and closes it again, and returns its memory at each moment.
///
/// # Errors
/// As [`open`].
pub fn memory_ledger(
    index: u32,
    precision: DType,
    set: ProgramSet,
    placement: Placement,
) -> Result<MemoryLedger, DeviceError> {
    let (installation, gpu) = find_gpu(index)?;
    let libraries = libraries(installation)?;
    let at = |moment, context: Option<&Context>| MemoryMoment::now(moment, installation, gpu, context);
    let mut moments = vec![at("before context", None)];
    let free_before = moments[0].nvml_free_bytes;
    let context = Context::open(&libraries.driver, index, free_before)?;
    moments.push(at("after context", Some(&context)));
    let products = products::Products::new(&libraries.products, &context, None)?;
    moments.push(at("after libraries", Some(&context)));
    drop(products);
    let arena_bytes = Bytes(placement.arena_bytes);
    let options = OpenOptions { index, threads: 1, precision, algorithms: None, charges: None, scratch: None };
    options.with_request(|request, _, _| executor::measure_charges(request, set.clone(), placement.clone()))?;
    moments.push(at("after warm-up, kernels unloaded", Some(&context)));
    let opened = open(index, 1, precision, None, set, placement)?;
    moments.push(at("with kernels and arena", Some(&context)));
    let charges_bytes = opened.charges.total();
    drop(opened);
    moments.push(at("without arena", Some(&context)));
    drop(context);
    Context::close(index);
    moments.push(at("after end", None));
    Ok(MemoryLedger { arena_bytes, charges_bytes, moments })
}

/// Measures the charges of a GPU (the bytes held outside the arena for the Programs of `set`) and returns them. Stores
/// the charges and the chosen GEMM algorithms in the [`cache`]. Allocates only as much arena as the largest op needs.
///
/// # Errors
/// As [`open`].
pub fn measure_charges(options: &OpenOptions, set: ProgramSet, placement: Placement) -> Result<Bytes, DeviceError> {
    options.with_request(|request, installation, gpu| {
        let (charges, algorithms) = executor::measure_charges(request, set, placement)?;
        cache::store_charges(installation, gpu, charges.total());
        cache::store_gemm_algorithms(&algorithms);
        Ok(charges.total())
    })
}

/// Opens a GPU for a run, and stores the measured charges (bytes outside the arena) and the chosen GEMM algorithms in
/// the [`cache`]. Returns the device, and a monitor that observes the GPU while the device runs.
///
/// # Errors
/// As [`open`], and [`DeviceError::ChargesExceedPlan`].
pub fn open_for_run(
    options: &OpenOptions,
    set: ProgramSet,
    placement: Placement,
) -> Result<(Box<dyn Device>, GpuMonitor), DeviceError> {
    options.with_request(|request, installation, gpu| {
        let result = executor::open(request, set, placement);
        if let Err(DeviceError::ChargesExceedPlan { held, .. }) = result {
            cache::store_charges(installation, gpu, held);
        }
        let OpenedGpu { device, charges, algorithms, newly_tuned, .. } = result?;
        cache::store_charges(installation, gpu, charges.total());
        cache::store_gemm_algorithms(&algorithms);
        Ok((device, GpuMonitor { installation, gpu, newly_tuned }))
    })
}
