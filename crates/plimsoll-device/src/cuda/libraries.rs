//! NVIDIA's libraries: where they lie on this machine, which of them go with the driver, and the one command that
//! brings what is missing. Nothing here knows what the libraries do.
//!
//! They are looked for where people have them: named by the loader's variable, in the virtual or conda environment
//! that torch brought them into, in the toolkit, in the user's and the system's Python, in the system's folders. Nothing
//! is opened here.

use plimsoll_core::Failure;
use serde::Serialize;
use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// The oldest major version of CUDA whose libraries are used.
const OLDEST_CUDA: u32 = 12;

/// A library that Plimsoll uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Library {
    /// `libcuda`: the driver.
    Driver,
    /// `libnvidia-ml`: what the driver says about GPUs; comes with it.
    Nvml,
    /// `libnvrtc`: the compiler of kernels.
    Nvrtc,
    /// `libcublasLt`: matrix products.
    CublasLt,
    /// `libnccl`: what several GPUs exchange by.
    Nccl,
}

impl Library {
    /// All of them.
    pub const ALL: [Library; 5] = [Library::Driver, Library::Nvml, Library::Nvrtc, Library::CublasLt, Library::Nccl];

    /// The file's name up to `.so`.
    fn stem(self) -> &'static str {
        match self {
            Library::Driver => "libcuda",
            Library::Nvml => "libnvidia-ml",
            Library::Nvrtc => "libnvrtc",
            Library::CublasLt => "libcublasLt",
            Library::Nccl => "libnccl",
        }
    }

    /// Its wheel on PyPI, in the form in which folders of installed wheels are named, without the version of CUDA.
    fn wheel(self) -> Option<&'static str> {
        match self {
            Library::Driver | Library::Nvml => None,
            Library::Nvrtc => Some("nvidia_cuda_nvrtc"),
            Library::CublasLt => Some("nvidia_cublas"),
            Library::Nccl => Some("nvidia_nccl"),
        }
    }

    /// Whether its major version is that of CUDA, so that the driver has to know it.
    fn is_of_toolkit(self) -> bool {
        matches!(self, Library::Nvrtc | Library::CublasLt)
    }

    /// Whether nothing runs on a GPU without it.
    pub fn is_needed(self) -> bool {
        matches!(self, Library::Driver | Library::Nvrtc | Library::CublasLt)
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Library::Driver => "NVIDIA driver",
            Library::Nvml => "NVML",
            Library::Nvrtc => "NVRTC",
            Library::CublasLt => "cuBLASLt",
            Library::Nccl => "NCCL",
        })
    }
}

/// A library that is here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Found {
    /// Which.
    pub library: Library,
    /// Where.
    pub path: PathBuf,
    /// Its version as far as its file's name, its neighbours or its wheel say it: `13.2`, `12.4.127`.
    pub version: String,
    /// What kind of place that is: `virtual environment`, `toolkit`.
    pub place: &'static str,
}

impl Found {
    /// The first number of its version; 0 where that is not known.
    pub fn major(&self) -> u32 {
        self.version.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0)
    }
}

/// Why a library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// It is in no place that was looked at.
    #[error("{library} was not found: no {}.so in {} folders ({searched})", library.stem(), folders)]
    Missing {
        /// Which.
        library: Library,
        /// How many folders were looked into.
        folders: usize,
        /// The kinds of places, in order.
        searched: String,
        /// The one command that brings it.
        cure: String,
    },
    /// It is of a CUDA that the driver does not know.
    #[error("{library} {version} ({}) is of CUDA {major}, but the driver knows CUDA up to {driver}", path.display())]
    TooNew {
        /// Which.
        library: Library,
        /// Its version.
        version: String,
        /// The major version of its CUDA.
        major: u32,
        /// Where it is.
        path: PathBuf,
        /// The newest CUDA of the driver.
        driver: CudaVersion,
        /// The one command that brings another.
        cure: String,
    },
    /// It is of a CUDA that is no longer used.
    #[error("{library} {version} ({}) is too old: CUDA {OLDEST_CUDA} is the oldest that is used", path.display())]
    TooOld {
        /// Which.
        library: Library,
        /// Its version.
        version: String,
        /// Where it is.
        path: PathBuf,
        /// The one command that brings another.
        cure: String,
    },
    /// The driver is here, and does not work.
    #[error("the NVIDIA driver ({}) refuses to start: {reason}", path.display())]
    DriverRefuses {
        /// The file.
        path: PathBuf,
        /// What it said.
        reason: String,
    },
}

impl LibraryError {
    /// What to do about it.
    pub fn cure(&self) -> String {
        match self {
            LibraryError::Missing { cure, .. }
            | LibraryError::TooNew { cure, .. }
            | LibraryError::TooOld { cure, .. } => cure.clone(),
            LibraryError::DriverRefuses { .. } => {
                "nvidia-smi should list the GPUs; after an update of the driver, restart the machine".to_owned()
            }
        }
    }
}

impl From<LibraryError> for Failure {
    fn from(error: LibraryError) -> Failure {
        let cure = error.cure();
        Failure::input(error.to_string()).hint(cure).hint("plimsoll devices says what was found where")
    }
}

/// A version of CUDA, as drivers and compilers number it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct CudaVersion {
    /// 12 of 12.4.
    pub major: u32,
    /// 4 of 12.4.
    pub minor: u32,
}

impl CudaVersion {
    /// From `1000 × major + 10 × minor`, the driver's way to say it.
    pub fn of_driver(number: i32) -> CudaVersion {
        let number = u32::try_from(number).unwrap_or(0);
        CudaVersion { major: number / 1000, minor: number % 1000 / 10 }
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What the search depends on, so that tests can lay out machines of their own.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// What stands for `/`.
    root: PathBuf,
    /// The environment's variables.
    variables: BTreeMap<String, OsString>,
    /// The folder in which Plimsoll was started.
    folder: PathBuf,
}

/// A kind of place and its folders.
type Places = Vec<(&'static str, Vec<PathBuf>)>;

impl Surroundings {
    /// This machine and this process.
    pub fn here() -> Surroundings {
        let variables = env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value))).collect();
        Surroundings { root: "/".into(), variables, folder: env::current_dir().unwrap_or_default() }
    }

    /// A machine laid out in a folder, with no variables.
    #[cfg(test)]
    pub(crate) fn of(root: &Path) -> Surroundings {
        Surroundings { root: root.to_path_buf(), variables: BTreeMap::new(), folder: root.join("work") }
    }

    fn variable(&self, name: &str) -> Option<&OsStr> {
        self.variables.get(name).map(OsString::as_os_str).filter(|value| !value.is_empty())
    }

    fn path_of(&self, name: &str) -> Option<PathBuf> {
        self.variable(name).map(PathBuf::from).filter(|path| path.is_absolute())
    }

    fn paths_of(&self, name: &str) -> Vec<PathBuf> {
        env::split_paths(self.variable(name).unwrap_or_default()).filter(|path| path.is_absolute()).collect()
    }

    /// Where to look, in order of preference: what the user points at, then what is around him, then the system.
    fn places(&self) -> Places {
        let under_root = |folders: &[&str]| folders.iter().map(|folder| self.root.join(folder)).collect::<Vec<_>>();
        let mut active = Vec::new();
        active.extend(self.path_of("VIRTUAL_ENV"));
        active.push(self.folder.join(".venv"));
        active.extend(self.python());
        let conda = self.path_of("CONDA_PREFIX");
        let mut toolkits: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|n| self.path_of(n)).collect();
        toolkits.extend(under_root(&["usr/local/cuda"]));
        toolkits.extend(newest_first(&self.root.join("usr/local"), "cuda-"));
        toolkits.extend(under_root(&["opt/cuda"]));
        let mut system = under_root(&SYSTEM);
        system.extend(self.loader_folders());
        let home = self.path_of("HOME").map(|home| home.join(".local"));
        let site = [self.root.join("usr/local"), self.root.join("usr")];
        vec![
            ("LD_LIBRARY_PATH", self.paths_of("LD_LIBRARY_PATH")),
            ("virtual environment", active.iter().flat_map(|prefix| wheels(prefix)).collect()),
            ("conda", conda.iter().flat_map(|prefix| [wheels(prefix), libraries_of(prefix)].concat()).collect()),
            ("toolkit", toolkits.iter().flat_map(|prefix| libraries_of(prefix)).collect()),
            ("user's Python", home.iter().flat_map(|prefix| wheels(prefix)).collect()),
            ("system", system),
            ("system's Python", site.iter().flat_map(|prefix| wheels(prefix)).collect()),
        ]
    }

    /// The prefix of the Python that would run: that of the first `python3` or `python` on the path. Python itself is
    /// not started.
    fn python(&self) -> Option<PathBuf> {
        let folders = self.paths_of("PATH");
        let first = folders.iter().find_map(|folder| {
            ["python3", "python"].iter().map(|name| folder.join(name)).find(|python| python.exists())
        })?;
        let prefix = |python: &Path| python.parent().and_then(Path::parent).map(Path::to_path_buf);
        // In a virtual environment the interpreter is a link to another; its folder is what counts.
        prefix(&first)
            .filter(|prefix| prefix.join("pyvenv.cfg").exists())
            .or_else(|| prefix(&fs::canonicalize(&first).ok()?))
    }

    /// The folders that the dynamic loader has been told of, beside its own.
    fn loader_folders(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = entries(&self.root.join("etc/ld.so.conf.d"));
        files.retain(|file| file.extension().is_some_and(|extension| extension == "conf"));
        let lines = |file: PathBuf| {
            let text = fs::read_to_string(file).unwrap_or_default();
            let named =
                text.lines().map(str::trim).filter_map(|line| line.strip_prefix('/')).map(|l| self.root.join(l));
            named.collect::<Vec<_>>()
        };
        files.into_iter().flat_map(lines).collect()
    }

    /// The command that brings a library that is missing or of the wrong version. `driver` is what the driver knows.
    fn cure(&self, library: Library, driver: Option<CudaVersion>) -> String {
        if library.is_of_toolkit() || library == Library::Nccl {
            // The plain names are those of the newest CUDA; what an older driver needs has its version in the name.
            let suffix = match driver {
                Some(CudaVersion { major: 12, .. }) => "-cu12",
                _ => "",
            };
            return match library {
                Library::Nccl => format!("pip install nvidia-nccl-cu{}", driver.map_or(13, |driver| driver.major)),
                _ => format!("pip install nvidia-cuda-nvrtc{suffix} nvidia-cublas{suffix}"),
            };
        }
        if self.is_wsl() {
            return "install NVIDIA's driver on Windows (https://www.nvidia.com/drivers), then: wsl --shutdown"
                .to_owned();
        }
        if ["run/.containerenv", ".dockerenv"].iter().any(|mark| self.root.join(mark).exists()) {
            return "start the container with its GPUs: docker run --gpus all".to_owned();
        }
        let release = fs::read_to_string(self.root.join("etc/os-release")).unwrap_or_default();
        let value = |key: &str| release.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
        let names = format!("{} {}", value("ID="), value("ID_LIKE=")).replace('"', "");
        let of = |name: &str| names.split_whitespace().any(|word| word == name);
        if of("ubuntu") {
            "sudo ubuntu-drivers install".to_owned()
        } else if of("debian") {
            "sudo apt install nvidia-driver".to_owned()
        } else if of("fedora") || of("rhel") {
            "sudo dnf install akmod-nvidia xorg-x11-drv-nvidia-cuda".to_owned()
        } else if of("arch") {
            "sudo pacman -S nvidia-open nvidia-utils".to_owned()
        } else if of("suse") || of("opensuse") {
            "sudo zypper install nvidia-open-driver-G06-signed-kmp-meta nvidia-compute-utils-G06".to_owned()
        } else {
            "install NVIDIA's driver from your distribution, or from https://www.nvidia.com/drivers".to_owned()
        }
    }

    /// Whether this is Linux under Windows, where the driver is Windows' own.
    fn is_wsl(&self) -> bool {
        let release = fs::read_to_string(self.root.join("proc/sys/kernel/osrelease")).unwrap_or_default();
        release.to_lowercase().contains("microsoft")
    }
}

/// Where distributions, containers and WSL keep libraries.
const SYSTEM: [&str; 10] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/lib",
    "usr/lib/wsl/lib",
    "usr/local/nvidia/lib64",
    "usr/local/nvidia/lib",
    "run/opengl-driver/lib",
    // Stands in for a driver that is older than the toolkit, and is refused by one that is newer.
    "usr/local/cuda/compat",
];

/// A folder's entries in order of their names; none where it cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    found.sort();
    found
}

fn name_of(path: &Path) -> &str {
    path.file_name().and_then(OsStr::to_str).unwrap_or_default()
}

/// The numbers of a version, to be compared.
fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|part| part.parse().ok()).collect()
}

/// Entries that start with `prefix` and a version, the newest first.
fn newest_first(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let mut found = entries(folder);
    found.retain(|path| name_of(path).starts_with(prefix));
    found.sort_by_key(|path| std::cmp::Reverse(numbers(&name_of(path)[prefix.len()..])));
    found
}

/// The folders of libraries below a prefix: a toolkit's, a conda environment's.
fn libraries_of(prefix: &Path) -> Vec<PathBuf> {
    let target = format!("targets/{}-linux/lib", std::env::consts::ARCH);
    ["lib64", "lib", &target].iter().map(|folder| prefix.join(folder)).collect()
}

/// The folders of libraries of NVIDIA's wheels in the Python environment at a prefix: `nvidia/cublas/lib` of CUDA 12,
/// `nvidia/cu13/lib` from CUDA 13 on.
fn wheels(prefix: &Path) -> Vec<PathBuf> {
    let mut sites = Vec::new();
    for lib in ["lib", "lib64"] {
        for python in newest_first(&prefix.join(lib), "python3") {
            sites.extend(["site-packages", "dist-packages"].map(|site| python.join(site)));
        }
    }
    sites.iter().flat_map(|site| entries(&site.join("nvidia"))).map(|package| package.join("lib")).collect()
}

/// The file of a library in a folder, for each major version that is there, the newest first.
fn files_in(folder: &Path, library: Library) -> Vec<(PathBuf, String)> {
    let prefix = format!("{}.so", library.stem());
    let mut by_major: BTreeMap<Option<u32>, (PathBuf, String)> = BTreeMap::new();
    for path in entries(folder) {
        let Some(after) = name_of(&path).strip_prefix(&prefix) else { continue };
        if !(after.is_empty() || after.starts_with('.')) || !path.exists() {
            continue;
        }
        let version = version_of(&path, library);
        let major = numbers(&version).first().copied();
        // Of `.so`, `.so.12` and `.so.12.4.127` the second is what a program is linked to.
        let rank = |path: &Path| match name_of(path)[prefix.len()..].matches('.').count() {
            1 => 0,
            0 => 1,
            parts => parts,
        };
        let better = by_major.get(&major).is_none_or(|(known, _)| rank(&path) < rank(known));
        if better {
            by_major.insert(major, (path, version));
        }
    }
    by_major.into_values().rev().collect()
}

/// What is known of a library's version without opening it: the longest of what its file is called once links are
/// followed, what its neighbours are called, and its wheel.
fn version_of(path: &Path, library: Library) -> String {
    let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let behind = |path: &Path| name_of(path).split_once(".so.").map_or("", |(_, version)| version).to_owned();
    let mut versions = vec![behind(path), behind(&real)];
    let folder = path.parent().unwrap_or(Path::new(""));
    if library == Library::Nvrtc {
        let builtins = entries(folder).into_iter().find(|path| name_of(path).starts_with("libnvrtc-builtins.so."));
        versions.extend(builtins.as_deref().map(behind));
    }
    // site-packages/nvidia/PACKAGE/lib/FILE: the wheels' records lie beside `nvidia`.
    if let (Some(wheel), Some(site)) = (library.wheel(), folder.ancestors().nth(3))
        && folder.ancestors().nth(2).is_some_and(|nvidia| name_of(nvidia) == "nvidia")
    {
        let record = |path: &PathBuf| {
            let (package, version) = name_of(path).strip_suffix(".dist-info")?.split_once('-')?;
            let cuda = package.strip_prefix(wheel)?;
            (cuda.is_empty() || cuda.starts_with("_cu")).then(|| version.to_owned())
        };
        versions.extend(entries(site).iter().filter_map(record));
    }
    let major = versions.iter().find_map(|version| numbers(version).first().copied());
    versions.retain(|version| !version.is_empty() && numbers(version).first().copied() == major);
    versions.into_iter().max_by_key(|version| numbers(version).len()).unwrap_or_default()
}

/// The libraries of NVIDIA on this machine: every one that was found, in order of preference.
#[derive(Clone, Debug)]
pub struct Libraries {
    found: Vec<Found>,
    folders: usize,
    searched: String,
    surroundings: Surroundings,
}

impl Libraries {
    /// Looks for them. Reads folders, opens nothing.
    pub fn find() -> Libraries {
        Libraries::find_in(Surroundings::here())
    }

    pub(crate) fn find_in(surroundings: Surroundings) -> Libraries {
        let places = surroundings.places();
        let mut found: Vec<Found> = Vec::new();
        for (place, folders) in &places {
            for folder in folders.iter().filter(|folder| folder.is_dir()) {
                for library in Library::ALL {
                    let new = files_in(folder, library).into_iter();
                    found.extend(new.map(|(path, version)| Found { library, path, version, place }));
                }
            }
        }
        let some = places.iter().filter(|(_, folders)| !folders.is_empty());
        let searched = some.map(|(place, _)| *place).collect::<Vec<_>>().join(", ");
        let folders = places.iter().map(|(_, folders)| folders.len()).sum();
        Libraries { found, folders, searched, surroundings }
    }

    /// All of a kind, in order of preference.
    pub fn of_kind(&self, library: Library) -> impl Iterator<Item = &Found> {
        self.found.iter().filter(move |found| found.library == library)
    }

    /// The one to use with a driver that knows CUDA up to `driver`: the first in order of preference that goes with
    /// it. Where the driver is not known, the first.
    ///
    /// # Errors
    /// None is here, or none goes with the driver.
    pub fn choose(&self, library: Library, driver: Option<CudaVersion>) -> Result<&Found, LibraryError> {
        let goes = |found: &&Found| {
            !library.is_of_toolkit()
                || found.major() >= OLDEST_CUDA && driver.is_none_or(|driver| found.major() <= driver.major)
        };
        if let Some(found) = self.of_kind(library).find(goes) {
            return Ok(found);
        }
        let cure = self.surroundings.cure(library, driver);
        let Some(found) = self.of_kind(library).next() else {
            let (folders, searched) = (self.folders, self.searched.clone());
            return Err(LibraryError::Missing { library, folders, searched, cure });
        };
        let Found { version, path, .. } = found.clone();
        Err(match driver {
            Some(driver) if found.major() > driver.major => {
                let cure = format!("{cure}, or bring the driver up to date");
                LibraryError::TooNew { library, version, major: found.major(), path, driver, cure }
            }
            _ => LibraryError::TooOld { library, version, path, cure },
        })
    }
}

/// The compiler's second half, which it asks for by name when something is compiled: opened before, it is found
/// whatever folder it lies in.
pub(super) fn builtins_of(nvrtc: &Path) -> Option<PathBuf> {
    let major = numbers(&version_of(nvrtc, Library::Nvrtc)).first().copied();
    let of_this = |path: &PathBuf| {
        let version = name_of(path).strip_prefix("libnvrtc-builtins.so.").map(numbers);
        version.is_some_and(|version| version.first().copied() == major)
    };
    entries(nvrtc.parent()?).into_iter().find(of_this)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A machine of its own in a folder.
    struct Machine {
        root: tempfile::TempDir,
        variables: BTreeMap<String, OsString>,
    }

    impl Machine {
        fn new() -> Machine {
            Machine { root: tempfile::tempdir().unwrap(), variables: BTreeMap::new() }
        }

        fn at(&self, path: &str) -> PathBuf {
            self.root.path().join(path)
        }

        fn file(&self, path: &str, text: &str) -> &Machine {
            let path = self.at(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            self
        }

        fn set(&mut self, name: &str, path: &str) {
            let value = self.at(path).into_os_string();
            self.variables.insert(name.to_owned(), value);
        }

        fn find(&self) -> Libraries {
            let (root, folder) = (self.root.path().to_path_buf(), self.at("work"));
            Libraries::find_in(Surroundings { root, variables: self.variables.clone(), folder })
        }

        fn chosen(&self, library: Library, driver: Option<(u32, u32)>) -> (String, String, &'static str) {
            let driver = driver.map(|(major, minor)| CudaVersion { major, minor });
            let found = self.find().choose(library, driver).unwrap().clone();
            let path = found.path.strip_prefix(self.root.path()).unwrap().display().to_string();
            (path, found.version, found.place)
        }
    }

    #[test]
    fn wheels_of_both_layouts_are_found_in_the_virtual_environment() {
        let mut machine = Machine::new();
        let site = "venv/lib/python3.11/site-packages";
        for file in [
            "nvidia/cu13/lib/libnvrtc.so.13",
            "nvidia/cu13/lib/libnvrtc-builtins.so.13.2",
            "nvidia/cu13/lib/libnvrtc.alt.so.13",
            "nvidia/cu13/lib/libcublasLt.so.13",
            "nvidia/nccl/lib/libnccl.so.2",
            "nvidia_cublas-13.1.0.3.dist-info/METADATA",
            "nvidia_cublas_other-9.9.9.9.9.dist-info/METADATA",
            "nvidia_nccl_cu13-2.28.9.dist-info/METADATA",
        ] {
            machine.file(&format!("{site}/{file}"), "");
        }
        machine.file("old/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "");
        machine.file("old/lib/python3.12/site-packages/nvidia/cublas/lib/libcublasLt.so.12", "");
        machine.set("VIRTUAL_ENV", "venv");
        let of = |library| machine.chosen(library, None);
        let nvrtc = format!("{site}/nvidia/cu13/lib/libnvrtc.so.13");
        assert_eq!(of(Library::Nvrtc), (nvrtc, "13.2".into(), "virtual environment"));
        assert_eq!(of(Library::CublasLt).1, "13.1.0.3");
        assert_eq!(of(Library::Nccl).1, "2.28.9");
        machine.set("VIRTUAL_ENV", "old");
        assert!(machine.chosen(Library::Nvrtc, None).0.ends_with("cuda_nvrtc/lib/libnvrtc.so.12"));
        assert!(machine.chosen(Library::CublasLt, None).0.ends_with("cublas/lib/libcublasLt.so.12"));
    }

    #[test]
    fn the_python_on_the_path_leads_to_its_environment() {
        // As `python -m venv` makes it: a link to an interpreter elsewhere, and a pyvenv.cfg above.
        let mut machine = Machine::new();
        machine.file("opt/python/bin/python3.11", "").file("env/pyvenv.cfg", "");
        fs::create_dir_all(machine.at("env/bin")).unwrap();
        symlink(machine.at("opt/python/bin/python3.11"), machine.at("env/bin/python3")).unwrap();
        machine.file("env/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13", "");
        machine.file("opt/python/lib/python3.11/site-packages/nvidia/cu13/lib/libcublasLt.so.13", "");
        machine.set("PATH", "env/bin");
        assert!(machine.chosen(Library::Nvrtc, None).0.starts_with("env/"));
        // Without one, the interpreter's own prefix counts.
        fs::create_dir_all(machine.at("usr/bin")).unwrap();
        symlink(machine.at("opt/python/bin/python3.11"), machine.at("usr/bin/python3")).unwrap();
        machine.set("PATH", "usr/bin");
        assert!(machine.chosen(Library::CublasLt, None).0.starts_with("opt/python/"));
        // And an environment beside the work is found without any.
        machine.file("work/.venv/lib/python3.13/site-packages/nvidia/nccl/lib/libnccl.so.2", "");
        assert!(machine.chosen(Library::Nccl, None).0.starts_with("work/.venv/"));
    }

    #[test]
    fn the_loaders_variable_comes_first_then_environments_conda_toolkits_and_the_system() {
        let mut machine = Machine::new();
        let places = [
            ("LD_LIBRARY_PATH", "mine/libnvrtc.so.12"),
            ("virtual environment", "work/.venv/lib/python3.10/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
            ("conda", "conda/lib/libnvrtc.so.12"),
            ("toolkit", "usr/local/cuda-12.6/lib64/libnvrtc.so.12"),
            ("user's Python", "home/.local/lib/python3.9/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
            ("system", "usr/lib/x86_64-linux-gnu/libnvrtc.so.12"),
            ("system's Python", "usr/local/lib/python3.11/dist-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
        ];
        for (_, path) in places {
            machine.file(path, "");
        }
        machine.set("LD_LIBRARY_PATH", "mine");
        machine.set("CONDA_PREFIX", "conda");
        machine.set("HOME", "home");
        for (place, path) in places {
            assert_eq!(machine.chosen(Library::Nvrtc, None), (path.to_owned(), "12".to_owned(), place));
            fs::remove_file(machine.at(path)).unwrap();
        }
        let error = machine.find().choose(Library::Nvrtc, None).unwrap_err();
        let LibraryError::Missing { searched, cure, .. } = &error else { panic!("{error:?}") };
        assert_eq!(cure, "pip install nvidia-cuda-nvrtc nvidia-cublas");
        assert!(searched.starts_with("LD_LIBRARY_PATH, virtual environment, conda, toolkit"), "{searched}");
        assert!(error.to_string().starts_with("NVRTC was not found: no libnvrtc.so in "), "{error}");
        let failure = Failure::from(error);
        assert_eq!(failure.exit as i32, 2);
    }

    #[test]
    fn the_newest_toolkit_and_the_full_version_behind_a_link_are_taken() {
        let machine = Machine::new();
        for version in ["12.9.86", "12.10.5"] {
            let folder = format!("usr/local/cuda-{}/lib64", version.rsplit_once('.').unwrap().0);
            machine.file(&format!("{folder}/libcublasLt.so.{version}"), "");
            symlink(format!("libcublasLt.so.{version}"), machine.at(&format!("{folder}/libcublasLt.so.12"))).unwrap();
            symlink("libcublasLt.so.12", machine.at(&format!("{folder}/libcublasLt.so"))).unwrap();
        }
        let (path, version, _) = machine.chosen(Library::CublasLt, None);
        assert_eq!((path.as_str(), version.as_str()), ("usr/local/cuda-12.10/lib64/libcublasLt.so.12", "12.10.5"));
    }

    #[test]
    fn libraries_newer_than_the_driver_are_passed_over_and_named_where_there_is_no_other() {
        let mut machine = Machine::new();
        machine.set("LD_LIBRARY_PATH", "mine");
        machine.file("mine/libnvrtc.so.13", "").file("usr/local/cuda/lib64/libnvrtc.so.12", "");
        assert_eq!(machine.chosen(Library::Nvrtc, Some((13, 0))).1, "13");
        assert_eq!(machine.chosen(Library::Nvrtc, Some((12, 4))).1, "12");
        fs::remove_file(machine.at("usr/local/cuda/lib64/libnvrtc.so.12")).unwrap();
        let error = machine.find().choose(Library::Nvrtc, Some(CudaVersion { major: 12, minor: 4 })).unwrap_err();
        assert!(error.to_string().ends_with("is of CUDA 13, but the driver knows CUDA up to 12.4"), "{error}");
        assert_eq!(
            error.cure(),
            "pip install nvidia-cuda-nvrtc-cu12 nvidia-cublas-cu12, or bring the driver up to date"
        );
        fs::rename(machine.at("mine/libnvrtc.so.13"), machine.at("mine/libnvrtc.so.11.2")).unwrap();
        let error = machine.find().choose(Library::Nvrtc, Some(CudaVersion { major: 12, minor: 4 })).unwrap_err();
        assert!(error.to_string().ends_with("is too old: CUDA 12 is the oldest that is used"), "{error}");
    }

    #[test]
    fn the_driver_is_found_in_distributions_wsl_and_containers_and_its_cure_is_theirs() {
        let machine = Machine::new();
        let cure = || machine.find().choose(Library::Driver, None).unwrap_err().cure();
        assert!(cure().contains("https://www.nvidia.com/drivers"));
        machine.file("etc/os-release", "NAME=\"Pop\"\nID=pop\nID_LIKE=\"ubuntu debian\"\n");
        assert_eq!(cure(), "sudo ubuntu-drivers install");
        machine.file(".dockerenv", "");
        assert!(cure().ends_with("docker run --gpus all"));
        machine.file("proc/sys/kernel/osrelease", "5.15.167.4-microsoft-standard-WSL2\n");
        assert!(cure().ends_with("wsl --shutdown"));
        machine.file("usr/lib/wsl/lib/libcuda.so.1", "");
        assert_eq!(machine.chosen(Library::Driver, None).0, "usr/lib/wsl/lib/libcuda.so.1");
        machine.file("etc/ld.so.conf.d/mine.conf", "# mine\n/odd/place\n").file("odd/place/libnvidia-ml.so.1", "");
        assert_eq!(machine.chosen(Library::Nvml, None).0, "odd/place/libnvidia-ml.so.1");
    }

    #[test]
    fn versions_of_cuda_are_read_as_the_driver_numbers_them() {
        assert_eq!(CudaVersion::of_driver(12040).to_string(), "12.4");
        assert_eq!(CudaVersion::of_driver(13020).to_string(), "13.2");
    }
}
