//! The limits of a rendering: steps, bytes of values, and nesting depth of values.
//!
//! Every value that a template can make grow is created here. Sizes are checked before memory is allocated.

use std::cell::Cell;
use std::sync::Arc;

use crate::error::{Result, fail};
use crate::value::{Dict, Seq, Value, View, ViewKind};

/// The maximum number of steps of a rendering: expressions, items and statements. A conversation takes some tens of steps per message.
const MAX_STEPS: u64 = 20_000_000;

/// The maximum number of bytes of all values that a rendering creates.
const MAX_BYTES: u64 = 512 << 20;

/// The maximum length of a text in bytes.
const MAX_TEXT_BYTES: usize = 64 << 20;

/// The maximum depth of nested lists and dicts.
const MAX_NESTING: usize = 200;

/// The number of bytes of a list's item.
const ITEM_BYTES: usize = size_of::<Value>();

/// The number of text bytes that are compared, searched or copied in the time of one step.
const BYTES_PER_STEP: usize = 32;

/// The limits of a rendering, and the amounts used so far.
pub(crate) struct Limits {
    most_steps: u64,
    most_bytes: u64,
    steps: Cell<u64>,
    bytes: Cell<u64>,
    /// Whether an undefined value that is used is an error.
    is_strict: bool,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits::new(MAX_STEPS, MAX_BYTES)
    }
}

impl Limits {
    pub(crate) fn new(most_steps: u64, most_bytes: u64) -> Limits {
        Limits { most_steps, most_bytes, steps: Cell::new(0), bytes: Cell::new(0), is_strict: false }
    }

    /// Returns the same limits for a rendering in which an undefined value that is used is an error, if `is_strict`.
    pub(crate) fn strict(self, is_strict: bool) -> Limits {
        Limits { is_strict, ..self }
    }

    /// Errors for an undefined value if the rendering is strict.
    pub(crate) fn expect_defined(&self, value: &Value) -> Result<()> {
        match value {
            Value::Undefined(why) if self.is_strict => fail(why.to_string()),
            _ => Ok(()),
        }
    }

    /// Counts `steps`. Errors if the rendering has taken too many steps.
    pub(crate) fn steps(&self, steps: usize) -> Result<()> {
        self.steps.set(self.steps.get().saturating_add(steps as u64));
        match self.steps.get() > self.most_steps {
            true => fail(format!("it takes more than {} steps", self.most_steps)),
            false => Ok(()),
        }
    }

    /// Counts the work on `bytes` bytes of text.
    pub(crate) fn work(&self, bytes: usize) -> Result<()> {
        self.steps(1 + bytes / BYTES_PER_STEP)
    }

    /// Counts `bytes` that will be allocated.
    fn take(&self, bytes: usize) -> Result<()> {
        self.bytes.set(self.bytes.get().saturating_add(bytes as u64));
        match self.bytes.get() > self.most_bytes {
            true => fail(format!("it makes more than {} MiB of values", self.most_bytes >> 20)),
            false => self.work(bytes),
        }
    }

    /// Counts a text of `bytes` bytes that will be created.
    pub(crate) fn room_for_text(&self, bytes: usize) -> Result<()> {
        check_text(bytes)?;
        self.take(bytes)
    }

    /// Counts a list of `items` items that will be created.
    pub(crate) fn room_for_items(&self, items: usize) -> Result<()> {
        self.take(items.saturating_mul(ITEM_BYTES))
    }

    /// Creates a text. It must be at most a constant factor longer than its sources.
    pub(crate) fn text(&self, text: impl Into<Arc<str>>) -> Result<Value> {
        let text = text.into();
        self.room_for_text(text.len())?;
        Ok(Value::Str(text))
    }

    pub(crate) fn list(&self, items: Vec<Value>) -> Result<Value> {
        Ok(Value::List(Arc::new(self.seq(items)?)))
    }

    pub(crate) fn tuple(&self, items: Vec<Value>) -> Result<Value> {
        Ok(Value::Tuple(Arc::new(self.seq(items)?)))
    }

    pub(crate) fn view(&self, kind: ViewKind, items: Vec<Value>) -> Result<Value> {
        Ok(Value::View(Arc::new(View { kind, seq: self.seq(items)? })))
    }

    pub(crate) fn dict(&self, entries: Vec<(Value, Value)>) -> Result<Value> {
        self.room_for_items(2 * entries.len())?;
        let value = Value::Dict(Arc::new(Dict::new(entries)));
        check_nesting(&value).map(|()| value)
    }

    /// Creates the method `name` of `object`.
    pub(crate) fn method(&self, object: Value, name: &Arc<str>) -> Result<Value> {
        self.take(2 * ITEM_BYTES)?;
        let value = Value::Method(Arc::new((object, name.clone())));
        check_nesting(&value).map(|()| value)
    }

    fn seq(&self, items: Vec<Value>) -> Result<Seq> {
        self.room_for_items(items.len())?;
        let value = Seq::new(items);
        let deepest = value.items.iter().map(Value::depth).max().unwrap_or(0);
        match deepest < MAX_NESTING {
            true => Ok(value),
            false => fail(nested()),
        }
    }
}

fn check_nesting(value: &Value) -> Result<()> {
    match value.depth() > MAX_NESTING {
        true => fail(nested()),
        false => Ok(()),
    }
}

fn nested() -> String {
    format!("it nests more than {MAX_NESTING} lists and dicts within each other")
}

/// Errors if a text has more bytes than a rendering may create.
pub(crate) fn check_text(bytes: usize) -> Result<()> {
    match bytes > MAX_TEXT_BYTES {
        true => fail(format!("it makes a text of more than {} MiB", MAX_TEXT_BYTES >> 20)),
        false => Ok(()),
    }
}

/// Writes a text piece by piece within the limits.
pub(crate) struct Writer<'l> {
    text: String,
    limits: &'l Limits,
}

impl<'l> Writer<'l> {
    pub(crate) fn new(limits: &'l Limits) -> Writer<'l> {
        Writer { text: String::new(), limits }
    }

    pub(crate) fn push(&mut self, text: &str) -> Result<()> {
        check_text(self.text.len().saturating_add(text.len()))?;
        self.limits.take(text.len())?;
        self.text.push_str(text);
        Ok(())
    }

    /// Appends `text` `times` times.
    pub(crate) fn repeat(&mut self, text: &str, times: usize) -> Result<()> {
        let bytes = text.len().saturating_mul(times);
        check_text(self.text.len().saturating_add(bytes))?;
        self.limits.take(bytes)?;
        self.text.extend(std::iter::repeat_n(text, if text.is_empty() { 0 } else { times }));
        Ok(())
    }

    pub(crate) fn limits(&self) -> &'l Limits {
        self.limits
    }

    pub(crate) fn finish(self) -> String {
        self.text
    }

    /// Returns the text as a value. Its bytes are already counted.
    pub(crate) fn value(self) -> Value {
        Value::text(self.text)
    }
}
