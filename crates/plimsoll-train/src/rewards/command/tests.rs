//! Tests of commands, with small shell and Python programs.

use super::super::Rewards;
use super::super::testing::{Sample, open, open_with_timeout, score, with_watchdog};
use plimsoll_core::Exit;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

const SHORT: Duration = Duration::from_millis(700);

/// Returns `count` completions whose records have their number under the key `index`.
fn numbered(count: usize) -> Vec<Sample> {
    (0..count).map(|index| Sample::new("text", json!({"index": index}))).collect()
}

fn indices(count: usize) -> Vec<Option<f64>> {
    (0..count).map(|index| Some(index as f64)).collect()
}

/// Writes a Python program, and returns the command that runs it.
fn python(folder: &Path, program: &str) -> String {
    let file = folder.join("reward.py");
    fs::write(&file, program).unwrap();
    format!("command:exec python3 '{}'", file.display())
}

/// Returns whether a process runs. A zombie does not.
fn is_running(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Waits until no process of these ids runs.
fn await_end(pids: &[String]) {
    while pids.iter().any(|pid| is_running(pid)) {
        thread::sleep(Duration::from_millis(10));
    }
}

fn read_lines(file: &Path) -> Vec<String> {
    fs::read_to_string(file).unwrap_or_default().lines().map(str::to_owned).collect()
}

#[test]
fn command_sees_completions_and_columns() {
    with_watchdog(|| {
        let folder = tempfile::tempdir().unwrap();
        let command = python(
            folder.path(),
            "import json, sys\n\
             for line in sys.stdin:\n\
             \x20   row = json.loads(line)\n\
             \x20   assert list(row) == ['prompt', 'completion', 'completion_ids', 'answer', 'level'], row\n\
             \x20   assert row['prompt'] == '2+2?' and row['completion_ids'] == [1, 2, 3]\n\
             \x20   if row['completion'] == '':\n\
             \x20       print('null')\n\
             \x20   elif row['completion'] == row['answer']:\n\
             \x20       print(json.dumps({'reward': row['level'] / 2, 'note': 'right'}))\n\
             \x20   else:\n\
             \x20       print(-1)\n",
        );
        let sample = |text, level: i32| Sample::new(text, json!({"answer": "größer\n\"4\"", "level": level}));
        let samples = [sample("größer\n\"4\"", 3), sample("", 1), sample("5", 1), sample("größer\n\"4\"", -8)];
        let mut rewards = open(&[&command]);
        for _ in 0..2 {
            assert_eq!(score(&mut rewards, &samples).unwrap(), [Some(1.5), None, Some(-1.0), Some(-4.0)]);
        }
        assert!(rewards.warnings().is_empty());
    });
}

#[test]
fn command_starts_at_first_completion_only() {
    with_watchdog(|| {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("starts");
        let command = format!("command:echo start >> '{}'; while read -r line; do echo 1; done", log.display());
        let mut rewards = open(&[&command]);
        assert_eq!(score(&mut rewards, &[]).unwrap(), []);
        assert!(!log.exists());
        for _ in 0..3 {
            assert_eq!(score(&mut rewards, &numbered(2)).unwrap(), [Some(1.0); 2]);
        }
        assert_eq!(read_lines(&log), ["start"]);
    });
}

#[test]
fn many_long_completions_do_not_deadlock() {
    with_watchdog(|| {
        let folder = tempfile::tempdir().unwrap();
        // Replies and stderr fill their pipes while requests fill theirs.
        let command = python(
            folder.path(),
            "import json, sys\n\
             for line in sys.stdin:\n\
             \x20   row = json.loads(line)\n\
             \x20   assert len(row['completion']) == 10000\n\
             \x20   print('note' * 500, file=sys.stderr)\n\
             \x20   print(json.dumps({'note': 'n' * 2000, 'reward': row['index']}))\n",
        );
        let text = "a\"\\b".repeat(2500);
        let samples: Vec<_> = (0..5000).map(|index| Sample::new(&text, json!({"index": index}))).collect();
        let mut rewards = open(&[&command]);
        assert_eq!(score(&mut rewards, &samples).unwrap(), indices(5000));
        assert!(rewards.warnings().is_empty());
    });
}

#[test]
fn slow_command_raises_no_alarm() {
    with_watchdog(|| {
        let command = "command:while read -r line; do sleep 0.4; echo 1; done";
        let mut rewards = open_with_timeout(&[command], Duration::from_secs(1));
        assert_eq!(score(&mut rewards, &numbered(4)).unwrap(), [Some(1.0); 4]);
        assert!(rewards.warnings().is_empty());
    });
}

#[test]
fn silent_command_is_killed_after_timeout() {
    with_watchdog(|| {
        let folder = tempfile::tempdir().unwrap();
        let pids = folder.path().join("pids");
        let command = format!(
            "command:echo $$ >> '{}'; echo loading >&2; read -r line; echo 1; sleep 1000; echo 2",
            pids.display()
        );
        let mut rewards = open_with_timeout(&[&command], SHORT);
        let failure = score(&mut rewards, &numbered(9)).unwrap_err();
        assert_eq!(failure.exit, Exit::Stopped);
        let parts = ["sleep 1000", "wrote no line for 0.7 s after ", "stderr ends with: loading"];
        assert!(parts.iter().all(|part| failure.message.contains(part)), "{failure}");
        assert!(failure.hints.iter().any(|hint| hint.contains("--resume")), "{failure}");
        let warnings = rewards.warnings();
        assert!(warnings.len() == 3 && warnings[0].contains("wrote no line"), "{warnings:?}");
        let pids = read_lines(&pids);
        assert!(pids.len() == 4 && !pids.iter().any(|pid| Path::new(&format!("/proc/{pid}")).exists()), "{pids:?}");
    });
}

#[test]
fn crash_neither_doubles_nor_loses_rewards() {
    with_watchdog(|| {
        let folder = tempfile::tempdir().unwrap();
        // Ends inside of the fourth reply of each process.
        let command = python(
            folder.path(),
            "import json, os, sys\n\
             for count, line in enumerate(sys.stdin):\n\
             \x20   index = json.loads(line)['index']\n\
             \x20   if count == 3:\n\
             \x20       sys.stdout.write('7')\n\
             \x20       sys.exit(f'out of memory at {index}')\n\
             \x20   print(index)\n",
        );
        let mut rewards = open(&[&command]);
        assert_eq!(score(&mut rewards, &numbered(12)).unwrap(), indices(12));
        let warnings = rewards.warnings();
        let expected = "restarted, because the command ended (exit status: 1) after 3 of 12 completions; its last line \
                        has no end: \"7\"; its stderr ends with: out of memory at 3";
        assert!(warnings.len() == 3 && warnings[0].ends_with(expected), "{warnings:#?}");
        assert!(rewards.warnings().is_empty());
        let failure = score(&mut open(&[&command]), &numbered(13)).unwrap_err();
        let parts = ["after 12 of 13 completions", "out of memory at 12"];
        assert!(parts.iter().all(|part| failure.message.contains(part)), "{failure}");
    });
}

#[test]
fn command_that_ended_between_calls_restarts() {
    with_watchdog(|| {
        let mut rewards = open(&["command:read -r line; echo 1"]);
        for call in 0..3 {
            assert_eq!(score(&mut rewards, &numbered(1)).unwrap(), [Some(1.0)]);
            assert_eq!(rewards.warnings().len(), usize::from(call > 0));
        }
    });
}

#[test]
fn restarts_are_counted_over_all_commands() {
    with_watchdog(|| {
        let [first, second] = ["command:read -r line; echo 1", "command:read -r line; echo 2"];
        assert_eq!(score(&mut open(&[first]), &numbered(3)).unwrap(), [Some(1.0); 3]);
        let mut rewards = open(&[first, second]);
        let failure = score(&mut rewards, &numbered(3)).unwrap_err();
        assert!(failure.message.contains("echo 2: the command ended (exit status: 0) after 2 of 3"), "{failure}");
        assert_eq!(rewards.warnings().len(), 3);
    });
}

#[test]
fn wrong_reply_is_named() {
    with_watchdog(|| {
        for line in ["nonsense", "NaN", "1e999", "-Infinity", "true", "", "{\"score\": 1}", "{\"reward\": \"1\"}"] {
            let command = format!("command:read -r line; echo 0.5; read -r line; echo '{line}'; cat >&2");
            let failure = score(&mut open(&[&command]), &numbered(6)).unwrap_err();
            let expected = format!("wrote the line {line:?} after 4 of 6 completions, expected a finite number");
            assert!(failure.message.contains(&expected), "{failure}");
        }
        let failure = score(&mut open(&["command:read -r line; yes | tr -d '\\n'"]), &numbered(1)).unwrap_err();
        assert!(failure.message.contains("a line of more than 1 MiB: \"yyy"), "{failure}");
    });
}

#[test]
fn banner_is_named_and_shifts_no_reward() {
    with_watchdog(|| {
        let banner = "command:echo Loading the model; while read -r line; do echo 1; done";
        let failure = score(&mut open(&[banner]), &numbered(3)).unwrap_err();
        assert!(failure.message.contains("\"Loading the model\""), "{failure}");
        // A banner that looks like a reward is found when the process has written more lines than it was asked for.
        for output in ["echo 7; while read -r line; do echo 1; done", "while read -r line; do echo 1; printf 7; done"] {
            let mut rewards = open(&[&format!("command:{output}")]);
            let failure = loop {
                match score(&mut rewards, &numbered(3)) {
                    Ok(_) => thread::sleep(Duration::from_millis(20)),
                    Err(failure) => break failure,
                }
            };
            let names = ["the line \"1\" without a request", "the line \"7\" without a request"];
            assert!(names.iter().any(|name| failure.message.contains(name)), "{failure}");
            assert_eq!(failure.exit, Exit::Stopped);
        }
    });
}

#[test]
fn closed_stdin_is_named() {
    with_watchdog(|| {
        let samples = [Sample::new(&"a".repeat(1 << 20), json!({}))];
        let failure = score(&mut open_with_timeout(&["command:exec 0<&-; sleep 1000"], SHORT), &samples).unwrap_err();
        assert!(failure.message.contains("closed its stdin after 0 of 1 completions"), "{failure}");
    });
}

#[test]
fn missing_program_is_named() {
    with_watchdog(|| {
        let failure = score(&mut open(&["command:./no-such-program"]), &numbered(1)).unwrap_err();
        let (_, report) = failure.message.split_once("ended (exit status: 127)").unwrap();
        assert!(report.contains("no-such-program"), "{failure}");
    });
}

#[test]
fn stop_ends_the_call() {
    with_watchdog(|| {
        let folder = tempfile::tempdir().unwrap();
        let pids = folder.path().join("pids");
        let command = format!("command:echo $$ > '{}'; read -r line; echo 1; sleep 1000", pids.display());
        let mut rewards = open_with_timeout(&[&command], Duration::from_secs(1000));
        let stop = Arc::new(AtomicBool::new(false));
        let (setter, file) = (stop.clone(), pids.clone());
        let setting = thread::spawn(move || {
            while read_lines(&file).is_empty() {
                thread::sleep(Duration::from_millis(10));
            }
            setter.store(true, Ordering::Relaxed);
        });
        let samples = numbered(2);
        let completions: Vec<_> = samples.iter().map(Sample::completion).collect();
        let failure = rewards.score(&completions, &[&stop]).unwrap_err();
        setting.join().unwrap();
        assert!(failure.exit == Exit::Stopped && failure.message.contains("was stopped"), "{failure}");
        await_end(&read_lines(&pids));
        assert!(rewards.warnings().is_empty());
    });
}

#[test]
fn drop_ends_the_whole_group() {
    with_watchdog(|| {
        let folder = tempfile::tempdir().unwrap();
        let pids = folder.path().join("pids");
        // Both processes ignore SIGTERM and the end of stdin.
        let command = format!(
            "command:trap '' TERM; sleep 1000 & echo $$ > '{0}'; echo $! >> '{0}'; \
             while read -r line; do echo 1; done; wait",
            pids.display()
        );
        let mut rewards = open(&[&command]);
        assert_eq!(score(&mut rewards, &numbered(2)).unwrap(), [Some(1.0); 2]);
        let pids = read_lines(&pids);
        assert!(pids.len() == 2 && pids.iter().all(|pid| is_running(pid)), "{pids:?}");
        drop(rewards);
        assert!(!Path::new(&format!("/proc/{}", pids[0])).exists(), "the process is a zombie");
        await_end(&pids);
    });
}

#[test]
fn drop_lets_a_process_finish() {
    with_watchdog(|| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("saved");
        let command = format!("command:while read -r line; do echo 1; done; echo saved > '{}'", file.display());
        let mut rewards = open(&[&command]);
        assert_eq!(score(&mut rewards, &numbered(1)).unwrap(), [Some(1.0)]);
        drop(rewards);
        assert_eq!(read_lines(&file), ["saved"]);
    });
}

/// Returns the blocks of `docs/rewards.md` in a language.
fn blocks(language: &str) -> Vec<String> {
    let page = include_str!("../../../../../docs/rewards.md");
    let fence = format!("```{language}\n");
    page.split(&fence).skip(1).map(|part| part.split("```").next().unwrap().to_owned()).collect()
}

#[test]
fn examples_of_the_page_run() {
    with_watchdog(|| {
        let folder = tempfile::tempdir().unwrap();
        let examples = blocks("python");
        let [functions, _, program] = &examples[..] else { panic!("three examples") };
        let request: Value = serde_json::from_str(&blocks("json")[0]).unwrap();
        let sample = |text| Sample::new(text, request.clone());
        let samples = [sample("Let me see.\nSo 7."), sample("7"), sample("It is 8.")];
        for entry in [python(folder.path(), program), function(folder.path(), functions, "last_number")] {
            assert_eq!(score(&mut open(&[&entry]), &samples).unwrap(), [Some(1.0), Some(1.0), Some(0.0)], "{entry}");
        }
    });
}

/// Writes functions in Python, and returns the entry of one of them.
fn function(folder: &Path, functions: &str, name: &str) -> String {
    let file = folder.join("functions.py");
    fs::write(&file, functions).unwrap();
    format!("python:{}:{name}", file.display())
}

const FUNCTIONS: &str = "
import asyncio, subprocess, sys
import other

def named(completions, answer, **columns):
    print('not a reward')
    assert set(columns) == {'prompts', 'completion_ids', 'level'}, columns
    return [None if expected is None else other.same(text, expected) for text, expected in zip(completions, answer)]

async def lengths(completion_ids):
    return [len(ids) for ids in completion_ids]

class Judge:
    @staticmethod
    def roles(prompts, completions):
        return [len(prompt) + (completion[0]['role'] == 'assistant') for prompt, completion in zip(prompts, completions)]

calls = 0
lock = asyncio.Lock()

async def guarded(completions, prompts):
    global calls
    calls += 1
    async with lock:
        await asyncio.sleep(0)
    return [float(calls > 0 and len(completions) == len(prompts) <= 16)] * len(completions)

def children(completions):
    child = subprocess.run([sys.executable, '-c', 'import sys; print(len(sys.stdin.read()))'], capture_output=True)
    return [float(child.stdout)] * len(completions)

def too_few(completions):
    return [0.0] * (len(completions) - 1)

def fails(completions):
    raise ValueError('no judge')
";

#[test]
fn functions_in_python_get_lists() {
    with_watchdog(|| {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("other.py"), "def same(a, b):\n    return a == b\n").unwrap();
        let open_function = |name: &str| open(&[&function(folder.path(), FUNCTIONS, name)]);
        let answers = [("4", json!("4")), ("5", json!("4")), ("6", Value::Null)];
        let samples = answers.map(|(text, answer)| Sample::new(text, json!({"answer": answer, "level": 1})));
        assert_eq!(score(&mut open_function("named"), &samples).unwrap(), [Some(1.0), Some(0.0), None]);
        let mut lengths = open_function("lengths");
        // The process serves all calls.
        for count in [3, 1, 200] {
            assert_eq!(score(&mut lengths, &numbered(count)).unwrap(), vec![Some(3.0); count]);
        }
        assert!(lengths.warnings().is_empty());
        let mut guarded = open_function("guarded");
        for count in [1, 40] {
            assert_eq!(score(&mut guarded, &numbered(count)).unwrap(), vec![Some(1.0); count]);
        }
        // Requests are not the input of child processes.
        let mut children = open_function("children");
        assert_eq!(score(&mut children, &numbered(20)).unwrap(), vec![Some(0.0); 20]);
        // A column does not replace the completions.
        let columns = json!({"completions": ["x"], "prompts": 1, "answer": "4", "level": 2});
        let renamed = [Sample::new("4", columns)];
        assert_eq!(score(&mut open_function("named"), &renamed).unwrap(), [Some(1.0)]);
        let prompt = json!([{"role": "user", "content": "2+2?"}]);
        let messages = [Sample { prompt, ..Sample::new("4", json!({})) }];
        assert_eq!(score(&mut open_function("Judge.roles"), &messages).unwrap(), [Some(2.0)]);
    });
}

#[test]
fn datasets_of_reasoning_gym_score_answers() {
    with_watchdog(|| {
        let folder = tempfile::tempdir().unwrap();
        let package = folder.path().join("reasoning_gym");
        fs::create_dir(&package).unwrap();
        let init = "def get_score_answer_fn(name):\n\
                    \x20   return lambda answer, entry: float(answer == entry['answer']) + len(name) / 100\n";
        fs::write(package.join("__init__.py"), init).unwrap();
        let utils = "import re\n\
                     def extract_answer(text):\n\
                     \x20   found = re.findall('<answer>(.*?)</answer>', text)\n\
                     \x20   return found[-1] if found else None\n";
        fs::write(package.join("utils.py"), utils).unwrap();
        let server = concat!(env!("CARGO_MANIFEST_DIR"), "/src/rewards/command/reward_server.py");
        let path = folder.path().display();
        let command = format!("command:PYTHONPATH='{path}' exec python3 '{server}' reasoning_gym abcd");
        let samples = ["<answer>7</answer>", " 7 ", "It is 7"].map(|text| Sample::new(text, json!({"answer": "7"})));
        assert_eq!(score(&mut open(&[&command]), &samples).unwrap(), [Some(1.04), Some(1.04), Some(0.04)]);
    });
}

#[test]
fn functions_that_fail_are_named_with_their_error() {
    with_watchdog(|| {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("other.py"), "").unwrap();
        for (name, problem) in [
            ("too_few", "the function returned 0 rewards for 1 completions"),
            ("fails", "ValueError: no judge"),
            ("absent", "has no attribute 'absent'"),
        ] {
            let mut rewards = open(&[&function(folder.path(), FUNCTIONS, name)]);
            let failure = score(&mut rewards, &numbered(1)).unwrap_err();
            assert!(failure.message.contains(problem) && failure.exit == Exit::Stopped, "{failure}");
            assert!(failure.hints.iter().any(|hint| hint.starts_with("correct the function")), "{failure}");
            assert_eq!(rewards.warnings().len(), 3);
        }
        let missing = "python:none/rewards.py:f".parse().unwrap();
        let failure = Rewards::open(&[missing], &[], Duration::MAX).map(|_| ()).unwrap_err();
        assert!(failure.exit == Exit::Input && failure.message.contains("cannot read none/rewards.py"), "{failure}");
    });
}
