//! The number of sequences that a generation computes at once: as many as the load line has room for.

use super::planner::Planner;
use super::request::plan_request;
use crate::resolve::{Resolved, Workload};
use plimsoll_core::{DType, Failure, Plan};
use plimsoll_plan::search::{PlanOutcome, PlanRequest, plan_recipe, search_if_fits};
use plimsoll_program::models::decoder::Generation;
use std::sync::Arc;

/// A plan for several sequences at once.
pub(crate) struct PlannedSequences {
    /// Number of sequences.
    pub count: u64,
    /// The plan.
    pub outcome: PlanOutcome,
}

impl Planner<'_> {
    /// Plans a generation of the largest number of sequences at once that fits, at most `generation.slots`. `single` is
    /// the plan for one sequence on the device of `resolved`. More sequences take the same lossy rungs, and offload only
    /// if `single` does. Returns `None` if no larger number fits.
    ///
    /// # Errors
    /// Those of [`Planner::plan_work`].
    pub(crate) fn plan_sequences(
        &self,
        resolved: &Resolved,
        single: &PlanOutcome,
        generation: Generation,
    ) -> Result<Option<PlannedSequences>, Failure> {
        let plan = |count: u64| self.sequences_if_fit(resolved, single, Generation { slots: count, ..generation });
        let most = generation.slots;
        if most < 2 {
            return Ok(None);
        }
        if let Some(outcome) = plan(most)? {
            return Ok(Some(PlannedSequences { count: most, outcome }));
        }
        let (mut fits, mut exceeds, mut best) = (1, most, None);
        while exceeds - fits > 1 {
            let count = u64::midpoint(fits, exceeds);
            match plan(count)? {
                Some(outcome) => (fits, best) = (count, Some(PlannedSequences { count, outcome })),
                None => exceeds = count,
            }
        }
        Ok(best)
    }

    /// Plans a generation of `generation.slots` sequences as [`Planner::plan_sequences`] does; `None` if it does not fit.
    fn sequences_if_fit(
        &self,
        resolved: &Resolved,
        single: &PlanOutcome,
        generation: Generation,
    ) -> Result<Option<PlanOutcome>, Failure> {
        let request = self.sequences_request(resolved, single.precision, generation)?;
        let outcome = if single.plan.recipe.offload.is_nothing() {
            Some(plan_recipe(&request, &single.plan.recipe))
        } else {
            search_if_fits(&request, &Arc::default())
        };
        let same_results =
            |outcome: &PlanOutcome| outcome.plan.fits && outcome.plan.recipe.rungs == single.plan.recipe.rungs;
        let mut outcome = outcome.filter(same_results);
        if let Some(outcome) = &mut outcome {
            outcome.plan.fallback.clone_from(&single.plan.fallback);
        }
        Ok(outcome)
    }

    /// Plans a generation of `generation.slots` sequences with the recipe of `plan`, a plan for more that a device refused.
    ///
    /// # Errors
    /// Those of [`Planner::plan_work`].
    pub(crate) fn plan_fewer_sequences(
        &self,
        resolved: &Resolved,
        plan: &Plan,
        precision: DType,
        generation: Generation,
    ) -> Result<PlanOutcome, Failure> {
        Ok(plan_recipe(&self.sequences_request(resolved, precision, generation)?, &plan.recipe))
    }

    fn sequences_request<'r>(
        &'r self,
        resolved: &'r Resolved,
        precision: DType,
        generation: Generation,
    ) -> Result<PlanRequest<'r>, Failure> {
        let mut request = plan_request(self.run, self.model, &resolved.device, Workload::Generate(generation))?;
        if resolved.fallback.is_some() {
            // The precision stays that of the accelerator.
            request.precision = precision;
        }
        Ok(request)
    }
}
