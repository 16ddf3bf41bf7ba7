//! Examples of classifiers and embedding models: the rows of their texts, and their order.
//!
//! Each text has a row of its own. The only target of a row is the last token that is not padding, or the first token if an encoder reads the row, as
//! transformers reads the score of a text there. The target says which row of the batch it belongs to, so losses find the labels of the row.

use std::borrow::Cow;

use ottava_tensor::ops::IGNORE_INDEX;
use serde_json::{Map, Value};

pub use crate::example_records::{LABEL, LENGTHS};
use crate::loader::{Batch, RowShare};
use crate::mixture::{DataState, TrainingData};
use crate::prompts::{ColumnCheck, Prompt, PromptLoader, PromptSet};
use crate::shards::TokenDataset;
use crate::tokenizer::Tokenizer;
use ottava_common::{Error, Result};

/// An example with its columns.
#[derive(Clone, Debug, PartialEq)]
pub struct Example {
    /// The tokens of each text; at least one text, and each has at least one token.
    pub texts: Vec<Vec<u32>>,
    /// The columns, such as [`LABEL`].
    pub columns: Map<String, Value>,
}

impl Example {
    /// Reads example `document` of `dataset`. Errors with [`Error::Data`] if a file can no longer be read. Panics if the records are not examples.
    pub fn read(dataset: &TokenDataset, document: usize) -> Result<Example> {
        Example::new(dataset.document(document)?, dataset.columns(document)?, document)
    }

    fn of(Prompt { tokens, columns, document, .. }: Prompt) -> Result<Example> {
        Example::new(tokens, columns, document)
    }

    fn new(tokens: Vec<u32>, columns: Map<String, Value>, document: usize) -> Result<Example> {
        let lengths = columns.get(LENGTHS).and_then(Value::as_array).into_iter().flatten();
        let mut rest = tokens.as_slice();
        let mut texts = Vec::new();
        for length in lengths.filter_map(Value::as_u64) {
            let Some((text, others)) = rest.split_at_checked(length as usize) else { break };
            texts.push(text.to_vec());
            rest = others;
        }
        match rest.is_empty() && texts.iter().all(|text| !text.is_empty()) {
            true => Ok(Example { texts, columns }),
            false => Err(Error::Data(format!(
                "example {} of the prepared data is damaged: the lengths of its texts are not the number of its tokens; delete the folder of tokens to \
                 prepare it again",
                document + 1
            ))),
        }
    }
}

/// An endless stream of examples. Each epoch has another order.
pub struct ExampleLoader(PromptLoader);

impl ExampleLoader {
    /// Starts at `state`, which must be the same on all ranks. Examples of the sets of `data` are mixed by their shares.
    ///
    /// Errors with [`Error::Checkpoint`] if the state does not fit the data, and with [`Error::Data`] if a file can no longer be read.
    pub fn new(data: &TrainingData, state: &DataState, share: RowShare) -> Result<ExampleLoader> {
        let sets = data.sets.iter().map(|set| {
            // Long texts are truncated, and not left out.
            let mut examples = PromptSet::new(&set.name, set.dataset.clone(), &set.split, usize::MAX)?;
            examples.share = set.share;
            Ok(examples)
        });
        Ok(ExampleLoader(PromptLoader::new(sets.collect::<Result<_>>()?, state, share)?))
    }

    /// Returns the next `count` examples of this rank; ranks take examples in turns. All ranks must request the same numbers of examples.
    ///
    /// Errors with [`Error::Data`] if a file can no longer be read.
    pub fn next(&mut self, count: usize) -> Result<Vec<Example>> {
        self.0.next(count)?.into_iter().map(Example::of).collect()
    }

    /// Returns the number of training examples of all data sets.
    pub fn train_len(&self) -> usize {
        self.0.sets().iter().map(PromptSet::train_len).sum()
    }

    /// Calls `check` with the columns of each example, also of the examples for validation.
    ///
    /// Errors with [`Error::Data`], with the reason that `check` gives and the number of the example.
    pub fn check(&self, check: &mut ColumnCheck) -> Result<()> {
        self.0.sets().iter().try_for_each(|set| set.check(check))
    }

    /// Returns the position of the next example of all ranks.
    pub fn state(&self) -> DataState {
        self.0.state()
    }

    /// Returns the number of examples for validation.
    pub fn validation_len(&self) -> usize {
        self.0.validation_len()
    }

    /// Returns example number `i` for validation. Has the errors of [`ExampleLoader::next`].
    pub fn validation(&self, i: usize) -> Result<Example> {
        Example::of(self.0.validation(i)?)
    }
}

/// The form of the rows of texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExampleRows {
    /// The number of tokens of a row. The end of a longer text is cut off, before the tokens `after` it.
    pub seq_len: usize,
    /// The tokens that the tokenizer adds after a text.
    pub after: Vec<u32>,
    /// The token that fills rows.
    pub end: u32,
    /// The padding token, at which no score is read; `None` if the last token counts in any case.
    pub padding: Option<i64>,
    /// Whether an encoder reads the rows: the score of a text is read at its first token, and padding is a document of its own, which the tokens of a
    /// text do not see.
    pub of_encoder: bool,
}

impl ExampleRows {
    /// Returns rows of `seq_len` tokens for the texts of `tokenizer`. `padding` is the padding token of the model.
    pub fn new(tokenizer: &Tokenizer, seq_len: usize, padding: Option<i64>) -> ExampleRows {
        let (after, end) = (tokenizer.after_ids().to_vec(), tokenizer.eos_id().unwrap_or(0));
        ExampleRows { seq_len, after, end, padding, of_encoder: false }
    }

    /// Returns the same rows for an encoder, if `is_encoder`.
    pub fn for_encoder(self, is_encoder: bool) -> ExampleRows {
        ExampleRows { of_encoder: is_encoder, ..self }
    }

    /// Returns the tokens of `text` that fit into a row.
    fn fitted<'t>(&self, text: &'t [u32]) -> Cow<'t, [u32]> {
        match text.len() <= self.seq_len || !text.ends_with(&self.after) || self.after.len() >= self.seq_len {
            true => Cow::Borrowed(&text[..text.len().min(self.seq_len)]),
            false => Cow::Owned([&text[..self.seq_len - self.after.len()], &self.after].concat()),
        }
    }

    /// Returns a batch of `rows` rows, one for each of `texts`. Rows without a text have no target.
    ///
    /// The target of a text is the number of its row, at the last token that is not padding, or at the first token for an encoder. Panics if there are more texts than rows, which the caller
    /// must exclude.
    pub fn batch<'t>(&self, texts: impl IntoIterator<Item = &'t Vec<u32>>, rows: usize) -> Batch {
        let &ExampleRows { seq_len, end, padding, .. } = self;
        let mut batch = Batch::whole(vec![end as i32; rows * seq_len], vec![IGNORE_INDEX; rows * seq_len], rows);
        batch.padding = vec![seq_len; rows];
        for (row, text) in texts.into_iter().enumerate() {
            let (start, text) = (row * seq_len, self.fitted(text));
            for (place, &id) in batch.inputs[start..].iter_mut().zip(&*text) {
                *place = id as i32;
            }
            let last = text.iter().rposition(|&id| padding != Some(i64::from(id))).unwrap_or(0);
            batch.targets[start + if self.of_encoder { 0 } else { last }] = row as i32;
            batch.padding[row] = seq_len - text.len();
        }
        if self.of_encoder {
            let lengths = batch.padding.iter().flat_map(|&padding| [seq_len - padding, padding]);
            batch.documents = Some(lengths.filter(|&length| length > 0).collect());
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_target_of_a_row_is_its_last_token_that_is_not_padding() {
        let rows = ExampleRows { seq_len: 4, after: Vec::new(), end: 9, padding: Some(7), of_encoder: false };
        let batch = rows.batch(&[vec![1, 2], vec![3, 7, 7], vec![1, 2, 3, 4, 5]], 4);
        let no = IGNORE_INDEX;
        assert_eq!(batch.inputs, [1, 2, 9, 9, 3, 7, 7, 9, 1, 2, 3, 4, 9, 9, 9, 9]);
        assert_eq!(batch.targets, [no, 0, no, no, 1, no, no, no, no, no, no, 2, no, no, no, no]);
        assert_eq!(batch.padding, [2, 1, 0, 4]);
        let whole = ExampleRows { padding: None, ..rows.clone() }.batch(&[vec![3, 7, 7]], 1);
        assert_eq!(whole.targets, [no, no, 0, no]);
        let ended =
            ExampleRows { after: vec![8], ..rows }.batch(&[vec![1, 2, 3, 4, 8], vec![1, 8], vec![1, 2, 3, 4, 5]], 3);
        assert_eq!(ended.inputs, [1, 2, 3, 8, 1, 8, 9, 9, 1, 2, 3, 4]);
    }

    #[test]
    fn rows_of_an_encoder_have_their_target_first_and_padding_apart() {
        let rows = ExampleRows { seq_len: 4, after: Vec::new(), end: 0, padding: Some(0), of_encoder: true };
        let (batch, no) = (rows.batch(&[vec![1, 2], vec![3, 4, 5, 6]], 3), IGNORE_INDEX);
        assert_eq!(batch.targets, [0, no, no, no, 1, no, no, no, no, no, no, no]);
        assert_eq!(batch.documents.unwrap(), [2, 2, 4, 4]);
    }

    #[test]
    fn texts_are_divided_by_their_lengths() {
        let prompt = |lengths: Value| Prompt {
            set: String::new(),
            document: 4,
            tokens: vec![1, 2, 3],
            columns: json!({"lengths": lengths}).as_object().unwrap().clone(),
        };
        assert_eq!(Example::of(prompt(json!([1, 2]))).unwrap().texts, [vec![1], vec![2, 3]]);
        for lengths in [json!([1]), json!([4]), json!([3, 0]), json!(null)] {
            let error = Example::of(prompt(lengths)).unwrap_err().to_string();
            assert!(error.starts_with("example 5 of the prepared data is damaged"), "{error}");
        }
    }
}
