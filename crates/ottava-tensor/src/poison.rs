//! Fills new memory, whose content is undefined, so that tests detect reads of it.
//!
//! With `OTTAVA_POISON` in the environment, memory is filled with [`POISON`] when it is allocated, on every device. A test run then detects reads of
//! unwritten memory. Without poison, such memory is zero on the CPU and has old content on a GPU.

use std::sync::OnceLock;

/// A byte that gives NaN as floats and codes, and -1 as integers.
pub(crate) const POISON: u8 = 0xff;

/// Returns whether new memory is poisoned.
pub(crate) fn poisons() -> bool {
    #[cfg(test)]
    if IS_SUSPENDED.get() {
        return false;
    }
    static POISONS: OnceLock<bool> = OnceLock::new();
    *POISONS.get_or_init(|| std::env::var_os("OTTAVA_POISON").is_some_and(|value| !value.is_empty()))
}

#[cfg(test)]
thread_local! {
    static IS_SUSPENDED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Runs `work` without poison. With poison, filling new memory would keep a kernel from starting early.
#[cfg(test)]
pub(crate) fn without_poison<T>(work: impl FnOnce() -> T) -> T {
    IS_SUSPENDED.set(true);
    let outcome = work();
    IS_SUSPENDED.set(false);
    outcome
}
