//! The `plimsoll` command line: parse, resolve, call, print. What things mean is in the libraries.

mod args;
mod say;
mod signals;

use args::{Cli, Command};
use clap::Parser;
use plimsoll_core::{Exit, Failure};
use std::process::ExitCode;

fn main() -> ExitCode {
    say::own_our_bugs();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(usage) => {
            // Help and version are answers, not mistakes; clap knows which is which.
            let _ = usage.print();
            return ExitCode::from(usage.exit_code() as u8);
        }
    };
    let json = cli.command.json();
    let exit = run(cli.command).unwrap_or_else(|failure| {
        say::failure(&failure, json);
        failure.exit
    });
    ExitCode::from(exit as u8)
}

fn run(command: Command) -> Result<Exit, Failure> {
    match command {
        Command::Train(args) => {
            args.resolve()?;
        }
        Command::Plan(args) => {
            args.resolve()?;
        }
        Command::Eval(args) => {
            args.resolve()?;
        }
        Command::Generate(args) => {
            args.resolve()?;
        }
        Command::Devices(_) | Command::Bench { .. } => {}
    }
    Err(Failure::input("this command is not built yet"))
}
