//! `plimsoll devices`, `watch` and `doctor` with the NVML stub: the figures of several cards, those that NVML does not
//! report, and machines without NVML or driver. Also `plimsoll watch --pid` with processes on those cards, and
//! recommendations to close them.

use crate::common::{CommandOutput, Running, SMALL, Workspace};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Time within which a command has to show what a test waits for.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the folder of the stub's libraries, and builds them at the first call.
fn stub() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nvml-stub");
        let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../plimsoll-device/tests/nvml_stub/build");
        assert!(Command::new(build).arg(&folder).status().unwrap().success());
        folder
    })
}

/// A machine with the libraries of a folder.
struct Machine {
    workspace: Workspace,
    variables: Vec<String>,
}

impl Machine {
    /// Returns a machine with these cards of the stub, separated by commas.
    fn new(cards: &str) -> Machine {
        let folder = format!("LD_LIBRARY_PATH={}", stub().display());
        Machine { workspace: Workspace::new(&SMALL), variables: vec![folder, format!("PLIMSOLL_NVML_STUB={cards}")] }
    }

    /// Returns a machine on which only these files of the stub are installed.
    fn with_files(cards: &str, files: &[&str]) -> Machine {
        let mut machine = Machine::new(cards);
        let folder = machine.workspace.path("libraries");
        fs::create_dir(&folder).unwrap();
        for file in files {
            fs::copy(stub().join(file), folder.join(file)).unwrap();
        }
        machine.variables[0] = format!("LD_LIBRARY_PATH={}", folder.display());
        machine
    }

    /// Sets an environment variable of the stub.
    fn set(&mut self, name: &str, value: &str) {
        self.variables.push(format!("PLIMSOLL_NVML_STUB_{name}={value}"));
    }

    fn start(&self, args: &[&str]) -> Running {
        let words: Vec<&str> = ["env"].into_iter().chain(self.variables.iter().map(String::as_str)).collect();
        self.workspace.start_wrapped(&words, args)
    }

    fn succeed(&self, args: &[&str]) -> CommandOutput {
        let done = self.start(args).wait();
        assert_eq!(done.code, Some(0), "{args:?}: {}{}", done.stdout, done.stderr);
        done
    }

    /// Lets all cards have these processes, in lines of the stub.
    fn set_processes(&mut self, lines: &str) {
        self.workspace.write("processes", lines);
        self.set("PROCESSES", self.workspace.path("processes").to_str().unwrap());
    }

    /// Stores rates of an RTX 3090 beside those of the processor: the stub computes nothing.
    fn store_gpu_rates(&self) {
        let nvidia = self.succeed(&["devices", "--json"]).json()["nvidia"].clone();
        let libraries = nvidia["libraries"].as_array().unwrap();
        let cublaslt = libraries.iter().find(|library| library["library"] == "cublaslt").unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let mut known = self.workspace.json("cache/devices.json");
        known.as_array_mut().unwrap().push(json!({
            "plimsoll": env!("CARGO_PKG_VERSION"), "device": "cuda", "model": "NVIDIA GeForce RTX 3090", "threads": 82,
            "features": [
                format!("driver {}", text(&nvidia["driver"])), format!("cuBLASLt {}", text(&cublaslt["version"])),
            ],
            "rates": {
                "f32_flops": 3e13, "bf16_flops": 6e13, "memory_bytes_per_second": 8e11, "op_seconds": 5e-6,
                "host_link": {"bytes_per_second": 2e10, "latency_seconds": 1e-5}, "measured": true,
            },
        }));
        self.workspace.write("cache/devices.json", known.to_string());
    }

    /// Returns the GPUs of `plimsoll devices --json`.
    fn gpus(&self) -> Vec<Value> {
        gpus(&self.succeed(&["devices", "--json"]).json()["devices"])
    }

    /// Returns the GPUs of `plimsoll watch --json`.
    fn watched_gpus(&self) -> Vec<Value> {
        gpus(&self.succeed(&["watch", "--json"]).json()["devices"])
    }

    /// Returns the findings of `plimsoll doctor --json`.
    fn findings(&self) -> Findings {
        let done = self.start(&["doctor", "--json"]).wait();
        assert!(done.code == Some(0) || done.code == Some(2), "{}", done.stderr);
        Findings(done.json()["findings"].as_array().unwrap().clone())
    }
}

/// The findings of a doctor command.
struct Findings(Vec<Value>);

impl Findings {
    /// Returns the texts of the findings with this name.
    fn texts(&self, id: &str) -> Vec<&str> {
        let named = self.0.iter().filter(|finding| finding["id"] == id);
        named.map(|finding| finding["text"].as_str().unwrap()).collect()
    }

    /// Checks that there is no finding with these names.
    #[track_caller]
    fn lack(&self, ids: &[&str]) {
        ids.iter().for_each(|id| assert_eq!(self.texts(id), Vec::<&str>::new(), "{id}"));
    }
}

/// Returns the GPUs of a list of devices, checking that the processor comes first.
fn gpus(devices: &Value) -> Vec<Value> {
    let devices = devices.as_array().unwrap();
    assert_eq!(devices[0]["name"], "cpu");
    devices[1..].to_vec()
}

/// Checks several keys of a JSON object.
#[track_caller]
fn check(object: &Value, expected: Value) {
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&object[key], value, "{key} of {object}");
        assert!(object.get(key).is_some(), "{key} is missing in {object}");
    }
}

#[test]
fn devices_have_the_figures_of_their_cards() {
    let machine = Machine::new("rtx3090,rtx3070,h200");
    let gpus = machine.gpus();
    assert_eq!(gpus.len(), 3);
    let held = 6528 * MIB;
    check(
        &gpus[0],
        json!({
            "name": "cuda:0", "model": "NVIDIA GeForce RTX 3090", "cores": 82, "memory_bound_by": "NVML",
            "memory_total_bytes": 24576 * MIB, "memory_free_bytes": (24576 - 316) * MIB - held,
        }),
    );
    check(
        &gpus[0]["gpu"],
        json!({
            "compute_capability": "8.6", "uuid": "a0000000-0000-0000-0000-000000000000", "bus": "0000:01:00.0",
            "held_bytes": held, "reserved_bytes": 316 * MIB, "unusable": null,
            "pcie": {"generation": 4, "lanes": 16, "generation_now": 1, "lanes_now": 16},
            "processes": [
                {"pid": 1811, "name": "/usr/lib/xorg/Xorg", "held_bytes": 384 * MIB, "draws": true},
                {"pid": 4711, "name": "/usr/bin/python3 train.py", "held_bytes": 6144 * MIB, "draws": false},
            ],
            "condition": {
                "temperature_celsius": 41, "clock_mhz": 210, "clock_mhz_max": 2100, "memory_clock_mhz": 405,
                "throttled_by": [], "power_watts": 28.57, "power_watts_max": 350.0, "busy": 0.03,
            },
        }),
    );
    check(&gpus[1], json!({"name": "cuda:1", "model": "NVIDIA GeForce RTX 3070", "memory_total_bytes": 8192 * MIB}));
    check(
        &gpus[1]["gpu"],
        json!({
            "pcie": {"generation": 3, "lanes": 16, "generation_now": 3, "lanes_now": 8},
            // A process that computes and draws counts once.
            "processes": [{"pid": 5120, "name": "/usr/bin/blender", "held_bytes": 2048 * MIB, "draws": true}],
            "held_bytes": 2048 * MIB,
        }),
    );
    check(&gpus[1]["gpu"]["condition"], json!({"throttled_by": ["power limit"], "busy": 0.97}));
    check(&gpus[2], json!({"model": "NVIDIA H200", "memory_free_bytes": (143_771 - 615) * MIB}));
    check(&gpus[2]["gpu"], json!({"family": "Hopper", "held_bytes": 0, "processes": []}));
    let table = machine.succeed(&["devices"]).stdout;
    for part in [
        "6.38 GiB held by others: /usr/lib/xorg/Xorg (1811) 384.00 MiB, /usr/bin/python3 train.py (4711) 6.00 GiB",
        "PCIe 3.0 × 16 (now 3.0 × 8)",
        "150 of 150 W, held back by power limit",
    ] {
        assert!(table.contains(part), "{part}: {table}");
    }
}

#[test]
fn watch_shows_the_condition_of_each_card() {
    let machine = Machine::new("rtx3070,h200");
    let gpus = machine.watched_gpus();
    check(
        &gpus[0],
        json!({
            "total_bytes": 8192 * MIB, "free_bytes": (8192 - 212 - 2048) * MIB,
            // Memory reserved by the driver is that of no process.
            "others_bytes": 2048 * MIB, "held_bytes": null, "utilization": 0.97, "temperature_c": 78.0,
            "power_w": 149.87, "power_limit_w": 150.0, "clock_mhz": 1290, "clock_limit_mhz": 2100,
            "throttled_by": ["power limit"],
            "processes": [{"pid": 5120, "name": "/usr/bin/blender", "held_bytes": 2048 * MIB, "is_plimsoll": false}],
        }),
    );
    check(&gpus[1], json!({"others_bytes": 0, "utilization": 0.0, "power_w": 76.21, "throttled_by": []}));
    let snapshot = machine.succeed(&["watch", "--json"]).json();
    assert_eq!(snapshot["warnings"], json!(["cuda:0: clocks reduced: power limit"]));
}

#[test]
fn own_processes_are_marked() {
    let mut machine = Machine::new("h200");
    machine.workspace.write("processes", "0 10 500 C /opt/bin/plimsoll train run.toml\n0 11 ? C python3 plimsoll\n");
    machine.set("PROCESSES", machine.workspace.path("processes").to_str().unwrap());
    let gpu = &machine.watched_gpus()[0];
    let processes = json!([
        {"pid": 10, "name": "/opt/bin/plimsoll train run.toml", "held_bytes": 500 * MIB, "is_plimsoll": true},
        {"pid": 11, "name": "python3 plimsoll", "held_bytes": null, "is_plimsoll": false},
    ]);
    check(gpu, json!({"processes": processes, "others_bytes": 500 * MIB}));
}

#[test]
fn mig_partition_has_its_own_memory() {
    let machine = Machine::new("h200,h200-mig");
    let gpu = &machine.watched_gpus()[1];
    check(
        gpu,
        json!({
            "model": "NVIDIA H200 MIG 1g.18gb", "total_bytes": 16384 * MIB, "others_bytes": 4096 * MIB,
            "processes": [{"pid": 6001, "name": "python3", "held_bytes": 4096 * MIB, "is_plimsoll": false}],
            // The chip is that of the whole GPU. Its power and load are shared with other partitions.
            "temperature_c": 33.0, "clock_mhz": 345, "power_w": null, "power_limit_w": null, "utilization": null,
            "pcie": {"generation": 5, "lanes": 16, "generation_now": 5, "lanes_now": 16},
        }),
    );
    machine.findings().lack(&["display-attached", "gpu-power-limit", "gpu-busy", "pcie-width", "gpu-hot"]);
}

#[test]
fn figures_missing_on_wsl_are_null() {
    let machine = Machine::new("wsl");
    let gpu = &machine.watched_gpus()[0];
    check(
        gpu,
        json!({
            "total_bytes": 24576 * MIB, "others_bytes": 1536 * MIB, "temperature_c": 52.0, "utilization": null,
            "power_w": null, "power_limit_w": null, "clock_mhz": null, "clock_limit_mhz": null, "pcie": null,
            "throttled_by": [],
            "processes": [{"pid": 38, "name": null, "held_bytes": null, "is_plimsoll": false}],
        }),
    );
    let listed = &machine.gpus()[0]["gpu"];
    check(listed, json!({"pcie": null, "processes": [{"pid": 38, "name": null, "held_bytes": null, "draws": false}]}));
    check(
        &listed["condition"],
        json!({"power_watts": null, "busy": null, "clock_mhz": null, "temperature_celsius": 52}),
    );
    let findings = machine.findings();
    findings.lack(&["gpu-hot", "gpu-busy", "gpu-throttled", "gpu-power-limit", "pcie-width", "gpu-memory-leaked"]);
    assert_eq!(findings.texts("gpu-memory-held"), ["1.50 GiB of 24.00 GiB on cuda:0 are held by process (38)"]);
}

#[test]
fn unreported_memory_is_null_and_assumed_free() {
    let machine = Machine::new("gb10");
    check(&machine.watched_gpus()[0], json!({"free_bytes": null, "others_bytes": null, "temperature_c": 44.0}));
    let gpu = &machine.gpus()[0];
    check(&gpu["gpu"], json!({"held_bytes": null, "reserved_bytes": null}));
    let source = gpu["memory_bound_by"].as_str().unwrap();
    assert!(source.starts_with("assumed: NVML does not report it"), "{source}");
}

#[test]
fn doctor_judges_each_card() {
    let machine = Machine::new("rtx3090,rtx3070");
    let findings = machine.findings();
    let first = "6.38 GiB of 24.00 GiB on cuda:0 are held by /usr/bin/python3 train.py (4711) 6.00 GiB, \
                 /usr/lib/xorg/Xorg (1811) 384.00 MiB";
    let second = "2.00 GiB of 8.00 GiB on cuda:1 are held by /usr/bin/blender (5120) 2.00 GiB";
    for (id, texts) in [
        ("gpu-memory-held", &[first, second][..]),
        ("display-attached", &["cuda:0 drives a display"]),
        ("gpu-busy", &["cuda:1 is 97 % busy with other processes"]),
        ("gpu-throttled", &["the clocks of cuda:1 are reduced by power limit"]),
        ("gpu-power-limit", &["the power limit of cuda:1 is 150 W, its default is 220 W"]),
        ("pcie-width", &["cuda:1 is connected by 8 of 16 PCIe lanes"]),
    ] {
        assert_eq!(findings.texts(id), texts, "{id}");
    }
    // An idle card reduces the generation of its link.
    findings.lack(&["pcie-generation", "nvml-missing", "gpu-hot"]);
}

#[test]
fn driver_without_nvml_leaves_figures_unknown() {
    let files = ["libcuda.so.1", "libnvrtc.so.13", "libcublasLt.so.13"];
    let mut failing = Machine::new("rtx3090");
    failing.set("INIT", "9");
    for (machine, reason) in [
        (Machine::with_files("rtx3090", &files), "NVML was not found"),
        (failing, "NVML is installed, but does not start"),
    ] {
        let gpu = &machine.gpus()[0];
        check(gpu, json!({"model": "NVIDIA GeForce RTX 3090", "memory_total_bytes": 24260 * MIB}));
        check(&gpu["gpu"], json!({"held_bytes": null, "processes": [], "pcie": null}));
        let unknown = json!({
            "free_bytes": null, "others_bytes": null, "utilization": null, "temperature_c": null, "power_w": null,
            "processes": [],
        });
        check(&machine.watched_gpus()[0], unknown);
        let findings = machine.findings();
        let missing = findings.texts("nvml-missing");
        assert!(missing[0].starts_with(reason), "{missing:?}");
        findings.lack(&["gpu-memory-held", "display-attached", "gpu-busy", "gpu-throttled"]);
    }
}

#[test]
fn missing_driver_is_named() {
    let machine = Machine::with_files("rtx3090", &["libnvidia-ml.so.1"]);
    if machine.succeed(&["devices", "--json"]).json()["nvidia"]["driver"] != Value::Null {
        return; // This machine has a driver elsewhere.
    }
    assert!(machine.gpus().is_empty() && machine.watched_gpus().is_empty());
    assert!(machine.succeed(&["devices"]).stdout.contains("NVIDIA driver not found"));
    assert_eq!(machine.findings().texts("driver-incomplete").len(), 1);
    let bare = Machine::with_files("rtx3090", &[]);
    assert!(bare.gpus().is_empty() && bare.watched_gpus().is_empty());
    let findings = bare.findings();
    // The second one if this machine has a card.
    let named = ["no-nvidia-gpu", "driver-missing"].map(|id| findings.texts(id).len());
    assert_eq!(named.iter().sum::<usize>(), 1);
}

// ---- recommendations ----

/// Settings of a run whose plan depends on the free memory of a GPU.
const GPU_RUN: [&str; 6] = ["--model", "smollm2-135m", "--sequence", "512", "--batch-tokens", "8192"];

/// Returns the recommendations of a plan that name a process to close.
fn closings(plan: &Value) -> Vec<&Value> {
    let all = plan["recommendations"].as_array().map_or(&[][..], Vec::as_slice).iter();
    all.filter(|recommendation| recommendation["text"].as_str().unwrap().starts_with("close process ")).collect()
}

#[test]
fn closed_process_leaves_its_predicted_plan() {
    let mut machine = Machine::new("rtx3090,rtx3090");
    machine.store_gpu_rates();
    let other = "0 1811 4 G /usr/lib/xorg/Xorg\n1 12 20000 C on-another-gpu\n";
    machine.set_processes(&format!("0 4711 21000 C+G /usr/bin/python3 a\u{1b}.py\n{other}"));
    let words = [&["plan", "--devices", "cuda:0", "--json"], &GPU_RUN[..]].concat();
    let advise = |words: &[&str]| machine.succeed(&[words, &["--advise"]].concat()).json();
    let (before, advised) = (machine.succeed(&words).json(), advise(&words));
    let [closing] = closings(&advised)[..] else { panic!("{advised}") };
    let text = closing["text"].as_str().unwrap();
    let start = "close process 4711 (/usr/bin/python3 a\\u{1b}.py, which draws), which holds 20.51 GiB on cuda:0: ";
    assert!(text.starts_with(start) && text.contains("recompute in 0 instead of "), "{text}");
    assert_eq!(closing["command"], format!("plimsoll {}", words.join(" ")));
    // A load line that is an amount stays as it is.
    let fixed = [&["plan", "--devices", "cuda:0=3GiB", "--json"], &GPU_RUN[..]].concat();
    assert_eq!(closings(&advise(&fixed)), Vec::<&Value>::new());
    machine.workspace.write("processes", other);
    let after = machine.succeed(&words).json();
    let peak = |plan: &Value| plan["devices"][0]["peak_bytes"].as_i64().unwrap();
    let seconds = |plan: &Value| plan["predicted"]["step_seconds"].as_f64().unwrap();
    assert_eq!(closing["bytes"], peak(&after) - peak(&before));
    assert_eq!(closing["speedup"], seconds(&before) / seconds(&after));
    assert_eq!(closings(&advise(&words)), Vec::<&Value>::new());
}

#[test]
fn doctor_names_the_process_to_close() {
    let mut machine = Machine::new("rtx3090");
    machine.store_gpu_rates();
    machine.set_processes("0 4711 21000 C /usr/bin/python3 train.py\n");
    let run_file = machine.workspace.read("run.toml").replace("path = \"model\"", "preset = \"smollm2-135m\"");
    machine.workspace.write("gpu.toml", run_file);
    let words = ["gpu.toml", "--devices", "cuda:0", "--set", "data.sequence=512", "--set", "train.batch_tokens=8192"];
    let done = machine.start(&[&["doctor", "--json"], &words[..]].concat()).wait();
    let findings = done.json()["findings"].as_array().unwrap().clone();
    let closing = |finding: &&Value| finding["text"].as_str().unwrap().starts_with("close process 4711 (");
    let finding = findings.iter().find(closing).unwrap_or_else(|| panic!("{done:?}"));
    check(
        finding,
        json!({"id": "run-faster", "severity": "note", "mend": format!("plimsoll plan {}", words.join(" "))}),
    );
}

// ---- watch --pid ----

/// A process of this test that computes on the processor; it is killed when dropped.
struct Worker(Child);

impl Worker {
    /// Starts a shell command.
    fn start(command: &str) -> Worker {
        Worker(Command::new("sh").args(["-c", command]).stdin(Stdio::null()).spawn().unwrap())
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the lines of JSON in the output so far. An incomplete last line is skipped.
fn json_lines(text: &str) -> Vec<Value> {
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn output_of(running: &Running) -> Vec<Value> {
    json_lines(&fs::read_to_string(running.stdout_path()).unwrap())
}

#[test]
fn watched_process_shows_memory_and_room() {
    let mut machine = Machine::new("rtx3090,rtx3070");
    let worker = Worker::start("exec sleep 100");
    let pid = worker.pid();
    let processes = machine.workspace.path("processes");
    let hold = |mib: u64| {
        let text = format!("0 {pid} {mib} C+G /usr/bin/python3 a.py\n1 {pid} 1024 C y\n1 77 512 G z\n");
        fs::write(machine.workspace.path("new"), text).unwrap();
        fs::rename(machine.workspace.path("new"), &processes).unwrap();
    };
    hold(4096);
    machine.variables.push(format!("PLIMSOLL_NVML_STUB_PROCESSES={}", processes.display()));
    let mut watch = machine.start(&["watch", "--pid", &pid, "--json", "--interval", "0.1"]);
    let stdout = watch.stdout_path();
    let shows = |bytes: u64| {
        let text = fs::read_to_string(&stdout).unwrap();
        json_lines(&text).last().is_some_and(|reading| reading["gpu"]["held_bytes"] == bytes)
    };
    assert!(watch.wait_until(|| shows(5120 * MIB)));
    let first = output_of(&watch)[0].clone();
    check(&first, json!({"version": 1, "pid": worker.0.id(), "state": "running", "name": "/usr/bin/python3 a.py"}));
    let host = first["host"]["held_bytes"].as_u64().unwrap();
    assert!(host > 0 && host < 64 * MIB, "{host}");
    let gpu = &first["devices"][1];
    let free = (24576 - 316 - 4096) * MIB;
    let line = |free: u64| (free as f64 * 0.9) as u64;
    check(
        gpu,
        json!({
            "name": "cuda:0", "held_bytes": 4096 * MIB, "free_bytes": free, "run_bytes": line(free),
            "run_bytes_at_peak": line(free), "run_bytes_without": line(free + 4096 * MIB),
        }),
    );
    check(&first["devices"][2], json!({"held_bytes": 1024 * MIB, "peak_bytes": 1024 * MIB}));
    hold(6144);
    assert!(watch.wait_until(|| shows(7168 * MIB)));
    hold(2048);
    assert!(watch.wait_until(|| shows(3072 * MIB)));
    drop(worker);
    let done = watch.wait();
    assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""));
    let readings = json_lines(&done.stdout);
    let last = readings.last().unwrap();
    check(last, json!({"state": "ended", "name": "/usr/bin/python3 a.py"}));
    check(&last["gpu"], json!({"held_bytes": null, "peak_bytes": 7168 * MIB, "growth_bytes_per_minute": null}));
    let peak_at = last["gpu"]["peak_at"].as_f64().unwrap();
    let first_at_peak = readings.iter().find(|reading| reading["gpu"]["held_bytes"] == 7168 * MIB).unwrap();
    assert_eq!(Some(peak_at), first_at_peak["at"].as_f64());
    check(&last["devices"][1], json!({"held_bytes": null, "peak_bytes": 6144 * MIB, "run_bytes_at_peak": null}));
}

#[test]
fn steady_growth_on_a_gpu_warns_of_a_leak() {
    let mut machine = Machine::new("rtx3090");
    let worker = Worker::start("exec sleep 100");
    let pid = worker.pid();
    let processes = machine.workspace.path("processes");
    let hold = |mib: u64| {
        fs::write(machine.workspace.path("new"), format!("0 {pid} {mib} C a.py\n")).unwrap();
        fs::rename(machine.workspace.path("new"), &processes).unwrap();
    };
    hold(1000);
    machine.variables.push(format!("PLIMSOLL_NVML_STUB_PROCESSES={}", processes.display()));
    let words = ["watch", "--pid", &pid, "--interval", "0.1", "--window", "2"];
    let watch = machine.start(&words);
    let stdout = watch.stdout_path();
    let began = Instant::now();
    let warning = loop {
        // About 100 MiB per second.
        hold(1000 + began.elapsed().as_millis() as u64 / 10);
        let text = fs::read_to_string(&stdout).unwrap();
        if let Some(line) = text.lines().find(|line| line.starts_with("warning: GPU memory grows by ")) {
            break line.to_owned();
        }
        assert!(began.elapsed() < PATIENCE, "{text}");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(warning.contains("perhaps a leak; ") && warning.contains(" free on cuda:0 last "), "{warning}");
    let seconds = warning.split("measured over ").nth(1).unwrap().split(' ').next().unwrap();
    assert!((1.8..=2.0).contains(&seconds.parse::<f64>().unwrap()), "{warning}");
    watch.signal("INT");
    let done = watch.wait();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let summary = done.stdout.split("a.py (").last().unwrap();
    assert!(summary.contains(") still runs\n  peak of GPU memory: 1.") && summary.contains("Z\n"), "{summary}");
    let warnings = done.stdout.lines().filter(|line| line.starts_with("warning: GPU memory grows")).count();
    assert!(warnings <= 2, "a warning is repeated: {}", done.stdout);
}

#[test]
fn process_without_gpu_shows_host_memory() {
    let machine = Machine::with_files("rtx3090", &[]);
    // Holds another MiB about every 20 ms.
    let grow = "exec awk 'BEGIN { s = \"x\"; while (length(s) < 1048576) s = s s; \
                while (n < 200) { a[n++] = s n; system(\"sleep 0.02\") } }'";
    let worker = Worker::start(grow);
    let done = machine.succeed(&["watch", "--pid", &worker.pid(), "--json", "--interval", "0.1", "--window", "1"]);
    let readings = json_lines(&done.stdout);
    let last = readings.last().unwrap();
    check(last, json!({"state": "ended", "name": "awk"}));
    let unknown = json!({
        "held_bytes": null, "peak_bytes": null, "peak_at": null, "growth_bytes_per_minute": null,
        "growth_seconds": null, "is_leak": false,
    });
    assert!(readings.iter().all(|reading| reading["gpu"] == unknown), "{last}");
    assert!(last["host"]["peak_bytes"].as_u64().unwrap() > 100 * MIB, "{last}");
    let leak = readings.iter().find(|reading| reading["host"]["is_leak"] == true).expect("a leak is found");
    let growth = leak["host"]["growth_bytes_per_minute"].as_f64().unwrap() / MIB as f64;
    assert!((100.0..=3100.0).contains(&growth), "{leak}");
    let warning = leak["warnings"][0].as_str().unwrap();
    assert!(warning.starts_with("host memory grows by ") && warning.contains(" free on cpu last "), "{warning}");
}

#[test]
fn lines_say_that_no_gpu_memory_is_known() {
    let machine = Machine::new("h200");
    let worker = Worker::start("exec sleep 4");
    let done = machine.succeed(&["watch", "--pid", &worker.pid(), "--interval", "0.1"]);
    let mut lines = done.stdout.lines();
    let first = lines.next().unwrap();
    let start = format!("sleep ({}): no GPU memory known; host memory ", worker.pid());
    assert!(first.starts_with(&start), "{first}");
    assert!(lines.next().unwrap().starts_with("  cpu  holds "), "{}", done.stdout);
    assert!(lines.next().unwrap().contains("a run would take 125.82 GiB"), "{}", done.stdout);
    assert!(
        done.stdout.contains(") has ended\n  peak of GPU memory: unknown\n  peak of host memory: "),
        "{}",
        done.stdout
    );
}

#[test]
fn unreported_memory_of_a_process_is_unknown() {
    let mut machine = Machine::new("wsl");
    let worker = Worker::start("exec sleep 4");
    machine.workspace.write("processes", format!("0 {} 700 C -\n", worker.pid()));
    machine.set("PROCESSES", machine.workspace.path("processes").to_str().unwrap());
    let done = machine.succeed(&["watch", "--pid", &worker.pid(), "--json", "--interval", "0.1"]);
    let first = &json_lines(&done.stdout)[0];
    assert_eq!((&first["gpu"]["held_bytes"], &first["devices"][1]["held_bytes"]), (&Value::Null, &Value::Null));
    assert_eq!(first["devices"][1]["free_bytes"], (24576 - 316 - 700) * MIB);
    let warnings = first["warnings"].as_array().unwrap();
    let starts = |start: &str| warnings.iter().any(|text| text.as_str().unwrap().starts_with(start));
    assert!(starts("the driver does not report the GPU memory of this process"), "{first}");
}

#[test]
fn missing_process_is_refused() {
    let machine = Machine::with_files("rtx3090", &[]);
    // The kernel gives no process a number above 2^22.
    let refusal = machine.start(&["watch", "--pid", "4194305"]).wait().refusal(2);
    assert!(refusal.starts_with("error: there is no process 4194305: "), "{refusal}");
    let done = machine.start(&["watch", "--pid", "4194305", "--json"]).wait();
    assert_eq!((done.code, done.json()["error"]["exit"].as_i64()), (Some(2), Some(2)));
    for words in [&["--pid", "0"][..], &["--pid", "x"], &["--window", "5"], &["run", "--pid", "1"]] {
        let done = machine.start(&[&["watch"], words].concat()).wait();
        assert_eq!((done.code, done.stdout.as_str()), (Some(2), ""), "{words:?}");
    }
}

#[test]
fn process_that_only_nvml_lists_is_watched() {
    let mut machine = Machine::new("h200");
    let processes = machine.workspace.path("processes");
    machine.workspace.write("processes", "0 4194305 900 C served\n");
    machine.set("PROCESSES", processes.to_str().unwrap());
    let mut watch = machine.start(&["watch", "--pid", "4194305", "--json", "--interval", "0.1"]);
    let stdout = watch.stdout_path();
    assert!(watch.wait_until(|| fs::read_to_string(&stdout).unwrap().lines().count() >= 2));
    fs::remove_file(&processes).unwrap();
    let done = watch.wait();
    let readings = json_lines(&done.stdout);
    check(&readings[0], json!({"state": "running", "name": "served"}));
    assert_eq!(
        (&readings[0]["gpu"]["held_bytes"], &readings[0]["host"]["held_bytes"]),
        (&json!(900 * MIB), &Value::Null)
    );
    check(readings.last().unwrap(), json!({"state": "ended"}));
    assert_eq!(readings.last().unwrap()["gpu"]["peak_bytes"], 900 * MIB);
}
