//! The loss of a model on data, planned first.

use super::{open_engine, plan_work};
use crate::config::LongSamples;
use crate::data::Dataset;
use crate::engine::EvaluationSums;
use crate::engine::evaluation::{EvaluationSlice, evaluate_slice};
use crate::planning::prepare::open_dataset;
use crate::resolve::{Model, Resolved, RunRequest, Workload};
use plimsoll_core::Failure;
use plimsoll_plan::search::PlanOutcome;
use serde::Serialize;

/// Largest number of positions per row in an evaluation for which the user gives no length. Rows as long as a model's
/// context could need too much memory.
const SEQUENCE_MAX: u64 = 4096;
/// Largest number of sequences per evaluation batch.
const MAX_BATCH_SEQUENCES: u64 = 16;

/// The loss of a model on evaluation data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EvaluationLoss {
    /// Mean negative log-likelihood per labelled token, in nats.
    pub loss: f64,
    /// Perplexity: e to the power of the loss.
    pub perplexity: f64,
    /// Number of labelled tokens.
    pub tokens: u64,
}

/// An evaluation that is planned and ready to run.
pub struct PlannedEvaluation {
    request: RunRequest,
    resolved: Resolved,
    data: Dataset,
    outcome: PlanOutcome,
}

impl PlannedEvaluation {
    /// Plans the evaluation of the run file's model on its evaluation data. Each sample begins a new row of `sequence`
    /// tokens. With `None`, rows are as long as the longest sample, at most the model's context and `SEQUENCE_MAX`.
    ///
    /// # Errors
    /// An invalid model, invalid data, or devices that cannot be used.
    pub fn new(mut request: RunRequest, sequence: Option<u32>) -> Result<PlannedEvaluation, Failure> {
        let model = Model::open(&request)?;
        model.check_weights(&request)?;
        (request.data.pack, request.data.long) = (false, LongSamples::Split);
        let longest_row = model.config.max_positions.min(SEQUENCE_MAX) as u32;
        request.data.sequence = sequence.unwrap_or(longest_row);
        request.train.batch_tokens = u64::from(request.data.sequence);
        if sequence.is_none() {
            // Reading the data yields the longest sample. Opening it again below uses the token cache.
            let (longest, _) = open_dataset(&request, &model, &request.data.eval, 1)?.longest_document();
            request.data.sequence = longest_row.min((longest.max(2) - 1).try_into().unwrap_or(longest_row));
        }
        let mut resolved = Resolved::for_run(&request, model, Workload::Evaluate)?;
        let data = open_dataset(&request, &resolved.model, &request.data.eval, resolved.device.threads as usize)?;
        request.train.batch_tokens = u64::from(request.data.sequence) * data.rows().clamp(1, MAX_BATCH_SEQUENCES);
        let outcome = plan_work(&request, &mut resolved, Workload::Evaluate)?;
        Ok(PlannedEvaluation { request, resolved, data, outcome })
    }

    /// Returns the request, its resolved model and device, and the plan.
    pub fn plan(&self) -> (&RunRequest, &Resolved, &PlanOutcome) {
        (&self.request, &self.resolved, &self.outcome)
    }

    /// Evaluates all samples.
    ///
    /// # Errors
    /// A device that fails, or a model or data that can no longer be read.
    pub fn run(self) -> Result<EvaluationLoss, Failure> {
        let mut engine = open_engine(&self.request, &self.resolved, self.outcome)?;
        let slice = EvaluationSlice { rows: 0..self.data.rows(), micro_batch: engine.recipe().micro_batch };
        let sums: EvaluationSums = evaluate_slice(&mut engine, &self.data, &slice, 0)?;
        Ok(EvaluationLoss { loss: sums.loss(), perplexity: sums.loss().exp(), tokens: sums.tokens })
    }
}
