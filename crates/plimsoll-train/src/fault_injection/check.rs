//! Checks, before a run starts, that the injected faults can occur in it.

use super::{EVALUATOR_PROGRAMS, Injection, OPEN, OpSelector, PROGRAMS, REPLAN, START_PROGRAMS};
use plimsoll_core::{ExcludedDevice, Failure, format_count};
use plimsoll_program::{Op, Program, ProgramKind, ProgramSet};

/// A device of a run, for checks whether a fault can occur on it.
#[derive(Clone, Copy)]
pub struct TargetDevice<'a> {
    /// Name of the device.
    pub name: &'a str,
    /// Programs that the device runs.
    pub programs: &'a ProgramSet,
}

/// Devices and steps of a run, in which faults can occur.
pub struct InjectionTargets<'a> {
    /// Workers in rank order.
    pub workers: Vec<TargetDevice<'a>>,
    /// Device outside the team that evaluates while the team trains; `None` if there is none.
    pub evaluator: Option<TargetDevice<'a>>,
    /// Devices that the plan does not use. With any of them, even a run on one device watches its heartbeats, because
    /// another device could take over.
    pub excluded: &'a [ExcludedDevice],
    /// Number of steps that were done when this process started or resumed the run.
    pub steps_done: u64,
    /// Number of steps of the whole run; `None` if it is not known.
    pub steps: Option<u64>,
}

impl<'a> InjectionTargets<'a> {
    fn devices(&self) -> impl Iterator<Item = &TargetDevice<'a>> {
        self.workers.iter().chain(&self.evaluator)
    }

    /// Returns whether the run watches the heartbeats of this device. It does not watch a local device that works alone
    /// and has no other device to take over.
    fn is_monitored(&self, device: &str) -> bool {
        self.workers.len() > 1
            || !self.excluded.is_empty()
            || self.evaluator.is_some_and(|evaluator| evaluator.name == device)
            || device.contains('/')
    }
}

/// Device, step and Program at which an injected fault occurs.
struct Place<'a> {
    device: Option<&'a String>,
    step: u64,
    program: Option<&'a str>,
}

impl Injection {
    /// Checks that the fault can occur in this run: device, step, Program and op exist.
    ///
    /// # Errors
    /// The fault cannot occur; the hints list what exists.
    pub fn check(&self, run: &InjectionTargets) -> Result<(), Failure> {
        let Some(Place { device, step, program }) = self.place() else { return Ok(()) };
        if let Injection::Silence { device, opening: false, .. } = self
            && !run.is_monitored(device)
        {
            return Err(self.failure("the heartbeats of a device that works alone are not monitored"));
        }
        let programs = self.programs_of(device, run)?;
        if let Some(steps) = run.steps.filter(|steps| step > *steps) {
            return Err(self.failure(&format!("the run has only {}", format_count(steps, "step"))));
        }
        // The other faults last from their step on, so they may begin in a step that is done.
        let occurs_once = matches!(self, Injection::OutOfMemory { .. });
        if occurs_once && step > 0 && step < run.steps_done {
            let message = format!("the run resumes after step {}", run.steps_done);
            return Err(self.failure(&message).hint("work before that belongs to step 0, the start"));
        }
        if let Some(evaluator) = run.evaluator.filter(|evaluator| device.is_some_and(|device| evaluator.name == device))
        {
            return self.check_on_evaluator(evaluator.programs);
        }
        match program {
            None => Ok(()),
            Some(OPEN) => self.check_open(),
            Some(REPLAN) => match self {
                Injection::OutOfMemory { op: Some(_), .. } => {
                    Err(self.failure(&format!("`{REPLAN}` fails as a whole: name no op")))
                }
                _ => Ok(()),
            },
            Some(program) => self.check_program(program, programs, occurs_once.then_some(step)),
        }
    }

    /// Returns the place of the fault; `None` for random faults.
    fn place(&self) -> Option<Place<'_>> {
        Some(match self {
            Injection::RandomOutOfMemory { .. } => return None,
            Injection::OutOfMemory { device, step, program, .. } => {
                Place { device: device.as_ref(), step: *step, program: program.as_deref() }
            }
            Injection::Slow { device, step, .. } => Place { device: Some(device), step: *step, program: None },
            Injection::Silence { device, step, opening, .. } => {
                Place { device: Some(device), step: *step, program: opening.then_some(OPEN) }
            }
            Injection::Loss { device, step, program } => {
                Place { device: Some(device), step: *step, program: program.as_deref() }
            }
        })
    }

    fn failure(&self, message: &str) -> Failure {
        Failure::input(format!("{self}: {message}"))
    }

    /// Returns the Programs of `device`, or of the first worker if `device` is `None`. Fails if the run does not use
    /// the device.
    fn programs_of<'a>(&self, device: Option<&String>, run: &InjectionTargets<'a>) -> Result<&'a ProgramSet, Failure> {
        let target = match device {
            None => run.workers.first(),
            Some(device) => run.devices().find(|target| target.name == device),
        };
        target.map(|target| target.programs).ok_or_else(|| {
            let device = device.map_or("", String::as_str);
            let names = run.devices().map(|target| target.name).collect::<Vec<_>>().join(", ");
            let devices = format!("the devices are {names}");
            match run.excluded.iter().find(|out| out.device == device) {
                None => self.failure(&format!("no device `{device}` works on this run")).hint(devices),
                Some(ExcludedDevice { reason, remedy, .. }) => {
                    let remedies = remedy.iter().map(|settings| format!("it would be used with {settings}"));
                    let failure = self.failure(&format!("`{device}` is excluded from this run: {reason}"));
                    remedies.chain([devices]).fold(failure, Failure::hint)
                }
            }
        })
    }

    /// Checks that the Program named `program` is among `programs` and runs in `step` (if given). Also checks that it
    /// has the op that the fault names.
    fn check_program(&self, program: &str, programs: &ProgramSet, step: Option<u64>) -> Result<(), Failure> {
        let Some(found) = find_program(programs, program) else {
            let names = programs.programs.iter().map(|program| program.kind.name());
            let names: Vec<&str> = names.filter(|name| PROGRAMS.contains(name)).chain([REPLAN]).collect();
            return Err(self
                .failure(&format!("this run has no Program `{program}`"))
                .hint(format!("its Programs are {}", names.join(", "))));
        };
        let runs_in = |step: u64| match (step, START_PROGRAMS.contains(&program)) {
            // Reference scores are computed before the first step.
            (0, at_start) => at_start || found.kind == ProgramKind::Score,
            (_, at_start) => !at_start,
        };
        if let Some(step) = step.filter(|step| !runs_in(*step)) {
            let start = START_PROGRAMS.join(", ");
            return Err(self
                .failure(&format!("`{program}` does not run in step {step}"))
                .hint(format!("step 0 is the start: {start} run in it and in no other step")));
        }
        if let Injection::OutOfMemory { op: Some(OpSelector::Named(op)), .. } = self {
            let names = op_names(programs, program);
            // Another recipe may add transfers, and recompute ops of the forward pass.
            let transfers = ["transfer_start", "transfer_wait", "collective_start", "collective_wait"];
            let recomputed = match found.kind {
                ProgramKind::Backward => op_names(programs, ProgramKind::Forward.name()),
                _ => Vec::new(),
            };
            if !names.iter().chain(&transfers).chain(&recomputed).any(|name| name == op) {
                return Err(self
                    .failure(&format!("`{}` has no op `{op}`", found.kind))
                    .hint(format!("its ops are {}", names.join(", "))));
            }
        }
        Ok(())
    }

    /// Checks that this fault can occur while a device is opened.
    fn check_open(&self) -> Result<(), Failure> {
        match self {
            Injection::Loss { step: 0, .. } | Injection::Silence { step: 0, .. } => Ok(()),
            Injection::Loss { .. } | Injection::Silence { .. } => {
                Err(self.failure("devices are opened in step 0, the start").hint("name step 0"))
            }
            _ => Err(self
                .failure("a device that is being opened can only be lost or silent")
                .hint("for example --inject-loss virtual:b:0:open")),
        }
    }

    /// Checks that this fault can occur on the evaluator, a device outside the team that only evaluates. Its plan never
    /// changes, so `programs` are all that it runs.
    fn check_on_evaluator(&self, programs: &ProgramSet) -> Result<(), Failure> {
        let failure = |message: String| self.failure(&format!("a device that only evaluates {message}"));
        let (step, program, op) = match self {
            Injection::Slow { .. } => return Err(failure("has no training passes to slow down".to_owned())),
            Injection::Silence { opening: true, .. } => return self.check_open(),
            Injection::RandomOutOfMemory { .. } | Injection::Silence { .. } => return Ok(()),
            Injection::OutOfMemory { step, program, op, .. } => (Some(*step), program, op.as_ref()),
            Injection::Loss { program, .. } => (None, program, None),
        };
        let Some(program) = program.as_deref() else { return Ok(()) };
        if program == OPEN {
            return self.check_open();
        }
        if !EVALUATOR_PROGRAMS.contains(&program) {
            let hint = format!("it runs {}", EVALUATOR_PROGRAMS.join(", "));
            return Err(failure(format!("runs no `{program}`")).hint(hint));
        }
        if let Some(step) = step.filter(|step| (*step == 0) != START_PROGRAMS.contains(&program)) {
            let hint = "step 0 is the start: load runs in it and in no other step";
            return Err(failure(format!("does not run `{program}` in step {step}")).hint(hint));
        }
        let names = op_names(programs, program);
        let op_count = find_program(programs, program).map_or(0, Program::op_count);
        match op {
            Some(OpSelector::Number(number)) if *number as usize > op_count => {
                Err(failure(format!("has no op {number} in `{program}`")).hint(format!("it has {op_count}")))
            }
            Some(OpSelector::Named(op)) if !names.contains(&&**op) => {
                Err(failure(format!("has no op `{op}` in `{program}`"))
                    .hint(format!("its ops are {}", names.join(", "))))
            }
            _ => Ok(()),
        }
    }
}

/// Returns the Program of this name; `None` if there is none.
fn find_program<'a>(programs: &'a ProgramSet, name: &str) -> Option<&'a Program> {
    ProgramKind::from_name(name).and_then(|kind| programs.program(kind))
}

/// Returns the names of a Program's ops in order, each once.
fn op_names(programs: &ProgramSet, program: &str) -> Vec<&'static str> {
    let blocks = find_program(programs, program).into_iter().flat_map(|program| &program.blocks);
    let mut names = Vec::new();
    for name in blocks.flat_map(|block| &block.ops).map(Op::name) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}
