//! `plimsoll doctor`: checks this machine, its cluster, and a run, before the work.

use super::advice::recommendations;
use super::cluster;
use super::hub::with_hub_files;
use super::plan::refusal_for_command;
use super::rates::measure_in_child;
use super::ray::with_remote_devices;
use crate::args::DoctorArgs;
use crate::{command_line, output};
use plimsoll_core::{Exit, Failure};
use plimsoll_device::disk;
use plimsoll_train::files::MAX_SHARD_BYTES;
use plimsoll_train::planning::advice::Change;
use plimsoll_train::planning::plan;
use plimsoll_train::resolve::{HubNeed, RunRequest, process_bytes};
use plimsoll_train::session::start::check_new_run;
use plimsoll_watch::doctor::{PlanReadings, Readings, Report, RunReadings};
use plimsoll_watch::remedies::Setting;
use std::path::Path;

/// Prints the findings. Returns exit code 2 if one of them is an error.
///
/// # Errors
/// Flags of a run without a run file; a bug.
pub fn run(args: &DoctorArgs) -> Result<Exit, Failure> {
    args.check()?;
    // The machine is read first: planning keeps the processor busy.
    let machine = Readings::read();
    // Then the cluster: a run on it takes ports.
    let cluster = cluster::check();
    let run = args.run_file.as_deref().map(|run_file| read_run(args, run_file)).transpose()?;
    let report = Report::new(&Readings { cluster, run, ..machine });
    if args.json {
        output::print_json(&report.json())
    } else {
        output::print(&report.text())
    }
    Ok(report.exit())
}

/// Reads and plans the run of a run file. Everything that refuses the run becomes part of the result.
///
/// # Errors
/// A bug.
fn read_run(args: &DoctorArgs, run_file: &Path) -> Result<RunReadings, Failure> {
    let command = other_command("train", std::env::args());
    let all_gpus = Setting::of_key("run.devices", "cuda".to_owned());
    let on_all_gpus = command_line::with_settings(other_command("plan", std::env::args()).into_iter(), &[all_gpus]);
    let mut run = RunReadings {
        run_file: run_file.display().to_string(),
        train_command: command_line::shell_quoted(&command),
        all_gpus_command: command_line::shell_quoted(&on_all_gpus),
        failures: vec![],
        planned: None,
    };
    let request = args.build_request().and_then(|request| with_hub_files(request, HubNeed::Plan, false));
    match request.and_then(with_remote_devices) {
        Err(failure) => run.failures.push(failure),
        Ok(mut request) => {
            request.measure_rates = Some(measure_in_child);
            request.process_bytes = Some(process_bytes());
            run.failures = check_new_run(&request);
            match plan_run(&request, &command) {
                Ok(planned) => run.planned = Some(planned),
                // Most invalid models fail both.
                Err(failure) if run.failures.contains(&failure) => {}
                Err(failure) => run.failures.push(failure),
            }
        }
    }
    match run.failures.iter().find(|failure| failure.exit == Exit::Bug) {
        Some(bug) => Err(bug.clone()),
        None => Ok(run),
    }
}

/// Plans a run as `plimsoll plan --advise` does, and looks at its folder. `command` is the command that starts the run.
fn plan_run(request: &RunRequest, command: &[String]) -> Result<PlanReadings, Failure> {
    let plan = plan(request, false)?.outcome.plan;
    let folder = Path::new(&request.run.dir);
    let command_of = |change: &Change, settings: &[Setting]| command_of_change(command, change, settings);
    // Each plan would measure the links between the hosts again.
    let is_offered = |_: &Change| !request.devices().has_remote_devices();
    Ok(PlanReadings {
        recommendations: recommendations(request, &plan, is_offered, command_of),
        refusal: (!plan.fits).then(|| refusal_for_command(request, &plan, command, |_| None)),
        plan,
        is_writable: disk::is_writable(folder),
        disk_free_bytes: disk::free(folder),
        folder: request.run.dir.clone(),
        checkpoints_kept: request.train.keep,
        file_bytes_max: MAX_SHARD_BYTES,
    })
}

/// Returns the words of the command that applies a change to the run that `command` trains. Once the user has closed a
/// process, that is the plan, which shows whether the memory is free.
fn command_of_change(command: &[String], change: &Change, settings: &[Setting]) -> Vec<String> {
    let mut words = command.to_vec();
    if matches!(change, Change::CloseProcess(_)) {
        words[1] = "plan".to_owned();
    }
    command_line::with_settings(words.into_iter(), settings)
}

/// Returns the words of a command such as `plimsoll train`, with the run file and the settings of the doctor's command
/// `words`.
fn other_command(name: &str, words: impl Iterator<Item = String>) -> Vec<String> {
    let others = words.skip(2).filter(|word| word != "--json");
    ["plimsoll", name].map(str::to_owned).into_iter().chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_commands_keep_files_and_settings() {
        let words = ["/bin/plimsoll", "doctor", "--json", "doctor", "--set", "train.steps=2"].map(str::to_owned);
        let command = other_command("train", words.into_iter());
        assert_eq!(command, ["plimsoll", "train", "doctor", "--set", "train.steps=2"]);
    }
}
