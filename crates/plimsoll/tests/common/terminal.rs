//! The program on a terminal of its own, with keys that the test types. Also a shell on such a terminal.

use super::{WATCHDOG, Workspace};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::tcgetattr;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The bytes that programs have written to a terminal.
type Screen = Arc<Mutex<Vec<u8>>>;

/// Opens a terminal. Returns the end of the test, and that of the programs.
fn open_terminal() -> (File, File) {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let terminal = OpenOptions::new().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    (File::from(master), terminal)
}

/// Starts a thread that reads what programs write to a terminal. It ends as soon as no process has the terminal open.
fn read_screen(master: &File, screen: &Screen) -> JoinHandle<()> {
    let (mut output, shown) = (master.try_clone().unwrap(), Arc::clone(screen));
    std::thread::spawn(move || {
        let mut some = [0; 4096];
        while let Ok(count @ 1..) = output.read(&mut some) {
            shown.lock().unwrap().extend_from_slice(&some[..count]);
        }
    })
}

/// A shell with job control on a terminal of its own. Unlike others, it does not restore the modes of the terminal. It is
/// killed when dropped.
pub struct ShellOnTerminal {
    shell: Child,
    master: File,
    /// Keeps the terminal open, and reads its modes.
    terminal: File,
    screen: Screen,
}

impl ShellOnTerminal {
    /// Starts the shell in the folder of a workspace.
    pub fn start(workspace: &Workspace) -> ShellOnTerminal {
        let (master, terminal) = open_terminal();
        let end = || Stdio::from(terminal.try_clone().unwrap());
        let shell = Command::new("setsid")
            .args(["--ctty", "dash", "-mi"])
            .current_dir(workspace.path(""))
            .env("PLIMSOLL_CACHE", workspace.path("cache"))
            .env("TERM", "dumb")
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .spawn()
            .unwrap();
        let screen = Screen::default();
        read_screen(&master, &screen);
        ShellOnTerminal { shell, master, terminal, screen }
    }

    /// Returns the process id of the shell.
    pub fn pid(&self) -> u32 {
        self.shell.id()
    }

    /// Types text.
    pub fn send(&mut self, text: &str) {
        self.master.write_all(text.as_bytes()).unwrap();
    }

    /// Returns all that programs have written to the terminal.
    pub fn screen(&self) -> String {
        String::from_utf8_lossy(&self.screen.lock().unwrap()).into_owned()
    }

    /// Returns the modes of the terminal, for comparisons.
    pub fn modes(&self) -> String {
        let modes = tcgetattr(&self.terminal).unwrap();
        format!("{:?} {:?} {:?}", modes.input_modes, modes.output_modes, modes.local_modes)
    }

    /// Waits until a condition holds.
    pub fn wait(&self, what: &str, is_so: impl Fn(&ShellOnTerminal) -> bool) {
        let began = Instant::now();
        while !is_so(self) {
            assert!(began.elapsed() < WATCHDOG, "{what} did not come: {}", self.screen());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for ShellOnTerminal {
    fn drop(&mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

/// Runs the program on a terminal. Types `keys` once the screen shows `prompt`; at once if that is empty. Returns the
/// exit code and the text on the screen.
pub fn run_on_terminal(workspace: &Workspace, args: &[&str], prompt: &str, keys: &str) -> (Option<i32>, String) {
    converse(workspace, args, &[(prompt, keys)])
}

/// Runs the program on a terminal. Types the keys of each step once the screen shows its prompt after that of the step
/// before. Returns the exit code and the text on the screen.
pub fn converse(workspace: &Workspace, args: &[&str], steps: &[(&str, &str)]) -> (Option<i32>, String) {
    let (mut master, terminal) = open_terminal();
    let end = || Stdio::from(terminal.try_clone().unwrap());
    let mut child = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(args)
        .current_dir(workspace.path(""))
        .env("PLIMSOLL_CACHE", workspace.path("cache"))
        .env("PLIMSOLL_RAY_STATE", workspace.path("ray"))
        .env_remove("RAY_ADDRESS")
        .env("NO_COLOR", "1")
        .env("TERM", "dumb")
        .stdin(end())
        .stdout(end())
        .stderr(end())
        .spawn()
        .unwrap();
    drop(terminal);
    let screen: Screen = Arc::default();
    let reader = read_screen(&master, &screen);
    let text = || String::from_utf8_lossy(&screen.lock().unwrap()).into_owned();
    let (began, mut steps, mut seen) = (Instant::now(), steps.iter(), 0);
    let mut step = steps.next();
    let status = loop {
        let shown = text();
        if let Some((prompt, keys)) = step
            && let Some(at) = shown[seen..].find(prompt)
        {
            master.write_all(keys.as_bytes()).unwrap();
            (step, seen) = (steps.next(), seen + at + prompt.len());
        }
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if began.elapsed() > WATCHDOG {
            let _ = child.kill();
            let _ = child.wait();
            panic!("{args:?} hangs: {}", text());
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    reader.join().unwrap();
    (status.code(), text())
}
