//! The device list of `--devices` and `run.devices`: its types, its parser and its printer.
//!
//! A list such as `virtual:a=600MiB@0.5:12GB/s,host=64GiB` names devices with their load lines, paces and links. This
//! module does not check whether the devices are present, nor their free memory; `resolve` in `plimsoll-train` does.

use crate::paper;
use plimsoll_core::{Budget, Bytes, Failure, Link, ParseBudgetError};
use std::fmt;
use std::str::FromStr;

/// Slowest pace of a virtual device in CPU cores. A slower device would not finish a step in reasonable time.
const MIN_PACE: f64 = 0.01;

/// A requested device. Without a budget of its own, the device gets the budget of the run (`memory.budget`).
#[derive(Clone, Debug, PartialEq)]
pub enum DeviceRequest {
    /// `cpu`, `cpu=6GiB`.
    Cpu {
        /// The device's budget.
        budget: Option<Budget>,
    },
    /// `cuda:0`, `cuda:0=6GiB`. `cuda` lets the planner choose a GPU of this machine.
    Cuda {
        /// Index of the GPU in the driver; `None` for `cuda`.
        index: Option<u32>,
        /// The device's budget.
        budget: Option<Budget>,
    },
    /// `virtual:a=600MiB@0.5`, `virtual:a=600MiB@0.5:12GB/s+10us`, `virtual:a=600MiB@0.5:12GB/s:1gbit`.
    Virtual {
        /// The name after `virtual:`.
        name: String,
        /// The device's budget.
        budget: Budget,
        /// The pace in CPU cores.
        pace: f64,
        /// The link to the host, if given.
        link: Option<LinkRequest>,
        /// The link to other devices of a team, if given.
        team_link: Option<LinkRequest>,
    },
    /// A device of another host, by its name there: `host1/cuda:0=6GiB@1gbit`, `host1/cpu`,
    /// `host1/virtual:a=600MiB@0.5`.
    Remote {
        /// The host's name, before the slash.
        host: String,
        /// The device as named on its host.
        device: Box<DeviceRequest>,
        /// The link to other devices of a team, if given. A virtual device carries its own.
        team_link: Option<LinkRequest>,
    },
    /// Devices of the Ray cluster: `ray` for all of them, `ray:host1/cuda:0` for one. Attributes that are missing here
    /// ([`DeviceRequest::attributes`]) are known by the cluster.
    Ray {
        /// The text as written.
        word: String,
    },
    /// A paper device ([`paper::names`]), for planning: `rtx3090`, `rtx3090=20GiB`, `rtx3070@1gbit`.
    Paper {
        /// The name in the table of paper devices.
        name: String,
        /// The device's budget.
        budget: Option<Budget>,
        /// The link to other devices of a team, if given.
        team_link: Option<LinkRequest>,
    },
}

/// A requested link of a device to its host or to other devices, per direction: `12GB/s`, `12GB/s+10us`, or Ethernet as
/// `1gbit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkRequest {
    /// Bandwidth in bytes per second, at least 1.
    pub bytes_per_second: u64,
    /// Latency in microseconds.
    pub latency_us: u32,
}

/// The attributes of a device that its text states. Missing attributes come from the device's host or from the run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceAttributes {
    /// The name of the remote host.
    pub host: Option<String>,
    /// The device as named on its host; `ray` stands for all devices of the cluster.
    pub device: String,
    /// The device's budget.
    pub budget: Option<Budget>,
    /// The pace of a virtual device in CPU cores.
    pub pace: Option<f64>,
    /// The link of a virtual device to its host.
    pub link: Option<LinkRequest>,
    /// The link to other devices of a team.
    pub team_link: Option<LinkRequest>,
}

impl DeviceAttributes {
    /// Returns whether the device is virtual.
    fn is_virtual(&self) -> bool {
        self.device.starts_with("virtual:")
    }

    /// Returns the attributes with a budget, on a node that joined its cluster with the attributes `joined`. A virtual
    /// device without a pace takes the node's pace, and the node's links unless it names its own.
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

/// Usual Ethernet rates in Gbit/s. Links with these rates are printed as `1gbit`.
const ETHERNET_GBITS: [f64; 8] = [0.1, 1.0, 2.5, 5.0, 10.0, 25.0, 40.0, 100.0];

impl LinkRequest {
    /// The default host link of a virtual device: PCIe 4.0 with 8 lanes.
    pub const DEFAULT: LinkRequest = LinkRequest { bytes_per_second: 16_000_000_000, latency_us: 10 };

    /// Converts to the planner's link.
    pub fn link(self) -> Link {
        Link { bytes_per_second: self.bytes_per_second as f64, latency_seconds: f64::from(self.latency_us) / 1e6 }
    }

    /// Returns an Ethernet link of `gbit` Gbit/s, `None` if the rate is below one byte per second or infinite.
    fn ethernet(gbit: f64) -> Option<LinkRequest> {
        let Link { bytes_per_second, latency_seconds } = paper::ethernet(gbit);
        let is_valid = bytes_per_second >= 1.0 && bytes_per_second.is_finite();
        let latency_us = (latency_seconds * 1e6).round() as u32;
        is_valid.then_some(LinkRequest { bytes_per_second: bytes_per_second.round() as u64, latency_us })
    }

    /// Parses `12GB/s`, `12GB/s+10us` or `1gbit`.
    fn parse(text: &str) -> Option<LinkRequest> {
        if let Some(gbit) = text.trim().strip_suffix("gbit") {
            return LinkRequest::ethernet(gbit.trim().parse().ok()?);
        }
        let (rate, latency) = match text.split_once('+') {
            Some((rate, latency)) => (rate, Some(latency.trim())),
            None => (text, None),
        };
        let bytes: Bytes = rate.trim().strip_suffix("/s")?.parse().ok()?;
        let latency_us = match latency {
            Some(text) => text.strip_suffix("us")?.trim().parse().ok()?,
            None => LinkRequest::DEFAULT.latency_us,
        };
        (bytes > Bytes::ZERO).then_some(LinkRequest { bytes_per_second: bytes.0, latency_us })
    }
}

impl fmt::Display for LinkRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(gbit) = ETHERNET_GBITS.into_iter().find(|gbit| LinkRequest::ethernet(*gbit) == Some(*self)) {
            return write!(f, "{gbit}gbit");
        }
        let units = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1000, "KB")];
        let unit = units.into_iter().find(|(scale, _)| self.bytes_per_second.is_multiple_of(*scale));
        let (scale, name) = unit.unwrap_or((1, "B"));
        write!(f, "{}{name}/s+{}us", self.bytes_per_second / scale, self.latency_us)
    }
}

/// The requested devices, host memory and scratch file. The printed form parses to the same request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DevicesRequest {
    /// The devices in order. Empty for `auto`: the planner chooses among the devices of this machine.
    pub devices: Vec<DeviceRequest>,
    /// The host budget, if given: `host=64GiB`.
    pub host: Option<Budget>,
    /// The budget of the scratch file, if given: `file=100GiB`.
    pub file: Option<Budget>,
}

impl DevicesRequest {
    /// Returns whether the list has paper devices. Such a request can be planned but not run.
    pub fn has_paper_devices(&self) -> bool {
        self.devices.iter().any(|device| matches!(device, DeviceRequest::Paper { .. }))
    }

    /// Returns whether the list has devices of other hosts, which need connections.
    pub fn has_remote_devices(&self) -> bool {
        self.devices.iter().any(|device| matches!(device, DeviceRequest::Remote { .. } | DeviceRequest::Ray { .. }))
    }
}

/// An error of parsing a device list.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// An empty list, or nothing between two commas.
    #[error("a device is missing in `{text}`")]
    MissingDevice {
        /// The whole list.
        text: String,
    },
    /// An unknown device name.
    #[error("`{name}` is not a known device")]
    UnknownDevice {
        /// The name.
        name: String,
    },
    /// An invalid budget.
    #[error("device `{device}`: {source}")]
    InvalidBudget {
        /// The device.
        device: String,
        /// The error of the budget.
        source: ParseBudgetError,
    },
    /// A virtual device, the host or the scratch file without a budget.
    #[error("`{device}` needs a budget, as in `{device}=600MiB`")]
    MissingBudget {
        /// The device.
        device: String,
    },
    /// A virtual device of a cluster, named without `ray:` and without a budget.
    #[error("`{device}` is a device of a cluster: it is named `ray:{device}`, or `ray:{device}=600MiB` to hold less")]
    ClusterDevice {
        /// The device.
        device: String,
    },
    /// An invalid pace.
    #[error("device `{device}`: `{pace}` is not a pace: expected a number of cores, 0.01 or more, such as `0.5`")]
    InvalidPace {
        /// The device.
        device: String,
        /// The text of the pace.
        pace: String,
    },
    /// An invalid link.
    #[error(
        "device `{device}`: `{link}` is not a link: expected bytes per second with an optional latency, such as `12GB/s+10us`, or `1gbit`"
    )]
    InvalidLink {
        /// The device.
        device: String,
        /// The text of the link.
        link: String,
    },
    /// A device that is named twice.
    #[error("device `{device}` is named twice")]
    Duplicate {
        /// The device.
        device: String,
    },
    /// `auto` together with devices.
    #[error("`auto` cannot be combined with other devices, only with `host=` and `file=`")]
    AutoAndOthers,
    /// Paper devices together with real ones.
    #[error("`{paper}` is a paper device: it cannot be combined with devices of this machine")]
    PaperAndReal {
        /// A paper device of the list.
        paper: String,
    },
}

impl From<RequestError> for Failure {
    fn from(error: RequestError) -> Failure {
        let failure = Failure::input(error.to_string());
        match error {
            RequestError::UnknownDevice { .. } | RequestError::MissingDevice { .. } => failure
                .hint("known devices: auto, cpu, cuda:0, virtual:NAME=600MiB@0.5:12GB/s, HOST/cuda:0, ray, host=64GiB, file=100GiB")
                .hint(format!("paper devices, for plans: {}", paper::names().collect::<Vec<_>>().join(", "))),
            _ => failure,
        }
    }
}

impl FromStr for DevicesRequest {
    type Err = RequestError;

    fn from_str(text: &str) -> Result<DevicesRequest, RequestError> {
        let mut request = DevicesRequest::default();
        let mut auto = false;
        for part in text.split(',').map(str::trim) {
            let (name, value) = match part.split_once('=') {
                Some((name, value)) => (name.trim(), Some(value.trim())),
                None => (part, None),
            };
            let budget = |value: &str| parse_budget(name, value);
            let duplicate = || RequestError::Duplicate { device: name.to_owned() };
            match name {
                "" => return Err(RequestError::MissingDevice { text: text.to_owned() }),
                "auto" if auto => return Err(duplicate()),
                "auto" if value.is_none() => auto = true,
                "host" if request.host.is_some() => return Err(duplicate()),
                "host" => {
                    let value = value.ok_or_else(|| RequestError::MissingBudget { device: name.to_owned() })?;
                    request.host = Some(budget(value)?);
                }
                "file" if request.file.is_some() => return Err(duplicate()),
                "file" => {
                    let value = value.ok_or_else(|| RequestError::MissingBudget { device: name.to_owned() })?;
                    request.file = Some(budget(value)?);
                }
                _ => {
                    let device = match part.strip_prefix("ray:") {
                        Some(word) => {
                            parse_cluster_device(word).map(|_| DeviceRequest::Ray { word: part.to_owned() })?
                        }
                        None if part == "ray" => DeviceRequest::Ray { word: part.to_owned() },
                        None => parse_device(name, value)?,
                    };
                    // A paper device that is named several times stands for several devices.
                    let is_duplicate = request.devices.iter().any(|other| other.identity() == device.identity());
                    if is_duplicate && !matches!(device, DeviceRequest::Paper { .. }) {
                        return Err(duplicate());
                    }
                    request.devices.push(device);
                }
            }
        }
        if auto && !request.devices.is_empty() {
            return Err(RequestError::AutoAndOthers);
        }
        if !auto && request.devices.is_empty() {
            return Err(RequestError::MissingDevice { text: text.to_owned() });
        }
        let has_real_devices = request.devices.iter().any(|device| !matches!(device, DeviceRequest::Paper { .. }));
        match request.devices.iter().find(|device| matches!(device, DeviceRequest::Paper { .. })) {
            Some(paper) if has_real_devices => Err(RequestError::PaperAndReal { paper: paper.name() }),
            _ => Ok(request),
        }
    }
}

/// Parses the budget of a device.
fn parse_budget(device: &str, text: &str) -> Result<Budget, RequestError> {
    text.parse().map_err(|source| RequestError::InvalidBudget { device: device.to_owned(), source })
}

/// Parses the text after `ray:`. It has the form of a [remote device](DeviceRequest::Remote), with these differences
/// for a virtual device: all attributes are optional, and a team link may follow `@` directly, without a pace.
fn parse_cluster_device(word: &str) -> Result<DeviceAttributes, RequestError> {
    let (name, value) = match word.split_once('=') {
        Some((name, value)) => (name.trim(), Some(value.trim())),
        None => (word.trim(), None),
    };
    let (before_at, after_at) = match value.unwrap_or(name).split_once('@') {
        Some((before, after)) => (before.trim(), Some(after.trim())),
        None => (value.unwrap_or(name), None),
    };
    let (name, budget) = if value.is_some() { (name, Some(before_at)) } else { (before_at, None) };
    let unknown = || RequestError::UnknownDevice { name: name.to_owned() };
    if !name.contains("/virtual:") {
        let device = parse_device(word.split('=').next().unwrap_or(word).trim(), value)?;
        return if matches!(device, DeviceRequest::Remote { .. }) { device.attributes() } else { Err(unknown()) };
    }
    let team_link = after_at.and_then(LinkRequest::parse);
    let pace = after_at.filter(|_| team_link.is_none());
    // The budget that the parser requires is filled in, and removed again below.
    let complete = [budget.unwrap_or("100%"), pace.map_or("", |_| "@"), pace.unwrap_or("")].concat();
    let parsed = parse_device(name, Some(&complete))?.attributes()?;
    Ok(DeviceAttributes {
        budget: parsed.budget.filter(|_| budget.is_some()),
        pace: parsed.pace.filter(|_| pace.is_some()),
        team_link: team_link.or(parsed.team_link),
        ..parsed
    })
}

/// Parses a device from its name and the text after `=`.
fn parse_device(name: &str, value: Option<&str>) -> Result<DeviceRequest, RequestError> {
    let unknown = || RequestError::UnknownDevice { name: name.to_owned() };
    let budget = |text: &str| parse_budget(name, text);
    // A bandwidth after `@` contains a slash too.
    if let Some((host, own_name)) = name.split_once('/').filter(|(host, _)| !host.contains('@')) {
        return parse_remote(name, host, own_name, value);
    }
    if name == "cpu" {
        return Ok(DeviceRequest::Cpu { budget: value.map(budget).transpose()? });
    }
    if name == "cuda" {
        return Ok(DeviceRequest::Cuda { index: None, budget: value.map(budget).transpose()? });
    }
    if let Some(index) = name.strip_prefix("cuda:") {
        // Rust parses `+1` and `01` as numbers, but they are not device names.
        let index: u32 = index.parse().ok().filter(|number: &u32| number.to_string() == index).ok_or_else(unknown)?;
        return Ok(DeviceRequest::Cuda { index: Some(index), budget: value.map(budget).transpose()? });
    }
    if let Some(own_name) = name.strip_prefix("virtual:") {
        return parse_virtual(name, own_name, value);
    }
    let (name, value, team_link) = split_team_link(name, value);
    if paper::names().any(|known| known == name) {
        let team_link = team_link.map(|text| parse_link(name, text)).transpose()?;
        return Ok(DeviceRequest::Paper { name: name.to_owned(), budget: value.map(budget).transpose()?, team_link });
    }
    Err(unknown())
}

/// Parses a device of another host. `name` is the whole name, `own_name` its part after the slash.
fn parse_remote(name: &str, host: &str, own_name: &str, value: Option<&str>) -> Result<DeviceRequest, RequestError> {
    let unknown = || RequestError::UnknownDevice { name: name.to_owned() };
    if host.is_empty() || !host.chars().all(|c| c.is_ascii_alphanumeric() || ".-_".contains(c)) {
        return Err(unknown());
    }
    let (own_name, value, team_link) = match own_name.starts_with("virtual:") {
        true => (own_name, value, None),
        false => split_team_link(own_name, value),
    };
    let team_link = team_link.map(|text| parse_link(name, text)).transpose()?;
    let as_cluster_device = |error| match error {
        RequestError::MissingBudget { .. } => RequestError::ClusterDevice { device: name.to_owned() },
        error => error,
    };
    let device = match parse_device(own_name, value).map_err(as_cluster_device)? {
        // A remote GPU needs its index, and a paper device is on no host.
        DeviceRequest::Cuda { index: None, .. } | DeviceRequest::Paper { .. } | DeviceRequest::Remote { .. } => {
            return Err(unknown());
        }
        device => Box::new(device),
    };
    Ok(DeviceRequest::Remote { host: host.to_owned(), device, team_link })
}

/// Parses a virtual device. `name` is the whole name, `own_name` its part after `virtual:`.
fn parse_virtual(name: &str, own_name: &str, value: Option<&str>) -> Result<DeviceRequest, RequestError> {
    if own_name.is_empty() || !own_name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_') {
        return Err(RequestError::UnknownDevice { name: name.to_owned() });
    }
    let value = value.ok_or_else(|| RequestError::MissingBudget { device: name.to_owned() })?;
    let (value, links) = value.split_once(':').unwrap_or((value, ""));
    let (host_link, team_link) = links.split_once(':').unwrap_or((links, ""));
    // An empty text between two colons is the default link.
    let optional_link = |text: &str| if text.trim().is_empty() { Ok(None) } else { parse_link(name, text).map(Some) };
    let (link, team_link) = (optional_link(host_link)?, optional_link(team_link)?);
    let (budget, pace) = value.split_once('@').unwrap_or((value, "1.0"));
    let (budget, pace) = (budget.trim(), pace.trim());
    let invalid_pace = || RequestError::InvalidPace { device: name.to_owned(), pace: pace.to_owned() };
    let cores: f64 = pace.parse().map_err(|_| invalid_pace())?;
    if !(cores >= MIN_PACE && cores.is_finite()) {
        return Err(invalid_pace());
    }
    let budget = parse_budget(name, budget)?;
    Ok(DeviceRequest::Virtual { name: own_name.to_owned(), budget, pace: cores, link, team_link })
}

/// Splits the team link (after `@`) off a device's name or value. Returns the name, the value and the text of the link.
fn split_team_link<'a>(name: &'a str, value: Option<&'a str>) -> (&'a str, Option<&'a str>, Option<&'a str>) {
    let (head, team_link) = match value.unwrap_or(name).split_once('@') {
        Some((head, text)) => (head.trim(), Some(text)),
        None => (value.unwrap_or(name), None),
    };
    let (name, value) = if value.is_some() { (name, Some(head)) } else { (head, None) };
    (name, value, team_link)
}

/// Parses a link of a device.
fn parse_link(device: &str, text: &str) -> Result<LinkRequest, RequestError> {
    let invalid = || RequestError::InvalidLink { device: device.to_owned(), link: text.trim().to_owned() };
    LinkRequest::parse(text).ok_or_else(invalid)
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

    /// Returns a name that is equal for all spellings of a device: without `ray:` and attributes.
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
    /// The text of a [`DeviceRequest::Ray`] does not parse. Text that came from a parsed [`DevicesRequest`] always does.
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
}

impl DeviceRequest {
    /// Returns the budget stated by the device's text.
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

    /// Returns the device as named on its own host.
    pub fn local_device(&self) -> &DeviceRequest {
        if let DeviceRequest::Remote { device, .. } = self { device } else { self }
    }

    /// Returns the device as named on its own host, for changes.
    pub fn local_device_mut(&mut self) -> &mut DeviceRequest {
        if let DeviceRequest::Remote { device, .. } = self { device } else { self }
    }

    /// Replaces the budget. Has no effect on [`DeviceRequest::Ray`].
    pub fn set_budget(&mut self, amount: Budget) {
        match self {
            DeviceRequest::Virtual { budget, .. } => *budget = amount,
            DeviceRequest::Remote { device, .. } => device.set_budget(amount),
            // The device is known to the cluster only.
            DeviceRequest::Ray { .. } => {}
            DeviceRequest::Cpu { budget }
            | DeviceRequest::Cuda { budget, .. }
            | DeviceRequest::Paper { budget, .. } => *budget = Some(amount),
        }
    }
}

impl fmt::Display for DeviceRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceRequest::Ray { word } => f.write_str(word),
            _ => self.attributes().map_err(|_| fmt::Error)?.fmt(f),
        }
    }
}

/// Prints the form that the parser reads, without the prefix `ray:` of a cluster device.
impl fmt::Display for DeviceAttributes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceAttributes { host, device, budget, pace, link, team_link } = self;
        if let Some(host) = host {
            write!(f, "{host}/")?;
        }
        f.write_str(device)?;
        if let Some(budget) = budget {
            write!(f, "={budget}")?;
        }
        if let Some(pace) = pace {
            write!(f, "@{pace}")?;
        }
        match (link, team_link) {
            (None, None) => Ok(()),
            (None, Some(team)) if !self.is_virtual() => write!(f, "@{team}"),
            (Some(link), None) => write!(f, ":{link}"),
            (None, Some(team)) => write!(f, "::{team}"),
            (Some(link), Some(team)) => write!(f, ":{link}:{team}"),
        }
    }
}

impl fmt::Display for DevicesRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts: Vec<String> = self.devices.iter().map(DeviceRequest::to_string).collect();
        if parts.is_empty() {
            parts.push("auto".to_owned());
        }
        parts.extend(self.host.map(|host| format!("host={host}")));
        parts.extend(self.file.map(|file| format!("file={file}")));
        f.write_str(&parts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::Bytes;
    use proptest::prelude::*;

    fn parse(text: &str) -> DevicesRequest {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn every_documented_form_parses() {
        assert_eq!(parse("auto"), DevicesRequest::default());
        let cpu = |budget: Option<Budget>| DeviceRequest::Cpu { budget };
        assert_eq!(parse("cpu").devices, [cpu(None)]);
        assert_eq!(parse("cpu=80%").devices, [cpu(Some(Budget::Share(0.8)))]);
        let request = parse("cpu=6GiB, host=2GiB");
        assert_eq!(request.devices, [cpu(Some(Budget::Amount(Bytes::gib(6))))]);
        assert_eq!(request.host, Some(Budget::Amount(Bytes::gib(2))));
        let request = parse("cpu,host=2GiB,file=50%");
        assert_eq!((request.file, &*request.to_string()), (Some(Budget::Share(0.5)), "cpu,host=2GiB,file=50%"));
        assert_eq!(parse("cuda:0,cuda:1").devices.len(), 2);
        let gpu = |index, budget: Option<Budget>| DeviceRequest::Cuda { index, budget };
        assert_eq!(parse("cuda").devices, [gpu(None, None)]);
        assert_eq!(parse("cuda:1=6GiB").devices, [gpu(Some(1), Some(Budget::Amount(Bytes::gib(6))))]);
        let part = |name: &str, mib: u64, pace: f64| DeviceRequest::Virtual {
            name: name.to_owned(),
            budget: Budget::Amount(Bytes::mib(mib)),
            pace,
            link: None,
            team_link: None,
        };
        assert_eq!(
            parse("virtual:a=600MiB@1.0,virtual:b=200MiB@0.5").devices,
            [part("a", 600, 1.0), part("b", 200, 0.5)]
        );
        assert_eq!(parse("virtual:a=600MiB").devices, [part("a", 600, 1.0)]);
        let linked = |bytes_per_second, latency_us| DeviceRequest::Virtual {
            name: "a".to_owned(),
            budget: Budget::Amount(Bytes::mib(600)),
            pace: 0.5,
            link: Some(LinkRequest { bytes_per_second, latency_us }),
            team_link: None,
        };
        assert_eq!(parse("virtual:a=600MiB@0.5:12GB/s").devices, [linked(12_000_000_000, 10)]);
        assert_eq!(parse("virtual:a=600MiB@0.5 : 125MB/s + 80us").devices, [linked(125_000_000, 80)]);
        assert_eq!(parse("virtual:a=600MiB@0.5:12GB/s").to_string(), "virtual:a=600MiB@0.5:12GB/s+10us");
        let paper = parse("rtx3090,rtx3070,host=64GiB");
        assert!(paper.has_paper_devices() && paper.devices.len() == 2 && paper.host.is_some());
        assert_eq!(parse("rtx3090,rtx3090").devices.len(), 2);
        let ethernet = LinkRequest { bytes_per_second: 118_000_000, latency_us: 100 };
        let linked = |name: &str, gib: Option<u64>| DeviceRequest::Paper {
            name: name.to_owned(),
            budget: gib.map(|gib| Budget::Amount(Bytes::gib(gib))),
            team_link: Some(ethernet),
        };
        assert_eq!(
            parse("rtx3090=20GiB@1gbit,rtx3070@118MB/s+100us,host=64GiB").devices,
            [linked("rtx3090", Some(20)), linked("rtx3070", None)]
        );
        let remote = &parse("cuda:0,host1/cuda:0=6GiB").devices[1];
        let amount = Some(Budget::Amount(Bytes::gib(6)));
        assert_eq!((&*remote.name(), remote.budget()), ("host1/cuda:0", amount));
        let cluster = parse("ray:b/virtual:a=50%@0.5,ray:b/cuda:0,host=2GiB");
        assert_eq!(cluster.devices[1], DeviceRequest::Ray { word: "ray:b/cuda:0".to_owned() });
        assert_eq!(
            cluster.devices[1].attributes().unwrap(),
            DeviceAttributes { host: Some("b".into()), device: "cuda:0".into(), ..DeviceAttributes::default() }
        );
        assert!(
            cluster.has_remote_devices()
                && parse("b/cpu").has_remote_devices()
                && !parse("cpu").has_remote_devices()
                && !cluster.has_paper_devices()
        );
        for (text, printed) in [
            ("virtual:a=600MiB@0.5:12GB/s:1gbit", "virtual:a=600MiB@0.5:12GB/s+10us:1gbit"),
            ("virtual:a=600MiB@0.5::10gbit", "virtual:a=600MiB@0.5::10gbit"),
            ("rtx3070=6GiB@118MB/s+100us", "rtx3070=6GiB@1gbit"),
            ("host-1.lan/cuda:0=6GiB@1gbit", "host-1.lan/cuda:0=6GiB@1gbit"),
            ("b/cpu@3gbit", "b/cpu@354MB/s+100us"),
            ("ray, host=2GiB", "ray,host=2GiB"),
            ("ray:b/virtual:a=50%@0.5,b/cpu", "ray:b/virtual:a=50%@0.5,b/cpu"),
            ("b/virtual:a=600MiB@0.5::10gbit", "b/virtual:a=600MiB@0.5::10gbit"),
        ] {
            assert_eq!(parse(text).to_string(), printed);
        }
    }

    #[test]
    fn cluster_device_keeps_stated_attributes_only() {
        let ethernet = LinkRequest::ethernet(1.0);
        let fast = LinkRequest { bytes_per_second: 12_000_000_000, latency_us: 10 };
        let amount = Some(Budget::Amount(Bytes::mib(600)));
        let on_b = |device: &str| DeviceAttributes {
            host: Some("b".into()),
            device: device.into(),
            ..DeviceAttributes::default()
        };
        for (word, attributes) in [
            ("ray", DeviceAttributes { device: "ray".into(), ..DeviceAttributes::default() }),
            ("ray:b/cpu", on_b("cpu")),
            (
                "ray:b/cuda:0 = 600MiB @ 1gbit",
                DeviceAttributes { budget: amount, team_link: ethernet, ..on_b("cuda:0") },
            ),
            ("b/cuda:0@1gbit", DeviceAttributes { team_link: ethernet, ..on_b("cuda:0") }),
            ("ray:b/virtual:a", on_b("virtual:a")),
            ("ray:b/virtual:a@1gbit", DeviceAttributes { team_link: ethernet, ..on_b("virtual:a") }),
            (
                "ray:b/virtual:a=600MiB@118MB/s+100us",
                DeviceAttributes { budget: amount, team_link: ethernet, ..on_b("virtual:a") },
            ),
            ("ray:b/virtual:a@0.5", DeviceAttributes { pace: Some(0.5), ..on_b("virtual:a") }),
            (
                "ray:b/virtual:a=600MiB::1gbit",
                DeviceAttributes { budget: amount, team_link: ethernet, ..on_b("virtual:a") },
            ),
            (
                "ray:b/virtual:a=600MiB@0.5:12GB/s:1gbit",
                DeviceAttributes {
                    budget: amount,
                    pace: Some(0.5),
                    link: Some(fast),
                    team_link: ethernet,
                    ..on_b("virtual:a")
                },
            ),
        ] {
            assert_eq!(parse(word).devices[0].attributes(), Ok(attributes), "{word}");
        }
    }

    #[test]
    fn invalid_list_names_expected_form() {
        for (text, message) in [
            ("", "a device is missing in ``"),
            ("cpu,,cuda:0", "a device is missing in `cpu,,cuda:0`"),
            ("host=2GiB", "a device is missing in `host=2GiB`"),
            ("rtx9090", "`rtx9090` is not a known device"),
            ("cuda:", "`cuda:` is not a known device"),
            ("b/cuda", "`b/cuda` is not a known device"),
            ("b/rtx3090", "`b/rtx3090` is not a known device"),
            ("/cpu", "`/cpu` is not a known device"),
            ("b/c/cpu", "`b/c/cpu` is not a known device"),
            ("ray,ray", "device `ray` is named twice"),
            ("b/cpu,b/cpu=2GiB", "device `b/cpu` is named twice"),
            ("ray:b/cpu,ray:b/cpu=2GiB", "device `ray:b/cpu` is named twice"),
            ("ray:b/cpu=1GiB,b/cpu=2GiB", "device `b/cpu` is named twice"),
            ("ray=6GiB", "`ray` is not a known device"),
            ("ray:", "`` is not a known device"),
            ("ray:cuda:0", "`cuda:0` is not a known device"),
            ("ray:b/rtx3090", "`b/rtx3090` is not a known device"),
            (
                "ray:a/cuda:0=6GiB@fast",
                "device `a/cuda:0`: `fast` is not a link: expected bytes per second with an optional latency, such as `12GB/s+10us`, or `1gbit`",
            ),
            (
                "ray:a/virtual:x@fast",
                "device `virtual:x`: `fast` is not a pace: expected a number of cores, 0.01 or more, such as `0.5`",
            ),
            ("cuda,cuda=2GiB", "device `cuda` is named twice"),
            ("cuda:+1", "`cuda:+1` is not a known device"),
            ("CPU", "`CPU` is not a known device"),
            ("auto=3GiB", "`auto` is not a known device"),
            (
                "cpu=much",
                "device `cpu`: `much` is not a budget: expected a share of free memory, such as `90%`, or an amount, such as `6GiB`",
            ),
            ("virtual:a", "`virtual:a` needs a budget, as in `virtual:a=600MiB`"),
            (
                "cpu,alpha/virtual:a",
                "`alpha/virtual:a` is a device of a cluster: it is named `ray:alpha/virtual:a`, or `ray:alpha/virtual:a=600MiB` to hold less",
            ),
            ("virtual:=1GiB", "`virtual:` is not a known device"),
            (
                "virtual:a=1GiB@fast",
                "device `virtual:a`: `fast` is not a pace: expected a number of cores, 0.01 or more, such as `0.5`",
            ),
            (
                "virtual:a=1GiB@0.001",
                "device `virtual:a`: `0.001` is not a pace: expected a number of cores, 0.01 or more, such as `0.5`",
            ),
            (
                "virtual:a=1GiB@0",
                "device `virtual:a`: `0` is not a pace: expected a number of cores, 0.01 or more, such as `0.5`",
            ),
            (
                "virtual:a=1GiB@1:fast",
                "device `virtual:a`: `fast` is not a link: expected bytes per second with an optional latency, such as `12GB/s+10us`, or `1gbit`",
            ),
            (
                "virtual:a=1GiB:0B/s",
                "device `virtual:a`: `0B/s` is not a link: expected bytes per second with an optional latency, such as `12GB/s+10us`, or `1gbit`",
            ),
            (
                "rtx3070@0gbit",
                "device `rtx3070`: `0gbit` is not a link: expected bytes per second with an optional latency, such as `12GB/s+10us`, or `1gbit`",
            ),
            ("host,cpu", "`host` needs a budget, as in `host=600MiB`"),
            ("cpu,cpu=2GiB", "device `cpu` is named twice"),
            ("cpu,host=1GiB,host=2GiB", "device `host` is named twice"),
            ("auto,cpu", "`auto` cannot be combined with other devices, only with `host=` and `file=`"),
            ("cpu,rtx3090", "`rtx3090` is a paper device: it cannot be combined with devices of this machine"),
        ] {
            let error = text.parse::<DevicesRequest>().unwrap_err();
            assert_eq!(error.to_string(), message, "{text}");
            assert_eq!(Failure::from(error).exit, plimsoll_core::Exit::Input);
        }
        let hints = Failure::from("gtx".parse::<DevicesRequest>().unwrap_err()).hints.join(" ");
        assert!(hints.contains("cpu") && hints.contains("virtual:") && hints.contains("rtx3090"), "{hints}");
    }

    proptest! {
        #[test]
        fn any_text_parses_or_fails_cleanly(text in "\\PC{0,40}") {
            let _ = text.parse::<DevicesRequest>();
        }

        #[test]
        fn printed_request_parses_to_same_request(
            text in "(auto|ray|ray:b/cpu(=9GiB)?|ray:b/virtual:a(=9GiB)?(@[0-9]gbit|@0\\.[0-9])?|cpu|cpu=90%|(h/)?cuda:[0-9]|b/cpu(=9GiB)?(@[0-9]gbit)?|virtual:[ab]=[0-9]{1,3}MiB(@[0-9]\\.[0-9])?(:([0-9]{1,2}(\\.5)?[GM]?B/s(\\+[0-9]us)?)?(:[0-9]gbit)?)?|rtx3090(@[0-9]gbit)?|h200=5GiB(@[0-9]MB/s)?)(,(cpu=7B|cpu=7|cuda:[0-9]|rtx3070|host=[0-9]GiB|file=[0-9]GiB)){0,3}"
        ) {
            if let Ok(request) = text.parse::<DevicesRequest>() {
                prop_assert_eq!(request.to_string().parse::<DevicesRequest>(), Ok(request));
            }
        }
    }
}
