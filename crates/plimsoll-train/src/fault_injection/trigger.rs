//! Triggers injected faults while a run is in progress.

use super::{Injection, OPEN, OpSelector, REPLAN};
use crate::data::splitmix64;
use crate::heartbeat::Liveness;
use plimsoll_device::device::{Memory, Observer};
use plimsoll_device::error::DeviceError;
use plimsoll_program::Op;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A fault that the user asked for, with a mark whether it has occurred. It outlives the devices, so that a reopened
/// device does not repeat the fault.
#[derive(Debug)]
pub struct PendingFault {
    /// Fault to inject.
    pub injection: Injection,
    triggered: AtomicBool,
}

impl PendingFault {
    /// Creates a fault that has not occurred yet.
    pub fn new(injection: Injection) -> Arc<PendingFault> {
        Arc::new(PendingFault { injection, triggered: AtomicBool::new(false) })
    }

    /// Returns whether the fault has occurred.
    pub fn has_triggered(&self) -> bool {
        self.triggered.load(Ordering::Relaxed)
    }

    /// Returns whether this fault has made the device of this name lost or silent.
    pub(crate) fn has_disabled(&self, name: &str) -> bool {
        match &self.injection {
            Injection::Loss { device, .. } | Injection::Silence { device, .. } => {
                device == name && self.has_triggered()
            }
            _ => false,
        }
    }

    fn mark_triggered(&self) {
        self.triggered.store(true, Ordering::Relaxed);
    }
}

/// Faults that are still to be injected into one device.
#[derive(Debug, Default)]
pub struct FaultInjection {
    out_of_memory: Vec<OutOfMemoryFault>,
    random: Option<RandomFault>,
    seed: u64,
    step: u64,
    /// Number of random draws so far: one per Program run or switch to another plan. Seed and number decide each draw.
    runs: u64,
    /// Name of the device.
    device: String,
    loss: Option<LossFault>,
    /// Slowdowns in the order of their first steps. If several have begun, only the last of them applies.
    slowdowns: Vec<SlowdownFault>,
    silence: Option<SilenceFault>,
    /// Heartbeat of the device; `None` if it has none.
    liveness: Option<Arc<Liveness>>,
}

#[derive(Debug)]
struct OutOfMemoryFault {
    fault: Arc<PendingFault>,
    step: u64,
    program: Option<String>,
    op: Option<OpSelector>,
}

#[derive(Debug)]
struct RandomFault {
    fault: Arc<PendingFault>,
    probability: f64,
}

#[derive(Debug)]
struct LossFault {
    fault: Arc<PendingFault>,
    step: u64,
    program: Option<String>,
}

#[derive(Debug)]
struct SlowdownFault {
    fault: Arc<PendingFault>,
    first_step: u64,
    factor: f64,
}

#[derive(Debug)]
struct SilenceFault {
    fault: Arc<PendingFault>,
    step: u64,
    opening: bool,
    forever: bool,
}

impl FaultInjection {
    /// Selects the faults of the device with this rank and name. Out-of-memory errors that have occurred are left out.
    /// `seed` decides when random faults occur.
    pub fn new(
        all: &[Arc<PendingFault>],
        seed: u64,
        rank: u64,
        device: &str,
        liveness: Option<Arc<Liveness>>,
    ) -> FaultInjection {
        let seed = if rank == 0 { seed } else { splitmix64(seed ^ splitmix64(rank)) };
        let mut faults = FaultInjection { seed, device: device.to_owned(), liveness, ..FaultInjection::default() };
        for fault in all {
            faults.add(Arc::clone(fault), rank);
        }
        faults
    }

    /// Adds `fault` if it concerns this device, the one with rank `rank`. An out-of-memory error without a device name
    /// concerns rank 0.
    fn add(&mut self, fault: Arc<PendingFault>, rank: u64) {
        match fault.injection.clone() {
            Injection::OutOfMemory { device, step, program, op } => {
                let is_here = device.map_or(rank == 0, |device| device == self.device);
                if is_here && !fault.has_triggered() {
                    self.out_of_memory.push(OutOfMemoryFault { fault, step, program, op });
                }
            }
            Injection::RandomOutOfMemory { probability } => {
                if self.random.as_ref().is_none_or(|known| probability > known.probability) {
                    self.random = Some(RandomFault { fault, probability });
                }
            }
            Injection::Slow { device, step, factor } if device == self.device => {
                self.slowdowns.push(SlowdownFault { fault, first_step: step, factor });
                self.slowdowns.sort_by_key(|slowdown| slowdown.first_step);
            }
            Injection::Loss { device, step, program } if device == self.device => {
                self.loss = Some(LossFault { fault, step, program });
            }
            Injection::Silence { device, step, opening, forever } if device == self.device => {
                self.silence = Some(SilenceFault { fault, step, opening, forever });
            }
            Injection::Slow { .. } | Injection::Loss { .. } | Injection::Silence { .. } => {}
        }
    }

    /// Checks, before a Program runs, that no injected fault makes the device lost. On a device that falls silent, this
    /// call blocks until the device counts as lost, or for ever if the fault says so.
    ///
    /// # Errors
    /// The device is lost.
    pub fn check_presence(&self, program: &str) -> Result<(), DeviceError> {
        let lost = || DeviceError::Lost { device: self.device.clone(), reason: String::new() };
        let is_now = |silence: &&SilenceFault| self.step >= silence.step && silence.opening == (program == OPEN);
        if let (Some(silence), Some(liveness)) = (self.silence.as_ref().filter(is_now), &self.liveness)
            && liveness.is_monitored()
        {
            // Mark it first: the thread may never return.
            silence.fault.mark_triggered();
            if liveness.suspend(silence.forever) {
                return Err(lost());
            }
        }
        let is_now = |loss: &&LossFault| {
            loss.fault.has_triggered()
                || self.step > loss.step
                || self.step == loss.step && loss.program.as_deref().is_none_or(|lost_in| lost_in == program)
        };
        let Some(loss) = self.loss.as_ref().filter(is_now) else { return Ok(()) };
        loss.fault.mark_triggered();
        Err(lost())
    }

    /// Checks, while a device is opened, that no injected fault makes it lost.
    ///
    /// # Errors
    /// The device is lost.
    pub(crate) fn check_opening(
        all: &[Arc<PendingFault>],
        device: &str,
        liveness: Option<Arc<Liveness>>,
    ) -> Result<(), DeviceError> {
        FaultInjection::new(all, 0, 0, device, liveness).check_presence(OPEN)
    }

    /// Sets the step in progress.
    pub fn begin_step(&mut self, step: u64) {
        self.step = step;
    }

    /// Returns whether no fault remains for this device.
    pub fn is_empty(&self) -> bool {
        self.out_of_memory.is_empty()
            && self.random.is_none()
            && self.loss.is_none()
            && self.silence.is_none()
            && self.slowdowns.is_empty()
    }

    /// Returns the factor by which a fault slows down the passes of the present step; 1 if none does. Marks the fault
    /// as occurred.
    pub fn slowdown(&self) -> f64 {
        let Some(slowdown) = self.slowdowns.iter().rfind(|slowdown| self.step >= slowdown.first_step) else {
            return 1.0;
        };
        slowdown.fault.mark_triggered();
        slowdown.factor
    }

    /// Returns whether an injected fault makes the switch to another plan run out of memory now. Marks the fault as
    /// occurred.
    pub fn refuses_replan(&mut self) -> bool {
        let step = self.step;
        if self.trigger_once(|fault| fault.step == step && fault.program.as_deref() == Some(REPLAN)) {
            return true;
        }
        let is_drawn = self.draw_op(1).is_some();
        is_drawn && self.trigger_random()
    }

    /// Draws whether a random fault occurs in this run of a Program. Returns the number of the op that fails, from 1 to
    /// `op_count`, or `None` if no fault occurs.
    fn draw_op(&mut self, op_count: u32) -> Option<u32> {
        let probability = self.random.as_ref()?.probability;
        self.runs += 1;
        let number = splitmix64(splitmix64(self.seed) ^ self.runs);
        let unit = (number >> 11) as f64 / (1u64 << 53) as f64;
        (unit < probability).then(|| 1 + (splitmix64(number) % u64::from(op_count.max(1))) as u32)
    }

    /// Marks the random fault as occurred. Always returns true, so that a condition can end in this call.
    fn trigger_random(&self) -> bool {
        self.random.iter().for_each(|random| random.fault.mark_triggered());
        true
    }

    /// Removes the first out-of-memory fault for which `matches` is true, and marks it as occurred. Returns whether
    /// there was one.
    fn trigger_once(&mut self, matches: impl Fn(&OutOfMemoryFault) -> bool) -> bool {
        let Some(index) = self.out_of_memory.iter().position(matches) else { return false };
        self.out_of_memory.remove(index).fault.mark_triggered();
        true
    }

    /// Returns an observer of one Program run that injects out-of-memory errors and passes everything else to `inner`.
    pub fn observer<'a>(
        &'a mut self,
        program: &'a str,
        op_count: u32,
        inner: &'a mut dyn Observer,
    ) -> FaultObserver<'a> {
        let random_op = self.draw_op(op_count);
        FaultObserver { faults: self, program, random_op, inner }
    }

    /// Returns whether an injected fault makes this op run out of memory. Each fault does so once. `tick` is the number
    /// of the op in the Program, counted from 1.
    fn refuses_op(&mut self, program: &str, tick: u32, op: &str) -> bool {
        let step = self.step;
        self.trigger_once(|fault| {
            fault.step == step
                && fault.program.as_deref().is_none_or(|fails_in| fails_in == program)
                && match &fault.op {
                    None => true,
                    Some(OpSelector::Number(number)) => *number == tick,
                    Some(OpSelector::Named(name)) => name == op,
                }
        })
    }
}

/// An observer of one Program run that injects out-of-memory errors; see [`FaultInjection::observer`].
pub struct FaultObserver<'a> {
    faults: &'a mut FaultInjection,
    program: &'a str,
    /// Number of the op that a random fault makes fail; `None` if none fails.
    random_op: Option<u32>,
    inner: &'a mut dyn Observer,
}

impl Observer for FaultObserver<'_> {
    fn before(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) -> Result<(), DeviceError> {
        if self.random_op == Some(tick) && self.faults.trigger_random()
            || self.faults.refuses_op(self.program, tick, op.name())
        {
            let program = self.program.to_owned();
            return Err(DeviceError::OutOfMemory { program, tick, op: op.name() });
        }
        self.inner.before(tick, op, memory)
    }

    fn after(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) {
        self.inner.after(tick, op, memory);
    }

    fn serializes_ops(&self) -> bool {
        self.inner.serializes_ops()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oom_fault_triggers_once_at_its_place() {
        let all: Vec<Arc<PendingFault>> =
            ["2:backward:3", "2:re-plan", "4"].iter().map(|text| PendingFault::new(text.parse().unwrap())).collect();
        let mut faults = FaultInjection::new(&all, 1, 0, "cpu", None);
        faults.begin_step(1);
        assert!(!faults.refuses_op("backward", 3, "add") && !faults.refuses_replan());
        faults.begin_step(2);
        assert!(!faults.refuses_op("forward", 3, "add") && !faults.refuses_op("backward", 2, "add"));
        assert!(faults.refuses_op("backward", 3, "add") && !faults.refuses_op("backward", 3, "add"));
        assert!(faults.refuses_replan() && !faults.refuses_replan());
        faults.begin_step(4);
        assert!(!faults.is_empty() && !all[2].has_triggered());
        assert!(faults.refuses_op("begin", 1, "fill") && faults.is_empty());
        assert!(all.iter().all(|fault| fault.has_triggered()));
        // A reopened device does not repeat its faults.
        assert!(FaultInjection::new(&all, 1, 0, "cpu", None).is_empty());
    }

    #[test]
    fn random_faults_follow_probability_and_seed() {
        let draw = |seed| {
            let fault = PendingFault::new(Injection::RandomOutOfMemory { probability: 0.1 });
            let mut faults = FaultInjection::new(&[fault], seed, 0, "cpu", None);
            (0..2000).map(|_| faults.draw_op(50)).collect::<Vec<_>>()
        };
        let drawn = draw(1);
        let hits: Vec<u32> = drawn.iter().flatten().copied().collect();
        assert!((120..280).contains(&hits.len()), "{}", hits.len());
        assert!(hits.iter().all(|tick| (1..=50).contains(tick)));
        assert_eq!(drawn, draw(1));
        assert_ne!(drawn, draw(2));
    }
}
