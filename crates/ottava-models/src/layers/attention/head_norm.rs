//! The norm of queries and keys.

use super::norm_of_heads::{NormOfHeads, Weight};
use crate::layers::NormConfig;
use crate::layers::norm::initial_weight;
use ottava_common::error::{Error, Result};
use ottava_recipe::layer_ranks::LayerRanks;
use ottava_recipe::param::{Builder, FolderLayout, FolderTensor, Param, Split};
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{
    HeadNormLayout, HeadNormWeights, NormKind, ProjectionNormLayout, ProjectionSums, head_norm, head_norm_backward,
    projection_dots, projection_norm, projection_norm_backward, projection_squares,
};

/// The elements over which a norm of queries and keys takes one mean square.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormScope {
    /// Each head.
    Head,
    /// Each head, by an RMSNorm without weights.
    HeadUnweighted,
    /// Each head, and each head of values by an RMSNorm without weights.
    HeadAndValues,
    /// All query heads of a token, and separately all key heads of a token, as in OLMo 2, arXiv:2501.00656.
    Projection,
}

/// The heads of a rank.
pub(super) struct Heads {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// The number of ranks that have the same key and value heads.
    pub kv_replicas: usize,
}

/// The norm of queries and keys of an attention layer.
pub(super) struct HeadNorm {
    name: String,
    /// The weight of queries, and the weight of keys.
    weights: [Weight; 2],
    layout: Layout,
}

/// The layout of queries and keys for the norm's ops.
#[derive(Clone, Copy)]
enum Layout {
    Heads(HeadNormLayout, f64),
    /// The sums of squares of all tensor-parallel ranks are added.
    Projections(ProjectionNormLayout),
}

impl HeadNorm {
    /// Creates the norm of the attention layer `name`. Norms of heads have no bias.
    pub fn new(
        build: &mut Builder,
        name: &str,
        [q, k]: [&str; 2],
        of: Heads,
        scope: NormScope,
        norm: NormConfig,
    ) -> Result<HeadNorm> {
        let (Heads { heads, kv_heads, head_dim, kv_replicas }, NormConfig { kind, eps, .. }) = (of, norm);
        if scope == NormScope::HeadUnweighted {
            let weights = [Weight::ones(build, head_dim)?, Weight::ones(build, head_dim)?];
            let layout = Layout::Heads(HeadNormLayout { heads, kv_heads, head_dim, kind: NormKind::Rms }, eps);
            return Ok(HeadNorm { name: name.to_string(), weights, layout });
        }
        let ranks = build.place().ranks;
        let mut weight = |which: &str, len: usize, replicas: usize| {
            let whole = len * ranks / replicas;
            // An RMSNorm of each head has one weight vector for all heads. All other norms have separate weights for each head.
            let (whole, layout, split) = match (kind, scope) {
                (NormKind::Layer, _) if which.contains("{}") => {
                    (whole, FolderLayout::Heads(whole / head_dim), Split::Output)
                }
                (NormKind::Layer, _) => (whole, FolderLayout::Rows(whole / head_dim), Split::Output),
                (_, NormScope::Projection) => (whole, FolderLayout::Same, Split::Output),
                (_, NormScope::Head | NormScope::HeadUnweighted | NormScope::HeadAndValues) => {
                    (len, FolderLayout::Same, Split::None)
                }
            };
            let tensor = FolderTensor { layout, ..FolderTensor::new(format!("{name}.{which}.weight"), vec![whole]) };
            let shards = build.shards(tensor, &[], &[replicas], split)?;
            Param::new(build, shards, initial_weight(kind))
        };
        let layout = match scope {
            NormScope::Head | NormScope::HeadUnweighted | NormScope::HeadAndValues => {
                Layout::Heads(HeadNormLayout { heads, kv_heads, head_dim, kind }, eps)
            }
            NormScope::Projection if kind == NormKind::Layer => {
                return Err(Error::Config(format!("`{name}`: a LayerNorm of all heads together is not implemented")));
            }
            NormScope::Projection => {
                let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
                Layout::Projections(ProjectionNormLayout { queries, keys, kind, eps, ranks })
            }
        };
        let [of_q, of_k] = match layout {
            Layout::Heads(layout, _) => layout.weights(),
            Layout::Projections(layout) => [layout.queries, layout.keys],
        };
        let weights =
            [weight(q, of_q, 1)?, weight(k, of_k, kv_replicas)?].map(|param| Weight::Trained(Box::new(param)));
        Ok(HeadNorm { name: name.to_string(), weights, layout })
    }

    /// Returns the weights of queries and of keys.
    fn values(&self) -> Result<[Tensor; 2]> {
        let [q, k] = &self.weights;
        Ok([q.value()?, k.value()?])
    }

    /// Returns the sums of squares over all ranks.
    fn squares(&self, qkv: &Tensor, layout: ProjectionNormLayout, ranks: &dyn LayerRanks) -> Result<Tensor> {
        ranks.sum(Axis::Tensor, &self.name, &projection_squares(qkv, layout)?, None)
    }
}

impl NormOfHeads for HeadNorm {
    fn forward(&self, qkv: &Tensor, ranks: &dyn LayerRanks) -> Result<Tensor> {
        let [q, k] = &self.values()?;
        let weights = HeadNormWeights { q, k };
        match self.layout {
            Layout::Heads(layout, eps) => Ok(head_norm(qkv, weights, layout, eps)?),
            Layout::Projections(layout) => {
                Ok(projection_norm(qkv, weights, layout, &self.squares(qkv, layout, ranks)?)?)
            }
        }
    }

    fn backward(&mut self, dy: &Tensor, qkv: &Tensor, ranks: &dyn LayerRanks) -> Result<Tensor> {
        let [q, k] = &self.values()?;
        let (weights, [mut of_q, mut of_k]) = (HeadNormWeights { q, k }, [None, None]);
        match self.layout {
            Layout::Heads(layout, eps) => {
                let [q, k] = &mut self.weights;
                let (dq, dk) = (q.gradient(&mut of_q)?, k.gradient(&mut of_k)?);
                Ok(head_norm_backward(dy, qkv, weights, layout, eps, dq, dk)?)
            }
            Layout::Projections(layout) => {
                let squares = &self.squares(qkv, layout, ranks)?;
                let dots = projection_dots(dy, qkv, weights, layout, squares)?;
                let dots = &ranks.sum(Axis::Tensor, &self.name, &dots, None)?;
                let [q, k] = &mut self.weights;
                let (dq, dk) = (q.gradient(&mut of_q)?, k.gradient(&mut of_k)?);
                Ok(projection_norm_backward(dy, qkv, weights, layout, ProjectionSums { squares, dots }, dq, dk)?)
            }
        }
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.weights.iter().filter_map(Weight::param).for_each(visit);
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.weights.iter_mut().filter_map(Weight::param_mut).for_each(visit);
    }
}
