//! `cargo xtask watch-cost`: measures how much views slow a run, with real runs of the release build. Needs an idle
//! machine, so CI does not run it.
//!
//! One run trains on all cores. In turn, nothing reads it and a [`Reader`] does, for some seconds each.

use crate::program;
use anyhow::{Context, Result, ensure};
use clap::Parser;
use plimsoll_core::{Bytes, Event, Record};
use plimsoll_device::probe::Cpu;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Clients of the page.
const CLIENTS: usize = 200;
/// Events per second of the log of many events.
const EVENTS_PER_SECOND: u64 = 10_000;
/// Writes per second to the log of many events.
const WRITES_PER_SECOND: u64 = 100;
/// Time after which a program counts as hanging.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Time between the start of a reader and the first step that is counted.
const SETTLING_TIME: Duration = Duration::from_secs(2);
/// Clock ticks per second in `/proc/PID/stat`.
const TICKS_PER_SECOND: f64 = 100.0;

/// Measure how much the view and the page slow a run.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask watch-cost")]
struct Args {
    /// Times that each reader is started
    #[arg(long, default_value_t = 8)]
    rounds: u32,
    /// Seconds with a reader, and as many without it, in each round
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Program to measure; the release build by default
    #[arg(long)]
    binary: Option<PathBuf>,
}

/// A reader of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reader {
    /// The view on a terminal of 80 × 24.
    View,
    /// The view of another log, which gets [`EVENTS_PER_SECOND`].
    ViewOfManyEvents,
    /// The page with one client.
    Page,
    /// The page with [`CLIENTS`] clients.
    PageOfManyClients,
}

impl Reader {
    const ALL: [Reader; 4] = [Reader::View, Reader::ViewOfManyEvents, Reader::Page, Reader::PageOfManyClients];

    fn name(self) -> String {
        match self {
            Reader::View => "view".to_owned(),
            Reader::ViewOfManyEvents => format!("view of a log with {EVENTS_PER_SECOND} events/s"),
            Reader::Page => "page, 1 client".to_owned(),
            Reader::PageOfManyClients => format!("page, {CLIENTS} clients"),
        }
    }
}

/// The figures of one reader.
#[derive(Default)]
struct Figures {
    /// Seconds of each step without the reader.
    without: Vec<f64>,
    /// Seconds of each step with the reader.
    with: Vec<f64>,
    /// Processor time of the reader's process, in seconds, and the time over which it was measured.
    processor: f64,
    wall: f64,
}

/// Runs the chore with its command-line arguments.
///
/// # Errors
/// Fails if a program cannot be started or ends early.
pub fn run(arguments: &[String]) -> Result<()> {
    let args = Args::parse_from(std::iter::once("watch-cost".to_owned()).chain(arguments.iter().cloned()));
    let binary = args.binary.map_or_else(program::release, |binary| Ok(binary.canonicalize()?))?;
    let bench = Bench::start(&binary)?;
    let mut all: BTreeMap<Reader, Figures> = BTreeMap::new();
    for _ in 0..args.rounds {
        for reader in Reader::ALL {
            bench.measure(reader, Duration::from_secs(args.seconds), all.entry(reader).or_default())?;
        }
    }
    println!("| reader | steps without; with | step without | step with | slower | processor time of the reader |");
    println!("|---|--:|--:|--:|--:|--:|");
    for (reader, figures) in &mut all {
        let (without, with) = (median(&mut figures.without)?, median(&mut figures.with)?);
        println!(
            "| {} | {}; {} | {:.3} ms | {:.3} ms | {:+.2} % | {:.2} % of a core |",
            reader.name(),
            figures.without.len(),
            figures.with.len(),
            1e3 * without,
            1e3 * with,
            100.0 * (with / without - 1.0),
            100.0 * figures.processor / figures.wall,
        );
    }
    Ok(())
}

/// Returns the median of some values, which it sorts.
fn median(values: &mut [f64]) -> Result<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().context("no step was measured")
}

/// A run that trains on all cores, and a log beside it that gets many events.
struct Bench {
    binary: PathBuf,
    folder: PathBuf,
    train: ChildGuard,
}

impl Bench {
    /// Starts the run in a folder of its own.
    fn start(binary: &Path) -> Result<Bench> {
        let folder = std::env::temp_dir().join(format!("plimsoll-watch-cost-{}", std::process::id()));
        fs::create_dir_all(folder.join("many"))?;
        let threads = format!("run.threads={}", Cpu::read().threads);
        let settings =
            ["run.devices=cpu", &threads, "train.steps=10000000", "train.eval_every=0", "train.save_every=0"];
        let mut command = Command::new(binary);
        command.args(["train", "--quiet", "--set", "run.dir=run"]).current_dir(&folder);
        command.args(settings.iter().flat_map(|setting| ["--set", setting]));
        let train = ChildGuard(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?);
        let bench = Bench { binary: binary.to_owned(), folder, train };
        wait_until("the run trains", || bench.log().is_ok_and(|log| log.contains("\"event\":\"step\"")))?;
        Ok(bench)
    }

    /// Returns the event log of the run.
    fn log(&self) -> Result<String> {
        Ok(fs::read_to_string(self.folder.join("run/events.jsonl"))?)
    }

    /// Measures the steps of the run for `time` without a reader, and then for `time` with it. A log of many events is
    /// written in both cases.
    fn measure(&self, reader: Reader, time: Duration, figures: &mut Figures) -> Result<()> {
        let _writer = (reader == Reader::ViewOfManyEvents).then(|| EventWriter::start(&self.folder)).transpose()?;
        let began = self.log()?.len();
        thread::sleep(time);
        let without = self.log()?;
        figures.without.extend(step_seconds(&without[began..]));
        let running = self.start_reader(reader)?;
        thread::sleep(SETTLING_TIME);
        let (began, processor, at) = (self.log()?.len(), running.processor_seconds()?, Instant::now());
        thread::sleep(time);
        figures.processor += running.processor_seconds()? - processor;
        figures.wall += at.elapsed().as_secs_f64();
        figures.with.extend(step_seconds(&self.log()?[began..]));
        Ok(())
    }

    /// Starts a reader with all that belongs to it.
    fn start_reader(&self, reader: Reader) -> Result<RunningReader> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = vec![];
        let child = match reader {
            Reader::View => self.start_view("run")?,
            Reader::ViewOfManyEvents => self.start_view("many")?,
            Reader::Page => self.start_page(1, &stop, &mut threads)?,
            Reader::PageOfManyClients => self.start_page(CLIENTS, &stop, &mut threads)?,
        };
        Ok(RunningReader { child, stop, threads })
    }

    /// Starts the view of a run folder on a terminal of its own.
    fn start_view(&self, run: &str) -> Result<ChildGuard> {
        let view = format!("stty rows 24 cols 80; exec '{}' watch {run}", self.binary.display());
        let mut command = Command::new("script");
        command.args(["--quiet", "--command", &view, "/dev/null"]).current_dir(&self.folder);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().context("script cannot be started")?;
        Ok(ChildGuard(child))
    }

    /// Starts the page of the run, with `clients` that read its events on one thread.
    fn start_page(
        &self,
        clients: usize,
        stop: &Arc<AtomicBool>,
        threads: &mut Vec<JoinHandle<()>>,
    ) -> Result<ChildGuard> {
        let printed = self.folder.join("page");
        let mut command = Command::new(&self.binary);
        command.args(["watch", "run", "--serve", "127.0.0.1:0"]).current_dir(&self.folder);
        let child = ChildGuard(command.stdin(Stdio::null()).stdout(File::create(&printed)?).spawn()?);
        let address = || {
            let text = fs::read_to_string(&printed).ok()?;
            let (_, port) = text.split_once("127.0.0.1:")?;
            Some(format!("127.0.0.1:{}", port.split(|c: char| !c.is_ascii_digit()).next()?))
        };
        wait_until("the page is served", || address().is_some())?;
        let address = address().context("the page has an address")?;
        let streams = (0..clients).map(|_| open_events(&address)).collect::<Result<Vec<_>>>()?;
        let stop = Arc::clone(stop);
        threads.push(thread::spawn(move || read_all(streams, &stop)));
        Ok(child)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = self.train.0.kill();
        let _ = self.train.0.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// A reader while it runs. Dropping it ends all that belongs to it.
struct RunningReader {
    child: ChildGuard,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl RunningReader {
    /// Returns the processor time of the reader's processes, in seconds.
    fn processor_seconds(&self) -> Result<f64> {
        let mut seconds = 0.0;
        let mut left = vec![self.child.0.id()];
        while let Some(id) = left.pop() {
            let stat = fs::read_to_string(format!("/proc/{id}/stat"))?;
            let (_, fields) = stat.rsplit_once(')').context("a process has a name")?;
            let ticks = fields.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<f64>().ok());
            seconds += ticks.sum::<f64>() / TICKS_PER_SECOND;
            let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
            left.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
        Ok(seconds)
    }
}

impl Drop for RunningReader {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// A thread that writes a log of many events. Dropping it ends the thread.
struct EventWriter {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl EventWriter {
    /// Starts a new log in the folder of a [`Bench`].
    fn start(folder: &Path) -> Result<EventWriter> {
        let (log, stop) = (folder.join("many/events.jsonl"), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new().spawn(move || write_many_events(&log, &stopped))?;
        Ok(EventWriter { stop, thread: Some(thread) })
    }
}

impl Drop for EventWriter {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

/// A process that ends when this value is dropped.
struct ChildGuard(Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the seconds of each step in a part of an event log.
fn step_seconds(log: &str) -> impl Iterator<Item = f64> {
    let records = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    records.filter(|record| record["event"] == "step").filter_map(|record| record["seconds"].as_f64())
}

/// Waits until `holds` returns true.
///
/// # Errors
/// It does not within [`START_TIMEOUT`].
fn wait_until(described: &str, holds: impl Fn() -> bool) -> Result<()> {
    let began = Instant::now();
    while !holds() {
        ensure!(began.elapsed() < START_TIMEOUT, "{described}: not within {START_TIMEOUT:?}");
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Writes [`EVENTS_PER_SECOND`] steps to a log until `stop` is true.
fn write_many_events(log: &Path, stop: &AtomicBool) {
    let mut file = OpenOptions::new().create(true).write(true).truncate(true).open(log).expect("the folder exists");
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    let start = json!({
        "version": 1, "time": now(), "event": "start", "step": 1, "steps": 100_000_000, "parameters": 333_984,
        "arena_bytes": 23_632_064, "predicted_step_seconds": 1e-4, "devices": ["cpu"],
    });
    writeln!(file, "{start}").expect("the log can be written");
    let (began, mut step) = (Instant::now(), 0u64);
    while !stop.load(Ordering::Relaxed) {
        let due = (began.elapsed().as_secs_f64() * EVENTS_PER_SECOND as f64) as u64;
        let lines: String = (step..due).map(|number| step_line(number + 1, now())).collect();
        step = due;
        file.write_all(lines.as_bytes()).expect("the log can be written");
        thread::sleep(Duration::from_secs(1) / WRITES_PER_SECOND as u32);
    }
}

/// Formats the event of a step.
fn step_line(step: u64, time: f64) -> String {
    let event = Event::Step {
        step,
        loss: 2.975_312_330_387_533,
        norm: 4.798_371_072_294_086,
        learning_rate: 0.00015,
        tokens: 1536,
        labelled_tokens: 640,
        seconds: 0.0001,
        bytes: Bytes(43_737_088),
        memory: None,
    };
    serde_json::to_string(&Record { version: 1, time, event }).expect("plain data has a JSON form") + "\n"
}

/// Opens the events of a page.
fn open_events(address: &str) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(address).context("the page takes no connection")?;
    write!(stream, "GET /api/events HTTP/1.1\r\nhost: {address}\r\n\r\n")?;
    stream.set_nonblocking(true)?;
    Ok(stream)
}

/// Reads all streams until `stop` is true.
///
/// # Panics
/// If the server ends a stream.
fn read_all(mut streams: Vec<TcpStream>, stop: &AtomicBool) {
    let mut buffer = vec![0; 1 << 16];
    while !stop.load(Ordering::Relaxed) {
        for stream in &mut streams {
            while let Some(length) = read_now(stream, &mut buffer) {
                assert!(length > 0, "the server ended a stream of events");
            }
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Reads the bytes of a stream that have arrived; `None` if there are none.
fn read_now(stream: &mut TcpStream, buffer: &mut [u8]) -> Option<usize> {
    match stream.read(buffer) {
        Ok(length) => Some(length),
        Err(error) if error.kind() == ErrorKind::WouldBlock => None,
        Err(_) => Some(0),
    }
}
