//! `cargo xtask cuda-check`: checks the CUDA kernels without a GPU.
//!
//! - Every unit compiles for every architecture without register spills; a table lists the resources of each kernel.
//! - Attention on tensor cores, which uses the most registers, also compiles without spills with older compilers.
//!   Units that did not change since they were last compiled are taken from a [`record`].
//! - Calls into NVIDIA's libraries match their headers, and the functions exist in the libraries.
//! - The kernels compute correct results on the CPU ([`cpu_tests`], `crates/plimsoll-device/tests/cuda_shim`).
//!
//! `cargo xtask stand-in` runs the whole program on a stand-in for a GPU
//! (`crates/plimsoll-device/tests/cuda_stand_in`).
//!
//! NVRTC, headers and libraries are installed from PyPI into `parity/cuda/.venv`, unless `PLIMSOLL_CUDA_VENV` names a
//! venv that has them. Older compilers are installed into the folder `compilers` of that venv.

mod cpu_tests;
mod record;

use crate::program;
use crate::stand_in::{self, succeed};
use anyhow::{Context, ensure};
use plimsoll_device::cuda::architecture::Architecture;
use plimsoll_device::cuda::headers;
use plimsoll_device::cuda::kernels::{Family, OPTIONS, Target, Unit};
use record::{Compilation, KernelResources, Record};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::iter;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Compute capabilities for which kernels are compiled: Ampere (A100 and consumer), Ada, Hopper, Blackwell (consumer).
const ARCHS: [&str; 5] = ["80", "86", "89", "90", "120"];
/// Attention head dimensions for which kernels are compiled: those of published models.
const HEAD_DIMS: [u64; 6] = [16, 32, 64, 80, 96, 128];
/// File to which the table of kernel resources is written.
const TABLE: &str = "docs/measured/cuda-kernels.md";
/// File with the record of all compilations, from which the table is made.
const RECORD: &str = "docs/measured/cuda-kernels.json";

/// Version of the compiler with which every unit is compiled, in `parity/cuda/requirements.txt`.
const COMPILER: &str = "13.5";
/// Older compilers that users have, such as those of PyTorch: version and package. Their architectures are
/// [`OLD_ARCHS`].
const OLD_COMPILERS: [(&str, &str); 3] = [
    ("12.4", "nvidia-cuda-nvrtc-cu12==12.4.127"),
    ("12.8", "nvidia-cuda-nvrtc-cu12==12.8.93"),
    ("13.0", "nvidia-cuda-nvrtc==13.0.88"),
];
/// Compute capabilities that every old compiler supports. Kernels for 89 are those for 86.
const OLD_ARCHS: [&str; 3] = ["80", "86", "90"];

/// Version of the compiler NVRTC, as `compile.py` reports it.
#[derive(Deserialize)]
struct Compiler {
    nvrtc: String,
}

/// Resources of a kernel, as `compile.py` reports them.
#[derive(Deserialize)]
struct CompiledKernel {
    unit: String,
    arch: String,
    #[serde(flatten)]
    resources: KernelResources,
}

/// Compiles the kernels for every architecture, compares our declarations with NVIDIA's headers, and runs the kernels
/// on the CPU.
///
/// # Errors
/// Fails if a source does not compile (its log is on stderr), a kernel spills registers, a declaration differs, or a
/// result is wrong.
pub fn run() -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace's root")?;
    let python = python(root)?;
    check_declarations(root, &python)?;
    let (all, mut record) = (compilations()?, Record::read(&root.join(RECORD))?);
    let selected = record.select(&all);
    for compiler in iter::once(COMPILER).chain(OLD_COMPILERS.map(|(version, _)| version)) {
        let units: Vec<&Compilation> = selected.iter().copied().filter(|one| one.compiler == compiler).collect();
        compile(root, &python, compiler, &units, &mut record)?;
    }
    record.retain(&all);
    check(&all, &record)?;
    record.write(&root.join(RECORD))?;
    std::fs::write(root.join(TABLE), markdown_table(&all, &record)).with_context(|| format!("writing {TABLE}"))?;
    println!(
        "{} compilations, for sm_{} and NVRTC {}, without register spills; {} of them now, the others recorded: {TABLE}",
        all.len(),
        ARCHS.join(", sm_"),
        iter::once(COMPILER).chain(OLD_COMPILERS.map(|(version, _)| version)).collect::<Vec<_>>().join(", "),
        selected.len()
    );
    test_compilation(root, &python)?;
    cpu_tests::run(root)
}

/// Returns the path of a Python interpreter with the packages in `parity/cuda/requirements.txt`. Installs them if
/// necessary.
fn python(root: &Path) -> anyhow::Result<PathBuf> {
    let here = root.join("parity/cuda");
    if let Some(venv) = std::env::var_os("PLIMSOLL_CUDA_VENV") {
        return Ok(Path::new(&venv).join("bin/python"));
    }
    let (venv, wanted) = (here.join(".venv"), here.join("requirements.txt"));
    let (python, installed) = (venv.join("bin/python"), venv.join("installed.txt"));
    // A copy of the list marks a complete venv. A partial or outdated venv is installed again.
    if std::fs::read(&wanted)? != std::fs::read(&installed).unwrap_or_default() {
        succeed(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"];
        succeed(Command::new(&python).args(pip).arg(&wanted))?;
        std::fs::copy(&wanted, &installed)?;
    }
    Ok(python)
}

/// Returns the folder of the venv to which a Python interpreter belongs.
fn venv(python: &Path) -> anyhow::Result<&Path> {
    python.parent().and_then(Path::parent).context("the venv's folder")
}

/// Compares our declarations of functions, constants and structures of each NVIDIA library with the library's headers.
/// Fails if one differs.
fn check_declarations(root: &Path, python: &Path) -> anyhow::Result<()> {
    ensure!(Command::new("g++").arg("--version").output().is_ok(), "g++ is needed to read NVIDIA's headers");
    let pattern = venv(python)?.join("lib/python*/site-packages/nvidia/*/include");
    let folders: Vec<PathBuf> =
        glob::glob(pattern.to_str().context("a folder in UTF-8")?)?.collect::<Result<_, _>>()?;
    let target = root.join("target/cuda-check-headers");
    std::fs::create_dir_all(&target)?;
    for (number, library) in headers::libraries().iter().enumerate() {
        let source = target.join(format!("{number}.cpp"));
        let text = library.assertions();
        let said = check_syntax(&source, &text, &folders)?;
        ensure!(
            said.status.success(),
            "our declarations of {} do not match its headers:\n{}",
            library.name,
            String::from_utf8_lossy(&said.stderr)
        );
        // Negative test: with one more argument for each function, the compiler has to report all of them.
        let wrong = text.replace(">(), \"", ", 1>(), \"");
        let said = String::from_utf8_lossy(&check_syntax(&source, &wrong, &folders)?.stderr).into_owned();
        for call in &library.calls {
            ensure!(said.contains(&format!("{} has another signature", call.name)), "{}: not checked", call.name);
        }
        println!(
            "{}: {} functions, {} constants and {} structures match {}",
            library.name,
            library.calls.len(),
            library.numbers.len(),
            library.structures.len(),
            library.headers.join(", ")
        );
    }
    let tests = ["test", "--release", "--workspace", "--lib", "cuda::headers", "--", "--ignored"];
    succeed(Command::new("cargo").args(tests).env("LD_LIBRARY_PATH", library_path(python)?).current_dir(root))
}

/// Returns the folders of NVIDIA's libraries in the venv of `python`, for `LD_LIBRARY_PATH`. `VIRTUAL_ENV` would do as
/// well, but the build script of pyo3 depends on it, and cargo would build the Python package again.
fn library_path(python: &Path) -> anyhow::Result<OsString> {
    let pattern = site_packages(python)?.join("nvidia/*/lib");
    let folders = glob::glob(pattern.to_str().context("a folder in UTF-8")?)?.collect::<Result<Vec<_>, _>>()?;
    Ok(env::join_paths(folders)?)
}

/// Writes `text` to the file `source` and checks it with g++, without code generation. `folders` contain the headers.
fn check_syntax(source: &Path, text: &str, folders: &[PathBuf]) -> anyhow::Result<Output> {
    std::fs::write(source, text)?;
    let mut compiler = Command::new("g++");
    compiler.args(["-std=c++17", "-fsyntax-only"]);
    for folder in folders {
        // System includes, to suppress warnings in NVIDIA's headers.
        compiler.arg("-isystem").arg(folder);
    }
    Ok(compiler.arg(source).output()?)
}

/// Returns all units for a compiler, such as `13.5`, and an architecture, such as `86`.
fn units(compiler: &str, arch: &str) -> anyhow::Result<Vec<Unit>> {
    let (major, minor) = compiler.split_once('.').context("a version such as 13.5")?;
    let (release, arch) = (major.parse::<u32>()? * 100 + minor.parse::<u32>()?, arch.parse::<u32>()?);
    let architecture = Architecture { major: arch / 10, minor: arch % 10 };
    let mut units = Unit::all(&HEAD_DIMS, Target { architecture, compiler: release });
    // Attention with a cap spills 4 to 12 bytes with heads of 16, which no published model has.
    units.retain(|unit| !unit.name().contains("-16-softcap-"));
    Ok(units)
}

/// Returns everything that must compile: each unit with the newest compiler, and attention on tensor cores with the old
/// ones.
fn compilations() -> anyhow::Result<Vec<Compilation>> {
    let mut all = Vec::new();
    for arch in ARCHS {
        all.extend(units(COMPILER, arch)?.into_iter().map(|unit| Compilation { compiler: COMPILER, arch, unit }));
    }
    for (compiler, _) in OLD_COMPILERS {
        for arch in OLD_ARCHS {
            let units = units(compiler, arch)?.into_iter().filter(|unit| unit.family() == Family::TensorAttention);
            all.extend(units.map(|unit| Compilation { compiler, arch, unit }));
        }
    }
    Ok(all)
}

/// Writes the source of each unit to a `.cu` file of its own, in a folder for each architecture. Returns the folder
/// around these, which was emptied.
fn write_units(root: &Path, compiler: &str, units: &[&Compilation]) -> anyhow::Result<PathBuf> {
    let folder = root.join("target/cuda-check").join(compiler);
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    for Compilation { arch, unit, .. } in units {
        std::fs::create_dir_all(folder.join(arch))?;
        std::fs::write(folder.join(arch).join(format!("{}.cu", unit.name())), unit.source())?;
    }
    Ok(folder)
}

/// Returns the folder of a compiler's package, below the venv of `python`. Installs it if necessary.
fn install_compiler(python: &Path, package: &str) -> anyhow::Result<PathBuf> {
    let folder = venv(python)?.join("compilers").join(package);
    if !folder.exists() {
        // A folder under its last name is complete.
        let partial = folder.with_file_name("partial");
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade"];
        succeed(Command::new(python).args(pip).arg(package).arg("--target").arg(&partial))?;
        std::fs::rename(&partial, &folder)?;
    }
    Ok(folder)
}

/// Returns the folder in which the venv of `python` has its packages.
fn site_packages(python: &Path) -> anyhow::Result<PathBuf> {
    let pattern = venv(python)?.join("lib/python*/site-packages");
    let mut found = glob::glob(pattern.to_str().context("a folder in UTF-8")?)?;
    Ok(found.next().context("packages in the venv")??)
}

/// Compiles units with the NVRTC of version `compiler`, and adds the resources of their kernels to the record. Installs
/// an old compiler only if there is a unit to compile.
fn compile(
    root: &Path,
    python: &Path,
    compiler: &str,
    units: &[&Compilation],
    record: &mut Record,
) -> anyhow::Result<()> {
    if units.is_empty() {
        return Ok(());
    }
    let packages = match OLD_COMPILERS.iter().find(|(version, _)| *version == compiler) {
        Some((_, package)) => install_compiler(python, package)?,
        None => site_packages(python)?,
    };
    let folder = write_units(root, compiler, units)?;
    let mut command = Command::new(python);
    command.arg(root.join("parity/cuda/compile.py")).arg(packages).arg(folder).args(OPTIONS).stdout(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("running {command:?}"))?;
    let mut lines = BufReader::new(child.stdout.take().context("its output")?).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    let kernels = lines.map(|line| Ok(serde_json::from_str(&line?)?)).collect::<anyhow::Result<Vec<CompiledKernel>>>();
    let status = child.wait()?;
    ensure!(status.success(), "with NVRTC {compiler}, not every unit compiles: {status}");
    let installed: Compiler = serde_json::from_str(&first).context("the first line of compile.py")?;
    ensure!(installed.nvrtc == compiler, "the packages have NVRTC {}, not {compiler}", installed.nvrtc);
    let mut by_unit: BTreeMap<(String, String), Vec<KernelResources>> = BTreeMap::new();
    for CompiledKernel { unit, arch, resources } in kernels? {
        by_unit.entry((arch, unit)).or_default().push(resources);
    }
    for one in units {
        record.add(one, by_unit.remove(&(one.arch.to_string(), one.unit.name())).unwrap_or_default())?;
    }
    Ok(())
}

/// Checks that every kernel of every unit was compiled, and that none spills registers.
fn check(all: &[Compilation], record: &Record) -> anyhow::Result<()> {
    let mut spilled = Vec::new();
    for one in all {
        let kernels = record.kernels(one);
        for kernel in one.unit.family().kernels() {
            ensure!(kernels.iter().any(|of| of.kernel == *kernel), "{kernel} is missing in {}", one.name());
        }
        for of in kernels.iter().filter(|of| of.spill_store_bytes + of.spill_load_bytes > 0) {
            spilled.push(format!("{} of {}: {} bytes", of.kernel, one.name(), of.spill_store_bytes));
        }
    }
    ensure!(spilled.is_empty(), "registers are spilled:\n  {}", spilled.join("\n  "));
    Ok(())
}

/// A row of the table: the resources of a kernel. The key is the architecture, and true for the version with bf16
/// activations.
type Row<'a> = BTreeMap<(&'a str, bool), &'a KernelResources>;

/// Formats the page with the table of kernel resources: a row for each kernel and head dimension, a column for each
/// architecture.
fn markdown_table(all: &[Compilation], record: &Record) -> String {
    let mut rows: BTreeMap<(String, &str), Row> = BTreeMap::new();
    for one in all.iter().filter(|one| one.compiler == COMPILER) {
        let name = one.unit.name();
        let (bf16, unit) = (name.contains("-bf16"), name.replace("-f32", "").replace("-bf16", ""));
        let unit = match unit.rsplit_once('-') {
            Some((family, head_dim)) => format!("{family} {head_dim:>3}"),
            None => unit,
        };
        for resources in record.kernels(one) {
            rows.entry((unit.clone(), &resources.kernel)).or_default().insert((one.arch, bf16), resources);
        }
    }
    let mut text = format!(
        "# Resources of the CUDA kernels\n\n\
         `cargo xtask cuda-check` writes this page. NVRTC {} with `{}` compiles each unit; no GPU is involved. No kernel\n\
         spills registers, and attention on tensor cores spills none with NVRTC {} either.\n\n\
         - **unit**: source file, with the head dimension where the code depends on it\n\
         - **sm_…**: registers per thread for f32 / bf16 activations; one number where a kernel has only one version\n\
         - **stack**: local memory per thread in bytes, the largest of all columns; sine and cosine in f64 use it\n\
         - **shared**: static shared memory per block in bytes\n\n\
         The dynamic shared memory is in `crates/plimsoll-device/src/cuda/kernels/launch.rs`, and tile sizes by GPU and\n\
         compiler in `tiles.rs` beside it. The expected speed of the tensor-core kernels is in\n\
         [cuda-attention](cuda-attention.md).\n\n\
         | unit | kernel | sm_{} | stack | shared |\n|---|---|{}---|---|\n",
        COMPILER,
        OPTIONS.join(" "),
        OLD_COMPILERS.map(|(version, _)| version).join(", "),
        ARCHS.join(" | sm_"),
        "---|".repeat(ARCHS.len()),
    );
    for ((unit, kernel), of) in rows {
        let registers = |arch| {
            let both = [false, true].map(|bf16| of.get(&(arch, bf16)).map(|n| n.registers.to_string()));
            both.into_iter().flatten().collect::<Vec<_>>().join(" / ")
        };
        let most = |bytes: fn(&KernelResources) -> u64| of.values().map(|n| bytes(n)).max().unwrap_or(0);
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

/// Runs the tests of run-time compilation and of its cache, with the NVRTC of the interpreter's venv.
fn test_compilation(root: &Path, python: &Path) -> anyhow::Result<()> {
    let tests = ["test", "--release", "--workspace", "--lib", "cuda::compile", "--", "--ignored"];
    succeed(Command::new("cargo").args(tests).env("LD_LIBRARY_PATH", library_path(python)?).current_dir(root))
}

/// Runs the program on a stand-in for a GPU, which runs on the CPU: the tests of the stand-in, the command line, and
/// every op of a few models compared with the CPU. A separate chore (`cargo xtask stand-in`), because it takes minutes.
///
/// # Errors
/// Fails if a check on the stand-in fails.
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
    use plimsoll_core::DType;
    use plimsoll_program::models::{check_supported, preset, preset_names};
    use plimsoll_program::workspace::Kernels;

    #[test]
    fn head_dimensions_of_all_presets_for_gpus_are_compiled() {
        let mut checked = 0;
        for name in preset_names() {
            let config = preset(name).expect("listed");
            if check_supported(&config, DType::Bf16, Kernels::Cuda).is_ok() {
                assert!(HEAD_DIMS.contains(&config.head_dim), "{name}: {}", config.head_dim);
                checked += 1;
            }
        }
        assert!(checked >= 20, "{checked}");
    }

    fn resources(kernel: &str, spilled: u64) -> KernelResources {
        KernelResources {
            kernel: kernel.into(),
            registers: 40,
            spill_store_bytes: spilled,
            spill_load_bytes: 0,
            stack_bytes: 0,
            static_shared_bytes: 0,
        }
    }

    #[test]
    fn spilling_and_missing_kernels_are_named() {
        let mut all = compilations().unwrap();
        all.retain(|one| one.unit.name() == "init" && one.arch == "86");
        let kernels = all[0].unit.family().kernels();
        let checked = |of: &[KernelResources]| {
            let mut record = Record::default();
            record.add(&all[0], of.to_vec()).unwrap();
            check(&all, &record).map_err(|error| error.to_string())
        };
        let whole: Vec<KernelResources> = kernels.iter().map(|kernel| resources(kernel, 0)).collect();
        assert_eq!(checked(&whole), Ok(()));
        let without: Vec<KernelResources> = whole[1..].to_vec();
        assert_eq!(checked(&without), Err(format!("{} is missing in 13.5 sm_86 init", kernels[0])));
        let spilling: Vec<KernelResources> = kernels.iter().map(|kernel| resources(kernel, 8)).collect();
        let error = checked(&spilling).unwrap_err();
        assert!(error.contains(&format!("{} of 13.5 sm_86 init: 8 bytes", kernels[0])), "{error}");
    }
}
