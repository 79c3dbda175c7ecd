//! `plimsoll train --example grpo` and `--example dpo`: each writes two run files and their data, and trains them one after the
//! other.

use crate::args::{Example, TrainArgs};
use crate::output;
use plimsoll_core::{Exit, Failure};
use plimsoll_train::data::addition_example::{write_careless_samples, write_example, write_pairs, write_prompts};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Seed of the data of an example.
const SEED: u64 = 1;

/// Writes an example of two runs into a new folder, trains the careless model in a process of its own, and continues as the
/// second run, which teaches it the carries.
///
/// # Errors
/// A folder that cannot be written, and a program that cannot be started.
pub fn run(args: &TrainArgs, example: Example) -> Result<Exit, Failure> {
    let folder = args.example_folder(example)?;
    let data = Path::new(&folder).join("example");
    write_example(&data, SEED)?;
    write_careless_samples(&data, SEED)?;
    let escaped = folder.replace('\\', "\\\\").replace('"', "\\\"");
    let place = |text: &str| text.replace("FOLDER", &escaped);
    let first = data.join("supervised.toml");
    write(&first, &place(include_str!("example_supervised.toml")))?;
    let (second, run_file, lesson) = match example {
        Example::Dpo => {
            write_pairs(&data, SEED)?;
            ("dpo.toml", include_str!("example_dpo.toml"), "right answers are preferred to those without carries")
        }
        Example::Grpo | Example::Sums => {
            write_prompts(&data, SEED)?;
            ("grpo.toml", include_str!("example_grpo.toml"), "rewards of right answers teach it the carries")
        }
    };
    let second = data.join(second);
    write(&second, &place(run_file))?;
    tell(args, "1 of 2: a small model learns to add, and then to forget the carries");
    let trained = command(args, &first, &args.device_settings())?.status().map_err(|error| start_failure(&error))?;
    if !trained.success() {
        // The process has told its reason.
        let ends = [Exit::Input, Exit::DoesNotFit, Exit::Stopped];
        return Ok(ends.into_iter().find(|exit| trained.code() == Some(*exit as i32)).unwrap_or(Exit::Bug));
    }
    tell(args, &format!("2 of 2: {lesson}"));
    Err(start_failure(&command(args, &second, &args.all_settings())?.exec()))
}

/// Returns the command that trains a run file with settings.
fn command(args: &TrainArgs, run_file: &Path, settings: &[String]) -> Result<Command, Failure> {
    let program = std::env::current_exe().map_err(|error| start_failure(&error))?;
    let mut command = Command::new(program);
    command.arg("train").arg(run_file).args(args.output_flags());
    for setting in settings {
        command.args(["--set", setting]);
    }
    Ok(command)
}

fn tell(args: &TrainArgs, text: &str) {
    if args.progress().is_for_people() {
        output::print(&format!("{text}\n"));
    }
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(|error| {
        Failure::input(format!("cannot write {}: {error}", path.display()))
            .hint("name a folder that can be written: --set run.dir=…")
    })
}

fn start_failure(error: &std::io::Error) -> Failure {
    Failure::bug(format!("the program cannot be started again: {error}"))
}
