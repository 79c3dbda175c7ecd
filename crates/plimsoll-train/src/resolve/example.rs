//! The built-in example, `example:sums`: which devices it shows where nobody has named any, and how its files come to stand in
//! the run folder. What is in them is `data::sums`.

use super::devices::a_gpu_could_be_used;
use crate::config::{EXAMPLE_PREFIX, RunFile};
use crate::data::sums;
use plimsoll_core::{Budget, Bytes, Failure};
use plimsoll_device::probe::{Cpu, Memory};
use std::path::Path;

pub(crate) fn model_is_example(file: &RunFile) -> bool {
    file.model.path.as_deref().is_some_and(|path| path.starts_with(EXAMPLE_PREFIX))
}

/// What the built-in example shows where there is no GPU: two unequal devices at work, as fast as this machine may have
/// them beside each other, and with no more than the load line that was given. The paces are to each other as an RTX
/// 3070's to an RTX 3090's.
pub(crate) fn example_pair(file: &RunFile) -> String {
    const SLOWER: f64 = 0.57;
    let cores = (0.8 * Cpu::read().usable_cores()).min(1.0 + SLOWER);
    let pace = |share: f64| (100.0 * cores * share / (1.0 + SLOWER)).floor() / 100.0;
    let line = |mib| Budget::Amount(Bytes::mib(mib).min(file.memory.line().of(Memory::read().free)));
    format!("virtual:large={}@{},virtual:small={}@{}", line(48), pace(1.0), line(32), pace(SLOWER))
}

/// Writes the built-in example into the run folder, where the run file names it, and names its files
/// instead: from then on it is a run like any other.
///
/// # Errors
/// A folder that cannot be written.
pub fn write_example(file: &mut RunFile) -> Result<(), Failure> {
    let folder = Path::new(&file.run.dir).join("example");
    let inside = |name: &str| folder.join(name).to_string_lossy().into_owned();
    let is_example = |path: &String| path.starts_with(EXAMPLE_PREFIX);
    let mut named = false;
    if let Some(path) = file.model.path.as_mut().filter(|path| is_example(path)) {
        (*path, named) = (folder.to_string_lossy().into_owned(), true);
    }
    for (sources, name) in [(&mut file.data.train, "train.jsonl"), (&mut file.data.eval, "eval.jsonl")] {
        for source in sources.iter_mut().filter(|source| is_example(source)) {
            (*source, named) = (inside(name), true);
        }
    }
    if named && file.devices().devices.is_empty() && !a_gpu_could_be_used() {
        let host = file.devices().host.map_or(String::new(), |host| format!(",host={host}"));
        file.run.devices = example_pair(file) + &host;
    }
    if named {
        sums::write(&folder, file.train.seed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::setting;
    use crate::resolve::model::Model;

    #[test]
    fn the_example_becomes_files_of_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = RunFile::load(None, &[setting("run.dir", folder.path().to_str().unwrap())]).unwrap();
        let planned = Model::open(&file).unwrap().config;
        write_example(&mut file).unwrap();
        assert_eq!(Model::open(&file).unwrap().config, planned);
        for source in file.data.train.iter().chain(&file.data.eval) {
            assert!(Path::new(source).starts_with(folder.path()) && Path::new(source).is_file(), "{source}");
        }
        assert_eq!(u64::from(file.data.sequence), sums::SEQUENCE);
    }
}
