//! Reading and writing of the rotary frequencies in `config.json`.
//!
//! transformers 4 has flat keys: `rope_theta` and `rope_scaling`, and in gemma3_text `rope_local_base_freq`. transformers 5
//! has `rope_parameters`. In families whose layers with a window rotate in their own way, it has an object for each kind of
//! layer.

use super::{Keys, contradiction};
use crate::models::config::{ConfigError, ModelConfig, QueryGrowth, RopeScaling, limit};
use crate::models::family::{Family, ModelType};
use serde_json::{Map, Value, json};

/// Key of the rotary base of layers with a window in gemma3_text.
const LOCAL_KEY: &str = "rope_local_base_freq";

/// Keys inside `rope_parameters` of ministral3: factor of the growth of queries, and its period.
const BETA: &str = "llama_4_scaling_beta";
const ORIGINAL: &str = "original_max_position_embeddings";

/// Objects in `rope_parameters` of families with two rotations.
const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// Returns a scaling as the value of `rope_scaling`.
pub(super) fn scaling_to_json(scaling: RopeScaling) -> Value {
    match scaling {
        RopeScaling::None => Value::Null,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Dynamic { factor } => json!({"rope_type": "dynamic", "factor": factor}),
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_max_position_embeddings,
            truncate,
            attention_factor,
        } => json!({
            "rope_type": "yarn",
            "factor": factor,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "original_max_position_embeddings": original_max_position_embeddings,
            "truncate": truncate,
            "attention_factor": attention_factor,
        }),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position_embeddings,
        }),
    }
}

/// Returns the keys of the rotary frequencies with their values, without those of [`local_to_json`].
pub(super) fn to_json(config: &ModelConfig) -> Vec<(&'static str, Value)> {
    let (theta, scaling) = (json!(config.rope_theta), scaling_to_json(config.rope_scaling));
    let Some(growth) = config.extras.query_growth else {
        return vec![("rope_theta", theta), ("rope_scaling", scaling)];
    };
    let mut parameters = to_parameters(scaling, theta);
    parameters.insert(BETA.to_owned(), json!(growth.beta));
    parameters.insert(ORIGINAL.to_owned(), json!(growth.period));
    vec![("rope_parameters", Value::Object(parameters))]
}

/// Returns the settings of a rotation as transformers 5 writes them. `scaling` is a value of `rope_scaling`.
fn to_parameters(scaling: Value, theta: Value) -> Map<String, Value> {
    let mut parameters = match scaling {
        Value::Object(scaling) => scaling,
        _ => [("rope_type".to_owned(), json!("default"))].into_iter().collect(),
    };
    parameters.insert("rope_theta".to_owned(), theta);
    parameters
}

/// Returns the key of the rotary base of layers with a window, with its value. `None` in families whose layers all rotate
/// alike, and where the base is the one that transformers assumes.
pub(super) fn local_to_json(config: &ModelConfig) -> Option<(&'static str, Value)> {
    let (theta, default) = (config.extras.local_rope_theta?, config.model_type.family().local_rope_theta?);
    if config.model_type == ModelType::Gemma3Text {
        return Some((LOCAL_KEY, json!(theta)));
    }
    // transformers 5 takes `rope_theta` for layers without a window only, and has no flat key for the others.
    if theta == default && config.rope_theta == default {
        return None;
    }
    let full = to_parameters(scaling_to_json(config.rope_scaling), json!(config.rope_theta));
    Some(("rope_parameters", json!({ FULL: full, SLIDING: { "rope_type": "default", "rope_theta": theta } })))
}

/// The rotary frequencies of a model.
pub(super) struct Frequencies {
    /// Base, in layers without a window if the others have their own.
    pub theta: f64,
    /// Scaling of frequencies with this base.
    pub scaling: RopeScaling,
    /// Base in layers with a window; `None` in families whose layers all rotate alike.
    pub local_theta: Option<f64>,
    /// Growth of queries with their position; `None` in families without.
    pub query_growth: Option<QueryGrowth>,
}

/// Reads the rotary frequencies from flat keys and from `rope_parameters`. Repeated values must agree. `max_positions`
/// replaces a missing `original_max_position_embeddings`.
pub(super) fn read(keys: &Keys, family: &Family, max_positions: u64) -> Result<Frequencies, ConfigError> {
    if family.model_type == ModelType::Ministral3 {
        return read_ministral3(keys, max_positions);
    }
    let flat_theta = keys.number("rope_theta")?;
    let mut thetas: Vec<(String, f64)> = flat_theta.map(|theta| ("rope_theta".to_owned(), theta)).into_iter().collect();
    let original = keys.whole("original_max_position_embeddings", limit::POSITIONS)?;
    let mut scalings: Vec<(&str, RopeScaling)> = Vec::new();
    let (parameters, local) = match family.local_rope_theta {
        Some(_) => read_layer_sections(keys)?,
        None => (keys.section("rope_parameters")?, None),
    };
    for inner in [keys.section("rope_scaling")?, parameters].into_iter().flatten() {
        let section = inner.section;
        thetas.extend(inner.number("rope_theta")?.map(|theta| (format!("{section}.rope_theta"), theta)));
        let scaling = read_scaling(&inner, original, max_positions)?;
        if scaling != RopeScaling::None && !family.scales_frequencies {
            return Err(keys.unsupported(section, &scaling_to_json(scaling), "null".to_owned()));
        }
        scalings.push((section, scaling));
        keys.adopt(inner);
    }
    if let Some(pair) = thetas.windows(2).find(|pair| pair[0].1 != pair[1].1) {
        return Err(contradiction(&pair[0].0, &json!(pair[0].1), &pair[1].0, &json!(pair[1].1)));
    }
    if let [(one, a), (other, b)] = scalings[..]
        && a != b
    {
        return Err(contradiction(one, &scaling_to_json(a), other, &scaling_to_json(b)));
    }
    Ok(Frequencies {
        theta: thetas.first().map_or(family.rope_theta, |(_, theta)| *theta),
        scaling: scalings.first().map_or(RopeScaling::None, |(_, scaling)| *scaling),
        local_theta: read_local_theta(keys, family, local, flat_theta)?,
        query_growth: None,
    })
}

/// Reads the rotary frequencies of ministral3 from `rope_parameters`. transformers 4 does not know this family, so the keys
/// of that version are refused.
fn read_ministral3(keys: &Keys, max_positions: u64) -> Result<Frequencies, ConfigError> {
    for key in ["rope_theta", "rope_scaling"] {
        if let Some(found) = keys.value(key) {
            return Err(keys.unsupported(key, found, "the key in `rope_parameters`".to_owned()));
        }
    }
    let Some(inner) = keys.section("rope_parameters")? else {
        // The defaults of transformers.
        return Ok(Frequencies {
            theta: 1e6,
            scaling: RopeScaling::MINISTRAL3,
            local_theta: None,
            query_growth: Some(QueryGrowth::MINISTRAL3),
        });
    };
    let need = |key: &str| inner.number(key)?.ok_or_else(|| inner.missing(key, "a number".to_owned()));
    let scaling = read_scaling(&inner, None, max_positions)?;
    let (theta, beta) = (need("rope_theta")?, need(BETA)?);
    let given = scaling.original_positions().or(inner.whole(ORIGINAL, limit::POSITIONS)?);
    let period = given.ok_or_else(|| inner.missing(ORIGINAL, "a whole number".to_owned()))?;
    // Without effect in transformers.
    inner.whole("max_position_embeddings", limit::POSITIONS)?;
    keys.adopt(inner);
    Ok(Frequencies { theta, scaling, local_theta: None, query_growth: Some(QueryGrowth { beta, period }) })
}

/// Returns the objects in `rope_parameters` for layers without a window, and for those with one.
fn read_layer_sections<'a>(keys: &Keys<'a>) -> Result<(Option<Keys<'a>>, Option<Keys<'a>>), ConfigError> {
    let Some(outer) = keys.section("rope_parameters")? else { return Ok((None, None)) };
    let read = |key: &str, path: &'static str| {
        let inner = outer.read(key, || "an object or null".into(), Value::as_object)?;
        Ok::<_, ConfigError>(inner.map(|map| Keys::new(map, path)))
    };
    let sections = (read(FULL, "rope_parameters.full_attention")?, read(SLIDING, "rope_parameters.sliding_attention")?);
    keys.adopt(outer);
    Ok(sections)
}

/// Reads the rotary base of layers with a window. `section` is their object in `rope_parameters`, `flat_theta` is
/// `rope_theta`. `None` in families whose layers all rotate alike.
fn read_local_theta(
    keys: &Keys,
    family: &Family,
    section: Option<Keys>,
    flat_theta: Option<f64>,
) -> Result<Option<f64>, ConfigError> {
    let Some(default) = family.local_rope_theta else { return Ok(None) };
    let mut theta = None;
    if let Some(section) = section {
        theta = section.number("rope_theta")?;
        section.must_be_neutral("rope_type", &[json!("default")])?;
        keys.adopt(section);
    }
    if family.model_type == ModelType::Gemma3Text {
        let flat = keys.number(LOCAL_KEY)?;
        if let (Some(flat), Some(theta)) = (flat, theta)
            && flat != theta
        {
            let path = "rope_parameters.sliding_attention.rope_theta";
            return Err(contradiction(LOCAL_KEY, &json!(flat), path, &json!(theta)));
        }
        return Ok(Some(flat.or(theta).unwrap_or(default)));
    }
    // transformers 4 takes `rope_theta` for these layers, too; version 5 takes its default.
    if let (Some(flat), None) = (flat_theta, theta)
        && flat != default
    {
        let supported = format!("{default}, or any with `rope_parameters.sliding_attention.rope_theta`");
        return Err(keys.unsupported("rope_theta", &json!(flat), supported));
    }
    Ok(Some(theta.unwrap_or(default)))
}

fn read_scaling(keys: &Keys, outer_original: Option<u64>, max_positions: u64) -> Result<RopeScaling, ConfigError> {
    let (new, old) = (keys.text("rope_type")?, keys.text("type")?);
    if let (Some(new), Some(old)) = (new, old)
        && new != old
    {
        return Err(contradiction(&keys.path("rope_type"), &json!(new), &keys.path("type"), &json!(old)));
    }
    let key = if new.is_some() { "rope_type" } else { "type" };
    let kind = new.or(old).unwrap_or("default");
    keys.must_be_neutral("partial_rotary_factor", &[json!(1), json!(1.0)])?;
    let original = keys.whole("original_max_position_embeddings", limit::POSITIONS)?;
    let need = |key: &str| keys.number(key)?.ok_or_else(|| keys.missing(key, format!("a number (for {kind})")));
    match kind {
        "default" => {
            keys.must_be_neutral("factor", &[json!(1), json!(1.0)])?;
            Ok(RopeScaling::None)
        }
        "linear" => Ok(RopeScaling::Linear { factor: need("factor")? }),
        "dynamic" => Ok(RopeScaling::Dynamic { factor: need("factor")? }),
        "llama3" | "yarn" => {
            if let (Some(inner), Some(outer)) = (original, outer_original)
                && inner != outer
            {
                let key = "original_max_position_embeddings";
                return Err(contradiction(&keys.path(key), &json!(inner), key, &json!(outer)));
            }
            let original_max_position_embeddings = original.or(outer_original).unwrap_or(max_positions);
            if kind == "yarn" {
                return read_yarn(keys, need("factor")?, original_max_position_embeddings);
            }
            Ok(RopeScaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_max_position_embeddings,
            })
        }
        other => Err(keys.unsupported(key, &json!(other), "default, linear, dynamic, llama3, yarn".to_owned())),
    }
}

/// Reads the settings of YaRN besides its factor and its original context. As in transformers, a factor of attention
/// that is not given follows from `factor` and two optional coefficients.
fn read_yarn(keys: &Keys, factor: f64, original_max_position_embeddings: u64) -> Result<RopeScaling, ConfigError> {
    let non_zero = |key: &str| Ok::<_, ConfigError>(keys.number(key)?.filter(|number| *number != 0.0));
    let grown = |coefficient: f64| RopeScaling::yarn_growth(factor, coefficient);
    let coefficients = (non_zero("mscale")?, non_zero("mscale_all_dim")?);
    let by_factor = match coefficients {
        (Some(part), Some(all)) => grown(part) / grown(all),
        _ => grown(1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: non_zero("beta_fast")?.unwrap_or(32.0),
        beta_slow: non_zero("beta_slow")?.unwrap_or(1.0),
        original_max_position_embeddings,
        truncate: keys.flag("truncate")?.unwrap_or(true),
        attention_factor: keys.number("attention_factor")?.unwrap_or(by_factor),
    })
}
