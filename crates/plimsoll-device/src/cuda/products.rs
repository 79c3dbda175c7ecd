//! Matrix products by cuBLASLt.

use super::driver::library;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// What every function of cuBLASLt returns.
type Status = c_int;
/// Something of cuBLASLt's that is only passed on.
type Handle = *mut c_void;

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
            algorithm: *const [u64; 8], found: *mut Found,
        ) -> Status;
        fn cublasLtMatmul(
            library: Handle, product: Handle, alpha: *const c_void,
            a: *const c_void, a_layout: Handle, b: *const c_void, b_layout: Handle, beta: *const c_void,
            c: *const c_void, c_layout: Handle, d: *mut c_void, d_layout: Handle,
            algorithm: *const [u64; 8], workspace: *mut c_void, workspace_bytes: usize, stream: Handle,
        ) -> Status;
    }
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Found {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}
