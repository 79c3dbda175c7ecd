//! The program and this machine in few words, for the log of a run.

use crate::probe::{Cpu, Memory, read_text};
use plimsoll_core::RunEnvironment;
use std::sync::OnceLock;

/// Git commit from which the program was built.
static COMMIT: OnceLock<String> = OnceLock::new();

/// Names the Git commit from which the program was built, for [`environment`]. Later calls change nothing.
pub fn name_commit(commit: &str) {
    let _ = COMMIT.set(commit.to_owned());
}

/// Returns the version of the program and the facts of this machine that a run logs at its start. Asks no GPU driver.
pub fn environment() -> RunEnvironment {
    let cpu = Cpu::read();
    let release = read_text("/proc/sys/kernel/osrelease").unwrap_or_default();
    RunEnvironment {
        plimsoll_version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: COMMIT.get().cloned(),
        system: format!("{} {}", std::env::consts::OS, release.trim()).trim_end().to_owned(),
        processor: cpu.model,
        cores: cpu.cores,
        memory_bytes: Memory::read().total,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_names_program_and_processor() {
        let found = environment();
        assert_eq!(found.plimsoll_version, env!("CARGO_PKG_VERSION"));
        assert!(found.system.starts_with(std::env::consts::OS) && !found.system.ends_with(char::is_whitespace));
        assert_eq!((found.processor, found.cores), (Cpu::read().model, Cpu::read().cores));
    }
}
