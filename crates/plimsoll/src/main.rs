//! The `plimsoll` command line: parses arguments, calls the libraries and prints results. Training, planning and
//! devices are in the other crates.

#![forbid(unsafe_code)]

mod args;
mod command_line;
mod commands;
mod flags;
mod output;
mod signals;

use args::{BenchCommand, Cli, Command, Example};
use clap::Parser;
use plimsoll_core::{Bytes, Exit, Failure};
use plimsoll_device::machine::name_commit;
use plimsoll_device::process;
use plimsoll_train::resolve::contention_note;
use std::process::ExitCode;
use std::thread;

/// The least stack of the first thread. Planning needs less than half of it.
const MIN_STACK: Bytes = Bytes(512 << 10);
/// The least number of open files. A run on one device needs a few less.
const MIN_OPEN_FILES: u64 = 16;

fn main() -> ExitCode {
    process::set_heap_trim_threshold();
    output::install_panic_hook();
    signals::fail_writes_at_file_limit();
    if let Err(failure) = check_limits() {
        output::print_failure(&failure, prints_json());
        return ExitCode::from(failure.exit as u8);
    }
    if let Some(commit) = option_env!("PLIMSOLL_COMMIT") {
        name_commit(commit);
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(usage) => {
            // Clap also reports --help and --version this way, with exit code 0 and on stdout.
            let exit = usage.exit_code();
            output::print_usage(usage);
            return ExitCode::from(exit as u8);
        }
    };
    let (json, path) = (cli.command.prints_json(), cli.command.path());
    // `plan` and `train` show this note in the plan and `sweep` before its runs start. Other commands predict nothing.
    let is_bench = matches!(cli.command, Command::Bench { .. });
    let outcome =
        run(cli.command).and_then(|exit| output::unwritten().filter(|_| exit == Exit::Done).map_or(Ok(exit), Err));
    if let Some(note) = contention_note().filter(|_| is_bench && outcome.is_ok()) {
        output::print_note(&note);
    }
    let exit = outcome.unwrap_or_else(|failure| {
        output::print_failure(&flags::with_flags_for_keys(path, failure.clone()), json);
        failure.exit
    });
    ExitCode::from(exit as u8)
}

/// Checks that the limits of this process suffice to plan and train a run: the stack of the first thread, and open
/// files.
fn check_limits() -> Result<(), Failure> {
    if let Some(limit) = process::stack_limit().filter(|limit| *limit < MIN_STACK) {
        return Err(Failure::input(format!("the limit of the stack is {limit}, and {MIN_STACK} are needed"))
            .hint("raise it: ulimit -s 8192"));
    }
    if let Some(limit) = process::open_files_limit().filter(|limit| *limit < MIN_OPEN_FILES) {
        let message = format!("the limit of open files is {limit}, and {MIN_OPEN_FILES} are needed");
        return Err(Failure::input(message).hint("raise it: ulimit -n 1024"));
    }
    Ok(())
}

/// Whether the command line asks for JSON. Parses it in a thread with a stack of its own.
fn prints_json() -> bool {
    let parse = || Cli::try_parse().is_ok_and(|cli| cli.command.prints_json());
    thread::Builder::new().stack_size(1 << 20).spawn(parse).is_ok_and(|parsing| parsing.join().unwrap_or(false))
}

fn run(command: Command) -> Result<Exit, Failure> {
    match command {
        Command::Train(args) => match args.example {
            Some(example @ (Example::Grpo | Example::Dpo)) => commands::example::run(&args, example),
            Some(Example::Sums) | None => commands::train::run(&args),
        },
        Command::Plan(args) => commands::plan::run(&args),
        Command::Data(args) => commands::data::run(&args),
        Command::Sweep(args) => commands::sweep::run(&args),
        Command::Budget(args) => commands::budget::run(&args),
        Command::Init(args) => commands::init::run(&args),
        Command::Models(args) => commands::model_list::run(&args),
        Command::Devices(args) => commands::devices::show(&args),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Watch(args) => commands::watch::run(&args),
        Command::Report(args) => commands::report::run(&args),
        Command::Runs(args) => commands::runs::run(&args),
        Command::Bench { benchmark: BenchCommand::Devices(args) } => commands::devices::measure(&args),
        Command::Bench { benchmark: BenchCommand::Models(args) } => commands::models::run(&args),
        Command::Bench { benchmark: BenchCommand::Step(args) } => commands::devices::time_step(&args),
        Command::Eval(args) => commands::model::eval(&args),
        Command::Generate(args) => commands::generate::generate(&args),
        Command::Export(args) => commands::export::run(&args),
        Command::Join(args) => commands::ray::run("join", &args),
        Command::Cluster(args) => commands::ray::run("cluster", &args),
        Command::Verify(args) => commands::ray::run("verify", &args),
        Command::Leave(args) => commands::ray::run("leave", &args),
        Command::MeasureRates(args) => commands::rates::run(&args),
    }
}
