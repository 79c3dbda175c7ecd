//! Rules of a run file that its types cannot express: ranges, and combinations of keys.

use super::keys::source_key;
use super::{
    DataSection, DataSource, DpoLoss, Format, GrpoSection, HUB_PREFIX, Init, Method, Objective, Optimizer, RunConfig,
};
use crate::files::ModuleNames;
use plimsoll_core::{Failure, Rung, format_count};
use plimsoll_plan::device_request::DevicesRequest;
use plimsoll_program::models::Target;
use std::borrow::Cow;

/// The most tokens of an optimizer step. Their sequences can be counted in 32 bits, and their bytes in 64.
pub(crate) const MAX_BATCH_TOKENS: u64 = 1 << 31;
/// The largest rank of adapters. No model has wider matrices.
const MAX_LORA_RANK: u32 = 1 << 18;

/// The most sources of training data. Each holds one or two open files.
const SOURCES_MAX: usize = 256;

/// The longest URL of a webhook.
const MAX_URL_BYTES: usize = 2048;

/// A violated rule of a run file: a value that has the right type and is still wrong.
pub(super) enum RuleViolation {
    /// A value is outside its range: its `section.key`.
    OutOfRange(Cow<'static, str>),
    /// A value is invalid or conflicts with another one: its `section.key`, the reason, and hints to the user.
    Invalid(Cow<'static, str>, String, Vec<String>),
}

/// Checks the ranges of all keys and the rules between keys. Returns the first violation.
pub(super) fn check(config: &RunConfig) -> Result<(), RuleViolation> {
    check_round_size(config)?;
    check_ranges(config)?;
    check_sources(&config.data)?;
    check_combinations(config)?;
    check_method(config)?;
    check_objective(config)?;
    check_webhook(config)?;
    check_devices(config)
}

fn check_ranges(config: &RunConfig) -> Result<(), RuleViolation> {
    let RunConfig { data, train, lora, dpo, grpo, recipe, run, .. } = config;
    let positive = |number: f64| number.is_finite() && number > 0.0;
    let not_negative = |number: f64| number.is_finite() && number >= 0.0;
    let share = |number: f64| (0.0..1.0).contains(&number);
    let fits_toml = |number: u64| number <= i64::MAX as u64;
    let rules = [
        ("data.sequence", (1..=1 << 24).contains(&data.sequence)),
        ("train.steps", train.steps.is_none_or(|steps| steps >= 1 && fits_toml(steps))),
        ("train.epochs", train.epochs.is_none_or(positive)),
        ("train.hours", train.hours.is_none_or(positive)),
        ("train.batch_tokens", (1..=MAX_BATCH_TOKENS).contains(&train.batch_tokens)),
        ("train.learning_rate", positive(train.learning_rate)),
        ("train.warmup_steps", fits_toml(train.warmup_steps)),
        ("train.weight_decay", not_negative(train.weight_decay)),
        ("train.betas", train.betas.into_iter().all(share)),
        ("train.eps", positive(train.eps)),
        ("train.clip_norm", not_negative(train.clip_norm)),
        ("train.seed", fits_toml(train.seed)),
        ("train.eval_every", fits_toml(train.eval_every)),
        ("train.save_every", fits_toml(train.save_every)),
        ("train.save_every_minutes", not_negative(train.save_every_minutes)),
        ("train.keep", train.keep >= 1),
        ("lora.rank", (1..=MAX_LORA_RANK).contains(&lora.rank)),
        ("lora.alpha", positive(lora.alpha)),
        ("lora.dropout", share(lora.dropout)),
        ("lora.targets", names_projections(&lora.targets)),
        ("lora.rank_pattern", lora.rank_pattern.values().all(|rank| (1..=MAX_LORA_RANK).contains(rank))),
        ("lora.alpha_pattern", lora.alpha_pattern.values().all(|alpha| positive(*alpha))),
        ("dpo.beta", positive(dpo.beta)),
        ("dpo.label_smoothing", (0.0..0.5).contains(&dpo.label_smoothing)),
        ("recipe.micro_batch", recipe.micro_batch != Some(0)),
        ("recipe.slots", recipe.slots.is_none_or(|slots| (1..=4096).contains(&slots))),
        ("run.dir", !run.dir.trim().is_empty()),
        ("run.max_temperature", run.max_temperature.is_none_or(|celsius| (30.0..=120.0).contains(&celsius))),
        ("run.heartbeat_seconds", (1.0..=3600.0).contains(&run.heartbeat_seconds)),
        ("run.threads", run.threads.requested().is_none_or(|count| (1..=1024).contains(&count))),
    ];
    match rules.into_iter().chain(grpo_ranges(grpo)).find(|(_, holds)| !holds) {
        Some((key, _)) => Err(RuleViolation::OutOfRange(key.into())),
        None => Ok(()),
    }
}

/// Returns for each key of `[grpo]` with a range whether its value lies there.
fn grpo_ranges(grpo: &GrpoSection) -> impl Iterator<Item = (&'static str, bool)> {
    let positive = |number: f64| number.is_finite() && number > 0.0;
    let tokens = |count: u32| (1..=1 << 23).contains(&count);
    let count = |number: u64, least: u64| (least..=1 << 24).contains(&number);
    [
        ("grpo.num_generations", count(grpo.num_generations, 2)),
        ("grpo.prompts_per_step", count(grpo.prompts_per_step, 1)),
        ("grpo.max_prompt_length", tokens(grpo.max_prompt_length)),
        ("grpo.max_completion_length", tokens(grpo.max_completion_length)),
        ("grpo.temperature", positive(grpo.temperature)),
        ("grpo.top_p", grpo.top_p > 0.0 && grpo.top_p <= 1.0),
        ("grpo.min_p", (0.0..=1.0).contains(&grpo.min_p)),
        ("grpo.repetition_penalty", positive(grpo.repetition_penalty)),
        ("grpo.beta", grpo.beta.is_finite() && grpo.beta >= 0.0),
        ("grpo.epsilon", grpo.epsilon > 0.0 && grpo.epsilon < 1.0),
        ("grpo.epsilon_high", grpo.epsilon_high.is_none_or(positive)),
        ("grpo.num_iterations", count(grpo.num_iterations, 1)),
        ("grpo.reward_weights", grpo.reward_weights.iter().all(|weight| weight.is_finite())),
        ("grpo.reward_timeout_seconds", (1.0..=86400.0).contains(&grpo.reward_timeout_seconds)),
    ]
    .into_iter()
}

/// Checks the sources of training data.
fn check_sources(data: &DataSection) -> Result<(), RuleViolation> {
    if data.source.is_empty() {
        return Ok(());
    }
    if !data.train.is_empty() {
        return Err(invalid("data.source", "data.train and data.source are both set", "set one of them"));
    }
    if data.source.len() > SOURCES_MAX {
        let message = format!("{} sources, but a run takes at most {SOURCES_MAX}", data.source.len());
        return Err(invalid("data.source", &message, "join sources: a path may be a list of files and globs"));
    }
    let has_weights = data.source.iter().any(|source| source.weight.is_some());
    for (index, DataSource { path, weight, split, .. }) in data.source.iter().enumerate() {
        let key = |name: &str| format!("{}.{name}", source_key(index));
        if path.is_empty() {
            return Err(invalid(key("path"), "the source names no file", "set path to a file, a glob or a hub id"));
        }
        if weight.is_some_and(|weight| !(weight.is_finite() && weight > 0.0)) {
            return Err(RuleViolation::OutOfRange(key("weight").into()));
        }
        if has_weights && weight.is_none() {
            let message = "the source has no weight, but another one has";
            return Err(invalid(key("weight"), message, "give a weight to each source, or to none"));
        }
        let ids = path.iter().filter(|path| path.starts_with(HUB_PREFIX)).count();
        if split.is_some() && ids > 0 && ids < path.len() {
            let message = "a source with a split has hub ids or files, not both";
            return Err(invalid(key("path"), message, "write two sources"));
        }
    }
    Ok(())
}

fn check_combinations(config: &RunConfig) -> Result<(), RuleViolation> {
    let RunConfig { model, data, train, recipe, .. } = config;
    let violation = |key: &'static str, message: &str, hint: &str| Err(invalid(key, message, hint));
    match (&model.path, &model.preset) {
        (None, None) => return violation("model.path", "no model is named", "set model.path or model.preset"),
        (Some(_), Some(_)) => {
            return violation("model.preset", "model.path and model.preset are both set", "set one of them");
        }
        (None, Some(_)) if model.init == Init::Pretrained => {
            return violation("model.init", "a preset has no weights", "set model.init = \"random\", or model.path");
        }
        _ => {}
    }
    let lengths = [train.steps.is_some(), train.epochs.is_some(), train.hours.is_some()];
    if lengths.into_iter().filter(|set| *set).count() > 1 {
        let key = if train.hours.is_some() { "train.hours" } else { "train.epochs" };
        return violation(key, "more than one of train.steps, train.epochs and train.hours is set", "set one of them");
    }
    let sequence = u64::from(data.sequence);
    if !train.batch_tokens.is_multiple_of(sequence) {
        let below = train.batch_tokens / sequence * sequence;
        let above = below.saturating_add(sequence);
        let nearest = if below == 0 { format!("{above}") } else { format!("{below} or {above}") };
        let message = format!("{} tokens in a step are not whole sequences of {sequence}", train.batch_tokens);
        return violation("train.batch_tokens", &message, &format!("the nearest that are: {nearest}"));
    }
    if recipe.micro_batch.is_some_and(|sequences| u64::from(sequences) > config.batch_sequences()) {
        let message = format!("a step has no more than {}", format_count(config.batch_sequences(), "sequence"));
        return violation("recipe.micro_batch", &message, "a smaller micro-batch, or more train.batch_tokens");
    }
    Ok(())
}

/// Checks that training method, lossy rungs and optimizer are compatible: only frozen matrices are quantized, say.
fn check_method(config: &RunConfig) -> Result<(), RuleViolation> {
    let RunConfig { model, data, train, lora, .. } = config;
    if matches!(lora.targets, ModuleNames::Pattern(_)) && !lora.layers.is_empty() {
        let message = "lora.targets is a regular expression, which names layers itself, as in PEFT";
        return Err(invalid("lora.layers", message, "name the layers in the expression, or list the matrices"));
    }
    let rungs = train.rungs.as_deref().unwrap_or_default();
    let takes = |rung: Rung| rungs.contains(&rung);
    let adapters = train.method == Method::Lora || takes(Rung::Lora);
    if takes(Rung::Int8) && takes(Rung::Nf4) {
        return Err(invalid("train.rungs", "matrices are stored in 8 bit or in 4", "name int8 or nf4"));
    }
    if !adapters && (takes(Rung::Int8) || takes(Rung::Nf4)) {
        let message = "matrices that are trained are not quantized";
        return Err(invalid("train.rungs", message, "train adapters: train.method = \"lora\""));
    }
    if takes(Rung::Adam8bit) && train.optimizer != Optimizer::Adamw {
        return Err(invalid("train.rungs", "adam8bit is a state of adamw", "leave it out, or set train.optimizer"));
    }
    // Without training data, a model may be evaluated with its adapters.
    if data.has_training_data() && !adapters && model.adapter.is_some() {
        let message = "adapters are given, but all parameters are trained";
        let hints = vec![
            "to train the adapters on: train.method = \"lora\"".to_owned(),
            "to train what both make together: plimsoll export BASE --adapter ADAPTER --merged OUT, then model.path = OUT".to_owned(),
        ];
        return Err(RuleViolation::Invalid("model.adapter".into(), message.to_owned(), hints));
    }
    Ok(())
}

/// Checks that the settings of the objective agree with each other.
fn check_objective(config: &RunConfig) -> Result<(), RuleViolation> {
    let RunConfig { train, lora, dpo, .. } = config;
    let name = match train.objective {
        Objective::Supervised => return Ok(()),
        Objective::Dpo => "dpo",
        Objective::Grpo => "grpo",
    };
    if train.objective == Objective::Grpo {
        check_rounds(config)?;
    } else if dpo.label_smoothing > 0.0 && dpo.loss_type != DpoLoss::Sigmoid {
        let message = "only the loss \"sigmoid\" smooths labels";
        return Err(invalid("dpo.label_smoothing", message, "set it to 0, or dpo.loss_type = \"sigmoid\""));
    }
    let rungs = train.rungs.as_deref().unwrap_or_default();
    let has_adapters = train.method == Method::Lora || rungs.contains(&Rung::Lora);
    if has_adapters && lora.dropout > 0.0 {
        let message = format!("train.objective = \"{name}\" does not support dropout: its score runs without it");
        return Err(invalid("lora.dropout", &message, "set it to 0"));
    }
    Ok(())
}

/// Checks that the completions of a round are not too many. Other keys follow from their number.
fn check_round_size(config: &RunConfig) -> Result<(), RuleViolation> {
    let (completions, sequence) = (config.grpo.completions(), u64::from(config.grpo.sequence()));
    let is_too_large = completions.saturating_mul(sequence) > MAX_BATCH_TOKENS;
    if config.train.objective != Objective::Grpo || !is_too_large {
        return Ok(());
    }
    let message = format!("{completions} completions of {sequence} tokens are more than {MAX_BATCH_TOKENS} tokens");
    Err(invalid("grpo.prompts_per_step", &message, "take fewer prompts, smaller groups, or shorter completions"))
}

/// Checks the settings of a run that trains on completions.
fn check_rounds(config: &RunConfig) -> Result<(), RuleViolation> {
    let RunConfig { data, grpo, .. } = config;
    let hint = "leave it out: it follows from [grpo]";
    if data.format == Format::Rollouts && data.source.iter().any(|source| source.weight.is_some()) {
        let message = "sources of rollouts take no weight: a weighted mixture separates completions of one prompt";
        return Err(invalid("data.source", message, "leave the weights out"));
    }
    if data.sequence != grpo.sequence() {
        let message = format!("prompt and completion have {} tokens with train.objective = \"grpo\"", grpo.sequence());
        return Err(invalid("data.sequence", &message, hint));
    }
    if config.batch_sequences() != grpo.completions() {
        let message =
            format!("a step has {} with train.objective = \"grpo\"", format_count(grpo.completions(), "completion"));
        return Err(invalid("train.batch_tokens", &message, hint));
    }
    if !grpo.reward_weights.is_empty() && !grpo.rewards.is_empty() && grpo.reward_weights.len() != grpo.rewards.len() {
        let (weights, rewards) = (grpo.reward_weights.len(), grpo.rewards.len());
        let message = format!("{} for {}", format_count(weights, "weight"), format_count(rewards, "reward"));
        return Err(invalid("grpo.reward_weights", &message, "give one weight for each reward, or none"));
    }
    Ok(())
}

/// Returns whether the targets of adapters are a regular expression, or a list of paths that end with matrices.
fn names_projections(targets: &ModuleNames) -> bool {
    let is_projection = |path: &String| path.rsplit('.').next().is_some_and(|name| Target::named(name).is_some());
    let has_names = match targets {
        ModuleNames::Pattern(_) => true,
        ModuleNames::List(names) => names.iter().all(is_projection),
    };
    has_names && !targets.is_empty()
}

/// Checks the URL of the webhook: the program speaks HTTP without TLS.
fn check_webhook(config: &RunConfig) -> Result<(), RuleViolation> {
    let Some(url) = &config.watch.webhook else { return Ok(()) };
    if url.len() > MAX_URL_BYTES {
        return Err(RuleViolation::OutOfRange("watch.webhook".into()));
    }
    if url.starts_with("https:") {
        let hints = vec![
            "post to a relay on this machine that forwards to the https address: http://127.0.0.1:PORT/PATH".to_owned(),
            "or post from Python, in on_event of plimsoll.train; see docs/logging.md".to_owned(),
        ];
        let message = "https is not supported, only http".to_owned();
        return Err(RuleViolation::Invalid("watch.webhook".into(), message, hints));
    }
    let rest = url.strip_prefix("http://").unwrap_or_default();
    let host = rest.split(['/', '?']).next().unwrap_or_default();
    let is_plain = url.bytes().all(|byte| byte.is_ascii_graphic()) && !url.contains('#') && !host.contains('@');
    match is_plain && !host.is_empty() && !host.starts_with(':') {
        true => Ok(()),
        false => Err(RuleViolation::OutOfRange("watch.webhook".into())),
    }
}

fn check_devices(config: &RunConfig) -> Result<(), RuleViolation> {
    match config.run.devices.parse::<DevicesRequest>() {
        Ok(_) => Ok(()),
        Err(error) => {
            let failure = Failure::from(error);
            Err(RuleViolation::Invalid("run.devices".into(), failure.message, failure.hints))
        }
    }
}

/// Returns the violation of a rule by the value of `key`, with one hint.
fn invalid(key: impl Into<Cow<'static, str>>, message: &str, hint: &str) -> RuleViolation {
    RuleViolation::Invalid(key.into(), message.to_owned(), vec![hint.to_owned()])
}
