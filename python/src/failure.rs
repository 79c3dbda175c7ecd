//! How a failure reaches Python: as an exception of `plimsoll.errors` that has its exit code, message and hints.

use plimsoll_core::{Failure, Plan};
use plimsoll_plan::request::DevicesRequest;
use plimsoll_watch::ways::{self, Setting, Way};
use pyo3::marker::Ungil;
use pyo3::prelude::*;
use std::any::Any;
use std::collections::BTreeMap;
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

/// Says that a plan does not fit, with the arguments that would.
pub fn refusal(devices: &DevicesRequest, plan: &Plan) -> Failure {
    let ways: Vec<(Way, String)> =
        ways::ways(devices, plan).into_iter().map(|way| (way.clone(), arguments(&way.settings))).collect();
    ways::refusal(plan, &ways, false)
}

/// Settings as arguments of a call: `memory={"budget": "41MiB"}`.
fn arguments(settings: &[Setting]) -> String {
    let mut sections: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for Setting { key, value, .. } in settings {
        let (section, key) = key.split_once('.').expect("a key has a section");
        sections.entry(section).or_default().push(format!("{key:?}: {value:?}"));
    }
    let section = |(section, keys): (&str, Vec<String>)| format!("{section}={{{}}}", keys.join(", "));
    sections.into_iter().map(section).collect::<Vec<_>>().join(", ")
}
