//! The devices that work on a run.
//!
//! A [`Team`] is a list of workers in rank order; a run on one device is a team of one. Workers run their jobs in
//! parallel (`run_on_all`). After an out-of-memory error all workers drop the work, so that they stay at the same step.
//! A worker that misses its heartbeats is abandoned.
//!
//! | module | content |
//! |---|---|
//! | `worker` | one device: engine, share of each step, plan, measurements |
//! | `open` | opening devices, and adapting the plan if a GPU holds more than expected |
//! | `group` | communication groups and their transport |
//! | `run_on_all` | jobs in parallel, on one thread per worker |
//! | `abandoned` | memory that unresponsive devices still hold |
//! | `unavailable` | lost remote devices that may return |
//! | `memory` | measured memory of the workers |

pub(crate) mod abandoned;
mod group;
mod memory;
pub mod open;
pub(crate) mod run_on_all;
pub(crate) mod unavailable;
mod worker;

pub use worker::{PredictedCompute, Worker};

use crate::data::Rows;
use crate::engine::failure::DeviceFailure;
use crate::engine::{Engine, ScoredWeights, StepInput, StepLoss};
use crate::fault_injection::{FaultInjection, PendingFault};
use crate::files::StoredTensor;
use crate::heartbeat::{HeartbeatMonitor, MonitoredDevice, timeout_message};
use crate::planning::team_plan::WorkerAssignment;
use crate::remote::RemoteDevices;
use crate::step_times::quantile;
use abandoned::AbandonedMemory;
use plimsoll_core::{Bytes, DType, DeviceKind, DeviceSpec, Parallelism, Plan, WorkerPlan, WorkerResult};
use plimsoll_device::calibration;
use plimsoll_device::device::{FileSpace, NoFiles};
use plimsoll_device::error::DeviceError;
use plimsoll_device::transport::Transport;
use plimsoll_program::ProgramKind;
use run_on_all::{Job, JobOutcome, Task, run_on_all};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Largest share of the time in which the threads of a run may wait for a core if the speed of the CPU is stored.
const MAX_LEARNED_CONTENTION: f64 = 0.1;

/// Returns whether a device of this kind had the measured speed by itself, so that it may be stored. It took `times` the
/// predicted time, and the run's threads waited for a core for the share `contention` of the time.
fn is_own_speed(kind: DeviceKind, times: f64, contention: f64) -> bool {
    kind != DeviceKind::Cpu || contention <= MAX_LEARNED_CONTENTION || times < 1.0
}

/// All workers of a run, in rank order.
pub struct Team {
    workers: Vec<Worker>,
    transport: Arc<dyn Transport>,
    /// Time without heartbeat after which a device is lost.
    heartbeat_timeout: Duration,
    monitor: Option<HeartbeatMonitor>,
    abandoned: AbandonedMemory,
    /// Whether excluded devices could take over if the last worker were lost.
    has_replacement: bool,
    /// Bytes of arenas outside the team in this process, such as the evaluator's.
    external_arena_bytes: Bytes,
    external_peak_bytes: Bytes,
    /// Remote devices of the run, with the connector that reaches them.
    remote: RemoteDevices,
    /// Number of communication groups with remote devices formed so far, which numbers the next one.
    group_count: u64,
}

impl Team {
    /// Forms a team of open devices. `abandoned` lists memory of earlier teams. `has_replacement` tells whether
    /// excluded devices could take over if the only worker is lost.
    ///
    /// # Errors
    /// A device cannot join the communication group.
    pub fn new(
        workers: Vec<Worker>,
        remote: RemoteDevices,
        heartbeat_timeout: Duration,
        abandoned: AbandonedMemory,
        has_replacement: bool,
    ) -> Result<Team, DeviceFailure> {
        let transport = group::transport(&workers);
        let (external_arena_bytes, external_peak_bytes) = (Bytes::ZERO, Bytes::ZERO);
        let mut team = Team {
            workers,
            transport,
            heartbeat_timeout,
            monitor: None,
            abandoned,
            remote,
            group_count: 0,
            has_replacement,
            external_arena_bytes,
            external_peak_bytes,
        };
        if let [only] = &mut team.workers[..]
            && !only.is_remote()
            && !has_replacement
        {
            // No other device could take over, so the only local one needs no heartbeat. A remote process needs it, to
            // notice that the run is alive.
            only.heartbeat = None;
        }
        if let Err(failure) = team.form_group() {
            team.disband();
            return Err(failure);
        }
        Ok(team)
    }

    /// Creates a team without workers.
    pub fn empty(remote: RemoteDevices, abandoned: AbandonedMemory) -> Team {
        Team::new(Vec::new(), remote, Duration::ZERO, abandoned, false).expect("an empty team forms no group")
    }

    /// Sets whether excluded devices could take over from the last worker. It takes effect with the next communication
    /// group.
    pub fn set_has_replacement(&mut self, has_replacement: bool) {
        self.has_replacement = has_replacement;
    }

    /// Starts the heartbeat monitor for the present workers. A single local worker is monitored only if an excluded
    /// device could take over.
    fn start_monitor(&mut self) {
        // Stop the previous monitor first.
        self.monitor = None;
        if self.len() <= 1 && !self.has_replacement && !self.workers.iter().any(Worker::is_remote) {
            return;
        }
        let device = |(rank, worker): (u32, &Worker)| {
            Some(MonitoredDevice { rank, name: worker.device.name.clone(), liveness: worker.liveness()? })
        };
        let devices = (0..).zip(&self.workers).filter_map(device).collect();
        let transport = Arc::clone(&self.transport);
        let on_loss = move |rank: u32, reason: &str| transport.abort(rank, reason);
        self.monitor = HeartbeatMonitor::start(devices, on_loss, self.heartbeat_timeout);
    }

    /// Returns the only worker, whose work needs no thread of its own; `None` for several workers, or if a monitor
    /// watches the worker.
    fn sole_unmonitored(&mut self) -> Option<&mut Worker> {
        let is_monitored = self.monitor.is_some();
        match &mut self.workers[..] {
            [only] if !is_monitored => Some(only),
            _ => None,
        }
    }

    /// Returns the loss of a worker that missed its heartbeats; `None` if no worker did.
    fn heartbeat_failure(&self) -> Option<DeviceFailure> {
        let rank = self.workers.iter().position(Worker::is_lost)?;
        Some(DeviceFailure::Lost {
            rank,
            reason: timeout_message(&self.workers[rank].device.name, self.heartbeat_timeout),
        })
    }

    /// Returns the number of workers.
    pub fn len(&self) -> usize {
        self.workers.len()
    }

    /// Returns all workers in rank order.
    pub fn workers(&self) -> &[Worker] {
        &self.workers
    }

    /// Returns the worker of a rank.
    pub fn worker(&mut self, rank: usize) -> &mut Worker {
        &mut self.workers[rank]
    }

    /// Returns the worker of rank 0.
    pub fn first(&mut self) -> &mut Worker {
        &mut self.workers[0]
    }

    /// Returns the rank of the device of this name. Without a name, the team must have one worker.
    ///
    /// # Errors
    /// A message that lists the devices: no worker has this name, or there is no name and several workers.
    pub fn rank_named(&self, device: Option<&str>) -> Result<usize, String> {
        let names = || self.workers.iter().map(|worker| worker.device.name.as_str()).collect::<Vec<_>>().join(", ");
        match device {
            None if self.len() == 1 => Ok(0),
            None => Err(format!("several devices work on this run: choose one of {} with --device", names())),
            Some(name) => {
                let rank = self.workers.iter().position(|worker| worker.device.name == name);
                rank.ok_or_else(|| format!("device `{name}` does not work on this run; its devices are {}", names()))
            }
        }
    }

    /// Runs work on all workers in parallel and returns the results in rank order. If one fails, the work counts as not
    /// done, and the most severe failure is returned.
    ///
    /// # Errors
    /// The failure of a worker.
    pub fn on_all<T: Send + 'static>(
        &mut self,
        work: impl Fn(usize, &mut Engine) -> Result<T, DeviceFailure> + Send + Sync + 'static,
    ) -> Result<Vec<T>, DeviceFailure> {
        let work = Arc::new(work);
        self.run_tasks(&mut NoFiles, |rank, _| {
            let work = Arc::clone(&work);
            Some(Box::new(move |engine, _| work(rank, engine)))
        })
    }

    /// Runs work on one worker.
    ///
    /// # Errors
    /// The failure of the worker.
    pub fn on_one<T: Send + 'static>(
        &mut self,
        rank: usize,
        work: impl FnOnce(&mut Engine) -> Result<T, DeviceFailure> + Send + 'static,
    ) -> Result<T, DeviceFailure> {
        let mut work = Some(work);
        let task = |other: usize, _: &mut Worker| -> Option<Task<T>> {
            let work = work.take_if(|_| other == rank)?;
            Some(Box::new(move |engine, _| work(engine)))
        };
        Ok(self.run_tasks(&mut NoFiles, task)?.pop().expect("the worker returned its result"))
    }

    /// Calls `task` for each worker, and runs the tasks that it returns in parallel; they may access `files`. Workers
    /// without a task (`None`) are skipped. Returns the results in rank order, or the most severe failure.
    fn run_tasks<T: Send + 'static>(
        &mut self,
        files: &mut dyn FileSpace,
        mut task: impl FnMut(usize, &mut Worker) -> Option<Task<T>>,
    ) -> Result<Vec<T>, DeviceFailure> {
        if let Some(failure) = self.heartbeat_failure() {
            return Err(failure);
        }
        if let Some(only) = self.sole_unmonitored() {
            return task(0, only).into_iter().map(|task| task(&mut only.engine, files)).collect();
        }
        let held: Vec<Bytes> = (0..self.len()).map(|rank| self.arena_bytes_of(rank).total()).collect();
        let make_job = |(rank, worker): (usize, &mut Worker)| {
            let task = task(rank, worker)?;
            let engine = std::mem::replace(&mut worker.engine, Engine::placeholder(&worker.device.name));
            Some(Job { rank, engine, liveness: worker.liveness(), task })
        };
        let jobs = self.workers.iter_mut().enumerate().filter_map(make_job).collect();
        let mut outcomes = run_on_all(jobs, &self.transport, files);
        outcomes.sort_by_key(|(rank, _)| *rank);
        let mut results = Vec::new();
        for (rank, outcome) in outcomes {
            match outcome {
                JobOutcome::Returned(engine, result) => {
                    self.workers[rank].engine = *engine;
                    results.push(result);
                }
                JobOutcome::Abandoned(alive) => self.abandoned.add(held[rank], alive),
            }
        }
        // After a loss, this communication group is not used again.
        if let Some(failure) = self.heartbeat_failure() {
            return Err(failure);
        }
        self.transport.reset();
        let mut done = Vec::new();
        let mut worst: Option<DeviceFailure> = None;
        for result in results {
            match result {
                Ok(value) => done.push(value),
                Err(failure) if worst.as_ref().is_none_or(|worst| failure.severity() > worst.severity()) => {
                    worst = Some(failure);
                }
                Err(_) => {}
            }
        }
        match worst {
            None => Ok(done),
            // The worker itself reports nothing, and the others cannot reach it.
            Some(DeviceFailure::PeerAborted(DeviceError::PeerUnreachable { rank, reason })) => {
                let name = self.workers.get(rank as usize).map_or("a device", |worker| &worker.device.name);
                Err(DeviceFailure::Lost { rank: rank as usize, reason: format!("{name} cannot be reached: {reason}") })
            }
            Some(worst) => Err(worst),
        }
    }

    /// Sets the step in progress, for fault injection.
    pub fn begin_step(&mut self, step: u64) {
        for worker in &mut self.workers {
            worker.engine.begin_step(step);
        }
    }

    /// Replaces the faults that are injected into the work of the devices. `seed` is the seed of random faults.
    pub fn inject_faults(&mut self, faults: &[Arc<PendingFault>], seed: u64) {
        for (rank, worker) in (0..).zip(&mut self.workers) {
            let liveness = worker.liveness();
            worker.engine.inject_faults(FaultInjection::new(faults, seed, rank, &worker.device.name, liveness));
        }
    }

    /// Computes the gradients of all rows of a step and the clip factor, and returns loss and gradient norm of the
    /// step. Each worker takes its own rows, and the sums over all workers are formed. The weights do not change.
    ///
    /// # Errors
    /// The failure of a worker; the step is dropped on all of them.
    pub fn gradients(&mut self, rows: &mut Rows, input: &StepInput) -> Result<StepLoss, DeviceFailure> {
        let (input, min_micro_batches) = (*input, self.common_micro_batches());
        if let Some(only) = self.sole_unmonitored() {
            return Ok(only.engine.gradients(rows, &input, 1)?);
        }
        let losses =
            self.on_own_rows(rows, move |engine, own_rows| engine.gradients(own_rows, &input, min_micro_batches))?;
        // Storage-only workers have no compute time, and a single worker is not compared.
        if self.workers.len() > 1 {
            self.workers.iter_mut().filter(|worker| worker.sequences > 0).for_each(Worker::record_compute_time);
        }
        Ok(losses[0])
    }

    /// Computes the log-probability of each label of `rows`, at most a step's rows, under these weights. Each worker takes
    /// the rows that it has in a step. Returns one value for each position, `[R, T]`; 0 for positions without label.
    ///
    /// # Errors
    /// The failure of a worker; no scores are returned then.
    pub fn score(&mut self, rows: &mut Rows, weights: ScoredWeights) -> Result<Vec<f64>, DeviceFailure> {
        if let Some(only) = self.sole_unmonitored() {
            return Ok(only.engine.score(rows, weights, 1)?.unwrap_or_default());
        }
        let min_micro_batches = self.common_micro_batches();
        let positions = rows.tokens.len() / rows.len().max(1);
        let ranges: Vec<Range<usize>> = self.workers.iter().map(|worker| worker.own_range(rows.len())).collect();
        let score = move |engine: &mut Engine, own: &mut Rows| engine.score(own, weights, min_micro_batches);
        let found = self.on_own_rows(rows, score)?;
        let mut scores = vec![0.0; rows.tokens.len()];
        for (range, own) in ranges.into_iter().zip(found) {
            if let Some(own) = own {
                scores[range.start * positions..range.end * positions].copy_from_slice(&own);
            }
        }
        Ok(scores)
    }

    /// Runs work on all workers in parallel, each with a copy of its own part of a step's rows. Returns the results in
    /// rank order.
    fn on_own_rows<T: Send + 'static>(
        &mut self,
        rows: &Rows,
        work: impl Fn(&mut Engine, &mut Rows) -> Result<T, DeviceError> + Send + Sync + 'static,
    ) -> Result<Vec<T>, DeviceFailure> {
        let work = Arc::new(work);
        let found = self.run_tasks(&mut NoFiles, |_, worker| {
            let own = worker.own_range(rows.len());
            let mut own_rows = std::mem::take(&mut worker.rows);
            own_rows.copy_from(rows, own);
            let work = Arc::clone(&work);
            // A worker may have no rows for some micro-batches, but the others need its part of the state.
            Some(Box::new(move |engine, _| {
                work(engine, &mut own_rows).map(|result| (result, own_rows)).map_err(DeviceFailure::from)
            }))
        })?;
        let reuse = |(worker, (result, rows)): (&mut Worker, (T, Rows))| {
            worker.rows = rows;
            result
        };
        Ok(self.workers.iter_mut().zip(found).map(reuse).collect())
    }

    /// Records the measured seconds of a step in a team of one; does nothing in a larger team.
    pub fn record_step_seconds(&mut self, seconds: f64) {
        if let [only] = &mut self.workers[..] {
            only.slowdowns.push(seconds / only.plan.predicted.step_seconds);
        }
    }

    /// Returns whether each worker holds a part of the model that no other has: sharded or pipeline parallel.
    pub fn is_partitioned(&self) -> bool {
        matches!(self.workers[0].share.parallelism, Some(Parallelism::Sharded | Parallelism::Pipeline))
    }

    /// Returns the number of micro-batches that every worker of a sharded or pipeline team must run: that of the worker
    /// with the most. Returns 0 where the workers are independent.
    fn common_micro_batches(&self) -> u64 {
        let micro_batches = |worker: &Worker| worker.plan.recipe.micro_batches(worker.sequences);
        if self.is_partitioned() { self.workers.iter().map(micro_batches).max().unwrap_or(0) } else { 0 }
    }

    /// Returns measured and predicted compute seconds of each worker in the last step, in rank order; `None` for
    /// storage-only workers. Both numbers are 0 if the device did not measure its seconds.
    pub fn compute_times(&self) -> Vec<Option<(f64, f64)>> {
        self.workers.iter().map(|worker| (worker.sequences > 0).then_some(worker.last_compute)).collect()
    }

    /// Updates the weights on all workers. After an out-of-memory error, the next call continues on the workers that
    /// have not finished.
    ///
    /// # Errors
    /// The failure of a worker; the others have updated nevertheless.
    pub fn update(&mut self) -> Result<(), DeviceFailure> {
        self.on_all(|_, engine| Ok(engine.update()?))?;
        Ok(())
    }

    /// Returns the number of finished update ops, summed over all workers. A worker with a finished update counts with
    /// a number larger than the ops of any update.
    pub fn update_ops_done(&self) -> u64 {
        self.workers.iter().map(|worker| worker.engine.update_ops_done()).sum()
    }

    /// Closes all devices and frees their memory.
    pub fn disband(&mut self) {
        while !self.workers.is_empty() {
            self.release(0);
        }
        self.monitor = None;
    }

    /// Removes a worker from the list, drops its engine, and returns the worker without an engine. Dropping the engine
    /// of a worker that missed its heartbeats may block, so a background thread does it.
    fn release(&mut self, rank: usize) -> Worker {
        let arenas = self.arena_bytes_of(rank).total();
        let mut worker = self.workers.remove(rank);
        let engine = std::mem::replace(&mut worker.engine, Engine::placeholder(&worker.device.name));
        if worker.is_lost() {
            self.abandoned.drop_in_background(engine, arenas);
        }
        worker
    }

    /// Returns the plan of the whole team, from the present plan of each worker. `before` is the previous plan of the
    /// team; it supplies what the workers' plans lack.
    pub fn plan(&self, before: &Plan) -> Plan {
        if let [only] = &self.workers[..] {
            return only.plan.clone();
        }
        let busiest = |team: &[WorkerPlan]| team.iter().map(|member| member.busy_seconds).fold(0.0, f64::max);
        let exchange = before.predicted.step_seconds - busiest(&before.team);
        let mut plan = before.clone();
        for ((worker, device), member) in self.workers.iter().zip(&mut plan.devices).zip(&mut plan.team) {
            *device = worker.plan.devices[0].clone();
            if member.recipe != worker.plan.recipe {
                member.busy_seconds = worker.plan.predicted.step_seconds;
            }
            member.recipe = worker.plan.recipe.clone();
            member.algorithms = worker.plan.algorithms.clone();
        }
        let step_seconds = busiest(&plan.team) + exchange;
        plan.team.iter_mut().for_each(|member| member.idle_seconds = step_seconds - member.busy_seconds);
        plan.predicted.tokens_per_second *= plan.predicted.step_seconds / step_seconds;
        plan.predicted.step_seconds = step_seconds;
        plan.recipe = self.workers[0].plan.recipe.clone();
        plan.host.arena_bytes = self.workers.iter().map(|worker| worker.plan.host.arena_bytes).sum();
        plan.host.peak_bytes = plan.host.arena_bytes;
        plan
    }

    /// Returns the names of all devices in rank order.
    pub fn names(&self) -> Vec<String> {
        self.workers.iter().map(|worker| worker.device.name.clone()).collect()
    }

    /// Returns the devices for the planner, with their present load lines and charges.
    pub fn specs(&self) -> Vec<DeviceSpec> {
        self.workers.iter().map(|worker| DeviceSpec { budget: worker.line.bytes, ..worker.device.clone() }).collect()
    }

    /// Returns the rank of the device of this name; `None` if it is not in the team.
    pub fn rank_of(&self, name: &str) -> Option<usize> {
        self.workers.iter().position(|worker| worker.device.name == name)
    }

    /// Sorts the workers in the order of `names`, which must contain the name of each worker.
    pub fn reorder(&mut self, names: &[String]) {
        self.workers.sort_by_key(|worker| names.iter().position(|name| *name == worker.device.name));
    }

    /// Switches every worker to its part of another plan, then forms a new communication group. `parts` holds the parts
    /// in rank order.
    ///
    /// # Errors
    /// The failure of a device; some workers may have switched.
    pub fn adopt(&mut self, parts: &[WorkerAssignment]) -> Result<(), DeviceFailure> {
        self.record_peaks(None);
        for (rank, part) in parts.iter().enumerate() {
            let answer = part.outcome.clone();
            self.on_one(rank, move |engine| Ok(engine.adopt(answer)?))?;
            let worker = &mut self.workers[rank];
            (worker.share, worker.sequences) = (part.share.clone(), part.sequences);
            worker.device.rates = part.device.rates.clone();
            // Earlier measurements belong to another share.
            worker.last_compute = (0.0, 0.0);
            worker.set_plan(part.outcome.plan.clone(), PredictedCompute::of(&part.device, &part.outcome));
            worker.line.preferred_recipe = worker.plan.recipe.clone();
        }
        // During the switch, old and new arenas existed side by side.
        self.reset_peak();
        self.form_group()
    }

    /// Returns the tensors that a Program of the workers reads from files or writes to them. Each tensor is listed
    /// once, even if several workers have it.
    pub fn file_tensors(&self, program: ProgramKind) -> Vec<StoredTensor> {
        let stages = if self.workers[0].share.parallelism == Some(Parallelism::Pipeline) { self.len() } else { 1 };
        self.workers[..stages].iter().flat_map(|worker| worker.engine.file_tensors(program)).cloned().collect()
    }

    /// Runs a Program that writes files. Data parallel: rank 0 writes. Sharded: rank 0 writes and the others send their
    /// parts. Pipeline: the stages write their layers one after the other.
    ///
    /// # Errors
    /// The failure of a device or a file.
    pub fn write_files(&mut self, program: ProgramKind, files: &mut dyn FileSpace) -> Result<(), DeviceFailure> {
        let writers = match self.workers[0].share.parallelism {
            None | Some(Parallelism::Data) => 1,
            Some(Parallelism::Pipeline) => self.len(),
            Some(Parallelism::Sharded) => 0,
        };
        if writers > 0 {
            for writer in 0..writers {
                self.run_tasks(files, |rank, _| {
                    let program = (rank == writer).then_some(program)?;
                    Some(Box::new(move |engine, files| Ok(engine.move_files(program, files)?)))
                })?;
            }
            return Ok(());
        }
        self.run_tasks(files, |rank, _| {
            Some(Box::new(move |engine, files| match rank {
                0 => Ok(engine.move_files(program, files)?),
                _ => Ok(engine.run(program)?),
            }))
        })?;
        Ok(())
    }

    /// Returns the entry of each worker in `result.json`, in rank order; empty for a team of one.
    pub fn worker_results(&self) -> Vec<WorkerResult> {
        if self.len() == 1 {
            return vec![];
        }
        self.workers.iter().map(Worker::result).collect()
    }

    /// Returns the sum over all devices of the measured peak rate of matrix products, in FLOP/s. Returns 0 if other
    /// programs used the CPU while its rate was measured.
    pub fn peak_flops(&self, precision: DType) -> f64 {
        match self.workers.iter().any(Worker::is_disturbed) {
            true => 0.0,
            false => self.workers.iter().map(|worker| worker.device.rates.product_flops(precision)).sum(),
        }
    }

    /// Stores the measured speed of devices that were slower than planned, for later plans. `run` names the run that
    /// measured it. Skips simulated devices, a CPU whose rates were measured while other programs used it, and devices
    /// with too few or too short steps.
    ///
    /// `contention` is the share of the time in which the run's threads waited for a core. Above
    /// [`MAX_LEARNED_CONTENTION`], other programs slowed the CPU: the run may then only disprove a stored slowness.
    pub fn store_measured_speeds(&self, run: &str, contention: f64) {
        for worker in self.workers.iter().filter(|worker| worker.has_comparable_speed()) {
            let times = quantile(&worker.slowdowns, 0.5);
            if is_own_speed(worker.device.kind, times, contention) {
                calibration::record_slowdown(&worker.device, times, run);
            }
        }
    }

    /// Removes a worker with all its memory, and returns its name. The remaining workers have no communication group
    /// until the next plan forms one.
    pub fn remove(&mut self, rank: usize) -> String {
        self.record_peaks(Some(rank));
        let Worker { device, .. } = self.release(rank);
        self.reset_peak();
        self.transport = group::transport(&self.workers);
        self.start_monitor();
        device.name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_of_contended_cpu_is_only_disproved() {
        assert!(is_own_speed(DeviceKind::Cpu, 3.0, 0.05));
        assert!(!is_own_speed(DeviceKind::Cpu, 3.0, 0.5), "other programs slowed it");
        assert!(is_own_speed(DeviceKind::Cpu, 0.8, 0.5), "faster than planned in spite of them");
        assert!(is_own_speed(DeviceKind::Cuda, 3.0, 0.5), "a GPU does not wait for cores");
    }
}
