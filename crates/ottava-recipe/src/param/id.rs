//! The positions of parameters in a model.

/// A unit of a model, numbered in the order of forward: the embedding, learned positions, each block, and the last norm with the head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitId(pub usize);

/// The position of a parameter in its model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamId {
    /// The unit of the parameter.
    pub unit: UnitId,
    /// The index in the unit, in the order in which the unit was built.
    pub index: usize,
}
