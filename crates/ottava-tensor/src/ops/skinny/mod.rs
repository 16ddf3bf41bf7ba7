//! Matrix products with few rows on a GPU, in inference, which take the time of reading the weights.

mod cuda;

pub(super) use cuda::Skinny;
pub(crate) use cuda::{SOURCE, VARIANTS};
