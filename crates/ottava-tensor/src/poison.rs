//! New memory without defined content, made visible to tests.
//!
//! With `OTTAVA_POISON` in the environment, memory is filled with [`POISON`] when it is allocated, on every device. So a test run shows reads of
//! what nobody has written, which on the CPU would otherwise be zeros, and on a GPU whatever was there before.

use std::sync::OnceLock;

/// A byte that makes NaN of floats and codes, and -1 of integers.
pub(crate) const POISON: u8 = 0xff;

/// Whether new memory is poisoned.
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

/// Runs `work` without poison. A kernel does not start early behind the filling of new memory.
#[cfg(test)]
pub(crate) fn without_poison<T>(work: impl FnOnce() -> T) -> T {
    IS_SUSPENDED.set(true);
    let outcome = work();
    IS_SUSPENDED.set(false);
    outcome
}
