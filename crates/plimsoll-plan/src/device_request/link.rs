//! The links of requested devices: to their host, and to the other devices of a team.

use crate::paper;
use plimsoll_core::{Bytes, Link};
use std::fmt;

/// Usual Ethernet rates in Gbit/s. An Ethernet link with one of these rates is printed in gbit, such as `2.5gbit`.
const ETHERNET_GBITS: [f64; 8] = [0.1, 1.0, 2.5, 5.0, 10.0, 25.0, 40.0, 100.0];

/// A requested link of a device to its host or to other devices, per direction: `12GB/s`, `12GB/s+10us`, or Ethernet as
/// `1gbit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkRequest {
    /// Bandwidth in bytes per second; never 0.
    pub bytes_per_second: u64,
    /// Latency in microseconds.
    pub latency_us: u32,
}

impl LinkRequest {
    /// The default host link of a virtual device: PCIe 4.0 with 8 lanes.
    pub const DEFAULT: LinkRequest = LinkRequest { bytes_per_second: 16_000_000_000, latency_us: 10 };

    /// Converts the request to a [`Link`] of the planner.
    pub fn link(self) -> Link {
        Link { bytes_per_second: self.bytes_per_second as f64, latency_seconds: f64::from(self.latency_us) / 1e6 }
    }

    /// Returns an Ethernet link of `gbit` Gbit/s, `None` if the rate is below one byte per second or infinite.
    pub(super) fn ethernet(gbit: f64) -> Option<LinkRequest> {
        let Link { bytes_per_second, latency_seconds } = paper::ethernet(gbit);
        let is_valid = bytes_per_second >= 1.0 && bytes_per_second.is_finite();
        let latency_us = (latency_seconds * 1e6).round() as u32;
        is_valid.then_some(LinkRequest { bytes_per_second: bytes_per_second.round() as u64, latency_us })
    }

    /// Parses `12GB/s`, `12GB/s+10us` or `1gbit`, in upper or lower case. Returns `None` for other text and for a rate
    /// below one byte per second.
    pub(super) fn parse(text: &str) -> Option<LinkRequest> {
        let text = text.to_ascii_lowercase();
        if let Some(gbit) = text.trim().strip_suffix("gbit") {
            return LinkRequest::ethernet(gbit.trim().parse().ok()?);
        }
        let (rate, latency) = match text.split_once('+') {
            Some((rate, latency)) => (rate, Some(latency.trim())),
            None => (&*text, None),
        };
        let latency_us = match latency {
            Some(text) => text.strip_suffix("us")?.trim().parse().ok()?,
            None => LinkRequest::DEFAULT.latency_us,
        };
        Some(LinkRequest { bytes_per_second: parse_rate(rate)?, latency_us })
    }

    /// Whether the link is a network between machines: it has at least the latency of Ethernet.
    pub fn is_network(self) -> bool {
        f64::from(self.latency_us) / 1e6 >= paper::ethernet(1.0).latency_seconds
    }
}

/// Parses a rate in bytes per second, such as `12GB/s`, in upper or lower case. Returns `None` for other text and for less
/// than a byte.
pub(super) fn parse_rate(text: &str) -> Option<u64> {
    let bytes: Bytes = text.trim().strip_suffix(['s', 'S'])?.strip_suffix('/')?.parse().ok()?;
    (bytes > Bytes::ZERO).then_some(bytes.0)
}

/// Formats a rate exactly, such as `12GB/s`.
pub(super) fn format_rate(bytes_per_second: u64) -> String {
    let units = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1000, "KB")];
    let unit = units.into_iter().find(|(scale, _)| bytes_per_second.is_multiple_of(*scale));
    let (scale, name) = unit.unwrap_or((1, "B"));
    format!("{}{name}/s", bytes_per_second / scale)
}

impl fmt::Display for LinkRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(gbit) = ETHERNET_GBITS.into_iter().find(|gbit| LinkRequest::ethernet(*gbit) == Some(*self)) {
            return write!(f, "{gbit}gbit");
        }
        write!(f, "{}+{}us", format_rate(self.bytes_per_second), self.latency_us)
    }
}
