//! Paper devices: published rates of GPUs and links that are not present, for planning only. Rates of present devices
//! are measured and never taken from this table.

use plimsoll_core::{Budget, Bytes, DeviceKind, DeviceSpec, Link, Rates};

/// Assumed bytes that a CUDA process holds on its GPU outside the arena. They are 512 MiB for the driver's context
/// (300–500 MB in published measurements) and 32 MiB of cuBLASLt workspace. Plans print the figure as assumed.
pub const ASSUMED_CHARGES: Bytes = Bytes::mib(512 + 32);

/// Fraction of a link's published rate that plans assume: 80–85 % are reached in practice.
const LINK_EFFICIENCY: f64 = 0.82;

/// Assumed seconds to launch one op; data sheets do not state it.
const OP_SECONDS: f64 = 5e-6;

/// The data sheet of a GPU. Rates are those of its maker: f32 without tensor cores, dense bf16 with f32 accumulation.
struct DataSheet {
    name: &'static str,
    /// Total memory reported by the driver in GiB; assumed for the 4060 Ti, 4090, A100 and H100.
    usable_gib: f64,
    f32_tflops: f64,
    bf16_tflops: f64,
    memory_gb_per_second: f64,
    pcie_generation: u32,
    pcie_lanes: u32,
    /// Rate of the direct link between two such GPUs in GB/s, one way; 0 if they exchange through the host.
    nvlink_gb_per_second: f64,
}

#[rustfmt::skip]
const DATA_SHEETS: [DataSheet; 8] = [
    DataSheet { name: "rtx3070",       usable_gib: 7.67,  f32_tflops: 20.3,  bf16_tflops: 40.6,  memory_gb_per_second: 448.0,  pcie_generation: 4, pcie_lanes: 16, nvlink_gb_per_second: 0.0 },
    DataSheet { name: "rtx3090",       usable_gib: 23.57, f32_tflops: 35.6,  bf16_tflops: 71.0,  memory_gb_per_second: 936.0,  pcie_generation: 4, pcie_lanes: 16, nvlink_gb_per_second: 0.0 },
    DataSheet { name: "rtx4060ti-16g", usable_gib: 15.6,  f32_tflops: 22.1,  bf16_tflops: 44.1,  memory_gb_per_second: 288.0,  pcie_generation: 4, pcie_lanes: 8,  nvlink_gb_per_second: 0.0 },
    DataSheet { name: "rtx4090",       usable_gib: 23.6,  f32_tflops: 82.6,  bf16_tflops: 165.2, memory_gb_per_second: 1008.0, pcie_generation: 4, pcie_lanes: 16, nvlink_gb_per_second: 0.0 },
    DataSheet { name: "rtx5090",       usable_gib: 31.36, f32_tflops: 104.8, bf16_tflops: 209.5, memory_gb_per_second: 1792.0, pcie_generation: 5, pcie_lanes: 16, nvlink_gb_per_second: 0.0 },
    DataSheet { name: "a100-80g",      usable_gib: 79.2,  f32_tflops: 19.5,  bf16_tflops: 312.0, memory_gb_per_second: 2039.0, pcie_generation: 4, pcie_lanes: 16, nvlink_gb_per_second: 300.0 },
    DataSheet { name: "h100-sxm",      usable_gib: 79.2,  f32_tflops: 67.0,  bf16_tflops: 989.0, memory_gb_per_second: 3350.0, pcie_generation: 5, pcie_lanes: 16, nvlink_gb_per_second: 450.0 },
    DataSheet { name: "h200",          usable_gib: 140.4, f32_tflops: 67.0,  bf16_tflops: 989.0, memory_gb_per_second: 4800.0, pcie_generation: 5, pcie_lanes: 16, nvlink_gb_per_second: 450.0 },
];

/// Returns the data sheet of a paper device; `None` for an unknown name.
fn data_sheet(name: &str) -> Option<&'static DataSheet> {
    DATA_SHEETS.iter().find(|sheet| sheet.name == name)
}

/// Returns the names of all paper devices, such as `rtx3090`.
pub fn names() -> impl Iterator<Item = &'static str> {
    DATA_SHEETS.iter().map(|sheet| sheet.name)
}

/// Returns the total memory of a paper device in bytes; plans take all of it as free. Returns `None` for an unknown
/// name.
pub fn usable_memory(name: &str) -> Option<Bytes> {
    Some(Bytes((data_sheet(name)?.usable_gib * f64::from(1 << 30)) as u64))
}

/// Returns the specification of a paper device. Its load line follows from `budget`, and is at most its whole memory.
/// Its charges are assumed. Returns `None` for an unknown name.
pub fn paper(name: &str, budget: Budget) -> Option<DeviceSpec> {
    let sheet = data_sheet(name)?;
    Some(DeviceSpec {
        name: name.to_owned(),
        kind: DeviceKind::Paper,
        budget: budget.load_line(usable_memory(name)?).min(usable_memory(name)?),
        charges: ASSUMED_CHARGES,
        charges_measured: false,
        link_measured: false,
        nccl: None,
        // Assumed: through the host, unless such GPUs have a direct link.
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

/// Returns the direct link (NVLink) between two paper devices of this name; `None` if they have none, or if the name is
/// unknown.
pub fn peer_link(name: &str) -> Option<Link> {
    let rate = data_sheet(name)?.nvlink_gb_per_second;
    (rate > 0.0).then_some(Link { bytes_per_second: LINK_EFFICIENCY * rate * 1e9, latency_seconds: 5e-6 })
}

/// Returns one direction of a PCIe link of `generation` (3 to 5) with `lanes` lanes, at the rate that plans assume.
/// `None` for another generation.
pub fn pcie(generation: u32, lanes: u32) -> Option<Link> {
    // Published GB/s of 16 lanes.
    let gb_of_16_lanes = match generation {
        3 => 15.7,
        4 => 31.5,
        5 => 63.0,
        _ => return None,
    };
    let bytes_per_second = LINK_EFFICIENCY * gb_of_16_lanes * 1e9 * f64::from(lanes) / 16.0;
    Some(Link { bytes_per_second, latency_seconds: 10e-6 })
}

/// Returns an Ethernet link with a nominal rate of `gbit_per_second`. Plans assume 0.118 GB/s of payload per Gbit/s.
pub fn ethernet(gbit_per_second: f64) -> Link {
    Link { bytes_per_second: 0.118e9 * gbit_per_second, latency_seconds: 100e-6 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paper_device_is_labelled_unmeasured() {
        for name in names() {
            let spec = paper(name, Budget::DEVICE).unwrap();
            assert_eq!((spec.name.as_str(), spec.kind), (name, DeviceKind::Paper));
            assert!(!spec.rates.measured && !spec.charges_measured && spec.charges > Bytes::ZERO);
            assert!(spec.rates.f32_flops < spec.rates.bf16_flops);
        }
        assert_eq!(paper("rtx9999", Budget::DEVICE), None);
    }

    #[test]
    fn paper_budget_is_limited_to_device_memory() {
        let whole = paper("rtx3070", Budget::Share(1.0)).unwrap();
        assert_eq!(whole.budget.to_string(), "7.67 GiB");
        assert_eq!(paper("rtx3070", Budget::Amount(Bytes::gib(4))).unwrap().budget, Bytes::gib(4));
        // A plan cannot use more memory than the device has.
        assert_eq!(paper("rtx3070", Budget::Amount(Bytes::gib(64))).unwrap().budget, whole.budget);
    }

    #[test]
    fn links_are_planned_below_published_rate() {
        let half = paper("rtx4060ti-16g", Budget::DEVICE).unwrap().rates.host_link.bytes_per_second;
        let full = paper("rtx4090", Budget::DEVICE).unwrap().rates.host_link.bytes_per_second;
        assert!(half * 2.0 == full && full > 0.80 * 31.5e9 && full < 0.85 * 31.5e9);
        assert!(peer_link("rtx3090").is_none() && peer_link("h200").is_some() && pcie(9, 16).is_none());
        assert_eq!(ethernet(10.0).bytes_per_second, 1.18e9);
    }
}
