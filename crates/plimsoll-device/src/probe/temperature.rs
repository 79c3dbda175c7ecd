//! Temperature and thermal throttling of the processor, from the kernel's sensors. Many virtual machines and containers
//! have none.

use super::read_text;
use std::fs;
use std::path::{Path, PathBuf};

/// Temperature of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Temperature {
    /// Temperature of the device's warmest sensor, in degrees Celsius.
    pub celsius: f64,
    /// Whether a GPU is throttled because of heat now. For a processor: whether it was throttled because of heat since
    /// the previous reading.
    pub throttled: bool,
}

/// Driver names of the `hwmon` chips that measure the processor's temperature, for Intel, AMD and ARM boards.
const CPU_CHIPS: [&str; 7] = ["coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "scpi_sensors", "cpu"];
/// Types of the kernel's thermal zones that measure the processor's temperature.
const CPU_ZONES: [&str; 5] = ["x86_pkg_temp", "cpu-thermal", "cpu_thermal", "soc-thermal", "soc_thermal"];

/// Returns the folder of sysfs: `/sys`, or the value of the environment variable `PLIMSOLL_SYSFS`. Containers that
/// mount the machine's sysfs elsewhere set it.
pub fn sysfs() -> PathBuf {
    let path = std::env::var_os("PLIMSOLL_SYSFS").filter(|path| !path.is_empty());
    path.map_or_else(|| PathBuf::from("/sys"), PathBuf::from)
}

/// Temperature of the processor, and its thermal throttle events since the machine started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CpuTemperature {
    /// Temperature of the warmest sensor, in degrees Celsius. None without a sensor.
    pub celsius: Option<f64>,
    /// Sum of the throttle counters of all cores and packages; 0 if the system does not count. The kernel lists the
    /// counters for each hardware thread, so one event may count several times.
    pub throttle_count: u64,
}

impl CpuTemperature {
    /// Reads temperature and throttle counters now, from files under `sysfs`.
    pub fn read(sysfs: &Path) -> CpuTemperature {
        let chips = entries(&sysfs.join("class/hwmon"));
        let chip_sensors = chips.iter().filter(|chip| contains_word(&chip.join("name"), &CPU_CHIPS)).flat_map(|chip| {
            let files = entries(chip).into_iter();
            files.filter(|file| file_name(file).starts_with("temp") && file_name(file).ends_with("_input"))
        });
        let zones = entries(&sysfs.join("class/thermal"));
        let zone_sensors =
            zones.iter().filter(|zone| contains_word(&zone.join("type"), &CPU_ZONES)).map(|zone| zone.join("temp"));
        let warmest = |files: Vec<PathBuf>| files.iter().filter_map(|file| degrees(file)).max_by(f64::total_cmp);
        let throttle_count = entries(&sysfs.join("devices/system/cpu")).into_iter().flat_map(|cpu| {
            let counts = ["core_throttle_count", "package_throttle_count"].map(|count| throttle_events(&cpu, count));
            counts.into_iter().flatten()
        });
        CpuTemperature {
            celsius: warmest(chip_sensors.collect()).or_else(|| warmest(zone_sensors.collect())),
            throttle_count: throttle_count.sum(),
        }
    }
}

/// Returns the paths of a folder's entries; empty if the folder is unreadable.
fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn file_name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// Whether the text of a file, without surrounding white space, equals one of `words`.
fn contains_word(file: &Path, words: &[&str]) -> bool {
    read_text(file).is_some_and(|found| words.contains(&found.trim()))
}

/// Returns the temperature in a sensor's file, in degrees Celsius; the kernel writes thousandths. None if the file is
/// unreadable, or for impossible values, which sensors that are not connected give.
fn degrees(file: &Path) -> Option<f64> {
    let degrees = read_text(file)?.trim().parse::<f64>().ok()? / 1000.0;
    (-40.0..=150.0).contains(&degrees).then_some(degrees)
}

fn throttle_events(cpu: &Path, count: &str) -> Option<u64> {
    read_text(cpu.join("thermal_throttle").join(count))?.trim().parse().ok()
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
    fn warmest_cpu_sensor_counts() {
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
        assert_eq!(CpuTemperature::read(root.path()), CpuTemperature { celsius: Some(70.5), throttle_count: 7 });
    }

    #[test]
    fn thermal_zone_is_the_fallback() {
        let root = machine(&[
            ("class/thermal/thermal_zone0/type", "acpitz\n"),
            ("class/thermal/thermal_zone0/temp", "20000\n"),
            ("class/thermal/thermal_zone1/type", "cpu-thermal\n"),
            ("class/thermal/thermal_zone1/temp", "48000\n"),
        ]);
        assert_eq!(CpuTemperature::read(root.path()).celsius, Some(48.0));
        assert_eq!(CpuTemperature::read(Path::new("/nowhere")), CpuTemperature::default());
    }
}
