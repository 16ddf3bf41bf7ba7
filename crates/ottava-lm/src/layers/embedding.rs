//! Token embedding. Its input has no gradient, so it is not a [`Sublayer`](super::Sublayer).

use super::Factor;
use crate::error::Result;
use crate::param::{Builder, FolderTensor, Init, Loan, Param, Split};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{embedding, embedding_gradient};

/// `y[t] = factor · table[ids[t]]`.
pub struct Embedding {
    /// `[V, C]`; also the head's weight if the two are tied.
    pub table: Param,
    factor: Factor,
}

impl Embedding {
    /// A table called `name` + `.weight`, whose rows are multiplied by `factor`.
    pub fn new(
        build: &mut Builder,
        name: &str,
        [vocabulary, channels]: [usize; 2],
        std: f32,
        factor: Factor,
    ) -> Result<Embedding> {
        build.description.fixed.push(name.to_string());
        let tensor = FolderTensor::new(format!("{name}.weight"), vec![vocabulary, channels]);
        let shard = build.shard(tensor, Split::Vocabulary)?;
        Ok(Embedding { table: Param::new(build, vec![shard], Init::Normal(std))?, factor })
    }

    /// Multiplied rows of the table for I32 `ids` `[T]`.
    pub fn forward(&self, ids: &Tensor, loan: &Loan) -> Result<Tensor> {
        self.factor.apply(embedding(&self.table.read(loan)?, ids)?)
    }

    /// Adds the gradient by the table from the gradient `dy` `[T, C]`, if the table is trained.
    pub fn backward(&mut self, dy: &Tensor, ids: &Tensor) -> Result<()> {
        match self.table.is_trained() {
            true => Ok(embedding_gradient(&self.factor.apply(dy.clone())?, ids, self.table.grad_mut()?)?),
            false => Ok(()),
        }
    }
}
