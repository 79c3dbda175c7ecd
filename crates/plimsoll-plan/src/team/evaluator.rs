//! What a device that is left out can do beside the steps: evaluate what the others train, while they go on. It holds weights
//! and the activations of an evaluation, under its own load line and with nothing on the host, and is given what the others
//! have trained whenever there is an evaluation. It is taken where that saves them time.

use super::{Evaluations, Part, TeamAnswer, TeamQuestion, slowest};
use crate::price::Prices;
use crate::search::{Answer, Question, can_hold, plan_of, under};
use plimsoll_core::{Bytes, Evaluates, FileSpec, HostSpec, Link, Offload, Recipe, RecomputeLevel, Sharing, Space};
use plimsoll_program::models::decoder::{Method, Source};
use plimsoll_program::{Block, Op, OpKind, Share};

/// An evaluation is long enough to tell what a row takes.
const LONG_ROWS: u64 = 1 << 16;

/// The same question about evaluations alone, of what somebody else trains.
#[must_use]
pub fn evaluating<'a>(question: &Question<'a>) -> Question<'a> {
    let mut question = question.clone();
    question.lossy.lora.source = Source::Saved;
    match &mut question.lossy.method {
        Method::Full => question.source = Source::Saved,
        Method::Lora(lora) => lora.source = Source::Saved,
    }
    question.pins.offload = Some(Offload::NOTHING);
    question.host = HostSpec { budget: Bytes::ZERO, file: FileSpec::NONE, ..question.host };
    (question.lossy.allow, question.lossy.offer) = (vec![], vec![]);
    Question { optimizer: None, evaluate: true, generation: None, share: Share::ALONE, ..question }
}

/// The answer with the fastest of those that are left out at the evaluations, where that is worth it.
pub(super) fn with(team: &TeamQuestion, mut answer: TeamAnswer) -> TeamAnswer {
    let Some(evaluations) = team.evaluations.filter(|_| answer.plan.fits) else { return answer };
    let taken = |device: &usize| answer.parts.iter().any(|part| part.device == *device);
    let mut others: Vec<usize> = (0..team.devices.len()).filter(|device| !taken(device)).collect();
    others.dedup_by_key(|device| team.first_alike(*device));
    let made = others.into_iter().filter_map(|device| evaluator(team, &answer, device, evaluations));
    let fastest = made.min_by(|(_, one), (_, other)| one.seconds.total_cmp(&other.seconds));
    if let Some((part, evaluates)) = fastest {
        let mut left_out = answer.plan.left_out.iter_mut();
        if let Some(out) = left_out.find(|out| out.number == part.device) {
            (out.evaluates, answer.evaluator) = (Some(evaluates), Some(part));
        }
    }
    answer
}

/// A device at the evaluations of a team; none where it cannot hold the weights, or is no help.
fn evaluator(
    team: &TeamQuestion,
    answer: &TeamAnswer,
    device: usize,
    evaluations: Evaluations,
) -> Option<(Part, Evaluates)> {
    let TeamAnswer { parts, plan, .. } = answer;
    let question = evaluating(&under(&team.devices[device], &plan.rungs));
    // As many rows at once as the others take gives the same bits; where there is no room for them, fewer.
    let most = parts.iter().map(|part| part.answer.plan.recipe.micro_batch).max()?;
    if !can_hold(&Question { sequences: u64::from(most), ..question.clone() }) {
        return None;
    }
    let halves = std::iter::successors(Some(most), |rows| (*rows > 1).then(|| rows.div_ceil(2)));
    let mut recipes = halves.map(|micro_batch| {
        let question = Question { sequences: u64::from(micro_batch), ..question.clone() };
        let recompute = vec![RecomputeLevel::Nothing; question.config.layers as usize];
        plan_of(&question, &Recipe { micro_batch, recompute, offload: Offload::NOTHING, rungs: plan.rungs.clone() })
    });
    let own = recipes.find(|own| own.plan.fits)?;
    let link = slowest(parts.iter().map(|part| team.devices[part.device].device.team_link));
    let theirs = |part: &Part, program| seconds(&team.devices[part.device], &part.answer, program, link);
    let mine = |program| seconds(&question, &own, program, Link::MEMORY);
    // The stages of a pipeline have the same rows, and each writes what is its own.
    let staged = plan.sharing == Some(Sharing::Layers);
    let (cuts, writers) = if staged { (1, parts.len()) } else { (parts.len(), 1) };
    let times = |part: &Part| times(parts, part, evaluations.rows);
    let at_once = |part: &Part| part.answer.plan.recipe.micro_batch.div_ceil(own.plan.recipe.micro_batch);
    // Between two machines what is given crosses the slower of their links, as what the team exchanges does.
    let between = slowest([link, team.devices[device].device.team_link].into_iter());
    let over_link = between.latency_seconds + read_bytes(&own, "renew") / between.bytes_per_second;
    let given: f64 = parts[..writers].iter().map(|part| theirs(part, "save")).sum();
    let evaluates = Evaluates {
        recipe: own.plan.recipe.clone(),
        device: own.plan.devices[0].clone(),
        rows: evaluations.rows,
        seconds: parts[..cuts].iter().map(|part| times(part) * f64::from(at_once(part)) * mine("evaluate")).sum(),
        team_seconds: parts.iter().map(|part| times(part) * theirs(part, "evaluate")).fold(0.0, f64::max),
        // A piece is given when the one before it has been taken.
        hand_over_seconds: given + over_link + mine("renew"),
    };
    let meanwhile = evaluations.every as f64 * plan.predicted.step_seconds;
    let helps = match evaluations.rows {
        Some(_) => evaluates.saves(meanwhile) > 0.0,
        // Some number of rows makes it worth it: any that is large, or as many as it manages meanwhile.
        None => {
            let most = meanwhile / evaluates.seconds;
            evaluates.seconds < evaluates.team_seconds || most * evaluates.team_seconds > evaluates.hand_over_seconds
        }
    };
    let sequences = u64::from(own.plan.recipe.micro_batch);
    helps.then_some((Part { device, share: Share::ALONE, sequences, answer: own }, evaluates))
}

/// Micro-batches that a part of a team does of an evaluation: of so many rows, or of one row of a long one.
fn times(parts: &[Part], part: &Part, rows: Option<u64>) -> f64 {
    let total: u64 = parts.iter().map(|part| part.sequences).sum();
    let all = rows.unwrap_or(LONG_ROWS);
    let own = match part.share.sharing {
        Some(Sharing::Layers) => all,
        _ => (u128::from(all) * u128::from(part.sequences)).div_ceil(u128::from(total)) as u64,
    };
    let times = part.answer.plan.recipe.micro_batches(own) as f64;
    if rows.is_some() { times } else { times / all as f64 }
}

/// Bytes that a Program reads from files.
fn read_bytes(answer: &Answer, program: &str) -> f64 {
    let read = |op: &Op| match &op.kind {
        OpKind::TransferStart { from, elements, .. } if answer.set.tensor(from.tensor).space == Space::File => {
            (elements * answer.set.tensor(from.tensor).dtype.bytes()) as f64
        }
        _ => 0.0,
    };
    let block = |block: &Block| f64::from(block.repeat) * block.ops.iter().map(read).sum::<f64>();
    answer.set.program(program).map_or(0.0, |program| program.blocks.iter().map(block).sum())
}

/// Predicted seconds of a Program, once.
fn seconds(question: &Question, answer: &Answer, program: &str, team_link: Link) -> f64 {
    let (rates, host) = (&question.device.rates, &question.host);
    let prices = Prices { rates, host, precision: answer.precision, team_link };
    answer.set.program(program).map_or(0.0, |program| prices.program_seconds(&answer.set, program, true))
}
