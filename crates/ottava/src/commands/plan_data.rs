//! The data of a plan: what a run reads, and its first rows or prompts.

use crate::output::{print_marked, stop_on_signals};
use ottava_common::Result;
use ottava_data::preview::{Segment, count_targets, preview, preview_prompts};
use ottava_data::{DataSet, DataState, Packing, PromptLoader, PromptSet, RowShare, Tokenizer, TrainingData};
use ottava_settings::RunConfig;
use serde::Serialize;

/// The maximum number of rows whose targets are counted.
const COUNTED: u64 = 1 << 14;

/// The data of a run.
#[derive(Serialize)]
pub struct Data {
    documents: u64,
    tokens: u64,
    /// The number of rows of one epoch.
    rows: f64,
    /// The number of tokens in the counted rows: all rows of an epoch, or the first [`COUNTED`] rows.
    counted_tokens: u64,
    /// The number of counted tokens that contribute to the loss.
    target_tokens: u64,
    /// The number of documents that are truncated because they are longer than a row.
    truncated: u64,
    /// The number of documents that are skipped because no target fits in a row.
    left_out: u64,
    /// A description of the truncated and skipped documents.
    #[serde(skip)]
    fit: Vec<String>,
    /// The first rows, each as segments.
    shown: Vec<Vec<Segment>>,
    /// The data sets of a mixture.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    sets: Vec<SetPlan>,
    /// Whether the other fields are of a sample of the files, because the run fetches its files while it trains.
    is_sample: bool,
}

/// One of several data sets.
#[derive(Serialize)]
struct SetPlan {
    name: String,
    documents: usize,
    tokens: u64,
    /// The data set's share of the tokens of a run, from 0 to 1.
    share: f64,
    /// How often the documents of the data set are read in an epoch of the run.
    passes: f64,
}

impl SetPlan {
    fn new(set: &DataSet, share: f64, data: &TrainingData) -> SetPlan {
        SetPlan {
            name: set.name.clone(),
            documents: set.dataset.len(),
            tokens: set.dataset.total_tokens(),
            share,
            passes: share * data.epoch_tokens / set.statistics.tokens.max(1) as f64,
        }
    }
}

impl Data {
    /// Tokenizes the data of `config`, to show the first `rows` rows.
    pub fn read(config: &RunConfig, rows: usize) -> Result<Data> {
        stop_on_signals("stopping")?;
        let tokenizer = Tokenizer::load(config.tokenizer_path())?;
        let data = config.prepare_data(&tokenizer)?;
        if config.reinforcement.is_on() {
            return Data::of_prompts(config, &data, &tokenizer, rows);
        }
        let TrainingData { sets, layout, .. } = &data;
        // Of a stream, the files that were fetched as a sample are shown.
        let sampled = |set: &DataSet| DataSet { stream: None, ..set.clone() };
        let sets = &sets.iter().map(sampled).collect::<Vec<_>>();
        let counted = (data.rows().floor() as u64).clamp(1, COUNTED);
        let [counted_tokens, target_tokens] = count_targets(sets, *layout, config.seed, counted)?;
        let sum = |count: fn(&DataSet) -> u64| sets.iter().map(count).sum();
        let fits = sets.iter().filter_map(|set| Some(set.label() + &set.statistics.describe_fit(layout)?));
        Ok(Data {
            documents: sum(|set| set.dataset.len() as u64),
            tokens: sum(|set| set.dataset.total_tokens()),
            rows: data.rows(),
            counted_tokens,
            target_tokens,
            truncated: sum(|set| set.statistics.fit.truncated),
            left_out: if layout.packing == Packing::Wrapped { 0 } else { sum(|set| set.statistics.fit.left_out) },
            fit: fits.collect(),
            is_sample: config.data.streaming,
            shown: preview(sets, *layout, config.seed, &tokenizer, rows)?,
            sets: data.shares().into_iter().zip(sets).map(|(share, set)| SetPlan::new(set, share, &data)).collect(),
        })
    }

    /// The data of a run of reinforcement learning, to show the first `count` prompts. A row has one prompt and its completion.
    fn of_prompts(config: &RunConfig, data: &TrainingData, tokenizer: &Tokenizer, count: usize) -> Result<Data> {
        let sets = config.prompt_sets(data)?;
        let left_out = sets.iter().map(PromptSet::left_out).sum::<usize>() as u64;
        let fit = sets.iter().filter_map(PromptSet::describe_left_out).collect();
        let rows = sets.iter().map(PromptSet::train_len).sum::<usize>() as f64;
        let mut prompts = PromptLoader::new(sets, &DataState::start(&data.sets, config.seed), RowShare::ALL)?;
        Ok(Data {
            documents: data.sets.iter().map(|set| set.dataset.len() as u64).sum(),
            tokens: data.sets.iter().map(|set| set.dataset.total_tokens()).sum(),
            rows,
            counted_tokens: 0,
            target_tokens: 0,
            truncated: 0,
            left_out,
            fit,
            is_sample: false,
            shown: preview_prompts(&mut prompts, tokenizer, count)?,
            sets: data
                .shares()
                .into_iter()
                .zip(&data.sets)
                .map(|(share, set)| SetPlan::new(set, share, data))
                .collect(),
        })
    }

    pub fn print(&self) {
        let share = self.target_tokens as f64 / self.counted_tokens.max(1) as f64 * 100.0;
        let of = if self.is_sample { "a sample of the files, which are fetched while the run trains: " } else { "" };
        out!("\n  {of}{} documents, {} tokens", self.documents, self.tokens);
        match self.counted_tokens {
            0 => out!("  {} prompts to train on; tokens of completions contribute to the loss", self.rows),
            _ => out!(
                "  {:.1} {}; {share:.1} % of their tokens, padding excluded, contribute to the loss",
                self.rows,
                if self.is_sample { "rows of the sample" } else { "rows an epoch" }
            ),
        }
        self.fit.iter().for_each(|fit| out!("  {fit}"));
        for SetPlan { name, documents, tokens, share, passes } in self.sets.iter().filter(|set| !set.name.is_empty()) {
            let passes = if self.is_sample { String::new() } else { format!(", read {passes:.3} times in an epoch") };
            out!(
                "  {name}: {:.2} % of the tokens of a run; {documents} documents, {tokens} tokens{passes}",
                share * 100.0
            );
        }
        for (i, row) in self.shown.iter().enumerate() {
            out!("\n  Row {}", i + 1);
            for document in row.chunk_by(|_, next| !next.starts) {
                let parts: Vec<_> = document.iter().map(|part| (part.text.as_str(), part.learned)).collect();
                print_marked(&parts);
            }
        }
    }
}
