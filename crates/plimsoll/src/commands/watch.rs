//! `plimsoll watch`: a run, or the devices of this machine and its cluster, live, on the terminal or as a page.

use super::advice::recommendations_for_run;
use super::cluster::ClusterWatch;
use super::serve::{serve, serve_standard_input};
use super::watch_process;
use crate::args::WatchArgs;
use crate::output;
use plimsoll_core::{Exit, Failure, Recommendation};
use plimsoll_device::process::keep_terminal_access;
use plimsoll_serve::remote::{self, RemoteRun, TOKEN_VARIABLE};
use plimsoll_watch::snapshot::source::Source;
use plimsoll_watch::snapshot::{RunState, Snapshot};
use plimsoll_watch::view::{self, Viewer, lines};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process, nice};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag::register;
use std::io::{self, IsTerminal};
use std::os::unix::process::parent_id;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Time between the two readings of a single snapshot, from which the load of the processor follows.
const LOAD_PERIOD: Duration = Duration::from_millis(200);

/// Most time in which a single snapshot waits for the devices of the cluster. Their processes start within it.
const CLUSTER_TIME: Duration = Duration::from_secs(40);

/// Niceness that a watching process adds to its own, so that a run on this machine gets the processor first.
const NICENESS: i32 = 10;

/// Shows snapshots: one as JSON, a page, a live view on a terminal, else lines until the run ends or the output is closed.
///
/// # Errors
/// There is no such run folder, server or process, the terminal cannot be drawn on, or the page cannot be served.
pub fn run(args: &WatchArgs) -> Result<Exit, Failure> {
    // A system that refuses leaves this process at the priority of a run.
    let _ = nice(NICENESS);
    if let Some(pid) = args.pid {
        return watch_process::run(pid, args);
    }
    let mut watched = Watched::open(args)?;
    let period = Duration::from_secs_f64(args.interval);
    if let (true, Some(run)) = (args.serve_standard_input, args.of_process) {
        serve_standard_input(run, period, move || watched.take())?;
    } else if let Some(address) = args.serve {
        serve(address, period, move || watched.take())?;
    } else if !args.json && io::stdout().is_terminal() {
        show(watched, args)?;
    } else {
        watched.wait_for_advice();
        if args.json {
            watched.wait_for_cluster();
            thread::sleep(LOAD_PERIOD);
            output::print_json(&lines::json(&watched.take()?));
        } else {
            print_lines(&mut watched, period)?;
        }
    }
    Ok(Exit::Done)
}

/// The origin of the snapshots, with recommendations once they are computed.
struct Watched {
    origin: Origin,
    /// The thread that computes recommendations; `None` if there is none, and once they are shown.
    advice: Option<JoinHandle<Result<Vec<Recommendation>, Failure>>>,
}

/// The origin of snapshots.
enum Origin {
    /// This machine with its cluster, or the folder of a run.
    Here(Box<Source>, Option<ClusterWatch>),
    /// A server, which adds its own recommendations.
    Server(RemoteRun),
}

impl Watched {
    /// Opens what the arguments name.
    fn open(args: &WatchArgs) -> Result<Watched, Failure> {
        let url = args.run_dir.as_ref().and_then(|path| path.to_str()).filter(|word| remote::is_url(word));
        if let Some(url) = url {
            if args.advise {
                let failure = Failure::input("--advise plans the run anew, and needs its folder instead of a URL");
                return Err(failure.hint("on the machine of the run: plimsoll watch RUN_DIR --advise --serve"));
            }
            let server = RemoteRun::new(url, std::env::var(TOKEN_VARIABLE).ok())?;
            return Ok(Watched { origin: Origin::Server(server), advice: None });
        }
        let source = match &args.run_dir {
            Some(path) => Source::run_folder(path)?,
            None => Source::machine(),
        };
        let period = Duration::from_secs_f64(args.interval);
        let cluster = if args.run_dir.is_none() { ClusterWatch::start(period) } else { None };
        let advice = args.run_dir.clone().filter(|_| args.advise);
        let advice = advice.map(|folder| thread::spawn(move || recommendations_for_run(&folder)));
        Ok(Watched { origin: Origin::Here(Box::new(source), cluster), advice })
    }

    /// Takes a snapshot.
    fn take(&mut self) -> Result<Snapshot, Failure> {
        if self.advice.as_ref().is_some_and(JoinHandle::is_finished) {
            self.wait_for_advice();
        }
        match &mut self.origin {
            Origin::Here(source, cluster) => {
                source.cluster = cluster.as_ref().and_then(ClusterWatch::newest);
                source.snapshot()
            }
            Origin::Server(server) => server.snapshot(),
        }
    }

    /// Waits until the recommendations are computed, and adds them to all later snapshots.
    fn wait_for_advice(&mut self) {
        if let (Some(advice), Origin::Here(source, _)) = (self.advice.take(), &mut self.origin) {
            source.recommendations = advice.join().unwrap_or_else(|_| Err(Failure::bug("planning ended early")));
        }
    }

    /// Waits until the devices of the cluster have answered, or one of them takes too long.
    fn wait_for_cluster(&self) {
        if let Origin::Here(_, Some(cluster)) = &self.origin {
            cluster.wait(CLUSTER_TIME);
        }
    }
}

/// The view of a run or of this machine on the terminal of this process.
struct TerminalViewer {
    watched: Watched,
    /// The process of the run that started this one; `None` if the user did.
    of_process: Option<u32>,
    /// Whether a signal asked this process to end.
    stop: Arc<AtomicBool>,
}

impl Viewer for TerminalViewer {
    fn take(&mut self) -> Result<Option<Snapshot>, Failure> {
        self.watched.take().map(Some)
    }

    fn is_over(&self) -> bool {
        let is_orphan = self.of_process.is_some_and(|process| process != parent_id());
        is_orphan || self.stop.load(Ordering::Relaxed)
    }

    fn interrupt(&mut self) -> bool {
        let run = self.of_process.and_then(|process| Pid::from_raw(process as i32));
        let passed = run.is_some_and(|run| kill_process(run, Signal::INT).is_ok());
        // The run ends after its step, and this view with it.
        !passed
    }
}

/// Draws the view until the user quits, a signal ends this process, or the process of the run ends.
fn show(watched: Watched, args: &WatchArgs) -> Result<(), Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // If the handler cannot be installed, the signal ends the process without restoring the terminal.
        let _ = register(signal, Arc::clone(&stop));
    }
    if args.of_process.is_some() {
        // The terminal may pass to the shell before this process has restored it.
        keep_terminal_access();
    }
    // Without this thread, the view outlives its terminal.
    let _ = thread::Builder::new().name("terminal".into()).stack_size(128 << 10).spawn(end_with_terminal);
    let mut viewer = TerminalViewer { watched, of_process: args.of_process, stop };
    view::show(Duration::from_secs_f64(args.interval), &mut viewer)
}

/// Ends this process once its terminal is gone. The view cannot: it waits for keys in a library call that never returns on
/// a closed terminal.
fn end_with_terminal() {
    let terminal = io::stdin();
    let mut ends = [PollFd::new(&terminal, PollFlags::empty())];
    let waited = loop {
        match poll(&mut ends, None) {
            Err(Errno::INTR) => {}
            waited => break waited,
        }
    };
    if waited.is_ok() && ends[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
        std::process::exit(Exit::Done as i32);
    }
}

/// Prints the lines of a snapshot each `period`, until the run has ended or the output is closed.
fn print_lines(watched: &mut Watched, period: Duration) -> Result<(), Failure> {
    loop {
        thread::sleep(period.min(LOAD_PERIOD));
        let snapshot = watched.take()?;
        let is_over = snapshot
            .run
            .as_ref()
            .is_some_and(|run| matches!(run.state, RunState::Done | RunState::Stopped | RunState::Died));
        if !output::print_while_open(&lines::lines(&snapshot)) || is_over {
            return Ok(());
        }
        thread::sleep(period.saturating_sub(LOAD_PERIOD));
    }
}
