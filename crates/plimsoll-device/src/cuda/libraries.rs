//! Discovery of NVIDIA's libraries: their files on this machine, the versions compatible with the driver, and the
//! command that installs a missing one. Nothing here loads a library or knows its functions.
//!
//! Search order: the loader path, the active virtual or conda environment (torch installs the libraries there),
//! toolkits, the user's Python, system folders, the system's Python.

use crate::error::DeviceError;
use crate::probe::is_wsl;
use plimsoll_core::Failure;
use serde::Serialize;
use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// The oldest CUDA major version that is supported.
const CUDA_MAJOR_MIN: u32 = 12;

/// A library of NVIDIA that Plimsoll uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Library {
    /// `libcuda`: the driver.
    Driver,
    /// `libnvidia-ml`: GPU status; part of the driver.
    Nvml,
    /// `libnvrtc`: the run-time compiler of kernels.
    Nvrtc,
    /// `libcublasLt`: matrix products.
    CublasLt,
    /// `libnccl`: collectives between GPUs.
    Nccl,
}

impl Library {
    /// Every library.
    pub const ALL: [Library; 5] = [Library::Driver, Library::Nvml, Library::Nvrtc, Library::CublasLt, Library::Nccl];

    /// Returns the library's file name without `.so` and what follows: `libcuda`.
    fn stem(self) -> &'static str {
        match self {
            Library::Driver => "libcuda",
            Library::Nvml => "libnvidia-ml",
            Library::Nvrtc => "libnvrtc",
            Library::CublasLt => "libcublasLt",
            Library::Nccl => "libnccl",
        }
    }

    /// Returns the name of the library's packages on PyPI without a CUDA version: `nvidia_cublas` for
    /// `nvidia_cublas_cu12`. It is spelled as in the folders of installed wheels. `None` for libraries of the driver.
    fn pypi_package_prefix(self) -> Option<&'static str> {
        match self {
            Library::Driver | Library::Nvml => None,
            Library::Nvrtc => Some("nvidia_cuda_nvrtc"),
            Library::CublasLt => Some("nvidia_cublas"),
            Library::Nccl => Some("nvidia_nccl"),
        }
    }

    /// Returns whether the library belongs to the CUDA toolkit. Its major version is then a CUDA version, which the
    /// driver must support.
    fn belongs_to_toolkit(self) -> bool {
        matches!(self, Library::Nvrtc | Library::CublasLt)
    }

    /// Returns whether GPUs are unusable without the library.
    pub fn is_required(self) -> bool {
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

/// A library file on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FoundLibrary {
    /// The library.
    pub library: Library,
    /// Path of the file.
    pub path: PathBuf,
    /// Version, as far as the file's name, neighbouring files or the Python wheel state it: `13.2`, `12.4.127`. Empty
    /// if none of them does.
    pub version: String,
    /// Kind of place where the file was found, such as `virtual environment` or `toolkit`.
    pub place: &'static str,
}

impl FoundLibrary {
    /// Returns the library's major version; 0 if unknown.
    pub fn major(&self) -> u32 {
        self.version.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0)
    }
}

/// A reason why a library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// The library is in none of the searched places.
    #[error("{library} was not found: no {}.so in {} folders ({searched})", library.stem(), folders)]
    Missing {
        /// The library.
        library: Library,
        /// Number of searched folders.
        folders: usize,
        /// The kinds of places that were searched, in order, such as `LD_LIBRARY_PATH, virtual environment`.
        searched: String,
        /// Command or instruction that installs the library.
        remedy: String,
    },
    /// The library needs a newer CUDA than the driver supports.
    #[error("{library} {version} ({}) is of CUDA {major}, but the driver knows CUDA up to {driver}", path.display())]
    TooNew {
        /// The library.
        library: Library,
        /// Version of the library.
        version: String,
        /// CUDA major version that the library needs.
        major: u32,
        /// Path of the library's file.
        path: PathBuf,
        /// The newest CUDA version that the driver supports.
        driver: CudaVersion,
        /// Command that installs a compatible version, or the advice to update the driver.
        remedy: String,
    },
    /// The library's CUDA version is no longer supported.
    #[error("{library} {version} ({}) is too old: CUDA {CUDA_MAJOR_MIN} is the oldest that is used", path.display())]
    TooOld {
        /// The library.
        library: Library,
        /// Version of the library.
        version: String,
        /// Path of the library's file.
        path: PathBuf,
        /// Command that installs a supported version.
        remedy: String,
    },
    /// The driver is installed, but does not start.
    #[error("the NVIDIA driver ({}) refuses to start: {reason}", path.display())]
    DriverRefuses {
        /// Path of the driver's file.
        path: PathBuf,
        /// Reason that the driver or the loader gives.
        reason: String,
        /// The driver's error code (`CUresult`); `None` if the driver was not called.
        code: Option<u32>,
    },
}

impl LibraryError {
    /// Returns a command or instruction that solves the problem.
    pub fn remedy(&self) -> String {
        match self {
            LibraryError::Missing { remedy, .. }
            | LibraryError::TooNew { remedy, .. }
            | LibraryError::TooOld { remedy, .. } => remedy.clone(),
            LibraryError::DriverRefuses { code, .. } => start_remedy(*code).to_owned(),
        }
    }
}

/// Returns the instruction that lets a driver start, from the error code (`CUresult`) with which it does not.
fn start_remedy(code: Option<u32>) -> &'static str {
    match code {
        // The stub of the toolkit, or no GPU.
        Some(34 | 100) => "unset CUDA_VISIBLE_DEVICES; in a container: docker run --gpus all",
        Some(802) => "sudo systemctl start nvidia-fabricmanager",
        // The library belongs to another kernel module, or to other GPUs.
        Some(803 | 804) => "after a driver update, restart the machine; in a container, use an image for this driver",
        _ => "check that nvidia-smi lists the GPUs; after a driver update, restart the machine",
    }
}

impl From<LibraryError> for DeviceError {
    fn from(error: LibraryError) -> DeviceError {
        DeviceError::CudaSoftware { failure: Box::new(error.into()) }
    }
}

impl From<LibraryError> for Failure {
    fn from(error: LibraryError) -> Failure {
        let remedy = error.remedy();
        Failure::input(error.to_string())
            .hint(remedy)
            .hint("run `plimsoll devices` to see which libraries were found, and where")
    }
}

/// A CUDA version, as drivers and compilers number it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct CudaVersion {
    /// Major version: 12 of 12.4.
    pub major: u32,
    /// Minor version: 4 of 12.4.
    pub minor: u32,
}

impl CudaVersion {
    /// Decodes the driver's number, `1000 × major + 10 × minor`.
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

/// The surroundings in which libraries are searched: root folder, environment variables and working folder.
#[derive(Clone, Debug)]
pub struct SearchEnvironment {
    /// Root folder; `/` outside of tests.
    root: PathBuf,
    /// Environment variables.
    variables: BTreeMap<String, OsString>,
    /// Working folder of the process.
    folder: PathBuf,
}

/// Kinds of places to search, such as `toolkit`, with the folders of each, in search order.
type SearchPlaces = Vec<(&'static str, Vec<PathBuf>)>;

impl SearchEnvironment {
    /// Returns the environment of this process.
    pub fn current() -> SearchEnvironment {
        let variables = env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value))).collect();
        SearchEnvironment { root: "/".into(), variables, folder: env::current_dir().unwrap_or_default() }
    }

    /// Returns an environment with `root` as its root folder and without variables.
    #[cfg(test)]
    pub(crate) fn rooted_at(root: &Path) -> SearchEnvironment {
        SearchEnvironment { root: root.to_path_buf(), variables: BTreeMap::new(), folder: root.join("work") }
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

    /// Returns the places to search, in order of preference: `LD_LIBRARY_PATH`, virtual environments, conda, toolkits,
    /// the user's Python, system folders, the system's Python.
    fn search_places(&self) -> SearchPlaces {
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
        let mut system = under_root(&SYSTEM_FOLDERS);
        system.extend(self.loader_folders());
        let home = self.path_of("HOME").map(|home| home.join(".local"));
        let site = [self.root.join("usr/local"), self.root.join("usr")];
        vec![
            ("LD_LIBRARY_PATH", self.paths_of("LD_LIBRARY_PATH")),
            ("virtual environment", active.iter().flat_map(|prefix| wheel_library_folders(prefix)).collect()),
            (
                "conda",
                conda
                    .iter()
                    .flat_map(|prefix| [wheel_library_folders(prefix), libraries_of(prefix)].concat())
                    .collect(),
            ),
            ("toolkit", toolkits.iter().flat_map(|prefix| libraries_of(prefix)).collect()),
            ("user's Python", home.iter().flat_map(|prefix| wheel_library_folders(prefix)).collect()),
            ("system", system),
            ("system's Python", site.iter().flat_map(|prefix| wheel_library_folders(prefix)).collect()),
        ]
    }

    /// Returns the installation folder (prefix) of the first `python3` or `python` on `PATH`; `None` if there is none.
    /// Does not start Python.
    fn python(&self) -> Option<PathBuf> {
        let folders = self.paths_of("PATH");
        let first = folders.iter().find_map(|folder| {
            ["python3", "python"].iter().map(|name| folder.join(name)).find(|python| python.exists())
        })?;
        let prefix = |python: &Path| python.parent().and_then(Path::parent).map(Path::to_path_buf);
        // In a virtual environment the interpreter is a link; the folder of the link counts.
        prefix(&first)
            .filter(|prefix| prefix.join("pyvenv.cfg").exists())
            .or_else(|| prefix(&fs::canonicalize(&first).ok()?))
    }

    /// Returns the folders in the dynamic loader's configuration files.
    fn loader_folders(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = entries(&self.root.join("etc/ld.so.conf.d"));
        files.retain(|file| file.extension().is_some_and(|extension| extension == "conf"));
        files.into_iter().flat_map(|file| self.folders_named_in(&file)).collect()
    }

    /// Returns the absolute folders that a configuration file of the loader names; empty if it cannot be read.
    fn folders_named_in(&self, file: &Path) -> Vec<PathBuf> {
        let text = fs::read_to_string(file).unwrap_or_default();
        let relative = text.lines().map(str::trim).filter_map(|line| line.strip_prefix('/'));
        relative.map(|folder| self.root.join(folder)).collect()
    }

    /// Returns a command or instruction that installs a missing or incompatible library on this machine. `driver` is
    /// the newest CUDA version that the driver supports; `None` if unknown.
    fn remedy(&self, library: Library, driver: Option<CudaVersion>) -> String {
        if library.belongs_to_toolkit() || library == Library::Nccl {
            // Unsuffixed package names are for the newest CUDA; packages for older drivers have a version suffix.
            let suffix = match driver {
                Some(CudaVersion { major: 12, .. }) => "-cu12",
                _ => "",
            };
            return match library {
                Library::Nccl => format!("pip install nvidia-nccl-cu{}", driver.map_or(13, |driver| driver.major)),
                _ => format!("pip install nvidia-cuda-nvrtc{suffix} nvidia-cublas{suffix}"),
            };
        }
        if is_wsl(&self.root) {
            return "install NVIDIA's driver on Windows (https://www.nvidia.com/drivers), then: wsl --shutdown"
                .to_owned();
        }
        if ["run/.containerenv", ".dockerenv"].iter().any(|mark| self.root.join(mark).exists()) {
            return "start the container with its GPUs: docker run --gpus all".to_owned();
        }
        let release = fs::read_to_string(self.root.join("etc/os-release")).unwrap_or_default();
        let value = |key: &str| release.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
        let names = format!("{} {}", value("ID="), value("ID_LIKE=")).replace('"', "");
        let is_like = |name: &str| names.split_whitespace().any(|word| word == name);
        if is_like("ubuntu") {
            "sudo ubuntu-drivers install".to_owned()
        } else if is_like("debian") {
            "sudo apt install nvidia-driver".to_owned()
        } else if is_like("fedora") || is_like("rhel") {
            "sudo dnf install akmod-nvidia xorg-x11-drv-nvidia-cuda".to_owned()
        } else if is_like("arch") {
            "sudo pacman -S nvidia-open nvidia-utils".to_owned()
        } else if is_like("suse") || is_like("opensuse") {
            "sudo zypper install nvidia-open-driver-G06-signed-kmp-meta nvidia-compute-utils-G06".to_owned()
        } else {
            "install NVIDIA's driver from your distribution, or from https://www.nvidia.com/drivers".to_owned()
        }
    }
}

/// Library folders of distributions, containers and WSL, relative to the root folder.
const SYSTEM_FOLDERS: [&str; 10] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/lib",
    "usr/lib/wsl/lib",
    "usr/local/nvidia/lib64",
    "usr/local/nvidia/lib",
    "run/opengl-driver/lib",
    // Replaces a driver that is older than the toolkit; a newer driver refuses it.
    "usr/local/cuda/compat",
];

/// Returns the entries of a folder, sorted by name; none if it cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    found.sort();
    found
}

fn name_of(path: &Path) -> &str {
    path.file_name().and_then(OsStr::to_str).unwrap_or_default()
}

/// Returns the numbers of a version, for comparison: 12, 4, 127 for `12.4.127`. Ends before the first part that is no
/// number.
fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|part| part.parse().ok()).collect()
}

/// Returns the entries of a folder whose names start with `prefix`, sorted by the version that follows, newest first.
fn newest_first(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let mut found = entries(folder);
    found.retain(|path| name_of(path).starts_with(prefix));
    found.sort_by_key(|path| std::cmp::Reverse(numbers(&name_of(path)[prefix.len()..])));
    found
}

/// Returns the folders that may contain libraries in a toolkit or conda environment at `prefix`.
fn libraries_of(prefix: &Path) -> Vec<PathBuf> {
    let target = format!("targets/{}-linux/lib", std::env::consts::ARCH);
    ["lib64", "lib", &target].iter().map(|folder| prefix.join(folder)).collect()
}

/// Returns the library folders of NVIDIA's wheels in the Python environment at `prefix`. They end in
/// `nvidia/cublas/lib` for CUDA 12, in `nvidia/cu13/lib` for CUDA 13.
fn wheel_library_folders(prefix: &Path) -> Vec<PathBuf> {
    let mut sites = Vec::new();
    for lib in ["lib", "lib64"] {
        for python in newest_first(&prefix.join(lib), "python3") {
            sites.extend(["site-packages", "dist-packages"].map(|site| python.join(site)));
        }
    }
    sites.iter().flat_map(|site| entries(&site.join("nvidia"))).map(|package| package.join("lib")).collect()
}

/// Returns the files of a library in a folder with their versions, newest first. Only one file of each major version is
/// returned.
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
        // Among `.so`, `.so.12` and `.so.12.4.127`, prefer `.so.12`, which programs link to.
        let rank = |path: &Path| match name_of(path)[prefix.len()..].matches('.').count() {
            1 => 0,
            0 => 1,
            parts => parts,
        };
        let preferred = by_major.get(&major).is_none_or(|(known, _)| rank(&path) < rank(known));
        if preferred {
            by_major.insert(major, (path, version));
        }
    }
    by_major.into_values().rev().collect()
}

/// Returns the version of a library file without loading it; empty if unknown. The version may stand in the name of the
/// file, of its link target or of NVRTC's second file, or in a Python wheel. The most detailed one counts.
fn version_of(path: &Path, library: Library) -> String {
    let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let version_suffix = |path: &Path| name_of(path).split_once(".so.").map_or("", |(_, version)| version).to_owned();
    let mut versions = vec![version_suffix(path), version_suffix(&real)];
    let folder = path.parent().unwrap_or(Path::new(""));
    if library == Library::Nvrtc {
        let builtins = entries(folder).into_iter().find(|path| name_of(path).starts_with("libnvrtc-builtins.so."));
        versions.extend(builtins.as_deref().map(version_suffix));
    }
    // site-packages/nvidia/PACKAGE/lib/FILE: records of wheels lie next to `nvidia`.
    if let (Some(prefix), Some(site)) = (library.pypi_package_prefix(), folder.ancestors().nth(3))
        && folder.ancestors().nth(2).is_some_and(|nvidia| name_of(nvidia) == "nvidia")
    {
        let record = |path: &PathBuf| {
            let (package, version) = name_of(path).strip_suffix(".dist-info")?.split_once('-')?;
            let cuda = package.strip_prefix(prefix)?;
            (cuda.is_empty() || cuda.starts_with("_cu")).then(|| version.to_owned())
        };
        versions.extend(entries(site).iter().filter_map(record));
    }
    let major = versions.iter().find_map(|version| numbers(version).first().copied());
    versions.retain(|version| !version.is_empty() && numbers(version).first().copied() == major);
    versions.into_iter().max_by_key(|version| numbers(version).len()).unwrap_or_default()
}

/// The files of NVIDIA's libraries that were found on this machine, in order of preference.
#[derive(Clone, Debug)]
pub struct Libraries {
    found: Vec<FoundLibrary>,
    folders: usize,
    searched: String,
    environment: SearchEnvironment,
}

impl Libraries {
    /// Searches this machine for NVIDIA's libraries. Reads folders, and loads nothing.
    pub fn find() -> Libraries {
        Libraries::find_in(SearchEnvironment::current())
    }

    /// Searches an environment for NVIDIA's libraries. Reads folders, and loads nothing.
    pub(crate) fn find_in(environment: SearchEnvironment) -> Libraries {
        let places = environment.search_places();
        let mut found: Vec<FoundLibrary> = Vec::new();
        for (place, folders) in &places {
            for folder in folders.iter().filter(|folder| folder.is_dir()) {
                for library in Library::ALL {
                    let new = files_in(folder, library).into_iter();
                    found.extend(new.map(|(path, version)| FoundLibrary { library, path, version, place }));
                }
            }
        }
        let searched_places = places.iter().filter(|(_, folders)| !folders.is_empty());
        let searched = searched_places.map(|(place, _)| *place).collect::<Vec<_>>().join(", ");
        let folders = places.iter().map(|(_, folders)| folders.len()).sum();
        Libraries { found, folders, searched, environment }
    }

    /// Returns all files that were found of a library, in order of preference.
    pub fn of_kind(&self, library: Library) -> impl Iterator<Item = &FoundLibrary> {
        self.found.iter().filter(move |found| found.library == library)
    }

    /// Returns the preferred file of a library that Plimsoll supports and that works with the driver. `driver` is the
    /// newest CUDA version that the driver supports; with `None`, any driver counts as new enough.
    ///
    /// # Errors
    /// Fails if no file was found, or each is too old or too new.
    pub fn choose(&self, library: Library, driver: Option<CudaVersion>) -> Result<&FoundLibrary, LibraryError> {
        let is_compatible = |found: &&FoundLibrary| {
            !library.belongs_to_toolkit()
                || found.major() >= CUDA_MAJOR_MIN && driver.is_none_or(|driver| found.major() <= driver.major)
        };
        if let Some(found) = self.of_kind(library).find(is_compatible) {
            return Ok(found);
        }
        let remedy = self.environment.remedy(library, driver);
        let Some(found) = self.of_kind(library).next() else {
            let (folders, searched) = (self.folders, self.searched.clone());
            return Err(LibraryError::Missing { library, folders, searched, remedy });
        };
        let FoundLibrary { version, path, .. } = found.clone();
        Err(match driver {
            Some(driver) if found.major() > driver.major => {
                let remedy = format!("{remedy}, or update the driver");
                LibraryError::TooNew { library, version, major: found.major(), path, driver, remedy }
            }
            _ => LibraryError::TooOld { library, version, path, remedy },
        })
    }
}

/// Returns the path of NVRTC's second library (`libnvrtc-builtins`) in the folder of the file `nvrtc`; `None` if it is
/// not there. NVRTC looks for it by name on the loader path, and finds it elsewhere only if it is already loaded.
pub(super) fn builtins_beside(nvrtc: &Path) -> Option<PathBuf> {
    let major = numbers(&version_of(nvrtc, Library::Nvrtc)).first().copied();
    let is_same_major = |path: &PathBuf| {
        let version = name_of(path).strip_prefix("libnvrtc-builtins.so.").map(numbers);
        version.is_some_and(|version| version.first().copied() == major)
    };
    entries(nvrtc.parent()?).into_iter().find(is_same_major)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A machine whose root folder is a temporary folder, with environment variables.
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
            Libraries::find_in(SearchEnvironment { root, variables: self.variables.clone(), folder })
        }

        fn chosen(&self, library: Library, driver: Option<(u32, u32)>) -> (String, String, &'static str) {
            let driver = driver.map(|(major, minor)| CudaVersion { major, minor });
            let found = self.find().choose(library, driver).unwrap().clone();
            let path = found.path.strip_prefix(self.root.path()).unwrap().display().to_string();
            (path, found.version, found.place)
        }
    }

    #[test]
    fn both_wheel_layouts_are_found() {
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
        let chosen = |library| machine.chosen(library, None);
        let nvrtc = format!("{site}/nvidia/cu13/lib/libnvrtc.so.13");
        assert_eq!(chosen(Library::Nvrtc), (nvrtc, "13.2".into(), "virtual environment"));
        assert_eq!(chosen(Library::CublasLt).1, "13.1.0.3");
        assert_eq!(chosen(Library::Nccl).1, "2.28.9");
        machine.set("VIRTUAL_ENV", "old");
        assert!(machine.chosen(Library::Nvrtc, None).0.ends_with("cuda_nvrtc/lib/libnvrtc.so.12"));
        assert!(machine.chosen(Library::CublasLt, None).0.ends_with("cublas/lib/libcublasLt.so.12"));
    }

    #[test]
    fn python_on_path_selects_its_environment() {
        // As `python -m venv` creates it: a link to another interpreter, with a pyvenv.cfg above.
        let mut machine = Machine::new();
        machine.file("opt/python/bin/python3.11", "").file("env/pyvenv.cfg", "");
        fs::create_dir_all(machine.at("env/bin")).unwrap();
        symlink(machine.at("opt/python/bin/python3.11"), machine.at("env/bin/python3")).unwrap();
        machine.file("env/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13", "");
        machine.file("opt/python/lib/python3.11/site-packages/nvidia/cu13/lib/libcublasLt.so.13", "");
        machine.set("PATH", "env/bin");
        assert!(machine.chosen(Library::Nvrtc, None).0.starts_with("env/"));
        // Without a pyvenv.cfg, the interpreter's own prefix counts.
        fs::create_dir_all(machine.at("usr/bin")).unwrap();
        symlink(machine.at("opt/python/bin/python3.11"), machine.at("usr/bin/python3")).unwrap();
        machine.set("PATH", "usr/bin");
        assert!(machine.chosen(Library::CublasLt, None).0.starts_with("opt/python/"));
        // An environment in the working folder is found without any variable.
        machine.file("work/.venv/lib/python3.13/site-packages/nvidia/nccl/lib/libnccl.so.2", "");
        assert!(machine.chosen(Library::Nccl, None).0.starts_with("work/.venv/"));
    }

    #[test]
    fn search_order_prefers_loader_path_then_environments() {
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
        let LibraryError::Missing { searched, remedy, .. } = &error else { panic!("{error:?}") };
        assert_eq!(remedy, "pip install nvidia-cuda-nvrtc nvidia-cublas");
        assert!(searched.starts_with("LD_LIBRARY_PATH, virtual environment, conda, toolkit"), "{searched}");
        assert!(error.to_string().starts_with("NVRTC was not found: no libnvrtc.so in "), "{error}");
        let failure = Failure::from(error);
        assert_eq!(failure.exit as i32, 2);
    }

    #[test]
    fn newest_toolkit_and_linked_version_are_chosen() {
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
    fn libraries_newer_than_driver_are_rejected() {
        let mut machine = Machine::new();
        machine.set("LD_LIBRARY_PATH", "mine");
        machine.file("mine/libnvrtc.so.13", "").file("usr/local/cuda/lib64/libnvrtc.so.12", "");
        assert_eq!(machine.chosen(Library::Nvrtc, Some((13, 0))).1, "13");
        assert_eq!(machine.chosen(Library::Nvrtc, Some((12, 4))).1, "12");
        fs::remove_file(machine.at("usr/local/cuda/lib64/libnvrtc.so.12")).unwrap();
        let error = machine.find().choose(Library::Nvrtc, Some(CudaVersion { major: 12, minor: 4 })).unwrap_err();
        assert!(error.to_string().ends_with("is of CUDA 13, but the driver knows CUDA up to 12.4"), "{error}");
        assert_eq!(error.remedy(), "pip install nvidia-cuda-nvrtc-cu12 nvidia-cublas-cu12, or update the driver");
        fs::rename(machine.at("mine/libnvrtc.so.13"), machine.at("mine/libnvrtc.so.11.2")).unwrap();
        let error = machine.find().choose(Library::Nvrtc, Some(CudaVersion { major: 12, minor: 4 })).unwrap_err();
        assert!(error.to_string().ends_with("is too old: CUDA 12 is the oldest that is used"), "{error}");
    }

    #[test]
    fn start_remedy_follows_the_error_code() {
        let cases = [
            (Some(34), "docker run --gpus all"),
            (Some(100), "unset CUDA_VISIBLE_DEVICES"),
            (Some(802), "nvidia-fabricmanager"),
            (Some(803), "restart the machine; in a container"),
            (Some(804), "use an image for this driver"),
            (Some(999), "check that nvidia-smi"),
            (None, "check that nvidia-smi"),
        ];
        for (code, words) in cases {
            assert!(start_remedy(code).contains(words), "{code:?}: {}", start_remedy(code));
        }
    }

    #[test]
    fn missing_driver_remedy_matches_system() {
        let machine = Machine::new();
        let remedy = || machine.find().choose(Library::Driver, None).unwrap_err().remedy();
        assert!(remedy().contains("https://www.nvidia.com/drivers"));
        machine.file("etc/os-release", "NAME=\"Pop\"\nID=pop\nID_LIKE=\"ubuntu debian\"\n");
        assert_eq!(remedy(), "sudo ubuntu-drivers install");
        machine.file(".dockerenv", "");
        assert!(remedy().ends_with("docker run --gpus all"));
        machine.file("proc/sys/kernel/osrelease", "5.15.167.4-microsoft-standard-WSL2\n");
        assert!(remedy().ends_with("wsl --shutdown"));
        machine.file("usr/lib/wsl/lib/libcuda.so.1", "");
        assert_eq!(machine.chosen(Library::Driver, None).0, "usr/lib/wsl/lib/libcuda.so.1");
        machine.file("etc/ld.so.conf.d/mine.conf", "# mine\n/odd/place\n").file("odd/place/libnvidia-ml.so.1", "");
        assert_eq!(machine.chosen(Library::Nvml, None).0, "odd/place/libnvidia-ml.so.1");
    }

    #[test]
    fn driver_version_number_is_decoded() {
        assert_eq!(CudaVersion::of_driver(12040).to_string(), "12.4");
        assert_eq!(CudaVersion::of_driver(13020).to_string(), "13.2");
    }
}
