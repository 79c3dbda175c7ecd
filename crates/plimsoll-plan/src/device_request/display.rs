//! The printed form of device lists, which the parser reads.

use super::{DeviceAttributes, DeviceRequest, DevicesRequest};
use std::fmt;

impl fmt::Display for DeviceRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceRequest::Ray { word } => f.write_str(word),
            _ => self.attributes().map_err(|_| fmt::Error)?.fmt(f),
        }?;
        self.figures().map_or(Ok(()), |figures| write!(f, ",{figures}"))
    }
}

/// Formats `count` identical devices, such as `pc1/8xrtx5090`.
fn format_several(device: &DeviceRequest, count: usize) -> String {
    let text = device.to_string();
    match device.machine() {
        _ if count == 1 => text,
        Some(machine) => format!("{machine}/{count}x{}", &text[machine.len() + 1..]),
        None => format!("{count}x{text}"),
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
        let identical = self.devices.chunk_by(|one, other| one.is_paper() && one == other);
        let mut parts: Vec<String> = identical.map(|several| format_several(&several[0], several.len())).collect();
        if parts.is_empty() {
            parts.push("auto".to_owned());
        }
        parts.extend(self.machine_hosts.iter().map(|(machine, host)| format!("{machine}/host={host}")));
        parts.extend(self.host.map(|host| format!("host={host}")));
        parts.extend(self.file.map(|file| format!("file={file}")));
        parts.extend(self.machine_links.iter().map(|((one, other), link)| format!("{one}-{other}={link}")));
        f.write_str(&parts.join(","))
    }
}
