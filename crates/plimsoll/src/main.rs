//! The `plimsoll` command line: parse, resolve, call, print. What things mean is in the libraries.

#![forbid(unsafe_code)]

mod again;
mod args;
mod commands;
mod flags;
mod say;
mod signals;

use args::{BenchCommand, Cli, Command};
use clap::Parser;
use plimsoll_core::{Exit, Failure};
use plimsoll_device::process;
use plimsoll_train::resolve::disturbed;
use std::process::ExitCode;

fn main() -> ExitCode {
    process::keep_nothing_freed();
    say::own_our_bugs();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(usage) => {
            // Help and version are answers, not mistakes; clap knows which is which.
            let _ = usage.print();
            return ExitCode::from(usage.exit_code() as u8);
        }
    };
    let (json, words) = (cli.command.json(), cli.command.words());
    // A plan says it by itself, a sweep before its runs start; other commands predict nothing.
    let predicts = matches!(cli.command, Command::Bench { .. });
    let ended = run(cli.command);
    if let Some(disturbed) = disturbed().filter(|_| predicts && ended.is_ok()) {
        say::note(&disturbed);
    }
    let exit = ended.unwrap_or_else(|failure| {
        say::failure(&flags::in_flags_of(words, failure.clone()), json);
        failure.exit
    });
    ExitCode::from(exit as u8)
}

fn run(command: Command) -> Result<Exit, Failure> {
    match command {
        Command::Train(args) => commands::train::run(&args),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Sweep(args) => commands::sweep::run(&args),
        Command::Budget(args) => commands::budget::run(&args),
        Command::Devices(args) => commands::devices::show(&args),
        Command::Bench { what: BenchCommand::Devices(args) } => commands::devices::measure(&args),
        Command::Bench { what: BenchCommand::Models(args) } => commands::models::run(&args),
        Command::Bench { what: BenchCommand::Step(args) } => commands::devices::time_step(&args),
        Command::Eval(args) => commands::model::eval(&args),
        Command::Generate(args) => commands::model::generate(&args),
        Command::Merge(args) => commands::model::merge(&args),
        Command::Join(args) => commands::ray::run("join", &args),
        Command::Cluster(args) => commands::ray::run("cluster", &args),
        Command::Verify(args) => commands::ray::run("verify", &args),
        Command::Leave(args) => commands::ray::run("leave", &args),
    }
}
