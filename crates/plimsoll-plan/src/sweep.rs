//! Several runs on one set of devices: which run starts where, when, and with how much of a device. Packing over time,
//! by bytes: the plan of a run is exact, so workers stand side by side on a device as long as their load lines add up to
//! no more than the device's. What runs where is decided anew whenever a worker starts or ends, from what is known then.
//! Here are numbers alone; processes are the business of who asks.
//!
//! ```text
//!  bytes ┌──────────────┬───────────┐      A device's time is divided in equal parts, and a worker has so many of
//!   line │ c            │ e         │      them from its start to its end. Those that start together are given parts
//!        ├──────────┬───┴───────────┤      by their work, so that they end together and leave room in one piece.
//!        │ b        │ d             │
//!        └──────────┴───────────────┘ time
//! ```

use plimsoll_core::Bytes;

/// Those who could start beside others wait for a whole device as long as that costs less than this part of their work:
/// who starts together ends together, and no time is lost in between. Chosen by simulation: with predictions that are off
/// by up to a tenth, 30 runs end 2.5 % after the bound in the mean and 7 % at most; without waiting 7 % and 64 %.
const WAIT: f64 = 0.3;

/// Among more jobs than that, single moves are even enough.
const EXCHANGES_MOST: usize = 200;

/// A device as workers share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// The load line: the most that its workers may hold together.
    pub line: Bytes,
    /// The parts that its time can be divided in.
    pub parts: u32,
    /// The fewest parts that a worker has, at least one.
    pub parts_least: u32,
    /// The most workers at a time.
    pub workers: u32,
}

/// What a run needs of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Demand {
    /// Its load line there.
    pub bytes: Bytes,
    /// What waits on the host.
    pub host_bytes: Bytes,
    /// Seconds of work, with all of the device's time.
    pub work_seconds: f64,
    /// Seconds that take as long whatever its part of the device is: starting, reading files.
    pub fixed_seconds: f64,
}

/// A run that wants to be done. By the number of the device: what it needs there, where it can be done there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Job {
    /// One for each device.
    pub demands: Vec<Option<Demand>>,
}

/// A run on a device, from its start to its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Worker {
    /// Which job, by its number.
    pub job: usize,
    /// Which device, by its number.
    pub device: usize,
    /// Its load line.
    pub bytes: Bytes,
    /// Its load line on the host.
    pub host_bytes: Bytes,
    /// Its parts of the device's time.
    pub parts: u32,
    /// When it starts, in seconds from the beginning.
    pub start: f64,
    /// When it is predicted to end.
    pub end: f64,
}

impl Worker {
    /// Seconds that it is predicted to take yet; of one that is late, as long as it is late already.
    fn left(&self, now: f64) -> f64 {
        (self.end - now).abs()
    }
}

/// What runs and what waits.
#[derive(Clone, Debug)]
pub struct Sweep {
    rooms: Vec<Room>,
    host: Bytes,
    jobs: Vec<Job>,
    waiting: Vec<usize>,
    running: Vec<Worker>,
    /// By the number of the device: whether it is lost.
    lost: Vec<bool>,
}

impl Sweep {
    /// Jobs on devices beside a host whose line is `host`. A job that needs more than a device has is not done there.
    pub fn new(rooms: Vec<Room>, host: Bytes, jobs: Vec<Job>) -> Sweep {
        let lost = vec![false; rooms.len()];
        let mut sweep = Sweep { rooms, host, jobs: Vec::new(), waiting: Vec::new(), running: Vec::new(), lost };
        for job in jobs {
            sweep.add(job);
        }
        sweep
    }

    /// One more job; its number. It waits, unless it can be done nowhere.
    pub fn add(&mut self, job: Job) -> usize {
        self.jobs.push(Job::default());
        let number = self.jobs.len() - 1;
        self.again(number, job);
        number
    }

    /// A job that is not running waits once more, with other needs. Whether it can be done anywhere.
    pub fn again(&mut self, number: usize, mut job: Job) -> bool {
        for (demand, room) in job.demands.iter_mut().zip(&self.rooms) {
            *demand = demand.filter(|demand| demand.bytes <= room.line && demand.host_bytes <= self.host);
        }
        let somewhere = job.demands.iter().any(Option::is_some);
        self.jobs[number] = job;
        self.waiting.retain(|&other| other != number);
        self.waiting.extend(somewhere.then_some(number));
        somewhere
    }

    /// What a job needs, where it can be done.
    pub fn job(&self, number: usize) -> &Job {
        &self.jobs[number]
    }

    /// The jobs that wait.
    pub fn waiting(&self) -> &[usize] {
        &self.waiting
    }

    /// The jobs that run.
    pub fn running(&self) -> &[Worker] {
        &self.running
    }

    /// A worker is gone, and what it held is free.
    pub fn end(&mut self, job: usize) {
        self.running.retain(|worker| worker.job != job);
    }

    /// A device is lost, or there again: nothing starts on one that is lost.
    pub fn set_lost(&mut self, device: usize, lost: bool) {
        self.lost[device] = lost;
    }

    /// Whether some wait, and all of them for devices that are lost.
    pub fn waits_for_lost(&self) -> bool {
        let somewhere = |job: usize| (0..self.rooms.len()).any(|device| self.demand(job, device).is_some());
        !self.waiting.is_empty() && !self.waiting.iter().any(|&job| somewhere(job))
    }

    /// What a job needs of a device, where it can be done there now.
    fn demand(&self, job: usize, device: usize) -> Option<Demand> {
        self.jobs[job].demands[device].filter(|_| !self.lost[device])
    }

    /// The workers that start now, in this order. They hold what they were given until [`Sweep::end`].
    pub fn start(&mut self, now: f64) -> Vec<Worker> {
        let mut started = Vec::new();
        let (lists, horizons) = self.shared_out(now);
        for (device, (list, horizon)) in lists.iter().zip(horizons).enumerate() {
            let workers = self.fitting(device, list, horizon, now);
            for worker in &workers {
                self.waiting.retain(|&job| job != worker.job);
                self.running.push(*worker);
            }
            started.extend(workers);
        }
        started
    }

    /// The jobs that wait, shared out among the devices so that all end at about the same time, longest first; and in
    /// how many seconds each device would be done if all of its time were used.
    fn shared_out(&self, now: f64) -> (Vec<Vec<usize>>, Vec<f64>) {
        let load = |device: usize| if self.lost[device] { 0.0 } else { self.load(device, now) };
        let mut loads: Vec<f64> = (0..self.rooms.len()).map(load).collect();
        let work = |job: usize, device: usize| self.demand(job, device).map(|demand| demand.work_seconds);
        let all = |job: usize| (0..self.rooms.len()).filter_map(move |device| work(job, device));
        let choices = |job: usize| all(job).count();
        let least = |job: usize| all(job).fold(f64::INFINITY, f64::min);
        // Those that have no choice first, then the longest.
        let mut order: Vec<usize> = self.waiting.iter().copied().filter(|&job| choices(job) > 0).collect();
        order.sort_by(|&a, &b| choices(a).cmp(&choices(b)).then(least(b).total_cmp(&least(a))).then(a.cmp(&b)));
        let mut given: Vec<(usize, usize)> = Vec::new();
        for &job in &order {
            let ends = (0..loads.len()).filter_map(|device| Some((device, loads[device] + work(job, device)?)));
            let (device, end) = ends.min_by(|a, b| a.1.total_cmp(&b.1)).expect("it can be done somewhere");
            loads[device] = end;
            given.push((job, device));
        }
        self.even_out(&mut given, &mut loads);
        let mut lists = vec![Vec::new(); self.rooms.len()];
        given.sort_by(|a, b| {
            work(b.0, b.1).unwrap_or(0.0).total_cmp(&work(a.0, a.1).unwrap_or(0.0)).then(a.0.cmp(&b.0))
        });
        for (job, device) in given {
            lists[device].push(job);
        }
        (lists, loads)
    }

    /// Moves and exchanges jobs while the last device to end gets done earlier by it.
    fn even_out(&self, given: &mut [(usize, usize)], loads: &mut [f64]) {
        let work = |job: usize, device: usize| self.demand(job, device).map(|demand| demand.work_seconds);
        for _ in 0..2 * given.len() {
            let Some(last) = (0..loads.len()).max_by(|&a, &b| loads[a].total_cmp(&loads[b])) else { return };
            // The better of the two ends after it, which job moves where, and which one comes back for it.
            let mut best: Option<(f64, usize, usize, Option<usize>)> = None;
            let mut offer = |end: f64, index: usize, device: usize, back: Option<usize>| {
                if end < best.map_or(loads[last] * (1.0 - 1e-9), |best| best.0) {
                    best = Some((end, index, device, back));
                }
            };
            for (index, &(job, _)) in given.iter().enumerate().filter(|(_, given)| given.1 == last) {
                let here = work(job, last).unwrap_or(0.0);
                for device in (0..loads.len()).filter(|&device| device != last) {
                    let Some(there) = work(job, device) else { continue };
                    offer((loads[last] - here).max(loads[device] + there), index, device, None);
                    if given.len() > EXCHANGES_MOST {
                        continue;
                    }
                    for (other, &(back, _)) in given.iter().enumerate().filter(|(_, given)| given.1 == device) {
                        let Some(back_here) = work(back, last) else { continue };
                        let back_there = work(back, device).unwrap_or(0.0);
                        let ends = (loads[last] - here + back_here, loads[device] + there - back_there);
                        offer(ends.0.max(ends.1), index, device, Some(other));
                    }
                }
            }
            let Some((_, index, device, back)) = best else { return };
            let mut give = |index: usize, from: usize, to: usize| {
                let job = given[index].0;
                loads[from] -= work(job, from).unwrap_or(0.0);
                loads[to] += work(job, to).unwrap_or(0.0);
                given[index].1 = to;
            };
            give(index, last, device);
            if let Some(back) = back {
                give(back, device, last);
            }
        }
    }

    /// Seconds of the whole device that its workers still take.
    fn load(&self, device: usize, now: f64) -> f64 {
        let parts = f64::from(self.rooms[device].parts);
        self.on(device).map(|worker| worker.left(now) * f64::from(worker.parts) / parts).sum()
    }

    fn on(&self, device: usize) -> impl Iterator<Item = &Worker> {
        self.running.iter().filter(move |worker| worker.device == device)
    }

    /// Those of a list that start on a device now. They share what is free of its time by their work. None of them is
    /// given so little that it would be the last to end: it rather waits for more.
    fn fitting(&self, device: usize, list: &[usize], horizon: f64, now: f64) -> Vec<Worker> {
        let room = self.rooms[device];
        let parts = room.parts - self.on(device).map(|worker| worker.parts).sum::<u32>();
        let free = f64::from(parts) / f64::from(room.parts);
        let mut list = list.to_vec();
        let mut chosen = self.first_that_fit(device, parts, &list);
        if self.on(device).next().is_some() {
            let seconds =
                |chosen: &[(usize, Demand)]| chosen.iter().map(|(_, demand)| demand.work_seconds).sum::<f64>();
            let empty = self.on(device).map(|worker| worker.left(now)).fold(0.0, f64::max);
            if empty * free < WAIT * seconds(&chosen) {
                return Vec::new();
            }
            while !chosen.is_empty() && seconds(&chosen) > horizon * free {
                let longest = chosen[0].0;
                list.retain(|&job| job != longest);
                chosen = self.first_that_fit(device, parts, &list);
            }
        }
        let shares =
            divide(parts, room.parts_least, &chosen.iter().map(|(_, demand)| demand.work_seconds).collect::<Vec<_>>());
        let workers = chosen.iter().zip(shares).map(|(&(job, demand), share)| {
            let takes = demand.fixed_seconds + demand.work_seconds * f64::from(room.parts) / f64::from(share);
            let Demand { bytes, host_bytes, .. } = demand;
            Worker { job, device, bytes, host_bytes, parts: share, start: now, end: now + takes }
        });
        workers.collect()
    }

    /// Those of a list for whom there is room on a device now, the first first.
    fn first_that_fit(&self, device: usize, parts: u32, list: &[usize]) -> Vec<(usize, Demand)> {
        let room = self.rooms[device];
        let mut bytes = room.line.saturating_sub(self.on(device).map(|worker| worker.bytes).sum());
        let mut host = self.host.saturating_sub(self.running.iter().map(|worker| worker.host_bytes).sum());
        let most = (parts / room.parts_least).min(room.workers.saturating_sub(self.on(device).count() as u32)) as usize;
        let mut chosen: Vec<(usize, Demand)> = Vec::new();
        for &job in list {
            let demand = self.demand(job, device).expect("a list has what can be done there");
            if chosen.len() < most && demand.bytes <= bytes && demand.host_bytes <= host {
                bytes = bytes - demand.bytes;
                host = host - demand.host_bytes;
                chosen.push((job, demand));
            }
        }
        chosen
    }
}

/// Divides parts in proportion, at least so many to each; there are enough for that.
fn divide(parts: u32, least: u32, weights: &[f64]) -> Vec<u32> {
    let sum: f64 = weights.iter().sum();
    let share = |weight: f64| if sum > 0.0 { weight / sum } else { 1.0 / weights.len() as f64 };
    let exact: Vec<f64> = weights.iter().map(|&weight| f64::from(parts) * share(weight)).collect();
    // What is left when all have the least goes to those who should have more.
    let spare = f64::from(parts - least * weights.len() as u32);
    let beyond = |exact: f64| (exact - f64::from(least)).max(0.0);
    let all: f64 = exact.iter().map(|&exact| beyond(exact)).sum();
    let more = |exact: f64| if all > 0.0 { (spare * beyond(exact) / all) as u32 } else { 0 };
    let mut shares: Vec<u32> = exact.iter().map(|&exact| least + more(exact)).collect();
    // What rounding left goes to those who are furthest below what is theirs.
    for _ in shares.iter().sum()..parts {
        let short = |index: &usize| exact[*index] / f64::from(shares[*index]);
        let index = (0..shares.len()).max_by(|a, b| short(a).total_cmp(&short(b)));
        index.into_iter().for_each(|index| shares[index] += 1);
    }
    shares
}

/// The schedule if all goes as predicted: workers in the order in which they start.
pub fn simulate(sweep: Sweep) -> Vec<Worker> {
    simulate_with(sweep, |worker| worker.end)
}

/// The same, where a worker ends when `ends` says.
fn simulate_with(mut sweep: Sweep, ends: impl Fn(&Worker) -> f64) -> Vec<Worker> {
    let mut schedule: Vec<Worker> = Vec::new();
    let mut running: Vec<Worker> = Vec::new();
    let mut now = 0.0;
    loop {
        let started = sweep.start(now).into_iter().map(|worker| Worker { end: ends(&worker), ..worker });
        running.extend(started);
        let Some(next) = (0..running.len()).min_by(|&a, &b| running[a].end.total_cmp(&running[b].end)) else { break };
        let worker = running.swap_remove(next);
        now = worker.end;
        sweep.end(worker.job);
        schedule.push(worker);
    }
    schedule.sort_by(|a, b| a.start.total_cmp(&b.start).then(a.job.cmp(&b.job)));
    schedule
}

/// When the last of a schedule ends.
pub fn makespan(schedule: &[Worker]) -> f64 {
    schedule.iter().map(|worker| worker.end).fold(0.0, f64::max)
}

/// Seconds below which no schedule can end, however it packs: no job is done faster than with all of its fastest
/// device, and for each set of devices the jobs that can only be done there take their work of it. Devices are weighed
/// by their speed, which makes this the dual of sharing out divisible work (any weights give a bound).
pub fn bound(rooms: usize, jobs: &[Job]) -> f64 {
    let speeds = speeds(rooms, jobs);
    let alone = |demand: &Demand| demand.work_seconds + demand.fixed_seconds;
    let least = |job: &Job| job.demands.iter().flatten().map(alone).min_by(f64::total_cmp).unwrap_or(0.0);
    let mut bound = jobs.iter().map(least).fold(0.0, f64::max);
    for set in 1_u32..1 << rooms.min(12) {
        let inside = |device: usize| set >> device & 1 == 1;
        let all: f64 = (0..rooms).filter(|&device| inside(device)).map(|device| speeds[device]).sum();
        let mut work = 0.0;
        for job in jobs {
            let places = || job.demands.iter().enumerate().filter_map(|(device, demand)| Some((device, (*demand)?)));
            if places().all(|(device, _)| inside(device)) {
                let weighed = places().map(|(device, demand)| demand.work_seconds * speeds[device]);
                work += weighed.min_by(f64::total_cmp).unwrap_or(0.0);
            }
        }
        bound = f64::max(bound, work / all);
    }
    bound
}

/// How fast devices are, the first being 1: the geometric mean over the jobs that both can do.
fn speeds(rooms: usize, jobs: &[Job]) -> Vec<f64> {
    let work = |job: &Job, device: usize| {
        job.demands.get(device).copied().flatten().map(|demand| demand.work_seconds).filter(|work| *work > 0.0)
    };
    let mut speeds = vec![1.0];
    for device in 1..rooms {
        // Against the first device that shares a job with it.
        let ratios = |other: usize| -> Vec<f64> {
            jobs.iter().filter_map(|job| Some((work(job, other)? / work(job, device)?).ln())).collect()
        };
        let found = (0..device).map(|other| (other, ratios(other))).find(|(_, ratios)| !ratios.is_empty());
        speeds.push(
            found.map_or(1.0, |(other, ratios)| {
                speeds[other] * (ratios.iter().sum::<f64>() / ratios.len() as f64).exp()
            }),
        );
    }
    speeds
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn room(mib: u64, parts: u32) -> Room {
        Room { line: Bytes::mib(mib), parts, parts_least: 1, workers: u32::MAX }
    }

    /// A job of so many MiB that takes so long on a device of speed 1.
    fn job(mib: u64, seconds: f64, speeds: &[f64]) -> Job {
        let demand = |speed: &f64| {
            let work_seconds = seconds / speed;
            Some(Demand { bytes: Bytes::mib(mib), host_bytes: Bytes::ZERO, work_seconds, fixed_seconds: 0.0 })
        };
        Job { demands: speeds.iter().map(demand).collect() }
    }

    /// At no moment more than a device has: bytes, time, workers; and the host.
    fn check_lines(schedule: &[Worker], rooms: &[Room], host: Bytes) {
        for at in schedule.iter().map(|worker| worker.start) {
            // What ends at a moment makes room for what starts then.
            let now: Vec<&Worker> = schedule.iter().filter(|worker| worker.start <= at && at < worker.end).collect();
            for (device, room) in rooms.iter().enumerate() {
                let here = || now.iter().filter(|worker| worker.device == device);
                assert!(here().map(|worker| worker.bytes).sum::<Bytes>() <= room.line, "{schedule:?}");
                assert!(here().map(|worker| worker.parts).sum::<u32>() <= room.parts, "{schedule:?}");
                assert!(here().count() <= room.workers as usize, "{schedule:?}");
            }
            assert!(now.iter().map(|worker| worker.host_bytes).sum::<Bytes>() <= host, "{schedule:?}");
        }
    }

    #[test]
    fn workers_stand_side_by_side_by_bytes_and_end_together() {
        let jobs = vec![job(10, 4.0, &[1.0]), job(10, 2.0, &[1.0]), job(15, 6.0, &[1.0])];
        let schedule = simulate(Sweep::new(vec![room(25, 100)], Bytes::ZERO, jobs));
        // The longest and the longest that fits beside it; then what is left, with all of the device.
        let told: Vec<(usize, u32)> = schedule.iter().map(|worker| (worker.job, worker.parts)).collect();
        assert_eq!(told, [(0, 40), (2, 60), (1, 100)]);
        assert!((schedule[0].end - 10.0).abs() < 1e-9 && (schedule[1].end - 10.0).abs() < 1e-9);
        assert!((makespan(&schedule) - 12.0).abs() < 1e-9);
    }

    #[test]
    fn a_job_that_fits_nowhere_does_not_wait_and_holds_up_nobody() {
        let mut sweep = Sweep::new(vec![room(8, 10)], Bytes::ZERO, vec![job(9, 1.0, &[1.0]), job(8, 1.0, &[1.0])]);
        assert_eq!(sweep.waiting(), [1]);
        assert_eq!(sweep.start(0.0).len(), 1);
        sweep.end(1);
        assert!(!sweep.again(0, job(9, 1.0, &[1.0])) && sweep.again(0, job(7, 1.0, &[1.0])));
        assert_eq!(sweep.start(1.0)[0].job, 0);
    }

    #[test]
    fn nobody_starts_with_so_little_of_a_device_that_it_would_be_the_last_to_end() {
        let jobs = vec![job(10, 90.0, &[1.0]), job(10, 10.0, &[1.0])];
        let mut sweep = Sweep::new(vec![room(20, 100)], Bytes::ZERO, jobs);
        let first = sweep.start(0.0);
        assert_eq!((first[0].parts, first[1].parts), (90, 10));
        // The small one is gone early. A tenth of the device would do for five seconds, not for twenty.
        sweep.end(1);
        let long = sweep.add(job(10, 20.0, &[1.0]));
        assert_eq!(sweep.start(1.0), []);
        let short = sweep.add(job(10, 5.0, &[1.0]));
        let started = sweep.start(1.0);
        assert_eq!(started.iter().map(|worker| (worker.job, worker.parts)).collect::<Vec<_>>(), [(short, 10)]);
        sweep.end(short);
        // Soon all of it is free: that is worth waiting for.
        let last = sweep.add(job(10, 5.0, &[1.0]));
        assert_eq!(sweep.start(95.0), []);
        sweep.end(0);
        let together: Vec<usize> = sweep.start(100.0).iter().map(|worker| worker.job).collect();
        assert_eq!(together, [long, last]);
    }

    #[test]
    fn nothing_starts_on_a_device_that_is_lost_until_it_is_there_again() {
        let jobs = vec![job(10, 4.0, &[1.0, 1.0]), job(10, 3.0, &[1.0, 1.0]), job(25, 1.0, &[1.0, 1.0])];
        let mut sweep = Sweep::new(vec![room(10, 1), room(30, 1)], Bytes::ZERO, jobs);
        let started = |workers: Vec<Worker>| -> Vec<(usize, usize)> {
            workers.iter().map(|worker| (worker.job, worker.device)).collect()
        };
        sweep.set_lost(1, true);
        assert_eq!(started(sweep.start(0.0)), [(0, 0)]);
        assert!(!sweep.waits_for_lost());
        sweep.end(0);
        assert_eq!(started(sweep.start(4.0)), [(1, 0)]);
        sweep.end(1);
        // What is left fits on the other alone.
        assert_eq!(started(sweep.start(7.0)), []);
        assert!(sweep.waits_for_lost());
        sweep.set_lost(1, false);
        assert!(!sweep.waits_for_lost());
        assert_eq!(started(sweep.start(8.0)), [(2, 1)]);
        sweep.end(2);
        assert!(!sweep.waits_for_lost() && sweep.waiting().is_empty());
    }

    #[test]
    fn what_waits_on_the_host_is_shared_by_all_devices() {
        let with_host = |mib: u64| {
            let mut job = job(1, 1.0, &[1.0, 1.0]);
            job.demands.iter_mut().flatten().for_each(|demand| demand.host_bytes = Bytes::mib(mib));
            job
        };
        let mut sweep = Sweep::new(
            vec![room(9, 9), room(9, 9)],
            Bytes::mib(10),
            vec![with_host(6), with_host(4), with_host(11), with_host(1)],
        );
        assert_eq!(sweep.waiting(), [0, 1, 3]);
        assert_eq!(sweep.start(0.0).len(), 2);
    }

    #[test]
    fn a_device_has_no_more_workers_than_it_may_and_each_has_a_part() {
        let jobs = || (0..9).map(|_| job(1, 1.0, &[1.0])).collect::<Vec<_>>();
        let three = Room { workers: 3, ..room(9, 100) };
        assert_eq!(Sweep::new(vec![three], Bytes::ZERO, jobs()).start(0.0).len(), 3);
        assert_eq!(Sweep::new(vec![room(9, 2)], Bytes::ZERO, jobs()).start(0.0).len(), 2);
        let four = Room { parts_least: 24, ..room(9, 100) };
        assert_eq!(Sweep::new(vec![four], Bytes::ZERO, jobs()).start(0.0).len(), 4);
        assert_eq!(divide(10, 1, &[1.0, 1.0, 1.0]).iter().sum::<u32>(), 10);
        assert_eq!(divide(4, 1, &[1000.0, 1.0, 1.0]), [2, 1, 1]);
        assert_eq!(divide(100, 10, &[97.0, 1.0, 2.0]), [80, 10, 10]);
        assert_eq!(divide(3, 1, &[0.0, 0.0, 0.0]), [1, 1, 1]);
        assert_eq!(divide(7, 1, &[]), [] as [u32; 0]);
    }

    #[test]
    fn the_bound_counts_jobs_that_only_one_device_can_do() {
        let big = |seconds| Job { demands: vec![job(1, seconds, &[1.0]).demands[0], None] };
        let both = |seconds| job(1, seconds, &[1.0, 0.5]);
        // All of it on both: 9 / 1.5; what only the first can do: 8; the longest: 5.
        let jobs = [big(5.0), big(3.0), both(1.0)];
        assert!((bound(2, &jobs) - 8.0).abs() < 1e-9);
        assert!((bound(2, &[both(4.0), both(5.0)]) - 6.0).abs() < 1e-9);
        assert!((bound(2, &[both(4.0), both(0.5)]) - 4.0).abs() < 1e-9);
        assert_eq!(bound(0, &[]), 0.0);
    }

    prop_compose! {
        fn jobs(count: std::ops::Range<usize>, most_mib: u64, speeds: Vec<f64>)(
            drawn in prop::collection::vec((1..=most_mib, 1.0..6.0_f64), count),
        ) -> Vec<Job> {
            drawn.into_iter().map(|(mib, seconds)| job(mib, seconds, &speeds)).collect()
        }
    }

    proptest! {
        #[test]
        fn every_job_that_fits_is_done_once_and_no_line_is_ever_crossed(
            drawn in prop::collection::vec((1..40_u64, 0..20_u64, 0.0..9.0_f64, 0.0..2.0_f64, 0..7_u8), 0..30),
            lines in prop::collection::vec((5..30_u64, 1..20_u32, 1..6_u32, 0.1..3.0_f64), 1..4),
            host in 0..25_u64,
        ) {
            let rooms: Vec<Room> = lines
                .iter()
                .map(|&(mib, parts, workers, _)| Room { workers, parts_least: 1 + parts / 9, ..room(mib, parts) })
                .collect();
            let jobs: Vec<Job> = drawn
                .iter()
                .map(|&(mib, host, seconds, fixed_seconds, not)| Job {
                    demands: (0..lines.len())
                        .map(|device| {
                            (usize::from(not) != device).then_some(Demand {
                                bytes: Bytes::mib(mib + device as u64),
                                host_bytes: Bytes::mib(host),
                                work_seconds: seconds / lines[device].3,
                                fixed_seconds,
                            })
                        })
                        .collect(),
                })
                .collect();
            let host = Bytes::mib(host);
            let schedule = simulate(Sweep::new(rooms.clone(), host, jobs.clone()));
            check_lines(&schedule, &rooms, host);
            let mut done: Vec<usize> = schedule.iter().map(|worker| worker.job).collect();
            done.sort_unstable();
            let can = (0..jobs.len()).filter(|&number| {
                let mut places = jobs[number].demands.iter().zip(&rooms);
                places.any(|(demand, room)| demand.is_some_and(|d| d.bytes <= room.line && d.host_bytes <= host))
            });
            prop_assert_eq!(done, can.collect::<Vec<_>>());
        }

        #[test]
        fn many_runs_of_mixed_size_end_within_a_tenth_of_the_bound(
            jobs in jobs(30..60, 24, vec![1.0, 0.4]),
            off in prop::collection::vec(0.9..1.1_f64, 60),
        ) {
            let rooms = vec![room(24, 1000), room(8, 1000)];
            let sweep = Sweep::new(rooms.clone(), Bytes::ZERO, jobs);
            let bound = bound(2, &sweep.jobs);
            let took = makespan(&simulate(sweep.clone()));
            prop_assert!(took >= bound * (1.0 - 1e-9), "{} is below the bound {}", took, bound);
            prop_assert!(took <= bound * 1.1, "{} against {}", took, bound);
            // And nearly so where no prediction is right.
            let schedule = simulate_with(sweep, |worker| worker.start + (worker.end - worker.start) * off[worker.job]);
            check_lines(&schedule, &rooms, Bytes::ZERO);
            let took = makespan(&schedule);
            prop_assert!(took <= bound * 1.15, "{} against {}", took, bound);
        }
    }
}
