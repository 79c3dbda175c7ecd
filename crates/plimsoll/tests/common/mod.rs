//! Shared helpers of the command-line tests: a workspace folder with a small model, data and a run file, and processes of
//! the program under a watchdog.

mod terminal;
mod turn;

use plimsoll_device::probe::Cpu;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub use terminal::{ShellOnTerminal, converse, run_on_terminal};
pub use turn::Turn;

/// Time after which a command counts as hanging. On an idle machine, the longest takes a sixth of this.
const WATCHDOG: Duration = Duration::from_secs(300);

/// Size of the model of a workspace, and length of its run.
pub struct Shape {
    pub hidden: u32,
    pub sequence: u32,
    pub steps: u32,
    pub batch_sequences: u32,
    pub save_every: u32,
    /// Value of `run.threads` in the run file.
    pub threads: &'static str,
}

/// A model of 20 thousand parameters with steps of about a millisecond.
pub const SMALL: Shape =
    Shape { hidden: 32, sequence: 32, steps: 24, batch_sequences: 8, save_every: 4, threads: "\"auto\"" };

pub const VOCAB: u32 = 32;

/// A folder with `model/` (a configuration and a tokenizer), `train.jsonl`, `eval.jsonl` (tokens),
/// `train.txt.jsonl` (text) and `run.toml`, in which the binary is run.
pub struct Workspace {
    dir: TempDir,
    started: std::cell::Cell<u32>,
    _turn: Turn,
}

impl Workspace {
    pub fn new(shape: &Shape) -> Workspace {
        let _turn = Turn::shared();
        let workspace = Workspace { dir: tempfile::tempdir().unwrap(), started: Default::default(), _turn };
        workspace.write_device_rates();
        fs::create_dir(workspace.path("model")).unwrap();
        workspace.write("model/config.json", config(shape.hidden).to_string());
        workspace.write("model/tokenizer.json", tokenizer(VOCAB).to_string());
        workspace.write("model/tokenizer_config.json", json!({"eos_token": "<end>"}).to_string());
        for (name, samples, seed) in [("train", 200, 1), ("eval", 24, 2)] {
            let mut rng = Rng(seed);
            let mut tokens = String::new();
            let mut texts = String::new();
            for _ in 0..samples {
                let ids: Vec<u64> = (0..3 + rng.below(28)).map(|_| 2 + rng.below(26)).collect();
                let text: String = ids.iter().map(|&id| (b'a' + id as u8 - 2) as char).collect();
                tokens += &format!("{}\n", json!({ "input_ids": ids }));
                texts += &format!("{}\n", json!({ "text": text }));
            }
            workspace.write(&format!("{name}.jsonl"), tokens);
            workspace.write(&format!("{name}-text.jsonl"), texts);
        }
        let Shape { sequence, steps, batch_sequences, save_every, threads, .. } = shape;
        let batch_tokens = batch_sequences * sequence;
        workspace.write(
            "run.toml",
            format!(
                "[model]\npath = \"model\"\ninit = \"random\"\n\
                 [data]\ntrain = \"train.jsonl\"\neval = \"eval.jsonl\"\nformat = \"tokens\"\n\
                 sequence = {sequence}\npack = false\n\
                 [train]\nsteps = {steps}\nbatch_tokens = {batch_tokens}\nlearning_rate = 1e-2\n\
                 save_every = {save_every}\neval_every = 10\n\
                 [run]\ndir = \"run\"\nthreads = {threads}\n"
            ),
        );
        workspace
    }

    /// Stores fixed device rates, so that no test has to measure them and plans are equal on all machines.
    pub fn write_device_rates(&self) {
        let cpu = Cpu::read();
        let entry = |threads: u32| {
            json!({
                "plimsoll": env!("CARGO_PKG_VERSION"), "device": "cpu", "model": cpu.model, "features": cpu.features,
                "threads": threads,
                "rates": {
                    "f32_flops": 5e10, "bf16_flops": 5e10, "memory_bytes_per_second": 2e10, "op_seconds": 2e-6,
                    "host_link": {"bytes_per_second": 1e10, "latency_seconds": 2e-6}, "measured": true,
                },
            })
        };
        let known: Vec<Value> = (1..=cpu.threads).map(entry).collect();
        fs::create_dir_all(self.path("cache")).unwrap();
        self.write("cache/devices.json", Value::from(known).to_string());
        let disk = fs::metadata(self.dir.path()).unwrap().dev();
        let rates = json!([{"disk": disk, "read_bytes_per_second": 1e9, "write_bytes_per_second": 5e8}]);
        self.write("cache/disks.json", rates.to_string());
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).unwrap();
    }

    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Gives tokens of the model's tokenizer other texts. Those in angle brackets become special tokens. Characters without
    /// a token are no special tokens then.
    pub fn add_tokens(&self, tokens: &[(u32, &str)]) {
        let mut tokenizer = self.json("model/tokenizer.json");
        let added = tokenizer["added_tokens"].as_array_mut().unwrap();
        added.truncate(1);
        for (id, word) in tokens.iter().filter(|(_, word)| word.starts_with('<')) {
            let mut special = added[0].clone();
            (special["id"], special["content"]) = ((*id).into(), (*word).into());
            added.push(special);
        }
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        for (id, word) in tokens {
            vocab.remove(&id.to_string());
            vocab.insert((*word).to_owned(), (*id).into());
        }
        self.write("model/tokenizer.json", tokenizer.to_string());
    }

    pub fn json(&self, name: &str) -> Value {
        serde_json::from_str(&self.read(name)).unwrap()
    }

    /// Starts the program with these arguments in this folder.
    pub fn start(&self, args: &[&str]) -> Running {
        self.start_wrapped(&[], args)
    }

    /// Starts the program behind a command that takes a command, such as `env` or `sh -c 'exec "$@"' sh`.
    pub fn start_wrapped(&self, before: &[&str], args: &[&str]) -> Running {
        let binary = env!("CARGO_BIN_EXE_plimsoll");
        let words: Vec<&str> = before.iter().copied().chain([binary]).chain(args.iter().copied()).collect();
        self.started.set(self.started.get() + 1);
        let output = |name: &str| self.path(&format!("{}.{name}", self.started.get()));
        let [stdout, stderr] = ["stdout", "stderr"].map(output);
        let child = Command::new(words[0])
            .args(&words[1..])
            .current_dir(self.dir.path())
            .env("PLIMSOLL_CACHE", self.path("cache"))
            .env("PLIMSOLL_SYSFS", self.path("sys"))
            // This machine may have joined a cluster.
            .env("PLIMSOLL_RAY_STATE", self.path("ray"))
            .env_remove("RAY_ADDRESS")
            .env("NO_COLOR", "1")
            .env_remove("RUST_BACKTRACE")
            .stdin(Stdio::null())
            .stdout(File::create(&stdout).unwrap())
            .stderr(File::create(&stderr).unwrap())
            .spawn()
            .unwrap();
        Running { child, stdout, stderr, line: args.join(" ") }
    }

    /// Runs the program to its end.
    pub fn run(&self, args: &[&str]) -> CommandOutput {
        self.start(args).wait()
    }

    /// Runs the program, which has to succeed.
    pub fn succeed(&self, args: &[&str]) -> CommandOutput {
        let done = self.run(args);
        assert_eq!(done.code, Some(0), "{args:?}: {}", done.stderr);
        done
    }

    /// Runs the program, which has to fail with this exit code, one message on stderr and nothing on stdout. Returns the
    /// message with its hints.
    pub fn expect_refusal(&self, code: i32, args: &[&str]) -> String {
        let done = self.run(args);
        assert_eq!(done.stdout, "", "{args:?}");
        done.refusal(code)
    }

    /// Returns the events of a run in order. An incomplete last line is skipped.
    pub fn events(&self, run: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(run).join("events.jsonl")).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Reads all files below a folder, by relative path.
    pub fn read_files(&self, folder: &str) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut files = BTreeMap::new();
        let mut folders = vec![self.path(folder)];
        while let Some(next) = folders.pop() {
            for entry in fs::read_dir(&next).unwrap_or_else(|error| panic!("{}: {error}", next.display())) {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    let name = path.strip_prefix(self.path(folder)).unwrap().to_owned();
                    files.insert(name, fs::read(&path).unwrap());
                }
            }
        }
        files
    }

    /// Returns the sorted names in a folder; none if it does not exist.
    pub fn file_names(&self, folder: &str) -> Vec<String> {
        let found = fs::read_dir(self.path(folder)).into_iter().flatten();
        let mut names: Vec<String> = found.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// A started command, killed when dropped.
pub struct Running {
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
    line: String,
}

impl Running {
    /// Waits until the command ends by itself.
    pub fn wait(mut self) -> CommandOutput {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                let text = |path: &Path| String::from_utf8(fs::read(path).unwrap()).unwrap();
                return CommandOutput { code: status.code(), stdout: text(&self.stdout), stderr: text(&self.stderr) };
            }
            assert!(began.elapsed() < WATCHDOG, "`{}` hangs", self.line);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until a condition holds. Returns false if the command ends before.
    pub fn wait_until(&mut self, holds: impl Fn() -> bool) -> bool {
        let began = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            if holds() {
                return true;
            }
            assert!(began.elapsed() < WATCHDOG, "`{}` hangs", self.line);
            std::thread::sleep(Duration::from_micros(200));
        }
        false
    }

    /// Returns the file that holds what the process has printed to stdout so far.
    pub fn stdout_path(&self) -> PathBuf {
        self.stdout.clone()
    }

    /// Returns what the process has printed to stderr so far.
    pub fn stderr(&self) -> String {
        fs::read_to_string(&self.stderr).unwrap()
    }

    /// Kills the process with SIGKILL and waits for its end.
    pub fn kill(mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    /// Returns a number of `/proc/PID/status` in KiB.
    pub fn proc_status_kib(&self, field: &str) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).expect("the field");
        line.split_whitespace().next().unwrap().parse().unwrap()
    }

    /// Sets a soft resource limit of the running process, by its name for `prlimit`, in bytes or `unlimited`.
    pub fn set_limit(&self, name: &str, most: impl std::fmt::Display) {
        let words = [format!("--pid={}", self.child.id()), format!("--{name}={most}:")];
        assert!(Command::new("prlimit").args(words).status().unwrap().success());
    }

    /// Sends a signal by its name.
    pub fn signal(&self, name: &str) {
        let sent =
            Command::new("sh").args(["-c", "kill -s \"$0\" \"$1\"", name, &self.child.id().to_string()]).status();
        assert!(sent.unwrap().success(), "kill -s {name}");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Output and exit code of a command.
#[derive(Debug)]
pub struct CommandOutput {
    /// Exit code; `None` if a signal ended the process.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl CommandOutput {
    /// Checks that the command failed with one message and hints, and returns them.
    pub fn refusal(self, code: i32) -> String {
        let message = self.stderr;
        assert_eq!(self.code, Some(code), "{message}{}", self.stdout);
        let word = if code == 4 { "stopped: " } else { "error: " };
        let mut lines = message.lines();
        assert!(lines.next().is_some_and(|line| line.starts_with(word)), "{message}");
        assert!(lines.all(|line| line.starts_with("  hint: ")), "one message, then hints: {message}");
        assert!(!message.contains("panic") && !message.contains("bug"), "{message}");
        message
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {}", self.stdout))
    }
}

/// Random numbers: splitmix64 of Steele, Lea and Flood.
pub struct Rng(pub u64);

impl Rng {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}

/// Returns `config.json` of a small llama with grouped-query attention and tied embeddings.
pub fn config(hidden: u32) -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": hidden,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": hidden / 2,
        "intermediate_size": 2 * hidden, "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "attention_bias": false, "mlp_bias": false, "tie_word_embeddings": true,
        "initializer_range": 0.08, "bos_token_id": null, "eos_token_id": 0, "torch_dtype": "float32",
    })
}

/// Returns a tokenizer with a token for each letter, padded with further tokens up to the vocabulary size.
pub fn tokenizer(vocab: u32) -> Value {
    let special = |id: u32, content: &str| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    };
    let word = |id: u32| match id {
        0 => "<end>".to_owned(),
        1 => "<unknown>".to_owned(),
        2..28 => char::from(b'a' + id as u8 - 2).to_string(),
        _ => format!("{id}"),
    };
    let words: serde_json::Map<String, Value> = (0..vocab).map(|id| (word(id), id.into())).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<end>"), special(1, "<unknown>")],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unknown>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": words, "merges": [],
        },
    })
}
