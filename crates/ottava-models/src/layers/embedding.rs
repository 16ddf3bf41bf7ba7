//! Token embedding. Its input has no gradient, so it is not a [`Sublayer`](super::Sublayer).

use super::Factor;
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::param::{Builder, FolderTensor, Init, Loan, Param, Split};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{
    DrawnColumns, add_noise, embedding, embedding_gradient, embedding_of_part, embedding_of_part_gradient,
};

/// `y[t] = factor · table[ids[t]]`. Training may add noise that is uniform between `±strength / sqrt(L · C)`, where `L` is the length of the sequences
/// and `C` the number of channels (NEFTune: Jain et al. 2023, arXiv:2310.05914).
pub struct Embedding {
    /// `[V, C]`. This is also the head's weight if embedding and head share it.
    pub table: Param,
    factor: Factor,
    split: Split,
    /// The row of id 0. The rows before it belong to no id.
    first_row: usize,
    /// The strength of the noise; 0 adds none.
    noise: f64,
}

impl Embedding {
    /// Creates a table called `name` + `.weight`. Its rows are multiplied by `factor`. Ranks divide a vocabulary by `split`; they do not divide a
    /// table of positions.
    pub fn new(
        build: &mut Builder,
        name: &str,
        [vocabulary, channels]: [usize; 2],
        std: f32,
        factor: Factor,
        split: Split,
    ) -> Result<Embedding> {
        build.description.fixed.push(name.to_string());
        let tensor = FolderTensor::new(format!("{name}.weight"), vec![vocabulary, channels]);
        let shard = build.shard(tensor, split)?;
        Ok(Embedding {
            table: Param::new(build, vec![shard], Init::Normal(std))?,
            factor,
            split,
            first_row: 0,
            noise: 0.0,
        })
    }

    /// Returns the same embedding with noise of this strength in training.
    pub fn with_noise(self, noise: f64) -> Embedding {
        Embedding { noise, ..self }
    }

    /// Returns the same embedding, in which id 0 has the row `first_row`. Ranks must not divide the table.
    pub fn with_first_row(self, first_row: usize) -> Embedding {
        Embedding { first_row, ..self }
    }

    /// Returns the first token of this rank's part of the table, if ranks divide the table.
    fn first(&self, context: &Context) -> Option<usize> {
        let place = context.place();
        let divides = place.is_divided() && self.split == Split::Vocabulary;
        divides.then(|| place.rank * self.table.weights.shape()[0])
    }

    /// Returns the rows of the table for I32 `ids` `[T]`, times the factor, plus noise. If ranks divide tokens, returns the rows of this rank's tokens.
    pub fn forward(&self, ids: &Tensor, loan: &Loan, context: &Context) -> Result<Tensor> {
        let table = self.table.read(loan)?;
        let rows = match self.first(context) {
            Some(first) => context.sum(self.table.identity.name(), embedding_of_part(&table, ids, first)?, None)?,
            None => embedding(&table.rows(self.first_row, table.shape()[0])?, &context.own_rows(ids)?)?,
        };
        self.noisy(self.factor.apply(rows)?, context)
    }

    /// Adds the noise, in a pass that draws random numbers.
    fn noisy(&self, rows: Tensor, context: &Context) -> Result<Tensor> {
        if self.noise == 0.0 {
            return Ok(rows);
        }
        let [tokens, channels] = rows.dims("embedding: rows")?;
        let Some(draws) = context.draws(tokens)? else { return Ok(rows) };
        let size = self.noise / ((context.sequences.seq_len * channels) as f64).sqrt();
        let columns = DrawnColumns { key: self.table.identity.seed(), first: 0 };
        Ok(add_noise(&rows, size as f32, &draws, columns)?)
    }

    /// Adds to the gradient of the table, if the table is trained. `dy` is the gradient by the result of [`Embedding::forward`].
    pub fn backward(&mut self, dy: &Tensor, ids: &Tensor, context: &Context) -> Result<()> {
        if !self.table.is_trained() {
            return Ok(());
        }
        let dy = self.factor.apply(dy.clone())?;
        match self.first(context) {
            Some(first) => {
                let dy = context.gather(self.table.identity.name(), &dy)?;
                Ok(embedding_of_part_gradient(&dy, ids, first, self.table.gradient.sum_mut()?)?)
            }
            None if self.first_row == 0 => {
                Ok(embedding_gradient(&dy, &context.own_rows(ids)?, self.table.gradient.sum_mut()?)?)
            }
            None => {
                let (ids, sum) = (context.own_rows(ids)?, self.table.gradient.sum_mut()?);
                let mut own = sum.rows(self.first_row, sum.shape()[0])?.duplicate()?;
                embedding_gradient(&dy, &ids, &mut own)?;
                Ok(sum.copy_from(self.first_row, &own)?)
            }
        }
    }
}
