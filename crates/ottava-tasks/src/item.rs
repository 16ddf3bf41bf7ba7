//! Items with their prompts, choices and right answers.

use crate::config::{Choices, TaskConfig};
use crate::kind::TaskType;
use crate::literal;
use crate::template::{Fields, Found, Source, text_of};
use ottava_common::{Error, Result, input, python_json};
use serde_json::{Value as Json, json};
use std::path::Path;

/// The maximum size of a file of items in bytes.
const MAX_BYTES: u64 = 4 << 30;

/// An item of a task.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Item {
    /// The fields of the item.
    pub(crate) fields: Fields,
    /// The examples and the prompt. Empty for loglikelihood_rolling.
    pub(crate) context: String,
    /// The choices; empty unless the type is multiple_choice.
    pub(crate) choices: Vec<String>,
    /// The right answers.
    pub(crate) gold: Gold,
}

/// The right answers of an item.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Gold {
    /// The indices of right choices.
    Choices(Vec<usize>),
    /// Right texts, or for loglikelihood_rolling the one text that is scored.
    Texts(Vec<String>),
}

/// The templates of a task.
struct Sources {
    prompt: Option<Source>,
    choices: Option<ChoiceSources>,
    answer: Source,
}

enum ChoiceSources {
    Each(Vec<Source>),
    All(Source),
}

impl Sources {
    fn parse(config: &TaskConfig) -> Result<Sources> {
        let choices = match &config.choices {
            None => None,
            Some(Choices::Each(each)) => Some(ChoiceSources::Each(
                each.iter().map(|source| Source::template("choices", source)).collect::<Result<_>>()?,
            )),
            Some(Choices::All(source)) => Some(ChoiceSources::All(Source::parse("choices", source)?)),
        };
        let prompt = config.prompt.as_deref().map(|source| Source::parse("prompt", source)).transpose()?;
        Ok(Sources { prompt, choices, answer: Source::parse("answer", &config.answer)? })
    }

    /// Makes an item of `fields`. `examples` precede its prompt. Errors with the key and the reason.
    fn item(&self, kind: TaskType, fields: Fields, examples: &str) -> Result<Item, String> {
        let named = |key: &'static str| move |reason: String| format!("`{key}`: {reason}");
        let prompt = self.prompt.as_ref().map(|source| source.text(&fields)).transpose().map_err(named("prompt"))?;
        let choices = match &self.choices {
            None => Vec::new(),
            Some(ChoiceSources::Each(each)) => {
                each.iter().map(|source| source.text(&fields)).collect::<Result<_, _>>().map_err(named("choices"))?
            }
            Some(ChoiceSources::All(source)) => source.texts(&fields).map_err(named("choices"))?,
        };
        let answer = self.answer.find(&fields).map_err(named("answer"))?;
        let gold = match kind {
            TaskType::MultipleChoice => gold_choices(answer, &choices).map(Gold::Choices),
            TaskType::GenerateUntil => gold_texts(answer).map(Gold::Texts),
            TaskType::LoglikelihoodRolling => match answer {
                Found::Field(value) => text_of(value),
                Found::Rendered(text) => Ok(text),
            }
            .map(|text| Gold::Texts(vec![text])),
        };
        let gold = gold.map_err(named("answer"))?;
        Ok(Item { fields, context: examples.to_string() + &prompt.unwrap_or_default(), choices, gold })
    }
}

impl Item {
    /// Returns the first right answer as text, which an example shows.
    pub(crate) fn answer(&self) -> &str {
        match &self.gold {
            Gold::Choices(right) => &self.choices[right[0]],
            Gold::Texts(texts) => &texts[0],
        }
    }
}

/// Returns the indices of the right choices. A field is an index or the text of a choice. A rendered text of digits is an index, whatever the choices
/// are, as in lm-evaluation-harness.
fn gold_choices(answer: Found, choices: &[String]) -> Result<Vec<usize>, String> {
    if choices.is_empty() {
        return Err("the item has no choices".into());
    }
    if let Some(empty) = choices.iter().position(String::is_empty) {
        return Err(format!("choice {empty} is empty, so its log-likelihood has no length; leave it out"));
    }
    let answer = match answer {
        Found::Field(value) => value,
        Found::Rendered(text) => text.parse::<u32>().map_or_else(|_| json!(text), |index| json!(index)),
    };
    let index = |answer: &Json| {
        let index = match answer {
            Json::Number(number) => number.as_u64().map(|index| index as usize),
            Json::String(text) => choices.iter().position(|choice| choice == text),
            _ => None,
        };
        let missing = || format!("{answer} is neither one of the choices nor an index below {}", choices.len());
        index.filter(|index| *index < choices.len()).ok_or_else(missing)
    };
    match &answer {
        Json::Array(all) if all.is_empty() => Err("the list is empty".into()),
        Json::Array(all) => all.iter().map(index).collect(),
        one => index(one).map(|index| vec![index]),
    }
}

/// Returns the right texts.
fn gold_texts(answer: Found) -> Result<Vec<String>, String> {
    let texts = match answer {
        Found::Field(Json::Array(all)) => all.into_iter().map(text_of).collect::<Result<Vec<_>, _>>()?,
        Found::Field(other) => vec![text_of(other)?],
        Found::Rendered(text) => match literal::texts(&text) {
            Some(texts) => texts,
            None => vec![text],
        },
    };
    if texts.is_empty() { Err("the list is empty".into()) } else { Ok(texts) }
}

/// Reads the items of a task, with their prompts.
///
/// Errors with [`Error::Config`] for a source that is no template, and with [`Error::Data`] for a line that makes no item.
pub(crate) fn items(config: &TaskConfig) -> Result<Vec<Item>> {
    let sources = Sources::parse(config)?;
    let mut examples = String::new();
    if let Some(path) = &config.fewshot_data {
        let all = read(path)?;
        if all.len() < config.num_fewshot {
            return Err(Error::Data(format!(
                "{}: the file has {} examples, and `num_fewshot` is {}; lower it",
                path.display(),
                all.len(),
                config.num_fewshot
            )));
        }
        for (line, fields) in all.into_iter().take(config.num_fewshot) {
            let item = sources.item(config.kind, fields, "").map_err(wrong(path, line))?;
            examples += &item.context;
            // An empty answer ends the example at its prompt, as in lm-evaluation-harness.
            if !item.answer().is_empty() {
                examples += &(config.target_delimiter.clone() + item.answer() + &config.fewshot_separator);
            }
        }
    }
    let all = read(&config.data)?;
    if all.is_empty() {
        return Err(Error::Data(format!("{}: the file has no items", config.data.display())));
    }
    let item = |(line, fields)| sources.item(config.kind, fields, &examples).map_err(wrong(&config.data, line));
    all.into_iter().map(item).collect()
}

fn wrong(path: &Path, line: usize) -> impl Fn(String) -> Error {
    move |reason| Error::Data(format!("{}, line {line}: {reason}", path.display()))
}

/// Reads the objects of a JSON lines file, each with the number of its line. Empty lines are skipped.
fn read(path: &Path) -> Result<Vec<(usize, Fields)>> {
    let text =
        input::read_text(path, MAX_BYTES).map_err(|error| Error::Data(format!("{}: {error}", path.display())))?;
    let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
    let object = |(number, line): (usize, &str)| match python_json::parse(line) {
        Ok(Json::Object(fields)) => Ok((number, fields)),
        Ok(_) => Err(wrong(path, number)("an item is a JSON object".into())),
        Err(error) => Err(wrong(path, number)(format!("this is not JSON: {error}"))),
    };
    lines.map(object).collect()
}
