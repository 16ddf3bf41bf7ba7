//! The number of steps that small data give, and batches that give more steps.

use crate::RunConfig;
use ottava_data::{Packing, TrainingData};

/// The number of steps below which a run teaches almost nothing.
const FEW: u64 = 10;

/// The number of steps that a first run on small data has at least, if the data allow it.
const ENOUGH: f64 = 30.0;

/// The smallest number of tokens of a row that is chosen for small data.
const SHORTEST: usize = 128;

/// The sizes of the batches of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Batches {
    /// The value of `data.max_length`.
    pub max_length: usize,
    /// The value of `training.per_device_train_batch_size`.
    pub rows: usize,
    /// The value of `training.gradient_accumulation_steps`.
    pub micro_batches: usize,
}

/// The documents of a run, as rows of `max_length` tokens hold them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counted {
    /// The number of documents.
    pub documents: u64,
    /// The number of their tokens.
    pub tokens: u64,
    /// The number of tokens of an epoch, after documents are cut to `max_length`.
    pub in_rows: u64,
    /// The number of tokens of the longest document.
    pub longest: usize,
    /// The number of rows of an epoch, if each document has a row of its own; `None` if documents share rows.
    pub own_rows: Option<f64>,
}

impl Counted {
    /// Counts the documents of `data`.
    pub fn of(data: &TrainingData) -> ottava_common::Result<Counted> {
        let (mut documents, mut tokens, mut in_rows, mut longest) = (0, 0, 0, 0);
        for set in &data.sets {
            documents += set.dataset.len() as u64;
            tokens += set.dataset.total_tokens();
            in_rows += set.statistics.tokens;
            for i in 0..set.dataset.len() {
                longest = longest.max(set.dataset.document_len(i)?);
            }
        }
        let own_rows = (data.layout.packing == Packing::None).then(|| data.rows());
        Ok(Counted { documents, tokens, in_rows, longest, own_rows })
    }

    fn rows(&self, max_length: usize) -> f64 {
        self.own_rows.unwrap_or(self.in_rows as f64 / max_length as f64)
    }
}

impl Batches {
    /// Returns the largest batches up to these that give [`ENOUGH`] steps in `epochs` epochs; the smallest batches if none give as many. First a step
    /// gets fewer sequences, then a row fewer tokens, but not fewer than the longest document has.
    pub fn for_data(self, counted: &Counted, epochs: f64) -> Batches {
        let is_enough = |batches: &Batches| {
            let sequences = (batches.rows * batches.micro_batches) as f64;
            counted.rows(batches.max_length) * epochs / sequences >= ENOUGH
        };
        let with = |rows, micro_batches| Batches { rows, micro_batches, ..self };
        let (mut rows, mut micro_batches) = (self.rows, self.micro_batches);
        while !is_enough(&with(rows, micro_batches)) && rows * micro_batches > 1 {
            (rows, micro_batches) =
                if micro_batches > 1 { (rows, micro_batches / 2) } else { (rows / 2, micro_batches) };
        }
        let mut chosen = with(rows, micro_batches);
        let shortest = counted.longest.max(SHORTEST);
        while !is_enough(&chosen) && counted.own_rows.is_none() && chosen.max_length / 2 >= shortest {
            chosen.max_length /= 2;
        }
        chosen
    }
}

impl RunConfig {
    /// Returns a sentence with settings for more steps, if the epochs of the run have so few steps that it learns almost nothing. `examples` is the number of
    /// rows or pairs of an epoch, and `steps` the number of steps of all epochs.
    pub fn few_steps(&self, examples: f64, steps: u64) -> Option<String> {
        let (training, ranks) = (&self.training, self.parallel.data.max(1));
        if training.max_steps.is_some() || steps >= FEW || self.reinforcement.is_on() {
            return None;
        }
        let all = examples * training.num_train_epochs;
        let rows = (all / ENOUGH / ranks as f64).floor().max(1.0);
        let rows = (rows as usize).min(training.per_device_train_batch_size * training.gradient_accumulation_steps);
        let of_rows = all / (rows * ranks) as f64;
        let mut settings = format!("--set per_device_train_batch_size={rows} --set gradient_accumulation_steps=1");
        if of_rows < FEW as f64 {
            let epochs = (training.num_train_epochs * ENOUGH / of_rows.max(1e-3)).ceil();
            settings += &format!(" --set num_train_epochs={epochs:.1}");
        }
        let (sequences, epochs) = (training.sequences(), training.num_train_epochs);
        Some(format!(
            "the run has {steps} step{}, which teaches almost nothing: a step takes {sequences} sequences, and {epochs} epochs of the data have {all:.0}. \
             For more steps, add {settings}, or more data",
            if steps == 1 { "" } else { "s" },
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TrainingConfig;

    #[test]
    fn small_data_get_small_batches() {
        let most = Batches { max_length: 2048, rows: 4, micro_batches: 4 };
        let of = |max_length, rows, micro_batches| Batches { max_length, rows, micro_batches };
        let counted = |tokens, longest| Counted { documents: 100, tokens, in_rows: tokens, longest, own_rows: None };
        for (counted, expected) in [
            (counted(10_000_000, 3000), most),
            // 78 rows an epoch: four sequences a step make 58 steps, and eight make 29.
            (counted(160_000, 500), of(2048, 4, 1)),
            (counted(13_860, 300), of(1024, 1, 1)),
            (counted(2479, 130), of(256, 1, 1)),
            // Rows are not shorter than the longest document.
            (counted(2479, 1500), of(2048, 1, 1)),
            (Counted { own_rows: Some(25.0), ..counted(2479, 60) }, of(2048, 2, 1)),
        ] {
            assert_eq!(most.for_data(&counted, 3.0), expected, "{counted:?}");
        }
        let few = Batches { max_length: 64, rows: 4, micro_batches: 4 };
        assert_eq!(few.for_data(&counted(10, 5), 1.0), of(64, 1, 1));
    }

    #[test]
    fn a_run_of_few_steps_is_told_the_settings_for_more() {
        let mut config = RunConfig {
            training: TrainingConfig { num_train_epochs: 3.0, ..Default::default() },
            ..Default::default()
        };
        config.training.per_device_train_batch_size = 4;
        config.training.gradient_accumulation_steps = 4;
        assert_eq!(config.few_steps(60.0, 11), None);
        let told = config.few_steps(30.0, 5).unwrap();
        assert!(
            told.contains("5 steps") && told.contains("a step takes 16 sequences, and 3 epochs of the data have 90"),
            "{told}"
        );
        assert!(told.contains("--set per_device_train_batch_size=3 --set gradient_accumulation_steps=1,"), "{told}");
        let told = config.few_steps(2.0, 1).unwrap();
        let words = "per_device_train_batch_size=1 --set gradient_accumulation_steps=1 --set num_train_epochs=15.0";
        assert!(told.contains("has 1 step,") && told.contains(words), "{told}");
        config.parallel.data = 2;
        assert!(config.few_steps(60.0, 5).unwrap().contains("per_device_train_batch_size=3 "), "over two ranks");
        config.training.max_steps = Some(2);
        assert_eq!(config.few_steps(30.0, 2), None, "the user has chosen the number");
    }
}
