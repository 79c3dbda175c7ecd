//! Signs of life: each device of a team has a thread that asks it for one again and again, however long its work takes, and
//! a watch that counts how often none came. So a slow step is never a failure, and a device that is silent for too long is
//! lost to the team: those who wait for it are told so, and nobody waits for its thread (`abreast`).
//!
//! What is counted are the watch's own looks, not seconds of a clock: a process that was stopped for a while, or a machine
//! that slept, has not missed any.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

/// Looks in the time after which a silent device is lost.
const LOOKS: u32 = 20;

/// What is known of a device's life, shared by its heart, the watch and a rehearsal.
#[derive(Debug, Default)]
pub struct Pulse {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Looks since the last beat.
    missed: u32,
    /// A rehearsal: the heart beats no more.
    stopped: bool,
    /// The team goes on without it.
    lost: bool,
    /// Somebody would miss it.
    watched: bool,
}

impl Pulse {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn beat(&self) {
        let mut state = self.state();
        if !state.stopped {
            state.missed = 0;
        }
    }

    /// Whether it has been silent for too long.
    pub fn is_lost(&self) -> bool {
        self.state().lost
    }

    /// A rehearsal: from now on there is no beat, and the device's thread comes back when it has been missed, or never.
    /// Whether that was so: a device that works alone is missed by nobody.
    pub fn stop(&self, for_good: bool) -> bool {
        let mut state = self.state();
        state.stopped = state.watched;
        while state.stopped && (for_good || state.watched && !state.lost) {
            state = self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        state.stopped
    }

    /// Whether somebody would miss it.
    pub fn is_watched(&self) -> bool {
        self.state().watched
    }

    fn watched(&self, watched: bool) {
        self.state().watched = watched;
        self.changed.notify_all();
    }

    /// A look of the watch. Whether it has been silent for too long from now on.
    fn look(&self) -> bool {
        let mut state = self.state();
        state.missed += 1;
        let lost = !state.lost && state.missed > LOOKS;
        if lost {
            state.lost = true;
            self.changed.notify_all();
        }
        lost
    }
}

/// The thread that asks a device for signs of life.
#[derive(Debug)]
pub struct Heart {
    pulse: Arc<Pulse>,
    /// Dropped, it ends the thread; who hangs in a driver is not waited for.
    _end: Sender<()>,
}

impl Heart {
    /// Begins to beat, often enough for a silence of this length to be told; `answers` asks the device. Nothing where the
    /// system gives no thread: such a device is never missed.
    pub fn start(device: &str, silence: Duration, answers: impl Fn() -> bool + Send + 'static) -> Option<Heart> {
        let (end, ended) = channel::<()>();
        let pulse = Arc::new(Pulse::default());
        let beating = Arc::clone(&pulse);
        let beats = move || {
            loop {
                if answers() {
                    beating.beat();
                }
                if ended.recv_timeout(silence / LOOKS / 2) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        };
        thread::Builder::new().name(format!("plimsoll-heart-{device}")).spawn(beats).ok()?;
        Some(Heart { pulse, _end: end })
    }

    /// What is known of the device's life.
    pub fn pulse(&self) -> Arc<Pulse> {
        Arc::clone(&self.pulse)
    }
}

/// The thread that misses signs of life.
#[derive(Debug)]
pub struct Watch {
    _end: Sender<()>,
    team: Vec<Arc<Pulse>>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.team.iter().for_each(|pulse| pulse.watched(false));
    }
}

impl Watch {
    /// Watches some devices, by name and rank. Who is silent for longer than `silence` is lost, which `lost` tells all who
    /// wait for it. Nothing where the system gives no thread: then nobody is missed.
    pub fn start(
        team: Vec<(u32, String, Arc<Pulse>)>,
        lost: impl Fn(u32, &str) + Send + 'static,
        silence: Duration,
    ) -> Option<Watch> {
        let (end, ended) = channel::<()>();
        let all: Vec<Arc<Pulse>> = team.iter().map(|(_, _, pulse)| Arc::clone(pulse)).collect();
        let looks = move || {
            while ended.recv_timeout(silence / LOOKS) == Err(RecvTimeoutError::Timeout) {
                for (rank, device, _) in team.iter().filter(|(_, _, pulse)| pulse.look()) {
                    lost(*rank, &silent(device, silence));
                }
            }
        };
        thread::Builder::new().name("plimsoll-watch".into()).spawn(looks).ok()?;
        all.iter().for_each(|pulse| pulse.watched(true));
        Some(Watch { _end: end, team: all })
    }
}

/// What is said of a device that was silent for so long.
pub fn silent(device: &str, silence: Duration) -> String {
    format!("{device} gave no sign of life for {} s", silence.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn looks_are_missed_beats_and_lost_is_for_good() {
        let pulse = Pulse::default();
        for _ in 0..3 * LOOKS {
            assert!(!pulse.look(), "a device that beats between looks");
            pulse.beat();
        }
        assert!((0..LOOKS).all(|_| !pulse.look()));
        assert!(pulse.look() && pulse.is_lost());
        pulse.beat();
        assert!(pulse.is_lost());
        // It is told once.
        assert!((0..3 * LOOKS).all(|_| !pulse.look()));
    }

    #[test]
    fn a_device_that_answers_no_more_is_lost_and_others_are_not() {
        let silence = Duration::from_millis(200);
        let answers = Arc::new(AtomicBool::new(true));
        let asked = Arc::clone(&answers);
        let hearts = [
            Heart::start("a", silence, || true).expect("a thread"),
            Heart::start("b", silence, move || asked.load(Ordering::Relaxed)).expect("a thread"),
        ];
        let of = |(rank, heart): (u32, &Heart)| (rank, rank.to_string(), heart.pulse());
        let team = (0..).zip(&hearts).map(of).collect();
        let (tells, told) = channel();
        let lost = move |rank: u32, why: &str| drop(tells.send((rank, why.to_owned())));
        let _watch = Watch::start(team, lost, silence).expect("a thread");
        answers.store(false, Ordering::Relaxed);
        let pulse = hearts[1].pulse();
        // Comes back when it has been missed; a test that hung here would say so by its time limit.
        assert!(pulse.stop(false) && pulse.is_lost());
        let (rank, why) = told.recv().expect("the watch is there");
        assert!(rank == 1 && why.starts_with("1 gave no sign of life"), "{why}");
    }

    #[test]
    fn a_device_that_nobody_would_miss_does_not_fall_silent() {
        let heart = Heart::start("a", Duration::from_millis(200), || true).expect("a thread");
        assert!(!heart.pulse().stop(true));
    }
}
