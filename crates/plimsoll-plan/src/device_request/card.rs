//! The figures of a card on paper that is in no table, as in `card:mine=12GiB,bf16=60TFLOPS,memory=450GB/s`.

use super::LinkRequest;
use super::link::{format_rate, parse_rate};
use crate::paper::CardRates;
use std::fmt;

/// The figures that the user gives for a card that is in no table. A rate of 0 is missing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CardFigures {
    /// TFLOPS of matrix products in bf16 with f32 accumulation.
    pub bf16_tflops: f64,
    /// TFLOPS of matrix products in f32; `None` for half of those in bf16.
    pub f32_tflops: Option<f64>,
    /// Memory bandwidth in bytes per second.
    pub memory_bytes_per_second: u64,
    /// The link to the host; `None` for PCIe 4.0 with 16 lanes.
    pub link: Option<LinkRequest>,
}

impl CardFigures {
    /// The names of the figures, as written before `=`.
    pub(super) const KEYS: [&str; 4] = ["bf16", "f32", "memory", "link"];

    /// Returns whether the figure `key` is set.
    pub(super) fn has(&self, key: &str) -> bool {
        match key {
            "bf16" => self.bf16_tflops > 0.0,
            "f32" => self.f32_tflops.is_some(),
            "memory" => self.memory_bytes_per_second > 0,
            _ => self.link.is_some(),
        }
    }

    /// Sets the figure `key`. Returns `None` if `text` is no such figure.
    pub(super) fn set(&mut self, key: &str, text: &str) -> Option<()> {
        match key {
            "bf16" => self.bf16_tflops = parse_tflops(text)?,
            "f32" => self.f32_tflops = Some(parse_tflops(text)?),
            "memory" => self.memory_bytes_per_second = parse_rate(text)?,
            _ => self.link = Some(LinkRequest::parse(text)?),
        }
        Some(())
    }

    /// Returns the name of a figure that must be given and is not; `None` if nothing is missing.
    pub(super) fn missing(&self) -> Option<&'static str> {
        ["bf16", "memory"].into_iter().find(|key| !self.has(key))
    }

    /// Returns the rates that follow from the figures.
    pub fn rates(&self) -> CardRates {
        CardRates {
            f32_flops: self.f32_tflops.unwrap_or(self.bf16_tflops / 2.0) * 1e12,
            bf16_flops: self.bf16_tflops * 1e12,
            memory_bytes_per_second: self.memory_bytes_per_second as f64,
            host_link: self.link.map(LinkRequest::link),
        }
    }
}

/// Prints the figures in the form that the parser reads.
impl fmt::Display for CardFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bf16={}TFLOPS", self.bf16_tflops)?;
        if let Some(tflops) = self.f32_tflops {
            write!(f, ",f32={tflops}TFLOPS")?;
        }
        write!(f, ",memory={}", format_rate(self.memory_bytes_per_second))?;
        self.link.map_or(Ok(()), |link| write!(f, ",link={link}"))
    }
}

/// Parses a rate such as `60TFLOPS`, from 0.001 to a million. Returns `None` for other text.
fn parse_tflops(text: &str) -> Option<f64> {
    let text = text.trim().to_ascii_lowercase();
    let rate: f64 = text.strip_suffix("tflops")?.trim().parse().ok()?;
    (0.001..=1e6).contains(&rate).then_some(rate)
}
