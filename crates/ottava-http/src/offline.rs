//! What forbids connections: the environment variable `OTTAVA_OFFLINE`, or the flag `--offline` of the command line.

use std::sync::atomic::{AtomicBool, Ordering};

/// The environment variable that forbids connections.
const VARIABLE: &str = "OTTAVA_OFFLINE";

static FORBIDDEN: AtomicBool = AtomicBool::new(false);

/// Forbids connections from now on, as `--offline` does.
pub fn forbid() {
    FORBIDDEN.store(true, Ordering::Relaxed);
}

/// Returns the name of what forbids connections; `None` if connections are allowed.
pub fn reason() -> Option<&'static str> {
    match FORBIDDEN.load(Ordering::Relaxed) {
        true => Some("--offline"),
        false => is_set(VARIABLE).then_some(VARIABLE),
    }
}

/// Whether the environment variable `name` has another value than `0`, `false`, `no`, `off` or nothing.
pub fn is_set(name: &str) -> bool {
    let value = std::env::var(name).unwrap_or_default().to_ascii_lowercase();
    !["", "0", "false", "no", "off"].contains(&value.as_str())
}
