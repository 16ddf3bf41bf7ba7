//! `ottava logits`.

use super::remote::{self, Reads, load_run};
use super::warn_of_settings;
use crate::output::{Meter, print_json, stop_on_signals};
use clap::Args;
use ottava_common::{Error, Result, interrupt};
use ottava_data::Tokenizer;
use ottava_settings::{DeviceChoice, Loaded};
use ottava_train::objective::distillation::{StoredLogits, store_logits};
use ottava_train::plan::expect_model_fits;
use std::path::PathBuf;

/// Store a teacher's distributions at the learned tokens of a run's training data, for distillation without the teacher. After an interruption, the
/// same command continues where it stopped.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava logits run.toml --teacher models/large
  ottava logits run.toml --teacher models/large --set distillation.top_k=128
  ottava logits run.toml --teacher models/large --set teacher_recipe=fp8-block --device cuda

The run's file sets `distillation.logits`, the folder to write; `distillation.top_k`; and `distillation.temperature`. `ottava train` with the same
file reads the folder.")]
pub struct Logits {
    /// The run's TOML file.
    config: PathBuf,
    /// The folder of the teacher: a language model with the same vocabulary and tokenizer as the trained model.
    #[arg(long, value_name = "FOLDER")]
    teacher: PathBuf,
    /// Override a setting: `table.key=VALUE`, or `key=VALUE` if only one table has the key.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Where to run: auto, cuda or cpu; the same as --set device=….
    #[arg(long, value_parser = crate::device::parse)]
    device: Option<DeviceChoice>,
    /// Print one JSON object with the numbers of `documents` and learned `tokens` in the folder.
    #[arg(long)]
    json: bool,
}

impl Logits {
    pub fn run(self) -> Result<()> {
        stop_on_signals("stopping; what is scored is saved first")?;
        let Loaded { mut config, old_keys } = load_run(&self.config, &self.settings, Reads::Shapes)?;
        let teacher = remote::model(&self.teacher)?;
        warn_of_settings(&config, old_keys);
        if !config.distillation.is_stored() {
            return Err(Error::Config(format!(
                "{}: `distillation.logits` is not set; set it to the folder that gets the teacher's distributions",
                self.config.display()
            )));
        }
        config.resolve_data()?;
        let device = crate::device::open(self.device.unwrap_or(config.device))?;
        let (run, seq_len) = (config.with_teacher(&teacher), config.data.max_length);
        expect_model_fits(&teacher, &run.teacher_sizes()?, &run.teacher_recipe(&device), &device, seq_len, 1, &[])?;
        let data = config.prepare_data(&Tokenizer::load(config.tokenizer_path())?)?;
        let mut meter = Meter::new("scored", data.sets.iter().map(|set| set.statistics.tokens).sum());
        let mut last = 0;
        let mut progress = |tokens| {
            last = tokens;
            meter.at(tokens);
            interrupt::check("scoring documents")
        };
        let stored = store_logits(&config, &data, &teacher, &device, &mut progress)?;
        meter.finish(last);
        let StoredLogits { documents, tokens } = stored;
        match self.json {
            true => print_json(&stored),
            false => out!(
                "{}: the {} likeliest tokens of {tokens} distributions, of {documents} documents",
                config.distillation.logits.display(),
                config.distillation.top_k
            ),
        }
        Ok(())
    }
}
