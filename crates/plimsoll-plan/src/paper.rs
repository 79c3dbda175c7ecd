//! Devices on paper: published rates of GPUs and links that are not at hand, for plans only.
//!
//! Rates of a device that is here are measured instead, and never taken from this table.

use plimsoll_core::{Budget, Bytes, DeviceKind, DeviceSpec, Link, Rates};

/// Bytes that a CUDA process holds on its GPU outside any arena: the driver's context (300–500 MB measured by others)
/// and 32 MiB of workspace for the library of products. Assumed, and printed as assumed.
pub const ASSUMED_CHARGES: Bytes = Bytes::mib(512 + 32);

/// What a link is planned at, of its rate on paper: 80–85 % are reached in practice.
const LINK_SHARE: f64 = 0.82;

/// Seconds to launch one operation: assumed, as no data sheet says it.
const OP_SECONDS: f64 = 5e-6;

/// A line of the table: data sheets of the makers, f32 without tensor cores, bf16 dense with f32 sums.
struct Sheet {
    name: &'static str,
    /// What the driver reports as total, in GiB; for the 4060 Ti, 4090, A100 and H100 assumed.
    usable_gib: f64,
    f32_tflops: f64,
    bf16_tflops: f64,
    memory_gb_per_second: f64,
    pcie_generation: u32,
    pcie_lanes: u32,
    /// Direct link between such devices, GB/s one way; 0 where they meet over the host.
    nvlink_gb_per_second: f64,
}

#[rustfmt::skip]
const SHEETS: [Sheet; 8] = [
    Sheet { name: "rtx3070",       usable_gib: 7.67,  f32_tflops: 20.3,  bf16_tflops: 40.6,  memory_gb_per_second: 448.0,  pcie_generation: 4, pcie_lanes: 16, nvlink_gb_per_second: 0.0 },
    Sheet { name: "rtx3090",       usable_gib: 23.57, f32_tflops: 35.6,  bf16_tflops: 71.0,  memory_gb_per_second: 936.0,  pcie_generation: 4, pcie_lanes: 16, nvlink_gb_per_second: 0.0 },
    Sheet { name: "rtx4060ti-16g", usable_gib: 15.6,  f32_tflops: 22.1,  bf16_tflops: 44.1,  memory_gb_per_second: 288.0,  pcie_generation: 4, pcie_lanes: 8,  nvlink_gb_per_second: 0.0 },
    Sheet { name: "rtx4090",       usable_gib: 23.6,  f32_tflops: 82.6,  bf16_tflops: 165.2, memory_gb_per_second: 1008.0, pcie_generation: 4, pcie_lanes: 16, nvlink_gb_per_second: 0.0 },
    Sheet { name: "rtx5090",       usable_gib: 31.36, f32_tflops: 104.8, bf16_tflops: 209.5, memory_gb_per_second: 1792.0, pcie_generation: 5, pcie_lanes: 16, nvlink_gb_per_second: 0.0 },
    Sheet { name: "a100-80g",      usable_gib: 79.2,  f32_tflops: 19.5,  bf16_tflops: 312.0, memory_gb_per_second: 2039.0, pcie_generation: 4, pcie_lanes: 16, nvlink_gb_per_second: 300.0 },
    Sheet { name: "h100-sxm",      usable_gib: 79.2,  f32_tflops: 67.0,  bf16_tflops: 989.0, memory_gb_per_second: 3350.0, pcie_generation: 5, pcie_lanes: 16, nvlink_gb_per_second: 450.0 },
    Sheet { name: "h200",          usable_gib: 140.4, f32_tflops: 67.0,  bf16_tflops: 989.0, memory_gb_per_second: 4800.0, pcie_generation: 5, pcie_lanes: 16, nvlink_gb_per_second: 450.0 },
];

fn sheet(name: &str) -> Option<&'static Sheet> {
    SHEETS.iter().find(|sheet| sheet.name == name)
}

/// The names of all devices on paper.
pub fn names() -> impl Iterator<Item = &'static str> {
    SHEETS.iter().map(|sheet| sheet.name)
}

/// The memory that a device on paper has for programs, all of it taken as free.
pub fn usable(name: &str) -> Option<Bytes> {
    Some(Bytes((sheet(name)?.usable_gib * f64::from(1 << 30)) as u64))
}

/// A device on paper under `budget`, of which no more counts than the device has; `None` where no such device is in the
/// table. Its charges are assumed.
pub fn paper(name: &str, budget: Budget) -> Option<DeviceSpec> {
    let sheet = sheet(name)?;
    Some(DeviceSpec {
        name: name.to_owned(),
        kind: DeviceKind::Paper,
        budget: budget.of(usable(name)?).min(usable(name)?),
        charges: ASSUMED_CHARGES,
        charges_measured: false,
        link_measured: false,
        nccl: None,
        // Over the host, unless such cards have a direct link: assumed.
        team_link: peer_link(name).or_else(|| pcie(sheet.pcie_generation, sheet.pcie_lanes))?,
        threads: 1,
        rates: Rates {
            f32_flops: sheet.f32_tflops * 1e12,
            bf16_flops: sheet.bf16_tflops * 1e12,
            memory_bytes_per_second: sheet.memory_gb_per_second * 1e9,
            op_seconds: OP_SECONDS,
            host_link: pcie(sheet.pcie_generation, sheet.pcie_lanes)?,
            measured: false,
            ops: plimsoll_core::OpRates::default(),
        },
    })
}

/// The direct link between two devices of this name, where they have one.
pub fn peer_link(name: &str) -> Option<Link> {
    let rate = sheet(name)?.nvlink_gb_per_second;
    (rate > 0.0).then_some(Link { bytes_per_second: LINK_SHARE * rate * 1e9, latency_seconds: 5e-6 })
}

/// A PCIe link, one way, at the rate to plan on; `None` for generations that are not in the table.
pub fn pcie(generation: u32, lanes: u32) -> Option<Link> {
    // GB/s of 16 lanes on paper.
    let sixteen = match generation {
        3 => 15.7,
        4 => 31.5,
        5 => 63.0,
        _ => return None,
    };
    let bytes_per_second = LINK_SHARE * sixteen * 1e9 * f64::from(lanes) / 16.0;
    Some(Link { bytes_per_second, latency_seconds: 10e-6 })
}

/// Ethernet of so many Gbit/s, payload: 0.118 GB/s for each.
pub fn ethernet(gbit_per_second: f64) -> Link {
    Link { bytes_per_second: 0.118e9 * gbit_per_second, latency_seconds: 100e-6 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_on_paper_is_labelled_as_such() {
        for name in names() {
            let spec = paper(name, Budget::DEVICE).unwrap();
            assert_eq!((spec.name.as_str(), spec.kind), (name, DeviceKind::Paper));
            assert!(!spec.rates.measured && !spec.charges_measured && spec.charges > Bytes::ZERO);
            assert!(spec.rates.f32_flops < spec.rates.bf16_flops);
        }
        assert_eq!(paper("rtx9999", Budget::DEVICE), None);
    }

    #[test]
    fn budgets_of_paper_devices_are_of_what_the_driver_reports() {
        let whole = paper("rtx3070", Budget::Share(1.0)).unwrap();
        assert_eq!(whole.budget.to_string(), "7.67 GiB");
        assert_eq!(paper("rtx3070", Budget::Amount(Bytes::gib(4))).unwrap().budget, Bytes::gib(4));
        // No plan may count on memory that the device does not have.
        assert_eq!(paper("rtx3070", Budget::Amount(Bytes::gib(64))).unwrap().budget, whole.budget);
    }

    #[test]
    fn links_are_planned_below_their_rate_on_paper() {
        let half = paper("rtx4060ti-16g", Budget::DEVICE).unwrap().rates.host_link.bytes_per_second;
        let full = paper("rtx4090", Budget::DEVICE).unwrap().rates.host_link.bytes_per_second;
        assert!(half * 2.0 == full && full > 0.80 * 31.5e9 && full < 0.85 * 31.5e9);
        assert!(peer_link("rtx3090").is_none() && peer_link("h200").is_some() && pcie(9, 16).is_none());
        assert_eq!(ethernet(10.0).bytes_per_second, 1.18e9);
    }
}
