//! Converts panics of the crates tokenizers, arrow and parquet to errors.

use std::cell::Cell;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    /// Whether panics of this thread are caught and not printed.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Calls one of these crates, and returns its errors and panics as text.
pub(super) fn catch_panics<T, E: Display>(call: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                print(panic)
            }
        }));
    });
    GUARDED.set(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    GUARDED.set(false);
    match result {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
            Err(format!("the parser gave up ({text})"))
        }
    }
}
