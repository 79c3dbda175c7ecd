//! The program on a terminal of its own, with keys that the test types.

use super::{WATCHDOG, Workspace};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Runs the program on a terminal. Types `keys` once the screen shows `prompt`; at once if that is empty. Returns the
/// exit code and the text on the screen.
pub fn run_on_terminal(workspace: &Workspace, args: &[&str], prompt: &str, keys: &str) -> (Option<i32>, String) {
    converse(workspace, args, &[(prompt, keys)])
}

/// Runs the program on a terminal. Types the keys of each step once the screen shows its prompt after that of the step
/// before. Returns the exit code and the text on the screen.
pub fn converse(workspace: &Workspace, args: &[&str], steps: &[(&str, &str)]) -> (Option<i32>, String) {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let terminal = OpenOptions::new().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    let end = || Stdio::from(terminal.try_clone().unwrap());
    let mut child = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(args)
        .current_dir(workspace.path(""))
        .env("PLIMSOLL_CACHE", workspace.path("cache"))
        .env("NO_COLOR", "1")
        .env("TERM", "dumb")
        .stdin(end())
        .stdout(end())
        .stderr(end())
        .spawn()
        .unwrap();
    drop(terminal);
    let mut master = File::from(master);
    let mut output = master.try_clone().unwrap();
    let screen = Arc::new(Mutex::new(Vec::new()));
    let shown = Arc::clone(&screen);
    let reader = std::thread::spawn(move || {
        let mut some = [0; 4096];
        // Reading fails as soon as no process has the terminal open.
        while let Ok(count @ 1..) = output.read(&mut some) {
            shown.lock().unwrap().extend_from_slice(&some[..count]);
        }
    });
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
