//! The state of a run, derived from its events alone.

use super::run_notes::RunNotes;
use super::{FeedEntry, HistoryPoint, MemoryPoint};
use crate::progress::Progress;
use plimsoll_core::{Bytes, Category, Event, HeldMemory, Record};
use std::collections::{BTreeMap, VecDeque};

/// Most lines of a run's feed.
pub const MAX_FEED: usize = 100;
/// Most steps of a run's history.
pub const MAX_POINTS: usize = 512;
/// Most points of a device's measured memory over a run.
pub const MAX_MEMORY_POINTS: usize = 128;

/// The events of a run so far, summed up. Its size does not grow with the length of the run.
#[derive(Clone, Debug, Default)]
pub struct RunEvents {
    /// Step, speed and remaining time.
    pub progress: Progress,
    /// Lines for all events other than steps.
    pub feed: VecDeque<FeedEntry>,
    /// Steps at even distances.
    pub history: Vec<HistoryPoint>,
    /// One step in this many is in `history`; 0 before the first step.
    history_stride: u64,
    /// The newest step, which may lie between those in `history`.
    pub newest: Option<HistoryPoint>,
    /// Measured bytes of each device, by name: now, and at most so far.
    pub memory: BTreeMap<String, MeasuredMemory>,
    /// Loss of the newest evaluation; `None` before the first.
    pub eval_loss: Option<f64>,
    /// Step of the newest checkpoint; `None` before the first.
    pub checkpoint_step: Option<u64>,
    /// Predicted seconds of a step under the present plan; `None` before the start.
    pub predicted_step_seconds: Option<f64>,
    /// Status that the last event names, `done` or `stopped`; `None` while no such event is the newest.
    pub ended: Option<String>,
    /// Time of the newest event, in seconds since the Unix epoch; `None` without events.
    pub newest_time: Option<f64>,
    /// Names of lost devices that have not returned.
    pub lost_devices: Vec<String>,
    /// Events that a report lists one by one.
    pub notes: RunNotes,
}

/// Measured memory of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MeasuredMemory {
    /// Bytes at the newest measurement.
    pub held_bytes: Bytes,
    /// Most bytes so far; `None` if the system does not report it.
    pub peak_bytes: Option<Bytes>,
    /// Bytes of the arena by category under the present plan; `None` if they are not measured.
    pub arena_by_category: Option<BTreeMap<Category, Bytes>>,
    /// The largest of each group of `group_size` consecutive measurements, in order. The last group may still grow.
    largest: Vec<MemoryPoint>,
    /// Number of measurements of a complete group; 0 before the first measurement.
    group_size: u64,
    /// Number of measurements in the last group.
    last_group_size: u64,
    /// The newest measurement; `None` before the first.
    newest: Option<MemoryPoint>,
}

impl MeasuredMemory {
    /// Takes the measurement of a step. Steps after it are those of a run that went back to a checkpoint.
    fn add(&mut self, step: u64, held: &HeldMemory) {
        self.held_bytes = held.held_bytes;
        self.peak_bytes = self.peak_bytes.max(held.peak_bytes);
        if held.arena_by_category.is_some() {
            self.arena_by_category.clone_from(&held.arena_by_category);
        }
        let point = MemoryPoint { step, held_bytes: held.held_bytes };
        self.newest = Some(point);
        self.group_size = self.group_size.max(1);
        let before = self.largest.len();
        self.largest.retain(|earlier| earlier.step < step);
        let is_open = self.largest.len() == before && self.last_group_size < self.group_size;
        match self.largest.last_mut().filter(|_| is_open) {
            Some(last) => {
                self.last_group_size += 1;
                *last = larger(*last, point);
            }
            None => {
                self.last_group_size = 1;
                self.largest.push(point);
            }
        }
        // One more place is for the newest measurement.
        if self.largest.len() >= MAX_MEMORY_POINTS {
            self.merge_groups();
        }
    }

    /// Merges each group with the one after it.
    fn merge_groups(&mut self) {
        if self.largest.len().is_multiple_of(2) {
            self.last_group_size += self.group_size;
        }
        self.group_size *= 2;
        let merged = self.largest.chunks(2).filter_map(|pair| pair.iter().copied().reduce(larger));
        self.largest = merged.collect();
    }

    /// Returns the largest measurement of each group and then the newest one, in order: at most [`MAX_MEMORY_POINTS`].
    pub fn history(&self) -> Vec<MemoryPoint> {
        let newest = self.newest.filter(|newest| self.largest.last().is_none_or(|last| last.step < newest.step));
        self.largest.iter().copied().chain(newest).collect()
    }
}

/// Returns the later of two measurements, unless the earlier one is larger.
fn larger(earlier: MemoryPoint, later: MemoryPoint) -> MemoryPoint {
    if earlier.held_bytes > later.held_bytes { earlier } else { later }
}

impl RunEvents {
    /// Takes the next event of the run.
    pub fn update(&mut self, record: &Record) {
        let line = self.progress.update(&record.event);
        self.newest_time = Some(record.time);
        self.notes.update(record);
        self.ended = None;
        match &record.event {
            Event::Start { predicted_step_seconds, .. } => {
                self.predicted_step_seconds = Some(*predicted_step_seconds);
                self.lost_devices.clear();
                self.memory.values_mut().for_each(|memory| memory.arena_by_category = None);
            }
            Event::Step { step, loss, norm, learning_rate, tokens, seconds, memory, .. } => {
                self.add_step(HistoryPoint {
                    step: *step,
                    time: record.time,
                    loss: Some(*loss).filter(|loss| !loss.is_nan()),
                    gradient_norm: *norm,
                    learning_rate: *learning_rate,
                    tokens_per_second: *tokens as f64 / seconds,
                });
                for held in memory.iter().flatten() {
                    self.memory.entry(held.device.clone()).or_default().add(*step, held);
                }
                return;
            }
            Event::Evaluation { loss, .. } => self.eval_loss = Some(*loss).filter(|loss| !loss.is_nan()),
            Event::Checkpoint { step, .. } => self.checkpoint_step = Some(*step),
            Event::Recovery(recovery) => {
                self.predicted_step_seconds = Some(recovery.predicted_step_seconds);
                // A recovery without a change only repeats work under the present plan.
                let has_new_plan = recovery.from != recovery.to || recovery.sequences.is_some();
                if let Some(memory) = self.memory.get_mut(&recovery.device).filter(|_| has_new_plan) {
                    memory.arena_by_category = None;
                }
            }
            Event::DeviceLost { device, .. } => self.lost_devices.push(device.clone()),
            Event::DeviceReturned { device, .. } => self.lost_devices.retain(|lost| lost != device),
            Event::End { status, .. } => self.ended = Some(status.clone()),
            Event::Reference { .. }
            | Event::Preferences { .. }
            | Event::Round { .. }
            | Event::ThermalPause { .. }
            | Event::Warning { .. } => {}
        }
        if let Some(text) = line {
            self.feed.push_back(FeedEntry { time: record.time, text });
            if self.feed.len() > MAX_FEED {
                self.feed.pop_front();
            }
        }
    }

    /// Adds a step to the history. Steps after it are those of a run that went back to a checkpoint, and are removed.
    fn add_step(&mut self, point: HistoryPoint) {
        self.newest = Some(point);
        // They are at the end, in order.
        while self.history.last().is_some_and(|last| last.step >= point.step) {
            self.history.pop();
        }
        let stride = self.history_stride.max(1);
        if point.step.saturating_sub(1).is_multiple_of(stride) {
            self.history.push(point);
        }
        if self.history.len() > MAX_POINTS {
            self.history_stride = 2 * stride;
            self.history.retain(|point| point.step.saturating_sub(1).is_multiple_of(2 * stride));
        }
    }

    /// Returns the history with the newest step at its end.
    pub fn history_to_newest(&self) -> Vec<HistoryPoint> {
        let newest = self.newest.filter(|newest| self.history.last().is_none_or(|last| last.step < newest.step));
        let kept = self.history.len().min(MAX_POINTS - usize::from(newest.is_some()));
        self.history[self.history.len() - kept..].iter().copied().chain(newest).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::tests::{start, step};
    use plimsoll_core::EVENTS_VERSION;

    fn record(event: Event) -> Record {
        Record { version: EVENTS_VERSION, time: 5.0, event }
    }

    #[test]
    fn history_stays_bounded_and_ends_with_newest_step() {
        let mut state = RunEvents::default();
        state.update(&record(start(10_000)));
        for number in 1..=10_000 {
            state.update(&record(step(number, 0.08)));
            assert!(state.history.len() <= MAX_POINTS);
        }
        let points = state.history_to_newest();
        assert!(points.len() > MAX_POINTS / 4 && points.len() <= MAX_POINTS, "{}", points.len());
        assert_eq!((points[0].step, points.last().unwrap().step), (1, 10_000));
        assert!(points.is_sorted_by(|a, b| a.step < b.step));
    }

    #[test]
    fn steps_after_a_checkpoint_are_replaced() {
        let mut state = RunEvents::default();
        (1..=20).for_each(|number| state.update(&record(step(number, 0.08))));
        state.update(&record(step(11, 0.08)));
        let steps: Vec<u64> = state.history_to_newest().iter().map(|point| point.step).collect();
        assert_eq!(steps, (1..=11).collect::<Vec<u64>>());
    }

    #[test]
    fn absurd_events_do_no_harm() {
        let mut state = RunEvents::default();
        for event in [start(u64::MAX), step(0, 0.08), step(u64::MAX, 0.0), step(3, f64::NAN)] {
            state.update(&record(event));
        }
        assert_eq!(state.history_to_newest().last().map(|point| point.step), Some(3));
    }

    fn held(mib: u64) -> HeldMemory {
        HeldMemory { device: "cpu".into(), held_bytes: Bytes::mib(mib), peak_bytes: None, arena_by_category: None }
    }

    #[test]
    fn memory_history_stays_bounded_and_in_order() {
        let mut memory = MeasuredMemory::default();
        for step in 1..=5000 {
            memory.add(step, &held(step));
            assert!(memory.history().len() <= MAX_MEMORY_POINTS);
        }
        let history = memory.history();
        assert!(history.len() >= MAX_MEMORY_POINTS / 2, "{}", history.len());
        assert!(history.iter().all(|point| point.held_bytes == Bytes::mib(point.step)), "{history:?}");
        assert!(history.is_sorted_by(|a, b| a.step < b.step), "{history:?}");
        memory.add(100, &held(7));
        let history = memory.history();
        assert!(history.is_sorted_by(|a, b| a.step < b.step), "{history:?}");
        assert_eq!(history.last(), Some(&MemoryPoint { step: 100, held_bytes: Bytes::mib(7) }));
    }

    #[test]
    fn thinning_keeps_spikes_and_newest_measurement() {
        // Measurements are taken by time, so their steps have uneven distances.
        let steps: Vec<u64> = (1..=3000).map(|number| number * number).collect();
        for spike in [1, 2, 777, 1024, 2998] {
            let mut memory = MeasuredMemory::default();
            for (index, step) in steps.iter().enumerate() {
                memory.add(*step, &held(if index == spike { 900 } else { 40 + index as u64 % 3 }));
                let history = memory.history();
                assert!(history.len() <= MAX_MEMORY_POINTS, "{}", history.len());
                assert_eq!(history.last().map(|point| point.step), Some(*step));
            }
            let expected = MemoryPoint { step: steps[spike], held_bytes: Bytes::mib(900) };
            assert!(memory.history().contains(&expected), "spike at step {}", steps[spike]);
        }
    }

    #[test]
    fn peak_of_a_device_never_falls() {
        let mut state = RunEvents::default();
        for (held, peak) in [(40, 44), (38, 42)] {
            let mut event = step(1, 0.08);
            let Event::Step { memory, .. } = &mut event else { panic!("{event:?}") };
            let [held_bytes, peak_bytes] = [held, peak].map(Bytes::mib);
            *memory = Some(vec![HeldMemory { held_bytes, peak_bytes: Some(peak_bytes), ..self::held(0) }]);
            state.update(&record(event));
        }
        let cpu = &state.memory["cpu"];
        assert_eq!((cpu.held_bytes, cpu.peak_bytes), (Bytes::mib(38), Some(Bytes::mib(44))));
    }
}
