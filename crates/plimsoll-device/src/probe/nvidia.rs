//! Whether NVIDIA's driver is here. Only that: nothing is loaded, and no GPU is looked at.

use super::text;
use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};

/// The driver's library, as the dynamic loader would be asked for it.
const LIBRARY: &str = "libcuda.so.1";

/// Where distributions, containers and WSL keep it.
const FOLDERS: [&str; 8] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/lib/wsl/lib",
    "usr/local/cuda/compat",
    "usr/local/nvidia/lib64",
    "run/opengl-driver/lib",
];

/// Whether NVIDIA's driver is here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Nvidia {
    /// The driver's library, where found.
    pub library: Option<PathBuf>,
    /// The driver's version, where the kernel module says it.
    pub version: Option<String>,
}

impl Nvidia {
    /// What lies under `root`; the folders of `LD_LIBRARY_PATH` come first.
    pub fn read(root: &Path) -> Nvidia {
        let named = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let folders = std::env::split_paths(&named).filter(|folder| folder.is_absolute());
        Nvidia::of(root, folders)
    }

    fn of(root: &Path, named: impl Iterator<Item = PathBuf>) -> Nvidia {
        let folders = named.chain(FOLDERS.iter().map(|folder| root.join(folder)));
        let library = folders.map(|folder| folder.join(LIBRARY)).find(|path| path.exists());
        // NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 ...
        let version = text(root.join("proc/driver/nvidia/version")).and_then(|version| {
            let words = version.lines().next()?.split_whitespace();
            words
                .into_iter()
                .find(|word| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit()))
                .map(str::to_owned)
        });
        Nvidia { library, version }
    }
}

impl fmt::Display for Nvidia {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.library, &self.version) {
            (Some(library), Some(version)) => {
                write!(f, "NVIDIA driver {version} found ({}); this version does not use GPUs yet", library.display())
            }
            (Some(library), None) => {
                write!(f, "NVIDIA driver found ({}); this version does not use GPUs yet", library.display())
            }
            (None, Some(version)) => write!(f, "NVIDIA kernel module {version} found, but not its library {LIBRARY}"),
            (None, None) => f.write_str("NVIDIA driver not found"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_driver_is_found_where_it_lies_and_only_there() {
        let root = tempfile::tempdir().unwrap();
        let nothing = Nvidia::of(root.path(), std::iter::empty());
        assert_eq!(nothing.to_string(), "NVIDIA driver not found");
        let folder = root.path().join("usr/lib/wsl/lib");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(LIBRARY), "").unwrap();
        let found = Nvidia::of(root.path(), std::iter::empty());
        assert_eq!(found.library, Some(folder.join(LIBRARY)));
        let driver = root.path().join("proc/driver/nvidia");
        fs::create_dir_all(&driver).unwrap();
        fs::write(driver.join("version"), "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22\n")
            .unwrap();
        assert!(Nvidia::of(root.path(), std::iter::empty()).to_string().starts_with("NVIDIA driver 550.54.14 found ("));
    }
}
