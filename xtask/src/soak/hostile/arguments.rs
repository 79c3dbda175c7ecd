//! Absurd arguments for every command, and odd surroundings: limits, closed or full outputs, environment variables.

use super::super::case::Rng;
use super::values::{self, Sort};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;

/// A command with valid arguments, and its flags with the kind of their values. A flag without a value has `None`.
struct Command {
    words: &'static str,
    flags: &'static [(&'static str, Option<Sort>)],
}

const SHARED: &[(&str, Option<Sort>)] = &[
    ("--devices", Some(Sort::Devices)),
    ("--budget", Some(Sort::Amount)),
    ("--allow", Some(Sort::Word)),
    ("--ignore-config-key", Some(Sort::Word)),
    ("--set", None),
    ("--set", None),
    ("--set", None),
];

const COMMANDS: &[Command] = &[
    Command {
        words: "train run.toml",
        flags: &[
            ("--plan", Some(Sort::Path)),
            ("--resume", Some(Sort::Path)),
            ("--no-save", None),
            ("--stop-on-eof", None),
            ("--json", None),
            ("--quiet", None),
            ("--inject-oom", Some(Sort::Word)),
            ("--inject-loss", Some(Sort::Word)),
            ("--inject-slow", Some(Sort::Word)),
            ("--inject-silence", Some(Sort::Word)),
        ],
    },
    Command {
        words: "plan run.toml",
        flags: &[
            ("--model", Some(Sort::Path)),
            ("--sequence", Some(Sort::Number)),
            ("--batch-tokens", Some(Sort::Number)),
            ("--json", None),
            ("--explain", None),
        ],
    },
    Command {
        words: "plan --model smollm2-135m",
        flags: &[("--sequence", Some(Sort::Number)), ("--batch-tokens", Some(Sort::Number)), ("--explain", None)],
    },
    Command {
        words: "eval llama --data data/eval.jsonl --threads 1 --budget 64MiB",
        flags: &[
            ("--data", Some(Sort::Path)),
            ("--format", Some(Sort::Word)),
            ("--sequence", Some(Sort::Number)),
            ("--adapter", Some(Sort::Path)),
            ("--threads", Some(Sort::Number)),
            ("--json", None),
        ],
    },
    Command {
        words: "generate llama --prompt sea --max-tokens 3 --threads 1 --budget 64MiB",
        flags: &[
            ("--prompt", Some(Sort::Word)),
            ("--max-tokens", Some(Sort::Number)),
            ("--adapter", Some(Sort::Path)),
            ("--temperature", Some(Sort::Number)),
            ("--top-k", Some(Sort::Number)),
            ("--top-p", Some(Sort::Number)),
            ("--seed", Some(Sort::Number)),
            ("--threads", Some(Sort::Number)),
            ("--json", None),
        ],
    },
    Command {
        words: "export llama --adapter adapter --merged merged --type f32",
        flags: &[("--ignore-config-key", Some(Sort::Word))],
    },
    Command {
        words: "sweep run.toml --dir swept --quiet --devices cpu=128MiB",
        flags: &[
            ("--dir", Some(Sort::Output)),
            ("--resume", Some(Sort::Path)),
            ("--retries", Some(Sort::Number)),
            ("--workers", Some(Sort::Number)),
            ("--json", Some(Sort::Output)),
            ("--inject-oom", Some(Sort::Word)),
        ],
    },
    Command { words: "budget run 64MiB", flags: &[("--device", Some(Sort::Devices)), ("--json", None)] },
    Command {
        words: "bench models llama --samples 2 --sequence 16 --budget 64MiB",
        flags: &[("--samples", Some(Sort::Number)), ("--sequence", Some(Sort::Number)), ("--json", Some(Sort::Output))],
    },
    Command {
        words: "bench step --vocab 64 --layers 1 --hidden 16 --heads 2 --kv-heads 1 --ffn 16 --sequence 8 --batch 1 --steps 1 --warmup 0 --threads 1",
        flags: &[
            ("--vocab", Some(Sort::Number)),
            ("--layers", Some(Sort::Number)),
            ("--hidden", Some(Sort::Number)),
            ("--heads", Some(Sort::Number)),
            ("--kv-heads", Some(Sort::Number)),
            ("--ffn", Some(Sort::Number)),
            ("--sequence", Some(Sort::Number)),
            ("--batch", Some(Sort::Number)),
            ("--accumulate", Some(Sort::Number)),
            ("--steps", Some(Sort::Number)),
            ("--warmup", Some(Sort::Number)),
            ("--threads", Some(Sort::Number)),
            ("--rank", Some(Sort::Number)),
            ("--memory", Some(Sort::Amount)),
            ("--device", Some(Sort::Devices)),
            ("--dtype", Some(Sort::Word)),
            ("--method", Some(Sort::Word)),
            ("--base", Some(Sort::Word)),
            ("--checkpoint", None),
        ],
    },
    Command { words: "devices", flags: &[("--json", None), ("--forget", None)] },
    Command { words: "bench devices --duration 0s", flags: &[("--duration", Some(Sort::Number))] },
    Command { words: "join", flags: &[("--head", None), ("--json", None)] },
    Command { words: "cluster", flags: &[("--json", None)] },
    Command { words: "verify", flags: &[("--json", None)] },
    Command { words: "leave", flags: &[("--json", None)] },
];

/// How often each of [`COMMANDS`] is drawn, relative to the others.
const WEIGHTS: &[u64] = &[30, 12, 8, 14, 14, 5, 5, 4, 4, 16, 2, 1, 1, 1, 1, 1];

/// Returns a command with absurd arguments. `keys` are `section.key` of a run file.
pub fn absurd_command(keys: &[String], rng: &mut Rng) -> Vec<OsString> {
    let command = &COMMANDS[weighted(WEIGHTS, rng)];
    let mut words: Vec<OsString> = command.words.split(' ').map(OsString::from).collect();
    let takes_settings = ["train", "plan", "sweep"].iter().any(|name| command.words.starts_with(name));
    for _ in 0..rng.range(1, 3) {
        let shared = takes_settings && rng.chance(0.6);
        let (flag, sort) = rng.pick(if shared { SHARED } else { command.flags });
        match sort {
            Some(sort) => set(&mut words, flag, values::argument(sort, rng).into()),
            None if flag == "--set" => words.extend([flag.to_owned(), setting(keys, rng)].map(OsString::from)),
            None => words.push(flag.into()),
        }
    }
    if rng.chance(0.12) {
        disturb(&mut words, rng);
    }
    words
}

/// Returns the index of one of these weights, drawn in proportion to them.
pub fn weighted(weights: &[u64], rng: &mut Rng) -> usize {
    let mut left = rng.range(0, weights.iter().sum::<u64>() - 1);
    weights
        .iter()
        .position(|weight| {
            let hit = left < *weight;
            left = left.saturating_sub(*weight);
            hit
        })
        .unwrap_or_default()
}

/// Sets the value of a flag: in place of the one that it has, or at the end.
fn set(words: &mut Vec<OsString>, flag: &str, value: OsString) {
    match words.iter().position(|word| word == flag) {
        Some(at) if at + 1 < words.len() => words[at + 1] = value,
        _ => words.extend([OsString::from(flag), value]),
    }
}

/// Returns an absurd value of `--set`, as long as the system permits for an argument.
fn setting(keys: &[String], rng: &mut Rng) -> String {
    const MOST: usize = 120_000;
    let key = rng.pick(keys);
    let name = key.rsplit('.').next().unwrap_or_default();
    let mut setting = match rng.range(0, 9) {
        0 => values::argument(Sort::Word, rng),
        1 => format!("{key}={}", values::argument(rng.pick(&[Sort::Number, Sort::Amount, Sort::Word]), rng)),
        2 => format!("{key}{}", values::argument(Sort::Word, rng)),
        _ => format!("{key}={}", values::toml(name, rng)),
    };
    // Long texts are ASCII.
    if setting.len() > MOST {
        setting.truncate(MOST);
    }
    setting
}

/// Removes, repeats, reorders or garbles words of a command.
fn disturb(words: &mut Vec<OsString>, rng: &mut Rng) {
    let at = rng.range(0, words.len() as u64 - 1) as usize;
    match rng.range(0, 5) {
        0 => drop(words.remove(at)),
        1 => {
            let again = words[at].clone();
            words.push(again);
        }
        2 => words.swap(0, at),
        3 => words[at].push(OsStr::new("x")),
        4 => words[at] = OsString::from_vec(vec![b'-', b'-', 0xff, 0xfe, 0x1b]),
        _ => words.insert(at, values::argument(rng.pick(&[Sort::Word, Sort::Path, Sort::Number]), rng).into()),
    }
}

/// Surroundings of a process: a shell script that starts the program (`"$@"`), and environment variables.
pub struct Surroundings {
    /// Script of `sh`.
    pub script: &'static str,
    /// Variables with their values; `None` unsets one.
    pub variables: Vec<(&'static str, Option<&'static str>)>,
    /// Whether text on stderr can be read.
    pub is_readable: bool,
    /// Whether results on stdout are lost.
    pub loses_results: bool,
}

/// Scripts that limit the program or take its outputs, and whether its stderr stays.
const SCRIPTS: &[(&str, bool)] = &[
    ("exec \"$@\" >/dev/full", true),
    ("exec \"$@\" 2>/dev/full", false),
    ("exec \"$@\" >/dev/full 2>&1", false),
    ("exec \"$@\" >&-", true),
    ("exec \"$@\" 2>&-", false),
    ("exec \"$@\" <&- >&- 2>&-", false),
    ("ulimit -n 4; exec \"$@\"", true),
    ("ulimit -n 5; exec \"$@\"", true),
    ("ulimit -n 8; exec \"$@\"", true),
    ("ulimit -n 12; exec \"$@\"", true),
    ("ulimit -n 20; exec \"$@\"", true),
    ("ulimit -f 0; exec \"$@\"", false),
    ("ulimit -f 8; exec \"$@\"", true),
    ("ulimit -f 64; exec \"$@\"", true),
    ("ulimit -s 128; exec \"$@\"", true),
    ("ulimit -s 512; exec \"$@\"", true),
    ("ulimit -s unlimited; exec \"$@\"", true),
    ("cd special/folder; rmdir ../folder; exec \"$@\"", true),
    ("cd special; exec \"$@\"", true),
    ("umask 777; exec \"$@\"", true),
];

const VARIABLES: &[(&str, &[Option<&str>])] = &[
    (
        "PLIMSOLL_CACHE",
        &[
            None,
            Some(""),
            Some("run.toml"),
            Some("special/dangling"),
            Some("special/loop"),
            Some("special/fifo"),
            Some("/proc/none"),
            Some("/dev/null"),
            Some("nowhere/deep/er"),
            Some("llama"),
        ],
    ),
    (
        "PLIMSOLL_TOKENS",
        &[Some(""), Some("run.toml"), Some("special/loop"), Some("/proc/none"), Some("special/folder")],
    ),
    ("HOME", &[None, Some(""), Some("/proc/none"), Some("run.toml")]),
    ("XDG_CACHE_HOME", &[Some(""), Some("run.toml"), Some("/proc/none"), Some("relative")]),
    ("TMPDIR", &[None, Some(""), Some("/proc/none"), Some("run.toml"), Some("special/loop")]),
    ("COLUMNS", &[Some("0"), Some("-1"), Some("99999999999")]),
    ("TERM", &[Some(""), Some("dumb"), Some("\u{1b}[2J")]),
    ("LANG", &[Some("x"), Some("C")]),
    ("RUST_BACKTRACE", &[Some("1"), Some("full"), Some("x")]),
    ("RAYON_NUM_THREADS", &[Some("0"), Some("-1"), Some("100000")]),
    ("TOKENIZERS_PARALLELISM", &[Some("x"), Some("true")]),
    ("PATH", &[None, Some("")]),
];

/// Returns odd surroundings.
pub fn odd_surroundings(rng: &mut Rng) -> Surroundings {
    let mut odd =
        Surroundings { script: "exec \"$@\"", variables: Vec::new(), is_readable: true, loses_results: false };
    if rng.chance(0.6) {
        (odd.script, odd.is_readable) = rng.pick(SCRIPTS);
        odd.loses_results = odd.script.contains("\" >/dev/full");
    }
    if odd.script.len() < 12 || rng.chance(0.3) {
        for _ in 0..rng.range(1, 3) {
            let (name, values) = rng.pick(VARIABLES);
            odd.variables.push((name, rng.pick(values)));
        }
    }
    odd
}
