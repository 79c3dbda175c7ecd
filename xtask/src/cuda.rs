//! `cargo xtask cuda-check`: what can be shown about the CUDA kernels without a GPU. Every unit is
//! compiled for every architecture, nothing may be spilled, and the table of what each kernel needs is
//! written down; what is called of NVIDIA's libraries is compared with their headers, and found in the libraries
//! themselves; then the kernels' arithmetic runs on the CPU (`crates/plimsoll-device/tests/cuda_shim`), and the real
//! programs run on a stand-in for a GPU (`crates/plimsoll-device/tests/cuda_stand_in`).
//!
//! NVRTC, ptxas, headers and libraries come from PyPI into `parity/cuda/.venv`, or lie in the venv that
//! `PLIMSOLL_CUDA_VENV` names.

use crate::program;
use crate::stand_in::{self, succeed};
use anyhow::{Context, bail, ensure};
use plimsoll_device::cuda::headers;
use plimsoll_device::cuda::kernels::{OPTIONS, Unit};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Ampere (A100; consumer), Ada, Hopper, Blackwell (consumer).
const ARCHS: [&str; 5] = ["80", "86", "89", "90", "120"];
/// Head dimensions of published models of the family.
const HEAD_DIMS: [u64; 6] = [16, 32, 64, 80, 96, 128];
/// Where the table goes.
const TABLE: &str = "docs/measured/cuda-kernels.md";

/// What compiled.
#[derive(Deserialize)]
struct Compiler {
    nvrtc: String,
}

/// What a kernel needs on an architecture.
#[derive(Deserialize)]
struct Needs {
    unit: String,
    arch: String,
    kernel: String,
    registers: u64,
    spill_store_bytes: u64,
    spill_load_bytes: u64,
    stack_bytes: u64,
    static_shared_bytes: u64,
}

/// The chore.
///
/// # Errors
/// When a unit does not compile (its log is on stderr), a kernel spills, or a result is wrong.
pub fn run() -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace's root")?;
    let python = python(root)?;
    declarations(root, &python)?;
    let units = Unit::all(&HEAD_DIMS);
    let folder = write_units(root, &units)?;
    let (compiler, needs) = compile(root, &python, &folder)?;
    check(&units, &needs)?;
    let table = root.join(TABLE);
    std::fs::create_dir_all(table.parent().context("the table's folder")?)?;
    std::fs::write(&table, document(&compiler, &needs)).with_context(|| format!("writing {TABLE}"))?;
    println!("{} units compile for sm_{}, nothing is spilled: {TABLE}", units.len(), ARCHS.join(", sm_"));
    into_machine_code(root, &python)?;
    arithmetic(root)
}

/// A Python whose venv holds what `parity/cuda/requirements.txt` lists.
fn python(root: &Path) -> anyhow::Result<PathBuf> {
    let here = root.join("parity/cuda");
    if let Some(venv) = std::env::var_os("PLIMSOLL_CUDA_VENV") {
        return Ok(Path::new(&venv).join("bin/python"));
    }
    let (venv, wanted) = (here.join(".venv"), here.join("requirements.txt"));
    let (python, installed) = (venv.join("bin/python"), venv.join("installed.txt"));
    // The stamp is the list that was installed: a half-made or outdated venv is completed.
    if std::fs::read(&wanted)? != std::fs::read(&installed).unwrap_or_default() {
        succeed(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"];
        succeed(Command::new(&python).args(pip).arg(&wanted))?;
        std::fs::copy(&wanted, &installed)?;
    }
    Ok(python)
}

/// The folder of a venv that a Python belongs to.
fn venv(python: &Path) -> anyhow::Result<&Path> {
    python.parent().and_then(Path::parent).context("the venv's folder")
}

/// What is called, passed and read of each library, against its headers.
fn declarations(root: &Path, python: &Path) -> anyhow::Result<()> {
    ensure!(Command::new("g++").arg("--version").output().is_ok(), "g++ is needed to read NVIDIA's headers");
    let pattern = venv(python)?.join("lib/python*/site-packages/nvidia/*/include");
    let folders: Vec<PathBuf> =
        glob::glob(pattern.to_str().context("a folder in UTF-8")?)?.collect::<Result<_, _>>()?;
    let target = root.join("target/cuda-check-headers");
    std::fs::create_dir_all(&target)?;
    for (number, library) in headers::libraries().iter().enumerate() {
        let source = target.join(format!("{number}.cpp"));
        let read = |text: String| -> anyhow::Result<std::process::Output> {
            std::fs::write(&source, text)?;
            let mut compiler = Command::new("g++");
            compiler.args(["-std=c++17", "-fsyntax-only"]);
            for folder in &folders {
                // As the system's: what NVIDIA's headers warn of is not ours.
                compiler.arg("-isystem").arg(folder);
            }
            Ok(compiler.arg(&source).output()?)
        };
        let text = library.assertions();
        let said = read(text.clone())?;
        ensure!(
            said.status.success(),
            "{} is not what its headers say:\n{}",
            library.name,
            String::from_utf8_lossy(&said.stderr)
        );
        // That a compiler which finds nothing would find something: each function with one more argument.
        let wrong = text.replace(">(), \"", ", 1>(), \"");
        let said = String::from_utf8_lossy(&read(wrong)?.stderr).into_owned();
        for call in &library.calls {
            ensure!(said.contains(&format!("{} is called otherwise", call.name)), "{}: not compared", call.name);
        }
        println!(
            "{}: {} functions, {} numbers and {} structures are as {} says",
            library.name,
            library.calls.len(),
            library.numbers.len(),
            library.structures.len(),
            library.headers.join(", ")
        );
    }
    let tests = ["test", "--workspace", "--lib", "cuda::headers", "--", "--ignored"];
    succeed(Command::new("cargo").args(tests).env("VIRTUAL_ENV", venv(python)?).current_dir(root))
}

/// Each unit as a file of its own, where nothing else lies.
fn write_units(root: &Path, units: &[Unit]) -> anyhow::Result<PathBuf> {
    let folder = root.join("target/cuda-check");
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    std::fs::create_dir_all(&folder)?;
    for unit in units {
        std::fs::write(folder.join(format!("{}.cu", unit.name())), unit.source())?;
    }
    Ok(folder)
}

fn compile(root: &Path, python: &Path, folder: &Path) -> anyhow::Result<(Compiler, Vec<Needs>)> {
    let mut command = Command::new(python);
    command
        .arg(root.join("parity/cuda/compile.py"))
        .arg(folder)
        .arg(ARCHS.join(","))
        .args(OPTIONS)
        .stdout(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("running {command:?}"))?;
    let mut lines = BufReader::new(child.stdout.take().context("its output")?).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    let needs = lines.map(|line| Ok(serde_json::from_str(&line?)?)).collect::<anyhow::Result<Vec<Needs>>>();
    let status = child.wait()?;
    ensure!(status.success(), "not every unit compiles: {status}");
    Ok((serde_json::from_str(&first).context("the first line of compile.py")?, needs?))
}

/// Every kernel of every unit is there for every architecture, and keeps its values in registers.
fn check(units: &[Unit], needs: &[Needs]) -> anyhow::Result<()> {
    let found: BTreeSet<(&str, &str, &str)> =
        needs.iter().map(|n| (n.unit.as_str(), n.kernel.as_str(), n.arch.as_str())).collect();
    for unit in units {
        for kernel in unit.family().kernels() {
            for arch in ARCHS {
                let name = unit.name();
                ensure!(found.contains(&(name.as_str(), kernel, arch)), "{kernel} of {name} is missing for sm_{arch}");
            }
        }
    }
    let spilled: Vec<String> = needs
        .iter()
        .filter(|n| n.spill_store_bytes + n.spill_load_bytes > 0)
        .map(|n| format!("{} of {} on sm_{}: {} bytes", n.kernel, n.unit, n.arch, n.spill_store_bytes))
        .collect();
    if !spilled.is_empty() {
        bail!("registers are spilled:\n  {}", spilled.join("\n  "));
    }
    Ok(())
}

/// A row of the table: what a kernel needs, by architecture and whether activations are bf16.
type Row<'a> = BTreeMap<(&'a str, bool), &'a Needs>;

/// The table: a row for each kernel and head dimension, a column for each architecture.
fn document(compiler: &Compiler, needs: &[Needs]) -> String {
    let mut rows: BTreeMap<(String, &str), Row> = BTreeMap::new();
    for n in needs {
        let (bf16, unit) = (n.unit.contains("-bf16"), n.unit.replace("-f32", "").replace("-bf16", ""));
        let unit = match unit.rsplit_once('-') {
            Some((family, head_dim)) => format!("{family} {head_dim:>3}"),
            None => unit,
        };
        rows.entry((unit, &n.kernel)).or_default().insert((&n.arch, bf16), n);
    }
    let mut text = format!(
        "# What the CUDA kernels need\n\n\
         Written by `cargo xtask cuda-check`: NVRTC {} with `{}`, then ptxas of the same version; no GPU.\n\
         Registers of a thread, for f32 / bf16 activations where the kernel depends on them; nothing is spilled.\n\
         *Stack* is the most bytes of local memory of a thread (the slow path of sines in double), *shared* the\n\
         static shared memory of a block; the dynamic one is in `cuda/kernels/launch.rs`. The number behind\n\
         `attention` is the head dimension. What attention on tensor cores may reach: `cuda-attention.md`.\n\n\
         | file | kernel | sm_{} | stack | shared |\n|---|---|{}---|---|\n",
        compiler.nvrtc,
        OPTIONS.join(" "),
        ARCHS.join(" | sm_"),
        "---|".repeat(ARCHS.len()),
    );
    for ((unit, kernel), of) in rows {
        let registers = |arch| {
            let both = [false, true].map(|bf16| of.get(&(arch, bf16)).map(|n| n.registers.to_string()));
            both.into_iter().flatten().collect::<Vec<_>>().join(" / ")
        };
        let most = |bytes: fn(&Needs) -> u64| of.values().map(|n| bytes(n)).max().unwrap_or(0);
        let _ = writeln!(
            text,
            "| {unit} | {kernel} | {} | {} | {} |",
            ARCHS.map(registers).join(" | "),
            most(|n| n.stack_bytes),
            most(|n| n.static_shared_bytes)
        );
    }
    text
}

/// Plimsoll's own way from a unit to machine code, and back from the cache, with the NVRTC that it finds in the venv.
fn into_machine_code(root: &Path, python: &Path) -> anyhow::Result<()> {
    let tests = ["test", "--workspace", "--lib", "cuda::compile", "--", "--ignored"];
    succeed(Command::new("cargo").args(tests).env("VIRTUAL_ENV", venv(python)?).current_dir(root))
}

/// The kernels on the CPU, against the CPU's own.
fn arithmetic(root: &Path) -> anyhow::Result<()> {
    ensure!(Command::new("g++").arg("--version").output().is_ok(), "g++ is needed to run kernels on the CPU");
    let two = ("PLIMSOLL_STAND_IN_MEMORY", "8GiB,8GiB,1GiB");
    let run = |files: &[&str], words: &[&str]| {
        let tests =
            files.iter().flat_map(|file| ["--test", file]).chain(["--", "--ignored"]).chain(words.iter().copied());
        succeed(Command::new("cargo").args(["test", "--workspace"]).args(tests).env(two.0, two.1).current_dir(root))
    };
    run(&["cuda_kernels", "cuda_tensor"], &[])?;
    // One after the other: the tests of a process share the contexts of the stand-in, and one that waits for all of a context's
    // work must not wait for ranks of another test.
    run(&["cuda_executor", "cuda_adopt", "device"], &["--test-threads=1"])
}

/// The real programs on a stand-in for a GPU (runs on the CPU): what it is there to find, the command line, and every op
/// of a few models beside the CPU's. A chore of its own (`cargo xtask stand-in`), since it takes minutes.
///
/// # Errors
/// When something on the stand-in is not as it must be.
pub fn on_stand_in() -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace's root")?;
    let program = program::release()?;
    let libraries = stand_in::build(root)?;
    let tests = root.join("crates/plimsoll-device/tests/cuda_stand_in");
    let python = |script: PathBuf| {
        let mut command = Command::new("python3");
        command.arg(script).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    };
    succeed(python(tests.join("check.py")).arg(&libraries))?;
    succeed(python(root.join("parity/cuda/end_to_end.py")).arg(program).arg(&libraries))?;
    for (only, dtype, runs) in
        [("ops", "f32", "4"), ("ops", "bf16", "4"), ("cases", "f32", "2"), ("cases", "bf16", "2")]
    {
        println!("soak, {only} in {dtype}, on a stand-in for a GPU (runs on the CPU)");
        let mut command = Command::new(env::current_exe()?);
        command.args(["soak", "--device", "cuda:0", "--only", only, "--dtype", dtype, "--runs", runs]);
        command.env("LD_LIBRARY_PATH", &libraries).env("PLIMSOLL_STAND_IN_GUARD", "0");
        succeed(command.env("PLIMSOLL_CACHE", root.join("target/stand-in/cache")))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_program::models::{preset, preset_names};

    #[test]
    fn the_head_dimensions_of_all_presets_are_compiled() {
        for name in preset_names() {
            let head_dim = preset(name).expect("listed").head_dim;
            assert!(HEAD_DIMS.contains(&head_dim), "{name}: {head_dim}");
        }
    }

    fn needs(kernel: &str, arch: &str, spilled: u64) -> Needs {
        Needs {
            unit: "init".into(),
            arch: arch.into(),
            kernel: kernel.into(),
            registers: 40,
            spill_store_bytes: spilled,
            spill_load_bytes: 0,
            stack_bytes: 0,
            static_shared_bytes: 0,
        }
    }

    #[test]
    fn what_spills_or_is_missing_is_named() {
        let unit: Vec<Unit> = Unit::all(&[64]).into_iter().filter(|unit| unit.name() == "init").collect();
        let kernels = unit[0].family().kernels();
        let all = |spilled| -> Vec<Needs> {
            let of = |kernel: &&str, arch: &&str| {
                let here = *kernel == "init_normal" && *arch == "86";
                needs(kernel, arch, if here { spilled } else { 0 })
            };
            kernels.iter().flat_map(|kernel| ARCHS.iter().map(move |arch| of(kernel, arch))).collect()
        };
        assert!(check(&unit, &all(0)).is_ok());
        let error = check(&unit, &all(8)).unwrap_err().to_string();
        assert!(error.contains("init_normal of init on sm_86: 8 bytes"), "{error}");
        let error = check(&unit, &all(0)[1..]).unwrap_err().to_string();
        assert!(error.contains("init_normal of init is missing for sm_80"), "{error}");
    }
}
