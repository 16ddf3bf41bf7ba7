//! The first lines of a plan: whether the run fits, its steps, its time, its checkpoints, its precision and its data, one line each.

use ottava_common::{Error, Result};
use ottava_data::{Formatting, Tokenizer, TrainingData};
use ottava_recipe::RecipeName;
use ottava_settings::{Interval, RunConfig};
use ottava_train::plan::{Plan, ResolvedRun};
use ottava_train::tasks::RunTasks;
use serde::Serialize;
use std::path::PathBuf;

/// The maximum size in bytes of data that a plan tokenizes without being asked to. `train` uses the tokens again.
const TOKENIZED: u64 = 256 << 20;

/// What a plan has found out about tokenizer, template and data, which `train` checks before its first step.
pub struct Checked {
    /// The tokens that begin and end a document.
    pub edges: String,
    /// The steps of the epochs, if the data were tokenized.
    steps_of_epochs: Option<u64>,
    /// A sentence if the epochs have too few steps to teach anything.
    pub few_steps: Option<String>,
    /// The data in words.
    data: String,
}

impl Checked {
    /// Checks the tokenizer, the tasks, the chat template and the data of `config`, as `train` does. `files` are the files with their formattings. If `model.path`
    /// is a config.json and `model.tokenizer` is not set, the plan is of shapes alone, and nothing is checked.
    ///
    /// Has the errors of [`Tokenizer::load`], [`RunTasks::open`] and [`RunConfig::prepare_data`].
    pub fn new(config: &RunConfig, files: &[PathBuf], formattings: &[Formatting], counts: bool) -> Result<Checked> {
        let kinds = kinds(files, formattings);
        if config.model.path.is_file() && config.model.tokenizer.as_os_str().is_empty() {
            let edges = "the tokens that begin and end documents are not known without a tokenizer".into();
            let data = format!(
                "{kinds}; not checked, since the model is a config.json without a tokenizer; new tokens of [tokenizer] are not counted"
            );
            return Ok(Checked { edges, steps_of_epochs: None, few_steps: None, data });
        }
        let tokenizer = Tokenizer::load(config.tokenizer_path())?;
        let edges = tokenizer.describe_edges();
        RunTasks::open(config, &tokenizer)?;
        let bytes: u64 = files.iter().filter_map(|path| std::fs::metadata(path).ok()).map(|found| found.len()).sum();
        if bytes > TOKENIZED && !counts {
            if config.chat_template(&tokenizer)?.is_none() && formattings.contains(&Formatting::Messages) {
                let folder = config.tokenizer_path().display();
                return Err(Error::Model(format!(
                    "{folder}: there is no chat template, which the conversations of the data need; set `data.chat.chat_template_path`"
                )));
            }
            let data = format!(
                "{kinds}; not tokenized yet, since the files have {:.1} GB (--show-data does it)",
                bytes as f64 / 1e9
            );
            return Ok(Checked { edges, steps_of_epochs: None, few_steps: None, data });
        }
        let data = config.prepare_data(&tokenizer)?;
        for set in &data.sets {
            set.dataset.check()?;
        }
        let examples = data.rows() / config.objective().properties().rows as f64;
        let steps_of_epochs = steps(config, examples);
        let few_steps = steps_of_epochs.and_then(|steps| config.few_steps(examples, steps));
        Ok(Checked { edges, steps_of_epochs, few_steps, data: described(&kinds, &data) })
    }
}

/// Describes files and formattings.
fn kinds(files: &[PathBuf], formattings: &[Formatting]) -> String {
    let mut names: Vec<_> = formattings.iter().map(|formatting| formatting.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    format!("{} file{}, {}", files.len(), if files.len() == 1 { "" } else { "s" }, names.join(" and "))
}

fn described(kinds: &str, data: &TrainingData) -> String {
    let sum = |count: fn(&ottava_data::DataSet) -> u64| data.sets.iter().map(count).sum::<u64>();
    let documents = sum(|set| set.dataset.len() as u64);
    let tokens = sum(|set| set.dataset.total_tokens());
    let files: usize = data.sets.iter().filter_map(|set| Some(set.stream.as_ref()?.shards().count())).sum();
    if files > 0 {
        return format!(
            "{files} files that are fetched while the run trains; a sample, {kinds}, has {documents} documents, {tokens} tokens"
        );
    }
    format!("{kinds}; {documents} documents, {tokens} tokens, {:.1} rows an epoch", data.rows())
}

/// Returns the steps of the run's epochs, each of which has this many `examples`; `None` for completions that the model draws, whose number per step is a setting of its own.
fn steps(config: &RunConfig, examples: f64) -> Option<u64> {
    let training = &config.training;
    let steps = (examples * training.num_train_epochs / training.sequences() as f64).floor().max(1.0) as u64;
    (!config.reinforcement.is_on()).then_some(steps)
}

/// The verdict of a plan.
#[derive(Serialize)]
pub struct Verdict {
    /// Whether the run fits the device.
    pub fits: bool,
    /// The steps of the run; null if the data must be tokenized to know them.
    pub steps: Option<u64>,
    /// The tokens of the run.
    pub tokens: Option<u64>,
    /// The minimum seconds of the run on Hopper GPUs.
    pub least_seconds: Option<f64>,
    /// The bytes of a checkpoint: the weights, and what a run needs to go on.
    pub checkpoint_bytes: u64,
    #[serde(skip)]
    lines: Vec<(&'static str, String)>,
}

impl Verdict {
    /// Summarizes a `plan` of `resolved` for the device in words. `sharing` is the number of ranks that share the memory of the device: ranks on a CPU share
    /// the memory of their host.
    pub fn new(resolved: &ResolvedRun, plan: &Plan, checked: &Checked, device: &str, sharing: usize) -> Verdict {
        let (config, memory) = (&resolved.config.run, &plan.memory);
        let steps = config.training.max_steps.or(checked.steps_of_epochs);
        let tokens = steps.map(|steps| steps * plan.tokens_per_step);
        let least_seconds = plan.least_step_seconds.zip(steps).map(|(seconds, steps)| seconds * steps as f64);
        let checkpoint_bytes = memory.checkpoint_bytes;
        // A run whose segments take more than is available fits if the pool can return idle segments.
        let taken = match memory.fits {
            true => memory.reserved_bytes.min(memory.available_bytes),
            false => memory.reserved_bytes,
        };
        let of_sharing = memory.reserved_bytes.saturating_mul(sharing as u64);
        let fits = memory.fits && (sharing == 1 || of_sharing <= memory.available_bytes);
        let (taken, available) = (size(taken), size(memory.available_bytes));
        let of = if memory.ranks > 1 { format!(", each of {} ranks", memory.ranks) } else { String::new() };
        let host = match memory.host_bytes {
            0 => String::new(),
            bytes => format!(", and {} of the host's memory", size(bytes)),
        };
        // The first allocations of a run have no phase.
        let phase = Some(&memory.during).filter(|phase| !phase.is_empty());
        let peak = phase.map_or(String::new(), |phase| format!("; the peak is in {phase}"));
        let fitting = match (fits, memory.fits) {
            (true, _) if sharing > 1 => {
                format!(
                    "yes: {} of {available} of {device}, {taken} for each of {sharing} ranks{peak}",
                    size(of_sharing)
                )
            }
            (true, _) => format!("yes: {taken} of {available} of {device}{of}{host}{peak}"),
            (false, false) => format!("NO: {taken} needed, {available} available on {device}{of}{host}{peak}"),
            (false, true) => format!(
                "NO: {sharing} ranks on one machine need {}, {taken} each, and {available} are available on {device}; `--gpu NAME` plans for GPUs{peak}",
                size(of_sharing)
            ),
        };
        let count = match (steps, config.training.max_steps) {
            (Some(steps), Some(_)) => format!("{steps} (`training.max_steps`)"),
            (Some(steps), None) => format!("{steps}, {} epochs", config.training.num_train_epochs),
            (None, _) => format!("{} epochs; the number follows from the data", config.training.num_train_epochs),
        };
        let of_all = tokens.map_or(String::new(), |tokens| format!(", {} in all", millions(tokens)));
        let time = match (least_seconds, plan.least_step_seconds) {
            (Some(all), Some(step)) => format!(
                "at least {} ({} a step), if each GPU is as busy as one H200 with Llama-2-7B",
                duration(all),
                duration(step)
            ),
            (None, Some(step)) => {
                format!("at least {} a step, if each GPU is as busy as one H200 with Llama-2-7B", duration(step))
            }
            _ => "not predicted for this device; the log of `train` has it after the first steps".into(),
        };
        let kept = match config.checkpoint.save_steps {
            Interval::End => "saved at the end".to_string(),
            Interval::Every(interval) => match config.checkpoint.save_minutes {
                0.0 => format!("saved every {interval} steps and at the end"),
                minutes => format!("saved every {interval} steps or {minutes} minutes, and at the end"),
            },
        };
        let kept = match config.checkpoint.save_only_model {
            true => format!("the model alone, {kept}"),
            false => kept,
        };
        let lines = vec![
            ("fits", fitting),
            ("steps", count),
            ("tokens", format!("{} a step{of_all}", plan.tokens_per_step)),
            ("time", time),
            ("checkpoint", format!("{}, {kept}", size(checkpoint_bytes))),
            ("precision", precision(config, plan)),
            ("data", checked.data.clone()),
        ];
        Verdict { fits, steps, tokens, least_seconds, checkpoint_bytes, lines }
    }

    /// Errors if the ranks that share a host do not fit its memory together.
    pub fn expect_fit(&self) -> Result<()> {
        match self.fits {
            true => Ok(()),
            false => Err(Error::Memory(
                "the ranks of this machine do not fit its memory together; plan for fewer ranks, for GPUs with `--gpu NAME`, or for more machines with `--hosts`"
                    .into(),
            )),
        }
    }

    /// Prints one line for each fact.
    pub fn print(&self) {
        for (name, text) in &self.lines {
            out!("{:<11} {text}", format!("{name}:"));
        }
    }
}

/// Describes the formats of computation and of the optimizer.
fn precision(config: &RunConfig, plan: &Plan) -> String {
    let recipe = config.precision.recipe.as_str();
    // The head is in high precision in every recipe.
    let of_blocks = || plan.linears.iter().filter(|linear| !linear.reason.starts_with("the head stays"));
    let all: usize = of_blocks().map(|linear| linear.count).sum();
    let is_cast = |product: &str| product.contains("E4M3") || product.contains("nvfp4");
    let cast: usize = of_blocks().filter(|linear| is_cast(&linear.fprop)).map(|linear| linear.count).sum();
    let bits = if config.precision.recipe == RecipeName::Nvfp4 { 4 } else { 8 };
    let fp8 = match config.precision.recipe().casts.is_some() {
        true => format!(", {cast} of {all} linears in FP{bits}"),
        false => String::new(),
    };
    let trained = match config.lora.r {
        0 => "all weights are trained".to_string(),
        r => format!(
            "adapters with r = {r}{} are trained, {:.2} % of the weights",
            if config.lora.modules_to_save.is_empty() { "" } else { " and whole modules" },
            plan.parameters as f64 / (plan.parameters + plan.frozen) as f64 * 100.0
        ),
    };
    format!("{recipe}{fp8}; optimizer storage {}; {trained}", config.optimizer.storage.as_str())
}

fn millions(count: u64) -> String {
    match count {
        0..1_000_000 => count.to_string(),
        1_000_000..1_000_000_000 => format!("{:.1} M", count as f64 / 1e6),
        _ => format!("{:.2} G", count as f64 / 1e9),
    }
}

/// Formats bytes as GiB, or as MiB below a tenth of a GiB.
pub fn size(bytes: u64) -> String {
    let mib = bytes as f64 / (1u64 << 20) as f64;
    if mib < 102.4 { format!("{mib:.1} MiB") } else { format!("{:.1} GiB", mib / 1024.0) }
}

/// Formats seconds as hours, minutes, seconds or milliseconds.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s >= 5400.0 => format!("{:.1} h", s / 3600.0),
        s if s >= 90.0 => format!("{:.1} min", s / 60.0),
        s if s >= 1.0 => format!("{s:.1} s"),
        s => format!("{:.1} ms", s * 1e3),
    }
}
