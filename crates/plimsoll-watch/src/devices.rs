//! The output of `plimsoll devices` and `plimsoll bench devices` as text and JSON. `plimsoll-device` finds and measures
//! the devices.

use crate::text::{columns, excerpt, flops, percent};
use plimsoll_core::Bytes;
use plimsoll_device::bench::{Bench, DeviceBench};
use plimsoll_device::disk::DiskRates;
use plimsoll_device::machine::{DeviceInfo, Gpu, Machine};
use plimsoll_device::probe::Cache;
use serde::Serialize;

/// Formats the devices of a machine as a table, followed by their default limits, their hardware and the NVIDIA
/// libraries. Ends with a line break.
pub fn table(machine: &Machine) -> String {
    let mut rows = vec![titles(&["device", "cores", "memory", "free", "would take", "threads"])];
    rows.extend(machine.devices.iter().map(|device| {
        vec![
            device.name.clone(),
            device.cores.to_string(),
            device.memory_total_bytes.to_string(),
            device.memory_free_bytes.to_string(),
            device.defaults.budget_bytes.to_string(),
            if device.gpu.is_some() { "-".to_owned() } else { device.defaults.threads.to_string() },
        ]
    }));
    let mut text = columns(&rows);
    for device in &machine.devices {
        text += &format!("\n{}: {}\n", device.name, device.defaults.reason);
        text += &format!("{}: {}\n", device.name, describe_hardware(device));
    }
    text += &format!("\n{}\n", machine.nvidia);
    text
}

fn titles(titles: &[&str]) -> Vec<String> {
    titles.iter().map(|title| (*title).to_owned()).collect()
}

/// Describes the hardware of a device in one line.
fn describe_hardware(device: &DeviceInfo) -> String {
    let mut parts = vec![device.model.clone()];
    if let Some(gpu) = &device.gpu {
        parts.extend(describe_gpu(gpu));
        return parts.join("; ");
    }
    let threads = if device.threads == 1 { "thread" } else { "threads" };
    parts.push(format!("{} hardware {threads}", device.threads));
    if !device.features.is_empty() {
        parts.push(device.features.join(" "));
    }
    let cache = |cache: &Cache| format!("L{} {}", cache.level, cache.bytes);
    if !device.caches.is_empty() {
        parts.push(format!("caches {}", device.caches.iter().map(cache).collect::<Vec<_>>().join(", ")));
    }
    parts.join("; ")
}

/// Describes a GPU in one phrase per property: architecture, PCIe link, memory held by other processes, and condition
/// (such as its temperature). Leaves out properties that are unknown.
fn describe_gpu(gpu: &Gpu) -> Vec<String> {
    let mut parts = vec![format!("{} {}", gpu.family, gpu.compute_capability)];
    if let Some(pcie) = &gpu.pcie {
        let now = match (pcie.generation_now, pcie.lanes_now) {
            now if now == (pcie.generation, pcie.lanes) => String::new(),
            (generation, lanes) => format!(" (now {generation}.0 × {lanes})"),
        };
        parts.push(format!("PCIe {}.0 × {}{now}", pcie.generation, pcie.lanes));
    }
    if let Some(held) = gpu.held_bytes.filter(|held| *held > Bytes::ZERO) {
        let holders = gpu.processes.iter().map(|process| {
            let name = process.name.as_deref().map_or_else(|| "process".to_owned(), excerpt);
            let bytes = process.held_bytes.map_or(String::new(), |bytes| format!(" {bytes}"));
            format!("{name} ({}){bytes}", process.pid)
        });
        let holders: Vec<String> = holders.collect();
        let holders = if holders.is_empty() { String::new() } else { format!(": {}", holders.join(", ")) };
        parts.push(format!("{held} held by others{holders}"));
    }
    parts.extend(Some(gpu.condition.describe()).filter(|text| !text.is_empty()));
    parts
}

/// Formats the devices of a machine as a JSON object.
pub fn json(machine: &Machine) -> String {
    pretty(machine)
}

/// Formats the measured rates of a device benchmark as a JSON object.
pub fn bench_json(bench: &Bench) -> String {
    pretty(bench)
}

fn pretty(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("plain data has a JSON form")
}

/// Formats the measured rates of a device benchmark as tables. Ends with a line break.
pub fn bench_table(bench: &Bench) -> String {
    let mut products = vec![titles(&["device", "threads", "products", "median", "best", "sustained"])];
    let mut memory = vec![titles(&["device", "threads", "read", "write", "copy", "triad", "empty op"])];
    let mut links = vec![titles(&["device", "to device", "from device", "latency"])];
    let mut conditions = String::new();
    let mut simulated = false;
    for device in &bench.devices {
        let threads = if device.gpu.is_some() { "-".to_owned() } else { device.threads.to_string() };
        let name = device.device.clone();
        simulated |= device.simulated;
        products.extend(device.products.iter().map(|rate| {
            let [median, best, sustained] = [rate.median_flops, rate.best_flops, rate.sustained_flops].map(flops);
            vec![name.clone(), threads.clone(), rate.dtype.to_string(), median, best, sustained]
        }));
        let [read, write, copy, triad] =
            [device.memory.read, device.memory.write, device.memory.copy, device.memory.triad].map(traffic);
        let micros = |seconds: f64| format!("{:.2} µs", seconds * 1e6);
        memory.push(vec![name.clone(), threads, read, write, copy, triad, micros(device.op_seconds)]);
        if let Some(gpu) = &device.gpu {
            let rates = [gpu.to_device.bytes_per_second, gpu.to_host.bytes_per_second].map(traffic);
            let latency = micros(gpu.to_device.latency_seconds.max(gpu.to_host.latency_seconds));
            let [to_device, from_device] = rates;
            links.push(vec![name.clone(), to_device, from_device, latency]);
            conditions += &format!("{name}: {}, driver {}\n", device.model, gpu.driver);
            let moments = [("before", &gpu.before), ("after", &gpu.after)];
            for (when, condition) in moments.map(|(when, condition)| (when, condition.describe())) {
                if !condition.is_empty() {
                    conditions += &format!("{name} {when}: {condition}\n");
                }
            }
        }
    }
    let mut text = format!("{}\n{}\n", columns(&products), columns(&memory));
    if links.len() > 1 {
        text += &format!("{}\n{conditions}", columns(&links));
    }
    let rates = bench.all.products.iter().map(|sum| format!("{} {}", flops(sum.sustained_flops), sum.dtype));
    let rates: Vec<String> = rates.chain([traffic(bench.all.memory_bytes_per_second)]).collect();
    text += &format!("all together ({}): {}\n", bench.all.devices.join(", "), rates.join(", "));
    for (name, condition) in bench.all.conditions.iter().map(|(name, condition)| (name, condition.describe())) {
        if !condition.is_empty() {
            text += &format!("{name} under combined load: {condition}\n");
        }
    }
    let contention = bench.devices.iter().map(|device| device.contention).fold(0.0, f64::max);
    if bench.devices.iter().any(DeviceBench::disturbed) {
        let share = percent(contention, 0);
        text += &format!(
            "other programs used the cores for up to {share} of the time: rates that are too low are not stored\n"
        );
    }
    if simulated {
        text += "some of these devices are simulated\n";
    }
    text
}

/// Formats the read and write rates of a scratch file in the working directory. The text is an empty line and a line
/// with the rates.
pub fn disk_line(rates: &DiskRates) -> String {
    let DiskRates { read_bytes_per_second, write_bytes_per_second } = *rates;
    let [read, write] = [read_bytes_per_second, write_bytes_per_second].map(|rate| format!("{:.2} GB/s", rate / 1e9));
    format!("\nthe disk of this folder, for a scratch file: reads {read} while it writes {write}\n")
}

fn traffic(bytes_per_second: f64) -> String {
    format!("{:.1} GB/s", bytes_per_second / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{DType, DeviceKind};
    use plimsoll_device::bench::{CombinedRate, CombinedRates, GpuBench, MemoryRate, ProductRate};
    use plimsoll_device::cuda::libraries::Library;
    use plimsoll_device::cuda::nvml::{Condition, Pcie, Process};
    use plimsoll_device::machine::{DefaultLimits, LibraryState, Nvidia};
    use std::collections::BTreeMap;

    fn laptop() -> Machine {
        let cpu = DeviceInfo {
            name: "cpu".to_owned(),
            kind: DeviceKind::Cpu,
            model: "Example 4000".to_owned(),
            memory_total_bytes: Bytes::gib(16),
            memory_free_bytes: Bytes::gib(12),
            memory_bound_by: "the machine".to_owned(),
            cores: 4,
            threads: 8,
            features: vec!["avx2".to_owned(), "fma".to_owned()],
            caches: vec![
                Cache { level: 1, bytes: Bytes(48 << 10), shared_by: 2 },
                Cache { level: 3, bytes: Bytes::mib(8), shared_by: 8 },
            ],
            defaults: DefaultLimits {
                budget_bytes: Bytes::gib(12),
                threads: 3,
                reason: "all of it (the machine); 80% of 4 physical cores".to_owned(),
            },
            gpu: None,
        };
        Machine { devices: vec![cpu], nvidia: nvidia(None) }
    }

    /// Returns the NVIDIA libraries of a machine that has only the driver, in version `driver`. If `driver` is `None`,
    /// it has none.
    fn nvidia(driver: Option<&str>) -> Nvidia {
        let libraries = Library::ALL.map(|library| {
            let here = driver.filter(|_| library == Library::Driver);
            LibraryState {
                library,
                path: here.map(|_| "/lib/libcuda.so.1".into()),
                version: here.map(str::to_owned),
                place: here.map(|_| "system"),
                missing: None,
                remedy: Some("pip install it".to_owned()),
            }
        });
        let cuda = driver.map(|_| "12.4".to_owned());
        Nvidia {
            driver: driver.map(str::to_owned),
            cuda,
            error: None,
            failure: None,
            libraries: libraries.into(),
            cards_on_bus: 0,
        }
    }

    /// Returns a machine with a CPU, and with a GPU that another program uses.
    fn workstation() -> Machine {
        let mut machine = laptop();
        let condition = Condition { temperature_celsius: Some(61), busy: Some(0.5), ..Condition::default() };
        let gpu = Gpu {
            family: "Ampere",
            compute_capability: "8.6".to_owned(),
            uuid: "00112233-4455-6677-8899-aabbccddeeff".to_owned(),
            bus: "00000000:01:00.0".to_owned(),
            held_bytes: Some(Bytes::gib(3)),
            reserved_bytes: Some(Bytes::gib(1)),
            processes: vec![Process {
                pid: 7,
                name: Some("python".to_owned()),
                held_bytes: Some(Bytes::gib(3)),
                draws: false,
            }],
            pcie: Some(Pcie { generation: 4, lanes: 16, generation_now: 1, lanes_now: 16 }),
            condition,
            unusable: None,
        };
        machine.devices.push(DeviceInfo {
            name: "cuda:0".to_owned(),
            kind: DeviceKind::Cuda,
            model: "Example GPU".to_owned(),
            memory_total_bytes: Bytes::gib(24),
            memory_free_bytes: Bytes::gib(20),
            memory_bound_by: "NVML".to_owned(),
            cores: 82,
            threads: 0,
            features: Vec::new(),
            caches: Vec::new(),
            defaults: DefaultLimits {
                budget_bytes: Bytes::gib(18),
                threads: 0,
                reason: "90% of what is free".to_owned(),
            },
            gpu: Some(gpu),
        });
        machine.nvidia = nvidia(Some("550.54.14"));
        machine
    }

    #[test]
    fn table_shows_gpu_holders_and_library_paths() {
        let expected = "\
device  cores     memory       free  would take  threads
cpu         4  16.00 GiB  12.00 GiB   12.00 GiB        3
cuda:0     82  24.00 GiB  20.00 GiB   18.00 GiB        -

cpu: all of it (the machine); 80% of 4 physical cores
cpu: Example 4000; 8 hardware threads; avx2 fma; caches L1 48.00 KiB, L3 8.00 MiB

cuda:0: 90% of what is free
cuda:0: Example GPU; Ampere 8.6; PCIe 4.0 × 16 (now 1.0 × 16); 3.00 GiB held by others: python (7) 3.00 GiB; 61 °C

NVIDIA driver 550.54.14 (CUDA 12.4): /lib/libcuda.so.1
NVML not found (free memory and temperature are then unknown): pip install it
NVRTC not found: pip install it
cuBLASLt not found: pip install it
NCCL not found (GPUs then exchange data through host memory): pip install it
";
        assert_eq!(table(&workstation()), expected);
    }

    #[test]
    fn table_shows_default_limits_with_reasons() {
        let expected = "\
device  cores     memory       free  would take  threads
cpu         4  16.00 GiB  12.00 GiB   12.00 GiB        3

cpu: all of it (the machine); 80% of 4 physical cores
cpu: Example 4000; 8 hardware threads; avx2 fma; caches L1 48.00 KiB, L3 8.00 MiB

NVIDIA driver not found
";
        assert_eq!(table(&laptop()), expected);
    }

    #[test]
    fn json_has_bytes_as_numbers() {
        let value: serde_json::Value = serde_json::from_str(&json(&laptop())).unwrap();
        assert_eq!(value["devices"][0]["name"], "cpu");
        assert_eq!(value["devices"][0]["kind"], "cpu");
        assert_eq!(value["devices"][0]["memory_free_bytes"], 12u64 << 30);
        assert_eq!(value["devices"][0]["defaults"]["threads"], 3);
        assert_eq!(value["devices"][0].get("gpu"), None);
        assert_eq!(value["nvidia"]["driver"], serde_json::Value::Null);
    }

    fn measured(threads: u32, f32_flops: f64) -> DeviceBench {
        let rate = |dtype, flops: f64| ProductRate {
            dtype,
            median_flops: flops,
            best_flops: flops * 1.1,
            sustained_flops: flops * 0.9,
        };
        DeviceBench {
            device: "cpu".to_owned(),
            simulated: false,
            model: "Example 4000".to_owned(),
            threads,
            products: vec![rate(DType::F32, f32_flops), rate(DType::F64, f32_flops / 2.0)],
            memory: MemoryRate { array_bytes: Bytes::mib(64), read: 2e10, write: 1.1e10, copy: 1.5e10, triad: 1.6e10 },
            op_seconds: 3.26e-6 / f64::from(threads * threads),
            ops: plimsoll_core::OpRates::default(),
            contention: f64::from(threads) / 100.0,
            gpu: None,
        }
    }

    #[test]
    fn bench_table_shows_rates_and_sum() {
        let bench = Bench {
            plimsoll: "0.1.0".to_owned(),
            seconds: 30.0,
            devices: vec![measured(1, 1e11), measured(16, 1.5e12)],
            all: CombinedRates {
                devices: vec!["cpu".to_owned()],
                products: vec![CombinedRate { dtype: DType::F32, sustained_flops: 1.35e12 }],
                memory_bytes_per_second: 1.6e10,
                conditions: BTreeMap::new(),
            },
        };
        let expected = "\
device  threads  products         median           best      sustained
cpu           1       f32  100.0 GFLOP/s  110.0 GFLOP/s   90.0 GFLOP/s
cpu           1       f64   50.0 GFLOP/s   55.0 GFLOP/s   45.0 GFLOP/s
cpu          16       f32   1.50 TFLOP/s   1.65 TFLOP/s   1.35 TFLOP/s
cpu          16       f64  750.0 GFLOP/s  825.0 GFLOP/s  675.0 GFLOP/s

device  threads       read      write       copy      triad  empty op
cpu           1  20.0 GB/s  11.0 GB/s  15.0 GB/s  16.0 GB/s   3.26 µs
cpu          16  20.0 GB/s  11.0 GB/s  15.0 GB/s  16.0 GB/s   0.01 µs

all together (cpu): 1.35 TFLOP/s f32, 16.0 GB/s
other programs used the cores for up to 16 % of the time: rates that are too low are not stored
";
        assert_eq!(bench_table(&bench), expected);
        let value: serde_json::Value = serde_json::from_str(&bench_json(&bench)).unwrap();
        assert_eq!(value["devices"][1]["products"][0]["dtype"], "f32");
    }

    #[test]
    fn bench_table_shows_gpu_link_and_condition() {
        let way = |bytes_per_second| plimsoll_core::Link { bytes_per_second, latency_seconds: 1.2e-5 };
        let gpu = GpuBench {
            driver: "550.54.14".to_owned(),
            multiprocessors: 82,
            to_device: way(2.5e10),
            to_host: way(2.6e10),
            before: Condition { temperature_celsius: Some(40), ..Condition::default() },
            after: Condition {
                temperature_celsius: Some(71),
                throttled_by: vec!["power limit".to_owned()],
                ..Condition::default()
            },
        };
        let hottest = Condition { temperature_celsius: Some(80), clock_mhz: Some(1400), ..Condition::default() };
        let device = DeviceBench { device: "cuda:0".to_owned(), threads: 0, gpu: Some(gpu), ..measured(1, 3e13) };
        let all = CombinedRates {
            devices: vec!["cuda:0".to_owned()],
            products: vec![],
            memory_bytes_per_second: 9e11,
            conditions: BTreeMap::from([("cuda:0".to_owned(), hottest)]),
        };
        let bench = Bench { plimsoll: "0.1.0".to_owned(), seconds: 30.0, devices: vec![device], all };
        let text = bench_table(&bench);
        let expected = "\
device  to device  from device   latency
cuda:0  25.0 GB/s    26.0 GB/s  12.00 µs

cuda:0: Example 4000, driver 550.54.14
cuda:0 before: 40 °C
cuda:0 after: 71 °C, held back by power limit
all together (cuda:0): 900.0 GB/s
cuda:0 under combined load: 80 °C, 1400 MHz
";
        assert!(text.ends_with(expected), "{text}");
        assert!(text.contains("cuda:0        -       f32  30.0 TFLOP/s"), "{text}");
    }
}
