//! Conversion of failures to Python exceptions of `plimsoll.errors`, with exit code, message and hints.

use plimsoll_core::{Failure, Plan};
use plimsoll_plan::device_request::DevicesRequest;
use plimsoll_train::planning::prepare::PassedLoadLines;
use plimsoll_watch::remedies::{self, RemedySettings, Setting};
use pyo3::marker::Ungil;
use pyo3::prelude::*;
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `work` without the interpreter's lock, and raises its failure as an exception. A panic is reported as a bug and
/// does not end the interpreter.
pub fn run_detached<T: Ungil + Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, Failure> + Ungil + Send,
) -> PyResult<T> {
    py.detach(|| catch_panic(work)).map_err(|failure| to_exception(py, &failure))
}

/// Runs `work` and converts a panic to a failure.
pub fn catch_panic<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panic_failure(&*panic)))
}

fn panic_failure(panic: &(dyn Any + Send)) -> Failure {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or(panic.downcast_ref::<String>().map(|text| &**text)).unwrap_or("no message");
    Failure::bug(format!("this is a bug in plimsoll: {text}")).hint(concat!(
        "please report it: ",
        env!("CARGO_PKG_REPOSITORY"),
        "/issues"
    ))
}

/// Returns the exception for a failure. `plimsoll.errors` selects the class by exit code.
pub fn to_exception(py: Python<'_>, failure: &Failure) -> PyErr {
    let Failure { exit, message, hints } = failure;
    let make = || py.import("plimsoll.errors")?.call_method1("from_exit_code", (*exit as i32, message, hints.clone()));
    make().map_or_else(|error| error, PyErr::from_value)
}

/// Returns a function that converts an error to a failure about invalid input. The message begins with the argument's
/// name.
pub fn argument_error<E: Display>(argument: &str) -> impl FnOnce(E) -> Failure {
    move |error| Failure::input(format!("{argument}: {error}"))
}

/// Returns the failure for a plan that does not fit. Each hint shows arguments for the Python functions with which the
/// run fits.
pub fn refusal(devices: &DevicesRequest, plan: &Plan) -> Failure {
    let remedies: Vec<(RemedySettings, String)> = remedies::remedies(devices, plan)
        .into_iter()
        .map(|remedy| (remedy.clone(), arguments(&remedy.settings)))
        .collect();
    remedies::refusal(plan, &remedies, false)
}

/// Returns the failure for a run whose preparation passed load lines. The hint shows arguments that give enough.
pub fn refusal_of_preparation(devices: &DevicesRequest, passed: &PassedLoadLines) -> Failure {
    let (failure, settings) = remedies::refusal_of_preparation(devices, passed.peak, &passed.devices);
    failure.hint(arguments(&settings))
}

/// Formats settings as arguments of a Python call: `memory={"budget": "41MiB"}`.
fn arguments(settings: &[Setting]) -> String {
    let mut sections: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for Setting { key, value, .. } in settings {
        let (section, key) = key.split_once('.').expect("a key has a section");
        sections.entry(section).or_default().push(format!("{key:?}: {value:?}"));
    }
    let section = |(section, keys): (&str, Vec<String>)| format!("{section}={{{}}}", keys.join(", "));
    sections.into_iter().map(section).collect::<Vec<_>>().join(", ")
}
