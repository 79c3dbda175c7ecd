//! `plimsoll train`: a run from its plan to its summary.

use super::plan::{refuse, title};
use super::ray::reached;
use crate::args::TrainArgs;
use crate::{say, signals};
use plimsoll_core::{DeviceKind, Exit, Failure, RunStatus, counted};
use plimsoll_train::config::{Length, RunFile};
use plimsoll_train::data::Dataset;
use plimsoll_train::fault_injection::Injection;
use plimsoll_train::resolve::pace;
use plimsoll_train::session::start::{Outcome, Resumed, Run};
use plimsoll_watch::plan::{PlanView, table};
use plimsoll_watch::summary::{Sample, done_already, resume_command, summary};
use plimsoll_watch::terminal::for_stdout;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Plans, runs, and says what came of it.
///
/// # Errors
/// What is wrong with the input, or does not fit, or stops the run.
pub fn run(args: &TrainArgs) -> Result<Exit, Failure> {
    let file = reached(args.resolve()?)?;
    let injections = args.injections()?;
    let mut run = match args.plan()? {
        Some(plan) => Run::following(file, &plan)?,
        None if args.resumes() => {
            let longer = longer(&file);
            match Run::resume(file)? {
                Resumed::Goes(run) => *run,
                Resumed::Done(outcome) => return tell_done(args, &outcome, &injections, &longer),
            }
        }
        None => Run::new(file)?,
    };
    run.rehearse(injections)?;
    if args.no_save {
        run.save_nothing();
    }
    let prepared = run.prepared();
    if !prepared.planned.plan.fits && prepared.left_over && std::env::var_os(AGAIN).is_none() {
        return Err(start_again());
    }
    if !args.json && !args.quiet {
        let parts = &prepared.planned.parts;
        let table = table(&PlanView {
            title: &title(&prepared.run, &prepared.resolved.model.config),
            plan: &prepared.planned.plan,
            specs: &parts.iter().map(|part| part.device.clone()).collect::<Vec<_>>(),
            tried: &parts[0].answer.tried,
            allow: &prepared.run.memory.allow,
        });
        let threads = match &parts[0].device {
            device if device.kind == DeviceKind::Cpu => threads_line(&prepared.run, device.threads),
            _ => String::new(),
        };
        say::answer(&format!("{}{threads}{table}\n", data_line("train", &prepared.train)));
    }
    if !prepared.planned.plan.fits {
        return refuse(&prepared.run, &prepared.planned.plan, !args.json && !args.quiet);
    }
    let simulated = prepared.planned.plan.devices.iter().any(|device| device.simulated);
    // Not earlier: until here nothing is lost when a signal ends the program at once.
    let stop = signals::install().map_err(|error| Failure::bug(format!("signals cannot be caught: {error}")))?;
    if args.stop_on_eof {
        signals::stop_on_eof(&stop);
    }
    let mut watcher = for_stdout(args.json, args.quiet);
    let outcome = run.start(&mut |record| watcher.see(record), &stop)?;
    Ok(tell(args, &outcome, simulated))
}

/// Set for a process that stands in for one whose start has left it with too much.
const AGAIN: &str = "PLIMSOLL_STARTED_AGAIN";

/// Starts over in a process of its own, which finds the tokens made: what has been planned to fit is not refused for what
/// making them has left behind. Comes back only where that cannot be done.
fn start_again() -> Failure {
    let again = |program| Command::new(program).args(std::env::args_os().skip(1)).env(AGAIN, "1").exec();
    let error = std::env::current_exe().map_or_else(|error| error, again);
    Failure::bug(format!("the command cannot be started again: {error}"))
}

/// How much of the processor the run takes.
fn threads_line(run: &RunFile, threads: u32) -> String {
    let pace = pace(run, threads);
    if pace == 1.0 {
        return format!("threads: {threads}\n");
    }
    let share = (pace * 100.0).round();
    format!(
        "threads: {threads}, computing {share} % of the time: the machine stays usable (run.threads = {threads}: all of it)\n"
    )
}

/// What is trained on, in two lines; the longest sample is known before anything starts.
fn data_line(what: &str, data: &Dataset) -> String {
    let (longest, place) = data.longest_document();
    let skipped = match data.skipped_documents() {
        0 => String::new(),
        skipped => format!(", {skipped} skipped: nothing to predict in them"),
    };
    format!(
        "{what}: {}, {} ({} labelled), {}{skipped}\n  longest: {}, {place}\n",
        counted(data.documents(), "document"),
        counted(data.tokens(), "token"),
        data.labelled_tokens(),
        counted(data.rows(), "row"),
        counted(longest, "token")
    )
}

/// The setting that makes a run twice as long as its run file says.
fn longer(file: &RunFile) -> String {
    match file.length() {
        Some(Length::Epochs(epochs)) => format!("train.epochs={}", 2.0 * epochs),
        Some(Length::Hours(hours)) => format!("train.hours={}", 2.0 * hours),
        Some(Length::Steps(steps)) => format!("train.steps={}", steps.saturating_mul(2)),
        None => "train.steps=N".to_owned(),
    }
}

/// Says that nothing is left to do of a run, and what would be more.
///
/// # Errors
/// A rehearsal of what can no longer happen.
fn tell_done(args: &TrainArgs, outcome: &Outcome, injections: &[Injection], longer: &str) -> Result<Exit, Failure> {
    let Outcome { result, folder, model, .. } = outcome;
    let folder = folder.display().to_string();
    let more = format!("{} --set {longer}", resume_command(&folder));
    if let Some(never) = injections.first() {
        let message = format!("{never}: the run in {folder} is done, after {}", counted(result.steps, "step"));
        return Err(Failure::input(message).hint(format!("for more of them: {more}")));
    }
    if args.json {
        say::answer(&format!("{}\n", serde_json::to_string(result).expect("a result is plain data")));
    } else if !args.quiet {
        let model = model.as_ref().map(|path| path.display().to_string());
        say::answer(&done_already(result, &folder, model.as_deref(), &more));
    }
    Ok(Exit::Done)
}

/// Says how the run ended: to a person, or to a program.
fn tell(args: &TrainArgs, outcome: &Outcome, simulated: bool) -> Exit {
    let folder = outcome.folder.display().to_string();
    if args.json {
        let result = serde_json::to_string(&outcome.result).expect("a result is plain data");
        say::answer(&format!("{result}\n"));
    } else if !args.quiet {
        let sample = |sample: &plimsoll_train::inference::samples::Sample| Sample {
            prompt: sample.prompt.clone(),
            expected: sample.expected.clone(),
            answer: sample.answer.clone(),
        };
        let samples: Vec<Sample> = outcome.samples.iter().map(sample).collect();
        let model = outcome.model.as_ref().map(|path| path.display().to_string());
        say::answer(&format!("\n{}", summary(&outcome.result, &samples, &folder, model.as_deref(), simulated)));
    }
    match outcome.result.status {
        RunStatus::Done => Exit::Done,
        RunStatus::Stopped => {
            if args.json || args.quiet {
                let message = format!("after step {}", outcome.result.steps);
                say::complain(&Failure::stopped(message).hint(format!("it goes on with: {}", resume_command(&folder))));
            }
            Exit::Stopped
        }
    }
}
