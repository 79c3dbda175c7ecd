//! `plimsoll bench models`: plans several models, and trains those that fit with random weights on random tokens. Each
//! model trains in a process of its own, so that a failure or leftover memory does not affect the next one.

use super::hub::with_hub_files;
use super::model_training::{ModelInProgress, rest_hint};
use super::plan::refusal_for_command;
use crate::args::BenchModelsArgs;
use crate::command_line::shell_quoted;
use crate::{output, signals};
use plimsoll_core::{DeviceKind, Exit, Failure, ModelRow, ModelStatus, ModelsBench, Plan, RunResult, format_count};
use plimsoll_device::{private_file, regular_file};
use plimsoll_train::config::{RunConfig, setting};
use plimsoll_train::planning::{PlannedRun, plan};
use plimsoll_train::resolve::{HubNeed, resolve_devices};
use plimsoll_watch::models::table;
use plimsoll_watch::remedies::RemedySettings;
use plimsoll_watch::terminal::for_stderr;
use plimsoll_watch::text::seconds;
use std::env::temp_dir;
use std::fs;
use std::io::{BufWriter, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::Instant;

/// Plans and trains the models one after another and prints a table. A model that fails does not stop the others. After
/// a signal the model in progress finishes its step, and counts as not tried.
///
/// # Errors
/// An invalid setting or device, or a file that cannot be written. After all models: exit 2 if one failed, exit 3 if
/// none fits. Exit 4 after a signal.
pub fn run(args: &BenchModelsArgs) -> Result<Exit, Failure> {
    // An invalid setting or device affects every model, so it is reported once, before the first one.
    resolve_devices(&args.build_request(&args.models[0], Path::new("train.jsonl"), Path::new("run"), &[])?)?;
    let in_progress = ModelInProgress::default();
    signals::install(in_progress.clone(), signals::Notes::Always)?;
    let mut bench = ModelsBench { samples: args.samples, sequence: u64::from(args.sequence), models: Vec::new() };
    // The benchmark may take hours, so a file that cannot be written is reported at the start.
    write_json(args, &bench)?;
    for (done, model) in args.models.iter().enumerate() {
        let folder = private_file::temporary_folder().map_err(|error| {
            Failure::input(format!("cannot make a folder in {}: {error}", temp_dir().display())).hint("set TMPDIR")
        })?;
        in_progress.begin(model, folder.path().to_owned(), command_without(&args.models[..done]));
        output::print_status(&format!("{model}: planning"));
        let row = measure(args, model, folder.path(), &in_progress);
        if in_progress.is_stopping() && row.status != ModelStatus::Ran {
            break;
        }
        bench.models.push(row);
        write_json(args, &bench)?;
        if in_progress.is_stopping() {
            break;
        }
    }
    output::print(&table(&bench));
    outcome(args, &bench)
}

/// Returns the typed command without some models.
fn command_without(models: &[String]) -> String {
    let words = std::env::args().skip(1).filter(|word| !models.contains(word));
    shell_quoted(&std::iter::once("plimsoll".to_owned()).chain(words).collect::<Vec<_>>())
}

/// Returns [`Exit::Done`] if all models were tried, none failed, and one fits.
///
/// # Errors
/// Exit 4 if models are left, exit 2 if one failed, exit 3 if none fits.
fn outcome(args: &BenchModelsArgs, bench: &ModelsBench) -> Result<Exit, Failure> {
    let failed = bench.models.iter().filter(|row| row.status == ModelStatus::Failed).count();
    let (done, asked) = (bench.models.len(), args.models.len());
    if done < asked {
        let message = format!("{done} of {} tried", format_count(asked, "model"));
        return Err(Failure::stopped(message).hint(rest_hint(&command_without(&args.models[..done]))));
    }
    if failed > 0 {
        let message = format!("{failed} of {} failed", format_count(asked, "model"));
        return Err(Failure::input(message).hint("the table shows the reason; the other models are not affected"));
    }
    if !bench.models.iter().any(|row| row.fits) {
        let message =
            if asked == 1 { "the model does not fit".to_owned() } else { format!("none of {asked} models fits") };
        return Err(Failure::does_not_fit(message).hint("the table shows the remedies for each model"));
    }
    Ok(Exit::Done)
}

/// Writes the results as JSON to the file that `--json` names. Does nothing without that flag.
fn write_json(args: &BenchModelsArgs, bench: &ModelsBench) -> Result<(), Failure> {
    let Some(path) = &args.json else { return Ok(()) };
    let text = serde_json::to_string_pretty(bench).expect("rows are plain data");
    regular_file::write(path, (text + "\n").as_bytes())
        .map_err(|error| Failure::input(format!("cannot write {}: {error}", path.display())))
}

/// Plans and trains one model, and returns its row of the table. A failure becomes part of the row.
fn measure(args: &BenchModelsArgs, model: &str, folder: &Path, in_progress: &ModelInProgress) -> ModelRow {
    let mut row = ModelRow::new(model, model);
    if let Err(failure) = plan_and_train(args, model, folder, in_progress, &mut row) {
        (row.reason, row.hints) = (Some(failure.message), failure.hints);
    }
    row
}

/// Plans a model and trains it if it fits and the device is present. Fills in `row` as it goes, so that a failure
/// leaves the results up to then. After a signal it ends early.
fn plan_and_train(
    args: &BenchModelsArgs,
    model: &str,
    folder: &Path,
    in_progress: &ModelInProgress,
    row: &mut ModelRow,
) -> Result<(), Failure> {
    let (data, run_dir) = (folder.join("train.jsonl"), folder.join("run"));
    let file = with_hub_files(args.build_request(model, &data, &run_dir, &[])?, HubNeed::Plan, false)?;
    if let Some(preset) = &file.model.preset {
        row.resolved_model.clone_from(preset);
    }
    let PlannedRun { resolved, outcome: answer, devices } = plan(&file, false)?;
    let (plan, device) = (&answer.plan, &resolved.device);
    row.fits = plan.fits;
    row.parameters = Some(resolved.model.config.parameters());
    (row.device, row.simulated) = (Some(device.name.clone()), device.simulated());
    (row.budget_bytes, row.recipe) = (Some(device.budget), Some(plan.recipe.clone()));
    row.predicted_bytes = Some(plan.devices[0].peak_bytes);
    row.predicted_host_bytes = Some(plan.host.arena_bytes);
    if devices.len() > 1 {
        row.team = devices.iter().map(|device| device.name.clone()).collect();
    }
    if !plan.fits {
        row.status = ModelStatus::DoesNotFit;
        row.needs.clone_from(&plan.needs);
        // The remedies are for this model only, so their commands must not name the other models.
        let other = |word: &String| *word != row.model && args.models.contains(word);
        let words: Vec<String> = std::env::args().filter(|word| !other(word)).collect();
        let goes_on = || (!in_progress.is_stopping()).then_some(());
        return Err(refusal_for_command(&file, plan, &words, |remedy| {
            goes_on().and_then(|()| remedy_seconds(args, model, &data, remedy))
        }));
    }

    row.predicted_step_seconds = Some(plan.predicted.step_seconds);
    row.predicted_tokens_per_second = Some(plan.predicted.tokens_per_second);
    row.predicted_seconds = all_steps_seconds(args, &file, plan);
    if device.kind == DeviceKind::Paper {
        row.status = ModelStatus::Planned;
        return Ok(());
    }
    if in_progress.is_stopping() {
        return Ok(());
    }
    let steps = format_count(args.samples.div_ceil(file.batch_sequences()), "step");
    let time = row.predicted_seconds.map_or_else(String::new, seconds);
    output::print_status(&format!("{}: training {steps}, {time} predicted", row.model));
    let vocab = resolved.model.config.vocab;
    write_random_samples(&data, args.samples, u64::from(args.sequence), vocab)
        .map_err(|error| Failure::input(format!("cannot write {}: {error}", data.display())))?;
    train(&file, folder, in_progress, row)
}

/// Returns the predicted seconds of all steps of a model with a remedy; `None` if they are unknown.
fn remedy_seconds(args: &BenchModelsArgs, model: &str, data: &Path, remedy: &RemedySettings) -> Option<f64> {
    let settings: Vec<String> = remedy.settings.iter().map(|to| setting(to.key, &to.value)).collect();
    let file = args.build_request(model, data, &data.with_extension("run"), &settings).ok()?;
    let file = with_hub_files(file, HubNeed::Plan, false).ok()?;
    all_steps_seconds(args, &file, &plan(&file, false).ok()?.outcome.plan)
}

/// Returns the predicted seconds of all steps of a model; `None` if the plan does not fit.
fn all_steps_seconds(args: &BenchModelsArgs, file: &RunConfig, plan: &Plan) -> Option<f64> {
    plan.fits.then(|| plan.predicted.step_seconds * args.samples.div_ceil(file.batch_sequences()) as f64)
}

/// Writes the run file into `folder`, trains it in a process of its own, and copies the result into the row.
fn train(file: &RunConfig, folder: &Path, in_progress: &ModelInProgress, row: &mut ModelRow) -> Result<(), Failure> {
    let failed = |what: &str, error: std::io::Error| Failure::input(format!("cannot {what}: {error}"));
    let run_file = folder.join("run.toml");
    fs::write(&run_file, file.to_toml()).map_err(|error| failed("write the run file", error))?;
    let binary = std::env::current_exe().map_err(|error| failed("find this program", error))?;
    let start = Instant::now();
    let errors = folder.join("errors.txt");
    let error_file = fs::File::create(&errors).map_err(|error| failed("write a log", error))?;
    let mut command = Command::new(binary);
    command.arg("train").arg(&run_file).args(["--json", "--no-save", "--stop-on-eof"]);
    command.env("PLIMSOLL_TOKENS", folder.join("tokens")).stderr(error_file);
    let status = in_progress.train(&mut command, &mut *for_stderr()).map_err(|error| failed("start a run", error))?;
    if !status.success() {
        return Err(Failure::input(describe_exit(status, &regular_file::read_text(&errors).unwrap_or_default())));
    }
    let text = fs::read(folder.join("run/result.json")).map_err(|error| failed("read the result", error))?;
    let result: RunResult = serde_json::from_slice(&text)
        .map_err(|error| Failure::bug(format!("result.json of a run cannot be read: {error}")))?;
    row.status = ModelStatus::Ran;
    row.measured_seconds = Some(start.elapsed().as_secs_f64());
    row.recipe = Some(result.recipe);
    row.measured_step_seconds = Some(result.step_seconds.median);
    row.tokens_per_second = Some(file.train.batch_tokens as f64 / result.step_seconds.median);
    row.steps = Some(result.steps);
    row.recoveries = Some(result.recoveries.len() as u64);
    if let Some(memory) = result.memory.first() {
        (row.predicted_bytes, row.measured_bytes) = (Some(memory.predicted_bytes), memory.measured_bytes);
        row.over_load_line_bytes = memory.over_load_line_bytes;
    }
    Ok(())
}

/// Describes a failed run in one line: the exit code and its first error message, or the signal.
fn describe_exit(status: ExitStatus, stderr: &str) -> String {
    let line = stderr.lines().find_map(|line| line.strip_prefix("error: ").or(line.strip_prefix("stopped: ")));
    match (line, status.code(), status.signal()) {
        (Some(line), Some(code), _) => format!("exit {code}: {line}"),
        (None, Some(code), _) => format!("exit {code}"),
        (_, None, signal) => format!("ended by signal {}", signal.unwrap_or_default()),
    }
}

/// Writes `samples` sequences of `sequence` random tokens below `vocab` to a file. The same arguments give the same
/// file.
fn write_random_samples(path: &Path, samples: u64, sequence: u64, vocab: u64) -> std::io::Result<()> {
    let mut out = BufWriter::new(fs::File::create(path)?);
    let mut state = 0_u64;
    for _ in 0..samples {
        write!(out, "{{\"input_ids\":[")?;
        for place in 0..sequence {
            // splitmix64 of Steele, Lea and Flood.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let comma = if place == 0 { "" } else { "," };
            write!(out, "{comma}{}", (mixed >> 32) % vocab)?;
        }
        writeln!(out, "]}}")?;
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_run_is_described_in_one_line() {
        let status = |raw| ExitStatus::from_raw(raw);
        assert_eq!(describe_exit(status(3 << 8), "error: it does not fit\n  hint: a\n"), "exit 3: it does not fit");
        assert_eq!(describe_exit(status(1 << 8), ""), "exit 1");
        assert_eq!(describe_exit(status(9), "whatever"), "ended by signal 9");
    }
}
