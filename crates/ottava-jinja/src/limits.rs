//! Limits of a rendering: steps, bytes of values, and how deep values are nested.
//!
//! Every value that a template can make grow is built here, and sizes are checked before memory is taken.

use std::cell::Cell;
use std::sync::Arc;

use crate::error::{Result, fail};
use crate::value::{Dict, Seq, Value, View, ViewKind};

/// Steps of a rendering: expressions, items and statements; a conversation takes some tens per message.
const MAX_STEPS: u64 = 20_000_000;

/// Bytes of all values that a rendering makes.
const MAX_BYTES: u64 = 512 << 20;

/// The longest text, in bytes.
const MAX_TEXT_BYTES: usize = 64 << 20;

/// Lists and dicts within each other.
const MAX_NESTING: usize = 200;

/// Bytes of an item of a list.
const ITEM_BYTES: usize = size_of::<Value>();

/// Bytes of a text that are compared, searched or copied in the time of one step.
const BYTES_PER_STEP: usize = 32;

/// What a rendering may use, and what it has used so far.
pub(crate) struct Limits {
    most_steps: u64,
    most_bytes: u64,
    steps: Cell<u64>,
    bytes: Cell<u64>,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits::new(MAX_STEPS, MAX_BYTES)
    }
}

impl Limits {
    pub(crate) fn new(most_steps: u64, most_bytes: u64) -> Limits {
        Limits { most_steps, most_bytes, steps: Cell::new(0), bytes: Cell::new(0) }
    }

    /// Counts `steps`. Errors when the rendering has taken too many.
    pub(crate) fn steps(&self, steps: usize) -> Result<()> {
        self.steps.set(self.steps.get().saturating_add(steps as u64));
        match self.steps.get() > self.most_steps {
            true => fail(format!("it takes more than {} steps", self.most_steps)),
            false => Ok(()),
        }
    }

    /// Counts work on so many bytes of text.
    pub(crate) fn work(&self, bytes: usize) -> Result<()> {
        self.steps(1 + bytes / BYTES_PER_STEP)
    }

    /// Counts bytes that are about to be allocated.
    fn take(&self, bytes: usize) -> Result<()> {
        self.bytes.set(self.bytes.get().saturating_add(bytes as u64));
        match self.bytes.get() > self.most_bytes {
            true => fail(format!("it makes more than {} MiB of values", self.most_bytes >> 20)),
            false => self.work(bytes),
        }
    }

    /// Counts a text of so many bytes that is about to be made.
    pub(crate) fn room_for_text(&self, bytes: usize) -> Result<()> {
        check_text(bytes)?;
        self.take(bytes)
    }

    /// Counts a list of so many items that is about to be made.
    pub(crate) fn room_for_items(&self, items: usize) -> Result<()> {
        self.take(items.saturating_mul(ITEM_BYTES))
    }

    /// A text that is longer than its sources by a constant factor at most.
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

    /// `object`'s method `name`.
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

/// Errors for a text of more bytes than a rendering may make.
pub(crate) fn check_text(bytes: usize) -> Result<()> {
    match bytes > MAX_TEXT_BYTES {
        true => fail(format!("it makes a text of more than {} MiB", MAX_TEXT_BYTES >> 20)),
        false => Ok(()),
    }
}

/// A text that grows piece by piece within the limits.
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

    /// Appends `text` so many times.
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

    /// The text as a value, whose bytes are counted already.
    pub(crate) fn value(self) -> Value {
        Value::text(self.text)
    }
}
