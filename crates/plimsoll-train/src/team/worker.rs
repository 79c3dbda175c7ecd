//! One device of a team: its engine, its share of every step, its plan, and what it was measured to do.

use crate::data::Rows;
use crate::planning::prepare::Part;
use crate::recovery::LoadLine;
use crate::session::engine::Engine;
use crate::team::heartbeat::{Heart, Pulse};
use plimsoll_core::{Bytes, DeviceKind, DevicePlan, DeviceSpec, HostSpec, Plan};
use plimsoll_device::calibration;
use plimsoll_plan::price::Prices;
use plimsoll_plan::search::Answer;
use plimsoll_program::Share;
use std::ops::Range;
use std::sync::Arc;

/// One device at work.
pub struct Worker {
    /// What it is; its charges are those of its plan.
    pub device: DeviceSpec,
    /// What of each step is its own.
    pub share: Share,
    /// Sequences of each step that it computes.
    pub sequences: u64,
    /// The device with its Programs.
    pub engine: Engine,
    /// Its own plan, as if it were alone with its share.
    pub plan: Plan,
    /// The plan under which it held most so far.
    pub largest: DevicePlan,
    /// How much of its arena was used under that plan, measured.
    pub(super) used: Bytes,
    /// The most that it held before the arenas that there are now, measured; none of a GPU.
    pub(super) held: Bytes,
    /// The load line, and what moves it.
    pub line: LoadLine,
    /// Its part of a step, where there are others.
    pub(super) rows: Rows,
    pub(super) computing: Computing,
    /// What it computed in the last step took so long, measured and predicted; nothing where it does not tell.
    pub(super) computed: (f64, f64),
    /// What was measured of that over what was predicted, in each step.
    pub(super) factors: Vec<f64>,
    /// Its signs of life, where others may wait for it.
    pub(super) heart: Option<Heart>,
}

impl Worker {
    /// A device that is open under the plan of its part, and gives signs of life.
    pub fn new(part: &Part, engine: Engine, plan: Plan, line: LoadLine, heart: Option<Heart>) -> Worker {
        Worker {
            device: part.device.clone(),
            share: part.share.clone(),
            sequences: part.sequences,
            engine,
            largest: plan.devices[0].clone(),
            plan,
            used: Bytes::ZERO,
            held: Bytes::ZERO,
            line,
            rows: Rows::default(),
            computing: Computing::of(&part.device, &part.answer),
            computed: (0.0, 0.0),
            factors: Vec::new(),
            heart,
        }
    }

    /// Whether its rates were measured just now beside other work: those of the processor can be.
    pub(super) fn is_disturbed(&self) -> bool {
        self.device.kind == DeviceKind::Cpu && calibration::disturbed().is_some()
    }

    /// What is known of its life, where it is missed.
    pub(super) fn pulse(&self) -> Option<Arc<Pulse>> {
        self.heart.as_ref().map(Heart::pulse)
    }

    /// Whether it has been silent for too long.
    pub(super) fn is_missed(&self) -> bool {
        self.heart.as_ref().is_some_and(|heart| heart.pulse().is_lost())
    }

    /// Whether it lives in another process.
    pub(super) fn is_far(&self) -> bool {
        self.engine.far().is_some()
    }

    /// How much of its arena was used, where that was never larger.
    pub(super) fn look_back(&mut self) {
        if self.plan.devices[0].peak_bytes == self.largest.peak_bytes {
            self.used = self.used.max(self.engine.stats().arena_measured_bytes);
        }
    }

    /// It has gone over to another plan, which predicts what it computes.
    pub fn goes_by(&mut self, plan: Plan, computing: Computing) {
        self.computing = computing;
        // Products of other sizes have algorithms now that the next checkpoint has to know.
        self.plan = Plan { algorithms: self.engine.algorithms(), ..plan };
        self.device.charges = self.plan.devices[0].charges_bytes;
        self.line.waits(self.plan.host.arena_bytes);
        if self.plan.devices[0].peak_bytes > self.largest.peak_bytes {
            (self.largest, self.used) = (self.plan.devices[0].clone(), Bytes::ZERO);
        }
    }

    /// The rows of a step that are its own; in the last step of all there may be fewer.
    pub(super) fn own(&self, rows: usize) -> Range<usize> {
        let first = (self.share.first_sequence as usize).min(rows);
        first..(first + self.sequences as usize).min(rows)
    }
}

/// Predicted seconds in which a device computes before the update of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Computing {
    /// A forward and a backward pass.
    pub(super) micro_batch: f64,
    /// What comes before the first and after the last.
    pub(super) once: f64,
}

impl Computing {
    /// What a plan says.
    pub fn of(device: &DeviceSpec, answer: &Answer) -> Computing {
        let (rates, team_link) = (&device.rates, device.team_link);
        let prices = Prices { rates, host: &HostSpec::NONE, precision: answer.precision, team_link };
        let of = |programs: [&str; 2]| {
            let found = programs.iter().filter_map(|name| answer.set.program(name));
            found.map(|program| prices.computing_seconds(&answer.set, program)).sum()
        };
        Computing { micro_batch: of(["forward", "backward"]), once: of(["begin", "norm"]) }
    }
}
