//! The power and the load of the GPU of the leading rank, for `metrics.jsonl`.

use ottava_tensor::Device;
use serde_json::{Map, Value, json};
use std::time::Instant;

/// Reads the power and the load of a GPU.
#[derive(Default)]
pub(super) struct GpuMeter {
    /// The joules that the GPU had used at the last reading, and its time.
    last: Option<(f64, Instant)>,
}

impl GpuMeter {
    /// Returns the mean power in watts since the last reading, and the share of time in which kernels ran. Returns no values on a CPU, without NVML, and
    /// at the first reading no power.
    pub(super) fn read(&mut self, device: &Device) -> Map<String, Value> {
        let Device::Cuda(gpu) = device else { return Map::new() };
        self.values(gpu.energy(), gpu.utilization(), Instant::now())
    }

    fn values(&mut self, joules: Option<f64>, utilization: Option<f64>, now: Instant) -> Map<String, Value> {
        let before = std::mem::replace(&mut self.last, joules.map(|joules| (joules, now)));
        let power = before.zip(joules).map(|((before, at), joules)| (joules - before) / (now - at).as_secs_f64());
        let values = [("gpu_power_watts", power), ("gpu_utilization", utilization)];
        values.into_iter().filter_map(|(name, value)| Some((name.to_string(), json!(value?)))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn power_is_the_energy_since_the_last_reading() {
        let (mut meter, start) = (GpuMeter::default(), Instant::now());
        assert!(meter.read(&Device::Cpu).is_empty());
        let first = meter.values(Some(100.0), Some(0.5), start);
        assert_eq!((first.len(), &first["gpu_utilization"]), (1, &json!(0.5)));
        let second = meter.values(Some(1500.0), None, start + Duration::from_secs(2));
        assert_eq!((second.len(), &second["gpu_power_watts"]), (1, &json!(700.0)));
    }
}
