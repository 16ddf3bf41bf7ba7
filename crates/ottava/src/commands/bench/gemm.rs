//! `ottava bench gemm`.

use super::shared::{measure, meter, power_columns, power_of, share};
use crate::output::print_json;
use clap::Args;
use ottava_common::Result;
use ottava_recipe::RecipeName;
use ottava_settings::DeviceChoice;
use ottava_tensor::{DType, Device};
use ottava_train::bench::{self, GemmRow};
use serde_json::json;

/// Time the products of a model's linear layers, relative to the best rate of their types.
#[derive(Args)]
pub(super) struct Gemm {
    /// A model that `bench train` knows, or a folder with a config.json.
    #[arg(long, default_value = "llama-2-7b")]
    model: String,
    /// The number of rows of the activations.
    #[arg(long, default_value_t = 8192, value_parser = crate::commands::count)]
    tokens: usize,
    /// The recipes whose products are timed.
    #[arg(long, value_delimiter = ',', default_value = "bf16,fp8-delayed")]
    recipes: Vec<RecipeName>,
    /// The type in which wgrad accumulates: float32 or bfloat16.
    #[arg(long, default_value = "float32", value_parser = sums)]
    gradient_dtype: DType,
    /// Also measure power, clock and energy per run of each row under load. This takes 1.3 seconds per row. Needs NVML, which comes with NVIDIA's
    /// driver.
    #[arg(long)]
    power: bool,
    /// Select kernels whose sums do not depend on the number of rows, as `serve --batch-invariant` does on a GPU.
    #[arg(long)]
    batch_invariant: bool,
    /// Where to run: auto, cuda or cpu.
    #[arg(long, default_value = "auto", value_parser = crate::device::parse)]
    device: DeviceChoice,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Gemm {
    pub(super) fn run(self) -> Result<()> {
        let model = bench::model(&self.model)?;
        let (device, rates) = measure(self.device, self.json)?;
        if !self.json {
            out!(
                "{:<22} {:<6} {:<12} {:>20} {:>9} {:>9} {:>11}{}",
                "linear",
                "",
                "recipe",
                "T x N x K",
                "ms",
                "TFLOP/s",
                "% of floor",
                power_columns(self.power)
            );
        }
        let mut rows = Vec::new();
        let meter = meter(&device, self.power)?;
        let report = |row: GemmRow| {
            let [t, n, k] = row.sizes;
            if !self.json {
                out!(
                    "{:<22} {:<6} {:<12} {:>20} {:>9.3} {:>9.0} {:>11.0}{}",
                    row.linear,
                    format!("{:?}", row.product).to_lowercase(),
                    row.recipe.as_str(),
                    format!("{t} x {n} x {k}"),
                    row.cost.milliseconds,
                    2e-9 * (t * n * k) as f64 / row.cost.milliseconds,
                    share(row.floor_milliseconds, row.cost.milliseconds),
                    power_of(&row.cost)
                );
            }
            rows.push(row);
        };
        let time = || bench::gemms(meter, &model, self.tokens, &self.recipes, self.gradient_dtype, &rates, report);
        match &device {
            Device::Cuda(gpu) if self.batch_invariant => gpu.with_batch_invariance(time),
            _ => time(),
        }?;
        if self.json {
            print_json(&json!({"device": device.to_string(), "model": self.model, "rates": rates, "rows": rows}));
        }
        Ok(())
    }
}

fn sums(text: &str) -> Result<DType, String> {
    match text {
        "float32" => Ok(DType::F32),
        "bfloat16" => Ok(DType::BF16),
        other => Err(format!("`{other}` is not a type of sums; float32 and bfloat16 are")),
    }
}
