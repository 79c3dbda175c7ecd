//! Memory pressure by other processes: decides when a run should use less memory, and when it may use more again. The
//! module only computes; `recovery` acts.

use plimsoll_core::Bytes;
use plimsoll_device::probe::Memory;
use std::time::{Duration, Instant};

/// Shortest interval between two checks of a memory.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Smallest ratio of the pause after a check to the time that the check and the run's reaction took.
const IDLE_FACTOR: u32 = 10;
/// Longest pause after a check that asks for no change. A process that is stopped during such a check would otherwise be
/// blind for much longer than it was stopped.
const MAX_CALM_PAUSE: Duration = Duration::from_secs(10);
/// Time for which memory must stay free before the run uses it again. It doubles each time that other processes soon
/// need the memory back.
const INITIAL_CALM: Duration = Duration::from_secs(10);
/// Longest time for which memory must stay free before the run uses it again.
const MAX_CALM: Duration = Duration::from_secs(640);

/// Result of a check for memory pressure by other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PressureSignal {
    /// No change is needed.
    None,
    /// Other processes need memory. Holds the most bytes that the run may hold from now on.
    Shrink(Bytes),
    /// Other processes have left enough memory free for some time. Holds the most bytes that the run may hold from now
    /// on.
    Grow(Bytes),
}

/// Use of one memory by a run, and the run's limits there. The memory is that of a device or that of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUsage {
    /// Bytes that the run holds now.
    pub now: Bytes,
    /// Present load line: the most bytes that the run may hold.
    pub line: Bytes,
    /// Load line that the user asked for. The present load line never exceeds it.
    pub budget: Bytes,
    /// Peak bytes of the plan to which the run would return if it had more memory.
    pub target: Bytes,
}

/// State of the repeated checks for pressure on one memory: that of a device or that of the host.
#[derive(Clone, Copy, Debug)]
pub struct PressureMonitor {
    next: Instant,
    /// Whether the newest check asked the run to shrink or to grow.
    asked_for_change: bool,
    /// Start of the time in which enough memory has been free for the run to grow. `None` while there is too little, or
    /// while the run needs no more.
    calm_since: Option<Instant>,
    /// Time for which memory must stay free before the run uses it again.
    required_calm: Duration,
    /// Time at which the run was last allowed to take freed memory. `None` if it never was, or if other processes have
    /// needed memory since.
    last_growth: Option<Instant>,
}

impl PressureMonitor {
    /// Creates a monitor at the time `now`. Its first check is due one second later.
    pub fn new(now: Instant) -> PressureMonitor {
        PressureMonitor {
            next: now + POLL_INTERVAL,
            asked_for_change: false,
            calm_since: None,
            required_calm: INITIAL_CALM,
            last_growth: None,
        }
    }

    /// Whether the next check is due.
    pub fn is_due(&self, now: Instant) -> bool {
        now >= self.next
    }

    /// Schedules the next check after a check that lasted from `start` to `now`. The pause is ten times as long as that
    /// check, but never shorter than one second. After a check that asked for no change, it is at most ten seconds.
    pub fn schedule_next(&mut self, start: Instant, now: Instant) {
        let longest = if self.asked_for_change { Duration::MAX } else { MAX_CALM_PAUSE };
        self.next = now + (now.duration_since(start) * IDLE_FACTOR).clamp(POLL_INTERVAL, longest);
    }

    /// Checks a memory, of which the run holds `usage.now` bytes. Returns whether the run should shrink, may grow, or
    /// needs no change.
    ///
    /// The margin is 2 % of the memory, or 512 MiB if that is less. If less than the margin is free, the run should
    /// shrink until twice the margin is free. The run may grow if enough memory has stayed free for some time. Twice
    /// the margin then remains free, because the run would oscillate otherwise.
    pub fn observe(&mut self, memory: &Memory, usage: MemoryUsage, now: Instant) -> PressureSignal {
        let signal = self.signal(memory, usage, now);
        self.asked_for_change = signal != PressureSignal::None;
        signal
    }

    fn signal(&mut self, memory: &Memory, usage: MemoryUsage, now: Instant) -> PressureSignal {
        let left = available(memory, usage.now);
        if memory.free < margin(memory) {
            self.calm_since = None;
            // The memory that the run took was needed again soon: wait longer next time.
            if self
                .last_growth
                .take()
                .is_some_and(|last_growth| now.duration_since(last_growth) < 8 * self.required_calm)
            {
                self.required_calm = (2 * self.required_calm).min(MAX_CALM);
            }
            return PressureSignal::Shrink(left);
        }
        let available = left.min(usage.budget);
        // A little more memory is not worth a change, unless it reaches the target.
        if usage.line >= usage.budget || available < usage.target.min(usage.line + Bytes(usage.line.0 / 8)) {
            self.calm_since = None;
            return PressureSignal::None;
        }
        if now.duration_since(*self.calm_since.get_or_insert(now)) < self.required_calm {
            return PressureSignal::None;
        }
        (self.calm_since, self.last_growth) = (None, Some(now));
        PressureSignal::Grow(available)
    }
}

/// Returns the most bytes that a run may hold so that other processes keep 4 % of the memory, or 1 GiB if that is less.
/// `usage` is the number of bytes that the run holds now.
pub fn available(memory: &Memory, usage: Bytes) -> Bytes {
    (usage + memory.free).saturating_sub(Bytes(2 * margin(memory).0))
}

/// Returns the margin, the free bytes that are left to other processes: 2 % of the memory, or 512 MiB if that is less.
fn margin(memory: &Memory) -> Bytes {
    Bytes(memory.total.0 / 50).min(Bytes::mib(512))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(free: Bytes) -> Memory {
        Memory { total: Bytes::gib(10), free, bound_by: "the machine".into() }
    }

    const MARGIN: Bytes = Bytes(Bytes::gib(10).0 / 50);

    /// Returns the memory use of a run with a budget of 6 GiB, whose preferred plan needs 5 GiB.
    fn usage(now: Bytes, line: Bytes) -> MemoryUsage {
        MemoryUsage { now, line, budget: Bytes::gib(6), target: Bytes::gib(5) }
    }

    #[test]
    fn pressure_shrinks_run_to_twice_the_margin() {
        let start = Instant::now();
        let mut pressure = PressureMonitor::new(start);
        let full = usage(Bytes::gib(5), Bytes::gib(6));
        assert_eq!(pressure.observe(&memory(MARGIN), full, start), PressureSignal::None);
        let free = Bytes(MARGIN.0 - 1);
        assert_eq!(
            pressure.observe(&memory(free), full, start),
            PressureSignal::Shrink(Bytes::gib(5) + free - Bytes(2 * MARGIN.0))
        );
        let nothing = usage(Bytes::mib(1), Bytes::gib(6));
        assert_eq!(pressure.observe(&memory(Bytes::ZERO), nothing, start), PressureSignal::Shrink(Bytes::ZERO));
    }

    #[test]
    fn free_memory_is_used_after_calm_period() {
        let mut now = Instant::now();
        let mut pressure = PressureMonitor::new(now);
        let small = usage(Bytes::gib(3), Bytes::gib(3));
        let mut observe = |free: Bytes, seconds: u64| {
            now += Duration::from_secs(seconds);
            pressure.observe(&memory(free), small, now)
        };
        let enough = Bytes::gib(2) + Bytes(2 * MARGIN.0);
        assert_eq!(observe(enough, 0), PressureSignal::None);
        assert_eq!(observe(enough, 9), PressureSignal::None);
        // A short use by another process restarts the wait; a few percent do not count as free.
        assert_eq!(observe(Bytes::mib(600), 1), PressureSignal::None);
        assert_eq!(observe(enough, 9), PressureSignal::None);
        assert_eq!(observe(enough, 9), PressureSignal::None);
        assert_eq!(observe(enough, 1), PressureSignal::Grow(Bytes::gib(5)));
        // The budget is the limit.
        let plenty = Bytes::gib(7);
        assert_eq!(observe(plenty, 0), PressureSignal::None);
        assert_eq!(observe(plenty, 10), PressureSignal::Grow(Bytes::gib(6)));
    }

    #[test]
    fn part_of_target_is_used_when_free() {
        let start = Instant::now();
        let mut pressure = PressureMonitor::new(start);
        let small = usage(Bytes::gib(3), Bytes::gib(3));
        let some = Bytes::gib(1) + Bytes(2 * MARGIN.0);
        assert_eq!(pressure.observe(&memory(some), small, start), PressureSignal::None);
        assert_eq!(pressure.observe(&memory(some), small, start + INITIAL_CALM), PressureSignal::Grow(Bytes::gib(4)));
    }

    #[test]
    fn lowered_load_line_is_no_free_memory() {
        let start = Instant::now();
        let mut pressure = PressureMonitor::new(start);
        // The user lowered the load line to 4 GiB, and the preferred plan follows it.
        let lowered =
            MemoryUsage { now: Bytes::gib(3), line: Bytes::gib(4), budget: Bytes::gib(4), target: Bytes::gib(5) };
        for seconds in 0..60 {
            let now = start + Duration::from_secs(seconds);
            assert_eq!(pressure.observe(&memory(Bytes::gib(7)), lowered, now), PressureSignal::None);
        }
    }

    #[test]
    fn repeated_pressure_doubles_calm_period() {
        let mut now = Instant::now();
        let mut pressure = PressureMonitor::new(now);
        let (small, full) = (usage(Bytes::gib(3), Bytes::gib(3)), usage(Bytes::gib(5), Bytes::gib(6)));
        let enough = Bytes::gib(3);
        let mut waits = Vec::new();
        for _ in 0..9 {
            let begin = now;
            while pressure.observe(&memory(enough), small, now) == PressureSignal::None {
                now += POLL_INTERVAL;
            }
            waits.push(now.duration_since(begin).as_secs());
            now += POLL_INTERVAL;
            assert!(matches!(pressure.observe(&memory(Bytes::ZERO), full, now), PressureSignal::Shrink(_)));
        }
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 640, 640, 640]);
    }

    #[test]
    fn checks_take_small_part_of_time() {
        let start = Instant::now();
        let mut pressure = PressureMonitor::new(start);
        assert!(!pressure.is_due(start) && pressure.is_due(start + POLL_INTERVAL));
        let long = start + Duration::from_secs(3);
        let seconds = |seconds: u64| long + Duration::from_secs(seconds);
        pressure.schedule_next(start, long);
        assert!(!pressure.is_due(seconds(9)) && pressure.is_due(seconds(10)), "a check that asked for no change");
        let full =
            MemoryUsage { now: Bytes::gib(8), line: Bytes::gib(8), budget: Bytes::gib(8), target: Bytes::gib(8) };
        assert!(matches!(pressure.observe(&memory(Bytes::ZERO), full, long), PressureSignal::Shrink(_)));
        pressure.schedule_next(start, long);
        assert!(!pressure.is_due(seconds(29)) && pressure.is_due(seconds(30)));
    }
}
