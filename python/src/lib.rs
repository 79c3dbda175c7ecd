//! `plimsoll._native`: what Python calls. Arguments are the run file and its settings, answers are JSON as the command line
//! prints it; `plimsoll/` beside this gives them names and types. Whatever takes long lets other threads of the interpreter
//! run, and what fails is raised with the message, the hints and the exit code of the command line.

#![forbid(unsafe_code)]

mod failure;
mod hold;
mod host;
mod training;

use failure::{failed, raised, refusal, working};
use plimsoll_core::{Budget, Bytes, Failure, ParseBudgetError};
use plimsoll_device::bench::cpu_products;
use plimsoll_device::probe;
use plimsoll_plan::request::{DeviceRequest, DevicesRequest, RequestError, Said};
use plimsoll_train::config::RunFile;
use plimsoll_train::resolve;
use plimsoll_train::{remote, session::control};
use plimsoll_watch::devices as shown;
use pyo3::prelude::*;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What a run file and settings mean. Without a file they are a run of their own where they name a model, else they
/// change the built-in example.
fn run_file(path: Option<&Path>, settings: &[String]) -> Result<RunFile, Failure> {
    reached(match path {
        None if settings.iter().any(|setting| setting.starts_with("model.")) => RunFile::from_settings(settings)?,
        path => RunFile::load(path, settings)?,
    })
}

/// The same, with the way to its devices where some are of the cluster: by way of another process of this interpreter.
fn reached(mut file: RunFile) -> Result<RunFile, Failure> {
    if file.devices().elsewhere() {
        let own = |py: Python<'_>| py.import("sys")?.getattr("executable")?.extract::<PathBuf>();
        let python = Python::attach(own).map_err(|error| Failure::bug(format!("sys.executable: {error}")))?;
        remote::ray::reach(&mut file, &python)?;
    }
    Ok(file)
}

/// An answer as the command line writes it.
fn json(answer: &impl Serialize) -> String {
    serde_json::to_string(answer).expect("answers are plain data")
}

/// `plimsoll plan --json`; a plan that does not fit is an answer, too, unless one that fits was asked for.
#[pyfunction]
fn plan(
    py: Python<'_>,
    path: Option<PathBuf>,
    settings: Vec<String>,
    explain: bool,
    must_fit: bool,
) -> PyResult<String> {
    working(py, || {
        let file = run_file(path.as_deref(), &settings)?;
        let plan = resolve::plan(&file, explain)?.answer.plan;
        if must_fit && !plan.fits {
            return Err(refusal(&file.devices(), &plan));
        }
        Ok(json(&plan))
    })
}

/// `plimsoll devices --json`.
#[pyfunction]
fn devices(py: Python<'_>) -> PyResult<String> {
    working(py, || Ok(shown::json(&probe::machine())))
}

/// The devices that run files with these settings name, as the planner sees them: JSON of each.
#[pyfunction]
fn named_devices(py: Python<'_>, settings: Vec<String>) -> PyResult<String> {
    working(py, || Ok(json(&resolve::devices(&RunFile::load(None, &settings)?)?)))
}

/// The same as far as it is known without measuring rates: JSON of names, kinds and load lines.
#[pyfunction]
fn named_lines(py: Python<'_>, settings: Vec<String>) -> PyResult<String> {
    working(py, || Ok(json(&resolve::named(&RunFile::load(None, &settings)?)?)))
}

/// `plimsoll budget --json`.
#[pyfunction]
fn budget(py: Python<'_>, run_dir: PathBuf, budget: &str, device: Option<&str>) -> PyResult<String> {
    working(py, || {
        let budget: Budget = budget.parse().map_err(|error| Failure::input(format!("budget: {error}")))?;
        Ok(json(&control::ask(&run_dir, device, budget)?))
    })
}

/// The bytes of a load line, such as `6GiB`, or `50%` of what there is.
#[pyfunction]
fn amount(py: Python<'_>, text: &str, of_bytes: u64) -> PyResult<u64> {
    let budget = text.parse().map_err(|error: ParseBudgetError| Failure::input(error.to_string()));
    budget.map(|budget: Budget| budget.of(Bytes(of_bytes)).0).map_err(|failure| raised(py, &failure))
}

/// Bytes for a person, as the other commands say them.
#[pyfunction]
fn readable(count: u64) -> String {
    Bytes(count).to_string()
}

/// What each device of a list as in `run.devices` says of itself, as [`Said`](plimsoll_plan::request::Said) has it.
#[derive(Serialize)]
struct Named {
    /// All of it, as run files write it.
    word: String,
    host: Option<String>,
    device: String,
    line: Option<String>,
    pace: Option<f64>,
}

/// What a list as in `run.devices` says of each device that it names, and nothing that it does not.
fn said(text: &str) -> Result<Vec<(DeviceRequest, Said)>, Failure> {
    let of_one = |device: DeviceRequest| device.said().map(|said| (device, said));
    let read =
        || text.parse::<DevicesRequest>()?.devices.into_iter().map(of_one).collect::<Result<Vec<_>, RequestError>>();
    read().map_err(|error| {
        let failure = Failure::from(error);
        Failure { message: format!("run.devices: {}", failure.message), ..failure }
    })
}

/// The same: JSON of each.
#[pyfunction]
fn named(py: Python<'_>, text: &str) -> PyResult<String> {
    let named = |(device, said): (DeviceRequest, Said)| Named {
        word: device.to_string(),
        host: said.host,
        device: said.device,
        line: said.line.map(|line| line.to_string()),
        pace: said.pace,
    };
    let all = said(text).map_err(|failure| raised(py, &failure))?;
    Ok(json(&all.into_iter().map(named).collect::<Vec<_>>()))
}

/// The word of a device for a run that has its bytes: with this load line, and with what it leaves out and its node joined with,
/// which may be nothing.
#[pyfunction]
fn placed(py: Python<'_>, word: &str, line: &str, joined: Option<&str>) -> PyResult<String> {
    let one = |text: &str| said(text).map(|mut all| all.pop().expect("a list names a device").1);
    let placed = || {
        let line = line.parse().map_err(failed::<ParseBudgetError>("line"))?;
        let joined = joined.map(one).transpose()?.unwrap_or_default();
        one(word).map(|said| said.placed(line, &joined).to_string())
    };
    placed().map_err(|failure| raised(py, &failure))
}

/// Operations a second of f32 products on so many threads of the processor, measured for so many seconds.
#[pyfunction]
fn product_flops(py: Python<'_>, threads: u32, seconds: f64) -> PyResult<f64> {
    working(py, || {
        let duration = Duration::try_from_secs_f64(seconds).map_err(failed("seconds"))?;
        Ok(cpu_products(threads, duration)?.sustained_flops)
    })
}

/// The module; `plimsoll/_native.pyi` has its types.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::hold::Hold;
    #[pymodule_export]
    use super::host::Host;
    #[pymodule_export]
    use super::training::train;
    #[pymodule_export]
    use super::{amount, budget, devices, named, named_devices, named_lines, placed, plan, product_flops, readable};

    /// Of the program that this was built with.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
