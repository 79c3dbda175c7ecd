//! Compilation of kernels: NVRTC compiles each [`Unit`] for the GPU's own architecture, and the result is cached on
//! disk.
//!
//! The result is a cubin, not PTX. A driver runs machine code of any NVRTC up to its own CUDA version, but refuses PTX
//! of a newer one. A cache file is named by a hash of everything that it depends on, and contains a hash of itself. So
//! neither an update nor a partly written file can yield a wrong kernel.

use super::driver::{CudaError, library};
use super::kernels::{OPTIONS, Unit};
use super::libraries::builtins_beside;
use plimsoll_core::Failure;
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::UNIX_EPOCH;
use std::{fmt, fs, process, ptr, thread};

/// The compute capability of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Architecture {
    /// Major version: 8 of 8.6.
    pub major: u32,
    /// Minor version: 6 of 8.6.
    pub minor: u32,
}

impl Architecture {
    /// Returns the name of the GPU generation.
    pub fn family(self) -> &'static str {
        match (self.major, self.minor) {
            (0..=4, _) => "Kepler or older",
            (5, _) => "Maxwell",
            (6, _) => "Pascal",
            (7, 0..=4) => "Volta",
            (7, _) => "Turing",
            (8, 9) => "Ada",
            (8, _) => "Ampere",
            (9, _) => "Hopper",
            (10..=12, _) => "Blackwell",
            _ => "newer than Blackwell",
        }
    }

    /// Checks that the kernels run on this architecture: Ampere (the first with bf16) to Blackwell.
    ///
    /// # Errors
    /// Returns the reason if they do not.
    pub fn check(self) -> Result<(), String> {
        match self.major {
            0..=7 => Err(format!("{} ({self}) is too old: it has no bf16; Ampere (8.0) is the oldest", self.family())),
            8..=12 => Ok(()),
            _ => Err(format!("compute capability {self} is {}: this version does not know it", self.family())),
        }
    }

    fn number(self) -> u32 {
        self.major * 10 + self.minor
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A failure to produce machine code.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// The compiler cannot be loaded.
    #[error(transparent)]
    Library(#[from] CudaError),
    /// The GPU is too old or too new for Plimsoll.
    #[error("{0}")]
    Architecture(String),
    /// The compiler does not support the GPU.
    #[error("NVRTC {version} ({}) does not compile for compute capability {architecture}", path.display())]
    Compiler {
        /// Version of the compiler.
        version: String,
        /// Path of the compiler.
        path: PathBuf,
        /// Requested architecture.
        architecture: Architecture,
    },
    /// A kernel does not compile: a bug of Plimsoll, or an incomplete NVRTC.
    #[error("NVRTC {version} refuses the unit {unit} for sm_{target}: {reason}\n{log}")]
    Refused {
        /// Version of the compiler.
        version: String,
        /// Name of the unit.
        unit: String,
        /// Target architecture, as `86`.
        target: u32,
        /// The compiler's error.
        reason: String,
        /// The compiler's log.
        log: String,
    },
}

impl From<CompileError> for Failure {
    fn from(error: CompileError) -> Failure {
        let message = error.to_string();
        match error {
            CompileError::Library(error) => error.into(),
            CompileError::Architecture(_) => {
                Failure::input(message).hint("run on another device: --devices cpu (`plimsoll devices` lists all)")
            }
            CompileError::Compiler { .. } => Failure::input(message).hint(
                "install a newer NVRTC: pip install --upgrade nvidia-cuda-nvrtc (a newer driver may be needed for it)",
            ),
            // The builtins library is a separate file, which may be missing.
            CompileError::Refused { log, .. } if log.contains("builtins") => {
                Failure::input(message).hint("reinstall NVRTC: pip install --force-reinstall nvidia-cuda-nvrtc")
            }
            CompileError::Refused { .. } => Failure::bug(message),
        }
    }
}

/// `nvrtcProgram`.
type Program = *mut c_void;

library! {
    /// The functions of NVRTC that this crate calls. They are thread-safe.
    Nvrtc {
        fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int;
        fn nvrtcGetErrorString(code: c_int) -> *const c_char;
        fn nvrtcGetNumSupportedArchs(count: *mut c_int) -> c_int;
        fn nvrtcGetSupportedArchs(architectures: *mut c_int) -> c_int;
        fn nvrtcCreateProgram(
            program: *mut Program, source: *const c_char, name: *const c_char,
            headers: c_int, contents: *const *const c_char, names: *const *const c_char,
        ) -> c_int;
        fn nvrtcCompileProgram(program: Program, count: c_int, options: *const *const c_char) -> c_int;
        fn nvrtcGetProgramLogSize(program: Program, bytes: *mut usize) -> c_int;
        fn nvrtcGetProgramLog(program: Program, log: *mut c_char) -> c_int;
        fn nvrtcGetCUBINSize(program: Program, bytes: *mut usize) -> c_int;
        fn nvrtcGetCUBIN(program: Program, cubin: *mut c_char) -> c_int;
        fn nvrtcDestroyProgram(program: *mut Program) -> c_int;
    }
}

/// The compiler of kernels, with its cache.
pub struct Compiler {
    nvrtc: Nvrtc,
    path: PathBuf,
    version: String,
    /// Fingerprint that distinguishes builds of one version.
    build: String,
    /// Supported target architectures, as `86`.
    targets: Vec<u32>,
    driver: String,
    cache: Option<PathBuf>,
}

impl Compiler {
    /// Loads the NVRTC at `path`. Cubins are cached below the folder `cache`; they stay valid until compiler, sources
    /// or the version `driver` change.
    ///
    /// # Errors
    /// Fails if the library cannot be loaded.
    pub fn open(path: &Path, driver: &str, cache: Option<&Path>) -> Result<Compiler, CompileError> {
        let builtins = builtins_beside(path);
        let build = [Some(path), builtins.as_deref()].into_iter().flatten().map(build_fingerprint).collect();
        if let Some(builtins) = builtins {
            // SAFETY: loads the second half of NVRTC, which NVRTC itself loads if it is on the loader path. If this
            // fails, NVRTC reports it in the log of the first unit.
            std::mem::forget(unsafe { libloading::Library::new(builtins) });
        }
        let nvrtc = Nvrtc::load(path)?;
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: each writes one int through its pointer.
        let codes =
            unsafe { [(nvrtc.nvrtcVersion)(&mut major, &mut minor), (nvrtc.nvrtcGetNumSupportedArchs)(&mut count)] };
        let mut targets = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: there is room for the number of ints that it reported.
        let code = unsafe { (nvrtc.nvrtcGetSupportedArchs)(targets.as_mut_ptr()) };
        if codes != [0; 2] || code != 0 {
            targets.clear();
        }
        Ok(Compiler {
            nvrtc,
            path: path.to_path_buf(),
            version: format!("{major}.{minor}"),
            build,
            targets: targets.into_iter().filter_map(|target| u32::try_from(target).ok()).collect(),
            driver: driver.to_owned(),
            cache: cache.map(|cache| cache.join("kernels")),
        })
    }

    /// Returns the version, `13.2`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Returns the target for a GPU: its own architecture or, if the compiler does not support that, the newest older
    /// one with machine code that the GPU runs.
    fn target(&self, architecture: Architecture) -> Result<u32, CompileError> {
        architecture.check().map_err(CompileError::Architecture)?;
        let runs = |target: &&u32| **target / 10 == architecture.major && **target <= architecture.number();
        self.targets.iter().filter(runs).max().copied().ok_or_else(|| CompileError::Compiler {
            version: self.version.clone(),
            path: self.path.clone(),
            architecture,
        })
    }

    /// Returns the cubin of each unit, from the cache or compiled on several threads.
    ///
    /// # Errors
    /// Returns the first failure of a unit, or the lack of a target for the architecture.
    pub fn cubins(&self, units: &[Unit], architecture: Architecture) -> Result<Vec<Vec<u8>>, CompileError> {
        let target = self.target(architecture)?;
        let next = AtomicUsize::new(0);
        let done = Mutex::new(Vec::new());
        let work = || {
            while let Some(unit) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
                let made = self.cubin(*unit, target);
                let failed = made.is_err();
                done.lock().unwrap_or_else(PoisonError::into_inner).push((*unit, made));
                if failed {
                    next.store(units.len(), Ordering::Relaxed);
                }
            }
        };
        let threads = thread::available_parallelism().map_or(1, usize::from).min(units.len()).min(8);
        thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(work);
            }
            work();
        });
        let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(failed) = done.iter().position(|(_, made)| made.is_err()) {
            return Err(done.swap_remove(failed).1.expect_err("it failed"));
        }
        let cubin_of =
            |unit: &Unit| done.iter().find(|(done, _)| done == unit).and_then(|(_, made)| made.as_ref().ok().cloned());
        Ok(units.iter().map(|unit| cubin_of(unit).expect("every unit was compiled")).collect())
    }

    /// Returns the cubin of one unit.
    fn cubin(&self, unit: Unit, target: u32) -> Result<Vec<u8>, CompileError> {
        let source = unit.source();
        let file = self.cache.as_ref().map(|cache| cache.join(self.key(&source, target, &unit.name())));
        if let Some(known) = file.as_ref().and_then(|file| read_cached(file)) {
            return Ok(known);
        }
        let cubin = self.compile(&unit.name(), &source, target)?;
        if let Some(file) = &file {
            write_cached(file, &cubin);
        }
        Ok(cubin)
    }

    /// Returns the cache file name: the unit's name for readability, and a hash of everything the cubin depends on.
    fn key(&self, source: &str, target: u32, unit: &str) -> String {
        let mut hash = Sha256::new();
        for part in [source, &OPTIONS.join(" "), &target.to_string(), &self.version, &self.build, &self.driver] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let hash: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{unit}-sm_{target}-{hash}.cubin")
    }

    fn compile(&self, unit: &str, source: &str, target: u32) -> Result<Vec<u8>, CompileError> {
        let text = |text: &str| CString::new(text).expect("sources and options have no zero bytes");
        let (source, name) = (text(source), text(&format!("{unit}.cu")));
        let mut options: Vec<CString> = OPTIONS.iter().map(|option| text(option)).collect();
        options.push(text(&format!("--gpu-architecture=sm_{target}")));
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let api = &self.nvrtc;
        let mut program: Program = ptr::null_mut();
        // SAFETY: both texts have a terminating zero and outlive the call; there are no headers.
        let code = unsafe {
            (api.nvrtcCreateProgram)(&mut program, source.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null())
        };
        let refused = |code: c_int, log: String| CompileError::Refused {
            version: self.version.clone(),
            unit: unit.to_owned(),
            target,
            // SAFETY: a text owned by the library, for any code.
            reason: unsafe { text_at((api.nvrtcGetErrorString)(code)) },
            log,
        };
        if code != 0 {
            return Err(refused(code, String::new()));
        }
        // SAFETY: the program was created above; there are as many options as pointers, each with a terminating zero.
        let code = unsafe { (api.nvrtcCompileProgram)(program, pointers.len() as c_int, pointers.as_ptr()) };
        let result = if code == 0 {
            // SAFETY: the functions belong together, and the program has been compiled.
            unsafe { read_output(program, api.nvrtcGetCUBINSize, api.nvrtcGetCUBIN) }
                .map_err(|code| refused(code, String::new()))
        } else {
            // SAFETY: the functions belong together, and every program has a log.
            let log =
                unsafe { read_output(program, api.nvrtcGetProgramLogSize, api.nvrtcGetProgramLog) }.unwrap_or_default();
            Err(refused(code, String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned()))
        };
        // SAFETY: created above, and not used after this.
        unsafe { (api.nvrtcDestroyProgram)(&mut program) };
        result
    }
}

/// Returns size and modification time of a library file, which distinguish builds of one version. Hashing the file
/// would take as long as compiling.
fn build_fingerprint(library: &Path) -> String {
    let Ok(file) = fs::metadata(library) else { return String::new() };
    let written = file.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    format!("{} bytes of {written:?};", file.len())
}

type SizeOf = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type CopyOf = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// Reads an output of NVRTC, which takes one call for the size and one for the bytes.
///
/// # Safety
/// The functions belong together, and the program is alive.
unsafe fn read_output(program: Program, size: SizeOf, copy: CopyOf) -> Result<Vec<u8>, c_int> {
    let mut bytes = 0;
    // SAFETY: writes one number; the program is alive.
    let code = unsafe { size(program, &mut bytes) };
    if code != 0 {
        return Err(code);
    }
    let mut output = vec![0u8; bytes];
    // SAFETY: there is room for the reported number of bytes.
    match unsafe { copy(program, output.as_mut_ptr().cast()) } {
        0 => Ok(output),
        code => Err(code),
    }
}

/// # Safety
/// The pointer is null, or points to a text with a terminating zero.
unsafe fn text_at(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Returns the cubin in a cache file; `None` if its hash does not match.
fn read_cached(file: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(file).ok()?;
    let (hash, cubin) = bytes.split_at_checked(32)?;
    (!cubin.is_empty() && Sha256::digest(cubin).as_slice() == hash).then(|| cubin.to_vec())
}

/// Writes a cache file to a temporary name and renames it, so that readers never see a partial file. Errors are
/// ignored: the cache only saves time.
fn write_cached(file: &Path, cubin: &[u8]) {
    let temporary = file.with_extension(format!("{}", process::id()));
    let bytes = [Sha256::digest(cubin).as_slice(), cubin].concat();
    let made = fs::create_dir_all(file.parent().unwrap_or(Path::new("")));
    if made.and_then(|()| fs::write(&temporary, bytes)).and_then(|()| fs::rename(&temporary, file)).is_err() {
        let _ = fs::remove_file(&temporary);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_architectures_are_refused_by_name() {
        let check = |major, minor| Architecture { major, minor }.check();
        assert_eq!(check(7, 5).unwrap_err(), "Turing (7.5) is too old: it has no bf16; Ampere (8.0) is the oldest");
        assert!(check(6, 1).unwrap_err().starts_with("Pascal (6.1) is too old"));
        for (major, minor) in [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)] {
            assert_eq!(check(major, minor), Ok(()));
        }
        assert!(check(13, 0).unwrap_err().contains("13.0 is newer than Blackwell"));
    }

    #[test]
    fn builds_of_one_version_are_distinguished() {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("libnvrtc.so.13");
        assert_eq!(build_fingerprint(&library), "");
        fs::write(&library, "one build").unwrap();
        let first = build_fingerprint(&library);
        assert_eq!(build_fingerprint(&library), first);
        fs::write(&library, "another build").unwrap();
        assert_ne!(build_fingerprint(&library), first);
        // Equal size, different time.
        fs::write(&library, "one build").unwrap();
        let later = UNIX_EPOCH + std::time::Duration::from_secs(1);
        fs::File::options().write(true).open(&library).unwrap().set_modified(later).unwrap();
        assert_ne!(build_fingerprint(&library), first);
    }

    #[test]
    fn damaged_cache_file_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("deep/unit.cubin");
        write_cached(&file, b"machine code");
        assert_eq!(read_cached(&file).unwrap(), b"machine code");
        let whole = fs::read(&file).unwrap();
        let mut flipped = whole.clone();
        flipped[40] ^= 1;
        for bad in [&whole[..20], &whole[..36], &whole[..32], &flipped[..], &[]] {
            fs::write(&file, bad).unwrap();
            assert_eq!(read_cached(&file), None, "{} bytes", bad.len());
        }
        assert_eq!(fs::read_dir(file.parent().unwrap()).unwrap().count(), 1, "no temporary file remains");
    }

    /// Needs an installed NVRTC; cuda-check runs this test after it has installed one.
    #[test]
    #[ignore = "needs NVRTC: cargo xtask cuda-check"]
    fn units_compile_once_and_errors_include_log() {
        use crate::cuda::kernels::{Family, Real};
        use crate::cuda::libraries::{Libraries, Library};
        let libraries = Libraries::find();
        let nvrtc = &libraries.choose(Library::Nvrtc, None).unwrap().path;
        let folder = tempfile::tempdir().unwrap();
        let ampere = Architecture { major: 8, minor: 6 };
        let units = [Family::Norm, Family::SwiGlu, Family::Optimizer].map(|family| Unit::new(family, Real::Bf16, 64));
        let compiler = Compiler::open(nvrtc, "580.1", Some(folder.path())).unwrap();
        let made = compiler.cubins(&units, ampere).unwrap();
        assert!(made.iter().all(|cubin| cubin.starts_with(b"\x7fELF")));
        assert_ne!(made[0], made[1]);
        let files = || {
            let mut files: Vec<PathBuf> =
                fs::read_dir(folder.path().join("kernels")).unwrap().map(|entry| entry.unwrap().path()).collect();
            files.sort();
            files
        };
        let written = |file: &Path| fs::metadata(file).unwrap().modified().unwrap();
        let (first, damaged) = (files(), files()[0].clone());
        assert_eq!(first.len(), 3);
        let untouched = written(&first[1]);
        fs::write(&damaged, "half a file").unwrap();
        assert_eq!(compiler.cubins(&units, ampere).unwrap(), made);
        assert!(read_cached(&damaged).is_some(), "a damaged file is compiled again");
        assert_eq!(written(&first[1]), untouched, "an intact one is not");
        // Another driver and another architecture have other files.
        Compiler::open(nvrtc, "590.1", Some(folder.path())).unwrap().cubins(&units[..1], ampere).unwrap();
        compiler.cubins(&units[..1], Architecture { major: 9, minor: 0 }).unwrap();
        assert_eq!(files().len(), 5);
        let refused = compiler.compile("bad", "__global__ void k() { int x = nonsense; }", 86).unwrap_err().to_string();
        assert!(refused.contains("refuses the unit bad for sm_86") && refused.contains("\"nonsense\" is undefined"));
    }
}
