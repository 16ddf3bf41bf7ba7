//! Output head and loss in one. Logits exist for a chunk of tokens at a time, and their gradient replaces them in place. The head of a
//! classifier or a reward model computes scores instead of logits.

use super::columns::copy_columns;
use super::{Factor, Norm, NormSaved, SCORE, VALUE};
use ottava_common::error::{Error, Result};
use ottava_recipe::LinearSite;
use ottava_recipe::context::Context;
use ottava_recipe::layer_ranks::LayerRanks;
use ottava_recipe::lora::PEFT_PREFIX;
use ottava_recipe::param::{Builder, FolderTensor, Init, Loan, Param, Split, WgradProduct};
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{
    Accumulation, CrossEntropy, Operand, VocabularyPart, add_bias, bias_gradient, cast, cross_entropy,
    cross_entropy_gradient, gemm_nt, gemm_nt_add, gemm_nt_plus, join_columns, merge_losses, negate_targets,
    partial_gradient, partial_losses, real_type,
};
use ottava_tensor::{DType, Tensor};

/// The last norm, and the product that computes logits. The head stays in high precision in every recipe.
pub struct Head {
    /// The norm before the product. `None` without this norm.
    pub norm: Option<Norm>,
    /// The factor of logits, which is applied to the input of the product.
    pub factor: Factor,
    /// The result of the product.
    pub output: HeadOutput,
    /// The weight `[V, C]`, or `[L, C]` for the scores of `L` labels. `None` if the weight is the embedding's table in the same stage.
    pub weight: Option<Param>,
    /// The bias `[L]` of the scores, if they have one.
    pub bias: Option<Param>,
    /// The weight `[C]` of the value head, if the model has one.
    pub value: Option<Param>,
}

/// The names of the tensors of scores in a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreSpec {
    /// The name, without `.weight` and `.bias`.
    pub name: &'static str,
    /// Whether scores have a bias.
    pub bias: bool,
}

impl ScoreSpec {
    /// The scores of a classifier or a reward model with a decoder.
    pub const OF_DECODERS: ScoreSpec = ScoreSpec { name: SCORE, bias: false };
}

/// The result of the product of a head for each token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeadOutput {
    /// The logits of the vocabulary in the compute type, with this loss.
    Logits(CrossEntropy),
    /// The logits in F32 (F64 for F64), with this loss, like the logits of inference. The log-probabilities then equal the log-probabilities of the
    /// distribution that inference samples from. On a CPU, they are equal bit for bit.
    WideLogits(CrossEntropy),
    /// The scores of labels, of a classifier or a reward model. With one label, the loss of a token with a target is the negative score. If the last
    /// token of a sequence is the only target, the sum of the losses is minus the reward. Other losses of scores read [`Head::chunked_gradient`].
    Scores,
}

/// The loss of a chunk of tokens, as [`Head::chunked_gradient`] calls it.
pub type ChunkLoss<'a> = dyn FnMut(&mut Tensor, usize, usize) -> Result<Tensor> + 'a;

/// Sizes and constants of a head.
#[derive(Clone, Copy, Debug)]
pub struct HeadConfig<'a> {
    /// The name in a folder.
    pub name: &'static str,
    /// The number of tokens in the vocabulary, `V`, or the number of labels, `L`.
    pub vocabulary: usize,
    /// The width `C` of the residual stream.
    pub channels: usize,
    /// The standard deviation of initial weights.
    pub std: f32,
    /// The factor of logits.
    pub logit_scale: f32,
    /// The loss of the logits, after the factor.
    pub loss: CrossEntropy,
    /// Whether the loss reads logits in F32.
    pub wide_logits: bool,
    /// The source of the weight.
    pub weight: HeadWeight<'a>,
    /// Whether there is a value head. It is trained even if the other weights are frozen beside adapters.
    pub value: bool,
}

/// The weight of a head. Two variants hold the name of the embedding that shares the weight.
#[derive(Clone, Copy, Debug)]
pub enum HeadWeight<'a> {
    /// A separate tensor.
    Own,
    /// The embedding's table, in the same stage.
    Embedding(&'a str),
    /// A copy of the embedding's table, which is in another stage.
    Copy(&'a str),
    /// A row for each label. The weight is trained even if the other weights are frozen beside adapters.
    Scores(ScoreSpec),
}

/// The number of tokens whose logits are in memory at once.
const CHUNK: usize = 2048;

/// Products and losses are slow if rows of logits are not aligned. If the vocabulary is not a multiple of `ALIGNED`, the product reads a copy of the
/// weight with rows of zeros up to a multiple of `PADDED`. A part of the vocabulary is never padded.
const ALIGNED: usize = 8;
const PADDED: usize = 64;

impl HeadOutput {
    /// Returns the loss of the logits and their type, for activations in `compute`. Returns `None` for scores.
    pub fn of_logits(self, compute: DType) -> Option<(CrossEntropy, DType)> {
        match self {
            HeadOutput::Logits(how) => Some((how, compute)),
            HeadOutput::WideLogits(how) => Some((how, real_type(compute))),
            HeadOutput::Scores => None,
        }
    }
}

impl Head {
    /// Creates a head after a `norm`, if there is one.
    pub fn new(build: &mut Builder, norm: Option<Norm>, config: HeadConfig) -> Result<Head> {
        let HeadConfig { name, vocabulary, channels, std, logit_scale, loss, wide_logits, weight, value } = config;
        let matrix = |build: &mut Builder, name: &str| {
            let tensor = FolderTensor::new(format!("{name}.weight"), vec![vocabulary, channels]);
            let shard = build.shard(tensor, Split::Vocabulary)?;
            Param::new(build, vec![shard], Init::Normal(std)).map(Some)
        };
        if matches!(weight, HeadWeight::Embedding(_) | HeadWeight::Copy(_)) {
            // Adapters that save the head give it a weight of its own.
            build.description.modules.add(&format!("{name}.weight"), 0);
        }
        let mut output = if wide_logits { HeadOutput::WideLogits(loss) } else { HeadOutput::Logits(loss) };
        let (mut own, mut fixed, mut bias) = (build.place().share(vocabulary), name, None);
        let (name, weight) = match weight {
            HeadWeight::Own => (name.to_string(), matrix(build, name)?),
            HeadWeight::Embedding(table) => (format!("{table} (as head)"), None),
            HeadWeight::Copy(table) => (format!("{table} (as head)"), matrix(build, table)?),
            HeadWeight::Scores(scores) => {
                (output, own, fixed) = (HeadOutput::Scores, vocabulary, scores.name);
                let prefix = if build.lora.is_some() { PEFT_PREFIX } else { "" };
                let mut param = |ending: &str, shape, init| -> Result<Param> {
                    let name = format!("{}.{ending}", scores.name);
                    let shard = build.shard(FolderTensor::new(format!("{prefix}{name}"), shape), Split::None)?;
                    build.description.modules.add(&name, 0);
                    Param::trained(build, vec![shard], init)
                };
                let weight = param("weight", vec![vocabulary, channels], Init::Normal(std))?;
                bias = scores.bias.then(|| param("bias", vec![vocabulary], Init::Zeros)).transpose()?;
                (scores.name.to_string(), Some(weight))
            }
        };
        build.description.fixed.push(fixed.to_string());
        build.description.head = Some(LinearSite {
            name,
            parts: Vec::new(),
            outputs: own,
            inputs: channels,
            block: None,
            after_swiglu: false,
            experts: None,
            divides_inputs: false,
        });
        let value = value.then(|| value_head(build, channels)).transpose()?;
        Ok(Head { norm, factor: Factor::new(build.device, channels, logit_scale)?, output, weight, bias, value })
    }

    /// Normalises `x` for the product, and applies the factor of logits.
    pub fn normalise(&self, x: &Tensor, context: &Context) -> Result<(Tensor, Option<NormSaved>)> {
        let (normed, saved) = match &self.norm {
            Some(norm) => norm.forward(x, context).map(|(normed, saved)| (normed, Some(saved)))?,
            None => (x.clone(), None),
        };
        Ok((self.factor.apply(normed)?, saved))
    }

    /// Returns the gradient by the input of [`Head::normalise`].
    pub fn normalise_backward(&mut self, dy: &Tensor, saved: Option<NormSaved>) -> Result<Tensor> {
        let dy = self.factor.apply(dy.clone())?;
        match (&mut self.norm, saved) {
            (Some(norm), Some(saved)) => norm.backward(&dy, saved),
            _ => Ok(dy),
        }
    }

    /// Returns the parameters of norm and weight.
    pub fn parameters_mut(&mut self) -> Vec<&mut Param> {
        let Head { norm, weight, bias, value, .. } = self;
        let mut all = Vec::new();
        norm.iter_mut().for_each(|norm| norm.parameters_mut(&mut |param| all.push(param)));
        all.extend(weight);
        all.extend(bias);
        all.extend(value);
        all
    }

    /// Adds the `bias` `[L]` to `scores` `[T, L]` in F32 (F64 for F64).
    pub fn add_bias(scores: &mut Tensor, bias: &Param) -> Result<()> {
        let bias = cast(&bias.weights.value()?, scores.dtype())?;
        Ok(add_bias(scores, &bias)?)
    }

    /// Adds to the gradient of the `bias`, from the gradient `dscores` `[T, L]` by the scores of all tokens. `ranks` divide the tokens.
    pub fn bias_gradient(dscores: &Tensor, bias: &mut Param, ranks: &dyn LayerRanks) -> Result<()> {
        let own = ranks.place(Axis::Tensor).range(dscores.shape()[0]);
        Ok(bias_gradient(&dscores.rows(own.start, own.end)?, bias.gradient.sum_mut()?)?)
    }

    /// Returns the values `[T]` that the value head with this `weight` estimates from the input `x` `[T, C]` of the product that computes logits, in
    /// F32 (F64 for F64). Ranks that divide tensors divide the tokens of `x`, and gather the values.
    pub fn values(x: &Tensor, weight: &Param, ranks: &dyn LayerRanks) -> Result<Tensor> {
        let [tokens, _] = x.dims("values: x")?;
        let own = product(x, &row_of(weight)?, real_type(x.dtype()))?.reshape(&[tokens])?;
        ranks.gather(Axis::Tensor, weight.identity.name(), &own)
    }

    /// Returns the gradient by `x` of a loss whose gradient by [`Head::values`] is `dvalues` `[T]`. Adds to the gradient of the value head.
    pub fn value_gradient(x: &Tensor, weight: &mut Param, dvalues: &Tensor, ranks: &dyn LayerRanks) -> Result<Tensor> {
        let own = ranks.place(Axis::Tensor).range(dvalues.len());
        let dvalues = cast(&dvalues.rows(own.start, own.end)?, x.dtype())?.reshape(&[own.len(), 1])?;
        let (a, b) = (Operand::plain_transposed(&dvalues), Operand::plain_transposed(x));
        weight.gradient.add(|grad| {
            let sum = gemm_nt_plus(a, b, &grad.reshape(&[1, grad.len()])?, Accumulation::Exact)?;
            Ok(grad.copy_from(0, &sum)?)
        })?;
        dgrad(&dvalues, &row_of(weight)?, x.dtype())
    }

    /// Returns `x · Wᵀ` `[T, V]` in type `out`, which is the type of `x` or F32. The soft cap is not applied.
    pub fn logits(x: &Tensor, weight: &Param, loan: &Loan, out: DType) -> Result<Tensor> {
        product(x, &weight.read(loan)?, out)
    }

    /// Returns the losses `[T]` of I32 `targets` `[T]`. If `ranks` divide the weight, they also divide the tokens of `x`.
    pub fn losses(
        x: &Tensor,
        weight: &Param,
        loan: &Loan,
        targets: &Tensor,
        output: HeadOutput,
        ranks: &dyn LayerRanks,
    ) -> Result<Tensor> {
        let Some((how, dtype)) = output.of_logits(x.dtype()) else {
            return score_losses(x, weight, loan, targets, ranks);
        };
        let x = ranks.gather(Axis::Tensor, weight.identity.name(), x)?;
        let (vocabulary, part) = (weight.weights.shape()[0], part_of(weight, ranks));
        let weight = padded_for(part, weight.read(loan)?)?;
        let mut losses = Tensor::empty(x.device(), targets.shape(), real_type(x.dtype()))?;
        for (start, end) in chunks(targets.len()) {
            let logits = product(&x.rows(start, end)?, &weight, dtype)?;
            let targets = targets.rows(start, end)?;
            let of_chunk = match part {
                Some(part) => merged(&logits, &targets, part, how, ranks)?.0,
                None => cross_entropy(&logits, vocabulary, &targets, how)?,
            };
            losses.copy_from(start, &of_chunk)?;
        }
        Ok(losses)
    }

    /// Returns the losses, and the gradient by `x` of `Σ scale · losses`, with `scale` F32 `[1]` or `[T]` on the device. Adds to the gradient of the
    /// weight, if it is trained. If `ranks` divide the weight, they also divide the tokens of `x`.
    pub fn losses_and_gradient(
        x: &Tensor,
        weight: &mut Param,
        loan: &Loan,
        targets: &Tensor,
        scale: &Tensor,
        output: HeadOutput,
        ranks: &dyn LayerRanks,
    ) -> Result<(Tensor, Tensor)> {
        let Some((how, _)) = output.of_logits(x.dtype()) else {
            expect_one_label(weight)?;
            return Head::score_gradient(x, weight, loan, ranks, &mut |scores, _, _| {
                let (real, count) = (scores.dtype(), targets.len());
                let losses = negate_targets(&scores.reshape(&[count])?, targets, real)?;
                scores.copy_from(0, &negate_targets(scale, targets, real)?.reshape(&[count, 1])?)?;
                Ok(losses)
            });
        };
        let (vocabulary, part) = (weight.weights.shape()[0], part_of(weight, ranks));
        Head::own_gradient(x, weight, loan, targets.len(), (output, ranks), &mut |logits, start, end| {
            let targets = targets.rows(start, end)?;
            let scale = &if scale.len() == 1 { scale.clone() } else { scale.rows(start, end)? };
            match part {
                Some(part) => {
                    let (losses, lse) = merged(logits, &targets, part, how, ranks)?;
                    partial_gradient(logits, &targets, part, &lse, scale, how)?;
                    Ok(losses)
                }
                // Padding stays zero.
                None => Ok(cross_entropy_gradient(logits, vocabulary, &targets, scale, how)?),
            }
        })
    }

    /// [`Head::losses_and_gradient`] of any loss of logits. `loss_of_chunk` gets the logits of the tokens from the second to the third argument,
    /// whose rows may have padding of zeros. It replaces the logits by the gradient of the scaled losses, and returns the losses `[tokens]`.
    ///
    /// Ranks that divide the weight gather the logits of a chunk, so that each of them computes the loss over the whole vocabulary.
    ///
    /// In a classifier, `loss_of_chunk` gets the scores `[tokens, L]` of all tokens at once, in F32 (F64 for F64).
    pub fn chunked_gradient(
        x: &Tensor,
        weight: &mut Param,
        loan: &Loan,
        tokens: usize,
        output: HeadOutput,
        ranks: &dyn LayerRanks,
        loss_of_chunk: &mut ChunkLoss,
    ) -> Result<(Tensor, Tensor)> {
        let part = part_of(weight, ranks).filter(|_| output != HeadOutput::Scores);
        let Some(VocabularyPart { first, .. }) = part else {
            return Head::own_gradient(x, weight, loan, tokens, (output, ranks), loss_of_chunk);
        };
        Head::own_gradient(x, weight, loan, tokens, (output, ranks), &mut |logits, start, end| {
            let mut all = join_vocabulary(logits, ranks)?;
            let losses = loss_of_chunk(&mut all, start, end)?;
            let width = logits.shape()[1];
            copy_columns(&all, first, logits, 0, width)?;
            Ok(losses)
        })
    }

    /// [`Head::chunked_gradient`] of a loss of the logits of this rank's part of the vocabulary.
    fn own_gradient(
        x: &Tensor,
        weight: &mut Param,
        loan: &Loan,
        tokens: usize,
        (output, ranks): (HeadOutput, &dyn LayerRanks),
        loss_of_chunk: &mut ChunkLoss,
    ) -> Result<(Tensor, Tensor)> {
        let Some((_, dtype)) = output.of_logits(x.dtype()) else {
            return Head::score_gradient(x, weight, loan, ranks, loss_of_chunk);
        };
        let x = ranks.gather(Axis::Tensor, weight.identity.name(), x)?;
        let (vocabulary, part) = (weight.weights.shape()[0], part_of(weight, ranks));
        let padded = padded_for(part, weight.read(loan)?)?;
        let mut losses = Tensor::empty(x.device(), &[tokens], real_type(x.dtype()))?;
        let mut dx = x.empty_like()?;
        let mut run = |add: &mut dyn FnMut(Operand, Operand) -> Result<()>| -> Result<()> {
            for (start, end) in chunks(tokens) {
                let x = x.rows(start, end)?;
                let mut logits = product(&x, &padded, dtype)?;
                losses.copy_from(start, &loss_of_chunk(&mut logits, start, end)?)?;
                let logits = if dtype == x.dtype() { logits } else { cast(&logits, x.dtype())? };
                add(Operand::plain_transposed(&logits), Operand::plain_transposed(&x))?;
                dx.copy_from(start, &dgrad(&logits, &padded, x.dtype())?)?;
            }
            Ok(())
        };
        match (weight.is_trained(), padded.shape()[0] == vocabulary) {
            (false, _) => run(&mut |_, _| Ok(()))?,
            (true, true) => run(&mut |dy, x| weight.gradient.add_product(WgradProduct::exact(dy, x)))?,
            (true, false) => weight.gradient.add(|grad| {
                let mut sum = with_rows(grad, padded.shape()[0])?;
                run(&mut |dy, x| Ok(gemm_nt_add(dy, x, &mut sum, Accumulation::Exact)?))?;
                Ok(grad.copy_from(0, &sum.rows(0, vocabulary)?)?)
            })?,
        }
        let dx = if ranks.place(Axis::Tensor).is_divided() {
            ranks.sum_own_rows(Axis::Tensor, weight.identity.name(), dx, None)?
        } else {
            dx
        };
        Ok((losses, dx))
    }

    /// Returns the scores `[T, L]` of all labels for the tokens `x`, in F32 (F64 for F64), because differences of scores can be smaller than a BF16
    /// step. Ranks that divide tensors divide the tokens of `x`, and gather the scores.
    pub fn scores(x: &Tensor, weight: &Param, loan: &Loan, ranks: &dyn LayerRanks) -> Result<Tensor> {
        let scores = Head::logits(x, weight, loan, real_type(x.dtype()))?;
        ranks.gather(Axis::Tensor, weight.identity.name(), &scores)
    }

    /// [`Head::chunked_gradient`] of a loss of scores. The head has few labels, so the scores of all tokens are in memory at once.
    fn score_gradient(
        x: &Tensor,
        weight: &mut Param,
        loan: &Loan,
        ranks: &dyn LayerRanks,
        loss: &mut ChunkLoss,
    ) -> Result<(Tensor, Tensor)> {
        let mut scores = Head::scores(x, weight, loan, ranks)?;
        let [tokens, _] = scores.dims("scores")?;
        let losses = loss(&mut scores, 0, tokens)?;
        let own = ranks.place(Axis::Tensor).range(tokens);
        let dscores = cast(&scores.rows(own.start, own.end)?, x.dtype())?;
        if weight.is_trained() {
            let (a, b) = (Operand::plain_transposed(&dscores), Operand::plain_transposed(x));
            weight.gradient.add_product(WgradProduct::exact(a, b))?;
        }
        Ok((losses, dgrad(&dscores, &weight.read(loan)?, x.dtype())?))
    }
}

/// Errors for the head of a classifier with several labels, whose losses are no losses of single tokens.
fn expect_one_label(weight: &Param) -> Result<()> {
    match weight.weights.shape()[0] {
        1 => Ok(()),
        labels => {
            Err(Error::Model(format!("the head has scores of {labels} labels, and the score of a reward is one")))
        }
    }
}

/// Creates the weight of a value head, which starts at zero.
fn value_head(build: &mut Builder, channels: usize) -> Result<Param> {
    let shard = build.shard(FolderTensor::new(VALUE.to_string(), vec![channels]), Split::None)?;
    Param::trained(build, vec![shard], Init::Zeros)
}

/// Returns the weight `[C]` of a value head as a matrix `[1, C]`.
fn row_of(weight: &Param) -> Result<Tensor> {
    let value = weight.weights.value()?;
    Ok(value.reshape(&[1, value.len()])?)
}

/// Returns `x · Wᵀ` in type `out`.
fn product(x: &Tensor, weight: &Tensor, out: DType) -> Result<Tensor> {
    Ok(gemm_nt(Operand::plain(x), Operand::plain(weight), out, Accumulation::Exact)?)
}

/// Returns `dy · W` in type `out`, the gradient by `x` of [`product`].
fn dgrad(dy: &Tensor, weight: &Tensor, out: DType) -> Result<Tensor> {
    Ok(gemm_nt(Operand::plain(dy), Operand::plain_transposed(weight), out, Accumulation::Exact)?)
}

/// Returns minus the scores of tokens with a target, of a head with one label.
fn score_losses(x: &Tensor, weight: &Param, loan: &Loan, targets: &Tensor, ranks: &dyn LayerRanks) -> Result<Tensor> {
    expect_one_label(weight)?;
    let scores = Head::scores(x, weight, loan, ranks)?;
    Ok(negate_targets(&scores.reshape(&[targets.len()])?, targets, scores.dtype())?)
}

/// Returns `weight` with rows of zeros that pad its logits. A part of the vocabulary is returned without padding.
fn padded_for(part: Option<VocabularyPart>, weight: Tensor) -> Result<Tensor> {
    let vocabulary = weight.shape()[0];
    match part.is_some() || vocabulary.is_multiple_of(ALIGNED) {
        true => Ok(weight),
        false => with_rows(&weight, vocabulary.next_multiple_of(PADDED)),
    }
}

/// Returns a copy of `matrix` with `rows` rows. The added rows are zeros.
fn with_rows(matrix: &Tensor, rows: usize) -> Result<Tensor> {
    let (device, dtype, [own, columns]) = (matrix.device(), matrix.dtype(), matrix.dims("a matrix to pad")?);
    let mut copy = Tensor::empty(device, &[rows, columns], dtype)?;
    copy.copy_from(0, matrix)?;
    copy.copy_from(own, &Tensor::zeros(device, &[rows - own, columns], dtype)?)?;
    Ok(copy)
}

/// Returns this rank's part of the vocabulary, if ranks divide `weight`.
fn part_of(weight: &Param, ranks: &dyn LayerRanks) -> Option<VocabularyPart> {
    let (place, own) = (ranks.place(Axis::Tensor), weight.weights.shape()[0]);
    place.is_divided().then(|| VocabularyPart { first: place.rank * own, vocabulary: place.ranks * own })
}

/// Gathers the parts `own` `[T, V / ranks]` of the vocabulary of all ranks into logits `[T, V]`.
pub fn join_vocabulary(own: &Tensor, ranks: &dyn LayerRanks) -> Result<Tensor> {
    let (parts, [rows, width]) = (ranks.place(Axis::Tensor).ranks, own.dims("logits")?);
    let all = ranks.gather(Axis::Tensor, "logits", own)?;
    Ok(join_columns(&all.reshape(&[parts, rows, width])?, &[parts * width])?)
}

/// Returns losses and log-sum-exp over the whole vocabulary. `logits` are the logits of this rank's `part`.
fn merged(
    logits: &Tensor,
    targets: &Tensor,
    part: VocabularyPart,
    how: CrossEntropy,
    ranks: &dyn LayerRanks,
) -> Result<(Tensor, Tensor)> {
    let all = ranks.gather(Axis::Tensor, "losses", &partial_losses(logits, targets, part, how)?)?;
    Ok(merge_losses(&all.reshape(&[ranks.place(Axis::Tensor).ranks, targets.len(), 2])?, targets)?)
}

fn chunks(tokens: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..tokens).step_by(CHUNK).map(move |start| (start, (start + CHUNK).min(tokens)))
}
