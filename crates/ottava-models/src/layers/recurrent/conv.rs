//! The causal convolution before a recurrence.

use super::MixerHeads;
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::param::{Builder, FolderTensor, Init, Param, Split};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{ConvWeights, causal_conv_backward};

/// The parameters of a causal convolution, whose channels are three sections of heads.
pub struct Conv {
    weight: Param,       /* [C, 1, K] */
    bias: Option<Param>, /* [C] */
}

/// The values of the parameters for this rank's heads.
pub struct ConvValues {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl ConvValues {
    pub fn weights(&self) -> ConvWeights<'_> {
        ConvWeights { weight: &self.weight, bias: self.bias.as_ref() }
    }
}

impl Conv {
    /// Creates the convolution of the layer called `layer` with `taps` taps. `sections` are the numbers of channels of its sections, which ranks divide.
    pub fn new(
        build: &mut Builder,
        layer: &str,
        sections: [usize; 3],
        taps: usize,
        has_bias: bool,
        std: f32,
    ) -> Result<Conv> {
        let mut param = |suffix: &str, shape: &[usize], init| {
            let shape = [&[sections.iter().sum::<usize>()], shape].concat();
            let tensor = FolderTensor::new(format!("{layer}.conv1d.{suffix}"), shape);
            let shards = build.shards(tensor, &sections, &[], Split::Output)?;
            Param::new(build, shards, init)
        };
        let weight = param("weight", &[1, taps], Init::Normal(std))?;
        let bias = has_bias.then(|| param("bias", &[], Init::Zeros)).transpose()?;
        Ok(Conv { weight, bias })
    }

    /// Returns the values for this rank's heads.
    pub fn values(&self, heads: &MixerHeads, context: &Context) -> Result<ConvValues> {
        let sections = heads.channel_sections(context.sequences.place);
        let read = |param: &Param| sections.own_rows(param.read(context.loan)?);
        Ok(ConvValues { weight: read(&self.weight)?, bias: self.bias.as_ref().map(read).transpose()? })
    }

    /// Returns the gradient by `x` of the convolution, all tokens of this rank's heads, from the gradient `dy` by the result. Adds to the gradients of the
    /// parameters.
    pub fn backward(&mut self, dy: &Tensor, x: &Tensor, heads: &MixerHeads, context: &Context) -> Result<Tensor> {
        let (values, segments) = (self.values(heads, context)?, context.sequences.segments());
        let sections = heads.channel_sections(context.sequences.place);
        let (mut unread, mut unread_bias) = (None, None);
        let mut dweight = sections.lend(self.weight.grad_or_unread(&mut unread)?)?;
        let dbias = self.bias.as_mut().map(|bias| sections.lend(bias.grad_or_unread(&mut unread_bias)?));
        let mut dbias = dbias.transpose()?;
        let of_bias = dbias.as_mut().map(|dbias| dbias.rows());
        let dx = causal_conv_backward(dy, x, values.weights(), segments, dweight.rows(), of_bias)?;
        dweight.put_back()?;
        dbias.map_or(Ok(()), |dbias| dbias.put_back())?;
        Ok(dx)
    }

    pub fn parameters(&self) -> impl Iterator<Item = &Param> {
        std::iter::once(&self.weight).chain(&self.bias)
    }

    pub fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Param> {
        std::iter::once(&mut self.weight).chain(&mut self.bias)
    }
}
