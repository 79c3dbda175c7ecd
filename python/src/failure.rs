//! How a failure reaches Python: as an exception of `plimsoll.errors` that has its exit code, message and hints.

use plimsoll_core::Failure;
use pyo3::marker::Ungil;
use pyo3::prelude::*;
use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Does some work while other threads of the interpreter run, and raises what fails. A panic is a bug of ours and not the
/// end of the interpreter.
pub fn working<T: Ungil + Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, Failure> + Ungil + Send,
) -> PyResult<T> {
    py.detach(|| guarded(work)).map_err(|failure| raised(py, &failure))
}

/// The same without an interpreter.
pub fn guarded<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(our_bug(&*panic)))
}

fn our_bug(panic: &(dyn Any + Send)) -> Failure {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or(panic.downcast_ref::<String>().map(|text| &**text)).unwrap_or("no message");
    Failure::bug(format!("this is a bug in plimsoll: {text}")).hint(concat!(
        "please report it: ",
        env!("CARGO_PKG_REPOSITORY"),
        "/issues"
    ))
}

/// The exception for a failure: which class it is, `plimsoll.errors` knows.
pub fn raised(py: Python<'_>, failure: &Failure) -> PyErr {
    let Failure { exit, message, hints } = failure;
    let make = || py.import("plimsoll.errors")?.call_method1("of", (*exit as i32, message, hints.clone()));
    make().map_or_else(|error| error, PyErr::from_value)
}

/// A failure of an argument, by its name.
pub fn failed<E: Display>(argument: &str) -> impl FnOnce(E) -> Failure {
    move |error| Failure::input(format!("{argument}: {error}"))
}
