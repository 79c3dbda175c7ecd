//! NVIDIA GPUs and software: default limits of every GPU, the path of every library, and the install command for each
//! missing one. Probing opens no CUDA context and uses no GPU memory.

use super::{DefaultLimits, DeviceInfo};
use crate::cuda::gpus::{self, CudaInstallation, GpuInfo};
use crate::cuda::libraries::{CudaVersion, Libraries, Library, LibraryError};
use crate::cuda::nvml::{Condition, Memory, Pcie, Process};
use crate::probe::read_text;
use plimsoll_core::{Budget, Bytes, DeviceKind};
use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};

/// NVIDIA software on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Nvidia {
    /// Version of the driver. None if it is not installed or does not start.
    pub driver: Option<String>,
    /// Newest CUDA version that the driver supports. None without a working driver.
    pub cuda: Option<String>,
    /// Reason why no GPU can be used although a driver is installed. None if the driver works or is not installed.
    pub error: Option<String>,
    /// The parts of `error`. None if the driver works or is not installed.
    #[serde(skip)]
    pub failure: Option<DriverFailure>,
    /// State of each NVIDIA library that Plimsoll uses, usable or not.
    pub libraries: Vec<LibraryState>,
    /// Number of NVIDIA graphics cards on the PCI bus, whether or not the driver lists them.
    pub cards_on_bus: usize,
}

/// A driver that is installed and does not work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFailure {
    /// The driver's error code (`CUresult`). None if the driver was not called.
    pub code: Option<u32>,
    /// Description of the failure.
    pub text: String,
    /// Instruction that ends it.
    pub remedy: String,
}

/// An NVIDIA library with its path, or with the command that installs it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LibraryState {
    /// The library.
    pub library: Library,
    /// Path of the file. None if no usable version was found.
    pub path: Option<PathBuf>,
    /// Version. None if no usable version was found, or if the version is not known without loading the library.
    pub version: Option<String>,
    /// Kind of location, such as a system folder or a Python package. None if no usable version was found.
    pub place: Option<&'static str>,
    /// Reason why the library is not usable. None if it is usable.
    pub missing: Option<String>,
    /// Command or advice that makes the library usable. None if it is usable.
    pub remedy: Option<String>,
}

/// Facts that only GPUs have.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Gpu {
    /// Architecture family, such as `Ampere`.
    pub family: &'static str,
    /// Compute capability, such as `8.6`.
    pub compute_capability: String,
    /// Unique identifier (UUID) that the driver gives the GPU.
    pub uuid: String,
    /// Address on the PCI bus.
    pub bus: String,
    /// Memory that all processes together use on the GPU. None if NVML does not report it.
    pub held_bytes: Option<Bytes>,
    /// Memory reserved by the driver. None if NVML does not report it.
    pub reserved_bytes: Option<Bytes>,
    /// Processes that compute or draw on the GPU; empty if there are none or NVML does not see them.
    pub processes: Vec<Process>,
    /// Link to the host. None if NVML does not report it.
    pub pcie: Option<Pcie>,
    /// Temperature, clocks and utilisation now.
    pub condition: Condition,
    /// Reason why Plimsoll cannot use the GPU. None if it can.
    pub unusable: Option<String>,
}

/// Reads the state of NVIDIA's software, and of the GPUs that the driver lists; no GPUs without a working driver.
pub(super) fn read() -> (Nvidia, Vec<DeviceInfo>) {
    match gpus::installation() {
        Ok(here) => {
            let driver = (here.driver_version.clone(), here.cuda);
            let nvidia = Nvidia::of(&here.libraries, Ok(driver), on_bus(Path::new("/")));
            let gpus = here.gpus.iter().map(|gpu| device_info_now(here, gpu, &nvidia)).collect();
            (nvidia, gpus)
        }
        Err(error) => (Nvidia::of(gpus::libraries(), Err(error), on_bus(Path::new("/"))), Vec::new()),
    }
}

impl Nvidia {
    fn of(libraries: &Libraries, driver: Result<(String, CudaVersion), LibraryError>, cards_on_bus: usize) -> Nvidia {
        let cuda = driver.as_ref().ok().map(|(_, cuda)| *cuda);
        let mut states = Vec::from(Library::ALL.map(|library| LibraryState::of(library, libraries, cuda)));
        let mut failure = None;
        match &driver {
            // The file name holds an interface version; this is the driver's own version.
            Ok((version, _)) => states[0].version = Some(version.clone()),
            Err(LibraryError::Missing { .. }) => {}
            Err(error) => failure = Some(DriverFailure::of(error)),
        }
        let (driver, cuda) = driver.ok().map_or((None, None), |(driver, cuda)| (Some(driver), Some(cuda.to_string())));
        let error = failure.as_ref().map(|failure| format!("{}: {}", failure.text, failure.remedy));
        Nvidia { driver, cuda, error, failure, libraries: states, cards_on_bus }
    }

    /// Returns whether a library is usable: its path, or the reason why not and the remedy.
    pub fn library(&self, library: Library) -> &LibraryState {
        self.libraries.iter().find(|state| state.library == library).expect("all libraries are listed")
    }

    /// Returns a message that names the first required library that is missing and the command that installs it. None
    /// if all required libraries are usable.
    pub fn missing_library(&self) -> Option<String> {
        let needed = self.libraries.iter().filter(|state| state.library.is_required());
        let state = needed.into_iter().find(|state| state.path.is_none())?;
        let remedy = state.remedy.as_deref().unwrap_or_default();
        Some(format!("{} is missing: {remedy}", state.library))
    }
}

impl DriverFailure {
    fn of(error: &LibraryError) -> DriverFailure {
        let code = match error {
            LibraryError::DriverRefuses { code, .. } => *code,
            _ => None,
        };
        DriverFailure { code, text: error.to_string(), remedy: error.remedy() }
    }
}

impl LibraryState {
    /// Returns the state of a library among `libraries`; `cuda` is the newest CUDA version that the driver supports.
    fn of(library: Library, libraries: &Libraries, cuda: Option<CudaVersion>) -> LibraryState {
        match libraries.choose(library, cuda) {
            Ok(found) => LibraryState {
                library,
                path: Some(found.path.clone()),
                version: Some(found.version.clone()).filter(|version| !version.is_empty()),
                place: Some(found.place),
                missing: None,
                remedy: None,
            },
            Err(error) => LibraryState {
                library,
                path: None,
                version: None,
                place: None,
                missing: Some(error.to_string()),
                remedy: Some(error.remedy()),
            },
        }
    }
}

impl fmt::Display for Nvidia {
    /// Writes one line for each library if the driver is installed, otherwise a single line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let driver = self.library(Library::Driver);
        if driver.path.is_none() {
            f.write_str("NVIDIA driver not found")?;
            if self.cards_on_bus > 0 {
                let cards = if self.cards_on_bus == 1 { "an NVIDIA card is" } else { "NVIDIA cards are" };
                write!(f, ", though {cards} on the bus: {}", driver.remedy.as_deref().unwrap_or_default())?;
            }
            return Ok(());
        }
        for (index, state) in self.libraries.iter().enumerate() {
            let line_break = if index == 0 { "" } else { "\n" };
            write!(f, "{line_break}{}", state.library)?;
            match (&state.path, &state.version) {
                (Some(path), version) => {
                    if let Some(version) = version {
                        write!(f, " {version}")?;
                    }
                    if let (Library::Driver, Some(cuda)) = (state.library, &self.cuda) {
                        write!(f, " (CUDA {cuda})")?;
                    }
                    write!(f, ": {}", path.display())?;
                }
                (None, _) => {
                    let purpose = match state.library {
                        Library::Nvml => " (free memory and temperature are then unknown)",
                        Library::Nccl => " (GPUs then exchange data through host memory)",
                        _ => "",
                    };
                    write!(f, " not found{purpose}: {}", state.remedy.as_deref().unwrap_or_default())?;
                }
            }
        }
        match &self.error {
            Some(error) => write!(f, "\n{error}"),
            None => Ok(()),
        }
    }
}

/// Reads the current state of a GPU, and returns it together with the GPU's constant facts and default limits.
fn device_info_now(here: &CudaInstallation, gpu: &GpuInfo, nvidia: &Nvidia) -> DeviceInfo {
    let state = GpuState {
        memory: here.memory(gpu),
        processes: here.processes(gpu),
        pcie: here.pcie(gpu),
        condition: here.condition(gpu),
    };
    device_info(gpu, state, nvidia.missing_library())
}

/// Current state of a GPU as reported by NVML; fields are empty or None if NVML does not report them.
struct GpuState {
    memory: Option<Memory>,
    processes: Vec<Process>,
    pcie: Option<Pcie>,
    condition: Condition,
}

fn device_info(gpu: &GpuInfo, state: GpuState, missing_library: Option<String>) -> DeviceInfo {
    let unusable = gpu.architecture.check().err().or(missing_library);
    let total = state.memory.map_or(gpu.memory_bytes, |memory| memory.total_bytes);
    // Without NVML the free memory is unknown until a context is open.
    let free = state.memory.map_or(gpu.memory_bytes, |memory| memory.free_bytes);
    let bound_by = match state.memory {
        Some(_) => "NVML",
        None => "assumed: NVML does not report it, and use by others is unknown until the run starts",
    };
    let defaults = match &unusable {
        Some(reason) => DefaultLimits { budget_bytes: Bytes::ZERO, threads: 0, reason: format!("not used: {reason}") },
        None => {
            let budget_bytes = Budget::DEVICE.load_line(free);
            let reason = format!("{} of {free} free ({bound_by})", Budget::DEVICE);
            DefaultLimits { budget_bytes, threads: 0, reason }
        }
    };
    DeviceInfo {
        name: format!("cuda:{}", gpu.index),
        kind: DeviceKind::Cuda,
        model: gpu.name.clone(),
        memory_total_bytes: total,
        memory_free_bytes: free,
        memory_bound_by: bound_by.to_owned(),
        cores: gpu.multiprocessors,
        threads: 0,
        features: Vec::new(),
        caches: Vec::new(),
        defaults,
        gpu: Some(Gpu {
            family: gpu.architecture.family(),
            compute_capability: gpu.architecture.to_string(),
            uuid: gpu.uuid.clone(),
            bus: gpu.bus.clone(),
            held_bytes: state.memory.map(|memory| memory.used_bytes),
            reserved_bytes: state.memory.map(|memory| memory.reserved_bytes),
            processes: state.processes,
            pcie: state.pcie,
            condition: state.condition,
            unusable,
        }),
    }
}

/// Counts the NVIDIA graphics cards that the kernel lists on the PCI bus. `root` is `/`, or a test's folder.
fn on_bus(root: &Path) -> usize {
    let devices = std::fs::read_dir(root.join("sys/bus/pci/devices")).into_iter().flatten().flatten();
    let is = |device: &Path, file: &str, start: &str| {
        read_text(device.join(file)).is_some_and(|text| text.starts_with(start))
    };
    // Vendor 10de is NVIDIA; class 03 is graphics.
    devices.filter(|device| is(&device.path(), "vendor", "0x10de") && is(&device.path(), "class", "0x03")).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::architecture::Architecture;
    use crate::cuda::libraries::SearchEnvironment;
    use std::fs;

    /// Creates a root folder with these files, and finds the libraries in it.
    fn machine(files: &[&str]) -> (tempfile::TempDir, Libraries) {
        let root = tempfile::tempdir().unwrap();
        for file in files {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let libraries = Libraries::find_in(SearchEnvironment::rooted_at(root.path()));
        (root, libraries)
    }

    fn shown(root: &Path, nvidia: &Nvidia) -> String {
        nvidia.to_string().replace(&root.display().to_string(), "")
    }

    const DRIVER: &str = "usr/lib/x86_64-linux-gnu/libcuda.so.1";
    const NVML: &str = "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1";

    fn driver(major: u32, minor: u32) -> Result<(String, CudaVersion), LibraryError> {
        Ok(("550.54.14".to_owned(), CudaVersion { major, minor }))
    }

    #[test]
    fn machine_without_nvidia_prints_one_line() {
        let (_root, libraries) = machine(&[]);
        let missing = || Err(libraries.choose(Library::Driver, None).unwrap_err());
        assert_eq!(Nvidia::of(&libraries, missing(), 0).to_string(), "NVIDIA driver not found");
        let with_card = Nvidia::of(&libraries, missing(), 1).to_string();
        assert!(with_card.starts_with("NVIDIA driver not found, though an NVIDIA card is on the bus: "), "{with_card}");
    }

    #[test]
    fn driver_alone_lists_install_commands() {
        let (root, libraries) = machine(&[DRIVER, NVML]);
        let nvidia = Nvidia::of(&libraries, driver(12, 4), 1);
        assert_eq!(
            shown(root.path(), &nvidia),
            "NVIDIA driver 550.54.14 (CUDA 12.4): /usr/lib/x86_64-linux-gnu/libcuda.so.1\n\
             NVML 1: /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1\n\
             NVRTC not found: pip install nvidia-cuda-nvrtc-cu12 nvidia-cublas-cu12\n\
             cuBLASLt not found: pip install nvidia-cuda-nvrtc-cu12 nvidia-cublas-cu12\n\
             NCCL not found (GPUs then exchange data through host memory): pip install nvidia-nccl-cu12"
        );
        let missing = nvidia.missing_library().unwrap();
        assert_eq!(missing, "NVRTC is missing: pip install nvidia-cuda-nvrtc-cu12 nvidia-cublas-cu12");
        let found = device_info(&card(8, 6), unknown_state(), Some(missing));
        assert_eq!(found.defaults.budget_bytes, Bytes::ZERO);
        assert!(
            found.defaults.reason.starts_with("not used: NVRTC is missing: pip install"),
            "{}",
            found.defaults.reason
        );
    }

    #[test]
    fn nvrtc_newer_than_the_driver_is_rejected() {
        let nvrtc = "usr/local/cuda/lib64/libnvrtc.so.13";
        let (root, libraries) = machine(&[DRIVER, nvrtc, "usr/local/cuda/lib64/libcublasLt.so.13"]);
        let nvidia = Nvidia::of(&libraries, driver(13, 1), 1);
        assert_eq!(nvidia.missing_library(), None);
        assert!(shown(root.path(), &nvidia).contains("\nNVRTC 13: /usr/local/cuda/lib64/libnvrtc.so.13\n"));
        let old = Nvidia::of(&libraries, driver(12, 4), 1);
        assert_eq!(old.library(Library::Nvrtc).path, None);
        let missing = old.library(Library::Nvrtc).missing.clone().unwrap();
        assert!(missing.ends_with("is of CUDA 13, but the driver knows CUDA up to 12.4"), "{missing}");
    }

    #[test]
    fn failing_driver_is_reported_with_its_error() {
        let (root, libraries) = machine(&[DRIVER]);
        let error = LibraryError::DriverRefuses {
            path: root.path().join(DRIVER),
            reason: "its library and its kernel module are of different versions (code 803)".to_owned(),
            code: Some(803),
        };
        let nvidia = Nvidia::of(&libraries, Err(error), 1);
        assert!(nvidia.error.as_ref().unwrap().contains("of different versions (code 803): after a driver update"));
        let failure = nvidia.failure.as_ref().unwrap();
        assert_eq!(failure.code, Some(803));
        assert!(failure.text.ends_with("(code 803)") && failure.remedy.starts_with("after a driver update"));
        assert!(shown(root.path(), &nvidia).contains("\nthe NVIDIA driver (/usr/lib/"), "{nvidia}");
    }

    fn card(major: u32, minor: u32) -> GpuInfo {
        GpuInfo {
            index: 1,
            name: "NVIDIA Example".to_owned(),
            uuid: "00112233-4455-6677-8899-aabbccddeeff".to_owned(),
            bus: "00000000:01:00.0".to_owned(),
            architecture: Architecture { major, minor },
            multiprocessors: 82,
            memory_bytes: Bytes::gib(24),
        }
    }

    fn unknown_state() -> GpuState {
        GpuState { memory: None, processes: Vec::new(), pcie: None, condition: Condition::default() }
    }

    #[test]
    fn default_budget_counts_free_gpu_memory() {
        let memory = Memory {
            total_bytes: Bytes::gib(24),
            used_bytes: Bytes::gib(3),
            reserved_bytes: Bytes::gib(1),
            free_bytes: Bytes::gib(20),
        };
        let held = device_info(&card(8, 6), GpuState { memory: Some(memory), ..unknown_state() }, None);
        assert_eq!((held.name.as_str(), held.kind, held.cores), ("cuda:1", DeviceKind::Cuda, 82));
        assert_eq!(held.defaults.budget_bytes, Bytes::gib(18));
        assert_eq!(held.defaults.reason, "90% of 20.00 GiB free (NVML)");
        assert_eq!(held.gpu.unwrap().held_bytes, Some(Bytes::gib(3)));
        let without = device_info(&card(8, 6), unknown_state(), None);
        assert_eq!(without.memory_free_bytes, Bytes::gib(24));
        assert!(without.defaults.reason.contains("assumed: NVML does not report it"), "{}", without.defaults.reason);
    }

    #[test]
    fn old_gpu_is_listed_but_unused() {
        let old = device_info(&card(7, 5), unknown_state(), None);
        assert!(old.defaults.reason.starts_with("not used: Turing (7.5) is too old"), "{}", old.defaults.reason);
        assert_eq!(old.gpu.unwrap().family, "Turing");
    }

    #[test]
    fn bus_cards_are_counted_by_vendor_and_class() {
        let root = tempfile::tempdir().unwrap();
        for (place, vendor, class) in
            [("1", "0x10de", "0x030000"), ("2", "0x10de", "0x040300"), ("3", "0x8086", "0x030000")]
        {
            let device = root.path().join("sys/bus/pci/devices").join(place);
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("vendor"), format!("{vendor}\n")).unwrap();
            fs::write(device.join("class"), format!("{class}\n")).unwrap();
        }
        assert_eq!(on_bus(root.path()), 1);
        assert_eq!(on_bus(Path::new("/nowhere")), 0);
    }
}
