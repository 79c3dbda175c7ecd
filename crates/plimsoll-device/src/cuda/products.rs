//! Matrix products by cuBLASLt: translation from row-major to column-major matrices, and the choice of an algorithm.
//!
//! **Arithmetic.** f32 products use `CUBLAS_COMPUTE_32F`: no TF32, no emulation. bf16 products accumulate in f32 and
//! round once, when they are stored. Only algorithms with a fixed order of summation are used: no reduction in place
//! and none in the output type. The same GPU therefore gives the same bits every time.
//!
//! **Algorithms are part of the plan.** When the device is opened, the library proposes algorithms for each distinct
//! product and its planned workspace. They are timed, and the fastest is kept ([`GemmAlgorithms`]). The choice is
//! stored with plan and checkpoint, and a resumed run uses it again. A different library, driver or GPU requires a new
//! choice.

mod description;

use self::description::{Description, Preference};
use super::abi::{Structure, library, numbers, structure};
use super::driver::{Address, Context, Event, Stream};
use crate::error::CudaError;
use plimsoll_core::{DType, GemmAlgorithms};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;

/// Return type of every cuBLASLt function.
type Status = c_int;
/// Opaque handle of a cuBLASLt object.
type Handle = *mut c_void;
/// `cublasLtMatmulAlgo_t`: 64 bytes that may be copied, and stored for the same library version.
type RawAlgorithm = [u64; 8];

library! {
    /// The functions of cuBLASLt that this crate calls.
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
            requested: c_int, found: *mut HeuristicResult, count: *mut c_int,
        ) -> Status;
        fn cublasLtMatmulAlgoCheck(
            library: Handle, product: Handle, a: Handle, b: Handle, c: Handle, d: Handle,
            algorithm: *const RawAlgorithm, found: *mut HeuristicResult,
        ) -> Status;
        fn cublasLtMatmul(
            library: Handle, product: Handle, alpha: *const c_void,
            a: *const c_void, a_layout: Handle, b: *const c_void, b_layout: Handle, beta: *const c_void,
            c: *const c_void, c_layout: Handle, d: *mut c_void, d_layout: Handle,
            algorithm: *const RawAlgorithm, workspace: *mut c_void, workspace_bytes: usize, stream: Handle,
        ) -> Status;
    }
}

/// `cublasLtMatmulHeuristicResult_t`: an algorithm that cuBLASLt proposes or has checked, with the workspace it needs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HeuristicResult {
    algorithm: RawAlgorithm,
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

/// Layouts of the structures above, with the names that structures and fields have in cublasLt.h.
pub(super) const STRUCTURES: &[Structure] = &[structure!(cublasLtMatmulHeuristicResult_t, HeuristicResult {
    "algo" => algorithm: RawAlgorithm, "workspaceSize" => workspace_bytes: usize, "state" => state: Status,
    "wavesCount" => waves: f32, "reserved" => reserved: [c_int; 4],
})];

numbers! {
    /// Values of enumerations in cublasLt.h, cublas_api.h and library_types.h that this crate uses.
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
        /// Reduction scheme of split-k products: sums are in the workspace, in the compute type, in a fixed order.
        CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE => REDUCTION_COMPUTE_TYPE: u32 = 2;
        /// Error code: the library was refused memory, usually for a kernel that it loads at first use.
        CUBLAS_STATUS_ALLOC_FAILED => ALLOC_FAILED: Status = 3;
    }
}

/// The most algorithms that cuBLASLt is asked to propose for one product.
const PROPOSALS_MAX: usize = 8;
/// Number of timings of each proposed algorithm; their median counts.
const TIMING_ROUNDS: usize = 3;
/// Share of the best time so far that a later proposal must stay below to be chosen. Timings scatter, and cuBLASLt
/// proposes the algorithm first that it expects to be the fastest.
const FASTER_RATIO: f64 = 0.97;
/// Multiple of the best time so far from which a proposed algorithm is given up after one timing.
const ABANDON_RATIO: f64 = 2.0;
/// Target duration of one timing, in seconds. Shorter products are repeated to reach it.
const TIMED_SECONDS_MIN: f64 = 2e-4;
/// The most repeats of a product in one timing.
const REPEATS_MAX: f64 = 16.0;

/// The properties of a matrix product on which the choice of its algorithm depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shape {
    /// Rows of `a` and of the result.
    pub m: u64,
    /// Columns of `b` and of the result.
    pub n: u64,
    /// Columns of `a` and rows of `b`.
    pub k: u64,
    /// Whether `a` is stored as `[k,m]` instead of `[m,k]`.
    pub a_transposed: bool,
    /// Whether `b` is stored as `[n,k]` instead of `[k,n]`.
    pub b_transposed: bool,
    /// Elements between the starts of stored rows of `a`.
    pub a_stride: u64,
    /// Elements between the starts of rows of the addend, the matrix that is added to the product.
    pub addend_stride: u64,
    /// Elements between the starts of rows of the result.
    pub out_stride: u64,
    /// Data type of `a` and `b`.
    pub input: DType,
    /// Data type of the result, the bias and the addend.
    pub output: DType,
    /// Whether a bias row `[n]` is added to every row.
    pub bias: bool,
    /// Whether a matrix `[m,n]` is added: a residual, or the previous result.
    pub has_addend: bool,
    /// Alignments of the addresses of `a`, `b`, addend and result in bytes, in this order: powers of two up to 256.
    pub alignment: [u32; 4],
    /// Size of the workspace in bytes.
    pub workspace_bytes: u64,
}

/// The operand addresses of one matrix product, and its factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operands {
    /// Factor by which a·b is multiplied.
    pub scale: f32,
    /// Address of the left matrix, stored as `[m,k]`, or as `[k,m]` if transposed.
    pub a: Address,
    /// Address of the right matrix, stored as `[k,n]`, or as `[n,k]` if transposed.
    pub b: Address,
    /// Address of the matrix `[m,n]` that is added, not read if [`Shape::has_addend`] is false. May equal `out`.
    pub addend: Address,
    /// Address of the result `[m,n]`.
    pub out: Address,
    /// Address of the bias row `[n]`; 0 if there is none.
    pub bias: Address,
    /// Address of the workspace, which has [`Shape::workspace_bytes`] bytes.
    pub workspace: Address,
}

/// Returns the largest power of two, up to 256, that divides an address.
fn alignment(address: Address) -> u32 {
    1 << address.trailing_zeros().min(8)
}

impl Operands {
    /// Returns the alignments of `a`, `b`, addend and result in bytes, for [`Shape::alignment`].
    pub fn alignments(&self) -> [u32; 4] {
        [self.a, self.b, self.addend, self.out].map(alignment)
    }
}

impl Shape {
    /// Returns all properties as text: `2048×1024×384 nt bf16→f32 +bias +c @256,256,256,256 in 33554432`. Plans store
    /// algorithms under this name. Strides appear only if rows are not contiguous.
    pub fn name(&self) -> String {
        let letter = |transposed: bool| if transposed { 't' } else { 'n' };
        let (a, b) = (letter(self.a_transposed), letter(self.b_transposed));
        let bias = if self.bias { " +bias" } else { "" };
        let has_addend = if self.has_addend { " +c" } else { "" };
        let dense = (if self.a_transposed { self.m } else { self.k }, self.n, self.n);
        let strides = if (self.a_stride, self.addend_stride, self.out_stride) == dense {
            String::new()
        } else {
            format!(" rows {},{},{}", self.a_stride, self.addend_stride, self.out_stride)
        };
        let [first, second, third, fourth] = self.alignment;
        format!(
            "{}×{}×{} {a}{b}{strides} {}→{}{bias}{has_addend} @{first},{second},{third},{fourth} in {}",
            self.m, self.n, self.k, self.input, self.output, self.workspace_bytes
        )
    }
}

/// Sizes of a column-major matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ColumnMajor {
    rows: u64,
    columns: u64,
    /// Elements between the starts of columns.
    leading: u64,
}

/// A row-major product out = A·B as cuBLASLt receives it, which takes column-major matrices.
///
/// The bytes of a row-major matrix are those of its transpose in column-major order. The product is therefore passed as
/// outᵀ = Bᵀ·Aᵀ: `b` comes first, and transposition flags stay unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ColumnMajorProduct {
    /// The library's first matrix, which is `b` of the row-major product.
    first: ColumnMajor,
    first_transposed: bool,
    /// The library's second matrix, which is `a` of the row-major product.
    second: ColumnMajor,
    second_transposed: bool,
    /// The matrix that is added to the product.
    addend: ColumnMajor,
    /// The matrix that receives the result.
    out: ColumnMajor,
}

fn to_column_major(shape: &Shape) -> ColumnMajorProduct {
    let Shape { m, n, k, a_transposed, b_transposed, a_stride, addend_stride, out_stride, .. } = *shape;
    let matrix = |rows, columns, leading| ColumnMajor { rows, columns, leading };
    ColumnMajorProduct {
        first: if b_transposed { matrix(k, n, k) } else { matrix(n, k, n) },
        first_transposed: b_transposed,
        second: if a_transposed { matrix(m, k, a_stride) } else { matrix(k, m, a_stride) },
        second_transposed: a_transposed,
        addend: matrix(n, m, addend_stride),
        out: matrix(n, m, out_stride),
    }
}

fn to_hex(words: RawAlgorithm) -> String {
    words.map(|word| format!("{word:016x}")).concat()
}

fn from_hex(text: &str) -> Option<RawAlgorithm> {
    let mut words = [0; 8];
    if text.len() != 128 || !text.is_ascii() {
        return None;
    }
    for (index, word) in words.iter_mut().enumerate() {
        *word = u64::from_str_radix(&text[16 * index..16 * (index + 1)], 16).ok()?;
    }
    Some(words)
}

/// A matrix product with its cuBLASLt description and the algorithm chosen for it.
struct PreparedProduct {
    description: Description,
    algorithm: RawAlgorithm,
    /// Whether a kernel adds the bias because the library cannot fuse it.
    bias_by_kernel: bool,
}

/// The matrix products of a device, with the algorithm of each.
pub struct Products {
    library: Arc<Library>,
    context: Arc<Context>,
    handle: Handle,
    ready: BTreeMap<Shape, PreparedProduct>,
    stored: GemmAlgorithms,
    /// Whether the algorithm of some prepared product is not from `stored`.
    newly_tuned: bool,
}

// SAFETY: the library's handle and descriptions belong to no thread (its manual calls it thread-safe), `Products` owns
// them, and the caller enters the context first.
unsafe impl Send for Products {}

impl Products {
    /// Opens cuBLASLt in the current context. Later choices use the algorithms in `stored` if they were chosen with the
    /// same cuBLASLt and driver versions on the same GPU model.
    ///
    /// # Errors
    /// Returns the error of the library.
    pub fn new(
        library: &Arc<Library>,
        context: &Arc<Context>,
        stored: Option<&GemmAlgorithms>,
    ) -> Result<Products, CudaError> {
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        let opened = library.check("open", unsafe { (library.cublasLtCreate)(&mut handle) });
        opened.or_else(|error| after_loss_check(context, error))?;
        // SAFETY: takes nothing.
        let version = unsafe { (library.cublasLtGetVersion)() } as u64;
        let gpu = context.gpu();
        let chosen = BTreeMap::new();
        let untimed = stored.is_some_and(|stored| stored.untimed);
        let (gpu, driver) = (gpu.name.clone(), gpu.driver_version);
        let fresh = GemmAlgorithms { library: version, gpu, driver, chosen, untimed };
        let compatible = stored.filter(|stored| stored.is_compatible_with(&fresh));
        Ok(Products {
            library: library.clone(),
            context: context.clone(),
            handle,
            ready: BTreeMap::new(),
            stored: compatible.cloned().unwrap_or(fresh),
            newly_tuned: false,
        })
    }

    /// Returns the algorithms of all prepared products, and whether any is new, which may change bits of results.
    pub fn algorithms(&self) -> (GemmAlgorithms, bool) {
        let chosen = self.ready.iter().map(|(shape, ready)| (shape.name(), to_hex(ready.algorithm))).collect();
        (GemmAlgorithms { chosen, ..self.stored.clone() }, self.newly_tuned)
    }

    /// Returns whether a kernel must add the bias after a prepared product, because cuBLASLt cannot.
    ///
    /// # Panics
    /// Panics if the product was not prepared.
    pub fn bias_by_kernel(&self, shape: &Shape) -> bool {
        self.ready[shape].bias_by_kernel
    }

    /// Chooses an algorithm for a product, unless that has been done.
    ///
    /// Uses the stored algorithm if there is one. Otherwise times the library's proposals on `operands` and the stream
    /// `timed_on`, which overwrites result and workspace. If `timed_on` is `None`, or the stored algorithms are untimed,
    /// takes the first proposal instead.
    ///
    /// # Errors
    /// Fails if the library cannot compute the product, or the device fails.
    ///
    /// # Safety
    /// The operands are device memory as large as the shape states, and no other work uses them.
    pub unsafe fn prepare(
        &mut self,
        shape: Shape,
        operands: &Operands,
        timed_on: Option<&Stream>,
    ) -> Result<(), CudaError> {
        if self.ready.contains_key(&shape) {
            return Ok(());
        }
        // SAFETY: as the caller promises.
        let chosen = unsafe { self.choose(shape, operands, timed_on) };
        let (product, is_new) = chosen.or_else(|error| after_loss_check(&self.context, error))?;
        self.newly_tuned |= is_new;
        self.ready.insert(shape, product);
        Ok(())
    }

    /// Chooses an algorithm as [`Products::prepare`] describes. Returns it, and whether it is not a stored one.
    ///
    /// # Safety
    /// As for [`Products::prepare`].
    unsafe fn choose(
        &self,
        shape: Shape,
        operands: &Operands,
        timed_on: Option<&Stream>,
    ) -> Result<(PreparedProduct, bool), CudaError> {
        let name = shape.name();
        let known = self.stored.chosen.get(&name).and_then(|text| from_hex(text));
        let timed_on = timed_on.filter(|_| !self.stored.untimed);
        let mut refusal = String::from("it proposes none");
        // First with a fused bias, then without.
        for bias_by_kernel in [false, true] {
            if bias_by_kernel && !shape.bias {
                break;
            }
            let description = Description::new(&self.library, &Shape { bias: shape.bias && !bias_by_kernel, ..shape })?;
            description.set_bias(operands.bias)?;
            let stored = known.filter(|words| self.accepts(&description, words, shape.workspace_bytes));
            let algorithm = match stored {
                Some(words) => Some(words),
                None => {
                    let chosen = self.proposals(&description, &shape).and_then(|proposals| match timed_on {
                        // SAFETY: as the caller promises.
                        Some(stream) => unsafe { self.fastest(&description, &shape, operands, stream, &proposals) },
                        None => Ok(proposals.first().copied()),
                    });
                    match chosen {
                        Err(CudaError::Product { name, .. }) => {
                            refusal = name;
                            None
                        }
                        chosen => chosen?,
                    }
                }
            };
            if let Some(algorithm) = algorithm {
                return Ok((PreparedProduct { description, algorithm, bias_by_kernel }, stored.is_none()));
            }
        }
        Err(CudaError::Product { what: "propose an algorithm", name: refusal, product: format!(" for {name}") })
    }

    /// Enqueues a prepared product on a stream.
    ///
    /// # Errors
    /// Returns the error of the library.
    ///
    /// # Panics
    /// Panics if the product was not prepared.
    ///
    /// # Safety
    /// The operands are device memory with the size and alignment in the shape. They are free for this use in the order
    /// of `stream`.
    pub unsafe fn run(&self, shape: &Shape, operands: &Operands, stream: &Stream) -> Result<(), CudaError> {
        let ready = &self.ready[shape];
        if shape.bias && !ready.bias_by_kernel {
            ready.description.set_bias(operands.bias)?;
        }
        // SAFETY: as the caller promises.
        let status = unsafe { self.start(&ready.description, shape, operands, &ready.algorithm, stream) };
        let done = self.library.check_product("multiply", status, shape);
        done.or_else(|error| after_loss_check(&self.context, error))
    }

    /// Returns whether the library accepts the algorithm `words` for a product, in a workspace of `workspace_bytes`.
    fn accepts(&self, description: &Description, words: &RawAlgorithm, workspace_bytes: u64) -> bool {
        let (mut found, [a, b, c, d]) = (HeuristicResult::default(), description.layouts);
        // SAFETY: all handles live; reads 64 bytes and writes one structure.
        let status = unsafe {
            let check = self.library.cublasLtMatmulAlgoCheck;
            check(self.handle, description.product, a, b, c, d, words, &mut found)
        };
        status == 0 && found.workspace_bytes as u64 <= workspace_bytes
    }

    /// Returns the algorithms that the library proposes for a product, fastest first by its guess; empty if none fits.
    ///
    /// # Errors
    /// Returns the error of the library, as for a product that it cannot compute.
    fn proposals(&self, description: &Description, shape: &Shape) -> Result<Vec<RawAlgorithm>, CudaError> {
        let preference = Preference::new(&self.library)?;
        preference.set(PREFER_WORKSPACE, &shape.workspace_bytes)?;
        preference.set(PREFER_REDUCTION, &REDUCTION_COMPUTE_TYPE)?;
        // First and second matrix are exchanged, as in `to_column_major`.
        let [a, b, c, d] = shape.alignment;
        let alignments =
            [(PREFER_ALIGNMENT_A, b), (PREFER_ALIGNMENT_B, a), (PREFER_ALIGNMENT_C, c), (PREFER_ALIGNMENT_D, d)];
        for (attribute, bytes) in alignments {
            preference.set(attribute, &bytes)?;
        }
        let (mut found, mut count) = ([HeuristicResult::default(); PROPOSALS_MAX], 0);
        let [a, b, c, d] = description.layouts;
        // SAFETY: all handles live; writes at most as many structures as it is asked for, and one integer.
        let status = unsafe {
            let query = self.library.cublasLtMatmulAlgoGetHeuristic;
            let (results, requested) = (found.as_mut_ptr(), PROPOSALS_MAX as c_int);
            query(self.handle, description.product, a, b, c, d, preference.handle, requested, results, &mut count)
        };
        self.library.check_product("propose an algorithm", status, shape)?;
        let count = (count.max(0) as usize).min(PROPOSALS_MAX);
        let usable =
            |found: &&HeuristicResult| found.state == 0 && found.workspace_bytes as u64 <= shape.workspace_bytes;
        Ok(found[..count].iter().filter(usable).map(|found| found.algorithm).collect())
    }

    /// Times the proposed algorithms and returns the fastest, or the earliest of nearly equal ones. Returns `None` if
    /// `proposals` is empty.
    ///
    /// # Errors
    /// Fails if the library refuses all proposals, with its last error, or if the device fails.
    ///
    /// # Safety
    /// As for [`Products::prepare`].
    unsafe fn fastest(
        &self,
        description: &Description,
        shape: &Shape,
        operands: &Operands,
        stream: &Stream,
        proposals: &[RawAlgorithm],
    ) -> Result<Option<RawAlgorithm>, CudaError> {
        let events = [Event::timed(&self.context)?, Event::timed(&self.context)?];
        let (mut best, mut refused): (Option<(f64, RawAlgorithm)>, _) = (None, None);
        for words in proposals {
            let run = || {
                // SAFETY: as the caller promises.
                let status = unsafe { self.start(description, shape, operands, words, stream) };
                self.library.check_product("try an algorithm", status, shape)
            };
            let time = |times: u32| seconds_per_run(&events, stream, times, run);
            // The first run loads the kernel. A proposal that the library then refuses is skipped.
            match time(1) {
                Err(error @ CudaError::Product { .. }) => {
                    refused = Some(error);
                    continue;
                }
                first => first?,
            };
            let first_seconds = time(1)?;
            if best.is_some_and(|(seconds, _)| first_seconds > ABANDON_RATIO * seconds) {
                continue;
            }
            // Short products are timed in groups: events have a resolution of half a microsecond.
            let repeats = (TIMED_SECONDS_MIN / first_seconds).clamp(1.0, REPEATS_MAX) as u32;
            let mut times = [0.0; TIMING_ROUNDS];
            for seconds in &mut times {
                *seconds = time(repeats)?;
            }
            times.sort_unstable_by(f64::total_cmp);
            let median = times[TIMING_ROUNDS / 2];
            if best.is_none_or(|(seconds, _)| median < FASTER_RATIO * seconds) {
                best = Some((median, *words));
            }
        }
        match (best, refused) {
            (None, Some(refused)) => Err(refused),
            (best, _) => Ok(best.map(|(_, words)| words)),
        }
    }

    /// Enqueues a product with the given algorithm on a stream. Returns the library's status code.
    ///
    /// # Safety
    /// As for [`Products::run`].
    unsafe fn start(
        &self,
        description: &Description,
        shape: &Shape,
        operands: &Operands,
        algorithm: &RawAlgorithm,
        stream: &Stream,
    ) -> Status {
        let Operands { scale, a, b, addend, out, workspace, .. } = *operands;
        let [first, second, addend_layout, result] = description.layouts;
        let beta = if shape.has_addend { 1.0f32 } else { 0.0 };
        let addend = if shape.has_addend { addend } else { out };
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
                at(addend),
                addend_layout,
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

/// Returns the driver's error if the device is lost, else `error`. The library only reports that something failed, on a
/// lost device also that memory is refused; the driver knows the cause.
fn after_loss_check<T>(context: &Context, error: CudaError) -> Result<T, CudaError> {
    context.synchronize().and(Err(error))
}

/// Calls `run`, which enqueues work, `times` times between two events. Returns the seconds on the device per call.
fn seconds_per_run(
    [start, end]: &[Event; 2],
    stream: &Stream,
    times: u32,
    run: impl Fn() -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    start.record(stream)?;
    (0..times).try_for_each(|_| run())?;
    end.record(stream)?;
    end.synchronize()?;
    Ok(end.seconds_since(start)? / f64::from(times))
}

impl Drop for Products {
    fn drop(&mut self) {
        self.ready.clear();
        // SAFETY: owned here, and not used after this.
        unsafe { (self.library.cublasLtDestroy)(self.handle) };
    }
}

impl Library {
    fn check(&self, what: &'static str, status: Status) -> Result<(), CudaError> {
        self.check_status(what, status, String::new)
    }

    fn check_product(&self, what: &'static str, status: Status, shape: &Shape) -> Result<(), CudaError> {
        self.check_status(what, status, || format!(" for {}", shape.name()))
    }

    fn check_status(&self, what: &'static str, status: Status, product: impl Fn() -> String) -> Result<(), CudaError> {
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
            addend_stride: n,
            out_stride: n,
            input: DType::F32,
            output: DType::F32,
            bias: false,
            has_addend: false,
            alignment: [256; 4],
            workspace_bytes: 1 << 20,
        }
    }

    /// Returns element (row, column) of a column-major matrix, or of its transpose if `transposed` is true.
    fn at(matrix: &[f64], layout: ColumnMajor, transposed: bool, row: u64, column: u64) -> f64 {
        let ColumnMajor { rows, columns, leading } = layout;
        let (row, column) = if transposed { (column, row) } else { (row, column) };
        assert!(row < rows && column < columns && leading >= rows);
        matrix[(row + column * leading) as usize]
    }

    proptest! {
        #[test]
        fn column_major_product_equals_row_major_product(
            (m, n, k) in (1u64..7, 1u64..7, 1u64..7), a_transposed: bool, b_transposed: bool,
            (more_a, more_out) in (0u64..3, 0u64..3)
        ) {
            let dense = shape(m, n, k, a_transposed, b_transposed);
            let (a_stride, out_stride) = (dense.a_stride + more_a, n + more_out);
            let shape = Shape { a_stride, out_stride, ..dense };
            let numbers = |count: u64, seed: u64| (0..count).map(|i| ((i * 7 + seed) % 11) as f64 - 5.0).collect::<Vec<_>>();
            let (a, b) = (numbers((m + k) * a_stride, 3), numbers(k * n, 8));
            let ColumnMajorProduct { first, first_transposed, second, second_transposed, addend, out } =
                to_column_major(&shape);
            prop_assert_eq!(out, ColumnMajor { rows: n, columns: m, leading: out_stride });
            prop_assert_eq!(addend, ColumnMajor { rows: n, columns: m, leading: n });
            for i in 0..m {
                for j in 0..n {
                    let of_a = |l: u64| a[if a_transposed { l * a_stride + i } else { i * a_stride + l } as usize];
                    let of_b = |l: u64| b[if b_transposed { j * k + l } else { l * n + j } as usize];
                    let expected: f64 = (0..k).map(|l| of_a(l) * of_b(l)).sum();
                    // Element (j, i) of the library's result is element (i, j) of the row-major result.
                    let computed: f64 = (0..k)
                        .map(|l| at(&b, first, first_transposed, j, l) * at(&a, second, second_transposed, l, i))
                        .sum();
                    prop_assert_eq!(expected, computed);
                    prop_assert_eq!(j + i * out.leading, i * out_stride + j);
                }
            }
        }
    }

    #[test]
    fn algorithm_round_trips_through_hex() {
        let words = [1, u64::MAX, 0, 3, 0xdead_beef, 5, 6, 7];
        assert_eq!(from_hex(&to_hex(words)), Some(words));
        assert_eq!(from_hex("12"), None);
        assert_eq!(from_hex(&"x".repeat(128)), None);
        let chosen = BTreeMap::from([(shape(2, 3, 4, false, true).name(), to_hex(words))]);
        let algorithms =
            GemmAlgorithms { library: 130_200, gpu: "a gpu".into(), driver: 13_000, chosen, untimed: false };
        let text = serde_json::to_string(&algorithms).unwrap();
        assert_eq!(serde_json::from_str::<GemmAlgorithms>(&text).unwrap(), algorithms);
    }

    #[test]
    fn shape_names_distinguish_products() {
        let plain = shape(2, 3, 4, false, true);
        let others = [
            Shape { bias: true, ..plain },
            Shape { has_addend: true, ..plain },
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
    fn alignment_follows_address_up_to_256() {
        assert_eq!([0x7f00_0000u64, 0x1080, 0x1002, 0x3].map(alignment), [256, 128, 2, 1]);
        assert_eq!(size_of::<HeuristicResult>(), 96);
    }
}
