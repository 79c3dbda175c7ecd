//! The judgement of readings: a pure function from [`Readings`] to findings.

use super::{Finding, FindingId, Readings, Severity, cluster, gpu, host, run, software};

/// Judges readings, and returns the findings, most severe first. Findings of equal severity keep the order of the
/// checks: the run, NVIDIA's software, each GPU, the machine, then its cluster.
pub fn findings(readings: &Readings) -> Vec<Finding> {
    let mut findings = run::findings(readings);
    findings.extend(software::findings(readings));
    findings.extend(gpu::findings(readings));
    findings.extend(host::findings(readings));
    findings.extend(cluster::findings(readings));
    findings.sort_by_key(|finding| finding.severity);
    findings
}

impl Finding {
    /// Creates a finding of a check.
    pub(super) fn new(
        id: FindingId,
        severity: Severity,
        text: impl Into<String>,
        cost: impl Into<String>,
        mend: impl Into<String>,
    ) -> Finding {
        Finding { id, severity, text: text.into(), cost: cost.into(), mend: mend.into() }
    }
}
