//! Values of pickles.

/// The index of a node. It has 32 bits because a node may take only one byte of a file.
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
    /// Bytes, or an integer of more than 64 bits. No reader needs their values.
    Bytes,
    /// A list, tuple or set.
    List(Vec<Id>),
    /// Keys and values, in their order.
    Dict(Vec<(Id, Id)>),
    /// A class or function, such as `collections.OrderedDict`.
    Global(String),
    /// A call of a class or function with these arguments, and the state that was set afterwards.
    Call(Id, Id, Option<Id>),
    /// An object outside the pickle.
    Persistent(Id),
}
