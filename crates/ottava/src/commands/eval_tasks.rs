//! The option `--task` of `ottava eval`.

use super::eval::Eval;
use super::eval_output::{check_output, write_lines};
use super::newest::with_model;
use crate::output::{Meter, print_json};
use ottava_common::{Error, Result};
use ottava_data::Tokenizer;
use ottava_engine::EngineOptions;
use ottava_models::{ConfigFile, Decoder, language_model_config};
use ottava_parallel::Partition;
use ottava_recipe::KvCacheDtype;
use ottava_recipe::mode::StepPrecision;
use ottava_tasks::{Answers, Measured, Requests, Scores, Task};
use ottava_train::tasks::{BatchSizes, complete_texts, log_likelihoods};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// A model with what it computes for tasks.
struct Prepared {
    model: Decoder,
    tokenizer: Tokenizer,
    /// For each task.
    requests: Vec<Requests>,
    /// The maximum number of tokens of a sequence.
    max_length: usize,
    /// The number of tokens of the longest sequence.
    longest: usize,
}

impl Eval {
    /// Evaluates the tasks of `--task`.
    pub(super) fn run_tasks(&self) -> Result<()> {
        self.output.as_deref().map_or(Ok(()), check_output)?;
        let tasks = self.tasks.iter().map(|path| Task::load(path)).collect::<Result<Vec<_>>>()?;
        let mut names = BTreeSet::new();
        if let Some(twice) = tasks.iter().find(|task| !names.insert(task.name())) {
            return Err(Error::Config(format!("--task: two tasks have the name {}; change one `name`", twice.name())));
        }
        let ranks = self.how.ranks(&self.ranks)?;
        let loaded = with_model(&self.model, |folder| {
            let config = ConfigFile::read(folder)?;
            language_model_config(&config)?;
            let sizes = self.how.sizes(&config)?;
            let tokenizer = self.how.texts(folder, &sizes)?.tokenizer;
            tokenizer.check_fits(sizes.vocabulary)?;
            let max_length = self.text.max_length_within(&sizes, usize::MAX)?;
            let requests =
                tasks.iter().map(|task| task.requests(&tokenizer, max_length)).collect::<Result<Vec<_>>>()?;
            // Positions beyond the longest sequence would only cost memory.
            let longest = requests.iter().map(Requests::longest).max().unwrap_or(1);
            let model = self.how.load(folder, &config, longest, &ranks)?;
            Ok((Prepared { model, tokenizer, requests, max_length, longest }, folder.to_path_buf()))
        });
        let (mut prepared, folder) = ranks.together(loaded)?;
        let partition = ranks.partition(&mut prepared.model)?;
        let mut answers = self.log_likelihoods(&mut prepared, &partition)?;
        drop(partition);
        let Prepared { model, tokenizer, requests, max_length, longest } = prepared;
        let texts = || requests.iter().filter_map(Requests::texts);
        if texts().next().is_none() {
            let leads = ranks.leads();
            ranks.finish()?;
            return if leads { self.report(&tasks, &requests, answers, max_length) } else { Ok(()) };
        }
        let lengths = texts().flat_map(|texts| texts.prompts.iter().map(|prompt| prompt.len() + texts.max_gen_toks));
        let options = EngineOptions::for_lengths(&model, None, lengths, longest, KvCacheDtype::Auto)?;
        let engine = ranks.engine(model, &folder, options)?;
        let Some(mut engine) = ranks.lead(engine)? else { return Ok(()) };
        let total: usize = texts().map(|texts| texts.prompts.len() * texts.max_gen_toks).sum();
        let mut meter = Meter::new("generated", total as u64);
        for (requests, answers) in requests.iter().zip(&mut answers) {
            let Some(texts) = requests.texts() else { continue };
            let before = engine.stats().generated_tokens;
            let all: Vec<usize> = (0..texts.prompts.len()).collect();
            let mut progress = |tokens| meter.at(before + tokens);
            *answers = Answers::Texts(complete_texts(&mut engine, &tokenizer, texts, &all, &mut progress)?);
        }
        meter.finish(engine.stats().generated_tokens);
        engine.finish()?;
        ranks.into_processes().wait()?;
        self.report(&tasks, &requests, answers, max_length)
    }

    /// Computes the log-likelihoods of all tasks. A task of texts gets no answers yet.
    fn log_likelihoods(&self, prepared: &mut Prepared, partition: &Partition) -> Result<Vec<Answers>> {
        let Prepared { model, requests, longest, .. } = prepared;
        let sizes = BatchSizes { tokens: self.text.batch_tokens(*longest), max_length: *longest };
        let tokens = |requests: &Requests| match requests {
            Requests::LogLikelihoods { rows, .. } => rows.iter().map(|row| row.tokens.len() as u64 - 1).sum(),
            Requests::Texts(_) => 0,
        };
        let total = requests.iter().map(tokens).sum();
        let (mut meter, mut before) = (Meter::new("evaluated", total), 0);
        let mut answers = Vec::with_capacity(requests.len());
        for requests in requests.iter() {
            answers.push(match requests {
                Requests::Texts(_) => Answers::Texts(Vec::new()),
                Requests::LogLikelihoods { rows, .. } => {
                    let mut progress = |done| meter.at(before + done);
                    let precision = StepPrecision::Recipe;
                    let found = log_likelihoods(model, rows, sizes, precision, partition, &mut progress)?;
                    Answers::LogLikelihoods(found)
                }
            });
            before += tokens(requests);
        }
        if total > 0 {
            meter.finish(total);
        }
        Ok(answers)
    }

    /// Prints the metrics of the tasks, and writes their samples.
    fn report(&self, tasks: &[Task], requests: &[Requests], answers: Vec<Answers>, max_length: usize) -> Result<()> {
        let of_item = |requests: &Requests| match requests {
            Requests::LogLikelihoods { of_item, .. } => of_item.clone(),
            Requests::Texts(_) => Vec::new(),
        };
        let each = tasks.iter().zip(requests).zip(&answers);
        let scores = each.map(|((task, requests), answers)| task.score(&of_item(requests), answers));
        let scores: Vec<Scores> = scores.collect::<Result<_>>()?;
        if self.json {
            let results: Map<String, Value> =
                tasks.iter().zip(&scores).map(|(task, scores)| result(task, scores)).collect();
            print_json(&json!({"results": results, "max_length": max_length}));
        } else {
            out!("{}", table(tasks, &scores));
            out!("prompts and answers have at most {max_length} tokens; longer prompts are cut at the left");
        }
        // A file that cannot be written loses no results.
        self.output
            .as_deref()
            .map_or(Ok(()), |path| write_lines(path, scores.iter().flat_map(|scores| &scores.samples)))
    }
}

/// Returns the name of a task and its metrics, as `--json` prints them.
fn result(task: &Task, scores: &Scores) -> (String, Value) {
    let mut found = json!({"items": task.len()});
    for Measured { name, value, stderr, .. } in &scores.metrics {
        found[*name] = json!(value);
        if let Some(stderr) = stderr {
            found[format!("{name}_stderr")] = json!(stderr);
        }
    }
    (task.name().to_string(), found)
}

/// Returns a table with a line for each metric.
fn table(tasks: &[Task], scores: &[Scores]) -> String {
    let width = tasks.iter().map(|task| task.name().len()).max().unwrap_or(0).max("task".len());
    let mut lines =
        vec![format!("{:width$}  {:>7}  {:15}  {:>10}  {:>8}", "task", "items", "metric", "value", "stderr")];
    for (task, scores) in tasks.iter().zip(scores) {
        for Measured { name, value, stderr, .. } in &scores.metrics {
            let stderr = stderr.map_or(String::new(), |stderr| format!("{stderr:.4}"));
            let line = format!("{:width$}  {:>7}  {name:15}  {value:>10.4}  {stderr:>8}", task.name(), task.len());
            lines.push(line.trim_end().to_string());
        }
    }
    lines.join("\n")
}
