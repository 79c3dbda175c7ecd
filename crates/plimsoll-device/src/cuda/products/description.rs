//! Handles by which cuBLASLt knows products and constraints on their algorithms. Each is destroyed when dropped.

use super::{
    COMPUTE_32F, ColumnMajor, ColumnMajorProduct, DESC_BIAS_POINTER, DESC_EPILOGUE, DESC_TRANSA, DESC_TRANSB,
    EPILOGUE_BIAS, Handle, Library, R_16BF, R_32F, Shape, to_column_major,
};
use crate::cuda::driver::Address;
use crate::error::CudaError;
use plimsoll_core::DType;
use std::ffi::{c_int, c_uint};
use std::ptr;
use std::sync::Arc;

/// The handles by which cuBLASLt knows a product: its description, and the layouts of first matrix, second matrix,
/// addend and result.
pub(super) struct Description {
    library: Arc<Library>,
    /// Handle of the description.
    pub(super) product: Handle,
    /// Handles of the layouts of first matrix, second matrix, addend and result.
    pub(super) layouts: [Handle; 4],
}

fn kind(dtype: DType) -> c_uint {
    if dtype == DType::Bf16 { R_16BF } else { R_32F }
}

impl Description {
    /// Describes a product and its matrices to the library.
    ///
    /// # Errors
    /// Returns the error of the library.
    pub(super) fn new(library: &Arc<Library>, shape: &Shape) -> Result<Description, CudaError> {
        // Handles that are still null are not destroyed.
        let mut description =
            Description { library: library.clone(), product: ptr::null_mut(), layouts: [ptr::null_mut(); 4] };
        // SAFETY: writes one handle.
        let status = unsafe { (library.cublasLtMatmulDescCreate)(&mut description.product, COMPUTE_32F, R_32F) };
        library.check("describe a product", status)?;
        let ColumnMajorProduct { first, first_transposed, second, second_transposed, addend, out } =
            to_column_major(shape);
        for (attribute, transposed) in [(DESC_TRANSA, first_transposed), (DESC_TRANSB, second_transposed)] {
            description.set(attribute, &c_int::from(transposed))?;
        }
        if shape.bias {
            description.set(DESC_EPILOGUE, &EPILOGUE_BIAS)?;
        }
        let [input, output] = [shape.input, shape.output];
        let matrices = [(input, first), (input, second), (output, addend), (output, out)];
        for (layout, (dtype, ColumnMajor { rows, columns, leading })) in description.layouts.iter_mut().zip(matrices) {
            // SAFETY: writes one handle.
            let status =
                unsafe { (library.cublasLtMatrixLayoutCreate)(layout, kind(dtype), rows, columns, leading as i64) };
            library.check("describe a matrix", status)?;
        }
        Ok(description)
    }

    fn set<T: Copy>(&self, attribute: c_uint, value: &T) -> Result<(), CudaError> {
        // SAFETY: the handle lives; reads as many bytes as the value has.
        let status = unsafe {
            let set = self.library.cublasLtMatmulDescSetAttribute;
            set(self.product, attribute, ptr::from_ref(value).cast(), size_of::<T>())
        };
        self.library.check("describe a product", status)
    }

    /// Sets the address of the bias for later runs of the product; does nothing for 0.
    pub(super) fn set_bias(&self, bias: Address) -> Result<(), CudaError> {
        if bias == 0 { Ok(()) } else { self.set(DESC_BIAS_POINTER, &bias) }
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: owned here, and not used after this.
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

/// Constraints that cuBLASLt must respect when it proposes algorithms, such as the size of the workspace.
pub(super) struct Preference {
    library: Arc<Library>,
    /// Handle of the preference.
    pub(super) handle: Handle,
}

impl Preference {
    /// Creates a preference without constraints.
    ///
    /// # Errors
    /// Returns the error of the library.
    pub(super) fn new(library: &Arc<Library>) -> Result<Preference, CudaError> {
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        library.check("set a preference", unsafe { (library.cublasLtMatmulPreferenceCreate)(&mut handle) })?;
        Ok(Preference { library: library.clone(), handle })
    }

    /// Sets one constraint.
    ///
    /// # Errors
    /// Returns the error of the library.
    pub(super) fn set<T: Copy>(&self, attribute: c_uint, value: &T) -> Result<(), CudaError> {
        // SAFETY: the handle lives; reads as many bytes as the value has.
        let status = unsafe {
            let set = self.library.cublasLtMatmulPreferenceSetAttribute;
            set(self.handle, attribute, ptr::from_ref(value).cast(), size_of::<T>())
        };
        self.library.check("set a preference", status)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: owned here, and not used after this.
        unsafe { (self.library.cublasLtMatmulPreferenceDestroy)(self.handle) };
    }
}
