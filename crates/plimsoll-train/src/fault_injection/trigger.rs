//! Triggers injected faults while a run is in progress.

use super::{Injection, OPEN, OpSelector, REPLAN};
use crate::data::splitmix64;
use crate::team::heartbeat::Liveness;
use plimsoll_device::device::{DeviceError, Memory, Observer};
use plimsoll_program::Op;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// An injection of a run, with whether it has occurred. It outlives the devices: a reopened device does not repeat a fault.
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

    /// Whether the fault has occurred.
    pub fn has_triggered(&self) -> bool {
        self.triggered.load(Ordering::Relaxed)
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
    /// Number of Program runs so far, from which random faults are drawn.
    runs: u64,
    /// Name of the device.
    device: String,
    loss: Option<LossFault>,
    /// Slowdowns by first step; the last one that has begun holds.
    slowdowns: Vec<SlowdownFault>,
    silence: Option<SilenceFault>,
    /// Liveness of the device, if it has a heartbeat.
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
    /// Selects the faults of the device with this rank and name that have not occurred. `seed` draws the random ones.
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

    /// Adds a fault if it concerns this device.
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

    /// Checks that the device is present when this Program is to run. A silent device blocks here until it counts as lost.
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

    /// Checks that a device is present while it is opened.
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

    /// Whether no fault remains for this device.
    pub fn is_empty(&self) -> bool {
        self.out_of_memory.is_empty()
            && self.random.is_none()
            && self.loss.is_none()
            && self.silence.is_none()
            && self.slowdowns.is_empty()
    }

    /// Returns the factor by which the passes of the present step are slowed down; 1 for none.
    pub fn slowdown(&self) -> f64 {
        let Some(slowdown) = self.slowdowns.iter().rfind(|slowdown| self.step >= slowdown.first_step) else {
            return 1.0;
        };
        slowdown.fault.mark_triggered();
        slowdown.factor
    }

    /// Whether the next switch to another plan runs out of memory.
    pub fn refuses_replan(&mut self) -> bool {
        let step = self.step;
        if self.trigger_once(|fault| fault.step == step && fault.program.as_deref() == Some(REPLAN)) {
            return true;
        }
        let is_drawn = self.draw_op(1).is_some();
        is_drawn && self.trigger_random()
    }

    /// Draws the op, of `op_count`, at which this run of a Program fails at random.
    fn draw_op(&mut self, op_count: u32) -> Option<u32> {
        let probability = self.random.as_ref()?.probability;
        self.runs += 1;
        let number = splitmix64(splitmix64(self.seed) ^ self.runs);
        let unit = (number >> 11) as f64 / (1u64 << 53) as f64;
        (unit < probability).then(|| 1 + (splitmix64(number) % u64::from(op_count.max(1))) as u32)
    }

    /// Marks the random fault as triggered; always true.
    fn trigger_random(&self) -> bool {
        self.random.iter().for_each(|random| random.fault.mark_triggered());
        true
    }

    /// Whether an out-of-memory fault matches. It is then removed.
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

    /// Whether this op runs out of memory.
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

/// Observer that injects out-of-memory errors, see [`FaultInjection::observer`].
pub struct FaultObserver<'a> {
    faults: &'a mut FaultInjection,
    program: &'a str,
    /// Number of the op that fails at random.
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
    fn out_of_memory_fault_triggers_once_at_its_place() {
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
