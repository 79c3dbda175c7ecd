//! The parser of device lists.

use super::{DeviceAttributes, DeviceRequest, DevicesRequest, LinkRequest, MAX_DEVICES, RequestError};
use crate::paper;
use plimsoll_core::Budget;
use std::str::FromStr;

/// Slowest pace of a virtual device in CPU cores. A slower device would not finish a step in reasonable time.
const MIN_PACE: f64 = 0.01;

/// Longest name of a device in bytes, with its host (at most 64 in Linux) and its attributes before `=`.
const MAX_NAME_BYTES: usize = 160;

impl FromStr for DevicesRequest {
    type Err = RequestError;

    fn from_str(text: &str) -> Result<DevicesRequest, RequestError> {
        let count = text.split(',').count();
        if count > MAX_DEVICES {
            return Err(RequestError::TooManyDevices { count, max: MAX_DEVICES });
        }
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

/// Parses the budget in `text`. `device` is the name of the device, for the error.
fn parse_budget(device: &str, text: &str) -> Result<Budget, RequestError> {
    text.parse().map_err(|source| RequestError::InvalidBudget { device: device.to_owned(), source })
}

/// Parses the text after `ray:`. It has the form of a [remote device](DeviceRequest::Remote), with these differences
/// for a virtual device: all attributes are optional, and a team link may follow `@` directly, without a pace.
pub(super) fn parse_cluster_device(word: &str) -> Result<DeviceAttributes, RequestError> {
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

/// Parses a device from its name and the text after `=`; `value` is `None` if the device has no `=`.
fn parse_device(name: &str, value: Option<&str>) -> Result<DeviceRequest, RequestError> {
    if name.len() > MAX_NAME_BYTES {
        return Err(RequestError::LongName { device: name.to_owned(), max_bytes: MAX_NAME_BYTES });
    }
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

/// Splits the team link (after `@`) off a device's name or value. Returns the name, the value, and the text of the
/// link. The link is `None` if there is no `@`.
fn split_team_link<'a>(name: &'a str, value: Option<&'a str>) -> (&'a str, Option<&'a str>, Option<&'a str>) {
    let (head, team_link) = match value.unwrap_or(name).split_once('@') {
        Some((head, text)) => (head.trim(), Some(text)),
        None => (value.unwrap_or(name), None),
    };
    let (name, value) = if value.is_some() { (name, Some(head)) } else { (head, None) };
    (name, value, team_link)
}

/// Parses the link in `text`. `device` is the name of the device, for the error.
fn parse_link(device: &str, text: &str) -> Result<LinkRequest, RequestError> {
    let invalid = || RequestError::InvalidLink { device: device.to_owned(), link: text.trim().to_owned() };
    LinkRequest::parse(text).ok_or_else(invalid)
}
