//! A task with its items, and the scores of answers.

use crate::config::TaskConfig;
use crate::encode::{Encoder, Requests};
use crate::exact_match::ExactMatch;
use crate::filter::Filter;
use crate::item::{Gold, Item, items};
use crate::kind::TaskType;
use crate::metric::{Measured, MetricName, OfItem};
use crate::space::words;
use ottava_common::{Error, Result};
use ottava_data::Tokenizer;
use serde_json::{Map, Value, json};
use std::path::Path;

/// A task with its items.
pub struct Task {
    config: TaskConfig,
    items: Vec<Item>,
    filter: Option<Filter>,
    exact_match: ExactMatch,
}

/// The answers of a model to the [`Requests`] of a task.
#[derive(Clone, Debug, PartialEq)]
pub enum Answers {
    /// The log-likelihood of the scored tokens of each row, in nats.
    LogLikelihoods(Vec<f64>),
    /// The completion of each prompt, in which a string of `until` may still be.
    Texts(Vec<String>),
}

/// The scores of a task.
#[derive(Clone, Debug, PartialEq)]
pub struct Scores {
    /// The metrics over all items.
    pub metrics: Vec<Measured>,
    /// For each item, a JSON object with its fields, what the model computed, and its scores, as `--log_samples` of lm-evaluation-harness.
    pub samples: Vec<Map<String, Value>>,
}

/// The numbers of an item.
struct Scored {
    /// For each metric.
    numbers: Vec<OfItem>,
    target: Value,
    arguments: Value,
    responses: Value,
    filtered: Value,
}

impl Task {
    /// Reads the file of a task and its items.
    ///
    /// Errors with [`Error::Config`] for the file, and with [`Error::Data`] for items.
    pub fn load(path: &Path) -> Result<Task> {
        let config = TaskConfig::read(path)?;
        let named = |error: Error| match error {
            Error::Config(reason) => Error::Config(format!("{}: {reason}", path.display())),
            other => other,
        };
        let filter = config.filter.as_ref().map(Filter::new).transpose().map_err(named)?;
        let exact_match = ExactMatch::new(&config.exact_match.clone().unwrap_or_default()).map_err(named)?;
        let items = items(&config).map_err(named)?;
        Ok(Task { config, items, filter, exact_match })
    }

    /// Returns the name of the task.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Returns what a model computes for an item.
    pub fn kind(&self) -> TaskType {
        self.config.kind
    }

    /// Returns the number of items.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Returns whether the task has no items, which [`Task::load`] refuses.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Returns the metrics of the task.
    pub fn metrics(&self) -> Vec<MetricName> {
        self.config.metrics()
    }

    /// Returns what a model of `max_length` positions computes for the items.
    ///
    /// Errors with [`Error::Data`] for an item that makes no sequence, and with [`Error::Config`] if new tokens have no room.
    pub fn requests(&self, tokenizer: &Tokenizer, max_length: usize) -> Result<Requests> {
        let encoder = Encoder { tokenizer, max_length };
        let requests = match self.config.kind {
            TaskType::MultipleChoice => encoder.choices(&self.items, &self.config.target_delimiter),
            TaskType::GenerateUntil => encoder.prompts(&self.config, &self.items),
            TaskType::LoglikelihoodRolling => encoder.windows(&self.items),
        };
        let name = self.name();
        requests.map_err(|error| match error {
            Error::Data(reason) => Error::Data(format!("task {name}: {reason}")),
            Error::Config(reason) => Error::Config(format!("task {name}: {reason}")),
            other => other,
        })
    }

    /// Scores the answers. `of_item` has the number of log-likelihoods of each item; it is not read for texts.
    ///
    /// Errors with [`Error::NonFinite`] for a log-likelihood that is infinite or NaN.
    pub fn score(&self, of_item: &[usize], answers: &Answers) -> Result<Scores> {
        let names = self.metrics();
        let (mut numbers, mut samples, mut at) = (vec![Vec::new(); names.len()], Vec::new(), 0);
        for (number, item) in self.items.iter().enumerate() {
            let scored = match answers {
                Answers::LogLikelihoods(all) => {
                    let own = &all[at..][..of_item[number]];
                    at += of_item[number];
                    if let Some(wrong) = own.iter().find(|value| !value.is_finite()) {
                        return Err(Error::NonFinite(format!(
                            "task {}, item {number}: a log-likelihood is {wrong}: the model's weights or activations are not finite",
                            self.name()
                        )));
                    }
                    match self.config.kind {
                        TaskType::MultipleChoice => self.score_choices(&names, item, own),
                        _ => score_text(&names, item, own),
                    }
                }
                Answers::Texts(all) => self.score_completion(&names, item, &all[number]),
            };
            numbers.iter_mut().zip(&scored.numbers).for_each(|(of_metric, number)| of_metric.push(*number));
            samples.push(self.sample(number, &names, item, scored));
        }
        let metrics = names.iter().zip(&numbers).map(|(name, numbers)| name.over(numbers)).collect();
        Ok(Scores { metrics, samples })
    }

    fn score_choices(&self, names: &[MetricName], item: &Item, log_likelihoods: &[f64]) -> Scored {
        let Gold::Choices(right) = &item.gold else { unreachable!("choices have indices") };
        let best_by = |length: fn(&str) -> usize| {
            let of_choice = log_likelihoods.iter().zip(&item.choices);
            first_largest(of_choice.map(|(log_likelihood, choice)| log_likelihood / length(choice) as f64))
        };
        let number = |name: &MetricName| {
            let best = match name {
                MetricName::AccNorm => best_by(|choice| choice.chars().count()),
                MetricName::AccBytes => best_by(str::len),
                _ => best_by(|_| 1),
            };
            OfItem { value: f64::from(right.contains(&best)), weight: 1.0 }
        };
        let delimiter = &self.config.target_delimiter;
        let argument = |choice: &String| json!([item.context, format!("{delimiter}{choice}")]);
        Scored {
            numbers: names.iter().map(number).collect(),
            target: one_or_all(right),
            arguments: item.choices.iter().map(argument).collect(),
            responses: json!(log_likelihoods),
            filtered: json!(log_likelihoods),
        }
    }

    fn score_completion(&self, names: &[MetricName], item: &Item, completion: &str) -> Scored {
        let Gold::Texts(right) = &item.gold else { unreachable!("texts are compared") };
        let until = self.config.until();
        let end = |text: &str, stop: &String| text.find(stop.as_str()).filter(|_| !stop.is_empty());
        let mut text = completion;
        for stop in &until {
            text = &text[..end(text, stop).unwrap_or(text.len())];
        }
        let filtered = self.filter.as_ref().map_or_else(|| text.to_string(), |filter| filter.apply(text));
        let is_right = right.iter().any(|answer| self.exact_match.holds(&filtered, answer));
        Scored {
            numbers: vec![OfItem { value: f64::from(is_right), weight: 1.0 }; names.len()],
            target: one_or_all(right),
            arguments: json!([[item.context, {"until": until}]]),
            responses: json!([text]),
            filtered: json!([filtered]),
        }
    }

    fn sample(&self, number: usize, names: &[MetricName], item: &Item, scored: Scored) -> Map<String, Value> {
        let Scored { numbers, target, arguments, responses, filtered } = scored;
        let mut sample = json!({
            "task": self.name(),
            "doc_id": number,
            "doc": item.fields,
            "target": target,
            "arguments": arguments,
            "resps": responses,
            "filtered_resps": filtered,
        });
        for (name, OfItem { value, weight }) in names.iter().zip(numbers) {
            sample[name.as_str()] = if name.higher_is_better() { json!(value) } else { json!([value, weight]) };
        }
        match sample {
            Value::Object(sample) => sample,
            _ => unreachable!("an object was made above"),
        }
    }
}

/// Scores the text of an item by the log-likelihoods of its windows.
fn score_text(names: &[MetricName], item: &Item, log_likelihoods: &[f64]) -> Scored {
    let Gold::Texts(texts) = &item.gold else { unreachable!("a text is scored") };
    let (text, value) = (&texts[0], log_likelihoods.iter().sum());
    let number = |name: &MetricName| {
        let weight = match name {
            MetricName::WordPerplexity => words(text),
            _ => text.len(),
        };
        OfItem { value, weight: weight as f64 }
    };
    Scored {
        numbers: names.iter().map(number).collect(),
        target: json!(text),
        arguments: json!([[text]]),
        responses: json!([value]),
        filtered: json!([value]),
    }
}

/// Returns the place of the largest value, the first one among equals.
fn first_largest(values: impl Iterator<Item = f64>) -> usize {
    let better = |best: Option<(usize, f64)>, next: (usize, f64)| match best {
        Some(best) if best.1 >= next.1 => Some(best),
        _ => Some(next),
    };
    values.enumerate().fold(None, better).map_or(0, |(at, _)| at)
}

fn one_or_all<T: serde::Serialize>(all: &[T]) -> Value {
    match all {
        [one] => json!(one),
        all => json!(all),
    }
}

#[cfg(test)]
mod tests;
