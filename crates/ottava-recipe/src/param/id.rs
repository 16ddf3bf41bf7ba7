//! The places of parameters in their model.

/// A unit of a model, numbered in the order of forward: the embedding, learned positions, each block, the last norm and the head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitId(pub usize);

/// A parameter's place in its model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamId {
    /// Its unit.
    pub unit: UnitId,
    /// Its number in the unit, in the order in which the unit was built.
    pub index: usize,
}
