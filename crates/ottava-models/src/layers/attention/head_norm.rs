//! The norm of queries and keys.

use super::norm_of_heads::NormOfHeads;
use crate::layers::NormConfig;
use crate::layers::norm::initial_weight;
use ottava_common::error::{Error, Result};
use ottava_recipe::layer_ranks::LayerRanks;
use ottava_recipe::param::{Builder, FolderLayout, FolderTensor, Param, Split};
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{
    HeadNormLayout, HeadNormWeights, NormKind, ProjectionNormLayout, ProjectionSums, cast, head_norm,
    head_norm_backward, projection_dots, projection_norm, projection_norm_backward, projection_squares, real_type,
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
    weights: Weights,
    layout: Layout,
}

/// The weights of the norm of an attention layer.
enum Weights {
    /// The weight of queries, `[D]` or `[H·D]`, and the weight of keys, `[D]` or `[H_kv·D]`.
    Trained(Box<[Param; 2]>),
    /// Ones `[D]`.
    Ones(Tensor),
}

impl Weights {
    /// Returns the weights of queries and of keys.
    fn values(&self) -> Result<[Tensor; 2]> {
        match self {
            Weights::Trained(of_both) => {
                let [q, k] = &**of_both;
                Ok([q.weights.value()?, k.weights.value()?])
            }
            Weights::Ones(ones) => Ok([ones.clone(), ones.clone()]),
        }
    }

    /// Returns the gradients of both weights. Gradients of weights that are not trained are zeros in `unread`.
    fn gradients<'a>(&'a mut self, unread: &'a mut [Option<Tensor>; 2]) -> Result<[&'a mut Tensor; 2]> {
        let [of_q, of_k] = unread;
        match self {
            Weights::Trained(of_both) => {
                let [q, k] = &mut **of_both;
                Ok([q.grad_or_unread(of_q)?, k.grad_or_unread(of_k)?])
            }
            Weights::Ones(ones) => {
                let zeros = || Tensor::zeros(ones.device(), ones.shape(), real_type(ones.dtype()));
                Ok([of_q.insert(zeros()?), of_k.insert(zeros()?)])
            }
        }
    }
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
            let ones = Tensor::from_slice(build.device, &[head_dim], &vec![1f32; head_dim])?;
            let weights = Weights::Ones(cast(&ones, build.recipe.compute)?);
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
        let weights = Weights::Trained(Box::new([weight(q, of_q, 1)?, weight(k, of_k, kv_replicas)?]));
        Ok(HeadNorm { name: name.to_string(), weights, layout })
    }

    /// Returns the sums of squares over all ranks.
    fn squares(&self, qkv: &Tensor, layout: ProjectionNormLayout, ranks: &dyn LayerRanks) -> Result<Tensor> {
        ranks.sum(Axis::Tensor, &self.name, projection_squares(qkv, layout)?)
    }
}

impl NormOfHeads for HeadNorm {
    fn forward(&self, qkv: &Tensor, ranks: &dyn LayerRanks) -> Result<Tensor> {
        let [q, k] = &self.weights.values()?;
        let weights = HeadNormWeights { q, k };
        match self.layout {
            Layout::Heads(layout, eps) => Ok(head_norm(qkv, weights, layout, eps)?),
            Layout::Projections(layout) => {
                Ok(projection_norm(qkv, weights, layout, &self.squares(qkv, layout, ranks)?)?)
            }
        }
    }

    fn backward(&mut self, dy: &Tensor, qkv: &Tensor, ranks: &dyn LayerRanks) -> Result<Tensor> {
        let [q, k] = &self.weights.values()?;
        let (weights, unread) = (HeadNormWeights { q, k }, &mut [None, None]);
        match self.layout {
            Layout::Heads(layout, eps) => {
                let [dq, dk] = self.weights.gradients(unread)?;
                Ok(head_norm_backward(dy, qkv, weights, layout, eps, dq, dk)?)
            }
            Layout::Projections(layout) => {
                let squares = &self.squares(qkv, layout, ranks)?;
                let dots = projection_dots(dy, qkv, weights, layout, squares)?;
                let dots = &ranks.sum(Axis::Tensor, &self.name, dots)?;
                let [dq, dk] = self.weights.gradients(unread)?;
                Ok(projection_norm_backward(dy, qkv, weights, layout, ProjectionSums { squares, dots }, dq, dk)?)
            }
        }
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        if let Weights::Trained(of_both) = &self.weights {
            of_both.iter().for_each(visit);
        }
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        if let Weights::Trained(of_both) = &mut self.weights {
            of_both.iter_mut().for_each(visit);
        }
    }
}
