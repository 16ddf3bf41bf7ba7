//! What ranks that divide the weight of a linear exchange of its products.

use super::core::WeightProduct;
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_recipe::param::Split;

/// What the ranks that divide the weight exchange, chosen when the linear is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exchange {
    /// Nothing: each rank computes whole products.
    Nothing,
    /// Of this product each rank has a partial sum, and ranks add them.
    SumsOf(WeightProduct),
}

impl Exchange {
    /// The exchange for a weight that ranks divide by `split`; this rank has the part of the weight at `place`.
    pub fn new(split: Split, place: ShardPlace) -> Exchange {
        match split {
            _ if !place.is_divided() => Exchange::Nothing,
            Split::Input => Exchange::SumsOf(WeightProduct::Fprop),
            Split::Output => Exchange::SumsOf(WeightProduct::Dgrad),
            Split::None | Split::Vocabulary | Split::Expert => Exchange::Nothing,
        }
    }
}
