//! The devices that work on a run, each with its engine, its share of every step, and the load line that it is held
//! under. A team of one is the rule. What several do they do at the same time (`abreast`); what one of them refuses is dropped
//! by all, so that they stay at the same step, and who is missed is left behind. `worker` is one device, `seats` is how all are told
//! their places, `held` what they hold; `open` opens them, `absent` are those that may come back, `sharing` shares the work anew
//! when a device is gone or `drift`s from its plan.

pub(crate) mod abreast;
pub(crate) mod absent;
pub(crate) mod drift;
pub(crate) mod heartbeat;
mod held;
pub mod open;
mod seats;
pub(crate) mod sharing;
mod worker;

pub use worker::{Computing, Worker};

use crate::data::Rows;
use crate::fault_injection::{Asked, Rehearsal};
use crate::files::StoredTensor;
use crate::inference::samples::Continues;
use crate::planning::prepare::Part;
use crate::remote::Elsewhere;
use crate::session::engine::{Engine, StepInput, StepLoss};
use crate::session::pace::quantile;
use crate::session::trouble::Trouble;
use crate::team::heartbeat::{Watch, silent};
use abreast::{Behind, Came, Hand, Task, abreast};
use drift::SECONDS_LEAST;
use plimsoll_core::{Bytes, DType, DeviceSpec, Member, MemberResult, Plan, Sharing};
use plimsoll_device::calibration;
use plimsoll_device::device::{DeviceError, FileSpace, NoFiles};
use plimsoll_device::transport::Transport;
use std::sync::Arc;
use std::time::Duration;

/// Fewer steps say nothing of a device's speed.
const STEPS_LEAST: usize = 8;

/// All devices of a run, in the order of ranks.
pub struct Team {
    workers: Vec<Worker>,
    transport: Arc<dyn Transport>,
    /// After so long without a sign of life a device is lost.
    silence: Duration,
    watch: Option<Watch>,
    behind: Behind,
    /// Whether others could take over from the last device.
    relieved: bool,
    /// Bytes of arenas in this process's memory that stand beside those of the team, and the most that the process held with
    /// them, the team's left out, before the team's arenas that there are now, measured.
    beside: Bytes,
    held_beside: Bytes,
    /// The devices that live elsewhere.
    elsewhere: Elsewhere,
    /// Teams that there have been.
    teams: u64,
}

impl Continues for Team {
    fn extend(&mut self, tokens: &[i32], length: usize) -> Result<Vec<f64>, Trouble> {
        if !self.holds_parts() {
            let tokens = tokens.to_vec();
            return self.one(0, move |engine| Ok(engine.extend(&tokens, length)?));
        }
        // All have the same tokens; those that come to logits, which of a pipeline is the last stage, come to the same.
        let tokens = tokens.to_vec();
        let all = self.all(move |_, engine| Ok(engine.extend(&tokens, length)?))?;
        Ok(all.into_iter().find(|logits| !logits.is_empty()).expect("somebody has the head"))
    }

    fn capacity(&self) -> usize {
        self.workers[0].engine.capacity()
    }
}

impl Team {
    /// Brings open devices together; `behind` is what those before them have left, and from one that works alone others could
    /// take over if it is `relieved`.
    ///
    /// # Errors
    /// A device that cannot work in a team.
    pub fn new(
        workers: Vec<Worker>,
        elsewhere: Elsewhere,
        silence: Duration,
        behind: Behind,
        relieved: bool,
    ) -> Result<Team, Trouble> {
        let transport = seats::transport(&workers);
        let (beside, held_beside) = (Bytes::ZERO, Bytes::ZERO);
        let mut team = Team {
            workers,
            transport,
            silence,
            watch: None,
            behind,
            elsewhere,
            teams: 0,
            relieved,
            beside,
            held_beside,
        };
        if let [only] = &mut team.workers[..]
            && !only.is_far()
            && !relieved
        {
            // From now on it is missed by nobody. A process elsewhere misses the run, too.
            only.heart = None;
        }
        if let Err(trouble) = team.seat() {
            team.disband();
            return Err(trouble);
        }
        Ok(team)
    }

    /// Nobody yet.
    pub fn nobody(elsewhere: Elsewhere, behind: Behind) -> Team {
        Team::new(Vec::new(), elsewhere, Duration::ZERO, behind, false).expect("nobody refuses a seat")
    }

    /// Whether others could take over from the last device: then that is missed, too, from the next plan on.
    pub fn is_relieved(&mut self, relieved: bool) {
        self.relieved = relieved;
    }

    /// From now on these devices are missed where they are silent.
    fn watch(&mut self) {
        let pulse = |(rank, worker): (u32, &Worker)| Some((rank, worker.device.name.clone(), worker.pulse()?));
        // The one before looks away first.
        self.watch = None;
        let team: Vec<_> = (0..).zip(&self.workers).filter_map(pulse).collect();
        let transport = Arc::clone(&self.transport);
        let lost = move |rank: u32, why: &str| transport.give_up(rank, why);
        let missed = self.len() > 1 || self.relieved || self.workers.iter().any(Worker::is_far);
        self.watch = if missed { Watch::start(team, lost, self.silence) } else { None };
    }

    /// The only device, where nobody misses it.
    fn unwatched(&mut self) -> Option<&mut Worker> {
        let watched = self.watch.is_some();
        match &mut self.workers[..] {
            [only] if !watched => Some(only),
            _ => None,
        }
    }

    /// A device that was silent for too long.
    fn missed(&self) -> Option<Trouble> {
        let rank = self.workers.iter().position(Worker::is_missed)?;
        Some(Trouble::Lost { rank, why: silent(&self.workers[rank].device.name, self.silence) })
    }

    /// How many devices there are.
    pub fn len(&self) -> usize {
        self.workers.len()
    }

    /// All of them.
    pub fn workers(&self) -> &[Worker] {
        &self.workers
    }

    /// One of them.
    pub fn worker(&mut self, rank: usize) -> &mut Worker {
        &mut self.workers[rank]
    }

    /// The one that writes files and draws samples.
    pub fn first(&mut self) -> &mut Worker {
        &mut self.workers[0]
    }

    /// The rank of the device of this name; where none is named there must be one alone.
    ///
    /// # Errors
    /// No such device, in words.
    pub fn named(&self, device: Option<&str>) -> Result<usize, String> {
        let names = || self.workers.iter().map(|worker| worker.device.name.as_str()).collect::<Vec<_>>().join(", ");
        match device {
            None if self.len() == 1 => Ok(0),
            None => Err(format!("name the device: --device one of {}", names())),
            Some(name) => {
                let rank = self.workers.iter().position(|worker| worker.device.name == name);
                rank.ok_or_else(|| format!("no `{name}` works on this run; there is {}", names()))
            }
        }
    }

    /// All do some work at the same time, each knowing its rank. Where one cannot, none has done it, and what happened to that
    /// one is told.
    ///
    /// # Errors
    /// What a device fails with.
    pub fn all<T: Send + 'static>(
        &mut self,
        work: impl Fn(usize, &mut Engine) -> Result<T, Trouble> + Send + Sync + 'static,
    ) -> Result<Vec<T>, Trouble> {
        let work = Arc::new(work);
        self.each(&mut NoFiles, |rank, _| {
            let work = Arc::clone(&work);
            Some(Box::new(move |engine, _| work(rank, engine)))
        })
    }

    /// One of them does some work.
    ///
    /// # Errors
    /// As above.
    pub fn one<T: Send + 'static>(
        &mut self,
        rank: usize,
        work: impl FnOnce(&mut Engine) -> Result<T, Trouble> + Send + 'static,
    ) -> Result<T, Trouble> {
        let mut work = Some(work);
        let task = |of: usize, _: &mut Worker| -> Option<Task<T>> {
            let work = work.take_if(|_| of == rank)?;
            Some(Box::new(move |engine, _| work(engine)))
        };
        Ok(self.each(&mut NoFiles, task)?.pop().expect("it has done it"))
    }

    /// The same of work that stores something, and of those for whom there is a task.
    fn each<T: Send + 'static>(
        &mut self,
        files: &mut dyn FileSpace,
        mut task: impl FnMut(usize, &mut Worker) -> Option<Task<T>>,
    ) -> Result<Vec<T>, Trouble> {
        if let Some(trouble) = self.missed() {
            return Err(trouble);
        }
        if let Some(only) = self.unwatched() {
            return task(0, only).into_iter().map(|task| task(&mut only.engine, files)).collect();
        }
        let held: Vec<Bytes> = (0..self.len()).map(|rank| self.arenas_of(rank).into_iter().sum()).collect();
        let hand = |(rank, worker): (usize, &mut Worker)| {
            let task = task(rank, worker)?;
            let engine = std::mem::replace(&mut worker.engine, Engine::gone(&worker.device.name));
            Some(Hand { rank, engine, pulse: worker.pulse(), task })
        };
        let hands = self.workers.iter_mut().enumerate().filter_map(hand).collect();
        let mut came = abreast(hands, &self.transport, files);
        came.sort_by_key(|(rank, _)| *rank);
        let mut results = Vec::new();
        for (rank, came) in came {
            match came {
                Came::Back(engine, result) => {
                    self.workers[rank].engine = *engine;
                    results.push(result);
                }
                Came::Not(holds) => self.behind.leave(held[rank], holds),
            }
        }
        // Where somebody is missed, this team meets no more.
        if let Some(trouble) = self.missed() {
            return Err(trouble);
        }
        self.transport.clear();
        let mut done = Vec::new();
        let mut worst: Option<Trouble> = None;
        for result in results {
            match result {
                Ok(value) => done.push(value),
                Err(trouble) if worst.as_ref().is_none_or(|worst| trouble.weight() > worst.weight()) => {
                    worst = Some(trouble);
                }
                Err(_) => {}
            }
        }
        match worst {
            None => Ok(done),
            // It has nothing to say itself, and the others do not reach it.
            Some(Trouble::Peer(DeviceError::CutOff { rank, why })) => {
                let name = self.workers.get(rank as usize).map_or("a device", |worker| &worker.device.name);
                Err(Trouble::Lost { rank: rank as usize, why: format!("{name} cannot be reached: {why}") })
            }
            Some(worst) => Err(worst),
        }
    }

    /// From now on this step is being done: for rehearsals.
    pub fn at_step(&mut self, step: u64) {
        for worker in &mut self.workers {
            worker.engine.at_step(step);
        }
    }

    /// Devices refuse, and are lost, where this says.
    pub fn rehearse(&mut self, asked: &[Arc<Asked>], seed: u64) {
        for (rank, worker) in (0..).zip(&mut self.workers) {
            let pulse = worker.pulse();
            worker.engine.rehearse(Rehearsal::new(asked, seed, rank, &worker.device.name, pulse));
        }
    }

    /// Gradients of all rows of a step, and the clip factor: on each device those of its own rows, summed up over all.
    /// The weights stay as they are.
    ///
    /// # Errors
    /// What a device fails with; the step is dropped on all of them.
    pub fn gradients(&mut self, rows: &mut Rows, input: &StepInput) -> Result<StepLoss, Trouble> {
        if let Some(only) = self.unwatched() {
            return Ok(only.engine.gradients(rows, input, 1)?);
        }
        let (input, together) = (*input, self.micro_batches());
        let found = self.each(&mut NoFiles, |_, worker| {
            let own = worker.own(rows.len());
            let mut mine = std::mem::take(&mut worker.rows);
            mine.copy_from(rows, own);
            // In some micro-batches it may have nothing to do, but others need its part of the state.
            Some(Box::new(move |engine, _| {
                engine.gradients(&mut mine, &input, together).map(|found| (found, mine)).map_err(Trouble::from)
            }))
        })?;
        let mut losses = Vec::new();
        for (worker, (loss, rows)) in self.workers.iter_mut().zip(found) {
            // Its room is used again.
            worker.rows = rows;
            losses.push(loss);
        }
        // Of who computes no sequences nothing of the kind is known, and of who is alone it is not asked.
        let together = self.workers.len() > 1;
        for worker in self.workers.iter_mut().filter(|worker| together && worker.sequences > 0) {
            let Some(own) = worker.engine.computed() else { continue };
            let predicted = own.micro_batches as f64 * worker.computing.micro_batch + worker.computing.once;
            worker.computed = (own.seconds, predicted);
            worker.factors.push(own.seconds / predicted);
        }
        Ok(losses[0])
    }

    /// A step of a device alone took so long, measured.
    pub fn took(&mut self, seconds: f64) {
        if let [only] = &mut self.workers[..] {
            only.factors.push(seconds / only.plan.predicted.step_seconds);
        }
    }

    /// Whether each device holds a part of the model that no other has: of the state, or of the layers.
    pub fn holds_parts(&self) -> bool {
        matches!(self.workers[0].share.sharing, Some(Sharing::State | Sharing::Layers))
    }

    /// Micro-batches of a step that all have to do together, because each holds a part of the state: as many as whoever has
    /// most of them. 0 where everybody works by itself.
    fn micro_batches(&self) -> u64 {
        let of = |worker: &Worker| worker.plan.recipe.micro_batches(worker.sequences);
        if self.holds_parts() { self.workers.iter().map(of).max().unwrap_or(0) } else { 0 }
    }

    /// Measured and predicted seconds in which each device computed in the last step; none of those without sequences.
    pub fn computed(&self) -> Vec<Option<(f64, f64)>> {
        self.workers.iter().map(|worker| (worker.sequences > 0).then_some(worker.computed)).collect()
    }

    /// The weights change, on all devices in the same way. Called again after a refusal, it goes on where it stopped, on
    /// those that are not done.
    ///
    /// # Errors
    /// What a device fails with; the others have done it all the same.
    pub fn update(&mut self) -> Result<(), Trouble> {
        self.all(|_, engine| Ok(engine.update()?))?;
        Ok(())
    }

    /// How far the update of the present step has come: ops that are done, over all devices; those of one that is done count
    /// as more than any has.
    pub fn updated(&self) -> u64 {
        self.workers.iter().map(|worker| worker.engine.updated()).sum()
    }

    /// Lets all devices go, with all that stands on them.
    pub fn disband(&mut self) {
        while !self.workers.is_empty() {
            self.let_go(0);
        }
        self.watch = None;
    }

    /// Lets a device go with all that stands on it; one that is missed may never come back from that.
    fn let_go(&mut self, rank: usize) -> Worker {
        let arenas = self.arenas_of(rank).into_iter().sum();
        let mut worker = self.workers.remove(rank);
        let engine = std::mem::replace(&mut worker.engine, Engine::gone(&worker.device.name));
        if worker.is_missed() {
            self.behind.let_go(engine, arenas);
        }
        worker
    }

    /// The plan of all, from what each goes by now.
    pub fn plan(&self, before: &Plan) -> Plan {
        if let [only] = &self.workers[..] {
            return only.plan.clone();
        }
        let busiest = |team: &[Member]| team.iter().map(|member| member.busy_seconds).fold(0.0, f64::max);
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

    /// The names of all devices.
    pub fn names(&self) -> Vec<String> {
        self.workers.iter().map(|worker| worker.device.name.clone()).collect()
    }

    /// The devices as the planner sees them now: under the load lines that hold, with what they hold beside their arenas.
    pub fn specs(&self) -> Vec<DeviceSpec> {
        self.workers.iter().map(|worker| DeviceSpec { budget: worker.line.bytes, ..worker.device.clone() }).collect()
    }

    /// The place of a device.
    pub fn rank_of(&self, name: &str) -> Option<usize> {
        self.workers.iter().position(|worker| worker.device.name == name)
    }

    /// Takes the order of these names, which are those of all devices.
    pub fn order_as(&mut self, names: &[String]) {
        self.workers.sort_by_key(|worker| names.iter().position(|name| *name == worker.device.name));
    }

    /// Every device goes over to its part of another way to share the work.
    ///
    /// # Errors
    /// What a device refuses: then some have gone over, and some have not.
    pub fn adopt(&mut self, parts: &[Part]) -> Result<(), Trouble> {
        self.look_back(None);
        for (rank, part) in parts.iter().enumerate() {
            let answer = part.answer.clone();
            self.one(rank, move |engine| Ok(engine.adopt(answer)?))?;
            let worker = &mut self.workers[rank];
            (worker.share, worker.sequences) = (part.share.clone(), part.sequences);
            worker.device.rates = part.device.rates.clone();
            // What it was compared with is no more.
            worker.computed = (0.0, 0.0);
            worker.goes_by(part.answer.plan.clone(), Computing::of(&part.device, &part.answer));
            worker.line.home = worker.plan.recipe.clone();
        }
        // On the way there were arenas of both.
        self.reset_peak();
        self.seat()
    }

    /// The tensors of files that a Program reads or writes, of all devices together, each once.
    pub fn files(&self, program: &str) -> Vec<StoredTensor> {
        let stages = if self.workers[0].share.sharing == Some(Sharing::Layers) { self.len() } else { 1 };
        self.workers[..stages].iter().flat_map(|worker| worker.engine.files(program)).cloned().collect()
    }

    /// Runs a Program that writes files: the first device does it, with the help of the others where what is written
    /// stands in parts on all of them; the stages of a pipeline do it one after the other, each with what is its own.
    ///
    /// # Errors
    /// What a device or a file fails with.
    pub fn store(&mut self, program: &str, files: &mut dyn FileSpace) -> Result<(), Trouble> {
        let writers = match self.workers[0].share.sharing {
            None | Some(Sharing::Batch) => 1,
            Some(Sharing::Layers) => self.len(),
            Some(Sharing::State) => 0,
        };
        if writers > 0 {
            for writer in 0..writers {
                self.each(files, |rank, _| {
                    let program = (rank == writer).then(|| program.to_owned())?;
                    Some(Box::new(move |engine, files| Ok(engine.move_files(&program, files)?)))
                })?;
            }
            return Ok(());
        }
        self.each(files, |rank, _| {
            let program = program.to_owned();
            Some(Box::new(move |engine, files| match rank {
                0 => Ok(engine.move_files(&program, files)?),
                _ => Ok(engine.run(&program)?),
            }))
        })?;
        Ok(())
    }

    /// What each did in the last step; nothing of a device alone.
    pub fn results(&self) -> Vec<MemberResult> {
        if self.len() == 1 {
            return vec![];
        }
        let result = |worker: &Worker| MemberResult {
            device: worker.device.name.clone(),
            simulated: worker.device.simulated(),
            sequences: worker.sequences,
            recipe: worker.plan.recipe.clone(),
            passes_over_predicted: quantile(&worker.factors, 0.5),
            collectives: worker.engine.collectives(),
        };
        self.workers.iter().map(result).collect()
    }

    /// Operations a second that the devices were measured to do in products of this arithmetic, all together; 0 where one
    /// was measured beside other work, which is no peak.
    pub fn peak_flops(&self, precision: DType) -> f64 {
        match self.workers.iter().any(Worker::is_disturbed) {
            true => 0.0,
            false => self.workers.iter().map(|worker| worker.device.rates.product_flops(precision)).sum(),
        }
    }

    /// Devices that were far slower than planned are planned as such by the next run. Simulated ones are as fast as the user
    /// says, and rates that were measured beside other work are nothing to compare with.
    pub fn remember_speeds(&self, run: &str) {
        let known = |worker: &Worker| !worker.device.simulated() && !worker.is_disturbed();
        let real = |worker: &&Worker| known(worker) && worker.plan.predicted.step_seconds >= SECONDS_LEAST;
        for worker in self.workers.iter().filter(real).filter(|worker| worker.factors.len() >= STEPS_LEAST) {
            calibration::keep_speed(&worker.device, quantile(&worker.factors, 0.5), run);
        }
    }

    /// A device that is gone leaves, with all that it held; the others are told their new places by the next plan. Its name.
    pub fn leave(&mut self, rank: usize) -> String {
        self.look_back(Some(rank));
        let Worker { device, .. } = self.let_go(rank);
        self.reset_peak();
        self.transport = seats::transport(&self.workers);
        self.watch();
        device.name
    }
}
