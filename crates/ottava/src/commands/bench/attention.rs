//! `ottava bench attention`.

use super::shared::{measure, meter, power_columns, power_of, share};
use crate::output::print_json;
use clap::Args;
use ottava_common::Result;
use ottava_settings::DeviceChoice;
use ottava_train::bench::{self};
use serde_json::json;

/// Time forward and backward of each kind of attention of a model, relative to the best rate of a BF16 product.
#[derive(Args)]
pub(super) struct Attention {
    /// A model that `bench train` knows, or a folder with a config.json.
    #[arg(long, default_value = "llama-2-7b")]
    model: String,
    /// The number of tokens of a micro-batch.
    #[arg(long, default_value_t = 8192, value_parser = crate::commands::count)]
    tokens: usize,
    /// The number of tokens per sequence; several values are measured one after the other.
    #[arg(long, value_delimiter = ',', default_value = "512,1024,2048,4096,8192", value_parser = crate::commands::count)]
    seq_lens: Vec<usize>,
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

impl Attention {
    pub(super) fn run(self) -> Result<()> {
        let model = bench::model(&self.model)?;
        let (device, rates) = measure(self.device, self.json)?;
        if !self.json {
            let power = power_columns(self.power);
            out!("{:>9} {:>9} {:<9} {:>9} {:>9} {:>11}{power}", "batch", "sequence", "", "ms", "TFLOP/s", "% of floor");
        }
        let mut rows = Vec::new();
        let meter = meter(&device, self.power)?;
        for &seq_len in &self.seq_lens {
            for row in bench::attention(meter, &model, self.tokens, seq_len)? {
                for (i, pass) in ["forward", "backward"].into_iter().enumerate().filter(|_| !self.json) {
                    let rate = row.flops[i] / (row.costs[i].milliseconds * 1e-3);
                    out!(
                        "{:>9} {:>9} {:<9} {:>9.3} {:>9.0} {:>11.0}{}  {}",
                        row.batch,
                        row.seq_len,
                        pass,
                        row.costs[i].milliseconds,
                        rate / 1e12,
                        share(rate, rates.bf16_flops),
                        power_of(&row.costs[i]),
                        row.attention
                    );
                }
                rows.push(row);
            }
        }
        if self.json {
            print_json(&json!({"device": device.to_string(), "model": self.model, "rates": rates, "rows": rows}));
        }
        Ok(())
    }
}
