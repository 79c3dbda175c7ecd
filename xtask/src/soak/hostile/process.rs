//! One start of the program in the folder of an input: under limits, without standard input, and under a watchdog.

use anyhow::Context;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// Seconds after which the program counts as hanging.
pub const HANG_SECONDS: u64 = 20;
/// Seconds after which the program counts as hanging where it may have to measure its rates, which takes half a minute on a
/// busy machine.
pub const MEASUREMENT_SECONDS: u64 = 90;
/// Time after which a run that is under way gets SIGINT. Damage may make a run long, which is no fault.
const INTERRUPT: Duration = Duration::from_secs(4);
/// Time after which a run that is under way gets another SIGINT, which ends a long step.
const INTERRUPT_AGAIN: Duration = Duration::from_secs(9);
/// Largest address space in KiB. A run needs a tenth of it.
const ADDRESS_SPACE_KIB: u64 = 6 << 20;
/// Largest file that the program may write, in blocks of 512 bytes.
const FILE_BLOCKS: u64 = 1 << 20;
/// Bytes of the outputs that are read.
const OUTPUT_BYTES: u64 = 8 << 20;

/// A command for the program.
pub struct Start {
    /// Arguments of the program.
    pub arguments: Vec<OsString>,
    /// Shell script that starts the program (`"$@"`).
    pub script: &'static str,
    /// Environment variables with their values; `None` unsets one.
    pub variables: Vec<(&'static str, Option<&'static str>)>,
    /// Seconds after which the program counts as hanging.
    pub seconds: u64,
}

impl Start {
    /// Returns a start with these arguments in the usual surroundings.
    pub fn new(arguments: Vec<OsString>) -> Start {
        Start { arguments, script: "exec \"$@\"", variables: Vec::new(), seconds: HANG_SECONDS }
    }
}

/// End and outputs of the program.
pub struct Ended {
    /// Status of the process; `None` if it was killed because it hung.
    pub status: Option<ExitStatus>,
    /// Bytes on stdout.
    pub stdout: Vec<u8>,
    /// Bytes on stderr.
    pub stderr: Vec<u8>,
    /// Whether the run was interrupted because it was long.
    pub interrupted: bool,
}

impl Ended {
    /// Returns the exit code or the signal in words.
    pub fn in_words(&self) -> String {
        match self.status {
            None => "hang".into(),
            Some(status) => match (status.code(), status.signal()) {
                (Some(code), _) if self.interrupted => format!("exit {code}, interrupted"),
                (Some(code), _) => format!("exit {code}"),
                (None, signal) => format!("signal {}", signal.unwrap_or_default()),
            },
        }
    }

    /// Returns the exit code; `None` if the process has none.
    pub fn code(&self) -> Option<i32> {
        self.status.and_then(|status| status.code())
    }
}

/// Starts the program in `folder` and waits for its end.
///
/// # Errors
/// Fails if the shell cannot be started.
pub fn run(binary: &Path, folder: &Path, start: &Start) -> anyhow::Result<Ended> {
    let limits = format!("ulimit -c 0; ulimit -v {ADDRESS_SPACE_KIB}; ulimit -f {FILE_BLOCKS}; ");
    let outputs = folder.join("outputs");
    fs::create_dir_all(&outputs)?;
    let [stdout, stderr] = ["stdout", "stderr"].map(|name| outputs.join(name));
    let mut command = Command::new("/bin/sh");
    command
        .args(["-c", &(limits + start.script), "sh"])
        .arg(binary)
        .args(&start.arguments)
        .current_dir(folder)
        .env("PLIMSOLL_CACHE", folder.join("cache"))
        .env("PLIMSOLL_PYTHON", "/nonexistent/python")
        .env("HOME", folder)
        .env("TMPDIR", folder.join("temporary"))
        .env("NO_COLOR", "1")
        .env_remove("RUST_BACKTRACE")
        .stdin(Stdio::null())
        .stdout(File::create(&stdout)?)
        .stderr(File::create(&stderr)?)
        .process_group(0);
    for (name, value) in &start.variables {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let child = command.spawn().context("the program cannot be started")?;
    let (status, interrupted) = wait(child, folder, Duration::from_secs(start.seconds))?;
    Ok(Ended { status, stdout: beginning(&stdout)?, stderr: beginning(&stderr)?, interrupted })
}

/// Waits for the end of a process. Interrupts a long run, and kills a process that hangs. Returns its status, and
/// whether it was interrupted.
fn wait(mut child: Child, folder: &Path, most: Duration) -> anyhow::Result<(Option<ExitStatus>, bool)> {
    let (began, began_at, mut interrupts) = (Instant::now(), SystemTime::now(), 0);
    let group = child.id();
    loop {
        // Other work on the machine makes no hang.
        let (elapsed, status) = (began.elapsed().saturating_sub(waited_for_processor(group)), child.try_wait()?);
        if status.is_some() || elapsed > most {
            // Processes that the program has started end, too.
            signal("KILL", group);
            child.wait()?;
            return Ok((status, interrupts > 0));
        }
        let due = [INTERRUPT, INTERRUPT_AGAIN].iter().filter(|time| elapsed > **time).count();
        if due > interrupts && is_under_way(folder, began_at) {
            signal("INT", group);
            interrupts = due;
        }
        thread::sleep(Duration::from_millis(if elapsed < Duration::from_millis(200) { 2 } else { 10 }));
    }
}

/// Returns the time for which the first thread of a process was ready but had no processor; zero if the system does not
/// tell.
fn waited_for_processor(process: u32) -> Duration {
    let text = fs::read_to_string(format!("/proc/{process}/schedstat")).unwrap_or_default();
    Duration::from_nanos(text.split(' ').nth(1).and_then(|field| field.parse().ok()).unwrap_or_default())
}

/// Sends a signal to a process group. A group that has ended already is no error.
fn signal(name: &str, group: u32) {
    let group = format!("-{group}");
    let _ = Command::new("kill").args(["-s", name, "--", &group]).stderr(Stdio::null()).status();
}

/// Returns whether a run is under way in this folder or below: it has written events after `began`.
fn is_under_way(folder: &Path, began: SystemTime) -> bool {
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).into_iter().flatten().flatten() {
            let is_folder = entry.file_type().is_ok_and(|file_type| file_type.is_dir());
            let written = entry.metadata().and_then(|metadata| metadata.modified());
            if entry.file_name() == "events.jsonl" && !is_folder && written.is_ok_and(|time| time > began) {
                return true;
            }
            folders.extend(is_folder.then(|| entry.path()));
        }
    }
    false
}

/// Reads the beginning of an output.
fn beginning(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(OUTPUT_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}
