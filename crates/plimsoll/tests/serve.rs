//! `plimsoll watch --serve` and `plimsoll watch URL`, with the real binary.

use crate::common::{Running, SMALL, Shape, Workspace};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Time after which a reader counts as hanging.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Starts a server, and returns it with its address `127.0.0.1:PORT`.
fn serve(workspace: &Workspace, args: &[&str]) -> (Running, String) {
    let mut server = workspace.start(&[&["watch"], args].concat());
    let output = server.stdout_path();
    let text = || fs::read_to_string(&output).unwrap();
    assert!(server.wait_until(|| text().contains("until Ctrl-C")), "{}", server.stderr());
    let text = text();
    let port = text.rsplit_once(':').and_then(|(_, rest)| rest.split(' ').next()).unwrap_or_else(|| panic!("{text}"));
    (server, format!("127.0.0.1:{port}"))
}

/// Sends a GET request with further header lines, and returns status and body.
fn get(address: &str, path: &str, headers: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\n{headers}connection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text}"));
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Returns a snapshot without the readings of the machine, which differ from one moment to the next.
fn without_readings(mut snapshot: Value) -> Value {
    snapshot["at"].take();
    snapshot["cpu"]["load"].take();
    snapshot["host"]["free_bytes"].take();
    snapshot["run"]["silent_seconds"].take();
    for device in snapshot["devices"].as_array_mut().unwrap() {
        for key in ["free_bytes", "others_bytes", "load_line_bytes", "utilization", "temperature_c", "processes"] {
            device[key].take();
        }
    }
    snapshot
}

#[test]
fn finished_run_has_equal_numbers_everywhere() {
    let workspace = Workspace::new(&SMALL);
    workspace.succeed(&["train", "run.toml", "--quiet"]);
    let printed = workspace.succeed(&["watch", "run", "--json"]).json();
    let (server, address) = serve(&workspace, &["run", "--serve", "127.0.0.1:0"]);
    let (status, body) = get(&address, "/api/snapshot", "");
    let served: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, without_readings(served.clone())), (200, without_readings(printed.clone())));
    let url = format!("http://{address}");
    let attached = workspace.succeed(&["watch", &url, "--json"]).json();
    assert_eq!(without_readings(attached), without_readings(printed.clone()));
    let lines = workspace.succeed(&["watch", &url]).stdout;
    assert!(lines.contains(&format!("run done: step {} of", printed["run"]["steps"])), "{lines}");
    let (_, metrics) = get(&address, "/metrics", "");
    for key in ["loss", "step_seconds", "tokens_per_second"] {
        let prefix = format!("plimsoll_run_{key} ");
        let figure = metrics.lines().find_map(|line| line.strip_prefix(&prefix)).expect("the figure is known");
        assert_eq!(figure.parse().ok(), printed["run"][key].as_f64(), "{key}");
    }
    let report = workspace.succeed(&["report", "run", "--json"]).json();
    let (speed, memory) = (&report["speed"], &report["devices"][0]["total"]);
    let (run, device) = (&printed["run"], &printed["devices"][0]);
    assert_eq!(speed["measured_step_seconds"], run["step_seconds"]);
    assert_eq!(speed["measured_tokens_per_second"], run["tokens_per_second"]);
    assert_eq!(speed["predicted_tokens_per_second"], run["plan"]["predicted_tokens_per_second"]);
    assert_eq!(memory["predicted_bytes"], device["predicted_peak_bytes"]);
    assert_eq!(memory["measured_bytes"], device["measured_peak_bytes"]);
    assert_eq!(get(&address, "/../run.toml", "").0, 404);
    // The server wrote nothing into the folder, and ends without a failure.
    let files = workspace.file_names("run");
    server.signal("INT");
    let ended = server.wait();
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    assert_eq!(workspace.file_names("run"), files);
    let refusal = workspace.expect_refusal(2, &["watch", &url]);
    assert!(refusal.contains("no snapshot can be read"), "{refusal}");
}

#[test]
fn growing_run_reaches_the_page() {
    let workspace = Workspace::new(&SMALL);
    workspace.succeed(&["train", "run.toml", "--quiet"]);
    let events = workspace.read("run/events.jsonl");
    let half = events.match_indices("\"event\":\"step\"").nth(6).map(|(at, _)| at).unwrap();
    fs::create_dir(workspace.path("live")).unwrap();
    fs::copy(workspace.path("run/plan.json"), workspace.path("live/plan.json")).unwrap();
    // The first half ends in the middle of a line.
    workspace.write("live/events.jsonl", &events[..half]);
    let (_server, address) = serve(&workspace, &["live", "--serve", "127.0.0.1:0", "--interval", "0.1"]);
    let mut stream = TcpStream::connect(&address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    write!(stream, "GET /api/events HTTP/1.1\r\nhost: {address}\r\n\r\n").unwrap();
    let mut lines = BufReader::new(stream).lines().map(Result::unwrap);
    let mut next = || -> Value {
        let data = lines.find_map(|line| line.strip_prefix("data: ").map(str::to_owned));
        serde_json::from_str(&data.expect("the stream goes on")).unwrap()
    };
    let first = next();
    assert_eq!((&first["run"]["state"], &first["run"]["step"]), (&"died".into(), &6.into()));
    let mut log = fs::OpenOptions::new().append(true).open(workspace.path("live/events.jsonl")).unwrap();
    log.write_all(&events.as_bytes()[half..]).unwrap();
    let last = std::iter::repeat_with(next).find(|snapshot| snapshot["run"]["state"] == "done").unwrap();
    let result = workspace.json("run/result.json");
    assert_eq!((&last["run"]["step"], &last["run"]["loss"]), (&result["steps"], &result["loss"]["last"]));
}

/// Reads the events of a page until its server ends the stream, and returns the snapshots. Calls `on_first` when the first
/// one has begun to arrive. Fails unless the last event is the end, and the response is complete.
fn snapshots_until_end(address: &str, headers: &str, on_first: impl FnOnce()) -> Vec<Value> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    write!(stream, "GET /api/events HTTP/1.1\r\nhost: {address}\r\n{headers}\r\n").unwrap();
    let (mut stream, mut text) = (BufReader::new(stream), String::new());
    let closed = "the connection is closed, not reset";
    while !text.ends_with("event: snapshot\n") && stream.read_line(&mut text).expect(closed) > 0 {}
    on_first();
    stream.read_to_string(&mut text).expect(closed);
    assert!(text.contains("event: end\n") && text.ends_with("\r\n0\r\n\r\n"), "{text}");
    let snapshots = text.split("event: snapshot\ndata: ").skip(1);
    snapshots.map(|rest| serde_json::from_str(rest.lines().next().unwrap()).unwrap()).collect()
}

/// Reads the events of a page in a thread of their own, which returns the snapshots. Returns after the first one.
fn watch_until_end(address: &str, headers: &str) -> JoinHandle<Vec<Value>> {
    let (address, headers) = (address.to_owned(), headers.to_owned());
    let (first, has_begun) = mpsc::channel();
    let watching = thread::spawn(move || snapshots_until_end(&address, &headers, || first.send(()).unwrap()));
    has_begun.recv_timeout(TIMEOUT).expect("the page shows a snapshot");
    watching
}

/// Returns whether a process, given by its folder in `/proc`, serves the page of a run and works in a folder.
fn serves_page(process: &Path, folder: &Path) -> bool {
    let command = fs::read_to_string(process.join("cmdline")).unwrap_or_default();
    let is_here = fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd == folder);
    is_here && command.contains("--serve-standard-input")
}

/// Returns the id of the process that serves the page of the run in a workspace.
fn page_process(workspace: &Workspace) -> String {
    let folder = fs::canonicalize(workspace.path(".")).unwrap();
    let mut processes = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    let found = processes.find(|process| serves_page(process, &folder)).expect("the page has a process");
    found.file_name().unwrap().to_str().unwrap().to_owned()
}

/// Sends a signal to a process.
fn signal(process: &str, name: &str) {
    assert!(Command::new("sh").args(["-c", "kill -s \"$0\" \"$1\"", name, process]).status().unwrap().success());
}

/// Returns the address that a run has printed for its page.
fn page_address(text: &str) -> String {
    let line = text.lines().find_map(|line| line.strip_prefix("serving http://")).unwrap_or_else(|| panic!("{text}"));
    line.strip_suffix(" until the run ends").unwrap().to_owned()
}

/// A run of some seconds, so that a page has time to read it.
const LONG: Shape = Shape { steps: 3000, save_every: 1000, ..SMALL };

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn page_of_a_run_ends_with_it() {
    let workspace = Workspace::new(&LONG);
    let mut run = workspace.start(&["train", "run.toml", "--serve", "127.0.0.1:0"]);
    let output = run.stdout_path();
    let text = || fs::read_to_string(&output).unwrap();
    assert!(run.wait_until(|| text().contains("until the run ends")), "{}", run.stderr());
    let address = page_address(&text());
    let seen = snapshots_until_end(&address, "", || ());
    let ended = run.wait();
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{}", ended.stdout);
    assert!(seen.len() > 1 && seen[0]["run"]["state"] != "done", "{} snapshots", seen.len());
    // The last snapshot is that of the finished run.
    let (last, result) = (&seen[seen.len() - 1]["run"], workspace.json("run/result.json"));
    assert_eq!((&last["state"], &last["step"]), (&"done".into(), &result["steps"]));
    assert_eq!(last["loss"], result["loss"]["last"]);
    assert!(TcpStream::connect(&address).is_err(), "the server has ended");
}

/// Starts a run with a page, and returns it with the address once the page answers.
fn run_with_page(workspace: &Workspace) -> (Running, String) {
    let mut run = workspace.start(&["train", "run.toml", "--serve", "127.0.0.1:0"]);
    let output = run.stdout_path();
    let text = || fs::read_to_string(&output).unwrap();
    assert!(run.wait_until(|| text().contains("until the run ends")), "{}", run.stderr());
    let address = page_address(&text());
    assert_eq!(get(&address, "/healthz", ""), (200, "ok\n".to_owned()));
    (run, address)
}

#[test]
fn signals_to_all_processes_leave_the_page() {
    let workspace = Workspace::new(&LONG);
    let (run, address) = run_with_page(&workspace);
    let page = page_process(&workspace);
    let watching = watch_until_end(&address, "");
    ["TERM", "INT", "HUP"].iter().for_each(|name| signal(&page, name));
    run.signal("TERM");
    let seen = watching.join().unwrap();
    let ended = run.wait();
    assert!(ended.code == Some(4) && !ended.stderr.contains("the page"), "{}", ended.stderr);
    assert_eq!(seen[seen.len() - 1]["run"]["state"], "stopped");
    assert!(TcpStream::connect(&address).is_err(), "the server has ended");
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn early_end_of_the_page_is_noted() {
    let workspace = Workspace::new(&LONG);
    let (run, address) = run_with_page(&workspace);
    signal(&page_process(&workspace), "KILL");
    let ended = run.wait();
    let note =
        format!("note: the page at http://{address} has ended (signal: 9 (SIGKILL)); the run goes on without it\n");
    assert_eq!((ended.code, ended.stderr), (Some(0), note));
}

#[test]
fn view_refuses_a_page_with_a_token() {
    let workspace = Workspace::new(&SMALL);
    let refused = ["train", "run.toml", "--progress", "tui", "--serve", "0.0.0.0:0"];
    let refusal = workspace.expect_refusal(2, &refused);
    assert!(refusal.contains("would cover the token") && refusal.contains("--progress line"), "{refusal}");
    assert!(!workspace.path("run").exists());
}

#[test]
fn page_of_a_killed_run_ends_too() {
    let workspace = Workspace::new(&LONG);
    let run = ["train", "run.toml", "--json", "--serve", "0.0.0.0:0"];
    let mut run = workspace.start(&run);
    let output = run.stdout_path();
    assert!(run.wait_until(|| fs::read_to_string(&output).unwrap().contains("\"step\"")), "{}", run.stderr());
    // The output holds JSON alone.
    let first = fs::read_to_string(&output).unwrap();
    assert!(first.starts_with('{') && !first.contains("serving"), "{first}");
    let stderr = run.stderr();
    let token = stderr.lines().find_map(|line| line.strip_prefix("token: ")).unwrap_or_else(|| panic!("{stderr}"));
    let port = page_address(&stderr).rsplit_once(':').unwrap().1.to_owned();
    let address = format!("127.0.0.1:{port}");
    assert_eq!(get(&address, "/api/snapshot", "").0, 401);
    let watching = watch_until_end(&address, &format!("authorization: Bearer {token}\r\n"));
    run.kill();
    let seen = watching.join().unwrap();
    assert_eq!(seen[seen.len() - 1]["run"]["state"], "died");
    let refusal = workspace.expect_refusal(2, &["train", "run.toml", "--serve", "192.0.2.1:80", "--set", "run.dir=b"]);
    assert!(refusal.contains("cannot listen there") && !workspace.path("b").exists(), "{refusal}");
}

#[test]
fn server_for_other_machines_prints_its_token() {
    let workspace = Workspace::new(&SMALL);
    let (server, address) = serve(&workspace, &["--serve", "0.0.0.0:0"]);
    let stderr = server.stderr();
    let token = stderr.lines().find_map(|line| line.strip_prefix("token: ")).unwrap_or_else(|| panic!("{stderr}"));
    assert_eq!(get(&address, "/api/snapshot", "").0, 401);
    let (status, body) = get(&address, "/api/snapshot", &format!("authorization: Bearer {token}\r\n"));
    assert!(status == 200 && body.contains("\"name\":\"cpu\""), "{body}");
    let url = format!("http://{address}");
    let refusal = workspace.run(&["watch", &url]).refusal(2);
    assert!(refusal.contains("PLIMSOLL_TOKEN=TOKEN plimsoll watch"), "{refusal}");
    let variable = format!("PLIMSOLL_TOKEN={token}");
    let attached = workspace.start_wrapped(&["env", &variable], &["watch", &url, "--json"]).wait();
    assert_eq!(attached.json()["devices"][0]["name"], "cpu");
}

#[test]
fn wrong_addresses_are_refused_with_a_hint() {
    let workspace = Workspace::new(&SMALL);
    let (_server, address) = serve(&workspace, &["--serve", "127.0.0.1:0"]);
    let refusal = workspace.expect_refusal(2, &["watch", "--serve", &address]);
    assert!(refusal.contains("cannot listen there") && refusal.contains("--serve 127.0.0.1:0"), "{refusal}");
    let usage = workspace.run(&["watch", "--serve", "runs/sums"]);
    assert!(
        usage.code == Some(2) && usage.stderr.contains("a run folder or run file stands before --serve"),
        "{}",
        usage.stderr
    );
    let refusal = workspace.expect_refusal(2, &["watch", "https://127.0.0.1:1"]);
    assert!(refusal.contains("https is not supported") && refusal.contains("ssh -L"), "{refusal}");
}
