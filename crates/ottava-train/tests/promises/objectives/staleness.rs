//! Completions that begin while the last completions of a generation are drawn.

use crate::objectives::rollouts::{config, values_of, write_inputs};
use crate::runs::resume::{metrics, train};
use crate::setup::on_ranks;
use ottava_engine::BLOCK_SIZE;
use ottava_recipe::RecipeName;
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use ottava_train::trainer::{Start, Trainer};
use serde_json::Value;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// A run of several tokens per completion, in which a generation has the completions of two steps.
fn config_of(inputs: &Path, name: &str, steps: u64, max_staleness: u64) -> RunConfig {
    let mut config = config(inputs, &inputs.join(name), RecipeName::Fp8Row, steps);
    config.reinforcement.max_completion_length = 6;
    // The reward depends on the length, and lengths differ, so advantages of the first steps are not zero.
    let reward = "type = 'length'\ntarget = 3\ndistance = 4".parse::<toml::Table>().unwrap().try_into().unwrap();
    config.reinforcement.rewards = vec![reward];
    config.reinforcement.sampling.max_staleness = max_staleness;
    config.logging.completions = 256;
    config
}

const STALE: &str = "sampling/stale_token_ratio";
const APART: &str = "sampling/sampling_logp_difference/max";

fn completions(run: &Path) -> Vec<Value> {
    let log = std::fs::read_to_string(run.join("completions.jsonl")).unwrap();
    log.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The first generation is drawn as without staleness. In later generations, some tokens come from older weights, so their log-probabilities differ from the
/// ones of the step.
#[test]
fn completions_begin_in_the_generation_before() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let [fresh, stale] = [("fresh", 0), ("stale", 2)].map(|(name, most)| {
        train(&config_of(folder.path(), name, 6, most), &Device::Cpu, &Start::New, u64::MAX).unwrap();
        folder.path().join(name)
    });
    assert!(values_of(&fresh, STALE).is_empty());
    let shares = values_of(&stale, STALE);
    assert!(
        shares.len() == 3 && shares[0] == 0.0 && shares[1..].iter().all(|&share| share > 0.0 && share < 1.0),
        "{shares:?}"
    );
    // The first step of each generation.
    let apart = |run| values_of(run, APART).into_iter().step_by(2).collect::<Vec<_>>();
    assert_eq!(apart(&fresh), [0.0; 3]);
    let apart = apart(&stale);
    assert!(apart[0] == 0.0 && apart[1..].iter().all(|&apart| apart > 0.0), "{apart:?}");
    let [fresh, stale] = [&fresh, &stale].map(|run| completions(run));
    assert_eq!(fresh[..256], stale[..256]);
    let prompts = |all: &[Value]| all.iter().map(|line| line["prompt"].clone()).collect::<Vec<_>>();
    assert_eq!(prompts(&fresh), prompts(&stale), "prompts keep their order");
    for line in &stale {
        assert!((1..=6).contains(&line["tokens"].as_u64().unwrap()), "{line}");
    }
}

/// No more completions are drawn at once than a generation has. So a generation that has fewer completions than the engine has places begins the next
/// generation only where its own completions have ended.
#[test]
fn a_small_generation_begins_few_completions() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let mut config = config_of(folder.path(), "run", 4, 1);
    config.reinforcement.prompts_per_generation = 2;
    // The KV cache has two blocks for each completion, and a completion needs one. So the KV cache has room for two generations.
    config.data.max_length = 2 * BLOCK_SIZE;
    (config.training.per_device_train_batch_size, config.training.gradient_accumulation_steps) = (8, 2);
    train(&config, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let shares = values_of(&folder.path().join("run"), STALE);
    assert!(shares[0] == 0.0 && shares[1..].iter().all(|&share| share > 0.0 && share < 0.9), "{shares:?}");
}

/// A checkpoint has the tokens of completions that were begun.
#[test]
fn a_run_with_begun_completions_resumes() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let config = |name: &str| config_of(folder.path(), name, 6, 2);
    train(&config("unbroken"), &Device::Cpu, &Start::New, u64::MAX).unwrap();
    for stop in [2, 3] {
        let name = format!("broken-{stop}");
        assert!(train(&config(&name), &Device::Cpu, &Start::New, stop).is_err_and(|error| error.is_stop()));
        train(&config(&name), &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
        let [unbroken, broken] = ["unbroken", &name].map(|name| folder.path().join(name));
        assert_eq!(metrics(&unbroken), metrics(&broken), "stopped after {stop}");
        assert_eq!(completions(&unbroken), completions(&broken), "stopped after {stop}");
    }
}

/// A generation ends when all ranks have drawn their completions, and all ranks know what was begun.
#[test]
fn ranks_begin_completions_together() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let inputs = folder.path();
    for name in ["first", "second"] {
        let mut config = config_of(inputs, name, 4, 2);
        config.training.per_device_train_batch_size /= 2;
        on_ranks(2, move |group| {
            let mut trainer = Trainer::shared(config.clone(), &Device::Cpu, &Start::New, group, None).unwrap();
            trainer.run(&AtomicBool::new(false), &mut |_| {}).unwrap();
        });
    }
    let [first, second] = ["first", "second"].map(|name| inputs.join(name));
    assert!(values_of(&first, STALE)[1] > 0.0);
    assert_eq!(metrics(&first), metrics(&second), "what is begun does not depend on time");
}

#[test]
fn a_staleness_below_the_steps_of_a_generation_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let error = train(&config_of(folder.path(), "run", 2, 1), &Device::Cpu, &Start::New, u64::MAX).unwrap_err();
    assert!(error.to_string().contains("ends after the 2 steps of a generation"), "{error}");
}
