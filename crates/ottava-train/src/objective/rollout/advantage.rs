//! Advantages: how much better a completion is than others, from their rewards.

use ottava_settings::{AdvantageEstimator, ScaleRewards};

/// Added to standard deviations, as in TRL.
pub(super) const EPSILON: f64 = 1e-4;

/// The advantages of completions, from the `rewards` of each group of completions of one prompt; a completion without a reward has advantage 0
/// and does not count.
///
/// - "grpo": reward minus the mean of its group, divided by the standard deviation that `scale` names (Shao et al. 2024, arXiv:2402.03300); with
///   "none" undivided (Liu et al. 2025, arXiv:2503.20783).
/// - "rloo": reward minus the mean of the others of its group (Ahmadian et al. 2024, arXiv:2402.14740), which is unbiased; scaled alike.
/// - "reinforce_plus_plus": reward minus the mean of all tokens, divided by their standard deviation (Hu 2025, arXiv:2501.03262). `tokens` has the
///   number of tokens of each completion.
///
/// Standard deviations divide by one less than the number of rewards.
pub fn advantages(
    estimator: AdvantageEstimator,
    scale: ScaleRewards,
    rewards: &[Vec<Option<f64>>],
    tokens: &[Vec<usize>],
) -> Vec<Vec<f64>> {
    let all = Moments::of(rewards.iter().flatten().flatten().map(|&reward| (reward, 1.0)));
    let by_token = Moments::of(
        rewards
            .iter()
            .flatten()
            .zip(tokens.iter().flatten())
            .filter_map(|(reward, &tokens)| reward.map(|reward| (reward, tokens as f64))),
    );
    let of_group = |group: &Vec<Option<f64>>| {
        let own = Moments::of(group.iter().flatten().map(|&reward| (reward, 1.0)));
        let spread = match scale {
            ScaleRewards::Group => own.deviation() + EPSILON,
            ScaleRewards::Batch => all.deviation() + EPSILON,
            ScaleRewards::None => 1.0,
        };
        let advantage = |reward: f64| match estimator {
            AdvantageEstimator::Grpo => (reward - own.mean()) / spread,
            // r - mean of the others = n / (n - 1) · (r - mean of all).
            AdvantageEstimator::Rloo if own.count > 1.0 => {
                own.count / (own.count - 1.0) * (reward - own.mean()) / spread
            }
            AdvantageEstimator::Rloo => 0.0,
            AdvantageEstimator::ReinforcePlusPlus => (reward - by_token.mean()) / (by_token.deviation() + EPSILON),
            AdvantageEstimator::Gae => unreachable!("values give each token an advantage of its own"),
        };
        group.iter().map(|reward| reward.map_or(0.0, advantage)).collect()
    };
    rewards.iter().map(of_group).collect()
}

/// Sums of rewards, or of advantages, with weights.
pub(super) struct Moments {
    count: f64,
    sum: f64,
    squares: f64,
}

impl Moments {
    /// Of rewards with their weights. Two passes, since rewards that are all equal have no deviation at all.
    pub(super) fn of(rewards: impl Iterator<Item = (f64, f64)> + Clone) -> Moments {
        let count: f64 = rewards.clone().map(|(_, weight)| weight).sum();
        let sum: f64 = rewards.clone().map(|(reward, weight)| reward * weight).sum();
        let mean = sum / count.max(1.0);
        let squares = rewards.map(|(reward, weight)| weight * (reward - mean).powi(2)).sum();
        Moments { count, sum, squares }
    }

    pub(super) fn mean(&self) -> f64 {
        self.sum / self.count.max(1.0)
    }

    pub(super) fn deviation(&self) -> f64 {
        (self.squares / (self.count - 1.0).max(1.0)).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(estimator: AdvantageEstimator, scale: ScaleRewards, rewards: &[&[f64]]) -> Vec<Vec<f64>> {
        let rewards: Vec<Vec<_>> = rewards.iter().map(|group| group.iter().copied().map(Some).collect()).collect();
        let tokens: Vec<Vec<usize>> = rewards.iter().map(|group| (1..=group.len()).collect()).collect();
        advantages(estimator, scale, &rewards, &tokens)
    }

    /// Sums of a few rewards in F64 differ by some units of 2⁻⁵³.
    const ROUNDING: f64 = 1e-12;

    fn near(found: &[Vec<f64>], expected: &[&[f64]]) {
        let apart = found.iter().flatten().zip(expected.iter().copied().flatten()).map(|(a, b)| (a - b).abs());
        assert!(apart.fold(0.0, f64::max) < ROUNDING, "{found:?}, {expected:?}");
    }

    #[test]
    fn advantages_are_those_of_the_papers() {
        use AdvantageEstimator::{Grpo, ReinforcePlusPlus, Rloo};
        // One of eight is right: GRPO gives it 2.47 and the others -0.35.
        let one_of_eight: &[f64] = &[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let found = of(Grpo, ScaleRewards::Group, &[one_of_eight]);
        let deviation = (0.125f64 * 0.875 * 8.0 / 7.0).sqrt() + EPSILON;
        near(&found, &[&[0.875 / deviation, -0.125 / deviation]]);
        assert!((found[0][0] - 2.474).abs() < 1e-3 && (found[0][1] + 0.353).abs() < 1e-3, "{found:?}");
        near(&of(Grpo, ScaleRewards::None, &[&[1.0, 3.0]]), &[&[-1.0, 1.0]]);
        near(&of(Rloo, ScaleRewards::None, &[&[1.0, 3.0, 8.0]]), &[&[1.0 - 5.5, 3.0 - 4.5, 8.0 - 2.0]]);
        // All of a group are equal: nothing is learned from them, whatever the scale.
        near(&of(Grpo, ScaleRewards::Group, &[&[0.3, 0.3, 0.3]]), &[&[0.0; 3]]);
        let both = of(Grpo, ScaleRewards::Batch, &[&[0.0, 1.0], &[0.0, 0.0]]);
        let deviation = (0.75f64 / 3.0).sqrt() + EPSILON;
        near(&both, &[&[-0.5 / deviation, 0.5 / deviation], &[0.0, 0.0]]);
        // Tokens 1, 2: rewards 0, 3, 3; mean 2, variance (4 + 1 + 1) / 2.
        let deviation = 3f64.sqrt() + EPSILON;
        near(&of(ReinforcePlusPlus, ScaleRewards::Group, &[&[0.0, 3.0]]), &[&[-2.0 / deviation, 1.0 / deviation]]);
    }

    #[test]
    fn completions_without_a_reward_do_not_count() {
        for estimator in [AdvantageEstimator::Grpo, AdvantageEstimator::Rloo] {
            let some = |rewards: &[Option<f64>]| {
                let tokens = vec![vec![1; rewards.len()]];
                advantages(estimator, ScaleRewards::Group, &[rewards.to_vec()], &tokens).remove(0)
            };
            let with = some(&[Some(1.0), None, Some(0.0), Some(0.0)]);
            let without = some(&[Some(1.0), Some(0.0), Some(0.0)]);
            assert_eq!((with[0], with[1], with[2]), (without[0], 0.0, without[1]));
            assert_eq!(some(&[Some(2.0), None]), [0.0, 0.0], "one reward has nothing to compare with");
            assert_eq!(some(&[None, None]), [0.0, 0.0]);
        }
    }
}
