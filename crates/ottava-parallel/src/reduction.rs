//! The format in which ranks send gradients to each other.

/// The format in which ranks send gradients of matrices to each other. Gradients of norms and biases are always sent in the type in which
/// backward accumulates them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReduceFormat {
    /// The type in which backward accumulates the gradients.
    #[default]
    Stored,
    /// E4M3 codes with one scale per 128 values. Ranks add the values in F32.
    Float8 {
        /// Whether a rank stores the cast errors, and adds them to the gradients that it sends next.
        feedback: bool,
    },
}
