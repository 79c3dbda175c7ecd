//! Settings of LoRA adapters as PEFT's `adapter_config.json` has them, and the modules that they choose.
//!
//! The rules are those of PEFT: which modules have an adapter, and the rank and alpha of each. Reading and writing of
//! directories is in `adapter`.

use fancy_regex::Regex;
use plimsoll_program::models::decoder::{AdaptedModule, Lora, WeightSource};
use plimsoll_program::models::{ModelConfig, Target};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// The word of PEFT for all projections.
pub(crate) const ALL_LINEAR: &str = "all-linear";

/// Names of modules, as in PEFT's `target_modules`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ModuleNames {
    /// A regular expression that matches the whole path of a module, or `all-linear` for all projections.
    Pattern(String),
    /// Paths of modules, or the ends of paths: `q_proj`, `self_attn.q_proj`.
    List(Vec<String>),
}

/// Settings of LoRA adapters, as in PEFT's `LoraConfig`.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    /// r: the rank of an adapter without another one in `rank_pattern`.
    pub rank: u64,
    /// Numerator of alpha / r, the factor of an adapter's output, without another one in `alpha_pattern`.
    pub alpha: f64,
    /// Whether the factor is alpha / √r instead (rsLoRA).
    pub rank_stabilized: bool,
    /// Dropout probability of the adapters' inputs in training.
    pub dropout: f64,
    /// Modules with an adapter (`target_modules`).
    pub targets: ModuleNames,
    /// Modules without an adapter among these (`exclude_modules`).
    pub excluded: ModuleNames,
    /// Layers with adapters, counted from 0 (`layers_to_transform`); all layers if empty.
    pub layers: Vec<u64>,
    /// Regular expressions for the name before the number of a layer (`layers_pattern`); any name if empty.
    pub layers_pattern: Vec<String>,
    /// Ranks by regular expressions for the end of a module's path. The first match counts.
    pub rank_pattern: Vec<(String, u64)>,
    /// Numerators of alpha / r by regular expressions for the end of a module's path. The first match counts.
    pub alpha_pattern: Vec<(String, f64)>,
}

/// The reason why settings of adapters cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{key}` {problem}")]
pub struct AdapterConfigError {
    /// Key of PEFT's `LoraConfig`.
    pub key: &'static str,
    /// Description of the problem with its value.
    pub problem: String,
}

impl ModuleNames {
    /// Names no module.
    pub const NONE: ModuleNames = ModuleNames::List(Vec::new());

    /// Returns whether no module is named.
    pub fn is_empty(&self) -> bool {
        match self {
            ModuleNames::Pattern(pattern) => pattern.is_empty(),
            ModuleNames::List(names) => names.is_empty(),
        }
    }

    fn matcher(&self, key: &'static str) -> Result<Matcher<'_>, AdapterConfigError> {
        Ok(match self {
            ModuleNames::Pattern(word) if word == ALL_LINEAR => Matcher::All,
            ModuleNames::Pattern(pattern) => Matcher::Path(Expression::new(key, pattern, "")?),
            ModuleNames::List(names) => Matcher::Ends(names),
        })
    }
}

/// The modules that a [`ModuleNames`] means.
enum Matcher<'a> {
    All,
    Path(Expression),
    Ends(&'a [String]),
}

impl Matcher<'_> {
    /// Returns whether a module is meant.
    fn matches(&self, module: &str) -> Result<bool, AdapterConfigError> {
        match self {
            Matcher::All => Ok(true),
            Matcher::Path(expression) => expression.matches(module),
            Matcher::Ends(names) => Ok(names.iter().any(|name| is_end(module, name))),
        }
    }
}

/// Returns whether `name` is the path of a module, or consists of the last names of the path.
fn is_end(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// A regular expression of a setting, which matches whole paths.
struct Expression {
    key: &'static str,
    regex: Regex,
}

impl Expression {
    /// Compiles the regular expression `before` + `pattern`, which must match a whole path.
    fn new(key: &'static str, pattern: &str, before: &str) -> Result<Expression, AdapterConfigError> {
        let invalid =
            |error| AdapterConfigError { key, problem: format!("has `{pattern}`, which is no pattern: {error}") };
        // An error names its position in the pattern alone.
        Regex::new(pattern).map_err(invalid)?;
        let regex = Regex::new(&format!(r"\A{before}(?:{pattern})\z")).map_err(invalid)?;
        Ok(Expression { key, regex })
    }

    /// Compiles the regular expression `pattern` for the end of a path.
    fn of_end(key: &'static str, pattern: &str) -> Result<Expression, AdapterConfigError> {
        Expression::new(key, pattern, r"(?:.*\.)?")
    }

    /// Returns whether the expression matches the path of a module.
    fn matches(&self, module: &str) -> Result<bool, AdapterConfigError> {
        let failed = |error| AdapterConfigError { key: self.key, problem: format!("cannot be matched: {error}") };
        self.regex.is_match(module).map_err(failed)
    }
}

/// Values by regular expressions for the ends of paths.
struct PatternValues<T>(Vec<(Expression, T)>);

impl<T: Copy> PatternValues<T> {
    fn new(key: &'static str, patterns: &[(String, T)]) -> Result<PatternValues<T>, AdapterConfigError> {
        let compiled = patterns.iter().map(|(pattern, value)| Ok((Expression::of_end(key, pattern)?, *value)));
        compiled.collect::<Result<_, _>>().map(PatternValues)
    }

    /// Returns the value of the first expression that matches the path of a module, or else `default`.
    fn value(&self, module: &str, default: T) -> Result<T, AdapterConfigError> {
        for (expression, value) in &self.0 {
            if expression.matches(module)? {
                return Ok(*value);
            }
        }
        Ok(default)
    }
}

/// The layers that have adapters.
struct LayerFilter<'a> {
    layers: &'a [u64],
    patterns: Vec<Expression>,
}

impl LayerFilter<'_> {
    fn new(config: &AdapterConfig) -> Result<LayerFilter<'_>, AdapterConfigError> {
        // PEFT limits only lists of modules to layers.
        let is_list = matches!(config.targets, ModuleNames::List(_));
        let layers = if is_list { &config.layers[..] } else { &[] };
        let of_layer = |pattern: &String| Expression::of_end("layers_pattern", pattern);
        Ok(LayerFilter { layers, patterns: config.layers_pattern.iter().map(of_layer).collect::<Result<_, _>>()? })
    }

    /// Returns whether a module of a layer may have an adapter.
    fn matches(&self, layer: u64, module: &str) -> Result<bool, AdapterConfigError> {
        if self.layers.is_empty() {
            return Ok(true);
        }
        let before = module.split_once(&format!(".{layer}.")).map_or("", |(before, _)| before);
        let mut is_named = self.patterns.is_empty();
        for pattern in &self.patterns {
            is_named |= pattern.matches(before)?;
        }
        Ok(is_named && self.layers.contains(&layer))
    }
}

impl AdapterConfig {
    /// Returns the projections of the model with an adapter, layer by layer.
    ///
    /// # Errors
    /// An invalid regular expression.
    pub fn modules(&self, model: &ModelConfig) -> Result<Vec<AdaptedModule>, AdapterConfigError> {
        let (targets, excluded) = (self.targets.matcher("target_modules")?, self.excluded.matcher("exclude_modules")?);
        let layers = LayerFilter::new(self)?;
        let ranks = PatternValues::new("rank_pattern", &self.rank_pattern)?;
        let alphas = PatternValues::new("alpha_pattern", &self.alpha_pattern)?;
        let mut modules = Vec::new();
        for layer in 0..model.layers {
            for &target in model.targets() {
                let path = target.module(layer);
                if excluded.matches(&path)? || !targets.matches(&path)? || !layers.matches(layer, &path)? {
                    continue;
                }
                let (rank, alpha) = (ranks.value(&path, self.rank)?, alphas.value(&path, self.alpha)?);
                modules.push(AdaptedModule { layer, target, rank, alpha });
            }
        }
        Ok(modules)
    }

    /// Returns the adapters as settings for the Programs that compute with them. `seed` is that of the dropout.
    ///
    /// # Errors
    /// An invalid regular expression.
    pub fn lora(&self, model: &ModelConfig, seed: u64, source: WeightSource) -> Result<Lora, AdapterConfigError> {
        let modules = self.modules(model)?;
        let is_target = |target: &Target| modules.iter().any(|module| module.target == *target);
        let targets: Vec<Target> = model.targets().iter().copied().filter(is_target).collect();
        let first = modules.first().copied();
        let is_like_first = |module: &AdaptedModule| {
            first.is_some_and(|first| (first.rank, first.alpha) == (module.rank, module.alpha))
        };
        let is_uniform =
            modules.len() as u64 == model.layers * targets.len() as u64 && modules.iter().all(is_like_first);
        Ok(Lora {
            rank: modules.iter().map(|module| module.rank).max().unwrap_or(self.rank),
            alpha: first.map_or(self.alpha, |module| module.alpha),
            rank_stabilized: self.rank_stabilized,
            dropout: self.dropout,
            targets,
            modules: (!is_uniform).then_some(modules),
            seed,
            source,
        })
    }

    /// Checks that every setting has an effect on the model, as a user expects of new adapters.
    ///
    /// # Errors
    /// A setting that matches nothing, or that asks for adapters on other modules than projections.
    pub fn check_effects(&self, model: &ModelConfig) -> Result<(), AdapterConfigError> {
        let modules = self.modules(model)?;
        self.check_targets(model)?;
        let error = |key, problem| Err(AdapterConfigError { key, problem });
        if let Some(layer) = self.layers.iter().find(|layer| **layer >= model.layers) {
            return error("layers_to_transform", format!("names layer {layer}, the last one is {}", model.layers - 1));
        }
        if modules.is_empty() {
            return error("target_modules", "matches no projection of the model".to_owned());
        }
        let ranks = self.rank_pattern.iter().map(|(pattern, _)| ("rank_pattern", pattern));
        let alphas = self.alpha_pattern.iter().map(|(pattern, _)| ("alpha_pattern", pattern));
        for (key, pattern) in ranks.chain(alphas) {
            let expression = Expression::of_end(key, pattern)?;
            let mut is_used = false;
            for module in &modules {
                is_used |= expression.matches(&module.target.module(module.layer))?;
            }
            if !is_used {
                return error(key, format!("has `{pattern}`, which matches no module with an adapter"));
            }
        }
        Ok(())
    }

    /// Checks that `target_modules` means projections of the model and no other modules.
    fn check_targets(&self, model: &ModelConfig) -> Result<(), AdapterConfigError> {
        let key = "target_modules";
        let projections = || (0..model.layers).flat_map(|layer| model.targets().iter().map(move |t| t.module(layer)));
        match &self.targets {
            ModuleNames::List(names) => {
                let is_unknown = |name: &&String| !projections().any(|path| is_end(&path, name));
                match names.iter().find(is_unknown) {
                    Some(name) => {
                        Err(AdapterConfigError { key, problem: format!("names {name}, which is no projection") })
                    }
                    None => Ok(()),
                }
            }
            ModuleNames::Pattern(word) if word == ALL_LINEAR => Ok(()),
            ModuleNames::Pattern(pattern) => {
                let expression = Expression::new(key, pattern, "")?;
                for module in other_modules(model) {
                    if expression.matches(&module)? {
                        let problem = format!("matches {module}, which is no projection of a layer");
                        return Err(AdapterConfigError { key, problem });
                    }
                }
                Ok(())
            }
        }
    }

    /// Returns the content of the `adapter_config.json` of these adapters, without the names of their base model.
    pub(super) fn to_json(&self) -> Value {
        let ranks: Map<String, Value> =
            self.rank_pattern.iter().map(|(pattern, rank)| (pattern.clone(), json!(rank))).collect();
        let alphas: Map<String, Value> =
            self.alpha_pattern.iter().map(|(pattern, alpha)| (pattern.clone(), number(*alpha))).collect();
        json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": number(self.alpha),
            "lora_dropout": self.dropout,
            "target_modules": self.targets,
            "exclude_modules": (!self.excluded.is_empty()).then_some(&self.excluded),
            "layers_to_transform": (!self.layers.is_empty()).then_some(&self.layers),
            "layers_pattern": (!self.layers_pattern.is_empty()).then_some(&self.layers_pattern),
            "rank_pattern": ranks,
            "alpha_pattern": alphas,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "init_lora_weights": true,
            "use_dora": false,
            "use_rslora": self.rank_stabilized,
            "modules_to_save": null,
        })
    }
}

/// Returns an alpha in JSON. PEFT documents it as an integer, but accepts any number.
fn number(alpha: f64) -> Value {
    if alpha.fract() == 0.0 && alpha.abs() < 1e15 { json!(alpha as i64) } else { json!(alpha) }
}

/// Returns the paths of modules of the model that are no projections of a layer. PEFT would adapt some of them, and
/// refuse others.
fn other_modules(model: &ModelConfig) -> Vec<String> {
    let mut modules: Vec<String> =
        ["model", "model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"]
            .map(str::to_owned)
            .to_vec();
    for layer in 0..model.layers {
        modules.push(format!("model.layers.{layer}"));
        for part in ["self_attn", "mlp", "mlp.act_fn", "input_layernorm", "post_attention_layernorm"] {
            modules.push(format!("model.layers.{layer}.{part}"));
        }
    }
    modules
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_program::models::preset;

    fn model() -> ModelConfig {
        ModelConfig { layers: 12, ..preset("llama-3.2-1b").unwrap() }
    }

    fn list(names: &[&str]) -> ModuleNames {
        ModuleNames::List(names.iter().map(|name| (*name).to_owned()).collect())
    }

    fn of(targets: ModuleNames) -> AdapterConfig {
        AdapterConfig {
            rank: 4,
            alpha: 8.0,
            rank_stabilized: false,
            dropout: 0.0,
            targets,
            excluded: ModuleNames::NONE,
            layers: vec![],
            layers_pattern: vec![],
            rank_pattern: vec![],
            alpha_pattern: vec![],
        }
    }

    /// Returns the modules of adapters as `layer.name`.
    fn modules(config: &AdapterConfig) -> Vec<String> {
        let modules = config.modules(&model()).unwrap();
        modules.iter().map(|module| format!("{}.{}", module.layer, module.target.name())).collect()
    }

    #[test]
    fn patterns_match_whole_paths() {
        let pattern = |text: &str| modules(&of(ModuleNames::Pattern(text.to_owned())));
        assert_eq!(pattern(r"model\.layers\.(3|11)\..*\.q_proj"), ["3.q_proj", "11.q_proj"]);
        assert_eq!(pattern(r".*\.1\..*(q|up)_proj"), ["1.q_proj", "1.up_proj"]);
        assert_eq!(pattern(r"(?!.*mlp).*\.2\..*[kv]_proj"), ["2.k_proj", "2.v_proj"]);
        assert_eq!(pattern("q_proj"), [""; 0]);
        assert_eq!(pattern("all-linear").len(), 12 * 7);
    }

    #[test]
    fn lists_match_ends_of_paths() {
        assert_eq!(modules(&of(list(&["q_proj"]))).len(), 12);
        assert_eq!(modules(&of(list(&["1.self_attn.q_proj"]))), ["1.q_proj"]);
        assert_eq!(modules(&of(list(&["_proj"]))), [""; 0]);
        let excluded = list(&["mlp.up_proj", "0.mlp.down_proj"]);
        let rest = modules(&AdapterConfig { excluded, ..of(list(&["up_proj", "down_proj"])) });
        assert_eq!((rest.len(), &*rest[0]), (11, "1.down_proj"));
    }

    #[test]
    fn layers_limit_lists_of_modules() {
        let config = AdapterConfig { layers: vec![1, 10], ..of(list(&["q_proj"])) };
        assert_eq!(modules(&config), ["1.q_proj", "10.q_proj"]);
        let named = |pattern: &str| modules(&AdapterConfig { layers_pattern: vec![pattern.into()], ..config.clone() });
        assert_eq!(named("layers"), ["1.q_proj", "10.q_proj"]);
        assert_eq!(named("h"), [""; 0]);
        // PEFT does not apply layers to regular expressions.
        assert_eq!(modules(&AdapterConfig { targets: ModuleNames::Pattern(".*q_proj".into()), ..config }).len(), 12);
    }

    #[test]
    fn first_matching_pattern_gives_rank_and_alpha() {
        let rank_pattern = vec![("proj".into(), 1), ("q_proj".into(), 2), (r"[0-5]\..*".into(), 3)];
        let alpha_pattern = vec![(r"7\.self_attn\.v_proj".into(), 1.5)];
        let config = AdapterConfig { rank_pattern, alpha_pattern, ..of(list(&["q_proj", "v_proj"])) };
        let lora = config.lora(&model(), 1, WeightSource::Random { seed: 1 }).unwrap();
        let modules = lora.modules.as_deref().unwrap();
        let find = |layer, target| modules.iter().find(|m| (m.layer, m.target) == (layer, target)).unwrap();
        let found = [(0, Target::Q), (0, Target::V), (7, Target::V), (10, Target::V)].map(|(layer, target)| {
            let module = find(layer, target);
            (module.rank, module.alpha)
        });
        assert_eq!(found, [(2, 8.0), (3, 8.0), (4, 1.5), (4, 8.0)]);
        assert_eq!(lora.rank, 4);
        let same = AdapterConfig { rank_pattern: vec![(".*".into(), 6)], ..of(list(&["q_proj"])) };
        let lora = same.lora(&model(), 1, WeightSource::Random { seed: 1 }).unwrap();
        assert_eq!((lora.rank, lora.modules), (6, None));
    }

    #[test]
    fn settings_without_effect_are_refused() {
        let q = || of(list(&["q_proj"]));
        let pattern = |text: &str| of(ModuleNames::Pattern(text.to_owned()));
        for (config, message) in [
            (of(list(&["q_proj", "lm_head"])), "`target_modules` names lm_head, which is no projection"),
            (pattern(".*head"), "`target_modules` matches lm_head, which is no projection of a layer"),
            (pattern(r".*\.mlp.*"), "`target_modules` matches model.layers.0.mlp, which is no projection of a layer"),
            (pattern("q_proj"), "`target_modules` matches no projection of the model"),
            (AdapterConfig { layers: vec![12], ..q() }, "`layers_to_transform` names layer 12, the last one is 11"),
            (
                AdapterConfig { rank_pattern: vec![("v_proj".into(), 2)], ..q() },
                "`rank_pattern` has `v_proj`, which matches no module with an adapter",
            ),
            (
                AdapterConfig { alpha_pattern: vec![("up_proj".into(), 2.0)], ..q() },
                "`alpha_pattern` has `up_proj`, which matches no module with an adapter",
            ),
        ] {
            assert_eq!(config.check_effects(&model()).unwrap_err().to_string(), message);
        }
        assert_eq!(AdapterConfig { layers: vec![11], ..q() }.check_effects(&model()), Ok(()));
    }
}
