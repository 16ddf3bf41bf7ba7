//! Draws a token from each row of logits.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use crate::ops::dispatch::dispatch;
use crate::{DType, Device, Result, Staging, Tensor};
use bytemuck::{Pod, Zeroable};
use std::f64::consts::LOG2_E;

/// The logarithm of the weight of the likeliest token: its weight is `2^ONE`. Sums of weights of up to 2²³ columns are exact in 64 bits in any order.
const ONE: u32 = 40;

/// How a token is drawn. The steps are, in this order: [`Adjustment`]s of logits, temperature, min-p, top-k, top-p, one draw.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// The divisor of logits. With 0, the token with the largest logit is drawn.
    pub temperature: f64,
    /// The number of likeliest tokens that can be drawn, or `None` for all. Among equal tokens, smaller ids are preferred.
    pub top_k: Option<usize>,
    /// The probability of the tokens that can be drawn: the fewest likeliest tokens that together have this probability. 1 for all.
    pub top_p: f64,
    /// The minimum probability of tokens that can be drawn, relative to the likeliest token's probability (0.1: at least a tenth). 0 for all.
    pub min_p: f64,
    /// The position of the draw in the cumulated weights in the order of ids: a uniform number in units of 2⁻⁶⁴.
    pub uniform: u64,
    /// The divisor of positive logits, and the factor of other logits. [`Adjustment::count`] tells to which tokens it applies.
    pub repetition_penalty: f32,
    /// The term subtracted from logits. [`Adjustment::count`] tells to which tokens it applies.
    pub presence_penalty: f32,
    /// The term subtracted from logits once for each count.
    pub frequency_penalty: f32,
    /// The changes of logits, at most one per token.
    pub adjustments: Vec<Adjustment>,
}

/// The distribution that log-probabilities of drawn tokens are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distribution {
    /// The softmax of the unchanged logits.
    Model,
    /// The distribution of the draw: after adjustments, temperature, min-p, top-k and top-p. With temperature 0, which takes the largest logit, the
    /// softmax of the adjusted logits.
    Draw,
}

/// A change of one logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adjustment {
    /// The token.
    pub token: u32,
    /// The number of times that the token was drawn. With 0, only the repetition penalty applies; from 1 on, all penalties apply. `None` for no
    /// penalty.
    pub count: Option<u32>,
    /// The term added after the penalties. Minus infinity excludes the token.
    pub bias: f32,
}

impl Draw {
    /// Draws the likeliest token.
    pub const GREEDY: Draw = Draw {
        temperature: 0.0,
        top_k: None,
        top_p: 1.0,
        min_p: 0.0,
        uniform: 0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        adjustments: Vec::new(),
    };

    /// Returns the parameters of the row of this draw. Its adjustments are numbers `start` to `end`, exclusive.
    fn of_row(&self, start: usize, end: usize) -> RowDraw {
        let is_greedy = self.temperature == 0.0;
        let scale = if is_greedy { 1.0 } else { (LOG2_E / self.temperature).min(f64::from(f32::MAX)) };
        let top_k = if is_greedy { 1 } else { self.top_k.unwrap_or(0) };
        RowDraw {
            uniform: self.uniform,
            top_p: if self.top_p >= 1.0 { u64::MAX } else { (self.top_p * 2f64.powi(64)) as u64 },
            least: (self.min_p * 2f64.powi(ONE as i32)).ceil() as u64,
            top_k: u32::try_from(top_k).unwrap_or(0),
            scale: scale as f32,
            repetition: self.repetition_penalty,
            presence: self.presence_penalty,
            frequency: self.frequency_penalty,
            start: start as u32,
            end: end as u32,
            greedy: u32::from(is_greedy),
        }
    }

    /// Its changes of logits of a vocabulary of `columns` tokens.
    fn changes(&self, columns: usize) -> impl Iterator<Item = Change> {
        let known = self.adjustments.iter().filter(move |adjustment| (adjustment.token as usize) < columns);
        known.map(|&Adjustment { token, count, bias }| Change {
            token,
            count: count.map_or(-1, |count| count.min(i32::MAX as u32) as i32),
            bias,
            unused: 0,
        })
    }

    /// The logits `[V]` of the distribution of the draw ([`Distribution::Draw`]) from F32 `logits` `[V]`: minus infinity for tokens that
    /// cannot be drawn. For hosts, which look for the likeliest tokens.
    pub fn processed(&self, logits: &[f32]) -> Vec<f32> {
        let changes: Vec<Change> = self.changes(logits.len()).collect();
        cpu::processed(logits, &self.of_row(0, changes.len()), &changes)
    }
}

/// The parameters of a row, with the layout of the struct of the same name in `sample.cu`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RowDraw {
    uniform: u64,
    /// The share in units of 2⁻⁶⁴. All bits are set for 1.
    top_p: u64,
    /// The smallest weight that min-p leaves.
    least: u64,
    /// The number of tokens, or 0 for all.
    top_k: u32,
    /// The factor of logits. The power of two of the product is the weight.
    scale: f32,
    repetition: f32,
    presence: f32,
    frequency: f32,
    /// The first adjustment of the row.
    start: u32,
    end: u32,
    /// 1 for temperature 0.
    greedy: u32,
}

/// A change of a logit, with the layout of the struct of the same name in `sample.cu`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Change {
    token: u32,
    /// The count, or -1 for no penalty.
    count: i32,
    bias: f32,
    unused: u32,
}

/// The draws of a batch in device memory. A captured graph reads the draws that were written last.
pub struct Draws {
    words: Tensor,            /* I64: a `RowDraw` for each row, then all `Change`s */
    adjusted: Option<Tensor>, /* F32 [R, V]: logits of rows with adjustments */
    shape: [usize; 2],
    adjustments: usize,
}

impl Draws {
    /// Allocates room for draws from logits of `shape` `[R, V]`. All rows together have at most `adjustments` adjustments.
    pub fn new(device: &Device, shape: [usize; 2], adjustments: usize) -> Result<Draws> {
        let bytes = shape[0] * size_of::<RowDraw>() + adjustments * size_of::<Change>();
        let words = Tensor::zeros(device, &[bytes / 8], DType::I64)?;
        let adjusted = (adjustments > 0).then(|| Tensor::empty(device, &shape, DType::F32)).transpose()?;
        Ok(Draws { words, adjusted, shape, adjustments })
    }

    /// Writes a draw for each row, in one copy. Adjustments of tokens beyond the logits are left out.
    ///
    /// Panics if the number of draws is not the number of rows, or if there is no room for the adjustments.
    pub fn set(&mut self, draws: &[Draw]) -> Result<()> {
        let bytes = self.bytes(draws);
        self.words.write_bytes(&bytes)
    }

    /// Writes draws as [`Draws::set`] does, after the work that was enqueued before, and does not wait for this work.
    pub fn set_by(&mut self, staging: &mut Staging, draws: &[Draw]) -> Result<()> {
        let bytes = self.bytes(draws);
        staging.write(&mut self.words, &bytes)
    }

    /// Returns the bytes of the words for these draws.
    fn bytes(&self, draws: &[Draw]) -> Vec<u8> {
        let [rows, columns] = self.shape;
        assert_eq!(draws.len(), rows, "a draw for each row");
        let (mut of_rows, mut changes) = (Vec::with_capacity(rows), Vec::with_capacity(self.adjustments));
        for draw in draws {
            let start = changes.len();
            changes.extend(draw.changes(columns));
            of_rows.push(draw.of_row(start, changes.len()));
        }
        assert!(changes.len() <= self.adjustments, "room for all adjustments");
        changes.resize(self.adjustments, Change::zeroed());
        [bytemuck::cast_slice::<_, u8>(&of_rows), bytemuck::cast_slice(&changes)].concat()
    }
}

/// Draws a token from each row of F32 `logits` `[R, V]`. Returns I32 `[R]`, with -1 for a row with an element that is not finite, and F32 `[R]`, the
/// token's log-probability in `distribution`.
///
/// Weights are multiples of 2⁻⁴⁰ of the likeliest token's weight, so tokens with smaller weights are never drawn. A draw depends only on its row, and
/// is the same on all devices.
pub fn sample(logits: &Tensor, draws: &mut Draws, distribution: Distribution) -> Result<(Tensor, Tensor)> {
    let [rows, _] = draws.shape;
    logits.expect("sample: logits", &draws.shape)?;
    logits.expect_dtype("sample: logits", &[DType::F32])?;
    draws.words.expect_device("sample: draws", logits.device())?;
    let mut tokens = Tensor::empty(logits.device(), &[rows], DType::I32)?;
    let mut logprobs = Tensor::empty(logits.device(), &[rows], DType::F32)?;
    dispatch! { logits.device(),
        cpu => cpu::sample(logits, draws, distribution, &mut tokens, &mut logprobs),
        gpu => cuda::sample(gpu, logits, draws, distribution, &mut tokens, &mut logprobs)?,
    }
    Ok((tokens, logprobs))
}
