//! The driver of NVIDIA GPUs: a table of its functions, and a safe core over them (context, memory, streams, events,
//! modules). Nothing here knows Programs.
//!
//! Functions are found by name in the library that is there: no CUDA is needed to build, and what is missing is an
//! error that names it. All of them exist since CUDA 11.4 and still in 13. Status codes are read as plain numbers,
//! because a newer driver has codes that no older list knows.
//!
//! | library | functions that are called |
//! |---|---|
//! | `libcuda.so.1` | those in [`Driver`] below |
//! | `libcublasLt.so.*` | those in [`super::products::Library`] |
//! | `libnccl.so.2` | those in [`super::nccl::Library`] |

use super::compile::Architecture;
use super::headers::{Structure, numbers, structure};
use super::kernels::Unit;
use plimsoll_core::{Bytes, Failure};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

/// A place in the memory of the device.
pub type Address = u64;
/// What every function of the driver returns.
type Status = c_uint;
/// Something of the driver's that is only passed on.
type Handle = *mut c_void;

/// Declares a table of functions of a library, and how it is loaded: whole, or not at all.
macro_rules! library {
    ($(#[$note:meta])* $table:ident { $(fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $returned:ty;)* }) => {
        $(#[$note])*
        #[allow(non_snake_case)]
        pub struct $table {
            $(pub(super) $name: unsafe extern "C" fn($($argument: $type),*) -> $returned,)*
        }

        impl $table {
            /// How each is called, to be compared with the library's header.
            pub(super) const CALLS: &'static [$crate::cuda::headers::Call] = &[$($crate::cuda::headers::Call {
                name: stringify!($name),
                returned: <$returned as $crate::cuda::headers::Passed>::AS,
                arguments: &[$(<$type as $crate::cuda::headers::Passed>::AS),*],
            }),*];

            /// Loads the library, for as long as the process lives.
            ///
            /// # Errors
            /// Where it cannot be loaded, or lacks a function.
            pub fn load(path: &std::path::Path) -> Result<$table, $crate::cuda::driver::CudaError> {
                use $crate::cuda::driver::CudaError;
                let name = || path.display().to_string();
                // SAFETY: a library of NVIDIA's by the name that it is found under everywhere; what it runs while it
                // is loaded touches nothing of ours.
                let library = unsafe { libloading::Library::new(path) }
                    .map_err(|error| CudaError::Library { library: name(), says: error.to_string() })?;
                $(
                    // SAFETY: the type is the one that the library's header gives to this name.
                    #[allow(non_snake_case)]
                    let $name = *unsafe {
                        library.get::<unsafe extern "C" fn($($argument: $type),*) -> $returned>(stringify!($name))
                    }
                    .map_err(|_| CudaError::Function { library: name(), function: stringify!($name) })?;
                )*
                // The pointers stay good because the library is never unloaded.
                std::mem::forget(library);
                Ok($table { $($name),* })
            }
        }
    };
}
pub(super) use library;

library! {
    /// The functions of the driver that are called, and no others.
    Driver {
        fn cuInit(flags: c_uint) -> Status;
        fn cuGetErrorName(status: Status, name: *mut *const c_char) -> Status;
        fn cuGetErrorString(status: Status, text: *mut *const c_char) -> Status;
        fn cuDriverGetVersion(version: *mut c_int) -> Status;
        fn cuDeviceGetCount(count: *mut c_int) -> Status;
        fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Status;
        fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) -> Status;
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) -> Status;
        fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> Status;
        fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int) -> Status;
        fn cuCtxSetCurrent(context: Handle) -> Status;
        fn cuCtxSynchronize() -> Status;
        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status;
        fn cuMemAlloc_v2(address: *mut Address, bytes: usize) -> Status;
        fn cuMemFree_v2(address: Address) -> Status;
        fn cuMemGetAllocationGranularity(bytes: *mut usize, of: *const Allocation, option: c_uint) -> Status;
        fn cuMemAddressReserve(
            address: *mut Address, bytes: usize, alignment: usize, at: Address, flags: c_ulonglong,
        ) -> Status;
        fn cuMemAddressFree(address: Address, bytes: usize) -> Status;
        fn cuMemCreate(memory: *mut c_ulonglong, bytes: usize, of: *const Allocation, flags: c_ulonglong) -> Status;
        fn cuMemRelease(memory: c_ulonglong) -> Status;
        fn cuMemMap(address: Address, bytes: usize, offset: usize, memory: c_ulonglong, flags: c_ulonglong) -> Status;
        fn cuMemUnmap(address: Address, bytes: usize) -> Status;
        fn cuMemSetAccess(address: Address, bytes: usize, access: *const Access, count: usize) -> Status;
        fn cuMemHostAlloc(place: *mut *mut c_void, bytes: usize, flags: c_uint) -> Status;
        fn cuMemFreeHost(place: *mut c_void) -> Status;
        fn cuMemHostRegister_v2(place: *mut c_void, bytes: usize, flags: c_uint) -> Status;
        fn cuMemHostUnregister(place: *mut c_void) -> Status;
        fn cuMemcpyHtoDAsync_v2(to: Address, from: *const c_void, bytes: usize, stream: Handle) -> Status;
        fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: Address, bytes: usize, stream: Handle) -> Status;
        fn cuMemcpyDtoDAsync_v2(to: Address, from: Address, bytes: usize, stream: Handle) -> Status;
        fn cuMemsetD8Async(to: Address, value: u8, count: usize, stream: Handle) -> Status;
        fn cuMemsetD16Async(to: Address, value: u16, count: usize, stream: Handle) -> Status;
        fn cuStreamCreate(stream: *mut Handle, flags: c_uint) -> Status;
        fn cuStreamDestroy_v2(stream: Handle) -> Status;
        fn cuStreamSynchronize(stream: Handle) -> Status;
        fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) -> Status;
        fn cuEventCreate(event: *mut Handle, flags: c_uint) -> Status;
        fn cuEventDestroy_v2(event: Handle) -> Status;
        fn cuEventRecord(event: Handle, stream: Handle) -> Status;
        fn cuEventQuery(event: Handle) -> Status;
        fn cuEventSynchronize(event: Handle) -> Status;
        fn cuEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) -> Status;
        fn cuModuleLoadData(module: *mut Handle, image: *const c_void) -> Status;
        fn cuModuleUnload(module: Handle) -> Status;
        fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) -> Status;
        fn cuFuncSetAttribute(function: Handle, attribute: c_uint, value: c_int) -> Status;
        fn cuLaunchKernel(
            function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint, stream: Handle, arguments: *mut *mut c_void, extra: *mut *mut c_void,
        ) -> Status;
    }
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Location {
    kind: c_uint,
    id: c_int,
}

/// `CUmemAllocationProp`: what kind of memory is made.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Allocation {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    windows: *mut c_void,
    compression: u8,
    direct: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc`: who may touch mapped memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    location: Location,
    flags: c_uint,
}

/// What cuda.h calls their fields.
pub(super) const STRUCTURES: &[Structure] = &[
    structure!(CUmemLocation, Location { "type" => kind: c_uint, "id" => id: c_int }),
    structure!(CUmemAllocationProp, Allocation {
        "type" => kind: c_uint, "requestedHandleTypes" => handle_types: c_uint, "location" => location: Location,
        "win32HandleMetaData" => windows: *mut c_void, "allocFlags.compressionType" => compression: u8,
        "allocFlags.gpuDirectRDMACapable" => direct: u8, "allocFlags.usage" => usage: u16,
        "allocFlags.reserved" => reserved: [u8; 4],
    }),
    structure!(CUmemAccessDesc, Access { "location" => location: Location, "flags" => flags: c_uint }),
];

numbers! {
    /// Values of the enumerations in cuda.h.
    NUMBERS {
        CU_MEM_ALLOCATION_TYPE_PINNED => ALLOCATION_PINNED: c_uint = 1;
        CU_MEM_LOCATION_TYPE_DEVICE => LOCATION_DEVICE: c_uint = 1;
        CU_MEM_ACCESS_FLAGS_PROT_READWRITE => ACCESS_READ_WRITE: c_uint = 3;
        CU_MEM_ALLOC_GRANULARITY_MINIMUM => GRANULARITY_MINIMUM: c_uint = 0;
        CU_STREAM_NON_BLOCKING => STREAM_NON_BLOCKING: c_uint = 1;
        CU_EVENT_DISABLE_TIMING => EVENT_DISABLE_TIMING: c_uint = 2;
        CU_MEMHOSTALLOC_PORTABLE => HOST_PORTABLE: c_uint = 1;
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => FUNCTION_MAX_DYNAMIC_SHARED: c_uint = 8;
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => DEVICE_MULTIPROCESSORS: c_uint = 16;
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => DEVICE_COMPUTE_MAJOR: c_uint = 75;
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => DEVICE_COMPUTE_MINOR: c_uint = 76;
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => DEVICE_SHARED_OPTIN: c_uint = 97;
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED => DEVICE_VIRTUAL_MEMORY: c_uint = 102;
        CUDA_ERROR_OUT_OF_MEMORY => OUT_OF_MEMORY: Status = 2;
        CUDA_ERROR_NOT_READY => NOT_READY: Status = 600;
        CUDA_ERROR_NOT_SUPPORTED => NOT_SUPPORTED: Status = 801;
        CUDA_ERROR_NO_DEVICE => NO_DEVICE: Status = 100;
    }
}

/// What goes wrong between us and a GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// A library is not there, or is none.
    #[error("{library} cannot be loaded: {says}")]
    Library {
        /// The name or path that was tried.
        library: String,
        /// What the system said.
        says: String,
    },
    /// A library lacks a function.
    #[error("{library} has no `{function}`: it is too old")]
    Function {
        /// The library.
        library: String,
        /// The function's name.
        function: &'static str,
    },
    /// There are fewer GPUs.
    #[error("there is no cuda:{ordinal}: the driver knows {count} gpu(s)")]
    NoDevice {
        /// The one that was asked for, from 0.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// The arena was refused.
    #[error("an arena of {asked} is refused on {gpu}: {free} of {total} are free")]
    Refused {
        /// The size of the arena.
        asked: Bytes,
        /// The GPU.
        gpu: String,
        /// What was free at that moment.
        free: Bytes,
        /// What the GPU has.
        total: Bytes,
    },
    /// A kernel's tiles are larger than what a block may have on this GPU.
    #[error("{kernel} needs {asked} of shared memory for a block, and {gpu} has {most}")]
    Shared {
        /// The kernel.
        kernel: &'static str,
        /// What it needs.
        asked: Bytes,
        /// The GPU.
        gpu: String,
        /// What it has.
        most: Bytes,
    },
    /// Memory beside the arena was refused: a module, an event, a pinned buffer.
    #[error("no memory was left to {what}")]
    Memory {
        /// What was tried.
        what: Cow<'static, str>,
    },
    /// The context is broken: nothing more can be done on this device in this process.
    #[error("the gpu is lost: {what} says {name} ({text})")]
    Lost {
        /// What was tried.
        what: Cow<'static, str>,
        /// The driver's name for it.
        name: String,
        /// The driver's words.
        text: String,
    },
    /// Another refusal of the driver.
    #[error("the driver refuses to {what}: {name} ({text})")]
    Call {
        /// What was tried.
        what: Cow<'static, str>,
        /// The driver's name for it.
        name: String,
        /// The driver's words.
        text: String,
    },
    /// A refusal of cuBLASLt.
    #[error("cuBLASLt refuses to {what}: {name}{product}")]
    Product {
        /// What was tried.
        what: &'static str,
        /// Its name for it.
        name: String,
        /// Which product, with a space in front; empty where it is about none.
        product: String,
    },
    /// A refusal of NCCL.
    #[error("NCCL refuses to {what}: {says}")]
    Nccl {
        /// What was tried.
        what: &'static str,
        /// What it says.
        says: String,
    },
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Failure {
        let message = error.to_string();
        match error {
            CudaError::Library { .. } => Failure::input(message).hint("`plimsoll devices` says what was found where"),
            CudaError::Function { .. } => Failure::input(message).hint("CUDA 12 needs driver 525 or newer: update it"),
            CudaError::Shared { .. } => {
                Failure::input(message).hint("run on another device: --devices cpu; plimsoll devices lists them")
            }
            CudaError::NoDevice { .. } => Failure::input(message).hint("`plimsoll devices` lists what is there"),
            CudaError::Refused { .. } | CudaError::Memory { .. } => Failure::does_not_fit(message)
                .hint("give a smaller --budget, or end what else holds memory (`nvidia-smi` lists it)"),
            CudaError::Lost { .. } => {
                Failure::stopped(message).hint("`--resume` goes on from the newest checkpoint, in a new process")
            }
            CudaError::Nccl { .. } => Failure::stopped(message)
                .hint("`--resume` goes on from the newest checkpoint")
                .hint("without NCCL, through memory of the host: --set run.nccl=false"),
            CudaError::Call { .. } | CudaError::Product { .. } => Failure::bug(message),
        }
    }
}

numbers! {
    /// Codes that mean that the context, and all memory in it, is gone: the errors of which `CUresult` in cuda.h (of CUDA
    /// 13.2) says that the process has to be started anew, and those of a driver or GPU that is no longer there.
    STICKY {
        CUDA_ERROR_DEINITIALIZED => DEINITIALIZED: Status = 4;
        CUDA_ERROR_DEVICE_UNAVAILABLE => DEVICE_UNAVAILABLE: Status = 46;
        CUDA_ERROR_ECC_UNCORRECTABLE => ECC_UNCORRECTABLE: Status = 214;
        CUDA_ERROR_NVLINK_UNCORRECTABLE => NVLINK_UNCORRECTABLE: Status = 220;
        CUDA_ERROR_CONTAINED => CONTAINED: Status = 226;
        CUDA_ERROR_ILLEGAL_ADDRESS => ILLEGAL_ADDRESS: Status = 700;
        CUDA_ERROR_LAUNCH_TIMEOUT => LAUNCH_TIMEOUT: Status = 702;
        CUDA_ERROR_CONTEXT_IS_DESTROYED => CONTEXT_IS_DESTROYED: Status = 709;
        CUDA_ERROR_ASSERT => ASSERT: Status = 710;
        CUDA_ERROR_HARDWARE_STACK_ERROR => HARDWARE_STACK_ERROR: Status = 714;
        CUDA_ERROR_ILLEGAL_INSTRUCTION => ILLEGAL_INSTRUCTION: Status = 715;
        CUDA_ERROR_MISALIGNED_ADDRESS => MISALIGNED_ADDRESS: Status = 716;
        CUDA_ERROR_INVALID_ADDRESS_SPACE => INVALID_ADDRESS_SPACE: Status = 717;
        CUDA_ERROR_INVALID_PC => INVALID_PC: Status = 718;
        CUDA_ERROR_LAUNCH_FAILED => LAUNCH_FAILED: Status = 719;
        CUDA_ERROR_TENSOR_MEMORY_LEAK => TENSOR_MEMORY_LEAK: Status = 721;
        CUDA_ERROR_MPS_CLIENT_TERMINATED => MPS_CLIENT_TERMINATED: Status = 810;
        CUDA_ERROR_EXTERNAL_DEVICE => EXTERNAL_DEVICE: Status = 911;
        CUDA_ERROR_UNKNOWN => UNKNOWN: Status = 999;
    }
}

fn is_sticky(status: Status) -> bool {
    STICKY.iter().any(|code| code.value == i64::from(status))
}

impl Driver {
    /// Turns a status into a result. `what` completes "the driver refuses to …".
    pub(super) fn check(&self, what: &'static str, status: Status) -> Result<(), CudaError> {
        self.check_of(status, || what.into())
    }

    /// The same, where `what` is put together only if something goes wrong.
    fn check_of(&self, status: Status, what: impl FnOnce() -> Cow<'static, str>) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        let what = what();
        if status == OUT_OF_MEMORY {
            return Err(CudaError::Memory { what });
        }
        let (name, text) = (self.word(status, self.cuGetErrorName), self.word(status, self.cuGetErrorString));
        let name = name.unwrap_or_else(|| format!("error {status}"));
        let text = text.unwrap_or_else(|| "no further words".into());
        Err(if is_sticky(status) { CudaError::Lost { what, name, text } } else { CudaError::Call { what, name, text } })
    }

    /// What one of the two functions that explain a code says about it.
    fn word(
        &self,
        status: Status,
        explain: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
    ) -> Option<String> {
        let mut text = ptr::null();
        // SAFETY: the function writes one pointer, to a string that lives as long as the driver.
        let known = unsafe { explain(status, &mut text) } == 0 && !text.is_null();
        // SAFETY: not null, and a string with a zero at its end, as the driver's documentation says.
        known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }

    /// A value that a function writes to where it is told.
    fn get<T: Copy>(&self, what: &'static str, ask: impl FnOnce(*mut T) -> Status) -> Result<T, CudaError> {
        let mut value = MaybeUninit::zeroed();
        self.check(what, ask(value.as_mut_ptr()))?;
        // SAFETY: the call succeeded, so it was written; what it was before, all zeros, is a value of these types too.
        Ok(unsafe { value.assume_init() })
    }

    /// Starts the driver, and says how many GPUs there are.
    ///
    /// # Errors
    /// Where the driver does not start.
    pub fn devices(&self) -> Result<u32, CudaError> {
        // SAFETY: takes no pointers; may be called any number of times.
        let started = unsafe { (self.cuInit)(0) };
        // An answer, no fault.
        if started == NO_DEVICE {
            return Ok(0);
        }
        self.check("start", started)?;
        // SAFETY: writes one integer.
        self.get("count its devices", |count: *mut c_int| unsafe { (self.cuDeviceGetCount)(count) })
            .map(|count| count as u32)
    }

    /// The newest CUDA that the driver knows: 12040 is 12.4.
    ///
    /// # Errors
    /// Where the driver does not say.
    pub fn version(&self) -> Result<u32, CudaError> {
        // SAFETY: writes one integer.
        self.get("tell its version", |version: *mut c_int| unsafe { (self.cuDriverGetVersion)(version) })
            .map(|version| version as u32)
    }
}

/// What a GPU is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its number among the visible ones.
    pub ordinal: u32,
    /// As the driver calls it.
    pub name: String,
    /// Its compute capability.
    pub architecture: Architecture,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory that a block may have when its kernel asks for it.
    pub shared_bytes_max: u32,
    /// Whether address space can be reserved and memory mapped into it.
    pub virtual_memory: bool,
    /// The newest CUDA that the driver knows: 12040 is 12.4.
    pub driver_version: u32,
}

/// The primary context of a GPU: opened once, and held until the process ends, or [`Context::end`] is called. To end one
/// and open it again takes a while, unloads what libraries have loaded in it, and makes a GPU hold other bytes than were
/// measured.
///
/// Its methods want [`Context::enter`] to have been called on the thread: without it the driver refuses them, which is
/// an error and no harm.
pub struct Context {
    driver: Arc<Driver>,
    device: c_int,
    handle: Handle,
    gpu: Gpu,
    free_before: Option<Bytes>,
    free_at_first: Bytes,
    /// The most that libraries in it were seen to hold.
    pub(super) charged: Mutex<Bytes>,
}

/// The contexts of this process. It has one driver, whoever loads its table of functions.
static CONTEXTS: Mutex<BTreeMap<u32, Arc<Context>>> = Mutex::new(BTreeMap::new());

// SAFETY: the driver may be called from any thread, and a context may be current on several.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens a GPU; the second time, and from then on, it is the context that there is. `free_before` is what is free on the
    /// GPU now, where somebody says it: the first time, that is before the context takes its own.
    ///
    /// # Errors
    /// Where there is none of that number, or the driver refuses.
    pub fn open(driver: &Arc<Driver>, ordinal: u32, free_before: Option<Bytes>) -> Result<Arc<Context>, CudaError> {
        let mut known = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        let context = match known.get(&ordinal) {
            Some(context) => context.clone(),
            None => known.entry(ordinal).or_insert(Context::first(driver, ordinal, free_before)?).clone(),
        };
        context.enter()?;
        Ok(context)
    }

    /// Ends the context of a GPU as soon as nobody uses it: what measurements have loaded is no charge of the run after
    /// them, which opens one of its own.
    pub fn end(ordinal: u32) {
        drop(CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner).remove(&ordinal));
    }

    /// Whether a GPU that this process has opened is lost: nothing more can be done there.
    pub fn is_lost(ordinal: u32) -> bool {
        let context = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner).get(&ordinal).cloned();
        let answers = |context: Arc<Context>| context.enter().and_then(|()| context.synchronize());
        matches!(context.map(answers), Some(Err(CudaError::Lost { .. })))
    }

    fn first(driver: &Arc<Driver>, ordinal: u32, free_before: Option<Bytes>) -> Result<Arc<Context>, CudaError> {
        let count = driver.devices()?;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        // SAFETY: writes one integer; the ordinal was checked.
        let device =
            driver.get("find a gpu", |device: *mut c_int| unsafe { (driver.cuDeviceGet)(device, ordinal as c_int) })?;
        let attribute = |which: c_uint| {
            // SAFETY: writes one integer about a device that exists.
            let ask = |value: *mut c_int| unsafe { (driver.cuDeviceGetAttribute)(value, which, device) };
            driver.get("describe a gpu", ask).map(|value| value as u32)
        };
        let mut name = [0u8; 256];
        // SAFETY: writes at most as many bytes as it is told there are, with a zero at the end.
        let named = unsafe { (driver.cuDeviceGetName)(name.as_mut_ptr().cast(), name.len() as c_int, device) };
        driver.check("name a gpu", named)?;
        let name = CStr::from_bytes_until_nul(&name).map_or("gpu".into(), |name| name.to_string_lossy().into_owned());
        let gpu = Gpu {
            ordinal,
            name,
            architecture: Architecture {
                major: attribute(DEVICE_COMPUTE_MAJOR)?,
                minor: attribute(DEVICE_COMPUTE_MINOR)?,
            },
            multiprocessors: attribute(DEVICE_MULTIPROCESSORS)?,
            shared_bytes_max: attribute(DEVICE_SHARED_OPTIN)?,
            virtual_memory: attribute(DEVICE_VIRTUAL_MEMORY)? != 0,
            driver_version: driver.version()?,
        };
        // SAFETY: writes one pointer; given back when the context is dropped.
        let retain = |context: *mut Handle| unsafe { (driver.cuDevicePrimaryCtxRetain)(context, device) };
        let handle = driver.get("open a context", retain)?;
        let (driver, charged) = (driver.clone(), Mutex::default());
        let free_at_first = Bytes::ZERO;
        let mut context = Context { driver, device, handle, gpu, free_before, free_at_first, charged };
        context.enter()?;
        context.gpu.virtual_memory = context.gpu.virtual_memory && context.maps_memory()?;
        context.free_at_first = context.memory()?.0;
        Ok(Arc::new(context))
    }

    /// What the GPU is.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// What was free on the GPU right before this was opened, where somebody said it.
    pub fn free_before(&self) -> Option<Bytes> {
        self.free_before
    }

    /// What was free on the GPU right after this was opened, when nothing was in it.
    pub fn free_at_first(&self) -> Bytes {
        self.free_at_first
    }

    /// The table of functions.
    pub(super) fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Makes this the context of the calling thread.
    ///
    /// # Errors
    /// Where the context is lost.
    pub fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained as long as `self` lives.
        self.driver.check("enter a context", unsafe { (self.driver.cuCtxSetCurrent)(self.handle) })
    }

    /// Waits for everything that was ever started in the context.
    ///
    /// # Errors
    /// What went wrong on the device since it was last asked.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: takes no pointers.
        self.driver.check("finish its work", unsafe { (self.driver.cuCtxSynchronize)() })
    }

    /// The same, where nothing but this op is at work.
    pub(super) fn finish(&self, op: &'static str) -> Result<(), CudaError> {
        // SAFETY: takes no pointers.
        self.driver.check_of(unsafe { (self.driver.cuCtxSynchronize)() }, || format!("finish {op}").into())
    }

    /// Free and all bytes of the device.
    ///
    /// # Errors
    /// Where the driver does not say.
    pub fn memory(&self) -> Result<(Bytes, Bytes), CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers.
        self.driver.check("tell its free memory", unsafe { (self.driver.cuMemGetInfo_v2)(&mut free, &mut total) })?;
        Ok((Bytes(free as u64), Bytes(total as u64)))
    }

    /// How memory of this device is made.
    fn allocation(&self) -> Allocation {
        Allocation {
            kind: ALLOCATION_PINNED,
            handle_types: 0,
            location: Location { kind: LOCATION_DEVICE, id: self.device },
            windows: ptr::null_mut(),
            compression: 0,
            direct: 0,
            usage: 0,
            reserved: [0; 4],
        }
    }

    /// Memory is mapped in multiples of this many bytes.
    ///
    /// # Errors
    /// Where the driver does not say.
    pub fn granularity(&self) -> Result<u64, CudaError> {
        let of = self.allocation();
        // SAFETY: reads one description and writes one integer.
        let ask =
            |bytes: *mut usize| unsafe { (self.driver.cuMemGetAllocationGranularity)(bytes, &of, GRANULARITY_MINIMUM) };
        self.driver.get("tell its granularity", ask).map(|bytes| bytes as u64)
    }

    /// Whether a driver that says that it maps memory does: a container may forbid it.
    fn maps_memory(&self) -> Result<bool, CudaError> {
        let try_it = || {
            let bytes = self.granularity()?;
            let at = self.reserve(bytes)?;
            // SAFETY: reserved just now, one granule; nobody knows of it.
            let mapped = unsafe { self.map(at, bytes).and_then(|()| self.unmap(at, bytes)) };
            // SAFETY: as above, with nothing mapped.
            unsafe { self.unreserve(at, bytes) }?;
            mapped
        };
        match try_it() {
            Err(CudaError::Call { .. }) => Ok(false),
            tried => tried.map(|()| true),
        }
    }

    /// Reserves address space, and no memory.
    pub(super) fn reserve(&self, bytes: u64) -> Result<Address, CudaError> {
        // SAFETY: writes one address, of the driver's choice.
        let ask = |at: *mut Address| unsafe { (self.driver.cuMemAddressReserve)(at, bytes as usize, 0, 0, 0) };
        self.driver.get("reserve address space", ask)
    }

    /// Makes memory and maps it at `at`, for reading and writing by this device.
    ///
    /// # Safety
    /// The range lies in address space that was reserved and has nothing mapped in it; both are whole multiples of
    /// the granularity.
    pub(super) unsafe fn map(&self, at: Address, bytes: u64) -> Result<(), CudaError> {
        let (driver, of, size) = (&self.driver, self.allocation(), bytes as usize);
        // SAFETY: reads one description and writes one handle.
        let make = |memory: *mut c_ulonglong| unsafe { (driver.cuMemCreate)(memory, size, &of, 0) };
        let memory = driver.get("make memory", make)?;
        // SAFETY: as the caller promises.
        let mapped = driver.check("map memory", unsafe { (driver.cuMemMap)(at, size, 0, memory, 0) });
        // A mapping keeps its memory: the handle is not needed any more. Where mapping failed the memory goes.
        // SAFETY: the handle is ours, and not used after this.
        let released = driver.check("let memory go", unsafe { (driver.cuMemRelease)(memory) });
        mapped?;
        let access = Access { location: of.location, flags: ACCESS_READ_WRITE };
        // SAFETY: the range was mapped just now; reads one description.
        let allowed = driver.check("open memory", unsafe { (driver.cuMemSetAccess)(at, size, &access, 1) });
        if allowed.is_err() {
            // SAFETY: mapped just now, whole, and nobody knows of it.
            unsafe { self.unmap(at, bytes) }?;
        }
        allowed.and(released)
    }

    /// Gives back what [`Context::map`] mapped, range by range.
    ///
    /// # Safety
    /// The range is one that was mapped, or several whole ones, and no work that is under way touches it.
    pub(super) unsafe fn unmap(&self, at: Address, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        self.driver.check("unmap memory", unsafe { (self.driver.cuMemUnmap)(at, bytes as usize) })
    }

    /// Gives reserved address space back.
    ///
    /// # Safety
    /// The range is one that [`Context::reserve`] gave, whole, with nothing mapped in it.
    pub(super) unsafe fn unreserve(&self, at: Address, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        self.driver.check("free address space", unsafe { (self.driver.cuMemAddressFree)(at, bytes as usize) })
    }

    /// Pins pages of the host's memory, so that the device copies from and to them without the host's help. Whether
    /// this device can: where it cannot, copies are right all the same, since the driver then takes what it copies from
    /// aside, and waits for what it copies to, before a call returns; but nothing happens meanwhile.
    ///
    /// # Safety
    /// Whole pages that stay mapped until [`Context::unpin`].
    pub(super) unsafe fn pin(&self, place: *mut u8, bytes: usize) -> Result<bool, CudaError> {
        // SAFETY: as the caller promises.
        let pinned = unsafe { (self.driver.cuMemHostRegister_v2)(place.cast(), bytes, HOST_PORTABLE) };
        match self.driver.check("pin memory of the host", pinned) {
            Ok(()) => Ok(true),
            Err(lost @ CudaError::Lost { .. }) => Err(lost),
            Err(_) => Ok(false),
        }
    }

    /// Ends what [`Context::pin`] began.
    ///
    /// # Safety
    /// The range begins where one begins that was pinned, and no copy from or to it is under way.
    pub(super) unsafe fn unpin(&self, place: *mut u8) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        self.driver.check("unpin memory of the host", unsafe { (self.driver.cuMemHostUnregister)(place.cast()) })
    }

    /// Plain memory, for drivers that map none.
    pub(super) fn allocate(&self, bytes: u64) -> Result<Address, CudaError> {
        // SAFETY: writes one address.
        let ask = |at: *mut Address| unsafe { (self.driver.cuMemAlloc_v2)(at, bytes as usize) };
        self.driver.get("take memory", ask)
    }

    /// Gives plain memory back.
    ///
    /// # Safety
    /// It came from [`Context::allocate`], and no work that is under way touches it.
    pub(super) unsafe fn free(&self, at: Address) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        self.driver.check("free memory", unsafe { (self.driver.cuMemFree_v2)(at) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `first`; everything that lived in it holds an `Arc` of it, and is gone.
        unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

/// Work that is done in order.
pub struct Stream {
    context: Arc<Context>,
    handle: Handle,
}

// SAFETY: as for `Context`; a stream belongs to no thread.
unsafe impl Send for Stream {}

impl Stream {
    /// A stream of its own, which waits for no other.
    ///
    /// # Errors
    /// Where the driver refuses.
    pub fn new(context: &Arc<Context>) -> Result<Stream, CudaError> {
        let driver = context.driver();
        // SAFETY: writes one handle.
        let make = |stream: *mut Handle| unsafe { (driver.cuStreamCreate)(stream, STREAM_NON_BLOCKING) };
        Ok(Stream { handle: driver.get("make a stream", make)?, context: context.clone() })
    }

    /// For calls to libraries.
    pub(super) fn handle(&self) -> *mut c_void {
        self.handle
    }

    fn driver(&self) -> &Driver {
        self.context.driver()
    }

    /// Waits until all that was put on it is done.
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives.
        self.driver().check("finish a stream", unsafe { (self.driver().cuStreamSynchronize)(self.handle) })
    }

    /// What is put on it from now on begins after `event`.
    ///
    /// # Errors
    /// Where the driver refuses.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live; the wait is taken over by the stream at once.
        let waited = unsafe { (self.driver().cuStreamWaitEvent)(self.handle, event.handle, 0) };
        self.driver().check("wait for an event", waited)
    }

    /// Copies from the host.
    ///
    /// # Safety
    /// `from` stays valid and unchanged, and `to` untouched by others, until the stream has done it.
    pub unsafe fn copy_in(&self, to: Address, from: *const u8, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        let done = unsafe { (self.driver().cuMemcpyHtoDAsync_v2)(to, from.cast(), bytes as usize, self.handle) };
        self.driver().check("copy to the device", done)
    }

    /// Copies to the host.
    ///
    /// # Safety
    /// `to` stays valid and unread, and `from` unwritten by others, until the stream has done it.
    pub unsafe fn copy_out(&self, to: *mut u8, from: Address, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        let done = unsafe { (self.driver().cuMemcpyDtoHAsync_v2)(to.cast(), from, bytes as usize, self.handle) };
        self.driver().check("copy from the device", done)
    }

    /// Copies within the device.
    ///
    /// # Safety
    /// Both ranges are memory of the device, and free for this until the stream has done it.
    pub unsafe fn copy(&self, to: Address, from: Address, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        let done = unsafe { (self.driver().cuMemcpyDtoDAsync_v2)(to, from, bytes as usize, self.handle) };
        self.driver().check("copy on the device", done)
    }

    /// Fills with two bytes, over and over.
    ///
    /// # Safety
    /// The range is memory of the device, even at both ends, and free for this until the stream has done it.
    pub unsafe fn fill(&self, to: Address, value: u16, bytes: u64) -> Result<(), CudaError> {
        if bytes < 2 {
            return Ok(());
        }
        // SAFETY: as the caller promises.
        let done = unsafe { (self.driver().cuMemsetD16Async)(to, value, bytes as usize / 2, self.handle) };
        self.driver().check("fill memory", done)
    }

    /// Fills with zeros, wherever the range begins.
    ///
    /// # Safety
    /// The range is memory of the device, and free for this until the stream has done it.
    pub unsafe fn zero(&self, to: Address, bytes: u64) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as the caller promises.
        let done = unsafe { (self.driver().cuMemsetD8Async)(to, 0, bytes as usize, self.handle) };
        self.driver().check("fill memory", done)
    }

    /// Starts a kernel on a field of `grid` blocks of `block` threads.
    ///
    /// # Safety
    /// `arguments` are pointers to values of the types in the kernel's signature, in its order; what the kernel
    /// touches with them is memory of the device, and free for this until the stream has done it.
    pub unsafe fn launch(
        &self,
        function: Function,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        arguments: &[*const c_void],
    ) -> Result<(), CudaError> {
        let [x, y, z] = grid;
        let arguments = arguments.as_ptr().cast_mut().cast::<*mut c_void>();
        // SAFETY: as the caller promises; the driver copies the arguments before it returns, and writes to none.
        let launched = unsafe {
            let launch = self.driver().cuLaunchKernel;
            launch(function.handle, x, y, z, block, 1, 1, shared_bytes, self.handle, arguments, ptr::null_mut())
        };
        self.driver().check_of(launched, || format!("start {}", function.name).into())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: ours, and not used after this; what is on it still gets done.
        unsafe { (self.driver().cuStreamDestroy_v2)(self.handle) };
    }
}

/// A point in a stream that others can wait for.
pub struct Event {
    context: Arc<Context>,
    handle: Handle,
}

// SAFETY: as for `Stream`.
unsafe impl Send for Event {}

impl Event {
    /// One for order only.
    ///
    /// # Errors
    /// Where the driver refuses.
    pub fn new(context: &Arc<Context>) -> Result<Event, CudaError> {
        Event::with(context, EVENT_DISABLE_TIMING)
    }

    /// One that tells the time, too.
    ///
    /// # Errors
    /// Where the driver refuses.
    pub fn timed(context: &Arc<Context>) -> Result<Event, CudaError> {
        Event::with(context, 0)
    }

    fn with(context: &Arc<Context>, flags: c_uint) -> Result<Event, CudaError> {
        let driver = context.driver();
        // SAFETY: writes one handle.
        let handle =
            driver.get("make an event", |event: *mut Handle| unsafe { (driver.cuEventCreate)(event, flags) })?;
        Ok(Event { context: context.clone(), handle })
    }

    /// From now on the event is this point in the stream. One that was never recorded is over.
    ///
    /// # Errors
    /// Where the driver refuses.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        let driver = self.context.driver();
        // SAFETY: both live.
        driver.check("record an event", unsafe { (driver.cuEventRecord)(self.handle, stream.handle) })
    }

    /// Waits until the stream has come to it.
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let driver = self.context.driver();
        // SAFETY: the event lives.
        driver.check("reach an event", unsafe { (driver.cuEventSynchronize)(self.handle) })
    }

    /// Whether the stream has come to it.
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn is_over(&self) -> Result<bool, CudaError> {
        let driver = self.context.driver();
        // SAFETY: the event lives.
        match unsafe { (driver.cuEventQuery)(self.handle) } {
            NOT_READY => Ok(false),
            status => driver.check("reach an event", status).map(|()| true),
        }
    }

    /// Seconds from `start` to this; both timed, recorded and over.
    ///
    /// # Errors
    /// Where they are not.
    pub fn seconds_since(&self, start: &Event) -> Result<f64, CudaError> {
        let driver = self.context.driver();
        // SAFETY: writes one float; both events live.
        let ask = |time: *mut f32| unsafe { (driver.cuEventElapsedTime)(time, start.handle, self.handle) };
        driver.get("tell the time between events", ask).map(|milliseconds| f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: ours, and not used after this.
        unsafe { (self.context.driver().cuEventDestroy_v2)(self.handle) };
    }
}

/// A loaded cubin.
pub struct Module {
    context: Arc<Context>,
    handle: Handle,
}

// SAFETY: as for `Stream`.
unsafe impl Send for Module {}

/// A kernel in a [`Module`]: good as long as that lives.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    handle: Handle,
    /// Its name in the source.
    name: &'static str,
}

// SAFETY: as for `Stream`.
unsafe impl Send for Function {}
// SAFETY: it is a name that is only read; what it names is entered under a context, and started through streams.
unsafe impl Sync for Function {}

impl Module {
    /// Loads the cubin of a unit.
    ///
    /// # Errors
    /// Where it is none for this GPU, or no memory is left for it.
    pub fn load(context: &Arc<Context>, unit: Unit, cubin: &[u8]) -> Result<Module, CudaError> {
        let driver = context.driver();
        // SAFETY: writes one handle; a cubin is an ELF file and says itself how long it is. Text (PTX) would have to
        // end with a zero: none is passed.
        let mut handle = ptr::null_mut();
        let loaded = unsafe { (driver.cuModuleLoadData)(&mut handle, cubin.as_ptr().cast()) };
        driver.check_of(loaded, || format!("load the kernels of {}", unit.name()).into())?;
        Ok(Module { handle, context: context.clone() })
    }

    /// A kernel by its name, allowed to have `shared_bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// Where it has none of that name, or the GPU has not that much.
    pub fn function(&self, name: &'static str, shared_bytes: u32) -> Result<Function, CudaError> {
        let driver = self.context.driver();
        let words = CString::new(name).expect("names of kernels have no zeros");
        // SAFETY: reads a string and writes one handle.
        let mut handle = ptr::null_mut();
        let found = unsafe { (driver.cuModuleGetFunction)(&mut handle, self.handle, words.as_ptr()) };
        driver.check_of(found, || format!("find {name}").into())?;
        // Up to 48 KiB need no permission, what the kernel has by itself included: some hundred bytes.
        if shared_bytes > 40 << 10 {
            // SAFETY: a function of a module that lives.
            let allowed =
                unsafe { (driver.cuFuncSetAttribute)(handle, FUNCTION_MAX_DYNAMIC_SHARED, shared_bytes as c_int) };
            driver.check_of(allowed, || format!("give {name} {shared_bytes} bytes of shared memory").into())?;
        }
        Ok(Function { handle, name })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: ours; its functions are not used after this.
        unsafe { (self.context.driver().cuModuleUnload)(self.handle) };
    }
}

/// Memory of the host that the device copies from and to without the host's help. It is zero at first.
pub struct Pinned {
    context: Arc<Context>,
    place: ptr::NonNull<u8>,
    bytes: u64,
    owned: PhantomData<u8>,
}

// SAFETY: plain memory that it owns.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Takes `bytes` and makes them zero. No bytes take nothing.
    ///
    /// # Errors
    /// Where the host has not that much left to pin.
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Pinned, CudaError> {
        let driver = context.driver();
        let mut place = ptr::NonNull::dangling();
        if bytes > 0 {
            // SAFETY: writes one pointer.
            let ask = |at: *mut *mut c_void| unsafe { (driver.cuMemHostAlloc)(at, bytes as usize, HOST_PORTABLE) };
            let at = driver.get("pin memory of the host", ask)?.cast::<u8>();
            // SAFETY: that many bytes were given to us just now.
            unsafe { ptr::write_bytes(at, 0, bytes as usize) };
            place = ptr::NonNull::new(at).ok_or(CudaError::Memory { what: "pin memory of the host".into() })?;
        }
        Ok(Pinned { context: context.clone(), place, bytes, owned: PhantomData })
    }

    /// How many bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The first byte, for copies that are under way while the host looks elsewhere.
    pub fn base(&self) -> *mut u8 {
        self.place.as_ptr()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: ours; the driver waits for copies that are under way.
            unsafe { (self.context.driver().cuMemFreeHost)(self.base().cast()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::Exit;
    use std::path::Path;

    #[test]
    fn structures_have_the_sizes_of_the_headers() {
        assert_eq!((size_of::<Allocation>(), size_of::<Access>(), size_of::<Location>()), (32, 12, 8));
    }

    #[test]
    fn a_missing_library_is_a_message_for_the_user_and_no_panic() {
        let Err(error) = Driver::load(Path::new("libno-such-driver.so.1")) else { panic!("there is none") };
        let failure = Failure::from(error);
        assert_eq!(failure.exit, Exit::Input);
        assert!(failure.message.contains("libno-such-driver.so.1"), "{failure}");
        // A library that is no driver is named with what it lacks.
        let Err(error) = Driver::load(Path::new("libc.so.6")) else { panic!("libc is no driver") };
        assert_eq!(error, CudaError::Function { library: "libc.so.6".into(), function: "cuInit" });
    }

    #[test]
    fn a_lost_device_is_resumable_a_refused_arena_does_not_fit_and_the_rest_is_a_bug() {
        let exit = |error: CudaError| Failure::from(error).exit;
        let (name, text) = ("CUDA_ERROR_ILLEGAL_ADDRESS".to_owned(), "an illegal memory access".to_owned());
        assert_eq!(
            exit(CudaError::Lost { what: "finish its work".into(), name: name.clone(), text: text.clone() }),
            Exit::Stopped
        );
        assert_eq!(exit(CudaError::Call { what: "start a kernel".into(), name, text }), Exit::Bug);
        let gpu = "a gpu".to_owned();
        let (asked, free, total) = (Bytes(3 << 30), Bytes(2 << 30), Bytes(4 << 30));
        assert_eq!(exit(CudaError::Refused { asked, gpu, free, total }), Exit::DoesNotFit);
        assert_eq!(exit(CudaError::NoDevice { ordinal: 1, count: 1 }), Exit::Input);
    }

    #[test]
    fn faults_of_kernels_and_hardware_are_sticky_and_wrong_calls_are_not() {
        for code in [4, 46, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999] {
            assert!(is_sticky(code), "{code}");
        }
        // A kernel that asks for too much, and servers that were never reached, leave a context as it was.
        for code in [0, 1, 2, 3, 36, 100, 200, 201, 400, 401, 500, 600, 701, 720, 801, 805, 807, 910, 912, 917] {
            assert!(!is_sticky(code), "{code}");
        }
    }
}
