//! New memory without defined content, made visible to tests.
//!
//! With `OTTAVA_POISON` in the environment, memory is filled with [`POISON`] when it is allocated, on every device. So a test run shows reads of
//! what nobody has written, which on the CPU would otherwise be zeros, and on a GPU whatever was there before.

use std::sync::OnceLock;

/// A byte that makes NaN of floats and codes, and -1 of integers.
pub(crate) const POISON: u8 = 0xff;

/// Whether new memory is poisoned.
pub(crate) fn poisons() -> bool {
    static POISONS: OnceLock<bool> = OnceLock::new();
    *POISONS.get_or_init(|| std::env::var_os("OTTAVA_POISON").is_some_and(|value| !value.is_empty()))
}
