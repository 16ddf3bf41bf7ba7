//! The norm of query, key and value heads. Values have no weight. Each part of a row is normalised by `rmsnorm`, so heads may have any size.

use super::head_norm::Heads;
use super::norm_of_heads::{NormOfHeads, Weight};
use crate::layers::NormConfig;
use crate::layers::columns::{columns, copy_columns};
use ottava_common::error::Result;
use ottava_recipe::layer_ranks::LayerRanks;
use ottava_recipe::param::{Builder, FolderTensor, Init, Param, Split};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{NormBackward, NormWeights, norm_backward, rmsnorm};

/// The norms of the heads of a projection.
pub(super) struct PartNorm {
    parts: Vec<Part>,
    head_dim: usize,
    eps: f64,
}

/// Neighbouring heads with one norm.
struct Part {
    heads: usize,
    weight: Weight,
}

impl PartNorm {
    /// Creates the norms of queries and, if the layer has keys and values of its own, of keys and values.
    pub fn new(build: &mut Builder, name: &str, names: [&str; 2], of: Heads, norm: NormConfig) -> Result<PartNorm> {
        let Heads { heads, kv_heads, head_dim, .. } = of;
        let mut trained = |which: &str, heads| {
            let tensor = FolderTensor::new(format!("{name}.{which}.weight"), vec![head_dim]);
            let param = Param::new(build, vec![build.shard(tensor, Split::None)?], Init::Ones)?;
            Ok::<_, ottava_common::Error>(Part { heads, weight: Weight::Trained(Box::new(param)) })
        };
        let mut parts = vec![trained(names[0], heads)?];
        if kv_heads > 0 {
            parts.push(trained(names[1], kv_heads)?);
            parts.push(Part { heads: kv_heads, weight: Weight::ones(build, head_dim)? });
        }
        Ok(PartNorm { parts, head_dim, eps: norm.eps })
    }

    /// Returns the first column and the number of columns of each part.
    fn columns(&self) -> Vec<[usize; 2]> {
        let mut end = 0;
        let of = |part: &Part| {
            let width = part.heads * self.head_dim;
            end += width;
            [end - width, width]
        };
        self.parts.iter().map(of).collect()
    }

    /// Copies the heads of a part, `[T · heads, D]`.
    fn heads_of(&self, x: &Tensor, [first, width]: [usize; 2]) -> Result<Tensor> {
        Ok(columns(x, first, width)?.reshape(&[x.shape()[0] * width / self.head_dim, self.head_dim])?)
    }

    fn put_heads(heads: &Tensor, y: &mut Tensor, [first, width]: [usize; 2]) -> Result<()> {
        copy_columns(&heads.reshape(&[y.shape()[0], width])?, 0, y, first, width)
    }
}

impl NormOfHeads for PartNorm {
    fn forward(&self, qkv: &Tensor, _: &dyn LayerRanks) -> Result<Tensor> {
        let mut y = qkv.empty_like()?;
        for (part, columns) in self.parts.iter().zip(self.columns()) {
            let (normed, _) = rmsnorm(&self.heads_of(qkv, columns)?, &part.weight.value()?, self.eps)?;
            PartNorm::put_heads(&normed, &mut y, columns)?;
        }
        Ok(y)
    }

    fn backward(&mut self, dy: &Tensor, qkv: &Tensor, _: &dyn LayerRanks) -> Result<Tensor> {
        let mut dqkv = qkv.empty_like()?;
        for (at, columns) in self.columns().into_iter().enumerate() {
            let (x, dy) = (self.heads_of(qkv, columns)?, self.heads_of(dy, columns)?);
            let weight = self.parts[at].weight.value()?;
            // The statistics are small to compute and large to save.
            let (_, statistics) = rmsnorm(&x, &weight, self.eps)?;
            let (weights, mut unread) = (NormWeights::rms(&weight), None);
            let gradient = self.parts[at].weight.gradient(&mut unread)?;
            let dx = norm_backward(&dy, &x, weights, &statistics, gradient, NormBackward::default())?;
            PartNorm::put_heads(&dx, &mut dqkv, columns)?;
        }
        Ok(dqkv)
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.parts.iter().filter_map(|part| part.weight.param()).for_each(visit);
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.parts.iter_mut().filter_map(|part| part.weight.param_mut()).for_each(visit);
    }
}
