//! The device list of `--devices` and `run.devices`: its types, its parser and its printer.
//!
//! A list such as `virtual:a=600MiB@0.5:12GB/s,host=64GiB` names devices with their load lines, paces and links. This
//! module does not check whether the devices are present, nor their free memory; `resolve` in `plimsoll-train` does.
//!
//! `parse` reads a list, `display` prints it in the form that `parse` reads, `link` has the links of devices, `card` the
//! figures of cards on paper, `error` the errors of the parser, and `similar` the words that an unknown one may stand for.

mod card;
mod display;
mod error;
mod link;
mod parse;
mod similar;
#[cfg(test)]
mod tests;

use crate::paper;
pub use card::CardFigures;
pub use error::RequestError;
pub use link::LinkRequest;
use parse::parse_cluster_device;
use plimsoll_core::{Budget, DeviceSpec};
use std::collections::{BTreeMap, BTreeSet};

/// The most devices of a list, and so the most workers of a team.
pub const MAX_DEVICES: usize = 1024;

/// A requested device. Without a budget of its own, the device gets the budget of the run (`memory.budget`).
#[derive(Clone, Debug, PartialEq)]
pub enum DeviceRequest {
    /// `cpu`, `cpu=6GiB`.
    Cpu {
        /// The device's budget; `None` if the run's `memory.budget` applies.
        budget: Option<Budget>,
    },
    /// `cuda:0`, `cuda:0=6GiB`. `cuda` lets the planner choose a GPU of this machine.
    Cuda {
        /// Index of the GPU in the driver, from 0; `None` for `cuda`.
        index: Option<u32>,
        /// The device's budget; `None` if the run's `memory.budget` applies.
        budget: Option<Budget>,
    },
    /// `virtual:a=600MiB@0.5`, `virtual:a=600MiB@0.5:12GB/s+10us`, `virtual:a=600MiB@0.5:12GB/s:1gbit`.
    Virtual {
        /// The name after `virtual:`.
        name: String,
        /// The device's budget. A virtual device always states one.
        budget: Budget,
        /// The pace in CPU cores: at 0.5, the device takes twice as long as one core. 1 if the text has none.
        pace: f64,
        /// The link to the host; `None` for [`LinkRequest::DEFAULT`].
        link: Option<LinkRequest>,
        /// The link to other devices of a team; `None` for the link within one machine.
        team_link: Option<LinkRequest>,
    },
    /// A device of another host, by its name there: `host1/cuda:0=6GiB@1gbit`, `host1/cpu`,
    /// `host1/virtual:a=600MiB@0.5`.
    Remote {
        /// The host's name, before the slash.
        host: String,
        /// The device as named on its host.
        device: Box<DeviceRequest>,
        /// The link to other devices of a team; `None` if the text states none, and for a virtual device, whose own
        /// field holds its link.
        team_link: Option<LinkRequest>,
    },
    /// Devices of the Ray cluster: `ray` for all of them, `ray:host1/cuda:0` for one. The cluster knows the attributes
    /// that the text leaves out, such as the budget.
    Ray {
        /// The text as written.
        word: String,
    },
    /// A paper device ([`crate::paper::names`]), for planning: `rtx3090`, `rtx3090=20GiB`, `rtx3070@1gbit`. Also a card
    /// with the user's figures: `card:mine=12GiB,bf16=60TFLOPS,memory=450GB/s`. With a machine it is in a
    /// [`DeviceRequest::Remote`].
    Paper {
        /// The name in the table of paper devices, or `card:` with the user's name.
        name: String,
        /// The figures of a card that the user names; `None` for a device of the table.
        figures: Option<CardFigures>,
        /// The device's budget; `None` if the run's `memory.budget` applies.
        budget: Option<Budget>,
        /// The link to other devices of a team; `None` for the assumed link of the device.
        team_link: Option<LinkRequest>,
    },
}

impl DeviceRequest {
    /// Returns the device's name as in plans: `cpu`, `cuda:0`, `virtual:a`, `rtx3090`, `host1/cuda:0`.
    pub fn name(&self) -> String {
        match self {
            DeviceRequest::Cpu { .. } => "cpu".to_owned(),
            DeviceRequest::Cuda { index: Some(index), .. } => format!("cuda:{index}"),
            DeviceRequest::Cuda { index: None, .. } => "cuda".to_owned(),
            DeviceRequest::Virtual { name, .. } => format!("virtual:{name}"),
            DeviceRequest::Remote { host, device, .. } => format!("{host}/{}", device.name()),
            DeviceRequest::Ray { word: name } | DeviceRequest::Paper { name, .. } => name.clone(),
        }
    }

    /// Returns a name that is equal for all spellings of a device: the name without `ray:` and without attributes.
    fn identity(&self) -> String {
        let name = self.name();
        match name.strip_prefix("ray:") {
            Some(word) => word.split(['=', '@']).next().unwrap_or(word).trim().to_owned(),
            None => name,
        }
    }

    /// Returns the attributes stated by the device's text.
    ///
    /// # Errors
    /// If the text of a [`DeviceRequest::Ray`] does not parse. The text in a parsed [`DevicesRequest`] always does.
    pub fn attributes(&self) -> Result<DeviceAttributes, RequestError> {
        let plain = || DeviceAttributes { device: self.name(), budget: self.budget(), ..DeviceAttributes::default() };
        Ok(match self {
            DeviceRequest::Cpu { .. } | DeviceRequest::Cuda { .. } => plain(),
            DeviceRequest::Virtual { pace, link, team_link, .. } => {
                DeviceAttributes { pace: Some(*pace), link: *link, team_link: *team_link, ..plain() }
            }
            DeviceRequest::Remote { host, device, team_link } => {
                let on_host = device.attributes()?;
                DeviceAttributes { host: Some(host.clone()), team_link: team_link.or(on_host.team_link), ..on_host }
            }
            DeviceRequest::Ray { word } => match word.strip_prefix("ray:") {
                Some(word) => parse_cluster_device(word)?,
                None => plain(),
            },
            DeviceRequest::Paper { team_link, .. } => DeviceAttributes { team_link: *team_link, ..plain() },
        })
    }

    /// Returns the budget stated by the device's text. `None` if it states none, and for [`DeviceRequest::Ray`], whose
    /// budget is among its [attributes](DeviceRequest::attributes).
    pub fn budget(&self) -> Option<Budget> {
        match self {
            DeviceRequest::Virtual { budget, .. } => Some(*budget),
            DeviceRequest::Remote { device, .. } => device.budget(),
            DeviceRequest::Ray { .. } => None,
            DeviceRequest::Cpu { budget }
            | DeviceRequest::Cuda { budget, .. }
            | DeviceRequest::Paper { budget, .. } => *budget,
        }
    }

    /// Returns the device as named on its own host: `cuda:0` for `host1/cuda:0`. All but remote devices return
    /// themselves.
    pub fn local_device(&self) -> &DeviceRequest {
        if let DeviceRequest::Remote { device, .. } = self { device } else { self }
    }

    /// Returns a mutable reference to the device as named on its own host, like [`DeviceRequest::local_device`].
    pub fn local_device_mut(&mut self) -> &mut DeviceRequest {
        if let DeviceRequest::Remote { device, .. } = self { device } else { self }
    }

    /// Returns whether this is a paper device, with or without a machine.
    pub fn is_paper(&self) -> bool {
        matches!(self.local_device(), DeviceRequest::Paper { .. })
    }

    /// Returns the name of the machine of a device; `None` for a device without one.
    pub fn machine(&self) -> Option<&str> {
        if let DeviceRequest::Remote { host, .. } = self { Some(host) } else { None }
    }

    /// Returns the figures of a card of the user; `None` for any other device.
    fn figures(&self) -> Option<CardFigures> {
        if let DeviceRequest::Paper { figures, .. } = self.local_device() { *figures } else { None }
    }

    /// Returns the link to other devices of a team that the text states; `None` if it states none.
    pub fn team_link(&self) -> Option<LinkRequest> {
        self.attributes().ok().and_then(|attributes| attributes.team_link)
    }

    /// Returns the specification of a paper device; `None` for any other device. `default` is its budget if it has none
    /// of its own.
    pub fn paper_spec(&self, default: Budget) -> Option<DeviceSpec> {
        let DeviceRequest::Paper { name, figures, .. } = self.local_device() else { return None };
        let budget = self.budget().unwrap_or(default);
        let device = match figures {
            Some(figures) => paper::card(name, budget.amount().unwrap_or_default(), &figures.rates()),
            None => paper::paper(name, budget)?,
        };
        let team_link = self.team_link().map_or(device.team_link, LinkRequest::link);
        Some(DeviceSpec { name: self.name(), team_link, ..device })
    }

    /// Replaces the budget. Has no effect on [`DeviceRequest::Ray`], whose budget is known to the cluster only.
    pub fn set_budget(&mut self, amount: Budget) {
        match self {
            DeviceRequest::Virtual { budget, .. } => *budget = amount,
            DeviceRequest::Remote { device, .. } => device.set_budget(amount),
            DeviceRequest::Ray { .. } => {}
            DeviceRequest::Cpu { budget }
            | DeviceRequest::Cuda { budget, .. }
            | DeviceRequest::Paper { budget, .. } => *budget = Some(amount),
        }
    }
}

/// The attributes of a device that its text states. Attributes that it does not state are `None`: they come from the
/// device's host or from the run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceAttributes {
    /// The name of the remote host; `None` for a device of this machine.
    pub host: Option<String>,
    /// The device as named on its host; `ray` stands for all devices of the cluster.
    pub device: String,
    /// The device's budget; `None` if the text states none.
    pub budget: Option<Budget>,
    /// The pace of a virtual device in CPU cores; `None` for other devices, and if the text states none.
    pub pace: Option<f64>,
    /// The link of a virtual device to its host; `None` for other devices, and if the text states none.
    pub link: Option<LinkRequest>,
    /// The link to other devices of a team; `None` if the text states none.
    pub team_link: Option<LinkRequest>,
}

impl DeviceAttributes {
    /// Returns whether the device is virtual.
    fn is_virtual(&self) -> bool {
        self.device.starts_with("virtual:")
    }

    /// Returns the attributes with `budget` as their budget, completed by `joined`: the attributes with which the
    /// device's node joined the cluster. Only a virtual device that states no pace is completed. It takes the node's
    /// pace, and the node's link for each link that it does not state.
    pub fn with_node_defaults(self, budget: Budget, joined: &DeviceAttributes) -> DeviceAttributes {
        let takes_defaults = self.pace.is_none() && self.is_virtual() && joined.is_virtual();
        let or_default = |own: Option<LinkRequest>, default| if takes_defaults { own.or(default) } else { own };
        DeviceAttributes {
            budget: Some(budget),
            pace: if takes_defaults { joined.pace } else { self.pace },
            link: or_default(self.link, joined.link),
            team_link: or_default(self.team_link, joined.team_link),
            ..self
        }
    }
}

/// The requested devices, host memory and scratch file. The printed form parses to the same request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DevicesRequest {
    /// The devices in order. Empty for `auto`: the planner chooses among the devices of this machine.
    pub devices: Vec<DeviceRequest>,
    /// The budget of the host memory for offloaded tensors (`host=64GiB`); `None` for `memory.host`.
    pub host: Option<Budget>,
    /// The budget of the scratch file (`file=100GiB`); `None` for `memory.file`.
    pub file: Option<Budget>,
    /// The budgets of the host memories of machines on paper (`pc1/host=64GiB`), by the name of the machine.
    pub machine_hosts: BTreeMap<String, Budget>,
    /// The links between machines on paper (`pc1-pc2=1gbit`). In each pair of machines, the names are sorted.
    pub machine_links: BTreeMap<(String, String), LinkRequest>,
}

impl DevicesRequest {
    /// Returns whether the list has paper devices. Such a request can be planned but not run.
    pub fn has_paper_devices(&self) -> bool {
        self.devices.iter().any(DeviceRequest::is_paper)
    }

    /// Returns whether the list has devices of other hosts or of a Ray cluster, which need connections.
    pub fn has_remote_devices(&self) -> bool {
        let is_remote = |device: &DeviceRequest| {
            matches!(device, DeviceRequest::Remote { .. } | DeviceRequest::Ray { .. }) && !device.is_paper()
        };
        self.devices.iter().any(is_remote)
    }

    /// Returns the names of the machines on paper.
    pub fn paper_machines(&self) -> BTreeSet<&str> {
        self.devices.iter().filter(|device| device.is_paper()).filter_map(DeviceRequest::machine).collect()
    }

    /// Returns the budget of the host memory of a machine, as the list states it. `None` stands for the machine of the
    /// devices without one.
    pub fn host_of(&self, machine: Option<&str>) -> Option<Budget> {
        machine.map_or(self.host, |machine| self.machine_hosts.get(machine).copied())
    }

    /// Returns the machines on paper whose host memory the list names, without the machine of the first device. Over Ray
    /// that one starts the run, and the others do not offload.
    pub fn other_hosts(&self) -> impl Iterator<Item = &str> {
        let first = self.devices.first().and_then(DeviceRequest::machine);
        self.machine_hosts.keys().map(String::as_str).filter(move |machine| Some(*machine) != first)
    }

    /// Sets the budget of the host memory beside the device of this name.
    pub fn set_host_beside(&mut self, device: &str, budget: Budget) {
        let machine = self.devices.iter().find(|named| named.name() == device && named.is_paper());
        match machine.and_then(DeviceRequest::machine).map(str::to_owned) {
            Some(machine) => drop(self.machine_hosts.insert(machine, budget)),
            None => self.host = Some(budget),
        }
    }

    /// Returns the link between two machines on paper, as the list states it.
    pub fn link_between(&self, one: &str, other: &str) -> Option<LinkRequest> {
        let pair = if one < other { (one, other) } else { (other, one) };
        self.machine_links.get(&(pair.0.to_owned(), pair.1.to_owned())).copied()
    }
}
