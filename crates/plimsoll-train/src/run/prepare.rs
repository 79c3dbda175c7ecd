//! What a training run needs before its device is opened: model, data, and a plan with measured charges.

use crate::data::{self, DataSpec, Dataset, Loader};
use crate::resolve::{Resolved, Work, write_example};
use crate::run_file::RunFile;
use plimsoll_core::{Bytes, DeviceKind, Failure, Recipe};
use plimsoll_device::{calibration, process};
use plimsoll_plan::search::{Answer, plan_of, search};
use std::ops::ControlFlow;
use std::path::PathBuf;

/// Heap that a run takes beside its arena and its rows: thread stacks, event lines, growing tables.
/// Measured on runs of many sizes, with room.
const HEAP_BYTES: Bytes = Bytes::mib(6);

/// All that a run needs, before its device is opened.
pub struct Prepared {
    /// The run file, with the paths of the example's files where it is the example's.
    pub run: RunFile,
    /// Model and device; the device's charges are measured.
    pub resolved: Resolved,
    /// What is trained on.
    pub train: Dataset,
    /// What is evaluated on.
    pub eval: Option<Dataset>,
    /// The plan.
    pub answer: Answer,
}

/// Opens model and data and plans. `known` is the recipe of a checkpoint: it is used again where it
/// still fits.
///
/// # Errors
/// What is wrong with the run file, the model or the data. A plan that does not fit is none.
pub fn prepare(mut run: RunFile, known: Option<&Recipe>) -> Result<Prepared, Failure> {
    write_example(&mut run)?;
    let mut resolved = Resolved::new(&run)?;
    if resolved.device.kind != DeviceKind::Cpu {
        let message = format!("run.devices: this version does not run on `{}`", resolved.device.name);
        return Err(Failure::input(message).hint("plan for it with `plimsoll plan`, or run on `cpu`"));
    }
    resolved.model.check_weights(&run)?;
    let open = |patterns: &[String]| {
        let end_token = resolved.model.folder().map(data::end_token).transpose()?.flatten();
        let spec = DataSpec {
            patterns: patterns.to_vec(),
            format: run.data.format,
            sequence: u64::from(run.data.sequence),
            pack: run.data.pack,
            long: run.data.long,
            vocab: resolved.model.config.vocab,
            end_token,
        };
        let tokenizer = resolved.model.tokenizer();
        let threads = resolved.device.threads as usize;
        Dataset::open(&spec, tokenizer.as_deref(), &token_cache(), threads, &mut |_, _| ControlFlow::Continue(()))
    };
    let train = open(&run.data.train)?;
    let eval = if run.data.eval.is_empty() { None } else { Some(open(&run.data.eval)?) };
    resolved.device.charges = charges(run.batch_sequences(), u64::from(run.data.sequence));
    resolved.device.charges_measured = true;
    let question = resolved.question(&run, Work::Train)?;
    let again = known.map(|recipe| plan_of(&question, recipe)).filter(|answer| answer.plan.fits);
    let answer = again.unwrap_or_else(|| search(&question));
    Ok(Prepared { run, resolved, train, eval, answer })
}

/// Bytes of the process outside the arena, once data and tokenizer are open: what it holds now, the
/// rows of two steps, and heap.
pub fn charges(rows: u64, sequence: u64) -> Bytes {
    process::resident().unwrap_or(Bytes::mib(16)) + Loader::bytes(rows, sequence) + HEAP_BYTES
}

/// Where tokens are kept between runs: beside the calibration, or in the system's folder for files
/// that may go.
pub fn token_cache() -> PathBuf {
    calibration::folder().unwrap_or_else(|| std::env::temp_dir().join("plimsoll")).join("tokens")
}
