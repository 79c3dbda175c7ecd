//! Compilation of kernels: NVRTC compiles each [`Unit`] for the GPU's own architecture, and the result is cached on
//! disk.
//!
//! The result is a cubin, not PTX. A driver runs machine code of any NVRTC up to its own CUDA version, but refuses PTX
//! of a newer one. A cache file is named by a hash of everything that its cubin depends on, and contains a hash of the
//! cubin. Neither an update nor a partly written file can therefore yield a wrong kernel.

use super::abi::library;
use super::architecture::Architecture;
use super::kernels::{OPTIONS, Unit};
use super::libraries::builtins_beside;
use crate::error::{CudaError, DeviceError};
use crate::private_file;
use plimsoll_core::Failure;
use sha2::{Digest, Sha256};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::UNIX_EPOCH;
use std::{fs, ptr, thread};

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
        /// Compute capability of the GPU.
        architecture: Architecture,
    },
    /// A kernel does not compile, because of a bug of Plimsoll or an incomplete installation of NVRTC.
    #[error("NVRTC {version} refuses the unit {unit} for sm_{target}: {reason}\n{log}")]
    Refused {
        /// Version of the compiler.
        version: String,
        /// Name of the source unit, such as `norm-bf16`.
        unit: String,
        /// Target architecture: 86 for sm_86.
        target: u32,
        /// The compiler's error.
        reason: String,
        /// The compiler's log; empty if NVRTC gave none.
        log: String,
    },
}

impl From<CompileError> for DeviceError {
    fn from(error: CompileError) -> DeviceError {
        DeviceError::CudaSoftware { failure: Box::new(error.into()) }
    }
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

/// `nvrtcProgram`: NVRTC's handle of a source, its log and its cubin.
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

/// NVRTC, the compiler of kernels, with its cache on disk.
pub struct Compiler {
    nvrtc: Nvrtc,
    path: PathBuf,
    version: String,
    /// Version as one number: 1302 for 13.2.
    release: u32,
    /// Sizes and modification times of NVRTC's files, which distinguish builds of one version.
    build: String,
    /// Architectures that NVRTC compiles for: 86 for sm_86. Empty if it does not report them.
    targets: Vec<u32>,
    /// Version of the driver, such as `580.1`; a part of the names of cache files.
    driver: String,
    /// Folder of cached cubins; `None` if the caller wants no cache.
    cache: Option<PathBuf>,
}

impl Compiler {
    /// Loads the NVRTC library at `path`. The compiler caches cubins below the folder `cache`; if it is `None`, every
    /// call compiles. `driver` is the driver's version: a cubin is reused only under the same one.
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
            release: u32::try_from(major * 100 + minor).unwrap_or(0),
            build,
            targets: targets.into_iter().filter_map(|target| u32::try_from(target).ok()).collect(),
            driver: driver.to_owned(),
            cache: cache.map(|cache| cache.join("kernels")),
        })
    }

    /// Returns the version of NVRTC, such as `13.2`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Returns the version of NVRTC as one number: 1302 for 13.2.
    pub fn release(&self) -> u32 {
        self.release
    }

    /// Returns the architecture to compile for, as 86 for sm_86: the GPU's own one if NVRTC supports it. Otherwise it
    /// is the newest older one of the same major version, because the GPU runs that machine code, too.
    ///
    /// # Errors
    /// Fails if kernels do not run on the GPU, or NVRTC supports none of these architectures.
    fn target(&self, architecture: Architecture) -> Result<u32, CompileError> {
        architecture.check().map_err(CompileError::Architecture)?;
        let runs = |target: &&u32| **target / 10 == architecture.major && **target <= architecture.number();
        self.targets.iter().filter(runs).max().copied().ok_or_else(|| CompileError::Compiler {
            version: self.version.clone(),
            path: self.path.clone(),
            architecture,
        })
    }

    /// Returns the cubin of each unit for a GPU of this `architecture`, in the order of `units`. Units that are not in
    /// the cache are compiled on several threads.
    ///
    /// # Errors
    /// Fails if NVRTC cannot compile for the architecture, or a unit does not compile.
    pub fn cubins(&self, units: &[Unit], architecture: Architecture) -> Result<Vec<Vec<u8>>, CompileError> {
        let target = self.target(architecture)?;
        let next = AtomicUsize::new(0);
        let done = Mutex::new(Vec::new());
        let work = || self.compile_units(units, target, &next, &done);
        let threads = thread::available_parallelism().map_or(1, usize::from).min(units.len()).min(8);
        thread::scope(|scope| {
            // If the system refuses a thread, the others compile its units.
            (1..threads).all(|_| thread::Builder::new().spawn_scoped(scope, work).is_ok());
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

    /// Makes cubins of `units` and appends them to `done`, in parallel with other threads. `next` is the index of the
    /// first unit that no thread has taken. Returns when all units are taken or one has failed.
    fn compile_units(&self, units: &[Unit], target: u32, next: &AtomicUsize, done: &Mutex<Vec<Made>>) {
        while let Some(unit) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
            let made = self.cubin(*unit, target);
            let failed = made.is_err();
            done.lock().unwrap_or_else(PoisonError::into_inner).push((*unit, made));
            if failed {
                next.store(units.len(), Ordering::Relaxed);
            }
        }
    }

    /// Returns the cubin of one unit for the architecture `target`, from the cache or compiled.
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

    /// Returns the name of a cubin's cache file: the unit's name for readability, and a hash of everything that the
    /// cubin depends on.
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
        let refused = |code: c_int, log: String| self.refused(unit, target, code, log);
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

    /// Returns the error for a unit that NVRTC fails to compile, with NVRTC's error code and log.
    fn refused(&self, unit: &str, target: u32, code: c_int, log: String) -> CompileError {
        CompileError::Refused {
            version: self.version.clone(),
            unit: unit.to_owned(),
            target,
            // SAFETY: a text owned by the library, for any code.
            reason: unsafe { text_at((self.nvrtc.nvrtcGetErrorString)(code)) },
            log,
        }
    }
}

/// A unit with its cubin, or with the reason why there is none.
type Made = (Unit, Result<Vec<u8>, CompileError>);

/// Returns size and modification time of a library file, which distinguish builds of one version. Hashing the file
/// would take as long as compiling. Empty if the file cannot be read.
fn build_fingerprint(library: &Path) -> String {
    let Ok(file) = fs::metadata(library) else { return String::new() };
    let written = file.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    format!("{} bytes of {written:?};", file.len())
}

type SizeOf = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type CopyOf = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// Reads the log or the cubin of an NVRTC program: calls `size` for its size, then `copy` for its bytes. An error is
/// NVRTC's error code.
///
/// # Safety
/// `size` and `copy` are NVRTC functions for the same output, and the program is alive.
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

/// Copies a text of NVRTC; empty for a null pointer.
///
/// # Safety
/// The pointer is null, or points to a text with a terminating zero.
unsafe fn text_at(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Returns the cubin in a cache file; `None` if the file cannot be read or is damaged.
fn read_cached(file: &Path) -> Option<Vec<u8>> {
    let bytes = private_file::read(file).ok()?;
    let (hash, cubin) = bytes.split_at_checked(32)?;
    (!cubin.is_empty() && Sha256::digest(cubin).as_slice() == hash).then(|| cubin.to_vec())
}

/// Writes a cache file. Ignores errors, because the cache only saves time.
fn write_cached(file: &Path, cubin: &[u8]) {
    let _ = private_file::replace(file, &[Sha256::digest(cubin).as_slice(), cubin].concat());
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let units = [Family::Norm, Family::Glu, Family::Optimizer].map(|family| Unit::new(family, Real::Bf16, 64));
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
