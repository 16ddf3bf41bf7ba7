//! Where attention takes its keys and values from: two projections, one projection, or an earlier layer.

use ottava_common::error::{Error, Result};
use ottava_recipe::param::Builder;

/// The source of the keys and values of an attention layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeysAndValues {
    /// A projection to keys and a projection to values.
    #[default]
    Projections,
    /// One projection, whose output is the keys and the values. Norms and rotary positions then make them differ.
    OneProjection,
    /// The keys and values of the attention of this block, which is an earlier block.
    OfBlock(usize),
}

impl KeysAndValues {
    /// Returns the numbers of heads that the layer projects to, of queries, keys and values.
    pub(super) fn projected(self, heads: usize, kv_heads: usize) -> Vec<usize> {
        match self {
            KeysAndValues::Projections => vec![heads, kv_heads, kv_heads],
            KeysAndValues::OneProjection => vec![heads, kv_heads],
            KeysAndValues::OfBlock(_) => vec![heads],
        }
    }
}

/// Returns the number of the attention layer whose keys and values a new layer reads, in the model that is built.
///
/// Errors if the layer's block is not built here, because ranks of a pipeline divide the layers.
pub(super) fn lender(build: &Builder, name: &str, source: KeysAndValues) -> Result<Option<usize>> {
    let KeysAndValues::OfBlock(block) = source else { return Ok(None) };
    let found = build.description.mixers[0].iter().position(|&of| of == block);
    found.map(Some).ok_or_else(|| {
        Error::Config(format!(
            "`{name}` reads the keys and values of block {block}, which is on another rank of the pipeline; change `parallel.pipeline` (or \
             `parallel.pipeline_stages`) so that both blocks are in one stage, or set `parallel.pipeline` to 1"
        ))
    })
}
