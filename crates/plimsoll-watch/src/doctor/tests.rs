//! A table with a case for each finding, the readings just before each threshold, and the text of a report.

mod cluster_cases;

use super::*;
use crate::cluster::Clock;
use cluster_cases::{CLUSTER_CASES, cluster, of_cluster};
use plimsoll_core::{Bytes, DeviceKind, Failure, Plan, Recommendation};
use plimsoll_device::cuda::libraries::Library;
use plimsoll_device::cuda::nvml::{Condition, Pcie, Process, Reference};
use plimsoll_device::machine::{DefaultLimits, DeviceInfo, DriverFailure, Gpu, LibraryState, Machine, Nvidia};
use plimsoll_device::probe::{MemoryLimit, PhysicalMemory};
use plimsoll_device::process::{Limits, UserThreads};
use serde_json::json;
use std::collections::BTreeSet;

const GIB: u64 = 1 << 30;

fn process(pid: u32, name: &str, held: Option<Bytes>) -> Process {
    Process { pid, name: Some(name.to_owned()), held_bytes: held, draws: false }
}

/// Returns a display server that holds some memory.
fn display_server(held: Bytes) -> Process {
    Process { draws: true, ..process(9, "Xorg", Some(held)) }
}

fn cpu() -> DeviceInfo {
    DeviceInfo {
        name: "cpu".to_owned(),
        kind: DeviceKind::Cpu,
        model: "Example".to_owned(),
        memory_total_bytes: Bytes::gib(64),
        memory_free_bytes: Bytes::gib(60),
        memory_bound_by: "the machine".to_owned(),
        cores: 8,
        threads: 16,
        features: vec![],
        caches: vec![],
        defaults: DefaultLimits { budget_bytes: Bytes::gib(54), threads: 6, reason: String::new() },
        gpu: None,
    }
}

fn gpu(index: u32) -> DeviceInfo {
    let condition = Condition {
        temperature_celsius: Some(45),
        clock_mhz: Some(1700),
        clock_mhz_max: Some(1900),
        power_watts_max: Some(350.0),
        busy: Some(0.0),
        ..Condition::default()
    };
    DeviceInfo {
        name: format!("cuda:{index}"),
        kind: DeviceKind::Cuda,
        model: "NVIDIA Example".to_owned(),
        memory_total_bytes: Bytes::gib(24),
        memory_free_bytes: Bytes::gib(24),
        memory_bound_by: "NVML".to_owned(),
        defaults: DefaultLimits { budget_bytes: Bytes::gib(21), threads: 0, reason: String::new() },
        gpu: Some(Gpu {
            family: "Ampere",
            compute_capability: "8.6".to_owned(),
            uuid: format!("uuid-{index}"),
            bus: format!("0000:0{index}:00.0"),
            held_bytes: Some(Bytes::ZERO),
            reserved_bytes: Some(Bytes::ZERO),
            processes: vec![],
            pcie: Some(Pcie { generation: 4, lanes: 16, generation_now: 1, lanes_now: 16 }),
            condition,
            unusable: None,
        }),
        ..cpu()
    }
}

fn library(library: Library) -> LibraryState {
    let (path, place) = (Some("/usr/lib/x.so".into()), Some("system"));
    LibraryState { library, path, version: Some("12".to_owned()), place, missing: None, remedy: None }
}

/// Returns the readings of a machine with two GPUs and nothing to find.
fn healthy() -> Readings {
    let further = |index: u32| GpuReadings {
        name: format!("cuda:{index}"),
        reference: Reference {
            drives_display: Some(false),
            power_watts_default: Some(350.0),
            power_watts_set: Some(350.0),
            slowdown_celsius: Some(95),
        },
    };
    Readings {
        machine: Machine {
            devices: vec![cpu(), gpu(0), gpu(1)],
            nvidia: Nvidia {
                driver: Some("550.54.14".to_owned()),
                cuda: Some("12.4".to_owned()),
                error: None,
                failure: None,
                libraries: Library::ALL.map(library).to_vec(),
                cards_on_bus: 2,
            },
        },
        gpus: vec![further(0), further(1)],
        has_nvml: Some(true),
        nccl_version: Some("2.21.5".to_owned()),
        physical: PhysicalMemory { total_bytes: Some(Bytes::gib(64)), swap_used_bytes: Some(Bytes::ZERO) },
        memory_limits: vec![],
        limits: Limits {
            open_files: Some(1024),
            threads: Some(4096),
            locked_memory: Some(Bytes::mib(8)),
            ..Limits::default()
        },
        user_threads: Some(UserThreads { user: 1000, threads: 200 }),
        is_wsl: false,
        has_infiniband: false,
        sees_all_processes: Some(true),
        cpu_load: Some(0.1),
        cpu_celsius: Some(50.0),
        cluster: Some(Ok(cluster())),
        run: None,
    }
}

/// Returns a plan on these devices, which fits and has checkpoints of 1 GiB.
fn plan(devices: &[&str]) -> Plan {
    let device = |name: &str| {
        json!({
            "name": name, "simulated": name.starts_with("virtual:"), "budget_bytes": 20 * GIB, "arena_bytes": 16 * GIB,
            "charges_bytes": 2 * GIB, "peak_bytes": 18 * GIB, "by_category": {}, "by_program": {}, "lower_bound_bytes": GIB,
        })
    };
    let devices: Vec<Value> = devices.iter().map(|name| device(name)).collect();
    let plan = json!({
        "fits": true, "recipe": {"micro_batch": 2, "recompute": ["nothing"]}, "class": "identical",
        "checkpoint_bytes": GIB, "devices": devices, "host": device("host"),
        "predicted": {"step_seconds": 0.5, "tokens_per_second": 8192.0}, "needs": [],
    });
    serde_json::from_value(plan).unwrap()
}

/// Returns a run on both GPUs that fits, with space for its checkpoints.
fn run() -> RunReadings {
    RunReadings {
        run_file: "run.toml".to_owned(),
        train_command: "plimsoll train run.toml".to_owned(),
        all_gpus_command: "plimsoll plan run.toml --devices cuda".to_owned(),
        failures: vec![],
        planned: Some(PlanReadings {
            plan: plan(&["cuda:0", "cuda:1"]),
            recommendations: vec![],
            refusal: None,
            folder: "runs/a".to_owned(),
            is_writable: Some(true),
            disk_free_bytes: Some(Bytes::gib(3)),
            checkpoints_kept: 2,
            file_bytes_max: Bytes(5_000_000_000),
        }),
    }
}

fn of_gpu(readings: &mut Readings) -> &mut Gpu {
    readings.machine.devices[1].gpu.as_mut().unwrap()
}

/// Makes a library of the machine unusable.
fn lose(readings: &mut Readings, library: Library) {
    let state = readings.machine.nvidia.libraries.iter_mut().find(|state| state.library == library).unwrap();
    *state = LibraryState {
        library,
        path: None,
        version: None,
        place: None,
        missing: Some(format!("{library} was not found")),
        remedy: Some(format!("install {library}")),
    };
}

/// Removes driver and GPUs.
fn lose_driver(readings: &mut Readings) {
    lose(readings, Library::Driver);
    lose(readings, Library::Nvml);
    readings.machine.devices.truncate(1);
    (readings.machine.nvidia.driver, readings.machine.nvidia.cuda) = (None, None);
    (readings.has_nvml, readings.nccl_version, readings.gpus) = (None, None, vec![]);
    readings.machine.nvidia.cards_on_bus = 0;
}

/// Lets the driver fail to start on a machine with this number of cards.
fn fail_start(readings: &mut Readings, code: Option<u32>, cards_on_bus: usize) {
    lose_driver(readings);
    let text = "the driver refuses to start".to_owned();
    readings.machine.nvidia.failure = Some(DriverFailure { code, text, remedy: "the remedy of the code".to_owned() });
    readings.machine.nvidia.cards_on_bus = cards_on_bus;
}

/// Lets processes hold memory of the first GPU.
fn hold(readings: &mut Readings, processes: Vec<Process>, held: Bytes) {
    let gpu = of_gpu(readings);
    (gpu.processes, gpu.held_bytes) = (processes, Some(held));
    readings.machine.devices[1].memory_free_bytes = Bytes::gib(24).saturating_sub(held);
}

fn with_plan(readings: &mut Readings, change: impl FnOnce(&mut PlanReadings)) {
    let mut run = run();
    change(run.planned.as_mut().unwrap());
    readings.run = Some(run);
}

fn recommendation(text: &str, speedup: f64) -> Recommendation {
    Recommendation { text: text.to_owned(), command: "plimsoll x".to_owned(), bytes: 0, speedup }
}

/// A change of healthy readings, and the finding that it must give: its identifier, its severity and words in it.
type Case = (FindingId, Severity, fn(&mut Readings), &'static [&'static str]);

const RUN_CASES: &[Case] = &[
    (
        FindingId::RunFaster,
        Severity::Note,
        |r| with_plan(r, |planned| planned.recommendations = vec![recommendation("close process 4711", 1.25)]),
        &[
            "note run-faster: close process 4711\n",
            "takes 500.0 ms instead of 400.0 ms (predicted)",
            "mend: plimsoll x\n",
        ],
    ),
    (
        FindingId::RunFits,
        Severity::Note,
        |r| r.run = Some(run()),
        &[
            "run.toml fits: 18.00 GiB of 20.00 GiB on cuda:0",
            "(predicted)",
            "500.0 ms",
            "mend: plimsoll train run.toml",
        ],
    ),
    (
        FindingId::RunInvalid,
        Severity::Error,
        |r| {
            let failure = Failure::input("model.path: m is no directory").hint("name a directory").hint("or a\npreset");
            r.run = Some(RunReadings { failures: vec![failure], planned: None, ..run() });
        },
        &["run.toml: model.path: m is no directory", "mend: name a directory\n        or a\\npreset\n"],
    ),
    (
        FindingId::RunDoesNotFit,
        Severity::Error,
        |r| {
            with_plan(r, |planned| {
                planned.plan.fits = false;
                planned.refusal =
                    Some(Failure::does_not_fit("does not fit").hint("it fits: plimsoll train run.toml --budget 9GiB"));
            })
        },
        &["run.toml: does not fit", "mend: it fits: plimsoll train run.toml --budget 9GiB\n"],
    ),
    (
        FindingId::DiskSpace,
        Severity::Warning,
        |r| with_plan(r, |planned| planned.disk_free_bytes = Some(Bytes(3 * GIB - 1))),
        &["3 checkpoints of 1.00 GiB take 3.00 GiB (predicted)", "--set train.keep=1"],
    ),
    (
        FindingId::DiskSpace,
        Severity::Error,
        |r| with_plan(r, |planned| planned.disk_free_bytes = Some(Bytes(GIB - 1))),
        &["1024.00 MiB free"],
    ),
    (
        FindingId::FolderNotWritable,
        Severity::Error,
        |r| with_plan(r, |planned| planned.is_writable = Some(false)),
        &["run.dir: runs/a cannot be written"],
    ),
    (
        FindingId::GpuUnused,
        Severity::Warning,
        |r| with_plan(r, |planned| planned.plan = plan(&["cuda:0"])),
        &["does not use cuda:1", "mend: plimsoll plan run.toml --devices cuda\n"],
    ),
    (
        FindingId::GpuUnused,
        Severity::Note,
        |r| {
            with_plan(r, |planned| {
                planned.plan = plan(&["cuda:0"]);
                let excluded =
                    json!([{"device": "cuda:1", "reason": "a slow link", "remedy": "--set run.parallelism=all"}]);
                planned.plan.excluded = serde_json::from_value(excluded).unwrap();
            })
        },
        &["a slow link", "mend: plimsoll train run.toml --set run.parallelism=all\n"],
    ),
    (
        FindingId::FileSizeLimit,
        Severity::Error,
        |r| {
            r.limits.file_size = Some(Bytes(GIB - 1));
            r.run = Some(run());
        },
        &["limited to 1024.00 MiB (ulimit -f)", "a file of 1.00 GiB (predicted)", "ulimit -f unlimited"],
    ),
];

const SOFTWARE_CASES: &[Case] = &[
    (FindingId::NoNvidiaGpu, Severity::Note, lose_driver, &["no NVIDIA GPU"]),
    (
        FindingId::DriverMissing,
        Severity::Warning,
        |r| {
            lose_driver(r);
            r.machine.nvidia.cards_on_bus = 1;
        },
        &["1 NVIDIA card on the PCI bus", "mend: install NVIDIA driver"],
    ),
    (
        FindingId::DriverIncomplete,
        Severity::Error,
        |r| {
            lose_driver(r);
            r.machine.nvidia.libraries[1] = library(Library::Nvml);
        },
        &["NVML is installed, but", "NVIDIA driver was not found", "mend: install NVIDIA driver"],
    ),
    (
        FindingId::DriverFails,
        Severity::Error,
        |r| fail_start(r, Some(803), 1),
        &["driver-fails: the driver refuses to start\n", "mend: the remedy of the code\n"],
    ),
    (FindingId::DriverFails, Severity::Error, |r| fail_start(r, None, 0), &["mend: the remedy of the code\n"]),
    (FindingId::DriverFails, Severity::Note, |r| fail_start(r, Some(34), 0), &["mend: unset CUDA_VISIBLE_DEVICES\n"]),
    (FindingId::DriverFails, Severity::Warning, |r| fail_start(r, Some(100), 1), &["docker run --gpus all\n"]),
    (
        FindingId::LibraryMissing,
        Severity::Error,
        |r| {
            lose(r, Library::Nvrtc);
            let missing = r.machine.nvidia.missing_library();
            of_gpu(r).unusable = missing;
        },
        &["NVRTC was not found", "mend: install NVRTC"],
    ),
    (FindingId::NvmlMissing, Severity::Warning, |r| r.has_nvml = Some(false), &["does not start", "free memory"]),
    (FindingId::NcclMissing, Severity::Warning, |r| r.nccl_version = None, &["NCCL cannot be loaded", "the 2 GPUs"]),
    (
        FindingId::GpuHidden,
        Severity::Note,
        |r| r.machine.nvidia.cards_on_bus = 4,
        &["lists 2 of 4 NVIDIA cards", "CUDA_VISIBLE_DEVICES"],
    ),
    (
        FindingId::GpuUnusable,
        Severity::Warning,
        |r| of_gpu(r).unusable = Some("Turing (7.5) is too old".to_owned()),
        &["cuda:0 (NVIDIA Example) cannot be used: Turing"],
    ),
];

const GPU_CASES: &[Case] = &[
    (
        FindingId::GpuMemoryHeld,
        Severity::Warning,
        |r| {
            let held = vec![process(4711, "python3\n", Some(Bytes::gib(4))), process(5, "a", Some(Bytes::gib(6)))];
            hold(r, held, Bytes::gib(10));
        },
        &[
            "10.00 GiB of 24.00 GiB on cuda:0 are held by a (5) 6.00 GiB, python3\\n (4711) 4.00 GiB",
            "12.60 GiB by default, instead of 21.60 GiB",
            "kill 5 4711\n",
        ],
    ),
    (
        FindingId::GpuMemoryHeld,
        Severity::Warning,
        |r| {
            let held = vec![process(5, "a", Some(Bytes::gib(6))), display_server(Bytes::gib(1))];
            hold(r, held, Bytes::gib(7));
        },
        &["a (5) 6.00 GiB, Xorg (9) 1.00 GiB", "if they are yours: kill 5\n"],
    ),
    (
        FindingId::GpuMemoryHeld,
        Severity::Warning,
        |r| {
            hold(r, vec![process(5, "a", Some(Bytes::gib(6)))], Bytes::gib(6));
            r.sees_all_processes = Some(false);
        },
        &["held by a (5) 6.00 GiB", "mend: see them outside of this container"],
    ),
    (
        FindingId::GpuMemoryHeld,
        Severity::Note,
        |r| {
            hold(r, vec![display_server(Bytes::mib(200))], Bytes::mib(200));
        },
        &["held by Xorg (9) 200.00 MiB", "close programs that draw"],
    ),
    (
        FindingId::GpuMemoryHeld,
        Severity::Warning,
        |r| {
            hold(r, vec![], Bytes::gib(10));
            r.sees_all_processes = Some(false);
        },
        &["processes that are not visible here", "outside of this container, or on Windows: nvidia-smi"],
    ),
    (
        FindingId::GpuMemoryLeaked,
        Severity::Warning,
        |r| {
            hold(r, vec![process(5, "a", Some(Bytes::gib(1)))], Bytes::gib(3));
        },
        &["2.00 GiB on cuda:0 are held, and no process", "fuser", "--gpu-reset -i 0000:00:00.0"],
    ),
    (
        FindingId::DisplayAttached,
        Severity::Note,
        |r| r.gpus[0].reference.drives_display = Some(true),
        &["cuda:0 drives a display"],
    ),
    (FindingId::WslSpill, Severity::Warning, |r| r.is_wsl = true, &["cuda:0, cuda:1", "Prefer No Sysmem"]),
    (
        FindingId::GpuBusy,
        Severity::Warning,
        |r| {
            of_gpu(r).condition.busy = Some(0.5);
            of_gpu(r).processes = vec![process(5, "a", None)];
            of_gpu(r).pcie = None;
        },
        &["cuda:0 is 50 % busy"],
    ),
    (
        FindingId::GpuBusy,
        Severity::Warning,
        |r| {
            of_gpu(r).condition.busy = Some(0.5);
            of_gpu(r).pcie = None;
            r.sees_all_processes = None;
        },
        &["cuda:0 is 50 % busy"],
    ),
    (
        FindingId::GpuHot,
        Severity::Warning,
        |r| of_gpu(r).condition.temperature_celsius = Some(90),
        &["cuda:0 has 90 °C", "from 95 °C"],
    ),
    (
        FindingId::GpuThrottled,
        Severity::Warning,
        |r| {
            of_gpu(r).condition.throttled_by = vec!["clocks set by the user".to_owned()];
        },
        &["reduced by clocks set by the user", "1700 of 1900 MHz", "sudo nvidia-smi -i 0000:00:00.0 -rgc"],
    ),
    (
        FindingId::GpuThrottled,
        Severity::Note,
        |r| {
            of_gpu(r).condition.throttled_by = vec!["power limit".to_owned()];
        },
        &["nvidia-smi -q -d POWER"],
    ),
    (
        FindingId::GpuPowerLimit,
        Severity::Note,
        |r| r.gpus[0].reference.power_watts_set = Some(300.0),
        &["is 300 W, its default is 350 W", "sudo nvidia-smi -i 0000:00:00.0 -pl 350"],
    ),
    (
        FindingId::PcieWidth,
        Severity::Warning,
        |r| of_gpu(r).pcie.as_mut().unwrap().lanes_now = 4,
        &["4 of 16 PCIe lanes", "25 % of the link's speed"],
    ),
    (
        FindingId::PcieGeneration,
        Severity::Warning,
        |r| {
            of_gpu(r).pcie.as_mut().unwrap().generation_now = 3;
            of_gpu(r).condition.busy = Some(0.2);
        },
        &["generation 3 of 4"],
    ),
];

const HOST_CASES: &[Case] = &[
    (
        FindingId::HostMemoryShort,
        Severity::Warning,
        |r| r.machine.devices[0].memory_free_bytes = Bytes::gib(6),
        &["6.00 GiB of 64.00 GiB memory are free (the machine)"],
    ),
    (
        FindingId::MemoryLimit,
        Severity::Note,
        |r| {
            for (gib, used) in [(32, 21), (16, 2), (80, 30)] {
                let source = format!("group {gib}");
                r.memory_limits.push(MemoryLimit { source, limit: Bytes::gib(gib), used: Bytes::gib(used) });
            }
        },
        &["group 16 is limited to 16.00 GiB of this machine's 64.00 GiB", "at most the 11.00 GiB"],
    ),
    (
        FindingId::AddressSpaceLimit,
        Severity::Warning,
        |r| r.limits.address_space = Some(Bytes::gib(8)),
        &["8.00 GiB (ulimit -v)", "GPUs may not open"],
    ),
    (FindingId::DataLimit, Severity::Warning, |r| r.limits.data = Some(Bytes::gib(8)), &["8.00 GiB (ulimit -d)"]),
    (FindingId::FileSizeLimit, Severity::Note, |r| r.limits.file_size = Some(Bytes::gib(1)), &["1.00 GiB (ulimit -f)"]),
    (
        FindingId::OpenFilesLimit,
        Severity::Warning,
        |r| r.limits.open_files = Some(255),
        &["255 open files", "ulimit -n 1024"],
    ),
    (
        FindingId::ThreadLimit,
        Severity::Warning,
        |r| r.limits.threads = Some(279),
        &["200 of 279 permitted threads", "up to 80 threads"],
    ),
    (FindingId::LockedMemoryLimit, Severity::Note, |r| r.has_infiniband = true, &["8.00 MiB of memory (ulimit -l)"]),
    (
        FindingId::SwapInUse,
        Severity::Note,
        |r| r.physical.swap_used_bytes = Some(Bytes::mib(64)),
        &["64.00 MiB of swap", "mend: end other programs: ps"],
    ),
    (
        FindingId::SwapInUse,
        Severity::Warning,
        |r| r.physical.swap_used_bytes = Some(Bytes::gib(7)),
        &["7.00 GiB of swap"],
    ),
    (FindingId::CpuBusy, Severity::Warning, |r| r.cpu_load = Some(0.91), &["91 % busy"]),
    (FindingId::CpuHot, Severity::Warning, |r| r.cpu_celsius = Some(90.0), &["90 °C"]),
];

/// Changes of healthy readings that give no finding: values just before a threshold, and unknown values.
const HARMLESS: &[fn(&mut Readings)] = &[
    |r| hold(r, vec![process(5, "a", Some(Bytes::mib(127)))], Bytes::mib(127)),
    |r| of_gpu(r).held_bytes = None,
    |r| of_gpu(r).condition = Condition::default(),
    |r| of_gpu(r).pcie = None,
    |r| r.gpus.clear(),
    |r| of_gpu(r).condition.temperature_celsius = Some(89),
    |r| of_gpu(r).condition.busy = Some(0.19),
    |r| r.gpus[0].reference.power_watts_set = Some(349.0),
    |r| r.gpus[0].reference.power_watts_set = None,
    // The limit in force, which a battery or another control lowers.
    |r| of_gpu(r).condition.power_watts_max = Some(100.0),
    |r| {
        of_gpu(r).condition.busy = Some(0.9);
        of_gpu(r).pcie = None;
    },
    |r| r.machine.devices[0].memory_free_bytes = Bytes::gib(7),
    |r| r.machine.devices[0].memory_total_bytes = Bytes::ZERO,
    |r| r.limits = Limits::default(),
    |r| r.limits.address_space = Some(Bytes::gib(64)),
    |r| r.limits.open_files = Some(256),
    |r| r.limits.threads = Some(280),
    |r| (r.limits.threads, r.user_threads) = (Some(1), Some(UserThreads { user: 0, threads: 90 })),
    |r| (r.limits.threads, r.user_threads) = (Some(1), None),
    |r| (r.limits.locked_memory, r.has_infiniband) = (None, true),
    |r| r.physical.swap_used_bytes = Some(Bytes::mib(63)),
    |r| r.physical = PhysicalMemory::default(),
    |r| {
        r.physical.swap_used_bytes = Some(Bytes::gib(7));
        r.memory_limits = vec![MemoryLimit { source: "group".to_owned(), limit: Bytes::gib(64), used: Bytes::gib(2) }];
    },
    |r| r.cluster = None,
    |r| of_cluster(r).nodes[1].clock = None,
    // The clocks may be equal within the error of the measurement.
    |r| of_cluster(r).nodes[1].clock = Some(Clock { offset_seconds: 3.0, error_seconds: 2.1 }),
    |r| of_cluster(r).nodes[1].wire_ports_taken = vec![7400],
    |r| of_cluster(r).nodes[1].wire_ports = vec![],
    |r| (r.cpu_load, r.cpu_celsius) = (None, None),
    |r| (r.cpu_load, r.cpu_celsius) = (Some(0.9), Some(89.9)),
    |r| r.machine.nvidia.cards_on_bus = 0,
    |r| {
        (r.nccl_version, r.machine.nvidia.cards_on_bus) = (None, 1);
        r.machine.devices.truncate(2);
    },
];

fn changed(change: fn(&mut Readings)) -> Readings {
    let mut readings = healthy();
    change(&mut readings);
    readings
}

#[test]
fn each_condition_has_its_finding_alone() {
    for (id, severity, change, words) in [RUN_CASES, SOFTWARE_CASES, GPU_CASES, HOST_CASES, CLUSTER_CASES].concat() {
        let readings = changed(change);
        let findings = findings(&readings);
        let found: Vec<&Finding> = findings.iter().filter(|finding| finding.id == id).collect();
        let [finding] = found[..] else { panic!("{id}: {findings:?}") };
        assert_eq!(finding.severity, severity, "{finding:?}");
        assert!(!finding.text.is_empty() && !finding.cost.is_empty() && !finding.mend.is_empty(), "{finding:?}");
        let text = block(finding);
        let unwrapped = text.replace("\n  ", " ").split_whitespace().collect::<Vec<_>>().join(" ");
        for word in words {
            assert!(text.contains(word) || unwrapped.contains(word), "{id}: {word}: {text}");
        }
        // Changes with side effects are those of memory and runs.
        let side = [FindingId::RunFits, FindingId::GpuMemoryHeld, FindingId::GpuMemoryLeaked];
        let others: Vec<FindingId> = findings.iter().map(|finding| finding.id).filter(|other| *other != id).collect();
        assert!(others.iter().all(|other| side.contains(other)), "{id}: {others:?}");
    }
}

#[test]
fn every_check_has_a_case() {
    let cases = [RUN_CASES, SOFTWARE_CASES, GPU_CASES, HOST_CASES, CLUSTER_CASES].concat();
    let tested: BTreeSet<FindingId> = cases.iter().map(|case| case.0).collect();
    assert_eq!(tested, FindingId::ALL.iter().copied().collect());
}

#[test]
fn harmless_and_unknown_values_have_no_finding() {
    assert_eq!(findings(&healthy()), []);
    for (number, change) in HARMLESS.iter().enumerate() {
        assert_eq!(findings(&changed(*change)), [], "change {number}");
    }
}

#[test]
fn incomplete_lists_of_processes_show_no_leak() {
    let changes: [fn(&mut Readings); 5] = [
        |r| of_gpu(r).processes = vec![process(5, "a", None)],
        |r| of_gpu(r).processes = vec![process(5, "/usr/bin/nvidia-cuda-mps-server", Some(Bytes::mib(30)))],
        |r| r.is_wsl = true,
        |r| r.sees_all_processes = None,
        |r| r.sees_all_processes = Some(false),
    ];
    for change in changes {
        let mut readings = healthy();
        hold(&mut readings, vec![], Bytes::gib(4));
        assert_eq!(findings(&readings)[0].id, FindingId::GpuMemoryLeaked);
        change(&mut readings);
        let ids: Vec<FindingId> = findings(&readings).iter().map(|finding| finding.id).collect();
        assert!(ids.contains(&FindingId::GpuMemoryHeld) && !ids.contains(&FindingId::GpuMemoryLeaked), "{ids:?}");
    }
}

#[test]
fn plans_for_other_machines_leave_no_gpu_unused() {
    for devices in [&["rtx3090"][..], &["pc1/cuda:0"], &["cuda:0", "pc2/cuda:0"]] {
        let mut readings = healthy();
        with_plan(&mut readings, |planned| planned.plan = plan(devices));
        assert!(findings(&readings).iter().all(|finding| finding.id == FindingId::RunFits), "{devices:?}");
    }
}

#[test]
fn first_recommendations_alone_are_findings() {
    let mut readings = healthy();
    let all = ["a", "b", "c", "d"].map(|text| recommendation(text, 1.1));
    with_plan(&mut readings, |planned| planned.recommendations = all.to_vec());
    let findings = findings(&readings);
    let faster = findings.iter().filter(|finding| finding.id == FindingId::RunFaster);
    assert_eq!(faster.map(|finding| finding.text.as_str()).collect::<Vec<_>>(), ["a", "b", "c"]);
}

#[test]
fn report_lists_most_severe_first() {
    let mut readings = changed(|r| r.is_wsl = true);
    readings.gpus[0].reference.drives_display = Some(true);
    with_plan(&mut readings, |planned| planned.is_writable = Some(false));
    let report = Report::new(&readings);
    let severities: Vec<Severity> = report.findings.iter().map(|finding| finding.severity).collect();
    assert_eq!(severities, [Severity::Error, Severity::Warning, Severity::Note, Severity::Note]);
    assert_eq!(report.exit(), Exit::Input);
    let text = report.text();
    assert!(text.ends_with("\n\n1 error, 1 warning, 2 notes\n"), "{text}");
    assert!(
        text.starts_with(
            "error folder-not-writable: run.dir: runs/a cannot be written\n  cost: the run does not start\n  \
             mend: use another folder: --set run.dir=runs/another\n\nwarning wsl-spill: "
        ),
        "{text}"
    );
    let keys = ["id", "severity", "text", "cost", "mend"];
    let object: Value = serde_json::from_str(&report.json()).unwrap();
    assert_eq!(object.as_object().unwrap().keys().collect::<Vec<_>>(), ["findings"]);
    let first = object["findings"][0].as_object().unwrap();
    assert_eq!(first.keys().collect::<Vec<_>>(), keys);
    assert_eq!((&first["id"], &first["severity"]), (&json!("folder-not-writable"), &json!("error")));
}

#[test]
fn empty_report_says_nothing_found() {
    let report = Report::new(&healthy());
    assert_eq!((report.text().as_str(), report.json().as_str()), ("nothing found\n", r#"{"findings":[]}"#));
    assert_eq!(report.exit(), Exit::Done);
}

#[test]
fn docs_list_every_check() {
    let page = include_str!("../../../../docs/doctor.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let listed: BTreeSet<String> = rows.map(|(id, _)| id.to_owned()).collect();
    let expected: BTreeSet<String> = FindingId::ALL.iter().map(ToString::to_string).collect();
    assert_eq!(listed, expected);
}

#[test]
fn readings_of_this_machine_are_judged() {
    let report = Report::new(&Readings::read());
    assert!(report.findings.iter().all(|finding| !finding.id.to_string().starts_with("run")), "{report:?}");
    assert!(serde_json::from_str::<Value>(&report.json()).is_ok());
}
