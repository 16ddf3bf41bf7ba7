//! `ottava compare`.

use crate::output::print_json;
use clap::Args;
use ottava_common::{Error, Result};
use ottava_train::report::{ComparedCheckpoint, ComparedCost, Difference, Parting, RunComparison};
use serde_json::Value;
use std::path::PathBuf;

/// Show where two runs diverge: the first step, layer and tensor that differ, and the linears whose casts cost more loss in one run than in
/// the other.
#[derive(Args)]
#[command(
    after_help = "Compares the steps that both runs have recorded in metrics.jsonl, digests.jsonl (`sentinel.repeat_steps`), casts.jsonl
(`logging.cast_statistics_steps`) and sentinel.jsonl (`sentinel.sentinel_steps`), and the weights in checkpoints
(`checkpoint.save_steps`). To find the exact step, set these intervals to 1.

Examples:
  ottava compare runs/before runs/after
  ottava compare runs/fp8-delayed runs/fp8-block --top 20 --json"
)]
pub struct Compare {
    /// The output folder of the first run (`output_dir` of its configuration).
    a: PathBuf,
    /// The output folder of the second run.
    b: PathBuf,
    /// The number of rows of the table of linears.
    #[arg(long, default_value_t = 10)]
    top: usize,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Compare {
    pub fn run(self) -> Result<()> {
        for run in [&self.a, &self.b] {
            if !run.join("metrics.jsonl").is_file() {
                return Err(Error::Config(format!(
                    "{}: this is not the folder of a run, which has a metrics.jsonl; name the `output_dir` of `ottava train`",
                    run.display()
                )));
            }
        }
        let compared = RunComparison::read(&self.a, &self.b)?;
        match self.json {
            true => print_json(&serde_json::to_value(&compared).expect("a comparison is plain data")),
            false => self.print(&compared),
        }
        Ok(())
    }

    fn print(&self, compared: &RunComparison) {
        let RunComparison { steps, parting, checkpoints, loss_costs } = compared;
        match steps {
            Some([first, last]) => out!("both runs have metrics of steps {first} to {last}"),
            None => out!("the runs have no step in common"),
        }
        match parting {
            None => out!("no record differs"),
            Some(Parting { step, differences }) => {
                out!("step {step} is the first that differs:");
                for Difference { file, name, layer, values: [a, b], others } in differences {
                    let layer = layer.map_or(String::new(), |layer| format!(", layer {layer}"));
                    let more = if *others == 0 { String::new() } else { format!(", and {others} more") };
                    out!("  {file:<16} {name}{layer}: {} and {}{more}", words(a), words(b));
                }
            }
        }
        for ComparedCheckpoint { step, different, tensors } in checkpoints {
            match different.first() {
                None => out!("checkpoint {step}: the weights are equal, {tensors} tensors"),
                Some(first) => {
                    out!("checkpoint {step}: {} of {tensors} tensors differ, the first is {first}", different.len())
                }
            }
        }
        if !loss_costs.is_empty() {
            out!("\n{:<48} {:>10} {:>10} {:>10}", "casts of forward cost, nats per token", "A", "B", "B - A");
            for ComparedCost { linear, costs: [a, b] } in loss_costs.iter().take(self.top) {
                out!("{linear:<48} {a:>10.1e} {b:>10.1e} {:>+10.1e}", b - a);
            }
            let sum = |run: usize| loss_costs.iter().map(|one| one.costs[run]).sum::<f64>();
            let all = format!("all {} linears", loss_costs.len());
            out!("{all:<48} {:>10.1e} {:>10.1e} {:>+10.1e}", sum(0), sum(1), sum(1) - sum(0));
        }
    }
}

/// Formats a recorded value briefly: slope and error for a product, else the value itself.
fn words(value: &Value) -> String {
    match (value["slope"].as_f64(), value["error"].as_f64()) {
        (Some(slope), Some(error)) => format!("slope {slope:.5}, error {error:.5}"),
        _ => value.as_str().map_or_else(|| value.to_string(), str::to_string),
    }
}
