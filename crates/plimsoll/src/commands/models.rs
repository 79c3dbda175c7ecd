//! `plimsoll bench models`: plans several models, and trains those that fit with random weights on random tokens. Each
//! model trains in a process of its own, so that a failure or leftover memory does not affect the next one.

use super::plan::refusal_for_command;
use crate::args::BenchModelsArgs;
use crate::output;
use crate::signals::{self, SignalTexts};
use plimsoll_core::{DeviceKind, Exit, Failure, ModelRow, ModelStatus, ModelsBench, RunResult, format_count};
use plimsoll_device::private_file;
use plimsoll_program::models::preset_of_size;
use plimsoll_train::config::RunConfig;
use plimsoll_train::planning::{PlannedRun, plan};
use plimsoll_train::resolve::resolve_devices;
use plimsoll_watch::models::table;
use std::env::temp_dir;
use std::fs;
use std::io::{BufWriter, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Plans and trains the models one after another and prints a table. A model that fails does not stop the others.
///
/// # Errors
/// An invalid setting or device, or a file that cannot be written. After all models: exit 2 if one failed, exit 3 if
/// none fits.
pub fn run(args: &BenchModelsArgs) -> Result<Exit, Failure> {
    // An invalid setting or device affects every model, so it is reported once, before the first one.
    resolve_devices(&args.build_request(&args.models[0], Path::new("train.jsonl"), Path::new("run"))?)?;
    let stop = signals::install(SignalTexts::new("this model is finished", false))?;
    let mut bench = ModelsBench { samples: args.samples, sequence: u64::from(args.sequence), models: Vec::new() };
    // The benchmark may take hours, so a file that cannot be written is reported at the start.
    write_json(args, &bench)?;
    for model in &args.models {
        let folder = private_file::temporary_folder().map_err(|error| {
            Failure::input(format!("cannot make a folder in {}: {error}", temp_dir().display())).hint("set TMPDIR")
        })?;
        output::print_progress(model);
        bench.models.push(measure(args, model, folder.path()));
        write_json(args, &bench)?;
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    output::print(&table(&bench));
    let failed = bench.models.iter().filter(|row| row.status == ModelStatus::Failed).count();
    let (done, asked) = (bench.models.len(), args.models.len());
    if done < asked {
        let rest = args.models[done..].join(" ");
        let message = format!("{done} of {} tried", format_count(asked, "model"));
        return Err(Failure::stopped(message).hint(format!("for the others: plimsoll bench models {rest}")));
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
    fs::write(path, text + "\n").map_err(|error| Failure::input(format!("cannot write {}: {error}", path.display())))
}

/// Plans and trains one model, and returns its row of the table. A failure becomes part of the row.
fn measure(args: &BenchModelsArgs, model: &str, folder: &Path) -> ModelRow {
    let resolved_model = preset_of_size(model).unwrap_or(model);
    let mut row = ModelRow::new(model, resolved_model);
    if let Err(failure) = plan_and_train(args, resolved_model, folder, &mut row) {
        (row.reason, row.hints) = (Some(failure.message), failure.hints);
    }
    row
}

/// Plans a model and trains it if it fits and the device is present. Fills in `row` as it goes, so that a failure
/// leaves the results up to then.
fn plan_and_train(args: &BenchModelsArgs, model: &str, folder: &Path, row: &mut ModelRow) -> Result<(), Failure> {
    let data = folder.join("train.jsonl");
    let file = args.build_request(model, &data, &folder.join("run"))?;
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
        return Err(refusal_for_command(
            &file,
            plan,
            &std::env::args().filter(|word| !other(word)).collect::<Vec<_>>(),
        ));
    }

    row.predicted_step_seconds = Some(plan.predicted.step_seconds);
    row.predicted_tokens_per_second = Some(plan.predicted.tokens_per_second);
    row.predicted_seconds = Some(plan.predicted.step_seconds * args.samples.div_ceil(file.batch_sequences()) as f64);
    if device.kind == DeviceKind::Paper {
        row.status = ModelStatus::Planned;
        return Ok(());
    }
    let vocab = resolved.model.config.vocab;
    write_random_samples(&data, args.samples, u64::from(args.sequence), vocab)
        .map_err(|error| Failure::input(format!("cannot write {}: {error}", data.display())))?;
    train(&file, folder, row)
}

/// Writes the run file into `folder`, trains it in a process of its own, and copies the result into the row.
fn train(file: &RunConfig, folder: &Path, row: &mut ModelRow) -> Result<(), Failure> {
    let failed = |what: &str, error: std::io::Error| Failure::input(format!("cannot {what}: {error}"));
    let run_file = folder.join("run.toml");
    fs::write(&run_file, file.to_toml()).map_err(|error| failed("write the run file", error))?;
    let binary = std::env::current_exe().map_err(|error| failed("find this program", error))?;
    let start = Instant::now();
    let output = Command::new(binary)
        .arg("train")
        .arg(&run_file)
        .args(["--quiet", "--no-save"])
        .env("PLIMSOLL_TOKENS", folder.join("tokens"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .map_err(|error| failed("start a run", error))?;
    if !output.status.success() {
        return Err(Failure::input(describe_exit(output.status, &String::from_utf8_lossy(&output.stderr))));
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
