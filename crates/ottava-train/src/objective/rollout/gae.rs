//! Generalized advantage estimation: advantages and returns of tokens, from the values that a value head estimates.

use super::advantage::{EPSILON, Moments};

/// The discount and the decay of advantages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gae {
    /// The discount `γ` of a reward per token.
    pub gamma: f64,
    /// The decay `λ` of errors of values per token: 1 takes the reward itself, 0 takes the value of the next token.
    pub lambda: f64,
}

impl Gae {
    /// The advantages of the tokens of a completion with these `values`, whose `reward` comes with its last token:
    /// `δ_t = r_t + γ · V_{t+1} - V_t` and `A_t = δ_t + γ · λ · A_{t+1}`, where `V` and `A` after the last token are 0. The return of a token is its
    /// advantage plus its value. Schulman et al. 2015, arXiv:1506.02438.
    ///
    /// `values` are the values of the tokens that the policy drew. Tokens between them that the policy did not draw carry value and advantage
    /// unchanged, so they are left out.
    pub fn advantages(self, reward: f64, values: &[f64]) -> Vec<f64> {
        let (mut next, mut advantage) = (0.0, 0.0);
        let mut found: Vec<f64> = values
            .iter()
            .enumerate()
            .rev()
            .map(|(t, &value)| {
                let own = if t + 1 == values.len() { reward } else { 0.0 };
                advantage = own + self.gamma * next - value + self.gamma * self.lambda * advantage;
                next = value;
                advantage
            })
            .collect();
        found.reverse();
        found
    }
}

/// Subtracts the mean over all tokens from `advantages`, and divides them by their standard deviation, which divides by one less than their number.
pub fn whiten(advantages: &mut [Vec<f64>]) {
    let moments = Moments::of(advantages.iter().flatten().map(|&advantage| (advantage, 1.0)));
    let (mean, deviation) = (moments.mean(), moments.deviation() + EPSILON);
    advantages.iter_mut().flatten().for_each(|advantage| *advantage = (*advantage - mean) / deviation);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum over later errors: `A_t = Σ_k (γλ)^k δ_{t+k}`; with `λ` = 1 the discounted reward minus the value, and with 0 the error itself.
    #[test]
    fn advantages_are_those_of_the_formula() {
        let (values, reward) = ([0.5, -0.25, 2.0, 1.0], 3.0);
        for (gamma, lambda) in [(1.0, 1.0), (0.9, 0.8), (0.99, 0.0), (1.0, 0.95)] {
            let error = |t: usize| match values.get(t + 1) {
                Some(next) => gamma * next - values[t],
                None => reward - values[t],
            };
            let found = Gae { gamma, lambda }.advantages(reward, &values);
            for (t, found) in found.iter().enumerate() {
                let expected: f64 =
                    (t..values.len()).map(|later| (gamma * lambda).powi((later - t) as i32) * error(later)).sum();
                // Sums of four terms in F64.
                assert!((found - expected).abs() < 1e-12, "{gamma}, {lambda}, {t}: {found}, {expected}");
            }
            if lambda == 1.0 {
                assert!((found[0] - (gamma.powi(3) * reward - values[0])).abs() < 1e-12);
            }
        }
        assert_eq!(Gae { gamma: 0.5, lambda: 0.5 }.advantages(2.0, &[0.0; 3]), [0.125, 0.5, 2.0]);
        assert_eq!(Gae { gamma: 1.0, lambda: 1.0 }.advantages(2.0, &[]), [0.0; 0]);
    }

    #[test]
    fn whitened_advantages_have_mean_0_and_deviation_1() {
        let mut advantages = vec![vec![1.0, 3.0], vec![], vec![8.0]];
        whiten(&mut advantages);
        // Mean 4, variance (9 + 1 + 16) / 2.
        let deviation = 13f64.sqrt() + EPSILON;
        for (found, expected) in advantages.iter().flatten().zip([-3.0, -1.0, 4.0]) {
            assert!((found - expected / deviation).abs() < 1e-12, "{advantages:?}");
        }
        let mut equal = vec![vec![2.0, 2.0]];
        whiten(&mut equal);
        assert_eq!(equal, [[0.0, 0.0]], "equal advantages teach nothing");
    }
}
