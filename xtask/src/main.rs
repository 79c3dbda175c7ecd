//! The project's own chores: `cargo xtask CHORE`. One file per chore; here is only which is called.

#![forbid(unsafe_code)]

mod arrows;
mod cuda;
mod gpu;
mod kill;
mod predict;
mod program;
mod soak;
mod stand_in;
mod sweep;
mod wheel;
mod worth;

const USAGE: &str = "usage: cargo xtask CHORE

  arrows      check which crates may depend on which, and where unsafe code may stand
  cuda-check  compile the CUDA kernels for every architecture, compare calls with NVIDIA's headers, and run the kernels'
              arithmetic on the CPU
  gpu-check   pack the check for a machine with a GPU, or rehearse it without one; gpu-check --help says how
  kill        kill runs at random moments and compare what they end with; kill --help says how
  predict     predict and measure step times of recipes drawn at random; predict --help says how
  soak        show on random models that plans are exact; soak --help says how
  stand-in    run the real programs on a stand-in for a GPU (runs on the CPU), and compare with the CPU
  sweep       30 runs of mixed size on two unequal devices, packed by bytes; sweep --help says how
  wheel       build the file that pip installs: the Python package with the command line
  worth       measure teams of unequal simulated devices against what each does alone; worth --help says how";

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("arrows") => arrows::run(),
        Some("cuda-check") => cuda::run(),
        Some("gpu-check") => gpu::run(&arguments[1..]),
        Some("kill") => kill::run(&arguments[1..]),
        Some("predict") => predict::run(&arguments[1..]),
        Some("soak") => soak::run(&arguments[1..]),
        Some("sweep") => sweep::run(&arguments[1..]),
        Some("stand-in") => cuda::on_stand_in(),
        Some("wheel") => wheel::run(&arguments[1..]),
        Some("worth") => worth::run(&arguments[1..]),
        _ => anyhow::bail!("{USAGE}"),
    }
}
