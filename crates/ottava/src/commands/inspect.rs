//! `ottava inspect`.

use crate::output::print_json;
use clap::Args;
use ottava_lm::checkpoint::{Verify, latest_complete};
use ottava_lm::config::RunConfig;
use ottava_lm::fs::{RealFs, replace_file};
use ottava_lm::models::{ConfigFile, Decoder, decoder_config};
use ottava_lm::report::{CastTable, Outlier, Share, Summary, cast_maps};
use ottava_lm::{Error, Result};
use ottava_tensor::Device;
use ottava_tensor::cuda::GpuModel;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Show saturation and underflow of a run's FP8 casts: a summary, the worst tensors, and a page of heat maps.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava inspect runs/quickstart
  ottava inspect runs/quickstart --top 20 --output casts.html --json")]
pub struct Inspect {
    /// The run's folder, `output_dir` of its configuration.
    run: PathBuf,
    /// Tensors per table.
    #[arg(long, default_value_t = 5)]
    top: usize,
    /// The file of the heat maps; by default `casts.html` in the run's folder.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// The content of a run's folder.
struct Found {
    config: RunConfig,
    summary: Summary,
    /// The newest complete checkpoint.
    checkpoint: Option<PathBuf>,
    /// Statistics of each cast, or the reason that there are none.
    casts: Result<CastTable, String>,
}

/// Titles of the tables of outliers, and the meaning of their numbers.
const TABLES: [(&str, &str, &str); 3] = [
    ("saturated", "Saturated most", "share"),
    ("underflowed", "Underflowed most", "share"),
    ("amax_growth", "Amax grew most, in powers of two", "bits"),
];

impl Inspect {
    pub fn run(self) -> Result<()> {
        let found = Found::read(&self.run)?;
        let outliers = found.casts.as_ref().ok().map(|table| {
            let saturated = table.most_lost(self.top, |cell| cell.saturated);
            let underflowed = table.most_lost(self.top, |cell| cell.underflowed);
            [saturated, underflowed, table.most_grown(self.top)]
        });
        let page = match &found.casts {
            Ok(table) => {
                let page = self.output.unwrap_or_else(|| self.run.join("casts.html"));
                let title = format!("FP8 casts of {} ({})", self.run.display(), found.recipe());
                replace_file(&RealFs, &page, cast_maps(&title, table).as_bytes())?;
                Some(page)
            }
            Err(_) => None,
        };
        match self.json {
            true => print_json(&found.json(&outliers, &page)),
            false => found.print(&self.run, &outliers, &page),
        }
        Ok(())
    }
}

/// Why the recipe of a run casts nothing to FP8. A run on a CPU casts what is slow in FP8 on a GPU, so a run without casts went by that.
fn why_nothing_is_cast(config: &RunConfig, checkpoint: Option<&Path>) -> Result<String> {
    let nothing = format!("recipe {} casts nothing to FP8", config.precision.recipe.as_str());
    let recipe = config.recipe_on(&Device::dry_gpu(GpuModel::h200()));
    let model = checkpoint.unwrap_or(&config.model.path);
    if !recipe.casts_to_fp8() || !model.exists() {
        return Ok(nothing);
    }
    let description = Decoder::describe(&decoder_config(&ConfigFile::read(model)?)?, &recipe)?;
    let reasons = description.exceptions(&recipe).join("; ");
    Ok(format!("{nothing} here: {reasons}"))
}

impl Found {
    fn read(run: &Path) -> Result<Found> {
        let (metrics, config) = (run.join("metrics.jsonl"), run.join("config.toml"));
        if !metrics.is_file() || !config.is_file() {
            return Err(Error::Config(format!(
                "{}: this is not the folder of a run, which has a config.toml and a metrics.jsonl; name the `output_dir` of `ottava train`",
                run.display()
            )));
        }
        let (config, summary) = (RunConfig::load(&config, &[])?, Summary::read(&metrics)?);
        let checkpoint = latest_complete(&run.join("checkpoints"), Verify::Sizes)?.complete.map(|(path, _)| path);
        let casts = run.join("casts.jsonl");
        let table = if casts.is_file() { CastTable::read(&casts)? } else { CastTable::default() };
        let every = config.training.cast_statistics_steps;
        let casts = match table.is_empty() {
            false => Ok(table),
            true if summary.casts.is_none() => Err(why_nothing_is_cast(&config, checkpoint.as_deref())?),
            true if every == 0 => Err(
                "statistics of single casts were not recorded; set `training.cast_statistics_steps` to an interval in steps, such as 100".into(),
            ),
            true => Err(format!(
                "there are no statistics of single casts yet; they are recorded every {every} steps (`training.cast_statistics_steps`)"
            )),
        };
        Ok(Found { config, summary, checkpoint, casts })
    }

    fn recipe(&self) -> &'static str {
        self.config.precision.recipe.as_str()
    }

    fn json(&self, outliers: &Option<[Vec<Outlier>; 3]>, page: &Option<PathBuf>) -> Value {
        let lists = outliers.iter().flat_map(|tables| TABLES.iter().zip(tables)).map(|((key, ..), list)| (*key, list));
        json!({
            "recipe": self.recipe(),
            "summary": self.summary,
            "checkpoint": self.checkpoint,
            "no_statistics": self.casts.as_ref().err(),
            "cast_lines": self.casts.as_ref().map(|table| table.steps.len()).unwrap_or(0),
            "non_finite": self.casts.as_ref().map(CastTable::not_finite).unwrap_or_default(),
            "worst": lists.collect::<std::collections::BTreeMap<_, _>>(),
            "html": page,
        })
    }

    fn print(&self, run: &Path, outliers: &Option<[Vec<Outlier>; 3]>, page: &Option<PathBuf>) {
        let Summary { step, tokens, loss, eval_loss, casts } = &self.summary;
        out!("{}: recipe {}, {step} steps, {tokens} tokens", run.display(), self.recipe());
        for (what, ends) in [("training loss", loss), ("validation loss", eval_loss)] {
            if let Some([(first, from), (last, to)]) = ends {
                out!("  {what:<16} {from:.4} in step {first}, {to:.4} in step {last}");
            }
        }
        if let Some(checkpoint) = &self.checkpoint {
            out!("  {:<16} {}", "checkpoint", checkpoint.display());
        }
        if let Some(casts) = casts {
            for (what, share) in [("saturated", casts.saturated), ("underflowed", casts.underflowed)] {
                let Share { mean, highest, step } = share;
                out!("  {what:<16} {mean:.1e} of all elements cast, at most {highest:.1e}, in step {step}");
            }
            match casts.non_finite_steps.as_slice() {
                [] => out!("  {:<16} in no step", "infinities"),
                steps => out!("  {:<16} in {} steps, the first {}", "infinities", steps.len(), steps[0]),
            }
        }
        let table = match &self.casts {
            Ok(table) => table,
            Err(why) => return out!("\n{why}"),
        };
        for (name, steps) in table.not_finite() {
            out!("  {:<16} {name}, in {steps} steps", "");
        }
        for ((_, title, unit), list) in TABLES.iter().zip(outliers.iter().flatten()) {
            out!("\n{title:<56} {unit:>9} {:>9} {:>9}", "highest", "in step");
            if list.is_empty() {
                out!("none");
            }
            for Outlier { name, value, highest, step } in list {
                match *unit {
                    "bits" => out!("{name:<56} {value:>9.2} {highest:>9.2} {step:>9}"),
                    _ => out!("{name:<56} {value:>9.1e} {highest:>9.1e} {step:>9}"),
                }
            }
        }
        if let Some(page) = page {
            out!("\nheat maps: {}", page.display());
        }
    }
}
