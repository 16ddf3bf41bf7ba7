//! Per-layer embeddings: each token has an embedding for each block, in addition to the embedding that starts the residual stream. Google DeepMind
//! 2025, "Gemma 3n", and `transformers`.
//!
//! `LayerEmbeddings` computes the embeddings of all blocks, once per pass: the sum of a row of a table and a projection of the token's embedding. A
//! `GatedEmbedding` of each block reads its part through the [`SharedValues`](ottava_recipe::shared_values::SharedValues) of the pass.

use super::cast::SavedOperand;
use super::{Adaptable, Embedding, Factor, Linear, LinearConfig, Norm, NormSaved, Stream};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::param::{Builder, FolderLayout, Param, Split};
use ottava_recipe::shared_values::SharedKey;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{add, divide_columns, join_columns};

/// The sizes of per-layer embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerEmbeddingsSpec {
    /// The number of rows of the table.
    pub vocabulary: usize,
    /// The number of elements `D` of the embedding of a block.
    pub width: usize,
}

/// The names of the tensors, which belong to no block.
const TABLE: &str = "model.embed_tokens_per_layer";
const PROJECTION: &str = "model.per_layer_model_projection";
const NORM: &str = "model.per_layer_projection_norm";

/// `p = (norm(projection(e) / √C) + √D · table[ids]) / √2`, for the embeddings `e` `[T, C]` of tokens. The norm is over the `D` elements of a block.
pub struct LayerEmbeddings {
    table: Embedding,   /* [V, L·D] */
    projection: Linear, /* [L·D, C] */
    norm: Norm,         /* [D] */
    /// `1 / √2`.
    factor: Factor,
    /// The number of blocks, `L`.
    blocks: usize,
    width: usize,
}

/// The values that forward of [`LayerEmbeddings`] saves.
pub struct LayerEmbeddingsSaved {
    embedded: Tensor, /* [T, C] */
    operand: SavedOperand,
    norm: NormSaved,
}

impl LayerEmbeddings {
    /// Creates the embeddings of `blocks` blocks.
    pub fn new(
        build: &mut Builder,
        spec: LayerEmbeddingsSpec,
        blocks: usize,
        stream: &Stream,
    ) -> Result<LayerEmbeddings> {
        let (LayerEmbeddingsSpec { vocabulary, width }, Stream { channels, std, norm, .. }) = (spec, *stream);
        let all = blocks * width;
        let factor = Factor::rounded(build.device, all, (width as f64).sqrt() as f32, build.recipe.compute)?;
        let table = Embedding::new(build, TABLE, [vocabulary, all], std, factor, Split::Vocabulary)?;
        let config = LinearConfig {
            name: PROJECTION,
            parts: &[(PROJECTION.to_string(), all)],
            fused: &[],
            replicas: &[],
            inputs: channels,
            bias: false,
            std,
            layout: FolderLayout::Same,
            // Each rank projects its own tokens.
            split: Split::None,
            shared_input: None,
            uncast: Some("it belongs to the embedding, which is not cast"),
        };
        let projection = Linear::new(build, config)?;
        let projection = projection.multiplied(build.device, &[(all, (channels as f64).powf(-0.5) as f32)])?;
        let norm = Norm::new(build, NORM, width, norm)?;
        let factor = Factor::new(build.device, width, std::f32::consts::FRAC_1_SQRT_2)?;
        Ok(LayerEmbeddings { table, projection, norm, factor, blocks, width })
    }

    /// Puts the embeddings of the tokens `ids` `[T]`, whose embeddings are `embedded`, into the shared values of the pass.
    pub fn forward(&self, embedded: &Tensor, ids: &Tensor, context: &mut Context) -> Result<LayerEmbeddingsSaved> {
        let (projected, operand) = self.projection.forward(embedded.clone(), None, context)?;
        let [tokens, all] = projected.dims("per-layer embeddings")?;
        let rows = [tokens * self.blocks, self.width];
        let (normed, norm) = self.norm.forward(&projected.reshape(&rows)?, context)?;
        let of_table = self.table.forward(ids, context.loan, context)?.reshape(&rows)?;
        let sum = self.factor.apply(add(&normed, &of_table)?)?.reshape(&[tokens, all])?;
        let parts = divide_columns(&sum, &[all], self.blocks)?.reshape(&[self.blocks * tokens, self.width])?;
        for block in 0..self.blocks {
            let part = parts.rows(block * tokens, (block + 1) * tokens)?;
            context.shared().put(SharedKey::LayerEmbedding(block), part);
        }
        Ok(LayerEmbeddingsSaved { embedded: embedded.clone(), operand, norm })
    }

    /// Returns the gradient by the embeddings of tokens, from the gradients that blocks have added to the shared values. Adds to the gradients of the
    /// parameters.
    pub fn backward(&mut self, saved: LayerEmbeddingsSaved, ids: &Tensor, context: &mut Context) -> Result<Tensor> {
        let LayerEmbeddingsSaved { embedded, operand, norm } = saved;
        let (tokens, all) = (embedded.shape()[0], self.blocks * self.width);
        let mut parts = Tensor::zeros(embedded.device(), &[self.blocks * tokens, self.width], embedded.dtype())?;
        for block in 0..self.blocks {
            if let Some(part) = context.shared().take_gradient(SharedKey::LayerEmbedding(block)) {
                parts.copy_from(block * tokens, &part)?;
            }
        }
        let joined = join_columns(&parts.reshape(&[self.blocks, tokens, self.width])?, &[all])?;
        let dsum = self.factor.apply(joined.reshape(&[tokens * self.blocks, self.width])?)?;
        self.table.backward(&dsum.reshape(&[tokens, all])?, ids, context)?;
        let dprojected = self.norm.backward(&dsum, norm)?.reshape(&[tokens, all])?;
        self.projection.backward_recomputing(dprojected.into(), operand, |_| Ok(embedded), context)
    }

    /// Calls `visit` for each linear that can have an adapter.
    pub fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut dyn Adaptable)) {
        visit(&mut self.projection);
    }

    /// Returns the parameters, always in the same order.
    pub fn parameters(&self) -> Vec<&Param> {
        let mut all = vec![&self.table.table];
        self.projection.parameters(&mut |param| all.push(param));
        self.norm.parameters(&mut |param| all.push(param));
        all
    }

    /// Returns the parameters mutably, in the order of [`LayerEmbeddings::parameters`].
    pub fn parameters_mut(&mut self) -> Vec<&mut Param> {
        let mut all = vec![&mut self.table.table];
        self.projection.parameters_mut(&mut |param| all.push(param));
        self.norm.parameters_mut(&mut |param| all.push(param));
        all
    }
}
