//! Measured memory of the workers. A GPU or a remote process is measured by itself. All other devices are in this
//! process, so each one is charged with the process memory minus the arenas of the others.

use super::Team;
use plimsoll_core::{Bytes, DeviceMemory, HeldMemory, MeasuredBy, Space};
use plimsoll_device::process;

/// Bytes of a worker's arenas in the memory of this process.
#[derive(Clone, Copy, Default)]
pub(super) struct ArenaBytes {
    /// Device arena of a CPU or a virtual device of this process; 0 for others.
    device: Bytes,
    /// Host arena of a device of this process; 0 for a remote device.
    host: Bytes,
}

impl ArenaBytes {
    /// Returns the bytes of both arenas.
    pub(super) fn total(self) -> Bytes {
        self.device + self.host
    }
}

impl Team {
    /// Returns the measured bytes that a worker holds on its device now. For a CPU or virtual device of this process:
    /// the bytes of the process without host arenas, device arenas of other workers and abandoned memory.
    pub fn held_bytes(&mut self, rank: usize) -> Bytes {
        let other_bytes = self.other_arena_bytes(rank) + self.abandoned.bytes();
        let worker = &mut self.workers[rank];
        match worker.device.in_process() {
            false => worker.engine.held_bytes(),
            true => process::resident().unwrap_or(Bytes::ZERO).saturating_sub(other_bytes),
        }
    }

    /// Records the memory peaks of all workers except the `lost` one, and starts new peaks. Call it before an arena
    /// changes or a worker leaves.
    pub fn record_peaks(&mut self, lost: Option<usize>) {
        let peak = process::peak_resident().unwrap_or(Bytes::ZERO);
        for rank in (0..self.len()).filter(|rank| Some(*rank) != lost) {
            let held = peak.saturating_sub(self.other_arena_bytes(rank) + self.abandoned.peak_bytes());
            let worker = &mut self.workers[rank];
            worker.record_arena_use();
            worker.peak_held_bytes = worker.peak_held_bytes.max(held);
        }
        let abandoned = self.abandoned.peak_bytes();
        self.external_peak_bytes =
            self.external_peak_bytes.max(peak.saturating_sub(self.total_arena_bytes() + abandoned));
        self.reset_peak();
    }

    /// Starts new memory peaks for this process and for the arenas of abandoned engines.
    pub fn reset_peak(&self) {
        self.abandoned.reset_peak();
        let _ = process::reset_peak();
    }

    /// Sets the bytes of arenas in this process that are outside the team, such as the evaluator's. `held` is the peak
    /// of this process without the team's arenas, as measured so far.
    pub fn set_external_arenas(&mut self, arena_bytes: Bytes, held: Bytes) {
        (self.external_arena_bytes, self.external_peak_bytes) = (arena_bytes, held);
    }

    /// Returns the measured peak of this process without the arenas of the team; `None` if the system does not report
    /// it.
    pub fn external_peak_bytes(&mut self) -> Option<Bytes> {
        let peak = process::peak_resident().ok()?;
        let abandoned = self.abandoned.peak_bytes();
        Some(peak.saturating_sub(self.total_arena_bytes() + abandoned).max(self.external_peak_bytes))
    }

    /// Returns the bytes of the team's arenas in this process.
    fn total_arena_bytes(&mut self) -> Bytes {
        (0..self.len()).map(|rank| self.arena_bytes_of(rank).total()).sum()
    }

    /// Returns the bytes of a worker's arenas that lie in the memory of this process. A GPU's device arena does not;
    /// for a remote worker both are 0.
    pub(super) fn arena_bytes_of(&mut self, rank: usize) -> ArenaBytes {
        let worker = &mut self.workers[rank];
        if worker.device.remote_host().is_some() {
            return ArenaBytes::default();
        }
        let in_process = worker.device.in_process();
        let memory = worker.engine.device().memory();
        let device = if in_process { memory.bytes(Space::Device) } else { Bytes::ZERO };
        ArenaBytes { device, host: memory.bytes(Space::Host) }
    }

    /// Returns the bytes of the arenas of the team and the evaluator in this process, without the device arena of
    /// worker `rank`. Arenas of abandoned engines do not count.
    fn other_arena_bytes(&mut self, rank: usize) -> Bytes {
        let own = self.arena_bytes_of(rank).device;
        self.total_arena_bytes().saturating_sub(own) + self.external_arena_bytes
    }

    /// Returns the sum of the measured bytes that all workers hold on their devices now.
    pub fn total_held_bytes(&mut self) -> Bytes {
        if self.len() == 1 {
            return self.held_bytes(0);
        }
        let separate = self.workers.iter_mut().filter(|worker| !worker.device.in_process());
        let separate: Bytes = separate.map(|worker| worker.engine.held_bytes()).sum();
        let local = self.workers.iter_mut().filter(|worker| worker.device.remote_host().is_none());
        let host_arenas = local.map(|worker| worker.engine.device().memory().bytes(Space::Host)).sum();
        let process = process::resident()
            .unwrap_or(Bytes::ZERO)
            .saturating_sub(host_arenas)
            .saturating_sub(self.abandoned.bytes());
        let is_all_separate = !self.workers.iter().any(|worker| worker.device.in_process());
        if is_all_separate { separate } else { separate + process }
    }

    /// Returns the measured memory of each worker now, in rank order. A peak is only that of a process: other measurements
    /// are of the present, or count the memory of other programs. Bytes by category are listed when they are new.
    pub fn held_memory(&mut self) -> Vec<HeldMemory> {
        let mut held = Vec::new();
        for (rank, memory) in self.memory().into_iter().enumerate() {
            let is_of_process = memory.measured_by == Some(MeasuredBy::Process);
            held.push(HeldMemory {
                device: memory.device,
                held_bytes: self.held_bytes(rank),
                peak_bytes: memory.measured_bytes.filter(|_| is_of_process),
                arena_by_category: self.workers[rank].engine.take_new_arena_use(),
            });
        }
        held
    }

    /// Returns planned and measured memory of each worker, in rank order.
    pub fn memory(&mut self) -> Vec<DeviceMemory> {
        let peak = process::peak_resident().ok();
        (0..self.len())
            .map(|rank| {
                let other_bytes = self.other_arena_bytes(rank) + self.abandoned.peak_bytes();
                let worker = &mut self.workers[rank];
                worker.record_arena_use();
                let measured = match (worker.engine.gpu(), worker.engine.connection()) {
                    // A GPU allocates all its memory at the start.
                    (Some(gpu), _) => gpu.measured_bytes(),
                    // A remote process has no arenas of other devices.
                    (None, Some(connection)) => connection.measured_memory(),
                    // The host arena is in this process, but does not count as device memory.
                    (None, None) => peak.map(|peak| {
                        (peak.saturating_sub(other_bytes).max(worker.peak_held_bytes), MeasuredBy::Process)
                    }),
                };
                let plan = &worker.largest_plan;
                DeviceMemory {
                    device: plan.name.clone(),
                    budget_bytes: plan.budget_bytes,
                    budget_bytes_at_end: Some(worker.line.bytes).filter(|line| *line != plan.budget_bytes),
                    arena_bytes: plan.arena_bytes,
                    arena_measured_bytes: worker.arena_used_bytes,
                    arena_measured_by_category: worker.arena_measured_by_category(),
                    predicted_bytes: plan.peak_bytes,
                    measured_bytes: measured.map(|(bytes, _)| bytes),
                    measured_by: measured.map(|(_, by)| by),
                    over_load_line_bytes: None,
                }
            })
            .collect()
    }
}
