//! `plimsoll train`: plans a run, shows the plan, trains and prints the summary.

use super::hub::with_hub_files;
use super::page_process::RunPage;
use super::plan::{refuse_or_prompt, refuse_preparation, title};
use super::rates::measure_in_child;
use super::ray::with_remote_devices;
use super::serve::{bind, needs_token};
use super::view_process::{ProgressDisplay, RunView};
use crate::args::{ProgressForm, TrainArgs};
use crate::output;
use crate::signals::{self, Notes, OnSignal};
use plimsoll_core::{DeviceKind, Exit, Failure, Record, RunStatus, format_count};
use plimsoll_serve::run_logs::RunLogs;
use plimsoll_serve::server::Server;
use plimsoll_train::config::{Length, RunConfig};
use plimsoll_train::data::TrainingData;
use plimsoll_train::fault_injection::Injection;
use plimsoll_train::resolve::{HubNeed, RunRequest, cpu_duty};
use plimsoll_train::session::outcome::Outcome;
use plimsoll_train::session::start::{Resumed, Run};
use plimsoll_watch::plan::{PlanView, table};
use plimsoll_watch::stopping::StopOutlook;
use plimsoll_watch::summary::{Sample, already_done, resume_command, summary};
use plimsoll_watch::terminal::{Watcher, for_stdout};
use std::io::{self, IsTerminal};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Plans and trains a run and prints its outcome.
///
/// # Errors
/// Invalid input, a plan that does not fit, or a failure that stops the run.
pub fn run(args: &TrainArgs) -> Result<Exit, Failure> {
    let form = checked_form(args)?;
    let server = args.serve.map(bind).transpose()?;
    let request = local_request(args, form)?;
    let injections = args.injections()?;
    let mut run = match args.plan()? {
        Some(plan) => Run::with_plan(request, &plan)?,
        None if args.resumes() => {
            let doubled_length = doubled_length(&request);
            match Run::resume(request)? {
                Resumed::Continue(run) => *run,
                Resumed::Done(outcome) => return print_already_done(args, &outcome, &injections, &doubled_length),
            }
        }
        None => Run::new(request)?,
    };
    run.inject_faults(injections)?;
    if args.no_save {
        run.save_nothing();
    }
    let prepared = run.prepared();
    if prepared.needs_fresh_process() && std::env::var_os(RESTARTED_VARIABLE).is_none() {
        return Err(restart_process());
    }
    if form.is_for_people() {
        let parts = &prepared.planned.assignments;
        let table = table(&PlanView {
            title: &title(&prepared.run, &prepared.resolved.model.config),
            plan: &prepared.planned.plan,
            specs: &parts.iter().map(|part| part.device.clone()).collect::<Vec<_>>(),
            tried: &parts[0].outcome.tried,
            allow: &prepared.run.memory.allow,
        });
        let threads = match &parts[0].device {
            device if device.kind == DeviceKind::Cpu => threads_summary(&prepared.run, device.threads),
            _ => String::new(),
        };
        output::print(&format!("{}{threads}{table}\n", data_summary("train", &prepared.train)));
    }
    if !prepared.planned.plan.fits {
        return refuse_or_prompt(&prepared.run, &prepared.planned.plan, form.is_for_people());
    }
    if let Some(passed) = prepared.passed_load_lines() {
        return Err(refuse_preparation(&prepared.run, &passed));
    }
    let simulated = prepared.planned.plan.devices.iter().any(|device| device.simulated);
    let mut logs = RunLogs::start(&prepared.log_request())?;
    // Until here a signal ends the program immediately, because there is nothing to save yet.
    let folder = (!args.no_save).then(|| prepared.run.run.dir.clone());
    let outlook = Arc::new(Mutex::new(StopOutlook::default()));
    let view = RunView::of((form == ProgressForm::Tui).then(|| PathBuf::from(&prepared.run.run.dir)));
    let page = served_page(args, server, PathBuf::from(&prepared.run.run.dir));
    let (view_to_close, page_to_close) = (view.clone(), page.clone());
    output::before_bug_report(move || {
        view_to_close.try_close();
        page_to_close.try_close();
    });
    let notes = if form == ProgressForm::None { Notes::OnTerminal } else { Notes::Always };
    let stop = signals::install(TrainSignals { outlook: Arc::clone(&outlook), folder, view: view.clone() }, notes)?;
    if args.stop_on_eof {
        signals::stop_on_eof(&stop)?;
    }
    let create: fn() -> Box<dyn Watcher> = match form {
        ProgressForm::Json => || for_stdout(true, false),
        ProgressForm::None => || for_stdout(false, true),
        ProgressForm::Line | ProgressForm::Tui => || for_stdout(false, false),
    };
    let mut display = ProgressDisplay::new(view.clone(), create);
    let mut observer = |record: &Record| {
        page.observe(view.is_open());
        observe(record, &outlook, &mut display, &mut logs);
    };
    let outcome = run.start(&mut observer, &stop);
    view.close();
    page.close();
    display.warn(logs.finish(outcome.as_ref().map(|outcome| &outcome.result)));
    let outcome = outcome?;
    Ok(print_outcome(args, &outcome, simulated))
}

/// Builds the request of the run, fetches its files of the hub, and connects it to its remote devices.
///
/// # Errors
/// An invalid run file or setting, or files or devices that are not available.
fn local_request(args: &TrainArgs, form: ProgressForm) -> Result<RunRequest, Failure> {
    let request = with_hub_files(args.build_request()?, HubNeed::Run, form == ProgressForm::None)?;
    let mut request = with_remote_devices(request)?;
    request.measure_rates = Some(measure_in_child);
    Ok(request)
}

/// Returns the form of the progress.
///
/// # Errors
/// The view is wanted, and standard input or output is no terminal, or `--stop-on-eof` reads standard input, too. Or the
/// view would cover the token of the page.
fn checked_form(args: &TrainArgs) -> Result<ProgressForm, Failure> {
    let form = args.progress();
    if form != ProgressForm::Tui {
        return Ok(form);
    }
    if args.stop_on_eof {
        return Err(Failure::input("--progress tui: the view and --stop-on-eof would both read standard input")
            .hint("leave one of them out"));
    }
    if let Some(Some(address)) = args.serve
        && needs_token(address)
    {
        return Err(Failure::input(format!("--progress tui: the view would cover the token that {address} needs"))
            .hint("--progress line, and in another terminal: plimsoll watch RUN_DIR")
            .hint("or serve on this machine only: --serve without an address"));
    }
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        return Err(Failure::input("--progress tui: standard input and output are no terminal")
            .hint("--progress line, and in a terminal: plimsoll watch RUN_DIR"));
    }
    Ok(form)
}

/// Returns the page of the run in `folder`, and prints its address: to standard output if text for people is printed
/// there, else to stderr. `server` is bound to it; `None` for no page.
fn served_page(args: &TrainArgs, server: Option<Server>, folder: PathBuf) -> RunPage {
    let announce: fn(&str) = match args.progress().is_for_people() {
        true => |text| output::print(&format!("{text}\n")),
        false => output::print_status,
    };
    server.map_or_else(RunPage::none, |server| RunPage::of(server, folder, announce))
}

/// Keeps what matters if the run is asked to stop, shows an event, and hands it to the logs of the run.
fn observe(record: &Record, outlook: &Mutex<StopOutlook>, display: &mut ProgressDisplay, logs: &mut RunLogs) {
    outlook.lock().unwrap_or_else(PoisonError::into_inner).update(&record.event, Instant::now());
    display.observe(record);
    display.warn(logs.observe(record));
}

/// The reaction of a run to signals.
struct TrainSignals {
    outlook: Arc<Mutex<StopOutlook>>,
    /// Folder of the run; `None` if it saves nothing.
    folder: Option<String>,
    /// The view, which hides messages until it is closed.
    view: RunView,
}

impl OnSignal for TrainSignals {
    fn finish(&self) -> Option<String> {
        let work = self.outlook.lock().unwrap_or_else(PoisonError::into_inner).work_left(Instant::now());
        (!self.view.is_open()).then_some(work)
    }

    fn end(&self) -> Option<String> {
        self.view.close();
        let outlook = self.outlook.lock().unwrap_or_else(PoisonError::into_inner);
        let resume = resume_command(self.folder.as_ref()?);
        Some(match outlook.newest_checkpoint() {
            Some(step) => format!("to resume from the newest checkpoint, of step {step}: {resume}"),
            None if outlook.has_started() => format!("there is no checkpoint yet; to start from step 0: {resume}"),
            None => "the run had not started yet; give the same command again".to_owned(),
        })
    }
}

/// Environment variable that marks a process started by [`restart_process`], so that it does not restart once more.
const RESTARTED_VARIABLE: &str = "PLIMSOLL_STARTED_AGAIN";

/// Runs the same command in place of this process. Returns only if that fails.
///
/// Tokenizing the data can take more than a load line, or leave this process with so much memory that the plan no longer
/// fits. The new process finds the tokens in the cache.
fn restart_process() -> Failure {
    let restart = |program| Command::new(program).args(std::env::args_os().skip(1)).env(RESTARTED_VARIABLE, "1").exec();
    let error = std::env::current_exe().map_or_else(|error| error, restart);
    Failure::bug(format!("the command cannot be restarted: {error}"))
}

/// Describes the CPU threads of the run and the share of time in which they compute.
fn threads_summary(run: &RunConfig, threads: u32) -> String {
    let pace = cpu_duty(run, threads);
    if pace == 1.0 {
        return format!("threads: {threads}\n");
    }
    let share = (pace * 100.0).round();
    format!(
        "threads: {threads}, computing {share} % of the time so that the machine stays usable (100 % with run.threads = {threads})\n"
    )
}

/// Describes a data set in two lines: its formats and its size, and its longest document.
fn data_summary(name: &str, data: &TrainingData) -> String {
    let (longest, place) = data.longest_document();
    let skipped = match data.skipped_documents() {
        0 => String::new(),
        skipped => format!(", {skipped} skipped (no token to predict)"),
    };
    let formats: Vec<&str> = data.formats().iter().map(|format| format.name()).collect();
    format!(
        "{name}: {}, {}, {} ({} labelled), {}{skipped}\n  longest: {}, {place}\n",
        formats.join(" and "),
        if data.has_pairs() {
            format_count(data.documents() / 2, "pair")
        } else {
            format_count(data.documents(), "document")
        },
        format_count(data.tokens(), "token"),
        data.labelled_tokens(),
        format_count(data.rows(), "row"),
        format_count(longest, "token")
    )
}

/// Returns the `KEY=VALUE` setting that makes a run twice as long as its run file says.
fn doubled_length(request: &RunConfig) -> String {
    match request.length() {
        Some(Length::Epochs(epochs)) => format!("train.epochs={}", 2.0 * epochs),
        Some(Length::Hours(hours)) => format!("train.hours={}", 2.0 * hours),
        Some(Length::Steps(steps)) => format!("train.steps={}", steps.saturating_mul(2)),
        None => "train.steps=N".to_owned(),
    }
}

/// Prints that a resumed run is already done, with the command that makes it longer.
///
/// # Errors
/// A fault is to be injected, although the run can no longer reach it.
fn print_already_done(
    args: &TrainArgs,
    outcome: &Outcome,
    injections: &[Injection],
    doubled_length: &str,
) -> Result<Exit, Failure> {
    let Outcome { result, folder, model, .. } = outcome;
    let folder = folder.display().to_string();
    let more = format!("{} --set {doubled_length}", resume_command(&folder));
    if let Some(injection) = injections.first() {
        let message = format!("{injection}: the run in {folder} is done, after {}", format_count(result.steps, "step"));
        return Err(Failure::input(message).hint(format!("for more steps: {more}")));
    }
    let form = args.progress();
    if form == ProgressForm::Json {
        output::print_json(&serde_json::to_string(result).expect("a result is plain data"));
    } else if form.is_for_people() {
        let model = model.as_ref().map(|path| path.display().to_string());
        output::print(&already_done(result, &folder, model.as_deref(), &more));
    }
    Ok(Exit::Done)
}

/// Prints the result of a run: as a summary or, with `--json`, as JSON.
fn print_outcome(args: &TrainArgs, outcome: &Outcome, simulated: bool) -> Exit {
    let folder = outcome.folder.display().to_string();
    let form = args.progress();
    if form == ProgressForm::Json {
        output::print_json(&serde_json::to_string(&outcome.result).expect("a result is plain data"));
    } else if form.is_for_people() {
        let sample = |sample: &plimsoll_train::inference::samples::Sample| Sample {
            prompt: sample.prompt.clone(),
            right_answer: sample.expected.clone(),
            answer: sample.answer.clone(),
        };
        let samples: Vec<Sample> = outcome.samples.iter().map(sample).collect();
        let model = outcome.model.as_ref().map(|path| path.display().to_string());
        output::print(&format!("\n{}", summary(&outcome.result, &samples, &folder, model.as_deref(), simulated)));
    }
    match outcome.result.status {
        RunStatus::Done => Exit::Done,
        RunStatus::Stopped => {
            if !form.is_for_people() {
                let message = format!("after step {}", outcome.result.steps);
                output::print_error(&Failure::stopped(message).hint(format!("to resume: {}", resume_command(&folder))));
            }
            Exit::Stopped
        }
    }
}
