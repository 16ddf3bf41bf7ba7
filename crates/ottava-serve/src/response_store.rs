//! The responses that later requests can name. They are in memory, and the oldest ones are dropped.

use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

/// The maximum number of responses, and the maximum length of all of them as JSON.
const MOST: usize = 4096;
const MOST_BYTES: usize = 64 << 20;

/// A stored response.
pub struct Stored {
    /// The response as clients got it.
    pub response: Value,
    /// The conversation with the answer, as messages of a chat.
    pub messages: Vec<Value>,
    bytes: usize,
}

/// The stored responses.
#[derive(Default)]
pub struct Store(Mutex<Responses>);

#[derive(Default)]
struct Responses {
    by_id: HashMap<String, Arc<Stored>>,
    /// The ids in the order in which they were stored. Some may have been removed.
    order: VecDeque<String>,
    bytes: usize,
}

impl Store {
    /// Stores a response and its conversation.
    pub fn insert(&self, id: String, response: Value, messages: Vec<Value>) {
        let messages_bytes: usize = messages.iter().map(|message| message.to_string().len()).sum();
        let bytes = response.to_string().len() + messages_bytes;
        let mut responses = self.0.lock().expect("no thread panics with it");
        responses.bytes += bytes;
        responses.order.push_back(id.clone());
        responses.by_id.insert(id, Arc::new(Stored { response, messages, bytes }));
        while responses.bytes > MOST_BYTES || responses.order.len() > MOST {
            let Some(oldest) = responses.order.pop_front() else { break };
            responses.remove(&oldest);
        }
    }

    /// Returns the response with this id.
    pub fn get(&self, id: &str) -> Option<Arc<Stored>> {
        self.0.lock().expect("no thread panics with it").by_id.get(id).cloned()
    }

    /// Removes the response with this id. Returns whether there was one.
    pub fn remove(&self, id: &str) -> bool {
        self.0.lock().expect("no thread panics with it").remove(id)
    }
}

impl Responses {
    fn remove(&mut self, id: &str) -> bool {
        let removed = self.by_id.remove(id);
        self.bytes -= removed.as_ref().map_or(0, |stored| stored.bytes);
        removed.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_oldest_responses_are_dropped() {
        let store = Store::default();
        let long = "x".repeat(MOST_BYTES / 4);
        for id in ["a", "b", "c", "d", "e"] {
            store.insert(id.into(), json!(long), Vec::new());
        }
        let has = |id| store.get(id).is_some();
        assert_eq!(["a", "b", "c", "d", "e"].map(has), [false, false, true, true, true]);
        assert!(store.remove("d") && !store.remove("d"));
        store.insert("f".into(), json!(long), Vec::new());
        assert!(["c", "e", "f"].into_iter().all(has));
        for number in 0..MOST {
            store.insert(number.to_string(), json!(1), Vec::new());
        }
        assert!(!has("f") && has("0"));
    }
}
