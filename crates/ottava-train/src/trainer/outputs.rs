//! The files that a run leaves in its folder.

use super::environment::Environment;
use super::files::RunFiles;
use super::gpu_meter::GpuMeter;
use super::memory::MemorySnapshots;
use super::stragglers::Stragglers;
use crate::objective::Validation;
use crate::report::{MAX_METRICS_BYTES, RunEnd, RunOutcome, RunRecord, loss_svg};
use crate::run::Run;
use ottava_checkpoint::{Best, Progress, Saved, Saver};
use ottava_common::error::{Error, Result};
use ottava_common::fs::{RealFs, replace_file};
use ottava_common::input;
use ottava_parallel::Ranks;
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use serde_json::{Map, Value};
use std::path::Path;
use std::time::Instant;

/// The checkpoints, logs, plot and `run.json` of a run.
pub(super) struct Outputs {
    // The saver writes under the lock that `files` holds, so it is declared first and dropped first.
    pub(super) saver: Saver,
    /// The snapshots in the memory of hosts, if a keeper stores them.
    pub(super) memory: Option<MemorySnapshots>,
    /// The files of the run, on the leading rank.
    pub(super) files: Option<RunFiles>,
    pub(super) history: History,
    pub(super) record: RunRecord,
    /// The power and the load of the GPU.
    pub(super) gpu_meter: GpuMeter,
    /// The ranks that are slower than the others.
    pub(super) stragglers: Stragglers,
    /// The time of the last save, or of the start of the run.
    pub(super) saved_at: Instant,
}

/// The losses of a run, each with its step, for the plot.
pub(super) struct History {
    losses: Vec<(u64, f64)>,
    pub(super) eval_losses: Vec<(u64, f64)>,
}

impl History {
    /// Reads the history from the metrics of the run in `folder`. Returns an empty history if there is no file.
    pub(super) fn read(folder: &Path) -> History {
        let text = input::read_text(&folder.join("metrics.jsonl"), MAX_METRICS_BYTES).unwrap_or_default();
        let lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let series =
            |key: &str| lines.iter().filter_map(|line| Some((line["step"].as_u64()?, line[key].as_f64()?))).collect();
        History { losses: series("loss"), eval_losses: series("eval_loss") }
    }
}

impl Outputs {
    /// Appends the `values` of a step and of its `evaluation` to the metrics.
    pub(super) fn append(
        &mut self,
        step: u64,
        mut values: Map<String, Value>,
        evaluation: Option<&Validation>,
    ) -> Result<()> {
        let Some(files) = &mut self.files else { return Ok(()) };
        files.lock.check()?;
        let number = |key: &str| values.get(key).and_then(Value::as_f64);
        self.history.losses.extend(number("loss").map(|loss| (step, loss)));
        let tagged = |group: &str, (name, value): (&String, &Value)| Some((format!("{group}/{name}"), value.as_f64()?));
        let mut scalars: Vec<_> = values.iter().filter_map(|entry| tagged("train", entry)).collect();
        if let Some(evaluation) = evaluation {
            let metrics = evaluation.metrics();
            let named = metrics.iter().map(|(name, value)| (name.trim_start_matches("eval_").to_string(), value));
            scalars.extend(named.filter_map(|(name, value)| tagged("eval", (&name, value))));
            values.extend(metrics);
            self.history.eval_losses.extend(evaluation.all.iter().map(|all| (step, all.loss)));
        }
        let scalars: Vec<_> = scalars.iter().map(|(tag, value)| (tag.as_str(), *value)).collect();
        let values: Vec<(&str, Value)> = values.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        files.metrics.append(step, &values)?;
        files.events.scalars(step, &scalars)
    }

    /// Protects the checkpoint of the `best` evaluation from deletion, if the run of `config` ends with the best model.
    pub(super) fn keep_best(&mut self, best: Option<&Best>, config: &RunConfig) {
        let best = best.filter(|_| config.evaluation.load_best_model_at_end);
        self.saver.keep_best(best.map(|best| best.step));
    }

    /// Begins to save a checkpoint of `run` at `progress`. Each rank writes its part. Before, the leading rank flushes the metrics and draws the
    /// plot. Returns the preceding checkpoint if it was not complete yet.
    pub(super) fn save(
        &mut self,
        environment: &Environment,
        progress: &Progress,
        run: &mut Run,
    ) -> Result<Option<Saved>> {
        let Environment { config, inputs, .. } = environment;
        let (files, history, folder) = (&mut self.files, &self.history, &config.output_dir);
        let prepare = || {
            let files = files.as_mut().expect("the leading rank writes files");
            files.sync()?;
            let title = format!("{} ({})", folder.display(), config.precision.recipe.as_str());
            let plot = loss_svg(&title, &history.losses, &history.eval_losses);
            replace_file(&RealFs, &folder.join("loss.svg"), plot.as_bytes())?;
            files.saved(folder)
        };
        self.saved_at = Instant::now();
        let Run { model, optimizer, step, .. } = run;
        self.saver.begin(progress, &inputs.template, model, &mut **optimizer, step.partition(), prepare)
    }

    /// Completes the save in progress after a failure of the run. All ranks call it.
    pub(super) fn finish_save(&mut self, ranks: &Ranks) {
        match self.saver.finish(ranks) {
            Ok(saved) => saved.iter().for_each(|saved| tracing::info!("saved {}", saved.path.display())),
            Err(error) => tracing::warn!("the checkpoint in progress was not saved: {error}"),
        }
    }

    /// Records in `run.json` in `folder` that the run has ended after `step`, with `error` if it did not finish.
    pub(super) fn record_end(&mut self, folder: &Path, step: u64, error: Option<&Error>) {
        let outcome = match error {
            None => RunOutcome::Finished,
            Some(error) if error.is_stop() => RunOutcome::Stopped,
            Some(_) => RunOutcome::Failed,
        };
        let message = error.map_or(String::new(), Error::to_string);
        self.record.end = Some(RunEnd { time: RunRecord::now(), step, outcome, message });
        // If another run has taken the folder, nothing is written. An error while writing does not change the result of the run.
        let Some(files) = &self.files else { return };
        if let Err(error) = files.lock.check().and_then(|()| self.record.write(folder)) {
            tracing::warn!("the end of the run is not recorded: {error}");
        }
    }
}

/// Returns the record, for `run.json`, of a run of `max_steps` that starts or resumes now.
pub(super) fn run_record(environment: &Environment, run: &Run, max_steps: u64) -> RunRecord {
    let Environment { config, resolved, ranks, device, .. } = environment;
    let model = run.model.description();
    let (device, peak, planned) = match device {
        Device::Cuda(gpu) => {
            (gpu.model().name.clone(), gpu.model().peak_bf16_flops(), Some(resolved.memory.peak_bytes))
        }
        Device::Cpu | Device::DryCpu(_) => ("CPU".to_string(), None, None),
    };
    RunRecord {
        started: RunRecord::now(),
        device,
        ranks: ranks.size(),
        mesh: ranks.shape().to_string(),
        recipe: config.precision.recipe.as_str().to_string(),
        parameters: model.parameters,
        max_steps,
        tokens_per_step: config.tokens_per_step(),
        flops_per_token: model.flops_per_token(config.data.max_length),
        peak_flops: peak.map(|flops| flops * ranks.size() as f64),
        planned_memory_bytes: planned,
        end: None,
    }
}
