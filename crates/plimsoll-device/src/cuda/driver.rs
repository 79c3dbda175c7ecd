//! The NVIDIA driver: a table of its functions, and safe wrappers over them (context, memory, streams, events,
//! modules). Nothing here knows programs.
//!
//! Functions are looked up by name in the installed library, so building needs no CUDA, and a missing function is an
//! error that names it. All functions exist from CUDA 11.4 to 13. Status codes are plain numbers, because a newer
//! driver may return codes that an older list lacks.
//!
//! | library | functions that are called |
//! |---|---|
//! | `libcuda.so.1` | those in [`Driver`] below |
//! | `libcublasLt.so.*` | those in [`super::products::Library`] |
//! | `libnccl.so.2` | those in [`super::nccl::Library`] |

mod module;
mod stream;

pub use module::{Function, Module};
pub use stream::{Event, Stream};

use super::abi::{Structure, library, numbers, structure};
use super::architecture::Architecture;
use crate::error::CudaError;
use plimsoll_core::Bytes;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

/// An address in device memory.
pub type Address = u64;
/// Return type of every driver function.
type Status = c_uint;
/// Opaque handle of a driver object.
type Handle = *mut c_void;

library! {
    /// The functions of the driver that this crate calls.
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
        fn cuMemGetAllocationGranularity(bytes: *mut usize, properties: *const Allocation, option: c_uint) -> Status;
        fn cuMemAddressReserve(
            address: *mut Address, bytes: usize, alignment: usize, at: Address, flags: c_ulonglong,
        ) -> Status;
        fn cuMemAddressFree(address: Address, bytes: usize) -> Status;
        fn cuMemCreate(memory: *mut c_ulonglong, bytes: usize, properties: *const Allocation, flags: c_ulonglong) -> Status;
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

/// `CUmemLocation`: the device on which memory lies.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Location {
    kind: c_uint,
    id: c_int,
}

/// `CUmemAllocationProp`: properties of an allocation.
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

/// `CUmemAccessDesc`: access rights to mapped memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    location: Location,
    flags: c_uint,
}

/// Layouts of the structures above, with the names that structures and fields have in cuda.h.
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
    /// Values of enumerations in cuda.h that this crate uses.
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

numbers! {
    /// Error codes after which the context and its memory are lost. For some, `CUresult` in cuda.h (CUDA 13.2) requires
    /// a restart of the process. The others mean that the driver or the GPU is no longer there.
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
    /// Converts a status code of the driver to a result. `what` completes the error message "the driver refuses to …".
    pub(super) fn check(&self, what: &'static str, status: Status) -> Result<(), CudaError> {
        self.check_with(status, || what.into())
    }

    /// Converts a status code of the driver to a result. `what` is only called for an error; its text completes the
    /// message "the driver refuses to …".
    fn check_with(&self, status: Status, what: impl FnOnce() -> Cow<'static, str>) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        let what = what();
        if status == OUT_OF_MEMORY {
            return Err(CudaError::Memory { what });
        }
        let (name, text) =
            (self.status_text(status, self.cuGetErrorName), self.status_text(status, self.cuGetErrorString));
        let name = name.unwrap_or_else(|| format!("error {status}"));
        let text = text.unwrap_or_else(|| "no description".into());
        Err(if is_sticky(status) { CudaError::Lost { what, name, text } } else { CudaError::Call { what, name, text } })
    }

    /// Returns the text that `explain` (`cuGetErrorName` or `cuGetErrorString`) has for a status code; `None` for an
    /// unknown code.
    fn status_text(
        &self,
        status: Status,
        explain: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
    ) -> Option<String> {
        let mut text = ptr::null();
        // SAFETY: the function writes one pointer, to a string that lives as long as the driver.
        let known = unsafe { explain(status, &mut text) } == 0 && !text.is_null();
        // SAFETY: not null, and a string with a terminating zero, as the driver's documentation states.
        known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }

    /// Calls a driver function through `ask`, and returns the value that the function writes to the given pointer.
    /// `what` completes the error message "the driver refuses to …".
    fn get<T: Copy>(&self, what: &'static str, ask: impl FnOnce(*mut T) -> Status) -> Result<T, CudaError> {
        let mut value = MaybeUninit::zeroed();
        self.check(what, ask(value.as_mut_ptr()))?;
        // SAFETY: the call succeeded, so the value was written; the initial zeros are also valid for these types.
        Ok(unsafe { value.assume_init() })
    }

    /// Starts the driver and returns the number of GPUs that it lists, which may be 0.
    ///
    /// # Errors
    /// Fails if the driver does not start.
    pub fn devices(&self) -> Result<u32, CudaError> {
        // SAFETY: takes no pointers; may be called any number of times.
        let started = unsafe { (self.cuInit)(0) };
        // The absence of GPUs is a result here, not an error.
        if started == NO_DEVICE {
            return Ok(0);
        }
        self.check("start", started)?;
        // SAFETY: writes one integer.
        self.get("count its devices", |count: *mut c_int| unsafe { (self.cuDeviceGetCount)(count) })
            .map(|count| count as u32)
    }

    /// Returns the newest CUDA version that the driver supports: 12040 is 12.4.
    ///
    /// # Errors
    /// Fails if the driver does not report it.
    pub fn version(&self) -> Result<u32, CudaError> {
        // SAFETY: writes one integer.
        self.get("report its version", |version: *mut c_int| unsafe { (self.cuDriverGetVersion)(version) })
            .map(|version| version as u32)
    }
}

/// Properties of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Number among the visible GPUs, from 0.
    pub ordinal: u32,
    /// Name given by the driver.
    pub name: String,
    /// Compute capability.
    pub architecture: Architecture,
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// The most shared memory that a thread block can opt in to, in bytes.
    pub shared_bytes_max: u32,
    /// Whether the driver can reserve address space and map memory into it (`cuMemAddressReserve`, `cuMemMap`).
    pub virtual_memory: bool,
    /// The newest CUDA version that the driver supports: 12040 is 12.4.
    pub driver_version: u32,
}

/// Size of the plain allocation that tests whether a GPU has memory at all: the usual granularity of mapped memory.
const PROBE_BYTES: u64 = 2 << 20;

/// The primary context of a GPU, kept open until the process ends or [`Context::close`] is called.
///
/// Reopening a context takes time and unloads the code of libraries. The memory that the GPU then holds may differ from
/// the measured charges.
///
/// Methods require a preceding [`Context::enter`] on the calling thread. Without it the driver returns an error.
pub struct Context {
    driver: Arc<Driver>,
    device: c_int,
    handle: Handle,
    gpu: Gpu,
    free_before: Option<Bytes>,
    free_after_open: Bytes,
    /// The most memory that libraries and kernels have held in this context, over all measurements so far.
    pub(super) library_bytes_max: Mutex<Bytes>,
}

/// The open contexts of this process, by GPU number. All function tables of the driver share them.
static CONTEXTS: Mutex<BTreeMap<u32, Arc<Context>>> = Mutex::new(BTreeMap::new());

// SAFETY: the driver may be called from any thread, and a context may be current on several.
unsafe impl Send for Context {}
// SAFETY: the driver may be called from any thread, and a context may be current on several.
unsafe impl Sync for Context {}

impl Context {
    /// Returns the context of GPU number `ordinal`, opened if it is not open yet, and enters it on the calling thread.
    ///
    /// `free_before` is the GPU's free memory before this call, `None` if unknown. A new context stores it
    /// ([`Context::free_before`]); an open one ignores it.
    ///
    /// # Errors
    /// Fails if the driver lists no GPU of that number, refuses to open it, or reserves it for another process.
    pub fn open(driver: &Arc<Driver>, ordinal: u32, free_before: Option<Bytes>) -> Result<Arc<Context>, CudaError> {
        let mut known = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        let context = match known.get(&ordinal) {
            Some(context) => context.clone(),
            None => known.entry(ordinal).or_insert(Context::open_first(driver, ordinal, free_before)?).clone(),
        };
        context.enter()?;
        Ok(context)
    }

    /// Removes the context of a GPU from the open ones; it closes when its last user drops it. The next
    /// [`Context::open`] creates a new one, into which no code is loaded yet.
    pub fn close(ordinal: u32) {
        drop(CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner).remove(&ordinal));
    }

    /// Waits for a GPU's work, and returns whether the GPU is lost. Returns `false` if this process has not opened it.
    pub fn is_lost(ordinal: u32) -> bool {
        let context = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner).get(&ordinal).cloned();
        let synchronize = |context: Arc<Context>| context.enter().and_then(|()| context.synchronize());
        matches!(context.map(synchronize), Some(Err(CudaError::Lost { .. })))
    }

    fn open_first(driver: &Arc<Driver>, ordinal: u32, free_before: Option<Bytes>) -> Result<Arc<Context>, CudaError> {
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
        // SAFETY: writes at most `length` bytes, with a terminating zero.
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
        let mut handle = ptr::null_mut();
        // SAFETY: writes one pointer; released when the context is dropped.
        let retained = unsafe { (driver.cuDevicePrimaryCtxRetain)(&mut handle, device) };
        if retained == DEVICE_UNAVAILABLE {
            return Err(CudaError::Unavailable { ordinal, gpu: gpu.name });
        }
        driver.check("open a context", retained)?;
        let (driver, library_bytes_max) = (driver.clone(), Mutex::default());
        let free_after_open = Bytes::ZERO;
        let mut context = Context { driver, device, handle, gpu, free_before, free_after_open, library_bytes_max };
        context.enter()?;
        context.gpu.virtual_memory = context.gpu.virtual_memory && context.maps_memory()?;
        context.free_after_open = context.memory()?.0;
        Ok(Arc::new(context))
    }

    /// Returns the properties of the GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Returns the free memory of the GPU just before this context was opened; `None` if it was unknown.
    pub fn free_before(&self) -> Option<Bytes> {
        self.free_before
    }

    /// Returns the free memory of the GPU right after this context was opened, before anything was loaded into it.
    pub fn free_after_open(&self) -> Bytes {
        self.free_after_open
    }

    /// Returns the driver's function table.
    pub(super) fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Makes this the current context of the calling thread.
    ///
    /// # Errors
    /// Fails if the context is lost.
    pub fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained as long as `self` lives.
        self.driver.check("enter a context", unsafe { (self.driver.cuCtxSetCurrent)(self.handle) })
    }

    /// Waits until the device has completed all work in the context.
    ///
    /// # Errors
    /// Returns a failure of that work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: takes no pointers.
        self.driver.check("finish its work", unsafe { (self.driver.cuCtxSynchronize)() })
    }

    /// Waits until the device has completed all work in the context. `op` is the name of an op for the error message.
    pub(super) fn finish(&self, op: &'static str) -> Result<(), CudaError> {
        // SAFETY: takes no pointers.
        self.driver.check_with(unsafe { (self.driver.cuCtxSynchronize)() }, || format!("finish {op}").into())
    }

    /// Returns the GPU's free memory, then its total memory, as the driver reports them. Other processes count, too.
    ///
    /// # Errors
    /// Fails if the driver does not report it.
    pub fn memory(&self) -> Result<(Bytes, Bytes), CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers.
        self.driver.check("report its free memory", unsafe { (self.driver.cuMemGetInfo_v2)(&mut free, &mut total) })?;
        Ok((Bytes(free as u64), Bytes(total as u64)))
    }

    /// Returns the driver structure that describes memory on this device, for allocations that are mapped.
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

    /// Returns the granularity of mapped memory in bytes: addresses and sizes of mappings are multiples of it.
    ///
    /// # Errors
    /// Fails if the driver does not report it.
    pub fn granularity(&self) -> Result<u64, CudaError> {
        let properties = self.allocation();
        // SAFETY: reads one description and writes one integer.
        let ask = |bytes: *mut usize| unsafe {
            (self.driver.cuMemGetAllocationGranularity)(bytes, &properties, GRANULARITY_MINIMUM)
        };
        self.driver.get("report its granularity", ask).map(|bytes| bytes as u64)
    }

    /// Tests whether memory can be mapped, by mapping and unmapping a little. A container may forbid it although the
    /// driver reports support. A driver may also report a lack of memory when only mapped memory is refused.
    ///
    /// # Errors
    /// Fails if plain memory is refused, too, or the device is lost; it is then unknown whether memory can be mapped.
    fn maps_memory(&self) -> Result<bool, CudaError> {
        match self.map_and_unmap() {
            Err(CudaError::Call { .. }) => Ok(false),
            Err(refused @ CudaError::Memory { .. }) => match self.allocate(PROBE_BYTES) {
                // SAFETY: allocated just now, and known only here.
                Ok(plain) => unsafe { self.free(plain) }.map(|()| false),
                Err(CudaError::Memory { .. }) => Err(refused),
                Err(error) => Err(error),
            },
            tried => tried.map(|()| true),
        }
    }

    /// Maps and unmaps one granule of memory.
    fn map_and_unmap(&self) -> Result<(), CudaError> {
        let bytes = self.granularity()?;
        let at = self.reserve(bytes)?;
        // SAFETY: a newly reserved range of one granule, known only here.
        let mapped = unsafe { self.map(at, bytes).and_then(|()| self.unmap(at, bytes)) };
        // SAFETY: the same range, with nothing mapped.
        unsafe { self.unreserve(at, bytes) }?;
        mapped
    }

    /// Reserves a range of device addresses without memory behind it, and returns its first address.
    pub(super) fn reserve(&self, bytes: u64) -> Result<Address, CudaError> {
        // SAFETY: writes one address, of the driver's choice.
        let ask = |at: *mut Address| unsafe { (self.driver.cuMemAddressReserve)(at, bytes as usize, 0, 0, 0) };
        self.driver.get("reserve address space", ask)
    }

    /// Allocates `bytes` of device memory and maps it at address `at`, readable and writable by this device alone.
    ///
    /// # Safety
    /// The range lies in reserved address space with nothing mapped in it; address and size are multiples of the
    /// granularity.
    pub(super) unsafe fn map(&self, at: Address, bytes: u64) -> Result<(), CudaError> {
        let (driver, properties, size) = (&self.driver, self.allocation(), bytes as usize);
        // SAFETY: reads one description and writes one handle.
        let make = |memory: *mut c_ulonglong| unsafe { (driver.cuMemCreate)(memory, size, &properties, 0) };
        let memory = driver.get("allocate memory", make)?;
        // SAFETY: as the caller promises.
        let mapped = driver.check("map memory", unsafe { (driver.cuMemMap)(at, size, 0, memory, 0) });
        // A mapping keeps its memory, so the handle can be released. If mapping failed, this frees the memory.
        // SAFETY: the handle is owned here, and not used after this.
        let released = driver.check("release memory", unsafe { (driver.cuMemRelease)(memory) });
        mapped?;
        let access = Access { location: properties.location, flags: ACCESS_READ_WRITE };
        // SAFETY: the range was mapped just now; reads one description.
        let allowed = driver.check("set access to memory", unsafe { (driver.cuMemSetAccess)(at, size, &access, 1) });
        if allowed.is_err() {
            // SAFETY: the range was just mapped as a whole, and is known only here.
            unsafe { self.unmap(at, bytes) }?;
        }
        allowed.and(released)
    }

    /// Unmaps ranges that [`Context::map`] mapped, which frees their memory.
    ///
    /// # Safety
    /// The range consists of whole mapped ranges, and no work in progress touches it.
    pub(super) unsafe fn unmap(&self, at: Address, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        self.driver.check("unmap memory", unsafe { (self.driver.cuMemUnmap)(at, bytes as usize) })
    }

    /// Releases reserved address space.
    ///
    /// # Safety
    /// The range is one that [`Context::reserve`] returned, as a whole, with nothing mapped in it.
    pub(super) unsafe fn unreserve(&self, at: Address, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        self.driver.check("free address space", unsafe { (self.driver.cuMemAddressFree)(at, bytes as usize) })
    }

    /// Pins host pages, so that the device copies from and to them directly.
    ///
    /// Returns `false` if the driver refuses to pin them. Copies are then still correct, but synchronous: the driver
    /// buffers the source and waits for the destination before the call returns.
    ///
    /// # Errors
    /// Fails only if the device is lost.
    ///
    /// # Safety
    /// The range consists of whole pages that stay mapped until [`Context::unpin`].
    pub(super) unsafe fn pin(&self, place: *mut u8, bytes: usize) -> Result<bool, CudaError> {
        // SAFETY: as the caller promises.
        let pinned = unsafe { (self.driver.cuMemHostRegister_v2)(place.cast(), bytes, HOST_PORTABLE) };
        match self.driver.check("pin memory of the host", pinned) {
            Ok(()) => Ok(true),
            Err(lost @ CudaError::Lost { .. }) => Err(lost),
            Err(_) => Ok(false),
        }
    }

    /// Unpins pages pinned by [`Context::pin`].
    ///
    /// # Safety
    /// The pointer is the start of a pinned range, and no copy from or to it is in progress.
    pub(super) unsafe fn unpin(&self, place: *mut u8) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        self.driver.check("unpin memory of the host", unsafe { (self.driver.cuMemHostUnregister)(place.cast()) })
    }

    /// Allocates device memory with `cuMemAlloc`, and returns its first address.
    pub(super) fn allocate(&self, bytes: u64) -> Result<Address, CudaError> {
        // SAFETY: writes one address.
        let ask = |at: *mut Address| unsafe { (self.driver.cuMemAlloc_v2)(at, bytes as usize) };
        self.driver.get("allocate memory", ask)
    }

    /// Frees memory that [`Context::allocate`] allocated.
    ///
    /// # Safety
    /// The address came from [`Context::allocate`], and no work in progress touches it.
    pub(super) unsafe fn free(&self, at: Address) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        self.driver.check("free memory", unsafe { (self.driver.cuMemFree_v2)(at) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open_first`; every object in the context holds an `Arc` of it, and is dropped.
        unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

/// A block of pinned host memory, which the device copies from and to directly.
pub struct Pinned {
    context: Arc<Context>,
    place: ptr::NonNull<u8>,
    bytes: u64,
    owned: PhantomData<u8>,
}

// SAFETY: plain memory with a single owner.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Allocates `bytes` of zeroed pinned memory. Zero bytes allocate nothing.
    ///
    /// # Errors
    /// Fails if the host cannot pin that much memory.
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Pinned, CudaError> {
        let driver = context.driver();
        let mut place = ptr::NonNull::dangling();
        if bytes > 0 {
            // SAFETY: writes one pointer.
            let ask = |at: *mut *mut c_void| unsafe { (driver.cuMemHostAlloc)(at, bytes as usize, HOST_PORTABLE) };
            let at = driver.get("pin memory of the host", ask)?.cast::<u8>();
            // SAFETY: the driver has just returned that many bytes.
            unsafe { ptr::write_bytes(at, 0, bytes as usize) };
            place = ptr::NonNull::new(at).ok_or(CudaError::Memory { what: "pin memory of the host".into() })?;
        }
        Ok(Pinned { context: context.clone(), place, bytes, owned: PhantomData })
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the pointer to the first byte, for asynchronous copies.
    pub fn base(&self) -> *mut u8 {
        self.place.as_ptr()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: owned here; the driver waits for copies in progress.
            unsafe { (self.context.driver().cuMemFreeHost)(self.base().cast()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{Exit, Failure};
    use std::path::Path;

    #[test]
    fn structures_have_header_sizes() {
        assert_eq!((size_of::<Allocation>(), size_of::<Access>(), size_of::<Location>()), (32, 12, 8));
    }

    #[test]
    fn missing_library_is_an_input_error() {
        let Err(error) = Driver::load(Path::new("libno-such-driver.so.1")) else { panic!("there is none") };
        let failure = Failure::from(error);
        assert_eq!(failure.exit, Exit::Input);
        assert!(failure.message.contains("libno-such-driver.so.1"), "{failure}");
        // A library that is not a driver is reported with its first missing function.
        let Err(error) = Driver::load(Path::new("libc.so.6")) else { panic!("libc is no driver") };
        assert_eq!(error, CudaError::Function { library: "libc.so.6".into(), function: "cuInit" });
    }

    #[test]
    fn errors_map_to_exit_codes() {
        let exit = |error: CudaError| Failure::from(error).exit;
        let (name, text) = ("CUDA_ERROR_ILLEGAL_ADDRESS".to_owned(), "an illegal memory access".to_owned());
        assert_eq!(
            exit(CudaError::Lost { what: "finish its work".into(), name: name.clone(), text: text.clone() }),
            Exit::Stopped
        );
        assert_eq!(exit(CudaError::Call { what: "start a kernel".into(), name, text }), Exit::Bug);
        let gpu = "a gpu".to_owned();
        let (requested, free, total) = (Bytes(3 << 30), Bytes(2 << 30), Bytes(4 << 30));
        assert_eq!(exit(CudaError::Refused { requested, gpu, free, total }), Exit::DoesNotFit);
        assert_eq!(exit(CudaError::NoDevice { ordinal: 1, count: 1 }), Exit::Input);
        assert_eq!(exit(CudaError::Unavailable { ordinal: 1, gpu: "a gpu".to_owned() }), Exit::Input);
    }

    #[test]
    fn kernel_and_hardware_faults_are_sticky() {
        for code in [4, 46, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999] {
            assert!(is_sticky(code), "{code}");
        }
        // Kernels that request too much, and servers that were never reached, leave the context usable.
        for code in [0, 1, 2, 3, 36, 100, 200, 201, 400, 401, 500, 600, 701, 720, 801, 805, 807, 910, 912, 917] {
            assert!(!is_sticky(code), "{code}");
        }
    }
}
