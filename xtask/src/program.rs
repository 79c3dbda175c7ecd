//! The program itself, as chores run it: built for release, with rates that are the same everywhere where they ask for
//! them, each start in a process of its own that is ended when it hangs.

use anyhow::{Context, Result, bail, ensure};
use plimsoll_device::probe::Cpu;
use serde_json::json;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The release binary, built now, with everything else: all together need more features of some crates than each by itself,
/// and whoever builds one of them alone builds the others' parts anew.
///
/// # Errors
/// A build that fails.
pub fn release() -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace's root")?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let build = ["build", "--release", "--locked", "--workspace"];
    let status = Command::new(cargo).args(build).current_dir(root).status().context("cargo cannot be started")?;
    ensure!(status.success(), "the program does not build");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    Ok(target.join("release/plimsoll"))
}

/// Writes what a processor was measured to do into the cache of that folder: a core of 50 GFLOP/s, about half of what cores
/// with AVX-512 do. So the devices that are played are the same everywhere, and a machine that does other work, too, has
/// time to play them.
///
/// # Errors
/// A folder that cannot be written.
pub fn know_the_rates(cache: &Path) -> Result<()> {
    let cpu = Cpu::read();
    let entry = |threads: u32| {
        json!({
            "plimsoll": env!("CARGO_PKG_VERSION"), "device": "cpu", "model": cpu.model, "features": cpu.features,
            "threads": threads,
            "rates": {
                "f32_flops": 5e10, "bf16_flops": 5e10, "memory_bytes_per_second": 1e10, "op_seconds": 5e-6,
                "host_link": {"bytes_per_second": 1e10, "latency_seconds": 2e-6}, "measured": true,
            },
        })
    };
    let known: Vec<_> = (1..=cpu.threads).map(entry).collect();
    fs::create_dir_all(cache)?;
    fs::write(cache.join("devices.json"), serde_json::to_string(&known)?)?;
    Ok(())
}

/// How a start of the program ended.
pub struct Ended {
    /// Its exit code; none where a signal ended it.
    pub code: Option<i32>,
    /// What it answered.
    pub said: String,
    /// What it complained about.
    pub complained: String,
}

/// Runs a command to its end, with what it says in two files of `folder`.
///
/// # Errors
/// One that cannot be started, and one that has not ended after so many seconds: it is killed.
pub fn start(command: &mut Command, folder: &Path, seconds: u64) -> Result<Ended> {
    let [said, complained] = ["stdout", "stderr"].map(|name| folder.join(name));
    let mut child = command
        .stdin(Stdio::null())
        .stdout(File::create(&said)?)
        .stderr(File::create(&complained)?)
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
            bail!("hung: ended after {seconds} s; {}", fs::read_to_string(&complained).unwrap_or_default());
        }
        thread::sleep(Duration::from_millis(10));
    };
    Ok(Ended { code: status.code(), said: fs::read_to_string(&said)?, complained: fs::read_to_string(&complained)? })
}
