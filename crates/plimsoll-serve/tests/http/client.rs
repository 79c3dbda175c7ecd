//! A server of snapshots with fixed numbers, and a client that writes its requests itself.

use plimsoll_core::Failure;
use plimsoll_serve::server::{Server, Stop};
use plimsoll_watch::snapshot::Snapshot;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Time after which a client counts as hanging.
pub const WATCHDOG: Duration = Duration::from_secs(30);

/// A served source of snapshots. It ends when dropped.
pub struct Served {
    /// Address of the server, through the loopback interface.
    pub address: SocketAddr,
    /// Digits of the token; empty if the server has none.
    pub token: String,
    readings: Arc<AtomicUsize>,
    stop: Stop,
    thread: Option<JoinHandle<Result<(), Failure>>>,
}

impl Served {
    /// Serves on this machine only. The `at` of each snapshot is its number, counted from 1.
    pub fn local(interval: Duration) -> Served {
        Served::start("127.0.0.1:0", interval, |number| Ok(numbered(number)))
    }

    /// Serves at an address. `take` gets the number of the reading, counted from 1.
    pub fn start(
        address: &str,
        interval: Duration,
        mut take: impl FnMut(usize) -> Result<Snapshot, Failure> + Send + 'static,
    ) -> Served {
        let server = Server::bind(address.parse().unwrap()).unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], server.address().port()));
        let token = server.token().map_or(String::new(), |token| token.digits().to_owned());
        let readings = Arc::new(AtomicUsize::new(0));
        let (counter, stop) = (Arc::clone(&readings), server.stopper());
        let taking = move || take(counter.fetch_add(1, Ordering::Relaxed) + 1);
        let thread = Some(thread::spawn(move || server.run(interval, taking)));
        Served { address, token, readings, stop, thread }
    }

    /// Returns the number of snapshots that were taken so far.
    pub fn readings(&self) -> usize {
        self.readings.load(Ordering::Relaxed)
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        stream
    }

    /// Sends a GET request with further header lines, and returns the response.
    pub fn get(&self, path: &str, headers: &[&str]) -> Response {
        self.request(&format!("GET {path} HTTP/1.1\r\nhost: {}\r\n", self.address), headers, "")
    }

    /// Sends a request that begins with `head`, and returns the response.
    pub fn request(&self, head: &str, headers: &[&str], body: &str) -> Response {
        let further: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
        let mut stream = self.connect();
        write!(stream, "{head}{further}connection: close\r\n\r\n{body}").unwrap();
        let mut text = Vec::new();
        stream.read_to_end(&mut text).unwrap();
        Response::parse(&String::from_utf8(text).unwrap())
    }

    /// Opens the stream of events.
    pub fn events(&self) -> Events {
        Events(BufReader::new(self.open("/api/events")))
    }

    /// Sends a GET request, and returns the connection before the response.
    pub fn open(&self, path: &str) -> TcpStream {
        let mut stream = self.connect();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: {}\r\n\r\n", self.address).unwrap();
        stream
    }

    /// Ends the server.
    pub fn stop(&self) {
        self.stop.stop();
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join)
            && !thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

/// A response.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    head: String,
    pub body: String,
}

impl Response {
    fn parse(text: &str) -> Response {
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no response: {text:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Response { status, head: head.to_owned(), body: body.to_owned() }
    }

    /// Returns the value of a header, by its name in small letters.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
}

/// A stream of events.
pub struct Events(BufReader<TcpStream>);

impl Events {
    /// Waits for the next event, and returns its name and its data.
    pub fn next(&mut self) -> (String, Value) {
        let mut name = String::new();
        loop {
            let mut line = String::new();
            assert_ne!(self.0.read_line(&mut line).unwrap(), 0, "the stream has ended");
            if let Some(text) = line.strip_prefix("event: ") {
                name = text.trim_end().to_owned();
            }
            if let Some(data) = line.strip_prefix("data: ") {
                return (name, serde_json::from_str(data).unwrap());
            }
        }
    }
}

/// Returns the JSON of a snapshot in which every figure is known and no two are equal.
pub fn full() -> Value {
    let gpu = json!({
        "name": "cuda:0", "model": "Example 4000", "simulated": false, "in_run": true,
        "total_bytes": 8 << 20, "free_bytes": 2 << 20, "others_bytes": 1 << 18, "load_line_bytes": 7 << 20,
        "predicted_peak_bytes": 6 << 20, "measured_peak_bytes": 5 << 20, "held_bytes": 4 << 20,
        "by_category": {"weight": 1 << 20, "gradient": 3 << 19, "activation": 1 << 17},
        "measured_by_category": {"weight": 33 << 15, "gradient": 47 << 15, "workspace": 3 << 15},
        "by_program": {"forward": 5 << 18, "backward": 9 << 18},
        "timeline": [{
            "work": "backward", "part": "layer", "layer": 3, "op": "product", "tensor": "down", "bytes": 9 << 18,
            "by_category": {"weight": 1 << 20, "activation": 5 << 18},
        }],
        "memory_history": [{"step": 1, "held_bytes": 7 << 18}, {"step": 120, "held_bytes": 1 << 22}],
        "charges_bytes": 1 << 19, "utilization": 0.75, "temperature_c": 61.0, "power_w": 250.0, "power_limit_w": 350.0,
        "clock_mhz": 1500, "clock_limit_mhz": 1800, "throttled_by": ["power limit"],
        "pcie": {"generation": 4, "lanes": 16, "generation_now": 3, "lanes_now": 8},
        "processes": [{"pid": 4711, "name": "python", "held_bytes": 1 << 18, "is_plimsoll": false}],
    });
    let point = |step: u64| {
        json!({
            "step": step, "time": 1000.0 + step as f64, "loss": 4.0 / step as f64, "gradient_norm": 0.5,
            "learning_rate": 1e-3, "tokens_per_second": 5000.0,
        })
    };
    json!({
        "version": 1, "at": 1000.5, "devices": [gpu],
        "host": {"total_bytes": 16 << 20, "free_bytes": 12 << 20, "load_line_bytes": 3 << 20, "arena_bytes": 1 << 21},
        "cpu": {"load": 0.5, "band": null},
        "no_gpu": "NVIDIA driver not found",
        "run": {
            "folder": "runs/sums", "state": "running", "simulated": false, "step": 120, "steps": 600, "loss": 0.699,
            "gradient_norm": 0.45, "learning_rate": 2e-3, "step_seconds": 0.0275, "predicted_step_seconds": 0.027,
            "tokens_per_second": 55900.0, "peak_share": 0.25, "eta_seconds": 13.2, "silent_seconds": 0.125,
            "eval_loss": 0.8, "checkpoint_step": 100,
            "plan": {
                "parallelism": "data parallel", "effect": "equal up to the order of sums",
                "predicted_tokens_per_second": 56000.0,
                "workers": [{"device": "cuda:0", "sequences": 6, "layers": [0, 4], "recipe": "micro-batch 2"}],
                "excluded": ["cuda:1: it would slow the team"],
            },
            "history": [point(1), point(2), point(120)],
        },
        "recommendations": [{"text": "close process 4711", "command": "plimsoll train a.toml", "bytes": -5, "speedup": 1.25}], "warnings": ["cuda:0: clocks reduced: power limit"],
        "feed": [{"time": 1000.25, "text": "step 100 saved"}],
    })
}

/// Returns the snapshot of [`full`] with `at` replaced.
pub fn numbered(number: usize) -> Snapshot {
    let mut value = full();
    value["at"] = json!(number as f64);
    serde_json::from_value(value).unwrap()
}
