//! The reference pass: before the first step, the log-probabilities of all labels that the run reads, under the initial weights
//! (`objective::reference`). Objectives over pairs of answers need one sum for each answer, those over completions the
//! values of all tokens.

use crate::config::Objective;
use crate::data::{Dataset, Rows, SourceRow};
use crate::engine::ScoredWeights;
use crate::events::EventLog;
use crate::objective::{ReferenceScores, fingerprint, needs_reference};
use crate::session::checkpoint;
use crate::session::context::RunContext;
use crate::session::interrupt::StepInterrupt;
use crate::session::training::Session;
use plimsoll_core::{Event, Failure};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Folder of the reference scores in the run folder.
const REFERENCE_FOLDER: &str = "reference";
/// Time between two events about the progress of reference scores.
const REFERENCE_LOG_PERIOD: Duration = Duration::from_secs(10);
/// Number of epochs from which on all rows count as read. More than one, because a mixture by weights repeats small sources
/// before it has read large ones.
const LISTED_EPOCHS_MAX: u64 = 4;

/// Training or evaluation data.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ScoredData {
    Train,
    Eval,
}

/// An open file of scores, and the rows that it lacks.
struct ReferenceWork {
    of: ScoredData,
    scores: ReferenceScores,
    /// The rows, in the order of the data.
    rows: Vec<SourceRow>,
}

impl Session {
    /// Completes the log-probabilities under the initial weights, with which the objective compares. Does nothing for other
    /// objectives. A run that is under way computes those that are missing with its initial weights, and then returns to
    /// its newest checkpoint. Returns false if `stop` became true meanwhile; the finished part is kept.
    pub(crate) fn complete_reference(&mut self, log: &mut EventLog, stop: &AtomicBool) -> Result<bool, StepInterrupt> {
        if !needs_reference(&self.context.run) || self.references.train.is_some() {
            return Ok(true);
        }
        let train = self.open_scores(ScoredData::Train)?;
        let eval = self.context.eval.is_some().then(|| self.open_scores(ScoredData::Eval)).transpose()?;
        let mut parts: Vec<ReferenceWork> = [Some(train), eval].into_iter().flatten().collect();
        let all_rows = parts.iter().map(|part| part.rows.len() as u64).sum();
        if all_rows > 0 {
            let checkpoint = if self.info.step > 0 { checkpoint::newest(&self.context.folder)?.0 } else { None };
            if checkpoint.is_some() {
                // Until the checkpoint is loaded again, no failure may save the initial weights as those of the last step.
                self.state_loaded = false;
                self.retry_with_recovery(log, |session| session.load_state(None))?;
            }
            let is_complete = self.compute_missing(&mut parts, all_rows, log, stop)?;
            if let Some(checkpoint) = checkpoint {
                let checkpoint = Arc::new(checkpoint);
                self.retry_with_recovery(log, |session| session.load_state(Some(&checkpoint)))?;
                self.state_loaded = true;
            }
            if !is_complete {
                return Ok(false);
            }
        }
        let mut scores = parts.into_iter().map(|part| part.scores);
        (self.references.train, self.references.eval) = (scores.next(), scores.next());
        Ok(true)
    }

    /// Opens the reference scores of training or evaluation data, and finds the rows of which they are missing.
    fn open_scores(&self, of: ScoredData) -> Result<ReferenceWork, Failure> {
        let RunContext { folder, run, data, eval, .. } = &self.context;
        let (name, rows, content) = match (of, eval) {
            (ScoredData::Eval, Some(eval)) => ("eval.scores", vec![eval.rows()], eval.content_sha256()),
            _ => ("train.scores", data.sources().iter().map(Dataset::rows).collect(), data.content_sha256()),
        };
        let fingerprint = fingerprint(run, content);
        let scores = ReferenceScores::open(&folder.join(REFERENCE_FOLDER), name, &fingerprint, &rows)?;
        let is_wanted = self.wanted_rows(of, &scores);
        let all =
            rows.iter().enumerate().flat_map(|(source, &rows)| (0..rows).map(move |row| SourceRow { source, row }));
        let missing = all.zip(is_wanted).filter(|(row, is_wanted)| *is_wanted && !scores.has(*row));
        Ok(ReferenceWork { of, rows: missing.map(|(row, _)| row).collect(), scores })
    }

    /// Returns for each row of the data of `scores`, over all sources, whether the run reads it.
    fn wanted_rows(&self, of: ScoredData, scores: &ReferenceScores) -> Vec<bool> {
        let all = scores.rows();
        let batches = &self.context.batches;
        let positions = match (of, self.info.steps) {
            (ScoredData::Train, Some(steps)) => steps
                .div_ceil(batches.steps_per_batch)
                .saturating_mul(batches.rows)
                .min(batches.row_limit.unwrap_or(u64::MAX)),
            _ => u64::MAX,
        };
        if positions >= LISTED_EPOCHS_MAX * all as u64 {
            return vec![true; all];
        }
        let order = self.context.data.order(batches.order);
        let mut is_wanted = vec![false; all];
        for position in 0..positions {
            is_wanted[scores.number(order.row(position)) as usize] = true;
        }
        is_wanted
    }

    /// Computes the scores of missing rows under the present weights, `all_rows` in all. Returns false if `stop` became true.
    fn compute_missing(
        &mut self,
        parts: &mut [ReferenceWork],
        all_rows: u64,
        log: &mut EventLog,
        stop: &AtomicBool,
    ) -> Result<bool, StepInterrupt> {
        let (start, mut logged, mut done) = (Instant::now(), Instant::now(), 0);
        let (data, eval) = (Arc::clone(&self.context.data), self.context.eval.clone());
        let batch = self.context.batches.rows;
        let mut buffer = Rows::new(batch, data.sequence());
        for ReferenceWork { of, scores, rows } in parts {
            for rows in rows.chunks(batch as usize) {
                if stop.load(Ordering::Relaxed) {
                    scores.sync()?;
                    return Ok(false);
                }
                match (*of, &eval) {
                    (ScoredData::Eval, Some(eval)) => eval.read(rows.iter().map(|row| row.row), &mut buffer)?,
                    _ => data.read(rows.iter().copied(), &mut buffer)?,
                }
                let begin = Instant::now();
                let found =
                    self.run_with_recovery(log, |session| session.team.score(&mut buffer, ScoredWeights::Present))?;
                thread::sleep(begin.elapsed().mul_f64(1.0 / self.context.cpu_duty - 1.0));
                for (index, &row) in rows.iter().enumerate() {
                    let values = match self.context.run.train.objective {
                        Objective::Grpo => buffer.labelled_values(index, &found),
                        Objective::Supervised | Objective::Dpo => buffer.sum_documents(index, |at| found[at]),
                    };
                    scores.push(row, &values)?;
                }
                done += rows.len() as u64;
                if logged.elapsed() >= REFERENCE_LOG_PERIOD || done == all_rows {
                    logged = Instant::now();
                    log.emit(Event::Reference { rows: done, all_rows, seconds: start.elapsed().as_secs_f64() })?;
                }
                self.poll_control_and_memory(log)?;
                self.thermal.pause_if_too_hot(&self.team, self.info.step, stop, log)?;
            }
            scores.sync()?;
        }
        Ok(true)
    }
}

/// Returns the reference scores of each of these rows; empty lists if there is no reference.
pub(super) fn read_reference(scores: Option<&ReferenceScores>, rows: &[SourceRow]) -> Result<Vec<Vec<f64>>, Failure> {
    rows.iter().map(|&row| scores.map_or(Ok(Vec::new()), |scores| scores.of(row))).collect()
}
