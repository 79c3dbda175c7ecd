//! Heartbeats: detection of devices that no longer respond. [`MissedTicks`] also tells a remote device that its run is
//! gone.
//!
//! Each device has a [`HeartbeatSender`], a thread that asks it for a sign of life at short intervals, however long its
//! work takes. A [`HeartbeatMonitor`] counts its own ticks since the last heartbeat of each device. After more than
//! [`TICKS_PER_TIMEOUT`] ticks without one (`run.heartbeat_seconds`) the device is lost: workers that wait for it are
//! told, and its job is abandoned (`run_on_all`). A slow step is never a loss.
//!
//! The monitor counts ticks instead of clock time, so a process that was suspended, or a machine that slept, loses no
//! device.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

/// Number of ticks in one timeout. A device that sends no heartbeat for more ticks than this is lost. A larger number
/// makes the ticks shorter, not the timeout longer, which is `run.heartbeat_seconds`.
pub(crate) const TICKS_PER_TIMEOUT: u32 = 20;

/// Counter of the ticks since the last sign of life of a device or of a run. A thread counts a tick at a fixed
/// interval. It counts none while the process is suspended or the machine sleeps, because such a pause is no loss.
#[derive(Debug, Default)]
pub struct MissedTicks(u32);

impl MissedTicks {
    /// Sets the counter to 0, after a sign of life.
    pub fn reset(&mut self) {
        self.0 = 0;
    }

    /// Counts a tick. Returns whether more than [`TICKS_PER_TIMEOUT`] ticks have passed without a sign of life.
    pub fn count_tick(&mut self) -> bool {
        self.0 = self.0.saturating_add(1);
        self.0 > TICKS_PER_TIMEOUT
    }
}

/// Liveness of a device, shared by its heartbeat sender, the monitor and fault injection.
#[derive(Debug, Default)]
pub struct Liveness {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of ticks of the monitor since the last heartbeat.
    missed_ticks: MissedTicks,
    /// Whether fault injection suppresses the heartbeat.
    suspended: bool,
    /// Whether the device is lost; this is final.
    lost: bool,
    /// Whether a monitor watches the device.
    monitored: bool,
}

impl Liveness {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Records a heartbeat of the device, unless fault injection suppresses it.
    fn record_heartbeat(&self) {
        let mut state = self.state();
        if !state.suspended {
            state.missed_ticks.reset();
        }
    }

    /// Whether the device missed its heartbeats for the whole timeout.
    pub fn is_lost(&self) -> bool {
        self.state().lost
    }

    /// Injects a silence: suppresses the heartbeat and blocks until the device is lost or its monitor has ended, then
    /// returns true. With `forever`, never returns. If no monitor watches the device, does nothing and returns false
    /// at once, even with `forever`.
    pub fn suspend(&self, forever: bool) -> bool {
        let mut state = self.state();
        state.suspended = state.monitored;
        while state.suspended && (forever || state.monitored && !state.lost) {
            state = self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        state.suspended
    }

    /// Whether a monitor watches the device.
    pub fn is_monitored(&self) -> bool {
        self.state().monitored
    }

    fn set_monitored(&self, monitored: bool) {
        self.state().monitored = monitored;
        self.changed.notify_all();
    }

    /// Counts a tick of the monitor. Returns whether the device became lost with this tick; false if it was lost
    /// before.
    fn tick(&self) -> bool {
        let mut state = self.state();
        let newly_lost = state.missed_ticks.count_tick() && !state.lost;
        if newly_lost {
            state.lost = true;
            self.changed.notify_all();
        }
        newly_lost
    }
}

/// Handle of a thread that asks a device for heartbeats. Dropping the handle ends the thread, after the question in
/// progress.
#[derive(Debug)]
pub struct HeartbeatSender {
    liveness: Arc<Liveness>,
    /// Channel whose drop ends the thread. The drop does not wait for a probe that hangs in a driver.
    _end: Sender<()>,
}

impl HeartbeatSender {
    /// Starts the thread, which calls `probe` about twice per monitor tick (a tick is `timeout` divided by
    /// [`TICKS_PER_TIMEOUT`]). `probe` asks the device for a sign of life, and returns whether it responds. Returns
    /// `None` if the system refuses a thread; then the device cannot be monitored, and is never lost by timeout.
    pub fn start(
        device: &str,
        timeout: Duration,
        probe: impl Fn() -> bool + Send + 'static,
    ) -> Option<HeartbeatSender> {
        let (end, ended) = channel::<()>();
        let liveness = Arc::new(Liveness::default());
        let probed = Arc::clone(&liveness);
        let heartbeats = move || send_heartbeats(&probed, probe, timeout, &ended);
        thread::Builder::new().name(format!("plimsoll-heart-{device}")).spawn(heartbeats).ok()?;
        Some(HeartbeatSender { liveness, _end: end })
    }

    /// Returns the liveness of the device.
    pub fn liveness(&self) -> Arc<Liveness> {
        Arc::clone(&self.liveness)
    }
}

/// Records a heartbeat after each successful `probe`, about twice per monitor tick. Returns when the sender of `ended`
/// is dropped.
fn send_heartbeats(liveness: &Liveness, probe: impl Fn() -> bool, timeout: Duration, ended: &Receiver<()>) {
    loop {
        if probe() {
            liveness.record_heartbeat();
        }
        if ended.recv_timeout(timeout / TICKS_PER_TIMEOUT / 2) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}

/// A device that a monitor watches.
pub struct MonitoredDevice {
    /// Rank in the team.
    pub rank: u32,
    /// Name, for messages.
    pub name: String,
    /// Liveness that the heartbeats of the device update.
    pub liveness: Arc<Liveness>,
}

/// Handle of a thread that counts missed heartbeats of devices. Dropping the handle ends the monitoring.
#[derive(Debug)]
pub struct HeartbeatMonitor {
    _end: Sender<()>,
    devices: Vec<Arc<Liveness>>,
}

impl Drop for HeartbeatMonitor {
    fn drop(&mut self) {
        self.devices.iter().for_each(|liveness| liveness.set_monitored(false));
    }
}

impl HeartbeatMonitor {
    /// Starts to monitor these devices. A device without a heartbeat for `timeout` is lost: `on_loss` is called with
    /// its rank and the reason. Returns `None` if the system refuses a thread; then no device is monitored.
    pub fn start(
        devices: Vec<MonitoredDevice>,
        on_loss: impl Fn(u32, &str) + Send + 'static,
        timeout: Duration,
    ) -> Option<HeartbeatMonitor> {
        let (end, ended) = channel::<()>();
        let all: Vec<Arc<Liveness>> = devices.iter().map(|device| Arc::clone(&device.liveness)).collect();
        let monitor = move || count_ticks(&devices, on_loss, timeout, &ended);
        thread::Builder::new().name("plimsoll-watch".into()).spawn(monitor).ok()?;
        all.iter().for_each(|liveness| liveness.set_monitored(true));
        Some(HeartbeatMonitor { _end: end, devices: all })
    }
}

/// Counts the ticks of the monitor and reports each lost device. Returns when the sender of `ended` is dropped.
fn count_ticks(devices: &[MonitoredDevice], on_loss: impl Fn(u32, &str), timeout: Duration, ended: &Receiver<()>) {
    while ended.recv_timeout(timeout / TICKS_PER_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
        for device in devices.iter().filter(|device| device.liveness.tick()) {
            on_loss(device.rank, &timeout_message(&device.name, timeout));
        }
    }
}

/// Returns the text that gives the reason for the loss of a device: it sent no heartbeat for `timeout`.
pub fn timeout_message(device: &str, timeout: Duration) -> String {
    format!("{device} sent no heartbeat for {} s", timeout.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn device_is_lost_once_and_forever_after_timeout() {
        let liveness = Liveness::default();
        for _ in 0..3 * TICKS_PER_TIMEOUT {
            assert!(!liveness.tick(), "a heartbeat arrives between ticks");
            liveness.record_heartbeat();
        }
        assert!((0..TICKS_PER_TIMEOUT).all(|_| !liveness.tick()));
        assert!(liveness.tick() && liveness.is_lost());
        liveness.record_heartbeat();
        assert!(liveness.is_lost());
        // The loss is reported once.
        assert!((0..3 * TICKS_PER_TIMEOUT).all(|_| !liveness.tick()));
    }

    #[test]
    fn unresponsive_device_is_lost_and_others_are_not() {
        let heartbeat_timeout = Duration::from_millis(200);
        let answers = Arc::new(AtomicBool::new(true));
        let probed = Arc::clone(&answers);
        let senders = [
            HeartbeatSender::start("a", heartbeat_timeout, || true).expect("a thread"),
            HeartbeatSender::start("b", heartbeat_timeout, move || probed.load(Ordering::Relaxed)).expect("a thread"),
        ];
        let monitored = |(rank, sender): (u32, &HeartbeatSender)| MonitoredDevice {
            rank,
            name: rank.to_string(),
            liveness: sender.liveness(),
        };
        let devices = (0..).zip(&senders).map(monitored).collect();
        let (loss_sender, losses) = channel();
        let on_loss = move |rank: u32, reason: &str| drop(loss_sender.send((rank, reason.to_owned())));
        let _monitor = HeartbeatMonitor::start(devices, on_loss, heartbeat_timeout).expect("a thread");
        answers.store(false, Ordering::Relaxed);
        let liveness = senders[1].liveness();
        // Returns after the loss; if not, the test hits its time limit.
        assert!(liveness.suspend(false) && liveness.is_lost());
        let (rank, reason) = losses.recv().expect("the monitor runs");
        assert!(rank == 1 && reason.starts_with("1 sent no heartbeat"), "{reason}");
    }

    #[test]
    fn unmonitored_device_does_not_fall_silent() {
        let heartbeat = HeartbeatSender::start("a", Duration::from_millis(200), || true).expect("a thread");
        assert!(!heartbeat.liveness().suspend(true));
    }
}
