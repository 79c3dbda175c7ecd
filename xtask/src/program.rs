//! Helpers of chores that run the program: a release build, fixed device rates, and processes under a watchdog.

use anyhow::{Context, Result, bail, ensure};
use plimsoll_device::probe::Cpu;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Builds the workspace for release and returns the path of the command-line program `plimsoll`.
///
/// The whole workspace is built, because a build of a single crate enables fewer features of shared dependencies and
/// would rebuild them.
///
/// # Errors
/// Fails if the build fails.
pub fn release() -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace's root")?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let build = ["build", "--release", "--locked", "--workspace"];
    let status = Command::new(cargo).args(build).current_dir(root).status().context("cargo cannot be started")?;
    ensure!(status.success(), "the program does not build");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    Ok(target.join("release/plimsoll"))
}

/// Writes fixed CPU rates into a cache folder, in place of measured ones: 50 GFLOP/s, about half of a core with
/// AVX-512. Simulated devices are then equally fast on all machines, even on a machine that does some other work.
///
/// # Errors
/// Fails if the folder cannot be written.
pub fn write_device_rates(cache: &Path) -> Result<()> {
    let cpu = Cpu::read();
    let known: Vec<_> = (1..=cpu.threads).map(|threads| device_rates(&cpu, threads)).collect();
    fs::create_dir_all(cache)?;
    fs::write(cache.join("devices.json"), serde_json::to_string(&known)?)?;
    Ok(())
}

/// Returns the cache entry with fixed rates for this CPU and number of threads.
fn device_rates(cpu: &Cpu, threads: u32) -> Value {
    json!({
        "plimsoll": env!("CARGO_PKG_VERSION"), "device": "cpu", "model": cpu.model, "features": cpu.features,
        "threads": threads,
        "rates": {
            "f32_flops": 5e10, "bf16_flops": 5e10, "memory_bytes_per_second": 1e10, "op_seconds": 5e-6,
            "host_link": {"bytes_per_second": 1e10, "latency_seconds": 2e-6}, "measured": true,
        },
    })
}

/// Output and exit code of a process that has ended.
pub struct ProgramOutput {
    /// Exit code; `None` if a signal ended the process.
    pub code: Option<i32>,
    /// Text on stdout.
    pub stdout: String,
    /// Text on stderr.
    pub stderr: String,
}

/// Runs a command to its end and returns its output. Writes stdout and stderr to two files in `folder`. Kills the
/// process if it takes longer than `seconds`.
///
/// # Errors
/// Fails if the command cannot be started or is killed.
pub fn start(command: &mut Command, folder: &Path, seconds: u64) -> Result<ProgramOutput> {
    let [stdout, stderr] = ["stdout", "stderr"].map(|name| folder.join(name));
    let mut child = command
        .stdin(Stdio::null())
        .stdout(File::create(&stdout)?)
        .stderr(File::create(&stderr)?)
        .spawn()
        .context("the program cannot be started")?;
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if started.elapsed().as_secs() >= seconds {
            child.kill()?;
            child.wait()?;
            bail!("hung: ended after {seconds} s; {}", fs::read_to_string(&stderr).unwrap_or_default());
        }
        thread::sleep(Duration::from_millis(10));
    };
    Ok(ProgramOutput {
        code: status.code(),
        stdout: fs::read_to_string(&stdout)?,
        stderr: fs::read_to_string(&stderr)?,
    })
}
