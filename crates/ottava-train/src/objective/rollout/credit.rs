//! Credit: the advantages of the tokens of completions, by what `[reinforcement.advantage]` compares rewards with.

use super::advantage::advantages;
use super::completion::Completion;
use super::gae::{Gae, whiten};
use super::loss::{Estimates, Scored};
use ottava_settings::{AdvantageConfig, AdvantageEstimator, ReinforcementConfig};

/// What the completions of `groups`, each of one prompt, teach: all completions of a generation, in their order.
pub(super) fn scored(config: &ReinforcementConfig, groups: &[Vec<Completion>]) -> Vec<Scored> {
    let counts = |completion: &Completion| {
        completion.reward.is_some() && (completion.sample.is_complete() || !config.mask_truncated_completions)
    };
    let all = groups.iter().flatten().map(|completion| Scored {
        counts: counts(completion),
        sample: completion.sample.clone(),
        old: completion.old.clone(),
        advantages: vec![0.0; completion.sample.drawn()],
        estimates: None,
    });
    let mut all: Vec<Scored> = all.collect();
    match config.advantage.estimator {
        AdvantageEstimator::Gae => credit_by_values(config.advantage, groups, &mut all),
        _ => credit_by_rewards(config.advantage, groups, &mut all),
    }
    all
}

/// Gives each token of a completion the advantage of the completion.
fn credit_by_rewards(
    AdvantageConfig { estimator, scale_rewards, .. }: AdvantageConfig,
    groups: &[Vec<Completion>],
    all: &mut [Scored],
) {
    let rewards: Vec<Vec<_>> = groups.iter().map(|group| group.iter().map(|c| c.reward).collect()).collect();
    let tokens: Vec<Vec<_>> = groups.iter().map(|group| group.iter().map(|c| c.sample.drawn()).collect()).collect();
    let advantages = advantages(estimator, scale_rewards, &rewards, &tokens);
    for (scored, advantage) in all.iter_mut().zip(advantages.into_iter().flatten()) {
        scored.advantages.fill(advantage);
    }
}

/// Gives each token of a completion its return, and its advantage over the value of the token, whitened over all tokens that count.
fn credit_by_values(
    AdvantageConfig { gamma, lambda, .. }: AdvantageConfig,
    groups: &[Vec<Completion>],
    all: &mut [Scored],
) {
    let mut advantages = Vec::new();
    for (scored, Completion { values, reward, .. }) in all.iter_mut().zip(groups.iter().flatten()) {
        let values: Vec<f64> = values.iter().flatten().map(|&value| f64::from(value)).collect();
        let own = Gae { gamma, lambda }.advantages(reward.unwrap_or(0.0), &values);
        let returns = own.iter().zip(&values).map(|(advantage, value)| advantage + value).collect();
        scored.estimates = Some(Estimates { values, returns });
        if scored.counts {
            advantages.push(own);
        }
    }
    whiten(&mut advantages);
    for (scored, advantages) in all.iter_mut().filter(|scored| scored.counts).zip(advantages) {
        scored.advantages = advantages;
    }
}
