//! What NVIDIA's headers have to say of all that is called, passed and read: functions, numbers and structures as this
//! crate has them. `cargo xtask cuda-check` lets a C++ compiler compare them with the headers ([`Library::assertions`]),
//! since no library checks what it is handed.
//!
//! Everything here is made from what is used: the tables of functions (`library!` in [`super::driver`]), the constants
//! (`numbers!`) and the structures themselves. NVML is not here: `nvml-wrapper` has declarations of its own.

use std::ffi::{c_int, c_longlong, c_uint, c_ulonglong};
use std::fmt::Write as _;

/// How a value goes to a function, or comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// An integer or an enumeration of so many bytes.
    Integer(usize),
    /// A floating-point number of so many bytes.
    Float(usize),
    /// Any pointer.
    Pointer,
    /// A structure of so many bytes.
    Structure(usize),
}

/// A type that functions take or return.
pub(super) trait Passed {
    /// How it goes.
    const AS: Word;
}

macro_rules! passed {
    ($($type:ty => $word:ident),* $(,)?) => {
        $(impl Passed for $type {
            const AS: Word = Word::$word(size_of::<$type>());
        })*
    };
}
passed!(c_int => Integer, c_uint => Integer, c_longlong => Integer, c_ulonglong => Integer);
passed!(usize => Integer, u16 => Integer, u8 => Integer, f32 => Float);

impl<T> Passed for *const T {
    const AS: Word = Word::Pointer;
}

impl<T> Passed for *mut T {
    const AS: Word = Word::Pointer;
}

/// A function as it is called.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Its name in the library.
    pub name: &'static str,
    /// What it returns.
    pub returned: Word,
    /// What it takes.
    pub arguments: &'static [Word],
}

/// A value of an enumeration, or a constant.
#[derive(Clone, Copy, Debug)]
pub struct Number {
    /// Its name in the header.
    pub name: &'static str,
    /// What it is here.
    pub value: i64,
}

/// Declares constants, each beside its name in the header, and the table of them.
macro_rules! numbers {
    ($(#[$note:meta])* $table:ident { $($(#[$why:meta])* $header:ident => $name:ident: $type:ty = $value:expr;)* }) => {
        $($(#[$why])* pub(super) const $name: $type = $value;)*
        $(#[$note])*
        pub(super) const $table: &[$crate::cuda::headers::Number] =
            &[$($crate::cuda::headers::Number { name: stringify!($header), value: $name as i64 }),*];
    };
}
pub(super) use numbers;

/// A structure as it is passed.
#[derive(Clone, Copy, Debug)]
pub struct Structure {
    /// Its name in the header.
    pub name: &'static str,
    /// How large it is.
    pub bytes: usize,
    /// Whether newer headers may have more behind it.
    pub grows: bool,
    /// Name in the header, place and bytes of each field.
    pub fields: &'static [(&'static str, usize, usize)],
}

/// Says of a structure what its fields are called in the header. One that grows has `..` at its end.
macro_rules! structure {
    ($header:ident, $type:ty { $($name:literal => $field:ident: $of:ty),* $(,)? } $($grows:tt)?) => {
        $crate::cuda::headers::Structure {
            name: stringify!($header),
            bytes: size_of::<$type>(),
            grows: [$(stringify!($grows),)? ""].len() > 1,
            fields: &[$(($name, std::mem::offset_of!($type, $field), size_of::<$of>())),*],
        }
    };
}
pub(super) use structure;

/// A library, and what is used of it.
#[derive(Clone, Debug)]
pub struct Library {
    /// As it is called.
    pub name: &'static str,
    /// The headers that declare it.
    pub headers: &'static [&'static str],
    /// The functions that are called.
    pub calls: Vec<Call>,
    /// The numbers that are passed and read.
    pub numbers: Vec<Number>,
    /// The structures that are passed.
    pub structures: Vec<Structure>,
}

/// All libraries whose declarations are ours.
pub fn libraries() -> [Library; 4] {
    use super::{compile, driver, gpus, nccl, products};
    [
        Library {
            name: "the driver",
            headers: &["cuda.h"],
            calls: [driver::Driver::CALLS, gpus::Listing::CALLS].concat(),
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

/// What the compiler is told of a [`Word`]: an integer (an enumeration counts as one), a float, a pointer, a structure.
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

impl Word {
    fn number(self) -> String {
        match self {
            Word::Pointer => "1".to_owned(),
            Word::Integer(bytes) => format!("{}", 0x1000 + bytes),
            Word::Float(bytes) => format!("{}", 0x2000 + bytes),
            Word::Structure(bytes) => format!("{}", 0x3000 + bytes),
        }
    }
}

impl Library {
    /// C++ that compiles where the headers say the same, and names what they say otherwise.
    pub fn assertions(&self) -> String {
        // The driver's header renames functions to their newest versions unless it is told that all are wanted.
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
                "static_assert(Called<decltype(&{name})>::as<{words}>(), \"{name} is called otherwise\");"
            );
        }
        for Number { name, value } in &self.numbers {
            // A name is taken as a number of as many bytes as it has: 0xcafebeef is no negative one.
            let _ = writeln!(text, "static_assert((long long)({name}) == {value}ll, \"{name} is not {value}\");");
        }
        for Structure { name, bytes, grows, fields } in &self.structures {
            let holds = if *grows { ">=" } else { "==" };
            let _ =
                writeln!(text, "static_assert(sizeof({name}) {holds} {bytes}, \"{name} is not of {bytes} bytes\");");
            for (field, place, bytes) in *fields {
                let _ = writeln!(
                    text,
                    "static_assert(offsetof({name}, {field}) == {place} && sizeof((({name}*)0)->{field}) == {bytes}, \
                     \"{name}.{field} stands elsewhere\");"
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
    fn every_function_is_in_the_libraries_that_are_here() {
        use crate::cuda::libraries::{Libraries, Library};
        let here = Libraries::find();
        let path = |library| here.choose(library, None).unwrap().path.clone();
        crate::cuda::compile::Nvrtc::load(&path(Library::Nvrtc)).map(drop).unwrap();
        crate::cuda::products::Library::load(&path(Library::CublasLt)).map(drop).unwrap();
        crate::cuda::nccl::Library::load(&path(Library::Nccl)).map(drop).unwrap();
    }

    #[test]
    fn every_function_number_and_field_is_asserted() {
        for library in libraries() {
            let text = library.assertions();
            let wanted = library.calls.len()
                + library.numbers.len()
                + library.structures.iter().map(|structure| 1 + structure.fields.len()).sum::<usize>();
            assert_eq!(text.matches("static_assert").count(), wanted, "{}", library.name);
            assert!(!library.calls.is_empty(), "{}", library.name);
        }
        let [driver, _, products, nccl] = libraries();
        let of = |library: &Library, name: &str| {
            let call = *library.calls.iter().find(|call| call.name == name).expect(name);
            (call.returned, call.arguments)
        };
        let (integer, wide) = (Word::Integer(4), Word::Integer(8));
        assert_eq!(of(&driver, "cuMemUnmap"), (integer, [wide, wide].as_slice()));
        assert_eq!(of(&driver, "cuEventElapsedTime"), (integer, [Word::Pointer; 3].as_slice()));
        assert_eq!(of(&products, "cublasLtGetVersion"), (wide, [].as_slice()));
        assert_eq!(of(&nccl, "ncclCommInitRankConfig").1[2], Word::Structure(128));
    }
}
