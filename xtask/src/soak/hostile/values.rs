//! Hostile values: numbers, texts, amounts of memory, devices and paths that no user means.

use super::super::case::Rng;

/// Letters in a text that is too long for any name.
const LONG_TEXT: usize = 70_000;
/// Levels of a value that is nested too deeply for any parser.
const DEEP_LEVELS: usize = 100_000;
/// Elements of a list that is too long for any key.
const MANY_ELEMENTS: usize = 100_000;

/// JSON values, as text. Some are no JSON.
const JSON_VALUES: &[&str] = &[
    "0",
    "-0.0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "0.5",
    "255",
    "65536",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "4611686018427387904",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "-1e308",
    "1e-320",
    "1e400",
    "NaN",
    "Infinity",
    "true",
    "false",
    "null",
    "\"\"",
    "\" \"",
    "\"x\"",
    "\"0\"",
    "\"NaN\"",
    "[]",
    "{}",
    "[[]]",
    "[null]",
    "[0]",
    "[-1,2,2147483648]",
    "{\"a\":1}",
    "{\"\":{}}",
    "\"\\u0000\"",
    "\"\\u001b]0;x\\u0007\\n\\r\"",
    "\"\\u202e\\u200b\\u2028\"",
    "\"\\ud800\"",
    "\"victim\"",
    "\"/dev/zero\"",
    "\"{{ x }}\"",
];

/// TOML values, as text. Some are no TOML.
const TOML_VALUES: &[&str] = &[
    "0",
    "-1",
    "1",
    "3",
    "0.5",
    "-0.0",
    "1e308",
    "1e-320",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "2147483648",
    "4294967296",
    "4611686018427387904",
    "9223372036854775807",
    "9223372036854775808",
    "0x7fffffffffffffff",
    "1_000_000",
    "1979-05-27",
    "true",
    "false",
    "\"\"",
    "\" \"",
    "\"x\"",
    "\"auto\"",
    "\"90%\"",
    "[]",
    "[[]]",
    "[0, \"x\"]",
    "[0, 1]",
    "[-1, 2]",
    "{}",
    "{ a = 1 }",
    "'''\n'''",
    "\"\\u0000\"",
    "\"\\u001b]0;x\\u0007\"",
    "\"\\u202E\\u200B\"",
    "\"victim\"",
    "\"/dev/zero\"",
    "\"**\"",
    "\"[\"",
    "\"\\\\\"",
    "",
];

/// Numbers as arguments of the command line.
const NUMBERS: &[&str] = &[
    "",
    "0",
    "-0",
    "-1",
    "+1",
    "1",
    "2",
    "1.5",
    "1e3",
    "0x10",
    "1_000",
    "١",
    "2147483647",
    "2147483648",
    "4294967296",
    "4611686018427387904",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "1e400",
    "-1e308",
    "1e-320",
    "nan",
    "NaN",
    "inf",
    "-inf",
    "true",
];

/// Amounts of memory, in run files and on the command line.
const AMOUNTS: &[&str] = &[
    "0",
    "0B",
    "1B",
    "1KiB",
    "1MiB",
    "4MiB",
    "24MiB",
    "64MiB",
    "-1GiB",
    "0%",
    "-5%",
    "1%",
    "100%",
    "101%",
    "nan%",
    "inf%",
    "1e308%",
    "GiB",
    "%",
    "6 GiB",
    "6gib",
    "1e3MiB",
    "1e400GiB",
    "nanGiB",
    "infGiB",
    "9223372036854775807B",
    "18446744073709551615B",
    "18446744073709551616B",
    "99999999999TiB",
    "0.0000001MiB",
    "1,5GiB",
];

/// Lists of devices, in run files and on the command line.
const DEVICES: &[&str] = &[
    "",
    ",",
    "cpu,",
    "cpu,cpu",
    "cpu=",
    "cpu=0",
    "cpu=1B",
    "cpu=20MiB",
    "cpu=64MiB,host=0B",
    "cpu=64MiB,host=-1B",
    "cpu=64MiB,file=1GiB",
    "cpu=99999TiB",
    "cpu@",
    "cpu=64MiB@1.0",
    "cuda:0",
    "cuda:-1",
    "cuda:18446744073709551616",
    "cuda:",
    "cpu:0",
    "host=1GiB",
    "file=1GiB",
    "virtual:",
    "virtual:a",
    "virtual:a=64MiB",
    "virtual:a=64MiB@",
    "virtual:a=64MiB@0",
    "virtual:a=64MiB@-1",
    "virtual:a=64MiB@nan",
    "virtual:a=64MiB@1e308",
    "virtual:a=64MiB@1e-308",
    "virtual:a=0B@1.0",
    "virtual:a=64MiB@0.5:0B/s",
    "virtual:a=64MiB@0.5:1e308GB/s",
    "virtual:a=64MiB@0.5:16GB/s:1MB/s+1e308us",
    "virtual:a=64MiB@0.5:16GB/s:1MB/s+-1us",
    "virtual:a=64MiB@0.5,virtual:a=64MiB@0.5",
    "virtual:a=64MiB@0.5,virtual:b=64MiB@0.5",
    "virtual:a=64MiB@0.5,virtual:b=1MiB@0.0001",
    "virtual:a=64MiB@0.5,cpu=64MiB",
    "virtual:a/b=64MiB@0.5",
    "virtual:\u{1b}]0;x\u{7}=64MiB@0.5",
    "virtual:\u{202e}=64MiB@0.5",
    "a/cpu",
    "/cpu",
    "cpu/",
    "rtx3090",
    "rtx3090,host=64GiB",
    "rtx3090@1gbit,rtx3070",
    "rtx3090=1B,host=1B",
    "8xrtx5090",
    "99999xrtx5090",
    "18446744073709551616xrtx5090",
    "ray",
    "ray,cpu",
    "auto",
    "auto=1GiB",
    "gpu",
    "✓",
];

/// Words for any other text: names, rungs, faults to inject, patterns.
const WORDS: &[&str] = &[
    "",
    " ",
    "x",
    "-",
    "--",
    "=",
    ",",
    ",,",
    ".",
    "..",
    "*",
    "**",
    "[",
    "{a,b}",
    "bf16",
    "adam8bit",
    "lora,nf4",
    "16,8,4",
    "int8,int8",
    "lora,x",
    "text",
    "tokens",
    "full",
    "1",
    "0",
    "-1",
    "1:backward",
    "1:backward:0",
    "1:backward:99999999999999999999",
    "0:load",
    "18446744073709551616",
    "cpu/1",
    "cpu:1",
    "cpu:1:forward",
    "cpu:0:open",
    "cpu:1:forever",
    "cpu:1:open:forever",
    "cpu:1:0",
    "cpu:1:nan",
    "cpu:1:1e308",
    "cpu:1:-1",
    "cpu:1:1.5",
    "x:1",
    "random:0.5",
    "random:1",
    "random:nan",
    "random:-1",
    "random:2",
    "\u{1b}]0;x\u{7}",
    "\u{202e}\u{200b}",
    "a\nb\r",
    "'\"`$(x)",
    "%s%n",
    "é\u{301}😀",
];

/// Names of files and folders: those that an input has, special files, and names of nothing. None is an absolute path in
/// which the program could write, because CI may run as root.
pub const PATHS: &[&str] = &[
    "",
    ".",
    "..",
    "/proc",
    "nowhere",
    "nowhere/x",
    "run.toml/x",
    "run.toml",
    "plan.json",
    "llama",
    "llama/config.json",
    "llama/model.safetensors",
    "mistral",
    "adapter",
    "run",
    "run/checkpoints",
    "sweep",
    "data",
    "data/train.jsonl",
    "data/tokens.jsonl",
    "data/story.txt",
    "data/*",
    "data/**/*.jsonl",
    "**/*",
    "[",
    "data/[",
    "special/fifo",
    "special/socket",
    "special/loop",
    "special/zero",
    "special/dangling",
    "special/empty",
    "special/folder",
    "/proc/self/mem",
    "/proc/self/fd/0",
    "qwen2.5-7b",
    "llama-3.2-1b",
    "smollm2-135m",
    "7b",
    "\u{1b}]0;x\u{7}",
    "\u{202e}x",
];

/// Kinds of a value that a flag or key takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    /// A number.
    Number,
    /// An amount of memory or a share.
    Amount,
    /// A list of devices.
    Devices,
    /// An existing file or folder.
    Path,
    /// Any other text.
    Word,
    /// The name of a file or folder that the program writes.
    Output,
}

/// Returns a hostile argument of this kind.
pub fn argument(sort: Sort, rng: &mut Rng) -> String {
    if rng.chance(0.04) {
        return "n".repeat(LONG_TEXT);
    }
    // One in eight is of another kind.
    let sort = if rng.chance(0.125) && sort != Sort::Output {
        rng.pick(&[Sort::Number, Sort::Amount, Sort::Devices, Sort::Path, Sort::Word])
    } else {
        sort
    };
    let list = match sort {
        Sort::Number => NUMBERS,
        Sort::Amount => AMOUNTS,
        Sort::Devices => DEVICES,
        Sort::Path => PATHS,
        Sort::Word => WORDS,
        Sort::Output => {
            &["", ".", "out", "out/x", "llama", "special/dangling", "special/fifo", "run.toml/x", "\u{1b}x"]
        }
    };
    rng.pick(list).to_owned()
}

/// Returns a hostile JSON value, as text.
pub fn json(rng: &mut Rng) -> String {
    match rng.range(0, 39) {
        0 => format!("\"{}\"", "n".repeat(LONG_TEXT)),
        1 => format!("\"{}\"", "\\u001b\\n".repeat(1000)),
        2 => "[".repeat(DEEP_LEVELS) + &"]".repeat(DEEP_LEVELS),
        3 => "{\"a\":".repeat(120) + "1" + &"}".repeat(120),
        4 => format!("[{}0]", "0,".repeat(MANY_ELEMENTS)),
        5 => format!("[{}\"\"]", "\"x\",".repeat(1000)),
        _ => rng.pick(JSON_VALUES).to_owned(),
    }
}

/// Returns a hostile TOML value for this key, as text.
pub fn toml(key: &str, rng: &mut Rng) -> String {
    let list = match key {
        "budget" | "host" | "file" => AMOUNTS,
        "devices" => DEVICES,
        "path" | "train" | "eval" | "adapter" => PATHS,
        "rungs" | "allow" | "targets" | "recompute" | "preset" => WORDS,
        _ => &[],
    };
    if !list.is_empty() && rng.chance(0.6) {
        // A JSON text is a TOML text, too, for all characters of these lists.
        return serde_json::Value::from(rng.pick(list)).to_string();
    }
    match rng.range(0, 29) {
        0 => format!("\"{}\"", "n".repeat(LONG_TEXT)),
        1 => "[".repeat(DEEP_LEVELS) + &"]".repeat(DEEP_LEVELS),
        2 => format!("[{}0]", "0,".repeat(MANY_ELEMENTS)),
        3 => format!("\"{}\"", "\\n".repeat(1000)),
        _ => rng.pick(TOML_VALUES).to_owned(),
    }
}
