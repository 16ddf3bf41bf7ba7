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
    /// Its text.
    pub text: String,
    /// Whether its tokens contribute to the loss.
    pub learned: bool,
    /// Whether a document begins with it.
    pub starts: bool,
}

/// The first `rows` rows that a run trains on. The first token of a document, which nothing in its row predicts, counts as not learned, and
/// padding is left out.
pub fn preview(
    sets: &[DataSet],
    layout: RowLayout,
    seed: u64,
    tokenizer: &Tokenizer,
    rows: usize,
) -> Result<Vec<Vec<Segment>>> {
    // Edges are shown whether attention sees them or not.
    let layout = RowLayout { document_mask: true, ..layout };
    let mut loader = BatchLoader::new(sets, layout, &DataState::start(sets, seed), RowShare::ALL)?;
    (0..rows).map(|_| row(&mut loader, tokenizer, layout.packing != Packing::Wrapped)).collect()
}

/// The first `count` prompts that a run writes completions to, in the form of [`preview`]. No token of a prompt contributes to the loss.
///
/// Errors as [`PromptLoader::next`].
pub fn preview_prompts(prompts: &mut PromptLoader, tokenizer: &Tokenizer, count: usize) -> Result<Vec<Vec<Segment>>> {
    let segment = |prompt: Prompt| {
        let text = tokenizer.decode(&prompt.tokens)?;
        Ok(vec![Segment { text, learned: false, starts: true }])
    };
    prompts.next(count)?.into_iter().map(segment).collect()
}

/// Tokens of documents in the first `rows` rows that a run trains on, and how many of them contribute to the loss.
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

/// The documents of the next row. The last target of one belongs to it if documents are `whole`, and else to the next one.
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
            // Padding, or a document whose targets were all cut off.
            break;
        }
        // A part keeps the space before its first word.
        let mut detokenizer = Detokenizer::default();
        for (i, group) in tokens.chunk_by(|a, b| a.1 == b.1).enumerate() {
            let texts = group.iter().map(|&(id, _)| Ok(detokenizer.push(tokenizer, id as u32)?.text));
            let text = texts.collect::<Result<String>>()? + detokenizer.finish();
            parts.push(Segment { text, learned: group[0].1, starts: i == 0 });
        }
    }
    Ok(parts)
}
