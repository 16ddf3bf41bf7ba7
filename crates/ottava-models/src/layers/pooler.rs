//! The layers between the last block of an encoder and the scores of its labels: the mean of each text, a linear, an activation and a norm.
//!
//! A pooler computes each token by itself, so the loss reads the token that it wants, as the loss of a decoder does. The mean of a text is computed by
//! attention whose scores are all 0, and each token of the text has it.

use super::cast::SavedOperand;
use super::{Linear, LinearConfig, Norm, NormSaved, Stream};
use ottava_common::error::{Error, Result};
use ottava_recipe::context::{Context, Sequences};
use ottava_recipe::param::{Builder, FolderLayout, FolderTensor, Init, Param, Split};
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{
    Activation, AttentionInput, AttentionSpec, HeadView, activation, activation_backward, attention, attention_backward,
};

/// The settings of a [`Pooler`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PoolerSpec {
    /// Whether the linear reads the mean of each text instead of its tokens.
    pub mean: bool,
    /// The name of the linear `[C, C]`.
    pub name: &'static str,
    /// Whether the linear has a bias.
    pub bias: bool,
    /// The activation after the linear.
    pub activation: Activation,
    /// The name of the norm after the activation. `None` without a norm.
    pub norm: Option<&'static str>,
    /// Whether the pooler is computed. A folder of an encoder without a head has a pooler that nothing reads.
    pub is_read: bool,
}

/// `y = norm(activation(linear(mean(x))))`. A missing norm is the identity, and so is a mean that the spec does not ask for.
pub enum Pooler {
    /// A pooler that is computed.
    Read(Box<ReadPooler>),
    /// The parameters of a pooler that is not computed. Updates do not change them.
    Unread(Vec<Param>),
}

/// A pooler that is computed.
pub struct ReadPooler {
    mean: Option<AttentionSpec>,
    linear: Linear,
    activation: Activation,
    norm: Option<Norm>,
}

/// The values that forward of [`Pooler`] saves. `None` for a pooler that is not computed.
pub struct PoolerSaved(Option<ReadSaved>);

struct ReadSaved {
    x: Tensor, /* [T, C] */
    /// The means of texts and their `lse`, if the pooler has means.
    means: Option<[Tensor; 2]>,
    operand: SavedOperand,
    hidden: Tensor, /* [T, C] */
    norm: Option<NormSaved>,
}

/// The elements of the heads of attention that computes means, if they divide the channels.
const MEAN_HEAD: usize = 64;

impl Pooler {
    /// Creates the pooler of `spec` with the settings of `stream`.
    ///
    /// Errors if ranks divide the tokens whose mean the pooler reads.
    pub fn new(build: &mut Builder, spec: PoolerSpec, stream: &Stream) -> Result<Pooler> {
        let (PoolerSpec { name, bias, .. }, Stream { channels, std, norm, .. }) = (spec, *stream);
        if !spec.is_read {
            let mut param = |suffix: &str, shape, init| -> Result<Param> {
                let shard = build.shard(FolderTensor::new(format!("{name}.{suffix}"), shape), Split::None)?;
                Ok(Param::new(build, vec![shard], init)?.at_rate(0.0))
            };
            let weight = param("weight", vec![channels, channels], Init::Normal(std))?;
            let bias = bias.then(|| param("bias", vec![channels], Init::Zeros)).transpose()?;
            return Ok(Pooler::Unread([weight].into_iter().chain(bias).collect()));
        }
        let divides = |axis| build.place_on(axis).is_divided();
        if spec.mean && [Axis::Tensor, Axis::Context].into_iter().any(divides) {
            return Err(Error::Config(
                "`classifier_pooling` of config.json is \"mean\", and ranks that divide tokens do not compute the mean of a text; set \
                 `parallel.tensor` and `parallel.context` to 1"
                    .into(),
            ));
        }
        let head = if channels.is_multiple_of(MEAN_HEAD) { MEAN_HEAD } else { channels };
        let heads = channels / head;
        let of_means = AttentionSpec {
            causal: false,
            scale: 0.0,
            deterministic: true,
            ..AttentionSpec::causal(heads, heads, head)
        };
        let config = LinearConfig {
            name,
            parts: &[(name.to_string(), channels)],
            fused: &[],
            replicas: &[],
            inputs: channels,
            bias,
            std,
            layout: FolderLayout::Same,
            // Each rank computes its own tokens.
            split: Split::None,
            shared_input: None,
            uncast: Some("it belongs to the head, which is not cast"),
        };
        Ok(Pooler::Read(Box::new(ReadPooler {
            mean: spec.mean.then_some(of_means),
            linear: Linear::new(build, config)?,
            activation: spec.activation,
            norm: spec.norm.map(|name| Norm::new(build, name, channels, norm)).transpose()?,
        })))
    }

    /// Returns the pooled activations `[T, C]` of `x` `[T, C]`, or `x` if the pooler is not computed.
    pub fn forward(&self, x: &Tensor, context: &mut Context) -> Result<(Tensor, PoolerSaved)> {
        match self {
            Pooler::Read(pooler) => pooler.forward(x, context).map(|(y, saved)| (y, PoolerSaved(Some(saved)))),
            Pooler::Unread(_) => Ok((x.clone(), PoolerSaved(None))),
        }
    }

    /// Returns the gradient by `x`. Adds to the gradients of the parameters.
    pub fn backward(&mut self, dy: Tensor, saved: PoolerSaved, context: &mut Context) -> Result<Tensor> {
        match (self, saved.0) {
            (Pooler::Read(pooler), Some(saved)) => pooler.backward(dy, saved, context),
            (Pooler::Unread(params), _) => {
                // Each trained parameter has a gradient.
                params.iter_mut().try_for_each(|param| param.gradient.sum_mut().map(drop))?;
                Ok(dy)
            }
            (Pooler::Read(_), None) => unreachable!("forward of a pooler that is computed saves values"),
        }
    }

    /// Returns the parameters, always in the same order.
    pub fn parameters(&self) -> Vec<&Param> {
        let mut all = Vec::new();
        match self {
            Pooler::Read(pooler) => {
                pooler.linear.parameters(&mut |param| all.push(param));
                pooler.norm.iter().for_each(|norm| norm.parameters(&mut |param| all.push(param)));
            }
            Pooler::Unread(params) => all.extend(params),
        }
        all
    }

    /// Returns the parameters mutably, in the order of [`Pooler::parameters`].
    pub fn parameters_mut(&mut self) -> Vec<&mut Param> {
        let mut all = Vec::new();
        match self {
            Pooler::Read(pooler) => {
                pooler.linear.parameters_mut(&mut |param| all.push(param));
                pooler.norm.iter_mut().for_each(|norm| norm.parameters_mut(&mut |param| all.push(param)));
            }
            Pooler::Unread(params) => all.extend(params),
        }
        all
    }
}

impl ReadPooler {
    fn forward(&self, x: &Tensor, context: &mut Context) -> Result<(Tensor, ReadSaved)> {
        let means = match &self.mean {
            Some(spec) => {
                let views = [x.clone(), x.clone(), x.clone()];
                let (means, lse) = attention(texts(&views, context.sequences), spec)?;
                Some([means, lse])
            }
            None => None,
        };
        let input = means.as_ref().map_or(x, |[means, _]| means).clone();
        let (hidden, operand) = self.linear.forward(input, None, context)?;
        let activated = activation(self.activation, &hidden)?;
        let (y, norm) = match &self.norm {
            Some(norm) => {
                let (y, saved) = norm.forward(&activated, context)?;
                (y, Some(saved))
            }
            None => (activated, None),
        };
        Ok((y, ReadSaved { x: x.clone(), means, operand, hidden, norm }))
    }

    fn backward(&mut self, dy: Tensor, saved: ReadSaved, context: &mut Context) -> Result<Tensor> {
        let ReadSaved { x, means, operand, hidden, norm } = saved;
        let dactivated = match (&mut self.norm, norm) {
            (Some(norm), Some(saved)) => norm.backward(&dy, saved)?,
            _ => dy,
        };
        let dhidden = activation_backward(self.activation, &dactivated, &hidden)?;
        let input = means.as_ref().map_or(&x, |[means, _]| means).clone();
        let dinput = self.linear.backward_recomputing(dhidden.into(), operand, |_| Ok(input), context)?;
        let (Some(spec), Some([means, lse])) = (&self.mean, means) else { return Ok(dinput) };
        let views = [x.clone(), x.clone(), x];
        let gradient = attention_backward(&dinput, texts(&views, context.sequences), &means, &lse, spec)?;
        // The scores do not depend on queries and keys, so only values have a gradient.
        Ok(gradient.tensors().pop().expect("queries, keys and values have a gradient each"))
    }
}

/// Returns the queries, keys and values of attention within texts.
fn texts<'a>([q, k, v]: &'a [Tensor; 3], sequences: &'a Sequences) -> AttentionInput<'a> {
    let [q, k, v] = [q, k, v].map(HeadView::whole);
    AttentionInput { q, k, v, batch: sequences.batch, first_query: 0, cu_seqlens: sequences.cu_seqlens.as_ref() }
}
