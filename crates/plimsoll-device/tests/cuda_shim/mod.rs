//! Compiles units against `shim.h`, holds memory that notices what is written beside it, and runs
//! launches in two orders of threads.

#![allow(dead_code, reason = "each test file uses its part")]

use half::{bf16, f16};
use plimsoll_device::cuda::kernels::launch::{Address, Argument, Launch};
use plimsoll_device::cuda::kernels::{Real, Unit};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

/// The type of a tensor's elements.
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
            Kind::Bf16 => bf16::from_f32(once(x)).to_le_bytes().to_vec(),
            Kind::F16 => f16::from_f32(once(x)).to_le_bytes().to_vec(),
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

    /// The nearest number that this type holds.
    pub fn rounded(self, x: f64) -> f64 {
        self.read(&self.write(x))
    }
}

/// `x` in 32 bits such that rounding it again, to 16, is as rounding it once: of the two neighbours of
/// an inexact one, the odd one.
fn once(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || x.is_nan() || near.to_bits() & 1 == 1 {
        return near;
    }
    let other = if f64::from(near) < x { near.next_up() } else { near.next_down() };
    if other.is_infinite() { near } else { other }
}

/// A unit, compiled and loaded.
pub struct Library(*mut c_void);

// SAFETY: a handle of the dynamic loader, which may be used from any thread; the shim's state is per
// thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

type ErrorOf = unsafe extern "C" fn() -> *const c_char;
type Entry = unsafe extern "C" fn(*const c_uint, c_uint, c_uint, *const *const c_void, c_int) -> c_int;

impl Library {
    fn entry(&self, kernel: &str) -> Entry {
        // SAFETY: `compile_text` defines each `launch_…` with this signature.
        unsafe { std::mem::transmute::<*mut c_void, Entry>(self.symbol(&format!("launch_{kernel}"))) }
    }

    /// What went wrong in the last launch of this thread that failed.
    fn error(&self) -> String {
        // SAFETY: shim.h defines it so.
        let error = unsafe { std::mem::transmute::<*mut c_void, ErrorOf>(self.symbol("shim_error")) };
        // SAFETY: text with a zero at its end, until the next launch.
        unsafe { CStr::from_ptr(error()) }.to_string_lossy().into_owned()
    }

    fn symbol(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).unwrap();
        // SAFETY: the handle is open for good, the name ends with a zero.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!symbol.is_null(), "{name:?} is not in the library");
        symbol
    }
}

/// Compiles a source with the shim, or takes what was compiled from the same text before.
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
    // SAFETY: loads what was just compiled; it has no initialisers.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!handle.is_null(), "{library:?} does not load");
    Library(handle)
}

fn compile(cpp: &PathBuf, text: &str, library: &PathBuf) {
    let (object, fresh) = (library.with_extension("o"), library.with_extension("new"));
    std::fs::write(cpp, text).unwrap();
    let run = |words: &[&str], to: &Path, from: &Path| {
        let done = Command::new("g++").args(words).arg("-o").args([to, from]).output().expect("g++ runs");
        // What did not compile must not be taken for compiled the next time.
        if !done.status.success() {
            std::fs::remove_file(cpp).unwrap();
            panic!("{}", String::from_utf8_lossy(&done.stderr));
        }
    };
    // The calls before each access; what they call is `touches.h`'s, not a library's.
    let watched = ["-fsanitize=thread", "-fsanitize=alignment", "-fno-gnu-unique"];
    let plain =
        ["-std=c++17", "-O1", "-march=native", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-w", "-fPIC", "-c"];
    run(&[&plain[..], &watched[..]].concat(), &object, cpp);
    run(&["-shared", "-Wl,-Bsymbolic"], &fresh, &object);
    std::fs::rename(fresh, library).unwrap();
}

fn library_of(unit: Unit) -> Arc<Library> {
    static LIBRARIES: Mutex<BTreeMap<Unit, Arc<Library>>> = Mutex::new(BTreeMap::new());
    let mut libraries = LIBRARIES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let load = || Arc::new(compile_text(&unit.name(), &unit.source(), unit.family().kernels()));
    libraries.entry(unit).or_insert_with(load).clone()
}

/// Bytes on both sides of a tensor, and what they hold: NaN in every type of floats.
const BESIDE: usize = 64;
const PATTERN: u8 = 0xff;

/// A tensor with its surroundings.
struct Tensor {
    kind: Kind,
    /// Of 16 bytes each, so that the first is aligned as on a GPU.
    memory: Vec<u128>,
    /// Where the tensor begins and ends, in bytes.
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

/// Memory, and the kernels that work on it.
pub struct Gpu {
    /// Elements by which tensors are shifted from where packs could be read.
    pub shift: usize,
    tensors: HashMap<Address, Tensor>,
}

impl Gpu {
    pub fn new(shift: usize) -> Gpu {
        Gpu { shift, tensors: HashMap::new() }
    }

    /// A tensor that holds nothing yet: NaN, or −1.
    pub fn room(&mut self, kind: Kind, elements: usize) -> Address {
        let first = BESIDE + self.shift * kind.bytes();
        let end = first + elements * kind.bytes();
        let memory = vec![u128::MAX; (end + BESIDE).div_ceil(16)];
        let tensor = Tensor { kind, memory, first, end };
        let address = tensor.address();
        self.tensors.insert(address, tensor);
        address
    }

    pub fn put(&mut self, kind: Kind, values: &[f64]) -> Address {
        let address = self.room(kind, values.len());
        self.set(address, values);
        address
    }

    /// All elements of a tensor.
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

    /// Runs launches one after the other.
    #[track_caller]
    pub fn run(&mut self, launches: &[Launch]) {
        for launch in launches {
            let library = library_of(launch.unit);
            let Launch { kernel, grid, block, shared_bytes, arguments, .. } = launch;
            self.try_run(&library, kernel, *grid, *block, *shared_bytes, arguments)
                .unwrap_or_else(|wrong| panic!("{kernel} of {}: {wrong}", launch.unit.name()));
        }
    }

    /// Runs a kernel twice from the same memory, threads in order and in reverse.
    ///
    /// # Errors
    /// What went wrong: the launch, a write beside a tensor, or a result that depends on the order.
    pub fn try_run(
        &mut self,
        library: &Library,
        kernel: &str,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        arguments: &[Argument],
    ) -> Result<(), String> {
        let before: HashMap<Address, Vec<u128>> = self.memory();
        let mut results = Vec::new();
        for reverse in [0, 1] {
            for (address, memory) in &before {
                self.tensors.get_mut(address).unwrap().memory.copy_from_slice(memory);
            }
            let pointers: Vec<*const c_void> = arguments.iter().map(Argument::pointer).collect();
            // SAFETY: the entry reads three words of the grid and as many arguments as the kernel has,
            // which the caller's table agrees on; the kernel writes to tensors of `self`.
            let code = unsafe { library.entry(kernel)(grid.as_ptr(), block, shared_bytes, pointers.as_ptr(), reverse) };
            if code != 0 {
                return Err(format!("the launch failed: {}", library.error()));
            }
            for tensor in self.tensors.values() {
                let bytes = tensor.bytes();
                if bytes[..tensor.first].iter().chain(&bytes[tensor.end..]).any(|byte| *byte != PATTERN) {
                    return Err("something was written beside a tensor".into());
                }
            }
            results.push(self.memory());
        }
        if results[0] == results[1] { Ok(()) } else { Err("the result depends on the order of threads".into()) }
    }

    fn memory(&self) -> HashMap<Address, Vec<u128>> {
        self.tensors.iter().map(|(address, tensor)| (*address, tensor.memory.clone())).collect()
    }
}
