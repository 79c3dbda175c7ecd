//! The cluster of healthy readings, and a case for each finding about it.

use super::{Case, FindingId, Readings, Severity};
use crate::cluster::{CheckedNode, Clock, ClusterCheck, Facts, Node, Route};
use plimsoll_core::Failure;

/// Returns a node of a cluster that answers.
fn node(name: &str, ip: &str) -> CheckedNode {
    let version = |version: &str| version.to_owned();
    CheckedNode {
        node: Node { name: name.to_owned(), ip: ip.to_owned(), alive: true, ..Node::default() },
        facts: Some(Facts { python: version("3.12.4"), ray: version("2.60.0"), plimsoll: version("0.1.0") }),
        wire_ports: vec![7400, 7401],
        ..CheckedNode::default()
    }
}

/// Returns a cluster of two machines with nothing to find.
pub(super) fn cluster() -> ClusterCheck {
    let mut nodes =
        vec![node("alpha/cuda:0", "10.0.0.1"), node("beta/cuda:0", "10.0.0.2"), node("beta/cuda:1", "10.0.0.2")];
    for beta in &mut nodes[1..] {
        beta.clock = Some(Clock { offset_seconds: 0.9, error_seconds: 0.001 });
    }
    let route = Route {
        source: "alpha/cuda:0".to_owned(),
        target: "beta/cuda:0".to_owned(),
        ip: "10.0.0.2".to_owned(),
        ..Route::default()
    };
    ClusterCheck { address: "10.0.0.1:7300".to_owned(), nodes, routes: vec![route] }
}

/// Returns the cluster of readings that have one.
pub(super) fn of_cluster(readings: &mut Readings) -> &mut ClusterCheck {
    readings.cluster.as_mut().unwrap().as_mut().unwrap()
}

/// A case for each finding about the cluster.
pub(super) const CLUSTER_CASES: &[Case] = &[
    (
        FindingId::ClusterUnreachable,
        Severity::Warning,
        |r| r.cluster = Some(Err(Failure::input("no answer from 10.0.0.1:7300").hint("join again"))),
        &["cluster-unreachable: no answer from 10.0.0.1:7300\n", "mend: join again\n"],
    ),
    (
        FindingId::ClusterNodeLost,
        Severity::Warning,
        |r| {
            let node = &mut of_cluster(r).nodes[2];
            (node.node.alive, node.facts) = (false, None);
            node.node.lost_reason =
                Some("its cable\n; to see how it joins again, run there: plimsoll cluster".to_owned());
        },
        &[
            "beta/cuda:1 of the cluster is lost: its cable\\n\n",
            "mend: see on its machine how it joins again: plimsoll",
        ],
    ),
    (
        FindingId::ClusterNodeSilent,
        Severity::Warning,
        |r| {
            let node = &mut of_cluster(r).nodes[1];
            (node.facts, node.no_answer_reason) = (None, Some("it does not answer".to_owned()));
        },
        &["beta/cuda:0 of the cluster does not answer: it does not answer", "mend: test it: plimsoll verify"],
    ),
    (
        FindingId::ClusterVersions,
        Severity::Warning,
        |r| of_cluster(r).nodes[0].facts.as_mut().unwrap().ray = "2.60.1".to_owned(),
        &["versions of Ray: 2.60.0 (beta/cuda:0, beta/cuda:1), 2.60.1 (alpha/cuda:0)", "plimsoll leave, plimsoll join"],
    ),
    (
        FindingId::ClockSkew,
        Severity::Warning,
        |r| {
            for node in &mut of_cluster(r).nodes[1..] {
                node.clock = Some(Clock { offset_seconds: -2.5, error_seconds: 0.001 });
            }
        },
        &["the clock of beta (10.0.0.2) is 2.50 s behind that of this machine (± 1.0 ms)", "timedatectl set-ntp true"],
    ),
    (
        FindingId::PortsBlocked,
        Severity::Warning,
        |r| of_cluster(r).routes[0].silent_ports = vec![7400, 7402, 7401, 7310],
        &["from alpha/cuda:0 to beta/cuda:0 (10.0.0.2), ports 7310, 7400-7402 neither accept nor refuse connections"],
    ),
    (
        FindingId::PortsBlocked,
        Severity::Warning,
        |r| of_cluster(r).routes[0].refused_ports = vec![7310],
        &["ports 7310 of Ray refuse connections", "test the connections: plimsoll verify"],
    ),
    (
        FindingId::PortsTaken,
        Severity::Warning,
        |r| of_cluster(r).nodes[1].wire_ports_taken = vec![7400, 7401],
        &["all ports 7400-7401 for connections of runs on beta/cuda:0 are taken", "ss -ltnp 'sport >= :7400 and"],
    ),
];
