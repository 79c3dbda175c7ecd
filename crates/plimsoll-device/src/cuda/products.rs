//! Matrix products by cuBLASLt: how a product of row-major matrices is said to a library that knows columns, and
//! which of its algorithms does it.
//!
//! **Arithmetic.** f32 products are `CUBLAS_COMPUTE_32F`: no TF32, no emulation. bf16 products sum in f32, and round
//! once, when they are stored. An algorithm is taken only if it has one order of summation: no reduction in place and
//! none in the type of the output, so that the same GPU gives the same bits every time.
//!
//! **The algorithm is a part of the plan.** For each distinct product, what the library proposes for the planned
//! workspace is timed in the planned arena when the device is opened, and the quickest is kept ([`Algorithms`]): with
//! plan and checkpoint it is written down, and a run that goes on takes it again. Where the library or the GPU is
//! another one, it is chosen anew.

use super::driver::{Address, Context, CudaError, Event, Stream, library};
use super::headers::{Structure, numbers, structure};
use plimsoll_core::{Algorithms, DType};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;

/// What every function of cuBLASLt returns.
type Status = c_int;
/// Something of cuBLASLt's that is only passed on.
type Handle = *mut c_void;
/// `cublasLtMatmulAlgo_t`: 64 bytes that may be copied, and kept for the same version of the library.
type Words = [u64; 8];

library! {
    /// The functions of cuBLASLt that are called, and no others.
    Library {
        fn cublasLtGetVersion() -> usize;
        fn cublasLtGetStatusName(status: Status) -> *const c_char;
        fn cublasLtCreate(library: *mut Handle) -> Status;
        fn cublasLtDestroy(library: Handle) -> Status;
        fn cublasLtMatmulDescCreate(product: *mut Handle, compute: c_uint, scale: c_uint) -> Status;
        fn cublasLtMatmulDescSetAttribute(
            product: Handle, attribute: c_uint, value: *const c_void, bytes: usize,
        ) -> Status;
        fn cublasLtMatmulDescDestroy(product: Handle) -> Status;
        fn cublasLtMatrixLayoutCreate(layout: *mut Handle, kind: c_uint, rows: u64, columns: u64, leading: i64) -> Status;
        fn cublasLtMatrixLayoutDestroy(layout: Handle) -> Status;
        fn cublasLtMatmulPreferenceCreate(preference: *mut Handle) -> Status;
        fn cublasLtMatmulPreferenceSetAttribute(
            preference: Handle, attribute: c_uint, value: *const c_void, bytes: usize,
        ) -> Status;
        fn cublasLtMatmulPreferenceDestroy(preference: Handle) -> Status;
        fn cublasLtMatmulAlgoGetHeuristic(
            library: Handle, product: Handle, a: Handle, b: Handle, c: Handle, d: Handle, preference: Handle,
            asked: c_int, found: *mut Found, count: *mut c_int,
        ) -> Status;
        fn cublasLtMatmulAlgoCheck(
            library: Handle, product: Handle, a: Handle, b: Handle, c: Handle, d: Handle,
            algorithm: *const Words, found: *mut Found,
        ) -> Status;
        fn cublasLtMatmul(
            library: Handle, product: Handle, alpha: *const c_void,
            a: *const c_void, a_layout: Handle, b: *const c_void, b_layout: Handle, beta: *const c_void,
            c: *const c_void, c_layout: Handle, d: *mut c_void, d_layout: Handle,
            algorithm: *const Words, workspace: *mut c_void, workspace_bytes: usize, stream: Handle,
        ) -> Status;
    }
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Found {
    algorithm: Words,
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

/// What cublasLt.h calls its fields.
pub(super) const STRUCTURES: &[Structure] = &[structure!(cublasLtMatmulHeuristicResult_t, Found {
    "algo" => algorithm: Words, "workspaceSize" => workspace_bytes: usize, "state" => state: Status,
    "wavesCount" => waves: f32, "reserved" => reserved: [c_int; 4],
})];

numbers! {
    /// Values of the enumerations in cublasLt.h, cublas_api.h and library_types.h.
    NUMBERS {
        CUBLAS_COMPUTE_32F => COMPUTE_32F: c_uint = 68;
        CUDA_R_32F => R_32F: c_uint = 0;
        CUDA_R_16BF => R_16BF: c_uint = 14;
        CUBLASLT_MATMUL_DESC_TRANSA => DESC_TRANSA: c_uint = 3;
        CUBLASLT_MATMUL_DESC_TRANSB => DESC_TRANSB: c_uint = 4;
        CUBLASLT_MATMUL_DESC_EPILOGUE => DESC_EPILOGUE: c_uint = 7;
        CUBLASLT_MATMUL_DESC_BIAS_POINTER => DESC_BIAS_POINTER: c_uint = 8;
        CUBLASLT_EPILOGUE_BIAS => EPILOGUE_BIAS: c_uint = 4;
        CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES => PREFER_WORKSPACE: c_uint = 1;
        CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK => PREFER_REDUCTION: c_uint = 3;
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES => PREFER_ALIGNMENT_A: c_uint = 5;
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES => PREFER_ALIGNMENT_B: c_uint = 6;
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES => PREFER_ALIGNMENT_C: c_uint = 7;
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES => PREFER_ALIGNMENT_D: c_uint = 8;
        /// Parts are summed in the workspace, in the type that is computed in, and in a fixed order.
        CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE => REDUCTION_COMPUTE_TYPE: u32 = 2;
        /// The library was refused memory, as a rule for a kernel that it loads when it is first used.
        CUBLAS_STATUS_ALLOC_FAILED => ALLOC_FAILED: Status = 3;
    }
}

/// Proposals of the library that are timed.
const PROPOSALS: usize = 8;
/// How often each is timed.
const TIMINGS: usize = 3;
/// A later proposal has to be this much quicker than the best before it: times scatter, and the library's order is
/// a good guess.
const QUICKER: f64 = 0.97;
/// What takes so many times as long as the best before it is not timed again.
const HOPELESS: f64 = 2.0;
/// A timing lasts about this long, of a product that is shorter by repeating it.
const SECONDS_TIMED: f64 = 2e-4;
/// The most repeats.
const REPEATS_MAX: f64 = 16.0;

/// What distinguishes a product from another: sizes as in `OpKind::Product`, types, and where its operands may stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shape {
    /// Rows of the result.
    pub m: u64,
    /// Columns of the result.
    pub n: u64,
    /// Inner size.
    pub k: u64,
    /// Whether `a` is stored `[k,m]`.
    pub a_transposed: bool,
    /// Whether `b` is stored `[n,k]`.
    pub b_transposed: bool,
    /// Elements from one stored row of `a` to the next.
    pub a_stride: u64,
    /// The same of what is added.
    pub added_stride: u64,
    /// The same of the result.
    pub out_stride: u64,
    /// Of `a` and `b`.
    pub input: DType,
    /// Of the result, and of what is added.
    pub output: DType,
    /// Whether a row is added to every row.
    pub bias: bool,
    /// Whether a matrix is added: a residual, or what stands there.
    pub adds: bool,
    /// Bytes that the addresses of a, b, what is added, and the result are multiples of: powers of two up to 256.
    pub alignment: [u32; 4],
    /// Bytes of the workspace.
    pub workspace_bytes: u64,
}

/// The operands of one product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operands {
    /// What the product is multiplied with.
    pub scale: f32,
    /// `[m,k]`, or `[k,m]` if transposed.
    pub a: Address,
    /// `[k,n]`, or `[n,k]` if transposed.
    pub b: Address,
    /// `[m,n]`, added where the shape says so; may be the result.
    pub added: Address,
    /// `[m,n]`.
    pub out: Address,
    /// `[n]`; 0 where there is none.
    pub bias: Address,
    /// Scratch.
    pub workspace: Address,
}

/// The largest power of two, up to 256, that an address is a multiple of.
fn alignment(address: Address) -> u32 {
    1 << address.trailing_zeros().min(8)
}

impl Operands {
    /// What [`Shape::alignment`] says about them.
    pub fn alignments(&self) -> [u32; 4] {
        [self.a, self.b, self.added, self.out].map(alignment)
    }
}

impl Shape {
    /// The product in words: `2048×1024×384 nt bf16→f32 +bias +c @256,256,256,256 in 33554432`; strides where rows
    /// are parts of longer ones.
    pub fn name(&self) -> String {
        let letter = |transposed: bool| if transposed { 't' } else { 'n' };
        let (a, b) = (letter(self.a_transposed), letter(self.b_transposed));
        let bias = if self.bias { " +bias" } else { "" };
        let adds = if self.adds { " +c" } else { "" };
        let dense = (if self.a_transposed { self.m } else { self.k }, self.n, self.n);
        let strides = if (self.a_stride, self.added_stride, self.out_stride) == dense {
            String::new()
        } else {
            format!(" rows {},{},{}", self.a_stride, self.added_stride, self.out_stride)
        };
        let [first, second, third, fourth] = self.alignment;
        format!(
            "{}×{}×{} {a}{b}{strides} {}→{}{bias}{adds} @{first},{second},{third},{fourth} in {}",
            self.m, self.n, self.k, self.input, self.output, self.workspace_bytes
        )
    }
}

/// A matrix as a library of columns sees it: rows, columns, and elements from one column to the next.
type ColumnMajor = (u64, u64, u64);

/// A product as such a library is told it.
///
/// A row-major matrix is, column by column, its own transpose. So out = A·B is said as outᵀ = Bᵀ·Aᵀ: `b` comes first,
/// and what is stored transposed stays what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Told {
    /// The first matrix, which is `b`, and whether it is turned.
    first: (ColumnMajor, bool),
    /// The second matrix, which is `a`.
    second: (ColumnMajor, bool),
    /// What is added.
    added: ColumnMajor,
    /// The result.
    out: ColumnMajor,
}

fn told(shape: &Shape) -> Told {
    let Shape { m, n, k, a_transposed, b_transposed, a_stride, added_stride, out_stride, .. } = *shape;
    Told {
        first: if b_transposed { ((k, n, k), true) } else { ((n, k, n), false) },
        second: if a_transposed { ((m, k, a_stride), true) } else { ((k, m, a_stride), false) },
        added: (n, m, added_stride),
        out: (n, m, out_stride),
    }
}

fn to_hex(words: Words) -> String {
    words.map(|word| format!("{word:016x}")).concat()
}

fn from_hex(text: &str) -> Option<Words> {
    let mut words = [0; 8];
    if text.len() != 128 || !text.is_ascii() {
        return None;
    }
    for (index, word) in words.iter_mut().enumerate() {
        *word = u64::from_str_radix(&text[16 * index..16 * (index + 1)], 16).ok()?;
    }
    Some(words)
}

/// A product with its algorithm, ready to be done.
struct Ready {
    description: Description,
    algorithm: Words,
    /// Where the library does not take the bias along: a kernel adds it.
    bias_by_kernel: bool,
}

/// The products of a device.
pub struct Products {
    library: Arc<Library>,
    context: Arc<Context>,
    handle: Handle,
    ready: BTreeMap<Shape, Ready>,
    stored: Algorithms,
    /// Whether something was chosen that was not stored.
    chose: bool,
}

// SAFETY: the library's handle and descriptions belong to no thread (its manual calls it thread-safe), `Products` has its
// own, and whoever calls enters the context first.
unsafe impl Send for Products {}

impl Products {
    /// Opens the library in a context that is current; algorithms in `stored` are used again if they are of the same
    /// library and GPU.
    ///
    /// # Errors
    /// What the library says.
    pub fn new(
        library: &Arc<Library>,
        context: &Arc<Context>,
        stored: Option<&Algorithms>,
    ) -> Result<Products, CudaError> {
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        library.check("open", unsafe { (library.cublasLtCreate)(&mut handle) })?;
        // SAFETY: takes nothing.
        let version = unsafe { (library.cublasLtGetVersion)() } as u64;
        let gpu = context.gpu();
        let chosen = BTreeMap::new();
        let fresh = Algorithms { library: version, gpu: gpu.name.clone(), driver: gpu.driver_version, chosen };
        let same = stored.filter(|stored| stored.of_the_same(&fresh));
        Ok(Products {
            library: library.clone(),
            context: context.clone(),
            handle,
            ready: BTreeMap::new(),
            stored: same.cloned().unwrap_or(fresh),
            chose: false,
        })
    }

    /// The algorithms of all products that were prepared, and whether any was chosen now: then bits may differ from
    /// those of a run that had others.
    pub fn algorithms(&self) -> (Algorithms, bool) {
        let chosen = self.ready.iter().map(|(shape, ready)| (shape.name(), to_hex(ready.algorithm))).collect();
        (Algorithms { chosen, ..self.stored.clone() }, self.chose)
    }

    /// Whether a kernel has to add the bias of a product.
    ///
    /// # Panics
    /// Where it was not prepared.
    pub fn bias_by_kernel(&self, shape: &Shape) -> bool {
        self.ready[shape].bias_by_kernel
    }

    /// Chooses an algorithm, unless that was done before: the stored one, or the quickest of those that the library
    /// proposes, timed on `operands`, whose result and workspace are overwritten. Where no stream is given, nothing is
    /// timed: the first that is proposed.
    ///
    /// # Errors
    /// Where the library can do no such product, or the device fails.
    ///
    /// # Safety
    /// The operands are memory of the device as large as the shape says, and nothing else is at work in them.
    pub unsafe fn prepare(
        &mut self,
        shape: Shape,
        operands: &Operands,
        timed_on: Option<&Stream>,
    ) -> Result<(), CudaError> {
        if self.ready.contains_key(&shape) {
            return Ok(());
        }
        let name = shape.name();
        let known = self.stored.chosen.get(&name).and_then(|text| from_hex(text));
        let mut says = String::from("it knows none");
        // With the bias taken along, else without it.
        for bias_by_kernel in [false, true] {
            if bias_by_kernel && !shape.bias {
                break;
            }
            let description = Description::new(&self.library, &Shape { bias: shape.bias && !bias_by_kernel, ..shape })?;
            description.set_bias(operands.bias)?;
            let stored = known.filter(|words| self.fits(&description, words, shape.workspace_bytes));
            let algorithm = match stored {
                Some(words) => Some(words),
                None => {
                    let chosen = self.proposals(&description, &shape).and_then(|proposals| match timed_on {
                        // SAFETY: as the caller promises.
                        Some(stream) => unsafe { self.quickest(&description, &shape, operands, stream, &proposals) },
                        None => Ok(proposals.first().copied()),
                    });
                    match chosen {
                        Err(CudaError::Product { name, .. }) => {
                            says = name;
                            None
                        }
                        chosen => chosen?,
                    }
                }
            };
            if let Some(algorithm) = algorithm {
                self.chose |= stored.is_none();
                self.ready.insert(shape, Ready { description, algorithm, bias_by_kernel });
                return Ok(());
            }
        }
        // The library passes on that something failed, the driver knows what: a device may be lost.
        self.context.synchronize()?;
        Err(CudaError::Product { what: "propose an algorithm", name: says, product: format!(" for {name}") })
    }

    /// Puts a product on a stream.
    ///
    /// # Errors
    /// What the library says.
    ///
    /// # Panics
    /// Where it was not prepared.
    ///
    /// # Safety
    /// The operands are memory of the device as large as the shape says, stand as it says, and are free for this in the
    /// order of `stream`.
    pub unsafe fn run(&self, shape: &Shape, operands: &Operands, stream: &Stream) -> Result<(), CudaError> {
        let ready = &self.ready[shape];
        if shape.bias && !ready.bias_by_kernel {
            ready.description.set_bias(operands.bias)?;
        }
        // SAFETY: as the caller promises.
        let status = unsafe { self.start(&ready.description, shape, operands, &ready.algorithm, stream) };
        let done = self.library.check_product("multiply", status, shape);
        if matches!(done, Err(CudaError::Product { .. })) {
            // The library passes on that something failed, the driver knows what: a device may be lost.
            self.context.synchronize()?;
        }
        done
    }

    /// Whether the library takes an algorithm for a product, within the workspace.
    fn fits(&self, description: &Description, words: &Words, workspace_bytes: u64) -> bool {
        let (mut found, [a, b, c, d]) = (Found::default(), description.layouts);
        // SAFETY: all handles live; reads 64 bytes and writes one structure.
        let status = unsafe {
            let check = self.library.cublasLtMatmulAlgoCheck;
            check(self.handle, description.product, a, b, c, d, words, &mut found)
        };
        status == 0 && found.workspace_bytes as u64 <= workspace_bytes
    }

    /// What the library proposes, the most promising first; nothing where it can do no such product.
    fn proposals(&self, description: &Description, shape: &Shape) -> Result<Vec<Words>, CudaError> {
        let preference = Preference::new(&self.library)?;
        preference.set(PREFER_WORKSPACE, &shape.workspace_bytes)?;
        preference.set(PREFER_REDUCTION, &REDUCTION_COMPUTE_TYPE)?;
        // First and second change places, as in `told`.
        let [a, b, c, d] = shape.alignment;
        let alignments =
            [(PREFER_ALIGNMENT_A, b), (PREFER_ALIGNMENT_B, a), (PREFER_ALIGNMENT_C, c), (PREFER_ALIGNMENT_D, d)];
        for (attribute, bytes) in alignments {
            preference.set(attribute, &bytes)?;
        }
        let (mut found, mut count) = ([Found::default(); PROPOSALS], 0);
        let [a, b, c, d] = description.layouts;
        // SAFETY: all handles live; writes at most as many structures as it is asked for, and one integer.
        let status = unsafe {
            let ask = self.library.cublasLtMatmulAlgoGetHeuristic;
            let (room, asked) = (found.as_mut_ptr(), PROPOSALS as c_int);
            ask(self.handle, description.product, a, b, c, d, preference.handle, asked, room, &mut count)
        };
        self.library.check_product("propose an algorithm", status, shape)?;
        let count = (count.max(0) as usize).min(PROPOSALS);
        let usable = |found: &&Found| found.state == 0 && found.workspace_bytes as u64 <= shape.workspace_bytes;
        Ok(found[..count].iter().filter(usable).map(|found| found.algorithm).collect())
    }

    /// The quickest of the proposals; among nearly equal ones the first. Where all of them are refused, the last refusal.
    ///
    /// # Safety
    /// As for [`Products::prepare`].
    unsafe fn quickest(
        &self,
        description: &Description,
        shape: &Shape,
        operands: &Operands,
        stream: &Stream,
        proposals: &[Words],
    ) -> Result<Option<Words>, CudaError> {
        let [start, end] = [Event::timed(&self.context)?, Event::timed(&self.context)?];
        let (mut best, mut refused): (Option<(f64, Words)>, _) = (None, None);
        for words in proposals {
            let time = |times: u32| -> Result<f64, CudaError> {
                start.record(stream)?;
                for _ in 0..times {
                    // SAFETY: as the caller promises.
                    let status = unsafe { self.start(description, shape, operands, words, stream) };
                    self.library.check_product("try an algorithm", status, shape)?;
                }
                end.record(stream)?;
                end.synchronize()?;
                Ok(end.seconds_since(&start)? / f64::from(times))
            };
            // The first time loads the kernel. What the library proposes and then refuses is left out.
            match time(1) {
                Err(error @ CudaError::Product { .. }) => {
                    refused = Some(error);
                    continue;
                }
                first => first?,
            };
            let once = time(1)?;
            if best.is_some_and(|(seconds, _)| once > HOPELESS * seconds) {
                continue;
            }
            // Short ones are timed together: events tell half a microsecond.
            let at_once = (SECONDS_TIMED / once).clamp(1.0, REPEATS_MAX) as u32;
            let mut times = [0.0; TIMINGS];
            for seconds in &mut times {
                *seconds = time(at_once)?;
            }
            times.sort_unstable_by(f64::total_cmp);
            let median = times[TIMINGS / 2];
            if best.is_none_or(|(seconds, _)| median < QUICKER * seconds) {
                best = Some((median, *words));
            }
        }
        match (best, refused) {
            (None, Some(refused)) => Err(refused),
            (best, _) => Ok(best.map(|(_, words)| words)),
        }
    }

    /// # Safety
    /// As for [`Products::run`].
    unsafe fn start(
        &self,
        description: &Description,
        shape: &Shape,
        operands: &Operands,
        algorithm: &Words,
        stream: &Stream,
    ) -> Status {
        let Operands { scale, a, b, added, out, workspace, .. } = *operands;
        let [first, second, addend, result] = description.layouts;
        let beta = if shape.adds { 1.0f32 } else { 0.0 };
        let added = if shape.adds { added } else { out };
        let at = |address: Address| address as *const c_void;
        // SAFETY: as the caller promises; the two factors are read before the call returns (pointer mode host).
        unsafe {
            (self.library.cublasLtMatmul)(
                self.handle,
                description.product,
                ptr::from_ref(&scale).cast(),
                at(b),
                first,
                at(a),
                second,
                ptr::from_ref(&beta).cast(),
                at(added),
                addend,
                at(out).cast_mut(),
                result,
                algorithm,
                at(workspace).cast_mut(),
                shape.workspace_bytes as usize,
                stream.handle(),
            )
        }
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        self.ready.clear();
        // SAFETY: ours, and not used after this.
        unsafe { (self.library.cublasLtDestroy)(self.handle) };
    }
}

impl Library {
    fn check(&self, what: &'static str, status: Status) -> Result<(), CudaError> {
        self.judge(what, status, String::new)
    }

    fn check_product(&self, what: &'static str, status: Status, shape: &Shape) -> Result<(), CudaError> {
        self.judge(what, status, || format!(" for {}", shape.name()))
    }

    fn judge(&self, what: &'static str, status: Status, product: impl Fn() -> String) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        if status == ALLOC_FAILED {
            return Err(CudaError::Memory { what: what.into() });
        }
        // SAFETY: takes a number and gives a string that lives as long as the library, or null.
        let name = unsafe { (self.cublasLtGetStatusName)(status) };
        let name = if name.is_null() {
            format!("status {status}")
        } else {
            // SAFETY: not null, with a zero at its end.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        Err(CudaError::Product { what, name, product: product() })
    }
}

/// A product as the library has it: its description, and the layouts of its first and second matrix, of what is added
/// and of the result.
struct Description {
    library: Arc<Library>,
    product: Handle,
    layouts: [Handle; 4],
}

fn kind(dtype: DType) -> c_uint {
    if dtype == DType::Bf16 { R_16BF } else { R_32F }
}

impl Description {
    fn new(library: &Arc<Library>, shape: &Shape) -> Result<Description, CudaError> {
        // What is still null is not destroyed.
        let mut made =
            Description { library: library.clone(), product: ptr::null_mut(), layouts: [ptr::null_mut(); 4] };
        // SAFETY: writes one handle.
        let status = unsafe { (library.cublasLtMatmulDescCreate)(&mut made.product, COMPUTE_32F, R_32F) };
        library.check("describe a product", status)?;
        let Told { first, second, added, out } = told(shape);
        for (attribute, turned) in [(DESC_TRANSA, first.1), (DESC_TRANSB, second.1)] {
            made.set(attribute, &c_int::from(turned))?;
        }
        if shape.bias {
            made.set(DESC_EPILOGUE, &EPILOGUE_BIAS)?;
        }
        let [input, output] = [shape.input, shape.output];
        let matrices = [(input, first.0), (input, second.0), (output, added), (output, out)];
        for (layout, (dtype, (rows, columns, leading))) in made.layouts.iter_mut().zip(matrices) {
            // SAFETY: writes one handle.
            let status =
                unsafe { (library.cublasLtMatrixLayoutCreate)(layout, kind(dtype), rows, columns, leading as i64) };
            library.check("describe a matrix", status)?;
        }
        Ok(made)
    }

    fn set<T: Copy>(&self, attribute: c_uint, value: &T) -> Result<(), CudaError> {
        // SAFETY: the handle lives; reads as many bytes as the value has.
        let status = unsafe {
            let set = self.library.cublasLtMatmulDescSetAttribute;
            set(self.product, attribute, ptr::from_ref(value).cast(), size_of::<T>())
        };
        self.library.check("describe a product", status)
    }

    /// The row that is added, for the next start.
    fn set_bias(&self, bias: Address) -> Result<(), CudaError> {
        if bias == 0 { Ok(()) } else { self.set(DESC_BIAS_POINTER, &bias) }
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: ours, and not used after this.
        unsafe {
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                (self.library.cublasLtMatrixLayoutDestroy)(layout);
            }
            if !self.product.is_null() {
                (self.library.cublasLtMatmulDescDestroy)(self.product);
            }
        }
    }
}

/// What an algorithm must keep to.
struct Preference {
    library: Arc<Library>,
    handle: Handle,
}

impl Preference {
    fn new(library: &Arc<Library>) -> Result<Preference, CudaError> {
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        library.check("take preferences", unsafe { (library.cublasLtMatmulPreferenceCreate)(&mut handle) })?;
        Ok(Preference { library: library.clone(), handle })
    }

    fn set<T: Copy>(&self, attribute: c_uint, value: &T) -> Result<(), CudaError> {
        // SAFETY: the handle lives; reads as many bytes as the value has.
        let status = unsafe {
            let set = self.library.cublasLtMatmulPreferenceSetAttribute;
            set(self.handle, attribute, ptr::from_ref(value).cast(), size_of::<T>())
        };
        self.library.check("take preferences", status)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: ours, and not used after this.
        unsafe { (self.library.cublasLtMatmulPreferenceDestroy)(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape(m: u64, n: u64, k: u64, a_transposed: bool, b_transposed: bool) -> Shape {
        Shape {
            m,
            n,
            k,
            a_transposed,
            b_transposed,
            a_stride: if a_transposed { m } else { k },
            added_stride: n,
            out_stride: n,
            input: DType::F32,
            output: DType::F32,
            bias: false,
            adds: false,
            alignment: [256; 4],
            workspace_bytes: 1 << 20,
        }
    }

    /// Element (row, column) of a matrix of columns, turned or not.
    fn at(matrix: &[f64], ((rows, columns, leading), turned): (ColumnMajor, bool), row: u64, column: u64) -> f64 {
        let (row, column) = if turned { (column, row) } else { (row, column) };
        assert!(row < rows && column < columns && leading >= rows);
        matrix[(row + column * leading) as usize]
    }

    proptest! {
        #[test]
        fn a_library_of_columns_is_told_the_product_of_rows_that_is_meant(
            (m, n, k) in (1u64..7, 1u64..7, 1u64..7), a_transposed: bool, b_transposed: bool,
            (more_a, more_out) in (0u64..3, 0u64..3)
        ) {
            let dense = shape(m, n, k, a_transposed, b_transposed);
            let (a_stride, out_stride) = (dense.a_stride + more_a, n + more_out);
            let shape = Shape { a_stride, out_stride, ..dense };
            let numbers = |count: u64, seed: u64| (0..count).map(|i| ((i * 7 + seed) % 11) as f64 - 5.0).collect::<Vec<_>>();
            let (a, b) = (numbers((m + k) * a_stride, 3), numbers(k * n, 8));
            let Told { first, second, added, out: (rows, columns, leading) } = told(&shape);
            prop_assert_eq!((rows, columns, leading), (n, m, out_stride));
            prop_assert_eq!(added, (n, m, n));
            for i in 0..m {
                for j in 0..n {
                    let of_a = |l: u64| a[if a_transposed { l * a_stride + i } else { i * a_stride + l } as usize];
                    let of_b = |l: u64| b[if b_transposed { j * k + l } else { l * n + j } as usize];
                    let meant: f64 = (0..k).map(|l| of_a(l) * of_b(l)).sum();
                    // Element (j, i) of the library's result stands where element (i, j) of ours does.
                    let told: f64 = (0..k).map(|l| at(&b, first, j, l) * at(&a, second, l, i)).sum();
                    prop_assert_eq!(meant, told);
                    prop_assert_eq!(j + i * leading, i * out_stride + j);
                }
            }
        }
    }

    #[test]
    fn an_algorithm_is_written_down_and_read_back() {
        let words = [1, u64::MAX, 0, 3, 0xdead_beef, 5, 6, 7];
        assert_eq!(from_hex(&to_hex(words)), Some(words));
        assert_eq!(from_hex("12"), None);
        assert_eq!(from_hex(&"x".repeat(128)), None);
        let chosen = BTreeMap::from([(shape(2, 3, 4, false, true).name(), to_hex(words))]);
        let algorithms = Algorithms { library: 130_200, gpu: "a gpu".into(), driver: 13_000, chosen };
        let text = serde_json::to_string(&algorithms).unwrap();
        assert_eq!(serde_json::from_str::<Algorithms>(&text).unwrap(), algorithms);
    }

    #[test]
    fn products_that_need_another_algorithm_have_another_name() {
        let plain = shape(2, 3, 4, false, true);
        let others = [
            Shape { bias: true, ..plain },
            Shape { adds: true, ..plain },
            Shape { input: DType::Bf16, ..plain },
            Shape { output: DType::Bf16, ..plain },
            Shape { a_transposed: true, ..plain },
            Shape { alignment: [256, 256, 256, 64], ..plain },
            Shape { workspace_bytes: 0, ..plain },
            Shape { out_stride: 5, ..plain },
        ];
        let mut names: Vec<String> = others.iter().map(Shape::name).collect();
        names.push(plain.name());
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 9);
    }

    #[test]
    fn alignment_is_that_of_the_address_up_to_256() {
        assert_eq!([0x7f00_0000u64, 0x1080, 0x1002, 0x3].map(alignment), [256, 128, 2, 1]);
        assert_eq!(size_of::<Found>(), 96);
    }
}
