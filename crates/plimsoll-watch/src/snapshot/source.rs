//! Takes snapshots: of this machine and its cluster, and of a run in a folder.

use super::Snapshot;
use super::assemble::Readings;
use super::run_folder::RunFolder;
use crate::cluster::ClusterState;
use plimsoll_core::{Failure, Recommendation};
use plimsoll_device::machine::Machine;
use plimsoll_device::probe::{CpuTemperature, CpuUsage, sysfs};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Shortest time from which the load of the processor is known.
const MIN_LOAD_PERIOD: Duration = Duration::from_millis(100);

/// Reads the usage of the processor now; `None` if the system does not report it.
fn cpu_usage_now() -> Option<(CpuUsage, Instant)> {
    Some((CpuUsage::read()?, Instant::now()))
}

/// Takes snapshots, one after the other. Each covers the time since the one before.
pub struct Source {
    run: Option<RunFolder>,
    /// Usage of the processor at the last reading, and its time; `None` if the system does not report it.
    cpu_usage: Option<(CpuUsage, Instant)>,
    /// Recommendations for the run, computed once by the caller, or the reason why there are none; empty until then.
    pub recommendations: Result<Vec<Recommendation>, Failure>,
    /// The newest state of the cluster, or the reason why there is none; `None` if the caller reads no cluster.
    pub cluster: Option<Result<ClusterState, Failure>>,
}

impl Source {
    /// Returns a source of snapshots of this machine, without a run.
    pub fn machine() -> Source {
        Source { run: None, cpu_usage: cpu_usage_now(), recommendations: Ok(vec![]), cluster: None }
    }

    /// Returns a source of snapshots of the run in a folder, with the devices of this machine.
    ///
    /// # Errors
    /// There is no such folder, or it holds no run.
    pub fn run_folder(path: &Path) -> Result<Source, Failure> {
        Ok(Source { run: Some(RunFolder::open(path)?), ..Source::machine() })
    }

    /// Takes a snapshot now.
    ///
    /// # Errors
    /// The event log of the run cannot be read.
    pub fn snapshot(&mut self) -> Result<Snapshot, Failure> {
        if let Some(run) = &mut self.run {
            run.refresh()?;
        }
        let is_due = self.cpu_usage.is_none_or(|(_, time)| time.elapsed() >= MIN_LOAD_PERIOD);
        let now = cpu_usage_now().filter(|_| is_due);
        let cpu_load = now.zip(self.cpu_usage).map(|((now, _), (earlier, _))| now.usage_since(earlier));
        self.cpu_usage = now.or(self.cpu_usage);
        let readings = Readings {
            at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()),
            machine: &Machine::read(),
            cpu_load,
            cpu_celsius: CpuTemperature::read(&sysfs()).celsius,
            run: self.run.as_ref().map(RunFolder::readings),
            recommendations: self.recommendations.as_deref().unwrap_or_default(),
        };
        let mut snapshot = readings.snapshot();
        if let Err(failure) = &self.recommendations {
            snapshot.warnings.push(format!("no recommendations: {}", failure.message));
        }
        match &self.cluster {
            None => {}
            Some(Ok(cluster)) => {
                snapshot.devices.extend(cluster.devices());
                snapshot.warnings.extend(cluster.warnings());
            }
            Some(Err(failure)) => snapshot.warnings.push(format!("the cluster is not shown: {}", failure.message)),
        }
        Ok(snapshot)
    }
}
