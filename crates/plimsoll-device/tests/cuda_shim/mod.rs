//! Runs kernels on the CPU: compiles units against `shim.h`, provides memory with guard bytes, and runs launches in two
//! thread orders.

#![allow(dead_code, reason = "each test file uses its part")]

use half::{bf16, f16};
use plimsoll_device::cuda::kernels::launch::{Address, Argument, Launch};
use plimsoll_device::cuda::kernels::{Real, Unit};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

/// Data type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    F64,
    F32,
    Bf16,
    F16,
    I32,
    U8,
}

impl Kind {
    pub fn of(real: Real) -> Kind {
        if real == Real::F32 { Kind::F32 } else { Kind::Bf16 }
    }

    fn bytes(self) -> usize {
        match self {
            Kind::F64 => 8,
            Kind::F32 | Kind::I32 => 4,
            Kind::Bf16 | Kind::F16 => 2,
            Kind::U8 => 1,
        }
    }

    fn write(self, x: f64) -> Vec<u8> {
        match self {
            Kind::F64 => x.to_le_bytes().to_vec(),
            Kind::F32 => (x as f32).to_le_bytes().to_vec(),
            Kind::Bf16 => bf16::from_f32(round_to_odd(x)).to_le_bytes().to_vec(),
            Kind::F16 => f16::from_f32(round_to_odd(x)).to_le_bytes().to_vec(),
            Kind::I32 => (x as i32).to_le_bytes().to_vec(),
            Kind::U8 => vec![x as u8],
        }
    }

    fn read(self, bytes: &[u8]) -> f64 {
        match self {
            Kind::F64 => f64::from_le_bytes(bytes.try_into().unwrap()),
            Kind::F32 => f32::from_le_bytes(bytes.try_into().unwrap()).into(),
            Kind::Bf16 => bf16::from_le_bytes(bytes.try_into().unwrap()).into(),
            Kind::F16 => f16::from_le_bytes(bytes.try_into().unwrap()).into(),
            Kind::I32 => i32::from_le_bytes(bytes.try_into().unwrap()).into(),
            Kind::U8 => bytes[0].into(),
        }
    }

    /// Returns the nearest number that this type represents.
    pub fn rounded(self, x: f64) -> f64 {
        self.read(&self.write(x))
    }
}

/// Rounds `x` to f32 such that rounding again to 16 bits equals rounding once: of the two neighbours of an inexact
/// value, the odd one.
fn round_to_odd(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || x.is_nan() || near.to_bits() & 1 == 1 {
        return near;
    }
    let other = if f64::from(near) < x { near.next_up() } else { near.next_down() };
    if other.is_infinite() { near } else { other }
}

/// A compiled and loaded unit.
pub struct Library(*mut c_void);

// SAFETY: a handle of the dynamic loader, usable from any thread; the shim's state is per thread.
unsafe impl Send for Library {}
// SAFETY: as for `Send`.
unsafe impl Sync for Library {}

type LastError = unsafe extern "C" fn() -> *const c_char;
type GuardEntry = unsafe extern "C" fn(*const u8, *const u8);
type LaunchEntry = unsafe extern "C" fn(*const c_uint, c_uint, c_uint, *const *const c_void, c_int) -> c_int;

impl Library {
    fn entry(&self, kernel: &str) -> LaunchEntry {
        // SAFETY: `compile_text` defines each `launch_…` with this signature.
        unsafe { std::mem::transmute::<*mut c_void, LaunchEntry>(self.symbol(&format!("launch_{kernel}"))) }
    }

    /// Makes each access to the bytes around these tensors an error of this thread's next launches.
    fn guard<'t>(&self, tensors: impl Iterator<Item = &'t Tensor>) {
        // SAFETY: touches.h defines the functions with these signatures. They only record the addresses.
        unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn()>(self.symbol("shim_no_guards"))();
            let guard = std::mem::transmute::<*mut c_void, GuardEntry>(self.symbol("shim_guard"));
            for tensor in tensors {
                let range = tensor.bytes().as_ptr_range();
                guard(range.start, range.start.add(tensor.first));
                guard(range.start.add(tensor.end), range.end);
            }
        }
    }

    /// Returns the error of this thread's last failed launch.
    fn error(&self) -> String {
        // SAFETY: shim.h defines the function with this signature.
        let error = unsafe { std::mem::transmute::<*mut c_void, LastError>(self.symbol("shim_error")) };
        // SAFETY: text with a terminating zero, valid until the next launch.
        unsafe { CStr::from_ptr(error()) }.to_string_lossy().into_owned()
    }

    fn symbol(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).unwrap();
        // SAFETY: the handle stays open, and the name has a terminating zero.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!symbol.is_null(), "{name:?} is not in the library");
        symbol
    }
}

/// Compiles a source with the shim, or loads the library compiled from the same text earlier.
pub fn compile_text(name: &str, source: &str, kernels: &[&str]) -> Library {
    let (shim, touches) = (include_str!("shim.h"), include_str!("touches.h"));
    let mut text = format!("#define PLIMSOLL_TOUCHES\n{shim}\n{touches}\n{source}\n");
    for kernel in kernels {
        text += &format!(
            "extern \"C\" int launch_{kernel}(const unsigned* grid, unsigned block, unsigned shared_bytes, \
             void* const* arguments, int reverse) {{ \
             return shim::launch({kernel}, grid, block, shared_bytes, arguments, reverse); }}\n"
        );
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda_shim");
    std::fs::create_dir_all(&folder).unwrap();
    let (cpp, library) = (folder.join(format!("{name}.cpp")), folder.join(format!("{name}.so")));
    if !library.exists() || std::fs::read_to_string(&cpp).ok().as_deref() != Some(&text) {
        compile(&cpp, &text, &library);
    }
    let path = CString::new(library.to_str().unwrap()).unwrap();
    // SAFETY: loads the library that was just compiled; it has no initializers.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!handle.is_null(), "{library:?} does not load");
    Library(handle)
}

fn compile(cpp: &PathBuf, text: &str, library: &PathBuf) {
    let (object, linked) = (library.with_extension("o"), library.with_extension("new"));
    std::fs::write(cpp, text).unwrap();
    let run = |words: &[&str], to: &Path, from: &Path| {
        let done = Command::new("g++").args(words).arg("-o").args([to, from]).output().expect("g++ runs");
        // Remove the text, so that a failed compilation is not taken for a successful one.
        if !done.status.success() {
            std::fs::remove_file(cpp).unwrap();
            panic!("{}", String::from_utf8_lossy(&done.stderr));
        }
    };
    // Calls before each memory access, to functions in `touches.h`.
    let instrumented = ["-fsanitize=thread", "-fsanitize=alignment", "-fno-gnu-unique"];
    let plain = [
        "-std=c++17",
        "-ftls-model=local-dynamic",
        "-mtls-dialect=gnu2",
        "-O1",
        "-march=native",
        "-fno-strict-aliasing",
        "-U_FORTIFY_SOURCE",
        "-w",
        "-fPIC",
        "-c",
    ];
    run(&[&plain[..], &instrumented[..]].concat(), &object, cpp);
    run(&["-shared", "-Wl,-Bsymbolic"], &linked, &object);
    std::fs::rename(linked, library).unwrap();
}

fn compile_unit(unit: Unit) -> Library {
    // Units that differ in tile sizes have the same name, and the loader knows libraries by their path.
    let (source, mut hash) = (unit.source(), DefaultHasher::new());
    source.hash(&mut hash);
    compile_text(&format!("{}-{:016x}", unit.name(), hash.finish()), &source, unit.family().kernels())
}

fn library_of(unit: Unit) -> Arc<Library> {
    static LIBRARIES: Mutex<BTreeMap<Unit, Arc<Library>>> = Mutex::new(BTreeMap::new());
    let mut libraries = LIBRARIES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let load = || Arc::new(compile_unit(unit));
    libraries.entry(unit).or_insert_with(load).clone()
}

/// Guard bytes on both sides of a tensor, and their value: NaN in every float type.
const GUARD_BYTES: usize = 4096;
const GUARD_BYTE: u8 = 0xff;

/// A tensor between guard bytes.
struct Tensor {
    kind: Kind,
    /// 16-byte elements, so that the first tensor element is aligned as on a GPU.
    memory: Vec<u128>,
    /// Byte offsets of the tensor's start and end.
    first: usize,
    end: usize,
}

impl Tensor {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.memory)
    }

    fn address(&self) -> Address {
        self.memory.as_ptr() as Address + self.first as Address
    }
}

/// Tensors in memory, and the kernels that run on them.
pub struct Gpu {
    /// Elements by which tensors are shifted from 16-byte alignment.
    pub shift: usize,
    tensors: HashMap<Address, Tensor>,
}

impl Gpu {
    pub fn new(shift: usize) -> Gpu {
        Gpu { shift, tensors: HashMap::new() }
    }

    /// Allocates a tensor filled with NaN, or −1 for integers.
    pub fn allocate(&mut self, kind: Kind, elements: usize) -> Address {
        let first = GUARD_BYTES + self.shift * kind.bytes();
        let end = first + elements * kind.bytes();
        let memory = vec![u128::MAX; (end + GUARD_BYTES).div_ceil(16)];
        let tensor = Tensor { kind, memory, first, end };
        let address = tensor.address();
        self.tensors.insert(address, tensor);
        address
    }

    pub fn put(&mut self, kind: Kind, values: &[f64]) -> Address {
        let address = self.allocate(kind, values.len());
        self.set(address, values);
        address
    }

    /// Sets all elements of a tensor.
    pub fn set(&mut self, address: Address, values: &[f64]) {
        let tensor = self.tensors.get_mut(&address).unwrap();
        let (kind, range) = (tensor.kind, tensor.first..tensor.end);
        let bytes: Vec<u8> = values.iter().flat_map(|x| kind.write(*x)).collect();
        bytemuck::cast_slice_mut::<u128, u8>(&mut tensor.memory)[range].copy_from_slice(&bytes);
    }

    pub fn put_integers(&mut self, values: &[i32]) -> Address {
        self.put(Kind::I32, &values.iter().map(|x| f64::from(*x)).collect::<Vec<_>>())
    }

    pub fn get(&self, address: Address) -> Vec<f64> {
        let tensor = &self.tensors[&address];
        let bytes = &tensor.bytes()[tensor.first..tensor.end];
        bytes.chunks_exact(tensor.kind.bytes()).map(|bytes| tensor.kind.read(bytes)).collect()
    }

    pub fn get_integers(&self, address: Address) -> Vec<i32> {
        self.get(address).iter().map(|x| *x as i32).collect()
    }

    /// Runs launches in order.
    #[track_caller]
    pub fn run(&mut self, launches: &[Launch]) {
        for launch in launches {
            let library = library_of(launch.unit);
            let Launch { kernel, grid, block, shared_bytes, arguments, .. } = launch;
            self.try_run(&library, kernel, *grid, *block, *shared_bytes, arguments)
                .unwrap_or_else(|wrong| panic!("{kernel} of {}: {wrong}", launch.unit.name()));
        }
    }

    /// Runs a kernel twice on the same memory, with threads in order and in reverse.
    ///
    /// # Errors
    /// Returns a failed launch, an access outside a tensor, or a result that depends on the thread order.
    pub fn try_run(
        &mut self,
        library: &Library,
        kernel: &str,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        arguments: &[Argument],
    ) -> Result<(), String> {
        library.guard(self.tensors.values());
        let before: HashMap<Address, Vec<u128>> = self.snapshot();
        let mut results = Vec::new();
        for reverse in [0, 1] {
            for (address, memory) in &before {
                self.tensors.get_mut(address).unwrap().memory.copy_from_slice(memory);
            }
            let pointers: Vec<*const c_void> = arguments.iter().map(Argument::pointer).collect();
            // SAFETY: the entry reads three words of the grid, and as many arguments as the kernel has; the caller's
            // table agrees with them. The kernel writes to tensors of `self`.
            let code = unsafe { library.entry(kernel)(grid.as_ptr(), block, shared_bytes, pointers.as_ptr(), reverse) };
            if code != 0 {
                return Err(format!("the launch failed: {}", library.error()));
            }
            for tensor in self.tensors.values() {
                let bytes = tensor.bytes();
                if bytes[..tensor.first].iter().chain(&bytes[tensor.end..]).any(|byte| *byte != GUARD_BYTE) {
                    return Err("a kernel wrote outside a tensor".into());
                }
            }
            results.push(self.snapshot());
        }
        if results[0] == results[1] { Ok(()) } else { Err("the result depends on the order of threads".into()) }
    }

    fn snapshot(&self) -> HashMap<Address, Vec<u128>> {
        self.tensors.iter().map(|(address, tensor)| (*address, tensor.memory.clone())).collect()
    }
}
