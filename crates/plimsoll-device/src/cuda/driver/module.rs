//! Loaded modules and their kernels.

use super::{Context, FUNCTION_MAX_DYNAMIC_SHARED, Handle};
use crate::cuda::kernels::Unit;
use crate::error::CudaError;
use std::ffi::{CString, c_int};
use std::ptr;
use std::sync::Arc;

/// A cubin (compiled kernels) that is loaded on a GPU.
pub struct Module {
    context: Arc<Context>,
    handle: Handle,
}

// SAFETY: as for `Stream`.
unsafe impl Send for Module {}

/// A kernel in a [`Module`], valid while the module lives.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    pub(super) handle: Handle,
    /// Name of the kernel in the source.
    pub(super) name: &'static str,
}

// SAFETY: as for `Stream`.
unsafe impl Send for Function {}
// SAFETY: only read; the kernel that it names is started through streams of an entered context.
unsafe impl Sync for Function {}

impl Module {
    /// Loads `cubin` onto the GPU. Errors name `unit`, the source from which the cubin was compiled.
    ///
    /// # Errors
    /// Fails if the cubin is not for this GPU, or device memory is exhausted.
    pub fn load(context: &Arc<Context>, unit: Unit, cubin: &[u8]) -> Result<Module, CudaError> {
        let driver = context.driver();
        // SAFETY: writes one handle. A cubin is an ELF file that states its own length; PTX text, which would need a
        // terminating zero, is never passed.
        let mut handle = ptr::null_mut();
        let loaded = unsafe { (driver.cuModuleLoadData)(&mut handle, cubin.as_ptr().cast()) };
        driver.check_with(loaded, || format!("load the kernels of {}", unit.name()).into())?;
        Ok(Module { handle, context: context.clone() })
    }

    /// Returns a kernel by name, and raises its limit of dynamic shared memory to `shared_bytes` if necessary.
    ///
    /// # Errors
    /// Fails if the module has no kernel of that name, or the GPU has less shared memory.
    pub fn function(&self, name: &'static str, shared_bytes: u32) -> Result<Function, CudaError> {
        let driver = self.context.driver();
        let words = CString::new(name).expect("names of kernels have no zeros");
        // SAFETY: reads a string and writes one handle.
        let mut handle = ptr::null_mut();
        let found = unsafe { (driver.cuModuleGetFunction)(&mut handle, self.handle, words.as_ptr()) };
        driver.check_with(found, || format!("find {name}").into())?;
        // Up to 48 KiB need no permission, including the static shared memory of the kernel, which is some hundred
        // bytes.
        if shared_bytes > 40 << 10 {
            // SAFETY: a function of a module that lives.
            let allowed =
                unsafe { (driver.cuFuncSetAttribute)(handle, FUNCTION_MAX_DYNAMIC_SHARED, shared_bytes as c_int) };
            driver.check_with(allowed, || format!("give {name} {shared_bytes} bytes of shared memory").into())?;
        }
        Ok(Function { handle, name })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: owned here; its functions are not used after this.
        unsafe { (self.context.driver().cuModuleUnload)(self.handle) };
    }
}
