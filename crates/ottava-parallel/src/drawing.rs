//! The ranks that draw completions together.
//!
//! Ranks that divide the tensors or the experts of a model compute each pass of a draw together: a pass adds partial sums over these ranks. So they draw
//! the same completions, with engines that make the same decisions. What only one process may decide, such as a reward, is computed by the first of these
//! ranks, which gives it to the others ([`Ranks::of_first_drawing`]).

use crate::Ranks;
use crate::ranks::different;
use ottava_common::error::Result;
use ottava_common::interrupt;
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_tensor::comm::{Axis, Group};
use serde::Serialize;
use serde::de::DeserializeOwned;

impl Ranks {
    /// Returns the ranks that draw completions together with this rank, this rank included.
    fn drawing(&self) -> &Group {
        self.group(&[Axis::Tensor, Axis::Expert])
    }

    /// Returns whether this rank draws completions alone.
    pub fn draws_alone(&self) -> bool {
        self.drawing().size() == 1
    }

    /// Returns whether this rank is the first of the ranks that draw together.
    pub fn leads_draws(&self) -> bool {
        self.drawing().rank() == 0
    }

    /// Returns the place of the ranks that draw together among all such groups of ranks.
    pub fn place_of_draws(&self) -> ShardPlace {
        let ((rank, ranks), experts) = (self.rows(), self.shape().expert);
        ShardPlace { rank: rank / experts, ranks: ranks / experts }
    }

    /// Returns the entries of `all` of the first ranks of all groups that draw together, in the order of [`Ranks::place_of_draws`]. `all` has one entry
    /// per rank.
    pub fn of_draws<T>(&self, all: Vec<T>) -> Vec<T> {
        let shape = *self.shape();
        let leads = |rank: usize| [Axis::Tensor, Axis::Expert].iter().all(|&axis| shape.coordinate(rank, axis) == 0);
        all.into_iter().enumerate().filter(|(rank, _)| leads(*rank)).map(|(_, entry)| entry).collect()
    }

    /// Returns the value that the first of the ranks that draw together computes.
    ///
    /// Errors as [`Ranks::of_first`], on these ranks.
    pub fn of_first_drawing<T: Serialize + DeserializeOwned>(
        &self,
        what: &str,
        compute: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if self.draws_alone() { compute() } else { Ranks::of_first(self.drawing(), what, compute) }
    }

    /// Returns the least `number` among the ranks that draw together.
    pub fn least_of_drawing(&self, what: &str, number: usize) -> Result<usize> {
        let all = self.drawing().agree(what, &(number as u64).to_le_bytes())?;
        let read = |bytes: &Vec<u8>| bytes[..].try_into().map(u64::from_le_bytes).ok();
        let least = all.iter().map(read).collect::<Option<Vec<u64>>>().and_then(|all| all.into_iter().min());
        least.map(|least| least as usize).ok_or_else(|| different(what))
    }

    /// Errors with [`Error::Cancelled`](ottava_common::Error::Cancelled) on all ranks that draw together if one of them was asked to stop while `doing`
    /// something. These ranks compute the next pass together, or none of them does.
    pub fn check_stop_of_draws(&self, doing: &str) -> Result<()> {
        let own = interrupt::check(doing);
        if self.draws_alone() {
            return own;
        }
        let all = self.drawing().agree(doing, &[u8::from(own.is_err())])?;
        own?;
        match all.iter().all(|asked| asked == &[0]) {
            true => Ok(()),
            false => Err(interrupt::cancelled(doing)),
        }
    }
}
