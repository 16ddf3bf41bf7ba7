//! The tasks of a run.

use super::likelihood::{BatchSizes, log_likelihoods};
use super::texts::complete_texts;
use crate::objective::metric_of_task;
use crate::objective::rollout::{DrawSizes, Drawer};
use ottava_common::error::{Error, Result};
use ottava_data::Tokenizer;
use ottava_engine::LogprobsMode;
use ottava_models::Decoder;
use ottava_parallel::Partition;
use ottava_recipe::KvCacheDtype;
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_recipe::mode::StepPrecision;
use ottava_settings::RunConfig;
use ottava_tasks::{Answers, Measured, Requests, Task, TaskType, Texts};
use std::collections::BTreeSet;

/// The tasks of `evaluation.tasks`, with their sequences.
pub struct RunTasks {
    tasks: Vec<(Task, Requests)>,
    sizes: BatchSizes,
    /// Made at the first text.
    drawer: Option<Drawer>,
}

impl RunTasks {
    /// Reads the tasks of the run of `config`. Their batches have at most as many tokens as a micro-batch.
    ///
    /// Errors as [`Task::load`] and [`Task::requests`], and with [`Error::Config`] for two tasks with one name, for texts if ranks divide the model, and for
    /// a setting that names a metric by which the run cannot compare evaluations.
    pub fn open(config: &RunConfig, tokenizer: &Tokenizer) -> Result<RunTasks> {
        let max_length = config.data.max_length;
        let (mut tasks, mut names) = (Vec::new(), BTreeSet::new());
        for set in config.datasets().iter().filter(|set| !set.name.is_empty()) {
            names.insert(set.name.clone());
        }
        for path in &config.evaluation.tasks {
            let task = Task::load(path)?;
            if !names.insert(task.name().to_string()) {
                return Err(Error::Config(format!(
                    "`evaluation.tasks`: {} has the name {}, which another task or data set has, so their metrics would have one name; change `name`",
                    path.display(),
                    task.name()
                )));
            }
            if task.kind() == TaskType::GenerateUntil {
                let what = format!("the task {}", task.name());
                expect_whole_texts(config, &what, "set it to 1, or evaluate checkpoints with `ottava eval --task`")?;
            }
            let requests = task.requests(tokenizer, max_length)?;
            tasks.push((task, requests));
        }
        config.expect_metrics(&tasks.iter().flat_map(|(task, _)| metrics(task)).collect::<Vec<_>>())?;
        let sizes = BatchSizes { tokens: config.evaluation_rows() * max_length, max_length };
        Ok(RunTasks { tasks, sizes, drawer: None })
    }

    /// Returns whether a task has this metric.
    pub fn has(&self, metric: &str) -> bool {
        self.tasks.iter().any(|(task, _)| metrics(task).any(|name| name == metric))
    }

    /// Evaluates all tasks, or the task that has the metric `only`, and returns the metrics of each task by its name. All ranks of `partition` call it
    /// together, and get the same metrics.
    ///
    /// Errors with [`Error::NonFinite`] if a log-likelihood is infinite or NaN, and with [`Error::Cancelled`] on all ranks after a request to any of
    /// them to stop.
    pub fn evaluate(
        &mut self,
        model: &mut Decoder,
        tokenizer: &Tokenizer,
        partition: &Partition,
        precision: StepPrecision,
        only: Option<&str>,
    ) -> Result<Vec<(String, Vec<Measured>)>> {
        let RunTasks { tasks, sizes, drawer } = self;
        let texts =
            tasks.iter().filter_map(|(_, requests)| Some((requests.texts()?.prompts.len(), requests.longest())));
        let sizes_of_draws = draw_sizes(texts, division(model, partition).ranks);
        let mut found = Vec::with_capacity(tasks.len());
        let is_wanted = |task: &Task| only.is_none_or(|metric| metrics(task).any(|name| name == metric));
        for (task, requests) in tasks.iter().filter(|(task, _)| is_wanted(task)) {
            let scores = match requests {
                Requests::LogLikelihoods { rows, of_item } => {
                    let all = log_likelihoods(model, rows, *sizes, precision, partition, &mut |_| {})?;
                    task.score(of_item, &Answers::LogLikelihoods(all))?
                }
                Requests::Texts(texts) => {
                    let drawer = drawer.get_or_insert_with(|| Drawer::new(sizes_of_draws));
                    // Draws have the precision of the passes of the evaluation.
                    model.scaling().set_all_high_precision(precision == StepPrecision::High);
                    let all = draw(drawer, model, tokenizer, partition, texts);
                    model.scaling().set_all_high_precision(false);
                    task.score(&[], &Answers::Texts(all?))?
                }
            };
            found.push((task.name().to_string(), scores.metrics));
        }
        Ok(found)
    }

    /// Frees what texts were drawn with, since the model is built again.
    pub fn forget_model(&mut self) {
        self.drawer = None;
    }
}

/// Errors if ranks divide the layers or the tokens of a run, since the ranks that draw the texts of `what` have all layers and all tokens. `instead` says what
/// to change.
pub(super) fn expect_whole_texts(config: &RunConfig, what: &str, instead: &str) -> Result<()> {
    let p = &config.parallel;
    let axes = [("pipeline", p.pipeline), ("context", p.context)];
    match axes.into_iter().find(|(_, ranks)| *ranks > 1) {
        None => Ok(()),
        Some((key, ranks)) => Err(Error::Config(format!(
            "`parallel.{key}` is {ranks}, and the ranks that draw the texts of {what} have all layers and all tokens; {instead}"
        ))),
    }
}

/// Returns the names under which the metrics of a task are recorded.
fn metrics(task: &Task) -> impl Iterator<Item = String> {
    task.metrics().into_iter().map(|metric| metric_of_task(task.name(), metric.as_str()))
}

/// Returns the sizes of the draws of a rank. `texts` are the number of prompts and the longest sequence of each task; `world` ranks divide the prompts.
pub(super) fn draw_sizes(texts: impl Iterator<Item = (usize, usize)>, world: usize) -> DrawSizes {
    let largest = |(completions, max_length): (usize, usize), (prompts, longest): (usize, usize)| {
        (completions.max(prompts.div_ceil(world)), max_length.max(longest))
    };
    let (completions, max_length) = texts.fold((0, 0), largest);
    DrawSizes {
        completions,
        max_length,
        kv_cache_tokens: 0,
        kv_cache_dtype: KvCacheDtype::Auto,
        logprobs_mode: LogprobsMode::Raw,
    }
}

/// Returns the place of this rank, with the ranks that draw together with it, among the ranks that divide prompts. If tokens of a batch share a scale, each
/// rank draws all texts, so that texts do not depend on the number of ranks.
fn division(model: &mut Decoder, partition: &Partition) -> ShardPlace {
    match model.scaling().scales().depend_on_other_rows() {
        true => ShardPlace::ALONE,
        false => partition.ranks().place_of_draws(),
    }
}

/// Draws the texts, and returns all of them on all ranks, which divide the prompts.
fn draw(
    drawer: &mut Drawer,
    model: &mut Decoder,
    tokenizer: &Tokenizer,
    partition: &Partition,
    texts: &Texts,
) -> Result<Vec<String>> {
    let (ranks, count) = (partition.ranks(), texts.prompts.len());
    let ShardPlace { rank, ranks: world } = division(model, partition);
    let own: Vec<usize> = (rank..count).step_by(world).collect();
    let drawn = drawer.lend(model, partition, |engine| complete_texts(engine, tokenizer, texts, &own, &mut |_| {}));
    let of_ranks = ranks.of_draws(ranks.all("the texts of a task", drawn)?);
    Ok((0..count).map(|place| of_ranks[place % world][place / world].clone()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_have_room_for_the_largest_task() {
        let sizes = |world| draw_sizes([(3, 40), (7, 20)].into_iter(), world);
        assert_eq!((sizes(1).completions, sizes(1).max_length), (7, 40));
        assert_eq!((sizes(2).completions, sizes(2).max_length), (4, 40));
    }
}
