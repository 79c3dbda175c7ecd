//! Checkpoints: what a run needs to go on as if it had never stopped.
//!
//! `checkpoints/step-N/` holds `state.safetensors` (weights and optimizer state) and
//! `checkpoint.json`. It is written aside, synced and renamed: a folder of that name is whole, unless
//! the disk lost something afterwards, which reading notices.

use crate::files::{FilesError, MAX_SHARD_BYTES, WeightFiles, WeightWriter, atomic};
use crate::session::engine::Engine;
use crate::session::spaces::{Stored, Storing};
use crate::session::trouble::Trouble;
use crate::team::Team;
use plimsoll_core::{Algorithms, Bytes, DType, Failure, Member, Plan, Recipe, Sharing};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The version of `checkpoint.json`.
const VERSION: u32 = 2;

/// What a checkpoint says beside its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointInfo {
    /// Changes when a field changes its meaning.
    pub version: u32,
    /// Steps done.
    pub step: u64,
    /// Steps in all, where the run file says so.
    pub steps: Option<u64>,
    /// Seconds of training so far.
    pub elapsed_seconds: f64,
    /// Loss of the first step.
    pub first_loss: f64,
    /// Loss of the last step done.
    pub last_loss: f64,
    /// The choices that the run was made with; used again, so that the bits stay the same.
    pub recipe: Recipe,
    /// How a team shared the work; none for one device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing: Option<Sharing>,
    /// What each device of the team did, in the order of ranks; used again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub team: Vec<Member>,
    /// Threads that computed; as many are used again.
    pub threads: u32,
    /// What the plan took the process to hold outside its arena. Measured once for the whole run: the
    /// measure wavers, and a run must not be planned anew because of that.
    pub charges_bytes: Bytes,
    /// What the products of a GPU are done with; used again, so that the bits stay the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithms: Option<Algorithms>,
    /// The arithmetic.
    pub precision: DType,
    /// Rows of the data; another number is other data.
    pub rows: u64,
    /// Labelled tokens of the data.
    pub labelled_tokens: u64,
    /// SHA-256 of the data's tokens and labels.
    pub data: String,
    /// The files of the tensors and their sizes. Set by `write`.
    pub files: BTreeMap<String, Bytes>,
}

impl CheckpointInfo {
    /// The version that this program writes.
    pub const VERSION: u32 = VERSION;

    /// The same of another plan: what is written down from now on.
    pub(crate) fn goes_by(&mut self, plan: &Plan, charges_bytes: Bytes) {
        self.recipe = plan.recipe.clone();
        (self.sharing, self.team) = (plan.sharing, plan.team.clone());
        (self.algorithms, self.charges_bytes) = (plan.algorithms.clone(), charges_bytes);
    }

    /// Whether a run can have written this: what is believed is safe to compute with.
    fn can_be(&self) -> bool {
        (1..=i64::MAX as u64).contains(&self.step)
            && self.elapsed_seconds >= 0.0
            && self.threads >= 1
            && self.charges_bytes < Bytes::gib(1 << 20)
    }
}

/// A checkpoint that was found whole.
pub struct Checkpoint {
    /// Its folder.
    pub path: PathBuf,
    /// What it says.
    pub info: CheckpointInfo,
    /// Its tensors.
    pub tensors: WeightFiles,
}

/// The newest whole checkpoint of a run folder, and a line for each newer one that is not whole. None
/// where there never was one.
///
/// # Errors
/// There are checkpoints, but none is whole: work would be lost silently if the run began anew.
pub fn newest(run_dir: &Path) -> Result<(Option<Checkpoint>, Vec<String>), Failure> {
    let mut warnings = Vec::new();
    for (_, path) in folders(run_dir).into_iter().rev() {
        match read(&path) {
            Ok(checkpoint) => return Ok((Some(checkpoint), warnings)),
            Err(problem) => warnings.push(format!("{} is not whole: {problem}", path.display())),
        }
    }
    if warnings.is_empty() {
        return Ok((None, warnings));
    }
    let message = format!("{}: no checkpoint is whole", run_dir.display());
    let failure = warnings.into_iter().fold(Failure::input(message), Failure::hint);
    Err(failure.hint("put one back from a copy; or take these away to begin from the start"))
}

fn read(path: &Path) -> Result<Checkpoint, String> {
    let text = fs::read(path.join("checkpoint.json")).map_err(|e| format!("checkpoint.json: {e}"))?;
    let info: CheckpointInfo = serde_json::from_slice(&text).map_err(|e| format!("checkpoint.json: {e}"))?;
    if info.version != VERSION {
        return Err(format!("version {} is not {VERSION}", info.version));
    }
    if !info.can_be() || path.file_name().is_none_or(|name| name != &*format!("step-{}", info.step)) {
        return Err("checkpoint.json says what cannot be".to_owned());
    }
    for (name, &bytes) in &info.files {
        let found = fs::metadata(path.join(name)).map_err(|e| format!("{name}: {e}"))?.len();
        if found != bytes.0 {
            return Err(format!("{name} has {found} bytes, not {}", bytes.0));
        }
    }
    let files = info.files.keys().filter(|name| name.ends_with(".safetensors")).map(|name| path.join(name)).collect();
    let tensors = WeightFiles::open_files(files).map_err(|e| e.to_string())?;
    Ok(Checkpoint { path: path.to_owned(), info, tensors })
}

/// Checkpoint folders by step, oldest first.
fn folders(run_dir: &Path) -> Vec<(u64, PathBuf)> {
    let mut found: Vec<(u64, PathBuf)> = fs::read_dir(run_dir.join("checkpoints"))
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let step = path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()?;
            Some((step, path))
        })
        .collect();
    found.sort();
    found
}

/// Writes a checkpoint, then takes away all but the `keep` newest. Gives its folder.
pub(crate) fn write(run_dir: &Path, info: &CheckpointInfo, team: &mut Team, keep: u32) -> Result<PathBuf, Trouble> {
    let path = run_dir.join("checkpoints").join(format!("step-{}", info.step));
    atomic::write_dir(&path, |dir| -> Result<(), Trouble> {
        let mut writer = WeightWriter::create(dir, "state", &team.files("checkpoint"), MAX_SHARD_BYTES)?;
        team.store("checkpoint", &mut Storing(&mut writer))?;
        writer.finish()?;
        let info = CheckpointInfo { files: sizes(dir)?, ..info.clone() };
        let text = serde_json::to_vec_pretty(&info).expect("plain data has a JSON form");
        atomic::write_file(&dir.join("checkpoint.json"), &text)?;
        Ok(())
    })?;
    prune(run_dir, info.step, keep)?;
    Ok(path)
}

/// Every file in a folder with its size.
fn sizes(dir: &Path) -> Result<BTreeMap<String, Bytes>, FilesError> {
    let failed = |e| FilesError::io(dir, "list", e);
    let mut sizes = BTreeMap::new();
    for file in fs::read_dir(dir).map_err(failed)? {
        let file = file.map_err(failed)?;
        sizes.insert(file.file_name().to_string_lossy().into_owned(), Bytes(file.metadata().map_err(failed)?.len()));
    }
    Ok(sizes)
}

/// Takes away what is older than the `keep` newest checkpoints up to `step`, and what a killed save
/// left. Later steps do not count: they are not whole, or this run would have gone on from them.
fn prune(run_dir: &Path, step: u64, keep: u32) -> Result<(), FilesError> {
    let up_to_now = folders(run_dir).into_iter().filter(|(of, _)| *of <= step).map(|(_, path)| path);
    let left_aside = atomic::left_aside(&run_dir.join("checkpoints"));
    for old in up_to_now.rev().skip(keep as usize).chain(left_aside) {
        fs::remove_dir_all(&old).map_err(|e| FilesError::io(&old, "remove", e))?;
    }
    Ok(())
}

/// Puts a checkpoint's tensors into the arena.
pub(crate) fn restore(checkpoint: &Checkpoint, engine: &mut Engine) -> Result<(), Trouble> {
    for wanted in engine.files("restore") {
        let entry = checkpoint.tensors.entry(&wanted.name);
        if entry.is_none_or(|e| e.shape != wanted.shape || e.dtype() != Some(wanted.dtype)) {
            let message = format!("{}: tensor `{}` is not what this run needs", checkpoint.path.display(), wanted.name);
            let failure = Failure::input(message);
            return Err(failure.hint("the run file or the model was changed after the checkpoint was written").into());
        }
    }
    engine.move_files("restore", &mut Stored(&checkpoint.tensors))?;
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
            recipe: Recipe::on_device(2, vec![RecomputeLevel::Nothing; 2]),
            sharing: None,
            team: vec![],
            threads: 2,
            charges_bytes: Bytes::mib(14),
            algorithms: None,
            precision: DType::F32,
            rows: 96,
            labelled_tokens: 2859,
            data: "0f".repeat(32),
            files: BTreeMap::new(),
        }
    }

    /// A run folder with whole checkpoints of these steps, whose only tensor is empty of meaning.
    fn run_with(steps: &[u64]) -> tempfile::TempDir {
        let run = tempfile::tempdir().unwrap();
        for &step in steps {
            let dir = run.path().join(format!("checkpoints/step-{step}"));
            fs::create_dir_all(&dir).unwrap();
            let tensors = [StoredTensor { name: "a".into(), dtype: DType::F32, shape: vec![2] }];
            let mut writer = WeightWriter::create(&dir, "state", &tensors, MAX_SHARD_BYTES).unwrap();
            writer.write("a", &[0; 8]).unwrap();
            writer.finish().unwrap();
            let info = CheckpointInfo { files: sizes(&dir).unwrap(), ..info(step) };
            fs::write(dir.join("checkpoint.json"), serde_json::to_vec_pretty(&info).unwrap()).unwrap();
        }
        run
    }

    fn steps(run: &Path) -> Vec<u64> {
        folders(run).into_iter().map(|(step, _)| step).collect()
    }

    #[test]
    fn the_newest_kept_are_those_up_to_now_and_what_a_kill_left_goes() {
        let run = run_with(&[8, 9, 10, 11, 100]);
        fs::create_dir(run.path().join("checkpoints/.step-12.partial")).unwrap();
        prune(run.path(), 11, 2).unwrap();
        assert_eq!(steps(run.path()), [10, 11, 100]);
        assert!(!run.path().join("checkpoints/.step-12.partial").exists());
    }

    #[test]
    fn a_checkpoint_under_another_name_is_not_believed() {
        let run = run_with(&[10, 20]);
        fs::rename(run.path().join("checkpoints/step-20"), run.path().join("checkpoints/step-30")).unwrap();
        let (found, warnings) = newest(run.path()).unwrap();
        assert_eq!((found.unwrap().info.step, warnings.len()), (10, 1));
    }

    /// Whatever a disk made of `checkpoint.json`: it is believed only where it can be, else the one before is taken.
    #[test]
    fn any_checkpoint_is_read_or_gives_way() {
        let run = run_with(&[10, 20]);
        let file = run.path().join("checkpoints/step-20/checkpoint.json");
        let whole = fs::read(&file).unwrap();
        let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6);
        proptest!(|(changes in changes, cut in any::<prop::sample::Index>())| {
            let mut changed = whole.clone();
            for (at, byte) in changes {
                let at = at.index(changed.len());
                changed[at] = byte;
            }
            for text in [&changed[..], &whole[..cut.index(whole.len())]] {
                fs::write(&file, text).unwrap();
                let (found, warnings) = newest(run.path()).unwrap();
                let found = found.expect("step 10 is whole");
                prop_assert!(found.info.can_be());
                prop_assert_eq!((found.info.step, warnings.len()), if warnings.is_empty() { (20, 0) } else { (10, 1) });
            }
        });
    }
}
