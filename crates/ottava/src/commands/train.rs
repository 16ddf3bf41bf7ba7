//! `ottava train`.

use super::disk::{in_output_dir, shortage};
use super::model_links::ModelLinks;
use super::monitor::{PORT, Page};
use super::public_settings::public_settings;
use super::remote::{Reads, Remote};
use super::warn_of_settings;
use crate::output::{Progress, print_json, stop_on_signals};
use crate::ranks::{Job, RankArgs, Role, Worker, keep};
use clap::Args;
use ottava_checkpoint::Backup;
use ottava_common::fs::{RealFs, replace_file};
use ottava_common::{Error, Result, interrupt};
use ottava_engine::{Engine, EngineOptions};
use ottava_recipe::param::Description;
use ottava_recipe::{KvCacheDtype, RecipeName};
use ottava_settings::{CheckpointConfig, DeviceChoice, Loaded, LoggingConfig, RunConfig};
use ottava_store::Bucket;
use ottava_trackers::{Facts, Outcome, Trackers};
use ottava_train::tasks::{complete_all, sample_requests};
use ottava_train::trainer::{RunLock, Start, StepReport, Trainer};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Train a model from a configuration file.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava train configs/quickstart.toml
  ottava train run.toml --recipe fp8-delayed --storage msamp-o2 --set training.max_steps=1000
  ottava train run.toml --resume
  ottava train run.toml --resume=auto
  ottava train run.toml --gpus 2
  ottava train run.toml --monitor
  torchrun --no-python --nproc-per-node 2 ottava train run.toml

SIGINT, SIGTERM and SIGHUP save a checkpoint after the step in progress and exit with code 75; before the first step they exit with 130.
A second signal exits at once with code 130. A signal to one rank stops all ranks. If a rank is lost, all ranks exit with code 5.")]
pub struct Train {
    /// The run's TOML file; `ottava config reference` shows every key.
    config: PathBuf,
    /// Override a setting: `table.key=VALUE`, or `key=VALUE` if only one table has the key.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    #[arg(long, value_name = "NAME", help = recipe_help())]
    recipe: Option<String>,
    /// Formats of weights, gradients and optimizer states: float32, msamp-o1, msamp-o2, msamp-o3, coat or bfloat16; the same as --set
    /// optimizer.storage=….
    #[arg(long, value_name = "NAME")]
    storage: Option<String>,
    /// The old name of --storage; it accepts the old names of storages.
    #[arg(long, value_name = "NAME", hide = true, conflicts_with = "storage")]
    level: Option<String>,
    /// Resume from the newest complete checkpoint of the run, or from the checkpoint in DIR. `--resume=auto` resumes if there is a
    /// checkpoint, and starts a new run otherwise.
    #[arg(long, value_name = "DIR|auto")]
    resume: Option<Option<PathBuf>>,
    /// Where to run: auto, cuda or cpu; the same as --set device=….
    #[arg(long, value_parser = crate::device::parse)]
    device: Option<DeviceChoice>,
    /// Show the run on a web page of this machine while it trains, as `ottava monitor` does.
    #[arg(long, value_name = "PORT", require_equals = true)]
    monitor: Option<Option<u16>>,
    #[command(flatten)]
    ranks: RankArgs,
    /// Print one JSON object with the result to standard output.
    #[arg(long)]
    json: bool,
}

impl Train {
    pub fn run(self) -> Result<()> {
        ottava_tensor::device::keep_freed_memory();
        let named = [
            ("precision.recipe", &self.recipe),
            ("optimizer.storage", &self.storage),
            ("optimizer.level", &self.level),
        ];
        let named = named.into_iter().filter_map(|(key, value)| Some(format!("{key}={}", value.as_ref()?)));
        let settings: Vec<String> = self.settings.iter().cloned().chain(named).collect();
        stop_on_signals("stopping; a step in progress is completed and saved first")?;
        let Loaded { mut config, old_keys } = RunConfig::read(&self.config, &settings)?;
        let (ranks, device) = self.ranks.choose(self.device.unwrap_or(config.device))?;
        config.device = device;
        let start = match self.resume {
            None => Start::New,
            Some(None) => Start::Resume,
            Some(Some(path)) if path == Path::new("auto") => Start::Auto,
            Some(Some(path)) => Start::ResumeFrom(path),
        };
        let worker = Worker::of_this_process()?;
        if config.recovery.is_on() && worker.is_none() {
            return match keep(&config, &start, ranks)? {
                0 => Ok(()),
                code => {
                    note!("the job has ended with exit code {code}");
                    std::process::exit(code.into())
                }
            };
        }
        // A rank of a keeper has the flags of its keeper, and starts no ranks.
        let role = Role::find(if worker.is_some() { 1 } else { ranks })?;
        let start = match &worker {
            Some(worker) => worker.start(start),
            None => start,
        };
        let keeper = worker.as_ref().map(Worker::connect).transpose()?;
        let leads = role.leads();
        // A missing address or key ends the run before it starts.
        let trackers = leads.then(|| Trackers::from_env(&config.logging)).transpose()?;
        let backup = if leads { backup(&config)? } else { None };
        // The lock is taken before other ranks are started, because they write their logs to this folder.
        let is_next = worker.as_ref().is_some_and(Worker::is_next);
        let lock = leads.then(|| take_lock(&config, is_next)).transpose()?;
        let _page = match self.monitor.filter(|_| leads) {
            Some(port) => Some(Page::show(&config.output_dir, port.unwrap_or(PORT))?),
            None => None,
        };
        // The ranks join before they open their devices, so that the other ranks notice a rank without its GPU. `comm` is dropped before the wait for
        // `processes`.
        let Job { processes, local, comm } = role.join(&config, Some(&config.output_dir))?;
        let found = if leads { find(&config, backup.as_ref(), &start) } else { Ok(Remote::default()) };
        let resolved = found.and_then(|remote| {
            remote.share(&comm)?;
            let config = config.resolved(&mut |config| remote.resolve(config, Reads::Weights))?;
            Ok((remote, config))
        });
        let (remote, config) = resolved.map_err(|error| processes.or_stop(error))?;
        if leads {
            warn_of_settings(&config, old_keys);
        }
        let device = crate::device::open_of_rank(config.device, &local)?;
        let progress = Progress::new(config.logging.logging_steps);
        let trainer = Trainer::shared(config.clone(), &device, &start, comm, lock);
        let mut trainer = trainer.map_err(|error| processes.or_stop(error))?;
        if let Some((keeper, snapshots)) = keeper {
            trainer.keep_snapshots(keeper, snapshots)?;
        }
        if leads {
            remote.save(&config.output_dir)?;
            warn_of_disk(&config, &trainer, &start);
        }
        let uploads = backup.map(Backup::start);
        let following = trackers.map(|trackers| trackers.start(&config.output_dir, facts(&config))).transpose()?;
        progress.line(&format!(
            "{} parameters, recipe {}, {} tokens a step",
            counts(trainer.run.model.description()),
            config.precision.recipe.as_str(),
            trainer.tokens_per_step()
        ));
        if config.reinforcement.endpoint.is_on() {
            let endpoint = super::endpoint::start(&config)?;
            progress.line(&format!("clients draw and return completions at http://{}", endpoint.address()));
            trainer.connect(Box::new(endpoint));
        }
        let mut links = leads.then(|| ModelLinks::new(&config.output_dir));
        let mut last = None;
        let outcome = trainer.run(interrupt::flag(), &mut |report| {
            progress.step(report);
            if let Some(links) = &mut links {
                // After a return to an earlier step, the checkpoint of the links may be gone.
                match report.saved.last() {
                    Some(saved) => links.lead_to(&saved.path),
                    None => links.mend(),
                }
            }
            last = Some(report.clone());
        });
        progress.finish();
        // After a failure other ranks leave the job, and the job would end this process while it waits for trackers and uploads.
        let (trainer, _lock) = match &outcome {
            Ok(()) => (Some(trainer), None),
            Err(_) => (None, trainer.leave()),
        };
        if let Some(following) = following {
            following.finish(match &outcome {
                Ok(()) => Outcome::Finished,
                Err(error) if error.is_stop() => Outcome::Stopped,
                Err(_) => Outcome::Failed,
            });
        }
        if let Some(uploads) = uploads {
            progress
                .line(&format!("waiting until the last checkpoints are uploaded to {}", config.checkpoint.upload_to));
            uploads.finish();
        }
        outcome?;
        let Some(trainer) = trainer.filter(Trainer::leads) else { return Ok(()) };
        processes.wait()?;
        report(trainer, &config, &progress, links, last.as_ref(), self.json)
    }
}

/// Locks the folder of the run. If this rank replaces another one (`is_next`) on a host that is only cut off, the other rank may hold the lock until it
/// notices that it has lost the other ranks.
fn take_lock(config: &RunConfig, is_next: bool) -> Result<RunLock> {
    let deadline = Instant::now() + 2 * config.parallel.communication.limits().silence;
    loop {
        match RunLock::take(&config.output_dir) {
            Err(_) if is_next && Instant::now() < deadline => thread::sleep(Duration::from_millis(500)),
            taken => return taken.map_err(in_output_dir),
        }
    }
}

/// Warns if the checkpoints of a run take more space than is free. The earlier checkpoints of a resumed run already have their space.
fn warn_of_disk(config: &RunConfig, trainer: &Trainer, start: &Start) {
    let steps = (*start == Start::New).then(|| trainer.max_steps());
    if let Some(text) = shortage(config, trainer.checkpoint_bytes(), steps) {
        tracing::warn!("{text}");
    }
}

/// Returns the store of the run's checkpoints, if a setting names one.
fn backup(config: &RunConfig) -> Result<Option<Backup>> {
    let CheckpointConfig { upload_to, save_total_limit, .. } = &config.checkpoint;
    if upload_to.is_empty() {
        return Ok(None);
    }
    let bucket = Bucket::from_env("checkpoint.upload_to", upload_to)?;
    let backup = Backup::new(bucket, &config.output_dir, *save_total_limit);
    Ok(Some(backup.with_best(config.evaluation.load_best_model_at_end)))
}

/// Finds what rank 0 finds for all ranks: the checkpoint in the store from which the run resumes, and the commits of names of the Hub.
fn find(config: &RunConfig, backup: Option<&Backup>, start: &Start) -> Result<Remote> {
    match (backup, start) {
        (Some(backup), Start::New) => backup.expect_empty()?,
        (Some(backup), Start::Resume | Start::Auto) => drop(backup.restore()?),
        _ => {}
    }
    let remote = match start {
        Start::New => Remote::default(),
        _ => Remote::of_run(&config.output_dir)?,
    };
    remote.look_up(config)?;
    Ok(remote)
}

/// Returns the facts about a run that trackers get.
fn facts(config: &RunConfig) -> Facts {
    let LoggingConfig { project, run_name, report_files, .. } = &config.logging;
    let folder = config.output_dir.canonicalize().unwrap_or_else(|_| config.output_dir.clone());
    let name = match run_name.as_str() {
        "" => folder.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        name => name.to_string(),
    };
    Facts { project: project.clone(), name, settings: public_settings(config), files: report_files.clone() }
}

/// Prints the end of a run: evaluations, the best checkpoint, and samples.
fn report(
    trainer: Trainer,
    config: &RunConfig,
    progress: &Progress,
    links: Option<ModelLinks>,
    last: Option<&StepReport>,
    prints_json: bool,
) -> Result<()> {
    let evals = trainer.eval_losses();
    if let (Some((_, first)), Some((_, end))) = (evals.first(), evals.last()) {
        let change = if end > first { "higher" } else { "lower" };
        progress.line(&format!(
            "validation loss {first:.4} at the start, {end:.4} at the end, {:.4} {change}",
            (end - first).abs()
        ));
    }
    if last.is_none() {
        progress.line("the run has made all of its steps before; set a larger `training.max_steps` or `num_train_epochs` to go on");
    }
    let best = trainer.best().map(|(best, path)| (best.clone(), path));
    if let Some((best, path)) = &best {
        let metric = &config.evaluation.metric_for_best_model;
        progress.line(&format!("best: {metric} {:.4} after step {}, {}", best.value, best.step, path.display()));
        if let Some(mut links) = links.filter(|_| config.evaluation.load_best_model_at_end) {
            links.lead_to(path);
        }
    }
    progress.line(&format!("plot: {}", trainer.output_dir().join("loss.svg").display()));
    let (output_dir, evals) = (trainer.output_dir().to_path_buf(), evals.to_vec());
    let samples = samples(trainer, config).map_err(|error| match error {
        Error::Cancelled(_) => {
            Error::Interrupted("stopped by a signal while samples were generated; the run is complete and saved".into())
        }
        other => other,
    })?;
    // With `generation.at_evaluations`, the last evaluation has logged its samples.
    if let (Some(last), false) = (last, samples.is_empty() || config.generation.at_evaluations) {
        write_samples(&output_dir, last.step, &config.generation.prompts, &samples)?;
    }
    if prints_json {
        print_json(&json!({
            "output_dir": output_dir,
            "step": last.map(|r| r.step),
            "loss": last.map(|r| r.result.loss),
            "eval_loss": evals.last().map(|(_, loss)| loss),
            "initial_eval_loss": evals.first().map(|(_, loss)| loss),
            "checkpoint": last.and_then(|r| r.saved.last()).map(|saved| &saved.path),
            "best_checkpoint": best.map(|(_, path)| path),
            "samples": samples,
        }));
    } else {
        for sample in samples {
            out!("{sample}");
        }
    }
    Ok(())
}

/// Writes the samples after `step` to `samples.jsonl`, which the page of runs shows.
fn write_samples(output_dir: &Path, step: u64, prompts: &[String], samples: &[String]) -> Result<()> {
    let line = |(prompt, sample): (&String, &String)| {
        let completion = sample.strip_prefix(prompt.as_str()).unwrap_or(sample);
        format!("{}\n", json!({"step": step, "prompt": prompt, "completion": completion}))
    };
    let text: String = prompts.iter().zip(samples).map(line).collect();
    replace_file(&RealFs, &output_dir.join("samples.jsonl"), text.as_bytes())
}

/// Returns the description of `--recipe`.
fn recipe_help() -> String {
    let names: Vec<_> = RecipeName::ALL.into_iter().map(RecipeName::as_str).collect();
    format!("The recipe: {}; the same as --set precision.recipe=…", names.join(", "))
}

/// Generates completions of the configured prompts, and returns each prompt with its completion.
fn samples(trainer: Trainer, config: &RunConfig) -> Result<Vec<String>> {
    let g = &config.generation;
    if g.prompts.is_empty() {
        return Ok(Vec::new());
    }
    let (model, tokenizer) = trainer.into_model()?;
    let requests = sample_requests(config, &tokenizer)?;
    let lengths = requests.iter().map(|each| each.request.prompt.len().saturating_add(g.max_new_tokens));
    let options = EngineOptions::for_lengths(&model, None, lengths, config.data.max_length, KvCacheDtype::Auto)?;
    let completions = complete_all(&mut Engine::new(model, &options)?, &tokenizer, requests, &mut |_| {})?;
    Ok(g.prompts.iter().zip(completions).map(|(prompt, completion)| prompt.clone() + &completion).collect())
}

/// Formats the number of trained parameters and, if some are frozen, the number of all parameters.
fn counts(model: &Description) -> String {
    match model.frozen {
        0 => model.parameters.to_string(),
        frozen => format!("{} of {}", model.parameters, model.parameters + frozen),
    }
}
