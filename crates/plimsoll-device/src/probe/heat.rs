//! How warm the processor is, and whether it was slowed down for it: what the kernel's sensors say, where there are any.
//! Many virtual machines and containers have none.

use super::text;
use std::fs;
use std::path::{Path, PathBuf};

/// How warm a device is.
#[derive(Clone, Debug, PartialEq)]
pub struct Heat {
    /// Of its warmest sensor, in degrees Celsius.
    pub celsius: f64,
    /// Whether it is slowed down now because of heat; for a processor, whether it was so more often than counted before.
    pub throttled: bool,
}

/// The chips among `hwmon` that measure the processor, by the names of their drivers: Intel, AMD, and what boards of ARM
/// call theirs.
const CHIPS: [&str; 7] = ["coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "scpi_sensors", "cpu"];
/// The same among thermal zones.
const ZONES: [&str; 5] = ["x86_pkg_temp", "cpu-thermal", "cpu_thermal", "soc-thermal", "soc_thermal"];

/// Where the kernel's devices are seen: `PLIMSOLL_SYSFS`, for containers that have the machine's elsewhere, or `/sys`.
pub fn sysfs() -> PathBuf {
    let named = std::env::var_os("PLIMSOLL_SYSFS").filter(|path| !path.is_empty());
    named.map_or_else(|| PathBuf::from("/sys"), PathBuf::from)
}

/// What the sensors of the processor say, and how often it has been slowed down since the machine was started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ProcessorHeat {
    /// Of the warmest sensor, in degrees Celsius; none where there is none.
    pub celsius: Option<f64>,
    /// Times that a core or a package was slowed down because of heat; 0 where nobody counts.
    pub slowed: u64,
}

impl ProcessorHeat {
    /// As it is now below this `sysfs`.
    pub fn read(sysfs: &Path) -> ProcessorHeat {
        let chips = folders(&sysfs.join("class/hwmon"));
        let of_chips = chips.iter().filter(|chip| named(&chip.join("name"), &CHIPS)).flat_map(|chip| {
            let files = folders(chip).into_iter();
            files.filter(|file| name(file).starts_with("temp") && name(file).ends_with("_input"))
        });
        let zones = folders(&sysfs.join("class/thermal"));
        let of_zones = zones.iter().filter(|zone| named(&zone.join("type"), &ZONES)).map(|zone| zone.join("temp"));
        let warmest = |files: Vec<PathBuf>| files.iter().filter_map(|file| degrees(file)).max_by(f64::total_cmp);
        let slowed = folders(&sysfs.join("devices/system/cpu")).into_iter().flat_map(|cpu| {
            let counts = ["core_throttle_count", "package_throttle_count"].map(|count| number(&cpu, count));
            counts.into_iter().flatten()
        });
        ProcessorHeat {
            celsius: warmest(of_chips.collect()).or_else(|| warmest(of_zones.collect())),
            slowed: slowed.sum(),
        }
    }
}

/// What lies in a folder.
fn folders(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// Whether a file holds one of these words.
fn named(file: &Path, words: &[&str]) -> bool {
    text(file).is_some_and(|found| words.contains(&found.trim()))
}

/// Thousandths of a degree, as the kernel writes them. What no chip reaches is a sensor that is not connected.
fn degrees(file: &Path) -> Option<f64> {
    let degrees = text(file)?.trim().parse::<f64>().ok()? / 1000.0;
    (-40.0..=150.0).contains(&degrees).then_some(degrees)
}

fn number(cpu: &Path, count: &str) -> Option<u64> {
    text(cpu.join("thermal_throttle").join(count))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    #[test]
    fn the_warmest_sensor_of_the_processor_counts_and_no_other_chip() {
        let root = machine(&[
            ("class/hwmon/hwmon0/name", "nvme\n"),
            ("class/hwmon/hwmon0/temp1_input", "99000\n"),
            ("class/hwmon/hwmon1/name", "k10temp\n"),
            ("class/hwmon/hwmon1/temp1_input", "61250\n"),
            ("class/hwmon/hwmon1/temp2_input", "70500\n"),
            ("class/hwmon/hwmon1/temp1_max", "95000\n"),
            ("class/hwmon/hwmon1/temp3_input", "-273000\n"),
            ("class/thermal/thermal_zone0/type", "x86_pkg_temp\n"),
            ("class/thermal/thermal_zone0/temp", "80000\n"),
            ("devices/system/cpu/cpu0/thermal_throttle/core_throttle_count", "3\n"),
            ("devices/system/cpu/cpu1/thermal_throttle/package_throttle_count", "4\n"),
        ]);
        assert_eq!(ProcessorHeat::read(root.path()), ProcessorHeat { celsius: Some(70.5), slowed: 7 });
    }

    #[test]
    fn where_no_chip_measures_a_thermal_zone_does_and_where_nothing_does_nothing_is_known() {
        let root = machine(&[
            ("class/thermal/thermal_zone0/type", "acpitz\n"),
            ("class/thermal/thermal_zone0/temp", "20000\n"),
            ("class/thermal/thermal_zone1/type", "cpu-thermal\n"),
            ("class/thermal/thermal_zone1/temp", "48000\n"),
        ]);
        assert_eq!(ProcessorHeat::read(root.path()).celsius, Some(48.0));
        assert_eq!(ProcessorHeat::read(Path::new("/nowhere")), ProcessorHeat::default());
    }
}
