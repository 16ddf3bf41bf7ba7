//! `ottava plan`.

use crate::output::print_json;
use clap::Args;
use ottava_lm::Result;
use ottava_lm::config::{DeviceChoice, RunConfig};
use ottava_lm::models::{ConfigFile, decoder_config};
use ottava_lm::plan::Plan;
use std::path::PathBuf;

/// Show what a run would do: configuration, casts and their reasons, counts, memory. Needs no GPU and reads no weights.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava plan configs/quickstart.toml
  ottava plan run.toml --set recipe=fp8-current --json")]
pub struct PlanCommand {
    /// The run's TOML file.
    config: PathBuf,
    /// Change a setting: a dotted path, or a bare key that is unique.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Plan for: auto, cuda or cpu.
    #[arg(long, value_parser = crate::device::parse)]
    device: Option<DeviceChoice>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl PlanCommand {
    pub fn run(self) -> Result<()> {
        let config = RunConfig::load(&self.config, &self.settings)?;
        let sizes = decoder_config(&ConfigFile::read(&config.model.path)?)?;
        let device = crate::device::open(self.device.unwrap_or(config.device))?;
        let plan = Plan::new(&config, &sizes, &device)?;
        match self.json {
            true => print_json(&plan),
            false => print(&config, &plan),
        }
        Ok(())
    }
}

fn print(config: &RunConfig, plan: &Plan) {
    println!("Configuration\n");
    for line in config.to_toml().lines() {
        println!("  {line}");
    }
    println!("\nModel\n");
    println!(
        "  {} parameters, {:.2} MFLOP per token, {} tokens a step",
        plan.parameters,
        plan.flops_per_token / 1e6,
        plan.tokens_per_step
    );
    println!("  attention: {}", plan.attention);
    println!("  embedding, norms, softmax and loss: high precision in every recipe");
    println!("\nLinears\n");
    for l in &plan.linears {
        println!("  {} x {}  [{}, {}]", l.count, l.name, l.shape[0], l.shape[1]);
        println!("    fprop {}\n    dgrad {}\n    wgrad {}\n    because: {}", l.fprop, l.dgrad, l.wgrad, l.reason);
    }
    println!("\nMemory\n");
    for line in &plan.memory {
        println!("  {:>10.3} GiB  {}", gib(line.bytes), line.what);
    }
    println!("  {:>10.3} GiB  in total", gib(plan.memory_bytes));
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}
