//! The log-likelihoods of sequences.

use crate::evaluate::for_each_round;
use crate::step::host::values;
use ottava_common::error::Result;
use ottava_data::Batch;
use ottava_models::Decoder;
use ottava_parallel::Partition;
use ottava_recipe::context::Sequences;
use ottava_recipe::mode::StepPrecision;
use ottava_tasks::Row;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::IGNORE_INDEX;
use ottava_tensor::{QuantizedTensor, Tensor};

/// The sizes of batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSizes {
    /// The maximum number of tokens of a batch. A batch has at least one row.
    pub tokens: usize,
    /// The positions of the model. No row reads more tokens.
    pub max_length: usize,
}

/// Returns the log-likelihood, in nats, of the scored tokens of each of `rows`, in their order and on all ranks. After each round, calls `progress` with
/// the number of tokens that were read so far.
///
/// All ranks of `partition` call it with the same rows. Rows of similar lengths are in one batch. Batches do not depend on the number of data-parallel
/// ranks, so the results do not either.
///
/// Errors with [`Error::Cancelled`](ottava_common::Error::Cancelled) on all ranks after a request to any of them to stop.
pub fn log_likelihoods(
    model: &mut Decoder,
    rows: &[Row],
    sizes: BatchSizes,
    precision: StepPrecision,
    partition: &Partition,
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<f64>> {
    let multiple = QuantizedTensor::PAD * partition.ranks().place(Axis::Context).ranks;
    let batches = batches(rows, sizes, multiple);
    let most = batches.iter().map(Vec::len).max().unwrap_or(0);
    let numbers = |losses: Option<&Tensor>, sequences: &Sequences, batch: &Batch| {
        let mut sums = vec![0.0; most];
        let Some(losses) = losses else { return Ok(sums) };
        let row_of_token: Vec<usize> = (0..batch.inputs.len()).map(|token| token / batch.seq_len).collect();
        let own = sequences.own(&batch.targets).into_iter().zip(sequences.own(&row_of_token));
        for ((target, row), loss) in own.zip(values(losses)?) {
            if target != IGNORE_INDEX {
                sums[row] -= loss;
            }
        }
        Ok(sums)
    };
    let mut found = vec![0.0; rows.len()];
    let (mut places, mut done) = (batches.iter(), 0);
    let made = batches.iter().map(|of_batch| Ok(batch(rows, of_batch, sizes, multiple)));
    for_each_round(model, made, precision, partition, &numbers, &mut |of_turns| {
        for (of_ranks, of_batch) in of_turns.iter().zip(places.by_ref()) {
            for (row, &place) in of_batch.iter().enumerate() {
                found[place] = of_ranks.iter().map(|of_rank| of_rank[row]).sum();
            }
            done += of_batch.iter().map(|&place| rows[place].tokens.len() as u64 - 1).sum::<u64>();
        }
        progress(done);
    })?;
    Ok(found)
}

/// Returns the number of tokens of the rows of a batch: the tokens that `longest` reads, rounded up to a `multiple`.
fn width(longest: &Row, sizes: BatchSizes, multiple: usize) -> usize {
    (longest.tokens.len() - 1).next_multiple_of(multiple).min(sizes.max_length)
}

/// Divides the places of `rows` among batches, longest rows first.
fn batches(rows: &[Row], sizes: BatchSizes, multiple: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by_key(|&place| std::cmp::Reverse(rows[place].tokens.len()));
    let (mut all, mut rest) = (Vec::new(), order.as_slice());
    while let Some(&longest) = rest.first() {
        let count = (sizes.tokens / width(&rows[longest], sizes, multiple)).clamp(1, rest.len());
        all.push(rest[..count].to_vec());
        rest = &rest[count..];
    }
    all
}

/// Makes the batch of the rows at `places`. Padding repeats the last token that a row reads.
fn batch(rows: &[Row], places: &[usize], sizes: BatchSizes, multiple: usize) -> Batch {
    let seq_len = width(&rows[places[0]], sizes, multiple);
    let (mut inputs, mut targets, mut padding) = (Vec::new(), Vec::new(), Vec::new());
    for Row { tokens, scored } in places.iter().map(|&place| &rows[place]) {
        let ids: Vec<i32> = tokens.iter().map(|&id| id as i32).collect();
        let (read, start) = (ids.len() - 1, inputs.len());
        inputs.extend_from_slice(&ids[..read]);
        inputs.resize(start + seq_len, ids[read - 1]);
        targets.resize(start + read - scored, IGNORE_INDEX);
        targets.extend_from_slice(&ids[ids.len() - scored..]);
        targets.resize(start + seq_len, IGNORE_INDEX);
        padding.push(seq_len - read);
    }
    Batch { inputs, targets, rows: places.len(), seq_len, documents: None, padding }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_have_all_rows_once_and_score_their_last_tokens() {
        let row = |length: u32, scored| Row { tokens: (0..length).collect(), scored };
        let rows = [row(3, 1), row(30, 2), row(18, 17), row(17, 1), row(2, 1)];
        let sizes = BatchSizes { tokens: 40, max_length: 40 };
        let divided = batches(&rows, sizes, 16);
        assert_eq!(divided, [vec![1], vec![2], vec![3, 0], vec![4]]);
        let of = |at: usize| batch(&rows, &divided[at], sizes, 16);
        assert_eq!((of(0).seq_len, of(0).padding.clone(), of(1).seq_len), (32, vec![3], 32));
        let third = of(2);
        assert_eq!((third.rows, third.seq_len, &third.padding), (2, 16, &vec![0, 14]));
        assert_eq!(
            (third.inputs[16..19].to_vec(), third.targets[16..19].to_vec()),
            (vec![0, 1, 1], vec![IGNORE_INDEX, 2, IGNORE_INDEX])
        );
        assert_eq!(of(1).targets[..18], [(1..18).collect::<Vec<i32>>(), vec![IGNORE_INDEX]].concat());
        // A row is never wider than the positions of the model.
        assert_eq!(batch(&rows, &[1], BatchSizes { max_length: 29, ..sizes }, 16).seq_len, 29);
    }
}
