//! Paper devices: published rates of GPUs and links that are not present, for planning only. Rates of present devices
//! are measured and never taken from this table.

mod data_sheets;

use data_sheets::{DATA_SHEETS, DataSheet};
use plimsoll_core::{Budget, Bytes, DeviceKind, DeviceSpec, Link, OpRates, Rates};

/// Prefix of the names of cards that the user states, as in `card:mine`.
pub const CARD_PREFIX: &str = "card:";

/// Assumed bytes that a CUDA process holds on its GPU outside the arena. They are 512 MiB for the driver's context
/// (300–500 MB in published measurements) and 32 MiB of cuBLASLt workspace. Plans print the figure as assumed.
pub const ASSUMED_CHARGES: Bytes = Bytes::mib(512 + 32);

/// Assumed fraction of the published rate that PCIe and NVLink reach. The rates of [`ethernet`] and of links whose
/// bandwidth the user states are used without it.
const LINK_EFFICIENCY: f64 = 0.82;

/// Assumed seconds to launch one op; data sheets do not state it.
const OP_SECONDS: f64 = 5e-6;

/// Returns the data sheet of a paper device, whose name may be in upper case; `None` for an unknown name.
fn data_sheet(name: &str) -> Option<&'static DataSheet> {
    DATA_SHEETS.iter().find(|sheet| sheet.name.eq_ignore_ascii_case(name))
}

/// Returns the name of a paper device as in the table; `None` for an unknown name.
pub fn table_name(name: &str) -> Option<&'static str> {
    data_sheet(name).map(|sheet| sheet.name)
}

/// Whether a device of this name, such as `rtx3090`, `pc1/rtx3090` or `card:mine`, is a paper device. Several devices
/// of a team may then have the name.
pub fn is_paper_name(name: &str) -> bool {
    let own = own_name(name);
    own.starts_with(CARD_PREFIX) || data_sheet(own).is_some()
}

/// Returns the name of a device without its machine.
fn own_name(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

/// Returns the names of all paper devices, such as `rtx3090`.
pub fn names() -> impl Iterator<Item = &'static str> {
    DATA_SHEETS.iter().map(|sheet| sheet.name)
}

/// Returns the total memory of a paper device in bytes; plans take all of it as free. The memory of a card of the user
/// has no limit: its amount in `run.devices` is its load line. Returns `None` for an unknown name.
pub fn usable_memory(name: &str) -> Option<Bytes> {
    let own = own_name(name);
    match own.starts_with(CARD_PREFIX) {
        true => Some(Bytes(u64::MAX)),
        false => Some(Bytes((data_sheet(own)?.usable_gib * f64::from(1 << 30)) as u64)),
    }
}

/// The rates of a card: from its data sheet, or stated by the user.
#[derive(Clone, Copy, Debug)]
pub struct CardRates {
    /// Operations per second of matrix products in f32.
    pub f32_flops: f64,
    /// Operations per second of matrix products in bf16 with f32 accumulation.
    pub bf16_flops: f64,
    /// Memory bandwidth in bytes per second.
    pub memory_bytes_per_second: f64,
    /// The link to the host; for `None`, plans assume PCIe 4.0 with 16 lanes.
    pub host_link: Option<Link>,
}

/// Returns the specification of a paper device of the table. Its load line follows from `budget`, and is at most its
/// whole memory. Its charges are assumed. Returns `None` for an unknown name.
pub fn paper(name: &str, budget: Budget) -> Option<DeviceSpec> {
    let sheet = data_sheet(name)?;
    let rates = CardRates {
        f32_flops: sheet.f32_tflops * 1e12,
        bf16_flops: sheet.bf16_tflops * 1e12,
        memory_bytes_per_second: sheet.memory_gb_per_second * 1e9,
        host_link: pcie(sheet.pcie_generation, sheet.pcie_lanes),
    };
    let line = budget.load_line(usable_memory(name)?).min(usable_memory(name)?);
    let device = card(sheet.name, line, &rates);
    Some(DeviceSpec { team_link: peer_link(name).unwrap_or(device.team_link), ..device })
}

/// Returns the specification of a card with these rates and a load line of `budget`. Its charges are assumed, and it
/// exchanges with other devices through the host.
pub fn card(name: &str, budget: Bytes, rates: &CardRates) -> DeviceSpec {
    let host_link = rates.host_link.or_else(|| pcie(4, 16)).unwrap_or(Link::MEMORY);
    DeviceSpec {
        name: name.to_owned(),
        kind: DeviceKind::Paper,
        budget,
        charges: ASSUMED_CHARGES,
        charges_measured: false,
        link_measured: false,
        nccl: None,
        team_link: host_link,
        threads: 1,
        rates: Rates {
            f32_flops: rates.f32_flops,
            bf16_flops: rates.bf16_flops,
            memory_bytes_per_second: rates.memory_bytes_per_second,
            op_seconds: OP_SECONDS,
            host_link,
            measured: false,
            ops: OpRates::default(),
        },
    }
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
        assert_eq!(paper("RTX3090", Budget::DEVICE), paper("rtx3090", Budget::DEVICE));
        assert!(is_paper_name("pc1/rtx3080") && is_paper_name("card:a") && !is_paper_name("cuda:0"));
        let docs = include_str!("../../../docs/plans.md");
        assert!(names().all(|name| docs.contains(&format!("| `{name}` |"))));
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
