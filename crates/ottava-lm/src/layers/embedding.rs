//! Token embedding. Its input has no gradient, so it is not a [`Sublayer`](super::Sublayer).

use crate::error::Result;
use crate::param::{Builder, FolderTensor, Init, Loan, Param, Split};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{embedding, embedding_gradient};

/// `y[t] = table[ids[t]]`.
pub struct Embedding {
    /// `[V, C]`; also the head's weight if the two are tied.
    pub table: Param,
}

impl Embedding {
    /// A table called `name` + `.weight`.
    pub fn new(build: &mut Builder, name: &str, vocabulary: usize, channels: usize, std: f32) -> Result<Embedding> {
        build.description.fixed.push(name.to_string());
        let tensor = FolderTensor::new(format!("{name}.weight"), vec![vocabulary, channels]);
        let shard = build.shard(tensor, Split::Vocabulary)?;
        Ok(Embedding { table: Param::new(build, vec![shard], Init::Normal(std))? })
    }

    /// Rows of the table for I32 `ids` `[T]`.
    pub fn forward(&self, ids: &Tensor, loan: &Loan) -> Result<Tensor> {
        Ok(embedding(&self.table.read(loan)?, ids)?)
    }

    /// Adds the gradient `dy` `[T, C]` to the table's, if it is trained.
    pub fn backward(&mut self, dy: &Tensor, ids: &Tensor) -> Result<()> {
        match self.table.is_trained() {
            true => Ok(embedding_gradient(dy, ids, self.table.grad_mut()?)?),
            false => Ok(()),
        }
    }
}
