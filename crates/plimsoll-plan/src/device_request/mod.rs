//! The device list of `--devices` and `run.devices`: its types, its parser and its printer.
//!
//! A list such as `virtual:a=600MiB@0.5:12GB/s,host=64GiB` names devices with their load lines, paces and links. This
//! module does not check whether the devices are present, nor their free memory; `resolve` in `plimsoll-train` does.
//!
//! `parse` reads a list, `display` prints it in the form that `parse` reads, `link` has the links of devices, and
//! `error` the errors of the parser.

mod display;
mod error;
mod link;
mod parse;
#[cfg(test)]
mod tests;

pub use error::RequestError;
pub use link::LinkRequest;
use parse::parse_cluster_device;
use plimsoll_core::Budget;

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
    /// A paper device ([`crate::paper::names`]), for planning: `rtx3090`, `rtx3090=20GiB`, `rtx3070@1gbit`.
    Paper {
        /// The name in the table of paper devices.
        name: String,
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
}

impl DevicesRequest {
    /// Returns whether the list has paper devices. Such a request can be planned but not run.
    pub fn has_paper_devices(&self) -> bool {
        self.devices.iter().any(|device| matches!(device, DeviceRequest::Paper { .. }))
    }

    /// Returns whether the list has devices of other hosts or of a Ray cluster, which need connections.
    pub fn has_remote_devices(&self) -> bool {
        self.devices.iter().any(|device| matches!(device, DeviceRequest::Remote { .. } | DeviceRequest::Ray { .. }))
    }
}
