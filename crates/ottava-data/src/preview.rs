//! The first rows of a run, as text.

use ottava_tensor::ops::IGNORE_INDEX;
use serde::Serialize;

use crate::detokenizer::Detokenizer;
use crate::loader::RowShare;
use crate::mixture::{BatchLoader, DataSet, DataState};
use crate::packing::{Packing, RowLayout};
use crate::prompts::{Prompt, PromptLoader};
use crate::tokenizer::Tokenizer;
use ottava_common::{Result, interrupt};

/// A part of a document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Segment {
    /// The text of the part.
    pub text: String,
    /// Whether the tokens of the part contribute to the loss.
    pub learned: bool,
    /// Whether the part is the beginning of a document.
    pub starts: bool,
}

/// Returns the first `rows` rows that a run trains on, without padding. The first token of a document counts as not trained on, because no token of
/// its row predicts it.
pub fn preview(
    sets: &[DataSet],
    layout: RowLayout,
    seed: u64,
    tokenizer: &Tokenizer,
    rows: usize,
) -> Result<Vec<Vec<Segment>>> {
    // The edges of documents are shown even if attention crosses them.
    let layout = RowLayout { document_mask: true, ..layout };
    let mut loader = BatchLoader::new(sets, layout, &DataState::start(sets, seed), RowShare::ALL)?;
    (0..rows).map(|_| row(&mut loader, tokenizer, layout.packing != Packing::Wrapped)).collect()
}

/// Returns the first `count` prompts of a run of reinforcement learning, in the form of [`preview`]. No token of a prompt contributes to the loss.
///
/// Errors as [`PromptLoader::next`].
pub fn preview_prompts(prompts: &mut PromptLoader, tokenizer: &Tokenizer, count: usize) -> Result<Vec<Vec<Segment>>> {
    let segment = |prompt: Prompt| {
        let text = tokenizer.decode(&prompt.tokens)?;
        Ok(vec![Segment { text, learned: false, starts: true }])
    };
    prompts.next(count)?.into_iter().map(segment).collect()
}

/// Counts the tokens of documents in the first `rows` rows that a run trains on, and the tokens of them that contribute to the loss.
pub fn count_targets(sets: &[DataSet], layout: RowLayout, seed: u64, rows: u64) -> Result<[u64; 2]> {
    let mut loader = BatchLoader::new(sets, layout, &DataState::start(sets, seed), RowShare::ALL)?;
    let mut counts = [0, 0];
    for _ in 0..rows {
        interrupt::check("counting targets")?;
        let batch = loader.next_batch(1)?;
        counts[0] += (batch.inputs.len() - batch.padding_tokens()) as u64;
        counts[1] += batch.targets.iter().filter(|&&target| target != IGNORE_INDEX).count() as u64;
    }
    Ok(counts)
}

/// Returns the documents of the next row. If documents are `whole`, the last target of a document belongs to it; otherwise, to the next document.
fn row(loader: &mut BatchLoader, tokenizer: &Tokenizer, whole: bool) -> Result<Vec<Segment>> {
    let batch = loader.next_batch(1)?;
    let (mut at, mut parts) = (0, Vec::new());
    for length in batch.documents.unwrap_or_default() {
        let (inputs, targets) = (&batch.inputs[at..at + length], &batch.targets[at..at + length]);
        at += length;
        let last = targets[length - 1];
        let mut tokens = vec![(inputs[0], false)];
        tokens.extend(inputs[1..].iter().zip(targets).map(|(&id, &target)| (id, target != IGNORE_INDEX)));
        if whole && last != IGNORE_INDEX {
            tokens.push((last, true));
        }
        if at == batch.inputs.len() && targets.iter().all(|&target| target == IGNORE_INDEX) {
            // The rest is padding, or a document whose targets were all truncated.
            break;
        }
        // Each document gets its own detokenizer; its later parts keep the space before their first word.
        let mut detokenizer = Detokenizer::default();
        for (i, group) in tokens.chunk_by(|a, b| a.1 == b.1).enumerate() {
            let texts = group.iter().map(|&(id, _)| Ok(detokenizer.push(tokenizer, id as u32)?.text));
            let text = texts.collect::<Result<String>>()? + detokenizer.finish();
            parts.push(Segment { text, learned: group[0].1, starts: i == 0 });
        }
    }
    Ok(parts)
}
