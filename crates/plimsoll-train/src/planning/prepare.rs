//! What a training run needs before its device is opened: model, data, and a plan with measured charges.

use crate::session::checkpoint::CheckpointInfo;
use crate::session::engine::Engine;
use crate::session::spaces::ModelSource;
use crate::session::trouble::Trouble;
use crate::team::open::settle_gpu;
// For the far end, which has no plan.
use crate::config::{LoraSection, RunFile, TeamOf};
use crate::data::{self, DataSpec, Dataset};
use crate::files::AdapterDir;
use crate::planning::charges::{
    NEAR_BYTES, WAVER_BYTES, charge_team, charges, charges_less, one_of, programs_bytes, settle_charges, with_programs,
};
use crate::resolve::{
    Model, Resolved, Work, disturbed, evaluations, host, learned, plan_of_what, question, staging, team_question,
    write_example,
};
use plimsoll_core::{Algorithms, Bytes, DeviceKind, DeviceSpec, Failure, Member, Plan, Recipe, Sharing};
use plimsoll_device::{calibration, process};
use plimsoll_plan::search::{Answer, Question, plan_of, search};
use plimsoll_plan::team::{
    self, Evaluations, Only, TeamAnswer, TeamQuestion, plan_of_team, say_what_would_use, share_out, share_out_if_fits,
};
use plimsoll_program::{ProgramSet, Share};
use std::ops::ControlFlow;
use std::path::PathBuf;

/// What a run was planned with before, and is planned with again where it still fits.
#[derive(Clone, Debug, PartialEq)]
pub struct Known {
    /// The recipe of its first device.
    pub recipe: Recipe,
    /// The charges of that.
    pub charges_bytes: Bytes,
    /// What the products of its GPU were done with.
    pub algorithms: Option<Algorithms>,
    /// How its team shared the work.
    pub sharing: Option<Sharing>,
    /// What each device of the team did; none for one device.
    pub team: Vec<Member>,
}

impl Known {
    /// What a checkpoint says.
    pub fn of(info: &CheckpointInfo) -> Known {
        Known {
            recipe: info.recipe.clone(),
            charges_bytes: info.charges_bytes,
            algorithms: info.algorithms.clone(),
            sharing: info.sharing,
            team: info.team.clone(),
        }
    }

    /// What a plan says.
    pub fn of_plan(plan: &Plan) -> Option<Known> {
        Some(Known {
            recipe: plan.recipe.clone(),
            charges_bytes: plan.devices.first()?.charges_bytes,
            algorithms: plan.algorithms.clone(),
            sharing: plan.sharing,
            team: plan.team.clone(),
        })
    }
}

/// The part of a run that one device does.
#[derive(Clone, Debug)]
pub struct Part {
    /// The device; its charges are those that were planned with.
    pub device: DeviceSpec,
    /// What of each step is its own.
    pub share: Share,
    /// Sequences of each step that it computes.
    pub sequences: u64,
    /// Its plan, as if it were alone with its share.
    pub answer: Answer,
    /// What its products were done with before, where it is a GPU and the run is not new.
    pub algorithms: Option<Algorithms>,
}

impl Part {
    /// Its device with its Programs: for rehearsals.
    pub(crate) fn on_stage(&self) -> (&str, &ProgramSet) {
        (&self.device.name, &self.answer.set)
    }

    /// What to ask the planner about it.
    ///
    /// # Errors
    /// Pins that do not go with the model.
    pub fn question<'a>(&'a self, run: &RunFile, model: &'a Model) -> Result<Question<'a>, Failure> {
        question_of(run, model, &self.device, &self.share, self.sequences)
    }
}

/// What to ask the planner about a device's share of a training run.
///
/// # Errors
/// Pins that do not go with the model.
pub(crate) fn question_of<'a>(
    run: &RunFile,
    model: &'a Model,
    device: &'a DeviceSpec,
    share: &Share,
    sequences: u64,
) -> Result<Question<'a>, Failure> {
    Ok(question(run, model, device, Work::Train)?.of_share(share, sequences))
}

/// The plan of a run: the whole, and the part of each device in the order of ranks.
#[derive(Clone, Debug)]
pub struct Planned {
    /// As it is written down.
    pub plan: Plan,
    /// One for each device that takes part.
    pub parts: Vec<Part>,
    /// What a device beside them does: it evaluates.
    pub evaluator: Option<Part>,
    /// The load line of the host that all have together.
    pub host: Bytes,
}

impl Planned {
    /// One device does it all.
    fn alone(device: &DeviceSpec, run: &RunFile, answer: Answer, known: Option<&Known>) -> Planned {
        let (device, share, sequences) = (device.clone(), Share::ALONE, run.batch_sequences());
        let algorithms = known.and_then(|known| known.algorithms.clone());
        let plan = answer.plan.clone();
        let host = plan.host.budget_bytes;
        Planned { plan, parts: vec![Part { device, share, sequences, answer, algorithms }], evaluator: None, host }
    }

    /// A device that was planned with less than its load line has this one.
    pub(crate) fn has_line(&mut self, name: &str, budget: Bytes) {
        for part in self.parts.iter_mut().chain(&mut self.evaluator).filter(|part| part.device.name == name) {
            part.device.budget = budget;
            part.answer.plan.devices[0].budget_bytes = budget;
        }
        let devices = self.plan.devices.iter_mut().filter(|device| device.name == name);
        devices.for_each(|device| device.budget_bytes = budget);
    }

    /// All that devices are opened for.
    fn all(&mut self) -> impl Iterator<Item = &mut Part> {
        self.parts.iter_mut().chain(&mut self.evaluator)
    }
}

/// All that a run needs, before its device is opened.
pub struct Prepared {
    /// The run file, with the paths of the example's files where it is the example's.
    pub run: RunFile,
    /// Model and device; the device's charges are measured.
    pub resolved: Resolved,
    /// What is trained on.
    pub train: Dataset,
    /// What is evaluated on.
    pub eval: Option<Dataset>,
    /// The plan.
    pub planned: Planned,
    /// Whether making tokens has left this process with more than one is charged with that finds them made.
    pub left_over: bool,
}

/// Opens model and data and plans. The recipe of `known` is used again where it still fits.
///
/// # Errors
/// What is wrong with the run file, the model or the data. A plan that does not fit is none.
pub fn prepare(mut run: RunFile, known: Option<&Known>) -> Result<Prepared, Failure> {
    write_example(&mut run)?;
    // What needs no rates is said before any are measured.
    let model = Model::open(&run)?;
    model.check_weights(&run)?;
    for patterns in [&run.data.train, &run.data.eval].into_iter().filter(|patterns| !patterns.is_empty()) {
        data::files(patterns, run.data.format)?;
    }
    let mut resolved = Resolved::to_run(&run, model, Work::Train)?;
    run.decide_precision(resolved.device.kind);
    let open = |patterns: &[String]| dataset(&run, &resolved.model, patterns, resolved.device.threads as usize);
    let before = charges(run.batch_sequences(), u64::from(run.data.sequence));
    let train = open(&run.data.train)?;
    let eval = if run.data.eval.is_empty() { None } else { Some(open(&run.data.eval)?) };
    let left_over = charges(run.batch_sequences(), u64::from(run.data.sequence)) > before;
    let mut planned = if resolved.others.is_empty() {
        let answer = planned_alone(&mut resolved, &run, known)?;
        Planned::alone(&resolved.device, &run, answer, known)
    } else {
        planned_team(&mut resolved, &run, known, evaluations(&run, eval.as_ref().map(Dataset::rows)))?
    };
    if !planned.plan.fits {
        // What a team held is nothing that a processor is charged with.
        let known = known.filter(|known| known.team.is_empty());
        let on_cpu = resolved.on_cpu(&run, &planned.plan, |resolved, run| planned_alone(resolved, run, known))?;
        planned = on_cpu.map_or(planned, |answer| Planned::alone(&resolved.device, &run, answer, known));
    }
    planned.plan.learned = planned.parts.iter().find_map(|part| learned(&part.device));
    planned.plan.disturbed = disturbed();
    planned.plan.of = Some(plan_of_what(&run, &resolved.model.config));
    if planned.plan.fits {
        run.decide_rungs(&planned.plan.rungs);
    }
    if let Some(adapter) = &resolved.model.adapter {
        run.lora = LoraSection { dropout: run.lora.dropout, ..adapter_section(adapter) };
    }
    Ok(Prepared { run, resolved, train, eval, planned, left_over })
}

/// The plan for the device that there is, whose charges are measured now.
fn planned_alone(resolved: &mut Resolved, run: &RunFile, known: Option<&Known>) -> Result<Answer, Failure> {
    settle_charges(&mut resolved.device, run.batch_sequences(), u64::from(run.data.sequence));
    let measured = resolved.device.charges;
    let near = charges_less(NEAR_BYTES, run.batch_sequences(), u64::from(run.data.sequence));
    let before = known.map(|known| known.charges_bytes).filter(|&before| measured <= before + WAVER_BYTES);
    match known {
        // Nobody has measured that GPU here, but the run itself has.
        Some(known) if resolved.device.kind == DeviceKind::Cuda && !resolved.device.charges_measured => {
            (resolved.device.charges, resolved.device.charges_measured) = (known.charges_bytes, true);
        }
        _ => resolved.device.charges = before.unwrap_or(measured),
    }
    let ask = |resolved: &Resolved| -> Result<Answer, Failure> {
        let question = resolved.question(run, Work::Train)?;
        let again = known.map(|known| &known.recipe).filter(|recipe| recipe.micro_batch > 0);
        let again = again.filter(|recipe| is_of(recipe, None, run, &resolved.model));
        let again = again.map(|recipe| plan_of(&question, recipe)).filter(|answer| answer.plan.fits);
        Ok(again.unwrap_or_else(|| search(&question)))
    };
    let mut answer = ask(resolved)?;
    if settle_gpu(&mut resolved.device, &answer, run.scratch())? {
        answer = ask(resolved)?;
    }
    if resolved.device.kind == DeviceKind::Cuda || before.is_some() {
        return Ok(answer);
    }
    let answer = with_own_programs(resolved, run, answer)?;
    if answer.plan.fits || near >= measured || !resolved.device.in_process() {
        return Ok(answer);
    }
    let refused = resolved.device.charges;
    resolved.device.charges = near;
    let found = ask(resolved)?;
    let found = with_own_programs(resolved, run, found)?;
    if found.plan.fits {
        return Ok(found);
    }
    resolved.device.charges = refused;
    Ok(answer)
}

/// The same plan with its Programs charged, or another that they leave room for.
fn with_own_programs(resolved: &mut Resolved, run: &RunFile, answer: Answer) -> Result<Answer, Failure> {
    let mut found = Some(answer);
    with_programs(std::slice::from_mut(&mut resolved.device), |devices| {
        let search = || Ok::<_, Failure>(search(&question(run, &resolved.model, &devices[0], Work::Train)?));
        let answer = found.take().map_or_else(search, Ok)?;
        let programs = answer.plan.fits.then(|| programs_bytes([&answer.set]));
        Ok((answer, programs))
    })
}

/// The plan of several devices, whose charges are measured now: each could hold what this process holds beside arenas.
fn planned_team(
    resolved: &mut Resolved,
    run: &RunFile,
    known: Option<&Known>,
    evaluations: Option<Evaluations>,
) -> Result<Planned, Failure> {
    let mut devices = vec![resolved.device.clone()];
    devices.extend(resolved.others.iter().cloned());
    for device in &mut devices {
        settle_charges(device, run.batch_sequences(), u64::from(run.data.sequence));
    }
    let alone: Vec<Bytes> = devices.iter().map(|device| device.charges).collect();
    charge_team(&mut devices, run);
    let before = known.map(|known| known.charges_bytes);
    for device in devices.iter_mut().filter(|device| device.in_process()) {
        device.charges = before.filter(|&before| device.charges <= before + WAVER_BYTES).unwrap_or(device.charges);
    }
    let bare: Vec<Bytes> = devices.iter().map(|device| device.charges).collect();
    let others = staging(&resolved.others);
    let host = host(run, &resolved.device)?.budget.saturating_sub(others);
    let mut counted = Bytes::ZERO;
    loop {
        let mut planned = share_among(run, &resolved.model, &devices, host, known, None, evaluations)?;
        let mut settled = false;
        for part in planned.all() {
            if settle_gpu(&mut part.device, &part.answer, run.scratch())? {
                let device = devices.iter_mut().find(|device| device.name == part.device.name);
                *device.expect("it is one of them") = part.device.clone();
                settled = true;
            }
        }
        // The Programs of all devices are in this process.
        let programs = programs_bytes(planned.all().map(|part| &part.answer.set));
        if !settled && (before.is_some() || !planned.plan.fits || programs <= counted) {
            if !planned.plan.fits && run.run.team != TeamOf::All {
                let by_one = one_of(&mut devices, &alone, |devices| {
                    let only = Some(Only::Sharing(Sharing::Batch));
                    let planned = share_among(run, &resolved.model, devices, host, None, only, None)?;
                    let [part] = &planned.parts[..] else { return Ok(None) };
                    let (name, seconds) = (part.device.name.clone(), planned.plan.predicted.step_seconds);
                    let programs = programs_bytes([&part.answer.set]);
                    Ok(planned.plan.fits.then_some((planned, name, seconds, programs)))
                })?;
                planned = by_one.unwrap_or(planned);
            }
            // Who goes on has the team that it had.
            if known.is_none() {
                let team = team_of(run, &resolved.model, &devices, host)?;
                say_what_would_use(&team, &run.devices(), &mut planned.plan);
            }
            // Who is left out may be needed later.
            resolved.device = devices.remove(0);
            resolved.others = devices;
            return Ok(planned);
        }
        counted = counted.max(programs);
        for (device, bare) in devices.iter_mut().zip(&bare).filter(|(device, _)| device.kind != DeviceKind::Cuda) {
            device.charges = *bare + counted;
        }
    }
}

/// Shares a run out among devices; in the way of `known` where that is a way of these devices and still fits. `only` says that
/// no other way comes into question, and `evaluations` may be made by a device that is left out.
///
/// # Errors
/// Pins that do not go with the model.
pub(crate) fn share_among(
    run: &RunFile,
    model: &Model,
    devices: &[DeviceSpec],
    host: Bytes,
    known: Option<&Known>,
    only: Option<Only>,
    evaluations: Option<Evaluations>,
) -> Result<Planned, Failure> {
    let team = TeamQuestion { only, evaluations, ..team_of(run, model, devices, host)? };
    let again = known.filter(|known| !known.team.is_empty()).map(|known| &known.team);
    let again = again.filter(|team| team.iter().all(|member| devices.iter().any(|d| d.name == member.device)));
    let again = again.filter(|team| team.iter().all(|member| is_of(&member.recipe, member.layers, run, model)));
    let again = again.map(|members| plan_of_team(&team, members)).filter(|answer| answer.plan.fits);
    let answer = again.unwrap_or_else(|| share_out(&team));
    Ok(planned_for(devices, host, known, answer))
}

/// The same for a run that is under way, beside arenas that are full: nothing where it does not fit, and what planning took
/// goes back.
///
/// # Errors
/// As [`share_among`].
pub(crate) fn share_if_fits(
    run: &RunFile,
    model: &Model,
    devices: &[DeviceSpec],
    host: Bytes,
    only: Option<Only>,
) -> Result<Option<Planned>, Failure> {
    let team = TeamQuestion { only, ..team_of(run, model, devices, host)? };
    let planned = share_out_if_fits(&team).map(|answer| planned_for(devices, host, None, answer));
    process::give_back();
    Ok(planned)
}

fn planned_for(devices: &[DeviceSpec], host: Bytes, known: Option<&Known>, answer: TeamAnswer) -> Planned {
    let TeamAnswer { parts, plan, evaluator } = answer;
    let opened = |part: team::Part| {
        let device = devices[part.device].clone();
        let before = known.and_then(|known| known.team.iter().find(|member| member.device == device.name));
        let algorithms = before.and_then(|member| member.algorithms.clone());
        Part { device, share: part.share, sequences: part.sequences, answer: part.answer, algorithms }
    };
    Planned { parts: parts.into_iter().map(opened).collect(), plan, evaluator: evaluator.map(opened), host }
}

/// What to ask the planner about these devices, beside such a host.
fn team_of<'a>(
    run: &RunFile,
    model: &'a Model,
    devices: &'a [DeviceSpec],
    host: Bytes,
) -> Result<TeamQuestion<'a>, Failure> {
    let mut team = TeamQuestion { host, ..team_question(run, model, devices)? };
    // What is free now is what this run leaves.
    let beside = team.devices.iter_mut().filter(|question| question.host.budget > Bytes::ZERO);
    beside.for_each(|question| question.host.budget = host);
    Ok(team)
}

/// Adapters that are trained on are what they were.
fn adapter_section(adapter: &AdapterDir) -> LoraSection {
    let targets = adapter.targets.iter().map(|target| target.name().to_owned()).collect();
    LoraSection { rank: adapter.rank as u32, alpha: adapter.alpha, dropout: 0.0, targets }
}

/// Whether a recipe, of a stage of a pipeline perhaps, or of a device that computes no sequences, can be one of this run: its
/// file may have been changed since.
fn is_of(recipe: &Recipe, layers: Option<[u64; 2]>, run: &RunFile, model: &Model) -> bool {
    let [first, end] = layers.unwrap_or([0, model.config.layers]);
    let all = &run.recipe.recompute;
    let pinned = all.get(first as usize..end as usize).unwrap_or(all);
    let as_pinned = |level| pinned.is_empty() || pinned.len() == 1 && pinned[0] == level;
    u64::from(recipe.micro_batch) <= run.batch_sequences()
        && recipe.recompute.len() as u64 == end.saturating_sub(first)
        && run.recipe.micro_batch.is_none_or(|pin| pin == recipe.micro_batch || recipe.micro_batch == 0)
        && run.train.rungs.as_ref().is_none_or(|rungs| *rungs == recipe.rungs)
        && (pinned == recipe.recompute || recipe.recompute.iter().all(|&level| as_pinned(level)))
}

/// The rows of some files, as a run file says.
///
/// # Errors
/// What is wrong with the files or the tokenizer.
pub fn dataset(run: &RunFile, model: &Model, patterns: &[String], threads: usize) -> Result<Dataset, Failure> {
    let end_token = model.folder().map(data::end_token).transpose()?.flatten();
    let spec = DataSpec {
        patterns: patterns.to_vec(),
        format: run.data.format,
        sequence: u64::from(run.data.sequence),
        pack: run.data.pack,
        long: run.data.long,
        vocab: model.config.vocab,
        end_token,
    };
    let go_on = &mut |_, _| ControlFlow::Continue(());
    Ok(Dataset::open(&spec, model.tokenizer().as_deref(), &token_cache(), threads, go_on)?)
}

/// The first weights, from files or drawn.
///
/// # Errors
/// Files that cannot be read, or hold no numbers.
pub(crate) fn load_weights(engine: &mut Engine, model: &Model, run: &RunFile) -> Result<(), Trouble> {
    let adapter = model.adapter.as_ref().map(|adapter| &adapter.weights);
    Ok(engine.move_files("load", &mut ModelSource::new(model.weights(run).into_iter().chain(adapter)))?)
}

/// Where tokens are kept between runs: where `PLIMSOLL_TOKENS` says, beside the calibration, or in the system's folder for
/// files that may go.
pub fn token_cache() -> PathBuf {
    if let Some(named) = std::env::var_os("PLIMSOLL_TOKENS").filter(|path| !path.is_empty()) {
        return PathBuf::from(named);
    }
    calibration::folder().unwrap_or_else(|| std::env::temp_dir().join("plimsoll")).join("tokens")
}
