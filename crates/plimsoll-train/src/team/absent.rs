//! Devices of other hosts that were lost, and may come back: whoever brought them starts their processes anew. Each is asked for
//! from beside the run; one that answers, and does nothing, can be taken in again.

use crate::remote::Elsewhere;
use plimsoll_core::DeviceSpec;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

/// How often it is asked for.
const LOOK: Duration = Duration::from_millis(500);
/// It is first asked for after so many doublings of that at most.
const DOUBLINGS: u32 = 6;

/// A device that was lost.
pub struct Absent {
    /// What it was, under the load line that held.
    pub spec: DeviceSpec,
    back: Arc<AtomicBool>,
    /// The team that there is goes on without it: it is looked at again when that changes.
    pub declined: bool,
    /// Dropped, it ends the thread; one that waits for an answer is not waited for.
    _end: Sender<()>,
}

impl Absent {
    /// Begins to ask for it; later, the more `often` it was lost soon after it had come back: a process may answer for some
    /// seconds that is about to go with its node. Nothing where the system gives no thread: such a device does not come back.
    pub fn wait_for(spec: DeviceSpec, elsewhere: Elsewhere, often: u32) -> Option<Absent> {
        let (end, ended) = channel::<()>();
        let mut wait = LOOK * 2u32.pow(often.min(DOUBLINGS));
        let back = Arc::new(AtomicBool::new(false));
        let (told, name) = (Arc::clone(&back), spec.name.clone());
        let thread = thread::Builder::new().name(format!("plimsoll-absent-{name}"));
        let asks = move || {
            while ended.recv_timeout(std::mem::replace(&mut wait, LOOK)) == Err(RecvTimeoutError::Timeout) {
                // What is asked aside is answered by a process whose device hangs, too; the rest waits for that.
                if elsewhere.connection(&name).is_ok_and(|connection| connection.answers() && connection.find().is_ok())
                {
                    return told.store(true, Ordering::Relaxed);
                }
            }
        };
        thread.spawn(asks).ok()?;
        Some(Absent { spec, back, declined: false, _end: end })
    }

    /// Whether it has answered.
    pub fn is_back(&self) -> bool {
        self.back.load(Ordering::Relaxed)
    }
}
