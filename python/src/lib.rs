//! `plimsoll._native`, the native module of the Python package.
//!
//! Arguments are a run file and its settings; results are the JSON that the command line prints. The Python files in
//! `plimsoll/` convert them to typed values. Long functions release the interpreter's lock. Failures become exceptions
//! with the message, the hints and the exit code of the command line.

#![forbid(unsafe_code)]

mod device_server;
mod failure;
mod machine_watch;
mod memory_hold;
mod training;

use failure::{argument_error, refusal, run_detached, to_exception};
use plimsoll_core::{Budget, Bytes, Failure, ParseBudgetError, printable};
use plimsoll_device::bench::cpu_products;
use plimsoll_device::machine::Machine;
use plimsoll_plan::device_request::{DeviceAttributes, DeviceRequest, DevicesRequest, RequestError};
use plimsoll_train::config::RunConfig;
use plimsoll_train::planning;
use plimsoll_train::resolve::{self, HubNeed, RunRequest, fetch_hub_files};
use plimsoll_train::{remote, session::control};
use plimsoll_watch::devices as shown;
use pyo3::prelude::*;
use pyo3::types::PyString;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Loads a run file with settings, fetches its files of the hub, and connects to its remote devices. Settings without a
/// file are a run of their own if they name a model; otherwise they change the built-in example.
fn load_run(path: Option<&Path>, settings: &[String], need: HubNeed) -> Result<RunRequest, Failure> {
    let config = match path {
        None if settings.iter().any(|setting| setting.starts_with("model.")) => RunConfig::from_settings(settings)?,
        path => RunConfig::load(path, settings)?,
    };
    with_files_and_devices(config.into(), need)
}

/// Fetches the files of hub ids in a run, and connects it to its remote devices.
fn with_files_and_devices(mut run: RunRequest, need: HubNeed) -> Result<RunRequest, Failure> {
    fetch_hub_files(&mut run.config, need, &mut |_| ())?;
    with_remote_devices(run)
}

/// Connects a run to its devices of the cluster, if it has some. For the connection, starts this Python interpreter as
/// another process.
fn with_remote_devices(mut run: RunRequest) -> Result<RunRequest, Failure> {
    if run.devices().has_remote_devices() {
        let executable = |py: Python<'_>| py.import("sys")?.getattr("executable")?.extract::<PathBuf>();
        let python = Python::attach(executable).map_err(|error| Failure::bug(format!("sys.executable: {error}")))?;
        run.remote = remote::ray::connect_cluster(&run.config, &python)?;
    }
    Ok(run)
}

/// Formats a result as JSON.
fn json(result: &impl Serialize) -> String {
    serde_json::to_string(result).expect("plain data has a JSON form")
}

/// Returns the JSON of `plimsoll plan --json`. With `must_fit`, a plan that does not fit raises an exception.
#[pyfunction]
fn plan(
    py: Python<'_>,
    path: Option<PathBuf>,
    settings: Vec<String>,
    explain: bool,
    must_fit: bool,
) -> PyResult<String> {
    run_detached(py, || {
        let run = load_run(path.as_deref(), &settings, HubNeed::Plan)?;
        let plan = planning::plan(&run, explain)?.outcome.plan;
        if must_fit && !plan.fits {
            return Err(refusal(&run.devices(), &plan));
        }
        Ok(json(&plan))
    })
}

/// Returns the JSON of `plimsoll devices --json`.
#[pyfunction]
fn devices(py: Python<'_>) -> PyResult<String> {
    run_detached(py, || Ok(shown::json(&Machine::read())))
}

/// Returns JSON of the devices that these settings name, with the rates from which the planner predicts seconds.
/// Measures rates that are not stored yet.
#[pyfunction]
fn resolve_devices(py: Python<'_>, settings: Vec<String>) -> PyResult<String> {
    run_detached(py, || Ok(json(&resolve::resolve_devices(&RunConfig::load(None, &settings)?.into())?)))
}

/// Returns JSON of the devices that these settings name: names, kinds and load lines. Measures nothing.
#[pyfunction]
fn list_named_devices(py: Python<'_>, settings: Vec<String>) -> PyResult<String> {
    run_detached(py, || Ok(json(&resolve::list_named_devices(&RunConfig::load(None, &settings)?.into())?)))
}

/// Changes the load line of a device in a run that is under way; `device` may be `None` if the run has one device.
/// Returns the JSON of `plimsoll budget --json`.
#[pyfunction]
fn budget(py: Python<'_>, run_dir: PathBuf, budget: &str, device: Option<&str>) -> PyResult<String> {
    run_detached(py, || {
        let budget: Budget = budget.parse().map_err(|error| Failure::input(format!("budget: {error}")))?;
        Ok(json(&control::request_budget(&run_dir, device, budget)?))
    })
}

/// Returns the bytes of a budget, which is an amount such as `6GiB` or a share such as `50%` of `free_bytes`.
#[pyfunction]
fn budget_bytes(py: Python<'_>, budget: &str, free_bytes: u64) -> PyResult<u64> {
    let budget = budget.parse().map_err(|error: ParseBudgetError| Failure::input(error.to_string()));
    budget.map(|budget: Budget| budget.load_line(Bytes(free_bytes)).0).map_err(|failure| to_exception(py, &failure))
}

/// Formats bytes as the command line does, such as `1.50 GiB`.
#[pyfunction]
fn format_bytes(count: u64) -> String {
    Bytes(count).to_string()
}

/// Returns text with escapes for the characters that act on a terminal, except line breaks and tabs.
#[pyfunction]
fn printable_text(text: &Bound<'_, PyString>) -> String {
    // Python's names of files may have no UTF-8 form.
    printable::printable_text(&text.to_string_lossy()).into_owned()
}

/// Formats a message and its hints as the command line does.
#[pyfunction]
fn failure_text(message: &Bound<'_, PyString>, hints: Vec<Bound<'_, PyString>>) -> String {
    let failure = Failure::input(message.to_string_lossy());
    hints.iter().fold(failure, |failure, hint| failure.hint(hint.to_string_lossy())).to_string()
}

/// The attributes that an entry of `run.devices` states, for Python.
#[derive(Serialize)]
struct ParsedDevice {
    /// The whole entry in the notation of the run file.
    text: String,
    /// The host of the device; `None` if the entry names no host.
    host: Option<String>,
    /// The device as named on its host.
    device: String,
    /// The load line, an amount or a share of free memory; `None` if the entry states none.
    budget: Option<String>,
    /// The pace of a simulated device in CPU cores; `None` if the entry states none.
    pace: Option<f64>,
}

impl ParsedDevice {
    fn new(device: &DeviceRequest, attributes: DeviceAttributes) -> ParsedDevice {
        ParsedDevice {
            text: device.to_string(),
            host: attributes.host,
            device: attributes.device,
            budget: attributes.budget.map(|budget| budget.to_string()),
            pace: attributes.pace,
        }
    }
}

/// Parses a list in the notation of `run.devices`. Returns each device with the attributes that its entry states.
fn parse_entries(text: &str) -> Result<Vec<(DeviceRequest, DeviceAttributes)>, Failure> {
    let with_attributes = |device: DeviceRequest| device.attributes().map(|attributes| (device, attributes));
    let parse = || {
        let devices = text.parse::<DevicesRequest>()?.devices;
        devices.into_iter().map(with_attributes).collect::<Result<Vec<_>, RequestError>>()
    };
    parse().map_err(|error| {
        let failure = Failure::from(error);
        Failure { message: format!("run.devices: {}", failure.message), ..failure }
    })
}

/// Parses a list in the notation of `run.devices`. Returns JSON of the attributes of each device.
#[pyfunction]
fn parse_devices(py: Python<'_>, text: &str) -> PyResult<String> {
    let entries = parse_entries(text).map_err(|failure| to_exception(py, &failure))?;
    let parsed = entries.into_iter().map(|(device, attributes)| ParsedDevice::new(&device, attributes));
    Ok(json(&parsed.collect::<Vec<_>>()))
}

/// Returns the `run.devices` entry of a device that a run has reserved. Its load line is `budget`. Attributes that
/// `device` does not state come from `joined_as`, the device with which its node joined the cluster; with `None` they
/// stay absent.
#[pyfunction]
fn with_node_defaults(py: Python<'_>, device: &str, budget: &str, joined_as: Option<&str>) -> PyResult<String> {
    let attributes =
        |text: &str| parse_entries(text).map(|mut entries| entries.pop().expect("a list names a device").1);
    let complete = || {
        let budget = budget.parse().map_err(argument_error::<ParseBudgetError>("budget"))?;
        let joined_as = joined_as.map(attributes).transpose()?.unwrap_or_default();
        attributes(device).map(|stated| stated.with_node_defaults(budget, &joined_as).to_string())
    };
    complete().map_err(|failure| to_exception(py, &failure))
}

/// Measures the floating-point operations per second of f32 matrix products on `threads` CPU threads for `seconds`.
#[pyfunction]
fn measure_product_flops(py: Python<'_>, threads: u32, seconds: f64) -> PyResult<f64> {
    run_detached(py, || {
        let duration = Duration::try_from_secs_f64(seconds).map_err(argument_error("seconds"))?;
        Ok(cpu_products(threads, duration)?.sustained_flops)
    })
}

/// The Python module. `plimsoll/_native.pyi` declares its types.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::device_server::DeviceServer;
    #[pymodule_export]
    use super::machine_watch::MachineWatch;
    #[pymodule_export]
    use super::memory_hold::MemoryHold;
    #[pymodule_export]
    use super::training::train;
    #[pymodule_export]
    use super::{
        budget, budget_bytes, devices, failure_text, format_bytes, list_named_devices, measure_product_flops,
        parse_devices, plan, printable_text, resolve_devices, with_node_defaults,
    };

    /// Version of the module and of the command line built with it.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
