//! What the user asks for with `--devices` or `run.devices`: the text, read. Whether such devices are here, and what
//! is free on them, is for others to find out.

use crate::paper;
use plimsoll_core::{Budget, Bytes, Failure, Link, ParseBudgetError};
use std::fmt;
use std::str::FromStr;

/// The slowest pace of a virtual device, in cores: below it, nobody lives to see a step.
const LEAST_PACE: f64 = 0.01;

/// One device asked for. A budget that was not given is the run's (`memory.budget`).
#[derive(Clone, Debug, PartialEq)]
pub enum DeviceRequest {
    /// `cpu`, `cpu=6GiB`.
    Cpu {
        /// Its load line.
        budget: Option<Budget>,
    },
    /// `cuda:0`, `cuda:0=6GiB`; `cuda` is the one of this machine's that the planner prefers.
    Cuda {
        /// The driver's number of it.
        index: Option<u32>,
        /// Its load line.
        budget: Option<Budget>,
    },
    /// `virtual:a=600MiB@0.5`, `virtual:a=600MiB@0.5:12GB/s+10us`, `virtual:a=600MiB@0.5:12GB/s:1gbit`.
    Virtual {
        /// The name after the colon.
        name: String,
        /// Its load line.
        budget: Budget,
        /// Its pace, in cores of this processor.
        pace: f64,
        /// Its link to the host, where it was given.
        link: Option<LinkRequest>,
        /// Its link to the other devices, where it was given.
        team_link: Option<LinkRequest>,
    },
    /// One of another host, named as there: `host1/cuda:0=6GiB@1gbit`, `host1/cpu`, `host1/virtual:a=600MiB@0.5`.
    Elsewhere {
        /// What stands before the slash.
        host: String,
        /// The device, as that host knows it.
        device: Box<DeviceRequest>,
        /// Its link to the other devices, where it was given; a virtual device has its own.
        team_link: Option<LinkRequest>,
    },
    /// What only the cluster that this machine is part of can say: `ray` is all of it, `ray:host1/cuda:0` what stands behind
    /// the colon, which may leave out what its host knows. [`DeviceRequest::said`] is what it does not.
    Ray {
        /// As it was written.
        word: String,
    },
    /// A device of [`paper::names`], for plans: `rtx3090`, `rtx3090=20GiB`, `rtx3070@1gbit`.
    Paper {
        /// The name in the table.
        name: String,
        /// Its load line.
        budget: Option<Budget>,
        /// Its link to the other devices, where it was given.
        team_link: Option<LinkRequest>,
    },
}

/// How fast a device is linked to its host, or to the others, each way: `12GB/s`, `12GB/s+10us`, or Ethernet as `1gbit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkRequest {
    /// Bytes a second, at least 1.
    pub bytes_per_second: u64,
    /// Microseconds before the first byte.
    pub latency_us: u32,
}

/// What the word of a device says of it. The rest is for its host to know, or for the run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    /// The host that it is on, where that is named.
    pub host: Option<String>,
    /// The device, as that host names it; `ray` is every device of the cluster.
    pub device: String,
    /// Its load line.
    pub line: Option<Budget>,
    /// The pace of a virtual device, in cores.
    pub pace: Option<f64>,
    /// The link of a virtual device to its host.
    pub link: Option<LinkRequest>,
    /// Its link to the other devices.
    pub team_link: Option<LinkRequest>,
}

impl Said {
    /// Whether it is a virtual device.
    fn simulated(&self) -> bool {
        self.device.starts_with("virtual:")
    }

    /// The same under this load line on a node that joined its cluster with `joined`. A virtual device that is named without a
    /// pace has the pace of there, and the links that it does not name.
    pub fn placed(self, line: Budget, joined: &Said) -> Said {
        let as_there = self.pace.is_none() && self.simulated() && joined.simulated();
        let of_there = |own: Option<LinkRequest>, there| if as_there { own.or(there) } else { own };
        Said {
            line: Some(line),
            pace: if as_there { joined.pace } else { self.pace },
            link: of_there(self.link, joined.link),
            team_link: of_there(self.team_link, joined.team_link),
            ..self
        }
    }
}

/// Rates of Ethernet, in Gbit/s.
const GBITS: [f64; 8] = [0.1, 1.0, 2.5, 5.0, 10.0, 25.0, 40.0, 100.0];

impl LinkRequest {
    /// What a virtual device has unless another one is named: PCIe 4.0 with 8 lanes.
    pub const DEFAULT: LinkRequest = LinkRequest { bytes_per_second: 16_000_000_000, latency_us: 10 };

    /// The same in the words of the planner.
    pub fn link(self) -> Link {
        Link { bytes_per_second: self.bytes_per_second as f64, latency_seconds: f64::from(self.latency_us) / 1e6 }
    }

    /// Ethernet of so many Gbit/s.
    fn ethernet(gbit: f64) -> Option<LinkRequest> {
        let Link { bytes_per_second, latency_seconds } = paper::ethernet(gbit);
        let usable = bytes_per_second >= 1.0 && bytes_per_second.is_finite();
        let latency_us = (latency_seconds * 1e6).round() as u32;
        usable.then_some(LinkRequest { bytes_per_second: bytes_per_second.round() as u64, latency_us })
    }

    fn read(text: &str) -> Option<LinkRequest> {
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
        if let Some(gbit) = GBITS.into_iter().find(|gbit| LinkRequest::ethernet(*gbit) == Some(*self)) {
            return write!(f, "{gbit}gbit");
        }
        let units = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1000, "KB")];
        let unit = units.into_iter().find(|(scale, _)| self.bytes_per_second.is_multiple_of(*scale));
        let (scale, name) = unit.unwrap_or((1, "B"));
        write!(f, "{}{name}/s+{}us", self.bytes_per_second / scale, self.latency_us)
    }
}

/// The devices and the host asked for. Printed as it is read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DevicesRequest {
    /// The devices in order; none means `auto`: what is here is looked at, and taken if it helps.
    pub devices: Vec<DeviceRequest>,
    /// The host's memory, where it was given: `host=64GiB`.
    pub host: Option<Budget>,
    /// The scratch file, where it was given: `file=100GiB`.
    pub file: Option<Budget>,
}

impl DevicesRequest {
    /// Whether devices on paper are among them: such a request can be planned, not run.
    pub fn on_paper(&self) -> bool {
        self.devices.iter().any(|device| matches!(device, DeviceRequest::Paper { .. }))
    }

    /// Whether devices of other hosts are among them, which somebody has to reach.
    pub fn elsewhere(&self) -> bool {
        self.devices.iter().any(|device| matches!(device, DeviceRequest::Elsewhere { .. } | DeviceRequest::Ray { .. }))
    }
}

/// Why a text names no devices.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// Nothing between two commas, or nothing at all.
    #[error("a device is missing in `{text}`")]
    Missing {
        /// The whole text.
        text: String,
    },
    /// A name that nothing is known by.
    #[error("`{name}` is no known device")]
    Unknown {
        /// What was given.
        name: String,
    },
    /// A budget that cannot be read.
    #[error("device `{device}`: {source}")]
    Budget {
        /// The device it was for.
        device: String,
        /// What is wrong with it.
        source: ParseBudgetError,
    },
    /// A virtual device or the host without a budget.
    #[error("`{device}` needs a budget, as in `{device}=600MiB`")]
    NoBudget {
        /// The device.
        device: String,
    },
    /// A device of a cluster, named as if it were one that this run makes up.
    #[error("`{device}` is a device of a cluster: it is named `ray:{device}`, or `ray:{device}=600MiB` to hold less")]
    OfCluster {
        /// The device.
        device: String,
    },
    /// A pace that cannot be read.
    #[error("device `{device}`: `{pace}` is no pace: expected a number of cores, 0.01 or more, such as `0.5`")]
    Pace {
        /// The device.
        device: String,
        /// What was given.
        pace: String,
    },
    /// A link that cannot be read.
    #[error(
        "device `{device}`: `{link}` is no link: expected bytes a second, and a latency if it matters, such as `12GB/s+10us`, or `1gbit`"
    )]
    Link {
        /// The device.
        device: String,
        /// What was given.
        link: String,
    },
    /// A device twice.
    #[error("device `{device}` is named twice")]
    Twice {
        /// The device.
        device: String,
    },
    /// `auto` beside devices.
    #[error("`auto` stands alone (or with `host=` and `file=`): it cannot be joined with other devices")]
    AutoAndOthers,
    /// Devices that are here and devices that are not.
    #[error("`{paper}` is a device on paper: it cannot be joined with devices of this machine")]
    PaperAndReal {
        /// One of those on paper.
        paper: String,
    },
}

impl From<RequestError> for Failure {
    fn from(error: RequestError) -> Failure {
        let failure = Failure::input(error.to_string());
        match error {
            RequestError::Unknown { .. } | RequestError::Missing { .. } => failure
                .hint("known devices: auto, cpu, cuda:0, virtual:NAME=600MiB@0.5:12GB/s, HOST/cuda:0, ray, host=64GiB, file=100GiB")
                .hint(format!("on paper, for plans: {}", paper::names().collect::<Vec<_>>().join(", "))),
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
            let budget = |value: &str| budget(name, value);
            let twice = || RequestError::Twice { device: name.to_owned() };
            match name {
                "" => return Err(RequestError::Missing { text: text.to_owned() }),
                "auto" if auto => return Err(twice()),
                "auto" if value.is_none() => auto = true,
                "host" if request.host.is_some() => return Err(twice()),
                "host" => {
                    let value = value.ok_or_else(|| RequestError::NoBudget { device: name.to_owned() })?;
                    request.host = Some(budget(value)?);
                }
                "file" if request.file.is_some() => return Err(twice()),
                "file" => {
                    let value = value.ok_or_else(|| RequestError::NoBudget { device: name.to_owned() })?;
                    request.file = Some(budget(value)?);
                }
                _ => {
                    let device = match part.strip_prefix("ray:") {
                        Some(word) => of_cluster(word).map(|_| DeviceRequest::Ray { word: part.to_owned() })?,
                        None if part == "ray" => DeviceRequest::Ray { word: part.to_owned() },
                        None => device(name, value)?,
                    };
                    // Several cards of a kind on paper are several cards.
                    let again = request.devices.iter().any(|other| other.known_by() == device.known_by());
                    if again && !matches!(device, DeviceRequest::Paper { .. }) {
                        return Err(twice());
                    }
                    request.devices.push(device);
                }
            }
        }
        if auto && !request.devices.is_empty() {
            return Err(RequestError::AutoAndOthers);
        }
        if !auto && request.devices.is_empty() {
            return Err(RequestError::Missing { text: text.to_owned() });
        }
        let real = request.devices.iter().any(|device| !matches!(device, DeviceRequest::Paper { .. }));
        match request.devices.iter().find(|device| matches!(device, DeviceRequest::Paper { .. })) {
            Some(paper) if real => Err(RequestError::PaperAndReal { paper: paper.name() }),
            _ => Ok(request),
        }
    }
}

/// The load line of a device, as it was written.
fn budget(device: &str, text: &str) -> Result<Budget, RequestError> {
    text.parse().map_err(|source| RequestError::Budget { device: device.to_owned(), source })
}

/// What stands behind `ray:`, but for that as an [`Elsewhere`](DeviceRequest::Elsewhere) is written. Of a virtual device all
/// but the name may be left out, and a link alone may stand where its pace does.
fn of_cluster(word: &str) -> Result<Said, RequestError> {
    let (name, value) = match word.split_once('=') {
        Some((name, value)) => (name.trim(), Some(value.trim())),
        None => (word.trim(), None),
    };
    let (before, behind) = match value.unwrap_or(name).split_once('@') {
        Some((before, behind)) => (before.trim(), Some(behind.trim())),
        None => (value.unwrap_or(name), None),
    };
    let (name, line) = if value.is_some() { (name, Some(before)) } else { (before, None) };
    let unknown = || RequestError::Unknown { name: name.to_owned() };
    if !name.contains("/virtual:") {
        let device = device(word.split('=').next().unwrap_or(word).trim(), value)?;
        return if matches!(device, DeviceRequest::Elsewhere { .. }) { device.said() } else { Err(unknown()) };
    }
    let team_link = behind.and_then(LinkRequest::read);
    let pace = behind.filter(|_| team_link.is_none());
    let whole = [line.unwrap_or("100%"), pace.map_or("", |_| "@"), pace.unwrap_or("")].concat();
    let said = device(name, Some(&whole))?.said()?;
    Ok(Said {
        line: said.line.filter(|_| line.is_some()),
        pace: said.pace.filter(|_| pace.is_some()),
        team_link: team_link.or(said.team_link),
        ..said
    })
}

/// One device by its name and what stands after the `=`.
fn device(name: &str, value: Option<&str>) -> Result<DeviceRequest, RequestError> {
    let unknown = || RequestError::Unknown { name: name.to_owned() };
    let budget = |text: &str| budget(name, text);
    // A rate behind an `@` has a slash, too.
    if let Some((host, own)) = name.split_once('/').filter(|(host, _)| !host.contains('@')) {
        if host.is_empty() || !host.chars().all(|c| c.is_ascii_alphanumeric() || ".-_".contains(c)) {
            return Err(unknown());
        }
        let (own, value, team_link) = match own.starts_with("virtual:") {
            true => (own, value, None),
            false => linked(own, value),
        };
        let team_link = team_link.map(|text| link(name, text)).transpose()?;
        let of_cluster = |error| match error {
            RequestError::NoBudget { .. } => RequestError::OfCluster { device: name.to_owned() },
            error => error,
        };
        let device = match device(own, value).map_err(of_cluster)? {
            // Which one has to be said, and what is on paper is nowhere.
            DeviceRequest::Cuda { index: None, .. } | DeviceRequest::Paper { .. } | DeviceRequest::Elsewhere { .. } => {
                return Err(unknown());
            }
            device => Box::new(device),
        };
        return Ok(DeviceRequest::Elsewhere { host: host.to_owned(), device, team_link });
    }
    if name == "cpu" {
        return Ok(DeviceRequest::Cpu { budget: value.map(budget).transpose()? });
    }
    if name == "cuda" {
        return Ok(DeviceRequest::Cuda { index: None, budget: value.map(budget).transpose()? });
    }
    if let Some(index) = name.strip_prefix("cuda:") {
        // `+1` and `01` are numbers for Rust, but no names of devices.
        let index: u32 = index.parse().ok().filter(|number: &u32| number.to_string() == index).ok_or_else(unknown)?;
        return Ok(DeviceRequest::Cuda { index: Some(index), budget: value.map(budget).transpose()? });
    }
    if let Some(own) = name.strip_prefix("virtual:") {
        if own.is_empty() || !own.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_') {
            return Err(unknown());
        }
        let value = value.ok_or_else(|| RequestError::NoBudget { device: name.to_owned() })?;
        let (value, links) = value.split_once(':').unwrap_or((value, ""));
        let (host, team) = links.split_once(':').unwrap_or((links, ""));
        // Nothing between two colons is the usual link.
        let given = |text: &str| if text.trim().is_empty() { Ok(None) } else { link(name, text).map(Some) };
        let (link, team_link) = (given(host)?, given(team)?);
        let (amount, pace) = value.split_once('@').unwrap_or((value, "1.0"));
        let (amount, pace) = (amount.trim(), pace.trim());
        let bad_pace = || RequestError::Pace { device: name.to_owned(), pace: pace.to_owned() };
        let cores: f64 = pace.parse().map_err(|_| bad_pace())?;
        if !(cores >= LEAST_PACE && cores.is_finite()) {
            return Err(bad_pace());
        }
        return Ok(DeviceRequest::Virtual {
            name: own.to_owned(),
            budget: budget(amount)?,
            pace: cores,
            link,
            team_link,
        });
    }
    let (name, value, team_link) = linked(name, value);
    if paper::names().any(|known| known == name) {
        let team_link = team_link.map(|text| link(name, text)).transpose()?;
        return Ok(DeviceRequest::Paper { name: name.to_owned(), budget: value.map(budget).transpose()?, team_link });
    }
    Err(unknown())
}

/// A name and what stands after the `=`, without the link that stands at the end of both, and that.
fn linked<'a>(name: &'a str, value: Option<&'a str>) -> (&'a str, Option<&'a str>, Option<&'a str>) {
    let (head, team_link) = match value.unwrap_or(name).split_once('@') {
        Some((head, text)) => (head.trim(), Some(text)),
        None => (value.unwrap_or(name), None),
    };
    let (name, value) = if value.is_some() { (name, Some(head)) } else { (head, None) };
    (name, value, team_link)
}

/// A link of a device, as it was written.
fn link(device: &str, text: &str) -> Result<LinkRequest, RequestError> {
    let wrong = || RequestError::Link { device: device.to_owned(), link: text.trim().to_owned() };
    LinkRequest::read(text).ok_or_else(wrong)
}

impl DeviceRequest {
    /// The device's name, as in plans: `cpu`, `cuda:0`, `virtual:a`, `rtx3090`, `host1/cuda:0`.
    pub fn name(&self) -> String {
        match self {
            DeviceRequest::Cpu { .. } => "cpu".to_owned(),
            DeviceRequest::Cuda { index: Some(index), .. } => format!("cuda:{index}"),
            DeviceRequest::Cuda { index: None, .. } => "cuda".to_owned(),
            DeviceRequest::Virtual { name, .. } => format!("virtual:{name}"),
            DeviceRequest::Elsewhere { host, device, .. } => format!("{host}/{}", device.name()),
            DeviceRequest::Ray { word: name } | DeviceRequest::Paper { name, .. } => name.clone(),
        }
    }

    /// The same for all words of a device of a cluster.
    fn known_by(&self) -> String {
        let name = self.name();
        match name.strip_prefix("ray:") {
            Some(word) => word.split(['=', '@']).next().unwrap_or(word).trim().to_owned(),
            None => name,
        }
    }

    /// What its word says of it.
    ///
    /// # Errors
    /// The word of a device of a cluster cannot be read; one that was read with others can.
    pub fn said(&self) -> Result<Said, RequestError> {
        let plain = || Said { device: self.name(), line: self.budget(), ..Said::default() };
        Ok(match self {
            DeviceRequest::Cpu { .. } | DeviceRequest::Cuda { .. } => plain(),
            DeviceRequest::Virtual { pace, link, team_link, .. } => {
                Said { pace: Some(*pace), link: *link, team_link: *team_link, ..plain() }
            }
            DeviceRequest::Elsewhere { host, device, team_link } => {
                let own = device.said()?;
                Said { host: Some(host.clone()), team_link: team_link.or(own.team_link), ..own }
            }
            DeviceRequest::Ray { word } => match word.strip_prefix("ray:") {
                Some(word) => of_cluster(word)?,
                None => plain(),
            },
            DeviceRequest::Paper { team_link, .. } => Said { team_link: *team_link, ..plain() },
        })
    }
}

impl DeviceRequest {
    /// Its own load line, where it was named with one.
    pub fn budget(&self) -> Option<Budget> {
        match self {
            DeviceRequest::Virtual { budget, .. } => Some(*budget),
            DeviceRequest::Elsewhere { device, .. } => device.budget(),
            DeviceRequest::Ray { .. } => None,
            DeviceRequest::Cpu { budget }
            | DeviceRequest::Cuda { budget, .. }
            | DeviceRequest::Paper { budget, .. } => *budget,
        }
    }

    /// The device, as its own host names it.
    pub fn at_home(&self) -> &DeviceRequest {
        if let DeviceRequest::Elsewhere { device, .. } = self { device } else { self }
    }

    /// The same, to be changed.
    pub fn at_home_mut(&mut self) -> &mut DeviceRequest {
        if let DeviceRequest::Elsewhere { device, .. } = self { device } else { self }
    }

    /// The same device under another load line.
    pub fn give(&mut self, amount: Budget) {
        match self {
            DeviceRequest::Virtual { budget, .. } => *budget = amount,
            DeviceRequest::Elsewhere { device, .. } => device.give(amount),
            // What it is is not known yet.
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
            _ => self.said().map_err(|_| fmt::Error)?.fmt(f),
        }
    }
}

/// As it is read, but for the `ray:` before a device of a cluster.
impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Said { host, device, line, pace, link, team_link } = self;
        if let Some(host) = host {
            write!(f, "{host}/")?;
        }
        f.write_str(device)?;
        if let Some(line) = line {
            write!(f, "={line}")?;
        }
        if let Some(pace) = pace {
            write!(f, "@{pace}")?;
        }
        match (link, team_link) {
            (None, None) => Ok(()),
            (None, Some(team)) if !self.simulated() => write!(f, "@{team}"),
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

    fn read(text: &str) -> DevicesRequest {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn every_form_of_the_book_is_read() {
        assert_eq!(read("auto"), DevicesRequest::default());
        let cpu = |budget: Option<Budget>| DeviceRequest::Cpu { budget };
        assert_eq!(read("cpu").devices, [cpu(None)]);
        assert_eq!(read("cpu=80%").devices, [cpu(Some(Budget::Share(0.8)))]);
        let request = read("cpu=6GiB, host=2GiB");
        assert_eq!(request.devices, [cpu(Some(Budget::Amount(Bytes::gib(6))))]);
        assert_eq!(request.host, Some(Budget::Amount(Bytes::gib(2))));
        let request = read("cpu,host=2GiB,file=50%");
        assert_eq!((request.file, &*request.to_string()), (Some(Budget::Share(0.5)), "cpu,host=2GiB,file=50%"));
        assert_eq!(read("cuda:0,cuda:1").devices.len(), 2);
        let gpu = |index, budget: Option<Budget>| DeviceRequest::Cuda { index, budget };
        assert_eq!(read("cuda").devices, [gpu(None, None)]);
        assert_eq!(read("cuda:1=6GiB").devices, [gpu(Some(1), Some(Budget::Amount(Bytes::gib(6))))]);
        let part = |name: &str, mib: u64, pace: f64| DeviceRequest::Virtual {
            name: name.to_owned(),
            budget: Budget::Amount(Bytes::mib(mib)),
            pace,
            link: None,
            team_link: None,
        };
        assert_eq!(
            read("virtual:a=600MiB@1.0,virtual:b=200MiB@0.5").devices,
            [part("a", 600, 1.0), part("b", 200, 0.5)]
        );
        assert_eq!(read("virtual:a=600MiB").devices, [part("a", 600, 1.0)]);
        let linked = |bytes_per_second, latency_us| DeviceRequest::Virtual {
            name: "a".to_owned(),
            budget: Budget::Amount(Bytes::mib(600)),
            pace: 0.5,
            link: Some(LinkRequest { bytes_per_second, latency_us }),
            team_link: None,
        };
        assert_eq!(read("virtual:a=600MiB@0.5:12GB/s").devices, [linked(12_000_000_000, 10)]);
        assert_eq!(read("virtual:a=600MiB@0.5 : 125MB/s + 80us").devices, [linked(125_000_000, 80)]);
        assert_eq!(read("virtual:a=600MiB@0.5:12GB/s").to_string(), "virtual:a=600MiB@0.5:12GB/s+10us");
        let paper = read("rtx3090,rtx3070,host=64GiB");
        assert!(paper.on_paper() && paper.devices.len() == 2 && paper.host.is_some());
        assert_eq!(read("rtx3090,rtx3090").devices.len(), 2);
        let ethernet = LinkRequest { bytes_per_second: 118_000_000, latency_us: 100 };
        let linked = |name: &str, gib: Option<u64>| DeviceRequest::Paper {
            name: name.to_owned(),
            budget: gib.map(|gib| Budget::Amount(Bytes::gib(gib))),
            team_link: Some(ethernet),
        };
        assert_eq!(
            read("rtx3090=20GiB@1gbit,rtx3070@118MB/s+100us,host=64GiB").devices,
            [linked("rtx3090", Some(20)), linked("rtx3070", None)]
        );
        let far = &read("cuda:0,host1/cuda:0=6GiB").devices[1];
        let amount = Some(Budget::Amount(Bytes::gib(6)));
        assert_eq!((&*far.name(), far.budget()), ("host1/cuda:0", amount));
        let cluster = read("ray:b/virtual:a=50%@0.5,ray:b/cuda:0,host=2GiB");
        assert_eq!(cluster.devices[1], DeviceRequest::Ray { word: "ray:b/cuda:0".to_owned() });
        assert_eq!(
            cluster.devices[1].said().unwrap(),
            Said { host: Some("b".into()), device: "cuda:0".into(), ..Said::default() }
        );
        assert!(cluster.elsewhere() && read("b/cpu").elsewhere() && !read("cpu").elsewhere() && !cluster.on_paper());
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
            assert_eq!(read(text).to_string(), printed);
        }
    }

    #[test]
    fn of_a_device_of_the_cluster_only_what_is_said_counts() {
        let ethernet = LinkRequest::ethernet(1.0);
        let fast = LinkRequest { bytes_per_second: 12_000_000_000, latency_us: 10 };
        let amount = Some(Budget::Amount(Bytes::mib(600)));
        let of = |device: &str| Said { host: Some("b".into()), device: device.into(), ..Said::default() };
        for (word, said) in [
            ("ray", Said { device: "ray".into(), ..Said::default() }),
            ("ray:b/cpu", of("cpu")),
            ("ray:b/cuda:0 = 600MiB @ 1gbit", Said { line: amount, team_link: ethernet, ..of("cuda:0") }),
            ("b/cuda:0@1gbit", Said { team_link: ethernet, ..of("cuda:0") }),
            ("ray:b/virtual:a", of("virtual:a")),
            ("ray:b/virtual:a@1gbit", Said { team_link: ethernet, ..of("virtual:a") }),
            ("ray:b/virtual:a=600MiB@118MB/s+100us", Said { line: amount, team_link: ethernet, ..of("virtual:a") }),
            ("ray:b/virtual:a@0.5", Said { pace: Some(0.5), ..of("virtual:a") }),
            ("ray:b/virtual:a=600MiB::1gbit", Said { line: amount, team_link: ethernet, ..of("virtual:a") }),
            (
                "ray:b/virtual:a=600MiB@0.5:12GB/s:1gbit",
                Said { line: amount, pace: Some(0.5), link: Some(fast), team_link: ethernet, ..of("virtual:a") },
            ),
        ] {
            assert_eq!(read(word).devices[0].said(), Ok(said), "{word}");
        }
    }

    #[test]
    fn what_is_no_request_says_what_was_expected() {
        for (text, message) in [
            ("", "a device is missing in ``"),
            ("cpu,,cuda:0", "a device is missing in `cpu,,cuda:0`"),
            ("host=2GiB", "a device is missing in `host=2GiB`"),
            ("rtx9090", "`rtx9090` is no known device"),
            ("cuda:", "`cuda:` is no known device"),
            ("b/cuda", "`b/cuda` is no known device"),
            ("b/rtx3090", "`b/rtx3090` is no known device"),
            ("/cpu", "`/cpu` is no known device"),
            ("b/c/cpu", "`b/c/cpu` is no known device"),
            ("ray,ray", "device `ray` is named twice"),
            ("b/cpu,b/cpu=2GiB", "device `b/cpu` is named twice"),
            ("ray:b/cpu,ray:b/cpu=2GiB", "device `ray:b/cpu` is named twice"),
            ("ray:b/cpu=1GiB,b/cpu=2GiB", "device `b/cpu` is named twice"),
            ("ray=6GiB", "`ray` is no known device"),
            ("ray:", "`` is no known device"),
            ("ray:cuda:0", "`cuda:0` is no known device"),
            ("ray:b/rtx3090", "`b/rtx3090` is no known device"),
            (
                "ray:a/cuda:0=6GiB@fast",
                "device `a/cuda:0`: `fast` is no link: expected bytes a second, and a latency if it matters, such as `12GB/s+10us`, or `1gbit`",
            ),
            (
                "ray:a/virtual:x@fast",
                "device `virtual:x`: `fast` is no pace: expected a number of cores, 0.01 or more, such as `0.5`",
            ),
            ("cuda,cuda=2GiB", "device `cuda` is named twice"),
            ("cuda:+1", "`cuda:+1` is no known device"),
            ("CPU", "`CPU` is no known device"),
            ("auto=3GiB", "`auto` is no known device"),
            (
                "cpu=much",
                "device `cpu`: `much` is no budget: expected a share of what is free, such as `90%`, or an amount, such as `6GiB`",
            ),
            ("virtual:a", "`virtual:a` needs a budget, as in `virtual:a=600MiB`"),
            (
                "cpu,alpha/virtual:a",
                "`alpha/virtual:a` is a device of a cluster: it is named `ray:alpha/virtual:a`, or `ray:alpha/virtual:a=600MiB` to hold less",
            ),
            ("virtual:=1GiB", "`virtual:` is no known device"),
            (
                "virtual:a=1GiB@fast",
                "device `virtual:a`: `fast` is no pace: expected a number of cores, 0.01 or more, such as `0.5`",
            ),
            (
                "virtual:a=1GiB@0.001",
                "device `virtual:a`: `0.001` is no pace: expected a number of cores, 0.01 or more, such as `0.5`",
            ),
            (
                "virtual:a=1GiB@0",
                "device `virtual:a`: `0` is no pace: expected a number of cores, 0.01 or more, such as `0.5`",
            ),
            (
                "virtual:a=1GiB@1:fast",
                "device `virtual:a`: `fast` is no link: expected bytes a second, and a latency if it matters, such as `12GB/s+10us`, or `1gbit`",
            ),
            (
                "virtual:a=1GiB:0B/s",
                "device `virtual:a`: `0B/s` is no link: expected bytes a second, and a latency if it matters, such as `12GB/s+10us`, or `1gbit`",
            ),
            (
                "rtx3070@0gbit",
                "device `rtx3070`: `0gbit` is no link: expected bytes a second, and a latency if it matters, such as `12GB/s+10us`, or `1gbit`",
            ),
            ("host,cpu", "`host` needs a budget, as in `host=600MiB`"),
            ("cpu,cpu=2GiB", "device `cpu` is named twice"),
            ("cpu,host=1GiB,host=2GiB", "device `host` is named twice"),
            ("auto,cpu", "`auto` stands alone (or with `host=` and `file=`): it cannot be joined with other devices"),
            ("cpu,rtx3090", "`rtx3090` is a device on paper: it cannot be joined with devices of this machine"),
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
        fn any_text_is_read_or_refused(text in "\\PC{0,40}") {
            let _ = text.parse::<DevicesRequest>();
        }

        #[test]
        fn what_was_read_is_printed_as_the_same_request(
            text in "(auto|ray|ray:b/cpu(=9GiB)?|ray:b/virtual:a(=9GiB)?(@[0-9]gbit|@0\\.[0-9])?|cpu|cpu=90%|(h/)?cuda:[0-9]|b/cpu(=9GiB)?(@[0-9]gbit)?|virtual:[ab]=[0-9]{1,3}MiB(@[0-9]\\.[0-9])?(:([0-9]{1,2}(\\.5)?[GM]?B/s(\\+[0-9]us)?)?(:[0-9]gbit)?)?|rtx3090(@[0-9]gbit)?|h200=5GiB(@[0-9]MB/s)?)(,(cpu=7B|cpu=7|cuda:[0-9]|rtx3070|host=[0-9]GiB|file=[0-9]GiB)){0,3}"
        ) {
            if let Ok(request) = text.parse::<DevicesRequest>() {
                prop_assert_eq!(request.to_string().parse::<DevicesRequest>(), Ok(request));
            }
        }
    }
}
