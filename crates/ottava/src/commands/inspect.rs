//! `ottava inspect`.

use crate::output::print_json;
use clap::Args;
use ottava_checkpoint::{ModelFiles, Verify, latest_complete};
use ottava_common::fs::{RealFs, replace_file};
use ottava_common::{Error, Result};
use ottava_models::{ConfigFile, Decoder, decoder_config};
use ottava_recipe::scaling::Quantity;
use ottava_sentinel::{Recommendation, WhatIf, what_if};
use ottava_settings::RunConfig;
use ottava_tensor::cuda::GpuModel;
use ottava_tensor::{DType, Device, Granularity, Tensor};
use ottava_train::report::{CastTable, Outlier, SentinelTable, Share, Summary, cast_maps, sentinel_maps};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Summarize a run's FP8 casts (saturation, underflow) and its comparisons with BF16, list the worst tensors, and write heat maps as HTML.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava inspect runs/quickstart
  ottava inspect runs/quickstart --recommend overrides.toml
  ottava inspect runs/quickstart --what-if
  ottava inspect runs/quickstart --top 20 --output casts.html --json")]
pub struct Inspect {
    /// The run's folder (`output_dir` of its configuration).
    run: PathBuf,
    /// The number of rows per table.
    #[arg(long, default_value_t = 5)]
    top: usize,
    /// The file for the heat maps of casts; by default `casts.html` in the run's folder. Heat maps of comparisons go to `sentinel.html` in the run's
    /// folder.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write a table [[precision.overrides]] to this file. With the table, the linears with the highest `loss_cost` per FLOP compute forward in BF16.
    /// Needs a run with `sentinel.sentinel_steps`.
    #[arg(long, value_name = "FILE")]
    recommend: Option<PathBuf>,
    /// The share of the total `loss_cost` that --recommend avoids, 0 to 1.
    #[arg(long, default_value_t = 0.5, requires = "recommend")]
    share: f64,
    /// Show the errors of casts in other formats, granularities and headrooms, for the tensors of the latest dump (`debug.dump_tensors`).
    #[arg(long)]
    what_if: bool,
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
    /// Statistics of each cast, or the reason why there are none.
    casts: Result<CastTable, String>,
    /// Comparisons with BF16; empty without a sentinel.
    sentinel: SentinelTable,
}

/// The files that were written.
#[derive(Default)]
struct Written {
    /// The file with the heat maps of casts. The next field is the file with the heat maps of comparisons.
    casts: Option<PathBuf>,
    sentinel: Option<PathBuf>,
    recommendation: Option<(PathBuf, Recommendation)>,
}

/// A file of dumped tensors, and the errors of other casts for each matrix that is cast.
struct Dump {
    path: PathBuf,
    tensors: Vec<(String, Vec<WhatIf>)>,
}

/// The casts that the table of `--what-if` shows, and their titles.
const COLUMNS: [(DType, Granularity, Option<i32>, &str); 7] = [
    (DType::E4M3, Granularity::PerTensor, Some(0), "tensor"),
    (DType::E4M3, Granularity::PerTensor, Some(1), "margin 1"),
    (DType::E4M3, Granularity::PerTensor, Some(-1), "margin -1"),
    (DType::E4M3, Granularity::PerRow, None, "row"),
    (DType::E4M3, Granularity::Blocks1x128, None, "1x128"),
    (DType::E4M3, Granularity::Blocks128x128, None, "128x128"),
    (DType::E5M2, Granularity::PerTensor, Some(0), "E5M2"),
];

impl Dump {
    /// Reads the dump of the latest step in the run's folder.
    fn latest(run: &Path) -> Result<Dump> {
        let step = |path: &Path| {
            let name = path.file_stem()?.to_str()?.strip_prefix("step-")?;
            name.split('-').next()?.parse::<u64>().ok()
        };
        let entries = std::fs::read_dir(run.join("dumps")).into_iter().flatten().flatten().map(|entry| entry.path());
        let path = entries.filter_map(|path| Some((step(&path)?, path))).max().map(|(_, path)| path);
        let path = path.ok_or_else(|| {
            Error::Config(format!(
                "{}: the run wrote no tensors; set `debug.debug_steps` to steps and `debug.dump_tensors` to true",
                run.display()
            ))
        })?;
        let files = ModelFiles::open_file(&path)?;
        let is_cast =
            |name: &&str| ["input", "weight", "grad_output"].iter().any(|end| name.ends_with(&format!(".{end}")));
        let tensors = files.names().filter(is_cast).map(|name| {
            let info = files.info(name)?;
            let x = Tensor::from_bytes(&Device::Cpu, &info.shape, info.dtype, &files.read(name)?)?;
            Ok((name.to_string(), what_if(&x)?))
        });
        Ok(Dump { tensors: tensors.collect::<Result<_>>()?, path })
    }

    fn json(&self) -> Value {
        let tensors = self.tensors.iter().map(|(name, all)| (name.clone(), json!(all)));
        json!({"file": self.path, "tensors": tensors.collect::<serde_json::Map<_, _>>()})
    }

    fn print(&self) {
        out!("\nrelative errors of casts to E4M3 with other scales, and to E5M2: {}", self.path.display());
        let titles: String = COLUMNS.iter().map(|(.., title)| format!(" {title:>9}")).collect();
        out!("{:<48}{titles}", "");
        for (name, all) in &self.tensors {
            let error = |(format, granularity, margin, _): &(DType, Granularity, Option<i32>, &str)| {
                let of = |one: &&WhatIf| (one.format, one.granularity, one.margin) == (*format, *granularity, *margin);
                all.iter().find(of).map_or(f64::NAN, |one| one.error)
            };
            let errors: String = COLUMNS.iter().map(|column| format!(" {:>9.4}", error(column))).collect();
            out!("{name:<48}{errors}");
        }
    }
}

/// The titles of the tables of outliers, and the meaning of their numbers.
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
        let mut written = Written::default();
        let title = |what: &str| format!("{what} of {} ({})", self.run.display(), found.recipe());
        if let Ok(table) = &found.casts {
            let page = self.output.clone().unwrap_or_else(|| self.run.join("casts.html"));
            replace_file(&RealFs, &page, cast_maps(&title("FP8 casts"), table).as_bytes())?;
            written.casts = Some(page);
        }
        if !found.sentinel.is_empty() {
            let page = self.run.join("sentinel.html");
            replace_file(&RealFs, &page, sentinel_maps(&title("FP8 beside BF16"), &found.sentinel).as_bytes())?;
            written.sentinel = Some(page);
        }
        if let Some(file) = &self.recommend {
            let recommendation = found.recommend(&self.run, self.share)?;
            replace_file(&RealFs, file, recommendation.to_toml().as_bytes())?;
            written.recommendation = Some((file.clone(), recommendation));
        }
        let dump = self.what_if.then(|| Dump::latest(&self.run)).transpose()?;
        match self.json {
            true => {
                let mut all = found.json(&outliers, &written);
                all["what_if"] = json!(dump.as_ref().map(Dump::json));
                print_json(&all);
            }
            false => {
                found.print(&self.run, self.top, &outliers, &written);
                dump.iter().for_each(Dump::print);
            }
        }
        Ok(())
    }
}

/// Returns why a run has cast nothing to FP8. The reasons are derived for a GPU: on a CPU, linears that are slower in FP8 on a GPU are cast too, so a
/// run without casts ran on a GPU.
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
        let (config, summary) = (RunConfig::load(&config, &[])?.config, Summary::read(&metrics)?);
        let checkpoint = latest_complete(&run.join("checkpoints"), Verify::Sizes)?.complete.map(|(path, _)| path);
        let casts = run.join("casts.jsonl");
        let table = if casts.is_file() { CastTable::read(&casts)? } else { CastTable::default() };
        let every = config.logging.cast_statistics_steps;
        let casts = match table.is_empty() {
            false => Ok(table),
            true if summary.casts.is_none() => Err(why_nothing_is_cast(&config, checkpoint.as_deref())?),
            true if every == 0 => Err(
                "statistics of single casts were not recorded; set `logging.cast_statistics_steps` to an interval in steps, such as 100".into(),
            ),
            true => Err(format!(
                "there are no statistics of single casts yet; they are recorded every {every} steps (`logging.cast_statistics_steps`)"
            )),
        };
        let sentinel = run.join("sentinel.jsonl");
        let sentinel = if sentinel.is_file() { SentinelTable::read(&sentinel)? } else { SentinelTable::default() };
        Ok(Found { config, summary, checkpoint, casts, sentinel })
    }

    /// Returns the linears whose forward should be computed in BF16 to avoid `share` of the loss cost of casts.
    fn recommend(&self, run: &Path, share: f64) -> Result<Recommendation> {
        if !(0.0..=1.0).contains(&share) {
            return Err(Error::Config(format!("--share is {share}; it lies between 0 and 1")));
        }
        let costs = self.sentinel.means(Quantity::LossCost);
        if costs.is_empty() {
            return Err(Error::Config(format!(
                "{}: there are no comparisons with BF16 to recommend by; set `sentinel.sentinel_steps` to an interval in steps, such as 100",
                run.display()
            )));
        }
        let model = self.checkpoint.as_deref().unwrap_or(&self.config.model.path);
        let recipe = self.config.recipe_on(&Device::dry_gpu(GpuModel::h200()));
        let description = Decoder::describe(&decoder_config(&ConfigFile::read(model)?)?, &recipe)?;
        let sites: Vec<_> = description.linears.into_iter().map(|(site, _)| site).collect();
        Ok(Recommendation::of(&costs, &sites, share))
    }

    fn recipe(&self) -> &'static str {
        self.config.precision.recipe.as_str()
    }

    fn json(&self, outliers: &Option<[Vec<Outlier>; 3]>, written: &Written) -> Value {
        let lists = outliers.iter().flat_map(|tables| TABLES.iter().zip(tables)).map(|((key, ..), list)| (*key, list));
        json!({
            "recipe": self.recipe(),
            "summary": self.summary,
            "checkpoint": self.checkpoint,
            "no_statistics": self.casts.as_ref().err(),
            "cast_lines": self.casts.as_ref().map(|table| table.steps.len()).unwrap_or(0),
            "non_finite": self.casts.as_ref().map(CastTable::not_finite).unwrap_or_default(),
            "worst": lists.collect::<std::collections::BTreeMap<_, _>>(),
            "html": written.casts,
            "sentinel": (!self.sentinel.is_empty()).then(|| self.sentinel_json()),
            "sentinel_html": written.sentinel,
            "recommendation": written.recommendation.as_ref().map(|(_, recommendation)| recommendation),
        })
    }

    fn sentinel_json(&self) -> Value {
        let table = &self.sentinel;
        json!({
            "steps": table.steps,
            "loss_gap": table.whole.iter().map(|whole| whole.loss_gap).collect::<Vec<_>>(),
            "gradient_cosine": table.whole.iter().map(|whole| whole.gradient_cosine).collect::<Vec<_>>(),
            "findings": table.findings,
            "loss_costs": table.means(Quantity::LossCost),
        })
    }

    /// Prints the values of the whole model, and the linears with the highest loss cost.
    fn print_sentinel(&self, top: usize, written: &Written) {
        let table = &self.sentinel;
        if table.is_empty() {
            return;
        }
        let count = table.steps.len();
        let mean = |value: &dyn Fn(usize) -> f64| (0..count).map(value).sum::<f64>() / count as f64;
        out!("\n{count} comparisons with BF16, with {} findings", table.findings.iter().sum::<usize>());
        out!("  {:<16} {:+.5} nats per token in the mean", "loss gap", mean(&|at| table.whole[at].loss_gap));
        out!("  {:<16} {:.4} in the mean", "gradient cosine", mean(&|at| table.whole[at].gradient_cosine));
        let costs = table.means(Quantity::LossCost);
        let all: f64 = costs.iter().map(|(_, cost)| cost).sum();
        out!("\n{:<56} {:>9}", "The casts of forward cost most, estimated", "nats");
        for (name, cost) in costs.iter().take(top) {
            out!("{name:<56} {cost:>9.1e}");
        }
        out!("{:<56} {all:>9.1e}", format!("all {} linears", costs.len()));
        if let Some(page) = &written.sentinel {
            out!("\nplots and heat maps: {}", page.display());
        }
        if let Some((file, recommendation)) = &written.recommendation {
            let [removed, all, flops] = [recommendation.removed(), recommendation.all_costs, recommendation.flops()];
            out!(
                "recommended: forward of {} of {} linears in BF16, {:.1} % of the FLOPs of forward, avoids {removed:.1e} of {all:.1e} nats: {}",
                recommendation.linears.len(),
                recommendation.all_linears,
                100.0 * flops,
                file.display()
            );
        }
    }

    fn print(&self, run: &Path, top: usize, outliers: &Option<[Vec<Outlier>; 3]>, written: &Written) {
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
            Err(why) => {
                out!("\n{why}");
                return self.print_sentinel(top, written);
            }
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
        if let Some(page) = &written.casts {
            out!("\nheat maps: {}", page.display());
        }
        self.print_sentinel(top, written);
    }
}
