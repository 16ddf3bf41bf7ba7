//! What the commands that run a finished model share.

use clap::Args;
use ottava_lm::Result;
use ottava_lm::config::DeviceChoice;
use ottava_lm::models::{ConfigFile, Decoder};
use ottava_lm::param::Purpose;
use ottava_lm::recipe::{Precision, RecipeName};
use ottava_lm::trainer::build;
use std::path::Path;

/// In which precision, and where.
#[derive(Args)]
pub struct Inference {
    /// Precision: fp32, bf16, fp8-delayed or fp8-current.
    #[arg(long, default_value = "bf16")]
    recipe: RecipeName,
    /// Where to run: auto, cuda or cpu.
    #[arg(long, default_value = "auto", value_parser = crate::device::parse)]
    device: DeviceChoice,
}

impl Inference {
    /// The model of `folder` with its weights cast, for sequences up to `seq_len`.
    pub fn load(&self, folder: &Path, config: &ConfigFile, seq_len: usize) -> Result<Decoder> {
        let device = crate::device::open(self.device)?;
        let recipe = Precision { recipe: self.recipe, ..Precision::default() }.recipe();
        let mut model = build(config, &recipe, &device, Purpose::Infer, seq_len, Some(folder), 0)?;
        model.quantize_weights()?;
        Ok(model)
    }
}
