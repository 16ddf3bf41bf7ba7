//! `ottava plan`.

use crate::output::print_json;
use clap::Args;
use ottava_lm::Result;
use ottava_lm::config::{DeviceChoice, RunConfig};
use ottava_lm::data::source;
use ottava_lm::models::{ConfigFile, decoder_config};
use ottava_lm::plan::{MemoryPlan, Plan, ResolvedRun};
use std::path::PathBuf;

/// Show what a run would do: configuration, casts and their reasons, counts, memory. Needs no GPU and reads no weights.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava plan configs/quickstart.toml
  ottava plan run.toml --set recipe=fp8-current --json
  ottava plan run.toml --device cuda --gpu-memory 80

A run that does not fit its device ends this with exit code 3, and with the cheapest settings that make it fit.")]
pub struct PlanCommand {
    /// The run's TOML file.
    config: PathBuf,
    /// Change a setting: a dotted path, or a bare key that is unique.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Plan for: auto, cuda or cpu. Without a GPU, cuda plans for an H200.
    #[arg(long, value_parser = crate::device::parse)]
    device: Option<DeviceChoice>,
    /// Plan for a GPU with so much memory, in GiB.
    #[arg(long, value_name = "GIB")]
    gpu_memory: Option<f64>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl PlanCommand {
    pub fn run(self) -> Result<()> {
        let mut config = RunConfig::load(&self.config, &self.settings)?;
        super::warn_of_settings(&config);
        config.share(config.parallel.data.max(1))?;
        let sizes = decoder_config(&ConfigFile::read(&config.model.path)?)?;
        config.expect_positions(&sizes)?;
        config.data.train_files.iter().try_for_each(|path| source::check(path))?;
        let device = crate::device::plan_for(self.device.unwrap_or(config.device), self.gpu_memory)?;
        let resolved = ResolvedRun::new(&config, &sizes, &device)?;
        let plan = Plan::new(&resolved, &sizes, &device)?;
        for text in &plan.exceptions {
            tracing::warn!("{text}");
        }
        match self.json {
            true => print_json(&plan),
            false => print(&resolved.config, &plan),
        }
        resolved.expect_fit()
    }
}

fn print(config: &RunConfig, plan: &Plan) {
    out!("Configuration\n");
    for line in config.to_toml().lines() {
        out!("  {line}");
    }
    out!("\nModel\n");
    out!(
        "  {} parameters, {:.2} MFLOP per token, {} tokens a step",
        plan.parameters,
        plan.flops_per_token / 1e6,
        plan.tokens_per_step
    );
    out!("  attention: {}", plan.attention);
    out!("  embedding, norms, softmax and loss: high precision in every recipe");
    out!("\nLinears\n");
    for l in &plan.linears {
        out!("  {} x {}  [{}, {}]", l.count, l.name, l.shape[0], l.shape[1]);
        out!("    fprop {}\n    dgrad {}\n    wgrad {}\n    because: {}", l.fprop, l.dgrad, l.wgrad, l.reason);
    }
    print_memory(&plan.memory);
    if let Some(choice) = &plan.choice {
        out!("\n  {choice}");
    }
}

fn print_memory(memory: &MemoryPlan) {
    out!("\nMemory, from a dry run of the steps\n");
    let line = |bytes: u64, what: &str| out!("  {:>10.3} GiB  {what}", gib(bytes));
    for used in &memory.lines {
        line(used.bytes, &used.what);
    }
    line(memory.peak_bytes, &format!("at the peak, in {}", memory.during));
    if memory.reserved_bytes > memory.peak_bytes {
        line(memory.reserved_bytes, "taken from the driver, with gaps between tensors");
    }
    line(memory.save_bytes, "while a checkpoint is saved");
    if memory.host_bytes > 0 {
        line(memory.host_bytes, "of the host's memory, offloaded");
    }
    line(memory.available_bytes, if memory.fits { "available" } else { "available, which is not enough" });
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}
