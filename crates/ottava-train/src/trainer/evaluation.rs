//! The evaluations of a run, its best evaluation, and early stopping.

use super::Trainer;
use super::current_run::precision_of;
use super::environment::Environment;
use super::step_in_progress::StepInProgress;
use crate::objective::{ComparedMetric, Validation};
use crate::run::Run;
use ottava_checkpoint::Best;
use ottava_common::error::{Error, Result};
use ottava_recipe::mode::StepPrecision;
use ottava_sentinel::Decision;
use serde_json::{Map, json};

/// The settings that name a metric.
const BEST: &str = "evaluation.metric_for_best_model";
const OF_SENTINEL: &str = "sentinel.sentinel_metric";

impl Trainer {
    /// Evaluates a new run before its first step. Also evaluates a resumed run whose last evaluation a signal interrupted.
    pub(super) fn evaluate_first(&mut self) -> Result<()> {
        if self.progress.step == 0 {
            let evaluation = self.evaluate()?;
            if let Some(evaluation) = &evaluation {
                self.outputs.append(0, Map::new(), Some(evaluation))?;
                self.judge(evaluation)?;
                let e = &self.environment.config.evaluation;
                if e.compares() && evaluation.has_values() {
                    // Finds a metric without a finite value before the first step, such as of held-out rows if the data are too few for any.
                    evaluation.finite_metric(BEST, &e.metric_for_best_model)?;
                }
            }
            self.log_samples()?;
        }
        if let Some(values) = self.progress.pending.clone() {
            // The evaluation that was interrupted had the demotions of the last step.
            self.run.follow(self.progress.step, &self.progress.sentinel, &self.environment);
            let evaluation = self.evaluate()?;
            self.outputs.append(self.progress.step, values, evaluation.as_ref())?;
            evaluation.as_ref().map_or(Ok(()), |evaluation| self.judge(evaluation))?;
            self.compare(evaluation.as_ref())?;
            self.log_samples()?;
            self.progress.pending = None;
        }
        Ok(())
    }

    /// Evaluates after the step in progress if an evaluation is due, and writes the metrics of the step.
    pub(super) fn evaluate_step(&mut self, current: &mut StepInProgress) -> Result<()> {
        let (step, values) = (self.progress.step, current.report.values(self.progress.tokens));
        let e = &self.environment.config.evaluation;
        let (keeps_best, is_due) = (e.load_best_model_at_end, self.is_last_step() || e.eval_steps.is_due(step));
        match if is_due { self.evaluate() } else { Ok(None) } {
            // The resumed run evaluates first, so its metrics equal the metrics of an uninterrupted run.
            Err(Error::Cancelled(_)) => self.progress.pending = Some(values),
            evaluation => {
                current.report.evaluation = evaluation?;
                self.outputs.append(step, values, current.report.evaluation.as_ref())?;
                current.report.evaluation.as_ref().map_or(Ok(()), |evaluation| self.judge(evaluation))?;
                current.is_best = self.compare(current.report.evaluation.as_ref())? && keeps_best;
                if is_due {
                    self.log_samples()?;
                }
            }
        }
        Ok(())
    }

    /// Returns whether all steps are done, or early stopping ends the run.
    pub(super) fn has_ended(&self) -> bool {
        let patience = self.environment.config.evaluation.early_stopping_patience;
        let is_stuck = |best: &Best| patience > 0 && best.without_improvement >= patience;
        self.is_last_step() || self.progress.best.as_ref().is_some_and(is_stuck)
    }

    /// Returns whether the last step is done.
    pub(super) fn is_last_step(&self) -> bool {
        self.progress.step >= self.schedule.max_steps
    }

    /// Evaluates in the precision of the last step. For the metric of the sentinel, also computes this metric in the other precision.
    ///
    /// If the run compares a metric, losses by the recipe may be infinite or NaN. In a step by the recipe, the evaluation then has no values except the
    /// comparison. Otherwise errors with [`Error::NonFinite`].
    fn evaluate(&mut self) -> Result<Option<Validation>> {
        let config = &self.environment.config;
        let precision = precision_of(self.progress.step, &self.progress.sentinel, config);
        if !config.sentinel.compares_metric() {
            return self.evaluate_in(precision, None);
        }
        let (metric, leads) = (config.sentinel.sentinel_metric.clone(), self.environment.ranks.leads());
        let only = |own| (precision != own).then_some(metric.as_str());
        let by_recipe = match self.evaluate_in(StepPrecision::Recipe, only(StepPrecision::Recipe)) {
            Err(Error::NonFinite(reason)) => {
                if leads {
                    tracing::warn!("step {}: the evaluation by the recipe: {reason}", self.progress.step);
                }
                None
            }
            evaluation => evaluation?,
        };
        let high = self.evaluate_in(StepPrecision::High, only(StepPrecision::High))?;
        let Some(high) = high else { return Ok(None) };
        let compared = Validation::compare(by_recipe.as_ref(), &high, OF_SENTINEL, &metric)?;
        let own = match precision {
            StepPrecision::Recipe => by_recipe.unwrap_or_default(),
            StepPrecision::High => high,
        };
        Ok(Some(Validation { compared: Some(compared), ..own }))
    }

    /// Decides by the metric of the sentinel in `evaluation`, after the last step, which precision later steps have.
    fn judge(&mut self, evaluation: &Validation) -> Result<()> {
        let Some(compared) = &evaluation.compared else { return Ok(()) };
        let Environment { config, ranks, .. } = &self.environment;
        let (step, sentinel) = (self.progress.step, &config.sentinel);
        let bounds = sentinel.metric_bounds();
        let (finding, decision) =
            self.progress.sentinel.decide_by_metric(sentinel.sentinel_policy, compared.gap, bounds);
        let ComparedMetric { metric, by_recipe, high, gap } = compared;
        let values = format!("{metric} is {by_recipe:.4} by the recipe, and {high:.4} in BF16");
        let text = match (finding, &decision) {
            (None, Decision::Recipe) => format!("{values}: all products by the recipe again"),
            (None, _) => return Ok(()),
            (Some(finding), Decision::Bf16) => {
                let bound = bounds.to_return;
                format!("{values}: {finding}; all products in BF16 until the difference is at most {bound}")
            }
            (Some(finding), _) => format!("{values}: {finding}"),
        };
        if ranks.leads() {
            tracing::warn!("step {step}: sentinel: {text}");
        }
        if let Some(files) = &mut self.outputs.files {
            let fields = [
                ("alarm", json!("sentinel_metric")),
                ("tensors", json!([])),
                ("value", json!(gap)),
                ("policy", json!(sentinel.sentinel_policy)),
                ("text", json!(text)),
            ];
            files.log_alarm(&config.output_dir, step, &fields)?;
        }
        if decision == Decision::Pause {
            self.observers.requests.pause = Some(text);
        }
        Ok(())
    }

    /// Computes loss and metrics of the held-out rows, and the metrics of tasks, in `precision`; with `only`, the held-out rows or the task that have this
    /// metric. All ranks compute them together. Returns `None` without held-out rows and tasks.
    fn evaluate_in(&mut self, precision: StepPrecision, only: Option<&str>) -> Result<Option<Validation>> {
        let Trainer { environment, run, rows, tasks, .. } = self;
        let Run { model, step, optimizer, .. } = &mut **run;
        let is_of_task = only.is_some_and(|metric| tasks.has(metric));
        let of_rows = if is_of_task { None } else { rows.evaluate(model, step, precision)? };
        let ema = &environment.config.ema;
        let has_average = ema.config().is_some_and(|ema| ema.has_begun(optimizer.steps()));
        let of_average = match has_average && ema.evaluate && only.is_none() && of_rows.is_some() {
            true => {
                step.with_averages(model, &mut **optimizer, |model, _, step| rows.evaluate(model, step, precision))?
            }
            false => None,
        };
        let average = of_average.and_then(|evaluation| evaluation.all);
        let of_rows = of_rows.map(|of_rows| Validation { average, ..of_rows });
        let of_tasks = tasks.evaluate(model, &environment.inputs.tokenizer, step.partition(), precision, only)?;
        Ok(match (of_rows, of_tasks) {
            (of_rows, tasks) if tasks.is_empty() => of_rows,
            (of_rows, tasks) => Some(Validation { tasks, ..of_rows.unwrap_or_default() }),
        })
    }

    /// Completes the prompts of the run after the last step, if they are completed at evaluations, and logs the completions. After a request to stop, none
    /// are logged.
    fn log_samples(&mut self) -> Result<()> {
        let Trainer { environment, run, samples, outputs, progress, .. } = self;
        let (config, tokenizer) = (&environment.config, &environment.inputs.tokenizer);
        let precision = precision_of(progress.step, &progress.sentinel, config);
        let Run { model, step, .. } = &mut **run;
        let completions = match samples.draw(model, tokenizer, step.partition(), precision) {
            Err(Error::Cancelled(_)) => return Ok(()),
            completions => completions?,
        };
        let Some(log) = outputs.files.as_mut().and_then(|files| files.samples.as_mut()) else { return Ok(()) };
        for (prompt, completion) in config.generation.prompts.iter().zip(completions) {
            log.append(progress.step, &[("prompt", json!(prompt)), ("completion", json!(completion))])?;
        }
        Ok(())
    }

    /// Compares an evaluation after the last step with the best evaluation so far, and returns whether it is better.
    fn compare(&mut self, evaluation: Option<&Validation>) -> Result<bool> {
        let e = &self.environment.config.evaluation;
        let Some(evaluation) = evaluation.filter(|found| e.compares() && found.has_values()) else { return Ok(false) };
        let (metric, threshold) = (&e.metric_for_best_model, e.early_stopping_threshold);
        let value = evaluation.finite_metric(BEST, metric)?;
        let is_best = Best::update(&mut self.progress.best, self.progress.step, metric, value, threshold);
        self.outputs.keep_best(self.progress.best.as_ref(), &self.environment.config);
        Ok(is_best)
    }
}
