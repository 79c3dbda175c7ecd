//! Cuts of a model's layers into pipeline stages, found by dynamic programming over (stage, layers below).
//!
//! A cut is one choice for the first stages. For each number of stages and of layers only Pareto-optimal cuts are kept:
//! those that no other beats in time and in host memory.

use crate::team::stage::StageOption;

/// Most cuts that are kept for each number of stages and of layers: the fastest. The cut with the least host memory is
/// kept in addition.
const MAX_FRONT: usize = 12;

/// The totals of the stages of a cut.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CutTotals {
    /// Seconds per step of the slowest stage.
    pub slowest: f64,
    /// Seconds per step of all stages together.
    pub sum: f64,
    /// Bytes that all stages together offload to the host.
    pub host_bytes: f64,
}

/// A division of a model's first layers into the first stages of a pipeline.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    pub totals: CutTotals,
    /// The last stage of the cut, and the way to run it.
    stage: StageOption,
    /// The cut without the last stage.
    before: CutIndex,
}

/// The place of a cut among all cuts with the same number of stages.
#[derive(Clone, Copy, Debug)]
struct CutIndex {
    layers: u64,
    /// Index among the cuts with this number of layers.
    number: usize,
}

/// The Pareto-optimal cuts, by number of stages - 1 and by number of layers.
pub(super) struct CutTable {
    depth: u64,
    cuts: Vec<Vec<Vec<Cut>>>,
}

impl CutTable {
    /// Builds the table for `stages` stages of a model of `depth` layers, which offload at most `host` bytes. `options`
    /// returns the ways to run a stage with a number of layers; an empty list means that these and more layers do not
    /// fit.
    pub fn build(
        stages: usize,
        depth: u64,
        micro_batches: u32,
        host: f64,
        options: impl Fn(usize, u64) -> Vec<StageOption>,
    ) -> CutTable {
        let mut cuts: Vec<Vec<Vec<Cut>>> = Vec::new();
        for stage in 0..stages {
            let mut next: Vec<Vec<Cut>> = vec![vec![]; depth as usize + 1];
            let is_last = stage + 1 == stages;
            // Each later stage needs a layer, too.
            let most = depth - (stages - stage - 1) as u64;
            let options_by_layers: Vec<Vec<StageOption>> =
                (1..=most).map(|layers| options(stage, layers)).take_while(|options| !options.is_empty()).collect();
            for below in 0..=depth {
                let before: Vec<CutTotals> = match cuts.last() {
                    Some(cuts) => cuts[below as usize].iter().map(|cut| cut.totals).collect(),
                    None if below == 0 => vec![CutTotals::default()],
                    None => vec![],
                };
                for (own, options) in (1..).zip(&options_by_layers).take_while(|(own, _)| below + own <= most) {
                    if is_last && below + own < depth {
                        continue;
                    }
                    for option in options {
                        for (number, totals) in before.iter().enumerate() {
                            let busy = option.seconds.busy(micro_batches);
                            let totals = CutTotals {
                                slowest: totals.slowest.max(busy),
                                sum: totals.sum + busy,
                                host_bytes: totals.host_bytes + option.offloaded,
                            };
                            if totals.host_bytes <= host.max(0.0) {
                                let before = CutIndex { layers: below, number };
                                next[(below + own) as usize].push(Cut { totals, stage: *option, before });
                            }
                        }
                    }
                }
            }
            next.iter_mut().for_each(keep_pareto_front);
            cuts.push(next);
        }
        CutTable { depth, cuts }
    }

    /// Returns the cuts of all layers into all stages; empty if no cut fits.
    pub fn complete_cuts(&self) -> &[Cut] {
        &self.cuts.last().expect("there is a stage")[self.depth as usize]
    }

    /// Returns the stages of a complete cut, and their boundaries: the first layer of each stage, and then the number
    /// of layers of the model.
    pub fn trace<'t>(&'t self, last: &'t Cut) -> (Vec<StageOption>, Vec<u64>) {
        let (mut stages, mut boundaries, mut cut) = (vec![last.stage], vec![self.depth], last);
        for stage in (0..self.cuts.len() - 1).rev() {
            let CutIndex { layers, number } = cut.before;
            cut = &self.cuts[stage][layers as usize][number];
            stages.push(cut.stage);
            boundaries.push(layers);
        }
        boundaries.push(0);
        stages.reverse();
        boundaries.reverse();
        (stages, boundaries)
    }
}

/// Keeps the cuts that no other cut beats in both time and host memory. If these are many, only the fastest are kept,
/// and the one that needs the least host memory.
fn keep_pareto_front(cuts: &mut Vec<Cut>) {
    let by_time = |a: &Cut, b: &Cut| {
        let (a, b) = (a.totals, b.totals);
        a.slowest.total_cmp(&b.slowest).then(a.sum.total_cmp(&b.sum)).then(a.host_bytes.total_cmp(&b.host_bytes))
    };
    cuts.sort_by(by_time);
    let mut front: Vec<Cut> = Vec::new();
    for cut in cuts.drain(..) {
        let beats = |other: &Cut| cut.totals.sum < other.totals.sum || cut.totals.host_bytes < other.totals.host_bytes;
        if front.iter().all(beats) {
            front.push(cut);
        }
    }
    let host_bytes = |cut: &Cut| cut.totals.host_bytes;
    let smallest = front.iter().skip(MAX_FRONT).min_by(|a, b| host_bytes(a).total_cmp(&host_bytes(b))).copied();
    front.truncate(MAX_FRONT);
    front.extend(smallest);
    *cuts = front;
}
