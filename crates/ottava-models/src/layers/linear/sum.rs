//! Products whose sums ranks divide: each rank has a partial sum of all rows, and gets the whole sum of its own rows.

use super::Linear;
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::View;
use ottava_recipe::param::Split;
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;

impl Linear {
    /// `product` of `x` with the `addend`, if ranks do not divide the dimension `divided` of the weight along which it sums. Otherwise
    /// `addend + Σ product(x)` over the ranks that divide tensors: this rank's rows if ranks divide tokens.
    ///
    /// If ranks divide tokens, the rows of other ranks are computed first, and are sent while this rank's rows are computed. Scales of blocks
    /// cannot be divided by rows, and comparisons sample whole products: then all rows are computed before any is sent.
    pub(super) fn sum_over_ranks(
        &self,
        divided: Split,
        x: &View,
        addend: Option<&Tensor>,
        product: impl Fn(&View, Option<&Tensor>, &mut Context) -> Result<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        if !self.sums(divided, context) {
            return product(x, addend, context);
        }
        let name = self.weight.name();
        let rows = x.row_count();
        let divides = context.divides_tokens() && !context.casts.compares();
        if !divides || x.row_range(context.place().range(rows))?.is_none() {
            let partial = product(x, None, context)?;
            return context.sum(name, partial, addend);
        }
        let ranks = context.ranks;
        let mut partial = |range| product(&x.row_range(range)?.expect("all ranks have equal rows"), None, context);
        ranks.sum_computed_rows(Axis::Tensor, name, rows, &mut partial, addend)
    }
}
