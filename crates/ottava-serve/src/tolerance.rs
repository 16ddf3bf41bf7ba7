//! Fields of requests that have no effect here. Other servers ignore unknown fields, and clients send many of them.

use crate::error::{ApiError, Result};
use std::collections::BTreeSet;
use std::sync::Mutex;

/// The maximum number of names that are remembered, and the maximum length of a name.
const MOST_NAMES: usize = 1024;
const MOST_BYTES: usize = 60;

/// Ignores or refuses fields without effect.
#[derive(Default)]
pub struct Tolerance {
    /// Whether such fields are refused.
    is_strict: bool,
    /// The fields that were logged.
    logged: Mutex<BTreeSet<String>>,
}

impl Tolerance {
    /// Refuses fields without effect if `is_strict`.
    pub fn new(is_strict: bool) -> Tolerance {
        Tolerance { is_strict, logged: Mutex::default() }
    }

    /// Ignores the field `name`. It has no effect because it `is_such`, as in "is no field of this request". The log tells each field once.
    ///
    /// Errors if the server is strict.
    pub fn ignore(&self, name: &str, is_such: &str) -> Result<()> {
        self.ignore_part(name, is_such).map_err(|error| error.within(&shown(name)))
    }

    /// Ignores a part of a field, such as a keyword of a schema, as [`Self::ignore`] does. An error names no field.
    pub fn ignore_part(&self, name: &str, is_such: &str) -> Result<()> {
        let name = shown(name);
        if self.is_strict {
            let message = format!("`{name}` {is_such}; leave it out, or start the server without --strict");
            return Err(ApiError::invalid(message));
        }
        let mut logged = self.logged.lock().expect("no thread panics with it");
        if logged.len() < MOST_NAMES && logged.insert(name.clone()) {
            tracing::warn!("requests have the field `{name}`, which {is_such}; it is ignored");
        }
        Ok(())
    }
}

/// A name as it is logged.
fn shown(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(MOST_BYTES).collect()
}
