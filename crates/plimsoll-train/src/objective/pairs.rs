//! The loss of a pair of answers, with its derivative with respect to their log-probabilities.

use crate::config::{DpoLoss, DpoSection};
use plimsoll_core::PreferenceFigures;

/// Log-probabilities of a pair of answers. Each array has the value of the chosen answer, then that of the rejected one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PairScores {
    /// Log-probabilities under the current weights, summed over the tokens of each answer.
    pub policy: [f64; 2],
    /// Log-probabilities under the initial weights; 0 without a reference model.
    pub reference: [f64; 2],
    /// Number of labelled tokens of each answer.
    pub tokens: [f64; 2],
}

/// The loss of a pair of answers. Arrays are in the order of [`PairScores`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PairLoss {
    pub loss: f64,
    /// Loss weights of the tokens of each answer: minus the derivative of the loss with respect to the log-probability of
    /// each token. With them, the gradient of the weighted cross entropy is that of the loss.
    pub weights: [f64; 2],
    /// Rewards of the chosen and the rejected answer.
    pub rewards: [f64; 2],
}

impl PairLoss {
    /// Computes the loss of a pair.
    pub(super) fn of(settings: &DpoSection, scores: &PairScores) -> PairLoss {
        let beta = settings.beta;
        let [chosen, rejected] = [0, 1].map(|answer| scores.policy[answer] - scores.reference[answer]);
        // IPO compares means over tokens, the others sums.
        let scales = if settings.loss_type == DpoLoss::Ipo { scores.tokens.map(f64::recip) } else { [1.0; 2] };
        let margin = chosen * scales[0] - rejected * scales[1];
        let smoothing = settings.label_smoothing;
        let (loss, derivative) = match settings.loss_type {
            DpoLoss::Sigmoid => (
                (1.0 - smoothing) * softplus(-beta * margin) + smoothing * softplus(beta * margin),
                beta * (smoothing * sigmoid(beta * margin) - (1.0 - smoothing) * sigmoid(-beta * margin)),
            ),
            DpoLoss::Hinge if beta * margin < 1.0 => (1.0 - beta * margin, -beta),
            DpoLoss::Hinge => (0.0, 0.0),
            DpoLoss::Ipo => {
                let distance = margin - 0.5 / beta;
                (distance * distance, 2.0 * distance)
            }
        };
        let weights = [-derivative * scales[0], derivative * scales[1]];
        PairLoss { loss, weights, rewards: [beta * chosen, beta * rejected] }
    }
}

/// Returns ln(1 + eˣ), without overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Returns 1 / (1 + e⁻ˣ).
fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Sums over pairs of answers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PreferenceSums {
    /// Number of pairs.
    pub pairs: u64,
    loss: f64,
    rewards: [f64; 2],
    preferred: u64,
}

impl PreferenceSums {
    /// Adds a pair.
    pub fn add(&mut self, pair: &PairLoss) {
        self.pairs += 1;
        self.loss += pair.loss;
        self.rewards[0] += pair.rewards[0];
        self.rewards[1] += pair.rewards[1];
        self.preferred += u64::from(pair.rewards[0] > pair.rewards[1]);
    }

    /// Returns the mean loss of a pair; NaN without any.
    pub fn loss(&self) -> f64 {
        self.loss / self.pairs as f64
    }

    /// Returns the means over all pairs; 0 without any.
    pub fn figures(&self) -> PreferenceFigures {
        let mean = |sum: f64| if self.pairs == 0 { 0.0 } else { sum / self.pairs as f64 };
        PreferenceFigures {
            pairs: self.pairs,
            chosen_reward: mean(self.rewards[0]),
            rejected_reward: mean(self.rewards[1]),
            accuracy: mean(self.preferred as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(loss_type: DpoLoss, label_smoothing: f64) -> DpoSection {
        DpoSection { beta: 0.25, loss_type, label_smoothing, reference_free: false }
    }

    const SCORES: PairScores = PairScores { policy: [-7.5, -4.0], reference: [-8.0, -6.25], tokens: [5.0, 3.0] };

    #[test]
    fn losses_are_those_of_their_formulas() {
        // The margin is 0.5 − 2.25 = −1.75, of means over tokens 0.1 − 0.75 = −0.65.
        let loss = |loss_type, smoothing| PairLoss::of(&settings(loss_type, smoothing), &SCORES);
        let at = |x: f64| -(1.0 / (1.0 + (-x).exp())).ln();
        let sigmoid = loss(DpoLoss::Sigmoid, 0.0);
        assert!((sigmoid.loss - at(-0.4375)).abs() < 1e-15);
        assert_eq!(sigmoid.rewards, [0.125, 0.5625]);
        assert!((loss(DpoLoss::Sigmoid, 0.125).loss - 0.875 * at(-0.4375) - 0.125 * at(0.4375)).abs() < 1e-15);
        assert_eq!(loss(DpoLoss::Hinge, 0.0).loss, 1.4375);
        assert!((loss(DpoLoss::Ipo, 0.0).loss - 2.65 * 2.65).abs() < 1e-14);
        let far = PairScores { policy: [800.0, -800.0], ..SCORES };
        let certain = PairLoss::of(&settings(DpoLoss::Sigmoid, 0.0), &far);
        assert!(certain.loss < 1e-100 && certain.weights[0] < 1e-100);
        let wrong = PairLoss::of(&settings(DpoLoss::Sigmoid, 0.0), &PairScores { policy: [-8e5, 8e5], ..SCORES });
        assert!(wrong.loss.is_finite() && wrong.weights == [0.25, -0.25]);
        assert_eq!(PairLoss::of(&settings(DpoLoss::Hinge, 0.0), &far).weights, [-0.0, 0.0]);
    }

    #[test]
    fn weights_are_derivatives_by_tokens() {
        let step = 1e-5;
        for settings in [
            settings(DpoLoss::Sigmoid, 0.0),
            settings(DpoLoss::Sigmoid, 0.2),
            settings(DpoLoss::Hinge, 0.0),
            settings(DpoLoss::Ipo, 0.0),
        ] {
            for answer in 0..2 {
                let moved = |by: f64| {
                    let mut scores = SCORES;
                    scores.policy[answer] += by;
                    PairLoss::of(&settings, &scores).loss
                };
                let derivative = (moved(step) - moved(-step)) / (2.0 * step);
                let weight = PairLoss::of(&settings, &SCORES).weights[answer];
                assert!((derivative + weight).abs() < 1e-8, "{settings:?}: {derivative}, weight {weight}");
            }
        }
    }

    #[test]
    fn figures_are_means_over_pairs() {
        assert_eq!(PreferenceSums::default().figures(), PreferenceFigures::default());
        let mut sums = PreferenceSums::default();
        let pair = |loss, rewards| PairLoss { loss, weights: [0.0; 2], rewards };
        [pair(1.0, [0.5, 1.0]), pair(2.0, [1.5, -1.0])].iter().for_each(|pair| sums.add(pair));
        let figures = PreferenceFigures { pairs: 2, chosen_reward: 1.0, rejected_reward: 0.0, accuracy: 0.5 };
        assert_eq!((sums.loss(), sums.figures(), sums.figures().margin()), (1.5, figures, 1.0));
    }
}
