//! The best completed runs of a folder, in its file `champions.json`: [`ChampionFile`].
//!
//! Runs compete if they have the same [`ChampionKey`]. The measure is tokens per second. An entry holds the run file, the
//! plan, the program and the machine, so that it outlives the folder of its run.

use super::open_runs;
use crate::report::{Report, hardware};
use crate::snapshot::RunState;
use crate::snapshot::run_folder::RunFolder;
use crate::text::{count, shell_word, wrapped};
#[cfg(feature = "schema")]
use plimsoll_core::Plan;
use plimsoll_core::{Bytes, DevicePlan, Failure, RunEnvironment};
use plimsoll_device::{private_file, regular_file};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Version of `champions.json`. It changes when a field changes its meaning or is removed.
pub const CHAMPIONS_VERSION: u32 = 1;
/// Name of the file in the folder of the runs.
const FILE_NAME: &str = "champions.json";
/// Columns of the printed list.
const LINE_COLUMNS: usize = 80;

/// The content of `champions.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ChampionFile {
    /// Version of this format.
    pub version: u32,
    /// The champions, sorted by model and devices. No two have the same key.
    pub champions: Vec<Champion>,
}

/// The fastest completed run among those with its key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Champion {
    /// The key: runs with the same one compete.
    pub key: ChampionKey,
    /// Measured tokens (including padding) per second over all steps since the last start of the run. Simulated if the
    /// devices are.
    pub tokens_per_second: f64,
    /// Absolute path of the run's folder, which may be gone.
    pub run: String,
    /// Time of the last event of the run, in seconds since the Unix epoch.
    pub ended_at: f64,
    /// Number of steps.
    pub steps: u64,
    /// Tokens of a step, including padding.
    pub batch_tokens: u64,
    /// Measured median seconds of a step. Simulated if the devices are.
    pub step_seconds: f64,
    /// Loss of the last step; `None` if it has no label.
    pub loss: Option<f64>,
    /// Loss of the last evaluation; `None` without evaluation.
    pub eval_loss: Option<f64>,
    /// Largest measured peak of a device; `None` if none was measured.
    pub measured_peak_bytes: Option<Bytes>,
    /// The run file with every key.
    pub run_file: String,
    /// The plan at the end of the run.
    // It is stored as it is, so that a later change of plans does not make the list unreadable.
    #[cfg_attr(feature = "schema", schemars(with = "Plan"))]
    pub plan: Value,
    /// Program and machine; `None` if the run did not record them.
    pub environment: Option<RunEnvironment>,
}

/// The settings that competing runs share.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ChampionKey {
    /// Name of the model: the preset, the name of its folder, or `built-in example`.
    pub model: String,
    /// Number of parameters of the model.
    pub parameters: u64,
    /// Trained parameters: `full` or `lora`.
    pub method: String,
    /// Lossy memory savings (rungs), sorted.
    pub rungs: Vec<String>,
    /// Precision of the computation.
    pub precision: String,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// The devices with their hardware, sorted. A simulated device appears with its size and pace, and with the processor
    /// that simulates it.
    pub devices: Vec<String>,
    /// Whether any device is simulated.
    pub simulated: bool,
}

/// The version of a file, which is read before the rest: another version may have another form.
#[derive(Deserialize)]
struct FileVersion {
    version: u32,
}

impl Default for ChampionFile {
    fn default() -> ChampionFile {
        ChampionFile { version: CHAMPIONS_VERSION, champions: vec![] }
    }
}

impl ChampionFile {
    /// Reads `champions.json` of a folder; an empty list if there is none.
    ///
    /// # Errors
    /// The file cannot be read, or is no list of this version. It is left as it is.
    pub fn read(folder: &Path) -> Result<ChampionFile, Failure> {
        let path = folder.join(FILE_NAME);
        let bytes = match regular_file::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound && !regular_file::is_present(&path) => {
                return Ok(ChampionFile::default());
            }
            Err(error) => return Err(unreadable(&path, &error.to_string())),
        };
        let damaged = |error: serde_json::Error| unreadable(&path, &format!("it is damaged: {error}"));
        let FileVersion { version } = serde_json::from_slice(&bytes).map_err(damaged)?;
        if version != CHAMPIONS_VERSION {
            let reason = format!("it has version {version}, expected {CHAMPIONS_VERSION}");
            return Err(unreadable(&path, &reason));
        }
        serde_json::from_slice(&bytes).map_err(damaged)
    }

    /// Updates `champions.json` of a folder with the completed runs in it, and returns the list with notes about runs
    /// that cannot be read or compared. Writes nothing if the list stays the same. Waits for another update in progress.
    ///
    /// # Errors
    /// The folder or the file cannot be read, or the file cannot be written. A damaged file is left as it is.
    pub fn update(folder: &Path, at: f64) -> Result<(ChampionFile, Vec<String>), Failure> {
        let _lock = lock(folder);
        let before = ChampionFile::read(folder)?;
        let (mut file, mut notes) = (before.clone(), Vec::new());
        for run in open_runs(folder)? {
            match run.map_err(|failure| failure.message).and_then(|run| candidate(&run, at)) {
                Ok(candidate) => candidate.into_iter().for_each(|candidate| file.take(candidate)),
                Err(note) => notes.push(note),
            }
        }
        file.champions.sort_by(|one, other| one.key.cmp(&other.key));
        if file != before {
            file.write(folder)?;
        }
        Ok((file, notes))
    }

    /// Takes a completed run as a champion if it is the first with its key, or faster than the champion.
    fn take(&mut self, candidate: Champion) {
        match self.champions.iter_mut().find(|champion| champion.key == candidate.key) {
            None => self.champions.push(candidate),
            Some(champion) if candidate.tokens_per_second > champion.tokens_per_second => *champion = candidate,
            Some(_) => {}
        }
    }

    /// Returns whether the list has the run of a report: its folder with its speed.
    pub(super) fn lists(&self, report: &Report) -> bool {
        let path = absolute(&report.run.folder);
        let speed = report.speed.measured_tokens_per_second;
        self.champions.iter().any(|champion| champion.run == path && Some(champion.tokens_per_second) == speed)
    }

    /// Writes the list for this user only. The file is replaced as a whole, after it has been written to disk.
    fn write(&self, folder: &Path) -> Result<(), Failure> {
        let path = folder.join(FILE_NAME);
        private_file::replace(&path, self.json().as_bytes()).map_err(|error| {
            Failure::input(format!("{}: cannot write the champions: {error}", path.display()))
                .hint("without champions the list needs no writing: plimsoll runs")
        })
    }

    /// Returns the list as a JSON object on several lines.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain data has a JSON form")
    }

    /// Returns the list as text, three lines per champion. `folder` is the folder of the runs.
    pub fn text(&self, folder: &Path) -> String {
        if self.champions.is_empty() {
            return format!("no completed runs in {}\n", folder.display());
        }
        let champions: String = self.champions.iter().map(lines).collect();
        champions + &format!("kept in {}\n", folder.join(FILE_NAME).display())
    }
}

/// Returns the lines of a champion: its speed and kind, its devices, its run.
fn lines(champion: &Champion) -> String {
    let key = &champion.key;
    let speed = count(champion.tokens_per_second);
    let simulated = if key.simulated { " (simulated)" } else { "" };
    let kind: Vec<&str> = [&key.model, &key.method].into_iter().chain(&key.rungs).map(String::as_str).collect();
    let kind = format!("{}, {}, {} tokens per sequence", kind.join(", "), key.precision, key.sequence);
    let gone = if Path::new(&champion.run).is_dir() { "" } else { " (gone)" };
    let peak = champion.measured_peak_bytes.map_or(String::new(), |peak| format!(", peak {peak}"));
    wrapped(&format!("{speed} tokens/s{simulated}  {kind}"), LINE_COLUMNS, "  ")
        + &wrapped(&format!("  on {}", key.devices.join(", ")), LINE_COLUMNS, "    ")
        + &wrapped(&format!("  run {}{gone}{peak}", champion.run), LINE_COLUMNS, "    ")
}

/// Locks the folder of the runs until the result is dropped, so that no other update replaces this one; `None` if its
/// file system has no locks.
fn lock(folder: &Path) -> Option<File> {
    let folder = File::open(folder).ok()?;
    folder.lock().ok()?;
    Some(folder)
}

/// Returns the failure of a file that cannot be read.
fn unreadable(path: &Path, reason: &str) -> Failure {
    let name = path.display().to_string();
    let aside = format!("mv -n {} {}", shell_word(&name), shell_word(&format!("{name}.set-aside")));
    Failure::input(format!("{name}: cannot read the champions: {reason}"))
        .hint(format!("restore the file, or set it aside and start a new list: {aside}"))
}

/// Returns a path as an absolute one, as text.
fn absolute(path: &str) -> String {
    std::path::absolute(path).unwrap_or_else(|_| PathBuf::from(path)).display().to_string()
}

/// Returns a run as a champion may be; `None` unless it is complete, lost no device, and has all files of a champion.
///
/// # Errors
/// The hardware of a device is not known, so the run cannot be compared. The text names run and device.
fn candidate(run: &RunFolder, at: f64) -> Result<Option<Champion>, String> {
    let (Some(plan), Some(result)) = (run.plan(), run.result()) else { return Ok(None) };
    let report = Report::of(run, at);
    let (Some(settings), Some(parameters), Some(ended_at)) = (&report.settings, report.parameters, report.newest_at)
    else {
        return Ok(None);
    };
    // Its speed is that of changing devices.
    let has_changed = !result.lost.is_empty() || !report.team_changes.listed.is_empty();
    let speed = result.tokens_per_second;
    if report.run.state != RunState::Done || has_changed || !(speed.is_finite() && speed > 0.0) {
        return Ok(None);
    }
    let mut devices = Vec::new();
    for device in &plan.devices {
        let known = device_key(run, &report, device);
        devices.push(known.map_err(|reason| format!("{}: is not compared: {reason}", report.run.folder))?);
    }
    devices.sort();
    let mut rungs = settings.rungs.clone();
    rungs.sort();
    let key = ChampionKey {
        model: settings.model.clone(),
        parameters,
        method: settings.method.clone(),
        rungs,
        precision: settings.precision.clone(),
        sequence: settings.sequence,
        simulated: plan.devices.iter().any(|device| device.simulated),
        devices,
    };
    Ok(Some(Champion {
        key,
        tokens_per_second: speed,
        run: absolute(&report.run.folder),
        ended_at,
        steps: result.steps,
        batch_tokens: settings.batch_tokens,
        step_seconds: result.step_seconds.median,
        loss: Some(result.loss.last).filter(|loss| loss.is_finite()),
        eval_loss: result.eval.map(|eval| eval.loss).filter(|loss| !loss.is_nan()),
        measured_peak_bytes: report.devices.iter().filter_map(|device| device.total.measured_bytes).max(),
        run_file: settings.text.clone(),
        plan: serde_json::to_value(plan).expect("plain data has a JSON form"),
        environment: report.environment.clone(),
    }))
}

/// Returns a device of a run with its hardware, as runs must share it to compete.
///
/// # Errors
/// The hardware is not known: that of a remote device is not recorded.
fn device_key(run: &RunFolder, report: &Report, device: &DevicePlan) -> Result<String, String> {
    let name = &device.name;
    if name.contains('/') {
        return Err(format!("the hardware of the remote device {name} is not recorded"));
    }
    let environment = report.environment.as_ref();
    if !device.simulated {
        let hardware = run.plan().and_then(|plan| hardware(plan, environment, name));
        let hardware = hardware.ok_or_else(|| format!("the hardware of {name} is not known"))?;
        return Ok(format!("{name} ({hardware})"));
    }
    let requested = report.settings.as_ref().and_then(|settings| settings.request_of(name));
    let requested = requested.ok_or_else(|| format!("size and pace of {name} are not known"))?;
    let processor = environment.map(|environment| &environment.processor);
    let processor = processor.ok_or_else(|| format!("the processor that simulates {name} is not known"))?;
    Ok(format!("{requested} (simulated on {processor})"))
}
