//! Macros that declare functions (`library!`), constants (`numbers!`) and structures (`structure!`) of NVIDIA's
//! libraries.
//!
//! Each macro declares an item for use and describes it as data ([`Call`], [`Number`], [`Structure`]).
//! [`super::headers`] compares these descriptions with NVIDIA's headers.

use std::ffi::{c_int, c_longlong, c_uint, c_ulonglong};

/// Kind of a C function's argument or return value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbiKind {
    /// An integer or enumeration, with its size in bytes.
    Integer(usize),
    /// A floating-point number, with its size in bytes.
    Float(usize),
    /// A pointer of any type.
    Pointer,
    /// A structure, with its size in bytes.
    Structure(usize),
}

/// A Rust type that C functions of NVIDIA's libraries take or return.
pub(super) trait HasAbiKind {
    /// Kind and size of the type, to be compared with NVIDIA's headers.
    const ABI_KIND: AbiKind;
}

macro_rules! passed {
    ($($type:ty => $word:ident),* $(,)?) => {
        $(impl HasAbiKind for $type {
            const ABI_KIND: AbiKind = AbiKind::$word(size_of::<$type>());
        })*
    };
}
passed!(c_int => Integer, c_uint => Integer, c_longlong => Integer, c_ulonglong => Integer);
passed!(usize => Integer, u16 => Integer, u8 => Integer, f32 => Float);

impl<T> HasAbiKind for *const T {
    const ABI_KIND: AbiKind = AbiKind::Pointer;
}

impl<T> HasAbiKind for *mut T {
    const ABI_KIND: AbiKind = AbiKind::Pointer;
}

/// The signature of a C function, as this crate declares it.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Name in the library.
    pub name: &'static str,
    /// Kind of the return value.
    pub returned: AbiKind,
    /// Kinds of the arguments, in order.
    pub arguments: &'static [AbiKind],
}

/// An enumeration value or a constant of NVIDIA's headers, as this crate declares it.
#[derive(Clone, Copy, Debug)]
pub struct Number {
    /// Name in the header.
    pub name: &'static str,
    /// Value in this crate.
    pub value: i64,
}

/// Declares constants, and a table that pairs each value with its name in NVIDIA's header.
macro_rules! numbers {
    ($(#[$note:meta])* $table:ident { $($(#[$reason:meta])* $header:ident => $name:ident: $type:ty = $value:expr;)* }) => {
        $($(#[$reason])* pub(super) const $name: $type = $value;)*
        $(#[$note])*
        pub(super) const $table: &[$crate::cuda::abi::Number] =
            &[$($crate::cuda::abi::Number { name: stringify!($header), value: $name as i64 }),*];
    };
}
pub(super) use numbers;

/// The layout of a C structure, as this crate declares it.
#[derive(Clone, Copy, Debug)]
pub struct Structure {
    /// Name in the header.
    pub name: &'static str,
    /// Size in bytes.
    pub bytes: usize,
    /// Whether newer headers may append fields.
    pub may_grow: bool,
    /// Name in the header, offset in bytes and size in bytes of each field.
    pub fields: &'static [(&'static str, usize, usize)],
}

/// Creates the `Structure` that describes the layout of a Rust type, with the names of type and fields in NVIDIA's
/// header. A trailing `..` means that newer headers may append fields.
macro_rules! structure {
    ($header:ident, $type:ty { $($name:literal => $field:ident: $of:ty),* $(,)? } $($may_grow:tt)?) => {
        $crate::cuda::abi::Structure {
            name: stringify!($header),
            bytes: size_of::<$type>(),
            may_grow: [$(stringify!($may_grow),)? ""].len() > 1,
            fields: &[$(($name, std::mem::offset_of!($type, $field), size_of::<$of>())),*],
        }
    };
}
pub(super) use structure;

/// Declares a struct with one function pointer for each listed function of a library, and its constructor `load`.
/// Loading fails if any function is missing.
macro_rules! library {
    ($(#[$note:meta])* $table:ident { $(fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $returned:ty;)* }) => {
        $(#[$note])*
        #[allow(non_snake_case)]
        pub struct $table {
            $(pub(super) $name: unsafe extern "C" fn($($argument: $type),*) -> $returned,)*
        }

        impl $table {
            /// Signature of each function in the table, to be compared with the library's header.
            pub(super) const CALLS: &'static [$crate::cuda::abi::Call] = &[$($crate::cuda::abi::Call {
                name: stringify!($name),
                returned: <$returned as $crate::cuda::abi::HasAbiKind>::ABI_KIND,
                arguments: &[$(<$type as $crate::cuda::abi::HasAbiKind>::ABI_KIND),*],
            }),*];

            /// Loads the library from the file `path`, for the lifetime of the process, and looks up its functions.
            ///
            /// # Errors
            /// Fails if the library cannot be loaded, or lacks a function.
            pub fn load(path: &std::path::Path) -> Result<$table, $crate::error::CudaError> {
                use $crate::error::CudaError;
                let name = || path.display().to_string();
                // SAFETY: loads a library with the name of an NVIDIA library; its initializers do not touch memory of
                // this program.
                let library = unsafe { libloading::Library::new(path) }
                    .map_err(|error| CudaError::Library { library: name(), detail: error.to_string() })?;
                $(
                    // SAFETY: the type is the declaration in the library's header.
                    #[allow(non_snake_case)]
                    let $name = *unsafe {
                        library.get::<unsafe extern "C" fn($($argument: $type),*) -> $returned>(stringify!($name))
                    }
                    .map_err(|_| CudaError::Function { library: name(), function: stringify!($name) })?;
                )*
                // The pointers stay valid because the library is never unloaded.
                std::mem::forget(library);
                Ok($table { $($name),* })
            }
        }
    };
}
pub(super) use library;
