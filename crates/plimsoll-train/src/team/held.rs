//! What the devices of a team hold, measured: a GPU by itself, all others in this process, of which each is charged with what is not
//! the others'.

use super::Team;
use plimsoll_core::{Bytes, DeviceMemory, MeasuredBy, Space};
use plimsoll_device::process;

impl Team {
    /// What a device holds now, measured: a GPU by itself, the others in this process, of which what belongs to other
    /// devices and to the host's side is not theirs.
    pub fn held(&mut self, rank: usize) -> Bytes {
        let elsewhere = self.arenas_beside(rank) + self.behind.bytes();
        let worker = &mut self.workers[rank];
        match worker.device.in_process() {
            false => worker.engine.held(),
            true => process::resident().unwrap_or(Bytes::ZERO).saturating_sub(elsewhere),
        }
    }

    /// Before an arena changes or a device leaves: what was used and held under the arenas that there are. Nothing is asked
    /// of a device that is `gone`.
    pub fn look_back(&mut self, gone: Option<usize>) {
        let peak = process::peak_resident().unwrap_or(Bytes::ZERO);
        for rank in (0..self.len()).filter(|rank| Some(*rank) != gone) {
            let held = peak.saturating_sub(self.arenas_beside(rank) + self.behind.peak_bytes());
            let worker = &mut self.workers[rank];
            worker.look_back();
            worker.held = worker.held.max(held);
        }
        let behind = self.behind.peak_bytes();
        self.held_beside = self.held_beside.max(peak.saturating_sub(self.arenas() + behind));
        self.reset_peak();
    }

    /// What was held until now is no part of what anybody holds from now on.
    pub fn reset_peak(&self) {
        self.behind.forget();
        let _ = process::reset_peak();
    }

    /// From now on a device beside the team has arenas of so many bytes in this process's memory, which held so much with
    /// them before.
    pub fn stands_beside(&mut self, arenas: Bytes, held: Bytes) {
        (self.beside, self.held_beside) = (arenas, held);
    }

    /// What this process held at most with what stands beside the team, the team's own arenas left out, measured.
    pub fn held_beside(&mut self) -> Option<Bytes> {
        let peak = process::peak_resident().ok()?;
        let behind = self.behind.peak_bytes();
        Some(peak.saturating_sub(self.arenas() + behind).max(self.held_beside))
    }

    /// Bytes of the team's arenas in this process's memory.
    fn arenas(&mut self) -> Bytes {
        (0..self.len()).map(|rank| self.arenas_of(rank)).map(|[device, host]| device + host).sum()
    }

    /// Bytes of a device's arenas in this process's memory: its own, and on the host's side.
    pub(super) fn arenas_of(&mut self, rank: usize) -> [Bytes; 2] {
        let worker = &mut self.workers[rank];
        if worker.device.host().is_some() {
            return [Bytes::ZERO; 2];
        }
        let of_process = worker.device.in_process();
        let memory = worker.engine.device().memory();
        [if of_process { memory.bytes(Space::Device) } else { Bytes::ZERO }, memory.bytes(Space::Host)]
    }

    /// Bytes of arenas in this process's memory that are not the device's own, those left behind not among them.
    fn arenas_beside(&mut self, rank: usize) -> Bytes {
        let [own, _] = self.arenas_of(rank);
        self.arenas().saturating_sub(own) + self.beside
    }

    /// What all devices hold now, measured.
    pub fn held_by_all(&mut self) -> Bytes {
        if self.len() == 1 {
            return self.held(0);
        }
        let beside = self.workers.iter_mut().filter(|worker| !worker.device.in_process());
        let beside: Bytes = beside.map(|worker| worker.engine.held()).sum();
        let here = self.workers.iter_mut().filter(|worker| worker.device.host().is_none());
        let hosts = here.map(|worker| worker.engine.device().memory().bytes(Space::Host)).sum();
        let process =
            process::resident().unwrap_or(Bytes::ZERO).saturating_sub(hosts).saturating_sub(self.behind.bytes());
        let none_here = !self.workers.iter().any(|worker| worker.device.in_process());
        if none_here { beside } else { beside + process }
    }

    /// What each device held, beside what its plan said.
    pub fn memory(&mut self) -> Vec<DeviceMemory> {
        let peak = process::peak_resident().ok();
        (0..self.len())
            .map(|rank| {
                let elsewhere = self.arenas_beside(rank) + self.behind.peak_bytes();
                let worker = &mut self.workers[rank];
                worker.look_back();
                let measured = match (worker.engine.gpu(), worker.engine.far()) {
                    // All that it holds was taken at the start.
                    (Some(gpu), _) => gpu.measured(),
                    // Nothing that waits on a host is held elsewhere.
                    (None, Some(connection)) => connection.measured(),
                    // What waits on the host is not on the device, though it is in this process.
                    (None, None) => {
                        peak.map(|peak| (peak.saturating_sub(elsewhere).max(worker.held), MeasuredBy::Process))
                    }
                };
                let plan = &worker.largest;
                DeviceMemory {
                    device: plan.name.clone(),
                    budget_bytes: plan.budget_bytes,
                    budget_bytes_at_end: Some(worker.line.bytes).filter(|line| *line != plan.budget_bytes),
                    arena_bytes: plan.arena_bytes,
                    arena_measured_bytes: worker.used,
                    predicted_bytes: plan.peak_bytes,
                    measured_bytes: measured.map(|(bytes, _)| bytes),
                    measured_by: measured.map(|(_, by)| by),
                }
            })
            .collect()
    }
}
