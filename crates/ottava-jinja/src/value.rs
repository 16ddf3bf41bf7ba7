//! Values of templates. Their types are Python's types.

use std::sync::Arc;

use num_bigint::BigInt;

/// The marks around the text of `{% generation %}` blocks: two code points that Unicode reserves for internal use. Texts must not have them.
pub const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// A value of a template. Lists and dicts never change, as in the sandbox of transformers, but namespaces do.
#[derive(Clone, Debug)]
pub enum Value {
    /// A missing variable, field or item. The text is the error that using it raises.
    Undefined(Arc<str>),
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer that fits in `i64`.
    Int(i64),
    /// An integer beyond `i64`.
    Big(Arc<BigInt>),
    /// A float.
    Float(f64),
    /// A text.
    Str(Arc<str>),
    /// A list.
    List(Arc<Seq>),
    /// A tuple.
    Tuple(Arc<Seq>),
    /// A dict.
    Dict(Arc<Dict>),
    /// A view of items that cannot be indexed, such as the result of the filter `map`.
    View(Arc<View>),
    /// A method, and its object.
    Method(Arc<(Value, Arc<str>)>),
    /// A global function, by its name.
    Function(&'static str),
    /// A macro, a namespace or another object of a rendering, by its number.
    Object(usize),
}

/// The items of a list or tuple.
#[derive(Debug)]
pub struct Seq {
    pub(crate) items: Vec<Value>,
    /// The nesting depth of lists and dicts, including this one.
    depth: usize,
}

/// The entries of a dict in the order of insertion. Each key occurs once.
#[derive(Debug)]
pub struct Dict {
    pub(crate) entries: Vec<(Value, Value)>,
    depth: usize,
}

/// Items that are a special object in Python.
#[derive(Debug)]
pub struct View {
    pub(crate) kind: ViewKind,
    pub(crate) seq: Seq,
}

/// The Python object of a view.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ViewKind {
    /// A generator, which has no length and is always true.
    Generator,
    Keys,
    Values,
    Items,
    /// A range, which has a length and can be indexed. The text is Python's `repr`.
    Range(String),
}

impl Seq {
    pub(crate) fn new(items: Vec<Value>) -> Seq {
        let depth = 1 + items.iter().map(Value::depth).max().unwrap_or(0);
        Seq { items, depth }
    }
}

impl Dict {
    pub(crate) fn new(entries: Vec<(Value, Value)>) -> Dict {
        let depth = 1 + entries.iter().map(|(key, value)| key.depth().max(value.depth())).max().unwrap_or(0);
        Dict { entries, depth }
    }

    /// Returns the value of a key that is a text.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.entries.iter().find(|(known, _)| known.as_str() == Some(key)).map(|(_, value)| value)
    }
}

impl Value {
    /// Creates a text.
    pub fn text(text: impl Into<Arc<str>>) -> Value {
        Value::Str(text.into())
    }

    pub(crate) fn depth(&self) -> usize {
        match self {
            Value::List(seq) | Value::Tuple(seq) => seq.depth,
            Value::Dict(dict) => dict.depth,
            Value::View(view) => view.seq.depth,
            Value::Method(method) => 1 + method.0.depth(),
            _ => 0,
        }
    }

    pub(crate) fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the items of a list, tuple or view.
    pub(crate) fn items(&self) -> Option<&[Value]> {
        match self {
            Value::List(seq) | Value::Tuple(seq) => Some(&seq.items),
            Value::View(view) => Some(&view.seq.items),
            _ => None,
        }
    }

    pub(crate) fn is_undefined(&self) -> bool {
        matches!(self, Value::Undefined(_))
    }

    /// Whether the value is true in an `if`.
    pub(crate) fn is_true(&self) -> bool {
        match self {
            Value::Undefined(_) | Value::None => false,
            Value::Bool(value) => *value,
            Value::Int(value) => *value != 0,
            Value::Float(value) => *value != 0.0,
            Value::Str(text) => !text.is_empty(),
            Value::List(seq) | Value::Tuple(seq) => !seq.items.is_empty(),
            Value::Dict(dict) => !dict.entries.is_empty(),
            Value::View(view) => view.kind == ViewKind::Generator || !view.seq.items.is_empty(),
            Value::Big(_) | Value::Method(_) | Value::Function(_) | Value::Object(_) => true,
        }
    }

    /// Returns the name of the value's class in Python.
    pub(crate) fn class(&self) -> &'static str {
        match self {
            Value::Undefined(_) => "Undefined",
            Value::None => "NoneType",
            Value::Bool(_) => "bool",
            Value::Int(_) | Value::Big(_) => "int",
            Value::Float(_) => "float",
            Value::Str(_) => "str",
            Value::List(_) => "list",
            Value::Tuple(_) => "tuple",
            Value::Dict(_) => "dict",
            Value::View(view) => match view.kind {
                ViewKind::Generator => "generator",
                ViewKind::Keys => "dict_keys",
                ViewKind::Values => "dict_values",
                ViewKind::Items => "dict_items",
                ViewKind::Range(_) => "range",
            },
            Value::Method(_) => "method",
            Value::Function(_) => "function",
            Value::Object(_) => "object",
        }
    }
}
