//! The order of sums of a plan. Two runs of one run file have the same bits on the same kind of machine if the order is
//! the same, and the algorithms of matrix products. Recompute and offload are no part of it, because they keep every
//! bit. Two exceptions on a GPU, which this module does not cover, are in `docs/design/offload.md`.

use super::previous_plan::PreviousPlan;
use plimsoll_core::{Parallelism, Plan, Recipe, Rung, WorkerPlan};

/// The parts of a plan that decide the order of sums and the arithmetic.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SumOrder {
    parallelism: Option<Parallelism>,
    /// Workers in rank order.
    workers: Vec<WorkerSums>,
}

/// The sums of one worker.
#[derive(Clone, Debug, PartialEq)]
struct WorkerSums {
    /// Sequences of a step; `None` for one device, which computes all.
    sequences: Option<u64>,
    layers: Option<[u64; 2]>,
    shard_1024ths: Option<u64>,
    micro_batch: u32,
    rungs: Vec<Rung>,
    /// Whether the host adds up the embedding gradient. That changes the order of sums of a GPU.
    host_adds: bool,
}

impl SumOrder {
    /// Returns the order of sums of a run with these parts of a plan. Without parallelism, one device does all work.
    pub fn of(recipe: &Recipe, parallelism: Option<Parallelism>, team: &[WorkerPlan]) -> SumOrder {
        let workers = match parallelism {
            None => vec![WorkerSums::of(recipe)],
            Some(_) => team.iter().map(WorkerSums::of_worker).collect(),
        };
        SumOrder { parallelism, workers }
    }

    /// Returns the order of sums of a plan.
    pub fn of_plan(plan: &Plan) -> SumOrder {
        SumOrder::of(&plan.recipe, plan.parallelism, &plan.team)
    }

    /// Returns the order of sums of a previous plan.
    pub fn of_previous(plan: &PreviousPlan) -> SumOrder {
        SumOrder::of(&plan.recipe, plan.parallelism, &plan.team)
    }
}

impl WorkerSums {
    fn of(recipe: &Recipe) -> WorkerSums {
        WorkerSums {
            sequences: None,
            layers: None,
            shard_1024ths: None,
            micro_batch: recipe.micro_batch,
            rungs: recipe.rungs.clone(),
            host_adds: recipe.offload.embedding,
        }
    }

    fn of_worker(worker: &WorkerPlan) -> WorkerSums {
        WorkerSums {
            sequences: Some(worker.sequences),
            layers: worker.layers,
            shard_1024ths: worker.shard_1024ths,
            ..WorkerSums::of(&worker.recipe)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{Offload, RecomputeLevel};

    #[test]
    fn recompute_keeps_order_and_micro_batch_changes_it() {
        let plain = Recipe::on_device(4, vec![RecomputeLevel::Nothing; 2]);
        let order = |recipe: &Recipe| SumOrder::of(recipe, None, &[]);
        let recomputed = Recipe { recompute: vec![RecomputeLevel::Block; 2], ..plain.clone() };
        let offloaded = Recipe { offload: Offload { optimizer: 2, ..Offload::default() }, ..plain.clone() };
        let embedding = Recipe { offload: Offload { embedding: true, ..Offload::default() }, ..plain.clone() };
        assert_eq!(order(&plain), order(&recomputed));
        assert_eq!(order(&plain), order(&offloaded));
        // The host adds up the gradient of a GPU in another order.
        assert_ne!(order(&plain), order(&embedding));
        assert_ne!(order(&plain), order(&Recipe { micro_batch: 2, ..plain.clone() }));
    }
}
