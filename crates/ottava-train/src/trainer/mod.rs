//! The training loop with data, checkpoints, metrics and signals.

mod alarms;
mod current_run;
mod files;
mod inputs;
mod record;
mod report;
mod rollback;
mod rollback_log;
mod sentinel;
mod start;
mod watch;

pub use current_run::CurrentRun;
pub use report::StepReport;
pub use start::{RunLock, Start, build, log_exceptions};

use crate::objective::{Rows, Validation};
use crate::plan::ResolvedRun;
use crate::report::{RunRecord, loss_svg};
use crate::run::Run;
use crate::step::StepResult;
use alarms::Alarms;
use files::RunFiles;
use inputs::{Inputs, model_of, open_rows, restored_run};
use ottava_checkpoint::{Best, Contents, FolderTemplate, Progress, Saved, Saver, Verify, atomic, latest_complete};
use ottava_common::error::{Error, Result};
use ottava_common::fs::{Fs, RealFs, replace_file};
use ottava_common::interrupt;
use ottava_data::{DataState, Tokenizer, TrainingData};
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::Ranks;
use ottava_parallel::optim::{LossScale, Overflow, Schedule};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::scaling::RouterMetrics;
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use ottava_tensor::comm::Group;
use report::{not_finite, peak_memory, warn_of_infinities};
use sentinel::Sentinel;
use serde_json::Map;
use start::{Losses, Resumed, checkpoints, choose_division, expect_shared_folder, find_shared_checkpoint, read_losses};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Steps in a row that may have no target.
const MOST_SKIPPED: usize = 1000;

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
    pub run: CurrentRun,
    /// The precision of the last step.
    precision: StepPrecision,
    schedule: Schedule,
    data: TrainingData,
    rows: Box<dyn Rows>,
    ranks: Rc<Ranks>,
    /// The files of the run, on the rank that writes them.
    files: Option<RunFiles>,
    /// All that decides about later steps, as the next checkpoint has it; but `loader` and `alarms`, which `rows` and `alarms` hold between saves.
    progress: Progress,
    /// Loss by step, for the plot.
    losses: Losses,
    eval_losses: Losses,
    sentinel: Sentinel,
    alarms: Alarms,
    /// What `run.json` says of the run.
    record: RunRecord,
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
        choose_division(&mut config, device, &world)?;
        let shape = config.parallel.mesh(world.size())?;
        let ranks = Rc::new(Ranks::new(world, shape, device)?.sending(config.parallel.communication.activation_dtype));
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
            config.resolve_data()?;
            let sizes = config.decoder_config()?;
            config.expect_positions(&sizes)?;
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
        let mut progress = match &resumed {
            Some(Resumed { progress, .. }) => progress.clone(),
            None => Progress::start(DataState::start(&inputs.data.sets, config.seed)),
        };
        progress.data = inputs.data.key();
        progress.config = config.to_toml();
        progress.loss_scale = progress.loss_scale.or(config.precision.loss_scaling().map(LossScale::new));
        if let Some(Resumed { progress: saved, .. }) = &resumed {
            progress.sentinel.rollbacks = rollback_log::history(&folder, saved)?;
            // A rollback after the checkpoint was saved: the run goes on with the rows after the rows that it has read.
            if let Some(rollback) = progress.sentinel.rollbacks.last().filter(|_| progress.sentinel != saved.sentinel) {
                progress.loader = rollback.data.clone();
            }
        }
        let (mut rows, max_steps) = open_rows(&resolved.config, &inputs, &progress, resumed.as_ref(), device, &ranks)?;
        let Inputs { tokenizer, data, template, sizes } = inputs;
        let documents = data.max_documents();
        let restored = restored_run(&resolved.config, &sizes, device, resumed.as_ref(), documents, &ranks);
        let mut run = ranks.together("the model", restored)?;
        let parts = ranks.of_parts("digests of the weights that were loaded", &run.weights_digest)?;
        let digest = parts.into_iter().fold(0, u64::wrapping_add);
        ranks.expect_equal("the digest of the weights that were loaded", &format!("{digest:016x}"))?;
        if ranks.leads() {
            log_exceptions(&run.model, saved_casts.as_deref());
        }
        run.quantize_weights()?;
        if let Some(scale) = &progress.loss_scale {
            run.step.set_loss_scale(scale.scale)?;
        }
        let mut saver = Saver::new(checkpoints(&folder), config.checkpoint.save_total_limit);
        saver.keep_best(
            progress.best.as_ref().filter(|_| config.evaluation.load_best_model_at_end).map(|best| best.step),
        );
        if resolved.config.async_save {
            let Run { model, optimizer, step, .. } = &mut run;
            let [bytes, _] = Contents::new(model, &mut **optimizer, step.partition())?.0.snapshot_bytes();
            tracing::info!("host memory for snapshots of checkpoints: {:.2} GiB", bytes as f64 / f64::from(1 << 30));
            saver.write_behind(device, bytes)?;
        }
        // From here on, files of the run are changed.
        let casts = run.step.partition().casts(&mut run.model)?;
        let record = Trainer::run_record(&config, resolved, &run, &ranks, max_steps);
        let open = |lock: RunLock| {
            rollback_log::keep_rollbacks(&folder, &progress.sentinel.rollbacks)?;
            let files = RunFiles::open(&config, lock, resumed.as_mut(), !casts.is_empty())?;
            record.write(&folder)?;
            Ok(files)
        };
        let files = ranks.together("the run's files", lock.map(open).transpose())?;
        if rows.needs_reference() {
            rows.compute_reference(&mut run.model, &run.step)?;
        }
        progress.scaling_slots = run.step.partition().cast_names(&run.model);
        let [losses, eval_losses] = read_losses(&folder.join("metrics.jsonl"));
        let alarms = Alarms::new(&config, &progress.alarms, &casts);
        Ok(Trainer {
            sizes,
            schedule: config.schedule(max_steps),
            template,
            tokenizer,
            run: CurrentRun::new(run),
            precision: StepPrecision::Recipe,
            data,
            rows,
            ranks,
            saver,
            files,
            progress,
            losses,
            eval_losses,
            alarms,
            record,
            sentinel: Sentinel::default(),
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
            let Run { model, step, .. } = &mut *self.run;
            trained = step.partition().gather(model);
        }
        // Ranks stop together.
        let finished = match &trained {
            Err(error) if !error.is_stop() => Ok(()),
            _ => self.ranks.finish(),
        };
        let outcome = trained.and(finished).map_err(|error| match self.resolved.explain(error) {
            Error::Memory(text) => Error::Memory(format!("{text}\n{}", self.describe_latest_checkpoint())),
            other => other,
        });
        self.record_end(outcome.as_ref().err());
        outcome
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
        if self.progress.step == 0 {
            let evaluation = self.evaluate()?;
            if let Some(evaluation) = &evaluation {
                self.record(0, Map::new(), Some(evaluation))?;
                if self.config.evaluation.compares() {
                    // A name that does not exist ends the run before its first step.
                    evaluation.metric(&self.config.evaluation.metric_for_best_model)?;
                }
            }
        }
        if let Some(values) = self.progress.pending.clone() {
            let evaluation = self.evaluate()?;
            self.record(self.progress.step, values, evaluation.as_ref())?;
            self.compare(evaluation.as_ref())?;
            self.progress.pending = None;
        }
        while self.progress.step < max_steps && !self.stops_early() {
            let mut done = match self.train_step() {
                // All ranks have come to it.
                Err(error @ Error::NonFinite(_)) => {
                    self.finish_save();
                    return Err(error);
                }
                done => done?,
            };
            if self.roll_back()? {
                continue;
            }
            let step = self.progress.step;
            let is_last = step == max_steps;
            let values = self.values(&done);
            let mut is_best = false;
            match if is_last || self.config.evaluation.eval_steps.is_due(step) { self.evaluate() } else { Ok(None) } {
                // The resumed run evaluates first, so its metrics equal the metrics of an uninterrupted run.
                Err(Error::Cancelled(_)) => self.progress.pending = Some(values),
                evaluation => {
                    done.evaluation = evaluation?;
                    self.record(step, values, done.evaluation.as_ref())?;
                    is_best = self.compare(done.evaluation.as_ref())? && self.config.evaluation.load_best_model_at_end;
                }
            }
            let ends = is_last || self.stops_early();
            if ends || self.config.logging.logs_casts(step) {
                self.log_casts(step)?;
                if self.roll_back()? {
                    continue;
                }
            }
            if let Some(found) = self.sentinel.stop.take() {
                self.finish_save();
                return Err(Error::Alarm(format!(
                    "stopped by an alarm after step {step}: {found}. {}",
                    self.describe_latest_checkpoint()
                )));
            }
            if step < max_steps && ends && self.ranks.leads() {
                let e = &self.config.evaluation;
                tracing::info!(
                    "the run ends after step {step}: `{}` did not improve in {} evaluations in a row",
                    e.metric_for_best_model,
                    e.early_stopping_patience
                );
            }
            let told = [f64::from(stop.load(Ordering::Relaxed)), self.saver.state()];
            let told = self.ranks.gather("request to stop and state of a save", told)?;
            let paused = self.sentinel.pause.take();
            let stopping = paused.is_some() || told.iter().any(|[stop, _]| *stop != 0.0);
            done.saved.extend(self.saver.advance(&self.ranks, told.iter().map(|[_, state]| *state))?);
            let is_due = self.config.checkpoint.save_steps.is_due(step);
            let is_regular = is_due || paused.is_some() || is_best || ends;
            if is_regular || stopping {
                self.progress.is_interruption = !is_regular;
                done.saved.extend(self.save()?);
                if stopping || ends || !self.saver.is_async() {
                    done.saved.extend(self.saver.finish(&self.ranks)?);
                }
            }
            report(&done);
            if paused.is_some() || stopping && (!ends || self.progress.pending.is_some()) {
                let saved = done.saved.last();
                let from =
                    saved.map_or(String::new(), |saved| format!("; `--resume` goes on from {}", saved.path.display()));
                return Err(match paused {
                    Some(found) => Error::Paused(format!(
                        "paused by the sentinel after step {}: {found}{from}",
                        self.progress.step
                    )),
                    None => Error::Interrupted(format!("stopped by a signal after step {}{from}", self.progress.step)),
                });
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
        let step = self.progress.step + 1;
        let learning_rate = self.schedule.at(step);
        self.limit_norm();
        let StepResult { loss, tokens, grad_norm, is_skipped, reduce_error, sums } =
            self.next_step(step, learning_rate)?;
        let finite = loss.is_finite() && grad_norm.is_finite();
        let goes_on = self.follow_loss_scale(step, finite)?;
        match (goes_on, is_skipped) {
            (true, true) => self.skip_step()?,
            (true, false) => self.progress.sentinel.skipped_in_a_row = 0,
            (false, _) => {}
        }
        if !goes_on && !self.skips_non_finite(step)? {
            // Infinities in casts of this step may explain the error.
            self.log_casts(step)?;
            let Run { model, step: work, .. } = &mut *self.run;
            let bad = work.first_bad_gradient(model, self.precision)?;
            return Err(not_finite(step, loss, self.ranks.first_named("the gradient that is not finite", bad)?));
        }
        if self.config.parallel.check_replicas > 0 && step.is_multiple_of(self.config.parallel.check_replicas) {
            let Run { model, optimizer, step: work, .. } = &mut *self.run;
            let compared = work.partition().compare_replicas(model, &mut **optimizer, &format!("after step {step}"));
            // Ranks with other layers end too.
            self.ranks.together("the comparison of replicas", compared)?;
        }
        let Run { model, step: work, .. } = &mut *self.run;
        let casts = model.scaling().losses(work.partition())?;
        warn_of_infinities(step, &casts.non_finite);
        let loads = match model.config().experts() {
            Some(_) => work.partition().router_loads(model)?,
            None => Vec::new(),
        };
        let routers = RouterMetrics::of(&loads);
        if self.config.router.bias_update_rate > 0.0 && finite && !is_skipped {
            model.balance_routers(&loads, self.config.router.bias_update_rate)?;
        }
        self.progress.step = step;
        self.progress.tokens += tokens;
        self.look_for_spikes(step, loss, grad_norm, is_skipped)?;
        self.look_at_routers(step, &loads)?;
        let tokens_per_second = tokens as f64 / begin.elapsed().as_secs_f64();
        Ok(StepReport {
            step,
            max_steps: self.schedule.max_steps,
            loss,
            grad_norm,
            reduce_error,
            learning_rate,
            tokens_per_second,
            mfu: self.record.utilization(tokens_per_second),
            peak_memory_bytes: peak_memory(self.run.model.device()),
            loss_scale: self.progress.loss_scale.clone(),
            casts: (!self.run.model.scaling().is_empty()).then_some(casts),
            routers,
            evaluation: None,
            metrics: self.run.step.metrics(&sums),
            saved: Vec::new(),
        })
    }

    /// Runs a step on the next rows; rows without a target are skipped, with a warning.
    fn next_step(&mut self, step: u64, learning_rate: f64) -> Result<StepResult> {
        let mut skipped = 0;
        loop {
            self.follow_decisions(step)?;
            let Run { model, step: work, .. } = &mut *self.run;
            let first = self.rows.load(model, work, self.precision)?;
            if let Some(first) = first.filter(|_| skipped == 0) {
                self.watch(step, &first)?;
                self.debug(step, &first)?;
                self.repeat(step, &first)?;
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
        let (Some(scale), Some(how)) = (&mut self.progress.loss_scale, self.config.precision.loss_scaling()) else {
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
        let precision = self.precision_of(step);
        if precision != std::mem::replace(&mut self.precision, precision) {
            let (name, and) = match precision {
                StepPrecision::High => ("bfloat16", "casts still measure"),
                StepPrecision::Recipe => (self.config.precision.recipe.as_str(), "scales are up to date"),
            };
            tracing::info!("from step {step} on, products are computed in {name}; {and}");
        }
    }

    fn log_casts(&mut self, step: u64) -> Result<()> {
        if self.config.logging.cast_statistics_steps == 0 {
            return Ok(());
        }
        let Run { model, step: work, .. } = &mut *self.run;
        let measured = work.partition().casts(model)?;
        if let Some(casts) = self.files.as_mut().and_then(|files| files.casts.as_mut()) {
            casts.append(step, &self.alarms.last_line, &measured)?;
        }
        self.look_at_casts(step, &measured)
    }

    /// Loss and metrics of held-out rows in the precision of the last step, which ranks compute together; `None` without such rows.
    fn evaluate(&mut self) -> Result<Option<Validation>> {
        let precision = self.precision_of(self.progress.step);
        let Run { model, step, .. } = &mut *self.run;
        self.rows.evaluate(model, step, precision)
    }

    /// Compares an evaluation after the last step with the best one before. Returns whether it is better.
    fn compare(&mut self, evaluation: Option<&Validation>) -> Result<bool> {
        let e = &self.config.evaluation;
        let Some(evaluation) = evaluation.filter(|_| e.compares()) else { return Ok(false) };
        let value = evaluation.metric(&e.metric_for_best_model)?;
        let threshold = e.early_stopping_threshold;
        let is_best =
            Best::update(&mut self.progress.best, self.progress.step, &e.metric_for_best_model, value, threshold);
        if e.load_best_model_at_end {
            self.saver.keep_best(self.progress.best.as_ref().map(|best| best.step));
        }
        Ok(is_best)
    }

    /// Whether the run ends because its evaluations do not improve any more.
    fn stops_early(&self) -> bool {
        let patience = self.config.evaluation.early_stopping_patience;
        patience > 0 && self.progress.best.as_ref().is_some_and(|best| best.without_improvement >= patience)
    }

    /// Begins to save a checkpoint of the current step; each rank writes its part. The leading rank flushes metrics and draws the
    /// plot first. Returns the checkpoint before, if it was not complete yet.
    fn save(&mut self) -> Result<Option<Saved>> {
        self.progress.loader = self.rows.state();
        self.progress.reference = self.rows.reference_digest();
        let Run { model, step: work, .. } = &mut *self.run;
        // Without a log of casts, nothing reads what they have counted.
        let counted = match self.config.logging.cast_statistics_steps {
            0 => Vec::new(),
            _ => work.partition().casts(model)?,
        };
        self.progress.alarms = self.alarms.memory(&counted);
        let (files, folder) = (&mut self.files, &self.config.output_dir);
        let prepare = || {
            let files = files.as_mut().expect("the leading rank writes files");
            files.sync()?;
            let title = format!("{} ({})", folder.display(), self.config.precision.recipe.as_str());
            let plot = loss_svg(&title, &self.losses, &self.eval_losses);
            replace_file(&RealFs, &folder.join("loss.svg"), plot.as_bytes())?;
            files.saved(folder)
        };
        let Run { model, optimizer, step, .. } = &mut *self.run;
        self.saver.begin(&self.progress, &self.template, model, &mut **optimizer, step.partition(), prepare)
    }

    /// Writes checkpoints through `fs`, to make operations slow or fail.
    pub fn set_fs(&mut self, fs: &'static dyn Fs) {
        self.saver.set_fs(fs);
    }

    /// Tokens per optimizer step, of all ranks.
    pub fn tokens_per_step(&self) -> u64 {
        self.config.tokens_per_step()
    }

    /// The best evaluation and its checkpoint, with `load_best_model_at_end`.
    pub fn best(&self) -> Option<(&Best, PathBuf)> {
        let best = self.progress.best.as_ref().filter(|_| self.config.evaluation.load_best_model_at_end)?;
        Some((best, checkpoints(&self.config.output_dir).join(atomic::name(best.step))))
    }

    /// The model and its tokenizer, after the run. What else is in memory is freed. With `load_best_model_at_end`, the model comes from the
    /// best checkpoint; if ranks have different parts of it, it is loaded from the last one.
    pub fn into_model(self) -> Result<(Decoder, Tokenizer)> {
        let best = self.best().filter(|(best, _)| best.step != self.progress.step).map(|(_, path)| path);
        let Trainer { saver, run, tokenizer, config, sizes, ranks, .. } = self;
        let run = run.into_inner();
        drop(saver);
        if let Some(best) = best {
            let device = run.model.device().clone();
            drop(run);
            return Ok((model_of(&config, &sizes, &device, &Start::ResumeFrom(best))?, tokenizer));
        }
        if ranks.have_whole_model() {
            return Ok((run.model, tokenizer));
        }
        let device = run.model.device().clone();
        drop(run);
        Ok((model_of(&config, &sizes, &device, &Start::Resume)?, tokenizer))
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
