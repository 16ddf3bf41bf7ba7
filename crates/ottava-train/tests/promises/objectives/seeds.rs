//! Seeds of draws: each completion of a run has a seed of its own, and evaluations have the same seeds each time.

use super::rollouts::{config, values_of, write_inputs};
use crate::runs::resume::train;
use ottava_recipe::RecipeName;
use ottava_tensor::Device;
use ottava_train::trainer::Start;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// All prompts are equal, and the learning rate is so small that no weight changes. So completions differ only by their seeds.
#[test]
fn equal_prompts_have_different_draws_and_equal_evaluations() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let record = json!({"prompt": "of 1 2 is", "answer": "2"}).to_string() + "\n";
    std::fs::write(folder.path().join("prompts.jsonl"), record.repeat(100)).unwrap();
    let mut config = config(folder.path(), &folder.path().join("run"), RecipeName::Fp32, 2);
    (config.optimizer.learning_rate, config.training.gradient_accumulation_steps) = (1e-15, 1);
    config.training.per_device_train_batch_size = 16;
    let r = &mut config.reinforcement;
    (r.num_generations, r.prompts_per_generation, r.max_completion_length) = (4, 4, 8);
    r.rewards = vec!["type = 'regex'\npattern = '[0-9].*'".parse::<toml::Table>().unwrap().try_into().unwrap()];
    (config.logging.completions, config.evaluation.num_generations) = (16, 5);
    train(&config, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let log = std::fs::read_to_string(config.output_dir.join("completions.jsonl")).unwrap();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2 * 16);
    let texts: BTreeSet<&str> = lines.iter().map(|line| line["completion"].as_str().unwrap()).collect();
    // Eight tokens of sixteen, almost uniformly. Two completions may be equal if both end at once.
    assert!(texts.len() > 28, "{} different texts: {texts:?}", texts.len());
    // The most likely completion of all held-out prompts is the same, and drawn completions differ.
    let accuracy = values_of(&config.output_dir, "eval_accuracy");
    assert!(accuracy == [0.0; 2] || accuracy == [1.0; 2], "{accuracy:?}");
    let passed = ["eval_pass@1", "eval_pass@2", "eval_pass@4"].map(|name| values_of(&config.output_dir, name));
    assert!(passed.iter().all(|passed| passed[0] == passed[1]), "{passed:?}");
    assert!(passed[0][0] > 0.0 && passed[0][0] < 1.0, "{passed:?}");
}
