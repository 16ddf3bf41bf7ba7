//! The memory layout of heads in latent attention: in the results of projections, and in the tensor that attention reads.

use ottava_common::error::Result;
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{ColumnRuns, move_columns, sum_columns};

/// The sizes of the parts of heads in latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentSizes {
    /// The size of the latent of queries. `None` if queries are projected from the residual stream.
    pub query_rank: Option<usize>,
    /// The size of the latent of keys and values.
    pub kv_rank: usize,
    /// The size of the part of a query or key without rotary positions.
    pub plain: usize,
    /// The size of the part of a query or key with rotary positions. All keys share this part.
    pub rotated: usize,
    /// The size of a value head.
    pub value: usize,
}

impl LatentSizes {
    /// Returns the size of a query or key head.
    pub fn head_dim(self) -> usize {
        self.plain + self.rotated
    }
}

/// Converts heads between the layout of projections and `[q | k | v]` `[T, 3·H·D]`. In `[q | k | v]`, the rotated part of a head precedes the plain
/// part, which does not change the products of queries and keys. Values are padded with zeros to the size of keys, since the fast kernels take heads
/// of one size.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub heads: usize,
    pub sizes: LatentSizes,
}

/// Returns runs of columns that begin at `first` and then every `step` columns.
fn runs(first: usize, step: usize) -> ColumnRuns {
    ColumnRuns { first, step }
}

impl Heads {
    /// Returns the heads of the rank at `place`.
    pub fn of_rank(self, place: ShardPlace) -> Heads {
        Heads { heads: place.share(self.heads), ..self }
    }

    /// Returns the width of projected queries, and of projected keys and values together.
    pub fn widths(self) -> [usize; 2] {
        let LatentSizes { plain, value, .. } = self.sizes;
        [self.heads * self.sizes.head_dim(), self.heads * (plain + value)]
    }

    /// Returns the width of values without padding.
    pub fn value_width(self) -> usize {
        self.heads * self.sizes.value
    }

    /// Calls `move_part` for each part of `[q | k | v]` that is not shared among heads. The arguments are the source (0: queries, 1: keys and
    /// values), the runs in the source, the runs in `[q | k | v]`, and the width.
    fn each_part(self, mut move_part: impl FnMut(usize, ColumnRuns, ColumnRuns, usize) -> Result<()>) -> Result<()> {
        let LatentSizes { plain, rotated, value, .. } = self.sizes;
        let (heads, dim, of_kv) = (self.heads, self.sizes.head_dim(), plain + value);
        move_part(0, runs(plain, dim), runs(0, dim), rotated)?;
        move_part(0, runs(0, dim), runs(rotated, dim), plain)?;
        move_part(1, runs(0, of_kv), runs(heads * dim + rotated, dim), plain)?;
        move_part(1, runs(plain, of_kv), runs(2 * heads * dim, dim), value)
    }

    /// Returns the runs of the rotated parts of keys in `[q | k | v]`.
    fn rotated_keys(self) -> ColumnRuns {
        runs(self.heads * self.sizes.head_dim(), self.sizes.head_dim())
    }

    /// Returns `[q | k | v]` from queries, keys and values. `rotated` is written to the first `sharing` keys. The rotated part of the other keys is
    /// zero.
    pub fn assemble(self, [queries, kv, rotated]: [&Tensor; 3], sharing: usize) -> Result<Tensor> {
        let width = 3 * self.heads * self.sizes.head_dim();
        let mut qkv = Tensor::zeros(queries.device(), &[queries.shape()[0], width], queries.dtype())?;
        let sources = [queries, kv];
        self.each_part(|at, from, to, width| Ok(move_columns(sources[at], from, &mut qkv, to, self.heads, width)?))?;
        move_columns(rotated, runs(0, 0), &mut qkv, self.rotated_keys(), sharing, self.sizes.rotated)?;
        Ok(qkv)
    }

    /// Splits `qkv` into the parts that [`Heads::assemble`] takes. The last part is the sum of the rotated parts of the first `summed` keys.
    pub fn disassemble(self, qkv: &Tensor, summed: usize) -> Result<[Tensor; 3]> {
        let empty = |width| Tensor::empty(qkv.device(), &[qkv.shape()[0], width], qkv.dtype());
        let [queries, kv] = self.widths();
        let mut parts = [empty(queries)?, empty(kv)?];
        self.each_part(|at, of_part, of_qkv, width| {
            Ok(move_columns(qkv, of_qkv, &mut parts[at], of_part, self.heads, width)?)
        })?;
        let [queries, kv] = parts;
        Ok([queries, kv, sum_columns(qkv, self.rotated_keys(), summed, self.sizes.rotated)?])
    }

    /// Returns the values `[T, H·D_v]` of the output of attention, without padding.
    pub fn own_values(self, o: &Tensor) -> Result<Tensor> {
        let mut own = Tensor::empty(o.device(), &[o.shape()[0], self.value_width()], o.dtype())?;
        let [from, to] = [self.sizes.head_dim(), self.sizes.value].map(|step| runs(0, step));
        move_columns(o, from, &mut own, to, self.heads, self.sizes.value)?;
        Ok(own)
    }

    /// Returns the gradient by the output of attention, from the gradient by the result of [`Heads::own_values`].
    pub fn padded_values(self, d_o: &Tensor) -> Result<Tensor> {
        let width = self.heads * self.sizes.head_dim();
        let mut padded = Tensor::zeros(d_o.device(), &[d_o.shape()[0], width], d_o.dtype())?;
        let [from, to] = [self.sizes.value, self.sizes.head_dim()].map(|step| runs(0, step));
        move_columns(d_o, from, &mut padded, to, self.heads, self.sizes.value)?;
        Ok(padded)
    }
}
