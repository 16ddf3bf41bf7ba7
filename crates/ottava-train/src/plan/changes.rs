//! Changes that make a run fit a device: settings that take less memory, each with its cost.

use super::memory::MemoryPlan;
use ottava_common::error::Result;
use ottava_models::{Decoder, DecoderConfig};
use ottava_recipe::param::STEP_RATES;
use ottava_recipe::recompute::{Recompute, SavedActivations};
use ottava_recipe::storage::{Masters, Storage};
use ottava_settings::ResolvedConfig;
use ottava_tensor::{DType, Device};
use serde::Serialize;

/// The effect of a change on the results of a run. Effects that round more come last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Effect {
    /// The results have the same bits.
    SameBits,
    /// Numbers halfway between two BF16 numbers are rounded away from zero.
    Ties,
    /// Sums are computed in another order.
    OrderOfSums,
    /// Activations, gradients, moments or weights are stored in lower precision.
    Precision,
}

impl Effect {
    fn words(self) -> &'static str {
        match self {
            Effect::SameBits => "the same bits",
            Effect::Ties => "identical except for rare rounding ties",
            Effect::OrderOfSums => "sums in another order",
            Effect::Precision => "stored values less precise",
        }
    }
}

/// Settings that make a run fit.
#[derive(Clone, Debug, Serialize)]
pub struct Change {
    /// The settings, in the syntax of the run's file.
    pub settings: Vec<String>,
    /// The peak of memory with these settings.
    pub peak_bytes: u64,
    /// The time of a step relative to a step without these settings.
    pub time: f64,
    /// The effect of these settings on results.
    pub effect: Effect,
}

/// A setting with one of its values.
struct Candidate {
    setting: Vec<String>,
    time: f64,
    effect: Effect,
    apply: Box<dyn Fn(&mut ResolvedConfig)>,
}

/// Returns the time of a step with `policy` relative to [`Recompute::None`]. Measured with Llama-2-7B at 8,192 tokens in fp8-delayed on one H200
/// (docs/memory.md).
pub fn time_of(policy: Recompute) -> f64 {
    match policy {
        Recompute::None => 1.0,
        Recompute::NormSwiglu => 1.01,
        Recompute::Attention => 1.07,
        Recompute::Full => 1.20,
    }
}

/// The time of a step that casts weights for each product, relative to a step with stored codes.
const TIME_WITHOUT_WEIGHT_CODES: f64 = 1.02;

/// The time of a step with activations saved in FP8, relative to a step that saves them exactly.
const TIME_OF_SAVED_FP8: f64 = 1.015;

/// The time of a step with half the rows in twice the micro-batches, relative to the original step. Measured as two steps of one sequence, minus one
/// update, divided by one step of two sequences.
const TIME_OF_HALF_BATCH: f64 = 1.02;

/// The storages of the optimizer, in the order of falling memory. Each has the time of a step relative to the first storage: Llama-2-7B at 4,096
/// tokens on one H200, from benchmarks/2026-11-21-optimizer-levels.md. A storage is not listed if another storage takes less memory and less time.
const STORAGES: [(Storage, f64); 5] = [
    (Storage::Float32, 1.0),
    (Storage::Bfloat16, 0.90),
    (Storage::MsampO3, 0.95),
    (Storage::Coat, 0.965),
    (Storage::MsampO2, 0.98),
];

/// The number of parameters and the seconds of the steps that [`STORAGES`] compares. A storage changes only the time of the update, and a step has
/// one update for any number of tokens.
const STEP_OF_STORAGES: (f64, f64) = (6.74e9, 0.41);

/// The bytes per second of copies over PCIe in each direction while both directions are busy. Measured on one H200 in a PCIe 5 x16 slot, from
/// benchmarks/2026-11-21-offloading.md.
const BUS: f64 = 50.2e9;

/// Returns the seconds that a copy of `bytes` over PCIe takes.
pub(super) fn bus_seconds(bytes: u64) -> f64 {
    bytes as f64 / BUS
}

/// The proposed shares of the optimizer's states to offload.
const OFFLOADED: [f64; 4] = [0.25, 0.5, 0.75, 1.0];

/// The maximum number of proposals. `ALIKE` is the maximum number of proposals that lower precision, and also of proposals that do not.
const PROPOSED: usize = 3;
const ALIKE: usize = 2;

/// The factor by which lower precision counts as a longer step. A change that keeps precision is less harmful if it makes a step longer by less than
/// this factor.
const HARM_OF_PRECISION: f64 = 1.5;

/// Returns the seconds of a step at [`STEP_RATES`], and the number of trained parameters.
fn step_and_parameters(config: &ResolvedConfig, sizes: &DecoderConfig, device: &Device) -> Result<(f64, f64)> {
    let model = Decoder::describe(sizes, &config.run.recipe_on(device))?;
    let flops = model.flops_per_token(config.run.data.max_length) * config.run.tokens_per_step() as f64;
    let rate = STEP_RATES[usize::from(config.run.precision.recipe().casts.is_none())];
    Ok((flops / rate, model.parameters as f64))
}

/// Returns a candidate for each share of [`OFFLOADED`] above the share of `config`, with the relative time of a step. Returns no candidates on a CPU.
fn offloads(config: &ResolvedConfig, sizes: &DecoderConfig, device: &Device) -> Result<Vec<Candidate>> {
    let now = config.offload_optimizer;
    let shares: Vec<f64> = OFFLOADED.into_iter().filter(|&share| share > now).collect();
    if !matches!(device, Device::Cuda(_)) || shares.is_empty() {
        return Ok(Vec::new());
    }
    let host_bytes = |share: f64| {
        let mut offloaded = config.clone();
        offloaded.offload_optimizer = share;
        MemoryPlan::new(&offloaded, sizes, device).map(|plan| plan.host_bytes)
    };
    let moved = host_bytes(1.0)?.saturating_sub(host_bytes(0.0)?);
    let step = step_and_parameters(config, sizes, device)?.0;
    let level = |share| Candidate {
        setting: vec![format!("memory.offload_optimizer = {share}")],
        time: 1.0 + bus_seconds(moved) * (share - now) / step,
        effect: Effect::SameBits,
        apply: Box::new(move |config: &mut ResolvedConfig| config.offload_optimizer = share),
    };
    Ok(shares.into_iter().map(level).collect())
}

/// Returns the settings that can be changed. The candidates of a setting are in order: the first takes a little less memory than the value of
/// `config`, the last takes the least.
fn settings(config: &ResolvedConfig, sizes: &DecoderConfig, device: &Device) -> Result<Vec<Vec<Candidate>>> {
    let (run, policy) = (&config.run, config.recompute);
    let exact = run.memory.saved_activations == SavedActivations::Exact;
    let recompute = Recompute::ALL.into_iter().filter(|other| *other > policy).map(|other| Candidate {
        setting: vec![format!("memory.recompute = \"{}\"", other.as_str())],
        time: time_of(other) / time_of(policy),
        // Operands are recomputed from saved activations, so they change if these are saved in FP8.
        effect: if exact { Effect::SameBits } else { Effect::Precision },
        apply: Box::new(move |config| config.recompute = other),
    });
    // With adapters, frozen weights are stored as codes, which take less memory than values. So this change is proposed only without adapters.
    let codes = (run.weight_codes() && run.lora.r == 0 && run.precision.recipe().casts.is_some()).then(|| Candidate {
        setting: vec!["memory.weight_codes = false".into()],
        time: TIME_WITHOUT_WEIGHT_CODES,
        effect: Effect::SameBits,
        apply: Box::new(|config| config.run.memory.weight_codes = Some(false)),
    });
    let saved = exact.then(|| Candidate {
        setting: vec!["memory.saved_activations = \"float8\"".into()],
        time: TIME_OF_SAVED_FP8,
        effect: Effect::Precision,
        apply: Box::new(|config| config.run.memory.saved_activations = SavedActivations::Float8),
    });
    let training = &run.training;
    let (rows, micro_batches) = (training.per_device_train_batch_size, training.gradient_accumulation_steps);
    let halves = (1..=rows.trailing_zeros()).map(|halvings| {
        let (rows, micro_batches) = (rows >> halvings, micro_batches << halvings);
        Candidate {
            setting: vec![
                format!("training.per_device_train_batch_size = {rows}"),
                format!("training.gradient_accumulation_steps = {micro_batches}"),
            ],
            time: TIME_OF_HALF_BATCH.powi(halvings as i32),
            effect: Effect::OrderOfSums,
            apply: Box::new(move |config| {
                config.run.training.per_device_train_batch_size = rows;
                config.run.training.gradient_accumulation_steps = micro_batches;
            }),
        }
    });
    let has_masters = run.optimizer.formats().masters == Masters::Float32;
    let split = (has_masters && run.precision.recipe().compute == DType::BF16).then(|| Candidate {
        setting: vec!["optimizer.master_weights = \"remainder\"".into()],
        time: 1.0,
        effect: Effect::Ties,
        apply: Box::new(|config| config.run.optimizer.master_weights = Some(Masters::Remainder)),
    });
    let (step, parameters) = step_and_parameters(config, sizes, device)?;
    let (measured_parameters, measured_step) = STEP_OF_STORAGES;
    let share = measured_step * parameters / measured_parameters / step;
    let with_storage = move |time: f64| (1.0 - (1.0 - time) * share).max(0.5);
    let now = STORAGES.iter().position(|(storage, _)| *storage == run.optimizer.storage);
    let narrower =
        STORAGES.into_iter().skip(now.map_or(STORAGES.len(), |now| now + 1)).map(|(storage, time)| Candidate {
            setting: vec![format!("optimizer.storage = \"{}\"", storage.as_str())],
            time: with_storage(time) / with_storage(now.map_or(1.0, |now| STORAGES[now].1)),
            effect: Effect::Precision,
            apply: Box::new(move |config| {
                config.run.optimizer.storage = storage;
                config.run.optimizer.master_weights = None;
            }),
        });
    let narrower = narrower.filter(|level| {
        let mut changed = config.clone();
        (level.apply)(&mut changed);
        changed.run.expect_formats().is_ok()
    });
    Ok(vec![
        recompute.collect(),
        codes.into_iter().collect(),
        offloads(config, sizes, device)?,
        halves.collect(),
        saved.into_iter().collect(),
        split.into_iter().chain(narrower).collect(),
    ])
}

/// Returns at most three changes that make `config` fit `device`, the least harmful first. At most two of them lower precision, and at most two do
/// not. No change contains another change of the list. Returns no changes if nothing fits.
pub fn changes(config: &ResolvedConfig, sizes: &DecoderConfig, device: &Device) -> Result<Vec<Change>> {
    let settings = settings(config, sizes, device)?;
    // A choice holds, for each setting, the number of its candidate; 0 leaves the setting unchanged.
    let mut choices: Vec<Vec<usize>> = vec![Vec::new()];
    for levels in &settings {
        choices = choices
            .iter()
            .flat_map(|choice| (0..=levels.len()).map(move |level| [choice.as_slice(), &[level]].concat()))
            .collect();
    }
    // The first choice leaves all settings unchanged.
    choices.remove(0);
    let Some(furthest) = choices.last().cloned() else { return Ok(Vec::new()) };
    let levels = |choice: &[usize]| -> Vec<&Candidate> {
        settings.iter().zip(choice).filter_map(|(levels, &level)| levels.get(level.checked_sub(1)?)).collect()
    };
    let effect = |choice: &[usize]| levels(choice).iter().map(|level| level.effect).max().unwrap_or(Effect::SameBits);
    let rounds = |choice: &[usize]| effect(choice) == Effect::Precision;
    let time = |choice: &[usize]| levels(choice).iter().map(|level| level.time).product::<f64>();
    let harm = |choice: &[usize]| time(choice) * if rounds(choice) { HARM_OF_PRECISION } else { 1.0 };
    let with = |choice: &[usize]| {
        let mut changed = config.clone();
        for (levels, &level) in settings.iter().zip(choice) {
            levels[..level].iter().for_each(|level| (level.apply)(&mut changed));
        }
        MemoryPlan::new(&changed, sizes, device)
    };
    if !with(&furthest)?.fits {
        return Ok(Vec::new());
    }
    let order = |a: &Vec<usize>, b: &Vec<usize>| {
        let alike = || effect(a).cmp(&effect(b)).then(levels(a).len().cmp(&levels(b).len()));
        harm(a).total_cmp(&harm(b)).then_with(alike)
    };
    choices.sort_by(order);
    let no_less = |choice: &[usize], other: &[usize]| choice.iter().zip(other).all(|(a, b)| a >= b);
    let (mut found, mut too_large) = (Vec::<(Vec<usize>, Change)>::new(), Vec::<Vec<usize>>::new());
    // If the choice of a kind that takes the least memory does not fit, no choice of this kind fits.
    for kind in [false, true] {
        let alike = choices.iter().filter(|choice| rounds(choice) == kind);
        let furthest = alike.max_by_key(|choice| choice.iter().sum::<usize>());
        if let Some(furthest) = furthest
            && !with(furthest)?.fits
        {
            too_large.push(furthest.clone());
        }
    }
    for choice in choices {
        if found.len() == PROPOSED {
            break;
        }
        let alike = found.iter().filter(|(other, _)| rounds(other) == rounds(&choice)).count();
        let is_known = found.iter().any(|(other, _)| no_less(&choice, other))
            || too_large.iter().any(|other| no_less(other, &choice));
        if alike == ALIKE || is_known {
            continue;
        }
        let plan = with(&choice)?;
        if !plan.fits {
            too_large.push(choice);
            continue;
        }
        let (time, effect) = (time(&choice), effect(&choice));
        let settings = levels(&choice).iter().flat_map(|level| level.setting.clone()).collect();
        found.push((choice, Change { settings, peak_bytes: plan.peak_bytes, time, effect }));
    }
    Ok(found.into_iter().map(|(_, change)| change).collect())
}

/// Returns the changes as lines of a message.
pub fn proposals(changes: &[Change]) -> String {
    if changes.is_empty() {
        return "No setting that takes less memory makes it fit: choose a smaller model or shorter sequences.".into();
    }
    let mut text = "Each of these changes makes it fit (cheapest first; lower precision is ranked as if steps took 50 % longer; times as measured with Llama-2-7B):".to_string();
    for Change { settings, peak_bytes, time, effect } in changes {
        let time = match ((time - 1.0) * 100.0).round() {
            0.0 => "as fast".to_string(),
            percent if percent < 0.0 => format!("about {:.0} % faster", -percent),
            percent => format!("about {percent:.0} % slower"),
        };
        let (settings, peak) = (settings.join(", "), gib(*peak_bytes));
        text += &format!("\n  {settings}\n    {peak:.1} GiB, {time}, {}", effect.words());
    }
    text
}

/// Converts bytes to GiB.
pub(super) fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}
