//! The state of a Ray cluster, as `plimsoll.ray.inspection` on the Python side reports it. Unknown values are `None`.
//!
//! [`ClusterCheck`] is judged by [`crate::doctor`]; [`ClusterState`] becomes devices of a [`crate::snapshot::Snapshot`].

use crate::snapshot::{DeviceSnapshot, ProcessSnapshot};
use plimsoll_core::Bytes;
use serde::Deserialize;

/// A node of the cluster, which is one device.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Node {
    /// Name: `beta/cuda:0`. For a node that `plimsoll join` did not add, its address.
    pub name: String,
    /// Address of its machine.
    pub ip: String,
    /// Whether Ray reaches the node.
    pub alive: bool,
    /// Ray's reason for the loss of the node; `None` while it is alive.
    #[serde(default)]
    pub lost_reason: Option<String>,
    /// Product name of the device; empty if unknown.
    pub model: String,
    /// Whether the device is simulated.
    pub simulated: bool,
    /// Load line of the device in MiB; `None` for a CPU, which uses the memory of its machine.
    pub vram_mib: Option<u64>,
    /// Processes of runs on the node.
    #[serde(default)]
    pub runs: Vec<RunWorker>,
}

/// A process of a run on a node.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct RunWorker {
    /// Host and folder of the run: `alpha:/home/me/runs/sums`.
    pub owner: String,
    /// Process id on the machine of the node.
    pub pid: u32,
}

impl Node {
    /// Returns the name of the machine of the node.
    pub fn host(&self) -> &str {
        self.name.split('/').next().unwrap_or(&self.name)
    }
}

/// The state of a cluster for `plimsoll doctor`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct ClusterCheck {
    /// Address of the head.
    pub address: String,
    /// The nodes, lost ones last.
    pub nodes: Vec<CheckedNode>,
    /// The ports of each node, as each other machine reaches them.
    pub routes: Vec<Route>,
}

/// A node with the answers of a process on it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct CheckedNode {
    /// The node.
    #[serde(flatten)]
    pub node: Node,
    /// The reason for which the node did not answer.
    #[serde(default)]
    pub no_answer_reason: Option<String>,
    /// Versions; `None` if the node did not answer.
    pub facts: Option<Facts>,
    /// Its clock compared with that of this machine; `None` if unknown, and for nodes of this machine.
    pub clock: Option<Clock>,
    /// Ports for connections between workers; empty if they are not fixed or unknown.
    pub wire_ports: Vec<u16>,
    /// Those of them on which a program of its machine accepts connections.
    pub wire_ports_taken: Vec<u16>,
}

/// Versions on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Facts {
    /// Version of Python.
    pub python: String,
    /// Version of Ray.
    pub ray: String,
    /// Version of Plimsoll.
    pub plimsoll: String,
}

/// The clock of a machine, compared with that of this one.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Clock {
    /// Seconds by which it is ahead; negative if it is behind.
    pub offset_seconds: f64,
    /// Most seconds by which that figure may be wrong: half of the round trip of the question.
    pub error_seconds: f64,
}

/// The ports of a node, as another machine reaches them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Route {
    /// Name of a node on the machine that connects.
    pub source: String,
    /// Name of the node with the ports.
    pub target: String,
    /// Address of its machine.
    pub ip: String,
    /// Ports that neither accept nor refuse a connection.
    pub silent_ports: Vec<u16>,
    /// Ports of Ray that refuse connections, although Ray listens on them.
    pub refused_ports: Vec<u16>,
}

/// The state of a cluster for `plimsoll watch`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct ClusterState {
    /// Address of this machine in the cluster.
    pub own_ip: String,
    /// The nodes, lost ones last.
    pub nodes: Vec<WatchedNode>,
}

/// A node with the figures of its device.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct WatchedNode {
    /// The node.
    #[serde(flatten)]
    pub node: Node,
    /// The device as its machine shows it; `None` if it did not answer for some seconds, and for a simulated device.
    pub figures: Option<DeviceSnapshot>,
    /// Memory of the device that no run has reserved; `None` for a lost node.
    pub unreserved_bytes: Option<Bytes>,
}

impl ClusterState {
    /// Returns the devices of the cluster that [`crate::snapshot::source::Source`] does not read on this machine: those
    /// of other machines, and simulated ones.
    pub fn devices(&self) -> Vec<DeviceSnapshot> {
        let shown = self.nodes.iter().filter(|node| node.node.alive && !self.is_read_here(&node.node));
        shown.map(WatchedNode::device).collect()
    }

    /// Returns the conditions of the cluster that need attention.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for WatchedNode { node, figures, .. } in &self.nodes {
            if !node.alive {
                let reason = node.lost_reason.as_deref().unwrap_or("it no longer answers");
                warnings.push(format!("{} of the cluster is lost: {reason}", node.name));
            } else if figures.is_none() && !node.simulated && !self.is_read_here(node) {
                warnings.push(format!("{} of the cluster does not answer; its figures are unknown", node.name));
            }
        }
        warnings
    }

    /// Returns whether a node is a device that this machine reads itself.
    fn is_read_here(&self, node: &Node) -> bool {
        node.ip == self.own_ip && !node.simulated
    }
}

impl WatchedNode {
    /// Returns the device of the node. A run could take what no run has reserved.
    fn device(&self) -> DeviceSnapshot {
        let Node { name, model, simulated, vram_mib, .. } = &self.node;
        let figures = self.figures.clone().unwrap_or_default();
        let named = Some(model.clone()).filter(|model| !model.is_empty() && !simulated);
        DeviceSnapshot {
            name: name.clone(),
            model: figures.model.or(named),
            simulated: *simulated,
            in_run: false,
            total_bytes: figures.total_bytes.or(vram_mib.filter(|_| *simulated).map(Bytes::mib)),
            load_line_bytes: self.unreserved_bytes,
            processes: self.processes(figures.processes),
            ..figures
        }
    }

    /// Returns the processes that the driver lists, with the names of runs, and then the other processes of runs.
    fn processes(&self, mut listed: Vec<ProcessSnapshot>) -> Vec<ProcessSnapshot> {
        for RunWorker { owner, pid } in &self.node.runs {
            let known = listed.iter_mut().find(|process| process.pid == *pid);
            match known {
                Some(process) => (process.name, process.is_plimsoll) = (Some(owner.clone()), true),
                None => listed.push(ProcessSnapshot {
                    pid: *pid,
                    name: Some(owner.clone()),
                    held_bytes: None,
                    is_plimsoll: true,
                }),
            }
        }
        listed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Returns a node as Python prints it, with these keys changed.
    fn node(name: &str, changes: &Value) -> Value {
        let mut node = json!({
            "name": name, "id": "1f", "ip": "10.0.0.2", "alive": true, "model": "Card", "simulated": false, "cpus": 1.0,
            "gpus": 1.0, "vram_mib": 20480, "memory_bytes": 1, "free_bytes": null, "runs": [], "reservations": [],
            "figures": null, "unreserved_bytes": 1 << 30,
        });
        let changes = changes.as_object().unwrap().clone();
        node.as_object_mut().unwrap().extend(changes);
        node
    }

    fn state(nodes: &[Value]) -> ClusterState {
        serde_json::from_value(json!({"address": "10.0.0.1:7300", "own_ip": "10.0.0.1", "nodes": nodes})).unwrap()
    }

    /// Returns figures of a GPU as `plimsoll watch --json` prints them on its machine.
    fn figures() -> Value {
        let device = DeviceSnapshot {
            name: "cuda:0".to_owned(),
            model: Some("NVIDIA Card".to_owned()),
            total_bytes: Some(Bytes::gib(24)),
            free_bytes: Some(Bytes::gib(3)),
            load_line_bytes: Some(Bytes::gib(2)),
            utilization: Some(0.5),
            processes: vec![
                ProcessSnapshot { pid: 7, name: Some("ray::Worker".to_owned()), held_bytes: None, is_plimsoll: false },
                ProcessSnapshot { pid: 8, name: None, held_bytes: Some(Bytes::gib(1)), is_plimsoll: false },
            ],
            ..DeviceSnapshot::default()
        };
        serde_json::to_value(device).unwrap()
    }

    #[test]
    fn answering_node_has_its_figures_and_runs() {
        let runs = json!([{"owner": "alpha:/runs/a", "pid": 7}, {"owner": "alpha:/runs/b", "pid": 9}]);
        let state = state(&[node("beta/cuda:0", &json!({"figures": figures(), "runs": runs}))]);
        let [device] = &state.devices()[..] else { panic!("{state:?}") };
        assert_eq!((device.name.as_str(), device.model.as_deref()), ("beta/cuda:0", Some("NVIDIA Card")));
        assert_eq!((device.free_bytes, device.load_line_bytes), (Some(Bytes::gib(3)), Some(Bytes::gib(1))));
        assert_eq!((device.utilization, device.in_run), (Some(0.5), false));
        let processes =
            device.processes.iter().map(|process| (process.pid, process.name.as_deref(), process.is_plimsoll));
        assert_eq!(
            processes.collect::<Vec<_>>(),
            [(7, Some("alpha:/runs/a"), true), (8, None, false), (9, Some("alpha:/runs/b"), true)]
        );
        assert_eq!(state.warnings(), Vec::<String>::new());
    }

    #[test]
    fn silent_and_lost_nodes_have_warnings() {
        let lost = json!({"alive": false, "lost_reason": "no heartbeat", "unreserved_bytes": null});
        let state = state(&[node("beta/cuda:0", &json!({})), node("gamma/cuda:0", &lost)]);
        let [device] = &state.devices()[..] else { panic!("{state:?}") };
        assert_eq!((device.model.as_deref(), device.total_bytes, device.free_bytes), (Some("Card"), None, None));
        assert_eq!(
            state.warnings(),
            [
                "beta/cuda:0 of the cluster does not answer; its figures are unknown",
                "gamma/cuda:0 of the cluster is lost: no heartbeat"
            ]
        );
    }

    #[test]
    fn own_devices_are_shown_once() {
        let here = json!({"ip": "10.0.0.1"});
        let simulated = json!({"ip": "10.0.0.1", "simulated": true, "vram_mib": 600});
        let state = state(&[node("alpha/cuda:0", &here), node("alpha/virtual:a", &simulated)]);
        let [device] = &state.devices()[..] else { panic!("{state:?}") };
        assert_eq!((device.name.as_str(), device.simulated, &device.model), ("alpha/virtual:a", true, &None));
        assert_eq!((device.total_bytes, device.free_bytes), (Some(Bytes::mib(600)), None));
        assert_eq!(state.warnings(), Vec::<String>::new());
    }
}
