//! JSON that is written piece by piece as text: an answer takes the memory of its text, and not that of a tree of values.

use serde::Serialize;

/// A value as JSON.
pub fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("it is plain data")
}

/// A list that grows.
#[derive(Default)]
pub struct ListText(String);

impl ListText {
    /// Adds an entry that is JSON.
    pub fn push(&mut self, entry: &str) {
        if !self.0.is_empty() {
            self.0.push(',');
        }
        self.0.push_str(entry);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn json(&self) -> String {
        format!("[{}]", self.0)
    }
}

/// An object that gets its fields one by one.
pub struct ObjectText(String);

impl ObjectText {
    pub fn new() -> ObjectText {
        ObjectText(String::new())
    }

    /// Adds a field.
    pub fn field(self, name: &str, value: &impl Serialize) -> ObjectText {
        self.json(name, &text(value))
    }

    /// Adds a field whose value is JSON.
    pub fn json(mut self, name: &str, value: &str) -> ObjectText {
        self.0.push(if self.0.is_empty() { '{' } else { ',' });
        self.0 += &text(&name);
        self.0.push(':');
        self.0 += value;
        self
    }

    pub fn end(self) -> String {
        if self.0.is_empty() { "{}".into() } else { self.0 + "}" }
    }
}
