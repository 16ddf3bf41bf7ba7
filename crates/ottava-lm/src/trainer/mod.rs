//! The training loop with data, checkpoints, metrics and signals.

mod files;
mod inputs;
mod preference;
mod report;
mod start;

pub use report::StepReport;
pub use start::{RunLock, Start, build, log_exceptions};

use crate::checkpoint::{Contents, FolderTemplate, Progress, Saved, Saver, Verify, latest_complete, training};
use crate::config::RunConfig;
use crate::data::{
    Batch, BatchLoader, EvalLoader, LoaderState, Packing, RowShare, Split, TokenDataset, Tokenizer, Windows, loader,
};
use crate::error::{Error, Result};
use crate::evaluate::{Evaluation, evaluate};
use crate::fs::{Fs, RealFs, replace_file};
use crate::interrupt;
use crate::mode::StepPrecision;
use crate::models::{Decoder, DecoderConfig};
use crate::optim::{LossScale, Overflow, Schedule};
use crate::parallel::Ranks;
use crate::plan::ResolvedRun;
use crate::report::loss_svg;
use crate::run::Run;
use crate::step::{PreferenceSums, StepResult};
use files::RunFiles;
use inputs::{Inputs, build_run, last_model, max_steps};
use ottava_tensor::Device;
use ottava_tensor::comm::Group;
use preference::Preferences;
use report::{not_finite, peak_memory, warn_of_infinities};
use serde_json::{Map, Value, json};
use start::{Losses, Resumed, checkpoints, expect_shared_folder, find_shared_checkpoint, read_losses};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Steps in a row that may have no target.
const MOST_SKIPPED: usize = 1000;

/// The rows of a run.
enum Rows {
    Documents(BatchLoader),
    Preferences(Preferences),
}

impl Rows {
    fn state(&self) -> LoaderState {
        match self {
            Rows::Documents(batches) => batches.state(),
            Rows::Preferences(preferences) => preferences.state(),
        }
    }
}

/// A run in progress.
pub struct Trainer {
    // Dropped before the files, with whose lock it writes, and before the ranks, since freeing pinned memory waits for the GPU: while there
    // is a communicator, a process that waits for a lost rank is ended.
    saver: Saver,
    config: RunConfig,
    sizes: DecoderConfig,
    template: FolderTemplate,
    tokenizer: Tokenizer,
    /// Model, optimizer and step.
    pub run: Run,
    /// The precision of the last step.
    precision: StepPrecision,
    loss_scale: Option<LossScale>,
    schedule: Schedule,
    dataset: Arc<TokenDataset>,
    split: Split,
    rows: Rows,
    ranks: Rc<Ranks>,
    /// The files of the run, on the rank that writes them.
    files: Option<RunFiles>,
    step: u64,
    tokens: u64,
    /// Loss by step, for the plot.
    losses: Losses,
    eval_losses: Losses,
    /// Metrics of the last step that are not written yet, because a signal interrupted its evaluation.
    pending: Option<Map<String, Value>>,
    /// The plan, for the message when memory runs out.
    resolved: ResolvedRun,
}

impl Trainer {
    /// Prepares a run: data, model, optimizer and, on resume, their state.
    pub fn new(config: RunConfig, device: &Device, start: &Start) -> Result<Trainer> {
        Trainer::shared(config, device, start, Group::solo(), None)
    }

    /// [`Trainer::new`] of one of several ranks, which all call it with equal settings. Rank 0 writes the run's files, into the folder of
    /// `lock` if it has taken it before.
    ///
    /// If a rank cannot start, all ranks end: that rank with its error, the others with its message.
    pub fn shared(
        mut config: RunConfig,
        device: &Device,
        start: &Start,
        world: Group,
        lock: Option<RunLock>,
    ) -> Result<Trainer> {
        let shape = config.parallel.mesh(world.size())?;
        let ranks = Rc::new(Ranks::new(world, shape, device)?);
        interrupt::forward_to(ranks.stopper());
        let lock = match lock {
            None if ranks.leads() => RunLock::take(&config.output_dir).map(Some),
            taken => Ok(taken),
        };
        let lock = ranks.together("the run's folder", lock)?;
        expect_shared_folder(&config.output_dir, &ranks)?;
        let resumed = find_shared_checkpoint(&config, start, &ranks)?;
        let saved = resumed.as_ref().map(|resumed| RunConfig::saved(&resumed.path, &resumed.progress)).transpose()?;
        if let Some(kept) = saved.as_ref().and_then(|saved| config.keep_batch(saved, shape.data)) {
            tracing::warn!("{kept}");
        }
        let mut plan = || -> Result<ResolvedRun> {
            config.share(ranks.size())?;
            let sizes = config.decoder_config()?;
            config.expect_positions(&sizes)?;
            config.resolve_data()?;
            let resolved = ResolvedRun::new(&config, &sizes, device)?;
            resolved.expect_fit()?;
            Ok(resolved)
        };
        let planned = plan();
        let mut resolved = ranks.together("the plan", planned)?;
        let is_async = resolved.config.async_save;
        // All ranks save alike.
        let all = !ranks.any("a rank whose host has no memory for a snapshot", !is_async)?;
        resolved.config.async_save = all;
        let config = resolved.config.to_run_config();
        resolved.prepare_device();
        if let Some(choice) = &resolved.choice {
            tracing::info!("{choice}");
        }
        // The casts of a run with the same settings.
        let mut saved_casts = None;
        if let (Some(Resumed { progress, .. }), Some(saved)) = (&resumed, saved) {
            for (key, before, now) in config.check_resume(&saved)? {
                tracing::warn!("`{key}` was {before} when the checkpoint was saved, and is {now} from here on");
            }
            saved_casts = (saved.precision == config.precision).then(|| progress.scaling_slots.clone());
        }
        let trainer = Inputs::read(&config, resumed.as_ref(), &ranks)
            .and_then(|inputs| Trainer::assemble(&resolved, device, inputs, resumed, saved_casts, lock, ranks));
        trainer.map_err(|error| resolved.explain(error))
    }

    /// Builds model, optimizer and step, and opens the run's files.
    fn assemble(
        resolved: &ResolvedRun,
        device: &Device,
        inputs: Inputs,
        mut resumed: Option<Resumed>,
        saved_casts: Option<Vec<String>>,
        lock: Option<RunLock>,
        ranks: Rc<Ranks>,
    ) -> Result<Trainer> {
        let config = resolved.config.to_run_config();
        let folder = config.output_dir.clone();
        let Inputs { tokenizer, dataset, split, layout, template, sizes } = inputs;
        let mut loss_scale = config.precision.loss_scaling().map(LossScale::new);
        let state = resumed.as_ref().map_or(LoaderState::start(config.seed), |resumed| resumed.progress.loader);
        let (rank, world) = ranks.rows();
        let share = RowShare { rank, world };
        let mut rows = match config.preference.how() {
            None => Rows::Documents(BatchLoader::new(dataset.clone(), split, layout, state, share)?),
            Some(how) => Rows::Preferences(Preferences::new(&config, how, &dataset, &split, layout, state, share)?),
        };
        let max_steps = match &rows {
            Rows::Documents(_) => max_steps(&config, loader::train_rows(&dataset, &split, &layout, config.seed)),
            Rows::Preferences(preferences) => max_steps(&config, preferences.len() as f64),
        };
        if let Rows::Preferences(preferences) = &mut rows {
            preferences.plan_reference(max_steps, config.training.sequences());
        }
        let documents = layout.max_documents(&dataset, &split);
        if let (Rows::Preferences(preferences), Some(_)) = (&mut rows, &resumed) {
            preferences.read_reference()?;
            if preferences.needs_reference() {
                // The model that the run has started from, before the one that it resumes takes its memory.
                let start = build_run(&resolved.config, &sizes, device, None, documents, &ranks);
                let mut start = ranks.together("the model of the start", start)?;
                start.quantize_weights()?;
                preferences.compute_reference(&mut start, ranks.leads())?;
            }
        }
        let (mut step, mut tokens) = (0, 0);
        let mut restored = || -> Result<Run> {
            let mut run = build_run(&resolved.config, &sizes, device, resumed.as_ref(), documents, &ranks)?;
            if let Some(Resumed { path, progress }) = &resumed {
                training::restore(path, progress, &mut run.model, &mut *run.optimizer)?;
                (step, tokens) = (progress.step, progress.tokens);
                loss_scale = progress.loss_scale.clone().or(loss_scale.take());
            }
            Ok(run)
        };
        let restored = restored();
        let mut run = ranks.together("the model", restored)?;
        let parts = ranks.of_parts("digests of the weights that were loaded", &run.weights_digest)?;
        let digest = parts.into_iter().fold(0, u64::wrapping_add);
        ranks.expect_equal("the digest of the weights that were loaded", &format!("{digest:016x}"))?;
        if ranks.leads() {
            log_exceptions(&run.model, saved_casts.as_deref());
        }
        run.quantize_weights()?;
        if let Some(scale) = &loss_scale {
            run.step.set_loss_scale(scale.scale)?;
        }
        let mut saver = Saver::new(checkpoints(&folder), config.training.save_total_limit);
        if resolved.config.async_save {
            let Run { model, optimizer, step, .. } = &mut run;
            let [bytes, _] = Contents::new(model, &mut **optimizer, step.partition())?.0.snapshot_bytes();
            tracing::info!("host memory for snapshots of checkpoints: {:.2} GiB", bytes as f64 / f64::from(1 << 30));
            saver.write_behind(device, bytes)?;
        }
        // From here on, files of the run are changed.
        let casts = run.step.partition().casts(&mut run.model)?;
        let open = |lock: RunLock| RunFiles::open(&config, lock, resumed.as_mut(), &casts);
        let files = ranks.together("the run's files", lock.map(open).transpose())?;
        if let Rows::Preferences(preferences) = &mut rows
            && preferences.needs_reference()
        {
            preferences.compute_reference(&mut run, ranks.leads())?;
        }
        let (losses, eval_losses) = read_losses(&folder.join("metrics.jsonl"));
        Ok(Trainer {
            sizes,
            schedule: config.schedule(max_steps),
            template,
            tokenizer,
            run,
            precision: StepPrecision::Recipe,
            loss_scale,
            dataset,
            split,
            rows,
            ranks,
            saver,
            files,
            step,
            tokens,
            losses,
            eval_losses,
            pending: resumed.and_then(|resumed| resumed.progress.pending),
            config,
            resolved: resolved.clone(),
        })
    }

    /// Trains to the end, calling `report` after each step; if samples are to be generated, slices of weights are gathered then. When `stop`
    /// becomes true on any rank, all save after the step in progress and return [`Error::Interrupted`].
    pub fn run(&mut self, stop: &AtomicBool, report: &mut dyn FnMut(&StepReport)) -> Result<()> {
        let mut trained = self.train(stop, report);
        if trained.is_err() && self.ranks.size() == 1 {
            self.finish_save();
        }
        if trained.is_ok() && !self.config.generation.prompts.is_empty() && self.ranks.have_whole_model() {
            trained = self.run.step.partition().gather(&mut self.run.model);
        }
        // Ranks stop together.
        let finished = match trained {
            Ok(()) | Err(Error::Interrupted(_) | Error::Cancelled(_)) => self.ranks.finish(),
            Err(_) => Ok(()),
        };
        trained.and(finished).map_err(|error| match self.resolved.explain(error) {
            Error::Memory(text) => Error::Memory(format!("{text}\n{}", self.describe_latest_checkpoint())),
            other => other,
        })
    }

    /// Completes the save in progress of a run that has failed, together with all ranks.
    fn finish_save(&mut self) {
        match self.saver.finish(&self.ranks) {
            Ok(saved) => saved.iter().for_each(|saved| tracing::info!("saved {}", saved.path.display())),
            Err(error) => tracing::warn!("the checkpoint in progress was not saved: {error}"),
        }
    }

    fn train(&mut self, stop: &AtomicBool, report: &mut dyn FnMut(&StepReport)) -> Result<()> {
        let max_steps = self.schedule.max_steps;
        if self.step == 0 {
            let evaluation = self.evaluate()?;
            if let (Some(evaluation), Some(files)) = (evaluation, &mut self.files) {
                files.metrics.append(0, &[("eval_loss", json!(evaluation.loss))])?;
                files.events.scalars(0, &[("eval/loss", evaluation.loss)])?;
                self.eval_losses.push((0, evaluation.loss));
            }
        }
        if let Some(values) = self.pending.clone() {
            let evaluation = self.evaluate()?;
            self.record(self.step, values, evaluation)?;
            self.pending = None;
        }
        while self.step < max_steps {
            let mut done = match self.train_step() {
                // All ranks have come to it.
                Err(error @ Error::NonFinite(_)) => {
                    self.finish_save();
                    return Err(error);
                }
                done => done?,
            };
            let step = self.step;
            let due = |every: u64| (every > 0 && step.is_multiple_of(every)) || step == max_steps;
            let values = self.values(&done);
            match if due(self.config.training.eval_steps) { self.evaluate() } else { Ok(None) } {
                // The resumed run evaluates first, so its metrics equal those of an uninterrupted run.
                Err(Error::Cancelled(_)) => self.pending = Some(values),
                evaluation => {
                    done.evaluation = evaluation?;
                    self.record(step, values, done.evaluation)?;
                }
            }
            let told = [f64::from(stop.load(Ordering::Relaxed)), self.saver.state()];
            let told = self.ranks.gather("request to stop and state of a save", told)?;
            let stopping = told.iter().any(|[stop, _]| *stop != 0.0);
            done.saved.extend(self.saver.advance(&self.ranks, told.iter().map(|[_, state]| *state))?);
            let saving = due(self.config.training.save_steps) || stopping;
            // A resumed run counts from its checkpoint, so a line ends there.
            if due(self.config.training.cast_statistics_steps) || saving {
                self.log_casts(step)?;
            }
            if saving {
                done.saved.extend(self.save()?);
                if stopping || step == max_steps || !self.saver.is_async() {
                    done.saved.extend(self.saver.finish(&self.ranks)?);
                }
            }
            report(&done);
            if stopping && (self.step < max_steps || self.pending.is_some()) {
                let saved = done.saved.last();
                let from =
                    saved.map_or(String::new(), |saved| format!("; `--resume` goes on from {}", saved.path.display()));
                return Err(Error::Interrupted(format!("stopped by a signal after step {}{from}", self.step)));
            }
        }
        Ok(())
    }

    /// The checkpoint from which a failed run can resume, as a sentence.
    fn describe_latest_checkpoint(&self) -> String {
        match latest_complete(&checkpoints(&self.config.output_dir), Verify::Sizes).map(|latest| latest.complete) {
            // Other settings must not change within a run.
            Ok(Some((path, _))) => {
                format!("`--resume` goes on from {}, also with other `recompute` and `weight_codes`.", path.display())
            }
            _ => "No checkpoint was saved before.".into(),
        }
    }

    fn train_step(&mut self) -> Result<StepReport> {
        let begin = Instant::now();
        let step = self.step + 1;
        let learning_rate = self.schedule.at(step);
        self.choose_precision(step);
        let StepResult { loss, tokens, grad_norm, reduce_error, preference } = self.next_step(step, learning_rate)?;
        let finite = loss.is_finite() && grad_norm.is_finite();
        if !self.follow_loss_scale(step, finite)? {
            // Infinities in casts of this step may explain the error.
            self.log_casts(step)?;
            let bad = self.run.step.first_bad_gradient(&mut self.run.model, self.precision)?;
            return Err(not_finite(step, loss, self.ranks.first_named("the gradient that is not finite", bad)?));
        }
        if self.config.parallel.check_replicas > 0 && step.is_multiple_of(self.config.parallel.check_replicas) {
            let Run { model, optimizer, step: work, .. } = &mut self.run;
            let compared = work.partition().compare_replicas(model, &mut **optimizer, &format!("after step {step}"));
            // Ranks with other layers end too.
            self.ranks.together("the comparison of replicas", compared)?;
        }
        let casts = self.run.model.scaling().losses(self.run.step.partition())?;
        warn_of_infinities(step, &casts.non_finite);
        self.step = step;
        self.tokens += tokens;
        Ok(StepReport {
            step,
            max_steps: self.schedule.max_steps,
            loss,
            grad_norm,
            reduce_error,
            learning_rate,
            tokens_per_second: tokens as f64 / begin.elapsed().as_secs_f64(),
            peak_memory_bytes: peak_memory(self.run.model.device()),
            loss_scale: self.loss_scale.clone(),
            casts: (!self.run.model.scaling().is_empty()).then_some(casts),
            evaluation: None,
            preference,
            saved: Vec::new(),
        })
    }

    /// Runs a step on the next rows; rows without a target are skipped, with a warning.
    fn next_step(&mut self, step: u64, learning_rate: f64) -> Result<StepResult> {
        let t = &self.config.training;
        let (micro_batches, rows) = (t.gradient_accumulation_steps, t.per_device_train_batch_size);
        let mut skipped = 0;
        loop {
            match &mut self.rows {
                Rows::Documents(batches) => {
                    for micro_batch in 0..micro_batches {
                        self.run.step.load(micro_batch, &batches.next_batch(rows)?)?;
                    }
                }
                Rows::Preferences(preferences) => preferences.load(&mut self.run, micro_batches, self.precision)?,
            }
            match self.run.step(learning_rate, self.precision) {
                Err(Error::NoTargets(text)) if skipped < MOST_SKIPPED => {
                    skipped += 1;
                    tracing::warn!("step {step}: {text}; these sequences are skipped, and the next ones are taken");
                }
                done => return done,
            }
        }
    }

    /// Updates the loss scale after a step. False if gradients were not finite and the scale is at its minimum.
    fn follow_loss_scale(&mut self, step: u64, finite: bool) -> Result<bool> {
        let (Some(scale), Some(how)) = (&mut self.loss_scale, self.config.precision.loss_scaling()) else {
            return Ok(finite);
        };
        let outcome = scale.update(finite, how);
        if outcome == Overflow::Skipped {
            self.run.optimizer.skip_step();
            tracing::warn!(
                "step {step}: gradients are not finite and no weight was changed; the loss scale is {} from here on",
                scale.scale
            );
        }
        self.run.step.set_loss_scale(scale.scale)?;
        Ok(outcome != Overflow::AtMinimum)
    }

    /// Enters or leaves the steps that compute in high precision.
    fn choose_precision(&mut self, step: u64) {
        let precision = self.config.precision.precision_of(step);
        if precision != std::mem::replace(&mut self.precision, precision) {
            let (name, and) = match precision {
                StepPrecision::High => ("bfloat16", "casts still measure"),
                StepPrecision::Recipe => (self.config.precision.recipe.as_str(), "scales are up to date"),
            };
            tracing::info!("from step {step} on, products are computed in {name}; {and}");
        }
    }

    fn log_casts(&mut self, step: u64) -> Result<()> {
        if self.config.training.cast_statistics_steps == 0 {
            return Ok(());
        }
        let measured = self.run.step.partition().casts(&mut self.run.model)?;
        match self.files.as_mut().and_then(|files| files.casts.as_mut()) {
            Some(casts) => casts.append(step, &measured),
            None => Ok(()),
        }
    }

    /// Validation loss in the precision of the last step, which ranks compute together; `None` without validation documents.
    fn evaluate(&mut self) -> Result<Option<Evaluation>> {
        if let Rows::Preferences(preferences) = &self.rows {
            return preferences.evaluate(&mut self.run, self.config.precision.precision_of(self.step));
        }
        let Run { model, step, .. } = &mut self.run;
        if self.split.validation_len() == 0 {
            return Ok(None);
        }
        let rows = self.config.training.per_device_train_batch_size;
        let (dataset, layout) = (self.dataset.clone(), self.config.layout());
        let bytes = loader::validation_bytes(&self.dataset, &self.split);
        let precision = self.config.precision.precision_of(self.step);
        let batches: Box<dyn Iterator<Item = Result<Batch>>> = match layout.packing {
            Packing::Wrapped | Packing::Auto => {
                Box::new(EvalLoader::new(dataset, self.split, Windows::blocks(layout.seq_len), rows))
            }
            Packing::Bfd | Packing::None => Box::new(loader::whole_validation(dataset, self.split, layout, rows)),
        };
        evaluate(model, batches, bytes, precision, step.partition(), &mut |_| {}).map(Some)
    }

    /// The metrics of a step, without evaluation.
    fn values(&self, done: &StepReport) -> Map<String, Value> {
        let mut values = json!({
            "loss": done.loss,
            "learning_rate": done.learning_rate,
            "grad_norm": done.grad_norm,
            "tokens": self.tokens,
            "tokens_per_second": done.tokens_per_second,
            "peak_memory_bytes": done.peak_memory_bytes,
        });
        for (name, value) in done.preference.iter().flat_map(PreferenceSums::metrics) {
            values[name] = json!(value);
        }
        if let Some(error) = done.reduce_error {
            values["reduce_error"] = json!(error);
        }
        if let Some(LossScale { scale, skipped_steps, .. }) = &done.loss_scale {
            values["loss_scale"] = json!(scale);
            values["skipped_steps"] = json!(skipped_steps);
        }
        if let Some(casts) = &done.casts {
            values["fp8_saturated"] = json!(casts.saturated);
            values["fp8_underflowed"] = json!(casts.underflowed);
            values["fp8_non_finite"] = json!(casts.non_finite.len());
        }
        match values {
            Value::Object(values) => values,
            _ => unreachable!("an object was made above"),
        }
    }

    fn record(&mut self, step: u64, mut values: Map<String, Value>, evaluation: Option<Evaluation>) -> Result<()> {
        let Some(files) = &mut self.files else { return Ok(()) };
        files.lock.check()?;
        let mut scalars = Vec::new();
        for (tag, key) in
            [("train/loss", "loss"), ("train/learning_rate", "learning_rate"), ("train/grad_norm", "grad_norm")]
        {
            scalars.extend(values[key].as_f64().map(|value| (tag, value)));
        }
        let of_preferences = |name: &str| name.starts_with("rewards/") || name.starts_with("logps/");
        let named = values.iter().filter(|(name, _)| of_preferences(name));
        let mut named: Vec<_> =
            named.filter_map(|(name, value)| Some((format!("train/{name}"), value.as_f64()?))).collect();
        self.losses.extend(values["loss"].as_f64().map(|loss| (step, loss)));
        if let Some(evaluation) = evaluation {
            values.insert("eval_loss".into(), json!(evaluation.loss));
            match evaluation.preference {
                None => drop(values.insert("eval_bits_per_byte".into(), json!(evaluation.bits_per_byte))),
                Some(sums) => {
                    for (name, value) in sums.metrics() {
                        values.insert(format!("eval_{name}"), json!(value));
                        named.push((format!("eval/{name}"), value));
                    }
                }
            }
            scalars.push(("eval/loss", evaluation.loss));
            self.eval_losses.push((step, evaluation.loss));
        }
        scalars.extend(named.iter().map(|(tag, value)| (tag.as_str(), *value)));
        let values: Vec<(&str, Value)> = values.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        files.metrics.append(step, &values)?;
        files.events.scalars(step, &scalars)
    }

    /// Begins to save a checkpoint of the current step; each rank writes its part. The leading rank flushes metrics and draws the
    /// plot first. Returns the checkpoint before, if it was not complete yet.
    fn save(&mut self) -> Result<Option<Saved>> {
        let progress = Progress {
            step: self.step,
            tokens: self.tokens,
            loader: self.rows.state(),
            data: self.dataset.meta().key.clone(),
            config: self.config.to_toml(),
            scaling_slots: self.run.step.partition().cast_names(&self.run.model),
            loss_scale: self.loss_scale.clone(),
            pending: self.pending.clone(),
        };
        let (files, folder) = (&mut self.files, &self.config.output_dir);
        let prepare = || {
            let files = files.as_mut().expect("the leading rank writes files");
            files.sync()?;
            let title = format!("{} ({})", folder.display(), self.config.precision.recipe.as_str());
            let plot = loss_svg(&title, &self.losses, &self.eval_losses);
            replace_file(&RealFs, &folder.join("loss.svg"), plot.as_bytes())?;
            files.saved(folder)
        };
        let Run { model, optimizer, step, .. } = &mut self.run;
        self.saver.begin(&progress, &self.template, model, &mut **optimizer, step.partition(), prepare)
    }

    /// Writes checkpoints through `fs`, to make operations slow or fail.
    pub fn set_fs(&mut self, fs: &'static dyn Fs) {
        self.saver.set_fs(fs);
    }

    /// Tokens per optimizer step, of all ranks.
    pub fn tokens_per_step(&self) -> u64 {
        self.config.tokens_per_step()
    }

    /// The model and its tokenizer, after the run. What else is in memory is freed. If ranks have different parts of it, the model
    /// is loaded from the last checkpoint.
    pub fn into_model(self) -> Result<(Decoder, Tokenizer)> {
        let Trainer { saver, run, tokenizer, config, sizes, ranks, .. } = self;
        drop(saver);
        if ranks.have_whole_model() {
            return Ok((run.model, tokenizer));
        }
        let device = run.model.device().clone();
        drop(run);
        Ok((last_model(&config, &sizes, &device)?, tokenizer))
    }

    /// Whether this rank writes the run's files and reports its progress.
    pub fn leads(&self) -> bool {
        self.ranks.leads()
    }

    /// The run's folder.
    pub fn output_dir(&self) -> &Path {
        &self.config.output_dir
    }

    /// Validation losses so far, by step.
    pub fn eval_losses(&self) -> &[(u64, f64)] {
        &self.eval_losses
    }
}
