//! The plan of the completions of reinforcement learning.

use super::inference::inference_bytes;
use ottava_common::error::Result;
use ottava_models::DecoderConfig;
use ottava_recipe::RecipeName;
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use serde::Serialize;

/// The generations of a run of reinforcement learning.
#[derive(Clone, Debug, Serialize)]
pub struct RolloutPlan {
    /// The number of prompts of a generation.
    pub prompts: usize,
    /// The number of completions of each prompt.
    pub group: usize,
    /// The number of steps that use the completions of a generation.
    pub steps: usize,
    /// The maximum number of tokens of a prompt and its completion.
    pub max_length: usize,
    /// The bytes that a second model for draws would hold on each rank, at its peak.
    pub shared_bytes: u64,
    /// Whether a step computes, before the first update, the log-probabilities that the draws report, bit for bit.
    pub is_exact: bool,
    /// A sentence with the reason.
    pub because: &'static str,
    /// A sentence: how losses are corrected for the difference.
    pub correction: &'static str,
}

impl RolloutPlan {
    /// Plans the generations of `run`, with a model of `sizes`, on `device`. Returns `None` for another objective.
    pub(super) fn new(run: &RunConfig, sizes: &DecoderConfig, device: &Device) -> Result<Option<RolloutPlan>> {
        let r = &run.reinforcement;
        if !r.is_on() {
            return Ok(None);
        }
        let (of_step, group) = (run.training.sequences(), r.num_generations.max(1));
        let prompts = r.prompts(of_step);
        let compute = run.recipe_on(device).compute;
        let (is_exact, because) = match run.precision.recipes().any(|recipe| recipe == RecipeName::Fp8Current) {
            true => (
                false,
                "a scale of fp8-current depends on all tokens of a product, and draws compute other tokens together than steps",
            ),
            false if run.draws_are_stale() => (false, "older weights draw the first tokens of some completions"),
            false if run.precision.batch_invariant => (
                true,
                "with `precision.batch_invariant`, draws and steps add in one order, and steps read keys and values in `kv_cache_dtype`",
            ),
            false if r.sampling.kv_cache_dtype.resolve(compute) != compute => {
                (false, "draws read keys and values in `kv_cache_dtype`, and steps read them in the compute type")
            }
            false if matches!(device, Device::Cuda(_)) => {
                (false, "on a GPU, draws and steps run different kernels, which add in another order")
            }
            false => (true, "on the CPU, draws and steps compute each token by the same operations"),
        };
        let shared = inference_bytes(sizes, &run.recipe_on(device), device, run.data.max_length, 1, &[])?;
        Ok(Some(RolloutPlan {
            shared_bytes: shared as u64,
            prompts,
            group,
            steps: prompts * group * r.num_iterations / of_step.max(1),
            max_length: run.data.max_length,
            is_exact,
            because,
            correction: match run.correction() {
                None => "losses are not corrected for draws",
                Some(_) if run.steps_once() => {
                    "steps compute the ratios of draws and steps themselves, and correct their losses"
                }
                Some(_) => {
                    "a pass over the completions of a generation computes the ratios of draws and steps, which correct losses"
                }
            },
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::model;
    use ottava_recipe::KvCacheDtype;
    use ottava_settings::ReinforcementConfig;
    use ottava_tensor::cuda::GpuModel;

    #[test]
    fn a_plan_says_whether_draws_and_steps_agree() {
        let mut run = RunConfig::default();
        let sizes = model("llama-3-8b").unwrap().with_layers(1);
        assert!(RolloutPlan::new(&run, &sizes, &Device::Cpu).unwrap().is_none());
        run.reinforcement.rewards = vec!["type = 'math'".parse::<toml::Table>().unwrap().try_into().unwrap()];
        run.training.per_device_train_batch_size = 16;
        (run.reinforcement.prompts_per_generation, run.reinforcement.num_iterations) = (4, 3);
        let plan = |recipe| {
            let precision = ottava_recipe::Precision { recipe, ..run.precision.clone() };
            RolloutPlan::new(&RunConfig { precision, ..run.clone() }, &sizes, &Device::Cpu).unwrap().unwrap()
        };
        let exact = plan(RecipeName::Fp8Row);
        let exact_precision = ottava_recipe::Precision { recipe: RecipeName::Fp8Row, ..run.precision.clone() };
        assert_eq!((exact.prompts, exact.group, exact.steps, exact.is_exact), (4, 8, 6, true));
        assert!(!plan(RecipeName::Fp8Current).is_exact);
        assert!(exact.correction.starts_with("a pass") && plan(RecipeName::Bf16).correction.contains("not corrected"));
        let once = ReinforcementConfig { prompts_per_generation: 0, num_iterations: 1, ..run.reinforcement.clone() };
        let once = RunConfig { reinforcement: once, precision: exact_precision, ..run.clone() };
        assert!(RolloutPlan::new(&once, &sizes, &Device::Cpu).unwrap().unwrap().correction.starts_with("steps"));
        run.reinforcement.sampling.kv_cache_dtype = KvCacheDtype::Fp8;
        assert!(!RolloutPlan::new(&run, &sizes, &Device::Cpu).unwrap().unwrap().is_exact);
        run.precision.batch_invariant = true;
        assert!(RolloutPlan::new(&run, &sizes, &Device::dry_gpu(GpuModel::h200())).unwrap().unwrap().is_exact);
        (run.reinforcement.sampling.kv_cache_dtype, run.reinforcement.sampling.max_staleness) = (KvCacheDtype::Auto, 6);
        assert!(!RolloutPlan::new(&run, &sizes, &Device::Cpu).unwrap().unwrap().is_exact);
        // Embedding and head of 128,256 tokens in BF16 alone have 1.96 GiB.
        assert!(exact.shared_bytes > 2 << 30, "{}", exact.shared_bytes);
    }
}
