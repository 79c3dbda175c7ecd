//! The request for one run: its configuration together with what no run file can hold, namely live connections to remote
//! devices and load lines that were changed while the run was active.

use crate::config::RunConfig;
use crate::remote::RemoteDevices;
use plimsoll_core::{Budget, Bytes, Failure};
use plimsoll_plan::device_request::{DeviceRequest, DevicesRequest};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::path::Path;

/// A request for a run: its settings, connections and changed load lines. It dereferences to its [`RunConfig`], because
/// most code needs nothing else.
#[derive(Clone, Debug, Default)]
pub struct RunRequest {
    /// The settings of the run, as plain data.
    pub config: RunConfig,
    /// Connections to devices on other hosts or in other processes. The caller provides them; no run file names them.
    pub remote: RemoteDevices,
    /// Load lines (the most bytes that a device may hold) that the user changed while the run was active, by device
    /// name. They are stored in `load-lines.json`.
    pub budget_overrides: BTreeMap<String, Budget>,
    /// Measures the rates of this processor with a number of threads in another process, and caches them. A full
    /// measurement takes about 200 MiB, more than a small load line. `None` measures in this process, within the load
    /// line.
    pub measure_rates: Option<fn(u32)>,
    /// Memory of this process, in bytes, that the charges of a plan count; `None` measures it. Several plans of one
    /// process share a value: each takes memory of the process that no run holds, and would charge the next one for it.
    pub process_bytes: Option<Bytes>,
    /// Bytes by name of a GPU that count as free there although another process holds them now. A plan with them is that
    /// of the run once the process has ended.
    pub(crate) freed_bytes: BTreeMap<String, Bytes>,
    /// Whether devices have their nominal figures: speeds by their model, the whole memory instead of the free part,
    /// assumed charges. These are the same at each start. `planning::nominal` plans with them.
    pub(crate) nominal: bool,
    /// Number of completions that are sampled at once, unless the run file names it; `None` before planning decides it.
    pub(crate) slots: Option<u64>,
}

impl From<RunConfig> for RunRequest {
    fn from(config: RunConfig) -> RunRequest {
        RunRequest { config, ..RunRequest::default() }
    }
}

impl Deref for RunRequest {
    type Target = RunConfig;

    fn deref(&self) -> &RunConfig {
        &self.config
    }
}

impl DerefMut for RunRequest {
    fn deref_mut(&mut self) -> &mut RunConfig {
        &mut self.config
    }
}

impl RunRequest {
    /// Creates the request that resumes the run in the folder `run_dir`. `settings` replace those of the run file as in
    /// [`RunConfig::resume`]. Load lines that the user changed while the run was active still apply, unless `settings`
    /// name `memory.budget` or `run.devices`.
    ///
    /// # Errors
    /// The errors of [`RunConfig::resume`].
    pub fn resume(run_dir: &Path, settings: &[String]) -> Result<RunRequest, Failure> {
        let mut request = RunRequest::from(RunConfig::resume(run_dir, settings)?);
        let sets =
            |key: &str| settings.iter().any(|setting| setting.split('=').next().is_some_and(|k| k.trim() == key));
        if !sets("memory.budget") && !sets("run.devices") {
            request.load_budget_overrides(run_dir);
        }
        Ok(request)
    }

    /// Returns the devices of the run. Words that stand for a cluster are replaced by the devices that the cluster
    /// provided.
    pub fn devices(&self) -> DevicesRequest {
        self.remote.devices().cloned().unwrap_or_else(|| self.config.requested_devices())
    }

    /// Returns the load line (the most bytes that it may hold) that the run file gives a device: the one in
    /// `run.devices`, else `memory.budget`.
    pub fn budget_of(&self, device: &str) -> Budget {
        let is_named = |requested: &DeviceRequest| {
            let any_gpu = matches!(requested, DeviceRequest::Cuda { index: None, .. }) && device.starts_with("cuda:");
            any_gpu || requested.name() == device
        };
        let own = self.devices().devices.into_iter().find(is_named).and_then(|requested| requested.budget());
        own.unwrap_or(self.memory.device_budget())
    }

    /// Returns a note if `memory.budget` is set without effect, because `run.devices` gives every device its own load
    /// line. Otherwise returns `None`, also if one of them is that of `memory.budget`: the example's devices take it if
    /// it is lower than theirs.
    pub fn unused_budget_note(&self) -> Option<String> {
        let devices = self.devices();
        let has_own = |requested: &DeviceRequest| requested.budget().is_some();
        // Devices of a cluster have received their amount from memory.budget by now.
        let all_own =
            !devices.devices.is_empty() && devices.devices.iter().all(has_own) && !devices.has_remote_devices();
        let is_taken = |budget: &Budget| devices.devices.iter().any(|device| device.budget() == Some(*budget));
        let budget = self.memory.budget.filter(|budget| all_own && *budget != Budget::DEVICE && !is_taken(budget))?;
        Some(format!("memory.budget = {budget} has no effect: run.devices gives each device an amount of its own"))
    }

    /// Returns the most bytes of host memory that offloaded tensors may fill: `host=` in `run.devices`, else
    /// `memory.host`.
    pub fn host_budget(&self) -> Budget {
        self.devices().host.unwrap_or(self.memory.host)
    }

    /// Returns the most that the scratch file may hold; `None` if there may be no scratch file.
    pub fn scratch_budget(&self) -> Option<Budget> {
        self.devices().file.or(self.memory.file)
    }

    /// Returns the folder of the scratch file; `None` if there may be no scratch file.
    pub fn scratch_folder(&self) -> Option<&Path> {
        self.scratch_budget().map(|_| self.config.scratch_file_folder())
    }
}
