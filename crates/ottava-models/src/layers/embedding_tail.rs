//! The end of the embedding of an encoder: token types are added, and a norm follows.

use super::{Embedding, Factor, Norm, NormSaved, Stream};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::param::{Builder, Param, Split};
use ottava_tensor::ops::add;
use ottava_tensor::{DType, Tensor};

/// The settings of an [`EmbeddingTail`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingTailSpec {
    /// The name of the embedding of token types, and the number of types. `None` without token types.
    pub types: Option<(&'static str, usize)>,
    /// The name of the norm.
    pub norm: &'static str,
}

/// `y = norm(x + types[0])`, where `x` is the sum of the embeddings of tokens and positions. All tokens have type 0.
pub struct EmbeddingTail {
    types: Option<Embedding>,
    norm: Norm,
}

/// The values that forward of [`EmbeddingTail`] saves.
pub struct EmbeddingTailSaved(NormSaved);

impl EmbeddingTail {
    /// Creates the tail of `spec` with the settings of `stream`.
    pub fn new(build: &mut Builder, spec: EmbeddingTailSpec, stream: &Stream) -> Result<EmbeddingTail> {
        let Stream { channels, std, norm, .. } = *stream;
        let types = spec
            .types
            .map(|(name, types)| Embedding::new(build, name, [types, channels], std, Factor::default(), Split::None));
        Ok(EmbeddingTail { types: types.transpose()?, norm: Norm::new(build, spec.norm, channels, norm)? })
    }

    /// Returns the normalised embeddings of the tokens `ids` `[T]`.
    pub fn forward(&self, x: &Tensor, ids: &Tensor, context: &Context) -> Result<(Tensor, EmbeddingTailSaved)> {
        let of_types = match &self.types {
            Some(types) => Some(types.forward(&first_types(ids)?, context.loan, context)?),
            None => None,
        };
        let sum = of_types.map_or_else(|| Ok(x.clone()), |of_types| add(x, &of_types))?;
        let (y, saved) = self.norm.forward(&sum, context)?;
        Ok((y, EmbeddingTailSaved(saved)))
    }

    /// Returns the gradient by `x`. Adds to the gradients of the parameters.
    pub fn backward(
        &mut self,
        dy: &Tensor,
        saved: EmbeddingTailSaved,
        ids: &Tensor,
        context: &Context,
    ) -> Result<Tensor> {
        let dx = self.norm.backward(dy, saved.0)?;
        if let Some(types) = &mut self.types {
            types.backward(&dx, &first_types(ids)?, context)?;
        }
        Ok(dx)
    }

    /// Returns the parameters, always in the same order.
    pub fn parameters(&self) -> Vec<&Param> {
        let mut all: Vec<_> = self.types.iter().map(|types| &types.table).collect();
        self.norm.parameters(&mut |param| all.push(param));
        all
    }

    /// Returns the parameters mutably, in the order of [`EmbeddingTail::parameters`].
    pub fn parameters_mut(&mut self) -> Vec<&mut Param> {
        let mut all: Vec<_> = self.types.iter_mut().map(|types| &mut types.table).collect();
        self.norm.parameters_mut(&mut |param| all.push(param));
        all
    }
}

/// Returns the type 0 of each token of `ids`.
fn first_types(ids: &Tensor) -> Result<Tensor> {
    Ok(Tensor::zeros(ids.device(), ids.shape(), DType::I32)?)
}
