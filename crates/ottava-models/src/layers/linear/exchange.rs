//! The exchange of products among ranks that divide the weight of a linear.

use super::core::WeightProduct;
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_recipe::param::Split;

/// The exchange among the ranks that divide the weight. It is chosen when the linear is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exchange {
    /// Nothing: each rank computes whole products.
    Nothing,
    /// Each rank has a partial sum of this product, and the sums of all ranks are added.
    SumsOf(WeightProduct),
}

impl Exchange {
    /// Returns the exchange for a weight that ranks divide by `split`. `place` is the place of this rank's part.
    pub fn new(split: Split, place: ShardPlace) -> Exchange {
        match split {
            _ if !place.is_divided() => Exchange::Nothing,
            Split::Input => Exchange::SumsOf(WeightProduct::Fprop),
            Split::Output => Exchange::SumsOf(WeightProduct::Dgrad),
            Split::None | Split::Vocabulary | Split::Expert => Exchange::Nothing,
        }
    }
}
