//! Output head and loss in one: logits exist for a chunk of tokens at a time, and their gradient replaces them in place. The head of a reward
//! model computes one score instead of logits.

use super::{Factor, HEAD, Norm, NormSaved, SCORE};
use ottava_common::error::{Error, Result};
use ottava_recipe::LinearSite;
use ottava_recipe::context::Context;
use ottava_recipe::layer_ranks::LayerRanks;
use ottava_recipe::lora::PEFT_PREFIX;
use ottava_recipe::param::{Builder, FolderTensor, Init, Loan, Param, Split, WgradProduct};
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{
    Accumulation, CrossEntropy, Operand, VocabularyPart, cast, cross_entropy, cross_entropy_gradient, gemm_nt,
    gemm_nt_add, merge_losses, negate_targets, partial_gradient, partial_losses, real_type,
};
use ottava_tensor::{DType, Tensor};

/// The last norm, and the product that computes logits. The head stays in high precision in every recipe.
pub struct Head {
    /// Before the product.
    pub norm: Norm,
    /// The factor of logits, which is applied to the input of the product.
    pub factor: Factor,
    /// What the product computes.
    pub output: HeadOutput,
    /// `[V, C]`, or `[1, C]` for a score, unless it is the embedding's table in the same stage.
    pub weight: Option<Param>,
}

/// What the product of a head computes for each token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeadOutput {
    /// The logits of all tokens of the vocabulary in the compute type, with this loss.
    Logits(CrossEntropy),
    /// The logits in F32 (F64 for F64), as inference computes them, with this loss. Log-probabilities then are those of the distribution that
    /// inference draws from, to the bit on a CPU.
    WideLogits(CrossEntropy),
    /// The score of a reward model. Its loss is its negative at tokens with a target, so that the sum over a sequence whose last token is the
    /// only target is minus the reward.
    Score,
}

/// The loss of a chunk of tokens, as [`Head::chunked_gradient`] calls it.
pub type ChunkLoss<'a> = dyn FnMut(&mut Tensor, usize, usize) -> Result<Tensor> + 'a;

/// Sizes and constants of a head.
#[derive(Clone, Copy, Debug)]
pub struct HeadConfig<'a> {
    /// Tokens `V`.
    pub vocabulary: usize,
    /// Width `C` of the residual stream.
    pub channels: usize,
    /// Standard deviation of initial weights.
    pub std: f32,
    /// The factor of logits.
    pub logit_scale: f32,
    /// The loss of logits, after the factor.
    pub loss: CrossEntropy,
    /// Whether the loss reads logits in F32.
    pub wide_logits: bool,
    /// What its weight is.
    pub weight: HeadWeight<'a>,
}

/// The weight of a head. A tied head has the embedding of this name.
#[derive(Clone, Copy, Debug)]
pub enum HeadWeight<'a> {
    /// A tensor of its own.
    Own,
    /// The embedding's table, in the same stage.
    Embedding(&'a str),
    /// A copy of the embedding's table, which is in another stage.
    Copy(&'a str),
    /// The row of a score, which is trained also beside adapters.
    Score,
}

/// Tokens whose logits are in memory at once.
const CHUNK: usize = 2048;

/// Products and losses are slow if rows of logits begin at any address. So rows of logits of a vocabulary that is no multiple of `ALIGNED` have
/// padding up to a multiple of `PADDED`, by rows of zeros in a copy of the weight.
const ALIGNED: usize = 8;
const PADDED: usize = 64;

impl HeadOutput {
    /// The loss of logits and the type of these logits, of activations in `compute`; `None` for a score.
    pub fn of_logits(self, compute: DType) -> Option<(CrossEntropy, DType)> {
        match self {
            HeadOutput::Logits(how) => Some((how, compute)),
            HeadOutput::WideLogits(how) => Some((how, real_type(compute))),
            HeadOutput::Score => None,
        }
    }
}

impl Head {
    /// A head after a norm.
    pub fn new(build: &mut Builder, norm: Norm, config: HeadConfig) -> Result<Head> {
        let HeadConfig { vocabulary, channels, std, logit_scale, loss, wide_logits, weight } = config;
        let matrix = |build: &mut Builder, name: &str| {
            let tensor = FolderTensor::new(format!("{name}.weight"), vec![vocabulary, channels]);
            let shard = build.shard(tensor, Split::Vocabulary)?;
            Param::new(build, vec![shard], Init::Normal(std)).map(Some)
        };
        let mut output = if wide_logits { HeadOutput::WideLogits(loss) } else { HeadOutput::Logits(loss) };
        let (mut own, mut fixed) = (build.place().share(vocabulary), HEAD);
        let (name, weight) = match weight {
            HeadWeight::Own => (HEAD.to_string(), matrix(build, HEAD)?),
            HeadWeight::Embedding(table) => (format!("{table} (as head)"), None),
            HeadWeight::Copy(table) => (format!("{table} (as head)"), matrix(build, table)?),
            HeadWeight::Score => {
                (output, own, fixed) = (HeadOutput::Score, 1, SCORE);
                let prefix = if build.lora.is_some() { PEFT_PREFIX } else { "" };
                let tensor = FolderTensor::new(format!("{prefix}{SCORE}.weight"), vec![1, channels]);
                let shard = build.shard(tensor, Split::None)?;
                (SCORE.to_string(), Some(Param::trained(build, vec![shard], Init::Normal(std))?))
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
        Ok(Head { norm, factor: Factor::new(build.device, channels, logit_scale)?, output, weight })
    }

    /// Normalises `x` for the product.
    pub fn normalise(&self, x: &Tensor, context: &Context) -> Result<(Tensor, NormSaved)> {
        let (normed, saved) = self.norm.forward(x, context)?;
        Ok((self.factor.apply(normed)?, saved))
    }

    /// The gradient by the input of [`Head::normalise`].
    pub fn normalise_backward(&mut self, dy: &Tensor, saved: NormSaved) -> Result<Tensor> {
        let dy = self.factor.apply(dy.clone())?;
        self.norm.backward(&dy, saved)
    }

    /// Its parameters.
    pub fn parameters_mut(&mut self) -> Vec<&mut Param> {
        let Head { norm, weight, .. } = self;
        let mut all = Vec::new();
        norm.parameters_mut(&mut |param| all.push(param));
        all.extend(weight);
        all
    }

    /// `x · Wᵀ`, `[T, V]` in type `out`: the type of `x`, or F32; without the soft cap.
    pub fn logits(x: &Tensor, weight: &Param, loan: &Loan, out: DType) -> Result<Tensor> {
        product(x, &weight.read(loan)?, out)
    }

    /// Losses of I32 `targets` `[T]`, `[T]`, of the `output`. If `ranks` divide the weight, they divide the tokens of `x`.
    pub fn losses(
        x: &Tensor,
        weight: &Param,
        loan: &Loan,
        targets: &Tensor,
        output: HeadOutput,
        ranks: &dyn LayerRanks,
    ) -> Result<Tensor> {
        let Some((how, dtype)) = output.of_logits(x.dtype()) else { return score_losses(x, weight, loan, targets) };
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

    /// Losses, and the gradient by `x` of `Σ scale · losses`, with `scale` F32 `[1]` or `[T]` on the device; adds to the gradient of the
    /// weight, if it is trained. If `ranks` divide the weight, they divide the tokens of `x`.
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
            let losses = score_losses(x, weight, loan, targets)?;
            let dscores = negate_targets(scale, targets, x.dtype())?.reshape(&[targets.len(), 1])?;
            if weight.is_trained() {
                let (a, b) = (Operand::plain_transposed(&dscores), Operand::plain_transposed(x));
                weight.gradient.add_product(WgradProduct::exact(a, b))?;
            }
            return Ok((losses, dgrad(&dscores, &weight.read(loan)?, x.dtype())?));
        };
        let (vocabulary, part) = (weight.weights.shape()[0], part_of(weight, ranks));
        Head::chunked_gradient(x, weight, loan, targets.len(), output, ranks, &mut |logits, start, end| {
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
    /// Errors for the head of a reward model.
    pub fn chunked_gradient(
        x: &Tensor,
        weight: &mut Param,
        loan: &Loan,
        tokens: usize,
        output: HeadOutput,
        ranks: &dyn LayerRanks,
        loss_of_chunk: &mut ChunkLoss,
    ) -> Result<(Tensor, Tensor)> {
        let Some((_, dtype)) = output.of_logits(x.dtype()) else {
            return Err(Error::Model("the head of a reward model has no logits; the loss reads logits".into()));
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
}

/// `x · Wᵀ` in type `out`.
fn product(x: &Tensor, weight: &Tensor, out: DType) -> Result<Tensor> {
    Ok(gemm_nt(Operand::plain(x), Operand::plain(weight), out, Accumulation::Exact)?)
}

/// `dy · W` in type `out`: the gradient by `x` of [`product`].
fn dgrad(dy: &Tensor, weight: &Tensor, out: DType) -> Result<Tensor> {
    Ok(gemm_nt(Operand::plain(dy), Operand::plain_transposed(weight), out, Accumulation::Exact)?)
}

/// Minus the scores of tokens with a target, in F32 (F64 for F64): differences of rewards are smaller than a step of BF16.
fn score_losses(x: &Tensor, weight: &Param, loan: &Loan, targets: &Tensor) -> Result<Tensor> {
    let real = real_type(x.dtype());
    let scores = Head::logits(x, weight, loan, real)?.reshape(&[targets.len()])?;
    Ok(negate_targets(&scores, targets, real)?)
}

/// The `weight` with the padding of its logits; none if it is a part of the vocabulary.
fn padded_for(part: Option<VocabularyPart>, weight: Tensor) -> Result<Tensor> {
    let vocabulary = weight.shape()[0];
    match part.is_some() || vocabulary.is_multiple_of(ALIGNED) {
        true => Ok(weight),
        false => with_rows(&weight, vocabulary.next_multiple_of(PADDED)),
    }
}

/// A copy of `matrix` with rows of zeros after its own.
fn with_rows(matrix: &Tensor, rows: usize) -> Result<Tensor> {
    let (device, dtype, [own, columns]) = (matrix.device(), matrix.dtype(), matrix.dims("a matrix to pad")?);
    let mut copy = Tensor::empty(device, &[rows, columns], dtype)?;
    copy.copy_from(0, matrix)?;
    copy.copy_from(own, &Tensor::zeros(device, &[rows - own, columns], dtype)?)?;
    Ok(copy)
}

/// This rank's part of the vocabulary of the `weight`, if ranks divide it.
fn part_of(weight: &Param, ranks: &dyn LayerRanks) -> Option<VocabularyPart> {
    let (place, own) = (ranks.place(Axis::Tensor), weight.weights.shape()[0]);
    place.is_divided().then(|| VocabularyPart { first: place.rank * own, vocabulary: place.ranks * own })
}

/// Losses and log-sum-exp of the parts of all ranks; this rank has the `logits` of its `part`.
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
