//! Rehearsed refusals: the device refuses memory exactly where it is told to, so that everybody can see
//! what a run does then. For users (`plimsoll train --inject-oom`) and for tests. What can never happen is refused before
//! the run starts; what did not happen is known at its end.

use crate::data::mix;
use crate::team::heartbeat::Pulse;
use plimsoll_core::{Failure, LeftOut, counted};
use plimsoll_device::device::{DeviceError, Memory, Observer};
use plimsoll_program::{Op, Program, ProgramSet};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Programs in which a device can be told to refuse, as they are written on the command line.
pub const PROGRAMS: [&str; 16] = [
    OPEN,
    "load",
    "fresh",
    "begin",
    "forward",
    "backward",
    "norm",
    "update",
    "evaluate",
    "prefill",
    "decode",
    "save",
    "checkpoint",
    "restore",
    "renew",
    REPLAN,
];

/// The move to another plan: refused as a whole, wherever it is tried.
const REPLAN: &str = "re-plan";

/// The moment in which a device is opened: it is lost or silent there, never refused.
pub(crate) const OPEN: &str = "open";

/// Programs that run at the start, which is step 0, and never again.
const AT_THE_START: [&str; 3] = ["load", "fresh", "restore"];

/// Programs that a device runs which evaluates beside the others.
const BESIDE: [&str; 4] = [OPEN, "load", "renew", "evaluate"];

/// Where the device shall refuse.
#[derive(Clone, Debug, PartialEq)]
pub enum Injection {
    /// `[DEVICE/]STEP[:PROGRAM[:OP]]`: once, at this place.
    At {
        /// The device; without one, the first of the team.
        device: Option<String>,
        /// The step that is being done; work beside the steps belongs to the step before it, and 0 is the start.
        step: u64,
        /// The Program; without one, the first that runs in that step.
        program: Option<String>,
        /// The op; without one, the first.
        op: Option<WhichOp>,
    },
    /// `random:P`: each run of a Program with this probability, at an op drawn at random.
    Random {
        /// From 0 to 1.
        share: f64,
    },
    /// `--inject-slow DEVICE:STEP:FACTOR`: from there on its passes take so many times as long.
    Slow {
        /// The device.
        device: String,
        /// As above.
        step: u64,
        /// At least 1.
        factor: f64,
    },
    /// `--inject-loss DEVICE:STEP[:PROGRAM]`: the device is gone from there on.
    Loss {
        /// The device.
        device: String,
        /// As above.
        step: u64,
        /// As above.
        program: Option<String>,
    },
    /// `--inject-silence DEVICE:STEP[:open][:forever]`: from there on the device gives no sign of life.
    Silence {
        /// The device.
        device: String,
        /// As above.
        step: u64,
        /// Whether it falls silent while it is opened: else when it has something to run.
        opening: bool,
        /// Whether its thread never comes back, too: else it does as soon as it is missed.
        forever: bool,
    },
}

impl Injection {
    /// Reads what stands behind `--inject-slow`.
    ///
    /// # Errors
    /// Something else than a device, a step and a factor.
    pub fn slow(text: &str) -> Result<Injection, Failure> {
        let wrong = || {
            Failure::input(format!("--inject-slow `{text}`: expected DEVICE:STEP:FACTOR, the factor 1 or more"))
                .hint("such as virtual:b:12:1.5")
        };
        let mut parts: Vec<&str> = text.split(':').collect();
        let factor = parts.pop().and_then(|factor| factor.parse::<f64>().ok()).ok_or_else(wrong)?;
        let step = parts.pop().and_then(|step| step.parse().ok()).ok_or_else(wrong)?;
        let device = parts.join(":");
        let sound = !device.is_empty() && (1.0..=1000.0).contains(&factor);
        sound.then_some(Injection::Slow { device, step, factor }).ok_or_else(wrong)
    }

    /// Reads what stands behind `--inject-silence`.
    ///
    /// # Errors
    /// Something else than a device and a step.
    pub fn silence(text: &str) -> Result<Injection, Failure> {
        let wrong = || {
            Failure::input(format!("--inject-silence `{text}`: expected DEVICE:STEP[:open][:forever]"))
                .hint("such as virtual:b:12, virtual:b:12:forever, or virtual:b:0:open")
        };
        let (place, forever) = text.strip_suffix(":forever").map_or((text, false), |place| (place, true));
        let (place, opening) = place.strip_suffix(":open").map_or((place, false), |place| (place, true));
        let (device, step) = place.rsplit_once(':').ok_or_else(wrong)?;
        let step = step.parse().map_err(|_| wrong())?;
        let sound = !device.is_empty();
        sound.then(|| Injection::Silence { device: device.to_owned(), step, opening, forever }).ok_or_else(wrong)
    }

    /// Reads what stands behind `--inject-loss`.
    ///
    /// # Errors
    /// Something else than a device and a step.
    pub fn loss(text: &str) -> Result<Injection, Failure> {
        let wrong = || {
            Failure::input(format!("--inject-loss `{text}`: expected DEVICE:STEP[:PROGRAM]"))
                .hint("such as virtual:b:12, or cuda:1:12:update")
        };
        let mut parts: Vec<&str> = text.split(':').collect();
        let program = parts.pop_if(|last| PROGRAMS.contains(last)).map(str::to_owned);
        let step = parts.pop().and_then(|step| step.parse().ok()).ok_or_else(wrong)?;
        let device = parts.join(":");
        (!device.is_empty()).then_some(Injection::Loss { device, step, program }).ok_or_else(wrong)
    }
}

/// An op of a Program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WhichOp {
    /// By its number, counted from 1.
    Number(u32),
    /// The first of this name.
    Named(String),
}

impl FromStr for Injection {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Injection, Failure> {
        let wrong = || {
            Failure::input(format!("--inject-oom `{text}`: expected [DEVICE/]STEP[:PROGRAM[:OP]], or random:P"))
                .hint("such as 12, 12:backward, 12:update:3, virtual:b/12:norm, 0:load, or random:0.01")
        };
        if let Some(share) = text.strip_prefix("random:") {
            let share: f64 = share.parse().map_err(|_| wrong())?;
            return (share > 0.0 && share <= 1.0).then_some(Injection::Random { share }).ok_or_else(wrong);
        }
        let (device, place) = match text.rsplit_once('/') {
            Some((device, place)) => (Some(device.to_owned()), place),
            None => (None, text),
        };
        let mut parts = place.split(':');
        let step = parts.next().unwrap_or_default().parse().map_err(|_| wrong())?;
        let program = parts.next().map(str::to_owned);
        if let Some(program) = program.as_deref().filter(|name| !PROGRAMS.contains(name)) {
            return Err(Failure::input(format!("--inject-oom `{text}`: there is no Program `{program}`"))
                .hint(format!("Programs are {}", PROGRAMS.join(", "))));
        }
        let op = match parts.next() {
            None => None,
            Some("") => return Err(wrong()),
            Some(op) => Some(match op.parse::<u32>() {
                Ok(0) => return Err(wrong()),
                Ok(number) => WhichOp::Number(number),
                Err(_) => WhichOp::Named(op.to_owned()),
            }),
        };
        if parts.next().is_some() { Err(wrong()) } else { Ok(Injection::At { device, step, program, op }) }
    }
}

/// As it was typed.
impl fmt::Display for Injection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let behind = |program: &Option<String>| program.as_ref().map_or(String::new(), |program| format!(":{program}"));
        match self {
            Injection::At { device, step, program, op } => {
                let device = device.as_ref().map_or(String::new(), |device| format!("{device}/"));
                let op = match op {
                    None => String::new(),
                    Some(WhichOp::Number(number)) => format!(":{number}"),
                    Some(WhichOp::Named(name)) => format!(":{name}"),
                };
                write!(f, "--inject-oom {device}{step}{}{op}", behind(program))
            }
            Injection::Random { share } => write!(f, "--inject-oom random:{share}"),
            Injection::Slow { device, step, factor } => write!(f, "--inject-slow {device}:{step}:{factor}"),
            Injection::Loss { device, step, program } => write!(f, "--inject-loss {device}:{step}{}", behind(program)),
            Injection::Silence { device, step, opening, forever } => {
                let (opening, forever) = (if *opening { ":open" } else { "" }, if *forever { ":forever" } else { "" });
                write!(f, "--inject-silence {device}:{step}{opening}{forever}")
            }
        }
    }
}

/// What there is in a run that something can happen to.
pub struct Stage<'a> {
    /// The devices that take part, in the order of ranks, with their Programs.
    pub devices: Vec<(&'a str, &'a ProgramSet)>,
    /// The one that evaluates beside them.
    pub evaluator: Option<(&'a str, &'a ProgramSet)>,
    /// Those that take no part: they could take over from one that works alone.
    pub left_out: &'a [LeftOut],
    /// Steps that were done before.
    pub done: u64,
    /// Steps in all, where that is known.
    pub steps: Option<u64>,
}

impl Injection {
    /// That this can happen in a run: its device, step, Program and op are there.
    ///
    /// # Errors
    /// What is not there, with what there is.
    pub fn check(&self, run: &Stage) -> Result<(), Failure> {
        let wrong = |what: String| Failure::input(format!("{self}: {what}"));
        let (device, step, program) = match self {
            Injection::Random { .. } => return Ok(()),
            Injection::At { device, step, program, .. } => (device.as_ref(), *step, program.as_deref()),
            // One that is opened, or lives elsewhere, is missed by the run.
            Injection::Silence { device, opening: false, .. }
                if run.devices.len() == 1
                    && run.left_out.is_empty()
                    && run.evaluator.is_none_or(|(name, _)| name != device)
                    && !device.contains('/') =>
            {
                return Err(wrong("a device that works alone is missed by nobody".to_owned()));
            }
            Injection::Slow { device, step, .. } => (Some(device), *step, None),
            Injection::Silence { device, step, opening, .. } => (Some(device), *step, opening.then_some(OPEN)),
            Injection::Loss { device, step, program } => (Some(device), *step, program.as_deref()),
        };
        let all = || run.devices.iter().chain(&run.evaluator);
        let names = || all().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        let of = |device: &String| all().find(|(name, _)| name == device);
        let (_, set) = match device {
            None => run.devices.first(),
            Some(device) => of(device),
        }
        .ok_or_else(|| {
            let device = device.map_or("", String::as_str);
            let the_devices = format!("the devices are {}", names());
            match run.left_out.iter().find(|out| out.device == device) {
                None => wrong(format!("no device `{device}` works on this run")).hint(the_devices),
                Some(LeftOut { why, used_by, .. }) => {
                    let used = used_by.iter().map(|settings| format!("it would be used with {settings}"));
                    let what = wrong(format!("`{device}` is left out of this run: {why}"));
                    used.chain([the_devices]).fold(what, Failure::hint)
                }
            }
        })?;
        if let Some(steps) = run.steps.filter(|steps| step > *steps) {
            return Err(wrong(format!("the run has {}", counted(steps, "step"))));
        }
        // From a step on means now, where that step was done long ago.
        let once = matches!(self, Injection::At { .. });
        if once && step > 0 && step < run.done {
            let goes_on = format!("the run goes on after step {}", run.done);
            return Err(wrong(goes_on).hint("what is read before that is step 0, the start"));
        }
        if let Some((_, set)) = run.evaluator.filter(|(name, _)| device.is_some_and(|device| name == device)) {
            return self.check_beside(set);
        }
        let Some(program) = program else { return Ok(()) };
        if program == OPEN {
            return self.check_open();
        }
        if program == REPLAN {
            return match self {
                Injection::At { op: Some(_), .. } => {
                    Err(wrong(format!("`{REPLAN}` is refused as a whole: name no op")))
                }
                _ => Ok(()),
            };
        }
        let Some(found) = set.program(program) else {
            let here = set.programs.iter().map(|program| &*program.name).filter(|name| PROGRAMS.contains(name));
            let here: Vec<&str> = here.chain([REPLAN]).collect();
            return Err(wrong(format!("this run has no Program `{program}`"))
                .hint(format!("its Programs are {}", here.join(", "))));
        };
        if once && (step == 0) != AT_THE_START.contains(&program) {
            let start = AT_THE_START.join(", ");
            return Err(wrong(format!("`{program}` does not run in step {step}"))
                .hint(format!("step 0 is the start: {start} run in it and in no other step")));
        }
        if let Injection::At { op: Some(WhichOp::Named(op)), .. } = self {
            let names = names_of(set, program);
            // Another recipe moves tensors, and computes in the backward pass what is now kept.
            let moved = ["transfer_start", "transfer_wait", "collective_start", "collective_wait"];
            let again = if program == "backward" { names_of(set, "forward") } else { Vec::new() };
            if !names.iter().chain(&moved).chain(&again).any(|name| name == op) {
                return Err(wrong(format!("`{}` has no op `{op}`", found.name))
                    .hint(format!("its ops are {}", names.join(", "))));
            }
        }
        Ok(())
    }

    fn check_open(&self) -> Result<(), Failure> {
        match self {
            Injection::Loss { step: 0, .. } | Injection::Silence { step: 0, .. } => Ok(()),
            Injection::Loss { .. } | Injection::Silence { .. } => {
                Err(Failure::input(format!("{self}: devices are opened in step 0, the start")).hint("name step 0"))
            }
            _ => Err(Failure::input(format!(
                "{self}: a device is never refused while it is opened, only lost or silent"
            ))
            .hint("such as --inject-loss virtual:b:0:open")),
        }
    }

    /// The same of a device that evaluates beside the others, under the one recipe that it has.
    fn check_beside(&self, set: &ProgramSet) -> Result<(), Failure> {
        let wrong = |what: String| Failure::input(format!("{self}: a device that only evaluates {what}"));
        let (step, program, op) = match self {
            Injection::Slow { .. } => return Err(wrong("has no passes to slow down".to_owned())),
            Injection::Silence { opening: true, .. } => return self.check_open(),
            Injection::Random { .. } | Injection::Silence { .. } => return Ok(()),
            Injection::At { step, program, op, .. } => (Some(*step), program, op.as_ref()),
            Injection::Loss { program, .. } => (None, program, None),
        };
        let Some(program) = program.as_deref() else { return Ok(()) };
        if program == OPEN {
            return self.check_open();
        }
        if !BESIDE.contains(&program) {
            return Err(wrong(format!("runs no `{program}`")).hint(format!("it runs {}", BESIDE.join(", "))));
        }
        if let Some(step) = step.filter(|step| (*step == 0) != AT_THE_START.contains(&program)) {
            let start = "step 0 is the start: load runs in it and in no other step";
            return Err(wrong(format!("does not run `{program}` in step {step}")).hint(start));
        }
        let (names, length) = (names_of(set, program), set.program(program).map_or(0, Program::length));
        match op {
            Some(WhichOp::Number(number)) if *number as usize > length => {
                Err(wrong(format!("has no op {number} in `{program}`")).hint(format!("it has {length}")))
            }
            Some(WhichOp::Named(op)) if !names.contains(&&**op) => {
                Err(wrong(format!("has no op `{op}` in `{program}`")).hint(format!("its ops are {}", names.join(", "))))
            }
            _ => Ok(()),
        }
    }
}

/// The names of a Program's ops, each once, as they come.
fn names_of(set: &ProgramSet, program: &str) -> Vec<&'static str> {
    let blocks = set.program(program).into_iter().flat_map(|program| &program.blocks);
    let mut names = Vec::new();
    for name in blocks.flat_map(|block| &block.ops).map(Op::name) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// What was asked for, and whether it has happened. It outlives the devices: what happened to one that was opened anew does
/// not happen once more.
#[derive(Debug)]
pub struct Asked {
    /// What shall happen.
    pub what: Injection,
    happened: AtomicBool,
}

impl Asked {
    /// Something that has not happened yet.
    pub fn new(what: Injection) -> Arc<Asked> {
        Arc::new(Asked { what, happened: AtomicBool::new(false) })
    }

    /// Whether it has.
    pub fn has_happened(&self) -> bool {
        self.happened.load(Ordering::Relaxed)
    }

    fn happens(&self) {
        self.happened.store(true, Ordering::Relaxed);
    }
}

/// What is still to come for one device.
#[derive(Debug, Default)]
pub struct Rehearsal {
    once: Vec<(Arc<Asked>, At)>,
    random: Option<(Arc<Asked>, f64)>,
    seed: u64,
    step: u64,
    runs: u64,
    /// The name of the device, and from where on it is gone.
    device: String,
    lost_at: Option<(Arc<Asked>, u64, Option<String>)>,
    /// From which steps on it is so much slower, the last one at the end.
    slow_from: Vec<(Arc<Asked>, u64, f64)>,
    silent_from: Option<(Arc<Asked>, Silence)>,
    /// Its signs of life, where others would miss it.
    pulse: Option<Arc<Pulse>>,
}

/// From where on a device is silent, see [`Injection::Silence`].
#[derive(Debug)]
struct Silence {
    step: u64,
    opening: bool,
    forever: bool,
}

/// A place in a run.
#[derive(Debug)]
struct At {
    step: u64,
    program: Option<String>,
    op: Option<WhichOp>,
}

impl Rehearsal {
    /// What was asked for of the device of this rank and name, and has not happened; `seed` draws the random ones, and
    /// `pulse` is what others know of its life.
    pub fn new(all: &[Arc<Asked>], seed: u64, rank: u64, device: &str, pulse: Option<Arc<Pulse>>) -> Rehearsal {
        let seed = if rank == 0 { seed } else { mix(seed ^ mix(rank)) };
        let mut rehearsal = Rehearsal { seed, device: device.to_owned(), pulse, ..Rehearsal::default() };
        for asked in all {
            let this = Arc::clone(asked);
            match &asked.what {
                Injection::At { device: of, step, program, op } => {
                    let here = of.as_deref().map_or(rank == 0, |of| of == device);
                    if here && !asked.has_happened() {
                        let at = At { step: *step, program: program.clone(), op: op.clone() };
                        rehearsal.once.push((this, at));
                    }
                }
                Injection::Random { share } => {
                    if rehearsal.random.as_ref().is_none_or(|(_, known)| share > known) {
                        rehearsal.random = Some((this, *share));
                    }
                }
                Injection::Slow { device: of, step, factor } => {
                    if of == device {
                        rehearsal.slow_from.push((this, *step, *factor));
                        rehearsal.slow_from.sort_by_key(|(_, step, _)| *step);
                    }
                }
                Injection::Loss { device: of, step, program } => {
                    if of == device {
                        rehearsal.lost_at = Some((this, *step, program.clone()));
                    }
                }
                Injection::Silence { device: of, step, opening, forever } => {
                    if of == device {
                        let silence = Silence { step: *step, opening: *opening, forever: *forever };
                        rehearsal.silent_from = Some((this, silence));
                    }
                }
            }
        }
        rehearsal
    }

    /// Whether the device is gone when this Program is to run; one that falls silent is, when others have missed it.
    ///
    /// # Errors
    /// It is.
    pub fn check_presence(&self, program: &str) -> Result<(), DeviceError> {
        let here = |silence: &Silence| self.step >= silence.step && silence.opening == (program == OPEN);
        let silent = self.silent_from.as_ref().filter(|(_, silence)| here(silence));
        if let (Some((asked, silence)), Some(pulse)) = (silent, &self.pulse)
            && pulse.is_watched()
        {
            // Before it does: it may never come back to say so.
            asked.happens();
            if pulse.stop(silence.forever) {
                return Err(DeviceError::Lost { device: self.device.clone(), why: String::new() });
            }
        }
        let here = |(asked, step, of): &&(Arc<Asked>, u64, Option<String>)| {
            asked.has_happened()
                || self.step > *step
                || self.step == *step && of.as_deref().is_none_or(|of| of == program)
        };
        let Some((asked, ..)) = self.lost_at.as_ref().filter(here) else { return Ok(()) };
        asked.happens();
        Err(DeviceError::Lost { device: self.device.clone(), why: String::new() })
    }

    /// What happens to a device of this name while it is opened.
    ///
    /// # Errors
    /// It is gone.
    pub(crate) fn opening(all: &[Arc<Asked>], device: &str, pulse: Option<Arc<Pulse>>) -> Result<(), DeviceError> {
        Rehearsal::new(all, 0, 0, device, pulse).check_presence(OPEN)
    }

    /// From now on this step is being done.
    pub fn at_step(&mut self, step: u64) {
        self.step = step;
    }

    /// Whether nothing will ever be refused any more.
    pub fn is_over(&self) -> bool {
        let gone = self.lost_at.is_some() || self.silent_from.is_some();
        self.once.is_empty() && self.random.is_none() && !gone && self.slow_from.is_empty()
    }

    /// How many times as long as they do the passes of the present step shall take.
    pub fn slower(&self) -> f64 {
        let Some((asked, _, factor)) = self.slow_from.iter().rfind(|(_, step, _)| self.step >= *step) else {
            return 1.0;
        };
        asked.happens();
        *factor
    }

    /// Whether the next move to another plan is refused.
    pub fn refuses_replan(&mut self) -> bool {
        let step = self.step;
        self.happens_once(|at| at.step == step && at.program.as_deref() == Some(REPLAN)) || {
            let drawn = self.drawn(1).is_some();
            drawn && self.happens_by_chance()
        }
    }

    /// The op (of `length`) at which this run of a Program is refused by chance.
    fn drawn(&mut self, length: u32) -> Option<u32> {
        let share = self.random.as_ref()?.1;
        self.runs += 1;
        let number = mix(mix(self.seed) ^ self.runs);
        let unit = (number >> 11) as f64 / (1u64 << 53) as f64;
        (unit < share).then(|| 1 + (mix(number) % u64::from(length.max(1))) as u32)
    }

    fn happens_by_chance(&self) -> bool {
        self.random.iter().for_each(|(asked, _)| asked.happens());
        true
    }

    /// Whether one of these places is here. Then it is done with.
    fn happens_once(&mut self, here: impl Fn(&At) -> bool) -> bool {
        let Some(place) = self.once.iter().position(|(_, at)| here(at)) else { return false };
        self.once.remove(place).0.happens();
        true
    }

    /// An observer of one run of a Program that refuses where it must, and passes the rest on.
    pub fn observer<'a>(&'a mut self, program: &'a str, length: u32, inner: &'a mut dyn Observer) -> Rehearsed<'a> {
        let drawn = self.drawn(length);
        Rehearsed { rehearsal: self, program, drawn, inner }
    }

    fn refuses(&mut self, program: &str, tick: u32, op: &str) -> bool {
        let step = self.step;
        self.happens_once(|at| {
            at.step == step
                && at.program.as_deref().is_none_or(|asked| asked == program)
                && match &at.op {
                    None => true,
                    Some(WhichOp::Number(number)) => *number == tick,
                    Some(WhichOp::Named(name)) => name == op,
                }
        })
    }
}

/// See [`Rehearsal::observer`].
pub struct Rehearsed<'a> {
    rehearsal: &'a mut Rehearsal,
    program: &'a str,
    drawn: Option<u32>,
    inner: &'a mut dyn Observer,
}

impl Observer for Rehearsed<'_> {
    fn before(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) -> Result<(), DeviceError> {
        if self.drawn == Some(tick) && self.rehearsal.happens_by_chance()
            || self.rehearsal.refuses(self.program, tick, op.name())
        {
            let program = self.program.to_owned();
            return Err(DeviceError::Refused { program, tick, op: op.name() });
        }
        self.inner.before(tick, op, memory)
    }

    fn after(&mut self, tick: u32, op: &Op, memory: &mut dyn Memory) {
        self.inner.after(tick, op, memory);
    }

    fn one_at_a_time(&self) -> bool {
        self.inner.one_at_a_time()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_as_they_are_written() {
        let at = |step, program: Option<&str>, op| Injection::At {
            device: None,
            step,
            program: program.map(str::to_owned),
            op,
        };
        assert_eq!("12".parse(), Ok(at(12, None, None)));
        assert_eq!("12:backward".parse(), Ok(at(12, Some("backward"), None)));
        assert_eq!("3:update:7".parse(), Ok(at(3, Some("update"), Some(WhichOp::Number(7)))));
        assert_eq!("3:forward:product".parse(), Ok(at(3, Some("forward"), Some(WhichOp::Named("product".into())))));
        assert_eq!("random:0.25".parse(), Ok(Injection::Random { share: 0.25 }));
        for wrong in ["", "x", "-1", "1:sideways", "1:update:0", "1:update:", "1:update:2:3", "random:0", "random:2"] {
            assert!(wrong.parse::<Injection>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_refusal_happens_once_and_only_at_its_place() {
        let all: Vec<Arc<Asked>> =
            ["2:backward:3", "2:re-plan", "4"].iter().map(|text| Asked::new(text.parse().unwrap())).collect();
        let mut rehearsal = Rehearsal::new(&all, 1, 0, "cpu", None);
        rehearsal.at_step(1);
        assert!(!rehearsal.refuses("backward", 3, "add") && !rehearsal.refuses_replan());
        rehearsal.at_step(2);
        assert!(!rehearsal.refuses("forward", 3, "add") && !rehearsal.refuses("backward", 2, "add"));
        assert!(rehearsal.refuses("backward", 3, "add") && !rehearsal.refuses("backward", 3, "add"));
        assert!(rehearsal.refuses_replan() && !rehearsal.refuses_replan());
        rehearsal.at_step(4);
        assert!(!rehearsal.is_over() && !all[2].has_happened());
        assert!(rehearsal.refuses("begin", 1, "fill") && rehearsal.is_over());
        assert!(all.iter().all(|asked| asked.has_happened()));
        // The device is opened anew: what has happened to it does not happen again.
        assert!(Rehearsal::new(&all, 1, 0, "cpu", None).is_over());
    }

    #[test]
    fn chance_refuses_about_the_share_that_was_asked_for_and_repeats_itself() {
        let draw = |seed| {
            let mut rehearsal = Rehearsal::new(&[Asked::new(Injection::Random { share: 0.1 })], seed, 0, "cpu", None);
            (0..2000).map(|_| rehearsal.drawn(50)).collect::<Vec<_>>()
        };
        let drawn = draw(1);
        let hits: Vec<u32> = drawn.iter().flatten().copied().collect();
        assert!((120..280).contains(&hits.len()), "{}", hits.len());
        assert!(hits.iter().all(|tick| (1..=50).contains(tick)));
        assert_eq!(drawn, draw(1));
        assert_ne!(drawn, draw(2));
    }
}
