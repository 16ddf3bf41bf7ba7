//! PPO: a policy with a value head learns, resumes, and agrees on any number of ranks.

use crate::objectives::rollouts::{config, values_of, write_inputs};
use crate::runs::resume::{metrics, train};
use crate::setup::on_ranks;
use ottava_recipe::RecipeName;
use ottava_settings::{AdvantageEstimator, LoraConfig, ResolvedConfig, RunConfig, WeightInit};
use ottava_tensor::Device;
use ottava_train::plan::MemoryPlan;
use ottava_train::trainer::{Start, Trainer};
use safetensors::SafeTensors;
use std::path::Path;
use std::sync::atomic::AtomicBool;

fn ppo(inputs: &Path, name: &str, recipe: RecipeName, steps: u64) -> RunConfig {
    let mut run = config(inputs, &inputs.join(name), recipe, steps);
    run.reinforcement.advantage.estimator = AdvantageEstimator::Gae;
    run
}

/// The names of the tensors of a file.
fn names(path: &Path) -> Vec<String> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.names().into_iter().map(str::to_string).collect()
}

/// One completion of each prompt: without a value head, nothing could be learned from it. The head learns how much reward a prompt gets.
#[test]
fn a_policy_with_a_value_head_learns() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let mut run = ppo(folder.path(), "run", RecipeName::Fp32, 60);
    (run.reinforcement.num_generations, run.reinforcement.prompts_per_generation) = (1, 256);
    run.reinforcement.loss.vf_coef = 0.5;
    train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let of = |name: &str| values_of(&run.output_dir, name);
    let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len() as f64;
    let (rewards, explained) = (of("reward"), of("explained_variance"));
    assert!(mean(&rewards[..2]) < 0.2 && mean(&rewards[rewards.len() - 5..]) > 0.35, "{rewards:?}");
    // The head starts at 0, which explains nothing.
    assert!(of("values/mean")[0] == 0.0 && explained[0].abs() < 1e-3, "{explained:?}");
    assert!(mean(&explained[40..]) > 0.05, "{explained:?}");
    // In the first step, half of the mean squared return, which is 0 or 1.
    assert!((of("value_loss")[0] - 0.5 * of("returns/mean")[0]).abs() < 1e-9, "{:?}", of("value_loss"));
}

#[test]
fn a_run_with_a_value_head_resumes_in_the_middle_of_a_generation() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let start = ppo(folder.path(), "start", RecipeName::Fp32, 1);
    train(&start, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let base = start.output_dir.join("checkpoints/checkpoint-1");
    for (recipe, adapted) in [(RecipeName::Fp8Delayed, false), (RecipeName::Bf16, false), (RecipeName::Bf16, true)] {
        let of = |name: &str| {
            let mut run = ppo(folder.path(), &format!("{name}-{}-{adapted}", recipe.as_str()), recipe, 6);
            (run.reinforcement.max_completion_length, run.reinforcement.advantage.lambda) = (4, 0.9);
            let length: toml::Table = "type = 'length'\ntarget = 2\ndistance = 4".parse().unwrap();
            run.reinforcement.rewards = vec![length.try_into().unwrap()];
            if adapted {
                run.lora = LoraConfig { r: 2, ..LoraConfig::default() };
                (run.model.path, run.model.init, run.reinforcement.loss.beta) =
                    (base.clone(), WeightInit::Pretrained, 0.01);
            }
            run
        };
        let [unbroken, broken] = ["unbroken", "broken"].map(of);
        train(&unbroken, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        assert!(train(&broken, &Device::Cpu, &Start::New, 3).is_err_and(|error| error.is_stop()));
        train(&broken, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
        assert_eq!(metrics(&unbroken.output_dir), metrics(&broken.output_dir));
        let [whole, resumed] = [&unbroken, &broken].map(|run| run.output_dir.join("checkpoints/checkpoint-6"));
        let states = |folder: &Path| std::fs::read(folder.join("training/optimizer.safetensors")).unwrap();
        assert!(states(&whole) == states(&resumed), "optimizer.safetensors has the same bytes");
        let values = values_of(&unbroken.output_dir, "values/mean");
        assert!(values[0] == 0.0 && values[5] != 0.0, "{values:?}");
        // The folder is a language model, or adapters of one.
        let file = if adapted { "adapter_model.safetensors" } else { "model.safetensors" };
        let tensors = names(&whole.join(file));
        assert!(!tensors.is_empty() && tensors.iter().all(|name| !name.contains("value_head")), "{tensors:?}");
    }
}

#[test]
fn ranks_with_a_value_head_agree() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let logged = |ranks: usize| {
        let mut run = ppo(folder.path(), &format!("ranks-{ranks}"), RecipeName::Fp32, 4);
        run.training.per_device_train_batch_size /= ranks;
        let output = run.output_dir.clone();
        on_ranks(ranks, move |group| {
            let mut trainer = Trainer::shared(run.clone(), &Device::Cpu, &Start::New, group, None).unwrap();
            trainer.run(&AtomicBool::new(false), &mut |_| {}).unwrap();
        });
        ["loss", "value_loss", "values/mean", "returns/mean", "explained_variance", "grad_norm"]
            .map(|name| values_of(&output, name))
            .concat()
    };
    let one = logged(1);
    assert_eq!(one.len(), 24);
    for ranks in [2, 4] {
        let several = logged(ranks);
        let apart = several.iter().zip(&one).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        // Losses and gradients are sums over 128 completions in F32, in another order, over four updates.
        assert!(apart < 1e-4, "{ranks} ranks: {several:?}, {one:?}");
    }
}

/// A value head has some values for each channel and a few numbers for each token. There is no second model.
#[test]
fn a_value_head_takes_little_memory() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let bytes = |run: RunConfig| {
        let sizes = run.decoder_config().unwrap();
        MemoryPlan::new(&ResolvedConfig::fastest(&run), &sizes, &Device::Cpu).unwrap().peak_bytes
    };
    let without = bytes(config(folder.path(), &folder.path().join("run"), RecipeName::Fp32, 1));
    let with = bytes(ppo(folder.path(), "run", RecipeName::Fp32, 1));
    assert!(with > without && with < without + without / 10, "{with}, {without}");
}
