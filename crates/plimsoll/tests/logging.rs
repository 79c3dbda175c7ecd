//! The logs of runs for other programs: TensorBoard's event files and the webhook. Tests of the Python package read the
//! files with TensorBoard itself.

use crate::common::{SMALL, Workspace};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

const TENSORBOARD: [&str; 2] = ["--set", "watch.tensorboard=true"];

/// The steps whose loss an event file holds, with the loss. Reads the fields of the format from scratch.
fn losses(file: &Path) -> Vec<(u64, f32)> {
    let bytes = fs::read(file).unwrap();
    let (mut rest, mut losses) = (&bytes[..], Vec::new());
    while rest.len() >= 12 {
        let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        let Some(event) = rest.get(12..12 + length) else { break };
        let step = field(event, 2).map_or(0, |step| step.0);
        if let Some((_, summary)) = field(event, 5)
            && let Some((_, first)) = field(summary, 1)
            && field(first, 1).is_some_and(|(_, tag)| tag == b"train/loss")
        {
            let (_, value) = field(first, 2).unwrap();
            losses.push((step, f32::from_le_bytes(value.try_into().unwrap())));
        }
        rest = rest.get(16 + length..).unwrap_or_default();
    }
    losses
}

/// Returns the first field of this number in a message: its whole number, and its bytes.
fn field(mut message: &[u8], number: u64) -> Option<(u64, &[u8])> {
    while !message.is_empty() {
        let key = varint(&mut message);
        let (value, length) = match key & 7 {
            0 => (varint(&mut message), 0),
            1 => (0, 8),
            5 => (0, 4),
            _ => (0, varint(&mut message) as usize),
        };
        let (bytes, rest) = message.split_at(length);
        if key >> 3 == number {
            return Some((value, bytes));
        }
        message = rest;
    }
    None
}

fn varint(message: &mut &[u8]) -> u64 {
    let length = message.iter().position(|byte| byte & 0x80 == 0).unwrap() + 1;
    let (bytes, rest) = message.split_at(length);
    *message = rest;
    bytes.iter().rev().fold(0, |number, byte| number << 7 | u64::from(byte & 0x7f))
}

/// Returns the losses of the steps in the event log of a run.
fn logged_losses(events: &[Value]) -> Vec<(u64, f32)> {
    let steps = events.iter().filter(|event| event["event"] == "step");
    steps.map(|event| (event["step"].as_u64().unwrap(), event["loss"].as_f64().unwrap() as f32)).collect()
}

#[test]
fn event_file_has_the_losses_of_the_log() {
    let workspace = Workspace::new(&SMALL);
    workspace.succeed(&[&["train", "run.toml"], &TENSORBOARD[..]].concat());
    let names = workspace.file_names("run/tensorboard");
    assert!(names.len() == 1 && names[0].starts_with("events.out.tfevents."), "{names:?}");
    let losses = losses(&workspace.path("run/tensorboard").join(&names[0]));
    assert_eq!(losses, logged_losses(&workspace.events("run")));
    assert_eq!(losses.len(), 24);
}

#[test]
fn runs_write_no_event_files_unasked() {
    let workspace = Workspace::new(&SMALL);
    workspace.succeed(&["train", "run.toml"]);
    assert!(!workspace.path("run/tensorboard").exists());
}

#[test]
fn killed_and_resumed_run_writes_two_files() {
    let workspace = Workspace::new(&SMALL);
    let length = ["--set", "train.steps=1000", "--set", "train.save_every=50", "--set", "train.eval_every=0"];
    let mut run = workspace.start(&[&["train", "run.toml"], &length[..], &TENSORBOARD].concat());
    assert!(run.wait_until(|| logged_losses(&workspace.events("run")).len() > 120));
    run.kill();
    assert!(logged_losses(&workspace.events("run")).len() < 1000, "the run ended before it was killed");
    workspace.succeed(&[&["train", "--resume", "run"], &TENSORBOARD[..]].concat());
    let names = workspace.file_names("run/tensorboard");
    assert_eq!(names.len(), 2, "{names:?}");
    let [before, after] = [0, 1].map(|index| losses(&workspace.path("run/tensorboard").join(&names[index])));
    let first = after[0].0;
    assert!(first > 1 && first <= before.last().unwrap().0 + 1, "{first}");
    assert_eq!((before[0].0, after.last().unwrap().0), (1, 1000));
    // Repeated steps have the same losses, because resuming is exact.
    for (step, loss) in before.iter().filter(|(step, _)| *step >= first) {
        assert_eq!(after[(*step - first) as usize], (*step, *loss));
    }
}

#[test]
fn unwritable_event_files_stop_no_run() {
    let workspace = Workspace::new(&SMALL);
    fs::create_dir(workspace.path("run")).unwrap();
    workspace.write("run/tensorboard", "a file, and no folder");
    let done = workspace.succeed(&[&["train", "run.toml", "--json"], &TENSORBOARD[..]].concat());
    let told = done.stdout.lines().filter(|line| line.contains("without TensorBoard's event files")).count();
    assert_eq!(told, 1, "{}", done.stdout);
    assert_eq!(workspace.json("run/result.json")["steps"], 24);
}

/// Starts a server that answers every request with this status. Returns its address and the bodies, with the first line of
/// each request.
fn webhook(status: &'static str) -> (String, Receiver<(String, Value)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (sender, requests) = channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            if let Some(request) = read_request(&stream) {
                let _ = sender.send(request);
            }
            let _ = write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        }
    });
    (address, requests)
}

fn read_request(stream: &TcpStream) -> Option<(String, Value)> {
    let mut reader = BufReader::new(stream);
    let (mut first, mut length) = (String::new(), 0);
    reader.read_line(&mut first).ok().filter(|bytes| *bytes > 0)?;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        if header.trim().is_empty() {
            break;
        }
        let header = header.to_lowercase();
        length = header.strip_prefix("content-length:").map_or(length, |value| value.trim().parse().unwrap());
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((first.trim().to_owned(), serde_json::from_slice(&body).unwrap()))
}

fn events_of(requests: &Receiver<(String, Value)>) -> Vec<Value> {
    requests.try_iter().map(|(_, body)| body).collect()
}

#[test]
fn webhook_receives_start_recovery_and_end() {
    let workspace = Workspace::new(&SMALL);
    let (address, requests) = webhook("204 No Content");
    let url = format!("watch.webhook=http://{address}/hook?key=secret");
    workspace.succeed(&["train", "run.toml", "--set", &url, "--inject-oom", "5:backward"]);
    let posted: Vec<(String, Value)> = requests.try_iter().collect();
    assert!(posted.iter().all(|(line, _)| line == "POST /hook?key=secret HTTP/1.1"), "{posted:?}");
    let kinds: Vec<&str> = posted.iter().map(|(_, body)| body["event"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["start", "recovery", "end"]);
    let (_, end) = &posted[2];
    let result = workspace.json("run/result.json");
    assert_eq!((&end["run"], &end["status"], &end["step"]), (&"run".into(), &"done".into(), &24.into()), "{end}");
    assert_eq!((&end["loss"], &end["eval_loss"]), (&result["loss"]["last"], &result["eval"]["loss"]), "{end}");
    let all: String = posted.iter().map(|(_, body)| body.to_string()).collect();
    assert!(!all.contains(workspace.path("").to_str().unwrap()), "{all}");
}

#[test]
fn webhook_is_told_of_a_failure() {
    let workspace = Workspace::new(&SMALL);
    let (address, requests) = webhook("200 OK");
    let url = format!("watch.webhook=http://{address}");
    let rate = ["--set", "train.learning_rate=1e30", "--set", "train.warmup_steps=0"];
    let done = workspace.run(&[&["train", "run.toml", "--set", &url], &rate[..]].concat());
    assert_eq!(done.code, Some(4), "{}", done.stderr);
    let events = events_of(&requests);
    let last = events.last().unwrap();
    assert_eq!((&last["event"], &last["exit_code"]), (&"failure".into(), &4.into()), "{last}");
}

#[test]
fn failing_webhook_stops_no_run() {
    let workspace = Workspace::new(&SMALL);
    let (address, requests) = webhook("500 Internal Server Error");
    let url = format!("watch.webhook=http://{address}/secret");
    let done = workspace.succeed(&["train", "run.toml", "--quiet", "--set", &url]);
    assert_eq!(events_of(&requests).len(), 4, "start and end, twice each");
    let told: Vec<&str> = done.stderr.lines().filter(|line| line.contains("webhook")).collect();
    assert!(told.len() == 1 && told[0].starts_with("warning: ") && !told[0].contains("secret"), "{told:?}");
}

#[test]
#[ignore = "slow: .ci/slow-tests"]
fn silent_webhook_delays_no_step() {
    let workspace = Workspace::new(&SMALL);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("watch.webhook=http://{}/", listener.local_addr().unwrap());
    let began = Instant::now();
    workspace.succeed(&["train", "run.toml", "--set", &url]);
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    let times: Vec<f64> = workspace.events("run").iter().map(|event| event["time"].as_f64().unwrap()).collect();
    let trained = times.last().unwrap() - times[0];
    assert!(trained < 3.0, "{trained} s, which is one time limit of the webhook");
}

#[test]
fn https_webhook_is_refused_before_the_run() {
    let workspace = Workspace::new(&SMALL);
    let refused = workspace.expect_refusal(2, &["train", "run.toml", "--set", "watch.webhook=https://a.example/b"]);
    assert!(refused.contains("https is not supported") && refused.contains("a relay on this machine"), "{refused}");
    assert!(!workspace.path("run").exists());
}
