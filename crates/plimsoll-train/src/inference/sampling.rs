//! The choice of the next token. The same seed yields the same tokens.

use crate::data::splitmix64;
use crate::files::GenerationDefaults;
use serde::Serialize;

/// Number of the most likely tokens that transformers keeps if a `generation_config.json` samples and names no other.
const DEFAULT_TOP_K: usize = 50;

/// Rules for the choice of the next token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Sampling {
    /// Softmax temperature. 0 selects the most likely token.
    pub temperature: f64,
    /// Number of the most likely tokens from which the next one is drawn; 0 means all.
    pub top_k: usize,
    /// Nucleus sampling: the next token is drawn from the fewest most likely tokens that together have this
    /// probability. 1 means all.
    pub top_p: f64,
    /// The next token is drawn from those with at least this share of the probability of the most likely one. 0 means
    /// all.
    pub min_p: f64,
    /// Logits of tokens that were there before are divided by it if they are positive, else multiplied. 1 changes none.
    pub repetition_penalty: f64,
    /// Seed of the random draws.
    pub seed: u64,
}

/// Rules of sampling that the user gives. Those that are `None` are the model's own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingChoice {
    /// See [`Sampling::temperature`].
    pub temperature: Option<f64>,
    /// See [`Sampling::top_k`].
    pub top_k: Option<usize>,
    /// See [`Sampling::top_p`].
    pub top_p: Option<f64>,
    /// See [`Sampling::min_p`].
    pub min_p: Option<f64>,
    /// See [`Sampling::repetition_penalty`].
    pub repetition_penalty: Option<f64>,
    /// See [`Sampling::seed`].
    pub seed: u64,
}

impl Sampling {
    /// Rules that always select the most likely token.
    pub const GREEDY: Sampling =
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 };

    /// Completes the user's rules by those of the model's `generation_config.json`, as transformers reads it: without
    /// `do_sample` the most likely token is selected.
    pub fn new(choice: SamplingChoice, model: &GenerationDefaults) -> Sampling {
        let samples = model.do_sample == Some(true);
        let own_temperature = if samples { model.temperature.unwrap_or(1.0) } else { 0.0 };
        let own_top_k = model.top_k.or(samples.then_some(DEFAULT_TOP_K)).unwrap_or(0);
        Sampling {
            temperature: choice.temperature.unwrap_or(own_temperature),
            top_k: choice.top_k.unwrap_or(own_top_k),
            top_p: choice.top_p.or(model.top_p).unwrap_or(1.0),
            min_p: choice.min_p.or(model.min_p).unwrap_or(0.0),
            repetition_penalty: choice.repetition_penalty.or(model.repetition_penalty).unwrap_or(1.0),
            seed: choice.seed,
        }
    }

    /// Returns the id of the token to put after `context`, chosen by its `logits`, of shape `[V]`. The seed and the
    /// length of the context decide a random choice.
    pub fn choose(&self, logits: &mut [f64], context: &[i32]) -> usize {
        self.penalize(logits, context);
        if self.temperature <= 0.0 {
            return most_likely(logits);
        }
        let random = uniform(self.seed, context.len() as u64);
        if self.draws_from_all() {
            return Distribution::new(logits, self.temperature).draw(random);
        }
        self.draw_from_some(logits, random)
    }

    /// Chooses a token as [`Sampling::choose`] does, and describes the distribution of all tokens before any penalty.
    pub fn choose_and_describe(&self, logits: &mut [f64], context: &[i32]) -> Choice {
        let temperature = if self.temperature > 0.0 { self.temperature } else { 1.0 };
        let distribution = Distribution::new(logits, temperature);
        let before_penalty = (self.repetition_penalty != 1.0).then(|| logits.to_vec());
        let token = if self.draws_from_all() && self.repetition_penalty == 1.0 {
            distribution.draw(uniform(self.seed, context.len() as u64))
        } else {
            self.choose(logits, context)
        };
        let logit = before_penalty.as_deref().unwrap_or(logits)[token];
        Choice { token: token as i32, logp: distribution.logp(logit), entropy: distribution.entropy() }
    }

    /// Whether each token can be drawn.
    fn draws_from_all(&self) -> bool {
        self.temperature > 0.0 && self.top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0
    }

    /// Draws one of the tokens that the rules keep.
    fn draw_from_some(&self, logits: &[f64], random: f64) -> usize {
        let best = most_likely(logits);
        let mut order: Vec<usize> = (0..logits.len()).collect();
        let by_logit = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
        if self.top_k > 0 && self.top_k < order.len() {
            order.select_nth_unstable_by(self.top_k, by_logit);
            order.truncate(self.top_k);
        }
        order.sort_unstable_by(by_logit);
        let weight = |i: usize| ((logits[i] - logits[best]) / self.temperature).exp();
        let mut weights: Vec<f64> = order.iter().map(|&i| weight(i)).collect();
        if self.top_p < 1.0 {
            let (total, mut share) = (weights.iter().sum::<f64>(), 0.0);
            let last_kept = weights.iter().position(|weight| {
                share += weight / total;
                share >= self.top_p
            });
            weights.truncate(last_kept.map_or(weights.len(), |last| last + 1));
        }
        if self.min_p > 0.0 {
            // The most likely token has the weight 1.
            weights.truncate(weights.partition_point(|weight| *weight >= self.min_p).max(1));
        }
        order[draw(&weights, weights.iter().sum(), random)]
    }

    /// Changes the logits of the tokens of `context`, each once.
    fn penalize(&self, logits: &mut [f64], context: &[i32]) {
        if self.repetition_penalty == 1.0 {
            return;
        }
        let mut tokens: Vec<usize> = context.iter().map(|&id| id as usize).filter(|&id| id < logits.len()).collect();
        tokens.sort_unstable();
        tokens.dedup();
        for token in tokens {
            let logit = &mut logits[token];
            *logit = if *logit > 0.0 { *logit / self.repetition_penalty } else { *logit * self.repetition_penalty };
        }
    }
}

/// A chosen token, and the distribution of all tokens from which it was chosen: at the temperature of sampling, or at 1 if
/// that is 0.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// Id of the token.
    pub token: i32,
    /// Its log-probability.
    pub logp: f64,
    /// Entropy of the distribution, in nats.
    pub entropy: f64,
}

/// The probabilities of all tokens at a temperature.
struct Distribution {
    /// Probability of each token, times `total`. The most likely token has the weight 1.
    weights: Vec<f64>,
    total: f64,
    /// Sum of w · ln w over all weights w.
    logs: f64,
    largest: f64,
    temperature: f64,
}

impl Distribution {
    fn new(logits: &[f64], temperature: f64) -> Distribution {
        let largest = logits[most_likely(logits)];
        let (mut weights, mut total, mut logs) = (Vec::with_capacity(logits.len()), 0.0, 0.0);
        for logit in logits {
            let log = (logit - largest) / temperature;
            let weight = log.exp();
            weights.push(weight);
            total += weight;
            // The weight of a logit of -∞ is 0.
            logs += if weight > 0.0 { weight * log } else { 0.0 };
        }
        Distribution { weights, total, logs, largest, temperature }
    }

    /// Returns the token that a random number in [0, 1) draws.
    fn draw(&self, random: f64) -> usize {
        draw(&self.weights, self.total, random)
    }

    /// Returns the log-probability of a token by its logit.
    fn logp(&self, logit: f64) -> f64 {
        (logit - self.largest) / self.temperature - self.total.ln()
    }

    fn entropy(&self) -> f64 {
        self.total.ln() - self.logs / self.total
    }
}

/// Returns the index of the largest logit, of equal ones the first.
fn most_likely(logits: &[f64]) -> usize {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

/// Returns the index that a random number in [0, 1) draws by weights with the sum `total`.
fn draw(weights: &[f64], total: f64, random: f64) -> usize {
    let mut remaining = random * total;
    let drawn = weights.iter().position(|weight| {
        remaining -= weight;
        remaining < 0.0
    });
    drawn.unwrap_or(weights.len() - 1)
}

/// Returns a number in [0, 1) that depends only on its arguments, by hashing twice with splitmix64.
fn uniform(seed: u64, position: u64) -> f64 {
    (splitmix64(splitmix64(seed) ^ position) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the token that is drawn after `length` tokens without meaning.
    fn draw(sampling: &Sampling, logits: &[f64], length: usize) -> usize {
        sampling.choose(&mut logits.to_vec(), &vec![0; length])
    }

    #[test]
    fn draws_depend_on_seed_and_follow_weights() {
        let logits = [0.0, 2f64.ln(), 5f64.ln()];
        let sampling = Sampling { temperature: 1.0, seed: 7, ..Sampling::GREEDY };
        let mut counts = [0; 3];
        for length in 0..8000 {
            let token = draw(&sampling, &logits, length);
            assert_eq!(token, draw(&sampling, &logits, length));
            counts[token] += 1;
        }
        for (count, share) in counts.iter().zip([1.0, 2.0, 5.0]) {
            assert!((f64::from(*count) / 1000.0 - share).abs() < 0.2, "{counts:?}");
        }
    }

    #[test]
    fn choices_have_their_probability_and_entropy() {
        let logits = [0.0, 2f64.ln(), 5f64.ln()];
        let of = |sampling: Sampling| sampling.choose_and_describe(&mut logits.clone(), &[1, 1]);
        let base = Sampling { temperature: 1.0, seed: 7, ..Sampling::GREEDY };
        let entropy = |shares: [f64; 3]| -shares.iter().map(|share| share * share.ln()).sum::<f64>();
        let (shares, squares) = ([0.125, 0.25, 0.625], [1.0, 4.0, 25.0].map(|weight: f64| weight / 30.0));
        // At temperature 0, and with rules that leave out tokens, the distribution is that of all tokens.
        for (sampling, shares) in [
            (base, shares),
            (Sampling { temperature: 0.5, ..base }, squares),
            (Sampling::GREEDY, shares),
            (Sampling { top_k: 1, ..base }, shares),
            (Sampling { repetition_penalty: 100.0, ..base }, shares),
        ] {
            let choice = of(sampling);
            assert_eq!(choice.token as usize, sampling.choose(&mut logits.clone(), &[1, 1]), "{sampling:?}");
            assert!((choice.logp - shares[choice.token as usize].ln()).abs() < 1e-12, "{sampling:?}");
            assert!((choice.entropy - entropy(shares)).abs() < 1e-12, "{sampling:?}");
        }
    }

    #[test]
    fn top_k_top_p_and_min_p_keep_most_likely() {
        let logits = [1.0, 3.0, 2.0, 0.0];
        let base = Sampling { temperature: 1.0, seed: 1, ..Sampling::GREEDY };
        let drawn = |s: Sampling| (0..500).map(|at| draw(&s, &logits, at)).collect::<std::collections::BTreeSet<_>>();
        assert_eq!(drawn(base).len(), 4);
        assert_eq!(drawn(Sampling { top_k: 2, ..base }), [1, 2].into());
        assert_eq!(drawn(Sampling { top_p: 0.5, ..base }), [1].into());
        // The second token has e^-1 of the probability of the first, the third e^-2.
        assert_eq!(drawn(Sampling { min_p: 0.2, ..base }), [1, 2].into());
        assert_eq!(drawn(Sampling { min_p: 0.1, ..base }), [0, 1, 2].into());
        assert_eq!(drawn(Sampling::GREEDY), [1].into());
    }

    /// Returns the exact probability of each token after `context`, straight from the definition of each rule.
    fn probabilities(sampling: &Sampling, logits: &[f64], context: &[i32]) -> Vec<f64> {
        let penalized = |(id, &logit): (usize, &f64)| match context.contains(&(id as i32)) {
            true if logit > 0.0 => logit / sampling.repetition_penalty,
            true => logit * sampling.repetition_penalty,
            false => logit,
        };
        let mut weights: Vec<f64> =
            logits.iter().enumerate().map(penalized).map(|logit| (logit / sampling.temperature).exp()).collect();
        let keep = |weights: &mut Vec<f64>, is_kept: &dyn Fn(f64) -> bool| {
            let sum: f64 = weights.iter().filter(|weight| is_kept(**weight)).sum();
            weights.iter_mut().for_each(|weight| *weight = if is_kept(*weight) { *weight / sum } else { 0.0 });
        };
        let descending = |weights: &[f64]| {
            let mut sorted = weights.to_vec();
            sorted.sort_by(|a, b| b.total_cmp(a));
            sorted
        };
        keep(&mut weights, &|_| true);
        if sampling.top_k > 0 {
            let least = descending(&weights)[sampling.top_k.min(weights.len()) - 1];
            keep(&mut weights, &|weight| weight >= least);
        }
        let (mut sum, mut least) = (0.0, 0.0);
        for weight in descending(&weights) {
            if sum < sampling.top_p {
                least = weight;
            }
            sum += weight;
        }
        keep(&mut weights, &|weight| weight >= least);
        let largest = descending(&weights)[0];
        keep(&mut weights, &|weight| weight >= sampling.min_p * largest);
        weights
    }

    #[test]
    fn draws_have_their_exact_probabilities() {
        let draws = 4000;
        for number in 0..200u64 {
            let random = |place: u64| uniform(number, place);
            let count = 3 + number % 38;
            let logits: Vec<f64> = (0..count).map(|id| 8.0 * random(100 + id) - 4.0).collect();
            let sampling = Sampling {
                temperature: 0.3 + 1.5 * random(0),
                top_k: if random(1) < 0.5 { (random(2) * count as f64) as usize } else { 0 },
                top_p: if random(3) < 0.5 { 0.3 + 0.7 * random(4) } else { 1.0 },
                min_p: if random(5) < 0.3 { 0.3 * random(6) } else { 0.0 },
                repetition_penalty: if random(7) < 0.3 { 1.0 + random(8) } else { 1.0 },
                seed: number,
            };
            let mut counts = vec![0.0; count as usize];
            for length in 1..=draws {
                counts[sampling.choose(&mut logits.clone(), &vec![1; length])] += 1.0;
            }
            let probabilities = probabilities(&sampling, &logits, &[1]);
            assert!(counts.iter().zip(&probabilities).all(|(count, share)| *share > 0.0 || *count == 0.0), "{number}");
            // Tokens that few draws are expected to take count as one class.
            let expected = probabilities.iter().map(|share| share * draws as f64);
            let (rare, common): (Vec<_>, Vec<_>) =
                counts.iter().zip(expected).partition(|(_, expected)| *expected < 10.0);
            let rare = rare.iter().fold((0.0, 0.0), |sums, (count, expected)| (sums.0 + **count, sums.1 + expected));
            let classes = common.iter().map(|(count, expected)| (**count, *expected)).chain([rare]);
            let classes: Vec<(f64, f64)> = classes.filter(|(_, expected)| *expected > 1.0).collect();
            let statistic: f64 = classes.iter().map(|(count, expected)| (count - expected).powi(2) / expected).sum();
            let freedom = classes.len() as f64 - 1.0;
            if freedom > 0.0 {
                // The cube root of chi-square is nearly normal (Wilson and Hilferty).
                let spread = 2.0 / (9.0 * freedom);
                let deviations = ((statistic / freedom).cbrt() - (1.0 - spread)) / spread.sqrt();
                assert!(deviations < 4.5, "{number}: chi-square {statistic} with {freedom} degrees of freedom");
            }
        }
    }

    #[test]
    fn repeated_tokens_are_penalized_once() {
        let sampling = Sampling { repetition_penalty: 2.0, ..Sampling::GREEDY };
        let mut logits = [3.0, 2.0, -1.0, -1.5];
        assert_eq!(sampling.choose(&mut logits, &[0, 0, 3, 99]), 1);
        assert_eq!(logits, [1.5, 2.0, -1.0, -3.0]);
    }

    #[test]
    fn rules_of_the_model_apply_unless_the_user_gives_others() {
        let none = GenerationDefaults::default();
        assert_eq!(Sampling::new(SamplingChoice::default(), &none), Sampling::GREEDY);
        let model = GenerationDefaults {
            do_sample: Some(true),
            temperature: Some(0.6),
            top_p: Some(0.9),
            repetition_penalty: Some(1.1),
            ..none
        };
        let own = Sampling::new(SamplingChoice { seed: 3, ..SamplingChoice::default() }, &model);
        let expected = Sampling {
            temperature: 0.6,
            top_k: DEFAULT_TOP_K,
            top_p: 0.9,
            min_p: 0.0,
            repetition_penalty: 1.1,
            seed: 3,
        };
        assert_eq!(own, expected);
        let choice = SamplingChoice { temperature: Some(0.0), top_k: Some(5), seed: 3, ..SamplingChoice::default() };
        assert_eq!(Sampling::new(choice, &model), Sampling { temperature: 0.0, top_k: 5, ..expected });
        // Without `do_sample` the other values wait for a temperature of the user.
        let greedy = GenerationDefaults { do_sample: None, ..model };
        let choice = SamplingChoice { temperature: Some(1.0), ..SamplingChoice::default() };
        let drawn = Sampling::new(choice, &greedy);
        assert_eq!((drawn.temperature, drawn.top_k, drawn.top_p), (1.0, 0, 0.9));
        assert_eq!(Sampling::new(SamplingChoice::default(), &greedy).temperature, 0.0);
    }
}
