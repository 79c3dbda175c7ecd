//! NVIDIA's GPUs and software as a person sees them: every GPU with what Plimsoll would take of it, every library with
//! where it lies, and for what is missing the one command that brings it. No context is opened: looking takes no
//! memory on any GPU.

use super::{Found, Takes, text};
use crate::cuda::gpus::{self, Card, Here};
use crate::cuda::libraries::{CudaVersion, Libraries, Library, LibraryError};
use crate::cuda::nvml::{Condition, Memory, Pcie, Process};
use plimsoll_core::{Budget, Bytes, DeviceKind};
use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};

/// NVIDIA's software on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Nvidia {
    /// The driver's version, where it is here and works.
    pub driver: Option<String>,
    /// The newest CUDA that it knows.
    pub cuda: Option<String>,
    /// Why GPUs cannot be used at all, though something of NVIDIA's is here.
    pub trouble: Option<String>,
    /// Each library that Plimsoll uses.
    pub libraries: Vec<LibraryState>,
    /// Graphics cards of NVIDIA's on the bus, whether a driver knows them or not.
    pub on_bus: usize,
}

/// A library: where it is, or what brings it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LibraryState {
    /// Which.
    pub library: Library,
    /// Where it is, if it can be used.
    pub path: Option<PathBuf>,
    /// Its version, as far as it is known without opening it.
    pub version: Option<String>,
    /// The kind of place.
    pub place: Option<&'static str>,
    /// Why it cannot be used.
    pub missing: Option<String>,
    /// The one command that brings it.
    pub cure: Option<String>,
}

/// What is known of a GPU beside what every device has.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// The family: `Ampere`.
    pub family: &'static str,
    /// The compute capability: `8.6`.
    pub compute_capability: String,
    /// Its unique number.
    pub uuid: String,
    /// Its place on the bus.
    pub bus: String,
    /// What programs hold of its memory, where that can be seen.
    pub held_bytes: Option<Bytes>,
    /// What the driver keeps of its memory for itself.
    pub reserved_bytes: Option<Bytes>,
    /// The programs that compute on it, as far as they can be seen.
    pub processes: Vec<Process>,
    /// Its link to the host.
    pub pcie: Option<Pcie>,
    /// How it is now.
    pub condition: Condition,
    /// Why Plimsoll does not run on it.
    pub unusable: Option<String>,
}

/// The software, and the GPUs as far as the driver lists them.
pub(super) fn read() -> (Nvidia, Vec<Found>) {
    match gpus::here() {
        Ok(here) => {
            let driver = (here.driver_version.clone(), here.cuda);
            let nvidia = Nvidia::of(&here.libraries, Ok(driver), on_bus(Path::new("/")));
            let gpus = here.cards.iter().map(|card| seen(here, card, &nvidia)).collect();
            (nvidia, gpus)
        }
        Err(error) => (Nvidia::of(&Libraries::find(), Err(error), on_bus(Path::new("/"))), Vec::new()),
    }
}

impl Nvidia {
    fn of(libraries: &Libraries, driver: Result<(String, CudaVersion), LibraryError>, on_bus: usize) -> Nvidia {
        let cuda = driver.as_ref().ok().map(|(_, cuda)| *cuda);
        let state = |library: Library| match libraries.choose(library, cuda) {
            Ok(found) => LibraryState {
                library,
                path: Some(found.path.clone()),
                version: Some(found.version.clone()).filter(|version| !version.is_empty()),
                place: Some(found.place),
                missing: None,
                cure: None,
            },
            Err(error) => LibraryState {
                library,
                path: None,
                version: None,
                place: None,
                missing: Some(error.to_string()),
                cure: Some(error.cure()),
            },
        };
        let mut states: Vec<LibraryState> = Library::ALL.map(state).into();
        let mut trouble = None;
        match &driver {
            // What its file is called is the version of an interface; this is the driver's own.
            Ok((version, _)) => states[0].version = Some(version.clone()),
            Err(LibraryError::Missing { .. }) => {}
            Err(error) => trouble = Some(format!("{error}: {}", error.cure())),
        }
        let (driver, cuda) = driver.ok().map_or((None, None), |(driver, cuda)| (Some(driver), Some(cuda.to_string())));
        Nvidia { driver, cuda, trouble, libraries: states, on_bus }
    }

    /// The state of a library.
    pub fn library(&self, library: Library) -> &LibraryState {
        self.libraries.iter().find(|state| state.library == library).expect("all are listed")
    }

    /// Why nothing runs on a GPU with the libraries that are here, and what brings the one that is missing.
    pub fn lacks(&self) -> Option<String> {
        let needed = self.libraries.iter().filter(|state| state.library.is_needed());
        let state = needed.into_iter().find(|state| state.path.is_none())?;
        let cure = state.cure.as_deref().unwrap_or_default();
        Some(format!("{} is missing: {cure}", state.library))
    }
}

impl fmt::Display for Nvidia {
    /// A line for each library where the driver is here, else one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let driver = self.library(Library::Driver);
        if driver.path.is_none() {
            f.write_str("NVIDIA driver not found")?;
            if self.on_bus > 0 {
                let cards = if self.on_bus == 1 { "a card of NVIDIA's is" } else { "cards of NVIDIA's are" };
                write!(f, ", though {cards} on the bus: {}", driver.cure.as_deref().unwrap_or_default())?;
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
                        Library::Nvml => " (free memory and temperatures stay unknown)",
                        Library::Nccl => " (several GPUs exchange through memory of the host)",
                        _ => "",
                    };
                    write!(f, " not found{purpose}: {}", state.cure.as_deref().unwrap_or_default())?;
                }
            }
        }
        match &self.trouble {
            Some(trouble) => write!(f, "\n{trouble}"),
            None => Ok(()),
        }
    }
}

/// A GPU as it is now.
fn seen(here: &Here, card: &Card, nvidia: &Nvidia) -> Found {
    let state = State {
        memory: here.memory(card),
        processes: here.processes(card),
        pcie: here.pcie(card),
        condition: here.condition(card),
    };
    found(card, state, nvidia.lacks())
}

/// What NVML says of a card.
struct State {
    memory: Option<Memory>,
    processes: Vec<Process>,
    pcie: Option<Pcie>,
    condition: Condition,
}

fn found(card: &Card, state: State, lacks: Option<String>) -> Found {
    let unusable = card.architecture.check().err().or(lacks);
    let total = state.memory.map_or(card.memory_bytes, |memory| memory.total_bytes);
    // Without NVML what is free is known once a context is open, and not before.
    let free = state.memory.map_or(card.memory_bytes, |memory| memory.free_bytes);
    let bound_by = match state.memory {
        Some(_) => "NVML",
        None => "assumed: without NVML what others hold is seen when the run starts",
    };
    let takes = match &unusable {
        Some(why) => Takes { budget_bytes: Bytes::ZERO, threads: 0, why: format!("not used: {why}") },
        None => {
            let budget_bytes = Budget::DEVICE.of(free);
            let why = format!("{} of the {free} that are free ({bound_by})", Budget::DEVICE);
            Takes { budget_bytes, threads: 0, why }
        }
    };
    Found {
        name: format!("cuda:{}", card.index),
        kind: DeviceKind::Cuda,
        model: card.name.clone(),
        memory_total_bytes: total,
        memory_free_bytes: free,
        memory_bound_by: bound_by.to_owned(),
        cores: card.multiprocessors,
        threads: 0,
        features: Vec::new(),
        caches: Vec::new(),
        takes,
        gpu: Some(Gpu {
            family: card.architecture.family(),
            compute_capability: card.architecture.to_string(),
            uuid: card.uuid.clone(),
            bus: card.bus.clone(),
            held_bytes: state.memory.map(|memory| memory.used_bytes),
            reserved_bytes: state.memory.map(|memory| memory.reserved_bytes),
            processes: state.processes,
            pcie: state.pcie,
            condition: state.condition,
            unusable,
        }),
    }
}

/// How many graphics cards of NVIDIA's are on the bus, as the kernel lists it.
fn on_bus(root: &Path) -> usize {
    let devices = std::fs::read_dir(root.join("sys/bus/pci/devices")).into_iter().flatten().flatten();
    let is =
        |device: &Path, file: &str, start: &str| text(device.join(file)).is_some_and(|text| text.starts_with(start));
    // Vendor 10de is NVIDIA, class 03 graphics.
    devices.filter(|device| is(&device.path(), "vendor", "0x10de") && is(&device.path(), "class", "0x03")).count()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::cuda::compile::Architecture;
    use crate::cuda::libraries::Surroundings;
    use std::fs;

    /// A machine laid out in a folder.
    fn machine(files: &[&str]) -> (tempfile::TempDir, Libraries) {
        let root = tempfile::tempdir().unwrap();
        for file in files {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let libraries = Libraries::find_in(Surroundings::of(root.path()));
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
    fn a_machine_without_anything_of_nvidias_says_so_in_a_line() {
        let (_root, libraries) = machine(&[]);
        let missing = || Err(libraries.choose(Library::Driver, None).unwrap_err());
        assert_eq!(Nvidia::of(&libraries, missing(), 0).to_string(), "NVIDIA driver not found");
        let with_card = Nvidia::of(&libraries, missing(), 1).to_string();
        assert!(
            with_card.starts_with("NVIDIA driver not found, though a card of NVIDIA's is on the bus: "),
            "{with_card}"
        );
    }

    #[test]
    fn a_driver_alone_is_shown_with_the_command_that_brings_the_rest() {
        let (root, libraries) = machine(&[DRIVER, NVML]);
        let nvidia = Nvidia::of(&libraries, driver(12, 4), 1);
        assert_eq!(
            shown(root.path(), &nvidia),
            "NVIDIA driver 550.54.14 (CUDA 12.4): /usr/lib/x86_64-linux-gnu/libcuda.so.1\n\
             NVML 1: /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1\n\
             NVRTC not found: pip install nvidia-cuda-nvrtc-cu12 nvidia-cublas-cu12\n\
             cuBLASLt not found: pip install nvidia-cuda-nvrtc-cu12 nvidia-cublas-cu12\n\
             NCCL not found (several GPUs exchange through memory of the host): pip install nvidia-nccl-cu12"
        );
        let lacks = nvidia.lacks().unwrap();
        assert_eq!(lacks, "NVRTC is missing: pip install nvidia-cuda-nvrtc-cu12 nvidia-cublas-cu12");
        let found = found(&card(8, 6), unseen(), Some(lacks));
        assert_eq!(found.takes.budget_bytes, Bytes::ZERO);
        assert!(found.takes.why.starts_with("not used: NVRTC is missing: pip install"), "{}", found.takes.why);
    }

    #[test]
    fn a_whole_machine_lacks_nothing_and_a_compiler_too_new_for_the_driver_is_not_taken() {
        let nvrtc = "usr/local/cuda/lib64/libnvrtc.so.13";
        let (root, libraries) = machine(&[DRIVER, nvrtc, "usr/local/cuda/lib64/libcublasLt.so.13"]);
        let nvidia = Nvidia::of(&libraries, driver(13, 1), 1);
        assert_eq!(nvidia.lacks(), None);
        assert!(shown(root.path(), &nvidia).contains("\nNVRTC 13: /usr/local/cuda/lib64/libnvrtc.so.13\n"));
        let old = Nvidia::of(&libraries, driver(12, 4), 1);
        assert_eq!(old.library(Library::Nvrtc).path, None);
        let missing = old.library(Library::Nvrtc).missing.clone().unwrap();
        assert!(missing.ends_with("is of CUDA 13, but the driver knows CUDA up to 12.4"), "{missing}");
    }

    #[test]
    fn a_driver_that_does_not_start_is_named_with_what_it_said() {
        let (root, libraries) = machine(&[DRIVER]);
        let error = LibraryError::DriverRefuses {
            path: root.path().join(DRIVER),
            reason: "its library and its kernel module are of different versions (code 803)".to_owned(),
        };
        let nvidia = Nvidia::of(&libraries, Err(error), 1);
        assert!(nvidia.trouble.as_ref().unwrap().contains("of different versions (code 803): nvidia-smi should"));
        assert!(shown(root.path(), &nvidia).contains("\nthe NVIDIA driver (/usr/lib/"), "{nvidia}");
    }

    fn card(major: u32, minor: u32) -> Card {
        Card {
            index: 1,
            name: "NVIDIA Example".to_owned(),
            uuid: "00112233-4455-6677-8899-aabbccddeeff".to_owned(),
            bus: "00000000:01:00.0".to_owned(),
            architecture: Architecture { major, minor },
            multiprocessors: 82,
            memory_bytes: Bytes::gib(24),
        }
    }

    fn unseen() -> State {
        State { memory: None, processes: Vec::new(), pcie: None, condition: Condition::default() }
    }

    #[test]
    fn what_would_be_taken_of_a_gpu_is_of_what_others_leave() {
        let memory = Memory {
            total_bytes: Bytes::gib(24),
            used_bytes: Bytes::gib(3),
            reserved_bytes: Bytes::gib(1),
            free_bytes: Bytes::gib(20),
        };
        let held = found(&card(8, 6), State { memory: Some(memory), ..unseen() }, None);
        assert_eq!((held.name.as_str(), held.kind, held.cores), ("cuda:1", DeviceKind::Cuda, 82));
        assert_eq!(held.takes.budget_bytes, Bytes::gib(18));
        assert_eq!(held.takes.why, "90% of the 20.00 GiB that are free (NVML)");
        assert_eq!(held.gpu.unwrap().held_bytes, Some(Bytes::gib(3)));
        let without = found(&card(8, 6), unseen(), None);
        assert_eq!(without.memory_free_bytes, Bytes::gib(24));
        assert!(without.takes.why.contains("assumed: without NVML"), "{}", without.takes.why);
    }

    #[test]
    fn a_gpu_too_old_is_listed_and_not_used() {
        let old = found(&card(7, 5), unseen(), None);
        assert!(old.takes.why.starts_with("not used: Turing (7.5) is too old"), "{}", old.takes.why);
        assert_eq!(old.gpu.unwrap().family, "Turing");
    }

    #[test]
    fn cards_on_the_bus_are_counted_by_maker_and_class() {
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
