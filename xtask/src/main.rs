//! Chores of the project: `cargo xtask CHORE`. One file per chore.

#![forbid(unsafe_code)]

mod arrows;
mod cuda;
mod gpu;
mod kill;
mod memory;
mod predict;
mod program;
mod render_chat;
mod scaling_efficiency;
mod schema;
mod soak;
mod stand_in;
mod style;
mod sweep;
mod watch_cost;
mod wheel;

const USAGE: &str = "usage: cargo xtask CHORE

  arrows      check the dependencies between crates, and that only one crate has unsafe code
  cuda-check  compile the CUDA kernels for every architecture, compare our calls with NVIDIA's headers, and run the
              kernels on the CPU
  gpu-check   pack a check for a machine with a GPU, or rehearse it without one (see gpu-check --help)
  kill        kill runs at random moments and compare their final files (see kill --help)
  memory      print the memory of a GPU from before its context to after its end, as JSON: memory cuda:0
  predict     compare predicted and measured step times of random recipes (see predict --help)
  render-chat render conversations from JSON lines with chat templates, for parity/templates.py
  schema      write the JSON schemas of docs/schema and the Python types of python/plimsoll/results.py
  soak        test on random models that plans are exact (see soak --help)
  stand-in    run the program on a stand-in for a GPU (runs on the CPU) and compare it with the CPU
  style       measure how readable the project is, and fail where a limit is passed; --list prints all places
  sweep       sweep 30 runs of mixed size over two unequal devices (see sweep --help)
  watch-cost  measure how much the view and the page slow a run (see watch-cost --help)
  wheel       build the Python wheel, with the command line
  scaling-efficiency
              measure teams of unequal simulated devices against their devices alone (see scaling-efficiency --help)";

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("arrows") => arrows::run(),
        Some("cuda-check") => cuda::run(),
        Some("gpu-check") => gpu::run(&arguments[1..]),
        Some("kill") => kill::run(&arguments[1..]),
        Some("memory") => memory::run(&arguments[1..]),
        Some("predict") => predict::run(&arguments[1..]),
        Some("render-chat") => render_chat::run(),
        Some("schema") => schema::run(&arguments[1..]),
        Some("soak") => soak::run(&arguments[1..]),
        Some("style") => style::run(&arguments[1..]),
        Some("sweep") => sweep::run(&arguments[1..]),
        Some("stand-in") => cuda::on_stand_in(),
        Some("watch-cost") => watch_cost::run(&arguments[1..]),
        Some("wheel") => wheel::run(&arguments[1..]),
        Some("scaling-efficiency") => scaling_efficiency::run(&arguments[1..]),
        _ => anyhow::bail!("{USAGE}"),
    }
}
