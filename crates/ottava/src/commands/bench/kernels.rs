//! `ottava bench kernels`.

use super::shared::{meter, power_columns, power_of, share};
use crate::output::print_json;
use clap::Args;
use ottava_common::Result;
use ottava_settings::DeviceChoice;
use ottava_tensor::bench::{BusRates, copy_bandwidth, kernels};
use serde_json::json;

/// Time every memory-bound op and compare it with a copy of the same size.
#[derive(Args)]
pub(super) struct Kernels {
    /// The number of rows of the activations.
    #[arg(long, default_value_t = 8192, value_parser = crate::commands::count)]
    tokens: usize,
    /// The width of the residual stream.
    #[arg(long, default_value_t = 4096, value_parser = crate::commands::count)]
    channels: usize,
    /// The width of the feed-forward layers.
    #[arg(long, default_value_t = 11_008, value_parser = crate::commands::count)]
    hidden: usize,
    /// Also measure power, clock and energy per run of each row under load. This takes 1.3 seconds per row. Needs NVML, which comes with NVIDIA's
    /// driver.
    #[arg(long)]
    power: bool,
    /// Where to run: auto, cuda or cpu.
    #[arg(long, default_value = "auto", value_parser = crate::device::parse)]
    device: DeviceChoice,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Kernels {
    pub(super) fn run(self) -> Result<()> {
        let device = crate::device::open(self.device)?;
        let (bandwidth, bus) = (copy_bandwidth(&device)?, BusRates::measure(&device)?);
        let rows = kernels(meter(&device, self.power)?, self.tokens, self.channels, self.hidden)?;
        if self.json {
            let rows: Vec<_> = rows
                .iter()
                .map(|r| {
                    json!({"name": r.name, "bytes": r.bytes, "milliseconds": r.cost.milliseconds, "power": r.cost.power,
                           "percent_of_floor": share(r.floor_milliseconds, r.cost.milliseconds)})
                })
                .collect();
            print_json(&json!({"device": device.to_string(), "copy_bytes_per_second": bandwidth,
                               "bus_bytes_per_second": bus, "kernels": rows}));
            return Ok(());
        }
        out!("{device}: a copy moves {:.0} GB/s, reads and writes counted", bandwidth / 1e9);
        if let Some(BusRates { up, down, both }) = bus {
            let [up, down, both] = [up, down, both].map(|rate| rate / 1e9);
            out!("the bus: {up:.1} GB/s to the GPU, {down:.1} to the host, {both:.1} each way at once");
        }
        let power = power_columns(self.power);
        out!("{:<44} {:>9} {:>8} {:>11}{power}", "kernel", "µs", "GB/s", "% of floor");
        for r in rows {
            out!(
                "{:<44} {:>9.1} {:>8.0} {:>11.0}{}",
                r.name,
                r.cost.milliseconds * 1e3,
                r.bytes as f64 / r.cost.milliseconds / 1e6,
                share(r.floor_milliseconds, r.cost.milliseconds),
                power_of(&r.cost)
            );
        }
        Ok(())
    }
}
