//! The loss of texts that belong together.

use crate::step::host::{from_host, write};
use crate::step::{Loss, NextTokenLoss};
use ottava_common::error::Result;
use ottava_models::Decoder;
use ottava_recipe::layer_ranks::LayerRanks;
use ottava_recipe::param::Units;
use ottava_settings::EmbeddingPooling;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{
    Accumulation, CrossEntropy, NormBackward, NormWeights, Operand, cast, cross_entropy_gradient, gemm_nt,
    norm_backward, real_type, rmsnorm,
};
use ottava_tensor::{DType, Device, Tensor};
use std::cell::OnceCell;

/// How embeddings are computed and compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Contrast {
    /// How activations become an embedding.
    pub pooling: EmbeddingPooling,
    /// The temperature by which cosines are divided.
    pub temperature: f64,
    /// The number of texts of an example.
    pub texts: usize,
    /// Whether the texts of all data ranks are compared.
    pub gathers: bool,
    /// The number of tokens of a row.
    pub seq_len: usize,
}

/// What the loss reads of a micro-batch: the weight `[T, R]` of each of its tokens in the embedding of each row.
pub struct ContrastMicroBatch {
    how: Contrast,
    rows: usize,
    weights: Tensor,
    constants: OnceCell<Constants>,
    /// Whether this rank counts the anchors. Ranks that divide sequences have the same losses, and the first of them counts the losses.
    counts: bool,
}

/// Constants of all steps, which the first step makes, since they depend on the model and its ranks.
struct Constants {
    /// The factors `[C]` of normalised anchors and of other normalised texts. With RMSNorm, `1 / √C` gives vectors of length 1.
    factors: [Tensor; 2],
    /// The place `[B]` of the positive text of each anchor among all candidates, I32.
    positives: Tensor,
}

/// The squares of activations are not below this number, as the norm is not below 1e-12 in PyTorch.
const LEAST_SQUARE: f64 = 1e-24;

impl ContrastMicroBatch {
    /// Room for the weights of `rows` rows on `device`, in the type of sums of `compute`.
    pub fn new(how: Contrast, rows: usize, device: &Device, compute: DType) -> Result<ContrastMicroBatch> {
        let tokens = rows * how.seq_len;
        let weights = from_host(&vec![0.0; tokens * rows], device, real_type(compute))?.reshape(&[tokens, rows])?;
        Ok(ContrastMicroBatch { how, rows, weights, constants: OnceCell::new(), counts: true })
    }

    /// Sets the weights of the tokens of all rows, `[T, R]`. `counts` says whether this rank counts the anchors.
    pub fn set_weights(&mut self, weights: &[f64], counts: bool) -> Result<()> {
        self.counts = counts;
        write(&mut self.weights, weights)
    }

    fn anchors(&self) -> usize {
        self.rows / self.how.texts
    }

    /// Returns whether the texts of several ranks are compared.
    fn gathers(&self, ranks: &dyn LayerRanks) -> bool {
        self.how.gathers && ranks.place(Axis::Data).ranks > 1
    }

    /// Returns the weights `[T, R]` of the tokens that this rank has.
    fn own_weights(&self, model: &Decoder, tokens: usize) -> Result<Tensor> {
        let [context, tensor] = [Axis::Context, Axis::Tensor].map(|axis| model.ranks().place(axis));
        // The first rows are the tokens of this rank's part of the sequences.
        let own = tensor.range(tokens * tensor.ranks);
        debug_assert_eq!(own.len() * tensor.ranks * context.ranks, self.weights.shape()[0]);
        Ok(self.weights.rows(own.start, own.end)?)
    }

    /// Returns the embeddings `[R, C]` of all rows before they are normalised, on all ranks that divide tokens.
    fn embeddings(&self, model: &Decoder, normed: &Tensor) -> Result<Tensor> {
        let real = self.weights.dtype();
        let (x, weights) = (cast(normed, real)?, self.own_weights(model, normed.shape()[0])?);
        let (a, b) = (Operand::plain_transposed(&weights), Operand::plain_transposed(&x));
        let parts = gemm_nt(a, b, real, Accumulation::Exact)?;
        let of_tensors = model.ranks().sum(Axis::Tensor, "embeddings", &parts, None)?;
        model.ranks().sum(Axis::Context, "embeddings", &of_tensors, None)
    }

    fn constants(&self, ranks: &dyn LayerRanks, channels: usize) -> Result<&Constants> {
        if let Some(constants) = self.constants.get() {
            return Ok(constants);
        }
        let (device, real) = (self.weights.device(), self.weights.dtype());
        let factor = |factor: f64| from_host(&vec![factor / (channels as f64).sqrt(); channels], device, real);
        let own = if self.gathers(ranks) { ranks.place(Axis::Data).rank * (self.rows - self.anchors()) } else { 0 };
        let positives: Vec<i32> = (0..self.anchors()).map(|anchor| (own + anchor) as i32).collect();
        let made = Constants {
            factors: [factor(1.0 / self.how.temperature)?, factor(1.0)?],
            positives: Tensor::from_slice(device, &[positives.len()], &positives)?,
        };
        Ok(self.constants.get_or_init(|| made))
    }
}

impl Loss for ContrastMicroBatch {
    /// Anchors.
    fn units(&self, _: usize) -> usize {
        self.anchors()
    }

    fn counted(&self, _: &[i32]) -> usize {
        if self.counts { self.anchors() } else { 0 }
    }

    fn values(&self, _: usize) -> usize {
        self.anchors()
    }

    fn losses_and_gradient(
        &self,
        model: &mut Decoder,
        normed: &Tensor,
        _: &Tensor,
        scale: &Tensor,
        _: &mut dyn Units,
    ) -> Result<(Tensor, Tensor)> {
        let (model, anchors, real) = (&*model, self.anchors(), self.weights.dtype());
        let ranks = model.ranks();
        let embeddings = self.embeddings(model, normed)?;
        let [rows, channels] = embeddings.dims("embeddings")?;
        let Constants { factors: [of_anchors, of_others], positives } = self.constants(ranks, channels)?;
        let eps = LEAST_SQUARE / channels as f64;
        let parts = [(embeddings.rows(0, anchors)?, of_anchors), (embeddings.rows(anchors, rows)?, of_others)];
        let (anchors_unit, rstd_of_anchors) = rmsnorm(&parts[0].0, of_anchors, eps)?;
        let (own, rstd_of_others) = rmsnorm(&parts[1].0, of_others, eps)?;
        let all = if self.gathers(ranks) { ranks.gather(Axis::Data, "embeddings", &own)? } else { own };
        let exact = Accumulation::Exact;
        let mut scores = gemm_nt(Operand::plain(&anchors_unit), Operand::plain(&all), real, exact)?;
        let how = CrossEntropy { soft_cap: None, label_smoothing: 0.0 };
        let losses = cross_entropy_gradient(&mut scores, all.shape()[0], positives, scale, how)?;
        let danchors = gemm_nt(Operand::plain(&scores), Operand::plain_transposed(&all), real, exact)?;
        let dall = gemm_nt(Operand::plain_transposed(&scores), Operand::plain_transposed(&anchors_unit), real, exact)?;
        let dothers =
            if self.gathers(ranks) { ranks.sum_own_rows(Axis::Data, "embeddings", dall, None)? } else { dall };
        let mut gradient = embeddings.empty_like()?;
        let mut unread = Tensor::zeros(embeddings.device(), &[channels], real)?;
        let statistics = [rstd_of_anchors, rstd_of_others];
        for (((part, factor), dy), (rstd, start)) in
            parts.iter().zip([danchors, dothers]).zip(statistics.iter().zip([0, anchors]))
        {
            let options = NormBackward::default();
            let dx = norm_backward(&dy, part, NormWeights::rms(factor), rstd, &mut unread, options)?;
            gradient.copy_from(start, &dx)?;
        }
        let weights = self.own_weights(model, normed.shape()[0])?;
        let dx = gemm_nt(Operand::plain(&weights), Operand::plain_transposed(&gradient), real, exact)?;
        Ok((losses, cast(&dx, normed.dtype())?))
    }

    /// The embeddings `[R, C]` of all rows.
    fn evaluated(&self, model: &mut Decoder, normed: &Tensor, _: &Tensor, _: &mut dyn Units) -> Result<Tensor> {
        self.embeddings(model, normed)
    }

    fn add(&self, sums: Vec<f64>, values: &[f64]) -> Result<Vec<f64>> {
        let counted = if self.counts { values } else { &[] };
        NextTokenLoss.add(sums, counted)
    }
}
