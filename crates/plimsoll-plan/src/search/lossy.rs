//! Lossy rungs: bf16, 8-bit optimizer state, adapters, quantized frozen matrices. They are taken only if the user
//! allows them, and no more than needed.
//!
//! Combinations of rungs are tried in the order of their loss. The most significant choice is the storage of frozen
//! matrices; then follow adapters, the optimizer state and the precision. The first combination under which anything
//! fits is taken, with its fastest recipe. If nothing fits, this module computes the remedies of the refusal.

use super::measure::{Candidate, Measurer};
use super::memo::Memo;
use super::parallel::parallel_map;
use super::plan_request::with_lossy;
use super::{LossyOptions, PackedCandidate, PlanRequest, RecipeMeasurements, TriedRecipe, fastest, offload};
use plimsoll_core::{Bytes, DType, DevicePlan, FileSpec, HostSpec, Plan, Remedy, Rung, Space};
use plimsoll_program::models::decoder::{AdamState, Base, Method, Optimizer};
use std::sync::Arc;

/// Returns the combinations of allowed rungs that change anything, least loss first; the first one is empty. Trained
/// matrices are never quantized, so in a full fine-tuning `int8` and `nf4` come with `lora`. Allowing `int8` or `nf4`
/// is then enough: `lora` need not be allowed.
pub(crate) fn lossy_option_sets(request: &PlanRequest, allow: &[Rung]) -> Vec<Vec<Rung>> {
    let allowed = |rung: Rung| allow.contains(&rung);
    let trained = request.optimizer.is_some();
    let trains_all = trained && request.lossy.method == Method::Full;
    let full_state = matches!(request.optimizer, Some(Optimizer::AdamW { state: AdamState::Full, .. }));
    let choices = |possible: bool| if possible { &[false, true][..] } else { &[false][..] };
    let mut bases = vec![None];
    for (rung, base) in [(Rung::Int8, Base::Int8), (Rung::Nf4, Base::Nf4)] {
        if allowed(rung) && request.lossy.base < base {
            bases.push(Some(rung));
        }
    }
    let may_add_adapters = trains_all && (allowed(Rung::Lora) || bases.len() > 1);
    let mut sets = Vec::new();
    for base in bases {
        for &lora in choices(may_add_adapters) {
            // Only frozen matrices are quantized. Adapters have little optimizer state, so 8-bit state is not tried
            // with them.
            let possible = base.is_none() || lora || !trains_all;
            for &adam in choices(full_state && allowed(Rung::Adam8bit) && trains_all && !lora) {
                for &bf16 in choices(request.precision == DType::F32 && allowed(Rung::Bf16)) {
                    let mut set = Vec::new();
                    set.extend(bf16.then_some(Rung::Bf16));
                    set.extend(adam.then_some(Rung::Adam8bit));
                    set.extend(lora.then_some(Rung::Lora));
                    set.extend(base);
                    if possible {
                        sets.push(set);
                    }
                }
            }
        }
    }
    sets
}

/// The result of a search for the smallest recipe of a combination of rungs.
#[derive(Clone, Debug)]
enum SmallestRecipe {
    /// The smallest recipe was found.
    Found(Candidate),
    /// The smallest recipe needs at least these bytes on the device.
    AtLeast(u64),
}

/// The search over combinations of lossy rungs for one request. Results are cached, because a refusal needs most of
/// them several times.
#[derive(Debug)]
pub(crate) struct LossySearch<'q> {
    /// The request, before the search takes any lossy rungs.
    pub request: &'q PlanRequest<'q>,
    /// Bytes and predicted seconds of recipes.
    measurements: Arc<RecipeMeasurements>,
    smallest: Memo<Vec<Rung>, SmallestRecipe>,
    /// Peak of the device (including charges) under the fastest recipe, by combination of rungs; `None` if no recipe
    /// fits.
    peaks: Memo<Vec<Rung>, Option<Bytes>>,
}

impl<'q> LossySearch<'q> {
    /// Creates a search with the measurements of earlier ones.
    pub fn with_measurements(request: &'q PlanRequest<'q>, measurements: &Arc<RecipeMeasurements>) -> LossySearch<'q> {
        let measurements = Arc::clone(measurements);
        LossySearch { request, measurements, smallest: Memo::default(), peaks: Memo::default() }
    }

    /// Returns a measurer for a request of this search with some rungs taken.
    fn measurer<'a>(&self, request: &'a PlanRequest<'a>) -> Measurer<'a> {
        Measurer::with_cache(request, self.measurements.of_request(request))
    }

    /// Finds the fastest recipe that fits with these rungs; `None` if none fits. Adds the considered recipes to
    /// `tried`, fastest first.
    ///
    /// The search tries in this order: the fastest recipe in memory, the smallest recipe in memory however slow, and
    /// both with the scratch file.
    pub fn fastest(&self, rungs: &[Rung], tried: &mut Vec<TriedRecipe>) -> Option<PackedCandidate> {
        let request = with_lossy(self.request, rungs);
        let bound = Some(request.arena_bound());
        let file = request.host.file;
        let in_memory = (file.budget > Bytes::ZERO).then(|| {
            let host = HostSpec { file: FileSpec { budget: Bytes::ZERO, ..file }, ..request.host };
            PlanRequest { host, ..request.clone() }
        });
        let packed = in_memory
            .and_then(|request| {
                let measurer = self.measurer(&request);
                fastest(&measurer, || offload::smallest(&measurer, bound), tried)
            })
            .or_else(|| {
                let measurer = self.measurer(&request);
                fastest(&measurer, || self.smallest_with(rungs, bound), tried)
            });
        let peak = packed.as_ref().map(|packed| Bytes(packed.layout.device.bytes) + request.device.charges);
        self.peaks.insert(rungs.to_vec(), peak);
        packed
    }

    /// Returns whether the smallest recipe with these rungs fits after packing.
    pub fn has_fitting_recipe(&self, rungs: &[Rung]) -> bool {
        self.smallest_with(rungs, Some(self.request.arena_bound())).is_some()
    }

    /// Returns the peak of the device under the fastest recipe with these rungs; `None` if no recipe fits.
    fn peak(&self, rungs: &[Rung]) -> Option<Bytes> {
        let rungs = rungs.to_vec();
        self.peaks.get(&rungs).unwrap_or_else(|| {
            self.fastest(&rungs, &mut vec![]);
            self.peaks.get(&rungs).expect("the search has stored the peak")
        })
    }

    /// Returns the recipe with the fewest device bytes with these rungs, or `None` if it needs `bound` bytes or more.
    fn smallest_with(&self, rungs: &[Rung], bound: Option<u64>) -> Option<Candidate> {
        let is_below = |candidate: &Candidate| bound.is_none_or(|bound| candidate.bytes.device < bound);
        let rungs = rungs.to_vec();
        match (self.smallest.get(&rungs), bound) {
            (Some(SmallestRecipe::Found(candidate)), _) => return Some(candidate).filter(is_below),
            (Some(SmallestRecipe::AtLeast(least)), Some(bound)) if bound <= least => return None,
            _ => {}
        }
        let request = with_lossy(self.request, &rungs);
        let found = offload::smallest(&self.measurer(&request), bound);
        if let Some(known) = found.clone().map(SmallestRecipe::Found).or(bound.map(SmallestRecipe::AtLeast)) {
            self.smallest.insert(rungs, known);
        }
        found
    }

    /// Returns the recipe with the fewest device bytes with any combination of allowed rungs.
    pub fn smallest(&self, allow: &[Rung]) -> Candidate {
        let mut least: Option<Candidate> = None;
        // Most loss first: it usually needs the least, and its bound shortens the other searches.
        for rungs in lossy_option_sets(self.request, allow).into_iter().rev() {
            let bound = least.as_ref().map(|candidate| candidate.bytes.device);
            least = self.smallest_with(&rungs, bound).or(least);
        }
        least.expect("the first combination is searched without a bound")
    }
}

/// Returns the recipe with the fewest device bytes with any combination of allowed rungs.
pub(crate) fn smallest_recipe(
    request: &PlanRequest,
    allow: &[Rung],
    measurements: &Arc<RecipeMeasurements>,
) -> Candidate {
    LossySearch::with_measurements(request, measurements).smallest(allow)
}

/// A search for one remedy.
enum RemedyQuery {
    /// The search for the host memory that is enough.
    HostMemory,
    /// The search for the size of the scratch file that is enough.
    ScratchFile,
    /// The search for the load line that is enough if these rungs are allowed.
    Rungs(Vec<Rung>),
}

/// Computes the smallest budgets that fit, least loss first:
///
/// 1. with the allowed rungs,
/// 2. with the allowed rungs and more host memory, or a scratch file,
/// 3. with each further rung alone,
/// 4. with all rungs.
pub(super) fn remedies(search: &LossySearch, refused: &Plan) -> Vec<Remedy> {
    let request = search.request;
    let LossyOptions { allow, offer, .. } = &request.lossy;
    let every: Vec<Rung> = Rung::ALL.into_iter().filter(|rung| allow.contains(rung) || offer.contains(rung)).collect();
    let further = every.iter().filter(|rung| !allow.contains(rung));
    let alone = further.map(|rung| allow.iter().chain([rung]).copied().collect::<Vec<_>>());
    let with_rungs = alone.chain([every.clone()]).map(RemedyQuery::Rungs);
    let queries: Vec<RemedyQuery> =
        [RemedyQuery::HostMemory, RemedyQuery::ScratchFile].into_iter().chain(with_rungs).collect();
    let found = parallel_map(&queries, |query| search.find_remedy(query, &refused.devices[0]));
    // A remedy names the rungs that were taken. Some of the allowed rungs may exclude each other or have no effect.
    let mut remedies = vec![Remedy::new(request.rungs_in_addition(&refused.rungs), refused.devices[0].peak_bytes)];
    for remedy in found.into_iter().flatten() {
        if !needs_only_rungs(&remedy) || remedies.iter().all(|before| before.allow != remedy.allow) {
            remedies.push(remedy);
        }
    }
    remedies
}

/// Predicts the device's peak under each remedy that only allows rungs and needs no higher load line than the present
/// one. If a remedy includes the rungs of an earlier one, both have the same peak, because the search takes the least
/// loss.
pub(super) fn predict_peaks(search: &LossySearch, refused: &Plan, remedies: &mut [Remedy]) {
    let (request, line) = (search.request, refused.devices[0].budget_bytes);
    let is_enough = |remedy: &Remedy| needs_only_rungs(remedy) && remedy.budget_bytes <= line;
    let included = |remedies: &[Remedy], index: usize| {
        (1..index)
            .find(|&other| is_enough(&remedies[other]) && includes(&remedies[index].allow, &remedies[other].allow))
    };
    let is_first = |&index: &usize| is_enough(&remedies[index]) && included(remedies, index).is_none();
    let firsts: Vec<usize> = (1..remedies.len()).filter(is_first).collect();
    let peaks = parallel_map(&firsts, |&index| {
        lossy_option_sets(request, &remedies[index].allow).iter().find_map(|rungs| search.peak(rungs))
    });
    for (&index, peak) in firsts.iter().zip(peaks) {
        remedies[index].peak_bytes = peak;
    }
    for index in 1..remedies.len() {
        if let Some(other) = included(remedies, index) {
            remedies[index].peak_bytes = remedies[other].peak_bytes;
        }
    }
}

/// Returns whether a remedy needs neither more host memory nor a scratch file.
fn needs_only_rungs(remedy: &Remedy) -> bool {
    remedy.host_bytes.is_none() && remedy.file_bytes.is_none()
}

impl LossySearch<'_> {
    /// Finds the remedy that `query` asks for; `refused` is the plan of the device that was refused. Returns `None` if
    /// there is no such remedy, or if the rungs do not lower the peak of the device.
    fn find_remedy(&self, query: &RemedyQuery, refused: &DevicePlan) -> Option<Remedy> {
        let allowed = match query {
            RemedyQuery::HostMemory => return self.remedy_by_offload(Space::Host, refused.budget_bytes),
            RemedyQuery::ScratchFile => return self.remedy_by_offload(Space::Scratch, refused.budget_bytes),
            RemedyQuery::Rungs(allowed) => allowed,
        };
        let smallest = self.smallest(allowed);
        let rungs = &smallest.recipe.rungs;
        let packed_bytes = smallest.packed_bytes(&with_lossy(self.request, rungs));
        let peak = Bytes(packed_bytes.device) + self.request.device.charges;
        (peak < refused.peak_bytes).then(|| Remedy::new(self.request.rungs_in_addition(rungs), peak))
    }

    /// Returns the remedy of more host memory ([`Space::Host`]) or of a larger scratch file ([`Space::Scratch`]): the
    /// smallest one, in MiB, with any allowed rungs. `line` is the present load line of the device. Returns `None` if
    /// the space cannot grow, or if no size is enough.
    fn remedy_by_offload(&self, space: Space, line: Bytes) -> Option<Remedy> {
        let (host, file) = (self.request.host, self.request.host.file);
        let in_file = space == Space::Scratch;
        let can_grow = match in_file {
            true => file.available > file.budget,
            false => (HostSpec { file: FileSpec::NONE, ..host }) != HostSpec::NONE,
        };
        if !can_grow {
            return None;
        }
        let with_budget = |budget: Bytes| match in_file {
            true => HostSpec { file: FileSpec { budget, ..file }, ..host },
            false => HostSpec { budget, ..host },
        };
        let largest = if in_file { file.available } else { Bytes(u64::MAX) };
        let unlimited = PlanRequest { host: with_budget(largest), ..self.request.clone() };
        let mut least: Option<(Bytes, Vec<Rung>)> = None;
        // Most loss first: it usually needs the least.
        for rungs in lossy_option_sets(self.request, &self.request.lossy.allow).into_iter().rev() {
            let request = with_lossy(&unlimited, &rungs);
            let measurer = self.measurer(&request);
            let bound = least.as_ref().map_or(u64::MAX, |(bytes, _)| bytes.0);
            let found = offload::least_in_space(&measurer, space, bound);
            let bytes = found.map(|found| found.known_bytes().get(space));
            least = bytes.map(|bytes| (Bytes::mib(bytes.div_ceil(1 << 20)), rungs)).or(least);
        }
        let (enough, rungs) = least?;
        let request = PlanRequest { host: with_budget(enough), ..self.request.clone() };
        // With exactly this budget the search may choose another recipe.
        let peak = LossySearch::with_measurements(&request, &self.measurements).peak(&rungs)?;
        let remedy = Remedy { peak_bytes: Some(peak), ..Remedy::new(rungs, line) };
        Some(match in_file {
            true => Remedy { file_bytes: Some(enough), ..remedy },
            false => Remedy { host_bytes: Some(enough), ..remedy },
        })
    }
}

/// Returns whether `larger` includes all rungs of `smaller`.
fn includes(larger: &[Rung], smaller: &[Rung]) -> bool {
    smaller.iter().all(|rung| larger.contains(rung))
}
