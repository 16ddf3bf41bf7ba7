//! JSON that is written piece by piece as text, so an answer takes the memory of its text and not the memory of a tree of values.

use serde::Serialize;

/// Formats a value as JSON.
pub fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("it is plain data")
}

/// A JSON list that is written entry by entry.
#[derive(Default)]
pub struct ListText(String);

impl ListText {
    /// Adds an entry, which is JSON text.
    pub fn push(&mut self, entry: &str) {
        self.0.push(if self.0.is_empty() { '[' } else { ',' });
        self.0.push_str(entry);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn json(mut self) -> String {
        self.0.push_str(if self.0.is_empty() { "[]" } else { "]" });
        self.0
    }
}

/// A JSON object that is written field by field. One field may be most of an answer, so the object reserves only the memory that its fields need.
pub struct ObjectText(String);

impl ObjectText {
    pub fn new() -> ObjectText {
        ObjectText(String::new())
    }

    /// Adds a field with a value that is not JSON text yet.
    pub fn field(self, name: &str, value: &impl Serialize) -> ObjectText {
        self.json(name, &text(value))
    }

    /// Adds a field whose value is JSON text.
    pub fn json(mut self, name: &str, value: &str) -> ObjectText {
        let name = text(&name);
        // Three more bytes: a brace or comma, a colon, and the brace at the end.
        self.0.reserve_exact(name.len() + value.len() + 3);
        self.0.push(if self.0.is_empty() { '{' } else { ',' });
        self.0 += &name;
        self.0.push(':');
        self.0 += value;
        self
    }

    pub fn end(self) -> String {
        if self.0.is_empty() { "{}".into() } else { self.0 + "}" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn texts_are_the_json_of_their_parts() {
        let mut list = ListText::default();
        assert_eq!(ListText::default().json(), "[]");
        [1, 2].iter().for_each(|number| list.push(&text(number)));
        let object = ObjectText::new().field("a \"b\"", &"c").json("list", &list.json()).end();
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&object).unwrap(),
            json!({"a \"b\"": "c", "list": [1, 2]})
        );
        assert_eq!(ObjectText::new().end(), "{}");
        let long = ObjectText::new().field("text", &"x".repeat(10_000)).end();
        assert!(long.capacity() < long.len() + 16, "{} bytes for {}", long.capacity(), long.len());
    }
}
