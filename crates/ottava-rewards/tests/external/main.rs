//! Rewards by commands and servers that work, and that fail in every way.

mod command;
mod environment;
mod http;
mod judge;

use ottava_common::Result;
use ottava_rewards::{Deadline, Prompt, RewardSpec, Sample, Scored};
use serde_json::{Map, Value, json};

/// The scores of `count` completions by the reward of these settings. Completion i of prompt 7 is `c` and its number.
fn score(settings: &str, count: usize, deadline: Deadline) -> Result<Scored> {
    let mut rewards = RewardSpec::build(&[toml::from_str(settings).unwrap()])?;
    with_samples(count, |samples| rewards.score(samples, deadline))
}

/// Calls `work` with so many samples.
fn with_samples<T>(count: usize, work: impl FnOnce(&[Sample]) -> T) -> T {
    let prompt = Prompt::Messages(vec![json!({ "role": "user", "content": "two?" })]);
    let record: Map<String, Value> = json!({ "answer": 2, "rubric": "be {brief}" }).as_object().unwrap().clone();
    let completions: Vec<String> = (0..count).map(|index| format!("c{index}")).collect();
    let samples: Vec<_> = completions
        .iter()
        .enumerate()
        .map(|(index, completion)| Sample {
            prompt: &prompt,
            completion,
            completion_ids: &[1, 2],
            model_scores: &[],
            truncated: false,
            group: 7,
            index,
            step: 3,
            environment: None,
            record: &record,
        })
        .collect();
    work(&samples)
}
