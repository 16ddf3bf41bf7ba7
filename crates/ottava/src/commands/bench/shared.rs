//! Measurements and output that several benchmarks share.

use ottava_common::{Error, Result};
use ottava_recipe::KvCacheDtype;
use ottava_recipe::storage::{Gradients, Storage};
use ottava_settings::{DeviceChoice, formats};
use ottava_tensor::Device;
use ottava_tensor::bench::{Cost, Meter, Rates};

/// Returns the percentage of the best rate.
pub(super) fn share(floor: f64, time: f64) -> f64 {
    100.0 * floor / time
}

/// Returns a meter of ops on `device`. If `power` is set, the meter also measures power; errors if `device` has no energy counter.
pub(super) fn meter(device: &Device, power: bool) -> Result<Meter<'_>> {
    if power && !matches!(device, Device::Cuda(gpu) if gpu.energy().is_some()) {
        return Err(Error::Config(format!(
            "--power: NVML has no energy counter for {device}; leave out --power, or use a GPU that has one"
        )));
    }
    Ok(Meter { device, power })
}

/// Returns the heads of the columns of [`power_of`].
pub(super) fn power_columns(asked: bool) -> String {
    if asked { format!(" {:>6} {:>6} {:>9}", "W", "MHz", "mJ/run") } else { String::new() }
}

/// Formats watts, clock and energy as the last columns of a row.
pub(super) fn power_of(cost: &Cost) -> String {
    cost.power.map_or(String::new(), |power| {
        format!(" {:>6.0} {:>6.0} {:>9.2}", power.watts, power.megahertz, power.millijoules)
    })
}

/// Opens the device, measures its best rates, and prints them as the first line of the table.
pub(super) fn measure(choice: DeviceChoice, json: bool) -> Result<(Device, Rates)> {
    let device = crate::device::open(choice)?;
    let rates = Rates::measure(&device)?;
    if !json {
        out!(
            "{device}: a large product {:.0} TFLOP/s in BF16, {:.0} in FP8; a copy {:.0} GB/s",
            rates.bf16_flops / 1e12,
            rates.fp8_flops / 1e12,
            rates.copy_bytes / 1e9
        );
    }
    Ok((device, rates))
}

pub(super) fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

pub(super) fn gradients(text: &str) -> Result<Gradients, String> {
    match text {
        "float32" => Ok(Gradients::Float32),
        "bfloat16" => Ok(Gradients::Bfloat16),
        "float8" => Ok(Gradients::Float8),
        other => Err(format!("`{other}` is not a way to keep gradients; float32, bfloat16 and float8 are")),
    }
}

/// The storage of the optimizer that `text` names.
pub(super) fn storage(text: &str) -> Result<Storage, String> {
    let known = Storage::ALL.into_iter().find(|storage| storage.as_str() == text);
    // The storage names of the old key are accepted too.
    let old = || Some(formats(&[format!("optimizer.storage={text}")]).ok()?.optimizer.storage);
    known
        .or_else(old)
        .ok_or_else(|| format!("`{text}` is no storage; there are {}", Storage::ALL.map(Storage::as_str).join(", ")))
}

/// Returns the value for recipe number `i`, where `values` has one value per recipe, or fewer: the last value stands for all later recipes.
pub(super) fn of_recipe<T: Copy>(values: &[T], i: usize) -> T {
    values[i.min(values.len() - 1)]
}

/// The name of the format of a KV cache.
pub(super) fn name_of(kv_cache_dtype: KvCacheDtype) -> String {
    format!("{kv_cache_dtype:?}").to_lowercase()
}
