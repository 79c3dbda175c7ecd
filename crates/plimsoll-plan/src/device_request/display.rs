//! The printed form of device lists, which the parser reads.

use super::{DeviceAttributes, DeviceRequest, DevicesRequest};
use std::fmt;

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
