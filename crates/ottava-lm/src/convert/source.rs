//! What a model of another program gives for its folder.

use std::sync::Arc;

/// A weight of the folder, and the tensor that holds it.
pub struct Weight {
    /// Its name in the folder.
    pub name: String,
    /// Its name in the source.
    pub stored: String,
    /// Its shape, row-major, in both.
    pub shape: Vec<usize>,
    /// The number of heads, where rows of each are stored in another order.
    pub rotary_heads: Option<usize>,
}

/// Files of the folder other than the weights, by name.
pub type Files = Vec<(&'static str, Arc<[u8]>)>;
