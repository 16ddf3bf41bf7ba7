//! What a key of another trainer can mean.

/// The meaning of another trainer's key.
pub(crate) enum Meaning {
    /// Another name of this key.
    Is(&'static str),
    /// This key with other values. A value that is not listed stays as it is.
    Values(&'static str, &'static [(&'static str, Answer)]),
    /// Accepted at these values, which are what Ottava does; refused at others, with the reason.
    Only(&'static [&'static str], &'static str),
    /// The key needs no translation, for this reason.
    Needless(&'static str),
    /// Refused, with the reason.
    Not(&'static str),
}

/// What another trainer's value means.
pub(crate) enum Answer {
    /// This value, as TOML writes it.
    As(&'static str),
    /// What Ottava does, whatever the key is.
    Nothing,
    /// What Ottava does without the key: a value that another answer of the row gives is reset.
    Unset,
    /// What Ottava does without the key: any value is reset.
    Default,
    /// Refused, with the reason.
    Never(&'static str),
}

/// A key and its meaning. A key with a dot is one in a table of that name; a `*` at the end stands for any ending.
pub(crate) type Row = (&'static str, Meaning);

/// No value at all.
pub(crate) const NONE: &[&str] = &[];
