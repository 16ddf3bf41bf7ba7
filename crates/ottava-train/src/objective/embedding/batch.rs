//! The rows of examples, and the weights of their tokens.

use super::loss::Contrast;
use ottava_common::error::Result;
use ottava_data::{Batch, Example, ExampleRows};
use ottava_recipe::context::Sequences;
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_settings::EmbeddingPooling;
use ottava_tensor::Device;

/// Returns the rows of `examples`: all anchors, then all positive texts, and so on. If there are fewer than `per_batch`, the first example is repeated.
pub(super) fn batch_of(examples: &[&Example], per_batch: usize, how: &Contrast, rows: &ExampleRows) -> Batch {
    let filled = || examples.iter().chain(std::iter::repeat(&examples[0])).take(per_batch);
    let texts: Vec<&Vec<u32>> =
        (0..how.texts).flat_map(|text| filled().map(move |example| &example.texts[text])).collect();
    let count = texts.len();
    rows.batch(texts, count)
}

/// Returns the weights of the tokens of `batch` in the embeddings of its rows, `[T, R]`: of all tokens that the rank at `place` has, followed by zeros.
pub fn weights_of(batch: &Batch, pooling: EmbeddingPooling, place: ShardPlace) -> Result<Vec<f64>> {
    let (rows, seq_len) = (batch.rows, batch.seq_len);
    let weight = |token: usize| {
        let (row, at) = (token / seq_len, token % seq_len);
        let length = seq_len - batch.padding[row];
        match pooling {
            EmbeddingPooling::Mean if at < length => 1.0 / length as f64,
            EmbeddingPooling::Last if at + 1 == length => 1.0,
            EmbeddingPooling::Cls if at == 0 && length > 0 => 1.0,
            EmbeddingPooling::Mean | EmbeddingPooling::Last | EmbeddingPooling::Cls => 0.0,
        }
    };
    let numbers: Vec<i32> = (0..(rows * seq_len) as i32).collect();
    let own = Sequences::divided(&Device::Cpu, rows, seq_len, place)?.own(&numbers);
    let mut weights = vec![0.0; rows * seq_len * rows];
    for (at, token) in own.into_iter().enumerate() {
        weights[at * rows + token as usize / seq_len] = weight(token as usize);
    }
    Ok(weights)
}
