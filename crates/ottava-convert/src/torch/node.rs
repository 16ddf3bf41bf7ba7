//! Values of pickles.

/// The place of a node; of 32 bits, since a node may take one byte of a file.
pub type Id = u32;

/// A value of a pickle.
#[derive(Clone, Debug, PartialEq)]
pub enum Node {
    /// `None`.
    None,
    /// True or false.
    Bool(bool),
    /// An integer of up to 64 bits.
    Int(i64),
    /// A floating-point number.
    Float(f64),
    /// Text.
    Text(String),
    /// Bytes, or an integer of more than 64 bits: no reader needs either.
    Bytes,
    /// A list, tuple or set.
    List(Vec<Id>),
    /// Keys and values, in their order.
    Dict(Vec<(Id, Id)>),
    /// A class or function, as `collections.OrderedDict`.
    Global(String),
    /// A call of a class or function with these arguments, and the state that was then set.
    Call(Id, Id, Option<Id>),
    /// An object outside of the pickle.
    Persistent(Id),
}
