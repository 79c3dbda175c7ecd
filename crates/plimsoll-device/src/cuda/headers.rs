//! Declarations of this crate as data, to be compared with NVIDIA's headers: functions, constants and structures.
//! `cargo xtask cuda-check` has a C++ compiler do that ([`Library::assertions`]), since no library checks its
//! arguments.
//!
//! Everything here is derived from the declarations in use: the function tables (`library!` in [`super::driver`]), the
//! constants (`numbers!`) and the structures. NVML is missing here because `nvml-wrapper` has its own declarations.

use std::ffi::{c_int, c_longlong, c_uint, c_ulonglong};
use std::fmt::Write as _;

/// Kind of a function argument or return value.
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

/// A type that functions take or return.
pub(super) trait HasAbiKind {
    /// ABI kind of this type.
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

/// The signature of a function.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Name in the library.
    pub name: &'static str,
    /// Return type.
    pub returned: AbiKind,
    /// Argument types.
    pub arguments: &'static [AbiKind],
}

/// An enumeration value or a constant.
#[derive(Clone, Copy, Debug)]
pub struct Number {
    /// Name in the header.
    pub name: &'static str,
    /// Value in this crate.
    pub value: i64,
}

/// Declares constants with their names in the header, and a table of them.
macro_rules! numbers {
    ($(#[$note:meta])* $table:ident { $($(#[$reason:meta])* $header:ident => $name:ident: $type:ty = $value:expr;)* }) => {
        $($(#[$reason])* pub(super) const $name: $type = $value;)*
        $(#[$note])*
        pub(super) const $table: &[$crate::cuda::headers::Number] =
            &[$($crate::cuda::headers::Number { name: stringify!($header), value: $name as i64 }),*];
    };
}
pub(super) use numbers;

/// The layout of a structure.
#[derive(Clone, Copy, Debug)]
pub struct Structure {
    /// Name in the header.
    pub name: &'static str,
    /// Size in bytes.
    pub bytes: usize,
    /// Whether newer headers may append fields.
    pub may_grow: bool,
    /// Name in the header, offset and size of each field.
    pub fields: &'static [(&'static str, usize, usize)],
}

/// Describes a structure by the header names of its fields. A trailing `..` means that newer headers may append fields.
macro_rules! structure {
    ($header:ident, $type:ty { $($name:literal => $field:ident: $of:ty),* $(,)? } $($may_grow:tt)?) => {
        $crate::cuda::headers::Structure {
            name: stringify!($header),
            bytes: size_of::<$type>(),
            may_grow: [$(stringify!($may_grow),)? ""].len() > 1,
            fields: &[$(($name, std::mem::offset_of!($type, $field), size_of::<$of>())),*],
        }
    };
}
pub(super) use structure;

/// A library with the declarations that this crate uses.
#[derive(Clone, Debug)]
pub struct Library {
    /// Display name.
    pub name: &'static str,
    /// Headers that declare it.
    pub headers: &'static [&'static str],
    /// Functions that are called.
    pub calls: Vec<Call>,
    /// Constants that are used.
    pub numbers: Vec<Number>,
    /// Structures that are passed.
    pub structures: Vec<Structure>,
}

/// Returns all libraries that this crate declares itself.
pub fn libraries() -> [Library; 4] {
    use super::{compile, driver, gpus, nccl, products};
    [
        Library {
            name: "the driver",
            headers: &["cuda.h"],
            calls: [driver::Driver::CALLS, gpus::ListingApi::CALLS].concat(),
            numbers: [driver::NUMBERS, driver::STICKY].concat(),
            structures: driver::STRUCTURES.to_vec(),
        },
        Library {
            name: "NVRTC",
            headers: &["nvrtc.h"],
            calls: compile::Nvrtc::CALLS.to_vec(),
            numbers: Vec::new(),
            structures: Vec::new(),
        },
        Library {
            name: "cuBLASLt",
            headers: &["cublasLt.h"],
            calls: products::Library::CALLS.to_vec(),
            numbers: products::NUMBERS.to_vec(),
            structures: products::STRUCTURES.to_vec(),
        },
        Library {
            name: "NCCL",
            headers: &["nccl.h"],
            calls: nccl::Library::CALLS.to_vec(),
            numbers: nccl::NUMBERS.to_vec(),
            structures: nccl::STRUCTURES.to_vec(),
        },
    ]
}

/// C++ prelude that computes the number of an [`AbiKind`]: integer or enumeration, float, pointer, structure.
const WORDS: &str = "\
#include <type_traits>
#include <cstddef>
template <typename T> constexpr unsigned long word() {
  if constexpr (std::is_pointer_v<T>) return 1;
  else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) return 0x1000 + sizeof(T);
  else if constexpr (std::is_floating_point_v<T>) return 0x2000 + sizeof(T);
  else return 0x3000 + sizeof(T);
}
template <typename F> struct Called;
template <typename R, typename... A> struct Called<R (*)(A...)> {
  template <unsigned long returned, unsigned long... words> static constexpr bool as() {
    if constexpr (sizeof...(A) != sizeof...(words)) return false;
    else return word<R>() == returned && ((word<A>() == words) && ...);
  }
};
";

impl AbiKind {
    fn number(self) -> String {
        match self {
            AbiKind::Pointer => "1".to_owned(),
            AbiKind::Integer(bytes) => format!("{}", 0x1000 + bytes),
            AbiKind::Float(bytes) => format!("{}", 0x2000 + bytes),
            AbiKind::Structure(bytes) => format!("{}", 0x3000 + bytes),
        }
    }
}

impl Library {
    /// Returns C++ with one `static_assert` per declaration. It compiles only if the headers agree.
    pub fn assertions(&self) -> String {
        // cuda.h renames functions to their newest versions unless this macro is defined.
        let mut text = String::from("#define __CUDA_API_VERSION_INTERNAL\n");
        for header in self.headers {
            let _ = writeln!(text, "#include <{header}>");
        }
        text += WORDS;
        for Call { name, returned, arguments } in &self.calls {
            let words: Vec<String> = [returned].into_iter().chain(*arguments).map(|word| word.number()).collect();
            let words = words.join(", ");
            let _ = writeln!(
                text,
                "static_assert(Called<decltype(&{name})>::as<{words}>(), \"{name} has another signature\");"
            );
        }
        for Number { name, value } in &self.numbers {
            // Constants keep their own width: 0xcafebeef is not a negative number.
            let _ = writeln!(text, "static_assert((long long)({name}) == {value}ll, \"{name} is not {value}\");");
        }
        for Structure { name, bytes, may_grow, fields } in &self.structures {
            let holds = if *may_grow { ">=" } else { "==" };
            let _ =
                writeln!(text, "static_assert(sizeof({name}) {holds} {bytes}, \"{name} is not of {bytes} bytes\");");
            for (field, place, bytes) in *fields {
                let _ = writeln!(
                    text,
                    "static_assert(offsetof({name}, {field}) == {place} && sizeof((({name}*)0)->{field}) == {bytes}, \
                     \"{name}.{field} has another offset or size\");"
                );
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "needs NVIDIA's libraries: cargo xtask cuda-check"]
    fn installed_libraries_contain_every_function() {
        use crate::cuda::libraries::{Libraries, Library};
        let here = Libraries::find();
        let path = |library| here.choose(library, None).unwrap().path.clone();
        crate::cuda::compile::Nvrtc::load(&path(Library::Nvrtc)).map(drop).unwrap();
        crate::cuda::products::Library::load(&path(Library::CublasLt)).map(drop).unwrap();
        crate::cuda::nccl::Library::load(&path(Library::Nccl)).map(drop).unwrap();
    }

    #[test]
    fn every_declaration_is_asserted() {
        for library in libraries() {
            let text = library.assertions();
            let wanted = library.calls.len()
                + library.numbers.len()
                + library.structures.iter().map(|structure| 1 + structure.fields.len()).sum::<usize>();
            assert_eq!(text.matches("static_assert").count(), wanted, "{}", library.name);
            assert!(!library.calls.is_empty(), "{}", library.name);
        }
        let [driver, _, products, nccl] = libraries();
        let call_of = |library: &Library, name: &str| {
            let call = *library.calls.iter().find(|call| call.name == name).expect(name);
            (call.returned, call.arguments)
        };
        let (integer, wide) = (AbiKind::Integer(4), AbiKind::Integer(8));
        assert_eq!(call_of(&driver, "cuMemUnmap"), (integer, [wide, wide].as_slice()));
        assert_eq!(call_of(&driver, "cuEventElapsedTime"), (integer, [AbiKind::Pointer; 3].as_slice()));
        assert_eq!(call_of(&products, "cublasLtGetVersion"), (wide, [].as_slice()));
        assert_eq!(call_of(&nccl, "ncclCommInitRankConfig").1[2], AbiKind::Structure(128));
    }
}
