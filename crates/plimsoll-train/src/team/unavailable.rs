//! Lost remote devices that may return. Their processes may be restarted, for example by Ray. A thread polls each of
//! them; a device that answers and is idle can join the team again.

use crate::remote::RemoteDevices;
use plimsoll_core::DeviceSpec;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

/// Interval at which a lost device is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Largest number of times that the delay before the first poll is doubled.
const MAX_DELAY_DOUBLINGS: u32 = 6;

/// A lost device that is being polled.
pub struct UnavailableDevice {
    /// The device, with its last load line.
    pub spec: DeviceSpec,
    answered: Arc<AtomicBool>,
    /// Whether the planner has considered the device for the present team and left it out. Reset when the team changes.
    pub declined: bool,
    /// Ends the polling thread when it is dropped, without waiting for an answer in progress.
    _end: Sender<()>,
}

impl UnavailableDevice {
    /// Starts to poll a lost device. `quick_losses` counts how often in a row the device was lost soon after its
    /// return. Each of these losses doubles the delay before the first poll, up to a limit: a process may still
    /// answer for some seconds before its node goes down. Returns `None` if the system refuses a thread; such a device
    /// does not return.
    pub fn poll(spec: DeviceSpec, remote: RemoteDevices, quick_losses: u32) -> Option<UnavailableDevice> {
        let (end, ended) = channel::<()>();
        let delay = POLL_INTERVAL * 2u32.pow(quick_losses.min(MAX_DELAY_DOUBLINGS));
        let answered = Arc::new(AtomicBool::new(false));
        let (answered_flag, name) = (Arc::clone(&answered), spec.name.clone());
        let thread = thread::Builder::new().name(format!("plimsoll-absent-{name}"));
        let poll_device = move || poll_until_answer(&remote, &name, delay, &ended, &answered_flag);
        thread.spawn(poll_device).ok()?;
        Some(UnavailableDevice { spec, answered, declined: false, _end: end })
    }

    /// Returns whether the device has answered since polling began.
    pub fn has_answered(&self) -> bool {
        self.answered.load(Ordering::Relaxed)
    }
}

/// Asks the device at intervals, first after `wait`, until it answers or the sender of `ended` is dropped. Sets
/// `answered` after an answer.
fn poll_until_answer(
    remote: &RemoteDevices,
    device: &str,
    mut wait: Duration,
    ended: &Receiver<()>,
    answered: &AtomicBool,
) {
    while ended.recv_timeout(std::mem::replace(&mut wait, POLL_INTERVAL)) == Err(RecvTimeoutError::Timeout) {
        let connection = remote.connection(device);
        // The heartbeat channel of a process answers even if its device hangs, so ask the device as well.
        if connection.is_ok_and(|connection| connection.is_responsive() && connection.fetch_address().is_ok()) {
            return answered.store(true, Ordering::Relaxed);
        }
    }
}
