//! Checks of the Ray cluster that this machine has joined: nodes, versions, clocks and ports.

use super::{Finding, FindingId, Readings, Severity};
use crate::cluster::{CheckedNode, Clock, ClusterCheck, Facts, Node, Route};
use crate::text::{excerpt, seconds};
use plimsoll_core::Failure;
use plimsoll_core::printable::printable_line;
use std::collections::{BTreeMap, BTreeSet};

/// Least difference between the clocks of two machines, in seconds, that counts.
const CLOCK_SECONDS: f64 = 1.0;
/// Most nodes that a finding names for one version.
const NAMES_MAX: usize = 4;
/// Mend of ports that a firewall closes.
const OPEN_PORTS: &str = "allow TCP between the machines on ports 7300 and 7310-7419, 110 more for each further device; with \
                          join --ports, from that port on\n\
                          test the connections: plimsoll verify";

/// Returns the findings about the cluster; empty if this machine has joined none.
pub(super) fn findings(readings: &Readings) -> Vec<Finding> {
    let check = match &readings.cluster {
        None => return vec![],
        Some(Err(failure)) => return vec![unreachable(failure)],
        Some(Ok(check)) => check,
    };
    let mut findings: Vec<Finding> = check.nodes.iter().filter_map(lost_or_silent).collect();
    findings.extend(versions(check));
    findings.extend(clocks(check));
    findings.extend(check.routes.iter().filter_map(blocked_ports));
    findings.extend(check.nodes.iter().filter_map(taken_ports));
    findings
}

/// Returns the finding for a cluster that this machine has joined and does not reach.
fn unreachable(failure: &Failure) -> Finding {
    let hints: Vec<String> = failure.hints.iter().map(|hint| printable_line(hint)).collect();
    let mend = if hints.is_empty() { "see its state: plimsoll cluster".to_owned() } else { hints.join("\n") };
    let cost = "runs on devices of the cluster do not start; its versions, clocks and ports are unknown";
    Finding::new(FindingId::ClusterUnreachable, Severity::Warning, &failure.message, cost, mend)
}

/// Returns a finding for a node that is lost, or whose process did not answer.
fn lost_or_silent(checked: &CheckedNode) -> Option<Finding> {
    let name = excerpt(&checked.node.name);
    if !checked.node.alive {
        // The reason ends with the command, which is the mend here.
        let reason = checked.node.lost_reason.as_deref().and_then(|reason| reason.split("; to see").next());
        let text = format!("{name} of the cluster is lost: {}", excerpt(reason.unwrap_or("it no longer answers")));
        let mend = "see on its machine how it joins again: plimsoll cluster";
        return Some(Finding::new(FindingId::ClusterNodeLost, Severity::Warning, text, "no run uses it", mend));
    }
    if checked.facts.is_some() {
        return None;
    }
    let reason = excerpt(checked.no_answer_reason.as_deref().unwrap_or("no reason is known"));
    let text = format!("{name} of the cluster does not answer: {reason}");
    let cost = "a run on it may not start; its versions, clock and ports are unknown";
    Some(Finding::new(FindingId::ClusterNodeSilent, Severity::Warning, text, cost, "test it: plimsoll verify"))
}

/// Returns a finding for each program of which the nodes have different versions.
fn versions(check: &ClusterCheck) -> Vec<Finding> {
    let mut findings = Vec::new();
    for program in ["Python", "Ray", "Plimsoll"] {
        let mut nodes: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for checked in &check.nodes {
            let Some(facts) = &checked.facts else { continue };
            nodes.entry(version(facts, program)).or_default().push(&checked.node.name);
        }
        if nodes.len() < 2 {
            continue;
        }
        let versions = nodes.iter().map(|(version, names)| format!("{} ({})", excerpt(version), list(names)));
        let text =
            format!("the nodes have different versions of {program}: {}", versions.collect::<Vec<_>>().join(", "));
        let cost = "runs over these nodes may not start, or fail: Ray needs equal versions to the patch level";
        let mend =
            format!("install the same version of {program} on all machines, and there: plimsoll leave, plimsoll join");
        findings.push(Finding::new(FindingId::ClusterVersions, Severity::Warning, text, cost, mend));
    }
    findings
}

/// Returns the version of a program on a node.
fn version<'f>(facts: &'f Facts, program: &str) -> &'f str {
    match program {
        "Python" => &facts.python,
        "Ray" => &facts.ray,
        _ => &facts.plimsoll,
    }
}

/// Lists names, of which the first are shown.
fn list(names: &[&str]) -> String {
    let shown = names.iter().take(NAMES_MAX).map(|name| excerpt(name));
    let more = names.len().saturating_sub(NAMES_MAX);
    shown.chain((more > 0).then(|| format!("{more} more"))).collect::<Vec<_>>().join(", ")
}

/// Returns a finding for each machine whose clock differs from that of this one, beyond the error of the measurement.
fn clocks(check: &ClusterCheck) -> Vec<Finding> {
    let mut machines = BTreeSet::new();
    let compared = check.nodes.iter().filter_map(|checked| Some((&checked.node, checked.clock?)));
    let apart = compared.filter(|(_, clock)| clock.offset_seconds.abs() - clock.error_seconds > CLOCK_SECONDS);
    apart.filter(|(node, _)| machines.insert(&node.ip)).map(|(node, clock)| clock_apart(node, clock)).collect()
}

fn clock_apart(node: &Node, clock: Clock) -> Finding {
    let side = if clock.offset_seconds > 0.0 { "ahead of" } else { "behind" };
    let [apart, error] = [clock.offset_seconds.abs(), clock.error_seconds].map(seconds);
    let (host, ip) = (excerpt(node.host()), excerpt(&node.ip));
    let text = format!("the clock of {host} ({ip}) is {apart} {side} that of this machine (± {error})");
    let cost = "times in logs and files of the two machines cannot be compared; runs do not depend on these clocks";
    let mend = "on both machines: sudo timedatectl set-ntp true";
    Finding::new(FindingId::ClockSkew, Severity::Warning, text, cost, mend)
}

/// Returns a finding if ports of a node do not answer another machine.
fn blocked_ports(route: &Route) -> Option<Finding> {
    let (source, target, ip) = (excerpt(&route.source), excerpt(&route.target), excerpt(&route.ip));
    let mut parts = Vec::new();
    if !route.silent_ports.is_empty() {
        parts.push(format!("{} neither accept nor refuse connections", ports(&route.silent_ports)));
    }
    if !route.refused_ports.is_empty() {
        parts.push(format!("{} of Ray refuse connections", ports(&route.refused_ports)));
    }
    if parts.is_empty() {
        return None;
    }
    let text = format!("from {source} to {target} ({ip}), {}", parts.join(", and "));
    let cost = "a run over both machines does not start, or Ray loses the node";
    Some(Finding::new(FindingId::PortsBlocked, Severity::Warning, text, cost, OPEN_PORTS))
}

/// Returns a finding if no port of a node is free for a further run.
fn taken_ports(checked: &CheckedNode) -> Option<Finding> {
    let (all, taken) = (&checked.wire_ports, &checked.wire_ports_taken);
    let [first, .., last] = all[..] else { return None };
    if taken.len() < all.len() {
        return None;
    }
    let name = excerpt(&checked.node.name);
    let text = format!("all {} for connections of runs on {name} are taken", ports(all));
    let cost = "no further run with several devices can use it";
    let mend = format!(
        "end runs on it: plimsoll cluster\nor other programs: ss -ltnp 'sport >= :{first} and sport <= :{last}'"
    );
    Some(Finding::new(FindingId::PortsTaken, Severity::Warning, text, cost, mend))
}

/// Formats ports: `ports 7310, 7400-7419`.
fn ports(ports: &[u16]) -> String {
    let mut ranges: Vec<(u16, u16)> = Vec::new();
    for port in ports.iter().copied().collect::<BTreeSet<_>>() {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == port => *last = port,
            _ => ranges.push((port, port)),
        }
    }
    let range = |(first, last): (u16, u16)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    format!("ports {}", ranges.into_iter().map(range).collect::<Vec<_>>().join(", "))
}
