//! Metrics of completions of prompts that are held out.

use super::completion::{Completion, metrics};
use crate::step::Metrics;

/// The metrics of an evaluation. `likely` has the most likely completion of each prompt, and `draws` the drawn completions of each prompt, which may be
/// none. A completion passes if its reward is at least `pass_reward`. `rewards` are the names of the scores.
///
/// "accuracy" is the share of the most likely completions that pass. "pass@k" is the probability that at least one of k drawn completions passes, by the
/// estimator without bias of Chen et al. 2021, arXiv:2107.03374, for each power of two k up to the number of draws of a prompt.
pub(super) fn held_out_metrics(
    likely: &[Vec<Completion>],
    draws: &[Vec<Completion>],
    pass_reward: f64,
    rewards: &[String],
) -> Metrics {
    let mut found = metrics(likely, rewards);
    found.named.retain(|(name, _)| !["reward_std", "frac_reward_zero_std"].contains(&&**name));
    let passes = |completion: &Completion| completion.reward.is_some_and(|reward| reward >= pass_reward);
    let counts = |groups: &[Vec<Completion>]| -> Vec<[usize; 2]> {
        groups.iter().map(|group| [group.len(), group.iter().filter(|each| passes(each)).count()]).collect()
    };
    let of_likely = counts(likely);
    found.named.push(("accuracy".into(), mean(&of_likely, |[all, passed]| *passed as f64 / *all as f64)));
    let of_draws = counts(draws);
    let most = of_draws.iter().map(|[all, _]| *all).min().unwrap_or(0);
    for k in (0..).map(|power| 1usize << power).take_while(|k| *k <= most) {
        found.named.push((format!("pass@{k}").into(), mean(&of_draws, |[all, passed]| pass_at(*all, *passed, k))));
    }
    found
}

fn mean(counts: &[[usize; 2]], of: impl Fn(&[usize; 2]) -> f64) -> f64 {
    counts.iter().map(of).sum::<f64>() / counts.len().max(1) as f64
}

/// 1 - C(all - passed, k) / C(all, k): the probability that k of `all` completions, drawn without replacement, contain one of the `passed`.
fn pass_at(all: usize, passed: usize, k: usize) -> f64 {
    let failed = all - passed;
    if failed < k {
        return 1.0;
    }
    1.0 - (0..k).map(|i| (failed - i) as f64 / (all - i) as f64).product::<f64>()
}

#[cfg(test)]
mod tests {
    use super::super::sample::{End, Sample};
    use super::*;

    fn group(rewards: &[Option<f64>]) -> Vec<Completion> {
        let sample = Sample::of_turn(vec![1], vec![2], vec![-0.5], End::Text);
        let completion =
            |&reward| Completion { sample: sample.clone(), old: None, values: None, reward, scores: Vec::new() };
        rewards.iter().map(completion).collect()
    }

    #[test]
    fn pass_at_k_is_the_share_of_subsets_with_a_success() {
        for all in 1..=6usize {
            for passed in 0..=all {
                for k in 1..=all {
                    let subsets: Vec<u32> = (0u32..1 << all).filter(|set| set.count_ones() == k as u32).collect();
                    let with = subsets.iter().filter(|set| **set & ((1 << passed) - 1) != 0).count();
                    let expected = with as f64 / subsets.len() as f64;
                    // Up to six quotients in F64.
                    assert!((pass_at(all, passed, k) - expected).abs() < 1e-12, "{all}, {passed}, {k}");
                }
            }
        }
    }

    #[test]
    fn an_evaluation_has_accuracy_and_pass_at_k() {
        let likely = [group(&[Some(1.0)]), group(&[Some(0.5)]), group(&[None]), group(&[Some(2.0)])];
        let draws = [
            group(&[Some(1.0), Some(0.0), Some(0.0), Some(0.0)]),
            group(&[Some(0.0); 4]),
            group(&[Some(1.0); 4]),
            group(&[None, Some(1.0), Some(1.0), None]),
        ];
        let found = held_out_metrics(&likely, &draws, 1.0, &[]);
        let expected = [
            ("accuracy", 0.5),
            ("pass@1", (0.25 + 1.0 + 0.5) / 4.0),
            ("pass@2", (0.5 + 1.0 + 5.0 / 6.0) / 4.0),
            ("pass@4", 0.75),
        ];
        for (name, value) in expected {
            // Means of four numbers in F64.
            assert!((found.get(name).unwrap() - value).abs() < 1e-12, "{name}: {found:?}");
        }
        assert_eq!((found.get("pass@8"), found.get("reward_std")), (None, None));
        assert_eq!(held_out_metrics(&likely, &[], 1.0, &[]).get("pass@1"), None);
    }
}
