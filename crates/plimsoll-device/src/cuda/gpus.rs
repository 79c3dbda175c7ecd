//! The GPUs of this machine as the driver lists them. Nothing here opens a context or allocates GPU memory.

use super::abi::library;
use super::architecture::Architecture;
use super::driver::{DEVICE_COMPUTE_MAJOR, DEVICE_COMPUTE_MINOR, DEVICE_MULTIPROCESSORS};
use super::libraries::{CudaVersion, FoundLibrary, Libraries, Library, LibraryError};
use super::nvml::{Condition, GpuId, Memory, Nvml, Pcie, Process, Reference};
use crate::error::CudaError;
use plimsoll_core::Bytes;
use serde::Serialize;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fs;
use std::path::Path;
use std::sync::OnceLock;

library! {
    /// The driver functions that list GPUs.
    ListingApi {
        fn cuInit(flags: c_uint) -> c_uint;
        fn cuDriverGetVersion(version: *mut c_int) -> c_uint;
        fn cuDeviceGetCount(count: *mut c_int) -> c_uint;
        fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_uint;
        fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) -> c_uint;
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) -> c_uint;
        fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> c_uint;
        fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_uint;
        fn cuDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: c_int) -> c_uint;
    }
}

/// A GPU as the driver lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GpuInfo {
    /// Number of the GPU in the driver's list: 0 for `cuda:0`.
    pub index: u32,
    /// Product name.
    pub name: String,
    /// UUID: 16 bytes in hexadecimal with dashes.
    pub uuid: String,
    /// PCI bus address, such as `0000:01:00.0`.
    pub bus: String,
    /// Compute capability.
    pub architecture: Architecture,
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Total device memory.
    pub memory_bytes: Bytes,
}

impl GpuInfo {
    fn nvml_id(&self) -> GpuId<'_> {
        GpuId { uuid: &self.uuid, bus: &self.bus, total_bytes: self.memory_bytes }
    }
}

/// NVIDIA's software and GPUs on this machine: the started driver, the libraries that were found, and the GPUs.
pub struct CudaInstallation {
    /// File of the driver library that was started.
    pub driver: FoundLibrary,
    /// Driver version, such as `550.54.14`. Less exact or empty if neither NVML nor the kernel module reports it.
    pub driver_version: String,
    /// The newest CUDA version that the driver supports.
    pub cuda: CudaVersion,
    /// Files of all NVIDIA libraries that were found.
    pub libraries: Libraries,
    /// The GPUs, in driver order.
    pub gpus: Vec<GpuInfo>,
    nvml: Option<Nvml>,
}

impl CudaInstallation {
    /// Returns the preferred NVRTC library that is compatible with the driver.
    ///
    /// # Errors
    /// Fails if none is installed, or none is compatible.
    pub fn nvrtc(&self) -> Result<&FoundLibrary, LibraryError> {
        self.libraries.choose(Library::Nvrtc, Some(self.cuda))
    }

    /// Returns the preferred cuBLASLt library that is compatible with the driver.
    ///
    /// # Errors
    /// Fails if none is installed, or none is compatible.
    pub fn cublaslt(&self) -> Result<&FoundLibrary, LibraryError> {
        self.libraries.choose(Library::CublasLt, Some(self.cuda))
    }

    /// Returns the preferred NCCL library, of any version; `None` if none is installed.
    pub fn nccl(&self) -> Option<&FoundLibrary> {
        self.libraries.choose(Library::Nccl, None).ok()
    }

    /// Returns the version of the NCCL library, asked from it once per process. `None` if NCCL is missing, cannot be
    /// loaded, or is too old for Plimsoll.
    pub fn nccl_version(&self) -> Option<&'static str> {
        static VERSION: OnceLock<Option<String>> = OnceLock::new();
        VERSION.get_or_init(|| super::nccl::version(&self.nccl()?.path)).as_deref()
    }

    /// Returns whether NVML, NVIDIA's management library, was found and started.
    pub fn has_nvml(&self) -> bool {
        self.nvml.is_some()
    }

    /// Returns the current memory of a GPU from NVML, including memory of other processes. Needs no context. `None` if
    /// NVML does not report it.
    pub fn memory(&self, gpu: &GpuInfo) -> Option<Memory> {
        self.nvml.as_ref()?.memory(gpu.nvml_id())
    }

    /// Returns the visible processes that compute or draw on a GPU, by process id; empty if there are none or NVML does
    /// not report them.
    pub fn processes(&self, gpu: &GpuInfo) -> Vec<Process> {
        self.nvml.as_ref().map(|nvml| nvml.processes(gpu.nvml_id())).unwrap_or_default()
    }

    /// Returns the figures with which the condition of a GPU is compared. Those that NVML does not report are `None`.
    pub fn reference(&self, gpu: &GpuInfo) -> Reference {
        self.nvml.as_ref().map(|nvml| nvml.reference(gpu.nvml_id())).unwrap_or_default()
    }

    /// Returns the PCIe link between a GPU and the host; `None` if NVML is missing or does not report it.
    pub fn pcie(&self, gpu: &GpuInfo) -> Option<Pcie> {
        self.nvml.as_ref()?.pcie(gpu.nvml_id())
    }

    /// Returns the current temperature, clocks, power and load of a GPU. Figures that NVML does not report are `None`.
    pub fn condition(&self, gpu: &GpuInfo) -> Condition {
        self.nvml.as_ref().map(|nvml| nvml.condition(gpu.nvml_id())).unwrap_or_default()
    }
}

/// Returns NVIDIA's software and GPUs on this machine. The first call in a process starts the driver and lists the
/// GPUs; later calls return the same result.
///
/// # Errors
/// Fails if there is no driver, or none starts. A driver without any GPU does not start.
pub fn installation() -> Result<&'static CudaInstallation, LibraryError> {
    static INSTALLATION: OnceLock<Result<CudaInstallation, LibraryError>> = OnceLock::new();
    INSTALLATION.get_or_init(|| start_driver(libraries().clone())).as_ref().map_err(Clone::clone)
}

/// Returns NVIDIA's libraries on this machine. The first call in a process searches for them, as [`installation`] does:
/// a search takes ten milliseconds, and a process does not use libraries that are installed later.
pub fn libraries() -> &'static Libraries {
    static LIBRARIES: OnceLock<Libraries> = OnceLock::new();
    LIBRARIES.get_or_init(Libraries::find)
}

/// Starts the first driver library that works, and lists its GPUs. There may be several libraries, such as a stub of
/// the toolkit or a compatibility library.
///
/// # Errors
/// Fails if no library is found, with the first library's error if none starts, or if its GPUs cannot be listed.
fn start_driver(libraries: Libraries) -> Result<CudaInstallation, LibraryError> {
    let mut first_error = libraries.choose(Library::Driver, None).map(drop).err();
    let mut started = None;
    for driver in libraries.of_kind(Library::Driver) {
        match try_start(&driver.path) {
            Ok(()) => {
                started = Some(driver.clone());
                break;
            }
            Err((reason, code)) => {
                first_error.get_or_insert(LibraryError::DriverRefuses { path: driver.path.clone(), reason, code });
            }
        }
    }
    let Some(driver) = started else { return Err(first_error.expect("a driver that did not start left an error")) };
    let path = || driver.path.clone();
    let refused = |reason: String, code| LibraryError::DriverRefuses { path: path(), reason, code };
    let api = ListingApi::load(&driver.path).map_err(|error: CudaError| refused(error.to_string(), None))?;
    // SAFETY: takes no pointers; flags must be 0; may be called repeatedly.
    let code = unsafe { (api.cuInit)(0) };
    if code != 0 {
        return Err(refused(start_error(code), Some(code)));
    }
    let unlisted = |code: c_uint| refused(format!("its GPUs cannot be listed (code {code})"), None);
    let gpus = list_gpus(&api).map_err(unlisted)?;
    let mut number = 0;
    // SAFETY: writes one int through the pointer.
    unsafe { (api.cuDriverGetVersion)(&mut number) };
    let nvml = libraries.choose(Library::Nvml, None).ok().and_then(|found| Nvml::open(&found.path));
    let driver_version = nvml.as_ref().and_then(Nvml::driver_version).or_else(module_version);
    let driver_version = driver_version.unwrap_or_else(|| driver.version.clone());
    Ok(CudaInstallation { driver, driver_version, cuda: CudaVersion::of_driver(number), libraries, gpus, nvml })
}

/// Loads and starts the driver library at `path`, or returns the reason why it does not start, with the driver's error
/// code if it was called. A library that fails is unloaded, because other libraries that load the driver by name would
/// otherwise get it.
fn try_start(path: &Path) -> Result<(), (String, Option<c_uint>)> {
    // SAFETY: loads a file with the name of NVIDIA's driver; a file that is not a driver lacks the function.
    let library = unsafe { libloading::Library::new(path) }.map_err(|error| (error.to_string(), None))?;
    // SAFETY: the type is the declaration in cuda.h.
    let start = unsafe { library.get::<unsafe extern "C" fn(c_uint) -> c_uint>("cuInit") }
        .map_err(|_| ("it has no `cuInit`".to_owned(), None))?;
    // SAFETY: takes no pointers; flags must be 0; may be called repeatedly.
    match unsafe { start(0) } {
        0 => {
            // A driver that has started must stay loaded.
            std::mem::forget(library);
            Ok(())
        }
        code => Err((start_error(code), Some(code))),
    }
}

fn list_gpus(api: &ListingApi) -> Result<Vec<GpuInfo>, c_uint> {
    let mut count = 0;
    // SAFETY: writes one int.
    ok(unsafe { (api.cuDeviceGetCount)(&mut count) })?;
    (0..count)
        .map(|ordinal| {
            let (mut device, mut bytes, mut uuid) = (0, 0, [0u8; 16]);
            // SAFETY: each call writes one value of the pointed-to type; the ordinal is below the count.
            ok(unsafe { (api.cuDeviceGet)(&mut device, ordinal) })?;
            // SAFETY: writes one size, for a device that exists.
            ok(unsafe { (api.cuDeviceTotalMem_v2)(&mut bytes, device) })?;
            // SAFETY: writes 16 bytes, for a device that exists.
            ok(unsafe { (api.cuDeviceGetUuid_v2)(&mut uuid, device) })?;
            let attribute = |which: c_uint| device_attribute(api, which, device);
            // SAFETY: called below with functions that return texts of a device.
            let text = |query: TextQuery| unsafe { device_text(query, device) };
            Ok(GpuInfo {
                index: ordinal as u32,
                name: text(api.cuDeviceGetName)?,
                uuid: format_uuid(uuid),
                bus: text(api.cuDeviceGetPCIBusId)?,
                architecture: Architecture {
                    major: attribute(DEVICE_COMPUTE_MAJOR)?,
                    minor: attribute(DEVICE_COMPUTE_MINOR)?,
                },
                multiprocessors: attribute(DEVICE_MULTIPROCESSORS)?,
                memory_bytes: Bytes(bytes as u64),
            })
        })
        .collect()
}

/// Converts a status code of the driver to a result, whose error is the code.
fn ok(code: c_uint) -> Result<(), c_uint> {
    if code == 0 { Ok(()) } else { Err(code) }
}

/// Returns the device attribute `which` (a `CUdevice_attribute`) from the driver; 0 if its value is negative.
fn device_attribute(api: &ListingApi, which: c_uint, device: c_int) -> Result<u32, c_uint> {
    let mut value = 0;
    // SAFETY: writes one int; the driver refuses a device that does not exist.
    ok(unsafe { (api.cuDeviceGetAttribute)(&mut value, which, device) })?;
    Ok(u32::try_from(value).unwrap_or(0))
}

/// A driver function that writes a text about a device. Its arguments are a buffer, the size of the buffer, and the
/// device.
type TextQuery = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_uint;

/// Returns a text that the driver reports about a device.
///
/// # Safety
/// `query` writes at most as many bytes as its second argument says, for a device that exists.
unsafe fn device_text(query: TextQuery, device: c_int) -> Result<String, c_uint> {
    let mut text = [0u8; 256];
    // SAFETY: as the caller promises.
    ok(unsafe { query(text.as_mut_ptr().cast(), text.len() as c_int, device) })?;
    Ok(CStr::from_bytes_until_nul(&text).map_or(String::new(), |text| text.to_string_lossy().into_owned()))
}

/// Formats a UUID as NVIDIA's tools do, in hexadecimal with dashes.
fn format_uuid(uuid: [u8; 16]) -> String {
    let hex = |range: std::ops::Range<usize>| uuid[range].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    [0..4, 4..6, 6..8, 8..10, 10..16].map(hex).join("-")
}

/// Reads the driver version that the kernel module states under `/proc`; `None` if it states none, as on WSL.
fn module_version() -> Option<String> {
    parse_module_version(&fs::read_to_string("/proc/driver/nvidia/version").ok()?)
}

/// Parses the version from `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 ...`. `None` if the
/// first line has no version.
fn parse_module_version(text: &str) -> Option<String> {
    let is_version = |word: &&str| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

/// Returns the meaning of the error code (`CUresult`) with which a driver does not start.
fn start_error(code: c_uint) -> String {
    match code {
        34 => "it is the stub of the CUDA toolkit, not a driver (code 34)".to_owned(),
        100 => "it sees no GPU (code 100)".to_owned(),
        101 => "the requested GPU does not exist (code 101)".to_owned(),
        802 => "the GPUs are not ready: the fabric manager is not running (code 802)".to_owned(),
        803 => "the driver library and the kernel module have different versions (code 803)".to_owned(),
        804 => "a compatibility library that does not support this GPU replaces the driver (code 804)".to_owned(),
        code => format!("code {code}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_is_formatted_like_nvidia_tools() {
        let uuid: [u8; 16] = std::array::from_fn(|i| i as u8 * 17);
        assert_eq!(format_uuid(uuid), "00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn module_version_is_read_from_first_line() {
        let text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22\nGCC version:  gcc 12.3\n";
        assert_eq!(parse_module_version(text).as_deref(), Some("550.54.14"));
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n";
        assert_eq!(parse_module_version(open).as_deref(), Some("570.86.15"));
        assert_eq!(parse_module_version(""), None);
    }

    #[test]
    fn library_without_cuinit_does_not_start() {
        assert_eq!(try_start(Path::new("libc.so.6")), Err(("it has no `cuInit`".to_owned(), None)));
        assert!(try_start(Path::new("/nowhere/libcuda.so.1")).is_err());
    }

    #[test]
    fn start_error_explains_version_mismatch() {
        assert!(start_error(803).contains("different versions"));
    }
}
