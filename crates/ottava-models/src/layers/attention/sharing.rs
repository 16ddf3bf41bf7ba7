//! Keys and values that are not projected, or that later layers read too.

use super::Attention;
use super::source::KeysAndValues;
use crate::layers::columns::{columns, copy_columns};
use ottava_common::error::Result;
use ottava_recipe::context::{Context, Sequences};
use ottava_recipe::shared_values::SharedKey;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{AttentionInput, AttentionSpec, ColumnRuns, HeadView, add, sum_columns};

impl Attention {
    /// Returns queries, keys and values of a projection whose keys are also the values. Returns other projections unchanged.
    pub(super) fn complete(&self, projected: Tensor) -> Result<Tensor> {
        if !self.has_one_projection() {
            return Ok(projected);
        }
        let [queries, kv] = self.widths();
        let width = queries + 2 * kv;
        let mut qkv = Tensor::empty(projected.device(), &[projected.shape()[0], width], projected.dtype())?;
        copy_columns(&projected, 0, &mut qkv, 0, queries + kv)?;
        copy_columns(&projected, queries, &mut qkv, queries + kv, kv)?;
        Ok(qkv)
    }

    /// Returns the gradient by the input of [`Attention::complete`].
    pub(super) fn complete_backward(&self, dqkv: Tensor) -> Result<Tensor> {
        if !self.has_one_projection() {
            return Ok(dqkv);
        }
        let [queries, kv] = self.widths();
        let dkeys = sum_columns(&dqkv, ColumnRuns { first: queries, step: kv }, 2, kv)?;
        let mut projected = Tensor::empty(dqkv.device(), &[dqkv.shape()[0], queries + kv], dqkv.dtype())?;
        copy_columns(&dqkv, 0, &mut projected, 0, queries)?;
        copy_columns(&dkeys, 0, &mut projected, queries, kv)?;
        Ok(projected)
    }

    /// Returns the numbers of columns of this rank's projected queries, and of its keys.
    fn widths(&self) -> [usize; 2] {
        [self.heads.heads, self.heads.kv_heads].map(|heads| heads * self.heads.head_dim)
    }

    /// Shares the keys and values in `qkv`, if later layers read them. Returns the keys and values of another layer, if this layer reads them. `spec`
    /// are this rank's heads.
    pub(super) fn share(&self, qkv: &Tensor, spec: &AttentionSpec, context: &mut Context) -> Result<Option<Tensor>> {
        if self.heads.is_shared {
            let kv = columns(qkv, spec.query_width(), spec.key_width() + spec.value_width())?;
            context.shared().put(SharedKey::KeysAndValues(self.block), kv);
        }
        self.borrowed(context)
    }

    /// Returns the keys and values of another layer, if this layer reads them.
    pub(super) fn borrowed(&self, context: &mut Context) -> Result<Option<Tensor>> {
        match self.heads.source {
            KeysAndValues::OfBlock(block) => context.shared().get(SharedKey::KeysAndValues(block)).map(Some),
            KeysAndValues::Projections | KeysAndValues::OneProjection => Ok(None),
        }
    }

    /// Returns whether one projection gives keys and values.
    pub(super) fn has_one_projection(&self) -> bool {
        self.heads.source == KeysAndValues::OneProjection
    }

    /// Adds the gradients by keys and values that other layers have read to `dqkv`, or gives the gradient `dkv` to the layer that computed the keys
    /// and values. Returns the gradient by what this layer has projected.
    pub(super) fn share_backward(
        &self,
        mut dqkv: Tensor,
        dkv: Option<Tensor>,
        spec: &AttentionSpec,
        context: &mut Context,
    ) -> Result<Tensor> {
        if let (KeysAndValues::OfBlock(block), Some(dkv)) = (self.heads.source, dkv) {
            context.shared().add_gradient(SharedKey::KeysAndValues(block), dkv)?;
        }
        let read = if self.heads.is_shared {
            context.shared().take_gradient(SharedKey::KeysAndValues(self.block))
        } else {
            None
        };
        let Some(read) = read else { return Ok(dqkv) };
        let (queries, kv) = (spec.query_width(), spec.key_width() + spec.value_width());
        let sum = add(&columns(&dqkv, queries, kv)?, &read)?;
        copy_columns(&sum, 0, &mut dqkv, queries, kv)?;
        Ok(dqkv)
    }

    /// Returns the input of attention: `qkv`, or queries `qkv` with the keys and values `kv` of another layer.
    pub(super) fn input_of<'a>(
        qkv: &'a Tensor,
        kv: Option<&'a Tensor>,
        spec: &AttentionSpec,
        Sequences { batch, cu_seqlens, .. }: &'a Sequences,
    ) -> AttentionInput<'a> {
        let fused = AttentionInput::fused(qkv, spec, *batch, cu_seqlens.as_ref());
        match kv {
            Some(matrix) => {
                let view = |column| HeadView { matrix, column };
                AttentionInput { q: HeadView::whole(qkv), k: view(0), v: view(spec.key_width()), ..fused }
            }
            None => fused,
        }
    }

    /// Returns a matrix with queries at the place that they have in fused rows. Columns of keys and values are not set: the cache has them.
    pub(super) fn beside_cache(&self, queries: Tensor) -> Result<Tensor> {
        let (width, own) = (self.spec.qkv_width(), self.spec.query_width());
        let mut qkv = Tensor::zeros(queries.device(), &[queries.shape()[0], width], queries.dtype())?;
        copy_columns(&queries, 0, &mut qkv, 0, own)?;
        Ok(qkv)
    }
}
