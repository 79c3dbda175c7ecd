//! Opening a GPU by its number (`cuda:0`) and watching it from outside the executor.
//!
//! Driver, compiler, cuBLASLt and NCCL are loaded once per process, each from the file that discovery chose.

use super::arena::DeviceArena;
use super::compile::Compiler;
use super::driver::Driver;
use super::executor::{self, OpenRequest, OpenedGpu};
use super::gpus::{self, CudaInstallation, GpuInfo};
use super::{nccl, products};
use crate::calibration;
use crate::device::{Device, DeviceError};
use crate::probe::Temperature;
use plimsoll_core::{Bytes, DType, GemmAlgorithms, MeasuredBy};
use plimsoll_program::{Placement, ProgramSet};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The loaded NVIDIA libraries that every GPU of the process uses.
pub(crate) struct CudaLibraries {
    /// The driver.
    pub driver: Arc<Driver>,
    products: Arc<products::Library>,
    compiler: Arc<Compiler>,
    /// NCCL; `None` if no usable version is installed.
    nccl: Option<Arc<nccl::Library>>,
}

/// Loads the libraries at the first successful call and returns them. A failed call is retried by the next one.
pub(crate) fn libraries(installation: &'static CudaInstallation) -> Result<&'static CudaLibraries, DeviceError> {
    static LIBRARIES: Mutex<Option<&'static CudaLibraries>> = Mutex::new(None);
    let mut libraries = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(libraries) = *libraries {
        return Ok(libraries);
    }
    let folder = calibration::folder();
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

/// Returns the GPU with this driver number, and the installation that lists it.
///
/// # Errors
/// Fails if the number is not listed, or there is no driver.
pub fn find_gpu(index: u32) -> Result<(&'static CudaInstallation, &'static GpuInfo), DeviceError> {
    let installation = gpus::installation()?;
    let count = installation.gpus.len() as u32;
    let gpu = installation.gpus.get(index as usize);
    Ok((installation, gpu.ok_or(super::driver::CudaError::NoDevice { ordinal: index, count })?))
}

/// Returns the free memory of a GPU from NVML, or from a context if NVML does not report it.
///
/// # Errors
/// Returns the driver's error.
pub fn free_bytes(installation: &'static CudaInstallation, gpu: &GpuInfo) -> Result<Bytes, DeviceError> {
    if let Some(memory) = installation.memory(gpu) {
        return Ok(memory.free_bytes);
    }
    // The context stays open. Its own memory is missing in this figure, so the figure errs on the low side.
    let context = super::driver::Context::open(&libraries(installation)?.driver, gpu.index, None)?;
    Ok(context.memory()?.0)
}

/// Reserves memory of a GPU without running programs in it. Dropping the arena frees it.
///
/// # Errors
/// Fails if the number is not listed, or the GPU has too little free memory.
pub fn hold_bytes(index: u32, bytes: Bytes) -> Result<DeviceArena, DeviceError> {
    let (installation, _) = find_gpu(index)?;
    let context = super::driver::Context::open(&libraries(installation)?.driver, index, None)?;
    Ok(DeviceArena::allocate(&context, bytes.0)?)
}

/// Returns the free memory that NVML reported at the first call, before this process had a context on the GPU.
fn initial_free_bytes(installation: &CudaInstallation, gpu: &GpuInfo) -> Option<Bytes> {
    static INITIAL: Mutex<BTreeMap<u32, Option<Bytes>>> = Mutex::new(BTreeMap::new());
    let mut stored = INITIAL.lock().unwrap_or_else(PoisonError::into_inner);
    *stored.entry(gpu.index).or_insert_with(|| installation.memory(gpu).map(|memory| memory.free_bytes))
}

/// Returns a closure that checks whether a GPU still responds, callable from any thread while the GPU works or is being
/// opened.
///
/// A GPU that fell off the bus, or has a hanging driver, does not respond. If NVML does not report the GPU at the
/// first call, the check always succeeds.
pub fn liveness_probe(index: u32) -> impl Fn() -> bool + Send + Sync {
    let first_answer = OnceLock::new();
    move || {
        let responds = find_gpu(index).is_ok_and(|(installation, gpu)| installation.memory(gpu).is_some());
        let first = *first_answer.get_or_init(|| responds);
        responds || !first
    }
}

/// A GPU that a run has opened, observed outside the executor.
pub struct GpuMonitor {
    installation: &'static CudaInstallation,
    gpu: &'static GpuInfo,
    /// Whether some GEMM algorithms were chosen at this opening instead of taken from storage.
    pub newly_tuned: bool,
}

impl GpuMonitor {
    /// Returns the bytes that this process holds on the GPU. NVML does not see processes in containers and on WSL.
    pub fn process_bytes(&self) -> Option<Bytes> {
        let own = std::process::id();
        self.installation.processes(self.gpu).into_iter().find(|process| process.pid == own)?.held_bytes
    }

    /// Returns the bytes that this process holds on the GPU, and how they were measured.
    ///
    /// If NVML does not see processes, the result is the decrease of free memory since this process started. Returns
    /// `None` if NVML reports neither.
    pub fn measured_bytes(&self) -> Option<(Bytes, MeasuredBy)> {
        let from_free_memory = || {
            let free_now = self.installation.memory(self.gpu)?.free_bytes;
            Some((initial_free_bytes(self.installation, self.gpu)?.saturating_sub(free_now), MeasuredBy::FreeMemory))
        };
        self.process_bytes().map(|held| (held, MeasuredBy::Process)).or_else(from_free_memory)
    }

    /// Returns the temperature and throttling state, if NVML reports them.
    pub fn heat(&self) -> Option<Temperature> {
        self.installation.condition(self.gpu).heat()
    }
}

/// Options of a run for opening a GPU.
#[derive(Clone, Copy)]
pub struct OpenOptions<'a> {
    /// Driver number of the GPU.
    pub index: u32,
    /// CPU threads for ops that run on the host.
    pub threads: usize,
    /// Data type of the computation.
    pub precision: DType,
    /// GEMM algorithms of an earlier run. If `None`, those stored on this machine are used.
    pub algorithms: Option<&'a GemmAlgorithms>,
    /// Measured charges that the plan assumes. If the GPU holds more, opening fails before the arena is allocated.
    pub charges: Option<Bytes>,
    /// Folder of the scratch file, if the run may have one.
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
        let stored = if self.algorithms.is_none() { calibration::gemm_algorithms(gpu) } else { None };
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
            charges_max: self.charges,
            scratch: self.scratch,
        };
        open_with(&request, installation, gpu)
    }
}

/// Opens a GPU to measure the programs of a plan. Products use the given algorithms; missing ones are chosen anew.
/// Charges are not limited.
///
/// # Errors
/// Fails if a library is missing, or the GPU refuses memory.
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

/// Measures and stores the charges of a GPU: memory held outside the arena for these programs. Allocates only as much
/// arena as the largest op needs.
///
/// # Errors
/// As [`open`].
pub fn measure_charges(options: &OpenOptions, set: ProgramSet, placement: Placement) -> Result<Bytes, DeviceError> {
    options.with_request(|request, installation, gpu| {
        let (charges, algorithms) = executor::measure_charges(request, set, placement)?;
        calibration::store_charges(installation, gpu, charges.total());
        calibration::store_gemm_algorithms(&algorithms);
        Ok(charges.total())
    })
}

/// Opens a GPU for a run and stores the measured charges and chosen algorithms for later runs.
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
            calibration::store_charges(installation, gpu, held);
        }
        let OpenedGpu { device, charges, algorithms, newly_tuned, .. } = result?;
        calibration::store_charges(installation, gpu, charges.total());
        calibration::store_gemm_algorithms(&algorithms);
        Ok((device, GpuMonitor { installation, gpu, newly_tuned }))
    })
}
