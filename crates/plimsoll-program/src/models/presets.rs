//! Presets: published model shapes, for plans and random starts without a model directory.
//!
//! Each row is the public `config.json` of the named model. The exception is `llama-11b`, which has no publisher and
//! represents models of its size.

use super::config::{Extras, ModelConfig, ModelType, RopeScaling};

/// The published shape of a model: one row of the table of presets.
struct Row {
    name: &'static str,
    model_type: ModelType,
    hidden: u64,
    layers: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    ffn: u64,
    vocab: u64,
    tied: bool,
    rope_theta: f64,
    rope_scaling: RopeScaling,
    norm_eps: f64,
    max_positions: u64,
    bos: Option<i64>,
    eos: i64,
    init_std: f64,
    /// `query_pre_attn_scalar`, the square of the divisor of attention scores; 0 in families without it.
    query_scalar: u64,
}

use ModelType::{Gemma2, Gemma3Text, Granite, Llama, Ministral3, Mistral, Olmo2, Olmo3, Phi3, Qwen2, Qwen3, SmolLm3};

const fn llama3(factor: f64) -> RopeScaling {
    RopeScaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 8192 }
}

const fn row(
    name: &'static str,
    model_type: ModelType,
    [hidden, layers, heads, kv_heads, head_dim, ffn, vocab]: [u64; 7],
    tied: bool,
    (rope_theta, rope_scaling, norm_eps): (f64, RopeScaling, f64),
    max_positions: u64,
    [bos, eos]: [i64; 2],
) -> Row {
    Row {
        name,
        model_type,
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab,
        tied,
        rope_theta,
        rope_scaling,
        norm_eps,
        max_positions,
        bos: Some(bos),
        eos,
        init_std: 0.02,
        query_scalar: 0,
    }
}

const PLAIN: RopeScaling = RopeScaling::None;

/// Scaling of the rotary frequencies of OLMo 3, in layers without a window.
const OLMO3_SCALING: RopeScaling = RopeScaling::Yarn {
    factor: 8.0,
    beta_fast: 32.0,
    beta_slow: 1.0,
    original_max_position_embeddings: 8192,
    truncate: true,
    attention_factor: 1.207_944_154_167_983_6,
};

/// Returns the row of an OLMo 2 model. These models have no token that starts a document.
const fn olmo2(name: &'static str, sizes: [u64; 7]) -> Row {
    Row { bos: None, ..row(name, Olmo2, sizes, false, (5e5, PLAIN, 1e-6), 4096, [0, 100_257]) }
}

/// Returns the row of an OLMo 3 model. These models have no token that starts a document.
const fn olmo3(name: &'static str, sizes: [u64; 7]) -> Row {
    Row { bos: None, ..row(name, Olmo3, sizes, false, (5e5, OLMO3_SCALING, 1e-6), 65_536, [0, 100_257]) }
}

/// Returns the row of a Granite 3.3 model.
const fn granite(name: &'static str, sizes: [u64; 7]) -> Row {
    row(name, Granite, sizes, true, (1e7, PLAIN, 1e-5), 131_072, [0, 0])
}

/// Returns the row of a Gemma 2 model.
const fn gemma2(name: &'static str, sizes: [u64; 7], query_scalar: u64) -> Row {
    Row { query_scalar, ..row(name, Gemma2, sizes, true, (1e4, PLAIN, 1e-6), 8192, [2, 1]) }
}

/// Returns the row of a Gemma 3 model without vision.
const fn gemma3(name: &'static str, sizes: [u64; 7]) -> Row {
    Row { query_scalar: 256, ..row(name, Gemma3Text, sizes, true, (1e6, PLAIN, 1e-6), 32_768, [2, 1]) }
}

impl Row {
    /// Returns the parts that most models do not have.
    fn extras(&self) -> Extras {
        match self.model_type {
            Gemma2 => Extras {
                window: Some(4096),
                full_layers: (1..self.layers).step_by(2).collect(),
                attention_multiplier: Some((self.query_scalar as f64).sqrt().recip()),
                score_softcap: Some(50.0),
                logit_softcap: Some(30.0),
                ..Extras::default()
            },
            // Phi 4 has no window.
            Phi3 => Extras { window: (self.name == "phi-3-mini-4k").then_some(2047), ..Extras::default() },
            SmolLm3 => Extras { unrotated_layers: (3..self.layers).step_by(4).collect(), ..Extras::default() },
            Granite => Extras {
                embedding_multiplier: 12.0,
                residual_multiplier: 0.22,
                attention_multiplier: Some((self.head_dim as f64).recip()),
                logits_scaling: self.hidden as f64 / 256.0,
                ..Extras::default()
            },
            Olmo3 => Extras {
                window: Some(4096),
                full_layers: (3..self.layers).step_by(4).collect(),
                ..Extras::of_family(Olmo3)
            },
            Gemma3Text => Extras {
                window: Some(512),
                full_layers: (5..self.layers).step_by(6).collect(),
                attention_multiplier: Some((self.query_scalar as f64).sqrt().recip()),
                ..Extras::of_family(Gemma3Text)
            },
            model_type => Extras::of_family(model_type),
        }
    }
}

/// The presets, ordered by family and size. Columns: name, type, [hidden, layers, heads, kv heads, head size,
/// feed-forward, vocabulary], tied, (theta, scaling, eps), longest sequence, [bos, eos].
#[rustfmt::skip]
static ROWS: [Row; 32] = [
    Row {
        init_std: 0.041_666_666_666_666_664,
        ..row("smollm2-135m", Llama, [576, 30, 9, 3, 64, 1536, 49152], true, (1e5, PLAIN, 1e-5), 8192, [0, 0])
    },
    row("smollm2-360m", Llama, [960, 32, 15, 5, 64, 2560, 49152], true, (1e5, PLAIN, 1e-5), 8192, [0, 0]),
    row("tinyllama-1.1b", Llama, [2048, 22, 32, 4, 64, 5632, 32000], false, (1e4, PLAIN, 1e-5), 2048, [1, 2]),
    row("llama-3.2-1b", Llama, [2048, 16, 32, 8, 64, 8192, 128_256], true, (5e5, llama3(32.0), 1e-5), 131_072, [128_000, 128_001]),
    row("llama-3.2-3b", Llama, [3072, 28, 24, 8, 128, 8192, 128_256], true, (5e5, llama3(32.0), 1e-5), 131_072, [128_000, 128_001]),
    row("llama-3.1-8b", Llama, [4096, 32, 32, 8, 128, 14336, 128_256], false, (5e5, llama3(8.0), 1e-5), 131_072, [128_000, 128_001]),
    row("llama-11b", Llama, [4096, 48, 32, 8, 128, 14336, 128_256], false, (5e5, llama3(8.0), 1e-5), 131_072, [128_000, 128_001]),
    row("llama-2-7b", Llama, [4096, 32, 32, 32, 128, 11008, 32000], false, (1e4, PLAIN, 1e-5), 4096, [1, 2]),
    row("llama-2-13b", Llama, [5120, 40, 40, 40, 128, 13824, 32000], false, (1e4, PLAIN, 1e-5), 4096, [1, 2]),
    row("mistral-7b-v0.3", Mistral, [4096, 32, 32, 8, 128, 14336, 32768], false, (1e6, PLAIN, 1e-5), 32768, [1, 2]),
    row("ministral-3-8b", Ministral3, [4096, 34, 32, 8, 128, 14336, 131_072], false, (1e6, RopeScaling::MINISTRAL3, 1e-5), 262_144, [1, 2]),
    row("qwen2.5-0.5b", Qwen2, [896, 24, 14, 2, 64, 4864, 151_936], true, (1e6, PLAIN, 1e-6), 32768, [151_643, 151_643]),
    row("qwen2.5-1.5b", Qwen2, [1536, 28, 12, 2, 128, 8960, 151_936], true, (1e6, PLAIN, 1e-6), 131_072, [151_643, 151_643]),
    row("qwen2.5-7b", Qwen2, [3584, 28, 28, 4, 128, 18944, 152_064], false, (1e6, PLAIN, 1e-6), 131_072, [151_643, 151_643]),
    row("qwen2.5-14b", Qwen2, [5120, 48, 40, 8, 128, 13824, 152_064], false, (1e6, PLAIN, 1e-5), 131_072, [151_643, 151_643]),
    row("qwen2.5-32b", Qwen2, [5120, 64, 40, 8, 128, 27648, 152_064], false, (1e6, PLAIN, 1e-5), 131_072, [151_643, 151_643]),
    row("qwen3-0.6b", Qwen3, [1024, 28, 16, 8, 128, 3072, 151_936], true, (1e6, PLAIN, 1e-6), 40960, [151_643, 151_645]),
    row("qwen3-8b", Qwen3, [4096, 36, 32, 8, 128, 12288, 151_936], false, (1e6, PLAIN, 1e-6), 40960, [151_643, 151_645]),
    row("phi-3-mini-4k", Phi3, [3072, 32, 32, 32, 96, 8192, 32064], false, (1e4, PLAIN, 1e-5), 4096, [1, 32_000]),
    row("phi-4", Phi3, [5120, 40, 40, 10, 128, 17920, 100_352], false, (250_000.0, PLAIN, 1e-5), 16384, [100_257, 100_257]),
    row("smollm3-3b", SmolLm3, [2048, 36, 16, 4, 128, 11008, 128_256], true, (5e6, PLAIN, 1e-6), 65_536, [128_000, 128_001]),
    granite("granite-3.3-2b", [2048, 40, 32, 8, 64, 8192, 49159]),
    granite("granite-3.3-8b", [4096, 40, 32, 8, 128, 12800, 49159]),
    olmo2("olmo2-1b", [2048, 16, 16, 16, 128, 8192, 100_352]),
    olmo2("olmo2-7b", [4096, 32, 32, 32, 128, 11008, 100_352]),
    olmo2("olmo2-13b", [5120, 40, 40, 40, 128, 13824, 100_352]),
    olmo3("olmo3-7b", [4096, 32, 32, 32, 128, 11008, 100_278]),
    gemma2("gemma2-2b", [2304, 26, 8, 4, 256, 9216, 256_000], 256),
    gemma2("gemma2-9b", [3584, 42, 16, 8, 256, 14336, 256_000], 256),
    gemma2("gemma2-27b", [4608, 46, 32, 16, 128, 36864, 256_000], 144),
    gemma3("gemma3-270m", [640, 18, 4, 1, 256, 2048, 262_144]),
    gemma3("gemma3-1b", [1152, 26, 4, 1, 256, 6912, 262_144]),
];

/// Returns the configuration of the preset (published model shape) with this name, such as `llama-3.2-1b`, and `None`
/// if there is none.
pub fn preset(name: &str) -> Option<ModelConfig> {
    let name = preset_name(name)?;
    ROWS.iter().find(|row| row.name == name).map(|row| ModelConfig {
        model_type: row.model_type,
        hidden: row.hidden,
        layers: row.layers,
        heads: row.heads,
        kv_heads: row.kv_heads,
        head_dim: row.head_dim,
        ffn: row.ffn,
        vocab: row.vocab,
        tied: row.tied,
        norm_eps: row.norm_eps,
        rope_theta: row.rope_theta,
        rope_scaling: row.rope_scaling,
        qkv_bias: row.model_type.qkv_bias(),
        attention_out_bias: false,
        ffn_bias: false,
        qk_norm: row.model_type.qk_norm(),
        max_positions: row.max_positions,
        bos: row.bos,
        eos: vec![row.eos],
        init_std: row.init_std,
        extras: row.extras(),
    })
}

/// Returns the names of all presets (published model shapes), ordered by family and size.
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    ROWS.iter().map(|row| row.name)
}

/// Pairs of a size without a family name, such as `7b`, and the preset that it stands for.
const SIZES: [(&str, &str); 9] = [
    ("0.5b", "qwen2.5-0.5b"),
    ("1b", "llama-3.2-1b"),
    ("3b", "llama-3.2-3b"),
    ("7b", "llama-2-7b"),
    ("8b", "llama-3.1-8b"),
    ("11b", "llama-11b"),
    ("13b", "llama-2-13b"),
    ("14b", "qwen2.5-14b"),
    ("32b", "qwen2.5-32b"),
];

/// Returns the name of the preset that `text` stands for: a preset, or a size without family such as `7b`, in upper or
/// lower case. `None` for other text.
pub fn preset_name(text: &str) -> Option<&'static str> {
    let of_size = SIZES.iter().find(|(size, _)| size.eq_ignore_ascii_case(text)).map(|(_, name)| *name);
    of_size.or_else(|| preset_names().find(|name| name.eq_ignore_ascii_case(text)))
}

/// Returns the name of the preset most similar to `name`, which may be misspelled or start with a publisher
/// (`meta-llama/…`); `None` if no name is similar.
pub fn closest_preset(name: &str) -> Option<&'static str> {
    const SIMILARITY_MIN: f64 = 0.75;
    let lower = name.to_lowercase();
    let bare = lower.rsplit('/').next().unwrap_or(&lower);
    preset_names()
        .map(|known| (strsim::normalized_damerau_levenshtein(bare, known), known))
        .filter(|(similarity, _)| *similarity >= SIMILARITY_MIN)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the counts that the publishers print, to every printed digit.
    #[test]
    fn parameter_counts_match_published_counts() {
        let published = [
            ("smollm2-135m", "134.5 M"),
            ("smollm2-360m", "361.8 M"),
            ("tinyllama-1.1b", "1.100 B"),
            ("llama-3.2-1b", "1.236 B"),
            ("llama-3.2-3b", "3.213 B"),
            ("llama-3.1-8b", "8.030 B"),
            // Our own count, since this shape has no publisher.
            ("llama-11b", "11.520 B"),
            ("llama-2-7b", "6.738 B"),
            ("llama-2-13b", "13.016 B"),
            ("mistral-7b-v0.3", "7.248 B"),
            // Our own count: the publisher adds the image encoder.
            ("ministral-3-8b", "8.490 B"),
            ("qwen2.5-0.5b", "494.0 M"),
            ("qwen2.5-1.5b", "1.544 B"),
            ("qwen2.5-7b", "7.616 B"),
            ("qwen2.5-14b", "14.77 B"),
            ("qwen2.5-32b", "32.76 B"),
            ("qwen3-0.6b", "596 M"),
            ("qwen3-8b", "8.191 B"),
            ("phi-3-mini-4k", "3.821 B"),
            ("phi-4", "14.66 B"),
            ("smollm3-3b", "3.075 B"),
            ("granite-3.3-2b", "2.534 B"),
            ("granite-3.3-8b", "8.171 B"),
            // Our own counts: the publisher rounds to billions.
            ("olmo2-1b", "1.485 B"),
            ("olmo2-7b", "7.299 B"),
            ("olmo2-13b", "13.716 B"),
            ("olmo3-7b", "7.298 B"),
            ("gemma2-2b", "2.614 B"),
            ("gemma2-9b", "9.242 B"),
            ("gemma2-27b", "27.227 B"),
            ("gemma3-270m", "268.1 M"),
            ("gemma3-1b", "1.000 B"),
        ];
        assert_eq!(preset_names().collect::<Vec<_>>(), published.map(|(name, _)| name));
        for (name, printed) in published {
            let (digits, unit) = printed.split_once(' ').unwrap();
            let decimals = digits.split_once('.').map_or(0, |(_, fraction)| fraction.len());
            let scale = if unit == "M" { 1e6 } else { 1e9 };
            let counted = preset(name).unwrap().parameters() as f64 / scale;
            assert_eq!(format!("{counted:.decimals$}"), digits, "{name}");
        }
    }

    #[test]
    fn sizes_map_to_presets() {
        assert!(SIZES.iter().all(|(size, name)| preset(name).is_some() && preset(size) == preset(name)));
        assert_eq!(
            (preset_name("7B"), preset_name("11b"), preset_name("9b"), preset_name("Llama-2-7B")),
            (Some("llama-2-7b"), Some("llama-11b"), None, Some("llama-2-7b"))
        );
    }

    #[test]
    fn presets_are_valid() {
        for name in preset_names() {
            assert_eq!(preset(name).unwrap().validate(), Ok(()), "{name}");
        }
    }

    #[test]
    fn misspelled_names_find_closest_preset() {
        assert_eq!(closest_preset("meta-llama/Llama-3.2-1B"), Some("llama-3.2-1b"));
        assert_eq!(closest_preset("qwen25-7b"), Some("qwen2.5-7b"));
        assert_eq!(closest_preset("smolm2-135m"), Some("smollm2-135m"));
        assert_eq!(closest_preset("gpt-2"), None);
    }
}
