//! Comparison of this crate's declarations of functions, constants and structures with NVIDIA's headers.
//! `cargo xtask cuda-check` has a C++ compiler do that ([`Library::assertions`]), since no library checks its
//! arguments.
//!
//! The declarations come from the modules that use them, as the macros of [`super::abi`] describe them. NVML is missing
//! here because `nvml-wrapper` has its own declarations.

use super::abi::{AbiKind, Call, Number, Structure};
use super::{compile, driver, gpus, nccl, products};
use std::fmt::Write as _;

/// A library of NVIDIA, with everything that this crate declares of it.
#[derive(Clone, Debug)]
pub struct Library {
    /// Name of the library in messages, such as `cuBLASLt`.
    pub name: &'static str,
    /// NVIDIA's headers that declare the library.
    pub headers: &'static [&'static str],
    /// Functions that this crate calls.
    pub calls: Vec<Call>,
    /// Constants that this crate uses.
    pub numbers: Vec<Number>,
    /// Structures that this crate passes to the functions.
    pub structures: Vec<Structure>,
}

/// Returns the libraries whose functions this crate declares itself. NVML is not among them.
pub fn libraries() -> [Library; 4] {
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

/// C++ code that precedes the assertions and that they call. `word` maps a type to a number for its kind and size, as
/// `AbiKind::number` does. `Called` compares the signature of a function with such numbers.
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
    /// Returns C++ source with one `static_assert` per function, constant, structure and field. It compiles only if
    /// NVIDIA's headers agree with this crate's declarations.
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
