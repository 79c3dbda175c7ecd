//! Checks of a machine, and of a run on it, before the work: `plimsoll doctor`.
//!
//! ```text
//! /proc, /sys, drivers, limits ─► readings ┐
//! run file ─► the caller plans ────────────┼► findings ─► text, JSON
//! Ray ─► the caller asks all nodes ────────┘
//! ```
//!
//! | module | content |
//! |---|---|
//! | [`readings`] | figures of the machine and of the run, without judgement |
//! | [`findings`](mod@findings) | the pure function from readings to findings |
//! | `software`, `gpu`, `host`, `run`, `cluster` | the checks of each subject |
//!
//! Reading changes nothing. A check whose figures are unknown has no finding.

mod cluster;
pub mod findings;
mod gpu;
mod host;
pub mod readings;
mod run;
mod software;
#[cfg(test)]
mod tests;

pub use findings::findings;
pub use readings::{GpuReadings, PlanReadings, Readings, RunReadings};

use crate::text::wrapped;
use plimsoll_core::printable::printable_line;
use plimsoll_core::{Exit, format_count};
use serde::Serialize;
use serde_json::Value;
use std::fmt;

/// Width of the text, in characters. Commands to copy stay on one line.
const WIDTH: usize = 80;

/// Importance of a finding. The most severe comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The run, or all work on a GPU, fails.
    Error,
    /// Work is slower, has less memory, or may fail later.
    Warning,
    /// A fact to know. It may be intended.
    Note,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "note",
        })
    }
}

/// Declares [`FindingId`] with the list of all its values.
macro_rules! finding_ids {
    ($($(#[doc = $text:literal])* $id:ident,)*) => {
        /// The check that a finding comes from. Its name in text and JSON stays the same in later versions.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(rename_all = "kebab-case")]
        pub enum FindingId {
            $($(#[doc = $text])* $id,)*
        }

        impl FindingId {
            /// Every check.
            pub const ALL: &[FindingId] = &[$(FindingId::$id,)*];
        }
    };
}

finding_ids! {
    /// The run file, its model, its data or its folder is invalid.
    RunInvalid,
    /// The run does not fit under its load lines.
    RunDoesNotFit,
    /// The run fits.
    RunFits,
    /// A change of settings, or the end of another process, makes the run faster.
    RunFaster,
    /// The disk of the run folder is too small for checkpoints.
    DiskSpace,
    /// The run folder cannot be written.
    FolderNotWritable,
    /// The run leaves a GPU of this machine unused.
    GpuUnused,
    /// This machine has no NVIDIA GPU.
    NoNvidiaGpu,
    /// An NVIDIA card is on the bus, and no driver is installed.
    DriverMissing,
    /// NVML is installed without the CUDA driver.
    DriverIncomplete,
    /// The driver does not start.
    DriverFails,
    /// A library that GPUs need is missing, or its version does not match the driver.
    LibraryMissing,
    /// NVML is missing or does not start.
    NvmlMissing,
    /// NCCL is missing or cannot be used, on a machine with several GPUs.
    NcclMissing,
    /// The driver lists fewer GPUs than the PCI bus has.
    GpuHidden,
    /// A GPU is too old.
    GpuUnusable,
    /// Other processes hold memory of a GPU.
    GpuMemoryHeld,
    /// Memory of a GPU is held, and no process is listed for it.
    GpuMemoryLeaked,
    /// A GPU drives a display.
    DisplayAttached,
    /// Windows moves GPU memory to system memory when the GPU is full.
    WslSpill,
    /// Other processes compute on a GPU.
    GpuBusy,
    /// A GPU is close to the temperature at which it slows down.
    GpuHot,
    /// The clocks of a GPU are reduced.
    GpuThrottled,
    /// The power limit of a GPU is below its default.
    GpuPowerLimit,
    /// A GPU has fewer PCIe lanes than its slot and itself support.
    PcieWidth,
    /// A busy GPU has a slower PCIe generation than its slot and itself support.
    PcieGeneration,
    /// Little memory of this machine is free.
    HostMemoryShort,
    /// A control group, such as a container, has less memory than the machine.
    MemoryLimit,
    /// The address space of this process is limited.
    AddressSpaceLimit,
    /// The private memory of this process is limited.
    DataLimit,
    /// The size of files is limited.
    FileSizeLimit,
    /// The number of open files is low.
    OpenFilesLimit,
    /// The user can start few further threads.
    ThreadLimit,
    /// Locked memory is limited on a machine with InfiniBand.
    LockedMemoryLimit,
    /// Swap is in use.
    SwapInUse,
    /// Other programs keep the processor busy.
    CpuBusy,
    /// The processor is hot.
    CpuHot,
    /// This machine has joined a cluster and does not reach it.
    ClusterUnreachable,
    /// A node of the cluster is lost.
    ClusterNodeLost,
    /// A node of the cluster does not answer.
    ClusterNodeSilent,
    /// Nodes of the cluster have different versions of Python, Ray or Plimsoll.
    ClusterVersions,
    /// The clock of another machine of the cluster differs from that of this one.
    ClockSkew,
    /// Ports of a node do not answer another machine of the cluster.
    PortsBlocked,
    /// Other programs and runs use all ports of a node for connections of runs.
    PortsTaken,
}

impl fmt::Display for FindingId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match serde_json::to_value(self) {
            Ok(Value::String(name)) => f.pad(&name),
            _ => Err(fmt::Error),
        }
    }
}

/// A condition of the machine or the run that costs the user something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Finding {
    /// The check that the finding comes from.
    pub id: FindingId,
    /// Importance of the finding.
    pub severity: Severity,
    /// The condition, with its figures.
    pub text: String,
    /// Cost of the condition for the user.
    pub cost: String,
    /// Commands or steps that end the condition, one a line.
    pub mend: String,
}

/// All findings of one check-up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Report {
    /// The findings, most severe first.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Judges the readings.
    pub fn new(readings: &Readings) -> Report {
        Report { findings: findings(readings) }
    }

    /// Returns the exit code: that of wrong input if there is an error, else that of success.
    pub fn exit(&self) -> Exit {
        let has_error = self.findings.iter().any(|finding| finding.severity == Severity::Error);
        if has_error { Exit::Input } else { Exit::Done }
    }

    /// Formats the findings as JSON on one line.
    pub fn json(&self) -> String {
        serde_json::to_string(self).expect("a report is plain data")
    }

    /// Formats the findings as blocks of lines, and their number. Ends with a line break.
    pub fn text(&self) -> String {
        let mut text: String = self.findings.iter().map(|finding| block(finding) + "\n").collect();
        let count = |severity| self.findings.iter().filter(|finding| finding.severity == severity).count() as u64;
        let counts = [Severity::Error, Severity::Warning, Severity::Note].map(|severity| (severity, count(severity)));
        let parts = counts.iter().filter(|(_, count)| *count > 0);
        let parts: Vec<String> = parts.map(|(severity, count)| format_count(*count, &severity.to_string())).collect();
        text += &if parts.is_empty() { "nothing found".to_owned() } else { parts.join(", ") };
        text + "\n"
    }
}

/// Formats a finding as its text, its cost and its commands.
fn block(finding: &Finding) -> String {
    let Finding { id, severity, text, cost, mend } = finding;
    let mut block = wrapped(&format!("{severity} {id}: {text}"), WIDTH, "  ");
    block += &wrapped(&format!("  cost: {cost}"), WIDTH, "        ");
    for (number, line) in mend.lines().enumerate() {
        let start = if number == 0 { "  mend: " } else { "        " };
        block += &format!("{start}{}\n", printable_line(line));
    }
    block
}
