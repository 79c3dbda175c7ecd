//! The built-in example, `example:sums`: the devices that it uses by default, and its files in the run folder. The contents of
//! the files are made in `data::addition_example`.

use super::RunRequest;
use super::gpus::has_usable_gpu;
use crate::config::{EXAMPLE_PREFIX, RunConfig};
use crate::data::addition_example;
use plimsoll_core::{Budget, Bytes, Failure};
use plimsoll_device::probe::{Cpu, Memory};
use std::path::Path;

/// Returns whether `model.path` names the built-in example, `example:sums`.
pub(crate) fn model_is_example(config: &RunConfig) -> bool {
    config.model.path.as_deref().is_some_and(|path| path.starts_with(EXAMPLE_PREFIX))
}

/// Returns the text of `run.devices` for the built-in example on a machine without a GPU: two virtual devices with the
/// speed ratio of an RTX 3070 and an RTX 3090. Neither has a higher load line (the most bytes that a device may hold)
/// than `memory.budget` gives.
///
/// Each computes on one thread. Together they use at most 70 % of the cores, and each at most 70 % of one. The rest is
/// for the main thread, for ops that take longer while both devices compute, and for threads that wait for each other.
/// A device without it would fall behind its pace, and the run would move work to the other.
pub(crate) fn example_devices(config: &RunConfig) -> String {
    const SLOWER_PACE: f64 = 0.57;
    const USED: f64 = 0.7;
    let cores = USED * Cpu::read().usable_cores().min(1.0 + SLOWER_PACE);
    let pace = |share: f64| (100.0 * cores * share / (1.0 + SLOWER_PACE)).floor() / 100.0;
    let line = |mib| Budget::Amount(Bytes::mib(mib).min(config.memory.device_budget().load_line(Memory::read().free)));
    format!("virtual:large={}@{},virtual:small={}@{}", line(48), pace(1.0), line(32), pace(SLOWER_PACE))
}

/// Does nothing unless the run names the built-in example. Otherwise writes its files into the run folder, and replaces
/// `example:sums` in the run by their paths. A run that names no devices gets virtual ones on a machine without a GPU.
///
/// # Errors
/// A folder that cannot be written.
pub fn write_example(run: &mut RunRequest) -> Result<(), Failure> {
    let config = &mut run.config;
    let folder = Path::new(&config.run.dir).join("example");
    let in_folder = |name: &str| folder.join(name).to_string_lossy().into_owned();
    let is_example = |path: &String| path.starts_with(EXAMPLE_PREFIX);
    let mut names_example = false;
    if let Some(path) = config.model.path.as_mut().filter(|path| is_example(path)) {
        (*path, names_example) = (folder.to_string_lossy().into_owned(), true);
    }
    for source in config.data.training_paths_mut().filter(|source| is_example(source)) {
        (*source, names_example) = (in_folder("train.jsonl"), true);
    }
    for source in config.data.eval.iter_mut().filter(|source| is_example(source)) {
        (*source, names_example) = (in_folder("eval.jsonl"), true);
    }
    if names_example && run.devices().devices.is_empty() && !has_usable_gpu() {
        let host = run.devices().host.map_or(String::new(), |host| format!(",host={host}"));
        run.run.devices = example_devices(run) + &host;
    }
    if names_example {
        addition_example::write_example(&folder, run.train.seed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::setting;
    use crate::resolve::model::Model;

    #[test]
    fn budget_of_example_devices_counts_as_used() {
        let note = |devices: &str, budget: &str| {
            let folder = tempfile::tempdir().unwrap();
            let settings = [("run.dir", folder.path().to_str().unwrap()), ("memory.budget", budget)];
            let mut settings = settings.map(|(key, value)| setting(key, value)).to_vec();
            settings.extend((!devices.is_empty()).then(|| setting("run.devices", devices)));
            let mut run = RunRequest::from(RunConfig::load(None, &settings).unwrap());
            write_example(&mut run).unwrap();
            run.unused_budget_note()
        };
        assert_eq!(note("", "30MiB"), None);
        let unused = note("virtual:a=20MiB@1", "15MiB").unwrap();
        assert_eq!(unused, "memory.budget = 15MiB has no effect: run.devices gives each device an amount of its own");
    }

    #[test]
    fn example_files_are_written_to_run_folder() {
        let folder = tempfile::tempdir().unwrap();
        let config = RunConfig::load(None, &[setting("run.dir", folder.path().to_str().unwrap())]).unwrap();
        let mut run = RunRequest::from(config);
        let planned = Model::open(&run).unwrap().config;
        write_example(&mut run).unwrap();
        assert_eq!(Model::open(&run).unwrap().config, planned);
        for source in run.data.train.iter().chain(&run.data.eval) {
            assert!(Path::new(source).starts_with(folder.path()) && Path::new(source).is_file(), "{source}");
        }
        assert_eq!(u64::from(run.data.sequence), addition_example::SEQUENCE);
    }
}
