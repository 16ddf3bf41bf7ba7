//! Changes of the run itself for a run that does not fit: adapters instead of all weights, and more GPUs that divide weights and states (ZeRO 3).

use super::changes::gib;
use super::memory::MemoryPlan;
use ottava_common::error::Result;
use ottava_models::DecoderConfig;
use ottava_parallel::Zero;
use ottava_recipe::recompute::Recompute;
use ottava_recipe::storage::Storage;
use ottava_settings::{ResolvedConfig, WeightInit};
use ottava_tensor::Device;

/// The rank of proposed adapters.
const RANK: usize = 16;

/// The proposed numbers of GPUs.
const GPUS: [usize; 6] = [2, 4, 8, 16, 32, 64];

/// The proposed storages of the optimizer, the more precise one first.
const NARROWER: [Storage; 2] = [Storage::Bfloat16, Storage::MsampO2];

/// Returns the lines that propose adapters and more GPUs for `config`, which does not fit `device`; "" if none of these changes makes it fit, either.
pub(super) fn proposals(config: &ResolvedConfig, sizes: &DecoderConfig, device: &Device) -> Result<String> {
    let found = [adapters(config, sizes, device)?, gpus(config, sizes, device)];
    let lines: String = found.into_iter().flatten().collect();
    Ok(if lines.is_empty() { lines } else { format!("\nOr change the run:{lines}") })
}

/// The policies of `config` and of less memory, the fastest first.
fn policies(config: &ResolvedConfig) -> impl Iterator<Item = Recompute> {
    let now = config.recompute;
    Recompute::ALL.into_iter().filter(move |policy| *policy >= now)
}

/// Returns the settings of a policy that is not the policy of `config`.
fn policy_setting(config: &ResolvedConfig, policy: Recompute) -> String {
    match policy == config.recompute {
        true => String::new(),
        false => format!(", memory.recompute = \"{}\"", policy.as_str()),
    }
}

/// Proposes adapters with the fastest policy that fits.
fn adapters(config: &ResolvedConfig, sizes: &DecoderConfig, device: &Device) -> Result<Option<String>> {
    if config.run.lora.r > 0 || config.run.model.init == WeightInit::Random || sizes.lora.is_some() {
        return Ok(None);
    }
    // Beside adapters, the rows of new tokens would be frozen.
    if config.run.tokenizer.adds_rows() {
        return Ok(None);
    }
    for policy in policies(config) {
        let mut changed = config.clone();
        (changed.run.lora.r, changed.recompute) = (RANK, policy);
        let sizes = DecoderConfig { lora: changed.run.lora.adapters(), ..sizes.clone() };
        let plan = MemoryPlan::new(&changed, &sizes, device)?;
        if plan.fits {
            let (policy, peak) = (policy_setting(config, policy), gib(plan.peak_bytes));
            return Ok(Some(format!(
                "\n  lora.r = {RANK}{policy}\n    {peak:.1} GiB, trains adapters and not all weights"
            )));
        }
    }
    Ok(None)
}

/// Returns the run on `data` ranks with ZeRO 3. The ranks divide the same sequences of a step, if they can. Returns `None` if the run cannot have
/// these ranks.
fn on_ranks(config: &ResolvedConfig, data: usize, policy: Recompute) -> Option<ResolvedConfig> {
    let mut changed = ResolvedConfig { recompute: policy, ..config.clone() };
    let parallel = &mut changed.run.parallel;
    (parallel.data, parallel.zero, parallel.zero_shard_size) = (data, Zero::Weights, 0);
    let same = config.run.training.global_batch_size.map(|sequences| (Some(sequences), 1));
    let as_large = (None, config.run.training.gradient_accumulation_steps);
    for (global, micro_batches) in same.into_iter().chain([as_large]) {
        let t = &mut changed.run.training;
        (t.global_batch_size, t.gradient_accumulation_steps) = (global, micro_batches);
        if changed.run.share(data).is_ok() {
            let is_valid =
                changed.run.expect_formats().is_ok() && changed.run.expect_no_more_problems_than(&config.run).is_ok();
            return is_valid.then_some(changed);
        }
    }
    None
}

/// Proposes the smallest number of GPUs that fit with ZeRO 3, and a smaller number that fits with another storage of the optimizer.
fn gpus(config: &ResolvedConfig, sizes: &DecoderConfig, device: &Device) -> Option<String> {
    let parallel = &config.run.parallel;
    let now = parallel.planned_data();
    let is_divided = parallel.tensor * parallel.pipeline * parallel.context > 1 || config.run.reinforcement.is_on();
    if !matches!(device, Device::Cuda(_)) || is_divided {
        return None;
    }
    let is_more = |data: usize| data > now || data == now && parallel.zero != Zero::Weights;
    let same = GPUS.into_iter().filter(|data| is_more(*data)).find_map(|data| on_gpus(config, data, sizes, device));
    let most = same.as_ref().map_or(usize::MAX, |(data, _)| *data);
    let fewer = GPUS.into_iter().filter(|data| is_more(*data) && *data < most).find_map(|data| {
        NARROWER.into_iter().filter(|storage| *storage != config.run.optimizer.storage).find_map(|storage| {
            let mut changed = config.clone();
            changed.run.optimizer.storage = storage;
            let (_, words) = on_gpus(&changed, data, sizes, device)?;
            Some((
                data,
                format!(
                    "\n  optimizer.storage = \"{}\", {}; optimizer states have a lower precision",
                    storage.as_str(),
                    words.trim_start()
                ),
            ))
        })
    });
    let words: String = [same, fewer].into_iter().flatten().map(|(_, words)| words).collect();
    (!words.is_empty()).then_some(words)
}

/// Returns `data` and the proposal of a run on this number of GPUs with ZeRO 3, if the run fits.
fn on_gpus(config: &ResolvedConfig, data: usize, sizes: &DecoderConfig, device: &Device) -> Option<(usize, String)> {
    [config.recompute, Recompute::Full].into_iter().find_map(|policy| {
        let changed = on_ranks(config, data, policy)?;
        let plan = MemoryPlan::new(&changed, sizes, device).ok().filter(|plan| plan.fits)?;
        let (policy, peak) = (policy_setting(config, policy), gib(plan.peak_bytes));
        Some((
            data,
            format!(
                "\n  parallel.data = {data}, parallel.zero = 3{policy}\n    {peak:.1} GiB on each of {data} GPUs, which divide weights, gradients and optimizer states"
            ),
        ))
    })
}
