//! Checkpoints: weights, optimizer state and position of a run, complete enough to resume it bit for bit.
//!
//! `checkpoints/step-N/` holds `state.safetensors` (weights and optimizer state) and `checkpoint.json`
//! ([`CheckpointInfo`]). A checkpoint is written to a temporary folder, synced and renamed, so a folder of that name is
//! complete. Reading checks the checksums of all files, because a disk may lose or change data later.

use crate::engine::Engine;
use crate::engine::failure::DeviceFailure;
use crate::engine::tensor_files::{CheckpointReader, TensorWriter};
use crate::files::{FileSummary, FilesError, MAX_SHARD_BYTES, WeightFiles, WeightWriter, atomic};
use crate::planning::previous_plan::PreviousPlan;
use crate::planning::sum_order::SumOrder;
use crate::team::Team;
use plimsoll_core::{Bytes, DType, Failure, GemmAlgorithms, Parallelism, Plan, Recipe, WorkerPlan, nan_from_null};
use plimsoll_device::cache::sealed_json;
use plimsoll_device::regular_file;
use plimsoll_program::ProgramKind;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// Version of the format of `checkpoint.json`.
const VERSION: u32 = 4;

/// The most reasons for other bits that a checkpoint lists.
const MAX_REASONS: usize = 8;

/// Stem of the names of the tensor files.
const STEM: &str = "state";

/// Contents of `checkpoint.json`, beside its own checksum: everything of a checkpoint but its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointInfo {
    /// Format version; raised when a field changes its meaning.
    pub version: u32,
    /// Number of finished steps.
    pub step: u64,
    /// Total number of steps; `None` if a time limit ends the run.
    pub steps: Option<u64>,
    /// Seconds of training so far.
    pub elapsed_seconds: f64,
    /// Loss of the first step with a label; NaN before it is done.
    #[serde(deserialize_with = "nan_from_null")]
    pub first_loss: f64,
    /// Loss of the last finished step with a label; NaN if no such step is done.
    #[serde(deserialize_with = "nan_from_null")]
    pub last_loss: f64,
    /// Number of finished steps without any label.
    #[serde(default)]
    pub unlabelled_steps: u64,
    /// Recipe of the first device. A resumed run uses it again, so that results are bit-identical.
    pub recipe: Recipe,
    /// Kind of parallelism; `None` for one device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallelism: Option<Parallelism>,
    /// Plan of each worker, in rank order; empty for one device. A resumed run uses it again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub team: Vec<WorkerPlan>,
    /// Number of CPU threads. A resumed run uses as many if the machine has them.
    pub threads: u32,
    /// Planned bytes of the first device outside its arena. A resumed run plans with this value unless the
    /// device now holds noticeably more, because a new measurement could differ slightly and change the plan.
    pub charges_bytes: Bytes,
    /// Matrix product algorithms of the GPU; `None` for one device that is no GPU, and for a team, whose workers have
    /// their own. A resumed run uses them again, so that results are bit-identical.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithms: Option<GemmAlgorithms>,
    /// Reasons why the same command may give other bits; empty if it gives the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_bits: Vec<String>,
    /// Dtype of the arithmetic. The saved model's `config.json` names it, and the share of the peak in progress lines
    /// refers to it. A resumed run does not read it back: it follows again from the run file and the device.
    pub precision: DType,
    /// Number of rows of the training data. A resumed run refuses data with another number.
    pub rows: u64,
    /// Number of labelled tokens of the training data.
    pub labelled_tokens: u64,
    /// SHA-256 of the tokens and labels of the training data.
    pub data: String,
    /// Size and checksum of each tensor file, by name. [`write`] sets it.
    pub files: BTreeMap<String, FileSummary>,
}

impl CheckpointInfo {
    /// Version of the format of `checkpoint.json` that this program writes and reads.
    pub const VERSION: u32 = VERSION;

    /// Takes over recipe, parallelism, workers and matrix product algorithms from a plan, for the next checkpoint.
    /// `charges_bytes` are the planned bytes of the first device outside its arena.
    pub(crate) fn set_plan(&mut self, plan: &Plan, charges_bytes: Bytes) {
        if SumOrder::of(&self.recipe, self.parallelism, &self.team) != SumOrder::of_plan(plan) {
            self.add_other_bits(format!("shares or micro-batches changed after step {}", self.step));
        }
        self.recipe = plan.recipe.clone();
        (self.parallelism, self.team) = (plan.parallelism, plan.team.clone());
        (self.algorithms, self.charges_bytes) = (plan.algorithms.clone(), charges_bytes);
    }

    /// Adds a reason why the same command may give other bits. The first few tell enough.
    fn add_other_bits(&mut self, reason: String) {
        if self.other_bits.len() < MAX_REASONS && !self.other_bits.contains(&reason) {
            self.other_bits.push(reason);
        }
    }

    /// Returns `self` with the step, training time and losses of `checkpoint`, and with its reasons for other bits.
    /// Without a checkpoint they are those of a new run.
    pub(crate) fn with_progress_of(mut self, checkpoint: Option<&Checkpoint>) -> CheckpointInfo {
        let Some(Checkpoint { info, .. }) = checkpoint else {
            let (first_loss, last_loss) = (f64::NAN, f64::NAN);
            return CheckpointInfo {
                step: 0,
                elapsed_seconds: 0.0,
                first_loss,
                last_loss,
                unlabelled_steps: 0,
                ..self
            };
        };
        let new_reasons = std::mem::replace(&mut self.other_bits, info.other_bits.clone());
        new_reasons.into_iter().for_each(|reason| self.add_other_bits(reason));
        CheckpointInfo {
            step: info.step,
            elapsed_seconds: info.elapsed_seconds,
            first_loss: info.first_loss,
            last_loss: info.last_loss,
            unlabelled_steps: info.unlabelled_steps,
            ..self
        }
    }

    /// Whether the values are in the range that a run can write. A damaged file may hold others.
    fn is_plausible(&self) -> bool {
        (1..=i64::MAX as u64).contains(&self.step)
            && self.elapsed_seconds >= 0.0
            && self.threads >= 1
            && self.charges_bytes < Bytes::gib(1 << 20)
    }
}

impl PreviousPlan {
    /// Returns the plan that a checkpoint was written under.
    pub fn from_checkpoint(info: &CheckpointInfo) -> PreviousPlan {
        PreviousPlan {
            recipe: info.recipe.clone(),
            charges_bytes: info.charges_bytes,
            algorithms: info.algorithms.clone(),
            parallelism: info.parallelism,
            team: info.team.clone(),
        }
    }
}

/// A whole checkpoint that was read from disk.
pub struct Checkpoint {
    /// Folder of the checkpoint.
    pub path: PathBuf,
    /// Contents of `checkpoint.json`.
    pub info: CheckpointInfo,
    /// Weights and optimizer state.
    pub tensors: WeightFiles,
}

/// Reason that a checkpoint cannot be used.
enum Unusable {
    /// `checkpoint.json` has this version, which differs from the one that this program reads.
    OtherVersion(u32),
    /// A file is missing or damaged, as the text tells.
    Damaged(String),
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Unusable::OtherVersion(version) => write!(f, "checkpoint.json has version {version}, expected {VERSION}"),
            Unusable::Damaged(problem) => f.write_str(problem),
        }
    }
}

/// Returns the newest whole checkpoint of a run folder, with a warning for each newer one that is not whole. Returns
/// `None` if the folder has no checkpoint. Reads every byte of the tensor files, to compare their checksums.
///
/// # Errors
/// There are checkpoints, but each of them is damaged or has the layout of another version. To start from scratch would
/// silently lose work.
pub fn newest(run_dir: &Path) -> Result<(Option<Checkpoint>, Vec<String>), Failure> {
    let (mut warnings, mut other_versions) = (Vec::new(), Vec::new());
    for (_, path) in checkpoint_folders(run_dir).into_iter().rev() {
        match read(&path) {
            Ok(checkpoint) => return Ok((Some(checkpoint), warnings)),
            Err(problem) => {
                warnings.push(format!("checkpoint {} is not whole: {problem}", path.display()));
                if let Unusable::OtherVersion(version) = problem {
                    other_versions.push(version);
                }
            }
        }
    }
    if warnings.is_empty() {
        return Ok((None, warnings));
    }
    if other_versions.len() == warnings.len() {
        return Err(other_layout(run_dir, other_versions));
    }
    let message = format!("run folder {}: no checkpoint is whole", run_dir.display());
    let failure = warnings.into_iter().fold(Failure::input(message), Failure::hint);
    Err(failure.hint("restore a checkpoint from a backup, or delete the folder `checkpoints` to start from step 0"))
}

/// Returns the failure for a run folder in which every checkpoint has the layout of another version. `versions` lists
/// the version of each checkpoint.
fn other_layout(run_dir: &Path, mut versions: Vec<u32>) -> Failure {
    versions.sort_unstable();
    versions.dedup();
    let layout = if versions.iter().all(|version| *version < VERSION) { "an older layout" } else { "another layout" };
    let versions: Vec<String> = versions.iter().map(u32::to_string).collect();
    let message = format!(
        "run folder {}: every checkpoint has {layout} (version {}; this program reads version {VERSION})",
        run_dir.display(),
        versions.join(", ")
    );
    Failure::input(message)
        .hint("start a new run in another folder: --set run.dir=runs/another")
        .hint("or resume this one with the version of Plimsoll that wrote it")
}

/// Reads the checkpoint in a folder. Refuses one of another version, or with files of another content.
fn read(path: &Path) -> Result<Checkpoint, Unusable> {
    let text = regular_file::read(&path.join("checkpoint.json")).map_err(|e| format!("checkpoint.json: {e}"));
    let text = text.map_err(Unusable::Damaged)?;
    // Another version may have other fields, so the version is read on its own.
    if let Ok(Layout { version }) = serde_json::from_slice(&text)
        && version != VERSION
    {
        return Err(Unusable::OtherVersion(version));
    }
    read_files(path, &text).map_err(Unusable::Damaged)
}

/// Version field of a `checkpoint.json`, to be read before all other fields.
#[derive(Deserialize)]
struct Layout {
    version: u32,
}

/// Reads the checkpoint in the folder `path`. `text` is its `checkpoint.json`, which has the present version.
fn read_files(path: &Path, text: &[u8]) -> Result<Checkpoint, String> {
    let info: CheckpointInfo = sealed_json::from_slice(text).map_err(|e| format!("checkpoint.json: {e}"))?;
    if !info.is_plausible() || path.file_name().is_none_or(|name| name != &*format!("step-{}", info.step)) {
        return Err("checkpoint.json has impossible values".to_owned());
    }
    for (name, expected) in &info.files {
        check_file(path, name, expected)?;
    }
    let files = info.files.keys().filter(|name| name.ends_with(".safetensors")).map(|name| path.join(name)).collect();
    let tensors = WeightFiles::open_files(files).map_err(|e| e.to_string())?;
    Ok(Checkpoint { path: path.to_owned(), info, tensors })
}

/// Checks that a file in the folder `dir` has the size and the checksum that were recorded when it was written.
fn check_file(dir: &Path, name: &str, expected: &FileSummary) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("{name}: {e}");
    let file = regular_file::open(&dir.join(name)).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    if bytes != expected.bytes.0 {
        return Err(format!("{name} has {bytes} bytes, expected {}", expected.bytes.0));
    }
    match FileSummary::read(&file).map_err(failed)? == *expected {
        true => Ok(()),
        false => Err(format!("{name}: its checksum does not match: the content was changed")),
    }
}

/// Lists the checkpoint folders of a run with their steps, oldest first.
fn checkpoint_folders(run_dir: &Path) -> Vec<(u64, PathBuf)> {
    let mut folders: Vec<(u64, PathBuf)> = fs::read_dir(run_dir.join("checkpoints"))
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let step = path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()?;
            Some((step, path))
        })
        .collect();
    folders.sort();
    folders
}

/// Writes the checkpoint of the step `info.step`, then removes all but the `keep` newest checkpoints. Returns the
/// folder of the new checkpoint.
pub(crate) fn write(
    run_dir: &Path,
    info: &CheckpointInfo,
    team: &mut Team,
    keep: u32,
) -> Result<PathBuf, DeviceFailure> {
    let path = run_dir.join("checkpoints").join(format!("step-{}", info.step));
    atomic::write_dir(&path, |dir| -> Result<(), DeviceFailure> {
        let mut writer = WeightWriter::create(dir, STEM, &team.file_tensors(ProgramKind::Checkpoint), MAX_SHARD_BYTES)?;
        team.write_files(ProgramKind::Checkpoint, &mut TensorWriter(&mut writer))?;
        let files = writer.finish().map_err(|error| describe_unsaved(info.step, error))?;
        write_info(dir, &CheckpointInfo { files, ..info.clone() })?;
        Ok(())
    })?;
    prune(run_dir, info.step, keep)?;
    Ok(path)
}

/// Writes the `checkpoint.json` of a checkpoint into its folder.
fn write_info(dir: &Path, info: &CheckpointInfo) -> Result<(), FilesError> {
    let sealed = sealed_json::seal(info).expect("plain data has a JSON form");
    atomic::write_file(&dir.join("checkpoint.json"), format!("{sealed:#}").as_bytes())
}

/// Converts an error of the tensor files of step `step`. NaN and infinite values end the run like a loss that is not
/// finite, and the earlier checkpoints stay.
fn describe_unsaved(step: u64, error: FilesError) -> DeviceFailure {
    let FilesError::NotFinite { tensor, .. } = error else { return error.into() };
    let message = format!("step {step}: no checkpoint is written, because `{tensor}` holds NaN or infinite values");
    let hint = "earlier checkpoints are intact; start a new run with a lower train.learning_rate or train.clip_norm";
    Failure::stopped(message).hint(hint).into()
}

/// Removes all checkpoints of steps up to `step` but the `keep` newest ones. Also removes the temporary folders of
/// killed saves and removals. Checkpoints of later steps stay and do not count: they are damaged, or this run would
/// have resumed from them.
fn prune(run_dir: &Path, step: u64, keep: u32) -> Result<(), FilesError> {
    let up_to_now = checkpoint_folders(run_dir).into_iter().filter(|(of, _)| *of <= step).map(|(_, path)| path);
    for old in up_to_now.rev().skip(keep as usize) {
        atomic::remove_dir(&old)?;
    }
    atomic::remove_unfinished(&run_dir.join("checkpoints"))
}

/// Removes what a killed process left of saves and removals: temporary folders, and folders of steps before `newest`,
/// the step of the newest whole checkpoint, that hold tensor files at most.
///
/// # Errors
/// A folder that cannot be removed.
pub(crate) fn remove_leftovers(run_dir: &Path, newest: u64) -> Result<(), FilesError> {
    let before = checkpoint_folders(run_dir).into_iter().filter(|(step, _)| *step < newest);
    for (_, half) in before.filter(|(step, path)| is_half_removed(*step, path)) {
        atomic::remove_dir(&half)?;
    }
    atomic::remove_unfinished(&run_dir.join("checkpoints"))
}

/// Whether `path` is a folder of this program for a checkpoint of step `step` that lacks `checkpoint.json`, and holds
/// nothing but files of tensors.
fn is_half_removed(step: u64, path: &Path) -> bool {
    let is_ours = path.file_name().is_some_and(|name| name == &*format!("step-{step}"));
    let is_tensor_file = |file: fs::DirEntry| {
        file.file_name().to_str().is_some_and(|name| name.starts_with(STEM) && name.contains(".safetensors"))
    };
    is_ours
        && path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir())
        && fs::read_dir(path).is_ok_and(|mut files| files.all(|file| file.is_ok_and(is_tensor_file)))
}

/// Loads the tensors of a checkpoint into the arena of a device.
///
/// # Errors
/// A tensor is missing or has another shape or type than the run needs, or the device fails.
pub(crate) fn restore(checkpoint: &Checkpoint, engine: &mut Engine) -> Result<(), DeviceFailure> {
    for wanted in engine.file_tensors(ProgramKind::Restore) {
        let entry = checkpoint.tensors.entry(&wanted.name);
        if entry.is_none_or(|e| e.shape != wanted.shape || e.dtype() != Some(wanted.dtype)) {
            let message = format!(
                "checkpoint {}: tensor `{}` is missing, or has another shape or type than this run needs",
                checkpoint.path.display(),
                wanted.name
            );
            let failure = Failure::input(message);
            return Err(failure.hint("the run file or the model was changed after the checkpoint was written").into());
        }
    }
    engine.move_files(ProgramKind::Restore, &mut CheckpointReader(&checkpoint.tensors))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::StoredTensor;
    use plimsoll_core::RecomputeLevel;
    use proptest::prelude::*;

    fn info(step: u64) -> CheckpointInfo {
        CheckpointInfo {
            version: VERSION,
            step,
            steps: Some(40),
            elapsed_seconds: 1.5,
            first_loss: 4.0,
            last_loss: 3.5,
            unlabelled_steps: 0,
            recipe: Recipe::on_device(2, vec![RecomputeLevel::Nothing; 2]),
            parallelism: None,
            team: vec![],
            threads: 2,
            charges_bytes: Bytes::mib(14),
            algorithms: None,
            other_bits: vec![],
            precision: DType::F32,
            rows: 96,
            labelled_tokens: 2859,
            data: "0f".repeat(32),
            files: BTreeMap::new(),
        }
    }

    /// Creates a run folder with a complete checkpoint at each of these steps; their only tensor is zero.
    fn run_with(steps: &[u64]) -> tempfile::TempDir {
        let run = tempfile::tempdir().unwrap();
        for &step in steps {
            let dir = run.path().join(format!("checkpoints/step-{step}"));
            fs::create_dir_all(&dir).unwrap();
            let tensors = [StoredTensor { name: "a".into(), dtype: DType::F32, shape: vec![2] }];
            let mut writer = WeightWriter::create(&dir, STEM, &tensors, MAX_SHARD_BYTES).unwrap();
            writer.write("a", &[0; 8]).unwrap();
            write_info(&dir, &CheckpointInfo { files: writer.finish().unwrap(), ..info(step) }).unwrap();
        }
        run
    }

    fn steps(run: &Path) -> Vec<u64> {
        checkpoint_folders(run).into_iter().map(|(step, _)| step).collect()
    }

    #[test]
    fn prune_keeps_newest_and_removes_unfinished() {
        let run = run_with(&[8, 9, 10, 11, 100]);
        fs::create_dir(run.path().join("checkpoints/.step-12.partial")).unwrap();
        prune(run.path(), 11, 2).unwrap();
        assert_eq!(steps(run.path()), [10, 11, 100]);
        assert!(!run.path().join("checkpoints/.step-12.partial").exists());
    }

    #[test]
    fn leftovers_of_kills_are_removed_before_newest() {
        let run = run_with(&[5, 8, 9, 10]);
        let path = |name: &str| run.path().join("checkpoints").join(name);
        for half in ["step-5", "step-8", "step-9"] {
            fs::remove_file(path(half).join("checkpoint.json")).unwrap();
        }
        fs::write(path("step-8").join("notes.txt"), "of the user").unwrap();
        for name in ["step-4", "step-04", "step-12", ".step-3.removed"] {
            fs::create_dir(path(name)).unwrap();
        }
        remove_leftovers(run.path(), 10).unwrap();
        assert_eq!(steps(run.path()), [4, 8, 10, 12], "step-04, step-8 and step-12 are no leftovers of a removal");
        assert!(path("step-04").exists() && !path(".step-3.removed").exists());
    }

    #[test]
    fn non_finite_state_stops_the_run() {
        let error = FilesError::NotFinite { path: "state.safetensors".into(), tensor: "lm_head.weight".into() };
        let failure = Failure::from(describe_unsaved(7, error));
        assert_eq!(failure.exit, plimsoll_core::Exit::Stopped);
        assert!(failure.message.contains("step 7") && failure.message.contains("`lm_head.weight`"), "{failure}");
    }

    #[test]
    fn checkpoint_without_a_loss_reads_back() {
        let run = run_with(&[3]);
        let dir = run.path().join("checkpoints/step-3");
        let files = newest(run.path()).unwrap().0.unwrap().info.files;
        write_info(&dir, &CheckpointInfo { files, first_loss: f64::NAN, last_loss: f64::NAN, ..info(3) }).unwrap();
        let found = newest(run.path()).unwrap().0.unwrap().info;
        assert!(found.first_loss.is_nan() && found.last_loss.is_nan());
    }

    #[test]
    fn renamed_checkpoint_is_ignored() {
        let run = run_with(&[10, 20]);
        fs::rename(run.path().join("checkpoints/step-20"), run.path().join("checkpoints/step-30")).unwrap();
        let (found, warnings) = newest(run.path()).unwrap();
        assert_eq!((found.unwrap().info.step, warnings.len()), (10, 1));
    }

    #[test]
    fn older_layout_is_named_with_its_versions() {
        let run = run_with(&[10, 20]);
        let write = |step: u64, text: &str| {
            fs::write(run.path().join(format!("checkpoints/step-{step}/checkpoint.json")), text).unwrap();
        };
        let refusal = || newest(run.path()).map(|_| ()).unwrap_err();
        write(20, r#"{"version": 2, "step": 20}"#);
        // A whole checkpoint of this version is still used.
        let (found, warnings) = newest(run.path()).unwrap();
        assert_eq!(found.unwrap().info.step, 10);
        let expected = format!("step-20 is not whole: checkpoint.json has version 2, expected {VERSION}");
        assert!(warnings[0].ends_with(&expected), "{warnings:?}");
        write(10, r#"{"version": 1}"#);
        let expected = format!("an older layout (version 1, 2; this program reads version {VERSION})");
        assert!(refusal().message.ends_with(&expected), "{}", refusal());
        assert!(refusal().hints[0].starts_with("start a new run"), "{}", refusal());
        write(10, r#"{"version": 99}"#);
        assert!(refusal().message.contains("has another layout (version 2, 99; "), "{}", refusal());
        write(10, "{}");
        assert!(refusal().message.ends_with("no checkpoint is whole"), "{}", refusal());
    }

    #[test]
    fn flipped_bit_in_tensor_file_is_noticed() {
        let run = run_with(&[10, 20]);
        let file = run.path().join("checkpoints/step-20/state.safetensors");
        let intact = fs::read(&file).unwrap();
        for at in 0..intact.len() {
            let mut changed = intact.clone();
            changed[at] ^= 1 << (at % 8);
            fs::write(&file, changed).unwrap();
            let (found, warnings) = newest(run.path()).unwrap();
            assert_eq!(found.unwrap().info.step, 10, "byte {at}");
            assert!(warnings[0].contains("step-20 is not whole: state.safetensors: its checksum"), "{warnings:?}");
        }
    }

    /// Corrupts `checkpoint.json` at random: either its content is the same, or the previous checkpoint is used.
    #[test]
    fn corrupt_checkpoint_falls_back_to_previous() {
        let run = run_with(&[10, 20]);
        let file = run.path().join("checkpoints/step-20/checkpoint.json");
        let intact = fs::read(&file).unwrap();
        let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6);
        proptest!(|(changes in changes, cut in any::<prop::sample::Index>())| {
            let mut changed = intact.clone();
            for (at, byte) in changes {
                let at = at.index(changed.len());
                changed[at] = byte;
            }
            for text in [&changed[..], &intact[..cut.index(intact.len())]] {
                fs::write(&file, text).unwrap();
                let (found, warnings) = newest(run.path()).unwrap();
                let found = found.expect("step 10 is whole");
                prop_assert_eq!(CheckpointInfo { files: BTreeMap::new(), ..found.info.clone() }, info(found.info.step));
                prop_assert_eq!((found.info.step, warnings.len()), if warnings.is_empty() { (20, 0) } else { (10, 1) });
            }
        });
    }
}
