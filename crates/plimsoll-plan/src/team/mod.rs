//! Plans a step for several devices. A plan names the devices that take part, the share of the step that each computes,
//! and the recipe of each under its own load line.
//!
//! Three searches propose teams, one for each kind of parallelism:
//!
//! | module | weights | a device computes |
//! |---|---|---|
//! | `data_parallel` | the whole model on every device | whole sequences |
//! | `sharded` | split over the devices (FSDP, ZeRO-3) | whole sequences |
//! | `pipeline` | a run of layers on each device | its layers of every sequence |
//!
//! Each search ranks its teams by lower bounds on bytes and by predicted time. Only the best candidates are packed
//! (`packed`), and the fastest packed team becomes the plan. A device that would slow the team, or that cannot hold its
//! share, is excluded with a reason (`exclusion`) and a remedy (`remedies`). An excluded device may still run the
//! evaluations (`evaluator`). The search on a single device is in `crate::search`.

mod all_reduce;
mod alternatives;
mod candidate;
mod data_parallel;
mod evaluator;
mod exclusion;
mod fixed;
mod hosts;
mod measurements;
mod needs;
mod packed;
mod pipeline;
mod remedies;
mod sharded;
mod stage;
mod team_plan;

use crate::search::{
    LossySearch, PlanOutcome, PlanRequest, has_fitting_recipe_with, join, kind_of, lossy_option_sets, parallel_map,
    search_for_team, search_measured, with_lossy,
};
pub use alternatives::{alternatives, fill_ladders};
use candidate::TeamSearch;
pub use evaluator::evaluation_request;
use exclusion::{exclude, exclude_slower, exclude_too_small};
pub use fixed::{keep_micro_batch, plan_fixed_team, replan_team};
pub use measurements::Measurements;
use packed::pack_fastest;
use pipeline::Pipeline;
use plimsoll_core::{Bytes, DeviceSpec, ExcludedDevice, HostSpec, Link, Parallelism, Plan, Rung};
use plimsoll_program::Share;
pub use remedies::add_device_remedies;
use sharded::Sharded;

/// Largest step time with which a sharded team or a pipeline replaces a data parallel team, as a fraction of the step
/// time of that team. On a tie, data parallel wins, because it loses no state with a device: a shard or a stage exists on
/// one device alone. More memory must not make a step slower, so a larger difference decides by time.
const MAX_TIME_RATIO: f64 = 0.995;

/// Factor on the step time of the fastest data parallel team, above which sharded teams and pipelines are not searched for
/// recipes. Their estimated times may be too long by this factor, and so may the first that are found.
const OTHER_KIND_ERROR: f64 = 1.05;

/// A request to plan a step for several devices.
#[derive(Clone, Debug)]
pub struct TeamRequest<'a> {
    /// One request per device, in the order of ranks. All ask for the whole step: `sequences` counts all sequences of
    /// the step, and `share` is the whole.
    pub devices: Vec<PlanRequest<'a>>,
    /// The load lines of the hosts of all machines together. The devices of a machine share the memory of its host; on
    /// several machines, the requests of each have the load line of its own.
    pub host: Bytes,
    /// Whether every device has to take part (`run.parallelism = "all"`).
    pub require_all: bool,
    /// A kind of parallelism, or shard sizes, that the plan must have; `None` lets the planner choose.
    pub constraint: Option<TeamConstraint>,
    /// The evaluations that an excluded device may run; `None` if the run has none, or if the team has to run them.
    pub evaluations: Option<EvaluationSchedule>,
}

/// The interval and the size of the evaluations of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvaluationSchedule {
    /// Steps between two evaluations; 0 for a single evaluation at the end.
    pub every: u64,
    /// Rows of one evaluation; `None` if the data have not been read.
    pub rows: Option<u64>,
}

/// A property that the planned team must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TeamConstraint {
    /// The plan uses this kind of parallelism.
    Parallelism(Parallelism),
    /// The plan is sharded. The list has the shard of each device, in 1024ths. All devices take part; the planner
    /// chooses only their numbers of sequences.
    ShardSizes(Vec<u64>),
}

impl TeamConstraint {
    fn parallelism(&self) -> Parallelism {
        match self {
            TeamConstraint::Parallelism(parallelism) => *parallelism,
            TeamConstraint::ShardSizes(_) => Parallelism::Sharded,
        }
    }
}

/// A device of a planned team, with everything that is needed to run its share.
#[derive(Clone, Debug)]
pub struct PlannedWorker {
    /// The index of the device in [`TeamRequest::devices`].
    pub device: usize,
    /// The share of the step that the device computes.
    pub share: Share,
    /// Sequences of a step that the device computes; 0 for a storage-only worker.
    pub sequences: u64,
    /// The plan, Programs and layout of the device.
    pub outcome: PlanOutcome,
}

/// The plan of a team, with everything that is needed to run it.
#[derive(Clone, Debug)]
pub struct TeamOutcome {
    /// The devices that take part, in the order of ranks. If nothing fits, the list has only the device that the
    /// refusal is about.
    pub workers: Vec<PlannedWorker>,
    /// The plan of the whole team, as `plan.json` stores it.
    pub plan: Plan,
    /// An excluded device that runs the evaluations while the team trains; `None` if no device does.
    pub evaluator: Option<PlannedWorker>,
}

impl<'a> TeamRequest<'a> {
    /// Returns whether the plan may use a kind of parallelism.
    fn allows(&self, parallelism: Parallelism) -> bool {
        self.constraint.as_ref().is_none_or(|constraint| constraint.parallelism() == parallelism)
    }

    /// Plans the whole step on one device.
    fn plan_alone(&self, device: usize, measurements: &Measurements) -> PlanOutcome {
        let (request, recipes) = (&self.devices[device], &measurements.recipes);
        match self.devices.len() {
            1 => search_measured(request, recipes),
            _ => search_for_team(&LossySearch::with_measurements(request, recipes)),
        }
    }

    /// Returns whether only one device can take part: there is just one, or nothing is trained.
    fn is_for_one_device(&self) -> bool {
        self.devices.len() == 1 || self.devices[0].optimizer.is_none()
    }

    /// Returns the number of sequences of a step, of all devices together.
    fn sequences_per_step(&self) -> u64 {
        self.devices.first().map_or(0, |request| request.sequences)
    }

    /// Returns the first device of each kind: identical devices are planned once.
    fn distinct_devices(&self) -> Vec<usize> {
        let is_first = |device: &usize| self.first_alike(*device) == *device;
        (0..self.devices.len()).filter(is_first).collect()
    }

    /// Returns the first device that is identical to `device` except for its name; it may be `device` itself.
    fn first_alike(&self, device: usize) -> usize {
        let is_alike = |other: &usize| data_parallel::are_alike(&self.devices[*other], &self.devices[device]);
        (0..device).find(is_alike).unwrap_or(device)
    }

    /// Returns, for each device, the first that differs from it at most in name, load line and charges.
    fn first_of_kinds(&self) -> Vec<usize> {
        let kinds: Vec<DeviceSpec> = self.devices.iter().map(|request| kind_of(request.device)).collect();
        let first = |kind: &DeviceSpec| kinds.iter().position(|other| other == kind).expect("it is like itself");
        kinds.iter().map(first).collect()
    }

    /// Returns whether two devices are identical except for their names.
    fn are_alike(&self, one: usize, other: usize) -> bool {
        self.first_alike(one) == self.first_alike(other)
    }

    /// Returns whether charges take all of the load lines, of all devices or of one that has to take part. Then no team
    /// fits.
    fn charges_take_all_room(&self) -> bool {
        let full = self.devices.iter().filter(|request| request.device.arena_budget() == Bytes::ZERO).count();
        full == self.devices.len() || (self.require_all && full > 0)
    }

    /// Returns whether all devices have a part in `outcome`, or need not have one.
    fn takes_all_required(&self, outcome: &TeamOutcome) -> bool {
        !self.require_all || outcome.workers.len() == self.devices.len()
    }

    /// Returns the number of tokens of a step, padding included.
    fn tokens_per_step(&self) -> f64 {
        self.devices.first().map_or(0.0, |request| (request.sequences * request.sequence) as f64)
    }

    /// Returns the request to plan `share` of the step on one device, with at most `host` bytes of host memory. The
    /// device then computes `sequences` sequences per step.
    fn request_for(&self, device: usize, share: &Share, sequences: u64, host: Bytes) -> PlanRequest<'a> {
        let request = self.devices[device].clone().for_share(share, sequences);
        PlanRequest { host: limit_host(request.host, host), ..request }
    }

    /// Returns a request per device, with `rungs` taken, from which its table of recipes is built. Each request asks
    /// for a number of sequences in proportion to the device's rate of matrix products. `hosts` limits the host memory
    /// of each.
    fn requests_by_speed(&self, rungs: &[Rung], hosts: &[Bytes]) -> Vec<PlanRequest<'a>> {
        let rate = |request: &PlanRequest| request.device.rates.product_flops(request.precision);
        let total_rate: f64 = self.devices.iter().map(rate).sum();
        let total = self.sequences_per_step();
        let sized = |(request, host): (&PlanRequest<'a>, &Bytes)| {
            let sequences = total as f64 * rate(request) / total_rate;
            let request = PlanRequest { host: limit_host(request.host, *host), ..request.clone() };
            PlanRequest { sequences: (sequences.ceil() as u64).clamp(1, total), ..with_lossy(&request, rungs) }
        };
        self.devices.iter().zip(hosts).map(sized).collect()
    }
}

/// Lowers the load line of a host to `budget`; a lower load line stays.
fn limit_host(host: HostSpec, budget: Bytes) -> HostSpec {
    HostSpec { budget: budget.min(host.budget), ..host }
}

/// Plans the fastest team that fits under all load lines, with the least loss of accuracy. If nothing fits, the outcome
/// is a refusal, with the budgets that would be enough. It is about the device that lacks the least memory; if all have
/// to take part, about one that does not fit.
///
/// # Panics
/// If the request has no device.
pub fn plan_team(team: &TeamRequest) -> TeamOutcome {
    plan_measured_team(team, &Measurements::default())
}

/// Plans like [`plan_team`], with the measurements of earlier plans of requests that differ from `team` only in load lines
/// and allowed rungs.
///
/// # Panics
/// If the request has no device.
pub fn plan_measured_team(team: &TeamRequest, measurements: &Measurements) -> TeamOutcome {
    add_evaluator_and_faster_device(team, plan_or_refuse(team, measurements), measurements)
}

/// Plans like [`plan_team`], but returns `None` if nothing fits. The search for remedies is left out, because it would
/// delay a training that is running.
///
/// # Panics
/// If the request has no device.
pub fn plan_team_if_fits(team: &TeamRequest) -> Option<TeamOutcome> {
    plan_measured_team_if_fits(team, &Measurements::default())
}

/// Plans like [`plan_team_if_fits`], with the measurements of earlier plans of requests that differ from `team` only in
/// load lines and allowed rungs. They change the time that planning takes, but not the plan.
///
/// # Panics
/// If the request has no device.
pub fn plan_measured_team_if_fits(team: &TeamRequest, measurements: &Measurements) -> Option<TeamOutcome> {
    let outcome = match team.is_for_one_device() {
        true => Some(single_device(team, best_single_device(team, false, measurements), vec![]))
            .filter(|outcome| outcome.plan.fits),
        false => find_fitting(team, measurements),
    };
    outcome.map(|outcome| add_evaluator_and_faster_device(team, outcome, measurements))
}

/// Completes a plan with the evaluator, and with a device or host that would be faster alone.
fn add_evaluator_and_faster_device(
    team: &TeamRequest,
    outcome: TeamOutcome,
    measurements: &Measurements,
) -> TeamOutcome {
    let mut outcome = evaluator::add_evaluator(team, outcome);
    outcome.plan.faster_alone = alternatives::faster_alone(team, &outcome.plan, measurements);
    outcome
}

/// Plans the fastest team that fits, or refuses with the remedies of the device that lacks the least memory.
fn plan_or_refuse(team: &TeamRequest, measurements: &Measurements) -> TeamOutcome {
    if team.is_for_one_device() {
        return single_device(team, best_single_device(team, false, measurements), vec![]);
    }
    if let Some(outcome) = find_fitting(team, measurements) {
        return outcome;
    }
    // If all devices have to take part, the refusal is about one that does not fit; else about the one nearest to fitting.
    let (device, mut outcome) = match team.require_all {
        true => best_single_device(team, true, measurements),
        false => device_nearest_to_fitting(team, measurements),
    };
    if team.require_all && !outcome.plan.fits {
        outcome.plan.needs = remedies::needs_for_all(team, &outcome.plan, measurements);
    }
    // Under a need the whole team is planned anew, so the peak of this one device is not known.
    outcome.plan.needs.iter_mut().for_each(|need| need.peak_bytes = None);
    let others: Vec<usize> = (0..team.devices.len()).filter(|&other| other != device && !team.require_all).collect();
    let refused = !outcome.plan.fits;
    let lowered = || match refused && !team.require_all {
        true => needs::lower_load_lines(team, device, &outcome.plan, measurements),
        false => outcome.plan.needs.clone(),
    };
    let (host_need, (mut lowered, excluded)) = join(
        || refused.then(|| needs::host_memory_need(team, &outcome.plan, measurements)).flatten(),
        || {
            let allow = &team.devices[0].lossy.allow;
            (lowered(), exclude_too_small(team, &others, &[], allow, &measurements.recipes))
        },
    );
    if let Some(host_need) = host_need {
        lowered.retain(|need| need.host_bytes.is_none());
        lowered.push(host_need);
    }
    outcome.plan.needs = lowered;
    single_device(team, (device, outcome), excluded)
}

/// Plans the whole step on the device that lacks the least memory for it, with the budgets that would be enough.
fn device_nearest_to_fitting(team: &TeamRequest, measurements: &Measurements) -> (usize, PlanOutcome) {
    let devices = team.distinct_devices();
    let search = |&device: &usize| LossySearch::with_measurements(&team.devices[device], &measurements.recipes);
    let known: Vec<LossySearch> = devices.iter().map(search).collect();
    let missing_bytes = parallel_map(&known, |known| {
        let PlanRequest { lossy, device, .. } = known.request;
        known.smallest(&lossy.allow).bytes.device.saturating_sub(device.arena_budget().0)
    });
    let nearest = (0..devices.len()).min_by_key(|&at| missing_bytes[at]).expect("a team has a device");
    (devices[nearest], search_for_team(&known[nearest]))
}

/// Plans the fastest team that fits, with the least loss of accuracy; `None` if no team fits.
fn find_fitting(team: &TeamRequest, measurements: &Measurements) -> Option<TeamOutcome> {
    if team.charges_take_all_room() {
        return None;
    }
    let first = &team.devices[0];
    lossy_option_sets(first, &first.lossy.allow).into_iter().find_map(|rungs| best_team(team, &rungs, measurements))
}

/// Plans the whole step on the fastest device that fits with all of the host's memory. This is for teams whose host is
/// too small for two data parallel devices. Returns `None` if no device fits, if all devices have to take part, or if
/// the plan may not be data parallel.
fn fastest_device_with_whole_host(
    team: &TeamRequest,
    rungs: &[Rung],
    measurements: &Measurements,
) -> Option<TeamOutcome> {
    let candidates = devices_that_fit_alone(team, rungs, measurements);
    let fits = |device: &usize| candidates.contains(device);
    let best = best_device_among(team, candidates.iter().copied(), false, measurements)
        .filter(|(_, outcome)| outcome.plan.fits)?;
    let others = (0..team.devices.len()).filter(|&device| device != best.0);
    let (able, unable): (Vec<usize>, Vec<usize>) = others.partition(|&device| fits(&team.first_alike(device)));
    let lacks_host = |&device: &usize| {
        let reason = "the host has no memory for it beside the faster device";
        exclude(team, device, reason.to_owned())
    };
    let excluded = able
        .iter()
        .map(lacks_host)
        .chain(exclude_too_small(team, &unable, rungs, &[], &measurements.recipes))
        .collect();
    Some(single_device(team, best, excluded))
}

/// Returns the devices that can do the whole step alone with all of the host's memory, identical ones once. The list is
/// empty if all devices have to take part, or if the plan may not be data parallel.
fn devices_that_fit_alone(team: &TeamRequest, rungs: &[Rung], measurements: &Measurements) -> Vec<usize> {
    if team.require_all || !team.allows(Parallelism::Data) {
        return vec![];
    }
    let measured = measurements.with_rungs(rungs);
    let fits = |device: &usize| {
        let request = with_lossy(&team.devices[*device], rungs);
        has_fitting_recipe_with(&request, &measured.of_request(&request))
    };
    team.distinct_devices().into_iter().filter(fits).collect()
}

/// Plans the whole step on each device alone and returns the best: the fastest that fits, else the one that lacks the
/// least memory. With `refused_first`, devices that do not fit rank before those that do.
fn best_single_device(team: &TeamRequest, refused_first: bool, measurements: &Measurements) -> (usize, PlanOutcome) {
    best_device_among(team, team.distinct_devices().into_iter(), refused_first, measurements)
        .expect("a team has a device")
}

/// Plans the whole step on each of `devices` and returns the best: the fastest that fits, else the one that lacks the
/// least memory. With `refused_first`, devices that do not fit rank before those that do. Returns `None` without
/// devices.
fn best_device_among(
    team: &TeamRequest,
    devices: impl Iterator<Item = usize>,
    refused_first: bool,
    measurements: &Measurements,
) -> Option<(usize, PlanOutcome)> {
    let cost = |plan: &Plan| match plan.fits {
        true => -1.0 / plan.predicted.step_seconds,
        false => plan.devices[0].peak_bytes.saturating_sub(plan.devices[0].budget_bytes).0 as f64,
    };
    let rank = |outcome: &PlanOutcome| (refused_first && outcome.plan.fits, cost(&outcome.plan));
    let outcomes = devices.map(|device| (device, team.plan_alone(device, measurements)));
    let ranked = outcomes.map(|(device, outcome)| (rank(&outcome), (device, outcome)));
    let best = ranked.min_by(|(a, _), (b, _)| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    best.map(|(_, best)| best)
}

/// Returns the outcome of a team in which one device does the whole step.
fn single_device(
    team: &TeamRequest,
    (device, outcome): (usize, PlanOutcome),
    excluded: Vec<ExcludedDevice>,
) -> TeamOutcome {
    let plan = Plan { excluded, ..outcome.plan.clone() };
    let worker = PlannedWorker { device, share: Share::SINGLE_DEVICE, sequences: team.sequences_per_step(), outcome };
    TeamOutcome { workers: vec![worker], plan, evaluator: None }
}

/// Plans the fastest team with `rungs` taken, over all kinds of parallelism, or the fastest device alone; `None` if
/// nothing fits.
fn best_team(team: &TeamRequest, rungs: &[Rung], measurements: &Measurements) -> Option<TeamOutcome> {
    let best = best_team_or_last_resort(team, rungs, measurements)?;
    Some(or_single_device(team, rungs, measurements, best))
}

/// Returns the packed team, or the fastest device alone if that is faster. Devices are searched that could be faster by a
/// bound: they compute all the time, without recompute. The team's own tables of recipes are built for smaller shares.
fn or_single_device(
    team: &TeamRequest,
    rungs: &[Rung],
    measurements: &Measurements,
    packed: TeamOutcome,
) -> TeamOutcome {
    if packed.workers.len() == 1 {
        return packed;
    }
    let bounds = Sharded::new(team, rungs, measurements);
    let rate = packed.plan.predicted.tokens_per_second;
    let may_be_faster = |device: &usize| bounds.approximate_max_tokens_per_second(&[*device]) > rate;
    let candidates = devices_that_fit_alone(team, rungs, measurements).into_iter().filter(may_be_faster);
    let best = best_device_among(team, candidates, false, measurements).filter(|(_, outcome)| outcome.plan.fits);
    let Some((device, outcome)) = best.filter(|(_, outcome)| outcome.plan.predicted.tokens_per_second > rate) else {
        return packed;
    };
    let (alone, together) = (outcome.plan.predicted.step_seconds, packed.plan.predicted.step_seconds);
    let slower = packed.workers.iter().filter(|worker| worker.device != device);
    let slower = slower.map(|worker| exclude_slower(team, worker.device, alone, together));
    let others = packed.plan.excluded.into_iter().filter(|excluded| excluded.device_index != device);
    let mut excluded: Vec<ExcludedDevice> = slower.chain(others).collect();
    excluded.sort_by_key(|excluded| excluded.device_index);
    single_device(team, (device, outcome), excluded)
}

/// Plans the fastest team with `rungs` taken, over all kinds of parallelism; `None` if no team fits. A team with
/// micro-batches of one sequence is compared with that of the last resort.
fn best_team_or_last_resort(team: &TeamRequest, rungs: &[Rung], measurements: &Measurements) -> Option<TeamOutcome> {
    let data_parallel = team.allows(Parallelism::Data).then(|| {
        data_parallel::with_host_shares(team, rungs, measurements, |mut search| pack_fastest(team, rungs, &mut search))
    });
    let data_parallel = data_parallel.flatten().or_else(|| fastest_device_with_whole_host(team, rungs, measurements));
    if !team.allows(Parallelism::Sharded) && !team.allows(Parallelism::Pipeline) {
        return data_parallel;
    }
    let sharded = Sharded::new(team, rungs, measurements);
    let tokens_per_second = |outcome: &TeamOutcome| outcome.plan.predicted.tokens_per_second;
    if data_parallel
        .as_ref()
        .is_some_and(|outcome| tokens_per_second(outcome) >= MAX_TIME_RATIO * sharded.max_tokens_per_second())
    {
        return data_parallel;
    }
    let bound = data_parallel.as_ref().map_or(f64::INFINITY, |outcome| outcome.plan.predicted.step_seconds);
    let mut sharded = sharded.with_bound(OTHER_KIND_ERROR * bound);
    let mut pipeline = Pipeline::new(team, rungs, measurements).with_bound(OTHER_KIND_ERROR * bound);
    // Candidates with a predicted rate of at most `least` are not packed.
    let mut least = data_parallel.as_ref().map_or(0.0, |outcome| tokens_per_second(outcome) / MAX_TIME_RATIO);
    let mut best = data_parallel;
    let predicted_rate = |parallelism: Parallelism, search: &mut dyn TeamSearch| {
        let candidate = if team.allows(parallelism) { search.fastest() } else { None };
        candidate.map_or(0.0, |candidate| team.tokens_per_step() / candidate.seconds)
    };
    let (sharded_rate, pipeline_rate) = join(
        || predicted_rate(Parallelism::Sharded, &mut sharded),
        || predicted_rate(Parallelism::Pipeline, &mut pipeline),
    );
    let mut searches: [(f64, &mut dyn TeamSearch); 2] = [(sharded_rate, &mut sharded), (pipeline_rate, &mut pipeline)];
    searches.sort_by(|a, b| b.0.total_cmp(&a.0));
    for (rate, search) in searches {
        let outcome = if rate > least { pack_fastest(team, rungs, search) } else { None };
        if let Some(outcome) = outcome.filter(|outcome| tokens_per_second(outcome) > least) {
            (least, best) = (tokens_per_second(&outcome), Some(outcome));
        }
    }
    // Where memory is so short, the last resort may be faster.
    let last_resort = match best.as_ref().is_none_or(computes_single_sequences) {
        true => needs::single_sequence_team(team, rungs, measurements),
        false => None,
    };
    best.into_iter().chain(last_resort).max_by(|a, b| tokens_per_second(a).total_cmp(&tokens_per_second(b)))
}

/// Returns whether a team of several devices has micro-batches of one sequence.
fn computes_single_sequences(outcome: &TeamOutcome) -> bool {
    let micro_batches = outcome.workers.iter().map(|worker| worker.outcome.plan.recipe.micro_batch);
    outcome.workers.len() > 1 && micro_batches.max() == Some(1)
}

/// Returns the slowest of some links, which sets the pace of a team's collectives. Returns [`Link::MEMORY`] if `links`
/// is empty.
fn slowest_link(links: impl Iterator<Item = Link>) -> Link {
    let slower = |a: Link, b: Link| if b.bytes_per_second < a.bytes_per_second { b } else { a };
    links.reduce(slower).unwrap_or(Link::MEMORY)
}

/// Returns nested sets of devices: all, then those with a faster link than the slowest, and so on. Collectives run at
/// the pace of the slowest link, so devices with equally slow links are only worth excluding together.
fn bandwidth_tiers(devices: &[usize], link: impl Fn(usize) -> Link) -> Vec<Vec<usize>> {
    let rate = |device: usize| link(device).bytes_per_second;
    let mut rates: Vec<f64> = devices.iter().map(|&device| rate(device)).collect();
    rates.sort_by(f64::total_cmp);
    rates.dedup();
    let tier = |least: f64| devices.iter().copied().filter(|&device| rate(device) >= least).collect();
    rates.into_iter().map(tier).collect()
}
