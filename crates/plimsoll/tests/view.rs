//! The full-screen view of `plimsoll watch` in tmux, with keys that the test types.
//! Where `tmux` is not installed, the tests say so and check nothing.

use crate::common::{Running, SMALL, Shape, Workspace};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Time after which a screen that does not change as expected counts as hanging.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Columns and rows of the terminals.
const SIZES: [(usize, usize); 2] = [(80, 24), (120, 40)];

/// A tmux server of its own with one terminal, on which the view of the folder `run` is open. It ends when dropped.
struct Tmux<'w> {
    workspace: &'w Workspace,
    size: (usize, usize),
}

impl<'w> Tmux<'w> {
    /// Opens the view on a terminal of `size` columns and rows.
    fn open(workspace: &'w Workspace, size: (usize, usize)) -> Tmux<'w> {
        let tmux = Tmux { workspace, size };
        let binary = env!("CARGO_BIN_EXE_plimsoll");
        let view = format!("NO_COLOR=1 '{binary}' watch run; echo \"exit code $?\"; exec sleep 600");
        let [columns, rows] = [size.0, size.1].map(|number| number.to_string());
        tmux.succeed(&["-f", "/dev/null", "new-session", "-d", "-x", &columns, "-y", &rows, &view]);
        tmux
    }

    fn command(&self, words: &[&str]) -> Output {
        let socket = self.workspace.path(&format!("tmux-{}", self.size.0));
        let mut tmux = Command::new("tmux");
        tmux.arg("-S").arg(socket).args(words).current_dir(self.workspace.path(""));
        tmux.env("PLIMSOLL_CACHE", self.workspace.path("cache")).env("LC_ALL", "C.UTF-8").env_remove("TMUX");
        tmux.output().expect("tmux is installed")
    }

    fn succeed(&self, words: &[&str]) -> String {
        let output = self.command(words);
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Types keys as tmux names them.
    fn type_keys(&self, keys: &str) {
        self.succeed(&["send-keys", keys]);
    }

    fn screen(&self) -> String {
        self.succeed(&["capture-pane", "-p"])
    }

    /// Waits until the screen shows all of `texts`, and returns it. Checks that it has the size of the terminal.
    fn wait_for(&self, texts: &[&str]) -> String {
        let began = Instant::now();
        loop {
            let screen = self.screen();
            if texts.iter().all(|text| screen.contains(text)) {
                let widest = screen.lines().map(|line| line.chars().count()).max().unwrap_or(0);
                assert!(widest <= self.size.0 && screen.lines().count() <= self.size.1, "{screen}");
                return screen;
            }
            assert!(began.elapsed() < TIMEOUT, "{texts:?} never appear:\n{screen}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Tmux<'_> {
    fn drop(&mut self) {
        self.command(&["kill-server"]);
    }
}

/// Returns whether `tmux` is installed. Says so if it is not.
fn has_tmux() -> bool {
    let found = Command::new("tmux").arg("-V").output().is_ok();
    if !found {
        eprintln!("no tmux: the view is not tested on a terminal");
    }
    found
}

#[test]
fn keys_open_and_close_screens_at_two_sizes() {
    if !has_tmux() {
        return;
    }
    let workspace = Workspace::new(&SMALL);
    workspace.succeed(&["train", "run.toml", "--quiet", "--set", "run.devices=virtual:a=64MiB@0.5"]);
    for size in SIZES {
        let tmux = Tmux::open(&workspace, size);
        let overview = tmux.wait_for(&["run  done", "step 24 of 24", "virtual:a", "c charges", "loss ", "memory "]);
        assert!(overview.contains("tok/s"), "the line of the progress is not cut off:\n{overview}");
        tmux.type_keys("m");
        tmux.wait_for(&["forward", "backward", "update", "point "]);
        tmux.type_keys("h");
        tmux.wait_for(&["a run goes on", "┌"]);
        tmux.type_keys("h");
        tmux.type_keys("m");
        tmux.type_keys("Enter");
        tmux.wait_for(&["measured peak", "load line"]);
        tmux.type_keys("q");
        let ended = tmux.wait_for(&["exit code 0"]);
        assert!(!ended.contains("virtual:a"), "the view leaves the screen as it was:\n{ended}");
    }
}

#[test]
fn view_follows_a_killed_and_resumed_run() {
    if !has_tmux() {
        return;
    }
    let workspace = Workspace::new(&Shape { steps: 1_000_000, save_every: 100, ..SMALL });
    let start = |words: &[&str]| -> Running { workspace.start(&[words, &["--quiet"]].concat()) };
    let mut run = start(&["train", "run.toml"]);
    let saved = || workspace.file_names("run/checkpoints").iter().any(|name| name == "step-100");
    assert!(run.wait_until(saved), "{}", run.stderr());
    let tmux = Tmux::open(&workspace, SIZES[0]);
    tmux.wait_for(&["run  running", "of 1000000"]);
    run.kill();
    tmux.wait_for(&["run  ended without a result"]);
    // A record that is cut off in the middle of its line, as a full disk leaves it.
    let mut log = OpenOptions::new().append(true).open(workspace.path("run/events.jsonl")).unwrap();
    log.write_all(b"{\"version\":1,\"time\":17").unwrap();
    tmux.wait_for(&["run  ended without a result"]);
    let mut resumed = start(&["train", "--resume", "run"]);
    let has_new_steps = || workspace.events("run").iter().filter(|event| event["event"] == "start").count() == 2;
    assert!(resumed.wait_until(has_new_steps), "{}", resumed.stderr());
    tmux.wait_for(&["run  running", "of 1000000"]);
    resumed.signal("INT");
    assert_eq!(resumed.wait().code, Some(4));
    tmux.wait_for(&["run  stopped"]);
    tmux.type_keys("q");
    tmux.wait_for(&["exit code 0"]);
}

/// Returns the only child of a process; `None` without one.
fn child_of(process: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

#[test]
fn view_ends_with_its_terminal() {
    if !has_tmux() {
        return;
    }
    let workspace = Workspace::new(&SMALL);
    workspace.succeed(&["train", "run.toml", "--quiet"]);
    let tmux = Tmux::open(&workspace, SIZES[0]);
    tmux.wait_for(&["run  done"]);
    let number = |format: &str| -> u32 { tmux.succeed(&["display-message", "-p", format]).trim().parse().unwrap() };
    let (server, shell) = (number("#{pid}"), number("#{pane_pid}"));
    let view = child_of(shell).expect("the shell has started the view");
    let killed = Command::new("kill").args(["-KILL", &server.to_string()]).status().unwrap();
    assert!(killed.success());
    let began = Instant::now();
    while fs::exists(format!("/proc/{view}")).unwrap() {
        assert!(began.elapsed() < TIMEOUT, "the view outlives its terminal");
        std::thread::sleep(Duration::from_millis(20));
    }
}
