//! The GPUs of this machine as the driver lists them, without a context on any: nothing here takes memory on a GPU.

use super::compile::Architecture;
use super::driver::{CudaError, DEVICE_COMPUTE_MAJOR, DEVICE_COMPUTE_MINOR, DEVICE_MULTIPROCESSORS, library};
use super::libraries::{CudaVersion, Found, Libraries, Library, LibraryError};
use super::nvml::{Condition, Memory, Nvml, Pcie, Process, Which};
use plimsoll_core::Bytes;
use serde::Serialize;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fs;
use std::path::Path;
use std::sync::OnceLock;

library! {
    /// The functions of the driver that list GPUs.
    Listing {
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
pub struct Card {
    /// The driver's number of it: 0 of `cuda:0`.
    pub index: u32,
    /// The maker's name.
    pub name: String,
    /// Its unique number, 16 bytes in hexadecimal with dashes.
    pub uuid: String,
    /// Its place on the bus.
    pub bus: String,
    /// Its compute capability.
    pub architecture: Architecture,
    /// Its multiprocessors.
    pub multiprocessors: u32,
    /// Memory for programs.
    pub memory_bytes: Bytes,
}

impl Card {
    fn which(&self) -> Which<'_> {
        Which { uuid: &self.uuid, bus: &self.bus }
    }
}

/// The driver, started, with what goes with it.
pub struct Here {
    /// The driver's library.
    pub driver: Found,
    /// The driver's version, as far as it can be read: `550.54.14`.
    pub driver_version: String,
    /// The newest CUDA that the driver knows.
    pub cuda: CudaVersion,
    /// All libraries that were found.
    pub libraries: Libraries,
    /// The GPUs, in the driver's order.
    pub cards: Vec<Card>,
    nvml: Option<Nvml>,
}

impl Here {
    /// The compiler that goes with the driver.
    ///
    /// # Errors
    /// There is none.
    pub fn nvrtc(&self) -> Result<&Found, LibraryError> {
        self.libraries.choose(Library::Nvrtc, Some(self.cuda))
    }

    /// The library of products that goes with the driver.
    ///
    /// # Errors
    /// There is none.
    pub fn cublaslt(&self) -> Result<&Found, LibraryError> {
        self.libraries.choose(Library::CublasLt, Some(self.cuda))
    }

    /// What GPUs exchange by, where it is here.
    pub fn nccl(&self) -> Option<&Found> {
        self.libraries.choose(Library::Nccl, None).ok()
    }

    /// The version of NCCL, where one is here that can be used: asked once.
    pub fn nccl_version(&self) -> Option<&'static str> {
        static VERSION: OnceLock<Option<String>> = OnceLock::new();
        VERSION.get_or_init(|| super::nccl::version(&self.nccl()?.path)).as_deref()
    }

    /// Whether NVML works.
    pub fn has_nvml(&self) -> bool {
        self.nvml.is_some()
    }

    /// A card's memory now, as NVML sees it: what others hold included, and no context needed.
    pub fn memory(&self, card: &Card) -> Option<Memory> {
        self.nvml.as_ref()?.memory(card.which())
    }

    /// The programs that compute on a card.
    pub fn processes(&self, card: &Card) -> Vec<Process> {
        self.nvml.as_ref().map(|nvml| nvml.processes(card.which())).unwrap_or_default()
    }

    /// A card's link to the host.
    pub fn pcie(&self, card: &Card) -> Option<Pcie> {
        self.nvml.as_ref()?.pcie(card.which())
    }

    /// How a card is now.
    pub fn condition(&self, card: &Card) -> Condition {
        self.nvml.as_ref().map(|nvml| nvml.condition(card.which())).unwrap_or_default()
    }
}

/// Starts the driver and lists the GPUs, once in the life of the process.
///
/// # Errors
/// There is no driver, it does not start, or it sees no GPU.
pub fn here() -> Result<&'static Here, LibraryError> {
    static HERE: OnceLock<Result<Here, LibraryError>> = OnceLock::new();
    HERE.get_or_init(|| start(Libraries::find())).as_ref().map_err(Clone::clone)
}

/// The first driver that starts: a machine may also have a toolkit's stub, or one that stands in for an older driver.
/// Where none does, what the first one said.
fn start(libraries: Libraries) -> Result<Here, LibraryError> {
    let mut first = libraries.choose(Library::Driver, None).map(drop).err();
    let mut starting = None;
    for driver in libraries.of_kind(Library::Driver) {
        match starts(&driver.path) {
            Ok(()) => {
                starting = Some(driver.clone());
                break;
            }
            Err(reason) => {
                first.get_or_insert(LibraryError::DriverRefuses { path: driver.path.clone(), reason });
            }
        }
    }
    let Some(driver) = starting else { return Err(first.expect("there is none, or it refuses")) };
    let refuses = |reason: String| LibraryError::DriverRefuses { path: driver.path.clone(), reason };
    let api = Listing::load(&driver.path).map_err(|error: CudaError| refuses(error.to_string()))?;
    // SAFETY: takes no pointers; flags must be 0; may be called any number of times.
    let code = unsafe { (api.cuInit)(0) };
    if code != 0 {
        return Err(refuses(start_error(code)));
    }
    let cards = list(&api).map_err(|code| refuses(format!("its GPUs cannot be listed (code {code})")))?;
    let mut number = 0;
    // SAFETY: writes one int to where it is told.
    unsafe { (api.cuDriverGetVersion)(&mut number) };
    let nvml = libraries.choose(Library::Nvml, None).ok().and_then(|found| Nvml::open(&found.path));
    let driver_version = nvml.as_ref().and_then(Nvml::driver_version).or_else(module_version);
    let driver_version = driver_version.unwrap_or_else(|| driver.version.clone());
    Ok(Here { driver, driver_version, cuda: CudaVersion::of_driver(number), libraries, cards, nvml })
}

/// Whether a driver starts, and why not. One that does not is given back: as long as it was there, libraries that ask
/// for a driver by its name would get this one.
fn starts(path: &Path) -> Result<(), String> {
    // SAFETY: a library by the name that NVIDIA's driver has everywhere; where it is none, it lacks the function.
    let library = unsafe { libloading::Library::new(path) }.map_err(|error| error.to_string())?;
    // SAFETY: the type is the one that cuda.h gives to this name.
    let start = unsafe { library.get::<unsafe extern "C" fn(c_uint) -> c_uint>("cuInit") }
        .map_err(|_| "it has no `cuInit`".to_owned())?;
    // SAFETY: takes no pointers; flags must be 0; may be called any number of times.
    match unsafe { start(0) } {
        0 => {
            // Drivers that have started do not bear to be taken away.
            std::mem::forget(library);
            Ok(())
        }
        code => Err(start_error(code)),
    }
}

fn list(api: &Listing) -> Result<Vec<Card>, c_uint> {
    let ok = |code: c_uint| if code == 0 { Ok(()) } else { Err(code) };
    let mut count = 0;
    // SAFETY: writes one int.
    ok(unsafe { (api.cuDeviceGetCount)(&mut count) })?;
    (0..count)
        .map(|ordinal| {
            let (mut device, mut bytes, mut uuid) = (0, 0, [0u8; 16]);
            // SAFETY: each writes one value of the type that it is given a place for; the ordinal is below the count.
            ok(unsafe { (api.cuDeviceGet)(&mut device, ordinal) })?;
            // SAFETY: as above, of a device that exists.
            ok(unsafe { (api.cuDeviceTotalMem_v2)(&mut bytes, device) })?;
            // SAFETY: as above.
            ok(unsafe { (api.cuDeviceGetUuid_v2)(&mut uuid, device) })?;
            let attribute = |which: c_uint| {
                let mut value = 0;
                // SAFETY: as above.
                ok(unsafe { (api.cuDeviceGetAttribute)(&mut value, which, device) })?;
                Ok::<u32, c_uint>(u32::try_from(value).unwrap_or(0))
            };
            let text = |ask: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_uint| {
                let mut text = [0u8; 256];
                // SAFETY: writes no more bytes than it is told there are, with a zero at the end.
                ok(unsafe { ask(text.as_mut_ptr().cast(), text.len() as c_int, device) })?;
                Ok::<String, c_uint>(
                    CStr::from_bytes_until_nul(&text).map_or(String::new(), |text| text.to_string_lossy().into_owned()),
                )
            };
            Ok(Card {
                index: ordinal as u32,
                name: text(api.cuDeviceGetName)?,
                uuid: dashed(uuid),
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

/// 16 bytes as NVIDIA's tools write them.
fn dashed(uuid: [u8; 16]) -> String {
    let hex = |range: std::ops::Range<usize>| uuid[range].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    [0..4, 4..6, 6..8, 8..10, 10..16].map(hex).join("-")
}

/// The driver's version as its kernel module says it; not on WSL, where there is none.
fn module_version() -> Option<String> {
    version_in(&fs::read_to_string("/proc/driver/nvidia/version").ok()?)
}

/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 ...`
fn version_in(text: &str) -> Option<String> {
    let is_version = |word: &&str| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

/// What the driver means when it does not start (`CUresult` of its documentation).
fn start_error(code: c_uint) -> String {
    match code {
        34 => "it is the toolkit's stub, not a driver (code 34)".to_owned(),
        100 => "it sees no GPU (code 100)".to_owned(),
        101 => "a GPU that was named does not exist (code 101)".to_owned(),
        802 => "the GPUs are not ready: the fabric manager does not run (code 802)".to_owned(),
        803 => "the driver's library and its kernel module are of different versions (code 803)".to_owned(),
        804 => "a compatibility library that does not go with this GPU is in its place (code 804)".to_owned(),
        code => format!("code {code}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unique_numbers_are_written_as_nvidias_tools_write_them() {
        let uuid: [u8; 16] = std::array::from_fn(|i| i as u8 * 17);
        assert_eq!(dashed(uuid), "00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn the_modules_version_is_read_from_its_first_line() {
        let text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22\nGCC version:  gcc 12.3\n";
        assert_eq!(version_in(text).as_deref(), Some("550.54.14"));
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n";
        assert_eq!(version_in(open).as_deref(), Some("570.86.15"));
        assert_eq!(version_in(""), None);
    }

    #[test]
    fn a_library_that_is_no_driver_does_not_start() {
        assert_eq!(starts(Path::new("libc.so.6")), Err("it has no `cuInit`".to_owned()));
        assert!(starts(Path::new("/nowhere/libcuda.so.1")).is_err());
    }

    #[test]
    fn a_driver_that_is_none_is_a_message() {
        assert!(start_error(803).contains("different versions"));
    }
}
